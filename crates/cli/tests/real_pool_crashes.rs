//! The process of a pool is killed under load, again and again: what was synced is there, and the pool is in order.
//!
//! `NACRE_POOL_ROUNDS` is the number of deaths for each size of pool, `NACRE_POOL_SEED` another beginning.

// A failed expectation in a test is what the test reports.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod crashing;
mod mounting;

use crashing::{Dead, Load, Random, programs, snapshots::Snapshots};
use mounting::{as_root, eventually, finish, nacre, scratch, text};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |value| value.parse().expect(name))
}

/// One pool on one file, mounted.
struct Pool {
    name: String,
    place: tempfile::TempDir,
}

impl Pool {
    fn new(short: &str, size: &str) -> Pool {
        let pool = Pool { name: format!("{short}{}", std::process::id()), place: scratch() };
        let (at, device) = (pool.at(), pool.device());
        pool.run(&["create", "--size", size, "-m", at.to_str().unwrap(), &pool.name, device.to_str().unwrap()]);
        pool
    }

    fn device(&self) -> PathBuf {
        self.place.path().join("device")
    }

    fn at(&self) -> PathBuf {
        self.place.path().join("at")
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(nacre());
        command.current_dir(self.place.path()).env("NACRE_STATE_DIR", self.place.path().join("state")).env("LC_ALL", "C");
        command.arg("pool").args(arguments);
        command
    }

    fn run(&self, arguments: &[&str]) -> String {
        let output = finish(&mut self.command(arguments));
        let said = text(&output.stdout) + &text(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {said}");
        said
    }

    fn import(&self) {
        self.run(&["import", "-d", self.device().to_str().unwrap(), &self.name]);
    }

    fn process(&self) -> rustix::process::Pid {
        let status: serde_json::Value = serde_json::from_str(&self.run(&["status", "--json", &self.name])).unwrap();
        let process = i32::try_from(status["pools"][&self.name]["process"].as_i64().unwrap()).unwrap();
        rustix::process::Pid::from_raw(process).unwrap()
    }

    /// Ends the pool's process as a crash would.
    fn kill(&self, process: rustix::process::Pid) {
        rustix::process::kill_process(process, rustix::process::Signal::KILL).unwrap();
        let gone = Path::new("/proc").join(process.as_raw_nonzero().to_string());
        eventually("the end of the process", || !gone.exists());
    }

    fn leave(&self) {
        rustix::mount::unmount(self.at(), rustix::mount::UnmountFlags::DETACH).unwrap();
    }

    fn check(&self, what: &str) {
        let said = self.run(&["check", "-d", self.device().to_str().unwrap()]);
        assert!(said.starts_with("no problems: "), "{what}: {said}");
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if std::thread::panicking() && std::env::var_os("NACRE_POOL_KEEP").is_some() {
            let kept = std::env::temp_dir().join(format!("kept-{}", self.name));
            let _ = std::fs::copy(self.device(), &kept);
            eprintln!("the device is kept as {}", kept.display());
        }
        let _ = finish(&mut self.command(&["destroy", "-f", &self.name]));
        mounting::clear(self.place.path());
    }
}

/// Everything at once until the process is killed.
fn round(pool: &Pool, loads: Vec<Box<dyn Load>>, random: &mut Random) -> Vec<Box<dyn Load>> {
    let dead = Arc::new(Dead::default());
    let process = pool.process();
    let start = |mut load: Box<dyn Load>| {
        let (at, dead, seed) = (pool.at(), Arc::clone(&dead), random.next());
        std::thread::spawn(move || {
            load.work(&at, seed, &dead);
            load
        })
    };
    let working: Vec<_> = loads.into_iter().map(start).collect();
    std::thread::sleep(Duration::from_millis(50 + random.below(5000)));
    dead.set();
    pool.kill(process);
    eventually("the end of all loads", || working.iter().all(std::thread::JoinHandle::is_finished));
    let loads = working.into_iter().map(|load| load.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect();
    pool.leave();
    loads
}

fn campaign(short: &str, size: &str, seed: u64, snapshots: bool) {
    if !as_root() {
        return;
    }
    let seed = seed + number("NACRE_POOL_SEED", 0);
    let mut random = Random(seed);
    let pool = Pool::new(short, size);
    let mut loads = programs::all(pool.place.path());
    if snapshots {
        loads.push(Box::new(Snapshots::default()));
    }
    for at in 0..number("NACRE_POOL_ROUNDS", 2) {
        let what = format!("{short}, seed {seed}, round {at}");
        loads = round(&pool, loads, &mut random);
        pool.check(&what);
        pool.import();
        if random.below(4) == 0 {
            // Once more, before anything has been made of what the log said.
            pool.kill(pool.process());
            pool.leave();
            pool.check(&what);
            pool.import();
        }
        for load in &mut loads {
            load.judge(&pool.at(), &what);
        }
    }
    pool.run(&["scrub", "-w", &pool.name]);
    assert_eq!(pool.run(&["status", "-x", &pool.name]), format!("pool '{}' is healthy\n", pool.name));
    let promises: Vec<String> = loads.iter().map(|load| load.promises()).collect();
    println!("{short}: {}", promises.join(", "));
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
