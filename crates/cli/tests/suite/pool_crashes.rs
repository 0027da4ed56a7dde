//! The process of a pool is killed under load repeatedly: everything synced is there, and the pool
//! is consistent.
//!
//! `NACRE_POOL_ROUNDS` is the number of deaths for each size of pool, `NACRE_POOL_SEED` another
//! seed. The promise of sync(2) is tested as well.

use crate::crashing::{Dead, Load, Random, programs, snapshots::Snapshots};
use crate::mounting::{
    as_root, eventually, needs,
    pools::{Pool, Yard},
};
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

impl Pool {
    fn check_device(&self, what: &str) {
        let said = self.told(&["pool", "check", "-d", self.device.to_str().unwrap()]);
        assert!(said.starts_with("no problems: "), "{what}: {said}");
    }
}

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |value| value.parse().expect(name))
}

/// Everything at once until the process is killed.
fn round(pool: &Pool, loads: Vec<Box<dyn Load>>, random: &mut Random) -> Vec<Box<dyn Load>> {
    let dead = Arc::new(Dead::default());
    let process = pool.process(&pool.name);
    let working = crate::crashing::begin(loads, &pool.at(""), &dead, random);
    std::thread::sleep(Duration::from_millis(50 + random.below(5000)));
    dead.set();
    Yard::end_process(process, rustix::process::Signal::KILL);
    eventually("the end of all loads", || working.iter().all(std::thread::JoinHandle::is_finished));
    let loads =
        working.into_iter().map(|load| load.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect();
    pool.leave();
    loads
}

fn campaign(short: &str, size: &str, seed: u64, snapshots: bool) {
    needs!(as_root());
    let seed = seed + number("NACRE_POOL_SEED", 0);
    let mut random = Random(seed);
    let pool = Pool::made(short, size, &[]);
    let mut loads = programs::all(pool.place.path());
    if snapshots {
        loads.push(Box::new(Snapshots::default()));
    }
    for at in 0..number("NACRE_POOL_ROUNDS", 2) {
        let what = format!("{short}, seed {seed}, round {at}");
        loads = round(&pool, loads, &mut random);
        pool.check_device(&what);
        pool.import();
        if random.below(4) == 0 {
            // Once more, before anything has been made of what the log said.
            pool.die();
            pool.leave();
            pool.check_device(&what);
            pool.import();
        }
        for load in &mut loads {
            load.judge(&pool.at(""), &what);
        }
    }
    pool.told(&["pool", "scrub", "-w", "%"]);
    assert_eq!(pool.told(&["pool", "status", "-x", "%"]), format!("pool '{}' is healthy\n", pool.name));
    let promises: Vec<String> = loads.iter().map(|load| load.promises()).collect();
    println!("campaign: {short}, seed {seed} (NACRE_POOL_ROUNDS, NACRE_POOL_SEED): {}", promises.join(", "));
}

#[test]
fn a_pool_whose_writes_the_kernel_collects_keeps_what_was_synced() {
    campaign("crl", "3G", 1, true);
}

#[test]
fn a_small_pool_keeps_what_was_synced() {
    // Snapshots would keep what all others overwrite: it has no room for that.
    campaign("crs", "512M", 1000, false);
}

/// Returns whether sync(2) is intercepted here: on Linux 6.18 and newer, where loop devices exist.
fn sync_is_heard() -> bool {
    let name = rustix::system::uname();
    let release = name.release().to_string_lossy();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse().unwrap_or(0));
    let new_enough = (numbers.next(), numbers.next()) >= (Some(6), Some(18));
    (new_enough && Path::new("/dev/loop-control").exists())
        || crate::mounting::skip("sync", "sync(2) is not heard here")
}

