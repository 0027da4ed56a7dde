//! Attributes: reading and changing them, symbolic links' targets, the figures of the file system.

use crate::{
    door::{Door, LASTING, caller},
    failure::Outcome,
    self_io::replacing,
    wire, writeback,
};
use fusewire::{Header, Reply, abi};
use nacre_vfs::{Attr, ChangeTime, Errno, Kind, Node, Opened, SetAttr, SetTime, Time};
use std::{sync::atomic::Ordering, time::Duration};

/// How long a write waits at most where writes are stopped; and what may be one.
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
        // Who asks by an open file closes it later.
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
        // What is written through has to know of set-id bits.
        let file = self.writeback.written.peek(header.nodeid).or(file);
        let mut change = wire::change(request);
        let only_privileges = change == SetAttr { kill_privileges: true, ..SetAttr::default() };
        if self.writeback.on()
            && (only_privileges || request.valid & (abi::fattr::SIZE | abi::fattr::CTIME) == abi::fattr::SIZE)
        {
            // The kernel keeps the times, and has left them: the size is what it was, or the change
            // itself comes later.
            change.ctime = ChangeTime::Stays;
        }
        if self.writeback.on() && self.is_outdated(header, request, &change) {
            let attr = self.layer.getattr(&caller(header), &node, file.as_deref())?;
            return Ok(reply.attr(&wire::attr_out(&self.with_sector(header.nodeid, &attr), Duration::ZERO))?);
        }
        let _locked = self.writeback.lock(header.nodeid);
        let attr = match self.layer.setattr(&caller(header), &node, file.as_deref(), &change) {
            // Nobody may set the times of a protected file. What is written to it has a time below.
            Err(Errno::EPERM) if self.writeback.on() && is_times_only(request) => {
                self.layer.getattr(&caller(header), &node, file.as_deref())?
            }
            // The kernel passes on the times of a file whose last name and open file are gone:
            // nobody can ask for them any more.
            Err(Errno::ESTALE | Errno::ENOENT) if self.writeback.on() && is_times_only(request) => {
                return Ok(reply.attr(&wire::attr_out(&self.gone(header.nodeid, &change)?, Duration::ZERO))?);
            }
            other => other?,
        };
        if change.mode.is_some_and(|mode| mode & 0o6000 != 0) {
            self.open.privileges.fetch_add(1, Ordering::AcqRel);
        }
        // A directory that everybody may search has nothing to take back.
        let searchable = attr.mode & 0o111 == 0o111;
        if attr.kind == Kind::Directory
            && (change.mode.is_some() && !searchable || change.gid.is_some() || change.uid.is_some())
        {
            self.permissions_changed();
        }
        let mut valid = if kept { self.attr_time(header.nodeid, &node, &attr) } else { Duration::ZERO };
        if self.writeback.on() && attr.kind == Kind::File {
            // The kernel takes this answer for true even if it was told otherwise meanwhile.
            if !self.writeback.is_patient() {
                valid = Duration::ZERO;
            }
            if let Some(times) = self.write_times(header.nodeid).filter(|_| change.mtime.is_some()) {
                times.agreed(attr.mtime);
            }
        }
        // Whoever made or wrote the file has it open.
        self.inodes.keeps(header.nodeid, valid >= LASTING && attr.kind != Kind::File);
        Ok(reply.attr(&wire::attr_out(&self.with_sector(header.nodeid, &attr), valid))?)
    }

    /// Whether a thread of ours asks that may hold the inode's lock.
    fn is_self_io(&self, header: &Header) -> bool {
        self.self_io.role(header.pid).is_some()
    }

    /// What is left to say of a regular file that is gone.
    fn gone(&self, nodeid: u64, change: &SetAttr) -> Outcome<Attr> {
        let (_, id) = self.inodes.node_and_id(nodeid).ok_or(Errno::ESTALE)?;
        let mtime = match change.mtime {
            Some(SetTime::To(time)) => time,
            _ => Time::default(),
        };
        Ok(Attr { atime: mtime, mtime, ctime: mtime, ..replacing::vanished(id) })
    }

    /// Whether this is the kernel passing on a time that it has from before a direct write.
    fn is_outdated(&self, header: &Header, request: &abi::SetattrIn, change: &SetAttr) -> bool {
        let Some(SetTime::To(mtime)) = change.mtime.filter(|_| is_times_only(request)) else { return false };
        let outdated = self.write_times(header.nodeid).is_some_and(|times| times.outdated(mtime));
        if outdated {
            self.self_io.attr_refresh.soon(header.nodeid);
        }
        outdated
    }

    /// `access(2)` and `chdir(2)`: asked only where the kernel leaves permissions to us.
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

    /// A question about a file whose writes are collected comes before each write(2) while they are
    /// to be announced: tells the layer, whose error is what write(2) answers.
    fn announce(&self, header: &Header, fh: Option<u64>) -> Outcome {
        let Some(handle) = self.announcer(header, fh)? else { return Ok(()) };
        let Some(permission) = handle.file.writeback_lease().filter(|permission| !permission.unannounced()) else {
            return Ok(());
        };
        // Who lets in whatever arrives does not ask where.
        let placed = !self.writeback.is_patient();
        let Some(write) = writeback::caller::writes(header.pid, placed) else { return Ok(()) };
        if permission.stopped() {
            // It holds no lock of the inode yet. Who cannot be looked at might (lseek), and is
            // waited for: he goes on soon.
            let most = if write.length.is_some() { STOPPED_MOST } else { STOPPED_UNKNOWN };
            // Where no other thread is left to serve those who pass on, he goes on as well.
            let _ = fusewire::blocking(|| permission.wait(most));
            if permission.unannounced() {
                return Ok(());
            }
        }
        // Who waits for what the kernel holds back to arrive leaves somebody to serve it.
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

    /// The node with the open file that the request names, else with any open file of it.
    fn node_and_own_file(&self, nodeid: u64, fh: Option<u64>) -> Outcome<(Node, Option<Opened>)> {
        match fh.and_then(|fh| self.open.files.get(fh)) {
            None if fh == Some(0) && self.agreement().opens_files_itself => self.node_and_file(nodeid),
            // It was open before its file was replaced by another one, which is not to be changed
            // instead.
            None if fh.is_some() && self.inodes.by_number() => Err(Errno::ESTALE.into()),
            Some(handle) if handle.nodeid == nodeid => {
                Ok((self.node(nodeid)?, Some(std::sync::Arc::clone(&handle.file))))
            }
            Some(_) => Err(Errno::EBADF.into()),
            // It was open before the process died, and is nowhere.
            None if fh.is_some() && self.inodes.node(nodeid).is_none() => Err(Errno::EBADF.into()),
            None => self.node_and_file(nodeid),
        }
    }
}

/// Whether a change is of the form in which the kernel passes on times that it keeps.
fn is_times_only(request: &abi::SetattrIn) -> bool {
    request.valid & !(abi::fattr::FH | abi::fattr::LOCKOWNER) == abi::fattr::MTIME | abi::fattr::CTIME
}
