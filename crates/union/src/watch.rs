//! Changes that others make on branches, told in the union's own terms.
//!
//! One thread for each branch takes what the branch sends, translates identities and passes it on; it ends when the branch stops sending.
//! A file nobody holds needs no notice: no cache knows it.

use crate::{branches::Branch, marks, union::Shared};
use nacre_vfs::{FileId, Invalidation};
use std::sync::{
    Arc, Weak,
    mpsc::{Sender, channel},
};

/// Starts watching all branches, and those that will come.
pub(crate) fn start(shared: &Arc<Shared>, out: &Sender<Invalidation>) {
    shared.watchers.lock().push(out.clone());
    for branch in shared.branches().iter() {
        watch(shared, branch, out);
    }
}

/// Starts watching one branch.
pub(crate) fn watch(shared: &Arc<Shared>, branch: &Arc<Branch>, out: &Sender<Invalidation>) {
    let (sender, receiver) = channel();
    // The branch itself would be kept for ever by whoever waits for its last word.
    let (shared, watched, out) = (Arc::downgrade(shared), Arc::downgrade(branch), out.clone());
    let work = move || {
        for notice in receiver {
            let Some(told) = translate(&shared, &watched, notice) else { continue };
            if out.send(told).is_err() {
                return;
            }
        }
    };
    match std::thread::Builder::new().name(format!("union-watch-{}", branch.slot)).spawn(work) {
        Ok(_) => branch.layer.watch(sender),
        Err(error) => tracing::error!(branch = branch.index(), %error, "changes that others make on a branch cannot be watched"),
    }
}

fn translate(shared: &Weak<Shared>, branch: &Weak<Branch>, notice: Invalidation) -> Option<Invalidation> {
    let (shared, branch) = (shared.upgrade()?, branch.upgrade()?);
    let known = |id: FileId| shared.nodes.by_part(branch.slot, id).map(|node| node.id);
    Some(match notice {
        Invalidation::Everything => {
            shared.listings.forget_all();
            Invalidation::Everything
        }
        Invalidation::Attributes { id } => Invalidation::Attributes { id: known(id)? },
        Invalidation::Content { id } => Invalidation::Content { id: known(id)? },
        Invalidation::Entry { parent, name } => entry(&shared, &branch, parent, name)?,
    })
}

fn entry(shared: &Shared, branch: &Branch, parent: FileId, name: Box<[u8]>) -> Option<Invalidation> {
    let node = shared.nodes.by_part(branch.slot, parent)?;
    shared.listings.forget(node.id);
    let Some(hidden) = name.strip_prefix(marks::PREFIX) else {
        return Some(Invalidation::Entry { parent: node.id, name });
    };
    if marks::is_reserved(hidden) {
        // An opaque mark or the whiteout of a long name; of temporary names nobody needs to know.
        let matters = *name == *marks::OPAQUE || name.starts_with(marks::LONG);
        return matters.then_some(Invalidation::Everything);
    }
    Some(Invalidation::Entry { parent: node.id, name: hidden.into() })
}
