//! Handlers for attributes: reading and changing them, targets of symbolic links, statfs(2).

use crate::{
    door::{Door, LASTING, caller},
    failure::Outcome,
    self_io::replacing,
    wire,
};
use fusewire::{Header, Reply, abi};
use nacre_vfs::{Attr, ChangeTime, Errno, Kind, Node, Opened, SetAttr, SetTime, Time};
use std::{sync::atomic::Ordering, time::Duration};

/// Maximum time for which a write waits while writes are stopped; the same for a call that may be a write.
const STOPPED_MOST: Duration = Duration::from_secs(20);
const STOPPED_UNKNOWN: Duration = Duration::from_millis(200);

impl Door {
    pub(crate) fn getattr(&self, header: &Header, fh: Option<u64>, reply: &mut Reply<'_>) -> Outcome {
        let kept = self.root_is_taken(header.nodeid);
        let (node, attr) = self.attributes(header, fh)?;
        let valid = match fh {
            _ if !kept => Duration::ZERO,
            Some(_) => self.attr_time_by_file(header.nodeid, &node, &attr),
            None => self.attr_time(header.nodeid, &node, &attr),
        };
        // A caller with an open file closes it later.
        self.inodes.keeps(header.nodeid, valid >= LASTING && fh.is_none());
        Ok(reply.attr(&wire::attr_out(&self.with_sector(header.nodeid, &attr), valid))?)
    }

    pub(crate) fn statx(&self, header: &Header, fh: Option<u64>, reply: &mut Reply<'_>) -> Outcome {
        let kept = self.root_is_taken(header.nodeid);
        let (node, attr) = self.attributes(header, fh)?;
        let valid = if kept { self.attr_time(header.nodeid, &node, &attr) } else { Duration::ZERO };
        self.inodes.keeps(header.nodeid, valid >= LASTING && fh.is_none());
        Ok(reply.statx(&wire::statx_out(&self.with_sector(header.nodeid, &attr), valid))?)
    }

    pub(crate) fn setattr(&self, header: &Header, request: &abi::SetattrIn, reply: &mut Reply<'_>) -> Outcome {
        let fh = (request.valid & abi::fattr::FH != 0).then_some(request.fh);
        let kept = self.root_is_taken(header.nodeid);
        let (node, file) = self.node_and_own_file(header.nodeid, fh)?;
        // The layer's file for writing has to know of set-id bits.
        let file = self.writeback.written.peek(header.nodeid).or(file);
        let mut change = wire::change(request);
        let only_privileges = change == SetAttr { kill_privileges: true, ..SetAttr::default() };
        if self.writeback.on()
            && (only_privileges || request.valid & (abi::fattr::SIZE | abi::fattr::CTIME) == abi::fattr::SIZE)
        {
            // The kernel keeps the times, and has not sent them: the size is the same, or the change itself comes
            // later.
            change.ctime = ChangeTime::Stays;
        }
        if self.writeback.on() && self.is_outdated(header, request, &change) {
            let attr = self.layer.getattr(&caller(header), &node, file.as_deref())?;
            return Ok(reply.attr(&wire::attr_out(&self.with_sector(header.nodeid, &attr), Duration::ZERO))?);
        }
        self.judge_group(&caller(header), &node, file.as_deref(), &mut change)?;
        let _locked = self.writeback.lock(header.nodeid);
        let attr = match self.layer.setattr(&caller(header), &node, file.as_deref(), &change) {
            // The times of a protected file cannot be set. Data written to it has a time below.
            Err(Errno::EPERM) if self.writeback.on() && is_times_only(request) => {
                self.layer.getattr(&caller(header), &node, file.as_deref())?
            }
            // The kernel sends the times of a file whose last name and open file are gone: nobody can ask for them
            // any more.
            Err(Errno::ESTALE | Errno::ENOENT) if self.writeback.on() && is_times_only(request) => {
                return Ok(reply.attr(&wire::attr_out(&self.gone(header.nodeid, &change)?, Duration::ZERO))?);
            }
            other => other?,
        };
        if change.mode.is_some_and(|mode| mode & 0o6000 != 0) {
            self.open.privileges.fetch_add(1, Ordering::AcqRel);
        }
        // A directory that everyone may search: no cached name has to be invalidated.
        let searchable = attr.mode & 0o111 == 0o111;
        if attr.kind == Kind::Directory
            && (change.mode.is_some() && !searchable || change.gid.is_some() || change.uid.is_some())
        {
            self.permissions_changed();
        }
        let mut valid = if kept { self.attr_time(header.nodeid, &node, &attr) } else { Duration::ZERO };
        if self.writeback.on() && attr.kind == Kind::File {
            // The kernel accepts this reply even if an invalidation overtakes it.
            if !self.writeback.is_patient() {
                valid = Duration::ZERO;
            }
            if let Some(times) = self.write_times(header.nodeid).filter(|_| change.mtime.is_some()) {
                times.agreed(attr.mtime);
            }
        }
        // The file is still open in the process that created or wrote it.
        self.inodes.keeps(header.nodeid, valid >= LASTING && attr.kind != Kind::File);
        Ok(reply.attr(&wire::attr_out(&self.with_sector(header.nodeid, &attr), valid))?)
    }

    /// Whether the caller is a thread of ours that may hold the inode's lock.
    fn is_self_io(&self, header: &Header) -> bool {
        self.self_io.role(header.pid).is_some()
    }

