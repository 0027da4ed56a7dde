//! Root records as objects: their encoding, and reading them; reading identities.
//!
//! Callers: [`Objects`](super::Objects) and its submodules. Invariant: an object counts as damaged only if several
//! replies in a row are: a single reply that was damaged in transit would cost whole states.

use super::bucket::Bucket;
use super::{Result, attempt};
use crate::checksum;
use crate::codec::{Reader, Writer};
use crate::error::{Damage, PoolError};
use crate::label::{Identity, Root};

/// Number of damaged replies before the object counts as damaged.
const READINGS: usize = 3;

/// The content of a root object.
pub(super) struct RootBody {
    pub(super) root: Root,
    pub(super) epoch: u32,
    /// The epoch of the import whose local log has the writes synced after this root; 0: none.
    pub(super) log: u32,
    pub(super) time: u64,
    /// Number of its writer.
    pub(super) nonce: u64,
    pub(super) host: String,
}

/// Maximum length of a machine's name, bytes.
const HOST_MOST: usize = 255;

/// Length of the fields at the end of a root's object, without the checksum, bytes.
const END: usize = 25;

impl RootBody {
    pub(super) fn encode(&self) -> Result<Vec<u8>> {
        let mut to = Writer::default();
        let host = self.host.as_bytes().get(..HOST_MOST).unwrap_or(self.host.as_bytes());
        to.bytes(&self.root.encode()?);
        to.bytes(host);
        to.u8(host.len() as u8);
        to.u32(self.epoch);
        to.u32(self.log);
        to.u64(self.time);
        to.u64(self.nonce);
        let mut body = to.finish();
        let sum = checksum::structure(&body);
        body.extend(sum);
        Ok(body)
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self> {
        let wrong = || PoolError::Format(Damage::Structure("no root record"));
        let (body, sum) = bytes.split_last_chunk().ok_or_else(wrong)?;
        if checksum::structure(body) != *sum {
            return Err(wrong());
        }
        let (named, end) = body.split_at_checked(body.len().saturating_sub(END)).ok_or_else(wrong)?;
        let mut from = Reader::new(end);
        let length = usize::from(from.u8()?);
        let (record, host) = named.split_at_checked(named.len().saturating_sub(length)).ok_or_else(wrong)?;
        let host = String::from_utf8_lossy(host).into_owned();
        let root = Root::decode(record)?;
        Ok(Self { root, epoch: from.u32()?, log: from.u32()?, time: from.u64()?, nonce: from.u64()?, host })
    }
}

/// Decodes an identity; the mark of a destroyed pool may lack the zeros at its end.
pub(super) fn decode_identity(body: &[u8]) -> Result<Identity> {
    let mut whole = body.to_vec();
    whole.resize(whole.len().max(Identity::LENGTH), 0);
    Identity::decode(&whole)
}

/// Reads an object until a reply can be decoded, or several in a row cannot; `None` where it does not exist.
pub(super) fn read_whole<T>(
    bucket: &dyn Bucket,
    doing: &'static str,
    key: &str,
    decode: impl Fn(&[u8]) -> Result<T>,
) -> Result<Option<Result<T>>> {
    decode_whole(|| attempt(bucket, doing, || bucket.get(key, None)), decode)
}

fn decode_whole<T>(
    get: impl Fn() -> Result<Option<Vec<u8>>>,
    decode: impl Fn(&[u8]) -> Result<T>,
) -> Result<Option<Result<T>>> {
    let mut found = None;
    for _ in 0..READINGS {
        let Some(object) = get()? else { return Ok(None) };
        let decoded = decode(&object);
        let is_damaged = matches!(decoded, Err(PoolError::Format(_)));
        found = Some(decoded);
        if !is_damaged {
            break;
        }
    }
    Ok(found)
}

/// Reads the root of this name for a writer, which waits for a store that is away.
pub(super) fn read_root_for_writing(bucket: &dyn Bucket, key: &str) -> Result<Option<Result<RootBody>>> {
    decode_whole(|| attempt(bucket, "reading", || bucket.get_for_writing(key)), RootBody::decode)
}

/// Reads the root of this name.
pub(super) fn read_root(bucket: &dyn Bucket, key: &str) -> Result<Option<Result<RootBody>>> {
    read_whole(bucket, "reading", key, RootBody::decode)
}
