//! Handlers for opening, creating and closing files; `passthrough.rs` decides which of them are in passthrough.

use super::unopened::HeldFile;
use crate::{
    door::{Door, caller, name},
    failure::Outcome,
    inodes::Found,
    open_files::OpenHandle,
    passthrough::{self, IoMode},
    self_io::{
        own_mount::InodeKey,
        times::{self, Times},
    },
    survival::opens::{OpenLeft, OpenRecord},
    wire,
};
use fusewire::{
    Header, Reply,
    abi::{self, fopen},
};
use nacre_vfs::{
    AnyOpen, Attr, Caller, Coherence, Entry, Errno, Invalidation, Kind, LockKind, LockOwner, Node, OpenFlags, Opened,
    Scope, SetAttr,
};
use parking_lot::Mutex;
use std::sync::{Arc, atomic::AtomicU64};

/// Flags that are forwarded to the layer: access mode, O_EXCL, O_TRUNC, O_APPEND, O_NONBLOCK, O_DSYNC, O_NOATIME and
/// O_SYNC. All others concern only the kernel's own open file (O_NOFOLLOW, O_CREAT and similar are done). O_DIRECT is
/// forwarded, too: the layer decides whether its storage gets it.
const LAYER_FLAGS: u32 = 0o3 | 0o200 | 0o1000 | 0o2000 | 0o4000 | 0o10_000 | 0o1_000_000 | 0o4_010_000 | O_DIRECT;
/// `__FMODE_EXEC`: the file is opened for execve(2) (include/linux/fs.h).
const RUN: u32 = 0o40;
/// `X_OK`.
const EXECUTE: u32 = 1;
const O_DIRECT: u32 = rustix::fs::OFlags::DIRECT.bits();

impl Door {
    pub(crate) fn open(&self, header: &Header, flags: u32, open_flags: u32, reply: &mut Reply<'_>) -> Outcome {
        if self.agreement().opens_files_itself {
            return Err(Errno::ENOSYS.into());
        }
        self.may_open()?;
        if let Some((_, granted)) = self.granted_before(header) {
            return Ok(reply.open(&granted)?);
        }
        let runs = flags & RUN != 0;
        let flags = layer_flags(flags);
        let caller = caller(header);
        let (node, kept) = self.node_and_kept(header, flags)?;
        // Layers of several file systems may allow execution in some of them only.
        if runs && (!self.options.default_permissions || self.inodes.by_number()) {
            self.layer.access(&caller, &node, EXECUTE)?;
        }
        if flags.truncates()
            && !flags.writes()
            && self.inodes.node_and_id(header.nodeid).is_some_and(|(_, id)| self.open.running.runs(id.ino))
        {
            return Err(Errno::ETXTBSY.into());
        }
        let file = match kept {
            Some(file) => file,
            None => self.layer.open(&caller, &node, flags)?,
        };
        if flags.truncates() && open_flags & abi::flag::OPEN_KILL_SUIDGID != 0 {
            self.kill_privileges(&caller, &node, &file)?;
        }
        let granted = if self.writeback.on() {
            self.grant_with_writeback(header, header.nodeid, &node, flags, file, None)?
        } else {
            self.grant(header, header.nodeid, &node, flags, file)?
        };
        Ok(reply.open(&granted)?)
    }

    pub(crate) fn create(
        &self,
        header: &Header,
        bytes: &[u8],
        flags: u32,
        mode: u32,
        umask: u32,
        reply: &mut Reply<'_>,
    ) -> Outcome {
        let name = name(bytes)?;
        self.may_open()?;
        let (parent, id) = self.parent(header.nodeid)?;
        let flags = layer_flags(flags);
        let caller = self.creator(header, umask);
        // The kernel takes the reply for a new file and checks nothing any more: a file that others created
        // meanwhile, under a name that the kernel still has as missing, must not be returned. After another lookup,
        // it is opened like any other.
        let made = self.layer.create(&caller, &parent, name, mode & 0o7777, OpenFlags(flags.0 | OpenFlags::EXCL));
        let (entry, file) = match made {
            Err(Errno::EEXIST) if !flags.exclusive() => return Err(Errno::ESTALE.into()),
            other => other?,
        };
        let names = self.new_name_time(&parent);
        let out = self.found(&entry, Found::at(header.nodeid, id, bytes), names);
        self.used(out.nodeid);
        self.created(header, out, &entry, file, flags, reply)
    }

