//! Access to the rows of keys and seals in the catalog, and a check of how they refer to each other.
//!
//! Callers: the key table, commits and openings of encrypted file systems. Invariant: the values of slots and master
//! keys are boxes here, which this module does not open.

use std::collections::BTreeMap;

use super::key_rows::{
    FAMILY, FamilyRow, KEY_ROOT, KeyRootRow, MASTER_KEY, SEAL, SLOT, SLOTS, SealRow, erasable_sequence, family_number,
};
use super::rows;
use super::table::Catalog;
use crate::deadlist::Rows as _;
use crate::error::{Damage, PoolError};
use crate::pointer::Txg;

fn damaged(what: &'static str) -> PoolError {
    PoolError::Format(Damage::Structure(what))
}

/// A number and a byte in a row's key.
fn number_and_byte(key: &[u8]) -> Result<(u64, u8), PoolError> {
    match rows::parts::<1>(key)? {
        ([number], [byte]) => Ok((number, *byte)),
        _ => Err(damaged("the key of a row of keys")),
    }
}

impl Catalog {
    fn put_or_delete(&mut self, key: &[u8], value: Option<Vec<u8>>) -> Result<(), PoolError> {
        match value {
            Some(value) => self.put(key, &value),
            None => self.delete(key),
        }
    }

    /// The number of the erasable key that counts; `None` in a pool without encrypted file systems.
    ///
    /// # Errors
    /// Errors of the tree, as for all functions here; [`PoolError::Format`] for a damaged row.
    pub fn erasable_sequence(&self) -> Result<Option<u64>, PoolError> {
        self.typed(&rows::key(KEY_ROOT, &[0], b""), erasable_sequence)
    }

    /// Sets the number of the erasable key that counts.
    ///
    /// # Errors
    /// As [`Self::erasable_sequence`].
    pub fn set_erasable_sequence(&mut self, sequence: u64) -> Result<(), PoolError> {
        self.put(&rows::key(KEY_ROOT, &[0], b""), &sequence.to_le_bytes())
    }

    /// Returns all key roots by number.
    ///
    /// # Errors
    /// As [`Self::erasable_sequence`].
    pub fn key_roots(&self) -> Result<BTreeMap<u64, KeyRootRow>, PoolError> {
        let roots = self.all(rows::below(KEY_ROOT, &[]), |key, row| match rows::parts::<1>(key)? {
            ([0], []) => Ok(None),
            ([number], []) => Ok(Some((number, KeyRootRow::decode(row)?))),
            _ => Err(damaged("the key of a row of keys")),
        })?;
        Ok(roots.into_iter().flatten().collect())
    }

    /// Sets a key root, or removes it. Number 0 is none.
    ///
    /// # Errors
    /// As [`Self::erasable_sequence`].
    pub fn set_key_root(&mut self, number: u64, row: Option<&KeyRootRow>) -> Result<(), PoolError> {
        if number == 0 {
            return Err(damaged("the number of a key root"));
        }
        self.put_or_delete(&rows::key(KEY_ROOT, &[number], b""), row.map(KeyRootRow::encode))
    }

    /// Returns the slots of a key root: their numbers and boxes.
    ///
    /// # Errors
    /// As [`Self::erasable_sequence`].
    pub fn slots(&self, key_root: u64) -> Result<Vec<(u8, Vec<u8>)>, PoolError> {
        self.all(rows::below(SLOT, &[key_root]), |key, row| match number_and_byte(key)? {
            (_, slot) if slot < SLOTS => Ok((slot, row.to_vec())),
            _ => Err(damaged("the number of a slot")),
        })
    }

    /// Sets the box of a slot, or removes the slot.
    ///
    /// # Errors
    /// As [`Self::erasable_sequence`].
    pub fn set_slot(&mut self, key_root: u64, slot: u8, sealed: Option<Vec<u8>>) -> Result<(), PoolError> {
        if slot >= SLOTS {
            return Err(damaged("the number of a slot"));
        }
        self.put_or_delete(&slot_key(key_root, slot), sealed)
    }

    /// Returns all families by number.
    ///
    /// # Errors
    /// As [`Self::erasable_sequence`].
    pub fn families(&self) -> Result<BTreeMap<u32, FamilyRow>, PoolError> {
        let families = self.all(rows::below(FAMILY, &[]), |key, row| match rows::parts::<1>(key)? {
            ([number], []) => Ok((family_number(number)?, FamilyRow::decode(row)?)),
            _ => Err(damaged("the key of a row of keys")),
        })?;
        Ok(families.into_iter().collect())
    }

    /// Sets a family, or removes it.
    ///
    /// # Errors
    /// As [`Self::erasable_sequence`].
    pub fn set_family(&mut self, number: u32, row: Option<&FamilyRow>) -> Result<(), PoolError> {
        family_number(number.into())?;
        self.put_or_delete(&rows::key(FAMILY, &[number.into()], b""), row.map(FamilyRow::encode))
    }

