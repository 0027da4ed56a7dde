//! The leaf layer `dataset`: one file system of a pool, with its snapshots below `.zfs/snapshot`.
//!
//! Created by the process that has imported the pool; the kernel checks permissions. Semantics are
//! those of a local Linux file system, as in `mem`: hard links, `renameat2` flags, unnamed and
//! unlinked open files, sparse content, extended attributes, POSIX ACLs with inheritance,
//! set-group-id directories. Invariants:
//! * only the process that has the pool changes it, so it is `Exclusive`; except for the names of
//!   snapshots, which commands create and destroy, and for a pool that follows a writer on another
//!   machine, whose changes are all reported ([`Dataset::changed`]);
//! * a node is an inode of the engine: while it is held, an unlinked file lives;
//! * nothing below `.zfs` can be changed, except the snapshots themselves: `mkdir`, `rmdir` and
//!   `mv` in `.zfs/snapshot` create, destroy and rename them.

mod changed;
mod control;
mod file;
mod file_flags;
mod mounted_tree;
mod numbers;
mod passage;
mod promises;
#[cfg(test)]
pub(crate) mod tests;
mod translate;
mod writeback_group;
mod xattrs;

pub(crate) use changed::tell;
use control::Control;
pub use control::SnapshotDirectory;
use file::DatasetFile;
use mounted_tree::{CurrentTree, FileNode, ListedNode, MountedTree, NodeKind};
use nacre_layers::remap::acl;
use nacre_pool::engine::{Changes, Pool};
use nacre_pool::files::{Inode, InodeFilter, MayReplace, NewInode, ParentView};
use nacre_pool::properties::effective::{SnapshotDirectory as Shown, SyncMode};
use nacre_pool::rows::InodeRow;
use nacre_vfs::{
    Attr, Caller, Capabilities, Coherence, Description, DirEntry, DirSink, Entry, Errno, FileId, Invalidation, Ioctl,
    Kind, Layer, Name, Node, OpenFile, OpenFlags, Opened, RenameFlags, Result, Scope, SetAttr, StatFs, XattrFlags,
};
use numbers::Numbers;
use parking_lot::Mutex;
use std::{
    cell::RefCell,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::Sender,
    },
};
use translate::{attr, change_of, errno, kind_of, of_node, type_of};
use writeback_group::Member;
pub use writeback_group::{StoppedWrites, WritebackGroup};

/// An inode with its attributes.
type InodeWithRow = (Arc<Inode>, InodeRow);

/// One file system of a pool.
pub struct Dataset {
    pool: Arc<Pool>,
    current: Arc<CurrentTree>,
    /// The directory `.zfs`; `None` for a snapshot that is mounted separately.
    control: Option<Arc<Control>>,
    numbers: Numbers,
    member: Arc<Member>,
    /// Reads do not update access times.
    quiet: AtomicBool,
    /// Channel to the FUSE front end, for a pool that follows a writer on another machine.
    changes: Mutex<Option<Sender<Invalidation>>>,
}

impl fmt::Debug for Dataset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dataset").field("id", &self.current.files.id()).finish_non_exhaustive()
    }
}

impl Dataset {
    /// Opens the file system of a pool with this number.
    ///
    /// # Errors
    /// EIO if the pool cannot read it.
    pub fn open(pool: &Arc<Pool>, id: u64) -> Result<Dataset> {
        let files = pool.dataset(id).map_err(|error| errno(error.into()))?;
        let control = Arc::new(Control::new(Arc::clone(pool), id, files.files().folding().insensitive));
        Ok(Dataset::over(pool, MountedTree::new(files, None, 0), Some(control)))
    }

    /// As [`Self::open`], together with other mounted file systems of the pool: they share one
    /// write-back group.
    ///
    /// # Errors
    /// EIO if the pool cannot read it.
    pub fn open_among(pool: &Arc<Pool>, id: u64, others: &Arc<WritebackGroup>) -> Result<Dataset> {
        let alone = Dataset::open(pool, id)?;
        let member = others.join(&alone.current.files);
        Ok(Dataset { member, ..alone })
    }

    /// Opens a single snapshot, by its txg. Its files have the inode numbers of the live file
    /// system, so that backup programs recognise them from one snapshot to the next.
    ///
    /// # Errors
    /// EIO if the pool cannot read it, or it does not exist.
    pub fn snapshot(pool: &Arc<Pool>, id: u64, txg: u64) -> Result<Dataset> {
        let txg = nacre_pool::Txg(txg);
        let files = pool.snapshot_files(id, txg).map_err(|error| errno(error.into()))?;
        Ok(Dataset::over(pool, MountedTree::new(files, Some((String::new(), txg)), 0), None))
    }

