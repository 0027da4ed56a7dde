//! Changes that others make below: passed on to the door, and booked.
//!
//! Started by the layer's `watch`. A file that the cage has an entry of is examined and its cost
//! corrected; of anything else it is not known what was booked, so a recount is due.

use super::CageShared;
use nacre_vfs::{Description, FileId, Invalidation};
use parking_lot::Mutex;
use std::sync::{
    Arc, Weak,
    mpsc::{Receiver, Sender, channel},
};

/// Puts the cage between what watches below and the door.
pub(super) fn watch(shared: &Arc<CageShared>, door: Sender<Invalidation>) {
    if shared.doors.notices.set(Mutex::new(door.clone())).is_err() {
        tracing::error!("a cage was asked twice to tell of changes; the first one who asked is told");
        return;
    }
    let (tell, told) = channel();
    shared.below.watch(tell);
    if watches_directories(&shared.below.describe()) {
        shared.background.expect_own_names();
    }
    let weak = Arc::downgrade(shared);
    let thread =
        std::thread::Builder::new().name("nacre-cage-watch".into()).spawn(move || pass_on(&weak, &told, &door));
    if let Err(error) = thread {
        tracing::error!(%error, "no thread for changes from outside: they reach neither the accounts nor the caches");
    }
}

/// Whether a leaf watches directory by directory, and so reports our own changes of names as well.
fn watches_directories(layer: &Description) -> bool {
    layer.settings.iter().any(|(key, value)| key == "watch" && value == "inotify")
        || layer.below.iter().any(watches_directories)
}

/// Ends when whoever watches does.
fn pass_on(shared: &Weak<CageShared>, told: &Receiver<Invalidation>, door: &Sender<Invalidation>) {
    while let Ok(notice) = told.recv() {
        let Some(shared) = shared.upgrade() else { return };
        if door.send(notice.clone()).is_err() {
            tracing::debug!("no door listens any more; the accounts go on being kept");
        }
        if shared.resting.books_are_old() {
            continue;
        }
        match notice {
            Invalidation::Content { id } | Invalidation::Attributes { id } => examine(&shared, &id),
            Invalidation::Entry { parent, name } | Invalidation::Forget { parent, name } => {
                if !shared.background.was_own(&name) && shared.background.has(&parent) {
                    shared.background.doubt();
                }
            }
            Invalidation::Names | Invalidation::Everything => shared.background.doubt(),
        }
    }
}

fn examine(shared: &CageShared, id: &FileId) {
    if *id == shared.root {
        // Its own blocks are not counted; new names are reported by themselves.
        return;
    }
    // A whole file system may be watched: what lies elsewhere is none of ours.
    if shared.background.was_own_id(id) || !shared.background.has(id) {
        return;
    }
    let Some(inode) = shared.inodes.find(id) else {
        shared.background.doubt();
        return;
    };
    let mut state = inode.lock();
    if state.gone {
        return;
    }
    match state.node.clone().filter(|_| state.loaded) {
        Some(node) => {
            state.unsure();
            shared.refresh(&inode, &mut state, &node, None);
        }
        // What is booked for it is not known.
        None => shared.background.doubt(),
    }
}
