//! The family as a layer: each call goes to the member that the file is of.

use super::{Family, Kin, kin, listing::Listing};
use nacre_vfs::{
    Attr, Caller, Capabilities, Coherence, Description, DirSink, Entry, Errno, FileId, Invalidation, Ioctl, Kind,
    Layer, Name, Node, OpenFile, OpenFlags, Opened, RenameFlags, Result, Scope, SetAttr, StatFs, XattrFlags,
};
use std::sync::{Arc, mpsc::Sender};

/// `X_OK`.
const EXECUTE: u32 = 1;

impl Family {
    fn changeable<'a>(&self, node: &'a Node) -> Result<&'a Kin> {
        let kin = kin(node)?;
        kin.member.changeable()?;
        Ok(kin)
    }

    fn made(&self, parent: &Kin, made: Result<Entry>) -> Result<Entry> {
        made.map(|entry| self.wrap(&parent.member, entry))
    }
}

fn same(one: &Kin, other: &Kin) -> Result<()> {
    if Arc::ptr_eq(&one.member, &other.member) { Ok(()) } else { Err(Errno::EXDEV) }
}

impl Layer for Family {
    fn root(&self) -> Result<Entry> {
        Ok(self.wrap(&self.first, self.first.layer.root()?))
    }

    fn lookup(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<Entry> {
        let kin = kin(parent)?;
        let found = self.wrap(&kin.member, kin.member.layer.lookup(caller, &kin.node, name)?);
        if found.attr.kind != Kind::Directory {
            return Ok(found);
        }
        Ok(self.over(found.attr.id.ino)?.unwrap_or(found))
    }

    fn id(&self, node: &Node) -> Result<FileId> {
        let kin = kin(node)?;
        Ok(self.file_id(self.shown(&kin.member, kin.member.layer.id(&kin.node)?.ino)))
    }

    fn path(&self, node: &Node) -> Option<Vec<u8>> {
        let kin = kin(node).ok()?;
        let own = kin.member.layer.path(&kin.node)?;
        if kin.member.covers == 0 {
            return Some(own);
        }
        let above = self.path(&nacre_vfs::Numbered::node(self, kin.member.covers).ok()?)?;
        Some(if own.is_empty() { above } else { [&*above, b"/", &*own].concat() })
    }

    fn adopt(&self, _known: &Node, _fresh: &Node) {
        // Nodes are the files themselves: there is nothing to learn.
    }

    fn hold(&self, _directory: &Node, _gone: bool) {
        // They need no names either.
    }

    fn getattr(&self, caller: &Caller, node: &Node, file: Option<&dyn OpenFile>) -> Result<Attr> {
        let kin = kin(node)?;
        kin.member.layer.getattr(caller, &kin.node, file).map(|attr| self.attr(&kin.member, attr))
    }

    fn access(&self, caller: &Caller, node: &Node, mask: u32) -> Result<()> {
        let kin = kin(node)?;
        if mask & EXECUTE != 0
            && kin.member.rules.lock().no_exec
            && self.getattr(caller, node, None)?.kind == Kind::File
        {
            return Err(Errno::EACCES);
        }
        kin.member.layer.access(caller, &kin.node, mask)
    }

    fn setattr(&self, caller: &Caller, node: &Node, file: Option<&dyn OpenFile>, change: &SetAttr) -> Result<Attr> {
        let kin = self.changeable(node)?;
        kin.member.layer.setattr(caller, &kin.node, file, change).map(|attr| self.attr(&kin.member, attr))
    }

    fn readlink(&self, caller: &Caller, node: &Node) -> Result<Vec<u8>> {
        let kin = kin(node)?;
        kin.member.layer.readlink(caller, &kin.node)
    }

    fn create(
        &self,
        caller: &Caller,
        parent: &Node,
        name: Name<'_>,
        mode: u32,
        flags: OpenFlags,
    ) -> Result<(Entry, Opened)> {
        let kin = self.changeable(parent)?;
        let (entry, file) = kin.member.layer.create(caller, &kin.node, name, mode, flags)?;
        Ok((self.wrap(&kin.member, entry), file))
    }

    fn tmpfile(&self, caller: &Caller, parent: &Node, mode: u32, flags: OpenFlags) -> Result<(Entry, Opened)> {
        let kin = self.changeable(parent)?;
        let (entry, file) = kin.member.layer.tmpfile(caller, &kin.node, mode, flags)?;
        Ok((self.wrap(&kin.member, entry), file))
    }

    fn mkdir(&self, caller: &Caller, parent: &Node, name: Name<'_>, mode: u32) -> Result<Entry> {
        let kin = self.changeable(parent)?;
        self.made(kin, kin.member.layer.mkdir(caller, &kin.node, name, mode))
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
        let kin = self.changeable(parent)?;
        self.made(kin, kin.member.layer.mknod(caller, &kin.node, name, kind, mode, device))
    }

    fn symlink(&self, caller: &Caller, parent: &Node, name: Name<'_>, target: &[u8]) -> Result<Entry> {
        let kin = self.changeable(parent)?;
        self.made(kin, kin.member.layer.symlink(caller, &kin.node, name, target))
    }

    fn link(
        &self,
        caller: &Caller,
        node: &Node,
        file: Option<&dyn OpenFile>,
        parent: &Node,
        name: Name<'_>,
    ) -> Result<Entry> {
        let (linked, parent) = (kin(node)?, self.changeable(parent)?);
        same(linked, parent)?;
        self.made(parent, parent.member.layer.link(caller, &linked.node, file, &parent.node, name))
    }

    fn unlink(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<()> {
        let kin = self.changeable(parent)?;
        kin.member.layer.unlink(caller, &kin.node, name)
    }

    fn rmdir(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<()> {
        let kin = self.changeable(parent)?;
        let _shape = Family::holds_files(kin).then(|| self.shape.read());
        self.uncovered(kin, name)?;
        kin.member.layer.rmdir(caller, &kin.node, name)
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
        let (from, to) = (self.changeable(parent)?, self.changeable(new_parent)?);
        same(from, to)?;
        let _shape = (Family::holds_files(from) && Family::holds_files(to)).then(|| self.shape.read());
        self.uncovered(from, name)?;
        self.uncovered(to, new_name)?;
        from.member.layer.rename(caller, &from.node, name, &to.node, new_name, flags)
    }

    fn open(&self, caller: &Caller, node: &Node, flags: OpenFlags) -> Result<Opened> {
        let kin = kin(node)?;
        if flags.writes() || flags.truncates() {
            kin.member.changeable()?;
        }
        kin.member.layer.open(caller, &kin.node, flags)
    }

    fn readdir(&self, caller: &Caller, node: &Node, from: u64, attributes: bool, sink: &mut dyn DirSink) -> Result<()> {
        let kin = kin(node)?;
        kin.member.layer.readdir(
            caller,
            &kin.node,
            from,
            attributes,
            &mut Listing { family: self, member: &kin.member, sink },
        )
    }

    fn fsyncdir(&self, caller: &Caller, node: &Node, data_only: bool) -> Result<()> {
        let kin = kin(node)?;
        kin.member.layer.fsyncdir(caller, &kin.node, data_only)
    }

    fn statfs(&self, caller: &Caller, node: &Node) -> Result<StatFs> {
        let kin = kin(node)?;
        kin.member.layer.statfs(caller, &kin.node)
    }

    fn syncfs(&self) -> Result<()> {
        // One commit is the whole pool's.
        self.first.layer.syncfs()
    }

    fn getxattr(&self, caller: &Caller, node: &Node, name: &[u8], buffer: &mut [u8]) -> Result<usize> {
        let kin = kin(node)?;
        kin.member.layer.getxattr(caller, &kin.node, name, buffer)
    }

    fn listxattr(&self, caller: &Caller, node: &Node, buffer: &mut [u8]) -> Result<usize> {
        let kin = kin(node)?;
        kin.member.layer.listxattr(caller, &kin.node, buffer)
    }

    fn setxattr(&self, caller: &Caller, node: &Node, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()> {
        let kin = self.changeable(node)?;
        kin.member.layer.setxattr(caller, &kin.node, name, value, flags)
    }

    fn removexattr(&self, caller: &Caller, node: &Node, name: &[u8]) -> Result<()> {
        let kin = self.changeable(node)?;
        kin.member.layer.removexattr(caller, &kin.node, name)
    }

    fn ioctl(&self, caller: &Caller, node: &Node, request: Ioctl<'_>, output: &mut [u8]) -> Result<(i32, usize)> {
        let kin = kin(node)?;
        kin.member.layer.ioctl(caller, &kin.node, request, output)
    }

    fn coherence(&self, scope: Scope<'_>) -> Coherence {
        let (Scope::Names(node) | Scope::Attributes(node, _)) = scope;
        let Ok(kin) = kin(node) else { return Coherence::Shared };
        kin.member.layer.coherence(match scope {
            Scope::Names(_) => Scope::Names(&kin.node),
            Scope::Attributes(_, attr) => Scope::Attributes(&kin.node, attr),
        })
    }

    fn watch(&self, channel: Sender<Invalidation>) {
        *self.changes.lock() = Some(channel);
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities {
            // Members come later, and the kernel cannot be told then.
            acls: true,
            judges_callers: false,
            numbered: Some(self),
            // Doors that can hold writes back are root's, who mounts each by itself.
            writeback: None,
            open_files: None,
        }
    }

    fn describe(&self) -> Description {
        let others: Vec<_> = self.covers.read().values().map(|member| member.layer.describe()).collect();
        let first = Description::new("family").over(self.first.layer.describe());
        others.into_iter().fold(first, Description::over)
    }
}
