//! What a cage knows of the files that it has to do with: those that are open, those that were
//! changed lately.
//!
//! Asked by every operation that changes something. Invariants:
//! * one entry for an identity, as long as anybody holds it: an entry is only given up while nobody
//!   else does;
//! * the state's lock is held from before a file is changed until its cost is booked, so that one
//!   change of a file is booked at a time;
//! * locks of two files are taken in the order of their identities ([`lock_both`]); a file's lock
//!   comes before those of the ledger and of the saved accounts, and nothing that waits for a door
//!   is done under it.

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

/// Entries of files that nobody has open: with them, changes from outside can be booked without a
/// recount.
const KEPT: usize = 8192;

/// A file.
pub(super) struct Inode {
    pub(super) id: FileId,
    state: Mutex<InodeState>,
    /// What the ledger holds for it, for a count, which cannot wait for the file's lock.
    pub(super) account: Mutex<Account>,
    /// How often it is open.
    pub(super) open: AtomicUsize,
    /// A count has booked it as it was found: what is known here is out of date.
    pub(super) stale: AtomicBool,
}

impl Inode {
    /// What is known of the file, locked.
    pub(super) fn lock(&self) -> MutexGuard<'_, InodeState> {
        let mut state = self.state.lock();
        if self.stale.swap(false, Ordering::AcqRel) {
            state.loaded = false;
        }
        state
    }
}

/// See [`Inode::account`].
#[derive(Clone, Copy, Default)]
pub(super) struct Account {
    pub(super) owner: Owner,
    pub(super) bytes: u64,
    pub(super) counted: bool,
    /// The number of the count before whose end it was touched last; 0 for never.
    pub(super) count: u64,
}

/// What announced writes will make of a file.
#[derive(Clone)]
pub(super) struct Announced {
    /// Its end.
    pub(super) end: u64,
    /// Blocks, as a range of bytes, that were booked for them last.
    pub(super) blocks: Range<u64>,
    /// When the last one was announced.
    pub(super) at: Duration,
}

/// What is known of a file.
#[derive(Default)]
pub(super) struct InodeState {
    /// The fields about cost are what the ledger holds.
    pub(super) loaded: bool,
    pub(super) node: Option<Node>,
    pub(super) kind: Option<Kind>,
    pub(super) owner: Owner,
    /// Booked for what is there.
    pub(super) cost: u64,
    /// Booked for announced writes that have not arrived.
    pub(super) pool: u64,
    /// Booked as a file.
    pub(super) counted: bool,
    /// The length as last seen or made.
    pub(super) size: u64,
    /// A range of whole blocks that are known to be booked: writing there costs nothing.
    pub(super) solid: Range<u64>,
    /// It keeps what is allocated behind its end.
    pub(super) kept: bool,
    /// Allocated ahead by the storage and not booked, as last seen: it stays for good where the end
    /// jumps over it.
    pub(super) ahead: u64,
    /// Its last name is gone.
    pub(super) gone: bool,
    pub(super) handles: usize,
    pub(super) writers: usize,
    /// Those of the writers that always write at the end.
    pub(super) appenders: usize,
    /// Those of the writers whose writes a door collects.
    pub(super) writeback: usize,
    /// It was written to at its end.
    pub(super) grown: bool,
    pub(super) announced: Option<Announced>,
    /// The generation of the saved accounts in which it was noted last.
    pub(super) generation: Option<u64>,
}

impl InodeState {
    /// All that is booked, bytes.
    pub(super) fn booked(&self) -> u64 {
        self.cost.saturating_add(self.pool)
    }

    /// Forgets what was known of the content: after holes may have been made or moved.
    pub(super) fn unsure(&mut self) {
        self.solid = 0..0;
        self.forget_announced_blocks();
    }

    /// Blocks that were booked for announced writes may be holes by now.
    pub(super) fn forget_announced_blocks(&mut self) {
        if let Some(announced) = &mut self.announced {
            announced.blocks = 0..0;
        }
    }

    /// These whole blocks are a hole now; answers how many bytes of them were known to be booked.
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

    /// These blocks are booked now.
    pub(super) fn add_solid(&mut self, blocks: Range<u64>) {
        if blocks.is_empty() {
            return;
        }
        let apart = blocks.start > self.solid.end || blocks.end < self.solid.start;
        self.solid = if self.solid.is_empty() || apart {
            // One range is remembered: the one that grows.
            blocks
        } else {
            self.solid.start.min(blocks.start)..self.solid.end.max(blocks.end)
        };
    }
}

/// All entries.
#[derive(Default)]
pub(super) struct Inodes {
    table: Mutex<Table>,
    /// How many ask that nothing is given up.
    pinned: AtomicUsize,
}

#[derive(Default)]
struct Table {
    entries: HashMap<FileId, Arc<Inode>>,
    /// In the order of making; the oldest are looked at first.
    order: VecDeque<FileId>,
}

impl Inodes {
    /// The entry of a file, made where there is none.
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

    /// The entry of a file, if there is one.
    pub(super) fn find(&self, id: &FileId) -> Option<Arc<Inode>> {
        self.table.lock().entries.get(id).cloned()
    }

    /// All entries, in no order.
    pub(super) fn all(&self) -> Vec<Arc<Inode>> {
        self.table.lock().entries.values().cloned().collect()
    }

    /// From now on, and until the answer is dropped, nothing is given up.
    pub(super) fn pin(self: &Arc<Inodes>) -> Pin {
        // Under the table's lock: whoever gives up at this moment has ended.
        let _table = self.table.lock();
        self.pinned.fetch_add(1, Ordering::Relaxed);
        Pin(Arc::clone(self))
    }
}

impl Table {
    /// Looks at the two oldest entries, where there are too many: so the table shrinks faster than
    /// it grows.
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

/// Keeps all entries; see [`Inodes::pin`].
pub(super) struct Pin(Arc<Inodes>);

impl Drop for Pin {
    fn drop(&mut self) {
        self.0.pinned.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The locks of one or two files, the second where it is another one.
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
