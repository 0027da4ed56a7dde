//! Tests of the segment table and of how it is stored.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::super::table_log::{NOT_SAID, read_full, read_index, replay_delta};
use super::*;
use crate::frames::WriteStream;
use crate::pointer::Txg;

fn place(slot: u32) -> crate::label::Place {
    vec![crate::label::SlotAddress { device: 0, slot }].into()
}

/// A table after a random sequence of operations, without the impossible ones.
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
                id: next(12) * 7,
                stream: if next(3) == 0 { WriteStream::Relocated } else { WriteStream::Data },
                place: place(next(1000)),
            },
            1 | 2 => {
                let id = next(12) * 7;
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
            3 => Op::Seal { id: next(12) * 7 },
            4 => Op::Free { segment: next(12) * 7, index: next(40), count: 1, units: 7 },
            5 => {
                let count = 1 + next(3);
                Op::Free { segment: next(12) * 7, index: next(40), count, units: 7 * count }
            }
            6 => {
                let to = next(12) * 7;
                let room = table
                    .segments()
                    .get(&to)
                    .is_some_and(|target| target.live_frames < target.frames && !target.sealed);
                if !room {
                    continue;
                }
                Op::Move { segment: next(12) * 7, index: next(40), from: NOT_SAID, to, offset: next(1000), units: 7 }
            }
            7 => {
                let id = next(12) * 7;
                let Some(segment) = table.segments().get(&id) else { continue };
                let mut columns = segment.place.to_vec();
                columns.push(crate::label::SlotAddress { device: next(5) as u16, slot: next(1000) });
                Op::Widen { id, place: columns.into() }
            }
            _ => {
                table.finish(step as u64, &BTreeSet::new()).unwrap();
                Op::Release { id: next(12) * 7 }
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

/// A table that no page knows: all pages of it, and a delta that adds nothing.
fn copied(table: &SegmentTable) -> SegmentTable {
    let mut reader = TableReader::default();
    for page in table.pages() {
        reader.page(&write_page(table, page), page).unwrap();
    }
    reader.delta(&write_delta(7, table.next(), &[], &[])).unwrap();
    reader.finish().unwrap().table
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn pages_are_the_table(seed: u64, steps in 0usize..400) {
        let (table, _) = grown(seed, steps);
        let copy = copied(&table);
        prop_assert_eq!(copy.segments(), table.segments());
        prop_assert_eq!((copy.next(), copy.releasable(u64::MAX)), (table.next(), table.releasable(u64::MAX)));
        for page in table.pages() {
            let bytes = write_page(&table, page);
            for cut in 0..bytes.len() {
                prop_assert!(TableReader::default().page(&bytes[..cut], page).is_err());
            }
        }
    }

    /// Pages of any moments and the operations since the oldest of them give the same table.
    #[test]
    fn pages_and_deltas_are_the_table(
        seed: u64,
        steps in 1usize..600,
        stored in proptest::collection::vec((0usize..600, 0u32..3), 0..12),
    ) {
        let (table, ops) = grown(seed, steps);
        let mut again = SegmentTable::default();
        let mut images = std::collections::BTreeMap::new();
        for (at, op) in ops.iter().enumerate() {
            for (_, page) in stored.iter().filter(|(when, _)| *when == at) {
                again.stored(*page);
                images.insert(*page, write_page(&again, *page));
            }
            again.apply(op.clone()).unwrap();
        }
        prop_assert_eq!(again.segments(), table.segments());
        let needed = again.first_needed();
        again.forget_stored();
        prop_assert_eq!(again.first_recorded(), needed);
        let uncommitted = vec![UncommittedRun { segment: 3, index: 1, count: 2, units: 14, birth: Txg(0) }];
        let rest = again.take_ops();
        // In several deltas.
        for cut in [0, rest.len() / 3, rest.len()] {
            let mut reader = TableReader::default();
            images.iter().for_each(|(page, image)| reader.page(image, *page).unwrap());
            let (first, second) = rest.split_at(cut);
            reader.delta(&write_delta(8, needed, first, &[])).unwrap();
            reader.delta(&write_delta(9, needed + cut as u64, second, &uncommitted)).unwrap();
            let read = reader.finish().unwrap();
            prop_assert_eq!(read.table.segments(), table.segments());
            prop_assert_eq!(read.table.releasable(u64::MAX), table.releasable(u64::MAX));
            prop_assert_eq!(read.table.without_life().count(), table.without_life().count());
            prop_assert_eq!((read.table.next(), read.table.first_needed()), (again.next(), again.first_needed()));
            prop_assert_eq!(&read.uncommitted, &uncommitted);
        }
    }

    #[test]
    fn any_bytes_are_a_table_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..300), kind in 1u8..8) {
        let mut framed = vec![kind];
        framed.extend(7u64.to_le_bytes());
        framed.extend(&bytes);
        let (mut table, _) = grown(bytes.len() as u64, 200);
        for bytes in [&framed, &bytes] {
            if let Ok((table, _)) = read_full(bytes) {
                let copy = copied(&table);
                prop_assert_eq!(copy.segments(), table.segments());
            }
            let mut reader = TableReader::default();
            let _ = reader.page(bytes, 0);
            let _ = reader.delta(bytes);
            if let Ok(read) = reader.finish() {
                let copy = copied(&read.table);
                prop_assert_eq!(copy.segments(), read.table.segments());
            }
            let _ = (replay_delta(bytes, &mut table), read_index(bytes), read_list(bytes), read_node(bytes, (1, 0)));
        }
    }

    #[test]
    fn a_bent_page_is_a_page_or_an_error(seed: u64, at: usize, bit in 0u8..8) {
        let (table, _) = grown(seed, 300);
        let mut bytes = write_page(&table, 0);
        let at = at % bytes.len();
        bytes[at] ^= 1 << bit;
        let mut reader = TableReader::default();
        if reader.page(&bytes, 0).is_ok() {
            let _ = reader.delta(&write_delta(7, table.next(), &[], &[])).and_then(|()| reader.finish());
        }
    }
}

