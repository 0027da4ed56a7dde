//! The environment that a stack is built in: the mounter, and access to the system. Passed in once;
//! tests pass their own.

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

/// Runs a call that may take long (a throttled read, a query to a directory service) so that other
/// requests are served meanwhile: a front end with few threads provides another one. Either calls
/// once and returns Ok, or does not call and returns the reason (EINTR: the user gave up).
pub type Waiting = Arc<dyn Fn(&mut dyn FnMut()) -> Result<()> + Send + Sync>;

/// A `Waiting` that calls directly: for front ends with a thread per request, and for tests.
pub fn simply_waiting() -> Waiting {
    Arc::new(|call| {
        call();
        Ok(())
    })
}

/// Reports an event to its subscribers: its kind, and details by name. Returns at once.
pub type Tell = Arc<dyn Fn(&'static str, Vec<(String, String)>) + Send + Sync>;

/// A `Tell` that drops all events.
pub fn tell_nobody() -> Tell {
    Arc::new(|_, _| {})
}

/// Runs `call` by `waiting` and returns its result.
///
/// # Errors
/// The reason why it was not called.
pub fn wait_for<T>(waiting: &Waiting, call: impl FnOnce() -> T) -> Result<T> {
    let (mut call, mut result) = (Some(call), None);
    waiting(&mut || result = call.take().map(|call| call()))?;
    // A `Waiting` that returns Ok without calling breaks its contract.
    result.ok_or(nacre_vfs::Errno::EIO)
}

/// The user who made the mount.
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
    /// Whether the mounter is the superuser (of its user namespace).
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

/// Directory of the lock files by which unions claim their branches. Only the mounter may enter it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum LockDirectory {
    /// No lock files: all unions are in this process, and their owner keeps their branches apart.
    #[default]
    Off,
    /// The directory.
    At(PathBuf),
    /// There is none, for this reason.
    Unusable(String),
}

/// The environment of a stack.
#[derive(Clone)]
pub struct Context {
    /// The user who mounts.
    pub mounter: Mounter,
    /// Users and groups.
    pub accounts: Arc<dyn Accounts>,
    /// Running processes.
    pub processes: Arc<dyn Processes>,
    /// Block devices.
    pub devices: Arc<dyn Devices>,
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// How long calls wait.
    pub waiting: Waiting,
    /// Stacks of one process with the same group share watches of their directories. A change
    /// through one of them must not be visible through another.
    pub watch_group: Option<Arc<WatchGroup>>,
    /// Paths by which directories are reached, where the directory's own path may have another
    /// mount over it.
    pub reached: HashMap<PathBuf, PathBuf>,
    /// Store in which a union records its numbers for a successor process, if there may be one.
    pub left_numbers: Option<Arc<dyn LeftNumbers>>,
    /// Where unions lock their branches.
    pub lock_directory: LockDirectory,
    /// Reports events.
    pub tell: Tell,
}

impl Context {
    /// The path by which a directory is reached.
    pub fn reached<'a>(&'a self, directory: &'a Path) -> &'a Path {
        self.reached.get(directory).map_or(directory, PathBuf::as_path)
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("mounter", &self.mounter).finish_non_exhaustive()
    }
}
