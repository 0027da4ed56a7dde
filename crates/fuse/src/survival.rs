//! What a mount leaves to the process that goes on with it when the one that serves it dies.
//!
//! Made by a guardian, written by the door of each worker, read by the next one. It lies in shared
//! memory, in which every record has one word that makes it valid: the word is stored last, and made
//! 0 first, so a record that was being written when the process was killed is not there. Workers of
//! one guardian also share a table of descriptors (`nacre_sys::worker`): what is noted of a descriptor
//! is its number.
//!
//! ```text
//!  nodes.rs      which file a node id stands for, and where it was found
//!  opens.rs      which open file a handle stands for
//!  requests.rs   what each thread was about to change, and what it answered
//!  numbers.rs    of layers whose files are found by their numbers: which the kernel knows, which may hold
//!                collected writes; what layers give out for good; threads that use the mount
//!  doubts.rs     whether the kernel still knows a file that it knew before
//!  restore.rs    the tables of the door, made from these records
//!  again.rs      requests that come again after they may have been carried out
//!  cut.rs        where tests have the process die
//! ```
//!
//! Invariant: what is noted is noted before the kernel is told of it, and what the kernel gave back is
//! taken out before it is used again. So a record may stand for something that the kernel never got,
//! which costs its memory until the mount ends, but nothing that it got is missing.

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

/// Which way things are noted, for programs of other versions: another number with each change of
/// what is noted, or how.
pub const VERSION: u64 = 6;

/// Words of the parts, one after the other; each begins at a page.
const HEADER: usize = 512;
/// In the header, behind its numbers: why nobody can go on.
const WHY_AT: usize = 256;
const WHY: usize = 32;
const MOVE: usize = 512;
const TEXT: usize = 8192;
/// The longest path.
const PROGRAM: usize = 512;
const PROGRAM_AT: usize = HEADER + MOVE;
const TEXTS_AT: usize = PROGRAM_AT + PROGRAM;
const REQUESTS_AT: usize = TEXTS_AT + 2 * TEXT;
const NUMBERS_AT: usize = REQUESTS_AT + requests::WORDS;
const OPENS_AT: usize = NUMBERS_AT + numbers::WORDS;
/// All of a mount whose files are found by their numbers.
const SMALL: usize = OPENS_AT + opens::FEW_WORDS;
const NODES_AT: usize = OPENS_AT + opens::WORDS;
const ENDS_AT: usize = NODES_AT + nodes::WORDS;
const ALL: usize = ENDS_AT + nodes::END_WORDS;
/// In the header, how many threads of a life have records of requests, one word for each part.
const THREADS_AT: usize = 128;

/// Words of the header.
#[derive(Clone, Copy, Debug)]
enum Head {
    /// [`VERSION`]: the first word in all versions.
    Version,
    /// How many workers have died.
    Life,
    /// 1 once the mount answers.
    Serving,
    /// The length of the path of the program that is to go on.
    Program,
    /// Other than 0 where something could not be noted and nobody can go on: the length of why.
    Incomplete,
    /// Which of the texts holds, from 1.
    Text,
    /// The number of the device's descriptor, and 1.
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
    /// Backing ids below this that are noted for no open file are closed.
    Backing,
    /// Behind the last place of a node, of an open file.
    NodesEnd,
    OpensEnd,
    /// The number of the descriptor by which the main thread's death is told, and 1.
    Main,
    /// 1 once this worker ends by itself.
    Ends,
    /// Behind the last place of a set of files that the kernel knows, of a file that may hold writes, of a
    /// thread that uses the mount, of a number that a layer gave out.
    KnownEnd,
    WrittenEnd,
    ActorsEnd,
    GivenEnd,
    /// 1 while files become others.
    Replacing,
    /// 1 where descriptors are kept outside as well.
    Stored,
    /// Which process serves, and when it began.
    Worker,
    WorkerBegan,
    /// The first of the counters of reuse, one for each shard of the inode table.
    Reuse,
}

/// The memory of one mount. Clones are the same.
#[derive(Clone, Debug)]
pub struct Survival {
    shared: Arc<SharedWords>,
    /// Held while a number that was given out is noted.
    giving: Arc<Mutex<()>>,
    /// The session of the process before this one belongs to a mount, or is closed.
    taken: Arc<AtomicBool>,
    life: u64,
}

