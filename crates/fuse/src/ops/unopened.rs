//! Files that the kernel opens without a request, with write-back caching: finds the layer's open file for a request.
//!
//! Called by the other files of `ops/`. The table is `writeback/written_files.rs`; its head describes which requests
//! show writers. Invariant: a file is in the table, and its lease has begun, before the first write to it that is not
//! a store to a mapping.

use super::{opens, protected::differing};
use crate::{
    door::Door,
    failure::{Failure, Outcome},
    open_files::OpenHandle,
    writeback::{
        caller::Ahead,
        early_appends::{EarlyAppends, write_all},
        written_files::Uses,
    },
};
use fusewire::{
    Header, Reply,
    abi::{self, fopen},
};
use nacre_vfs::{Caller, Errno, Kind, Name, Node, OpenFlags, Opened, Protection};
use parking_lot::Mutex;
use std::{sync::Arc, time::Duration};

/// How a file is opened that can be written to at its end only.
const APPENDING: OpenFlags = OpenFlags(OpenFlags::READ_WRITE.0 | OpenFlags::APPEND);
/// Maximum time for which a first write waits while writes are stopped.
const STOPPED_MOST: Duration = Duration::from_secs(20);
/// What the kernel asks for before the first write to a file
/// (`file_remove_privs()`, Linux fs/inode.c).
pub(crate) const FIRST_WRITE: &[u8] = b"security.capability";

/// A file that is about to lose a name.
pub(crate) struct HeldFile {
    pub nodeid: u64,
    pub file: Opened,
    /// It is its last name.
    pub last: bool,
}

/// Result of an append from the page cache.
enum Appended {
    /// It is stored, or kept.
    Stored,
    /// The part behind the end is stored; the beginning differs from what is stored there, or could not be compared.
    Differs(Errno),
    /// Nothing is stored: the file does not seem to be append-only any more.
    Unprotected,
}

impl Door {
    /// Whether the kernel opens files without a request and caches writes to them.
    pub(crate) fn writes_unopened(&self) -> bool {
        self.agreement().opens_files_itself && self.writeback.on()
    }

    /// Whether writes need no reservation, for all files.
    pub(crate) fn unannounced(&self) -> bool {
        self.layer.capabilities().writeback.is_none_or(|layer| layer.unannounced())
    }

    /// Returns the open file behind a handle that may be written to.
    pub(crate) fn writer(&self, nodeid: u64, fh: u64) -> Outcome<Arc<OpenHandle>> {
        if fh == 0 && self.writes_unopened() { self.written(nodeid) } else { self.handle_of(fh) }
    }

    /// Refuses an open file where there are too many. Before that, files of the table without current writes are
    /// removed. Not to be called while holding the lock of such a file.
    ///
    /// # Errors
    /// EMFILE.
    pub(crate) fn may_open(&self) -> Outcome {
        let full = || self.open.are_full(&self.inodes);
        if full() && self.writes_unopened() && !self.inodes.by_number() {
            // Without another thread that serves the write-back, the open is refused.
            let _ = fusewire::blocking(|| self.self_io.flush_timer.make_room());
        }
        if full() { Err(Errno::EMFILE.into()) } else { Ok(()) }
    }

    /// Returns the file of a node that is written to, or about to be; entered in the table.
    pub(crate) fn written(&self, nodeid: u64) -> Outcome<Arc<OpenHandle>> {
        if let Some(handle) = self.writeback.written.get(nodeid) {
            return Ok(handle);
        }
        let (file, flags) = self.open_for_writing(nodeid)?;
        self.enter(nodeid, &file, flags)
    }

    fn open_for_writing(&self, nodeid: u64) -> Outcome<(Opened, OpenFlags)> {
        let node = self.node(nodeid)?;
        let open = |flags| Ok((self.layer.open(&Caller::ROOT, &node, flags)?, flags));
        match open(OpenFlags::READ_WRITE) {
            // Protected, but it can be appended to.
            Err(Errno::EPERM) => Ok(open(APPENDING)?),
            opened => Ok(opened?),
        }
    }

