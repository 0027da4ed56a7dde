//! The handoff state of a mount: what the next process needs for the failover when the one that serves the mount
//! dies.
//!
//! Created by a supervisor, written by the front end of each worker, read by the next one. It lies in shared memory.
//! Every record has one word that makes it valid: the word is stored last, and set to 0 first, so a record that was
//! being written when the process was killed does not count. Workers of one supervisor also share a table of
//! descriptors (`nacre_sys::worker`): a descriptor is recorded by its number.
//!
//! ```text
//!  nodes.rs      which file a node id stands for, and where it was found
//!  opens.rs      which open file a handle stands for
//!  requests.rs   which change each thread was about to make, and its reply
//!  numbers.rs    for layers whose files are found by inode number: files that the kernel knows, files that may have
//!                cached writes; numbers that layers assigned for good; threads that use the mount
//!  doubts.rs     whether the kernel still knows a file of a previous process
//!  restore.rs    the tables of the front end, restored from these records
//!  again.rs      requests that come again after they may have been carried out
//!  cut.rs        where tests kill the process
//! ```
//!
//! Invariant: everything is recorded before the kernel gets it, and a record is removed before its object is reused
//! after the kernel returned it. So a record may stand for something that the kernel never got, which costs its
//! memory until the mount ends, but nothing that the kernel got is missing.

pub(crate) mod again;
mod cut;
pub(crate) mod doubts;
pub(crate) mod nodes;
pub(crate) mod numbers;
pub(crate) mod opens;
pub(crate) mod requests;
pub(crate) mod restore;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_by_number;

use fusewire::{Agreed, Identity, Offer};
use nacre_sys::{descriptors, shared_words::SharedWords, worker::Process};
use nacre_vfs::{FileId, GivenNumbers};
use parking_lot::Mutex;
use std::{
    collections::{HashMap, HashSet},
    ffi::OsString,
    io,
    os::{
        fd::{AsFd, AsRawFd, IntoRawFd, OwnedFd},
        unix::ffi::{OsStrExt, OsStringExt},
    },
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::Release},
    },
};

/// Format version of the records, for other versions of the program: incremented with each change of the format.
pub const VERSION: u64 = 6;

/// Words of the parts, one after the other; each begins at a page.
const HEADER: usize = 512;
/// Offset in the header, after its numbers, of the reason why no failover is possible.
const WHY_AT: usize = 256;
const WHY: usize = 32;
const MOVE: usize = 512;
const TEXT: usize = 8192;
/// Maximum length of the path of the next program.
const PROGRAM: usize = 512;
const PROGRAM_AT: usize = HEADER + MOVE;
const TEXTS_AT: usize = PROGRAM_AT + PROGRAM;
const REQUESTS_AT: usize = TEXTS_AT + 2 * TEXT;
const NUMBERS_AT: usize = REQUESTS_AT + requests::WORDS;
const OPENS_AT: usize = NUMBERS_AT + numbers::WORDS;
/// Total for a mount whose files are found by inode number.
const SMALL: usize = OPENS_AT + opens::FEW_WORDS;
const NODES_AT: usize = OPENS_AT + opens::WORDS;
const ENDS_AT: usize = NODES_AT + nodes::WORDS;
const ALL: usize = ENDS_AT + nodes::END_WORDS;
/// Offset in the header of the thread counts of a life's request records, one word for each part.
const THREADS_AT: usize = 128;
/// Offset in the header: for each life with records of requests, whether it died before it had finished the renames of
/// previous lives. Versions that do not record this have zeroes there.
const UNFINISHED_AT: usize = 160;

