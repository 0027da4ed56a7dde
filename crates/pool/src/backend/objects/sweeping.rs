//! Garbage collection of a bucket apart from segments: old roots, logs that no root needs, old claims of epochs, and
//! old identities.
//!
//! Caller: [`Objects`], once per some number of roots. Invariants:
//! - Each root's log begins in the epoch of the previous root's log, or in a later one. So objects of epochs before
//!   that of the oldest remaining root are unnecessary, no matter which writers put roots meanwhile.
//! - A writer that was stopped, and lost the pool meanwhile, acknowledges nothing: its next root has the name of the
//!   first root of the epoch after its own, and its next log block has the name of the seal in its epoch. Both are
//!   *fences*: those of the newest [`FENCED`] epochs stay at any age. An age depends on two clocks, either of which
//!   may be wrong.
//! - A fence of an earlier epoch is deleted when it is a day old: between a writer of that epoch and this one there
//!   were so many imports that its machine counts an hour (`log.rs`), or it was not running.
//! - The first identity object of a pool stays: no other pool is created here. So do the newest one, and all that
//!   were the newest within a day.

use super::epochs::{CLAIMS, claimed_epoch};
use super::log::is_block;
use super::{KEPT, Objects, Result, RootBody, attempt, decode_identity, own_keys, read_whole};

/// Number of epochs whose fences stay: a root of some KiB and a seal of some bytes for each import.
const FENCED: u64 = 256;
/// After more failed reads of roots than this, the store counts as unreachable.
const REFUSED_MOST: u32 = 2;

/// Age of a root, and the epochs that belong to it.
#[derive(Clone, Copy)]
pub(super) struct RootAge {
    generation: u64,
    /// When it was put, by its writer's clock, seconds since 1970.
    time: u64,
    epoch: u64,
    /// The epoch that its log begins in.
    log: u64,
}

impl RootAge {
    fn of(body: &RootBody) -> Self {
        let RootBody { root, time, epoch, .. } = body;
        Self { generation: root.generation, time: *time, epoch: u64::from(*epoch), log: root.log_start.position }
    }
}

impl Objects {
    /// Deletes objects that no retained state needs and that fence no writer.
    pub(super) fn sweep(&self, kept: u64, now: u64) -> Result<()> {
        if let Some(oldest) = self.sweep_roots(kept, now)? {
            self.sweep_logs(oldest)?;
        }
        self.sweep_claims()?;
        self.sweep_identities(now)
    }

    /// Deletes old roots except for fences; returns the epoch where the log of the oldest root retained for its age
    /// begins, unless an unreadable root before it may be retained for its age as well. No root is newer than a later
    /// one: a root whose time is in the future, because a clock was ahead, is old where a later one is.
    pub(super) fn sweep_roots(&self, kept: u64, now: u64) -> Result<Option<u64>> {
        let (mut before, mut all_old, mut refused) = (None, true, 0);
        let mut ahead = Vec::new();
        let keys = own_keys(&*self.bucket, "roots/", "")?;
        self.ahead.lock().retain(|key, _| keys.binary_search(key).is_ok());
        for key in keys {
            if let Some(epoch) = self.known_fence(&key) {
                (before, all_old) = (Some(epoch), true);
                continue;
            }
            let read = self.age_of(&key, now);
            refused += u32::from(read.is_err());
            let age = match read {
                Ok(Some(Ok(age))) => age,
                Ok(None) => continue,
                Err(error) if refused > REFUSED_MOST => return Err(error),
                // A damaged or unavailable root may be a fence.
                Ok(Some(Err(error))) | Err(error) => {
                    tracing::debug!(root = key, %error, "an old root cannot be read, and stays");
                    all_old = false;
                    continue;
                }
            };
            if age.generation >= kept || age.time <= now && age.time.saturating_add(KEPT) >= now {
                let oldest = ahead.first().map_or(age.log, |(_, first): &(String, RootAge)| first.log);
                return Ok(Some(oldest).filter(|_| all_old));
            }
            let is_ahead = age.time > now;
            ahead.push((key, age));
            if is_ahead {
                continue;
            }
            all_old = true;
            for (key, age) in ahead.drain(..) {
                let is_first = before.replace(age.epoch) != Some(age.epoch);
                if !is_first || !self.keep_fence(&key, age.epoch) {
                    self.remove_object(&key)?;
                }
            }
        }
        Ok(None)
    }

    /// The age of a root; one whose time is in the future is read once.
    fn age_of(&self, key: &str, now: u64) -> Result<Option<Result<RootAge>>> {
        if let Some(age) = self.ahead.lock().get(key).filter(|age| age.time > now) {
            return Ok(Some(Ok(*age)));
        }
        let read = self.read_root(key)?;
        let age = read.map(|body| body.map(|body| RootAge::of(&body)));
        if let Some(Ok(age)) = &age
            && age.time > now
        {
            self.ahead.lock().insert(key.to_owned(), *age);
        }
        Ok(age)
    }

    /// Deletes logs of epochs before this one, except for seals.
    fn sweep_logs(&self, needed: u64) -> Result<()> {
        for key in own_keys(&*self.bucket, "log/", "")? {
            let epoch = key.split('/').nth(1).and_then(|epoch| epoch.parse::<u64>().ok());
            let Some(epoch) = epoch.filter(|epoch| *epoch < needed) else { continue };
            if self.known_fence(&key).is_some() {
                continue;
            }
            let kind = attempt(&*self.bucket, "reading", || self.bucket.get(&key, Some(0..1)))?;
            // A damaged object may be a seal.
            let is_seal = kind.as_deref().is_some_and(|kind| !matches!(kind, [kind] if is_block(*kind)));
            if !is_seal || !self.keep_fence(&key, epoch) {
                self.remove_object(&key)?;
            }
        }
        Ok(())
    }

    /// Deletes claims of epochs so old that their fences are deleted.
    fn sweep_claims(&self) -> Result<()> {
        let own = u64::from(self.state.lock().epoch);
        for key in own_keys(&*self.bucket, CLAIMS, "")? {
            if claimed_epoch(&key).is_some_and(|epoch| u64::from(epoch) + FENCED < own) {
                self.remove_object(&key)?;
            }
        }
        Ok(())
    }

    /// The epoch of a fence that was found before and stays.
    fn known_fence(&self, key: &str) -> Option<u64> {
        let epoch = *self.fences.lock().get(key)?;
        self.keep_fence(key, epoch).then_some(epoch)
    }

    /// Whether a fence of this epoch stays; remembers it.
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

    /// Deletes old identities, a day after they were replaced.
    fn sweep_identities(&self, now: u64) -> Result<()> {
        let keys = own_keys(&*self.bucket, "pool/", "")?;
        let later = keys.iter().skip(2);
        for (key, next) in keys.iter().skip(1).zip(later) {
            let Some(Ok(identity)) = read_whole(&*self.bucket, "reading", next, decode_identity)? else { break };
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
