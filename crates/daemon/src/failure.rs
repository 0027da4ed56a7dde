//! What went wrong, for people and for scripts: a sentence, what to do next, and an exit code.
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
    /// Asked for something that could not be done.
    Failure = 1,
    /// The command line itself is wrong (called as bindfs, fuse-overlayfs or mergerfs, the program says 1
    /// here, as these do).
    Usage = 2,
    /// What was named is not there: no such source, mount point or mount.
    NotFound = 3,
    /// Not allowed to this user.
    Denied = 4,
    /// Somebody uses it.
    Busy = 5,
}

/// Why the program ends without having done what was asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// What failed, on what, and why.
    pub what: String,
    /// What to do next; may be empty.
    pub next: String,
    /// The exit code.
    pub exit: Exit,
}

impl Failure {
    /// A wrong command line.
    pub fn usage(what: impl Into<String>) -> Failure {
        Failure { what: what.into(), next: String::new(), exit: Exit::Usage }
    }

    /// Anything else that went wrong.
    pub fn new(what: impl Into<String>) -> Failure {
        Failure { what: what.into(), next: String::new(), exit: Exit::Failure }
    }

    /// A call on `subject` that the system refused; the exit code follows the reason.
    pub fn io(doing: &str, subject: impl fmt::Display, error: &std::io::Error) -> Failure {
        Failure::new(format!("{doing} {subject}: {}", reason(error))).because(error.kind())
    }

    /// Adds what to do next.
    #[must_use]
    pub fn next(mut self, next: impl Into<String>) -> Failure {
        self.next = next.into();
        self
    }

    /// Chooses another exit code.
    #[must_use]
    pub fn exit(mut self, exit: Exit) -> Failure {
        self.exit = exit;
        self
    }

    /// Chooses the exit code of a reason.
    #[must_use]
    pub fn because(self, kind: ErrorKind) -> Failure {
        self.exit(match kind {
            ErrorKind::NotFound => Exit::NotFound,
            ErrorKind::PermissionDenied => Exit::Denied,
            ErrorKind::ResourceBusy => Exit::Busy,
            _ => Exit::Failure,
        })
    }

    /// The same of a process that is not trusted: nothing in it moves a terminal.
    #[must_use]
    pub fn printable(self) -> Failure {
        let line = |text: &str| crate::report::printable(text.as_bytes());
        let next: Vec<String> = self.next.lines().map(line).collect();
        Failure { what: line(&self.what), next: next.join("\n"), exit: self.exit }
    }

    /// Why layers cannot be put together.
    pub fn of_stack(what: impl fmt::Display, reason: Option<Errno>) -> Failure {
        let failure = Failure::new(what.to_string());
        match reason {
            Some(errno) => failure.because(std::io::Error::from_raw_os_error(errno.raw()).kind()),
            None => failure,
        }
    }

    /// Prints `PROGRAM: what` and what to do next to standard error; answers the exit code.
    pub fn report(&self, program: &str) -> ExitCode {
        // ZFS' programs do not say their names, and scripts compare.
        let name = if matches!(program, "zfs" | "zpool") { String::new() } else { format!("{program}: ") };
        let mut text = format!("{name}{}\n", self.what);
        if !self.next.is_empty() {
            text.push_str(&format!("{name}{}\n", self.next));
        }
        // Nobody is left to tell when standard error is closed.
        let _ = std::io::stderr().lock().write_all(text.as_bytes());
        ExitCode::from(self.code(program))
    }

    /// The exit code as a number, for the program of this name.
    pub fn code(&self, program: &str) -> u8 {
        match (program, self.exit) {
            ("bindfs" | "fuse-overlayfs" | "mergerfs", _) => 1,
            // 1 for whatever failed, 2 for a wrong call.
            ("zfs" | "zpool", exit) if exit != Exit::Usage => 1,
            // mount(8) expects its own codes from its programs: 1 for a wrong call, 32 for a mount
            // that failed.
            (program, Exit::Usage) if program.starts_with("mount.") => 1,
            (program, _) if program.starts_with("mount.") => 32,
            (_, exit) => exit as u8,
        }
    }
}

/// The system's own words for an error, without the number that the standard library adds.
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
