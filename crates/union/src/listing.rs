//! Listings over several branches: a merge that hands out names while it reads, with stable positions.
//!
//! Called by the union's `readdir` and by checks for empty directories. The branches are read from the top down
//! and their names handed out at once; the names that upper branches hide (names and whiteouts) are in a set
//! with a fixed cost per name ([`hidden`]); the names of the last branch are only compared with it, so the
//! memory depends on the upper branches. A directory on one branch needs no set at all. A merge is kept between
//! the calls of one listing, and the result of a whole listing is cached under a budget while nothing changes
//! ([`merged`]). Invariants:
//! * branches are asked about names only after a batch of names was read, never during their `readdir`;
//! * no lock is held while a branch is asked or a name handed out;
//! * a whiteout hides names of lower branches only, never one of its own branch.

mod ahead;
mod batch;
mod entered;
mod hidden;
mod kept;
mod merge;
mod merged;
mod position;
mod purge;
#[cfg(test)]
mod tests;

pub(crate) use purge::purge;

use crate::{OWN, marks::Marks};
use ahead::Reader;
use kept::{Kept, KeptMerges, ListingWay, Reading, Ticket};
use merge::{Merge, Run};
use merged::{KeptName, Merged, MergedListings};
use nacre_vfs::{Caller, Entry, Errno, FileId, Kind, Layer, Name, Node, Result};
use std::sync::Arc;

/// Default budget for whole listings, bytes. Not much: the kernel caches listings, too, and larger ones.
pub(crate) const BUDGET: usize = 2 << 20;

/// Budget for merges of readers that have paused, bytes.
const IDLE_BUDGET: usize = 16 << 20;

/// A directory's part on one branch.
#[derive(Clone, Copy)]
pub(crate) struct Source<'a> {
    /// The branch's layer.
    pub layer: &'a dyn Layer,
    /// The branch's layer, for the thread that reads ahead; `None` where the directory is too small for that.
    pub shared: Option<&'a Arc<dyn Layer>>,
    /// The directory on the branch.
    pub directory: &'a Node,
    /// The branch's number in positions: 0 to 126, fixed while the branch is part of the union, independent of
    /// its position in the order.
    pub slot: u8,
    /// Whether whiteouts on this branch count.
    pub reads_marks: bool,
    /// Whether empty files in it may be whiteouts.
    pub x_directory: bool,
}

/// A name of a union's listing.
pub(crate) struct Presented<'a> {
    /// The source on which it was found first. `None` for a branch that has been removed since the listing
    /// began: only a look-up finds out what the name means now.
    pub source: Option<usize>,
    pub name: Name<'a>,
    pub ino: u64,
    pub kind: Option<Kind>,
    /// The file there, looked up just now; it may be missing even where attributes were requested (a caller
    /// that needs it looks the name up on all branches then).
    pub found: Option<Entry>,
    /// The position after it.
    pub next: u64,
}

/// A consumer of the names of a union's listing.
pub(crate) trait Present {
    /// Takes a name; returns false where there is no more room: the listing stops *before* the name.
    ///
    /// # Errors
    /// Ends the listing with this error.
    fn present(&mut self, of: Presented<'_>) -> Result<bool>;
}

/// Parameters of a listing.
#[derive(Clone, Copy)]
pub(crate) struct Request<'a> {
    /// The union's directory.
    pub key: FileId,
    /// A value that changes whenever one of the directories has changed; `None` where changes cannot be
    /// detected, so that nothing may be cached.
    pub token: Option<u64>,
    /// Start position: 0, or the `next` of a name that [`Present::present`] got.
    pub from: u64,
    /// Whether attributes are requested with the names.
    pub attributes: bool,
    /// Whether `.wh.` whiteouts are handed out as names.
    pub show_whiteouts: bool,
    /// The caller of the listing.
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

/// Collects the names that a filter on source and kind accepts.
struct Wanted<W> {
    wanted: W,
    names: Vec<Vec<u8>>,
}

impl<W: Fn(Option<usize>, Option<Kind>) -> bool> Present for Wanted<W> {
    fn present(&mut self, of: Presented<'_>) -> Result<bool> {
        if (self.wanted)(of.source, of.kind) {
            self.names.push(of.name.bytes().to_vec());
        }
        Ok(true)
    }
}

impl Listings {
    /// Creates the cache with a budget of `budget` bytes for whole listings.
    pub(crate) fn new(budget: usize) -> Listings {
        Listings { kept: KeptMerges::new(IDLE_BUDGET), merged: MergedListings::new(budget), reader: Reader::start() }
    }

