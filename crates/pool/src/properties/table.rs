//! The table of properties: one line each.

use super::{Definition, Kind, Scope, Settable};

const ON_OFF: Kind = Kind::Choice(&["on", "off"]);
const CACHES: Kind = Kind::Choice(&["all", "none", "metadata"]);
const REDUNDANCY: &str = "this pool keeps one copy of everything";
const ENCRYPTION: &str = "this pool does not encrypt";
const DEDUP: &str = "this pool does not deduplicate";
const VOLUMES: &str = "there are no volumes";
const NO_PROJECTS: &str = "there are no projects, jails or security labels";
const NFS4_ACL: &str = "access control lists are those of POSIX";

const fn figure(
    name: &'static str,
    column: &'static str,
    kind: Kind,
    scope: Scope,
    values: &'static str,
) -> Definition {
    Definition {
        name,
        short: None,
        column,
        kind,
        default: "",
        inherited: false,
        settable: Settable::Never,
        scope,
        values,
    }
}

const fn own(
    name: &'static str,
    column: &'static str,
    kind: Kind,
    default: &'static str,
    values: &'static str,
) -> Definition {
    Definition {
        name,
        short: None,
        column,
        kind,
        default,
        inherited: false,
        settable: Settable::Always,
        scope: Scope::Filesystem,
        values,
    }
}

const fn inherited(
    name: &'static str,
    column: &'static str,
    kind: Kind,
    default: &'static str,
    values: &'static str,
) -> Definition {
    Definition { inherited: true, ..own(name, column, kind, default, values) }
}

const fn fixed(
    name: &'static str,
    column: &'static str,
    kind: Kind,
    default: &'static str,
    values: &'static str,
) -> Definition {
    Definition { settable: Settable::AtCreation, ..inherited(name, column, kind, default, values) }
}

/// Set at the creation of a dataset, and copied from the parent then: later changes of the parent
/// have no effect.
const fn for_good(
    name: &'static str,
    column: &'static str,
    kind: Kind,
    default: &'static str,
    values: &'static str,
) -> Definition {
    Definition { inherited: false, ..fixed(name, column, kind, default, values) }
}

const fn short(name: &'static str, definition: Definition) -> Definition {
    Definition { short: Some(name), ..definition }
}

const fn unserved(
    name: &'static str,
    column: &'static str,
    why: &'static str,
    harmless: &'static [&'static str],
    default: &'static str,
) -> Definition {
    inherited(name, column, Kind::Unserved(why, harmless), default, "not served")
}

const fn pool(definition: Definition) -> Definition {
    Definition { scope: Scope::Pool, inherited: false, ..definition }
}

/// Properties that the root dataset of a new pool gets unless its creator chooses otherwise. Where
/// the default of the table is another value, older pools keep that one.
///
/// `acltype=off` is the default of OpenZFS (zfsprops(7)): `ls -l` then asks for no access control
/// list, file by file. In older pools it would grant access that their lists deny. With `atime=off`
/// the kernel opens files without a request, and reading a file writes nothing.
pub const OF_NEW_POOLS: &[(&str, &str)] = &[("acltype", "off"), ("atime", "off")];

/// Whether a file system has no state of its own yet: a receive into it was interrupted.
pub const INCONSISTENT: &str = "inconsistent";

