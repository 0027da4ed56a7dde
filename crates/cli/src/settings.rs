//! What each option means: the list of options as given is folded into layers and mount settings,
//! the last one winning.
//!
//! Called by [`crate::plan`]. Pure. The match in [`Settings::apply`] is exhaustive, so an option
//! cannot be in the table of [`crate::options`] without a meaning here.

use crate::{
    cage::settings::CageSettings,
    options::{self, Opt, TABLE},
    words::{self, Given},
};
use nacre_daemon::{
    cage::engine::FileSystem,
    failure::Failure,
    plan::{Atime, Door, Engine, Transport, Verbosity},
    shared,
};
use nacre_layers::{
    remap::perms::Perms,
    size::{LimitRule, Share, Size},
    throttle::rate::Rate,
};
use nacre_stack::spec::{
    ChangePolicy, CreateAs, HostCoherence, HostSpec, LayerSpec, RemapSpec, SymlinkDeletion, Symlinks, ThrottleSpec,
    TraceLevel, TraceSpec, WhenFull, Writes, XattrPolicy,
};
use std::{ffi::OsStr, fmt, path::PathBuf, str::FromStr, time::Duration};

/// All options together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// The directory below; its source is filled in by the plan.
    pub host: HostSpec,
    /// Owners, modes, rules.
    pub remap: RemapSpec,
    /// Rates.
    pub throttle: ThrottleSpec,
    /// Limits.
    pub cage: CageSettings,
    /// The mount itself.
    pub door: Door,
    /// What serves it.
    pub engine: Engine,
    /// `-f`.
    pub foreground: bool,
    /// `-d`.
    pub debug: bool,
    /// `--explain`.
    pub explain: bool,
    /// `-h`.
    pub help: bool,
    /// `-V`.
    pub version: bool,
    /// `--fuse-version`.
    pub fuse_version: bool,
    /// `-o remount`.
    pub remount: bool,
    /// `-o nonempty`.
    pub nonempty: bool,
    /// `--log`.
    pub log: Option<Verbosity>,
    /// `--log-file`.
    pub log_file: Option<PathBuf>,
    /// `--daemon`.
    pub daemon: Option<String>,
    /// The flags of the mount that were named, as words, in the order given: what a remount
    /// changes.
    pub flags: Vec<&'static str>,
    /// The first option given that belongs to a layer, as it is written: `nacre mount` has no use
    /// for it.
    pub layer_option: Option<&'static str>,
    /// The first option given that only a cage has.
    pub cage_option: Option<&'static str>,
    /// Things worth a line on standard error.
    pub warnings: Vec<String>,
    deprecated_user: Option<String>,
    deprecated_group: Option<String>,
    shown_uid: Option<u32>,
    shown_gid: Option<u32>,
    umask: Option<u32>,
}

impl Settings {
    /// Folds the options as given.
    ///
    /// # Errors
    /// A value that does not fit its option, or options that exclude each other.
    pub fn fold(given: &[Given]) -> Result<Settings, Failure> {
        let mut settings = Settings::default();
        for option in given {
            settings.apply(option.option, &option.value)?;
        }
        settings.settle()?;
        Ok(settings)
    }

