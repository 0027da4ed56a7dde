//! A consistent view of the catalog: the data of `list`, `get` and the previews of `destroy`.
//!
//! Called by the implementation of the verbs. Read only. It shows the state of the last commit:
//! later writes are visible after the next one.
//!
//! Invariant: a [`CatalogView`] holds the administration lock, so nothing changes while it lives,
//! except when it pauses ([`CatalogView::pause`]); and it must not live over a call that waits.

use parking_lot::MutexGuard;

use super::{Admin, Pool, find};
use crate::catalog::rows::PARTIAL;
use crate::catalog::{BookmarkRow, DatasetRow, PropertyRow, SnapshotRow};
use crate::deadlist::Point;
use crate::error::PoolError;
use crate::pointer::Txg;
use crate::send_stream::ResumeToken;
use crate::space::{Breakdown, Limits, Usage};

/// The locked catalog and accounts of a pool.
pub struct CatalogView<'a> {
    pool: &'a Pool,
    admin: MutexGuard<'a, Admin>,
}

impl std::fmt::Debug for CatalogView<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CatalogView").finish_non_exhaustive()
    }
}

/// The snapshots of a dataset with their chain of deadlists, the oldest first.
#[derive(Clone, Debug)]
pub struct SnapshotLine {
    rows: Vec<(Txg, SnapshotRow)>,
    history: Vec<Point>,
    /// Number of the chain's first points that belong to the dataset's origin.
    before: usize,
}

impl SnapshotLine {
    /// Returns the position of a snapshot, and its row.
    #[must_use]
    pub fn find(&self, txg: Txg) -> Option<(usize, &SnapshotRow)> {
        let place = self.rows.binary_search_by_key(&txg, |(txg, _)| *txg).ok()?;
        self.rows.get(place).map(|(_, row)| (place, row))
    }
}

impl Pool {
    /// Locks the catalog; nothing changes until the view is dropped.
    pub fn catalog_view(&self) -> CatalogView<'_> {
        CatalogView { pool: self, admin: self.admin.lock() }
    }
}

