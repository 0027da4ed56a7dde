//! Thread that sets the kernel's size and times of files to the real ones, or makes the kernel ask for them.
//!
//! Used by `attr_refresh.rs`, by which the front end answers its requests.

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
    io,
    os::fd::AsRawFd,
    path::Path,
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel, sync_channel},
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

/// Channel to the thread.
#[derive(Default)]
pub(crate) struct AttrSetter {
    queue: Mutex<Option<Sender<Setting>>>,
}

impl AttrSetter {
    /// Starts the thread.
    ///
    /// # Errors
    /// Where the thread cannot be started.
    pub fn start(&self, self_io: &Arc<SelfIo>, name: &'static str) -> io::Result<JoinHandle<Result<(), SysErrno>>> {
        let (sender, settings): (_, Receiver<Setting>) = channel();
        *self.queue.lock() = Some(sender);
        self_io.start(name, Role::Times, move || {
            for setting in settings {
                let result = during("times and length", setting.inode.nodeid, || set(&setting));
                // The waiter may be gone.
                let _ = setting.done.try_send(result);
            }
            Ok(())
        })
    }

    /// Closes the queue: the thread ends.
    pub fn close(&self) {
        *self.queue.lock() = None;
    }

    /// Sets the kernel's size and mtime of a regular file, and waits for it.
    ///
    /// # Errors
    /// ESTALE where the kernel does not have the file in memory.
    pub fn set(&self, place: MountPlace, inode: InodeKey, size: u64, mtime: Time) -> Result<(), SysErrno> {
        let waiting = self.send(place, inode, Some((size, mtime)))?;
        waiting.recv().unwrap_or(Err(SysErrno::CANCELED))
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
        let sent = self.queue.lock().as_ref().is_some_and(|queue| queue.send(setting).is_ok());
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
