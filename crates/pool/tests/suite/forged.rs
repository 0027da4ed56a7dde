//! Pools whose checksums are right and whose rows are not: by a defect of another program, or by
//! somebody who wants harm. What is asked of such a pool is an error or any answer, never a panic,
//! never a loop.
//!
//! `NACRE_POOL_TRIALS` is the number of trials, `NACRE_POOL_SEED` another beginning.

use std::sync::Arc;

use crate::crash_model::World;
use crate::pools::gentle::{self, Watchdog};
use crate::pools::{Imported, Random, create, number, open};
use nacre_pool::cache::Cache;
use nacre_pool::catalog::DatasetRow;
use nacre_pool::device::{Device, Simulator};
use nacre_pool::engine::Storage;
use nacre_pool::files::{AttributeChange, Inode, MayReplace};
use nacre_pool::label::LogStart;
use nacre_pool::rows::{Entry, FileType, Key, NameTarget};
use nacre_pool::store::{Access, Commit, Import, Store};
use nacre_pool::tree::commit::Form;
use nacre_pool::tree::walk::{Visitor, walk};
use nacre_pool::tree::{Context, Settings, Tree};
use nacre_pool::{ChecksumKind, CompressionSetting, Frames, Pointer, PoolError, Txg};

type Row = (Vec<u8>, Vec<u8>);

#[derive(Default)]
struct Rows(Vec<Row>);

impl Visitor for Rows {
    fn frame(&mut self, _: &Pointer) -> Result<bool, PoolError> {
        Ok(true)
    }

    fn row(&mut self, key: &[u8], value: &[u8]) -> Result<(), PoolError> {
        self.0.push((key.to_vec(), value.to_vec()));
        Ok(())
    }
}

fn rows(ctx: &Context<'_>, root: &Pointer) -> Vec<Row> {
    let mut rows = Rows::default();
    walk(ctx, root, Txg(0), &mut rows).unwrap();
    rows.0
}

/// The image of a pool with some of everything.
fn planted(seed: u64) -> Vec<u8> {
    let mut random = Random(seed);
    let disks = [Arc::new(Simulator::new("disk", 64 << 20))];
    let imported = create(&disks, random.next());
    let mut world = World::new();
    for _ in 0..400 {
        assert!(world.step(&imported, &mut random));
    }
    imported.pool.commit().unwrap();
    imported.store.close(true, 5).unwrap();
    drop(imported);
    disks[0].bytes()
}

/// Bytes that are almost these.
fn mutate(bytes: &mut Vec<u8>, random: &mut Random) {
    for _ in 0..=random.below(3) {
        let at = random.below(bytes.len() as u64) as usize;
        match random.below(9) {
            _ if bytes.is_empty() => bytes.push(random.next() as u8),
            0 | 1 => bytes[at] ^= 1 << random.below(8),
            2 => bytes[at] = 0xff,
            3 => bytes[at] = 0,
            4 => bytes[at] = random.next() as u8,
            5 => bytes.truncate(at),
            6 => bytes.insert(at, random.next() as u8),
            7 => {
                bytes.remove(at);
            }
            _ => {
                // The largest numbers, as a varint or as a field.
                let end = bytes.len().min(at + 8);
                bytes[at..end].fill(0xff);
            }
        }
    }
}

/// Has a name lead to the directory that it is in, or to the root.
fn lead_back(key: &[u8], value: &mut Vec<u8>, random: &mut Random) -> bool {
    let own = |directory: u64, random: &mut Random| if random.below(3) == 0 { 1 } else { directory };
    match Key::decode(key) {
        Ok(Key::Entry { directory, .. }) => {
            let Ok(entry) = Entry::decode(value) else { return false };
            *value = Entry { inode: own(directory, random), ..entry }.encode();
        }
        Ok(Key::Name { directory, .. }) => {
            let Ok(target) = NameTarget::decode(value) else { return false };
            let file_type = if random.below(4) == 0 { target.file_type } else { FileType::Directory };
            *value = NameTarget { inode: own(directory, random), file_type }.encode();
        }
        _ => return false,
    }
    true
}

