//! Frames sealed over a real store: content, nodes, forged copies, frames in the clear.

use nacre_sys::secret_memory::Unlocked;

use super::*;
use crate::backend::NewGroup;
use crate::codec::Writer;
use crate::crypt::stored_form::rehash;
use crate::crypt::tests::{Seeded, key};
use crate::crypt::{Cipher, Generation, Keyring};
use crate::device::{Device, Simulator};
use crate::frames::{CompressionSetting, Owner, WriteStream};
use crate::label::{GroupKind, SlotAddress};
use crate::pointer::Txg;
use crate::rows::{Extent, keys};
use crate::store::{Commit, NewPool, Store};
use crate::tree::node::header;

fn generation(ordinal: u8) -> Generation {
    let cipher = if ordinal.is_multiple_of(2) { Cipher::Aes256Gcm } else { Cipher::ChaCha20Poly1305 };
    let master = Keyring::new(Unlocked::Accepted).keep(&key(&[ordinal; 32])).unwrap();
    Generation { ordinal, id: [ordinal; 8], cipher, master }
}

/// The keys of family 3 with these generations.
pub(crate) fn family(ordinals: &[u8]) -> Arc<FamilyKeys> {
    let generations = ordinals.iter().map(|ordinal| generation(*ordinal)).collect();
    Arc::new(FamilyKeys::new(3, [6; ID], generations).unwrap())
}

fn sealed_over(below: Arc<dyn Frames>, ordinals: &[u8], plain: PlainFrames) -> SealedFrames {
    SealedFrames::new(below, family(ordinals), Arc::new(Seeded::new(9)), Arc::default(), plain)
}

struct Bench {
    sims: Vec<Arc<Simulator>>,
    store: Arc<Store>,
}

impl Bench {
    fn new() -> Self {
        let sims: Vec<Arc<Simulator>> =
            (0..2).map(|at| Arc::new(Simulator::new(&format!("sim{at}"), 64 << 20))).collect();
        let devices = sims.iter().map(|sim| Arc::clone(sim) as Arc<dyn Device>).collect();
        let new = NewPool {
            name: "tank".to_owned(),
            guid: 5,
            host: (1, "here".to_owned()),
            time: 1,
            redundant_metadata: true,
        };
        let (store, _) = Store::create(devices, &new).unwrap();
        store.allow_sealed(1).unwrap();
        Self { sims, store: Arc::new(store) }
    }

    fn frames(&self, ordinals: &[u8], plain: PlainFrames) -> SealedFrames {
        let below = Arc::clone(&self.store) as Arc<dyn Frames>;
        sealed_over(below, ordinals, plain)
    }

    fn commit(&self, txg: u64) {
        let log_start = crate::label::LogStart { position: txg, sequence: 0, chain: 0 };
        self.store.commit(&Commit { txg: Txg(txg), catalog: None, upper: &[], log_start, time: 1 }).unwrap();
    }

    /// Device and position of a frame's stored bytes in each copy.
    fn copies(&self, pointer: &Pointer) -> Vec<(usize, u64)> {
        let segments = self.store.segments();
        let place = &segments.iter().find(|info| info.id == pointer.segment).unwrap().place;
        let at = |slot: &SlotAddress| {
            let start = crate::backend::slots::start(*slot, self.store.slot());
            (usize::from(slot.device), start + u64::from(pointer.offset) * 16 + u64::from(Pointer::HEADER))
        };
        place.iter().map(at).collect()
    }

    fn bytes_at(&self, (device, at): (usize, u64), pointer: &Pointer) -> Vec<u8> {
        let mut bytes = vec![0; pointer.stored as usize];
        self.sims[device].read_at(&mut bytes, at).unwrap();
        bytes
    }
}

fn new_frame(kind: FrameKind, content: &[u8]) -> NewFrame<'_> {
    let stream = if kind == FrameKind::Data { WriteStream::Data } else { WriteStream::Metadata };
    NewFrame {
        stream,
        kind,
        owner: Owner { dataset: 4, object: 77, offset: 4096 },
        birth: Txg(1),
        content,
        compression: CompressionSetting::Lz4,
        checksum: ChecksumKind::Xxh3,
    }
}

