//! A job of a pool in the background: one thread that is started when there is something to do,
//! is waited for by commands, and ends when the pool is left.
//!
//! Used by `pool/scrub.rs` and `pool/trim.rs`. Invariants: one thread at most; a state that says
//! that the job runs has one, unless the pool is being left or none could be started.

use std::ops::{Deref, DerefMut};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::{Kind, Refusal};

/// What a job keeps of itself.
pub(crate) trait JobState {
    /// Whether there is something to do.
    fn runs(&self) -> bool;
}

/// A job in the background.
#[derive(Debug, Default)]
pub(crate) struct Job<S> {
    held: Mutex<Held<S>>,
    changed: Condvar,
}

/// The state of a job, and what becomes of its thread.
#[derive(Debug, Default)]
pub(crate) struct Held<S> {
    state: S,
    /// A thread is at work (or is about to see that it should not be).
    thread: bool,
    /// The pool is being left: the thread ends and the state stays what it is.
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
    /// Whether the thread has something to do.
    pub fn goes_on(&self) -> bool {
        self.state.runs() && !self.leaving
    }

    /// Whether the pool is being left.
    pub fn leaving(&self) -> bool {
        self.leaving
    }
}

impl<S: JobState> Job<S> {
    /// The state, held still. Whoever changes what others wait for says so by [`Self::tell`].
    pub fn lock(&self) -> MutexGuard<'_, Held<S>> {
        self.held.lock()
    }

    /// Wakes everybody who waits for a change of the state.
    pub fn tell(&self) {
        self.changed.notify_all();
    }

    /// Wakes the thread, or starts it where there is none and something to do.
    ///
    /// # Errors
    /// No thread can be started; `verb` says what could not be done.
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

    /// Asked by the thread when it has nothing to do: whether it ends. If not, there is something
    /// to do again.
    pub fn ends(&self) -> bool {
        let mut held = self.held.lock();
        held.thread = held.goes_on();
        let ends = !held.thread;
        drop(held);
        self.tell();
        ends
    }

    /// Waits as long as this holds, or until then.
    pub fn rest(&self, held: &mut MutexGuard<'_, Held<S>>, until: Option<Instant>, rests: impl Fn(&Held<S>) -> bool) {
        while rests(held) {
            match until {
                None => self.changed.wait(held),
                Some(until) if self.changed.wait_until(held, until).timed_out() => return,
                Some(_) => {}
            }
        }
    }

    /// Waits until the job does not run any more, or the time is over; answers whether it runs. A
    /// caller that is woken early looks again.
    pub fn wait(&self, most: Duration) -> bool {
        let mut held = self.held.lock();
        if held.runs() {
            let _ = self.changed.wait_for(&mut held, most);
        }
        held.runs()
    }

    /// Ends the thread, because the pool is left; the state stays.
    pub fn leave(&self) {
        let mut held = self.held.lock();
        held.leaving = true;
        self.changed.notify_all();
        while held.thread {
            self.changed.wait(&mut held);
        }
    }
}
