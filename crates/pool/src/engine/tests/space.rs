//! Space: admitted writes find room, limits hold at every moment, deletes succeed, and figures are
//! exact.

use super::*;
use crate::engine::{Edit, Setting};
use crate::files::FileError;
use crate::space::{Purpose, usable};

const MIB: u64 = 1 << 20;

fn small(size: u64) -> (Arc<MapStorage>, Arc<Pool>) {
    let storage = Arc::new(MapStorage::default());
    storage.size.store(size, Ordering::Relaxed);
    let pool = Arc::new(Pool::create(config(&storage), "tank").unwrap());
    pool.make_room_by_commits();
    (storage, pool)
}

fn local(dataset: u64, name: &str, value: &str) -> Edit {
    Edit { dataset, name: name.to_owned(), to: Setting::Local(value.to_owned()) }
}

fn plain(dataset: &Dataset, name: &str, owner: u32) -> crate::files::Result<Arc<Inode>> {
    let new = |parent: &ParentView| {
        let mut row = InodeRow::new(FileType::Regular, 0o644, parent.now);
        (row.uid, row.gid) = (owner, owner);
        Ok(NewInode { row, target: None, attributes: Vec::new() })
    };
    dataset.files().make(&dataset.files().root(), name.as_bytes(), b"", &new).map(|(inode, _)| inode)
}

/// Writes until an error; returns the accepted bytes, and the error.
fn fill(dataset: &Dataset, inode: &Arc<Inode>, piece: usize) -> (u64, FileError) {
    let data: Vec<u8> = (0..piece).map(|at| (at % 251) as u8 + 1).collect();
    let mut accepted = 0;
    loop {
        match dataset.files().write(inode, None, &data) {
            Ok(outcome) => accepted += outcome.written as u64,
            Err(refusal) => return (accepted, refusal),
        }
    }
}

#[test]
fn a_full_pool_refuses_the_writing_call_and_keeps_all_that_it_accepted() {
    let (storage, pool) = small(256 * MIB);
    let top = pool.root().unwrap();
    let dataset = pool.dataset(top).unwrap();
    let file = plain(&dataset, "a", 0).unwrap();
    let (accepted, refusal) = fill(&dataset, &file, 3 << 15);
    assert!(matches!(refusal, FileError::Pool(PoolError::NoSpace)), "{refusal:?}");
    let line = usable(256 * MIB, Purpose::Write);
    assert!(accepted > line - 2 * MIB && accepted < line, "{accepted} of {line}");
    let used = pool.space(top).unwrap().0.used;
    assert!(used <= line, "{used} of {line}, {accepted} accepted");
    // It stays full, and reports this without a commit each time.
    assert!(dataset.files().write(&file, None, &[1; 200_000]).is_err());
    // Deleted space is available for the next write at once.
    dataset.files().unlink(&dataset.files().root(), b"a").unwrap();
    drop(file);
    let file = plain(&dataset, "b", 0).unwrap();
    assert_eq!(dataset.files().write(&file, None, &[1; 1 << 20]).unwrap().written, 1 << 20);
    check(&pool, &storage);
    let (accepted, _) = fill(&dataset, &file, 1 << 17);
    pool.commit().unwrap();
    drop((dataset, file, pool));
    let pool = reopen(&storage);
    let files = contents(pool.dataset(top).unwrap().files());
    assert_eq!(files["b"].len() as u64, accepted + (1 << 20));
    check(&pool, &storage);
}

#[test]
fn quotas_refuse_the_writing_call_and_are_never_overrun() {
    let (storage, pool) = small(1 << 30);
    let top = pool.root().unwrap();
    let properties = vec![("quota".to_owned(), "20M".to_owned())];
    let home = pool.create_dataset(&NewDataset { parent: top, name: "home".to_owned(), properties }).unwrap();
    let user = pool.create_dataset(&NewDataset::named(home, "user")).unwrap();
    let dataset = pool.dataset(user).unwrap();
    let file = plain(&dataset, "a", 0).unwrap();
    let (accepted, refusal) = fill(&dataset, &file, 100_000);
    assert!(matches!(refusal, FileError::Quota), "{refusal:?}");
    assert!(accepted > 19 * MIB, "{accepted}");
    pool.commit().unwrap();
    assert!(pool.space(home).unwrap().0.used <= 20 * MIB);
    pool.set_properties(&[local(home, "quota", "40M"), local(user, "refquota", "30M")]).unwrap();
    assert!(matches!(fill(&dataset, &file, 50_000).1, FileError::Quota));
    pool.commit().unwrap();
    assert!(pool.space(user).unwrap().1.referenced <= 30 * MIB);
    // Snapshots are not in the refquota, and are in the quota above.
    pool.snapshot(&[(user, "s".to_owned())]).unwrap();
    dataset.files().unlink(&dataset.files().root(), b"a").unwrap();
    drop(file);
    let file = plain(&dataset, "b", 0).unwrap();
    let (accepted, _) = fill(&dataset, &file, 50_000);
    pool.commit().unwrap();
    assert!((8 * MIB..11 * MIB).contains(&accepted), "{accepted}");
    assert!(pool.space(home).unwrap().0.used <= 40 * MIB);
    let refused = pool.set_properties(&[local(home, "quota", "10M")]);
    assert!(matches!(refused, Err(PoolError::Limit { .. })), "{refused:?}");
    assert!(matches!(pool.set_properties(&[local(home, "quota", "0")]), Err(PoolError::Property(_))));
    check(&pool, &storage);
    // Limits are there after an import as well.
    drop((dataset, file, pool));
    let pool = reopen(&storage);
    let dataset = pool.dataset(user).unwrap();
    let (file, _) = dataset.files().look_up(&dataset.files().root(), b"b").unwrap();
    assert!(
        matches!(dataset.files().write(&file, None, &[1; 2 << 20]), Ok(outcome) if outcome.written < 2 << 20)
            || fill(&dataset, &file, 50_000).0 < MIB
    );
}

