//! Damaged data fails the operation that reads it, and nothing else: commits, imports and other
//! files keep working.

use super::*;
use crate::cache::Cache;
use crate::pointer::FrameKind;

/// The node of a dataset that a key's row lies in, or one above it at a height.
fn node_of(pool: &Pool, dataset: &Dataset, key: &[u8], kind: FrameKind) -> Pointer {
    let cache = Cache::new(16 << 20);
    let own = Context { frames: &*pool.frames, cache: &cache };
    let needs = || dataset.files().look_at_table(|table| table.tree.needs(&cache, key)).unwrap();
    let mut found = None;
    while let Some(fetch) = needs() {
        own.fetch(&fetch).unwrap();
        found = Some(fetch.pointer()).filter(|pointer| pointer.kind == kind).or(found);
    }
    found.unwrap()
}

fn lose(storage: &MapStorage, pointer: &Pointer) -> Stored {
    storage.state.lock().frames.remove(&(pointer.segment, pointer.index)).unwrap()
}

#[test]
fn a_file_that_cannot_be_freed_stops_nobody_else() {
    let storage = Arc::new(MapStorage::default());
    let pool = Pool::create(config(&storage), "tank").unwrap();
    let id = pool.find("tank").unwrap().unwrap();
    let dataset = pool.dataset(id).unwrap();
    dataset.files().set_storing(Storing { record_shift: 9, ..pool.storing() });
    let content: Vec<u8> = (0..600_000u32).map(|at| (at / 100) as u8 | 1).collect();
    let file = make(&dataset, &dataset.files().root(), "large", FileType::Regular);
    dataset.files().write(&file, Some(0), &content).unwrap();
    let number = file.number();
    drop(file);
    put(&dataset, "other", &[7; 3000]);
    pool.commit().unwrap();
    drop((dataset, pool));

    let pool = reopen(&storage);
    let dataset = pool.dataset(id).unwrap();
    let leaf = node_of(&pool, &dataset, &keys::extent(number, 600), FrameKind::Leaf);
    let (kept, birth) = lose(&storage, &leaf);
    drop((dataset, pool));
    // Removed, and freed by the commit itself; then by an import.
    let pool = reopen(&storage);
    let dataset = pool.dataset(id).unwrap();
    dataset.files().unlink(&dataset.files().root(), b"large").unwrap();
    put(&dataset, "more", &[8; 3000]);
    pool.commit().unwrap();
    put(&dataset, "even more", &[9; 3000]);
    pool.commit().unwrap();
    assert_eq!(dataset.files().objects(), 5);
    drop((dataset, pool));
    let pool = reopen(&storage);
    let dataset = pool.dataset(id).unwrap();
    assert_eq!(contents(dataset.files()).into_keys().collect::<Vec<_>>(), ["even more", "more", "other"]);
    pool.commit().unwrap();
    drop((dataset, pool));
    // If it became readable again, the next import would free it.
    storage.state.lock().frames.insert((leaf.segment, leaf.index), (kept, birth));
    let pool = reopen(&storage);
    let dataset = pool.dataset(id).unwrap();
    pool.commit().unwrap();
    assert_eq!(dataset.files().objects(), 4);
    check(&pool, &storage);
}

#[test]
fn an_operation_that_cannot_be_done_whole_changes_nothing_and_stops_nobody() {
    let storage = Arc::new(MapStorage::default());
    let pool = Pool::create(config(&storage), "tank").unwrap();
    let id = pool.find("tank").unwrap().unwrap();
    let dataset = pool.dataset(id).unwrap();
    // Enough that names and inodes lie in leaves of their own.
    (0..2000).for_each(|at| drop(make(&dataset, &dataset.files().root(), &format!("file {at}"), FileType::Regular)));
    pool.commit().unwrap();
    drop((dataset, pool));
    let pool = reopen(&storage);
    let dataset = pool.dataset(id).unwrap();
    let row = dataset.files().look_at_table(|table| crate::files::Table::get(table, &keys::inode(3))).unwrap();
    let mut batch = crate::files::Batch::default();
    batch.put(&keys::inode(3), vec![1, 2, 3]);
    batch.put(&keys::inode(1500), vec![4, 5, 6]);
    let leaf = node_of(&pool, &dataset, &keys::inode(1500), FrameKind::Leaf);
    let (kept, birth) = lose(&storage, &leaf);
    for order in 0..2 {
        let txg = pool.gate.enter().txg();
        let outcome = dataset.files().with_table(|table| crate::files::Table::change(table, txg, &batch.uncharged()));
        assert!(matches!(outcome, Err(PoolError::Frame { .. })), "{order} {outcome:?}");
        assert_eq!(
            dataset.files().look_at_table(|table| crate::files::Table::get(table, &keys::inode(3))).unwrap(),
            row
        );
        pool.commit().unwrap();
        batch = crate::files::Batch::default();
        batch.remove(&keys::inode(1500));
        batch.put(&keys::inode(3), vec![1, 2, 3]);
    }
    assert!(pool.suspended().is_none());
    dataset.files().unlink(&dataset.files().root(), b"file 7").unwrap();
    pool.commit().unwrap();
    storage.state.lock().frames.insert((leaf.segment, leaf.index), (kept, birth));
    assert_eq!(dataset.files().objects(), 2000);
    check(&pool, &storage);
}