fn content(number: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    Seeded::new(number << 32).fill(&mut bytes).unwrap();
    if number.is_multiple_of(2) {
        bytes.iter_mut().skip(length / 8).for_each(|byte| *byte = number as u8);
    }
    bytes
}

/// A leaf with extents of these frames.
fn leaf(pointers: &[Pointer]) -> Vec<u8> {
    let mut to = Writer::default();
    to.bytes(&header(0, pointers.len()));
    for (number, pointer) in (1..).zip(pointers) {
        let value = if number % 2 == 0 {
            Extent::Shared { pointer: *pointer, since: Txg(9) }.encode()
        } else {
            Extent::Frame(*pointer).encode()
        };
        let key = keys::extent(number, 0);
        to.u16(key.len() as u16);
        to.u16(value.len() as u16);
        to.bytes(&key);
        to.bytes(&value);
    }
    to.finish()
}

fn is_seal_damage<T>(result: Result<T, PoolError>) -> bool {
    matches!(result, Err(PoolError::Frame { damage: Damage::Seal, .. }))
}

#[test]
fn content_and_nodes_come_back_and_the_store_sees_none_of_them() {
    let bench = Bench::new();
    let frames = bench.frames(&[1, 2], PlainFrames::Refused);
    let mut written = Vec::new();
    for number in 0..40u64 {
        let content = content(number, 1 + (number as usize * 1777) % 50_000);
        let kind = if number.is_multiple_of(5) { FrameKind::Value } else { FrameKind::Data };
        let pointer = frames.write(&new_frame(kind, &content)).unwrap();
        assert_eq!((pointer.logical as usize, pointer.pin, pointer.kind), (content.len(), 2, kind));
        written.push((pointer, content));
    }
    // Sealed before their txg, as files do.
    let contents: Vec<_> = (40..50u64).map(|number| content(number, 3000)).collect();
    let new: Vec<_> = contents.iter().map(|content| new_frame(FrameKind::Data, content)).collect();
    let sealed = frames.compress_all(&new).unwrap();
    for ((new, sealed), content) in new.iter().zip(&sealed).zip(&contents) {
        written.push((frames.write_compressed(new, sealed).unwrap(), content.clone()));
    }
    let mut pointers = Vec::new();
    frames.write_all(&new, &mut pointers).unwrap();
    written.extend(pointers.into_iter().zip(contents.iter().cloned()));
    let check = |frames: &SealedFrames| {
        for (pointer, content) in &written {
            assert!(*frames.read(pointer).unwrap() == **content);
            let mut target = vec![0; content.len()];
            frames.read_all(&mut [Wanted { pointer: *pointer, target: &mut target }]).unwrap();
            assert!(target == *content);
            let mut short = vec![0; content.len() - 1];
            assert!(frames.read_all(&mut [Wanted { pointer: *pointer, target: &mut short }]).is_err());
            let stored = bench.store.read(pointer).unwrap();
            let seen = content.get(..16).is_some_and(|start| stored.windows(16).any(|part| part == start));
            assert!(!seen, "content in the clear");
        }
    };
    check(&frames);
    let extents: Vec<Pointer> =
        written.iter().filter(|(pointer, _)| pointer.kind == FrameKind::Data).map(|(pointer, _)| *pointer).collect();
    let node = leaf(&extents);
    let pointer = frames.write(&new_frame(FrameKind::Leaf, &node)).unwrap();
    assert_eq!(pointer.logical as usize, node.len().next_multiple_of(16), "only the node knows its exact length");
    assert_eq!(*frames.read(&pointer).unwrap(), *node);
    bench.commit(1);
    check(&frames);
    assert_eq!(*frames.read(&pointer).unwrap(), *node);
    // A newer generation seals new frames, and the old one still opens the others.
    let rotated = bench.frames(&[1, 2, 5], PlainFrames::Refused);
    check(&rotated);
    let newer = rotated.write(&NewFrame { birth: Txg(2), ..new_frame(FrameKind::Data, &[1; 900]) }).unwrap();
    assert_eq!(newer.pin, 5);
    assert!(is_seal_damage(frames.read(&newer)), "a generation that is not loaded");
    let mut seen = 0;
    bench
        .store
        .scrub(&mut |checked| {
            assert_eq!(checked.damage, None);
            if let Some(header) = checked.header {
                let keys = frames.keys().frame_keys(frames.keys().generation(&[2; 8]).unwrap());
                let (object, offset) = keys.owner_mask(&header.pointer.checksum).unwrap();
                assert_eq!((header.sealer.family, header.sealer.ordinal, header.owner.dataset), (3, 2, 4));
                assert_eq!((header.owner.object ^ object, header.owner.offset ^ offset), (77, 4096), "masked");
                assert_ne!(header.owner.object, 77);
                seen += 1;
            }
            true
        })
        .unwrap();
    assert_eq!(seen, written.len() + 1);
}

