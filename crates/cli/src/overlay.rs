//! The command line of fuse-overlayfs, for container engines that run it to mount their layers
//! (podman's `mount_program`).
//!
//! Called when the program is named `fuse-overlayfs`, and for `nacre fuse-overlayfs`. Pure: words
//! in, a [`Plan`] for a union out. Words that fuse-overlayfs does not know are reported and
//! ignored, as it does: engines pass words that are meant for the kernel's overlay file system.
//! Unsupported words that would change the stored data are refused.

use crate::{
    plan::{self, Plan},
    settings::Settings,
};
use nacre_daemon::{
    failure::Failure,
    plan::{Atime, FUSE_OVERLAYFS, MountPlan, StackSource, Transport},
    shared,
};
use nacre_layers::shift::Ranges;
use nacre_stack::spec::{
    BranchSource, BranchSpec, Branches, HostCoherence, HostSpec, LayerSpec, OverrideAttribute, OverrideStatSpec,
    ShiftSpec, StackSpec, TraceLevel, TraceSpec, UnionSpec,
};
use nacre_union::{BranchMode, parse_overlay};
use std::{
    ffi::{OsStr, OsString},
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Path, PathBuf},
    time::Duration,
};

/// Environment variable: if it is set, whiteouts are `.wh.` files.
pub const WHITEOUT_FILES: &str = "FUSE_OVERLAYFS_DISABLE_OVL_WHITEOUT";

/// Words that have no effect here.
pub(crate) const UNNEEDED: &[&str] = &[
    // Everything is served by many threads.
    "threaded",
    "clone_fd",
    "max_idle_threads",
    "max_threads",
    // Types and numbers come from the directories themselves.
    "fast_ino",
    "xino",
    // A directory that is merged shows one link in any case.
    "static_nlink",
    // The kernel reads and writes files directly where it can (passthrough).
    "writeback",
    "max_read",
    "max_write",
    "big_writes",
    // Always so.
    "default_permissions",
    "lazytime",
    "auto_unmount",
    "defaults",
    "plugins=",
    "userxattr",
    "index=off",
    "nfs_export=off",
    "metacopy=off",
    // The features that these words allow are not used.
    "index=on",
    "nfs_export=on",
    "metacopy=on",
    "redirect_dir=off",
    "redirect_dir=nofollow",
    "async",
];

/// The parsed words.
#[derive(Default)]
struct OverlayWords {
    lower: Option<OsString>,
    upper: Option<PathBuf>,
    work: Option<PathBuf>,
    shift: ShiftSpec,
    attribute: OverrideAttribute,
    not_durable: bool,
    settings: Settings,
    /// Whether `allow_other` was given.
    shared: bool,
}

/// Parses the command line. `root`: whether the mounter may let other users in; `whiteout_files`:
/// whether [`WHITEOUT_FILES`] is set.
///
/// # Errors
/// A wrong command line.
pub fn overlay(
    arguments: impl IntoIterator<Item = OsString>,
    root: bool,
    whiteout_files: bool,
) -> Result<Plan, Failure> {
    let mut told = OverlayWords { settings: defaults(), ..OverlayWords::default() };
    let mut positionals = Vec::new();
    let mut rest = arguments.into_iter();
    while let Some(argument) = rest.next() {
        match argument.as_bytes() {
            b"-h" | b"--help" => return Ok(Plan::Help),
            b"-V" | b"--version" => return Ok(Plan::Version),
            b"-f" => told.settings.foreground = true,
            b"-d" | b"--debug" => told.debug(),
            // One thread would only be slower.
            b"-s" => {}
            b"-o" => {
                let words = rest.next().ok_or_else(|| Failure::usage("option -o needs a value: -o WORD[,WORD]..."))?;
                told.obey_all(&words)?;
            }
            [b'-', b'o', attached @ ..] => told.obey_all(OsStr::from_bytes(attached))?,
            // Of our own options, those that the mount alone is concerned with.
            [b'-', b'-', word @ ..]
                if [&b"transport="[..], b"passthrough=", b"daemon="].iter().any(|own| word.starts_with(own)) =>
            {
                told.obey(OsStr::from_bytes(word))?;
            }
            [b'-', _, ..] => {
                return Err(Failure::usage(format!("unknown option {}", argument.as_bytes().escape_ascii()))
                    .next("--help shows how"));
            }
            _ => positionals.push(argument),
        }
    }
    told.settings.door.allow_other = root || told.shared;
    let plan = told.plan(mountpoint(positionals)?, whiteout_files)?;
    Ok(Plan::Mount(Box::new(plan)))
}

