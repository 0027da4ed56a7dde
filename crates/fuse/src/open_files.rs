//! Open files: the table of file handles that the kernel was given, and each inode's state of open files.
//!
//! Called by the handlers of `ops/`. Invariants: a handle is a slot and a reuse counter, never 0 (0 is what the
//! kernel sends where OPEN is not implemented); a file is closed by dropping the last reference to the
//! [`OpenHandle`], which happens outside of the table's locks.

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

/// An open file behind a file handle of the kernel.
pub(crate) struct OpenHandle {
    /// The layer's file.
    pub file: Opened,
    /// The inode, for its state of open files.
    pub nodeid: u64,
    /// As opened.
    pub flags: OpenFlags,
    /// User that opened it.
    pub uid: u32,
    /// Value of [`OpenTables::privileges`](crate::open_tables::OpenTables::privileges) when set-id bits and
    /// capabilities were last removed from this file; 0 means never.
    pub stripped: AtomicU64,
    /// Its writes may be cached by the kernel: it is in the table of [`crate::writeback`].
    pub collected: bool,
    /// Set where each write is sent through while the kernel keeps the times itself.
    pub times: Option<Arc<Times>>,
    /// In passthrough: digest of the file's size and times at open ([`crate::passthrough::signature`]).
    pub before: Option<u64>,
    /// Owners of byte-range locks that were taken through it and not released by a FLUSH, where locks are forwarded.
    pub lock_owners: Mutex<Vec<LockOwner>>,
}

impl OpenHandle {
    /// Notes that an owner may take a byte-range lock through it.
    pub fn note_lock_owner(&self, owner: LockOwner) {
        let mut owners = self.lock_owners.lock();
        if !owners.contains(&owner) {
            owners.push(owner);
        }
    }

    /// Notes that a process has closed the file: its locks are gone.
    pub fn forget_lock_owner(&self, owner: LockOwner) {
        self.lock_owners.lock().retain(|known| *known != owner);
    }

    /// Takes out the owners that may still hold byte-range locks.
    pub fn take_lock_owners(&self) -> Vec<LockOwner> {
        std::mem::take(&mut *self.lock_owners.lock())
    }

    /// The kernel's file handle (node id and generation) of its inode.
    pub fn key(&self) -> InodeKey {
        InodeKey { nodeid: self.nodeid, generation: self.file.generation() }
    }
}

/// An inode's state of open files.
#[derive(Default)]
pub(crate) struct OpenState {
    files: Vec<(u64, OpenFlags, Opened)>,
    /// How the kernel does I/O on this inode.
    pub io: InodeIo,
    /// The times that the kernel has cached, where it does not notice writes.
    pub times: Option<Arc<Times>>,
    /// An open file kept until the kernel forgets a file without names, which may be open without our knowledge.
    pub nameless: Option<Opened>,
}

impl OpenState {
    /// Adds an open file.
    pub fn add(&mut self, handle: u64, flags: OpenFlags, file: Opened) {
        self.files.push((handle, flags, file));
    }

    /// Returns all open files, with their handles.
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

    /// Whether the kernel may let a process store to a mapping of the backing file.
    pub fn is_mappable(&self) -> bool {
        self.io.passes_through() && self.files.iter().any(|(_, flags, _)| flags.maps_for_writing())
    }

    /// Whether a shared mapping may dirty pages of the mount itself, not of a backing file.
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

    /// Whether no file is open and no state is kept.
    pub fn is_idle(&self) -> bool {
        self.files.is_empty() && self.io.is_idle() && self.times.is_none() && self.nameless.is_none()
    }
}

const SHARDS: usize = 8;

#[derive(Default)]
struct Shard {
    slots: Vec<(u32, Option<Arc<OpenHandle>>)>,
    free: Vec<u32>,
    /// Reuse counters of new slots begin above this.
    base: u32,
}

/// The table of file handles.
#[derive(Default)]
pub(crate) struct OpenFiles {
    shards: [Mutex<Shard>; SHARDS],
    count: AtomicUsize,
    /// Reuse counters begin above this, and above the shard's own base.
    base: u32,
}

impl OpenFiles {
    /// The table of a process after so many restarts: it never returns a handle of a previous process.
    pub fn after(restarts: u64) -> OpenFiles {
        OpenFiles { base: (restarts as u32).wrapping_mul(1 << 20), ..OpenFiles::default() }
    }

    /// Restores an open file under the handle from a previous process. To be called in ascending order of handles,
    /// with no other insertion meanwhile.
    pub fn restore(&self, fh: u64, handle: OpenHandle) {
        let (number, place, reuse) = decode(fh);
        let mut shard = self.shard(number);
        while shard.slots.len() < place as usize {
            let free = shard.slots.len() as u32;
            let reuse = self.first_reuse(&shard);
            shard.slots.push((reuse, None));
            shard.free.push(free);
        }
        shard.slots.push((reuse, Some(Arc::new(handle))));
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    /// Number of open files.
    pub fn len(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Adds an open file and returns its handle.
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
        let reuse = self.first_reuse(&shard);
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
            // Everything is closed after a burst: free the memory. The kernel holds no handle of this shard, but the
            // close of this one is still under way: new handles differ from all before.
            let highest = shard.slots.iter().map(|(reuse, _)| *reuse).max();
            *shard = Shard { base: highest.unwrap_or(shard.base), ..Shard::default() };
        }
        self.count.fetch_sub(1, Ordering::Relaxed);
        Some(removed)
    }

    /// Returns the inodes that are open for writing.
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

    /// Removes and returns all handles of these inodes.
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

    /// Reuse counter of a new slot.
    fn first_reuse(&self, shard: &Shard) -> u32 {
        self.base.max(shard.base).wrapping_add(1)
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

#[cfg(test)]
mod tests {
    use super::*;
    use nacre_layers::mem::Mem;
    use nacre_vfs::{Caller, Layer, Name};

    #[test]
    fn no_handle_is_given_out_twice_when_the_memory_of_a_burst_is_freed() {
        let mem = Mem::default();
        let root = mem.root().unwrap().node;
        let name = Name::new(b"file").unwrap();
        let (_, file) = mem.create(&Caller::ROOT, &root, name, 0o600, OpenFlags::READ_WRITE).unwrap();
        let files = OpenFiles::default();
        let open = || files.insert(crate::ops::opens::handle(&Caller::ROOT, 8, OpenFlags::READ, &file));
        let mut given = BTreeSet::new();
        for _ in 0..3 {
            let mut burst: Vec<u64> = (0..1025).map(|_| open()).collect();
            assert!(burst.iter().all(|fh| given.insert(*fh)), "a handle is given out again");
            // The first one, which has a slot that was never used before, is closed last.
            burst.reverse();
            assert!(burst.into_iter().all(|fh| files.remove(fh).is_some()));
            assert!(files.shard(0).slots.is_empty());
        }
    }
}
