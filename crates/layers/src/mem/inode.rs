//! A file of the tree in memory: its attributes and content, and their changes. Names exist in
//! directories only.
//!
//! Called by `mem.rs` and `mem/file.rs`. Invariants: locks of two files are never held at once; a
//! file lives as long as a directory, a node or an open file refers to it.

use super::content::Content;
use crate::ends::Ends;
use crate::locks::Locks;
use crate::remap::acl;
use nacre_vfs::{Attr, Errno, FileId, Kind, Protection, Result, SetAttr, SetTime, Time};
use parking_lot::Mutex;
use std::{
    collections::BTreeMap,
    sync::{Arc, Weak},
};

const SET_UID: u32 = 0o4000;
const SET_GID: u32 = 0o2000;
const GROUP_X: u32 = 0o010;

/// A file of any kind.
#[derive(Debug)]
pub(super) struct Inode {
    pub(super) id: FileId,
    pub(super) kind: Kind,
    pub(super) device: (u32, u32),
    pub(super) body: Mutex<Body>,
    pub(super) locks: Locks,
}

/// Mutable state of a file.
#[derive(Debug)]
pub(super) struct Body {
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) nlink: u32,
    /// Whether a file without any name may get one: true if made by `O_TMPFILE` and not yet linked.
    pub(super) linkable: bool,
    pub(super) atime: Time,
    pub(super) mtime: Time,
    pub(super) ctime: Time,
    pub(super) btime: Time,
    pub(super) xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    pub(super) what: What,
}

/// State that depends on the file type.
#[derive(Debug)]
pub(super) enum What {
    File(Content),
    Directory(Directory),
    Symlink(Vec<u8>),
    Special,
}

/// Names of a directory. A position in a listing is the number that a name got at its creation: it
/// never means another name.
#[derive(Debug)]
pub(super) struct Directory {
    pub(super) parent: Weak<Inode>,
    names: BTreeMap<Vec<u8>, (u64, Arc<Inode>)>,
    order: BTreeMap<u64, Vec<u8>>,
    last: u64,
    /// Ends of listings in progress.
    ends: Ends,
}

impl Directory {
    pub(super) fn new(parent: Weak<Inode>) -> Directory {
        Directory { parent, names: BTreeMap::new(), order: BTreeMap::new(), last: 0, ends: Ends::new(u64::MAX) }
    }

    pub(super) fn get(&self, name: &[u8]) -> Option<Arc<Inode>> {
        self.names.get(name).map(|(_, inode)| Arc::clone(inode))
    }

    /// Inserts a name, replacing an existing one.
    pub(super) fn put(&mut self, name: &[u8], inode: Arc<Inode>) {
        self.take(name);
        self.last += 1;
        self.names.insert(name.to_vec(), (self.last, inode));
        self.order.insert(self.last, name.to_vec());
    }

    pub(super) fn take(&mut self, name: &[u8]) -> Option<Arc<Inode>> {
        let (place, inode) = self.names.remove(name)?;
        self.order.remove(&place);
        Some(inode)
    }

    /// The position of a name in listings.
    pub(super) fn place(&self, name: &[u8]) -> Option<u64> {
        self.names.get(name).map(|(place, _)| *place)
    }

    /// Moves a name to an unused position.
    pub(super) fn move_to(&mut self, name: &[u8], place: u64) {
        if let Some((now, _)) = self.names.get_mut(name) {
            self.order.remove(now);
            *now = place;
            self.order.insert(place, name.to_vec());
        }
    }

    /// Removes all names and returns the directories among their files.
    pub(super) fn clear(&mut self) -> Vec<Arc<Inode>> {
        self.order.clear();
        let names = std::mem::take(&mut self.names);
        names.into_values().map(|(_, inode)| inode).filter(|inode| inode.kind == Kind::Directory).collect()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// Returns up to `limit` names after a position, each with its own position.
    pub(super) fn behind(&self, from: u64, limit: usize) -> Vec<(u64, Vec<u8>, Arc<Inode>)> {
        let span = self.ends.enter(from, || self.last + 1);
        let first = span.behind.saturating_add(1);
        let places = self.order.range(first..span.end.max(first)).take(limit);
        let names: Vec<_> =
            places.filter_map(|(&place, name)| Some((span.after(place), name.clone(), self.get(name)?))).collect();
        if names.is_empty() {
            self.ends.ended(&span);
        }
        names
    }
}

/// Attributes of a file at its creation.
pub(super) struct Birth {
    pub(super) id: FileId,
    pub(super) kind: Kind,
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) device: (u32, u32),
    pub(super) now: Time,
}

impl Inode {
    pub(super) fn new(birth: Birth, what: What) -> Inode {
        let Birth { id, kind, mode, uid, gid, device, now } = birth;
        let nlink = if kind == Kind::Directory { 2 } else { 1 };
        let body = Body {
            mode,
            uid,
            gid,
            nlink,
            linkable: false,
            atime: now,
            mtime: now,
            ctime: now,
            btime: now,
            xattrs: BTreeMap::new(),
            what,
        };
        Inode { id, kind, device, body: Mutex::new(body), locks: Locks::default() }
    }

