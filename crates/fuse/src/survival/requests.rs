//! Records of requests: the change that each serving thread was about to make, and its reply; one record per thread.
//!
//! A request that would be refused or applied twice when repeated is recorded before it is carried out, and its reply
//! afterwards. The kernel resends unanswered requests with the same unique number, under which the record is found. A
//! thread overwrites its record at its next recorded request, when the kernel has the previous reply.
//!
//! Each life writes to a part of its own, and leaves those of previous lives unchanged: a resent request may have
//! been recorded by any of them. A part is reused after eight lives: a supervisor that restarts so often while one
//! request stays unread gives up long before.

use super::{HEADER, REQUESTS_AT, Survival, THREADS_AT, UNFINISHED_AT, bytes, get, publish, put, put_bytes, retract};
use crate::failure::{Failure, Outcome};
use nacre_vfs::Errno;
use parking_lot::Mutex;
use std::{
    cell::RefCell,
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

/// Number of lives that have parts of their own.
const LIVES: usize = 8;
/// Maximum number of threads that change something at one time.
const THREADS: usize = 2048;
const RECORD: usize = 32;
const PART: usize = THREADS * RECORD;
pub(super) const WORDS: usize = LIVES * PART;

const UNIQUE: usize = 0;
const BEGUN: usize = 1;
const FACTS: usize = 2;
/// 0: not answered; else the length of the reply plus 1, above it the error number.
const ANSWERED: usize = FACTS + 6;
const ANSWER: usize = ANSWERED + 1;
/// Longer replies (there are none) are not recorded.
const ANSWER_MAX: usize = (RECORD - ANSWER) * 8;

/// Header of a recorded rename: a word that marks it, the directories, the caller, flags and lengths of the names.
const RENAME_HEAD: usize = 5;
/// Makes leftovers of a previous reply in the same record unlikely to pass for a rename.
const RENAME: u64 = 0x6e61_6372_6572_656e;

/// State before a request is carried out; its meaning depends on the kind of request.
pub(crate) type Facts = [u64; 6];

/// A rename, as the kernel has requested it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RenameRecord {
    /// Node id of the directory of the old name.
    pub parent: u64,
    pub name: Vec<u8>,
    /// Node id of the directory of the new name.
    pub new_parent: u64,
    pub new_name: Vec<u8>,
    pub flags: u32,
    pub uid: u32,
    pub gid: u32,
}

/// A recorded request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Noted {
    /// Time at which it began, nanoseconds since 1970.
    pub begun: u64,
    pub facts: Facts,
    /// The reply that was sent, or was about to be: its body, or an error number.
    pub answer: Option<Result<Vec<u8>, i32>>,
    /// The request, if it is an unanswered rename whose names are not too long: the kernel does not send it again if its
    /// caller is killed as well.
    pub rename: Option<RenameRecord>,
}

/// The records of all threads.
#[derive(Debug)]
pub(crate) struct Requests {
    memory: Survival,
    /// Unused records of this life.
    free: Mutex<Vec<usize>>,
    /// Records of previous lives, by unique number.
    before: HashMap<u64, Noted>,
}

/// The record of a thread, until the thread ends.
struct Mine {
    requests: Arc<Requests>,
    record: usize,
}

impl Drop for Mine {
    fn drop(&mut self) {
        self.requests.free.lock().push(self.record);
    }
}

thread_local! {
    static MINE: RefCell<Option<Mine>> = const { RefCell::new(None) };
}

/// Records EIO, when dropped, for a request whose handler panics: that is its reply, and its names may change from then on.
pub(crate) struct PanicReply<'a>(pub &'a Arc<Requests>);

impl Drop for PanicReply<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.answer(Err(Errno::EIO.raw()));
        }
    }
}

impl Survival {
    /// Records whether this life has still to finish the renames of previous ones.
    pub(super) fn set_unfinished(&self, is_unfinished: bool) {
        let part = self.life as usize % LIVES;
        publish(self.part(0, HEADER), UNFINISHED_AT + part, u64::from(is_unfinished));
    }
}

impl Requests {
    /// Creates the records of a new life.
    pub fn new(memory: &Survival) -> Requests {
        let part = memory.life as usize % LIVES;
        publish(memory.part(0, HEADER), THREADS_AT + part, 0);
        memory.shared.clear(REQUESTS_AT + part * PART, PART);
        Requests::again(memory)
    }

    /// Creates the records of a life that may have begun already.
    pub(super) fn again(memory: &Survival) -> Requests {
        let life = memory.life as usize;
        let part = life % LIVES * PART;
        let mut before = HashMap::new();
        // Records of later lives replace earlier ones.
        for life in life.saturating_sub(LIVES - 1)..life {
            let part = life % LIVES;
            // Reading memory that was never written to would allocate it.
            let threads = (get(memory.part(0, HEADER), THREADS_AT + part) as usize).min(THREADS);
            for thread in 0..threads {
                before.extend(read(memory.part(REQUESTS_AT + part * PART + thread * RECORD, RECORD)));
            }
        }
        let free = (0..THREADS).rev().map(|thread| REQUESTS_AT + part + thread * RECORD).collect();
        Requests { memory: memory.clone(), free: Mutex::new(free), before }
    }

    /// Whether a reply recorded in a previous life names this node: the kernel may not have got it yet.
    pub fn is_named(&self, nodeid: u64) -> bool {
        let named = |noted: &Noted| match &noted.answer {
            Some(Ok(body)) => node_of(body) == Some(nodeid),
            _ => false,
        };
        self.before.values().any(named)
    }

    /// Returns the record of a request in a previous life.
    pub fn before(&self, unique: u64) -> Option<&Noted> {
        self.before.get(&unique)
    }