    fn over(pool: &Arc<Pool>, current: MountedTree, control: Option<Arc<Control>>) -> Dataset {
        let current = Arc::new(CurrentTree::new(current));
        let numbers = Numbers::new(&current, control.as_ref());
        let member = Arc::new(WritebackGroup::default()).join(&current.files);
        Dataset {
            pool: Arc::clone(pool),
            current,
            control,
            numbers,
            member,
            quiet: AtomicBool::new(false),
            changes: Mutex::new(None),
        }
    }

    /// Enables creating, destroying and renaming snapshots in `.zfs/snapshot`. Without it, that
    /// directory is read only.
    #[must_use]
    pub fn with_snapshot_directory(self, directory: Box<dyn SnapshotDirectory>) -> Dataset {
        if let Some(control) = &self.control {
            control.carry_out(directory);
        }
        self
    }

    /// Closes a snapshot that is about to be destroyed. Returns false if files of it are open,
    /// unless `force` is set.
    pub fn forget_snapshot(&self, txg: u64, force: bool) -> bool {
        self.control.as_ref().is_none_or(|control| control.forget(nacre_pool::Txg(txg), force))
    }

    /// Returns the name of a snapshot that was accessed, and the range of inode numbers of its
    /// files.
    pub fn numbers_of_snapshot(&self, txg: u64) -> Option<(String, (u64, u64))> {
        self.control.as_ref()?.numbers_of(nacre_pool::Txg(txg))
    }

    /// Returns the id of `.zfs/snapshot`, for this root directory.
    #[must_use]
    pub fn snapshots_of(root: FileId) -> FileId {
        FileId { ino: mounted_tree::SNAPSHOTS, generation: 0, ..root }
    }

