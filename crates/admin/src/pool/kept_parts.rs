//! Cache of a pool in an object store on this machine: its directory and size.
//!
//! Caller: [`crate::Imported`]. Invariants: the cache is private to its owner; where there can be
//! none, a pool is served without a cache, unless one was asked for.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use nacre_pool::backend::Parts;
use nacre_remote::{Address, Settings};

use super::kept_log;
use crate::refusal::{Kind, Refusal};

/// Default size limit, bytes.
const MOST: u64 = 4 << 30;
/// Minimum size, bytes; below it there is no cache.
const LEAST: u64 = 64 << 20;

/// The directory of caches; none where neither `XDG_CACHE_HOME` nor `HOME` is set.
pub(super) fn directory() -> Option<PathBuf> {
    if rustix::process::getuid().is_root() {
        return Some(PathBuf::from("/var/cache/nacre"));
    }
    let of = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let place = of("XDG_CACHE_HOME").or_else(|| Some(of("HOME")?.join(".cache")))?;
    place.is_absolute().then(|| place.join("nacre"))
}

fn open(directory: &Path, size: Option<u64>) -> io::Result<Option<Parts>> {
    DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    let free = rustix::fs::statvfs(directory)?;
    let size = size.unwrap_or_else(|| MOST.min(free.f_bavail.saturating_mul(free.f_frsize) / 4));
    if size < LEAST {
        return Ok(None);
    }
    match Parts::open(directory, size) {
        // Another process has the same pool read-only.
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Parts::unnamed(directory, size).map(Some),
        parts => parts.map(Some),
    }
}

/// Returns the cache directory of the pool at this address: a copy of its bucket is another pool with the same GUID.
fn place(address: &str, settings: &Settings, pool: u64) -> Option<PathBuf> {
    Some(settings.cache_dir.clone().or_else(directory)?.join(kept_log::name(address, pool)))
}

/// Adopts the cache of an older version, whose directory knows no address. If it is a copy's, its parts are found to be
/// wrong and are fetched again.
fn adopt_older(place: &Path, pool: u64) {
    let older = place.with_file_name(kept_log::older_name(pool));
    if !place.exists() && older.is_dir() {
        match std::fs::rename(&older, place) {
            Ok(()) => {}
            Err(error) => tracing::debug!(directory = %older.display(), %error, "an older cache is not used"),
        }
    }
}

/// Removes the cache of a pool that is gone.
pub(crate) fn remove(address: &str, pool: u64) {
    let Ok(Address::Bucket(bucket)) = Address::parse(address) else { return };
    let Some(place) = place(address, &bucket.settings, pool) else { return };
    match std::fs::remove_dir_all(&place) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(directory = %place.display(), %error, "what was kept of the pool stays");
        }
        _ => {}
    }
}

/// Returns the cache of a pool; none where it is disabled.
///
/// # Errors
/// A directory that was asked for cannot be used.
pub(crate) fn of(address: &str, pool: u64) -> Result<Option<Parts>, Refusal> {
    let Ok(Address::Bucket(bucket)) = Address::parse(address) else { return Ok(None) };
    let (asked, size) = (bucket.settings.cache_dir.is_some(), bucket.settings.cache_size);
    let Some(place) = place(address, &bucket.settings, pool).filter(|_| size != Some(0)) else { return Ok(None) };
    adopt_older(&place, pool);
    open(&place, size).or_else(|error| match asked {
        false => {
            tracing::warn!(directory = %place.display(), %error, "nothing of the pool can be kept on this machine");
            Ok(None)
        }
        true => Err(Refusal::new(Kind::Io, format!("cannot keep anything in '{}': {error}", place.display()))
            .next("--cache-dir names another directory, --cache-size 0 does without")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_of_a_copy_is_its_own() {
        let caches = tempfile::tempdir().unwrap();
        let address = |name: &str| format!("s3://b/{name}?cache-dir={}&cache-size={}", caches.path().display(), LEAST);
        let older = caches.path().join(kept_log::older_name(7));
        std::fs::create_dir(&older).unwrap();
        drop(of(&address("tank"), 7).unwrap().unwrap());
        assert!(!older.exists(), "the first one has it");
        drop(of(&address("copy"), 7).unwrap().unwrap());
        let place = |name: &str| caches.path().join(kept_log::name(&address(name), 7));
        assert!(place("tank").is_dir() && place("copy").is_dir());
        remove(&address("copy"), 7);
        assert!(place("tank").is_dir() && !place("copy").exists());
    }
}
