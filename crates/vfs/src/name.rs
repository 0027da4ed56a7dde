//! One component of a path, as bytes. Created in a front end, checked once there; layers may trust it.

use crate::{Errno, Result};
use std::{ffi::OsStr, fmt, os::unix::ffi::OsStrExt};

/// Maximum length of a name in Linux file systems, bytes (limits.h).
pub const NAME_MAX: usize = 255;

/// A borrowed file name: 1 to 255 bytes, no slash, no NUL, neither `.` nor `..`. Not necessarily
/// UTF-8.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name<'a>(&'a [u8]);

impl<'a> Name<'a> {
    /// Checks a name from outside.
    ///
    /// # Errors
    /// ENAMETOOLONG over 255 bytes, ENOENT for the empty name, EINVAL for `.`, `..`, a slash or a
    /// NUL.
    pub fn new(bytes: &'a [u8]) -> Result<Name<'a>> {
        match bytes {
            [] => Err(Errno::ENOENT),
            b"." | b".." => Err(Errno::EINVAL),
            _ if bytes.len() > NAME_MAX => Err(Errno::ENAMETOOLONG),
            // Without an early exit: many bytes are compared at a time.
            _ if bytes.iter().fold(false, |found, &b| found | (b == b'/') | (b == 0)) => Err(Errno::EINVAL),
            _ => Ok(Name(bytes)),
        }
    }

    /// The bytes of the name.
    pub fn bytes(self) -> &'a [u8] {
        self.0
    }

    /// The name as an `OsStr`, for the standard library and `rustix`.
    pub fn os(self) -> &'a OsStr {
        OsStr::from_bytes(self.0)
    }
}

impl fmt::Debug for Name<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.0.escape_ascii())
    }
}

impl fmt::Display for Name<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.escape_ascii())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_single_components_pass() {
        for good in [&b"a"[..], b"...", b".hidden", b"\xff\xfe", b"a b\n", &[b'x'; 255]] {
            assert_eq!(Name::new(good).map(Name::bytes), Ok(good));
        }
        let long = [b'x'; 256];
        for (bad, errno) in [
            (&b""[..], Errno::ENOENT),
            (b".", Errno::EINVAL),
            (b"..", Errno::EINVAL),
            (b"a/b", Errno::EINVAL),
            (b"a\0", Errno::EINVAL),
            (&long, Errno::ENAMETOOLONG),
        ] {
            assert_eq!(Name::new(bad), Err(errno));
        }
    }
}