    fn apply(&mut self, option: Opt, value: &OsStr) -> Result<(), Failure> {
        if is_layer(option) && self.layer_option.is_none() {
            self.layer_option = Some(name(option));
        }
        if options::is_of_cages(option) && self.cage_option.is_none() {
            self.cage_option = Some(name(option));
        }
        match option {
            Opt::ForceUser => self.remap.force_user = Some(owner(option, value)?),
            Opt::ForceGroup => self.remap.force_group = Some(owner(option, value)?),
            Opt::User | Opt::Owner => {
                self.warnings.push(format!("--{} is deprecated: write --force-user", name(option)));
                self.deprecated_user = Some(owner(option, value)?);
            }
            Opt::Group => {
                self.warnings.push("--group is deprecated: write --force-group".to_owned());
                self.deprecated_group = Some(owner(option, value)?);
            }
            Opt::Mirror => self.remap.mirror = Some(words::text(name(option), value)?),
            Opt::MirrorOnly => self.remap.mirror_only = Some(words::text(name(option), value)?),
            Opt::Map => self.remap.map = Some(words::text(name(option), value)?),
            Opt::MapPasswd => self.remap.map_passwd = Some(file(option, value)?),
            Opt::MapPasswdRev => self.remap.map_passwd_rev = Some(file(option, value)?),
            Opt::MapGroup => self.remap.map_group = Some(file(option, value)?),
            Opt::MapGroupRev => self.remap.map_group_rev = Some(file(option, value)?),
            Opt::UidOffset => self.remap.uid_offset = Some(number(option, value)?),
            Opt::GidOffset => self.remap.gid_offset = Some(number(option, value)?),
            Opt::Perms => self.remap.perms = Some(checked::<Perms>(option, value)?),
            Opt::RealisticPermissions => self.remap.realistic_permissions = true,
            Opt::For => self.remap.for_types.push(words::text(name(option), value)?),
            Opt::Hide => self.remap.hide.push(words::text(name(option), value)?),
            Opt::CreateAsUser => self.remap.create_as = CreateAs::User,
            Opt::CreateAsMounter => self.remap.create_as = CreateAs::Mounter,
            Opt::CreateForUser => self.remap.create_for_user = Some(owner(option, value)?),
            Opt::CreateForGroup => self.remap.create_for_group = Some(owner(option, value)?),
            Opt::CreateWithPerms => self.remap.create_with_perms = Some(checked::<Perms>(option, value)?),
            Opt::ChownNormal => self.remap.chown = ChangePolicy::Normal,
            Opt::ChownIgnore => self.remap.chown = ChangePolicy::Ignore,
            Opt::ChownDeny => self.remap.chown = ChangePolicy::Deny,
            Opt::ChgrpNormal => self.remap.chgrp = ChangePolicy::Normal,
            Opt::ChgrpIgnore => self.remap.chgrp = ChangePolicy::Ignore,
            Opt::ChgrpDeny => self.remap.chgrp = ChangePolicy::Deny,
            Opt::ChmodNormal => self.remap.chmod = ChangePolicy::Normal,
            Opt::ChmodIgnore => self.remap.chmod = ChangePolicy::Ignore,
            Opt::ChmodDeny => self.remap.chmod = ChangePolicy::Deny,
            Opt::ChmodFilter => self.remap.chmod_filter = Some(checked::<Perms>(option, value)?),
            Opt::ChmodAllowX => self.remap.chmod_allow_x = true,
            Opt::XattrRw => self.remap.xattr = XattrPolicy::Rw,
            Opt::XattrRo => self.remap.xattr = XattrPolicy::Ro,
            Opt::XattrNone => self.remap.xattr = XattrPolicy::None,
            Opt::Xattr => {
                self.remap.xattr = word(option, value, XattrPolicy::from_word, XattrPolicy::WORDS)?;
            }
            Opt::Acl => self.door.acl = choice(option, value, &[("auto", true), ("off", false)])?,
            Opt::DeleteDeny => self.remap.delete_deny = true,
            Opt::RenameDeny => self.remap.rename_deny = true,
            Opt::ReplaceDeny => self.remap.replace_deny = true,
            Opt::TruncateDeny => self.remap.truncate_deny = true,
            Opt::HideHardLinks => self.remap.hide_hard_links = true,
            Opt::ResolveSymlinks => self.host.symlinks = Symlinks::Resolve,
            Opt::ResolvedSymlinkDeletion => {
                self.host.symlink_deletion = word(option, value, SymlinkDeletion::from_word, SymlinkDeletion::WORDS)?;
            }
            Opt::BlockDevicesAsFiles => self.remap.block_devices_as_files = true,
            Opt::CtimeFromMtime => self.remap.ctime_from_mtime = true,
            Opt::ReadRate => self.throttle.read_rate = Some(checked::<Rate>(option, value)?),
            Opt::WriteRate => self.throttle.write_rate = Some(checked::<Rate>(option, value)?),
            // Threads are always on: new objects are made with the right owner at once, so bindfs'
            // reason for one thread does not exist.
            Opt::Multithreaded | Opt::SingleThread => {}
            Opt::EnableLockForwarding => self.door.lock_forwarding = true,
            Opt::DisableLockForwarding => self.door.lock_forwarding = false,
            Opt::EnableIoctl => self.host.ioctl = true,
            Opt::DirectIo | Opt::LibfuseDirectIo => self.door.direct_io = true,
            Opt::NoDirectIo => self.door.direct_io = false,
            Opt::ForwardOdirect => self.host.forward_odirect = Some(alignment(option, value)?),
            Opt::Coherence => {
                self.host.coherence = word(option, value, HostCoherence::from_word, HostCoherence::WORDS)?;
            }
            Opt::Immutable => {
                self.door.immutable = true;
                self.door.read_only = true;
                self.host.coherence = HostCoherence::Exclusive;
            }
            Opt::NotifyWatchers => self.door.notify_watchers = true,
            Opt::Engine => {
                self.engine = engine(value)?;
            }
            Opt::Passthrough => self.door.passthrough = choice(option, value, &[("auto", true), ("off", false)])?,
            Opt::Transport => {
                let known = [("auto", Transport::Auto), ("uring", Transport::Uring), ("device", Transport::Device)];
                self.door.transport = choice(option, value, &known)?;
            }
            Opt::Size => self.cage.size = Some(limit(option, value)?),
            Opt::Inodes => self.cage.inodes = Some(inodes(option, value)?),
            Opt::WhenFull => {
                self.cage.when_full = word(option, value, WhenFull::from_word, WhenFull::WORDS)?;
            }
            Opt::Rotated => self.cage.rotated.push(glob(option, value)?),
            Opt::Keep => self.cage.keep.push(glob(option, value)?),
            Opt::Soft => self.cage.soft = Some(checked::<Share>(option, value)?),
            Opt::OnSoft => self.cage.on_soft = Some(command(option, value)?),
            Opt::Limit => self.cage.limits.push(checked::<LimitRule>(option, value)?),
            Opt::Writes => self.cage.writes = word(option, value, Writes::from_word, Writes::WORDS)?,
            Opt::State => self.cage.state = Some(file(option, value)?),
            Opt::FsType => self.cage.fstype = Some(word(option, value, FileSystem::of, &["ext4", "xfs", "btrfs"])?),
            Opt::Image => self.cage.image = Some(file(option, value)?),
            Opt::Sparse => self.cage.sparse = true,
            Opt::NoAllowOther => self.door.allow_other = false,
            Opt::ReadOnly | Opt::Ro => self.flag("ro", |door| door.read_only = true),
            Opt::Words => return self.apply_words(value),
            Opt::Foreground => self.foreground = true,
            Opt::Debug => {
                self.debug = true;
                self.foreground = true;
            }
            Opt::Explain => self.explain = true,
            Opt::Log => {
                let known = [
                    ("error", Verbosity::Error),
                    ("warn", Verbosity::Warn),
                    ("info", Verbosity::Info),
                    ("debug", Verbosity::Debug),
                    ("trace", Verbosity::Trace),
                ];
                self.log = Some(choice(option, value, &known)?);
            }
            Opt::LogFile => self.log_file = Some(file(option, value)?),
            Opt::Daemon => self.daemon = Some(shared::name(&words::text(name(option), value)?)?),
            Opt::Help => self.help = true,
            Opt::Version => self.version = true,
            Opt::FuseVersion => self.fuse_version = true,
            Opt::Rw => self.flag("rw", |door| door.read_only = false),
            Opt::Suid => self.flag("suid", |door| door.suid = true),
            Opt::NoSuid => self.flag("nosuid", |door| door.suid = false),
            Opt::Dev => self.flag("dev", |door| door.dev = true),
            Opt::NoDev => self.flag("nodev", |door| door.dev = false),
            Opt::Exec => self.flag("exec", |door| door.exec = true),
            Opt::NoExec => self.flag("noexec", |door| door.exec = false),
            Opt::SymFollow => self.flag("symfollow", |door| door.symfollow = true),
            Opt::NoSymFollow => self.flag("nosymfollow", |door| door.symfollow = false),
            Opt::Atime => self.flag("atime", |door| door.atime = None),
            Opt::NoAtime => self.flag("noatime", |door| door.atime = Some(Atime::No)),
            Opt::RelAtime => self.flag("relatime", |door| door.atime = Some(Atime::Relative)),
            Opt::StrictAtime => self.flag("strictatime", |door| door.atime = Some(Atime::Strict)),
            Opt::DirAtime => self.flag("diratime", |door| door.nodiratime = false),
            Opt::NoDirAtime => self.flag("nodiratime", |door| door.nodiratime = true),
            Opt::Sync => self.door.sync = true,
            Opt::Async => self.door.sync = false,
            Opt::DirSync => self.door.dirsync = true,
            Opt::AllowOther => self.door.allow_other = true,
            Opt::AllowRoot => {
                return Err(Failure::usage("-o allow_root is not possible: the kernel has no such rule for FUSE")
                    .next(
                        "allow_other lets everybody in (permissions still hold), --no-allow-other only the mounter",
                    ));
            }
            // Always on: the kernel checks permissions in front of every mount.
            Opt::DefaultPermissions => {}
            Opt::FsName => self.door.fsname = Some(words::text(name(option), value)?),
            Opt::Subtype => self.door.subtype = Some(words::text(name(option), value)?),
            // Accepted for the sake of old lines in fstab; sizes are negotiated, and the kernel
            // drops a mount whose daemon is gone.
            Opt::MaxRead | Opt::AutoUnmount => {}
            Opt::ShownUid => self.shown_uid = Some(number(option, value)?),
            Opt::ShownGid => self.shown_gid = Some(number(option, value)?),
            Opt::Umask => self.umask = Some(mask(value)?),
            Opt::EntryTimeout => self.door.entry_timeout = Some(seconds(option, value)?),
            Opt::AttrTimeout => self.door.attr_timeout = Some(seconds(option, value)?),
            Opt::NegativeTimeout => self.door.negative_timeout = Some(seconds(option, value)?),
            Opt::SecurityContext | Opt::FsContext | Opt::DefContext | Opt::RootContext => {
                self.door.kernel_words.push(format!("{}={}", name(option), words::text(name(option), value)?));
            }
            Opt::NonEmpty => self.nonempty = true,
            Opt::Remount => self.remount = true,
        }
        Ok(())
    }

