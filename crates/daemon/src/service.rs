//! Communication with the service manager (systemd(1)), where this process is a service: readiness of a mount or
//! pool, and storage of descriptors for a mount or pool that survives its process.
//!
//! Used by [`crate::guardian`], its workers, and all serving processes. The manager passes stored descriptors
//! (sd_notify(3), `FDSTORE=1`; `FileDescriptorStoreMax=` in the unit) to the service's next process, however the
//! last ones ended ([`left`]). Each descriptor is stored under a name with its number, and gets that number again,
//! so that the handoff state is valid in the next process as well. All recorded descriptors ([`crate::left`],
//! [`crate::pool::left`]) are stored, except those of open files, which are opened again.
//!
//! Invariant: a descriptor is stored before it is recorded, and until it is not recorded any more; one that has the
//! number of a closed descriptor takes its place.

pub mod left;

use crate::{background, failure::Failure, memory_file};
use nacre_sys::descriptors;
use parking_lot::Mutex;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::fstat,
    pipe::{PipeFlags, pipe_with},
};
use sd_notify::NotifyState;
use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

/// Environment variable with the process that the manager has started: this one, or one that called it.
const STARTED: &str = "SYSTEMD_EXEC_PID";
/// Environment variable with the socket of the manager.
const SOCKET: &str = "NOTIFY_SOCKET";
/// Prefix of the descriptors' names.
const PREFIX: &str = "nacre-";
/// Name of the handover's descriptor, after the prefix.
const HANDOVER: &str = "handover";
/// Deadline for the manager to read messages.
const PATIENCE: Duration = Duration::from_secs(5);

/// Identity of an open file: device and inode number. No other file has them as long as the manager stores a
/// descriptor of this one.
type FileId = (u64, u64);

/// The service that this process and its workers are.
#[derive(Debug, Default)]
pub struct SystemdService {
    /// The descriptors that the manager stores, by number: the process may have closed one, and another file may have
    /// its number.
    stored: Mutex<BTreeMap<i32, FileId>>,
}

impl SystemdService {
    /// Returns the service, if its manager started this very process: a process started by a service does not act
    /// for it.
    pub fn of_this_process() -> Option<Arc<SystemdService>> {
        let started = std::env::var(STARTED).ok()?.parse::<u32>().ok()?;
        let is_service = started == std::process::id() && std::env::var_os(SOCKET).is_some();
        is_service.then(Arc::default)
    }

    /// Permits the workers of this process to notify the manager. Before systemd 254 that has to be in the unit
    /// (`NotifyAccess=all`).
    pub fn admit_workers(&self) {
        told(sd_notify::notify(&[NotifyState::Custom("NOTIFYACCESS=all")]));
    }

    /// Reports that a mount or a pool answers: to the command that started this process in the `background`, or to
    /// the service manager. After a failover (`goes_on`) it is reported again, because the previous process may
    /// have died before it could.
    ///
    /// # Errors
    /// The command does not wait any more, and this is no failover.
    pub fn answers(service: Option<&SystemdService>, background: bool, goes_on: bool) -> Result<(), Failure> {
        if background {
            let reported = background::report_ready();
            return if goes_on { Ok(()) } else { reported };
        }
        if service.is_some() {
            told(sd_notify::notify(&[NotifyState::Ready]));
        }
        Ok(())
    }

    /// Returns the number of stored descriptors.
    pub fn stored(&self) -> usize {
        self.stored.lock().len()
    }

    /// Sets the descriptors that the manager stores from the previous process: those of them that are open here.
    pub fn has(&self, numbers: impl IntoIterator<Item = i32>) {
        *self.stored.lock() = numbers.into_iter().filter_map(|number| Some((number, opened(number).ok()?.1))).collect();
    }

