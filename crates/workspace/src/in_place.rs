//! Replaces the content of a file in place, while others may write to the file.
//!
//! A file with several names has to stay one file, so its content cannot be exchanged by a rename, and nothing keeps
//! others from writing meanwhile. Each piece is read before it is written: every byte has to be that of the old or of the
//! new content, as a replacement leaves them that was interrupted anywhere. Other bytes were written by others. Then the
//! replacement ends, and what it has written is taken back, so the file has the changes of the others on its old content.

use crate::{
    Result,
    content::{self, copy_range, data_from, read_full},
    meta::Meta,
    trouble::During,
};
use rustix::{
    fs::{self, FallocateFlags},
    io::{self, Errno},
};
use std::{os::fd::BorrowedFd, path::Path};

/// Bytes that are read and written at a time.
const PIECE: u64 = 256 << 10;
/// Bytes that are taken back or left as a whole.
const BLOCK: usize = 4096;

/// A file with its old and new content.
pub(crate) struct InPlace<'a> {
    pub(crate) file: BorrowedFd<'a>,
    pub(crate) old: BorrowedFd<'a>,
    pub(crate) new: BorrowedFd<'a>,
    /// Path of the file for messages.
    pub(crate) shown: &'a Path,
}

/// Bytes of a file and of its two contents at one place. Ends are early where the files end.
struct Piece {
    present: Vec<u8>,
    old: Vec<u8>,
    new: Vec<u8>,
}

impl Piece {
    fn empty() -> Piece {
        let buffer = || vec![0; usize::try_from(PIECE).unwrap_or_default()];
        Piece { present: buffer(), old: buffer(), new: buffer() }
    }

    /// Whether each byte of a range is that of one content; after the end of a content, 0 is.
    fn is_blend(&self, from: usize, to: usize) -> bool {
        let byte = |bytes: &[u8], at: usize| bytes.get(at).copied().unwrap_or(0);
        (from..to).all(|at| {
            let present = byte(&self.present, at);
            present == byte(&self.new, at) || present == byte(&self.old, at)
        })
    }
}

impl InPlace<'_> {
    fn size(&self, file: BorrowedFd<'_>) -> Result<u64> {
        Ok(Meta::of_file(file).during("read", self.shown)?.size)
    }

    /// Reads the bytes of all three at an offset.
    fn read(&self, at: u64, piece: &mut Piece) -> Result<()> {
        for (file, buffer) in [(self.file, &mut piece.present), (self.old, &mut piece.old), (self.new, &mut piece.new)]
        {
            buffer.resize(usize::try_from(PIECE).unwrap_or_default(), 0);
            let filled = read_full(file, buffer, at).during("read", self.shown)?;
            buffer.truncate(filled);
        }
        Ok(())
    }

    /// Writes a range of one of the contents, with its holes.
    fn write(&self, from: BorrowedFd<'_>, start: u64, end: u64) -> Result<u64> {
        let (mut at, mut bytes) = (start, 0);
        while at < end {
            let (data, stop) = data_from(from, at, end).during("read", self.shown)?;
            let data = data.min(end);
            clear(self.file, at, data).during("write", self.shown)?;
            let stop = stop.clamp(data, end);
            let reached = copy_range(from, self.file, data, stop).during("write", self.shown)?;
            if reached < stop {
                return Err(Errno::IO).during("read the copy of", self.shown);
            }
            bytes += stop - data;
            at = if stop > at { stop } else { end };
        }
        Ok(bytes)
    }

    /// Gives the file the new content; returns the number of bytes of data, or `None` where others have written: then
    /// parts of the new content are in the file. Calls `pause` before each piece.
    pub(crate) fn replace(&self, pause: &mut dyn FnMut() -> Result<()>) -> Result<Option<u64>> {
        let (old, new) = (self.size(self.old)?, self.size(self.new)?);
        let (least, most) = (old.min(new), old.max(new));
        let (mut at, mut bytes, mut piece) = (0, 0, Piece::empty());
        while at < most {
            pause()?;
            let end = (at + PIECE).min(most);
            self.read(at, &mut piece)?;
            let there = piece.present.len();
            let is_cut = at + (there as u64) < end.min(least);
            let is_grown = at + there as u64 > most;
            if is_cut || is_grown || !piece.is_blend(0, there) {
                return Ok(None);
            }
            bytes += self.write(self.new, at, end.min(new).max(at))?;
            at = end;
        }
        pause()?;
        if self.size(self.file)? > most {
            return Ok(None);
        }
        fs::ftruncate(self.file, new).during("write", self.shown)?;
        fs::fsync(self.file).during("sync", self.shown)?;
        Ok(self.has_new()?.then_some(bytes))
    }

    /// Whether the file has exactly the new content.
    pub(crate) fn has_new(&self) -> Result<bool> {
        let size = self.size(self.new)?;
        if self.size(self.file)? != size {
            return Ok(false);
        }
        content::is_same(self.new, self.file, size).during("read", self.shown)
    }

    /// Gives the file the old content in all blocks in which nobody else has written.
    pub(crate) fn take_back(&self) -> Result<()> {
        let (old, new) = (self.size(self.old)?, self.size(self.new)?);
        let (least, most) = (old.min(new), old.max(new));
        let size = self.size(self.file)?;
        // Where others have cut or extended the file, its size is theirs.
        let is_our_size = (least..=most).contains(&size);
        let (mut at, mut piece, mut is_tail_ours) = (0, Piece::empty(), true);
        while at < size.min(most) {
            self.read(at, &mut piece)?;
            let there = piece.present.len();
            if there == 0 {
                break;
            }
            for from in (0..there).step_by(BLOCK) {
                let to = (from + BLOCK).min(there);
                let (start, end) = (at + from as u64, at + to as u64);
                if !piece.is_blend(from, to) {
                    is_tail_ours &= end <= old;
                } else {
                    self.write(self.old, start, end.min(old).max(start))?;
                    // Where others have extended the file, nothing of the new content stays behind the old end.
                    clear(self.file, start.max(old), end).during("write", self.shown)?;
                }
            }
            at += there as u64;
        }
        if is_our_size && size < old {
            self.write(self.old, size, old)?;
            fs::ftruncate(self.file, old).during("write", self.shown)?;
        } else if is_our_size && size > old && is_tail_ours {
            fs::ftruncate(self.file, old).during("write", self.shown)?;
        }
        fs::fsync(self.file).during("sync", self.shown)
    }
}

/// Makes a hole, or writes zeros where there can be none.
fn clear(file: BorrowedFd<'_>, start: u64, end: u64) -> io::Result<()> {
    if start >= end {
        return Ok(());
    }
    match fs::fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, start, end - start) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL | Errno::NODEV) => {}
        made => return made,
    }
    let (zeros, mut at) = (vec![0; BLOCK], start);
    while at < end {
        let room = usize::try_from(end - at).unwrap_or(BLOCK).min(BLOCK);
        match io::pwrite(file, zeros.get(..room).unwrap_or_default(), at) {
            Err(Errno::INTR) => {}
            Ok(0) => return Err(Errno::IO),
            written => at += written? as u64,
        }
    }
    Ok(())
}
