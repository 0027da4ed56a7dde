//! What every backend must do: the same suite over devices that lose power and over a bucket that
//! loses requests and replies; and the whole store on both, with crashes between.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use nacre_pool::backend::{
    Backend, Bucket, Cached, Copies, Disks, MemoryBucket, NewGroup, NewMembers, Objects, Parts, Put, PutRoot, Requests,
    SegmentAt, WriterId,
};
use nacre_pool::device::{Device, Random, Simulator};
use nacre_pool::engine::{Dataset, Durable, Pool, PoolConfig};
use nacre_pool::files::{FileError, NewInode, ParentView};
use nacre_pool::label::{GroupKind, Identity, LogStart, MemberState, Place, PoolState, Root};
use nacre_pool::rows::{FileType, InodeRow, Timestamp};
use nacre_pool::store::{Access, Commit, Import, NewPool};
use nacre_pool::{
    ChecksumKind, CompressionSetting, FrameKind, Frames, NewFrame, Owner, Pointer, PoolError, Store, Txg, WriteStream,
};

mod epochs;
mod fences;
mod going_on;
mod healing;
mod local_log;
mod next_writers;
mod other_pools;
mod replies;

const MIB: u64 = 1 << 20;

/// Where a pool lies, beyond the programs that use it.
trait Ground {
    /// The backend of a new pool; nothing is written yet.
    fn new_backend(&self) -> (Arc<dyn Backend>, Root);

    /// The backend of one more program that imports the pool.
    fn import(&self) -> (Arc<dyn Backend>, Identity);

    /// The machine stops: what was not durable may be lost.
    fn crash(&self, seed: u64);

    fn create_store(&self) -> Store;

    fn open_store(&self, access: Access) -> Result<(Store, Root), PoolError>;
}

struct OnDevices {
    devices: Vec<Arc<Simulator>>,
}

/// Groups of devices; the second one of each pool has other devices than the first.
struct InGroups {
    on: OnDevices,
    groups: Vec<NewGroup>,
}

struct InBucket {
    bucket: Arc<MemoryBucket>,
    clock: Arc<AtomicU64>,
    uptime: Arc<AtomicU64>,
    imports: AtomicU64,
    /// Where parts are kept, and how many bytes of them.
    parts: Option<(tempfile::TempDir, u64)>,
}

fn new_pool() -> NewPool {
    NewPool { name: "tank".into(), guid: 7, host: (1, "here".into()), time: 1_800_000_000, redundant_metadata: true }
}

fn import(access: Access) -> Import {
    Import { access, name: None, host: (1, "here".into()), time: 1_800_000_001 }
}

fn identity(slot: u64, members: Vec<nacre_pool::label::Member>, features: u64) -> Identity {
    let NewPool { name, guid, host, time, .. } = new_pool();
    Identity {
        revision: 1,
        incompatible: features,
        read_only_compatible: 0,
        compatible: 0,
        pool: guid,
        name,
        state: PoolState::Active,
        host,
        time,
        slot,
        index: 0,
        members,
        groups: Vec::new(),
        change: None,
    }
}

fn root(generation: u64) -> Root {
    Root {
        pool: 7,
        generation,
        kept: generation.saturating_sub(3),
        txg: Txg(generation),
        time: 1_800_000_000,
        clean: false,
        next_segment: 1,
        catalog: None,
        upper: generation.to_le_bytes().to_vec(),
        log_start: LogStart::default(),
        log: Vec::new(),
        table_segments: Vec::new(),
        table_top: Vec::new(),
        table_list: Vec::new(),
        listed: [].into(),
        table: None,
        deltas: Vec::new(),
        guarded: false,
    }
}

impl OnDevices {
    fn new(count: usize) -> Self {
        Self { devices: (0..count).map(|at| Arc::new(Simulator::new(&format!("sim{at}"), 64 * MIB))).collect() }
    }

    fn devices(&self) -> Vec<Arc<dyn Device>> {
        self.devices.iter().map(|device| Arc::clone(device) as _).collect()
    }
}

impl Ground for OnDevices {
    fn new_backend(&self) -> (Arc<dyn Backend>, Root) {
        let NewMembers { slot, members, log, .. } = Disks::lay_out(&self.devices(), 7).unwrap();
        let identity = identity(slot, members, Identity::REDUNDANT_METADATA);
        let disks = Disks::new(self.devices(), &identity);
        disks.put_identity(&identity).unwrap();
        (Arc::new(disks), Root { log, ..root(1) })
    }

    fn import(&self) -> (Arc<dyn Backend>, Identity) {
        let (disks, identity) = Disks::find(self.devices(), true).unwrap();
        (Arc::new(disks), identity)
    }

    fn crash(&self, seed: u64) {
        self.devices.iter().for_each(|device| device.crash(seed));
    }

    fn create_store(&self) -> Store {
        Store::create(self.devices(), &new_pool()).unwrap().0
    }

    fn open_store(&self, access: Access) -> Result<(Store, Root), PoolError> {
        Store::open(self.devices(), &import(access))
    }
}

