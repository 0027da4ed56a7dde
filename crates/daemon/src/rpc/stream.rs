//! The bytes of a stream of snapshots over the connection of a request.
//!
//! The process that owns a pool sends bytes after a line with their number ([`super::Message::Bytes`]). It receives
//! them in chunks that begin with their length (four bytes, little-endian; 0 is the end) after a line that requests
//! them: before that the command sends nothing, so no part of a stream is ever read as a request. Invariant: a
//! waiting side checks from time to time whether it is to end.

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Interval of checking whether to end.
const LOOK: Duration = Duration::from_millis(500);
/// Longest chunk in bytes.
const PIECE: usize = 256 << 10;

/// Receiving side of a stream, in the process that owns the pool.
#[derive(Debug, Default)]
pub struct Channel {
    /// Remaining bytes of the current chunk; `None` before the first.
    left: Option<usize>,
    ended: bool,
}

fn waits(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

/// Writes all bytes, however slowly they are read, until `ends` returns true.
pub(super) fn write(mut stream: &UnixStream, mut bytes: &[u8], ends: &dyn Fn() -> bool) -> io::Result<()> {
    stream.set_write_timeout(Some(LOOK))?;
    while !bytes.is_empty() {
        match stream.write(bytes) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(written) => bytes = bytes.get(written..).unwrap_or_default(),
            Err(error) if waits(&error) && !ends() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn read(mut stream: &UnixStream, bytes: &mut [u8], ends: &dyn Fn() -> bool) -> io::Result<usize> {
    loop {
        match stream.read(bytes) {
            Err(error) if waits(&error) && !ends() => {}
            read => return read,
        }
    }
}

impl Channel {
    /// Receives some bytes from the command; none at the end of the stream.
    ///
    /// # Errors
    /// The command is gone.
    pub(super) fn take(
        &mut self,
        stream: &UnixStream,
        buffer: &mut [u8],
        ends: &dyn Fn() -> bool,
    ) -> io::Result<usize> {
        if self.ended || buffer.is_empty() {
            return Ok(0);
        }
        stream.set_read_timeout(Some(LOOK))?;
        if self.left.unwrap_or(0) == 0 {
            let mut length = [0; 4];
            let mut have = 0;
            while let Some(rest) = length.get_mut(have..).filter(|rest| !rest.is_empty()) {
                match read(stream, rest, ends)? {
                    0 => return Err(ErrorKind::UnexpectedEof.into()),
                    some => have += some,
                }
            }
            let length = u32::from_le_bytes(length) as usize;
            self.left = Some(length);
            self.ended = length == 0;
        }
        let left = self.left.unwrap_or(0);
        let most = left.min(buffer.len());
        let Some(wanted) = buffer.get_mut(..most).filter(|wanted| !wanted.is_empty()) else { return Ok(0) };
        let some = read(stream, wanted, ends)?;
        if some == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        self.left = Some(left - some);
        Ok(some)
    }

    /// Whether the stream was requested from the command.
    pub(super) fn begun(&self) -> bool {
        self.left.is_some()
    }
}

/// Sends a stream in chunks until its end, on the command's side.
///
/// # Errors
/// The other side does not read any more, or the stream cannot be read.
pub fn pass_on(mut from: impl Read, mut to: &UnixStream) -> io::Result<()> {
    to.set_write_timeout(None)?;
    let mut piece = vec![0; 4 + PIECE];
    loop {
        let (head, content) = piece.split_at_mut(4);
        let length = match from.read(content) {
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            read => read?,
        };
        head.copy_from_slice(&(length as u32).to_le_bytes());
        to.write_all(piece.get(..4 + length).unwrap_or_default())?;
        if length == 0 {
            return Ok(());
        }
    }
}
