//! Failures for users and scripts: a sentence, what to do next, and an exit code.
//!
//! Made everywhere in this crate, printed in one place ([`Failure::report`]). The codes are
//! documented in `docs/exit-codes.md` and never change their meaning.

use nacre_vfs::Errno;
use serde::{Deserialize, Serialize};
use std::{
    fmt,
    io::{ErrorKind, Write},
    process::ExitCode,
};

/// The exit codes of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Exit {
    /// The request could not be carried out.
    Failure = 1,
    /// The command line itself is wrong (called as bindfs, fuse-overlayfs or mergerfs, the program exits with 1
    /// here, as these do).
    Usage = 2,
    /// A named thing does not exist: source, mount point or mount.
    NotFound = 3,
    /// The user has no permission.
    Denied = 4,
    /// The object is in use.
    Busy = 5,
}

/// Reason why the program ends without having carried out the request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// What failed, on which object, and why.
    pub what: String,
    /// Advice what to do next; may be empty.
    pub next: String,
    /// The exit code.
    pub exit: Exit,
}

impl Failure {
    /// Makes a failure for a wrong command line.
    pub fn usage(what: impl Into<String>) -> Failure {
        Failure { what: what.into(), next: String::new(), exit: Exit::Usage }
    }

    /// Makes any other failure.
    pub fn new(what: impl Into<String>) -> Failure {
        Failure { what: what.into(), next: String::new(), exit: Exit::Failure }
    }

    /// Makes a failure for a call on `subject` that the system refused; the exit code follows the reason.
    pub fn io(doing: &str, subject: impl fmt::Display, error: &std::io::Error) -> Failure {
        Failure::new(format!("{doing} {subject}: {}", reason(error))).because(error.kind())
    }

    /// Adds advice what to do next.
    #[must_use]
    pub fn next(mut self, next: impl Into<String>) -> Failure {
        self.next = next.into();
        self
    }

    /// Sets another exit code.
    #[must_use]
    pub fn exit(mut self, exit: Exit) -> Failure {
        self.exit = exit;
        self
    }

    /// Sets the exit code of an error kind.
    #[must_use]
    pub fn because(self, kind: ErrorKind) -> Failure {
        self.exit(match kind {
            ErrorKind::NotFound => Exit::NotFound,
            ErrorKind::PermissionDenied => Exit::Denied,
            ErrorKind::ResourceBusy => Exit::Busy,
            _ => Exit::Failure,
        })
    }

    /// Makes a failure of an untrusted process printable: no escape sequences are left in it.
    #[must_use]
    pub fn printable(self) -> Failure {
        let line = |text: &str| crate::report::printable(text.as_bytes());
        let next: Vec<String> = self.next.lines().map(line).collect();
        Failure { what: line(&self.what), next: next.join("\n"), exit: self.exit }
    }

    /// Makes a failure for layers that cannot be stacked.
    pub fn of_stack(what: impl fmt::Display, reason: Option<Errno>) -> Failure {
        let failure = Failure::new(what.to_string());
        match reason {
            Some(errno) => failure.because(std::io::Error::from_raw_os_error(errno.raw()).kind()),
            None => failure,
        }
    }

    /// Prints `PROGRAM: what` and the advice to standard error; returns the exit code.
    pub fn report(&self, program: &str) -> ExitCode {
        // ZFS' programs do not print their names, and scripts compare the output.
        let name = if matches!(program, "zfs" | "zpool") { String::new() } else { format!("{program}: ") };
        let mut text = format!("{name}{}\n", self.what);
        if !self.next.is_empty() {
            text.push_str(&format!("{name}{}\n", self.next));
        }
        // Standard error may be closed; there is no other output.
        let _ = std::io::stderr().lock().write_all(text.as_bytes());
        ExitCode::from(self.code(program))
    }

    /// Returns the exit code as a number, for the program of this name.
    pub fn code(&self, program: &str) -> u8 {
        match (program, self.exit) {
            ("bindfs" | "fuse-overlayfs" | "mergerfs", _) => 1,
            // 1 for all failures, 2 for a wrong call.
            ("zfs" | "zpool", exit) if exit != Exit::Usage => 1,
            // mount(8) expects its own codes from its programs: 1 for a wrong call, 32 for a mount
            // that failed.
            (program, Exit::Usage) if program.starts_with("mount.") => 1,
            (program, _) if program.starts_with("mount.") => 32,
            (_, exit) => exit as u8,
        }
    }
}

/// Returns the system's message for an error, without the number that the standard library adds.
pub fn reason(error: &std::io::Error) -> String {
    let text = error.to_string();
    match text.find(" (os error") {
        Some(end) => text.get(..end).unwrap_or(&text).to_owned(),
        None => text,
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl std::error::Error for Failure {}
