//! Roots of a pool in a bucket: the newest one, those after it, and whether the bucket still has the pool of this
//! program.
//!
//! Caller: [`Objects`]. Invariants:
//! - A root of another pool is never used: its pool was made in the place of this one, or the buckets changed places.
//! - A list may lag behind: the names after the last listed one are requested as well.
//! - A damaged root is a gap: a whole one after it is newer.

use std::collections::BTreeMap;

use super::bucket::Bucket;
use super::listing::newest_keys;
use super::root_body::{RootBody, read_root, read_root_for_writing};
use super::{LOOKED, NewestRoot, Objects, Ordering, Result, UNREADABLE_MOST, attempt, failed, host_name, io};
use crate::error::PoolError;
use crate::label::Root;

/// Number of names after the last listed one that are requested: more than a writer uses while a list lags.
const UNLISTED_MOST: u64 = 1000;

fn another_pool() -> PoolError {
    PoolError::Refused("another pool is in this bucket now".to_owned())
}

/// Reads a root of a pool; [`PoolError::Refused`] inside for one of another pool.
pub(super) fn read_own_root(bucket: &dyn Bucket, key: &str, pool: u64) -> Result<Option<Result<RootBody>>> {
    let read = read_root(bucket, key)?;
    Ok(read.map(|body| {
        let body = body?;
        if body.root.pool == pool { Ok(body) } else { Err(another_pool()) }
    }))
}

pub(super) fn root_key(generation: u64) -> String {
    format!("roots/{generation:020}")
}

fn generation_of(key: &str) -> Option<u64> {
    let generation = key.strip_prefix("roots/")?.parse().ok()?;
    (root_key(generation) == key).then_some(generation)
}

/// A damaged newest root, which a reader polls less and less often: each poll costs several requests.
pub(super) struct DamagedRoot {
    /// Generation of the root before it.
    after: u64,
    /// Number of polls since the damage was found.
    polls: usize,
    error: PoolError,
}

impl Objects {
    /// Reads all readable roots of a pool, by generation; also returns whether there are later, unreadable ones.
    ///
    /// # Errors
    /// [`PoolError::Device`].
    pub fn readable_roots(bucket: &dyn Bucket, pool: u64) -> Result<(BTreeMap<u64, Root>, bool)> {
        let (mut found, mut lost) = (BTreeMap::new(), false);
        for key in newest_keys(bucket, "roots/", "")? {
            let body = read_own_root(bucket, &key, pool)?;
            lost = !matches!(body, Some(Ok(_)));
            if let Some(Ok(body)) = body {
                found.insert(body.root.generation, body.root);
            }
        }
        Ok((found, lost))
    }

    pub(super) fn read_root(&self, key: &str) -> Result<Option<Result<RootBody>>> {
        read_own_root(&*self.bucket, key, self.pool)
    }

    /// Whether a root of this generation exists, readable or not.
    fn has_root(&self, generation: u64) -> Result<bool> {
        let key = root_key(generation);
        Ok(attempt(&*self.bucket, "reading", || self.bucket.get_for_writing(&key))?.is_some())
    }

    /// Whether a root newer than this one exists.
    pub(super) fn has_newer(&self, generation: u64) -> Result<bool> {
        let listed = newest_keys(&*self.bucket, "roots/", &root_key(generation))?;
        Ok(!listed.is_empty() || self.has_root(generation.saturating_add(1))?)
    }

    /// Returns the names of the newest roots, also of those that a list lacks.
    fn newest_root_keys(&self) -> Result<Vec<String>> {
        let mut keys = newest_keys(&*self.bucket, "roots/", "")?;
        let listed = keys.last().and_then(|key| generation_of(key)).unwrap_or(0);
        for generation in (1..=UNLISTED_MOST).filter_map(|number| listed.checked_add(number)) {
            if !self.has_root(generation)? {
                break;
            }
            keys.push(root_key(generation));
        }
        Ok(keys)
    }

