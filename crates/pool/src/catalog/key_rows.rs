//! Rows of the catalog for encrypted file systems: key roots, slots, families, master keys, seals.
//!
//! Callers: the key table, commits and openings of encrypted file systems. Byte tables:
//! `docs/decisions/encryption.md`, section 4. Invariants: everything that an opening computes with (memory and passes of
//! Argon2, counters) is bounded by the decoders; nothing here is authenticated, which is what boxes and seals are for.

use super::rows::label;
use crate::codec::{Reader, Writer};
use crate::crypt::{BOX_OVERHEAD, ChildEntry, ID, PORTABLE};
use crate::error::{Damage, PoolError};
use crate::frame::Sealer;

/// Kind byte of key roots; the row of number 0 names the erasable key that counts.
pub const KEY_ROOT: u8 = 0x20;
/// Kind byte of slots.
pub const SLOT: u8 = 0x21;
/// Kind byte of families of keys.
pub const FAMILY: u8 = 0x22;
/// Kind byte of master keys.
pub const MASTER_KEY: u8 = 0x23;
/// Kind byte of seals.
pub const SEAL: u8 = 0x24;

/// Number of slots of a key root.
pub const SLOTS: u8 = 16;
/// Maximum memory of Argon2id, KiB.
pub const ARGON2_MEMORY_MAX: u32 = 1 << 20;
/// Maximum number of passes of Argon2id.
pub const ARGON2_PASSES_MAX: u32 = 64;
/// Maximum number of lanes of Argon2id.
pub const ARGON2_LANES_MAX: u8 = 4;
/// Maximum length of a keylocation, bytes.
pub const LOCATION_MAX: usize = 4096;
/// Counters of seals are less.
pub const COUNTER_END: u64 = 1 << 62;
/// A floor is at most so much above its counter.
const FLOOR_ABOVE: u64 = 1 << 32;
/// Length of the box with a root key.
const ROOT_KEY_BOX: usize = 32 + BOX_OVERHEAD;
/// Length of the box with a master key and its cipher.
const MASTER_KEY_BOX: usize = 33 + BOX_OVERHEAD;

fn damaged(what: &'static str) -> PoolError {
    PoolError::Format(Damage::Structure(what))
}

/// Decodes a value that fills the whole row.
fn whole<T>(bytes: &[u8], read: impl FnOnce(&mut Reader<'_>) -> Result<T, PoolError>) -> Result<T, PoolError> {
    let mut reader = Reader::new(bytes);
    let value = read(&mut reader)?;
    if reader.is_empty() { Ok(value) } else { Err(damaged("bytes after the end of a row of keys")) }
}

/// A key root: the key that slots open, and that opens master keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyRootRow {
    /// Its random id.
    pub id: [u8; ID],
    /// Commitment to the key: a slot cannot open under another one.
    pub commitment: [u8; 32],
    /// The encryption root, which has these keys; 0 for a target of a source.
    pub dataset: u64,
    /// `pbkdf2iters` as it was set; it chooses nothing.
    pub iterations: u64,
}

impl KeyRootRow {
    /// The row's value.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut to = Writer::default();
        to.bytes(&self.id);
        to.bytes(&self.commitment);
        to.varint(self.dataset);
        to.varint(self.iterations);
        to.finish()
    }

    /// Reads the row's value.
    ///
    /// # Errors
    /// [`PoolError::Format`] for invalid bytes, as for all rows here.
    pub fn decode(bytes: &[u8]) -> Result<Self, PoolError> {
        whole(bytes, |from| {
            Ok(Self {
                id: from.array()?,
                commitment: from.array()?,
                dataset: from.varint()?,
                iterations: from.varint()?,
            })
        })
    }
}

/// Form of a secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum KeyFormat {
    /// 32 bytes.
    Raw = 1,
    /// 64 hexadecimal digits.
    Hex = 2,
    /// 8 to 512 bytes.
    Passphrase = 3,
}

