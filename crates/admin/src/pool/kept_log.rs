//! Directory of the intent log of a pool in an object store on this machine (`log=local`).
//!
//! Caller: [`crate::Imported`]. Invariants: it is private to its owner; where there is no directory
//! for it, blocks of the log are objects (`log=remote`), unless a directory was asked for.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nacre_pool::backend::LocalLog;
use nacre_remote::Address;

use crate::refusal::{Kind, Refusal};

/// Returns the directory of a pool's logs, and whether it was asked for.
fn place(address: &str, pool: u64, state: Option<&Path>) -> (Option<PathBuf>, bool) {
    let named = match Address::parse(address) {
        Ok(Address::Bucket(address)) => address.settings.log_dir,
        _ => None,
    };
    let asked = named.is_some();
    let directory = named.or_else(|| Some(state?.join("log")));
    (directory.map(|directory| directory.join(format!("{pool:016x}"))), asked)
}

/// Returns the logs of a pool; none where there is no directory for them, or why they cannot be used.
///
/// # Errors
/// A directory that was asked for cannot be used.
pub(crate) fn of(address: &str, pool: u64, state: Option<&Path>) -> Result<Result<Option<LocalLog>, String>, Refusal> {
    let (Some(directory), asked) = place(address, pool, state) else { return Ok(Ok(None)) };
    let opened = LocalLog::open(&directory, pool).and_then(|log| {
        // Its owner could have other files replayed.
        let is_own = std::fs::symlink_metadata(&directory)?.uid() == rustix::process::geteuid().as_raw();
        if is_own { Ok(log) } else { Err(std::io::Error::other("it belongs to another user")) }
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

/// Returns the file with the newest state of a pool that this machine has seen.
pub(crate) fn seen(pool: u64, state: Option<&Path>) -> Option<PathBuf> {
    Some(state?.join("pools").join(format!("{pool:016x}.seen")))
}

/// Removes the logs of a pool that is gone.
pub(crate) fn remove(address: &str, pool: u64, state: Option<&Path>) {
    if let Some(seen) = seen(pool, state) {
        // If it remains, it belongs to a pool that does not exist any more.
        let _ = std::fs::remove_file(seen);
    }
    let (Some(directory), _) = place(address, pool, state) else { return };
    match std::fs::remove_dir_all(&directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            tracing::warn!(directory = %directory.display(), %error, "logs of the pool stay");
        }
        _ => {}
    }
}
