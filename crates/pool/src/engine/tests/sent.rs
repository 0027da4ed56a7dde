//! Streams of snapshots: the received rows are those that were sent, an interrupted stream resumes
//! where it was, and a refused one changes nothing.

mod crossed;
mod forged;
mod many;

use super::*;
use crate::codec::Writer;
use crate::device::Random;
use crate::engine::receiving::{ReceiveInto, Receiving};
use crate::engine::sending::{Earlier, Later, ToSend};
use crate::files::{AttributeChange, Batch, Range, Table};
use crate::rows::{Key, Patch};
use crate::send_stream::{ResumeToken, SnapshotHead, StreamError};
use crate::tree::{Settings, Tree as Rows};

/// A pool that grows and is sent from or received into.
struct Side {
    storage: Arc<MapStorage>,
    pool: Arc<Pool>,
    top: u64,
}

impl Side {
    fn new() -> Self {
        let storage = Arc::new(MapStorage::default());
        let pool = Arc::new(Pool::create(config(&storage), "tank").unwrap());
        let top = pool.root().unwrap();
        Self { storage, pool, top }
    }

    /// All rows of a snapshot, or of the live dataset, with the content of their frames.
    fn rows(&self, id: u64, txg: Option<Txg>) -> Vec<(Vec<u8>, Vec<u8>)> {
        let root = {
            let admin = self.pool.admin.lock();
            match txg {
                Some(txg) => admin.catalog.snapshot(id, txg).unwrap().root,
                None => admin.catalog.dataset(id).unwrap().root,
            }
        };
        let context = Context { frames: &*self.pool.frames, cache: &self.pool.cache };
        let view = Rows::open(root, 0, Settings::default()).view();
        let mut cursor = view.cursor(context, &[], None).unwrap();
        let mut rows = Vec::new();
        while let Some((key, value)) = cursor.next().unwrap() {
            // The progress of the row recount is not sent.
            if Key::decode(key).unwrap() == Key::Recounted {
                continue;
            }
            let value = match crate::rows::pointer_of(key, value).unwrap() {
                Some(pointer) => {
                    let content = self.pool.content.read(&pointer).unwrap();
                    let pieces = match Key::decode(key).unwrap() {
                        Key::Patch { .. } => format!("{:?}", Patch::decode(value).unwrap().pieces),
                        _ => String::new(),
                    };
                    [pieces.as_bytes(), &content].concat()
                }
                None => value.to_vec(),
            };
            rows.push((key.to_vec(), value));
        }
        rows
    }

    fn snapshot(&self, id: u64, name: &str) -> Txg {
        self.pool.snapshot(&[(id, name.to_owned())]).unwrap()
    }

    fn child(&self, name: &str) -> Option<u64> {
        self.pool.admin.lock().catalog.child(self.top, name).unwrap()
    }

    fn row(&self, id: u64, txg: Txg) -> crate::catalog::SnapshotRow {
        self.pool.admin.lock().catalog.snapshot(id, txg).unwrap()
    }
}

