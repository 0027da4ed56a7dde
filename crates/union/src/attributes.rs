//! Attributes and extended attributes, statfs and syncfs, and size changes of files.
//!
//! Queries go to the shown branch; a change first makes sure that the file is on a branch where it may be
//! changed.

use crate::{
    Ignored, OWN, UnionShared,
    branch::Permission,
    branches::Branch,
    locate::PIN,
    marks,
    node::{Part, UnionNode},
    open_file::UnionFile,
    options::Action,
};
use nacre_vfs::{AnyOpen, Attr, Caller, Errno, Ioctl, Kind, Node, OpenFile, Result, SetAttr, StatFs, XattrFlags};
use std::sync::Arc;

/// The write bit of the mask of `access(2)`.
const WRITE: u32 = 2;
/// `f_namemax` of every union: whiteouts of longer names are hashed.
const NAME_MAX: u32 = 255;

/// The open file of this union behind one that filters may have wrapped.
fn handle<'a>(node: &Arc<UnionNode>, file: Option<&'a dyn OpenFile>) -> Option<&'a UnionFile> {
    file?.inner().as_any().downcast_ref::<UnionFile>().filter(|file| file.is_of(node))
}

/// Queries the shown branch, and queries again if the file has moved to another branch meanwhile.
fn on_top<T>(node: &UnionNode, mut ask: impl FnMut(&Part) -> Result<T>) -> Result<T> {
    let top = node.top()?;
    match ask(&top) {
        Err(error @ (Errno::ESTALE | Errno::ENOENT)) => {
            let now = node.top()?;
            if now.id == top.id && now.branch.slot == top.branch.slot { Err(error) } else { ask(&now) }
        }
        other => other,
    }
}

impl UnionShared {
    pub(crate) fn getattr(&self, caller: &Caller, node: &Node, file: AnyOpen<'_>) -> Result<Attr> {
        let node = self.node(node)?;
        let attr = on_top(&node, |top| {
            let open =
                handle(&node, file).filter(|file| file.is_on(&top.branch)).map(|file| Arc::clone(file.present()));
            top.branch.layer.getattr(caller, &top.node, open.as_deref().map(|file| file.inner()))
        })?;
        Ok(self.attr_up(&node, attr))
    }

    pub(crate) fn access(&self, caller: &Caller, node: &Node, mask: u32) -> Result<()> {
        let node = self.node(node)?;
        let top = node.top()?;
        if top.branch.is_writable() || mask & WRITE == 0 {
            return on_top(&node, |top| top.branch.layer.access(caller, &top.node, mask));
        }
        if !self.can_rise(top.branch.index()) {
            return Err(Errno::EROFS);
        }
        match mask & !WRITE {
            0 => Ok(()),
            rest => top.branch.layer.access(caller, &top.node, rest),
        }
    }

    pub(crate) fn setattr(
        self: &Arc<UnionShared>,
        caller: &Caller,
        node: &Node,
        file: AnyOpen<'_>,
        change: &SetAttr,
    ) -> Result<Attr> {
        if change.is_empty() {
            return self.getattr(caller, node, file);
        }
        let node = self.node(node)?;
        if change.size.is_some() && node.kind != Kind::File {
            return Err(if node.kind == Kind::Directory { Errno::EISDIR } else { Errno::EINVAL });
        }
        let cuts_only = change.uid.is_none() && change.gid.is_none() && change.mode.is_none();
        // A change that may still be refused must not find the content truncated already.
        let length = change.size.filter(|_| cuts_only).unwrap_or(u64::MAX);
        self.copy_up(&node, usize::MAX, length)?;
        let _still = self.hold_still(&node);
        let top = node.top()?;
        let open = handle(&node, file).filter(|file| file.is_on(&top.branch)).map(|file| Arc::clone(file.present()));
        let attr = top.branch.layer.setattr(caller, &top.node, open.as_deref().map(|file| file.inner()), change)?;
        let others = self.change_of_others(&node, change, file.is_some());
        if !others.is_empty() {
            self.on_the_others(caller, &node, |part| {
                part.branch.layer.setattr(caller, &part.node, None, &others).map(drop)
            });
        }
        Ok(self.attr_up(&node, attr))
    }

