//! The one trait through which any door or test reaches any file system.
//!
//! Callers: the FUSE door, the filters (through [`crate::Filtered`]), combiners, tests. Invariants:
//! * no lookup counts: a [`Node`] is owned, and whoever holds it keeps it alive. Numbers stand for
//!   files only where a layer offers that ([`Capabilities::numbered`]);
//! * every operation names its [`Caller`] first and returns values;
//! * no default bodies but for [`Layer::rest`]: a layer that lacks something says so in one line;
//! * calls may come from any thread at any time. A layer sends what others changed as an
//!   [`Invalidation`]. It calls its door in two cases: where it has taken the door's offer to hold
//!   writes back ([`Capabilities::writeback`]), and to wait until files are closed
//!   ([`Capabilities::open_files`]).

use crate::{
    Attr, Caller, Capabilities, Coherence, Description, FileId, Invalidation, Kind, Name, Node, OpenFile, OpenFlags,
    Result, Scope, SetAttr, StatFs,
};
use std::sync::{Arc, mpsc::Sender};

/// A file found or made: the node and its attributes at that moment.
#[derive(Clone, Debug)]
pub struct Entry {
    /// The file.
    pub node: Node,
    /// Its attributes.
    pub attr: Attr,
}

/// An open file as a layer hands it out.
pub type Opened = Arc<dyn OpenFile>;

/// A file made and opened at once.
pub type Created = (Entry, Opened);

/// Any open file of the node that a call is about, where the caller has one.
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
    /// The kernel asks to drop the set-group-id bit (an ACL set by someone outside the group).
    pub kill_sgid: bool,
}

/// One name of a listing.
#[derive(Debug)]
pub struct DirEntry<'a> {
    /// The name. `.` and `..` are left to the door.
    pub name: Name<'a>,
    /// Inode number as shown in `d_ino`.
    pub ino: u64,
    /// Type where the directory tells it.
    pub kind: Option<Kind>,
    /// The position after this entry: pass it to `readdir` to go on there. Never 0; stable over
    /// remounts for layers on stable storage.
    pub next: u64,
    /// The file itself, where attributes were asked for and the file still exists.
    pub entry: Option<Entry>,
}

/// Takes the names of a listing one by one.
pub trait DirSink {
    /// Takes an entry, or answers false where there is no more room: the listing stops *before*
    /// this entry.
    fn push(&mut self, entry: DirEntry<'_>) -> bool;

    /// Where attributes were asked for: whether they are wanted of this name. A name whose are not
    /// is still to be pushed.
    fn wants_file(&self, name: Name<'_>) -> bool {
        let _ = name;
        true
    }

    /// The same for the file with this number, where files are found by their numbers.
    fn wants_number(&self, number: u64) -> bool {
        let _ = number;
        true
    }

    /// About how many entries there is room for: a hint to whoever reads them ahead.
    fn room(&self, attributes: bool) -> usize {
        let _ = attributes;
        512
    }
}

/// A file system, or a layer over some.
pub trait Layer: Send + Sync + 'static {
    /// The root directory.
    ///
    /// # Errors
    /// ESTALE or EIO where it is gone.
    fn root(&self) -> Result<Entry>;

