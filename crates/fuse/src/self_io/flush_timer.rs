//! The beat: what the kernel holds back of open files is passed on every second, so that little is
//! lost with a daemon that is killed. By itself the kernel would hold it for up to half a minute.
//!
//! Where the kernel opens files without a request, files that are written to no more leave the
//! table with the beat (`writeback/written_files.rs`).
//!
//! Started by `mount.rs` with the mount. Files that are closed need none of it: closing passes on.
//! syncfs(2) begins to write all that is dirty and, with FUSE, waits for nothing below: it is not
//! for durability here. It needs an open file of the mount, and no user may be told of an open that
//! is none of his: so that is the mount's first inode, which nobody can reach where another one is
//! shown as the root. Where that one is shown, files are passed on one by one.

use super::{
    Role,
    flush::flush_within,
    own_mount::{Entered, MountPlace},
};
use crate::{
    inodes::ROOT,
    writeback::{Writeback, written_files::Uses},
};
use nacre_vfs::Errno;
use parking_lot::Mutex;
use rustix::{
    fs::{AtFlags, OFlags, StatxFlags, statx},
    io::Errno as SysErrno,
};
use std::{
    io,
    sync::{
        Arc, Weak,
        mpsc::{RecvTimeoutError, Sender, channel},
    },
    thread::JoinHandle,
    time::Duration,
};

/// How long the kernel holds back what is written to an open file, about.
const EVERY: Duration = Duration::from_secs(1);

/// The thread that does it; it ends when this is closed.
#[derive(Default)]
pub(crate) struct FlushTimer(Mutex<Option<Sender<()>>>);

impl FlushTimer {
    /// Ends the thread.
    pub fn close(&self) {
        *self.0.lock() = None;
    }
}

impl Writeback {
    /// Starts the thread; with `hidden`, users see another inode than the first as the root.
    ///
    /// # Errors
    /// Where there can be none.
    pub fn start_flush_timer(self: &Arc<Self>, hidden: bool) -> io::Result<JoinHandle<Result<(), SysErrno>>> {
        let (sender, end) = channel();
        *self.self_io.flush_timer.0.lock() = Some(sender);
        let weak = Arc::downgrade(self);
        self.self_io.start("nacre-flusher", Role::Flush, move || {
            while end.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
                let Some(writeback) = weak.upgrade() else { break };
                if writeback.is_idle() {
                    continue;
                }
                let (place, beat) = (writeback.place(), writeback.written.beat());
                beat.asked.iter().for_each(|nodeid| writeback.ask_before_writes(*nodeid));
                let begun = if hidden {
                    drop(writeback);
                    begin(&place).map_err(|error| Errno::from_raw(error.raw_os_error()))
                } else {
                    writeback.flush_once()
                };
                refresh(&place, beat.asked);
                let left = leave(&weak, &place, beat.leaving).map_err(|error| Errno::from_raw(error.raw_os_error()));
                let passed = begun.and(left);
                if let Err(error) = passed {
                    // What could not be written its writer hears of; and the mount may be about to
                    // end.
                    tracing::debug!(%error, "what is held back is not passed on now");
                }
            }
            Ok(())
        })
    }
}

/// Has the kernel take new attributes of files whose old ones it was told to give up: who reads one
/// of them then needs not ask. Where that fails, he asks.
fn refresh(place: &MountPlace, files: Vec<u64>) {
    for nodeid in files {
        let asked = Entered::new(&place.mountpoint, place.device)
            .and_then(|mount| mount.by_handle((nodeid, place.generation), OFlags::PATH))
            .and_then(|file| statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS));
        if let Err(error) = asked {
            tracing::trace!(%error, nodeid, "the kernel takes no attributes now");
        }
    }
}

/// Has files leave that are written to no more. Whoever writes to one meanwhile is heard of: the
/// kernel was told a beat ago to ask first.
fn leave(writeback: &Weak<Writeback>, place: &MountPlace, files: Vec<(u64, Uses)>) -> Result<(), SysErrno> {
    for (nodeid, uses) in files {
        // Whoever is in a mount keeps it from being unmounted: for one file at a time.
        flush_within(&Entered::new(&place.mountpoint, place.device)?, (nodeid, place.generation))?;
        let Some(writeback) = writeback.upgrade() else { break };
        writeback.leave_unused(nodeid, uses);
    }
    Ok(())
}

/// Begins to write all that is dirty.
fn begin(place: &MountPlace) -> Result<(), SysErrno> {
    let mount = Entered::new(&place.mountpoint, place.device)?;
    let first = mount.by_handle((ROOT, 0), OFlags::RDONLY | OFlags::DIRECTORY)?;
    rustix::fs::syncfs(first)
}
