//! Acts on files of our own mount, by threads that hold none of the daemon's descriptors.
//!
//! A thread that waits for an answer of its own mount cannot be killed while it waits. If it held
//! the fuse device open, a daemon that is killed would never let go of it, and every user of the
//! mount would hang; so each such act is done here, and who wants it done waits for a message,
//! which ends with the process.
//!
//! Called by `attr_refresh.rs` (sizes and times), `writeback/flush.rs` (what is held back),
//! `mount.rs` (other flags) and the notify thread (dropping pages). The door knows the threads by
//! their ids, and answers what they pretend without touching the layer ([`SelfIo::role`]). An act
//! that needs an inode's lock never waits behind another's: each has a thread of its own, but for
//! the times, which have one in all.

use crate::own_mount::{Entered, number};
use nacre_vfs::Time;
use parking_lot::Mutex;
use rustix::{
    fs::{AtFlags, CWD, OFlags, StatxFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT},
    io::Errno as SysErrno,
};
use std::{
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc::{Receiver, Sender, channel, sync_channel},
    },
    thread::JoinHandle,
    time::Duration,
};

/// What a thread is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// It sets sizes and times that the files have already: SETATTR is answered with them.
    Times,
    /// It has files passed on: SETATTR of the access time is refused, OPEN and FSYNC are answered.
    Flush,
    /// It looks up files that have been replaced: it is told of those in their place.
    Replaced,
}

/// The threads that are at it, by their ids.
#[derive(Default)]
pub(crate) struct SelfIo {
    threads: Mutex<Vec<(u32, Role)>>,
    count: AtomicUsize,
}

impl SelfIo {
    /// What the thread with this id is for, if it is one of these.
    pub fn role(&self, tid: u32) -> Option<Role> {
        if self.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        self.threads.lock().iter().find(|(known, _)| *known == tid).map(|(_, role)| *role)
    }

    /// Starts a thread without descriptors.
    ///
    /// # Errors
    /// Where there can be none.
    pub fn start<T: Send + 'static>(
        self: &Arc<Self>,
        name: &str,
        role: Role,
        body: impl FnOnce() -> Result<T, SysErrno> + Send + 'static,
    ) -> io::Result<JoinHandle<Result<T, SysErrno>>> {
        let self_io = Arc::clone(self);
        std::thread::Builder::new().name(name.to_owned()).stack_size(256 << 10).spawn(move || {
            nacre_sys::descriptors::leave_all_to_others().map_err(number)?;
            let tid = rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned();
            self_io.enter(tid, role);
            let result = body();
            self_io.leave(tid);
            result
        })
    }

    fn enter(&self, tid: u32, role: Role) {
        let mut threads = self.threads.lock();
        threads.push((tid, role));
        self.count.store(threads.len(), Ordering::Release);
    }

    fn leave(&self, tid: u32) {
        let mut threads = self.threads.lock();
        threads.retain(|(known, _)| *known != tid);
        self.count.store(threads.len(), Ordering::Release);
    }
}

/// Where the mount is.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    /// The path.
    pub mountpoint: PathBuf,
    /// The device number, so that nothing else is taken for it.
    pub device: u64,
    /// The generation of regular files' numbers.
    pub generation: u32,
}

/// Has the kernel pass on what it holds of a file, if `locking` as with fsync(2), after a write(2)
/// that is under way; else without the inode's lock.
pub(crate) fn flush_file(place: &Place, nodeid: u64, locking: bool) -> Result<(), SysErrno> {
    let mount = Entered::new(&place.mountpoint, place.device)?;
    let file = |flags| mount.by_handle((nodeid, place.generation), flags);
    let passed = match locking {
        true => file(OFlags::PATH).and_then(|file| flush_unseen(&file)),
        // Who asks by lseek(2) has the inode's lock.
        false => {
            file(OFlags::RDONLY).and_then(|file| nacre_sys::writeback::write_and_wait(file.as_fd()).map_err(number))
        }
    };
    match passed {
        // Closed meanwhile, which passes everything on; or what was held back could not be written,
        // which its writer is told as well: it is not held back any more. Nothing is held back
        // where nothing can be written.
        Ok(()) | Err(SysErrno::STALE | SysErrno::NOSPC | SysErrno::DQUOT | SysErrno::ROFS) => Ok(()),
        Err(error) => {
            tracing::debug!(%error, nodeid, "a file could not be passed on");
            Err(error)
        }
    }
}

/// Has all that is held back of a file written, and waits for it. Before it asks for other times of
/// a file, the kernel writes what it has collected of it (`fuse_do_setattr`), or it would be late
/// for them. The door refuses that change ([`FLUSHED`]): so no file is opened and none is
/// changed, and nobody who watches the mount hears of anything. Were the refusal lost, only the
/// access time would be another.
fn flush_unseen(file: &OwnedFd) -> Result<(), SysErrno> {
    let stamps = Timestamps {
        last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_NOW },
        last_modification: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
    };
    match rustix::fs::utimensat(file, c"", &stamps, AtFlags::EMPTY_PATH) {
        Err(FLUSHED) => Ok(()),
        other => other,
    }
}

