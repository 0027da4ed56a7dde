//! The whole engine on devices that lose power at any moment: files, names, attributes, snapshots,
//! clones and their administration against a model.
//!
//! After each crash the pool must be in a state that it was in between the last promise (an fsync,
//! a commit) and the crash: names, links and attributes as after one of the operations; content of
//! a file as it was then, if it had been made durable since its last change, else made of bytes
//! that it had at some time since; snapshots exactly as taken. And everything that is allocated is
//! reached by something, to the byte.
//!
//! `NACRE_POOL_ROUNDS` is the number of crashes for each seed, `NACRE_POOL_SEED` the only seed to
//! run. For long runs: `NACRE_POOL_STEPS` is the number of operations between two crashes (at most
//! 20 more), `NACRE_POOL_FULL=n` reads snapshots and accounts for everything at each n-th crash
//! only (names, attributes and contents of all datasets are compared at each).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod crash_model;
mod pools;

use std::sync::Arc;

use crash_model::World;
use nacre_pool::device::Simulator;
use nacre_pool::store::Access;
use pools::{Random, check, create, open};

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().expect(name))
}

/// Rounds of work and crashes on a pool of so many devices.
fn campaign(seed: u64, disks: usize, rounds: u64) {
    let mut random = Random(seed);
    let disks: Vec<_> = (0..disks).map(|at| Arc::new(Simulator::new(&format!("disk{at}"), 64 << 20))).collect();
    let mut imported = create(&disks, random.next());
    let mut world = World::new();
    let most = number("NACRE_POOL_STEPS").unwrap_or(200);
    let every = number("NACRE_POOL_FULL").unwrap_or(1);
    for round in 0..rounds {
        let what = format!("seed {seed}, round {round}");
        let full = round % every == every - 1;
        // In every third round the power fails in the middle of something.
        let sudden = round % 3 == 1;
        if sudden {
            for disk in &disks {
                disk.fail_after(1 + random.below(2 * most));
            }
        }
        let steps = 20 + random.below(most);
        for _ in 0..steps {
            if !world.step(&imported, &mut random) {
                break;
            }
        }
        if !sudden && random.below(4) == 0 && full {
            world.compare(&imported, &what);
            check(&imported);
        }
        if !sudden && random.below(5) == 0 {
            imported.pool.commit().unwrap();
            world.promise_all();
            imported.store.close(true, 5).unwrap();
        }
        if std::env::var_os("NACRE_POOL_TRACE").is_some() {
            eprintln!("crash of {what} after txg {}", imported.store.durable().0);
        }
        drop(imported);
        for disk in &disks {
            disk.crash(random.next());
        }
        imported = open(&disks, random.next(), Access::ReadWrite).unwrap_or_else(|error| panic!("{what}: {error}"));
        world.recover(&imported, full, &what);
        if full {
            check(&imported);
        }
    }
    println!(
        "campaign: seed {seed}, {} operations, {rounds} crashes (NACRE_POOL_ROUNDS, NACRE_POOL_SEED)",
        world.operation
    );
}

fn run(seeds: std::ops::Range<u64>, disks: usize) {
    let rounds = number("NACRE_POOL_ROUNDS").unwrap_or(4);
    match number("NACRE_POOL_SEED") {
        Some(seed) => campaign(seed, disks, rounds),
        None => seeds.for_each(|seed| campaign(seed, disks, rounds)),
    }
}

#[test]
fn one_device_that_loses_power_keeps_every_promise() {
    run(0..3, 1);
}

#[test]
fn two_devices_that_lose_power_keep_every_promise() {
    run(100..101, 2);
}
