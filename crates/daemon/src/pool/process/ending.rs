//! Releases the pool of this process: by an export because it must end, by undoing the creation of a new pool whose
//! maker was never notified, or after an export or destruction by a command.
//!
//! Called by `process.rs`. Invariant: a pool that is marked as destroyed has no failover, whatever happens to its
//! objects in a bucket.

use super::super::{client, expected, known};
use super::Office;
use crate::{failure::Failure, runtime};
use nacre_admin::{Progress, Refusal, Silent, fs, pool};
use nacre_pool::label::PoolState;
use std::sync::atomic::Ordering;

/// Exports the pool because the process must end.
pub(super) fn leave(office: &Office) -> Result<(), Failure> {
    let _changing = office.imported.changing.lock();
    if let Err(refusal) = pool::stays(&office.imported) {
        tracing::error!(%refusal, next = refusal.next, "the pool is let go all the same: the process is told to end");
    }
    let unmounted = fs::leave_all(&*office.mounts);
    // Accepted data becomes durable, whether or not the mounts ended in order.
    let exported = office.imported.export().map_err(Refusal::from).and(unmounted);
    exported.map_err(|refusal| {
        tracing::error!(error = %refusal, "the pool was not exported in order");
        client::failure(&refusal)
    })
}

/// Destroys a new pool that could not be mounted, or whose maker was killed before he was notified.
pub(super) fn undo(office: &Office) -> Result<(), Failure> {
    let _changing = office.imported.changing.lock();
    let unmounted = fs::leave_all(&*office.mounts);
    known::forget(office.imported.store.identity().pool, &office.imported.places());
    let destroyed = office.imported.destroy().map_err(Refusal::from).and_then(|()| office.imported.erase(&mut Silent));
    destroyed.and(unmounted).map_err(|refusal| client::failure(&refusal))
}

/// Ends this process after an export or a destruction by a command, even if objects of a destroyed pool remain in
/// its bucket.
///
/// # Errors
/// Objects of a destroyed pool could not be removed.
pub(super) fn end(office: &Office, notes: &mut dyn Progress) -> Result<(), Refusal> {
    if let Some(left) = &office.notes {
        // An exported pool has no failover.
        left.guarded.memory.ends();
    }
    let (imported, directory) = (&office.imported, runtime::ours());
    let identity = imported.store.identity();
    if identity.state != PoolState::Destroyed {
        office.gone.store(true, Ordering::SeqCst);
        return Ok(());
    }
    // If this process is killed, no message recommends importing a destroyed pool.
    expected::forget(&directory, &imported.name());
    let erased = imported.erase(notes);
    if erased.is_ok() && !office.copy {
        let forgotten = fusewire::apart(|| {
            known::forget(identity.pool, &imported.places());
            Ok(())
        });
        if let Err(error) = forgotten {
            tracing::warn!(%error, "it stays known where a pool lay that is destroyed");
        }
    }
    office.gone.store(true, Ordering::SeqCst);
    erased
}
