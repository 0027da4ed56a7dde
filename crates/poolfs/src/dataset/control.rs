//! The directory `.zfs` of a file system, with its snapshots.
//!
//! Its names are those of the catalog, looked up each time; an opened tree is kept open until its
//! snapshot is forgotten. Invariant: a tree in use is in the table until its snapshot is forgotten,
//! so that forgetting ends all use of it.

use super::mounted_tree::{self, MountedTree, NodeKind};
use super::translate::errno;
use nacre_layers::ends::Ends;
use nacre_pool::engine::Pool;
use nacre_vfs::{
    Attr, DirEntry, DirSink, Entry, Errno, FileId, GivenNumbers, Kind, Name, Node, Protection, Result, Time,
};
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    sync::{Arc, OnceLock},
};

/// Name of the directory in the root of a file system.
pub(super) const NAME: &[u8] = b".zfs";
/// Name of its only entry.
pub(super) const SNAPSHOT: &[u8] = b"snapshot";
/// Listing position after the only name of `.zfs`.
const LISTED: u64 = 256;
/// Number of unused trees that are kept open.
const IDLE: usize = 64;

/// Creates, destroys and renames snapshots of one dataset.
pub trait SnapshotDirectory: Send + Sync {
    /// Takes a snapshot, with all earlier writes.
    ///
    /// # Errors
    /// EEXIST, ENOSPC, EINVAL for an impossible name, EPERM.
    fn take(&self, name: &str) -> Result<()>;

    /// Destroys a snapshot; with `force` even while files of it are open.
    ///
    /// # Errors
    /// ENOENT, EBUSY if it is in use, held or has clones.
    fn destroy(&self, name: &str, force: bool) -> Result<()>;

    /// Renames a snapshot.
    ///
    /// # Errors
    /// ENOENT, EEXIST.
    fn rename(&self, name: &str, new: &str) -> Result<()>;
}

/// The directories above snapshots; see the head of this file.
pub(super) struct Control {
    pool: Arc<Pool>,
    dataset: u64,
    /// Names of snapshots are matched without regard to case, like those of files.
    insensitive: bool,
    directory: OnceLock<Box<dyn SnapshotDirectory>>,
    /// The open trees, by their numbers.
    open: Mutex<HashMap<u64, Arc<MountedTree>>>,
    /// The snapshot of each tree number, as long as the file system is mounted.
    trees: Mutex<HashMap<u64, nacre_pool::Txg>>,
    /// Ends of listings of snapshots.
    ends: Ends,
    /// Records the numbers of trees for a process that takes over later.
    noted: OnceLock<Arc<dyn GivenNumbers>>,
}

impl Control {
    pub(super) fn new(pool: Arc<Pool>, dataset: u64, insensitive: bool) -> Control {
        Control {
            pool,
            dataset,
            insensitive,
            directory: OnceLock::new(),
            open: Mutex::default(),
            trees: Mutex::default(),
            ends: Ends::new(u64::MAX),
            noted: OnceLock::new(),
        }
    }

    /// Records the tree numbers of snapshots from now on; recorded ones are kept.
    pub(super) fn note_in(&self, given: &Arc<dyn GivenNumbers>) {
        let own = given.all().into_iter().filter(|[dataset, ..]| *dataset == self.dataset);
        self.trees.lock().extend(own.map(|[_, txg, tree]| (tree, nacre_pool::Txg(txg))));
        // Set once, before anything is mounted.
        let _ = self.noted.set(Arc::clone(given));
    }

    pub(super) fn carry_out(&self, directory: Box<dyn SnapshotDirectory>) {
        // Set once, before anything is mounted.
        let _ = self.directory.set(directory);
    }

    /// Returns the entry of one of the two directories.
    pub(super) fn entry(&self, current: &MountedTree, kind: &NodeKind) -> Result<Entry> {
        let (ino, mode, kind) = match kind {
            NodeKind::Control => (mounted_tree::CONTROL, 0o555, NodeKind::Control),
            // The owner of the process may create and destroy snapshots.
            NodeKind::Snapshots if self.directory.get().is_some() => {
                (mounted_tree::SNAPSHOTS, 0o755, NodeKind::Snapshots)
            }
            NodeKind::Snapshots => (mounted_tree::SNAPSHOTS, 0o555, NodeKind::Snapshots),
            NodeKind::File(_) => return Err(Errno::EIO),
        };
        let files = current.files.files();
        let root = files.attributes(&files.root()).map_err(errno)?;
        let time = Time { sec: root.changed.seconds, nsec: root.changed.nanoseconds };
        let attr = Attr {
            id: FileId { fs: self.dataset, ino, generation: 0 },
            kind: Kind::Directory,
            mode,
            nlink: 2,
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            rdev_major: 0,
            rdev_minor: 0,
            size: 2,
            blocks: 0,
            blksize: 4096,
            atime: time,
            mtime: time,
            ctime: time,
            btime: Some(time),
            protection: Protection::None,
        };
        Ok(Entry { attr, node: Node::new(Arc::new(kind)) })
    }

