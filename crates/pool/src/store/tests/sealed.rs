//! Sealed frames: the store keeps, moves, verifies and repairs stored bytes that it cannot read.

use super::*;
use crate::label::Identity;

fn create_sealed(sims: &[Arc<Simulator>], redundant_metadata: bool) -> Store {
    let (store, _) = Store::create(devices(sims), &NewPool { redundant_metadata, ..new_pool() }).unwrap();
    store.allow_sealed(1).unwrap();
    store
}

/// Frames of which two of three are sealed, each with the bytes that the store returns for it.
fn fill(store: &Store, birth: u64) -> Vec<(Pointer, Vec<u8>)> {
    let one = |number: u64| {
        let length = 1 + (number as usize * 977) % 70_000;
        if number.is_multiple_of(3) {
            (put(store, birth, number, length).unwrap(), content(number, length))
        } else {
            let pointer = put_sealed(store, birth, number, length).unwrap();
            assert_eq!((pointer.logical as usize, pointer.birth), (length, Txg(birth)), "the exact length, as in rows");
            (pointer, sealed_bytes(number, length).1)
        }
    };
    (0..90).map(one).collect()
}

fn check_all(store: &Store, frames: &[(Pointer, Vec<u8>)]) {
    for (pointer, bytes) in frames {
        assert!(*store.read(pointer).unwrap() == **bytes, "frame {pointer}");
        let mut target = vec![0; bytes.len()];
        store.read_all(&mut [Wanted { pointer: *pointer, target: &mut target }]).unwrap();
        assert!(target == *bytes, "frame {pointer}, streamed");
        let mut wrong = vec![0; bytes.len() + 1];
        assert!(store.read_all(&mut [Wanted { pointer: *pointer, target: &mut wrong }]).is_err());
        if pointer.is_sealed() {
            assert_eq!(store.read_stored(pointer).unwrap(), None, "nothing to be sent as packed content");
        }
    }
}

#[test]
fn stored_bytes_come_back_as_they_were() {
    let sims = simulators(2, 64 * MIB);
    let store = create_sealed(&sims, false);
    let frames = fill(&store, 1);
    check_all(&store, &frames);
    let charged: u64 = frames.iter().map(|(pointer, _)| pointer.charged()).sum();
    assert_eq!(used(&store), charged);
    commit(&store, 1).unwrap();
    check_all(&store, &frames);
    let segments: std::collections::BTreeSet<u32> = frames.iter().map(|(pointer, _)| pointer.segment).collect();
    for id in segments {
        store.move_out_for_tests(id, 64 * MIB, &mut Cleaned::default()).unwrap();
    }
    commit(&store, 2).unwrap();
    check_all(&store, &frames);
    let mut seen = 0;
    store
        .scrub(&mut |checked| {
            assert_eq!(checked.damage, None);
            if let Some(header) = checked.header.filter(|header| header.pointer.is_sealed()) {
                assert_eq!(header.sealer, Sealer { family: 7, ordinal: 2 }, "moved with the frame");
                assert_eq!((header.owner.dataset, header.owner.offset), (1, 3));
                assert!(header.owner.object > u64::MAX - 100, "the masked inode");
                seen += 1;
            }
            true
        })
        .unwrap();
    assert_eq!(seen, 60);
    drop(store);
    sims.iter().zip(1..).for_each(|(sim, seed)| sim.crash(seed));
    let (store, _) = open(&sims, Access::ReadWrite).unwrap();
    check_all(&store, &frames);
    store.free(&frames[1].0, Txg(3));
    commit(&store, 3).unwrap();
    assert_eq!(used(&store), charged - frames[1].0.charged());
    store.close(true, 4).unwrap();
    drop(store);
    let (store, _) = open(&sims, Access::ReadOnly).unwrap();
    check_all(&store, &frames);
}

#[test]
fn every_flipped_bit_of_a_sealed_frame_is_found_and_named() {
    let sims = simulators(1, 64 * MIB);
    let store = create_sealed(&sims, false);
    put(&store, 1, 1, 3000).unwrap();
    let pointer = put_sealed(&store, 1, 2, 40).unwrap();
    commit(&store, 1).unwrap();
    let place = store.segments().iter().find(|segment| segment.id == pointer.segment).unwrap().place[0];
    let start = crate::backend::slots::start(place, store.slot()) + u64::from(pointer.offset) * 16;
    for bit in 0..(pointer.charged() * 8) {
        sims[0].rot(start + bit / 8, (bit % 8) as u8);
        let mut found = Vec::new();
        store
            .scrub(&mut |checked| {
                found.extend(checked.damage.as_ref().map(|_| checked.name));
                true
            })
            .unwrap();
        assert_eq!(found, [(pointer.segment, pointer.index)], "bit {bit}");
        let read = store.read(&pointer);
        if bit >= u64::from(Pointer::HEADER) * 8 {
            assert!(matches!(read, Err(PoolError::Frame { damage: Damage::Checksum, .. })), "bit {bit}");
        }
        sims[0].rot(start + bit / 8, (bit % 8) as u8);
    }
    store.read(&pointer).unwrap();
}

