//! How much room there is, and who may have it.
//!
//! Invariant: what frames are charged adds up to the byte: `allocated` is the sum over all frames
//! written and not yet freed by a durable commit.

use std::sync::atomic::Ordering;

use crate::error::PoolError;
use crate::frames::WriteStream;
use crate::segment::cleaner::{self, Pressure};
use crate::space::slop;

use super::{Result, Store};

/// For what room is wanted; the later the kind, the further into the slop it may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// An ordinary write: not into the slop. Asked for before a write is accepted.
    Write,
    /// A change that frees room in the end (unlink, truncate): half of the slop.
    Delete,
    /// Content that was admitted already, at the latest by what frees room in the end: three
    /// quarters of the slop, so that whatever was admitted fits.
    Accepted,
    /// Destroying file systems and snapshots: three quarters of the slop.
    Destroy,
    /// Nodes of trees, written by a commit: three quarters of the slop and a half of the last.
    Metadata,
}

/// The room in a pool. All in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// What frames can have at most: all slots but those of the log.
    pub size: u64,
    /// What frames are charged now, the segment table's among them.
    pub allocated: u64,
    /// The part of `allocated` that the segment table takes.
    pub table: u64,
    /// The part of `allocated` that is freed by the commits to come.
    pub freeing: u64,
    /// What is lost at the ends of full segments.
    pub slack: u64,
    /// What living frames of trees take a second time. Nobody is charged for it.
    pub copies: u64,
    /// The part of `allocated` that lies where metadata has groups of its own: it takes nothing of
    /// `size`.
    pub special: u64,
    /// `size` less `allocated` but `special`, `slack` and `copies`.
    pub free: u64,
    /// What ordinary writes must leave.
    pub slop: u64,
    /// What ordinary writes may still have: `free` less the slop.
    pub available: u64,
    /// Slots with nothing in them.
    pub free_slots: u64,
    /// What file content can have of them, bytes.
    pub free_whole: u64,
    /// All slots but the log's.
    pub slots: u64,
}

/// What was written since the pool was opened, bytes: to see how much the cleaner adds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Frames as callers wrote them.
    pub frames: u64,
    /// Frames moved by the cleaner.
    pub relocated: u64,
    /// Frames of the segment table.
    pub table: u64,
}

impl Store {
    /// The room in the pool.
    #[must_use]
    pub fn space(&self) -> Space {
        let room = self.backend.room();
        // As of one moment: commits change both sums under this lock.
        let map = self.map.read();
        let (slack, copies) = (map.slack, map.copies);
        let special = map.special + self.sums.special.load(Ordering::Relaxed);
        let slots = room.total.saturating_sub(room.reserved);
        let copies = copies + self.sums.copies.load(Ordering::Relaxed);
        let size = room.size;
        let allocated = self.sums.allocated.load(Ordering::Relaxed) + self.sums.table.load(Ordering::Relaxed);
        drop(map);
        let taken = allocated.saturating_sub(special);
        let free = size.saturating_sub(taken + slack + copies);
        let slop = slop(size).min(self.slop_at_most);
        Space {
            size,
            allocated,
            table: self.sums.table.load(Ordering::Relaxed),
            freeing: self.sums.freeing.load(Ordering::Relaxed),
            slack,
            copies,
            special,
            free,
            slop,
            available: free.saturating_sub(slop),
            free_slots: room.empty(),
            free_whole: room.free_size,
            slots,
        }
    }

    /// Whether so many bytes may be had for this. Asked before anything is accepted; it takes
    /// nothing.
    ///
    /// # Errors
    /// [`PoolError::NoSpace`].
    pub fn admit(&self, bytes: u64, claim: Claim) -> Result<()> {
        let Space { free, slop, .. } = self.space();
        let kept = match claim {
            Claim::Write => slop,
            Claim::Delete => slop / 2,
            Claim::Accepted | Claim::Destroy => slop / 4,
            Claim::Metadata => slop / 8,
        };
        if free.saturating_sub(kept) >= bytes { Ok(()) } else { Err(PoolError::NoSpace) }
    }

    /// How urgent cleaning is.
    #[must_use]
    pub fn pressure(&self) -> Pressure {
        let room = self.backend.room();
        cleaner::pressure(room.empty(), room.total)
    }

    /// The same, of what writers can have at once.
    pub(super) fn urgency(&self) -> Pressure {
        let room = self.backend.room();
        cleaner::pressure(room.free, room.total)
    }

    /// How much file content can be written before a writer must wait for the cleaner, bytes.
    #[must_use]
    pub fn room(&self) -> u64 {
        let (open, room) =
            (self.appenders.of_data().iter().map(|data| data.lock().room()).sum::<u64>(), self.backend.room());
        let each = room.free_size / room.empty().max(1);
        open + room.free_size.saturating_sub(cleaner::reserve(WriteStream::Data) * each)
    }

    /// What was written since the pool was opened.
    #[must_use]
    pub fn traffic(&self) -> Traffic {
        Traffic {
            frames: self.sums.written_frames.load(Ordering::Relaxed),
            relocated: self.sums.written_relocated.load(Ordering::Relaxed),
            table: self.sums.written_table.load(Ordering::Relaxed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::slop;

    #[test]
    fn the_slop_follows_its_rule() {
        assert_eq!(slop(60 << 20), 30 << 20);
        assert_eq!(slop(1 << 30), 128 << 20);
        assert_eq!(slop(1 << 40), 32 << 30);
        assert_eq!(slop(1 << 50), 128 << 30);
    }
}
