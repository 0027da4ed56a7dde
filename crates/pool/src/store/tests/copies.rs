//! Redundant metadata: one damaged copy costs nothing and is rewritten.

use super::*;
use crate::backend::slots;
use crate::device::Device as _;
use crate::label::SlotAddress;

fn create_twice(sims: &[Arc<Simulator>]) -> Store {
    Store::create(devices(sims), &NewPool { redundant_metadata: true, ..new_pool() }).unwrap().0
}

/// Frames of trees, one large enough to begin a block of its own, and some of file content between.
fn fill(store: &Store) -> Vec<(Pointer, u64, usize)> {
    let one = |number: u64| {
        let length = 200 + number as usize * 701;
        (put(store, 1, number, length).unwrap(), number, length)
    };
    (0..50).map(one).collect()
}

fn places(store: &Store, segment: u32) -> Vec<SlotAddress> {
    store.segments().iter().find(|info| info.id == segment).unwrap().place.to_vec()
}

fn is_metadata(number: u64) -> bool {
    number.is_multiple_of(5)
}

/// The bytes of a frame in one slot.
fn bytes(sims: &[Arc<Simulator>], store: &Store, place: SlotAddress, pointer: &Pointer) -> Vec<u8> {
    let start = slots::start(place, store.slot()) + u64::from(pointer.offset) * 16;
    let mut bytes = vec![0; pointer.charged() as usize];
    sims[usize::from(place.device)].read_at(&mut bytes, start).unwrap();
    bytes
}

fn rot(sims: &[Arc<Simulator>], store: &Store, place: SlotAddress, pointer: &Pointer, within: u64) {
    let start = slots::start(place, store.slot()) + u64::from(pointer.offset) * 16;
    sims[usize::from(place.device)].rot(start + within, 3);
}

/// The names of frames.
type Names = Vec<(u32, u32)>;

/// Reports of a scrub: repaired, lost, undamaged.
fn scrubbed(store: &Store) -> (Names, Names, u64) {
    let (mut mended, mut lost, mut whole) = (Vec::new(), Vec::new(), 0);
    store
        .scrub(&mut |frame| {
            match (&frame.damage, frame.mended) {
                (Some(_), true) => mended.push(frame.name),
                (Some(_), false) => lost.push(frame.name),
                (None, _) => whole += u64::from(frame.header.is_some()),
            }
            true
        })
        .unwrap();
    (mended, lost, whole)
}

#[test]
fn a_damaged_copy_is_mended_by_whoever_reads_it_and_by_a_scrub() {
    for count in [1, 3] {
        let sims = simulators(count, 64 * MIB);
        let store = create_twice(&sims);
        let frames = fill(&store);
        commit(&store, 1).unwrap();
        let told = Arc::new(Mutex::new(Vec::new()));
        let telling = Arc::clone(&told);
        store.watch(move |damaged| telling.lock().push((damaged.mended, damaged.device, damaged.pointer)));
        let mut mends = 0;
        // Compressed content has bits that mean nothing.
        let decompressed = |(pointer, number, _): &&(Pointer, u64, usize)| {
            is_metadata(*number) && pointer.compression == Compression::Off
        };
        for (pointer, number, length) in frames.iter().filter(decompressed) {
            let places = places(&store, pointer.segment);
            assert_eq!(places.len(), 2, "trees lie twice");
            assert_eq!(
                places[0].device == places[1].device,
                count == 1,
                "on different devices where there are several"
            );
            let whole = bytes(&sims, &store, places[0], pointer);
            assert_eq!(bytes(&sims, &store, places[1], pointer), whole);
            for (copy, within) in [(0, 100), (1, 150), (0, 20), (1, 20), (0, 199)] {
                rot(&sims, &store, places[copy], pointer, within);
                assert_eq!(*store.read(pointer).unwrap(), *content(*number, *length));
                if copy == 0 && within >= 80 {
                    // Damage found by a reader is repaired at once.
                    assert!(told.lock().pop().is_some_and(|told| told == (true, Some(places[0].device), *pointer)));
                } else {
                    let (mended, lost, found) = scrubbed(&store);
                    // Where its header is damaged, the frame is not counted in its first copy.
                    let whole = 50 - u64::from(copy == 0 && within < 80);
                    assert_eq!(
                        (mended, lost.len(), found),
                        (vec![(pointer.segment, pointer.index)], 0, whole),
                        "{within}"
                    );
                }
                mends += 1;
                assert_eq!(store.mended(), mends);
                assert_eq!(
                    [0, 1].map(|copy| bytes(&sims, &store, places[copy], pointer)),
                    [whole.clone(), whole.clone()]
                );
                assert!(told.lock().is_empty());
            }
        }
        assert!(mends >= 20);
    }
}

