//! Full pools: the slop, and cleaning where little is free.

use super::*;
use crate::backend::slots;
use crate::label::SlotAddress;
use crate::segment::cleaner::Pressure;

fn untold(store: &Store) -> Vec<SlotAddress> {
    store.disks.as_ref().unwrap().untold()
}

fn plain(store: &Store, birth: u64, number: u64, length: usize) -> Result<Pointer> {
    store.write(&frame(WriteStream::Data, birth, &block(number, length), 1))
}

/// Incompressible content, derived from its number.
fn block(number: u64, length: usize) -> Vec<u8> {
    static NOISE: OnceLock<Vec<u8>> = OnceLock::new();
    let mut block = NOISE.get_or_init(|| content(1, 65_536))[..length].to_vec();
    block[..8].copy_from_slice(&number.to_le_bytes());
    block
}

#[test]
fn writes_end_at_the_slop_and_room_comes_back() {
    let sims = simulators(1, 128 * MIB);
    let store = create(&sims);
    let Space { size, slop, .. } = store.space();
    assert_eq!((size, slop), (122 * MIB, 61 * MIB));
    let mut frames = Vec::new();
    while store.admit(65_616, Claim::Write).is_ok() {
        frames.push(plain(&store, 1, frames.len() as u64, 65_536).unwrap());
    }
    let space = store.space();
    assert!(space.available < 65_616 && space.free >= slop, "{space:?}");
    assert_eq!(frames.len() as u64, (size - slop - space.table - space.slack) / 65_616);
    commit(&store, 1).unwrap();
    // Accepted data may use the slop except a quarter, then nothing more; tree nodes may.
    let error = loop {
        match plain(&store, 2, 7, 65_536) {
            Ok(pointer) => frames.push(pointer),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, PoolError::NoSpace));
    assert!(store.space().free >= slop / 4 && store.space().free < slop / 4 + 65_616);
    assert!(store.admit(1, Claim::Delete).is_err());
    assert!(store.admit(1, Claim::Destroy).is_ok() == (store.space().free > slop / 4));
    let node = store.write(&frame(WriteStream::Metadata, 2, &content(1, 30_000), 1)).unwrap();
    commit(&store, 2).unwrap();
    frames.drain(..).for_each(|pointer| store.free(&pointer, Txg(3)));
    assert!(store.space().freeing > size / 2);
    commit(&store, 3).unwrap();
    assert_eq!(used(&store), node.charged());
    for txg in 4..8 {
        commit(&store, txg).unwrap();
    }
    assert!(store.space().free_slots > store.space().slots - 8, "{:?}", store.space());
    plain(&store, 8, 1, 65_536).unwrap();
}

#[test]
fn what_is_freed_is_not_written_over_while_a_kept_root_reaches_it() {
    let sims = simulators(1, 64 * MIB);
    let store = create(&sims);
    let mut old: std::collections::VecDeque<(u64, Vec<Pointer>)> = std::collections::VecDeque::new();
    for txg in 1..40u64 {
        let frames: Vec<_> = (0..60).map(|at| plain(&store, txg, txg * 100 + at, 30_000).unwrap()).collect();
        if let Some((_, last)) = old.back() {
            last.iter().for_each(|pointer| store.free(pointer, Txg(txg)));
        }
        commit(&store, txg).unwrap();
        old.push_back((txg, frames));
        let kept = store.root().generation - store.root().kept;
        assert_eq!(kept, if txg < 3 { txg } else { 3 });
        while old.len() as u64 > kept + 1 {
            old.pop_front();
        }
        // Each kept state is whole, byte by byte, as an import of it would see it.
        let copy = vec![Arc::new(Simulator::with_bytes("copy", sims[0].bytes()))];
        let (oldest, frames) = &old[0];
        if txg % 5 == 0 {
            let (back, _) = open(&copy, Access::Rewind(Txg(*oldest))).unwrap();
            for (at, pointer) in frames.iter().enumerate() {
                assert_eq!(*back.read(pointer).unwrap(), *block(oldest * 100 + at as u64, 30_000));
            }
        }
    }
}

