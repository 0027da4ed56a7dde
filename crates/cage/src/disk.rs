//! Free space on the disk below, for write-back: accepted dirty data has to fit there as well,
//! whatever other processes write.
//!
//! Used wherever the ledger's room decides about write-back ([`CageShared::writeback_room`]).
//! statfs(2) is called ten times a second at most, and for each reserved write. Writes by other
//! processes within that time are not seen; on Btrfs, neither is data that it has accepted and not
//! yet written to the disk.

use super::CageShared;
use crate::sync::atomic::{AtomicU64, Ordering};
use nacre_vfs::{Caller, Node};
use std::time::Duration;

/// Maximum age of the cached statfs(2) figures.
const FRESH: Duration = Duration::from_millis(100);

/// Reserve for the file system's own metadata while it writes the accepted data, bytes.
const APART: u64 = 4 << 20;

/// Cached free space of the file system that a cage is on; see the file's head.
pub(super) struct DiskRoom {
    root: Node,
    /// Time of the last statfs(2), in nanoseconds of the clock plus one; 0 for never.
    looked: AtomicU64,
    /// Bytes free on the disk at that time, and (`room`) in the cage.
    free: AtomicU64,
    room: AtomicU64,
    /// Bytes booked for reserved writes that have not arrived: they will need as much disk space.
    announced: AtomicU64,
}

impl DiskRoom {
    /// Free space of the file system that holds this directory.
    pub(super) fn new(root: Node) -> DiskRoom {
        DiskRoom {
            root,
            looked: AtomicU64::new(0),
            free: AtomicU64::new(u64::MAX),
            room: AtomicU64::new(u64::MAX),
            announced: AtomicU64::new(0),
        }
    }

    /// Adjusts the reserved total: a file's reservation changes from `before` to `after` bytes.
    pub(super) fn announced(&self, before: u64, after: u64) {
        if after >= before {
            self.announced.fetch_add(after - before, Ordering::Relaxed);
        } else {
            self.announced.fetch_sub(before - after, Ordering::Relaxed);
        }
    }
}

impl CageShared {
    /// Room for write-back, bytes: the lesser of the cage's and the disk's.
    pub(super) fn writeback_room(&self) -> u64 {
        self.ledger.room().min(self.disk_room(FRESH))
    }

    /// Whether `bytes` more fit on the disk in addition to all reserved writes. Reserved data that
    /// has arrived since statfs(2) counts twice.
    pub(super) fn fits_on_disk(&self, bytes: u64) -> bool {
        let needed = self.disk.announced.load(Ordering::Acquire).saturating_add(bytes);
        self.disk_room(Duration::ZERO) >= needed
    }

    /// Makes the disk return freed blocks, by syncfs(2). File systems with a journal do so when the
    /// change is on the disk; a write that finds no room waits for that (ext4_should_retry_alloc(),
    /// Linux fs/ext4/balloc.c), while statfs(2) shows the blocks as free before.
    pub(super) fn settle_disk(&self) {
        if let Err(error) = self.below.syncfs() {
            tracing::debug!(%error, "what was freed on the disk may be missing still");
        }
    }

    /// Bytes free on the disk by figures of at most this age, minus the data that has arrived
    /// since.
    fn disk_room(&self, age: Duration) -> u64 {
        let disk = &self.disk;
        let room = self.ledger.room();
        // Without a limit, the ledger's room does not show how much has arrived.
        let age = if room == u64::MAX { Duration::ZERO } else { age };
        let now = u64::try_from(self.clock.now().as_nanos()).unwrap_or(u64::MAX - 1);
        let looked = disk.looked.load(Ordering::Acquire);
        if looked == 0 || Duration::from_nanos(now.saturating_sub(looked - 1)) >= age {
            // A disk whose statfs(2) fails keeps its last figures, at first unlimited.
            if let Ok(figures) = self.below.statfs(&Caller::ROOT, &disk.root) {
                let free = figures.available.saturating_mul(u64::from(figures.fragment));
                disk.room.store(room, Ordering::Release);
                disk.free.store(free.saturating_sub(APART), Ordering::Release);
            }
            disk.looked.store(now + 1, Ordering::Release);
        }
        let arrived = disk.room.load(Ordering::Acquire).saturating_sub(room);
        disk.free.load(Ordering::Acquire).saturating_sub(arrived)
    }
}
