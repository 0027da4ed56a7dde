//! The engine as it runs: several writers, its own threads that commit, clean and free,
//! administration in between, and devices that lose power.
//!
//! Each writer replaces its files as programs do: a new file is written, synced, and renamed over
//! the old one. After a crash each file is one of these whole versions, and none before the last
//! that was promised.
//!
//! `NACRE_POOL_ROUNDS` is the number of crashes, `NACRE_POOL_SEED` another beginning.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::pools::{Imported, Random, check, create, number, open};
use nacre_pool::device::Simulator;
use nacre_pool::engine::Pace;
use nacre_pool::files::{FileError, Inode, MayReplace, NewInode, ParentView};
use nacre_pool::rows::{FileType, InodeRow};
use nacre_pool::store::Access;

const WRITERS: u64 = 4;

/// What a version of a file holds: its number, then bytes that follow from it.
fn content(file: &str, version: u64) -> Vec<u8> {
    let mut random = Random(version.wrapping_mul(0x1234_5677).wrapping_add(file.len() as u64));
    let length = match random.below(4) {
        0 => random.below(200),
        1 => random.below(300_000),
        _ => random.below(9000),
    };
    let mut bytes = version.to_le_bytes().to_vec();
    let fill = random.next().to_le_bytes();
    bytes.extend((0..length).map(|at| fill[(at % 8) as usize] ^ (at >> 3) as u8));
    bytes
}

/// The version that a file is, if it is one.
fn version(file: &str, found: &[u8]) -> Option<u64> {
    let version = u64::from_le_bytes(found.get(..8)?.try_into().unwrap());
    (content(file, version) == found).then_some(version)
}

/// Promised versions of files; `None`: it was taken away.
type Promised = BTreeMap<String, Option<u64>>;

/// Goes on until the device is gone, or the work is done.
fn write(
    imported: &Imported,
    writer: u64,
    seed: u64,
    begin: u64,
    promised: &mut Promised,
    most: u64,
) -> Result<(), FileError> {
    let mut random = Random(seed);
    let dataset = imported.pool.dataset(imported.pool.root()?)?;
    let files = dataset.files();
    let root = files.root();
    for step in 0..most {
        let name = format!("w{writer}-{}", random.below(12));
        if random.below(10) == 0 {
            match files.unlink(&root, name.as_bytes()) {
                Ok(()) => {
                    // Until that is promised, the file may be there or not.
                    let before = promised.remove(&name);
                    imported.pool.sync_names()?;
                    promised.insert(name, None);
                    let _ = before;
                }
                Err(FileError::NotFound) => {}
                Err(error) => return Err(error),
            }
            continue;
        }
        let version = begin + step;
        let temporary = format!("{name}.new");
        let new = |parent: &ParentView| {
            Ok(NewInode {
                row: InodeRow::new(FileType::Regular, 0o644, parent.now),
                target: None,
                attributes: Vec::new(),
            })
        };
        let made: Result<(Arc<Inode>, InodeRow), FileError> = files.make(&root, temporary.as_bytes(), b"", &new);
        let file = match made {
            Ok((file, _)) => file,
            Err(FileError::Exists) => {
                files.unlink(&root, temporary.as_bytes())?;
                continue;
            }
            Err(error) => return Err(error),
        };
        let wanted = content(&name, version);
        let mut at = 0;
        while at < wanted.len() {
            let outcome = files.write(&file, Some(at as u64), &wanted[at..])?;
            at += outcome.written;
        }
        imported.pool.sync_file(&dataset, &file)?;
        files.rename((&root, temporary.as_bytes()), (&root, name.as_bytes()), MayReplace::Yes)?;
        // From now on the old version may be gone.
        let before = promised.get(&name).copied().flatten();
        if promised.get(&name) == Some(&None) {
            promised.remove(&name);
        }
        if random.below(2) == 0 {
            imported.pool.sync_names()?;
            promised.insert(name.clone(), Some(version));
        } else if let Some(before) = before {
            promised.insert(name.clone(), Some(before));
        }
        let mut found = vec![0; wanted.len()];
        assert_eq!(files.read(&file, 0, &mut found)?, wanted.len());
        assert!(found == wanted, "{name} reads as something else");
    }
    Ok(())
}

