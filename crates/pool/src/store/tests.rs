//! Tests of the store on simulated devices.

mod blame;
mod copies;
mod crash;
mod ditto;
mod erasable;
mod fixture;
mod full;
mod hooked;
mod large_table;
mod lost;
mod model;
mod reading;
mod rot;
mod sealed;
mod threads;
mod write_queue;

use std::sync::OnceLock;

use super::*;
use crate::device::{Device, Simulator};
use crate::error::Damage;
use crate::frame::{Sealer, stored};
use crate::frames::{CompressionSetting, Owner, SealedHeader};
use crate::label::LogStart;
use crate::pointer::{ChecksumKind, FrameKind};

const MIB: u64 = 1 << 20;

fn host() -> (u64, String) {
    (1, "here".to_owned())
}

fn simulators(count: usize, length: u64) -> Vec<Arc<Simulator>> {
    (0..count).map(|at| Arc::new(Simulator::new(&format!("sim{at}"), length))).collect()
}

fn devices(simulators: &[Arc<Simulator>]) -> Vec<Arc<dyn Device>> {
    simulators.iter().map(|simulator| Arc::clone(simulator) as Arc<dyn Device>).collect()
}

fn new_pool() -> NewPool {
    NewPool {
        name: "tank".to_owned(),
        guid: 0x1234_5678_9abc_def0,
        host: host(),
        time: 1_800_000_000,
        redundant_metadata: false,
    }
}

fn create(simulators: &[Arc<Simulator>]) -> Store {
    Store::create(devices(simulators), &new_pool()).unwrap().0
}

fn import(access: Access) -> Import {
    Import { access, name: None, host: host(), time: 1_800_000_001 }
}

fn open(simulators: &[Arc<Simulator>], access: Access) -> Result<(Store, Root)> {
    Store::open(devices(simulators), &import(access))
}

/// Content derived from a number: about half of it compresses.
fn content(number: u64, length: usize) -> Vec<u8> {
    let mut random = number;
    let mut bytes: Vec<u8> = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        if number.is_multiple_of(2) {
            bytes.extend([(random >> 60) as u8; 8])
        } else {
            bytes.extend((random ^ (random >> 29)).to_le_bytes())
        }
    }
    bytes.truncate(length);
    bytes
}

fn frame(stream: WriteStream, birth: u64, content: &[u8], number: u64) -> NewFrame<'_> {
    // Large content uses code that is fast without optimization too.
    let (compression, checksum) = match number % 3 {
        0 if content.len() < 8192 => (CompressionSetting::Lz4, ChecksumKind::Xxh3),
        1 => (CompressionSetting::Off, ChecksumKind::Blake3),
        _ => (CompressionSetting::Zstd(1), ChecksumKind::Blake3),
    };
    let kind = if stream == WriteStream::Data { FrameKind::Data } else { FrameKind::Leaf };
    NewFrame {
        stream,
        kind,
        owner: Owner { dataset: 1, object: number, offset: 0 },
        birth: Txg(birth),
        content,
        compression,
        checksum,
    }
}

fn put(store: &Store, birth: u64, number: u64, length: usize) -> Result<Pointer> {
    store.write(&frame(
        if number.is_multiple_of(5) { WriteStream::Metadata } else { WriteStream::Data },
        birth,
        &content(number, length),
        number,
    ))
}

/// Stored bytes of a sealed frame whose content had this length, and its pointer without a location. Its id follows
/// from the number; the ciphertext is any content.
fn sealed_bytes(number: u64, length: usize) -> (Pointer, Vec<u8>) {
    let stored = (length + 64).next_multiple_of(16);
    let mut bytes = content(number, stored);
    let pointer = Pointer {
        segment: 0,
        index: 0,
        offset: 0,
        stored: stored as u32,
        logical: length as u32,
        kind: if number.is_multiple_of(5) { FrameKind::Leaf } else { FrameKind::Data },
        compression: Compression::Off,
        checksum_kind: ChecksumKind::Sealed,
        pin: 1 + (number % 2) as u8,
        birth: Txg(0),
        checksum: crate::checksum::structure(&number.to_le_bytes()),
    };
    let hash = stored::stored_hash(&pointer, &bytes[16..]);
    bytes[..16].copy_from_slice(&hash);
    (pointer, bytes)
}