/// The properties of datasets, by name.
pub const DATASET_PROPERTIES: &[Definition] = &[
    unserved("aclinherit", "ACLINHERIT", NFS4_ACL, &["restricted", "discard"], "restricted"),
    unserved("aclmode", "ACLMODE", NFS4_ACL, &["discard"], "discard"),
    inherited("acltype", "ACLTYPE", Kind::Choice(&["off", "posix", "posixacl"]), "posix", "off | posix"),
    inherited("atime", "ATIME", ON_OFF, "on", "on | off"),
    short("avail", figure("available", "AVAIL", Kind::Bytes, Scope::Filesystem, "<size>")),
    own("canmount", "CANMOUNT", Kind::Choice(&["on", "off", "noauto"]), "on", "on | off | noauto"),
    for_good(
        "casesensitivity",
        "CASE",
        Kind::Choice(&["sensitive", "insensitive", "mixed"]),
        "sensitive",
        "sensitive | insensitive | mixed",
    ),
    inherited("checksum", "CHECKSUM", Kind::Choice(&["on", "xxh3", "blake3"]), "on", "on | xxh3 | blake3"),
    figure("clones", "CLONES", Kind::Figure, Scope::Snapshot, "<dataset>[,...]"),
    short(
        "compress",
        inherited(
            "compression",
            "COMPRESS",
            Kind::Compression,
            "on",
            "on | off | lz4 | zstd | zstd-[1-19] | zstd-fast | zstd-fast-[1-7]",
        ),
    ),
    short(
        "ratio",
        figure("compressratio", "RATIO", Kind::Figure, Scope::FilesystemAndSnapshot, "<1.00x or higher if compressed>"),
    ),
    unserved("context", "CONTEXT", NO_PROJECTS, &["none"], "none"),
    unserved("copies", "COPIES", REDUNDANCY, &["1"], "1"),
    figure("createtxg", "CREATETXG", Kind::Figure, Scope::All, "<number>"),
    figure("creation", "CREATION", Kind::Figure, Scope::All, "<date>"),
    unserved("dedup", "DEDUP", DEDUP, &["off"], "off"),
    own("defaultgroupobjquota", "DEFAULTGROUPOBJQUOTA", Kind::Count, "none", "<count> | none"),
    own("defaultgroupquota", "DEFAULTGROUPQUOTA", Kind::Limit, "0", "<size> | none"),
    unserved("defaultprojectobjquota", "DEFAULTPROJECTOBJQUOTA", NO_PROJECTS, &["none"], "none"),
    unserved("defaultprojectquota", "DEFAULTPROJECTQUOTA", NO_PROJECTS, &["none"], "none"),
    own("defaultuserobjquota", "DEFAULTUSEROBJQUOTA", Kind::Count, "none", "<count> | none"),
    own("defaultuserquota", "DEFAULTUSERQUOTA", Kind::Limit, "0", "<size> | none"),
    unserved("defcontext", "DEFCONTEXT", NO_PROJECTS, &["none"], "none"),
    figure("defer_destroy", "DEFER_DESTROY", Kind::Figure, Scope::Snapshot, "yes | no"),
    inherited("devices", "DEVICES", ON_OFF, "on", "on | off"),
    inherited(
        "direct",
        "DIRECT",
        Kind::Choice(&["standard", "always", "disabled"]),
        "standard",
        "standard | always | disabled",
    ),
    unserved("dnodesize", "DNSIZE", "attributes have no fixed place", &["legacy", "auto"], "legacy"),
    fixed("encryption", "ENCRYPTION", Kind::Unserved(ENCRYPTION, &["off"]), "off", "off"),
    figure("encryptionroot", "ENCROOT", Kind::Figure, Scope::FilesystemAndSnapshot, "none"),
    inherited("exec", "EXEC", ON_OFF, "on", "on | off"),
    figure("filesystem_count", "FSCOUNT", Kind::Figure, Scope::Filesystem, "<count>"),
    own("filesystem_limit", "FSLIMIT", Kind::Count, "none", "<count> | none"),
    unserved("fscontext", "FSCONTEXT", NO_PROJECTS, &["none"], "none"),
    figure("guid", "GUID", Kind::Figure, Scope::All, "<uint64>"),
    // As in ZFS, `get all` does not show it; replication programs ask for it by name.
    figure(INCONSISTENT, "INCONSISTENT", Kind::Figure, Scope::FilesystemAndSnapshot, "0 | 1"),
    fixed("keyformat", "KEYFORMAT", Kind::Unserved(ENCRYPTION, &["none"]), "none", "none"),
    unserved("keylocation", "KEYLOCATION", ENCRYPTION, &["none"], "none"),
    figure("keystatus", "KEYSTATUS", Kind::Figure, Scope::Filesystem, "none"),
    inherited("logbias", "LOGBIAS", Kind::Choice(&["latency", "throughput"]), "latency", "latency | throughput"),
    short("lrefer", figure("logicalreferenced", "LREFER", Kind::Bytes, Scope::FilesystemAndSnapshot, "<size>")),
    short("lused", figure("logicalused", "LUSED", Kind::Bytes, Scope::FilesystemAndSnapshot, "<size>")),
    unserved("mlslabel", "MLSLABEL", NO_PROJECTS, &["none"], "none"),
    figure("mounted", "MOUNTED", Kind::Figure, Scope::Filesystem, "yes | no"),
    inherited("mountpoint", "MOUNTPOINT", Kind::Mountpoint, "/", "<path> | legacy | none"),
    unserved("nbmand", "NBMAND", "Linux has no mandatory locks", &["off"], "off"),
    for_good(
        "normalization",
        "NORMALIZATION",
        Kind::Choice(&["none", "formC", "formD", "formKC", "formKD"]),
        "none",
        "none | formC | formD | formKC | formKD",
    ),
    figure("objsetid", "OBJSETID", Kind::Figure, Scope::FilesystemAndSnapshot, "<number>"),
    figure("origin", "ORIGIN", Kind::Figure, Scope::Filesystem, "<snapshot>"),
    inherited("overlay", "OVERLAY", ON_OFF, "on", "on | off"),
    inherited("prefetch", "PREFETCH", CACHES, "all", "all | none | metadata"),
    inherited("primarycache", "PRIMARYCACHE", CACHES, "all", "all | none | metadata"),
    own("quota", "QUOTA", Kind::Limit, "0", "<size> | none"),
    short("rdonly", inherited("readonly", "RDONLY", ON_OFF, "off", "on | off")),
    figure("receive_resume_token", "RESUMETOKEN", Kind::Figure, Scope::Filesystem, "<string token>"),
    short("recsize", inherited("recordsize", "RECSIZE", Kind::RecordSize, "131072", "512 to 16M, power of 2")),
    unserved("redundant_metadata", "REDUND_MD", REDUNDANCY, &["none", "all"], "none"),
    figure(
        "refcompressratio",
        "REFRATIO",
        Kind::Figure,
        Scope::FilesystemAndSnapshot,
        "<1.00x or higher if compressed>",
    ),
    short("refer", figure("referenced", "REFER", Kind::Bytes, Scope::All, "<size>")),
    own("refquota", "REFQUOTA", Kind::Limit, "0", "<size> | none"),
    short("refreserv", own("refreservation", "REFRESERV", Kind::Limit, "0", "<size> | none")),
    inherited("relatime", "RELATIME", ON_OFF, "on", "on | off"),
    short("reserv", own("reservation", "RESERV", Kind::Limit, "0", "<size> | none")),
    unserved("rootcontext", "ROOTCONTEXT", NO_PROJECTS, &["none"], "none"),
    unserved("secondarycache", "SECONDARYCACHE", "there are no cache devices", &["all", "none", "metadata"], "all"),
    inherited("setuid", "SETUID", ON_OFF, "on", "on | off"),
    inherited(
        "sharenfs",
        "SHARENFS",
        Kind::ShareNfs,
        "off",
        "on | off | <rw, ro, rw=HOST[:HOST...], ... of exports(5)>",
    ),
    inherited("sharesmb", "SHARESMB", Kind::ShareSmb, "off", "on | off | <name=NAME, ro, guestok=true>"),
    inherited(
        "snapdir",
        "SNAPDIR",
        Kind::Choice(&["hidden", "visible", "disabled"]),
        "hidden",
        "hidden | visible | disabled",
    ),
    inherited("snapdev", "SNAPDEV", Kind::Unserved(VOLUMES, &["hidden"]), "hidden", "hidden"),
    figure("snapshot_count", "SSCOUNT", Kind::Figure, Scope::Filesystem, "<count>"),
    own("snapshot_limit", "SSLIMIT", Kind::Count, "none", "<count> | none"),
    figure("snapshots_changed", "SNAPSHOTS_CHANGED", Kind::Figure, Scope::Filesystem, "<date>"),
    unserved(
        "special_small_blocks",
        "SPECIAL_SMALL_BLOCKS",
        "special devices hold metadata, and files of up to 2048 bytes within it",
        &["0"],
        "0",
    ),
    inherited(
        "sync",
        "SYNC",
        Kind::Choice(&["standard", "always", "disabled"]),
        "standard",
        "standard | always | disabled",
    ),
    figure("type", "TYPE", Kind::Figure, Scope::All, "filesystem | snapshot | bookmark"),
    figure("used", "USED", Kind::Bytes, Scope::FilesystemAndSnapshot, "<size>"),
    short("usedbychildren", figure("usedbychildren", "USEDCHILD", Kind::Bytes, Scope::Filesystem, "<size>")),
    figure("usedbydataset", "USEDDS", Kind::Bytes, Scope::Filesystem, "<size>"),
    figure("usedbyrefreservation", "USEDREFRESERV", Kind::Bytes, Scope::Filesystem, "<size>"),
    figure("usedbysnapshots", "USEDSNAP", Kind::Bytes, Scope::Filesystem, "<size>"),
    figure("userrefs", "USERREFS", Kind::Figure, Scope::Snapshot, "<count>"),
    for_good("utf8only", "UTF8ONLY", ON_OFF, "off", "on | off"),
    unserved("version", "VERSION", "the format belongs to the pool", &["current"], "1"),
    fixed("volblocksize", "VOLBLOCK", Kind::Unserved(VOLUMES, &[]), "-", "not served"),
    unserved("volmode", "VOLMODE", VOLUMES, &["default"], "default"),
    unserved("volsize", "VOLSIZE", VOLUMES, &[], "-"),
    unserved("vscan", "VSCAN", "there is no virus scanner", &["off"], "off"),
    figure("written", "WRITTEN", Kind::Bytes, Scope::FilesystemAndSnapshot, "<size>"),
    inherited("xattr", "XATTR", Kind::Choice(&["on", "off", "sa", "dir"]), "on", "on | off | sa | dir"),
    unserved("zoned", "ZONED", NO_PROJECTS, &["off"], "off"),
];

