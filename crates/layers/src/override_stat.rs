//! The layer `override-stat`: owners, modes and types of files kept in an extended attribute, for
//! users who may not set the real ones.
//!
//! Made by the stack builder for container layers whose files all belong to one user
//! (fuse-overlayfs' `xattr_permissions`, podman's `force_mask`). The value is
//! `UID:GID:MODE[:TYPE]`, the mode octal, the type one of `file`, `dir`, `symlink`, `pipe`,
//! `socket`, `block-MAJOR-MINOR`, `char-MAJOR-MINOR`. Files created through the layer belong to the
//! user who runs it, with mode 600 (directories 700); special files are empty regular ones.
//! Invariants:
//! * a file has its attribute before its name is visible in any answer of this layer;
//! * the attribute itself cannot be seen, set or removed through the layer;
//! * whiteouts (character devices 0/0) pass unchanged: they are markers of a union, not files.
//!
//! Symbolic links cannot carry `user.*` attributes: with [`Attribute::Containers`], they show their
//! real owner, and changes of it are without effect. POSIX ACLs would have to be kept in the same
//! way; there are none.

mod record;
#[cfg(test)]
mod tests;

use nacre_vfs::{
    AnyOpen, Attr, Caller, Capabilities, Created, Description, Dev, DirEntry, DirSink, Entry, Errno, Kind, Layer, Name,
    Node, OpenFlags, Result, SetAttr, XattrFlags,
};
use parking_lot::Mutex;
use record::StatRecord;
use std::sync::Arc;

/// Caller for operations in the layer below: the user who runs this process.
const OWN: Caller = Caller::ROOT;

const FILE_MODE: u32 = 0o600;
const DIRECTORY_MODE: u32 = 0o700;

/// Maximum number of look-ups of a file that other processes create and remove meanwhile.
const ATTEMPTS: usize = 100;

/// Maximum length of a valid value.
const VALUE_MAX: usize = 128;

/// The longest list of names of extended attributes (`XATTR_LIST_MAX`, linux/limits.h).
const LIST_MAX: usize = 64 << 10;

/// The attribute that holds the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attribute {
    /// `security.fuseoverlayfs.override_stat`: takes privilege, and works on files of every type.
    Privileged,
    /// `user.containers.override_stat`; `user.fuseoverlayfs.override_stat`, an older name, is read
    /// where the root directory carries it.
    Containers,
}

const PRIVILEGED: &[u8] = b"security.fuseoverlayfs.override_stat";
const CONTAINERS: &[u8] = b"user.containers.override_stat";
const OLD: &[u8] = b"user.fuseoverlayfs.override_stat";

fn is_record(name: &[u8]) -> bool {
    [PRIVILEGED, CONTAINERS, OLD].contains(&name)
}

fn is_acl(name: &[u8]) -> bool {
    name.starts_with(b"system.posix_acl_")
}

/// Returns the attribute that the directories of a layer carry, judged by its root; `None` for an
/// ordinary tree.
///
/// # Errors
/// As the storage.
pub fn carried(layer: &dyn Layer) -> Result<Option<Attribute>> {
    let root = layer.root()?.node;
    for (name, attribute) in
        [(PRIVILEGED, Attribute::Privileged), (CONTAINERS, Attribute::Containers), (OLD, Attribute::Containers)]
    {
        if read(layer, &root, name)?.is_some() {
            return Ok(Some(attribute));
        }
    }
    Ok(None)
}

/// Reads the record under one name; `None` where there is none, or a malformed one.
fn read(layer: &dyn Layer, node: &Node, name: &[u8]) -> Result<Option<StatRecord>> {
    let mut value = [0; VALUE_MAX];
    match layer.getxattr(&OWN, node, name, &mut value) {
        Ok(size) => Ok(value.get(..size).and_then(StatRecord::parse)),
        Err(Errno::ENODATA | Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::EPERM | Errno::ERANGE) => Ok(None),
        Err(error) => Err(error),
    }
}

