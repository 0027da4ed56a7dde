//! Handoff state of a process that serves a mount for its successor, in addition to the state of the FUSE front end
//! ([`nacre_fuse::Survival`]).
//!
//! Recorded by [`crate::serving`], read by the next worker of the same supervisor ([`crate::guardian`]). Invariant:
//! a recorded descriptor is open as long as it is recorded; the next worker closes all others.

use crate::{
    clock, control_sockets::LeftSocket, failure::Failure, opening::unusable_source, service::SystemdService,
    union::absent::Absent,
};
use nacre_fuse::Survival;
use nacre_stack::spec::StackSpec;
use nacre_sys::descriptors;
use nacre_vfs::LeftNumbers;
use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags};
use serde::{Deserialize, Serialize};
use std::{
    collections::HashMap,
    ffi::OsString,
    os::fd::{AsRawFd, OwnedFd},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

/// Data that a worker has about its supervision.
#[derive(Clone, Debug)]
pub struct Guarded {
    /// Handoff state for the next worker.
    pub memory: Survival,
    /// The supervisor's process id.
    pub guardian: u32,
    /// State that the supervisor hands over to another program ([`crate::upgrade`]).
    pub handover: Arc<str>,
    /// The systemd service, if this is one: its manager stores descriptors for the next process.
    pub service: Option<Arc<SystemdService>>,
}

impl Guarded {
    /// Records by `note` something that needs these descriptors, in addition to the memory's own.
    pub fn note<T>(&self, descriptors: Vec<i32>, note: impl FnOnce() -> T) -> T {
        match &self.service {
            Some(service) => service.keep(descriptors.into_iter().chain(self.memory.own()), note),
            None => note(),
        }
    }
}

/// The source directories of layers, each held by a descriptor that was opened before the mount covered it: through
/// the path, the next worker might send requests to the mount that it is to serve itself.
#[derive(Debug, Default)]
pub struct Directories(Vec<(PathBuf, OwnedFd)>);

impl Directories {
    /// Opens the source directories of a stack.
    ///
    /// # Errors
    /// One of them cannot be used.
    pub fn open(spec: &StackSpec) -> Result<Directories, Failure> {
        let mut directories = Directories::default();
        spec.directories().into_iter().try_for_each(|directory| directories.hold(directory))?;
        Ok(directories)
    }

    /// Takes over the directories of the previous process.
    ///
    /// # Errors
    /// A descriptor is not open any more.
    pub fn left(left: &Left) -> Result<Directories, Failure> {
        let taken = left.directories.iter().map(|(path, number)| {
            let path = PathBuf::from(path);
            let taken = descriptors::take_over(*number).map_err(|error| unusable_source(&path, &error))?;
            Ok((path, taken))
        });
        taken.collect::<Result<_, Failure>>().map(Directories)
    }

    /// Opens one more source directory, or opens it again.
    ///
    /// # Errors
    /// It cannot be used.
    pub fn hold(&mut self, directory: &Path) -> Result<(), Failure> {
        let opened = rustix::fs::open(directory, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
        let opened = opened.map_err(|error| unusable_source(directory, &error.into()))?;
        match self.0.iter_mut().find(|(path, _)| path == directory) {
            Some((_, held)) => *held = opened,
            None => self.0.push((directory.to_owned(), opened)),
        }
        Ok(())
    }

    /// Removes and returns the directories that a stack does not use any more.
    pub fn take_all_but(&mut self, spec: &StackSpec) -> Directories {
        let present = spec.directories();
        let (kept, gone) =
            std::mem::take(&mut self.0).into_iter().partition(|(path, _)| present.contains(&path.as_path()));
        self.0 = kept;
        Directories(gone)
    }

    /// Returns for each directory the path through its descriptor, which also works if a mount covers it.
    pub fn reached(&self) -> HashMap<PathBuf, PathBuf> {
        let path = |descriptor: &OwnedFd| PathBuf::from(format!("/proc/self/fd/{}", descriptor.as_raw_fd()));
        self.0.iter().map(|(directory, descriptor)| (directory.clone(), path(descriptor))).collect()
    }
}

/// Handoff state of a mount, in addition to that of the FUSE front end.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Left {
    /// The present layers, in one line.
    stack: String,
    mountpoint: OsString,
    /// First column of the mount table.
    pub source: String,
    /// Time of the mount, seconds since 1970.
    pub mounted: u64,
    /// Numbers of the descriptors of source directories.
    directories: Vec<(OsString, i32)>,
    /// Branches that are missing at present.
    pub absent: Vec<Absent>,
    /// Rules by which files move between tiers, in a union.
    pub tier_rules: Option<String>,
    /// Numbers that a union records ([`LeftNumbers`]).
    numbers: Vec<u64>,
    /// Control socket of the mount, once it is made.
    #[serde(default)]
    pub socket: Option<LeftSocket>,
}

impl Left {
    /// Reads the handoff state; `None` where this worker is the first.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn of(memory: &Survival) -> Result<Option<Left>, Failure> {
        if !memory.resumes() {
            return Ok(None);
        }
        Left::read(&memory.text().unwrap_or_default()).map(Some)
    }

    /// Parses the handoff state.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn read(text: &[u8]) -> Result<Left, Failure> {
        serde_json::from_slice(text)
            .map_err(|error| Failure::new(format!("what the last process noted cannot be read: {error}")))
    }

    /// Returns the layers.
    ///
    /// # Errors
    /// They are not understood.
    pub fn spec(&self) -> Result<StackSpec, Failure> {
        StackSpec::from_line(self.stack.as_bytes())
            .map_err(|error| Failure::new(format!("the stack that the last process noted is not understood: {error}")))
    }

    /// Returns the mount point.
    pub fn mountpoint(&self) -> PathBuf {
        PathBuf::from(&self.mountpoint)
    }

    /// Returns the time of the mount as an `Instant`, as far as this process can represent it.
    pub fn started(&self) -> Instant {
        let age = Duration::from_secs(clock::date().saturating_sub(self.mounted));
        clock::now().checked_sub(age).unwrap_or_else(clock::now)
    }

    /// Returns the descriptors that the next worker keeps.
    pub fn descriptors(&self) -> Vec<i32> {
        let socket = self.socket.iter().map(|socket| socket.descriptor);
        self.directories.iter().map(|(_, number)| *number).chain(socket).collect()
    }

    /// Sets the layers and their source directories.
    pub fn set_layers(&mut self, spec: &StackSpec, directories: &Directories) {
        self.stack = spec.to_line();
        let number = |(path, held): &(PathBuf, OwnedFd)| (path.as_os_str().to_owned(), held.as_raw_fd());
        self.directories = directories.0.iter().map(number).collect();
    }
}