#[test]
fn another_sealed_frame_of_equal_length_is_no_match() {
    let sims = simulators(1, 64 * MIB);
    let store = create_sealed(&sims, false);
    let (one, other) = (put_sealed(&store, 1, 1, 4000).unwrap(), put_sealed(&store, 1, 7, 4000).unwrap());
    commit(&store, 1).unwrap();
    store.read(&one).unwrap();
    // A pointer to the slot of one with the id of the other, as of a forged or reused address.
    let forged = Pointer { checksum: other.checksum, ..one };
    assert!(matches!(store.read(&forged), Err(PoolError::Frame { damage: Damage::Header, .. })));
    let forged = Pointer { logical: one.logical + 16, ..one };
    assert!(store.read(&forged).is_err());
    assert!(store.read(&Pointer { logical: one.logical - 1, ..one }).is_ok(), "the same rounded length");
}

#[test]
fn a_pool_without_the_feature_takes_and_reads_no_sealed_frame() {
    let sims = simulators(1, 64 * MIB);
    let store = create(&sims);
    assert!(!store.is_sealed());
    let refused = put_sealed(&store, 1, 1, 100);
    assert!(matches!(&refused, Err(PoolError::Refused(why)) if why.contains("without encryption")), "{refused:?}");
    let plain = put(&store, 1, 1, 100).unwrap();
    commit(&store, 1).unwrap();
    let (sealed, _) = sealed_bytes(1, 100);
    let named = Pointer { segment: plain.segment, index: plain.index, offset: plain.offset, ..sealed };
    let damage = Damage::Structure("a sealed frame in a pool without encryption");
    assert!(matches!(store.read(&named), Err(PoolError::Frame { damage: found, .. }) if found == damage));
    store.allow_sealed(5).unwrap();
    store.allow_sealed(6).unwrap();
    assert_ne!(store.identity().incompatible & Identity::UNFINISHED_ENCRYPTION, 0);
    let pointer = put_sealed(&store, 2, 1, 100).unwrap();
    commit(&store, 2).unwrap();
    drop(store);
    let (store, _) = open(&sims, Access::ReadWrite).unwrap();
    assert!(store.is_sealed());
    assert_eq!(*store.read(&pointer).unwrap(), *sealed_bytes(1, 100).1);
}

#[test]
fn sealed_frames_that_the_format_does_not_know_are_refused() {
    let sims = simulators(1, 64 * MIB);
    let store = create_sealed(&sims, false);
    let write = |change: &dyn Fn(&mut Compressed)| {
        let (pointer, bytes) = sealed_bytes(1, 100);
        let sealed = SealedHeader { sealer: Sealer { family: 1, ordinal: pointer.pin }, object: 0, offset: 0 };
        let mut compressed = Compressed { pointer, stored: Some(bytes), sealed: Some(sealed) };
        change(&mut compressed);
        let frame = NewFrame { checksum: ChecksumKind::Sealed, ..frame(WriteStream::Data, 1, &[0; 100], 1) };
        store.write_compressed(&frame, &compressed)
    };
    write(&|_| {}).unwrap();
    let wrong: [&dyn Fn(&mut Compressed); 8] = [
        &|frame| frame.stored = None,
        &|frame| frame.sealed = None,
        &|frame| frame.pointer.pin = 0,
        &|frame| frame.pointer.checksum_kind = ChecksumKind::Xxh3,
        &|frame| frame.pointer.compression = Compression::Lz4,
        &|frame| frame.pointer.stored += 16,
        &|frame| frame.sealed.as_mut().unwrap().sealer.family = 0,
        &|frame| frame.sealed.as_mut().unwrap().sealer.ordinal -= 1,
    ];
    for (number, change) in wrong.iter().enumerate() {
        assert!(write(change).is_err(), "{number}");
    }
    let long = |frame: &mut Compressed| {
        frame.pointer.stored = MIB as u32;
        frame.stored = Some(vec![0; MIB as usize]);
    };
    assert!(write(&long).is_err(), "longer than a slot");
    let frame = NewFrame { checksum: ChecksumKind::Sealed, ..frame(WriteStream::Data, 1, &[0; 100], 1) };
    assert!(store.write(&frame).is_err(), "content is not sealed by the store");
    assert!(store.write_all(&[frame, frame], &mut Vec::new()).is_err());
    commit(&store, 1).unwrap();
}