/// Words of the header.
#[derive(Clone, Copy, Debug)]
enum Head {
    /// [`VERSION`]: the first word in all versions.
    Version,
    /// Number of workers that have died.
    Life,
    /// 1 once the mount answers.
    Serving,
    /// Length of the path of the program that takes over.
    Program,
    /// Not 0 where something could not be recorded and no failover is possible: the length of the reason.
    Incomplete,
    /// Which of the texts is valid, from 1.
    Text,
    /// Descriptor number of the device, plus 1.
    Device,
    Minor,
    Offered,
    ReadAhead,
    Flags,
    MaxIo,
    MountId,
    MountDevice,
    /// 1 where fusermount3 made the mount.
    Fusermount,
    /// 1 where the root has a node id of its own.
    Promoted,
    /// The table's id of the root.
    Root,
    /// Backing ids below this that no recorded open file has are closed.
    Backing,
    /// One past the last record of a node, of an open file.
    NodesEnd,
    OpensEnd,
    /// Descriptor number by which the main thread's death is noticed, plus 1.
    Main,
    /// 1 once this worker ends by itself.
    Ends,
    /// One past the last record of a set of files that the kernel knows, of a file that may have cached writes, of a
    /// thread that uses the mount, of a number that a layer assigned.
    KnownEnd,
    WrittenEnd,
    ActorsEnd,
    GivenEnd,
    /// 1 during a rollback.
    Replacing,
    /// 1 where a service manager keeps descriptors as well.
    Stored,
    /// Id of the serving process, and its start time.
    Worker,
    WorkerBegan,
    /// The first of the reuse counters, one for each shard of the inode table.
    Reuse,
}

/// The handoff state of one mount. Clones share it.
#[derive(Clone, Debug)]
pub struct Survival {
    shared: Arc<SharedWords>,
    /// Held while a number that was assigned is recorded.
    giving: Arc<Mutex<()>>,
    /// The session of the previous process belongs to a mount, or is closed.
    taken: Arc<AtomicBool>,
    life: u64,
}

impl Survival {
    /// Creates an empty state.
    ///
    /// # Errors
    /// Where the process may not map as much (`RLIMIT_AS`); only used parts take memory.
    pub fn new() -> io::Result<Survival> {
        Survival::of(SharedWords::new(c"nacre-mount", ALL)?)
    }

