//! The error type of verbs: a sentence in ZFS' words, a next step, and a kind from which a command
//! makes its exit code.

use std::fmt;
use std::io::ErrorKind;

use nacre_pool::PoolError;
use serde::{Deserialize, Serialize};

/// The kinds of refusals.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// The named object does not exist.
    NotFound,
    /// The object to be created exists already.
    Exists,
    /// The object is in use.
    Busy,
    /// The request makes no sense, or not here.
    Invalid,
    /// The pool is full.
    NoSpace,
    /// A quota or limit.
    Quota,
    /// Not allowed to this user.
    Permission,
    /// A device failed, or its content is damaged.
    Io,
    /// A device or store does not answer, or refuses to: nothing is known about its content.
    Unreachable,
}

/// Error of a verb.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// The sentence: the failed action, its object, and the reason.
    pub what: String,
    /// The next step for the user; may be empty.
    pub next: String,
    /// The kind.
    pub kind: Kind,
}

/// Whether an error leaves the content of a device or store unknown.
fn is_silent(kind: ErrorKind) -> bool {
    use ErrorKind::{
        ConnectionAborted, ConnectionRefused, ConnectionReset, HostUnreachable, NetworkDown, NetworkUnreachable,
        NotConnected, PermissionDenied, StorageFull, TimedOut,
    };
    [
        ConnectionAborted,
        ConnectionRefused,
        ConnectionReset,
        HostUnreachable,
        NetworkDown,
        NetworkUnreachable,
        NotConnected,
        PermissionDenied,
        StorageFull,
        TimedOut,
    ]
    .contains(&kind)
}

impl Refusal {
    /// A refusal of this kind.
    pub fn new(kind: Kind, what: impl Into<String>) -> Self {
        Self { what: what.into(), next: String::new(), kind }
    }

    /// Adds the next step.
    #[must_use]
    pub fn next(mut self, next: impl Into<String>) -> Self {
        self.next = next.into();
        self
    }

    /// An error of the engine while doing something: "cannot create 'p/x'".
    pub fn pool(doing: impl fmt::Display, error: &PoolError) -> Self {
        let kind = match error {
            PoolError::NoSpace => Kind::NoSpace,
            PoolError::Device { source, .. } if is_silent(source.kind()) => Kind::Unreachable,
            PoolError::Busy | PoolError::Overtaken | PoolError::Refused(_) => Kind::Invalid,
            _ => Kind::Io,
        };
        Self::new(kind, format!("{doing}: {error}"))
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl std::error::Error for Refusal {}

impl From<PoolError> for Refusal {
    fn from(error: PoolError) -> Self {
        let mut refusal = Self::pool("", &error);
        refusal.what = error.to_string();
        if let PoolError::Short { device, wanted, .. } = &error {
            refusal.kind = Kind::Invalid;
            refusal.next = format!(
                "-o readonly=on imports what is there. 'truncate -s {wanted} {device}' makes a file as long again:\nwhat was cut off reads as zeros then, and a scrub tells what is lost by that"
            );
        }
        refusal
    }
}
