//! Table of files that may have cached writes, where the kernel opens files without a request: no request shows when
//! one is opened for writing, or closed.
//!
//! There is a request that comes more often than needed: before the first write to an inode with freshly fetched
//! attributes, the kernel asks for `security.capability`. So a file is entered then (`ops/unopened.rs`), and removed
//! * when the kernel forgets it: it has no dirty pages of it any more;
//! * after a while without any use, or where there are too many files, once the kernel's attributes have been
//!   expired, so that it asks before the next write, and its dirty pages have been written back
//!   (`self_io/flush_timer.rs`).
//!
//! Where the mount survives its process, files are recorded before anything can be cached, and entered again by the
//! next process: the kernel keeps its dirty pages.
//!
//! Owned by `writeback.rs`. Invariants: a file that is used between a check and the removal stays
//! ([`WrittenFiles::remove_unused`]); nothing is dropped under the lock.

use crate::{
    open_files::OpenHandle,
    self_io::own_mount::InodeKey,
    survival::{Survival, numbers::Words},
};
use nacre_vfs::Opened;
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
};

/// Maximum number of files kept for long, also bounded by descriptors and memory. Removing one costs a request, so
/// that a program that creates thousands of files should not pay for each at once.
const MOST: usize = 8192;
/// Memory of the machine per file kept, bytes: a file takes about 1 KiB, so all together take a small part of the
/// memory, and an eighth at [`FAR_TOO_MANY`].
const MEMORY_FOR_ONE: u64 = 32 << 10;
/// Maximum number of files removed per tick: the thread that writes one back is in the mount meanwhile, and an
/// unmount then is EBUSY. More where there are too many files, and all where there are far too many ([`FAR_TOO_MANY`]
/// times the number kept for long).
const LEAVING: usize = 100;
const FAR_TOO_MANY: usize = 4;
/// Ticks ([`WrittenFiles::beat`]) without a use after which a file is removed; the same for a file on a file system
/// mounted inside the source, which could not be unmounted meanwhile.
const QUIET: u64 = 10;
const QUIET_ON_INNER_MOUNT: u64 = 1;

/// The table, by node id.
pub(crate) struct WrittenFiles {
    files: Mutex<HashMap<u64, Written>>,
    count: AtomicUsize,
    /// Number of files kept for long.
    most: AtomicUsize,
    /// Number of ticks.
    beats: AtomicU64,
    /// A rollback is in progress: no file is entered.
    closed: AtomicBool,
    /// Handoff records, where the mount survives its process.
    noted: OnceLock<Words>,
}

struct Written {
    handle: Arc<OpenHandle>,
    /// Index of its record.
    place: Option<usize>,
    on_inner_mount: bool,
    uses: u64,
    /// Tick of the last use.
    last: u64,
    /// Count of uses when the kernel's attributes were expired.
    asked: Option<Uses>,
}

/// Work for a tick.
#[derive(Debug, Default)]
pub(crate) struct Beat {
    /// Files whose attributes are to be expired, so that the kernel asks before the next write.
    pub asked: Vec<u64>,
    /// Files to be removed when their dirty pages have been written back.
    pub leaving: Vec<(u64, Uses)>,
}

/// A file's count of uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Uses(u64);

impl Default for WrittenFiles {
    fn default() -> WrittenFiles {
        WrittenFiles {
            files: Mutex::default(),
            count: AtomicUsize::new(0),
            most: AtomicUsize::new(MOST),
            beats: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            noted: OnceLock::new(),
        }
    }
}

impl WrittenFiles {
    /// Sets the maximum number of files kept for long: each may hold a descriptor, and takes memory.
    pub fn hold(&self, descriptors: usize, memory: Option<u64>) {
        let room = memory.and_then(|memory| usize::try_from(memory / MEMORY_FOR_ONE).ok()).unwrap_or(MOST);
        self.most.store(room.max(LEAVING).min(descriptors).min(MOST), Ordering::Relaxed);
    }

    /// Starts recording; returns the files recorded already, with their indices, whose records are removed when they
    /// have been entered ([`WrittenFiles::entered`]).
    pub fn note_in(&self, memory: &Survival) -> Vec<(usize, u64)> {
        self.noted.get_or_init(|| Words::written(memory)).all()
    }

    /// Removes a record from a previous process, whose file has been entered, or is gone.
    pub fn entered(&self, place: usize) {
        self.noted.get().iter().for_each(|noted| noted.remove(place));
    }