impl Survival {
    /// Nothing is noted yet.
    ///
    /// # Errors
    /// Where the process may not map as much (`RLIMIT_AS`); only what is used takes memory.
    pub fn new() -> io::Result<Survival> {
        Survival::of(SharedWords::new(c"nacre-mount", ALL)?)
    }

    /// The same of a layer whose files are found by their numbers, of which little has to be noted: many
    /// of these have room in one process.
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

    /// That of a program which became this one, or of another worker of the same guardian.
    ///
    /// # Errors
    /// EINVAL where it is noted in another way; as [`Self::new`].
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

    /// The number of its descriptor.
    pub fn descriptor(&self) -> i32 {
        self.shared.descriptor().as_raw_fd()
    }

    /// Notes which program is to go on after this process; false where the path is too long.
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

    /// The program that is to go on, once.
    pub fn take_program(&self) -> Option<PathBuf> {
        let length = usize::try_from(self.head(Head::Program)).ok().filter(|length| *length > 0)?;
        let path = bytes(self.part(PROGRAM_AT, PROGRAM), length);
        self.set(Head::Program, 0);
        Some(PathBuf::from(OsString::from_vec(path)))
    }

    /// How many workers have died before this one.
    pub fn restarts(&self) -> u64 {
        self.life
    }

    /// Whether this worker goes on with what another one left.
    pub fn resumes(&self) -> bool {
        self.life > 0
    }

    /// Whether a worker can go on: the mount answered, all of it is noted, and no file was about to become
    /// another one: nobody knows which of them the kernel has then.
    pub fn can_resume(&self) -> bool {
        self.head(Head::Serving) == 1 && self.head(Head::Incomplete) == 0 && self.head(Head::Replacing) == 0
    }

    /// Files are about to become others, or no more.
    pub(crate) fn replacing(&self, replacing: bool) {
        self.set(Head::Replacing, replacing.into());
    }

    /// Whoever asked for the mount has heard that it answers.
    pub fn serves(&self) {
        self.set(Head::Serving, 1);
    }

    /// A worker has died: what is made from here on is the next one's.
    pub fn next_life(&mut self) {
        self.life += 1;
        self.set(Head::Life, self.life);
        self.set(Head::Main, 0);
        self.set(Head::Ends, 0);
    }

    /// Notes the descriptor by which the death of this worker's main thread is told
    /// ([`nacre_sys::worker::death_of_this_thread`]). It stays open.
    pub fn set_main(&self, death: OwnedFd) {
        self.set(Head::Main, (i64::from(death.into_raw_fd()) + 1).cast_unsigned());
    }

    /// The number of that descriptor.
    pub fn main(&self) -> Option<i32> {
        i32::try_from(self.head(Head::Main).checked_sub(1)?).ok()
    }

    /// Notes which process serves, so that another one that has no part in its making knows whether it is
    /// gone.
    pub fn set_worker(&self, worker: Process) {
        self.set(Head::WorkerBegan, worker.began);
        self.set(Head::Worker, worker.number.into());
    }

    /// That process.
    pub fn worker(&self) -> Option<Process> {
        let number = u32::try_from(self.head(Head::Worker)).ok().filter(|number| *number != 0)?;
        Some(Process { number, began: self.head(Head::WorkerBegan) })
    }

    /// A service manager keeps descriptors, so that the mount can go on when all processes with this table of
    /// them are dead: of the device the session's own, so it has no other, and none of open files.
    pub fn set_stored(&self) {
        self.set(Head::Stored, 1);
    }

    /// Whether that is so.
    pub fn is_stored(&self) -> bool {
        self.head(Head::Stored) == 1
    }

    /// The descriptors of open files are closed: each is opened anew.
    pub fn lost_open_files(&self) {
        let opens = opens::Opens::new(self);
        opens.all().for_each(|open| opens.changed(open.fh, None));
    }

    /// This worker ends by itself, whatever becomes of its threads.
    pub fn ends(&self) {
        self.set(Head::Ends, 1);
    }

    /// Whether it said so.
    pub fn has_ended(&self) -> bool {
        self.head(Head::Ends) == 1
    }

    /// Notes what the owner of the mount wants to know again; false where it is too long.
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

