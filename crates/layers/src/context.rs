//! What a stack needs of its surroundings to be built: who mounts it, and how to ask the system.
//! Passed in once; tests pass their own.

use crate::{
    accounts::{Accounts, Processes},
    clock::Clock,
    host::WatchGroup,
};
use nacre_vfs::{LeftNumbers, Result};
use std::{
    collections::HashMap,
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
};

/// Runs a call that may take long (a throttled read, a question to a directory service) such that
/// other requests go on meanwhile: a door that has few threads makes sure of another one. Calls
/// once and answers Ok, or does not call and answers why (EINTR: the user gave up).
pub type Waiting = Arc<dyn Fn(&mut dyn FnMut()) -> Result<()> + Send + Sync>;

/// Simply calls: for doors with a thread per request, and for tests.
pub fn simply_waiting() -> Waiting {
    Arc::new(|call| {
        call();
        Ok(())
    })
}

/// Tells whoever wants to know of an event: its kind, and what is known of it by name. Returns at
/// once.
pub type Tell = Arc<dyn Fn(&'static str, Vec<(String, String)>) + Send + Sync>;

/// Tells nobody.
pub fn tell_nobody() -> Tell {
    Arc::new(|_, _| {})
}

/// Runs `call` by `waiting` and answers its result.
///
/// # Errors
/// Why it was not called.
pub fn wait_for<T>(waiting: &Waiting, call: impl FnOnce() -> T) -> Result<T> {
    let (mut call, mut result) = (Some(call), None);
    waiting(&mut || result = call.take().map(|call| call()))?;
    // A `Waiting` that answers Ok without calling breaks its promise.
    result.ok_or(nacre_vfs::Errno::EIO)
}

/// Who made the mount.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mounter {
    /// Effective user id.
    pub uid: u32,
    /// Effective group id.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
}

impl Mounter {
    /// Whether it is the superuser (of its user namespace).
    pub fn is_root(&self) -> bool {
        self.uid == 0
    }
}

/// Sizes of block devices.
pub trait Devices: Send + Sync {
    /// The size in bytes of the block device with these numbers; `None` where it is unknown or
    /// absent.
    fn size(&self, major: u32, minor: u32) -> Option<u64>;
}

/// The surroundings.
#[derive(Clone)]
pub struct Context {
    /// Who mounts.
    pub mounter: Mounter,
    /// Users and groups.
    pub accounts: Arc<dyn Accounts>,
    /// Running processes.
    pub processes: Arc<dyn Processes>,
    /// Block devices.
    pub devices: Arc<dyn Devices>,
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// How to wait.
    pub waiting: Waiting,
    /// Where the same for several stacks of one process, their directories are watched together.
    /// What one of them changes no other may show.
    pub watch_group: Option<Arc<WatchGroup>>,
    /// By which path directories are reached, where something may be mounted over the one that they
    /// are known by.
    pub reached: HashMap<PathBuf, PathBuf>,
    /// Where a union notes its numbers for a process after this one, if there may be one.
    pub left_numbers: Option<Arc<dyn LeftNumbers>>,
    /// Whom to tell of events.
    pub tell: Tell,
}

impl Context {
    /// By which path a directory is reached.
    pub fn reached<'a>(&'a self, directory: &'a Path) -> &'a Path {
        self.reached.get(directory).map_or(directory, PathBuf::as_path)
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("mounter", &self.mounter).finish_non_exhaustive()
    }
}
