//! Pools written by earlier versions open for ever: `fixtures/*.zst` are devices, `*.txt` beside
//! them say what has to be in them.
//!
//! `NACRE_POOL_MAKE_FIXTURES=1` writes those that are missing; one that is there is never written
//! again.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::Arc;

use crate::pools::{Imported, Random, check, create, open};
use nacre_pool::device::Simulator;
use nacre_pool::engine::{Dataset, NewDataset};
use nacre_pool::files::{AttributeChange, Inode, MayReplace, NewInode, ParentView, Range};
use nacre_pool::rows::{FileType, InodeRow};
use nacre_pool::store::{Access, Checked};
use xxhash_rust::xxh3::xxh3_64;

const LENGTH: u64 = 64 << 20;

fn directory() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

fn bytes(seed: u64, length: usize) -> Vec<u8> {
    let mut random = Random(seed);
    // Half of it compresses.
    let mut bytes = Vec::with_capacity(length + 16);
    while bytes.len() < length {
        bytes.extend(random.next().to_le_bytes());
        bytes.extend([b'a'; 8]);
    }
    bytes.truncate(length);
    bytes
}

fn make(dataset: &Dataset, directory: &Inode, name: &str, kind: FileType, target: Option<&[u8]>) -> Arc<Inode> {
    let new = |parent: &ParentView| {
        let row = InodeRow { uid: 1000, gid: 100, ..InodeRow::new(kind, 0o640, parent.now) };
        Ok(NewInode {
            row,
            target: target.map(<[u8]>::to_vec),
            attributes: vec![(b"user.made".to_vec(), b"yes".to_vec())],
        })
    };
    dataset.files().make(directory, name.as_bytes(), b"", &new).unwrap().0
}

/// Some of everything in one dataset.
fn fill(dataset: &Dataset, seed: u64) {
    let files = dataset.files();
    let root = files.root();
    let below = make(dataset, &root, "below", FileType::Directory, None);
    for (at, length) in [0, 10, 2048, 2049, 5000, 20_000].into_iter().enumerate() {
        let place = if at % 2 == 0 { &root } else { &below };
        let file = make(dataset, place, &format!("file {at}"), FileType::Regular, None);
        files.write(&file, Some(0), &bytes(seed + at as u64, length)).unwrap();
    }
    let sparse = make(dataset, &root, "sparse", FileType::Regular, None);
    files.write(&sparse, Some(3_000_000), b"behind a hole").unwrap();
    files.set_attributes(&sparse, &AttributeChange { size: Some(5_000_000), ..AttributeChange::default() }).unwrap();
    // For small overwrites, and for records that two files have.
    let compresses = b"many times the same words\n".repeat(12_000);
    for name in ["patched", "shared"] {
        let file = make(dataset, &root, name, FileType::Regular, None);
        files.write(&file, Some(0), &compresses).unwrap();
    }
    make(dataset, &below, "link", FileType::Symlink, Some(b"../file 1"));
    make(dataset, &below, "pipe", FileType::Fifo, None);
    let (named, _) = files.look_up(&root, b"file 4").unwrap();
    files.link(&named, &below, b"another name").unwrap();
    for (name, length) in [("user.small", 10), ("user.large", 9000), ("trusted.x", 0)] {
        files.set_attribute(&named, name.as_bytes(), &bytes(seed, length), None, None).unwrap();
    }
}

/// Changes some of it, so that snapshots and heads differ.
fn change(dataset: &Dataset, seed: u64) {
    let files = dataset.files();
    let root = files.root();
    let (file, _) = files.look_up(&root, b"file 4").unwrap();
    files.write(&file, Some(3000), &bytes(seed, 3000)).unwrap();
    files.zero(&file, 0, 1000, false).unwrap();
    files.rename((&root, b"file 0"), (&root, b"renamed"), MayReplace::No).unwrap();
    files.unlink(&root, b"file 2").unwrap();
    let (patched, shared) = (files.look_up(&root, b"patched").unwrap().0, files.look_up(&root, b"shared").unwrap().0);
    for at in 0..5 {
        files.write(&patched, Some(at * 50_001), &bytes(seed + at, 200)).unwrap();
    }
    let other = make(dataset, &root, &format!("shares {seed}"), FileType::Regular, None);
    assert_eq!(files.share(&shared, &other, Range { from: 0, to: 0, length: 262_144 }).unwrap(), 262_144);
    files.write(&shared, Some(0), &bytes(seed, 9000)).unwrap();
    let new = make(dataset, &root, &format!("new {seed}"), FileType::Regular, None);
    files.write(&new, Some(0), &bytes(seed, 7000)).unwrap();
}

