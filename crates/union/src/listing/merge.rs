//! The merge itself: reads one listing's sources from the top down.

use super::{
    Present, Presented, Request, Source,
    ahead::{Ahead, Reader},
    batch::{Batch, Count, Taken},
    entered::{self, Entered, Origin},
    hidden::Hidden,
    merged::Recording,
    position::{self, Own},
};
use crate::marks::{self, Marks, NameMark};
use nacre_vfs::{Entry, Errno, Name, Result};
use parking_lot::Mutex;
use std::sync::Arc;

/// Number of names of the upper of two branches after which the lower branch's names are counted for the first
/// time.
const FIRST_TRY: usize = if cfg!(test) { 8 } else { 16 << 10 };

/// Factor between two such counts.
const NEXT_TRY: usize = 4;

/// Maximal number of remembered positions of one call: readers come back to some of the last.
const TOLD_MAX: usize = 1 << 16;

/// The state of a listing between two calls.
#[derive(Default)]
pub(super) struct Merge {
    /// Shared with the thread that reads ahead.
    entered: Arc<Mutex<Entered>>,
    /// Names read and not handed out, and the position of the first of them.
    left: Batch,
    left_at: (usize, u64),
    /// Names read ahead.
    ahead: Option<Ahead>,
    /// Memory of the set when they were requested, bytes.
    set_bytes: usize,
    /// Positions handed out in this call, and in the one before, with the branch's own.
    told: Vec<(u64, u64)>,
    told_before: Vec<(u64, u64)>,
    /// The count of name changes when the merge began.
    began: u64,
    /// Number of entered names when the lower branch was last counted.
    tried: usize,
    /// State of that count.
    lower: Count,
    /// The names handed out since the start, while they are to be cached.
    pub(super) recording: Option<Recording>,
}

impl Merge {
    /// Memory held, bytes.
    pub(super) fn bytes(&self) -> usize {
        // The read-ahead thread holds the lock for long.
        let set = if self.ahead.is_some() { self.set_bytes } else { self.entered.lock().hidden.bytes() };
        set + self.left.bytes() + (self.told.capacity() + self.told_before.capacity()) * size_of::<(u64, u64)>()
    }

    /// Creates a merge that begins at this count of name changes.
    pub(super) fn new(began: u64) -> Merge {
        Merge { began, ..Merge::default() }
    }

    /// Whether its reader may come back to this position: the last call handed it out.
    pub(super) fn told(&self, position: u64) -> bool {
        self.told.iter().any(|(told, _)| *told == position)
    }

    /// Number of names in the set, for tests.
    #[cfg(test)]
    pub(super) fn entered(&self) -> usize {
        self.entered.lock().hidden.len()
    }

    #[cfg(test)]
    pub(super) fn bytes_of_set(&self) -> usize {
        self.entered.lock().hidden.bytes()
    }

    /// A copy for another reader that continues from here.
    pub(super) fn copy(&self) -> Merge {
        Merge {
            entered: Arc::new(Mutex::new(self.entered.lock().clone())),
            left: self.left.clone(),
            left_at: self.left_at,
            ahead: None,
            set_bytes: 0,
            told: self.told.clone(),
            told_before: self.told_before.clone(),
            began: self.began,
            tried: self.tried,
            lower: self.lower,
            recording: None,
        }
    }

    /// Drops names that were read before a change.
    pub(super) fn outdated(&mut self) {
        self.drop_ahead();
        self.entered.lock().take_back(self.left_at.0, &self.left);
        self.left.clear();
    }

    /// Drops names that were read ahead.
    fn drop_ahead(&mut self) {
        let Some(ahead) = self.ahead.take() else { return };
        let index = ahead.index();
        if let Some(Ok(batch)) = ahead.names() {
            self.entered.lock().take_back(index, &batch);
        }
    }
}

/// A name, its entry on the branch, and its file if it was read with the name.
type Item<'a> = (Name<'a>, &'a Taken, Option<&'a Entry>);

/// A listing during one call.
pub(super) struct Run<'a> {
    marks: &'a Marks,
    request: &'a Request<'a>,
    /// The sources that the listing began with; `None` where the branch has been removed since.
    sources: &'a [Option<Source<'a>>],
    /// Slots of the sources.
    slots: &'a [u8],
    /// Index of each source among all of the directory's present ones, which the reader gets as `source`.
    places: &'a [Option<usize>],
    merge: Merge,
    /// The source being read, and the position in it.
    at: (usize, u64),
    /// The position at which the reader will continue.
    reached: u64,
    reader: Option<&'a Reader>,
    /// Whether, as far as known, the branch on which a name was found still shows it.
    unchanged: bool,
}

/// Whether a branch's directory was removed there: it has no names then.
fn is_gone(error: Errno) -> bool {
    matches!(error, Errno::ENOENT | Errno::ESTALE)
}

