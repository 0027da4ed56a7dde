//! Data of a file: blocks are shared where the file system supports it, else copied in the kernel, else read and
//! written; holes stay holes.

use crate::{
    Reflink,
    figures::add,
    metadata::Meta,
    trouble::{During, Side, Trouble},
    walk::Worker,
};
use rustix::{
    fs::{self, SeekFrom},
    io::{self, Errno},
};
use std::os::fd::BorrowedFd;

/// Bytes read and written by one call.
pub(crate) const BUFFER: usize = 1 << 20;
/// Bytes that the kernel copies by one call: few enough to be interrupted soon.
const KERNEL_PIECE: u64 = 16 << 20;
/// Up to this size, reading and writing needs fewer calls than anything else.
const SMALL: u64 = 64 << 10;

/// Calls that work between two file systems; determined once per worker.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ways {
    /// Sharing blocks by the ioctl `FICLONE`.
    clone: bool,
    /// Copying in the kernel by `copy_file_range(2)`.
    kernel: bool,
}

impl Default for Ways {
    fn default() -> Ways {
        Ways { clone: true, kernel: true }
    }
}

impl Worker<'_> {
    /// Copies the data of `source` to the empty file `copy`, on file system `device`.
    pub(crate) fn content(
        &mut self,
        source: BorrowedFd<'_>,
        copy: BorrowedFd<'_>,
        meta: &Meta,
        device: u64,
    ) -> Result<(), Trouble> {
        let between = (meta.device, device);
        let ways = self.ways.get(&between).copied().unwrap_or_default();
        let wanted = self.job().options.reflink;
        if wanted != Reflink::Never && meta.size > 0 && (ways.clone || wanted == Reflink::Always) {
            match fs::ioctl_ficlone(copy, source) {
                Ok(()) => {
                    add(&self.job().figures.bytes, meta.size.min(meta.allocated));
                    add(&self.job().figures.shared_bytes, meta.size.min(meta.allocated));
                    return Ok(());
                }
                Err(error) if wanted == Reflink::Always => return Err(error).destination("share blocks with"),
                Err(Errno::OPNOTSUPP | Errno::NOTTY | Errno::XDEV | Errno::NOSYS) => {
                    self.ways.entry(between).or_default().clone = false
                }
                // This file cannot share blocks: without checksums, mapped by a device, or in use as swap.
                Err(Errno::INVAL | Errno::TXTBSY | Errno::PERM | Errno::BADF) => {}
                Err(error) => return Err(error).destination("share blocks with"),
            }
        }
        let sparse = meta.allocated < meta.size;
        if meta.size <= SMALL && !sparse {
            // Files of some pseudo file systems have data although their size is 0.
            let end = if meta.size == 0 { u64::MAX } else { meta.size };
            return self.read_and_write(source, copy, 0, end).map(drop);
        }
        let mut offset = 0;
        while offset < meta.size {
            let (start, end) =
                if sparse { data_from(source, offset, meta.size).source("find the data of")? } else { (0, meta.size) };
            if start >= end {
                break;
            }
            let reached = self.range(source, copy, start, end, between)?;
            if reached < end {
                // The file has become shorter; the caller notices that.
                break;
            }
            offset = end;
        }
        if sparse {
            fs::ftruncate(copy, meta.size).destination("set the length of")?;
        }
        Ok(())
    }

    /// Copies a range; returns the end of the data that was there.
    fn range(
        &mut self,
        source: BorrowedFd<'_>,
        copy: BorrowedFd<'_>,
        start: u64,
        end: u64,
        between: (u64, u64),
    ) -> Result<u64, Trouble> {
        let mut at = start;
        while at < end && self.ways.entry(between).or_default().kernel {
            self.job().go_on()?;
            let (mut from, mut to) = (at, at);
            let length = usize::try_from((end - at).min(KERNEL_PIECE)).unwrap_or(BUFFER);
            match fs::copy_file_range(source, Some(&mut from), copy, Some(&mut to), length) {
                // End of file; or a pseudo file system whose file has data only when it is read.
                Ok(0) => return self.read_and_write(source, copy, at, end),
                Ok(copied) => {
                    at += copied as u64;
                    add(&self.job().figures.bytes, copied as u64);
                }
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(Errno::XDEV | Errno::NOSYS | Errno::OPNOTSUPP) => {
                    self.ways.entry(between).or_default().kernel = false
                }
                // The side that failed fails again when it is read or written.
                Err(_) => return self.read_and_write(source, copy, at, end),
            }
        }
        if at < end { self.read_and_write(source, copy, at, end) } else { Ok(at) }
    }

    /// Copies a range by read and write; returns the end of the data that was there.
    fn read_and_write(
        &mut self,
        source: BorrowedFd<'_>,
        copy: BorrowedFd<'_>,
        start: u64,
        end: u64,
    ) -> Result<u64, Trouble> {
        let job = self.job();
        let mut at = start;
        while at < end {
            job.go_on()?;
            let room = usize::try_from(end - at).unwrap_or(BUFFER).min(BUFFER);
            let Some(buffer) = self.buffer.get_mut(..room) else { break };
            let length = match io::pread(source, &mut *buffer, at) {
                Err(Errno::INTR) => continue,
                read => read.source("read")?,
            };
            if length == 0 {
                break;
            }
            let mut data = buffer.get(..length).unwrap_or_default();
            while !data.is_empty() {
                let written = match io::pwrite(copy, data, at) {
                    Err(Errno::INTR) => continue,
                    Ok(0) => return Err(Trouble::Fact(Side::Destination, "takes no data".to_owned())),
                    written => written.destination("write")?,
                };
                at += written as u64;
                add(&job.figures.bytes, written as u64);
                data = data.get(written..).unwrap_or_default();
            }
        }
        Ok(at)
    }
}

/// Returns the next range with data from `offset` on; empty at the end. Where `SEEK_DATA` is not supported,
/// everything counts as data.
pub(crate) fn data_from(file: BorrowedFd<'_>, offset: u64, size: u64) -> Result<(u64, u64), Errno> {
    let start = match fs::seek(file, SeekFrom::Data(offset)) {
        Ok(start) => start,
        Err(Errno::NXIO) => return Ok((size, size)),
        Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok((offset, size)),
        Err(error) => return Err(error),
    };
    let end = fs::seek(file, SeekFrom::Hole(start))?;
    Ok((start, end.min(size)))
}
