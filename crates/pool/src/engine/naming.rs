//! Finds the file that a damaged frame belongs to, when the frame's header cannot be read: `nacre
//! pool status -v`.
//!
//! The trees of all file systems and snapshots are walked until all frames are found; the catalog's
//! own frames are not looked for. Invariants: nothing is changed; commits wait meanwhile, so that
//! no frame is reused under the walk. Memory: some 50 bytes for each node of the trees.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use super::Pool;
use crate::error::PoolError;
use crate::frames::Owner;
use crate::pointer::{Pointer, Txg};
use crate::rows::{Key, pointer_of};
use crate::tree::{Context, walk::Visitor, walk::walk};

/// A search for frames in one tree after the other.
struct Search<'a> {
    dataset: u64,
    wanted: &'a BTreeSet<(u32, u32)>,
    found: BTreeMap<(u32, u32), Owner>,
    seen: HashSet<(u32, u32)>,
}

impl Search<'_> {
    fn note(&mut self, pointer: &Pointer, object: u64) {
        let name = (pointer.segment, pointer.index);
        if self.wanted.contains(&name) {
            self.found.entry(name).or_insert(Owner { dataset: self.dataset, object, offset: 0 });
        }
    }
}

impl Visitor for Search<'_> {
    fn frame(&mut self, pointer: &Pointer) -> Result<bool, PoolError> {
        self.note(pointer, 0);
        Ok(self.found.len() < self.wanted.len() && self.seen.insert((pointer.segment, pointer.index)))
    }

    fn row(&mut self, key: &[u8], value: &[u8]) -> Result<(), PoolError> {
        // An unreadable row references nothing.
        if let Ok(Some(pointer)) = pointer_of(key, value)
            && let Ok(Key::Extent { inode, .. } | Key::Xattr { inode, .. } | Key::Patch { inode, .. }) =
                Key::decode(key)
        {
            self.note(&pointer, inode);
        }
        Ok(())
    }

    fn damaged(&mut self, _: &Pointer, _: PoolError) -> Result<(), PoolError> {
        Ok(())
    }
}

impl Pool {
    /// Returns the owners of frames (segment and number), of those that a file system or a snapshot
    /// references.
    ///
    /// # Errors
    /// A catalog that cannot be read.
    pub fn owners_of(&self, wanted: &BTreeSet<(u32, u32)>) -> Result<BTreeMap<(u32, u32), Owner>, PoolError> {
        let admin = self.admin.lock();
        let context = Context { frames: &*self.frames, cache: &self.cache };
        let mut search = Search { dataset: 0, wanted, found: BTreeMap::new(), seen: HashSet::new() };
        for (id, row) in &admin.catalog.datasets()? {
            let snapshots = admin.catalog.snapshots(*id)?;
            search.dataset = *id;
            // The live dataset first: its files are what an administrator looks for.
            for root in row.root.iter().chain(snapshots.iter().rev().filter_map(|(_, snapshot)| snapshot.root.as_ref()))
            {
                walk(&context, root, Txg(0), &mut search)?;
            }
        }
        Ok(search.found)
    }
}
