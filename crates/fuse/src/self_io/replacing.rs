//! Files replaced under a mount by a rollback: the same inode numbers now have the content of the snapshot.
//!
//! Called by `mount.rs`'s users before the layer switches to the new files, and afterwards. Directories stay valid
//! for the kernel, so that a shell can continue in one that still exists. Of files the kernel has content, a size and
//! perhaps writes that belong to the old ones. So each file that it knows is marked as a bad inode, by a reply with a
//! generation that no file has ([`NO_GENERATION`]); then every operation on a descriptor from before is EIO. A file
//! that still exists keeps its generation, so file handles lead to it. The reply is one to a LOOKUP by a thread of
//! ours, in a directory that nobody else can enter. Invariants:
//! * the old file handles are removed first, so that no request in flight reaches the new files;
//! * all requests wait at the quiesce lock (`gate.rs`) until the old inodes are bad: no reply returns one;
//! * the thread is in its directory before any request waits: it takes no lock that a waiting caller may hold.

use super::gate::{DIRECTORY, Replacer, within};
use crate::{door::Door, failure::Outcome, inodes::Found, mount::Mount, wire};
use fusewire::{
    Op, Reply, Request,
    abi::{self, fattr},
};
use nacre_vfs::{Attr, Caller, Errno, FileId, Kind, NO_GENERATION, Protection, Time};
use rustix::io::Errno as SysErrno;
use std::{io, time::Duration};

/// Node id of the thread's lookup directory: no inode number is as large.
const HIDDEN: u64 = u64::MAX;
/// Attribute timeout of that directory.
const LASTING: Duration = Duration::from_secs(24 * 60 * 60);
/// Maximum number of files without a descriptor that are marked as bad as well: a process may hold one by `O_PATH`
/// alone. All others are dropped with their names.
const MOST: usize = 65_536;
/// Maximum time for the kernel to process the invalidation of names.
const TOLD: Duration = Duration::from_secs(10);

impl Mount {
    /// Prepares a rollback: all requests wait from now on, and dirty data that the kernel still writes back is
    /// refused, so that it does not reach the new files. Ends with [`Mount::replaced`] or [`Mount::stays`].
    pub fn replacing(&self) {
        let door = self.door();
        door.survives.iter().for_each(|survives| survives.memory.replacing(true));
        // An error is reported when the thread is needed.
        let place = door.options.mountpoint.clone();
        let device = self.device_number().ok_or_else(|| SysErrno::STALE.into());
        *door.replacer.lock() = Some(device.and_then(|device| Replacer::start(&door.self_io, place, device)));
        door.writeback.written.close(true);
        door.gate.close();
    }

    /// Ends the preparation without a rollback.
    pub fn stays(&self) {
        self.open_again(&[]);
        self.are_known();
    }

    /// Finishes a rollback: files with these inode numbers (from, to) were replaced, and the kernel's state of them
    /// is invalid from now on. Returns when the kernel has dropped it.
    ///
    /// # Errors
    /// Where not all of it could be invalidated.
    pub fn replaced(&self, numbers: &[(u64, u64)]) -> io::Result<()> {
        self.prune(numbers);
        let made_bad = self.replace(numbers);
        self.open_again(numbers);
        // The dentries of the thread's lookups would keep the inodes in the kernel's memory.
        if let Ok(root) = self.door().layer.root() {
            self.forget_name(root.attr.id, DIRECTORY.as_bytes());
        }
        let forgotten = self.delivered(TOLD);
        self.invalidate_everything();
        let told = forgotten && self.delivered(TOLD);
        if !told && !self.ended() {
            return Err(io::Error::from(io::ErrorKind::TimedOut));
        }
        made_bad.inspect(|()| self.are_known())
    }

    /// Makes the kernel drop unused dentries of inodes with these numbers (from, to), files before directories and
    /// the deepest directories first (by their numbers: most directories are created before their content), as a
    /// child keeps its parent in use. Done before the inodes are marked as bad, because afterwards the kernel does
    /// not find them. Otherwise dentries of removed names would keep inodes that are removed later, and their space,
    /// until memory is short. Before Linux 6.18, which has no such notification, they do.
    fn prune(&self, numbers: &[(u64, u64)]) {
        let door = self.door();
        let within = within(numbers);
        let (mut nodes, mut directories) = (Vec::new(), Vec::new());
        door.inodes.for_each(|nodeid| {
            if !within(door.inodes.number(nodeid)) {
                return;
            }
            let same_kind = if door.inodes.is_directory(nodeid) { &mut directories } else { &mut nodes };
            same_kind.push(nodeid);
        });
        directories.sort_unstable_by_key(|nodeid| std::cmp::Reverse(door.inodes.number(*nodeid)));
        nodes.append(&mut directories);
        door.kernel.tell(|notifier| {
            let pruned = notifier.prune(&nodes);
            pruned.inspect_err(|error| tracing::debug!(%error, "unused dentries are not pruned")).is_ok()
        });
    }

