//! Descriptors of directories: opened on demand, kept within a budget, never re-resolved from the
//! root.
//!
//! Called by every operation on a name. Invariants: a returned descriptor belongs to the requested
//! directory (its identity is checked after opening); no link is followed on the way, except where
//! links are shown as their targets; at most `budget` descriptors are kept in addition to those in
//! use at the moment, half of them of directories that have lost their names; where the sources of
//! the process hold more than a quarter of `room` together, or files and directories more than
//! `room`, a source that opens one more closes one of its own. A descriptor of a directory on a
//! foreign mount (another one than the root's) is closed with the operation that needed it, as an
//! open descriptor keeps a mount from being unmounted; only a directory that loses its name while
//! it is in use keeps one.

use super::{
    held::Held,
    mounts::Mounts,
    node::{HostNode, NodePlace},
    stat,
};
use nacre_sys::descriptors;
use nacre_vfs::{Errno, FileId, Kind, Result};
use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags, ResolveFlags, Statx};
use std::{
    collections::VecDeque,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, Weak,
        atomic::{AtomicUsize, Ordering},
    },
};

/// Maximum budget: more kept descriptors pin more of the kernel's memory than they save in calls.
const BUDGET_MAX: usize = 8192;

/// Maximum number of directories that are opened on the path to one.
const DEPTH_MAX: usize = 1 << 17;

/// The longest path that the kernel takes, with the zero byte at its end.
const PATH_MAX: usize = 4096;

/// Maximum number of directories on foreign mounts that are remembered as about to lose their
/// names.
const GOING_MAX: usize = 64;

/// A directory to open and its name in its parent, up to the root or an open directory.
type Step = (Arc<HostNode>, NodePlace);

/// Converts the error of opening a directory by its last known name.
fn moved(error: rustix::io::Errno) -> Errno {
    match stat::errno(error) {
        Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP => Errno::ESTALE,
        other => other,
    }
}

/// The descriptors of one source.
pub(super) struct Directories {
    root: Arc<Held>,
    mounts: Mounts,
    /// Directories with a descriptor, in the order of the next round of eviction (a clock).
    clock: Mutex<VecDeque<Weak<HostNode>>>,
    count: Arc<AtomicUsize>,
    /// Reference count of the directories that are kept without a name (plus one).
    nameless: Arc<()>,
    /// Directories on foreign mounts that are in use and about to lose their names.
    going: Mutex<Vec<Weak<HostNode>>>,
    budget: usize,
    room: usize,
}

impl Directories {
    /// Takes the root, with its attributes; it stays open for good.
    pub(super) fn new(root: OwnedFd, statx: &Statx, (budget, room): (usize, usize)) -> Directories {
        let count = Arc::default();
        let (root, mounts) = (Held::new(root, false, &count), Mounts::new(statx));
        Directories {
            root,
            mounts,
            clock: Mutex::default(),
            count,
            nameless: Arc::default(),
            going: Mutex::default(),
            budget: budget.max(4),
            room,
        }
    }

    /// Default budget, a quarter of the descriptors that the process may hold for long, and that
    /// number.
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

