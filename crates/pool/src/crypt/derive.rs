//! Keys, their derivation, and message authentication codes: BLAKE3 in the modes `derive_key` and keyed hash.
//!
//! Callers: all of `crypt`. Invariant: a context string belongs to one purpose, and is part of the format.

use std::sync::OnceLock;

use zeroize::Zeroize as _;

use super::ID;
use crate::error::PoolError;

/// Length of a key, bytes.
pub(super) const KEY: usize = 32;

/// A secret of 32 bytes, wiped when it is dropped. It has neither `Clone` nor `Debug` nor `PartialEq`. It lies on the
/// heap: a move of the value leaves no copy of the secret on the stack.
pub struct SecretKey(Box<[u8; KEY]>);

impl SecretKey {
    /// Takes over a secret, and wipes the caller's copy.
    #[must_use]
    pub fn take(bytes: &mut [u8; KEY]) -> Self {
        let mut key = Self(Box::new([0; KEY]));
        key.0.copy_from_slice(bytes);
        bytes.zeroize();
        key
    }

    /// A copy of a secret; `None` for another length.
    #[must_use]
    pub fn from_slice(bytes: &[u8]) -> Option<Self> {
        let mut key = Self(Box::new([0; KEY]));
        if bytes.len() != KEY {
            return None;
        }
        key.0.copy_from_slice(bytes);
        Some(key)
    }

    /// A secret that the function `write` writes to its place.
    ///
    /// # Errors
    /// Errors of `write`.
    pub fn made<E>(write: impl FnOnce(&mut [u8; KEY]) -> Result<(), E>) -> Result<Self, E> {
        let mut key = Self(Box::new([0; KEY]));
        write(&mut key.0)?;
        Ok(key)
    }

    /// The key as a parent of derived keys.
    #[must_use]
    pub fn view(&self) -> KeyView<'_> {
        KeyView(&self.0)
    }

    /// Another copy of the secret.
    #[must_use]
    pub fn copy(&self) -> Self {
        let mut key = Self(Box::new([0; KEY]));
        key.0.copy_from_slice(&*self.0);
        key
    }

    /// The secret's bytes, for a cipher or a hash.
    pub(crate) fn expose(&self) -> &[u8; KEY] {
        &self.0
    }

    /// Overwrites the secret with zeros.
    pub(super) fn wipe(&mut self) {
        self.0.zeroize();
    }
}

impl Drop for SecretKey {
    fn drop(&mut self) {
        self.wipe();
    }
}

/// A key that others are derived from, wherever it lies: in a [`SecretKey`], or in the keyring's locked memory. No
/// cipher takes one.
#[derive(Clone, Copy)]
pub struct KeyView<'a>(pub(super) &'a [u8; KEY]);

/// Use of a derived key; each has a context string of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyPurpose {
    /// Key of a frame sealed by AES-256-GCM; input: the frame id.
    FrameAes,
    /// Key of a frame sealed by ChaCha20-Poly1305; input: the frame id.
    FrameChaCha,
    /// Mask of the owner in a frame's header; input: the frame id.
    FrameOwner,
    /// Key of a log record sealed by AES-256-GCM; input: a salt.
    LogAes,
    /// Key of a log record sealed by ChaCha20-Poly1305; input: a salt.
    LogChaCha,
    /// MAC key of seals.
    Seal,
    /// MAC key of property names.
    PropertyName,
    /// Slot key of a passphrase, from the output of Argon2id.
    SlotPassphrase,
    /// Slot key of a random secret of 32 bytes.
    SlotSecret,
    /// Commitment to a root key.
    Commitment,
    /// MAC key of frame ids of a target, from its seed.
    TargetId,
    /// MAC key of salts.
    Salt,
    /// Key of a slot's box; input: a salt.
    BoxSlot,
    /// Key of a master key's box; input: a salt.
    BoxMaster,
    /// Key of a box under the pool's erasable key; input: a salt.
    BoxErasable,
    /// Key of a user property's box; input: a salt.
    BoxProperty,
    /// Key of a target's box; input: a salt.
    BoxTarget,
}

/// Hash states in which the context strings are hashed already, by the number of the purpose.
static CONTEXTS: [OnceLock<blake3::Hasher>; KeyPurpose::ALL.len()] = [const { OnceLock::new() }; KeyPurpose::ALL.len()];

