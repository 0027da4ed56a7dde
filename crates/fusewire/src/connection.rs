//! The descriptors of a connection: the shared one for all writes except replies, and those from which threads read.
//!
//! Used by [`crate::Notifier`], [`crate::Backing`] and the session. Invariant: after
//! [`Connection::close`] no descriptor in here keeps the kernel's connection alive, whether a
//! `Notifier` or a thread in a handler holds it: the kernel aborts a connection when its last
//! descriptor is closed, and a handler may wait for requests that no thread reads any more.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, RwLock};

use crate::sys;

/// A connection that may have been closed already.
#[derive(Debug)]
pub(crate) struct Connection {
    shared: RwLock<Option<Arc<OwnedFd>>>,
    /// All of its descriptors.
    descriptors: Mutex<Vec<Weak<OwnedFd>>>,
}

impl Connection {
    pub(crate) fn new(device: OwnedFd) -> Arc<Connection> {
        let device = Arc::new(device);
        let descriptors = Mutex::new(vec![Arc::downgrade(&device)]);
        Arc::new(Connection { shared: RwLock::new(Some(device)), descriptors })
    }

    /// The shared descriptor; ENOTCONN after [`Connection::close`]. The lock is not held during the
    /// caller's use, which may block.
    pub(crate) fn device(&self) -> io::Result<Arc<OwnedFd>> {
        self.shared.read().clone().ok_or_else(|| io::Error::from_raw_os_error(libc::ENOTCONN))
    }

    /// Adds a clone of the device from which a thread reads.
    pub(crate) fn add(&self, clone: OwnedFd) -> Arc<OwnedFd> {
        let clone = Arc::new(clone);
        let mut descriptors = self.descriptors.lock();
        descriptors.retain(|descriptor| descriptor.strong_count() > 0);
        descriptors.push(Arc::downgrade(&clone));
        clone
    }

    /// Closes all descriptors. Those in use are redirected to /dev/null: reads return 0 bytes, replies are discarded.
    pub(crate) fn close(&self) {
        drop(self.shared.write().take());
        let descriptors = std::mem::take(&mut *self.descriptors.lock());
        for descriptor in descriptors.iter().filter_map(Weak::upgrade) {
            if let Err(error) = sys::close_in_place(descriptor.as_fd()) {
                tracing::warn!(%error, "a descriptor of the fuse device stays open until its thread ends");
            }
        }
    }

    /// Writes one message made of parts; the kernel takes it completely or not at all.
    pub(crate) fn send(&self, parts: &[io::IoSlice<'_>]) -> io::Result<()> {
        let device = self.device()?;
        loop {
            match rustix::io::writev(device.as_fd(), parts) {
                Ok(_) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}
