//! What a process that serves a mount leaves to the one that goes on with it, beside what the door
//! notes ([`nacre_fuse::Survival`]).
//!
//! Noted by [`crate::serving`], read by the next worker of the same guardian ([`crate::guardian`]).

use crate::{clock, failure::Failure};
use nacre_fuse::Survival;
use nacre_stack::spec::StackSpec;
use serde::{Deserialize, Serialize};
use std::{
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
    /// The directory at the bottom of the stack, from before anything was mounted over it.
    pub leaf: Arc<OwnedFd>,
    /// What the guardian leaves to another program ([`crate::upgrade`]).
    pub handover: Arc<str>,
}

impl Guarded {
    /// By which path the directory is reached whatever is mounted over it.
    pub fn leaf_path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.leaf.as_raw_fd()))
    }
}

/// What a worker has to know of the mount beside what the door notes.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Left {
    /// The layers as they are now, in one line.
    stack: String,
    mountpoint: OsString,
    /// First column of the mount table.
    pub source: String,
    /// When it was mounted, seconds since 1970.
    pub mounted: u64,
}

impl Left {
    /// Of a mount that has just been made.
    pub fn new(spec: &StackSpec, mountpoint: &Path, source: &str) -> Left {
        let (mountpoint, source) = (mountpoint.as_os_str().to_owned(), source.to_owned());
        Left { stack: spec.to_line(), mountpoint, source, mounted: clock::date() }
    }

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

    /// Notes it, of a mount with these layers.
    pub fn note(&self, spec: &StackSpec, memory: &Survival) {
        let same = self.spec().is_ok_and(|read| read == *spec);
        match serde_json::to_vec(self) {
            Ok(text) if same && memory.set_text(&text) => {}
            _ => memory.give_up("its layers cannot be noted"),
        }
    }

    /// Notes that the layers have changed.
    pub fn change(memory: &Survival, spec: &StackSpec) {
        match memory.text().and_then(|text| serde_json::from_slice::<Left>(&text).ok()) {
            Some(left) => Left { stack: spec.to_line(), ..left }.note(spec, memory),
            None => memory.give_up("what was noted of it cannot be read"),
        }
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
}
