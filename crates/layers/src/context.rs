//! What a stack needs of its surroundings to be built: who mounts it, and how to ask the system. Passed in once; tests pass their own.

use crate::{
    accounts::{Accounts, Processes},
    clock::Clock,
};
use std::{fmt, sync::Arc};

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
    /// The size in bytes of the block device with these numbers; `None` where it is unknown or absent.
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
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("mounter", &self.mounter).finish_non_exhaustive()
    }
}