/// Writes a sealed frame whose content has this length.
fn put_sealed(store: &Store, birth: u64, number: u64, length: usize) -> Result<Pointer> {
    let (pointer, bytes) = sealed_bytes(number, length);
    let stream = if number.is_multiple_of(5) { WriteStream::Metadata } else { WriteStream::Data };
    let frame = NewFrame {
        kind: pointer.kind,
        checksum: ChecksumKind::Sealed,
        compression: CompressionSetting::Off,
        ..frame(stream, birth, &[], number)
    };
    let sealed = SealedHeader { sealer: Sealer { family: 7, ordinal: 2 }, object: !number, offset: 3 };
    store.write_compressed(&frame, &Compressed { pointer, stored: Some(bytes), sealed: Some(sealed) })
}

fn commit(store: &Store, txg: u64) -> Result<()> {
    store.commit(&Commit {
        txg: Txg(txg),
        catalog: None,
        upper: &txg.to_le_bytes(),
        log_start: LogStart { position: txg, sequence: 0, chain: 0 },
        time: 1,
    })
}

fn used(store: &Store) -> u64 {
    let space = store.space();
    space.allocated - space.table
}

#[test]
fn frames_are_there_before_and_after_a_commit_and_an_import() {
    let sims = simulators(2, 64 * MIB);
    let store = create(&sims);
    assert_eq!((store.slot(), store.log_length()), (MIB, 4 * MIB));
    let mut frames = Vec::new();
    for number in 0..200u64 {
        let length = 1 + (number as usize * 977) % 100_000;
        frames.push((put(&store, 1, number, length).unwrap(), number, length));
    }
    let all = |store: &Store| {
        for (pointer, number, length) in &frames {
            assert_eq!(*store.read(pointer).unwrap(), *content(*number, *length), "frame {pointer}");
        }
    };
    all(&store);
    let charged: u64 = frames.iter().map(|(pointer, ..)| pointer.charged()).sum();
    assert_eq!(used(&store), charged);
    commit(&store, 1).unwrap();
    all(&store);
    let streamed = |store: &Store| {
        let mut targets: Vec<Vec<u8>> = frames.iter().map(|(_, _, length)| vec![1; *length]).collect();
        let mut wanted: Vec<Wanted<'_>> = frames
            .iter()
            .zip(&mut targets)
            .map(|((pointer, ..), target)| Wanted { pointer: *pointer, target })
            .collect();
        store.read_all(&mut wanted).unwrap();
        assert!(frames.iter().zip(&targets).all(|((_, number, length), target)| *target == content(*number, *length)));
        let mut short = vec![0; frames[3].2 - 1];
        assert!(
            store.read_all(&mut [Wanted { pointer: frames[3].0, target: &mut short }]).is_err(),
            "of another length"
        );
    };
    streamed(&store);
    store.expect_later(&frames.iter().map(|(pointer, ..)| *pointer).collect::<Vec<_>>(), &[]);
    assert!(matches!(commit(&store, 1), Err(PoolError::Refused(_))), "a txg is committed once");
    streamed(&store);
    store.expect(&frames.iter().map(|(pointer, ..)| *pointer).collect::<Vec<_>>());
    // Neither a clean nor an unclean import loses anything; devices may come in any order.
    let before = store.space();
    drop(store);
    let (store, root) = open(&sims, Access::ReadWrite).unwrap();
    assert_eq!((root.txg, root.upper.as_slice(), root.log_start.position), (Txg(1), 1u64.to_le_bytes().as_slice(), 1));
    all(&store);
    assert_eq!(store.space().allocated, before.allocated);
    put(&store, 2, 7, 100).unwrap();
    store.close(true, 5).unwrap();
    assert!(put(&store, 2, 7, 100).is_err(), "closed");
    drop(store);
    let mut turned = devices(&sims);
    turned.reverse();
    let (store, root) = Store::open(turned, &import(Access::ReadOnly)).unwrap();
    assert!(root.clean && root.txg == Txg(1));
    all(&store);
    assert!(matches!(put(&store, 2, 7, 100), Err(PoolError::Refused(_))));
    assert!(matches!(commit(&store, 2), Err(PoolError::Refused(_))));
    assert_eq!(used(&store), charged, "what was never committed is not there");
}

#[test]
fn a_clean_pool_goes_on_in_its_open_segments() {
    let sims = simulators(1, 64 * MIB);
    for txg in 1..=40 {
        let store = if txg == 1 { create(&sims) } else { open(&sims, Access::ReadWrite).unwrap().0 };
        put(&store, txg, txg, 5000).unwrap();
        commit(&store, txg).unwrap();
        store.close(false, 5).unwrap();
        let space = store.space();
        assert!(space.slots - space.free_slots <= 6, "imports must not use up slots: {space:?}");
    }
}

