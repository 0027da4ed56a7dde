//! Space accounting of a pool, and the admission of new frames.
//!
//! Invariant: charges add up to the byte: `allocated` is the sum over all frames written and not yet freed by a
//! durable commit.

use std::sync::atomic::Ordering;

use crate::error::PoolError;
use crate::frames::WriteStream;
use crate::segment::cleaner::{self, Pressure};
use crate::space::slop;

use super::{Result, Store};

/// Purpose of an allocation; later kinds may use more of the slop space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// An ordinary write: nothing of the slop. Checked before a write is accepted.
    Write,
    /// A change that frees space in the end (unlink, truncate): half of the slop.
    Delete,
    /// Content that was admitted already, at the latest by an operation that frees space in the end: three quarters
    /// of the slop, so that everything admitted fits.
    Accepted,
    /// Destroying file systems and snapshots: three quarters of the slop.
    Destroy,
    /// Tree nodes, written by a commit: three quarters of the slop and half of the remainder.
    Metadata,
}

/// Space of a pool. All in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// Capacity for frames: all slots except the log's.
    pub size: u64,
    /// Charged size of all frames, including the segment table.
    pub allocated: u64,
    /// The part of `allocated` used by the segment table.
    pub table: u64,
    /// The part of `allocated` that the next commits free.
    pub freeing: u64,
    /// Lost at the ends of full segments.
    pub slack: u64,
    /// Additional space for second copies of live tree frames. It is charged to nobody.
    pub copies: u64,
    /// The part of `allocated` in the special class: it uses nothing of `size`.
    pub special: u64,
    /// `size` minus `allocated` (except `special`), `slack` and `copies`.
    pub free: u64,
    /// Reserve that ordinary writes must not use.
    pub slop: u64,
    /// Space for ordinary writes: `free` minus the slop.
    pub available: u64,
    /// Number of empty slots.
    pub free_slots: u64,
    /// Capacity for file content in the empty slots, bytes.
    pub free_whole: u64,
    /// Number of all slots except the log's.
    pub slots: u64,
}

/// Bytes written since the pool was opened: shows the write amplification of the cleaner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Frames written by callers.
    pub frames: u64,
    /// Frames moved by the cleaner.
    pub relocated: u64,
    /// Frames of the segment table.
    pub table: u64,
}

impl Store {
    /// Space of the pool.
    #[must_use]
    pub fn space(&self) -> Space {
        let room = self.backend.room();
        // Under one lock: commits change both sums under it.
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

    /// Checks whether this many bytes may be allocated for a purpose, before anything is accepted; allocates nothing.
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

    /// Urgency of cleaning.
    #[must_use]
    pub fn pressure(&self) -> Pressure {
        let room = self.backend.room();
        cleaner::pressure(room.empty(), room.total)
    }

    /// Urgency by the slots that writers can use at once.
    pub(super) fn urgency(&self) -> Pressure {
        let room = self.backend.room();
        cleaner::pressure(room.free, room.total)
    }

    /// Number of bytes of file content that can be written before a writer must wait for the cleaner.
    #[must_use]
    pub fn room(&self) -> u64 {
        let (open, room) =
            (self.appenders.of_data().iter().map(|data| data.lock().room()).sum::<u64>(), self.backend.room());
        let each = room.free_size / room.empty().max(1);
        open + room.free_size.saturating_sub(cleaner::reserve(WriteStream::Data) * each)
    }

    /// Bytes written since the pool was opened.
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
impl Store {
    /// Limits the slop space, bytes: a small pool becomes as full as a large one.
    pub(crate) fn with_slop(self, most: u64) -> Self {
        Self { slop_at_most: most, ..self }
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