    /// Number of the dataset.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.current.files.id()
    }

    /// Range of inode numbers in the live file system.
    #[must_use]
    pub fn numbers_of_head(&self) -> (u64, u64) {
        (0, (1 << mounted_tree::SHIFT) - 1)
    }

    /// Returns the numbers of the trees of all its snapshots: the upper bits of their inode
    /// numbers.
    ///
    /// # Errors
    /// EIO if the pool cannot read them.
    pub fn snapshot_trees(&self) -> Result<Vec<u64>> {
        self.control.as_ref().map_or_else(|| Ok(Vec::new()), |control| control.number_all())
    }

    /// Whether files of it, or of its snapshots, are open.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.current.now().is_open() || self.control.as_ref().is_some_and(|control| control.is_open())
    }

    /// Sets whether reads leave access times unchanged, whatever the properties of the file system
    /// are.
    pub fn set_quiet(&self, quiet: bool) {
        self.quiet.store(quiet, Ordering::Relaxed);
    }

    /// Keeps orphan inodes of a previous process (`Key::Orphan` of its table) until the FUSE front
    /// end reports that the kernel does not have them; all other orphans are freed. Called before
    /// the FUSE front end takes over.
    ///
    /// # Errors
    /// EIO if the pool cannot read them.
    pub fn keep_nameless(&self, numbers: &[u64]) -> Result<()> {
        self.numbers.keep_nameless(numbers)
    }

    fn has_acls(&self) -> bool {
        self.numbers.acls.load(Ordering::Relaxed)
    }

    fn is_quiet(&self) -> bool {
        self.quiet.load(Ordering::Relaxed)
    }

    /// Blocks writes that go through the kernel's write-back, until the result is dropped. The FUSE
    /// front end has yet to flush earlier ones.
    #[must_use]
    pub fn stop_writes(&self) -> StoppedWrites {
        self.member.stop()
    }

    /// Blocks all users before the files are replaced (a rollback), until [`Dataset::replaced`] or
    /// [`Dataset::stays`].
    pub fn hold(&self) {
        self.current.now().pause();
    }

    /// Ends the block after the files were replaced: open files return ESTALE, directories are
    /// those that have their numbers now.
    pub fn replaced(&self) {
        self.current.replace();
    }

    /// Ends the block without a replacement.
    pub fn stays(&self) {
        self.current.now().resume();
    }

    /// Reports all changes by another machine to the FUSE front end.
    pub fn changed(&self, changes: &Changes) {
        let changes_of = self.changes.lock();
        let Some(door) = &*changes_of else { return };
        tell(changes, &|number| FileId { fs: self.number(), ino: number, generation: 0 }, door);
    }

    /// Ends the use of the file system: files that are still open return ESTALE.
    pub fn end(&self) {
        self.current.now().end();
        if let Some(control) = &self.control {
            control.end();
        }
    }

    fn node_kind<'a>(&self, node: &'a Node) -> Result<&'a NodeKind> {
        mounted_tree::node_kind(node).ok_or(Errno::EIO)
    }

    /// The file of a node; EPERM for the directories above snapshots.
    fn file_node<'a>(&self, node: &'a Node) -> Result<&'a FileNode> {
        match self.node_kind(node)? {
            NodeKind::File(file_node) => Ok(file_node),
            NodeKind::Control | NodeKind::Snapshots => Err(Errno::EPERM),
        }
    }

    fn attr_of(&self, file_node: &FileNode, row: &InodeRow) -> Attr {
        attr(self.current.files.id(), file_node.tree.shown(file_node.inode.number()), row)
    }

    fn entry(&self, tree: &Arc<MountedTree>, (inode, row): InodeWithRow) -> Entry {
        let file_node = FileNode { tree: Arc::clone(tree), inode };
        Entry { attr: self.attr_of(&file_node, &row), node: Node::new(Arc::new(NodeKind::File(file_node))) }
    }

    fn root_of(&self, tree: &Arc<MountedTree>) -> Result<Entry> {
        let root = tree.files.files().root();
        let row = tree.files.files().attributes(&root).map_err(errno)?;
        Ok(self.entry(tree, (root, row)))
    }

    /// Whether a name in a directory is that of `.zfs`.
    fn is_control(&self, parent: &FileNode, name: Name<'_>) -> bool {
        name.bytes() == control::NAME
            && !parent.tree.is_snapshot()
            && self.control.is_some()
            && self.current.files.behaviour().snapdir != Shown::Disabled
            && parent.inode.number() == self.current.files.files().root().number()
    }

    /// Refuses to create or remove `.zfs`, with this error.
    fn not_control(&self, parent: &FileNode, name: Name<'_>, error: Errno) -> Result<()> {
        if self.is_control(parent, name) { Err(error) } else { Ok(()) }
    }

    fn make(
        &self,
        caller: &Caller,
        parent: &Node,
        name: Name<'_>,
        new: &New<'_>,
    ) -> Result<(Arc<MountedTree>, InodeWithRow)> {
        let parent = self.file_node(parent)?;
        self.not_control(parent, name, Errno::EEXIST)?;
        let made = parent
            .changeable()?
            .make(&parent.inode, name.bytes(), acl::DEFAULT, &|view| new.born(caller, view, self.has_acls()));
        let made = made.map_err(errno)?;
        self.sync_if_always()?;
        Ok((Arc::clone(&parent.tree), made))
    }

    fn make_entry(&self, caller: &Caller, parent: &Node, name: Name<'_>, new: &New<'_>) -> Result<Entry> {
        self.make(caller, parent, name, new).map(|(tree, made)| self.entry(&tree, made))
    }

    fn open_file(&self, caller: &Caller, file_node: &FileNode, row: &InodeRow, flags: OpenFlags) -> Result<Opened> {
        match kind_of(row) {
            Kind::File => {}
            Kind::Directory => return Err(Errno::EISDIR),
            Kind::Symlink => return Err(Errno::ELOOP),
            Kind::Block | Kind::Character | Kind::Fifo | Kind::Socket => return Err(Errno::ENXIO),
        }
        if flags.writes() || flags.truncates() {
            file_node.changeable()?;
        }
        // The FUSE front end itself opens files for content that the kernel has accepted already.
        if *caller != Caller::ROOT {
            file_flags::check_open(row, flags)?;
        }
        if flags.truncates() && flags.writes() && row.flags & nacre_pool::rows::inode::flags::HAS_XATTRS != 0 {
            xattrs::drop_capability(file_node.changeable()?, &file_node.inode)?;
        }
        if flags.truncates() && flags.writes() && row.size > 0 {
            let change = nacre_pool::files::AttributeChange { size: Some(0), ..Default::default() };
            file_node.changeable()?.set_attributes(&file_node.inode, &change).map_err(errno)?;
            file_node.tree.sync_if_always(&self.pool, &file_node.inode)?;
        }
        Ok(Arc::new(DatasetFile::new(&self.pool, (file_node, row), (flags, self.is_quiet()), &self.member)))
    }

    /// Notes an access when a file is opened for reading only: reads from the kernel's cache are
    /// not visible here. The kernel requests the attributes of a file again after it was closed.
    fn note_reader(&self, file_node: &FileNode, flags: OpenFlags) {
        let quiet =
            self.is_quiet() || file_node.tree.is_snapshot() || flags.raw() & rustix::fs::OFlags::NOATIME.bits() != 0;
        if flags.reads() && !flags.writes() && !quiet {
            file_node.tree.files.files().touch(&file_node.inode);
        }
    }

    /// The reason why opens must be requested, if any. Access times need it, since reads from the
    /// kernel's cache are not visible; and writes that must be durable when write(2) returns must
    /// not be cached.
    fn needs_opens(&self) -> Option<&'static str> {
        if self.current.now().is_snapshot() {
            None
        } else if !self.is_quiet() {
            Some("access times are noted (atime=on)")
        } else if self.current.files.behaviour().sync == SyncMode::Always {
            Some("each write is made durable (sync=always)")
        } else {
            None
        }
    }

    /// Whether this is the name of an ACL, and ACLs are off.
    fn is_off(&self, name: &[u8]) -> bool {
        !self.has_acls() && acl::is_acl(name)
    }

    /// With `sync=always`: makes changes of names or attributes durable before they are answered.
    fn sync_if_always(&self) -> Result<()> {
        if self.current.files.behaviour().sync == SyncMode::Always {
            self.pool.sync_names().map_err(|error| errno(error.into()))?;
        }
        Ok(())
    }
}