#[test]
fn reservations_are_kept_for_their_owner() {
    let (_, pool) = small(512 * MIB);
    let top = pool.root().unwrap();
    let kept = pool.create_dataset(&NewDataset {
        parent: top,
        name: "kept".to_owned(),
        properties: vec![("reservation".to_owned(), "100M".to_owned())],
    });
    let kept = kept.unwrap();
    let other = pool.create_dataset(&NewDataset::named(top, "other")).unwrap();
    let dataset = pool.dataset(other).unwrap();
    let file = plain(&dataset, "a", 0).unwrap();
    let (accepted, refusal) = fill(&dataset, &file, 1 << 17);
    assert!(matches!(refusal, FileError::Pool(PoolError::NoSpace)));
    let line = usable(512 * MIB, Purpose::Write);
    assert!(accepted < line - 100 * MIB && accepted > line - 105 * MIB, "{accepted}");
    let owner = pool.dataset(kept).unwrap();
    let file = plain(&owner, "a", 0).unwrap();
    let (accepted, _) = fill(&owner, &file, 1 << 17);
    assert!(accepted > 95 * MIB, "{accepted}");
    let refused = pool.set_properties(&[local(other, "refreservation", "50M")]);
    assert!(refused.is_ok(), "covered by what it holds: {refused:?}");
    // A snapshot would need all of it anew.
    assert!(matches!(pool.snapshot(&[(other, "s".to_owned())]), Err(PoolError::NoSpace)));
}

#[test]
fn owners_have_quotas() {
    let (_, pool) = small(1 << 30);
    let top = pool.root().unwrap();
    let dataset = pool.dataset(top).unwrap();
    pool.set_properties(&[local(top, "userquota@7", "5M"), local(top, "groupobjquota@7", "3")]).unwrap();
    let file = plain(&dataset, "a", 7).unwrap();
    let (accepted, refusal) = fill(&dataset, &file, 70_000);
    assert!(matches!(refusal, FileError::Quota));
    assert!(accepted <= 5 * MIB && accepted > 5 * MIB - 300_000, "{accepted}");
    let free = plain(&dataset, "b", 8).unwrap();
    assert_eq!(dataset.files().write(&free, None, &[1; 1 << 20]).unwrap().written, 1 << 20);
    plain(&dataset, "c", 7).unwrap();
    plain(&dataset, "d", 7).unwrap();
    assert!(matches!(plain(&dataset, "e", 7), Err(FileError::Quota)));
    let change = crate::files::AttributeChange { uid: Some(7), ..Default::default() };
    assert!(matches!(dataset.files().set_attributes(&free, &change), Err(FileError::Quota)));
    dataset.files().unlink(&dataset.files().root(), b"d").unwrap();
    plain(&dataset, "e", 7).unwrap();
    pool.set_properties(&[local(top, "userquota@7", "none")]).unwrap();
    assert_eq!(dataset.files().write(&file, None, &[1; 1 << 20]).unwrap().written, 1 << 20);
}

#[test]
fn owners_without_quotas_have_those_of_all() {
    let (_, pool) = small(1 << 30);
    let top = pool.root().unwrap();
    let dataset = pool.dataset(top).unwrap();
    assert!(!dataset.files().has_owner_quotas());
    pool.set_properties(&[
        local(top, "defaultuserquota", "5M"),
        local(top, "defaultgroupobjquota", "3"),
        local(top, "userquota@8", "9M"),
    ])
    .unwrap();
    assert!(dataset.files().has_owner_quotas());
    for (name, owner, most) in [("a", 7, 5 * MIB), ("b", 8, 9 * MIB)] {
        let file = plain(&dataset, name, owner).unwrap();
        let (accepted, refusal) = fill(&dataset, &file, 70_000);
        assert!(matches!(refusal, FileError::Quota));
        assert!(accepted <= most && accepted > most - 300_000, "{owner}: {accepted}");
    }
    plain(&dataset, "c", 7).unwrap();
    plain(&dataset, "d", 7).unwrap();
    assert!(matches!(plain(&dataset, "e", 7), Err(FileError::Quota)));
    let quota = |uid| {
        pool.owner_uses(top, None)
            .unwrap()
            .iter()
            .find(|owner| owner.id == uid && owner.kind == crate::rows::OwnerKind::User)
            .unwrap()
            .quota
    };
    assert_eq!((quota(7).bytes, quota(8).bytes, quota(0).bytes), (Some(5 * MIB), Some(9 * MIB), Some(5 * MIB)));
    pool.set_properties(&[local(top, "defaultuserquota", "none"), local(top, "defaultgroupobjquota", "none")]).unwrap();
    assert_eq!(quota(8).bytes, Some(9 * MIB));
    plain(&dataset, "e", 7).unwrap();
    assert!(pool.set_properties(&[local(top, "defaultuserquota", "0")]).is_err(), "none is meant");
}

