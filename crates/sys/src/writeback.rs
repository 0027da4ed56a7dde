//! Write-back of a file's dirty pages without the lock that fsync(2) takes and without durability.

use crate::check;
use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

/// Starts writing all dirty pages of a file and waits until they have been written.
///
/// # Errors
/// As `sync_file_range(2)`: EIO, ENOSPC where a page could not be written.
pub fn write_and_wait(file: BorrowedFd<'_>) -> io::Result<()> {
    let all = libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: plain numbers; a length of 0 means to the end.
    check(libc::c_long::from(unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, all) })).map(drop)
}

/// Starts writing the dirty pages of a range of a file, without waiting (except for a full device
/// queue).
///
/// # Errors
/// As `sync_file_range(2)`.
pub fn start(file: BorrowedFd<'_>, offset: u64, length: u64) -> io::Result<()> {
    let signed =
        |number: u64| libc::off64_t::try_from(number).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput));
    let (offset, length) = (signed(offset)?, signed(length)?);
    // SAFETY: plain numbers.
    check(libc::c_long::from(unsafe {
        libc::sync_file_range(file.as_raw_fd(), offset, length, libc::SYNC_FILE_RANGE_WRITE)
    }))
    .map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{io::Write, os::fd::AsFd};

    #[test]
    fn a_file_is_written_and_a_pipe_cannot_be() {
        let mut file =
            std::fs::File::create(std::env::temp_dir().join(format!("nacre-writeback-{}", std::process::id())))
                .unwrap();
        file.write_all(b"content").unwrap();
        start(file.as_fd(), 0, 4096).unwrap();
        assert!(start(file.as_fd(), u64::MAX, 1).is_err());
        write_and_wait(file.as_fd()).unwrap();
        std::fs::remove_file(std::env::temp_dir().join(format!("nacre-writeback-{}", std::process::id()))).unwrap();
        let (reader, _writer) = std::io::pipe().unwrap();
        assert_eq!(write_and_wait(reader.as_fd()).unwrap_err().raw_os_error(), Some(libc::ESPIPE));
    }
}