/// Changes a file system at random.
fn change(dataset: &Dataset, random: &mut Random, steps: usize) {
    let files = dataset.files();
    let root = files.root();
    let name = |random: &mut Random| format!("f{}", random.below(12));
    for _ in 0..steps {
        let name = name(random);
        let found = files.look_up(&root, name.as_bytes()).ok().map(|(inode, _)| inode);
        match (random.below(12), found) {
            (0 | 1, None) => drop(make(dataset, &root, &name, FileType::Regular)),
            (2, None) => drop(make(dataset, &root, &name, FileType::Directory)),
            (3, None) => drop(make(dataset, &root, &name, FileType::CharDevice)),
            (0..=4, Some(inode)) => {
                let length = [10, 3000, 140_000, 400_000][random.below(4) as usize];
                let data = vec![random.below(250) as u8 + 1; length];
                let _ = files.write(&inode, Some(random.below(500_000)), &data);
            }
            (5, Some(inode)) => {
                let size = AttributeChange { size: Some(random.below(600_000)), ..Default::default() };
                let _ = files.set_attributes(&inode, &size);
            }
            (6, Some(_)) => {
                let _ = files.unlink(&root, name.as_bytes());
                let _ = files.remove_directory(&root, name.as_bytes());
            }
            (7, Some(inode)) => drop(files.link(&inode, &root, format!("l{}\u{e9}", random.below(30)).as_bytes())),
            (8, Some(_)) => {
                let to = format!("f{}", random.below(12));
                let _ = files.rename((&root, name.as_bytes()), (&root, to.as_bytes()), MayReplace::Yes);
            }
            (9, Some(inode)) => {
                let value = vec![7; random.below(9000) as usize];
                let _ = files.set_attribute(&inode, b"user.y", &value, None, None);
            }
            (10, Some(inode)) => {
                let owner = AttributeChange { uid: Some(random.below(3) as u32), ..Default::default() };
                let _ = files.set_attributes(&inode, &owner);
            }
            (11, Some(inode)) => {
                if let Ok((other, _)) = files.look_up(&root, format!("f{}", random.below(12)).as_bytes()) {
                    let range = Range { from: 0, to: 0, length: 1 << 17 };
                    let _ = files.share(&inode, &other, range);
                }
            }
            _ => {}
        }
    }
}

/// The names in the root of an open file system.
fn names(pool: &Pool, id: u64) -> Vec<Vec<u8>> {
    let dataset = pool.dataset(id).unwrap();
    let files = dataset.files();
    files.list(&files.root(), 0, false, usize::MAX).unwrap().into_iter().map(|entry| entry.name).collect()
}

/// The stream of a snapshot, as payloads of records.
fn sent(side: &Side, what: &ToSend) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    side.pool
        .send_rows(what, &mut |payload| {
            all.push(payload.to_vec());
            Ok(())
        })
        .unwrap();
    all
}

/// Base of an incremental stream; of a bookmark only the txg is known.
fn earlier((home, txg): (u64, Txg), mark: bool) -> Earlier {
    if mark { Earlier::Bookmark(txg) } else { Earlier::Snapshot((home, txg)) }
}

fn head(side: &Side, id: u64, txg: Txg, from: Option<Txg>) -> SnapshotHead {
    let row = side.row(id, txg);
    SnapshotHead {
        name: format!("tank/home@{}", row.name),
        guid: row.guid,
        created: row.created_at,
        from: from.map_or(0, |from| side.row(id, from).guid),
        ..SnapshotHead::default()
    }
}

fn into(side: &Side, snapshot: &str) -> ReceiveInto {
    ReceiveInto { parent: side.top, name: "copy".into(), snapshot: snapshot.into(), ..ReceiveInto::default() }
}

fn whole(mut receiving: Receiving, payloads: &[Vec<u8>]) -> Txg {
    payloads.iter().for_each(|payload| receiving.rows(payload).unwrap());
    receiving.finish().unwrap()
}

/// A source with a file system, and its snapshots and bookmarks.
fn source(seed: u64) -> (Side, u64, Random) {
    let side = Side::new();
    let home = side.pool.create_dataset(&NewDataset::named(side.top, "home")).unwrap();
    let mut random = Random(seed);
    change(&side.pool.dataset(home).unwrap(), &mut random, 60);
    (side, home, random)
}