/// Returns whether a loop device exists by which this process is notified of sync(2).
fn hears(process: u32) -> bool {
    let name = format!("nacre-sync-{process} ");
    let backing =
        |entry: std::fs::DirEntry| std::fs::read_to_string(entry.path().join("loop/backing_file")).unwrap_or_default();
    std::fs::read_dir("/sys/block").unwrap().any(|entry| backing(entry.unwrap()).contains(&name))
}

#[test]
fn what_was_done_before_sync_is_there_after_a_crash() {
    needs!(as_root() && sync_is_heard());
    let pool = Pool::made("psync", "3G", &[]);
    pool.told(&["fs", "create", "%/below"]);
    for round in 0..number("NACRE_POOL_ROUNDS", 4) {
        let (process, at) = (pool.process(&pool.name), pool.at(""));
        let file = |name: &str| at.join(format!("{name}{round}"));
        assert!(hears(process));
        // Closed; held open, written to and appended to; mapped, the descriptor closed; names.
        std::fs::write(file("closed"), b"closed").unwrap();
        std::fs::write(file("below/closed"), b"below").unwrap();
        let mut held = std::fs::File::create(file("held")).unwrap();
        held.write_all(&[b'h'; 100_000]).unwrap();
        let mut log = std::fs::File::options().create(true).append(true).open(file("log")).unwrap();
        log.write_all(b"appended").unwrap();
        let mapped = std::fs::File::options().create_new(true).read(true).write(true).open(file("mapped")).unwrap();
        mapped.set_len(1 << 20).unwrap();
        let mapping = nacre_sys::mapping::SharedMapping::new(&mapped, 1 << 20, true).unwrap();
        drop(mapped);
        mapping.write(70_000, b"stored").unwrap();
        std::fs::create_dir(file("directory")).unwrap();
        std::fs::rename(file("closed"), file("renamed")).unwrap();
        rustix::fs::sync();
        pool.die();
        eventually("the loop device goes with its process", || !hears(process));
        drop((held, log, mapping));
        pool.leave();
        pool.import();
        assert_eq!(std::fs::read(file("renamed")).unwrap(), b"closed");
        assert_eq!(std::fs::read(file("below/closed")).unwrap(), b"below");
        assert!(std::fs::read(file("held")).unwrap() == [b'h'; 100_000]);
        assert_eq!(std::fs::read(file("log")).unwrap(), b"appended");
        assert_eq!(std::fs::read(file("mapped")).unwrap()[70_000..70_006], *b"stored");
        assert!(file("directory").is_dir() && !file("closed").exists());
    }
    let process = pool.process(&pool.name);
    pool.told(&["pool", "export", "%"]);
    eventually("the loop device goes with its process", || !hears(process));
    pool.import();
}

#[test]
fn sync_can_be_called_while_the_process_dies() {
    needs!(as_root() && sync_is_heard());
    let (pool, mut random) = (Pool::made("psyncs", "1G", &[]), Random(11 + number("NACRE_POOL_SEED", 0)));
    for _ in 0..number("NACRE_POOL_ROUNDS", 4) {
        let process = pool.process(&pool.name);
        let ends = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let caller = |number: u64| {
            let (ends, file) = (Arc::clone(&ends), pool.at("").join(format!("caller{number}")));
            std::thread::spawn(move || {
                while !ends.load(std::sync::atomic::Ordering::Relaxed) {
                    // The mount is dead at last.
                    let _ = std::fs::write(&file, b"content");
                    rustix::fs::sync();
                }
            })
        };
        let callers: Vec<_> = (0..3).map(caller).collect();
        std::thread::sleep(Duration::from_millis(random.below(300)));
        Yard::end_process(process, rustix::process::Signal::KILL);
        ends.store(true, std::sync::atomic::Ordering::Relaxed);
        eventually("everybody who called it goes on", || callers.iter().all(std::thread::JoinHandle::is_finished));
        eventually("the loop device goes with its process", || !hears(process));
        pool.leave();
        pool.check_device("killed while sync(2) was called");
        pool.import();
    }
}