/// The properties of pools, by name.
pub const POOL_PROPERTIES: &[Definition] = &[
    pool(figure("allocated", "ALLOC", Kind::Bytes, Scope::Pool, "<size>")),
    pool(fixed("altroot", "ALTROOT", Kind::Path, "none", "<path>")),
    pool(fixed("ashift", "ASHIFT", Kind::Number(0, 16), "0", "<0 or 9-16>")),
    pool(own("autoexpand", "EXPAND", ON_OFF, "off", "on | off")),
    pool(own("autoreplace", "REPLACE", Kind::Unserved(REDUNDANCY, &["off"]), "off", "off")),
    pool(own("autotrim", "AUTOTRIM", ON_OFF, "off", "on | off")),
    pool(own("bootfs", "BOOTFS", Kind::Unserved("nothing boots from a pool", &["", "-"]), "", "not served")),
    pool(own("cachefile", "CACHEFILE", Kind::Path, "", "<file> | none")),
    pool(short("cap", figure("capacity", "CAP", Kind::Figure, Scope::Pool, "<size>"))),
    pool(figure("checkpoint", "CKPOINT", Kind::Bytes, Scope::Pool, "<size>")),
    pool(own("comment", "COMMENT", Kind::Text(32), "", "<comment-string>")),
    pool(own("compatibility", "COMPATIBILITY", Kind::Words(1023), "off", "<file[,file...]> | off | legacy")),
    pool(short("dedup", figure("dedupratio", "DEDUP", Kind::Figure, Scope::Pool, "<1.00x or higher if deduped>"))),
    pool(own(
        "delegation",
        "DELEGATION",
        Kind::Unserved("there is no delegation; who owns the pool administers it", &["on", "off"]),
        "off",
        "on | off",
    )),
    pool(figure("expandsize", "EXPANDSZ", Kind::Bytes, Scope::Pool, "<size>")),
    pool(own(
        "failmode",
        "FAILMODE",
        Kind::Choice(&["wait", "continue", "panic"]),
        "continue",
        "wait | continue | panic",
    )),
    pool(short("frag", figure("fragmentation", "FRAG", Kind::Figure, Scope::Pool, "<percent>"))),
    pool(figure("free", "FREE", Kind::Bytes, Scope::Pool, "<size>")),
    pool(figure("freeing", "FREEING", Kind::Bytes, Scope::Pool, "<size>")),
    pool(figure("guid", "GUID", Kind::Figure, Scope::Pool, "<guid>")),
    pool(figure("health", "HEALTH", Kind::Figure, Scope::Pool, "<state>")),
    pool(figure("leaked", "LEAKED", Kind::Bytes, Scope::Pool, "<size>")),
    pool(own("log", "LOG", Kind::Choice(&["local", "remote", "none"]), "local", "local | remote | none")),
    pool(short("listsnaps", own("listsnapshots", "LISTSNAPS", ON_OFF, "off", "on | off"))),
    pool(own(
        "multihost",
        "MULTIHOST",
        Kind::Unserved("devices are locked by the host that imports them", &["off"]),
        "off",
        "off",
    )),
    pool(own("prices", "PRICES", Kind::Text(200), "", "put=PRICE,get=PRICE,...")),
    pool(fixed("readonly", "RDONLY", ON_OFF, "off", "on | off")),
    pool(figure("size", "SIZE", Kind::Bytes, Scope::Pool, "<size>")),
    pool(figure("version", "VERSION", Kind::Figure, Scope::Pool, "<version>")),
];
