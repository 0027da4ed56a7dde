//! Requests and answers between commands and the processes that live on: those that serve mounts,
//! those that serve several ([`crate::shared`]), and those that own pools.
//!
//! A caller connects to a Unix socket in the directory of its owner ([`crate::runtime`]) and sends
//! requests; to each come any number of notes, then an answer or a [`Failure`]: one JSON value a
//! line ([`line`]). Only root and the owner of the process are served, by what the kernel says of
//! the other side (`SO_PEERCRED`; [`endpoint`]). Bytes of streams of snapshots go over the same
//! connection ([`stream`]): when either side dies, the other sees its end. Neither side trusts the other: lines have a longest
//! length, waiting has a limit ([`deadline`]), and what another user's process says is made
//! printable before it is shown.

pub mod deadline;
pub mod endpoint;
pub mod line;
pub mod stream;

use crate::failure::{Exit, Failure};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{
    fmt,
    io::{self, BufRead},
};

/// The longest request, bytes.
pub const REQUEST_MAX: u64 = 4 << 20;
/// The longest answer of a process of ours, bytes: a list of some million snapshots.
pub const ANSWER_MAX: u64 = 1 << 30;
/// The longest answer that is taken from another user's process, bytes.
pub const FOREIGN_ANSWER_MAX: u64 = 64 << 20;

/// What comes back.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Message<A> {
    /// How far it is, or something worth a line; more follows.
    Note(String),
    /// So many bytes of a stream follow this line, then more; 0: bytes of a stream are awaited, in
    /// pieces that begin with their length ([`stream`]).
    Bytes(u64),
    /// What was asked for.
    Answer(A),
    /// Why it was not done.
    Failed(Failure),
}

/// Why there is no answer.
#[derive(Debug)]
pub enum CallError {
    /// The process cannot be reached, says something that is not understood, or nothing in time.
    Unreachable(io::Error),
    /// The process ended before it answered.
    Ended,
    /// It refuses.
    Failed(Failure),
}

impl From<io::Error> for CallError {
    fn from(error: io::Error) -> CallError {
        match error.kind() {
            // What had been sent was not read any more, or a line or a stream was cut.
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe | io::ErrorKind::UnexpectedEof => {
                CallError::Ended
            }
            _ => CallError::Unreachable(error),
        }
    }
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CallError::Unreachable(error) => f.write_str(&crate::failure::reason(error)),
            CallError::Ended => f.write_str("it ended before it answered"),
            CallError::Failed(failure) => failure.fmt(f),
        }
    }
}

impl CallError {
    /// What became of a call to the process that is `doing` something (`serves`, `owns the pool
    /// at`) for `subject`.
    pub fn failure(self, doing: &str, subject: impl fmt::Display) -> Failure {
        let failed = |error: &io::Error| Failure::io(&format!("cannot reach the process that {doing}"), subject, error);
        match self {
            CallError::Unreachable(error) => failed(&error),
            CallError::Ended => failed(&io::ErrorKind::UnexpectedEof.into()).exit(Exit::Failure),
            CallError::Failed(failure) => failure,
        }
    }
}

/// Receives what comes back for one request; notes are shown as they come. Nothing is made
/// printable here, unless the source is not trusted.
///
/// # Errors
/// As [`CallError`] says.
pub fn answer<A: DeserializeOwned>(
    reader: &mut impl BufRead,
    source: Source,
    note: &mut dyn FnMut(&str),
) -> Result<A, CallError> {
    let nobody = &mut |_: &mut dyn BufRead, _: u64| Err(io::ErrorKind::InvalidData.into());
    answer_with(reader, source, note, nobody)
}

/// The same; `bytes` takes those of a stream from the reader, or begins to send them.
///
/// # Errors
/// As [`answer`]; those of `bytes`.
pub fn answer_with<A: DeserializeOwned>(
    reader: &mut impl BufRead,
    source: Source,
    note: &mut dyn FnMut(&str),
    bytes: &mut dyn FnMut(&mut dyn BufRead, u64) -> io::Result<()>,
) -> Result<A, CallError> {
    loop {
        match line::receive::<Message<A>>(reader, source)?.ok_or(CallError::Ended)? {
            Message::Note(line) => note(&line),
            Message::Bytes(count) => bytes(reader, count)?,
            Message::Answer(answer) => return Ok(answer),
            Message::Failed(failure) => return Err(CallError::Failed(failure)),
        }
    }
}

/// How far the sender of a line is trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// The longest line that is taken, bytes.
    pub most: u64,
    /// Control characters in any text become printable.
    pub harmless: bool,
}

impl Source {
    /// A command, as a process hears it.
    pub const COMMAND: Source = Source { most: REQUEST_MAX, harmless: false };
    /// A process of ours, as a command hears it.
    pub const OWN: Source = Source { most: ANSWER_MAX, harmless: false };

    /// The process of another user, or of ours.
    #[must_use]
    pub fn process(foreign: bool) -> Source {
        if foreign { Source { most: FOREIGN_ANSWER_MAX, harmless: true } } else { Source::OWN }
    }
}
