//! Where the kernel opens files without a request and collects what is written to them: which open
//! file of the layer a request is about.
//!
//! Called by the other files of `ops/`. The table is `writeback/written_files.rs`; its head says
//! what the kernel tells of writers. Invariant: a file is in the table, and its lease has begun,
//! before the first write to it that is not a store to a mapping.

use super::opens;
use crate::{
    door::Door,
    failure::Outcome,
    open_files::OpenHandle,
    writeback::{self, written_files::Uses},
};
use fusewire::{
    Header, Reply,
    abi::{self, fopen},
};
use nacre_vfs::{Caller, Errno, OpenFlags, Opened};
use std::{sync::Arc, time::Duration};

/// How long a first write waits at most where writes are stopped.
const STOPPED_MOST: Duration = Duration::from_secs(20);
/// What the kernel asks for before the first write to a file
/// (`file_remove_privs()`, Linux fs/inode.c).
pub(crate) const FIRST_WRITE: &[u8] = b"security.capability";

impl Door {
    /// Whether files are opened without a request and written to.
    pub(crate) fn writes_unopened(&self) -> bool {
        self.agreement().opens_files_itself && self.writeback.on()
    }

    /// Whether writes need not be announced, whatever file they are to.
    pub(crate) fn unannounced(&self) -> bool {
        self.layer.capabilities().writeback.is_none_or(|layer| layer.unannounced())
    }

    /// The open file behind a handle that may be written to.
    pub(crate) fn writer(&self, nodeid: u64, fh: u64) -> Outcome<Arc<OpenHandle>> {
        if fh == 0 && self.writes_unopened() { self.written(nodeid) } else { self.handle_of(fh) }
    }

    /// The file of a node that is written to, or about to be: entered in the table.
    pub(crate) fn written(&self, nodeid: u64) -> Outcome<Arc<OpenHandle>> {
        if let Some(handle) = self.writeback.written.get(nodeid) {
            return Ok(handle);
        }
        let node = self.node(nodeid)?;
        let file = self.layer.open(&Caller::ROOT, &node, OpenFlags::READ_WRITE)?;
        self.enter(nodeid, &file)
    }

    fn enter(&self, nodeid: u64, file: &Opened) -> Outcome<Arc<OpenHandle>> {
        let handle = Arc::new(opens::unopened(nodeid, file));
        self.writeback.join_unopened(nodeid, file);
        let there = self.writeback.written.add(Arc::clone(&handle));
        if !there.as_ref().is_some_and(|there| Arc::ptr_eq(there, &handle)) {
            self.writeback.leave(nodeid);
        }
        there.ok_or(Errno::ESTALE.into())
    }

    /// The kernel asks what it asks before the first write to a file. Whoever asks for it as a
    /// program does is taken for a writer as well, which does no harm.
    pub(crate) fn may_write(&self, header: &Header) {
        if !self.writes_unopened() || self.writeback.written.get(header.nodeid).is_some() {
            return;
        }
        let opened = self
            .node(header.nodeid)
            .and_then(|node| Ok(self.layer.open(&Caller::ROOT, &node, OpenFlags::READ_WRITE)?));
        let entered = opened.and_then(|file| {
            if let Some(lease) = file.writeback_lease().filter(|lease| lease.stopped()) {
                // Who has stopped writes waits for files of the table only. Without another thread
                // that serves those, this one goes on.
                let _ = fusewire::blocking(|| lease.wait(STOPPED_MOST));
            }
            self.enter(header.nodeid, &file)
        });
        if let Err(error) = entered {
            // Directories have none, snapshots are not written to; what arrives of another one opens
            // it once more.
            tracing::trace!(?error, nodeid = header.nodeid, "not a file that is written to");
            return;
        }
        // This write could not be announced any more, as the caller has the inode's lock: it is
        // asked for when it arrives, as a store is. Those that follow are announced.
        self.writeback.arrived(header.nodeid);
    }

    /// The file that a question about attributes is about, if a write may follow it that is to be
    /// announced.
    pub(crate) fn announcer(&self, header: &Header, fh: Option<u64>) -> Outcome<Option<Arc<OpenHandle>>> {
        let Some(fh) = fh else { return Ok(None) };
        if fh != 0 || !self.writes_unopened() {
            return Ok(self.open.files.get(fh).filter(|handle| handle.collected));
        }
        if self.unannounced() {
            return Ok(None);
        }
        match self.writeback.written.get(header.nodeid) {
            None if writeback::caller::writes(header.pid).is_some() => self.written(header.nodeid).map(Some),
            known => Ok(known),
        }
    }

    /// The kernel does not know a file any more: it holds nothing of it. It may know it anew
    /// meanwhile, and write to it.
    pub(crate) fn unknown(&self, nodeid: u64, uses: Option<Uses>) {
        if !self.agreement().opens_files_itself || self.inodes.is_known(nodeid) {
            return;
        }
        self.open.implicit.forget(nodeid);
        if let Some(uses) = uses {
            self.writeback.leave_unused(nodeid, uses);
        }
    }

    /// Answers a creation where files are opened without a request.
    pub(crate) fn created_unopened(&self, mut out: abi::EntryOut, reply: &mut Reply<'_>) -> Outcome {
        if !self.unannounced() {
            // The kernel takes the answer for true even if it was told otherwise meanwhile.
            (out.attr_valid, out.attr_valid_nsec) = (0, 0);
        }
        let open_flags = fopen::KEEP_CACHE | fopen::NOFLUSH;
        Ok(reply.created(&out, &abi::OpenOut { fh: 0, open_flags, backing_id: 0 })?)
    }
}
