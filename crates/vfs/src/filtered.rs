//! Calls the hooks of a [`Filter`] around the operations of the [`Layer`] below. The order in each operation is:
//! visible? allow? caller, creation or change on the way down, the call, attributes or file on the way up.

use crate::{
    AnyOpen, Attr, Caller, Capabilities, Coherence, Created, Creation, Description, Dev, DirEntry, DirSink, Entry,
    Errno, Filter, FoundOpen, Ioctl, Kind, Layer, LeftOpen, Name, Node, Op, OpenFlags, Opened, RenameFlags, Result,
    Scope, SetAttr, StatFs, XattrFlags,
};
use std::sync::Arc;

/// A filter over a layer.
pub struct Filtered<F> {
    filter: Arc<F>,
    below: Arc<dyn Layer>,
}

impl<F: Filter> Filtered<F> {
    /// Puts `filter` over `below`. The filter is shared so that its owner can still change it (reload of rules).
    pub fn new(filter: Arc<F>, below: Arc<dyn Layer>) -> Filtered<F> {
        Filtered { filter, below }
    }

    fn up(&self, caller: &Caller, mut entry: Entry) -> Result<Entry> {
        self.filter.attr_up(caller, &mut entry.attr)?;
        Ok(entry)
    }

    /// Checks the name of an existing file.
    fn existing(&self, name: Name<'_>) -> Result<()> {
        if self.filter.visible(name) { Ok(()) } else { Err(Errno::ENOENT) }
    }

    /// Checks the name of a file to be created: a hidden name is taken, but cannot be seen.
    fn fresh(&self, name: Name<'_>) -> Result<()> {
        if self.filter.visible(name) { Ok(()) } else { Err(Errno::EACCES) }
    }

    fn creation(&self, caller: &Caller, name: Option<Name<'_>>, kind: Kind, mode: u32) -> Result<(Caller, Creation)> {
        if let Some(name) = name {
            self.fresh(name)?;
            self.filter.allow(caller, &Op::Create(name, kind))?;
        }
        let mut down = self.filter.caller_down(caller);
        let mut creation = Creation { kind, mode, group: None };
        self.filter.new_down(&mut down, &mut creation)?;
        Ok((down, creation))
    }

    /// Sets the group of a new file, and rewrites its attributes.
    fn created(
        &self,
        caller: &Caller,
        down: &Caller,
        creation: &Creation,
        file: Option<&Opened>,
        mut entry: Entry,
    ) -> Result<Entry> {
        if let Some(group) = creation.group
            && entry.attr.gid != group
        {
            let change = SetAttr { gid: Some(group), ..SetAttr::default() };
            entry.attr = self.below.setattr(down, &entry.node, file.map(|file| &**file), &change)?;
        }
        self.up(caller, entry)
    }
}

struct FilteredSink<'a, F> {
    filter: &'a F,
    caller: &'a Caller,
    above: &'a mut dyn DirSink,
}

impl<F: Filter> DirSink for FilteredSink<'_, F> {
    fn push(&mut self, mut entry: DirEntry<'_>) -> bool {
        if !self.filter.visible(entry.name) || self.filter.allow(self.caller, &Op::Lookup(entry.name)).is_err() {
            return true;
        }
        if let Some(found) = &mut entry.entry {
            if self.filter.attr_up(self.caller, &mut found.attr).is_err() {
                // The name exists, but its attributes cannot be shown: a lookup then reports why.
                entry.entry = None;
            } else {
                entry.kind = Some(found.attr.kind);
            }
        }
        self.above.push(entry)
    }

    fn wants_file(&self, name: Name<'_>) -> bool {
        self.filter.visible(name) && self.above.wants_file(name)
    }
}

impl<F: Filter> Layer for Filtered<F> {
    fn root(&self) -> Result<Entry> {
        let entry = self.below.root()?;
        self.up(&Caller::ROOT, entry)
    }

