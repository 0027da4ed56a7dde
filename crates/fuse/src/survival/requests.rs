//! What each thread was about to change, and what it answered: one record for each thread that serves
//! requests.
//!
//! A request that changes something which a second time would be refused, or done twice, is noted
//! before it is carried out, and its answer after. The kernel sends what was unanswered again, with
//! the same number: what is noted under it tells what became of it. A thread's record is written anew
//! with its next such request, when the kernel has the answer to the one before.
//!
//! Each life writes to a part of its own, and leaves those of the lives before it as they are: what
//! comes again may have been noted by any of them. The part that it takes was that of the eighth
//! before it: a guardian that makes that many in the time of one unread request gives up long before.

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

/// Lives that have parts of their own.
const LIVES: usize = 8;
/// The most threads that change something at one time.
const THREADS: usize = 2048;
const RECORD: usize = 32;
const PART: usize = THREADS * RECORD;
pub(super) const WORDS: usize = LIVES * PART;

const UNIQUE: usize = 0;
const BEGUN: usize = 1;
const FACTS: usize = 2;
/// 0: not answered; else the length of the answer and 1, above the error number.
const ANSWERED: usize = FACTS + 6;
const ANSWER: usize = ANSWERED + 1;
/// Longer answers (there are none) are not noted.
const ANSWER_MAX: usize = (RECORD - ANSWER) * 8;

/// What is known of a request's world before it is carried out; what they are depends on its kind.
pub(crate) type Facts = [u64; 6];

/// A request that was noted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Noted {
    /// When, nanoseconds since 1970.
    pub begun: u64,
    pub facts: Facts,
    /// What was answered, or is about to be: the body of the reply, or an error number.
    pub answer: Option<Result<Vec<u8>, i32>>,
}

/// The records of all threads.
#[derive(Debug)]
pub(crate) struct Requests {
    memory: Survival,
    /// Records of this life that no thread has.
    free: Mutex<Vec<usize>>,
    /// What lives before this one noted.
    before: HashMap<u64, Noted>,
}

/// The record of a thread, which has it until it ends.
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
    /// Of a new life.
    pub fn new(memory: &Survival) -> Requests {
        let part = memory.life as usize % LIVES;
        publish(memory.part(0, HEADER), THREADS_AT + part, 0);
        memory.shared.clear(REQUESTS_AT + part * PART, PART);
        Requests::again(memory)
    }

    /// Of a life that may have begun.
    pub(super) fn again(memory: &Survival) -> Requests {
        let life = memory.life as usize;
        let part = life % LIVES * PART;
        let mut before = HashMap::new();
        // The later lives know better.
        for life in life.saturating_sub(LIVES - 1)..life {
            let part = life % LIVES;
            // Memory that nobody wrote to would be taken by the look at it.
            let threads = (get(memory.part(0, HEADER), THREADS_AT + part) as usize).min(THREADS);
            for thread in 0..threads {
                before.extend(read(memory.part(REQUESTS_AT + part * PART + thread * RECORD, RECORD)));
            }
        }
        let free = (0..THREADS).rev().map(|thread| REQUESTS_AT + part + thread * RECORD).collect();
        Requests { memory: memory.clone(), free: Mutex::new(free), before }
    }

    /// Whether an answer names this node that a life before this one noted: the kernel may not have it yet.
    pub fn is_named(&self, nodeid: u64) -> bool {
        let named = |noted: &Noted| match &noted.answer {
            Some(Ok(body)) => node_of(body) == Some(nodeid),
            _ => false,
        };
        self.before.values().any(named)
    }

    /// What a life before this one noted of a request.
    pub fn before(&self, unique: u64) -> Option<&Noted> {
        self.before.get(&unique)
    }

    /// The calling thread is about to carry out a request. EAGAIN where too many do so.
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

    /// The calling thread is about to answer it.
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

/// The node that an answer names first, if it names one.
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
