//! Open files: the table of file handles that the kernel was given, and what an inode knows of its
//! own open files.
//!
//! Called by the handlers of `ops/`. Invariants: a handle is a place and
//! a counter of reuse, never 0 (0 is what the kernel sends where OPEN is not implemented); closing
//! is dropping the last reference to the [`OpenHandle`], which happens outside of the table's
//! locks.

use crate::{
    passthrough::inode_io::InodeIo,
    self_io::{own_mount::InodeKey, times::Times},
};
use nacre_vfs::{LockOwner, OpenFlags, Opened};
use parking_lot::Mutex;
use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

/// An open file as the kernel holds it.
pub(crate) struct OpenHandle {
    /// The layer's file.
    pub file: Opened,
    /// The inode, for its state of open files.
    pub nodeid: u64,
    /// As opened.
    pub flags: OpenFlags,
    /// Who opened it.
    pub uid: u32,
    /// The door's count of privileges given when they were last taken from this file: 0 means
    /// never.
    pub stripped: AtomicU64,
    /// Writes through it may be collected by the kernel: it is in the table of
    /// [`crate::writeback`].
    pub collected: bool,
    /// Writes through it are passed on one by one while the kernel keeps times itself.
    pub times: Option<Arc<Times>>,
    /// Where the kernel writes itself: what the file's size and times were at open
    /// ([`crate::passthrough::signature`]).
    pub before: Option<u64>,
    /// The owners of byte-range locks that were taken through it and not given up by a FLUSH, where locks are
    /// forwarded.
    pub lock_owners: Mutex<Vec<LockOwner>>,
}

impl OpenHandle {
    /// A byte-range lock may be taken through it by this owner.
    pub fn note_lock_owner(&self, owner: LockOwner) {
        let mut owners = self.lock_owners.lock();
        if !owners.contains(&owner) {
            owners.push(owner);
        }
    }

    /// A process has closed the file: its locks are gone.
    pub fn forget_lock_owner(&self, owner: LockOwner) {
        self.lock_owners.lock().retain(|known| *known != owner);
    }

    /// The owners that may still hold byte-range locks.
    pub fn take_lock_owners(&self) -> Vec<LockOwner> {
        std::mem::take(&mut *self.lock_owners.lock())
    }

    /// How the kernel's handles name its inode.
    pub fn key(&self) -> InodeKey {
        InodeKey { nodeid: self.nodeid, generation: self.file.generation() }
    }
}

/// What an inode knows of its open files.
#[derive(Default)]
pub(crate) struct OpenState {
    files: Vec<(u64, OpenFlags, Opened)>,
    /// How the kernel does I/O on this inode.
    pub io: InodeIo,
    /// What the kernel believes of its times, where it does not notice writes.
    pub times: Option<Arc<Times>>,
    /// Held until the kernel forgets the file, which somebody may have open without our knowing: no
    /// name leads to it any more.
    pub nameless: Option<Opened>,
}

impl OpenState {
    /// Notes an open file.
    pub fn add(&mut self, handle: u64, flags: OpenFlags, file: Opened) {
        self.files.push((handle, flags, file));
    }

    /// All of them, by their handles.
    pub fn all(&self) -> Vec<(u64, Opened)> {
        self.files.iter().map(|(fh, _, file)| (*fh, Arc::clone(file))).collect()
    }

    /// Takes an open file out; the caller drops it outside of the lock.
    pub fn take(&mut self, handle: u64) -> Option<Opened> {
        let at = self.files.iter().rposition(|(known, ..)| *known == handle)?;
        let (_, _, file) = self.files.swap_remove(at);
        if self.files.is_empty() {
            self.files = Vec::new();
        }
        Some(file)
    }

    /// An open file that can answer for the inode, preferably one that may change its length.
    pub fn any_file(&self) -> Option<Opened> {
        let writable = self.files.iter().find(|(_, flags, _)| flags.writes());
        writable.or_else(|| self.files.first()).map(|(.., file)| file).or(self.nameless.as_ref()).map(Arc::clone)
    }

    /// The kernel may let somebody store to a mapping that it makes of the file itself.
    pub fn is_mappable(&self) -> bool {
        self.io.passes_through() && self.files.iter().any(|(_, flags, _)| flags.maps_for_writing())
    }

    /// A shared mapping may dirty pages of the mount itself, not of a backing file.
    pub fn is_mapped_here(&self) -> bool {
        !self.io.passes_through() && self.files.iter().any(|(_, flags, _)| flags.maps_for_writing())
    }

    /// A descriptor is open for writing.
    pub fn has_writers(&self) -> bool {
        self.files.iter().any(|(_, flags, _)| flags.writes())
    }

    /// A descriptor may write elsewhere than at the end, as it was opened.
    pub fn is_placed(&self) -> bool {
        self.files.iter().any(|(_, flags, _)| flags.writes() && !flags.appends())
    }

    /// Nothing is open.
    pub fn is_closed(&self) -> bool {
        self.files.is_empty()
    }

    /// Nothing is open and nothing is kept.
    pub fn is_idle(&self) -> bool {
        self.files.is_empty() && self.io.is_idle() && self.times.is_none() && self.nameless.is_none()
    }
}

const SHARDS: usize = 8;