/// The pool of the fixtures.
fn plant(imported: &Imported) {
    let pool = &imported.pool;
    let root = pool.root().unwrap();
    let with = |name: &str, properties: &[(&str, &str)]| {
        let properties = properties.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        pool.create_dataset(&NewDataset { properties, ..NewDataset::named(root, name) }).unwrap()
    };
    let ids = [
        root,
        with("zstd", &[("compression", "zstd-3"), ("recordsize", "16K"), ("checksum", "blake3")]),
        with("off", &[("compression", "off"), ("recordsize", "4K"), ("org.example:note", "for ever")]),
    ];
    for (seed, id) in ids.iter().enumerate() {
        fill(&pool.dataset(*id).unwrap(), seed as u64 * 100);
    }
    let all = |name: &str| ids.iter().map(|id| (*id, name.to_owned())).collect::<Vec<_>>();
    pool.snapshot(&all("one")).unwrap();
    for (seed, id) in ids.iter().enumerate() {
        change(&pool.dataset(*id).unwrap(), seed as u64 * 100 + 50);
    }
    pool.snapshot(&all("two")).unwrap();
    pool.hold(ids[1], "one", "kept", true).unwrap();
    pool.bookmark(ids[1], "two", "mark").unwrap();
    let clone = pool.clone_snapshot(ids[2], "one", &NewDataset::named(root, "clone")).unwrap();
    change(&pool.dataset(clone).unwrap(), 999);
    // Frees frames, so that the cleaner has something to move.
    pool.destroy_snapshot(ids[0], "one", false).unwrap();
    for _ in 0..3 {
        imported.store.clean_step(8 << 20).unwrap();
        pool.commit().unwrap();
    }
}

/// File systems in which names are the same though their bytes differ.
fn plant_folded(imported: &Imported) {
    let pool = &imported.pool;
    let root = pool.root().unwrap();
    let rules = [
        ("insensitive", "none"),
        ("insensitive", "formC"),
        ("sensitive", "formD"),
        ("insensitive", "formKC"),
        ("sensitive", "formKD"),
    ];
    for (at, (case, form)) in rules.into_iter().enumerate() {
        let properties = [("casesensitivity", case), ("normalization", form)]
            .map(|(name, value)| (name.to_owned(), value.to_owned()));
        let new = NewDataset { properties: properties.to_vec(), ..NewDataset::named(root, &format!("folded {at}")) };
        let id = pool.create_dataset(&new).unwrap();
        let dataset = pool.dataset(id).unwrap();
        fill(&dataset, 1000 + at as u64);
        let top = dataset.files().root();
        for name in
            ["Upper", "\u{c9}t\u{e9} 17.TXT", "e\u{301}", "\u{fb01}n \u{b2}", "\u{3a3}\u{3c2}", "\u{10400}", "\u{ac00}"]
        {
            if dataset.files().look_up(&top, name.as_bytes()).is_err() {
                make(&dataset, &top, name, FileType::Regular, None);
            }
        }
        pool.snapshot(&[(id, "one".to_owned())]).unwrap();
        change(&dataset, 2000 + at as u64);
    }
    pool.commit().unwrap();
}

/// Every name is found as it is listed, and by another case where that is the same.
fn finds_all(imported: &Imported) {
    for (id, _) in crate::pools::gentle::datasets(imported) {
        let dataset = imported.pool.dataset(id).unwrap();
        let (files, root) = (dataset.files(), dataset.files().root());
        for listed in files.list(&root, 0, false, usize::MAX).unwrap() {
            assert_eq!(files.look_up(&root, &listed.name).unwrap().0.number(), listed.number);
            // Of the ligature, two letters are the upper case.
            let other = String::from_utf8(listed.name).unwrap().replace('\u{fb01}', "").to_uppercase();
            if files.folding().insensitive && !other.starts_with("N ") {
                assert_eq!(files.look_up(&root, other.as_bytes()).unwrap().0.number(), listed.number, "{other}");
            }
        }
    }
}

/// What is in a pool, a line for each file.
fn manifest(imported: &Imported) -> String {
    let mut text = String::new();
    let mut trees = BTreeMap::new();
    for (id, name) in crate::pools::gentle::datasets(imported) {
        for (txg, row) in imported.pool.snapshot_rows(id).unwrap() {
            let then = imported.pool.snapshot_files(id, txg).unwrap();
            trees.insert(format!("{name}@{}", row.name), crate::crash_model::read(then.files()));
        }
        trees.insert(name, crate::crash_model::read(imported.pool.dataset(id).unwrap().files()));
    }
    for (name, tree) in trees {
        writeln!(text, "{name}").unwrap();
        for (path, (content, attributes, first)) in tree {
            let same = if first == path { "-" } else { &first };
            write!(text, "  {path}\t{}\t{:016x}\t{same}", content.len(), xxh3_64(&content)).unwrap();
            for (name, value) in attributes {
                write!(text, "\t{name}={:016x}", xxh3_64(&value)).unwrap();
            }
            text.push('\n');
        }
    }
    text
}

fn write_fixture(name: &str, disk: &Simulator, told: &str) {
    let compressed = zstd::bulk::compress(&disk.bytes(), 19).unwrap();
    std::fs::create_dir_all(directory()).unwrap();
    std::fs::write(directory().join(format!("{name}.zst")), compressed).unwrap();
    std::fs::write(directory().join(format!("{name}.txt")), told).unwrap();
}

