//! Pools in a bucket of an object store: checks before one is made or imported.
//!
//! Invariant: creation writes nothing to a bucket that has a pool already, and no pool is made in a
//! store without the conditional writes that fence a second writer.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use nacre_pool::PoolError;
use nacre_pool::backend::{Bucket, LastWriter, Objects};
use nacre_pool::label::{Identity, PoolState};
use nacre_remote::Address;

use super::prices::{PRICES, Prices};
use super::{kept_log, kept_parts};
use crate::Progress;
use crate::clock::now;
use crate::refusal::{Kind, Refusal};

/// Interval of progress lines of a long removal, seconds.
const NOTED_EACH: u64 = 5;

/// The property that selects how an fsync becomes durable.
pub(crate) const LOG: &str = "log";
/// Value of [`LOG`]: fsync writes a block of the intent log on this machine.
pub(crate) const LOCAL: &str = "local";
/// Value of [`LOG`]: fsync waits for a whole commit.
pub(crate) const NONE: &str = "none";

/// Refuses properties of pools in buckets where the pool lies on devices, and invalid prices.
pub(crate) fn check_property(is_in_bucket: bool, name: &str, value: &str) -> Result<(), Refusal> {
    let refused = |why: String| Err(Refusal::new(Kind::Invalid, why));
    match is_in_bucket {
        false if [LOG, PRICES].contains(&name) => refused(format!("'{name}' is a property of pools in object stores")),
        true if name == PRICES => Prices::parse(value).map(drop).or_else(|why| refused(format!("'prices': {why}"))),
        _ => Ok(()),
    }
}

/// Converts an error of a bucket.
fn refusal(bucket: &dyn Bucket, error: &PoolError) -> Refusal {
    let kind = match error {
        PoolError::Device { source, .. } => match source.kind() {
            std::io::ErrorKind::NotFound => Kind::NotFound,
            std::io::ErrorKind::PermissionDenied => Kind::Permission,
            _ => Refusal::pool("", error).kind,
        },
        _ => Kind::Io,
    };
    let refusal = match error {
        PoolError::Device { source, .. } => Refusal::new(kind, format!("'{}': {source}", bucket.name())),
        error => Refusal::new(kind, format!("'{}': {error}", bucket.name())),
    };
    match kind {
        Kind::NotFound => refusal.next("make the bucket first: pools are made in buckets that are there"),
        Kind::Permission => refusal.next(
            "credentials are those of --profile or --credentials-file, or of the environment: docs/object-store.md says of which variables",
        ),
        _ => refusal,
    }
}

/// Finds the pool in a bucket.
///
/// # Errors
/// The bucket cannot be read.
pub fn find(bucket: &dyn Bucket) -> Result<Option<Identity>, Refusal> {
    Objects::find(bucket).map_err(|error| refusal(bucket, &error))
}

/// Returns the last writer of the pool.
///
/// # Errors
/// Errors of [`find`].
pub fn last_writer(bucket: &dyn Bucket) -> Result<Option<LastWriter>, Refusal> {
    Objects::last_writer(bucket).map_err(|error| refusal(bucket, &error))
}

/// Error: there is no pool in the bucket.
#[must_use]
pub fn no_pool(bucket: &dyn Bucket) -> Refusal {
    Refusal::new(Kind::NotFound, format!("'{}': there is no pool", bucket.name()))
}

/// Error: the pool is being destroyed, or was destroyed after it was found.
#[must_use]
pub fn destroyed(bucket: &dyn Bucket) -> Refusal {
    Refusal::new(Kind::NotFound, format!("the pool in '{}' was destroyed", bucket.name()))
}

/// Returns the files that this machine has to open for a pool at this address: none of them may lie
/// in a file system of the pool itself, which is not served before they are read. `state` is the
/// directory for state that survives a reboot.
#[must_use]
pub fn needed(address: &Path, state: Option<&Path>) -> Vec<PathBuf> {
    /// Usual paths of credentials, below the home directory.
    const USUAL: [&str; 3] = [".aws", ".azure", ".config/gcloud"];
    /// Environment variables with paths of credential files.
    const NAMED: [&str; 5] = [
        "AWS_SHARED_CREDENTIALS_FILE",
        "AWS_CONFIG_FILE",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AZURE_FEDERATED_TOKEN_FILE",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    ];
    let settings = match Address::parse(&address.to_string_lossy()) {
        Ok(Address::Bucket(place)) => place.settings,
        Ok(Address::Directory(directory)) => return vec![directory],
        Err(_) => return Vec::new(),
    };
    let of_user = |path: &str| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(path));
    let credentials = match settings.credentials_file {
        Some(file) => vec![file],
        None => {
            let named = NAMED.iter().filter_map(|name| std::env::var_os(name).map(PathBuf::from));
            named.chain(USUAL.iter().filter_map(|path| of_user(path))).collect()
        }
    };
    let cache = settings.cache_dir.or_else(kept_parts::directory).filter(|_| settings.cache_size != Some(0));
    let log = settings.log_dir.or_else(|| state.map(Path::to_owned));
    let all = credentials.into_iter().chain(cache).chain(log);
    all.map(|path| path.canonicalize().unwrap_or(path)).collect()
}