    fn lookup(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<Entry> {
        self.existing(name)?;
        self.filter.allow(caller, &Op::Lookup(name))?;
        let entry = self.below.lookup(&self.filter.caller_down(caller), parent, name)?;
        self.up(caller, entry)
    }

    fn getattr(&self, caller: &Caller, node: &Node, file: AnyOpen<'_>) -> Result<Attr> {
        self.filter.allow(caller, &Op::Getattr)?;
        let mut attr = self.below.getattr(&self.filter.caller_down(caller), node, file)?;
        self.filter.attr_up(caller, &mut attr)?;
        Ok(attr)
    }

    fn access(&self, caller: &Caller, node: &Node, mask: u32) -> Result<()> {
        self.filter.allow(caller, &Op::Getattr)?;
        self.below.access(&self.filter.caller_down(caller), node, mask)
    }

    fn setattr(&self, caller: &Caller, node: &Node, file: AnyOpen<'_>, change: &SetAttr) -> Result<Attr> {
        self.filter.allow(caller, &Op::Setattr(change))?;
        let down = self.filter.caller_down(caller);
        let mut change = *change;
        self.filter.change_down(caller, &mut change, &mut || self.below.getattr(&down, node, file))?;
        let mut attr = if change.is_empty() {
            self.below.getattr(&down, node, file)?
        } else {
            self.below.setattr(&down, node, file, &change)?
        };
        self.filter.attr_up(caller, &mut attr)?;
        Ok(attr)
    }

    fn readlink(&self, caller: &Caller, node: &Node) -> Result<Vec<u8>> {
        self.filter.allow(caller, &Op::Readlink)?;
        self.below.readlink(&self.filter.caller_down(caller), node)
    }

    fn create(&self, caller: &Caller, parent: &Node, name: Name<'_>, mode: u32, flags: OpenFlags) -> Result<Created> {
        self.filter.allow(caller, &Op::Open(flags))?;
        let (down, creation) = self.creation(caller, Some(name), Kind::File, mode)?;
        let mut flags_down = flags;
        self.filter.open_down(caller, &mut flags_down, None)?;
        // Only a new file may change its group: an existing file that is opened instead keeps its own.
        let surely_new = if creation.group.is_some() { OpenFlags(flags_down.0 | OpenFlags::EXCL) } else { flags_down };
        match self.below.create(&down, parent, name, creation.mode, surely_new) {
            Err(Errno::EEXIST) if surely_new != flags_down => {
                let (entry, file) = self.below.create(&down, parent, name, creation.mode, flags_down)?;
                Ok((self.up(caller, entry)?, self.filter.file_up(file, flags)))
            }
            made => {
                let (entry, file) = made?;
                Ok((self.created(caller, &down, &creation, Some(&file), entry)?, self.filter.file_up(file, flags)))
            }
        }
    }

    fn tmpfile(&self, caller: &Caller, parent: &Node, mode: u32, flags: OpenFlags) -> Result<Created> {
        self.filter.allow(caller, &Op::Open(flags))?;
        let (down, creation) = self.creation(caller, None, Kind::File, mode)?;
        let mut flags_down = flags;
        self.filter.open_down(caller, &mut flags_down, None)?;
        let (entry, file) = self.below.tmpfile(&down, parent, creation.mode, flags_down)?;
        Ok((self.created(caller, &down, &creation, Some(&file), entry)?, self.filter.file_up(file, flags)))
    }

    fn mkdir(&self, caller: &Caller, parent: &Node, name: Name<'_>, mode: u32) -> Result<Entry> {
        let (down, creation) = self.creation(caller, Some(name), Kind::Directory, mode)?;
        let entry = self.below.mkdir(&down, parent, name, creation.mode)?;
        self.created(caller, &down, &creation, None, entry)
    }

    fn mknod(&self, caller: &Caller, parent: &Node, name: Name<'_>, kind: Kind, mode: u32, dev: Dev) -> Result<Entry> {
        let (down, creation) = self.creation(caller, Some(name), kind, mode)?;
        let entry = self.below.mknod(&down, parent, name, kind, creation.mode, dev)?;
        self.created(caller, &down, &creation, None, entry)
    }

    fn symlink(&self, caller: &Caller, parent: &Node, name: Name<'_>, target: &[u8]) -> Result<Entry> {
        let (down, creation) = self.creation(caller, Some(name), Kind::Symlink, 0o777)?;
        let entry = self.below.symlink(&down, parent, name, target)?;
        self.created(caller, &down, &creation, None, entry)
    }

    fn link(&self, caller: &Caller, node: &Node, file: AnyOpen<'_>, parent: &Node, name: Name<'_>) -> Result<Entry> {
        self.fresh(name)?;
        self.filter.allow(caller, &Op::Link(name))?;
        let entry = self.below.link(&self.filter.caller_down(caller), node, file, parent, name)?;
        self.up(caller, entry)
    }

    fn unlink(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<()> {
        self.existing(name)?;
        self.filter.allow(caller, &Op::Unlink(name))?;
        self.below.unlink(&self.filter.caller_down(caller), parent, name)
    }

    fn rmdir(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<()> {
        self.existing(name)?;
        self.filter.allow(caller, &Op::Rmdir(name))?;
        self.below.rmdir(&self.filter.caller_down(caller), parent, name)
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
        self.existing(name)?;
        self.fresh(new_name)?;
        self.filter.allow(caller, &Op::Rename(name, new_name))?;
        let down = self.filter.caller_down(caller);
        let asked_to_fail = flags.has(RenameFlags::NOREPLACE);
        if !self.filter.protects_targets() || asked_to_fail || flags.has(RenameFlags::EXCHANGE) {
            return self.below.rename(&down, parent, name, new_parent, new_name, flags);
        }
        // The storage itself does the check, so that there is no race.
        let guarded = RenameFlags(flags.0 | RenameFlags::NOREPLACE);
        match self.below.rename(&down, parent, name, new_parent, new_name, guarded) {
            Err(Errno::EEXIST) => Err(Errno::EPERM),
            other => other,
        }
    }

    fn open(&self, caller: &Caller, node: &Node, flags: OpenFlags) -> Result<Opened> {
        self.filter.allow(caller, &Op::Open(flags))?;
        let down = self.filter.caller_down(caller);
        let mut flags_down = flags;
        self.filter.open_down(caller, &mut flags_down, Some(&mut || self.below.getattr(&down, node, None)))?;
        let file = self.below.open(&down, node, flags_down)?;
        Ok(self.filter.file_up(file, flags))
    }

    fn readdir(&self, caller: &Caller, node: &Node, from: u64, attributes: bool, sink: &mut dyn DirSink) -> Result<()> {
        self.filter.allow(caller, &Op::Readdir)?;
        let mut filtered = FilteredSink { filter: &*self.filter, caller, above: sink };
        self.below.readdir(&self.filter.caller_down(caller), node, from, attributes, &mut filtered)
    }

    fn fsyncdir(&self, caller: &Caller, node: &Node, data_only: bool) -> Result<()> {
        self.filter.allow(caller, &Op::Sync)?;
        self.below.fsyncdir(&self.filter.caller_down(caller), node, data_only)
    }

    fn statfs(&self, caller: &Caller, node: &Node) -> Result<StatFs> {
        self.filter.allow(caller, &Op::Statfs)?;
        let mut statfs = self.below.statfs(&self.filter.caller_down(caller), node)?;
        self.filter.statfs_up(&mut statfs);
        Ok(statfs)
    }

    fn syncfs(&self) -> Result<()> {
        self.below.syncfs()
    }

    fn getxattr(&self, caller: &Caller, node: &Node, name: &[u8], buffer: &mut [u8]) -> Result<usize> {
        self.filter.allow(caller, &Op::Getxattr(name))?;
        let down = self.filter.caller_down(caller);
        let size = self.below.getxattr(&down, node, name, buffer)?;
        if self.filter.rewrites_xattr(name)
            && let Some(value) = buffer.get_mut(..size)
        {
            self.filter.xattr_up(name, value, &mut || self.below.getattr(&down, node, None))?;
        }
        Ok(size)
    }

    fn listxattr(&self, caller: &Caller, node: &Node, buffer: &mut [u8]) -> Result<usize> {
        self.filter.allow(caller, &Op::Listxattr)?;
        self.below.listxattr(&self.filter.caller_down(caller), node, buffer)
    }

    fn setxattr(&self, caller: &Caller, node: &Node, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()> {
        self.filter.allow(caller, &Op::Setxattr(name, flags))?;
        let down = self.filter.caller_down(caller);
        if !self.filter.rewrites_xattr(name) {
            return self.below.setxattr(&down, node, name, value, flags);
        }
        let mut value = value.to_vec();
        self.filter.xattr_down(name, &mut value, &mut || self.below.getattr(&down, node, None))?;
        self.below.setxattr(&down, node, name, &value, flags)
    }

    fn removexattr(&self, caller: &Caller, node: &Node, name: &[u8]) -> Result<()> {
        self.filter.allow(caller, &Op::Removexattr(name))?;
        self.below.removexattr(&self.filter.caller_down(caller), node, name)
    }

    fn ioctl(&self, caller: &Caller, node: &Node, request: Ioctl<'_>, output: &mut [u8]) -> Result<(i32, usize)> {
        self.filter.allow(caller, &Op::Ioctl(request.command))?;
        self.below.ioctl(&self.filter.caller_down(caller), node, request, output)
    }

    fn coherence(&self, scope: Scope<'_>) -> Coherence {
        self.filter.coherence_up(self.below.coherence(scope))
    }

    fn capabilities(&self) -> Capabilities<'_> {
        let below = self.below.capabilities();
        Capabilities {
            acls: self.filter.acls_up(below.acls),
            left_open: below.left_open.map(|_| self as &dyn LeftOpen),
            ..below
        }
    }

    fn describe(&self) -> Description {
        self.filter.describe().over(self.below.describe())
    }

    crate::forward_layer! { id path adopt hold watch rest }
}

impl<F: Filter> LeftOpen for Filtered<F> {
    fn take_up(&self, node: Option<&Node>, left: FoundOpen, flags: OpenFlags) -> Result<(Node, Opened)> {
        let below = self.below.capabilities().left_open.ok_or(Errno::ESTALE)?;
        let (node, file) = below.take_up(node, left, flags)?;
        Ok((node, self.filter.file_up(file, flags)))
    }
}
