//! Requests to a shared process, and its answers.

use crate::{
    failure::Failure,
    log::target::LogTarget,
    plan::{CAGE_PREFIX, Door, Engine, MountPlan, Resolved, StackSource, UNION_PREFIX, Verbosity},
};
use nacre_stack::spec::StackSpec;
use serde::{Deserialize, Serialize};
use std::{
    ffi::OsString,
    path::{Path, PathBuf},
};

/// A mount to be made: a plan that does not depend on the environment of a process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MountRequest {
    program: String,
    /// In one line, which can hold any path.
    stack: String,
    mountpoint: OsString,
    prefix: String,
    door: Door,
    verbosity: Option<Verbosity>,
    log_target: Option<LogTarget>,
    daemon: Option<String>,
    /// The reason why FUSE serves the mount.
    pub reason: String,
}

/// State of a request. Lines logged meanwhile are sent as notes.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Progress {
    /// The request was read, and is being carried out; the result follows. Before this, nothing has been done.
    Accepted,
    /// The mount cannot be served by this process.
    Apart {
        /// The reason why not.
        why: String,
    },
    /// The mount answers.
    Mounted,
}

impl MountRequest {
    /// Makes the request for a plan; `None` where it cannot be serialized.
    pub fn new(plan: &MountPlan, resolved: Resolved, reason: &str) -> Option<MountRequest> {
        let Resolved { spec, mountpoint, log_target } = resolved;
        let stack = spec.to_line();
        let same = StackSpec::from_line(stack.as_bytes()).is_ok_and(|read| read == spec);
        same.then(|| MountRequest {
            program: plan.program.clone(),
            stack,
            mountpoint: mountpoint.into(),
            prefix: plan.prefix.to_owned(),
            door: plan.door.clone(),
            verbosity: plan.verbosity,
            log_target,
            daemon: plan.daemon.clone(),
            reason: reason.to_owned(),
        })
    }

    /// Returns the mount point.
    pub fn mountpoint(&self) -> &Path {
        Path::new(&self.mountpoint)
    }

    /// Returns the name by which the program was called.
    pub fn program(&self) -> &str {
        &self.program
    }

    /// Returns the plan.
    ///
    /// # Errors
    /// The stack is not understood.
    pub fn plan(&self) -> Result<MountPlan, Failure> {
        let spec = StackSpec::from_line(self.stack.as_bytes());
        let spec = spec.map_err(|error| Failure::usage(format!("the stack is not understood: {error}")))?;
        Ok(MountPlan {
            program: self.program.clone(),
            stack: StackSource::Spec(spec),
            mountpoint: PathBuf::from(&self.mountpoint),
            prefix: [UNION_PREFIX, CAGE_PREFIX].into_iter().find(|prefix| *prefix == self.prefix).unwrap_or_default(),
            door: self.door.clone(),
            engine: Engine::Fuse,
            foreground: false,
            explain: false,
            verbosity: self.verbosity,
            log_target: self.log_target.clone(),
            daemon: self.daemon.clone(),
            // The command prints that warning.
            nonempty: true,
            warnings: Vec::new(),
        })
    }
}