    pub(crate) fn tmpfile(&self, header: &Header, flags: u32, mode: u32, umask: u32, reply: &mut Reply<'_>) -> Outcome {
        self.may_open()?;
        let (parent, id) = self.parent(header.nodeid)?;
        let flags = layer_flags(flags);
        let caller = self.creator(header, umask);
        let (entry, file) = self.layer.tmpfile(&caller, &parent, mode & 0o7777, flags)?;
        // It has no name, so there is no timeout for one.
        let out = self.found(&entry, Found::below(id.ino), std::time::Duration::ZERO);
        if self.writes_unopened() && !self.inodes.by_number() {
            self.nameless(Some(HeldFile { nodeid: out.nodeid, file: Arc::clone(&file), last: true }));
        }
        self.created(header, out, &entry, file, flags, reply)
    }

    pub(crate) fn release(&self, fh: u64, lock_owner: Option<u64>) -> Outcome {
        self.forget_open(fh);
        let Some(handle) = self.open.files.remove(fh) else { return Ok(()) };
        if let (Some(owner), true) = (lock_owner, self.options.lock_forwarding)
            && let Err(error) = handle.file.flock(LockOwner(owner), LockKind::Unlock, false)
        {
            // The file below is closed next, which drops the lock in any case.
            tracing::debug!(%error, "a lock could not be dropped at close");
        }
        self.end_own_locks(&handle);
        if let (Some(before), Some(descriptor)) = (handle.before, handle.file.backing())
            && passthrough::signature(descriptor).is_none_or(|(now, _)| now != before)
        {
            self.passed_by(handle.nodeid, handle.flags.maps_for_writing());
        }
        self.closed(fh, handle);
        Ok(())
    }

    /// Invalidates the attributes of a file that was written to while it was open in passthrough. The kernel notes
    /// that for write(2), not for stores to a mapping: so they are invalidated soon, and at once where the file could
    /// be mapped for writing. (Any thread may invalidate attributes alone: the kernel takes no lock of the file for
    /// that.)
    fn passed_by(&self, nodeid: u64, mappable: bool) {
        if mappable && self.kernel.tell(|notifier| notifier.inval_inode(nodeid, -1, 0).is_ok()) {
            return;
        }
        self.invalidations.written(nodeid);
    }

    /// Removes the record of an open file, before its slot is reused.
    fn forget_open(&self, fh: u64) {
        self.survives.iter().for_each(|survives| survives.opens.closed(fh));
    }

    /// Ends an open file: its part in the inode's I/O mode, and its entry in the inode's list.
    pub(crate) fn closed(&self, fh: u64, handle: Arc<OpenHandle>) {
        self.forget_open(fh);
        if handle.collected && self.writeback.leave(handle.nodeid) {
            self.changed_meanwhile(handle.nodeid);
        }
        let keep = (self.open.keeps && !handle.flags.writes() && !handle.file.is_on_inner_mount())
            .then(|| (Arc::clone(&handle.file), handle.flags, handle.uid));
        let ended = self.inodes.with(handle.nodeid, |record| {
            let state = record.open_state_if_any()?;
            let mappable = state.is_mappable() && handle.flags.maps_for_writing();
            let file = state.take(fh)?;
            if !state.has_writers() {
                self.writeback.protected.forget(handle.nodeid);
            }
            let left = self.open.passthrough.end(state, keep);
            if mappable {
                *record.outlived() = record.outlived().checked_add(1).unwrap_or(1);
            }
            record.tidy();
            Some((file, left))
        });
        if let Some((file, left)) = ended.flatten() {
            self.open.passthrough.finish(left, handle.nodeid, &self.inodes);
            drop(file);
        }
        if let Some(times) = &handle.times {
            self.writer_gone(handle.nodeid, times);
        }
        drop(handle);
        self.open.closes.heard();
    }

