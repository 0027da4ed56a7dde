//! What a user or group uses in a dataset: for `userspace`, user and group quotas. Changed together
//! with the inode whose owner it counts.

use super::whole;
use crate::codec::Writer;
use crate::error::PoolError;

/// The value of an owner's row; an owner who uses nothing has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OwnerUse {
    /// Sum of the charged bytes of the owner's inodes, and of their charges for rows.
    pub bytes: u64,
    /// How many inodes the owner has.
    pub objects: u64,
}

impl OwnerUse {
    /// The row's value.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut to = Writer::default();
        to.varint(self.bytes);
        to.varint(self.objects);
        to.finish()
    }

    /// Reads the row's value.
    ///
    /// # Errors
    /// [`PoolError::Format`] for bytes that are no such value.
    pub fn decode(bytes: &[u8]) -> Result<Self, PoolError> {
        whole(bytes, |from| Ok(Self { bytes: from.varint()?, objects: from.varint()? }))
    }
}
