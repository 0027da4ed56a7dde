//! Segments that no root names any more and that are still to be deleted.
//!
//! Caller: [`Objects`]. Invariant: a segment is deleted [`READABLE`] seconds after the first root of this writer that
//! does not name it, and only if a list made after that shows no newer root.

use super::{
    Objects, READABLE, REMOVED_AT_ONCE, Result, SWEEP, TOGETHER, attempt, in_parallel, is_full, make, segment_key,
};
use crate::label::{Place, Root};

/// A segment that is to be deleted.
pub(super) struct Doomed {
    pub(super) id: u32,
    pub(super) place: Place,
    /// When the first root was put that does not name it, seconds since 1970: it is retained for [`READABLE`] seconds
    /// after that.
    pub(super) since: Option<u64>,
}

impl Doomed {
    /// Whether its retention time is over, so that no reader can be at a root that names it.
    pub(super) fn is_due(&self, now: u64) -> bool {
        self.since.is_some_and(|since| since.saturating_add(READABLE) <= now)
    }
}

impl Objects {
    /// Deletes segments whose retention time is over, without a new root; returns whether there were any.
    pub(super) fn make_room(&self) -> Result<bool> {
        let now = (self.writer.clock)();
        let (last, nonce, is_due) = {
            let state = self.state.lock();
            (state.last, state.last_nonce, state.doomed.iter().any(|doomed| doomed.is_due(now)))
        };
        let Some((generation, _)) = last.filter(|_| is_due) else { return Ok(false) };
        if self.has_newer(generation)? || !self.has_previous(generation, nonce)? {
            return Ok(false);
        }
        self.remove_doomed(now)?;
        Ok(true)
    }

    /// Refuses a bucket that does not have this writer's newest root; returns `false` where another writer has put newer ones.
    pub(super) fn has_own_root(&self) -> Result<bool> {
        let (last, nonce) = {
            let state = self.state.lock();
            (state.last, state.last_nonce)
        };
        last.map_or(Ok(true), |(generation, _)| self.has_previous(generation, nonce))
    }

    /// Creates the mark of a destroyed pool, an identity; returns `false` where another object of this name exists. In a
    /// full bucket, what the newest root does not need is deleted first. A young pool has less of that than a mark takes:
    /// then the mark is written without the zeros at its end.
    pub(super) fn make_mark(&self, key: &str, mark: &[u8]) -> Result<bool> {
        let length = mark.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        let short = mark.get(..length).unwrap_or(mark);
        let mut made = make(&*self.bucket, key, mark);
        for (roots, body) in [(false, mark), (true, mark), (true, short)] {
            if !made.as_ref().is_err_and(is_full) || !self.make_last_room(roots)? {
                break;
            }
            made = make(&*self.bucket, key, body);
        }
        made
    }

    /// Deletes what the newest root does not need, whatever its retention time: segments, or `roots`. For a pool that is
    /// to be marked as destroyed; returns `false` where its newest root is not this writer's.
    fn make_last_room(&self, roots: bool) -> Result<bool> {
        let Some((generation, _)) = self.state.lock().last else { return Ok(false) };
        if self.has_newer(generation)? || !self.has_own_root()? {
            return Ok(false);
        }
        if roots {
            self.sweep_roots(generation, u64::MAX)?;
        } else {
            self.remove_doomed(u64::MAX)?;
        }
        Ok(true)
    }

    /// Deletes segments whose retention time is over.
    pub(super) fn remove_doomed(&self, now: u64) -> Result<()> {
        let due: Vec<Doomed> = self.state.lock().doomed.extract_if(.., |doomed| doomed.is_due(now)).collect();
        let some: Vec<&[Doomed]> = due.chunks(REMOVED_AT_ONCE).collect();
        let removed = in_parallel(self.bucket.parallel(), &some, |some| {
            let keys: Vec<String> = some.iter().map(|doomed| segment_key(doomed.id, &doomed.place)).collect();
            attempt(&*self.bucket, "removing from", || self.bucket.delete_all(&keys))
        });
        if removed.is_err() {
            // Objects that are deleted already are deleted once more.
            self.state.lock().doomed.extend(due);
        }
        removed
    }

    /// Deletes objects that became unnecessary with this root; returns `false` where another writer has put a newer
    /// root: that writer then decides what is deleted.
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
