//! Creation, under the caller's owner, group and umask from the first instant.
//!
//! The kernel in front of the mount has checked that the caller may create here and has applied its
//! set-group-id rules; bits that the storage would clear merely because our thread is in none of
//! the caller's groups are kept ([`nacre_sys::credentials::with_set_id_kept`]).

use super::{
    HostShared, errno,
    file::HostFile,
    locate::FoundFile,
    node::{HostNode, NodePlace, ShortName},
    stat,
};
use nacre_sys::credentials::{self, Identity};
use nacre_vfs::{Caller, Created, Dev, Entry, Errno, Kind, Name, Node, OpenFlags, Result};
use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

const SET_GROUP_ID: u32 = 0o2000;

/// Runs one creating call under the caller's ids and umask.
fn as_caller<T>(caller: &Caller, mode: u32, call: impl FnOnce(Mode) -> rustix::io::Result<T>) -> Result<T> {
    let identity = Identity { uid: caller.uid, gid: caller.gid, umask: caller.umask & 0o777 };
    let create = || credentials::with_identity(identity, || call(Mode::from_raw_mode(mode & 0o7777)));
    // A mode with set-group-id is rare; only that bit could be refused to our thread.
    let created = if mode & SET_GROUP_ID == 0 { create()? } else { credentials::with_set_id_kept(create)?? };
    created.map_err(errno)
}

impl HostShared {
    pub(super) fn create(
        self: &Arc<HostShared>,
        caller: &Caller,
        parent: &Node,
        name: Name<'_>,
        mode: u32,
        flags: OpenFlags,
    ) -> Result<Created> {
        let (parent, held) = self.enter(parent)?;
        self.watch.before_names(&parent, held.fd());
        let mut lower = self.lower_flags(flags) | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NOCTTY;
        if flags.exclusive() {
            lower |= OFlags::EXCL;
        } else {
            // An existing file may be a fifo.
            lower |= OFlags::NONBLOCK;
        }
        if flags.truncates() {
            // The node is made from the file that this call opens, so it cannot truncate the wrong
            // file.
            lower |= OFlags::TRUNC;
        }
        let descriptor = as_caller(caller, mode, |mode| rustix::fs::openat(held.fd(), name.bytes(), lower, mode))
            .map_err(|error| {
                match error {
                    // A link or a fifo without reader has appeared: the kernel looks up again and
                    // handles it by its kind. The same for a lease that must be waited for, which
                    // an ordinary open does.
                    Errno::ELOOP | Errno::ENXIO | Errno::EAGAIN if !flags.exclusive() => Errno::ESTALE,
                    other => other,
                }
            })?;
        let found = FoundFile::plain(stat::of_file(descriptor.as_fd())?);
        if stat::kind(&found.statx)? != Kind::File {
            return Err(Errno::ESTALE);
        }
        let entry = self.entry(&parent, held.fd(), name.bytes(), &found)?;
        let node = entry.node.arc::<HostNode>().ok_or(Errno::EIO)?;
        let file = self.opened(&node, descriptor, flags, self.lower_flags(flags));
        Ok((entry, file))
    }

    pub(super) fn tmpfile(
        self: &Arc<HostShared>,
        caller: &Caller,
        parent: &Node,
        mode: u32,
        flags: OpenFlags,
    ) -> Result<Created> {
        let (_, held) = self.enter(parent)?;
        let mut lower = self.lower_flags(flags) | OFlags::TMPFILE | OFlags::CLOEXEC;
        if flags.exclusive() {
            lower |= OFlags::EXCL;
        }
        let descriptor = as_caller(caller, mode, |mode| rustix::fs::openat(held.fd(), ".", lower, mode))?;
        let found = FoundFile::plain(stat::of_file(descriptor.as_fd())?);
        let node = Arc::new(HostNode::new(found.id, found.device, Kind::File, false, None));
        let entry = Entry { node: Node::new(Arc::clone(&node)), attr: stat::attr(&found.statx, found.id)? };
        let file = self.opened(&node, descriptor, flags, self.lower_flags(flags));
        Ok((entry, file))
    }

    pub(super) fn mkdir(&self, caller: &Caller, parent: &Node, name: Name<'_>, mode: u32) -> Result<Entry> {
        let (parent, held) = self.enter(parent)?;
        self.watch.before_names(&parent, held.fd());
        as_caller(caller, mode & 0o1777, |mode| rustix::fs::mkdirat(held.fd(), name.bytes(), mode))?;
        if mode & SET_GROUP_ID != 0 {
            // mkdir(2) ignores this bit, but it was requested.
            keep_set_group_id(held.fd(), name.bytes())?;
        }
        let found = self.examine(held.fd(), name.bytes(), true)?;
        self.entry(&parent, held.fd(), name.bytes(), &found)
    }

