//! The leaf `dataset`: one file system of a pool.
//!
//! Made by whoever has imported the pool; permissions are judged by the door's kernel. Semantics are those of a local Linux file system, as in `mem`: hard
//! links, `renameat2` flags, unnamed and unlinked open files, sparse content, extended attributes, POSIX ACLs with inheritance, set-group-id
//! directories. Invariants:
//! * the process that has the pool is the only one that changes it, so it is `Exclusive`;
//! * a node is an inode of the engine: while somebody holds it, an unlinked file lives.

mod file;
#[cfg(test)]
mod tests;
mod translate;
mod xattrs;

use crate::remap::acl;
use file::DatasetFile;
use nacre_pool::engine::{Dataset as Files, Pool};
use nacre_pool::files::{Inode, MayReplace, NewInode, ParentView};
use nacre_pool::rows::Inode as Row;
use nacre_vfs::{
    Attr, Caller, Coherence, Description, DirEntry, DirSink, Entry, Errno, FileId, Invalidation, Ioctl, Kind, Layer, Name, Node, OpenFile,
    OpenFlags, Opened, RenameFlags, Result, Scope, SetAttr, StatFs, XattrFlags,
};
use std::{
    fmt,
    sync::{Arc, mpsc::Sender},
};
use translate::{attr, change_of, errno, kind_of, type_of};

/// One file system of a pool.
pub struct Dataset {
    pool: Arc<Pool>,
    files: Arc<Files>,
    locks: file::LockTable,
}

impl fmt::Debug for Dataset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dataset").field("id", &self.files.id()).finish_non_exhaustive()
    }
}

impl Dataset {
    /// The file system of a pool with this number.
    ///
    /// # Errors
    /// EIO where the pool cannot read it.
    pub fn open(pool: &Arc<Pool>, id: u64) -> Result<Dataset> {
        let files = pool.dataset(id).map_err(|error| errno(error.into()))?;
        Ok(Dataset { pool: Arc::clone(pool), files, locks: file::LockTable::default() })
    }

    fn inode(&self, node: &Node) -> Result<Arc<Inode>> {
        node.arc::<Inode>().ok_or(Errno::EIO)
    }

    fn entry(&self, (inode, row): (Arc<Inode>, Row)) -> Entry {
        Entry { attr: attr(self.files.id(), inode.number(), &row), node: Node::new(inode) }
    }

    fn make(&self, caller: &Caller, parent: &Node, name: Name<'_>, new: &New<'_>) -> Result<(Arc<Inode>, Row)> {
        let parent = self.inode(parent)?;
        let made = self.files.files().make(&parent, name.bytes(), acl::DEFAULT, &|view| new.born(caller, view));
        made.map_err(errno)
    }

    fn open_file(&self, inode: Arc<Inode>, row: &Row, flags: OpenFlags) -> Result<Opened> {
        match kind_of(row) {
            Kind::File => {}
            Kind::Directory => return Err(Errno::EISDIR),
            Kind::Symlink => return Err(Errno::ELOOP),
            Kind::Block | Kind::Character | Kind::Fifo | Kind::Socket => return Err(Errno::ENXIO),
        }
        if flags.truncates() && flags.writes() && row.size > 0 {
            let change = nacre_pool::files::AttributeChange { size: Some(0), ..Default::default() };
            self.files.files().set_attributes(&inode, &change).map_err(errno)?;
        }
        let locks = self.locks.of(inode.number());
        Ok(Arc::new(DatasetFile { pool: Arc::clone(&self.pool), files: Arc::clone(&self.files), inode, flags, locks }))
    }

    fn commit(&self) -> Result<()> {
        self.pool.commit().map(drop).map_err(|error| errno(error.into()))
    }
}

/// What a new file shall be.
struct New<'a> {
    kind: Kind,
    mode: u32,
    device: (u32, u32),
    target: Option<&'a [u8]>,
}