/// Fills a pool to a share of its size and overwrites at random; returns how many bytes were
/// written for each byte of frames.
fn amplification(length: u64, percent: u64, overwrites: u64, step: u64) -> f64 {
    let sims = simulators(1, length);
    let mut store = create(&sims);
    store.slop_at_most = store.space().size / 32;
    let (frame_length, charged) = (32_688, 32_768);
    let count = store.space().size * percent / 100 / charged;
    let mut frames: Vec<(Pointer, u64)> = Vec::new();
    let mut txg = 1;
    let mut random = 9u64;
    let mut total = 0u64;
    while total < count * overwrites / 100 + count {
        let number = total;
        let pointer = plain(&store, txg, number, frame_length)
            .unwrap_or_else(|error| panic!("after {total} of {count}: {error}: {:?}", store.space()));
        assert_eq!(pointer.charged(), charged);
        if total < count {
            frames.push((pointer, number));
        } else {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let at = (random >> 33) as usize % frames.len();
            store.free(&frames[at].0, Txg(txg));
            frames[at] = (pointer, number);
        }
        total += 1;
        if total.is_multiple_of(step) {
            commit(&store, txg).unwrap();
            txg += 1;
            if store.pressure() == Pressure::Some {
                store.clean_step(2 * MIB).unwrap();
            }
        }
    }
    commit(&store, txg).unwrap();
    assert_eq!(used(&store), count * charged);
    for (pointer, number) in frames.iter().step_by(17) {
        assert_eq!(*store.read(pointer).unwrap(), *block(*number, frame_length));
    }
    let traffic = store.traffic();
    drop(store);
    let (store, _) = open(&sims, Access::ReadWrite).unwrap();
    for (pointer, number) in frames.iter().step_by(13) {
        assert_eq!(*store.read(pointer).unwrap(), *block(*number, frame_length));
    }
    let overwritten = traffic.frames - count * charged;
    (overwritten + traffic.relocated + traffic.table) as f64 / overwritten as f64
}

#[test]
fn the_cleaner_keeps_going_when_little_is_free() {
    for percent in [80, 90] {
        let factor = amplification(256 * MIB, percent, 40, 64);
        println!("{percent} % full: {factor:.2} bytes written for each byte of frames");
        assert!((1.0..30.0).contains(&factor));
    }
}

#[test]
fn the_cleaner_keeps_going_at_95_percent() {
    let factor = amplification(512 * MIB, 94, 8, 64);
    println!("94 % full: {factor:.2} bytes written for each byte of frames");
    assert!(factor < 60.0);
}

#[test]
fn freed_slots_are_given_back_to_their_device_before_they_are_used_again() {
    let sims = simulators(1, 64 * MIB);
    let store = create(&sims);
    store.set_autotrim(true);
    let mut pointers: Vec<Pointer> = (0..200).map(|number| plain(&store, 1, number, 60_000).unwrap()).collect();
    commit(&store, 1).unwrap();
    let last = pointers.pop().unwrap();
    let before = store.space().free_slots;
    let place = store.segments().iter().find(|segment| segment.id == pointers[0].segment).unwrap().place[0];
    pointers.drain(..).for_each(|pointer| store.free(&pointer, Txg(2)));
    for txg in 2..8 {
        commit(&store, txg).unwrap();
    }
    // They count as free, and are not allocated yet.
    let space = store.space();
    assert!(space.free_slots > before + 5, "{space:?}");
    assert!(!untold(&store).is_empty());
    let mut steps = 1;
    while store.trim_step().unwrap() {
        steps += 1;
    }
    assert!(steps < 10 && untold(&store).is_empty());
    assert_eq!(store.space().free_slots, space.free_slots);
    let start = slots::start(place, store.slot()) as usize;
    assert!(sims[0].bytes()[start..start + 60_000] != *block(0, 60_000), "the device was told");
    assert_eq!(*store.read(&last).unwrap(), *block(199, 60_000));
    // A writer in need does not wait for that.
    let many: Vec<Pointer> = (0..400).map(|number| plain(&store, 8, number, 60_000).unwrap()).collect();
    commit(&store, 8).unwrap();
    many.iter().for_each(|pointer| store.free(pointer, Txg(9)));
    for txg in 9..13 {
        commit(&store, txg).unwrap();
    }
    assert!(untold(&store).len() > 10);
    for number in 0..400 {
        plain(&store, 13, number, 60_000).unwrap();
    }
    commit(&store, 13).unwrap();
}

