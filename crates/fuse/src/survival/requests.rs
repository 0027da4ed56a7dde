//! Records of requests: the change that each serving thread was about to make, and its reply; one record per thread.
//!
//! A request that would be refused or applied twice when repeated is recorded before it is carried out, and its reply
//! afterwards. The kernel resends unanswered requests with the same unique number, under which the record is found. A
//! thread overwrites its record at its next recorded request, when the kernel has the previous reply.
//!
//! Each life writes to a part of its own, and leaves those of previous lives unchanged: a resent request may have
//! been recorded by any of them. A part is reused after eight lives: a supervisor that restarts so often while one
//! request stays unread gives up long before.

use super::{HEADER, REQUESTS_AT, Survival, THREADS_AT, bytes, get, publish, put, put_bytes, retract};
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

/// State before a request is carried out; its meaning depends on the kind of request.
pub(crate) type Facts = [u64; 6];

/// A recorded request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Noted {
    /// Time at which it began, nanoseconds since 1970.
    pub begun: u64,
    pub facts: Facts,
    /// The reply that was sent, or was about to be: its body, or an error number.
    pub answer: Option<Result<Vec<u8>, i32>>,
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

    /// Records that the calling thread is about to carry out a request. EAGAIN where too many threads do so.
    pub fn begin(self: &Arc<Requests>, unique: u64, begun: u64, facts: Facts) -> Outcome {
        self.with_mine(|record| {
            retract(record, UNIQUE);
            put(record, BEGUN, begun);
            facts.iter().enumerate().for_each(|(which, fact)| put(record, FACTS + which, *fact));
            put(record, ANSWERED, 0);
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

fn read(record: &[AtomicU64]) -> Option<(u64, Noted)> {
    let unique = Some(get(record, UNIQUE)).filter(|unique| *unique != 0)?;
    let answered = get(record, ANSWERED);
    let answer = match (answered >> 32, answered as u32 as usize) {
        (0, 0) => None,
        (0, length) => Some(Ok(bytes(record.get(ANSWER..)?, length - 1))),
        (error, _) => Some(Err((error as u32).cast_signed())),
    };
    Some((
        unique,
        Noted { begun: get(record, BEGUN), facts: std::array::from_fn(|which| get(record, FACTS + which)), answer },
    ))
}
