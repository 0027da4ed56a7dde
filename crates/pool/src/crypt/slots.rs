//! Slots: a secret of the user opens the root key of a file system.
//!
//! Callers: the key table. Invariants: parameters of Argon2id are checked before memory is allocated for them; the
//! memory that Argon2id has used is wiped; a slot that opens under another root key than the one that the key root
//! commits to is refused.

use argon2::{Algorithm, Argon2, Block, Params, Version};
use zeroize::{Zeroize as _, Zeroizing};

use super::derive::{KEY, KeyPurpose, KeyView, Mac, SecretKey, derive};
use super::sealed_box::{open_box, seal_box};
use super::{RandomBytes, WrongSeal};
use crate::catalog::key_rows::{Argon2Cost, KeyFormat, KeyRootRow, SlotDerivation, SlotRow};
use crate::error::{Damage, PoolError};

/// Lengths of passphrases, bytes.
const PASSPHRASE: std::ops::RangeInclusive<usize> = 8..=512;
/// Memory of Argon2id for new slots, KiB: the most, and the least.
const MEMORY: (u32, u32) = (256 << 10, 64 << 10);
/// Passes of Argon2id for new slots: the least, and the most.
const PASSES: (u32, u32) = (2, 16);
/// Time that a new slot's derivation takes at least, where that many passes are allowed, milliseconds.
const WANTED_MILLISECONDS: u128 = 500;

/// Why a key was not opened.
#[derive(Debug)]
pub enum KeyError {
    /// The row is damaged, or the erasable key is not the one that it was sealed under.
    Damaged,
    /// The secret is not that of this slot.
    WrongKey,
    /// The slot opens, but with another root key than the one that the key root commits to.
    Forged,
    /// Anything else.
    Pool(PoolError),
}

impl From<PoolError> for KeyError {
    fn from(error: PoolError) -> Self {
        match error {
            PoolError::Format(_) => Self::Damaged,
            error => Self::Pool(error),
        }
    }
}

impl std::fmt::Display for KeyError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Damaged => f.write_str("the key table is damaged"),
            Self::WrongKey => f.write_str("the key is wrong"),
            Self::Forged => f.write_str("the key table is forged: the slot holds another key than the file system's"),
            Self::Pool(error) => error.fmt(f),
        }
    }
}

/// A secret in the form in which slots use it. Wiped when it is dropped.
pub struct Secret {
    format: KeyFormat,
    bytes: Zeroizing<Vec<u8>>,
}

impl Secret {
    /// Takes a secret as it was read: one newline at the end of passphrases and hexadecimal keys is cut.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for a secret of a wrong length or form. The message does not contain it.
    pub fn new(format: KeyFormat, read: &[u8]) -> Result<Self, PoolError> {
        let refused = |why: &str| Err(PoolError::Refused(why.to_owned()));
        let line = read.strip_suffix(b"\n").unwrap_or(read);
        let bytes = match format {
            KeyFormat::Raw if read.len() == KEY => Zeroizing::new(read.to_vec()),
            KeyFormat::Raw => return refused("a raw key has 32 bytes"),
            KeyFormat::Hex => match from_hex(line) {
                Some(bytes) => bytes,
                None => return refused("a hexadecimal key has 64 digits"),
            },
            KeyFormat::Passphrase if PASSPHRASE.contains(&line.len()) => Zeroizing::new(line.to_vec()),
            KeyFormat::Passphrase => return refused("a passphrase has 8 to 512 characters"),
        };
        Ok(Self { format, bytes })
    }

    /// Its form.
    #[must_use]
    pub fn format(&self) -> KeyFormat {
        self.format
    }

    /// Derives the key of a slot.
    fn slot_key(&self, derivation: &SlotDerivation) -> Result<SecretKey, PoolError> {
        let (secret, purpose) = match derivation {
            SlotDerivation::Secret => {
                let secret = SecretKey::from_slice(&self.bytes);
                (secret.ok_or_else(|| PoolError::Refused("a key has 32 bytes".to_owned()))?, KeyPurpose::SlotSecret)
            }
            SlotDerivation::Argon2(cost) => (argon2(&self.bytes, cost)?, KeyPurpose::SlotPassphrase),
        };
        derive(purpose, secret.view(), &[])
    }
}

fn from_hex(digits: &[u8]) -> Option<Zeroizing<Vec<u8>>> {
    let digit = |byte: &u8| char::from(*byte).to_digit(16).map(|digit| digit as u8);
    let mut bytes = Zeroizing::new(Vec::with_capacity(KEY));
    for pair in digits.chunks(2) {
        let [high, low] = pair else { return None };
        bytes.push(digit(high)? << 4 | digit(low)?);
    }
    (bytes.len() == KEY).then_some(bytes)
}

