//! Cache of a pool in an object store on this machine: its directory and size.
//!
//! Caller: [`crate::Imported`]. Invariants: the cache is private to its owner; where there can be
//! none, a pool is served without a cache, unless one was asked for.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use nacre_pool::backend::Parts;
use nacre_remote::{Address, BucketAddress};

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

/// Returns the cache directory of a pool.
fn place(address: &BucketAddress, pool: u64) -> Option<PathBuf> {
    Some(address.settings.cache_dir.clone().or_else(directory)?.join(format!("{pool:016x}")))
}

/// Removes the cache of a pool that is gone.
pub(crate) fn remove(address: &str, pool: u64) {
    let Ok(Address::Bucket(address)) = Address::parse(address) else { return };
    let Some(place) = place(&address, pool) else { return };
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
    let Ok(Address::Bucket(address)) = Address::parse(address) else { return Ok(None) };
    let (asked, size) = (address.settings.cache_dir.is_some(), address.settings.cache_size);
    let Some(place) = place(&address, pool).filter(|_| size != Some(0)) else { return Ok(None) };
    open(&place, size).or_else(|error| match asked {
        false => {
            tracing::warn!(directory = %place.display(), %error, "nothing of the pool can be kept on this machine");
            Ok(None)
        }
        true => Err(Refusal::new(Kind::Io, format!("cannot keep anything in '{}': {error}", place.display()))
            .next("--cache-dir names another directory, --cache-size 0 does without")),
    })
}
