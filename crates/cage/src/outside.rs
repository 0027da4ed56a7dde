//! Changes by other processes in the layer below: forwarded to the FUSE front end, and booked.
//!
//! Started by the layer's `watch`. A file that has an entry in the cage is examined and its cost
//! corrected; for any other file the booked cost is unknown, so a recount becomes due.

use super::CageShared;
use nacre_vfs::{Description, FileId, Invalidation};
use parking_lot::Mutex;
use std::sync::{
    Arc, Weak,
    mpsc::{Receiver, Sender, channel},
};

/// Puts the cage between the watch of the layer below and the FUSE front end.
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

/// Whether a leaf watches directory by directory (inotify), and so reports our own changes of names
/// as well.
fn watches_directories(layer: &Description) -> bool {
    layer.settings.iter().any(|(key, value)| key == "watch" && value == "inotify")
        || layer.below.iter().any(watches_directories)
}

/// Forwards and books invalidations; ends when the watch below closes its channel.
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
        // The root's own blocks are not counted; new names are reported separately.
        return;
    }
    // The watch may cover a whole file system: ignore files outside of the cage.
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
        // Its booked cost is unknown.
        None => shared.background.doubt(),
    }
}