#[test]
fn only_all_devices_of_one_pool_are_imported() {
    let sims = simulators(3, 64 * MIB);
    let store = create(&sims[..2]);
    commit(&store, 1).unwrap();
    drop(store);
    let error = |devices| Store::open(devices, &import(Access::ReadWrite)).err().unwrap().to_string();
    assert!(error(devices(&sims[..1])).contains("device 1 of pool tank is missing; it was at sim1"));
    assert!(error(devices(&sims)).contains("sim2: not a device of a pool"));
    Store::create(devices(&sims[2..]), &NewPool { guid: 5, ..new_pool() }).unwrap();
    assert!(error(devices(&sims)).contains("another pool"));
    assert!(error(vec![sims[0].clone(), sims[1].clone(), sims[1].clone()]).contains("twice"));
    assert!(error(Vec::new()).contains("needs a device"));
    let small: Vec<Arc<dyn Device>> = vec![Arc::new(Simulator::new("small", 63 * MIB))];
    assert!(Store::create(small, &new_pool()).err().unwrap().to_string().contains("too small"));
    let cut = sims[1].bytes()[..63 << 20].to_vec();
    assert!(error(vec![sims[0].clone(), Arc::new(Simulator::with_bytes("cut", cut))]).contains("shorter"));
}

#[test]
fn a_refused_creation_changes_no_device() {
    let sims = simulators(3, 64 * MIB);
    let before = content(1, MIB as usize);
    for sim in &sims {
        sim.write_at(&before, 0).unwrap();
        sim.write_at(&before, 63 * MIB).unwrap();
    }
    let all = sims[0].bytes();
    sims[2].fail_after(0);
    assert!(matches!(Store::create(devices(&sims), &new_pool()), Err(PoolError::Device { .. })));
    assert!(sims[..2].iter().all(|sim| sim.bytes() == all));
}

#[test]
fn a_device_is_added_and_used() {
    let sims = simulators(3, 64 * MIB);
    let store = create(&sims[..1]);
    let before = store.space();
    let first = put(&store, 1, 1, 90_000).unwrap();
    store.add_device(sims[1].clone(), 9).unwrap();
    store.add_device(sims[2].clone(), 9).unwrap();
    assert_eq!(store.space().size, before.size + 2 * 62 * MIB);
    let frames: Vec<_> =
        (0..300).map(|number| (put(&store, 1, number * 2 + 1, 90_000).unwrap(), number * 2 + 1)).collect();
    commit(&store, 1).unwrap();
    assert!(sims.iter().all(|sim| sim.written() > 5 * MIB), "frames are spread over the devices");
    store.rename("lake", 10).unwrap();
    drop(store);
    let (store, _) = open(&sims, Access::ReadWrite).unwrap();
    assert_eq!((store.identity().name.as_str(), store.identity().members.len()), ("lake", 3));
    assert_eq!(*store.read(&first).unwrap(), *content(1, 90_000));
    for (pointer, number) in frames {
        assert_eq!(*store.read(&pointer).unwrap(), *content(number, 90_000));
    }
    store.destroy(11).unwrap();
    assert_eq!(crate::label::probe(&*sims[0]).unwrap().unwrap().state, crate::label::PoolState::Destroyed);
}

#[test]
fn a_rewind_gives_up_what_came_later() {
    let sims = simulators(1, 64 * MIB);
    let store = create(&sims);
    let mut pointers = Vec::new();
    for txg in 1..=8u64 {
        pointers.push(put(&store, txg, txg, 50_000).unwrap());
        if txg > 1 {
            store.free(&pointers[txg as usize - 2], Txg(txg));
        }
        commit(&store, txg).unwrap();
    }
    drop(store);
    let too_old = open(&sims, Access::Rewind(Txg(2))).err().unwrap().to_string();
    assert!(too_old.contains("not kept; these are: 5, 6, 7, 8"), "{too_old}");
    let (store, root) = open(&sims, Access::Rewind(Txg(6))).unwrap();
    assert_eq!(root.txg, Txg(6));
    assert_eq!(*store.read(&pointers[5]).unwrap(), *content(6, 50_000));
    assert_eq!(used(&store), pointers[5].charged());
    store.confirm().unwrap();
    drop(store);
    let (store, root) = open(&sims, Access::ReadWrite).unwrap();
    assert_eq!(root.txg, Txg(6), "what came later is gone for good");
    commit(&store, 7).unwrap();
}