/// Description of a new file.
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

    /// Applies the rules of the directory: its group and set-group-id, umask or default ACL
    /// (acl(5), "OBJECT CREATION AND DEFAULT ACLs").
    fn born(&self, caller: &Caller, parent: &ParentView, acls: bool) -> nacre_pool::files::Result<NewInode> {
        const SET_GID: u32 = 0o2000;
        let mut mode = self.mode;
        let mut gid = caller.gid;
        if u32::from(parent.row.mode) & SET_GID != 0 {
            gid = parent.row.gid;
            if self.kind == Kind::Directory {
                mode |= SET_GID;
            }
        }
        let default = parent.attribute.as_deref().filter(|_| acls && self.kind != Kind::Symlink);
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
        let mut row = InodeRow::new(type_of(self.kind), (mode & 0o7777) as u16, parent.now);
        (row.uid, row.gid) = (caller.uid, gid);
        row.device = rustix::fs::makedev(self.device.0, self.device.1);
        Ok(NewInode { row, target: self.target.map(<[u8]>::to_vec), attributes })
    }
}

impl Layer for Dataset {
    fn root(&self) -> Result<Entry> {
        self.root_of(&self.current.now())
    }

    fn lookup(&self, _caller: &Caller, parent: &Node, name: Name<'_>) -> Result<Entry> {
        match (self.node_kind(parent)?, &self.control) {
            (NodeKind::File(parent), Some(control)) if self.is_control(parent, name) => {
                control.entry(&self.current.now(), &NodeKind::Control)
            }
            (NodeKind::File(parent), _) => {
                let found = parent.files()?.look_up(&parent.inode, name.bytes()).map_err(errno)?;
                Ok(self.entry(&parent.tree, found))
            }
            (NodeKind::Control, Some(control)) if name.bytes() == control::SNAPSHOT => {
                control.entry(&self.current.now(), &NodeKind::Snapshots)
            }
            (NodeKind::Snapshots, Some(control)) => self.root_of(&control.snapshot_tree(name)?),
            _ => Err(Errno::ENOENT),
        }
    }

    fn id(&self, node: &Node) -> Result<FileId> {
        let ino = match self.node_kind(node)? {
            NodeKind::File(file_node) => file_node.tree.shown(file_node.inode.number()),
            NodeKind::Control => mounted_tree::CONTROL,
            NodeKind::Snapshots => mounted_tree::SNAPSHOTS,
        };
        Ok(FileId { fs: self.current.files.id(), ino, generation: 0 })
    }

