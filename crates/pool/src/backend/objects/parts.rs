//! Parts of objects in files of this machine: what was read or written once need not be fetched again,
//! also after a restart.
//!
//! Caller: [`Cached`](super::Cached). Two files in a directory of the pool's own: `data` has a slot of
//! [`PART`] bytes for each part, `index` an entry of 64 bytes for each slot:
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
//! - Nothing here is needed: what cannot be read, written or believed is as if it were not here.
//!   So nothing is synced.
//! - A slot that an earlier run has filled is verified before its first use.
//! - One process has the files (an exclusive `flock`).

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use parking_lot::Mutex;
use rustix::fs::{FlockOperation, Mode, OFlags};

use crate::checksum::structure;

/// The length of a part, but for the last one of an object, bytes.
pub(super) const PART: u64 = 128 << 10;
/// The length of an entry of the index, bytes.
const ENTRY: usize = 64;

/// The parts that are here.
pub struct Parts {
    data: File,
    index: File,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    slots: Vec<Slot>,
    /// Where parts are, by their names.
    found: HashMap<u128, u32>,
    /// The slot that is looked at next for a part to put out.
    hand: usize,
}

#[derive(Clone, Copy, Default)]
struct Slot {
    /// 0: nothing is in it.
    name: u128,
    sum: [u8; 16],
    length: u32,
    /// Grows with each part that was in it.
    version: u32,
    /// It was used since the hand came by.
    used: bool,
    /// Its content is known to be what it was.
    verified: bool,
    /// Somebody fills it.
    filling: bool,
}

/// The name of a part of an object; never 0.
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
    /// The parts in a directory, at most so many bytes of them; the directory is made.
    ///
    /// # Errors
    /// The system's; [`io::ErrorKind::WouldBlock`] where another process has it.
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

    /// None yet, in files that have no name and go with their process.
    ///
    /// # Errors
    /// The system's.
    pub fn unnamed(directory: &Path, size: u64) -> io::Result<Self> {
        let open = || -> io::Result<File> {
            let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
            Ok(rustix::fs::open(directory, flags, Mode::RUSR | Mode::WUSR)?.into())
        };
        Self::begin(open()?, open()?, size)
    }

    fn begin(index: File, data: File, size: u64) -> io::Result<Self> {
        let count = u32::try_from(size.div_ceil(PART)).unwrap_or(u32::MAX).max(1);
        // The files may be of another size limit.
        index.set_len(u64::from(count) * ENTRY as u64)?;
        data.set_len(u64::from(count) * PART)?;
        let mut entries = vec![0; count as usize * ENTRY];
        index.read_exact_at(&mut entries, 0)?;
        let mut state = State { slots: Vec::with_capacity(count as usize), ..State::default() };
        for (at, entry) in (0..count).zip(entries.chunks_exact(ENTRY)) {
            // A part that was fetched again is there twice.
            let slot = slot_of(entry).filter(|slot| !state.found.contains_key(&slot.name)).unwrap_or_default();
            if slot.name != 0 {
                state.found.insert(slot.name, at);
            }
            state.slots.push(slot);
        }
        Ok(Self { data, index, state: Mutex::new(state) })
    }

    /// How many parts there can be.
    pub(super) fn most(&self) -> u64 {
        self.state.lock().slots.len() as u64
    }

    /// How many parts are here.
    pub(super) fn count(&self) -> u64 {
        self.state.lock().found.len() as u64
    }

    /// Whether a part is here that has something at this offset. It may be found damaged.
    pub(super) fn has(&self, name: u128, offset: u64) -> bool {
        let state = self.state.lock();
        let slot = state.found.get(&name).and_then(|at| state.slots.get(*at as usize));
        slot.is_some_and(|slot| offset < u64::from(slot.length))
    }

    /// Adds a range of a part to what was read so far; `false` where it is not here or is shorter.
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
            // Something else has taken its place.
            (_, None) => {
                into.truncate(before);
                return false;
            }
            (false, Some(now)) => {
                *now = Slot { version: now.version.wrapping_add(1), ..Slot::default() };
                state.found.remove(&name);
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

    /// Keeps a part, in place of what was used least where there is no room. Whether it could be
    /// written.
    pub(super) fn keep(&self, name: u128, content: &[u8]) -> bool {
        if content.is_empty() || content.len() as u64 > PART {
            return true;
        }
        // All slots are being filled: it is not kept.
        let sum = structure(content);
        let Some((at, version)) = self.take_slot(name) else { return true };
        let mut slot =
            Slot { name, sum, length: content.len() as u32, version, used: false, verified: true, filling: false };
        let written = self.data.write_all_at(content, u64::from(at) * PART).is_ok()
            && self.index.write_all_at(&entry(&slot), u64::from(at) * ENTRY as u64).is_ok();
        if !written {
            slot = Slot { version, ..Slot::default() };
        }
        let mut state = self.state.lock();
        if written {
            state.found.insert(name, at);
        }
        if let Some(now) = state.slots.get_mut(at as usize) {
            *now = slot;
        }
        written
    }

    /// A slot for a part: its own, or that of one that was not used since the hand came by.
    fn take_slot(&self, name: u128) -> Option<(u32, u32)> {
        let mut state = self.state.lock();
        let state = &mut *state;
        let at = match state.found.remove(&name) {
            Some(own) => own,
            None => {
                let count = state.slots.len();
                let mut chosen = None;
                for _ in 0..2 * count {
                    let at = state.hand % count;
                    state.hand = at + 1;
                    let slot = state.slots.get_mut(at)?;
                    if !slot.used && !slot.filling {
                        chosen = Some(at as u32);
                        break;
                    }
                    slot.used = false;
                }
                chosen?
            }
        };
        let slot = state.slots.get_mut(at as usize)?;
        // A part that two have fetched at the same time may be in another slot as well.
        if state.found.get(&slot.name) == Some(&at) {
            state.found.remove(&slot.name);
        }
        let version = slot.version.wrapping_add(1);
        *slot = Slot { version, filling: true, ..Slot::default() };
        Some((at, version))
    }
}

impl std::fmt::Debug for Parts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Parts").field("count", &self.count()).finish_non_exhaustive()
    }
}
