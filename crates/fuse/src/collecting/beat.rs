//! The beat: what the kernel holds back of open files is passed on every second, so that little is lost with a daemon that is killed. By itself the kernel
//! would hold it for up to half a minute.
//!
//! Started by `mount.rs` with the mount. Files that are closed need none of it: closing passes on. syncfs(2) begins to write all that is dirty and, with
//! FUSE, waits for nothing below: it is not for durability here.

use super::Collecting;
use crate::{errands::Role, own_mount};
use parking_lot::Mutex;
use rustix::io::Errno as SysErrno;
use std::{
    io,
    sync::{
        Arc,
        atomic::Ordering,
        mpsc::{RecvTimeoutError, Sender, channel},
    },
    thread::JoinHandle,
    time::Duration,
};

/// How long the kernel holds back what is written to an open file, about.
const EVERY: Duration = Duration::from_secs(1);

/// The thread that does it; it ends when this is closed.
#[derive(Default)]
pub(crate) struct Beat(Mutex<Option<Sender<()>>>);

impl Beat {
    /// Ends the thread.
    pub fn close(&self) {
        *self.0.lock() = None;
    }
}

impl Collecting {
    /// Starts the thread.
    ///
    /// # Errors
    /// Where there can be none.
    pub fn start_beat(self: &Arc<Self>) -> io::Result<JoinHandle<Result<(), SysErrno>>> {
        let (sender, end) = channel();
        *self.beat.0.lock() = Some(sender);
        let collecting = Arc::downgrade(self);
        self.errands.start("nacre-beat", Role::PassOn, move || {
            while end.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
                let Some(collecting) = collecting.upgrade() else { break };
                if collecting.count.load(Ordering::Acquire) == 0 {
                    continue;
                }
                let place = collecting.place();
                drop(collecting);
                if let Err(error) = own_mount::root(&place.mountpoint, place.device).and_then(rustix::fs::syncfs) {
                    // What could not be written its writer hears of; and the mount may be about to end.
                    tracing::debug!(%error, "what is held back is not passed on now");
                }
            }
            Ok(())
        })
    }
}