impl InGroups {
    fn new(groups: &[(GroupKind, usize)]) -> Self {
        let groups: Vec<NewGroup> =
            groups.iter().map(|(kind, devices)| NewGroup { kind: *kind, devices: *devices }).collect();
        Self { on: OnDevices::new(groups.iter().map(|group| group.devices).sum()), groups }
    }
}

impl Ground for InGroups {
    fn new_backend(&self) -> (Arc<dyn Backend>, Root) {
        let NewMembers { slot, members, log, groups } =
            Disks::lay_out_groups(&self.on.devices(), 7, &self.groups).unwrap();
        let features = Identity::REDUNDANT_METADATA | Identity::GROUPS;
        let identity = Identity { groups, ..identity(slot, members, features) };
        let disks = Disks::new(self.on.devices(), &identity);
        disks.put_identity(&identity).unwrap();
        (Arc::new(disks), Root { log, ..root(1) })
    }

    fn import(&self) -> (Arc<dyn Backend>, Identity) {
        self.on.import()
    }

    fn crash(&self, seed: u64) {
        self.on.devices.iter().zip(0..).for_each(|(device, number)| device.crash(seed.wrapping_add(number)));
    }

    fn create_store(&self) -> Store {
        Store::create_groups(self.on.devices(), &self.groups, &new_pool()).unwrap().0
    }

    fn open_store(&self, access: Access) -> Result<(Store, Root), PoolError> {
        self.on.open_store(access)
    }
}

impl InBucket {
    fn new(seed: u64, loses: u64) -> Self {
        let clock = Arc::new(AtomicU64::new(1_800_000_000));
        Self {
            bucket: Arc::new(MemoryBucket::new(seed, loses)),
            clock,
            uptime: Arc::default(),
            imports: AtomicU64::new(0),
            parts: None,
        }
    }

    /// One that loses nothing and takes several requests at a time.
    fn in_parallel() -> Self {
        Self { bucket: Arc::new(MemoryBucket::new(0, 0).in_parallel(4)), ..Self::new(0, 0) }
    }

    /// The same, with so many bytes of it kept elsewhere.
    fn with_parts(seed: u64, loses: u64, size: u64) -> Self {
        let directory = tempfile::tempdir().unwrap();
        Self { parts: Some((directory, size)), ..Self::new(seed, loses) }
    }

    fn bucket(&self) -> Arc<dyn Bucket> {
        let bucket = Arc::clone(&self.bucket) as Arc<dyn Bucket>;
        let Some((directory, size)) = &self.parts else { return bucket };
        // Two programs that have the pool do not share what they keep.
        let parts = Parts::open(directory.path(), *size).or_else(|_| Parts::unnamed(directory.path(), *size));
        Arc::new(Cached::new(bucket, parts.unwrap()))
    }

    fn writer(&self) -> WriterId {
        let (clock, uptime) = (Arc::clone(&self.clock), Arc::clone(&self.uptime));
        WriterId {
            nonce: self.imports.fetch_add(1, Ordering::Relaxed),
            host: "here".to_owned(),
            clock: Box::new(move || clock.load(Ordering::Relaxed)),
            uptime: Box::new(move || uptime.load(Ordering::Relaxed)),
        }
    }

    fn objects(&self) -> Arc<Objects> {
        Arc::new(Objects::new(self.bucket(), 7, MIB, 62 * MIB, self.writer()))
    }
}

impl Ground for InBucket {
    fn new_backend(&self) -> (Arc<dyn Backend>, Root) {
        let objects = self.objects();
        let member =
            nacre_pool::label::Member { guid: 7, length: 62 * MIB, path: Vec::new(), state: MemberState::default() };
        objects.put_identity(&identity(MIB, vec![member], 0)).unwrap();
        (objects, root(1))
    }

    fn import(&self) -> (Arc<dyn Backend>, Identity) {
        (self.objects(), Objects::find(&*self.bucket).unwrap().unwrap())
    }

    fn crash(&self, _seed: u64) {
        self.bucket.fail_after(None);
    }

    fn create_store(&self) -> Store {
        Store::create_in(self.objects(), &new_pool(), 62 * MIB).unwrap().0
    }

    fn open_store(&self, access: Access) -> Result<(Store, Root), PoolError> {
        let identity = Objects::find(&*self.bucket)?.expect("a pool");
        let (store, _) = Store::open_in(self.objects(), identity, &import(access))?;
        // Nothing of a pool has to be read before it is taken over.
        if access.is_of_newest() {
            store.confirm()?;
        }
        let root = store.root();
        Ok((store, root))
    }
}

fn grounds(seed: u64) -> Vec<Box<dyn Ground>> {
    vec![
        Box::new(OnDevices::new(1)),
        Box::new(OnDevices::new(2)),
        Box::new(InBucket::new(seed, 0)),
        Box::new(InBucket::new(seed, 7)),
        Box::new(InBucket::with_parts(seed, 7, MIB)),
        Box::new(InGroups::new(&[(GroupKind::Mirror, 2)])),
        Box::new(InGroups::new(&[(GroupKind::RaidZ(1), 4)])),
        Box::new(InGroups::new(&[(GroupKind::RaidZ(2), 5), (GroupKind::RaidZ(2), 4)])),
        Box::new(InBucket::in_parallel()),
    ]
}

