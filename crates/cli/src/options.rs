//! The one table of mount options: every option of bindfs, ours, and the words of `-o`. One row
//! defines all of an option: how it is written, which commands take it, what it sets, its help.
//!
//! Both parsers ([`crate::libfuse_args`] for bindfs' grammar, [`crate::commands`] for ours), help, man
//! pages and completions are made from it. What a row sets is a field of
//! [`Settings`](crate::settings::Settings); how its value is read is a method of [`Value`].

use crate::{option_value::Value, settings::Settings};
use Spelling::{Bindfs, Cage, Letter, Ours, Word};
use nacre_daemon::{
    cage::engine::FileSystem,
    failure::Failure,
    log::target::LogTarget,
    plan::{Atime, Transport, Verbosity},
    shared,
};
use nacre_layers::{
    remap::perms::Perms,
    size::{LimitRule, Share},
    throttle::rate::Rate,
};
use nacre_stack::spec::{
    ChangePolicy, CreateAs, HostCoherence, SymlinkDeletion, Symlinks, WhenFull, Writes, XattrPolicy,
};

/// Places where an option may be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spelling {
    /// An option of bindfs: `--name[=VALUE]`, its letter, and `-o name[=VALUE]`.
    Bindfs,
    /// An option that bindfs lacks; written in the same ways.
    Ours,
    /// Only on the command line.
    Letter,
    /// Only after `-o`: what libfuse, mount(8) and fstab know.
    Word,
    /// Only of a cage; written in the same ways as [`Spelling::Ours`].
    Cage,
}

/// A command that takes an option, in addition to `mirror` and bindfs, which take all that are not
/// [`Spelling::Cage`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taker {
    /// `nacre reload`: a rule of the remap layer.
    Reload,
    /// `nacre mount`: a setting of the mount, not of a layer.
    Stack,
    /// `nacre cage`. It shows owners as they are, and determines the validity of cached attributes
    /// itself.
    Cage,
    /// `nacre cage` with the kernel's engines (loop, quota), too.
    KernelCage,
    /// `nacre union`. It shows owners as they are.
    Union,
}

/// One line of the table.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// Identifier of the option.
    pub id: Opt,
    /// Places where it may be written.
    pub spelling: Spelling,
    /// Commands that take it.
    pub takers: &'static [Taker],
    /// The long name, which is also the `-o` word; empty for options that have only a letter.
    pub name: &'static str,
    /// The letter, where there is one.
    pub short: Option<char>,
    /// Name of its value in help; `None` for a switch.
    pub value: Option<&'static str>,
    /// Sets its field of the settings; of several options for the same field, the last one wins.
    pub set: fn(&mut Settings, Value<'_>) -> Result<(), Failure>,
    /// The heading in help.
    pub heading: &'static str,
    /// Help text, one sentence.
    pub help: &'static str,
}

impl Row {
    /// Returns whether `taker` takes the option.
    pub fn is_for(&self, taker: Taker) -> bool {
        self.takers.contains(&taker)
    }

    /// Returns the option as it is written on a command line.
    pub fn written(&self) -> String {
        format!("{}{}", if self.spelling == Word { "-o " } else { "--" }, self.name)
    }
}

macro_rules! options {
    ($($heading:literal {
        $($id:ident $spelling:ident [$($taker:ident)*] $name:literal $short:expr, $value:expr, |$s:ident $(, $v:ident)?| $set:expr, $help:literal;)*
    })*) => {
        /// All options, in the order of the table.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Opt {
            $($(#[doc = $help] $id,)*)*
        }

        /// The table of options.
        pub static TABLE: &[Row] = &[$($(Row {
            id: Opt::$id,
            spelling: $spelling,
            takers: &[$(Taker::$taker),*],
            name: $name,
            short: $short,
            value: $value,
            set: |$s, _value| {
                $(let $v = _value;)?
                $set;
                Ok(())
            },
            heading: $heading,
            help: $help,
        },)*)*];
    };
}

impl Opt {
    /// Returns the row of the option.
    #[expect(clippy::indexing_slicing, reason = "there is one row for each option, in this order")]
    pub fn row(self) -> &'static Row {
        &TABLE[self as usize]
    }
}