/// A layer that shows files by their records.
pub struct OverrideStat {
    below: Arc<dyn Layer>,
    attribute: Attribute,
    /// Attribute names to read, in this order; the first is written.
    names: Vec<&'static [u8]>,
    /// Held from reading a record until it is written again.
    changing: Mutex<()>,
}

impl OverrideStat {
    /// Puts the layer over one that carries such records, or, with `writes`, over one that shall
    /// carry them: its root then gets a record.
    ///
    /// # Errors
    /// EOPNOTSUPP or EPERM where the storage does not keep such attributes; else as the storage.
    pub fn new(below: Arc<dyn Layer>, attribute: Attribute, writes: bool) -> Result<OverrideStat> {
        let root = below.root()?;
        let mut names = match attribute {
            Attribute::Privileged => vec![PRIVILEGED],
            Attribute::Containers => vec![CONTAINERS],
        };
        if attribute == Attribute::Containers && read(&*below, &root.node, OLD)?.is_some() {
            names.push(OLD);
        }
        let layer = OverrideStat { below, attribute, names, changing: Mutex::default() };
        if writes && layer.record(&root.node)?.is_none() {
            layer.write(&root.node, &StatRecord::of(&root.attr))?;
        }
        Ok(layer)
    }

    fn record(&self, node: &Node) -> Result<Option<StatRecord>> {
        for name in &self.names {
            if let Some(record) = read(&*self.below, node, name)? {
                return Ok(Some(record));
            }
        }
        Ok(None)
    }

    fn write(&self, node: &Node, record: &StatRecord) -> Result<()> {
        let name = self.names.first().ok_or(Errno::EIO)?;
        self.below.setxattr(&OWN, node, name, record.to_string().as_bytes(), XattrFlags::default())
    }

    /// Whether a file of this type can have a record.
    fn carries(&self, kind: Kind) -> bool {
        self.attribute == Attribute::Privileged || matches!(kind, Kind::File | Kind::Directory)
    }

    /// Attributes as the file's record has them.
    fn shown(&self, node: &Node, mut attr: Attr) -> Result<Attr> {
        if self.carries(attr.kind)
            && let Some(record) = self.record(node)?
        {
            record.apply(&mut attr);
        }
        Ok(attr)
    }

    fn entry(&self, entry: Entry) -> Result<Entry> {
        let attr = self.shown(&entry.node, entry.attr)?;
        Ok(Entry { attr, node: entry.node })
    }

    /// The record of a new file in a directory.
    fn fresh(&self, caller: &Caller, parent: &Node, kind: Kind, mode: u32, device: (u32, u32)) -> Result<StatRecord> {
        let home = self.shown(parent, self.below.getattr(&OWN, parent, None)?)?;
        let mut record = StatRecord::new(caller.uid, caller.gid, mode & !caller.umask & 0o7777, kind, device);
        if home.mode & 0o2000 != 0 {
            record.gid = home.gid;
            if kind == Kind::Directory {
                record.mode |= 0o2000;
            }
        }
        Ok(record)
    }

    /// Writes the record of a new file, or removes the file again.
    fn label(&self, made: Entry, record: &StatRecord, undo: impl FnOnce() -> Result<()>) -> Result<Entry> {
        if let Err(error) = self.write(&made.node, record) {
            undo()?;
            return Err(error);
        }
        let mut attr = made.attr;
        record.apply(&mut attr);
        Ok(Entry { attr, node: made.node })
    }

    /// Applies a change to the record; returns the changes that remain for the layer below.
    fn change_record(&self, node: &Node, file: AnyOpen<'_>, change: &SetAttr) -> Result<SetAttr> {
        let rest = SetAttr { uid: None, gid: None, mode: None, ..*change };
        if rest == *change && !change.kill_privileges {
            return Ok(rest);
        }
        let _alone = self.changing.lock();
        let attr = self.below.getattr(&OWN, node, file)?;
        if !self.carries(attr.kind) {
            return Ok(rest);
        }
        let before = self.record(node)?.unwrap_or_else(|| StatRecord::of(&attr));
        let after = before.changed(change);
        if after != before {
            self.write(node, &after)?;
        }
        Ok(rest)
    }
}