/// With this the door refuses the change of times by which a file is passed on.
pub(crate) const FLUSHED: SysErrno = SysErrno::CANCELED;

/// The thread that drops pages of files that others changed, where a notification to the kernel
/// would wait for pages that are being written back.
#[derive(Default)]
pub(crate) struct PageDropper {
    queue: Mutex<Option<Sender<(Place, u64)>>>,
}

impl PageDropper {
    /// Starts the thread.
    ///
    /// # Errors
    /// Where there can be none.
    pub fn start(&self, self_io: &Arc<SelfIo>) -> io::Result<JoinHandle<Result<(), SysErrno>>> {
        let (sender, files): (_, Receiver<(Place, u64)>) = channel();
        *self.queue.lock() = Some(sender);
        self_io.start("nacre-dropper", Role::Flush, move || {
            for (place, nodeid) in files {
                match drop_pages(&place, nodeid) {
                    // The kernel does not have it in memory: nor any pages.
                    Ok(()) | Err(SysErrno::STALE) => {}
                    Err(error) => {
                        tracing::debug!(%error, nodeid, "pages of a file that others changed could not be dropped")
                    }
                }
            }
            Ok(())
        })
    }

    /// Closes the queue: the thread ends.
    pub fn close(&self) {
        *self.queue.lock() = None;
    }

    /// Has the clean pages of a file dropped, soon. Pages that are dirty, or being written back,
    /// are newer than what is below.
    pub fn soon(&self, place: Place, nodeid: u64) {
        let sent = self.queue.lock().as_ref().is_some_and(|queue| queue.send((place, nodeid)).is_ok());
        if !sent {
            tracing::debug!(nodeid, "pages were to be dropped after the end of the mount");
        }
    }
}

fn drop_pages(place: &Place, nodeid: u64) -> Result<(), SysErrno> {
    let file = Entered::new(&place.mountpoint, place.device)?.by_handle((nodeid, place.generation), OFlags::RDONLY)?;
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed)
}

/// A file's size and time of modification, for the kernel; or nothing of it but a question.
struct Setting {
    nodeid: u64,
    place: Place,
    values: Option<(u64, Time)>,
    done: std::sync::mpsc::SyncSender<Result<(), SysErrno>>,
}

/// A thread that sets sizes and times, or one that asks for them.
#[derive(Default)]
pub(crate) struct AttrSetter {
    queue: Mutex<Option<Sender<Setting>>>,
}

impl AttrSetter {
    /// Starts the thread.
    ///
    /// # Errors
    /// Where there can be none.
    pub fn start(&self, self_io: &Arc<SelfIo>, name: &'static str) -> io::Result<JoinHandle<Result<(), SysErrno>>> {
        let (sender, settings): (_, Receiver<Setting>) = channel();
        *self.queue.lock() = Some(sender);
        self_io.start(name, Role::Times, move || {
            for setting in settings {
                let result = set(&setting);
                // Whoever waited may have gone.
                let _ = setting.done.try_send(result);
            }
            Ok(())
        })
    }

    /// Closes the queue: the thread ends.
    pub fn close(&self) {
        *self.queue.lock() = None;
    }

    /// Makes the kernel's size and time of a regular file these, and waits for it.
    ///
    /// # Errors
    /// ESTALE where the kernel does not have the file in memory.
    pub fn set(&self, place: Place, nodeid: u64, size: u64, mtime: Time) -> Result<(), SysErrno> {
        let waiting = self.send(place, nodeid, Some((size, mtime)))?;
        waiting.recv().unwrap_or(Err(SysErrno::CANCELED))
    }

    /// Makes the kernel ask for the attributes of a file, whether or not those that it has are
    /// valid, and waits for it, at most so long. Takes no lock of the file: a thread that does
    /// nothing else waits for nobody.
    ///
    /// # Errors
    /// ESTALE where the kernel does not have the file in memory.
    pub fn ask(&self, place: Place, nodeid: u64, most: Duration) -> Result<(), SysErrno> {
        self.send(place, nodeid, None)?.recv_timeout(most).unwrap_or(Err(SysErrno::CANCELED))
    }

    fn send(
        &self,
        place: Place,
        nodeid: u64,
        values: Option<(u64, Time)>,
    ) -> Result<Receiver<Result<(), SysErrno>>, SysErrno> {
        let (done, waiting) = sync_channel(1);
        let setting = Setting { nodeid, place, values, done };
        let sent = self.queue.lock().as_ref().is_some_and(|queue| queue.send(setting).is_ok());
        if sent { Ok(waiting) } else { Err(SysErrno::CANCELED) }
    }
}

fn set(setting: &Setting) -> Result<(), SysErrno> {
    let file = Entered::new(&setting.place.mountpoint, setting.place.device)?
        .by_handle((setting.nodeid, setting.place.generation), OFlags::PATH)?;
    let Some((size, mtime)) = setting.values else {
        return rustix::fs::statx(&file, c"", AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC, StatxFlags::BASIC_STATS)
            .map(drop);
    };
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let kernel = rustix::fs::statx(&file, c"", flags, StatxFlags::SIZE | StatxFlags::MTIME)?;
    // The table of descriptors is the thread's own.
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
