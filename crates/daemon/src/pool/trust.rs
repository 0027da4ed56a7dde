//! Whether root trusts the content of an imported pool. Others than root of this machine may have written it: users
//! who can write to its devices; for a pool in a bucket, each machine with credentials for the bucket, and the
//! operator of the store.
//!
//! Used by `process.rs`. An untrusted pool is mounted nosuid and nodev, below a directory of its own, and never
//! outside of that, whatever its properties become later (`mount_point.rs`). Invariant: only commands of this
//! machine make a pool trusted, `create`, and `import` with `--trust` or (on devices) `-f`; nothing in the pool
//! itself does.

use super::{known, mount_point::PlaceRules, start::Start};
use crate::runtime;
use nacre_admin::{
    Imported, Refusal,
    pool::{self, devices::Opened},
};
use nacre_pool::label::{self, Identity};
use std::path::{Path, PathBuf};

/// Parent of the directories that untrusted pools are mounted below.
const RELOCATED: &str = "/mnt";

/// Returns the identity of the pool on these devices or in this bucket.
///
/// # Errors
/// The store does not answer, or has listed no pool: without its identity a trusted pool would count as untrusted.
pub(super) fn identity(opened: &Opened) -> Result<Option<Identity>, Refusal> {
    match opened {
        Opened::Devices(devices) => Ok(devices.first().and_then(|device| label::probe(&**device).ok().flatten())),
        Opened::Bucket(bucket, _) => {
            let found = pool::in_bucket::find(&**bucket)?;
            found.map(Some).ok_or_else(|| pool::in_bucket::no_pool(&**bucket))
        }
    }
}

/// Sets an altroot of its own for an untrusted pool; returns whether the pool is untrusted.
pub(super) fn relocate(
    start: &Start,
    opened: &Opened,
    identity: Option<&Identity>,
    altroot: &mut Option<PathBuf>,
) -> bool {
    if runtime::user() != 0 {
        return false;
    }
    let (writable, lift) = match opened {
        Opened::Devices(devices) => match devices.iter().find(|device| device.is_anybodys()) {
            Some(device) => (format!("'{}' can be written or replaced by others than root", device.name()), "-f"),
            None => return false,
        },
        Opened::Bucket(_, address) if identity.is_some_and(|there| known::is_trusted(there.pool, address)) => {
            return false;
        }
        Opened::Bucket(bucket, _) => {
            (format!("'{}' can be written by everybody with credentials for the bucket", bucket.name()), "--trust")
        }
    };
    let below = altroot.get_or_insert_with(|| Path::new(RELOCATED).join(&start.name));
    crate::report::tell(&format!(
        "{writable}: '{}' is imported nosuid, nodev, and below '{}' ({lift}: as its properties say)",
        start.name,
        below.display()
    ));
    true
}

/// Returns the rules for mount points of a pool.
pub(super) fn place_rules(imported: &Imported, harmless: bool) -> PlaceRules {
    PlaceRules {
        below: imported.opening.altroot.clone().filter(|_| harmless),
        is_shared: harmless || imported.bucket.is_some(),
        bucket: imported.bucket_directory(),
    }
}
