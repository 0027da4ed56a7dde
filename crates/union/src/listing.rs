//! Listings over several branches: a merge that hands out names while it reads, with positions that stay good.
//!
//! Called by the union's `readdir` and by whatever has to know that a directory is empty. The branches are read from the top down and their names
//! handed out at once; what upper branches hide (names and whiteouts) is kept as a set of fixed cost per name ([`hidden`]); the last branch is only
//! held against it, so the memory is that of the upper branches. A directory on one branch needs no set at all. A merge is kept between the calls of one
//! listing, and what a whole listing answered is kept under a budget while nothing changes ([`merged`]). Invariants:
//! * branches are asked about names only after a batch of names was taken, never while they hand them out;
//! * no lock is held while a branch is asked or a name handed out;
//! * a mark hides names of lower branches alone, never one of its own branch.

mod ahead;
mod batch;
mod hidden;
mod kept;
mod merge;
mod merged;
mod position;
mod purge;
#[cfg(test)]
mod tests;

pub(crate) use purge::purge;

use crate::marks::Marks;
use ahead::Reader;
use kept::{KeptMerges, Ticket};
use merge::{Merge, Run};
use merged::{Merged, MergedListings};
use nacre_vfs::{Caller, Entry, Errno, FileId, Kind, Layer, Name, Node, Result};
use std::sync::Arc;

/// What a union keeps of whole listings unless told otherwise, bytes. Not much: kernels keep listings, too, and larger ones.
pub(crate) const BUDGET: usize = 2 << 20;

/// What it keeps of merges that nobody has gone on with for a while, bytes.
const IDLE_BUDGET: usize = 16 << 20;

/// A directory on one branch.
#[derive(Clone, Copy)]
pub(crate) struct Source<'a> {
    /// The branch.
    pub layer: &'a dyn Layer,
    /// The same, for a thread that reads ahead; `None` where the directory is not worth that.
    pub shared: Option<&'a Arc<dyn Layer>>,
    /// The directory there.
    pub directory: &'a Node,
    /// The branch's number in positions: 0 to 126, the same as long as the branch is part of the union, at whatever place.
    pub slot: u8,
    /// Whether whiteouts on this branch count.
    pub reads_marks: bool,
    /// Whether empty files in it may be whiteouts.
    pub x_directory: bool,
}

/// Takes the names of a union's listing.
pub(crate) trait Present {
    /// Takes a name found first on `source`; answers false where there is no more room: the listing stops *before* this name.
    /// `found` is the file there, looked up just now; it may be missing even where attributes were asked for (whoever needs it looks the name
    /// up on all branches then).
    ///
    /// # Errors
    /// Ends the listing with this error.
    fn present(&mut self, source: usize, name: Name<'_>, ino: u64, kind: Option<Kind>, found: Option<Entry>, next: u64) -> Result<bool>;
}

/// What a listing is asked for.
#[derive(Clone, Copy)]
pub(crate) struct Request<'a> {
    /// The union's directory.
    pub key: FileId,
    /// Changes whenever one of the directories has changed; `None` where that cannot be told, so that nothing may be kept.
    pub token: Option<u64>,
    /// Where to go on: 0, or what [`Present::present`] was told as `next`.
    pub from: u64,
    /// Whether files are wanted with the names.
    pub attributes: bool,
    /// Whether whiteouts beside names are handed out as names.
    pub show_whiteouts: bool,
    /// Who asks.
    pub caller: &'a Caller,
}

/// The listings of one union.
pub(crate) struct Listings {
    kept: KeptMerges,
    merged: MergedListings,
    reader: Reader,
}

impl Default for Listings {
    fn default() -> Listings {
        Listings::new(BUDGET)
    }
}

impl Listings {
    /// Keeps at most `budget` bytes of whole listings.
    pub(crate) fn new(budget: usize) -> Listings {
        Listings { kept: KeptMerges::new(IDLE_BUDGET), merged: MergedListings::new(budget), reader: Reader::start() }
    }

