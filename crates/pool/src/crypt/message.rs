//! Sealing of messages by an authenticated cipher.
//!
//! Callers: stored frames, log records, boxes. Invariant: a key seals one message.

use ring::aead::{AES_256_GCM, Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};
use zeroize::Zeroize as _;

use super::derive::SecretKey;
use crate::error::{Damage, PoolError};

/// Length of a tag, bytes.
pub const TAG: usize = 16;
/// Length of a nonce, bytes.
pub const NONCE: usize = 12;

/// An authenticated cipher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Cipher {
    /// AES-256-GCM.
    Aes256Gcm = 1,
    /// ChaCha20-Poly1305.
    ChaCha20Poly1305 = 2,
}

impl TryFrom<u8> for Cipher {
    type Error = PoolError;

    fn try_from(byte: u8) -> Result<Self, PoolError> {
        match byte {
            1 => Ok(Self::Aes256Gcm),
            2 => Ok(Self::ChaCha20Poly1305),
            _ => Err(PoolError::Format(Damage::Structure("unknown cipher"))),
        }
    }
}

impl Cipher {
    /// The faster cipher on this processor: AES-256-GCM where there are instructions for it.
    #[must_use]
    pub fn preferred() -> Self {
        if has_aes_instructions() { Self::Aes256Gcm } else { Self::ChaCha20Poly1305 }
    }

    fn bind(self, key: &SecretKey) -> Result<LessSafeKey, ring::error::Unspecified> {
        let cipher = match self {
            Self::Aes256Gcm => &AES_256_GCM,
            Self::ChaCha20Poly1305 => &CHACHA20_POLY1305,
        };
        Ok(LessSafeKey::new(UnboundKey::new(cipher, key.expose())?))
    }
}

#[cfg(target_arch = "x86_64")]
fn has_aes_instructions() -> bool {
    std::arch::is_x86_feature_detected!("aes") && std::arch::is_x86_feature_detected!("pclmulqdq")
}

#[cfg(target_arch = "aarch64")]
fn has_aes_instructions() -> bool {
    std::arch::is_aarch64_feature_detected!("aes")
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn has_aes_instructions() -> bool {
    false
}

/// The tag does not match: another key, other associated data, or changed bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrongSeal;

/// Encrypts a message in place and returns the tag. The key must not seal another message.
///
/// # Errors
/// [`PoolError::Refused`] for a message that is longer than the cipher allows (64 GiB).
pub fn seal_message(
    cipher: Cipher,
    key: &SecretKey,
    nonce: [u8; NONCE],
    associated: &[u8],
    body: &mut [u8],
) -> Result<[u8; TAG], PoolError> {
    let refused = |_| PoolError::Refused("a message cannot be sealed".to_owned());
    let key = cipher.bind(key).map_err(refused)?;
    let nonce = Nonce::assume_unique_for_key(nonce);
    let sealed = key.seal_in_place_separate_tag(nonce, Aad::from(associated), body).map_err(refused)?;
    let mut tag = [0; TAG];
    tag.iter_mut().zip(sealed.as_ref()).for_each(|(to, byte)| *to = *byte);
    Ok(tag)
}

/// Decrypts a message in place.
///
/// # Errors
/// [`WrongSeal`] where the tag does not match; the body is zeros then.
pub fn open_message(
    cipher: Cipher,
    key: &SecretKey,
    nonce: [u8; NONCE],
    associated: &[u8],
    body: &mut [u8],
    tag: [u8; TAG],
) -> Result<(), WrongSeal> {
    let nonce = Nonce::assume_unique_for_key(nonce);
    let opened = cipher
        .bind(key)
        .and_then(|key| key.open_in_place_separate_tag(nonce, Aad::from(associated), tag.into(), body, 0..).map(drop));
    opened.map_err(|_| {
        body.zeroize();
        WrongSeal
    })
}
