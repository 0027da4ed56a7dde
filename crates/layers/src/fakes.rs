//! Stand-ins for the system in unit tests: accounts, processes, block devices and a clock that only
//! tests move.

use crate::{
    accounts::{Accounts, Processes, User},
    clock::Clock,
};
use nacre_vfs::Result;
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    io,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    time::Duration,
};

/// alice 1000 (group users 100), bob 1001 (users, staff 50), carol 1002 (users).
#[derive(Default)]
pub(crate) struct FakeAccounts {
    asked: AtomicUsize,
    failing: AtomicBool,
}

impl FakeAccounts {
    pub(crate) fn asked(&self) -> usize {
        self.asked.load(Ordering::Relaxed)
    }
    pub(crate) fn fail(&self, failing: bool) {
        self.failing.store(failing, Ordering::Relaxed);
    }
    fn check(&self) -> io::Result<()> {
        if self.failing.load(Ordering::Relaxed) { Err(io::Error::other("no answer")) } else { Ok(()) }
    }
}

impl Accounts for FakeAccounts {
    fn user(&self, name: &str) -> io::Result<Option<User>> {
        self.check()?;
        Ok([("root", 0, 0), ("alice", 1000, 100), ("bob", 1001, 100), ("carol", 1002, 100)]
            .iter()
            .find(|user| user.0 == name)
            .map(|&(_, uid, gid)| User { uid, gid }))
    }
    fn group(&self, name: &str) -> io::Result<Option<u32>> {
        self.check()?;
        Ok([("root", 0), ("staff", 50), ("users", 100)].iter().find(|group| group.0 == name).map(|group| group.1))
    }
    fn groups_of(&self, uid: u32) -> io::Result<Vec<u32>> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        self.check()?;
        Ok(match uid {
            0 => vec![0],
            1001 => vec![100, 50],
            1000 | 1002 => vec![100],
            _ => Vec::new(),
        })
    }
}

#[derive(Default)]
pub(crate) struct FakeProcesses {
    pub(crate) groups: Mutex<HashMap<u32, Vec<u32>>>,
    asked: AtomicUsize,
}

impl FakeProcesses {
    pub(crate) fn asked(&self) -> usize {
        self.asked.load(Ordering::Relaxed)
    }
}

impl Processes for FakeProcesses {
    fn supplementary_groups(&self, pid: u32) -> io::Result<Vec<u32>> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        Ok(self.groups.lock().get(&pid).cloned().unwrap_or_default())
    }
}

/// A clock that stands still until it is advanced; pausing advances it and adds up.
#[derive(Default)]
pub(crate) struct FakeClock {
    now: Mutex<Duration>,
    paused: Mutex<Duration>,
}

impl FakeClock {
    pub(crate) fn advance(&self, by: Duration) {
        *self.now.lock() += by;
    }
    pub(crate) fn paused(&self) -> Duration {
        *self.paused.lock()
    }
}

impl Clock for FakeClock {
    fn now(&self) -> Duration {
        *self.now.lock()
    }
    fn pause(&self, duration: Duration) -> Result<()> {
        *self.paused.lock() += duration;
        self.advance(duration);
        Ok(())
    }
}
