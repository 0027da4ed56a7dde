//! A few names of one branch's directory, taken at once so that nothing is asked of any branch
//! while it hands out names.

use super::{
    Request, Source,
    hidden::{Digest, Hidden, Keys},
};
use crate::marks::{self, NameMark};
use nacre_vfs::{Caller, DirEntry, DirSink, Entry, Kind, Layer, Name, Node, Result};
use std::sync::Arc;

/// Names taken at once.
const MOST: usize = if cfg!(test) { 16 } else { 512 };

/// Names taken at once with attributes, which are good for the call in which they were asked for
/// alone.
const MOST_WITH_ATTRIBUTES: usize = if cfg!(test) { 8 } else { 32 };

/// Names read ahead at once.
const MANY: usize = if cfg!(test) { 50 } else { 2048 };

/// What a branch says of a name.
#[derive(Clone)]
pub(super) struct Taken {
    /// Where the name begins.
    name: u32,
    length: u8,
    pub(super) kind: Option<Kind>,
    pub(super) ino: u64,
    /// The branch's own position after it.
    pub(super) next: u64,
}

/// What is found out about names when they are read ahead, for the set that they will be held
/// against.
#[derive(Clone)]
pub(super) enum Preparing {
    /// The hash of each.
    Digests(Keys),
    /// Whether it is hidden from this source by a set that is complete.
    Hidden(Arc<Hidden>, usize),
}

/// What has been found out.
#[derive(Clone, Default)]
enum Prepared {
    #[default]
    Nothing,
    Digests(Vec<Digest>),
    Hidden(Vec<bool>),
}

/// The names, in the branch's order.
#[derive(Clone, Default)]
pub(super) struct Batch {
    taken: Vec<Taken>,
    names: Vec<u8>,
    /// Of each name, where attributes were asked for and the names were taken in this call.
    entries: Vec<Option<Entry>>,
    prepared: Prepared,
    first: usize,
    most: usize,
    full: bool,
}

impl DirSink for Batch {
    fn push(&mut self, entry: DirEntry<'_>) -> bool {
        let (name, length) = (u32::try_from(self.names.len()), u8::try_from(entry.name.bytes().len()));
        // No name is longer than 255 bytes.
        let (Ok(name), Ok(length), false) = (name, length, self.taken.len() >= self.most) else {
            self.full = true;
            return false;
        };
        self.names.extend_from_slice(entry.name.bytes());
        self.taken.push(Taken { name, length, kind: entry.kind, ino: entry.ino, next: entry.next });
        if entry.entry.is_some() {
            self.entries.resize(self.taken.len() - 1, None);
            self.entries.push(entry.entry);
        }
        true
    }
}

/// A batch that asks for no file of a name that will not be shown.
struct ShownOnly<'a> {
    batch: &'a mut Batch,
    hidden: &'a Hidden,
    number: usize,
    /// Whether marks are shown.
    marks: bool,
}

impl DirSink for ShownOnly<'_> {
    fn push(&mut self, entry: DirEntry<'_>) -> bool {
        self.batch.push(entry)
    }

    fn wants_file(&self, name: Name<'_>) -> bool {
        (self.marks || marks::listed(name) == NameMark::Plain) && !self.hidden.hides(name.bytes(), self.number)
    }

    fn room(&self, _attributes: bool) -> usize {
        MOST_WITH_ATTRIBUTES
    }
}

/// How many names of a directory have been counted, and up to where.
#[derive(Clone, Copy, Default)]
pub(super) struct Count {
    names: usize,
    most: usize,
    reached: u64,
}

impl Count {
    /// Counts on until there are more than so many (true) or the directory ends. Marks do not
    /// count.
    pub(super) fn up_to(&mut self, most: usize, source: &Source<'_>, caller: &Caller) -> Result<bool> {
        self.most = most;
        let from = self.reached;
        source.layer.readdir(caller, source.directory, from, false, self)?;
        Ok(self.names > most)
    }
}

impl DirSink for Count {
    fn push(&mut self, entry: DirEntry<'_>) -> bool {
        if self.names > self.most {
            return false;
        }
        self.names += usize::from(marks::listed(entry.name) == NameMark::Plain);
        self.reached = entry.next;
        true
    }
}

impl Batch {
    /// One that takes many names.
    pub(super) fn of_many() -> Batch {
        Batch { most: MANY, ..Batch::default() }
    }