    /// Creates an empty state for a layer whose files are found by inode number, which needs few records: many of
    /// these states fit in one process.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn small() -> io::Result<Survival> {
        Survival::of(SharedWords::new(c"nacre-mount", SMALL)?)
    }

    fn of(words: SharedWords) -> io::Result<Survival> {
        let memory = Survival { shared: Arc::new(words), giving: Arc::default(), taken: Arc::default(), life: 0 };
        memory.set(Head::Version, VERSION);
        Ok(memory)
    }

    /// Takes over the state of a program that became this one by execve(2), or of another worker of the same
    /// supervisor.
    ///
    /// # Errors
    /// EINVAL where it has another format version; as [`Self::new`].
    pub fn taken_over(memory: OwnedFd) -> io::Result<Survival> {
        let is_small = rustix::fs::fstat(&memory)?.st_size.cast_unsigned() == SMALL as u64 * 8;
        let words = if is_small { SMALL } else { ALL };
        let words = Arc::new(SharedWords::taken_over(memory, words)?);
        let mut memory = Survival { shared: words, giving: Arc::default(), taken: Arc::default(), life: 0 };
        if memory.head(Head::Version) != VERSION {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        memory.life = memory.head(Head::Life);
        Ok(memory)
    }

    /// Returns the number of its descriptor.
    pub fn descriptor(&self) -> i32 {
        self.shared.descriptor().as_raw_fd()
    }

    /// Records which program takes over after this process; false where the path is too long.
    pub fn set_program(&self, program: &Path) -> bool {
        let path = program.as_os_str().as_bytes();
        self.set(Head::Program, 0);
        let fits = path.len() <= PROGRAM * 8;
        if fits {
            put_bytes(self.part(PROGRAM_AT, PROGRAM), path);
            self.set(Head::Program, path.len() as u64);
        }
        fits
    }

    /// Takes out the path of the program that takes over.
    pub fn take_program(&self) -> Option<PathBuf> {
        let length = usize::try_from(self.head(Head::Program)).ok().filter(|length| *length > 0)?;
        let path = bytes(self.part(PROGRAM_AT, PROGRAM), length);
        self.set(Head::Program, 0);
        Some(PathBuf::from(OsString::from_vec(path)))
    }

    /// Number of workers that have died before this one.
    pub fn restarts(&self) -> u64 {
        self.life
    }

    /// Whether this worker takes over from a previous one.
    pub fn resumes(&self) -> bool {
        self.life > 0
    }

    /// Whether a failover is possible: the mount answered, all of it is recorded, and no rollback was in progress:
    /// then it is unknown which files the kernel has.
    pub fn can_resume(&self) -> bool {
        self.head(Head::Serving) == 1 && self.head(Head::Incomplete) == 0 && self.head(Head::Replacing) == 0
    }

    /// Records whether a rollback is in progress.
    pub(crate) fn replacing(&self, replacing: bool) {
        self.set(Head::Replacing, replacing.into());
    }

    /// Records that the mount's requester knows that it answers.
    pub fn serves(&self) {
        self.set(Head::Serving, 1);
    }

    /// Begins the next life after a worker has died.
    pub fn next_life(&mut self) {
        self.life += 1;
        self.set(Head::Life, self.life);
        self.set_unfinished(true);
        self.set(Head::Main, 0);
        self.set(Head::Ends, 0);
    }

    /// Records the descriptor by which the death of this worker's main thread is noticed
    /// ([`nacre_sys::worker::death_of_this_thread`]). It stays open.
    pub fn set_main(&self, death: OwnedFd) {
        self.set(Head::Main, (i64::from(death.into_raw_fd()) + 1).cast_unsigned());
    }

    /// Returns the number of that descriptor.
    pub fn main(&self) -> Option<i32> {
        i32::try_from(self.head(Head::Main).checked_sub(1)?).ok()
    }

    /// Records which process serves, so that an unrelated process can check whether it is gone.
    pub fn set_worker(&self, worker: Process) {
        self.set(Head::WorkerBegan, worker.began);
        self.set(Head::Worker, worker.number.into());
    }

    /// Returns the serving process.
    pub fn worker(&self) -> Option<Process> {
        let number = u32::try_from(self.head(Head::Worker)).ok().filter(|number| *number != 0)?;
        Some(Process { number, began: self.head(Head::WorkerBegan) })
    }

    /// Records that a service manager keeps descriptors, so that the mount can fail over when all processes that
    /// share the descriptor table are dead: it keeps the session's own device descriptor, so the session uses no
    /// other, and none of open files.
    pub fn set_stored(&self) {
        self.set(Head::Stored, 1);
    }

    /// Whether a service manager keeps descriptors.
    pub fn is_stored(&self) -> bool {
        self.head(Head::Stored) == 1
    }

    /// Records that the descriptors of open files are closed: each file has to be opened again.
    pub fn lost_open_files(&self) {
        let opens = opens::Opens::new(self);
        opens.all().for_each(|open| opens.changed(open.fh, None));
    }

    /// Records that this worker ends by itself, whatever happens to its threads.
    pub fn ends(&self) {
        self.set(Head::Ends, 1);
    }

    /// Whether the worker ended by itself.
    pub fn has_ended(&self) -> bool {
        self.head(Head::Ends) == 1
    }

    /// Records a text for the owner of the mount; false where it is too long.
    pub fn set_text(&self, text: &[u8]) -> bool {
        if text.len() > (TEXT - 1) * 8 {
            return false;
        }
        let next = if self.head(Head::Text) == 1 { 2 } else { 1 };
        let words = self.part(TEXTS_AT + (next as usize - 1) * TEXT, TEXT);
        put(words, 0, text.len() as u64);
        put_bytes(words.get(1..).unwrap_or_default(), text);
        self.set(Head::Text, next);
        true
    }

    /// Returns the last recorded text.
    pub fn text(&self) -> Option<Vec<u8>> {
        let which = usize::try_from(self.head(Head::Text)).ok()?.checked_sub(1)?;
        let words = self.part(TEXTS_AT + which * TEXT, TEXT);
        Some(bytes(words.get(1..)?, usize::try_from(get(words, 0)).ok()?))
    }

    /// Makes the kernel resend unanswered requests. A worker that takes over does this first, while it has one
    /// thread, before other descriptors of the connection are closed. Afterwards it closes all but those that are
    /// [kept](Self::kept).
    ///
    /// # Errors
    /// The kernel cannot, or the connection has ended.
    pub fn resend(&self) -> io::Result<()> {
        let device = self.device().ok_or_else(|| io::Error::from(rustix::io::Errno::BADF))?;
        fusewire::resend(descriptors::another(device)?.as_fd())
    }

    /// Descriptors that the next worker takes over.
    pub fn kept(&self, also: &[i32]) -> Vec<i32> {
        let known = also.iter().copied().chain(self.own());
        known.chain(opens::Opens::new(self).all().filter_map(|open| Some(open.left?.descriptor))).collect()
    }

    /// Its own descriptor, and that of the device.
    pub fn own(&self) -> impl Iterator<Item = i32> + use<> {
        [self.descriptor()].into_iter().chain(self.device())
    }

    /// Descriptor number of the session's device.
    pub fn device(&self) -> Option<i32> {
        i32::try_from(self.head(Head::Device).checked_sub(1)?).ok()
    }

    /// Takes over the session's device, once.
    fn take_device(&self) -> io::Result<OwnedFd> {
        let device = self.device().filter(|_| !self.taken.swap(true, Relaxed));
        descriptors::take_over(device.ok_or_else(|| io::Error::from(rustix::io::Errno::BADF))?)
    }

    /// Closes the session of the previous process, which no process takes over: users of the mount get errors. Does
    /// nothing where a mount has the session.
    pub fn let_go(&self) {
        // An error means that it is closed already, which is fine.
        drop(self.take_device());
    }

    fn set_session(&self, (agreed, device): (Agreed, i32)) {
        self.set(Head::Minor, agreed.offer.minor.into());
        self.set(Head::Offered, agreed.offer.flags);
        self.set(Head::ReadAhead, agreed.offer.max_readahead.into());
        self.set(Head::Flags, agreed.flags);
        self.set(Head::MaxIo, agreed.max_io.into());
        self.set(Head::Device, (i64::from(device) + 1).cast_unsigned());
    }

    fn agreed(&self) -> Agreed {
        let number = |head| u32::try_from(self.head(head)).unwrap_or(u32::MAX);
        Agreed {
            offer: Offer {
                minor: number(Head::Minor),
                flags: self.head(Head::Offered),
                max_readahead: number(Head::ReadAhead),
            },
            flags: self.head(Head::Flags),
            max_io: number(Head::MaxIo),
        }
    }

    /// Flags that the kernel agreed on with the previous process, where there was one.
    pub(crate) fn agreed_before(&self) -> Option<u64> {
        self.resumes().then(|| self.head(Head::Flags))
    }

    /// Device number of the mount of the previous process.
    pub(crate) fn mounted_before(&self) -> Option<u64> {
        let (major, minor) = self.identity().filter(|_| self.resumes())?.device;
        Some(rustix::fs::makedev(major, minor))
    }

    /// Whether a layer whose files are found by inode number has the same root as before; recorded where there was
    /// none.
    pub(crate) fn is_root(&self, root: &FileId) -> bool {
        if self.resumes() {
            return self.head(Head::Root) == root.fs;
        }
        self.set(Head::Root, root.fs);
        true
    }

    /// The records of numbers that the mount's layers assign for good.
    pub fn given_numbers(&self) -> Arc<dyn GivenNumbers> {
        Arc::new(numbers::Given::new(self))
    }

    fn set_mount(&self, identity: Option<Identity>, by_fusermount: bool, promoted: bool) {
        let (id, device) = identity.map_or((0, (0, 0)), |identity| (identity.id, identity.device));
        self.set(Head::MountId, id);
        self.set(Head::MountDevice, u64::from(device.0) << 32 | u64::from(device.1));
        self.set(Head::Fusermount, by_fusermount.into());
        self.set(Head::Promoted, promoted.into());
    }

    fn identity(&self) -> Option<Identity> {
        let device = self.head(Head::MountDevice);
        let id = Some(self.head(Head::MountId)).filter(|id| *id != 0)?;
        Some(Identity { id, device: ((device >> 32) as u32, device as u32) })
    }

    /// Records that something could not be recorded: this mount ends with its process.
    pub fn give_up(&self, why: &str) {
        if self.head(Head::Incomplete) == 0 {
            let words = self.part(WHY_AT, WHY);
            put_bytes(words, why.as_bytes());
            self.set(Head::Incomplete, why.len().clamp(1, WHY * 8) as u64);
            tracing::warn!("the mount does not outlive its process: {why}");
        }
    }

    /// Why this mount ends with its process, where it does.
    pub fn why_not(&self) -> Option<String> {
        let Some(length) = usize::try_from(self.head(Head::Incomplete)).ok().filter(|length| *length > 0) else {
            return (self.head(Head::Replacing) == 1).then(|| "its files are about to become others".to_owned());
        };
        Some(String::from_utf8_lossy(&bytes(self.part(WHY_AT, WHY), length)).into_owned())
    }

    fn head(&self, head: Head) -> u64 {
        get(self.part(0, HEADER), head as usize)
    }

    fn set(&self, head: Head, value: u64) {
        publish(self.part(0, HEADER), head as usize, value);
    }

    /// Raises a word of the header to a minimum.
    fn raise(&self, head: Head, value: u64) {
        if self.head(head) < value
            && let Some(word) = self.part(0, HEADER).get(head as usize)
        {
            word.fetch_max(value, Relaxed);
        }
    }

    fn part(&self, at: usize, words: usize) -> &[AtomicU64] {
        self.shared.words().get(at..at + words).unwrap_or_default()
    }
}