impl<'a> New<'a> {
    fn plain(kind: Kind, mode: u32) -> New<'a> {
        New { kind, mode, device: (0, 0), target: None }
    }

    /// The file as its directory lets it be: group and set-group-id of the directory, umask or default ACL (acl(5), "OBJECT CREATION AND DEFAULT ACLs").
    fn born(&self, caller: &Caller, parent: &ParentView) -> nacre_pool::files::Result<NewInode> {
        const SET_GID: u32 = 0o2000;
        let mut mode = self.mode;
        let mut gid = caller.gid;
        if u32::from(parent.row.mode) & SET_GID != 0 {
            gid = parent.row.gid;
            if self.kind == Kind::Directory {
                mode |= SET_GID;
            }
        }
        let default = parent.attribute.as_deref().filter(|_| self.kind != Kind::Symlink);
        let mut attributes = Vec::new();
        match default {
            None if self.kind != Kind::Symlink => mode &= !caller.umask,
            None => {}
            Some(default) => {
                let mut access = default.to_vec();
                acl::limit_to_mode(&mut access, mode).map_err(|_| nacre_pool::files::FileError::Invalid)?;
                if let Ok(Some(bits)) = acl::mode(&access) {
                    mode = (mode & !0o777) | bits;
                }
                if acl::is_minimal(&access).is_ok_and(|minimal| !minimal) {
                    attributes.push((acl::ACCESS.to_vec(), access));
                }
                if self.kind == Kind::Directory {
                    attributes.push((acl::DEFAULT.to_vec(), default.to_vec()));
                }
            }
        }
        let mut row = Row::new(type_of(self.kind), (mode & 0o7777) as u16, parent.now);
        (row.uid, row.gid) = (caller.uid, gid);
        row.device = rustix::fs::makedev(self.device.0, self.device.1);
        Ok(NewInode { row, target: self.target.map(<[u8]>::to_vec), attributes })
    }
}

impl Layer for Dataset {
    fn root(&self) -> Result<Entry> {
        let root = self.files.files().root();
        let row = self.files.files().attributes(&root).map_err(errno)?;
        Ok(self.entry((root, row)))
    }

    fn lookup(&self, _caller: &Caller, parent: &Node, name: Name<'_>) -> Result<Entry> {
        let found = self.files.files().look_up(&*self.inode(parent)?, name.bytes()).map_err(errno)?;
        Ok(self.entry(found))
    }

    fn id(&self, node: &Node) -> Result<FileId> {
        Ok(FileId { fs: self.files.id(), ino: self.inode(node)?.number(), generation: 0 })
    }

    fn path(&self, node: &Node) -> Option<Vec<u8>> {
        self.files.files().path(&*self.inode(node).ok()?).ok()?
    }

    fn adopt(&self, _known: &Node, _fresh: &Node) {
        // Nodes are the files themselves: there is nothing to learn.
    }

    fn getattr(&self, _caller: &Caller, node: &Node, _file: Option<&dyn OpenFile>) -> Result<Attr> {
        let inode = self.inode(node)?;
        let row = self.files.files().attributes(&inode).map_err(errno)?;
        Ok(attr(self.files.id(), inode.number(), &row))
    }

    fn access(&self, _caller: &Caller, node: &Node, _mask: u32) -> Result<()> {
        // Whoever has imported the pool may do everything with it.
        self.inode(node).map(drop)
    }

    fn setattr(&self, _caller: &Caller, node: &Node, _file: Option<&dyn OpenFile>, change: &SetAttr) -> Result<Attr> {
        let inode = self.inode(node)?;
        xattrs::follow_change(self.files.files(), &inode, change)?;
        let row = self.files.files().set_attributes(&inode, &change_of(change)).map_err(errno)?;
        Ok(attr(self.files.id(), inode.number(), &row))
    }

    fn readlink(&self, _caller: &Caller, node: &Node) -> Result<Vec<u8>> {
        self.files.files().read_link(&*self.inode(node)?).map_err(errno)
    }

