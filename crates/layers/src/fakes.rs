//! Fakes of the system for unit tests of this crate and of crates above (feature `fakes`):
//! accounts, processes, block devices and a clock that only tests advance.

use crate::{
    accounts::{Accounts, Credentials, Processes, User},
    clock::Clock,
    context::{Context, Devices, Mounter, simply_waiting, tell_nobody},
};
use nacre_vfs::Result;
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

/// alice 1000 (group users 100), bob 1001 (users, staff 50), carol 1002 (users).
#[derive(Default)]
pub struct FakeAccounts {
    asked: AtomicUsize,
    failing: AtomicBool,
}

impl FakeAccounts {
    /// Number of queries so far.
    pub fn asked(&self) -> usize {
        self.asked.load(Ordering::Relaxed)
    }
    /// Makes all queries fail.
    pub fn fail(&self, failing: bool) {
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

/// Processes with ids set by a test.
#[derive(Default)]
pub struct FakeProcesses {
    /// By process.
    pub groups: Mutex<HashMap<u32, Vec<u32>>>,
    /// User and group, by process.
    pub users: Mutex<HashMap<u32, (u32, u32)>>,
    asked: AtomicUsize,
}

impl FakeProcesses {
    /// Number of queries so far.
    pub fn asked(&self) -> usize {
        self.asked.load(Ordering::Relaxed)
    }
}

impl Processes for FakeProcesses {
    fn credentials(&self, pid: u32) -> io::Result<Option<Credentials>> {
        let Some(&(uid, gid)) = self.users.lock().get(&pid) else { return Ok(None) };
        Ok(Some(Credentials { uid, gid, groups: self.groups.lock().get(&pid).cloned().unwrap_or_default() }))
    }

    fn supplementary_groups(&self, pid: u32) -> io::Result<Vec<u32>> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        Ok(self.groups.lock().get(&pid).cloned().unwrap_or_default())
    }
}

/// A clock that stands still until it is advanced; pausing advances it and adds up.
#[derive(Default)]
pub struct FakeClock {
    now: Mutex<Duration>,
    paused: Mutex<Duration>,
}

impl FakeClock {
    /// Lets time pass.
    pub fn advance(&self, by: Duration) {
        *self.now.lock() += by;
    }
    /// Sum of all pauses.
    pub fn paused(&self) -> Duration {
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

/// One block device, 8:1, of 1,000,001 bytes.
struct FakeDevices;

impl Devices for FakeDevices {
    fn size(&self, major: u32, minor: u32) -> Option<u64> {
        ((major, minor) == (8, 1)).then_some(1_000_001)
    }
}

/// Context of a mount by this user, made of these fakes.
pub fn context(uid: u32) -> Context {
    Context {
        mounter: Mounter { uid, gid: uid, groups: Vec::new() },
        accounts: Arc::new(FakeAccounts::default()),
        processes: Arc::new(FakeProcesses::default()),
        devices: Arc::new(FakeDevices),
        clock: Arc::new(FakeClock::default()),
        waiting: simply_waiting(),
        watch_group: None,
        reached: Default::default(),
        left_numbers: None,
        lock_directory: Default::default(),
        tell: tell_nobody(),
    }
}
