//! Follower: a read-only store that switches to newer roots of the machine that writes to the pool.
//!
//! Caller: the engine of a follower. Invariant: everything that the root in use names stays readable until the caller
//! uses another root, however often a switch fails; the writer's backend retains its segments for some time.

use std::sync::atomic::Ordering;

use super::commit::release;
use super::table_read::{load, settle};
use super::{Map, Result, Store, appenders};
use crate::error::PoolError;
use crate::label::Root;

impl Store {
    /// Switches to the newest root, if another process has put one; returns it. The content of the root of generation
    /// `used` stays readable until this is called with a later one.
    ///
    /// # Errors
    /// [`PoolError::Device`], also where parts of that root are deleted already: the next one is newer.
    /// [`PoolError::Refused`] for a store that is opened for writing.
    pub fn follow(&self, used: u64) -> Result<Option<Root>> {
        if self.writable {
            return Err(PoolError::Refused("a pool that is written to here follows nobody".to_owned()));
        }
        let mut committed = self.committed.lock();
        let Some(mut root) = self.backend.newer_root(committed.root.generation)? else { return Ok(None) };
        let mut loaded = load(&*self.backend, &mut root)?;
        settle(&mut loaded, false, appenders::of_content(&*self.backend))?;
        let of_table = root.table_segments.iter().map(|segment| (segment.id, &segment.place));
        let others = loaded.table.segments().iter().map(|(id, segment)| (*id, &segment.place));
        self.backend.adopt(&root, &mut of_table.chain(others).filter(|(_, place)| !place.is_empty()))?;
        self.sums.table.store(loaded.charged(&root), Ordering::Relaxed);
        self.sums.allocated.store(loaded.table.live_bytes(), Ordering::Relaxed);
        let mut map = Map { table: loaded.table, next_segment: root.next_segment, ..Map::default() };
        // Segments that are dead in all retained roots are in none of them: the writer deletes them.
        release(&mut map, &mut root)?;
        map.sum_up(committed.identity.revision, &loaded.tree, &root, &*self.backend);
        {
            let mut now = self.map.write();
            // If the previous root was never used, the root in use is older.
            let is_used = used == committed.root.generation || now.before.is_none();
            map.before = if is_used { Some(std::mem::take(&mut now.table)) } else { now.before.take() };
            *now = map;
        }
        self.durable.fetch_max(root.txg.0, Ordering::AcqRel);
        (committed.tree, committed.root) = (loaded.tree, root.clone());
        Ok(Some(root))
    }
}
