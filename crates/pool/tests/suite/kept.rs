//! A pool whose process dies at any moment, while its devices and the kept log stay: everything that was
//! acknowledged is exactly there for the next one, which goes on, and dies again.
//!
//! What stays of the devices is what another process would read, synced or not. The process dies between
//! operations, in a commit, while it appends, and in the replay of what the last one left. After each
//! death all files of all datasets are compared with what they were: names and their places in listings,
//! attributes, content, and files that somebody holds without a name.
//!
//! `NACRE_KEPT_ROUNDS` is the number of deaths for each seed, `NACRE_KEPT_SEED` the only seed to run.
mod beyond;
mod everything;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::crash_model::World;
use crate::pools::{Imported, Random, check, create_kept, number, open_kept};
use beyond::Beyond;
use everything::{Held, assert_same, look};
use nacre_pool::device::Simulator;
use nacre_pool::engine::{Dataset, NewDataset, Pace};
use nacre_pool::files::{FileError, Inode, NewInode, ParentView};
use nacre_pool::log::KeptLog;
use nacre_pool::rows::{FileType, InodeRow};
use nacre_pool::store::Access;
use nacre_sys::shared_words::SharedWords;

/// The words that say where the next record comes, and where the parts of the places lie.
const END: usize = 3;
const PARTS: usize = 16;
/// Where the parts begin, and how long one is, words.
const FIRST: usize = 512;
const PART: usize = 1 << 17;

/// What a process leaves.
struct Left {
    disks: Vec<Arc<Simulator>>,
    kept: Arc<KeptLog>,
}

/// The log as it is now; with `torn`, as if somebody had died while he appended.
fn copy(kept: &KeptLog, torn: bool) -> Arc<KeptLog> {
    let bytes = kept.descriptor().try_clone_to_owned().unwrap();
    // One part more than it is long.
    let count = FIRST + kept.length() as usize / 8 + PART;
    let from = SharedWords::taken_over(bytes, count).unwrap();
    let to = SharedWords::new(c"test", count).unwrap();
    for (to, from) in to.words().iter().zip(from.words()) {
        to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
    }
    if torn {
        // What lies behind the end in its part; and another part was taken for what follows.
        let (parts, end) = ((count - FIRST) / PART, to.words()[END].load(Ordering::Relaxed) as usize);
        let part = to.words()[PARTS + end / PART % parts].load(Ordering::Relaxed) as usize;
        let room = if end.is_multiple_of(PART) { 0 } else { (PART - end % PART).min(100) };
        for at in 0..room {
            let word = FIRST + part * PART + end % PART + at;
            to.words()[word].store(0x1234_5678_9abc_def0 ^ at as u64, Ordering::Relaxed);
        }
        if kept.length() - kept.used() > 2 * PART as u64 * 8 {
            to.words()[PARTS + end.div_ceil(PART) % parts].store(u64::MAX, Ordering::Relaxed);
        }
    }
    KeptLog::taken_over(to.descriptor().try_clone_to_owned().unwrap()).unwrap()
}

fn leave(disks: &[Arc<Simulator>], kept: &KeptLog, torn: bool) -> Left {
    Left { disks: disks.iter().map(|disk| Arc::new(disk.copy())).collect(), kept: copy(kept, torn) }
}

