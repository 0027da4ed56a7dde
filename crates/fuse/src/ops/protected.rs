//! Immutable and append-only files (`chattr +i`, `chattr +a`) where the kernel collects writes: it asks the layer when
//! a file is opened, and takes what comes later into its page cache.
//!
//! Called by the other files of `ops/`. A write(2) is refused in the GETATTR that precedes it, for which attributes of
//! such files are not valid while they may be written to; a store to a shared mapping, of which no request tells, when
//! its page is written back. The table is `writeback/protected_files.rs`. Invariants: before flags begin to protect a file, the kernel writes back
//! its dirty pages, which are therefore never refused; where it cannot (before Linux 6.18, `self_io/flush.rs`),
//! pages are not judged, except of files that were protected before the kernel knew them, where it opens files without a
//! request.

use crate::{
    door::{self, Door},
    failure::Outcome,
    open_files::OpenHandle,
    writeback::caller::{self, Ahead},
};
use fusewire::Header;
use nacre_vfs::{Attr, Caller, Errno, Invalidation, Ioctl, Kind, Node, OpenFlags, Opened, Protection, WriteAhead};
use std::sync::Arc;

/// How a program opens a file that nobody may write to but at its end.
const APPEND_ONLY: OpenFlags = OpenFlags(OpenFlags::WRITE.0 | OpenFlags::APPEND);

/// What becomes of the pages that arrive of a protected file.
pub(super) struct Judged {
    /// So many bytes at their beginning are not stored.
    pub skipped: usize,
    /// The error for them where they differ from what is stored.
    pub refused: Option<Errno>,
}

impl Judged {
    /// All of them are stored.
    pub const TAKEN: Judged = Judged { skipped: 0, refused: None };
}

impl Door {
    /// Changes the flags of a file, after the kernel has written back what it holds of it.
    pub(super) fn change_flags(&self, header: &Header, request: Ioctl<'_>, output: &mut [u8]) -> Outcome<(i32, usize)> {
        let (nodeid, node) = (header.nodeid, self.node(header.nodeid)?);
        let collects = self.writeback.on() && self.inodes.is_file(nodeid);
        let clean = collects && request.protects() && self.is_written_back(header);
        let done = self.layer.ioctl(&door::caller(header), &node, request, output)?;
        if collects {
            match self.layer.getattr(&Caller::ROOT, &node, None) {
                Ok(attr) => self.set_protection(nodeid, attr.protection, attr.size, clean),
                Err(error) => {
                    tracing::debug!(%error, nodeid, "pages of a file are judged by the flags known before");
                    self.set_protection(nodeid, Protection::Immutable, 0, false);
                }
            }
            self.store_early(nodeid);
            // Attributes that were valid before would let writes through.
            self.writeback.ask_before_writes(nodeid);
        }
        Ok(done)
    }

    /// Enters changed flags in the table for as long as the file may be written to, under the lock under which writers
    /// come and go.
    fn set_protection(&self, nodeid: u64, protection: Protection, size: u64, clean: bool) {
        let protected = &self.writeback.protected;
        if self.writes_unopened() {
            return protected.set(nodeid, protection, size, clean);
        }
        // Without a record, there is no writer.
        self.inodes.with_any(nodeid, |record| {
            match record.open_state_if_any().is_some_and(|state| state.has_writers()) {
                true => protected.set(nodeid, protection, size, clean),
                false => protected.forget(nodeid),
            }
        });
    }

    /// Has the dirty pages of a file written back whose inode's lock the caller of ioctl(2) or fsync(2) holds; whether
    /// there are none now but those of stores made meanwhile.
    pub(super) fn is_written_back(&self, header: &Header) -> bool {
        if !self.writeback.flush_for_seek {
            return false;
        }
        if !self.may_be_dirty(header.nodeid) {
            return true;
        }
        let Some(inode) = self.key_of(header.nodeid) else { return false };
        let writeback = Arc::clone(&self.writeback);
        // The first flush fails for an error of an earlier write-back as well, which the second does not see.
        let flush = || writeback.flush_mapped(inode, header.pid) || writeback.flush_mapped(inode, header.pid);
        // Without another thread that serves the pages they stay.
        fusewire::blocking(flush).unwrap_or(false)
    }

    /// Whether the kernel may hold dirty pages of a file, or take some before the file is opened next.
    pub(super) fn may_be_dirty(&self, nodeid: u64) -> bool {
        self.writeback.caches_writes(nodeid) || self.may_be_mapped(nodeid)
    }

    /// Whether the kernel may take a write to a file without a request to open it first.
    pub(crate) fn may_be_written(&self, nodeid: u64) -> bool {
        let has_writers = || {
            self.inodes.with_any(nodeid, |record| record.open_state_if_any().is_some_and(|state| state.has_writers()))
        };
        self.writes_unopened() || has_writers().unwrap_or(false)
    }

    /// The first open file to write by has been entered, while the kernel holds no dirty page of the file.
    pub(super) fn begin_protection(&self, nodeid: u64, node: &Node, file: &Opened) {
        match self.layer.getattr(&Caller::ROOT, node, Some(&**file)) {
            Ok(attr) => {
                if self.writeback.flush_for_seek {
                    self.writeback.protected.begin(nodeid, attr.protection, attr.size);
                }
                if attr.protection != Protection::None {
                    // Without writers, its attributes were valid.
                    self.writeback.ask_before_writes(nodeid);
                }
            }
            Err(error) => {
                tracing::debug!(%error, nodeid, "pages of a file are not judged");
                self.writeback.ask_before_writes(nodeid);
            }
        }
    }

