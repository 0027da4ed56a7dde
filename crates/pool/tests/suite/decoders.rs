//! Every decoder of the format on what a real pool holds, changed a little: a value that survives
//! being written again, or an error; never a panic, never a loop, never memory for what is not
//! there.
//!
//! What goes through whole pools is in `forged.rs` and `forged_labels.rs`; here it is millions of
//! inputs, without checksums before them. `NACRE_POOL_TRIALS` is the number of inputs,
//! `NACRE_POOL_SEED` another beginning.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::sync::{Arc, Mutex};

use crate::crash_model::World;
use crate::pools::gentle::Watchdog;
use crate::pools::{Random, create, number, open};
use nacre_pool::cache::Cache;
use nacre_pool::catalog::rows::{DoomedRow, SharedRow, parts};
use nacre_pool::catalog::{BookmarkRow, DatasetRow, HistoryRow, PoolHead, PropertyRow, SnapshotRow};
use nacre_pool::codec::{Reader, Writer};
use nacre_pool::compress::{compress, decompress};
use nacre_pool::deadlist::decode_chunk;
use nacre_pool::device::Simulator;
use nacre_pool::files::{NewInode, ParentView};
use nacre_pool::frame::Header;
use nacre_pool::label::{Root, SlotAddress};
use nacre_pool::log::{LogChange, LogRecord, Start};
use nacre_pool::rows::{DatasetHead, Entry, Extent, FileType, InodeRow, Key, NameTarget, OwnerUse, Patch, Xattr};
use nacre_pool::segment::pages::{PageTree, TableReader, read_node, write_delta, write_node, write_page};
use nacre_pool::segment::table::{Op, SegmentTable};
use nacre_pool::segment::table_log::{NOT_SAID, UncommittedRun, read_full, read_index, replay_delta};
use nacre_pool::store::Store;
use nacre_pool::tree::walk::{Visitor, walk};
use nacre_pool::tree::{Context, Settings, Tree, View};
use nacre_pool::{CompressionSetting, Frames, NewFrame, Pointer, PoolError, Txg, WriteStream};

/// Rows that a walk over a damaged tree may show before it has to end by an error of the visitor's.
const ROWS_MOST: usize = 200_000;

fn seed() -> u64 {
    number("NACRE_POOL_SEED", 1)
}

fn trials(otherwise: u64) -> u64 {
    number("NACRE_POOL_TRIALS", otherwise)
}

type Row = (Vec<u8>, Vec<u8>);

/// Rows and frames of a walk.
#[derive(Default)]
struct Seen {
    rows: Vec<Row>,
    frames: Vec<Pointer>,
}

impl Visitor for Seen {
    fn frame(&mut self, pointer: &Pointer) -> Result<bool, PoolError> {
        self.frames.push(*pointer);
        Ok(true)
    }

    fn row(&mut self, key: &[u8], value: &[u8]) -> Result<(), PoolError> {
        self.rows.push((key.to_vec(), value.to_vec()));
        if self.rows.len() > ROWS_MOST { Err(PoolError::NoSpace) } else { Ok(()) }
    }

    fn damaged(&mut self, _: &Pointer, _: PoolError) -> Result<(), PoolError> {
        Ok(())
    }
}

/// A pool with some of everything: its store, and the roots of its trees with their datasets'
/// numbers.
struct Planted {
    store: Arc<Store>,
    root: Root,
    trees: Vec<(u64, Pointer)>,
    rows: Vec<Row>,
}