    /// Takes the names after `from` in place of those it holds; false at the end of the directory.
    pub(super) fn take(&mut self, source: &Source<'_>, caller: &Caller, from: u64) -> Result<bool> {
        self.clear();
        self.most = MOST;
        source.layer.readdir(caller, source.directory, from, false, self)?;
        Ok(!self.taken.is_empty())
    }

    /// The same with attributes, but for names that will not be shown: what the set hides from the
    /// source of this number, and marks.
    pub(super) fn take_with_attributes(
        &mut self,
        source: &Source<'_>,
        request: &Request<'_>,
        from: u64,
        (hidden, number): (&Hidden, usize),
    ) -> Result<bool> {
        self.clear();
        self.most = MOST_WITH_ATTRIBUTES;
        let mut shown = ShownOnly { batch: self, hidden, number, marks: request.show_whiteouts };
        source.layer.readdir(request.caller, source.directory, from, true, &mut shown)?;
        Ok(!self.taken.is_empty())
    }

    /// Takes names without attributes, as many as it takes.
    pub(super) fn read(&mut self, layer: &dyn Layer, directory: &Node, caller: &Caller, from: u64) -> Result<()> {
        self.clear();
        layer.readdir(caller, directory, from, false, self)
    }

    /// Does for each of the names what can be done before its turn comes.
    pub(super) fn prepare(&mut self, preparing: &Preparing) {
        let all = || (0..self.taken.len()).filter_map(|index| self.name(index));
        self.prepared = match preparing {
            Preparing::Digests(keys) => Prepared::Digests(all().map(|name| keys.digest(name.bytes())).collect()),
            Preparing::Hidden(hidden, source) => {
                let is_hidden =
                    |name: Name<'_>| marks::listed(name) != NameMark::Plain || hidden.hides(name.bytes(), *source);
                Prepared::Hidden(all().map(is_hidden).collect())
            }
        };
    }

    /// Drops all names.
    pub(super) fn clear(&mut self) {
        self.prepared = Prepared::Nothing;
        self.taken.clear();
        self.names.clear();
        self.entries.clear();
        (self.first, self.full) = (0, false);
    }

    /// Whether the directory goes on behind the last of the names.
    pub(super) fn is_full(&self) -> bool {
        self.full
    }

    /// Whether there are no names, taken or left.
    pub(super) fn is_empty(&self) -> bool {
        self.taken.is_empty()
    }

    /// The position after the last of the names.
    pub(super) fn end(&self) -> Option<u64> {
        self.taken.last().map(|last| last.next)
    }

    /// The first name that is left.
    pub(super) fn first(&self) -> Option<(Name<'_>, Taken)> {
        Some((self.name(self.first)?, self.taken.get(self.first)?.clone()))
    }

    fn name(&self, index: usize) -> Option<Name<'_>> {
        let taken = self.taken.get(index)?;
        let start = usize::try_from(taken.name).ok()?;
        // A layer hands out names, which cannot be bad.
        Name::new(self.names.get(start..start + usize::from(taken.length))?).ok()
    }

    /// The hash of the first name that is left, where that has been made.
    pub(super) fn digest(&self) -> Option<Digest> {
        match &self.prepared {
            Prepared::Digests(digests) => digests.get(self.first).copied(),
            _ => None,
        }
    }

    /// Whether the first name that is left is hidden from its source, where that has been found
    /// out.
    pub(super) fn is_hidden(&self) -> Option<bool> {
        match &self.prepared {
            Prepared::Hidden(hidden) => hidden.get(self.first).copied(),
            _ => None,
        }
    }

    /// The file of the first name that is left, where it came with the name.
    pub(super) fn entry(&self) -> Option<&Entry> {
        self.entries.get(self.first)?.as_ref()
    }

    /// Drops the first name that is left.
    pub(super) fn advance(&mut self) {
        self.first += 1;
    }

    /// Lets go of attributes: the call is over in which they were asked for.
    pub(super) fn forget_attributes(&mut self) {
        self.entries = Vec::new();
    }

    /// Memory held, bytes.
    pub(super) fn bytes(&self) -> usize {
        let prepared = match &self.prepared {
            Prepared::Nothing => 0,
            Prepared::Digests(digests) => digests.capacity() * size_of::<Digest>(),
            Prepared::Hidden(hidden) => hidden.capacity(),
        };
        self.taken.capacity() * size_of::<Taken>() + self.names.capacity() + prepared
    }
}
