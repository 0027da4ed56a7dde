//! From a node to its file: look-up, attributes, and descriptors whose identity has been checked.
//!
//! Called by all other operations. Invariant: a returned file had the node's identity when its
//! descriptor was examined, and a descriptor cannot change its file.

use super::{
    HostShared, errno,
    file::HostFile,
    held::Held,
    node::{HostNode, NodePlace, ShortName},
    stat,
};
use nacre_vfs::{Attr, Entry, Errno, FileId, Kind, Name, Node, Result};
use rustix::fs::{Access, AtFlags, Mode, OFlags, ResolveFlags, Statx};
use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

/// A descriptor of exactly the requested file, possibly `O_PATH`.
pub(super) enum Pin {
    /// Kept descriptor of a directory.
    Directory(Arc<Held>),
    /// Opened for this operation.
    Own(OwnedFd),
    /// An open file, whose names may have been removed.
    Open(Arc<HostFile>),
}

impl Pin {
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Pin::Directory(held) => held.fd(),
            Pin::Own(descriptor) => descriptor.as_fd(),
            Pin::Open(file) => file.fd(),
        }
    }
}

/// A file found under a name.
pub(super) struct FoundFile {
    pub(super) statx: Statx,
    pub(super) id: FileId,
    /// The device whose watch covers it; for a resolved link the link's own.
    pub(super) device: u32,
}

impl FoundFile {
    /// A file that is neither a directory nor a resolved link.
    pub(super) fn plain(statx: Statx) -> FoundFile {
        FoundFile { id: stat::id(&statx), device: stat::device(&statx), statx }
    }
}

/// Whether an error only means that a name no longer leads to the file.
pub(super) fn is_gone(error: Errno) -> bool {
    matches!(error, Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP | Errno::ESTALE)
}

impl HostShared {
    /// Examines a name, with links resolved where they are shown so. One call where they are not.
    pub(super) fn examine(&self, directory: BorrowedFd<'_>, name: &[u8], quietly: bool) -> Result<FoundFile> {
        let statx = if quietly { stat::of_name_quietly(directory, name) } else { stat::of_name(directory, name) }?;
        if self.resolves_links() && stat::kind(&statx)? == Kind::Symlink {
            // A broken link stays a link.
            if let Ok(target) = stat::of_target(directory, name) {
                let id = self.directories.mounts().resolved_id(&statx, &target);
                return Ok(FoundFile { id, device: stat::device(&statx), statx: target });
            }
        }
        let mounts = self.directories.mounts();
        mounts.met(&statx);
        Ok(FoundFile { id: mounts.id(&statx), device: stat::device(&statx), statx })
    }

    /// Makes the node and attributes of a file found under a name.
    pub(super) fn entry(
        &self,
        parent: &Arc<HostNode>,
        directory: BorrowedFd<'_>,
        name: &[u8],
        found: &FoundFile,
    ) -> Result<Entry> {
        let attr = self.shown(stat::attr(&found.statx, found.id)?, || {
            let follow = if stat::is_resolved(found.id) { OFlags::empty() } else { OFlags::NOFOLLOW };
            rustix::fs::openat(
                directory,
                name,
                OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | follow,
                Mode::empty(),
            )
            .ok()
        });
        let place = NodePlace { parent: Arc::clone(parent), name: ShortName::new(name) };
        let node =
            HostNode::new(found.id, found.device, stat::kind(&found.statx)?, found.statx.stx_nlink > 1, Some(place));
        Ok(Entry { node: Node::new(Arc::new(node)), attr })
    }

    /// Shows a block device as a file, if the option says so: type and size change.
    pub(super) fn shown(&self, mut attr: Attr, open: impl FnOnce() -> Option<OwnedFd>) -> Attr {
        if self.options.block_devices && attr.kind == Kind::Block {
            attr.kind = Kind::File;
            (attr.rdev_major, attr.rdev_minor) = (0, 0);
            attr.size =
                open().and_then(|device| nacre_sys::ioctls::block_device_size(device.as_fd()).ok()).unwrap_or_default();
        }
        attr
    }

