//! Handlers for the content of files that the daemon serves itself, and for operations without passthrough: fsync,
//! fallocate, lseek, copy_file_range.

use super::protected::Judged;
use crate::{
    door::{Door, caller},
    failure::Outcome,
    open_files::OpenHandle,
    wire,
};
use fusewire::{Header, Reply, abi};
use nacre_vfs::{AllocateMode, Errno, OpenFlags, Opened, Whence, WriteOrigin};
use std::sync::{Arc, atomic::Ordering};

impl Door {
    pub(crate) fn read(&self, header: &Header, fh: u64, offset: u64, size: u32, reply: &mut Reply<'_>) -> Outcome {
        let file = self.file(header, fh)?;
        self.used(header.nodeid);
        let read = file.read(reply.buffer(size as usize), offset)?;
        Ok(reply.filled(read)?)
    }

    /// The tuple is an open file and an offset in it. `write_flags` are `FUSE_WRITE_*`.
    pub(crate) fn write(
        &self,
        header: &Header,
        (fh, offset): (u64, u64),
        data: &[u8],
        open_flags: u32,
        write_flags: u32,
        reply: &mut Reply<'_>,
    ) -> Outcome {
        let cached = write_flags & abi::flag::WRITE_CACHE != 0;
        let mut handle = match self.writer(header.nodeid, fh) {
            Ok(handle) => handle,
            Err(error) => {
                if cached && fh == 0 {
                    self.write_is_refused(header.nodeid, error);
                }
                return Err(error);
            }
        };
        self.used(header.nodeid);
        if cached && fh == 0 && handle.flags.appends() {
            match self.append_protected(&handle, offset, data)? {
                Some(unprotected) => handle = unprotected,
                None => return Ok(reply.written(u32::try_from(data.len()).map_err(|_| Errno::EIO)?)?),
            }
        }
        if write_flags & abi::flag::WRITE_KILL_SUIDGID != 0 {
            // The kernel sets this flag with every write of an ordinary user.
            self.strip(header, &handle)?;
        }
        // `open_flags` are the flags of the open file at this moment, which fcntl(2) may have changed. Data from the
        // page cache (a shared mapping) has its offset, however the file behind the handle was opened. While writes
        // to the file are cached, only the kernel knows its end.
        let placed = cached || self.writeback.caches_writes(handle.nodeid);
        let appends = OpenFlags(open_flags).appends() && !placed;
        let write = |data: &[u8], offset| match cached {
            true => {
                // Where the kernel keeps times, it sends this one with the times of the file.
                let origin = WriteOrigin::Writeback { timed: self.writeback.on() };
                handle.file.write(data, offset, origin).map_err(told)
            }
            false => handle.file.write(data, offset, WriteOrigin::Caller),
        };
        let judged = if cached { self.judge_pages(&handle, offset, data) } else { Judged::TAKEN };
        let (data, offset) = (data.get(judged.skipped..).unwrap_or_default(), offset + judged.skipped as u64);
        let _locked = if cached { None } else { self.writeback.lock(header.nodeid) };
        let mut written = match data.is_empty() && cached {
            true => 0,
            false if appends => handle.file.append(data)?,
            false => write(data, offset)?,
        };
        // The kernel takes a short answer for the whole then, and the rest would be lost without a
        // word: only an error is heard.
        while cached && written < data.len() {
            let rest = data.get(written..).unwrap_or_default();
            match write(rest, offset.saturating_add(written as u64))? {
                0 => return Err(Errno::EIO.into()),
                more => written += more,
            }
        }
        if cached {
            self.writeback.arrived(handle.nodeid);
        }
        if let Some(error) = judged.refused {
            return Err(error.into());
        }
        written += judged.skipped;
        // What comes from the page cache bears its time in the kernel.
        if let Some(times) = handle.times.as_ref().filter(|_| !cached)
            && times.written()
        {
            self.self_io.attr_refresh.soon(handle.nodeid);
        }
        Ok(reply.written(u32::try_from(written).map_err(|_| Errno::EIO)?)?)
    }