    /// Finds a name.
    ///
    /// # Errors
    /// ENOENT, ENOTDIR, ENAMETOOLONG, and what the storage says.
    fn lookup(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<Entry>;

    /// The identity of a file, without asking the storage.
    ///
    /// # Errors
    /// EIO where the node is another layer's.
    fn id(&self, node: &Node) -> Result<FileId>;

    /// Where the file was last seen: the names from the root down, divided by `/`; empty for the
    /// root, `None` where the layer does not know. Nothing is asked of the storage, so whoever acts
    /// on it looks the names up and compares identities.
    fn path(&self, node: &Node) -> Option<Vec<u8>>;

    /// Tells the layer that `fresh`, just answered by a look-up or a creation, is the same file
    /// ([`FileId`]) as `known`, which the caller goes on using: `known` learns the name under which
    /// `fresh` was found (after a rename, or as one more hard link).
    fn adopt(&self, known: &Node, fresh: &Node);

    /// A directory that is in use is about to lose its name, or has lost it (`gone`): a layer that
    /// finds directories by their names keeps what answers for it from now on, for as long as the
    /// node lives.
    fn hold(&self, directory: &Node, gone: bool);

    /// Attributes. `file` is any open file of this node, where the caller has one: it answers for
    /// files whose names are gone.
    ///
    /// # Errors
    /// ESTALE where the file is gone.
    fn getattr(&self, caller: &Caller, node: &Node, file: AnyOpen<'_>) -> Result<Attr>;

    /// Whether the storage lets whoever runs this layer read (4), write (2) or run (1; of a
    /// directory: search) a file, all bits of `mask` together. Asked only by doors behind which
    /// nobody else checks permissions.
    ///
    /// # Errors
    /// As `access(2)`: EACCES, EROFS; ESTALE where the file is gone.
    fn access(&self, caller: &Caller, node: &Node, mask: u32) -> Result<()>;

    /// Changes attributes and answers the new ones.
    ///
    /// # Errors
    /// As `chmod(2)`, `chown(2)`, `truncate(2)`, `utimensat(2)`.
    fn setattr(&self, caller: &Caller, node: &Node, file: AnyOpen<'_>, change: &SetAttr) -> Result<Attr>;

    /// The target of a symbolic link.
    ///
    /// # Errors
    /// EINVAL where it is none.
    fn readlink(&self, caller: &Caller, node: &Node) -> Result<Vec<u8>>;

    /// Creates a regular file and opens it, atomically; opens an existing one unless `flags` say
    /// `O_EXCL`. Permission bits in `mode`; the caller's umask applies (or the parent's default
    /// ACL).
    ///
    /// # Errors
    /// As `open(2)`.
    fn create(&self, caller: &Caller, parent: &Node, name: Name<'_>, mode: u32, flags: OpenFlags) -> Result<Created>;

    /// Creates a file without a name (`O_TMPFILE`).
    ///
    /// # Errors
    /// As `open(2)`.
    fn tmpfile(&self, caller: &Caller, parent: &Node, mode: u32, flags: OpenFlags) -> Result<Created>;

    /// Makes a directory; `mode` with sticky and set-group-id.
    ///
    /// # Errors
    /// As `mkdir(2)`.
    fn mkdir(&self, caller: &Caller, parent: &Node, name: Name<'_>, mode: u32) -> Result<Entry>;

    /// Makes a file of any type but directory and symbolic link. `device` is (major, minor).
    ///
    /// # Errors
    /// As `mknod(2)`.
    fn mknod(&self, caller: &Caller, parent: &Node, name: Name<'_>, kind: Kind, mode: u32, dev: Dev) -> Result<Entry>;

    /// Makes a symbolic link.
    ///
    /// # Errors
    /// As `symlink(2)`.
    fn symlink(&self, caller: &Caller, parent: &Node, name: Name<'_>, target: &[u8]) -> Result<Entry>;

    /// Gives a file one more name. `file` is any open file of the node (it gives a name to an
    /// `O_TMPFILE`).
    ///
    /// # Errors
    /// As `link(2)`.
    fn link(&self, caller: &Caller, node: &Node, file: AnyOpen<'_>, parent: &Node, name: Name<'_>) -> Result<Entry>;

    /// Removes a name of something that is no directory.
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

    /// Lists a directory from position `from` (0: the start, else a [`DirEntry::next`]); with
    /// `attributes`, each entry carries its file. Ends where the sink is full or the directory
    /// ends. `.` and `..` do not appear.
    ///
    /// # Errors
    /// ENOTDIR, ESTALE, and what the storage says.
    fn readdir(&self, caller: &Caller, node: &Node, from: u64, attributes: bool, sink: &mut dyn DirSink) -> Result<()>;

    /// Makes a directory's names durable.
    ///
    /// # Errors
    /// As `fsync(2)`.
    fn fsyncdir(&self, caller: &Caller, node: &Node, data_only: bool) -> Result<()>;

    /// The figures of the file system.
    ///
    /// # Errors
    /// As `statfs(2)`.
    fn statfs(&self, caller: &Caller, node: &Node) -> Result<StatFs>;

    /// Writes everything below to stable storage.
    ///
    /// # Errors
    /// As `syncfs(2)`.
    fn syncfs(&self) -> Result<()>;

    /// Reads an extended attribute; with an empty buffer, only answers its size.
    ///
    /// # Errors
    /// ENODATA where there is none, ERANGE where the buffer is too small, EOPNOTSUPP where it
    /// cannot exist.
    fn getxattr(&self, caller: &Caller, node: &Node, name: &[u8], buffer: &mut [u8]) -> Result<usize>;

    /// Lists the names of extended attributes, each ended by a NUL; with an empty buffer, only
    /// answers the size.
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

    /// An `ioctl(2)` on a directory or a file that is not open (file flags: `FS_IOC_GETFLAGS` and
    /// its kin).
    ///
    /// # Errors
    /// ENOTTY for commands that are not forwarded.
    fn ioctl(&self, caller: &Caller, node: &Node, request: crate::Ioctl<'_>, output: &mut [u8])
    -> Result<(i32, usize)>;

    /// How long answers about this stay true.
    fn coherence(&self, scope: Scope<'_>) -> Coherence;

    /// From now on, send changes that others make to `channel`. Called once, before the first
    /// look-up.
    fn watch(&self, channel: Sender<Invalidation>);

    /// For a door that nobody asks, while changes of files that it does not know keep coming: it
    /// asks the layer to listen to less. Three steps:
    /// * `None`: from now on the layer notices whether somebody asks for names. Answers whether
    ///   there is anything to listen less to; if not, the door does not come again.
    /// * Later, when all requests from before have been answered, all files that the door knows, in
    ///   pieces. Answers whether to go on: not where a change of one of them could be missed.
    /// * At last an empty piece. Answers whether it is so now: changes of these files alone are
    ///   sent, until somebody asks for names. It is not so where somebody has asked since the
    ///   beginning.
    ///
    /// By default, as of a layer that watches nothing: there is nothing to listen less to; but
    /// where another one beside it has something (a branch of a union), it does not stand in the
    /// way.
    fn rest(&self, known: Option<&[Node]>) -> bool {
        known.is_some()
    }

    /// What this layer offers beside its operations, and what it asks of its door. Cheap, as it is
    /// asked with single operations. A wrapper changes what it answers for itself, and passes the
    /// rest on.
    fn capabilities(&self) -> Capabilities<'_>;

    /// What this layer is, and what is below it.
    fn describe(&self) -> Description;
}
