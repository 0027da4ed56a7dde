//! Thread that drops pages of files that others changed, where a notification to the kernel would wait for pages in
//! write-back.
//!
//! Fed by the invalidation thread (`mount.rs`). Before Linux 6.16, close(2) takes the inode's lock with write-back caching,
//! which a user keeps for as long as he likes: so another thread drops the pages, and one that does not return in time is
//! left to its file. Invariants: no more than [`MAX_STUCK`] threads wait; a file that one waits for, and those beyond that,
//! are dropped later.

use super::{
    Role, SelfIo,
    own_mount::{Entered, InodeKey, MountPlace},
    waits::during,
};
use parking_lot::Mutex;
use rustix::{fs::OFlags, io::Errno as SysErrno};
use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel},
    },
    thread::JoinHandle,
    time::Duration,
};

/// Time after which a thread that does not return is left to its file; interval of attempts for the other files.
const PATIENCE: Duration = Duration::from_secs(1);
/// Maximum number of threads that do not return.
const MAX_STUCK: usize = 16;

/// Drops the pages of a file.
type DropPages = fn(&MountPlace, InodeKey) -> Result<(), SysErrno>;

/// Channel to the thread.
#[derive(Default)]
pub(crate) struct PageDropper {
    queue: Mutex<Option<Sender<(MountPlace, InodeKey)>>>,
}

/// A thread that drops pages of one file after the other.
struct DroppingThread {
    files: SyncSender<(MountPlace, InodeKey)>,
    done: Receiver<()>,
}

/// State of the thread that hands files out.
struct Dropping {
    self_io: Arc<SelfIo>,
    act: DropPages,
    patience: Duration,
    thread: Option<DroppingThread>,
    /// Files whose threads do not return.
    stuck: Arc<Mutex<BTreeSet<InodeKey>>>,
    later: BTreeMap<InodeKey, MountPlace>,
}

impl Dropping {
    /// Drops the pages of a file, now or later.
    fn drop_or_keep(&mut self, place: MountPlace, inode: InodeKey) {
        {
            let stuck = self.stuck.lock();
            if stuck.len() >= MAX_STUCK || stuck.contains(&inode) {
                self.later.insert(inode, place);
                return;
            }
        }
        let thread = match self.thread.take().map_or_else(|| self.start(), Ok) {
            Ok(thread) => thread,
            Err(error) => {
                tracing::debug!(%error, inode.nodeid, "no thread for dropping pages");
                self.later.insert(inode, place);
                return;
            }
        };
        if thread.files.send((place, inode)).is_err() {
            tracing::debug!(inode.nodeid, "pages of a file that others changed are not dropped: the thread has ended");
            return;
        }
        match thread.done.recv_timeout(self.patience) {
            Ok(()) => self.thread = Some(thread),
            Err(RecvTimeoutError::Disconnected) => {}
            Err(RecvTimeoutError::Timeout) => {
                // Before the channel is closed, by which the thread knows that it is in the list.
                self.stuck.lock().insert(inode);
                drop(thread);
            }
        }
    }

    fn start(&self) -> io::Result<DroppingThread> {
        let ((files, to_do), (tell, done)) = (sync_channel::<(MountPlace, InodeKey)>(0), sync_channel(0));
        let (act, stuck) = (self.act, Arc::clone(&self.stuck));
        self.self_io.start("nacre-drops", Role::Flush, move || {
            for (place, inode) in to_do {
                match during("drop pages", inode.nodeid, || act(&place, inode)) {
                    // The kernel does not have it in memory, nor any pages.
                    Ok(()) | Err(SysErrno::STALE) => {}
                    Err(error) => {
                        tracing::debug!(%error, inode.nodeid, "pages of a file that others changed could not be dropped")
                    }
                }
                if tell.send(()).is_err() {
                    stuck.lock().remove(&inode);
                    break;
                }
            }
            Ok(())
        })?;
        Ok(DroppingThread { files, done })
    }

