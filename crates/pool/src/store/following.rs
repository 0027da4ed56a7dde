//! A store that another program writes to, and that is only read here, goes on to that one's newer roots.
//!
//! Called by whoever follows a writer. Invariant: what was read of the root before stays readable until the
//! next root is gone on to; the writer's backend keeps its segments for as long.

use std::sync::atomic::Ordering;

use super::commit::{copies, release, slack, special};
use super::open::{load, settle};
use super::{Map, Result, Store, appenders};
use crate::error::PoolError;
use crate::label::Root;
use crate::pointer::Pointer;

impl Store {
    /// Goes on to the newest root, where another program has put one since; answers that.
    ///
    /// # Errors
    /// [`PoolError::Device`], also where parts of that root are gone already: the next one is newer.
    /// [`PoolError::Refused`] for a store that writes itself.
    pub fn follow(&self) -> Result<Option<Root>> {
        if self.writable {
            return Err(PoolError::Refused("a pool that is written to here follows nobody".to_owned()));
        }
        let mut committed = self.committed.lock();
        let Some(mut root) = self.backend.newer_root(committed.root.generation)? else { return Ok(None) };
        let mut loaded = load(&*self.backend, &root)?;
        settle(&mut loaded, false, appenders::of_content(&*self.backend))?;
        let of_table = root.table_segments.iter().map(|segment| (segment.id, &segment.place));
        let others = loaded.table.segments().iter().map(|(id, segment)| (*id, &segment.place));
        self.backend.adopt(&root, &mut of_table.chain(others).filter(|(_, place)| !place.is_empty()))?;
        let table_frames = loaded.pieces.iter().chain(&root.table).chain(&root.deltas);
        self.sums.table.store(table_frames.map(Pointer::charged).sum(), Ordering::Relaxed);
        self.sums.allocated.store(loaded.table.live_bytes(), Ordering::Relaxed);
        let mut map = Map { table: loaded.table, next_segment: root.next_segment, ..Map::default() };
        // What is dead in all roots that are kept is in none of them: the writer removes it.
        release(&mut map, &mut root)?;
        (map.slack, map.copies) = (slack(&map, &*self.backend), copies(&map, &*self.backend));
        map.special = special(&map, &root, &loaded.pieces, &*self.backend);
        {
            let mut now = self.map.write();
            map.before = Some(std::mem::take(&mut now.table));
            *now = map;
        }
        self.durable.fetch_max(root.txg.0, Ordering::AcqRel);
        (committed.pieces, committed.root) = (loaded.pieces, root.clone());
        Ok(Some(root))
    }
}
