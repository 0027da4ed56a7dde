//! HTTP/1.1 as engines of containers speak it on a socket: one request per connection, bounded in
//! size and time.
//!
//! The deadline is that of the whole request, so a client that sends one byte at a time gains
//! nothing. httparse takes the head apart; a body has a Content-Length.

use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    time::{Duration, Instant},
};

/// Maximum length of the request line and the headers, bytes.
pub const HEAD_MAX: usize = 16 << 10;
/// Maximum length of a body, bytes.
pub const BODY_MAX: usize = 64 << 10;
/// Maximum number of headers.
const HEADERS_MAX: usize = 64;
/// Deadline for a client to send its request, and again to receive the answer.
pub const DEADLINE: Duration = Duration::from_secs(10);

/// A request.
#[derive(Debug, PartialEq, Eq)]
pub struct Request {
    /// `GET` or `POST`.
    pub method: String,
    /// The path.
    pub path: String,
    /// The body.
    pub body: Vec<u8>,
}

/// Why a request was not understood.
#[derive(Debug)]
pub enum Refusal {
    /// The connection ended, or was too slow: nobody waits for an answer.
    Gone(io::Error),
    /// Answered with this status.
    Status(u16, &'static str),
}

/// The length of a head and what it says.
struct Head {
    method: String,
    path: String,
    body_at: usize,
    body_length: usize,
}

/// Reads one request.
///
/// # Errors
/// See [`Refusal`].
pub fn read(stream: &UnixStream) -> Result<Request, Refusal> {
    let deadline = Instant::now() + DEADLINE;
    let mut bytes = Vec::new();
    let end = loop {
        let searched = bytes.len().saturating_sub(3);
        receive(stream, &mut bytes, deadline)?;
        if let Some(found) = bytes.get(searched..).and_then(|new| new.windows(4).position(|part| part == b"\r\n\r\n")) {
            break searched + found + 4;
        }
        if bytes.len() > HEAD_MAX {
            return Err(Refusal::Status(431, "the headers are too long"));
        }
    };
    if end > HEAD_MAX {
        return Err(Refusal::Status(431, "the headers are too long"));
    }
    let head = head(bytes.get(..end).unwrap_or_default())?;
    while bytes.len() < head.body_at + head.body_length {
        receive(stream, &mut bytes, deadline)?;
    }
    let body = bytes.get(head.body_at..head.body_at + head.body_length).unwrap_or_default().to_vec();
    Ok(Request { method: head.method, path: head.path, body })
}

fn head(bytes: &[u8]) -> Result<Head, Refusal> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut parsed = httparse::Request::new(&mut headers);
    let Ok(httparse::Status::Complete(body_at)) = parsed.parse(bytes) else {
        return Err(Refusal::Status(400, "this is no request of HTTP/1.1"));
    };
    let mut length = None;
    for header in parsed.headers.iter() {
        if header.name.eq_ignore_ascii_case("transfer-encoding") {
            return Err(Refusal::Status(411, "a body needs a Content-Length"));
        }
        if header.name.eq_ignore_ascii_case("content-length") {
            let digits = header.value.iter().all(u8::is_ascii_digit);
            let number = std::str::from_utf8(header.value).ok().and_then(|text| text.parse::<usize>().ok());
            match number {
                Some(number) if digits && length.is_none_or(|before| before == number) => length = Some(number),
                _ => return Err(Refusal::Status(400, "Content-Length is no number")),
            }
        }
    }
    let body_length = length.unwrap_or(0);
    if body_length > BODY_MAX {
        return Err(Refusal::Status(413, "the body is too long"));
    }
    let method = parsed.method.unwrap_or_default().to_owned();
    let path = parsed.path.unwrap_or_default().to_owned();
    Ok(Head { method, path, body_at, body_length })
}