#[test]
fn files_whose_leaves_rot_are_set_apart_by_commits_and_by_imports() {
    let storage = Arc::new(MapStorage::default());
    let pool = Pool::create(config(&storage), "tank").unwrap();
    let id = pool.find("tank").unwrap().unwrap();
    let dataset = pool.dataset(id).unwrap();
    dataset.files().set_storing(Storing { record_shift: 12, ..pool.storing() });
    let content: Vec<u8> = (0..4_000_000u32).map(|at| (at / 100) as u8 | 1).collect();
    let file = make(&dataset, &dataset.files().root(), "large", FileType::Regular);
    dataset.files().write(&file, Some(0), &content).unwrap();
    let number = file.number();
    drop(file);
    let other = make(&dataset, &dataset.files().root(), "other", FileType::Regular).number();
    pool.commit().unwrap();
    drop((dataset, pool));

    let pool = reopen(&storage);
    let dataset = pool.dataset(id).unwrap();
    let rotten = 600 << 12;
    let leaf = node_of(&pool, &dataset, &keys::extent(number, 600), FrameKind::Leaf);
    drop((dataset, pool));
    // Written while the rows can be read; the cache does not keep them until they are to be
    // changed.
    let (txg, root) = storage.state.lock().durable;
    let durable = Durable { txg, catalog: root.unwrap(), log: log::Start::default() };
    let fresh = Pool::open(PoolConfig { cache: 1, ..config(&storage) }, &durable).unwrap();
    let dataset = fresh.dataset(id).unwrap();
    let (file, other) = (dataset.files().inode(number), dataset.files().inode(other));
    dataset.files().write(&file, Some(rotten), &[3; 3000]).unwrap();
    dataset.files().write(&file, Some(0), &[4; 3000]).unwrap();
    dataset.files().write(&other, Some(0), &[7; 5000]).unwrap();
    let (kept, birth) = lose(&storage, &leaf);
    // A sync or snapshot of the whole dataset fails as long as the content waits; a sync fails once
    // after it was given up.
    assert!(fresh.sync_all(&dataset).is_err());
    assert!(fresh.unstored().is_some_and(|(files, _)| files == 1));
    let refused = fresh.snapshot(&[(id, "lacking".to_owned())]).unwrap_err();
    assert!(
        matches!(&refused, PoolError::Refused(why) if why.starts_with("what was written to a file cannot be stored")),
        "{refused}"
    );
    while fresh.unstored().is_some() {
        assert!(fresh.snapshot(&[(id, "lacking".to_owned())]).is_err());
    }
    assert!(fresh.sync_pool().is_err());
    assert!(fresh.sync_pool().is_ok());
    fresh.snapshot(&[(id, "of what is left".to_owned())]).unwrap();
    assert!(fresh.suspended().is_none());
    assert!(fresh.sync_file(&dataset, &file).is_err());
    let mut part = [0; 3000];
    dataset.files().read(&file, 0, &mut part).unwrap();
    assert_eq!(part, [4; 3000]);
    assert!(dataset.files().read(&file, rotten, &mut part).is_err());
    drop((file, other, dataset, fresh));
    let pool = reopen(&storage);
    let dataset = pool.dataset(id).unwrap();
    let (other, row) = dataset.files().look_up(&dataset.files().root(), b"other").unwrap();
    let mut all = [0; 5000];
    assert_eq!((row.size, dataset.files().read(&other, 0, &mut all).unwrap()), (5000, 5000));
    assert_eq!(all, [7; 5000]);
    storage.state.lock().frames.insert((leaf.segment, leaf.index), (kept, birth));
    check(&pool, &storage);
}

