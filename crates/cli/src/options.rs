//! The one table of mount options: every option of bindfs, ours, and the words of `-o`.
//!
//! Everything that knows an option is made from it: both parsers ([`crate::words`] for bindfs'
//! grammar, [`crate::commands`] for ours), help, man pages, completions. What an option *does* is
//! one exhaustive match in [`crate::settings`].

use Form::{Bindfs, Cage, Letter, Ours, Word};

/// Where an option may be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// An option of bindfs: `--name[=VALUE]`, its letter, and `-o name[=VALUE]`.
    Bindfs,
    /// An option that bindfs lacks; written in the same ways.
    Ours,
    /// Only on the command line.
    Letter,
    /// Only after `-o`: what libfuse, mount(8) and fstab know.
    Word,
    /// Only of a cage; written in the same ways as [`Form::Ours`].
    Cage,
}

/// One line of the table.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// Which option.
    pub id: Opt,
    /// The long name, which is also the `-o` word; empty for options that have only a letter.
    pub name: &'static str,
    /// The letter, where there is one.
    pub short: Option<char>,
    /// What its value is called in help; `None` for a switch.
    pub value: Option<&'static str>,
    /// Where it may be written.
    pub form: Form,
    /// The heading in help.
    pub heading: &'static str,
    /// One sentence.
    pub help: &'static str,
}

