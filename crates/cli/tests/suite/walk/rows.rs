//! The rows of the walk: every verb of the program at least once.

/// A command and the scene that it is carried out on.
pub struct Row {
    /// The verb, as the help has it.
    pub verb: &'static str,
    /// A shell script before.
    pub prepare: &'static str,
    /// The words of the command; `$P` is the name of the pool.
    pub command: &'static str,
    /// Whether the scene has a pool.
    pub pool: bool,
    /// It has to be refused.
    pub refused: bool,
    /// Whether the command can be resumed: a killed run leaves a part, and the same command again
    /// completes it.
    pub again: bool,
}

const fn row(verb: &'static str, prepare: &'static str, command: &'static str) -> Row {
    Row { verb, prepare, command, pool: false, refused: false, again: false }
}

const fn pool(verb: &'static str, prepare: &'static str, command: &'static str) -> Row {
    Row { pool: true, ..row(verb, prepare, command) }
}

const fn refused(row: Row) -> Row {
    Row { refused: true, ..row }
}

const fn again(row: Row) -> Row {
    Row { again: true, ..row }
}

/// All of them.
pub fn all() -> impl Iterator<Item = &'static Row> {
    [MOUNTS, UNIONS, CAGES, WORKSPACES, POOLS, FILE_SYSTEMS, SNAPSHOTS, QUESTIONS].into_iter().flatten()
}

pub const MOUNTS: &[Row] = &[
    row("mirror", "", "mirror source at"),
    row("mirror", "nacre mirror source at", "mirror -r other at"),
    row("mirror", "", "mirror --daemon=$D source at"),
    row("bindfs", "", "bindfs -r source at"),
    row("mount", "", "mount \"host:$PWD/source\" at"),
    row("umount", "nacre mirror source at", "umount at"),
    refused(row("umount", "", "umount at")),
    row("upgrade", "nacre mirror --survive source at", "upgrade at"),
    row("reload", "nacre mirror source at", "reload at --perms=a-w"),
    again(row("copy", "", "copy source new")),
    refused(row("copy", "mkdir small && mount -t tmpfs -o nr_inodes=1,size=64k tmpfs small", "copy source small/new")),
    again(row("copy", "mkdir new && echo other >new/a", "copy --update source new")),
    row("man", "mkdir pages && nacre man pages", "man pages"),
];

pub const UNIONS: &[Row] = &[
    row("union", "", "union upper:lower at"),
    row("fuse-overlayfs", "", "fuse-overlayfs -o lowerdir=lower,upperdir=upper,workdir=work at"),
    row("mergerfs", "", "mergerfs -o minfreespace=0 upper:other at"),
    row("union add", "nacre union upper:lower at", "union add at other"),
    row("union del", "nacre union upper:other:lower at", "union del at other"),
    row("union mod", "nacre union upper:lower at", "union mod at lower=rw"),
    again(row("union drain", "nacre union upper=rw:other=rw at", "union drain at other")),
    again(row(
        "union balance",
        "mkdir x y && mount -t tmpfs -o size=8M tmpfs x && mount -t tmpfs -o size=8M tmpfs y && for name in a b c d; do head -c 1M /dev/urandom >x/$name; done && nacre union x=rw:y=rw at",
        "union balance at",
    )),
    again(row("union mvup", "nacre union upper=rw:lower=rw at", "union mvup at/d/deep")),
    again(row("union mvdown", "nacre union upper=rw:lower=rw at", "union mvdown at/u")),
    row("union tier", "nacre union upper=rw+tier:lower=rw+tier at", "union tier at high=90,low=70"),
];

pub const CAGES: &[Row] = &[
    row("cage", "", "cage --size 10M source"),
    row("cage", "", "cage --size 10M source at"),
    row("cage resize", "nacre cage --size 10M source at", "cage resize source 20M"),
    again(row("cage", "", "cage --engine=loop --sparse --size 64M at")),
    again(row("cage resize", "nacre cage --engine=loop --sparse --size 64M at", "cage resize at 96M")),
    row("cage remove", "nacre cage --engine=loop --sparse --size 64M at && nacre umount at", "cage remove --yes at"),
    row("umount", "nacre cage --size 10M source", "umount source"),
    refused(row(
        "cage",
        "mkdir small && mount -t tmpfs -o size=1M tmpfs small && mkdir small/c",
        "cage --engine=loop --size 64M small/c",
    )),
];

