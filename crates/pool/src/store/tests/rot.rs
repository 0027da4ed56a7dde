//! Bit rot: detected, reported, never returned as content.

use std::collections::BTreeSet;

use super::*;
use crate::backend::slots;

#[test]
fn every_flipped_bit_is_found_and_named() {
    let sims = simulators(1, 64 * MIB);
    let store = create(&sims);
    let frames: Vec<_> =
        (0..60u64).map(|number| (put(&store, 1, number, 200 + number as usize * 301).unwrap(), number)).collect();
    commit(&store, 1).unwrap();
    let mut random = 1u64;
    for (pointer, number) in &frames {
        let length = 200 + *number as usize * 301;
        let place = store.segments().iter().find(|segment| segment.id == pointer.segment).unwrap().place[0];
        let start = slots::start(place, store.slot()) + u64::from(pointer.offset) * 16;
        for part in 0..6u64 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(11);
            let within = if part < 3 { (random >> 33) % 80 } else { 80 + (random >> 33) % u64::from(pointer.stored) };
            sims[0].rot(start + within, part as u8);
            match store.read(pointer) {
                Ok(read) => {
                    assert!(*read == *content(*number, length), "wrong content was returned");
                    // Compressed content has bits that mean nothing: it decompresses to the same.
                    if within >= 80 {
                        assert_ne!(pointer.compression, Compression::Off);
                        sims[0].rot(start + within, part as u8);
                        continue;
                    }
                }
                Err(PoolError::Frame { pointer: named, damage }) => {
                    assert!(named == *pointer && within >= 80);
                    assert!(damage == Damage::Checksum || damage == Damage::Compression, "{damage}");
                }
                Err(error) => panic!("{error}"),
            }
            let (mut damaged, mut fine) = (Vec::new(), 0);
            store
                .scrub(&mut |frame| {
                    match frame.damage {
                        Some(_) => damaged.push((frame.name, frame.owner)),
                        None => fine += u64::from(frame.header.is_some()),
                    }
                    true
                })
                .unwrap();
            assert_eq!(damaged.len(), 1, "frame {pointer}, byte {within}");
            assert_eq!(fine, frames.len() as u64 - 1);
            assert_eq!(damaged[0].0, (pointer.segment, pointer.index));
            assert_eq!(damaged[0].1.map(|owner| owner.object), (within >= 80).then_some(*number));
            sims[0].rot(start + within, part as u8);
        }
    }
}

#[test]
fn what_comes_goes_and_moves_while_a_scrub_looks_is_not_called_damaged() {
    for redundant_metadata in [false, true] {
        let sims = simulators(1, 64 * MIB);
        let store = Store::create(devices(&sims), &NewPool { redundant_metadata, ..new_pool() }).unwrap().0;
        let mut frames: Vec<_> = (0..200u64).map(|number| put(&store, 1, number, 3000).unwrap()).collect();
        commit(&store, 1).unwrap();
        let (mut seen, mut txg) = (0u64, 1);
        store
            .scrub(&mut |checked| {
                assert_eq!(checked.damage, None, "{:?}, two places: {redundant_metadata}", checked.name);
                seen += 1;
                if seen % 7 == 1 {
                    txg += 1;
                    // The open segments grow, some frames are freed, and some move to a segment of relocated frames,
                    // which grows as well.
                    frames.extend((0..5).map(|number| put(&store, txg, txg * 10 + number, 3000).unwrap()));
                    store.free(&frames.remove((txg as usize * 3) % frames.len()), Txg(txg));
                    let from = frames[(txg as usize * 5) % frames.len()].segment;
                    if txg.is_multiple_of(4) {
                        store.move_out_for_tests(from, MIB, &mut Cleaned::default()).unwrap();
                    }
                    commit(&store, txg).unwrap();
                }
                seen < 400
            })
            .unwrap();
        assert!(txg > 5, "the scrub was over too early");
        assert!(frames.iter().all(|pointer| store.read(pointer).is_ok()));
    }
}

#[test]
fn damaged_frames_are_not_moved_and_the_others_are() {
    let sims = simulators(1, 64 * MIB);
    let store = create(&sims);
    let frames: Vec<_> = (0..20u64).map(|at| (put(&store, 1, at * 5 + 1, 60_000).unwrap(), at * 5 + 1)).collect();
    commit(&store, 1).unwrap();
    let id = frames[0].0.segment;
    let place = store.segments().iter().find(|segment| segment.id == id).unwrap().place[0];
    sims[0].rot(slots::start(place, store.slot()) + u64::from(frames[3].0.offset) * 16 + 1000, 1);
    store.move_out_for_tests(id, 64 * MIB, &mut Cleaned::default()).unwrap();
    commit(&store, 2).unwrap();
    let moved = store.segments().iter().find(|segment| segment.id == id).unwrap().clone();
    assert_eq!(moved.live_frames, 1, "the damaged frame stays where it is");
    for (at, (pointer, number)) in frames.iter().enumerate() {
        match store.read(pointer) {
            Ok(read) => assert!(at != 3 && *read == *content(*number, 60_000)),
            Err(error) => assert!(at == 3, "{error}"),
        }
    }
    let mut told = BTreeSet::new();
    store
        .inspect(id, &mut |header, _, lives| {
            if lives { told.insert(header.pointer.index) } else { true }
        })
        .unwrap();
    assert_eq!(told, BTreeSet::from([frames[3].0.index]));
    assert!(store.inspect(9999, &mut |_, _, _| true).is_err());
}