impl<'a> Run<'a> {
    pub(super) fn new(
        marks: &'a Marks,
        request: &'a Request<'a>,
        sources: &'a [Option<Source<'a>>],
        slots: &'a [u8],
        mut merge: Merge,
        changes: u64,
    ) -> Run<'a> {
        std::mem::swap(&mut merge.told, &mut merge.told_before);
        merge.told.clear();
        let unchanged = merge.began == changes;
        let (at, reached) = ((0, 0), request.from);
        Run { marks, request, sources, slots, places: &[], merge, at, reached, reader: None, unchanged }
    }

    /// Has the thread read names ahead for a reader that knows the sources by these indexes.
    pub(super) fn read_ahead(&mut self, reader: &'a Reader, places: &'a [Option<usize>]) {
        (self.reader, self.places) = (Some(reader), places);
    }

    /// Returns the merge for the next call, and the position at which that will begin.
    pub(super) fn finish(self) -> (Merge, u64) {
        (self.merge, self.reached)
    }

    /// Moves to the position of the request; `reached` is where the kept merge stopped.
    pub(super) fn start(&mut self, reached: Option<u64>) -> Result<()> {
        if self.sources.iter().any(Option::is_none) {
            self.merge.recording = None;
        }
        if reached == Some(self.request.from) {
            self.at = self.merge.left_at;
            return Ok(());
        }
        self.merge.outdated();
        if self.request.from == 0 {
            return Ok(());
        }
        let wanted = position::unpack(self.request.from);
        // An abridged position that is not remembered, in a removed branch: names are repeated rather than
        // lost.
        let Some(index) = self.slots.iter().position(|slot| *slot == wanted.slot) else { return Ok(()) };
        loop {
            let covered = self.merge.entered.lock().covered.0;
            if covered >= index {
                break;
            }
            self.enter_rest(covered)?;
        }
        if self.source(index).is_none() {
            self.at = (index, u64::MAX);
            return Ok(());
        }
        let own = match wanted.own {
            Own::Whole(own) => own,
            abridged => match self.merge.told_before.iter().find(|(told, _)| *told == self.request.from) {
                Some((_, own)) => *own,
                None => self.search(index, abridged)?,
            },
        };
        // A reader that comes back to the same position finds it again.
        self.merge.told.push((self.request.from, own));
        self.at = (index, own);
        Ok(())
    }

    fn source(&self, index: usize) -> Option<&'a Source<'a>> {
        self.sources.get(index)?.as_ref()
    }

    /// Finds the full position again by reading the directory from its start: that before the first name that may begin
    /// there or behind it. So no name is left out, whatever has been removed meanwhile, but names may come twice whose positions
    /// agree in the bits that are known. Positions that do not ascend mean starting over.
    fn search(&self, index: usize, wanted: Own) -> Result<u64> {
        let Some(source) = self.source(index) else { return Err(Errno::EIO) };
        let (mut batch, mut own, mut ascends, mut found) = (Batch::default(), 0, true, None);
        while self.take(&mut batch, source, own)? {
            while let Some((_, taken)) = batch.first() {
                ascends &= taken.next > own;
                // A name begins where the one before it ends; where the first begins nobody knows.
                if found.is_none() && (wanted.is_reached_by(own) || own == 0 && wanted.is_passed_by(taken.next)) {
                    found = Some(own);
                }
                own = taken.next;
                batch.advance();
            }
        }
        Ok(if ascends { found.unwrap_or(own) } else { 0 })
    }

    /// A source in the form that entering names takes.
    fn origin(&self, source: &Source<'a>, index: usize) -> Origin<'a> {
        let Source { layer, directory, reads_marks, .. } = *source;
        Origin { layer, directory, reads_marks, index, last: index + 1 == self.sources.len() }
    }

    /// Enters all names of a source that are not entered yet.
    fn enter_rest(&mut self, index: usize) -> Result<()> {
        let covered = self.merge.entered.lock().covered;
        let mut own = if covered.0 == index { covered.1 } else { 0 };
        let mut batch = Batch::default();
        while let Some(source) = self.source(index)
            && self.take(&mut batch, source, own)?
        {
            let origin = self.origin(source, index);
            while let Some((name, taken)) = batch.first() {
                entered::enter(&self.merge.entered, &origin, name)?;
                own = taken.next;
                batch.advance();
            }
            self.turn_round()?;
        }
        self.merge.entered.lock().covered = (index + 1, 0);
        Ok(())
    }

    /// If the upper of two branches turns out to be the larger one, keeps the names of the lower one instead,
    /// each with whether it has been seen above: the memory is that of the smaller one.
    fn turn_round(&mut self) -> Result<()> {
        let [Some(_), Some(lower)] = self.sources else { return Ok(()) };
        let (entered, closed) = {
            let set = self.merge.entered.lock();
            (set.hidden.len(), set.hidden.is_closed())
        };
        if closed || entered < FIRST_TRY || entered < self.merge.tried * NEXT_TRY {
            return Ok(());
        }
        self.merge.tried = entered;
        // Counting is cheap, and most lower branches are the larger ones. The count continues where it stopped
        // the last time.
        let counted = self.merge.lower.up_to(entered, lower, self.request.caller);
        if self.unless_gone(counted)? {
            return Ok(());
        }
        let (mut names, mut batch, mut own) = (Hidden::default(), Batch::default(), 0);
        while self.take(&mut batch, lower, own)? {
            let set = self.merge.entered.lock();
            while let Some((name, taken)) = batch.first() {
                if marks::listed(name) == NameMark::Plain {
                    let seen = set.hidden.hides(name.bytes(), 1);
                    names.enter(name.bytes(), if seen { 0 } else { 1 });
                }
                own = taken.next;
                batch.advance();
            }
            if names.len() > entered {
                return Ok(());
            }
        }
        names.close();
        self.merge.entered.lock().hidden = names;
        Ok(())
    }

    fn take(&self, batch: &mut Batch, source: &Source<'_>, own: u64) -> Result<bool> {
        self.unless_gone(batch.take(source, self.request.caller, own))
    }

    fn unless_gone(&self, taken: Result<bool>) -> Result<bool> {
        match taken {
            Err(error) if is_gone(error) && self.sources.len() > 1 => Ok(false),
            other => other,
        }
    }

    /// Reads the next names to hand out, and requests read-ahead of the following ones. Files are not looked up
    /// ahead: their attributes have to be current when they are handed out.
    fn take_next(&mut self, batch: &mut Batch, source: &Source<'a>) -> Result<bool> {
        let ((index, own), attributes) = (self.at, self.request.attributes);
        if batch.end() == Some(own) && !batch.is_full() {
            return Ok(false);
        }
        let ahead = self.merge.ahead.take_if(|ahead| !attributes && ahead.is(source.slot, own)).and_then(Ahead::names);
        self.merge.drop_ahead();
        let some = self.unless_gone(match ahead {
            Some(names) => names.map(|names| {
                *batch = names;
                !batch.is_empty()
            }),
            None if attributes => batch.take_with_attributes(source, self.request, own, (&self.merge.entered, index)),
            None => batch.take(source, self.request.caller, own),
        })?;
        if index == 0 {
            self.turn_round()?;
        }
        // Small directories are read faster than a thread can be notified.
        if some
            && !attributes
            && (batch.is_full() || own != 0)
            && let Some(reader) = self.reader
        {
            self.merge.ahead = self.ask_ahead(batch, source, reader);
        }
        Ok(some)
    }

    /// Decides about names that were just read, and requests read-ahead of the following ones if possible.
    fn ask_ahead(&mut self, batch: &mut Batch, source: &Source<'a>, reader: &Reader) -> Option<Ahead> {
        let (index, end) = (self.at.0, batch.end()?);
        if !batch.is_decided() {
            // An unreadable whiteout is reported when the merge gets there.
            entered::enter_all(&self.merge.entered, &self.origin(source, index), batch).ok()?;
        }
        let (next, index, from) =
            if batch.is_full() { (source, index, end) } else { (self.source(index + 1)?, index + 1, 0) };
        {
            let mut entered = self.merge.entered.lock();
            if !batch.is_full() && entered.covered == (self.at.0, end) {
                entered.covered = (index, 0);
            }
            // A reader that came to the middle of a source enters the source's other names before it continues.
            if entered.covered.0 < index {
                return None;
            }
            self.merge.set_bytes = entered.hidden.bytes();
        }
        let last = index + 1 == self.sources.len();
        reader.ask(next, self.request.caller, from, (index, last), &self.merge.entered)
    }

    /// Hands out names; returns whether the listing has ended.
    pub(super) fn go_on(&mut self, out: &mut dyn Present) -> Result<bool> {
        let mut batch = std::mem::take(&mut self.merge.left);
        let ended = self.hand_out(&mut batch, out);
        batch.forget_attributes();
        // After an error, the name that caused it comes first again.
        (self.merge.left, self.merge.left_at) = (batch, self.at);
        ended
    }

    fn hand_out(&mut self, batch: &mut Batch, out: &mut dyn Present) -> Result<bool> {
        while self.at.0 < self.sources.len() {
            let Some(source) = self.source(self.at.0) else {
                self.pass_over(batch);
                continue;
            };
            while let Some((name, taken)) = batch.first() {
                if !self.consider(source, (name, &taken, batch.entry()), batch.is_hidden(), out)? {
                    return Ok(false);
                }
                batch.advance();
            }
            if !self.take_next(batch, source)? {
                self.next_source()?;
            }
        }
        Ok(true)
    }

    /// Skips a source whose branch has been removed. Names that it hid and did not show (the reader may have
    /// come back, or had no room) are found on the sources below, if anywhere; a name that was shown just
    /// before may be repeated.
    fn pass_over(&mut self, batch: &mut Batch) {
        let index = self.at.0;
        self.merge.drop_ahead();
        let mut entered = self.merge.entered.lock();
        entered.take_back(index, batch);
        batch.clear();
        if entered.covered != self.at {
            entered.hidden.unhide(index);
        }
        entered.covered = entered.covered.max((index + 1, 0));
        drop(entered);
        self.at = (index + 1, 0);
    }

    fn next_source(&mut self) -> Result<()> {
        let index = self.at.0;
        if index + 1 < self.sources.len() {
            let mut entered = self.merge.entered.lock();
            if entered.covered == self.at {
                entered.covered = (index + 1, 0);
            } else if entered.covered.0 == index {
                drop(entered);
                self.enter_rest(index)?;
            }
        }
        self.move_to((index + 1, 0));
        Ok(())
    }

    fn move_to(&mut self, next: (usize, u64)) {
        if let Some(recording) = &mut self.merge.recording {
            recording.go_on(self.at, next);
        }
        self.at = next;
    }

    /// Hands a name out if it is visible, and enters the name that it hides; returns false where the reader has
    /// no more room.
    fn consider(
        &mut self,
        source: &Source<'a>,
        (name, taken, entry): Item<'_>,
        decided: Option<bool>,
        out: &mut dyn Present,
    ) -> Result<bool> {
        let index = self.at.0;
        // The last source hides nothing.
        let enters =
            decided.is_none() && index + 1 < self.sources.len() && self.merge.entered.lock().covered == self.at;
        let hidden = match decided {
            Some(hidden) => hidden,
            None if enters => entered::enter(&self.merge.entered, &self.origin(source, index), name)?,
            None => self.merge.entered.lock().hides(index, name),
        };
        let shown = if hidden {
            self.request.show_whiteouts && source.reads_marks && matches!(marks::listed(name), NameMark::Hides(_))
        } else {
            true
        };
        if shown && !self.present(source, (name, taken, entry), out)? {
            if enters {
                // If its branch is removed before the reader comes back, the next one shows it.
                self.merge.entered.lock().hidden.take_back(name.bytes(), index);
            }
            return Ok(false);
        }
        let next = (index, taken.next);
        if enters {
            self.merge.entered.lock().covered = next;
        }
        self.move_to(next);
        Ok(true)
    }

    fn present(&mut self, source: &Source<'_>, (name, taken, entry): Item<'_>, out: &mut dyn Present) -> Result<bool> {
        let looked_at = source.reads_marks && marks::may_be_whiteout(taken.kind, source.x_directory);
        let next = position::pack(source.slot, taken.next, self.reached);
        let place = self.places.get(self.at.0).copied().flatten();
        // Handing out a file takes long, even an absent one.
        let mut shown = Presented { source: place, name, ino: taken.ino, kind: taken.kind, found: None, next };
        if looked_at || self.request.attributes {
            match self.examine(source, (name, taken, entry), looked_at) {
                Ok(Some(entry)) => {
                    shown.kind = Some(entry.attr.kind);
                    // A file that has been copied up since the merge began is shown by another branch now.
                    shown.found = Some(entry).filter(|_| self.request.attributes && (self.unchanged || self.at.0 == 0));
                }
                // A whiteout.
                Ok(None) => return Ok(true),
                // Removed since it was listed: there is nothing to show.
                Err(error) if is_gone(error) => return Ok(true),
                // A file that cannot be examined must not hide the other names.
                Err(_) => {}
            }
        }
        let (ino, kind) = (shown.ino, shown.kind);
        if !out.present(shown)? {
            return Ok(false);
        }
        if let Some(recording) = &mut self.merge.recording
            && !recording.add(self.at, name, ino, kind, next)
        {
            self.merge.recording = None;
        }
        if self.merge.told.len() == TOLD_MAX {
            self.merge.told.clear();
        }
        self.merge.told.push((next, taken.next));
        self.reached = next;
        Ok(true)
    }

    /// Looks up the file of a name on the branch that shows it; `None` where it is a whiteout. Only the few
    /// types that can be whiteouts are examined further.
    fn examine(&self, source: &Source<'_>, (name, _, entry): Item<'_>, looked_at: bool) -> Result<Option<Entry>> {
        let entry = match entry {
            Some(entry) => entry.clone(),
            None => source.layer.lookup(self.request.caller, source.directory, name)?,
        };
        if looked_at && self.marks.is_whiteout(source.layer, &entry, source.x_directory)? {
            return Ok(None);
        }
        Ok(Some(entry))
    }
}
