//! Epochs of a pool in a bucket: one for each writer, claimed by a new object, `epochs/EPOCH`.
//!
//! Caller: [`Objects`], when a pool is made or imported, before the first root. Invariants:
//! - An epoch is claimed once, whatever became of the roots of the writer that had it: a bucket may lack the newest
//!   roots, and they may be given up. So what is left of its segments and of its log is never taken for another's.
//! - Pools of older versions have no claims. Their epochs are in names of segments and logs: an epoch whose log has a
//!   block is not claimed, and the store tells the latest one that is in names of segments.
//! - A claim is not removed before [`FENCED`](super::sweeping) later epochs are there.

use super::listing::{is_near, newest_keys};
use super::{Objects, Result, make};
use crate::codec::Writer;
use crate::error::PoolError;

/// So many epochs that others have claimed at the same moment are passed over.
const TAKEN_MOST: usize = 64;

pub(super) const CLAIMS: &str = "epochs/";

fn claim_key(epoch: u32) -> String {
    format!("{CLAIMS}{epoch:010}")
}

/// The epoch of a claim.
pub(super) fn claimed_epoch(key: &str) -> Option<u32> {
    key.strip_prefix(CLAIMS)?.parse().ok()
}

impl Objects {
    /// The epoch of this writer, or that of the newest root.
    pub(super) fn begun_or_found(&self) -> u32 {
        let state = self.state.lock();
        state.epoch.max(state.found)
    }

    /// Claims an epoch that no writer had and that is later than `beyond` and the newest root's, unless this writer has
    /// such a one.
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
        // Processes that go on as one have one number.
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