    /// Enters an open file in the table, with its protection where the layer lets the front end itself open protected
    /// files for writing anywhere. Elsewhere such a file is not protected, and data for one that opens for appending
    /// alone goes to its end.
    fn enter(&self, nodeid: u64, file: &Opened, flags: OpenFlags) -> Outcome<Arc<OpenHandle>> {
        if self.inodes.by_number() && !flags.appends() {
            self.enter_protection(nodeid, file)?;
        }
        let handle = Arc::new(opens::unopened(nodeid, flags, file));
        self.writeback.join_unopened(nodeid, file);
        let there = self.writeback.written.add(Arc::clone(&handle));
        if !there.as_ref().is_some_and(|there| Arc::ptr_eq(there, &handle)) {
            self.writeback.leave(nodeid);
        }
        there.ok_or(Errno::ESTALE.into())
    }

    /// Enters the protection of a file whose flags may be older than this connection. Flags that change meanwhile are
    /// entered at the change, so all pages that the kernel holds of any other file are newer than its flags; in a
    /// process that has taken over, where the kernel wrote back the older ones at the change.
    fn enter_protection(&self, nodeid: u64, file: &Opened) -> Outcome {
        let has_taken_over = self.survives.as_ref().is_some_and(|survives| survives.memory.resumes());
        if has_taken_over && !self.writeback.flush_for_seek {
            return Ok(());
        }
        let attr = self.layer.getattr(&Caller::ROOT, &self.node(nodeid)?, Some(&**file))?;
        self.writeback.protected.begin(nodeid, attr.protection, attr.size);
        Ok(())
    }

    /// Enters the file of a first write, which the kernel announces by requesting [`FIRST_WRITE`]. A program that
    /// requests this attribute counts as a writer as well, which does no harm.
    pub(crate) fn may_write(&self, header: &Header) {
        // A thread of ours that sets a length writes nothing.
        let own = || self.self_io.role(header.pid).is_some();
        if !self.writes_unopened() || own() {
            return;
        }
        let before = self.writeback.written.get(header.nodeid);
        if before.as_ref().is_some_and(|before| !before.flags.appends()) {
            return;
        }
        let opened = self.may_open().and_then(|()| self.open_for_writing(header.nodeid));
        if before.is_some() {
            if !opened.as_ref().is_ok_and(|(_, flags)| !flags.appends()) {
                return;
            }
            self.leave_protected(header.nodeid);
        }
        let entered = opened.and_then(|(file, flags)| {
            if let Some(lease) = file.writeback_lease().filter(|lease| lease.stopped()) {
                // The layer that has stopped writes waits for files of the table only. Without another thread that
                // serves those, this one continues.
                let _ = fusewire::blocking(|| lease.wait(STOPPED_MOST));
            }
            self.enter(header.nodeid, &file, flags)
        });
        if let Err(error) = entered {
            // Directories have none, snapshots are not written to; data that arrives for another file opens it again.
            tracing::trace!(?error, nodeid = header.nodeid, "not a file that is written to");
            return;
        }
        // This write could not be reserved any more, as the caller has the inode's lock: it is admitted when it
        // arrives, like a store to a mapping. The next ones are reserved.
        self.writeback.arrived(header.nodeid);
        self.announce_late(header);
    }

    /// Reserves a write that has already begun without the required reservation: its caller asked before the recall,
    /// for a file without recent writes. It is counted, but cannot be refused any more; if it does not fit, the
    /// writer gets the error at close or fsync.
    fn announce_late(&self, header: &Header) {
        if self.writeback.is_patient() || self.unannounced() {
            return;
        }
        let Some(handle) = self.writeback.written.get(header.nodeid) else { return };
        // The caller has the inode's lock.
        let _locked = self.writeback.lock(header.nodeid);
        if let Some(lease) = handle.file.writeback_lease().filter(|lease| !lease.unannounced())
            && let Some(write) = self.ahead(header, true).possible_write()
            && let Err(error) = lease.announce(write)
        {
            tracing::debug!(%error, nodeid = header.nodeid, "a write that cannot be refused any more may not fit");
        }
    }

