//! The cache of whole listings, under a budget, while their directory does not change.
//!
//! A listing is recorded while it is handed out, and kept only if it was read from start to end in
//! order and the directory was not forgotten meanwhile. Record: next (8 bytes, little-endian),
//! inode number (8), source (1), type as `d_type` (1, 0 where unknown), length of the name (1),
//! name.

use super::kept::Ticket;
use hashbrown::HashMap;
use nacre_vfs::{FileId, Kind, Name};
use parking_lot::Mutex;
use std::{
    collections::VecDeque,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

/// Bytes of a record without the name.
const HEAD: usize = 19;

/// Maximal number of remembered positions at which readers continue.
const REACHED_MAX: usize = 16;

/// One name of a cached listing.
pub(super) struct KeptName<'a> {
    pub(super) source: usize,
    pub(super) name: Name<'a>,
    pub(super) ino: u64,
    pub(super) kind: Option<Kind>,
    pub(super) next: u64,
}

/// A whole listing.
pub(super) struct Merged {
    ticket: Ticket,
    records: Vec<u8>,
    /// Remembered positions and their offsets in `records`.
    reached: Mutex<VecDeque<(u64, usize)>>,
    used: AtomicBool,
}

fn number(bytes: &[u8]) -> Option<u64> {
    bytes.try_into().ok().map(u64::from_le_bytes)
}

impl Merged {
    /// The name at an offset, and the offset of the next one; `None` at the end.
    pub(super) fn at(&self, offset: usize) -> Option<(KeptName<'_>, usize)> {
        let head = self.records.get(offset..offset + HEAD)?;
        let [source, kind, length] = *head.get(16..)?.first_chunk()?;
        let end = offset + HEAD + usize::from(length);
        let listed = KeptName {
            source: usize::from(source),
            name: Name::new(self.records.get(offset + HEAD..end)?).ok()?,
            ino: number(head.get(8..16)?)?,
            kind: Kind::from_mode(u32::from(kind) << 12),
            next: number(head.get(..8)?)?,
        };
        Some((listed, end))
    }

    /// The offset after a position; `None` where no name has it.
    pub(super) fn find(&self, position: u64) -> Option<usize> {
        if position == 0 {
            return Some(0);
        }
        let reached: Vec<(u64, usize)> = self.reached.lock().iter().copied().collect();
        if let Some((_, offset)) = reached.iter().find(|(known, _)| *known == position) {
            return Some(*offset);
        }
        // Most readers continue in the last reply, which begins where the one before it ended.
        const NEAR: usize = 1 << 20;
        let near = reached.iter().find_map(|(_, offset)| self.scan(*offset, position, NEAR));
        near.or_else(|| self.scan(0, position, usize::MAX))
    }

    /// The offset of a position that was handed out between two offsets.
    pub(super) fn find_between(&self, Range { start, end }: Range<usize>, position: u64) -> Option<usize> {
        self.scan(start, position, end.checked_sub(start)?)
    }

    /// Searches for a position from an offset, in at most `most` bytes.
    fn scan(&self, from: usize, position: u64, most: usize) -> Option<usize> {
        let mut at = from;
        while let Some((listed, next)) = self.at(at) {
            if next - from > most {
                return None;
            }
            if listed.next == position {
                return Some(next);
            }
            at = next;
        }
        None
    }

    /// Remembers the position at which a reader stopped.
    pub(super) fn reached(&self, position: u64, offset: usize) {
        let mut reached = self.reached.lock();
        if reached.front().is_none_or(|(known, _)| *known != position) {
            reached.push_front((position, offset));
            reached.truncate(REACHED_MAX);
        }
    }

    /// Memory used, bytes.
    pub(super) fn bytes(&self) -> usize {
        self.records.capacity() + size_of::<Merged>()
    }
}

/// A listing being recorded.
pub(super) struct Recording {
    key: FileId,
    serial: u64,
    records: Vec<u8>,
    /// The source and the position up to which the recording is complete.
    end: (usize, u64),
    /// Maximal size, bytes.
    most: usize,
    table: Arc<Mutex<Table>>,
}

impl Recording {
    /// Records a name at `at`, unless it is recorded already; returns false where the listing has become too
    /// large.
    pub(super) fn add(&mut self, at: (usize, u64), name: Name<'_>, ino: u64, kind: Option<Kind>, next: u64) -> bool {
        if at != self.end {
            return true;
        }
        let (Ok(source), Ok(length)) = (u8::try_from(at.0), u8::try_from(name.bytes().len())) else { return false };
        self.records.extend_from_slice(&next.to_le_bytes());
        self.records.extend_from_slice(&ino.to_le_bytes());
        self.records.extend_from_slice(&[source, kind.map_or(0, Kind::d_type), length]);
        self.records.extend_from_slice(name.bytes());
        self.records.len() <= self.most
    }