#[test]
fn many_threads_write_and_read() {
    let sims = simulators(2, 128 * MIB);
    let store = create(&sims);
    let frames: Vec<_> = std::thread::scope(|scope| {
        let writers: Vec<_> = (0..4u64)
            .map(|thread| {
                let store = &store;
                scope.spawn(move || {
                    let mut mine = Vec::new();
                    for at in 0..150 {
                        let (number, length) = (thread * 1000 + at, 1 + (at as usize * 631) % 60_000);
                        mine.push((put(store, 1, number, length).unwrap(), number, length));
                        let (pointer, number, length) = mine[mine.len() / 2];
                        assert_eq!(*store.read(&pointer).unwrap(), *content(number, length));
                    }
                    mine
                })
            })
            .collect();
        writers.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    commit(&store, 1).unwrap();
    let names: std::collections::BTreeSet<_> =
        frames.iter().map(|(pointer, ..)| (pointer.segment, pointer.index)).collect();
    assert_eq!(names.len(), frames.len());
    drop(store);
    let (store, _) = open(&sims, Access::ReadWrite).unwrap();
    for (pointer, number, length) in frames {
        assert_eq!(*store.read(&pointer).unwrap(), *content(number, length));
    }
}

#[test]
fn the_log_area_is_one_range() {
    let sims = simulators(1, 64 * MIB);
    let store = create(&sims);
    let bytes = content(3, 3 * MIB as usize);
    store.log_write(MIB / 2, &bytes).unwrap();
    store.log_sync().unwrap();
    sims[0].crash(1);
    drop(store);
    let (store, _) = open(&sims, Access::ReadWrite).unwrap();
    let mut back = vec![0; bytes.len()];
    store.log_read(MIB / 2, &mut back).unwrap();
    assert!(back == bytes);
    assert!(store.log_write(store.log_length() - 1, &[0; 2]).is_err());
    assert!(store.suspended().is_none(), "a wrong request is no failure of the device");
    assert!(store.log_read(u64::MAX, &mut back).is_err());
    sims[0].fail_after(0);
    assert!(matches!(store.log_write(0, &[0; 2]), Err(PoolError::Suspended { .. })));
    assert!(matches!(put(&store, 1, 1, 10), Err(PoolError::Suspended { .. })));
}

#[test]
fn a_frame_freed_twice_stops_the_pool_before_anything_is_lost() {
    let sims = simulators(1, 64 * MIB);
    let store = create(&sims);
    let pointer = put(&store, 1, 1, 5000).unwrap();
    put(&store, 1, 2, 5000).unwrap();
    commit(&store, 1).unwrap();
    store.free(&pointer, Txg(2));
    commit(&store, 2).unwrap();
    store.free(&pointer, Txg(3));
    assert!(matches!(commit(&store, 3), Err(PoolError::Suspended { durable: Txg(2), .. })));
    assert!(matches!(commit(&store, 4), Err(PoolError::Suspended { .. })), "and it stays so");
    drop(store);
    assert_eq!(open(&sims, Access::ReadWrite).unwrap().1.txg, Txg(2));
}

#[test]
fn what_cannot_be_written_is_refused() {
    let sims = simulators(1, 64 * MIB);
    let store = create(&sims);
    let largest = vec![1; store.largest_frame() as usize + 1];
    assert!(matches!(store.write(&frame(WriteStream::Data, 1, &largest, 1)), Err(PoolError::Refused(_))));
    assert!(matches!(store.write(&frame(WriteStream::Data, 1, &[], 1)), Err(PoolError::Refused(_))));
    assert!(matches!(store.write(&frame(WriteStream::Relocated, 1, &[1], 1)), Err(PoolError::Refused(_))));
    let pointer = store.write(&frame(WriteStream::Data, 1, &largest[1..], 1)).unwrap();
    assert_eq!(store.read(&pointer).unwrap().len() as u64, store.largest_frame());
    let unknown = Pointer { segment: 999, ..pointer };
    assert!(matches!(store.read(&unknown), Err(PoolError::Frame { damage: Damage::Structure(_), .. })));
    let behind = Pointer { offset: u32::MAX, ..pointer };
    assert!(store.read(&behind).is_err());
    assert!(
        store
            .commit(&Commit { txg: Txg(1), catalog: None, upper: &[0; 2049], log_start: LogStart::default(), time: 0 })
            .is_err()
    );
    assert!(store.suspended().is_none());
}