    /// Returns the generations of a family: their ordinals and boxes.
    ///
    /// # Errors
    /// As [`Self::erasable_sequence`].
    pub fn master_keys(&self, family: u32) -> Result<Vec<(u8, Vec<u8>)>, PoolError> {
        self.all(rows::below(MASTER_KEY, &[family.into()]), |key, row| match number_and_byte(key)? {
            (_, 0) => Err(damaged("the ordinal of a key generation")),
            (_, ordinal) => Ok((ordinal, row.to_vec())),
        })
    }

    /// Sets the box of a generation's master key, or removes the generation.
    ///
    /// # Errors
    /// As [`Self::erasable_sequence`].
    pub fn set_master_key(&mut self, family: u32, ordinal: u8, sealed: Option<Vec<u8>>) -> Result<(), PoolError> {
        if ordinal == 0 {
            return Err(damaged("the ordinal of a key generation"));
        }
        self.put_or_delete(&master_key(family, ordinal), sealed)
    }

    /// Returns the seal of a snapshot, or (txg 0) of a head; `None` for one in the clear.
    ///
    /// # Errors
    /// As [`Self::erasable_sequence`].
    pub fn seal(&self, dataset: u64, txg: Txg) -> Result<Option<SealRow>, PoolError> {
        self.typed(&rows::key(SEAL, &[dataset, txg.0], b""), SealRow::decode)
    }

    /// Sets the seal of a snapshot, or (txg 0) of a head, or removes it.
    ///
    /// # Errors
    /// As [`Self::erasable_sequence`].
    pub fn set_seal(&mut self, dataset: u64, txg: Txg, row: Option<&SealRow>) -> Result<(), PoolError> {
        self.put_or_delete(&rows::key(SEAL, &[dataset, txg.0], b""), row.map(SealRow::encode))
    }

    /// Checks that rows of keys and seals refer to rows that exist, and that there are none in a pool that
    /// `may_encrypt` nothing. The work grows with their number.
    ///
    /// # Errors
    /// [`PoolError::Format`] with the first inconsistency; errors of the tree.
    pub fn check_keys(&self, may_encrypt: bool) -> Result<(), PoolError> {
        if !may_encrypt {
            return self.check_without_keys();
        }
        let (roots, families) = (self.key_roots()?, self.families()?);
        if self.erasable_sequence()?.is_none() && !(roots.is_empty() && families.is_empty()) {
            return Err(damaged("keys without an erasable key"));
        }
        for row in roots.values().filter(|row| row.dataset != 0) {
            self.dataset(row.dataset)?;
        }
        self.all(rows::below(SLOT, &[]), |key, _| match number_and_byte(key)? {
            (root, slot) if slot < SLOTS && roots.contains_key(&root) => Ok(()),
            _ => Err(damaged("a slot without a key root")),
        })?;
        if families.values().any(|family| !roots.contains_key(&family.key_root)) {
            return Err(damaged("a family without a key root"));
        }
        let has_family = |number: u64| Ok::<_, PoolError>(families.contains_key(&family_number(number)?));
        self.all(rows::below(MASTER_KEY, &[]), |key, _| match number_and_byte(key)? {
            (family, ordinal) if ordinal > 0 && has_family(family)? => Ok(()),
            _ => Err(damaged("a master key without a family")),
        })?;
        self.all(rows::below(SEAL, &[]), |key, row| {
            let ([dataset, txg], []) = rows::parts::<2>(key)? else { return Err(damaged("the key of a seal")) };
            let is_there = self.is_there(dataset, Some(Txg(txg)).filter(|txg| *txg != Txg(0)))?;
            let family = SealRow::decode(row)?.family;
            if is_there && has_family(family.into())? { Ok(()) } else { Err(damaged("a seal of nothing")) }
        })?;
        Ok(())
    }

    fn check_without_keys(&self) -> Result<(), PoolError> {
        let range = rows::below(KEY_ROOT, &[]).start..rows::below(LAST, &[]).end;
        let mut is_empty = true;
        self.range(range, &mut |_, _| {
            is_empty = false;
            Ok(false)
        })?;
        if is_empty { Ok(()) } else { Err(damaged("keys in a pool without encryption")) }
    }
}

/// Last kind byte of rows that belong to encrypted file systems.
const LAST: u8 = 0x28;

/// Key of a slot's row, which its box authenticates.
#[must_use]
pub fn slot_key(key_root: u64, slot: u8) -> Vec<u8> {
    rows::key(SLOT, &[key_root], &[slot])
}

/// Key of a master key's row, which its box authenticates.
#[must_use]
pub fn master_key(family: u32, ordinal: u8) -> Vec<u8> {
    rows::key(MASTER_KEY, &[family.into()], &[ordinal])
}

#[cfg(test)]
mod tests;