/// Records of one row each: a stream can be cut between any two.
fn one_by_one(payloads: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    for payload in payloads {
        for op in crate::send_stream::record::rows(payload).unwrap() {
            let mut to = Writer::default();
            op.encode(&mut to);
            all.push(to.finish());
        }
    }
    all
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn what_arrives_is_what_was_sent(seed: u64, rounds in 1usize..5, steps in 1usize..60) {
        let (from, home, mut random) = source(seed);
        let to = Side::new();
        let mut last = None;
        for round in 0..rounds {
            change(&from.pool.dataset(home).unwrap(), &mut random, steps);
            let name = format!("s{round}");
            let txg = from.snapshot(home, &name);
            let what = ToSend { to: Later::Snapshot((home, txg)), from: last.map(|last| earlier((home, last), random.below(2) == 0)), after: Vec::new(), stored: random.below(2) == 0 };
            let receiving = to.pool.receive(into(&to, &name), &head(&from, home, txg, last)).unwrap();
            let id = receiving.target();
            let there = whole(receiving, &sent(&from, &what));
            prop_assert_eq!(from.rows(home, Some(txg)), to.rows(id, Some(there)));
            prop_assert_eq!(to.row(id, there).guid, from.row(home, txg).guid);
            prop_assert_eq!(to.row(id, there).created_at, from.row(home, txg).created_at);
            if random.below(2) == 0 {
                // It is open, and nothing is changed.
                names(&to.pool, id);
            }
            check(&to.pool, &to.storage);
            last = Some(txg);
        }
        let again = Side { pool: Arc::new(reopen(&to.storage)), storage: Arc::clone(&to.storage), top: to.top };
        check(&again.pool, &again.storage);
        names(&again.pool, again.child("copy").unwrap());
    }

    #[test]
    fn a_cut_stream_goes_on_where_it_was(seed: u64, cuts in prop::collection::vec(any::<prop::sample::Index>(), 1..6), crashes: bool, mark: bool) {
        let (from, home, mut random) = source(seed);
        let first = from.snapshot(home, "a");
        change(&from.pool.dataset(home).unwrap(), &mut random, 40);
        let second = from.snapshot(home, "b");
        let mut to = Side::new();
        for (txg, base) in [(first, None), (second, Some(first))] {
            let name = from.row(home, txg).name;
            let mut after = Vec::new();
            for cut in &cuts {
                let what = ToSend { to: Later::Snapshot((home, txg)), from: base.map(|base| earlier((home, base), mark)), after: after.clone(), stored: false };
                let rows = one_by_one(&sent(&from, &what));
                let head = SnapshotHead { after: after.clone(), ..head(&from, home, txg, base) };
                let mut receiving = to.pool.receive(ReceiveInto { resumable: true, ..into(&to, &name) }, &head).unwrap();
                let busy = to.pool.receive(into(&to, &name), &head);
                prop_assert!(matches!(busy, Err(PoolError::Busy)), "two receive at once");
                rows.iter().take(cut.index(rows.len() + 1)).for_each(|row| receiving.rows(row).unwrap());
                let token = receiving.token().clone();
                if crashes {
                    to.pool.commit().unwrap();
                    std::mem::forget(receiving);
                    to.pool = Arc::new(reopen(&to.storage));
                    to.pool.abort_unfinished().unwrap();
                } else {
                    receiving.cut().unwrap();
                }
                let target = to.child("copy");
                if let Some(target) = target.filter(|_| base.is_none()) {
                    prop_assert!(to.pool.dataset(target).is_err(), "what is half received is used");
                }
                after = ResumeToken::parse(&token.text()).unwrap().after;
            }
            let what = ToSend { to: Later::Snapshot((home, txg)), from: base.map(|base| earlier((home, base), mark)), after: after.clone(), stored: false };
            let head = SnapshotHead { after, ..head(&from, home, txg, base) };
            let receiving = to.pool.receive(into(&to, &name), &head).unwrap();
            let id = receiving.target();
            let there = whole(receiving, &sent(&from, &what));
            prop_assert_eq!(from.rows(home, Some(txg)), to.rows(id, Some(there)));
            check(&to.pool, &to.storage);
        }
    }

    #[test]
    fn what_is_half_received_is_sent_on(seed: u64, cut: prop::sample::Index, difference: bool, mark: bool) {
        let (from, home, mut random) = source(seed);
        let first = from.snapshot(home, "a");
        change(&from.pool.dataset(home).unwrap(), &mut random, 40);
        let second = from.snapshot(home, "b");
        let (to, third) = (Side::new(), Side::new());
        let (txg, base) = if difference { (second, Some(first)) } else { (first, None) };
        let what = |after: &[u8]| ToSend { to: Later::Snapshot((home, txg)), from: base.map(|base| earlier((home, base), mark)), after: after.to_vec(), stored: false };
        let name = from.row(home, txg).name;
        let head = |after: &[u8]| SnapshotHead { after: after.to_vec(), ..head(&from, home, txg, base) };
        let resumable = |side: &Side| ReceiveInto { resumable: true, ..into(side, &name) };
        if difference {
            let full = ToSend { to: Later::Snapshot((home, first)), from: None, after: Vec::new(), stored: false };
            for side in [&to, &third] {
                whole(side.pool.receive(into(side, "a"), &self::head(&from, home, first, None)).unwrap(), &sent(&from, &full));
            }
        }
        let rows = one_by_one(&sent(&from, &what(&[])));
        let mut receiving = to.pool.receive(resumable(&to), &head(&[])).unwrap();
        let target = receiving.target();
        prop_assert!(matches!(to.pool.saved(target), Err(PoolError::Busy) | Ok(None)), "sent while it is received");
        rows.iter().take(1 + cut.index(rows.len())).for_each(|row| receiving.rows(row).unwrap());
        let token = receiving.token().clone();
        receiving.cut().unwrap();
        // No changes meanwhile.
        let Some(saved) = to.pool.saved(target).unwrap() else {
            prop_assert!(token.after.is_empty(), "nothing is saved");
            return Ok(());
        };
        prop_assert_eq!(&saved.token, &token);
        prop_assert!(matches!(to.pool.receive(resumable(&to), &head(&token.after)), Err(PoolError::Busy)));
        prop_assert!(matches!(to.pool.abort_receive(to.top, "copy"), Err(PoolError::Busy)));
        prop_assert!(matches!(to.pool.saved(target), Err(PoolError::Busy)));
        let half = ToSend { to: Later::Saved(saved.id), from: saved.base.map(Earlier::Snapshot), after: Vec::new(), stored: false };
        let mut receiving = third.pool.receive(resumable(&third), &head(&[])).unwrap();
        sent(&to, &half).iter().for_each(|payload| receiving.rows(payload).unwrap());
        drop(saved);
        // It may be beyond that of the first receiver, in a range that is stated to be empty.
        let after = receiving.token().after.clone();
        receiving.cut().unwrap();
        // Both resume with the rows that the first sender has.
        for (side, after) in [(&to, token.after), (&third, after)] {
            let receiving = side.pool.receive(into(side, &name), &head(&after)).unwrap();
            let id = receiving.target();
            let there = whole(receiving, &sent(&from, &what(&after)));
            prop_assert_eq!(from.rows(home, Some(txg)), side.rows(id, Some(there)));
            check(&side.pool, &side.storage);
        }
    }
}