    /// The visible names of a directory that a filter accepts, by the source on which they were found first and
    /// by the kind.
    ///
    /// # Errors
    /// Errors of the branches.
    pub(crate) fn names(
        &self,
        marks: &Marks,
        directory: FileId,
        sources: &[Source<'_>],
        wanted: impl Fn(Option<usize>, Option<Kind>) -> bool,
    ) -> Result<Vec<Vec<u8>>> {
        let mut out = Wanted { wanted, names: Vec::new() };
        let request =
            Request { key: directory, token: None, from: 0, attributes: false, show_whiteouts: false, caller: &OWN };
        self.list(marks, &request, sources, &mut out)?;
        Ok(out.names)
    }

    /// Lists a directory that is on all of `sources`, from the top down.
    ///
    /// # Errors
    /// Errors of the branches and of `out`.
    pub(crate) fn list(
        &self,
        marks: &Marks,
        request: &Request<'_>,
        sources: &[Source<'_>],
        out: &mut dyn Present,
    ) -> Result<()> {
        let ticket = Ticket::new(request, sources);
        let begun = if request.from == 0 { None } else { self.kept.take(&ticket, request.from) };
        let merges = sources.len() > 1 && !request.show_whiteouts;
        let begun = match begun {
            None if merges && let Some(whole) = self.merged.get(&ticket, request.from) => {
                return self.read(ticket, request, whole, None, sources, out);
            }
            None if request.from != 0 => self.kept.take_equal(&ticket, request.from),
            begun => begun,
        };
        match begun {
            Some(Kept { ticket, reached, way: ListingWay::Whole(reading), .. }) => {
                let known = (reached == request.from).then_some(reading.told.end);
                self.read(ticket, request, reading.whole, known, sources, out)
            }
            begun => self.merge(marks, request, ticket, begun, sources, out),
        }
    }

    /// Continues a whole listing, from a known offset or else from the position.
    fn read(
        &self,
        ticket: Ticket,
        request: &Request<'_>,
        whole: Arc<Merged>,
        known: Option<usize>,
        sources: &[Source<'_>],
        out: &mut dyn Present,
    ) -> Result<()> {
        let start = known.or_else(|| whole.find(request.from)).ok_or(Errno::EIO)?;
        let (mut at, mut reached) = (start, request.from);
        let places = ticket.places(sources);
        let ended = loop {
            let Some((listed, next)) = whole.at(at) else { break Ok(true) };
            let source = places.get(listed.source).copied().flatten();
            let KeptName { name, ino, kind, next: reaches, .. } = listed;
            match out.present(Presented { source, name, ino, kind, found: None, next: reaches }) {
                Ok(true) => (at, reached) = (next, reaches),
                Ok(false) => break Ok(false),
                Err(error) => break Err(error),
            }
        };
        if ended != Ok(true) || reached != request.from {
            whole.reached(reached, at);
            self.kept.keep(ticket, reached, self.kept.changes(), ListingWay::Whole(Reading { whole, told: start..at }));
        }
        ended.map(drop)
    }

    /// Begins or continues a merge.
    fn merge(
        &self,
        marks: &Marks,
        request: &Request<'_>,
        mut ticket: Ticket,
        begun: Option<Kept>,
        sources: &[Source<'_>],
        out: &mut dyn Present,
    ) -> Result<()> {
        let changes = self.kept.changes();
        let (mut merge, mut reached) = (Merge::new(changes), None);
        match begun {
            Some(mut kept) => {
                self.kept.refresh(&mut kept, request.token);
                ticket = kept.ticket;
                ticket.token = request.token;
                reached = Some(kept.reached);
                if let ListingWay::Merging(kept) = kept.way {
                    merge = *kept;
                }
            }
            None if request.from == 0 && sources.len() > 1 && !request.show_whiteouts && request.token.is_some() => {
                merge.recording = self.merged.record(&ticket);
            }
            None => {}
        }
        let places = ticket.places(sources);
        let known: Vec<Option<Source<'_>>> = places.iter().map(|place| sources.get((*place)?).copied()).collect();
        let mut run = Run::new(marks, request, &known, &ticket.slots, merge, changes);
        run.read_ahead(&self.reader, &places);
        let ended = run.start(reached).and_then(|()| run.go_on(out));
        let (mut merge, reached) = run.finish();
        if ended == Ok(true)
            && let Some(recording) = merge.recording.take()
        {
            self.merged.keep(ticket.clone(), recording);
        }
        // At the end, one more call follows that finds the end; after an error, a second attempt continues with
        // the entered names, which are correct.
        if ended != Ok(true) || reached != request.from {
            self.kept.keep(ticket, reached, changes, ListingWay::Merging(Box::new(merge)));
        }
        ended.map(drop)
    }

    /// Running listings continue without the branch in this slot. Called while no listing is in progress.
    pub(crate) fn branch_is_gone(&self, slot: u8) {
        self.kept.branch_is_gone(slot);
        self.forget_all();
    }

    /// Drops the cached listings of all directories: any of them may have changed.
    pub(crate) fn forget_all(&self) {
        self.kept.names_changed();
        self.merged.forget_all();
    }

    /// Drops the cached listing of a directory. Has to be called after each change of names in it; costs next
    /// to nothing where nothing is cached.
    pub(crate) fn forget(&self, key: FileId) {
        self.kept.names_changed();
        self.merged.forget(key);
    }
}

/// Whether a directory has no visible name.
///
/// # Errors
/// Errors of the branches.
pub(crate) fn is_empty(marks: &Marks, sources: &[Source<'_>]) -> Result<bool> {
    /// A consumer without room, which only records that there is a name.
    struct First(bool);
    impl Present for First {
        fn present(&mut self, _: Presented<'_>) -> Result<bool> {
            self.0 = true;
            Ok(false)
        }
    }
    let key = FileId { fs: 0, ino: 0, generation: 0 };
    let request =
        Request { key, token: None, from: 0, attributes: false, show_whiteouts: false, caller: &Caller::ROOT };
    let mut first = First(false);
    let slots: Vec<u8> = sources.iter().map(|source| source.slot).collect();
    let sources: Vec<Option<Source<'_>>> = sources.iter().copied().map(Some).collect();
    Run::new(marks, &request, &sources, &slots, Merge::default(), 0).go_on(&mut first)?;
    Ok(!first.0)
}
