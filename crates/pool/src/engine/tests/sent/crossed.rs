//! Streams that are received while file systems and snapshots around them are made, destroyed and
//! promoted: nothing of these is lost, and nothing is freed twice.

use super::*;
use crate::catalog::rows::PARTIAL;
use crate::catalog::{PropertyRow, PropertySource};
use crate::engine::DestroySet;
use crate::engine::receiving::MARK;
use crate::send_stream::record;

fn full(home: u64, txg: Txg) -> ToSend {
    ToSend { to: Later::Snapshot((home, txg)), from: None, after: Vec::new(), stored: false }
}

/// A source with snapshots a and b, and a receiver that has a as `tank/copy`.
struct Pair {
    from: Side,
    home: u64,
    to: Side,
    copy: u64,
    /// Head and payloads of the difference from a to b.
    difference: (SnapshotHead, Vec<Vec<u8>>),
}

fn pair(seed: u64) -> Pair {
    let (from, home, mut random) = source(seed);
    let first = from.snapshot(home, "a");
    change(&from.pool.dataset(home).unwrap(), &mut random, 40);
    put(&from.pool.dataset(home).unwrap(), "later", &[5; 200_000]);
    let second = from.snapshot(home, "b");
    let to = Side::new();
    let receiving = to.pool.receive(into(&to, "a"), &head(&from, home, first, None)).unwrap();
    let copy = receiving.target();
    whole(receiving, &sent(&from, &full(home, first)));
    let what = ToSend { from: Some(earlier((home, first), false)), ..full(home, second) };
    let difference = (head(&from, home, second, Some(first)), one_by_one(&sent(&from, &what)));
    Pair { from, home, to, copy, difference }
}

/// Marks a dataset as partially received by a process that has crashed, or removes the mark.
fn mark(pool: &Pool, id: u64, value: Option<&str>) {
    let row = value.map(|value| PropertyRow { source: PropertySource::Local, value: value.to_owned() });
    pool.commit_with(|admin, _| admin.catalog.set_property(id, MARK, row.as_ref())).unwrap();
}

fn new(parent: u64, name: &str) -> NewDataset {
    NewDataset::named(parent, name)
}

