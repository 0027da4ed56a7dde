//! A host directory as a layer, accessed through descriptors.
//!
//! Built by the stack builder; callers reach it through [`Layer`] only. How it works:
//! * a file is known by its identity (device, inode number, birth time) and by the directory and
//!   name that it was last seen under; nothing else is kept for it, in particular no descriptor
//!   (`host/node.rs`);
//! * an operation takes the parent's descriptor (`host/directories.rs`) and makes one call relative
//!   to it, never following a link;
//! * an operation that changes or opens a file opens it first, compares identities, and then acts
//!   through the descriptor (`host/locate.rs`), so that a process that swaps names meanwhile gains
//!   nothing (the result is ESTALE, upon which the kernel looks the name up again);
//! * files are created under the caller's ids and umask (`host/create.rs`);
//! * changes by other processes are watched for, where the options say so (`host/watch.rs`).

mod ahead;
mod change;
mod create;
mod descriptor;
mod detached_mount;
mod directories;
mod file;
mod held;
mod listing;
mod locate;
mod locks;
mod mounts;
mod node;
mod open;
mod positions;
mod quiet;
mod remove;
mod stat;
#[cfg(test)]
mod tests;
mod watch;
mod xattr;

use crate::context::{Waiting, simply_waiting};
use crate::settings::{HostCoherence, HostSpec, SymlinkDeletion, Symlinks};
use directories::Directories;
use nacre_sys::xattrat;
use nacre_vfs::{
    AnyOpen, Attr, Caller, Capabilities, Coherence, Created, Description, Dev, DirSink, Entry, Errno, FileId,
    FoundOpen, Invalidation, Ioctl, Kind, Layer, LeftOpen, Name, Node, OpenFlags, Opened, RenameFlags, Result, Scope,
    SetAttr, StatFs, XattrFlags,
};
use node::HostNode;
use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags};
use stat::errno;
use std::{
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Path, PathBuf},
    sync::{Arc, OnceLock, mpsc::Sender},
};
pub use watch::{Tree, WatchGroup};

/// Options of a host directory.
#[derive(Clone)]
pub struct HostOptions {
    /// The directory.
    pub source: PathBuf,
    /// The path to open, if it differs from `source`.
    pub reached: Option<PathBuf>,
    /// Which other processes may change it.
    pub coherence: HostCoherence,
    /// Presentation of symbolic links.
    pub symlinks: Symlinks,
    /// Effect of deleting a link that is shown as its target.
    pub symlink_deletion: SymlinkDeletion,
    /// Keep `O_DIRECT`, with buffers aligned to this many bytes; else it is dropped.
    pub forward_odirect: Option<u32>,
    /// Leave the source's access times alone, where the mounter may.
    pub noatime: bool,
    /// Show block devices as regular files of the device's size, with its content.
    pub block_devices: bool,
    /// The tree that this host belongs to, within the watch group whose marks it may share.
    pub tree: Option<Tree>,
    /// How calls wait for holders of leases.
    pub waiting: Waiting,
}

impl HostOptions {
    /// Default options for a directory.
    pub fn new(source: impl Into<PathBuf>) -> HostOptions {
        HostOptions::from(&HostSpec { source: source.into(), ..HostSpec::default() })
    }
}

impl From<&HostSpec> for HostOptions {
    fn from(spec: &HostSpec) -> HostOptions {
        HostOptions {
            source: spec.source.clone(),
            reached: None,
            coherence: spec.coherence,
            symlinks: spec.symlinks,
            symlink_deletion: spec.symlink_deletion,
            forward_odirect: spec.forward_odirect.filter(|&align| align > 0),
            noatime: spec.noatime,
            block_devices: false,
            tree: None,
            waiting: simply_waiting(),
        }
    }
}

