//! The one error type of the bench: a message for the user, and whether the command line is wrong.
//!
//! Every module here returns it; `lib.rs` prints it and chooses the exit code.

use std::fmt;
use std::io;
use std::path::Path;

/// A failure, as one sentence without a final full stop.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    what: String,
    /// The command line is wrong, on every machine.
    usage: bool,
}

impl Failure {
    /// A failure described by `what`.
    pub fn new(what: impl Into<String>) -> Self {
        Self { what: what.into(), usage: false }
    }

    /// A command line that is wrong.
    pub fn usage(what: impl Into<String>) -> Self {
        Self { what: what.into(), usage: true }
    }

    /// Whether the command line is wrong.
    pub fn is_usage(&self) -> bool {
        self.usage
    }

    /// An I/O error met while doing `doing` to `path`.
    pub fn io(doing: &str, path: &Path, error: impl Into<io::Error>) -> Self {
        Self::new(format!("{doing} {}: {}", path.display(), error.into()))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.what)
    }
}

impl std::error::Error for Failure {}

/// Attaches "doing PATH" to an I/O result.
pub trait Doing<T> {
    /// Turns the error into a [`Failure`] that names the step and the path.
    fn doing(self, doing: &str, path: &Path) -> Result<T, Failure>;
}

impl<T, E: Into<io::Error>> Doing<T> for Result<T, E> {
    fn doing(self, doing: &str, path: &Path) -> Result<T, Failure> {
        self.map_err(|error| Failure::io(doing, path, error))
    }
}
