//! The descriptor of a connection, shared by everything that writes to it out of turn.
//!
//! Used by [`crate::Notifier`], [`crate::Backing`] and the session. Invariant: after
//! [`Connection::close`] nothing in here keeps the kernel's connection alive, whoever still holds a
//! `Notifier`: the kernel aborts a connection when its last descriptor is closed.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use parking_lot::RwLock;

/// A connection that may have been closed already.
#[derive(Debug)]
pub(crate) struct Connection(RwLock<Option<Arc<OwnedFd>>>);

impl Connection {
    pub(crate) fn new(device: OwnedFd) -> Arc<Connection> {
        Arc::new(Connection(RwLock::new(Some(Arc::new(device)))))
    }

    /// The descriptor; ENOTCONN after [`Connection::close`]. The lock is not held during the
    /// caller's use, which may block.
    pub(crate) fn device(&self) -> io::Result<Arc<OwnedFd>> {
        self.0.read().clone().ok_or_else(|| io::Error::from_raw_os_error(libc::ENOTCONN))
    }

    pub(crate) fn close(&self) {
        drop(self.0.write().take());
    }

    /// Writes one message made of parts; the kernel takes it whole or not at all.
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
