//! Boxes: small secrets sealed under a parent key.
//!
//! Callers: the key table, sealed properties. A box is a salt (32 bytes), the ciphertext, and the tag (16 bytes).

use zeroize::Zeroizing;

use super::RandomBytes;
use super::derive::{KeyPurpose, KeyView, derive, mac};
use super::message::{Cipher, NONCE, TAG, WrongSeal, open_message, seal_message};
use crate::error::PoolError;

/// Length of a salt, bytes.
const SALT: usize = 32;
/// Length of a box in addition to its secret, bytes: salt and tag.
pub const BOX_OVERHEAD: usize = SALT + TAG;

/// Associated data of a box: the context string and the fields, each with its length, so that no byte can move from
/// one field to the next.
fn joined(purpose: KeyPurpose, associated: &[&[u8]]) -> Vec<u8> {
    let mut joined = Vec::with_capacity(128);
    for part in std::iter::once(purpose.context().as_bytes()).chain(associated.iter().copied()) {
        joined.extend_from_slice(&(part.len() as u32).to_le_bytes());
        joined.extend_from_slice(part);
    }
    joined
}

/// Seals a secret under a parent key. `purpose` is a purpose of boxes.
///
/// # Errors
/// [`PoolError::Refused`] for another purpose, or where there are no random bytes.
pub fn seal_box(
    random: &dyn RandomBytes,
    purpose: KeyPurpose,
    parent: KeyView<'_>,
    associated: &[&[u8]],
    secret: &[u8],
) -> Result<Vec<u8>, PoolError> {
    let mut bytes = [0; SALT];
    random.fill(&mut bytes)?;
    let associated = joined(purpose, associated);
    // The salt depends on the secret and on the associated data as well, for copies of a virtual machine that get equal
    // random bytes.
    let length = (secret.len() as u32).to_le_bytes();
    let salt = mac(&derive(KeyPurpose::Salt, parent, &[])?, &[&bytes, &length, secret, &associated]);
    let key = derive(purpose, parent, salt.as_bytes())?;
    let mut sealed = Vec::with_capacity(secret.len() + BOX_OVERHEAD);
    sealed.extend_from_slice(salt.as_bytes());
    sealed.extend_from_slice(secret);
    let body = sealed.get_mut(SALT..).unwrap_or_default();
    let tag = seal_message(Cipher::ChaCha20Poly1305, &key, [0; NONCE], &associated, body)?;
    sealed.extend_from_slice(&tag);
    Ok(sealed)
}

/// Opens a box. The secret is wiped when it is dropped.
///
/// # Errors
/// [`WrongSeal`] for another purpose, parent key or associated data, and for a changed box.
pub fn open_box(
    purpose: KeyPurpose,
    parent: KeyView<'_>,
    associated: &[&[u8]],
    sealed: &[u8],
) -> Result<Zeroizing<Vec<u8>>, WrongSeal> {
    let Some((salt, rest)) = sealed.split_first_chunk::<SALT>() else { return Err(WrongSeal) };
    let Some((body, tag)) = rest.split_last_chunk::<TAG>() else { return Err(WrongSeal) };
    let key = derive(purpose, parent, salt).map_err(|_| WrongSeal)?;
    let mut secret = Zeroizing::new(body.to_vec());
    let associated = joined(purpose, associated);
    open_message(Cipher::ChaCha20Poly1305, &key, [0; NONCE], &associated, &mut secret, *tag)?;
    Ok(secret)
}
