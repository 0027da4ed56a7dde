//! What a process that serves a mount leaves to the one that goes on with it, beside what the door
//! notes ([`nacre_fuse::Survival`]).
//!
//! Noted by [`crate::serving`], read by the next worker of the same guardian ([`crate::guardian`]).
//! Invariant: a descriptor that is noted is open as long as it is; the next worker closes all others.

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

/// What a worker knows of its guardian.
#[derive(Clone, Debug)]
pub struct Guarded {
    /// What is left to the next worker.
    pub memory: Survival,
    /// The guardian's process number.
    pub guardian: u32,
    /// What the guardian leaves to another program ([`crate::upgrade`]).
    pub handover: Arc<str>,
    /// The service that this is, whose manager keeps descriptors for its next process.
    pub service: Option<Arc<SystemdService>>,
}

impl Guarded {
    /// Notes something by which these descriptors are needed, beside the memory's own.
    pub fn note<T>(&self, descriptors: Vec<i32>, note: impl FnOnce() -> T) -> T {
        match &self.service {
            Some(service) => service.keep(descriptors.into_iter().chain(self.memory.own()), note),
            None => note(),
        }
    }
}

/// The directories that layers are of, each held by a descriptor from before anything was mounted
/// over it: by its path, the next worker might ask for the mount that it is to answer for.
#[derive(Debug, Default)]
pub struct Directories(Vec<(PathBuf, OwnedFd)>);

impl Directories {
    /// Those of a stack.
    ///
    /// # Errors
    /// One that cannot be used.
    pub fn open(spec: &StackSpec) -> Result<Directories, Failure> {
        let mut directories = Directories::default();
        spec.directories().into_iter().try_for_each(|directory| directories.hold(directory))?;
        Ok(directories)
    }

    /// Those that a process before this one held.
    ///
    /// # Errors
    /// One is not open any more.
    pub fn left(left: &Left) -> Result<Directories, Failure> {
        let taken = left.directories.iter().map(|(path, number)| {
            let path = PathBuf::from(path);
            let taken = descriptors::take_over(*number).map_err(|error| unusable_source(&path, &error))?;
            Ok((path, taken))
        });
        taken.collect::<Result<_, Failure>>().map(Directories)
    }

    /// One more, as it is now.
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

    /// Takes out those that a stack does not have any more.
    pub fn take_all_but(&mut self, spec: &StackSpec) -> Directories {
        let present = spec.directories();
        let (kept, gone) =
            std::mem::take(&mut self.0).into_iter().partition(|(path, _)| present.contains(&path.as_path()));
        self.0 = kept;
        Directories(gone)
    }

    /// By which path each is reached whatever is mounted over it.
    pub fn reached(&self) -> HashMap<PathBuf, PathBuf> {
        let path = |descriptor: &OwnedFd| PathBuf::from(format!("/proc/self/fd/{}", descriptor.as_raw_fd()));
        self.0.iter().map(|(directory, descriptor)| (directory.clone(), path(descriptor))).collect()
    }
}

/// What a worker has to know of the mount beside what the door notes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Left {
    /// The layers as they are now, in one line.
    stack: String,
    mountpoint: OsString,
    /// First column of the mount table.
    pub source: String,
    /// When it was mounted, seconds since 1970.
    pub mounted: u64,
    /// The numbers of the descriptors that hold directories.
    directories: Vec<(OsString, i32)>,
    /// Branches that are not there yet.
    pub absent: Vec<Absent>,
    /// How files move between tiers, where a union is.
    pub tier_rules: Option<String>,
    /// What a union notes ([`LeftNumbers`]).
    numbers: Vec<u64>,
    /// The control socket, once it is made.
    #[serde(default)]
    pub socket: Option<LeftSocket>,
}

impl Left {
    /// What is noted; none where this worker is the first.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn of(memory: &Survival) -> Result<Option<Left>, Failure> {
        if !memory.resumes() {
            return Ok(None);
        }
        Left::read(&memory.text().unwrap_or_default()).map(Some)
    }

    /// What is noted as this text.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn read(text: &[u8]) -> Result<Left, Failure> {
        serde_json::from_slice(text)
            .map_err(|error| Failure::new(format!("what the last process noted cannot be read: {error}")))
    }

    /// The layers.
    ///
    /// # Errors
    /// They are not understood.
    pub fn spec(&self) -> Result<StackSpec, Failure> {
        StackSpec::from_line(self.stack.as_bytes())
            .map_err(|error| Failure::new(format!("the stack that the last process noted is not understood: {error}")))
    }

    /// Where it is mounted.
    pub fn mountpoint(&self) -> PathBuf {
        PathBuf::from(&self.mountpoint)
    }

    /// When it was mounted, as far as this process can say it.
    pub fn started(&self) -> Instant {
        let age = Duration::from_secs(clock::date().saturating_sub(self.mounted));
        clock::now().checked_sub(age).unwrap_or_else(clock::now)
    }

    /// The descriptors that the next worker keeps.
    pub fn descriptors(&self) -> Vec<i32> {
        let socket = self.socket.iter().map(|socket| socket.descriptor);
        self.directories.iter().map(|(_, number)| *number).chain(socket).collect()
    }

    /// The layers are these, in these directories.
    pub fn set_layers(&mut self, spec: &StackSpec, directories: &Directories) {
        self.stack = spec.to_line();
        let number = |(path, held): &(PathBuf, OwnedFd)| (path.as_os_str().to_owned(), held.as_raw_fd());
        self.directories = directories.0.iter().map(number).collect();
    }
}

/// What is noted, by whom it is kept in step. Until the mount is made nothing is written: nobody
/// could go on.
#[derive(Debug)]
pub struct Notes {
    guarded: Guarded,
    now: Mutex<Left>,
}

impl Notes {
    /// Those of a process before this one; empty where it is the first.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn of(guarded: &Guarded) -> Result<Notes, Failure> {
        let now = Left::of(&guarded.memory)?.unwrap_or_default();
        Ok(Notes { guarded: guarded.clone(), now: Mutex::new(now) })
    }

    /// A mount has been made.
    pub fn begin(&self, mountpoint: &Path, source: &str, (spec, directories): (&StackSpec, &Directories)) {
        self.change(|left| {
            (left.mountpoint, left.source) = (mountpoint.as_os_str().to_owned(), source.to_owned());
            left.mounted = clock::date();
            left.set_layers(spec, directories);
        });
    }

    /// Something has changed.
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
