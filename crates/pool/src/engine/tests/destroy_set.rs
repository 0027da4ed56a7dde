//! Destruction of sets, and properties of snapshots through rename, clone and send.

use super::*;
use crate::engine::{DestroySet, Setting};

/// A pool with `tank/a` (snapshots one, two), its clone `tank/c` of one (snapshot own), and
/// `tank/c/d` below that.
fn family(storage: &Arc<MapStorage>) -> (Pool, [u64; 4]) {
    let pool = Pool::create(config(storage), "tank").unwrap();
    let top = pool.find("tank").unwrap().unwrap();
    let a = pool.create_dataset(&NewDataset::named(top, "a")).unwrap();
    put(&pool.dataset(a).unwrap(), "f", &[1; 200_000]);
    pool.snapshot(&[(a, "one".to_owned())]).unwrap();
    put(&pool.dataset(a).unwrap(), "f", &[2; 300_000]);
    pool.snapshot(&[(a, "two".to_owned())]).unwrap();
    put(&pool.dataset(a).unwrap(), "g", &[3; 100_000]);
    let c = pool.clone_snapshot(a, "one", &NewDataset::named(top, "c")).unwrap();
    put(&pool.dataset(c).unwrap(), "h", &[4; 150_000]);
    pool.snapshot(&[(c, "own".to_owned())]).unwrap();
    let d = pool.create_dataset(&NewDataset::named(c, "d")).unwrap();
    put(&pool.dataset(d).unwrap(), "i", &[5; 50_000]);
    pool.commit().unwrap();
    check(&pool, storage);
    (pool, [top, a, c, d])
}

fn refused(done: Result<(), PoolError>) -> String {
    match done {
        Err(PoolError::Refused(why)) => why,
        other => panic!("{other:?}"),
    }
}

#[test]
fn all_of_it_goes_in_one_commit_or_nothing() {
    let storage = Arc::new(MapStorage::default());
    let (pool, [top, a, c, d]) = family(&storage);
    let of = |filesystems: &[u64]| DestroySet { filesystems: filesystems.to_vec(), ..DestroySet::default() };
    let before = pool.catalog_view().root().unwrap();
    assert_eq!(refused(pool.destroy_set(&of(&[top]))), "the pool's own file system goes with the pool");
    assert_eq!(refused(pool.destroy_set(&of(&[c, d, a]))), "filesystem has children");
    assert_eq!(refused(pool.destroy_set(&of(&[d, a, c]))), "snapshot '@one' cannot be destroyed: it has clones");
    pool.hold(a, "two", "keep", true).unwrap();
    assert_eq!(refused(pool.destroy_set(&of(&[d, c, a]))), "snapshot '@two' cannot be destroyed: it is held");
    pool.hold(a, "two", "keep", false).unwrap();
    let used = pool.dataset(d).unwrap();
    assert!(matches!(pool.destroy_set(&of(&[d, c, a])), Err(PoolError::Busy)));
    drop(used);
    assert_eq!(pool.catalog_view().root().unwrap(), before);
    check(&pool, &storage);
    let txg = pool.commit().unwrap();
    pool.destroy_set(&of(&[d, c, a])).unwrap();
    // One commit to close the file systems, one to destroy the set.
    assert!(pool.commit().unwrap().0 <= txg.0 + 3);
    assert!(pool.catalog_view().children(top).unwrap().is_empty());
    check(&pool, &storage);
    let pool = reopen(&storage);
    assert!(pool.catalog_view().children(top).unwrap().is_empty());
    check(&pool, &storage);
}

#[test]
fn snapshots_of_several_go_with_their_clones() {
    let storage = Arc::new(MapStorage::default());
    let (pool, [_, a, c, d]) = family(&storage);
    pool.bookmark(a, "one", "mark").unwrap();
    let snapshots = vec![(a, vec!["one".to_owned(), "two".to_owned()])];
    let set =
        DestroySet { snapshots: snapshots.clone(), bookmarks: vec![(a, "mark".to_owned())], ..DestroySet::default() };
    assert_eq!(refused(pool.destroy_set(&set)), "snapshot '@one' cannot be destroyed: it has clones");
    assert_eq!(pool.snapshots(a).unwrap().len(), 2);
    pool.destroy_set(&DestroySet { deferred: true, snapshots, ..DestroySet::default() }).unwrap();
    assert_eq!(pool.snapshots(a).unwrap().len(), 1);
    // With its last clone the snapshot with deferred destruction is destroyed as well.
    let set = DestroySet { filesystems: vec![d, c], snapshots: vec![(a, vec!["one".to_owned()])], ..set };
    pool.destroy_set(&set).unwrap();
    assert!(pool.snapshots(a).unwrap().is_empty());
    assert!(pool.catalog_view().bookmarks(a).unwrap().is_empty());
    check(&pool, &storage);
    assert_eq!(contents(pool.dataset(a).unwrap().files()).len(), 2);
}

