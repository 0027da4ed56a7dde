//! The mounts that one process serves, and the check whether one more may join.
//!
//! Used by [`super::process`] and, for changes of a mounted union, by [`crate::serving`]. Invariant: no two seats
//! conflict ([`reach`]), including those of mounts that are still being made.

use super::reach::{self, MountReach, Reach};
use crate::union::requests;
use crate::{
    failure::{Exit, Failure},
    mountinfo,
    serving::Serving,
    union::requests::UnionRequest,
};
use nacre_layers::host;
use nacre_stack::spec::{BranchSpec, StackSpec};
use nacre_union::BranchMode;
use parking_lot::Mutex;
use std::{
    path::{Path, PathBuf},
    sync::{Arc, Weak},
};

/// Limit of threads for io_uring, counted before any mount is busy: further mounts use the device, since rings need
/// a thread for each CPU.
const RING_THREADS_MAX: usize = 512;

/// The mounts of a process.
#[derive(Default)]
pub struct Company {
    members: Mutex<Members>,
    /// Watcher of the directories of all mounts: one descriptor and one thread for each file system's mount.
    watching: Arc<host::WatchGroup>,
}

#[derive(Default)]
struct Members {
    last: u64,
    seats: Vec<Taken>,
}

struct Taken {
    number: u64,
    place: MountReach,
    serving: Weak<Serving>,
}

impl Members {
    /// Returns why a mount conflicts with one of the others.
    fn conflict(&self, number: u64, place: &MountReach) -> Option<String> {
        self.seats.iter().filter(|seat| seat.number != number).find_map(|seat| reach::conflict(place, &seat.place))
    }

    fn seat(&mut self, number: u64) -> Option<&mut Taken> {
        self.seats.iter_mut().find(|seat| seat.number == number)
    }
}

impl Company {
    /// Reserves a seat for a mount that is to be made, or returns why it cannot be served here.
    ///
    /// # Errors
    /// The mount that it conflicts with, in a sentence.
    pub fn join(self: &Arc<Self>, spec: &StackSpec, mountpoint: PathBuf, read_only: bool) -> Result<Seat, String> {
        let place = MountReach { mountpoint, device: None, reach: reach::of(spec, read_only) };
        let mut members = self.members.lock();
        members.last += 1;
        let number = members.last;
        match members.conflict(number, &place) {
            Some(why) => Err(why),
            None => {
                members.seats.push(Taken { number, place, serving: Weak::new() });
                Ok(Seat { company: Arc::clone(self), number, read_only })
            }
        }
    }

    /// Returns all mounts, the last one first: it may be mounted within others.
    pub fn mounts(&self) -> Vec<Arc<Serving>> {
        self.members.lock().seats.iter().rev().filter_map(|seat| seat.serving.upgrade()).collect()
    }
}

/// The seat of one mount among the others, until it is dropped.
pub struct Seat {
    company: Arc<Company>,
    number: u64,
    read_only: bool,
}

impl Seat {
    /// Returns its number, which no other mount of this process ever had.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Returns the watcher of directories of all mounts.
    pub fn watching(&self) -> Arc<host::WatchGroup> {
        Arc::clone(&self.company.watching)
    }

    /// Whether rings for all mounts would need too many threads.
    pub fn is_in_a_crowd(&self) -> bool {
        let cpus = nacre_sys::cpus::count();
        self.company.members.lock().seats.len().saturating_mul(cpus) > RING_THREADS_MAX
    }

    /// Sets the mount, once it is made.
    pub fn taken(&self, serving: &Arc<Serving>, mountpoint: &Path) {
        // Asking the mount itself would need requests.
        let table = mountinfo::read().unwrap_or_default();
        let device = table
            .iter()
            .rfind(|entry| entry.mountpoint == mountpoint)
            .map(|entry| rustix::fs::makedev(entry.device.0, entry.device.1));
        if let Some(seat) = self.company.members.lock().seat(self.number) {
            (seat.serving, seat.place.device) = (Arc::downgrade(serving), device);
        }
    }

    /// Checks, before branches change, that the changed mount would not conflict with others. Returns whether it
    /// changes at all; then [`Seat::settle`] has to follow, whether or not the change succeeds.
    ///
    /// # Errors
    /// A mount that it would conflict with.
    pub fn reserve(&self, request: &UnionRequest) -> Result<bool, Failure> {
        let (directories, mode) = match request {
            UnionRequest::Add { branch, .. } => match BranchSpec::parse(branch, BranchMode::ro()) {
                Ok(branch) => (branch.directories().into_iter().map(Path::to_owned).collect(), branch.mode.clone()),
                // The union reports the error.
                Err(_) => return Ok(false),
            },
            UnionRequest::Modify { branch, mode } => (vec![requests::named(branch.clone())], requests::mode(mode)?),
            UnionRequest::Remove { .. } => return Ok(true),
            _ => return Ok(false),
        };
        let mut members = self.company.members.lock();
        let Some(seat) = members.seat(self.number) else { return Ok(false) };
        let mut place = seat.place.clone();
        place
            .reach
            .extend(directories.iter().map(|directory| Reach::of(directory, mode.writable() && !self.read_only)));
        if let Some(why) = members.conflict(self.number, &place) {
            return Err(Failure::new(format!("this union shares a process with others (--daemon): {why}"))
                .exit(Exit::Busy)
                .next("unmount it and mount it again with a process to itself"));
        }
        if let Some(seat) = members.seat(self.number) {
            seat.place = place;
        }
        Ok(true)
    }

    /// Sets what the mount reaches from now on.
    pub fn settle(&self, spec: &StackSpec) {
        let reach = reach::of(spec, self.read_only);
        if let Some(seat) = self.company.members.lock().seat(self.number) {
            seat.place.reach = reach;
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.company.members.lock().seats.retain(|seat| seat.number != self.number);
    }
}