/// The front end's handoff state.
pub(crate) struct Survives {
    pub memory: Survival,
    pub opens: opens::Opens,
    pub requests: Arc<requests::Requests>,
    /// Open files recorded by a previous process, by the requests that opened them.
    pub granted: Mutex<HashMap<u64, u64>>,
    /// Backing ids of these files.
    pub backing: Mutex<HashSet<i32>>,
}

impl Survives {
    pub fn new(memory: &Survival) -> Survives {
        Survives {
            memory: memory.clone(),
            opens: opens::Opens::new(memory),
            requests: Arc::new(requests::Requests::new(memory)),
            granted: Mutex::default(),
            backing: Mutex::default(),
        }
    }
}

/// Loads a word.
fn get(words: &[AtomicU64], at: usize) -> u64 {
    words.get(at).map_or(0, |word| word.load(Relaxed))
}

/// Stores a word whose record another word makes valid.
fn put(words: &[AtomicU64], at: usize, value: u64) {
    cut::store();
    if let Some(word) = words.get(at) {
        word.store(value, Relaxed);
    }
}

/// Stores a word that makes a record valid, after all its other words.
fn publish(words: &[AtomicU64], at: usize, value: u64) {
    cut::store();
    if let Some(word) = words.get(at) {
        word.store(value, Release);
    }
}

/// Invalidates a record whose words are about to be stored.
fn retract(words: &[AtomicU64], at: usize) {
    publish(words, at, 0);
    keep_order();
}

/// Orders the following stores after the previous ones. When a process is killed, the stores of each thread up to
/// some moment remain, in program order: so a compiler fence is enough.
fn keep_order() {
    std::sync::atomic::compiler_fence(std::sync::atomic::Ordering::SeqCst);
}

fn put_bytes(words: &[AtomicU64], bytes: &[u8]) {
    for (word, eight) in words.iter().zip(bytes.chunks(8)) {
        let mut value = [0; 8];
        value.iter_mut().zip(eight).for_each(|(to, from)| *to = *from);
        cut::store();
        word.store(u64::from_ne_bytes(value), Relaxed);
    }
}

/// The first `length` bytes.
fn bytes(words: &[AtomicU64], length: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> =
        words.iter().take(length.div_ceil(8)).flat_map(|word| word.load(Relaxed).to_ne_bytes()).collect();
    bytes.truncate(length);
    bytes
}