/// How a slot's key is derived from the secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotDerivation {
    /// From 32 bytes, by one derivation.
    Secret,
    /// From a passphrase, by Argon2id.
    Argon2(Argon2Cost),
}

/// Parameters of Argon2id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Argon2Cost {
    /// The salt.
    pub salt: [u8; 32],
    /// Memory, KiB.
    pub memory: u32,
    /// Number of passes.
    pub passes: u32,
    /// Number of lanes.
    pub lanes: u8,
}

/// A slot: a secret that opens the key root. Stored in a box under the erasable key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotRow {
    /// Form of the secret.
    pub format: KeyFormat,
    /// Derivation of the slot's key.
    pub derivation: SlotDerivation,
    /// Where the secret is read from.
    pub location: String,
    /// Label that the user gave it; may be empty.
    pub label: String,
    /// Time of its creation, seconds since 1970.
    pub created: u64,
    /// The box with the root key.
    pub sealed: Vec<u8>,
}

impl SlotRow {
    /// The fields that the box authenticates: format, derivation and its parameters.
    #[must_use]
    pub fn parameters(&self) -> Vec<u8> {
        let mut to = Writer::default();
        self.put_parameters(&mut to);
        to.finish()
    }

    fn put_parameters(&self, to: &mut Writer) {
        to.u8(self.format as u8);
        let (tag, Argon2Cost { salt, memory, passes, lanes }) = match self.derivation {
            SlotDerivation::Secret => (1, Argon2Cost { salt: [0; 32], memory: 0, passes: 0, lanes: 0 }),
            SlotDerivation::Argon2(cost) => (2, cost),
        };
        to.u8(tag);
        to.bytes(&salt);
        to.u32(memory);
        to.u32(passes);
        to.u8(lanes);
    }

    /// The row's value, before it is sealed under the erasable key.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut to = Writer::default();
        self.put_parameters(&mut to);
        to.string(self.location.as_bytes());
        to.string(self.label.as_bytes());
        to.u64(self.created);
        to.bytes(&self.sealed);
        to.finish()
    }

    /// Reads the row's value from its box.
    ///
    /// # Errors
    /// [`PoolError::Format`].
    pub fn decode(bytes: &[u8]) -> Result<Self, PoolError> {
        whole(bytes, |from| {
            let format = match from.u8()? {
                1 => KeyFormat::Raw,
                2 => KeyFormat::Hex,
                3 => KeyFormat::Passphrase,
                _ => return Err(damaged("the form of a key")),
            };
            let tag = from.u8()?;
            let cost = Argon2Cost { salt: from.array()?, memory: from.u32()?, passes: from.u32()?, lanes: from.u8()? };
            let derivation = match (tag, format) {
                (1, KeyFormat::Raw | KeyFormat::Hex) if is_without_cost(&cost) => SlotDerivation::Secret,
                (2, KeyFormat::Passphrase) if cost.is_possible() => SlotDerivation::Argon2(cost),
                _ => return Err(damaged("the derivation of a slot's key")),
            };
            let location = std::str::from_utf8(from.string()?).ok();
            let location = location.filter(|text| text.len() <= LOCATION_MAX && !text.chars().any(char::is_control));
            let location = location.ok_or_else(|| damaged("the location of a key"))?.to_owned();
            let label = match from.string()? {
                [] => String::new(),
                text => label(text, "the label of a slot")?,
            };
            let (created, sealed) = (from.u64()?, from.take(ROOT_KEY_BOX)?.to_vec());
            Ok(Self { format, derivation, location, label, created, sealed })
        })
    }
}

fn is_without_cost(cost: &Argon2Cost) -> bool {
    (cost.memory, cost.passes, cost.lanes) == (0, 0, 0) && cost.salt == [0; 32]
}

