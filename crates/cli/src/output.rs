//! What commands print.

use nacre_daemon::failure::Failure;
use std::io::{self, Write};

/// Prints what a command answers.
///
/// # Errors
/// An output that cannot be written; a reader who has seen enough is none.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        // Whoever reads us has seen enough (`| head`).
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.map_err(|error| Failure::io("cannot write", "the output", &error)),
    }
}
