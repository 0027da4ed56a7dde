//! Tests of the engine over a store in memory: committed data exists after reopening, snapshots
//! keep their state, and no frame is lost, freed twice or counted wrong.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use parking_lot::Mutex;
use proptest::prelude::*;

use super::*;
use crate::files::{Inode, MayReplace, NewInode, ParentView};
use crate::rows::{Extent, FileType, InodeRow, OwnerKind, OwnerUse, Timestamp, Xattr, keys};
use crate::tree::{Context, Settings, Tree as Rows, walk::Visitor, walk::walk};

mod damage;
mod destroy_set;
mod folded;
mod forged_catalog;
mod kept;
mod nearly_full;
mod refused;
mod running;
mod sent;
mod space;

/// Store with its frames in a map; freed ones are removed by the commit.
#[derive(Default)]
struct MapStorage {
    state: Mutex<MapState>,
    /// Its size in bytes, where the size matters.
    size: AtomicU64,
    /// Bytes that are written before cleaning; 0: no limit.
    before_cleaning: AtomicU64,
    /// Bytes by which its device has grown unnoticed.
    growth: AtomicU64,
    /// Runs at each read.
    on_read: Mutex<Option<OnRead>>,
    /// Error of its commits, to make them fail.
    suspended: Mutex<Option<PoolError>>,
}

type OnRead = Box<dyn Fn() + Send>;

/// A frame's content and birth.
type Stored = (Arc<[u8]>, Txg);

#[derive(Default)]
struct MapState {
    frames: HashMap<(u32, u32), Stored>,
    charged: u64,
    next: u32,
    freed: Vec<(u32, u32)>,
    durable: (Txg, Option<Pointer>),
    log: log::Start,
}

/// Stored length of content: long runs of zeros shrink to almost nothing, other content not at all.
/// Bytes.
fn packed(content: &[u8]) -> usize {
    if content.len() >= 4096 && content.iter().all(|byte| *byte == 0) { 16 } else { content.len() }
}

fn charged(content: &[u8]) -> u64 {
    (packed(content) as u64 + u64::from(Pointer::HEADER)).next_multiple_of(16)
}

impl Frames for MapStorage {
    fn read(&self, pointer: &Pointer) -> Result<Arc<[u8]>, PoolError> {
        self.on_read.lock().iter().for_each(|on_read| on_read());
        let state = self.state.lock();
        state
            .frames
            .get(&(pointer.segment, pointer.index))
            .map(|(content, _)| Arc::clone(content))
            .ok_or(PoolError::Frame { pointer: *pointer, damage: crate::Damage::Header })
    }

    fn expect(&self, _: &[Pointer]) {}

    fn write(&self, frame: &NewFrame<'_>) -> Result<Pointer, PoolError> {
        let mut state = self.state.lock();
        state.next += 1;
        let length = frame.content.len() as u32;
        let pointer = Pointer {
            segment: 1,
            index: state.next,
            offset: 0,
            stored: packed(frame.content) as u32,
            logical: length,
            kind: frame.kind,
            compression: crate::Compression::Off,
            checksum_kind: frame.checksum,
            pin: 0,
            birth: frame.birth,
            checksum: [0; 16],
        };
        state.frames.insert((1, pointer.index), (frame.content.into(), frame.birth));
        state.charged += pointer.charged();
        let kept = (self.size() / 64).min(1 << 20);
        assert!(state.charged + kept <= self.size(), "more is written than there is room for");
        Ok(pointer)
    }
}

impl Storage for MapStorage {
    fn free(&self, dead: &Dead, _: Txg) -> Result<(), PoolError> {
        let mut state = self.state.lock();
        assert!(state.frames.contains_key(&(dead.segment, dead.index)), "a frame is freed that is not there");
        assert!(!state.freed.contains(&(dead.segment, dead.index)), "a frame is freed twice");
        state.freed.push((dead.segment, dead.index));
        Ok(())
    }

    fn commit(&self, txg: Txg, catalog: Option<Pointer>, log: log::Start, _: u64) -> Result<(), PoolError> {
        if let Some(suspended) = self.suspended() {
            return Err(suspended);
        }
        let mut state = self.state.lock();
        (state.durable, state.log) = ((txg, catalog), log);
        for name in std::mem::take(&mut state.freed) {
            let (content, _) = state.frames.remove(&name).unwrap();
            state.charged -= charged(&content);
        }
        Ok(())
    }

    fn size(&self) -> u64 {
        match self.size.load(Ordering::Relaxed) {
            0 => 1 << 40,
            size => size,
        }
    }

    fn room(&self, purpose: crate::space::Purpose) -> u64 {
        crate::space::usable(self.size(), purpose).saturating_sub(self.stored())
    }

    fn opened(&self) -> Result<(), PoolError> {
        Ok(())
    }

    fn expand(&self, _: u64) -> bool {
        let growth = self.growth.swap(0, Ordering::Relaxed);
        self.size.fetch_add(growth, Ordering::Relaxed);
        growth > 0
    }

    fn keep_unwritten(&self, _: bool) {}

    fn held_unwritten(&self) -> u64 {
        0
    }

    fn suspended(&self) -> Option<PoolError> {
        self.suspended.lock().clone()
    }