/// Prepares the calling thread to work for many users: called once in each worker thread of a
/// daemon, before its first request. Unprepared threads are served correctly, but each creation
/// costs extra calls to switch ids. See [`nacre_sys::credentials`].
///
/// # Errors
/// EPERM where a security policy forbids it.
pub fn prepare_worker() -> io::Result<()> {
    nacre_sys::credentials::prepare_thread()
}

/// A host directory. Dropping it ends its watcher thread.
pub struct Host {
    shared: Arc<HostShared>,
}

/// State shared by the operations and the watcher.
struct HostShared {
    options: HostOptions,
    root: Arc<HostNode>,
    directories: Directories,
    /// The storage checks the ids of every call (a network file system, for example).
    remote: bool,
    acls: bool,
    listings: listing::Listings,
    locks: Arc<locks::LockTables>,
    watch: watch::Watch,
    quiet: quiet::QuietMounts,
    /// Held while a directory gets a new parent, so that no two of them become each other's parent.
    adopting: Mutex<()>,
    /// Whether file systems were mounted inside the source when this was first asked.
    inner_mounts: OnceLock<bool>,
}

impl Host {
    /// Opens the source.
    ///
    /// # Errors
    /// ENOENT, ENOTDIR, EACCES as `open(2)`.
    pub fn open(options: HostOptions) -> io::Result<Host> {
        Host::with_budget(options, Directories::default_budget())
    }

    /// Opens the source with a maximum number of kept directory descriptors, where the process may
    /// hold so many for long.
    fn with_budget(options: HostOptions, budget: (usize, usize)) -> io::Result<Host> {
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        let source = options.reached.as_ref().unwrap_or(&options.source);
        let root = match rustix::fs::open(source, flags | OFlags::RDONLY, Mode::empty()) {
            // A directory that may be traversed, but not listed.
            Err(rustix::io::Errno::ACCESS) => rustix::fs::open(source, flags | OFlags::PATH, Mode::empty())?,
            other => other?,
        };
        let statx = stat::of_file(root.as_fd()).map_err(|error| io::Error::from_raw_os_error(error.raw()))?;
        if watch::is_overlay(root.as_fd()) {
            stat::births_change(stat::device(&statx));
        }
        let node = Arc::new(HostNode::new_root(stat::id(&statx), stat::device(&statx)));
        let acls = match xattrat::get(xattrat::Target::Entry(root.as_fd(), b"."), b"system.posix_acl_access", &mut []) {
            Ok(_) => true,
            Err(error) => !matches!(Errno::from(error), Errno::EOPNOTSUPP | Errno::ENOSYS),
        };
        let remote = watch::is_remote(root.as_fd());
        let watch = watch::Watch::new(node.device());
        let shared = HostShared {
            options,
            root: node,
            directories: Directories::new(root, &statx, budget),
            remote,
            acls,
            listings: listing::Listings::new(),
            locks: Arc::default(),
            watch,
            quiet: quiet::QuietMounts::default(),
            adopting: Mutex::default(),
            inner_mounts: OnceLock::new(),
        };
        Ok(Host { shared: Arc::new(shared) })
    }

    /// Opens a directory outside the source, for work that ends with a rename into it (the work
    /// directory of an overlay). It and its content are nodes of this layer as long as the returned
    /// node is kept; no name of the source leads there.
    ///
    /// # Errors
    /// EXDEV if files cannot be renamed from there into the source; else as `open(2)`.
    pub fn beside(&self, directory: &Path) -> io::Result<Node> {
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::PATH;
        let opened = rustix::fs::open(directory, flags, Mode::empty())?;
        self.shared.attend();
        let number = |error: Errno| io::Error::from_raw_os_error(error.raw());
        let statx = stat::of_file(opened.as_fd()).map_err(number)?;
        let root = stat::of_file(self.shared.directories.root()).map_err(number)?;
        let place = |statx| (stat::device(statx), stat::mount(statx));
        if place(&statx) != place(&root) {
            return Err(number(Errno::EXDEV));
        }
        let node = Arc::new(HostNode::new(stat::id(&statx), stat::device(&statx), Kind::Directory, false, None));
        self.shared.directories.pin(&node, opened);
        Ok(Node::new(node))
    }
}

