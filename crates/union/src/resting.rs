//! The idle watch of a union: while the mount has no requests, its branches watch less.
//!
//! Called by the FUSE front end (`Layer::rest`) with the nodes that the kernel may know. A node of the union
//! consists of parts on the branches, so each branch gets its own parts, and sends changes of those only. No
//! other change matters:
//! * A directory gets or loses a part on a branch, or is hidden, by a change of names in a directory above it.
//!   That directory is known, too, as the kernel knows no file without the directories above it. Later changes
//!   in the new part on that branch are not sent. They need not be: on the notice of the name change the kernel
//!   has to look all names up again (`watch.rs`), and a look-up ends the idle watch of the branch before it is
//!   read.
//! * A process whose working directory is such a directory does not look it up, and continues to see its old
//!   parts, as in a union without an idle watch.
//! * The union itself caches listings, also of directories that are referenced only by a node in them and are unknown
//!   to the kernel. They are dropped when the idle watch begins; the next listing ends the idle watch of all branches
//!   that it reads.

use crate::{UnionShared, branches::Branch};
use nacre_vfs::Node;
use std::sync::Arc;

impl UnionShared {
    /// Starts or ends an idle watch; see `Layer::rest`.
    pub(crate) fn rest(&self, known: Option<&[Node]>) -> bool {
        // A change of the branches may be waiting for the very thread of the front end that calls this.
        let Some(_branches) = self.gate.try_read() else { return known.is_none() };
        let branches = self.branches();
        match known {
            // Each branch has to be called.
            None => branches.iter().fold(false, |any, branch| branch.layer.rest(None) | any),
            Some([]) => {
                self.listings.forget_all();
                branches.iter().fold(true, |all, branch| branch.layer.rest(Some(&[])) & all)
            }
            Some(known) => self
                .parts_of(known)
                .is_some_and(|parts| parts.iter().all(|(branch, nodes)| branch.layer.rest(Some(nodes)))),
        }
    }

    /// The parts of nodes, by branch. A removed branch continues to send all changes.
    fn parts_of(&self, known: &[Node]) -> Option<Vec<(Arc<Branch>, Vec<Node>)>> {
        let mut all: Vec<(Arc<Branch>, Vec<Node>)> = Vec::new();
        for node in known {
            for part in self.held(node).ok()?.parts().iter().filter(|part| part.branch.is_member()) {
                match all.iter_mut().find(|(branch, _)| branch.slot == part.branch.slot) {
                    Some((_, nodes)) => nodes.push(part.node.clone()),
                    None => all.push((Arc::clone(&part.branch), vec![part.node.clone()])),
                }
            }
        }
        Some(all)
    }
}