#[test]
fn an_attribute_that_is_refused_keeps_its_old_value() {
    let (storage, pool) = small(1 << 30);
    let dataset = pool.dataset(pool.root().unwrap()).unwrap();
    let file = plain(&dataset, "a", 7).unwrap();
    let set = |content: u8, length| dataset.files().set_attribute(&file, b"user.a", &vec![content; length], None, None);
    set(1, 60_000).unwrap();
    // A replacement of the same size is not refused for its owner.
    for (name, limit, length) in [("quota", "70K", 60_000), ("userquota@7", "62K", 65_536)] {
        pool.commit().unwrap();
        pool.set_properties(&[local(dataset.id(), name, limit)]).unwrap();
        let refused = (2..60).find_map(|content| set(content, length).err());
        assert!(matches!(refused, Some(FileError::Quota)), "{name}: {refused:?}");
        // The frame that the row still names must not have been given back.
        pool.commit().unwrap();
        assert_eq!(dataset.files().attribute(&file, b"user.a").unwrap().len(), 60_000);
        check(&pool, &storage);
        pool.set_properties(&[local(dataset.id(), name, "none")]).unwrap();
    }
    dataset.files().remove_attribute(&file, b"user.a").unwrap();
    pool.commit().unwrap();
    check(&pool, &storage);
}

#[test]
fn properties_take_effect_on_open_datasets() {
    let (_, pool) = small(1 << 30);
    let top = pool.root().unwrap();
    let below = pool.create_dataset(&NewDataset::named(top, "below")).unwrap();
    let dataset = pool.dataset(below).unwrap();
    pool.set_properties(&[local(top, "readonly", "on"), local(top, "recordsize", "4K")]).unwrap();
    assert!(matches!(plain(&dataset, "a", 0), Err(FileError::ReadOnly)));
    assert!(dataset.behaviour().readonly);
    pool.set_properties(&[local(below, "readonly", "off")]).unwrap();
    let file = plain(&dataset, "a", 0).unwrap();
    dataset.files().write(&file, None, &[1; 10_000]).unwrap();
    assert_eq!(dataset.files().attributes(&file).unwrap().record_shift, 12);
    let received = Edit { dataset: below, name: "compression".to_owned(), to: Setting::Received("zstd".to_owned()) };
    pool.set_properties(&[received]).unwrap();
    assert_eq!(dataset.behaviour().compression, CompressionSetting::Zstd(3));
    let edit = |to| Edit { dataset: below, name: "compression".to_owned(), to };
    pool.set_properties(&[edit(Setting::Local("off".to_owned()))]).unwrap();
    assert_eq!(dataset.behaviour().compression, CompressionSetting::Off);
    pool.set_properties(&[edit(Setting::Inherit)]).unwrap();
    assert_eq!(dataset.behaviour().compression, CompressionSetting::On);
    pool.set_properties(&[edit(Setting::BackToReceived)]).unwrap();
    assert_eq!(dataset.behaviour().compression, CompressionSetting::Zstd(3));
    // All or none.
    let both = [local(below, "atime", "off"), local(below, "quota", "nonsense")];
    assert!(matches!(pool.set_properties(&both), Err(PoolError::Property(_))));
    assert!(dataset.behaviour().atime);
}

#[test]
fn numbers_of_file_systems_and_snapshots_are_limited() {
    let (_, pool) = small(1 << 30);
    let top = pool.root().unwrap();
    pool.set_properties(&[local(top, "filesystem_limit", "1"), local(top, "snapshot_limit", "2")]).unwrap();
    let a = pool.create_dataset(&NewDataset::named(top, "a")).unwrap();
    let refused = pool.create_dataset(&NewDataset::named(a, "b"));
    assert!(matches!(refused, Err(PoolError::CountLimit { what: "filesystem", .. })), "{refused:?}");
    pool.snapshot(&[(top, "s".to_owned()), (a, "s".to_owned())]).unwrap();
    let refused = pool.snapshot(&[(a, "t".to_owned())]);
    assert!(matches!(refused, Err(PoolError::CountLimit { what: "snapshot", .. })), "{refused:?}");
    pool.destroy_snapshot(top, "s", false).unwrap();
    pool.snapshot(&[(a, "t".to_owned())]).unwrap();
}

/// Number of steps of a test: more for campaigns by hand.
fn rounds() -> u64 {
    std::env::var("NACRE_POOL_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(1)
}

/// A reproducible generator of random numbers.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, most: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % most.max(1)
    }

    /// Incompressible bytes.
    fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length.div_ceil(8))
            .flat_map(|_| {
                (self.below(1 << 31) << 32 | self.below(1 << 31)).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()
            })
            .take(length)
            .collect()
    }
}