    /// Returns the file of a GETATTR, if a write may follow that has to be reserved.
    pub(crate) fn announcer(&self, header: &Header, fh: Option<u64>) -> Outcome<Option<Arc<OpenHandle>>> {
        let Some(fh) = fh else { return Ok(None) };
        if fh != 0 || !self.writes_unopened() {
            return Ok(self.open.files.get(fh).filter(|handle| handle.collected));
        }
        if self.unannounced() {
            return Ok(None);
        }
        match self.writeback.written.get(header.nodeid) {
            // A call that may be a read opens no file for writing: the first write is reserved when it begins
            // ([`Self::may_write`]).
            None if matches!(self.ahead(header, false), Ahead::Writes(_)) => self.written(header.nodeid).map(Some),
            known => Ok(known),
        }
    }

    /// Stores data from the page cache that was written at the end of a file that nobody may write to elsewhere
    /// (`chattr +a`). The kernel writes back whole pages, so the data begins with what is stored already, and runs of
    /// them in any order: a run that comes too early is kept ([`EarlyAppends`]). Returns the file to write by where
    /// it is not append-only any more; nothing of the data is stored then.
    ///
    /// # Errors
    /// EPERM where the beginning differs from what is stored, by a store to a mapping; EIO for data behind a write
    /// that has failed.
    pub(crate) fn append_protected(
        &self,
        handle: &OpenHandle,
        offset: u64,
        data: &[u8],
    ) -> Outcome<Option<Arc<OpenHandle>>> {
        let nodeid = handle.nodeid;
        let mut appended = self.append_once(handle, offset, data, false);
        if matches!(appended, Ok(Appended::Unprotected)) {
            match self.unprotected(nodeid) {
                Ok(Some(unprotected)) => {
                    self.store_kept(&unprotected);
                    return Ok(Some(unprotected));
                }
                // The layer does not show the flag.
                Ok(None) => appended = self.append_once(handle, offset, data, true),
                Err(error) => {
                    self.write_is_refused(nodeid, error);
                    return Err(error);
                }
            }
        }
        match appended? {
            Appended::Stored => Ok(None),
            Appended::Differs(error) => {
                tracing::debug!(%error, nodeid, offset, "stores to an append-only file are refused");
                self.drop_refused(nodeid);
                Err(error.into())
            }
            Appended::Unprotected => Err(Errno::EIO.into()),
        }
    }

    /// The same; `is_known` to be append-only, whatever the layer shows.
    fn append_once(&self, handle: &OpenHandle, offset: u64, data: &[u8], is_known: bool) -> Outcome<Appended> {
        let node = self.node(handle.nodeid)?;
        let early = Arc::clone(self.writeback.early.lock().entry(handle.nodeid).or_default());
        let mut appends = early.lock();
        let appended = match self.layer.getattr(&Caller::ROOT, &node, Some(&*handle.file)) {
            Ok(attr) if attr.protection == Protection::None && !is_known => Ok(Appended::Unprotected),
            Ok(attr) => append_run(handle, &mut appends, attr.size, offset, data),
            Err(error) => Err(error),
        };
        if appended.is_err() {
            appends.fail();
        }
        drop(appends);
        self.settle(handle.nodeid, early);
        Ok(appended?)
    }

    /// Enters the file of a node that is not append-only any more in the table anew, to be written to anywhere; none
    /// where it still is.
    fn unprotected(&self, nodeid: u64) -> Outcome<Option<Arc<OpenHandle>>> {
        let (file, flags) = self.open_for_writing(nodeid)?;
        if flags.appends() {
            return Ok(None);
        }
        self.leave_protected(nodeid);
        self.enter(nodeid, &file, flags).map(Some)
    }

    /// Removes the file of a node that is not append-only any more from the table.
    fn leave_protected(&self, nodeid: u64) {
        for _ in self.writeback.written.take(|known| known == nodeid) {
            self.writeback.leave(nodeid);
        }
    }