    /// Returns the unanswered renames of the previous life, by unique number. Renames of earlier lives were returned
    /// to earlier processes: their names may belong to other files by now, unless that process died before it had finished
    /// them, and so before it read any request.
    pub fn unanswered_renames(&self) -> Vec<(u64, Noted)> {
        let (life, mut renames) = (self.memory.life as usize, Vec::new());
        for life in (life.saturating_sub(LIVES - 1)..life).rev() {
            let part = life % LIVES;
            let threads = (get(self.memory.part(0, HEADER), THREADS_AT + part) as usize).min(THREADS);
            let records = (0..threads)
                .filter_map(|thread| read(self.memory.part(REQUESTS_AT + part * PART + thread * RECORD, RECORD)));
            renames.extend(records.filter(|(_, noted)| noted.rename.is_some()));
            if get(self.memory.part(0, HEADER), UNFINISHED_AT + part) == 0 {
                break;
            }
        }
        renames
    }

    /// Records that the renames of previous lives are finished.
    pub fn renames_are_finished(&self) {
        self.memory.set_unfinished(false);
    }

    /// Records that the calling thread is about to carry out a request. EAGAIN where too many threads do so.
    pub fn begin(
        self: &Arc<Requests>,
        unique: u64,
        begun: u64,
        facts: Facts,
        rename: Option<&RenameRecord>,
    ) -> Outcome {
        self.with_mine(|record| {
            retract(record, UNIQUE);
            put(record, BEGUN, begun);
            facts.iter().enumerate().for_each(|(which, fact)| put(record, FACTS + which, *fact));
            put(record, ANSWERED, 0);
            match rename {
                Some(rename) => rename.write(unique, record.get(ANSWER..).unwrap_or_default()),
                None => put(record, ANSWER, 0),
            }
            publish(record, UNIQUE, unique);
        })
        .ok_or(Failure::from(Errno::EAGAIN))
    }

    /// Records the reply that the calling thread is about to send.
    pub fn answer(self: &Arc<Requests>, answer: Result<&[u8], i32>) {
        self.with_mine(|record| match answer {
            Ok(body) if body.len() <= ANSWER_MAX => {
                put_bytes(record.get(ANSWER..).unwrap_or_default(), body);
                publish(record, ANSWERED, body.len() as u64 + 1);
            }
            Ok(_) => {}
            Err(error) => publish(record, ANSWERED, u64::from(error.cast_unsigned()) << 32),
        });
    }

    fn with_mine<T>(self: &Arc<Requests>, f: impl FnOnce(&[AtomicU64]) -> T) -> Option<T> {
        MINE.with_borrow_mut(|mine| {
            if !mine.as_ref().is_some_and(|mine| Arc::ptr_eq(&mine.requests, self)) {
                let record = self.free.lock().pop()?;
                let (part, thread) = ((record - REQUESTS_AT) / PART, (record - REQUESTS_AT) % PART / RECORD);
                if let Some(threads) = self.memory.part(0, HEADER).get(THREADS_AT + part) {
                    threads.fetch_max(thread as u64 + 1, Relaxed);
                }
                *mine = Some(Mine { requests: Arc::clone(self), record });
            }
            mine.as_ref().map(|mine| f(self.memory.part(mine.record, RECORD)))
        })
    }
}

/// Returns the node id at the beginning of a reply, if there is one.
pub(crate) fn node_of(body: &[u8]) -> Option<u64> {
    body.first_chunk().map(|number| u64::from_ne_bytes(*number)).filter(|nodeid| *nodeid != 0)
}

impl RenameRecord {
    /// Writes the record where the reply is written later.
    fn write(&self, unique: u64, words: &[AtomicU64]) {
        let names = [self.name.as_slice(), &self.new_name].concat();
        let Some(room) = words.get(RENAME_HEAD..).filter(|room| names.len() <= room.len() * 8) else {
            put(words, 0, 0);
            return;
        };
        let lengths = (self.name.len() as u64) << 32 | (self.new_name.len() as u64) << 48;
        put(words, 0, RENAME ^ unique);
        put(words, 1, self.parent);
        put(words, 2, self.new_parent);
        put(words, 3, u64::from(self.uid) << 32 | u64::from(self.gid));
        put(words, 4, u64::from(self.flags) | lengths);
        put_bytes(room, &names);
    }

    fn read(unique: u64, words: &[AtomicU64]) -> Option<RenameRecord> {
        if get(words, 0) != RENAME ^ unique {
            return None;
        }
        let (owner, rest) = (get(words, 3), get(words, 4));
        let (length, new_length) = ((rest >> 32 & 0xffff) as usize, (rest >> 48) as usize);
        let room = words.get(RENAME_HEAD..).filter(|room| length + new_length <= room.len() * 8)?;
        let mut name = bytes(room, length + new_length);
        let new_name = name.split_off(length);
        Some(RenameRecord {
            parent: get(words, 1),
            name,
            new_parent: get(words, 2),
            new_name,
            flags: rest as u32,
            uid: (owner >> 32) as u32,
            gid: owner as u32,
        })
    }
}

fn read(record: &[AtomicU64]) -> Option<(u64, Noted)> {
    let unique = Some(get(record, UNIQUE)).filter(|unique| *unique != 0)?;
    let answered = get(record, ANSWERED);
    let answer = match (answered >> 32, answered as u32 as usize) {
        (0, 0) => None,
        (0, length) => Some(Ok(bytes(record.get(ANSWER..)?, length - 1))),
        (error, _) => Some(Err((error as u32).cast_signed())),
    };
    let rename = match answer {
        None => RenameRecord::read(unique, record.get(ANSWER..)?),
        Some(_) => None,
    };
    let facts = std::array::from_fn(|which| get(record, FACTS + which));
    Some((unique, Noted { begun: get(record, BEGUN), facts, answer, rename }))
}
