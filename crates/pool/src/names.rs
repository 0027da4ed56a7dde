//! Names of pools, datasets, snapshots and bookmarks: their syntax, and the parsing of snapshot
//! arguments. Commands check users' input with it, the engine its arguments.
//!
//! ```text
//!  pool            letter, then letters, digits, - _ . : and blanks; no word with another meaning in `pool create`
//!  file system     pool/name/name, each name 1 to 255 bytes, all of it at most 1023
//!  snapshot        file system@name
//!  bookmark        file system#name
//!  snapshots       file system@name,first%last,%last,first%,%
//! ```
//!
//! Invariant: an accepted name is accepted by ZFS' commands as well, except for its length.

use std::fmt;

pub mod selection;

pub use selection::{SelectionError, SnapshotRange, SnapshotSelection};

/// Longest component of a name, bytes: it is the name of a directory where the file system is
/// mounted.
pub const PART_MOST: usize = 255;

/// Longest full name, bytes.
pub const NAME_MOST: usize = 1023;

/// Reason why a name is invalid, in the words of ZFS' commands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NameError {
    /// The name is empty.
    Empty,
    /// More than [`PART_MOST`] or [`NAME_MOST`] bytes.
    TooLong,
    /// It begins with a slash.
    LeadingSlash,
    /// It ends with a slash.
    TrailingSlash,
    /// Two slashes, or nothing before or after a delimiter.
    EmptyComponent,
    /// A character that is invalid in any name.
    InvalidCharacter(char),
    /// A character that is invalid in the name of a pool.
    InvalidPoolCharacter(char),
    /// More than one `@` or `#`.
    MultipleDelimiters,
    /// The name of a file system with the delimiter of a snapshot.
    SnapshotDelimiter,
    /// The name of a file system with the delimiter of a bookmark.
    BookmarkDelimiter,
    /// The name of a snapshot without its delimiter.
    NoSnapshotDelimiter,
    /// The name of a bookmark without its delimiter.
    NoBookmarkDelimiter,
    /// A component that is ".".
    SelfReference,
    /// A component that is "..".
    ParentReference,
    /// The name of a pool that does not begin with a letter.
    NoLetter,
    /// A word with another meaning in `pool create`.
    Reserved,
    /// "c" and a digit: once the name of a disk.
    DiskLike,
    /// The name of a pool alone, where a file system in it is required.
    NoDataset,
}

impl fmt::Display for NameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("name is empty"),
            Self::TooLong => f.write_str("name is too long"),
            Self::LeadingSlash => f.write_str("leading slash in name"),
            Self::TrailingSlash => f.write_str("trailing slash in name"),
            Self::EmptyComponent => f.write_str("empty component in name"),
            Self::InvalidCharacter(c) => write!(f, "invalid character '{c}' in name"),
            Self::InvalidPoolCharacter(c) => write!(f, "invalid character '{c}' in pool name"),
            Self::MultipleDelimiters => f.write_str("multiple '@' and/or '#' delimiters in name"),
            Self::SnapshotDelimiter => f.write_str("snapshot delimiter '@' in filesystem name"),
            Self::BookmarkDelimiter => f.write_str("bookmark delimiter '#' in filesystem name"),
            Self::NoSnapshotDelimiter => f.write_str("missing '@' delimiter in snapshot name"),
            Self::NoBookmarkDelimiter => f.write_str("missing '#' delimiter in bookmark name"),
            Self::SelfReference => f.write_str("self reference, '.' is found in name"),
            Self::ParentReference => f.write_str("parent reference, '..' is found in name"),
            Self::NoLetter => f.write_str("name must begin with a letter"),
            Self::Reserved => f.write_str("name is reserved"),
            Self::DiskLike => f.write_str("pool name is reserved"),
            Self::NoDataset => f.write_str("missing dataset name"),
        }
    }
}

impl std::error::Error for NameError {}

/// A parsed name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Name<'a> {
    /// A file system; a pool's name alone is its root file system.
    Filesystem(&'a str),
    /// A snapshot of a file system.
    Snapshot {
        /// The file system.
        filesystem: &'a str,
        /// The part after the `@`.
        snapshot: &'a str,
    },
    /// A bookmark of a file system.
    Bookmark {
        /// The file system.
        filesystem: &'a str,
        /// The part after the `#`.
        bookmark: &'a str,
    },
}

impl<'a> Name<'a> {
    /// Parses any name.
    ///
    /// # Errors
    /// The reason why it is invalid.
    pub fn parse(name: &'a str) -> Result<Self, NameError> {
        let Some((filesystem, part)) = name.split_once(['@', '#']) else {
            check_path(name)?;
            return Ok(Self::Filesystem(name));
        };
        if part.contains(['@', '#']) {
            return Err(NameError::MultipleDelimiters);
        }
        if name.len() > NAME_MOST {
            return Err(NameError::TooLong);
        }
        check_path(filesystem)?;
        check_part(part)?;
        if name.as_bytes().get(filesystem.len()) == Some(&b'@') {
            Ok(Self::Snapshot { filesystem, snapshot: part })
        } else {
            Ok(Self::Bookmark { filesystem, bookmark: part })
        }
    }

