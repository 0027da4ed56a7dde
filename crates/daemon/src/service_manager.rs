//! The service manager that started this process as a service, where there is one (systemd(1)): it is told when
//! a mount or a pool answers, and given the descriptors of one that outlives its process.
//!
//! Used by [`crate::guardian`] and the workers that it makes. What the manager keeps (sd_notify(3), `FDSTORE=1`;
//! `FileDescriptorStoreMax=` in the unit) it hands to the service's next process, however the last ones ended:
//! [`left`] finds it there. Each descriptor is kept under a name with its number, and gets that number again, so
//! that what is noted of it is true in the next process as well. Kept are all that are noted
//! ([`crate::left`], [`crate::pool::left`]), but none of open files: these are opened anew.
//!
//! Invariant: a descriptor is with the manager before it is noted, and until it is noted no more.

use crate::{background, clock, failure::Failure, guardian::NEED_NO_END, handover::Handover, report::tell};
use nacre_fuse::Survival;
use nacre_sys::descriptors;
use parking_lot::Mutex;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{MemfdFlags, memfd_create},
    pipe::{PipeFlags, pipe_with},
};
use sd_notify::NotifyState;
use std::{
    collections::BTreeSet,
    fs::File,
    io::{self, Write},
    os::{
        fd::{AsFd, BorrowedFd, IntoRawFd},
        unix::fs::FileExt,
    },
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
/// So long may processes before this one take until they are dead, and how often that is looked at.
const DYING: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(20);

/// The manager of the service that this process is.
#[derive(Debug)]
pub struct ServiceManager {
    /// The numbers of the descriptors that it has.
    stored: Mutex<BTreeSet<i32>>,
}

impl ServiceManager {
    /// The manager, if it started this very process: one that a service calls by the way does not speak for
    /// that.
    pub fn of_this_process() -> Option<ServiceManager> {
        let started = std::env::var(STARTED).ok()?.parse::<u32>().ok()?;
        let is_service = started == std::process::id() && std::env::var_os(SOCKET).is_some();
        is_service.then(|| ServiceManager { stored: Mutex::default() })
    }

    /// The workers of this process speak for the service as well. Before systemd 254 that has to be in the unit
    /// (`NotifyAccess=all`).
    pub fn admit_workers(&self) {
        told(sd_notify::notify(&[NotifyState::Custom("NOTIFYACCESS=all")]));
    }

    /// The service does what it is for (`Type=notify`).
    pub fn ready(&self) {
        told(sd_notify::notify(&[NotifyState::Ready]));
    }

    /// How many descriptors it was given.
    pub fn stored(&self) -> usize {
        self.stored.lock().len()
    }

    /// It has these of a process before this one.
    pub fn has(&self, numbers: impl IntoIterator<Item = i32>) {
        *self.stored.lock() = numbers.into_iter().collect();
    }

    /// Gives it these descriptors, before they are noted, and takes all others back, when they are.
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

    /// Gives it what the service's next process needs to go on.
    pub fn keep_handover(&self, text: &str) {
        let kept = memfd_create(c"nacre-handover", MemfdFlags::CLOEXEC).map_err(io::Error::from).and_then(|file| {
            let mut file = File::from(file);
            file.write_all(text.as_bytes())?;
            store(HANDOVER, file.as_fd())
        });
        told(kept);
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

/// What the service's last process left with the manager for this one, if it did: to be called before this
/// process opens anything.
///
/// # Errors
/// The last process serves still.
pub fn left() -> Option<Result<Handover, Failure>> {
    let given = sd_notify::listen_fds_with_names().ok()?;
    let ours = given.filter_map(|(number, name)| Some((number, name.strip_prefix(PREFIX)?.to_owned())));
    let ours: Vec<(i32, String)> = ours.collect();
    if ours.is_empty() {
        return None;
    }
    // For the numbers that the last process had.
    background::settle();
    match take(&ours) {
        Ok(handover) => Some(Ok(handover)),
        Err(WhyNot::ServesStill(process)) => {
            let what = format!("process {process} of this service serves still");
            Some(Err(Failure::new(what).next("KillMode=mixed in the unit has it ended with the service")))
        }
        Err(WhyNot::Over(why)) => {
            tell(&format!(
                "nacre: what the last process of this service left is not gone on with, it begins anew: {why}"
            ));
            told(ours.iter().try_for_each(|(_, name)| remove(name)));
            told(descriptors::close_all_from_but(3, &[]));
            None
        }
    }
}

/// Why nobody goes on with what the last process left.
enum WhyNot {
    /// This process serves still.
    ServesStill(u32),
    /// What is left is of no use.
    Over(String),
}

impl From<io::Error> for WhyNot {
    fn from(error: io::Error) -> WhyNot {
        WhyNot::Over(error.to_string())
    }
}

impl From<Failure> for WhyNot {
    fn from(failure: Failure) -> WhyNot {
        WhyNot::Over(failure.what)
    }
}

fn over(why: &str) -> WhyNot {
    WhyNot::Over(why.to_owned())
}

/// Gives all of it its place.
fn take(ours: &[(i32, String)]) -> Result<Handover, WhyNot> {
    let (text, numbered): (Vec<_>, Vec<_>) = ours.iter().partition(|(_, name)| name == HANDOVER);
    let (number, _) = text.first().ok_or_else(|| over("no handover is among it"))?;
    let text = descriptors::take_over(*number).and_then(|file| read(&file.into()))?;
    let pairs = numbered.iter().filter_map(|(from, name)| Some((*from, name.parse().ok().filter(|to| *to > 2)?)));
    descriptors::renumber(&pairs.collect::<Vec<(i32, i32)>>())?;
    let handover = Handover::read(&text)?;
    let memory = descriptors::another(handover.memory).and_then(Survival::taken_over);
    let memory = memory.map_err(|error| over(&format!("its memory cannot be read: {error}")))?;
    if memory.has_ended() || !memory.can_resume() {
        return Err(over(&memory.why_not().unwrap_or_else(|| "it had ended".to_owned())));
    }
    let worker = memory.worker().ok_or_else(|| over("nobody had served yet"))?;
    let dead = clock::look_until(DYING, LOOK, || worker.runs(&NEED_NO_END).is_ok_and(|runs| !runs));
    if !dead {
        return Err(WhyNot::ServesStill(worker.number));
    }
    memory.lost_open_files();
    let needed = handover.served.needed(&memory)?;
    let noted = handover.served.noted(&memory)?;
    let device = memory.device();
    // Its descriptor here may have the number of one that is missing.
    drop(memory);
    let missing = descriptors::missing(needed.into_iter().chain(device));
    if !missing.is_empty() {
        let lacks = format!("it lacks {} descriptors: FileDescriptorStoreMax= may be too small", missing.len());
        return Err(over(&lacks));
    }
    // What else is noted would be taken for what this process opens next.
    for number in descriptors::missing(noted.into_iter()) {
        let nothing = File::open("/dev/null")?.into_raw_fd();
        if nothing != number {
            descriptors::renumber(&[(nothing, number)])?;
        }
    }
    Ok(handover)
}

fn read(file: &File) -> io::Result<String> {
    let length = usize::try_from(file.metadata()?.len()).map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
    let mut text = vec![0; length];
    file.read_exact_at(&mut text, 0)?;
    String::from_utf8(text).map_err(|_| io::ErrorKind::InvalidData.into())
}
