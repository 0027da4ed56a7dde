//! Tests of the segment table and of its form on the pool.

use std::collections::BTreeSet;

use super::*;
use proptest::prelude::*;

fn place(slot: u32) -> crate::label::Place {
    vec![crate::label::SlotAddress { device: 0, slot }].into()
}

/// What a random sequence of operations makes of a table: only those that are possible are kept.
fn grown(seed: u64, steps: usize) -> (SegmentTable, Vec<Op>) {
    let mut random = seed;
    let mut next = move |limit: u32| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((random >> 33) as u32) % limit.max(1)
    };
    let mut table = SegmentTable::default();
    for step in 0..steps {
        let op = match next(9) {
            0 => Op::Open {
                id: next(12),
                stream: if next(3) == 0 { WriteStream::Relocated } else { WriteStream::Data },
                place: place(next(1000)),
            },
            1 | 2 => {
                let id = next(12);
                let Some(segment) = table.segments().get(&id) else { continue };
                let added = next(6);
                let units = if segment.stream == WriteStream::Relocated { 0 } else { added * 7 };
                Op::Grow {
                    id,
                    frames: segment.frames + added,
                    bytes: segment.bytes + added * 112,
                    units,
                    newest: Txg(step as u64),
                }
            }
            3 => Op::Seal { id: next(12) },
            4 => Op::Free { segment: next(12), index: next(40), count: 1, units: 7 },
            5 => {
                let count = 1 + next(3);
                Op::Free { segment: next(12), index: next(40), count, units: 7 * count }
            }
            6 => {
                let to = next(12);
                let room = table
                    .segments()
                    .get(&to)
                    .is_some_and(|target| target.live_frames < target.frames && !target.sealed);
                if !room {
                    continue;
                }
                Op::Move { segment: next(12), index: next(40), to, offset: next(1000), units: 7 }
            }
            7 => {
                let id = next(12);
                let Some(segment) = table.segments().get(&id) else { continue };
                let mut columns = segment.place.to_vec();
                columns.push(crate::label::SlotAddress { device: next(5) as u16, slot: next(1000) });
                Op::Widen { id, place: columns.into() }
            }
            _ => {
                table.finish(step as u64);
                Op::Release { id: next(12) }
            }
        };
        let before = table.clone();
        if table.apply(op).is_err() {
            assert_eq!(before.segments(), table.segments(), "a refused operation has changed the table");
        }
        for segment in table.segments().values() {
            assert_eq!(segment.live_units, segment.live_frames * 7);
        }
    }
    let ops = table.take_ops();
    (table, ops)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn a_copy_is_the_table(seed: u64, steps in 0usize..400) {
        let (table, _) = grown(seed, steps);
        let uncommitted = vec![UncommittedRun { segment: 3, index: 1, count: 2, units: 14, birth: Txg(0) }];
        let bytes = write_full(9, &table, &uncommitted);
        let (back, uncommitted_back) = read_full(&bytes).unwrap();
        prop_assert_eq!(back.segments(), table.segments());
        prop_assert_eq!(uncommitted_back, uncommitted);
        for cut in 0..bytes.len() {
            prop_assert!(read_full(&bytes[..cut]).is_err());
        }
    }

    #[test]
    fn deltas_give_the_same_table(seed: u64, steps in 0usize..400, cut in 0usize..400) {
        let (mut table, ops) = grown(seed, steps);
        table.finish(1000);
        let (first, second) = ops.split_at(cut.min(ops.len()));
        // Releases need segments that are dead: the copy ends the commits where the table did, at
        // the latest before each release.
        let mut copy = SegmentTable::default();
        for op in first.iter().chain(second) {
            if matches!(op, Op::Release { .. }) {
                replay_delta(&write_delta(7, &[], &[]), &mut copy).unwrap();
            }
            replay_delta(&write_delta(0, std::slice::from_ref(op), &[]), &mut copy).unwrap();
        }
        prop_assert_eq!(copy.segments().len(), table.segments().len());
        for (id, segment) in table.segments() {
            let copied = &copy.segments()[id];
            prop_assert_eq!((copied.frames, copied.live_units, &copied.dead, &copied.moved), (segment.frames, segment.live_units, &segment.dead, &segment.moved));
        }
    }

    #[test]
    fn any_bytes_are_a_table_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..300), kind in 1u8..4) {
        let mut framed = vec![kind];
        framed.extend(7u64.to_le_bytes());
        framed.extend(&bytes);
        if let Ok((table, uncommitted)) = read_full(&framed) {
            let (again, _) = read_full(&write_full(7, &table, &uncommitted)).unwrap();
            prop_assert_eq!(again.segments(), table.segments());
        }
        let (mut table, _) = grown(bytes.len() as u64, 200);
        let _ = replay_delta(&framed, &mut table);
        let _ = read_index(&framed);
        let _ = (read_full(&bytes), read_index(&bytes), replay_delta(&bytes, &mut table));
    }

    #[test]
    fn a_bent_copy_is_a_table_or_an_error(seed: u64, at: usize, bit in 0u8..8) {
        let (table, _) = grown(seed, 300);
        let mut bytes = write_full(7, &table, &[]);
        let at = at % bytes.len();
        bytes[at] ^= 1 << bit;
        let _ = read_full(&bytes);
    }
}

