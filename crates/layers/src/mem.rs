//! The leaf `mem`: a complete POSIX tree in memory. A reference implementation of a layer for
//! tests, and for trying stacks out.
//!
//! Made by the stack builder and by tests. Semantics are those of a local Linux file system,
//! without permission checks (the kernel makes them, before the FUSE front end): hard links,
//! `renameat2` flags, unnamed and unlinked open files, sparse content, extended attributes, POSIX
//! ACLs with inheritance, set-group-id directories, locks. Invariants:
//! * operations that change names hold the one lock `names` for their whole length; locks of files
//!   are taken one at a time under it;
//! * nothing else changes the tree, so it is `Exclusive`.

mod content;
mod file;
mod inode;
mod names;
#[cfg(test)]
mod tests;
mod xattrs;

pub use xattrs::check as check_xattr;

use file::MemFile;
use inode::{Birth, Directory, Inode, What};
use nacre_vfs::{
    AnyOpen, Attr, Caller, Capabilities, Coherence, Created, Description, Dev, DirEntry, DirSink, Entry, Errno, FileId,
    Invalidation, Ioctl, Kind, Layer, Name, Node, OpenFlags, Opened, RenameFlags, Result, Scope, SetAttr, StatFs, Time,
    XattrFlags,
};
use parking_lot::Mutex;
use std::{
    fmt,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
        mpsc::Sender,
    },
    time::{SystemTime, UNIX_EPOCH},
};

/// The clock for file times.
pub type MemClock = Arc<dyn Fn() -> Time + Send + Sync>;

/// A tree in memory.
pub struct Mem {
    root: Arc<Inode>,
    fs: u64,
    next: AtomicU64,
    names: Mutex<()>,
    clock: MemClock,
}

impl fmt::Debug for Mem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mem").field("fs", &self.fs).finish_non_exhaustive()
    }
}

impl Default for Mem {
    fn default() -> Mem {
        Mem::with_clock(Arc::new(system_time))
    }
}

#[expect(clippy::disallowed_methods, reason = "the clock of a tree that was given none")]
fn system_time() -> Time {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Time { sec: i64::try_from(since.as_secs()).unwrap_or(i64::MAX), nsec: since.subsec_nanos() }
}

impl Drop for Mem {
    /// Frees the tree iteratively: dropping a deep tree from its root would recurse once per level.
    fn drop(&mut self) {
        let mut waiting = vec![Arc::clone(&self.root)];
        while let Some(inode) = waiting.pop() {
            if let What::Directory(directory) = &mut inode.body.lock().what {
                waiting.extend(directory.clear());
            }
        }
    }
}

impl Mem {
    /// An empty tree with the system's time; its root belongs to 0:0 and has mode 755.
    pub fn new() -> Mem {
        Mem::default()
    }

    /// An empty tree with the given clock.
    pub fn with_clock(clock: MemClock) -> Mem {
        static TREES: AtomicU64 = AtomicU64::new(1);
        let fs = TREES.fetch_add(1, Ordering::Relaxed);
        // No inode number is reused, and `fs` and generation differ between trees.
        let id = FileId { fs, ino: 1, generation: fs };
        let birth = Birth { id, kind: Kind::Directory, mode: 0o755, uid: 0, gid: 0, device: (0, 0), now: clock() };
        let root = Arc::new(Inode::new(birth, What::Directory(Directory::new(Weak::new()))));
        Mem { root, fs, next: AtomicU64::new(2), names: Mutex::new(()), clock }
    }

    fn inode(&self, node: &Node) -> Result<Arc<Inode>> {
        node.arc::<Inode>().filter(|inode| inode.id.fs == self.fs).ok_or(Errno::EIO)
    }

    fn entry(inode: Arc<Inode>) -> Entry {
        Entry { attr: inode.attr(), node: Node::new(inode) }
    }