fn begin(backend: &dyn Backend, id: u32, stream: WriteStream) -> Place {
    backend.begin(id, stream, 0).unwrap().expect("room")
}

/// Bytes that tell where they belong.
fn pattern(id: u32, length: usize) -> Vec<u8> {
    let mut random = Random(u64::from(id) << 32);
    (0..length).map(|_| random.next() as u8).collect()
}

fn read(backend: &dyn Backend, id: u32, place: &Place, length: usize) -> Vec<u8> {
    let at = SegmentAt { segment: id, place };
    let mut first = vec![0; length];
    backend.read(at, 0, 0, &mut first).unwrap();
    for way in 1..backend.ways(at) {
        let mut other = vec![0; length];
        backend.read(at, way, 0, &mut other).unwrap();
        assert!(first == other, "two ways of reading segment {id} differ");
    }
    first
}

fn write(backend: &dyn Backend, id: u32, place: &Place, stream: WriteStream, offset: usize, bytes: &[u8]) {
    let at = SegmentAt { segment: id, place };
    assert_eq!(backend.write(at, stream, offset as u64, bytes).unwrap(), Copies::All);
}

/// Pieces arrive in any order; what was written is read at once, and is there after a flush, a root
/// and a crash.
#[test]
fn what_was_flushed_is_there_after_a_crash() {
    for ground in grounds(1) {
        let (backend, first) = ground.new_backend();
        backend.adopt(&first, &mut std::iter::empty()).unwrap();
        backend.begin_epoch(0).unwrap();
        let mut places = BTreeMap::new();
        for (id, stream) in [(1, WriteStream::Data), (2, WriteStream::Metadata), (3, WriteStream::Table)] {
            let place = begin(&*backend, id, stream);
            let row = backend.row(&place) as usize;
            let whole = pattern(id, 20 * row);
            for piece in [2, 0, 3, 1] {
                let offset = piece * 5 * row;
                write(&*backend, id, &place, stream, offset, &whole[offset..offset + 5 * row]);
            }
            assert!(read(&*backend, id, &place, whole.len()) == whole);
            places.insert(id, (place, stream));
        }
        let length = |backend: &dyn Backend, id: u32| {
            let places: &BTreeMap<u32, (Place, WriteStream)> = &places;
            20 * backend.row(&places[&id].0) as usize
        };
        backend.finish(SegmentAt { segment: 1, place: &places[&1].0 }, length(&*backend, 1) as u64);
        backend.flush().unwrap();
        assert_eq!(backend.put_root(&first).unwrap(), PutRoot::Durable);
        // More of one that is not finished, durable as well; and something that is not.
        let more = pattern(9, 4096);
        write(&*backend, 2, &places[&2].0, WriteStream::Metadata, 20 * 4096, &more);
        backend.flush().unwrap();
        let lost = begin(&*backend, 4, WriteStream::Data);
        write(&*backend, 4, &lost, WriteStream::Data, 0, &pattern(8, backend.row(&lost) as usize));
        drop(backend);
        ground.crash(1);
        let (backend, _) = ground.import();
        let newest = backend.newest_root().unwrap().unwrap();
        assert_eq!((newest.lost, &newest.root), (0, &first));
        backend.adopt(&newest.root, &mut places.iter().map(|(id, (place, _))| (*id, place))).unwrap();
        backend.begin_epoch(0).unwrap();
        for (id, (place, _)) in &places {
            let length = length(&*backend, *id);
            assert!(read(&*backend, *id, place, length) == pattern(*id, length), "segment {id}");
        }
        let mut whole = pattern(2, 20 * 4096);
        whole.extend(&more);
        assert!(read(&*backend, 2, &places[&2].0, whole.len()) == whole);
        let unknown = backend.list_unknown(&|_, _| false).unwrap().segments;
        let mut listed: Vec<u32> = unknown.into_iter().map(|(id, _)| id).collect();
        listed.sort_unstable();
        assert_eq!(listed, [1, 2, 3]);
    }
}

/// What a backend of a bucket has in memory at most, before whoever writes waits.
const WAITING: usize = 16;

/// Writes a segment of two pieces, the second one first, which the first one makes whole.
fn write_whole(backend: &dyn Backend, id: u32) -> Result<(u32, Place), PoolError> {
    let place = begin(backend, id, WriteStream::Data);
    let at = SegmentAt { segment: id, place: &place };
    let whole = pattern(id, 3 * 4096);
    backend.await_room();
    for from in [4096, 0] {
        let piece = if from == 0 { &whole[..4096] } else { &whole[4096..] };
        let _ = backend.write(at, WriteStream::Data, from as u64, piece)?;
        backend.finish(at, whole.len() as u64);
    }
    Ok((id, place))
}

