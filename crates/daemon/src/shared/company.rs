//! The mounts that one process serves: who is there, and who may join.
//!
//! Used by [`super::process`] and, for changes while mounted, by [`crate::serving`]. Invariant: no
//! two seats are in conflict ([`reach`]), those included whose mounts are only being made.

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

/// With more threads than this for io_uring, counted before any mount is busy, further mounts use
/// the device: rings need a thread for each CPU.
const RING_THREADS_MAX: usize = 512;

/// The mounts of a process.
#[derive(Default)]
pub struct Company {
    members: Mutex<Members>,
    /// Directories of all mounts are watched together: one descriptor and one thread for each file
    /// system's mount.
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
    /// Why a place cannot be beside the others.
    fn conflict(&self, number: u64, place: &MountReach) -> Option<String> {
        self.seats.iter().filter(|seat| seat.number != number).find_map(|seat| reach::conflict(place, &seat.place))
    }

    fn seat(&mut self, number: u64) -> Option<&mut Taken> {
        self.seats.iter_mut().find(|seat| seat.number == number)
    }
}

impl Company {
    /// A seat for a mount that is to be made; why it cannot be here, where it cannot.
    ///
    /// # Errors
    /// A mount that it would meet, in a sentence.
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

    /// All mounts, the last one first: it may be mounted within others.
    pub fn mounts(&self) -> Vec<Arc<Serving>> {
        self.members.lock().seats.iter().rev().filter_map(|seat| seat.serving.upgrade()).collect()
    }
}

/// The place of one mount among the others, until it is dropped.
pub struct Seat {
    company: Arc<Company>,
    number: u64,
    read_only: bool,
}

impl Seat {
    /// Its number, which no other mount of this process ever had.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// What watches directories for all mounts of the process.
    pub fn watching(&self) -> Arc<host::WatchGroup> {
        Arc::clone(&self.company.watching)
    }

    /// Whether rings for all mounts would need too many threads.
    pub fn is_in_a_crowd(&self) -> bool {
        let cpus = nacre_sys::cpus::count();
        self.company.members.lock().seats.len().saturating_mul(cpus) > RING_THREADS_MAX
    }

    /// The mount is there.
    pub fn taken(&self, serving: &Arc<Serving>, mountpoint: &Path) {
        // Asking the mount itself would cost it requests.
        let table = mountinfo::read().unwrap_or_default();
        let device = table
            .iter()
            .rfind(|entry| entry.mountpoint == mountpoint)
            .map(|entry| rustix::fs::makedev(entry.device.0, entry.device.1));
        if let Some(seat) = self.company.members.lock().seat(self.number) {
            (seat.serving, seat.place.device) = (Arc::downgrade(serving), device);
        }
    }

    /// Before branches change: whether what the mount will reach can be here. Answers whether it
    /// changes at all; then [`Seat::settle`] has to follow, whatever comes of it.
    ///
    /// # Errors
    /// A mount that it would meet.
    pub fn reserve(&self, request: &UnionRequest) -> Result<bool, Failure> {
        let (directories, mode) = match request {
            UnionRequest::Add { branch, .. } => match BranchSpec::parse(branch, BranchMode::ro()) {
                Ok(branch) => (branch.directories().into_iter().map(Path::to_owned).collect(), branch.mode.clone()),
                // The union says what is wrong about it.
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

    /// What the mount reaches from now on.
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
