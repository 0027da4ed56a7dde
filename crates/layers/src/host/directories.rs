//! Descriptors of directories: opened on demand, kept within a budget, never re-resolved from the
//! root.
//!
//! Called by every operation on a name. Invariants: a descriptor that is handed out belongs to the
//! directory that was asked for (its identity is checked after opening); no link is followed on the
//! way but where links are shown as their targets; at most `budget` descriptors are kept besides
//! those in use at the moment, half of them of directories that have lost their names; where the
//! sources of the process hold more than a quarter of `room` together, or files and directories
//! more than `room`, whoever wants one more gives up its own.

use super::{
    held::Held,
    mounts::Mounts,
    node::{HostNode, NodePlace},
    stat,
};
use nacre_sys::descriptors;
use nacre_vfs::{Errno, FileId, Kind, Result};
use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags, Statx};
use std::{
    collections::VecDeque,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, Weak,
        atomic::{AtomicUsize, Ordering},
    },
};

/// More than this many kept descriptors pin more of the kernel's memory than they save in calls.
const BUDGET_MAX: usize = 8192;

/// The most directories that are opened on the way to one.
const DEPTH_MAX: usize = 1 << 17;

/// The descriptors of one source.
pub(super) struct Directories {
    root: Arc<Held>,
    mounts: Mounts,
    /// Directories with a descriptor, in the order of the next round of eviction (a clock).
    clock: Mutex<VecDeque<Weak<HostNode>>>,
    count: Arc<AtomicUsize>,
    /// One owner more for each directory that is kept without a name.
    nameless: Arc<()>,
    budget: usize,
    room: usize,
}

impl Directories {
    /// `root`, of which `statx` tells, stays open for good.
    pub(super) fn new(root: OwnedFd, statx: &Statx, (budget, room): (usize, usize)) -> Directories {
        let count = Arc::default();
        let (root, mounts) = (Held::new(root, &count), Mounts::new(statx));
        Directories {
            root,
            mounts,
            clock: Mutex::default(),
            count,
            nameless: Arc::default(),
            budget: budget.max(4),
            room,
        }
    }

    /// A quarter of what the process may hold for long, and all of that.
    pub(super) fn default_budget() -> (usize, usize) {
        let room = descriptors::room();
        ((room / 4).min(BUDGET_MAX), room)
    }

    /// The root directory.
    pub(super) fn root(&self) -> BorrowedFd<'_> {
        self.root.fd()
    }

    /// The mounts that directories are found through.
    pub(super) fn mounts(&self) -> &Mounts {
        &self.mounts
    }

    /// How many descriptors of directories are open.
    #[cfg(test)]
    pub(super) fn open(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// A descriptor of a directory, good for calls relative to it (`O_PATH`).
    ///
    /// # Errors
    /// ENOTDIR where it is none; ESTALE where it is no longer where it was seen.
    pub(super) fn get(&self, node: &Arc<HostNode>) -> Result<Arc<Held>> {
        if node.is_root() {
            return Ok(Arc::clone(&self.root));
        }
        if let Some(held) = node.descriptor() {
            return Ok(held);
        }
        if node.kind() != Kind::Directory {
            return Err(Errno::ENOTDIR);
        }
        let mut chain: Vec<(Arc<HostNode>, NodePlace)> = Vec::new();
        let mut next = Arc::clone(node);
        let mut held = loop {
            let place = next.place().ok_or(Errno::ESTALE)?;
            let parent = Arc::clone(&place.parent);
            chain.push((next, place));
            if parent.is_root() {
                break Arc::clone(&self.root);
            }
            if let Some(held) = parent.descriptor() {
                break held;
            }
            if chain.len() > DEPTH_MAX {
                return Err(Errno::ESTALE);
            }
            next = parent;
        };
        while let Some((node, place)) = chain.pop() {
            held = self.open_below(&held, &node, &place)?;
        }
        Ok(held)
    }

    fn open_below(&self, parent: &Held, node: &Arc<HostNode>, place: &NodePlace) -> Result<Arc<Held>> {
        let name = place.name.bytes();
        let mut flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        if !node.is_resolved() {
            flags |= OFlags::NOFOLLOW;
        }
        let descriptor =
            rustix::fs::openat(parent.fd(), name, flags, Mode::empty()).map_err(|error| match stat::errno(error) {
                Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP => Errno::ESTALE,
                other => other,
            })?;
        if self.identity(parent.fd(), name, node, descriptor.as_fd())? != node.id() {
            return Err(Errno::ESTALE);
        }
        let (held, kept) = node.keep_descriptor(Held::new(descriptor, &self.count));
        if kept {
            self.admit(node);
        }
        Ok(held)
    }

    /// The identity of what was opened under `name`, as `node` would have it.
    pub(super) fn identity(
        &self,
        parent: BorrowedFd<'_>,
        name: &[u8],
        node: &HostNode,
        opened: BorrowedFd<'_>,
    ) -> Result<FileId> {
        let target = stat::of_file_timeless(opened)?;
        if node.is_resolved() {
            Ok(self.mounts.resolved_id(&stat::of_name(parent, name)?, &target))
        } else {
            Ok(self.mounts.id(&target))
        }
    }

    /// Keeps the descriptor of a directory that no name leads to for as long as the node lives.
    pub(super) fn pin(&self, node: &Arc<HostNode>, descriptor: OwnedFd) {
        // Never entered into the rounds, so never evicted.
        node.keep_descriptor(Held::new(descriptor, &self.count));
    }

    /// The same for one that has a descriptor, and has just lost its name. Half of the budget at
    /// most goes to such directories.
    pub(super) fn keep_for_good(&self, node: &Arc<HostNode>) {
        if Arc::strong_count(&self.nameless) <= self.budget / 2 {
            node.keep_for_good(Arc::clone(&self.nameless));
        }
    }

    /// Whether one has to go. The root and one directory more are everybody's.
    fn is_over(&self) -> bool {
        let own = self.count.load(Ordering::Relaxed);
        own > self.budget
            || own > 2 && (descriptors::DIRECTORIES.held() > self.room / 4 || descriptors::held() > self.room)
    }

    /// Enters a directory into the rounds and evicts others until the budget holds.
    fn admit(&self, node: &Arc<HostNode>) {
        let mut clock = self.clock.lock();
        clock.push_back(Arc::downgrade(node));
        // Each step frees one, drops a dead entry, or clears a mark; twice round clears everything.
        let mut steps = clock.len() * 2;
        while (self.is_over() || clock.len() > 2 * self.budget) && steps > 0 {
            steps -= 1;
            let Some(oldest) = clock.pop_front() else { return };
            if let Some(directory) = oldest.upgrade()
                && directory.evict_descriptor()
            {
                clock.push_back(oldest);
            }
        }
    }
}