macro_rules! options {
    ($($heading:literal { $($id:ident $form:ident $name:literal $short:expr, $value:expr, $help:literal;)* })*) => {
        /// Every option, in the order of the table.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Opt {
            $($(#[doc = $help] $id,)*)*
        }

        /// The table.
        pub const TABLE: &[Row] = &[
            $($(Row { id: Opt::$id, name: $name, short: $short, value: $value, form: $form, heading: $heading, help: $help },)*)*
        ];
    };
}

options! {
    "Ownership" {
        ForceUser Bindfs "force-user" Some('u'), Some("USER"), "Show every object as owned by USER";
        ForceGroup Bindfs "force-group" Some('g'), Some("GROUP"), "Show every object as belonging to GROUP";
        Mirror Bindfs "mirror" Some('m'), Some("LIST"), "Show each of these users (@GROUP: its members) as the owner of everything to itself; LIST is joined by ':' or ','";
        MirrorOnly Bindfs "mirror-only" Some('M'), Some("LIST"), "Like --mirror, and nobody else but root is let in";
        Map Bindfs "map" None, Some("MAP"), "Translate owners: A/B:@G/@H shows A as B and @G as @H, and back on the way down; ranges (1000-1999/5000) and many-to-one ('*/1000', '@*/@100') too";
        MapPasswd Bindfs "map-passwd" None, Some("FILE"), "Translate the user ids of this passwd file to the local ids of the same names";
        MapPasswdRev Bindfs "map-passwd-rev" None, Some("FILE"), "Translate local user ids to those of this passwd file";
        MapGroup Bindfs "map-group" None, Some("FILE"), "Translate the group ids of this group file to the local ids of the same names";
        MapGroupRev Bindfs "map-group-rev" None, Some("FILE"), "Translate local group ids to those of this group file";
        UidOffset Bindfs "uid-offset" None, Some("N"), "Add N to every user id shown, subtract it on the way down";
        GidOffset Bindfs "gid-offset" None, Some("N"), "Add N to every group id shown, subtract it on the way down";
        User Bindfs "user" None, Some("USER"), "Deprecated: --force-user";
        Owner Bindfs "owner" None, Some("USER"), "Deprecated: --force-user";
        Group Bindfs "group" None, Some("GROUP"), "Deprecated: --force-group";
    }
    "Permission bits" {
        Perms Bindfs "perms" Some('p'), Some("SPEC"), "Change the permission bits shown, as chmod(1) with more: 0640,a+X or u=rwX:g=rD:o= (f and d on the left select files or directories)";
        RealisticPermissions Bindfs "realistic-permissions" None, None, "Clear permission bits that the mounter itself does not have on the source";
    }
    "Rules" {
        For Ours "for" None, Some("TYPES:KEY=VALUE"), "An option for some file types only, with the letters of find -type: d:perms=0755 (may be repeated)";
        Hide Ours "hide" None, Some("GLOB"), "Show no name that matches: '*.tmp', '.git' (may be repeated)";
    }
    "Creating" {
        CreateAsUser Bindfs "create-as-user" None, None, "New objects belong to whoever makes them (the default for root; root only)";
        CreateAsMounter Bindfs "create-as-mounter" None, None, "New objects belong to the mounter (the default for others)";
        CreateForUser Bindfs "create-for-user" None, Some("USER"), "New objects belong to USER (root only)";
        CreateForGroup Bindfs "create-for-group" None, Some("GROUP"), "New objects belong to GROUP (root only)";
        CreateWithPerms Bindfs "create-with-perms" None, Some("SPEC"), "Change the permission bits of new objects";
    }
    "Changing owners and modes" {
        ChownNormal Bindfs "chown-normal" None, None, "Pass changes of the owner to the source (the default)";
        ChownIgnore Bindfs "chown-ignore" None, None, "Say yes to changes of the owner and do nothing";
        ChownDeny Bindfs "chown-deny" None, None, "Refuse changes of the owner";
        ChgrpNormal Bindfs "chgrp-normal" None, None, "Pass changes of the group to the source (the default)";
        ChgrpIgnore Bindfs "chgrp-ignore" None, None, "Say yes to changes of the group and do nothing";
        ChgrpDeny Bindfs "chgrp-deny" None, None, "Refuse changes of the group";
        ChmodNormal Bindfs "chmod-normal" None, None, "Pass changes of permission bits to the source (the default)";
        ChmodIgnore Bindfs "chmod-ignore" None, None, "Say yes to changes of permission bits and do nothing";
        ChmodDeny Bindfs "chmod-deny" None, None, "Refuse changes of permission bits";
        ChmodFilter Bindfs "chmod-filter" None, Some("SPEC"), "Change the permission bits asked for before they go to the source";
        ChmodAllowX Bindfs "chmod-allow-x" None, None, "Let changes of the execute bits of files through --chmod-ignore and --chmod-deny";
    }
    "Extended attributes" {
        XattrRw Bindfs "xattr-rw" None, None, "Extended attributes can be read and written (the default)";
        XattrRo Bindfs "xattr-ro" None, None, "Extended attributes can only be read";
        XattrNone Bindfs "xattr-none" None, None, "There are no extended attributes";
        Xattr Ours "xattr" None, Some("rw|ro|none"), "The same in one option";
        Acl Ours "acl" None, Some("auto|off"), "Enforce (and map) the POSIX ACLs of the source, where it has any [default: auto]";
    }
    "Deleting and links" {
        DeleteDeny Bindfs "delete-deny" None, None, "Refuse to delete files and directories";
        RenameDeny Bindfs "rename-deny" None, None, "Refuse to rename inside the mount";
        ReplaceDeny Ours "replace-deny" None, None, "Refuse to rename onto something that exists (which deletes it)";
        TruncateDeny Ours "truncate-deny" None, None, "Refuse to make files shorter or to punch holes in them";
        HideHardLinks Bindfs "hide-hard-links" None, None, "Show one hard link for everything";
        ResolveSymlinks Bindfs "resolve-symlinks" None, None, "Show symbolic links as what they point to";
        ResolvedSymlinkDeletion Bindfs "resolved-symlink-deletion" None, Some("POLICY"), "What deleting a resolved link deletes: symlink-only (the default), deny, symlink-first, target-first";
        BlockDevicesAsFiles Bindfs "block-devices-as-files" None, None, "Show block devices as files of the device's size";
        CtimeFromMtime Bindfs "ctime-from-mtime" None, None, "Show the time of the last change of content as the time of the last change of status";
    }
    "Throughput and locking" {
        ReadRate Bindfs "read-rate" None, Some("N"), "Read at most N bytes a second through the mount (suffixes k, M, G, T of 1024)";
        WriteRate Bindfs "write-rate" None, Some("N"), "Write at most N bytes a second through the mount";
        Multithreaded Bindfs "multithreaded" None, None, "Accepted: several threads serve every mount";
        EnableLockForwarding Bindfs "enable-lock-forwarding" None, None, "Locks taken in the mount are taken on the files of the source";
        DisableLockForwarding Bindfs "disable-lock-forwarding" None, None, "Locks taken in the mount are seen only there (the default)";
        EnableIoctl Bindfs "enable-ioctl" None, None, "Forward the ioctls of chattr(1) and its kin (default: refused)";
        DirectIo Bindfs "direct-io" None, None, "Keep no page cache for the mount";
        NoDirectIo Bindfs "no-direct-io" None, None, "Use the page cache (the default)";
        ForwardOdirect Bindfs "forward-odirect" None, Some("ALIGN"), "Keep O_DIRECT for the source, with buffers rounded to ALIGN bytes";
        Coherence Ours "coherence" None, Some("MODE"), "Who else changes the source: exclusive (nobody), watch (anybody, and we are told), revalidate (ask each time)";
        Immutable Ours "immutable" None, None, "Nothing in the source changes while it is mounted: opens cost no request (implies ro)";
        NotifyWatchers Ours "notify-watchers" None, None, "Raise inotify events in the mount for changes made in the source, as far as the kernel can";
        Engine Ours "engine" None, Some("ENGINE"), "What serves the mount: fuse (the default), kernel (an idmapped bind mount, when that is all that was asked for), auto";
        Passthrough Ours "passthrough" None, Some("auto|off"), "Whether the kernel reads and writes the files of the source itself [default: auto]";
        Transport Ours "transport" None, Some("auto|uring|device"), "How the kernel and the daemon talk [default: auto]";
    }
    "Cage" {
        Size Cage "size" None, Some("SIZE"), "How much the directory may hold: bytes, or a number with K, M, G, T of 1024 (10G)";
        Inodes Cage "inodes" None, Some("N"), "How many files, directories and links it may hold";
        WhenFull Cage "when-full" None, Some("deny|drop-oldest"), "What happens when it is full: writers get ENOSPC (the default), or the oldest log data goes";
        Rotated Cage "rotated" None, Some("GLOB"), "With drop-oldest: names of whole files that may be deleted, oldest first [default: what logrotate makes] (may be repeated)";
        Keep Cage "keep" None, Some("GLOB"), "With drop-oldest: never touch files of these names (may be repeated)";
        Soft Cage "soft" None, Some("SHARE"), "Report when so much is used: 80% or a size";
        OnSoft Cage "on-soft" None, Some("COMMAND"), "With --soft: run this by the shell when the use crosses the threshold, in either direction";
        Limit Cage "limit" None, Some("WHO=SIZE"), "A limit within the limit: user:NAME=SIZE or dir:PATH=SIZE, PATH relative to the directory (may be repeated)";
        Writes Cage "writes" None, Some("auto|collected|through"), "Whether the kernel may collect appends [default: auto, where there is room enough]";
        State Cage "state" None, Some("DIR"), "Where the accounting is kept [default: /var/lib/nacre/cage, for users ~/.local/state/nacre/cage]";
        FsType Cage "fstype" None, Some("ext4|xfs|btrfs"), "With --engine=loop: the file system of the image [default: ext4]";
        Image Cage "image" None, Some("FILE"), "With --engine=loop: the image [default: DIR.cage]";
        Sparse Cage "sparse" None, None, "With --engine=loop: do not reserve the space of the image";
    }
    "Mounting" {
        NoAllowOther Bindfs "no-allow-other" Some('n'), None, "Only the mounter may use the mount";
        ReadOnly Letter "read-only" Some('r'), None, "Mount read-only, for root too (also: -o ro)";
        Words Letter "" Some('o'), Some("WORD[,WORD]..."), "Any long option without its dashes, and mount words: ro, nodev, nosuid, noexec, noatime, fsname=NAME, ... (may be repeated)";
        Foreground Letter "foreground" Some('f'), None, "Stay in the foreground: one process, which ends with the mount";
        Debug Letter "debug" Some('d'), None, "Log every request; implies -f";
        SingleThread Letter "" Some('s'), None, "Accepted for libfuse's sake: several threads serve every mount";
        Daemon Ours "daemon" None, Some("NAME"), "Serve it by one process together with all other mounts of that NAME, which ends with the last of them";
        Explain Ours "explain" None, None, "Print what would be mounted and why, and do nothing";
        Log Ours "log" None, Some("LEVEL"), "What to log: error, warn, info, debug, trace [default: warn]";
        LogFile Ours "log-file" None, Some("FILE"), "Where the log goes [default: standard error, until a background mount answers]";
    }
    "About" {
        Help Letter "help" Some('h'), None, "Print this and exit";
        Version Letter "version" Some('V'), None, "Print the version and exit";
        FuseVersion Letter "fuse-version" None, None, "Print the version of the kernel interface and exit";
    }
    "Mount words" {
        Ro Word "ro" None, None, "read-only";
        Rw Word "rw" None, None, "writable";
        Suid Word "suid" None, None, "let set-user-id programs take effect";
        NoSuid Word "nosuid" None, None, "set-user-id programs take no effect (the default)";
        Dev Word "dev" None, None, "let device nodes work";
        NoDev Word "nodev" None, None, "device nodes do not work (the default)";
        Exec Word "exec" None, None, "let programs run";
        NoExec Word "noexec" None, None, "programs do not run";
        SymFollow Word "symfollow" None, None, "follow symbolic links";
        NoSymFollow Word "nosymfollow" None, None, "do not follow symbolic links";
        Atime Word "atime" None, None, "access times as the kernel's default";
        NoAtime Word "noatime" None, None, "keep no access times";
        RelAtime Word "relatime" None, None, "access times now and then";
        StrictAtime Word "strictatime" None, None, "every access time";
        DirAtime Word "diratime" None, None, "access times of directories";
        NoDirAtime Word "nodiratime" None, None, "no access times of directories";
        Sync Word "sync" None, None, "write through";
        Async Word "async" None, None, "do not write through";
        DirSync Word "dirsync" None, None, "write directories through";
        AllowOther Word "allow_other" None, None, "everybody may use the mount (the default)";
        AllowRoot Word "allow_root" None, None, "only the mounter and root may use the mount";
        DefaultPermissions Word "default_permissions" None, None, "the kernel checks permissions (always so)";
        LibfuseDirectIo Word "direct_io" None, None, "no page cache, in libfuse's spelling";
        FsName Word "fsname" None, Some("NAME"), "first column of the mount table";
        Subtype Word "subtype" None, Some("NAME"), "type in the mount table, after fuse.";
        MaxRead Word "max_read" None, Some("N"), "accepted: the size of reads is negotiated";
        ShownUid Word "uid" None, Some("N"), "owner of everything shown, over every other option";
        ShownGid Word "gid" None, Some("N"), "group of everything shown, over every other option";
        Umask Word "umask" None, Some("MASK"), "permission bits of everything shown are 0777 without MASK (octal)";
        EntryTimeout Word "entry_timeout" None, Some("SECONDS"), "how long names are cached, instead of what coherence says";
        AttrTimeout Word "attr_timeout" None, Some("SECONDS"), "how long attributes are cached";
        NegativeTimeout Word "negative_timeout" None, Some("SECONDS"), "how long missing names are cached";
        AutoUnmount Word "auto_unmount" None, None, "accepted: a mount goes with its daemon";
        NonEmpty Word "nonempty" None, None, "say nothing of a mount point that is not empty";
        SecurityContext Word "context" None, Some("CONTEXT"), "security context of everything";
        FsContext Word "fscontext" None, Some("CONTEXT"), "security context of the file system";
        DefContext Word "defcontext" None, Some("CONTEXT"), "security context of what has none";
        RootContext Word "rootcontext" None, Some("CONTEXT"), "security context of the root directory";
        Remount Word "remount" None, None, "change the flags of what is mounted here (mount(8) only)";
    }
}

/// Words that say nothing to a mount program: dropped, with or without a value.
const IGNORED: &[&str] = &[
    // fstab and mount(8)
    "",
    "defaults",
    "user",
    "nouser",
    "users",
    "group",
    "owner",
    "auto",
    "noauto",
    "nofail",
    "_netdev",
    "_rnetdev",
    "silent",
    "loud",
    "mand",
    "nomand",
    "nolazytime",
    "lazytime",
    "iversion",
    "noiversion",
    "norelatime",
    "nostrictatime",
    "comment",
    "uhelper",
    "helper",
    "dev_id",
    // The kernel's own, which the mount table shows and `mount -o remount` hands back.
    "user_id",
    "group_id",
    "rootmode",
    // libfuse's tuning, which this program negotiates or decides by itself
    "big_writes",
    "nomtab",
    "use_ino",
    "readdir_ino",
    "kernel_cache",
    "auto_cache",
    "noauto_cache",
    "ac_attr_timeout",
    "noforget",
    "remember",
    "intr",
    "intr_signal",
    "hard_remove",
    "atomic_o_trunc",
    "async_read",
    "sync_read",
    "max_write",
    "max_readahead",
    "max_background",
    "congestion_threshold",
    "max_idle_threads",
    "max_threads",
    "clone_fd",
    "splice_read",
    "splice_write",
    "splice_move",
    "no_splice_read",
    "no_splice_write",
    "no_splice_move",
    "no_remote_lock",
    "no_remote_flock",
    "no_remote_posix_lock",
    "large_read",
];

/// Words that would change what the mount means, and that we do not take: with the reason.
const REFUSED: &[(&str, &str)] = &[
    ("modules", "libfuse modules cannot be loaded; `nacre mount` stacks layers instead"),
    ("blkdev", "a mirror is no block device"),
    ("fd", "the descriptor of the FUSE device is opened by this program"),
    ("drop_privileges", "start the program as the user that shall serve the mount"),
    ("setuid", "start the program as the user that shall serve the mount"),
];

/// Finds an option by its long name, as it is written after `--`.
pub fn long(name: &str) -> Option<&'static Row> {
    TABLE.iter().find(|row| row.form != Word && !row.name.is_empty() && row.name == name)
}

