//! Messages as lines of one JSON value each.

use super::Source;
use crate::report::printable;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;
use std::{
    io::{self, BufRead, Read, Write},
    os::unix::net::UnixStream,
};

/// Sends a line.
///
/// # Errors
/// As `write(2)`: the other side does not read it.
pub fn send(mut stream: &UnixStream, value: &impl Serialize) -> io::Result<()> {
    stream.write_all(&encode(value)?)
}

/// Encodes a message as a line.
pub(super) fn encode(value: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    Ok(line)
}

/// Receives a line; `None` at the end of the connection.
/// # Errors
/// The line is too long, not understood, or truncated.
pub fn receive<T: DeserializeOwned>(reader: &mut impl BufRead, source: Source) -> io::Result<Option<T>> {
    let mut line = Vec::new();
    reader.take(source.most).read_until(b'\n', &mut line)?;
    match line.last() {
        None => return Ok(None),
        Some(b'\n') => {}
        Some(_) if line.len() as u64 == source.most => return Err(io::ErrorKind::InvalidData.into()),
        Some(_) => return Err(io::ErrorKind::UnexpectedEof.into()),
    }
    if source.harmless {
        return Ok(Some(serde_json::from_value(harmless(serde_json::from_slice(&line)?))?));
    }
    Ok(Some(serde_json::from_slice(&line)?))
}

/// Makes every text in a value printable. Texts without control characters, nearly all, stay unchanged.
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
        let harmless = Source { most: 1 << 20, harmless: true };
        let told = b"{\"a\\u001bb\":[\"x\\u001b]0;y\\u0007\",\"back\\\\slash\",1,null,{\"n\":\"two\\nlines\"}]}\n";
        let told: Value = receive(&mut &told[..], harmless).unwrap().unwrap();
        assert_eq!(
            told,
            serde_json::json!({ "a\\x1bb": ["x\\x1b]0;y\\x07", "back\\slash", 1, null, { "n": "two\\x0alines" }] })
        );
        assert!(receive::<Value>(&mut &b""[..], harmless).unwrap().is_none());
        assert!(receive::<Value>(&mut &b"{}"[..], harmless).is_err(), "it ends in the middle");
        let short = Source { most: 4, harmless: false };
        assert!(receive::<Value>(&mut &b"[1,2]\n"[..], short).is_err(), "it is too long");
    }
}
