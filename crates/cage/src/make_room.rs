//! `when-full=drop-oldest`: removes whole rotated files first, oldest first; then the beginning of
//! the largest growing file.
//!
//! Called by operations that do not fit, without any file's lock; one at a time. Invariants:
//! nothing that matches `keep` is ever touched, no open file is removed, and no file with several
//! names is touched (another name may match `keep`); each removal is logged.

use super::{
    CageShared,
    inodes::InodeState,
    ledger::{Full, Owner},
};
use nacre_vfs::{
    AllocateMode, Attr, Caller, DirEntry, DirSink, Entry, Errno, FileId, Invalidation, Kind, Name, Node, OpenFile,
    OpenFlags, Result, Time, Whence,
};
use parking_lot::Mutex;
use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// Word for the log: the beginning of a file was cut off by COLLAPSE_RANGE.
const CUT: &str = "cut off";

/// A fruitless search that takes longer than this is not repeated at once.
const LONG: Duration = Duration::from_millis(100);

/// How long a FUSE front end gets to close a rotated file that no process has open any more:
/// close(2) returns before that.
const CLOSING: Duration = Duration::from_millis(50);

/// Patterns and counters of `when-full=drop-oldest`.
pub(super) struct Dropping {
    keep: Vec<String>,
    rotated: Vec<String>,
    one: Mutex<()>,
    /// Until this time, a long search has shown that nothing can be removed.
    nothing: Mutex<Duration>,
    files: AtomicU64,
    heads: AtomicU64,
    bytes: AtomicU64,
}

/// Checks the patterns of `keep` and `rotated`.
///
/// # Errors
/// Text for the user.
pub(crate) fn check_globs(keep: &[String], rotated: &[String]) -> Result<(), String> {
    for (key, glob) in keep.iter().map(|glob| ("keep", glob)).chain(rotated.iter().map(|glob| ("rotated", glob))) {
        let bad = |why: &str| format!("\"{key}\": the pattern \"{}\" is not understood: {why}", glob.escape_debug());
        if glob.is_empty() || glob.starts_with('!') {
            return Err(bad("it must not be empty, nor begin with an exclamation mark"));
        }
        fast_glob::validate(glob).map_err(|error| bad(&error.to_string()))?;
    }
    Ok(())
}

impl Dropping {
    /// Checks the globs.
    ///
    /// # Errors
    /// As [`check_globs`].
    pub(super) fn new(keep: &[String], rotated: &[String]) -> Result<Dropping, String> {
        check_globs(keep, rotated)?;
        let rotated: Vec<String> = if rotated.is_empty() {
            super::options::ROTATED.iter().map(|glob| (*glob).to_owned()).collect()
        } else {
            rotated.to_vec()
        };
        let zero = || AtomicU64::new(0);
        Ok(Dropping {
            keep: keep.to_vec(),
            rotated,
            one: Mutex::new(()),
            nothing: Mutex::default(),
            files: zero(),
            heads: zero(),
            bytes: zero(),
        })
    }

    /// Whether a file must not be touched: by its name, its path, or a directory above it.
    fn keeps(&self, path: &[u8]) -> bool {
        let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or(path);
        self.keep.iter().any(|glob| {
            let glob = glob.as_bytes();
            let above =
                path.iter().enumerate().filter(|(_, byte)| **byte == b'/').filter_map(|(end, _)| path.get(..end));
            let in_a_kept_one = || {
                above.clone().any(|directory| {
                    let name = directory.rsplit(|byte| *byte == b'/').next().unwrap_or(directory);
                    fast_glob::glob_match(glob, directory) || fast_glob::glob_match(glob, name)
                })
            };
            fast_glob::glob_match(glob, name) || fast_glob::glob_match(glob, path) || in_a_kept_one()
        })
    }

