//! Waiting for close: which files are open is known to a door before a layer hears of it.
//!
//! close(2) returns before the door is told that nobody has the file open any more, and a door may
//! keep a file open that nobody has. A layer that can do something only with files that nobody has
//! open keeps the count of its own open files, and asks its door to wait ([`OpenFileHost`]).

use crate::FileId;
use std::{
    sync::{Mutex, PoisonError, Weak},
    time::Duration,
};

/// The door's side.
pub trait OpenFileHost: Send + Sync {
    /// Waits until `closed` says that what the layer waits for is closed, at most so long; answers
    /// what it said last. Asked at first, and then after each close that the door hears of, in
    /// whatever way it does. Of `files`, the door first lets go what it keeps open by itself.
    ///
    /// No lock may be held that an operation or a close needs: other requests go on meanwhile.
    fn wait_closed(&self, files: &[FileId], most: Duration, closed: &mut dyn FnMut() -> bool) -> bool;

    /// What open files of this one leave to a process after this one ([`crate::OpenFile::left`]) is
    /// something else now. What they left before stays open as long as they are. Locks of the layer
    /// may be held. Nothing to do for a door that leaves nothing.
    fn left_changed(&self, _file: FileId) {}
}

/// A layer that may have to wait for files to be closed.
pub trait OpenFileClient: Send + Sync {
    /// The door that files are opened through from now on. Called before the first look-up; a layer
    /// over others tells them as well.
    fn attach(&self, door: Weak<dyn OpenFileHost>);
}

/// The door of a layer, once it has one.
#[derive(Default)]
pub struct AttachedDoor(Mutex<Option<Weak<dyn OpenFileHost>>>);

impl AttachedDoor {
    /// The last one counts: a layer is behind one door at a time.
    pub fn attach(&self, door: Weak<dyn OpenFileHost>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(door);
    }

    /// The door, for layers that come later.
    pub fn get(&self) -> Option<Weak<dyn OpenFileHost>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// As [`OpenFileHost::left_changed`].
    pub fn left_changed(&self, file: FileId) {
        if let Some(door) = self.get().and_then(|door| door.upgrade()) {
            door.left_changed(file);
        }
    }

    /// As [`OpenFileHost::wait_closed`]. Without a door whoever closes a file has closed it in the
    /// layer.
    pub fn wait_closed(&self, files: &[FileId], most: Duration, closed: &mut dyn FnMut() -> bool) -> bool {
        match self.get().and_then(|door| door.upgrade()) {
            Some(door) => door.wait_closed(files, most, closed),
            None => closed(),
        }
    }
}
