//! A few names of one branch's directory, taken at once so that nothing is asked of any branch while it hands out names.

use super::Source;
use nacre_vfs::{Caller, DirEntry, DirSink, Kind, Name, Result};
use std::ops::Range;

/// Names taken at once.
const MOST: usize = 512;

/// What a branch says of a name.
#[derive(Clone)]
pub(super) struct Taken {
    name: Range<usize>,
    pub(super) ino: u64,
    pub(super) kind: Option<Kind>,
    /// The branch's own position after it.
    pub(super) next: u64,
}

/// The names, in the branch's order.
#[derive(Default)]
pub(super) struct Batch {
    taken: Vec<Taken>,
    names: Vec<u8>,
    first: usize,
}

impl DirSink for Batch {
    fn push(&mut self, entry: DirEntry<'_>) -> bool {
        if self.taken.len() >= MOST {
            return false;
        }
        let start = self.names.len();
        self.names.extend_from_slice(entry.name.bytes());
        self.taken.push(Taken { name: start..self.names.len(), ino: entry.ino, kind: entry.kind, next: entry.next });
        true
    }
}

impl Batch {
    /// Takes the names after `from` in place of those it holds; false at the end of the directory.
    pub(super) fn take(&mut self, source: &Source<'_>, caller: &Caller, from: u64) -> Result<bool> {
        self.clear();
        source.layer.readdir(caller, source.directory, from, false, self)?;
        Ok(!self.taken.is_empty())
    }

    /// Drops all names.
    pub(super) fn clear(&mut self) {
        self.taken.clear();
        self.names.clear();
        self.first = 0;
    }

    /// The first name that is left.
    pub(super) fn first(&self) -> Option<(Name<'_>, Taken)> {
        let taken = self.taken.get(self.first)?;
        // A layer hands out names, which cannot be bad.
        Some((Name::new(self.names.get(taken.name.clone())?).ok()?, taken.clone()))
    }

    /// Drops the first name that is left.
    pub(super) fn advance(&mut self) {
        self.first += 1;
    }

    /// Memory held, bytes.
    pub(super) fn bytes(&self) -> usize {
        self.taken.capacity() * size_of::<Taken>() + self.names.capacity()
    }
}
