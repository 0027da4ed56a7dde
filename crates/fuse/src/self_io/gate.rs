//! Quiesce lock of a mount during a rollback, and the thread that marks the old inodes as bad meanwhile.
//!
//! Used by `replacing.rs`, which has the reasons; kept by the front end. Invariants: the thread is in its directory
//! before the lock is closed; a request that waited knows of every replacement that happened meanwhile.

use super::{Role, SelfIo, own_mount::Entered, waits::during};
use parking_lot::{Condvar, Mutex};
use rustix::{
    fs::{AtFlags, CWD, Mode, OFlags, StatxFlags},
    io::Errno as SysErrno,
};
use std::{
    io,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{Sender, channel},
    },
    thread::JoinHandle,
};

/// Name of the thread's lookup directory in the root, visible to that thread alone.
pub(super) const DIRECTORY: &str = ".nacre-replaced";

/// Blocks requests during a rollback.
#[derive(Default)]
pub(crate) struct Gate {
    closed: AtomicBool,
    turn: Mutex<Turn>,
    opened: Condvar,
}

#[derive(Default)]
struct Turn {
    waiting: usize,
    /// Inode numbers (from, to) replaced while requests waited.
    replaced: Vec<(u64, u64)>,
}

impl Gate {
    /// Blocks new requests from now on.
    pub fn close(&self) {
        let mut turn = self.turn.lock();
        if turn.waiting == 0 {
            turn.replaced.clear();
        }
        self.closed.store(true, Ordering::Release);
    }

    /// Releases the waiting requests, with the inode numbers that were replaced.
    pub fn open(&self, replaced: &[(u64, u64)]) {
        let mut turn = self.turn.lock();
        turn.replaced.extend_from_slice(replaced);
        self.closed.store(false, Ordering::Release);
        self.opened.notify_all();
    }

    /// Whether requests have to wait.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Waits until it is open; returns whether a file with one of these inode numbers was replaced meanwhile.
    pub fn pass(&self, numbers: &[u64]) -> bool {
        let mut turn = self.turn.lock();
        turn.waiting += 1;
        while self.is_closed() {
            self.opened.wait(&mut turn);
        }
        turn.waiting -= 1;
        let is_replaced = within(&turn.replaced);
        numbers.iter().any(|number| is_replaced(*number))
    }
}

/// A thread that marks the inodes that it receives as bad; it waits in its directory.
pub(crate) struct Replacer {
    tell: Sender<Vec<u64>>,
    thread: JoinHandle<Result<(), SysErrno>>,
}

impl Replacer {
    /// Marks these inodes as bad.
    ///
    /// # Errors
    /// The last error of a lookup.
    pub fn make_bad(self, files: Vec<u64>) -> io::Result<()> {
        // If the thread has ended, its result has the reason.
        let _ = self.tell.send(files);
        self.thread.join().map_err(|_| io::Error::from(SysErrno::IO))?.map_err(io::Error::from)
    }

    /// Starts the thread on the mount with this device number at `place`; it is in its directory when this returns,
    /// or ends with an error.
    ///
    /// # Errors
    /// Where the thread cannot be started.
    pub fn start(self_io: &Arc<SelfIo>, place: PathBuf, device: u64) -> io::Result<Replacer> {
        let ((tell, told), (there, waiting)) = (channel(), channel());
        let thread = self_io.start("nacre-replaced", Role::Replaced, move || {
            let _mount = Entered::new(&place, device)?;
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            rustix::process::fchdir(rustix::fs::open(DIRECTORY, flags, Mode::empty())?)?;
            drop(there);
            let mut outcome = Ok(());
            for number in told.recv().unwrap_or_default() {
                let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_DONT_SYNC;
                let look = || rustix::fs::statx(CWD, u64::to_string(&number), flags, StatxFlags::empty());
                if let Err(error) = during("look-up of a replaced file", number, look) {
                    outcome = Err(error);
                }
            }
            outcome
        })?;
        // The channel is closed without a message: when the thread is there, or when it failed.
        let _: Result<(), _> = waiting.recv();
        Ok(Replacer { tell, thread })
    }
}

/// Whether a number lies in one of these ranges (from, to).
pub(crate) fn within(numbers: &[(u64, u64)]) -> impl Fn(u64) -> bool {
    |number| numbers.iter().any(|(from, to)| (*from..=*to).contains(&number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_waited_knows_of_the_replacement_of_each_of_its_files() {
        for (replaced, is_stale) in [((9, 9), true), ((5, 5), true), ((6, 8), false)] {
            let gate = Gate::default();
            gate.close();
            std::thread::scope(|scope| {
                let passes = scope.spawn(|| gate.pass(&[5, 9]));
                while gate.turn.lock().waiting == 0 {
                    std::thread::yield_now();
                }
                gate.open(&[replaced]);
                assert_eq!(passes.join().unwrap(), is_stale, "{replaced:?}");
            });
        }
    }
}
