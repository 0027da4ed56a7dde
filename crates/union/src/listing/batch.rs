//! A few names of one branch's directory, taken at once so that nothing is asked of any branch
//! while it hands out names.

use super::{Request, Source, entered::Entered};
use crate::marks::{self, NameMark};
use nacre_vfs::{Caller, DirEntry, DirSink, Entry, Kind, Layer, Name, Node, Result};
use parking_lot::Mutex;

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

/// What has been decided about names before their turn comes.
#[derive(Clone, Default)]
pub(super) struct Verdicts {
    /// Of each name, whether it is not to be seen.
    pub(super) hidden: Vec<bool>,
    /// The first of those that were entered in the set for this.
    pub(super) entered_from: Option<usize>,
    /// Whether marks among them hide other names.
    pub(super) reads_marks: bool,
}

/// The names, in the branch's order.
#[derive(Clone, Default)]
pub(super) struct Batch {
    taken: Vec<Taken>,
    names: Vec<u8>,
    /// Of each name, where attributes were asked for and the names were taken in this call.
    entries: Vec<Option<Entry>>,
    verdicts: Verdicts,
    /// The position before the first of them.
    begins: u64,
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
    entered: &'a Mutex<Entered>,
    number: usize,
    /// Whether marks are shown.
    marks: bool,
}

impl DirSink for ShownOnly<'_> {
    fn push(&mut self, entry: DirEntry<'_>) -> bool {
        self.batch.push(entry)
    }

    fn wants_file(&self, name: Name<'_>) -> bool {
        (self.marks || marks::listed(name) == NameMark::Plain)
            && !self.entered.lock().hidden.hides(name.bytes(), self.number)
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
        self.begin(from);
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
        (entered, number): (&Mutex<Entered>, usize),
    ) -> Result<bool> {
        self.begin(from);
        self.most = MOST_WITH_ATTRIBUTES;
        let mut shown = ShownOnly { batch: self, entered, number, marks: request.show_whiteouts };
        source.layer.readdir(request.caller, source.directory, from, true, &mut shown)?;
        Ok(!self.taken.is_empty())
    }

    /// Takes names without attributes, as many as it takes.
    pub(super) fn read(&mut self, layer: &dyn Layer, directory: &Node, caller: &Caller, from: u64) -> Result<()> {
        self.begin(from);
        layer.readdir(caller, directory, from, false, self)
    }

    /// Takes note of what was decided about the names.
    pub(super) fn decide(&mut self, verdicts: Verdicts) {
        self.verdicts = verdicts;
    }

    /// Whether that has been done.
    pub(super) fn is_decided(&self) -> bool {
        !self.verdicts.hidden.is_empty()
    }

    /// Whether marks among them hide other names.
    pub(super) fn reads_marks(&self) -> bool {
        self.verdicts.reads_marks
    }

    /// The first name that was entered when this was decided.
    pub(super) fn entered_from(&self) -> Option<usize> {
        self.verdicts.entered_from
    }

    /// How many names have been handed out.
    pub(super) fn handed_out(&self) -> usize {
        self.first
    }

    /// All names, and the positions after them.
    pub(super) fn all(&self) -> impl Iterator<Item = (Name<'_>, u64)> {
        self.taken.iter().enumerate().filter_map(|(index, taken)| Some((self.name(index)?, taken.next)))
    }

    /// The position before the first of the names.
    pub(super) fn begins(&self) -> u64 {
        self.begins
    }

    /// The position before one of the names; `None` behind the last.
    pub(super) fn position_of(&self, index: usize) -> Option<u64> {
        self.taken.get(index)?;
        index.checked_sub(1).map_or(Some(self.begins), |before| Some(self.taken.get(before)?.next))
    }

    fn begin(&mut self, from: u64) {
        self.clear();
        self.begins = from;
    }

    /// Drops all names.
    pub(super) fn clear(&mut self) {
        self.verdicts = Verdicts::default();
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

    /// Whether the first name that is left is not to be seen, where that has been decided.
    pub(super) fn is_hidden(&self) -> Option<bool> {
        self.verdicts.hidden.get(self.first).copied()
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
        self.taken.capacity() * size_of::<Taken>() + self.names.capacity() + self.verdicts.hidden.capacity()
    }
}
