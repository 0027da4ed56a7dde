//! The import of a pool whose process was killed, by the next worker of the same guardian.
//!
//! Called by [`super::process`]. What the dead one noted ([`super::left`]) is taken over: locks and devices
//! by their descriptors, a bucket by the number by which it was written to. Invariants: nothing of the pool is
//! asked for by a path that may lead through its mounts, which nobody serves yet; a store that is away, or
//! refuses credentials, is waited for until this process is told to end.

use super::{
    left::PoolLeft,
    name_lock::NameLock,
    start::{How, Start},
};
use crate::clock;
use nacre_admin::{
    Imported, Kind, Opening, Refusal,
    failing::Failing,
    pool::devices::{self, Fresh, Opened},
};
use nacre_pool::{device::Device, store::Access};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

/// How long to wait for credentials that are not there before they are looked for again.
const AGAIN: Duration = Duration::from_secs(1);

/// A pool that this process owns.
pub(super) struct OwnedPool {
    pub(super) imported: Imported,
    /// The lock on its number; none where another copy of it is imported.
    pub(super) number: Option<NameLock>,
    /// What was made for a new pool.
    pub(super) fresh: Option<Fresh>,
    /// What it holds gives nobody more rights.
    pub(super) harmless: bool,
}

/// The pool of a process that was killed.
pub(super) fn go_on(
    start: &Start,
    directory: &Path,
    left: &PoolLeft,
    mut opening: Opening,
) -> Result<OwnedPool, Refusal> {
    let failing = Arc::clone(&opening.failing);
    if let How::Import { old, temporary: true, .. } = &start.how
        && start.name != *old
    {
        opening.alias = Some(start.name.clone());
    }
    let number = left.number.map(|number| NameLock::left_number(directory, left.guid, number)).transpose();
    let number = number.map_err(|failure| Refusal::new(Kind::Io, failure.what))?;
    let opened = match left.writer {
        Some(writer) => {
            failing.be_patient(true);
            opening.after = Some(writer);
            open_store(&start.devices, &failing)
        }
        None => {
            Ok(Opened::Devices(left.adopt().into_iter().map(|device| Arc::new(device) as Arc<dyn Device>).collect()))
        }
    };
    // Its log has nothing that the kept one has not.
    let imported = opened.and_then(|opened| Imported::open(opened, Access::WithoutLog, None, opening));
    failing.be_patient(false);
    let imported = imported.map_err(|refusal| Refusal {
        what: format!("cannot go on with '{}': {}", start.name, refusal.what),
        ..refusal
    })?;
    tracing::info!(pool = start.name, "another process goes on with the pool");
    Ok(OwnedPool { imported, number, fresh: None, harmless: left.harmless })
}

/// The bucket, once there are credentials for it.
fn open_store(places: &[PathBuf], failing: &Failing) -> Result<Opened, Refusal> {
    let mut told = false;
    loop {
        match devices::open_home(places, true) {
            Err(refusal) if !failing.is_given_up() => {
                if !std::mem::replace(&mut told, true) {
                    tracing::error!(error = %refusal, "the store cannot be asked: everybody waits until it can be");
                }
                clock::pause(AGAIN);
            }
            opened => return opened,
        }
    }
}
