//! A batch of names of one branch's directory, read at once so that no branch is asked during its `readdir`.

use super::{Request, Source, entered::Entered};
use crate::marks::{self, NameMark};
use nacre_vfs::{Caller, DirEntry, DirSink, Entry, Kind, Layer, Name, Node, Result};
use parking_lot::Mutex;

/// Maximal number of names read at once.
const MOST: usize = if cfg!(test) { 16 } else { 512 };

/// Names read at once with attributes, which are valid only for the call that requested them.
const MOST_WITH_ATTRIBUTES: usize = if cfg!(test) { 8 } else { 32 };

/// Names read ahead at once.
const MANY: usize = if cfg!(test) { 50 } else { 2048 };

/// A name as a branch listed it.
#[derive(Clone)]
pub(super) struct Taken {
    /// Offset of the name in `names`.
    name: u32,
    length: u8,
    pub(super) kind: Option<Kind>,
    pub(super) ino: u64,
    /// The branch's own position after it.
    pub(super) next: u64,
}

/// Decisions about the names of a batch, made before they are handed out.
#[derive(Clone, Default)]
pub(super) struct Verdicts {
    /// For each name, whether it is hidden.
    pub(super) hidden: Vec<bool>,
    /// The first name that was entered in the set for this.
    pub(super) entered_from: Option<usize>,
    /// Whether whiteouts among them hide other names.
    pub(super) reads_marks: bool,
}

/// A batch of names, in the branch's order.
#[derive(Clone, Default)]
pub(super) struct Batch {
    taken: Vec<Taken>,
    names: Vec<u8>,
    /// The file of each name, if attributes were requested and the names were read in this call.
    entries: Vec<Option<Entry>>,
    verdicts: Verdicts,
    /// The position before the first name.
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

/// A batch that looks up only the files of visible names.
struct ShownOnly<'a> {
    batch: &'a mut Batch,
    entered: &'a Mutex<Entered>,
    number: usize,
    /// Whether whiteouts are visible.
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

/// A count of the names of a directory, and the position up to which they are counted.
#[derive(Clone, Copy, Default)]
pub(super) struct Count {
    names: usize,
    most: usize,
    reached: u64,
}

impl Count {
    /// Counts until there are more than `most` names (true) or the directory ends. Whiteouts and reserved names
    /// do not count.
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
    /// Creates a batch for read-ahead.
    pub(super) fn of_many() -> Batch {
        Batch { most: MANY, ..Batch::default() }
    }

    /// Replaces the names by those after `from`; false at the end of the directory.
    pub(super) fn take(&mut self, source: &Source<'_>, caller: &Caller, from: u64) -> Result<bool> {
        self.begin(from);
        self.most = MOST;
        source.layer.readdir(caller, source.directory, from, false, self)?;
        Ok(!self.taken.is_empty())
    }

    /// As [`Self::take`], with attributes except for invisible names: names that the set hides from the source
    /// of this number, and whiteouts.
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

    /// Reads names without attributes, up to the limit.
    pub(super) fn read(&mut self, layer: &dyn Layer, directory: &Node, caller: &Caller, from: u64) -> Result<()> {
        self.begin(from);
        layer.readdir(caller, directory, from, false, self)
    }

    /// Stores the decisions about the names.
    pub(super) fn decide(&mut self, verdicts: Verdicts) {
        self.verdicts = verdicts;
    }

    /// Whether the decisions have been stored.
    pub(super) fn is_decided(&self) -> bool {
        !self.verdicts.hidden.is_empty()
    }

    /// Whether whiteouts among them hide other names.
    pub(super) fn reads_marks(&self) -> bool {
        self.verdicts.reads_marks
    }

    /// The first name that was entered in the set for the decisions.
    pub(super) fn entered_from(&self) -> Option<usize> {
        self.verdicts.entered_from
    }

    /// Number of names handed out.
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

    /// The position before a name; `None` after the last.
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

    /// Whether the directory continues after the last name.
    pub(super) fn is_full(&self) -> bool {
        self.full
    }

    /// Whether the batch has no names, handed out or not.
    pub(super) fn is_empty(&self) -> bool {
        self.taken.is_empty()
    }

    /// The position after the last of the names.
    pub(super) fn end(&self) -> Option<u64> {
        self.taken.last().map(|last| last.next)
    }

    /// The next name to hand out.
    pub(super) fn first(&self) -> Option<(Name<'_>, Taken)> {
        Some((self.name(self.first)?, self.taken.get(self.first)?.clone()))
    }

    fn name(&self, index: usize) -> Option<Name<'_>> {
        let taken = self.taken.get(index)?;
        let start = usize::try_from(taken.name).ok()?;
        // Names from a layer are always valid.
        Name::new(self.names.get(start..start + usize::from(taken.length))?).ok()
    }

    /// Whether the next name is hidden, if that has been decided.
    pub(super) fn is_hidden(&self) -> Option<bool> {
        self.verdicts.hidden.get(self.first).copied()
    }

    /// The file of the next name, if it was read with it.
    pub(super) fn entry(&self) -> Option<&Entry> {
        self.entries.get(self.first)?.as_ref()
    }

    /// Skips the next name.
    pub(super) fn advance(&mut self) {
        self.first += 1;
    }

    /// Drops the attributes: the call that requested them is over.
    pub(super) fn forget_attributes(&mut self) {
        self.entries = Vec::new();
    }

    /// Memory held, bytes.
    pub(super) fn bytes(&self) -> usize {
        self.taken.capacity() * size_of::<Taken>() + self.names.capacity() + self.verdicts.hidden.capacity()
    }
}
