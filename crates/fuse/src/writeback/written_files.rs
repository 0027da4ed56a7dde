//! Files that may hold collected writes, where the kernel opens files without a request: nothing
//! tells when one is opened for writing, or closed.
//!
//! What the kernel tells is more than is needed: before the first write to an inode that it has
//! fresh attributes of, it asks for `security.capability`. So a file is entered then
//! (`ops/unopened.rs`), and leaves
//! * when the kernel forgets it: it holds nothing of it any more;
//! * after a while in which nothing was heard of it, or where there are too many, once the kernel
//!   has taken new attributes, so that it asks before the next write, and has passed on what it
//!   holds (`self_io/flush_timer.rs`).
//!
//! Of a mount that outlives its process they are noted, before anything can be collected, and entered again by
//! the process that goes on: the kernel holds what it holds.
//!
//! Owned by `writeback.rs`. Invariants: a file that is used between a question and an answer here
//! stays ([`WrittenFiles::remove_unused`]); nothing is dropped under the lock.

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

/// More than these are not kept for long, nor more than descriptors and memory allow. To let one go
/// costs a request, so who makes thousands of files is not to pay for each at once.
const MOST: usize = 8192;
/// One takes about 1 KiB: all together a small part of the memory, far too many an eighth.
const MEMORY_FOR_ONE: u64 = 32 << 10;
/// So many leave at a beat at most: whoever has a file passed on is in the mount meanwhile, and who
/// unmounts it then is told that it is busy. More where there are too many files, and all where there
/// are far too many (so many times [`MOST`]).
const LEAVING: usize = 100;
const FAR_TOO_MANY: usize = 4;
/// Beats ([`WrittenFiles::beat`]) without a word of a file after which it leaves; of one on a file
/// system that is mounted inside the source, which could not be unmounted meanwhile.
const QUIET: u64 = 10;
const QUIET_ON_INNER_MOUNT: u64 = 1;

/// The table, by node id.
pub(crate) struct WrittenFiles {
    files: Mutex<HashMap<u64, Written>>,
    count: AtomicUsize,
    /// How many are kept for long.
    most: AtomicUsize,
    /// Counts beats.
    beats: AtomicU64,
    /// Files are becoming others: none is entered.
    closed: AtomicBool,
    /// Where the mount outlives its process.
    noted: OnceLock<Words>,
}

struct Written {
    handle: Arc<OpenHandle>,
    /// Where it is noted.
    place: Option<usize>,
    on_inner_mount: bool,
    uses: u64,
    /// The beat of the last use.
    last: u64,
    /// How often it was used when the kernel took new attributes.
    asked: Option<Uses>,
}

/// What is to be done at a beat.
#[derive(Debug, Default)]
pub(crate) struct Beat {
    /// The kernel is to take new attributes of these, so that it asks before the next write.
    pub asked: Vec<u64>,
    /// These leave when the kernel has passed on what it holds of them.
    pub leaving: Vec<(u64, Uses)>,
}

/// How often a file had been used.
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
    /// No more than these are kept for long, of which each may hold a descriptor, in so much memory.
    pub fn hold(&self, descriptors: usize, memory: Option<u64>) {
        let room = memory.and_then(|memory| usize::try_from(memory / MEMORY_FOR_ONE).ok()).unwrap_or(MOST);
        self.most.store(room.max(LEAVING).min(descriptors).min(MOST), Ordering::Relaxed);
    }

    /// They are noted from now on; answers those that are noted already, with their places, which go when
    /// they have been entered ([`WrittenFiles::entered`]).
    pub fn note_in(&self, memory: &Survival) -> Vec<(usize, u64)> {
        self.noted.get_or_init(|| Words::written(memory)).all()
    }

    /// What was noted at this place is entered, or gone.
    pub fn entered(&self, place: usize) {
        self.noted.get().iter().for_each(|noted| noted.remove(place));
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// The file of a node, which is used now.
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

    /// The open file of a node; that is no use of it.
    pub fn peek(&self, nodeid: u64) -> Option<Opened> {
        if self.len() == 0 {
            return None;
        }
        self.files.lock().get(&nodeid).map(|written| Arc::clone(&written.handle.file))
    }

    /// Enters a file, which is used now; answers which one of its node is there, that or one before.
    /// None where none may be entered.
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

    /// How often a file has been used, if it is there.
    pub fn uses(&self, nodeid: u64) -> Option<Uses> {
        if self.len() == 0 {
            return None;
        }
        self.files.lock().get(&nodeid).map(|written| Uses(written.uses))
    }

    /// Takes a file out that has not been used since.
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

    /// Takes out all files of these nodes.
    pub fn take(&self, of: impl Fn(u64) -> bool) -> Vec<Arc<OpenHandle>> {
        let mut files = self.files.lock();
        let gone = files.extract_if(|nodeid, _| of(*nodeid)).map(|(_, written)| self.left(written)).collect();
        self.count.store(files.len(), Ordering::Release);
        gone
    }

    /// How the kernel's handles name them.
    pub fn keys(&self) -> Vec<InodeKey> {
        self.files.lock().values().map(|written| written.handle.key()).collect()
    }

    /// Counts one beat. Files of which nothing was heard for a while, and the oldest where there are
    /// too many, are asked about first, and leave with the next beat if nobody has used them since.
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

    /// Enters none from now on, or does so again.
    pub fn close(&self, closed: bool) {
        let _files = self.files.lock();
        self.closed.store(closed, Ordering::Release);
    }
}