    /// Stores what was kept of a file whose flags have changed, if it can be written to anywhere now: its length is
    /// no measure any more for what is still to come.
    pub(super) fn store_early(&self, nodeid: u64) {
        if !self.writeback.early.lock().contains_key(&nodeid) {
            return;
        }
        let unprotected = match self.writeback.written.get(nodeid).filter(|handle| !handle.flags.appends()) {
            Some(handle) => Ok(Some(handle)),
            None => self.unprotected(nodeid),
        };
        // Otherwise the file is protected as before, or immutable.
        if let Ok(Some(handle)) = unprotected {
            self.store_kept(&handle);
        }
    }

    /// Stores what was kept of a file by a handle that writes anywhere.
    fn store_kept(&self, handle: &OpenHandle) {
        let Some(early) = self.early_appends(handle.nodeid) else { return };
        let stored = early.lock().store_all(&*handle.file);
        if let Err(error) = stored {
            tracing::warn!(%error, nodeid = handle.nodeid, "data that was written to an append-only file is lost");
        }
        self.settle(handle.nodeid, early);
    }

    /// Data from the page cache is refused: what was kept of the file is lost with it, as the kernel reports.
    pub(super) fn write_is_refused(&self, nodeid: u64, error: Failure) {
        if !self.writes_unopened() || !self.inodes.is_known(nodeid) {
            return;
        }
        if error == Failure::from(Errno::EPERM) {
            let early = Arc::clone(self.writeback.early.lock().entry(nodeid).or_default());
            early.lock().fail();
            self.drop_refused(nodeid);
        } else if let Some(early) = self.early_appends(nodeid) {
            early.lock().fail();
        }
    }

    /// Whether acknowledged data of a file is not stored at the moment of an fsync(2). What is lost is reported once.
    pub(super) fn is_early_missing(&self, header: &Header) -> bool {
        let nodeid = header.nodeid;
        let Some(early) = self.early_appends(nodeid) else { return false };
        let is_kept = !early.lock().runs.is_empty();
        if is_kept {
            // The kernel has written back a part of the file only (msync(2), O_DSYNC), or the gap is never filled.
            self.is_written_back(header);
        }
        let is_missing = early.lock().take_missing();
        if is_missing {
            tracing::warn!(nodeid, "data that was appended behind a write that did not arrive is not stored");
        }
        self.settle(nodeid, early);
        is_missing
    }

    /// Returns the early data of a file that has some.
    fn early_appends(&self, nodeid: u64) -> Option<Arc<Mutex<EarlyAppends>>> {
        self.writeback.early.lock().get(&nodeid).cloned()
    }

    /// Ends a use of a file's early data; the last one removes it from the table, if there is nothing to remember.
    fn settle(&self, nodeid: u64, used: Arc<Mutex<EarlyAppends>>) {
        let mut early = self.writeback.early.lock();
        drop(used);
        // Uses begin under the table's lock only, so nobody has this file's lock.
        if early.get(&nodeid).is_some_and(|appends| Arc::strong_count(appends) == 1 && appends.lock().is_idle()) {
            early.remove(&nodeid);
        }
    }

    /// Removes a file that the kernel does not know any more, and so has no dirty pages of. The kernel may know it
    /// again meanwhile, and write to it.
    pub(crate) fn unknown(&self, nodeid: u64, uses: Option<Uses>) {
        if !self.agreement().opens_files_itself || self.inodes.is_known(nodeid) {
            return;
        }
        self.open.implicit.forget(nodeid);
        self.writeback.protected.forget(nodeid);
        {
            let mut early = self.writeback.early.lock();
            // An append since then would have counted as a use before.
            if self.writeback.written.uses(nodeid) == uses {
                early.remove(&nodeid);
            }
        }
        if let Some(uses) = uses {
            self.writeback.leave_unused(nodeid, uses);
        }
    }

