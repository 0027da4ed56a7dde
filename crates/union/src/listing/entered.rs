//! The names that a merge has entered: which names are hidden from which source, and up to which position that
//! is known.
//!
//! Used by the merge, and by the thread that reads ahead for it. Invariants:
//! * names are entered from where the previous ones stopped, so each source's names are entered in its own
//!   order;
//! * no branch is asked while the lock around this is held;
//! * names that were entered and will not be shown can be taken back without a trace.

use super::{
    batch::{Batch, Verdicts},
    hidden::Hidden,
};
use crate::marks::{self, NameMark};
use nacre_vfs::{Layer, Name, Node, Result};
use parking_lot::Mutex;
use std::borrow::Cow;

/// The set of hidden names, and the position up to which it is complete.
#[derive(Clone, Default)]
pub(super) struct Entered {
    pub(super) hidden: Hidden,
    /// All names of the sources before this one have been entered, and of this one the names before this
    /// position of its own.
    pub(super) covered: (usize, u64),
}

/// A source whose names are entered.
#[derive(Clone, Copy)]
pub(super) struct Origin<'a> {
    pub(super) layer: &'a dyn Layer,
    pub(super) directory: &'a Node,
    pub(super) reads_marks: bool,
    /// Its number among the sources.
    pub(super) index: usize,
    /// Whether it is the lowest source, whose names hide nothing.
    pub(super) last: bool,
}

/// The name that a listed name hides from the sources below, and whether that is the listed name itself.
type Hides<'a> = Option<(Cow<'a, [u8]>, bool)>;

/// The name that a listed name hides; `long` is the name in the whiteout of a long name.
fn hides(name: Name<'_>, reads_marks: bool, long: Option<Vec<u8>>) -> Hides<'_> {
    match marks::listed(name) {
        NameMark::Plain => Some((name.bytes().into(), true)),
        NameMark::Hides(name) if reads_marks => Some((name.bytes().into(), false)),
        NameMark::HidesLong if reads_marks => Some((long?.into(), false)),
        NameMark::Hides(_) | NameMark::HidesLong | NameMark::Private => None,
    }
}

/// Reads the name that the whiteout of a long name hides, from the branch.
fn long(origin: &Origin<'_>, name: Name<'_>) -> Result<Option<Vec<u8>>> {
    if origin.reads_marks && marks::listed(name) == NameMark::HidesLong {
        marks::long_name(origin.layer, origin.directory, name)
    } else {
        Ok(None)
    }
}

impl Entered {
    /// Enters the name that a listed name hides; returns whether the listed name itself is invisible.
    fn enter(&mut self, index: usize, hides: &Hides<'_>) -> bool {
        match hides {
            Some((name, itself)) => self.hidden.enter(name, index) || !itself,
            None => true,
        }
    }

    /// Whether a name of a source is invisible, without entering anything.
    pub(super) fn hides(&self, index: usize, name: Name<'_>) -> bool {
        marks::listed(name) != NameMark::Plain || self.hidden.hides(name.bytes(), index)
    }

    /// Enters the names of a batch that are not entered yet, and returns which are visible. `said` has the
    /// names that its long whiteouts hide, in their order.
    fn enter_all(&mut self, origin: &Origin<'_>, batch: &Batch, said: Vec<Option<Vec<u8>>>) -> Verdicts {
        let (mut at, mut said) = ((origin.index, batch.begins()), said.into_iter());
        let mut verdicts = Verdicts { reads_marks: origin.reads_marks, ..Verdicts::default() };
        for (index, (name, next)) in batch.all().enumerate() {
            let enters = self.covered == at && !origin.last;
            let said = if marks::listed(name) == NameMark::HidesLong { said.next().flatten() } else { None };
            at = (origin.index, next);
            let hidden = if enters {
                self.covered = at;
                verdicts.entered_from.get_or_insert(index);
                self.enter(origin.index, &hides(name, origin.reads_marks, said))
            } else {
                self.hides(origin.index, name)
            };
            verdicts.hidden.push(hidden);
        }
        verdicts
    }

    /// Undoes the entries of a batch's names that have not been handed out.
    pub(super) fn take_back(&mut self, index: usize, batch: &Batch) {
        let Some(first) = batch.entered_from().map(|first| first.max(batch.handed_out())) else { return };
        let (Some(end), Some(begins)) = (batch.end(), batch.position_of(first)) else { return };
        // More names may have been entered since; then this source's names count as not entered in order, which
        // `Run::pass_over` takes into account.
        if self.covered != (index, end) && (batch.is_full() || self.covered != (index + 1, 0)) {
            return;
        }
        let mut forgotten = true;
        for (name, _) in batch.all().skip(first) {
            match marks::listed(name) {
                NameMark::Plain => self.hidden.take_back(name.bytes(), index),
                NameMark::Hides(name) if batch.reads_marks() => self.hidden.take_back(name.bytes(), index),
                NameMark::HidesLong if batch.reads_marks() => forgotten = false,
                NameMark::Hides(_) | NameMark::HidesLong | NameMark::Private => {}
            }
        }
        if !forgotten {
            self.hidden.unhide(index);
        }
        self.covered = (index, begins);
    }
}

/// Enters the name that a listed name hides; returns whether the listed name itself is invisible.
///
/// # Errors
/// Errors of the branch in reading a long whiteout.
pub(super) fn enter(entered: &Mutex<Entered>, origin: &Origin<'_>, name: Name<'_>) -> Result<bool> {
    let hides = hides(name, origin.reads_marks, long(origin, name)?);
    Ok(entered.lock().enter(origin.index, &hides))
}

/// Decides which names of a batch are visible, and enters the names that they hide.
///
/// # Errors
/// Errors of the branch in reading a long whiteout; nothing is entered then.
pub(super) fn enter_all(entered: &Mutex<Entered>, origin: &Origin<'_>, batch: &mut Batch) -> Result<()> {
    let marks = batch.all().filter(|(name, _)| marks::listed(*name) == NameMark::HidesLong);
    let said = marks.map(|(name, _)| if origin.last { Ok(None) } else { long(origin, name) }).collect::<Result<_>>()?;
    let verdicts = entered.lock().enter_all(origin, batch, said);
    batch.decide(verdicts);
    Ok(())
}