/// Changes some rows of a tree; its new root.
fn forge(
    ctx: &Context<'_>,
    root: Pointer,
    dataset: u64,
    txg: Txg,
    random: &mut Random,
    done: &mut Vec<String>,
) -> Option<Pointer> {
    let all = rows(ctx, &root);
    let mut tree = Tree::open(Some(root), dataset, Settings::default());
    for _ in 0..=random.below(4) {
        // Kinds are many, rows of some kinds are few: each kind as often as the others.
        let mut kinds: Vec<u8> = all.iter().filter_map(|(key, _)| key.first().copied()).collect();
        kinds.dedup();
        let kind = *random.pick(&kinds).unwrap();
        let of_kind: Vec<&Row> = all.iter().filter(|(key, _)| key.first() == Some(&kind)).collect();
        let (key, value) = *random.pick(&of_kind).unwrap();
        let (mut key, mut value) = (key.clone(), value.clone());
        let what = match random.below(9) {
            8 if lead_back(&key, &mut value, random) => "its own directory",
            0 => {
                tree.remove(ctx, txg, &key).unwrap();
                done.push(format!("{key:02x?} gone"));
                continue;
            }
            1 => {
                let (_, other) = *random.pick(&of_kind).unwrap();
                value.clone_from(other);
                "another's value"
            }
            2 => {
                let old = key.clone();
                mutate(&mut key, random);
                if random.below(2) == 0 {
                    tree.remove(ctx, txg, &old).unwrap();
                }
                "another key"
            }
            _ => {
                mutate(&mut value, random);
                "another value"
            }
        };
        if tree.put(ctx, txg, &key, &value).is_ok() {
            done.push(format!("{key:02x?} has {what}: {:02x?}", value.get(..value.len().min(80)).unwrap_or_default()));
        }
    }
    let frozen = tree.freeze();
    let form = Form { txg, compression: CompressionSetting::Off, checksum: ChecksumKind::Xxh3 };
    let written = frozen.write_out(ctx, form).unwrap();
    written.root
}

/// Writes a pool that is wrong in a way that no checksum tells; what was done.
fn forge_image(disk: &Arc<Simulator>, random: &mut Random) -> Vec<String> {
    let import = Import { access: Access::ReadWrite, name: None, host: (1, "here".to_owned()), time: 9 };
    let (store, root) = Store::open(vec![Arc::clone(disk) as Arc<dyn Device>], &import).unwrap();
    let cache = Cache::new(8 << 20);
    let frames: &dyn Frames = &store;
    let ctx = Context { frames, cache: &cache };
    let txg = Txg(root.txg.0 + 1);
    let mut catalog = root.catalog.unwrap();
    let mut done = Vec::new();
    if random.below(2) == 0 {
        let datasets: Vec<Row> =
            rows(&ctx, &catalog).into_iter().filter(|(key, _)| key.first() == Some(&0x11)).collect();
        let (key, value) = random.pick(&datasets).unwrap().clone();
        let mut row = DatasetRow::decode(&value).unwrap();
        if let Some(root) = row.root {
            let id = u64::from_be_bytes(key[1..9].try_into().unwrap());
            row.root = forge(&ctx, root, id, txg, random, &mut done);
            let mut tree = Tree::open(Some(catalog), 0, Settings::default());
            tree.put(&ctx, txg, &key, &row.encode()).unwrap();
            let form = Form { txg, compression: CompressionSetting::Off, checksum: ChecksumKind::Xxh3 };
            catalog = tree.freeze().write_out(&ctx, form).unwrap().root.unwrap();
        }
    } else {
        match forge(&ctx, catalog, 0, txg, random, &mut done) {
            Some(root) => catalog = root,
            None => done.clear(),
        }
    }
    let log_start: LogStart = root.log_start;
    store.commit(&Commit { txg, catalog: Some(catalog), upper: &[], log_start, time: 9 }).unwrap();
    done
}

