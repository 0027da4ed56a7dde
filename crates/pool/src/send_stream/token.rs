//! Tokens: what a half received stream goes on with, as text that users and tools carry from the
//! receiver to the sender (`receive_resume_token`, `send -t`).
//!
//! Invariants: a token is hexadecimal with a checksum, so a mistyped one is refused; any text is a
//! token or an error.

use crate::codec::{Reader, Writer};
use crate::error::{Damage, PoolError};

/// What tokens of this version begin with.
const VERSION: &str = "1-";

/// How far a receiver has come.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResumeToken {
    /// The guid of the snapshot that is being received.
    pub to: u64,
    /// Its whole name where it is sent from.
    pub name: String,
    /// The guid of the snapshot that it is the difference to; 0: of none.
    pub from: u64,
    /// That one is of another file system.
    pub clone: bool,
    /// Frames come as they are stored.
    pub stored: bool,
    /// The last key that was received.
    pub after: Vec<u8>,
    /// How much of rows and content was received, bytes.
    pub bytes: u64,
}

fn refused() -> PoolError {
    PoolError::Refused("resume token is corrupt".to_owned())
}

impl ResumeToken {
    /// As the row of a dataset has it.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut to = Writer::default();
        to.u64(self.to);
        to.string(self.name.as_bytes());
        to.u64(self.from);
        to.u8(u8::from(self.clone) | u8::from(self.stored) << 1);
        to.string(&self.after);
        to.varint(self.bytes);
        to.finish()
    }

    /// Reads the row.
    ///
    /// # Errors
    /// [`PoolError::Format`] for bytes that are none.
    pub fn decode(bytes: &[u8]) -> Result<Self, PoolError> {
        let mut from = Reader::new(bytes);
        let (to, name, origin) = (from.u64()?, from.string()?.to_vec(), from.u64()?);
        let name = String::from_utf8(name).map_err(|_| PoolError::Format(Damage::Structure("the name in a token")))?;
        let flags = from.u8()?;
        let token = Self {
            to,
            name,
            from: origin,
            clone: flags & 1 != 0,
            stored: flags & 2 != 0,
            after: from.string()?.to_vec(),
            bytes: from.varint()?,
        };
        if from.is_empty() { Ok(token) } else { Err(PoolError::Format(Damage::Structure("bytes behind a token"))) }
    }

    /// As users carry it.
    #[must_use]
    pub fn text(&self) -> String {
        let bytes = self.encode();
        let sum = xxhash_rust::xxh3::xxh3_64(&bytes);
        let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{VERSION}{sum:016x}-{digits}")
    }

    /// Reads what a user has given.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for what is none.
    pub fn parse(text: &str) -> Result<Self, PoolError> {
        let (sum, digits) = text.strip_prefix(VERSION).and_then(|rest| rest.split_once('-')).ok_or_else(refused)?;
        let sum = u64::from_str_radix(sum, 16).map_err(|_| refused())?;
        if !digits.is_ascii() || digits.len() % 2 != 0 {
            return Err(refused());
        }
        let bytes = digits.as_bytes().chunks(2).map(|pair| {
            let pair = std::str::from_utf8(pair).map_err(|_| refused())?;
            u8::from_str_radix(pair, 16).map_err(|_| refused())
        });
        let bytes = bytes.collect::<Result<Vec<u8>, _>>()?;
        if xxhash_rust::xxh3::xxh3_64(&bytes) != sum {
            return Err(refused());
        }
        Self::decode(&bytes).map_err(|_| refused())
    }
}
