//! The failure of a call, with its kind: each protocol maps kinds to codes of its own.

use std::{fmt, io, path::Path};

/// Why a call failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The name or the options are wrong.
    Invalid,
    /// The volume, its source or its pool does not exist.
    Missing,
    /// The volume exists with other options.
    Exists,
    /// The volume is mounted, or has clones.
    InUse,
    /// Another call holds the volume's lock.
    Busy,
    /// Anything else: a command of `nacre` or a system call failed.
    Failed,
}

/// A failed call, with the message for the client.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Its kind.
    pub kind: Kind,
    /// The message: one line.
    pub message: String,
}

impl Failure {
    /// A failure of this kind.
    pub fn new(kind: Kind, message: impl Into<String>) -> Failure {
        Failure { kind, message: message.into() }
    }

    /// A failed system call on a path.
    pub fn io(what: &str, path: &Path, error: &io::Error) -> Failure {
        Failure::new(Kind::Failed, format!("cannot {what} {}: {error}", path.display()))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.message)
    }
}