#[test]
fn where_little_is_free_it_is_for_writers() {
    let sims = simulators(1, 64 * MIB);
    let store = create(&sims);
    store.set_autotrim(true);
    let spare = crate::segment::cleaner::hurry(store.backend.room().total) + 8;
    let mut pointers = Vec::new();
    // Tree nodes may use space that ordinary content may not.
    while store.backend.room().free >= spare {
        let number = pointers.len() as u64;
        pointers.push(store.write(&frame(WriteStream::Metadata, 1, &block(number, 60_000), 1)).unwrap());
    }
    commit(&store, 1).unwrap();
    assert!(store.backend.room().free < spare);
    pointers.drain(..pointers.len() / 4).for_each(|pointer| store.free(&pointer, Txg(2)));
    for txg in 2..8 {
        commit(&store, txg).unwrap();
        if !untold(&store).is_empty() {
            break;
        }
    }
    let waiting = untold(&store);
    assert!(!waiting.is_empty());
    let start = slots::start(waiting[0], store.slot()) as usize;
    let before = sims[0].bytes()[start..start + 60_000].to_vec();
    let free = store.backend.room().free;
    while store.trim_step().unwrap() {}
    assert!(untold(&store).is_empty());
    assert_eq!(store.backend.room().free, free + waiting.len() as u64);
    assert_eq!(sims[0].bytes()[start..start + 60_000], before[..], "the device was told");

    // Where much was freed, only the lacking slots are withheld from the discard.
    pointers.drain(..).for_each(|pointer| store.free(&pointer, Txg(8)));
    for txg in 8..14 {
        commit(&store, txg).unwrap();
    }
    let (waiting, free) = (untold(&store), store.backend.room().free);
    assert!(waiting.len() as u64 > spare, "{} of {spare}", waiting.len());
    while store.trim_step().unwrap() {}
    let bytes = sims[0].bytes();
    let told = waiting.iter().filter(|place| {
        bytes[slots::start(**place, store.slot()) as usize..][..60_000].iter().all(|byte| *byte == 0xdb)
    });
    assert!(told.count() as u64 >= waiting.len() as u64 - spare.saturating_sub(free));
}

#[test]
fn a_device_is_told_of_what_is_free_and_of_nothing_else() {
    let sims = simulators(1, 64 * MIB);
    let store = create(&sims);
    let mut pointers: Vec<Pointer> = (0..200).map(|number| plain(&store, 1, number, 60_000).unwrap()).collect();
    commit(&store, 1).unwrap();
    let place = store.segments().iter().find(|segment| segment.id == pointers[0].segment).unwrap().place[0];
    let start = slots::start(place, store.slot()) as usize;
    let kept = pointers.split_off(100);
    pointers.drain(..).for_each(|pointer| store.free(&pointer, Txg(2)));
    let through = || {
        let (mut bytes, mut next) = (0, Some(0));
        while let Some(slot) = next {
            let told = store.trim_free(0, slot).unwrap();
            (bytes, next) = (bytes + told.bytes, told.next);
        }
        bytes
    };
    commit(&store, 2).unwrap();
    // The previous root still names the segment: a rewind to it is possible.
    let before = sims[0].bytes()[start..start + (1 << 18)].to_vec();
    assert!(through() > 0);
    assert_eq!(sims[0].bytes()[start..start + (1 << 18)], before[..]);
    for txg in 3..8 {
        commit(&store, txg).unwrap();
    }
    let free = store.space().free_slots;
    let spare = crate::segment::cleaner::hurry(store.backend.room().total) + 8;
    assert!(through() >= (free - spare) * store.slot() / 2);
    assert_eq!(store.space().free_slots, free);
    assert!(sims[0].bytes()[start..start + 60_000] != *block(0, 60_000), "the device was told");
    for (number, pointer) in (100..).zip(&kept) {
        assert_eq!(*store.read(pointer).unwrap(), *block(number, 60_000));
    }
    assert!(store.trim_free(1, 0).is_err(), "no such device");
}