    pub(super) fn attr(&self) -> Attr {
        let body = self.body.lock();
        let (size, blocks) = match &body.what {
            What::File(content) => (content.size(), content.blocks()),
            What::Symlink(target) => (target.len() as u64, 0),
            What::Directory(directory) => (directory.names.len() as u64, 0),
            What::Special => (0, 0),
        };
        Attr {
            id: self.id,
            kind: self.kind,
            mode: body.mode,
            nlink: body.nlink,
            uid: body.uid,
            gid: body.gid,
            rdev_major: self.device.0,
            rdev_minor: self.device.1,
            size,
            blocks,
            blksize: 4096,
            atime: body.atime,
            mtime: body.mtime,
            ctime: body.ctime,
            btime: Some(body.btime),
            protection: Protection::None,
        }
    }

    /// Applies a change in the order of the contract: owner, mode, size, times.
    pub(super) fn change(&self, change: &SetAttr, now: Time) -> Result<()> {
        let mut body = self.body.lock();
        if let Some(size) = change.size {
            // Checked first, so that a refused size changes nothing.
            self.check_size(size)?;
        }
        if change.kill_privileges {
            body.kill_privileges(self.kind, change.outside_group);
        }
        body.uid = change.uid.unwrap_or(body.uid);
        body.gid = change.gid.unwrap_or(body.gid);
        if let Some(mode) = change.mode {
            body.set_mode(mode)?;
        }
        if let (Some(size), What::File(content)) = (change.size, &mut body.what) {
            content.resize(size);
            body.mtime = now;
        }
        for (wish, field) in [(change.atime, 0), (change.mtime, 1)] {
            let time = match wish {
                None => continue,
                Some(SetTime::Now) => now,
                Some(SetTime::To(time)) => time,
            };
            if field == 0 { body.atime = time } else { body.mtime = time }
        }
        if !change.is_empty() {
            body.ctime = now;
        }
        Ok(())
    }

    fn check_size(&self, size: u64) -> Result<()> {
        match self.kind {
            Kind::File if size > super::content::SIZE_MAX => Err(Errno::EFBIG),
            Kind::File => Ok(()),
            Kind::Directory => Err(Errno::EISDIR),
            _ => Err(Errno::EINVAL),
        }
    }
}

impl Body {
    pub(super) fn directory(&mut self) -> Result<&mut Directory> {
        match &mut self.what {
            What::Directory(directory) => Ok(directory),
            _ => Err(Errno::ENOTDIR),
        }
    }

    pub(super) fn content(&mut self) -> Result<&mut Content> {
        match &mut self.what {
            What::File(content) => Ok(content),
            What::Directory(_) => Err(Errno::EISDIR),
            _ => Err(Errno::EINVAL),
        }
    }

    /// Clears the set-id bits that a write or chown by an unprivileged caller clears; the caller may be outside of the
    /// file's group.
    pub(super) fn kill_privileges(&mut self, kind: Kind, outside_group: bool) {
        if kind == Kind::Directory {
            return;
        }
        self.mode &= !SET_UID;
        // Without group x, the bit used to mean mandatory locking and stays for members of the group
        // (inode_init(9), chown(2)).
        if self.mode & GROUP_X != 0 || outside_group {
            self.mode &= !SET_GID;
        }
        self.xattrs.remove(&b"security.capability"[..]);
    }

    /// Sets the mode, and the access ACL accordingly.
    pub(super) fn set_mode(&mut self, mode: u32) -> Result<()> {
        self.mode = mode;
        if let Some(value) = self.xattrs.get_mut(acl::ACCESS) {
            acl::apply_mode(value, mode)?;
        }
        Ok(())
    }

    /// Sets an access ACL, and the mode accordingly. An ACL that a mode can express is not kept.
    pub(super) fn set_access_acl(&mut self, value: &[u8], kill_sgid: bool) -> Result<()> {
        if let Some(bits) = acl::mode(value)? {
            self.mode = (self.mode & !0o777) | bits;
        }
        if kill_sgid {
            self.mode &= !SET_GID;
        }
        if acl::is_minimal(value)? {
            self.xattrs.remove(acl::ACCESS);
        } else {
            self.xattrs.insert(acl::ACCESS.to_vec(), value.to_vec());
        }
        Ok(())
    }

    /// Updates the access time like `relatime`: if it is not newer than the last change, or a day
    /// old.
    pub(super) fn touch_atime(&mut self, now: Time) {
        const DAY: i64 = 24 * 60 * 60;
        if self.atime <= self.mtime || self.atime <= self.ctime || now.sec - self.atime.sec >= DAY {
            self.atime = now;
        }
    }
}