    /// The part of a change that lower branches get as well. A length set through an open file applies to this
    /// file only.
    fn change_of_others(&self, node: &UnionNode, change: &SetAttr, is_open: bool) -> SetAttr {
        let rules = self.rules();
        let is_file = node.kind != Kind::Directory;
        let follows = |action: Action| rules.actions.are_everywhere(action);
        let times = follows(Action::Utimens) || rules.newest_times && !is_file;
        let (owner, mode) = (follows(Action::Chown), follows(Action::Chmod));
        let length = is_file && !is_open && follows(Action::Truncate);
        SetAttr {
            uid: change.uid.filter(|_| owner),
            gid: change.gid.filter(|_| owner),
            mode: change.mode.filter(|_| mode),
            size: change.size.filter(|_| length),
            atime: change.atime.filter(|_| times),
            mtime: change.mtime.filter(|_| times),
            ..SetAttr::default()
        }
    }

    /// Does to the other writable parts of a directory, or to the copies of a file that are changed with it, what was
    /// done to what is shown. Where one cannot follow, the change stands all the same: users see the part that has it.
    fn on_the_others(&self, caller: &Caller, node: &Arc<UnionNode>, change: impl Fn(&Part) -> Result<()>) {
        if node.kind != Kind::Directory {
            if self.options.duplicates {
                self.on_duplicates(caller, node, change);
            }
            return;
        }
        for part in node.parts().iter().skip(1).filter(|part| part.branch.is_writable()) {
            let done = self.may_change(caller, part).and_then(|()| change(part));
            if let Err(error) = done {
                tracing::warn!(branch = %part.branch.name.display(), ?error, "attributes of a directory differ between branches from now on");
            }
        }
    }

    /// Whether a caller may change a part of a directory that the kernel has not judged: root and its owner may.
    fn may_change(&self, caller: &Caller, part: &Part) -> Result<()> {
        let is_allowed = caller.uid == 0 || part.branch.layer.getattr(&OWN, &part.node, None)?.uid == caller.uid;
        if is_allowed { Ok(()) } else { Err(Errno::EPERM) }
    }

    /// The times of the writable part of a directory that was changed last, where users want to see
    /// those.
    pub(crate) fn newest_times(&self, parts: &[Part], attr: &mut Attr) {
        for part in parts.iter().skip(1).filter(|part| part.branch.is_writable()) {
            match part.branch.layer.getattr(&OWN, &part.node, None) {
                Ok(other) if other.mtime > attr.mtime => {
                    (attr.atime, attr.mtime, attr.ctime) = (other.atime, other.mtime, other.ctime)
                }
                Ok(_) => {}
                Err(error) => tracing::debug!(?error, "a part of a directory does not tell its times"),
            }
        }
    }

    pub(crate) fn readlink(&self, caller: &Caller, node: &Node) -> Result<Vec<u8>> {
        on_top(&*self.node(node)?, |top| top.branch.layer.readlink(caller, &top.node))
    }

    pub(crate) fn fsyncdir(&self, caller: &Caller, node: &Node, data_only: bool) -> Result<()> {
        let node = self.directory(node)?;
        for part in node.parts().iter().filter(|part| self.options.sync && part.branch.is_writable()) {
            part.branch.layer.fsyncdir(caller, &part.node, data_only)?;
        }
        Ok(())
    }

    /// Puts new entries of a branch's directory on stable storage, where the options ask for it. Called before
    /// the file on another branch that they replace is removed: branches may be different file systems, which
    /// commit their changes in any order.
    ///
    /// # Errors
    /// Errors of the storage: then the replaced file has to stay.
    pub(crate) fn make_durable(&self, branch: &Branch, directory: &Node) -> Result<()> {
        if self.options.sync { branch.layer.fsyncdir(&OWN, directory, false) } else { Ok(()) }
    }

