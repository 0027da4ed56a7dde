//! The key table of a pool: key roots with their slots, families with their master keys.
//!
//! Callers: commands on keys, the creation and opening of encrypted file systems. Invariants: rows of slots and master
//! keys are sealed under the pool's erasable key, which can be destroyed in place, while old rows stay in free room;
//! a new slot has been opened with its secret before it is put; the last slot of a key root stays.

use super::derive::{KEY, KeyPurpose, KeyView, SecretKey};
use super::keyring::{FamilyKeys, Generation, Keyring};
use super::message::Cipher;
use super::sealed_box::{open_box, seal_box};
use super::slots::{KeyError, NewSlot, Secret, check_root, commitment, open_slot, seal_slot};
use super::{ID, RandomBytes, WrongSeal};
use crate::catalog::key_rows::{FamilyRow, KeyRootRow, MasterKeyRow, SLOTS, SlotRow, family_number};
use crate::catalog::{Catalog, master_key, slot_key};
use crate::error::PoolError;

type Result<T> = std::result::Result<T, KeyError>;

/// Whether rows that cannot be read stop the renewal of the erasable key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DamagedRows {
    /// They are an error.
    Refused,
    /// They are removed.
    Removed,
}

/// The key table, with the erasable key under which its rows are sealed.
pub struct KeyTable<'a> {
    /// The catalog with the rows.
    pub catalog: &'a mut Catalog,
    /// The erasable key that counts.
    pub erasable: KeyView<'a>,
    /// Source of keys, ids and salts.
    pub random: &'a dyn RandomBytes,
}

