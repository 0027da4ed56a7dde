//! Content of files: comparison, and copies that share blocks where the file system can, and keep holes.

use rustix::{
    fs::{self, SeekFrom},
    io::{self, Errno},
};
use std::os::fd::BorrowedFd;

/// Bytes read and written by one call.
const BUFFER: usize = 256 << 10;
/// Bytes that the kernel copies by one call.
const KERNEL_PIECE: u64 = 64 << 20;

/// The next range with data from `offset` on; empty at the end. Where the file system does not report holes, everything
/// counts as data.
pub(crate) fn data_from(file: BorrowedFd<'_>, offset: u64, size: u64) -> io::Result<(u64, u64)> {
    let start = match fs::seek(file, SeekFrom::Data(offset)) {
        Ok(start) => start,
        Err(Errno::NXIO) => return Ok((size, size)),
        Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok((offset, size)),
        Err(error) => return Err(error),
    };
    match fs::seek(file, SeekFrom::Hole(start)) {
        Ok(end) => Ok((start, end.min(size))),
        Err(Errno::NXIO) => Ok((size, size)),
        Err(error) => Err(error),
    }
}

fn read_some(file: BorrowedFd<'_>, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    loop {
        match io::pread(file, &mut *buffer, offset) {
            Err(Errno::INTR) => {}
            read => return read,
        }
    }
}

/// Reads until the buffer is full or the file ends.
pub(crate) fn read_full(file: BorrowedFd<'_>, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut filled = 0;
    while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        let read = read_some(file, rest, offset + filled as u64)?;
        if read == 0 {
            break;
        }
        filled += read;
    }
    Ok(filled)
}

/// Whether two files of this size have the same bytes. Holes that both have are not read.
pub(crate) fn is_same(one: BorrowedFd<'_>, other: BorrowedFd<'_>, size: u64) -> io::Result<bool> {
    let most = usize::try_from(size).unwrap_or(BUFFER).min(BUFFER);
    let (mut first, mut second) = (vec![0; most], vec![0; most]);
    let mut at = 0;
    while at < size {
        let (one_data, other_data) = (data_from(one, at, size)?.0, data_from(other, at, size)?.0);
        at = one_data.min(other_data);
        let room = usize::try_from(size.saturating_sub(at)).unwrap_or(BUFFER).min(most);
        let (Some(left), Some(right)) = (first.get_mut(..room), second.get_mut(..room)) else { break };
        let (one_read, other_read) = (read_full(one, left, at)?, read_full(other, right, at)?);
        if one_read != other_read || left.get(..one_read) != right.get(..one_read) {
            return Ok(false);
        }
        if one_read == 0 {
            break;
        }
        at += one_read as u64;
    }
    Ok(true)
}

/// Copies the content of a file of this size to an empty one; returns the bytes of data.
pub(crate) fn copy(from: BorrowedFd<'_>, to: BorrowedFd<'_>, size: u64) -> io::Result<u64> {
    if size > 0 && fs::ioctl_ficlone(to, from).is_ok() {
        return Ok(size);
    }
    let (mut at, mut bytes) = (0, 0);
    while at < size {
        let (start, end) = data_from(from, at, size)?;
        if start >= end {
            break;
        }
        let reached = copy_range(from, to, start, end)?;
        bytes += reached - start;
        if reached < end {
            break;
        }
        at = end;
    }
    fs::ftruncate(to, size)?;
    Ok(bytes)
}

/// Copies a range; returns the end of the data that was there.
pub(crate) fn copy_range(from: BorrowedFd<'_>, to: BorrowedFd<'_>, start: u64, end: u64) -> io::Result<u64> {
    let mut at = start;
    while at < end {
        let (mut source, mut target) = (at, at);
        let length = usize::try_from((end - at).min(KERNEL_PIECE)).unwrap_or(BUFFER);
        match fs::copy_file_range(from, Some(&mut source), to, Some(&mut target), length) {
            Ok(0) => break,
            Ok(copied) => at += copied as u64,
            Err(Errno::INTR) => {}
            // The side that failed fails again below.
            Err(_) => break,
        }
    }
    let mut buffer = if at < end { vec![0; BUFFER] } else { Vec::new() };
    while at < end {
        let room = usize::try_from(end - at).unwrap_or(BUFFER).min(BUFFER);
        let Some(piece) = buffer.get_mut(..room) else { break };
        let read = read_some(from, piece, at)?;
        if read == 0 {
            break;
        }
        let mut data = piece.get(..read).unwrap_or_default();
        while !data.is_empty() {
            let written = match io::pwrite(to, data, at) {
                Err(Errno::INTR) => continue,
                Ok(0) => return Err(Errno::IO),
                written => written?,
            };
            at += written as u64;
            data = data.get(written..).unwrap_or_default();
        }
    }
    Ok(at)
}

/// The whole content of a file.
pub(crate) fn read_all(file: BorrowedFd<'_>) -> io::Result<Vec<u8>> {
    let (mut content, mut buffer) = (Vec::new(), vec![0; BUFFER]);
    loop {
        let read = read_some(file, &mut buffer, content.len() as u64)?;
        if read == 0 {
            return Ok(content);
        }
        content.extend_from_slice(buffer.get(..read).unwrap_or_default());
    }
}