    /// Returns the number of files.
    pub fn len(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// Returns the file of a node, and counts a use.
    pub fn get(&self, nodeid: u64) -> Option<Arc<OpenHandle>> {
        if self.len() == 0 {
            return None;
        }
        let last = self.beats.load(Ordering::Relaxed);
        let mut files = self.files.lock();
        let written = files.get_mut(&nodeid)?;
        written.uses += 1;
        written.last = last;
        Some(Arc::clone(&written.handle))
    }

    /// Returns the open file of a node, without counting a use.
    pub fn peek(&self, nodeid: u64) -> Option<Opened> {
        if self.len() == 0 {
            return None;
        }
        self.files.lock().get(&nodeid).map(|written| Arc::clone(&written.handle.file))
    }

    /// Enters a file, and counts a use; returns the file of the node in the table, this one or an earlier one. None
    /// where no file may be entered.
    pub fn add(&self, handle: Arc<OpenHandle>) -> Option<Arc<OpenHandle>> {
        let last = self.beats.load(Ordering::Relaxed);
        let on_inner_mount = handle.file.is_on_inner_mount();
        let mut files = self.files.lock();
        if self.closed.load(Ordering::Acquire) {
            return None;
        }
        let nodeid = handle.nodeid;
        let noted = || self.noted.get().and_then(|noted| noted.add(nodeid));
        let written = files.entry(nodeid).or_insert_with(|| Written {
            on_inner_mount,
            handle,
            place: noted(),
            uses: 0,
            last,
            asked: None,
        });
        (written.uses, written.last) = (written.uses + 1, last);
        let there = Arc::clone(&written.handle);
        self.count.store(files.len(), Ordering::Release);
        Some(there)
    }

    /// Returns a file's count of uses, if it is in the table.
    pub fn uses(&self, nodeid: u64) -> Option<Uses> {
        if self.len() == 0 {
            return None;
        }
        self.files.lock().get(&nodeid).map(|written| Uses(written.uses))
    }

    /// Removes a file that has not been used since.
    pub fn remove_unused(&self, nodeid: u64, since: Uses) -> Option<Arc<OpenHandle>> {
        let mut files = self.files.lock();
        if files.get(&nodeid)?.uses != since.0 {
            return None;
        }
        let gone = files.remove(&nodeid);
        self.count.store(files.len(), Ordering::Release);
        gone.map(|written| self.left(written))
    }

    fn left(&self, written: Written) -> Arc<OpenHandle> {
        if let Some(place) = written.place {
            self.entered(place);
        }
        written.handle
    }

    /// Removes all files of these nodes.
    pub fn take(&self, of: impl Fn(u64) -> bool) -> Vec<Arc<OpenHandle>> {
        let mut files = self.files.lock();
        let gone = files.extract_if(|nodeid, _| of(*nodeid)).map(|(_, written)| self.left(written)).collect();
        self.count.store(files.len(), Ordering::Release);
        gone
    }

    /// Returns the kernel's file handles of all files.
    pub fn keys(&self) -> Vec<InodeKey> {
        self.files.lock().values().map(|written| written.handle.key()).collect()
    }

    /// Counts a tick. Files without a use for a while, and the oldest ones where there are too many, get their
    /// attributes expired first, and are removed at the next tick if they were not used since.
    pub fn beat(&self) -> Beat {
        let now = self.beats.fetch_add(1, Ordering::Relaxed);
        let mut beat = Beat::default();
        if self.len() == 0 {
            return beat;
        }
        let mut files = self.files.lock();
        let most = self.most.load(Ordering::Relaxed);
        let too_many = files.len().saturating_sub(most);
        let before = if too_many > 0 {
            let mut last: Vec<u64> = files.values().map(|written| written.last).collect();
            Some(*last.select_nth_unstable(too_many).1)
        } else {
            now.checked_sub(QUIET)
        };
        let inner_before = before.max(now.checked_sub(QUIET_ON_INNER_MOUNT));
        let is_quiet = |written: &Written| {
            let before = if written.on_inner_mount { inner_before } else { before };
            before.is_some_and(|before| written.last <= before)
        };
        let room = match files.len() {
            count if count <= most => LEAVING,
            count if count <= most * FAR_TOO_MANY => LEAVING * 10,
            _ => usize::MAX,
        };
        for (nodeid, written) in files.iter_mut().filter(|(_, written)| is_quiet(written)) {
            let uses = Uses(written.uses);
            if written.asked == Some(uses) {
                if beat.leaving.len() < room {
                    beat.leaving.push((*nodeid, uses));
                }
            } else if beat.asked.len() < room {
                written.asked = Some(uses);
                beat.asked.push(*nodeid);
            }
        }
        beat
    }

    /// Sets whether entering files is refused.
    pub fn close(&self, closed: bool) {
        let _files = self.files.lock();
        self.closed.store(closed, Ordering::Release);
    }
}
