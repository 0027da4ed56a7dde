//! Handlers for names: lookup, creation (except of open files), links, removal, renaming.

use crate::{
    door::{Door, caller, name},
    failure::Outcome,
    inodes::{Found, ROOT},
    mount::PROMOTED,
    survival::nodes::NodePlace,
    wire,
};
use fusewire::{Header, Reply, abi};
use nacre_vfs::{Caller, Coherence, Entry, Errno, FileId, Node, RenameFlags};

impl Door {
    pub(crate) fn lookup(&self, header: &Header, bytes: &[u8], reply: &mut Reply<'_>) -> Outcome {
        if matches!(bytes, b"." | b"..") {
            return self.lookup_by_handle(header, bytes == b"..", reply);
        }
        let name = name(bytes)?;
        let (parent, id) = self.parent(header.nodeid)?;
        if header.nodeid == ROOT && bytes == PROMOTED.as_bytes() && self.inodes.root_is_promoted() {
            let root = self.layer.root()?;
            return Ok(reply.entry(&self.found(
                &root,
                Found::below(id.ino),
                self.times().names(Coherence::Exclusive),
            ))?);
        }
        // Asked before the lookup: a watch that this starts then covers the answer.
        let coherence = self.names_coherence(&parent);
        let (names, valid) = self.name_times(&parent, coherence);
        match self.layer.lookup(&caller(header), &parent, name) {
            Ok(entry) => Ok(reply.entry(&self.found(&entry, Found::at(header.nodeid, id, bytes), names))?),
            Err(Errno::ENOENT) => {
                if valid.is_zero() {
                    return Err(Errno::ENOENT.into());
                }
                Ok(reply.entry(&wire::negative(valid))?)
            }
            Err(error) => Err(error.into()),
        }
    }

    pub(crate) fn symlink(&self, header: &Header, bytes: &[u8], target: &[u8], reply: &mut Reply<'_>) -> Outcome {
        let name = name(bytes)?;
        let (parent, id) = self.parent(header.nodeid)?;
        let entry = self.layer.symlink(&caller(header), &parent, name, target)?;
        self.entered(&entry, &parent, Found::at(header.nodeid, id, bytes), reply)
    }

    pub(crate) fn mknod(
        &self,
        header: &Header,
        bytes: &[u8],
        mode: u32,
        umask: u32,
        rdev: u32,
        reply: &mut Reply<'_>,
    ) -> Outcome {
        let name = name(bytes)?;
        let (parent, id) = self.parent(header.nodeid)?;
        let kind = wire::mknod_kind(mode).ok_or(Errno::EINVAL)?;
        let caller = self.creator(header, umask);
        let entry = self.layer.mknod(&caller, &parent, name, kind, mode & 0o7777, abi::decode_dev(rdev))?;
        self.entered(&entry, &parent, Found::at(header.nodeid, id, bytes), reply)
    }

    pub(crate) fn mkdir(&self, header: &Header, bytes: &[u8], mode: u32, umask: u32, reply: &mut Reply<'_>) -> Outcome {
        let name = name(bytes)?;
        let (parent, id) = self.parent(header.nodeid)?;
        let entry = self.layer.mkdir(&self.creator(header, umask), &parent, name, mode & 0o7777)?;
        self.entered(&entry, &parent, Found::at(header.nodeid, id, bytes), reply)
    }

    pub(crate) fn link(&self, header: &Header, nodeid: u64, bytes: &[u8], reply: &mut Reply<'_>) -> Outcome {
        let name = name(bytes)?;
        let (parent, id) = self.parent(header.nodeid)?;
        let (node, file) = self.node_and_file(nodeid)?;
        let entry = self.layer.link(&caller(header), &node, file.as_deref(), &parent, name)?;
        self.entered(&entry, &parent, Found::at(header.nodeid, id, bytes), reply)
    }

