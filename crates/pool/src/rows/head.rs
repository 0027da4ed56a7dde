//! The head of a dataset's tree: what the dataset layer needs before it can read anything else.

use super::folding::Folding;
use super::keys::Hashing;
use super::{damaged, keys, whole};
use crate::codec::Writer;
use crate::error::PoolError;

/// Layouts of the row: they tell how names are hashed. In the last a byte follows that tells which
/// names are the same.
const WHOLE: u8 = 1;
const ORDERED_NAMES: u8 = 2;
const FOLDED: u8 = 3;

/// The value of the head's row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DatasetHead {
    /// The next number of an inode and the next sequence of an entry: one counter for both, so that
    /// inodes lie in the order of their names.
    pub next: u64,
    /// The inode of the root directory.
    pub root: u64,
    /// The seed of hashes of names.
    pub seed: u64,
    /// How names are hashed.
    pub hashing: Hashing,
    /// Which names are the same. Where it is not [`Folding::EXACT`], names are hashed as
    /// [`Hashing::Ordered`] has it.
    pub folding: Folding,
    /// How many inodes there are.
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
    /// [`PoolError::Format`] for bytes that are no head.
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