    fn suspend(&self, error: &PoolError) -> PoolError {
        self.suspended.lock().get_or_insert_with(|| error.clone()).clone()
    }

    fn largest_frame(&self) -> u64 {
        16 << 20
    }

    fn hashing(&self) -> keys::Hashing {
        keys::Hashing::default()
    }

    /// A map has no labels that other programs could read.
    fn allow_folding(&self, _: u64) -> Result<(), PoolError> {
        Ok(())
    }

    fn is_sealed(&self) -> bool {
        false
    }

    fn room_before_cleaning(&self) -> u64 {
        match self.before_cleaning.load(Ordering::Relaxed) {
            0 => u64::MAX,
            room => room,
        }
    }

    /// A map needs no maintenance.
    fn tend(&self, _: u64) -> Result<Work, PoolError> {
        Ok(Work::None)
    }
}

impl MapStorage {
    /// Bytes that its frames are charged.
    fn stored(&self) -> u64 {
        self.state.lock().charged
    }
}

fn config(storage: &Arc<MapStorage>) -> PoolConfig {
    let (ticks, random) = (AtomicI64::new(1), AtomicU64::new(1));
    PoolConfig {
        storage: Arc::clone(storage) as Arc<dyn Storage>,
        clock: Arc::new(move || Timestamp { seconds: ticks.fetch_add(1, Ordering::Relaxed), nanoseconds: 0 }),
        entropy: Arc::new(move || random.fetch_add(0x9e37_79b9, Ordering::Relaxed)),
        cache: 16 << 20,
        log: None,
        kept: None,
    }
}

/// The durable state after a crash: frames that no commit references are gone.
fn crash(storage: &MapStorage) -> Durable {
    let mut state = storage.state.lock();
    let (txg, catalog) = state.durable;
    state.frames.retain(|_, (_, birth)| *birth <= txg);
    state.charged = state.frames.values().map(|(content, _)| charged(content)).sum();
    state.freed.clear();
    Durable { txg, catalog: catalog.unwrap(), log: state.log }
}

fn reopen(storage: &Arc<MapStorage>) -> Pool {
    Pool::open(config(storage), &Durable { log: log::Start::default(), ..crash(storage) }).unwrap()
}

fn put(dataset: &Dataset, name: &str, content: &[u8]) {
    let files = dataset.files();
    let root = files.root();
    let file = match files.look_up(&root, name.as_bytes()) {
        Ok((file, _)) => file,
        Err(_) => make(dataset, &root, name, FileType::Regular),
    };
    let size = crate::files::AttributeChange { size: Some(0), ..Default::default() };
    files.set_attributes(&file, &size).unwrap();
    files.write(&file, Some(0), content).unwrap();
}

fn make(dataset: &Dataset, directory: &Inode, name: &str, file_type: FileType) -> Arc<Inode> {
    let new = |parent: &ParentView| {
        Ok(NewInode {
            row: InodeRow::new(file_type, 0o644, parent.now),
            target: None,
            attributes: vec![(b"user.x".to_vec(), vec![3; 5000])],
        })
    };
    dataset.files().make(directory, name.as_bytes(), b"", &new).unwrap().0
}

type Tree = BTreeMap<String, Vec<u8>>;

fn contents<T: crate::files::Table>(files: &crate::files::Files<T>) -> Tree {
    let root = files.root();
    let listed = files.list(&root, 0, true, usize::MAX).unwrap();
    let read = listed.into_iter().map(|entry| {
        let (inode, row) = entry.file.unwrap();
        let mut content = vec![0; row.size as usize];
        assert_eq!(files.read(&inode, 0, &mut content).unwrap(), content.len());
        (String::from_utf8(entry.name).unwrap(), content)
    });
    read.collect()
}

/// Collects everything that a root reaches: frames by name; a frame shared by a row also by that
/// row and its birth.
#[derive(Default)]
struct Reached(HashMap<Name, u64>);

type Name = (u32, u32, Txg, Vec<u8>);

impl Reached {
    fn note(&mut self, pointer: &Pointer) {
        self.0.insert((pointer.segment, pointer.index, Txg(0), Vec::new()), pointer.charged());
    }

    /// As above, where rows that share a frame belong to the file system in which the sharing
    /// began: a clone may share the same frame at the same moment.
    fn of(self, id: u64, origins: &HashMap<u64, (u64, Txg)>) -> HashMap<Name, u64> {
        let one = |((segment, index, since, mut key), charged): (Name, u64)| {
            if since != Txg(0) {
                let mut of = id;
                while let Some((from, _)) = origins.get(&of).filter(|(_, txg)| since <= *txg) {
                    of = *from;
                }
                key.extend(of.to_be_bytes());
            }
            ((segment, index, since, key), charged)
        };
        self.0.into_iter().map(one).collect()
    }

    fn names(&self) -> BTreeMap<(u32, u32), u64> {
        self.0.iter().map(|((segment, index, ..), charged)| ((*segment, *index), *charged)).collect()
    }
}

impl Visitor for Reached {
    fn frame(&mut self, pointer: &Pointer) -> Result<bool, PoolError> {
        self.note(pointer);
        Ok(true)
    }

