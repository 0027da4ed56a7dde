//! Choice of the cleaner's victims, and of the time to clean.
//!
//! Callers: the store's cleaning. The policy is cost-benefit, as in log-structured file systems: benefit is the freed
//! space times the age of the segment's content (old frames will not die soon, so moving them pays for long), cost is
//! reading the segment and writing the live frames. When slots run short, age is ignored: the emptiest segment is
//! first.

use crate::frames::WriteStream;

use super::table::{Segment, SegmentTable};

/// Urgency of cleaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pressure {
    /// Nothing to do.
    None,
    /// There is space, but many used segments are nearly empty: a pool on a file uses more of its disk than
    /// necessary.
    Tidy,
    /// Cleaning pays: few slots are free.
    Some,
    /// Writers wait for slots.
    Urgent,
}

/// Number of slots that stay free for others when a stream allocates one: the table may use the last, ordinary data
/// must leave enough for commits and for the cleaner.
#[must_use]
pub fn reserve(stream: WriteStream) -> u64 {
    match stream {
        WriteStream::Table => 0,
        WriteStream::Relocated | WriteStream::RelocatedMetadata => 3,
        WriteStream::Metadata => 6,
        WriteStream::Data => 9,
    }
}

/// Number of free slots, of `total`, at or below which cleaning is urgent.
#[must_use]
pub fn hurry(total: u64) -> u64 {
    reserve(WriteStream::Data) + 3 + total / 64
}

/// Urgency of cleaning with this many free slots of `total`.
#[must_use]
pub fn pressure(free: u64, total: u64) -> Pressure {
    let low = hurry(total);
    if free <= low {
        Pressure::Urgent
    } else if free <= low + total / 8 {
        Pressure::Some
    } else {
        Pressure::None
    }
}

/// Number of selected segments that become free with the next commits: no frame in them is alive any more.
#[must_use]
pub fn coming(table: &SegmentTable, counts: &dyn Fn(&Segment) -> bool) -> u64 {
    table.without_life().filter(|segment| counts(segment)).count() as u64
}

/// Whether more than a third of the used segments' space is dead, and enough to be worth the work.
#[must_use]
pub fn untidy(table: &SegmentTable, capacity: &dyn Fn(&Segment) -> u64) -> bool {
    const WORTH: u64 = 256 << 20;
    let half_dead = table
        .segments()
        .values()
        .filter(|segment| segment.sealed && segment.live_frames > 0 && !segment.place.is_empty());
    let (taken, lives) = half_dead.fold((0, 0), |(taken, lives), segment| {
        (taken + capacity(segment), lives + u64::from(segment.live_units) * 16)
    });
    taken.saturating_sub(lives) > lives / 2 + WORTH
}

/// The next victim among the sealed segments whose frames are all committed (`durable`), except the `excluded` ones.
#[must_use]
pub fn choose(
    table: &SegmentTable,
    capacity: &dyn Fn(&Segment) -> u64,
    durable: u64,
    pressure: Pressure,
    excluded: &dyn Fn(u32, &Segment) -> bool,
) -> Option<u32> {
    let worth = |segment: &Segment| {
        // In thousandths, so that nothing is rounded differently on another machine.
        let used = (u64::from(segment.live_units) * 16 * 1000 / capacity(segment).max(1)).min(1000);
        let won = 1000 - used;
        let age = durable.saturating_sub(segment.newest.0) + 1;
        match pressure {
            Pressure::Urgent => won,
            _ => won * age.min(1 << 32) / (1000 + used),
        }
    };
    // Under pressure a small gain is worth it too: dead space would otherwise be space that was promised and is
    // unavailable.
    let least = |slot: u64| if pressure == Pressure::Urgent { slot / 512 } else { slot / 64 };
    let may = |segment: &Segment| {
        let slot = capacity(segment);
        segment.sealed
            && !segment.place.is_empty()
            && segment.live_frames > 0
            && segment.newest.0 <= durable
            && u64::from(segment.live_units) * 16 + least(slot) < slot
            && (pressure != Pressure::Tidy || u64::from(segment.live_units) * 32 < slot)
    };
    let candidates = table.segments().iter().filter(|(id, segment)| may(segment) && !excluded(**id, segment));
    candidates.max_by_key(|(_, segment)| worth(segment)).filter(|(_, segment)| worth(segment) > 0).map(|(id, _)| *id)
}

#[cfg(test)]
mod tests {
    use super::super::table::Op;
    use super::*;
    use crate::label::SlotAddress;
    use crate::pointer::Txg;

    fn table(segments: &[(u32, u32, u64, bool)]) -> SegmentTable {
        let mut table = SegmentTable::default();
        for (id, live, newest, sealed) in segments.iter().copied() {
            table
                .apply(Op::Open {
                    id,
                    stream: WriteStream::Data,
                    place: vec![SlotAddress { device: 0, slot: id }].into(),
                })
                .unwrap();
            table.apply(Op::Grow { id, frames: 1, bytes: 1 << 20, units: live, newest: Txg(newest) }).unwrap();
            if sealed {
                table.apply(Op::Seal { id }).unwrap();
            }
        }
        table
    }

    #[test]
    fn the_best_is_chosen() {
        let slot = 1 << 20;
        let slot = |_: &Segment| slot;
        let chosen = |table: &SegmentTable, pressure| choose(table, &slot, 100, pressure, &|_, _| false);
        // Emptier is better; among equals the older; open, full and uncommitted ones are left
        // alone.
        assert_eq!(chosen(&table(&[(1, 30_000, 50, true), (2, 20_000, 50, true)]), Pressure::Some), Some(2));
        assert_eq!(chosen(&table(&[(1, 20_000, 10, true), (2, 20_000, 90, true)]), Pressure::Some), Some(1));
        assert_eq!(
            chosen(&table(&[(1, 30_000, 1, true), (2, 20_000, 99, true)]), Pressure::Some),
            Some(1),
            "age outweighs"
        );
        assert_eq!(
            chosen(&table(&[(1, 30_000, 1, true), (2, 20_000, 99, true)]), Pressure::Urgent),
            Some(2),
            "not in need"
        );
        assert_eq!(
            chosen(&table(&[(1, 65_450, 1, true), (2, 20_000, 50, false), (3, 100, 101, true)]), Pressure::Urgent),
            None
        );
        let nearly_full = table(&[(1, 65_000, 1, true)]);
        assert_eq!((chosen(&nearly_full, Pressure::Some), chosen(&nearly_full, Pressure::Urgent)), (None, Some(1)));
        assert_eq!(choose(&table(&[(1, 100, 1, true)]), &slot, 100, Pressure::Some, &|id, _| id == 1), None);
    }

    #[test]
    fn cleaning_begins_before_writers_wait() {
        assert_eq!(pressure(1000, 1000), Pressure::None);
        assert_eq!(pressure(130, 1000), Pressure::Some);
        assert_eq!(pressure(20, 1000), Pressure::Urgent);
        assert!(
            reserve(WriteStream::Table) < reserve(WriteStream::Relocated)
                && reserve(WriteStream::Relocated) < reserve(WriteStream::Metadata)
        );
    }
}
