//! Files that became others under a mount: a file system was rolled back, and the same inode
//! numbers mean what they meant then.
//!
//! Called by `mount.rs`'s users when the layer is about to show the new ones, and when it does.
//! Directories stay what they are for the kernel, so that a shell goes on in one that is still
//! there. Of files it has content, a size and perhaps writes that belong to the old ones: each one
//! that it knows is made bad, as it calls that, by an answer with a generation that no file has
//! ([`NO_GENERATION`]), and everything that is asked of it through a descriptor from before is EIO.
//! A file that is still there keeps its generation, so file handles lead to it. That answer is one
//! to a look-up which a thread of ours makes, in a directory that nobody else can enter. Invariants:
//! * file handles of before are gone first, so nothing that is under way reaches the new files;
//! * whoever asks for anything waits at the gate (`gate.rs`) until the old ones are bad: nobody is given one;
//! * the thread is in its directory before anybody waits: it takes no lock that somebody who waits
//!   may hold.

use super::gate::{DIRECTORY, Replacer, within};
use crate::{door::Door, failure::Outcome, inodes::Found, mount::Mount, wire};
use fusewire::{Op, Reply, Request, abi};
use nacre_vfs::{Attr, Caller, Errno, FileId, Kind, NO_GENERATION, Protection, Time};
use rustix::io::Errno as SysErrno;
use std::{io, time::Duration};

/// The node id of the directory in which the thread looks up: no inode number is as large.
const HIDDEN: u64 = u64::MAX;
/// How long its attributes are good.
const LASTING: Duration = Duration::from_secs(24 * 60 * 60);
/// Files without a descriptor, of those that the kernel knows, that are made bad as well: somebody
/// may hold one by its path alone. All others go with their names.
const MOST: usize = 65_536;
/// How long the kernel may take to be told that names are to be asked for anew.
const TOLD: Duration = Duration::from_secs(10);

impl Mount {
    /// Files are about to become others: whoever wants anything of the mount waits from now on, and
    /// what the kernel still passes on is refused, so that it does not reach those in their place.
    /// Until [`Mount::replaced`] or [`Mount::stays`].
    pub fn replacing(&self) {
        let door = self.door();
        door.survives.iter().for_each(|survives| survives.memory.replacing(true));
        // What cannot be done now is told when it has to be done.
        let place = door.options.mountpoint.clone();
        let device = self.device_number().ok_or_else(|| SysErrno::STALE.into());
        *door.replacer.lock() = Some(device.and_then(|device| Replacer::start(&door.self_io, place, device)));
        door.writeback.written.close(true);
        door.gate.close();
    }

    /// They are the same after all.
    pub fn stays(&self) {
        self.open_again(&[]);
        self.are_known();
    }

    /// Files with these inode numbers (from, to) were replaced by others: what the kernel has of
    /// them is of no use from now on. Returns when it knows.
    ///
    /// # Errors
    /// Where it could not be told of all of them.
    pub fn replaced(&self, numbers: &[(u64, u64)]) -> io::Result<()> {
        self.prune(numbers);
        let made_bad = self.replace(numbers);
        self.open_again(numbers);
        // The names of the answers would keep the files in the kernel's memory.
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

    /// Has the kernel drop unused dentries of inodes with these numbers (from, to), files before directories and
    /// those from the deepest on (by their numbers: most are made before what is in them), as a child keeps its
    /// parent in use: before they are made bad, when the kernel finds them no more. Names that are gone would keep inodes
    /// that are removed later, and their room, until memory is short. Before Linux 6.18, which has no such
    /// notice, they do.
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
        // Told nothing, it ends.
        let left = door.replacer.lock().take();
        drop(left);
        door.gate.open(replaced);
    }

    /// The kernel knows what its files are.
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
}

impl Door {
    /// A request that came while files become others: it waits, and is ESTALE if it is about a file
    /// of before. Directories stay what they are.
    pub(crate) fn wait_at_gate(&self, request: &Request<'_>) -> Outcome {
        let about = match request.op {
            Op::Link { nodeid, .. } => nodeid,
            _ => request.header.nodeid,
        };
        let number = self.inodes.number(about);
        // Where nobody else could serve, the layer lets him wait, or not.
        let replaced = fusewire::blocking(|| self.gate.pass(number)).unwrap_or(false);
        if replaced && !self.inodes.is_directory(about) { Err(Errno::ESTALE.into()) } else { Ok(()) }
    }

    /// Answers a request of such a thread, where it is about its directory; false otherwise.
    ///
    /// # Errors
    /// What the reply says.
    pub(crate) fn answer_replacer(&self, request: &Request<'_>, reply: &mut Reply<'_>) -> Outcome<bool> {
        match (request.header.nodeid, &request.op) {
            (HIDDEN, Op::Lookup { name }) => self.lookup_replaced(name, reply)?,
            (HIDDEN, Op::Getattr { .. }) => reply.attr(&wire::attr_out(&hidden(), LASTING))?,
            (nodeid, Op::Lookup { name }) if self.inodes.is_root(nodeid) && *name == DIRECTORY.as_bytes() => {
                // Its name is good for this once.
                reply.entry(&wire::entry(HIDDEN, &hidden(), Duration::ZERO, LASTING))?;
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// The name of a file there is its number.
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

/// The directory of the thread: its own, so that nobody's rights are asked for.
fn hidden() -> Attr {
    let id = FileId { fs: 0, ino: HIDDEN, generation: 0 };
    Attr { kind: Kind::Directory, mode: 0o700, nlink: 2, uid: rustix::process::geteuid().as_raw(), ..vanished(id) }
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
        protection: Protection::None,
    }
}