/// Snapshots come and go meanwhile.
fn administer(imported: &Imported, over: &std::sync::atomic::AtomicBool) {
    let Ok(root) = imported.pool.root() else { return };
    let mut number = 0;
    while !over.load(std::sync::atomic::Ordering::Relaxed) {
        number += 1;
        let (new, old) = (format!("s{number}"), format!("s{}", number - 2));
        if imported.pool.snapshot(&[(root, new)]).is_err() {
            return;
        }
        let _ = imported.pool.destroy_snapshot(root, &old, false);
        std::thread::sleep(Duration::from_millis(3));
    }
}

fn accept(outcome: Result<(), FileError>) {
    use nacre_pool::PoolError;
    match outcome {
        Ok(()) | Err(FileError::Pool(PoolError::Device { .. } | PoolError::Suspended { .. } | PoolError::NoSpace)) => {}
        Err(error) => panic!("{error:?}"),
    }
}

fn judge(imported: &Imported, promised: &[Promised], what: &str) {
    let found = crate::crash_model::read(imported.pool.dataset(imported.pool.root().unwrap()).unwrap().files());
    for (name, (bytes, ..)) in found.iter().filter(|(name, _)| !name.ends_with(".new")) {
        assert!(version(name, bytes).is_some(), "{what}: {name} ({} bytes) is no version of it", bytes.len());
    }
    for (name, wanted) in promised.iter().flatten() {
        let there = found.get(name).and_then(|(bytes, ..)| version(name, bytes));
        match wanted {
            Some(wanted) => assert!(
                there.is_some_and(|there| there >= *wanted),
                "{what}: {name} is {there:?}, promised was {wanted}"
            ),
            None => assert!(there.is_none(), "{what}: {name} is there again"),
        }
    }
}

#[test]
fn writers_and_the_engine_s_own_threads_keep_every_promise() {
    let (seed, rounds) = (number("NACRE_POOL_SEED", 1), number("NACRE_POOL_ROUNDS", 6));
    println!("campaign: seed {seed}, {rounds} crashes (NACRE_POOL_ROUNDS, NACRE_POOL_SEED)");
    let mut random = Random(seed);
    let disk = [Arc::new(Simulator::new("disk", 128 << 20))];
    let mut imported = create(&disk, random.next());
    let mut begin = 1;
    for round in 0..rounds {
        let what = format!("seed {seed}, round {round}");
        let pace = Pace { every: Duration::from_millis(1 + random.below(40)), ..Pace::default() };
        let committer = imported.pool.start_committer(pace).unwrap();
        let sudden = round % 2 == 0;
        if sudden {
            disk[0].fail_after(100 + random.below(2500));
        }
        let most = if sudden { 100_000 } else { 40 };
        let mut promised = vec![Promised::new(); WRITERS as usize];
        let over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (imported, over) = (&imported, &over);
            scope.spawn(move || administer(imported, over));
            let writers: Vec<_> = promised
                .iter_mut()
                .enumerate()
                .map(|(writer, promised)| {
                    let seed = random.next();
                    scope.spawn(move || accept(write(imported, writer as u64, seed, begin, promised, most)))
                })
                .collect();
            let ended: Vec<_> = writers.into_iter().map(|writer| writer.join()).collect();
            over.store(true, std::sync::atomic::Ordering::Relaxed);
            ended.into_iter().for_each(|ended| ended.unwrap());
        });
        begin += 1_000_000;
        if sudden {
            drop(committer);
        } else {
            committer.stop().unwrap();
            judge(&imported, &promised, &what);
            check(&imported);
        }
        drop(imported);
        disk[0].crash(random.next());
        imported = open(&disk, random.next(), Access::ReadWrite).unwrap_or_else(|error| panic!("{what}: {error}"));
        judge(&imported, &promised, &what);
        check(&imported);
    }
}