/// Handoff state that is kept up to date. Until the mount is made nothing is recorded: no process could take over.
#[derive(Debug)]
pub struct Notes {
    guarded: Guarded,
    now: Mutex<Left>,
}

impl Notes {
    /// Reads the state of the previous process; it is empty where this is the first.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn of(guarded: &Guarded) -> Result<Notes, Failure> {
        let now = Left::of(&guarded.memory)?.unwrap_or_default();
        Ok(Notes { guarded: guarded.clone(), now: Mutex::new(now) })
    }

    /// Records a mount that has been made.
    pub fn begin(&self, mountpoint: &Path, source: &str, (spec, directories): (&StackSpec, &Directories)) {
        self.change(|left| {
            (left.mountpoint, left.source) = (mountpoint.as_os_str().to_owned(), source.to_owned());
            left.mounted = clock::date();
            left.set_layers(spec, directories);
        });
    }

    /// Applies a change and records the result.
    pub fn change(&self, change: impl FnOnce(&mut Left)) {
        let mut left = self.now.lock();
        change(&mut left);
        if left.mounted == 0 {
            return;
        }
        let same = left.spec().is_ok_and(|read| read.to_line() == left.stack);
        let memory = &self.guarded.memory;
        self.guarded.note(left.descriptors(), || match serde_json::to_vec(&*left) {
            Ok(text) if same && memory.set_text(&text) => {}
            _ => memory.give_up("its layers cannot be noted"),
        });
    }
}

impl LeftNumbers for Notes {
    fn read(&self) -> Vec<u64> {
        self.now.lock().numbers.clone()
    }

    fn note(&self, numbers: &[u64]) {
        self.change(|left| left.numbers = numbers.to_vec());
    }

    fn give_up(&self, why: &str) {
        self.guarded.memory.give_up(why);
    }
}
