//! Writes back the dirty pages of one file while the caller of lseek(2) holds the inode's lock, in mounts of
//! any user and with or without the write-back cache.
//!
//! Called by `mapped.rs`; done by threads without descriptors (`self_io.rs`). The file is opened by handle where the
//! layer has handles and the user is root, else through the open files of the caller. Invariant: only kernels from
//! 6.18 on write back here (`FuseOptions::flush_for_seek`), as close(2) takes no lock there; before, only an `O_PATH`
//! descriptor and statx(2) without a request are used.

use super::{
    Role,
    own_mount::{Entered, InodeKey, MountPlace, device_of, number, reopen},
    waits::during,
};
use crate::writeback::Writeback;
use nacre_vfs::Time;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxFlags};
use rustix::io::Errno as SysErrno;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::channel;

/// Maximum number of open files of a caller that are checked.
const MAX_DESCRIPTORS: usize = 4096;

impl Writeback {
    /// Writes the dirty pages of a file back and waits for it; returns whether that succeeded. `caller` is the thread
    /// that has the file open, 0 where it is not visible here.
    pub fn flush_mapped(&self, inode: InodeKey, caller: u32) -> bool {
        self.ask_mount(move |place| {
            let file = open(&place, inode, caller)?;
            during("flush for lseek", inode.nodeid, || {
                nacre_sys::writeback::write_and_wait(file.as_fd()).map_err(number)
            })
        })
    }

    /// Whether the kernel has this mtime for a file, without a request and a lock.
    pub fn has_times(&self, inode: InodeKey, mtime: Time) -> bool {
        self.ask_mount(move |place| {
            let mount = Entered::new(&place.mountpoint, place.device)?;
            let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
            let stat = during("times", inode.nodeid, || {
                rustix::fs::statx(mount.by_handle(inode, OFlags::PATH)?, c"", flags, StatxFlags::MTIME)
            })?;
            let same = stat.stx_mtime.tv_sec == mtime.sec && stat.stx_mtime.tv_nsec == mtime.nsec;
            if same { Ok(()) } else { Err(SysErrno::BUSY) }
        })
    }

    fn ask_mount(&self, ask: impl FnOnce(MountPlace) -> Result<(), SysErrno> + Send + 'static) -> bool {
        let (sender, answer) = channel();
        let place = self.place();
        let started = self.self_io.start("nacre-flush", Role::Flush, move || {
            // The process may be ending.
            let _ = sender.send(ask(place));
            Ok(())
        });
        match started.map(|_| answer.recv()) {
            Ok(Ok(Ok(()))) => true,
            Ok(failed) => {
                tracing::debug!(?failed, "pages of a file were not written back before lseek");
                false
            }
            Err(error) => {
                tracing::debug!(%error, "no thread to write pages back before lseek");
                false
            }
        }
    }
}

fn open(place: &MountPlace, inode: InodeKey, caller: u32) -> Result<OwnedFd, SysErrno> {
    let by_handle = Entered::new(&place.mountpoint, place.device)
        .and_then(|mount| during("open for lseek", inode.nodeid, || mount.by_handle(inode, OFlags::RDONLY)));
    match by_handle {
        Ok(file) => Ok(file),
        Err(_) if caller != 0 => of_caller(place, inode, caller),
        Err(error) => Err(error),
    }
}

/// Finds the file among the open files of a thread.
fn of_caller(place: &MountPlace, inode: InodeKey, caller: u32) -> Result<OwnedFd, SysErrno> {
    let path = OFlags::PATH | OFlags::CLOEXEC;
    for entry in std::fs::read_dir(format!("/proc/{caller}/fd")).map_err(number)?.take(MAX_DESCRIPTORS) {
        let Ok(file) = rustix::fs::openat(CWD, entry.map_err(number)?.path(), path, Mode::empty()) else { continue };
        if device_of(file.as_fd()).is_ok_and(|device| device == place.device) && inode.is_of(file.as_fd()) {
            return during("open for lseek", inode.nodeid, || reopen(file.as_fd(), OFlags::RDONLY));
        }
    }
    Err(SysErrno::NOENT)
}