fn planted() -> Planted {
    let mut random = Random(seed());
    let disks = [Arc::new(Simulator::new("disk", 64 << 20))];
    let imported = create(&disks, random.next());
    let mut world = World::new();
    for _ in 0..500 {
        assert!(world.step(&imported, &mut random));
    }
    // What random steps may not have left: trees of several levels, a snapshot that is held.
    let pool = &imported.pool;
    let root = pool.root().unwrap();
    let dataset = pool.dataset(root).unwrap();
    let files = dataset.files();
    for at in 0..4000 {
        let new = |parent: &ParentView| {
            Ok(NewInode {
                row: InodeRow::new(FileType::Regular, 0o644, parent.now),
                target: None,
                attributes: Vec::new(),
            })
        };
        let (file, _) = files.make(&files.root(), format!("one of many {at}").as_bytes(), b"", &new).unwrap();
        files.write(&file, Some(0), &vec![at as u8; at % 150]).unwrap();
    }
    drop(dataset);
    pool.snapshot(&[(root, "held".to_owned())]).unwrap();
    pool.hold(root, "held", "tag", true).unwrap();
    pool.commit().unwrap();
    imported.store.close(true, 5).unwrap();
    drop(imported);
    let imported = open(&disks, 3, nacre_pool::store::Access::ReadOnly).unwrap();
    let store = Arc::clone(&imported.store);
    let root = store.root();
    let catalog = root.catalog.unwrap();
    let cache = Cache::new(8 << 20);
    let ctx = Context { frames: &*store, cache: &cache };
    let mut trees = vec![(0, catalog)];
    let mut seen = Seen::default();
    walk(&ctx, &catalog, Txg(0), &mut seen).unwrap();
    for (key, value) in &seen.rows {
        if key[0] == 0x11 {
            trees.extend(
                DatasetRow::decode(value)
                    .unwrap()
                    .root
                    .map(|tree| (u64::from_be_bytes(key[1..9].try_into().unwrap()), tree)),
            );
        } else if key[0] == 0x14 {
            trees.extend(
                SnapshotRow::decode(value)
                    .unwrap()
                    .root
                    .map(|tree| (u64::from_be_bytes(key[1..9].try_into().unwrap()), tree)),
            );
        }
    }
    for (_, tree) in &trees[1..] {
        walk(&ctx, tree, Txg(0), &mut seen).unwrap();
    }
    Planted { store, root, trees, rows: seen.rows }
}

/// Almost these bytes.
fn mutate(bytes: &mut Vec<u8>, others: &[u8], random: &mut Random) {
    for _ in 0..=random.below(4) {
        if bytes.is_empty() {
            bytes.push(random.next() as u8);
            continue;
        }
        let at = random.below(bytes.len() as u64) as usize;
        match random.below(12) {
            0 | 1 => bytes[at] ^= 1 << random.below(8),
            2 => bytes[at] = 0xff,
            3 => bytes[at] = 0,
            4 => bytes[at] = random.next() as u8,
            5 => bytes.truncate(at),
            6 => bytes.insert(at, random.next() as u8),
            7 => drop(bytes.remove(at)),
            8 => {
                // The largest numbers, as a field or as the beginning of a varint.
                let end = bytes.len().min(at + 1 + random.below(9) as usize);
                bytes[at..end].fill(0xff);
            }
            9 => {
                // A varint of any length.
                let length = random.below(64);
                let mut varint = Writer::default();
                varint.varint(random.next() >> length);
                bytes.splice(at..at + 1, varint.finish());
            }
            10 => {
                // A part of something else.
                let from = random.below(others.len() as u64 + 1) as usize;
                let end = others.len().min(from + random.below(20) as usize);
                bytes.splice(at..at, others[from..end].iter().copied());
            }
            _ => {
                // A part of itself, twice.
                let end = bytes.len().min(at + random.below(30) as usize);
                let part = bytes[at..end].to_vec();
                bytes.splice(at..at, part);
            }
        }
    }
}

/// What was read is the same after it was written again.
#[track_caller]
fn survives<T: PartialEq + Debug>(read: Result<T, PoolError>, again: impl FnOnce(&T) -> Result<T, PoolError>) -> bool {
    let Ok(value) = read else { return false };
    let copy = again(&value).unwrap_or_else(|error| panic!("{value:?} cannot be read again: {error}"));
    assert_eq!(copy, value);
    true
}

