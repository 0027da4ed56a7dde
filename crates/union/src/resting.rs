//! A union that nobody asks: its branches listen to less.
//!
//! Called by the door (`Layer::rest`), which tells what the kernel may know. Of a file of the
//! union, that is what it is made of on the branches: so each branch is told its own part of each,
//! and hears of all of them by themselves. Nothing else is worth hearing:
//! * A directory comes to one more branch, or goes, or is hidden, by a change of names in a
//!   directory above it. That is known, too, as the kernel knows no file without the directories
//!   above it. What is then made in the directory on that branch is not heard. It need not be: with
//!   the notice of the change the kernel is to ask for all names again (`watch.rs`), and whoever
//!   looks one up wakes the branch before it is read.
//! * Who is in such a directory already, and so does not look it up, goes on seeing what it was
//!   made of, as in a union that does not rest.
//! * The union itself keeps listings, also of directories that only a name in them keeps alive, and
//!   nobody else knows. They go when the rest begins; whoever lists again wakes all branches that
//!   he reads.

use crate::{UnionShared, branches::Branch};
use nacre_vfs::Node;
use std::sync::Arc;

impl UnionShared {
    /// See `Layer::rest`.
    pub(crate) fn rest(&self, known: Option<&[Node]>) -> bool {
        // Whoever changes branches may wait for the very thread of the door that asks.
        let Some(_branches) = self.gate.try_read() else { return known.is_none() };
        let branches = self.branches();
        match known {
            // Each of them has to be told.
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

    /// What files of the union are made of, by branch. One that has been removed goes on hearing
    /// everything.
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