    /// Records that the listing has moved from one position to another.
    pub(super) fn go_on(&mut self, from: (usize, u64), to: (usize, u64)) {
        if self.end == from {
            self.end = to;
        }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        let mut table = self.table.lock();
        if table.recording.get(&self.key) == Some(&self.serial) {
            table.recording.remove(&self.key);
        }
    }
}

/// The cached listings and the running recordings.
#[derive(Default)]
struct Table {
    whole: HashMap<FileId, Arc<Merged>>,
    /// Keys in the order of the next eviction round (a clock); may have keys that are gone.
    clock: VecDeque<FileId>,
    bytes: usize,
    recording: HashMap<FileId, u64>,
    serial: u64,
}

impl Table {
    fn remove(&mut self, key: &FileId) -> Option<Arc<Merged>> {
        let whole = self.whole.remove(key)?;
        self.bytes -= whole.bytes();
        self.clock.retain(|known| known != key);
        Some(whole)
    }

    /// Evicts listings that were not used since the last round until the budget holds.
    fn evict(&mut self, budget: usize) -> Vec<Arc<Merged>> {
        let mut evicted = Vec::new();
        while self.bytes > budget {
            let Some(key) = self.clock.pop_front() else { break };
            match self.whole.get(&key) {
                Some(whole) if whole.used.swap(false, Ordering::Relaxed) => self.clock.push_back(key),
                _ => evicted.extend(self.remove(&key)),
            }
        }
        evicted
    }
}

/// The whole listings of one union.
pub(super) struct MergedListings {
    table: Arc<Mutex<Table>>,
    /// Number of keys in the table: at 0 no reader takes the lock.
    busy: AtomicUsize,
    budget: usize,
}

impl MergedListings {
    pub(super) fn new(budget: usize) -> MergedListings {
        MergedListings { table: Arc::default(), busy: AtomicUsize::new(0), budget }
    }

    /// The cached listing of a directory in this state, if it has the position.
    pub(super) fn get(&self, ticket: &Ticket, from: u64) -> Option<Arc<Merged>> {
        if ticket.token.is_none() || self.busy.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let whole = {
            let table = self.table.lock();
            let whole = table.whole.get(&ticket.key).filter(|whole| whole.ticket.is_same_state(ticket))?;
            whole.used.store(true, Ordering::Relaxed);
            Arc::clone(whole)
        };
        whole.find(from).is_some().then_some(whole)
    }

    /// Begins a recording, unless the directory already has one.
    pub(super) fn record(&self, ticket: &Ticket) -> Option<Recording> {
        let mut table = self.table.lock();
        if table.recording.contains_key(&ticket.key) {
            return None;
        }
        table.serial += 1;
        let serial = table.serial;
        table.recording.insert(ticket.key, serial);
        self.count(&table);
        drop(table);
        // One directory must not evict all others.
        let most = self.budget / 2;
        Some(Recording {
            key: ticket.key,
            serial,
            records: Vec::new(),
            end: (0, 0),
            most,
            table: Arc::clone(&self.table),
        })
    }

    /// Caches a recording if it is complete and the directory was not forgotten meanwhile.
    pub(super) fn keep(&self, ticket: Ticket, mut recording: Recording) {
        if recording.end != (ticket.slots.len(), 0) || ticket.token.is_none() {
            return;
        }
        let mut records = std::mem::take(&mut recording.records);
        records.shrink_to_fit();
        let (key, reached, used) = (ticket.key, Mutex::default(), AtomicBool::new(false));
        let whole = Arc::new(Merged { ticket, records, reached, used });
        let _evicted = {
            let mut table = self.table.lock();
            if table.recording.get(&key) != Some(&recording.serial) {
                return;
            }
            let mut evicted = Vec::from_iter(table.remove(&key));
            table.bytes += whole.bytes();
            table.whole.insert(key, whole);
            table.clock.push_back(key);
            evicted.extend(table.evict(self.budget));
            self.count(&table);
            evicted
        };
    }

    /// Drops a directory's listing, and cancels its recording.
    pub(super) fn forget(&self, key: FileId) {
        if self.busy.load(Ordering::Relaxed) == 0 {
            return;
        }
        let _gone = {
            let mut table = self.table.lock();
            table.recording.remove(&key);
            let gone = table.remove(&key);
            self.count(&table);
            gone
        };
    }

    /// Drops all listings, and cancels all recordings.
    pub(super) fn forget_all(&self) {
        let _gone = {
            let mut table = self.table.lock();
            table.recording.clear();
            table.clock.clear();
            table.bytes = 0;
            let gone = std::mem::take(&mut table.whole);
            self.count(&table);
            gone
        };
    }

    fn count(&self, table: &Table) {
        self.busy.store(table.whole.len() + table.recording.len(), Ordering::Relaxed);
    }

    /// Bytes in use.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        self.table.lock().bytes
    }
}