    fn flag(&mut self, word: &'static str, change: impl FnOnce(&mut Door)) {
        self.flags.push(word);
        change(&mut self.door);
    }

    fn apply_words(&mut self, text: &OsStr) -> Result<(), Failure> {
        let mut given = Vec::new();
        words::parse_words(text, words::Unknown::Refuse, &mut given)?;
        given.iter().try_for_each(|word| self.apply(word.option, &word.value))
    }

    /// Whether one process can be all that was asked for.
    ///
    /// # Errors
    /// It is to be in the foreground, and to serve others, too.
    pub fn check_process(&self) -> Result<(), Failure> {
        match &self.daemon {
            Some(_) if self.foreground => {
                Err(Failure::usage("--daemon=NAME serves in the background, -f and -d in the foreground")
                    .next("leave one of them out"))
            }
            _ => Ok(()),
        }
    }

    /// What can only be said when everything is known.
    fn settle(&mut self) -> Result<(), Failure> {
        self.check_process()?;
        let remap = &mut self.remap;
        remap.force_user = remap.force_user.take().or(self.deprecated_user.take());
        remap.force_group = remap.force_group.take().or(self.deprecated_group.take());
        if remap.mirror.is_some() && remap.mirror_only.is_some() {
            return Err(Failure::usage("--mirror and --mirror-only exclude each other"));
        }
        if let Some(uid) = self.shown_uid {
            if remap.mirror_only.is_some() {
                return Err(Failure::usage("-o uid= and --mirror-only exclude each other"));
            }
            remap.mirror = None;
            remap.force_user = Some(uid.to_string());
        }
        if let Some(gid) = self.shown_gid {
            remap.force_group = Some(gid.to_string());
        }
        if let Some(umask) = self.umask {
            let rule = format!("0{:03o}", 0o777 & !umask);
            remap.perms = Some(match remap.perms.take().filter(|perms| !perms.is_empty()) {
                Some(perms) => format!("{perms}:{rule}"),
                None => rule,
            });
        }
        if remap.xattr == XattrPolicy::None {
            self.door.xattr = false;
            self.door.acl = false;
        }
        Ok(())
    }

