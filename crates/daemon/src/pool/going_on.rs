//! Failover of a pool whose process was killed: the import by the next worker of the same supervisor.
//!
//! Called by [`super::process`]. The handoff state of the dead process ([`super::left`]) is taken over: locks and
//! devices by their descriptors, a bucket by its writer number. Invariants: nothing of the pool is accessed by a
//! path that may lead through its mounts, which nobody serves yet; a store that is unreachable, or refuses
//! credentials, is waited for until this process is asked to end.

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

/// Interval of attempts to find credentials.
const AGAIN: Duration = Duration::from_secs(1);

/// A pool that this process owns.
pub(super) struct OwnedPool {
    pub(super) imported: Imported,
    /// Lock on its GUID; `None` where another copy of the pool is imported.
    pub(super) number: Option<NameLock>,
    /// Devices that were made for a new pool.
    pub(super) fresh: Option<Fresh>,
    /// The pool is untrusted: its datasets are mounted restricted (`nosuid`, `nodev`).
    pub(super) harmless: bool,
}

/// Imports the pool of a process that was killed.
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
    // The replay journal in memory contains everything that the intent log does.
    let imported = opened.and_then(|opened| Imported::open(opened, Access::WithoutLog, None, opening));
    failing.be_patient(false);
    let imported = imported.map_err(|refusal| Refusal {
        what: format!("cannot go on with '{}': {}", start.name, refusal.what),
        ..refusal
    })?;
    tracing::info!(pool = start.name, "another process goes on with the pool");
    Ok(OwnedPool { imported, number, fresh: None, harmless: left.harmless })
}

/// Opens the bucket, once there are credentials for it.
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