    pub(super) fn lookup(&self, parent: &Node, name: Name<'_>) -> Result<Entry> {
        let (parent, held) = self.enter(parent)?;
        self.watch.before_names(&parent, held.fd());
        let mut found = self.examine(held.fd(), name.bytes(), false)?;
        if self.watch.cover(self, held.fd(), name.bytes(), &found) {
            // The watch began after the first examination.
            found = self.examine(held.fd(), name.bytes(), false)?;
        }
        self.entry(&parent, held.fd(), name.bytes(), &found)
    }

    /// Reads attributes: from the given open file, a directory's own descriptor, the known name, or
    /// any open file.
    pub(super) fn getattr(&self, node: &Arc<HostNode>, file: Option<&HostFile>) -> Result<Attr> {
        if let Some(file) = file {
            return self.attr_of(node, file.fd());
        }
        if node.is_root() {
            return self.attr_of(node, self.directories.root());
        }
        if let Some(held) = node.descriptor() {
            return self.attr_of(node, held.fd());
        }
        if let Some(attr) = node.place().map(|place| self.getattr_at(node, &place)).transpose()?.flatten() {
            return Ok(attr);
        }
        if node.has_older_places() {
            for place in node.places().iter().skip(1) {
                if let Some(attr) = self.getattr_at(node, place)? {
                    return Ok(attr);
                }
            }
        }
        self.attr_of(node, node.any_open().ok_or(Errno::ESTALE)?.fd())
    }

