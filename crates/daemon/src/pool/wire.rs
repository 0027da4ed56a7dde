//! Lines between commands and the process that owns a pool: one JSON value each.

use crate::report::printable;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;
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
    line(reader, most)?.map(|line| Ok(serde_json::from_slice(&line)?)).transpose()
}

/// The same, with nothing in any text that a terminal would obey.
///
/// # Errors
/// As [`receive`].
pub fn receive_harmless<T: DeserializeOwned>(reader: &mut impl BufRead, most: u64) -> io::Result<Option<T>> {
    let harmless = |line: Vec<u8>| Ok(serde_json::from_value(harmless(serde_json::from_slice(&line)?))?);
    line(reader, most)?.map(harmless).transpose()
}

fn line(reader: &mut impl BufRead, most: u64) -> io::Result<Option<Vec<u8>>> {
    let mut line = Vec::new();
    reader.take(most).read_until(b'\n', &mut line)?;
    match line.last() {
        None => Ok(None),
        Some(b'\n') => Ok(Some(line)),
        Some(_) => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// Makes every text in it printable. Texts without control characters, as nearly all are, stay as
/// they are.
fn harmless(value: Value) -> Value {
    let text = |text: String| if text.contains(char::is_control) { printable(text.as_bytes()) } else { text };
    match value {
        Value::String(string) => Value::String(text(string)),
        Value::Array(values) => Value::Array(values.into_iter().map(harmless).collect()),
        Value::Object(fields) => {
            Value::Object(fields.into_iter().map(|(name, value)| (text(name), harmless(value))).collect())
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_has_nothing_to_obey() {
        let told = b"{\"a\\u001bb\":[\"x\\u001b]0;y\\u0007\",\"back\\\\slash\",1,null,{\"n\":\"two\\nlines\"}]}\n";
        let told: Value = receive_harmless(&mut &told[..], 1 << 20).unwrap().unwrap();
        assert_eq!(
            told,
            serde_json::json!({ "a\\x1bb": ["x\\x1b]0;y\\x07", "back\\slash", 1, null, { "n": "two\\x0alines" }] })
        );
        assert!(receive_harmless::<Value>(&mut &b""[..], 1 << 20).unwrap().is_none());
        assert!(receive_harmless::<Value>(&mut &b"{}"[..], 1 << 20).is_err(), "it ends in the middle");
    }
}