/// Argon2id, version 1.3.
pub(super) fn argon2(passphrase: &[u8], cost: &Argon2Cost) -> Result<SecretKey, PoolError> {
    if !cost.is_possible() {
        return Err(PoolError::Format(Damage::Structure("the parameters of a passphrase's slot")));
    }
    let refused = |error: argon2::Error| PoolError::Refused(format!("no key can be derived: {error}"));
    let params = Params::new(cost.memory, cost.passes, cost.lanes.into(), Some(KEY)).map_err(refused)?;
    let mut memory: Vec<Block> = Vec::new();
    if memory.try_reserve_exact(params.block_count()).is_err() {
        return Err(PoolError::Refused(format!("no memory of {} KiB for the passphrase", cost.memory)));
    }
    memory.resize(params.block_count(), Block::new());
    let mut shielded = nacre_sys::secret_memory::shield(&mut memory);
    let derived = SecretKey::made(|key| {
        let library = Argon2::new(Algorithm::Argon2id, Version::V0x13, params);
        library.hash_password_into_with_memory(passphrase, &cost.salt, key, &mut *shielded)
    });
    shielded.iter_mut().for_each(|block| block.zeroize());
    derived.map_err(refused)
}

/// A clock: makes the call, and returns how many milliseconds it took.
pub type Stopwatch<'a> = &'a dyn Fn(&mut dyn FnMut() -> Result<(), PoolError>) -> Result<u128, PoolError>;

/// Chooses the parameters of Argon2id for a new slot: `available` is the memory that processes can get, bytes;
/// `milliseconds` measures a derivation.
///
/// # Errors
/// Errors of the random bytes and of the derivation.
pub fn choose_cost(
    random: &dyn RandomBytes,
    available: u64,
    milliseconds: Stopwatch<'_>,
) -> Result<Argon2Cost, PoolError> {
    let mut salt = [0; 32];
    random.fill(&mut salt)?;
    let (mut memory, least) = MEMORY;
    while memory > least && u64::from(memory) << 12 > available {
        memory /= 2;
    }
    let (fewest, most) = PASSES;
    let cost = Argon2Cost { salt, memory, passes: fewest, lanes: 1 };
    let took = milliseconds(&mut || argon2(b"measured", &cost).map(drop))?.max(1);
    let wanted = (WANTED_MILLISECONDS * u128::from(fewest)).div_ceil(took);
    let passes = u32::try_from(wanted).unwrap_or(most).clamp(fewest, most);
    Ok(Argon2Cost { passes, ..cost })
}

/// A slot to be made.
#[derive(Clone, Debug)]
pub struct NewSlot {
    /// Where the secret is read from.
    pub location: String,
    /// Its label.
    pub label: String,
    /// The time, seconds since 1970.
    pub created: u64,
    /// The parameters for a passphrase; not used for other secrets.
    pub cost: Argon2Cost,
}

/// The commitment of a root key.
///
/// # Errors
/// None for this purpose.
pub fn commitment(root: KeyView<'_>) -> Result<[u8; 32], PoolError> {
    Ok(*derive(KeyPurpose::Commitment, root, &[])?.expose())
}

/// Seals a root key for a secret.
///
/// # Errors
/// Errors of the derivation and of the random bytes.
pub fn seal_slot(
    random: &dyn RandomBytes,
    key_root: &KeyRootRow,
    slot: u8,
    new: &NewSlot,
    secret: &Secret,
    root: KeyView<'_>,
) -> Result<SlotRow, PoolError> {
    let derivation = match secret.format {
        KeyFormat::Passphrase => SlotDerivation::Argon2(new.cost),
        KeyFormat::Raw | KeyFormat::Hex => SlotDerivation::Secret,
    };
    let mut row = SlotRow {
        format: secret.format,
        derivation,
        location: new.location.clone(),
        label: new.label.clone(),
        created: new.created,
        sealed: Vec::new(),
    };
    let key = secret.slot_key(&derivation)?;
    let fields: [&[u8]; 3] = [&key_root.id, &[slot], &row.parameters()];
    row.sealed = seal_box(random, KeyPurpose::BoxSlot, key.view(), &fields, root.0)?;
    Ok(row)
}

/// Opens a slot; returns the root key.
///
/// # Errors
/// [`KeyError::WrongKey`], also for a secret of another form; [`KeyError::Forged`].
pub fn open_slot(key_root: &KeyRootRow, slot: u8, row: &SlotRow, secret: &Secret) -> Result<SecretKey, KeyError> {
    if row.format != secret.format {
        return Err(KeyError::WrongKey);
    }
    let key = secret.slot_key(&row.derivation)?;
    let fields: [&[u8]; 3] = [&key_root.id, &[slot], &row.parameters()];
    let opened = open_box(KeyPurpose::BoxSlot, key.view(), &fields, &row.sealed);
    let opened = opened.map_err(|WrongSeal| KeyError::WrongKey)?;
    let root = SecretKey::from_slice(&opened).ok_or(KeyError::Forged)?;
    check_root(key_root, root.view())?;
    Ok(root)
}

/// Refuses a root key that the key root does not commit to.
pub(super) fn check_root(key_root: &KeyRootRow, root: KeyView<'_>) -> Result<(), KeyError> {
    let found = Mac::from_bytes(commitment(root)?);
    if found == Mac::from_bytes(key_root.commitment) { Ok(()) } else { Err(KeyError::Forged) }
}
