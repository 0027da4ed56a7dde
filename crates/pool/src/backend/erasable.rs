//! Keys of a pool that can be destroyed.
//!
//! Rows with slots and master keys are sealed under such a key: a removed row stays in free room, and can be opened by
//! nobody once the key that it was sealed under is gone. A renewal adds a key, seals all rows under it, and destroys the
//! former one when no state that can be imported needs it. Callers: the store. Implementations: the labels of devices,
//! objects of a bucket.

use super::Result;
use crate::crypt::SecretKey;

/// Erasable keys of a pool: each has a sequence number, and the catalog names the one that counts.
pub trait ErasableKeys {
    /// The keys that are there, in the order of their numbers; none in a pool that never had one.
    ///
    /// # Errors
    /// [`PoolError::Device`](crate::PoolError::Device).
    fn keys(&self) -> Result<Vec<(u64, SecretKey)>>;

    /// Adds a key durably; returns its number, which is larger than those that are there.
    ///
    /// # Errors
    /// [`PoolError::Refused`](crate::PoolError::Refused) where a renewal is not finished, or another writer has the pool;
    /// [`PoolError::Device`](crate::PoolError::Device).
    fn add(&self, key: &SecretKey) -> Result<u64>;

    /// Destroys all keys but this one. Returns the names of devices that could not be reached: they still have the
    /// others, until they return.
    ///
    /// # Errors
    /// [`PoolError::Refused`](crate::PoolError::Refused) for a key that is not there, or where another writer has the
    /// pool; [`PoolError::Device`](crate::PoolError::Device).
    fn keep(&self, sequence: u64) -> Result<Vec<String>>;
}