    /// Checks the name of a file system.
    ///
    /// # Errors
    /// The reason why it is invalid; also for the name of a snapshot or bookmark.
    pub fn filesystem(name: &'a str) -> Result<&'a str, NameError> {
        if let Some(delimiter) = name.chars().find(|c| matches!(c, '@' | '#')) {
            return Err(if delimiter == '@' { NameError::SnapshotDelimiter } else { NameError::BookmarkDelimiter });
        }
        check_path(name)?;
        Ok(name)
    }

    /// Splits the name of a snapshot into file system and snapshot.
    ///
    /// # Errors
    /// The reason why it is invalid.
    pub fn snapshot(name: &'a str) -> Result<(&'a str, &'a str), NameError> {
        match Self::parse(name)? {
            Self::Snapshot { filesystem, snapshot } => Ok((filesystem, snapshot)),
            _ => Err(NameError::NoSnapshotDelimiter),
        }
    }

    /// Splits the name of a bookmark into file system and bookmark.
    ///
    /// # Errors
    /// The reason why it is invalid.
    pub fn bookmark(name: &'a str) -> Result<(&'a str, &'a str), NameError> {
        match Self::parse(name)? {
            Self::Bookmark { filesystem, bookmark } => Ok((filesystem, bookmark)),
            _ => Err(NameError::NoBookmarkDelimiter),
        }
    }

    /// Returns the pool's name.
    #[must_use]
    pub fn pool(&self) -> &'a str {
        let filesystem = match self {
            Self::Filesystem(filesystem) | Self::Snapshot { filesystem, .. } | Self::Bookmark { filesystem, .. } => {
                filesystem
            }
        };
        filesystem.split('/').next().unwrap_or(filesystem)
    }
}

/// Splits the name of a file system other than a root dataset into its parent and its last
/// component.
///
/// # Errors
/// [`NameError::NoDataset`] for a root dataset; the reason why the name is invalid.
pub fn split_parent(name: &str) -> Result<(&str, &str), NameError> {
    Name::filesystem(name)?.rsplit_once('/').ok_or(NameError::NoDataset)
}

/// Checks the name of a new pool.
///
/// # Errors
/// The reason why it is invalid.
pub fn check_new_pool(name: &str) -> Result<(), NameError> {
    let first = name.chars().next().ok_or(NameError::Empty)?;
    if name.len() > PART_MOST {
        return Err(NameError::TooLong);
    }
    if let Some(c) = name.chars().find(|c| !is_allowed(*c)) {
        return Err(NameError::InvalidPoolCharacter(c));
    }
    if !first.is_ascii_alphabetic() {
        return Err(NameError::NoLetter);
    }
    if name.ends_with(' ') {
        return Err(NameError::InvalidPoolCharacter(' '));
    }
    let mut bytes = name.bytes();
    if bytes.next() == Some(b'c') && bytes.next().is_some_and(|byte| byte.is_ascii_digit()) {
        return Err(NameError::DiskLike);
    }
    // ZFS reserves all names with these prefixes, and these exact words.
    let prefixes = ["mirror", "raidz", "draid", "spare"];
    let words = ["log", "cache", "special", "dedup", "replacing"];
    if prefixes.iter().any(|prefix| name.starts_with(prefix)) || words.contains(&name) {
        return Err(NameError::Reserved);
    }
    Ok(())
}

/// Checks the name of a snapshot or bookmark (without its file system), or the last component of a
/// file system's name.
///
/// # Errors
/// The reason why it is invalid.
pub fn check_part(part: &str) -> Result<(), NameError> {
    match part {
        "" => return Err(NameError::EmptyComponent),
        "." => return Err(NameError::SelfReference),
        ".." => return Err(NameError::ParentReference),
        _ => {}
    }
    if let Some(c) = part.chars().find(|c| !is_allowed(*c)) {
        return Err(NameError::InvalidCharacter(c));
    }
    if part.len() > PART_MOST { Err(NameError::TooLong) } else { Ok(()) }
}

fn check_path(path: &str) -> Result<(), NameError> {
    if path.is_empty() {
        return Err(NameError::Empty);
    }
    if path.starts_with('/') {
        return Err(NameError::LeadingSlash);
    }
    if path.ends_with('/') {
        return Err(NameError::TrailingSlash);
    }
    if path.len() > NAME_MOST {
        return Err(NameError::TooLong);
    }
    path.split('/').try_for_each(check_part)?;
    if path.starts_with(|c: char| c.is_ascii_alphabetic()) { Ok(()) } else { Err(NameError::NoLetter) }
}

fn is_allowed(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | ':' | ' ')
}

#[cfg(test)]
mod tests;