    /// Lists a directory that is on all of `sources`, from the top down.
    ///
    /// # Errors
    /// What the branches and `out` say.
    pub(crate) fn list(&self, marks: &Marks, request: &Request<'_>, sources: &[Source<'_>], out: &mut dyn Present) -> Result<()> {
        let changes = self.kept.changes();
        let mut ticket = Ticket::new(request, sources);
        let merges = sources.len() > 1 && !request.show_whiteouts;
        let mut kept = (request.from != 0).then(|| self.kept.take(&ticket, request.from)).flatten();
        if kept.is_none() {
            if merges
                && let Some(whole) = self.merged.get(&ticket)
                && let Some(done) = hand_out(&whole, request.from, out)
            {
                return done;
            }
            kept = (request.from != 0).then(|| self.kept.take_equal(&ticket)).flatten();
        }
        let (mut merge, mut reached) = (Merge::new(changes), None);
        let mut known = sources.to_vec();
        let mut narrowed = Narrowed { indexes: Vec::new(), out };
        if let Some(mut found) = kept {
            self.kept.refresh(&mut found, request.token);
            known.retain(|source| found.ticket.slots.contains(&source.slot));
            (merge, reached) = (found.merge, Some(found.reached));
            ticket.slots = found.ticket.slots;
        } else if request.from == 0 && merges && request.token.is_some() {
            merge.recording = self.merged.record(&ticket);
        }
        narrowed.indexes.extend((0..).zip(sources).filter(|(_, source)| ticket.slots.contains(&source.slot)).map(|(index, _)| index));
        let mut run = Run::new(marks, request, &known, merge, changes).reading_ahead(&self.reader);
        let ended = run.start(reached).and_then(|()| run.go_on(&mut narrowed));
        let (mut merge, reached) = run.finish();
        if ended == Ok(true)
            && let Some(recording) = merge.recording.take()
        {
            self.merged.keep(ticket.clone(), recording);
        }
        // At the end, one more call will come that finds it so; after an error, a second attempt goes on with what was entered, which is true.
        if ended != Ok(true) || reached != request.from {
            self.kept.keep(ticket, reached, changes, merge);
        }
        ended.map(drop)
    }

    /// Forgets what is kept of all directories: anything may have changed.
    pub(crate) fn forget_all(&self) {
        self.kept.names_changed();
        self.merged.forget_all();
    }

    /// Forgets what is kept of a directory. To be called after each change of names in it; costs next to nothing where nothing is kept.
    pub(crate) fn forget(&self, key: FileId) {
        self.kept.names_changed();
        self.merged.forget(key);
    }
}

/// Tells sources by their place among all of the directory's, where a listing goes on with those that it began with.
struct Narrowed<'a> {
    indexes: Vec<usize>,
    out: &'a mut dyn Present,
}

impl Present for Narrowed<'_> {
    fn present(&mut self, source: usize, name: Name<'_>, ino: u64, kind: Option<Kind>, found: Option<Entry>, next: u64) -> Result<bool> {
        let source = *self.indexes.get(source).ok_or(Errno::EIO)?;
        self.out.present(source, name, ino, kind, found, next)
    }
}

/// Hands out names of a kept listing; `None` where it does not know the position.
fn hand_out(whole: &Merged, from: u64, out: &mut dyn Present) -> Option<Result<()>> {
    let mut at = whole.find(from)?;
    let mut position = from;
    while let Some((listed, next)) = whole.at(at) {
        match out.present(listed.source, listed.name, listed.ino, listed.kind, None, listed.next) {
            Ok(true) => {}
            Ok(false) => break,
            Err(error) => return Some(Err(error)),
        }
        (at, position) = (next, listed.next);
    }
    whole.reached(position, at);
    Some(Ok(()))
}

/// Whether a directory shows no name.
///
/// # Errors
/// What the branches say.
pub(crate) fn is_empty(marks: &Marks, sources: &[Source<'_>]) -> Result<bool> {
    /// Has no room for anything.
    struct First(bool);
    impl Present for First {
        fn present(&mut self, _: usize, _: Name<'_>, _: u64, _: Option<Kind>, _: Option<Entry>, _: u64) -> Result<bool> {
            self.0 = true;
            Ok(false)
        }
    }
    let key = FileId { fs: 0, ino: 0, generation: 0 };
    let request = Request { key, token: None, from: 0, attributes: false, show_whiteouts: false, caller: &Caller::ROOT };
    let mut first = First(false);
    Run::new(marks, &request, sources, Merge::default(), 0).go_on(&mut first)?;
    Ok(!first.0)
}