/// Several threads write at once; segments go to the bucket before a flush, whole, and few of them are
/// in memory.
#[test]
fn whole_segments_go_to_a_bucket_ahead() {
    let ground = InBucket::in_parallel();
    let objects = Objects::new(ground.bucket(), 7, MIB, 1000 * MIB, ground.writer());
    objects.adopt(&root(1), &mut std::iter::empty()).unwrap();
    objects.begin_epoch(0).unwrap();
    let unfinished = begin(&objects, 1, WriteStream::Data);
    write(&objects, 1, &unfinished, WriteStream::Data, 0, &pattern(1, 4096));
    let written: Vec<(u32, Place)> = std::thread::scope(|scope| {
        let objects = &objects;
        let writers = (0..4).map(|writer| {
            let ids = (0..100).map(move |number| 2 + writer * 100 + number);
            scope.spawn(move || ids.map(|id| write_whole(objects, id).unwrap()).collect::<Vec<_>>())
        });
        writers.collect::<Vec<_>>().into_iter().flat_map(|writer| writer.join().unwrap()).collect()
    });
    // Each of the four had looked for room before the others wrote.
    let there = |ground: &InBucket| ground.bucket.keys().iter().filter(|key| key.starts_with("seg/")).count();
    assert!(there(&ground) + WAITING + 4 >= written.len(), "{} of {}", there(&ground), written.len());
    assert!(!ground.bucket.keys().iter().any(|key| key.ends_with("-1")), "it is not whole");
    for (id, place) in &written {
        assert!(read(&objects, *id, place, 3 * 4096) == pattern(*id, 3 * 4096), "segment {id}");
    }
    objects.flush().unwrap();
    assert_eq!(there(&ground), written.len() + 1);
    let other = Objects::new(ground.bucket(), 7, MIB, 1000 * MIB, ground.writer());
    for (id, place) in &written {
        assert!(read(&other, *id, place, 3 * 4096) == pattern(*id, 3 * 4096), "segment {id}");
    }
}

/// Uploads that fail are told to whoever finds no room for more, and what was not uploaded is there
/// after the next flush that succeeds.
#[test]
fn uploads_that_fail_lose_nothing_and_stop_the_writer() {
    for parallel in [1, 4] {
        let ground =
            InBucket { bucket: Arc::new(MemoryBucket::new(0, 0).in_parallel(parallel)), ..InBucket::new(0, 0) };
        let objects = Objects::new(ground.bucket(), 7, MIB, 1000 * MIB, ground.writer());
        objects.adopt(&root(1), &mut std::iter::empty()).unwrap();
        objects.begin_epoch(0).unwrap();
        ground.bucket.fail_after(Some(0));
        let mut written = Vec::new();
        let refused = loop {
            match write_whole(&objects, 1 + written.len() as u32) {
                Ok(segment) => written.push(segment),
                Err(error) => break error,
            }
        };
        assert!(matches!(refused, PoolError::Device { .. }), "{refused}");
        assert_eq!(written.len(), WAITING);
        assert!(objects.flush().is_err());
        for (id, place) in &written {
            assert!(read(&objects, *id, place, 3 * 4096) == pattern(*id, 3 * 4096), "segment {id}");
        }
        ground.bucket.fail_after(None);
        objects.flush().unwrap();
        let other = Objects::new(ground.bucket(), 7, MIB, 1000 * MIB, ground.writer());
        for (id, place) in &written {
            assert!(read(&other, *id, place, 3 * 4096) == pattern(*id, 3 * 4096), "segment {id}");
        }
        write_whole(&objects, 900).unwrap();
    }
}

/// Room is given to as many segments as it says, and comes back.
#[test]
fn room_is_what_it_says() {
    for ground in grounds(2) {
        let (backend, first) = ground.new_backend();
        backend.adopt(&first, &mut std::iter::empty()).unwrap();
        backend.begin_epoch(0).unwrap();
        let room = backend.room();
        assert!(room.free > 40 && room.free == room.total - room.reserved && room.held_back == 0, "{room:?}");
        assert_eq!(backend.begin(1, WriteStream::Data, room.free).unwrap(), None, "none is left for others");
        let mut begun = Vec::new();
        while let Some(place) = backend.begin(1 + begun.len() as u32, WriteStream::Data, 5).unwrap() {
            begun.push((1 + begun.len() as u32, place));
        }
        assert_eq!((begun.len() as u64, backend.room().free), (room.free - 5, 5));
        let places: std::collections::BTreeSet<_> = begun.iter().map(|(id, place)| (*id, place.to_vec())).collect();
        assert_eq!(places.len(), begun.len());
        backend.remove(&begun[3..8]);
        assert_eq!(backend.room().free, 10);
        backend.flush().unwrap();
        assert_eq!(backend.put_root(&first).unwrap(), PutRoot::Durable);
        // The place of what is removed takes others.
        let next = begun.len() as u32 + 1;
        let place = begin(&*backend, next, WriteStream::Data);
        write(&*backend, next, &place, WriteStream::Data, 0, &pattern(next, backend.row(&place) as usize));
        assert!(read(&*backend, next, &place, 4096) == pattern(next, 4096));
        let gone = SegmentAt { segment: begun[3].0, place: &begun[3].1 };
        assert_eq!(backend.heal(gone, 0, &[1; 4096], &|_| true).unwrap(), None, "it is not that segment's any more");
        assert!(read(&*backend, next, &place, 4096) == pattern(next, 4096));
    }
}