    /// Closes the file of a handle that the kernel never got.
    pub(crate) fn ungrant(&self, fh: u64) {
        self.forget_open(fh);
        if let Some(handle) = self.open.files.remove(fh) {
            self.closed(fh, handle);
        }
    }

    /// Returns the open file behind a handle.
    pub(crate) fn handle_of(&self, fh: u64) -> Outcome<Arc<OpenHandle>> {
        // A mount whose files are opened without requests, for reading, was remounted writable.
        if fh == 0 && self.agreement().opens_files_itself {
            return Err(Errno::EROFS.into());
        }
        // It was open before its file was replaced by a rollback.
        let unknown = if self.inodes.by_number() { Errno::ESTALE } else { Errno::EBADF };
        self.open.files.get(fh).ok_or(unknown.into())
    }

    /// Clears set-id bits and capabilities, as the native call would have done for this caller.
    pub(crate) fn kill_privileges(&self, caller: &Caller, node: &Node, file: &Opened) -> Outcome {
        let mut change = SetAttr { kill_privileges: true, ..SetAttr::default() };
        self.judge_group(caller, node, Some(&**file), &mut change)?;
        self.layer.setattr(caller, node, Some(&**file), &change)?;
        Ok(())
    }

    /// Determines [`SetAttr::outside_group`] of a change that drops set-id bits.
    pub(crate) fn judge_group(&self, caller: &Caller, node: &Node, file: AnyOpen<'_>, change: &mut SetAttr) -> Outcome {
        const SET_GROUP_ID: u32 = 0o2000;
        const GROUP_EXECUTES: u32 = 0o010;
        if !change.kill_privileges || change.mode.is_some() {
            return Ok(());
        }
        let attr = self.layer.getattr(caller, node, file)?;
        if attr.kind == Kind::Directory || attr.mode & (SET_GROUP_ID | GROUP_EXECUTES) != SET_GROUP_ID {
            return Ok(());
        }
        // Where /proc hides the process (hidepid=), the bit goes: the safe side.
        let process = nacre_sys::processes::ids(caller.pid).unwrap_or_default();
        // On mounts that can be idmapped, requests have no ids, which looks like root.
        let (uid, gid) = match &process {
            Some(process) if caller.uid == 0 => (process.uid, process.gid),
            _ => (caller.uid, caller.gid),
        };
        // Root may keep the bit (CAP_FSETID).
        let is_member = gid == attr.gid || process.is_some_and(|process| process.groups.contains(&attr.gid));
        change.outside_group = uid != 0 && !is_member;
        Ok(())
    }

    /// Returns the node, and a file kept open since its last close that can serve this open.
    fn node_and_kept(&self, header: &Header, flags: OpenFlags) -> Outcome<(Node, Option<Opened>)> {
        if !self.open.keeps || flags.writes() || flags.truncates() {
            return Ok((self.node(header.nodeid)?, None));
        }
        // Where the kernel does not check permissions, the layer must: for this user, not for the previous one.
        let uid = (!self.options.default_permissions).then_some(caller(header).uid);
        let found = self
            .inodes
            .with(header.nodeid, |record| (record.node(), self.open.passthrough.reusable(record, flags, uid)));
        match found {
            Some((Some(node), kept)) => Ok((node, kept)),
            _ => Err(Errno::ESTALE.into()),
        }
    }

    pub(crate) fn created(
        &self,
        header: &Header,
        mut out: abi::EntryOut,
        entry: &Entry,
        file: Opened,
        flags: OpenFlags,
        reply: &mut Reply<'_>,
    ) -> Outcome {
        if self.writes_unopened() {
            return self.created_unopened(out, reply);
        }
        let granting = if self.writeback.on() {
            let granted = self.grant_with_writeback(header, out.nodeid, &entry.node, flags, file, Some(&entry.attr));
            if flags.writes() && !(self.writeback.is_patient() && self.writeback.caches_writes(out.nodeid)) {
                // The kernel accepts the reply even if an invalidation overtakes it; and it will not note times of
                // direct writes.
                (out.attr_valid, out.attr_valid_nsec) = (0, 0);
            }
            granted
        } else {
            self.grant(header, out.nodeid, &entry.node, flags, file)
        };
        let granted = match granting {
            Ok(granted) => granted,
            Err(error) => {
                self.forget_lookups(out.nodeid, 1);
                return Err(error);
            }
        };
        Ok(reply.created(&out, &granted)?)
    }

