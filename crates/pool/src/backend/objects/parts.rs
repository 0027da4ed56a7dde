//! Parts of objects cached in local files, also across restarts.
//!
//! Caller: [`Cached`](super::Cached). Two files in a directory of the pool's own: `data` has a slot of [`PART`] bytes
//! for each part, of which a short part uses only its length (the remainder is a hole), `index` an entry of 64 bytes
//! for each slot:
//!
//! ```text
//!  0  16  the part's name: XXH3 of the object's name and the part's number
//! 16   4  its length, bytes
//! 20  12  0
//! 32  16  XXH3 of its content
//! 48  16  XXH3 of bytes 0 to 48
//! ```
//!
//! Invariants:
//! - Nothing here is the only copy: unreadable or damaged parts count as missing. So nothing is synced.
//! - A slot that an earlier process has filled is verified before its first use.
//! - The size of the parts, in blocks of [`BLOCK`], is within the limit. There are [`SLOTS`] times as many slots as
//!   whole parts that fit, so that small objects do not use the space of large ones.
//! - One process owns the files (an exclusive `flock`).

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, FlockOperation, Mode, OFlags};

use crate::checksum::structure;

/// Length of a part, except for the last one of an object, bytes.
pub(super) const PART: u64 = 128 << 10;
/// Allocation unit of parts, bytes.
const BLOCK: u64 = 4 << 10;
/// Number of slots for each whole part within the limit.
const SLOTS: u32 = 4;
/// Length of an entry of the index, bytes.
const ENTRY: usize = 64;

/// The cached parts.
pub struct Parts {
    data: File,
    index: File,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    slots: Vec<Slot>,
    /// Slots of the parts, by name.
    found: HashMap<u128, u32>,
    /// Hand of the CLOCK eviction: the slot that is checked next.
    hand: usize,
    /// Empty slots.
    free: Vec<u32>,
    /// Size of all parts, bytes.
    taken: u64,
    /// Maximum size of all parts, bytes.
    limit: u64,
}

/// Allocated size of a part of this length, bytes.
fn room(length: u32) -> u64 {
    u64::from(length).next_multiple_of(BLOCK)
}

impl State {
    /// Empties a slot; returns the size that it used.
    fn empty(&mut self, at: u32) -> u64 {
        let Some(slot) = self.slots.get_mut(at as usize) else { return 0 };
        let taken = room(slot.length);
        // A part that two threads have fetched at the same time may be in another slot as well.
        if self.found.get(&slot.name) == Some(&at) {
            self.found.remove(&slot.name);
        }
        *slot = Slot { version: slot.version.wrapping_add(1), ..Slot::default() };
        self.taken -= taken.min(self.taken);
        taken
    }

    /// Finds a slot to evict: one that was not used since the hand last passed it.
    fn least_used(&mut self) -> Option<u32> {
        let count = self.slots.len();
        for _ in 0..2 * count {
            let at = self.hand % count;
            self.hand = at + 1;
            let slot = self.slots.get_mut(at)?;
            if slot.name != 0 && !slot.used && !slot.filling {
                return u32::try_from(at).ok();
            }
            slot.used = false;
        }
        None
    }
}

/// A slot that was allocated for a new part.
struct TakenSlot {
    at: u32,
    version: u32,
    /// Ranges of the file to punch first: offset and length, bytes.
    holes: Vec<(u64, u64)>,
    /// Slots that become free after the ranges were punched: a hole must not hit what another thread has written.
    freed: Vec<u32>,
}

#[derive(Clone, Copy, Default)]
struct Slot {
    /// 0: the slot is empty.
    name: u128,
    sum: [u8; 16],
    length: u32,
    /// Grows with each part stored in it.
    version: u32,
    /// Whether the part was used since the hand last passed the slot.
    used: bool,
    /// Whether this process has verified the content.
    verified: bool,
    /// Whether a thread is filling the slot.
    filling: bool,
}

/// Name of a part of an object; never 0.
pub(super) fn name(key: &str, part: u64) -> u128 {
    let mut whole = key.as_bytes().to_vec();
    whole.extend(part.to_le_bytes());
    u128::from_le_bytes(structure(&whole)).max(1)
}

fn entry(slot: &Slot) -> [u8; ENTRY] {
    let mut bytes = Vec::with_capacity(ENTRY);
    bytes.extend(slot.name.to_le_bytes());
    bytes.extend(slot.length.to_le_bytes());
    bytes.extend([0; 12]);
    bytes.extend(slot.sum);
    let sum = structure(&bytes);
    bytes.extend(sum);
    let mut whole = [0; ENTRY];
    whole.copy_from_slice(&bytes);
    whole
}

fn slot_of(entry: &[u8]) -> Option<Slot> {
    let (body, sum) = entry.split_last_chunk()?;
    let (name, length, content) = (body.first_chunk()?, body.get(16..)?.first_chunk()?, body.get(32..)?.first_chunk()?);
    let slot = Slot {
        name: u128::from_le_bytes(*name),
        length: u32::from_le_bytes(*length),
        sum: *content,
        ..Slot::default()
    };
    (structure(body) == *sum && slot.name != 0 && u64::from(slot.length) <= PART).then_some(slot)
}

