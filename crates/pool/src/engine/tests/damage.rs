//! What cannot be read stops whoever reads it, and nothing else: commits, imports and other files go on.

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
    let pool = Pool::create(ground(&storage), "tank").unwrap();
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
    // Could it be read again, it would be freed by the next start.
    storage.state.lock().frames.insert((leaf.segment, leaf.index), (kept, birth));
    let pool = reopen(&storage);
    let dataset = pool.dataset(id).unwrap();
    assert_eq!(dataset.files().objects(), 4);
    check(&pool, &storage);
}

#[test]
fn an_operation_that_cannot_be_done_whole_changes_nothing_and_stops_nobody() {
    let storage = Arc::new(MapStorage::default());
    let pool = Pool::create(ground(&storage), "tank").unwrap();
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
        let outcome = dataset.files().with_table(|table| crate::files::Table::change(table, txg, &batch));
        assert!(matches!(outcome, Err(PoolError::Frame { .. })), "{order} {outcome:?}");
        assert_eq!(dataset.files().look_at_table(|table| crate::files::Table::get(table, &keys::inode(3))).unwrap(), row);
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
    let pool = Pool::create(ground(&storage), "tank").unwrap();
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
    // Written while the rows can be read; the cache does not keep them until they are to be changed.
    let (txg, root) = storage.state.lock().durable;
    let durable = Durable { txg, catalog: root.unwrap(), log: log::Start::default() };
    let fresh = Pool::open(Ground { cache: 1, ..ground(&storage) }, &durable).unwrap();
    let dataset = fresh.dataset(id).unwrap();
    let (file, other) = (dataset.files().inode(number), dataset.files().inode(other));
    dataset.files().write(&file, Some(rotten), &[3; 3000]).unwrap();
    dataset.files().write(&file, Some(0), &[4; 3000]).unwrap();
    dataset.files().write(&other, Some(0), &[7; 5000]).unwrap();
    let (kept, birth) = lose(&storage, &leaf);
    for _ in 0..5 {
        fresh.commit().unwrap();
    }
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