    pub(crate) fn getxattr(&self, caller: &Caller, node: &Node, name: &[u8], buffer: &mut [u8]) -> Result<usize> {
        let node = self.node(node)?;
        if (name.starts_with(b"user.nacre.") || name.starts_with(b"user.mergerfs."))
            && let Some(value) = self.made_up(&node, name)?
        {
            if !buffer.is_empty() {
                buffer.get_mut(..value.len()).ok_or(Errno::ERANGE)?.copy_from_slice(&value);
            }
            return Ok(value.len());
        }
        let stored = marks::stored_xattr(name).ok_or(Errno::ENODATA)?;
        if !self.options.capabilities && name == b"security.capability" {
            return Err(Errno::ENODATA);
        }
        match on_top(&node, |top| top.branch.layer.getxattr(caller, &top.node, &stored, buffer)) {
            // Some branches have ACLs and others do not support them: the kernel takes that error for a failure
            // of its permission check.
            Err(Errno::EOPNOTSUPP) if name.starts_with(b"system.posix_acl_") => Err(Errno::ENODATA),
            other => other,
        }
    }

    pub(crate) fn listxattr(&self, caller: &Caller, node: &Node, buffer: &mut [u8]) -> Result<usize> {
        let names = on_top(&*self.node(node)?, |top| all_xattrs(caller, top))?;
        let mut shown = Vec::with_capacity(names.len());
        for name in names.split_inclusive(|byte| *byte == 0).filter_map(marks::shown_xattr) {
            shown.extend_from_slice(&name);
        }
        if !buffer.is_empty() {
            buffer.get_mut(..shown.len()).ok_or(Errno::ERANGE)?.copy_from_slice(&shown);
        }
        Ok(shown.len())
    }

    pub(crate) fn setxattr(
        self: &Arc<UnionShared>,
        caller: &Caller,
        node: &Node,
        name: &[u8],
        value: &[u8],
        flags: XattrFlags,
    ) -> Result<()> {
        let node = self.node(node)?;
        if name == PIN {
            return self.set_pin(&node, true);
        }
        let stored = marks::stored_xattr(name).ok_or(Errno::EPERM)?;
        let name = &*stored;
        self.copy_up(&node, usize::MAX, u64::MAX)?;
        let _still = self.hold_still(&node);
        let top = node.top()?;
        top.branch.layer.setxattr(caller, &top.node, name, value, flags)?;
        if self.rules().actions.are_everywhere(Action::SetXattr) {
            // There or not: the part that is shown has decided.
            self.on_the_others(caller, &node, |part| {
                part.branch.layer.setxattr(caller, &part.node, name, value, XattrFlags::default())
            });
        }
        Ok(())
    }

    pub(crate) fn removexattr(self: &Arc<UnionShared>, caller: &Caller, node: &Node, name: &[u8]) -> Result<()> {
        let node = self.node(node)?;
        if name == PIN {
            return self.set_pin(&node, false);
        }
        let stored = marks::stored_xattr(name).ok_or(Errno::EPERM)?;
        let name = &*stored;
        let top = node.top()?;
        if !top.branch.is_writable() {
            // No copy-up for an attribute that does not exist.
            top.branch.layer.getxattr(caller, &top.node, name, &mut [])?;
        }
        self.copy_up(&node, usize::MAX, u64::MAX)?;
        let _still = self.hold_still(&node);
        let top = node.top()?;
        top.branch.layer.removexattr(caller, &top.node, name)?;
        if self.rules().actions.are_everywhere(Action::RemoveXattr) {
            self.on_the_others(caller, &node, |part| match part.branch.layer.removexattr(caller, &part.node, name) {
                Err(Errno::ENODATA) => Ok(()),
                other => other,
            });
        }
        Ok(())
    }