#[test]
fn packed_content_is_sealed_as_it_came() {
    let bench = Bench::new();
    let frames = bench.frames(&[1], PlainFrames::Refused);
    let content = vec![8; 20_000];
    let (compression, packed) = crate::compress::compress(CompressionSetting::Zstd(3), &content).unwrap();
    let pointer = Pointer {
        segment: 0,
        index: 0,
        offset: 0,
        stored: packed.len() as u32,
        logical: content.len() as u32,
        kind: FrameKind::Data,
        compression,
        checksum_kind: ChecksumKind::Xxh3,
        pin: 0,
        birth: Txg(1),
        checksum: crate::checksum::structure(&content),
    };
    let brought = Compressed { pointer, stored: None, sealed: None };
    let pointer_of_long = pointer;
    let pointer = frames.write_compressed(&new_frame(FrameKind::Data, &packed), &brought).unwrap();
    assert!(pointer.is_sealed() && pointer.stored as usize <= packed.len() + 80);
    assert_eq!(*frames.read(&pointer).unwrap(), *content);
    // Packed to something longer than the content: it is sealed as it was before.
    let content = self::content(1, 5000);
    let packed = lz4_flex::block::compress(&content);
    assert!(packed.len() > content.len());
    let logical = content.len() as u32;
    let long = Pointer { compression: Compression::Lz4, logical, stored: packed.len() as u32, ..pointer_of_long };
    let brought = Compressed { pointer: long, stored: None, sealed: None };
    let pointer = frames.write_compressed(&new_frame(FrameKind::Data, &packed), &brought).unwrap();
    assert_eq!((pointer.logical, pointer.stored), (logical, logical.next_multiple_of(16) + 64));
    assert_eq!(*frames.read(&pointer).unwrap(), *content);
    assert!(
        frames
            .write_compressed(
                &new_frame(FrameKind::Data, &packed[1..]),
                &Compressed { pointer: Pointer { logical: 400, ..long }, ..brought }
            )
            .is_err()
    );
}

/// Frames that keep content only, and have been given this.
#[derive(Default)]
struct ContentOnly {
    given: parking_lot::Mutex<Vec<Vec<u8>>>,
}

impl Frames for ContentOnly {
    fn read(&self, pointer: &Pointer) -> Result<Arc<[u8]>, PoolError> {
        Err(PoolError::Frame { pointer: *pointer, damage: Damage::Header })
    }

    fn expect(&self, _: &[Pointer]) {}

    fn write(&self, frame: &NewFrame<'_>) -> Result<Pointer, PoolError> {
        self.given.lock().push(frame.content.to_vec());
        Err(PoolError::NoSpace)
    }
}

/// Frames that note the content that comes with stored bytes.
struct Noting {
    store: Arc<Store>,
    given: parking_lot::Mutex<Vec<usize>>,
}

impl Frames for Noting {
    fn read(&self, pointer: &Pointer) -> Result<Arc<[u8]>, PoolError> {
        self.store.read(pointer)
    }

    fn expect(&self, _: &[Pointer]) {}

    fn write(&self, frame: &NewFrame<'_>) -> Result<Pointer, PoolError> {
        self.given.lock().push(frame.content.len());
        self.store.write(frame)
    }

