//! Thread that sets the kernel's size and times of files to the real ones, or makes the kernel ask for them.
//!
//! Used by `attr_refresh.rs`, by which the front end answers its requests. Invariant: setting a size waits for the inode's
//! lock, which a user can keep for ever; a thread that does not return within [`PATIENCE`] is left to its file, and another
//! one goes on with the others.

use super::{
    Role, SelfIo,
    own_mount::{Entered, InodeKey, MountPlace, number},
    waits::during,
};
use nacre_vfs::Time;
use parking_lot::Mutex;
use rustix::{
    fs::{AtFlags, CWD, OFlags, StatxFlags, Timespec, Timestamps, UTIME_OMIT},
    io::Errno as SysErrno,
};
use std::{
    collections::BTreeSet,
    io,
    os::fd::AsRawFd,
    path::Path,
    sync::{
        Arc, Weak,
        mpsc::{Receiver, RecvTimeoutError, Sender, channel, sync_channel},
    },
    thread::JoinHandle,
    time::Duration,
};

/// A file's size and mtime to be set in the kernel; no values: the kernel is to ask.
struct Setting {
    inode: InodeKey,
    place: MountPlace,
    values: Option<(u64, Time)>,
    done: std::sync::mpsc::SyncSender<Result<(), SysErrno>>,
}

/// Time after which a thread that does not return is left to its file.
const PATIENCE: Duration = Duration::from_secs(1);
/// Maximum number of threads that do not return.
const MAX_STUCK: usize = 16;

/// How a thread is started.
#[derive(Clone)]
struct Start {
    self_io: Weak<SelfIo>,
    name: &'static str,
    act: fn(&Setting) -> Result<(), SysErrno>,
    patience: Duration,
}

/// Channel to the thread.
#[derive(Default)]
pub(crate) struct AttrSetter {
    queue: Mutex<Option<(Sender<Setting>, Start)>>,
    /// Node ids of files whose threads do not return.
    stuck: Arc<Mutex<BTreeSet<u64>>>,
}

impl AttrSetter {
    /// Starts the thread.
    ///
    /// # Errors
    /// Where the thread cannot be started.
    pub fn start(&self, self_io: &Arc<SelfIo>, name: &'static str) -> io::Result<JoinHandle<Result<(), SysErrno>>> {
        let start = Start { self_io: Arc::downgrade(self_io), name, act: set, patience: PATIENCE };
        self.start_in(&mut self.queue.lock(), start, self_io)
    }

    fn start_in(
        &self,
        queue: &mut Option<(Sender<Setting>, Start)>,
        start: Start,
        self_io: &Arc<SelfIo>,
    ) -> io::Result<JoinHandle<Result<(), SysErrno>>> {
        let (sender, settings): (_, Receiver<Setting>) = channel();
        let (act, stuck) = (start.act, Arc::clone(&self.stuck));
        let thread = self_io.start(start.name, Role::Times, move || {
            for setting in settings {
                let result = during("times and length", setting.inode.nodeid, || act(&setting));
                // The waiter may be gone; it looks for the result again when it has noted the file.
                let _ = setting.done.try_send(result);
                stuck.lock().remove(&setting.inode.nodeid);
            }
            Ok(())
        })?;
        *queue = Some((sender, start));
        Ok(thread)
    }

    /// Starts another thread beside one that does not return, which ends when it does.
    fn replace(&self) -> Result<(), SysErrno> {
        let mut queue = self.queue.lock();
        let start = queue.as_ref().map(|(_, start)| start.clone()).ok_or(SysErrno::CANCELED)?;
        let self_io = start.self_io.upgrade().ok_or(SysErrno::CANCELED)?;
        self.start_in(&mut queue, start, &self_io).map(drop).map_err(number)
    }

    /// Whether a thread does not return, as a user keeps a lock.
    pub fn is_stuck(&self) -> bool {
        !self.stuck.lock().is_empty()
    }

    /// Closes the queue: the thread ends.
    pub fn close(&self) {
        *self.queue.lock() = None;
    }

    /// Sets the kernel's size and mtime of a regular file, and waits for it. One call at a time.
    ///
    /// # Errors
    /// ESTALE where the kernel does not have the file in memory; ETIMEDOUT where a user keeps its lock, or those of too
    /// many others: to be tried again later.
    pub fn set(&self, place: MountPlace, inode: InodeKey, size: u64, mtime: Time) -> Result<(), SysErrno> {
        {
            let stuck = self.stuck.lock();
            if stuck.len() >= MAX_STUCK || stuck.contains(&inode.nodeid) {
                return Err(SysErrno::TIMEDOUT);
            }
        }
        let patience = self.queue.lock().as_ref().map_or(PATIENCE, |(_, start)| start.patience);
        let waiting = self.send(place, inode, Some((size, mtime)))?;
        match waiting.recv_timeout(patience) {
            Ok(result) => return result,
            Err(RecvTimeoutError::Disconnected) => return Err(SysErrno::CANCELED),
            Err(RecvTimeoutError::Timeout) => {}
        }
        self.stuck.lock().insert(inode.nodeid);
        // It may have returned just before.
        if let Ok(result) = waiting.try_recv() {
            self.stuck.lock().remove(&inode.nodeid);
            return result;
        }
        self.replace()?;
        Err(SysErrno::TIMEDOUT)
    }