    fn row(&mut self, key: &[u8], value: &[u8]) -> Result<(), PoolError> {
        if key.first() == Some(&keys::EXTENT)
            && let Some(dead) = Extent::decode(value)?.dead()
        {
            let shared = if dead.shared { (dead.birth, key.to_vec()) } else { (Txg(0), Vec::new()) };
            self.0.insert((dead.segment, dead.index, shared.0, shared.1), dead.charged);
        }
        if key.first() == Some(&keys::PATCH) {
            self.note(&crate::rows::Patch::decode(value)?.pointer);
        }
        if key.first() == Some(&keys::XATTR)
            && let Xattr::Frame(pointer) = Xattr::decode(value)?
        {
            self.note(&pointer);
        }
        Ok(())
    }
}

struct CatalogFrames(Reached);

impl Visitor for CatalogFrames {
    fn frame(&mut self, pointer: &Pointer) -> Result<bool, PoolError> {
        self.0.note(pointer);
        Ok(true)
    }

    fn row(&mut self, _: &[u8], _: &[u8]) -> Result<(), PoolError> {
        Ok(())
    }
}

/// Asserts that the usage of each owner is the sum of what the owner's inodes are charged.
fn check_owners(context: Context<'_>, root: Option<Pointer>) {
    let mut sums: BTreeMap<(OwnerKind, u32), OwnerUse> = BTreeMap::new();
    let mut uses = sums.clone();
    let view = Rows::open(root, 0, Settings::default()).view();
    let mut cursor = view.cursor(context, &[], None).unwrap();
    while let Some((key, value)) = cursor.next().unwrap() {
        match keys::Key::decode(key).unwrap() {
            keys::Key::Inode(_) => {
                let (row, rows) = InodeRow::decode_charged(value).unwrap();
                for owner in [(OwnerKind::User, row.uid), (OwnerKind::Group, row.gid)] {
                    let sum = sums.entry(owner).or_default();
                    sum.bytes += row.charged + rows;
                    sum.objects += 1;
                }
            }
            keys::Key::OwnerUse(kind, id) => {
                uses.insert((kind, id), OwnerUse::decode(value).unwrap());
            }
            _ => {}
        }
    }
    assert_eq!(uses, sums, "what owners use");
}

/// Asserts after a commit that the frames in the store are exactly those that the catalog, live
/// datasets, snapshots and the list of frames to free reach, and that every live dataset is charged
/// for what it reaches.
fn check(pool: &Pool, storage: &MapStorage) {
    for _ in 0..3 {
        pool.commit().unwrap();
    }
    while pool.is_freeing() {
        pool.commit().unwrap();
    }
    let root = storage.state.lock().durable.1.unwrap();
    let context = Context { frames: &*pool.frames, cache: &pool.cache };
    let mut catalog = CatalogFrames(Reached::default());
    walk(&context, &root, Txg(0), &mut catalog).unwrap();
    let mut admin = pool.admin.lock();
    let mut all = Reached::default();
    let mut used = 0;
    let datasets = admin.catalog.datasets().unwrap();
    let origins: HashMap<u64, (u64, Txg)> = datasets.iter().filter_map(|(id, row)| Some((*id, row.origin?))).collect();
    for (id, row) in datasets {
        let mut head = Reached::default();
        row.root.iter().for_each(|root| walk(&context, root, Txg(0), &mut head).unwrap());
        check_owners(context, row.root);
        assert_eq!(row.usage.referenced, head.0.values().sum::<u64>(), "referenced by {id}");
        let (history, own) = admin.catalog.history_of(id).unwrap();
        assert_eq!(row.usage, admin.catalog.deadlists().usage(&history, own).unwrap(), "usage of {id}");
        assert_eq!(row.usage, admin.quota_tree().usage(id).unwrap());
        used += row.usage.dataset + row.usage.snapshots;
        all.0.extend(head.of(id, &origins));
        for (txg, snapshot) in admin.catalog.snapshots(id).unwrap() {
            let mut held = Reached::default();
            snapshot.root.iter().for_each(|root| walk(&context, root, Txg(0), &mut held).unwrap());
            assert_eq!(snapshot.referenced, held.0.values().sum::<u64>(), "referenced by {id} at {txg}");
            all.0.extend(held.of(id, &origins));
        }
    }
    assert_eq!(used, all.0.values().sum::<u64>(), "what all datasets are charged");
    let top = admin.catalog.head().unwrap().root;
    assert_eq!(admin.quota_tree().breakdown(top).unwrap().used, used);
    let once = all.names().values().sum::<u64>();
    assert_eq!(admin.quota_tree().saved(), used - once, "what sharing saves");
    all.0.extend(catalog.0.0);
    let stored: BTreeSet<_> = storage.state.lock().frames.keys().copied().collect();
    let reached: BTreeSet<_> = all.names().into_keys().collect();
    assert_eq!(stored, reached);
}

