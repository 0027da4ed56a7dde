//! What is to be mounted, as plain data: written by command lines, carried out by [`crate::serve`]
//! and [`crate::kernel_engine`].
//!
//! Nothing here looks at the system: whether the source exists or a user is known is found out when
//! the plan is carried out, before anything is mounted.

use crate::log::target::LogTarget;
use nacre_stack::spec::StackSpec;
use serde::{Deserialize, Serialize};
use std::{path::PathBuf, time::Duration};

/// The name that the program is called by, and the type and the source in the mount table.
pub const FUSE_OVERLAYFS: &str = "fuse-overlayfs";

/// The name of mergerfs, for which this program can stand.
pub const MERGERFS: &str = "mergerfs";

/// Where the layers come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StackSource {
    /// The options of the command line.
    Spec(StackSpec),
    /// A TOML file, to be read when the plan is carried out.
    File(PathBuf),
}

/// What stands before the directory of a cage in the first column of the mount table, and of fstab.
pub const CAGE_PREFIX: &str = "cage:";
/// The same before the branches of a union.
pub const UNION_PREFIX: &str = "union:";

/// A mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountPlan {
    /// The name that the program was called by: in messages, and the type in the mount table.
    pub program: String,
    /// The layers.
    pub stack: StackSource,
    /// Where.
    pub mountpoint: PathBuf,
    /// What stands before the source in the mount table.
    pub prefix: &'static str,
    /// How.
    pub door: Door,
    /// What serves it.
    pub engine: Engine,
    /// In one process that ends with the mount.
    pub foreground: bool,
    /// Only say what would be done.
    pub explain: bool,
    /// How much is logged; `None`: what happens to the mount, and on standard error warnings.
    pub verbosity: Option<Verbosity>,
    /// Where the log goes; `None`: as the environment says, or [`LogTarget::Auto`].
    pub log_target: Option<LogTarget>,
    /// The name of the process that serves it together with other mounts; `None`: one to itself.
    pub daemon: Option<String>,
    /// Nothing is said of a mount point that is not empty.
    pub nonempty: bool,
    /// Things worth a line on standard error.
    pub warnings: Vec<String>,
}

/// A change of the flags of a mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remount {
    /// Which mount.
    pub mountpoint: PathBuf,
    /// The flags to change, as words, in the order given.
    pub flags: Vec<&'static str>,
}

/// What serves a mount.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Engine {
    /// This program, through FUSE.
    #[default]
    Fuse,
    /// The kernel alone: an idmapped, perhaps read-only bind mount.
    Kernel,
    /// A cage: an image with a file system of its own.
    Loop,
    /// A cage: quotas of the file system that the directory lies on.
    Quota,
    /// The kernel where it can do all that was asked for, else FUSE.
    Auto,
}

impl Engine {
    /// As it is written.
    pub fn word(self) -> &'static str {
        match self {
            Engine::Fuse => "fuse",
            Engine::Kernel => "kernel",
            Engine::Loop => "loop",
            Engine::Quota => "quota",
            Engine::Auto => "auto",
        }
    }
}

/// How the kernel and the daemon talk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Transport {
    /// Rings where the kernel has them, else the device.
    #[default]
    Auto,
    /// FUSE over io_uring.
    Uring,
    /// The FUSE device.
    Device,
}

/// Access times.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Atime {
    /// None.
    No,
    /// Now and then.
    Relative,
    /// All.
    Strict,
}

/// Settings of the mount itself, whatever is mounted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Door {
    /// No writing, for root either.
    pub read_only: bool,
    /// Users other than the mounter may use it.
    pub allow_other: bool,
    /// That was asked for: the mount is not made otherwise.
    pub others_asked: bool,
    /// Set-user-id programs take effect.
    pub suid: bool,
    /// Device nodes work.
    pub dev: bool,
    /// Programs run.
    pub exec: bool,
    /// Symbolic links are followed.
    pub symfollow: bool,
    /// Access times; `None` leaves the kernel's default.
    pub atime: Option<Atime>,
    /// No access times of directories.
    pub nodiratime: bool,
    /// Write through.
    pub sync: bool,
    /// Write directories through.
    pub dirsync: bool,
    /// First column of the mount table, where it is not the source.
    pub fsname: Option<String>,
    /// Type after `fuse.`, where it is not the name of the program.
    pub subtype: Option<String>,
    /// Words that go to the kernel as they are (security contexts).
    pub kernel_words: Vec<String>,
    /// The kernel may read and write files of the source itself.
    pub passthrough: bool,
    /// Transport.
    pub transport: Transport,
    /// Nothing below changes: opens cost no request.
    pub immutable: bool,
    /// Files of a read-only mount are opened without a request, where that can be.
    pub no_open: bool,
    /// Locks are taken below.
    pub lock_forwarding: bool,
    /// No page cache.
    pub direct_io: bool,
    /// There are extended attributes at all.
    pub xattr: bool,
    /// ACLs are enforced where there are any.
    pub acl: bool,
    /// Names are cached for so long.
    pub entry_timeout: Option<Duration>,
    /// Attributes are cached for so long.
    pub attr_timeout: Option<Duration>,
    /// Missing names are cached for so long.
    pub negative_timeout: Option<Duration>,
    /// inotify events are raised for changes below.
    pub notify_watchers: bool,
    /// It goes on when the process that serves it dies.
    pub survive: bool,
}

impl Default for Door {
    fn default() -> Door {
        Door {
            read_only: false,
            allow_other: true,
            others_asked: false,
            suid: false,
            dev: false,
            exec: true,
            symfollow: true,
            atime: None,
            nodiratime: false,
            sync: false,
            dirsync: false,
            fsname: None,
            subtype: None,
            kernel_words: Vec::new(),
            passthrough: true,
            transport: Transport::Auto,
            immutable: false,
            no_open: false,
            lock_forwarding: false,
            direct_io: false,
            xattr: true,
            acl: true,
            entry_timeout: None,
            attr_timeout: None,
            negative_timeout: None,
            notify_watchers: false,
            survive: false,
        }
    }
}

/// A plan that does not depend on the surroundings of this process any more: for one that another
/// process carries out.
#[derive(Debug)]
pub struct Resolved {
    /// The layers, with absolute sources.
    pub spec: StackSpec,
    /// Where, resolved.
    pub mountpoint: PathBuf,
    /// The log.
    pub log_target: Option<LogTarget>,
}

/// How much is logged; the default on standard error is [`Verbosity::Warn`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verbosity {
    /// Only what failed.
    Error,
    /// And what may be wrong.
    #[default]
    Warn,
    /// And what happens to the mount.
    Info,
    /// And each change.
    Debug,
    /// Everything.
    Trace,
}