/// A table of rows 0, 2, 4... of 2,000 bytes, stored, with nothing of it in memory.
fn stored_table(storage: &Arc<MapStorage>, rows: u32) -> (TreeTable, Arc<crate::files::Throttle>) {
    use crate::frames::CompressionSetting;
    use crate::pointer::ChecksumKind;
    let frames = Arc::clone(storage) as Arc<dyn Frames>;
    let (cache, throttle) = (Arc::new(Cache::new(16 << 20)), Arc::<crate::files::Throttle>::default());
    let mut table = TreeTable::open((5, None), &frames, &cache, &throttle);
    let mut batch = crate::files::Batch::default();
    (0..rows).for_each(|row| batch.put(&(2 * row).to_be_bytes(), vec![row as u8; 2000]));
    crate::files::Table::change(&mut table, Txg(1), &batch.uncharged()).unwrap();
    let frozen = table.tree.freeze();
    let form =
        crate::tree::commit::Form { txg: Txg(1), compression: CompressionSetting::Off, checksum: ChecksumKind::Xxh3 };
    let root = frozen.write_out(&Context { frames: &*frames, cache: &cache }, form).unwrap().root;
    let cache = Arc::new(Cache::new(16 << 20));
    (TreeTable::open((5, root), &frames, &cache, &throttle), throttle)
}

#[test]
fn a_batch_that_empties_a_leaf_and_fills_its_place_needs_no_neighbour() {
    for rows in [20, 2000] {
        let storage = Arc::new(MapStorage::default());
        let (mut table, throttle) = stored_table(&storage, rows);
        let cache = Cache::new(16 << 20);
        let own = Context { frames: &*storage, cache: &cache };
        let leaf_of = |table: &TreeTable, row: u32| {
            let mut last = None;
            while let Some(fetch) = table.tree.needs(&cache, &row.to_be_bytes()).unwrap() {
                own.fetch(&fetch).unwrap();
                last = Some(fetch.pointer());
            }
            cache.clear();
            last.unwrap()
        };
        let first = leaf_of(&table, 0);
        let end = (1..rows).find(|row| leaf_of(&table, 2 * row) != first).unwrap();
        let (neighbour, beyond) = (leaf_of(&table, 2 * end), 2 * end - 1);
        let mut batch = crate::files::Batch::default();
        batch.put(&beyond.to_be_bytes(), vec![9; 30]);
        batch.remove(&beyond.to_be_bytes());
        batch.remove(&1_u32.to_be_bytes());
        (0..end).for_each(|row| batch.remove(&(2 * row).to_be_bytes()));
        batch.put(&1_u32.to_be_bytes(), vec![7; 10]);
        batch.put(&0_u32.to_be_bytes(), vec![8; 20]);
        let (kept, birth) = lose(&storage, &neighbour);
        crate::files::Table::change(&mut table, Txg(2), &batch.uncharged()).unwrap();
        assert!(throttle.failed().is_none());
        storage.state.lock().frames.insert((neighbour.segment, neighbour.index), (kept, birth));
        let mut found = Vec::new();
        let all = Vec::new()..(2 * end).to_be_bytes().to_vec();
        crate::files::Table::scan(&table, all, &mut |key, row| {
            found.push((u32::from_be_bytes(key.try_into().unwrap()), row.len()));
            true
        })
        .unwrap();
        assert_eq!(found, [(0, 20), (1, 10)]);
        assert!(crate::files::Table::get(&table, &(2 * end).to_be_bytes()).unwrap().is_some());
    }
}

pub(super) fn ring(area: &crate::log::tests::Memory) -> Box<dyn crate::log::Blocks> {
    Box::new(crate::log::Ring::new(area.clone(), 7, crate::log::Start::default()).unwrap())
}

/// A pool with a log in memory, as a crash leaves both.
fn crashed(storage: &Arc<MapStorage>, log: &crate::log::tests::Memory) -> Pool {
    let durable = crash(storage);
    log.crash(|| false);
    Pool::open(PoolConfig { log: Some(ring(log)), ..config(storage) }, &durable).unwrap()
}