#[test]
fn what_is_committed_is_there_after_reopening() {
    let storage = Arc::new(MapStorage::default());
    let pool = Pool::create(config(&storage), "tank").unwrap();
    let id = pool.find("tank").unwrap().unwrap();
    let home = pool.create_dataset(&NewDataset::named(id, "home")).unwrap();
    assert!(matches!(pool.create_dataset(&NewDataset::named(id, "home")), Err(PoolError::Refused(_))));
    put(&pool.dataset(home).unwrap(), "a", &[1; 300_000]);
    pool.commit().unwrap();
    put(&pool.dataset(home).unwrap(), "b", b"lost with the crash");
    check(&reopen(&storage), &storage);
    let pool = reopen(&storage);
    assert_eq!(pool.find("tank/home").unwrap(), Some(home));
    assert_eq!(pool.find("tank/none").unwrap(), None);
    assert_eq!(pool.find("home").unwrap(), None);
    let all = contents(pool.dataset(home).unwrap().files());
    assert_eq!(all, Tree::from([("a".to_owned(), vec![1; 300_000])]));
}

#[test]
fn clones_are_promoted_and_origins_destroyed() {
    let storage = Arc::new(MapStorage::default());
    let pool = Pool::create(config(&storage), "tank").unwrap();
    let top = pool.find("tank").unwrap().unwrap();
    let new = |name: &str| NewDataset::named(top, name);
    let a = pool.create_dataset(&new("a")).unwrap();
    put(&pool.dataset(a).unwrap(), "f", &[1; 200_000]);
    pool.snapshot(&[(a, "one".to_owned())]).unwrap();
    put(&pool.dataset(a).unwrap(), "f", &[2; 300_000]);
    pool.snapshot(&[(a, "two".to_owned())]).unwrap();
    put(&pool.dataset(a).unwrap(), "f", &[3; 100_000]);
    let b = pool.clone_snapshot(a, "one", &new("b")).unwrap();
    put(&pool.dataset(b).unwrap(), "g", &[4; 150_000]);
    check(&pool, &storage);
    assert!(matches!(pool.destroy_snapshot(a, "one", false), Err(PoolError::Refused(_))));
    pool.promote(b).unwrap();
    check(&pool, &storage);
    assert_eq!(pool.snapshots(b).unwrap().len(), 1);
    assert_eq!(pool.snapshots(a).unwrap().len(), 1);
    assert!(matches!(pool.promote(b), Err(PoolError::Refused(_))));
    pool.destroy_snapshot(a, "two", false).unwrap();
    pool.destroy_dataset(a).unwrap();
    check(&pool, &storage);
    pool.hold(b, "one", "keep", true).unwrap();
    assert!(matches!(pool.destroy_snapshot(b, "one", false), Err(PoolError::Refused(_))));
    pool.destroy_snapshot(b, "one", true).unwrap();
    assert_eq!(pool.snapshots(b).unwrap().len(), 1);
    pool.bookmark(b, "one", "mark").unwrap();
    pool.hold(b, "one", "keep", false).unwrap();
    assert!(pool.snapshots(b).unwrap().is_empty());
    check(&pool, &storage);
    let pool = reopen(&storage);
    let all = contents(pool.dataset(b).unwrap().files());
    assert_eq!(all, Tree::from([("f".to_owned(), vec![1; 200_000]), ("g".to_owned(), vec![4; 150_000])]));
    check(&pool, &storage);
}

#[derive(Clone, Debug)]
enum Step {
    Put(u8, u8, u32),
    Write(u8, u8, u32, u16),
    Remove(u8, u8),
    Rename(u8, u8, u8),
    Share(u8, u8, u8),
    Commit,
    Snapshot(u8),
    Destroy(u8, u8, bool),
    RollBack(u8),
    Clone(u8, u8),
    Promote(u8),
    DestroyDataset(u8),
    Reopen,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let one = prop_oneof![
        8 => (any::<u8>(), 0u8..8, 0u32..400_000).prop_map(|(a, b, c)| Step::Put(a, b, c)),
        8 => (any::<u8>(), 0u8..8, 0u32..400_000, 1u16..9000).prop_map(|(a, b, c, d)| Step::Write(a, b, c, d)),
        2 => (any::<u8>(), 0u8..8).prop_map(|(a, b)| Step::Remove(a, b)),
        1 => (any::<u8>(), 0u8..8, 0u8..8).prop_map(|(a, b, c)| Step::Rename(a, b, c)),
        4 => (any::<u8>(), 0u8..8, 0u8..8).prop_map(|(a, b, c)| Step::Share(a, b, c)),
        2 => Just(Step::Commit),
        4 => any::<u8>().prop_map(Step::Snapshot),
        3 => (any::<u8>(), any::<u8>(), any::<bool>()).prop_map(|(a, b, c)| Step::Destroy(a, b, c)),
        2 => any::<u8>().prop_map(Step::RollBack),
        2 => (any::<u8>(), any::<u8>()).prop_map(|(a, b)| Step::Clone(a, b)),
        2 => any::<u8>().prop_map(Step::Promote),
        1 => any::<u8>().prop_map(Step::DestroyDataset),
        1 => Just(Step::Reopen),
    ];
    proptest::collection::vec(one, 1..60)
}

/// Expected content of each dataset and snapshot.
#[derive(Default)]
struct Model {
    live: BTreeMap<u64, Tree>,
    /// By the txg, which is unique in a line: dataset now, name, content.
    snapshots: BTreeMap<(u64, Txg), (String, Tree)>,
    named: u32,
}

impl Model {
    fn pick(&self, by: u8) -> u64 {
        *self.live.keys().nth(by as usize % self.live.len()).unwrap()
    }

