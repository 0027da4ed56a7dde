//! The plan of a mount, as plain data: written by command lines, carried out by [`crate::serve`] and
//! [`crate::kernel_engine`].
//!
//! Nothing here accesses the system: whether the source exists or a user is known is checked when the plan is
//! carried out, before anything is mounted.

use crate::log::target::LogTarget;
use nacre_stack::spec::StackSpec;
use serde::{Deserialize, Serialize};
use std::{path::PathBuf, time::Duration};

/// Program name for which this program can stand in; also type and source in the mount table.
pub const FUSE_OVERLAYFS: &str = "fuse-overlayfs";

/// Name of mergerfs, for which this program can stand in.
pub const MERGERFS: &str = "mergerfs";

/// Source of the layers' settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StackSource {
    /// The options of the command line.
    Spec(StackSpec),
    /// A TOML file, to be read when the plan is carried out.
    File(PathBuf),
}

/// Prefix of a cage's directory in the first column of the mount table, and of fstab.
pub const CAGE_PREFIX: &str = "cage:";
/// Prefix of a union's branches in the same places.
pub const UNION_PREFIX: &str = "union:";

/// Plan of a mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountPlan {
    /// Name that the program was called by: in messages, and as the type in the mount table.
    pub program: String,
    /// Layers of the mount.
    pub stack: StackSource,
    /// Mount point.
    pub mountpoint: PathBuf,
    /// Prefix of the source in the mount table.
    pub prefix: &'static str,
    /// Settings of the FUSE front end.
    pub door: Door,
    /// Engine that serves the mount.
    pub engine: Engine,
    /// Serve in this process, which ends with the mount.
    pub foreground: bool,
    /// Only print what would be done.
    pub explain: bool,
    /// Level of the log; `None`: events of the mount, and on standard error warnings.
    pub verbosity: Option<Verbosity>,
    /// Target of the log; `None`: from the environment, or [`LogTarget::Auto`].
    pub log_target: Option<LogTarget>,
    /// Name of the process that serves it together with other mounts; `None`: a process of its own.
    pub daemon: Option<String>,
    /// Do not warn of a mount point that is not empty.
    pub nonempty: bool,
    /// Warnings for standard error.
    pub warnings: Vec<String>,
}

/// A change of the flags of a mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remount {
    /// Mount point of the mount to change.
    pub mountpoint: PathBuf,
    /// The flags to change, as words, in the order given.
    pub flags: Vec<&'static str>,
}

/// Engine that serves a mount.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Engine {
    /// This program serves the mount through FUSE.
    #[default]
    Fuse,
    /// The kernel alone: an idmapped, perhaps read-only bind mount.
    Kernel,
    /// A cage: an image with a file system of its own.
    Loop,
    /// A cage: quotas of the file system that the directory lies on.
    Quota,
    /// The kernel where it supports all options, else FUSE.
    Auto,
}

impl Engine {
    /// Returns the word of the option.
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

/// Transport between kernel and daemon.
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

/// Policy of access time updates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Atime {
    /// Access times are never updated (`noatime`).
    No,
    /// Access times are updated as with `relatime`.
    Relative,
    /// Access times are updated at each access (`strictatime`).
    Strict,
}

/// Settings of the FUSE front end, independent of the layers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Door {
    /// Read-only, also for root.
    pub read_only: bool,
    /// Users other than the mounter may use it.
    pub allow_other: bool,
    /// `allow_other` was requested: without it the mount fails.
    pub others_asked: bool,
    /// Set-user-id programs take effect.
    pub suid: bool,
    /// Device nodes work.
    pub dev: bool,
    /// Programs can be executed.
    pub exec: bool,
    /// Symbolic links are followed.
    pub symfollow: bool,
    /// Access times; `None` leaves the kernel's default.
    pub atime: Option<Atime>,
    /// No access times of directories.
    pub nodiratime: bool,
    /// Synchronous writes.
    pub sync: bool,
    /// Synchronous changes of directories.
    pub dirsync: bool,
    /// First column of the mount table, where it is not the source.
    pub fsname: Option<String>,
    /// Type after `fuse.`, where it is not the name of the program.
    pub subtype: Option<String>,
    /// Words that are passed to the kernel unchanged (security contexts).
    pub kernel_words: Vec<String>,
    /// The kernel may read and write files of the source itself (passthrough).
    pub passthrough: bool,
    /// Transport of requests between kernel and daemon.
    pub transport: Transport,
    /// Nothing below changes: opens need no request.
    pub immutable: bool,
    /// Files of a read-only mount are opened without a request, where possible.
    pub no_open: bool,
    /// Locks are forwarded to the layers below.
    pub lock_forwarding: bool,
    /// No page cache.
    pub direct_io: bool,
    /// Extended attributes are supported.
    pub xattr: bool,
    /// ACLs are enforced where they exist.
    pub acl: bool,
    /// How long names are cached.
    pub entry_timeout: Option<Duration>,
    /// How long attributes are cached.
    pub attr_timeout: Option<Duration>,
    /// How long missing names are cached.
    pub negative_timeout: Option<Duration>,
    /// inotify events are raised for changes below.
    pub notify_watchers: bool,
    /// The mount survives the process that serves it.
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

/// A plan that does not depend on the environment of this process any more, so that another process can carry it
/// out.
#[derive(Debug)]
pub struct Resolved {
    /// The layers, with absolute sources.
    pub spec: StackSpec,
    /// Mount point, resolved.
    pub mountpoint: PathBuf,
    /// Target of the log.
    pub log_target: Option<LogTarget>,
}

/// Level of the log; the default on standard error is [`Verbosity::Warn`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verbosity {
    /// Logs failures only.
    Error,
    /// Logs warnings, too.
    #[default]
    Warn,
    /// Logs events of the mount, too.
    Info,
    /// Logs each change, too.
    Debug,
    /// Logs everything.
    Trace,
}
