//! Which open file each handle stands for: one record for each slot of the table of handles.
//!
//! A record is valid while its first word is the handle. It is made when all that belongs to the open
//! file is there, and goes before the file is closed: the number of a descriptor in it is never that of
//! another file.

use super::{Head, OPENS_AT, Survival, get, publish, put, retract};
use nacre_vfs::OpenFlags;
use std::sync::atomic::AtomicU64;

/// The most open files of one mount that can be noted: more than a process can have.
const MOST: usize = 1 << 23;
const RECORD: usize = 8;
pub(super) const WORDS: usize = MOST * RECORD;

/// What is noted of an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OpenRecord {
    pub fh: u64,
    pub nodeid: u64,
    pub flags: OpenFlags,
    pub uid: u32,
    /// The descriptor with its bytes, where the layer has one.
    pub descriptor: Option<i32>,
    /// Where the kernel does the I/O.
    pub backing: Option<i32>,
    /// The request that opened it.
    pub unique: u64,
}

/// The records of all open files.
#[derive(Clone, Debug)]
pub(crate) struct Opens {
    memory: Survival,
}

impl Opens {
    pub fn new(memory: &Survival) -> Opens {
        Opens { memory: memory.clone() }
    }

    /// The kernel is about to be told of an open file.
    pub fn made(&self, open: &OpenRecord) {
        let at = place(open.fh);
        let Some(record) = self.record(at) else { return self.memory.give_up("it has too many open files") };
        put(record, 1, open.nodeid);
        put(record, 2, u64::from(open.flags.0) << 32 | u64::from(open.uid));
        put(record, 3, number(open.descriptor) << 32 | number(open.backing));
        put(record, 4, open.unique);
        publish(record, 0, open.fh);
        self.memory.raise(Head::OpensEnd, at as u64 + 1);
    }

    /// It is about to be closed.
    pub fn closed(&self, fh: u64) {
        if let Some(record) = self.record(place(fh)) {
            retract(record, 0);
        }
    }

    /// All of them.
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
                descriptor: known(numbers >> 32),
                backing: known(numbers),
                unique: get(record, 4),
            })
        })
    }

    fn record(&self, at: usize) -> Option<&[AtomicU64]> {
        (at < MOST).then(|| self.memory.part(OPENS_AT + at * RECORD, RECORD))
    }
}

/// Where a handle's record is.
fn place(fh: u64) -> usize {
    fh as u32 as usize
}

/// A number that is not negative, and 1; 0 for none.
fn number(number: Option<i32>) -> u64 {
    number.map_or(0, |number| u64::from(number.cast_unsigned()) + 1)
}

fn known(word: u64) -> Option<i32> {
    (word as u32).checked_sub(1).map(u32::cast_signed)
}
