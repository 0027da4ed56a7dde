//! A read-only import of a pool that another machine writes to: it follows the writer's commits,
//! and its mounts with it.
//!
//! Called by the process that has imported the pool, every second or so, while no verb changes
//! anything. Invariant: a step that fails is retried the next time, from where it stopped.

use super::mounting::mount_all;
use super::moves;
use super::objects::{MountPointSetting, Objects};
use crate::imported::durable;
use crate::{Imported, Mounts, Progress, Refusal, What};

/// Moves to the newest state that the writer has committed; returns whether there was one.
///
/// With `mount`, new file systems are mounted.
///
/// # Errors
/// A state that cannot be read, or mounted.
pub fn follow(pool: &Imported, mounts: &dyn Mounts, mount: bool, progress: &mut dyn Progress) -> Result<bool, Refusal> {
    let followed = go_on(pool, mounts, mount, progress);
    pool.following.lock().error = followed.as_ref().err().map(|refusal| refusal.what.clone());
    followed
}

fn go_on(pool: &Imported, mounts: &dyn Mounts, mount: bool, progress: &mut dyn Progress) -> Result<bool, Refusal> {
    let used = pool.following.lock().generation;
    pool.store.follow(used)?;
    let root = pool.store.root();
    if used == root.generation {
        return Ok(false);
    }
    let ahead = pool.pool.look_ahead(&durable(&root)?)?;
    pool.pool.go_on(ahead, &mut |dataset, changes| mounts.changed(dataset, changes))?;
    pool.take_name()?;
    pool.apply_properties()?;
    remount(pool, mounts)?;
    if mount {
        mount_all(pool, mounts, progress)?;
    }
    pool.following.lock().generation = root.generation;
    tracing::debug!(generation = root.generation, "went on to what the writer has committed");
    Ok(true)
}

/// Updates mounts to the current properties: destroyed file systems and those with another mount
/// point are unmounted, even while they are in use.
fn remount(pool: &Imported, mounts: &dyn Mounts) -> Result<(), Refusal> {
    let mounted = mounts.mounted();
    let leaving: Vec<What> = {
        let mut objects = Objects::now(pool, mounts);
        let mut leaves = |what: What, at: &std::path::Path| -> Result<bool, Refusal> {
            if !objects.catalog.is_there(what.dataset, what.snapshot.map(nacre_pool::Txg))? {
                return Ok(true);
            }
            if what.snapshot.is_some() {
                return Ok(false);
            }
            let off = objects.effective(what.dataset, "canmount")?.value == "off";
            Ok(off
                || match objects.place(what.dataset)? {
                    MountPointSetting::At(place) => place != at,
                    MountPointSetting::Legacy => false,
                    MountPointSetting::None => true,
                })
        };
        let mut leaving = Vec::new();
        for mounted in &mounted {
            if leaves(mounted.what, &mounted.at)? {
                leaving.push(mounted.what);
            }
        }
        leaving
    };
    // The last mount is on top.
    for what in leaving.iter().rev() {
        mounts.unmount(*what, true)?;
    }
    let heads: Vec<u64> =
        mounts.mounted().iter().filter(|one| one.what.snapshot.is_none()).map(|one| one.what.dataset).collect();
    moves::refresh(pool, mounts, &heads)
}
