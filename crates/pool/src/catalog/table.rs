//! The catalog's tree with typed rows, and as storage of the deadlists' rows.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use super::rows::{
    self, BookmarkRow, DatasetRow, DoomedRow, HistoryRow, PoolHead, PropertyRow, PropertySource, SharedRow, SnapshotRow,
};
use crate::cache::Cache;
use crate::deadlist::{Deadlists, Point, RowVisitor, Rows};
use crate::error::{Damage, PoolError};
use crate::frames::{CompressionSetting, Frames};
use crate::pointer::{ChecksumKind, Pointer, Txg};
use crate::tree::{Context, Settings, Tree, View, Written, commit::Form};

/// Dataset number in the headers of the catalog's frames.
const CATALOG: u64 = 0;

/// The catalog of a pool.
pub struct Catalog {
    tree: Tree,
    frames: Arc<dyn Frames>,
    cache: Arc<Cache>,
    txg: Txg,
    /// Number of rows put or removed so far.
    changes: u64,
    /// Datasets whose snapshots have changed since [`Catalog::note_snapshots_changed`].
    snapshots_changed: BTreeSet<u64>,
}

impl std::fmt::Debug for Catalog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Catalog").field("txg", &self.txg).finish_non_exhaustive()
    }
}

fn missing(what: &'static str) -> PoolError {
    PoolError::Format(Damage::Structure(what))
}

impl Catalog {
    /// Opens the catalog with this root; changes belong to `txg`.
    #[must_use]
    pub fn open(frames: Arc<dyn Frames>, cache: Arc<Cache>, root: Option<Pointer>, txg: Txg) -> Self {
        Self {
            tree: Tree::open(root, CATALOG, Settings::default()),
            frames,
            cache,
            txg,
            changes: 0,
            snapshots_changed: BTreeSet::new(),
        }
    }

    /// Number of changes since it was opened.
    #[must_use]
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Sets the txg to which changes belong from now on.
    pub fn set_txg(&mut self, txg: Txg) {
        self.txg = txg;
    }