    fn create(&self, caller: &Caller, parent: &Node, name: Name<'_>, mode: u32, flags: OpenFlags) -> Result<(Entry, Opened)> {
        loop {
            match self.make(caller, parent, name, &New::plain(Kind::File, mode)) {
                Ok((inode, row)) => {
                    let file = self.open_file(Arc::clone(&inode), &row, flags)?;
                    return Ok((self.entry((inode, row)), file));
                }
                Err(Errno::EEXIST) if !flags.exclusive() => {}
                Err(error) => return Err(error),
            }
            // Where the name is gone again in the meantime, it is made after all.
            match self.files.files().look_up(&*self.inode(parent)?, name.bytes()) {
                Ok((inode, row)) => {
                    let file = self.open_file(Arc::clone(&inode), &row, flags)?;
                    let row = self.files.files().attributes(&inode).map_err(errno)?;
                    return Ok((self.entry((inode, row)), file));
                }
                Err(nacre_pool::files::FileError::NotFound) => {}
                Err(error) => return Err(errno(error)),
            }
        }
    }

    fn tmpfile(&self, caller: &Caller, parent: &Node, mode: u32, flags: OpenFlags) -> Result<(Entry, Opened)> {
        let (parent, new) = (self.inode(parent)?, New::plain(Kind::File, mode));
        // O_TMPFILE|O_EXCL can never get a name (open(2)).
        let linkable = !flags.exclusive();
        let made = self.files.files().make_nameless(&parent, acl::DEFAULT, linkable, &|view| new.born(caller, view));
        let (inode, row) = made.map_err(errno)?;
        let file = self.open_file(Arc::clone(&inode), &row, flags)?;
        Ok((self.entry((inode, row)), file))
    }

    fn mkdir(&self, caller: &Caller, parent: &Node, name: Name<'_>, mode: u32) -> Result<Entry> {
        self.make(caller, parent, name, &New::plain(Kind::Directory, mode)).map(|made| self.entry(made))
    }

    fn mknod(&self, caller: &Caller, parent: &Node, name: Name<'_>, kind: Kind, mode: u32, device: (u32, u32)) -> Result<Entry> {
        let device = match kind {
            Kind::Block | Kind::Character => device,
            Kind::File | Kind::Fifo | Kind::Socket => (0, 0),
            Kind::Directory => return Err(Errno::EPERM),
            Kind::Symlink => return Err(Errno::EINVAL),
        };
        self.make(caller, parent, name, &New { device, ..New::plain(kind, mode) }).map(|made| self.entry(made))
    }

    fn symlink(&self, caller: &Caller, parent: &Node, name: Name<'_>, target: &[u8]) -> Result<Entry> {
        let new = New { target: Some(target), ..New::plain(Kind::Symlink, 0o777) };
        self.make(caller, parent, name, &new).map(|made| self.entry(made))
    }

    fn link(&self, _caller: &Caller, node: &Node, _file: Option<&dyn OpenFile>, parent: &Node, name: Name<'_>) -> Result<Entry> {
        let inode = self.inode(node)?;
        let row = self.files.files().link(&inode, &*self.inode(parent)?, name.bytes()).map_err(errno)?;
        Ok(self.entry((inode, row)))
    }

    fn unlink(&self, _caller: &Caller, parent: &Node, name: Name<'_>) -> Result<()> {
        self.files.files().unlink(&*self.inode(parent)?, name.bytes()).map_err(errno)
    }

    fn rmdir(&self, _caller: &Caller, parent: &Node, name: Name<'_>) -> Result<()> {
        self.files.files().remove_directory(&*self.inode(parent)?, name.bytes()).map_err(errno)
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
        let replace = match flags.0 {
            0 => MayReplace::Yes,
            RenameFlags::NOREPLACE => MayReplace::No,
            RenameFlags::EXCHANGE => MayReplace::Exchange,
            _ => return Err(Errno::EINVAL),
        };
        let (from, to) = (self.inode(parent)?, self.inode(new_parent)?);
        self.files.files().rename((&from, name.bytes()), (&to, new_name.bytes()), replace).map_err(errno)
    }