/// Imports what was left; some processes die while they do.
fn go_on(left: Left, random: &mut Random, what: &str) -> (Left, Imported) {
    let mut left = left;
    while random.below(3) == 0 {
        // Anywhere, or where its first commit ends: as many operations as one makes that lives on.
        let late = random.below(2) == 0;
        let tried = leave(&left.disks, &left.kept, false);
        let _ = open_kept(&tried.disks, 1, Access::ReadWrite, Some(&tried.kept)).map(|tried| tried.pool.commit());
        for (disk, tried) in left.disks.iter().zip(&tried.disks) {
            disk.fail_after(if late { tried.operations().saturating_sub(random.below(4)) } else { random.below(60) });
        }
        let died = open_kept(&left.disks, random.next(), Access::ReadWrite, Some(&left.kept));
        if let Ok(imported) = died {
            // It lives on, and dies in its first commit, or after it.
            let _ = imported.pool.commit();
        }
        left = leave(&left.disks, &left.kept, random.below(2) == 0);
        if left.disks.len() > 1 {
            // Each of several devices fails at its own moment, and a label that was not written twice makes
            // one an older copy of itself.
            break;
        }
    }
    let imported = open_kept(&left.disks, random.next(), Access::ReadWrite, Some(&left.kept));
    let imported = imported.unwrap_or_else(|error| panic!("{what}: {error}"));
    (left, imported)
}

fn extra(imported: &Imported) -> Arc<nacre_pool::engine::Dataset> {
    imported.pool.dataset(imported.pool.find("tank/extra").unwrap().unwrap()).unwrap()
}

fn campaign(seed: u64, rounds: u64) {
    let mut random = Random(seed);
    let disks: Vec<_> = (0..1 + seed % 2).map(|at| Arc::new(Simulator::new(&format!("disk{at}"), 96 << 20))).collect();
    let kept = KeptLog::new(16 << 20).unwrap();
    let mut imported = create_kept(&disks, random.next(), Some(&kept));
    imported.pool.create_dataset(&NewDataset::named(imported.pool.root().unwrap(), "extra")).unwrap();
    let mut left = Left { disks, kept };
    let mut world = World::new();
    let mut beyond = Beyond { dataset: extra(&imported), held: Vec::new(), given: 1 };
    for round in 0..rounds {
        let what = format!("seed {seed}, round {round}");
        for _ in 0..5 + random.below(120) {
            if random.below(2) == 0 {
                assert!(world.step(&imported, &mut random), "{what}");
            } else {
                beyond.step(&mut random);
            }
            if left.kept.used() > left.kept.length() / 2 {
                imported.pool.commit().unwrap();
            }
            assert_eq!(left.kept.given_up(), None);
        }
        let held: Vec<Held> = beyond.held.iter().map(|inode| ("tank/extra".to_owned(), inode.number())).collect();
        let before = look(&imported, &held);
        let died = match random.below(4) {
            0 | 1 => leave(&left.disks, &left.kept, random.below(2) == 0),
            2 => {
                for disk in &left.disks {
                    disk.fail_after(random.below(80));
                }
                // It fails, or not.
                let _ = imported.pool.commit();
                leave(&left.disks, &left.kept, false)
            }
            _ => {
                let kept = copy(&left.kept, false);
                imported.pool.commit().unwrap();
                leave(&left.disks, &kept, false)
            }
        };
        let given = beyond.given;
        drop((imported, beyond));
        (left, imported) = go_on(died, &mut random, &what);
        let dataset = extra(&imported);
        assert_same(&before, &look(&imported, &held), &what);
        beyond =
            Beyond { held: held.iter().map(|(_, number)| dataset.files().inode(*number)).collect(), dataset, given };
        // What nobody holds goes with the next commits.
        imported.pool.let_left_go().unwrap();
        let again = look(&imported, &held);
        assert_same(&before, &again, &what);
        if random.below(3) == 0 {
            imported.pool.commit().unwrap();
            check(&imported);
            assert_same(&before, &look(&imported, &held), &what);
        }
    }
    println!("kept: seed {seed}, {rounds} deaths (NACRE_KEPT_ROUNDS, NACRE_KEPT_SEED)");
}

#[test]
fn a_process_that_dies_loses_nothing_that_was_acknowledged() {
    let rounds = number("NACRE_KEPT_ROUNDS", 8);
    match std::env::var("NACRE_KEPT_SEED") {
        Ok(seed) => campaign(seed.parse().unwrap(), rounds),
        Err(_) => (0..4).for_each(|seed| campaign(seed, rounds)),
    }
}

