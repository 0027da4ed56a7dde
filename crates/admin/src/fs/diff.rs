//! `diff`: changes from a snapshot to a later one, or to now. Each is sent when it is found: a tree
//! of millions of changes needs no memory for them.

use nacre_pool::engine::changes::{self, FileChange};
use nacre_pool::rows::FileType;
use nacre_pool::{PoolError, Txg};
use serde::{Deserialize, Serialize};

use super::objects::{MountPointSetting, Object, Objects};
use super::refused;
use crate::progress::ResultLines;
use crate::reading::{COMPARED, MARK, ReadGuard};
use crate::{Imported, Kind, Mounts, Progress, Refusal};

/// A changed path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Difference {
    /// Kind of the change.
    pub how: How,
    /// The path, below the mount point where there is one; bytes, as names have no encoding.
    pub path: Vec<u8>,
    /// Type of the file.
    pub kind: FileKind,
    /// When its inode changed last, seconds since 1970 and nanoseconds.
    pub changed: (i64, u32),
}

/// Kind of a change of a path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum How {
    /// Content or attributes, or names in the directory. With the difference of its link counts.
    Modified(i64),
    /// Created.
    Added,
    /// Removed.
    Removed,
    /// Renamed from this path.
    Renamed(Vec<u8>),
}

/// File type as `diff -F` shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FileKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A block device.
    Block,
    /// A character device.
    Character,
    /// A named pipe.
    Fifo,
    /// A socket.
    Socket,
}

/// A snapshot: its file system and txg.
type Moment = (u64, Txg);

/// Sends each difference as a note in JSON.
pub(super) fn run(
    pool: &Imported,
    mounts: &dyn Mounts,
    from: &str,
    to: Option<&str>,
    progress: &mut dyn Progress,
) -> Result<(), Refusal> {
    let ((old, id, later, root), _held) = pool.reading.hold(|| {
        let mut objects = Objects::now(pool, mounts);
        let old = objects.snapshot("diff", from)?;
        let (id, later) = match to.map(|to| objects.open("diff", to)).transpose()? {
            None => (old.0, None),
            Some(Object::Filesystem(id)) => (id, None),
            Some(Object::Snapshot { of, txg }) => (of, Some(txg)),
            Some(Object::Bookmark { .. }) => {
                return Err(Refusal::new(Kind::Invalid, format!("cannot diff '{from}': a bookmark has no content")));
            }
        };
        related(&mut objects, from, old, (id, later))?;
        // Paths of a file system without a mount point start at its own root.
        let root = match objects.place(id)? {
            MountPointSetting::At(path) => path.into_os_string().into_encoded_bytes(),
            MountPointSetting::None | MountPointSetting::Legacy => Vec::new(),
        };
        Ok(((old, id, later, root), vec![(old.0, Some(old.1)), (id, later)]))
    })?;
    match later {
        Some(txg) => tell(pool, from, old, (id, txg), &root, progress),
        None => with_now(pool, mounts, id, from, |now| tell(pool, from, old, (id, now), &root, progress)),
    }
}

/// Checks that `old` is an earlier snapshot of the same file system, or of its chain of origins.
fn related(objects: &mut Objects<'_>, name: &str, old: Moment, new: (u64, Option<Txg>)) -> Result<(), Refusal> {
    let mut at = new;
    loop {
        if at.0 == old.0 && at.1.is_none_or(|later| old.1 < later) {
            return Ok(());
        }
        match objects.known(at.0)?.row.origin {
            // The origin itself is an earlier snapshot as well.
            Some((of, txg)) if of == old.0 && txg == old.1 => return Ok(()),
            Some((of, txg)) => at = (of, Some(txg)),
            None => {
                let why = format!("cannot diff '{name}': not an earlier snapshot from the same fs");
                return Err(Refusal::new(Kind::Invalid, why));
            }
        }
    }
}

/// Compares with the live file system through a temporary snapshot, so that it does not change meanwhile.
fn with_now(
    pool: &Imported,
    mounts: &dyn Mounts,
    id: u64,
    name: &str,
    look: impl FnOnce(Txg) -> Result<(), Refusal>,
) -> Result<(), Refusal> {
    let doing = format!("cannot diff '{name}'");
    if pool.read_only {
        let refusal = Refusal::new(Kind::Permission, format!("{doing}: the pool is imported read-only"));
        return Err(refusal.next("compare two snapshots"));
    }
    let part = format!("{COMPARED}{}", (pool.opening.entropy)());
    let mark = [(MARK.to_owned(), "on".to_owned())];
    let mut now = Txg::default();
    mounts.at_one_moment(&[id], &mut |over| {
        now = pool.pool.snapshot_at(&[(id, part.clone())], &mark, over).map_err(|error| refused(&doing, &error))?;
        Ok(())
    })?;
    let looked = hold_now(pool, mounts, (id, now), &doing).and_then(|_held| look(now));
    let gone = pool.pool.destroy_snapshots(id, &[&part], false).map_err(|error| refused(&doing, &error));
    looked.and(gone)
}

/// Protects the temporary snapshot from being destroyed; it may be gone already, destroyed with all others.
fn hold_now<'a>(pool: &'a Imported, mounts: &dyn Mounts, now: Moment, doing: &str) -> Result<ReadGuard<'a>, Refusal> {
    let there = || {
        let there = Objects::now(pool, mounts).catalog.snapshot_rows(now.0)?.iter().any(|(txg, _)| *txg == now.1);
        if !there {
            return Err(Refusal::new(Kind::Busy, format!("{doing}: the snapshot that was made for it was destroyed")));
        }
        Ok(((), vec![(now.0, Some(now.1))]))
    };
    pool.reading.hold(there).map(|((), held)| held)
}

fn tell(
    pool: &Imported,
    name: &str,
    old: Moment,
    new: Moment,
    root: &[u8],
    progress: &mut dyn Progress,
) -> Result<(), Refusal> {
    let mut lines = ResultLines::to(progress);
    let told = pool.pool.diff(old, new, &mut |difference| {
        let line =
            serde_json::to_string(&shown(difference, root)).map_err(|error| PoolError::Refused(error.to_string()))?;
        if lines.send(&line) { Ok(()) } else { Err(PoolError::Refused("nobody listens any more".to_owned())) }
    });
    let doing = format!("cannot diff '{name}'");
    lines.end(&doing)?;
    told.map_err(|error| refused(&doing, &error))
}

fn shown(difference: changes::Difference, root: &[u8]) -> Difference {
    let below = |path: Vec<u8>| {
        let root = root.strip_suffix(b"/").unwrap_or(root);
        [root, b"/", &path].concat()
    };
    Difference {
        how: match difference.change {
            FileChange::Modified(links) => How::Modified(links),
            FileChange::Added => How::Added,
            FileChange::Removed => How::Removed,
            FileChange::Renamed(from) => How::Renamed(below(from)),
        },
        path: below(difference.path),
        kind: match difference.file_type {
            FileType::Directory => FileKind::Directory,
            FileType::Symlink => FileKind::Symlink,
            FileType::BlockDevice => FileKind::Block,
            FileType::CharDevice => FileKind::Character,
            FileType::Fifo => FileKind::Fifo,
            FileType::Socket => FileKind::Socket,
            FileType::Regular => FileKind::File,
        },
        changed: (difference.changed.seconds, difference.changed.nanoseconds),
    }
}
