//! What the manager of a service (systemd(1)) is told and given, where this process is one: when a mount or a
//! pool answers, and the descriptors of one that outlives its process.
//!
//! Used by [`crate::guardian`], the workers that it makes, and whoever serves. What the manager keeps (sd_notify(3),
//! `FDSTORE=1`; `FileDescriptorStoreMax=` in the unit) it hands to the service's next process, however the last ones
//! ended ([`left`]). Each descriptor is kept under a name with its number, and gets that number again, so
//! that what is noted of it is true in the next process as well. Kept are all that are noted
//! ([`crate::left`], [`crate::pool::left`]), but none of open files: these are opened anew.
//!
//! Invariant: a descriptor is with the manager before it is noted, and until it is noted no more.

pub mod left;

use crate::{background, failure::Failure, memory_file};
use nacre_sys::descriptors;
use parking_lot::Mutex;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    pipe::{PipeFlags, pipe_with},
};
use sd_notify::NotifyState;
use std::{
    collections::BTreeSet,
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
    time::Duration,
};

/// Which process the manager has started: this one, or one that called it.
const STARTED: &str = "SYSTEMD_EXEC_PID";
/// Where the manager listens.
const SOCKET: &str = "NOTIFY_SOCKET";
/// What the names of descriptors begin with.
const PREFIX: &str = "nacre-";
/// The name of the handover's, behind that.
const HANDOVER: &str = "handover";
/// So long may the manager take to read what it was sent.
const PATIENCE: Duration = Duration::from_secs(5);

/// The service that this process is, and its workers.
#[derive(Debug)]
pub struct SystemdService {
    /// The numbers of the descriptors that its manager has.
    stored: Mutex<BTreeSet<i32>>,
}

impl SystemdService {
    /// The service, if its manager started this very process: one that a service calls by the way does not speak
    /// for that.
    pub fn of_this_process() -> Option<Arc<SystemdService>> {
        let started = std::env::var(STARTED).ok()?.parse::<u32>().ok()?;
        let is_service = started == std::process::id() && std::env::var_os(SOCKET).is_some();
        is_service.then(|| Arc::new(SystemdService { stored: Mutex::default() }))
    }

    /// The workers of this process speak for the service as well. Before systemd 254 that has to be in the unit
    /// (`NotifyAccess=all`).
    pub fn admit_workers(&self) {
        told(sd_notify::notify(&[NotifyState::Custom("NOTIFYACCESS=all")]));
    }

    /// Reports that a mount or a pool answers: to the command that started this process in the `background`, or to
    /// the service manager. A process that `goes_on` reports it again, because the one before it may have died before it
    /// could.
    ///
    /// # Errors
    /// The command does not wait any more, and this process does not go on after another one.
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

    /// How many descriptors the manager was given.
    pub fn stored(&self) -> usize {
        self.stored.lock().len()
    }

    /// The manager has these of a process before this one.
    pub fn has(&self, numbers: impl IntoIterator<Item = i32>) {
        *self.stored.lock() = numbers.into_iter().collect();
    }

    /// Gives the manager these descriptors, before they are noted, and takes all others back, when they are.
    pub fn keep<T>(&self, numbers: impl IntoIterator<Item = i32>, note: impl FnOnce() -> T) -> T {
        let mut stored = self.stored.lock();
        let now: BTreeSet<i32> = numbers.into_iter().collect();
        let new: Vec<i32> = now.difference(&stored).copied().collect();
        for number in &new {
            // A device that the pool has let go of is noted still.
            let Ok(descriptor) = descriptors::another(*number) else { continue };
            told(store(&number.to_string(), descriptor.as_fd()));
        }
        if !new.is_empty() {
            told(wait_until_read());
        }
        let done = note();
        told(stored.difference(&now).try_for_each(|number| remove(&number.to_string())));
        *stored = now;
        done
    }

    /// Gives the manager what the service's next process needs to go on.
    pub fn keep_handover(&self, text: &str) {
        let file = memory_file::write(c"nacre-handover", text.as_bytes());
        told(file.and_then(|file| store(HANDOVER, file.as_fd())));
    }

    /// Takes all back: there is nothing to go on with.
    pub fn take_back(&self) {
        let mut stored = self.stored.lock();
        let names = std::mem::take(&mut *stored).into_iter().map(|number| number.to_string());
        told(names.chain([HANDOVER.to_owned()]).try_for_each(|name| remove(&name)).and_then(|()| wait_until_read()));
    }
}

/// Files matter more than the next process of the service.
fn told(result: io::Result<()>) {
    if let Err(error) = result {
        tracing::warn!(%error, "the service manager cannot be told");
    }
}

/// Has the manager keep a descriptor under this name, instead of what it may have of that name.
fn store(name: &str, descriptor: BorrowedFd<'_>) -> io::Result<()> {
    remove(name)?;
    let name = format!("{PREFIX}{name}");
    // Otherwise it takes out the device of a mount that somebody unmounts, and does not say so.
    let not_watched = NotifyState::Custom("FDPOLL=0");
    sd_notify::notify_with_fds(&[NotifyState::FdStore, NotifyState::FdName(&name), not_watched], &[descriptor])
}

fn remove(name: &str) -> io::Result<()> {
    sd_notify::notify(&[NotifyState::FdStoreRemove, NotifyState::FdName(&format!("{PREFIX}{name}"))])
}

/// Returns when the manager has read what it was sent: what dead processes have sent it does not know to be the
/// service's (sd_notify_barrier(3)).
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