    fn snapshot_of(&self, id: u64, by: u8) -> Option<(Txg, String)> {
        let of: Vec<_> = self.snapshots.iter().filter(|((of, _), _)| *of == id).collect();
        of.get(by as usize % of.len().max(1)).map(|((_, txg), (name, _))| (*txg, name.clone()))
    }
}

fn run(pool: &mut Pool, storage: &Arc<MapStorage>, model: &mut Model, step: &Step) {
    match *step {
        Step::Put(d, n, length) => {
            let id = model.pick(d);
            let content: Vec<u8> = (0..length).map(|at| (at / 1000) as u8 ^ n | 1).collect();
            put(&pool.dataset(id).unwrap(), &format!("f{n}"), &content);
            model.live.get_mut(&id).unwrap().insert(format!("f{n}"), content);
        }
        Step::Write(d, n, offset, length) => {
            let id = model.pick(d);
            let Some(content) = model.live.get_mut(&id).unwrap().get_mut(&format!("f{n}")) else { return };
            let (from, part) = (offset as usize % (content.len() + 1), vec![n ^ length as u8 | 1; length as usize]);
            let dataset = pool.dataset(id).unwrap();
            let (file, _) = dataset.files().look_up(&dataset.files().root(), format!("f{n}").as_bytes()).unwrap();
            dataset.files().write(&file, Some(from as u64), &part).unwrap();
            content.resize(content.len().max(from + part.len()), 0);
            content[from..from + part.len()].copy_from_slice(&part);
        }
        Step::Remove(d, n) => {
            let id = model.pick(d);
            let dataset = pool.dataset(id).unwrap();
            let done = dataset.files().unlink(&dataset.files().root(), format!("f{n}").as_bytes());
            assert_eq!(done.is_ok(), model.live.get_mut(&id).unwrap().remove(&format!("f{n}")).is_some());
        }
        Step::Rename(d, a, b) => {
            let id = model.pick(d);
            let dataset = pool.dataset(id).unwrap();
            let root = dataset.files().root();
            let (a, b) = (format!("f{a}"), format!("f{b}"));
            let done = dataset.files().rename((&root, a.as_bytes()), (&root, b.as_bytes()), MayReplace::Yes);
            let tree = model.live.get_mut(&id).unwrap();
            assert_eq!(done.is_ok(), tree.contains_key(&a));
            if a != b
                && let Some(content) = tree.remove(&a)
            {
                tree.insert(b, content);
            }
        }
        Step::Share(d, a, b) => {
            share(&pool.dataset(model.pick(d)).unwrap(), model.live.get_mut(&model.pick(d)).unwrap(), a, b)
        }
        Step::Commit => {
            pool.commit().unwrap();
        }
        Step::Snapshot(d) => {
            let id = model.pick(d);
            model.named += 1;
            let name = format!("s{}", model.named);
            let txg = pool.snapshot(&[(id, name.clone())]).unwrap();
            let tree = model.live[&id].clone();
            model.snapshots.insert((id, txg), (name, tree));
        }
        Step::Destroy(d, s, deferred) => {
            let id = model.pick(d);
            let Some((txg, name)) = model.snapshot_of(id, s) else { return };
            let done = pool.destroy_snapshot(id, &name, deferred);
            let there = pool.snapshots(id).unwrap().into_iter().any(|(there, ..)| there == txg);
            assert_eq!(done.is_ok(), deferred || !there, "{done:?}");
            if !there {
                model.snapshots.remove(&(id, txg));
            }
        }
        Step::RollBack(d) => {
            let id = model.pick(d);
            let newest = pool.snapshots(id).unwrap().last().map(|(txg, row, _)| (*txg, row.name.clone()));
            let Some((txg, name)) = newest else { return };
            pool.roll_back(id, &name).unwrap();
            let tree = model.snapshots[&(id, txg)].1.clone();
            model.live.insert(id, tree);
        }
        Step::Clone(d, s) => {
            let id = model.pick(d);
            let Some((txg, name)) = model.snapshot_of(id, s) else { return };
            model.named += 1;
            let top = pool.find("tank").unwrap().unwrap();
            let new = NewDataset::named(top, &format!("c{}", model.named));
            let clone = pool.clone_snapshot(id, &name, &new).unwrap();
            let tree = model.snapshots[&(id, txg)].1.clone();
            model.live.insert(clone, tree);
        }
        Step::Promote(d) => {
            let id = model.pick(d);
            let before = pool.admin.lock().catalog.dataset(id).unwrap().origin;
            assert_eq!(pool.promote(id).is_ok(), before.is_some());
            if let Some((from, origin)) = before {
                let moved: Vec<_> =
                    model.snapshots.keys().filter(|(of, txg)| *of == from && *txg <= origin).copied().collect();
                for (of, txg) in moved {
                    let snapshot = model.snapshots.remove(&(of, txg)).unwrap();
                    model.snapshots.insert((id, txg), snapshot);
                }
            }
        }
        Step::DestroyDataset(d) => {
            let id = model.pick(d);
            let origin = pool.admin.lock().catalog.dataset(id).unwrap().origin;
            if pool.destroy_dataset(id).is_ok() {
                model.live.remove(&id);
                assert!(!model.snapshots.keys().any(|(of, _)| *of == id));
                // A snapshot whose destruction was deferred until its last clone is gone now.
                if let Some((from, txg)) = origin
                    && !pool.snapshots(from).unwrap().iter().any(|(there, ..)| *there == txg)
                {
                    model.snapshots.remove(&(from, txg));
                }
            }
        }
        Step::Reopen => {
            pool.commit().unwrap();
            *pool = reopen(storage);
        }
    }
}