    /// Returns the tree of the snapshot with this name.
    pub(super) fn snapshot_tree(&self, name: Name<'_>) -> Result<Arc<MountedTree>> {
        // Names of snapshots are ASCII.
        let name = std::str::from_utf8(name.bytes()).map_err(|_| Errno::ENOENT)?;
        let find = |name: &str| self.pool.find_snapshot(self.dataset, name).map_err(|error| errno(error.into()));
        match find(name)? {
            Some(txg) => self.tree_at(name, txg),
            None => {
                let name = self.spelled(name)?;
                self.tree_at(&name, find(&name)?.ok_or(Errno::ENOENT)?)
            }
        }
    }

    /// Returns the exact name of the matching snapshot; the name itself if there is none.
    fn spelled(&self, name: &str) -> Result<String> {
        if self.insensitive
            && self.pool.find_snapshot(self.dataset, name).map_err(|error| errno(error.into()))?.is_none()
        {
            let rows = self.pool.snapshot_rows(self.dataset).map_err(|error| errno(error.into()))?;
            if let Some((_, row)) = rows.into_iter().find(|(_, row)| row.name.eq_ignore_ascii_case(name)) {
                return Ok(row.name);
            }
        }
        Ok(name.to_owned())
    }

    /// Returns the number of a snapshot's tree: stable and unique.
    fn tree(&self, txg: nacre_pool::Txg) -> u64 {
        let mut trees = self.trees.lock();
        let mut tree = mounted_tree::tree_of(txg);
        while trees.get(&tree).is_some_and(|other| *other != txg) {
            tree = mounted_tree::tree_after(tree);
        }
        if trees.insert(tree, txg).is_none() {
            self.noted.get().iter().for_each(|noted| noted.give([self.dataset, txg.0, tree]));
        }
        tree
    }

    /// Returns the tree with this number, which may not have been used since the start.
    pub(super) fn look_up_tree(&self, tree: u64) -> Result<Arc<MountedTree>> {
        let known = self.trees.lock().contains_key(&tree);
        if !known {
            self.number_all()?;
        }
        self.snapshot_by_tree(tree)
    }

    /// Assigns numbers to all snapshots, in their order, as after every start; returns the numbers.
    pub(super) fn number_all(&self) -> Result<Vec<u64>> {
        let rows = self.pool.snapshot_rows(self.dataset).map_err(|error| errno(error.into()))?;
        Ok(rows.into_iter().map(|(txg, _)| self.tree(txg)).collect())
    }

    /// Returns the snapshot whose tree has this number, if it was assigned.
    pub(super) fn snapshot_of(&self, tree: u64) -> Option<nacre_pool::Txg> {
        self.trees.lock().get(&tree).copied()
    }

    /// Returns the tree with this number.
    pub(super) fn snapshot_by_tree(&self, tree: u64) -> Result<Arc<MountedTree>> {
        if let Some(mounted) = self.open.lock().get(&tree) {
            return Ok(Arc::clone(mounted));
        }
        // The kernel has got the number from here.
        let txg = self.trees.lock().get(&tree).copied().ok_or(Errno::ESTALE)?;
        let rows = self.pool.snapshot_rows(self.dataset).map_err(|error| errno(error.into()))?;
        let (_, row) = rows.into_iter().find(|(at, _)| *at == txg).ok_or(Errno::ESTALE)?;
        self.tree_at(&row.name, txg)
    }

    fn tree_at(&self, name: &str, txg: nacre_pool::Txg) -> Result<Arc<MountedTree>> {
        let mut open = self.open.lock();
        let tree = self.tree(txg);
        if let Some(mounted) = open.get(&tree).filter(|mounted| mounted.is(name, txg)) {
            return Ok(Arc::clone(mounted));
        }
        let files = self.pool.snapshot_files(self.dataset, txg).map_err(|error| errno(error.into()))?;
        if open.len() >= IDLE {
            open.retain(|_, mounted| Arc::strong_count(mounted) > 1);
        }
        let mounted = Arc::new(MountedTree::new(files, Some((name.to_owned(), txg)), tree));
        open.insert(tree, Arc::clone(&mounted));
        Ok(mounted)
    }