impl HostShared {
    /// Reason why opens have to be requests: a file opened without a request is closed some time
    /// after its last user closed it, which would keep an inner mount busy.
    fn needs_opens(&self) -> Option<&'static str> {
        let inner_mounts = *self.inner_mounts.get_or_init(|| watch::has_inner_mounts(self));
        inner_mounts.then_some("file systems are mounted inside the source")
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.shared.watch.stop(&self.shared);
    }
}

/// The host node of a node.
fn hosted(node: &Node) -> Result<Arc<HostNode>> {
    node.arc().ok_or(Errno::EIO)
}

/// The host's open file inside one that filters may have wrapped.
fn handle(file: AnyOpen<'_>) -> Option<&file::HostFile> {
    file?.inner().as_any().downcast_ref()
}

impl HostShared {
    /// Prepares an operation in a directory under our own ids.
    fn enter(&self, node: &Node) -> Result<(Arc<HostNode>, Arc<held::Held>)> {
        let node = hosted(node)?;
        self.own_ids()?;
        self.attend();
        let held = self.directories.get(&node)?;
        Ok((node, held))
    }

    /// Switches back to our own ids, where the storage checks the ids of every call.
    fn own_ids(&self) -> Result<()> {
        if self.remote {
            nacre_sys::credentials::with_own_identity(|| ())?;
        }
        Ok(())
    }

    fn resolves_links(&self) -> bool {
        self.options.symlinks == Symlinks::Resolve
    }

    /// Opens a directory for sync and reading; the kept descriptors are `O_PATH`.
    fn open_directory(&self, node: &Arc<HostNode>) -> Result<OwnedFd> {
        self.open_held(&*self.directories.get(node)?)
    }

    /// Opens an open directory again for sync and reading.
    fn open_held(&self, held: &held::Held) -> Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let quiet =
            self.options.noatime.then(|| rustix::fs::openat(held.fd(), ".", flags | OFlags::NOATIME, Mode::empty()));
        // `O_NOATIME` requires its owner or root.
        match quiet
            .and_then(Result::ok)
            .map_or_else(|| rustix::fs::openat(held.fd(), ".", flags, Mode::empty()).map_err(errno), Ok)
        {
            // The name "." needs search permission, the directory itself only read permission.
            Err(Errno::EACCES) => descriptor::reopen(held.fd(), flags),
            other => other,
        }
    }
}

impl LeftOpen for Host {
    fn take_up(&self, node: Option<&Node>, left: FoundOpen, flags: OpenFlags) -> Result<(Node, Opened)> {
        let node = node.map(hosted).transpose()?;
        let (node, file) = self.shared.take_up(node, left.descriptor, flags)?;
        Ok((Node::new(node), file))
    }
}

impl Layer for Host {
    fn root(&self) -> Result<Entry> {
        let root = &self.shared.root;
        let attr = self.shared.getattr(root, None)?;
        Ok(Entry { node: Node::new(Arc::clone(root)), attr })
    }

    fn lookup(&self, _caller: &Caller, parent: &Node, name: Name<'_>) -> Result<Entry> {
        self.shared.lookup(parent, name)
    }

    fn id(&self, node: &Node) -> Result<FileId> {
        node.get::<HostNode>().map(HostNode::id).ok_or(Errno::EIO)
    }

    fn path(&self, node: &Node) -> Option<Vec<u8>> {
        node.get::<HostNode>()?.path()
    }

    fn adopt(&self, known: &Node, fresh: &Node) {
        if known.same(fresh) {
            return;
        }
        let known_node = known;
        if let (Some(known), Some(fresh)) = (known.get::<HostNode>(), fresh.get::<HostNode>()) {
            if fresh.is_linked()
                && let Ok(known) = hosted(known_node)
            {
                self.shared.forget_stale_names(&known, fresh);
            }
            let _one_at_a_time = (known.kind() == Kind::Directory).then(|| self.shared.adopting.lock());
            known.adopt(fresh);
        }
    }