#[test]
fn what_is_given_up_leaves_no_trace() {
    let (from, home, mut random) = source(3);
    let first = from.snapshot(home, "a");
    change(&from.pool.dataset(home).unwrap(), &mut random, 40);
    let second = from.snapshot(home, "b");
    let to = Side::new();
    let full = ToSend { to: Later::Snapshot((home, first)), from: None, after: Vec::new(), stored: false };
    let difference =
        ToSend { to: Later::Snapshot((home, second)), from: Some(Earlier::Snapshot((home, first))), ..full.clone() };
    let begin = |base, txg: Txg| to.pool.receive(into(&to, &from.row(home, txg).name), &head(&from, home, txg, base));
    let mut receiving = begin(None, first).unwrap();
    receiving.rows(&sent(&from, &full)[0]).unwrap();
    receiving.abort().unwrap();
    assert_eq!(to.child("copy"), None);
    check(&to.pool, &to.storage);
    whole(begin(None, first).unwrap(), &sent(&from, &full));
    let copy = to.child("copy").unwrap();
    let before = to.rows(copy, None);
    let mut receiving = begin(Some(first), second).unwrap();
    receiving.rows(&sent(&from, &difference)[0]).unwrap();
    assert!(!receiving.cut().unwrap(), "it was not asked to stay");
    assert_eq!(to.rows(copy, None), before);
    assert!(to.pool.admin.lock().catalog.children(copy).unwrap().is_empty());
    check(&to.pool, &to.storage);
    // A kept partial state can be destroyed later.
    let resumable = ReceiveInto { resumable: true, ..into(&to, "b") };
    let mut receiving = to.pool.receive(resumable, &head(&from, home, second, Some(first))).unwrap();
    receiving.rows(&sent(&from, &difference)[0]).unwrap();
    assert!(receiving.cut().unwrap());
    assert!(to.pool.receive(into(&to, "b"), &head(&from, home, second, Some(first))).is_err());
    assert!(to.pool.abort_receive(to.top, "copy").unwrap());
    assert!(!to.pool.abort_receive(to.top, "copy").unwrap());
    assert_eq!(to.rows(copy, None), before);
    check(&to.pool, &to.storage);
}