#[test]
fn nodes_and_lists_come_back() {
    let pointer = |segment| Pointer {
        segment,
        index: 1,
        offset: 2,
        stored: 3,
        logical: 4,
        kind: crate::pointer::FrameKind::Table,
        compression: crate::pointer::Compression::Off,
        checksum_kind: crate::pointer::ChecksumKind::Xxh3,
        pin: 0,
        birth: Txg(5),
        checksum: [6; 16],
    };
    let mut tree = PageTree::default();
    for page in [0, 1, FAN - 1, FAN, u32::MAX / PAGE] {
        tree.set((0, page), vec![pointer(100 + page % 1000), pointer(3)]);
    }
    let bytes = write_node(1, (1, 0), tree.children((1, 0)));
    let children = read_node(&bytes, (1, 0)).unwrap();
    assert_eq!(children.iter().map(|(name, _)| *name).collect::<Vec<_>>(), [(0, 0), (0, 1), (0, FAN - 1)]);
    assert!(children.iter().all(|(name, frames)| tree.frames(*name).unwrap() == frames));
    assert!(read_node(&bytes, (1, 1)).is_err() && read_node(&bytes, (2, 0)).is_err());
    // All numbers of segments are below one node.
    let mut name = (0, u32::MAX / PAGE);
    while name.0 < TOP {
        name = parent(name);
    }
    assert_eq!(name, (TOP, 0));
    assert_eq!(tree.charged()[&3], 5 * pointer(3).charged());
    tree.set((0, 1), vec![pointer(9)]);
    tree.set((0, 0), Vec::new());
    assert_eq!(tree.charged()[&3], 3 * pointer(3).charged());
    assert_eq!(tree.lying_in(9).collect::<Vec<_>>(), [(0, 1)]);
    assert!(tree.lying_in(100).next().is_none() && tree.frames((0, 0)).is_none());

    let segment = |id| TableSegment { id, place: place(id), frames: 1, bytes: 2, dead_since: (id == 4).then_some(9) };
    let segments: Vec<TableSegment> = (1..9).map(segment).collect();
    assert_eq!(read_list(&write_list(3, &segments)).unwrap(), segments);
    assert!(read_list(&write_list(3, &[segment(2), segment(2)])).is_err());
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
    table.apply(Op::Move { segment: 1, index: 2, from: 1, to: 2, offset: 5, units: 10 }).unwrap();
    let found = table.find(1, 2, 77).unwrap();
    assert_eq!((found.segment, found.offset, found.place[0].slot), (2, 5, 20));
    assert!(!table.lives_at(1, 2, 1, 77) && table.lives_at(1, 2, 2, 5));
    assert!(table.apply(Op::Move { segment: 1, index: 3, from: 1, to: 2, offset: 9, units: 10 }).is_err());
    table.apply(Op::Free { segment: 1, index: 0, count: 2, units: 20 }).unwrap();
    assert!(table.apply(Op::Free { segment: 1, index: 0, count: 1, units: 10 }).is_err(), "freed twice");
    assert_eq!(table.live_bytes(), 160);
    table.finish(8, &BTreeSet::new()).unwrap();
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
fn what_frames_are_on_their_way_to_is_not_dead() {
    let mut table = SegmentTable::default();
    for (id, stream) in [(1, WriteStream::Data), (2, WriteStream::Relocated)] {
        table.apply(Op::Open { id, stream, place: place(id) }).unwrap();
        let units = if id == 1 { 7 } else { 0 };
        table.apply(Op::Grow { id, frames: 1, bytes: 112, units, newest: Txg(1) }).unwrap();
        table.apply(Op::Seal { id }).unwrap();
    }
    table.finish(5, &BTreeSet::from([2])).unwrap();
    assert!(table.releasable(9).is_empty());
    // They may be there by the next commit, and did not come.
    table.finish(5, &BTreeSet::new()).unwrap();
    assert_eq!(table.releasable(9).len(), 1);
    table.apply(Op::Move { segment: 1, index: 0, from: 1, to: 2, offset: 0, units: 7 }).unwrap();
    table.finish(6, &BTreeSet::new()).unwrap();
    assert_eq!(table.releasable(9).into_iter().map(|(id, _)| id).collect::<Vec<_>>(), [1]);
}