/// Asserts that the file has the accepted content.
fn same(dataset: &Dataset, model: &BTreeMap<String, Vec<u8>>) {
    assert!(contents(dataset.files()) == *model, "the content is not what was accepted");
}

/// Writes, overwrites, deletes and snapshots on a pool that is full most of the time, over the real
/// store.
fn torture_full(seed: u64, steps: u64) {
    let device = Arc::new(crate::device::Simulator::new("disk", 96 << 20));
    let pool = Arc::new(on_device(&device, true));
    pool.make_room_by_commits();
    let top = pool.root().unwrap();
    let home = pool.create_dataset(&NewDataset::named(top, "home")).unwrap();
    let (mut numbers, mut model, mut refused) = (Numbers(seed), BTreeMap::<String, Vec<u8>>::new(), 0u64);
    for step in 0..steps {
        let dataset = pool.dataset(home).unwrap();
        let root = dataset.files().root();
        let name = format!("f{}", numbers.below(40));
        match numbers.below(20) {
            0..12 => {
                let (offset, length) = match model.get(&name) {
                    Some(content) => (numbers.below(content.len() as u64 + 1), 1 + numbers.below(600_000) as usize),
                    None => (0, 1 + numbers.below(3 << 20) as usize),
                };
                let file = match dataset.files().look_up(&root, name.as_bytes()) {
                    Ok((file, _)) => Ok(file),
                    Err(_) => plain(&dataset, &name, 0),
                };
                let Ok(file) = file else {
                    refused += 1;
                    continue;
                };
                let data = numbers.bytes(length);
                let content = model.entry(name).or_default();
                match dataset.files().write(&file, Some(offset), &data) {
                    Ok(done) => {
                        let end = offset as usize + done.written;
                        content.resize(content.len().max(end), 0);
                        content[offset as usize..end].copy_from_slice(&data[..done.written]);
                        refused += u64::from(done.written < length);
                    }
                    Err(FileError::Pool(PoolError::NoSpace)) => refused += 1,
                    Err(error) => panic!("{error}"),
                }
            }
            12..16 => {
                if model.remove(&name).is_some() {
                    dataset.files().unlink(&root, name.as_bytes()).unwrap();
                }
            }
            16 => {
                if let Some(content) = model.get_mut(&name) {
                    let size = numbers.below(content.len() as u64 + 1);
                    let (file, _) = dataset.files().look_up(&root, name.as_bytes()).unwrap();
                    let change = crate::files::AttributeChange { size: Some(size), ..Default::default() };
                    dataset.files().set_attributes(&file, &change).unwrap();
                    content.truncate(size as usize);
                }
            }
            17 => drop(pool.snapshot(&[(home, format!("s{step}"))]).unwrap()),
            18 => {
                if let Some((_, row, _)) = pool.snapshots(home).unwrap().first() {
                    pool.destroy_snapshot(home, &row.name, false).unwrap();
                }
            }
            _ => drop(pool.commit().unwrap()),
        }
    }
    assert!(refused > 0, "it never was full");
    // Every delete gives space back.
    for (_, row, _) in pool.snapshots(home).unwrap() {
        pool.destroy_snapshot(home, &row.name, false).unwrap();
    }
    let dataset = pool.dataset(home).unwrap();
    same(&dataset, &model);
    for name in model.keys() {
        dataset.files().unlink(&dataset.files().root(), name.as_bytes()).unwrap();
    }
    let file = plain(&dataset, "last", 0).unwrap();
    let data = numbers.bytes(20 << 20);
    let mut written = 0;
    while written < data.len() {
        written += dataset.files().write(&file, Some(written as u64), &data[written..]).unwrap().written;
    }
    pool.commit().unwrap();
    drop((dataset, file));
    drop(pool);
    let pool = on_device(&device, false);
    same(&pool.dataset(home).unwrap(), &BTreeMap::from([("last".to_owned(), data)]));
}

#[test]
fn a_full_store_loses_nothing_that_was_accepted() {
    println!("campaign: seeds 1 to {} (NACRE_POOL_ROUNDS)", rounds());
    for seed in 0..rounds() {
        torture_full(seed + 1, 250);
    }
}

#[test]
fn a_file_system_in_use_is_rolled_back_in_place() {
    let (storage, pool) = small(1 << 30);
    let top = pool.root().unwrap();
    let home = pool.create_dataset(&NewDataset::named(top, "home")).unwrap();
    let dataset = pool.dataset(home).unwrap();
    put(&dataset, "a", &[1; 300_000]);
    put(&dataset, "b", &[2; 100]);
    let (b, _) = dataset.files().look_up(&dataset.files().root(), b"b").unwrap();
    pool.snapshot(&[(home, "s".to_owned())]).unwrap();
    put(&dataset, "a", &[3; 200_000]);
    dataset.files().unlink(&dataset.files().root(), b"b").unwrap();
    put(&dataset, "c", &[4; 400_000]);
    let (c, _) = dataset.files().look_up(&dataset.files().root(), b"c").unwrap();
    pool.commit().unwrap();
    dataset.files().write(&c, None, &[5; 70_000]).unwrap();
    pool.roll_back(home, "s").unwrap();
    let expected = Tree::from([("a".to_owned(), vec![1; 300_000]), ("b".to_owned(), vec![2; 100])]);
    assert!(contents(dataset.files()) == expected);
    // Holders of inodes that exist in the snapshot still have them; later inodes are gone.
    assert_eq!(dataset.files().attributes(&b).unwrap().links, 1);
    assert!(matches!(dataset.files().attributes(&c), Err(FileError::NotFound)));
    assert!(dataset.files().write(&c, None, &[1; 10]).is_err());
    assert_eq!(dataset.files().write(&b, None, &[7; 10]).unwrap().offset, 100);
    put(&dataset, "d", &[6; 10]);
    check(&pool, &storage);
    let later = contents(dataset.files());
    drop((dataset, b, c, pool));
    let pool = reopen(&storage);
    assert!(contents(pool.dataset(home).unwrap().files()) == later);
    check(&pool, &storage);
}

