//! Segments that no root names any more, until they are removed.
//!
//! Caller: [`Objects`]. Invariant: a segment is removed [`READABLE`] after the first root of this writer that does not
//! name it, and only if a list made after that shows no newer root.

use super::{Objects, READABLE, REMOVED_AT_ONCE, Result, SWEEP, TOGETHER, attempt, in_parallel, segment_key};
use crate::label::{Place, Root};

/// A segment that is to be removed.
pub(super) struct Doomed {
    pub(super) id: u32,
    pub(super) place: Place,
    /// When the first root was put that does not name it, seconds since 1970: from then on it stays for
    /// [`READABLE`].
    pub(super) since: Option<u64>,
}

impl Doomed {
    /// Whether no reader can be at a root that names it.
    pub(super) fn is_due(&self, now: u64) -> bool {
        self.since.is_some_and(|since| since.saturating_add(READABLE) <= now)
    }
}

impl Objects {
    /// Removes what no root has named for long, without a new root; whether there was any.
    pub(super) fn make_room(&self) -> Result<bool> {
        let now = (self.writer.clock)();
        let (last, is_due) = {
            let state = self.state.lock();
            (state.last, state.doomed.iter().any(|doomed| doomed.is_due(now)))
        };
        let Some((generation, _)) = last.filter(|_| is_due) else { return Ok(false) };
        if self.has_newer(generation)? {
            return Ok(false);
        }
        self.remove_doomed(now)?;
        Ok(true)
    }

    /// Removes what no root has named for long.
    pub(super) fn remove_doomed(&self, now: u64) -> Result<()> {
        let due: Vec<Doomed> = self.state.lock().doomed.extract_if(.., |doomed| doomed.is_due(now)).collect();
        let some: Vec<&[Doomed]> = due.chunks(REMOVED_AT_ONCE).collect();
        let removed = in_parallel(self.bucket.parallel(), &some, |some| {
            let keys: Vec<String> = some.iter().map(|doomed| segment_key(doomed.id, &doomed.place)).collect();
            attempt(&*self.bucket, "removing from", || self.bucket.delete_all(&keys))
        });
        if removed.is_err() {
            // What is gone already is removed once more.
            self.state.lock().doomed.extend(due);
        }
        removed
    }

    /// Removes what nobody needs once this root is there; `false` where another writer has put a newer
    /// one: he decides then what is removed.
    pub(super) fn tidy(&self, root: &Root, now: u64) -> Result<bool> {
        let first = self.state.lock().doomed.iter().filter_map(|doomed| doomed.since).min();
        if first.is_some_and(|since| since.saturating_add(READABLE + TOGETHER) <= now) {
            if self.has_newer(root.generation)? {
                return Ok(false);
            }
            self.remove_doomed(now)?;
        }
        if root.generation.is_multiple_of(SWEEP) {
            self.sweep(root.kept, now)?;
        }
        Ok(true)
    }
}