/// All decoders of rows; how many took the bytes.
fn all_rows(key: &[u8], value: &[u8]) -> usize {
    let _ = (parts::<1>(key).is_ok(), parts::<3>(key).is_ok());
    [
        Key::decode(key).is_ok_and(|read| read.encode() == key),
        survives(InodeRow::decode(value), |read| InodeRow::decode(&read.encode())),
        Entry::decode(value).is_ok_and(|read| Entry::decode(&read.encode()).unwrap() == read),
        survives(NameTarget::decode(value), |read| NameTarget::decode(&read.encode())),
        Extent::decode(value).is_ok_and(|read| Extent::decode(&read.encode()).unwrap() == read),
        Xattr::decode(value).is_ok_and(|read| Xattr::decode(&read.encode()).unwrap() == read),
        survives(DatasetHead::decode(value), |read| DatasetHead::decode(&read.encode())),
        survives(OwnerUse::decode(value), |read| OwnerUse::decode(&read.encode())),
        survives(Patch::decode(value), |read| Patch::decode(&read.encode())),
        survives(PoolHead::decode(value), |read| PoolHead::decode(&read.encode())),
        survives(DatasetRow::decode(value), |read| DatasetRow::decode(&read.encode())),
        survives(SnapshotRow::decode(value), |read| SnapshotRow::decode(&read.encode())),
        survives(BookmarkRow::decode(value), |read| BookmarkRow::decode(&read.encode())),
        survives(PropertyRow::decode(value), |read| PropertyRow::decode(&read.encode())),
        survives(SharedRow::decode(value), |read| SharedRow::decode(&read.encode())),
        survives(DoomedRow::decode(value), |read| DoomedRow::decode(&read.encode())),
        survives(HistoryRow::decode(value), |read| HistoryRow::decode(&read.encode())),
        decode_chunk(value).is_ok(),
        Pointer::decode(&mut Reader::new(value)).is_ok(),
    ]
    .into_iter()
    .filter(|taken| *taken)
    .count()
}

#[test]
fn rows_a_little_changed_are_rows_or_errors() {
    let planted = planted();
    let mut kinds: BTreeMap<u8, Vec<&Row>> = BTreeMap::new();
    for row in &planted.rows {
        kinds.entry(row.0[0]).or_default().push(row);
    }
    assert!(kinds.len() > 12, "the pool holds few kinds of rows: {:02x?}", kinds.keys());
    for (key, value) in &planted.rows {
        // Some rows are no more than a number.
        assert!(value.len() <= 8 || all_rows(key, value) > 0, "nothing reads {key:02x?}: {value:02x?}");
    }
    let kinds: Vec<Vec<&Row>> = kinds.into_values().collect();
    let watchdog = Watchdog::start();
    let mut random = Random(seed() ^ 0xdec0de);
    let (mut taken, mut refused) = (0u64, 0u64);
    for trial in 0..trials(20_000) {
        let of_kind = random.pick(&kinds).unwrap();
        let (key, value) = *random.pick(of_kind).unwrap();
        let (_, other) = random.pick(&planted.rows).unwrap();
        let (mut key, mut value) = (key.clone(), value.clone());
        mutate(&mut value, other, &mut random);
        if random.below(2) == 0 {
            mutate(&mut key, other, &mut random);
        }
        if trial % 1024 == 0 {
            watchdog.trial(&format!("trial {trial}"));
        }
        if all_rows(&key, &value) > 0 { taken += 1 } else { refused += 1 }
    }
    println!(
        "campaign: {} rows of {} kinds, {taken} inputs taken, {refused} refused (NACRE_POOL_TRIALS)",
        planted.rows.len(),
        kinds.len()
    );
    assert!(taken > 0 && refused > 0);
}