impl Argon2Cost {
    /// Whether Argon2id accepts the parameters, and they are within the bounds: nothing is derived before.
    #[must_use]
    pub fn is_possible(&self) -> bool {
        let least = u32::from(self.lanes) * 8;
        (1..=ARGON2_LANES_MAX).contains(&self.lanes)
            && (least..=ARGON2_MEMORY_MAX).contains(&self.memory)
            && (1..=ARGON2_PASSES_MAX).contains(&self.passes)
    }
}

/// A family of file systems with common keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FamilyRow {
    /// Its random id, which stays when it is sent.
    pub crypt_id: [u8; ID],
    /// Number of its key root.
    pub key_root: u64,
    /// Of a family of a target: its source.
    pub target: Option<TargetSeed>,
}

/// The source of a family of a target, and the seed of its frame ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetSeed {
    /// The file system that is sent.
    pub dataset: u64,
    /// The box with the seed.
    pub sealed: Vec<u8>,
}

impl FamilyRow {
    /// The row's value.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut to = Writer::default();
        to.bytes(&self.crypt_id);
        to.varint(self.key_root);
        to.u8(self.target.is_some().into());
        if let Some(target) = &self.target {
            to.varint(target.dataset);
            to.bytes(&target.sealed);
        }
        to.finish()
    }

    /// Reads the row's value.
    ///
    /// # Errors
    /// [`PoolError::Format`].
    pub fn decode(bytes: &[u8]) -> Result<Self, PoolError> {
        whole(bytes, |from| {
            let (crypt_id, key_root) = (from.array()?, from.varint()?);
            let target = match from.u8()? {
                0 => None,
                1 => Some(TargetSeed { dataset: from.varint()?, sealed: from.take(ROOT_KEY_BOX)?.to_vec() }),
                _ => return Err(damaged("the flags of a family")),
            };
            if key_root == 0 {
                Err(damaged("a family without a key root"))
            } else {
                Ok(Self { crypt_id, key_root, target })
            }
        })
    }
}

/// A generation of a family: its master key. Stored in a box under the erasable key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MasterKeyRow {
    /// The random id of the generation.
    pub generation: [u8; 8],
    /// The box with the master key and the number of the cipher.
    pub sealed: Vec<u8>,
}

impl MasterKeyRow {
    /// The row's value, before it is sealed under the erasable key.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        [&self.generation[..], &self.sealed].concat()
    }

    /// Reads the row's value from its box.
    ///
    /// # Errors
    /// [`PoolError::Format`].
    pub fn decode(bytes: &[u8]) -> Result<Self, PoolError> {
        whole(bytes, |from| Ok(Self { generation: from.array()?, sealed: from.take(MASTER_KEY_BOX)?.to_vec() }))
    }
}

/// A position in a line of history of a head.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BranchPosition {
    /// The random id of the line.
    pub branch: [u8; ID],
    /// The counter of the seal.
    pub counter: u64,
}

/// What a seal authenticates of a head or snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SealedState {
    /// Id of the generation of the MAC key.
    pub generation: [u8; 8],
    /// No frame in the clear is below the root.
    pub complete: bool,
    /// The position.
    pub at: BranchPosition,
    /// The position from which the branch was split; zeros for none.
    pub split_from: BranchPosition,
    /// The snapshot's GUID; 0 for a head, and for a snapshot that is not bound yet.
    pub guid: u64,
    /// The snapshot's time, seconds since 1970; 0 as the GUID.
    pub time: u64,
    /// The session: random, drawn when the head was opened for writing.
    pub session: [u8; ID],
    /// Number of the session's next record in the intent log.
    pub next_logged: u64,
    /// Number of the session's next record in the replay journal.
    pub next_journaled: u64,
    /// Portable entry of the root; `None` for a tree without a root.
    pub root: Option<[u8; PORTABLE]>,
    /// Hash of the head's sealed properties; zeros for a snapshot.
    pub properties: [u8; 16],
}

impl SealedState {
    /// Length of the encoded state, bytes.
    pub const LENGTH: usize = 152;
    const COMPLETE: u8 = 1;
    const NO_ROOT: u8 = 2;