    pub(super) fn mknod(
        &self,
        caller: &Caller,
        parent: &Node,
        name: Name<'_>,
        kind: Kind,
        mode: u32,
        dev: Dev,
    ) -> Result<Entry> {
        if matches!(kind, Kind::Directory | Kind::Symlink) {
            return Err(Errno::EINVAL);
        }
        let (parent, held) = self.enter(parent)?;
        self.watch.before_names(&parent, held.fd());
        let number = rustix::fs::makedev(dev.0, dev.1);
        let file_type = FileType::from_raw_mode(kind.mode());
        as_caller(caller, mode, |mode| rustix::fs::mknodat(held.fd(), name.bytes(), file_type, mode, number))?;
        let found = self.examine(held.fd(), name.bytes(), true)?;
        self.entry(&parent, held.fd(), name.bytes(), &found)
    }

    pub(super) fn symlink(&self, caller: &Caller, parent: &Node, name: Name<'_>, target: &[u8]) -> Result<Entry> {
        if self.resolves_links() {
            return Err(Errno::EPERM);
        }
        let (parent, held) = self.enter(parent)?;
        self.watch.before_names(&parent, held.fd());
        as_caller(caller, 0o777, |_| rustix::fs::symlinkat(target, held.fd(), name.bytes()))?;
        let found = self.examine(held.fd(), name.bytes(), true)?;
        self.entry(&parent, held.fd(), name.bytes(), &found)
    }

    pub(super) fn link(
        &self,
        caller: &Caller,
        node: &Arc<HostNode>,
        file: Option<&HostFile>,
        parent: &Node,
        name: Name<'_>,
    ) -> Result<Entry> {
        let (parent, held) = self.enter(parent)?;
        self.watch.before_names(&parent, held.fd());
        // By a name where there is one: files open for writing belong to a mount of our own, and
        // hard links cannot cross mounts.
        let pin = match self.pin(node) {
            Err(Errno::ESTALE) => None,
            pin => Some(pin?),
        };
        let source =
            pin.as_ref().map(super::locate::Pin::fd).or_else(|| file.map(HostFile::fd)).ok_or(Errno::ESTALE)?;
        // The new name is the caller's, the right to link was checked for it.
        let linker = Caller { umask: 0, ..*caller };
        let linked = as_caller(&linker, 0, |_| link_descriptor(source, held.fd(), name.bytes()));
        match linked {
            // Every name that is kept of it is gone; the one it was opened by may be there.
            Err(Errno::EXDEV) => {
                let named = self.open_by_its_path(node, source)?.ok_or(Errno::EXDEV)?;
                as_caller(&linker, 0, |_| link_descriptor(named.as_fd(), held.fd(), name.bytes()))?;
            }
            other => other?,
        }
        // Seen through the descriptor: what the name shows might be another file by now.
        let attr = self.attr_of(node, source)?;
        let place = NodePlace { parent, name: ShortName::new(name.bytes()) };
        let fresh = HostNode::new(node.id(), node.device(), node.kind(), attr.nlink > 1, Some(place));
        Ok(Entry { node: Node::new(Arc::new(fresh)), attr })
    }
}

/// Links the file behind a descriptor to a name.
fn link_descriptor(source: BorrowedFd<'_>, directory: BorrowedFd<'_>, name: &[u8]) -> rustix::io::Result<()> {
    match rustix::fs::linkat(source, "", directory, name, AtFlags::EMPTY_PATH) {
        // Without CAP_DAC_READ_SEARCH.
        Err(rustix::io::Errno::NOENT) => rustix::fs::linkat(
            rustix::fs::CWD,
            nacre_sys::inode::proc_path(source),
            directory,
            name,
            AtFlags::SYMLINK_FOLLOW,
        ),
        other => other,
    }
}

/// Adds the set-group-id bit to a new directory.
fn keep_set_group_id(parent: BorrowedFd<'_>, name: &[u8]) -> Result<()> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory: OwnedFd = rustix::fs::openat(parent, name, flags, Mode::empty()).map_err(errno)?;
    let mode = u32::from(stat::of_file(directory.as_fd())?.stx_mode) & 0o7777;
    if mode & SET_GROUP_ID == 0 {
        credentials::with_set_id_kept(|| nacre_sys::inode::change_mode(directory.as_fd(), mode | SET_GROUP_ID))??;
    }
    Ok(())
}