/// Removes what dead processes have left; what cannot be removed takes room, and does no other harm.
pub(crate) fn remove_unfinished(bucket: &dyn Bucket) {
    if let Err(error) = bucket.remove_unfinished() {
        tracing::warn!(bucket = bucket.name(), %error, "unfinished objects stay");
    }
}

/// Checks that the store can hold a pool.
///
/// # Errors
/// The store cannot hold a pool, or cannot be read.
pub(crate) fn check(bucket: &dyn Bucket, nonce: u64) -> Result<(), Refusal> {
    remove_unfinished(bucket);
    if Objects::keeps_condition(bucket, nonce).map_err(|error| refusal(bucket, &error))? {
        return Ok(());
    }
    let what = format!("'{}': this store makes an object that is there once more (If-None-Match)", bucket.name());
    Err(Refusal::new(Kind::Invalid, what).next("two machines could write to the pool at once: it cannot lie there"))
}

/// Checks that a pool can be made there.
///
/// # Errors
/// Errors of [`check`]; there is another pool.
pub(crate) fn check_new(bucket: &dyn Bucket, name: &str, nonce: u64) -> Result<(), Refusal> {
    let doing = |refusal: Refusal| Refusal { what: format!("cannot create '{name}': {}", refusal.what), ..refusal };
    if let Some(there) = find(bucket).map_err(doing)? {
        let state = match there.state {
            // Remains of an interrupted destroy.
            PoolState::Destroyed => None,
            PoolState::Exported => Some("exported"),
            PoolState::Active => Some("potentially active"),
        };
        if let Some(state) = state {
            let what = format!("cannot create '{name}': '{}' holds {state} pool '{}'", bucket.name(), there.name);
            return Err(Refusal::new(Kind::Exists, what).next("another prefix of the bucket takes another pool"));
        }
        Objects::erase(bucket, there.pool, &mut |_| {}).map_err(|error| doing(refusal(bucket, &error)))?;
    }
    check(bucket, nonce).map_err(doing)
}

/// Remains of a destroyed pool: its objects in a bucket, and its files on this machine.
pub struct Remains<'a> {
    /// The bucket.
    pub bucket: &'a dyn Bucket,
    /// The whole address of the bucket.
    pub address: &'a str,
    /// The guid of the pool.
    pub pool: u64,
    /// Its name or address: `destroy` with it removes the remains.
    pub name: &'a str,
    /// The directory for state that survives a reboot.
    pub state: Option<&'a Path>,
}

impl std::fmt::Debug for Remains<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Remains").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Remains<'_> {
    /// Removes them.
    ///
    /// # Errors
    /// The store refuses, or does not answer: it can be retried.
    pub fn remove(&self, progress: &mut dyn Progress) -> Result<(), Refusal> {
        let (name, mut noted) = (self.name, now());
        let erased = Objects::erase(self.bucket, self.pool, &mut |removed| {
            if now() >= noted + NOTED_EACH {
                noted = now();
                progress.note(&format!("'{name}': {removed} objects were removed so far"));
            }
        });
        erased.map_err(|error| {
            let why = refusal(self.bucket, &error);
            let may = match why.kind {
                Kind::Permission => ", with credentials that may list and delete objects",
                _ => "",
            };
            let what = format!("'{name}' is destroyed, but objects of it are still in the bucket: {}", why.what);
            let named = if name.contains('?') { format!("'{name}'") } else { name.to_owned() };
            Refusal::new(why.kind, what).next(format!("`nacre pool destroy {named}` removes them{may}"))
        })?;
        kept_parts::remove(self.address, self.pool);
        kept_log::remove(self.address, self.pool, self.state);
        Ok(())
    }
}

/// Finds a pool and its last writer, for listings of pools that can be imported.
///
/// # Errors
/// Errors of [`find`].
pub fn look(bucket: &Arc<dyn Bucket>) -> Result<Option<(Identity, Option<LastWriter>)>, Refusal> {
    let Some(identity) = find(&**bucket)? else { return Ok(None) };
    Ok(Some((identity, last_writer(&**bucket)?)))
}