const AUTO_OFF: [(&str, bool); 2] = [("auto", true), ("off", false)];

const TRANSPORTS: [(&str, Transport); 3] =
    [("auto", Transport::Auto), ("uring", Transport::Uring), ("device", Transport::Device)];

const LEVELS: [(&str, Verbosity); 5] = [
    ("error", Verbosity::Error),
    ("warn", Verbosity::Warn),
    ("info", Verbosity::Info),
    ("debug", Verbosity::Debug),
    ("trace", Verbosity::Trace),
];

fn allow_root() -> Result<(), Failure> {
    Err(Failure::usage("-o allow_root is not possible: the kernel has no such rule for FUSE")
        .next("allow_other lets everybody in (permissions still hold), --no-allow-other only the mounter"))
}

// Rows that set nothing are accepted for the sake of old command lines and of fstab: threads are
// always on (new objects are made with the right owner at once, so bindfs' reason for one thread
// does not exist), the kernel checks permissions in front of every mount, sizes are negotiated, and
// the kernel drops a mount whose daemon is gone. The parsers replace `-o` by the rows of its words.
options! {
    "Ownership" {
        ForceUser Bindfs [Reload] "force-user" Some('u'), Some("USER"), |s, v| s.remap.force_user = Some(v.owner()?), "Show every object as owned by USER";
        ForceGroup Bindfs [Reload] "force-group" Some('g'), Some("GROUP"), |s, v| s.remap.force_group = Some(v.owner()?), "Show every object as belonging to GROUP";
        Mirror Bindfs [Reload] "mirror" Some('m'), Some("LIST"), |s, v| s.remap.mirror = Some(v.text()?), "Show each of these users (@GROUP: its members) as the owner of everything to itself; LIST is joined by ':' or ','";
        MirrorOnly Bindfs [Reload] "mirror-only" Some('M'), Some("LIST"), |s, v| s.remap.mirror_only = Some(v.text()?), "Like --mirror, and nobody else but root is let in";
        Map Bindfs [Reload] "map" None, Some("MAP"), |s, v| s.remap.map = Some(v.text()?), "Translate owners: A/B:@G/@H shows A as B and @G as @H, and back on the way down; ranges (1000-1999/5000) and many-to-one ('*/1000', '@*/@100') too";
        MapPasswd Bindfs [Reload] "map-passwd" None, Some("FILE"), |s, v| s.remap.map_passwd = Some(v.file()?), "Translate the user ids of this passwd file to the local ids of the same names";
        MapPasswdRev Bindfs [Reload] "map-passwd-rev" None, Some("FILE"), |s, v| s.remap.map_passwd_rev = Some(v.file()?), "Translate local user ids to those of this passwd file";
        MapGroup Bindfs [Reload] "map-group" None, Some("FILE"), |s, v| s.remap.map_group = Some(v.file()?), "Translate the group ids of this group file to the local ids of the same names";
        MapGroupRev Bindfs [Reload] "map-group-rev" None, Some("FILE"), |s, v| s.remap.map_group_rev = Some(v.file()?), "Translate local group ids to those of this group file";
        UidOffset Bindfs [Reload] "uid-offset" None, Some("N"), |s, v| s.remap.uid_offset = Some(v.number()?), "Add N to every user id shown, subtract it on the way down";
        GidOffset Bindfs [Reload] "gid-offset" None, Some("N"), |s, v| s.remap.gid_offset = Some(v.number()?), "Add N to every group id shown, subtract it on the way down";
        User Bindfs [Reload] "user" None, Some("USER"), |s, v| s.deprecated_user = Some(s.deprecated(v, "force-user")?), "Deprecated: --force-user";
        Owner Bindfs [Reload] "owner" None, Some("USER"), |s, v| s.deprecated_user = Some(s.deprecated(v, "force-user")?), "Deprecated: --force-user";
        Group Bindfs [Reload] "group" None, Some("GROUP"), |s, v| s.deprecated_group = Some(s.deprecated(v, "force-group")?), "Deprecated: --force-group";
    }
    "Permission bits" {
        Perms Bindfs [Reload] "perms" Some('p'), Some("SPEC"), |s, v| s.remap.perms = Some(v.checked::<Perms>()?), "Change the permission bits shown, as chmod(1) with more: 0640,a+X or u=rwX:g=rD:o= (f and d on the left select files or directories)";
        RealisticPermissions Bindfs [Reload] "realistic-permissions" None, None, |s| s.remap.realistic_permissions = true, "Clear permission bits that the mounter itself does not have on the source";
    }
    "Rules" {
        For Ours [Reload] "for" None, Some("TYPES:KEY=VALUE"), |s, v| s.remap.for_types.push(v.text()?), "An option for some file types only, with the letters of find -type: d:perms=0755 (may be repeated)";
        Hide Ours [Reload] "hide" None, Some("GLOB"), |s, v| s.remap.hide.push(v.text()?), "Show no name that matches: '*.tmp', '.git' (may be repeated)";
    }
    "Creating" {
        CreateAsUser Bindfs [Reload] "create-as-user" None, None, |s| s.remap.create_as = CreateAs::User, "New objects belong to whoever makes them (the default for root; root only)";
        CreateAsMounter Bindfs [Reload] "create-as-mounter" None, None, |s| s.remap.create_as = CreateAs::Mounter, "New objects belong to the mounter (the default for others)";
        CreateForUser Bindfs [Reload] "create-for-user" None, Some("USER"), |s, v| s.remap.create_for_user = Some(v.owner()?), "New objects belong to USER (root only)";
        CreateForGroup Bindfs [Reload] "create-for-group" None, Some("GROUP"), |s, v| s.remap.create_for_group = Some(v.owner()?), "New objects belong to GROUP (root only)";
        CreateWithPerms Bindfs [Reload] "create-with-perms" None, Some("SPEC"), |s, v| s.remap.create_with_perms = Some(v.checked::<Perms>()?), "Change the permission bits of new objects";
    }
    "Changing owners and modes" {
        ChownNormal Bindfs [Reload] "chown-normal" None, None, |s| s.remap.chown = ChangePolicy::Normal, "Pass changes of the owner to the source (the default)";
        ChownIgnore Bindfs [Reload] "chown-ignore" None, None, |s| s.remap.chown = ChangePolicy::Ignore, "Say yes to changes of the owner and do nothing";
        ChownDeny Bindfs [Reload] "chown-deny" None, None, |s| s.remap.chown = ChangePolicy::Deny, "Refuse changes of the owner";
        ChgrpNormal Bindfs [Reload] "chgrp-normal" None, None, |s| s.remap.chgrp = ChangePolicy::Normal, "Pass changes of the group to the source (the default)";
        ChgrpIgnore Bindfs [Reload] "chgrp-ignore" None, None, |s| s.remap.chgrp = ChangePolicy::Ignore, "Say yes to changes of the group and do nothing";
        ChgrpDeny Bindfs [Reload] "chgrp-deny" None, None, |s| s.remap.chgrp = ChangePolicy::Deny, "Refuse changes of the group";
        ChmodNormal Bindfs [Reload] "chmod-normal" None, None, |s| s.remap.chmod = ChangePolicy::Normal, "Pass changes of permission bits to the source (the default)";
        ChmodIgnore Bindfs [Reload] "chmod-ignore" None, None, |s| s.remap.chmod = ChangePolicy::Ignore, "Say yes to changes of permission bits and do nothing";
        ChmodDeny Bindfs [Reload] "chmod-deny" None, None, |s| s.remap.chmod = ChangePolicy::Deny, "Refuse changes of permission bits";
        ChmodFilter Bindfs [Reload] "chmod-filter" None, Some("SPEC"), |s, v| s.remap.chmod_filter = Some(v.checked::<Perms>()?), "Change the permission bits asked for before they go to the source";
        ChmodAllowX Bindfs [Reload] "chmod-allow-x" None, None, |s| s.remap.chmod_allow_x = true, "Let changes of the execute bits of files through --chmod-ignore and --chmod-deny";
    }
    "Extended attributes" {
        XattrRw Bindfs [Reload] "xattr-rw" None, None, |s| s.remap.xattr = XattrPolicy::Rw, "Extended attributes can be read and written (the default)";
        XattrRo Bindfs [Reload] "xattr-ro" None, None, |s| s.remap.xattr = XattrPolicy::Ro, "Extended attributes can only be read";
        XattrNone Bindfs [] "xattr-none" None, None, |s| s.remap.xattr = XattrPolicy::None, "There are no extended attributes";
        Xattr Ours [Reload] "xattr" None, Some("rw|ro|none"), |s, v| s.remap.xattr = v.word(XattrPolicy::from_word, XattrPolicy::WORDS)?, "The same in one option";
        Acl Ours [Stack Cage Union] "acl" None, Some("auto|off"), |s, v| s.door.acl = v.choice(&AUTO_OFF)?, "Enforce (and map) the POSIX ACLs of the source, where it has any [default: auto]";
    }
    "Deleting and links" {
        DeleteDeny Bindfs [Reload] "delete-deny" None, None, |s| s.remap.delete_deny = true, "Refuse to delete files and directories";
        RenameDeny Bindfs [Reload] "rename-deny" None, None, |s| s.remap.rename_deny = true, "Refuse to rename inside the mount";
        ReplaceDeny Ours [Reload] "replace-deny" None, None, |s| s.remap.replace_deny = true, "Refuse to rename onto something that exists (which deletes it)";
        TruncateDeny Ours [Reload] "truncate-deny" None, None, |s| s.remap.truncate_deny = true, "Refuse to make files shorter or to punch holes in them";
        HideHardLinks Bindfs [Reload] "hide-hard-links" None, None, |s| s.remap.hide_hard_links = true, "Show one hard link for everything";
        ResolveSymlinks Bindfs [] "resolve-symlinks" None, None, |s| s.host.symlinks = Symlinks::Resolve, "Show symbolic links as what they point to";
        ResolvedSymlinkDeletion Bindfs [] "resolved-symlink-deletion" None, Some("symlink-only|deny|symlink-first|target-first"), |s, v| s.host.symlink_deletion = v.word(SymlinkDeletion::from_word, SymlinkDeletion::WORDS)?, "What deleting a resolved link deletes: symlink-only (the default), deny, symlink-first, target-first";
        BlockDevicesAsFiles Bindfs [Reload] "block-devices-as-files" None, None, |s| s.remap.block_devices_as_files = true, "Show block devices as files of the device's size";
        CtimeFromMtime Bindfs [Reload] "ctime-from-mtime" None, None, |s| s.remap.ctime_from_mtime = true, "Show the time of the last change of content as the time of the last change of status";
    }
    "Throughput and locking" {
        ReadRate Bindfs [] "read-rate" None, Some("N"), |s, v| s.throttle.read_rate = Some(v.checked::<Rate>()?), "Read at most N bytes a second through the mount (suffixes k, M, G, T of 1024)";
        WriteRate Bindfs [] "write-rate" None, Some("N"), |s, v| s.throttle.write_rate = Some(v.checked::<Rate>()?), "Write at most N bytes a second through the mount";
        Multithreaded Bindfs [Stack Cage KernelCage Union] "multithreaded" None, None, |_s| {}, "Accepted: several threads serve every mount";
        EnableLockForwarding Bindfs [Stack Cage] "enable-lock-forwarding" None, None, |s| s.door.lock_forwarding = true, "Locks taken in the mount are taken on the files of the source";
        DisableLockForwarding Bindfs [Stack Cage Union] "disable-lock-forwarding" None, None, |s| s.door.lock_forwarding = false, "Locks taken in the mount are seen only there (the default)";
        EnableIoctl Bindfs [Cage] "enable-ioctl" None, None, |s| s.host.ioctl = true, "Accepted: chattr(1) and lsattr(1) always work";
        DirectIo Bindfs [Stack Union] "direct-io" None, None, |s| s.door.direct_io = true, "Keep no page cache for the mount";
        NoDirectIo Bindfs [Stack Cage Union] "no-direct-io" None, None, |s| s.door.direct_io = false, "Use the page cache (the default)";
        ForwardOdirect Bindfs [] "forward-odirect" None, Some("ALIGN"), |s, v| s.host.forward_odirect = Some(v.alignment()?), "Keep O_DIRECT for the source, with buffers rounded to ALIGN bytes";
        Coherence Ours [Cage Union] "coherence" None, Some("exclusive|watch|revalidate"), |s, v| s.host.coherence = v.word(HostCoherence::from_word, HostCoherence::WORDS)?, "Who else changes the source: exclusive (nobody), watch (anybody, and we are told), revalidate (ask each time)";
        Immutable Ours [Stack Union] "immutable" None, None, |s| { (s.door.immutable, s.door.read_only) = (true, true); s.host.coherence = HostCoherence::Exclusive }, "Nothing in the source changes while it is mounted: opens cost no request (implies ro)";
        NoOpen Ours [Stack Union] "no-open" None, None, |s| (s.door.no_open, s.door.read_only) = (true, true), "Open files without a request: for many small files; large ones are read more slowly (implies ro)";
        NotifyWatchers Ours [Stack Cage Union] "notify-watchers" None, None, |s| s.door.notify_watchers = true, "Raise inotify events in the mount for changes made in the source, as far as the kernel can";
        Engine Ours [Cage KernelCage] "engine" None, Some("ENGINE"), |s, v| s.engine = v.engine()?, "What serves the mount: fuse (the default), kernel (an idmapped bind mount, when that is all that was asked for), auto";
        Passthrough Ours [Stack Union] "passthrough" None, Some("auto|off"), |s, v| s.door.passthrough = v.choice(&AUTO_OFF)?, "Whether the kernel reads and writes the files of the source itself [default: auto]";
        Transport Ours [Stack Cage Union] "transport" None, Some("auto|uring|device"), |s, v| s.door.transport = v.choice(&TRANSPORTS)?, "How the kernel and the daemon talk [default: auto]";
    }
    "Cage" {
        Size Cage [Cage KernelCage] "size" None, Some("SIZE"), |s, v| s.cage.size = Some(v.limit()?), "How much the directory may hold: bytes, or a number with K, M, G, T of 1024 (10G)";
        Inodes Cage [Cage KernelCage] "inodes" None, Some("N"), |s, v| s.cage.inodes = Some(v.inodes()?), "How many files, directories and links it may hold";
        WhenFull Cage [Cage] "when-full" None, Some("deny|drop-oldest"), |s, v| s.cage.when_full = v.word(WhenFull::from_word, WhenFull::WORDS)?, "What happens when it is full: writers get ENOSPC (the default), or the oldest log data goes";
        Rotated Cage [Cage] "rotated" None, Some("GLOB"), |s, v| s.cage.rotated.push(v.glob()?), "With drop-oldest: names of whole files that may be deleted, oldest first [default: what logrotate makes] (may be repeated)";
        Keep Cage [Cage] "keep" None, Some("GLOB"), |s, v| s.cage.keep.push(v.glob()?), "With drop-oldest: never touch files of these names (may be repeated)";
        Soft Cage [Cage] "soft" None, Some("SHARE"), |s, v| s.cage.soft = Some(v.checked::<Share>()?), "Report when so much is used: 80% or a size";
        OnSoft Cage [Cage] "on-soft" None, Some("COMMAND"), |s, v| s.cage.on_soft = Some(v.command()?), "With --soft: run this by the shell when the use crosses the threshold, in either direction";
        Limit Cage [Cage] "limit" None, Some("WHO=SIZE"), |s, v| s.cage.limits.push(v.checked::<LimitRule>()?), "A limit within the limit: user:NAME=SIZE or dir:PATH=SIZE, PATH relative to the directory (may be repeated)";
        Writes Cage [Cage] "writes" None, Some("auto|collected|through"), |s, v| s.cage.writes = v.word(Writes::from_word, Writes::WORDS)?, "Whether the kernel may collect appends [default: auto, where there is room enough]";
        State Cage [Cage] "state" None, Some("DIR"), |s, v| s.cage.state = Some(v.file()?), "Where the accounting is kept [default: /var/lib/nacre/cage, for users ~/.local/state/nacre/cage]";
        FsType Cage [Cage KernelCage] "fstype" None, Some("ext4|xfs|btrfs"), |s, v| s.cage.fstype = Some(v.word(FileSystem::of, &["ext4", "xfs", "btrfs"])?), "With --engine=loop: the file system of the image [default: ext4]";
        Image Cage [Cage KernelCage] "image" None, Some("FILE"), |s, v| s.cage.image = Some(v.file()?), "With --engine=loop: the image [default: DIR.cage]";
        Sparse Cage [Cage KernelCage] "sparse" None, None, |s| s.cage.sparse = true, "With --engine=loop: do not reserve the space of the image";
    }
    "Mounting" {
        NoAllowOther Bindfs [Stack Cage Union] "no-allow-other" Some('n'), None, |s| (s.door.allow_other, s.door.others_asked) = (false, false), "Only the mounter may use the mount";
        ReadOnly Letter [Stack Cage Union] "read-only" Some('r'), None, |s| s.flag("ro").read_only = true, "Mount read-only, for root too (also: -o ro)";
        Words Letter [Stack Cage KernelCage Union] "" Some('o'), Some("WORD[,WORD]..."), |_s| {}, "Any long option without its dashes, and mount words: ro, nodev, nosuid, noexec, noatime, fsname=NAME, ... (may be repeated)";
        Survive Ours [Stack Cage Union] "survive" None, None, |s| s.door.survive = true, "Go on when the process that serves the mount is killed or crashes: open files, locks and requests under way as well";
        Foreground Letter [Stack Cage Union] "foreground" Some('f'), None, |s| s.foreground = true, "Stay in the foreground: one process, which ends with the mount";
        Debug Letter [Stack Cage Union] "debug" Some('d'), None, |s| (s.debug, s.foreground) = (true, true), "Log every request; implies -f";
        SingleThread Letter [Stack Cage KernelCage Union] "" Some('s'), None, |_s| {}, "Accepted for libfuse's sake: several threads serve every mount";
        Daemon Ours [Stack Union] "daemon" None, Some("NAME"), |s, v| s.daemon = Some(shared::name(&v.text()?)?), "Serve it by one process together with all other mounts of that NAME, which ends with the last of them";
        Explain Ours [Stack Cage KernelCage Union] "explain" None, None, |s| s.explain = true, "Print what would be mounted and why, and do nothing";
        Log Ours [Stack Cage KernelCage Union] "log" None, Some("error|warn|info|debug|trace"), |s, v| s.log = Some(v.choice(&LEVELS)?), "What to log: error, warn, info, debug (with each request), trace [default: info, on standard error warn]";
        LogTarget Ours [Stack Cage KernelCage Union] "log-target" None, Some("TARGET"), |s, v| s.log_target = Some(v.log_target()?), "Where the log goes: auto, journal, syslog, stderr, file:PATH, none [default: auto: standard error in the foreground, else the journal, or syslog]";
        LogFile Ours [Stack Cage KernelCage Union] "log-file" None, Some("FILE"), |s, v| s.log_target = Some(LogTarget::File(v.file()?.into())), "The same as --log-target=file:FILE";
    }
    "About" {
        Help Letter [Stack] "help" Some('h'), None, |s| s.help = true, "Print this and exit";
        Version Letter [Stack] "version" Some('V'), None, |s| s.version = true, "Print the version and exit";
        FuseVersion Letter [Stack] "fuse-version" None, None, |s| s.fuse_version = true, "Print the version of the kernel interface and exit";
    }
    "Mount words" {
        Ro Word [Stack Cage Union] "ro" None, None, |s| s.flag("ro").read_only = true, "read-only";
        Rw Word [Stack Cage KernelCage Union] "rw" None, None, |s| s.flag("rw").read_only = false, "writable";
        Suid Word [Stack Cage Union] "suid" None, None, |s| s.flag("suid").suid = true, "let set-user-id programs take effect";
        NoSuid Word [Stack Cage Union] "nosuid" None, None, |s| s.flag("nosuid").suid = false, "set-user-id programs take no effect (the default)";
        Dev Word [Stack Cage Union] "dev" None, None, |s| s.flag("dev").dev = true, "let device nodes work";
        NoDev Word [Stack Cage Union] "nodev" None, None, |s| s.flag("nodev").dev = false, "device nodes do not work (the default)";
        Exec Word [Stack Cage Union] "exec" None, None, |s| s.flag("exec").exec = true, "let programs run";
        NoExec Word [Stack Cage Union] "noexec" None, None, |s| s.flag("noexec").exec = false, "programs do not run";
        SymFollow Word [Stack Cage Union] "symfollow" None, None, |s| s.flag("symfollow").symfollow = true, "follow symbolic links";
        NoSymFollow Word [Stack Cage Union] "nosymfollow" None, None, |s| s.flag("nosymfollow").symfollow = false, "do not follow symbolic links";
        Atime Word [Stack Cage Union] "atime" None, None, |s| s.flag("atime").atime = None, "access times as the kernel's default";
        NoAtime Word [Stack Cage Union] "noatime" None, None, |s| s.flag("noatime").atime = Some(Atime::No), "keep no access times";
        RelAtime Word [Stack Cage Union] "relatime" None, None, |s| s.flag("relatime").atime = Some(Atime::Relative), "access times now and then";
        StrictAtime Word [Stack Cage Union] "strictatime" None, None, |s| s.flag("strictatime").atime = Some(Atime::Strict), "every access time";
        DirAtime Word [Stack Cage Union] "diratime" None, None, |s| s.flag("diratime").nodiratime = false, "access times of directories";
        NoDirAtime Word [Stack Cage Union] "nodiratime" None, None, |s| s.flag("nodiratime").nodiratime = true, "no access times of directories";
        Sync Word [Stack Cage Union] "sync" None, None, |s| s.door.sync = true, "write through";
        Async Word [Stack Cage Union] "async" None, None, |s| s.door.sync = false, "do not write through";
        DirSync Word [Stack Cage Union] "dirsync" None, None, |s| s.door.dirsync = true, "write directories through";
        AllowOther Word [Stack Cage Union] "allow_other" None, None, |s| (s.door.allow_other, s.door.others_asked) = (true, true), "everybody may use the mount (the default where the system allows it)";
        AllowRoot Word [Stack Cage Union] "allow_root" None, None, |_s| allow_root()?, "only the mounter and root may use the mount";
        DefaultPermissions Word [Stack Cage Union] "default_permissions" None, None, |_s| {}, "the kernel checks permissions (always so)";
        LibfuseDirectIo Word [Stack Union] "direct_io" None, None, |s| s.door.direct_io = true, "no page cache, in libfuse's spelling";
        FsName Word [Stack Cage Union] "fsname" None, Some("NAME"), |s, v| s.door.fsname = Some(v.text()?), "first column of the mount table";
        Subtype Word [Stack Cage Union] "subtype" None, Some("NAME"), |s, v| s.door.subtype = Some(v.text()?), "type in the mount table, after fuse.";
        MaxRead Word [Stack Cage Union] "max_read" None, Some("N"), |_s| {}, "accepted: the size of reads is negotiated";
        ShownUid Word [] "uid" None, Some("N"), |s, v| s.shown_uid = Some(v.number()?), "owner of everything shown, over every other option";
        ShownGid Word [] "gid" None, Some("N"), |s, v| s.shown_gid = Some(v.number()?), "group of everything shown, over every other option";
        Umask Word [Union] "umask" None, Some("MASK"), |s, v| s.umask = Some(v.mask()?), "permission bits of everything shown are 0777 without MASK (octal)";
        EntryTimeout Word [Stack Cage Union] "entry_timeout" None, Some("SECONDS"), |s, v| s.door.entry_timeout = Some(v.seconds()?), "how long names are cached, instead of what coherence says";
        AttrTimeout Word [Stack Union] "attr_timeout" None, Some("SECONDS"), |s, v| s.door.attr_timeout = Some(v.seconds()?), "how long attributes are cached";
        NegativeTimeout Word [Stack Cage Union] "negative_timeout" None, Some("SECONDS"), |s, v| s.door.negative_timeout = Some(v.seconds()?), "how long missing names are cached";
        AutoUnmount Word [Stack Cage KernelCage Union] "auto_unmount" None, None, |_s| {}, "accepted: a mount goes with its daemon";
        NonEmpty Word [Stack Cage Union] "nonempty" None, None, |s| s.nonempty = true, "say nothing of a mount point that is not empty";
        SecurityContext Word [Stack Cage Union] "context" None, Some("CONTEXT"), |s, v| s.door.kernel_words.push(v.as_word()?), "security context of everything";
        FsContext Word [Stack Cage Union] "fscontext" None, Some("CONTEXT"), |s, v| s.door.kernel_words.push(v.as_word()?), "security context of the file system";
        DefContext Word [Stack Cage Union] "defcontext" None, Some("CONTEXT"), |s, v| s.door.kernel_words.push(v.as_word()?), "security context of what has none";
        RootContext Word [Stack Cage Union] "rootcontext" None, Some("CONTEXT"), |s, v| s.door.kernel_words.push(v.as_word()?), "security context of the root directory";
        Remount Word [Stack Cage Union] "remount" None, None, |s| s.remount = true, "change the flags of what is mounted here (mount(8) only)";
    }
}