#[test]
fn a_target_that_has_changed_is_given_up_by_force_only() {
    let (from, home, mut random) = source(5);
    let first = from.snapshot(home, "a");
    change(&from.pool.dataset(home).unwrap(), &mut random, 40);
    let second = from.snapshot(home, "b");
    let to = Side::new();
    let full = ToSend { to: Later::Snapshot((home, first)), from: None, after: Vec::new(), stored: false };
    let difference =
        ToSend { to: Later::Snapshot((home, second)), from: Some(Earlier::Snapshot((home, first))), ..full.clone() };
    let begin =
        |force| to.pool.receive(ReceiveInto { force, ..into(&to, "b") }, &head(&from, home, second, Some(first)));
    assert!(matches!(begin(false), Err(PoolError::Refused(why)) if why.contains("does not exist")));
    let receiving = to.pool.receive(into(&to, "a"), &head(&from, home, first, None)).unwrap();
    let copy = receiving.target();
    whole(receiving, &sent(&from, &full));
    assert!(to.pool.receive(into(&to, "c"), &head(&from, home, first, None)).is_err(), "it is there already");
    put(&to.pool.dataset(copy).unwrap(), "mine", &[1; 200_000]);
    to.pool.commit().unwrap();
    assert!(matches!(begin(false), Err(PoolError::Refused(why)) if why.contains("modified")));
    to.snapshot(copy, "mine");
    assert!(matches!(begin(false), Err(PoolError::Refused(why)) if why.contains("does not match")));
    put(&to.pool.dataset(copy).unwrap(), "more", &[2; 200_000]);
    let there = whole(begin(true).unwrap(), &sent(&from, &difference));
    assert_eq!(from.rows(home, Some(second)), to.rows(copy, Some(there)));
    // Programs that have the file system open see the new files.
    let now = names(&to.pool, copy);
    assert!(!now.contains(&b"mine".to_vec()) && !now.contains(&b"more".to_vec()));
    check(&to.pool, &to.storage);
}

/// Rows as written by a version that does not charge owners for rows.
fn uncharge(side: &Side, id: u64) {
    side.pool.commit().unwrap();
    let dataset = side.pool.dataset(id).unwrap();
    let entered = side.pool.gate.enter();
    dataset.files().with_table(|table| {
        let mut batch = Batch::default();
        let mut sums: BTreeMap<(OwnerKind, u32), u64> = BTreeMap::new();
        let mut uses = BTreeMap::new();
        table
            .scan(keys::head().to_vec()..vec![0xff], &mut |key, row| {
                match Key::decode(key).unwrap() {
                    Key::Inode(_) => {
                        let (inode, rows) = InodeRow::decode_charged(row).unwrap();
                        batch.put(key, inode.encode());
                        for owner in [(OwnerKind::User, inode.uid), (OwnerKind::Group, inode.gid)] {
                            *sums.entry(owner).or_default() += rows;
                        }
                    }
                    Key::OwnerUse(kind, id) => drop(uses.insert((kind, id), OwnerUse::decode(row).unwrap())),
                    Key::Recounted => batch.remove(key),
                    _ => {}
                }
                true
            })
            .unwrap();
        for ((kind, id), mut used) in uses {
            used.bytes -= sums[&(kind, id)];
            batch.put(&keys::owner_use(kind, id), used.encode());
        }
        table.change(entered.txg(), &batch.uncharged()).unwrap();
    });
    drop(entered);
    side.pool.commit().unwrap();
}

