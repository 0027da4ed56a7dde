//! Options of a mount: plain data, made by the command line, read by `mount.rs` and `door.rs`.

use crate::survival::Survival;
use nacre_sys::kernel_version::kernel_version;
use std::{fmt, path::PathBuf, sync::Arc, time::Duration};

/// Setup that each serving thread runs before its first request.
pub type WorkerSetup = Arc<dyn Fn() + Send + Sync>;

/// Transport of the requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TransportChoice {
    /// Rings where the kernel offers them, the device otherwise.
    #[default]
    Auto,
    /// FUSE over io_uring; an error where the kernel does not offer it.
    Uring,
    /// The fuse device.
    Device,
}

/// Whether the kernel may do the I/O on open files itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PassthroughChoice {
    /// Wherever the layer offers a backing file and the kernel permits it.
    #[default]
    Auto,
    /// Never: all content passes through the daemon.
    Off,
}

/// Whether users see extended attributes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum XattrChoice {
    /// As the layer has them.
    #[default]
    Full,
    /// Not implemented: the kernel stops asking after the first time.
    Off,
}

/// Whether POSIX ACLs are enforced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AclChoice {
    /// By the kernel, where the layer has ACLs and the kernel checks permissions
    /// (`default_permissions`).
    #[default]
    Auto,
    /// Neither enforced nor shown.
    Off,
}

/// All options of a mount.
#[derive(Clone)]
#[allow(clippy::struct_excessive_bools)]
pub struct FuseOptions {
    /// The mount point.
    pub mountpoint: PathBuf,
    /// No component of `mountpoint` may be a symbolic link: if one was put there since the path was resolved, nothing
    /// is mounted. For root, on paths where others can create links.
    pub without_links: bool,
    /// Shown as the device in the mount table.
    pub fsname: String,
    /// Shown after `fuse.` as the file system type.
    pub subtype: String,
    /// Mounted read-only.
    pub read_only: bool,
    /// Users other than the one who mounts have access.
    pub allow_other: bool,
    /// The kernel checks permissions by mode, owner and ACL. Without it, the layer does, in each operation and in
    /// [`nacre_vfs::Layer::access`]: for a mount that only its owner may use, of a layer that works with the owner's
    /// permissions and shows everything unchanged.
    pub default_permissions: bool,
    /// Set-id bits have no effect.
    pub nosuid: bool,
    /// Device files cannot be opened.
    pub nodev: bool,
    /// Nothing can be executed.
    pub noexec: bool,
    /// The kernel updates no access times.
    pub noatime: bool,
    /// Symbolic links are not followed. Only for root, and not together with `notify_watchers`.
    pub nosymfollow: bool,
    /// Writes are synchronous (`sync`).
    pub sync: bool,
    /// Changes of directories are synchronous (`dirsync`).
    pub dirsync: bool,
    /// Further options for mount(2) or fusermount3, as a user writes them after `-o`.
    pub extra: Vec<String>,
    /// Transport of the requests.
    pub transport: TransportChoice,
    /// Whether the kernel may do I/O itself.
    pub passthrough: PassthroughChoice,
    /// The storage below is itself stacked (overlayfs, or a FUSE mount with passthrough): passthrough then has to
    /// claim the maximum stacking depth that the kernel allows, and no stackable file system can lie over this mount.
    pub stacked: bool,
    /// The storage below may report a failed write only at close(2) (network file systems): each close is forwarded.
    pub reports_at_close: bool,
    /// Nobody will ever change the files: opens cost nothing, everything is cached without limit. Implies
    /// `read_only`.
    pub immutable: bool,
    /// The kernel opens files without a request, where it can: in a mount that is `read_only`, of a source that
    /// nobody changes unnoticed. It then reads through its page cache instead of in passthrough.
    pub no_open: bool,
    /// Locks are taken on the files below, so that they also hold against processes outside of the mount.
    pub lock_forwarding: bool,
    /// The kernel caches no content (and there is no passthrough).
    pub direct_io: bool,
    /// Forward those ioctls whose arguments can be transferred.
    pub ioctl: bool,
    /// Extended attributes.
    pub xattr: XattrChoice,
    /// POSIX ACLs.
    pub acl: AclChoice,
    /// How long names are cached, overriding the layer's coherence.
    pub entry_timeout: Option<Duration>,
    /// How long attributes are cached.
    pub attr_timeout: Option<Duration>,
    /// How long missing names are cached.
    pub negative_timeout: Option<Duration>,
    /// Replay inotify events inside the mount for changes made below it.
    pub notify_watchers: bool,
    /// The kernel writes a file's dirty pages back before it searches for data or holes; otherwise a file with dirty
    /// pages is reported as data up to its end. On by default where the kernel can do it ([`flushes_for_seek`]).
    pub flush_for_seek: bool,
    /// Called in each serving thread before its first request.
    pub worker_setup: Option<WorkerSetup>,
    /// Handoff state for the next process; none where the mount ends with its process.
    pub survival: Option<Survival>,
    /// Number of threads at the start: per CPU on io_uring, in total on the device (at least 2); more are started as
    /// needed. 0 selects a default.
    pub threads: u32,
}

impl FuseOptions {
    /// The defaults for a mount at `mountpoint`: for everyone, with the kernel checking
    /// permissions.
    pub fn new(mountpoint: impl Into<PathBuf>) -> FuseOptions {
        FuseOptions {
            mountpoint: mountpoint.into(),
            without_links: false,
            fsname: "nacre".to_owned(),
            subtype: "nacre".to_owned(),
            read_only: false,
            allow_other: true,
            default_permissions: true,
            nosuid: false,
            nodev: false,
            noexec: false,
            noatime: false,
            nosymfollow: false,
            sync: false,
            dirsync: false,
            extra: Vec::new(),
            transport: TransportChoice::Auto,
            passthrough: PassthroughChoice::Auto,
            stacked: false,
            reports_at_close: false,
            immutable: false,
            no_open: false,
            lock_forwarding: false,
            direct_io: false,
            ioctl: true,
            xattr: XattrChoice::Full,
            acl: AclChoice::Auto,
            entry_timeout: None,
            attr_timeout: None,
            negative_timeout: None,
            notify_watchers: false,
            flush_for_seek: flushes_for_seek(),
            worker_setup: None,
            survival: None,
            threads: 0,
        }
    }
}

/// Whether this kernel writes a file back while a caller of lseek(2) holds its inode's lock. Before Linux 6.16 the
/// writeback of a page ended when its WRITE was queued, so that waiting for it proves nothing, and close(2) in the
/// flushing thread takes the lock (fs/fuse/file.c, `fuse_flush()`). Tried from 6.18 on.
fn flushes_for_seek() -> bool {
    kernel_version() >= (6, 18)
}

impl fmt::Debug for FuseOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FuseOptions")
            .field("mountpoint", &self.mountpoint)
            .field("fsname", &self.fsname)
            .finish_non_exhaustive()
    }
}