    fn open_file(&self, inode: Arc<Inode>, flags: OpenFlags) -> Result<Opened> {
        match inode.kind {
            Kind::File => {}
            Kind::Directory => return Err(Errno::EISDIR),
            Kind::Symlink => return Err(Errno::ELOOP),
            Kind::Block | Kind::Character | Kind::Fifo | Kind::Socket => return Err(Errno::ENXIO),
        }
        let file = MemFile { inode, flags, clock: Arc::clone(&self.clock) };
        if flags.truncates() && flags.writes() {
            file.truncate();
        }
        Ok(Arc::new(file))
    }

    /// Creates a file and inserts its name.
    fn make(&self, caller: &Caller, parent: &Node, name: Name<'_>, new: New) -> Result<Arc<Inode>> {
        let parent = self.inode(parent)?;
        let names = self.names.lock();
        if names::find(&parent, name)?.is_some() {
            return Err(Errno::EEXIST);
        }
        let inode = Arc::new(self.born(caller, &parent, new)?);
        names::insert(&parent, name, &inode, (self.clock)())?;
        drop(names);
        Ok(inode)
    }

    /// Makes a file with the attributes that `parent` implies: group and set-group-id of the
    /// directory, umask or default ACL.
    fn born(&self, caller: &Caller, parent: &Arc<Inode>, new: New) -> Result<Inode> {
        const SET_GID: u32 = 0o2000;
        let New { kind, mut mode, device, what } = new;
        let (parent_mode, parent_gid, default_acl) = {
            let body = parent.body.lock();
            (body.mode, body.gid, body.xattrs.get(crate::remap::acl::DEFAULT).cloned())
        };
        let gid = if parent_mode & SET_GID != 0 {
            if kind == Kind::Directory {
                mode |= SET_GID;
            }
            parent_gid
        } else {
            caller.gid
        };
        if default_acl.is_none() && kind != Kind::Symlink {
            mode &= !caller.umask;
        }
        let id = FileId { fs: self.fs, ino: self.next.fetch_add(1, Ordering::Relaxed), generation: self.fs };
        let inode = Inode::new(Birth { id, kind, mode, uid: caller.uid, gid, device, now: (self.clock)() }, what);
        if let Some(acl) = default_acl.filter(|_| kind != Kind::Symlink) {
            xattrs::inherit(&inode, acl)?;
        }
        Ok(inode)
    }
}

/// Attributes of a file to be created.
struct New {
    kind: Kind,
    mode: u32,
    device: (u32, u32),
    what: What,
}

impl New {
    fn file(mode: u32) -> New {
        New { kind: Kind::File, mode, device: (0, 0), what: What::File(content::Content::default()) }
    }
}

impl Layer for Mem {
    fn root(&self) -> Result<Entry> {
        Ok(Mem::entry(Arc::clone(&self.root)))
    }

    fn lookup(&self, _caller: &Caller, parent: &Node, name: Name<'_>) -> Result<Entry> {
        names::find(&self.inode(parent)?, name)?.map(Mem::entry).ok_or(Errno::ENOENT)
    }

    fn id(&self, node: &Node) -> Result<FileId> {
        Ok(self.inode(node)?.id)
    }

    fn path(&self, _node: &Node) -> Option<Vec<u8>> {
        // A file does not know its names.
        None
    }

    fn adopt(&self, _known: &Node, _fresh: &Node) {
        // Nodes refer to the files themselves: there is nothing to update.
    }

    fn hold(&self, _directory: &Node, _gone: bool) {
        // Removed directories need no names either.
    }

    fn getattr(&self, _caller: &Caller, node: &Node, _file: AnyOpen<'_>) -> Result<Attr> {
        Ok(self.inode(node)?.attr())
    }

    fn access(&self, _caller: &Caller, node: &Node, _mask: u32) -> Result<()> {
        // The user who runs the process may access its memory.
        self.inode(node).map(drop)
    }

