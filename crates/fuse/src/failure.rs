//! The error type of the FUSE front end: a Linux error number, from a layer or from building the reply.

/// Error number of a failed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Failure(pub i32);

impl From<nacre_vfs::Errno> for Failure {
    fn from(error: nacre_vfs::Errno) -> Failure {
        Failure(error.raw())
    }
}

impl From<fusewire::Errno> for Failure {
    fn from(error: fusewire::Errno) -> Failure {
        Failure(error.0)
    }
}

impl From<Failure> for fusewire::Errno {
    fn from(failure: Failure) -> fusewire::Errno {
        fusewire::Errno(failure.0)
    }
}

/// Result of a handler.
pub(crate) type Outcome<T = ()> = Result<T, Failure>;
