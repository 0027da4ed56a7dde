//! What a command asks of the process that is to serve its mount, and what that answers.

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

/// A mount to be made: a plan that depends on nothing but itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MountRequest {
    program: String,
    /// In one line, which holds any path.
    stack: String,
    mountpoint: OsString,
    prefix: String,
    door: Door,
    verbosity: Option<Verbosity>,
    log_target: Option<LogTarget>,
    daemon: Option<String>,
    /// Why it is not the kernel that serves it.
    pub reason: String,
}

/// What becomes of it. What was logged meanwhile comes as notes.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Progress {
    /// It was read, and is being carried out; the last word follows. Before this, nothing has been
    /// done.
    Accepted,
    /// It is not to be served here, because of this.
    Apart {
        /// Why.
        why: String,
    },
    /// The mount answers.
    Mounted,
}

impl MountRequest {
    /// The request for a plan; none where it cannot be written down.
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

    /// Where it is to be.
    pub fn mountpoint(&self) -> &Path {
        Path::new(&self.mountpoint)
    }

    /// The name by which the program was called that asks for it.
    pub fn program(&self) -> &str {
        &self.program
    }

    /// The plan.
    ///
    /// # Errors
    /// A stack that is not understood.
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
            // That is told by who asks for the mount.
            nonempty: true,
            warnings: Vec::new(),
        })
    }
}