#[test]
fn charges_for_rows_are_counted_in_the_background_and_are_no_change() {
    let (from, home, mut random) = source(5);
    change(&from.pool.dataset(home).unwrap(), &mut random, 40);
    let root = from.pool.dataset(home).unwrap().files().root();
    (0..700).for_each(|n| {
        drop(make(&from.pool.dataset(home).unwrap(), &root, &format!("n{n}"), FileType::Regular));
    });
    let uses = |side: &Side, id| {
        let mut uses: Vec<_> = side.pool.owner_uses(id, None).unwrap();
        uses.sort_by_key(|owner| (owner.kind, owner.id));
        uses.into_iter().map(|owner| (owner.kind, owner.id, owner.used)).collect::<Vec<_>>()
    };
    let first = from.snapshot(home, "a");
    let charged = uses(&from, home);
    uncharge(&from, home);
    assert_ne!(uses(&from, home), charged);
    let second = from.snapshot(home, "b");
    let full = ToSend { to: Later::Snapshot((home, first)), from: None, after: Vec::new(), stored: false };
    let difference =
        ToSend { to: Later::Snapshot((home, second)), from: Some(Earlier::Snapshot((home, first))), ..full.clone() };
    assert_eq!(sent(&from, &difference), Vec::<Vec<u8>>::new());
    let to = Side::new();
    let receiving = to.pool.receive(into(&to, "a"), &head(&from, home, first, None)).unwrap();
    let copy = receiving.target();
    whole(receiving, &sent(&from, &full));
    assert_eq!(uses(&to, copy), charged);
    let row = |key: &[u8]| to.pool.dataset(copy).unwrap().files().with_table(|table| table.get(key).unwrap());
    assert_eq!(row(&keys::recounted()), Some(u64::MAX.to_be_bytes().to_vec()), "all of it came with charges");
    uncharge(&to, copy);
    let dataset = to.pool.dataset(copy).unwrap();
    let steps = (0..100).take_while(|_| dataset.files().recount_rows().unwrap()).count();
    assert!((3..100).contains(&steps), "{steps} steps");
    assert!(!dataset.files().recount_rows().unwrap(), "it is counted once");
    to.pool.commit().unwrap();
    // The names of an inode count like the one that it hints at: a few bytes off.
    for (recounted, charged) in uses(&to, copy).into_iter().zip(&charged) {
        assert_eq!(recounted.2.objects, charged.2.objects);
        assert!(recounted.2.bytes.abs_diff(charged.2.bytes) < 1000, "{recounted:?} {charged:?}");
    }
    check(&to.pool, &to.storage);
    let receiving = to.pool.receive(into(&to, "b"), &head(&from, home, second, Some(first))).unwrap();
    whole(receiving, &[]);
}

#[test]
fn a_clone_is_sent_as_the_difference_to_its_origin() {
    let (from, home, mut random) = source(8);
    let first = from.snapshot(home, "a");
    let clone = from.pool.clone_snapshot(home, "a", &NewDataset::named(from.top, "trial")).unwrap();
    change(&from.pool.dataset(clone).unwrap(), &mut random, 40);
    let second = from.snapshot(clone, "b");
    let to = Side::new();
    let full = ToSend { to: Later::Snapshot((home, first)), from: None, after: Vec::new(), stored: false };
    whole(to.pool.receive(into(&to, "a"), &head(&from, home, first, None)).unwrap(), &sent(&from, &full));
    let row = from.row(clone, second);
    let guid = from.row(home, first).guid;
    let head = SnapshotHead { guid: row.guid, from: guid, clone: true, ..SnapshotHead::default() };
    let into = ReceiveInto { name: "trial".into(), ..into(&to, "b") };
    let difference =
        ToSend { to: Later::Snapshot((clone, second)), from: Some(Earlier::Snapshot((home, first))), ..full };
    let receiving = to.pool.receive(into, &head).unwrap();
    let id = receiving.target();
    let there = whole(receiving, &sent(&from, &difference));
    assert_eq!(from.rows(clone, Some(second)), to.rows(id, Some(there)));
    let origin = to.pool.admin.lock().catalog.dataset(id).unwrap().origin;
    assert_eq!(origin.unwrap().0, to.child("copy").unwrap());
    check(&to.pool, &to.storage);
}

