//! mergerfs' control file: `.mergerfs` in the root directory, whose extended attributes `user.mergerfs.*` are
//! the settings of the mount (mergerfs(1), "RUNTIME CONFIG"). Programs for pools (mergerfs-tools) recognize
//! pools by it.
//!
//! Stacked over the union by [`Union::layer`] if the option `control-file=true` is given. Invariants:
//! * the file is in no listing and on no branch, and nothing can be given its name;
//! * only root and the user who mounted may change a setting;
//! * nodes of the union go through unchanged, and no lock of the union is held while a setting changes.

mod settings;

use crate::{OWN, Union};
use nacre_vfs::{
    AnyOpen, Attr, Caller, Coherence, Created, Dev, DirSink, Entry, Errno, FileId, Ioctl, Kind, Layer, Name, Node,
    OpenFlags, Opened, Protection, RenameFlags, Result, Scope, SetAttr, StatFs, XattrFlags,
};
use std::sync::Arc;

/// The file's name in the root directory.
const NAME: &[u8] = b".mergerfs";

/// Its identity: no branch has a file system of this number.
const ID: FileId = FileId { fs: u64::MAX, ino: 0x7fff_fffe, generation: 0 };

/// Prefix of the name of each setting.
const PREFIX: &[u8] = b"user.mergerfs.";

/// The content of the control file's node.
struct Marker;

/// A union with a control file.
pub(crate) struct ControlFile {
    union: Arc<Union>,
    below: Arc<dyn Layer>,
    node: Node,
    /// Uid of the user who mounted.
    owner: u32,
}

impl ControlFile {
    /// Creates the layer over `below`, which shows `union`.
    pub(crate) fn new(union: Arc<Union>, below: Arc<dyn Layer>) -> ControlFile {
        let owner = rustix::process::geteuid().as_raw();
        ControlFile { union, below, node: Node::new(Arc::new(Marker)), owner }
    }

    fn is_its_name(&self, parent: &Node, name: Name<'_>) -> bool {
        name.bytes() == NAME
            && self.union.shared().held(parent).is_ok_and(|parent| Arc::ptr_eq(&parent, &self.union.shared().root))
    }

    /// Whether a caller may change settings.
    fn may_set(&self, caller: &Caller) -> bool {
        caller.uid == 0 || caller.uid == self.owner
    }

    /// Refuses to create or change another file under the control file's name.
    fn check_name(&self, parent: &Node, name: Name<'_>) -> Result<()> {
        if self.is_its_name(parent, name) { Err(Errno::EPERM) } else { Ok(()) }
    }

    /// The control file's attributes, with the times of the root directory.
    fn attr(&self) -> Result<Attr> {
        let top = self.below.root()?.attr;
        let attr = Attr { id: ID, kind: Kind::File, mode: 0o644, nlink: 1, uid: self.owner, gid: 0, ..top };
        Ok(Attr { size: 0, blocks: 0, protection: Protection::None, ..attr })
    }

    fn entry(&self) -> Result<Entry> {
        Ok(Entry { node: self.node.clone(), attr: self.attr()? })
    }

    /// Changes a setting.
    fn set(&self, caller: &Caller, name: &[u8], value: &[u8]) -> Result<()> {
        if !self.may_set(caller) {
            return Err(Errno::EPERM);
        }
        let key = name.strip_prefix(PREFIX).and_then(|key| std::str::from_utf8(key).ok()).ok_or(Errno::ENODATA)?;
        settings::set(&self.union, key, value)
    }
}

fn is_control(node: &Node) -> bool {
    node.get::<Marker>().is_some()
}

fn put(value: &[u8], buffer: &mut [u8]) -> Result<usize> {
    if !buffer.is_empty() {
        buffer.get_mut(..value.len()).ok_or(Errno::ERANGE)?.copy_from_slice(value);
    }
    Ok(value.len())
}

impl Layer for ControlFile {
    nacre_vfs::forward_layer!(root tmpfile unlink rmdir fsyncdir syncfs watch capabilities describe hold);

