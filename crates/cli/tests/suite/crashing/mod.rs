//! Loads on a mount whose process dies at any moment, and the checks after the crash.
//!
//! Callers: `pool_crashes.rs`, `pool_groups.rs`, `walk.rs`. Each load records its promises: of an
//! fsync, a commit of a database, a finished clone. Only the death of the mount ends a load: an
//! error before that is a failure.
pub mod programs;
pub mod recorder;
pub mod snapshots;

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

/// Random numbers from a seed (SplitMix64).
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// Returns any number.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number below this one.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit.max(1)
    }

    /// Returns this many bytes.
    pub fn bytes(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(length + 8);
        while bytes.len() < length {
            bytes.extend(self.next().to_le_bytes());
        }
        bytes.truncate(length);
        bytes
    }
}

/// Whether the test has made the mount die, or has asked the loads to end.
#[derive(Debug, Default)]
pub struct Dead(AtomicBool, AtomicBool);

impl Dead {
    /// Announces the death: from now on errors are expected.
    pub fn set(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    /// Asks the loads to end, while the mount still lives.
    pub fn end(&self) {
        self.1.store(true, Ordering::SeqCst);
        self.set();
    }

    /// Returns whether the loads have to end.
    pub fn is_end(&self) -> bool {
        self.1.load(Ordering::SeqCst)
    }

    /// Returns whether the death was announced.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// A load that uses a mount until the mount dies.
pub trait Load: Send {
    /// Works until the mount is dead; panics where an error comes before that.
    fn work(&mut self, at: &Path, seed: u64, dead: &Dead);

    /// Checks the files after a crash; panics where a promise was broken.
    fn judge(&mut self, at: &Path, what: &str);

    /// Describes the promises so far, for the report.
    fn promises(&self) -> String;
}

/// The thread of a load; it returns the load when the mount is dead.
pub type Working = JoinHandle<Box<dyn Load>>;

/// Starts loads, each with a seed of its own.
pub fn begin(loads: Vec<Box<dyn Load>>, at: &Path, dead: &Arc<Dead>, random: &mut Random) -> Vec<Working> {
    let start = |mut load: Box<dyn Load>| {
        let (at, dead, seed) = (at.to_owned(), Arc::clone(dead), random.next());
        thread::spawn(move || {
            load.work(&at, seed, &dead);
            load
        })
    };
    loads.into_iter().map(start).collect()
}

/// Panics unless an error is one of a dead mount.
#[track_caller]
pub fn expected(error: &io::Error, dead: &Dead) {
    let errno = error.raw_os_error().map(rustix::io::Errno::from_raw_os_error);
    let of_death = [
        rustix::io::Errno::NOTCONN,
        rustix::io::Errno::CONNABORTED,
        rustix::io::Errno::CANCELED,
        rustix::io::Errno::IO,
    ];
    assert!(
        dead.is_set() && errno.is_some_and(|errno| of_death.contains(&errno)),
        "{error} (the mount is dead: {})",
        dead.is_set()
    );
}
