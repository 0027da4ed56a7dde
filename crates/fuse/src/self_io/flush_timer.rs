//! The beat: what the kernel holds back of open files is passed on every second, so that little is
//! lost with a daemon that is killed. By itself the kernel would hold it for up to half a minute.
//!
//! Where the kernel opens files without a request, files that are written to no more leave the
//! table with the beat (`writeback/written_files.rs`), and those that others have changed as soon as
//! the kernel has passed on what it holds of them: until then it believes in its own size.
//!
//! Started by `mount.rs` with the mount. Files that are closed need none of it: closing passes on.
//! syncfs(2) begins to write all that is dirty. Whether it waits for the answers depends on the kernel
//! (6.17 does; docs/decisions/own-mount-locks.md), so it is not for durability here, and nobody waits
//! for this thread. It needs an open file of the mount, and no user may be told of an open that
//! is none of his: so that is the mount's first inode, which nobody can reach where another one is
//! shown as the root. Where that one is shown, files are passed on one by one.

use super::{
    Role,
    flush::{PAUSE, flush_within},
    own_mount::{Entered, InodeKey, MountPlace, Names},
    waits::during,
};
use crate::{
    inodes::ROOT,
    writeback::{Writeback, written_files::Uses},
};
use nacre_vfs::Errno;
use parking_lot::Mutex;
use rustix::{fs::OFlags, io::Errno as SysErrno};
use std::{
    collections::BTreeSet,
    io,
    sync::{
        Arc, Weak,
        mpsc::{RecvTimeoutError, Sender, SyncSender, channel, sync_channel},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// How long the kernel holds back what is written to an open file, about.
const EVERY: Duration = Duration::from_secs(1);

/// How long somebody waits at most for files to leave whose descriptors are needed.
const MAKING_ROOM: Duration = Duration::from_secs(2);

/// The thread that does it; it ends when this is closed.
#[derive(Default)]
pub(crate) struct FlushTimer(Mutex<Option<Sender<Ask>>>);

/// What the thread is asked for between two beats.
enum Ask {
    /// Others have changed this file.
    PartWith(u64),
    /// Descriptors are needed; who waits is told when files have left.
    Room(SyncSender<()>),
}

impl FlushTimer {
    /// Ends the thread.
    pub fn close(&self) {
        *self.0.lock() = None;
    }

    /// Others have changed a file that the kernel opens without a request: it leaves soon.
    pub fn part_with(&self, nodeid: u64) {
        if !self.ask(Ask::PartWith(nodeid)) {
            tracing::debug!(nodeid, "a file that others have changed stays: nothing is passed on any more");
        }
    }

    /// Has files leave at once, where there are too many of them, and waits for it.
    pub fn make_room(&self) {
        let (told, waiting) = sync_channel(1);
        if self.ask(Ask::Room(told)) && waiting.recv_timeout(MAKING_ROOM) == Err(RecvTimeoutError::Timeout) {
            tracing::debug!("files do not leave as long as others are passed on");
        }
    }

    fn ask(&self, what: Ask) -> bool {
        self.0.lock().as_ref().is_some_and(|sender| sender.send(what).is_ok())
    }
}

impl Writeback {
    /// Starts the thread; with `hidden`, users see another inode than the first as the root.
    ///
    /// # Errors
    /// Where there can be none.
    #[expect(clippy::disallowed_methods, reason = "the beat")]
    pub fn start_flush_timer(self: &Arc<Self>, hidden: bool) -> io::Result<JoinHandle<Result<(), SysErrno>>> {
        let (sender, end) = channel();
        *self.self_io.flush_timer.0.lock() = Some(sender);
        let weak = Arc::downgrade(self);
        self.self_io.start("nacre-flusher", Role::Flush, move || {
            let (mut changed, mut short) = (BTreeSet::new(), Vec::new());
            let mut last = Instant::now();
            loop {
                let woken = end.recv_timeout(EVERY.saturating_sub(last.elapsed()));
                let Some(writeback) = weak.upgrade() else { break };
                match woken {
                    Ok(asked) => std::iter::once(asked).chain(end.try_iter()).for_each(|asked| match asked {
                        Ask::PartWith(nodeid) => drop(changed.insert(nodeid)),
                        Ask::Room(waiting) => short.push(waiting),
                    }),
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => break,
                }
                changed.retain(|nodeid| !writeback.part_with(*nodeid));
                if !short.is_empty() {
                    let asked = writeback.written.beat().asked;
                    asked.iter().for_each(|nodeid| writeback.ask_before_writes(*nodeid));
                    std::thread::sleep(PAUSE);
                } else if last.elapsed() < EVERY {
                    continue;
                }
                last = Instant::now();
                if writeback.is_idle() {
                    continue;
                }
                let beat = writeback.written.beat();
                let place = MountPlace { names: names_of(&writeback, &beat.leaving), ..writeback.place() };
                beat.asked.iter().for_each(|nodeid| writeback.ask_before_writes(*nodeid));
                let begun = if hidden {
                    drop(writeback);
                    begin(&place).map_err(|error| Errno::from_raw(error.raw_os_error()))
                } else {
                    // This thread asks no layer for names.
                    writeback.flush_once(Names::new())
                };
                let left = leave(&weak, &place, beat.leaving);
                if let Some(writeback) = weak.upgrade() {
                    short.drain(..).for_each(|waiting| writeback.self_io.attr_refresh.left(waiting));
                }
                let left = left.map_err(|error| Errno::from_raw(error.raw_os_error()));
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

impl Writeback {
    /// Has a file leave that others have changed, unless it is written to just now; whether it has
    /// left.
    fn part_with(&self, nodeid: u64) -> bool {
        let Some(uses) = self.written.uses(nodeid) else { return true };
        self.ask_before_writes(nodeid);
        let Some(inode) = self.key(nodeid) else { return true };
        let place = self.place();
        let passed =
            Entered::new(&place.mountpoint, place.device).and_then(|mount| flush_within(&mount, &place, inode));
        if let Err(error) = passed {
            tracing::debug!(%error, nodeid, "a file that others have changed is not passed on now");
            return false;
        }
        self.self_io.attr_refresh.leave(nodeid, uses);
        false
    }
}

/// The names of files that are to leave, asked for by another thread: to know them, the layer may
/// need descriptors of the process.
fn names_of(writeback: &Writeback, leaving: &[(u64, Uses)]) -> Arc<Names> {
    let files: Vec<u64> = leaving.iter().map(|(nodeid, _)| *nodeid).collect();
    if files.is_empty() { Arc::default() } else { Arc::new(writeback.self_io.attr_refresh.names(files)) }
}

/// Has files leave that are written to no more. Whoever writes to one meanwhile is heard of: the
/// kernel was told a beat ago to ask first.
fn leave(writeback: &Weak<Writeback>, place: &MountPlace, files: Vec<(u64, Uses)>) -> Result<(), SysErrno> {
    if !place.names.is_empty() {
        let mount = Entered::new(&place.mountpoint, place.device)?;
        during("attributes of directories", ROOT, || mount.freshen(&place.names));
    }
    for (nodeid, uses) in files {
        let Some(inode) = writeback.upgrade().map(|writeback| writeback.key(nodeid)) else { break };
        // Whoever has taken it out meanwhile has made it leave.
        let Some(inode) = inode else { continue };
        // Whoever is in a mount keeps it from being unmounted: for one file at a time.
        flush_within(&Entered::new(&place.mountpoint, place.device)?, place, inode)?;
        let Some(writeback) = writeback.upgrade() else { break };
        writeback.self_io.attr_refresh.leave(nodeid, uses);
    }
    Ok(())
}

/// Begins to write all that is dirty.
fn begin(place: &MountPlace) -> Result<(), SysErrno> {
    let mount = Entered::new(&place.mountpoint, place.device)?;
    let root = InodeKey { nodeid: ROOT, generation: 0 };
    during("syncfs", ROOT, || rustix::fs::syncfs(mount.by_handle(root, OFlags::RDONLY | OFlags::DIRECTORY)?))
}