    fn write_compressed(&self, frame: &NewFrame<'_>, compressed: &Compressed) -> Result<Pointer, PoolError> {
        self.given.lock().push(frame.content.len());
        self.store.write_compressed(frame, compressed)
    }
}

#[test]
fn nothing_in_the_clear_is_passed_down() {
    let bench = Bench::new();
    let noting = Arc::new(Noting { store: Arc::clone(&bench.store), given: parking_lot::Mutex::default() });
    let only = Arc::new(ContentOnly::default());
    let above = sealed_over(Arc::clone(&noting) as Arc<dyn Frames>, &[1], PlainFrames::Accepted);
    let refused = sealed_over(Arc::clone(&only) as Arc<dyn Frames>, &[1], PlainFrames::Accepted);
    let content = content(1, 5000);
    let new = new_frame(FrameKind::Data, &content);
    let node = leaf(&[]);
    let write_all = |frames: &SealedFrames| {
        let pointer = frames.write(&new).and_then(|pointer| {
            frames.write(&new_frame(FrameKind::Leaf, &node))?;
            let sealed = frames.compress_all(&[new, new])?;
            frames.write_compressed(&new, &sealed[0])?;
            frames.write_all(&[new, new], &mut Vec::new())?;
            Ok(pointer)
        })?;
        assert_eq!(*frames.read(&pointer)?, *content);
        Ok::<_, PoolError>(())
    };
    write_all(&above).unwrap();
    assert_eq!(*noting.given.lock(), [0; 5]);
    assert!(matches!(write_all(&refused), Err(PoolError::Refused(_))));
    let sealed = refused.compress_all(&[new]).unwrap();
    assert!(matches!(refused.write_compressed(&new, &sealed[0]), Err(PoolError::Refused(_))));
    assert!(refused.write_all(&[new], &mut Vec::new()).is_err());
    assert_eq!(only.given.lock().len(), 0, "refused, and not written in the clear");
}

/// Several callers at once, each with more frames than the threads have room for.
#[test]
fn many_frames_are_sealed_by_several_threads_in_their_order() {
    let bench = Bench::new();
    let frames = bench.frames(&[1, 2], PlainFrames::Refused);
    std::thread::scope(|scope| {
        for caller in 0..3u64 {
            let frames = &frames;
            scope.spawn(move || {
                let contents: Vec<_> = (0..60).map(|number| content(caller * 100 + number, 20_000)).collect();
                let new: Vec<_> = contents.iter().map(|content| new_frame(FrameKind::Data, content)).collect();
                let mut pointers = Vec::new();
                frames.write_all(&new, &mut pointers).unwrap();
                assert_eq!(pointers.len(), contents.len());
                for (pointer, content) in pointers.iter().zip(&contents) {
                    assert!(*frames.read(pointer).unwrap() == **content);
                }
            });
        }
    });
    // One frame that cannot be sealed: the caller gets the error.
    let contents: Vec<_> = (0..40).map(|number| content(number, if number == 30 { 0 } else { 20_000 })).collect();
    let new: Vec<_> = contents.iter().map(|content| new_frame(FrameKind::Data, content)).collect();
    let mut pointers = Vec::new();
    assert!(matches!(frames.write_all(&new, &mut pointers), Err(PoolError::Refused(_))));
    assert!(pointers.is_empty());
}

/// The cache below, which has stored bytes: the refused ones are looked for in the other copy, and forgotten.
#[test]
fn a_forged_copy_is_healed_through_the_cache() {
    let bench = Bench::new();
    let storage = Arc::clone(&bench.store) as Arc<dyn crate::engine::Storage>;
    let cached = crate::engine::cached_for_tests(storage, &Arc::new(crate::cache::Cache::new(1 << 20)));
    let frames = sealed_over(Arc::clone(&cached), &[1], PlainFrames::Refused);
    let value = content(1, 9000);
    let pointer = frames.write(&new_frame(FrameKind::Value, &value)).unwrap();
    bench.commit(1);
    let copies = bench.copies(&pointer);
    let right = bench.bytes_at(copies[0], &pointer);
    let mut forged = right.clone();
    forged[60] ^= 1;
    rehash(&mut forged, &pointer.checksum, pointer.kind, pointer.counted_logical());
    bench.sims[copies[0].0].write_at(&forged, copies[0].1).unwrap();
    assert_eq!(*cached.read(&pointer).unwrap(), *forged, "and now in the cache");
    assert_eq!(*frames.read(&pointer).unwrap(), *value);
    assert_eq!(bench.store.mended(), 1);
    assert_eq!(*cached.read(&pointer).unwrap(), *right);
}

