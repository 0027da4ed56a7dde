//! Pools that are nearly full most of the time: a file that takes 80 to 99 % of the room is overwritten at random, beside
//! periodic commits and the cleaner, and the power fails at any moment. On plain devices, in every kind of group, and in
//! a bucket.
//!
//! After each failure the file has the state after one of its writes, in their order, at least the last synced one: no
//! write is torn, none overtakes another one, although a commit stores the file in parts.
//!
//! `NACRE_POOL_ROUNDS` is the number of crashes of each pool, `NACRE_POOL_SEED` another beginning.

use std::io;
use std::time::Duration;

use super::*;
use crate::backend::{Bucket, MemoryBucket, NewGroup, Objects, WriterId};
use crate::device::{Device, Random, Simulator};
use crate::files::FileError;
use crate::label::{GroupKind, Root};
use crate::store::{Access, Import, NewPool, Store};

/// Length of the blocks whose versions are known, bytes.
const BLOCK: usize = 4096;
const MIB: usize = 1 << 20;

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |value| value.parse().expect(name))
}

/// The content of a version of a block, which cannot be compressed.
fn content(block: usize, version: u32) -> Vec<u8> {
    let mut random = Random(((block as u64) << 32) | u64::from(version));
    let mut bytes = version.to_le_bytes().to_vec();
    while bytes.len() < BLOCK {
        bytes.extend_from_slice(&random.next().to_le_bytes());
    }
    bytes.truncate(BLOCK);
    bytes
}

/// The power of all devices of a pool: the number of writes and syncs until it fails.
struct Power(AtomicI64);

impl Power {
    fn use_some(&self) -> io::Result<()> {
        if self.0.fetch_sub(1, Ordering::SeqCst) > 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(5)) }
    }
}

/// A device that fails with the power of all others.
struct Powered {
    below: Arc<Simulator>,
    power: Arc<Power>,
}

impl Device for Powered {
    fn name(&self) -> &str {
        self.below.name()
    }