    pub(crate) fn fsync(&self, header: &Header, fh: u64, data_only: bool) -> Outcome {
        let is_missing = fh == 0 && self.writes_unopened() && self.is_early_missing(header);
        self.file(header, fh)?.fsync(data_only)?;
        if is_missing { Err(Errno::EIO.into()) } else { Ok(()) }
    }

    pub(crate) fn fallocate(&self, header: &Header, fh: u64, mode: u32, offset: u64, length: u64) -> Outcome {
        let handle = self.writer(header.nodeid, fh)?;
        let _locked = self.writeback.lock(header.nodeid);
        Ok(handle.file.allocate(AllocateMode(mode), offset, length)?)
    }

    /// Removes set-id bits and capabilities from a file whose content changes. Later changes by the same open file
    /// have nothing to remove.
    fn strip(&self, header: &Header, handle: &OpenHandle) -> Outcome {
        let given = self.open.privileges.load(Ordering::Acquire);
        if handle.stripped.load(Ordering::Acquire) != given {
            self.kill_privileges(&caller(header), &self.node(handle.nodeid)?, &handle.file)?;
            handle.stripped.store(given, Ordering::Release);
        }
        Ok(())
    }

    pub(crate) fn lseek(&self, header: &Header, fh: u64, offset: u64, whence: u32, reply: &mut Reply<'_>) -> Outcome {
        let whence = match whence {
            wire::SEEK_DATA => Whence::Data,
            wire::SEEK_HOLE => Whence::Hole,
            _ => return Err(Errno::EINVAL.into()),
        };
        let file = self.file(header, fh)?;
        let found = match self.flush_for_seek(header, &file)? {
            None => file.seek(offset, whence)?,
            Some(length) if offset >= length => return Err(Errno::ENXIO.into()),
            Some(length) => match whence {
                Whence::Data => offset,
                Whence::Hole => length,
            },
        };
        Ok(reply.lseek(found)?)
    }

    /// The tuples are an open file and an offset in it. `wide`: the reply has 64 bits for the length instead of 32 as
    /// in its old form.
    pub(crate) fn copy_file_range(
        &self,
        header: &Header,
        (from, from_offset): (u64, u64),
        (to_nodeid, to, to_offset): (u64, u64, u64),
        (length, flags): (u64, u64),
        wide: bool,
        reply: &mut Reply<'_>,
    ) -> Outcome {
        let source = self.file(header, from)?;
        let target = self.writer(to_nodeid, to)?;
        let length = if wide { length } else { length.min(u64::from(u32::MAX)) };
        let flags = u32::try_from(flags).map_err(|_| Errno::EINVAL)?;
        let _locked = self.writeback.lock(to_nodeid);
        let copied = source.copy_to(from_offset, &*target.file, to_offset, length, flags)?;
        Ok(reply.copied(copied, wide)?)
    }

    /// Returns the open file of a request; where the kernel opens files without a request, opens one now.
    fn file(&self, header: &Header, fh: u64) -> Outcome<Opened> {
        if fh != 0 || !self.agreement().opens_files_itself {
            return Ok(Arc::clone(&self.handle_of(fh)?.file));
        }
        if let Some(handle) = self.writeback.written.get(header.nodeid) {
            return Ok(Arc::clone(&handle.file));
        }
        if let Some(file) = self.open.implicit.get(header.nodeid) {
            return Ok(file);
        }
        let file = self.layer.open(&caller(header), &self.node(header.nodeid)?, OpenFlags::READ)?;
        self.open.implicit.put(header.nodeid, Arc::clone(&file));
        Ok(file)
    }
}

/// Maps an error of a write whose caller is gone. fsync and msync return it to the caller; close returns EIO for all
/// errors except ENOSPC.
pub(crate) fn told(error: Errno) -> Errno {
    if error == Errno::EDQUOT { Errno::ENOSPC } else { error }
}