    fn hold(&self, directory: &Node, gone: bool) {
        let Ok(node) = hosted(directory) else { return };
        if gone {
            self.shared.directories.keep_for_good(&node);
        } else if let Err(error) = self.shared.directories.hold(&node) {
            tracing::debug!(%error, "a directory that goes cannot be held");
        }
    }

    fn getattr(&self, _caller: &Caller, node: &Node, file: AnyOpen<'_>) -> Result<Attr> {
        self.shared.own_ids()?;
        self.shared.getattr(&hosted(node)?, handle(file))
    }

    fn access(&self, _caller: &Caller, node: &Node, mask: u32) -> Result<()> {
        self.shared.own_ids()?;
        self.shared.access(&hosted(node)?, mask)
    }

    fn setattr(&self, _caller: &Caller, node: &Node, file: AnyOpen<'_>, change: &SetAttr) -> Result<Attr> {
        self.shared.own_ids()?;
        self.shared.setattr(&hosted(node)?, handle(file), change)
    }

    fn readlink(&self, _caller: &Caller, node: &Node) -> Result<Vec<u8>> {
        self.shared.own_ids()?;
        self.shared.readlink(&hosted(node)?)
    }

    fn create(&self, caller: &Caller, parent: &Node, name: Name<'_>, mode: u32, flags: OpenFlags) -> Result<Created> {
        self.shared.create(caller, parent, name, mode, flags)
    }

    fn tmpfile(&self, caller: &Caller, parent: &Node, mode: u32, flags: OpenFlags) -> Result<Created> {
        self.shared.tmpfile(caller, parent, mode, flags)
    }

    fn mkdir(&self, caller: &Caller, parent: &Node, name: Name<'_>, mode: u32) -> Result<Entry> {
        self.shared.mkdir(caller, parent, name, mode)
    }

    fn mknod(&self, caller: &Caller, parent: &Node, name: Name<'_>, kind: Kind, mode: u32, dev: Dev) -> Result<Entry> {
        self.shared.mknod(caller, parent, name, kind, mode, dev)
    }

    fn symlink(&self, caller: &Caller, parent: &Node, name: Name<'_>, target: &[u8]) -> Result<Entry> {
        self.shared.symlink(caller, parent, name, target)
    }

    fn link(&self, caller: &Caller, node: &Node, file: AnyOpen<'_>, parent: &Node, name: Name<'_>) -> Result<Entry> {
        self.shared.link(caller, &hosted(node)?, handle(file), parent, name)
    }