#[test]
fn a_rollback_beside_writers_leaves_a_state_that_they_go_on_from() {
    let (storage, pool) = small(1 << 30);
    let top = pool.root().unwrap();
    let dataset = pool.dataset(top).unwrap();
    put(&dataset, "a", &[1; 300_000]);
    pool.snapshot(&[(top, "s".to_owned())]).unwrap();
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let writers: Vec<_> = (0..3u8)
        .map(|number| {
            let (dataset, stop) = (Arc::clone(&dataset), Arc::clone(&stop));
            std::thread::spawn(move || {
                let mut rounds = 0u32;
                while !stop.load(Ordering::Relaxed) {
                    rounds += 1;
                    let name = format!("w{number}-{}", rounds % 7);
                    // Content that was rolled back under a writer does not exist any more.
                    if let Ok(file) = plain(&dataset, &name, 0) {
                        let _ = dataset.files().write(&file, None, &vec![number; 200_000]);
                    }
                    if rounds.is_multiple_of(3) {
                        let _ = dataset.files().unlink(&dataset.files().root(), name.as_bytes());
                    }
                }
            })
        })
        .collect();
    for _ in 0..20 {
        pool.roll_back(top, "s").unwrap();
        pool.commit().unwrap();
    }
    stop.store(true, Ordering::Relaxed);
    writers.into_iter().for_each(|writer| writer.join().unwrap());
    check(&pool, &storage);
    pool.roll_back(top, "s").unwrap();
    assert!(contents(dataset.files()) == Tree::from([("a".to_owned(), vec![1; 300_000])]));
    check(&pool, &storage);
}

#[derive(Clone, Debug)]
enum Move {
    Write(u8, u8, u32),
    Remove(u8, u8),
    Share(u8, u8, u8),
    Snapshot(u8),
    Destroy(u8),
    RollBack(u8),
    Set(u8, u8, Option<u8>),
    Commit,
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let one = prop_oneof![
        10 => (any::<u8>(), 0u8..6, 0u32..3_000_000).prop_map(|(a, b, c)| Move::Write(a, b, c)),
        3 => (any::<u8>(), 0u8..6).prop_map(|(a, b)| Move::Remove(a, b)),
        2 => (any::<u8>(), 0u8..6, 0u8..6).prop_map(|(a, b, c)| Move::Share(a, b, c)),
        2 => any::<u8>().prop_map(Move::Snapshot),
        2 => any::<u8>().prop_map(Move::Destroy),
        1 => any::<u8>().prop_map(Move::RollBack),
        5 => (any::<u8>(), 0u8..4, proptest::option::of(1u8..40)).prop_map(|(a, b, c)| Move::Set(a, b, c)),
        3 => Just(Move::Commit),
    ];
    proptest::collection::vec(one, 1..60)
}

/// Margin by which limits may be exceeded: rows of operations that free space, which no quota
/// refuses.
const SLACK: u64 = 64 << 10;

fn within(pool: &Pool, ids: &[u64], before: &mut BTreeMap<u64, u64>) {
    for id in ids {
        let limits = pool.admin.lock().quota_tree().limits(*id).unwrap();
        let (figures, usage, _) = pool.space(*id).unwrap();
        // Snapshots keep what the live dataset drops: an overwritten or deleted file may still
        // count.
        let most = limits.quota.map_or(u64::MAX, |quota| quota.max(before.get(id).copied().unwrap_or(0)) + SLACK);
        assert!(figures.used <= most, "{} used of {most} by {id}", figures.used);
        assert!(limits.refquota.is_none_or(|limit| usage.referenced <= limit + SLACK), "{usage:?} {limits:?}");
        before.insert(*id, figures.used);
    }
}