    /// Closes a snapshot; false if files of it are open, unless `force` is set.
    pub(super) fn forget(&self, txg: nacre_pool::Txg, force: bool) -> bool {
        let mut open = self.open.lock();
        let tree = self.tree(txg);
        let Some(mounted) = open.get(&tree) else { return true };
        if mounted.is_open() && !force {
            return false;
        }
        mounted.end();
        open.remove(&tree);
        true
    }

    /// Returns the name of a snapshot, and the range of its files' numbers as users see them, if it
    /// was accessed.
    pub(super) fn numbers_of(&self, txg: nacre_pool::Txg) -> Option<(String, (u64, u64))> {
        let open = self.open.lock();
        let mounted = open.get(&self.tree(txg))?;
        let (name, _) = mounted.snapshot.as_ref()?;
        Some((name.clone(), (mounted.shown(0), mounted.shown((1 << mounted_tree::SHIFT) - 1))))
    }

    /// Whether files of any snapshot are open.
    pub(super) fn is_open(&self) -> bool {
        self.open.lock().values().any(|mounted| mounted.is_open())
    }

    /// Closes all snapshots.
    pub(super) fn end(&self) {
        self.open.lock().drain().for_each(|(_, mounted)| mounted.end());
    }

    fn verbs(&self) -> Result<&dyn SnapshotDirectory> {
        self.directory.get().map(|directory| &**directory).ok_or(Errno::EROFS)
    }

    pub(super) fn take(&self, name: Name<'_>) -> Result<()> {
        self.verbs()?.take(text(name)?)
    }

    pub(super) fn destroy(&self, name: Name<'_>, force: bool) -> Result<()> {
        self.verbs()?.destroy(&self.spelled(text(name)?)?, force)
    }

    pub(super) fn rename(&self, name: Name<'_>, new: Name<'_>) -> Result<()> {
        self.verbs()?.rename(&self.spelled(text(name)?)?, text(new)?)
    }

    /// Adds `.zfs` to a listing of the root; false if there is no room for it.
    pub(super) fn list_itself(
        &self,
        current: &MountedTree,
        next: u64,
        attributes: bool,
        sink: &mut dyn DirSink,
    ) -> Result<bool> {
        let entry = if attributes { Some(self.entry(current, &NodeKind::Control)?) } else { None };
        Ok(sink.push(DirEntry {
            name: Name::new(NAME)?,
            ino: mounted_tree::CONTROL,
            kind: Some(Kind::Directory),
            next,
            entry,
        }))
    }

    /// Lists `.zfs`.
    pub(super) fn list(
        &self,
        current: &MountedTree,
        from: u64,
        attributes: bool,
        sink: &mut dyn DirSink,
    ) -> Result<()> {
        if from == 0 {
            let entry = if attributes { Some(self.entry(current, &NodeKind::Snapshots)?) } else { None };
            sink.push(DirEntry {
                name: Name::new(SNAPSHOT)?,
                ino: mounted_tree::SNAPSHOTS,
                kind: Some(Kind::Directory),
                next: LISTED,
                entry,
            });
        }
        Ok(())
    }

    /// Lists `.zfs/snapshot`, in the order in which snapshots were taken: those that existed when
    /// the listing began.
    pub(super) fn list_snapshots(
        &self,
        from: u64,
        attributes: bool,
        root_of: &dyn Fn(&Arc<MountedTree>) -> Result<Entry>,
        sink: &mut dyn DirSink,
    ) -> Result<()> {
        let snapshots = self.pool.snapshot_rows(self.dataset).map_err(|error| errno(error.into()))?;
        let span = self.ends.enter(from, || snapshots.iter().map(|(txg, _)| txg.0 + 1).max().unwrap_or(0));
        let mut some = false;
        for (txg, row) in snapshots.into_iter().filter(|(txg, _)| (span.behind + 1..span.end).contains(&txg.0)) {
            some = true;
            let entry = if attributes { Some(root_of(&self.tree_at(&row.name, txg)?)?) } else { None };
            // Every root directory has the same number in its tree.
            let ino = entry
                .as_ref()
                .map_or_else(|| self.tree(txg) << mounted_tree::SHIFT | mounted_tree::ROOT, |entry| entry.attr.id.ino);
            if !sink.push(DirEntry {
                name: Name::new(row.name.as_bytes())?,
                ino,
                kind: Some(Kind::Directory),
                next: span.after(txg.0),
                entry,
            }) {
                break;
            }
        }
        if !some {
            self.ends.ended(&span);
        }
        Ok(())
    }
}

fn text(name: Name<'_>) -> Result<&str> {
    std::str::from_utf8(name.bytes()).map_err(|_| Errno::EINVAL)
}
