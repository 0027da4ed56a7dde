//! Text in a memory file (memfd), which every process with its descriptor can read.
//!
//! Called by [`crate::service`] and [`crate::pool::left`]. A text is never changed: another text is another file.

use rustix::fs::{MemfdFlags, memfd_create};
use std::{
    ffi::CStr,
    fs::File,
    io::{self, Write},
    os::unix::fs::FileExt,
};

/// Makes a file with this text; `name` shows in `/proc/PID/fd`.
///
/// # Errors
/// As `memfd_create(2)` and `write(2)`.
pub fn write(name: &CStr, text: &[u8]) -> io::Result<File> {
    let mut file = File::from(memfd_create(name, MemfdFlags::CLOEXEC)?);
    file.write_all(text)?;
    Ok(file)
}

/// Reads the whole text, independent of the file offset that is shared with other processes.
///
/// # Errors
/// As `fstat(2)` and `pread(2)`.
pub fn read(file: &File) -> io::Result<Vec<u8>> {
    let length = usize::try_from(file.metadata()?.len()).map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
    let mut text = vec![0; length];
    file.read_exact_at(&mut text, 0)?;
    Ok(text)
}
