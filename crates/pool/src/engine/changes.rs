//! What has changed between two snapshots, with names: `fs diff`.
//!
//! The trees of both are walked together, and what they share is not read: the cost is that of the
//! changes. Only rows of inodes are looked at, for nothing of a file changes without a time in its
//! inode. Invariant: what is told is told as it is found, so memory does not grow with the number
//! of changes.

use super::{Dataset, Pool, as_pool_error};
use crate::error::PoolError;
use crate::files::Table;
use crate::pointer::{Pointer, Txg};
use crate::rows::keys::{self, Key};
use crate::rows::{Entry, FileType, InodeRow, Timestamp};
use crate::tree::{Context, Settings, Tree};

/// How a file has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileChange {
    /// Its content, its attributes, or names in it. With how many names it has more than before.
    Modified(i64),
    /// It is new.
    Added,
    /// It is gone.
    Removed,
    /// It had this path.
    Renamed(Vec<u8>),
}

/// A file that has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// How.
    pub change: FileChange,
    /// Its path below the root of the file system: what it was where it is gone, otherwise what it
    /// is. Empty for the root itself.
    pub path: Vec<u8>,
    /// Its type.
    pub file_type: FileType,
    /// When its inode changed last.
    pub changed: Timestamp,
}

/// A snapshot: its dataset, and when it was taken.
type Moment = (u64, Txg);

impl Pool {
    /// Tells what a later snapshot has that an earlier one has not, and the other way round. They
    /// may be snapshots of different datasets, as those of a clone and its origin are.
    ///
    /// # Errors
    /// Those of the store; a snapshot that is not there; whatever `tell` answers.
    pub fn diff(
        &self,
        from: Moment,
        to: Moment,
        tell: &mut dyn FnMut(Difference) -> Result<(), PoolError>,
    ) -> Result<(), PoolError> {
        let (old, new) = (self.snapshot_files(from.0, from.1)?, self.snapshot_files(to.0, to.1)?);
        let (old_root, new_root) = {
            let admin = self.admin.lock();
            (admin.catalog.snapshot(from.0, from.1)?.root, admin.catalog.snapshot(to.0, to.1)?.root)
        };
        let context = Context { frames: &*self.frames, cache: &self.cache };
        let view = |root: Option<Pointer>| Tree::open(root, 0, Settings::default()).view();
        let mut rows = view(old_root).diff(context, &view(new_root))?;
        while let Some(row) = rows.next()? {
            let number = match Key::decode(row.key)? {
                Key::Inode(number) => number,
                Key::Head => continue,
                // Inodes lie before everything else but the head.
                _ => break,
            };
            let inode = |value: Option<&[u8]>| value.map(InodeRow::decode).transpose();
            let (before, after) = (inode(row.old)?, inode(row.new)?);
            // What has no name belongs to whoever had it open.
            let (before, after) = (before.filter(|inode| inode.links > 0), after.filter(|inode| inode.links > 0));
            if let Some(difference) = difference((&old, &new), number, before, after)? {
                tell(difference)?;
            }
        }
        Ok(())
    }
}

/// What of a file changes with it. The time of change does, as a rule; what the kernel gave its
/// time before a snapshot may come after it.
fn told(inode: &InodeRow) -> impl PartialEq + use<> {
    (inode.changed, inode.modified, inode.links, inode.size, inode.mode, inode.uid, inode.gid)
}

fn difference(
    (old, new): (&Dataset, &Dataset),
    number: u64,
    before: Option<InodeRow>,
    after: Option<InodeRow>,
) -> Result<Option<Difference>, PoolError> {
    let (change, path, inode) = match (before, after) {
        (None, None) => return Ok(None),
        (None, Some(after)) => (FileChange::Added, path(new, number)?, after),
        (Some(before), None) => (FileChange::Removed, path(old, number)?, before),
        // That it was read, or where its frames are, is no change of a file.
        (Some(before), Some(after)) if told(&before) == told(&after) => return Ok(None),
        (Some(before), Some(after)) => {
            let (was, is) = (path(old, number)?, path(new, number)?);
            let change = if was == is {
                FileChange::Modified(i64::from(after.links) - i64::from(before.links))
            } else {
                FileChange::Renamed(was)
            };
            (change, is, after)
        }
    };
    let change = match change {
        // Of a directory it is how many directories are in it.
        FileChange::Modified(_) if inode.file_type() == Some(FileType::Directory) => FileChange::Modified(0),
        change => change,
    };
    let file_type = inode.file_type().unwrap_or(FileType::Regular);
    Ok(Some(Difference { change, path, file_type, changed: inode.changed }))
}

/// The path of an inode by its hint; by looking for one of its names where the hint's is gone.
fn path(dataset: &Dataset, number: u64) -> Result<Vec<u8>, PoolError> {
    let files = dataset.files();
    let known = |number: u64| files.path(&files.inode(number)).map_err(as_pool_error);
    if let Some(path) = known(number)? {
        return Ok(path);
    }
    let mut found: Option<(u64, Vec<u8>)> = None;
    let mut damage: Result<(), PoolError> = Ok(());
    files.look_at_table(|table| {
        table.scan(keys::of_kind(keys::ENTRY), &mut |key, row| {
            match name_of(number, key, row) {
                Ok(name) => found = name,
                Err(error) => damage = Err(error),
            }
            damage.is_ok() && found.is_none()
        })
    })?;
    damage?;
    let nameless = || format!("???/{number}").into_bytes();
    let Some((directory, name)) = found else { return Ok(nameless()) };
    let Some(mut path) = known(directory)? else { return Ok(nameless()) };
    if !path.is_empty() {
        path.push(b'/');
    }
    path.extend_from_slice(&name);
    Ok(path)
}

/// The directory and the name of an entry, where it names this inode.
fn name_of(number: u64, key: &[u8], row: &[u8]) -> Result<Option<(u64, Vec<u8>)>, PoolError> {
    let entry = Entry::decode(row)?;
    match Key::decode(key)? {
        Key::Entry { directory, .. } if entry.inode == number => Ok(Some((directory, entry.name.to_vec()))),
        _ => Ok(None),
    }
}