fn file(imported: &Imported, name: &str) -> Arc<Inode> {
    file_in(&imported.pool.dataset(imported.pool.root().unwrap()).unwrap(), name)
}

fn file_in(dataset: &Dataset, name: &str) -> Arc<Inode> {
    let new = |parent: &ParentView| {
        let row = InodeRow::new(FileType::Regular, 0o644, parent.now);
        Ok(NewInode { row, target: None, attributes: Vec::new() })
    };
    dataset.files().make(&dataset.files().root(), name.as_bytes(), b"", &new).unwrap().0
}

/// Far from both bounds: what has anybody wait is the log alone.
const PACE: Pace =
    Pace { every: Duration::from_secs(3600), begin: 1 << 30, most: 1 << 30, stuck: Duration::from_secs(60) };

#[test]
fn who_finds_the_log_full_waits_for_a_commit() {
    let disks = [Arc::new(Simulator::new("disk", 192 << 20))];
    let kept = KeptLog::new(4 << 20).unwrap();
    let imported = create_kept(&disks, 1, Some(&kept));
    let committer = imported.pool.start_committer(PACE).unwrap();
    let committed = imported.store.durable();
    let dataset = imported.pool.dataset(imported.pool.root().unwrap()).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let (file, dataset) = (file(&imported, &format!("f{thread}")), &dataset);
            scope.spawn(move || {
                let mut random = Random(thread);
                for at in 0..150u64 {
                    // The last ones have more content than the log takes at once.
                    let length = if at > 147 { 3 << 20 } else { 1 + random.below(200_000) };
                    let data = vec![random.next() as u8; length as usize];
                    let offset = Some(random.below(900_000));
                    assert_eq!(dataset.files().write(&file, offset, &data).unwrap().written, data.len());
                    dataset.files().set_attribute(&file, b"user.at", &at.to_le_bytes(), None, None).unwrap();
                }
            });
        }
    });
    assert!(imported.store.durable() > committed);
    assert_eq!(kept.given_up(), None);
    // Ends without a commit.
    drop(committer);
    let before = look(&imported, &[]);
    let left = leave(&disks, &kept, true);
    let next = open_kept(&left.disks, 2, Access::ReadWrite, Some(&left.kept)).unwrap();
    assert_same(&before, &look(&next, &[]), "behind a full log");
    check(&next);
}

#[test]
fn who_waits_for_room_in_the_log_hears_that_the_pool_is_suspended() {
    let disks = [Arc::new(Simulator::new("disk", 192 << 20))];
    let kept = KeptLog::new(4 << 20).unwrap();
    let imported = create_kept(&disks, 1, Some(&kept));
    let committer = imported.pool.start_committer(PACE).unwrap();
    let file = file(&imported, "file");
    let dataset = imported.pool.dataset(imported.pool.root().unwrap()).unwrap();
    // A file that lies in memory alone, so that nothing but a commit meets the device.
    dataset.files().write(&file, Some(0), &[1; 5000]).unwrap();
    disks[0].fail_after(0);
    let error = (0..10_000u64).find_map(|at| dataset.files().write(&file, Some(at), &[at as u8; 5000]).err());
    assert!(matches!(error, Some(FileError::Pool(_))), "{error:?}");
    assert!(committer.stop().is_err());
    let before = look(&imported, &[]);
    let left = leave(&disks, &kept, true);
    let next = open_kept(&left.disks, 2, Access::ReadWrite, Some(&left.kept)).unwrap();
    assert_same(&before, &look(&next, &[]), "after a commit that failed");
}

