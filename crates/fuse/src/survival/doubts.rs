//! Finds out whether the kernel still knows a file of a previous process: FORGET has a number of lookups, but the
//! previous total is unknown.
//!
//! Runs in a thread of its own after a failover (`mount.rs`). `inodes/numbers.rs` sends it files when lookups of them
//! are forgotten, and `restore.rs` all files without a name at the start. It asks the kernel by an attribute
//! invalidation, which fails for a file that the kernel does not have. While an inode is being evicted, that waits
//! for its end.
//!
//! A reply in flight may name the file. So the kernel is asked when all requests that had been read before have been
//! answered, plus a delay; and its answer does not count where the file was looked up in between. A file without a
//! name is named by no reply except one that was recorded before the process died: those files are not asked about at
//! the start.

use crate::{door::Door, writeback::written_files::Uses};
use fusewire::{Notifier, Observer};
use nacre_sys::worker;
use nacre_vfs::Errno;
use std::{
    collections::BTreeSet,
    sync::mpsc::{Receiver, RecvTimeoutError},
    time::{Duration, Instant},
};

/// Maximum time from sending a reply until it is in the kernel's tables; meanwhile further files are collected.
const DIGESTION: Duration = Duration::from_secs(1);
/// Interval of the checks of requests in flight.
const LOOK: Duration = Duration::from_millis(20);

/// Body of the thread: ends with the channel, or the session.
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

/// Collects incoming files for `most`; false where the channel is closed.
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

/// A file about which the kernel is asked.
struct Asked {
    nodeid: u64,
    /// Number of its lookups when it was asked about, and its count of uses.
    told: u64,
    uses: Option<Uses>,
}

impl Asked {
    fn begin(door: &Door, nodeid: u64) -> Option<Asked> {
        let told = door.inodes.told_since(nodeid)?;
        Some(Asked { nodeid, told, uses: door.writeback.written.uses(nodeid) })
    }

    /// Removes the file, which the kernel does not know; false where the kernel may know it again by now.
    fn unknown(&self, door: &Door) -> bool {
        let (unknown, removed) = door.inodes.is_unknown(self.nodeid, self.told);
        if unknown {
            door.forgotten(self.nodeid, self.uses, removed);
        }
        unknown
    }
}
