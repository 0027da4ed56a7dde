//! Start parameters of a process that owns a pool: create or import it, its devices, and options.
//!
//! Written by the commands, passed in the environment, read by [`super::process`].

use crate::{background, failure::Failure};
use serde::{Deserialize, Serialize};
use std::{
    ffi::{OsStr, OsString},
    path::PathBuf,
    process::ExitCode,
};

/// Program name if it was called as `zpool`.
pub const ZPOOL: &str = "zpool";

/// Environment variable with the parameters.
const NAME: &str = "NACRE_POOL";

/// How the pool gets imported.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum How {
    /// The pool is created.
    Create {
        /// Length in bytes of files that are made; without, they have to exist.
        size: Option<u64>,
        /// Also use devices with other content.
        force: bool,
        /// Properties of the pool's root dataset.
        properties: Vec<(String, String)>,
        /// Groups that the devices are in, one after the other: ZFS' name for the kind of vdev, and the number of
        /// devices.
        #[serde(default)]
        groups: Vec<(String, usize)>,
    },
    /// The pool is imported.
    Import {
        /// Name on its labels.
        old: String,
        /// Nothing is written.
        read_only: bool,
        /// Rewind to the state after this txg.
        txg: Option<u64>,
        /// Rewind to the newest readable state if the last one cannot be read.
        rewind: bool,
        /// The new name applies to this import only.
        temporary: bool,
        /// Ignore all objections except damage.
        #[serde(default)]
        force: bool,
        /// Trust its content, even if other users can write to its devices.
        #[serde(default)]
        trusted: bool,
        /// Also if devices of the intent log are missing.
        #[serde(default)]
        without_log: bool,
    },
}

/// Start parameters of a pool's process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    /// Name that the pool gets.
    pub name: String,
    /// Devices of the pool.
    pub devices: Vec<PathBuf>,
    /// Create or import.
    pub how: How,
    /// Properties of the pool.
    pub properties: Vec<(String, String)>,
    /// Directory that all mount points are below.
    pub altroot: Option<PathBuf>,
    /// Whether its datasets are mounted.
    pub mount: bool,
    /// Limit of the cache in bytes.
    pub cache: u64,
    /// The command line, for the pool's history.
    pub command: String,
    /// If this process is killed, another one takes over.
    #[serde(default)]
    pub survive: bool,
    /// Serve in this process, in the foreground.
    #[serde(default)]
    pub foreground: bool,
}

/// Returns the name by which the program was called, from a command line in a pool's history.
pub fn program(command: &str) -> &'static str {
    match command.split(' ').next() {
        Some(crate::pool::start::ZPOOL) => crate::pool::start::ZPOOL,
        _ => "nacre",
    }
}

/// Returns the parameters that this process was started with, if any.
///
/// # Errors
/// They are not understood.
pub fn order() -> Option<Result<Start, Failure>> {
    let text = std::env::var(NAME).ok().filter(|_| background::is_started())?;
    Some(
        serde_json::from_str(&text)
            .map_err(|error| Failure::new(format!("the order to own a pool is not understood: {error}"))),
    )
}

impl Start {
    /// Returns the name by which the program was called.
    pub fn program(&self) -> &'static str {
        program(&self.command)
    }

    /// Starts the process and waits until it answers, or becomes it. The process prints its own failures.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(&self) -> Result<ExitCode, Failure> {
        let order = serde_json::to_string(self)
            .map_err(|error| Failure::new(format!("cannot write down what is to be done: {error}")))?;
        // Shown in lists of processes.
        let arguments = [OsString::from("pool"), OsString::from(format!("serve={}", self.name))];
        if self.foreground {
            return Err(background::instead(OsStr::new("nacre"), arguments.into_iter(), &[(NAME, &order)]));
        }
        Ok(match background::spawn(OsStr::new("nacre"), arguments.into_iter(), &[(NAME, &order)])? {
            background::Started::Ready => ExitCode::SUCCESS,
            background::Started::Failed(code) => ExitCode::from(code),
        })
    }
}