/// Everything that users and administrators do; whatever is answered.
fn use_it(imported: &Imported, random: &mut Random) {
    let pool = &imported.pool;
    let there = gentle::datasets(imported);
    for (id, _) in &there {
        for (txg, row) in pool.snapshot_rows(*id).unwrap_or_default() {
            if let Ok(then) = pool.snapshot_files(*id, txg) {
                gentle::read(then.files());
            }
            let _ = pool.hold(*id, &row.name, "tag", true);
            let _ = pool.hold(*id, &row.name, "tag", false);
        }
        let Ok(dataset) = pool.dataset(*id) else { continue };
        let found = gentle::read(dataset.files());
        let files = dataset.files();
        let root = files.root();
        for name in found.files.keys().filter(|name| !name.contains('/')) {
            let Ok((inode, row)) = files.look_up(&root, name.as_bytes()) else { continue };
            match random.below(6) {
                0 => drop(files.write(&inode, Some(random.below(row.size.saturating_add(100_000))), &[7; 3000])),
                1 => drop(files.set_attributes(
                    &inode,
                    &AttributeChange { size: Some(random.below(5000)), ..AttributeChange::default() },
                )),
                2 => drop(files.zero(&inode, random.below(10_000), 100_000, false)),
                3 => drop(files.rename((&root, name.as_bytes()), (&root, b"f0"), MayReplace::Yes)),
                4 => drop(files.set_attribute(&inode, b"user.1", &[1; 5000], None, None)),
                _ => drop(files.unlink(&root, name.as_bytes())),
            }
            let _ = pool.sync_file(&dataset, &inode);
        }
        for path in found.files.keys().filter(|path| path.contains('/')) {
            let Some((above, name)) = path.rsplit_once('/') else { continue };
            let below = |directory: Arc<Inode>, name: &str| Some(files.look_up(&directory, name.as_bytes()).ok()?.0);
            let Some(directory) = above.split('/').try_fold(files.root(), below) else { continue };
            let name = name.as_bytes();
            match random.below(5) {
                0 => drop(files.unlink(&directory, name)),
                1 => drop(files.remove_directory(&directory, name)),
                2 => drop(files.rename((&directory, name), (&root, b"up"), MayReplace::Yes)),
                3 => drop(files.rename((&root, b"f0"), (&directory, name), MayReplace::Exchange)),
                _ => drop(files.rename((&directory, name), (&directory, b"beside"), MayReplace::Yes)),
            }
            let _ = files.parent(&directory);
            let _ = files.path(&directory);
        }
        let _ = files.free_orphans();
    }
    let _ = pool.commit();
    for (id, _) in &there {
        for (_, row) in pool.snapshot_rows(*id).unwrap_or_default() {
            let _ = pool.destroy_snapshot(*id, &row.name, random.below(2) == 0);
        }
        let _ = pool.promote(*id);
        let _ = pool.snapshot(&[(*id, "new".to_owned())]);
        let _ = pool.roll_back(*id, "new");
        if random.below(2) == 0 {
            let _ = pool.destroy_dataset(*id);
        }
        let _ = pool.space(*id);
    }
    let _ = pool.history();
    let _ = pool.pool_properties();
    for _ in 0..4 {
        let _ = imported.store.tend(4 << 20);
        let _ = pool.commit();
    }
}

#[test]
fn rows_that_are_wrong_do_no_harm_to_the_program() {
    let seed = number("NACRE_POOL_SEED", 1);
    let image = planted(seed);
    let watchdog = Watchdog::start();
    let mut random = Random(seed ^ 0xf00d);
    let (mut refused, mut opened) = (0, 0);
    for trial in 0..number("NACRE_POOL_TRIALS", 12) {
        let disk = Arc::new(Simulator::with_bytes("disk", image.clone()));
        let done = forge_image(&disk, &mut random);
        let what = format!("seed {seed}, trial {trial}: {done:#?}");
        watchdog.trial(&what);
        let tried = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let Ok(imported) = open(&[Arc::clone(&disk)], random.next(), Access::ReadWrite) else { return false };
            let _ = imported.pool.check(&imported.store, random.below(2) == 0, &mut |_| {});
            use_it(&imported, &mut random);
            let _ = imported.pool.check(&imported.store, false, &mut |_| {});
            drop(imported);
            // And once more, with what came of that.
            if let Ok(imported) = open(&[Arc::clone(&disk)], random.next(), Access::ReadOnly) {
                gentle::datasets(&imported);
            }
            true
        }));
        match tried {
            Ok(true) => opened += 1,
            Ok(false) => refused += 1,
            Err(panic) => {
                eprintln!("{what}");
                std::panic::resume_unwind(panic);
            }
        }
    }
    println!("campaign: seed {seed}, {refused} refused, {opened} used (NACRE_POOL_TRIALS, NACRE_POOL_SEED)");
    assert!(opened > 0);
}
