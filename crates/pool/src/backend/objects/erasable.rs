//! Erasable keys in a bucket: objects of their own, `erase/SEQUENCE` with the key (32 bytes) and a checksum (16).
//!
//! Caller: the store, by [`ErasableKeys`]. Invariants:
//! - An object is created under a new name, and never replaced: another writer's key is not lost.
//! - Keys are created and deleted by a writer that owns the pool: it has put a root, and a list that was made after the
//!   one of the keys shows no newer root. So it never deletes the key of a later writer.
//! - A key that no row names, which an overtaken writer has left, opens nothing. The next renewal deletes it.

use super::{MAKING, Objects, Result, attempt, make, own_keys, read_whole};
use crate::backend::ErasableKeys;
use crate::checksum;
use crate::crypt::SecretKey;
use crate::error::{Damage, PoolError};

const KEYS: &str = "erase/";
/// Length of a key, bytes.
const KEY: usize = 32;

fn object_key(sequence: u64) -> String {
    format!("{KEYS}{sequence:020}")
}

fn sequence_of(key: &str) -> Option<u64> {
    let sequence = key.strip_prefix(KEYS)?.parse().ok()?;
    (sequence > 0 && object_key(sequence) == key).then_some(sequence)
}

/// The checksum of a key, which is bound to its number.
fn sum(sequence: u64, key: &[u8]) -> [u8; 16] {
    let bytes = zeroize::Zeroizing::new([sequence.to_le_bytes().as_slice(), key].concat());
    checksum::structure(&bytes)
}

fn decode(sequence: u64, body: &[u8]) -> Result<SecretKey> {
    let damaged = PoolError::Format(Damage::Structure("an erasable key"));
    let Some((key, found)) = body.split_at_checked(KEY) else { return Err(damaged) };
    if *found != sum(sequence, key) {
        return Err(damaged);
    }
    SecretKey::from_slice(key).ok_or(damaged)
}

impl Objects {
    /// The numbers of the keys in the bucket.
    fn listed_sequences(&self) -> Result<Vec<u64>> {
        Ok(own_keys(&*self.bucket, KEYS, "")?.iter().filter_map(|key| sequence_of(key)).collect())
    }

    /// Fails unless this writer owns the pool.
    fn check_owner(&self) -> Result<()> {
        let (last, is_fenced) = {
            let state = self.state.lock();
            (state.last, state.is_fenced)
        };
        if let Some((generation, _)) = last
            && !is_fenced
            && !self.has_newer(generation)?
            && self.has_own_root()?
        {
            return Ok(());
        }
        Err(PoolError::Refused(format!("{}: another writer has the pool", self.bucket.name())))
    }
}

impl ErasableKeys for Objects {
    fn keys(&self) -> Result<Vec<(u64, SecretKey)>> {
        let mut keys = Vec::new();
        for sequence in self.listed_sequences()? {
            let read = read_whole(&*self.bucket, "reading", &object_key(sequence), |body| decode(sequence, body))?;
            match read {
                Some(Ok(key)) => keys.push((sequence, key)),
                Some(Err(error @ PoolError::Format(_))) => {
                    tracing::warn!(key = object_key(sequence), %error, "an erasable key is damaged");
                }
                Some(Err(error)) => return Err(error),
                // Deleted meanwhile.
                None => {}
            }
        }
        Ok(keys)
    }

    fn add(&self, key: &SecretKey) -> Result<u64> {
        let mut sequence = self.listed_sequences()?.last().copied().unwrap_or(0);
        self.check_owner()?;
        for _ in 0..MAKING {
            sequence = sequence.saturating_add(1);
            let mut body = zeroize::Zeroizing::new(Vec::with_capacity(KEY + 16));
            body.extend_from_slice(key.expose());
            body.extend_from_slice(&sum(sequence, key.expose()));
            if make(&*self.bucket, &object_key(sequence), &body)? {
                return Ok(sequence);
            }
            // An overtaken writer has created one at the same moment.
        }
        Err(PoolError::Refused(format!("{}: other writers keep adding erasable keys", self.bucket.name())))
    }

    fn keep(&self, sequence: u64) -> Result<Vec<String>> {
        let listed = self.listed_sequences()?;
        // After the list: a later writer puts its root before it adds a key.
        self.check_owner()?;
        let kept = read_whole(&*self.bucket, "reading", &object_key(sequence), |body| decode(sequence, body))?;
        match kept {
            Some(Ok(_)) => {}
            Some(Err(error)) => return Err(error),
            None => return Err(PoolError::Refused("the pool's erasable key is not there".to_owned())),
        }
        for other in listed.into_iter().filter(|listed| *listed != sequence) {
            let key = object_key(other);
            attempt(&*self.bucket, "removing from", || self.bucket.delete(&key))?;
        }
        Ok(Vec::new())
    }
}

#[cfg(test)]
mod tests;