#[derive(Default)]
struct Shard {
    slots: Vec<(u32, Option<Arc<OpenHandle>>)>,
    free: Vec<u32>,
}

/// The table of file handles.
#[derive(Default)]
pub(crate) struct OpenFiles {
    shards: [Mutex<Shard>; SHARDS],
    count: AtomicUsize,
    /// Counters of reuse begin above this.
    base: u32,
}

impl OpenFiles {
    /// The table of the process that goes on after so many others: it gives no handle out that one of
    /// them has.
    pub fn after(restarts: u64) -> OpenFiles {
        OpenFiles { base: (restarts as u32).wrapping_mul(1 << 20), ..OpenFiles::default() }
    }

    /// Enters an open file under the handle that another process gave it: the lower ones first, and no
    /// other meanwhile.
    pub fn restore(&self, fh: u64, handle: OpenHandle) {
        let (number, place, reuse) = decode(fh);
        let mut shard = self.shard(number);
        while shard.slots.len() < place as usize {
            let free = shard.slots.len() as u32;
            shard.slots.push((self.base.wrapping_add(1), None));
            shard.free.push(free);
        }
        shard.slots.push((reuse, Some(Arc::new(handle))));
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    /// Files open.
    pub fn len(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Gives an open file its handle.
    pub fn insert(&self, handle: OpenHandle) -> u64 {
        // Neighbours in the inode table lie in different shards of it; their low bits spread here
        // as well.
        let number = handle.nodeid as usize % SHARDS;
        let mut shard = self.shard(number);
        let handle = Arc::new(handle);
        self.count.fetch_add(1, Ordering::Relaxed);
        if let Some(place) = shard.free.pop()
            && let Some((reuse, slot)) = shard.slots.get_mut(place as usize)
        {
            *slot = Some(handle);
            return encode(number, place, *reuse);
        }
        let place = shard.slots.len() as u32;
        let reuse = self.base.wrapping_add(1);
        shard.slots.push((reuse, Some(handle)));
        encode(number, place, reuse)
    }

    /// The open file behind a handle.
    pub fn get(&self, handle: u64) -> Option<Arc<OpenHandle>> {
        let (number, place, reuse) = decode(handle);
        let shard = self.shard(number);
        let (current, slot) = shard.slots.get(place as usize)?;
        if *current == reuse { slot.clone() } else { None }
    }

    /// Takes a handle out of the table.
    pub fn remove(&self, handle: u64) -> Option<Arc<OpenHandle>> {
        let (number, place, reuse) = decode(handle);
        let mut guard = self.shard(number);
        let shard = &mut *guard;
        let (current, slot) = shard.slots.get_mut(place as usize)?;
        if *current != reuse {
            return None;
        }
        let removed = slot.take()?;
        *current = current.checked_add(1).unwrap_or(1);
        shard.free.push(place);
        if shard.free.len() == shard.slots.len() && shard.slots.len() > 1024 {
            // Everything is closed after a burst: give the memory back. Handles are not reused
            // before the kernel is told of them, and it holds none of this shard.
            *shard = Shard::default();
        }
        self.count.fetch_sub(1, Ordering::Relaxed);
        Some(removed)
    }

    /// The inodes that are open for writing.
    pub fn written_to(&self) -> BTreeSet<InodeKey> {
        let mut found = BTreeSet::new();
        for number in 0..SHARDS {
            let shard = self.shard(number);
            found.extend(
                shard
                    .slots
                    .iter()
                    .filter_map(|(_, slot)| slot.as_ref().filter(|open| open.flags.writes()).map(|open| open.key())),
            );
        }
        found
    }

    /// Takes out all handles of these inodes.
    pub fn take(&self, of: impl Fn(u64) -> bool) -> Vec<(u64, Arc<OpenHandle>)> {
        let mut found = Vec::new();
        for number in 0..SHARDS {
            let shard = self.shard(number);
            let open = shard
                .slots
                .iter()
                .enumerate()
                .filter_map(|(place, (reuse, slot))| Some((place, *reuse, slot.as_ref()?.nodeid)));
            found.extend(
                open.filter(|(.., nodeid)| of(*nodeid)).map(|(place, reuse, _)| encode(number, place as u32, reuse)),
            );
        }
        found.into_iter().filter_map(|fh| Some((fh, self.remove(fh)?))).collect()
    }

    /// Closes everything: the mount is gone.
    pub fn clear(&self) {
        for number in 0..SHARDS {
            let gone = std::mem::take(&mut *self.shard(number));
            let open = gone.slots.iter().filter(|(_, slot)| slot.is_some()).count();
            self.count.fetch_sub(open, Ordering::Relaxed);
        }
    }

    fn shard(&self, number: usize) -> parking_lot::MutexGuard<'_, Shard> {
        // Masked to the number of shards.
        #[allow(clippy::indexing_slicing)]
        self.shards[number % SHARDS].lock()
    }
}

fn encode(shard: usize, place: u32, reuse: u32) -> u64 {
    u64::from(reuse) << 32 | u64::from(place) << 3 | shard as u64
}

fn decode(handle: u64) -> (usize, u32, u32) {
    (handle as usize % SHARDS, handle as u32 >> 3, (handle >> 32) as u32)
}
