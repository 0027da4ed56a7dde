//! Telling somebody of damage as it is met: who reads gets the error, whoever administers the pool
//! hears of it as well.
//!
//! Caller: the process that owns the pool, once. Invariant: what is told is what readers were told;
//! being told changes nothing.

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
    /// Its pointer.
    pub pointer: Pointer,
    /// Whose it is; `None` where its header cannot be read.
    pub owner: Option<Owner>,
    /// Which of the pool's devices has given wrong bytes; `None` where that is not known.
    pub device: Option<u16>,
    /// What is wrong; `None` where the device could not read it at all.
    pub damage: Option<Damage>,
    /// Another copy was whole: nothing is lost, and the damaged one was written anew where the pool
    /// may be written to.
    pub mended: bool,
}

type Tell = Box<dyn Fn(&Damaged) + Send + Sync>;

/// Who is told.
#[derive(Default)]
pub(super) struct Watcher(OnceLock<Tell>);

impl fmt::Debug for Watcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Watcher").field(&self.0.get().is_some()).finish()
    }
}

impl Store {
    /// Has somebody told of each frame that a reader finds damaged. The first one stays.
    pub fn watch(&self, tell: impl Fn(&Damaged) + Send + Sync + 'static) {
        // A second one has nobody to report to.
        let _ = self.watcher.0.set(Box::new(tell));
    }

    pub(super) fn tell_watcher(&self, damaged: &Damaged) {
        self.watcher.0.get().iter().for_each(|tell| tell(damaged));
    }

    pub(super) fn report(&self, pointer: &Pointer, at: &Location, error: &PoolError, mended: bool) {
        self.report_of(pointer, at, error, (Some(self.backend.member(at.at(), 0)), mended));
    }

    /// The same of what is damaged on this device.
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
            // A store that is away, or refuses, says nothing of what is there.
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