/// A table with something of everything, and the changes that led there.
fn table(random: &mut Random) -> (SegmentTable, Vec<Op>, Vec<UncommittedRun>) {
    let mut table = SegmentTable::default();
    for step in 0..200u64 {
        let id = random.below(12) as u32;
        let op = match random.below(8) {
            0 => {
                let stream = *random
                    .pick(&[
                        WriteStream::Metadata,
                        WriteStream::Data,
                        WriteStream::Relocated,
                        WriteStream::RelocatedMetadata,
                    ])
                    .unwrap();
                Op::Open { id, stream, place: vec![SlotAddress { device: 0, slot: random.below(1000) as u32 }].into() }
            }
            1 | 2 => {
                let Some(segment) = table.segments().get(&id) else { continue };
                let added = random.below(6) as u32;
                let units = if segment.stream.is_of_moved() { 0 } else { added * 7 };
                Op::Grow {
                    id,
                    frames: segment.frames + added,
                    bytes: segment.bytes + added * 112,
                    units,
                    newest: Txg(step),
                }
            }
            3 => Op::Seal { id },
            4 => Op::Free { segment: id, index: random.below(40) as u32, count: 1, units: 7 },
            5 => {
                let Some(target) = table.segments().get(&id) else { continue };
                if target.sealed || target.live_frames >= target.frames {
                    continue;
                }
                Op::Move {
                    segment: random.below(12) as u32,
                    index: random.below(40) as u32,
                    from: NOT_SAID,
                    to: id,
                    offset: random.below(1000) as u32,
                    units: 7,
                }
            }
            6 => {
                let Some(segment) = table.segments().get(&id) else { continue };
                let mut columns = segment.place.to_vec();
                columns.push(SlotAddress { device: random.below(5) as u16, slot: random.below(1000) as u32 });
                Op::Widen { id, place: columns.into() }
            }
            _ => {
                table.finish(step, &BTreeSet::new()).unwrap();
                Op::Release { id }
            }
        };
        let _ = table.apply(op);
    }
    let ops = table.take_ops();
    let uncommitted = (0..random.below(4))
        .map(|at| UncommittedRun { segment: at as u32, index: 3, count: 2, units: 14, birth: Txg(0) })
        .collect();
    (table, ops, uncommitted)
}

/// A record of a log made of these rows.
fn record(rows: &[Row], random: &mut Random) -> Vec<u8> {
    let mut changes = Vec::new();
    for _ in 0..=random.below(5) {
        let (key, value) = random.pick(rows).unwrap();
        changes.push(match random.below(4) {
            0 => LogChange::Put { key, value },
            1 => LogChange::Delete { key },
            2 => LogChange::DeleteRange { from: key, to: value },
            _ => LogChange::Write { inode: random.below(50), offset: random.next() >> random.below(64), data: value },
        });
    }
    LogRecord { txg: Txg(random.below(1000)), dataset: random.below(9), changes }.encoded()
}

