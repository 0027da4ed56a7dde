//! The error of a handler: a Linux error number, as it goes into a reply.

use std::fmt;

/// A positive Linux error number. The kernel accepts 1 to 511 in a reply; anything else is sent as EIO.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Errno(pub i32);

impl Errno {
    /// Interrupted by a signal.
    pub const EINTR: Errno = Errno(libc::EINTR);
    /// Input/output error.
    pub const EIO: Errno = Errno(libc::EIO);
    /// No such file or directory.
    pub const ENOENT: Errno = Errno(libc::ENOENT);
    /// Try again.
    pub const EAGAIN: Errno = Errno(libc::EAGAIN);
    /// Invalid argument.
    pub const EINVAL: Errno = Errno(libc::EINVAL);
    /// Not implemented: the kernel stops sending some kinds of request after this answer.
    pub const ENOSYS: Errno = Errno(libc::ENOSYS);
    /// Result too large for the caller's buffer.
    pub const ERANGE: Errno = Errno(libc::ERANGE);
    /// Not supported.
    pub const EOPNOTSUPP: Errno = Errno(libc::EOPNOTSUPP);
    /// The connection is gone.
    pub const ENOTCONN: Errno = Errno(libc::ENOTCONN);

    /// The value for `fuse_out_header.error`: negative, and EIO for a number that the kernel would
    /// refuse.
    pub(crate) fn wire(self) -> i32 {
        if (1..512).contains(&self.0) { -self.0 } else { -libc::EIO }
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        std::io::Error::from_raw_os_error(self.0).fmt(f)
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Errno({})", self.0)
    }
}

impl std::error::Error for Errno {}

impl From<std::io::Error> for Errno {
    /// An error without a number is EIO.
    fn from(error: std::io::Error) -> Errno {
        Errno(error.raw_os_error().unwrap_or(libc::EIO))
    }
}

impl From<rustix::io::Errno> for Errno {
    fn from(error: rustix::io::Errno) -> Errno {
        Errno(error.raw_os_error())
    }
}