pub const WORKSPACES: &[Row] = &[
    row("workspace create", "", "workspace create w --from source --at at"),
    row("workspace create", "", "workspace create w --from source --size 10M"),
    refused(row("workspace create", "nacre workspace create w --from source", "workspace create w --from other")),
    refused(row("workspace create", "", "workspace create w --from missing")),
    row("workspace mount", "nacre workspace create w --from source --at at && nacre umount at", "workspace mount w"),
    // Both scenes of a row are served by one process, that of the first.
    again(row("workspace run", "nacre workspace create w --from source", "workspace run w -- true")),
    row("workspace discard", "nacre workspace create w --from source --at at && echo new >at/a", "workspace discard w"),
    refused(row("workspace discard", "", "workspace discard w")),
    row("workspace rename", "nacre workspace create w --from source", "workspace rename w v"),
    again(row(
        "workspace commit",
        "nacre workspace create w --from source --at at && echo new >at/a && rm at/d/b && echo more >at/c",
        "workspace commit w",
    )),
    row(
        "workspace snapshot",
        "nacre workspace create w --from source --at at && echo new >at/a",
        "workspace snapshot w@s",
    ),
    row(
        "workspace rollback",
        "nacre workspace create w --from source --at at && nacre workspace snapshot w@s && echo new >at/a",
        "workspace rollback w@s",
    ),
    row(
        "workspace export",
        "nacre workspace create w --from source --at at && echo new >at/a",
        "workspace export -o changes.tar w",
    ),
    row(
        "workspace import",
        "nacre workspace create v --from source --at at && echo new >at/a && nacre workspace export -o changes.tar v && nacre workspace create w --from source",
        "workspace import w changes.tar",
    ),
];

pub const POOLS: &[Row] = &[
    pool("pool create", "", "pool create --size 64M -m $PWD/second ${P}x second.img"),
    pool("pool create", "", "pool create --size 64M -m $PWD/second ${P}x mirror one.img two.img"),
    refused(pool("pool create", "", "pool create --size 64M ${P}x mirror one.img two.img raidz x.img y.img")),
    refused(pool(
        "pool create",
        "mkdir small && mount -t tmpfs -o size=16k tmpfs small",
        "pool create --size 64M -m $PWD/second ${P}x small/img",
    )),
    pool("pool destroy", "", "pool destroy $P"),
    pool("pool add", "", "pool add --size 64M $P more.img"),
    refused(pool(
        "pool add",
        "mkdir small && mount -t tmpfs -o size=16k tmpfs small",
        "pool add --size 64M $P small/img",
    )),
    refused(pool(
        "pool add",
        "nacre pool set failmode=wait $P && mkdir small && mount -t tmpfs -o size=16k tmpfs small",
        "pool add --size 64M $P small/img",
    )),
    pool("pool add", "", "pool add --size 128M $P spare other.img"),
    pool("pool attach", "", "pool attach -w --size 128M $P $PWD/image $PWD/other.img"),
    refused(pool("pool attach", "", "pool attach --size 64M $P $PWD/image $PWD/other.img")),
    pool(
        "pool detach",
        "nacre pool attach -w --size 128M $P $PWD/image $PWD/other.img",
        "pool detach $P $PWD/other.img",
    ),
    refused(pool("pool detach", "", "pool detach $P $PWD/image")),
    pool("pool remove", "nacre pool add --size 128M $P spare other.img", "pool remove $P $PWD/other.img"),
    refused(pool("pool remove", "", "pool remove $P $PWD/image")),
    pool("pool remove", "nacre pool add --size 128M $P other.img", "pool remove -w $P $PWD/image"),
    pool(
        "pool attach",
        "nacre pool attach -w --size 128M $P $PWD/image $PWD/other.img && nacre pool convert -w $P mirror-0 raidz1 >/dev/null",
        "pool attach -w --size 128M $P raidz1-0 $PWD/third.img",
    ),
    pool(
        "pool convert",
        "nacre pool attach -w --size 128M $P $PWD/image $PWD/other.img",
        "pool convert -w --size 128M $P mirror-0 raidz1 $PWD/third.img",
    ),
    refused(pool("pool convert", "", "pool convert $P $PWD/image raidz2")),
    pool("pool rebalance", "nacre pool add --size 128M $P other.img", "pool rebalance -w $P"),
    pool("pool reshape", "", "pool reshape --rate 10M $P"),
    refused(pool("pool reshape", "", "pool reshape -s $P")),
    pool("pool export", "", "pool export $P"),
    pool("pool import", "nacre pool export $P", "pool import -d $PWD $P"),
    pool("pool set", "", "pool set comment=walked $P"),
    pool("pool scrub", "", "pool scrub -w $P"),
    pool("pool trim", "", "pool trim -w $P"),
    pool("pool clear", "", "pool clear $P"),
    pool("pool online", "truncate -s 160M image", "pool online -e $P $PWD/image"),
    refused(pool("pool offline", "", "pool offline $P $PWD/image")),
    pool("pool replace", "truncate -s 160M other.img", "pool replace -w $P $PWD/image $PWD/other.img"),
    refused(pool("pool replace", "truncate -s 100M other.img", "pool replace $P $PWD/image $PWD/other.img")),
    pool("pool labelclear", "nacre pool export $P", "pool labelclear -f $PWD/image"),
    pool("pool upgrade", "", "pool upgrade $P"),
];

