//! What is removed of a bucket beside segments: old roots, logs that no root needs, and who the pool was.
//!
//! Caller: [`Objects`], after each so many roots. Invariants:
//! - Each root's log begins in the epoch of the one before, or in a later one. So what is in epochs before
//!   that of the oldest root that is left is needed by none, whoever puts roots meanwhile.
//! - A writer that was stopped, and lost the pool meanwhile, acknowledges nothing: its next root has the name of the
//!   first root of the epoch after its own, and its next block of the log that of the seal in its epoch. Both are
//!   *fences*: those of the newest [`FENCED`] epochs stay, at any age. An age is a matter of two clocks, of which
//!   either may be wrong.
//! - A fence of an earlier epoch goes when it is a day old: between a writer of that epoch and this one there were so
//!   many imports that its machine counts an hour (`log.rs`), or it was not running.
//! - The first object that says who a pool is stays: no other pool is made here. So does the newest, and all
//!   that were the newest within a day.

use super::log::BLOCK;
use super::{KEPT, Objects, Result, RootBody, attempt, own_keys, read_root, read_whole};
use crate::label::Identity;

/// Fences of so many epochs stay: a root of some KiB and a seal of some bytes for each import.
const FENCED: u64 = 256;
/// With more roots that it does not give, the store is away.
const REFUSED_MOST: u32 = 2;

impl Objects {
    /// Removes what nobody can go back to, and no writer can still want to put.
    pub(super) fn sweep(&self, kept: u64, now: u64) -> Result<()> {
        if let Some(oldest) = self.sweep_roots(kept, now)? {
            self.sweep_logs(oldest.root.log_start.position)?;
        }
        self.sweep_identities(now)
    }

    /// Removes old roots but for fences; answers the oldest that stays for its age, unless one before it that cannot
    /// be read may stay for its age as well. No root is older than those before it.
    fn sweep_roots(&self, kept: u64, now: u64) -> Result<Option<RootBody>> {
        let (mut before, mut all_old, mut refused) = (None, true, 0);
        for key in own_keys(&*self.bucket, "roots/", "")? {
            if let Some(epoch) = self.known_fence(&key) {
                (before, all_old) = (Some(epoch), true);
                continue;
            }
            let read = read_root(&*self.bucket, &key);
            refused += u32::from(read.is_err());
            let body = match read {
                Ok(Some(Ok(body))) => body,
                Ok(None) => continue,
                Err(error) if refused > REFUSED_MOST => return Err(error),
                // One that is damaged, or that the store does not give, may be a fence.
                Ok(Some(Err(error))) | Err(error) => {
                    tracing::debug!(root = key, %error, "an old root cannot be read, and stays");
                    all_old = false;
                    continue;
                }
            };
            if body.root.generation >= kept || body.time.saturating_add(KEPT) >= now {
                return Ok(Some(body).filter(|_| all_old));
            }
            all_old = true;
            let epoch = u64::from(body.epoch);
            let is_first = before.replace(epoch) != Some(epoch);
            if !is_first || !self.keep_fence(&key, epoch) {
                self.remove_object(&key)?;
            }
        }
        Ok(None)
    }

    /// Removes logs of epochs before this one but for seals.
    fn sweep_logs(&self, needed: u64) -> Result<()> {
        for key in own_keys(&*self.bucket, "log/", "")? {
            let epoch = key.split('/').nth(1).and_then(|epoch| epoch.parse::<u64>().ok());
            let Some(epoch) = epoch.filter(|epoch| *epoch < needed) else { continue };
            if self.known_fence(&key).is_some() {
                continue;
            }
            let kind = attempt(&*self.bucket, "reading", || self.bucket.get(&key, Some(0..1)))?;
            // What is damaged may be a seal.
            let is_seal = kind.is_some_and(|kind| kind != [BLOCK]);
            if !is_seal || !self.keep_fence(&key, epoch) {
                self.remove_object(&key)?;
            }
        }
        Ok(())
    }

    /// The epoch of a fence that was found before and is to stay.
    fn known_fence(&self, key: &str) -> Option<u64> {
        let epoch = *self.fences.lock().get(key)?;
        self.keep_fence(key, epoch).then_some(epoch)
    }

    /// Whether a fence of this epoch stays; notes it.
    fn keep_fence(&self, key: &str, epoch: u64) -> bool {
        let stays = epoch.saturating_add(FENCED) >= u64::from(self.state.lock().epoch);
        let mut fences = self.fences.lock();
        if stays {
            fences.insert(key.to_owned(), epoch);
        } else {
            fences.remove(key);
        }
        stays
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
