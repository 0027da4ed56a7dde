//! Errors with the path they concern, as sentences.

use crate::{Result, WorkspaceError};
use rustix::io::Errno;
use std::{io, os::unix::ffi::OsStrExt, path::Path};

/// A path for messages: control characters and bytes that are no UTF-8 escaped.
pub(crate) fn shown(path: &Path) -> String {
    let bytes = path.as_os_str().as_bytes();
    match std::str::from_utf8(bytes) {
        Ok("") => ".".to_owned(),
        Ok(text) if !text.chars().any(char::is_control) => text.to_owned(),
        _ => bytes.escape_ascii().to_string(),
    }
}

/// An error of a call on a path: `cannot DOING PATH: REASON`.
pub(crate) fn failed(doing: &str, path: &Path, error: &io::Error) -> WorkspaceError {
    let reason = match error.raw_os_error() {
        Some(number) => Errno::from_raw_os_error(number).to_string(),
        None => error.to_string(),
    };
    WorkspaceError { what: format!("cannot {doing} {}: {reason}", shown(path)), errno: error.raw_os_error() }
}

/// An error that no call returned.
pub(crate) fn fact(path: &Path, text: &str) -> WorkspaceError {
    WorkspaceError { what: format!("{} {text}", shown(path)), errno: None }
}

/// Adds the action and the path to an error of the system.
pub(crate) trait During<T> {
    /// Turns the error into `cannot DOING PATH: REASON`.
    fn during(self, doing: &str, path: &Path) -> Result<T>;
}

impl<T> During<T> for io::Result<T> {
    fn during(self, doing: &str, path: &Path) -> Result<T> {
        self.map_err(|error| failed(doing, path, &error))
    }
}

impl<T> During<T> for rustix::io::Result<T> {
    fn during(self, doing: &str, path: &Path) -> Result<T> {
        self.map_err(|error| failed(doing, path, &error.into()))
    }
}

/// Whether an error means that there is no such entry, or that something above it is no directory.
pub(crate) fn is_missing(error: &io::Error) -> bool {
    let number = error.raw_os_error().map(Errno::from_raw_os_error);
    matches!(number, Some(Errno::NOENT | Errno::NOTDIR | Errno::LOOP))
}