    /// The layers from the bottom up. Rules are there even where none was given yet, so that they
    /// can be given later (`nacre reload`); other layers that would change nothing are left out.
    pub fn layers(&self, source: PathBuf) -> Vec<LayerSpec> {
        let host = HostSpec { source, noatime: self.door.atime == Some(Atime::No), ..self.host.clone() };
        let mut layers = vec![LayerSpec::Host(host), LayerSpec::Remap(Box::new(self.remap.clone()))];
        if self.throttle != ThrottleSpec::default() {
            layers.push(LayerSpec::Throttle(self.throttle.clone()));
        }
        if self.debug {
            layers.push(LayerSpec::Trace(TraceSpec { level: TraceLevel::All }));
        }
        layers
    }

    /// What to log: as asked for, everything with `-d`, else warnings.
    pub fn verbosity(&self) -> Verbosity {
        self.log.unwrap_or(if self.debug { Verbosity::Debug } else { Verbosity::default() })
    }
}

/// Whether an option is a setting of a layer, not of the mount.
pub fn is_layer(option: Opt) -> bool {
    const OF_THE_MOUNT: &[&str] = &["Mounting", "About", "Mount words"];
    let of_the_door = matches!(
        option,
        Opt::Acl
            | Opt::Multithreaded
            | Opt::EnableLockForwarding
            | Opt::DisableLockForwarding
            | Opt::DirectIo
            | Opt::NoDirectIo
            | Opt::Immutable
            | Opt::NotifyWatchers
            | Opt::Passthrough
            | Opt::Transport
    );
    let shown = matches!(option, Opt::ShownUid | Opt::ShownGid | Opt::Umask);
    let heading = TABLE.iter().find(|row| row.id == option).map_or("", |row| row.heading);
    shown || !(of_the_door || OF_THE_MOUNT.contains(&heading))
}