    /// What was noted last.
    pub fn text(&self) -> Option<Vec<u8>> {
        let which = usize::try_from(self.head(Head::Text)).ok()?.checked_sub(1)?;
        let words = self.part(TEXTS_AT + which * TEXT, TEXT);
        Some(bytes(words.get(1..)?, usize::try_from(get(words, 0)).ok()?))
    }

    /// What a worker that goes on does first, while it has one thread: makes the kernel send again what
    /// is unanswered, before other descriptors of the connection are closed. Afterwards it closes all but
    /// those that are [kept](Self::kept).
    ///
    /// # Errors
    /// The kernel cannot, or the connection has ended.
    pub fn resend(&self) -> io::Result<()> {
        let device = self.device().ok_or_else(|| io::Error::from(rustix::io::Errno::BADF))?;
        fusewire::resend(descriptors::another(device)?.as_fd())
    }

    /// The descriptors that the next worker takes over.
    pub fn kept(&self, also: &[i32]) -> Vec<i32> {
        let known = also.iter().copied().chain(self.own());
        known.chain(opens::Opens::new(self).all().filter_map(|open| Some(open.left?.descriptor))).collect()
    }

    /// Its own, and that of the device.
    pub fn own(&self) -> impl Iterator<Item = i32> + use<> {
        [self.descriptor()].into_iter().chain(self.device())
    }

    /// The descriptor's number that the session had.
    pub fn device(&self) -> Option<i32> {
        i32::try_from(self.head(Head::Device).checked_sub(1)?).ok()
    }

    /// The session's device, once.
    fn take_device(&self) -> io::Result<OwnedFd> {
        let device = self.device().filter(|_| !self.taken.swap(true, Relaxed));
        descriptors::take_over(device.ok_or_else(|| io::Error::from(rustix::io::Errno::BADF))?)
    }

    /// Nobody goes on with the session of the process before this one: whoever uses the mount is told.
    /// Nothing where a mount has it.
    pub fn let_go(&self) {
        // Where it is closed already, that is as good.
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

    /// The flags that the kernel agreed on with the process before this one, where there was one.
    pub(crate) fn agreed_before(&self) -> Option<u64> {
        self.resumes().then(|| self.head(Head::Flags))
    }

    /// The device number of the mount of the process before this one.
    pub(crate) fn mounted_before(&self) -> Option<u64> {
        let (major, minor) = self.identity().filter(|_| self.resumes())?.device;
        Some(rustix::fs::makedev(major, minor))
    }

    /// Whether a layer whose files are found by their numbers has the root that it had before; it is noted
    /// where there was none.
    pub(crate) fn is_root(&self, root: &FileId) -> bool {
        if self.resumes() {
            return self.head(Head::Root) == root.fs;
        }
        self.set(Head::Root, root.fs);
        true
    }

    /// What the layer of the mount gives out for good: for layers that are made for it.
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

    /// Something could not be noted: this mount ends with its process.
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

    /// Raises a word of the header.
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

/// What a door notes for a process after its own.
pub(crate) struct Survives {
    pub memory: Survival,
    pub opens: opens::Opens,
    pub requests: Arc<requests::Requests>,
    /// Open files that a process before this one noted, by the requests that opened them.
    pub granted: Mutex<HashMap<u64, u64>>,
    /// Backing ids that such files have.
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

/// A word.
fn get(words: &[AtomicU64], at: usize) -> u64 {
    words.get(at).map_or(0, |word| word.load(Relaxed))
}

/// Stores a word that another one makes valid.
fn put(words: &[AtomicU64], at: usize, value: u64) {
    cut::store();
    if let Some(word) = words.get(at) {
        word.store(value, Relaxed);
    }
}

/// Stores a word that makes others valid, all of which are stored before.
fn publish(words: &[AtomicU64], at: usize, value: u64) {
    cut::store();
    if let Some(word) = words.get(at) {
        word.store(value, Release);
    }
}

/// Takes a word's validity from others that are about to be stored.
fn retract(words: &[AtomicU64], at: usize) {
    publish(words, at, 0);
    keep_order();
}

/// What follows is stored after what was before. A process that is killed leaves what it stored up to
/// some moment, as each thread did it: so it is enough that the compiler keeps the order.
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
