//! Directory of the intent log of a pool in an object store on this machine (`log=local`).
//!
//! Caller: [`crate::Imported`]. Invariants: it is private to its owner; where there is no directory
//! for it, blocks of the log are objects (`log=remote`), unless a directory was asked for.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nacre_pool::backend::LocalLog;
use nacre_remote::Address;
use serde::Deserialize;

use crate::refusal::{Kind, Refusal};

/// Number of the address of a bucket, without the way there and credentials. A bucket of the same name at another
/// server is another bucket.
fn number(address: &str) -> u64 {
    let text = match Address::parse(address) {
        Ok(Address::Directory(path)) => Address::Directory(path.canonicalize().unwrap_or(path)).name(),
        Ok(address) => format!("{} {}", address.name(), address.endpoint().unwrap_or_default()),
        Err(_) => address.to_owned(),
    };
    LocalLog::number_of(&text)
}

/// Name of the files of a pool at this address: a copy of its bucket is another pool with the same GUID.
pub(super) fn name(address: &str, pool: u64) -> String {
    format!("{pool:016x}-{:016x}", number(address))
}

/// Name of the files of a pool that older versions have made, whatever its address.
pub(super) fn older_name(pool: u64) -> String {
    format!("{pool:016x}")
}

/// Returns the directory of the logs of all pools, and whether it was asked for.
fn place(address: &str, state: Option<&Path>) -> (Option<PathBuf>, bool) {
    let named = match Address::parse(address) {
        Ok(Address::Bucket(address)) => address.settings.log_dir,
        _ => None,
    };
    let asked = named.is_some();
    (named.or_else(|| Some(state?.join("log"))), asked)
}

/// Whether a directory is this user's: another owner could have other files replayed.
fn is_own(directory: &Path) -> std::io::Result<bool> {
    Ok(std::fs::symlink_metadata(directory)?.uid() == rustix::process::geteuid().as_raw())
}

/// Returns the logs of a pool; none where there is no directory for them, or why they cannot be used.
///
/// # Errors
/// A directory that was asked for cannot be used.
pub(crate) fn of(address: &str, pool: u64, state: Option<&Path>) -> Result<Result<Option<LocalLog>, String>, Refusal> {
    let (Some(place), asked) = place(address, state) else { return Ok(Ok(None)) };
    let (directory, older) = (place.join(name(address, pool)), place.join(older_name(pool)));
    let opened = LocalLog::open(&directory, pool, number(address)).and_then(|log| {
        let older = older.is_dir().then_some(older);
        let all_own = is_own(&directory)? && older.as_deref().map_or(Ok(true), is_own)?;
        let is_of_address = was_at(address, pool, state);
        if all_own {
            Ok(log.with_older(older, is_of_address))
        } else {
            Err(std::io::Error::other("it belongs to another user"))
        }
    });
    match opened {
        Ok(log) => Ok(Ok(Some(log))),
        Err(error) if asked => {
            Err(Refusal::new(Kind::Io, format!("cannot keep a log in '{}': {error}", directory.display()))
                .next("--log-dir names another directory, log=remote does without"))
        }
        Err(error) => {
            tracing::warn!(directory = %directory.display(), %error, "no log can be kept on this machine: it goes to the store");
            Ok(Err(format!("'{}': {error}", directory.display())))
        }
    }
}

/// Record of a pool's last import on this machine, as far as it is read here.
#[derive(Deserialize)]
struct LastImport {
    devices: Vec<PathBuf>,
}

/// Whether the last import of a pool on this machine was at this address; an import of a copy beside it is not recorded.
fn was_at(address: &str, pool: u64, state: Option<&Path>) -> bool {
    let record = state.map(|state| state.join("pools").join(format!("{pool:016x}.json")));
    let Some(text) = record.and_then(|record| std::fs::read(record).ok()) else { return false };
    let Ok(LastImport { devices }) = serde_json::from_slice::<LastImport>(&text) else { return false };
    matches!(&*devices, [there] if number(&there.to_string_lossy()) == number(address))
}

/// Returns the file with the newest state of a pool that this machine has seen at this address.
pub(crate) fn seen(address: &str, pool: u64, state: Option<&Path>) -> Option<PathBuf> {
    Some(state?.join("pools").join(format!("{}.seen", name(address, pool))))
}

/// Returns the file of [`seen`] of older versions, which knows no address.
pub(crate) fn seen_anywhere(pool: u64, state: Option<&Path>) -> Option<PathBuf> {
    Some(state?.join("pools").join(format!("{}.seen", older_name(pool))))
}

/// Removes the logs of a destroyed pool. Logs of older versions stay: a copy of the bucket may own them.
pub(crate) fn remove(address: &str, pool: u64, state: Option<&Path>) {
    if let Some(seen) = seen(address, pool, state) {
        // If it remains, it belongs to a pool that does not exist any more.
        let _ = std::fs::remove_file(seen);
    }
    let (Some(place), _) = place(address, state) else { return };
    let directory = place.join(name(address, pool));
    match std::fs::remove_dir_all(&directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            tracing::warn!(directory = %directory.display(), %error, "logs of the pool stay");
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Addresses of three buckets.
    const THREE: [&str; 3] =
        ["s3://b/tank?endpoint=http://127.0.0.1:1", "s3://b/copy?endpoint=http://127.0.0.1:1", "s3://b/tank"];

    #[test]
    fn copies_of_a_bucket_have_files_of_their_own() {
        let state = tempfile::tempdir().unwrap();
        let older = state.path().join("log").join(older_name(7));
        std::fs::create_dir_all(&older).unwrap();
        let place = |address: &str| state.path().join("log").join(name(address, 7));
        for address in THREE {
            drop(of(address, 7, Some(state.path())).unwrap().unwrap().unwrap());
            std::fs::write(place(address).join("1.log"), "").unwrap();
        }
        remove(THREE[1], 7, Some(state.path()));
        assert!(older.exists() && !place(THREE[1]).exists());
        assert!([THREE[0], THREE[2]].iter().all(|address| place(address).join("1.log").exists()));
        // The last import says whose the log of an older version is.
        assert!(!was_at(THREE[2], 7, Some(state.path())));
        let record = state.path().join("pools").join(format!("{}.json", older_name(7)));
        std::fs::create_dir(state.path().join("pools")).unwrap();
        std::fs::write(record, r#"{"name":"tank","devices":["s3://b/tank?profile=x"],"trusted":true}"#).unwrap();
        assert_eq!(THREE.map(|address| was_at(address, 7, Some(state.path()))), [false, false, true]);
        // The way there is no part of it.
        assert_eq!(name("s3://b/tank?profile=x&cache-size=0", 7), name(THREE[2], 7));
    }
}
