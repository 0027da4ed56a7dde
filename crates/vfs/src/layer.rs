//! The one trait through which any front end or test uses any file system.
//!
//! Callers: the FUSE front end, the filters (through [`crate::Filtered`]), combiners, tests. Invariants:
//! * no lookup counts: a [`Node`] is owned, and stays alive as long as a reference to it exists. Numbers stand for
//!   files only where a layer offers that ([`Capabilities::numbered`]);
//! * every operation has its [`Caller`] as the first argument and returns values;
//! * no default bodies except [`Layer::rest`]: a layer without a feature states so in one line;
//! * calls may come from any thread at any time. A layer sends changes made by others as an [`Invalidation`]. It
//!   calls its front end in two cases: where it has accepted the front end's offer of write-back caching
//!   ([`Capabilities::writeback`]), and to wait until files are closed ([`Capabilities::open_files`]).

use crate::{
    Attr, Caller, Capabilities, Coherence, Description, FileId, Invalidation, Kind, Name, Node, OpenFile, OpenFlags,
    Result, Scope, SetAttr, StatFs,
};
use std::sync::{Arc, mpsc::Sender};

/// A file that was found or created: the node and its attributes at that moment.
#[derive(Clone, Debug)]
pub struct Entry {
    /// The file.
    pub node: Node,
    /// Its attributes.
    pub attr: Attr,
}

/// An open file returned by a layer.
pub type Opened = Arc<dyn OpenFile>;

/// A file that was created and opened at once.
pub type Created = (Entry, Opened);

/// Any open file of the node of a call, where the caller has one.
pub type AnyOpen<'a> = Option<&'a dyn OpenFile>;

/// The number of a device, major and minor.
pub type Dev = (u32, u32);

/// The flags of `renameat2(2)`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RenameFlags(pub u32);

impl RenameFlags {
    /// Fail with EEXIST where the target exists.
    pub const NOREPLACE: u32 = 1;
    /// Swap the two names.
    pub const EXCHANGE: u32 = 2;
    /// Leave a whiteout behind (overlayfs).
    pub const WHITEOUT: u32 = 4;

    /// Whether all of `bits` are set.
    pub fn has(self, bits: u32) -> bool {
        self.0 & bits == bits
    }
}

/// The flags of `setxattr(2)`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct XattrFlags {
    /// `XATTR_CREATE`: EEXIST where it exists.
    pub create: bool,
    /// `XATTR_REPLACE`: ENODATA where it does not.
    pub replace: bool,
    /// The kernel requests that the set-group-id bit is dropped (an ACL set by a user outside the group).
    pub kill_sgid: bool,
}

/// One name of a listing.
#[derive(Debug)]
pub struct DirEntry<'a> {
    /// The name. The front end adds `.` and `..`.
    pub name: Name<'a>,
    /// Inode number as shown in `d_ino`.
    pub ino: u64,
    /// File type, where the directory has it.
    pub kind: Option<Kind>,
    /// Position after this entry, for a `readdir` that continues there. Never 0; stable over remounts for layers on
    /// stable storage.
    pub next: u64,
    /// The file itself, where attributes were requested and the file still exists.
    pub entry: Option<Entry>,
}

/// Receives the names of a listing one by one.
pub trait DirSink {
    /// Takes an entry, or returns false where it is full: the listing stops *before* this entry.
    fn push(&mut self, entry: DirEntry<'_>) -> bool;

    /// Where attributes were requested: whether they are needed for this name. A name without attributes still has to
    /// be pushed.
    fn wants_file(&self, name: Name<'_>) -> bool {
        let _ = name;
        true
    }

    /// Where attributes were requested: whether they are needed for the file with this inode number, where files are
    /// found by inode number.
    fn wants_number(&self, number: u64) -> bool {
        let _ = number;
        true
    }

    /// Approximate number of entries that still fit: a hint for read-ahead.
    fn room(&self, attributes: bool) -> usize {
        let _ = attributes;
        512
    }
}

/// A file system, or a layer over one or more.
pub trait Layer: Send + Sync + 'static {
    /// Returns the root directory.
    ///
    /// # Errors
    /// ESTALE or EIO where it is gone.
    fn root(&self) -> Result<Entry>;

