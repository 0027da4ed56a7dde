//! Thread that drops pages of files that others changed, where a notification to the kernel would wait for pages in
//! write-back.
//!
//! Fed by the invalidation thread (`mount.rs`).

use super::{
    Role, SelfIo,
    own_mount::{Entered, InodeKey, MountPlace},
    waits::during,
};
use parking_lot::Mutex;
use rustix::{fs::OFlags, io::Errno as SysErrno};
use std::{
    io,
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    thread::JoinHandle,
};

/// Channel to the thread.
#[derive(Default)]
pub(crate) struct PageDropper {
    queue: Mutex<Option<Sender<(MountPlace, InodeKey)>>>,
}

impl PageDropper {
    /// Starts the thread.
    ///
    /// # Errors
    /// Where the thread cannot be started.
    pub fn start(&self, self_io: &Arc<SelfIo>) -> io::Result<JoinHandle<Result<(), SysErrno>>> {
        let (sender, files): (_, Receiver<(MountPlace, InodeKey)>) = channel();
        *self.queue.lock() = Some(sender);
        self_io.start("nacre-dropper", Role::Flush, move || {
            for (place, inode) in files {
                match during("drop pages", inode.nodeid, || drop_pages(&place, inode)) {
                    // The kernel does not have it in memory, nor any pages.
                    Ok(()) | Err(SysErrno::STALE) => {}
                    Err(error) => {
                        tracing::debug!(%error, inode.nodeid, "pages of a file that others changed could not be dropped")
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
