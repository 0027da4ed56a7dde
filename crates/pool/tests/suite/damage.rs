//! Damage anywhere on a device: an error or the right data, never wrong data, never a panic, never
//! a loop.
//!
//! `NACRE_POOL_TRIALS` is the number of trials, `NACRE_POOL_SEED` another beginning.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::crash_model::{Tree, World};
use crate::pools::gentle::{self, Watchdog};
use crate::pools::{Imported, Random, create, number, open};
use nacre_pool::device::{Device, Simulator};
use nacre_pool::store::Access;

/// What a pool holds, by dataset and by (dataset, snapshot).
struct Expected {
    datasets: BTreeMap<String, Tree>,
    snapshots: BTreeMap<(String, String), Tree>,
}

/// The image of a pool with some of everything, and what is in it.
fn planted(seed: u64, exported: bool) -> (Vec<u8>, Expected) {
    let mut random = Random(seed);
    let disks = [Arc::new(Simulator::new("disk", 64 << 20))];
    let imported = create(&disks, random.next());
    let mut world = World::new();
    for _ in 0..500 {
        assert!(world.step(&imported, &mut random));
    }
    imported.pool.commit().unwrap();
    if exported {
        imported.store.close(true, 5).unwrap();
    } else {
        // Something for the log.
        for _ in 0..40 {
            assert!(world.step(&imported, &mut random));
        }
        imported.pool.sync_names().unwrap();
        imported.pool.commit().unwrap();
    }
    let datasets = world.now().datasets.keys().map(|name| (name.clone(), world.tree(name))).collect();
    let snapshots = world.now().snapshots.iter().map(|(key, tree)| (key.clone(), (**tree).clone())).collect();
    drop(imported);
    (disks[0].bytes(), Expected { datasets, snapshots })
}

/// Where there is anything, in blocks of 512 bytes.
fn written(image: &[u8]) -> Vec<usize> {
    image
        .chunks(512)
        .enumerate()
        .filter(|(_, block)| block.iter().any(|byte| *byte != 0))
        .map(|(at, _)| at * 512)
        .collect()
}

/// Damages a part of the device; what was done.
fn damage(disk: &Simulator, image: &[u8], places: &[usize], random: &mut Random) -> String {
    let at = *random.pick(places).unwrap() + random.below(512) as usize;
    let length = match random.below(5) {
        0 | 1 => {
            let bit = random.below(8) as u8;
            disk.rot(at as u64, bit);
            return format!("bit {bit} of byte {at}");
        }
        2 => 1 + random.below(16) as usize,
        3 => 512,
        _ => 1 + random.below(64 << 10) as usize,
    };
    let end = (at + length).min(image.len());
    let (bytes, what) = match random.below(3) {
        0 => (vec![0; end - at], "zeros"),
        1 => ((at..end).map(|_| random.next() as u8).collect(), "noise"),
        _ => {
            // A write that went to the wrong place.
            let from = random.pick(places).copied().unwrap().min(image.len() - (end - at));
            (image[from..from + end - at].to_vec(), "what lies elsewhere")
        }
    };
    disk.write_at(&bytes, at as u64).unwrap();
    format!("{what} from {at} to {end}")
}

#[track_caller]
fn compare(found: &gentle::Readable, expected: &Tree, what: &str) {
    for (name, content) in &found.files {
        let wanted = expected.get(name).unwrap_or_else(|| panic!("{what}: there is {name}, which there never was"));
        if let Ok(content) = content {
            assert!(*content == wanted.0, "{what}: {name} has other content");
        }
    }
    if found.incomplete.is_none() {
        let missing: Vec<_> = expected.keys().filter(|name| !found.files.contains_key(*name)).collect();
        assert!(missing.is_empty(), "{what}: {missing:?} are missing, and nobody says why");
    }
}

/// Reads everything; whether all of it could be read.
fn judge(imported: &Imported, expected: &Expected, what: &str) -> bool {
    let mut whole = true;
    let there = gentle::datasets(imported);
    for (id, name) in &there {
        let wanted =
            expected.datasets.get(name).unwrap_or_else(|| panic!("{what}: there is {name}, which there never was"));
        match imported.pool.dataset(*id) {
            Ok(dataset) => {
                let found = gentle::read(dataset.files());
                compare(&found, wanted, &format!("{what}: {name}"));
                whole &= found.incomplete.is_none() && found.files.values().all(Result::is_ok);
            }
            Err(_) => whole = false,
        }
        for ((_, snapshot), wanted) in expected.snapshots.iter().filter(|((of, _), _)| of == name) {
            let then = imported.pool.find_snapshot(*id, snapshot).and_then(|txg| match txg {
                Some(txg) => imported.pool.snapshot_files(*id, txg).map(Some),
                None => Ok(None),
            });
            match then {
                Ok(Some(then)) => compare(&gentle::read(then.files()), wanted, &format!("{what}: {name}@{snapshot}")),
                Ok(None) => panic!("{what}: {name}@{snapshot} is missing, and nobody says why"),
                Err(_) => whole = false,
            }
        }
    }
    whole && there.len() == expected.datasets.len()
}

fn trials(exported: bool, seed: u64) {
    let seed = seed + number("NACRE_POOL_SEED", 0);
    let (image, expected) = planted(seed, exported);
    let places = written(&image);
    let watchdog = Watchdog::start();
    let mut random = Random(seed ^ 0xdead);
    let (mut refused, mut harmless, mut hurt) = (0, 0, 0);
    for trial in 0..number("NACRE_POOL_TRIALS", 20) {
        let disk = Arc::new(Simulator::with_bytes("disk", image.clone()));
        let mut done = Vec::new();
        for _ in 0..=random.below(2) * random.below(6) {
            done.push(damage(&disk, &image, &places, &mut random));
        }
        let what = format!("seed {seed}, trial {trial}, {done:?}");
        watchdog.trial(&what);
        // Copies of labels lie far from each other, but several damages may hit several of them:
        // then the pool may be found as it was earlier.
        let several = done.len() > 1;
        let access = if random.below(2) == 0 { Access::ReadOnly } else { Access::ReadWrite };
        let imported = match open(&[Arc::clone(&disk)], random.next(), access) {
            Ok(imported) => imported,
            Err(_) => {
                refused += 1;
                continue;
            }
        };
        if several && imported.store.root().txg < last_txg(&image) {
            continue;
        }
        if judge(&imported, &expected, &what) {
            harmless += 1;
        } else {
            hurt += 1;
        }
        // These may fail, not panic.
        let mut told = 0;
        let _ = imported.store.scrub(&mut |_| true);
        let _ = imported.pool.check(&imported.store, access == Access::ReadOnly, &mut |_| told += 1);
        if access == Access::ReadWrite {
            let _ = imported.pool.commit();
        }
    }
    println!(
        "campaign: seed {seed}, {refused} refused, {harmless} harmless, {hurt} with errors (NACRE_POOL_TRIALS, NACRE_POOL_SEED)"
    );
    assert!(hurt > 0 && harmless > 0, "the damage was no test");
}

fn last_txg(image: &[u8]) -> nacre_pool::Txg {
    let disk = Arc::new(Simulator::with_bytes("disk", image));
    open(&[disk], 1, Access::ReadOnly).unwrap().store.root().txg
}

#[test]
fn damage_to_an_exported_pool_is_told_and_never_believed() {
    trials(true, 1);
}

#[test]
fn damage_to_a_pool_that_was_in_use_is_told_and_never_believed() {
    trials(false, 2);
}