/// Finds an option by its letter.
pub fn letter(letter: char) -> Option<&'static Row> {
    TABLE.iter().find(|row| row.short == Some(letter))
}

/// Whether only cages have it.
pub fn is_of_cages(option: Opt) -> bool {
    TABLE.iter().any(|row| row.id == option && row.form == Cage)
}

/// What a word after `-o` is.
#[derive(Clone, Copy, Debug)]
pub enum Found {
    /// An option of the table.
    Row(&'static Row),
    /// Says nothing to us.
    Ignored,
    /// Known, and not taken, because of this.
    Refused(&'static str),
}

/// Finds the word `name` of `-o name` or `-o name=value`.
pub fn word(name: &str, has_value: bool) -> Option<Found> {
    // `-o user`, `-o group`, `-o owner` are fstab's; bindfs' deprecated spellings have a value (and
    // libfuse swallows `user=`).
    let fstab = match name {
        "user" => true,
        "owner" | "group" => !has_value,
        _ => false,
    };
    if fstab || name.starts_with("x-") || name.starts_with("X-") {
        return Some(Found::Ignored);
    }
    let row = TABLE
        .iter()
        .find(|row| !row.name.is_empty() && row.name == name && (row.form != Letter || row.id == Opt::Debug));
    if let Some(row) = row {
        return (row.value.is_some() == has_value).then_some(Found::Row(row));
    }
    if IGNORED.contains(&name) {
        return Some(Found::Ignored);
    }
    REFUSED.iter().find(|(refused, _)| *refused == name).map(|(_, why)| Found::Refused(why))
}