#[test]
fn going_back_takes_what_stands_between_with_it() {
    let storage = Arc::new(MapStorage::default());
    let (pool, [top, a, c, d]) = family(&storage);
    pool.destroy_set(&DestroySet { filesystems: vec![d, c], ..DestroySet::default() }).unwrap();
    let e = pool.clone_snapshot(a, "two", &NewDataset::named(top, "e")).unwrap();
    assert!(refused(pool.roll_back(a, "one")).contains("is not the newest snapshot"));
    let two = vec![(a, vec!["two".to_owned()])];
    assert!(
        refused(pool.roll_back_over(a, "one", &DestroySet { snapshots: two.clone(), ..DestroySet::default() }))
            .contains("it has clones")
    );
    assert!(
        refused(pool.roll_back_over(
            a,
            "two",
            &DestroySet { snapshots: two.clone(), filesystems: vec![e], ..DestroySet::default() }
        ))
        .contains("newest")
    );
    pool.bookmark(a, "two", "mark").unwrap();
    let txg = pool.commit().unwrap();
    let set = DestroySet {
        filesystems: vec![e],
        snapshots: two,
        bookmarks: vec![(a, "mark".to_owned())],
        ..DestroySet::default()
    };
    pool.roll_back_over(a, "one", &set).unwrap();
    assert!(pool.commit().unwrap().0 <= txg.0 + 3);
    check(&pool, &storage);
    let expected = Tree::from([("f".to_owned(), vec![1; 200_000])]);
    assert_eq!(contents(pool.dataset(a).unwrap().files()), expected);
    let pool = reopen(&storage);
    assert_eq!(contents(pool.dataset(a).unwrap().files()), expected);
    assert_eq!(pool.snapshots(a).unwrap().len(), 1);
    check(&pool, &storage);
}

#[test]
fn properties_stay_with_their_snapshots() {
    let storage = Arc::new(MapStorage::default());
    let (pool, [_, a, c, _]) = family(&storage);
    let mine = |value: &str| (":mine".to_owned(), value.to_owned());
    pool.snapshot_with(&[(a, "three".to_owned()), (c, "three".to_owned())], &[mine("x")]).unwrap();
    let own = |pool: &Pool, id: u64, name: &str| -> Vec<(String, String)> {
        let catalog = pool.catalog_view();
        let txg = catalog.snapshot_named(id, name).unwrap().unwrap();
        catalog.snapshot_properties(id, txg).unwrap().into_iter().map(|(name, row)| (name, row.value)).collect()
    };
    assert_eq!(own(&pool, a, "three"), [mine("x")]);
    let set = |name: &str, value: &str| (name.to_owned(), Setting::Local(value.to_owned()));
    let one = [(a, "one".to_owned())];
    assert!(matches!(pool.set_snapshot_properties(&one, &[set("quota", "1G")]), Err(PoolError::Property(_))));
    assert!(matches!(
        pool.set_snapshot_properties(&[(a, "none".to_owned())], &[set("a:b", "1")]),
        Err(PoolError::Refused(_))
    ));
    assert!(matches!(
        pool.set_snapshot_properties(&one, &[set("a:b", &"x".repeat(7901))]),
        Err(PoolError::Property(_))
    ));
    let long = (format!("a:{}", "b".repeat(253)), Setting::Local("x".repeat(7900)));
    pool.set_snapshot_properties(&one, &[long.clone(), set("a:b", "1")]).unwrap();
    pool.rename_snapshot(a, "one", "first").unwrap();
    assert_eq!(own(&pool, a, "first").len(), 2);
    pool.promote(c).unwrap();
    assert_eq!(own(&pool, c, "first").len(), 2);
    let gone = [(long.0, Setting::Inherit)];
    pool.set_snapshot_properties(&[(c, "first".to_owned())], &gone).unwrap();
    let pool = reopen(&storage);
    assert_eq!(own(&pool, c, "first"), [("a:b".to_owned(), "1".to_owned())]);
    let txg = pool.catalog_view().snapshot_named(c, "three").unwrap().unwrap();
    pool.destroy_snapshot(c, "three", false).unwrap();
    assert!(pool.catalog_view().snapshot_properties(c, txg).unwrap().is_empty());
    check(&pool, &storage);
}

#[test]
fn going_back_keeps_a_snapshot_that_its_last_clone_would_take_with_it() {
    let storage = Arc::new(MapStorage::default());
    let (pool, [_, a, c, d]) = family(&storage);
    let e = pool.clone_snapshot(a, "two", &NewDataset::named(d, "e")).unwrap();
    pool.destroy_snapshot(a, "one", true).unwrap();
    let set = DestroySet { snapshots: vec![(a, vec!["two".to_owned()])], ..DestroySet::default() };
    let all = DestroySet { filesystems: vec![e, d, c], ..set.clone() };
    assert!(refused(pool.roll_back_over(a, "one", &all)).contains("destroyed with its last clone"));
    assert_eq!(pool.snapshots(a).unwrap().len(), 2);
    assert_eq!(pool.catalog_view().children(d).unwrap(), [e]);
    check(&pool, &storage);
    // A clone that stays keeps the snapshot.
    pool.roll_back_over(a, "one", &DestroySet { filesystems: vec![e], ..set }).unwrap();
    assert_eq!(contents(pool.dataset(a).unwrap().files()), Tree::from([("f".to_owned(), vec![1; 200_000])]));
    check(&pool, &storage);
}