    fn run(&mut self, files: &Receiver<(MountPlace, InodeKey)>) {
        loop {
            let next = match self.later.is_empty() {
                true => files.recv().map_err(|_| RecvTimeoutError::Disconnected),
                false => files.recv_timeout(self.patience),
            };
            match next {
                Ok((place, inode)) => self.drop_or_keep(place, inode),
                Err(RecvTimeoutError::Timeout) => {
                    let later = std::mem::take(&mut self.later);
                    later.into_iter().for_each(|(inode, place)| self.drop_or_keep(place, inode));
                }
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }
}

impl PageDropper {
    /// Starts the thread.
    ///
    /// # Errors
    /// Where the thread cannot be started.
    pub fn start(&self, self_io: &Arc<SelfIo>) -> io::Result<JoinHandle<Result<(), SysErrno>>> {
        self.start_with(self_io, drop_pages, PATIENCE)
    }

    fn start_with(
        &self,
        self_io: &Arc<SelfIo>,
        act: DropPages,
        patience: Duration,
    ) -> io::Result<JoinHandle<Result<(), SysErrno>>> {
        let (sender, files) = channel();
        *self.queue.lock() = Some(sender);
        let self_io_of_threads = Arc::clone(self_io);
        self_io.start("nacre-dropper", Role::Flush, move || {
            let (stuck, later) = (Arc::default(), BTreeMap::new());
            Dropping { self_io: self_io_of_threads, act, patience, thread: None, stuck, later }.run(&files);
            Ok(())
        })
    }

    /// Closes the queue: the thread ends.
    pub fn close(&self) {
        *self.queue.lock() = None;
    }

    /// Schedules the dropping of a file's clean pages. Pages that are dirty, or in write-back, are newer than the
    /// content below.
    pub fn soon(&self, place: MountPlace, inode: InodeKey) {
        let sent = self.queue.lock().as_ref().is_some_and(|queue| queue.send((place, inode)).is_ok());
        if !sent {
            tracing::debug!(inode.nodeid, "pages were to be dropped after the end of the mount");
        }
    }
}

fn drop_pages(place: &MountPlace, inode: InodeKey) -> Result<(), SysErrno> {
    let file = Entered::new(&place.mountpoint, place.device)?.by_handle(inode, OFlags::RDONLY)?;
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacre_testkit::eventually;
    use parking_lot::Condvar;
    use std::{path::PathBuf, sync::LazyLock};

    /// Files whose pages were dropped, and those whose locks are kept.
    static DROPPED: Mutex<Vec<u64>> = Mutex::new(Vec::new());
    static KEPT: LazyLock<(Mutex<BTreeSet<u64>>, Condvar)> = LazyLock::new(Default::default);

    fn act(_: &MountPlace, inode: InodeKey) -> Result<(), SysErrno> {
        DROPPED.lock().push(inode.nodeid);
        let mut kept = KEPT.0.lock();
        while kept.contains(&inode.nodeid) {
            KEPT.1.wait(&mut kept);
        }
        Ok(())
    }

    #[test]
    fn a_lock_that_is_kept_delays_no_other_file() {
        let own = Arc::new(SelfIo::default());
        let dropper = PageDropper::default();
        let thread = dropper.start_with(&own, act, Duration::from_millis(20)).unwrap();
        let place = MountPlace { mountpoint: PathBuf::from("/nowhere"), device: 1, names: Arc::default() };
        let last = MAX_STUCK as u64 + 5;
        KEPT.0.lock().extend(1..last);
        let soon = |nodeid| dropper.soon(place.clone(), InodeKey { nodeid, generation: 0 });
        soon(1);
        soon(last);
        let count = |nodeid| DROPPED.lock().iter().filter(|dropped| **dropped == nodeid).count();
        eventually("the other file's pages are dropped", || count(last) == 1);
        // One that a thread waits for, and too many.
        soon(1);
        (2..last).for_each(soon);
        eventually("some threads wait", || count(MAX_STUCK as u64) == 1);
        KEPT.0.lock().clear();
        KEPT.1.notify_all();
        eventually("all are dropped", || count(1) == 2 && (2..last).all(|nodeid| count(nodeid) == 1));
        dropper.close();
        thread.join().unwrap().unwrap();
    }
}
