//! Backing files for passthrough: registered with the connection, named by id in the reply to OPEN.
//!
//! Called by file systems in CREATE and OPEN. The kernel opens the backing file itself, with the registering thread's
//! credentials: the file system below checks the daemon, not the caller. Regular files only; needs CAP_SYS_ADMIN in
//! the initial user namespace. The flag `PASSTHROUGH` in the offer does not show whether that is permitted:
//! [`Backing::probe`] does.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;

use crate::connection::Connection;
use crate::sys;

/// Whether passthrough can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Passthrough {
    /// It was negotiated and a file could be registered.
    Permitted,
    /// It was not negotiated: the kernel does not offer it, or the file system did not choose it.
    NotNegotiated,
    /// Registering failed with this error number: EPERM without the privilege, ELOOP for a file system that is
    /// stacked too deep, EOPNOTSUPP where the file system below does not support it.
    Refused(i32),
}

/// Registers backing files; cheap to clone.
#[derive(Clone, Debug)]
pub struct Backing {
    connection: Arc<Connection>,
    negotiated: bool,
}

impl Backing {
    pub(crate) fn new(connection: Arc<Connection>, negotiated: bool) -> Backing {
        Backing { connection, negotiated }
    }

    /// Registers a file (a descriptor opened with `O_PATH` suffices) and returns its id, greater than 0. The
    /// descriptor may be closed afterwards.
    pub fn open(&self, file: BorrowedFd<'_>) -> io::Result<i32> {
        if !self.negotiated {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        }
        sys::backing_open(self.connection.device()?.as_fd(), file.as_raw_fd())
    }

    /// Unregisters an id. Files that are open through it stay open.
    pub fn close(&self, id: i32) -> io::Result<()> {
        sys::backing_close(self.connection.device()?.as_fd(), id)
    }

    /// Checks whether passthrough is really permitted, by registering and unregistering a regular file of the kind
    /// that will be served.
    pub fn probe(&self, file: BorrowedFd<'_>) -> Passthrough {
        if !self.negotiated {
            return Passthrough::NotNegotiated;
        }
        match self.open(file).and_then(|id| self.close(id)) {
            Ok(()) => Passthrough::Permitted,
            Err(error) => Passthrough::Refused(error.raw_os_error().unwrap_or(libc::EIO)),
        }
    }
}