impl KeyPurpose {
    /// All purposes, in the order of their numbers.
    pub const ALL: [Self; 17] = [
        Self::FrameAes,
        Self::FrameChaCha,
        Self::FrameOwner,
        Self::LogAes,
        Self::LogChaCha,
        Self::Seal,
        Self::PropertyName,
        Self::SlotPassphrase,
        Self::SlotSecret,
        Self::Commitment,
        Self::TargetId,
        Self::Salt,
        Self::BoxSlot,
        Self::BoxMaster,
        Self::BoxErasable,
        Self::BoxProperty,
        Self::BoxTarget,
    ];

    /// The context string, a constant of the format.
    #[must_use]
    pub const fn context(self) -> &'static str {
        match self {
            Self::FrameAes => "nacre 2026-12 frame aes-256-gcm",
            Self::FrameChaCha => "nacre 2026-12 frame chacha20-poly1305",
            Self::FrameOwner => "nacre 2026-12 frame owner",
            Self::LogAes => "nacre 2026-12 log aes-256-gcm",
            Self::LogChaCha => "nacre 2026-12 log chacha20-poly1305",
            Self::Seal => "nacre 2026-12 seal",
            Self::PropertyName => "nacre 2026-12 property name",
            Self::SlotPassphrase => "nacre 2026-12 slot passphrase",
            Self::SlotSecret => "nacre 2026-12 slot secret",
            Self::Commitment => "nacre 2026-12 commitment",
            Self::TargetId => "nacre 2026-12 target id",
            Self::Salt => "nacre 2026-12 salt",
            Self::BoxSlot => "nacre 2026-12 box slot",
            Self::BoxMaster => "nacre 2026-12 box master",
            Self::BoxErasable => "nacre 2026-12 box erasable",
            Self::BoxProperty => "nacre 2026-12 box property",
            Self::BoxTarget => "nacre 2026-12 box target",
        }
    }

    /// Length of the input in addition to the parent key, bytes.
    const fn input_length(self) -> usize {
        match self {
            Self::FrameAes | Self::FrameChaCha | Self::FrameOwner => ID,
            Self::LogAes
            | Self::LogChaCha
            | Self::BoxSlot
            | Self::BoxMaster
            | Self::BoxErasable
            | Self::BoxProperty
            | Self::BoxTarget => 32,
            Self::Seal
            | Self::PropertyName
            | Self::SlotPassphrase
            | Self::SlotSecret
            | Self::Commitment
            | Self::TargetId
            | Self::Salt => 0,
        }
    }

    /// A hash state that has the context string.
    fn hasher(self) -> blake3::Hasher {
        let new = || blake3::Hasher::new_derive_key(self.context());
        match CONTEXTS.get(self as usize) {
            Some(state) => state.get_or_init(new).clone(),
            None => new(),
        }
    }
}

/// Derives a key from a parent key and an input.
///
/// # Errors
/// [`PoolError::Refused`] for an input that does not have the purpose's length.
pub fn derive(purpose: KeyPurpose, parent: KeyView<'_>, input: &[u8]) -> Result<SecretKey, PoolError> {
    if input.len() != purpose.input_length() {
        let context = purpose.context();
        return Err(PoolError::Refused(format!("an input of {} bytes for the context `{context}`", input.len())));
    }
    let mut hasher = purpose.hasher();
    hasher.update(parent.0);
    hasher.update(input);
    let mut hash = hasher.finalize();
    hasher.zeroize();
    let mut key = SecretKey(Box::new([0; KEY]));
    key.0.copy_from_slice(hash.as_bytes());
    hash.zeroize();
    Ok(key)
}

/// A message authentication code of 32 bytes. Its comparison takes constant time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mac(blake3::Hash);

impl Mac {
    /// A code that was stored.
    #[must_use]
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(blake3::Hash::from_bytes(bytes))
    }

    /// The code's bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; 32] {
        self.0.as_bytes()
    }

    /// The first bytes of the code.
    #[must_use]
    pub fn first<const N: usize>(&self) -> [u8; N] {
        const { assert!(N <= 32, "a code has 32 bytes") };
        let mut first = [0; N];
        first.iter_mut().zip(self.as_bytes()).for_each(|(to, byte)| *to = *byte);
        first
    }
}

/// Computes keyed BLAKE3 of the concatenation of the parts.
#[must_use]
pub fn mac(key: &SecretKey, parts: &[&[u8]]) -> Mac {
    let mut hasher = blake3::Hasher::new_keyed(key.expose());
    for part in parts {
        hasher.update(part);
    }
    let mac = Mac(hasher.finalize());
    hasher.zeroize();
    mac
}