    fn setattr(&self, _caller: &Caller, node: &Node, _file: AnyOpen<'_>, change: &SetAttr) -> Result<Attr> {
        let inode = self.inode(node)?;
        inode.change(change, (self.clock)())?;
        Ok(inode.attr())
    }

    fn readlink(&self, _caller: &Caller, node: &Node) -> Result<Vec<u8>> {
        match &self.inode(node)?.body.lock().what {
            What::Symlink(target) => Ok(target.clone()),
            _ => Err(Errno::EINVAL),
        }
    }

    fn create(&self, caller: &Caller, parent: &Node, name: Name<'_>, mode: u32, flags: OpenFlags) -> Result<Created> {
        loop {
            match self.make(caller, parent, name, New::file(mode)) {
                Ok(inode) => {
                    let file = self.open_file(Arc::clone(&inode), flags)?;
                    return Ok((Mem::entry(inode), file));
                }
                Err(Errno::EEXIST) if !flags.exclusive() => {}
                Err(error) => return Err(error),
            }
            // If the name is gone again meanwhile, the loop creates it.
            if let Some(inode) = names::find(&self.inode(parent)?, name)? {
                let file = self.open_file(Arc::clone(&inode), flags)?;
                return Ok((Mem::entry(inode), file));
            }
        }
    }

    fn tmpfile(&self, caller: &Caller, parent: &Node, mode: u32, flags: OpenFlags) -> Result<Created> {
        let parent = self.inode(parent)?;
        if parent.kind != Kind::Directory {
            return Err(Errno::ENOTDIR);
        }
        let inode = self.born(caller, &parent, New::file(mode))?;
        {
            let mut body = inode.body.lock();
            body.nlink = 0;
            // O_TMPFILE|O_EXCL can never get a name (open(2)); checked by link.
            body.linkable = !flags.exclusive();
        }
        let inode = Arc::new(inode);
        let file = self.open_file(Arc::clone(&inode), flags)?;
        Ok((Mem::entry(inode), file))
    }

    fn mkdir(&self, caller: &Caller, parent: &Node, name: Name<'_>, mode: u32) -> Result<Entry> {
        let weak = Arc::downgrade(&self.inode(parent)?);
        self.make(
            caller,
            parent,
            name,
            New { kind: Kind::Directory, mode, device: (0, 0), what: What::Directory(Directory::new(weak)) },
        )
        .map(Mem::entry)
    }

    fn mknod(&self, caller: &Caller, parent: &Node, name: Name<'_>, kind: Kind, mode: u32, dev: Dev) -> Result<Entry> {
        let (device, what) = match kind {
            Kind::File => ((0, 0), What::File(content::Content::default())),
            Kind::Block | Kind::Character => (dev, What::Special),
            Kind::Fifo | Kind::Socket => ((0, 0), What::Special),
            Kind::Directory => return Err(Errno::EPERM),
            Kind::Symlink => return Err(Errno::EINVAL),
        };
        self.make(caller, parent, name, New { kind, mode, device, what }).map(Mem::entry)
    }

    fn symlink(&self, caller: &Caller, parent: &Node, name: Name<'_>, target: &[u8]) -> Result<Entry> {
        self.make(
            caller,
            parent,
            name,
            New { kind: Kind::Symlink, mode: 0o777, device: (0, 0), what: What::Symlink(target.to_vec()) },
        )
        .map(Mem::entry)
    }

    fn link(&self, _caller: &Caller, node: &Node, _file: AnyOpen<'_>, parent: &Node, name: Name<'_>) -> Result<Entry> {
        let (inode, parent) = (self.inode(node)?, self.inode(parent)?);
        let names = self.names.lock();
        names::link(&inode, &parent, name, (self.clock)())?;
        drop(names);
        Ok(Mem::entry(inode))
    }

