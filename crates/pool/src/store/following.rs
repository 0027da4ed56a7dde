//! A store that another program writes to, and that is only read here, goes on to that one's newer roots.
//!
//! Called by whoever follows a writer. Invariant: what the root says that the caller uses stays readable
//! until he uses another one, however often he fails to go on; the writer's backend keeps its segments for
//! some time.

use std::sync::atomic::Ordering;

use super::commit::release;
use super::table_read::{load, settle};
use super::{Map, Result, Store, appenders};
use crate::error::PoolError;
use crate::label::Root;

impl Store {
    /// Goes on to the newest root, where another program has put one since; answers that. What the root of
    /// the generation `used` says can be read until this is called with a later one.
    ///
    /// # Errors
    /// [`PoolError::Device`], also where parts of that root are gone already: the next one is newer.
    /// [`PoolError::Refused`] for a store that writes itself.
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
        // What is dead in all roots that are kept is in none of them: the writer removes it.
        release(&mut map, &mut root)?;
        map.sum_up(committed.identity.revision, &loaded.tree, &root, &*self.backend);
        {
            let mut now = self.map.write();
            // Where nobody has come to use the root before this one, what is used is older.
            let is_used = used == committed.root.generation || now.before.is_none();
            map.before = if is_used { Some(std::mem::take(&mut now.table)) } else { now.before.take() };
            *now = map;
        }
        self.durable.fetch_max(root.txg.0, Ordering::AcqRel);
        (committed.tree, committed.root) = (loaded.tree, root.clone());
        Ok(Some(root))
    }
}