    /// Stores these descriptors before `note` records them, and removes all others afterwards.
    pub fn keep<T>(&self, numbers: impl IntoIterator<Item = i32>, note: impl FnOnce() -> T) -> T {
        let mut stored = self.stored.lock();
        let now: BTreeSet<i32> = numbers.into_iter().collect();
        let mut is_new = false;
        for number in &now {
            // A device that the pool has closed may still be recorded.
            let Ok((descriptor, file)) = opened(*number) else { continue };
            if stored.get(number) != Some(&file) {
                told(store(&number.to_string(), descriptor.as_fd()));
                stored.insert(*number, file);
                is_new = true;
            }
        }
        if is_new {
            told(wait_until_read());
        }
        let done = note();
        let gone: Vec<i32> = stored.keys().copied().filter(|number| !now.contains(number)).collect();
        told(gone.iter().try_for_each(|number| remove(&number.to_string())));
        stored.retain(|number, _| now.contains(number));
        done
    }

    /// Stores the state that the service's next process needs to take over.
    pub fn keep_handover(&self, text: &str) {
        let file = memory_file::write(c"nacre-handover", text.as_bytes());
        told(file.and_then(|file| store(HANDOVER, file.as_fd())));
    }

    /// Removes all descriptors: there is nothing to take over.
    pub fn take_back(&self) {
        let mut stored = self.stored.lock();
        let names = std::mem::take(&mut *stored).into_keys().map(|number| number.to_string());
        told(names.chain([HANDOVER.to_owned()]).try_for_each(|name| remove(&name)).and_then(|()| wait_until_read()));
    }
}

/// Duplicates the descriptor with this number.
fn opened(number: i32) -> io::Result<(OwnedFd, FileId)> {
    let descriptor = descriptors::another(number)?;
    let file = fstat(&descriptor)?;
    Ok((descriptor, (file.st_dev, file.st_ino)))
}

/// Logs a failure to notify the manager: serving files matters more than failover.
fn told(result: io::Result<()>) {
    if let Err(error) = result {
        tracing::warn!(%error, "the service manager cannot be told");
    }
}

/// Stores a descriptor under this name, replacing another one of that name.
fn store(name: &str, descriptor: BorrowedFd<'_>) -> io::Result<()> {
    remove(name)?;
    let name = format!("{PREFIX}{name}");
    // Otherwise the manager removes the device of a mount that is unmounted, without notification.
    let not_watched = NotifyState::Custom("FDPOLL=0");
    sd_notify::notify_with_fds(&[NotifyState::FdStore, NotifyState::FdName(&name), not_watched], &[descriptor])
}

fn remove(name: &str) -> io::Result<()> {
    sd_notify::notify(&[NotifyState::FdStoreRemove, NotifyState::FdName(&format!("{PREFIX}{name}"))])
}

/// Waits until the manager has read all messages: it ignores messages of processes that are dead when it reads them
/// (sd_notify_barrier(3)).
fn wait_until_read() -> io::Result<()> {
    let (ours, its) = pipe_with(PipeFlags::CLOEXEC)?;
    sd_notify::notify_with_fds(&[NotifyState::Custom("BARRIER=1")], &[its.as_fd()])?;
    drop(its);
    let patience = Timespec::try_from(PATIENCE).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    match poll(&mut [PollFd::new(&ours, PollFlags::empty())], Some(&patience)) {
        Ok(0) => Err(io::ErrorKind::TimedOut.into()),
        Ok(_) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::dup2;
    use std::{fs::File, os::fd::AsRawFd};

    #[test]
    fn another_file_with_the_number_of_a_closed_one_is_stored() {
        let directory = tempfile::tempdir().unwrap();
        let [first, second] = ["a", "b"].map(|name| File::create(directory.path().join(name)).unwrap());
        let id = |file: &File| opened(file.as_raw_fd()).unwrap().1;
        let mut device = OwnedFd::from(File::open(directory.path().join("a")).unwrap());
        let number = device.as_raw_fd();
        // No manager listens: messages are dropped.
        let service = SystemdService::default();
        service.keep([number], || {});
        assert_eq!(*service.stored.lock(), BTreeMap::from([(number, id(&first))]));
        // A device is closed, and a file that is to be recorded gets its number.
        dup2(&second, &mut device).unwrap();
        service.keep([number], || {});
        assert_eq!(*service.stored.lock(), BTreeMap::from([(number, id(&second))]));
        service.keep([], || {});
        assert_eq!(service.stored(), 0);
        service.has([number, i32::MAX]);
        assert_eq!(*service.stored.lock(), BTreeMap::from([(number, id(&second))]));
    }
}