    fn path(&self, node: &Node) -> Option<Vec<u8>> {
        match self.node_kind(node).ok()? {
            NodeKind::Control => Some(control::NAME.to_vec()),
            NodeKind::Snapshots => Some([control::NAME, b"/", control::SNAPSHOT].concat()),
            NodeKind::File(file_node) => {
                let path = file_node.files().ok()?.path(&file_node.inode).ok()??;
                Some(match (&file_node.tree.snapshot, &self.control) {
                    (Some((name, _)), Some(_)) => {
                        let above = [control::NAME, b"/", control::SNAPSHOT, b"/", name.as_bytes()].concat();
                        if path.is_empty() { above } else { [&*above, b"/", &*path].concat() }
                    }
                    _ => path,
                })
            }
        }
    }

    fn adopt(&self, _known: &Node, _fresh: &Node) {
        // Nodes are the files themselves: there is nothing to update.
    }

    fn hold(&self, _directory: &Node, _gone: bool) {
        // Nodes need no names either.
    }

    fn getattr(&self, _caller: &Caller, node: &Node, _file: Option<&dyn OpenFile>) -> Result<Attr> {
        match (self.node_kind(node)?, &self.control) {
            (NodeKind::File(file_node), _) => {
                let row = file_node.files()?.attributes(&file_node.inode).map_err(of_node)?;
                Ok(self.attr_of(file_node, &row))
            }
            (kind, Some(control)) => control.entry(&self.current.now(), kind).map(|entry| entry.attr),
            (_, None) => Err(Errno::EIO),
        }
    }

    fn access(&self, _caller: &Caller, node: &Node, _mask: u32) -> Result<()> {
        // The owner of the imported pool may do everything with it.
        self.node_kind(node).map(drop)
    }

    fn setattr(&self, _caller: &Caller, node: &Node, _file: Option<&dyn OpenFile>, change: &SetAttr) -> Result<Attr> {
        let file_node = self.file_node(node)?;
        let files = file_node.changeable()?;
        // A refused change leaves extended attributes as they are, too.
        file_flags::check_change(&files.attributes_without_room(&file_node.inode).map_err(errno)?, change)?;
        xattrs::follow_change(files, &file_node.inode, change)?;
        let row = files.set_attributes(&file_node.inode, &change_of(change)).map_err(errno)?;
        if change.size.is_some() {
            file_node.tree.sync_if_always(&self.pool, &file_node.inode)?;
        } else {
            self.sync_if_always()?;
        }
        Ok(self.attr_of(file_node, &row))
    }

    fn readlink(&self, _caller: &Caller, node: &Node) -> Result<Vec<u8>> {
        let file_node = self.file_node(node)?;
        file_node.files()?.read_link(&file_node.inode).map_err(errno)
    }

    fn create(
        &self,
        caller: &Caller,
        parent: &Node,
        name: Name<'_>,
        mode: u32,
        flags: OpenFlags,
    ) -> Result<(Entry, Opened)> {
        let above = self.file_node(parent)?;
        let opened = |(inode, row): InodeWithRow| {
            let file_node = FileNode { tree: Arc::clone(&above.tree), inode: Arc::clone(&inode) };
            let file = self.open_file(caller, &file_node, &row, flags)?;
            Ok::<_, Errno>((file_node, file))
        };
        loop {
            match self.make(caller, parent, name, &New::plain(Kind::File, mode)) {
                Ok((tree, made)) => {
                    let (_, file) = opened((Arc::clone(&made.0), made.1))?;
                    return Ok((self.entry(&tree, made), file));
                }
                Err(Errno::EEXIST) if !flags.exclusive() && !self.is_control(above, name) => {}
                Err(error) => return Err(error),
            }
            // If the name was removed again in the meantime, it is created after all.
            match above.files()?.look_up(&above.inode, name.bytes()) {
                Ok(found) => {
                    let (file_node, file) = opened(found)?;
                    let row = file_node.files()?.attributes(&file_node.inode).map_err(errno)?;
                    return Ok((self.entry(&above.tree, (file_node.inode, row)), file));
                }
                Err(nacre_pool::files::FileError::NotFound) => {}
                Err(error) => return Err(errno(error)),
            }
        }
    }

    fn tmpfile(&self, caller: &Caller, parent: &Node, mode: u32, flags: OpenFlags) -> Result<(Entry, Opened)> {
        let (parent, new) = (self.file_node(parent)?, New::plain(Kind::File, mode));
        // O_TMPFILE|O_EXCL can never get a name (open(2)).
        let linkable = !flags.exclusive();
        let files = parent.changeable()?;
        let made =
            files.make_nameless(&parent.inode, acl::DEFAULT, linkable, &|view| new.born(caller, view, self.has_acls()));
        let (inode, row) = made.map_err(errno)?;
        let file = self.open_file(
            caller,
            &FileNode { tree: Arc::clone(&parent.tree), inode: Arc::clone(&inode) },
            &row,
            flags,
        )?;
        self.numbers.removed((Arc::clone(&inode), 0));
        Ok((self.entry(&parent.tree, (inode, row)), file))
    }