    fn unlink(&self, _caller: &Caller, parent: &Node, name: Name<'_>) -> Result<()> {
        let parent = self.inode(parent)?;
        let _names = self.names.lock();
        names::unlink(&parent, name, (self.clock)())
    }

    fn rmdir(&self, _caller: &Caller, parent: &Node, name: Name<'_>) -> Result<()> {
        let parent = self.inode(parent)?;
        let _names = self.names.lock();
        names::rmdir(&parent, name, (self.clock)())
    }

    fn rename(
        &self,
        _caller: &Caller,
        parent: &Node,
        name: Name<'_>,
        new_parent: &Node,
        new_name: Name<'_>,
        flags: RenameFlags,
    ) -> Result<()> {
        let (parent, new_parent) = (self.inode(parent)?, self.inode(new_parent)?);
        let _names = self.names.lock();
        names::rename((&parent, name), (&new_parent, new_name), flags, (self.clock)())
    }

    fn open(&self, _caller: &Caller, node: &Node, flags: OpenFlags) -> Result<Opened> {
        self.open_file(self.inode(node)?, flags)
    }

    fn readdir(&self, _: &Caller, node: &Node, from: u64, attributes: bool, sink: &mut dyn DirSink) -> Result<()> {
        /// Number of names taken at once under the lock; the sink is called without it.
        const BATCH: usize = 256;
        let inode = self.inode(node)?;
        inode.body.lock().touch_atime((self.clock)());
        let mut from = from;
        loop {
            let batch = inode.body.lock().directory()?.behind(from, BATCH);
            let Some(&(last, ..)) = batch.last() else { return Ok(()) };
            for (next, name, file) in batch {
                let name = Name::new(&name)?;
                let (ino, kind) = (file.id.ino, Some(file.kind));
                let entry = attributes.then(|| Mem::entry(file));
                if !sink.push(DirEntry { name, ino, kind, next, entry }) {
                    return Ok(());
                }
            }
            from = last;
        }
    }

    fn fsyncdir(&self, _caller: &Caller, _node: &Node, _data_only: bool) -> Result<()> {
        Ok(())
    }

    fn statfs(&self, _caller: &Caller, _node: &Node) -> Result<StatFs> {
        /// Capacity reported by statfs: usage is not counted.
        const BLOCKS: u64 = 1 << 28;
        Ok(StatFs {
            block: 4096,
            fragment: 4096,
            blocks: BLOCKS,
            free: BLOCKS,
            available: BLOCKS,
            files: BLOCKS,
            files_free: BLOCKS,
            name_max: 255,
        })
    }

    fn syncfs(&self) -> Result<()> {
        Ok(())
    }

    fn getxattr(&self, _caller: &Caller, node: &Node, name: &[u8], buffer: &mut [u8]) -> Result<usize> {
        xattrs::get(&self.inode(node)?, name, buffer)
    }

    fn listxattr(&self, _caller: &Caller, node: &Node, buffer: &mut [u8]) -> Result<usize> {
        xattrs::list(&self.inode(node)?, buffer)
    }

    fn setxattr(&self, _caller: &Caller, node: &Node, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()> {
        xattrs::set(&self.inode(node)?, name, value, flags, (self.clock)())
    }

    fn removexattr(&self, _caller: &Caller, node: &Node, name: &[u8]) -> Result<()> {
        xattrs::remove(&self.inode(node)?, name, (self.clock)())
    }

    fn ioctl(&self, _caller: &Caller, _node: &Node, _request: Ioctl<'_>, _output: &mut [u8]) -> Result<(i32, usize)> {
        Err(Errno::ENOTTY)
    }

    fn coherence(&self, _scope: Scope<'_>) -> Coherence {
        Coherence::Exclusive
    }

    fn watch(&self, _channel: Sender<Invalidation>) {
        // Nothing else changes the tree, so there is nothing to send.
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities { acls: true, ..Capabilities::default() }
    }

    fn describe(&self) -> Description {
        Description::new("mem")
    }
}