/// Returns the defaults of fuse-overlayfs.
fn defaults() -> Settings {
    let mut settings = Settings::default();
    let door = &mut settings.door;
    door.suid = true;
    door.atime = Some(Atime::No);
    door.fsname = Some(FUSE_OVERLAYFS.to_owned());
    door.subtype = Some(FUSE_OVERLAYFS.to_owned());
    settings
}

/// Returns the mount point; mount(8) puts the first column of fstab before it.
fn mountpoint(positionals: Vec<OsString>) -> Result<PathBuf, Failure> {
    let mut rest = positionals.into_iter();
    match (rest.next(), rest.next(), rest.next()) {
        (Some(only), None, None) | (Some(_), Some(only), None) if !only.is_empty() => Ok(only.into()),
        (_, _, Some(extra)) => Err(Failure::usage(format!("too many arguments: \"{}\"", extra.to_string_lossy()))),
        _ => Err(Failure::usage("a mount point is needed").next("--help shows how")),
    }
}

/// Splits at commas. `\,` is a comma, `\NNN` the byte of that octal number; all other backslashes
/// are kept with the next character.
fn split(text: &[u8]) -> Vec<Vec<u8>> {
    let mut words = vec![Vec::new()];
    let mut rest = text;
    while let [byte, tail @ ..] = rest {
        rest = tail;
        let Some(word) = words.last_mut() else { break };
        match (byte, tail) {
            (b',', _) => words.push(Vec::new()),
            (b'\\', [b',', tail @ ..]) => {
                word.push(b',');
                rest = tail;
            }
            (b'\\', [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', tail @ ..]) => {
                word.extend([b'\\', (a - b'0') << 6 | (b - b'0') << 3 | (c - b'0')]);
                rest = tail;
            }
            (b'\\', [next, tail @ ..]) => {
                word.extend([b'\\', *next]);
                rest = tail;
            }
            (byte, _) => word.push(*byte),
        }
    }
    words.retain(|word| !word.is_empty());
    words
}

/// Returns a path without its backslashes.
fn path(value: &OsStr) -> PathBuf {
    let mut bytes = Vec::new();
    let mut rest = value.as_bytes().iter();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'\\' => *rest.next().unwrap_or(byte),
            byte => *byte,
        });
    }
    OsString::from_vec(bytes).into()
}

fn wrong(word: &str, allowed: &str) -> Failure {
    Failure::usage(format!("{word}: write {allowed}"))
}

fn number<T: std::str::FromStr>(word: &str, value: &OsStr, allowed: &str) -> Result<T, Failure> {
    value.to_str().and_then(|text| text.parse().ok()).ok_or_else(|| wrong(word, allowed))
}

fn switch(word: &str, value: &OsStr) -> Result<bool, Failure> {
    match value.as_bytes() {
        b"0" => Ok(false),
        b"1" => Ok(true),
        _ => Err(wrong(word, &format!("{word}=0 or {word}=1"))),
    }
}

fn ranges(word: &str, value: &OsStr) -> Result<Option<String>, Failure> {
    let text = value.to_string_lossy();
    let ranges: Ranges = text.parse().map_err(|error| Failure::usage(format!("{word}: {error}")))?;
    Ok(Some(ranges.to_string()))
}

impl OverlayWords {
    fn debug(&mut self) {
        self.settings.debug = true;
        self.settings.foreground = true;
    }

    fn obey_all(&mut self, list: &OsStr) -> Result<(), Failure> {
        split(list.as_bytes()).iter().try_for_each(|word| self.obey(OsStr::from_bytes(word)))
    }

    fn obey(&mut self, word: &OsStr) -> Result<(), Failure> {
        let bytes = word.as_bytes();
        let (name, value) = match bytes.iter().position(|byte| *byte == b'=') {
            Some(at) => (bytes.get(..at).unwrap_or_default(), bytes.get(at + 1..).map(OsStr::from_bytes)),
            None => (bytes, None),
        };
        let name = String::from_utf8_lossy(name);
        let known = match value {
            Some(value) => self.obey_value(&name, value)?,
            None => self.obey_flag(&name),
        };
        if !known && !UNNEEDED.iter().any(|unneeded| *unneeded == name || word == *unneeded) {
            self.settings.warnings.push(format!("unknown argument ignored: {}", word.to_string_lossy().escape_debug()));
        }
        Ok(())
    }

