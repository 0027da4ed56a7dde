//! Root records as objects: what lies in one, and reading it.
//!
//! Callers: [`Objects`](super::Objects) and what it consists of. Invariant: what a reply says counts as damaged only
//! where several in a row are: one that was damaged on its way would cost whole states.

use super::bucket::Bucket;
use super::{Result, attempt};
use crate::checksum;
use crate::codec::{Reader, Writer};
use crate::error::{Damage, PoolError};
use crate::label::Root;

/// How many replies are damaged before the object counts as damaged.
const READINGS: usize = 3;

/// A root as it was put.
pub(super) struct RootBody {
    pub(super) root: Root,
    pub(super) epoch: u32,
    /// The epoch of the import whose log, on its machine, has what was synced after this; 0: none.
    pub(super) log: u32,
    pub(super) time: u64,
    /// The number of its writer.
    pub(super) nonce: u64,
    pub(super) host: String,
}

/// The longest name of a machine that is kept, bytes.
const HOST_MOST: usize = 255;

/// The length of what ends a root's object, but for the sum, bytes.
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

/// Reads an object until a reply can be decoded, or several in a row cannot; `None` where there is none.
pub(super) fn read_whole<T>(
    bucket: &dyn Bucket,
    doing: &'static str,
    key: &str,
    decode: impl Fn(&[u8]) -> Result<T>,
) -> Result<Option<Result<T>>> {
    let mut found = None;
    for _ in 0..READINGS {
        let Some(object) = attempt(bucket, doing, || bucket.get(key, None))? else { return Ok(None) };
        let decoded = decode(&object);
        let is_damaged = matches!(decoded, Err(PoolError::Format(_)));
        found = Some(decoded);
        if !is_damaged {
            break;
        }
    }
    Ok(found)
}

/// The root of this name.
pub(super) fn read_root(bucket: &dyn Bucket, key: &str) -> Result<Option<Result<RootBody>>> {
    read_whole(bucket, "reading", key, RootBody::decode)
}