#[test]
fn a_damaged_copy_of_a_sealed_node_is_healed_from_the_other() {
    let sims = simulators(2, 64 * MIB);
    let store = create_sealed(&sims, true);
    let frames = fill(&store, 1);
    commit(&store, 1).unwrap();
    let mut healed = 0;
    for (pointer, bytes) in frames.iter().filter(|(pointer, _)| pointer.is_sealed() && pointer.kind == FrameKind::Leaf)
    {
        let place = store.segments().iter().find(|segment| segment.id == pointer.segment).unwrap().place.clone();
        assert_eq!(place.len(), 2);
        let start = crate::backend::slots::start(place[0], store.slot()) + u64::from(pointer.offset) * 16;
        for within in [81, 100, 79 + u64::from(pointer.stored)] {
            sims[usize::from(place[0].device)].rot(start + within, 3);
            assert!(*store.read(pointer).unwrap() == **bytes);
            healed += 1;
            assert_eq!(store.mended(), healed);
        }
    }
    assert!(healed > 20);
    // Both copies damaged in different blocks: put together from both.
    let (pointer, bytes) = frames
        .iter()
        .find(|(pointer, _)| pointer.is_sealed() && pointer.kind == FrameKind::Leaf && pointer.stored > 30_000)
        .unwrap();
    let place = store.segments().iter().find(|segment| segment.id == pointer.segment).unwrap().place.clone();
    for (slot, within) in place.iter().zip([100, 20_000]) {
        let start = crate::backend::slots::start(*slot, store.slot()) + u64::from(pointer.offset) * 16;
        sims[usize::from(slot.device)].rot(start + within, 3);
    }
    assert!(*store.read(pointer).unwrap() == **bytes);
    store
        .scrub(&mut |checked| {
            assert!(checked.damage.is_none(), "{checked:?}");
            true
        })
        .unwrap();
}

/// The other copy is no way around the refusal.
#[test]
fn a_pool_without_the_feature_reads_a_sealed_frame_from_no_copy() {
    let sims = simulators(2, 64 * MIB);
    let store = create_sealed(&sims, true);
    let pointer = put_sealed(&store, 1, 5, 3000).unwrap();
    commit(&store, 1).unwrap();
    store.read(&pointer).unwrap();
    store.sealed_frames.store(false, std::sync::atomic::Ordering::Release);
    let damage = Damage::Structure("a sealed frame in a pool without encryption");
    let is_refused = |read: Result<()>| matches!(read, Err(PoolError::Frame { damage: found, .. }) if found == damage);
    assert!(is_refused(store.read(&pointer).map(drop)));
    assert!(is_refused(store.read_accepted(&pointer, &mut |_| true).map(drop)));
    let mut target = vec![0; pointer.stored as usize];
    assert!(is_refused(store.read_all(&mut [Wanted { pointer, target: &mut target }])));
    assert_eq!(store.mended(), 0);
}

/// A frame is moved while its copies are judged: its old place is neither put together nor repaired, nor is a device
/// blamed for what is there.
#[test]
fn a_frame_that_was_moved_meanwhile_is_looked_for_where_it_is() {
    let sims = simulators(2, 64 * MIB);
    let store = create_sealed(&sims, true);
    let pointer = put_sealed(&store, 1, 5, 30_000).unwrap();
    let (_, right) = sealed_bytes(5, 30_000);
    commit(&store, 1).unwrap();
    let place = store.segments().iter().find(|segment| segment.id == pointer.segment).unwrap().place.clone();
    let starts: Vec<(usize, u64)> = place
        .iter()
        .map(|slot| {
            let start = crate::backend::slots::start(*slot, store.slot()) + u64::from(pointer.offset) * 16;
            (usize::from(slot.device), start + u64::from(Pointer::HEADER))
        })
        .collect();
    // One copy is forged at its begin, with a right hash; the other one is damaged at its end.
    let mut forged = right.clone();
    forged[60] ^= 1;
    let hash = stored::stored_hash(&pointer, &forged[16..]);
    forged[..16].copy_from_slice(&hash);
    sims[starts[0].0].write_at(&forged, starts[0].1).unwrap();
    sims[starts[1].0].rot(starts[1].1 + 20_000, 3);
    let read = |(device, at): (usize, u64)| {
        let mut bytes = vec![0; right.len()];
        sims[device].read_at(&mut bytes, at).unwrap();
        bytes
    };
    let told = Arc::new(Mutex::new(Vec::new()));
    let telling = Arc::clone(&told);
    store.watch(move |damaged| telling.lock().push((damaged.device, damaged.mended)));
    let mut before = None;
    let content = store.read_accepted(&pointer, &mut |bytes| {
        if before.is_none() {
            store.move_out_for_tests(pointer.segment, 64 * MIB, &mut Cleaned::default()).unwrap();
            before = Some(starts.iter().map(|start| read(*start)).collect::<Vec<_>>());
            told.lock().clear();
            return false;
        }
        *bytes == *right
    });
    let before = before.expect("a copy was judged");
    // The cleaner has moved the forged copy, whose hash is right.
    assert!(matches!(content, Err(PoolError::Frame { damage: Damage::Seal, .. })), "{content:?}");
    assert_eq!(starts.iter().map(|start| read(*start)).collect::<Vec<_>>(), before, "the old place stays as it is");
    assert!(told.lock().iter().all(|(_, mended)| !mended), "{:?}", told.lock());
}