    fn open(&self, _caller: &Caller, node: &Node, flags: OpenFlags) -> Result<Opened> {
        let inode = self.inode(node)?;
        let row = self.files.files().attributes(&inode).map_err(errno)?;
        self.open_file(inode, &row, flags)
    }

    fn readdir(&self, _caller: &Caller, node: &Node, from: u64, attributes: bool, sink: &mut dyn DirSink) -> Result<()> {
        /// Entries taken at once.
        const BATCH: usize = 512;
        let inode = self.inode(node)?;
        if from == 0 {
            self.files.files().touch(&inode).map_err(errno)?;
        }
        let mut from = from;
        loop {
            let batch = self.files.files().list(&inode, from, attributes, BATCH).map_err(errno)?;
            let Some(last) = batch.last().map(|entry| entry.sequence) else { return Ok(()) };
            for listed in batch {
                let name = Name::new(&listed.name)?;
                let kind = Some(translate::kind_of_type(listed.file_type));
                let entry = listed.file.map(|file| self.entry(file));
                if !sink.push(DirEntry { name, ino: listed.number, kind, next: listed.sequence, entry }) {
                    return Ok(());
                }
            }
            from = last;
        }
    }

    fn fsyncdir(&self, _caller: &Caller, _node: &Node, _data_only: bool) -> Result<()> {
        self.pool.sync_names().map_err(|error| errno(error.into()))
    }

    fn statfs(&self, _caller: &Caller, _node: &Node) -> Result<StatFs> {
        const BLOCK: u64 = 4096;
        /// Every inode takes room in trees: what is free in bytes bounds the number. What one takes at least, bytes.
        const INODE: u64 = 64;
        let (_, usage, available) = self.pool.space(self.files.id()).map_err(|error| errno(error.into()))?;
        let objects = self.files.files().objects();
        let free = available / BLOCK;
        Ok(StatFs {
            block: BLOCK as u32,
            fragment: BLOCK as u32,
            blocks: usage.referenced / BLOCK + free,
            free,
            available: free,
            files: objects + available / INODE,
            files_free: available / INODE,
            name_max: 255,
        })
    }

    fn syncfs(&self) -> Result<()> {
        self.commit()
    }

    fn getxattr(&self, _caller: &Caller, node: &Node, name: &[u8], buffer: &mut [u8]) -> Result<usize> {
        xattrs::get(self.files.files(), &*self.inode(node)?, name, buffer)
    }

    fn listxattr(&self, _caller: &Caller, node: &Node, buffer: &mut [u8]) -> Result<usize> {
        xattrs::list(self.files.files(), &*self.inode(node)?, buffer)
    }

    fn setxattr(&self, _caller: &Caller, node: &Node, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()> {
        xattrs::set(self.files.files(), &self.inode(node)?, name, value, flags)
    }

    fn removexattr(&self, _caller: &Caller, node: &Node, name: &[u8]) -> Result<()> {
        xattrs::remove(self.files.files(), &self.inode(node)?, name)
    }

    fn ioctl(&self, _caller: &Caller, _node: &Node, _request: Ioctl<'_>, _output: &mut [u8]) -> Result<(i32, usize)> {
        Err(Errno::ENOTTY)
    }

    fn coherence(&self, _scope: Scope<'_>) -> Coherence {
        Coherence::Exclusive
    }

    fn watch(&self, _channel: Sender<Invalidation>) {
        // Nobody else changes it, so there is nothing to send.
    }

    fn has_acls(&self) -> bool {
        true
    }

    fn judges_callers(&self) -> bool {
        false
    }

    fn collect(&self, _: &Arc<dyn nacre_vfs::Collector>) -> bool {
        false
    }

    fn describe(&self) -> Description {
        Description::new("dataset").with("number", self.files.id().to_string())
    }
}