    fn length(&self) -> u64 {
        self.below.length()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.below.read_at(buffer, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.power.use_some()?;
        self.below.write_at(bytes, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.power.use_some()?;
        self.below.sync()
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        self.below.discard(offset, length)
    }

    fn expect(&self, offset: u64, length: u64) {
        self.below.expect(offset, length);
    }
}

/// Where the pool lies.
enum Ground {
    Devices { groups: Vec<NewGroup>, devices: Vec<Arc<Powered>>, power: Arc<Power> },
    Bucket { bucket: Arc<MemoryBucket>, imports: u64 },
}

/// Size of the pool in a bucket, and length of its segments, bytes.
const BUCKET: (u64, u64) = (128 << 20, 1 << 20);

impl Ground {
    fn devices(groups: &[(GroupKind, usize)], length: u64) -> Self {
        let power = Arc::new(Power(AtomicI64::new(i64::MAX)));
        let count = groups.iter().map(|(_, devices)| devices).sum::<usize>();
        let powered = |at: usize| Powered {
            below: Arc::new(Simulator::new(&format!("disk{at}"), length)),
            power: Arc::clone(&power),
        };
        let devices = (0..count).map(|at| Arc::new(powered(at))).collect();
        let groups = groups.iter().map(|(kind, devices)| NewGroup { kind: *kind, devices: *devices }).collect();
        Self::Devices { groups, devices, power }
    }

    /// The power, or the network, fails after this many operations.
    fn fail_after(&self, operations: u64) {
        match self {
            Self::Devices { power, .. } => power.0.store(operations as i64, Ordering::SeqCst),
            Self::Bucket { bucket, .. } => bucket.fail_after(Some(operations)),
        }
    }

    /// What was not synced is lost in part; from now on everything works again.
    fn crash(&self, random: &mut Random) {
        match self {
            Self::Devices { devices, power, .. } => {
                devices.iter().for_each(|device| device.below.crash(random.next()));
                power.0.store(i64::MAX, Ordering::SeqCst);
            }
            Self::Bucket { bucket, .. } => bucket.fail_after(None),
        }
    }

    fn open_store(&mut self, fresh: bool) -> (Store, Root) {
        let host = (1, "here".to_owned());
        let new = NewPool { name: "tank".to_owned(), guid: 7, host: host.clone(), time: 1, redundant_metadata: true };
        let import = Import { access: Access::ReadWrite, name: None, host, time: 2 };
        match self {
            Self::Devices { groups, devices, .. } => {
                let devices = devices.iter().map(|device| Arc::clone(device) as Arc<dyn Device>).collect();
                let is_plain = groups.iter().all(|group| group.kind == GroupKind::Plain);
                match fresh {
                    true if is_plain => Store::create(devices, &new).unwrap(),
                    true => Store::create_groups(devices, groups, &new).unwrap(),
                    false => Store::open(devices, &import).unwrap(),
                }
            }
            Self::Bucket { bucket, imports } => {
                *imports += 1;
                let writer = WriterId {
                    nonce: *imports,
                    host: "here".to_owned(),
                    clock: Box::new(|| 1_800_000_000),
                    uptime: Box::new(|| 1000),
                };
                let shared = Arc::clone(bucket) as Arc<dyn Bucket>;
                let objects = Arc::new(Objects::new(shared, 7, BUCKET.1, BUCKET.0, writer));
                if fresh {
                    return Store::create_in(objects, &new, BUCKET.0).unwrap();
                }
                let identity = Objects::find(&**bucket).unwrap().expect("a pool");
                let (store, _) = Store::open_in(objects, identity, &import).unwrap();
                store.confirm().unwrap();
                let root = store.root();
                (store, root)
            }
        }
    }

    /// Creates or opens the pool, with this slop space.
    fn open(&mut self, fresh: bool, slop: u64) -> Opened {
        let (store, root) = self.open_store(fresh);
        let store = Arc::new(store.with_slop(slop));
        let empty = Arc::new(MapStorage::default());
        let config = PoolConfig { log: Some(store.log().unwrap()), storage: Arc::clone(&store) as _, ..config(&empty) };
        let pool = match root.catalog {
            None => Pool::create(config, "tank").unwrap(),
            Some(catalog) => {
                Pool::open(config, &Durable { txg: root.txg, catalog, log: root.log_start.into() }).unwrap()
            }
        };
        let dataset = pool.dataset(pool.find("tank").unwrap().unwrap()).unwrap();
        Opened { store, pool: Arc::new(pool), dataset }
    }
}

/// An imported pool.
struct Opened {
    store: Arc<Store>,
    pool: Arc<Pool>,
    dataset: Arc<Dataset>,
}

impl Opened {
    fn file(&self) -> Arc<Inode> {
        self.dataset.files().look_up(&self.dataset.files().root(), b"image").unwrap().0
    }

    fn check(&self, what: &str) {
        let mut problems = Vec::new();
        let seen = self.pool.check(&self.store, false, &mut |problem| problems.push(problem.to_owned())).unwrap();
        assert!(seen.problems == 0, "{what}: {} problems: {problems:#?}", seen.problems);
    }

    /// Overwrites the file at random until something fails, which nothing does unless the power (`fails`); returns the
    /// number of writes.
    fn overwrite(&self, versions: &mut Versions, random: &mut Random, steps: u64, fails: bool) -> u64 {
        let file = self.file();
        for step in 0..steps {
            let blocks = [1, 4, 32][random.below(3) as usize];
            let first = random.below((versions.of.len() - blocks + 1) as u64) as usize;
            let bytes = versions.write(first..first + blocks);
            match self.dataset.files().write(&file, Some((first * BLOCK) as u64), &bytes) {
                Ok(outcome) => assert_eq!(outcome.written, bytes.len()),
                Err(error) => {
                    assert!(!matches!(error, FileError::Pool(PoolError::NoSpace)), "overwriting needs no room");
                    assert!(fails, "{error}");
                    return step;
                }
            }
            let synced = match random.below(60) {
                0 => self.pool.sync_file(&self.dataset, &file),
                1 => self.pool.commit().map(drop).map_err(FileError::from),
                _ => continue,
            };
            match synced {
                Ok(()) => versions.promise(),
                Err(error) => {
                    assert!(fails, "{error}");
                    return step;
                }
            }
        }
        steps
    }
}

/// For each block the numbers of the writes that it may have the content of after a crash, in their order.
struct Versions {
    of: Vec<Vec<u32>>,
    /// The number of the last write.
    last: u32,
}

impl Versions {
    /// The content of the next write to these blocks.
    fn write(&mut self, blocks: std::ops::Range<usize>) -> Vec<u8> {
        self.last += 1;
        self.of[blocks.clone()].iter_mut().for_each(|of| of.push(self.last));
        blocks.flat_map(|block| content(block, self.last)).collect()
    }

    /// All writes so far are durable.
    fn promise(&mut self) {
        self.of.iter_mut().for_each(|of| drop(of.drain(..of.len() - 1)));
    }

    /// Checks that the file has the state after one of the writes, and keeps this state.
    fn compare(&mut self, opened: &Opened, what: &str) {
        let (file, mut found) = (opened.file(), Vec::new());
        let mut bytes = vec![0; MIB];
        while found.len() < self.of.len() {
            let wanted = &mut bytes[..MIB.min((self.of.len() - found.len()) * BLOCK)];
            let read = opened.dataset.files().read(&file, (found.len() * BLOCK) as u64, wanted).unwrap();
            assert_eq!(read, wanted.len(), "{what}");
            for bytes in wanted.chunks(BLOCK) {
                let version = u32::from_le_bytes(bytes[..4].try_into().unwrap());
                assert!(bytes == content(found.len(), version), "{what}: block {}, version {version}", found.len());
                found.push(version);
            }
        }
        let newest = found.iter().copied().max().unwrap();
        for (block, (of, found)) in self.of.iter_mut().zip(found).enumerate() {
            let expected = of.iter().copied().filter(|version| *version <= newest).max();
            assert_eq!(Some(found), expected, "{what}: block {block} of {of:?} after write {newest}");
            *of = vec![found];
        }
    }
}

/// Overwrites a file on a nearly full pool, with crashes.
fn campaign(name: &str, mut ground: Ground, slop: u64) {
    let seed = number("NACRE_POOL_SEED", 1);
    let rounds = number("NACRE_POOL_ROUNDS", 2);
    let mut random = Random(seed);
    let percent = 80 + random.below(20);
    let mut opened = ground.open(true, slop);
    let size = opened.dataset.files().content_room() as usize / 100 * percent as usize / MIB * MIB;
    assert!(size > 30 * MIB, "{size}");
    let file = make(&opened.dataset, &opened.dataset.files().root(), "image", FileType::Regular);
    let mut versions = Versions { of: vec![vec![1]; size / BLOCK], last: 1 };
    for at in (0..size).step_by(MIB) {
        let bytes: Vec<u8> = (at / BLOCK..(at + MIB) / BLOCK).flat_map(|block| content(block, 1)).collect();
        assert_eq!(opened.dataset.files().write(&file, Some(at as u64), &bytes).unwrap().written, MIB);
    }
    opened.pool.commit().unwrap();
    drop(file);
    let mut writes = 0;
    for round in 0..rounds {
        let what = format!("{name}, seed {seed}, {percent} %, round {round}");
        let pace = Pace { every: Duration::from_millis(20), begin: 4 << 20, most: 6 << 20, ..Pace::default() };
        let committer = opened.pool.start_committer(pace).unwrap();
        let fails = round % 2 == 1;
        if fails {
            ground.fail_after(1 + random.below(1500));
        }
        let steps = 200 + random.below(600);
        writes += opened.overwrite(&mut versions, &mut random, steps, fails);
        // Where the power is about to fail, the commit of a check could fail.
        if committer.stop().is_ok() && !fails {
            versions.promise();
            opened.check(&what);
        }
        drop(opened);
        ground.crash(&mut random);
        opened = ground.open(false, slop);
        versions.compare(&opened, &what);
        opened.check(&what);
    }
    println!(
        "campaign: {name}, seed {seed}, {percent} % full, {writes} writes, {rounds} crashes (NACRE_POOL_ROUNDS, \
         NACRE_POOL_SEED)"
    );
}

#[test]
fn a_nearly_full_device_loses_nothing_to_crashes() {
    campaign("a device", Ground::devices(&[(GroupKind::Plain, 1)], 128 << 20), 20 << 20);
}

#[test]
fn nearly_full_devices_lose_nothing_to_crashes() {
    campaign("two devices", Ground::devices(&[(GroupKind::Plain, 1), (GroupKind::Plain, 1)], 64 << 20), 20 << 20);
}

#[test]
fn a_nearly_full_mirror_loses_nothing_to_crashes() {
    campaign("mirror", Ground::devices(&[(GroupKind::Mirror, 2)], 128 << 20), 20 << 20);
}

#[test]
fn a_nearly_full_raidz1_loses_nothing_to_crashes() {
    campaign("raidz1", Ground::devices(&[(GroupKind::RaidZ(1), 3)], 96 << 20), 40 << 20);
}

#[test]
fn a_nearly_full_raidz2_loses_nothing_to_crashes() {
    campaign("raidz2", Ground::devices(&[(GroupKind::RaidZ(2), 4)], 96 << 20), 40 << 20);
}

#[test]
fn a_nearly_full_raidz3_loses_nothing_to_crashes() {
    campaign("raidz3", Ground::devices(&[(GroupKind::RaidZ(3), 5)], 96 << 20), 40 << 20);
}

#[test]
fn a_nearly_full_mixture_of_groups_loses_nothing_to_crashes() {
    let groups = [(GroupKind::Mirror, 2), (GroupKind::RaidZ(1), 3)];
    campaign("mirror and raidz1", Ground::devices(&groups, 64 << 20), 40 << 20);
}

#[test]
fn a_nearly_full_bucket_loses_nothing_to_crashes() {
    campaign("bucket", Ground::Bucket { bucket: Arc::new(MemoryBucket::new(1, 0)), imports: 0 }, 20 << 20);
}
