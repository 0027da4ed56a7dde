//! Epochs of a pool in a bucket: one for each writer (a fencing token), claimed by creating an object,
//! `epochs/EPOCH`.
//!
//! Caller: [`Objects`], when a pool is created or imported, before the first root. Invariants:
//! - An epoch is claimed once, whatever happened to the roots of its writer: a bucket may lack the newest roots,
//!   and they may be discarded. So leftover segments and log blocks are never mistaken for another writer's.
//! - Pools of older versions have no claims. Their epochs are in names of segments and logs: an epoch whose log
//!   has a block is not claimed, and the store reports the latest one in segment names.
//! - A claim is not deleted before [`FENCED`](super::sweeping) later epochs exist.

use super::listing::{is_near, newest_keys};
use super::{Objects, Result, make};
use crate::codec::Writer;
use crate::error::PoolError;

/// Number of epochs claimed by others at the same moment that are skipped.
const TAKEN_MOST: usize = 64;

pub(super) const CLAIMS: &str = "epochs/";

fn claim_key(epoch: u32) -> String {
    format!("{CLAIMS}{epoch:010}")
}

/// The epoch of a claim's name.
pub(super) fn claimed_epoch(key: &str) -> Option<u32> {
    key.strip_prefix(CLAIMS)?.parse().ok()
}

impl Objects {
    /// The epoch of this writer, or that of the newest root.
    pub(super) fn begun_or_found(&self) -> u32 {
        let state = self.state.lock();
        state.epoch.max(state.found)
    }

    /// Claims an unused epoch later than `beyond` and than the newest root's, unless this writer has claimed one
    /// already. Returns whether it did.
    pub(super) fn claim_epoch(&self, beyond: u32) -> Result<bool> {
        let (own, found) = {
            let state = self.state.lock();
            (state.epoch, state.found)
        };
        if own > beyond.max(found) {
            return Ok(false);
        }
        let mut latest = found.max(own).max(beyond);
        for claimed in newest_keys(&*self.bucket, CLAIMS, "")?.iter().filter_map(|key| claimed_epoch(key)) {
            latest = if is_near(found, claimed) { latest.max(claimed) } else { latest };
        }
        let mut claim = Writer::default();
        claim.u64(self.writer.nonce);
        // Processes that take over from each other share one writer number.
        claim.u32(std::process::id());
        claim.u64(self.writer.moment().uptime);
        claim.bytes(self.writer.host.as_bytes());
        let claim = claim.finish();
        for _ in 0..TAKEN_MOST {
            let next = latest.checked_add(1);
            latest = next.ok_or_else(|| PoolError::Refused("the pool has used up its epochs".to_owned()))?;
            let is_unused = newest_keys(&*self.bucket, &format!("log/{latest}/"), "")?.is_empty();
            if is_unused && make(&*self.bucket, &claim_key(latest), &claim)? {
                self.state.lock().epoch = latest;
                return Ok(true);
            }
        }
        Err(PoolError::Refused("many other programs import the pool at this moment: try again".to_owned()))
    }
}