    fn is_rotated(&self, path: &[u8]) -> bool {
        let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or(path);
        self.rotated
            .iter()
            .any(|glob| fast_glob::glob_match(glob.as_bytes(), name) || fast_glob::glob_match(glob.as_bytes(), path))
    }

    pub(super) fn report(&self) -> super::options::Dropped {
        super::options::Dropped {
            files: self.files.load(Ordering::Relaxed),
            heads: self.heads.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
        }
    }
}

/// A rotated file that may be removed.
struct Rotated {
    parent: Node,
    path: Vec<u8>,
    id: FileId,
    mtime: Time,
}

/// A growing file whose beginning may be removed.
struct Growing {
    node: Node,
    path: Vec<u8>,
    attr: Attr,
}

/// Candidates found by a walk.
#[derive(Default)]
struct Removable {
    rotated: Vec<Rotated>,
    growing: Vec<Growing>,
    /// Rotated files that cannot be removed, as they are open.
    open: Vec<FileId>,
}

/// Collects a directory's entries, so that no work is done during the listing.
#[derive(Default)]
struct ListedFiles(Vec<(Vec<u8>, Entry)>);

impl DirSink for ListedFiles {
    fn push(&mut self, entry: DirEntry<'_>) -> bool {
        if let Some(file) = entry.entry {
            self.0.push((entry.name.bytes().to_vec(), file));
        }
        true
    }
}

impl CageShared {
    /// Removes the oldest data until `bytes` and a little more fit. Returns whether anything was
    /// freed.
    pub(super) fn make_room(&self, full: Full, owner: Owner, bytes: u64) -> bool {
        let _one = self.dropping.one.lock();
        if self.fits(full, owner, bytes) {
            // Another thread has made room meanwhile.
            return true;
        }
        let begun = self.clock.now();
        if begun < *self.dropping.nothing.lock() {
            return false;
        }
        let (mut fruitful, open) = self.drop_oldest(full, owner, bytes);
        let is_closed = |id: &FileId| self.inodes.find(id).is_none_or(|inode| inode.lock().handles == 0);
        let mut any_closed = || open.iter().any(is_closed);
        if !fruitful && !open.is_empty() && self.doors.closes.wait_closed(&open, CLOSING, &mut any_closed) {
            fruitful = self.drop_oldest(full, owner, bytes).0;
        }
        let now = self.clock.now();
        if !fruitful && now.saturating_sub(begun) >= LONG {
            // Avoids a search for every retried write(2).
            *self.dropping.nothing.lock() = now + now.saturating_sub(begun) * 4;
        }
        fruitful
    }

    /// Searches and removes once: returns whether anything was freed, and the rotated files that
    /// were skipped because they are open.
    fn drop_oldest(&self, full: Full, owner: Owner, bytes: u64) -> (bool, Vec<FileId>) {
        let wanted = bytes.saturating_add(self.spare(full, owner));
        let found = match self.find_droppable(full, owner) {
            Ok(found) => found,
            Err(error) => {
                tracing::warn!(cage = self.name, %error, "the cage cannot be searched for old files");
                return (false, Vec::new());
            }
        };
        let before = self.ledger.totals().sums.whole;
        for rotated in &found.rotated {
            if self.fits(full, owner, wanted) {
                break;
            }
            self.drop_whole(rotated);
        }
        if full != Full::Inodes {
            for growing in &found.growing {
                if self.fits(full, owner, wanted) {
                    break;
                }
                let missing = wanted.saturating_sub(self.room_for(full, owner));
                if let Err(error) = self.drop_head(growing, missing) {
                    tracing::warn!(cage = self.name, path = %growing.path.escape_ascii(), %error, "the beginning of a file cannot be removed");
                }
            }
        }
        let after = self.ledger.totals().sums.whole;
        (after.bytes < before.bytes || after.inodes < before.inodes, found.open)
    }

    fn room_for(&self, full: Full, owner: Owner) -> u64 {
        match full {
            Full::Whole | Full::Inodes => self.ledger.room(),
            Full::User | Full::Dir => self.ledger.room_of(owner),
        }
    }

