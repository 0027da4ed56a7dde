//! Attributes: reading and changing them, symbolic links' targets, the figures of the file system.

use crate::{
    door::{Door, caller},
    failure::Outcome,
    wire,
};
use fusewire::{Header, Reply, abi};
use nacre_vfs::{Attr, Errno, Kind, Node, Opened};
use std::sync::atomic::Ordering;

impl Door {
    pub(crate) fn getattr(&self, header: &Header, fh: Option<u64>, reply: &mut Reply<'_>) -> Outcome {
        let (node, attr) = self.attributes(header, fh)?;
        Ok(reply.attr(&wire::attr_out(&attr, self.attr_time(&node, &attr)))?)
    }

    pub(crate) fn statx(&self, header: &Header, fh: Option<u64>, reply: &mut Reply<'_>) -> Outcome {
        let (node, attr) = self.attributes(header, fh)?;
        Ok(reply.statx(&wire::statx_out(&attr, self.attr_time(&node, &attr)))?)
    }

    pub(crate) fn setattr(&self, header: &Header, request: &abi::SetattrIn, reply: &mut Reply<'_>) -> Outcome {
        let fh = (request.valid & abi::fattr::FH != 0).then_some(request.fh);
        let (node, file) = self.node_and_own_file(header.nodeid, fh)?;
        let change = wire::change(request);
        let attr = self.layer.setattr(&caller(header), &node, file.as_deref(), &change)?;
        if change.mode.is_some_and(|mode| mode & 0o6000 != 0) {
            self.privileges.fetch_add(1, Ordering::AcqRel);
        }
        // A directory that everybody may search has nothing to take back.
        let searchable = attr.mode & 0o111 == 0o111;
        if attr.kind == Kind::Directory && (change.mode.is_some() && !searchable || change.gid.is_some() || change.uid.is_some()) {
            self.permissions_changed();
        }
        Ok(reply.attr(&wire::attr_out(&attr, self.attr_time(&node, &attr)))?)
    }

    /// `access(2)` and `chdir(2)`: asked only where the kernel leaves permissions to us.
    pub(crate) fn access(&self, header: &Header, mask: u32) -> Outcome {
        if self.options.default_permissions {
            return Err(Errno::ENOSYS.into());
        }
        Ok(self.layer.access(&caller(header), &self.node(header.nodeid)?, mask)?)
    }

    pub(crate) fn readlink(&self, header: &Header, reply: &mut Reply<'_>) -> Outcome {
        let target = self.layer.readlink(&caller(header), &self.node(header.nodeid)?)?;
        Ok(reply.bytes(&target)?)
    }

    pub(crate) fn statfs(&self, header: &Header, reply: &mut Reply<'_>) -> Outcome {
        let statfs = self.layer.statfs(&caller(header), &self.node(header.nodeid)?)?;
        Ok(reply.statfs(&wire::statfs(&statfs))?)
    }

    fn attributes(&self, header: &Header, fh: Option<u64>) -> Outcome<(Node, Attr)> {
        let (node, file) = self.node_and_own_file(header.nodeid, fh)?;
        let attr = self.layer.getattr(&caller(header), &node, file.as_deref())?;
        Ok((node, attr))
    }

    /// The node with the open file that the request names, else with any open file of it.
    fn node_and_own_file(&self, nodeid: u64, fh: Option<u64>) -> Outcome<(Node, Option<Opened>)> {
        match fh.and_then(|fh| self.files.get(fh)) {
            Some(handle) if handle.nodeid == nodeid => Ok((self.node(nodeid)?, Some(std::sync::Arc::clone(&handle.file)))),
            Some(_) => Err(Errno::EBADF.into()),
            None => self.node_and_file(nodeid),
        }
    }
}