impl KeyTable<'_> {
    fn random_key(&self) -> Result<SecretKey> {
        Ok(SecretKey::made(|key| self.random.fill(key))?)
    }

    fn key_root(&self, number: u64) -> Result<KeyRootRow> {
        self.catalog.key_roots()?.remove(&number).ok_or(KeyError::Damaged)
    }

    /// Makes a key root without slots; returns its number and its key.
    ///
    /// # Errors
    /// Errors of the catalog and of the random bytes, as for all functions here.
    pub fn add_key_root(&mut self, dataset: u64, iterations: u64) -> Result<(u64, SecretKey)> {
        let number = self.catalog.key_roots()?.last_key_value().map_or(0, |(last, _)| *last) + 1;
        let root = self.random_key()?;
        let mut id = [0; ID];
        self.random.fill(&mut id)?;
        let row = KeyRootRow { id, commitment: commitment(root.view())?, dataset, iterations };
        self.catalog.set_key_root(number, Some(&row))?;
        Ok((number, root))
    }

    /// Puts a slot, after it was opened with its secret.
    ///
    /// # Errors
    /// [`KeyError::Forged`] for a root key that is not that of the key root.
    pub fn put_slot(
        &mut self,
        key_root: u64,
        slot: u8,
        new: &NewSlot,
        secret: &Secret,
        root: KeyView<'_>,
    ) -> Result<()> {
        let row = self.key_root(key_root)?;
        let new = seal_slot(self.random, &row, slot, new, secret, root)?;
        // As the row will be read.
        open_slot(&row, slot, &SlotRow::decode(&new.encode())?, secret)?;
        let key = slot_key(key_root, slot);
        let sealed = seal_box(self.random, KeyPurpose::BoxErasable, self.erasable, &[&key], &new.encode())?;
        Ok(self.catalog.set_slot(key_root, slot, Some(sealed))?)
    }

    /// The slots of a key root; `None` for a row that is damaged or that the erasable key does not open. One damaged
    /// row does not keep the others from being used.
    ///
    /// # Errors
    /// Errors of the catalog.
    pub fn slots(&self, key_root: u64) -> Result<Vec<(u8, Option<SlotRow>)>> {
        let open = |(slot, sealed): (u8, Vec<u8>)| {
            let row = self.open_row(&slot_key(key_root, slot), &sealed).ok();
            (slot, row.and_then(|row| SlotRow::decode(&row).ok()))
        };
        Ok(self.catalog.slots(key_root)?.into_iter().map(open).collect())
    }

    fn open_row(&self, key: &[u8], sealed: &[u8]) -> Result<zeroize::Zeroizing<Vec<u8>>> {
        open_box(KeyPurpose::BoxErasable, self.erasable, &[key], sealed).map_err(|WrongSeal| KeyError::Damaged)
    }

    /// Removes a slot.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for a slot that is not there, and for the last one that can be read.
    pub fn remove_slot(&mut self, key_root: u64, slot: u8) -> Result<()> {
        let slots = self.slots(key_root)?;
        let refused = |why: &str| Err(KeyError::Pool(PoolError::Refused(why.to_owned())));
        if !slots.iter().any(|(number, _)| *number == slot) {
            return refused("there is no such slot");
        }
        if !slots.iter().any(|(number, row)| *number != slot && row.is_some()) {
            return refused("the last slot cannot be removed");
        }
        Ok(self.catalog.set_slot(key_root, slot, None)?)
    }

    /// A number for a new slot.
    ///
    /// # Errors
    /// [`PoolError::Refused`] where all slots are taken.
    pub fn free_slot(&self, key_root: u64) -> Result<u8> {
        let taken = self.catalog.slots(key_root)?;
        let free = (0..SLOTS).find(|slot| !taken.iter().any(|(number, _)| number == slot));
        free.ok_or_else(|| KeyError::Pool(PoolError::Refused(format!("all {SLOTS} slots are in use"))))
    }

    /// Opens a key root with a secret: by one slot, or by slot 0 and then the others with secrets of this form. Returns
    /// the slot and the root key.
    ///
    /// # Errors
    /// [`KeyError::WrongKey`] where none opens; [`KeyError::Damaged`] where one of them cannot be read: the secret may
    /// be that of the damaged one; other errors of the slot that was tried last.
    pub fn open(&self, key_root: u64, secret: &Secret, only: Option<u8>) -> Result<(u8, SecretKey)> {
        let row = self.key_root(key_root)?;
        let mut failed = KeyError::WrongKey;
        for (slot, found) in self.slots(key_root)? {
            if only.is_some_and(|only| only != slot) {
                continue;
            }
            let Some(found) = found else {
                failed = KeyError::Damaged;
                continue;
            };
            if found.format != secret.format() {
                continue;
            }
            match open_slot(&row, slot, &found, secret) {
                Ok(root) => return Ok((slot, root)),
                Err(KeyError::WrongKey) => {}
                Err(error) => failed = error,
            }
        }
        Err(failed)
    }

    /// Makes a family with one generation; returns its number.
    ///
    /// # Errors
    /// [`PoolError::Refused`] where all numbers are taken; [`KeyError::Forged`] for a root key that is not that of the
    /// key root.
    pub fn add_family(&mut self, key_root: u64, root: KeyView<'_>, cipher: Cipher) -> Result<u32> {
        check_root(&self.key_root(key_root)?, root)?;
        let last = self.catalog.families()?.last_key_value().map_or(0, |(last, _)| *last);
        let number = family_number(u64::from(last) + 1)
            .map_err(|_| PoolError::Refused("the pool has used up its numbers of key families".to_owned()))?;
        let mut crypt_id = [0; ID];
        self.random.fill(&mut crypt_id)?;
        self.catalog.set_family(number, Some(&FamilyRow { crypt_id, key_root, target: None }))?;
        self.add_generation(number, root, cipher)?;
        Ok(number)
    }

    /// Adds a generation to a family; returns its ordinal.
    ///
    /// # Errors
    /// [`PoolError::Refused`] where all ordinals are taken; [`KeyError::Forged`] for a root key that is not that of the
    /// key root.
    pub fn add_generation(&mut self, family: u32, root: KeyView<'_>, cipher: Cipher) -> Result<u8> {
        let last = self.catalog.master_keys(family)?.last().map_or(0, |(ordinal, _)| *ordinal);
        let ordinal = last
            .checked_add(1)
            .ok_or_else(|| PoolError::Refused("the family has used up its key generations".to_owned()))?;
        let mut id = [0; 8];
        self.random.fill(&mut id)?;
        let master = self.random_key()?;
        self.put_generation(family, (ordinal, id), (cipher, master.view()), root)?;
        Ok(ordinal)
    }

    /// Seals a master key under a root key.
    fn put_generation(
        &mut self,
        family: u32,
        (ordinal, generation): (u8, [u8; 8]),
        (cipher, master): (Cipher, KeyView<'_>),
        root: KeyView<'_>,
    ) -> Result<()> {
        let row = self.catalog.families()?.remove(&family).ok_or(KeyError::Damaged)?;
        let key_root = self.key_root(row.key_root)?;
        // Sealed under another key, the family's frames could never be opened again.
        check_root(&key_root, root)?;
        let mut secret = zeroize::Zeroizing::new([0; KEY + 1]);
        let (key, algorithm) = secret.split_at_mut(KEY);
        key.copy_from_slice(master.0);
        algorithm.fill(cipher as u8);
        let fields: [&[u8]; 4] = [&key_root.id, &row.crypt_id, &generation, &[ordinal]];
        let sealed = seal_box(self.random, KeyPurpose::BoxMaster, root, &fields, &*secret)?;
        let value = MasterKeyRow { generation, sealed }.encode();
        let key = master_key(family, ordinal);
        let sealed = seal_box(self.random, KeyPurpose::BoxErasable, self.erasable, &[&key], &value)?;
        Ok(self.catalog.set_master_key(family, ordinal, Some(sealed))?)
    }

    /// Opens the master keys of a family, and moves them to locked memory.
    ///
    /// # Errors
    /// [`KeyError::Damaged`] for a row that the erasable key does not open; [`KeyError::WrongKey`] for a master key
    /// that the root key does not open.
    pub fn load_family(&self, family: u32, root: KeyView<'_>, keyring: &Keyring) -> Result<FamilyKeys> {
        let row = self.catalog.families()?.remove(&family).ok_or(KeyError::Damaged)?;
        let key_root = self.key_root(row.key_root)?;
        let mut generations = Vec::new();
        for (ordinal, sealed) in self.catalog.master_keys(family)? {
            let value = self.open_row(&master_key(family, ordinal), &sealed)?;
            let MasterKeyRow { generation, sealed } = MasterKeyRow::decode(&value)?;
            let fields: [&[u8]; 4] = [&key_root.id, &row.crypt_id, &generation, &[ordinal]];
            let opened = open_box(KeyPurpose::BoxMaster, root, &fields, &sealed);
            let opened = opened.map_err(|WrongSeal| KeyError::WrongKey)?;
            let Some((cipher, key)) = opened.split_last() else { return Err(KeyError::Damaged) };
            let cipher = Cipher::try_from(*cipher)?;
            let master = SecretKey::from_slice(key).ok_or(KeyError::Damaged)?;
            generations.push(Generation { ordinal, id: generation, cipher, master: keyring.keep(&master)? });
        }
        Ok(FamilyKeys::new(family, row.crypt_id, generations)?)
    }

    /// Seals all rows of slots and master keys under another erasable key. With [`DamagedRows::Removed`], rows that the
    /// present one does not open are removed: nothing could open them any more. Returns their number.
    ///
    /// # Errors
    /// [`KeyError::Damaged`] with [`DamagedRows::Refused`] for such a row, and where no row at all can be read: nothing
    /// has changed then.
    pub fn renew(&mut self, sequence: u64, erasable: KeyView<'_>, damaged: DamagedRows) -> Result<usize> {
        let mut slots = Vec::new();
        for key_root in self.catalog.key_roots()?.into_keys() {
            for (slot, sealed) in self.catalog.slots(key_root)? {
                let key = slot_key(key_root, slot);
                slots.push((key_root, slot, self.reseal(&key, &sealed, erasable, damaged)?));
            }
        }
        let mut masters = Vec::new();
        for family in self.catalog.families()?.into_keys() {
            for (ordinal, sealed) in self.catalog.master_keys(family)? {
                let key = master_key(family, ordinal);
                masters.push((family, ordinal, self.reseal(&key, &sealed, erasable, damaged)?));
            }
        }
        let slots_lost = slots.iter().filter(|(.., sealed)| sealed.is_none()).count();
        let masters_lost = masters.iter().filter(|(.., sealed)| sealed.is_none()).count();
        let lost = slots_lost + masters_lost;
        // Not damaged rows, but another erasable key.
        if lost > 0 && lost == slots.len() + masters.len() {
            return Err(KeyError::Damaged);
        }
        for (key_root, slot, sealed) in slots {
            self.catalog.set_slot(key_root, slot, sealed)?;
        }
        for (family, ordinal, sealed) in masters {
            self.catalog.set_master_key(family, ordinal, sealed)?;
        }
        self.catalog.set_erasable_sequence(sequence)?;
        Ok(lost)
    }

    /// Seals the value of a row under another erasable key; `None` for a damaged row that is to be removed.
    fn reseal(
        &self,
        key: &[u8],
        sealed: &[u8],
        erasable: KeyView<'_>,
        damaged: DamagedRows,
    ) -> Result<Option<Vec<u8>>> {
        match self.open_row(key, sealed) {
            Ok(value) => Ok(Some(seal_box(self.random, KeyPurpose::BoxErasable, erasable, &[key], &value)?)),
            Err(KeyError::Damaged) if damaged == DamagedRows::Removed => Ok(None),
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests;