    /// Enters an open file into the tables and decides how it is served.
    fn grant(
        &self,
        header: &Header,
        nodeid: u64,
        node: &Node,
        flags: OpenFlags,
        file: Opened,
    ) -> Outcome<abi::OpenOut> {
        let caller = &caller(header);
        let descriptor = file.backing();
        if descriptor.is_some() {
            self.open.passthrough.wait_for_start();
        }
        let signature = descriptor.filter(|_| flags.writes()).map(passthrough::signature);
        // A file whose attributes cannot be read is treated as one with set-id bits.
        let set_id = signature.is_some_and(|signature| signature.is_none_or(|(_, set_id)| set_id));
        // The kernel writes with the daemon's credentials, which would keep set-id bits; so the daemon writes to such
        // a file.
        let pass = descriptor.filter(|_| !set_id);
        let before = signature.flatten().map(|(digest, _)| digest);
        let handle = OpenHandle { before, ..handle(caller, nodeid, flags, &file) };
        let fh = self.open.files.insert(handle);
        let begun = self.inodes.with(nodeid, |record| {
            let state = record.open_state();
            state.add(fh, flags, Arc::clone(&file));
            self.open.passthrough.begin(state, pass)
        });
        let Some((mode, left)) = begun else {
            self.open.files.remove(fh);
            return Err(Errno::ESTALE.into());
        };
        self.open.passthrough.finish(left, nodeid, &self.inodes);
        self.opened_for_mapping(nodeid, node, flags, &file);
        if let Some(survives) = &self.survives {
            let backing = if let IoMode::Passthrough(id) = mode { Some(id) } else { None };
            let unique = header.unique & !abi::UNIQUE_RESEND;
            let left = OpenLeft::of(&*file);
            let uid = caller.uid;
            survives.opens.made(&OpenRecord { fh, nodeid, flags, uid, left, backing, collected: false, unique });
            // A change before the record was written has not been recorded.
            survives.opens.changed(fh, OpenLeft::of(&*file));
        }
        let mut out = abi::OpenOut { fh, open_flags: self.always(), backing_id: 0 };
        match mode {
            IoMode::Passthrough(id) => {
                out.open_flags |= fopen::PASSTHROUGH;
                out.backing_id = id;
                if set_id {
                    // The inode is in passthrough already, so this open must be as well: the bits are removed now
                    // instead of at the first write.
                    self.kill_privileges(caller, node, &file).inspect_err(|_| self.ungrant(fh))?;
                }
            }
            IoMode::Daemon if self.options.direct_io => {
                out.open_flags |= fopen::DIRECT_IO | fopen::PARALLEL_DIRECT_WRITES
            }
            IoMode::Daemon if self.cache_stays(caller, nodeid, node, &file) => out.open_flags |= fopen::KEEP_CACHE,
            IoMode::Daemon => {}
        }
        Ok(out)
    }