/// Sink that forwards a listing with the attributes of the records.
struct Shown<'a> {
    layer: &'a OverrideStat,
    above: &'a mut dyn DirSink,
}

impl DirSink for Shown<'_> {
    fn push(&mut self, mut entry: DirEntry<'_>) -> bool {
        match entry.entry.take().map(|found| self.layer.entry(found)) {
            Some(Ok(found)) => {
                entry.kind = Some(found.attr.kind);
                entry.entry = Some(found);
            }
            // A look-up will return the error.
            Some(Err(_)) => entry.kind = None,
            // A regular file may stand for another type: leave the type open, so that the reader
            // asks.
            None => entry.kind = entry.kind.filter(|kind| *kind != Kind::File),
        }
        self.above.push(entry)
    }
}

impl Layer for OverrideStat {
    fn root(&self) -> Result<Entry> {
        self.entry(self.below.root()?)
    }

    fn lookup(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<Entry> {
        for _ in 0..ATTEMPTS {
            match self.entry(self.below.lookup(caller, parent, name)?) {
                // It has been renamed or removed since: another file may have the name now.
                Err(Errno::ESTALE) => {}
                other => return other,
            }
        }
        Err(Errno::ESTALE)
    }

    fn getattr(&self, caller: &Caller, node: &Node, file: AnyOpen<'_>) -> Result<Attr> {
        self.shown(node, self.below.getattr(caller, node, file)?)
    }

    fn setattr(&self, caller: &Caller, node: &Node, file: AnyOpen<'_>, change: &SetAttr) -> Result<Attr> {
        let rest = self.change_record(node, file, change)?;
        let attr = if rest.is_empty() {
            self.below.getattr(caller, node, file)
        } else {
            self.below.setattr(caller, node, file, &rest)
        };
        self.shown(node, attr?)
    }

    fn create(&self, caller: &Caller, parent: &Node, name: Name<'_>, mode: u32, flags: OpenFlags) -> Result<Created> {
        for _ in 0..ATTEMPTS {
            // Only a certainly new file gets a record.
            match self.below.create(&OWN, parent, name, FILE_MODE, OpenFlags(flags.0 | OpenFlags::EXCL)) {
                Ok((made, file)) => {
                    let record = self.fresh(caller, parent, Kind::File, mode, (0, 0))?;
                    return Ok((self.label(made, &record, || self.below.unlink(&OWN, parent, name))?, file));
                }
                Err(Errno::EEXIST) if !flags.exclusive() => {}
                Err(error) => return Err(error),
            }
            let found = match self.below.lookup(&OWN, parent, name) {
                Err(Errno::ENOENT) => continue,
                other => other?,
            };
            if found.attr.kind != Kind::File {
                return Err(Errno::ESTALE);
            }
            let file = self.below.open(caller, &found.node, flags)?;
            // Opening may have truncated it.
            let attr = self.below.getattr(&OWN, &found.node, Some(&*file))?;
            return Ok((self.entry(Entry { attr, node: found.node })?, file));
        }
        Err(Errno::EBUSY)
    }

    fn tmpfile(&self, caller: &Caller, parent: &Node, mode: u32, flags: OpenFlags) -> Result<Created> {
        let record = self.fresh(caller, parent, Kind::File, mode, (0, 0))?;
        let (made, file) = self.below.tmpfile(&OWN, parent, FILE_MODE, flags)?;
        // A file without a name need not be removed.
        Ok((self.label(made, &record, || Ok(()))?, file))
    }

    fn mkdir(&self, caller: &Caller, parent: &Node, name: Name<'_>, mode: u32) -> Result<Entry> {
        let record = self.fresh(caller, parent, Kind::Directory, mode, (0, 0))?;
        let made = self.below.mkdir(&OWN, parent, name, DIRECTORY_MODE)?;
        self.label(made, &record, || self.below.rmdir(&OWN, parent, name))
    }

    fn mknod(&self, caller: &Caller, parent: &Node, name: Name<'_>, kind: Kind, mode: u32, dev: Dev) -> Result<Entry> {
        if kind == Kind::Character && dev == (0, 0) {
            return self.below.mknod(&OWN, parent, name, kind, mode, dev);
        }
        let record = self.fresh(caller, parent, kind, mode, dev)?;
        let made = self.below.mknod(&OWN, parent, name, Kind::File, FILE_MODE, (0, 0))?;
        self.label(made, &record, || self.below.unlink(&OWN, parent, name))
    }

    fn symlink(&self, caller: &Caller, parent: &Node, name: Name<'_>, target: &[u8]) -> Result<Entry> {
        let made = self.below.symlink(&OWN, parent, name, target)?;
        if !self.carries(Kind::Symlink) {
            return Ok(made);
        }
        let record = self.fresh(caller, parent, Kind::Symlink, 0o777, (0, 0))?;
        self.label(made, &record, || self.below.unlink(&OWN, parent, name))
    }

    fn link(&self, caller: &Caller, node: &Node, file: AnyOpen<'_>, parent: &Node, name: Name<'_>) -> Result<Entry> {
        self.entry(self.below.link(caller, node, file, parent, name)?)
    }

    fn readdir(&self, caller: &Caller, node: &Node, from: u64, attributes: bool, sink: &mut dyn DirSink) -> Result<()> {
        self.below.readdir(caller, node, from, attributes, &mut Shown { layer: self, above: sink })
    }

    fn getxattr(&self, caller: &Caller, node: &Node, name: &[u8], buffer: &mut [u8]) -> Result<usize> {
        match name {
            _ if is_record(name) => Err(Errno::ENODATA),
            _ if is_acl(name) => Err(Errno::EOPNOTSUPP),
            _ => self.below.getxattr(caller, node, name, buffer),
        }
    }

    fn listxattr(&self, caller: &Caller, node: &Node, buffer: &mut [u8]) -> Result<usize> {
        let mut names = vec![0; LIST_MAX];
        let size = self.below.listxattr(caller, node, &mut names)?;
        let listed = names.get(..size).ok_or(Errno::EIO)?.split_inclusive(|byte| *byte == 0);
        let hidden = |name: &[u8]| name.strip_suffix(b"\0").is_some_and(|name| is_record(name) || is_acl(name));
        let shown = listed.filter(|name| !hidden(name)).collect::<Vec<_>>().concat();
        if !buffer.is_empty() {
            buffer.get_mut(..shown.len()).ok_or(Errno::ERANGE)?.copy_from_slice(&shown);
        }
        Ok(shown.len())
    }

    fn setxattr(&self, caller: &Caller, node: &Node, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()> {
        match name {
            _ if is_record(name) => Err(Errno::EPERM),
            _ if is_acl(name) => Err(Errno::EOPNOTSUPP),
            _ => self.below.setxattr(caller, node, name, value, flags),
        }
    }

    fn removexattr(&self, caller: &Caller, node: &Node, name: &[u8]) -> Result<()> {
        match name {
            _ if is_record(name) => Err(Errno::EPERM),
            _ if is_acl(name) => Err(Errno::EOPNOTSUPP),
            _ => self.below.removexattr(caller, node, name),
        }
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities { acls: false, ..self.below.capabilities() }
    }

    fn describe(&self) -> Description {
        let attribute = match self.attribute {
            Attribute::Privileged => "privileged",
            Attribute::Containers => "containers",
        };
        Description::new("override-stat").with("attribute", attribute).over(self.below.describe())
    }

    nacre_vfs::forward_layer! { id path adopt hold access readlink unlink rmdir rename open fsyncdir statfs syncfs ioctl coherence watch rest }
}
