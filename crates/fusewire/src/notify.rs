//! Notifications to the kernel: invalidations, data for its cache, wake-ups.
//!
//! Called by file systems from any thread but one that handles a request on the same directory: the kernel takes the
//! parent's lock for [`Notifier::inval_entry`] and [`Notifier::delete`], and that request's caller holds it. ENOENT
//! means that the kernel does not know the node or name, which is normal.

use std::io::{self, IoSlice};
use std::sync::Arc;

use crate::abi::{
    self, MAX_PRUNE, NotifyDeleteOut, NotifyInvalEntryOut, NotifyInvalInodeOut, NotifyPollWakeupOut, NotifyPruneOut,
    NotifyRetrieveOut, NotifyStoreOut, OutHeader, Pod, notify,
};
use crate::connection::Connection;

/// Sends notifications; cheap to clone. After the end of the session every call fails with ENOTCONN
/// or ENODEV.
#[derive(Clone, Debug)]
pub struct Notifier {
    connection: Arc<Connection>,
}

impl Notifier {
    pub(crate) fn new(connection: Arc<Connection>) -> Notifier {
        Notifier { connection }
    }

    /// Invalidates the attributes of a node, and its cached pages from `offset` on for `length` bytes: `offset` < 0
    /// keeps all pages, `length` <= 0 means to the end. Waits for pages under I/O.
    pub fn inval_inode(&self, nodeid: u64, offset: i64, length: i64) -> io::Result<()> {
        self.send(notify::INVAL_INODE, &NotifyInvalInodeOut { ino: nodeid, off: offset, len: length }, &[])
    }

    /// Invalidates a name, positive or negative, and the parent's attributes and listing. With `expire_only`
    /// (`HAS_EXPIRE_ONLY`) the name is only revalidated at its next use, which keeps mounts and open directories
    /// below it.
    pub fn inval_entry(&self, parent: u64, name: &[u8], expire_only: bool) -> io::Result<()> {
        let flags = if expire_only { abi::flag::EXPIRE_ONLY } else { 0 };
        self.send(notify::INVAL_ENTRY, &NotifyInvalEntryOut { parent, namelen: length(name)?, flags }, &[name, &[0]])
    }

    /// Notifies the removal of a name: as [`Notifier::inval_entry`], and inotify watchers of the directory get an
    /// event if it still refers to `child`.
    pub fn delete(&self, parent: u64, child: u64, name: &[u8]) -> io::Result<()> {
        self.send(notify::DELETE, &NotifyDeleteOut { parent, child, namelen: length(name)?, padding: 0 }, &[name, &[0]])
    }

    /// Puts data into the page cache of a node.
    pub fn store(&self, nodeid: u64, offset: u64, data: &[u8]) -> io::Result<()> {
        self.send(notify::STORE, &NotifyStoreOut { nodeid, offset, size: length(data)?, padding: 0 }, &[data])
    }

    /// Requests data in the page cache of a node; it arrives in [`crate::Handler::retrieved`] with this number, which
    /// must be even and less than 2^62 (larger ones are used by this crate).
    pub fn retrieve(&self, unique: u64, nodeid: u64, offset: u64, size: u32) -> io::Result<()> {
        self.send(notify::RETRIEVE, &NotifyRetrieveOut { notify_unique: unique, nodeid, offset, size, padding: 0 }, &[])
    }

    /// Invalidates all cached names at once (attributes and pages stay). Linux 6.16.
    pub fn inc_epoch(&self) -> io::Result<()> {
        self.head(notify::INC_EPOCH, &[])
    }

    /// Asks the kernel to drop these nodes if they are unused; FORGETs follow. Linux 6.18.
    pub fn prune(&self, nodeids: &[u64]) -> io::Result<()> {
        for some in nodeids.chunks(MAX_PRUNE) {
            let mut bytes = [0_u8; MAX_PRUNE * 8];
            for (place, id) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(some) {
                *place = id.to_ne_bytes();
            }
            let count = u32::try_from(some.len()).map_err(|_| invalid())?;
            let list = bytes.get(..some.len() * 8).unwrap_or_default();
            self.send(notify::PRUNE, &NotifyPruneOut { count, ..NotifyPruneOut::default() }, &[list])?;
        }
        Ok(())
    }

    /// Asks the kernel to resend all unanswered requests (`HAS_RESEND`), after a restart of the daemon.
    pub fn resend(&self) -> io::Result<()> {
        self.head(notify::RESEND, &[])
    }

    /// Wakes up the pollers of the handle in a POLL request.
    pub fn poll_wakeup(&self, kh: u64) -> io::Result<()> {
        self.send(notify::POLL, &NotifyPollWakeupOut { kh }, &[])
    }

    fn send<T: Pod>(&self, code: i32, body: &T, data: &[&[u8]]) -> io::Result<()> {
        match data {
            [] => self.head(code, &[body.bytes()]),
            [one] => self.head(code, &[body.bytes(), one]),
            [one, two, ..] => self.head(code, &[body.bytes(), one, two]),
        }
    }

    fn head(&self, code: i32, parts: &[&[u8]]) -> io::Result<()> {
        let size = size_of::<OutHeader>() + parts.iter().map(|part| part.len()).sum::<usize>();
        let header = OutHeader { len: u32::try_from(size).map_err(|_| invalid())?, error: code, unique: 0 };
        let mut slices = [IoSlice::new(header.bytes()), IoSlice::new(&[]), IoSlice::new(&[]), IoSlice::new(&[])];
        for (slice, part) in slices.iter_mut().skip(1).zip(parts) {
            *slice = IoSlice::new(part);
        }
        self.connection.send(slices.get(..=parts.len()).unwrap_or_default())
    }
}

fn length(bytes: &[u8]) -> io::Result<u32> {
    u32::try_from(bytes.len()).map_err(|_| invalid())
}

fn invalid() -> io::Error {
    io::Error::from_raw_os_error(libc::EINVAL)
}
