//! Output of commands.

use nacre_daemon::failure::Failure;
use std::io::{self, Write};

/// Prints the output of a command.
///
/// # Errors
/// An output that cannot be written; a closed pipe is no error.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        // The reader needs no more (`| head`).
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.map_err(|error| Failure::io("cannot write", "the output", &error)),
    }
}
