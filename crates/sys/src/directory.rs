//! Raw directory reading: `getdents64(2)` into a buffer of the caller, so that a listing can stop
//! in the middle of it.

use crate::check;
use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

/// One record of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirRecord<'a> {
    /// Inode number.
    pub ino: u64,
    /// Position after this record, for `lseek(2)`; opaque.
    pub next: i64,
    /// `DT_*`; 0 if the file system does not report the type.
    pub kind: u8,
    /// The name, `.` and `..` included.
    pub name: &'a [u8],
    /// Bytes that the record takes in the buffer.
    pub length: usize,
}

/// Fills `buffer` with records from the directory's position on; 0 at the end.
///
/// # Errors
/// As `getdents64(2)`.
pub fn read(directory: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<usize> {
    // SAFETY: the kernel writes at most `len` bytes to the buffer.
    check(unsafe { libc::syscall(libc::SYS_getdents64, directory.as_raw_fd(), buffer.as_mut_ptr(), buffer.len()) })
}

/// The first record in `bytes`, which [`read`] filled; `None` at their end.
pub fn first(bytes: &[u8]) -> Option<DirRecord<'_>> {
    // struct linux_dirent64: d_ino u64, d_off i64, d_reclen u16, d_type u8, d_name NUL-terminated,
    // padded.
    let ino = u64::from_ne_bytes(bytes.get(..8)?.try_into().ok()?);
    let next = i64::from_ne_bytes(bytes.get(8..16)?.try_into().ok()?);
    let length = usize::from(u16::from_ne_bytes(bytes.get(16..18)?.try_into().ok()?));
    let kind = *bytes.get(18)?;
    let tail = bytes.get(19..length)?;
    let end = tail.iter().position(|&byte| byte == 0)?;
    Some(DirRecord { ino, next, kind, name: tail.get(..end)?, length })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, os::fd::AsFd};

    #[test]
    fn all_names_appear_once() {
        let path = std::env::temp_dir().join(format!("nacre-sys-directory-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        for name in ["a", "b", "a long name of a file"] {
            fs::write(path.join(name), b"").unwrap();
        }
        let directory = fs::File::open(&path).unwrap();
        let mut names = Vec::new();
        let mut buffer = [0_u8; 72];
        loop {
            let filled = read(directory.as_fd(), &mut buffer).unwrap();
            if filled == 0 {
                break;
            }
            let mut rest = &buffer[..filled];
            while let Some(record) = first(rest) {
                names.push(String::from_utf8(record.name.to_vec()).unwrap());
                rest = &rest[record.length..];
            }
        }
        names.sort();
        assert_eq!(names, [".", "..", "a", "a long name of a file", "b"]);
        assert_eq!(first(&[]), None);
        assert_eq!(first(&[1; 18]), None);
        fs::remove_dir_all(path).unwrap();
    }
}