#[test]
fn a_clone_may_share_the_same_at_the_same_moment() {
    let storage = Arc::new(MapStorage::default());
    let mut pool = Pool::create(config(&storage), "tank").unwrap();
    let mut model = Model::default();
    model.live.insert(pool.find("tank").unwrap().unwrap(), Tree::new());
    for step in
        [Step::Put(0, 2, 2049), Step::Snapshot(0), Step::Clone(0, 0), Step::Share(1, 2, 3), Step::Share(0, 2, 3)]
    {
        run(&mut pool, &storage, &mut model, &step);
    }
    check(&pool, &storage);
}

/// Makes a file that shares the records of another one; records that cannot be shared are copied.
fn share(dataset: &Dataset, tree: &mut Tree, a: u8, b: u8) {
    let (a, b) = (format!("f{a}"), format!("f{b}"));
    let Some(content) = tree.get(&a).cloned().filter(|_| a != b) else { return };
    put(dataset, &b, b"");
    let files = dataset.files();
    let (from, _) = files.look_up(&files.root(), a.as_bytes()).unwrap();
    let (to, _) = files.look_up(&files.root(), b.as_bytes()).unwrap();
    let mut done = 0;
    while done < content.len() {
        let range = crate::files::Range { from: done as u64, to: done as u64, length: (content.len() - done) as u64 };
        let shared = files.share(&from, &to, range).unwrap() as usize;
        // Patches belong to one file: such records are copied.
        let patched = files.attributes(&from).unwrap().flags & crate::rows::inode::flags::HAS_PATCHES != 0;
        assert!(shared > 0 || patched, "a whole file is shared");
        let until =
            files.until_sharing(&from, &to, range).unwrap().map_or(content.len(), |until| done + until as usize);
        let end = if shared > 0 { done + shared } else { until.min(content.len()) };
        if shared == 0 {
            files.write(&to, Some(done as u64), &content[done..end]).unwrap();
        }
        done = end;
    }
    tree.insert(b, content);
}