/// Link counts of inodes compared with the number of their names; returns the inodes that differ.
fn wrong_links(dataset: &Dataset) -> Vec<String> {
    let (mut inodes, mut names, mut wrong) = (BTreeMap::new(), BTreeMap::<u64, u32>::new(), Vec::new());
    let mut held = BTreeMap::<u64, u64>::new();
    let (mut entries, mut orphans) = (Vec::new(), BTreeSet::new());
    dataset.files().look_at_table(|table| {
        crate::files::Table::scan(table, Vec::new()..Vec::new(), &mut |key, row| {
            match keys::Key::decode(key).unwrap() {
                keys::Key::Inode(number) => drop(inodes.insert(number, InodeRow::decode(row).unwrap())),
                keys::Key::Entry { directory, sequence } => {
                    let entry = crate::rows::Entry::decode(row).unwrap();
                    *names.entry(entry.inode).or_default() += 1;
                    *held.entry(directory).or_default() += 1;
                    entries.push((directory, sequence, entry.inode));
                }
                keys::Key::Orphan(number) => drop(orphans.insert(number)),
                _ => {}
            }
            true
        })
        .unwrap();
    });
    for (number, row) in &inodes {
        if row.links == 0 && orphans.contains(number) {
            continue;
        }
        let (links, found) = (row.links, names.get(number).copied().unwrap_or(0));
        if row.file_type() == Some(FileType::Directory) {
            if row.size != held.get(number).copied().unwrap_or(0) {
                wrong.push(format!("directory {number} says {} names", row.size));
            }
        } else if links != found || found == 0 {
            wrong.push(format!("file {number} says {links} and has {found} names"));
        }
        let hint = row.hint.filter(|hint| !entries.contains(&(hint.directory, hint.sequence, *number)));
        wrong.extend(hint.map(|_| format!("{number} names a place where it is not")));
    }
    wrong.extend(
        names
            .keys()
            .filter(|number| !inodes.contains_key(number))
            .map(|number| format!("a name of {number}, which is not there")),
    );
    wrong
}