    fn obey_value(&mut self, name: &str, value: &OsStr) -> Result<bool, Failure> {
        const MORE_THAN_EVER: f64 = 1e9;
        match name {
            "lowerdir" => self.lower = Some(value.to_owned()),
            "upperdir" => self.upper = Some(path(value)),
            "workdir" => self.work = Some(path(value)),
            "uidmapping" => self.shift.uid = ranges(name, value)?,
            "gidmapping" => self.shift.gid = ranges(name, value)?,
            "squash_to_uid" => self.shift.squash_uid = Some(number(name, value, "a user id")?),
            "squash_to_gid" => self.shift.squash_gid = Some(number(name, value, "a group id")?),
            "xattr_permissions" => {
                self.attribute = match value.as_bytes() {
                    b"0" => OverrideAttribute::Carried,
                    b"1" => OverrideAttribute::Privileged,
                    b"2" => OverrideAttribute::Containers,
                    _ => return Err(wrong(name, "0, 1 or 2")),
                };
            }
            "fsync" => self.not_durable = !switch(name, value)?,
            "timeout" => {
                let seconds: f64 = number(name, value, "a number of seconds")?;
                let held = Duration::try_from_secs_f64(seconds.min(MORE_THAN_EVER))
                    .map_err(|_| wrong(name, "a number of seconds"))?;
                let door = &mut self.settings.door;
                (door.entry_timeout, door.attr_timeout, door.negative_timeout) = (Some(held), Some(held), Some(held));
            }
            "noxattrs" => {
                if switch(name, value)? {
                    (self.settings.door.xattr, self.settings.door.acl) = (false, false);
                }
            }
            "transport" => {
                self.settings.door.transport = match value.as_bytes() {
                    b"auto" => Transport::Auto,
                    b"uring" => Transport::Uring,
                    b"device" => Transport::Device,
                    _ => return Err(wrong(name, "auto, uring or device")),
                };
            }
            "daemon" => {
                let text = value.to_str().ok_or_else(|| wrong(name, "a name"))?;
                self.settings.daemon = Some(shared::name(text)?);
            }
            "passthrough" => {
                self.settings.door.passthrough = match value.as_bytes() {
                    b"auto" => true,
                    b"off" => false,
                    _ => return Err(wrong(name, "auto or off")),
                };
            }
            "context" | "fscontext" | "defcontext" | "rootcontext" => {
                let text = value.to_str().ok_or_else(|| wrong(name, "a security context"))?;
                self.settings.door.kernel_words.push(format!("{name}={text}"));
            }
            "plugins" if !value.is_empty() => {
                return Err(Failure::usage("plugins of fuse-overlayfs cannot be loaded").next("leave plugins= out"));
            }
            "redirect_dir" if !matches!(value.as_bytes(), b"off" | b"nofollow") => {
                return Err(Failure::usage(
                    "redirect_dir: only off is possible; directories are copied when they are renamed",
                ));
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn obey_flag(&mut self, name: &str) -> bool {
        let door = &mut self.settings.door;
        match name {
            "squash_to_root" => (self.shift.squash_uid, self.shift.squash_gid) = (Some(0), Some(0)),
            "volatile" => self.not_durable = true,
            "noacl" => door.acl = false,
            "allow_other" => self.shared = true,
            "ro" => door.read_only = true,
            "rw" => door.read_only = false,
            "suid" => door.suid = true,
            "nosuid" => door.suid = false,
            "dev" => door.dev = true,
            "nodev" => door.dev = false,
            "exec" => door.exec = true,
            "noexec" => door.exec = false,
            "atime" | "relatime" => door.atime = None,
            "noatime" => door.atime = Some(Atime::No),
            "sync" => door.sync = true,
            "dirsync" => door.dirsync = true,
            "debug" => self.debug(),
            _ => return false,
        }
        true
    }

    fn plan(self, mountpoint: PathBuf, whiteout_files: bool) -> Result<MountPlan, Failure> {
        self.settings.check_process()?;
        let lower =
            self.lower.as_ref().ok_or_else(|| Failure::usage("lowerdir= is needed").next("--help shows how"))?;
        let lower = parse_overlay(None, lower).map_err(|error| Failure::usage(error.to_string()))?;
        let mut branches = Vec::new();
        match (&self.upper, &self.work) {
            (Some(upper), Some(work)) => branches.push(self.upper_branch(upper, work)?),
            (Some(_), None) => {
                return Err(Failure::usage(
                    "upperdir= needs workdir= beside it: a directory on the same file system, for copies in the making",
                ));
            }
            // As the kernel's overlay file system, without an upper directory nothing needs work.
            (None, _) => {}
        }
        branches.extend(lower.into_iter().map(|(path, _)| lower_branch(path)));
        let mut option = vec![if whiteout_files { "whiteout=wh" } else { "whiteout=chardev" }.to_owned()];
        if self.not_durable {
            option.push("volatile".to_owned());
        }
        let union = UnionSpec {
            branch: Branches(branches),
            option,
            coherence: HostCoherence::Exclusive,
            ..UnionSpec::default()
        };
        let mut layers = vec![LayerSpec::Union(Box::new(union))];
        if self.shift != ShiftSpec::default() {
            layers.push(LayerSpec::Shift(self.shift));
        }
        if self.settings.debug {
            layers.push(LayerSpec::Trace(TraceSpec { level: TraceLevel::All }));
        }
        let spec = StackSpec { layers };
        spec.check().map_err(|error| Failure::usage(error.to_string()))?;
        Ok(plan::mount(FUSE_OVERLAYFS, StackSource::Spec(spec), mountpoint, self.settings))
    }

    fn upper_branch(&self, upper: &Path, work: &Path) -> Result<BranchSpec, Failure> {
        let host = HostSpec { source: upper.to_owned(), work: Some(work.to_owned()), ..HostSpec::default() };
        let mode = match self.attribute {
            OverrideAttribute::Carried => Ok(BranchMode::rw()),
            // There are no ACLs where modes are kept in attributes, so none can be copied.
            OverrideAttribute::Privileged | OverrideAttribute::Containers => BranchMode::parse("rw+icexsys"),
        };
        Ok(branch(host, self.attribute, mode.map_err(|error| Failure::usage(error.to_string()))?))
    }
}

/// Returns a read-only layer; owners and modes come from attributes where its root has them.
fn lower_branch(source: PathBuf) -> BranchSpec {
    branch(HostSpec { source, ..HostSpec::default() }, OverrideAttribute::Carried, BranchMode::layer())
}

fn branch(host: HostSpec, attribute: OverrideAttribute, mode: BranchMode) -> BranchSpec {
    let host = HostSpec { coherence: HostCoherence::Exclusive, ..host };
    let layers = vec![LayerSpec::Host(host), LayerSpec::OverrideStat(OverrideStatSpec { attribute })];
    BranchSpec { source: BranchSource::Stack(StackSpec { layers }), mode }
}

/// Returns the text of `--help`.
pub fn help() -> &'static str {
    "Usage: fuse-overlayfs [-f] [-d] -o lowerdir=DIR[:DIR...][,upperdir=DIR,workdir=DIR][,WORD...] MOUNTPOINT\n\n\
     Shows lower directories as one tree; changes go to the upper one. Without upperdir, nothing can be changed.\n\n  \
     -f, -d, -h, -V                 foreground; and log everything; this help; the version\n  \
     -o uidmapping=A:B:N[:A:B:N...] what the layers have as ids A... shows as B...; gidmapping= alike\n  \
     -o squash_to_root              everything shows as root's; squash_to_uid=, squash_to_gid= alike\n  \
     -o xattr_permissions=1|2       owners and modes are kept in extended attributes: security.*, or user.*\n  \
     -o volatile, fsync=0           nothing is made durable\n  \
     -o timeout=SECONDS             how long the kernel keeps what it knows; for good by default\n  \
     -o noacl, noxattrs=1           no ACLs; no extended attributes at all\n  \
     -o ro, dev, nosuid, noexec...  as mount(8) has them; suid, nodev and noatime are the default\n\n\
     Example: fuse-overlayfs -o lowerdir=/base,upperdir=/changes,workdir=/work /merged\n"
}