    fn mkdir(&self, caller: &Caller, parent: &Node, name: Name<'_>, mode: u32) -> Result<Entry> {
        if let (NodeKind::Snapshots, Some(control)) = (self.node_kind(parent)?, &self.control) {
            control.take(name)?;
            return self.root_of(&control.snapshot_tree(name)?);
        }
        self.make_entry(caller, parent, name, &New::plain(Kind::Directory, mode))
    }

    fn mknod(
        &self,
        caller: &Caller,
        parent: &Node,
        name: Name<'_>,
        kind: Kind,
        mode: u32,
        device: (u32, u32),
    ) -> Result<Entry> {
        let device = match kind {
            Kind::Block | Kind::Character => device,
            Kind::File | Kind::Fifo | Kind::Socket => (0, 0),
            Kind::Directory => return Err(Errno::EPERM),
            Kind::Symlink => return Err(Errno::EINVAL),
        };
        self.make_entry(caller, parent, name, &New { device, ..New::plain(kind, mode) })
    }

    fn symlink(&self, caller: &Caller, parent: &Node, name: Name<'_>, target: &[u8]) -> Result<Entry> {
        let new = New { target: Some(target), ..New::plain(Kind::Symlink, 0o777) };
        self.make_entry(caller, parent, name, &new)
    }

    fn link(
        &self,
        _caller: &Caller,
        node: &Node,
        _file: Option<&dyn OpenFile>,
        parent: &Node,
        name: Name<'_>,
    ) -> Result<Entry> {
        let (file_node, parent) = (self.file_node(node)?, self.file_node(parent)?);
        self.not_control(parent, name, Errno::EEXIST)?;
        parent.changeable()?;
        file_node.beside(parent)?;
        let row = file_node.changeable()?.link(&file_node.inode, &parent.inode, name.bytes()).map_err(errno)?;
        self.sync_if_always()?;
        Ok(self.entry(&file_node.tree, (Arc::clone(&file_node.inode), row)))
    }

    fn unlink(&self, _caller: &Caller, parent: &Node, name: Name<'_>) -> Result<()> {
        let parent = self.file_node(parent)?;
        self.not_control(parent, name, Errno::EISDIR)?;
        let taken = parent.changeable()?.take(&parent.inode, name.bytes(), false).map_err(errno)?;
        self.numbers.removed(taken);
        self.sync_if_always()
    }

    fn rmdir(&self, _caller: &Caller, parent: &Node, name: Name<'_>) -> Result<()> {
        if let (NodeKind::Snapshots, Some(control)) = (self.node_kind(parent)?, &self.control) {
            // The caller of rmdir(2) has the directory locked: the kernel cannot be made to report
            // whether files of it are open.
            return control.destroy(name, self.member.opens_unasked());
        }
        let parent = self.file_node(parent)?;
        self.not_control(parent, name, Errno::EPERM)?;
        let taken = parent.changeable()?.take(&parent.inode, name.bytes(), true).map_err(errno)?;
        self.numbers.removed(taken);
        self.sync_if_always()
    }

    fn rename(
        &self,
        caller: &Caller,
        parent: &Node,
        name: Name<'_>,
        new_parent: &Node,
        new_name: Name<'_>,
        flags: RenameFlags,
    ) -> Result<()> {
        let leaves = flags.has(RenameFlags::WHITEOUT);
        let replace = match flags.0 & !RenameFlags::WHITEOUT {
            0 => MayReplace::Yes,
            RenameFlags::NOREPLACE => MayReplace::No,
            RenameFlags::EXCHANGE if !leaves => MayReplace::Exchange,
            _ => return Err(Errno::EINVAL),
        };
        if let (NodeKind::Snapshots, NodeKind::Snapshots, Some(control)) =
            (self.node_kind(parent)?, self.node_kind(new_parent)?, &self.control)
        {
            return if leaves || replace == MayReplace::Exchange {
                Err(Errno::EINVAL)
            } else {
                control.rename(name, new_name)
            };
        }
        let (from, to) = (self.file_node(parent)?, self.file_node(new_parent)?);
        self.not_control(from, name, Errno::EPERM)?;
        self.not_control(to, new_name, Errno::EPERM)?;
        to.changeable()?;
        from.beside(to)?;
        let taken = self.numbers.before(to, new_name.bytes());
        let (old, new) = ((&*from.inode, name.bytes()), (&*to.inode, new_name.bytes()));
        let renamed = if leaves {
            // A whiteout of overlayfs: a character device 0, 0
            // (Documentation/filesystems/overlayfs.rst).
            let whiteout = New::plain(Kind::Character, 0);
            from.changeable()?.rename_leaving(old, new, replace, &|view| whiteout.born(caller, view, false))
        } else {
            from.changeable()?.rename(old, new, replace)
        };
        renamed.map_err(errno)?;
        self.numbers.after(taken)?;
        self.sync_if_always()
    }