    /// Looks a name up.
    ///
    /// # Errors
    /// ENOENT, ENOTDIR, ENAMETOOLONG, and errors of the storage.
    fn lookup(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<Entry>;

    /// Returns the identity of a file, without access to the storage.
    ///
    /// # Errors
    /// EIO where the node is another layer's.
    fn id(&self, node: &Node) -> Result<FileId>;

    /// Last known path of a file: the names from the root down, separated by `/`; empty for the root, `None` where
    /// the layer does not know. Without access to the storage, so users of the path have to look the names up and
    /// compare identities.
    fn path(&self, node: &Node) -> Option<Vec<u8>>;

    /// Merges `fresh`, the result of a lookup or creation, into `known`, which is the same file ([`FileId`]) and
    /// which the caller continues to use: `known` gets the name under which `fresh` was found (after a rename, or as
    /// one more hard link).
    fn adopt(&self, known: &Node, fresh: &Node);

    /// Prepares a directory in use for the loss of its name, or notes the loss (`gone`): a layer that finds
    /// directories by their names keeps a handle of it (for example a descriptor) from now on, as long as the node
    /// lives.
    fn hold(&self, directory: &Node, gone: bool);

    /// Reads attributes. `file` is any open file of this node, where the caller has one: it is used for files whose
    /// names are gone.
    ///
    /// # Errors
    /// ESTALE where the file is gone.
    fn getattr(&self, caller: &Caller, node: &Node, file: AnyOpen<'_>) -> Result<Attr>;

    /// Checks whether the storage allows the user of this layer's process to read (4), write (2) or execute (1; of a
    /// directory: search) a file, all bits of `mask` together. Called only by front ends whose kernel does not check
    /// permissions.
    ///
    /// # Errors
    /// As `access(2)`: EACCES, EROFS; ESTALE where the file is gone.
    fn access(&self, caller: &Caller, node: &Node, mask: u32) -> Result<()>;

    /// Changes attributes and returns the new ones.
    ///
    /// # Errors
    /// As `chmod(2)`, `chown(2)`, `truncate(2)`, `utimensat(2)`.
    fn setattr(&self, caller: &Caller, node: &Node, file: AnyOpen<'_>, change: &SetAttr) -> Result<Attr>;

    /// The target of a symbolic link.
    ///
    /// # Errors
    /// EINVAL where it is none.
    fn readlink(&self, caller: &Caller, node: &Node) -> Result<Vec<u8>>;

    /// Creates a regular file and opens it, atomically; opens an existing one unless `flags` contain `O_EXCL`.
    /// Permission bits in `mode`; the caller's umask applies (or the parent's default ACL).
    ///
    /// # Errors
    /// As `open(2)`.
    fn create(&self, caller: &Caller, parent: &Node, name: Name<'_>, mode: u32, flags: OpenFlags) -> Result<Created>;

    /// Creates a file without a name (`O_TMPFILE`).
    ///
    /// # Errors
    /// As `open(2)`.
    fn tmpfile(&self, caller: &Caller, parent: &Node, mode: u32, flags: OpenFlags) -> Result<Created>;

    /// Creates a directory; `mode` with sticky and set-group-id.
    ///
    /// # Errors
    /// As `mkdir(2)`.
    fn mkdir(&self, caller: &Caller, parent: &Node, name: Name<'_>, mode: u32) -> Result<Entry>;

    /// Creates a file of any type except directory and symbolic link. `device` is (major, minor).
    ///
    /// # Errors
    /// As `mknod(2)`.
    fn mknod(&self, caller: &Caller, parent: &Node, name: Name<'_>, kind: Kind, mode: u32, dev: Dev) -> Result<Entry>;

    /// Creates a symbolic link.
    ///
    /// # Errors
    /// As `symlink(2)`.
    fn symlink(&self, caller: &Caller, parent: &Node, name: Name<'_>, target: &[u8]) -> Result<Entry>;

    /// Creates another name of a file. `file` is any open file of the node (it gives a name to an `O_TMPFILE`).
    ///
    /// # Errors
    /// As `link(2)`.
    fn link(&self, caller: &Caller, node: &Node, file: AnyOpen<'_>, parent: &Node, name: Name<'_>) -> Result<Entry>;

    /// Removes a name of a file other than a directory.
    ///
    /// # Errors
    /// As `unlink(2)`.
    fn unlink(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<()>;

    /// Removes an empty directory.
    ///
    /// # Errors
    /// As `rmdir(2)`.
    fn rmdir(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<()>;

    /// Renames; the caller then looks the moved names up and calls [`Layer::adopt`].
    ///
    /// # Errors
    /// As `renameat2(2)`.
    fn rename(
        &self,
        caller: &Caller,
        parent: &Node,
        name: Name<'_>,
        new_parent: &Node,
        new_name: Name<'_>,
        flags: RenameFlags,
    ) -> Result<()>;

    /// Opens a file.
    ///
    /// # Errors
    /// As `open(2)`.
    fn open(&self, caller: &Caller, node: &Node, flags: OpenFlags) -> Result<Opened>;

    /// Lists a directory from position `from` (0: the start, else a [`DirEntry::next`]); with `attributes`, each
    /// entry has its file. Ends where the sink is full or the directory ends. `.` and `..` do not appear.
    ///
    /// # Errors
    /// ENOTDIR, ESTALE, and errors of the storage.
    fn readdir(&self, caller: &Caller, node: &Node, from: u64, attributes: bool, sink: &mut dyn DirSink) -> Result<()>;

    /// Makes a directory's names durable.
    ///
    /// # Errors
    /// As `fsync(2)`.
    fn fsyncdir(&self, caller: &Caller, node: &Node, data_only: bool) -> Result<()>;

    /// Returns the statistics of the file system.
    ///
    /// # Errors
    /// As `statfs(2)`.
    fn statfs(&self, caller: &Caller, node: &Node) -> Result<StatFs>;

    /// Writes everything below to stable storage.
    ///
    /// # Errors
    /// As `syncfs(2)`.
    fn syncfs(&self) -> Result<()>;

    /// Reads an extended attribute; with an empty buffer, only returns its size.
    ///
    /// # Errors
    /// ENODATA where there is none, ERANGE where the buffer is too small, EOPNOTSUPP where it
    /// cannot exist.
    fn getxattr(&self, caller: &Caller, node: &Node, name: &[u8], buffer: &mut [u8]) -> Result<usize>;

    /// Lists the names of extended attributes, each ended by a NUL; with an empty buffer, only returns the size.
    ///
    /// # Errors
    /// ERANGE where the buffer is too small.
    fn listxattr(&self, caller: &Caller, node: &Node, buffer: &mut [u8]) -> Result<usize>;

    /// Sets an extended attribute.
    ///
    /// # Errors
    /// As `setxattr(2)`.
    fn setxattr(&self, caller: &Caller, node: &Node, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()>;

    /// Removes an extended attribute.
    ///
    /// # Errors
    /// ENODATA where there is none.
    fn removexattr(&self, caller: &Caller, node: &Node, name: &[u8]) -> Result<()>;

    /// `ioctl(2)` on a directory or a file that is not open (file flags: `FS_IOC_GETFLAGS` and similar).
    ///
    /// # Errors
    /// ENOTTY for commands that are not forwarded.
    fn ioctl(&self, caller: &Caller, node: &Node, request: crate::Ioctl<'_>, output: &mut [u8])
    -> Result<(i32, usize)>;

    /// Coherence of answers about `scope`.
    fn coherence(&self, scope: Scope<'_>) -> Coherence;

    /// Sends changes by others to `channel` from now on. Called once, before the first lookup.
    fn watch(&self, channel: Sender<Invalidation>);

    /// Starts an idle watch: for a front end without requests, while changes of files that it does not know keep
    /// coming. Three steps:
    /// * `None`: from now on the layer notices any lookup or listing. Returns whether there are any watches that can
    ///   be reduced; if not, the front end does not call again.
    /// * Later, when all earlier requests have been answered: all nodes that the front end knows, in pieces. Returns
    ///   whether to continue: false where a change of one of them could be missed.
    /// * At the end an empty piece. Returns whether the idle watch is on: only changes of these files are sent, until
    ///   a name is looked up or listed. It is not on where that has happened since the first step.
    ///
    /// The default is for a layer without watches: it has none to reduce; but where a sibling has some (a branch of a
    /// union), it does not prevent the idle watch.
    fn rest(&self, known: Option<&[Node]>) -> bool {
        known.is_some()
    }

    /// Optional features of this layer, and its requirements of the front end. Cheap, as it is called with single
    /// operations. A wrapper changes its own features, and forwards all others.
    fn capabilities(&self) -> Capabilities<'_>;

    /// Describes this layer and the layers below it.
    fn describe(&self) -> Description;
}
