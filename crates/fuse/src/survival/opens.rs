//! Records of open files: which open file each handle stands for, one record per slot of the table of handles.
//!
//! A record is valid while its first word is the handle. It is written when all parts of the open file exist, and
//! removed before the file is closed: a descriptor number in it is never that of another file.

use super::{Head, OPENS_AT, Survival, get, publish, put, retract};
use nacre_vfs::{OpenFile, OpenFlags};
use parking_lot::Mutex;
use std::{
    os::fd::AsRawFd,
    sync::{Arc, atomic::AtomicU64},
};

/// Maximum number of open files of one mount that can be recorded: more than a process can have.
const MOST: usize = 1 << 23;
const RECORD: usize = 8;
pub(super) const WORDS: usize = MOST * RECORD;
/// Words for a mount where most files are opened without a request.
pub(super) const FEW_WORDS: usize = (1 << 20) * RECORD;

/// A layer's handoff state of an open file ([`OpenFile::left`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OpenLeft {
    /// Number of its descriptor.
    pub descriptor: i32,
    pub place: u64,
}

impl OpenLeft {
    pub fn of(file: &dyn OpenFile) -> Option<OpenLeft> {
        file.left().map(|left| OpenLeft { descriptor: left.descriptor.as_raw_fd(), place: left.place })
    }
}

/// Record of an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OpenRecord {
    pub fh: u64,
    pub nodeid: u64,
    pub flags: OpenFlags,
    pub uid: u32,
    /// The layer's handoff state of it, where it has one.
    pub left: Option<OpenLeft>,
    /// Backing id, where it is in passthrough.
    pub backing: Option<i32>,
    /// Whether the kernel caches writes through it.
    pub collected: bool,
    /// Unique number of the request that opened it.
    pub unique: u64,
}

/// The records of all open files.
#[derive(Clone, Debug)]
pub(crate) struct Opens {
    memory: Survival,
    /// Held while a record is written or changed, so that a late change of an old record cannot hit a new one in the
    /// same slot.
    changing: Arc<Mutex<()>>,
}

impl Opens {
    pub fn new(memory: &Survival) -> Opens {
        Opens { memory: memory.clone(), changing: Arc::default() }
    }

    /// Records an open file before the kernel gets it.
    pub fn made(&self, open: &OpenRecord) {
        let at = place(open.fh);
        let Some(record) = self.record(at) else { return self.memory.give_up("it has too many open files") };
        let _one_at_a_time = self.changing.lock();
        put(record, 1, open.nodeid);
        put(record, 2, u64::from(open.flags.0) << 32 | u64::from(open.uid));
        put(record, 3, number(open.left.map(|left| left.descriptor)) << 32 | number(open.backing));
        put(record, 4, open.unique);
        put(record, 5, open.left.map_or(0, |left| left.place));
        put(record, 6, open.collected.into());
        publish(record, 0, open.fh);
        self.memory.raise(Head::OpensEnd, at as u64 + 1);
    }

    /// Updates the layer's handoff state. In between, the record has the new descriptor and the old location.
    pub fn changed(&self, fh: u64, left: Option<OpenLeft>) {
        let Some(record) = self.record(place(fh)) else { return };
        let _one_at_a_time = self.changing.lock();
        if get(record, 0) != fh {
            return;
        }
        let (before, now) = (get(record, 3), left.map_or(0, |left| left.place));
        let numbers = number(left.map(|left| left.descriptor)) << 32 | before & u64::from(u32::MAX);
        if (before, get(record, 5)) != (numbers, now) {
            publish(record, 3, numbers);
            publish(record, 5, now);
        }
    }

    /// Removes the record of an open file that is about to be closed.
    pub fn closed(&self, fh: u64) {
        if let Some(record) = self.record(place(fh)).filter(|record| get(record, 0) == fh) {
            retract(record, 0);
        }
    }

    /// Returns all records.
    pub fn all(&self) -> impl Iterator<Item = OpenRecord> + '_ {
        let end = (self.memory.head(Head::OpensEnd) as usize).min(MOST);
        (0..end).filter_map(|at| {
            let record = self.record(at)?;
            let (owner, numbers) = (get(record, 2), get(record, 3));
            Some(OpenRecord {
                fh: Some(get(record, 0)).filter(|fh| *fh != 0)?,
                nodeid: get(record, 1),
                flags: OpenFlags((owner >> 32) as u32),
                uid: owner as u32,
                left: known(numbers >> 32).map(|descriptor| OpenLeft { descriptor, place: get(record, 5) }),
                backing: known(numbers),
                collected: get(record, 6) == 1,
                unique: get(record, 4),
            })
        })
    }

    fn record(&self, at: usize) -> Option<&[AtomicU64]> {
        if at >= MOST {
            return None;
        }
        Some(self.memory.part(OPENS_AT + at * RECORD, RECORD)).filter(|record| !record.is_empty())
    }
}

/// Index of a handle's record.
fn place(fh: u64) -> usize {
    fh as u32 as usize
}

/// Encodes a number that is not negative as itself plus 1; 0 for none.
fn number(number: Option<i32>) -> u64 {
    number.map_or(0, |number| u64::from(number.cast_unsigned()) + 1)
}

fn known(word: u64) -> Option<i32> {
    (word as u32).checked_sub(1).map(u32::cast_signed)
}