    fn open_again(&self, replaced: &[(u64, u64)]) {
        let door = self.door();
        door.writeback.written.close(false);
        // The thread ends without a message.
        let left = door.replacer.lock().take();
        drop(left);
        door.gate.open(replaced);
    }

    /// Notes that the kernel's state of the files is consistent again.
    fn are_known(&self) {
        self.door().survives.iter().for_each(|survives| survives.memory.replacing(false));
    }

    fn replace(&self, numbers: &[(u64, u64)]) -> io::Result<()> {
        let mut files = self.close_files(numbers);
        let door = self.door();
        let within = within(numbers);
        door.inodes.for_each(|nodeid| {
            let number = door.inodes.number(nodeid);
            if (files.len() < MOST || door.writes_unopened()) && within(number) && !door.inodes.is_directory(nodeid) {
                files.push(number);
            }
        });
        files.sort_unstable();
        files.dedup();
        let replacer = door.replacer.lock().take();
        if files.is_empty() {
            return Ok(());
        }
        replacer.ok_or(SysErrno::IO)??.make_bad(files)
    }

    /// Closes all open files with these inode numbers (from, to) of all users; returns their numbers. Later
    /// operations on them are ESTALE.
    pub fn close_files(&self, numbers: &[(u64, u64)]) -> Vec<u64> {
        let door = self.door();
        let within = within(numbers);
        let of = |nodeid| within(door.inodes.number(nodeid));
        let closed = door.open.files.take(of);
        let written = door.writeback.written.take(of);
        // Data for the old files.
        door.writeback.early.lock().retain(|nodeid, _| !of(*nodeid));
        let open = closed.iter().map(|(_, handle)| handle).chain(&written);
        let files = open.map(|handle| door.inodes.number(handle.nodeid)).collect();
        for handle in written {
            door.writeback.leave(handle.nodeid);
        }
        door.open.implicit.clear();
        for (fh, handle) in closed {
            door.closed(fh, handle);
        }
        files
    }
}

impl Door {
    /// Holds a request that came during a rollback; afterwards ESTALE if it is about a replaced file. Directories
    /// stay valid.
    pub(crate) fn wait_at_gate(&self, request: &Request<'_>) -> Outcome {
        let about = match request.op {
            Op::Link { nodeid, .. } => nodeid,
            _ => request.header.nodeid,
        };
        // A copy is refused for its target as well.
        let target = match request.op {
            Op::CopyFileRange { nodeid_out, .. } => nodeid_out,
            _ => about,
        };
        let numbers = [about, target].map(|nodeid| self.inodes.number(nodeid));
        let passed = fusewire::blocking(|| self.gate.pass(&numbers));
        if self.inodes.is_directory(about) { Ok(()) } else { after_gate(passed, &request.op) }
    }

