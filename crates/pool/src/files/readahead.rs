//! Reading ahead of a listing: what it comes to next is read and decompressed beside it.
//!
//! Called by `listing.rs`. Only the cache is filled: what a listing shows is decided when it looks,
//! so it sees every change made before. Invariants:
//! - what is read ahead is a hint: it may be dropped, and what goes wrong is met again by whoever
//!   needs it;
//! - the thread is gone when the files are dropped, and after [`IDLE`] without anything to do.

use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;

use super::Absent;
use crate::workers::unpin_thread;

/// Parts that wait while another one is read; what comes beyond is not read ahead.
const WAITING: usize = 2;
/// So long the thread waits for more.
const IDLE: Duration = Duration::from_secs(1);
/// Stack of the thread, bytes.
const STACK: usize = 256 << 10;

/// The thread that reads ahead; made when it is needed.
#[derive(Debug, Default)]
pub(super) struct ListingReadahead(Mutex<Option<Running>>);

#[derive(Debug)]
struct Running {
    parts: Option<SyncSender<Absent>>,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    fn start() -> Option<Self> {
        let (parts, coming) = sync_channel::<Absent>(WAITING);
        let work = move || {
            unpin_thread();
            while let Ok(read) = coming.recv_timeout(IDLE) {
                // Whoever needs what cannot be read meets the error.
                let _ = read();
            }
        };
        let thread = std::thread::Builder::new().name("pool-listing".to_owned()).stack_size(STACK).spawn(work).ok()?;
        Some(Self { parts: Some(parts), thread: Some(thread) })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.parts = None;
        // It ends by itself now; a panic of it has harmed nobody.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl ListingReadahead {
    /// Has the thread read this, unless it has enough to do.
    pub(super) fn go(&self, read: Absent) {
        let mut running = self.0.lock();
        let send = |running: &Running, read| match running.parts.as_ref().map(|parts| parts.try_send(read)) {
            Some(Err(TrySendError::Disconnected(read))) => Some(read),
            _ => None,
        };
        let left = match running.as_ref() {
            Some(there) => send(there, read),
            None => Some(read),
        };
        if let Some(read) = left {
            *running = Running::start();
            running.as_ref().map(|fresh| send(fresh, read));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn parts_are_read_in_turn_and_too_many_are_dropped() {
        let ahead = ListingReadahead::default();
        let (begun, told) = channel();
        let (go_on, wait) = channel::<()>();
        ahead.go(Box::new(move || {
            begun.send(()).unwrap();
            wait.recv().unwrap();
            Ok(())
        }));
        told.recv().unwrap();
        let (read, parts) = channel();
        for part in 0..10 {
            let read = read.clone();
            ahead.go(Box::new(move || {
                read.send(part).unwrap();
                Ok(())
            }));
        }
        drop(read);
        go_on.send(()).unwrap();
        assert_eq!(parts.iter().collect::<Vec<_>>(), [0, 1]);
        // What is under way is waited for; a thread that has ended is made anew.
        drop(ahead.0.lock().take());
        let (read, parts) = channel();
        ahead.go(Box::new(move || {
            read.send(()).unwrap();
            Ok(())
        }));
        assert_eq!(parts.recv(), Ok(()));
    }
}