#[test]
fn tables_and_records_a_little_changed_are_read_or_refused() {
    let planted = planted();
    let mut random = Random(seed() ^ 0x7ab1e);
    let tables: Vec<_> = (0..16).map(|_| table(&mut random)).collect();
    let mut nodes = PageTree::default();
    planted.trees.iter().zip(0..).for_each(|((_, tree), page)| nodes.set((0, page), vec![*tree]));
    let root = planted.root.encode().unwrap();
    let mut start = Writer::default();
    Start { position: 8192, sequence: 77, chain: random.next() }.encode(&mut start);
    let start = start.finish();
    let mut headers = Vec::new();
    for segment in planted.store.segments().iter().take(4) {
        planted
            .store
            .inspect(segment.id, &mut |header, _, _| {
                headers.push(header.encode());
                headers.len() < 200
            })
            .unwrap();
    }
    let watchdog = Watchdog::start();
    let (mut taken, mut refused) = (0u64, 0u64);
    for trial in 0..trials(20_000) {
        if trial % 64 == 0 {
            watchdog.trial(&format!("trial {trial}"));
        }
        let (table, ops, uncommitted) = random.pick(&tables).unwrap();
        let (_, other) = random.pick(&planted.rows).unwrap();
        let kind = random.below(7);
        let mut bytes = match kind {
            0 => write_page(table, 0),
            1 => write_delta(7, 0, ops, uncommitted),
            2 => write_node(7, (1, 0), nodes.children((1, 0))),
            3 => record(&planted.rows, &mut random),
            4 => root.clone(),
            5 => random.pick(&headers).unwrap().clone(),
            _ => start.clone(),
        };
        mutate(&mut bytes, other, &mut random);
        let read = match kind {
            0 | 1 => {
                let page = if kind == 0 { bytes.clone() } else { write_page(table, 0) };
                let delta = if kind == 1 { bytes.clone() } else { write_delta(7, table.next(), &[], uncommitted) };
                // What earlier versions wrote.
                let _ = (read_full(&bytes), replay_delta(&bytes, &mut table.clone()), read_index(&bytes));
                let read = |page: Option<&[u8]>, delta: &[u8]| {
                    let mut reader = TableReader::default();
                    page.map_or(Ok(()), |page| reader.page(page, 0))?;
                    reader.delta(delta)?;
                    reader.finish()
                };
                let read = read(Some(&page).filter(|_| kind == 0 || random.below(2) == 0).map(Vec::as_slice), &delta);
                read.is_ok_and(|read| {
                    let mut again = TableReader::default();
                    for page in read.table.pages() {
                        again.page(&write_page(&read.table, page), page).unwrap();
                    }
                    again.delta(&write_delta(7, read.table.next(), &[], &[])).unwrap();
                    assert_eq!(again.finish().unwrap().table.segments(), read.table.segments());
                    true
                })
            }
            2 => read_node(&bytes, (1, 0)).is_ok(),
            3 => LogRecord::decode(&mut Reader::new(&bytes)).is_ok_and(|read| {
                assert_eq!(LogRecord::decode(&mut Reader::new(&read.encoded())).unwrap(), read);
                true
            }),
            4 => Root::decode(&bytes).is_ok(),
            5 => Header::decode(&bytes).is_ok(),
            _ => Start::decode(&mut Reader::new(&bytes)).is_ok(),
        };
        if read { taken += 1 } else { refused += 1 }
    }
    println!("campaign: {taken} inputs taken, {refused} refused (NACRE_POOL_TRIALS)");
    assert!(taken > 0 && refused > 0);
}

#[test]
fn packed_content_a_little_changed_unpacks_or_not() {
    let planted = planted();
    let text: Vec<u8> =
        planted.rows.iter().flat_map(|(key, value)| [&key[..], value]).flatten().copied().take(200_000).collect();
    let mut random = Random(seed() ^ 0x9ac);
    let watchdog = Watchdog::start();
    let (mut taken, mut refused) = (0u64, 0u64);
    for trial in 0..trials(20_000) / 10 {
        watchdog.trial(&format!("trial {trial}"));
        let most = if random.below(8) == 0 { 131_072 } else { 5000 };
        let length = 1 + random.below(most) as usize;
        let from = random.below((text.len() - length.min(text.len() - 1)) as u64) as usize;
        let content = &text[from..text.len().min(from + length)];
        let compression =
            *random.pick(&[CompressionSetting::Lz4, CompressionSetting::Zstd(1), CompressionSetting::Zstd(3)]).unwrap();
        let Some((compression, mut compressed)) = compress(compression, content) else { continue };
        mutate(&mut compressed, content, &mut random);
        let length = if random.below(4) == 0 { random.below(2 * content.len() as u64) as usize } else { content.len() };
        // What is behind the target belongs to somebody else.
        let mut target = vec![0xa5; length + 64];
        if decompress(compression, &compressed, &mut target[..length]) {
            taken += 1
        } else {
            refused += 1
        }
        assert!(target[length..].iter().all(|byte| *byte == 0xa5), "trial {trial}: unpacking wrote behind its target");
    }
    println!("campaign: {taken} inputs taken, {refused} refused (NACRE_POOL_TRIALS)");
    assert!(taken > 0 && refused > 0);
}

/// Frames of which some have other content than was written, without a checksum that tells it.
struct Bent {
    store: Arc<Store>,
    random: Mutex<Random>,
    /// One of so many is changed.
    rarity: u64,
}

