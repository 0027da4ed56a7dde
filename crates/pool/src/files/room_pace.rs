//! Slows writers smoothly as room for their content gets short, like ZFS' write throttle: content in memory, and the
//! records that it replaces in part, will need segments at the next commit. Where more of it waits than there are
//! empty segments, the commit has to clean segments that are nearly full, and all writers wait for it. So a commit
//! begins while there is plenty of room for its content, and until it has stored that, each write waits a little.
//!
//! Called by [`Throttle`](super::Throttle), which wakes the committer. Pure, except for the last turn.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Bytes of needed room that never slow a writer.
const LITTLE: u64 = 4 << 20;
/// Content may need this fraction (1/n) of the room before a commit is due.
const COMMIT_SHARE: u64 = 4;
/// Content may need this fraction (1/n) of the room before writers are slowed.
const FREE_SHARE: u64 = 2;
/// Delay of a write at the middle between the first delay and no room at all.
const MIDDLE: Duration = Duration::from_micros(500);
/// The longest delay of a write.
pub(super) const LONGEST: Duration = Duration::from_millis(200);
/// Interval in which a write without room checks again.
pub(super) const AGAIN: Duration = Duration::from_millis(5);

/// Room that content in memory needs, and the turn of writers that are slowed.
#[derive(Debug, Default)]
pub(super) struct RoomPace {
    needed: AtomicU64,
    /// The part of `needed` that the last commit has left in memory, as it found no room for it.
    left: AtomicU64,
    /// Bytes of stored content that the open txg has replaced, and that its commit frees.
    replaced: AtomicU64,
    /// When the last slowed writer continues.
    last: Mutex<Option<Instant>>,
}

/// What a writer has to do before it adds content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// Nothing.
    Now,
    /// Wait for so long after the writer before.
    After(Duration),
    /// Wait until there is room, for at most [`LONGEST`].
    NoRoom,
}

impl RoomPace {
    /// Adds to the needed room, bytes.
    pub(super) fn need(&self, bytes: u64) {
        self.needed.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Subtracts from the needed room: content was stored, or dropped.
    pub(super) fn met(&self, bytes: u64) {
        self.needed.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Needed room without that of content which the last commit has left in memory, bytes.
    pub(super) fn needed_now(&self) -> u64 {
        self.needed.load(Ordering::Relaxed).saturating_sub(self.left.load(Ordering::Relaxed))
    }

    /// Whether content in memory needs so little that no room has to be looked at.
    pub(super) fn is_little(&self) -> bool {
        self.needed_now() < LITTLE
    }

    /// Notes that so many stored bytes were replaced; returns their sum in this txg where a commit may be due by it:
    /// once for each [`LITTLE`].
    pub(super) fn replaced(&self, bytes: u64) -> Option<u64> {
        let before = self.replaced.fetch_add(bytes, Ordering::Relaxed);
        let now = before.saturating_add(bytes);
        (before / LITTLE != now / LITTLE).then_some(now)
    }

    /// Notes that a txg was closed, and that all other content in memory was stored. No operation is running.
    pub(super) fn closed_txg(&self) {
        self.left.store(self.needed.load(Ordering::Relaxed), Ordering::Relaxed);
        self.replaced.store(0, Ordering::Relaxed);
    }

    /// Time at which a writer with this delay continues: one after the other, but none later than after the longest
    /// delay.
    pub(super) fn reserve(&self, now: Instant, delay: Duration) -> Instant {
        let mut last = self.last.lock();
        let at = last.map_or(now, |last| last.max(now)) + delay;
        let at = at.min(now + LONGEST);
        *last = Some(at);
        at
    }
}

/// Whether a commit is due that stores so many needed bytes, with room for so many.
pub(super) fn is_due(needed: u64, room: u64) -> bool {
    needed >= LITTLE && needed >= room / COMMIT_SHARE
}

/// The turn of a writer while content needs so many bytes, with room for so many.
pub(super) fn turn(needed: u64, room: u64) -> Turn {
    let free = room / FREE_SHARE;
    if needed < LITTLE || needed <= free {
        return Turn::Now;
    }
    if needed >= room {
        return Turn::NoRoom;
    }
    // Grows without bounds toward the end of the room: no writer runs into it at full speed.
    let share = (needed - free) as f64 / (room - needed) as f64;
    Turn::After(MIDDLE.mul_f64(share).min(LONGEST))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn delays_grow_smoothly_toward_the_end_of_the_room() {
        assert_eq!((turn(3 * MIB, 0), is_due(3 * MIB, 0)), (Turn::Now, false), "little needs no room");
        assert_eq!((turn(100 * MIB, u64::MAX), is_due(100 * MIB, u64::MAX)), (Turn::Now, false));
        assert!(is_due(25 * MIB, 100 * MIB) && !is_due(24 * MIB, 100 * MIB));
        assert_eq!((turn(50 * MIB, 100 * MIB), turn(75 * MIB, 100 * MIB)), (Turn::Now, Turn::After(MIDDLE)));
        let delays: Vec<Duration> = (51..100)
            .map(|needed| match turn(needed * MIB, 100 * MIB) {
                Turn::After(delay) => delay,
                other => panic!("{other:?} at {needed} %"),
            })
            .collect();
        assert!(delays.is_sorted() && delays[0] < Duration::from_micros(20) && delays[48] > 20 * MIDDLE);
        assert_eq!(turn(100 * MIB, 100 * MIB), Turn::NoRoom);
    }

    #[test]
    fn slowed_writers_continue_one_after_the_other() {
        let (pace, now) = (RoomPace::default(), crate::patience::now());
        let delay = Duration::from_millis(30);
        let turns: Vec<Duration> = (0..9).map(|_| pace.reserve(now, delay) - now).collect();
        assert_eq!(turns[..6], [30, 60, 90, 120, 150, 180].map(Duration::from_millis));
        assert_eq!(turns[6..], [LONGEST; 3]);
        let later = now + Duration::from_secs(1);
        assert_eq!(pace.reserve(later, delay) - later, delay);
    }
}