impl Parts {
    /// Opens the cache in a directory, which is created if necessary, with a maximum size in bytes.
    ///
    /// # Errors
    /// Errors of the system; [`io::ErrorKind::WouldBlock`] where another process owns it.
    pub fn open(directory: &Path, size: u64) -> io::Result<Self> {
        std::fs::create_dir_all(directory)?;
        let open = |name: &str| -> io::Result<File> {
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            Ok(rustix::fs::open(directory.join(name), flags, Mode::RUSR | Mode::WUSR)?.into())
        };
        let index = open("index")?;
        rustix::fs::flock(&index, FlockOperation::NonBlockingLockExclusive)?;
        Self::begin(index, open("data")?, size)
    }

    /// An empty cache in unnamed files that vanish with their process.
    ///
    /// # Errors
    /// Errors of the system.
    pub fn unnamed(directory: &Path, size: u64) -> io::Result<Self> {
        let open = || -> io::Result<File> {
            let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
            Ok(rustix::fs::open(directory, flags, Mode::RUSR | Mode::WUSR)?.into())
        };
        Self::begin(open()?, open()?, size)
    }

    fn begin(index: File, data: File, size: u64) -> io::Result<Self> {
        let whole = u32::try_from(size.div_ceil(PART)).unwrap_or(u32::MAX).clamp(1, u32::MAX / SLOTS);
        let count = whole * SLOTS;
        // The files may be from a cache with another limit.
        index.set_len(u64::from(count) * ENTRY as u64)?;
        data.set_len(u64::from(count) * PART)?;
        let mut entries = vec![0; count as usize * ENTRY];
        index.read_exact_at(&mut entries, 0)?;
        let mut state =
            State { slots: Vec::with_capacity(count as usize), limit: u64::from(whole) * PART, ..State::default() };
        let mut dropped = Vec::new();
        for (at, entry) in (0..count).zip(entries.chunks_exact(ENTRY)) {
            // A part that was fetched twice is in two slots.
            let is_new =
                |slot: &Slot| !state.found.contains_key(&slot.name) && state.taken + room(slot.length) <= state.limit;
            let there = slot_of(entry);
            let is_dropped = there.as_ref().is_some_and(|slot| !is_new(slot));
            let slot = there.filter(|_| !is_dropped).unwrap_or_default();
            if is_dropped {
                dropped.push((u64::from(at) * PART, PART));
            }
            if slot.name == 0 {
                state.free.push(at);
            } else {
                state.found.insert(slot.name, at);
                state.taken += room(slot.length);
            }
            state.slots.push(slot);
        }
        state.free.reverse();
        let parts = Self { data, index, state: Mutex::new(state) };
        parts.give_back(&dropped);
        Ok(parts)
    }

    /// Number of whole parts that fit.
    pub(super) fn most(&self) -> u64 {
        self.state.lock().limit / PART
    }

    /// Number of cached parts.
    pub(super) fn count(&self) -> u64 {
        self.state.lock().found.len() as u64
    }

    /// Size of all parts, bytes.
    pub(super) fn taken(&self) -> u64 {
        self.state.lock().taken
    }

    /// Whether a part is cached and reaches beyond this offset. It may turn out to be damaged.
    pub(super) fn has(&self, name: u128, offset: u64) -> bool {
        let state = self.state.lock();
        let slot = state.found.get(&name).and_then(|at| state.slots.get(*at as usize));
        slot.is_some_and(|slot| offset < u64::from(slot.length))
    }

    /// Appends a range of a part to `into`; returns `false` where it is not cached or too short.
    pub(super) fn read(&self, name: u128, range: Range<u64>, into: &mut Vec<u8>) -> bool {
        let found = {
            let mut state = self.state.lock();
            let at = state.found.get(&name).copied();
            let slot = at.and_then(|at| state.slots.get_mut(at as usize));
            slot.filter(|slot| range.end <= u64::from(slot.length))
                .map(|slot| {
                    slot.used = true;
                    *slot
                })
                .zip(at)
        };
        let Some((slot, at)) = found else { return false };
        let before = into.len();
        let wanted = if slot.verified { range.clone() } else { 0..u64::from(slot.length) };
        let is_read = self.read_slot(at, &wanted, into);
        let whole = into.get(before..).unwrap_or_default();
        let right = is_read && (slot.verified || structure(whole) == slot.sum);
        let mut state = self.state.lock();
        let same = state.slots.get_mut(at as usize).filter(|now| now.version == slot.version && !now.filling);
        match (right, same) {
            (true, Some(now)) => now.verified = true,
            // Another part has taken the slot.
            (_, None) => {
                into.truncate(before);
                return false;
            }
            (false, Some(_)) => {
                state.empty(at);
                state.free.push(at);
                into.truncate(before);
                return false;
            }
        }
        drop(state);
        if !slot.verified {
            into.truncate(before + range.end as usize);
            into.drain(before..before + range.start as usize);
        }
        true
    }

