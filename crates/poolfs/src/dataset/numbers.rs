//! The files of a dataset by their numbers: what a door keeps instead of nodes.
//!
//! Invariant: from the first question on, a file that loses its last name is kept until the door
//! has forgotten it, so that its number finds it for whoever still holds it without having it open
//! (a working directory, `O_PATH`).

use super::control::Control;
use super::translate::errno;
use super::volume::{self, Head, Listed, Place, Placed, Volume};
use nacre_pool::files::Inode;
use nacre_vfs::{Errno, Node, Numbered, Result};
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

/// See the file's head.
pub(super) struct Numbers {
    head: Arc<Head>,
    control: Option<Arc<Control>>,
    asked: AtomicBool,
    nameless: Mutex<HashMap<u64, Arc<Inode>>>,
    count: AtomicUsize,
}

impl Numbers {
    pub(super) fn new(head: &Arc<Head>, control: Option<&Arc<Control>>) -> Numbers {
        Numbers {
            head: Arc::clone(head),
            control: control.cloned(),
            asked: AtomicBool::new(false),
            nameless: Mutex::default(),
            count: AtomicUsize::new(0),
        }
    }

    /// A name was removed from a file, and so many are left: keeps it where that was the last.
    pub(super) fn removed(&self, (inode, left): (Arc<Inode>, u32)) {
        if left == 0 && self.asked.load(Ordering::Relaxed) {
            self.keep(inode);
        }
    }

    fn keep(&self, inode: Arc<Inode>) {
        let mut nameless = self.nameless.lock();
        nameless.insert(inode.number(), inode);
        self.count.store(nameless.len(), Ordering::Release);
    }

    /// A name is about to be replaced: the file that it leads to, where it may have to be kept.
    pub(super) fn before(&self, directory: &Placed, name: &[u8]) -> Option<Arc<Inode>> {
        if !self.asked.load(Ordering::Relaxed) {
            return None;
        }
        directory.files().ok()?.look_up(&directory.inode, name).ok().map(|(inode, _)| inode)
    }

    /// It is replaced: keeps the file where that was its last name.
    pub(super) fn after(&self, inode: Option<Arc<Inode>>) -> Result<()> {
        let Some(inode) = inode else { return Ok(()) };
        if self.head.files.files().attributes(&inode).map_err(errno)?.links == 0 {
            self.keep(inode);
        }
        Ok(())
    }
}

impl Numbered for Numbers {
    fn node(&self, number: u64) -> Result<Node> {
        self.asked.store(true, Ordering::Relaxed);
        let of = |volume: &Arc<Volume>, number| Ok(Node::new(Arc::new(Listed::new(volume, number))));
        let place = match (number, volume::split(number)) {
            (volume::CONTROL, _) => Place::Control,
            (volume::SNAPSHOTS, _) => Place::Snapshots,
            (_, (0, number)) => return of(&self.head.now(), number),
            (_, (tree, number)) if self.head.now().is_tree(tree) => return of(&self.head.now(), number),
            (_, (tree, number)) => {
                return of(&self.control.as_ref().ok_or(Errno::ESTALE)?.volume_of_tree(tree)?, number);
            }
        };
        Ok(Node::new(Arc::new(place)))
    }

    fn parent(&self, node: &Node) -> u64 {
        match volume::place(node) {
            Some(Place::File(placed)) => {
                let own = placed.inode.number();
                let hint =
                    placed.files().ok().and_then(|files| files.attributes(&placed.inode).ok()).and_then(|row| row.hint);
                match hint {
                    None if placed.volume.is_past() && !Arc::ptr_eq(&placed.volume, &self.head.now()) => {
                        volume::SNAPSHOTS
                    }
                    hint => placed.volume.shown(hint.map_or(own, |hint| hint.directory)),
                }
            }
            Some(Place::Snapshots) => volume::CONTROL,
            Some(Place::Control) | None => volume::ROOT,
        }
    }

    fn generation(&self, number: u64) -> u32 {
        if volume::split(number).0 == 0 { self.head.generation() } else { 0 }
    }

    fn folds(&self, _directory: &Node) -> bool {
        // Snapshots have what the file system has.
        !self.head.files.files().folding().is_exact()
    }

    fn forgotten(&self, number: u64) {
        if self.count.load(Ordering::Acquire) == 0 {
            return;
        }
        let gone = {
            let mut nameless = self.nameless.lock();
            let gone = nameless.remove(&number);
            self.count.store(nameless.len(), Ordering::Release);
            gone
        };
        // Freed outside of the lock.
        drop(gone);
    }
}
