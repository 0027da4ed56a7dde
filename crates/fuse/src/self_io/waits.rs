//! Requests of our own threads to our own mount, recorded while they are in flight: one that takes longer than
//! [`LATE`] is reported in the log and by `status.rs`, as it may never end.
//!
//! `self_io.rs` gives each of its threads the table of its mount; the other files of this folder record each call by
//! [`during`]. The thread `nacre-watchdog` reports: the recorded threads have no descriptors, and so no log.
//! Invariants: a request is in the table exactly while its call lasts; no lock is held during the call; the watchdog
//! has no timeout while nothing is in flight.

use parking_lot::{Condvar, Mutex};
use std::{
    cell::RefCell,
    io,
    sync::Arc,
    time::{Duration, Instant},
};

/// Time after which a request is reported.
const LATE: Duration = Duration::from_secs(10);

thread_local! {
    /// The table of the mount to which this thread belongs.
    static TABLE: RefCell<Option<Arc<Waits>>> = const { RefCell::new(None) };
}

/// A request that waits too long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// Operation of the thread.
    pub request: &'static str,
    /// Id of the waiting thread.
    pub thread: u32,
    /// The inode's node id.
    pub nodeid: u64,
    /// Time so far, seconds.
    pub seconds: u64,
}

/// The requests in flight of one mount.
pub(crate) struct Waits {
    late: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    requests: Vec<Request>,
    next: u64,
    watched: bool,
    /// The watchdog sleeps until a request begins.
    asleep: bool,
    ended: bool,
}

struct Request {
    id: u64,
    what: &'static str,
    thread: u32,
    nodeid: u64,
    since: Instant,
    reported: bool,
}

impl Default for Waits {
    fn default() -> Waits {
        Waits::new(LATE)
    }
}

impl Waits {
    fn new(late: Duration) -> Waits {
        Waits { late, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Starts the watchdog, once. To be called in a thread that can log.
    ///
    /// # Errors
    /// Where the thread cannot be started.
    pub fn watch(self: &Arc<Self>) -> io::Result<()> {
        let mut state = self.state.lock();
        if !state.watched {
            let waits = Arc::clone(self);
            std::thread::Builder::new()
                .name("nacre-watchdog".to_owned())
                .stack_size(256 << 10)
                .spawn(move || waits.report())?;
            state.watched = true;
        }
        Ok(())
    }

    /// Sets this table for the calling thread's requests.
    pub fn enter(self: &Arc<Self>) {
        TABLE.set(Some(Arc::clone(self)));
    }

    /// Ends the watchdog.
    pub fn end(&self) {
        self.state.lock().ended = true;
        self.changed.notify_all();
    }

    /// Returns the requests that wait too long.
    pub fn late(&self) -> Vec<Waiting> {
        let state = self.state.lock();
        let late = state.requests.iter().filter(|request| request.since.elapsed() >= self.late);
        late.map(Request::waiting).collect()
    }

    #[expect(clippy::disallowed_methods, reason = "measures how long a request takes")]
    fn begin(&self, what: &'static str, nodeid: u64) -> u64 {
        let thread = rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned();
        let mut state = self.state.lock();
        let id = state.next;
        state.next += 1;
        state.requests.push(Request { id, what, thread, nodeid, since: Instant::now(), reported: false });
        if state.asleep {
            state.asleep = false;
            self.changed.notify_all();
        }
        id
    }

    fn done(&self, id: u64) {
        self.state.lock().requests.retain(|request| request.id != id);
    }

    fn report(&self) {
        let mut state = self.state.lock();
        while !state.ended {
            for request in state.requests.iter_mut().filter(|request| !request.reported) {
                if request.since.elapsed() >= self.late {
                    request.reported = true;
                    let Waiting { request, thread, nodeid, seconds } = request.waiting();
                    tracing::error!(request, thread, nodeid, seconds, "a request to our own mount is not answered");
                }
            }
            let pending = state.requests.iter().filter(|request| !request.reported);
            match pending.map(|request| self.late.saturating_sub(request.since.elapsed())).min() {
                Some(due) => drop(self.changed.wait_for(&mut state, due)),
                None => {
                    state.asleep = true;
                    self.changed.wait(&mut state);
                }
            }
        }
    }
}

impl Request {
    fn waiting(&self) -> Waiting {
        let Request { what, thread, nodeid, since, .. } = *self;
        Waiting { request: what, thread, nodeid, seconds: since.elapsed().as_secs() }
    }
}

/// Makes a call that may be a request to our own mount; recorded where a thread of `self_io.rs` makes it.
pub(crate) fn during<T>(what: &'static str, nodeid: u64, call: impl FnOnce() -> T) -> T {
    let Some(table) = TABLE.with_borrow(Clone::clone) else { return call() };
    let id = table.begin(what, nodeid);
    let result = call();
    table.done(id);
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn what_takes_too_long_is_reported_until_it_ends() {
        let waits = Arc::new(Waits::new(Duration::from_millis(20)));
        waits.watch().unwrap();
        let ((begun, begins), (end, ends)) = (channel(), channel::<()>());
        let table = Arc::clone(&waits);
        let thread = std::thread::spawn(move || {
            table.enter();
            during("flush", 7, || {
                begun.send(rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned()).unwrap();
                ends.recv().unwrap_err();
            });
        });
        let tid = begins.recv().unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while !waits.state.lock().requests.iter().any(|request| request.reported) {
            assert!(Instant::now() < deadline, "nothing was reported");
            std::thread::yield_now();
        }
        let [late] = waits.late().try_into().unwrap();
        assert_eq!((late.request, late.thread, late.nodeid), ("flush", tid, 7));
        drop(end);
        thread.join().unwrap();
        assert_eq!(waits.late(), []);
        waits.end();
    }
}