    fn fits(&self, full: Full, owner: Owner, bytes: u64) -> bool {
        if full != Full::Inodes {
            return self.room_for(full, owner) >= bytes;
        }
        let totals = self.ledger.totals();
        totals.limits.inodes.is_none_or(|limit| totals.sums.whole.inodes < limit)
    }

    /// Extra room to free: a hundredth of the limit, so that not every write has to make room.
    fn spare(&self, full: Full, owner: Owner) -> u64 {
        let limits = self.ledger.limits();
        let limit = match full {
            Full::Whole | Full::Inodes => limits.bytes,
            Full::User => limits.users.get(&owner.uid).copied(),
            Full::Dir => owner.group.and_then(|group| limits.dirs.get(group).copied()),
        };
        limit.unwrap_or(0) / 100
    }

    /// Whether freeing a file's space helps against the exceeded limit.
    fn helps(full: Full, owner: Owner, file: Owner) -> bool {
        match full {
            Full::Whole | Full::Inodes => true,
            Full::User => file.uid == owner.uid,
            Full::Dir => file.group == owner.group,
        }
    }

    fn find_droppable(&self, full: Full, owner: Owner) -> Result<Removable> {
        let mut found = Removable::default();
        let mut waiting = vec![(self.below.root()?.node, Vec::new())];
        while let Some((directory, path)) = waiting.pop() {
            let mut listed = ListedFiles::default();
            if let Err(error) = self.below.readdir(&Caller::ROOT, &directory, 0, true, &mut listed) {
                tracing::debug!(%error, path = %path.escape_ascii(), "a directory cannot be searched for old files");
                continue;
            }
            for (name, entry) in listed.0 {
                let mut path = path.clone();
                if !path.is_empty() {
                    path.push(b'/');
                }
                path.extend_from_slice(&name);
                match entry.attr.kind {
                    Kind::Directory => waiting.push((entry.node, path)),
                    Kind::File => self.judge(&mut found, &directory, entry, path, (full, owner)),
                    _ => {}
                }
            }
        }
        found.rotated.sort_by_key(|rotated| rotated.mtime);
        found.growing.sort_by_key(|growing| std::cmp::Reverse(self.rule.found(&growing.attr)));
        Ok(found)
    }

    fn judge(&self, found: &mut Removable, parent: &Node, entry: Entry, path: Vec<u8>, (full, owner): (Full, Owner)) {
        let file = Owner { uid: entry.attr.uid, group: self.group_of_path(&path, entry.attr.kind) };
        if self.dropping.keeps(&path) || !CageShared::helps(full, owner, file) {
            return;
        }
        let known = self.inodes.find(&entry.attr.id);
        let (open, grown) = known.map_or((false, false), |inode| {
            let state = inode.lock();
            // Removing an open file would only remove its name.
            (state.handles > 0, state.grown)
        });
        if self.dropping.is_rotated(&path) {
            if open {
                found.open.push(entry.attr.id);
            } else if entry.attr.nlink == 1 {
                found.rotated.push(Rotated {
                    parent: parent.clone(),
                    path,
                    id: entry.attr.id,
                    mtime: entry.attr.mtime,
                });
            }
        } else if grown && entry.attr.nlink == 1 && self.rule.found(&entry.attr) > self.rule.unit {
            found.growing.push(Growing { node: entry.node, path, attr: entry.attr });
        }
    }