    /// Enters an open file like [`Door::grant`], with write-back caching: writes that the layer allows to be cached
    /// go to the page cache, all others are direct writes, one request each. Reads are cached. `created` are the
    /// attributes of a new file.
    fn grant_with_writeback(
        &self,
        header: &Header,
        nodeid: u64,
        node: &Node,
        flags: OpenFlags,
        file: Opened,
        created: Option<&Attr>,
    ) -> Outcome<abi::OpenOut> {
        let caller = &caller(header);
        let collected = flags.writes() && self.writeback.join(nodeid, &file);
        let direct = flags.writes() && !collected;
        let times = if direct { self.begin_direct(caller, nodeid, node, &file, created) } else { None };
        if let Some(times) = &times {
            self.doubt(InodeKey { nodeid, generation: file.generation() }, times);
        }
        let fh = self.open.files.insert(OpenHandle { collected, times, ..handle(caller, nodeid, flags, &file) });
        let begun = self.inodes.with(nodeid, |record| {
            let state = record.open_state();
            // The end of the last writer before it has been noted under the same lock.
            let is_first = !state.has_writers();
            state.add(fh, flags, Arc::clone(&file));
            (is_first, self.open.passthrough.begin(state, None))
        });
        let Some((is_first, (_, left))) = begun else {
            self.ungrant(fh);
            return Err(Errno::ESTALE.into());
        };
        if flags.writes() && is_first && created.is_none() {
            self.begin_protection(nodeid, node, &file);
        }
        self.open.passthrough.finish(left, nodeid, &self.inodes);
        if let Some(survives) = &self.survives {
            let (unique, uid) = (header.unique & !abi::UNIQUE_RESEND, caller.uid);
            let open = OpenRecord { fh, nodeid, flags, uid, left: None, backing: None, collected, unique };
            survives.opens.made(&open);
        }
        // Without this flag, an open drops the pages of the file, after writing dirty ones back.
        let keep =
            flags.writes() || self.writeback.caches_writes(nodeid) || self.cache_stays(caller, nodeid, node, &file);
        let mut open_flags = self.always() | if keep { fopen::KEEP_CACHE } else { 0 };
        if direct {
            // The kernel still serializes writes that append or extend the file.
            open_flags |= fopen::DIRECT_IO | fopen::PARALLEL_DIRECT_WRITES;
        }
        Ok(abi::OpenOut { fh, open_flags, backing_id: 0 })
    }

    /// Invalidates a file that others may have changed while writes to it were cached.
    pub(crate) fn changed_meanwhile(&self, nodeid: u64) {
        if let Some((_, id)) = self.inodes.node_and_id(nodeid) {
            self.change(Invalidation::Content { id });
        }
    }

    /// Opens a file for direct writes, whose times the kernel will not note: remembers the time that it has now.
    pub(crate) fn begin_direct(
        &self,
        caller: &Caller,
        nodeid: u64,
        node: &Node,
        file: &Opened,
        created: Option<&Attr>,
    ) -> Option<Arc<Times>> {
        let known =
            self.inodes.with(nodeid, |record| record.open_state().times.as_ref().map(times::one_more)).flatten();
        known.or_else(|| {
            let attr = created.copied().or_else(|| self.layer.getattr(caller, node, Some(&**file)).ok())?;
            self.inodes.with(nodeid, |record| times::begin(&mut record.open_state().times, &attr, created.is_some()))
        })
    }

    pub(crate) fn always(&self) -> u32 {
        if self.options.lock_forwarding || self.options.reports_at_close { 0 } else { fopen::NOFLUSH }
    }

    /// Whether the kernel's cached pages of a file are still its content.
    fn cache_stays(&self, caller: &Caller, nodeid: u64, node: &Node, file: &Opened) -> bool {
        let Ok(attr) = self.layer.getattr(caller, node, Some(&**file)) else { return false };
        match self.layer.coherence(Scope::Attributes(node, &attr)) {
            Coherence::Exclusive | Coherence::Watched => true,
            Coherence::Shared => {
                let digest = wire::content_digest(&attr);
                self.inodes.with(nodeid, |record| record.replace_extra(digest)) == Some(digest)
            }
            Coherence::PerCaller => false,
        }
    }
}

/// Creates the handle of a file that the kernel opens without a request.
pub(super) fn unopened(nodeid: u64, flags: OpenFlags, file: &Opened) -> OpenHandle {
    OpenHandle { collected: true, ..handle(&Caller::ROOT, nodeid, flags, file) }
}

pub(crate) fn handle(caller: &Caller, nodeid: u64, flags: OpenFlags, file: &Opened) -> OpenHandle {
    OpenHandle {
        file: Arc::clone(file),
        nodeid,
        flags,
        uid: caller.uid,
        stripped: AtomicU64::new(0),
        collected: false,
        times: None,
        before: None,
        lock_owners: Mutex::default(),
    }
}

pub(crate) fn layer_flags(flags: u32) -> OpenFlags {
    OpenFlags(flags & LAYER_FLAGS)
}