/// Whether an option is a rule of the remap layer: what can be changed while mounted.
pub fn is_rule(option: Opt) -> bool {
    const OF_OTHERS: [Opt; 2] = [Opt::ResolveSymlinks, Opt::ResolvedSymlinkDeletion];
    const RULES: &[&str] =
        &["Ownership", "Permission bits", "Rules", "Creating", "Changing owners and modes", "Deleting and links"];
    let heading = TABLE.iter().find(|row| row.id == option).map_or("", |row| row.heading);
    let xattr = matches!(option, Opt::XattrRw | Opt::XattrRo | Opt::Xattr);
    (RULES.contains(&heading) && !OF_OTHERS.contains(&option)) || xattr
}

fn name(option: Opt) -> &'static str {
    TABLE.iter().find(|row| row.id == option).map_or("", |row| row.name)
}

fn wrong(option: Opt, value: &OsStr, allowed: &str) -> Failure {
    Failure::usage(format!("{}: \"{}\" is not {allowed}", name(option), value.to_string_lossy()))
}

/// A user or group: looked up when the stack is built, but never empty (an empty value would be
/// root).
fn owner(option: Opt, value: &OsStr) -> Result<String, Failure> {
    if value.is_empty() {
        return Err(wrong(option, value, "a user or group: name it, or give its number"));
    }
    words::text(name(option), value)
}

