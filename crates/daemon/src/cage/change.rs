//! Changes of a cage's limits, as commands and requests state them.

use crate::failure::Failure;
use nacre_layers::size::Size;
use serde::{Deserialize, Serialize};
use std::str::FromStr;

/// A change of a size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SizeChange {
    /// Sets this number of bytes.
    To(u64),
    /// Adds this number of bytes.
    Grow(u64),
    /// Subtracts this number of bytes.
    Shrink(u64),
}

impl SizeChange {
    /// Returns the size after the change; `None` where the result would not be a valid size.
    pub fn applied(self, present: u64) -> Option<u64> {
        let changed = match self {
            SizeChange::To(bytes) => Some(bytes),
            SizeChange::Grow(bytes) => present.checked_add(bytes),
            SizeChange::Shrink(bytes) => present.checked_sub(bytes),
        };
        changed.and_then(|bytes| Size::new(bytes).limit().ok())
    }

    /// Returns the size after the change, with the failure for the user.
    ///
    /// # Errors
    /// There is no limit that could change, or the result is smaller than a block or too large.
    pub fn of(self, present: Option<u64>, directory: &str) -> Result<u64, Failure> {
        let unlimited = || {
            Failure::new(format!("{directory} has no limit of size that could be made larger or smaller"))
                .next("name the new size")
        };
        let start = match self {
            SizeChange::To(_) => 0,
            SizeChange::Grow(_) | SizeChange::Shrink(_) => present.ok_or_else(unlimited)?,
        };
        self.applied(start).ok_or_else(|| {
            Failure::new(format!(
                "the limit of {directory} is {}: changed like this, less than a block would be left, or more than there can be",
                Size::new(start)
            ))
        })
    }
}

impl FromStr for SizeChange {
    type Err = Failure;

    fn from_str(text: &str) -> Result<SizeChange, Failure> {
        let size = |text: &str| text.parse::<Size>().map_err(|error| Failure::usage(format!("size: {error}")));
        if let Some(more) = text.strip_prefix('+') {
            return size(more).map(|size| SizeChange::Grow(size.bytes()));
        }
        if let Some(less) = text.strip_prefix('-') {
            return size(less).map(|size| SizeChange::Shrink(size.bytes()));
        }
        let limit = size(text)?.limit().map_err(|error| Failure::usage(format!("size: {error}")))?;
        Ok(SizeChange::To(limit))
    }
}

/// A change of a number of inodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum InodeChange {
    /// Sets this number of inodes.
    To(u64),
    /// Removes the limit of inodes.
    None,
}

impl InodeChange {
    /// Returns the limit of inodes after the change.
    pub fn limit(self) -> Option<u64> {
        match self {
            InodeChange::To(inodes) => Some(inodes),
            InodeChange::None => None,
        }
    }
}

impl FromStr for InodeChange {
    type Err = Failure;

    fn from_str(text: &str) -> Result<InodeChange, Failure> {
        match (text, text.parse()) {
            ("none", _) => Ok(InodeChange::None),
            (_, Ok(inodes)) if inodes > 0 => Ok(InodeChange::To(inodes)),
            _ => Err(Failure::usage(format!(
                "inodes: \"{text}\" is neither a number of files, directories and links nor the word none"
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::Exit;

    #[test]
    fn sizes_are_told_absolutely_or_as_a_change() {
        for (text, present, expected) in [
            ("20G", 1 << 30, Some(20 << 30)),
            ("+1G", 1 << 30, Some(2 << 30)),
            ("-512M", 1 << 30, Some(512 << 20)),
            ("-1G", 1 << 30, None),
            ("-2G", 1 << 30, None),
            ("+7E", 15 << 60, None),
            ("10000", 0, Some(8192)),
        ] {
            let change: SizeChange = text.parse().unwrap();
            assert_eq!(change.applied(present), expected, "{text}");
        }
        for text in ["10X", "+", "-", "", "++1G", "100", "0", "none"] {
            assert_eq!(text.parse::<SizeChange>().unwrap_err().exit, Exit::Usage, "{text}");
        }
        assert!(SizeChange::Grow(1).of(None, "/a").unwrap_err().what.contains("no limit of size"));
        assert!(SizeChange::Shrink(2 << 30).of(Some(1 << 30), "/a").unwrap_err().what.contains("is 1G"));
        assert_eq!(SizeChange::To(8192).of(None, "/a"), Ok(8192));
    }

    #[test]
    fn inodes_are_a_number_or_none() {
        assert_eq!("5".parse(), Ok(InodeChange::To(5)));
        assert_eq!("none".parse(), Ok(InodeChange::None));
        for text in ["0", "-1", "10k", ""] {
            assert!(text.parse::<InodeChange>().is_err(), "{text}");
        }
    }
}
