//! Limits for operations on the paths of mount points: a file system on a path may not answer (NFS, a user's own FUSE).
//!
//! Used by `mount_point.rs`, `carrier.rs` and `mounts.rs`. Operations are carried out by threads without descriptors
//! ([`fusewire::apart`]), as the path may lead through mounts of this process. They are counted for each file system.
//! Invariants:
//! * nobody waits longer than [`ANSWERING`], and where an operation on the same file system is late, not longer than
//!   [`ANSWERING_LATE`];
//! * a file system that does not answer does not refuse operations on others;
//! * threads are bounded.

use crate::mountinfo::{self, MountEntry};
use parking_lot::Mutex;
use rustix::io::Errno;
use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

/// Maximum time for an operation on a path.
const ANSWERING: Duration = Duration::from_secs(20);
/// The same, where an operation on the same file system has exceeded its maximum time and has not ended.
const ANSWERING_LATE: Duration = Duration::from_secs(1);
/// Maximum number of operations in progress on one file system, of which all may be stuck.
const OF_ONE_MOST: usize = 16;
/// Maximum number of operations in progress.
const ALL_MOST: usize = 256;

/// Operations in progress on one file system.
#[derive(Clone, Copy, Default)]
struct Progress {
    running: usize,
    /// Those that have exceeded their maximum time.
    late: usize,
}

/// Operations in progress, by file systems.
#[derive(Default)]
struct Operations(Mutex<BTreeMap<PathBuf, Progress>>);

/// An operation, counted while it is carried out.
struct Counted {
    operations: Arc<Operations>,
    of: PathBuf,
    is_late: bool,
}

impl Operations {
    /// Counts an operation; returns it with its maximum time, unless there are too many.
    fn begin(self: &Arc<Operations>, of: PathBuf) -> Option<(Arc<Mutex<Counted>>, Duration)> {
        let mut all = self.0.lock();
        let sum: usize = all.values().map(|progress| progress.running).sum();
        let progress = all.entry(of.clone()).or_default();
        if progress.running >= OF_ONE_MOST || sum >= ALL_MOST {
            if progress.running == 0 {
                all.remove(&of);
            }
            return None;
        }
        progress.running += 1;
        let limit = if progress.late == 0 { ANSWERING } else { ANSWERING_LATE };
        drop(all);
        Some((Arc::new(Mutex::new(Counted { operations: Arc::clone(self), of, is_late: false })), limit))
    }
}

impl Counted {
    fn becomes_late(&mut self) {
        if let Some(progress) = self.operations.0.lock().get_mut(&self.of) {
            progress.late += 1;
            self.is_late = true;
        }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut all = self.operations.0.lock();
        if let Some(progress) = all.get_mut(&self.of) {
            progress.running -= 1;
            progress.late -= usize::from(self.is_late);
            if progress.running == 0 {
                all.remove(&self.of);
            }
        }
    }
}

/// Runs an operation on a path in a thread without descriptors.
///
/// # Errors
/// Errors of `act`; ETIMEDOUT after the maximum time, while `act` may still be carried out; EBUSY where too many operations
/// on the same file system do not end.
pub(super) fn apart<T: Send + 'static>(
    path: &Path,
    act: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    static OPERATIONS: Mutex<Option<Arc<Operations>>> = Mutex::new(None);
    let operations = Arc::clone(OPERATIONS.lock().get_or_insert_default());
    let of = file_system(path, &mountinfo::read().unwrap_or_default());
    let (counted, limit) = operations.begin(of).ok_or(Errno::BUSY)?;
    within(limit, counted, act)
}

/// Returns the name by which operations on a path are counted: the mount point above it. The root's file system has links
/// to others: there, the first two names of the path belong to it.
fn file_system(path: &Path, table: &[MountEntry]) -> PathBuf {
    let above = table.iter().map(|entry| &entry.mountpoint).filter(|mountpoint| path.starts_with(mountpoint));
    let mountpoint = above.max_by_key(|mountpoint| mountpoint.as_os_str().len());
    match mountpoint {
        Some(mountpoint) if mountpoint.parent().is_some() => mountpoint.clone(),
        _ => path.components().take(3).collect(),
    }
}

fn within<T: Send + 'static>(
    limit: Duration,
    counted: Arc<Mutex<Counted>>,
    act: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let (done, answer) = mpsc::sync_channel(1);
    let counted_by_thread = Arc::clone(&counted);
    let body = move || {
        let result = fusewire::apart(act);
        drop(counted_by_thread);
        // A caller whose time limit has passed does not receive it.
        let _ = done.try_send(result);
    };
    thread::Builder::new().name("nacre-place".to_owned()).stack_size(256 << 10).spawn(body)?;
    match answer.recv_timeout(limit) {
        Ok(result) => result,
        Err(mpsc::RecvTimeoutError::Timeout) => {
            counted.lock().becomes_late();
            Err(Errno::TIMEDOUT.into())
        }
        Err(mpsc::RecvTimeoutError::Disconnected) => Err(io::Error::other("the thread of an operation panicked")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(1);

    /// An operation that does not end before the returned sender is dropped.
    fn stuck(operations: &Arc<Operations>, of: &str) -> mpsc::Sender<()> {
        let (go, gone) = mpsc::channel::<()>();
        let (counted, _) = operations.begin(of.into()).unwrap();
        let result = within(SHORT, counted, move || {
            let _ = gone.recv();
            Ok(())
        });
        assert_eq!(result.unwrap_err().raw_os_error(), Some(Errno::TIMEDOUT.raw_os_error()));
        go
    }

    #[test]
    fn a_file_system_that_does_not_answer_delays_no_other_one() {
        let operations = Arc::new(Operations::default());
        let limit = |of: &str| operations.begin(of.into()).map(|(_, limit)| limit);
        let mut held: Vec<_> = (0..OF_ONE_MOST).map(|_| stuck(&operations, "/dead")).collect();
        assert_eq!(limit("/dead"), None);
        assert_eq!(limit("/alive"), Some(ANSWERING));
        let (counted, _) = operations.begin("/alive".into()).unwrap();
        assert_eq!(within(ANSWERING, counted, || Ok(2)).unwrap(), 2);
        let (counted, _) = operations.begin("/alive".into()).unwrap();
        let failed: io::Result<()> = within(ANSWERING, counted, || Err(Errno::LOOP.into()));
        assert_eq!(failed.unwrap_err().raw_os_error(), Some(Errno::LOOP.raw_os_error()));
        // An operation that ends makes place for another one, which is not waited for as long.
        let come = |is: &dyn Fn() -> bool| crate::clock::look_until(Duration::from_secs(600), SHORT, is);
        held.pop();
        assert!(come(&|| limit("/dead") == Some(ANSWERING_LATE)));
        held.clear();
        assert!(come(&|| limit("/dead") == Some(ANSWERING)));
        assert!(come(&|| operations.0.lock().is_empty()));
    }

    #[test]
    fn operations_are_counted_by_file_systems() {
        let table = mountinfo::parse(
            b"1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 0:40 / /net/a rw - nfs4 server:/a rw\n3 1 0:41 / /net/b rw - nfs4 server:/b rw\n",
        );
        let of = |path: &str| file_system(Path::new(path), &table);
        assert_eq!(of("/net/a/x/y"), of("/net/a/z"));
        assert_ne!(of("/net/a/x"), of("/net/b/x"));
        assert_eq!(of("/srv/link/x"), of("/srv/link/y"));
        assert_ne!(of("/srv/link/x"), of("/srv/other/x"));
    }
}