#[test]
fn what_is_synced_before_the_first_commit_after_a_death_is_durable() {
    let disks = [Arc::new(Simulator::new("disk", 96 << 20))];
    let kept = KeptLog::new(4 << 20).unwrap();
    let imported = create_kept(&disks, 1, Some(&kept));
    let root = imported.pool.root().unwrap();
    imported.pool.commit().unwrap();
    let old = file(&imported, "old");
    imported.pool.dataset(root).unwrap().files().write(&old, Some(0), b"acknowledged").unwrap();
    let committed = imported.store.durable();
    let left = leave(&disks, &kept, false);
    let next = open_kept(&left.disks, 2, Access::ReadWrite, Some(&left.kept)).unwrap();
    assert_eq!(next.store.durable(), committed, "nobody waits for a commit");
    let dataset = next.pool.dataset(root).unwrap();
    // It is as it was: nothing of it is new to the log.
    next.pool.sync_file(&dataset, &dataset.files().inode(old.number())).unwrap();
    let before = look(&next, &[]);
    // Power fails: what is in memory is gone.
    let off = leave(&left.disks, &left.kept, false);
    assert_same(&before, &look(&open_kept(&off.disks, 3, Access::ReadWrite, None).unwrap(), &[]), "power failed");
    // From that commit on, the log takes what is synced.
    let new = file(&next, "new");
    dataset.files().write(&new, Some(0), b"synced").unwrap();
    let committed = next.store.durable();
    next.pool.sync_file(&dataset, &new).unwrap();
    assert_eq!(next.store.durable(), committed);
    let before = look(&next, &[]);
    let off = leave(&left.disks, &left.kept, false);
    assert_same(&before, &look(&open_kept(&off.disks, 3, Access::ReadWrite, None).unwrap(), &[]), "it failed again");
}

#[test]
fn what_was_gone_back_from_stays_away_and_its_numbers_are_not_given_again() {
    let disks = [Arc::new(Simulator::new("disk", 96 << 20))];
    let kept = KeptLog::new(4 << 20).unwrap();
    let imported = create_kept(&disks, 1, Some(&kept));
    let root = imported.pool.root().unwrap();
    imported.pool.snapshot(&[(root, "then".to_owned())]).unwrap();
    let given = (0..20).map(|at| file(&imported, &format!("gone{at}")).number()).max().unwrap();
    imported.pool.roll_back(root, "then").unwrap();
    let before = look(&imported, &[]);
    let left = leave(&disks, &kept, false);
    let next = open_kept(&left.disks, 2, Access::ReadWrite, Some(&left.kept)).unwrap();
    assert_same(&before, &look(&next, &[]), "after going back");
    assert!(file(&next, "new").number() > given);
    check(&next);
}

/// What is synced while a commit is under way is in the intent log, of the next txg, and in the kept log. Once the
/// next process has replayed that one, with what came later, the other must not bring it back when the power
/// fails as well.
#[test]
fn the_intent_log_brings_nothing_back_that_was_replayed_from_the_kept_one() {
    let disks = [Arc::new(Simulator::new("disk", 96 << 20))];
    let kept = KeptLog::new(4 << 20).unwrap();
    let imported = create_kept(&disks, 1, Some(&kept));
    let root = imported.pool.root().unwrap();
    let dataset = imported.pool.dataset(root).unwrap();
    let mut left = None;
    let mut dies = || {
        // Administration is busy with the commit.
        file_in(&dataset, "stays");
        file_in(&dataset, "goes");
        imported.pool.sync_names().unwrap();
        dataset.files().unlink(&dataset.files().root(), b"goes").unwrap();
        left = Some(leave(&disks, &kept, false));
    };
    imported.pool.snapshot_at(&[(root, "then".to_owned())], &[], &mut dies).unwrap();
    let left = left.unwrap();
    let next = open_kept(&left.disks, 2, Access::ReadWrite, Some(&left.kept)).unwrap();
    let there = look(&next, &[]);
    next.pool.commit().unwrap();
    drop(next);
    let again = open_kept(&left.disks, 3, Access::ReadWrite, None).unwrap();
    assert_same(&there, &look(&again, &[]), "after a power failure");
    check(&again);
}