    /// Attributes of a regular file that is gone.
    fn gone(&self, nodeid: u64, change: &SetAttr) -> Outcome<Attr> {
        let (_, id) = self.inodes.node_and_id(nodeid).ok_or(Errno::ESTALE)?;
        let mtime = match change.mtime {
            Some(SetTime::To(time)) => time,
            _ => Time::default(),
        };
        Ok(Attr { atime: mtime, mtime, ctime: mtime, ..replacing::vanished(id) })
    }

    /// Whether the kernel sends a time that it had before a direct write.
    fn is_outdated(&self, header: &Header, request: &abi::SetattrIn, change: &SetAttr) -> bool {
        let Some(SetTime::To(mtime)) = change.mtime.filter(|_| is_times_only(request)) else { return false };
        let outdated = self.write_times(header.nodeid).is_some_and(|times| times.outdated(mtime));
        if outdated {
            self.self_io.attr_refresh.soon(header.nodeid);
        }
        outdated
    }

    /// `access(2)` and `chdir(2)`: requested only where the kernel does not check permissions.
    pub(crate) fn access(&self, header: &Header, mask: u32) -> Outcome {
        if self.options.default_permissions {
            return Err(Errno::ENOSYS.into());
        }
        Ok(self.layer.access(&caller(header), &self.node(header.nodeid)?, mask)?)
    }

    pub(crate) fn readlink(&self, header: &Header, reply: &mut Reply<'_>) -> Outcome {
        let target = self.layer.readlink(&caller(header), &self.node(header.nodeid)?)?;
        Ok(reply.bytes(&target)?)
    }

    pub(crate) fn statfs(&self, header: &Header, reply: &mut Reply<'_>) -> Outcome {
        let statfs = self.layer.statfs(&caller(header), &self.node(header.nodeid)?)?;
        Ok(reply.statfs(&wire::statfs(&statfs))?)
    }

    /// Reserves a write in the layer: while reservations are required, a GETATTR by a file with cached writes comes
    /// before each write(2), which returns the layer's error.
    fn announce(&self, header: &Header, fh: Option<u64>) -> Outcome {
        let Some(handle) = self.announcer(header, fh)? else { return Ok(()) };
        let Some(permission) = handle.file.writeback_lease().filter(|permission| !permission.unannounced()) else {
            return Ok(());
        };
        // A layer that accepts all data that arrives does not need the offset.
        let placed = !self.writeback.is_patient();
        let Some(write) = self.ahead(header, placed).possible_write() else { return Ok(()) };
        if permission.stopped() {
            // The caller does not hold the inode's lock yet. One that cannot be inspected might (lseek), and waits
            // only briefly.
            let most = if write.length.is_some() { STOPPED_MOST } else { STOPPED_UNKNOWN };
            // Where no other thread could serve the write-back, the caller continues as well.
            let _ = fusewire::blocking(|| permission.wait(most));
            if permission.unannounced() {
                return Ok(());
            }
        }
        // A layer that waits for dirty data to arrive needs another thread to serve it.
        let result = match self.writeback.is_patient() {
            true => fusewire::blocking(|| permission.announce(write)).unwrap_or_else(|_| permission.announce(write)),
            false => permission.announce(write),
        };
        self.writeback.announced(result.is_err());
        Ok(result?)
    }

    fn attributes(&self, header: &Header, fh: Option<u64>) -> Outcome<(Node, Attr)> {
        let (node, file) = self.node_and_own_file(header.nodeid, fh)?;
        if self.writeback.on() {
            self.announce(header, fh)?;
        }
        let attr = self.layer.getattr(&caller(header), &node, file.as_deref())?;
        if let Some(fh) = fh.filter(|_| !self.is_self_io(header)) {
            self.refuse_writers(header, fh, &attr)?;
        }
        if fh.is_none() && attr.kind == Kind::File && self.writeback.on() && !self.is_self_io(header) {
            self.true_times(header.nodeid, &attr)?;
        }
        Ok((node, attr))
    }

    /// The node with the open file of the request, else with any open file of it.
    fn node_and_own_file(&self, nodeid: u64, fh: Option<u64>) -> Outcome<(Node, Option<Opened>)> {
        match fh.and_then(|fh| self.open.files.get(fh)) {
            None if fh == Some(0) && self.agreement().opens_files_itself => self.node_and_file(nodeid),
            // It was open before its file was replaced by a rollback; the new file must not be changed instead.
            None if fh.is_some() && self.inodes.by_number() => Err(Errno::ESTALE.into()),
            Some(handle) if handle.nodeid == nodeid => {
                Ok((self.node(nodeid)?, Some(std::sync::Arc::clone(&handle.file))))
            }
            Some(_) => Err(Errno::EBADF.into()),
            // It was open before the process died, and could not be restored.
            None if fh.is_some() && self.inodes.node(nodeid).is_none() => Err(Errno::EBADF.into()),
            None => self.node_and_file(nodeid),
        }
    }
}

/// Whether a SETATTR has the form in which the kernel sends times that it keeps.
fn is_times_only(request: &abi::SetattrIn) -> bool {
    request.valid & !(abi::fattr::FH | abi::fattr::LOCKOWNER) == abi::fattr::MTIME | abi::fattr::CTIME
}
