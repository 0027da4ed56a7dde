//! A read-only pool follows the process that writes to it: it switches to the writer's newer state.
//!
//! Called after the store has switched ([`Store::follow`]): first [`Pool::look_ahead`], which reads
//! the differences between the trees of both states, then [`Pool::go_on`]. Invariants: a file
//! system has its new files before the callback reports its changes; all differences are reported;
//! nodes that both states share are not read.
//!
//! [`Store::follow`]: crate::store::Store::follow

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use super::tree_table::TreeTable;
use super::{Dataset, Durable, Pool};
use crate::catalog::Catalog;
use crate::error::PoolError;
use crate::pointer::{Pointer, Txg};
use crate::rows::keys::Key;
use crate::rows::{DatasetHead, Entry, InodeRow};
use crate::space::QuotaTree;
use crate::tree::{Context, Settings, Tree};

/// With more changes of one file system than this, dropping all caches of it is cheaper.
const MOST: usize = 50_000;

/// Differences of a file system between two states.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Too many changes to list, or inode numbers may stand for other files: all caches are stale.
    pub everything: bool,
    /// Names that were added, removed or changed: the directory's inode, and the name.
    pub names: BTreeSet<(u64, Vec<u8>)>,
    /// Inodes with changed attributes.
    pub attributes: BTreeSet<u64>,
    /// Inodes with changed content.
    pub content: BTreeSet<u64>,
    /// Snapshots that were destroyed.
    pub snapshots: Vec<Txg>,
}

impl Changes {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    fn are_many(&self) -> bool {
        self.names.len() + self.attributes.len() + self.content.len() > MOST
    }
}

/// A newer state that was read while the current one is still in use.
pub struct Ahead {
    txg: Txg,
    catalog: Catalog,
    quotas: QuotaTree,
    changed: Vec<(Arc<Dataset>, TreeTable, Changes)>,
    gone: Vec<u64>,
}

impl std::fmt::Debug for Ahead {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ahead").field("txg", &self.txg).field("changed", &self.changed.len()).finish_non_exhaustive()
    }
}

impl Pool {
    /// Reads the differences between the current state and a newer one.
    ///
    /// # Errors
    /// Errors of the store; nothing has changed then.
    pub fn look_ahead(&self, durable: &Durable) -> Result<Ahead, PoolError> {
        let (frames, cache) = (Arc::clone(&self.frames), Arc::clone(&self.cache));
        let catalog = Catalog::open(frames, cache, Some(durable.catalog), Txg(durable.txg.0 + 1));
        catalog.check_shape()?;
        // The identity that was read may be older than this state.
        catalog.check_keys(true)?;
        let now: HashMap<u64, Option<Pointer>> =
            catalog.datasets()?.into_iter().map(|(id, row)| (id, row.root)).collect();
        let (mut changed, mut gone) = (Vec::new(), Vec::new());
        for dataset in self.open_datasets() {
            let id = dataset.id();
            let Some(root) = now.get(&id) else {
                gone.push(id);
                continue;
            };
            let (was, snapshots) = {
                let admin = self.admin.lock();
                (admin.catalog.dataset(id)?.root, admin.catalog.snapshots(id)?)
            };
            let mut changes = self.difference(was, *root)?;
            let left: BTreeSet<Txg> = catalog.snapshots(id)?.into_iter().map(|(txg, _)| txg).collect();
            changes.snapshots = snapshots.into_iter().map(|(txg, _)| txg).filter(|txg| !left.contains(txg)).collect();
            if was != *root || !changes.is_empty() {
                changed.push((dataset, Dataset::table(self, id, *root), changes));
            }
        }
        let quotas = self.forest_of(&catalog)?;
        Ok(Ahead { txg: durable.txg, catalog, quotas, changed, gone })
    }

    /// Switches to that state; `told` is called for each changed file system, with its number and
    /// changes, after its switch.
    ///
    /// # Errors
    /// Errors of the store: some file systems have the new state then, and the others keep the old
    /// one until the next call.
    pub fn go_on(&self, ahead: Ahead, told: &mut dyn FnMut(u64, &Changes)) -> Result<(), PoolError> {
        let Ahead { txg, catalog, quotas, changed, gone } = ahead;
        for (dataset, table, changes) in changed {
            dataset.files().stop().replace(table)?;
            told(dataset.id(), &changes);
        }
        let mut admin = self.admin.lock();
        admin.catalog = catalog;
        *admin.quota_tree() = quotas;
        admin.count_shared()?;
        self.datasets.write().retain(|id, _| !gone.contains(id));
        self.committed.fetch_max(txg.0, std::sync::atomic::Ordering::AcqRel);
        self.refresh(&admin)
    }

    fn difference(&self, was: Option<Pointer>, is: Option<Pointer>) -> Result<Changes, PoolError> {
        let context = Context { frames: &*self.frames, cache: &self.cache };
        let view = |root| Tree::open(root, 0, Settings::default()).view();
        let mut rows = view(was).diff(context, &view(is))?;
        let (mut changes, mut folds) = (Changes::default(), false);
        while let Some(row) = rows.next()? {
            let values = [row.old, row.new];
            match Key::decode(row.key)? {
                Key::Head => {
                    let heads = values.map(|value| value.map(DatasetHead::decode).transpose());
                    let [old, new] = heads;
                    let (old, new) = (old?, new?);
                    folds = new.as_ref().is_some_and(|head| !head.folding.is_exact());
                    // Inode numbers that were assigned since may have been assigned again.
                    changes.everything |= old.map(|head| head.next) > new.map(|head| head.next);
                }
                Key::Inode(number) => {
                    let [old, new] = values.map(|value| value.map(InodeRow::decode).transpose());
                    let (old, new) = (old?, new?);
                    if let (Some(old), Some(new)) = (old, new) {
                        changes.everything |= (old.born, old.file_type()) != (new.born, new.file_type());
                        if old.size != new.size {
                            changes.content.insert(number);
                        }
                    }
                    changes.attributes.insert(number);
                }
                Key::Entry { directory, .. } => {
                    // The kernel caches other names that match this one as well.
                    changes.everything |= folds;
                    for value in values.into_iter().flatten() {
                        changes.names.insert((directory, Entry::decode(value)?.name.to_vec()));
                    }
                }
                Key::Xattr { inode, .. } => drop(changes.attributes.insert(inode)),
                Key::Extent { inode, .. } | Key::Patch { inode, .. } => drop(changes.content.insert(inode)),
                Key::Name { .. }
                | Key::Orphan(_)
                | Key::OwnerUse(..)
                | Key::Cut(_)
                | Key::Received
                | Key::Recounted => {}
            }
            if changes.everything || changes.are_many() {
                return Ok(Changes { everything: true, ..Changes::default() });
            }
        }
        Ok(changes)
    }
}