fn compare(pool: &Pool, model: &Model) {
    for (id, expected) in &model.live {
        assert!(contents(pool.dataset(*id).unwrap().files()) == *expected, "content of {id}");
    }
    for ((id, txg), (name, expected)) in &model.snapshots {
        let root = pool.admin.lock().catalog.snapshot(*id, *txg).unwrap().root;
        let then = Dataset::open(pool, *id, root).unwrap();
        assert!(contents(then.files()) == *expected, "content of {id}@{name}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]
    #[test]
    fn random_histories_as_the_model(steps in steps()) {
        let storage = Arc::new(MapStorage::default());
        let mut pool = Pool::create(config(&storage), "tank").unwrap();
        let top = pool.find("tank").unwrap().unwrap();
        let first = pool.create_dataset(&NewDataset::named(top, "first")).unwrap();
        let mut model = Model::default();
        model.live.insert(first, Tree::default());
        for step in &steps {
            if model.live.is_empty() {
                break;
            }
            run(&mut pool, &storage, &mut model, step);
        }
        compare(&pool, &model);
        check(&pool, &storage);
        let pool = reopen(&storage);
        compare(&pool, &model);
        check(&pool, &storage);
    }
}

/// A pool on a device with simulated crashes.
fn on_device(device: &Arc<crate::device::Simulator>, fresh: bool) -> Pool {
    use crate::device::Device;
    use crate::store::{Access, Import, NewPool, Store};
    let devices = vec![Arc::clone(device) as Arc<dyn Device>];
    let host = (1, "here".to_owned());
    let (store, root) = if fresh {
        Store::create(devices, &NewPool { name: "tank".to_owned(), guid: 7, host, time: 1, redundant_metadata: true })
            .unwrap()
    } else {
        Store::open(devices, &Import { access: Access::ReadWrite, name: None, host, time: 2 }).unwrap()
    };
    let store = Arc::new(store);
    let empty = Arc::new(MapStorage::default());
    let config = PoolConfig { log: Some(store.log().unwrap()), storage: store, ..config(&empty) };
    match root.catalog {
        None => Pool::create(config, "tank").unwrap(),
        Some(catalog) => Pool::open(config, &Durable { txg: root.txg, catalog, log: root.log_start.into() }).unwrap(),
    }
}

#[test]
fn an_fsync_while_a_commit_is_under_way_waits_for_what_that_has_taken() {
    let device = Arc::new(crate::device::Simulator::new("disk", 128 << 20));
    let pool = on_device(&device, true);
    let id = pool.find("tank").unwrap().unwrap();
    let dataset = pool.dataset(id).unwrap();
    for (name, length) in [("inline", 100), ("frame", 5000)] {
        put(&dataset, name, b"before");
        // The file itself, with an attribute that no record can hold.
        pool.commit().unwrap();
        put(&dataset, name, &vec![7; length]);
        // The first step of a commit: the content goes into the table, of which nothing is durable
        // yet.
        let entered = pool.gate.enter();
        dataset.files().flush(entered.txg()).unwrap();
        drop(entered);
        let (inode, _) = dataset.files().look_up(&dataset.files().root(), name.as_bytes()).unwrap();
        pool.sync_file(&dataset, &inode).unwrap();
    }
    drop((dataset, pool));
    device.crash(5);
    let pool = on_device(&device, false);
    let now = contents(pool.dataset(id).unwrap().files());
    assert_eq!(now, Tree::from([("frame".to_owned(), vec![7; 5000]), ("inline".to_owned(), vec![7; 100])]));
}

#[test]
fn what_is_done_to_a_synced_file_takes_nothing_away_from_it() {
    for length in [100, 3000, 70_000] {
        let device = Arc::new(crate::device::Simulator::new("disk", 128 << 20));
        let pool = on_device(&device, true);
        let id = pool.find("tank").unwrap().unwrap();
        let dataset = pool.dataset(id).unwrap();
        let files = dataset.files();
        let root = files.root();
        let find = |name: &[u8]| files.look_up(&root, name).unwrap().0;
        // Each begins as an empty file, committed or not.
        for (name, commits) in [("new", false), ("old", true), ("cut", true)] {
            put(&dataset, name, b"");
            if commits {
                pool.commit().unwrap();
            }
            let inode = find(name.as_bytes());
            files.write(&inode, Some(0), &vec![7; length]).unwrap();
            pool.sync_file(&dataset, &inode).unwrap();
        }
        // Later changes by a kernel or a user: a new name, other times, an unsynced append. Only
        // the names are synced.
        files.rename((&root, b"new"), (&root, b"renamed"), MayReplace::Yes).unwrap();
        let times =
            crate::files::AttributeChange { modified: Some(crate::files::TimeChange::Now), ..Default::default() };
        files.set_attributes(&find(b"old"), &times).unwrap();
        files.write(&find(b"old"), None, b"unsynced").unwrap();
        files.set_attributes(&find(b"old"), &times).unwrap();
        // Longer without content, which is synced.
        let longer = crate::files::AttributeChange { size: Some(200_000), ..Default::default() };
        files.set_attributes(&find(b"cut"), &longer).unwrap();
        pool.sync_file(&dataset, &find(b"cut")).unwrap();
        pool.sync_names().unwrap();
        drop((root, dataset, pool));
        device.crash(5);
        let pool = on_device(&device, false);
        let mut now = contents(pool.dataset(id).unwrap().files());
        let mut cut = vec![7; length];
        cut.resize(200_000, 0);
        assert!(now.remove("cut").unwrap() == cut);
        for content in now.values_mut() {
            content.truncate(length);
        }
        assert_eq!(
            now,
            Tree::from([("renamed".to_owned(), vec![7; length]), ("old".to_owned(), vec![7; length])]),
            "{length}"
        );
    }
}

#[test]
fn what_takes_the_place_of_a_file_comes_with_its_content() {
    for length in [0, 100, 3000, 70_000, 400_000] {
        let device = Arc::new(crate::device::Simulator::new("disk", 128 << 20));
        let pool = on_device(&device, true);
        let id = pool.find("tank").unwrap().unwrap();
        let dataset = pool.dataset(id).unwrap();
        let files = dataset.files();
        let root = files.root();
        put(&dataset, "settings", b"before");
        put(&dataset, "other", b"before");
        pool.commit().unwrap();
        // No fsync of it.
        put(&dataset, "settings.new", &vec![7; length]);
        files.rename((&root, b"settings.new"), (&root, b"settings"), MayReplace::Yes).unwrap();
        put(&dataset, "other", b"after");
        pool.sync_file(&dataset, &files.look_up(&root, b"other").unwrap().0).unwrap();
        drop((root, dataset, pool));
        device.crash(5);
        let pool = on_device(&device, false);
        let now = contents(pool.dataset(id).unwrap().files());
        let wanted = [("other".to_owned(), b"after".to_vec()), ("settings".to_owned(), vec![7; length])];
        assert!(now == Tree::from(wanted), "{length}");
    }
}

#[derive(Clone, Debug)]
enum Op {
    Put(u8, u32),
    Append(u8, u16),
    Share(u8, u8),
    Cut(u8, u16),
    Zero(u8, u16, u16),
    Rename(u8, u8),
    Remove(u8),
    Attribute(u8, u16),
    Sync(u8),
    Commit,
    Crash(u64),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let one = prop_oneof![
        4 => (0u8..5, 0u32..200_000).prop_map(|(a, b)| Op::Put(a, b)),
        6 => (0u8..5, any::<u16>()).prop_map(|(a, b)| Op::Append(a, b)),
        2 => (0u8..5, 0u8..5).prop_map(|(a, b)| Op::Share(a, b)),
        2 => (0u8..5, any::<u16>()).prop_map(|(a, b)| Op::Cut(a, b)),
        2 => (0u8..5, any::<u16>(), any::<u16>()).prop_map(|(a, b, c)| Op::Zero(a, b, c)),
        2 => (0u8..5, 0u8..5).prop_map(|(a, b)| Op::Rename(a, b)),
        2 => (0u8..5).prop_map(Op::Remove),
        2 => (0u8..5, 0u16..9000).prop_map(|(a, b)| Op::Attribute(a, b)),
        8 => (0u8..5).prop_map(Op::Sync),
        1 => Just(Op::Commit),
        3 => any::<u64>().prop_map(Op::Crash),
    ];
    proptest::collection::vec(one, 1..50)
}

/// Contents of files, and the files whose state an fsync has made durable.
#[derive(Default)]
struct Promises {
    live: Tree,
    kept: Tree,
}

fn operate(pool: &Pool, id: u64, promises: &mut Promises, op: &Op) {
    let dataset = pool.dataset(id).unwrap();
    let files = dataset.files();
    let root = files.root();
    let name = |n: u8| format!("f{n}");
    let find = |n: u8| files.look_up(&root, name(n).as_bytes()).ok().map(|(inode, _)| inode);
    match *op {
        Op::Put(n, length) => {
            let content: Vec<u8> = (0..length).map(|at| (at / 500) as u8 | 1).collect();
            put(&dataset, &name(n), &content);
            promises.kept.remove(&name(n));
            promises.live.insert(name(n), content);
        }
        Op::Share(a, b) => {
            if a != b && promises.live.contains_key(&name(a)) {
                promises.kept.remove(&name(b));
                share(&dataset, &mut promises.live, a, b);
            }
        }
        Op::Append(n, length) => {
            let (Some(inode), Some(content)) = (find(n), promises.live.get_mut(&name(n))) else { return };
            let more = vec![n + 1; length.into()];
            files.write(&inode, None, &more).unwrap();
            content.extend(more);
            if length > 0 {
                promises.kept.remove(&name(n));
            }
        }
        Op::Cut(n, size) => {
            let (Some(inode), Some(content)) = (find(n), promises.live.get_mut(&name(n))) else { return };
            let change = crate::files::AttributeChange { size: Some(size.into()), ..Default::default() };
            files.set_attributes(&inode, &change).unwrap();
            content.resize(size.into(), 0);
            promises.kept.remove(&name(n));
        }
        Op::Zero(n, offset, length) => {
            let (Some(inode), Some(content)) = (find(n), promises.live.get_mut(&name(n))) else { return };
            files.zero(&inode, offset.into(), length.into(), false).unwrap();
            let end = content.len().min(usize::from(offset) + usize::from(length));
            content.get_mut(offset.into()..end).iter_mut().for_each(|part| part.fill(0));
            promises.kept.remove(&name(n));
        }
        Op::Rename(a, b) => {
            let done = files.rename((&root, name(a).as_bytes()), (&root, name(b).as_bytes()), MayReplace::Yes);
            assert_eq!(done.is_ok(), promises.live.contains_key(&name(a)));
            if a != b
                && let Some(content) = promises.live.remove(&name(a))
            {
                promises.kept.remove(&name(a));
                promises.kept.remove(&name(b));
                promises.live.insert(name(b), content);
            }
        }
        Op::Remove(n) => {
            let done = files.unlink(&root, name(n).as_bytes());
            assert_eq!(done.is_ok(), promises.live.remove(&name(n)).is_some());
            promises.kept.remove(&name(n));
        }
        Op::Attribute(n, length) => {
            let Some(inode) = find(n) else { return };
            files.set_attribute(&inode, b"user.y", &vec![5; length.into()], None, None).unwrap();
        }
        Op::Sync(n) => {
            let Some(inode) = find(n) else { return };
            pool.sync_file(&dataset, &inode).unwrap();
            promises.kept.insert(name(n), promises.live[&name(n)].clone());
        }
        Op::Commit => {
            pool.commit().unwrap();
            promises.kept = promises.live.clone();
        }
        Op::Crash(_) => {}
    }
}

/// Asserts that every live dataset is charged for what it reaches, also after a replay.
fn check_charges(pool: &Pool) {
    pool.commit().unwrap();
    let context = Context { frames: &*pool.frames, cache: &pool.cache };
    let admin = pool.admin.lock();
    for (id, row) in admin.catalog.datasets().unwrap() {
        let mut head = Reached::default();
        row.root.iter().for_each(|root| walk(&context, root, Txg(0), &mut head).unwrap());
        assert_eq!(row.usage.referenced, head.0.values().sum::<u64>(), "referenced by {id}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]
    #[test]
    fn what_was_synced_survives_every_crash(ops in ops()) {
        let device = Arc::new(crate::device::Simulator::new("disk", 128 << 20));
        let mut pool = on_device(&device, true);
        let id = pool.find("tank").unwrap().unwrap();
        let mut promises = Promises::default();
        for op in ops.iter().chain(&[Op::Crash(99)]) {
            operate(&pool, id, &mut promises, op);
            if let Op::Crash(seed) = op {
                drop(pool);
                device.crash(*seed);
                pool = on_device(&device, false);
                let now = contents(pool.dataset(id).unwrap().files());
                for (name, content) in &promises.kept {
                    prop_assert!(now.get(name) == Some(content), "{} was synced", name);
                }
                check_charges(&pool);
                promises = Promises { kept: now.clone(), live: now };
            }
        }
    }
}