    fn drop_whole(&self, rotated: &Rotated) {
        let name = rotated.path.rsplit(|byte| *byte == b'/').next().unwrap_or(&rotated.path);
        let Ok(name) = Name::new(name) else { return };
        let before = self.ledger.room();
        // The walk took time: the name may belong to another file by now, or the file may have been
        // opened.
        let still = |state: &InodeState, attr: &Attr| attr.id == rotated.id && attr.nlink == 1 && state.handles == 0;
        match self.remove_if(&Caller::ROOT, &rotated.parent, name, false, still) {
            Ok(()) => {
                let bytes = self.ledger.room().saturating_sub(before);
                self.dropping.files.fetch_add(1, Ordering::Relaxed);
                self.dropping.bytes.fetch_add(bytes, Ordering::Relaxed);
                tracing::info!(cage = self.name, path = %rotated.path.escape_ascii(), bytes, "removed to make room");
                if let Ok(parent) = self.below.id(&rotated.parent) {
                    self.doors.tell(Invalidation::Entry { parent, name: name.bytes().into() });
                }
            }
            // Removed by another process meanwhile.
            Err(Errno::ENOENT | Errno::ESTALE) => {}
            Err(error) => {
                tracing::warn!(cage = self.name, path = %rotated.path.escape_ascii(), %error, "cannot be removed to make room")
            }
        }
    }

    /// Frees the beginning of a file: about `wanted` bytes of stored data, and never its last
    /// block.
    fn drop_head(&self, growing: &Growing, wanted: u64) -> Result<()> {
        let inode = self.inodes.get(growing.attr.id);
        let file = self.below.open(&Caller::ROOT, &growing.node, OpenFlags::READ_WRITE)?;
        let mut state = inode.lock();
        let attr = self.below.getattr(&Caller::ROOT, &growing.node, Some(&*file))?;
        if attr.id != growing.attr.id || attr.nlink > 1 || attr.size <= self.rule.unit {
            return Ok(());
        }
        self.learn(&inode, &mut state, &growing.node, &attr);
        let booked = state.cost;
        let start = file.seek(0, Whence::Data).unwrap_or(0);
        let last = self.rule.floor(attr.size - 1);
        let end = self.rule.whole(start.saturating_add(wanted)).min(last);
        if end <= self.rule.floor(start) {
            return Ok(());
        }
        {
            let _changing = self.locks.changing.read();
            self.touch(&inode, &mut state);
        }
        let result = self.cut_head(&state, &*file, start, end);
        match &result {
            Ok(how) => {
                self.emptied(&inode, &mut state, 0, end);
                if *how == CUT {
                    // The remaining content has moved.
                    let moved = |at: u64| at.saturating_sub(end);
                    state.solid = moved(state.solid.start)..moved(state.solid.end);
                    state.size = moved(state.size);
                }
            }
            Err(_) => state.unsure(),
        }
        self.refresh(&inode, &mut state, &growing.node, Some(&*file));
        let freed = booked.saturating_sub(state.cost);
        drop(state);
        let how = result?;
        self.dropping.heads.fetch_add(1, Ordering::Relaxed);
        self.dropping.bytes.fetch_add(freed, Ordering::Relaxed);
        tracing::info!(cage = self.name, path = %growing.path.escape_ascii(), bytes = freed, how, "the beginning was removed to make room");
        self.doors.tell(Invalidation::Content { id: inode.id });
        Ok(())
    }

    /// Removes `start..end` from a file. The file becomes shorter where that misleads no writer:
    /// all writers append, and no kernel caches the length for write-back. Otherwise a hole is
    /// made.
    fn cut_head(&self, state: &InodeState, file: &dyn OpenFile, start: u64, end: u64) -> Result<&'static str> {
        let at_its_end = state.writers == state.appenders && !self.writes_back();
        if at_its_end && start == 0 {
            match file.allocate(AllocateMode(AllocateMode::COLLAPSE_RANGE), 0, end) {
                Err(Errno::EOPNOTSUPP | Errno::EINVAL | Errno::ENOSYS | Errno::EPERM) => {}
                other => return other.map(|()| CUT),
            }
        }
        file.allocate(AllocateMode(AllocateMode::PUNCH_HOLE | AllocateMode::KEEP_SIZE), 0, end).map(|()| "made a hole")
    }
}