    /// Opens a file that is about to lose a name, where the kernel may have it open without our knowledge and only a
    /// name leads to it.
    pub(crate) fn hold_file(&self, parent: &Node, name: Name<'_>) -> Outcome<Option<HeldFile>> {
        if !self.writes_unopened() || self.inodes.by_number() {
            return Ok(None);
        }
        // A missing file, or one that the kernel does not know, is open nowhere.
        let Ok(going) = self.layer.lookup(&Caller::ROOT, parent, name) else { return Ok(None) };
        let known = self.inodes.find(&going.attr.id).filter(|_| going.attr.kind == Kind::File);
        let Some((nodeid, node)) = known.and_then(|nodeid| Some((nodeid, self.inodes.node(nodeid)?))) else {
            return Ok(None);
        };
        let held = |file| Ok(Some(HeldFile { nodeid, file, last: going.attr.nlink <= 1 }));
        if let Some(written) = self.writeback.written.get(nodeid) {
            return held(Arc::clone(&written.file));
        }
        self.may_open()?;
        let file = self.layer.open(&Caller::ROOT, &node, OpenFlags::READ_WRITE);
        match file.or_else(|_| self.layer.open(&Caller::ROOT, &node, OpenFlags::READ)) {
            Ok(file) => held(file),
            // Moved meanwhile; or it cannot be opened at all.
            Err(error @ (Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM)) => Err(error.into()),
            Err(_) => Ok(None),
        }
    }

    /// Keeps a file that has lost a name: without another name, until the kernel forgets it. With other names, the
    /// kernel may know it as long as these exist, so it is kept in the list of files that were read: by the time it
    /// is evicted, it may have been found by one of them.
    pub(crate) fn nameless(&self, held: Option<HeldFile>) {
        match held {
            None => {}
            Some(HeldFile { nodeid, file, last: true }) => {
                let before = self.inodes.with(nodeid, |record| record.open_state().nameless.replace(file));
                drop(before);
            }
            Some(HeldFile { nodeid, file, .. }) => self.open.implicit.put(nodeid, file),
        }
    }

    /// Answers a creation where files are opened without a request.
    pub(crate) fn created_unopened(&self, mut out: abi::EntryOut, reply: &mut Reply<'_>) -> Outcome {
        if !self.writeback.is_patient() || !self.unannounced() {
            // The kernel accepts the reply even if an invalidation overtakes it.
            (out.attr_valid, out.attr_valid_nsec) = (0, 0);
        }
        let open_flags = fopen::KEEP_CACHE | fopen::NOFLUSH;
        Ok(reply.created(&out, &abi::OpenOut { fh: 0, open_flags, backing_id: 0 })?)
    }
}

/// Appends a run of data to a file of this size, and the kept runs that follow it; or keeps it.
///
/// # Errors
/// Errors of the write; EIO behind a write that has failed.
fn append_run(
    handle: &OpenHandle,
    appends: &mut EarlyAppends,
    size: u64,
    offset: u64,
    data: &[u8],
) -> nacre_vfs::Result<Appended> {
    if appends.has_gap && offset > size {
        return Err(Errno::EIO);
    }
    let mut run = data.to_vec();
    if let Some(kept) = appends.runs.get(&offset) {
        run.extend_from_slice(kept.get(data.len()..).unwrap_or_default());
    }
    appends.runs.insert(offset, run);
    let (mut end, mut appended) = (size, Appended::Stored);
    while let Some(next) = appends.runs.first_entry().filter(|next| *next.key() <= end) {
        let (from, run) = next.remove_entry();
        let there = usize::try_from(end - from).unwrap_or(usize::MAX).min(run.len());
        if let Err(error) = differing(handle, from, run.get(..there).unwrap_or_default()) {
            appended = Appended::Differs(error);
        }
        // The data goes to the end whatever the offset is.
        end += write_all(&*handle.file, run.get(there..).unwrap_or_default(), end)?;
    }
    if end > size && !appends.is_lost {
        // The kernel has written the page of a failed write back once more.
        appends.has_gap = false;
    }
    Ok(appended)
}