    fn open(&self, caller: &Caller, node: &Node, flags: OpenFlags) -> Result<Opened> {
        let file_node = self.file_node(node)?;
        let row = file_node.files()?.attributes(&file_node.inode).map_err(errno)?;
        let file = self.open_file(caller, file_node, &row, flags)?;
        self.note_reader(file_node, flags);
        Ok(file)
    }

    fn readdir(
        &self,
        _caller: &Caller,
        node: &Node,
        from: u64,
        attributes: bool,
        sink: &mut dyn DirSink,
    ) -> Result<()> {
        match (self.node_kind(node)?, &self.control) {
            (NodeKind::File(file_node), _) => self.list(file_node, from, attributes, sink),
            (NodeKind::Control, Some(control)) => control.list(&self.current.now(), from, attributes, sink),
            (NodeKind::Snapshots, Some(control)) => {
                control.list_snapshots(from, attributes, &|tree| self.root_of(tree), sink)
            }
            (_, None) => Err(Errno::EIO),
        }
    }

    fn fsyncdir(&self, _caller: &Caller, node: &Node, _data_only: bool) -> Result<()> {
        match self.node_kind(node)? {
            NodeKind::File(file_node) => self.pool.sync_directory(&file_node.inode).map_err(errno),
            NodeKind::Control | NodeKind::Snapshots => self.pool.sync_names().map_err(|error| errno(error.into())),
        }
    }

    fn statfs(&self, _caller: &Caller, _node: &Node) -> Result<StatFs> {
        const BLOCK: u64 = 4096;
        /// Every inode takes space in trees: the free bytes bound the number of inodes. Least space
        /// of one, bytes.
        const INODE: u64 = 64;
        let files = &self.current.files;
        let referenced = self.pool.referenced(files.id()).map_err(|error| errno(error.into()))?;
        let (available, objects) = (files.files().room(), files.files().objects());
        let free = if self.current.now().is_snapshot() { 0 } else { files.files().content_room() / BLOCK };
        Ok(StatFs {
            block: BLOCK as u32,
            fragment: BLOCK as u32,
            blocks: referenced.div_ceil(BLOCK) + free,
            free,
            available: free,
            files: objects + available / INODE,
            files_free: available / INODE,
            name_max: 255,
        })
    }

    fn syncfs(&self) -> Result<()> {
        self.pool.sync_all(&self.current.files).map_err(errno)
    }

    fn getxattr(&self, _caller: &Caller, node: &Node, name: &[u8], buffer: &mut [u8]) -> Result<usize> {
        // Requested for each file of a long listing, which has just been shown.
        if acl::is_acl(name) && mounted_tree::is_bare(node)? {
            return Err(Errno::ENODATA);
        }
        match self.node_kind(node)? {
            NodeKind::File(_) if self.is_off(name) => Err(Errno::ENODATA),
            NodeKind::File(file_node) => xattrs::get(file_node.files()?, &file_node.inode, name, buffer),
            NodeKind::Control | NodeKind::Snapshots => Err(Errno::ENODATA),
        }
    }

    fn listxattr(&self, _caller: &Caller, node: &Node, buffer: &mut [u8]) -> Result<usize> {
        match self.node_kind(node)? {
            NodeKind::File(file_node) => {
                xattrs::list(file_node.files()?, &file_node.inode, &|name| !self.is_off(name), buffer)
            }
            NodeKind::Control | NodeKind::Snapshots => Ok(0),
        }
    }

