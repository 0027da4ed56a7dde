//! Files that became others under a mount: a file system was rolled back, and the same inode
//! numbers mean what they meant then.
//!
//! Called by `mount.rs` when the layer shows the new ones ([`nacre_vfs::Numbered::generation`]).
//! Directories stay what they are for the kernel, so that a shell goes on in one that is still
//! there. Of files it has content, a size and perhaps writes that belong to the old ones: each one
//! that it knows is made bad, as it calls that, by an answer with the new generation, and
//! everything that is asked of it through a descriptor from before is EIO. That answer is one to a
//! look-up which a thread of ours makes. Invariants: file handles of before are gone first, so
//! nothing that is under way reaches the new files; the names in the answers are nobody else's to
//! look up.

use super::{Role, own_mount::Entered};
use crate::{door::Door, failure::Outcome, mount::Mount, wire};
use fusewire::{Header, Reply, abi};
use nacre_vfs::{Attr, Caller, Errno, FileId, Kind, Time};
use rustix::{
    fs::{AtFlags, CWD, StatxFlags},
    io::Errno as SysErrno,
};
use std::{io, time::Duration};

/// What the names of such look-ups begin with, before the inode number.
const NAME: &str = ".nacre-replaced-";
/// Files without a descriptor, of those that the kernel knows, that are made bad as well: somebody
/// may hold one by its path alone. All others go with their names.
const MOST: usize = 65_536;
/// How long the kernel may take to be told that names are to be asked for anew.
const TOLD: Duration = Duration::from_secs(10);

impl Mount {
    /// Files with these inode numbers (from, to) were replaced by others: what the kernel has of
    /// them is of no use from now on. Returns when it knows.
    ///
    /// # Errors
    /// Where it could not be told of all of them.
    pub fn replaced(&self, numbers: &[(u64, u64)]) -> io::Result<()> {
        let replaced = self.replace(numbers);
        self.door().writeback.written.close(false);
        replaced
    }

    /// Files are about to become others: what the kernel still passes on is refused from now on, so
    /// that it does not reach those in their place. Until [`Mount::replaced`] or [`Mount::stays`].
    pub fn replacing(&self) {
        self.door().writeback.written.close(true);
    }

    /// They are the same after all.
    pub fn stays(&self) {
        self.door().writeback.written.close(false);
    }

    fn replace(&self, numbers: &[(u64, u64)]) -> io::Result<()> {
        let mut files = self.close_files(numbers);
        let door = self.door();
        let within = within(numbers);
        door.writeback.replaced();
        door.inodes.for_each(|nodeid| {
            let number = door.inodes.number(nodeid);
            if (files.len() < MOST || door.writes_unopened()) && within(number) && !door.inodes.is_directory(nodeid) {
                files.push(number);
            }
        });
        files.sort_unstable();
        files.dedup();
        let names: Vec<String> = files.iter().map(|number| format!("{NAME}{number}")).collect();
        let made_bad = if names.is_empty() { Ok(()) } else { self.make_bad(names.clone()) };
        // The names of the answers would keep the files in the kernel's memory.
        if let Ok(root) = door.layer.root() {
            names.iter().for_each(|name| self.forget_name(root.attr.id, name.as_bytes()));
        }
        let forgotten = names.is_empty() || self.delivered(TOLD);
        self.invalidate_everything();
        let told = forgotten && self.delivered(TOLD);
        if !told && !self.ended() {
            return Err(io::Error::from(io::ErrorKind::TimedOut));
        }
        made_bad
    }

    /// Closes all open files with these inode numbers (from, to), whoever has them; answers their
    /// numbers. What is asked of them from now on is ESTALE.
    pub fn close_files(&self, numbers: &[(u64, u64)]) -> Vec<u64> {
        let door = self.door();
        let within = within(numbers);
        let of = |nodeid| within(door.inodes.number(nodeid));
        let closed = door.open.files.take(of);
        let written = door.writeback.written.take(of);
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

    fn make_bad(&self, names: Vec<String>) -> io::Result<()> {
        let door = self.door();
        let Some(device) = self.device_number() else { return Err(SysErrno::STALE.into()) };
        let place = door.options.mountpoint.clone();
        let thread = door.self_io.start("nacre-replaced", Role::Replaced, move || {
            let _mount = Entered::new(&place, device)?;
            let mut outcome = Ok(());
            for name in names {
                if let Err(error) = rustix::fs::statx(
                    CWD,
                    name,
                    AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_DONT_SYNC,
                    StatxFlags::empty(),
                ) {
                    outcome = Err(error);
                }
            }
            outcome
        })?;
        thread.join().map_err(|_| io::Error::from(SysErrno::IO))?.map_err(io::Error::from)
    }
}

impl Door {
    /// The generation of a file's number, as the kernel is told of it.
    pub(crate) fn generation(&self, attr: &Attr) -> u64 {
        if attr.kind == Kind::Directory || !self.inodes.by_number() {
            return 0;
        }
        self.layer.capabilities().numbered.map_or(0, |numbered| numbered.generation(attr.id.ino).into())
    }

    /// Answers a look-up of such a thread.
    pub(crate) fn lookup_replaced(&self, header: &Header, name: &[u8], reply: &mut Reply<'_>) -> Outcome {
        let number = std::str::from_utf8(name).ok().and_then(|name| name.strip_prefix(NAME)?.parse().ok());
        let Some(number) = number.filter(|_| self.inodes.is_root(header.nodeid)) else {
            return Err(Errno::ENOENT.into());
        };
        let nodeid = self.inodes.nodeid(number).ok_or(Errno::ESTALE)?;
        let node = self.node(nodeid)?;
        let attr = match self.layer.getattr(&Caller::ROOT, &node, None) {
            Ok(attr) if attr.kind == Kind::Directory => return Err(Errno::EISDIR.into()),
            // The kernel takes what it is told now for true.
            Ok(attr) => attr,
            Err(Errno::ENOENT | Errno::ESTALE) => vanished(self.layer.id(&node)?),
            Err(error) => return Err(error.into()),
        };
        let registered = self.inodes.register(&node, &attr, number);
        let mut out: abi::EntryOut = wire::entry(registered.nodeid, &attr, Duration::ZERO, Duration::ZERO);
        out.generation = self.generation(&attr);
        Ok(reply.entry(&out)?)
    }
}

fn within(numbers: &[(u64, u64)]) -> impl Fn(u64) -> bool {
    |number| numbers.iter().any(|(from, to)| (*from..=*to).contains(&number))
}

/// What is left of a file that is not there any more.
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
        protected: false,
    }
}
