//! Where everybody waits while files become others, and the thread that makes those of before bad
//! meanwhile.
//!
//! Used by `replacing.rs`, which says why; kept by the door. Invariants: the thread is in its
//! directory before the gate closes; who waited hears of every replacement that happened meanwhile.

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

/// The name of the directory of its look-ups in the root, for that thread alone.
pub(super) const DIRECTORY: &str = ".nacre-replaced";

/// Where whoever asks waits while files become others.
#[derive(Default)]
pub(crate) struct Gate {
    closed: AtomicBool,
    turn: Mutex<Turn>,
    opened: Condvar,
}

#[derive(Default)]
struct Turn {
    waiting: usize,
    /// Of those who wait, what was replaced: from, to.
    replaced: Vec<(u64, u64)>,
}

impl Gate {
    /// Whoever comes waits from now on.
    pub fn close(&self) {
        let mut turn = self.turn.lock();
        if turn.waiting == 0 {
            turn.replaced.clear();
        }
        self.closed.store(true, Ordering::Release);
    }

    /// He goes on, and hears whether his file was among these.
    pub fn open(&self, replaced: &[(u64, u64)]) {
        let mut turn = self.turn.lock();
        turn.replaced.extend_from_slice(replaced);
        self.closed.store(false, Ordering::Release);
        self.opened.notify_all();
    }

    /// Whether somebody has to wait.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Waits until it is open; whether the file with this number, or one that may have it, was
    /// replaced meanwhile.
    pub fn pass(&self, number: u64) -> bool {
        let mut turn = self.turn.lock();
        turn.waiting += 1;
        while self.is_closed() {
            self.opened.wait(&mut turn);
        }
        turn.waiting -= 1;
        within(&turn.replaced)(number)
    }
}

/// A thread that makes files bad, when it is told which; it waits in its directory.
pub(crate) struct Replacer {
    tell: Sender<Vec<u64>>,
    thread: JoinHandle<Result<(), SysErrno>>,
}

impl Replacer {
    /// Has these made bad.
    ///
    /// # Errors
    /// Where that failed for one.
    pub fn make_bad(self, files: Vec<u64>) -> io::Result<()> {
        // Where it has ended, it says why.
        let _ = self.tell.send(files);
        self.thread.join().map_err(|_| io::Error::from(SysErrno::IO))?.map_err(io::Error::from)
    }

    /// Starts it on the mount with this device number at a place; it is in its directory when this
    /// returns, or will say why not.
    ///
    /// # Errors
    /// Where there can be no thread.
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
        // It says nothing, but lets go: when it is there, and when it cannot be.
        let _: Result<(), _> = waiting.recv();
        Ok(Replacer { tell, thread })
    }
}

/// Whether a number lies within one of these ranges (from, to).
pub(crate) fn within(numbers: &[(u64, u64)]) -> impl Fn(u64) -> bool {
    |number| numbers.iter().any(|(from, to)| (*from..=*to).contains(&number))
}