#[test]
fn rot_in_labels_and_table_is_survived_or_told() {
    let sims = simulators(1, 64 * MIB);
    let store = create(&sims);
    let pointer = put(&store, 1, 1, 5000).unwrap();
    commit(&store, 1).unwrap();
    let root = store.root();
    drop(store);
    // Three of four copies of the newest root.
    let places = crate::label::places(64 * MIB);
    for place in &places[..3] {
        sims[0].rot(place + crate::label::RING_AT + root.generation % crate::label::RING * 4096 + 50, 2);
    }
    let (store, again) = open(&sims, Access::ReadOnly).unwrap();
    assert_eq!(again.generation, root.generation);
    assert_eq!(*store.read(&pointer).unwrap(), *content(1, 5000));
    drop(store);
    // The table itself: an import must report it, and an older state exists for a rewind.
    let table = *root.deltas.last().unwrap();
    let place = root.table_segments.iter().find(|segment| segment.id == table.segment).unwrap().place[0];
    sims[0].rot(slots::start(place, MIB) + u64::from(table.offset) * 16 + 82, 1);
    assert!(matches!(open(&sims, Access::ReadWrite), Err(PoolError::Frame { .. })));
    let (_, older) = open(&sims, Access::Rewind(Txg(0))).unwrap();
    assert_eq!(older.txg, Txg(0));
}

#[test]
fn going_back_writes_nothing_before_it_is_confirmed() {
    let sims = simulators(1, 64 * MIB);
    let store = create(&sims);
    for txg in 1..4 {
        put(&store, txg, txg, 5000).unwrap();
        commit(&store, txg).unwrap();
    }
    drop(store);
    let before = sims[0].bytes();
    for txg in [2, 1] {
        let (store, root) = open(&sims, Access::Rewind(Txg(txg))).unwrap();
        assert_eq!(root.txg, Txg(txg));
        // The opened state cannot be read: the store is dropped.
        drop(store);
        assert!(sims[0].bytes() == before, "nothing is given up yet");
    }
    assert_eq!(open(&sims, Access::ReadOnly).unwrap().1.txg, Txg(3));
    let (store, _) = open(&sims, Access::Rewind(Txg(1))).unwrap();
    store.confirm().unwrap();
    drop(store);
    sims[0].crash(3);
    assert_eq!(open(&sims, Access::ReadOnly).unwrap().1.txg, Txg(1));
}

#[test]
fn names_that_do_not_fit_the_labels_are_refused_and_the_pool_goes_on() {
    let sims = simulators(1, 64 * MIB);
    let store = create(&sims);
    let long = |at: usize| {
        Arc::new(Simulator::new(&format!("{at}{}", "x".repeat(1000)), 64 * MIB)) as Arc<dyn crate::device::Device>
    };
    let refused = (0..64).find_map(|at| store.add_device(long(at), 1).err());
    assert!(matches!(refused, Some(PoolError::Refused(_))), "{refused:?}");
    assert_eq!(store.suspended(), None);
    put(&store, 1, 1, 100).unwrap();
    commit(&store, 1).unwrap();
}

#[test]
fn a_device_that_cannot_be_written_is_refused_and_the_pool_goes_on() {
    let sims = simulators(2, 64 * MIB);
    let store = create(&sims[..1]);
    for operations in 0..6 {
        sims[1].fail_after(operations);
        let refused = store.add_device(sims[1].clone(), 9);
        assert!(matches!(&refused, Err(PoolError::Refused(why)) if why.contains("label")), "{operations}: {refused:?}");
        assert_eq!((store.suspended(), store.identity().members.len()), (None, 1));
        // Labels that are more than one revision apart after a power cut are refused.
        assert_eq!(crate::label::probe(&*sims[0]).unwrap().unwrap().revision, store.identity().revision);
        put(&store, 1, operations, 5000).unwrap();
        commit(&store, operations + 1).unwrap();
    }
    store.rename("lake", 10).unwrap();
    // The device's partial labels mislead no import.
    drop(store);
    sims[1].fail_after(u64::MAX);
    let (store, _) = open(&sims[..1], Access::ReadWrite).unwrap();
    assert_eq!((store.identity().name.as_str(), store.identity().members.len()), ("lake", 1));
}

#[test]
fn damaged_labels_are_written_anew_by_a_scrub() {
    let sims = simulators(2, 64 * MIB);
    let store = create(&sims);
    put(&store, 1, 1, 5000).unwrap();
    commit(&store, 1).unwrap();
    assert_eq!(store.scrub_labels().unwrap(), [0, 0]);
    // All identities but the last, and all copies of the newest root but the first.
    let places = crate::label::places(64 * MIB);
    let generation = store.committed.lock().root.generation;
    let root = crate::label::RING_AT + generation % crate::label::RING * 4096;
    for place in &places[..3] {
        sims[0].rot(place + crate::label::IDENTITY_AT + 100, 3);
    }
    for place in &places[1..] {
        sims[1].rot(place + root + 50, 5);
    }
    assert_eq!(store.scrub_labels().unwrap(), [3, 3]);
    assert_eq!(store.scrub_labels().unwrap(), [0, 0]);
    // The rewritten copy is sufficient by itself.
    sims[0].rot(places[3] + crate::label::IDENTITY_AT + 100, 3);
    sims[1].rot(places[0] + root + 50, 5);
    assert_eq!(store.scrub_labels().unwrap(), [1, 1]);
    drop(store);
    sims.iter().zip(1..).for_each(|(sim, seed)| sim.crash(seed));
    let (_, newest) = open(&sims, Access::ReadOnly).unwrap();
    assert_eq!(newest.generation, generation);
}