fn receive(mut stream: &UnixStream, bytes: &mut Vec<u8>, deadline: Instant) -> Result<(), Refusal> {
    let mut piece = [0; 8 << 10];
    stream.set_read_timeout(Some(left(deadline)?)).map_err(Refusal::Gone)?;
    match stream.read(&mut piece) {
        Ok(0) => Err(Refusal::Gone(io::ErrorKind::UnexpectedEof.into())),
        Ok(length) => {
            bytes.extend_from_slice(piece.get(..length).unwrap_or_default());
            Ok(())
        }
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
        Err(error) => Err(Refusal::Gone(error)),
    }
}

/// Writes an answer, after which the connection ends.
///
/// # Errors
/// The client is gone or too slow.
pub fn answer(mut stream: &UnixStream, status: u16, kind: &str, body: &[u8]) -> Result<(), Refusal> {
    let deadline = Instant::now() + DEADLINE;
    let reason = if status == 200 { "OK" } else { "Error" };
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {status} {reason}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    let whole = [head.as_bytes(), body].concat();
    let mut rest = whole.as_slice();
    while !rest.is_empty() {
        stream.set_write_timeout(Some(left(deadline)?)).map_err(Refusal::Gone)?;
        match stream.write(rest) {
            Ok(0) => return Err(Refusal::Gone(io::ErrorKind::WriteZero.into())),
            Ok(written) => rest = rest.get(written..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(Refusal::Gone(error)),
        }
    }
    Ok(())
}

fn left(deadline: Instant) -> Result<Duration, Refusal> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(Refusal::Gone(io::ErrorKind::TimedOut.into())) } else { Ok(left) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// What is read where a client sends this and closes its side.
    fn sent(bytes: &[u8]) -> Result<Request, Refusal> {
        let (mut client, server) = UnixStream::pair().unwrap();
        let bytes = bytes.to_vec();
        let writer = std::thread::spawn(move || {
            // The reader may refuse before the end.
            let _ = client.write_all(&bytes);
            let _ = client.shutdown(std::net::Shutdown::Write);
            client
        });
        let result = read(&server);
        drop(server);
        drop(writer.join().unwrap());
        result
    }

    fn status(bytes: &[u8]) -> u16 {
        match sent(bytes) {
            Err(Refusal::Status(status, _)) => status,
            Err(Refusal::Gone(_)) => 0,
            Ok(_) => 200,
        }
    }

    #[test]
    fn requests_are_read() {
        let request =
            sent(b"POST /VolumeDriver.Get HTTP/1.1\r\nHost: x\r\ncontent-length: 4\r\n\r\n{\"\"}more").unwrap();
        let expected = Request { method: "POST".into(), path: "/VolumeDriver.Get".into(), body: b"{\"\"}".to_vec() };
        assert_eq!(request, expected);
        assert_eq!(sent(b"GET /metrics HTTP/1.0\r\n\r\n").unwrap().body, b"");
    }

    #[test]
    fn what_is_too_long_or_broken_is_refused() {
        let long = |length: usize| [b"GET / HTTP/1.1\r\nX: ".as_slice(), &vec![b'a'; length], b"\r\n\r\n"].concat();
        assert_eq!(status(&long(100)), 200);
        assert_eq!(status(&long(HEAD_MAX)), 431);
        assert_eq!(status(&long(1 << 20)), 431);
        let with = |line: &str| format!("POST / HTTP/1.1\r\n{line}\r\n\r\n").into_bytes();
        assert_eq!(status(&with("Content-Length: 65537")), 413);
        assert_eq!(status(&with("Content-Length: 99999999999999999999999999")), 400);
        assert_eq!(status(&with("Content-Length: +1")), 400);
        assert_eq!(status(&with("Content-Length: 1\r\nContent-Length: 2")), 400);
        assert_eq!(status(&with("Transfer-Encoding: chunked")), 411);
        assert_eq!(status(&with(&"A: b\r\n".repeat(HEADERS_MAX + 1))), 400);
        assert_eq!(status(b"\x16\x03\x01\x02\x00\r\n\r\n"), 400);
        assert_eq!(status(&with("Content-Length: 10")), 0, "a body that does not come");
        assert_eq!(status(b""), 0);
    }
}
