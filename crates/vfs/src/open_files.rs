//! Waiting for close: a front end knows of open files of which a layer does not know.
//!
//! close(2) returns before the front end gets the last close of the file, and a front end may keep a file open that
//! has no user. A layer with an operation that needs a file to be closed by all users counts its own open files, and
//! asks its front end to wait ([`OpenFileHost`]).

use crate::FileId;
use std::{
    sync::{Mutex, PoisonError, Weak},
    time::Duration,
};

/// The front end's side of waiting for closes.
pub trait OpenFileHost: Send + Sync {
    /// Waits until `closed` returns true, for `most` at most; returns its last result. It is called at first, and
    /// then after each close that the front end notices, of whatever kind. The front end first closes kept open files
    /// of `files`.
    ///
    /// No lock may be held that an operation or a close needs: other requests continue meanwhile.
    fn wait_closed(&self, files: &[FileId], most: Duration, closed: &mut dyn FnMut() -> bool) -> bool;

    /// Notes that the handoff state of this file's open files ([`crate::OpenFile::left`]) has changed. The previous
    /// state stays open as long as the open files. Locks of the layer may be held. Nothing to do for a front end
    /// without handoff.
    fn left_changed(&self, _file: FileId) {}
}

/// A layer that may have to wait for files to be closed.
pub trait OpenFileClient: Send + Sync {
    /// Sets the front end through which files are opened from now on. Called before the first lookup; a layer over
    /// others forwards it to them.
    fn attach(&self, door: Weak<dyn OpenFileHost>);
}

/// The front end of a layer, once it has one.
#[derive(Default)]
pub struct AttachedDoor(Mutex<Option<Weak<dyn OpenFileHost>>>);

impl AttachedDoor {
    /// Sets the front end; the last one counts: a layer has one front end at a time.
    pub fn attach(&self, door: Weak<dyn OpenFileHost>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(door);
    }

    /// Returns the front end, for layers that are added later.
    pub fn get(&self) -> Option<Weak<dyn OpenFileHost>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// As [`OpenFileHost::left_changed`].
    pub fn left_changed(&self, file: FileId) {
        if let Some(door) = self.get().and_then(|door| door.upgrade()) {
            door.left_changed(file);
        }
    }

    /// As [`OpenFileHost::wait_closed`]. Without a front end, each close reaches the layer at once.
    pub fn wait_closed(&self, files: &[FileId], most: Duration, closed: &mut dyn FnMut() -> bool) -> bool {
        match self.get().and_then(|door| door.upgrade()) {
            Some(door) => door.wait_closed(files, most, closed),
            None => closed(),
        }
    }
}
