//! `rollback`: a file system becomes what a snapshot is.

use std::collections::HashSet;

use nacre_pool::engine::DestroySet;
use serde::{Deserialize, Serialize};

use super::destroying::{self, Doom, ToDestroy};
use super::objects::Objects;
use super::{moves, refused};
use crate::{Imported, Kind, Mounts, Refusal};

/// Where to go back to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToRollBack {
    /// The snapshot.
    pub snapshot: String,
    /// Newer snapshots and bookmarks go.
    pub newer: bool,
    /// And the clones of these.
    pub clones: bool,
    /// Unmount even what is in use.
    pub force: bool,
}

/// What stands between a head and a snapshot of it.
struct Between {
    id: u64,
    part: String,
    filesystem: String,
    /// The newer snapshots, the oldest first, as they are called behind the `@`.
    snapshots: Vec<String>,
    bookmarks: Vec<String>,
    clones: Vec<String>,
}

/// Rolls back, while it is mounted and in use. What is mounted below it is unmounted for that and
/// mounted again.
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
    // Nothing that the kernel still keeps may come after the files are others. What cannot be
    // unmounted is in use: nothing has changed yet.
    mounts.settle(&[between.id])?;
    destroying::leave_snapshots(mounts, &doom, what.force)?;
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
        doom.partial.iter().try_for_each(|id| pool.pool.abort_below(*id)).map_err(|error| refused(&doing, &error))?;
        pool.pool.roll_back_over(between.id, &between.part, &newer).map_err(|error| refused(&doing, &error))
    });
    gone.back(mounts);
    match &rolled {
        Ok(()) => {
            clones.tidy(mounts, &made);
            destroying::forget_snapshots(mounts, &doom);
        }
        Err(_) => clones.back(mounts),
    }
    rolled
}

/// What stands between, as it is destroyed; and the clones whose places nobody chose.
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