    fn unlink(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<()> {
        self.shared.unlink(caller, parent, name)
    }

    fn rmdir(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<()> {
        self.shared.rmdir(caller, parent, name)
    }

    fn rename(
        &self,
        caller: &Caller,
        parent: &Node,
        name: Name<'_>,
        new_parent: &Node,
        new_name: Name<'_>,
        flags: RenameFlags,
    ) -> Result<()> {
        self.shared.rename(caller, (parent, name), (new_parent, new_name), flags)
    }

    fn open(&self, _caller: &Caller, node: &Node, flags: OpenFlags) -> Result<Opened> {
        self.shared.own_ids()?;
        self.shared.open(&hosted(node)?, flags)
    }

    fn readdir(&self, _: &Caller, node: &Node, from: u64, attributes: bool, sink: &mut dyn DirSink) -> Result<()> {
        self.shared.own_ids()?;
        self.shared.attend();
        self.shared.readdir(&hosted(node)?, from, attributes, sink)
    }

    fn fsyncdir(&self, _caller: &Caller, node: &Node, data_only: bool) -> Result<()> {
        self.shared.own_ids()?;
        let directory = self.shared.open_directory(&hosted(node)?)?;
        if data_only { rustix::fs::fdatasync(&directory) } else { rustix::fs::fsync(&directory) }.map_err(errno)
    }

    fn statfs(&self, _caller: &Caller, node: &Node) -> Result<StatFs> {
        self.shared.own_ids()?;
        let pin = self.shared.pin(&hosted(node)?)?;
        let figures = rustix::fs::fstatvfs(pin.fd()).map_err(errno)?;
        let block = u32::try_from(figures.f_bsize).unwrap_or(u32::MAX);
        Ok(StatFs {
            block,
            fragment: if figures.f_frsize == 0 { block } else { u32::try_from(figures.f_frsize).unwrap_or(u32::MAX) },
            blocks: figures.f_blocks,
            free: figures.f_bfree,
            available: figures.f_bavail,
            files: figures.f_files,
            files_free: figures.f_ffree,
            name_max: u32::try_from(figures.f_namemax).unwrap_or(255),
        })
    }

    fn syncfs(&self) -> Result<()> {
        let root = self.shared.open_directory(&self.shared.root)?;
        rustix::fs::syncfs(&root).map_err(errno)
    }

    fn getxattr(&self, _caller: &Caller, node: &Node, name: &[u8], buffer: &mut [u8]) -> Result<usize> {
        self.shared.own_ids()?;
        self.shared.getxattr(&hosted(node)?, name, buffer)
    }

    fn listxattr(&self, _caller: &Caller, node: &Node, buffer: &mut [u8]) -> Result<usize> {
        self.shared.own_ids()?;
        self.shared.listxattr(&hosted(node)?, buffer)
    }

    fn setxattr(&self, _caller: &Caller, node: &Node, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()> {
        self.shared.own_ids()?;
        self.shared.setxattr(&hosted(node)?, name, value, flags)
    }

    fn removexattr(&self, _caller: &Caller, node: &Node, name: &[u8]) -> Result<()> {
        self.shared.own_ids()?;
        self.shared.removexattr(&hosted(node)?, name)
    }

    fn ioctl(&self, _caller: &Caller, node: &Node, request: Ioctl<'_>, output: &mut [u8]) -> Result<(i32, usize)> {
        self.shared.own_ids()?;
        self.shared.ioctl(&hosted(node)?, request, output)
    }

    fn coherence(&self, scope: Scope<'_>) -> Coherence {
        self.shared.coherence(scope)
    }

    fn watch(&self, channel: Sender<Invalidation>) {
        watch::start(&self.shared, channel);
    }

    fn rest(&self, known: Option<&[Node]>) -> bool {
        self.shared.rest(known)
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities {
            acls: self.shared.acls,
            // The target of a link may lie where no FUSE front end has checked permissions.
            judges_callers: self.shared.resolves_links(),
            reuses_numbers: self.shared.root.id().generation == 0,
            numbered: None,
            // The layer need not see each write, so passthrough is better: the kernel writes to the
            // files itself.
            writeback: None,
            needs_opens: self.shared.needs_opens(),
            open_files: None,
            left_open: Some(self),
            interrupted: None,
        }
    }

    fn describe(&self) -> Description {
        let options = &self.shared.options;
        let mut text = Description::new("host")
            .with("source", String::from_utf8_lossy(options.source.as_os_str().as_bytes()))
            .with("coherence", options.coherence.word());
        if options.coherence == HostCoherence::Watch {
            text = text.with("watch", self.shared.watch.method());
        }
        if self.shared.resolves_links() {
            text = text
                .with("symlinks", options.symlinks.word())
                .with("symlink-deletion", options.symlink_deletion.word());
        }
        if let Some(align) = options.forward_odirect {
            text = text.with("forward-odirect", align.to_string());
        }
        if options.noatime {
            text = text.with("noatime", "true");
        }
        if options.block_devices {
            text = text.with("block-devices", "true");
        }
        text
    }
}
