//! Requests and answers between commands and background processes: those that serve mounts, those that serve
//! several ([`crate::shared`]), and those that own pools.
//!
//! A caller connects to a Unix socket in the directory of its owner ([`crate::runtime`]) and sends requests; the
//! answer to each is any number of notes, then a result or a [`Failure`]: one JSON value a line ([`line`]). Only
//! root and the owner of the process are served, identified by the kernel (`SO_PEERCRED`; [`endpoint`]). Bytes of
//! streams of snapshots go over the same connection ([`stream`]): when either side dies, the other sees the end of
//! the connection. Neither side trusts the other: lines have a maximum length, waiting has a deadline
//! ([`deadline`]), and texts of another user's process are made printable before they are shown.

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

/// Message of the serving side.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Message<A> {
    /// Progress or a remark; more messages follow.
    Note(String),
    /// This number of bytes of a stream follows this line, then more messages; 0: the process awaits bytes of a
    /// stream, in chunks that begin with their length ([`stream`]).
    Bytes(u64),
    /// Result of the request.
    Answer(A),
    /// Failure: why the request was not carried out.
    Failed(Failure),
}

/// Why a call has no result.
#[derive(Debug)]
pub enum CallError {
    /// The process cannot be reached, sends something that is not understood, or does not answer in time.
    Unreachable(io::Error),
    /// The process ended before it answered.
    Ended,
    /// The process refuses the request.
    Failed(Failure),
}

impl From<io::Error> for CallError {
    fn from(error: io::Error) -> CallError {
        match error.kind() {
            // The request was not read any more, or a line or a stream was truncated.
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
    /// Makes the failure for a call to the process that is `doing` something (`serves`, `owns the pool at`) for
    /// `subject`.
    pub fn failure(self, doing: &str, subject: impl fmt::Display) -> Failure {
        let failed = |error: &io::Error| Failure::io(&format!("cannot reach the process that {doing}"), subject, error);
        match self {
            CallError::Unreachable(error) => failed(&error),
            CallError::Ended => failed(&io::ErrorKind::UnexpectedEof.into()).exit(Exit::Failure),
            CallError::Failed(failure) => failure,
        }
    }
}

/// Receives the messages for one request; notes are shown as they arrive. Texts are made printable only if the
/// source is not trusted.
///
/// # Errors
/// As described at [`CallError`].
pub fn answer<A: DeserializeOwned>(
    reader: &mut impl BufRead,
    source: Source,
    note: &mut dyn FnMut(&str),
) -> Result<A, CallError> {
    let nobody = &mut |_: &mut dyn BufRead, _: u64| Err(io::ErrorKind::InvalidData.into());
    answer_with(reader, source, note, nobody)
}

/// Receives the messages for one request; `bytes` takes those of a stream from the reader, or begins to send them.
///
/// # Errors
/// As [`answer`], and errors of `bytes`.
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

/// Limits on lines of a sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// Longest line that is accepted, in bytes.
    pub most: u64,
    /// Control characters in texts are made printable, since the sender is not trusted.
    pub harmless: bool,
}

impl Source {
    /// Commands, for a background process.
    pub const COMMAND: Source = Source { most: REQUEST_MAX, harmless: false };
    /// Our own processes, for a command.
    pub const OWN: Source = Source { most: ANSWER_MAX, harmless: false };

    /// A process of another user, or one of ours, for a command.
    #[must_use]
    pub fn process(foreign: bool) -> Source {
        if foreign { Source { most: FOREIGN_ANSWER_MAX, harmless: true } } else { Source::OWN }
    }
}
