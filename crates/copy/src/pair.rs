//! A directory of SOURCE with its counterpart in DEST, and lists of names in it.
//!
//! Made by the walk; shared by all workers with work in it.

use crate::metadata::Meta;
use rustix::{
    fs::{self, Mode, OFlags},
    io::Errno,
};
use std::{
    ffi::OsStr,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::PathBuf,
};

/// Flags for opening directories.
pub(crate) const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// A directory of SOURCE with its counterpart in DEST.
#[derive(Debug)]
pub(crate) struct Pair {
    /// Path below the roots; empty for the roots themselves.
    pub(crate) path: PathBuf,
    pub(crate) source: OwnedFd,
    pub(crate) dest: OwnedFd,
    /// Attributes of the directory in SOURCE when it was opened.
    pub(crate) meta: Meta,
    /// Device number of the counterpart.
    pub(crate) device: u64,
    /// The counterpart was made by this copy: only this copy has put entries there.
    pub(crate) fresh: bool,
}

impl Pair {
    /// Whether it is SOURCE and DEST themselves; DEST may have existed before, empty.
    pub(crate) fn is_root(&self) -> bool {
        self.path.as_os_str().is_empty()
    }
}

/// Names of one directory, packed in one buffer.
#[derive(Debug, Default)]
pub(crate) struct Names {
    bytes: Vec<u8>,
    /// End of each name, and whether the directory lists it as a regular file.
    ends: Vec<(u32, bool)>,
}

impl Names {
    pub(crate) fn push(&mut self, name: &[u8], regular: bool) {
        self.bytes.extend_from_slice(name);
        self.ends.push((u32::try_from(self.bytes.len()).unwrap_or(u32::MAX), regular));
    }

    /// Returns the number of names.
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns each name, and whether the directory lists it as a regular file.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&[u8], bool)> {
        let starts = std::iter::once(0).chain(self.ends.iter().map(|(end, _)| *end));
        starts.zip(&self.ends).map(|(start, (end, regular))| {
            (self.bytes.get(start as usize..*end as usize).unwrap_or_default(), *regular)
        })
    }
}

/// Returns the path of an entry below the roots.
pub(crate) fn path_of(pair: &Pair, name: &[u8]) -> PathBuf {
    pair.path.join(OsStr::from_bytes(name))
}

/// `DT_UNKNOWN`, `DT_DIR` and `DT_REG`.
pub(crate) const UNKNOWN: u8 = 0;
pub(crate) const DIR: u8 = 4;
pub(crate) const REG: u8 = 8;

/// Opens a directory, without updating its access time where that is allowed.
pub(crate) fn open_directory(parent: impl AsFd, name: &[u8]) -> Result<OwnedFd, Errno> {
    match fs::openat(parent.as_fd(), name, DIRECTORY | OFlags::NOATIME, Mode::empty()) {
        Err(Errno::PERM) => fs::openat(parent, name, DIRECTORY, Mode::empty()),
        opened => opened,
    }
}

/// Duplicates the descriptor of a directory.
pub(crate) fn duplicate(directory: BorrowedFd<'_>) -> std::io::Result<OwnedFd> {
    directory.try_clone_to_owned()
}