    fn lookup(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<Entry> {
        if self.is_its_name(parent, name) { self.entry() } else { self.below.lookup(caller, parent, name) }
    }

    fn id(&self, node: &Node) -> Result<FileId> {
        if is_control(node) { Ok(ID) } else { self.below.id(node) }
    }

    fn path(&self, node: &Node) -> Option<Vec<u8>> {
        if is_control(node) { Some(NAME.to_vec()) } else { self.below.path(node) }
    }

    fn adopt(&self, known: &Node, fresh: &Node) {
        if !is_control(known) {
            self.below.adopt(known, fresh);
        }
    }

    fn getattr(&self, caller: &Caller, node: &Node, file: AnyOpen<'_>) -> Result<Attr> {
        if is_control(node) { self.attr() } else { self.below.getattr(caller, node, file) }
    }

    /// Checks a permission without the kernel's help: the file is never executable, and its owner and root may
    /// write to it.
    fn access(&self, caller: &Caller, node: &Node, mask: u32) -> Result<()> {
        if !is_control(node) {
            return self.below.access(caller, node, mask);
        }
        let granted = if self.may_set(caller) { 6 } else { 4 };
        if mask & !granted == 0 { Ok(()) } else { Err(Errno::EACCES) }
    }

    fn setattr(&self, caller: &Caller, node: &Node, file: AnyOpen<'_>, change: &SetAttr) -> Result<Attr> {
        if is_control(node) { Err(Errno::EPERM) } else { self.below.setattr(caller, node, file, change) }
    }

    fn readlink(&self, caller: &Caller, node: &Node) -> Result<Vec<u8>> {
        if is_control(node) { Err(Errno::EINVAL) } else { self.below.readlink(caller, node) }
    }

    fn create(&self, caller: &Caller, parent: &Node, name: Name<'_>, mode: u32, flags: OpenFlags) -> Result<Created> {
        self.check_name(parent, name)?;
        self.below.create(caller, parent, name, mode, flags)
    }

    fn mkdir(&self, caller: &Caller, parent: &Node, name: Name<'_>, mode: u32) -> Result<Entry> {
        self.check_name(parent, name)?;
        self.below.mkdir(caller, parent, name, mode)
    }

    fn mknod(&self, caller: &Caller, parent: &Node, name: Name<'_>, kind: Kind, mode: u32, dev: Dev) -> Result<Entry> {
        self.check_name(parent, name)?;
        self.below.mknod(caller, parent, name, kind, mode, dev)
    }

    fn symlink(&self, caller: &Caller, parent: &Node, name: Name<'_>, target: &[u8]) -> Result<Entry> {
        self.check_name(parent, name)?;
        self.below.symlink(caller, parent, name, target)
    }

    fn link(&self, caller: &Caller, node: &Node, file: AnyOpen<'_>, parent: &Node, name: Name<'_>) -> Result<Entry> {
        self.check_name(parent, name)?;
        if is_control(node) { Err(Errno::EPERM) } else { self.below.link(caller, node, file, parent, name) }
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
        self.check_name(parent, name)?;
        self.check_name(new_parent, new_name)?;
        self.below.rename(caller, parent, name, new_parent, new_name, flags)
    }

    /// Fails: the file has no content; mergerfs has no file to open either.
    fn open(&self, caller: &Caller, node: &Node, flags: OpenFlags) -> Result<Opened> {
        if is_control(node) { Err(Errno::ENOENT) } else { self.below.open(caller, node, flags) }
    }

    fn readdir(&self, caller: &Caller, node: &Node, from: u64, attributes: bool, sink: &mut dyn DirSink) -> Result<()> {
        self.below.readdir(caller, node, from, attributes, sink)
    }

    fn statfs(&self, caller: &Caller, node: &Node) -> Result<StatFs> {
        if is_control(node) {
            self.below.statfs(&OWN, &self.below.root()?.node)
        } else {
            self.below.statfs(caller, node)
        }
    }

    fn getxattr(&self, caller: &Caller, node: &Node, name: &[u8], buffer: &mut [u8]) -> Result<usize> {
        if !is_control(node) {
            return self.below.getxattr(caller, node, name, buffer);
        }
        let key = name.strip_prefix(PREFIX).and_then(|key| std::str::from_utf8(key).ok()).ok_or(Errno::ENODATA)?;
        put(&settings::get(&self.union, key).ok_or(Errno::ENODATA)?, buffer)
    }

    fn listxattr(&self, caller: &Caller, node: &Node, buffer: &mut [u8]) -> Result<usize> {
        if !is_control(node) {
            return self.below.listxattr(caller, node, buffer);
        }
        let names = settings::keys().map(|key| [PREFIX, key.as_bytes(), b"\0"].concat());
        put(&names.collect::<Vec<_>>().concat(), buffer)
    }

    fn setxattr(&self, caller: &Caller, node: &Node, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()> {
        if is_control(node)
            && flags.create
            && settings::keys().any(|key| name.strip_prefix(PREFIX) == Some(key.as_bytes()))
        {
            Err(Errno::EEXIST)
        } else if is_control(node) {
            self.set(caller, name, value)
        } else {
            self.below.setxattr(caller, node, name, value, flags)
        }
    }

    fn removexattr(&self, caller: &Caller, node: &Node, name: &[u8]) -> Result<()> {
        if is_control(node) { Err(Errno::ENODATA) } else { self.below.removexattr(caller, node, name) }
    }

    fn ioctl(&self, caller: &Caller, node: &Node, request: Ioctl<'_>, output: &mut [u8]) -> Result<(i32, usize)> {
        if is_control(node) { Err(Errno::ENOTTY) } else { self.below.ioctl(caller, node, request, output) }
    }

    fn coherence(&self, scope: Scope<'_>) -> Coherence {
        match scope {
            Scope::Attributes(node, _) if is_control(node) => Coherence::Shared,
            _ => self.below.coherence(scope),
        }
    }

    fn rest(&self, known: Option<&[Node]>) -> bool {
        let others: Option<Vec<Node>> =
            known.map(|known| known.iter().filter(|node| !is_control(node)).cloned().collect());
        self.below.rest(others.as_deref())
    }
}
