//! The inode table of a cage: files that are open, and files that were changed lately.
//!
//! Used by every operation that changes something. Invariants:
//! * one entry per identity, as long as any thread holds it: an entry is evicted only while the
//!   table holds the last reference;
//! * the state's lock is held from before a file is changed until its cost is booked, so that
//!   changes of a file are booked one at a time;
//! * locks of two files are taken in the order of their identities ([`lock_both`]); a file's lock
//!   comes before the locks of the ledger and of the saved accounts, and no wait for a FUSE front
//!   end happens under it.

use super::ledger::Owner;
use nacre_vfs::{FileId, Kind, Node};
use parking_lot::{Mutex, MutexGuard};
use std::{
    collections::{HashMap, VecDeque},
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

/// Number of entries kept for files that are not open: with an entry, a change from outside can be
/// booked without a recount.
const KEPT: usize = 8192;

/// Entry of a file.
pub(super) struct Inode {
    pub(super) id: FileId,
    state: Mutex<InodeState>,
    /// The file's booked cost, for a recount, which cannot wait for the file's lock.
    pub(super) account: Mutex<Account>,
    /// Number of open files.
    pub(super) open: AtomicUsize,
    /// Set when a recount has booked the file by its attributes: the state here is out of date.
    pub(super) stale: AtomicBool,
}

impl Inode {
    /// Whether somebody has locked the file's state.
    #[cfg(test)]
    pub(super) fn is_locked(&self) -> bool {
        self.state.is_locked()
    }

    /// Locks the file's state.
    pub(super) fn lock(&self) -> MutexGuard<'_, InodeState> {
        let mut state = self.state.lock();
        if self.stale.swap(false, Ordering::AcqRel) {
            state.loaded = false;
        }
        state
    }
}

/// The ledger's view of one file; see [`Inode::account`].
#[derive(Clone, Copy, Default)]
pub(super) struct Account {
    pub(super) owner: Owner,
    pub(super) bytes: u64,
    pub(super) counted: bool,
    /// Number of the recount during which it was last changed; 0 for never.
    pub(super) count: u64,
}

/// State of a file after all reserved writes.
#[derive(Clone)]
pub(super) struct Announced {
    /// File size after them.
    pub(super) end: u64,
    /// Blocks booked for the last of them, as a range of bytes.
    pub(super) blocks: Range<u64>,
    /// Time of the last reservation.
    pub(super) at: Duration,
}

/// State of a file as the cage knows it.
#[derive(Default)]
pub(super) struct InodeState {
    /// True if the fields about cost match the ledger.
    pub(super) loaded: bool,
    pub(super) node: Option<Node>,
    pub(super) kind: Option<Kind>,
    pub(super) owner: Owner,
    /// Bytes booked for existing blocks.
    pub(super) cost: u64,
    /// Bytes booked for reserved writes that have not arrived.
    pub(super) pool: u64,
    /// Booked as one file.
    pub(super) counted: bool,
    /// The size as last seen or set.
    pub(super) size: u64,
    /// A range of whole blocks that are known to be booked: writing there costs nothing.
    pub(super) solid: Range<u64>,
    /// It keeps allocated blocks beyond its end.
    pub(super) kept: bool,
    /// It has a size of extents (XFS); unknown until it matters.
    pub(super) has_extent_size: Option<bool>,
    /// Bytes preallocated by the storage and not booked, as last seen: they become permanent where
    /// the end jumps over them.
    pub(super) ahead: u64,
    /// Its last name has been removed.
    pub(super) gone: bool,
    pub(super) handles: usize,
    pub(super) writers: usize,
    /// Number of writers that only append.
    pub(super) appenders: usize,
    /// Number of writers with write-back.
    pub(super) writeback: usize,
    /// It has been extended by writes.
    pub(super) grown: bool,
    pub(super) announced: Option<Announced>,
    /// Generation of the saved accounts in which it was recorded last.
    pub(super) generation: Option<u64>,
}

impl InodeState {
    /// All that is booked, bytes.
    pub(super) fn booked(&self) -> u64 {
        self.cost.saturating_add(self.pool)
    }

    /// Forgets the known blocks: after holes may have been made or moved.
    pub(super) fn unsure(&mut self) {
        self.solid = 0..0;
        self.forget_announced_blocks();
    }

    /// Forgets the blocks booked for reserved writes: they may be holes by now.
    pub(super) fn forget_announced_blocks(&mut self) {
        if let Some(announced) = &mut self.announced {
            announced.blocks = 0..0;
        }
    }

    /// Records that these whole blocks are a hole now; returns how many bytes of them were known to
    /// be booked.
    pub(super) fn take_solid(&mut self, blocks: &Range<u64>) -> u64 {
        self.forget_announced_blocks();
        let solid = self.solid.clone();
        let taken = blocks.end.min(solid.end).saturating_sub(blocks.start.max(solid.start));
        if taken > 0 {
            let (before, behind) = (solid.start..blocks.start.max(solid.start), blocks.end.min(solid.end)..solid.end);
            self.solid = if behind.end - behind.start >= before.end - before.start { behind } else { before };
        }
        taken
    }

    /// Records that these blocks are booked now.
    pub(super) fn add_solid(&mut self, blocks: Range<u64>) {
        if blocks.is_empty() {
            return;
        }
        let apart = blocks.start > self.solid.end || blocks.end < self.solid.start;
        self.solid = if self.solid.is_empty() || apart {
            // Only one range is remembered: the one that grows.
            blocks
        } else {
            self.solid.start.min(blocks.start)..self.solid.end.max(blocks.end)
        };
    }
}

