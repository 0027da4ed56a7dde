//! `rollback`: restores a file system to a snapshot.

use std::collections::HashSet;

use nacre_pool::engine::DestroySet;
use serde::{Deserialize, Serialize};

use super::destroying::{self, Doom, ToDestroy};
use super::moves::{self, Gone};
use super::objects::Objects;
use super::refused;
use crate::{Imported, Kind, Mounts, Refusal};

/// Arguments of `rollback`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToRollBack {
    /// The snapshot.
    pub snapshot: String,
    /// Destroys newer snapshots and bookmarks.
    pub newer: bool,
    /// Destroys the clones of newer snapshots as well.
    pub clones: bool,
    /// Unmounts even file systems in use.
    pub force: bool,
}

/// Objects that are newer than the snapshot and have to be destroyed.
struct Between {
    id: u64,
    part: String,
    filesystem: String,
    /// The newer snapshots, the oldest first, by the part after the `@`.
    snapshots: Vec<String>,
    bookmarks: Vec<String>,
    clones: Vec<String>,
}

/// Rolls a file system back while it is mounted and in use. Mounts below it are unmounted for that and mounted again.
pub(super) fn roll_back(pool: &Imported, mounts: &dyn Mounts, what: &ToRollBack) -> Result<(), Refusal> {
    let doing = format!("cannot rollback to '{}'", what.snapshot);
    let between = between(&mut Objects::now(pool, mounts), what)?;
    if !between.clones.is_empty() && !what.clones {
        let refusal = Refusal::new(Kind::Busy, format!("{doing}: clones of previous snapshots exist"));
        let next = format!(
            "use '-R' to force deletion of the following clones and dependents:\n{}",
            between.clones.join("\n")
        );
        return Err(refusal.next(next));
    }
    if !(between.snapshots.is_empty() && between.bookmarks.is_empty() || what.newer || what.clones) {
        let snapshots = between.snapshots.iter().map(|name| format!("{}@{name}", between.filesystem));
        let bookmarks = between.bookmarks.iter().map(|name| format!("{}#{name}", between.filesystem));
        let names: Vec<String> = snapshots.chain(bookmarks).collect();
        let refusal = Refusal::new(Kind::Busy, format!("{doing}: more recent snapshots or bookmarks exist"));
        return Err(refusal.next(format!(
            "use '-r' to force deletion of the following snapshots and bookmarks:\n{}",
            names.join("\n")
        )));
    }
    let (doom, made) = doomed(&mut Objects::now(pool, mounts), &between, what)?;
    let _going = destroying::going(pool, mounts, &doom, &doing)?;
    // No cached write of the kernel may come after the files were exchanged. A mount that cannot be
    // unmounted is in use: nothing has changed yet.
    mounts.settle(&[between.id])?;
    let snapshots = destroying::leave_snapshots(mounts, &doom, what.force)?;
    let rolled = exchange(pool, mounts, what, &between, &doom);
    match &rolled {
        Ok(clones) => {
            clones.tidy(mounts, &made);
            destroying::forget_snapshots(mounts, &doom);
        }
        Err(_) => snapshots.back(mounts),
    }
    rolled.map(drop)
}

/// Unmounts what is mounted below, and exchanges the files; returns the unmounted clones, which are destroyed.
fn exchange(
    pool: &Imported,
    mounts: &dyn Mounts,
    what: &ToRollBack,
    between: &Between,
    doom: &Doom,
) -> Result<Gone, Refusal> {
    let doing = format!("cannot rollback to '{}'", what.snapshot);
    let clones = moves::unmount(mounts, &doom.filesystems, what.force)?;
    let mut below = moves::with_below(mounts, &[between.id]);
    below.retain(|id| *id != between.id);
    let gone = match moves::unmount(mounts, &below, what.force) {
        Ok(gone) => gone,
        Err(refusal) => {
            clones.back(mounts);
            return Err(refusal);
        }
    };
    let bookmarks = between.bookmarks.iter().map(|name| (between.id, name.clone())).collect();
    let newer = DestroySet { bookmarks, ..doom.destroy_set(false) };
    let rolled = mounts.replace(between.id, &mut || {
        pool.pool.roll_back_over(between.id, &between.part, &newer).map_err(|error| refused(&doing, &error))
    });
    gone.back(mounts);
    match rolled {
        Ok(()) => Ok(clones),
        Err(refusal) => {
            clones.back(mounts);
            Err(refusal)
        }
    }
}

/// Returns the newer objects as a plan, and the clones whose mount points are inherited or default.
fn doomed(objects: &mut Objects<'_>, between: &Between, what: &ToRollBack) -> Result<(Doom, HashSet<u64>), Refusal> {
    let (Some(first), Some(last)) = (between.snapshots.first(), between.snapshots.last()) else {
        return Ok(Default::default());
    };
    let target = format!("{}@{first}%{last}", between.filesystem);
    let doom = ToDestroy { target, clones: what.clones, keep_below: true, force: what.force, ..ToDestroy::default() };
    let doom = destroying::of_snapshots(objects, &doom)?;
    let made = moves::unchosen(objects, &doom.filesystems)?;
    Ok((doom, made))
}

fn between(objects: &mut Objects<'_>, what: &ToRollBack) -> Result<Between, Refusal> {
    let (id, to) = objects.snapshot("open", &what.snapshot)?;
    let filesystem = objects.known(id)?.name.clone();
    let part = objects.catalog.snapshot(id, to)?.name;
    let mut clones = Vec::new();
    let mut snapshots = Vec::new();
    for (txg, row) in objects.catalog.snapshot_rows(id)?.into_iter().filter(|(txg, _)| *txg > to) {
        snapshots.push(row.name);
        clones.extend(destroying::clone_names(objects, id, txg)?);
    }
    let bookmarks = objects.catalog.bookmarks(id)?.into_iter().filter(|(_, row)| row.txg > to);
    let bookmarks = bookmarks.map(|(name, _)| name).collect();
    Ok(Between { id, part, filesystem, snapshots, bookmarks, clones })
}
