//! Encryption of frames, log records and keys.
//!
//! Callers: the adapter between the engine and the store, the key table. The design is in
//! `docs/decisions/encryption.md`. Invariants:
//! - The cipher library gets derived keys only, each for one message.
//! - A key is wiped when its owner is dropped, and has no `Debug`.

mod child_entry;
mod derive;
mod frames;
mod key_table;
mod keyring;
mod message;
mod node_form;
mod sealed_box;
mod sealers;
mod slots;
mod stored_form;
#[cfg(test)]
mod tests;

use ring::rand::SecureRandom as _;

pub use child_entry::{ADDRESS, ChildEntry, PORTABLE};
pub use derive::{KeyPurpose, KeyView, Mac, SecretKey, derive, mac};
#[cfg(test)]
pub(crate) use frames::tests::family as family_for_tests;
pub use frames::{PlainFrames, SealedFrames};
pub use key_table::{DamagedRows, KeyTable};
pub use keyring::{FamilyKeys, Generation, Keyring, LockedKey};
pub use message::{Cipher, NONCE, TAG, WrongSeal, open_message, seal_message};
pub use node_form::ShortNode;
pub use sealed_box::{BOX_OVERHEAD, open_box, seal_box};
pub use sealers::Sealers;
pub use slots::{KeyError, NewSlot, Secret, Stopwatch, choose_cost, commitment, open_slot, seal_slot};
pub use stored_form::{CHILDREN_MAX, FrameKeys, NewContent, NewSeal, PREFIX, StoredForm, rehash, seal_frame};
#[cfg(test)]
pub(crate) use tests::hex_of as hex_for_tests;

use crate::error::PoolError;

/// Length of a frame id, crypt id, branch or session, bytes.
pub const ID: usize = 16;

/// Source of random bytes: the kernel, or a fixed sequence in tests.
pub trait RandomBytes: Send + Sync {
    /// Fills the buffer with random bytes.
    ///
    /// # Errors
    /// [`PoolError::Refused`] where the source fails.
    fn fill(&self, buffer: &mut [u8]) -> Result<(), PoolError>;
}

/// Random bytes of getrandom(2): one call for each use, no buffer.
#[derive(Debug)]
pub struct SystemRandom(ring::rand::SystemRandom);

impl Default for SystemRandom {
    fn default() -> Self {
        Self(ring::rand::SystemRandom::new())
    }
}

impl RandomBytes for SystemRandom {
    fn fill(&self, buffer: &mut [u8]) -> Result<(), PoolError> {
        self.0.fill(buffer).map_err(|_| PoolError::Refused("the kernel returned no random bytes".to_owned()))
    }
}