impl Frames for Bent {
    fn read(&self, pointer: &Pointer) -> Result<Arc<[u8]>, PoolError> {
        let content = self.store.read(pointer)?;
        let mut random = self.random.lock().unwrap();
        if random.below(self.rarity) > 0 {
            return Ok(content);
        }
        let mut bent = content.to_vec();
        // The length of a frame is checked before anybody sees it.
        if random.below(2) == 0 {
            mutate(&mut bent, &content, &mut random);
            bent.resize(content.len(), 0);
        } else {
            // The header, the offsets at its end: where it hurts most.
            for _ in 0..=random.below(3) {
                let at = if random.below(2) == 0 { random.below(64) } else { random.below(bent.len() as u64) } as usize
                    % bent.len();
                bent[at] = if random.below(2) == 0 {
                    random.next() as u8
                } else {
                    [0, 1, 0x7f, 0xff][random.below(4) as usize]
                };
            }
        }
        Ok(bent.into())
    }

    fn expect(&self, _: &[Pointer]) {}

    fn write(&self, _: &NewFrame<'_>) -> Result<Pointer, PoolError> {
        Err(PoolError::NoSpace)
    }
}

/// Everything that is done with a tree.
fn use_tree(ctx: Context<'_>, dataset: u64, root: Pointer, rows: &[Row], random: &mut Random) -> usize {
    let mut seen = Seen::default();
    let _ = walk(&ctx, &root, Txg(0), &mut seen);
    let view = View::at(Some(root));
    let mut scanned = 0;
    if let Ok(mut cursor) = view.scan(ctx) {
        while let Ok(Some(_)) = cursor.next() {
            scanned += 1;
            assert!(scanned < ROWS_MOST, "a scan has no end");
        }
    }
    for _ in 0..8 {
        let (key, _) = random.pick(rows).unwrap();
        let _ = (view.get(&ctx, key).is_ok(), view.before(&ctx, key).is_ok(), view.needs(ctx.cache, key).is_ok());
        if let Ok(mut cursor) = view.cursor(ctx, key, None) {
            for _ in 0..20 {
                let Ok(Some(_)) = cursor.next() else { break };
            }
        }
    }
    let _ = (view.first(&ctx).is_ok(), view.last(&ctx).is_ok());
    let mut tree = Tree::open(Some(root), dataset, Settings::default());
    let before = tree.view();
    for _ in 0..12 {
        let (key, value) = random.pick(rows).unwrap();
        let (other, _) = random.pick(rows).unwrap();
        let _ = match random.below(5) {
            0 => tree.remove(&ctx, Txg(9), key).map(drop),
            1 => tree.remove_range(&ctx, Txg(9), key.min(other), Some(key.max(other))).map(drop),
            _ => tree.put(&ctx, Txg(9), key, value),
        };
    }
    if let Ok(mut diff) = before.diff(ctx, &tree.view()) {
        let mut differing = 0;
        while let Ok(Some(_)) = diff.next() {
            differing += 1;
            assert!(differing < ROWS_MOST, "a difference has no end");
        }
    }
    seen.rows.len()
}

#[test]
fn trees_of_changed_nodes_are_read_or_refused() {
    let planted = planted();
    let mut random = Random(seed() ^ 0x7ee);
    let watchdog = Watchdog::start();
    let mut found = 0;
    for trial in 0..trials(20_000) / 100 {
        watchdog.trial(&format!("trial {trial}"));
        let bent = Bent {
            store: Arc::clone(&planted.store),
            random: Mutex::new(Random(random.next())),
            rarity: 1 + random.below(30),
        };
        let cache = Cache::new(8 << 20);
        let ctx = Context { frames: &bent, cache: &cache };
        let (dataset, root) = *random.pick(&planted.trees).unwrap();
        found += use_tree(ctx, dataset, root, &planted.rows, &mut random);
    }
    println!("campaign: {found} rows of {} trees were shown (NACRE_POOL_TRIALS)", planted.trees.len());
    assert!(found > 0);
}
