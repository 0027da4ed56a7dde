//! The head of a dataset's tree: what the dataset layer needs before it can read anything else.

use super::keys::Hashing;
use super::{damaged, keys, whole};
use crate::codec::Writer;
use crate::error::PoolError;

/// Layouts of the row: they tell how names are hashed.
const WHOLE: u8 = 1;
const NEAR: u8 = 2;

/// The value of the head's row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// The next number of an inode and the next sequence of an entry: one counter for both, so that inodes lie in the order of their names.
    pub next: u64,
    /// The inode of the root directory.
    pub root: u64,
    /// The seed of hashes of names.
    pub seed: u64,
    /// How names are hashed.
    pub hashing: Hashing,
    /// How many inodes there are.
    pub objects: u64,
}

impl Head {
    /// The row's value.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut to = Writer::default();
        to.u8(match self.hashing {
            Hashing::Whole => WHOLE,
            Hashing::Near => NEAR,
        });
        to.u64(self.seed);
        to.varint(self.next);
        to.varint(self.root);
        to.varint(self.objects);
        to.finish()
    }

    /// Reads the row's value.
    ///
    /// # Errors
    /// [`PoolError::Format`] for bytes that are no head.
    pub fn decode(bytes: &[u8]) -> Result<Self, PoolError> {
        let head = whole(bytes, |from| {
            let hashing = match from.u8()? {
                WHOLE => Hashing::Whole,
                NEAR => Hashing::Near,
                _ => return Err(damaged("unknown layout of a head")),
            };
            Ok(Self { hashing, seed: from.u64()?, next: from.varint()?, root: from.varint()?, objects: from.varint()? })
        })?;
        if head.next > keys::SEQUENCE_MOST || head.root >= head.next {
            return Err(damaged("the counters of a head"));
        }
        Ok(head)
    }
}
