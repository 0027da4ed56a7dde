//! A background job of a pool: one thread that is started when there is work, that commands can
//! wait for, and that ends when the pool is released.
//!
//! Used by `pool/scrub.rs` and `pool/trim.rs`. Invariants: one thread at most; a job whose state is
//! "running" has a thread, unless the pool is being released or no thread could be started.

use std::ops::{Deref, DerefMut};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::{Kind, Refusal};

/// State of a job.
pub(crate) trait JobState {
    /// Whether there is work to do.
    fn runs(&self) -> bool;
}

/// A background job.
#[derive(Debug, Default)]
pub(crate) struct Job<S> {
    held: Mutex<Held<S>>,
    changed: Condvar,
}

/// The state of a job and of its thread.
#[derive(Debug, Default)]
pub(crate) struct Held<S> {
    state: S,
    /// A thread runs (or is about to see that it has no work).
    thread: bool,
    /// The pool is being released: the thread ends and the state stays as it is.
    leaving: bool,
}

impl<S> Deref for Held<S> {
    type Target = S;

    fn deref(&self) -> &S {
        &self.state
    }
}

impl<S> DerefMut for Held<S> {
    fn deref_mut(&mut self) -> &mut S {
        &mut self.state
    }
}

impl<S: JobState> Held<S> {
    /// Whether the thread has work to do.
    pub fn goes_on(&self) -> bool {
        self.state.runs() && !self.leaving
    }

    /// Whether the pool is being released.
    pub fn leaving(&self) -> bool {
        self.leaving
    }
}

impl<S: JobState> Job<S> {
    /// Locks the state. A caller that changes it calls [`Self::tell`] to wake the waiting threads.
    pub fn lock(&self) -> MutexGuard<'_, Held<S>> {
        self.held.lock()
    }

    /// Wakes all threads that wait for a change of the state.
    pub fn tell(&self) {
        self.changed.notify_all();
    }

    /// Wakes the thread, or starts one if there is none and there is work.
    ///
    /// # Errors
    /// No thread can be started; `verb` names the failed action in the error.
    pub fn start(&self, (name, verb): (&str, &str), work: impl FnOnce() + Send + 'static) -> Result<(), Refusal> {
        {
            let mut held = self.held.lock();
            if held.thread || !held.goes_on() {
                drop(held);
                self.tell();
                return Ok(());
            }
            held.thread = true;
        }
        let started = std::thread::Builder::new().name(name.to_owned()).spawn(work);
        started.map(drop).map_err(|error| {
            self.held.lock().thread = false;
            self.tell();
            Refusal::new(Kind::Io, format!("cannot {verb}: no thread: {error}"))
        })
    }

    /// Called by the thread when it has no work: returns whether the thread must end. If not, there is work again.
    pub fn ends(&self) -> bool {
        let mut held = self.held.lock();
        held.thread = held.goes_on();
        let ends = !held.thread;
        drop(held);
        self.tell();
        ends
    }

    /// Waits while `rests` holds, until `until` at most.
    pub fn rest(&self, held: &mut MutexGuard<'_, Held<S>>, until: Option<Instant>, rests: impl Fn(&Held<S>) -> bool) {
        while rests(held) {
            match until {
                None => self.changed.wait(held),
                Some(until) if self.changed.wait_until(held, until).timed_out() => return,
                Some(_) => {}
            }
        }
    }

    /// Waits until the job has ended, or the time is over; returns whether it still runs. A caller
    /// that is woken early asks again.
    pub fn wait(&self, most: Duration) -> bool {
        let mut held = self.held.lock();
        if held.runs() {
            let _ = self.changed.wait_for(&mut held, most);
        }
        held.runs()
    }

    /// Ends the thread, because the pool is being released; the state stays.
    pub fn leave(&self) {
        let mut held = self.held.lock();
        held.leaving = true;
        self.changed.notify_all();
        while held.thread {
            self.changed.wait(&mut held);
        }
    }
}
