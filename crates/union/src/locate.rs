//! The location of a file: for queries by path, or by reading an extended attribute of the file.
//!
//! The attributes are computed when they are read, and not listed, so that no program copies them. Only
//! `user.nacre.pin` can be set: it keeps the file on its branch when tiers are balanced, and is stored on the
//! branch under the union's own name.

use crate::{
    OWN, UnionShared,
    branches::Branch,
    control::Control,
    explain::Presence,
    hardlinks::relocate::Scans,
    marks::Namespace,
    node::UnionNode,
    relocate::{Goal, Stay},
};
use nacre_vfs::{Attr, Errno, Kind, Name, Result, XattrFlags};
use std::{ffi::OsStr, os::unix::ffi::OsStrExt, path::PathBuf, sync::Arc};

/// How long FUSE front ends get to close a file that no process has open any more.
const CLOSING: std::time::Duration = std::time::Duration::from_millis(50);

/// The location of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Location {
    /// Slot of the branch that shows it.
    pub slot: u8,
    /// That branch's name.
    pub shown: PathBuf,
    /// The names of all branches that have a file under this path, from the top.
    pub all: Vec<PathBuf>,
    /// File type.
    pub kind: Kind,
    /// Attributes as users see them.
    pub attr: Attr,
    /// Whether it is pinned to its branch.
    pub pinned: bool,
}

/// The destination of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// To the next branch above that takes it.
    Up,
    /// To the next branch below that takes it.
    Down,
    /// To the branch in this slot.
    To(u8),
}

/// The attribute that pins a file.
pub(crate) const PIN: &[u8] = b"user.nacre.pin";

fn pin_attribute(branch: &Branch) -> &'static [u8] {
    match branch.marks().namespace {
        Namespace::Trusted => b"trusted.nacre.pin",
        Namespace::User => PIN,
    }
}

impl Control {
    /// Finds the file under a path, names divided by slashes from the union's root.
    pub(crate) fn find(&self, path: &[u8]) -> Result<Arc<UnionNode>> {
        let shared = &self.shared;
        let mut at = Arc::clone(&shared.root);
        for part in path.split(|byte| *byte == b'/').filter(|part| !part.is_empty()) {
            let entry = shared.lookup(&OWN, &nacre_vfs::Node::new(at), Name::new(part)?)?;
            at = shared.node(&entry.node)?;
        }
        Ok(at)
    }

    /// Returns the location of a file, names divided by slashes from the union's root.
    ///
    /// # Errors
    /// ENOENT or ENOTDIR where there is none, and errors of the branches.
    pub fn locate(&self, path: &[u8]) -> Result<Location> {
        let shared = &self.shared;
        let _branches = shared.gate.read();
        let node = self.find(path)?;
        let top = node.top()?;
        let attr = shared.getattr(&OWN, &nacre_vfs::Node::new(Arc::clone(&node)), None)?;
        let all = shared.holders(&node)?;
        let pinned = shared.is_pinned(&node)?;
        Ok(Location { slot: top.branch.slot, shown: top.branch.name.clone(), all, kind: node.kind, attr, pinned })
    }

    /// Moves one file to another branch; returns the number of bytes moved. `progress` is called before each
    /// piece with its size in bytes and returns whether to continue.
    ///
    /// # Errors
    /// The reason why the file stays.
    pub fn move_file(
        &self,
        path: &[u8],
        direction: Direction,
        progress: &mut dyn FnMut(u64) -> bool,
    ) -> Result<u64, Stay> {
        let shared = &self.shared;
        let mut last = Stay::NoRoom;
        let mut scans = Scans::default();
        loop {
            let mut stop = false;
            {
                let _branches = shared.gate.read();
                let node = self.find(path)?;
                if node.kind == Kind::Directory {
                    return Err(Stay::Failed(Errno::EISDIR));
                }
                if shared.is_pinned(&node)? {
                    return Err(Stay::Pinned);
                }
                let top = node.top()?;
                let mut pace = |bytes: u64| {
                    stop |= !progress(bytes);
                    !stop
                };
                for target in shared.targets(&top.branch, direction) {
                    match shared.relocate_all(&node, &Goal::Branch(target), &mut pace, &mut scans) {
                        Err(Stay::NoRoom) => last = Stay::NoRoom,
                        Err(Stay::Stopped) => {
                            last = Stay::Stopped;
                            break;
                        }
                        Err(Stay::Open) => {
                            // FUSE front ends hold files that no process has open any more.
                            if !shared.ask_to_close(&node, CLOSING) {
                                return Err(Stay::Open);
                            }
                            return self.once_more(&node, top.branch.slot, direction, progress);
                        }
                        other => return other,
                    }
                }
            }
            if last != Stay::Stopped || stop {
                return Err(last);
            }
            // A change of the branches is waiting.
            shared.membership.give_way();
        }
    }