#[test]
fn a_copy_with_a_forged_tag_is_healed_from_the_other() {
    let bench = Bench::new();
    let frames = bench.frames(&[1], PlainFrames::Refused);
    let data = frames.write(&new_frame(FrameKind::Data, &content(1, 9000))).unwrap();
    let node = leaf(&[data; 40]);
    let mut nodes = Vec::new();
    for _ in 0..4 {
        nodes.push(frames.write(&new_frame(FrameKind::Leaf, &node)).unwrap());
    }
    bench.commit(1);
    let told = Arc::new(parking_lot::Mutex::new(Vec::new()));
    let telling = Arc::clone(&told);
    bench.store.watch(move |damaged| telling.lock().push((damaged.mended, damaged.damage.clone(), damaged.pointer)));
    for (number, pointer) in nodes.iter().enumerate().take(3) {
        let copies = bench.copies(pointer);
        assert_eq!(copies.len(), 2);
        let right = bench.bytes_at(copies[0], pointer);
        let mut forged = right.clone();
        // In the prefix, in the list of children, in the body: with a hash that the store accepts.
        let at = [30, 60, right.len() - 40][number];
        forged[at] ^= 1;
        rehash(&mut forged, &pointer.checksum, pointer.kind, pointer.counted_logical());
        bench.sims[copies[0].0].write_at(&forged, copies[0].1).unwrap();
        assert_eq!(*bench.store.read(pointer).unwrap(), *forged, "the store cannot tell");
        assert_eq!(*frames.read(pointer).unwrap(), *node);
        assert_eq!(bench.store.mended(), number as u64 + 1);
        assert_eq!(told.lock().drain(..).collect::<Vec<_>>(), [(true, Some(Damage::Seal), *pointer)]);
        for copy in copies {
            assert_eq!(bench.bytes_at(copy, pointer), right);
        }
    }
    // In both copies: nothing is returned.
    let pointer = &nodes[3];
    for copy in bench.copies(pointer) {
        let mut forged = bench.bytes_at(copy, pointer);
        forged[60] ^= 1;
        rehash(&mut forged, &pointer.checksum, pointer.kind, pointer.counted_logical());
        bench.sims[copy.0].write_at(&forged, copy.1).unwrap();
    }
    assert!(is_seal_damage(frames.read(pointer)));
    assert_eq!(told.lock().drain(..).collect::<Vec<_>>(), [(false, Some(Damage::Seal), *pointer)]);
}