    /// Answers a request of the rollback's thread, if it is about its lookup directory; false otherwise.
    ///
    /// # Errors
    /// Errors of the lookup or of the reply.
    pub(crate) fn answer_replacer(&self, request: &Request<'_>, reply: &mut Reply<'_>) -> Outcome<bool> {
        match (request.header.nodeid, &request.op) {
            (HIDDEN, Op::Lookup { name }) => self.lookup_replaced(name, reply)?,
            (HIDDEN, Op::Getattr { .. }) => reply.attr(&wire::attr_out(&hidden(), LASTING))?,
            (nodeid, Op::Lookup { name }) if self.inodes.is_root(nodeid) && *name == DIRECTORY.as_bytes() => {
                // The name is valid for this lookup only.
                reply.entry(&wire::entry(HIDDEN, &hidden(), Duration::ZERO, LASTING))?;
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Answers a lookup in that directory: the name of a file is its inode number.
    fn lookup_replaced(&self, name: &[u8], reply: &mut Reply<'_>) -> Outcome {
        let number = std::str::from_utf8(name).ok().and_then(|name| name.parse().ok()).ok_or(Errno::ENOENT)?;
        let node = self.node(self.inodes.nodeid(number).ok_or(Errno::ESTALE)?)?;
        let attr = match self.layer.getattr(&Caller::ROOT, &node, None) {
            Ok(attr) if attr.kind == Kind::Directory => return Err(Errno::EISDIR.into()),
            Ok(attr) => attr,
            Err(Errno::ENOENT | Errno::ESTALE) => vanished(self.layer.id(&node)?),
            Err(error) => return Err(error.into()),
        };
        let registered = self.inodes.register(&node, &attr, Found::below(number));
        let mut out: abi::EntryOut = wire::entry(registered.nodeid, &attr, Duration::ZERO, Duration::ZERO);
        out.generation = NO_GENERATION.into();
        Ok(reply.entry(&out)?)
    }
}

/// Whether a request about a file goes on, which has `passed` the quiesce lock: whether its file was replaced
/// meanwhile, or why it could not wait.
///
/// # Errors
/// ESTALE for a replaced file. The error of the wait for a change by node id alone, which could reach the new file; all
/// other requests are delayed by the layer itself, or meet a file handle that is closed.
fn after_gate(passed: Result<bool, fusewire::Errno>, op: &Op<'_>) -> Outcome {
    const BY_NODE: u32 = fattr::SIZE | fattr::MODE | fattr::UID | fattr::GID;
    match passed {
        Ok(true) => Err(Errno::ESTALE.into()),
        Ok(false) => Ok(()),
        Err(error) => match op {
            Op::Setattr(change) if change.valid & BY_NODE != 0 => Err(error.into()),
            Op::Write { fh: 0, .. } | Op::Fallocate { fh: 0, .. } | Op::Ioctl { fh: 0, .. } => Err(error.into()),
            Op::CopyFileRange { fh_out: 0, .. } => Err(error.into()),
            _ => Ok(()),
        },
    }
}

/// Attributes of the lookup directory: owned by us, so that no other permission is needed.
fn hidden() -> Attr {
    let id = FileId { fs: 0, ino: HIDDEN, generation: 0 };
    Attr { kind: Kind::Directory, mode: 0o700, nlink: 2, uid: rustix::process::geteuid().as_raw(), ..vanished(id) }
}

/// Attributes of a file that no longer exists.
pub(crate) fn vanished(id: FileId) -> Attr {
    let time = Time::default();
    Attr {
        id,
        kind: Kind::File,
        mode: 0,
        nlink: 0,
        uid: 0,
        gid: 0,
        rdev_major: 0,
        rdev_minor: 0,
        size: 0,
        blocks: 0,
        blksize: 4096,
        atime: time,
        mtime: time,
        ctime: time,
        btime: None,
        protection: Protection::None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_truncation_or_write_from_before_a_rollback_reaches_the_new_file() {
        let setattr = |valid| Op::Setattr(abi::SetattrIn { valid, ..abi::SetattrIn::default() });
        let getattr = Op::Getattr { fh: None };
        let write = |fh| Op::Write { fh, offset: 0, data: b"old", flags: 0, write_flags: 0, lock_owner: None };
        for op in [setattr(fattr::SIZE), setattr(fattr::MTIME | fattr::CTIME), getattr] {
            assert_eq!(after_gate(Ok(true), &op), Err(Errno::ESTALE.into()));
            assert_eq!(after_gate(Ok(false), &op), Ok(()));
        }
        // It could not wait.
        for error in [fusewire::Errno::EINTR, fusewire::Errno::EAGAIN] {
            assert_eq!(after_gate(Err(error), &setattr(fattr::SIZE | fattr::FH)), Err(error.into()));
            assert_eq!(after_gate(Err(error), &setattr(fattr::MTIME | fattr::CTIME)), Ok(()));
            assert_eq!(after_gate(Err(error), &getattr), Ok(()));
            assert_eq!(after_gate(Err(error), &write(0)), Err(error.into()));
            assert_eq!(after_gate(Err(error), &write(1)), Ok(()));
            let fallocate = Op::Fallocate { fh: 0, offset: 0, length: 1, mode: 0 };
            let ioctl = Op::Ioctl { fh: 0, flags: 0, cmd: 0, arg: 0, input: &[], out_size: 0 };
            assert_eq!(after_gate(Err(error), &fallocate), Err(error.into()));
            assert_eq!(after_gate(Err(error), &ioctl), Err(error.into()));
            let copy = |fh_out| Op::CopyFileRange {
                fh_in: 1,
                off_in: 0,
                nodeid_out: 2,
                fh_out,
                off_out: 0,
                len: 1,
                flags: 0,
                wide: false,
            };
            assert_eq!(after_gate(Err(error), &copy(0)), Err(error.into()));
            assert_eq!(after_gate(Err(error), &copy(1)), Ok(()));
        }
    }
}
