//! Whether root trusts what an imported pool holds. Others than root of this machine may have written it where
//! they can write to its devices, or where it lies in a bucket: each machine with credentials for the bucket, and
//! the operator of the store.
//!
//! Used by `process.rs`. A pool that is not trusted is mounted nosuid and nodev, below a directory of its own, and
//! never outside of that, whatever its properties become later (`mount_point.rs`). Invariant: only commands of this
//! machine make a pool trusted, `create`, and `import` with `--trust` or (on devices) `-f`; nothing that the pool
//! says about itself does.

use super::{known, mount_point::PlaceRules, start::Start};
use crate::runtime;
use nacre_admin::{
    Imported, Refusal,
    pool::{self, devices::Opened},
};
use nacre_pool::label::{self, Identity};
use std::path::{Path, PathBuf};

/// The parent of the directories that untrusted pools are mounted below.
const RELOCATED: &str = "/mnt";

/// Which pool lies there.
///
/// # Errors
/// The store cannot be asked, or has listed no pool: a trusted one would be taken for an untrusted one.
pub(super) fn identity(opened: &Opened) -> Result<Option<Identity>, Refusal> {
    match opened {
        Opened::Devices(devices) => Ok(devices.first().and_then(|device| label::probe(&**device).ok().flatten())),
        Opened::Bucket(bucket, _) => {
            let found = pool::in_bucket::find(&**bucket)?;
            found.map(Some).ok_or_else(|| pool::in_bucket::no_pool(&**bucket))
        }
    }
}

/// Has a pool mounted below a directory of its own where it is not trusted; answers whether that is so.
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

/// Which directories the file systems of a pool may be mounted on.
pub(super) fn place_rules(imported: &Imported, harmless: bool) -> PlaceRules {
    PlaceRules {
        below: imported.opening.altroot.clone().filter(|_| harmless),
        is_shared: harmless || imported.bucket.is_some(),
    }
}