#[test]
fn frames_are_found_where_they_are() {
    let mut table = SegmentTable::default();
    table.apply(Op::Open { id: 1, stream: WriteStream::Data, place: place(10) }).unwrap();
    table.apply(Op::Grow { id: 1, frames: 3, bytes: 4096, units: 30, newest: Txg(1) }).unwrap();
    table.apply(Op::Seal { id: 1 }).unwrap();
    table.apply(Op::Open { id: 2, stream: WriteStream::Relocated, place: place(20) }).unwrap();
    table.apply(Op::Grow { id: 2, frames: 2, bytes: 4096, units: 0, newest: Txg(1) }).unwrap();
    assert_eq!(table.find(1, 2, 77).unwrap().offset, 77);
    assert!(table.lives_at(1, 2, 1, 77) && !table.lives_at(1, 3, 1, 0) && !table.lives_at(2, 0, 2, 0));
    table.apply(Op::Move { segment: 1, index: 2, to: 2, offset: 5, units: 10 }).unwrap();
    let found = table.find(1, 2, 77).unwrap();
    assert_eq!((found.segment, found.offset, found.place[0].slot), (2, 5, 20));
    assert!(!table.lives_at(1, 2, 1, 77) && table.lives_at(1, 2, 2, 5));
    assert!(table.apply(Op::Move { segment: 1, index: 3, to: 2, offset: 9, units: 10 }).is_err());
    table.apply(Op::Free { segment: 1, index: 0, count: 2, units: 20 }).unwrap();
    assert!(table.apply(Op::Free { segment: 1, index: 0, count: 1, units: 10 }).is_err(), "freed twice");
    assert_eq!(table.live_bytes(), 160);
    table.finish(8);
    assert!(table.releasable(7).is_empty());
    assert_eq!(table.releasable(8), vec![(1, place(10))]);
    table.apply(Op::Release { id: 1 }).unwrap();
    assert!(table.find(1, 0, 0).is_none(), "its place was given back");
    assert_eq!(table.find(1, 2, 77).unwrap().segment, 2);
    table.apply(Op::Free { segment: 1, index: 2, count: 1, units: 10 }).unwrap();
    assert!(!table.segments().contains_key(&1), "nothing is left of it");
    assert_eq!(table.live_bytes(), 0);
}

#[test]
fn lists_of_pieces() {
    assert!(read_index(&write_index(3, &[])).unwrap().is_empty());
    assert!(read_index(&write_full(3, &SegmentTable::default(), &[])).is_err());
}

#[test]
fn what_frames_are_on_their_way_to_is_not_dead() {
    let mut table = SegmentTable::default();
    for (id, stream) in [(1, WriteStream::Data), (2, WriteStream::Relocated)] {
        table.apply(Op::Open { id, stream, place: place(id) }).unwrap();
        let units = if id == 1 { 7 } else { 0 };
        table.apply(Op::Grow { id, frames: 1, bytes: 112, units, newest: Txg(1) }).unwrap();
        table.apply(Op::Seal { id }).unwrap();
    }
    table.finish_but(5, &BTreeSet::from([2]));
    assert!(table.releasable(9).is_empty());
    // Whoever replays that does not know of it.
    table.finish(5);
    assert_eq!(table.releasable(9).len(), 1);
    table.apply(Op::Move { segment: 1, index: 0, to: 2, offset: 0, units: 7 }).unwrap();
    table.finish(6);
    assert_eq!(table.releasable(9).into_iter().map(|(id, _)| id).collect::<Vec<_>>(), [1]);
}
