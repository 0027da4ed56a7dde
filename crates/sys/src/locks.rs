//! Byte-range locks that belong to an open file (`F_OFD_*`), so that a server can hold locks for
//! many owners.

use crate::check;
use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

/// The kind of a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Shared.
    Read,
    /// Exclusive.
    Write,
    /// None.
    Unlock,
}

/// A range with a kind. `length` 0 means to the end of the file and beyond.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Kind.
    pub kind: Kind,
    /// First byte.
    pub start: u64,
    /// Bytes.
    pub length: u64,
    /// Holder, as reported by `F_OFD_GETLK`: 0 if unknown (-1 in the kernel's answer: another open
    /// file's lock).
    pub pid: u32,
}

fn raw(range: Range) -> io::Result<libc::flock64> {
    let invalid = |_| io::Error::from_raw_os_error(libc::EINVAL);
    // SAFETY: a structure of numbers, for which zero is a value; padding differs between
    // architectures.
    let mut raw: libc::flock64 = unsafe { std::mem::zeroed() };
    raw.l_type = match range.kind {
        Kind::Read => libc::F_RDLCK as _,
        Kind::Write => libc::F_WRLCK as _,
        Kind::Unlock => libc::F_UNLCK as _,
    };
    raw.l_whence = libc::SEEK_SET as _;
    raw.l_start = range.start.try_into().map_err(invalid)?;
    raw.l_len = range.length.try_into().map_err(invalid)?;
    Ok(raw)
}

/// Sets or releases a lock of this open file; with `wait`, blocks until it is free.
///
/// # Errors
/// EAGAIN if held by another owner; EINTR after a signal; EBADF if the file is not open for the
/// kind; EDEADLK never.
pub fn set(file: BorrowedFd<'_>, range: Range, wait: bool) -> io::Result<()> {
    let raw = raw(range)?;
    let command = if wait { libc::F_OFD_SETLKW } else { libc::F_OFD_SETLK };
    // SAFETY: the structure lives during the call.
    check(unsafe { libc::fcntl(file.as_raw_fd(), command, &raw const raw) }.into()).map(drop)
}

/// Returns the first lock that conflicts with `range`, or one of kind [`Kind::Unlock`].
///
/// # Errors
/// EINVAL for a range beyond the maximum offset.
pub fn test(file: BorrowedFd<'_>, range: Range) -> io::Result<Range> {
    let mut raw = raw(range)?;
    // SAFETY: the structure lives during the call.
    check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut raw) }.into())?;
    let kind = match i32::from(raw.l_type) {
        libc::F_RDLCK => Kind::Read,
        libc::F_WRLCK => Kind::Write,
        _ => return Ok(Range { kind: Kind::Unlock, ..range }),
    };
    Ok(Range {
        kind,
        start: raw.l_start.try_into().unwrap_or_default(),
        length: raw.l_len.try_into().unwrap_or_default(),
        pid: u32::try_from(raw.l_pid).unwrap_or_default(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, os::fd::AsFd};

    #[test]
    fn two_open_files_of_one_process_conflict() {
        let path = std::env::temp_dir().join(format!("nacre-sys-locks-{}", std::process::id()));
        let one = fs::File::options().create(true).truncate(true).read(true).write(true).open(&path).unwrap();
        let two = fs::File::options().read(true).write(true).open(&path).unwrap();
        let range = Range { kind: Kind::Write, start: 10, length: 5, pid: 0 };
        set(one.as_fd(), range, false).unwrap();
        assert_eq!(set(two.as_fd(), range, false).unwrap_err().raw_os_error(), Some(libc::EAGAIN));
        let held = test(two.as_fd(), Range { start: 0, length: 0, ..range }).unwrap();
        assert_eq!((held.kind, held.start, held.length), (Kind::Write, 10, 5));
        set(one.as_fd(), Range { kind: Kind::Unlock, ..range }, false).unwrap();
        assert_eq!(test(two.as_fd(), range).unwrap().kind, Kind::Unlock);
        set(two.as_fd(), range, true).unwrap();
        fs::remove_file(path).unwrap();
    }
}