#[test]
fn rows_that_are_none_are_refused() {
    let (from, home, _) = source(9);
    let first = from.snapshot(home, "a");
    let to = Side::new();
    let mut receiving = to.pool.receive(into(&to, "a"), &head(&from, home, first, None)).unwrap();
    let row = |key: &[u8], value: &[u8]| {
        let mut to = Writer::default();
        crate::send_stream::RowOp::Put { key, value }.encode(&mut to);
        to.finish()
    };
    let pointer = to.pool.admin.lock().catalog.dataset(to.top).unwrap().root.unwrap();
    let pointer = Pointer { kind: crate::FrameKind::Data, ..pointer };
    for wrong in [
        row(&keys::owner_use(crate::rows::OwnerKind::User, 0), &[1, 1]),
        row(&keys::received(), &[1]),
        row(&keys::inode(4), &[0xff; 30]),
        row(&keys::extent(4, 0), &Extent::Frame(pointer).encode()),
        row(&[0x77], b""),
    ] {
        assert!(receiving.rows(&wrong).is_err());
    }
    assert!(matches!(receiving.rows(&[9, 9, 9]), Err(StreamError::Damaged(_))));
    receiving.abort().unwrap();
    check(&to.pool, &to.storage);
}

#[test]
fn all_of_a_file_system_is_overwritten_by_force() {
    let (from, home, _) = source(11);
    let first = from.snapshot(home, "a");
    let to = Side::new();
    let copy = to.pool.create_dataset(&NewDataset::named(to.top, "copy")).unwrap();
    let used = to.pool.dataset(copy).unwrap();
    put(&used, "mine", &[1; 200_000]);
    let full = ToSend { to: Later::Snapshot((home, first)), from: None, after: Vec::new(), stored: false };
    let begin = |force| to.pool.receive(ReceiveInto { force, ..into(&to, "a") }, &head(&from, home, first, None));
    assert!(matches!(begin(false), Err(PoolError::Refused(why)) if why.contains("-F")));
    let mut receiving = begin(true).unwrap();
    sent(&from, &full).iter().for_each(|payload| receiving.rows(payload).unwrap());
    assert!(receiving.overwrites());
    assert!(matches!(receiving.finish(), Err(PoolError::Busy)), "somebody uses it");
    drop(used);
    let there = receiving.finish().unwrap();
    assert_eq!(from.rows(home, Some(first)), to.rows(copy, Some(there)));
    // Names are found, not only listed.
    let dataset = to.pool.dataset(copy).unwrap();
    for name in names(&to.pool, copy) {
        dataset.files().look_up(&dataset.files().root(), &name).unwrap();
    }
    check(&to.pool, &to.storage);
}

#[test]
fn a_bookmark_is_enough_for_a_difference() {
    let (from, home, mut random) = source(13);
    let dataset = from.pool.dataset(home).unwrap();
    let root = dataset.files().root();
    let name = |n: u32| format!("file-{n}-{}", "x".repeat(60));
    (0..6000).for_each(|n| drop(make(&dataset, &root, &name(n), FileType::Regular)));
    put(&dataset, "large", &vec![1; 3 << 20]);
    let first = from.snapshot(home, "a");
    from.pool.bookmark(home, "a", "mark").unwrap();
    let to = Side::new();
    let full = ToSend { to: Later::Snapshot((home, first)), from: None, after: Vec::new(), stored: false };
    whole(to.pool.receive(into(&to, "a"), &head(&from, home, first, None)).unwrap(), &sent(&from, &full));
    let guid = from.row(home, first).guid;
    from.pool.destroy_snapshot(home, "a", false).unwrap();
    // Whole nodes disappear without a row of removal, and all remaining rows are unchanged.
    for gone in [500..2500, 3000..3001, 5000..6000] {
        gone.for_each(|n| dataset.files().unlink(&root, name(n).as_bytes()).unwrap());
        from.pool.commit().unwrap();
    }
    change(&dataset, &mut random, 20);
    let second = from.snapshot(home, "b");
    let what = ToSend { to: Later::Snapshot((home, second)), from: Some(Earlier::Bookmark(first)), ..full };
    let payloads = sent(&from, &what);
    assert!(payloads.iter().map(Vec::len).sum::<usize>() < 2 << 20, "what was there is sent again");
    let head = SnapshotHead { from: guid, ..head(&from, home, second, None) };
    let receiving = to.pool.receive(into(&to, "b"), &head).unwrap();
    let id = receiving.target();
    let there = whole(receiving, &payloads);
    assert_eq!(from.rows(home, Some(second)), to.rows(id, Some(there)));
    check(&to.pool, &to.storage);
}

