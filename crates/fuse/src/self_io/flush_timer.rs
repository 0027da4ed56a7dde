//! Periodic write-back: dirty pages of open files are written back every second, so that little is lost when the
//! daemon is killed. By itself the kernel would keep them for up to half a minute.
//!
//! Where the kernel opens files without a request, files that are no longer written to are removed from the table at
//! each tick (`writeback/written_files.rs`), and files that others have changed as soon as the kernel has written
//! their dirty pages back: until then it trusts its own size.
//!
//! Started by `mount.rs` with the mount. Closed files need none of it: close writes back. syncfs(2) starts the
//! write-back of all dirty pages. Whether it waits for the replies depends on the kernel (6.17 does;
//! docs/decisions/own-mount-locks.md), so it is not used for durability here, and nobody waits for this thread. It
//! needs an open file of the mount, and inotify watchers must not see an open by us: so it opens the mount's first
//! inode, which users cannot reach where another inode is shown as the root. Where the first inode is shown, files
//! are written back one by one.

use super::{
    Role,
    flush::PAUSE,
    flush_threads::Wait,
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
    collections::{BTreeMap, BTreeSet},
    io,
    sync::{
        Arc, Weak,
        mpsc::{RecvTimeoutError, Sender, SyncSender, channel, sync_channel},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// Interval of the periodic write-back.
const EVERY: Duration = Duration::from_secs(1);

/// Maximum time to wait for the removal of files whose descriptors are needed.
const MAKING_ROOM: Duration = Duration::from_secs(2);

/// Channel to the thread, which ends when this is closed.
#[derive(Default)]
pub(crate) struct FlushTimer(Mutex<Option<Sender<Ask>>>);

/// Request to the thread between two ticks.
enum Ask {
    /// Others have changed this file: remove it.
    PartWith(u64),
    /// Descriptors are needed; the waiter is notified when files have been removed.
    Room(SyncSender<()>),
}

impl FlushTimer {
    /// Ends the thread.
    pub fn close(&self) {
        *self.0.lock() = None;
    }

    /// Schedules the removal of a file that the kernel opens without a request and that others have changed.
    pub fn part_with(&self, nodeid: u64) {
        if !self.ask(Ask::PartWith(nodeid)) {
            tracing::debug!(nodeid, "a file that others have changed stays: nothing is passed on any more");
        }
    }

    /// Has files removed at once, where there are too many of them, and waits for it.
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
    /// Starts the thread; with `hidden`, users see an inode other than the first as the root.
    ///
    /// # Errors
    /// Where the thread cannot be started.
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
                writeback.part_with(&mut changed);
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
                    // The writer gets the error of failed writes; and the mount may be about to end.
                    tracing::debug!(%error, "what is held back is not passed on now");
                }
            }
            Ok(())
        })
    }
}

impl Writeback {
    /// Schedules the removal of files that others have changed, after writing them back, and leaves those in the set
    /// that are still in the table.
    fn part_with(&self, files: &mut BTreeSet<u64>) {
        let mut flush = Vec::new();
        let mut used = BTreeMap::new();
        files.retain(|nodeid| {
            let Some(uses) = self.written.uses(*nodeid) else { return false };
            self.ask_before_writes(*nodeid);
            let Some(inode) = self.key(*nodeid) else { return false };
            used.insert(*nodeid, uses);
            flush.push(inode);
            true
        });
        for inode in self.flushed_after_writes(flush, &self.place()) {
            if let Some(uses) = used.get(&inode.nodeid) {
                self.self_io.attr_refresh.leave(inode.nodeid, *uses);
            }
        }
    }

    /// Writes files back after their writes in progress; returns those that were clean then. A file whose lock is not
    /// released stays dirty.
    fn flushed_after_writes(&self, files: Vec<InodeKey>, place: &MountPlace) -> Vec<InodeKey> {
        if files.is_empty() {
            return files;
        }
        match self.flush_by_threads(files, place, Wait::Returned, &|_| {}) {
            Ok(flushed) => {
                if let Err(error) = flushed.outcome {
                    tracing::debug!(%error, "a file that is to leave the table is not passed on now");
                }
                flushed.clean
            }
            Err(error) => {
                tracing::debug!(%error, "no thread to pass on files that are to leave the table");
                Vec::new()
            }
        }
    }
}

/// Names of the files to be removed, from another thread: the layer may need descriptors of the process for them.
fn names_of(writeback: &Writeback, leaving: &[(u64, Uses)]) -> Arc<Names> {
    let files: Vec<u64> = leaving.iter().map(|(nodeid, _)| *nodeid).collect();
    if files.is_empty() { Arc::default() } else { Arc::new(writeback.self_io.attr_refresh.names(files)) }
}

/// Removes files that are no longer written to. A write meanwhile is noticed: since the last tick, the kernel sends a
/// request before the first one.
fn leave(writeback: &Weak<Writeback>, place: &MountPlace, files: Vec<(u64, Uses)>) -> Result<(), SysErrno> {
    if !place.names.is_empty() {
        let mount = Entered::new(&place.mountpoint, place.device)?;
        during("attributes of directories", ROOT, || mount.freshen(&place.names));
    }
    let Some(writeback) = writeback.upgrade() else { return Ok(()) };
    // Others were removed by another thread meanwhile.
    let keys = files.iter().filter_map(|(nodeid, _)| writeback.key(*nodeid)).collect();
    let clean: BTreeSet<InodeKey> = writeback.flushed_after_writes(keys, place).into_iter().collect();
    for (nodeid, uses) in files {
        if writeback.key(nodeid).is_some_and(|inode| clean.contains(&inode)) {
            writeback.self_io.attr_refresh.leave(nodeid, uses);
        }
    }
    Ok(())
}

/// Starts the write-back of all dirty pages.
fn begin(place: &MountPlace) -> Result<(), SysErrno> {
    let mount = Entered::new(&place.mountpoint, place.device)?;
    let root = InodeKey { nodeid: ROOT, generation: 0 };
    during("syncfs", ROOT, || rustix::fs::syncfs(mount.by_handle(root, OFlags::RDONLY | OFlags::DIRECTORY)?))
}