#[test]
fn the_newest_root_is_found() {
    for ground in grounds(3) {
        let (backend, first) = ground.new_backend();
        backend.adopt(&first, &mut std::iter::empty()).unwrap();
        backend.begin_epoch(0).unwrap();
        assert_eq!(backend.newest_root().unwrap(), None);
        for generation in 1..=5 {
            let root = Root { log: first.log.clone(), ..root(generation) };
            assert_eq!(backend.put_root(&root).unwrap(), PutRoot::Durable);
            let newest = backend.newest_root().unwrap().unwrap();
            assert_eq!((newest.root, newest.lost), (root, 0));
        }
        assert_eq!(backend.roots().unwrap().keys().copied().collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
        drop(backend);
        ground.crash(1);
        assert_eq!(ground.import().0.newest_root().unwrap().unwrap().root.generation, 5);
    }
}

/// Where others may write as well: of two that imported the same state one is taken, and the other
/// hears of it, whatever replies are lost.
#[test]
fn one_of_two_writers_is_fenced() {
    for seed in 0..200 {
        let ground = InBucket::new(seed, 4 + seed % 9);
        let (backend, first) = ground.new_backend();
        assert_eq!(backend.put_root(&first).unwrap(), PutRoot::Durable);
        let writers = [ground.import().0, ground.import().0];
        let mut random = Random(seed);
        let (mut taken, mut fenced) = ([0; 2], [false; 2]);
        for writer in &writers {
            let newest = writer.newest_root().unwrap().unwrap().root;
            assert_eq!(newest, first);
            writer.adopt(&newest, &mut std::iter::empty()).unwrap();
            writer.begin_epoch(0).unwrap();
        }
        let mut next = [2; 2];
        for _ in 0..20 {
            let at = random.below(2) as usize;
            match writers[at].put_root(&Root { txg: Txg(at as u64), ..root(next[at]) }) {
                Ok(PutRoot::Durable) => {
                    assert!(!fenced[at], "who was fenced writes on");
                    taken[at] += 1;
                    next[at] += 1;
                }
                Ok(PutRoot::Fenced { .. }) => fenced[at] = true,
                // Nobody knows; it may be there. Whoever is told so stops.
                Err(_) => break,
            }
        }
        assert!(taken[0] == 0 || taken[1] == 0, "both wrote: {taken:?}, seed {seed}");
        if taken == [0, 0] {
            continue;
        }
        let roots = backend.roots();
        for (generation, root) in roots.iter().flatten().filter(|(generation, _)| **generation > 1) {
            let winner = usize::from(taken[1] > 0);
            assert_eq!(root.txg.0 as usize, winner, "generation {generation} is another's, seed {seed}");
        }
    }
}

/// A request that arrives when its sender has made it again takes nothing from a segment that has
/// grown since.
#[test]
fn what_is_sent_late_takes_nothing_away() {
    let ground = InBucket::new(1, 0);
    let (backend, first) = ground.new_backend();
    backend.adopt(&first, &mut std::iter::empty()).unwrap();
    backend.begin_epoch(0).unwrap();
    let place = begin(&*backend, 1, WriteStream::Data);
    write(&*backend, 1, &place, WriteStream::Data, 0, &pattern(1, 4096));
    backend.flush().unwrap();
    let key = ground.bucket.keys().into_iter().find(|key| key.starts_with("seg/")).unwrap();
    let sent = ground.bucket.get(&key, None).unwrap().unwrap();
    write(&*backend, 1, &place, WriteStream::Data, 4096, &pattern(2, 4096));
    backend.flush().unwrap();
    // The first request was one that makes an object.
    assert_eq!(ground.bucket.put_new(&key, &sent).unwrap(), Put::Exists);
    let at = SegmentAt { segment: 1, place: &place };
    backend.finish(at, 8192);
    assert!(read(&*backend, 1, &place, 8192)[4096..] == pattern(2, 4096));
}

/// Another writer takes a pool over after its root 1, and puts so many roots that names of old ones are free
/// again.
fn another_puts_roots_for_days(ground: &InBucket) -> Arc<dyn Backend> {
    let (other, _) = ground.import();
    other.newest_root().unwrap();
    for generation in 2..=520 {
        ground.clock.fetch_add(600, Ordering::Relaxed);
        assert_eq!(other.put_root(&root(generation)).unwrap(), PutRoot::Durable);
    }
    other
}

/// Whoever stands still before its root is there, so long that the name of it is free again, finds out.
#[test]
fn a_writer_that_stood_still_over_its_root_is_told_nothing() {
    let ground = InBucket::new(1, 0);
    let (backend, first) = ground.new_backend();
    assert_eq!(backend.put_root(&first).unwrap(), PutRoot::Durable);
    another_puts_roots_for_days(&ground);
    // As if it had looked before all that: its clock says so, and then what time it is.
    let moments = Mutex::new(VecDeque::from([1_800_000_001, 1_800_000_002]));
    let clock = Arc::clone(&ground.clock);
    let now = move || moments.lock().unwrap().pop_front().unwrap_or_else(|| clock.load(Ordering::Relaxed));
    let late = Objects::new(
        ground.bucket(),
        7,
        MIB,
        62 * MIB,
        WriterId { nonce: 99, host: "late".into(), clock: Box::new(now), uptime: Box::new(|| 1) },
    );
    late.newest_root().unwrap();
    let put = late.put_root(&root(2)).unwrap();
    assert!(matches!(put, PutRoot::Fenced { .. }), "its name is free, but it is late: {put:?}");
}

/// Names of old roots are free again one day: who comes back after that looks first.
#[test]
fn a_writer_that_was_idle_for_long_looks_for_newer_roots() {
    let ground = InBucket::new(1, 0);
    let (backend, first) = ground.new_backend();
    assert_eq!(backend.put_root(&first).unwrap(), PutRoot::Durable);
    let other = another_puts_roots_for_days(&ground);
    let left = other.roots().unwrap();
    assert!(!left.contains_key(&2) && left.contains_key(&400), "{} roots are left", left.len());
    let late = backend.put_root(&root(2)).unwrap();
    assert!(matches!(late, PutRoot::Fenced { .. }), "its name is free, but it is late: {late:?}");
}

/// As for the test before, on a machine whose clock was set back meanwhile: it is another clock that tells.
#[test]
fn a_writer_whose_clock_was_set_back_looks_for_newer_roots() {
    let ground = InBucket::new(1, 0);
    let (backend, first) = ground.new_backend();
    assert_eq!(backend.put_root(&first).unwrap(), PutRoot::Durable);
    another_puts_roots_for_days(&ground);
    ground.clock.store(1_800_000_000, Ordering::Relaxed);
    ground.uptime.store(4000, Ordering::Relaxed);
    let late = backend.put_root(&root(2)).unwrap();
    assert!(matches!(late, PutRoot::Fenced { .. }), "its name is free, but it is late: {late:?}");
}

#[test]
fn a_bucket_with_a_pool_takes_no_other() {
    let ground = InBucket::new(1, 0);
    drop(ground.create_store());
    let other = NewPool { guid: 8, ..new_pool() };
    let refused = Store::create_in(ground.objects(), &other, 62 * MIB).map(drop).unwrap_err();
    assert!(refused.to_string().contains("another pool is there"), "{refused}");
    assert_eq!(Objects::find(&*ground.bucket).unwrap().unwrap().pool, 7);
    assert_eq!(ground.bucket.put_new("x", b"1").unwrap(), Put::Made);
}

/// A pool in use, and what must be in it.
struct Model {
    ground: Box<dyn Ground>,
    store: Store,
    random: Random,
    txg: u64,
    now: BTreeMap<u64, Pointer>,
    /// What each commit holds, by its txg.
    states: BTreeMap<u64, BTreeMap<u64, Pointer>>,
    durable: u64,
}

fn content(number: u64) -> Vec<u8> {
    let mut random = Random(number);
    let length = 100 + random.below(90_000) as usize;
    (0..length).map(|at| if at % 3 == 0 { random.next() as u8 } else { at as u8 }).collect()
}

impl Model {
    fn new(ground: Box<dyn Ground>, seed: u64) -> Self {
        let store = ground.create_store();
        let states = BTreeMap::from([(0, BTreeMap::new())]);
        Self { ground, store, random: Random(seed), txg: 1, now: BTreeMap::new(), states, durable: 0 }
    }

    fn step(&mut self) -> Result<(), PoolError> {
        match self.random.below(20) {
            0..10 => {
                let number = self.random.next();
                let stream = if number.is_multiple_of(3) { WriteStream::Metadata } else { WriteStream::Data };
                let frame = NewFrame {
                    stream,
                    kind: if stream == WriteStream::Data { FrameKind::Data } else { FrameKind::Leaf },
                    owner: Owner { dataset: 1, object: number, offset: 0 },
                    birth: Txg(self.txg),
                    content: &content(number),
                    compression: CompressionSetting::Lz4,
                    checksum: ChecksumKind::Xxh3,
                };
                match self.store.write(&frame) {
                    Ok(pointer) => drop(self.now.insert(number, pointer)),
                    Err(PoolError::NoSpace) => self.free(12),
                    Err(error) => return Err(error),
                }
            }
            10..14 => self.free(1),
            14..17 => {
                let numbers: Vec<u64> = self.now.keys().copied().collect();
                if let Some(number) = self.random.pick(&numbers) {
                    assert!(*self.store.read(&self.now[number])? == *content(*number));
                }
            }
            17 => drop(self.store.clean_step(MIB)?),
            _ => self.commit()?,
        }
        Ok(())
    }

    fn commit(&mut self) -> Result<(), PoolError> {
        self.states.insert(self.txg, self.now.clone());
        self.txg += 1;
        let (txg, log_start) = (Txg(self.txg - 1), LogStart::default());
        self.store.commit(&Commit { txg, catalog: None, upper: &[], log_start, time: self.txg })?;
        self.durable = txg.0;
        Ok(())
    }

    fn free(&mut self, count: usize) {
        for _ in 0..count {
            let numbers: Vec<u64> = self.now.keys().copied().collect();
            if let Some(number) = self.random.pick(&numbers) {
                self.store.free(&self.now.remove(number).unwrap(), Txg(self.txg));
            }
        }
    }

    /// The program dies, and the next one finds a state that is whole and not older than what was
    /// told to be durable.
    fn again(&mut self, access: Access) {
        self.ground.crash(self.random.next());
        let (store, root) = (0..50).find_map(|_| self.ground.open_store(access).ok()).expect("an import");
        assert!(root.txg.0 >= self.durable, "txg {} of {}", root.txg, self.durable);
        let state = &self.states[&root.txg.0];
        for (number, pointer) in state {
            assert!(*store.read(pointer).unwrap() == *content(*number), "frame {number}");
        }
        let charged: u64 = state.values().map(Pointer::charged).sum();
        let space = store.space();
        assert_eq!(space.allocated - space.table, charged);
        (self.now, self.txg, self.durable) = (state.clone(), root.txg.0 + 1, root.txg.0);
        self.store = store;
    }
}

/// The whole store, on everything: what is committed is there after any crash, and room that is
/// freed comes back.
#[test]
fn a_store_lives_on_every_backend() {
    let rounds: u64 = std::env::var("NACRE_POOL_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(1);
    println!("campaign: {rounds} rounds of a store on every backend (NACRE_POOL_ROUNDS)");
    for round in 0..rounds {
        for (kind, ground) in grounds(round).into_iter().enumerate() {
            let mut model = Model::new(ground, round * 10 + kind as u64);
            for life in 0..6 {
                for _ in 0..100 + model.random.below(100) {
                    if let Err(error) = model.step() {
                        // Too many replies were lost one after the other.
                        assert!(kind == 3 && matches!(error, PoolError::Suspended { .. }), "{error}");
                        break;
                    }
                }
                model.again(if life % 3 == 2 { Access::ReadOnly } else { Access::ReadWrite });
                if life % 3 == 2 {
                    model.again(Access::ReadWrite);
                }
            }
            let damaged = |store: &Store| {
                let mut damaged = 0;
                let mut visit = |checked: &nacre_pool::store::Checked| {
                    damaged += u32::from(checked.damage.is_some());
                    true
                };
                store.scrub(&mut visit).map(|()| damaged)
            };
            assert!((0..50).any(|_| damaged(&model.store).is_ok_and(|damaged| damaged == 0)));
        }
    }
}

/// What was freed last leaves a bucket to which nobody writes any more, and then nothing is asked of it.
#[test]
fn what_nobody_needs_goes_without_another_change() {
    let ground = InBucket::new(3, 0);
    let (bucket, clock) = (Arc::clone(&ground.bucket), Arc::clone(&ground.clock));
    let mut model = Model::new(Box::new(ground), 3);
    let segments = || bucket.keys().iter().filter(|key| key.starts_with("seg/")).count();
    for txg in 1..=40 {
        while model.now.len() < txg {
            model.step().unwrap();
        }
    }
    while !model.now.is_empty() {
        model.free(1);
    }
    model.commit().unwrap();
    let before = segments();
    assert!(before > 40, "{before}");
    // A minute each time.
    for _ in 0..30 {
        model.store.let_go().unwrap();
        clock.fetch_add(61, Ordering::Relaxed);
    }
    assert!(segments() < before / 2 && segments() < 40, "{before} {}", segments());
    let asked = bucket.requests();
    for _ in 0..30 {
        model.store.let_go().unwrap();
        clock.fetch_add(61, Ordering::Relaxed);
    }
    assert_eq!(bucket.requests(), asked);
    model.again(Access::ReadWrite);
}

/// The network goes at every single request of a piece of work.
#[test]
fn every_point_of_failure_of_a_bucket_leaves_a_whole_state() {
    let work = |model: &mut Model, commits: u64| -> Result<(), PoolError> {
        while model.txg <= commits {
            model.step()?;
        }
        Ok(())
    };
    let count = {
        let ground = InBucket::new(3, 0);
        let bucket = Arc::clone(&ground.bucket);
        let mut model = Model::new(Box::new(ground), 5);
        let requests = || {
            let Requests { puts, gets, lists, deletes, .. } = bucket.requests();
            puts + gets + lists + deletes
        };
        let before = requests();
        work(&mut model, 9).unwrap();
        requests() - before
    };
    assert!(count > 30, "{count} requests");
    for allowed in 0..count {
        let ground = InBucket::new(3, 0);
        let bucket = Arc::clone(&ground.bucket);
        let mut model = Model::new(Box::new(ground), 5);
        bucket.fail_after(Some(allowed));
        let error = work(&mut model, 9).unwrap_err();
        assert!(matches!(error, PoolError::Suspended { .. } | PoolError::Device { .. }), "{error}");
        model.again(Access::ReadWrite);
        let commits = model.txg + 1;
        work(&mut model, commits).unwrap();
        model.again(Access::ReadOnly);
    }
}

/// A whole pool in a bucket.
struct PoolInBucket {
    pool: Pool,
}

impl PoolInBucket {
    fn config(store: &Arc<Store>) -> PoolConfig {
        let (ticks, random) = (AtomicI64::new(1_800_000_000), AtomicU64::new(3));
        PoolConfig {
            log: Some(store.log().unwrap()),
            storage: Arc::clone(store) as _,
            clock: Arc::new(move || Timestamp { seconds: ticks.fetch_add(1, Ordering::Relaxed), nanoseconds: 1 }),
            entropy: Arc::new(move || Random(random.fetch_add(1, Ordering::Relaxed)).next()),
            cache: 8 << 20,
            kept: None,
        }
    }

    fn create(ground: &InBucket) -> Self {
        Self { pool: Pool::create(Self::config(&Arc::new(ground.create_store())), "tank").unwrap() }
    }

    fn import(ground: &InBucket) -> Self {
        Self::open(ground.open_store(Access::ReadWrite).unwrap()).unwrap()
    }

    fn open((store, root): (Store, Root)) -> Result<Self, PoolError> {
        let durable = Durable { txg: root.txg, catalog: root.catalog.unwrap(), log: root.log_start.into() };
        Ok(Self { pool: Pool::open(Self::config(&Arc::new(store)), &durable)? })
    }

    fn tank(&self) -> Arc<Dataset> {
        self.pool.dataset(self.pool.find("tank").unwrap().unwrap()).unwrap()
    }

    /// Writes a file and syncs it.
    fn write(&self, name: &str) -> Result<(), FileError> {
        self.write_with(name, b"")
    }

    /// The same with an attribute, where it has any value.
    fn write_with(&self, name: &str, attribute: &[u8]) -> Result<(), FileError> {
        let tank = self.tank();
        let attributes = Some((b"user.a".to_vec(), attribute.to_vec())).filter(|(_, value)| !value.is_empty());
        let new = |parent: &ParentView| {
            let row = InodeRow::new(FileType::Regular, 0o644, parent.now);
            Ok(NewInode { row, target: None, attributes: attributes.iter().cloned().collect() })
        };
        let (file, _) = tank.files().make(&tank.files().root(), name.as_bytes(), b"", &new)?;
        tank.files().write(&file, Some(0), name.as_bytes())?;
        self.pool.sync_file(&tank, &file)
    }

    fn attribute(&self, name: &str) -> Vec<u8> {
        let tank = self.tank();
        let (file, _) = tank.files().look_up(&tank.files().root(), name.as_bytes()).unwrap();
        tank.files().attribute(&file, b"user.a").unwrap()
    }

    fn has(&self, name: &str) -> bool {
        let tank = self.tank();
        let Ok((file, _)) = tank.files().look_up(&tank.files().root(), name.as_bytes()) else { return false };
        let mut content = vec![0; name.len()];
        tank.files().read(&file, 0, &mut content).unwrap();
        content == name.as_bytes()
    }
}

/// A reader that looks for newer roots and cannot go on to them reads what it serves all the same.
#[test]
fn a_reader_that_does_not_go_on_keeps_what_it_serves() {
    let ground = InBucket::new(1, 0);
    let store = ground.create_store();
    let commit = |txg: u64, content: &[u8]| {
        let frame = NewFrame {
            stream: WriteStream::Data,
            kind: FrameKind::Data,
            owner: Owner { dataset: 1, object: txg, offset: 0 },
            birth: Txg(txg),
            content,
            compression: CompressionSetting::Off,
            checksum: ChecksumKind::Xxh3,
        };
        let pointer = store.write(&frame).unwrap();
        let log_start = LogStart::default();
        store.commit(&Commit { txg: Txg(txg), catalog: None, upper: &[], log_start, time: txg }).unwrap();
        pointer
    };
    let mut served = commit(1, &content(1));
    let (reader, root) = ground.open_store(Access::ReadOnly).unwrap();
    let (mut used, mut of) = (root.generation, 1);
    for txg in 2..30 {
        if txg == of + 1 {
            store.free(&served, Txg(txg));
        }
        let newer = commit(txg, &content(txg));
        for _ in 0..6 {
            store.clean_step(MIB).unwrap();
        }
        let root = reader.follow(used).unwrap().expect("a newer root");
        assert!(*reader.read(&served).unwrap() == *content(of), "what txg {of} wrote, at txg {txg}");
        if txg % 7 == 0 {
            (used, of, served) = (root.generation, txg, newer);
        }
    }
}

/// Programs on one object store that stand still at any moment and take the pool from each other.
#[test]
fn histories_of_several_writers_lose_nothing() {
    crate::histories::campaign();
}

#[test]
fn of_imports_at_the_same_moment_one_has_the_pool() {
    (1..80).for_each(crate::histories::take_over_at_once);
}

#[test]
fn who_goes_back_ends_the_log_of_whoever_wrote() {
    let synced: u64 = (1..60).map(crate::histories::go_back_beside_a_writer).sum();
    assert!(synced > 50, "{synced} synced beside one that went back");
}

/// Who stands still between its root and the log may find that blocks are gone which another one has
/// read: it has lost the pool. (Found by history 809.)
#[test]
fn a_writer_that_stood_still_before_the_log_has_lost_the_pool() {
    let ground = InBucket::new(5, 0);
    let first = PoolInBucket::create(&ground);
    first.pool.commit().unwrap();
    first.write("synced").unwrap();
    let late = ground.open_store(Access::ReadWrite).unwrap();
    let other = PoolInBucket::import(&ground);
    other.pool.commit().unwrap();
    assert!(other.has("synced"));
    let Err(error) = PoolInBucket::open(late) else { panic!("it has a pool without what was synced") };
    assert!(error.to_string().contains("another program writes to the pool now"), "{error}");
    assert!(first.write("too late").is_err());
}