    /// The bytes that the MAC covers.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut to = Writer::with_room(Self::LENGTH);
        to.bytes(&self.generation);
        let complete = if self.complete { Self::COMPLETE } else { 0 };
        to.u8(complete | if self.root.is_none() { Self::NO_ROOT } else { 0 });
        to.bytes(&[0; 7]);
        for BranchPosition { branch, counter } in [self.at, self.split_from] {
            to.bytes(&branch);
            to.u64(counter);
        }
        to.u64(self.guid);
        to.u64(self.time);
        to.bytes(&self.session);
        to.u64(self.next_logged);
        to.u64(self.next_journaled);
        to.bytes(&self.root.unwrap_or_default());
        to.bytes(&self.properties);
        to.finish()
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, PoolError> {
        let (generation, flags) = (from.array()?, from.u8()?);
        if flags & !(Self::COMPLETE | Self::NO_ROOT) != 0 || from.array()? != [0; 7] {
            return Err(damaged("the flags of a seal"));
        }
        let mut position = || Ok::<_, PoolError>(BranchPosition { branch: from.array()?, counter: from.u64()? });
        let (at, split_from) = (position()?, position()?);
        if at.counter >= COUNTER_END || split_from.counter >= COUNTER_END {
            return Err(damaged("the counter of a seal"));
        }
        let (guid, time, session) = (from.u64()?, from.u64()?, from.array()?);
        let (next_logged, next_journaled) = (from.u64()?, from.u64()?);
        let root: [u8; PORTABLE] = from.array()?;
        let root = match flags & Self::NO_ROOT {
            0 => {
                ChildEntry::decode_root(&root)?;
                Some(root)
            }
            _ if root == [0; PORTABLE] => None,
            _ => return Err(damaged("a root in the seal of an empty tree")),
        };
        let complete = flags & Self::COMPLETE != 0;
        let properties = from.array()?;
        Ok(Self {
            generation,
            complete,
            at,
            split_from,
            guid,
            time,
            session,
            next_logged,
            next_journaled,
            root,
            properties,
        })
    }
}

/// The seal of a head or snapshot. Its key has the dataset and the snapshot's txg, or 0 for the head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SealRow {
    /// Number of the family.
    pub family: u32,
    /// Counter of a head that a rollback without the key replaced, or 0.
    pub floor: u64,
    /// What the MAC authenticates.
    pub state: SealedState,
    /// The MAC.
    pub mac: [u8; 32],
}

impl SealRow {
    /// The row's value.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut to = Writer::with_room(SealedState::LENGTH + 64);
        to.varint(self.family.into());
        to.varint(self.floor);
        to.bytes(&self.state.encode());
        to.bytes(&self.mac);
        to.finish()
    }

    /// Reads the row's value.
    ///
    /// # Errors
    /// [`PoolError::Format`].
    pub fn decode(bytes: &[u8]) -> Result<Self, PoolError> {
        whole(bytes, |from| {
            let (family, floor) = (family_number(from.varint()?)?, from.varint()?);
            let (state, mac) = (SealedState::read(from)?, from.array()?);
            if floor >= COUNTER_END || floor > state.at.counter.saturating_add(FLOOR_ABOVE) {
                return Err(damaged("the floor of a seal"));
            }
            Ok(Self { family, floor, state, mac })
        })
    }
}

/// A family's number, which frame headers have 24 bits for.
///
/// # Errors
/// [`PoolError::Format`] for 0 and larger numbers.
pub fn family_number(number: u64) -> Result<u32, PoolError> {
    let number = u32::try_from(number).ok().filter(|number| (1..=Sealer::FAMILY_MAX).contains(number));
    number.ok_or_else(|| damaged("the number of a family of keys"))
}

/// The number of the erasable key under which slots and master keys are sealed.
///
/// # Errors
/// [`PoolError::Format`].
pub fn erasable_sequence(bytes: &[u8]) -> Result<u64, PoolError> {
    whole(bytes, |from| from.u64())
}

#[cfg(test)]
mod tests;