    fn context(&self) -> Context<'_> {
        Context { frames: &*self.frames, cache: &self.cache }
    }

    /// Writes all changes. The catalog must not be changed meanwhile.
    ///
    /// # Errors
    /// Errors of the frames.
    pub fn write_out(&mut self, txg: Txg) -> Result<(Written, Vec<Pointer>), PoolError> {
        let frozen = self.tree.freeze();
        let written = frozen.write_out(
            &self.context(),
            Form { txg, compression: CompressionSetting::Lz4, checksum: ChecksumKind::Xxh3 },
        )?;
        self.tree.settle(&frozen)?;
        Ok((written, self.tree.take_dead(txg)))
    }

    /// Whether it was changed since it was last written.
    #[must_use]
    pub fn has_changes(&self) -> bool {
        self.tree.has_changes()
    }

    /// Returns a view of the current catalog, which can be read independently of it.
    #[must_use]
    pub fn view(&self) -> View {
        self.tree.view()
    }

    pub(super) fn typed<R>(
        &self,
        key: &[u8],
        decode: impl Fn(&[u8]) -> Result<R, PoolError>,
    ) -> Result<Option<R>, PoolError> {
        self.get(key)?.as_deref().map(decode).transpose()
    }

    /// Returns all rows of a range, decoded, with their keys.
    pub(super) fn all<R>(
        &self,
        range: Range<Vec<u8>>,
        decode: impl Fn(&[u8], &[u8]) -> Result<R, PoolError>,
    ) -> Result<Vec<R>, PoolError> {
        let mut found = Vec::new();
        self.range(range, &mut |key, row| {
            found.push(decode(key, row)?);
            Ok(true)
        })?;
        Ok(found)
    }

    /// Returns the header.
    ///
    /// # Errors
    /// Errors of the tree, as for all functions here; a catalog without a header is damaged.
    pub fn head(&self) -> Result<PoolHead, PoolError> {
        self.typed(&rows::key(rows::HEAD, &[], b""), PoolHead::decode)?
            .ok_or_else(|| missing("a catalog without a head"))
    }

    /// Sets the header.
    ///
    /// # Errors
    /// As [`Self::head`].
    pub fn set_head(&mut self, head: &PoolHead) -> Result<(), PoolError> {
        self.put(&rows::key(rows::HEAD, &[], b""), &head.encode())
    }

    /// Assigns a number to a new dataset.
    ///
    /// # Errors
    /// As [`Self::head`].
    pub fn number(&mut self) -> Result<u64, PoolError> {
        let mut head = self.head()?;
        let number = head.next;
        head.next += 1;
        self.set_head(&head)?;
        Ok(number)
    }

    /// Returns a dataset.
    ///
    /// # Errors
    /// As [`Self::head`]; a missing one is damage: its number comes from the catalog.
    pub fn dataset(&self, id: u64) -> Result<DatasetRow, PoolError> {
        self.typed(&rows::key(rows::DATASET, &[id], b""), DatasetRow::decode)?
            .ok_or_else(|| missing("a dataset that is not in the catalog"))
    }

    /// Returns all datasets, ordered by number.
    ///
    /// # Errors
    /// As [`Self::head`].
    pub fn datasets(&self) -> Result<Vec<(u64, DatasetRow)>, PoolError> {
        self.all(rows::below(rows::DATASET, &[]), |key, row| {
            Ok((rows::parts::<1>(key)?.0[0], DatasetRow::decode(row)?))
        })
    }

    /// Replaces the row of an existing dataset, whose name is unchanged.
    ///
    /// # Errors
    /// As [`Self::head`].
    pub fn set_dataset(&mut self, id: u64, row: &DatasetRow) -> Result<(), PoolError> {
        self.put(&rows::key(rows::DATASET, &[id], b""), &row.encode())
    }

    /// Adds a dataset under its name.
    ///
    /// # Errors
    /// As [`Self::head`].
    pub fn enter(&mut self, id: u64, row: &DatasetRow) -> Result<(), PoolError> {
        self.set_dataset(id, row)?;
        self.put(&rows::key(rows::CHILD, &[row.parent], row.name.as_bytes()), &id.to_le_bytes())
    }

    /// Removes a dataset, its name and its properties.
    ///
    /// # Errors
    /// As [`Self::head`].
    pub fn leave(&mut self, id: u64) -> Result<(), PoolError> {
        let row = self.dataset(id)?;
        self.delete(&rows::key(rows::CHILD, &[row.parent], row.name.as_bytes()))?;
        for (name, _) in self.properties(id)? {
            self.delete(&rows::key(rows::PROPERTY, &[id], name.as_bytes()))?;
            self.delete(&rows::key(rows::RECEIVED, &[id], name.as_bytes()))?;
        }
        self.delete(&rows::key(rows::DATASET, &[id], b""))
    }

    /// Renames a dataset, or moves it to another parent.
    ///
    /// # Errors
    /// As [`Self::head`].
    pub fn rename(&mut self, id: u64, parent: u64, name: &str) -> Result<(), PoolError> {
        let mut row = self.dataset(id)?;
        self.delete(&rows::key(rows::CHILD, &[row.parent], row.name.as_bytes()))?;
        (row.parent, row.name) = (parent, name.to_owned());
        self.enter(id, &row)
    }

    /// Finds the child of a dataset with this name.
    ///
    /// # Errors
    /// As [`Self::head`].
    pub fn child(&self, parent: u64, name: &str) -> Result<Option<u64>, PoolError> {
        self.typed(&rows::key(rows::CHILD, &[parent], name.as_bytes()), |row| {
            row.try_into().map(u64::from_le_bytes).map_err(|_| missing("the number of a child"))
        })
    }

    /// Returns the children of a dataset, by name.
    ///
    /// # Errors
    /// As [`Self::head`].
    pub fn children(&self, parent: u64) -> Result<Vec<u64>, PoolError> {
        self.all(rows::below(rows::CHILD, &[parent]), |_, row| {
            row.try_into().map(u64::from_le_bytes).map_err(|_| missing("the number of a child"))
        })
    }

    /// Returns the stored properties of a dataset (0: the pool): local ones by name, then received
    /// ones by name.
    ///
    /// # Errors
    /// As [`Self::head`].
    pub fn properties(&self, dataset: u64) -> Result<Vec<(String, PropertyRow)>, PoolError> {
        let mut all = Vec::new();
        for kind in [rows::PROPERTY, rows::RECEIVED] {
            all.extend(self.all(rows::below(kind, &[dataset]), |key, row| {
                let name = rows::label(rows::parts::<1>(key)?.1, "the name of a property")?;
                Ok((name, PropertyRow::decode(row)?))
            })?);
        }
        Ok(all)
    }

    /// Returns the local row of a property of a dataset: set or masked.
    ///
    /// # Errors
    /// As [`Self::head`].
    pub fn own_property(&self, dataset: u64, name: &str) -> Result<Option<PropertyRow>, PoolError> {
        self.typed(&rows::key(rows::PROPERTY, &[dataset], name.as_bytes()), PropertyRow::decode)
    }

    /// Sets a property, or removes its local row; a received row is kept.
    ///
    /// # Errors
    /// As [`Self::head`].
    pub fn set_property(&mut self, dataset: u64, name: &str, value: Option<&PropertyRow>) -> Result<(), PoolError> {
        let received = value.is_some_and(|value| value.source == PropertySource::Received);
        let key = rows::key(if received { rows::RECEIVED } else { rows::PROPERTY }, &[dataset], name.as_bytes());
        match value {
            Some(value) => self.put(&key, &value.encode()),
            None => self.delete(&key),
        }
    }

    /// Whether a value of a property was received.
    ///
    /// # Errors
    /// As [`Self::head`].
    pub fn has_received(&self, dataset: u64, name: &str) -> Result<bool, PoolError> {
        Ok(self.get(&rows::key(rows::RECEIVED, &[dataset], name.as_bytes()))?.is_some())
    }

    /// Returns a snapshot.
    ///
    /// # Errors
    /// As [`Self::dataset`].
    pub fn snapshot(&self, dataset: u64, txg: Txg) -> Result<SnapshotRow, PoolError> {
        self.typed(&rows::key(rows::SNAPSHOT, &[dataset, txg.0], b""), SnapshotRow::decode)?
            .ok_or_else(|| missing("a snapshot that is not in the catalog"))
    }

    /// Whether this dataset exists, and this snapshot of it.
    ///
    /// # Errors
    /// As [`Self::head`].
    pub fn is_there(&self, dataset: u64, snapshot: Option<Txg>) -> Result<bool, PoolError> {
        let key = match snapshot {
            Some(txg) => rows::key(rows::SNAPSHOT, &[dataset, txg.0], b""),
            None => rows::key(rows::DATASET, &[dataset], b""),
        };
        Ok(self.get(&key)?.is_some())
    }

    /// Returns the snapshots of a dataset, the oldest first.
    ///
    /// # Errors
    /// As [`Self::head`].
    pub fn snapshots(&self, dataset: u64) -> Result<Vec<(Txg, SnapshotRow)>, PoolError> {
        self.all(rows::below(rows::SNAPSHOT, &[dataset]), |key, row| {
            Ok((Txg(rows::parts::<2>(key)?.0[1]), SnapshotRow::decode(row)?))
        })
    }

    /// Finds the snapshot with this name.
    ///
    /// # Errors
    /// As [`Self::head`].
    pub fn snapshot_named(&self, dataset: u64, name: &str) -> Result<Option<Txg>, PoolError> {
        self.typed(&rows::key(rows::SNAPSHOT_NAME, &[dataset], name.as_bytes()), |row| {
            row.try_into().map(u64::from_le_bytes).map(Txg).map_err(|_| missing("the txg of a snapshot"))
        })
    }

    /// Replaces the row of an existing snapshot, whose name is unchanged.
    ///
    /// # Errors
    /// As [`Self::head`].
    pub fn set_snapshot(&mut self, dataset: u64, txg: Txg, row: &SnapshotRow) -> Result<(), PoolError> {
        self.put(&rows::key(rows::SNAPSHOT, &[dataset, txg.0], b""), &row.encode())
    }

    /// Adds a snapshot under its name.
    ///
    /// # Errors
    /// As [`Self::head`].
    pub fn enter_snapshot(&mut self, dataset: u64, txg: Txg, row: &SnapshotRow) -> Result<(), PoolError> {
        self.snapshots_changed.insert(dataset);
        self.set_snapshot(dataset, txg, row)?;
        self.put(&rows::key(rows::SNAPSHOT_NAME, &[dataset], row.name.as_bytes()), &txg.0.to_le_bytes())
    }

    /// Removes a snapshot and its name.
    ///
    /// # Errors
    /// As [`Self::head`].
    pub fn leave_snapshot(&mut self, dataset: u64, txg: Txg) -> Result<(), PoolError> {
        self.snapshots_changed.insert(dataset);
        let row = self.snapshot(dataset, txg)?;
        self.delete(&rows::key(rows::SNAPSHOT_NAME, &[dataset], row.name.as_bytes()))?;
        self.delete(&rows::key(rows::SNAPSHOT, &[dataset, txg.0], b""))
    }

    /// Stores the time (seconds since 1970) in the datasets whose snapshots have changed since the
    /// last call.
    ///
    /// # Errors
    /// As [`Self::head`].
    pub fn note_snapshots_changed(&mut self, at: i64) -> Result<(), PoolError> {
        for dataset in std::mem::take(&mut self.snapshots_changed) {
            if self.get(&rows::key(rows::DATASET, &[dataset], b""))?.is_some() {
                let row = PropertyRow { source: PropertySource::Local, value: at.to_string() };
                self.set_property(dataset, "snapshots_changed", Some(&row))?;
            }
        }
        Ok(())
    }

    /// Returns the properties set on a snapshot, by name.
    ///
    /// # Errors
    /// As [`Self::head`].
    pub fn snapshot_properties(&self, dataset: u64, txg: Txg) -> Result<Vec<(String, PropertyRow)>, PoolError> {
        self.all(rows::below(rows::SNAPSHOT_PROPERTY, &[dataset, txg.0]), |key, row| {
            let name = rows::label(rows::parts::<2>(key)?.1, "the name of a property")?;
            Ok((name, PropertyRow::decode(row)?))
        })
    }

    /// Sets a property of a snapshot, or removes it.
    ///
    /// # Errors
    /// As [`Self::head`].
    pub fn set_snapshot_property(
        &mut self,
        dataset: u64,
        txg: Txg,
        name: &str,
        value: Option<&PropertyRow>,
    ) -> Result<(), PoolError> {
        let key = rows::key(rows::SNAPSHOT_PROPERTY, &[dataset, txg.0], name.as_bytes());
        match value {
            Some(value) => self.put(&key, &value.encode()),
            None => self.delete(&key),
        }
    }

    /// Returns the bookmarks of a dataset, by name.
    ///
    /// # Errors
    /// As [`Self::head`].
    pub fn bookmarks(&self, dataset: u64) -> Result<Vec<(String, BookmarkRow)>, PoolError> {
        self.all(rows::below(rows::BOOKMARK, &[dataset]), |key, row| {
            let name = rows::name_part(rows::parts::<1>(key)?.1, "the name of a bookmark")?;
            Ok((name, BookmarkRow::decode(row)?))
        })
    }

    /// Sets a bookmark, or removes it.
    ///
    /// # Errors
    /// As [`Self::head`].
    pub fn set_bookmark(&mut self, dataset: u64, name: &str, row: Option<&BookmarkRow>) -> Result<(), PoolError> {
        let key = rows::key(rows::BOOKMARK, &[dataset], name.as_bytes());
        match row {
            Some(row) => self.put(&key, &row.encode()),
            None => self.delete(&key),
        }
    }

    /// Returns the tags of a snapshot's holds, with their times, seconds since 1970.
    ///
    /// # Errors
    /// As [`Self::head`].
    pub fn holds(&self, dataset: u64, txg: Txg) -> Result<Vec<(String, i64)>, PoolError> {
        self.all(rows::below(rows::HOLD, &[dataset, txg.0]), |key, row| {
            let tag = rows::label(rows::parts::<2>(key)?.1, "the tag of a hold")?;
            let at = row.try_into().map(i64::from_le_bytes).map_err(|_| missing("the time of a hold"))?;
            Ok((tag, at))
        })
    }

    /// Whether a snapshot has a hold with this tag.
    ///
    /// # Errors
    /// As [`Self::head`].
    pub fn is_held(&self, dataset: u64, txg: Txg, tag: &str) -> Result<bool, PoolError> {
        Ok(self.get(&rows::key(rows::HOLD, &[dataset, txg.0], tag.as_bytes()))?.is_some())
    }

    /// Sets or releases a hold, and updates the snapshot's count. The cost does not grow with the
    /// number of holds: a stream may bring very many.
    ///
    /// # Errors
    /// As [`Self::dataset`].
    pub fn set_hold(&mut self, dataset: u64, txg: Txg, tag: &str, at: Option<i64>) -> Result<(), PoolError> {
        let key = rows::key(rows::HOLD, &[dataset, txg.0], tag.as_bytes());
        let was = self.is_held(dataset, txg, tag)?;
        match at {
            Some(at) => self.put(&key, &at.to_le_bytes())?,
            None => self.delete(&key)?,
        }
        let mut row = self.snapshot(dataset, txg)?;
        row.holds = counted(row.holds, was, at.is_some());
        self.set_snapshot(dataset, txg, &row)
    }

    /// Returns the clones of a snapshot.
    ///
    /// # Errors
    /// As [`Self::head`].
    pub fn clones(&self, dataset: u64, txg: Txg) -> Result<Vec<u64>, PoolError> {
        self.all(rows::below(rows::CLONE, &[dataset, txg.0]), |key, _| Ok(rows::parts::<3>(key)?.0[2]))
    }

    /// Adds or removes a clone of a snapshot, and updates the snapshot's count, at a cost that does
    /// not grow with it.
    ///
    /// # Errors
    /// As [`Self::dataset`].
    pub fn set_clone(&mut self, dataset: u64, txg: Txg, clone: u64, is: bool) -> Result<(), PoolError> {
        let key = rows::key(rows::CLONE, &[dataset, txg.0, clone], b"");
        let was = self.get(&key)?.is_some();
        if is {
            self.put(&key, b"")?;
        } else {
            self.delete(&key)?;
        }
        let mut row = self.snapshot(dataset, txg)?;
        row.clones = counted(row.clones, was, is);
        self.set_snapshot(dataset, txg, &row)
    }

    /// Returns the history of a dataset, for the deadlists: the snapshots of its origins up to
    /// where each was cloned, its own snapshots, the live dataset. Also returns the position of the
    /// first point that is its own.
    ///
    /// # Errors
    /// As [`Self::dataset`]; origins that form a cycle are damage.
    pub fn history_of(&self, dataset: u64) -> Result<(Vec<Point>, usize), PoolError> {
        let head = self.dataset(dataset)?;
        let mut lines = vec![self.points(dataset, Point::HEAD)?];
        let mut origin = head.origin;
        let mut last = Point::HEAD;
        while let Some((from, txg)) = origin {
            if txg >= last {
                return Err(missing("a dataset that descends from itself"));
            }
            last = txg;
            lines.push(self.points(from, txg)?);
            origin = self.dataset(from)?.origin;
        }
        let own = lines.iter().skip(1).map(Vec::len).sum();
        let mut points: Vec<Point> = lines.into_iter().rev().flatten().collect();
        points.push(Point {
            txg: Point::HEAD,
            referenced: head.usage.referenced,
            logical: head.usage.logical_referenced,
            list: head.list,
        });
        Ok((points, own))
    }

    fn points(&self, dataset: u64, through: Txg) -> Result<Vec<Point>, PoolError> {
        let snapshots = self.snapshots(dataset)?.into_iter().filter(|(txg, _)| *txg <= through);
        Ok(snapshots
            .map(|(txg, row)| Point { txg, referenced: row.referenced, logical: row.logical, list: row.list })
            .collect())
    }

    /// Returns the share count of a frame, by its segment and index.
    ///
    /// # Errors
    /// As [`Self::head`].
    pub fn shared(&self, segment: u32, index: u32) -> Result<Option<SharedRow>, PoolError> {
        self.typed(&shared_key(segment, index), SharedRow::decode)
    }

    /// Sets the share count of a frame, or removes it.
    ///
    /// # Errors
    /// As [`Self::head`].
    pub fn set_shared(&mut self, segment: u32, index: u32, row: Option<&SharedRow>) -> Result<(), PoolError> {
        let key = shared_key(segment, index);
        match row {
            Some(row) => self.put(&key, &row.encode()),
            None => self.delete(&key),
        }
    }

    /// Returns the share counts of all shared frames.
    ///
    /// # Errors
    /// As [`Self::head`].
    pub fn all_shared(&self) -> Result<Vec<SharedRow>, PoolError> {
        self.all(rows::below(rows::SHARED, &[]), |_, row| SharedRow::decode(row))
    }

    /// Returns the roots whose frames are being freed.
    ///
    /// # Errors
    /// As [`Self::head`].
    pub fn doomed(&self) -> Result<Vec<DoomedRow>, PoolError> {
        self.all(rows::below(rows::DOOMED, &[]), |_, row| DoomedRow::decode(row))
    }

    /// Stores a root whose frames are being freed, its progress, or its end (`None`).
    ///
    /// # Errors
    /// As [`Self::head`].
    pub fn set_doomed(&mut self, root: &Pointer, row: Option<&DoomedRow>) -> Result<(), PoolError> {
        let key = rows::key(rows::DOOMED, &[u64::from(root.segment) << 32 | u64::from(root.index)], b"");
        match row {
            Some(row) => self.put(&key, &row.encode()),
            None => self.delete(&key).map(drop),
        }
    }

    /// Adds a line to the history, and removes the oldest one if there are more than `most`.
    ///
    /// # Errors
    /// As [`Self::head`].
    pub fn remember(&mut self, line: &HistoryRow, most: u64) -> Result<(), PoolError> {
        let mut head = self.head()?;
        let number = head.history;
        head.history += 1;
        self.set_head(&head)?;
        self.put(&rows::key(rows::HISTORY, &[number], b""), &line.encode())?;
        if let Some(old) = number.checked_sub(most) {
            self.delete(&rows::key(rows::HISTORY, &[old], b""))?;
        }
        Ok(())
    }

    /// Returns the history, the oldest line first.
    ///
    /// # Errors
    /// As [`Self::head`].
    pub fn history(&self) -> Result<Vec<HistoryRow>, PoolError> {
        self.all(rows::below(rows::HISTORY, &[]), |_, row| HistoryRow::decode(row))
    }

    /// Accesses the deadlists.
    pub fn deadlists(&mut self) -> Deadlists<'_, Self> {
        Deadlists::new(self)
    }
}

