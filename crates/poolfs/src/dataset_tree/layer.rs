//! The tree of file systems as a layer: each call is forwarded to the member of the file.

use super::{DatasetTree, TreeNode, listing::Listing, tree_node};
use nacre_vfs::{
    AnyOpen, Attr, Caller, Capabilities, Coherence, Created, Description, Dev, DirSink, Entry, Errno, FileId,
    Invalidation, Ioctl, Kind, Layer, Name, Node, OpenFlags, Opened, RenameFlags, Result, Scope, SetAttr, StatFs,
    XattrFlags,
};
use std::sync::{Arc, mpsc::Sender};

/// `X_OK`.
const EXECUTE: u32 = 1;

impl DatasetTree {
    fn changeable<'a>(&self, node: &'a Node) -> Result<&'a TreeNode> {
        let tree_node = tree_node(node)?;
        tree_node.member.changeable()?;
        Ok(tree_node)
    }

    fn made(&self, parent: &TreeNode, made: Result<Entry>) -> Result<Entry> {
        made.map(|entry| self.wrap(&parent.member, entry))
    }
}

fn same(one: &TreeNode, other: &TreeNode) -> Result<()> {
    if Arc::ptr_eq(&one.member, &other.member) { Ok(()) } else { Err(Errno::EXDEV) }
}

impl Layer for DatasetTree {
    fn root(&self) -> Result<Entry> {
        Ok(self.wrap(&self.first, self.first.layer.root()?))
    }

