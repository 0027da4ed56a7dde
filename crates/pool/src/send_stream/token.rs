//! Resume tokens: the state of an interrupted receive, as text that users and tools carry from the
//! receiver to the sender (`receive_resume_token`, `send -t`).
//!
//! Invariants: a token is hexadecimal with a checksum, so a mistyped one is refused; any text is a
//! token or an error.

use crate::codec::{Reader, Writer};
use crate::error::{Damage, PoolError};

/// Prefix of tokens of this version.
const VERSION: &str = "1-";

/// State of an interrupted receive.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResumeToken {
    /// GUID of the snapshot that is being received.
    pub to: u64,
    /// Its full name at the sender.
    pub name: String,
    /// GUID of the incremental base; 0: none.
    pub from: u64,
    /// The base belongs to another file system.
    pub clone: bool,
    /// Frames are sent compressed, as they are stored.
    pub stored: bool,
    /// Last key that was received.
    pub after: Vec<u8>,
    /// Received bytes of rows and content.
    pub bytes: u64,
}

fn refused() -> PoolError {
    PoolError::Refused("resume token is corrupt".to_owned())
}

impl ResumeToken {
    /// Encodes the token as a row of the dataset.
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

    /// Decodes the row.
    ///
    /// # Errors
    /// [`PoolError::Format`] for invalid bytes.
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

    /// Returns the text form for users.
    #[must_use]
    pub fn text(&self) -> String {
        let bytes = self.encode();
        let sum = xxhash_rust::xxh3::xxh3_64(&bytes);
        let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{VERSION}{sum:016x}-{digits}")
    }

    /// Parses the text form.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for an invalid one.
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