    /// Refuses the write(2) that follows a question about attributes by an open file, where the file is protected.
    ///
    /// # Errors
    /// EPERM.
    pub(super) fn refuse_writers(&self, header: &Header, fh: u64, attr: &Attr) -> Outcome {
        if attr.protection == Protection::None || attr.kind != Kind::File || !self.writeback.on() {
            return Ok(());
        }
        if fh == 0 && self.writes_unopened() {
            return self.refuse_unopened_writers(header);
        }
        let Some(handle) = self.open.files.get(fh).filter(|handle| handle.flags.writes()) else { return Ok(()) };
        // What may be a read as well is judged when it arrives.
        let Ahead::Writes(write) = self.ahead(header, true) else { return Ok(()) };
        let refused = match attr.protection {
            Protection::None => false,
            Protection::Immutable => true,
            // A descriptor from before the flag without O_APPEND may write anywhere, as on Linux' own file systems;
            // there, fcntl(2) does not clear O_APPEND of the others.
            Protection::AppendOnly => handle.flags.appends() && write.offset.is_some(),
        };
        if refused { Err(Errno::EPERM.into()) } else { Ok(()) }
    }

    /// The same where no open file is known: writes at the end are let through where the file can be opened for them.
    /// A call that may be a read as well is not refused where the layer refuses its write when it arrives: pools let
    /// the front end itself open protected files.
    fn refuse_unopened_writers(&self, header: &Header) -> Outcome {
        match self.ahead(header, true) {
            Ahead::Reads => Ok(()),
            Ahead::Unknown if !self.inodes.by_number() => Ok(()),
            Ahead::Unknown => Err(Errno::EPERM.into()),
            Ahead::Writes(WriteAhead { offset: None, length: Some(_) }) => {
                self.layer.open(&door::caller(header), &self.node(header.nodeid)?, APPEND_ONLY)?;
                self.written(header.nodeid).map(drop)
            }
            Ahead::Writes(_) => Err(Errno::EPERM.into()),
        }
    }

    /// What the caller of a request with attributes of an open file is about to do to it. The offset of a write is
    /// looked up if it is `wanted`.
    pub(super) fn ahead(&self, header: &Header, wanted: bool) -> Ahead {
        caller::ahead(header.pid, wanted, || self.inodes.node_and_id(header.nodeid).map(|(_, id)| id.ino))
    }

    /// Judges pages that arrive. Those of an append-only file begin with what is stored already, as the kernel writes
    /// back whole pages.
    pub(super) fn judge_pages(&self, handle: &OpenHandle, offset: u64, data: &[u8]) -> Judged {
        let protected = self.writeback.protected.offset(handle.nodeid);
        let skipped = match protected.checked_sub(offset).map(usize::try_from) {
            None | Some(Ok(0)) => return Judged::TAKEN,
            Some(length) => length.unwrap_or(usize::MAX).min(data.len()),
        };
        if !self.is_still_protected(handle, protected) {
            self.writeback.protected.forget(handle.nodeid);
            return Judged::TAKEN;
        }
        let refused = match protected {
            u64::MAX => Some(Errno::EPERM),
            _ if self.has_placed_writer(handle.nodeid) => return Judged::TAKEN,
            _ => differing(handle, offset, data.get(..skipped).unwrap_or_default()).err(),
        };
        if let Some(error) = refused {
            tracing::debug!(%error, nodeid = handle.nodeid, offset, "stores to a protected file are refused");
            self.drop_refused(handle.nodeid);
        }
        Judged { skipped, refused }
    }

    /// Whether a file has the protection that the table has of it: after a rollback it may be without, or shorter.
    fn is_still_protected(&self, handle: &OpenHandle, up_to: u64) -> bool {
        let Some(node) = self.inodes.node(handle.nodeid) else { return false };
        match self.layer.getattr(&Caller::ROOT, &node, Some(&*handle.file)) {
            Ok(attr) => match attr.protection {
                Protection::None => false,
                Protection::AppendOnly => up_to <= attr.size,
                // Less than all of it where its pages could not be written back when it became immutable.
                Protection::Immutable => true,
            },
            Err(error) => {
                tracing::debug!(%error, nodeid = handle.nodeid, "pages of a file are judged by the flags known before");
                true
            }
        }
    }

    /// Whether a file is open by a descriptor that was opened for writing without O_APPEND.
    fn has_placed_writer(&self, nodeid: u64) -> bool {
        let found =
            self.inodes.with_any(nodeid, |record| record.open_state_if_any().is_some_and(|state| state.is_placed()));
        found.unwrap_or(false)
    }

    /// The kernel has pages that differ from what is stored. Those that are mapped stay until the file is closed.
    pub(super) fn drop_refused(&self, nodeid: u64) {
        if let Some((_, id)) = self.inodes.node_and_id(nodeid) {
            self.change(Invalidation::Content { id });
        }
        if let Some(inode) = self.key_of(nodeid) {
            self.self_io.page_dropper.soon(self.writeback.place(), inode);
        }
    }
}

/// Compares content with what is stored.
///
/// # Errors
/// EPERM where it differs, and those of the layer.
pub(super) fn differing(handle: &OpenHandle, offset: u64, data: &[u8]) -> nacre_vfs::Result<()> {
    let mut stored = vec![0; data.len()];
    let mut read = 0;
    while let Some(rest) = stored.get_mut(read..).filter(|rest| !rest.is_empty()) {
        match handle.file.read(rest, offset.saturating_add(read as u64))? {
            0 => break,
            more => read += more,
        }
    }
    if stored == data { Ok(()) } else { Err(Errno::EPERM) }
}
