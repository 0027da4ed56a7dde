//! The block of erasable keys in the labels: keys of the pool that can be overwritten in place.
//!
//! Rows with slots and master keys are sealed under such a key, because the rows themselves stay in free room after they
//! were removed. Callers: the devices of a pool. Invariants:
//! - A block is written in two rounds with a sync between them, so one valid copy always exists.
//! - A device's four copies are read and written at the offsets of its present length; a copy at a former end is zeroed
//!   when the pool uses the new length.

use zeroize::Zeroizing;

use super::{places, structure};
use crate::checksum;
use crate::codec::{Reader, Writer};
use crate::crypt::SecretKey;
use crate::device::{Device, failed};
use crate::error::PoolError;

/// Offset of the block in a label, bytes.
pub const ERASABLE_AT: u64 = 96 << 10;
/// Length of the block, bytes.
const LENGTH: usize = 4096;
const MAGIC: [u8; 8] = *b"nacreERA";
/// Length of the magic number and the checksum before the other fields, bytes.
const HEAD: usize = 24;

/// The erasable keys of a pool: the one that counts, and during a renewal the next one as well.
pub struct ErasableBlock {
    /// Grows with every write; the newest block is valid.
    pub revision: u64,
    /// The keys, with their sequence numbers in ascending order.
    pub keys: Vec<(u64, SecretKey)>,
}

impl ErasableBlock {
    /// Encodes the block.
    ///
    /// # Errors
    /// [`PoolError::Format`] for sequence numbers that do not ascend, and for no or more than two keys.
    pub fn encode(&self) -> Result<Zeroizing<Vec<u8>>, PoolError> {
        self.check()?;
        let mut to = Writer::with_room(LENGTH);
        to.bytes(&MAGIC);
        to.bytes(&[0; HEAD - MAGIC.len()]);
        to.u64(self.revision);
        to.u8(self.keys.len() as u8);
        for (sequence, key) in &self.keys {
            to.u64(*sequence);
            to.bytes(key.expose());
        }
        // The writer has had room for all of it: no other copy of the keys is left in freed memory.
        let mut block = Zeroizing::new(to.finish());
        block.resize(LENGTH, 0);
        let hash = checksum::structure(block.get(HEAD..).unwrap_or_default());
        if let Some(at) = block.get_mut(MAGIC.len()..HEAD) {
            at.copy_from_slice(&hash);
        }
        Ok(block)
    }

    /// Decodes a block; `None` for bytes that are no block.
    ///
    /// # Errors
    /// [`PoolError::Format`] for a damaged one.
    pub fn decode(block: &[u8]) -> Result<Option<Self>, PoolError> {
        let mut from = Reader::new(block);
        if from.array::<8>()? != MAGIC {
            return Ok(None);
        }
        if from.array()? != checksum::structure(block.get(HEAD..).unwrap_or_default()) {
            return structure("the checksum of the erasable keys");
        }
        let (revision, count) = (from.u64()?, from.u8()?);
        let mut keys = Vec::new();
        for _ in 0..count.min(2) {
            let sequence = from.u64()?;
            keys.push((sequence, SecretKey::made(|key| from.take(key.len()).map(|bytes| key.copy_from_slice(bytes)))?));
        }
        let found = Self { revision, keys };
        found.check()?;
        if usize::from(count) != found.keys.len() || from.rest().iter().any(|byte| *byte != 0) {
            return structure("the erasable keys");
        }
        Ok(Some(found))
    }

    fn check(&self) -> Result<(), PoolError> {
        let is_possible = match self.keys.as_slice() {
            [(one, _)] => *one > 0,
            [(one, _), (other, _)] => *one > 0 && one < other,
            _ => false,
        };
        if is_possible { Ok(()) } else { structure("the erasable keys") }
    }
}

/// Reads the erasable keys of a device: the newest valid block of its four labels. `None` where there is none.
///
/// # Errors
/// [`PoolError::Device`] if no label could be read at all.
pub fn read_erasable(device: &dyn Device) -> Result<Option<ErasableBlock>, PoolError> {
    let (mut best, mut failure, mut read) = (None::<ErasableBlock>, None, false);
    for place in places(device.length()) {
        let mut block = Zeroizing::new(vec![0; LENGTH]);
        match device.read_at(&mut block, place + ERASABLE_AT) {
            Ok(()) => read = true,
            Err(error) => {
                failure = Some(failed(device, "reading the label of", error));
                continue;
            }
        }
        // A damaged copy counts as none: the others have the same.
        let Ok(Some(found)) = ErasableBlock::decode(&block) else { continue };
        if best.as_ref().is_none_or(|best| best.revision < found.revision) {
            best = Some(found);
        }
    }
    match failure {
        Some(failure) if !read => Err(failure),
        _ => Ok(best),
    }
}

/// Writes the erasable keys to a device's four labels, in two rounds: what they held before is overwritten. Durable when
/// it returns.
///
/// # Errors
/// [`PoolError::Device`].
pub fn write_erasable(device: &dyn Device, block: &ErasableBlock) -> Result<(), PoolError> {
    let bytes = block.encode()?;
    let places = places(device.length());
    for half in 0..2 {
        for place in places.iter().skip(half).step_by(2) {
            device
                .write_at(&bytes, place + ERASABLE_AT)
                .map_err(|error| failed(device, "writing the label of", error))?;
        }
        device.sync().map_err(|error| failed(device, "syncing", error))?;
    }
    Ok(())
}

/// Compares the erasable keys in the four labels of a device with these, and rewrites copies that differ; returns their
/// number. Durable when it returns.
///
/// # Errors
/// [`PoolError::Device`] for a device that cannot be written; unreadable copies are rewritten.
pub fn mend_erasable(device: &dyn Device, block: &ErasableBlock) -> Result<u64, PoolError> {
    let right = block.encode()?;
    super::mend(device, ERASABLE_AT, &right, |found| found == right.as_slice())
}

/// Zeroes the erasable keys at the end that a device had at a former length; nothing to do where the labels of the
/// present length are in that place. Durable when it returns.
///
/// # Errors
/// [`PoolError::Device`].
pub fn clear_former_end(device: &dyn Device, former: u64) -> Result<(), PoolError> {
    let present = places(device.length());
    let ranges: Vec<(u64, u64)> = places(former)
        .into_iter()
        .filter(|place| !present.contains(place) && place + super::LENGTH <= device.length())
        .map(|place| (place + ERASABLE_AT, place + ERASABLE_AT + LENGTH as u64))
        .collect();
    super::zero(device, &ranges)
}

#[cfg(test)]
mod tests;