    /// Number of open directory descriptors.
    #[cfg(test)]
    pub(super) fn open(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Returns a descriptor of a directory, usable for calls relative to it (`O_PATH`).
    ///
    /// # Errors
    /// ENOTDIR for another type; ESTALE if it has moved from where it was seen.
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
        let mut chain: Vec<Step> = Vec::new();
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
            if !chain.is_empty() && (held.is_foreign() || node.device() != self.mounts.root().1) {
                chain.push((node, place));
                if let Some(opened) = self.open_at_once(&held, &chain)? {
                    return Ok(opened);
                }
                return self.open_step_by_step(held, chain);
            }
            held = self.open_below(&held, &node, &place)?;
        }
        Ok(held)
    }

    fn open_step_by_step(&self, from: Arc<Held>, mut chain: Vec<Step>) -> Result<Arc<Held>> {
        let mut held = from;
        while let Some((node, place)) = chain.pop() {
            held = self.open_below(&held, &node, &place)?;
        }
        Ok(held)
    }

    /// Opens the first directory of `chain`, the last of which lies in `from`, by one path: without
    /// kept descriptors on a foreign mount, each operation there would otherwise open every
    /// directory on its path. `None` where the kernel cannot do so without following links.
    fn open_at_once(&self, from: &Held, chain: &[Step]) -> Result<Option<Arc<Held>>> {
        let Some((node, place)) = chain.first() else { return Ok(None) };
        let mut path: Vec<u8> = Vec::new();
        for (node, place) in chain.iter().rev() {
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend_from_slice(place.name.bytes());
            if node.is_resolved() || path.len() >= PATH_MAX {
                return Ok(None);
            }
        }
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let opened = match rustix::fs::openat2(from.fd(), &*path, flags, Mode::empty(), resolve) {
            Ok(opened) => opened,
            // An old kernel, or a seccomp filter without the call (openat2).
            Err(rustix::io::Errno::NOSYS | rustix::io::Errno::PERM) => return Ok(None),
            Err(error) => return Err(moved(error)),
        };
        self.checked(from.fd(), place.name.bytes(), node, opened).map(Some)
    }

    fn open_below(&self, parent: &Held, node: &Arc<HostNode>, place: &NodePlace) -> Result<Arc<Held>> {
        let name = place.name.bytes();
        let mut flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        if !node.is_resolved() {
            flags |= OFlags::NOFOLLOW;
        }
        let descriptor = rustix::fs::openat(parent.fd(), name, flags, Mode::empty()).map_err(moved)?;
        self.checked(parent.fd(), name, node, descriptor)
    }

    /// Checks the directory that was opened under `name`, and keeps its descriptor where that is
    /// allowed. `parent` is needed for a link that is shown as its target.
    fn checked(
        &self,
        parent: BorrowedFd<'_>,
        name: &[u8],
        node: &Arc<HostNode>,
        descriptor: OwnedFd,
    ) -> Result<Arc<Held>> {
        let target = stat::of_file_timeless(descriptor.as_fd())?;
        if self.identity_of(parent, name, node, &target)? != node.id() {
            return Err(Errno::ESTALE);
        }
        let foreign = self.is_foreign(&target);
        let held = Held::new(descriptor, foreign, &self.count);
        if foreign {
            return Ok(held);
        }
        let (held, kept) = node.keep_descriptor(held);
        if kept {
            self.admit(node);
        }
        Ok(held)
    }

    /// The identity of a file opened under `name`, in the form that `node` has.
    pub(super) fn identity(
        &self,
        parent: BorrowedFd<'_>,
        name: &[u8],
        node: &HostNode,
        opened: BorrowedFd<'_>,
    ) -> Result<FileId> {
        self.identity_of(parent, name, node, &stat::of_file_timeless(opened)?)
    }

    fn identity_of(&self, parent: BorrowedFd<'_>, name: &[u8], node: &HostNode, target: &Statx) -> Result<FileId> {
        if node.is_resolved() {
            Ok(self.mounts.resolved_id(&stat::of_name(parent, name)?, target))
        } else {
            Ok(self.mounts.id(target))
        }
    }

    /// Whether a file was reached through another mount than the root's.
    pub(super) fn is_foreign(&self, statx: &Statx) -> bool {
        stat::mount(statx) != self.mounts.root().0
    }

    /// Keeps the descriptor of a directory without a name as long as its node lives.
    pub(super) fn pin(&self, node: &Arc<HostNode>, descriptor: OwnedFd) {
        // Not in the eviction clock, so never evicted.
        node.keep_descriptor(Held::new(descriptor, false, &self.count));
    }

    /// Records that a directory in use is about to lose its name. On a foreign mount, its
    /// descriptor is then kept from the removal on ([`Directories::going`]), which may fail.
    pub(super) fn hold(&self, node: &Arc<HostNode>) -> Result<()> {
        if self.get(node)?.is_foreign() {
            let mut going = self.going.lock();
            going.retain(|other| other.strong_count() > 0);
            if going.len() == GOING_MAX {
                going.remove(0);
            }
            going.push(Arc::downgrade(node));
        }
        Ok(())
    }

    /// Returns the directory with that name, open, if [`Directories::hold`] was called for it on a
    /// foreign mount; to be passed to [`Directories::keep_nameless`] after the removal.
    pub(super) fn going(&self, parent: &HostNode, name: &[u8]) -> Option<(Arc<HostNode>, Arc<Held>)> {
        let named = |node: &HostNode| {
            node.place().is_some_and(|place| place.parent.id() == parent.id() && place.name.bytes() == name)
        };
        let node = {
            let mut going = self.going.lock();
            if going.is_empty() {
                return None;
            }
            let at = going.iter().position(|node| node.upgrade().is_some_and(|node| named(&node)))?;
            going.remove(at).upgrade()?
        };
        let held = self.get(&node).ok()?;
        Some((node, held))
    }

    /// Keeps the descriptor of a directory on a foreign mount that has just been removed.
    pub(super) fn keep_nameless(&self, node: &Arc<HostNode>, held: Arc<Held>) {
        if node.keep_descriptor(held).1 {
            self.admit(node);
        }
    }

    /// Keeps the descriptor of a directory that has just been removed, if it has one. At most half
    /// of the budget is used for removed directories.
    pub(super) fn keep_for_good(&self, node: &Arc<HostNode>) {
        if Arc::strong_count(&self.nameless) <= self.budget / 2 {
            node.keep_for_good(Arc::clone(&self.nameless));
        }
    }

    /// Whether a descriptor has to be closed. Each source may keep the root and one directory more.
    fn is_over(&self) -> bool {
        let own = self.count.load(Ordering::Relaxed);
        own > self.budget
            || own > 2 && (descriptors::DIRECTORIES.held() > self.room / 4 || descriptors::held() > self.room)
    }

    /// Adds a directory to the eviction clock and evicts others until the budget holds.
    fn admit(&self, node: &Arc<HostNode>) {
        let mut clock = self.clock.lock();
        clock.push_back(Arc::downgrade(node));
        // Each step frees one, drops a dead entry, or clears a use bit; two rounds clear
        // everything.
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