/// Words without meaning for a mount program: dropped, with or without a value.
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
    // The kernel's own words, which the mount table shows and `mount -o remount` passes back.
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

/// Words that would change the meaning of the mount and are not supported, each with the reason.
const REFUSED: &[(&str, &str)] = &[
    ("modules", "libfuse modules cannot be loaded; `nacre mount` stacks layers instead"),
    ("blkdev", "a mirror is no block device"),
    ("fd", "the descriptor of the FUSE device is opened by this program"),
    ("drop_privileges", "start the program as the user that shall serve the mount"),
    ("setuid", "start the program as the user that shall serve the mount"),
];

/// Returns an option by its long name, as it is written after `--`.
pub fn long(name: &str) -> Option<&'static Row> {
    TABLE.iter().find(|row| row.spelling != Word && !row.name.is_empty() && row.name == name)
}

/// Returns an option by its letter.
pub fn letter(letter: char) -> Option<&'static Row> {
    TABLE.iter().find(|row| row.short == Some(letter))
}

/// Meaning of a word after `-o`.
#[derive(Clone, Copy, Debug)]
pub enum MountWord {
    /// An option of the table.
    Row(&'static Row),
    /// Without meaning for a mount program.
    Ignored,
    /// Known and refused, for this reason.
    Refused(&'static str),
}

/// Returns the meaning of the word `name` of `-o name` or `-o name=value`.
pub fn word(name: &str, has_value: bool) -> Option<MountWord> {
    // `-o user`, `-o group`, `-o owner` are fstab's; bindfs' deprecated spellings have a value (and
    // libfuse swallows `user=`).
    let fstab = match name {
        "user" => true,
        "owner" | "group" => !has_value,
        _ => false,
    };
    if fstab || name.starts_with("x-") || name.starts_with("X-") {
        return Some(MountWord::Ignored);
    }
    let row = TABLE
        .iter()
        .find(|row| !row.name.is_empty() && row.name == name && (row.spelling != Letter || row.id == Opt::Debug));
    if let Some(row) = row {
        return (row.value.is_some() == has_value).then_some(MountWord::Row(row));
    }
    if IGNORED.contains(&name) {
        return Some(MountWord::Ignored);
    }
    REFUSED.iter().find(|(refused, _)| *refused == name).map(|(_, why)| MountWord::Refused(why))
}