#[test]
fn what_is_damaged_at_both_places_is_told_and_never_returned() {
    let sims = simulators(1, 64 * MIB);
    let store = create_twice(&sims);
    let frames = fill(&store);
    commit(&store, 1).unwrap();
    let (pointer, number, _) = frames[20];
    let places = places(&store, pointer.segment);
    rot(&sims, &store, places[0], &pointer, 300);
    rot(&sims, &store, places[1], &pointer, 400);
    assert!(matches!(store.read(&pointer), Err(PoolError::Frame { .. })));
    assert_eq!(scrubbed(&store), (Vec::new(), vec![(pointer.segment, pointer.index)], 50));
    // Another frame in the same blocks is repaired all the same, and this one is unchanged.
    let neighbour = frames[25].0;
    rot(&sims, &store, places[0], &neighbour, 90);
    assert_eq!(scrubbed(&store).0, vec![(neighbour.segment, neighbour.index)]);
    rot(&sims, &store, places[1], &pointer, 400);
    assert_eq!(*store.read(&pointer).unwrap(), *content(number, frames[20].2), "one copy is whole again");
}

#[test]
fn a_read_only_pool_reads_the_other_copy_and_writes_nothing() {
    let sims = simulators(1, 64 * MIB);
    let store = create_twice(&sims);
    let frames = fill(&store);
    commit(&store, 1).unwrap();
    store.close(true, 1).unwrap();
    let (pointer, number, length) = frames[0];
    rot(&sims, &store, places(&store, pointer.segment)[0], &pointer, 90);
    drop(store);
    let before = sims[0].bytes();
    let (store, _) = open(&sims, Access::ReadOnly).unwrap();
    assert_eq!(*store.read(&pointer).unwrap(), *content(number, length));
    scrubbed(&store);
    assert_eq!((store.mended(), sims[0].bytes() == before), (0, true));
}

#[test]
fn the_table_is_read_from_its_copy_and_mended() {
    let sims = simulators(1, 64 * MIB);
    let store = create_twice(&sims);
    let frames = fill(&store);
    commit(&store, 1).unwrap();
    commit(&store, 2).unwrap();
    let root = store.root();
    drop(store);
    for copy in [0, 1] {
        for pointer in root.deltas.iter().chain(&root.table_top) {
            let segment = root.table_segment(pointer.segment).unwrap();
            assert_eq!(segment.place.len(), 2);
            sims[0].rot(slots::start(segment.place[copy], MIB) + u64::from(pointer.offset) * 16 + 82, 1);
        }
        let (store, again) = open(&sims, Access::ReadOnly).unwrap();
        assert_eq!(again.generation, root.generation);
        frames.iter().for_each(|(pointer, number, length)| {
            assert_eq!(*store.read(pointer).unwrap(), *content(*number, *length))
        });
        drop(store);
        let (store, _) = open(&sims, Access::ReadWrite).unwrap();
        let (mended, lost, _) = scrubbed(&store);
        assert_eq!((mended.len(), lost.len()), (root.deltas.len() + root.table_top.len(), 0));
        assert_eq!((scrubbed(&store).0.len(), store.mended()), (0, mended.len() as u64));
        drop(store);
    }
}