    fn lookup(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<Entry> {
        let tree_node = tree_node(parent)?;
        let found = self.wrap(&tree_node.member, tree_node.member.layer.lookup(caller, &tree_node.node, name)?);
        if found.attr.kind != Kind::Directory {
            return Ok(found);
        }
        Ok(self.over(found.attr.id.ino)?.unwrap_or(found))
    }

    fn id(&self, node: &Node) -> Result<FileId> {
        let tree_node = tree_node(node)?;
        Ok(self.file_id(self.shown(&tree_node.member, tree_node.member.layer.id(&tree_node.node)?.ino)))
    }

    fn path(&self, node: &Node) -> Option<Vec<u8>> {
        let tree_node = tree_node(node).ok()?;
        let own = tree_node.member.layer.path(&tree_node.node)?;
        if tree_node.member.covers == 0 {
            return Some(own);
        }
        let above = self.path(&nacre_vfs::Numbered::node(self, tree_node.member.covers).ok()?)?;
        Some(if own.is_empty() { above } else { [&*above, b"/", &*own].concat() })
    }

    fn adopt(&self, _known: &Node, _fresh: &Node) {
        // Nodes are the files themselves: there is nothing to update.
    }

    fn hold(&self, _directory: &Node, _gone: bool) {
        // Nodes need no names either.
    }

    fn getattr(&self, caller: &Caller, node: &Node, file: AnyOpen<'_>) -> Result<Attr> {
        let tree_node = tree_node(node)?;
        tree_node.member.layer.getattr(caller, &tree_node.node, file).map(|attr| self.attr(&tree_node.member, attr))
    }

    fn access(&self, caller: &Caller, node: &Node, mask: u32) -> Result<()> {
        let tree_node = tree_node(node)?;
        if mask & EXECUTE != 0
            && tree_node.member.rules.lock().no_exec
            && self.getattr(caller, node, None)?.kind == Kind::File
        {
            return Err(Errno::EACCES);
        }
        tree_node.member.layer.access(caller, &tree_node.node, mask)
    }

    fn setattr(&self, caller: &Caller, node: &Node, file: AnyOpen<'_>, change: &SetAttr) -> Result<Attr> {
        let tree_node = self.changeable(node)?;
        tree_node
            .member
            .layer
            .setattr(caller, &tree_node.node, file, change)
            .map(|attr| self.attr(&tree_node.member, attr))
    }

    fn readlink(&self, caller: &Caller, node: &Node) -> Result<Vec<u8>> {
        let tree_node = tree_node(node)?;
        tree_node.member.layer.readlink(caller, &tree_node.node)
    }

    fn create(&self, caller: &Caller, parent: &Node, name: Name<'_>, mode: u32, flags: OpenFlags) -> Result<Created> {
        let tree_node = self.changeable(parent)?;
        let (entry, file) = tree_node.member.layer.create(caller, &tree_node.node, name, mode, flags)?;
        Ok((self.wrap(&tree_node.member, entry), file))
    }

    fn tmpfile(&self, caller: &Caller, parent: &Node, mode: u32, flags: OpenFlags) -> Result<Created> {
        let tree_node = self.changeable(parent)?;
        let (entry, file) = tree_node.member.layer.tmpfile(caller, &tree_node.node, mode, flags)?;
        Ok((self.wrap(&tree_node.member, entry), file))
    }

    fn mkdir(&self, caller: &Caller, parent: &Node, name: Name<'_>, mode: u32) -> Result<Entry> {
        let tree_node = self.changeable(parent)?;
        self.made(tree_node, tree_node.member.layer.mkdir(caller, &tree_node.node, name, mode))
    }

    fn mknod(&self, caller: &Caller, parent: &Node, name: Name<'_>, kind: Kind, mode: u32, dev: Dev) -> Result<Entry> {
        let tree_node = self.changeable(parent)?;
        self.made(tree_node, tree_node.member.layer.mknod(caller, &tree_node.node, name, kind, mode, dev))
    }

    fn symlink(&self, caller: &Caller, parent: &Node, name: Name<'_>, target: &[u8]) -> Result<Entry> {
        let tree_node = self.changeable(parent)?;
        self.made(tree_node, tree_node.member.layer.symlink(caller, &tree_node.node, name, target))
    }

    fn link(&self, caller: &Caller, node: &Node, file: AnyOpen<'_>, parent: &Node, name: Name<'_>) -> Result<Entry> {
        let (linked, parent) = (tree_node(node)?, self.changeable(parent)?);
        same(linked, parent)?;
        self.made(parent, parent.member.layer.link(caller, &linked.node, file, &parent.node, name))
    }

    fn unlink(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<()> {
        let tree_node = self.changeable(parent)?;
        tree_node.member.layer.unlink(caller, &tree_node.node, name)
    }

    fn rmdir(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<()> {
        let tree_node = self.changeable(parent)?;
        let _shape = DatasetTree::holds_files(tree_node).then(|| self.shape.read());
        self.uncovered(tree_node, name)?;
        tree_node.member.layer.rmdir(caller, &tree_node.node, name)
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
        let _shape = (DatasetTree::holds_files(from) && DatasetTree::holds_files(to)).then(|| self.shape.read());
        self.uncovered(from, name)?;
        self.uncovered(to, new_name)?;
        from.member.layer.rename(caller, &from.node, name, &to.node, new_name, flags)
    }

    fn open(&self, caller: &Caller, node: &Node, flags: OpenFlags) -> Result<Opened> {
        let tree_node = tree_node(node)?;
        if flags.writes() || flags.truncates() {
            tree_node.member.changeable()?;
        }
        tree_node.member.layer.open(caller, &tree_node.node, flags)
    }

    fn readdir(&self, caller: &Caller, node: &Node, from: u64, attributes: bool, sink: &mut dyn DirSink) -> Result<()> {
        let tree_node = tree_node(node)?;
        tree_node.member.layer.readdir(
            caller,
            &tree_node.node,
            from,
            attributes,
            &mut Listing { tree: self, member: &tree_node.member, sink },
        )
    }

    fn fsyncdir(&self, caller: &Caller, node: &Node, data_only: bool) -> Result<()> {
        let tree_node = tree_node(node)?;
        tree_node.member.layer.fsyncdir(caller, &tree_node.node, data_only)
    }

    fn statfs(&self, caller: &Caller, node: &Node) -> Result<StatFs> {
        let tree_node = tree_node(node)?;
        tree_node.member.layer.statfs(caller, &tree_node.node)
    }

    fn syncfs(&self) -> Result<()> {
        // A commit covers the whole pool.
        self.first.layer.syncfs()
    }

    fn getxattr(&self, caller: &Caller, node: &Node, name: &[u8], buffer: &mut [u8]) -> Result<usize> {
        let tree_node = tree_node(node)?;
        tree_node.member.layer.getxattr(caller, &tree_node.node, name, buffer)
    }

    fn listxattr(&self, caller: &Caller, node: &Node, buffer: &mut [u8]) -> Result<usize> {
        let tree_node = tree_node(node)?;
        tree_node.member.layer.listxattr(caller, &tree_node.node, buffer)
    }

    fn setxattr(&self, caller: &Caller, node: &Node, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()> {
        let tree_node = self.changeable(node)?;
        tree_node.member.layer.setxattr(caller, &tree_node.node, name, value, flags)
    }

    fn removexattr(&self, caller: &Caller, node: &Node, name: &[u8]) -> Result<()> {
        let tree_node = self.changeable(node)?;
        tree_node.member.layer.removexattr(caller, &tree_node.node, name)
    }

    fn ioctl(&self, caller: &Caller, node: &Node, request: Ioctl<'_>, output: &mut [u8]) -> Result<(i32, usize)> {
        let tree_node = if request.may_change() { self.changeable(node)? } else { tree_node(node)? };
        tree_node.member.layer.ioctl(caller, &tree_node.node, request, output)
    }

    fn coherence(&self, scope: Scope<'_>) -> Coherence {
        let (Scope::Names(node) | Scope::Attributes(node, _)) = scope;
        let Ok(tree_node) = tree_node(node) else { return Coherence::Shared };
        tree_node.member.layer.coherence(match scope {
            Scope::Names(_) => Scope::Names(&tree_node.node),
            Scope::Attributes(_, attr) => Scope::Attributes(&tree_node.node, attr),
        })
    }

    fn watch(&self, channel: Sender<Invalidation>) {
        *self.changes.lock() = Some(channel);
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities {
            // Members may be added later, and the kernel cannot be notified then.
            acls: true,
            judges_callers: false,
            reuses_numbers: false,
            numbered: Some(self),
            needs_opens: Some("several file systems lie in this mount"),
            // Only root's mounts support write-back, and root mounts each file system separately.
            writeback: None,
            open_files: None,
            left_open: None,
            interrupted: None,
        }
    }

    fn describe(&self) -> Description {
        let others: Vec<_> = self.covers.read().values().map(|member| member.layer.describe()).collect();
        let first = Description::new("family").over(self.first.layer.describe());
        others.into_iter().fold(first, Description::over)
    }
}
