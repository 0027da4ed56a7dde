//! Lines between commands and the process that owns a pool: one JSON value each.

use serde::{Serialize, de::DeserializeOwned};
use std::{
    io::{self, BufRead, Read, Write},
    os::unix::net::UnixStream,
};

/// The longest order, bytes.
pub const ORDER_MAX: u64 = 4 << 20;
/// The longest answer, bytes: a list of some million snapshots.
pub const ANSWER_MAX: u64 = 1 << 30;

/// Sends a line.
///
/// # Errors
/// Nobody reads it.
pub fn send(mut stream: &UnixStream, value: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    stream.write_all(&line)
}

/// Receives a line of at most so many bytes; `None` at the end of the connection.
///
/// # Errors
/// Something that is not understood, or ends in the middle.
pub fn receive<T: DeserializeOwned>(reader: &mut impl BufRead, most: u64) -> io::Result<Option<T>> {
    let mut line = Vec::new();
    reader.take(most).read_until(b'\n', &mut line)?;
    match line.last() {
        None => Ok(None),
        Some(b'\n') => Ok(Some(serde_json::from_slice(&line)?)),
        Some(_) => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}