pub const FILE_SYSTEMS: &[Row] = &[
    pool("fs create", "", "fs create -o quota=10M $P/new"),
    again(pool("fs create", "", "fs create -p $P/new/below/it")),
    pool("fs destroy", "nacre fs create $P/a/b", "fs destroy -r $P/a"),
    pool("fs rename", "nacre fs create $P/a/b", "fs rename $P/a $P/c"),
    pool("fs set", "", "fs set quota=20M $P/a"),
    pool("fs set", "nacre fs create $P/a/b", "fs set mountpoint=$PWD/elsewhere $P/a"),
    pool("fs inherit", "nacre fs set compression=off $P/a", "fs inherit compression $P/a"),
    pool("fs mount", "nacre fs unmount $P/a", "fs mount $P/a"),
    pool("fs unmount", "", "fs unmount $P/a"),
    // Servers are started in real_exports.
    again(pool("fs share", "", "fs share -a")),
    again(pool("fs unshare", "", "fs unshare -a")),
];

pub const SNAPSHOTS: &[Row] = &[
    pool("fs snapshot", "nacre fs create $P/b", "fs snapshot -r $P@now"),
    pool("fs destroy", "nacre fs snapshot $P/a@t", "fs destroy $P/a@s,t"),
    pool("fs clone", "", "fs clone $P/a@s $P/c"),
    pool("fs promote", "nacre fs clone $P/a@s $P/c", "fs promote $P/c"),
    pool("fs rename", "", "fs rename $P/a@s @u"),
    pool("fs rollback", "", "fs rollback $P/a@s"),
    pool("fs bookmark", "", "fs bookmark $P/a@s $P/a#m"),
    pool("fs hold", "", "fs hold keep $P/a@s"),
    pool("fs release", "nacre fs hold keep $P/a@s", "fs release keep $P/a@s"),
    pool("fs receive", "nacre fs send $P/a@s >.programs/stream", "fs receive $P/c <.programs/stream"),
    pool(
        "fs receive",
        "nacre fs send $P/a@s | nacre fs receive $P/c && nacre fs snapshot $P/a@t && nacre fs send -i @s $P/a@t >.programs/stream",
        "fs receive $P/c <.programs/stream",
    ),
    again(pool("fs replicate", "", "fs replicate $P/a $P/c")),
    pool("fs restore", "echo three >pool/a/one", "fs restore pool/a/one@s"),
];

/// Rows of verbs that only query.
pub const QUESTIONS: &[Row] = &[
    row("status", "", "status"),
    row("top", "", "top --once m"),
    row("metrics", "", "metrics m"),
    row("completions", "", "completions bash"),
    row("doctor", "", "doctor --json"),
    row("bench", "", "bench --help"),
    row("union list", "", "union list u"),
    row("union where", "", "union where u/l"),
    row("union explain", "", "union explain u/new"),
    row("union check", "", "union check other:lower"),
    row("cage status", "", "cage status source/d"),
    row("cage list", "", "cage list"),
    row("workspace list", "", "workspace list"),
    row("workspace diff", "", "workspace diff w"),
    pool("pool list", "", "pool list -v $P"),
    pool("pool status", "", "pool status -v $P"),
    pool("pool get", "", "pool get all $P"),
    pool("pool history", "", "pool history -il $P"),
    pool("pool events", "", "pool events -v $P"),
    pool("pool iostat", "", "pool iostat -v $P"),
    pool("pool plan", "", "pool plan $P add mirror other.img third.img"),
    pool("pool wait", "", "pool wait $P"),
    pool("pool sync", "", "pool sync $P"),
    pool("pool inspect", "", "pool inspect $P"),
    pool("pool probe", "", "pool probe $PWD/image"),
    pool("pool check", "", "pool check $P"),
    pool("pool version", "", "pool version"),
    pool("fs version", "", "fs version"),
    pool("fs list", "", "fs list -r -t all $P"),
    pool("fs get", "", "fs get -r all $P"),
    pool("fs userspace", "", "fs userspace $P/a"),
    pool("fs groupspace", "", "fs groupspace $P/a"),
    pool("fs holds", "", "fs holds $P/a@s"),
    pool("fs diff", "", "fs diff $P/a@s"),
    pool("fs send", "", "fs send -nv $P/a@s"),
    pool("fs stream", "", "fs stream dump <.programs/stream"),
    pool("fs versions", "", "fs versions pool/a/one"),
];
