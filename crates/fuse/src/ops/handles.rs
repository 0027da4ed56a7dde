//! File handles: the kernel looks up `.` and `..` of an inode that it does not have in memory.
//!
//! Users may keep handles as long as they like (knfsd, Ganesha, open_by_handle_at(2)), so the node id in such a
//! lookup may be any number. Offered for layers with inode numbers ([`nacre_vfs::Numbered`], `negotiate.rs`).
//! Invariant: a reply names exactly the requested node, or its parent directory; the kernel compares the generation.

use crate::{
    door::Door,
    failure::Outcome,
    inodes::Found,
    self_io::{Role, own_mount::Entered, waits::during},
};
use fusewire::{Header, Reply};
use nacre_vfs::{Errno, Kind, Node};
use rustix::fs::{AtFlags, CWD, StatxFlags};
use std::time::Duration;

impl Door {
    /// Answers a lookup of `.`, or of `..` if `above`.
    pub(crate) fn lookup_by_handle(&self, header: &Header, above: bool, reply: &mut Reply<'_>) -> Outcome {
        let numbered = self.layer.capabilities().numbered.ok_or(Errno::ESTALE)?;
        let number = self.inodes.number(header.nodeid);
        // The root has two node ids, of which the mount uses one.
        if self.inodes.nodeid(number) != Some(header.nodeid) {
            return Err(Errno::ESTALE.into());
        }
        let mut entry = numbered.look_up(number)?;
        if above {
            if entry.attr.kind != Kind::Directory {
                return Err(Errno::ENOTDIR.into());
            }
            let parent = numbered.parent(&entry.node);
            if parent == number {
                return Err(Errno::ESTALE.into());
            }
            entry = numbered.look_up(parent)?;
        }
        if numbered.is_unlisted(&entry.node) {
            self.make_reachable(header.nodeid, &entry.node)?;
        }
        Ok(reply.entry(&self.found(&entry, Found::below(number), Duration::ZERO))?)
    }

    /// Looks a directory up by its name. The kernel connects a directory with the root by the listings of the
    /// directories above it (`exportfs_get_name()`). A directory that is not listed has to be in its dentry cache
    /// before this request is answered.
    fn make_reachable(&self, nodeid: u64, node: &Node) -> Outcome {
        let Some((path, device)) = self.layer.path(node).zip(self.kernel.device()) else { return Ok(()) };
        let place = self.options.mountpoint.clone();
        let walker = self.self_io.start("nacre-walker", Role::Walker, move || {
            let _mount = Entered::new(&place, device)?;
            let look = || rustix::fs::statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::empty());
            during("look-up of a directory", nodeid, look).map(drop)
        });
        let walked = fusewire::blocking(|| walker.map(std::thread::JoinHandle::join))?;
        if !matches!(walked, Ok(Ok(Ok(())))) {
            // The mount may be hidden: the kernel finds no path to the root then (ESTALE).
            tracing::debug!(?walked, "a directory cannot be reached by its name");
        }
        Ok(())
    }
}
