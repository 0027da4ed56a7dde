//! A cache of the figures of free space: a creation should not cost a `statfs(2)` per branch.

use nacre_vfs::{Result, StatFs};
use parking_lot::Mutex;
use std::time::Duration;

/// The figures of a branch, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Space {
    /// Free for ordinary users.
    pub free: u64,
    /// Used.
    pub used: u64,
    /// Total.
    pub total: u64,
}

impl From<&StatFs> for Space {
    fn from(statfs: &StatFs) -> Space {
        let bytes = |count: u64| count.saturating_mul(u64::from(statfs.fragment));
        Space {
            free: bytes(statfs.available),
            used: bytes(statfs.blocks.saturating_sub(statfs.free)),
            total: bytes(statfs.blocks),
        }
    }
}

/// The figures of all branches, each with the time of its query.
#[derive(Debug, Default)]
pub struct SpaceCache {
    known: Mutex<Vec<Option<(Duration, Space)>>>,
}

impl SpaceCache {
    /// The figures of a branch, at most `hold` old at `now` (any monotonic clock); queried without holding a
    /// lock.
    ///
    /// # Errors
    /// Errors of `ask`.
    pub fn get(
        &self,
        branch: usize,
        now: Duration,
        hold: Duration,
        ask: impl FnOnce() -> Result<StatFs>,
    ) -> Result<Space> {
        let known = self.known.lock().get(branch).copied().flatten();
        if let Some((at, space)) = known
            && now.saturating_sub(at) < hold
        {
            return Ok(space);
        }
        let space = Space::from(&ask()?);
        let mut all = self.known.lock();
        if all.len() <= branch {
            all.resize(branch + 1, None);
        }
        if let Some(slot) = all.get_mut(branch) {
            *slot = Some((now, space));
        }
        Ok(space)
    }

    /// Drops the figures of a branch that turned out to be full.
    pub fn forget(&self, branch: usize) {
        if let Some(slot) = self.known.lock().get_mut(branch) {
            *slot = None;
        }
    }
}