fn is_there(name: &str) -> bool {
    directory().join(format!("{name}.zst")).exists()
}

/// Makes the fixtures of the present format.
fn write_fixtures() {
    // By an even seed metadata is stored twice.
    for (name, seed) in [("v1-exported", 7), ("v1-twice", 8), ("v1-near", 10), ("v1-folded", 12)] {
        if is_there(name) {
            continue;
        }
        let disk = Arc::new(Simulator::new("disk", LENGTH));
        let imported = create(&[Arc::clone(&disk)], seed);
        plant(&imported);
        if name == "v1-folded" {
            plant_folded(&imported);
        }
        let told = manifest(&imported);
        imported.store.close(true, 5).unwrap();
        drop(imported);
        write_fixture(name, &disk, &told);
    }
    if is_there("v1-killed") {
        return;
    }
    // Of another, the last of what was synced is in the log alone.
    let disk = Arc::new(Simulator::new("disk", LENGTH));
    let imported = create(&[Arc::clone(&disk)], 9);
    plant(&imported);
    let dataset = imported.pool.dataset(imported.pool.root().unwrap()).unwrap();
    let root = dataset.files().root();
    for at in 0..3 {
        let file = make(&dataset, &root, &format!("synced {at}"), FileType::Regular, None);
        dataset.files().write(&file, Some(100 * at), &bytes(at, 700)).unwrap();
        imported.pool.sync_file(&dataset, &file).unwrap();
    }
    let told = manifest(&imported);
    drop(dataset);
    drop(imported);
    disk.crash(1);
    write_fixture("v1-killed", &disk, &told);
}

/// Devices that were attached, or are to take the place of others, have everything.
fn resilver(imported: &Imported) {
    let (stale, changes) = imported.store.stale_devices().unwrap();
    assert!(!stale.is_empty());
    let mut whole = |checked: &Checked| checked.damage.is_none() || checked.mended;
    assert!(imported.store.resilver(&mut whole, &mut |_| {}).unwrap());
    imported.pool.commit().unwrap();
    imported.store.strengthen().unwrap();
    imported.pool.commit().unwrap();
    assert!(imported.store.resilvered(&stale, changes).unwrap());
}

#[test]
fn pools_of_all_versions_open_and_hold_what_they_held() {
    if std::env::var_os("NACRE_POOL_MAKE_FIXTURES").is_some() {
        write_fixtures();
    }
    let mut found = 0;
    for entry in std::fs::read_dir(directory()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|suffix| suffix != "zst") {
            continue;
        }
        found += 1;
        let what = path.display();
        let compressed = std::fs::read(&path).unwrap();
        let told = std::fs::read_to_string(path.with_extension("txt")).unwrap();
        let image = zstd::bulk::decompress(&compressed, 1 << 30).unwrap();
        let disk = Arc::new(Simulator::with_bytes("disk", image));
        let imported = open(&[Arc::clone(&disk)], 1, Access::ReadWrite).unwrap();
        assert_eq!(manifest(&imported), told, "{what}");
        check(&imported);
        finds_all(&imported);
        // It is a pool like any other: goes on, and is there again.
        let id = imported.pool.root().unwrap();
        make(
            &imported.pool.dataset(id).unwrap(),
            &imported.pool.dataset(id).unwrap().files().root(),
            "later",
            FileType::Regular,
            None,
        );
        imported.pool.snapshot(&[(id, "later".to_owned())]).unwrap();
        check(&imported);
        imported.store.close(true, 9).unwrap();
        drop(imported);
        let holds_all = |imported: &Imported| {
            let now = manifest(imported);
            assert!(told.lines().all(|line| now.contains(line)), "{what}");
        };
        let imported = open(&[Arc::clone(&disk)], 2, Access::ReadOnly).unwrap();
        holds_all(&imported);
        drop(imported);
        // It becomes a mirror, and its first device is replaced.
        let [second, third] = ["second", "third"].map(|name| Arc::new(Simulator::new(name, LENGTH)));
        let imported = open(&[disk], 3, Access::ReadWrite).unwrap();
        imported.store.attach(0, Arc::clone(&second) as _, 50).unwrap();
        resilver(&imported);
        imported.store.replace(0, Arc::clone(&third) as _, 51).unwrap();
        resilver(&imported);
        holds_all(&imported);
        check(&imported);
        imported.store.close(true, 9).unwrap();
        drop(imported);
        for devices in [vec![Arc::clone(&third)], vec![Arc::clone(&second)], vec![third, second]] {
            let access = if devices.len() > 1 { Access::ReadWrite } else { Access::ReadOnly };
            let imported = open(&devices, 4, access).unwrap();
            holds_all(&imported);
            let seen = imported.pool.check(&imported.store, access == Access::ReadOnly, &mut |what| println!("{what}"));
            assert_eq!(seen.unwrap().problems, 0, "{what}");
        }
    }
    assert!(found >= 5, "the fixtures are missing");
}