/// Whole columns of a group with parity are damaged: the store puts sealed frames together without knowing their content.
#[test]
fn sealed_frames_are_put_together_from_parity() {
    for (parity, devices) in [(1, 3), (2, 5)] {
        let sims: Vec<Arc<Simulator>> =
            (0..devices).map(|at| Arc::new(Simulator::new(&format!("sim{at}"), 64 << 20))).collect();
        let given = sims.iter().map(|sim| Arc::clone(sim) as Arc<dyn Device>).collect();
        let groups = [NewGroup { kind: GroupKind::RaidZ(parity), devices }];
        let new = NewPool {
            name: "tank".to_owned(),
            guid: 5,
            host: (1, "here".to_owned()),
            time: 1,
            redundant_metadata: true,
        };
        let (store, _) = Store::create_groups(given, &groups, &new).unwrap();
        store.allow_sealed(1).unwrap();
        let bench = Bench { sims, store: Arc::new(store) };
        let frames = bench.frames(&[1], PlainFrames::Refused);
        let mut written = Vec::new();
        for number in 0..30u64 {
            let content = content(number, 1 + (number as usize * 4001) % 90_000);
            written.push((frames.write(&new_frame(FrameKind::Data, &content)).unwrap(), content));
        }
        let extents: Vec<Pointer> = written.iter().map(|(pointer, _)| *pointer).collect();
        let node = leaf(&extents);
        written.push((frames.write(&new_frame(FrameKind::Leaf, &node)).unwrap(), node));
        bench.commit(1);
        let scrub = || {
            let (mut mended, mut lost) = (0, 0);
            let scrubbed = bench.store.scrub(&mut |checked| {
                mended += u64::from(checked.mended);
                lost += u64::from(checked.damage.is_some() && !checked.mended);
                true
            });
            scrubbed.unwrap();
            (mended, lost)
        };
        let (mut by_readers, mut by_scrubs) = (0, 0);
        for first in 0..devices {
            // As many devices as there is parity, one after the other.
            let wrong: Vec<usize> = (first..first + usize::from(parity)).map(|at| at % devices).collect();
            for info in bench.store.segments() {
                for slot in info.place.iter().filter(|slot| wrong.contains(&usize::from(slot.device))) {
                    let start = crate::backend::slots::start(*slot, bench.store.slot());
                    (0..1000).for_each(|step| bench.sims[usize::from(slot.device)].rot(start + step * 1013, 4));
                }
            }
            let before = bench.store.mended();
            for (pointer, content) in &written {
                assert!(*frames.read(pointer).unwrap() == **content, "{parity} of {devices}, from {first}");
            }
            by_readers += bench.store.mended() - before;
            let (mended, lost) = scrub();
            assert_eq!(lost, 0, "{parity} of {devices}, from {first}");
            by_scrubs += mended;
            assert_eq!(scrub(), (0, 0));
        }
        assert!(by_readers > 0 && by_scrubs > 0, "{by_readers} by readers, {by_scrubs} by scrubs");
        for (pointer, content) in &written {
            assert!(*frames.read(pointer).unwrap() == **content);
        }
    }
}

#[test]
fn a_forged_address_leads_to_no_other_content() {
    let bench = Bench::new();
    let frames = bench.frames(&[1], PlainFrames::Refused);
    let (one, other) = (content(1, 5000), content(3, 5000));
    let [one, other] = [one, other].map(|content| frames.write(&new_frame(FrameKind::Data, &content)).unwrap());
    bench.commit(1);
    // The address of the other frame with the id that the node authenticates.
    let forged = Pointer { segment: other.segment, index: other.index, offset: other.offset, ..one };
    assert!(matches!(frames.read(&forged), Err(PoolError::Frame { .. })));
    assert!(frames.read(&Pointer { pin: 2, ..one }).is_err(), "a generation before the pin");
    let long = Pointer { stored: u32::MAX - 15, ..one };
    assert!(
        frames.read_all(&mut [Wanted { pointer: long, target: &mut vec![0; 5000] }]).is_err(),
        "nothing is allocated"
    );
    assert!(frames.read(&Pointer { logical: 5016, ..one }).is_err());
    assert!(frames.read(&one).is_ok());
}

#[test]
fn frames_in_the_clear_are_read_only_while_a_file_system_is_being_encrypted() {
    let bench = Bench::new();
    let plain = bench.store.write(&new_frame(FrameKind::Data, &[4; 700])).unwrap();
    let refused = bench.frames(&[1], PlainFrames::Refused);
    assert!(matches!(refused.read(&plain), Err(PoolError::Frame { damage: Damage::Structure(_), .. })));
    let mut target = vec![0; 700];
    assert!(refused.read_all(&mut [Wanted { pointer: plain, target: &mut target }]).is_err());
    let accepted = bench.frames(&[1], PlainFrames::Accepted);
    assert_eq!(*accepted.read(&plain).unwrap(), [4; 700]);
    accepted.read_all(&mut [Wanted { pointer: plain, target: &mut target }]).unwrap();
    assert_eq!(target, [4; 700]);
    let sealed = accepted.write(&new_frame(FrameKind::Data, &[5; 700])).unwrap();
    assert!(sealed.is_sealed());
    let node = leaf(&[plain, sealed]);
    let pointer = accepted.write(&new_frame(FrameKind::Leaf, &node)).unwrap();
    assert_eq!(*accepted.read(&pointer).unwrap(), *node);
}
