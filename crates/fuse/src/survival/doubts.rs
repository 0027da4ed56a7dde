//! Whether the kernel still knows a file that it knew before this process began: FORGET counts look-ups,
//! and nobody knows how many there were.
//!
//! A thread of its own of a mount that goes on (`mount.rs`), told of such files by `inodes/numbers.rs` when look-ups of
//! them are taken back, and of all files without a name at the start (`restore.rs`). It asks the kernel by
//! a notice about the file's attributes, which is refused for a file that the kernel does not have. While
//! an inode is being given up, that waits for its end.
//!
//! An answer that is under way may name the file: so the kernel is asked when all requests that had been
//! read before have been answered, and a while after; and what it says does not count where the file
//! was looked up in between. A file without a name is named by no answer but one that was noted before the
//! process died: those are not asked for at the start.

use crate::{door::Door, writeback::written_files::Uses};
use fusewire::{Notifier, Observer};
use nacre_sys::worker;
use nacre_vfs::Errno;
use std::{
    collections::BTreeSet,
    sync::mpsc::{Receiver, RecvTimeoutError},
    time::{Duration, Instant},
};

/// How long a reply may take from our hand into the kernel's tables; and files are gathered.
const DIGESTION: Duration = Duration::from_secs(1);
/// Between two looks at requests that are under way.
const LOOK: Duration = Duration::from_millis(20);

/// The body of the thread: ends with the channel, or the session.
pub(crate) fn run(doubts: &Receiver<u64>, door: &Door, session: &Observer, notifier: &Notifier) {
    let mut next = BTreeSet::new();
    loop {
        if next.is_empty() {
            let Ok(first) = doubts.recv() else { return };
            next.insert(first);
        }
        next.extend(doubts.try_iter());
        let asked: Vec<Asked> =
            std::mem::take(&mut next).into_iter().filter_map(|nodeid| Asked::begin(door, nodeid)).collect();
        let mut moment = session.quiescent_after();
        while !moment.reached() {
            if !gathers(doubts, LOOK, &mut next) {
                return;
            }
        }
        if !gathers(doubts, DIGESTION, &mut next) {
            return;
        }
        for asked in asked {
            let nodeid = asked.nodeid;
            match worker::waiting(|| notifier.inval_inode(nodeid, -1, 0)) {
                Ok(()) => {}
                Err(error) if error.raw_os_error() == Some(Errno::ENOENT.raw()) => {
                    if !asked.unknown(door) {
                        next.insert(nodeid);
                    }
                }
                Err(error) => tracing::debug!(%error, nodeid, "it cannot be asked whether a file is known"),
            }
        }
    }
}

/// Gathers what comes within this time; false where nothing will any more.
#[expect(clippy::disallowed_methods, reason = "answers get time to arrive, which nothing tells")]
fn gathers(doubts: &Receiver<u64>, most: Duration, into: &mut BTreeSet<u64>) -> bool {
    let until = Instant::now() + most;
    loop {
        match doubts.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(nodeid) => drop(into.insert(nodeid)),
            Err(RecvTimeoutError::Timeout) => return true,
            Err(RecvTimeoutError::Disconnected) => return false,
        }
    }
}

/// A file that is asked for.
struct Asked {
    nodeid: u64,
    /// How often the kernel was told of it, and it was written to, before.
    told: u64,
    uses: Option<Uses>,
}

impl Asked {
    fn begin(door: &Door, nodeid: u64) -> Option<Asked> {
        let told = door.inodes.told_since(nodeid)?;
        Some(Asked { nodeid, told, uses: door.writeback.written.uses(nodeid) })
    }

    /// The kernel does not know it; false where it may by now.
    fn unknown(&self, door: &Door) -> bool {
        let (unknown, removed) = door.inodes.is_unknown(self.nodeid, self.told);
        if unknown {
            door.forgotten(self.nodeid, self.uses, removed);
        }
        unknown
    }
}