    /// Tries a move again after the file was open.
    fn once_more(
        &self,
        node: &Arc<UnionNode>,
        slot: u8,
        direction: Direction,
        progress: &mut dyn FnMut(u64) -> bool,
    ) -> Result<u64, Stay> {
        let branch = self.shared.in_slot(slot).map_err(|_| Stay::Changed)?;
        let mut last = Stay::NoRoom;
        for target in self.shared.targets(&branch, direction) {
            match self.shared.relocate_all(
                node,
                &Goal::Branch(target),
                &mut |bytes| progress(bytes),
                &mut Scans::default(),
            ) {
                Err(Stay::NoRoom) => last = Stay::NoRoom,
                other => return other,
            }
        }
        Err(last)
    }
}

impl UnionShared {
    /// The branches to which a file may be moved, the nearest first.
    pub(crate) fn targets(&self, from: &Branch, direction: Direction) -> Vec<Arc<Branch>> {
        let branches = self.branches();
        let takes = |branch: &&Arc<Branch>| branch.creates() && branch.slot != from.slot;
        match direction {
            Direction::Up => branches
                .iter()
                .rev()
                .filter(takes)
                .filter(|branch| branch.index() < from.index())
                .map(Arc::clone)
                .collect(),
            Direction::Down => {
                branches.iter().filter(takes).filter(|branch| branch.index() > from.index()).map(Arc::clone).collect()
            }
            Direction::To(slot) => {
                branches.iter().filter(takes).filter(|branch| branch.slot == slot).map(Arc::clone).collect()
            }
        }
    }

    /// The names of all branches that have a file under a file's path.
    fn holders(&self, node: &Arc<UnionNode>) -> Result<Vec<PathBuf>> {
        let name_of = |branch: &Branch| branch.name.clone();
        let Some(place) = node.place().filter(|_| node.kind != Kind::Directory) else {
            return Ok(node.parts().iter().map(|part| name_of(&part.branch)).collect());
        };
        let here = self.presences(&place.parent, Name::new(&place.name)?)?;
        let there = here.into_iter().filter(|(_, presence)| *presence != Presence::Whiteout);
        there.map(|(index, _)| self.branch(index).map(|branch| name_of(&branch))).collect()
    }

    /// Whether a file is pinned.
    pub(crate) fn is_pinned(&self, node: &UnionNode) -> Result<bool> {
        let top = node.top()?;
        match top.branch.layer.getxattr(&OWN, &top.node, pin_attribute(&top.branch), &mut []) {
            Ok(_) => Ok(true),
            Err(Errno::ENODATA | Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::EPERM) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The value of a computed attribute; `None` for all other names.
    pub(crate) fn made_up(&self, node: &Arc<UnionNode>, name: &[u8]) -> Result<Option<Vec<u8>>> {
        let top = node.top()?;
        let base = top.branch.name.as_os_str().as_bytes();
        let under = |base: &[u8]| {
            let path = node.path().ok_or(Errno::ENODATA)?;
            Ok::<_, Errno>(if path.is_empty() { base.to_vec() } else { [base, b"/", &path].concat() })
        };
        let all = || self.holders(node);
        Ok(Some(match name {
            b"user.nacre.branch" | b"user.mergerfs.basepath" => base.to_vec(),
            b"user.nacre.branches" => {
                let names = all()?;
                names.iter().map(|name| name.as_os_str().as_bytes()).collect::<Vec<_>>().join(&0)
            }
            b"user.mergerfs.relpath" => under(b"")?,
            b"user.mergerfs.fullpath" => under(base)?,
            b"user.mergerfs.allpaths" => {
                let paths: Result<Vec<_>> =
                    all()?.iter().map(|name| under(AsRef::<OsStr>::as_ref(name).as_bytes())).collect();
                paths?.join(&0)
            }
            PIN if self.is_pinned(node)? => b"1".to_vec(),
            PIN => return Err(Errno::ENODATA),
            _ => return Ok(None),
        }))
    }

    /// Pins a file to its branch, or removes the pin.
    ///
    /// # Errors
    /// EROFS on branches that cannot be changed: no file is moved off them.
    pub(crate) fn set_pin(&self, node: &Arc<UnionNode>, pinned: bool) -> Result<()> {
        let _still = self.hold_still(node);
        let top = node.top()?;
        if !top.branch.is_writable() {
            return Err(Errno::EROFS);
        }
        let (layer, name) = (&top.branch.layer, pin_attribute(&top.branch));
        if pinned {
            return layer.setxattr(&OWN, &top.node, name, b"1", XattrFlags::default());
        }
        layer.removexattr(&OWN, &top.node, name)
    }
}