    /// Reads attributes under one name; `None` if it is gone or belongs to another file.
    fn getattr_at(&self, node: &Arc<HostNode>, place: &NodePlace) -> Result<Option<Attr>> {
        let name = place.name.bytes();
        let found =
            self.directories.get(&place.parent).and_then(|held| Ok((self.examine(held.fd(), name, false)?, held)));
        match found {
            Ok((found, held)) if found.id == node.id() => {
                let attr = stat::attr(&found.statx, found.id)?;
                // Another file may have the name by now, even one whose open would block.
                let follow = if node.is_resolved() { OFlags::empty() } else { OFlags::NOFOLLOW };
                let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY | follow;
                Ok(Some(self.shown(attr, || rustix::fs::openat(held.fd(), name, flags, Mode::empty()).ok())))
            }
            Ok(_) => Ok(None),
            Err(error) if is_gone(error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Checks `access(2)` of the file, by the effective ids of this process.
    pub(super) fn access(&self, node: &Arc<HostNode>, mask: u32) -> Result<()> {
        let pin = self.pin(node)?;
        // The magic link in /proc leads to the file itself: by the name ".", a directory would need
        // search permission as well.
        let path = nacre_sys::inode::proc_path(pin.fd());
        let wanted = Access::from_bits_truncate(mask) & (Access::READ_OK | Access::WRITE_OK | Access::EXEC_OK);
        rustix::fs::accessat(rustix::fs::CWD, path, wanted, AtFlags::EACCESS).map_err(errno)
    }

    /// Reads the attributes of the file behind a descriptor that is known to be the node's.
    pub(super) fn attr_of(&self, node: &HostNode, file: BorrowedFd<'_>) -> Result<Attr> {
        self.attr_by(stat::of_file, node, file)
    }

    /// Reads attributes like [`HostShared::attr_of`], with the given `statx(2)` call.
    pub(super) fn attr_by(
        &self,
        examine: fn(BorrowedFd<'_>) -> Result<Statx>,
        node: &HostNode,
        file: BorrowedFd<'_>,
    ) -> Result<Attr> {
        let attr = stat::attr(&examine(file)?, node.id())?;
        Ok(self.shown(attr, || {
            rustix::fs::open(
                nacre_sys::inode::proc_path(file),
                OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC,
                Mode::empty(),
            )
            .ok()
        }))
    }

    /// Returns a descriptor of the file, usable for calls that accept `O_PATH` ones.
    ///
    /// # Errors
    /// ESTALE if no name leads to it any more and it is not open.
    pub(super) fn pin(&self, node: &Arc<HostNode>) -> Result<Pin> {
        if node.kind() == Kind::Directory {
            return Ok(Pin::Directory(self.directories.get(node)?));
        }
        match self.open_checked(node, OFlags::PATH) {
            Ok(descriptor) => Ok(Pin::Own(descriptor)),
            Err(Errno::ESTALE) => Ok(Pin::Open(node.any_open().ok_or(Errno::ESTALE)?)),
            Err(error) => Err(error),
        }
    }

    /// Opens the file under the first known name that still leads to it.
    ///
    /// # Errors
    /// ESTALE if none does; else as `open(2)`.
    pub(super) fn open_checked(&self, node: &Arc<HostNode>, flags: OFlags) -> Result<OwnedFd> {
        let follow = if node.is_resolved() { OFlags::empty() } else { OFlags::NOFOLLOW };
        // Without O_NONBLOCK, a fifo that took the name would block us.
        let flags = flags
            | OFlags::CLOEXEC
            | OFlags::NOCTTY
            | follow
            | if flags.contains(OFlags::PATH) { OFlags::empty() } else { OFlags::NONBLOCK };
        let newest = node.place().ok_or(Errno::ESTALE)?;
        if let Some(descriptor) = self.open_at(node, &newest, flags)? {
            return Ok(descriptor);
        }
        if node.has_older_places() {
            for place in node.places().iter().skip(1) {
                if let Some(descriptor) = self.open_at(node, place, flags)? {
                    return Ok(descriptor);
                }
            }
        }
        Err(Errno::ESTALE)
    }

    /// Opens a file, which is open already, by the path that the kernel knows of the open file; `None` where no name
    /// leads to it there any more.
    pub(super) fn open_by_its_path(&self, node: &HostNode, open: BorrowedFd<'_>) -> Result<Option<OwnedFd>> {
        let path = rustix::fs::readlink(nacre_sys::inode::proc_path(open), Vec::new()).map_err(errno)?.into_bytes();
        let Some(divider) = path.iter().rposition(|byte| *byte == b'/') else { return Ok(None) };
        let (parent, name) = (path.get(..divider).unwrap_or_default(), path.get(divider + 1..).unwrap_or_default());
        // From the top of the source: a file open for writing belongs to a mount of our own, whose top that is.
        let parent = parent.strip_prefix(b"/").unwrap_or(parent);
        let parent = if parent.is_empty() { b"." } else { parent };
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let opened = rustix::fs::openat2(self.directories.root(), parent, flags, Mode::empty(), resolve)
            .map_err(errno)
            .and_then(|parent| {
                let flags = flags | OFlags::NOFOLLOW;
                let file = rustix::fs::openat(&parent, name, flags, Mode::empty()).map_err(errno)?;
                let id = self.directories.identity(parent.as_fd(), name, node, file.as_fd())?;
                Ok((id == node.id()).then_some(file))
            });
        match opened {
            Err(error) if is_gone(error) => Ok(None),
            other => other,
        }
    }

    /// Forgets names that lead to a file no more, once as many are kept as there may be: or these would displace names
    /// that do. `fresh` is the same file, with its newest name.
    pub(super) fn forget_stale_names(&self, node: &Arc<HostNode>, fresh: &HostNode) {
        if !node.needs_check(fresh) {
            return;
        }
        let is_stale = |place: &NodePlace| matches!(self.getattr_at(node, place), Ok(None));
        let stale: Vec<NodePlace> = node.places().into_iter().skip(1).filter(is_stale).collect();
        node.forget_places(&stale);
    }

    /// Opens under one name; `None` where another file, or none, has it now.
    fn open_at(&self, node: &Arc<HostNode>, place: &NodePlace, flags: OFlags) -> Result<Option<OwnedFd>> {
        let name = place.name.bytes();
        let opened = self.directories.get(&place.parent).and_then(|held| {
            let descriptor = rustix::fs::openat(held.fd(), name, flags, Mode::empty()).map_err(errno)?;
            let id = self.directories.identity(held.fd(), name, node, descriptor.as_fd())?;
            Ok((id == node.id()).then_some(descriptor))
        });
        match opened {
            Err(error) if is_gone(error) => Ok(None),
            // Errors of a socket, fifo or device that took the name.
            Err(Errno::ENXIO | Errno::EISDIR | Errno::ENODEV) if node.kind() == Kind::File => Ok(None),
            other => other,
        }
    }

    pub(super) fn readlink(&self, node: &Arc<HostNode>) -> Result<Vec<u8>> {
        if node.kind() != Kind::Symlink {
            return Err(Errno::EINVAL);
        }
        let pin = self.pin(node)?;
        Ok(rustix::fs::readlinkat(pin.fd(), "", Vec::with_capacity(256)).map_err(errno)?.into_bytes())
    }
}