    fn setxattr(&self, _caller: &Caller, node: &Node, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()> {
        let file_node = self.file_node(node)?;
        if self.is_off(name) {
            return Err(Errno::EOPNOTSUPP);
        }
        xattrs::set(file_node.changeable()?, &file_node.inode, name, value, flags)?;
        self.sync_if_always()
    }

    fn removexattr(&self, _caller: &Caller, node: &Node, name: &[u8]) -> Result<()> {
        let file_node = self.file_node(node)?;
        if self.is_off(name) {
            return Err(Errno::EOPNOTSUPP);
        }
        xattrs::remove(file_node.changeable()?, &file_node.inode, name)?;
        self.sync_if_always()
    }

    fn ioctl(&self, _caller: &Caller, node: &Node, request: Ioctl<'_>, output: &mut [u8]) -> Result<(i32, usize)> {
        let NodeKind::File(file_node) = self.node_kind(node)? else { return Err(Errno::ENOTTY) };
        let done = file_flags::ioctl(file_node.files()?, file_node, &request, output)?;
        if request.may_change() {
            self.sync_if_always()?;
        }
        Ok(done)
    }

    fn coherence(&self, scope: Scope<'_>) -> Coherence {
        // Commands create and destroy snapshots.
        let (Scope::Names(node) | Scope::Attributes(node, _)) = scope;
        if mounted_tree::is_listed(node) {
            return Coherence::Exclusive;
        }
        match self.node_kind(node) {
            Ok(NodeKind::Control | NodeKind::Snapshots) => Coherence::Shared,
            _ => Coherence::Exclusive,
        }
    }

    fn watch(&self, channel: Sender<Invalidation>) {
        *self.changes.lock() = Some(channel);
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities {
            acls: self.has_acls(),
            judges_callers: false,
            reuses_numbers: false,
            numbered: Some(&self.numbers),
            writeback: Some(self),
            needs_opens: self.needs_opens(),
            open_files: None,
            left_open: None,
            interrupted: None,
        }
    }

    fn describe(&self) -> Description {
        Description::new("dataset").with("number", self.current.files.id().to_string())
    }
}

impl nacre_vfs::WritebackLayer for Dataset {
    fn accept(&self, door: &Arc<dyn nacre_vfs::WritebackHost>) -> bool {
        !self.current.now().is_snapshot() && self.member.collect(door)
    }

    fn unannounced(&self) -> bool {
        self.member.unannounced()
    }

    fn goes_on(&self) {
        self.member.go_on();
    }
}

impl Dataset {
    /// Lists the names of a directory, in the order of their creation.
    fn list(&self, file_node: &FileNode, from: u64, attributes: bool, sink: &mut dyn DirSink) -> Result<()> {
        let files = file_node.files()?;
        if from == 0 && !file_node.tree.is_snapshot() && !self.is_quiet() {
            files.touch(&file_node.inode);
        }
        let span = file_node.tree.ends.enter(from, || files.next_sequence());
        let (mut outcome, mut some) = (Ok(()), false);
        if from == 0
            && file_node.inode.number() == mounted_tree::ROOT
            && !file_node.tree.is_snapshot()
            && let Some(control) =
                self.control.as_ref().filter(|_| self.current.files.behaviour().snapdir == Shown::Visible)
        {
            some = true;
            // Names have higher numbers than the root.
            if !control.list_itself(&self.current.now(), span.after(mounted_tree::ROOT), attributes, sink)? {
                return Ok(());
            }
        }
        let expected = sink.room(attributes);
        let sink = RefCell::new(sink);
        let wants = |number| sink.borrow().wants_number(file_node.tree.shown(number));
        let wanted = attributes.then_some(&wants as InodeFilter<'_>);
        let visited = files.visit(&file_node.inode, (span.behind, span.end), wanted, expected, &mut |seen| {
            some = true;
            let name = match Name::new(seen.name) {
                Ok(name) => name,
                Err(error) => {
                    outcome = Err(error);
                    return false;
                }
            };
            let ino = file_node.tree.shown(seen.number);
            let entry = seen.row.map(|row| Entry {
                attr: attr(self.current.files.id(), ino, row),
                node: Node::new(Arc::new(ListedNode::new(&file_node.tree, seen.number))),
            });
            sink.borrow_mut().push(DirEntry {
                name,
                ino,
                kind: Some(translate::kind_of_type(seen.file_type)),
                next: span.after(seen.sequence),
                entry,
            })
        });
        visited.map_err(errno)?;
        if !some {
            file_node.tree.ends.ended(&span);
        }
        outcome
    }
}