    /// Makes the kernel ask for the attributes of a file, whether or not the cached ones are valid, and waits for it,
    /// for `most` at most. Takes no lock of the file: a thread that only does this waits for nobody.
    ///
    /// # Errors
    /// ESTALE where the kernel does not have the file in memory.
    pub fn ask(&self, place: MountPlace, inode: InodeKey, most: Duration) -> Result<(), SysErrno> {
        self.send(place, inode, None)?.recv_timeout(most).unwrap_or(Err(SysErrno::CANCELED))
    }

    fn send(
        &self,
        place: MountPlace,
        inode: InodeKey,
        values: Option<(u64, Time)>,
    ) -> Result<Receiver<Result<(), SysErrno>>, SysErrno> {
        let (done, waiting) = sync_channel(1);
        let setting = Setting { inode, place, values, done };
        let sent = self.queue.lock().as_ref().is_some_and(|(queue, _)| queue.send(setting).is_ok());
        if sent { Ok(waiting) } else { Err(SysErrno::CANCELED) }
    }
}

fn set(setting: &Setting) -> Result<(), SysErrno> {
    let file = Entered::new(&setting.place.mountpoint, setting.place.device)?.by_handle(setting.inode, OFlags::PATH)?;
    let Some((size, mtime)) = setting.values else {
        return rustix::fs::statx(&file, c"", AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC, StatxFlags::BASIC_STATS)
            .map(drop);
    };
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let kernel = rustix::fs::statx(&file, c"", flags, StatxFlags::SIZE | StatxFlags::MTIME)?;
    // The thread has its own table of descriptors.
    let path = format!("/proc/thread-self/fd/{}", file.as_raw_fd());
    let resized = kernel.stx_size != size;
    if resized {
        nacre_sys::length::truncate(Path::new(&path), size).map_err(number)?;
    }
    if resized || (kernel.stx_mtime.tv_sec, kernel.stx_mtime.tv_nsec) != (mtime.sec, mtime.nsec) {
        let stamps = Timestamps {
            last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
            last_modification: Timespec { tv_sec: mtime.sec, tv_nsec: i64::from(mtime.nsec) },
        };
        rustix::fs::utimensat(CWD, path.as_str(), &stamps, AtFlags::empty())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacre_testkit::eventually;
    use parking_lot::Condvar;
    use std::{path::PathBuf, sync::LazyLock};

    /// Files whose locks are kept, and sizes that were set.
    static KEPT: LazyLock<(Mutex<BTreeSet<u64>>, Condvar)> = LazyLock::new(Default::default);
    static SIZES: Mutex<Vec<(u64, u64)>> = Mutex::new(Vec::new());

    fn act(setting: &Setting) -> Result<(), SysErrno> {
        let nodeid = setting.inode.nodeid;
        let mut kept = KEPT.0.lock();
        while kept.contains(&nodeid) {
            KEPT.1.wait(&mut kept);
        }
        SIZES.lock().extend(setting.values.map(|(size, _)| (nodeid, size)));
        Ok(())
    }

    #[test]
    fn a_lock_that_is_kept_delays_no_other_file() {
        let own = Arc::new(SelfIo::default());
        let setter = AttrSetter::default();
        let patience = Duration::from_millis(20);
        let start = Start { self_io: Arc::downgrade(&own), name: "setter", act, patience };
        drop(setter.start_in(&mut setter.queue.lock(), start, &own).unwrap());
        let place = MountPlace { mountpoint: PathBuf::from("/nowhere"), device: 1, names: Arc::default() };
        let set = |nodeid, size| setter.set(place.clone(), InodeKey { nodeid, generation: 0 }, size, Time::default());
        // A thread that is kept from running for a while is replaced as well.
        let until_set = |nodeid, size| eventually("it is set", || set(nodeid, size).is_ok());
        KEPT.0.lock().extend(1..=3);
        for nodeid in 1..=3 {
            assert_eq!(set(nodeid, 1), Err(SysErrno::TIMEDOUT));
        }
        until_set(4, 7);
        assert_eq!(set(1, 2), Err(SysErrno::TIMEDOUT));
        KEPT.0.lock().clear();
        KEPT.1.notify_all();
        eventually("the threads return", || setter.stuck.lock().is_empty());
        until_set(1, 3);
        let last = |nodeid| SIZES.lock().iter().rfind(|(of, _)| *of == nodeid).map(|(_, size)| *size);
        assert_eq!([1, 2, 4].map(last), [Some(3), Some(1), Some(7)]);
        setter.close();
        assert_eq!(set(1, 4), Err(SysErrno::CANCELED));
    }
}