#[test]
fn what_the_cleaner_moves_is_written_twice_again() {
    let sims = simulators(2, 64 * MIB);
    let store = create_twice(&sims);
    let frames = fill(&store);
    commit(&store, 1).unwrap();
    let id = frames[0].0.segment;
    // Damage in the copy that the cleaner reads is repaired before.
    rot(&sims, &store, places(&store, id)[0], &frames[5].0, 500);
    assert!(store.mend_segment(id).unwrap());
    store.move_out_for_tests(id, 64 * MIB, &mut Cleaned::default()).unwrap();
    commit(&store, 2).unwrap();
    let relocated: Vec<_> =
        store.segments().into_iter().filter(|info| info.stream == WriteStream::RelocatedMetadata).collect();
    assert_eq!(relocated.iter().map(|info| (info.place.len(), info.live_frames)).collect::<Vec<_>>(), vec![(2, 10)]);
    let at = slots::start(relocated[0].place[0], store.slot());
    (0..40).for_each(|step| sims[usize::from(relocated[0].place[0].device)].rot(at + step * 997, 2));
    frames
        .iter()
        .for_each(|(pointer, number, length)| assert_eq!(*store.read(pointer).unwrap(), *content(*number, *length)));
    scrubbed(&store);
    assert_eq!(scrubbed(&store), (Vec::new(), Vec::new(), 50));
    drop(store);
    // A crash later it is still so.
    sims.iter().for_each(|sim| sim.crash(7));
    let (store, _) = open(&sims, Access::ReadWrite).unwrap();
    frames
        .iter()
        .for_each(|(pointer, number, length)| assert_eq!(*store.read(pointer).unwrap(), *content(*number, *length)));
    assert_eq!(
        store.space().copies,
        frames.iter().filter(|(_, number, _)| is_metadata(*number)).map(|(pointer, ..)| pointer.charged()).sum()
    );
}

#[test]
fn where_slots_are_short_metadata_has_one_place() {
    let sims = simulators(1, 64 * MIB);
    let store = create_twice(&sims);
    let (mut txg, mut frames) = (1, Vec::new());
    let outcome = (1..).find_map(|number: u64| {
        // A quarter of it trees.
        let number = number * 5 - if number.is_multiple_of(4) { 0 } else { 1 };
        match put(&store, txg, number, 200_000) {
            Ok(pointer) => frames.push((pointer, number)),
            Err(error) => return Some(error),
        }
        if number.is_multiple_of(8) {
            commit(&store, txg).unwrap();
            txg += 1;
        }
        None
    });
    assert!(matches!(outcome, Some(PoolError::NoSpace)), "{outcome:?}");
    commit(&store, txg).unwrap();
    frames.iter().for_each(|(pointer, number)| assert_eq!(*store.read(pointer).unwrap(), *content(*number, 200_000)));
    let space = store.space();
    let segments = store.segments();
    let twice: u64 = segments.iter().filter(|info| info.place.len() == 2).map(|info| info.live_bytes).sum();
    assert_eq!((space.copies, space.free), (twice, space.size.saturating_sub(space.allocated + space.slack + twice)));
    // Everything can be freed again.
    frames.iter().for_each(|(pointer, _)| store.free(pointer, Txg(txg + 1)));
    (1..6).for_each(|later| commit(&store, txg + later).unwrap());
    assert_eq!((used(&store), store.space().copies), (0, 0));
}

#[test]
fn an_older_program_is_told_that_it_is_too_old() {
    let sims = simulators(1, 64 * MIB);
    let store = create_twice(&sims);
    use crate::label::Identity;
    let always = Identity::ORDERED_NAMES | Identity::PAGED_TABLE | Identity::ROW_CHARGES;
    assert_eq!(store.identity().incompatible, Identity::REDUNDANT_METADATA | always);
    drop(store);
    let once = simulators(1, 64 * MIB);
    assert_eq!(create(&once).identity().incompatible, always);
}