impl CatalogView<'_> {
    /// Returns the root dataset, which has the pool's name.
    ///
    /// # Errors
    /// Errors of the store, as for all here.
    pub fn root(&self) -> Result<u64, PoolError> {
        Ok(self.admin.catalog.head()?.root)
    }

    /// Finds a dataset by its full name.
    ///
    /// # Errors
    /// As [`Self::root`].
    pub fn find(&self, name: &str) -> Result<Option<u64>, PoolError> {
        find(&self.admin.catalog, name)
    }

    /// Returns the full name of a dataset.
    ///
    /// # Errors
    /// As [`Self::root`]; parents that lead in a circle are damage.
    pub fn name(&self, id: u64) -> Result<String, PoolError> {
        let mut parts = Vec::new();
        let mut at = id;
        while at != 0 {
            let row = self.admin.catalog.dataset(at)?;
            at = row.parent;
            parts.push(row.name);
            if parts.len() > crate::names::NAME_MOST {
                return Err(PoolError::Format(crate::error::Damage::Structure("a dataset that lies below itself")));
            }
        }
        parts.reverse();
        Ok(parts.join("/"))
    }

    /// Returns the row of a dataset.
    ///
    /// # Errors
    /// As [`Self::root`]; one that is not there is damage.
    pub fn dataset(&self, id: u64) -> Result<DatasetRow, PoolError> {
        self.admin.catalog.dataset(id)
    }

    /// Returns the children of a dataset, by name, without a partially received next state of the
    /// dataset itself.
    ///
    /// # Errors
    /// As [`Self::root`].
    pub fn children(&self, id: u64) -> Result<Vec<u64>, PoolError> {
        let partial = self.admin.catalog.child(id, PARTIAL)?;
        let mut children = self.admin.catalog.children(id)?;
        children.retain(|child| Some(*child) != partial);
        Ok(children)
    }

    /// Whether a dataset is partially received: nothing in it can be used yet.
    ///
    /// # Errors
    /// As [`Self::root`].
    pub fn is_half(&self, id: u64) -> Result<bool, PoolError> {
        self.admin.is_half(id)
    }

    /// Returns the position up to which a resumable stream was received into a dataset.
    ///
    /// # Errors
    /// As [`Self::root`].
    pub fn resume_token(&self, id: u64) -> Result<Option<ResumeToken>, PoolError> {
        self.pool.resume_token(&self.admin, id)
    }

    /// The stored properties of a dataset (0: the pool), by name.
    ///
    /// # Errors
    /// As [`Self::root`].
    pub fn properties(&self, id: u64) -> Result<Vec<(String, PropertyRow)>, PoolError> {
        self.admin.catalog.properties(id)
    }

    /// Returns the properties set on a snapshot itself, by name.
    ///
    /// # Errors
    /// As [`Self::root`].
    pub fn snapshot_properties(&self, id: u64, txg: Txg) -> Result<Vec<(String, PropertyRow)>, PoolError> {
        self.admin.catalog.snapshot_properties(id, txg)
    }

    /// Gives other users of the lock a turn (commits wait while a view lives); returns whether the
    /// catalog was changed meanwhile: data read before may be out of date.
    pub fn pause(&mut self) -> bool {
        let before = self.admin.catalog.changes();
        MutexGuard::bump(&mut self.admin);
        self.admin.catalog.changes() != before
    }

    /// Whether this dataset exists, and this snapshot of it.
    ///
    /// # Errors
    /// As [`Self::root`].
    pub fn is_there(&self, id: u64, snapshot: Option<Txg>) -> Result<bool, PoolError> {
        self.admin.catalog.is_there(id, snapshot)
    }

    /// Returns the snapshots of a dataset with their chain of deadlists.
    ///
    /// # Errors
    /// As [`Self::root`].
    pub fn line(&mut self, id: u64) -> Result<SnapshotLine, PoolError> {
        let rows = self.admin.catalog.snapshots(id)?;
        let (history, before) = if rows.is_empty() { (Vec::new(), 0) } else { self.admin.catalog.history_of(id)? };
        Ok(SnapshotLine { rows, history, before })
    }

    /// Bytes that destroying the snapshot at this position alone would free.
    ///
    /// # Errors
    /// As [`Self::root`].
    pub fn used_by(&mut self, line: &SnapshotLine, place: usize) -> Result<u64, PoolError> {
        self.admin.catalog.deadlists().used_by_snapshot(&line.history, line.before + place)
    }

    /// Bytes that the snapshot at this position references and the one before it does not.
    ///
    /// # Errors
    /// As [`Self::root`].
    pub fn written_to(&mut self, line: &SnapshotLine, place: usize) -> Result<u64, PoolError> {
        let at = line.before + place;
        match at.checked_sub(1) {
            Some(before) => self.admin.catalog.deadlists().written_since(&line.history, before, at),
            None => Ok(line.rows.get(place).map_or(0, |(_, row)| row.referenced)),
        }
    }

    /// The snapshots of a dataset, the oldest first.
    ///
    /// # Errors
    /// As [`Self::root`].
    pub fn snapshot_rows(&self, id: u64) -> Result<Vec<(Txg, SnapshotRow)>, PoolError> {
        self.admin.catalog.snapshots(id)
    }

    /// The snapshot of a dataset with this name.
    ///
    /// # Errors
    /// As [`Self::root`].
    pub fn snapshot_named(&self, id: u64, name: &str) -> Result<Option<Txg>, PoolError> {
        self.admin.catalog.snapshot_named(id, name)
    }

    /// Returns the row of a snapshot.
    ///
    /// # Errors
    /// As [`Self::root`]; one that is not there is damage.
    pub fn snapshot(&self, id: u64, txg: Txg) -> Result<SnapshotRow, PoolError> {
        self.admin.catalog.snapshot(id, txg)
    }

    /// Bytes that a live dataset, or a snapshot in its chain, references and an earlier snapshot of
    /// the chain does not. `None` if either is not in the chain.
    ///
    /// # Errors
    /// As [`Self::root`].
    pub fn written_since(&mut self, id: u64, earlier: Txg, later: Option<Txg>) -> Result<Option<u64>, PoolError> {
        let (history, _) = self.admin.catalog.history_of(id)?;
        let place = |txg: Txg| history.iter().position(|point| point.txg == txg);
        let (Some(from), Some(to)) = (place(earlier), place(later.unwrap_or(Point::HEAD))) else { return Ok(None) };
        if from >= to {
            return Ok(None);
        }
        self.admin.catalog.deadlists().written_since(&history, from, to).map(Some)
    }

    /// Bytes that destroying these snapshots of a dataset together would free.
    ///
    /// # Errors
    /// As [`Self::root`].
    pub fn freed_by(&mut self, id: u64, txgs: &[Txg]) -> Result<u64, PoolError> {
        let (history, _) = self.admin.catalog.history_of(id)?;
        let mut places: Vec<usize> =
            history.iter().enumerate().filter(|(_, point)| txgs.contains(&point.txg)).map(|(place, _)| place).collect();
        places.sort_unstable();
        let lists = self.admin.catalog.deadlists();
        let mut sum = 0u64;
        // Neighbouring snapshots together free also the frames that only they share.
        for run in places.chunk_by(|a, b| a + 1 == *b) {
            if let (Some(first), Some(last)) = (run.first(), run.last()) {
                sum = sum.saturating_add(lists.used_by_range(&history, *first, *last)?);
            }
        }
        Ok(sum)
    }

    /// The bookmarks of a dataset, by name.
    ///
    /// # Errors
    /// As [`Self::root`].
    pub fn bookmarks(&self, id: u64) -> Result<Vec<(String, BookmarkRow)>, PoolError> {
        self.admin.catalog.bookmarks(id)
    }

    /// The tags that hold a snapshot, with the times of the holds, seconds since 1970.
    ///
    /// # Errors
    /// As [`Self::root`].
    pub fn holds(&self, id: u64, txg: Txg) -> Result<Vec<(String, i64)>, PoolError> {
        self.admin.catalog.holds(id, txg)
    }

    /// Returns the clones of a snapshot, without a partially received next state of its dataset.
    ///
    /// # Errors
    /// As [`Self::root`].
    pub fn clones(&self, id: u64, txg: Txg) -> Result<Vec<u64>, PoolError> {
        let partial = self.admin.catalog.child(id, PARTIAL)?;
        let mut clones = self.admin.catalog.clones(id, txg)?;
        clones.retain(|clone| Some(*clone) != partial);
        Ok(clones)
    }

    /// The name below a file system of the half received difference to a snapshot of it, if there is one.
    ///
    /// # Errors
    /// As [`Self::root`].
    pub fn partial_clone(&self, id: u64, txg: Txg) -> Result<Option<&'static str>, PoolError> {
        let Some(partial) = self.admin.catalog.child(id, PARTIAL)? else { return Ok(None) };
        let follows = self.admin.catalog.clones(id, txg)?.contains(&partial);
        Ok(follows.then_some(PARTIAL))
    }

    /// The figures of a dataset.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for an unknown dataset, as for all accounts.
    pub fn breakdown(&self, id: u64) -> Result<Breakdown, PoolError> {
        self.admin.quota_tree().breakdown(id)
    }

    /// Returns the usage counters of the dataset itself.
    ///
    /// # Errors
    /// As [`Self::breakdown`].
    pub fn usage(&self, id: u64) -> Result<Usage, PoolError> {
        self.admin.quota_tree().usage(id)
    }

    /// The limits of a dataset.
    ///
    /// # Errors
    /// As [`Self::breakdown`].
    pub fn limits(&self, id: u64) -> Result<Limits, PoolError> {
        self.admin.quota_tree().limits(id)
    }

    /// Bytes that a dataset may still use: the property `available`.
    ///
    /// # Errors
    /// As [`Self::breakdown`].
    pub fn available(&self, id: u64) -> Result<u64, PoolError> {
        self.admin.quota_tree().available_to_head(id)
    }

    /// Bytes that a dataset and its descendants store, as charged and before compression: the two
    /// sides of the compression ratio.
    ///
    /// # Errors
    /// As [`Self::breakdown`].
    pub fn stored_below(&self, id: u64) -> Result<(u64, u64), PoolError> {
        self.admin.quota_tree().stored_below(id)
    }

    /// Number of file systems below a dataset, and of snapshots of it and its descendants.
    ///
    /// # Errors
    /// As [`Self::breakdown`].
    pub fn counts(&self, id: u64) -> Result<(u64, u64), PoolError> {
        self.admin.quota_tree().counts(id)
    }
}