#[test]
fn properties_come_with_the_snapshot() {
    let (from, home, mut random) = source(17);
    let first = from.snapshot(home, "a");
    change(&from.pool.dataset(home).unwrap(), &mut random, 40);
    let second = from.snapshot(home, "b");
    let to = Side::new();
    let full = ToSend { to: Later::Snapshot((home, first)), from: None, after: Vec::new(), stored: false };
    let difference =
        ToSend { to: Later::Snapshot((home, second)), from: Some(Earlier::Snapshot((home, first))), ..full.clone() };
    let bringing = |properties: &[(&str, Setting)], name: &str| ReceiveInto {
        properties: properties.iter().map(|(name, to)| ((*name).to_owned(), to.clone())).collect(),
        of_snapshot: vec![("a:b".into(), Setting::Received("1".into()))],
        holds: vec!["keep".into()],
        ..into(&to, name)
    };
    let received = |value: &str| Setting::Received(value.to_owned());
    let begun = to
        .pool
        .receive(bringing(&[("compression", Setting::Local("nonsense".into()))], "a"), &head(&from, home, first, None));
    assert!(begun.is_err(), "what is no value is refused first");
    assert_eq!(to.child("copy"), None);
    let new = [("compression", received("zstd")), ("quota", received("1000"))];
    let mut receiving = to.pool.receive(bringing(&new, "a"), &head(&from, home, first, None)).unwrap();
    sent(&from, &full).iter().for_each(|payload| receiving.rows(payload).unwrap());
    receiving.finish().unwrap();
    let id = receiving.target();
    // Its contents exceed the quota: the quota is skipped, and nothing else.
    let left: Vec<&str> = receiving.left_out().iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(left, ["quota"]);
    let stored = |pool: &Pool| {
        let rows = pool.admin.lock().catalog.properties(id).unwrap().into_iter();
        let mut rows: Vec<String> = rows.map(|(name, row)| format!("{name} {:?} {}", row.source, row.value)).collect();
        rows.retain(|row| ["compression", "quota", "atime"].iter().any(|name| row.starts_with(name)));
        rows.sort();
        rows
    };
    assert_eq!(stored(&to.pool), ["compression Received zstd"]);
    let more = [
        ("quota", received("1000000000")),
        ("compression", received("lz4")),
        ("atime", received("off")),
        ("atime", Setting::Inherit),
    ];
    whole(
        to.pool.receive(bringing(&more, "b"), &head(&from, home, second, Some(first))).unwrap(),
        &sent(&from, &difference),
    );
    // Durable with the snapshot, without another commit.
    let again = Arc::new(reopen(&to.storage));
    let wanted = ["atime Masked ", "atime Received off", "compression Received lz4", "quota Received 1000000000"];
    assert_eq!(stored(&again), wanted);
    let admin = again.admin.lock();
    for (txg, row) in admin.catalog.snapshots(id).unwrap() {
        assert_eq!(admin.catalog.snapshot_properties(id, txg).unwrap()[0].0, "a:b");
        assert_eq!((row.holds, admin.catalog.holds(id, txg).unwrap().len()), (1, 1));
    }
    drop(admin);
    check(&again, &to.storage);
}