fn apply(pool: &Pool, ids: &[u64], step: &Move) {
    let pick = |by: u8| ids[by as usize % ids.len()];
    let name = |number: u8| format!("f{number}");
    match *step {
        Move::Write(d, n, length) => {
            let dataset = pool.dataset(pick(d)).unwrap();
            let file = match dataset.files().look_up(&dataset.files().root(), name(n).as_bytes()) {
                Ok((file, _)) => file,
                Err(_) => match plain(&dataset, &name(n), u32::from(n)) {
                    Ok(file) => file,
                    Err(_) => return,
                },
            };
            let offset = u64::from(length) * 7 % 500_000;
            match dataset.files().write(&file, Some(offset), &vec![n + 1; length as usize]) {
                Ok(_) | Err(FileError::Quota | FileError::Pool(PoolError::NoSpace)) => {}
                Err(error) => panic!("{error}"),
            }
        }
        Move::Remove(d, n) => {
            let dataset = pool.dataset(pick(d)).unwrap();
            match dataset.files().unlink(&dataset.files().root(), name(n).as_bytes()) {
                Ok(_) | Err(FileError::NotFound) => {}
                Err(error) => panic!("what deletes is refused: {error}"),
            }
        }
        Move::Share(d, a, b) => {
            let dataset = pool.dataset(pick(d)).unwrap();
            let root = dataset.files().root();
            let find = |n| dataset.files().look_up(&root, name(n).as_bytes());
            if let (Ok((from, row)), Ok((to, _))) = (find(a), find(b)) {
                let _ = dataset.files().share(&from, &to, crate::files::Range { from: 0, to: 0, length: row.size });
            }
        }
        Move::Snapshot(d) => drop(pool.snapshot(&[(pick(d), format!("s{}", pool.committed.load(Ordering::Relaxed)))])),
        Move::Destroy(d) => {
            if let Some((_, row, _)) = pool.snapshots(pick(d)).unwrap().first() {
                pool.destroy_snapshot(pick(d), &row.name, false).unwrap();
            }
        }
        Move::RollBack(d) => {
            if let Some((_, row, _)) = pool.snapshots(pick(d)).unwrap().last() {
                pool.roll_back(pick(d), &row.name).unwrap();
            }
        }
        Move::Set(d, which, size) => {
            let name = ["quota", "refquota", "reservation", "refreservation"][which as usize];
            let value = size.map_or_else(|| "none".to_owned(), |size| format!("{size}M"));
            match pool.set_properties(&[local(pick(d), name, &value)]) {
                Ok(_) | Err(PoolError::Limit { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
        Move::Commit => drop(pool.commit().unwrap()),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24 * rounds() as u32, ..ProptestConfig::default() })]
    #[test]
    fn whatever_is_done_stays_within_the_limits(steps in moves()) {
        let (storage, pool) = small(128 * MIB);
        let top = pool.root().unwrap();
        let a = pool.create_dataset(&NewDataset::named(top, "a")).unwrap();
        let b = pool.create_dataset(&NewDataset::named(a, "b")).unwrap();
        let c = pool.create_dataset(&NewDataset::named(top, "c")).unwrap();
        let ids = [top, a, b, c];
        let mut before = BTreeMap::new();
        for step in &steps {
            apply(&pool, &ids, step);
            within(&pool, &ids, &mut before);
        }
        for id in ids {
            pool.set_properties(&[local(id, "reservation", "none"), local(id, "refreservation", "none")]).unwrap();
        }
        check(&pool, &storage);
        let shown: Vec<_> = ids.iter().map(|id| pool.space(*id).unwrap()).collect();
        prop_assert!(shown.first().unwrap().0.used <= usable(128 * MIB, Purpose::Write) + SLACK + pool.admin.lock().quota_tree().saved());
        drop(pool);
        let pool = reopen(&storage);
        let again: Vec<_> = ids.iter().map(|id| pool.space(*id).unwrap()).collect();
        for (shown, again) in shown.iter().zip(&again) {
            prop_assert_eq!((shown.0, shown.1), (again.0, again.1));
        }
    }
}

#[test]
fn a_range_is_shared_and_both_files_go_their_ways() {
    let (storage, pool) = small(1 << 30);
    let top = pool.root().unwrap();
    let dataset = pool.dataset(top).unwrap();
    let files = dataset.files();
    let whole: Vec<u8> = (0..700_000u32).map(|at| (at / 3000) as u8 + 1).collect();
    put(&dataset, "a", &whole);
    let from = files.look_up(&files.root(), b"a").unwrap().0;
    let to = plain(&dataset, "b", 0).unwrap();
    let range = |from, to, length| crate::files::Range { from, to, length };
    // From the second record on, to the beginning: whole records, and the end of the file.
    assert_eq!(files.share(&from, &to, range(1 << 17, 0, u64::MAX >> 1)).unwrap(), 700_000 - (1 << 17));
    pool.commit().unwrap();
    let saved = pool.admin.lock().quota_tree().saved();
    assert!(saved > 500_000, "{saved}");
    let used = pool.space(top).unwrap().0.used;
    assert!(used > 1_200_000, "each file is charged: {used}");
    // Neither the ends of records nor unequal places are shared.
    assert_eq!(files.share(&from, &to, range(1, 0, 1 << 20)).unwrap(), 0);
    assert_eq!(files.share(&from, &to, range(0, 0, 1000)).unwrap(), 0);
    assert_eq!(files.share(&from, &from, range(0, 1 << 20, 1 << 17)).unwrap(), 0);
    // A small write lies over the frame as a patch, and belongs to this file alone.
    files.write(&from, Some(140_000), &[200; 100]).unwrap();
    pool.commit().unwrap();
    assert_eq!(files.share(&from, &to, range(1 << 17, 1 << 20, 1 << 17)).unwrap(), 0);
    let mut content = vec![0; 700_000 - (1 << 17)];
    files.read(&to, 0, &mut content).unwrap();
    assert!(content == whole[1 << 17..]);
    check(&pool, &storage);
    files.unlink(&files.root(), b"a").unwrap();
    drop(from);
    check(&pool, &storage);
    let mut content = vec![0; 700_000 - (1 << 17)];
    files.read(&to, 0, &mut content).unwrap();
    assert!(content == whole[1 << 17..]);
    assert_eq!(pool.admin.lock().quota_tree().saved(), 0);
    drop((to, dataset, pool));
    check(&reopen(&storage), &storage);
}

#[test]
fn what_is_refused_in_the_middle_takes_no_room() {
    let (storage, pool) = small(1 << 30);
    let top = pool.root().unwrap();
    let properties = vec![("refquota".to_owned(), "1M".to_owned())];
    let home = pool.create_dataset(&NewDataset { parent: top, name: "home".to_owned(), properties }).unwrap();
    let dataset = pool.dataset(home).unwrap();
    let value = |seed: u32| {
        (0..60_000_u32).map(|at| (at.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 13) as u8).collect::<Vec<_>>()
    };
    let new = |parent: &ParentView| {
        let attributes = (0..40).map(|at| (format!("user.{at}").into_bytes(), value(at))).collect();
        Ok(NewInode { row: InodeRow::new(FileType::Directory, 0o755, parent.now), target: None, attributes })
    };
    let root = dataset.files().root();
    assert!(matches!(dataset.files().make(&root, b"d", b"", &new), Err(FileError::Quota)));
    assert!(matches!(dataset.files().make_nameless(&root, b"", true, &new), Err(FileError::Quota)));
    assert!(dataset.files().look_up(&root, b"d").is_err());
    check(&pool, &storage);
}

/// Many writers lack room at once; the commit of one of them makes room for all.
#[test]
fn whoever_fits_beside_what_lives_is_never_refused() {
    let (storage, pool) = small(256 * MIB);
    let top = pool.root().unwrap();
    let dataset = pool.dataset(top).unwrap();
    std::thread::scope(|scope| {
        for number in 0..6 {
            let dataset = &dataset;
            scope.spawn(move || {
                let (name, files) = (format!("file{number}"), dataset.files());
                let data: Vec<u8> = (0..MIB).map(|at| (at % 251) as u8 + number).collect();
                for _ in 0..30 {
                    let file = plain(dataset, &name, 0).unwrap();
                    let mut written = 0;
                    while written < 8 * data.len() {
                        // Short if there is room for a part: the remainder has to find its own.
                        written += files.write(&file, None, &data).unwrap().written;
                    }
                    files.unlink(&files.root(), name.as_bytes()).unwrap();
                }
            });
        }
    });
    check(&pool, &storage);
}

#[test]
fn what_is_removed_at_the_quota_of_an_owner_counts_at_once() {
    for property in ["userquota@1000", "groupquota@1000", "defaultuserquota"] {
        let (storage, pool) = small(1 << 30);
        let top = pool.root().unwrap();
        pool.set_properties(&[local(top, property, "20M")]).unwrap();
        let dataset = pool.dataset(top).unwrap();
        for round in 0..5 {
            let name = format!("file {round}");
            let file = plain(&dataset, &name, 1000).unwrap();
            let (accepted, refusal) = fill(&dataset, &file, 1 << 17);
            assert!(matches!(refusal, FileError::Quota), "{refusal:?}");
            assert!(accepted > 19 * MIB, "{property}, round {round}: {accepted} accepted");
            drop(file);
            dataset.files().unlink(&dataset.files().root(), name.as_bytes()).unwrap();
        }
        check(&pool, &storage);
    }
}

#[test]
fn as_much_as_is_free_can_be_allocated() {
    let (_, pool) = small(256 * MIB);
    let top = pool.root().unwrap();
    let dataset = pool.dataset(top).unwrap();
    for record_shift in [9, 12, 17] {
        dataset.files().set_storing(Storing { record_shift, ..pool.storing() });
        let file = plain(&dataset, &format!("file {record_shift}"), 0).unwrap();
        let free = dataset.files().content_room();
        assert!(free > 10 * MIB && free < dataset.files().room());
        dataset.files().would_fill(&file, 0, free).unwrap();
        assert!(dataset.files().would_fill(&file, 0, free + MIB).is_err());
    }
}

/// Content of a random overwrite: incompressible, and different each time.
fn noise(seed: &mut u64, length: usize) -> Vec<u8> {
    let mut next = || {
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*seed >> 56) as u8
    };
    (0..length).map(|_| next()).collect()
}

/// Overwrites a file at random for so many bytes, in blocks of this length; panics if a write is
/// refused.
fn overwrite(dataset: &Dataset, file: &Arc<Inode>, expected: &mut [u8], block: usize, bytes: usize, seed: &mut u64) {
    for _ in 0..bytes / block {
        let at = (*seed >> 20) as usize % (expected.len() / block) * block;
        let data = noise(seed, block);
        let outcome = dataset.files().write(file, Some(at as u64), &data);
        assert_eq!(outcome.map(|outcome| outcome.written).ok(), Some(block), "at {at} of {}", expected.len());
        expected[at..at + block].copy_from_slice(&data);
    }
}

fn read_all(dataset: &Dataset, file: &Arc<Inode>, length: usize) -> Vec<u8> {
    let mut content = vec![0; length];
    let mut at = 0;
    while at < length {
        at += dataset.files().read(file, at as u64, &mut content[at..]).unwrap();
    }
    content
}

#[test]
fn a_full_pool_and_a_full_quota_take_overwrites_for_ever() {
    for quota in [None, Some("20M")] {
        let (storage, pool) = small(256 * MIB);
        let top = pool.root().unwrap();
        let id = pool.create_dataset(&NewDataset::named(top, "fs")).unwrap();
        let dataset = pool.dataset(id).unwrap();
        if let Some(quota) = quota {
            pool.set_properties(&[local(id, "quota", quota), local(id, "userquota@7", quota)]).unwrap();
        }
        let file = plain(&dataset, "a", 7).unwrap();
        let (mut seed, mut expected) = (42, Vec::new());
        let small_file = plain(&dataset, "b", 7).unwrap();
        let mut small_content = noise(&mut seed, 1000);
        dataset.files().write(&small_file, None, &small_content).unwrap();
        // To the last byte that there is room for.
        for block in [1 << 17, 1 << 12] {
            loop {
                let data = noise(&mut seed, block);
                match dataset.files().write(&file, Some(expected.len() as u64), &data) {
                    Ok(outcome) => expected.extend(&data[..outcome.written]),
                    Err(_) => break,
                }
            }
        }
        pool.commit().unwrap();
        let full = pool.space(id).unwrap().1.referenced;
        for block in [16 << 10, 4096, 1 << 17, 600, 16 << 10] {
            let bytes = if block < 4096 { MIB as usize / 2 } else { 8 * MIB as usize };
            overwrite(&dataset, &file, &mut expected, block, bytes, &mut seed);
            overwrite(&dataset, &small_file, &mut small_content, 100, 10_000, &mut seed);
            pool.commit().unwrap();
            // Blocks of 4 KiB have headers of a fiftieth, and rows.
            let used = pool.space(id).unwrap().1.referenced;
            assert!(used <= full + full / 25, "{quota:?}, {block}: {used} of {full}");
        }
        assert!(read_all(&dataset, &file, expected.len()) == expected);
        assert!(dataset.files().write(&file, Some(expected.len() as u64), &noise(&mut seed, 1 << 17)).is_err());
        check(&pool, &storage);
        drop((dataset, file, pool));
        let pool = reopen(&storage);
        assert!(contents(pool.dataset(id).unwrap().files())["a"] == expected);
        assert!(contents(pool.dataset(id).unwrap().files())["b"] == small_content);
        check(&pool, &storage);
    }
}

#[test]
fn what_a_snapshot_holds_is_not_replaced_without_room() {
    let (storage, pool) = small(256 * MIB);
    let top = pool.root().unwrap();
    let dataset = pool.dataset(top).unwrap();
    let file = plain(&dataset, "a", 0).unwrap();
    let (accepted, _) = fill(&dataset, &file, 1 << 17);
    pool.snapshot(&[(top, "s".to_owned())]).unwrap();
    let refused = (0..accepted >> 17).find_map(|at| {
        let data = vec![at as u8 | 1; 1 << 17];
        dataset.files().write(&file, Some(at << 17), &data).err()
    });
    assert!(matches!(refused, Some(FileError::Pool(PoolError::NoSpace))), "{refused:?}");
    check(&pool, &storage);
}

#[test]
fn what_owners_use_adds_up_to_what_is_used() {
    let one = |kind: usize, dataset: &Dataset, random: &mut dyn FnMut(usize) -> Vec<u8>| {
        let files = dataset.files();
        let file = plain(dataset, "file", 7).unwrap();
        for at in 0..3000 {
            let name = format!("name{at}");
            match kind {
                0 => drop(plain(dataset, &name, 7).unwrap()),
                1 => drop(files.write(&plain(dataset, &name, 7).unwrap(), None, &random(1000)).unwrap()),
                2 => files.set_attribute(&file, name.as_bytes(), &random(1000), None, None).unwrap(),
                3 => drop(
                    files
                        .link(
                            &file,
                            &files.root(),
                            &random(127).iter().map(|byte| byte % 200 + 48).collect::<Vec<u8>>(),
                        )
                        .unwrap(),
                ),
                _ => drop(files.write(&plain(dataset, &name, 7).unwrap(), None, &random(20_000)).unwrap()),
            }
        }
    };
    for kind in 0..5 {
        let (storage, pool) = small(1 << 30);
        let id = pool.create_dataset(&NewDataset::named(pool.root().unwrap(), "home")).unwrap();
        let dataset = pool.dataset(id).unwrap();
        let mut seed = 5;
        one(kind, &dataset, &mut |length| noise(&mut seed, length));
        check(&pool, &storage);
        let used = pool.space(id).unwrap().1.referenced;
        let owners = pool.owner_uses(id, None).unwrap();
        let users = owners.iter().filter(|owner| owner.kind == crate::rows::OwnerKind::User);
        let sum = users.map(|owner| owner.used.bytes).sum::<u64>();
        assert!((used * 95..=used * 105).contains(&(sum * 100)), "kind {kind}: {sum} of {used}");
    }
}
