//! Notification of damage: the reader gets the error, and the pool's administration is notified as well.
//!
//! Caller: the process that owns the pool, once. Invariant: notifications match the errors that readers get; they
//! have no other effect.

use std::fmt;
use std::sync::OnceLock;

use super::{Location, Store};
use crate::backend::Sources;
use crate::error::{Damage, PoolError};
use crate::frame::Header;
use crate::frames::Owner;
use crate::pointer::Pointer;

/// A frame that could not be read as it was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damaged {
    /// The frame's pointer.
    pub pointer: Pointer,
    /// The frame's owner; `None` where its header is unreadable.
    pub owner: Option<Owner>,
    /// The device that returned wrong bytes; `None` where that is unknown.
    pub device: Option<u16>,
    /// The frame's damage; `None` where the device could not read it at all.
    pub damage: Option<Damage>,
    /// Whether another copy was right: nothing is lost, and the damaged copy was rewritten if the pool is writable.
    pub mended: bool,
}

type Tell = Box<dyn Fn(&Damaged) + Send + Sync>;

/// The callback.
#[derive(Default)]
pub(super) struct Watcher(OnceLock<Tell>);

impl fmt::Debug for Watcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Watcher").field(&self.0.get().is_some()).finish()
    }
}

impl Store {
    /// Registers the callback for each frame that a reader finds damaged. Only the first registration counts.
    pub fn watch(&self, tell: impl Fn(&Damaged) + Send + Sync + 'static) {
        // A second registration is ignored.
        let _ = self.watcher.0.set(Box::new(tell));
    }

    pub(super) fn tell_watcher(&self, damaged: &Damaged) {
        self.watcher.0.get().iter().for_each(|tell| tell(damaged));
    }

    pub(super) fn report(&self, pointer: &Pointer, at: &Location, error: &PoolError, mended: bool) {
        self.report_of(pointer, at, error, (Some(self.backend.member(at.at(), 0)), mended));
    }

    /// Reports a frame that is damaged on this device.
    pub(super) fn report_of(
        &self,
        pointer: &Pointer,
        at: &Location,
        error: &PoolError,
        (device, mended): (Option<u16>, bool),
    ) {
        let Some(tell) = self.watcher.0.get() else { return };
        let damage = match error {
            PoolError::Frame { damage, .. } => Some(damage.clone()),
            // An unavailable store, or one that refuses access, is no statement about the content.
            PoolError::Device { .. } if self.backend.is_shared() && !error.is_of_content() => return,
            PoolError::Device { .. } => None,
            _ => return,
        };
        let mut header = [0; Pointer::HEADER as usize];
        let read = self.read_range(pointer.birth, at, Some(0), 0, &mut header, &mut Sources::default());
        let owner = read
            .and_then(|()| Header::decode(&header))
            .ok()
            .filter(|header| header.is_of(pointer))
            .map(|header| header.owner);
        tell(&Damaged { pointer: *pointer, owner, device, damage, mended });
    }
}