/// A text that the layers read again when they are built, refused here already where it makes no
/// sense.
fn checked<T: FromStr<Err: fmt::Display>>(option: Opt, value: &OsStr) -> Result<String, Failure> {
    let text = words::text(name(option), value)?;
    text.parse::<T>().map_err(|error| Failure::usage(format!("{}: {error}", name(option))))?;
    Ok(text)
}

fn file(option: Opt, value: &OsStr) -> Result<PathBuf, Failure> {
    if value.is_empty() { Err(wrong(option, value, "the path of a file")) } else { Ok(PathBuf::from(value)) }
}

fn number<T: std::str::FromStr>(option: Opt, value: &OsStr) -> Result<T, Failure> {
    value.to_str().and_then(|text| text.parse().ok()).ok_or_else(|| wrong(option, value, "a whole number in range"))
}

fn alignment(option: Opt, value: &OsStr) -> Result<u32, Failure> {
    match number(option, value)? {
        0 => Err(wrong(option, value, "an alignment in bytes (1 or more, such as 512 or 4096)")),
        bytes => Ok(bytes),
    }
}

fn mask(value: &OsStr) -> Result<u32, Failure> {
    let mask = value.to_str().and_then(|text| u32::from_str_radix(text, 8).ok()).filter(|mask| *mask <= 0o777);
    mask.ok_or_else(|| wrong(Opt::Umask, value, "an octal mask from 0 to 777"))
}

fn seconds(option: Opt, value: &OsStr) -> Result<Duration, Failure> {
    let seconds = value.to_str().and_then(|text| text.parse::<f64>().ok());
    seconds
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .ok_or_else(|| wrong(option, value, "a number of seconds"))
}

/// One of the words that a layer's setting takes.
fn word<T>(option: Opt, value: &OsStr, meaning: fn(&str) -> Option<T>, words: &[&str]) -> Result<T, Failure> {
    value.to_str().and_then(meaning).ok_or_else(|| wrong(option, value, &format!("one of {}", words.join(", "))))
}

/// One table of engines for all: which of them a command takes, it says itself.
fn engine(value: &OsStr) -> Result<Engine, Failure> {
    const ALL: [Engine; 5] = [Engine::Fuse, Engine::Kernel, Engine::Loop, Engine::Quota, Engine::Auto];
    let known = ALL.into_iter().find(|engine| value == engine.word());
    known.ok_or_else(|| wrong(Opt::Engine, value, "one of fuse, kernel, auto (a cage: fuse, loop, quota, auto)"))
}

fn limit(option: Opt, value: &OsStr) -> Result<Size, Failure> {
    let text = words::text(name(option), value)?;
    let size = text.parse::<Size>().and_then(|size| size.limit().map(|_| size));
    size.map_err(|error| Failure::usage(format!("{}: {error}", name(option))))
}

fn inodes(option: Opt, value: &OsStr) -> Result<u64, Failure> {
    match number(option, value)? {
        0 => Err(wrong(option, value, "a number of files, directories and links: 1 or more")),
        inodes => Ok(inodes),
    }
}

fn glob(option: Opt, value: &OsStr) -> Result<String, Failure> {
    if value.is_empty() {
        Err(wrong(option, value, "a pattern of names, such as '*.gz'"))
    } else {
        words::text(name(option), value)
    }
}

fn command(option: Opt, value: &OsStr) -> Result<String, Failure> {
    if value.is_empty() {
        Err(wrong(option, value, "a command for the shell"))
    } else {
        words::text(name(option), value)
    }
}

fn choice<T: Copy>(option: Opt, value: &OsStr, known: &[(&str, T)]) -> Result<T, Failure> {
    known.iter().find(|(word, _)| value == *word).map(|(_, meaning)| *meaning).ok_or_else(|| {
        let words: Vec<&str> = known.iter().map(|(word, _)| *word).collect();
        wrong(option, value, &format!("one of {}", words.join(", ")))
    })
}