    pub(crate) fn unlink(&self, header: &Header, bytes: &[u8]) -> Outcome {
        // A kept open file of it is closed when the kernel forgets the file, which happens at once with the last
        // name.
        let parent = self.node(header.nodeid)?;
        let name = name(bytes)?;
        let held = self.hold_file(&parent, name)?;
        self.layer.unlink(&caller(header), &parent, name)?;
        self.nameless(held);
        Ok(())
    }

    pub(crate) fn rmdir(&self, header: &Header, bytes: &[u8]) -> Outcome {
        let parent = self.node(header.nodeid)?;
        let (caller, name) = (caller(header), name(bytes)?);
        let held = self.hold_directory(&caller, &parent, name);
        self.layer.rmdir(&caller, &parent, name)?;
        held.iter().for_each(|node| self.layer.hold(node, true));
        Ok(())
    }

    /// Prepares a directory for the loss of its name: it may be the working directory of a process, or open.
    fn hold_directory(&self, caller: &Caller, parent: &Node, name: nacre_vfs::Name<'_>) -> Option<Node> {
        if self.inodes.by_number() {
            return None;
        }
        let going = self
            .layer
            .lookup(caller, parent, name)
            .ok()
            .filter(|going| going.attr.kind == nacre_vfs::Kind::Directory)?;
        let node = self.inodes.node(self.inodes.find(&going.attr.id)?)?;
        self.layer.hold(&node, false);
        Some(node)
    }

    pub(crate) fn rename(&self, header: &Header, old: &[u8], new_dir: u64, new: &[u8], flags: u32) -> Outcome {
        let (old, new) = (name(old)?, name(new)?);
        let (from, from_id) = self.parent(header.nodeid)?;
        let (to, to_id) = self.parent(new_dir)?;
        let flags = RenameFlags(flags);
        let caller = caller(header);
        let exchanged = flags.has(RenameFlags::EXCHANGE);
        let replaced = if exchanged { None } else { self.hold_directory(&caller, &to, new) };
        let held = if exchanged { None } else { self.hold_file(&to, new)? };
        self.layer.rename(&caller, &from, old, &to, new, flags)?;
        replaced.iter().for_each(|node| self.layer.hold(node, true));
        self.nameless(held);
        self.moved(&caller, &to, (new_dir, to_id), new);
        if exchanged {
            self.moved(&caller, &from, (header.nodeid, from_id), old);
        }
        Ok(())
    }

    /// Updates the node of a known file after a rename. An error here does not fail the rename, which is done; the
    /// next lookup repairs the node.
    pub(crate) fn moved(
        &self,
        caller: &Caller,
        parent: &Node,
        (directory, id): (u64, FileId),
        name: nacre_vfs::Name<'_>,
    ) {
        if self.inodes.by_number() {
            return;
        }
        match self.layer.lookup(caller, parent, name) {
            Ok(fresh) => {
                let Some(nodeid) = self.inodes.find(&fresh.attr.id) else { return };
                self.inodes.found_at(nodeid, NodePlace { parent: directory, name: name.bytes() });
                if fresh.attr.kind == nacre_vfs::Kind::Directory {
                    self.inodes.with(nodeid, |record| record.replace_extra(id.ino));
                }
                if let Some(known) = self.inodes.node(nodeid)
                    && !known.same(&fresh.node)
                {
                    self.layer.adopt(&known, &fresh.node);
                }
            }
            Err(error) => tracing::debug!(%error, %name, "a renamed file is not there any more"),
        }
    }

    /// Returns the caller of a creation, with the umask where the kernel does not apply it.
    pub(crate) fn creator(&self, header: &Header, umask: u32) -> Caller {
        Caller { umask: if self.agreement().masks { umask & 0o777 } else { 0 }, ..caller(header) }
    }

    /// Timeout of a name that was just created.
    pub(crate) fn new_name_time(&self, parent: &Node) -> std::time::Duration {
        self.name_times(parent, self.names_coherence(parent)).0
    }

    pub(crate) fn entered(&self, entry: &Entry, parent: &Node, found: Found<'_>, reply: &mut Reply<'_>) -> Outcome {
        Ok(reply.entry(&self.made(entry, found, self.new_name_time(parent)))?)
    }
}