    pub(crate) fn ioctl(
        self: &Arc<UnionShared>,
        caller: &Caller,
        node: &Node,
        request: Ioctl<'_>,
        output: &mut [u8],
    ) -> Result<(i32, usize)> {
        let node = self.node(node)?;
        if request.may_change() && !node.top()?.branch.is_writable() {
            self.copy_up(&node, usize::MAX, u64::MAX)?;
        }
        let _still = self.hold_still(&node);
        let top = node.top()?;
        top.branch.layer.ioctl(caller, &top.node, request, output)
    }

    pub(crate) fn statfs(&self, caller: &Caller, node: &Node) -> Result<StatFs> {
        let node = self.node(node)?;
        let mut figures =
            if self.options.sum { self.sum(caller, &node)? } else { self.figures_of(caller, &node.top()?)? };
        figures.name_max = NAME_MAX;
        Ok(figures)
    }

    fn figures_of(&self, caller: &Caller, top: &Part) -> Result<StatFs> {
        // Writes of new content go to the branch to which the file would be copied up.
        let branches = self.branches();
        let writable =
            branches.iter().take(top.branch.index().saturating_add(1)).rev().find(|branch| branch.is_writable());
        match writable {
            Some(branch) if branch.index() != top.branch.index() => branch.layer.statfs(caller, &branch.root),
            _ => top.branch.layer.statfs(caller, &top.node),
        }
    }

    /// The sums of all file systems, each counted once, in the smallest block unit.
    fn sum(&self, caller: &Caller, node: &UnionNode) -> Result<StatFs> {
        let rules = self.rules();
        let counts = |branch: &Branch| match rules.figures_ignored {
            Ignored::Nothing => true,
            Ignored::ReadOnly => branch.mode().permission == Permission::Rw,
            Ignored::NoCreate => branch.mode().permission != Permission::Nc,
        };
        let mut seen = Vec::new();
        let mut all = Vec::new();
        let branches = self.branches();
        for branch in branches.iter().filter(|branch| !rules.figures_of_path || node.part_on(branch).is_some()) {
            let fs = branch.root_id.fs;
            if !seen.contains(&fs) {
                seen.push(fs);
                let mut figures = branch.layer.statfs(caller, &branch.root)?;
                if !branches.iter().any(|other| other.root_id.fs == fs && counts(other)) {
                    figures.available = 0;
                }
                all.push(figures);
            }
        }
        let unit = all.iter().map(|one| one.fragment).filter(|unit| *unit > 0).min().unwrap_or(4096);
        let mut sum = StatFs { block: unit, fragment: unit, ..StatFs::default() };
        for one in all {
            let units = |count: u64| count.saturating_mul(u64::from(one.fragment)) / u64::from(unit);
            sum.blocks = sum.blocks.saturating_add(units(one.blocks));
            sum.free = sum.free.saturating_add(units(one.free));
            sum.available = sum.available.saturating_add(units(one.available));
            sum.files = sum.files.saturating_add(one.files);
            sum.files_free = sum.files_free.saturating_add(one.files_free);
        }
        Ok(sum)
    }

    /// Flushes all branches to stable storage.
    pub(crate) fn syncfs(&self) -> Result<()> {
        for branch in self.branches().iter().filter(|branch| self.options.sync && branch.is_writable()) {
            branch.layer.syncfs()?;
        }
        Ok(())
    }
}

/// The names of all extended attributes, the union's own among them.
pub(crate) fn all_xattrs(caller: &Caller, part: &Part) -> Result<Vec<u8>> {
    for _ in 0..crate::ATTEMPTS {
        let size = part.branch.layer.listxattr(caller, &part.node, &mut [])?;
        if size == 0 {
            return Ok(Vec::new());
        }
        let mut names = vec![0; size];
        match part.branch.layer.listxattr(caller, &part.node, &mut names) {
            // Another attribute has been set meanwhile.
            Err(Errno::ERANGE) => {}
            Ok(size) => {
                names.truncate(size);
                return Ok(names);
            }
            Err(error) => return Err(error),
        }
    }
    Err(Errno::ERANGE)
}