    fn read_slot(&self, at: u32, range: &Range<u64>, into: &mut Vec<u8>) -> bool {
        let before = into.len();
        into.resize(before + (range.end - range.start) as usize, 0);
        let target = into.get_mut(before..).unwrap_or_default();
        self.data.read_exact_at(target, u64::from(at) * PART + range.start).is_ok()
    }

    /// Caches a part, evicting the least used one where there is no space. Returns whether it could be written.
    pub(super) fn keep(&self, name: u128, content: &[u8]) -> bool {
        if content.is_empty() || content.len() as u64 > PART {
            return true;
        }
        let sum = structure(content);
        let length = content.len() as u32;
        // All slots are being filled: the part is not cached.
        let Some(TakenSlot { at, version, holes, freed }) = self.take_slot(name, length) else { return true };
        self.give_back(&holes);
        let slot = Slot { name, sum, length, version, used: false, verified: true, filling: false };
        let written = self.data.write_all_at(content, u64::from(at) * PART).is_ok()
            && self.index.write_all_at(&entry(&slot), u64::from(at) * ENTRY as u64).is_ok();
        let mut state = self.state.lock();
        state.free.extend(freed);
        if let Some(now) = state.slots.get_mut(at as usize) {
            *now = slot;
        }
        if written {
            state.found.insert(name, at);
        } else {
            state.empty(at);
            state.free.push(at);
        }
        written
    }

    /// Punches holes where parts were; a file system without hole punching keeps more than the limit.
    fn give_back(&self, holes: &[(u64, u64)]) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        for (offset, length) in holes {
            if let Err(error) = rustix::fs::fallocate(&self.data, flags, *offset, *length) {
                tracing::debug!(%error, "room of a part that is not kept any more is not given back");
            }
        }
    }

    /// Allocates a slot for a part of this length: its former one, a free one, or that of an evicted part. Evicts as
    /// many parts as the size limit requires.
    fn take_slot(&self, name: u128, length: u32) -> Option<TakenSlot> {
        let mut state = self.state.lock();
        let state = &mut *state;
        let needed = room(length);
        let own = state.found.get(&name).copied();
        // The slot that is emptied first is used.
        let mut emptied: Vec<(u32, u64)> = own.map(|at| (at, state.empty(at))).into_iter().collect();
        while state.taken + needed > state.limit || (emptied.is_empty() && state.free.is_empty()) {
            let Some(at) = state.least_used() else { break };
            let taken = state.empty(at);
            emptied.push((at, taken));
        }
        let (mut holes, mut freed) = (Vec::new(), Vec::new());
        let mut emptied = emptied.into_iter();
        let chosen = match emptied.next() {
            Some((at, taken)) => {
                if taken > needed {
                    holes.push((u64::from(at) * PART + needed, taken - needed));
                }
                Some(at)
            }
            None => state.free.pop(),
        };
        for (at, taken) in emptied {
            holes.push((u64::from(at) * PART, taken));
            freed.push(at);
        }
        let Some(at) = chosen.filter(|_| state.taken + needed <= state.limit) else {
            state.free.extend(chosen.into_iter().chain(freed));
            return None;
        };
        let slot = state.slots.get_mut(at as usize)?;
        let version = slot.version.wrapping_add(1);
        // Its size counts from now on.
        *slot = Slot { version, length, filling: true, ..Slot::default() };
        state.taken += needed;
        Some(TakenSlot { at, version, holes, freed })
    }
}

impl std::fmt::Debug for Parts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Parts").field("count", &self.count()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_parts_take_their_length_and_large_ones_their_room() {
        let directory = tempfile::tempdir().unwrap();
        let parts = Parts::open(directory.path(), 8 * PART).unwrap();
        let content = |length: usize, fill: u8| vec![fill; length];
        // Thirty-two small parts use all the slots, and a thirty-second of the space.
        for number in 0..32 {
            assert!(parts.keep(name("small", number), &content(100, number as u8)));
        }
        assert_eq!((parts.count(), parts.taken()), (32, 32 * BLOCK));
        for number in 0..6 {
            assert!(parts.keep(name("large", number), &content(PART as usize, number as u8)));
        }
        assert!(parts.count() == 32 && parts.taken() <= 8 * PART, "{parts:?}");
        for number in 0..40 {
            assert!(parts.keep(name("more", number), &content(PART as usize, number as u8)));
            let mut read = Vec::new();
            assert!(parts.read(name("more", number), 7..9, &mut read) && read == [number as u8; 2]);
        }
        assert!(parts.count() <= 32 && parts.taken() <= 8 * PART, "{parts:?}");
        let blocks = |parts: &Parts| std::os::unix::fs::MetadataExt::blocks(&parts.data.metadata().unwrap()) * 512;
        assert!(blocks(&parts) <= 9 * PART, "{} bytes", blocks(&parts));
        // The parts survive a restart, within the limit.
        drop(parts);
        let parts = Parts::open(directory.path(), 8 * PART).unwrap();
        let mut read = Vec::new();
        assert!(parts.read(name("more", 39), 0..2, &mut read) && read == [39; 2]);
        assert!(parts.taken() <= 8 * PART);
        drop(parts);
        assert!(Parts::open(directory.path(), PART).unwrap().taken() <= PART);
    }
}