fn refused<T: std::fmt::Debug>(done: Result<T, PoolError>) -> String {
    match done {
        Err(PoolError::Refused(why)) => why,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_clone_is_overwritten_and_its_origin_stays() {
    for deferred in [false, true] {
        let (from, home, _) = source(21);
        let txg = from.snapshot(home, "a");
        let to = Side::new();
        let origin = to.pool.create_dataset(&new(to.top, "origin")).unwrap();
        put(&to.pool.dataset(origin).unwrap(), "data", &[7; 400_000]);
        let state = to.snapshot(origin, "s");
        let copy = to.pool.clone_snapshot(origin, "s", &new(to.top, "copy")).unwrap();
        put(&to.pool.dataset(copy).unwrap(), "own", &[8; 300_000]);
        to.pool.dataset(copy).unwrap().files().unlink(&to.pool.dataset(copy).unwrap().files().root(), b"data").unwrap();
        to.pool.commit().unwrap();
        let before = (to.rows(origin, None), to.rows(origin, Some(state)));
        if deferred {
            to.pool.destroy_snapshot(origin, "s", true).unwrap();
        }
        let forced = ReceiveInto { force: true, ..into(&to, "a") };
        let receiving = to.pool.receive(forced, &head(&from, home, txg, None)).unwrap();
        let there = whole(receiving, &sent(&from, &full(home, txg)));
        check(&to.pool, &to.storage);
        assert_eq!(from.rows(home, Some(txg)), to.rows(copy, Some(there)));
        assert_eq!(to.rows(origin, None), before.0);
        assert_eq!(to.pool.admin.lock().catalog.dataset(copy).unwrap().origin, None);
        if deferred {
            assert!(to.pool.snapshots(origin).unwrap().is_empty(), "the last clone is gone");
        } else {
            assert_eq!(to.rows(origin, Some(state)), before.1);
            to.pool.destroy_snapshot(origin, "s", false).unwrap();
        }
        check(&to.pool, &to.storage);
    }
}

#[test]
fn nothing_comes_below_what_is_half_received() {
    let (from, home, _) = source(22);
    let txg = from.snapshot(home, "a");
    let to = Side::new();
    let other = to.pool.create_dataset(&new(to.top, "other")).unwrap();
    to.snapshot(other, "s");
    let payloads = sent(&from, &full(home, txg));
    let head = head(&from, home, txg, None);
    let mut receiving = to.pool.receive(into(&to, "a"), &head).unwrap();
    receiving.rows(&payloads[0]).unwrap();
    let half = receiving.target();
    let below = ReceiveInto { parent: half, ..into(&to, "a") };
    assert!(refused(to.pool.create_dataset(&new(half, "x"))).contains("partially received"));
    assert!(refused(to.pool.would_create(&new(half, "x"))).contains("partially received"));
    assert!(refused(to.pool.clone_snapshot(other, "s", &new(half, "x"))).contains("partially received"));
    assert!(refused(to.pool.rename_dataset(other, &new(half, "x"))).contains("partially received"));
    assert!(refused(to.pool.receive(below.clone(), &head)).contains("partially received"));
    // It may get another name itself.
    to.pool.rename_dataset(half, &new(to.top, "renamed")).unwrap();
    receiving.cut().unwrap();
    assert_eq!(to.child("renamed"), None);
    check(&to.pool, &to.storage);
    let whole_one = to.pool.receive(into(&to, "a"), &head).unwrap();
    let parent = whole_one.target();
    whole(whole_one, &payloads);
    whole(to.pool.receive(ReceiveInto { parent, ..below }, &head).unwrap(), &payloads);
    check(&to.pool, &to.storage);
}

#[test]
fn what_is_half_received_stays_with_what_is_below_it() {
    let to = Side::new();
    let make = |parent, name: &str| {
        let id = to.pool.create_dataset(&new(parent, name)).unwrap();
        put(&to.pool.dataset(id).unwrap(), "f", &[3; 200_000]);
        id
    };
    let (with_child, with_snapshot, nested) = (make(to.top, "a"), make(to.top, "b"), make(to.top, "c"));
    let (child, below) = (make(with_child, "x"), make(nested, "x"));
    to.snapshot(with_snapshot, "s");
    [with_child, with_snapshot, nested, below].into_iter().for_each(|id| mark(&to.pool, id, Some("once")));
    let again = Side { pool: Arc::new(reopen(&to.storage)), storage: Arc::clone(&to.storage), top: to.top };
    assert_eq!(refused(again.pool.abort_receive(again.top, "a")), "filesystem has children");
    assert_eq!(refused(again.pool.abort_receive(again.top, "b")), "filesystem has snapshots");
    again.pool.abort_unfinished().unwrap();
    again.pool.abort_unfinished().unwrap();
    check(&again.pool, &again.storage);
    let there: Vec<Option<u64>> = ["a", "b", "c"].iter().map(|name| again.child(name)).collect();
    assert_eq!(there, [Some(with_child), Some(with_snapshot), None]);
    // It goes once nothing depends on it.
    again.pool.destroy_dataset(child).unwrap();
    again.pool.destroy_snapshot(with_snapshot, "s", false).unwrap();
    assert!(again.pool.abort_receive(again.top, "a").unwrap());
    again.pool.abort_unfinished().unwrap();
    assert_eq!(again.child("b"), None);
    check(&again.pool, &again.storage);
}

#[test]
fn a_refusal_after_a_change_makes_nothing_of_it_durable() {
    let to = Side::new();
    let copy = to.pool.create_dataset(&new(to.top, "copy")).unwrap();
    to.snapshot(copy, "s");
    let done: Result<(), PoolError> = to.pool.commit_with(|admin, _| {
        admin.catalog.leave_snapshot(copy, admin.catalog.snapshot_named(copy, "s")?.unwrap())?;
        Err(PoolError::Refused("too late".to_owned()))
    });
    assert_eq!(refused(done), "too late");
    assert!(to.pool.commit().is_err(), "a later commit would make it durable");
    let again = reopen(&to.storage);
    assert_eq!(again.snapshots(copy).unwrap().len(), 1);
    check(&again, &to.storage);
    // A refusal before any change harms nothing.
    assert!(again.commit_with(|_, _| -> Result<(), _> { Err(PoolError::Busy) }).is_err());
    again.commit().unwrap();
}

#[test]
fn a_base_stays_while_a_stream_goes_on_from_it() {
    let Pair { from, to, copy, difference: (head, rows), home, .. } = pair(23);
    let resumable = ReceiveInto { resumable: true, ..into(&to, "b") };
    let clone = to.pool.clone_snapshot(copy, "a", &new(to.top, "clone")).unwrap();
    let mut receiving = to.pool.receive(resumable.clone(), &head).unwrap();
    rows[..rows.len() / 2].iter().for_each(|row| receiving.rows(row).unwrap());
    assert!(refused(to.pool.promote(clone)).contains("partially received snapshot"), "while it is received");
    let after = receiving.token().after.clone();
    receiving.cut().unwrap();
    assert!(refused(to.pool.promote(clone)).contains("partially received snapshot"), "while it is interrupted");
    let before = to.rows(clone, None);
    // Earlier versions promoted it.
    let half = to.pool.admin.lock().catalog.child(copy, PARTIAL).unwrap().unwrap();
    mark(&to.pool, half, None);
    to.pool.promote(clone).unwrap();
    mark(&to.pool, half, Some("resumable"));
    let going_on = SnapshotHead { after, ..head.clone() };
    assert!(refused(to.pool.receive(resumable, &going_on)).contains("does not match"));
    assert!(to.pool.abort_receive(to.top, "copy").unwrap());
    assert_eq!(to.rows(clone, None), before);
    check(&to.pool, &to.storage);
    to.pool.promote(copy).unwrap();
    let there = whole(to.pool.receive(into(&to, "b"), &head).unwrap(), &rows);
    assert_eq!(from.row(home, from.pool.snapshots(home).unwrap()[1].0).guid, to.row(copy, there).guid);
    check(&to.pool, &to.storage);
}

#[test]
fn a_clone_of_a_newer_snapshot_is_not_promoted_meanwhile() {
    let Pair { to, copy, difference: (head, rows), .. } = pair(24);
    put(&to.pool.dataset(copy).unwrap(), "mine", &[1; 200_000]);
    let newer = to.snapshot(copy, "newer");
    let forced = ReceiveInto { force: true, ..into(&to, "b") };
    let mut receiving = to.pool.receive(forced, &head).unwrap();
    rows.iter().for_each(|row| receiving.rows(row).unwrap());
    let clone = to.pool.clone_snapshot(copy, "newer", &new(to.top, "clone")).unwrap();
    assert!(refused(to.pool.promote(clone)).contains("partially received snapshot"));
    let before = (to.rows(clone, None), to.rows(copy, Some(newer)));
    // Should the base be another file system's all the same, the stream is refused.
    let half = to.pool.admin.lock().catalog.child(copy, PARTIAL).unwrap().unwrap();
    mark(&to.pool, half, None);
    to.pool.promote(clone).unwrap();
    mark(&to.pool, half, Some("once"));
    assert!(refused(receiving.finish()).contains("does not match"));
    receiving.cut().unwrap();
    assert_eq!((to.rows(clone, None), to.rows(clone, Some(newer))), before);
    check(&to.pool, &to.storage);
}

#[test]
fn a_half_received_clone_is_not_promoted() {
    let Pair { from, home, to, copy, .. } = pair(25);
    let clone = from.pool.clone_snapshot(home, "a", &new(from.top, "trial")).unwrap();
    put(&from.pool.dataset(clone).unwrap(), "more", &[9; 300_000]);
    let txg = from.snapshot(clone, "t");
    let base = from.pool.admin.lock().catalog.snapshot_named(home, "a").unwrap().unwrap();
    let what = ToSend { from: Some(earlier((home, base), false)), ..full(clone, txg) };
    let row = from.row(clone, txg);
    let head = SnapshotHead { guid: row.guid, from: from.row(home, base).guid, clone: true, ..SnapshotHead::default() };
    let mut receiving = to.pool.receive(ReceiveInto { name: "trial".into(), ..into(&to, "t") }, &head).unwrap();
    let half = receiving.target();
    receiving.rows(&one_by_one(&sent(&from, &what))[0]).unwrap();
    assert!(refused(to.pool.promote(half)).contains("partially received"));
    receiving.cut().unwrap();
    assert_eq!(to.pool.snapshots(copy).unwrap().len(), 1);
    check(&to.pool, &to.storage);
    whole(to.pool.receive(ReceiveInto { name: "trial".into(), ..into(&to, "t") }, &head).unwrap(), &sent(&from, &what));
    to.pool.promote(to.child("trial").unwrap()).unwrap();
    check(&to.pool, &to.storage);
}

#[test]
fn a_snapshot_that_is_taken_meanwhile_is_not_overwritten() {
    let (from, home, _) = source(26);
    let txg = from.snapshot(home, "a");
    let to = Side::new();
    let copy = to.pool.create_dataset(&new(to.top, "copy")).unwrap();
    put(&to.pool.dataset(copy).unwrap(), "mine", &[1; 200_000]);
    let forced = ReceiveInto { force: true, ..into(&to, "a") };
    let mut receiving = to.pool.receive(forced, &head(&from, home, txg, None)).unwrap();
    sent(&from, &full(home, txg)).iter().for_each(|payload| receiving.rows(payload).unwrap());
    let precious = to.snapshot(copy, "precious");
    to.pool.bookmark(copy, "precious", "mark").unwrap();
    let before = to.rows(copy, Some(precious));
    assert!(refused(receiving.finish()).contains("destination has snapshots (eg. @precious)"));
    receiving.cut().unwrap();
    assert_eq!((to.rows(copy, Some(precious)), to.rows(copy, None)), (before.clone(), before));
    assert_eq!(to.pool.catalog_view().bookmarks(copy).unwrap().len(), 1);
    check(&to.pool, &to.storage);
}

#[test]
fn a_base_whose_destruction_waits_goes_with_the_stream() {
    let Pair { to, copy, difference: (head, rows), .. } = pair(27);
    let mut receiving = to.pool.receive(into(&to, "b"), &head).unwrap();
    rows.iter().for_each(|row| receiving.rows(row).unwrap());
    to.pool.destroy_snapshot(copy, "a", true).unwrap();
    assert_eq!(to.pool.snapshots(copy).unwrap().len(), 1, "the stream needs it");
    receiving.finish().unwrap();
    let left: Vec<String> = to.pool.snapshots(copy).unwrap().into_iter().map(|(_, row, _)| row.name).collect();
    assert_eq!(left, ["b"]);
    check(&to.pool, &to.storage);
}

/// A receiver whose interrupted receive of the difference has a file system below it, as earlier versions created them.
fn child_below_partial(seed: u64) -> (Pair, u64, u64) {
    let pair = pair(seed);
    let resumable = ReceiveInto { resumable: true, ..into(&pair.to, "b") };
    let mut receiving = pair.to.pool.receive(resumable, &pair.difference.0).unwrap();
    receiving.rows(&pair.difference.1[0]).unwrap();
    receiving.cut().unwrap();
    let half = pair.to.pool.admin.lock().catalog.child(pair.copy, PARTIAL).unwrap().unwrap();
    mark(&pair.to.pool, half, None);
    let child = pair.to.pool.create_dataset(&new(half, "x")).unwrap();
    put(&pair.to.pool.dataset(child).unwrap(), "f", &[3; 100_000]);
    mark(&pair.to.pool, half, Some("resumable"));
    (pair, half, child)
}

#[test]
fn a_pool_with_a_file_system_below_a_partial_receive_goes_on() {
    let (Pair { to, copy, difference: (head, rows), .. }, half, child) = child_below_partial(28);
    let to = Side { pool: Arc::new(reopen(&to.storage)), storage: Arc::clone(&to.storage), top: to.top };
    to.pool.abort_unfinished().unwrap();
    assert_eq!(refused(to.pool.abort_receive(to.top, "copy")), "filesystem has children");
    let set = DestroySet { filesystems: vec![copy], ..DestroySet::default() };
    assert_eq!(refused(to.pool.destroy_set(&set)), "filesystem has children");
    assert!(refused(to.pool.receive(into(&to, "b"), &head)).contains("partially-complete state"));
    let after = rows[..1].iter().map(|row| record::rows(row).unwrap().last().unwrap().key().to_vec()).next().unwrap();
    let resumed = SnapshotHead { after, ..head.clone() };
    let resumable = ReceiveInto { resumable: true, ..into(&to, "b") };
    let mut receiving = to.pool.receive(resumable.clone(), &resumed).unwrap();
    rows[1..].iter().for_each(|row| receiving.rows(row).unwrap());
    let after = receiving.token().after.clone();
    assert_eq!(refused(receiving.finish()), "filesystem has children");
    receiving.cut().unwrap();
    to.pool.roll_back(copy, "a").unwrap();
    to.pool.commit().unwrap();
    assert_eq!(contents(to.pool.dataset(child).unwrap().files()).len(), 1);
    assert_eq!(to.pool.admin.lock().catalog.child(copy, PARTIAL).unwrap(), Some(half));
    check(&to.pool, &to.storage);
    // The stream ends once nothing depends on its rows.
    to.pool.destroy_dataset(child).unwrap();
    to.pool.receive(resumable, &SnapshotHead { after, ..head }).unwrap().finish().unwrap();
    check(&to.pool, &to.storage);
}

#[test]
fn a_refused_destroy_keeps_the_partial_receive() {
    let Pair { to, copy, difference: (head, rows), .. } = pair(29);
    let clone = to.pool.clone_snapshot(copy, "a", &new(to.top, "clone")).unwrap();
    let resumable = ReceiveInto { resumable: true, ..into(&to, "b") };
    let mut receiving = to.pool.receive(resumable.clone(), &head).unwrap();
    receiving.rows(&rows[0]).unwrap();
    let set = DestroySet { filesystems: vec![clone, copy], ..DestroySet::default() };
    assert!(matches!(to.pool.destroy_set(&set), Err(PoolError::Busy)), "while it is received");
    receiving.cut().unwrap();
    let half = || to.pool.admin.lock().catalog.child(copy, PARTIAL).unwrap();
    let one = DestroySet { filesystems: vec![copy], ..DestroySet::default() };
    assert!(refused(to.pool.destroy_set(&one)).contains("it has clones"));
    assert!(half().is_some());
    let saved = to.pool.saved(copy).unwrap().unwrap();
    assert!(matches!(to.pool.destroy_set(&set), Err(PoolError::Busy)), "while it is sent");
    drop(saved);
    assert!(half().is_some());
    to.pool.destroy_set(&set).unwrap();
    assert_eq!((to.child("copy"), to.child("clone")), (None, None));
    check(&to.pool, &to.storage);
}

#[test]
fn an_abort_and_a_resume_at_once_are_one_or_the_other() {
    let Pair { to, copy, difference: (head, rows), .. } = pair(30);
    let resumable = ReceiveInto { resumable: true, ..into(&to, "b") };
    for _ in 0..20 {
        let mut receiving = to.pool.receive(resumable.clone(), &head).unwrap();
        receiving.rows(&rows[0]).unwrap();
        let after = receiving.token().after.clone();
        receiving.cut().unwrap();
        let resumed = SnapshotHead { after, ..head.clone() };
        std::thread::scope(|threads| {
            let abort = threads.spawn(|| to.pool.abort_receive(to.top, "copy"));
            let resume = threads.spawn(|| to.pool.receive(resumable.clone(), &resumed));
            let (aborted, resumed) = (abort.join().unwrap(), resume.join().unwrap());
            match resumed {
                Ok(receiving) => {
                    assert!(matches!(aborted, Err(PoolError::Busy)), "{aborted:?}");
                    receiving.abort().unwrap();
                }
                Err(error) => {
                    assert!(matches!(error, PoolError::Refused(_)), "{error:?}");
                    assert!(aborted.unwrap());
                }
            }
        });
        assert_eq!(to.pool.admin.lock().catalog.child(copy, PARTIAL).unwrap(), None);
    }
    check(&to.pool, &to.storage);
}
