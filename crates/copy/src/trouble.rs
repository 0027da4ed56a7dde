//! Failures of single entries, as messages, and whether the whole copy can continue.

use crate::Lack;
use rustix::io::Errno;
use std::{io, path::Path};

/// Side of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Source,
    Destination,
}

/// Why an entry was not copied.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// A call failed: its purpose, the side, and the system's reason.
    Call(&'static str, Side, io::Error),
    /// No call failed: the whole sentence after the name.
    Fact(Side, String),
    /// The copy has been asked to stop.
    Stopped,
}

impl Trouble {
    /// Whether all other entries would fail, too.
    pub(crate) fn is_fatal(&self) -> bool {
        let Trouble::Call(_, side, error) = self else { return false };
        match error.raw_os_error().map(Errno::from_raw_os_error) {
            Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOTCONN | Errno::SHUTDOWN) => true,
            // One unreadable file is no reason to stop reading others; where writing fails once, it fails again.
            Some(Errno::NOSPC | Errno::DQUOT | Errno::ROFS | Errno::IO) => *side == Side::Destination,
            _ => false,
        }
    }

    /// Returns the resource that is exhausted, if that is the reason.
    pub(crate) fn lack(&self) -> Option<Lack> {
        if let Trouble::Call(_, _, error) = self { lack(error) } else { None }
    }

    /// Whether the entry was removed meanwhile.
    pub(crate) fn is_gone(&self) -> bool {
        matches!(self, Trouble::Call(_, Side::Source, error) if error.kind() == io::ErrorKind::NotFound)
    }

    /// Returns the message for the user, about an entry with this path below both roots.
    pub(crate) fn sentence(&self, source: &Path, destination: &Path, path: &Path) -> String {
        let at = |side: Side| {
            let root = if side == Side::Source { source } else { destination };
            shown(&if path.as_os_str().is_empty() { root.to_path_buf() } else { root.join(path) })
        };
        match self {
            Trouble::Call(doing, side, error) => format!("cannot {doing} {}: {}", at(*side), reason(error)),
            Trouble::Fact(side, text) => format!("{} {text}", at(*side)),
            Trouble::Stopped => format!("{} was not finished", at(Side::Source)),
        }
    }
}

/// Adds the purpose of the call to an error.
pub(crate) trait During<T> {
    /// An error on the side of SOURCE.
    fn source(self, doing: &'static str) -> Result<T, Trouble>;
    /// An error on the side of DEST.
    fn destination(self, doing: &'static str) -> Result<T, Trouble>;
}

impl<T, E: Into<io::Error>> During<T> for Result<T, E> {
    fn source(self, doing: &'static str) -> Result<T, Trouble> {
        self.map_err(|error| Trouble::Call(doing, Side::Source, error.into()))
    }

    fn destination(self, doing: &'static str) -> Result<T, Trouble> {
        self.map_err(|error| Trouble::Call(doing, Side::Destination, error.into()))
    }
}

/// Returns the exhausted resource that an error means.
pub(crate) fn lack(error: &io::Error) -> Option<Lack> {
    match Errno::from_raw_os_error(error.raw_os_error()?) {
        Errno::NOSPC => Some(Lack::Room),
        Errno::DQUOT => Some(Lack::Quota),
        Errno::MFILE | Errno::NFILE => Some(Lack::OpenFiles),
        _ => None,
    }
}

/// Returns the system's message, without the number that the standard library adds.
pub(crate) fn reason(error: &io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or(&text).to_owned()
}

/// Formats a path for users: control characters are escaped.
pub(crate) fn shown(path: &Path) -> String {
    let mut text = String::new();
    for letter in path.to_string_lossy().chars() {
        if letter.is_control() { text.extend(letter.escape_default()) } else { text.push(letter) }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentences_name_the_side_that_failed() {
        let (source, destination) = (Path::new("/a"), Path::new("/b"));
        let full = Err::<(), _>(Errno::NOSPC).destination("write").unwrap_err();
        assert_eq!(
            full.sentence(source, destination, Path::new("x\ny")),
            "cannot write /b/x\\ny: No space left on device"
        );
        assert!(full.is_fatal() && !full.is_gone());
        assert_eq!(full.lack(), Some(Lack::Room));
        assert_eq!(Err::<(), _>(Errno::IO).destination("write").unwrap_err().lack(), None);
        let gone = Err::<(), _>(Errno::NOENT).source("open").unwrap_err();
        assert_eq!(gone.sentence(source, destination, Path::new("")), "cannot open /a: No such file or directory");
        assert!(gone.is_gone() && !gone.is_fatal());
        assert!(!Err::<(), _>(Errno::IO).source("read").unwrap_err().is_fatal(), "one bad file is no reason to stop");
    }
}