#[test]
fn what_builds_on_records_that_an_import_leaves_out_is_left_out_too() {
    let storage = Arc::new(MapStorage::default());
    let log = crate::log::tests::Memory::new(4 << 20);
    let pool = Pool::create(PoolConfig { log: Some(ring(&log)), ..config(&storage) }, "tank").unwrap();
    let id = pool.find("tank").unwrap().unwrap();
    let dataset = pool.dataset(id).unwrap();
    let (files, root) = (dataset.files(), dataset.files().root());
    let plain = |directory: &Inode, name: &str, file_type| {
        let new = |parent: &ParentView| {
            Ok(NewInode { row: InodeRow::new(file_type, 0o644, parent.now), target: None, attributes: Vec::new() })
        };
        files.make(directory, name.as_bytes(), b"", &new).unwrap().0
    };
    let rot = plain(&root, "rot", FileType::Directory);
    (0..3000).for_each(|at| drop(plain(&rot, &format!("file {at}"), FileType::Regular)));
    let good = plain(&root, "good", FileType::Directory);
    let [a, b, c] = ["a", "b", "c"].map(|name| plain(&good, name, FileType::Regular));
    // Names in one leaf, of files that are there and of others.
    pool.commit().unwrap();
    let lost = {
        let pool = reopen(&storage);
        let dataset = pool.dataset(id).unwrap();
        let head = dataset.files().look_at_table(|table| crate::files::Table::get(table, &keys::head())).unwrap();
        let head = crate::rows::DatasetHead::decode(&head.unwrap()).unwrap();
        let leaf = |name: &str| {
            node_of(
                &pool,
                &dataset,
                &keys::name(rot.number(), head.hashing.hash(head.seed, name.as_bytes()), 0),
                FrameKind::Leaf,
            )
        };
        let first = leaf("0");
        let in_it = |wanted: usize, prefix: &str| {
            (0..3000)
                .map(|at| format!("{prefix}{at}"))
                .filter(|name| leaf(name) == first)
                .take(wanted)
                .collect::<Vec<_>>()
        };
        (first, in_it(6, ""), in_it(1, "file "))
    };
    let (leaf, new, old) = lost;
    let (replaced, _) = files.look_up(&rot, old[0].as_bytes()).unwrap();
    files.link(&replaced, &good, b"second name").unwrap();
    let lost_later = plain(&good, "lost later", FileType::Directory);
    pool.commit().unwrap();

    let write = |file: &Arc<Inode>, content: &[u8]| {
        files.write(file, Some(0), content).unwrap();
        pool.sync_file(&dataset, file).unwrap();
    };
    write(&plain(&rot, &new[0], FileType::Regular), b"its name was left out");
    files.link(&a, &rot, new[1].as_bytes()).unwrap();
    write(&a, b"one name");
    files.unlink(&rot, old[0].as_bytes()).unwrap();
    write(&replaced, b"two names");
    let inner = plain(&rot, &new[2], FileType::Directory);
    write(&plain(&inner, "in it", FileType::Regular), b"its directory was left out");
    files.rename((&good, b"c"), (&rot, new[3].as_bytes()), MayReplace::Yes).unwrap();
    write(&c, b"where it was");
    files.rename((&good, b"lost later"), (&rot, new[4].as_bytes()), MayReplace::Yes).unwrap();
    let in_moved = plain(&lost_later, "in it", FileType::Regular);
    write(&in_moved, b"in a directory that stays where it was");
    // A file created by a skipped record would replace an existing one; then that name is used
    // again.
    files.rename((&inner, b"in it"), (&good, b"b"), MayReplace::Yes).unwrap();
    files.unlink(&good, b"b").unwrap();
    write(&plain(&good, "b", FileType::Regular), b"a second one of that name");
    // The log claims its last name; it has others.
    files.unlink(&good, b"second name").unwrap();
    write(&plain(&good, "d", FileType::Regular), b"whole");
    assert_eq!(wrong_links(&dataset), Vec::<String>::new());
    let numbers = [a.number(), b.number(), c.number(), replaced.number()];
    drop((a, b, c, replaced, inner, in_moved, lost_later, rot, good, root));
    drop((dataset, pool));

    let (kept, birth) = lose(&storage, &leaf);
    let pool = crashed(&storage, &log);
    let dataset = pool.dataset(id).unwrap();
    pool.commit().unwrap();
    storage.state.lock().frames.insert((leaf.segment, leaf.index), (kept, birth));
    drop((dataset, pool));
    let pool = reopen(&storage);
    let dataset = pool.dataset(id).unwrap();
    assert_eq!(wrong_links(&dataset), Vec::<String>::new());
    let files = dataset.files();
    let (good, _) = files.look_up(&files.root(), b"good").unwrap();
    let listed = files.list(&good, 0, true, usize::MAX).unwrap();
    let listed: BTreeMap<String, u64> = listed
        .into_iter()
        .map(|entry| (String::from_utf8(entry.name).unwrap(), entry.file.unwrap().0.number()))
        .collect();
    assert_eq!(listed.keys().collect::<Vec<_>>(), ["a", "b", "c", "d", "lost later", "second name"]);
    assert_eq!([listed["a"], listed["b"], listed["c"], listed["second name"]], numbers);
    let content = |directory: &Inode, name: &str| {
        let (file, row) = files.look_up(directory, name.as_bytes()).unwrap();
        let mut content = vec![0; row.size as usize];
        files.read(&file, 0, &mut content).unwrap();
        String::from_utf8(content).unwrap()
    };
    assert_eq!(
        ["a", "b", "c", "d", "second name"].map(|name| content(&good, name)),
        ["one name", "", "where it was", "whole", "two names"]
    );
    let (moved, _) = files.look_up(&good, b"lost later").unwrap();
    assert_eq!(content(&moved, "in it"), "in a directory that stays where it was");
    check(&pool, &storage);
}

#[test]
fn a_commit_that_panics_is_the_last_one() {
    let storage = Arc::new(MapStorage::default());
    let pool = Pool::create(config(&storage), "tank").unwrap();
    let id = pool.find("tank").unwrap().unwrap();
    let dataset = pool.dataset(id).unwrap();
    put(&dataset, "before", &[7; 3000]);
    pool.commit().unwrap();
    put(&dataset, "after", &[8; 3000]);
    let broken = || pool.commit_with(|_, _| -> Result<(), PoolError> { panic!("on purpose") });
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(broken)).is_err());
    assert!(matches!(pool.suspended(), Some(PoolError::Suspended { .. })));
    assert!(matches!(pool.commit(), Err(PoolError::Suspended { .. })));
    assert!(dataset.files().unlink(&dataset.files().root(), b"before").is_err());
    drop((dataset, pool));
    let pool = reopen(&storage);
    let dataset = pool.dataset(id).unwrap();
    assert_eq!(contents(dataset.files()).into_keys().collect::<Vec<_>>(), ["before"]);
}
