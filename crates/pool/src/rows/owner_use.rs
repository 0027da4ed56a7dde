//! Space used by a user or group in a dataset: for `userspace`, user and group quotas. Changed
//! together with the owner's inodes.

use super::whole;
use crate::codec::Writer;
use crate::error::PoolError;

/// Value of an owner's row; an owner without usage has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OwnerUse {
    /// Sum of the charged bytes of the owner's inodes, and of their charges for rows.
    pub bytes: u64,
    /// Number of inodes of the owner.
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
    /// [`PoolError::Format`] for invalid bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, PoolError> {
        whole(bytes, |from| Ok(Self { bytes: from.varint()?, objects: from.varint()? }))
    }
}
