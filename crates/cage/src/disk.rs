//! Room on the disk below, for writes that a door collects: what was accepted has to fit there as
//! well, whoever else fills it.
//!
//! Asked wherever the ledger's room decides about collecting ([`CageShared::writeback_room`]).
//! statfs(2) is called ten times a second at most, and for each announced write. What others write
//! within that time is not seen; nor is, on Btrfs, what it has taken and not yet written to the disk.

use super::CageShared;
use crate::sync::atomic::{AtomicU64, Ordering};
use nacre_vfs::{Caller, Node};
use std::time::Duration;

/// How old a look may be.
const FRESH: Duration = Duration::from_millis(100);

/// What the file system below needs for itself while it takes what was accepted, bytes.
const APART: u64 = 4 << 20;

/// See the file's head.
pub(super) struct DiskRoom {
    root: Node,
    /// When it was looked at last, nanoseconds of the clock and one; 0 for never.
    looked: AtomicU64,
    /// Bytes that were free then: on the disk, and in the cage.
    free: AtomicU64,
    room: AtomicU64,
    /// Booked for announced writes that have not arrived, bytes: they will need that much of it.
    announced: AtomicU64,
}

impl DiskRoom {
    /// The disk that this directory is on.
    pub(super) fn new(root: Node) -> DiskRoom {
        DiskRoom {
            root,
            looked: AtomicU64::new(0),
            free: AtomicU64::new(u64::MAX),
            room: AtomicU64::new(u64::MAX),
            announced: AtomicU64::new(0),
        }
    }

    /// What is booked for announced writes of a file was one amount and is another, bytes.
    pub(super) fn announced(&self, before: u64, after: u64) {
        if after >= before {
            self.announced.fetch_add(after - before, Ordering::Relaxed);
        } else {
            self.announced.fetch_sub(before - after, Ordering::Relaxed);
        }
    }
}

impl CageShared {
    /// Room for what a door collects, bytes: in the cage and on the disk.
    pub(super) fn writeback_room(&self) -> u64 {
        self.ledger.room().min(self.disk_room(FRESH))
    }

    /// Whether so much more would fit on the disk, if all that was announced arrives. What arrives
    /// meanwhile counts twice.
    pub(super) fn fits_on_disk(&self, bytes: u64) -> bool {
        let needed = self.disk.announced.load(Ordering::Acquire).saturating_add(bytes);
        self.disk_room(Duration::ZERO) >= needed
    }

    /// Has the disk give back what was freed. File systems with a journal do so when the change is on
    /// the disk; a write that finds no room waits for that (ext4_should_retry_alloc(), Linux
    /// fs/ext4/balloc.c), while statfs(2) shows what is free before.
    pub(super) fn settle_disk(&self) {
        if let Err(error) = self.below.syncfs() {
            tracing::debug!(%error, "what was freed on the disk may be missing still");
        }
    }

    /// Bytes free on the disk, looked at so long ago at most; less what has arrived since.
    fn disk_room(&self, age: Duration) -> u64 {
        let disk = &self.disk;
        let room = self.ledger.room();
        // Without a limit, it does not say what has arrived.
        let age = if room == u64::MAX { Duration::ZERO } else { age };
        let now = u64::try_from(self.clock.now().as_nanos()).unwrap_or(u64::MAX - 1);
        let looked = disk.looked.load(Ordering::Acquire);
        if looked == 0 || Duration::from_nanos(now.saturating_sub(looked - 1)) >= age {
            // A disk that does not tell is taken to have room, as it was before.
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