    pub(super) fn find_newest(&self) -> Result<Option<NewestRoot>> {
        let now = self.writer.moment();
        let mut keys = self.newest_root_keys()?;
        let (mut lost, mut foreign) = (0, None);
        while let Some(key) = keys.pop().filter(|_| lost < UNREADABLE_MOST) {
            match self.read_root(&key)? {
                Some(Ok(body)) => return Ok(Some(NewestRoot { root: self.take_up(body, now)?, lost })),
                Some(Err(error @ PoolError::Refused(_))) => foreign = Some(error),
                Some(Err(_)) | None => {}
            }
            lost += 1;
        }
        foreign.map_or(Ok(None), Err)
    }

    pub(super) fn find_newer(&self, generation: u64) -> Result<Option<Root>> {
        if let Some(known) = self.damaged.lock().as_mut().filter(|known| known.after == generation) {
            known.polls += 1;
            let is_due = known.polls < LOOKED && known.polls.is_power_of_two() || known.polls.is_multiple_of(LOOKED);
            if !is_due {
                return Err(known.error.clone());
            }
        }
        let found = self.look_for_newer(generation);
        let mut damaged = self.damaged.lock();
        match &found {
            Err(error @ PoolError::Format(_)) => {
                let polls = damaged.as_ref().filter(|known| known.after == generation).map_or(0, |known| known.polls);
                *damaged = Some(DamagedRoot { after: generation, polls, error: error.clone() });
            }
            _ => *damaged = None,
        }
        found
    }

    fn look_for_newer(&self, generation: u64) -> Result<Option<Root>> {
        let (mut next, mut damage) = (None, None);
        match self.read_root(&root_key(generation.saturating_add(1)))? {
            Some(Ok(body)) => next = Some(body.root),
            Some(Err(error @ PoolError::Refused(_))) => return Err(error),
            Some(Err(error)) => damage = Some(error),
            // Names have gaps where states were discarded, and old roots are deleted.
            None if !self.asked.fetch_add(1, Ordering::Relaxed).is_multiple_of(LOOKED) => return Ok(None),
            None => {}
        }
        // Where there is one newer root, there may be many.
        let after = root_key(next.as_ref().map_or(generation, |root: &Root| root.generation));
        for key in newest_keys(&*self.bucket, "roots/", &after)?.iter().rev().take(UNREADABLE_MOST as usize) {
            match self.read_root(key)? {
                Some(Ok(body)) => {
                    next = Some(body.root);
                    break;
                }
                Some(Err(error @ PoolError::Refused(_))) => return Err(error),
                Some(Err(_)) | None => {}
            }
        }
        if let Some(next) = &next {
            self.note_root(next.generation);
        }
        match damage {
            Some(error) if next.is_none() => Err(error),
            _ => Ok(next),
        }
    }

    /// Refuses a bucket that does not have the root before the next one, which this writer has put or found: another
    /// bucket may be in its place. A damaged one proves nothing. Returns `false` where newer ones are there instead: those
    /// of another writer.
    pub(super) fn has_previous(&self, generation: u64, nonce: u64) -> Result<bool> {
        let key = root_key(generation);
        let error = match read_root_for_writing(&*self.bucket, &key)? {
            Some(Ok(body)) if body.root.pool != self.pool => another_pool(),
            Some(Ok(body)) if body.nonce != nonce => {
                let host = host_name(&body.host);
                PoolError::Refused(format!(
                    "the bucket was exchanged: it has a state of '{host}' in the place of the last one"
                ))
            }
            Some(_) => return Ok(true),
            None if self.has_newer(generation)? => return Ok(false),
            // A reply may be wrong: the next commit asks again.
            None => {
                let gone =
                    io::Error::new(io::ErrorKind::NotFound, format!("'{key}' is gone, or another bucket is there"));
                return Err(failed(&*self.bucket, "reading", gone));
            }
        };
        self.fence();
        Err(error)
    }
}
