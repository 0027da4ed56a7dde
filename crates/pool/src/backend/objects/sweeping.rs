//! What is removed of a bucket beside segments: old roots, logs that no root needs, and who the pool was.
//!
//! Caller: [`Objects`], after each so many roots. Invariants:
//! - Each root's log begins in the epoch of the one before, or in a later one. So what is in epochs before
//!   that of the oldest root that is left is needed by none, whoever puts roots meanwhile.
//! - The last root whose log began there was put more than a day ago, and the seal there a moment after it.
//!   A writer that was stopped since before that seal does not acknowledge what it puts in its place (see
//!   `log.rs`).
//! - The first object that says who a pool is stays: no other pool is made here. So does the newest, and all
//!   that were the newest within a day.

use super::{KEPT, Objects, Result, RootBody, attempt, own_keys, read_root, read_whole};
use crate::label::Identity;

impl Objects {
    /// Removes what nobody can go back to, and no writer can still want to put.
    pub(super) fn sweep(&self, kept: u64, now: u64) -> Result<()> {
        if let Some(oldest) = self.sweep_roots(kept, now)? {
            self.sweep_logs(oldest.root.log_start.position)?;
        }
        self.sweep_identities(now)
    }

    /// Removes old roots; answers the oldest that stays, if it can be read.
    fn sweep_roots(&self, kept: u64, now: u64) -> Result<Option<RootBody>> {
        for key in own_keys(&*self.bucket, "roots/", "")? {
            let Some(Ok(body)) = read_root(&*self.bucket, &key)? else { return Ok(None) };
            if body.root.generation >= kept || body.time.saturating_add(KEPT) >= now {
                return Ok(Some(body));
            }
            self.remove_object(&key)?;
        }
        Ok(None)
    }

    /// Removes logs of epochs before this one.
    fn sweep_logs(&self, needed: u64) -> Result<()> {
        let epoch = |key: &str| key.split('/').nth(1)?.parse::<u64>().ok();
        let keys = own_keys(&*self.bucket, "log/", "")?;
        let old = keys.iter().filter(|key| epoch(key).is_some_and(|epoch| epoch < needed));
        old.into_iter().try_for_each(|key| self.remove_object(key))
    }

    /// Removes what says who the pool was, a day after it has become another.
    fn sweep_identities(&self, now: u64) -> Result<()> {
        let keys = own_keys(&*self.bucket, "pool/", "")?;
        let later = keys.iter().skip(2);
        for (key, next) in keys.iter().skip(1).zip(later) {
            let Some(Ok(identity)) = read_whole(&*self.bucket, "reading", next, Identity::decode)? else { break };
            if identity.time.saturating_add(KEPT) >= now {
                break;
            }
            self.remove_object(key)?;
        }
        Ok(())
    }

    fn remove_object(&self, key: &str) -> Result<()> {
        attempt(&*self.bucket, "removing from", || self.bucket.delete(key))
    }
}
