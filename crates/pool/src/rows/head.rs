//! The header of a dataset's tree: the parameters that are needed before anything else can be read.

use super::folding::Folding;
use super::keys::Hashing;
use super::{damaged, keys, whole};
use crate::codec::Writer;
use crate::error::PoolError;

/// Versions of the row, by the hashing of names. In the last one a byte with the name folding
/// follows.
const WHOLE: u8 = 1;
const ORDERED_NAMES: u8 = 2;
const FOLDED: u8 = 3;

/// Value of the dataset header's row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DatasetHead {
    /// The next number of an inode and the next sequence of an entry: one counter for both, so that
    /// inodes are ordered like their names.
    pub next: u64,
    /// The inode of the root directory.
    pub root: u64,
    /// Seed of the hashes of names.
    pub seed: u64,
    /// How names are hashed.
    pub hashing: Hashing,
    /// The name folding. Unless it is [`Folding::EXACT`], names are hashed as with
    /// [`Hashing::Ordered`].
    pub folding: Folding,
    /// Number of inodes.
    pub objects: u64,
}

impl DatasetHead {
    /// The row's value.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut to = Writer::default();
        match (self.folding.is_exact(), self.hashing) {
            (true, Hashing::Whole) => to.u8(WHOLE),
            (true, Hashing::Ordered) => to.u8(ORDERED_NAMES),
            (false, _) => {
                to.u8(FOLDED);
                to.u8(self.folding.byte());
            }
        }
        to.u64(self.seed);
        to.varint(self.next);
        to.varint(self.root);
        to.varint(self.objects);
        to.finish()
    }

    /// The hash under which a name is looked up.
    #[must_use]
    pub fn hash(&self, name: &[u8]) -> u64 {
        self.hashing.hash(self.seed, &self.folding.fold(name))
    }

    /// Reads the row's value.
    ///
    /// # Errors
    /// [`PoolError::Format`] for invalid bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, PoolError> {
        let head = whole(bytes, |from| {
            let (hashing, folding) = match from.u8()? {
                WHOLE => (Hashing::Whole, Folding::EXACT),
                ORDERED_NAMES => (Hashing::Ordered, Folding::EXACT),
                FOLDED => {
                    let folding = Folding::of_byte(from.u8()?).filter(|folding| !folding.is_exact());
                    (Hashing::Ordered, folding.ok_or_else(|| damaged("unknown rules for names"))?)
                }
                _ => return Err(damaged("unknown layout of a head")),
            };
            Ok(Self {
                hashing,
                folding,
                seed: from.u64()?,
                next: from.varint()?,
                root: from.varint()?,
                objects: from.varint()?,
            })
        })?;
        if head.next > keys::NUMBER_MOST || head.root >= head.next {
            return Err(damaged("the counters of a head"));
        }
        Ok(head)
    }
}
