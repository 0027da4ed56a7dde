//! Directories that are visible at more than one path below the source, because of bind mounts.
//!
//! Used wherever an identity is made from a `statx(2)` answer. A file is one file by whatever mount
//! it is reached, like its hard links; a directory reached through another mount than the root's is
//! a directory of its own, since it has another parent: the mount is part of its identity.
//! Invariants: the identity of a directory that has been returned contains a mount that is recorded
//! here; an ordinary source without other mounts never takes the lock.

use super::stat;
use nacre_vfs::FileId;
use parking_lot::RwLock;
use rustix::fs::Statx;
use std::{
    collections::HashMap,
    sync::atomic::{AtomicBool, Ordering},
};

/// The mounts of one source.
pub(super) struct Mounts {
    /// Mount and device of the root directory.
    root: (u64, u32),
    /// Other mounts through which directories were found, by device. At most as many as ever
    /// existed at one time: the kernel reuses the numbers.
    others: RwLock<HashMap<u32, Vec<u64>>>,
    /// Some directories may have more than one identity.
    shared: AtomicBool,
}

impl Mounts {
    /// Starts with the `statx(2)` answer about the root directory.
    pub(super) fn new(root: &Statx) -> Mounts {
        Mounts {
            root: (stat::mount(root), stat::device(root)),
            others: RwLock::default(),
            shared: AtomicBool::new(false),
        }
    }

    /// Mount and device of the root directory.
    pub(super) fn root(&self) -> (u64, u32) {
        self.root
    }

    /// The mount, unless it is the root's.
    fn other(&self, statx: &Statx) -> Option<u64> {
        Some(stat::mount(statx)).filter(|&mount| mount != self.root.0)
    }

    /// The identity of a file.
    pub(super) fn id(&self, statx: &Statx) -> FileId {
        let plain = stat::id(statx);
        match self.other(statx).filter(|_| stat::is_directory(statx)) {
            Some(mount) => through(plain, mount),
            None => plain,
        }
    }

    /// The identity of a link that is shown as its target.
    pub(super) fn resolved_id(&self, link: &Statx, target: &Statx) -> FileId {
        let id = stat::resolved_id(link, target);
        self.other(link).map_or(id, |mount| through(id, mount))
    }

    /// Records the mount of a found file, before its identity is returned.
    pub(super) fn met(&self, statx: &Statx) {
        let Some(mount) = self.other(statx).filter(|_| stat::is_directory(statx)) else { return };
        let device = stat::device(statx);
        let is_known =
            |others: &HashMap<u32, Vec<u64>>| others.get(&device).is_some_and(|mounts| mounts.contains(&mount));
        if is_known(&self.others.read()) {
            return;
        }
        let mut others = self.others.write();
        if !is_known(&others) {
            let mounts = others.entry(device).or_default();
            mounts.push(mount);
            if device == self.root.1 || mounts.len() > 1 {
                self.shared.store(true, Ordering::Release);
            }
        }
    }

    /// Whether any directory may have more than one identity: a change made through one then
    /// concerns the others.
    pub(super) fn are_shared(&self) -> bool {
        self.shared.load(Ordering::Acquire)
    }

    /// Whether directories of that device may have more than one identity.
    pub(super) fn shares(&self, device: u32) -> bool {
        self.are_shared()
            && self.others.read().get(&device).is_some_and(|mounts| device == self.root.1 || mounts.len() > 1)
    }

    /// All possible identities of a directory; `plain` is that of [`stat::id`].
    pub(super) fn identities(&self, plain: FileId, device: u32) -> Vec<FileId> {
        let others = self.others.read();
        let others = others.get(&device).map(Vec::as_slice).unwrap_or_default();
        std::iter::once(plain).chain(others.iter().map(|&mount| through(plain, mount))).collect()
    }
}

/// The identity of a directory reached through a mount that is not the root's.
fn through(plain: FileId, mount: u64) -> FileId {
    // FNV-1a over one word; the rotation lets the mount's few low bits differ from those of a birth
    // time.
    let generation = (plain.generation ^ mount.rotate_left(40)).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(29);
    FileId { generation, ..plain }
}
