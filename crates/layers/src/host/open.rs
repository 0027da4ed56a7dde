//! Opening files.
//!
//! `O_APPEND` is not passed to the source: with passthrough, the kernel positions its own appends;
//! those served here go to the end of the file as the source sees it at that moment
//! ([`nacre_vfs::OpenFile::append`]), if the flag is still set then. An append-only file (`chattr
//! +a`) is opened with the flag, since it cannot be opened for writing without. `O_TRUNC` takes
//! effect only after the identity has been checked.

use super::{
    HostShared,
    descriptor::{cut, forward, reopen},
    file::HostFile,
    locate::FoundFile,
    node::HostNode,
    stat::{self, errno},
};
use crate::context::wait_for;
use nacre_sys::lease;
use nacre_vfs::{Errno, Ioctl, Kind, OpenFlags, Opened, Result};
use rustix::fs::OFlags;
use std::{
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

impl HostShared {
    /// The flags for the source.
    pub(super) fn lower_flags(&self, flags: OpenFlags) -> OFlags {
        let mut kept = OFlags::RWMODE | OFlags::SYNC | OFlags::DSYNC | OFlags::NOATIME | OFlags::LARGEFILE;
        if self.options.forward_odirect.is_some() {
            kept |= OFlags::DIRECT;
        }
        OFlags::from_bits_retain(flags.raw()) & kept
    }

    pub(super) fn open(self: &Arc<HostShared>, node: &Arc<HostNode>, flags: OpenFlags) -> Result<Opened> {
        match node.kind() {
            Kind::File => {}
            Kind::Block if self.options.block_devices => {}
            Kind::Directory => return Err(Errno::EISDIR),
            Kind::Symlink => return Err(Errno::ELOOP),
            // The kernel opens special files by itself.
            _ => return Err(Errno::ENXIO),
        }
        let mut lower = self.lower_flags(flags);
        if flags.truncates() && !flags.writes() {
            lower = (lower - OFlags::RWMODE) | OFlags::RDWR;
        }
        if self.options.noatime && flags.reads() {
            lower |= OFlags::NOATIME;
        }
        let mut opened = self.open_source(node, lower, flags);
        if lower.contains(OFlags::NOATIME) && matches!(opened, Err(Errno::EPERM)) {
            lower -= OFlags::NOATIME;
            opened = self.open_source(node, lower, flags);
        }
        if flags.appends() && matches!(opened, Err(Errno::EPERM)) {
            lower |= OFlags::APPEND;
            opened = self.open_source(node, lower, flags);
        }
        let descriptor = opened?;
        // A block device that is shown as a file has no length to change; natively the flag is
        // ignored for it.
        if flags.truncates() && node.kind() == Kind::File {
            cut(descriptor.as_fd(), 0)?;
        }
        Ok(self.opened(node, descriptor, flags, lower))
    }

    fn open_source(&self, node: &Arc<HostNode>, lower: OFlags, flags: OpenFlags) -> Result<OwnedFd> {
        let opened = match self.open_checked(node, lower) {
            Err(Errno::ESTALE) => reopen(node.any_open().ok_or(Errno::ESTALE)?.fd(), lower | OFlags::NONBLOCK),
            other => other,
        };
        match opened {
            Err(Errno::EAGAIN) if flags.waits() => self.open_leased(self.pin(node)?.fd(), lower),
            // Possibly a lease that another thread of ours held for an instant.
            Err(Errno::EAGAIN) => {
                let pin = self.pin(node)?;
                lease::without_own(
                    || reopen(pin.fd(), lower | OFlags::NONBLOCK),
                    |opened| matches!(opened, Err(Errno::EAGAIN)),
                )
            }
            other => other,
        }
    }

    /// Opens a file with a lease whose holder has been asked to release it.
    pub(super) fn open_leased(&self, file: BorrowedFd<'_>, lower: OFlags) -> Result<OwnedFd> {
        wait_for(&self.options.waiting, || reopen(file, lower))?
    }

    /// Makes an open file and records it in its node. The source was opened with `lower`.
    pub(super) fn opened(
        self: &Arc<HostShared>,
        node: &Arc<HostNode>,
        descriptor: OwnedFd,
        flags: OpenFlags,
        lower: OFlags,
    ) -> Opened {
        let direct = if lower.contains(OFlags::DIRECT) { self.options.forward_odirect } else { None };
        // A file without a name is still to get one, through this very descriptor.
        let named = node.place().is_some();
        let before = descriptor.as_raw_fd();
        let mut descriptor =
            if flags.writes() && named { self.watch.unreported(node, descriptor, lower) } else { descriptor };
        let quiet = self.options.noatime && flags.reads() && named && descriptor.as_raw_fd() == before;
        if quiet && !node.is_resolved() && !self.is_elsewhere(node, descriptor.as_fd()) {
            descriptor = self.quiet.open(node.device(), descriptor, lower, || self.directory_beside(node));
        }
        self.known_open(node, descriptor, flags, direct)
    }

    fn known_open(
        self: &Arc<HostShared>,
        node: &Arc<HostNode>,
        descriptor: OwnedFd,
        flags: OpenFlags,
        direct: Option<u32>,
    ) -> Opened {
        let writing = (flags.writes() && self.watch.writing(node)).then(|| Arc::downgrade(self));
        let file = Arc::new(HostFile::new(self, Arc::clone(node), descriptor, flags, direct, writing));
        node.opened(&file);
        file
    }

    /// Takes over an open file that an earlier process handed over in the descriptor table, of a
    /// node or of a file without a name.
    pub(super) fn take_up(
        self: &Arc<HostShared>,
        node: Option<Arc<HostNode>>,
        descriptor: OwnedFd,
        flags: OpenFlags,
    ) -> Result<(Arc<HostNode>, Opened)> {
        let found = FoundFile::plain(stat::of_file(descriptor.as_fd())?);
        let node = match node {
            Some(node) if (node.id().ino, node.id().generation) == (found.id.ino, found.id.generation) => node,
            Some(_) => return Err(Errno::ESTALE),
            None => Arc::new(HostNode::new(found.id, found.device, stat::kind(&found.statx)?, false, None)),
        };
        let lower = rustix::fs::fcntl_getfl(&descriptor).map_err(errno)?;
        let direct = if lower.contains(OFlags::DIRECT) { self.options.forward_odirect } else { None };
        let file = self.known_open(&node, descriptor, flags, direct);
        Ok((node, file))
    }

    /// Whether an open file lies on a file system that is mounted inside the source. If the mount
    /// is unknown, assume so.
    fn is_elsewhere(&self, node: &HostNode, file: BorrowedFd<'_>) -> bool {
        node.device() != self.directories.mounts().root().1
            && stat::of_file_timeless(file).map_or(true, |statx| self.directories.is_foreign(&statx))
    }

    /// The directory that contains a file, if it is on the same file system.
    fn directory_beside(&self, node: &Arc<HostNode>) -> Option<OwnedFd> {
        let directory = self.open_directory(&node.place()?.parent).ok()?;
        let device = stat::device(&stat::of_file(directory.as_fd()).ok()?);
        (device == node.device()).then_some(directory)
    }

    pub(super) fn ioctl(&self, node: &Arc<HostNode>, request: Ioctl<'_>, output: &mut [u8]) -> Result<(i32, usize)> {
        match node.kind() {
            Kind::Directory => forward(self.open_directory(node)?.as_fd(), request, output),
            Kind::File => forward(self.open_source(node, OFlags::RDONLY, OpenFlags(0))?.as_fd(), request, output),
            _ => Err(Errno::ENOTTY),
        }
    }
}
