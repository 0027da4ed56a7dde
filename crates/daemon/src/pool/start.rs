//! What a process that is to own a pool is told: to make it or to import it, from which devices,
//! and how.
//!
//! Written by the commands, handed over in the environment, read by [`super::process`].

use crate::{background, failure::Failure};
use serde::{Deserialize, Serialize};
use std::{
    ffi::{OsStr, OsString},
    path::PathBuf,
    process::ExitCode,
};

/// What the program says when it was called as `zpool`.
pub const ZPOOL: &str = "zpool";

/// Names what the process is to do.
const NAME: &str = "NACRE_POOL";

/// What makes the pool imported.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum How {
    /// A new pool.
    Create {
        /// Files are made with this length, bytes; without, they have to be there.
        size: Option<u64>,
        /// Also on devices that hold something else.
        force: bool,
        /// Properties of the pool's own file system.
        properties: Vec<(String, String)>,
        /// The groups that the devices are in, one after the other: what ZFS calls them, and of how
        /// many devices each is.
        #[serde(default)]
        groups: Vec<(String, usize)>,
    },
    /// One that is there.
    Import {
        /// Its name on its labels.
        old: String,
        /// Nothing is written.
        read_only: bool,
        /// Back to the state after this txg.
        txg: Option<u64>,
        /// Back to the newest state that can be read, where the last one cannot.
        rewind: bool,
        /// The new name is this import's alone.
        temporary: bool,
        /// Whatever speaks against it but damage.
        #[serde(default)]
        force: bool,
        /// What it holds is trusted, whoever can write its devices.
        #[serde(default)]
        trusted: bool,
        /// Also where devices for the intent log are missing.
        #[serde(default)]
        without_log: bool,
    },
}

/// All of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    /// The name that the pool is to have.
    pub name: String,
    /// Its devices.
    pub devices: Vec<PathBuf>,
    /// How.
    pub how: How,
    /// Properties of the pool.
    pub properties: Vec<(String, String)>,
    /// All mount points lie below it.
    pub altroot: Option<PathBuf>,
    /// Whether its file systems are mounted.
    pub mount: bool,
    /// The limit of the cache, bytes.
    pub cache: u64,
    /// The command line, for the pool's history.
    pub command: String,
    /// Another process goes on where this one is killed.
    #[serde(default)]
    pub survive: bool,
    /// The process is the one that was called.
    #[serde(default)]
    pub foreground: bool,
}

/// The name by which the program was called that has this command line in the history of a pool.
pub fn program(command: &str) -> &'static str {
    match command.split(' ').next() {
        Some(crate::pool::start::ZPOOL) => crate::pool::start::ZPOOL,
        _ => "nacre",
    }
}

/// What this process was started for, if it was.
///
/// # Errors
/// An order that is not understood.
pub fn order() -> Option<Result<Start, Failure>> {
    let text = std::env::var(NAME).ok().filter(|_| background::is_started())?;
    Some(
        serde_json::from_str(&text)
            .map_err(|error| Failure::new(format!("the order to own a pool is not understood: {error}"))),
    )
}

impl Start {
    /// By which name the program was called that asks for it.
    pub fn program(&self) -> &'static str {
        program(&self.command)
    }

    /// Starts the process and waits until it answers, or becomes it; what goes wrong is said by it.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(&self) -> Result<ExitCode, Failure> {
        let order = serde_json::to_string(self)
            .map_err(|error| Failure::new(format!("cannot write down what is to be done: {error}")))?;
        // For whoever looks at the list of processes.
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
