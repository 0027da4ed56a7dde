//! What a mount is asked to be: plain data, made by the command line, read by `mount.rs` and
//! `door.rs`.

use crate::survival::Survival;
use nacre_sys::kernel_version::kernel_version;
use std::{fmt, path::PathBuf, sync::Arc, time::Duration};

/// Work that each thread which serves requests does before its first one.
pub type WorkerSetup = Arc<dyn Fn() + Send + Sync>;

/// How requests arrive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TransportChoice {
    /// Rings where the kernel offers them, the device otherwise.
    #[default]
    Auto,
    /// FUSE over io_uring or nothing.
    Uring,
    /// The fuse device.
    Device,
}

/// Whether the kernel may do the I/O on open files itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PassthroughChoice {
    /// Wherever the layer offers a descriptor and the kernel permits it.
    #[default]
    Auto,
    /// Never: all content passes through the daemon.
    Off,
}

/// Whether extended attributes exist for users.
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

/// Everything that a mount can be told.
#[derive(Clone)]
#[allow(clippy::struct_excessive_bools)]
pub struct FuseOptions {
    /// Where.
    pub mountpoint: PathBuf,
    /// No part of `mountpoint` is a symbolic link: where one has come into it since it was found,
    /// nothing is mounted. For root, on paths where others can put links.
    pub without_links: bool,
    /// Shown as the device in the table of mounts.
    pub fsname: String,
    /// Shown after `fuse.` as the type.
    pub subtype: String,
    /// Mounted read-only.
    pub read_only: bool,
    /// Users other than the one who mounts may enter.
    pub allow_other: bool,
    /// The kernel checks permissions by mode, owner and ACL. Without it, the layer does, in each
    /// operation and for [`nacre_vfs::Layer::access`]: for a mount that only its owner may use, of
    /// a layer that works with the owner's rights and shows everything as it is.
    pub default_permissions: bool,
    /// Set-id bits have no effect.
    pub nosuid: bool,
    /// Device files cannot be opened.
    pub nodev: bool,
    /// Nothing can be executed.
    pub noexec: bool,
    /// The kernel marks no access times.
    pub noatime: bool,
    /// No symbolic link is followed. Only for root, and not together with `notify_watchers`.
    pub nosymfollow: bool,
    /// Writes are synchronous.
    pub sync: bool,
    /// Changes of directories are synchronous.
    pub dirsync: bool,
    /// Further words for mount(2) or fusermount3, as a user writes them after `-o`.
    pub extra: Vec<String>,
    /// How requests arrive.
    pub transport: TransportChoice,
    /// Whether the kernel may do I/O itself.
    pub passthrough: PassthroughChoice,
    /// The storage below is itself stacked (overlayfs, or a FUSE mount with passthrough):
    /// passthrough then has to claim the deepest stack that the kernel allows, and nothing
    /// stackable can lie over this mount.
    pub stacked: bool,
    /// The storage below may report a failed write as late as at close(2) (network file systems):
    /// each close is passed on.
    pub reports_at_close: bool,
    /// Nobody will ever change what is shown: opens cost nothing, everything is cached for good.
    /// Implies `read_only`.
    pub immutable: bool,
    /// The kernel is to open files without a request, where it may: in a mount that is `read_only`,
    /// of a source that nobody changes unnoticed. It then reads through its page cache instead of
    /// directly.
    pub no_open: bool,
    /// Locks are taken on the files below, so that they hold against processes outside of the
    /// mount.
    pub lock_forwarding: bool,
    /// The kernel caches no content (and passes none through).
    pub direct_io: bool,
    /// Forward those ioctls whose arguments can be carried.
    pub ioctl: bool,
    /// Extended attributes.
    pub xattr: XattrChoice,
    /// POSIX ACLs.
    pub acl: AclChoice,
    /// How long names are cached, instead of what the layer's coherence says.
    pub entry_timeout: Option<Duration>,
    /// How long attributes are cached.
    pub attr_timeout: Option<Duration>,
    /// How long missing names are cached.
    pub negative_timeout: Option<Duration>,
    /// Raise inotify events inside the mount for changes made below it.
    pub notify_watchers: bool,
    /// Before it looks for data or holes in a file, the kernel flushes what it has collected of it; otherwise
    /// such a file is answered as data up to its end. On by default where the kernel can do it
    /// ([`flushes_for_seek`]).
    pub flush_for_seek: bool,
    /// Called in each serving thread before its first request.
    pub worker_setup: Option<WorkerSetup>,
    /// Where what a process after this one needs is noted; none where the mount ends with its process.
    pub survival: Option<Survival>,
    /// Threads to start with: per CPU on io_uring, in all on the device (at least 2); more are made
    /// as they are needed. 0 chooses.
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

/// Whether this kernel flushes a file while a caller of lseek(2) holds its inode's lock. Before Linux 6.16
/// the writeback of a page ended when its WRITE was queued, so that waiting for it proves nothing,
/// and close(2) in the flushing thread takes the lock (fs/fuse/file.c, `fuse_flush()`). Tried
/// from 6.18 on.
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