/// The inode table.
#[derive(Default)]
pub(super) struct Inodes {
    table: Mutex<Table>,
    /// Number of pins that forbid eviction.
    pinned: AtomicUsize,
}

#[derive(Default)]
struct Table {
    entries: HashMap<FileId, Arc<Inode>>,
    /// In the order of creation; the oldest are candidates for eviction first.
    order: VecDeque<FileId>,
}

impl Inodes {
    /// Returns the entry of a file, and creates a missing one.
    pub(super) fn get(&self, id: FileId) -> Arc<Inode> {
        let mut table = self.table.lock();
        if let Some(known) = table.entries.get(&id) {
            return Arc::clone(known);
        }
        if self.pinned.load(Ordering::Relaxed) == 0 {
            table.give_up();
        }
        let inode = Arc::new(Inode {
            id,
            state: Mutex::default(),
            account: Mutex::default(),
            open: AtomicUsize::new(0),
            stale: AtomicBool::new(false),
        });
        table.entries.insert(id, Arc::clone(&inode));
        table.order.push_back(id);
        inode
    }

    /// Returns the entry of a file, if there is one.
    pub(super) fn find(&self, id: &FileId) -> Option<Arc<Inode>> {
        self.table.lock().entries.get(id).cloned()
    }

    /// Returns all entries, in no order.
    pub(super) fn all(&self) -> Vec<Arc<Inode>> {
        self.table.lock().entries.values().cloned().collect()
    }

    /// Forbids eviction until the returned pin is dropped.
    pub(super) fn pin(self: &Arc<Inodes>) -> Pin {
        // Under the table's lock: an eviction in progress has ended.
        let _table = self.table.lock();
        self.pinned.fetch_add(1, Ordering::Relaxed);
        Pin(Arc::clone(self))
    }
}

impl Table {
    /// Tries to evict the two oldest entries of a table that is too large: so it shrinks faster
    /// than it grows.
    fn give_up(&mut self) {
        for _ in 0..2 {
            if self.order.len() < KEPT {
                return;
            }
            let Some(id) = self.order.pop_front() else { return };
            // Open files hold their entry.
            if self.entries.get(&id).is_some_and(|inode| Arc::strong_count(inode) == 1) {
                self.entries.remove(&id);
            } else {
                self.order.push_back(id);
            }
        }
    }
}

/// Forbids eviction while it exists; see [`Inodes::pin`].
pub(super) struct Pin(Arc<Inodes>);

impl Drop for Pin {
    fn drop(&mut self) {
        self.0.pinned.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Locks of one or two files; no second one if both are the same file.
pub(super) struct Both<'a> {
    pub(super) first: MutexGuard<'a, InodeState>,
    pub(super) second: Option<MutexGuard<'a, InodeState>>,
}

/// Locks two files in the order of their identities.
pub(super) fn lock_both<'a>(first: &'a Inode, second: Option<&'a Inode>) -> Both<'a> {
    match second.filter(|second| second.id != first.id) {
        None => Both { first: first.lock(), second: None },
        Some(second) if first.id < second.id => {
            let first = first.lock();
            Both { first, second: Some(second.lock()) }
        }
        Some(second) => {
            let second = second.lock();
            Both { first: first.lock(), second: Some(second) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(ino: u64) -> FileId {
        FileId { fs: 1, ino, generation: 0 }
    }

    #[test]
    fn closed_files_are_given_up_and_open_ones_kept() {
        let inodes = Arc::new(Inodes::default());
        let open = inodes.get(id(0));
        for ino in 1..3 * KEPT as u64 {
            inodes.get(id(ino));
        }
        assert!(inodes.find(&id(0)).is_some_and(|found| Arc::ptr_eq(&found, &open)));
        assert!(inodes.find(&id(1)).is_none());
        assert!(inodes.all().len() <= KEPT + 1, "{}", inodes.all().len());
        let pin = inodes.pin();
        for ino in 1..3 * KEPT as u64 {
            inodes.get(id(ino));
        }
        assert_eq!(inodes.all().len(), 3 * KEPT);
        drop(pin);
        inodes.get(id(u64::MAX));
        assert_eq!(inodes.all().len(), 3 * KEPT - 1, "two looked at, one of them open; one new");
    }

    #[test]
    fn known_blocks_grow_where_they_touch() {
        let mut state = InodeState::default();
        state.add_solid(4096..8192);
        state.add_solid(8192..12288);
        assert_eq!(state.solid, 4096..12288);
        state.add_solid(0..4096);
        assert_eq!(state.solid, 0..12288);
        state.add_solid(0..0);
        assert_eq!(state.solid, 0..12288);
        state.add_solid(1 << 20..2 << 20);
        assert_eq!(state.solid, 1 << 20..2 << 20);
        assert_eq!((state.take_solid(&(0..1 << 20)), state.take_solid(&(1 << 20..(1 << 20) + 4096))), (0, 4096));
        assert_eq!(state.solid, (1 << 20) + 4096..2 << 20);
        assert_eq!(state.take_solid(&((2 << 20) - 4096..3 << 20)), 4096);
        assert_eq!(state.solid, (1 << 20) + 4096..(2 << 20) - 4096);
        assert_eq!(state.take_solid(&(0..u64::MAX)), (1 << 20) - 8192);
        assert!(state.solid.is_empty());
    }
}