/// Updates a count of rows by whether one of them existed before and exists now.
fn counted(count: u64, was: bool, is: bool) -> u64 {
    match (was, is) {
        (false, true) => count.saturating_add(1),
        (true, false) => count.saturating_sub(1),
        (true, true) | (false, false) => count,
    }
}

/// Key of a shared frame: both numbers in one.
fn shared_key(segment: u32, index: u32) -> Vec<u8> {
    rows::key(rows::SHARED, &[u64::from(segment) << 32 | u64::from(index)], b"")
}

impl Rows for Catalog {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, PoolError> {
        self.tree.get(&self.context(), key)
    }

    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), PoolError> {
        self.changes += 1;
        let context = Context { frames: &*self.frames, cache: &self.cache };
        self.tree.put(&context, self.txg, key, value)
    }

    fn delete(&mut self, key: &[u8]) -> Result<(), PoolError> {
        self.changes += 1;
        let context = Context { frames: &*self.frames, cache: &self.cache };
        self.tree.remove(&context, self.txg, key).map(drop)
    }

    fn range(&self, range: Range<Vec<u8>>, visit: &mut RowVisitor<'_>) -> Result<(), PoolError> {
        let mut cursor = self.tree.view().cursor(self.context(), &range.start, Some(&range.end))?;
        while let Some((key, row)) = cursor.next()? {
            if !visit(key, row)? {
                break;
            }
        }
        Ok(())
    }
}
