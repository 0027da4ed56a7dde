//! Readahead of listings: a thread reads and decompresses the next nodes while the listing is
//! served.
//!
//! Called by `listing.rs`. Only the cache is filled: a listing reads the table itself, so it shows
//! every change made before. Invariants:
//! - readahead is a hint: it may be dropped, and a read error occurs again for the operation that
//!   needs the node;
//! - the thread has ended when the files are dropped, and ends after [`IDLE`] without work.

use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;

use super::Absent;
use crate::workers::unpin_thread;

/// Number of parts that may wait while another one is read; further ones are not read ahead.
const WAITING: usize = 2;
/// Time after which the idle thread ends.
const IDLE: Duration = Duration::from_secs(1);
/// Stack of the thread, bytes.
const STACK: usize = 256 << 10;

/// The readahead thread; started when it is needed.
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
                // The operation that needs an unreadable node gets the error.
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
        // It ends by itself now; a panic of it does no harm.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl ListingReadahead {
    /// Has the thread read this part, unless too many wait already.
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
        // A running read is waited for; a thread that has ended is started again.
        drop(ahead.0.lock().take());
        let (read, parts) = channel();
        ahead.go(Box::new(move || {
            read.send(()).unwrap();
            Ok(())
        }));
        assert_eq!(parts.recv(), Ok(()));
    }
}
