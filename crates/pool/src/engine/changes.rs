//! Changes between two snapshots, with paths: `fs diff`.
//!
//! Both trees are walked together, and nodes that they share are not read: the cost is that of the
//! changes. Only inode rows are compared, since every change of a file changes a time in its inode.
//! Invariant: changes are reported as they are found, so memory does not grow with their number.

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
    /// Its content, its attributes, or the names in it. With the number of hard links that it
    /// gained.
    Modified(i64),
    /// It was created.
    Added,
    /// It was removed.
    Removed,
    /// It was renamed; this is its old path.
    Renamed(Vec<u8>),
}

/// A file that has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The kind of change.
    pub change: FileChange,
    /// Path below the root of the file system: the old one of a removed file, otherwise the new
    /// one. Empty for the root itself.
    pub path: Vec<u8>,
    /// Its type.
    pub file_type: FileType,
    /// Time of the inode's last change (ctime).
    pub changed: Timestamp,
}

/// A snapshot: its dataset's number, and the txg in which it was taken.
type Moment = (u64, Txg);

impl Pool {
    /// Reports the differences between an earlier and a later snapshot to `tell`. They may be
    /// snapshots of different datasets, such as a clone and its origin.
    ///
    /// # Errors
    /// Errors of the store; a snapshot that is not there; errors that `tell` returns.
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
                // Inode rows sort before all others except the header.
                _ => break,
            };
            let inode = |value: Option<&[u8]>| value.map(InodeRow::decode).transpose();
            let (before, after) = (inode(row.old)?, inode(row.new)?);
            // An inode without a name belongs to the process that has it open.
            let (before, after) = (before.filter(|inode| inode.links > 0), after.filter(|inode| inode.links > 0));
            if let Some(difference) = difference((&old, &new), number, before, after)? {
                tell(difference)?;
            }
        }
        Ok(())
    }
}

/// The fields of an inode that differ when the file has changed. The time of change does, as a
/// rule, but the kernel may write a time from before a snapshot back after it.
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
        // A read, or another address of its frames, is no change of a file.
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
        // A directory's link count is the number of directories in it.
        FileChange::Modified(_) if inode.file_type() == Some(FileType::Directory) => FileChange::Modified(0),
        change => change,
    };
    let file_type = inode.file_type().unwrap_or(FileType::Regular);
    Ok(Some(Difference { change, path, file_type, changed: inode.changed }))
}

/// The path of an inode by its hint; by a search for one of its names if the hint's name is gone.
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

/// The directory and the name of an entry, if it names this inode.
fn name_of(number: u64, key: &[u8], row: &[u8]) -> Result<Option<(u64, Vec<u8>)>, PoolError> {
    let entry = Entry::decode(row)?;
    match Key::decode(key)? {
        Key::Entry { directory, .. } if entry.inode == number => Ok(Some((directory, entry.name.to_vec()))),
        _ => Ok(None),
    }
}
