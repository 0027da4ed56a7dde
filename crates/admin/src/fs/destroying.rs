//! `destroy`: the objects to be destroyed are determined first, as one plan; nothing is destroyed
//! before the whole plan is known to be possible.

use std::collections::{HashMap, HashSet};

use nacre_pool::engine::DestroySet;
use nacre_pool::names::{Name, SelectionError, SnapshotSelection};
use nacre_pool::{PoolError, Txg};
use serde::{Deserialize, Serialize};

use super::moves::{self, Gone, GoneSnapshots};
use super::objects::{Object, Objects, missing};
use super::refused;
use crate::reading::{Destroying, Read};
use crate::{Imported, Kind, Mounts, Refusal, What};

/// Arguments of `destroy`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToDestroy {
    /// A file system, a bookmark, or snapshots: `file system@a,b,first%last`.
    pub target: String,
    /// Includes descendants; for snapshots, the snapshots of the same names of descendants.
    pub recursive: bool,
    /// Includes clones, wherever they are.
    pub clones: bool,
    /// Unmounts even file systems in use.
    pub force: bool,
    /// Destroys snapshots with holds or clones later.
    pub deferred: bool,
    /// Dry run: only reports the objects.
    pub dry: bool,
    /// No descendants, even where clones are destroyed.
    pub keep_below: bool,
}

/// Objects that were destroyed, or that a dry run would destroy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Destroyed {
    /// Their names, in the order of destruction.
    pub names: Vec<String>,
    /// Space that this frees, bytes.
    pub freed: u64,
    /// Named snapshots that do not exist, where others did.
    #[serde(default)]
    pub missing: Vec<String>,
}

/// A plan: file systems to destroy, in a possible order, and snapshots of others.
#[derive(Debug, Default)]
pub(super) struct Doom {
    pub filesystems: Vec<u64>,
    pub snapshots: Vec<(u64, Vec<(Txg, String)>)>,
    /// File systems with a partially received increment on top of one of the snapshots, which is discarded with it.
    pub partial: Vec<u64>,
    /// Named snapshots that do not exist.
    pub missing: Vec<String>,
}

impl Doom {
    /// Converts the plan for the engine.
    pub fn destroy_set(&self, deferred: bool) -> DestroySet {
        let names = |snapshots: &[(Txg, String)]| snapshots.iter().map(|(_, name)| name.clone()).collect();
        let snapshots = self.snapshots.iter().map(|(id, snapshots)| (*id, names(snapshots))).collect();
        DestroySet {
            filesystems: self.filesystems.clone(),
            snapshots,
            partial: self.partial.clone(),
            bookmarks: Vec::new(),
            deferred,
        }
    }
}

/// Destroys objects.
pub(super) fn destroy(pool: &Imported, mounts: &dyn Mounts, what: &ToDestroy) -> Result<Destroyed, Refusal> {
    if let Some((filesystem, bookmark)) = what.target.split_once('#') {
        return one_bookmark(pool, mounts, what, filesystem, bookmark);
    }
    let (doom, destroyed) = {
        let mut objects = Objects::now(pool, mounts);
        let doom = if what.target.contains('@') {
            of_snapshots(&mut objects, what)?
        } else {
            of_filesystem(&mut objects, what)?
        };
        let destroyed = told(&mut objects, &doom)?;
        (doom, destroyed)
    };
    if !what.dry {
        carry_out(pool, mounts, &doom, what)?;
    }
    Ok(destroyed)
}

fn one_bookmark(
    pool: &Imported,
    mounts: &dyn Mounts,
    what: &ToDestroy,
    filesystem: &str,
    bookmark: &str,
) -> Result<Destroyed, Refusal> {
    let id = {
        let objects = Objects::now(pool, mounts);
        match objects.open("destroy", &what.target) {
            Ok(Object::Bookmark { of, .. }) => of,
            Ok(_) => return Err(missing("destroy", &what.target)),
            Err(refusal) if refusal.kind == Kind::NotFound => {
                return Err(Refusal::new(
                    Kind::NotFound,
                    format!("bookmark '{filesystem}#{bookmark}' does not exist."),
                ));
            }
            Err(refusal) => return Err(refusal),
        }
    };
    if !what.dry {
        let doing = format!("cannot destroy '{}'", what.target);
        pool.pool.destroy_bookmark(id, bookmark).map_err(|error| refused(&doing, &error))?;
    }
    Ok(Destroyed { names: vec![what.target.clone()], ..Destroyed::default() })
}

/// Returns the names of the objects of a plan, and the space that is freed.
pub(super) fn told(objects: &mut Objects<'_>, doom: &Doom) -> Result<Destroyed, Refusal> {
    let mut destroyed = Destroyed { missing: doom.missing.clone(), ..Destroyed::default() };
    for id in &doom.filesystems {
        let name = objects.known(*id)?.name.clone();
        for (_, row) in objects.catalog.snapshot_rows(*id)? {
            destroyed.names.push(format!("{name}@{}", row.name));
        }
        destroyed.names.push(name);
        let usage = objects.catalog.usage(*id)?;
        destroyed.freed = destroyed.freed.saturating_add(usage.dataset).saturating_add(usage.snapshots);
    }
    for (id, snapshots) in &doom.snapshots {
        let name = objects.known(*id)?.name.clone();
        destroyed.names.extend(snapshots.iter().map(|(_, snapshot)| format!("{name}@{snapshot}")));
        let txgs: Vec<Txg> = snapshots.iter().map(|(txg, _)| *txg).collect();
        destroyed.freed = destroyed.freed.saturating_add(objects.catalog.freed_by(*id, &txgs)?);
    }
    Ok(destroyed)
}

/// Returns the plan for snapshots.
pub(super) fn of_snapshots(objects: &mut Objects<'_>, what: &ToDestroy) -> Result<Doom, Refusal> {
    let doing = format!("cannot destroy '{}'", what.target);
    let selection = SnapshotSelection::parse(&what.target)
        .map_err(|error| Refusal::new(Kind::Invalid, format!("{doing}: {error}")))?;
    let id = objects.filesystem("open", &selection.filesystem)?;
    let below = (what.recursive || what.clones) && !what.keep_below;
    let ids = if below { objects.descendants(id)? } else { vec![id] };
    let mut doom = Doom::default();
    for id in ids {
        let there = objects.catalog.snapshot_rows(id)?;
        let names: Vec<&str> = there.iter().map(|(_, row)| row.name.as_str()).collect();
        let places = match selection.select(&names) {
            Ok(places) => places,
            // The existing ones are destroyed, as in ZFS; of descendants, any of the names may be missing.
            Err(SelectionError::NoSnapshot(_)) => {
                let (there, missing) = those_there(&selection, &names);
                if !below {
                    doom.missing.extend(missing.into_iter().map(|name| format!("{}@{name}", selection.filesystem)));
                }
                there
            }
            Err(error) => return Err(Refusal::new(Kind::Invalid, format!("{doing}: {error}"))),
        };
        let picked: Vec<(Txg, String)> = places
            .into_iter()
            .filter_map(|place| there.get(place))
            .map(|(txg, row)| (*txg, row.name.clone()))
            .collect();
        if !picked.is_empty() {
            doom.snapshots.push((id, picked));
        }
    }
    if doom.snapshots.is_empty() {
        let refusal = Refusal::new(Kind::NotFound, "could not find any snapshots to destroy; check snapshot names.");
        return Err(refusal.next(format!("'nacre fs list -t snapshot {}' lists them", selection.filesystem)));
    }
    dependents(objects, what, &mut doom)?;
    Ok(doom)
}

/// Selects the existing snapshots of a selection, range by range, and returns the names that do not exist.
fn those_there(selection: &SnapshotSelection, names: &[&str]) -> (Vec<usize>, Vec<String>) {
    let (mut found, mut missing) = (Vec::new(), Vec::new());
    for range in &selection.ranges {
        let one = SnapshotSelection { filesystem: selection.filesystem.clone(), ranges: vec![range.clone()] };
        match one.select(names) {
            Ok(places) => found.extend(places),
            Err(SelectionError::NoSnapshot(name)) => missing.push(name),
            // Other errors in it were found before.
            Err(_) => {}
        }
    }
    found.sort_unstable();
    found.dedup();
    (found, missing)
}

/// Adds the clones of the plan's snapshots, and refuses snapshots with holds.
fn dependents(objects: &mut Objects<'_>, what: &ToDestroy, doom: &mut Doom) -> Result<(), Refusal> {
    let mut clones = Vec::new();
    for (id, snapshots) in &doom.snapshots {
        for (txg, name) in snapshots {
            let whole = format!("{}@{name}", objects.known(*id)?.name);
            if !what.deferred && !objects.catalog.holds(*id, *txg)?.is_empty() {
                return Err(held(&whole));
            }
            let of_it = objects.catalog.clones(*id, *txg)?;
            let names = clone_names(objects, *id, *txg)?;
            if !names.is_empty() && !what.clones && !what.deferred {
                let refusal =
                    Refusal::new(Kind::Busy, format!("cannot destroy '{whole}': snapshot has dependent clones"));
                return Err(refusal.next(format!("use '-R' to destroy the following datasets:\n{}", names.join("\n"))));
            }
            clones.extend(of_it);
            if what.clones && objects.catalog.partial_clone(*id, *txg)?.is_some() {
                doom.partial.push(*id);
            }
        }
    }
    if what.clones && !clones.is_empty() {
        doom.filesystems = ordered(objects, closure(objects, &clones)?)?;
        no_holds(objects, &doom.filesystems)?;
        // Snapshots of destroyed file systems are destroyed with them.
        doom.snapshots.retain(|(id, _)| !doom.filesystems.contains(id));
    }
    Ok(())
}

/// Returns the names of the clones of a snapshot, with a partially received increment to it (`%recv`) as in ZFS.
pub(super) fn clone_names(objects: &mut Objects<'_>, id: u64, txg: Txg) -> Result<Vec<String>, PoolError> {
    let mut names = Vec::new();
    for clone in objects.catalog.clones(id, txg)? {
        names.push(objects.known(clone)?.name.clone());
    }
    if let Some(partial) = objects.catalog.partial_clone(id, txg)? {
        names.push(format!("{}/{partial}", objects.known(id)?.name));
    }
    Ok(names)
}

fn held(snapshot: &str) -> Refusal {
    let next = format!(
        "it is held: 'nacre fs holds {snapshot}' shows by which tags, 'nacre fs release TAG {snapshot}' lets go, -d destroys it then"
    );
    Refusal::new(Kind::Busy, format!("cannot destroy '{snapshot}': dataset is busy")).next(next)
}

/// Returns the plan for a file system.
fn of_filesystem(objects: &mut Objects<'_>, what: &ToDestroy) -> Result<Doom, Refusal> {
    let name = Name::filesystem(&what.target);
    let name =
        name.map_err(|error| Refusal::new(Kind::Invalid, format!("cannot destroy '{}': {error}", what.target)))?;
    let id = objects.filesystem("open", name)?;
    if what.deferred {
        return Err(Refusal::new(
            Kind::Invalid,
            format!("cannot destroy '{name}': only snapshots can be destroyed later (-d)"),
        ));
    }
    let is_root = id == objects.catalog.root()?;
    if is_root && !what.recursive && !what.clones {
        let next = format!(
            "use 'nacre fs destroy -r {name}' to destroy all datasets in the pool\nuse 'nacre pool destroy {name}' to destroy the pool itself"
        );
        return Err(Refusal::new(Kind::Invalid, format!("cannot destroy '{name}': operation does not apply to pools"))
            .next(next));
    }
    let below = objects.descendants(id)?;
    if !what.recursive && !what.clones {
        let mut there = Vec::new();
        for other in &below {
            let known = objects.known(*other)?;
            there.extend(
                objects
                    .catalog
                    .snapshot_rows(*other)?
                    .into_iter()
                    .map(|(_, row)| format!("{}@{}", known.name, row.name)),
            );
            if *other != id {
                there.push(known.name.clone());
            }
        }
        if !there.is_empty() {
            let refusal = Refusal::new(Kind::Busy, format!("cannot destroy '{name}': filesystem has children"));
            return Err(refusal.next(format!("use '-r' to destroy the following datasets:\n{}", there.join("\n"))));
        }
    }
    let all = closure(objects, &below)?;
    if !what.clones {
        let outside: Vec<u64> = all.iter().filter(|other| !below.contains(other)).copied().collect();
        if !outside.is_empty() {
            let names = outside
                .iter()
                .map(|other| Ok(objects.known(*other)?.name.clone()))
                .collect::<Result<Vec<_>, PoolError>>()?;
            let refusal = Refusal::new(Kind::Busy, format!("cannot destroy '{name}': filesystem has dependent clones"));
            return Err(refusal.next(format!("use '-R' to destroy the following datasets:\n{}", names.join("\n"))));
        }
    }
    let mut doom = Doom { filesystems: ordered(objects, all)?, ..Doom::default() };
    no_holds(objects, &doom.filesystems)?;
    if is_root {
        doom.filesystems.retain(|other| *other != id);
        let own = objects.catalog.snapshot_rows(id)?.into_iter().map(|(txg, row)| (txg, row.name)).collect::<Vec<_>>();
        doom.snapshots.extend((!own.is_empty()).then_some((id, own)));
    }
    Ok(doom)
}

/// Returns file systems with all descendants, the clones of their snapshots, and so on.
fn closure(objects: &Objects<'_>, from: &[u64]) -> Result<Vec<u64>, PoolError> {
    let mut found = Vec::new();
    let mut seen = HashSet::new();
    let mut waiting: Vec<u64> = from.to_vec();
    while let Some(id) = waiting.pop() {
        if !seen.insert(id) {
            continue;
        }
        found.push(id);
        waiting.extend(objects.catalog.children(id)?);
        for (txg, row) in objects.catalog.snapshot_rows(id)? {
            if row.clones > 0 {
                waiting.extend(objects.catalog.clones(id, txg)?);
            }
        }
    }
    Ok(found)
}

/// Sorts file systems so that each can be destroyed: after its descendants, and after the clones of its snapshots.
fn ordered(objects: &mut Objects<'_>, ids: Vec<u64>) -> Result<Vec<u64>, Refusal> {
    let among: HashSet<u64> = ids.iter().copied().collect();
    // Number of others to be destroyed before each.
    let mut before: HashMap<u64, usize> = ids.iter().map(|id| (*id, 0)).collect();
    let mut after: HashMap<u64, Vec<u64>> = HashMap::new();
    let mut named = Vec::with_capacity(ids.len());
    for id in &ids {
        let known = objects.known(*id)?;
        named.push((known.name.clone(), *id));
        for later in [Some(known.row.parent), known.row.origin.map(|(of, _)| of)].into_iter().flatten() {
            if among.contains(&later) {
                *before.entry(later).or_default() += 1;
                after.entry(*id).or_default().push(later);
            }
        }
    }
    // Those that depend on nothing are destroyed by name, the last first.
    named.sort();
    let mut ready: Vec<u64> = named.iter().map(|(_, id)| *id).filter(|id| before.get(id) == Some(&0)).collect();
    let mut order = Vec::with_capacity(ids.len());
    while let Some(id) = ready.pop() {
        order.push(id);
        for later in after.get(&id).into_iter().flatten() {
            if let Some(left) = before.get_mut(later) {
                *left -= 1;
                if *left == 0 {
                    ready.push(*later);
                }
            }
        }
    }
    if order.len() == ids.len() {
        return Ok(order);
    }
    let left = named.iter().find(|(_, id)| !order.contains(id)).map_or("", |(name, _)| name.as_str());
    let refusal =
        Refusal::new(Kind::Busy, format!("cannot destroy '{left}': it is a clone of something that lies below it"));
    Err(refusal.next(format!("make it independent first: nacre fs promote {left}")))
}

fn no_holds(objects: &mut Objects<'_>, ids: &[u64]) -> Result<(), Refusal> {
    for id in ids {
        for (_, row) in objects.catalog.snapshot_rows(*id)? {
            if row.holds > 0 {
                return Err(held(&format!("{}@{}", objects.known(*id)?.name, row.name)));
            }
        }
    }
    Ok(())
}

/// Keeps new readers away from the objects of a plan; refused while one of them is being read.
pub(super) fn going<'a>(
    pool: &'a Imported,
    mounts: &dyn Mounts,
    doom: &Doom,
    doing: &str,
) -> Result<Destroying<'a>, Refusal> {
    let mut objects = Objects::now(pool, mounts);
    let mut meant: HashSet<(u64, Txg)> =
        doom.snapshots.iter().flat_map(|(id, snapshots)| snapshots.iter().map(|(txg, _)| (*id, *txg))).collect();
    for id in &doom.filesystems {
        // An origin with a deferred destroy is destroyed with its last clone.
        meant.extend(objects.known(*id)?.row.origin);
    }
    drop(objects);
    let is_meant = |(id, snapshot): &Read| {
        doom.filesystems.contains(id) || snapshot.is_some_and(|txg| meant.contains(&(*id, txg)))
    };
    pool.reading.go(is_meant).map_err(|_| {
        let next = "'nacre fs diff' reads it: wait for that, or end it";
        Refusal::new(Kind::Busy, format!("{doing}: dataset is busy")).next(next)
    })
}

/// Unmounts the snapshots of a plan. One that is in use, by a mount of its own or through the
/// `.zfs` directory, stops the destroy, unless `force`: then all are mounted as before.
pub(super) fn leave_snapshots(mounts: &dyn Mounts, doom: &Doom, force: bool) -> Result<GoneSnapshots, Refusal> {
    let mut alone = Vec::new();
    for (id, snapshots) in &doom.snapshots {
        alone.extend(snapshots.iter().map(|(txg, _)| What { dataset: *id, snapshot: Some(txg.0) }));
    }
    let meant: HashSet<What> = alone.iter().copied().collect();
    let chosen = |what: What| doom.filesystems.contains(&what.dataset) || meant.contains(&what);
    let gone = moves::unmount_snapshots(mounts, chosen, force)?;
    if let Err(refusal) = alone.into_iter().try_for_each(|snapshot| mounts.unmount(snapshot, force)) {
        gone.back(mounts);
        return Err(refusal);
    }
    Ok(gone)
}

/// Carries out a plan.
pub(super) fn carry_out(pool: &Imported, mounts: &dyn Mounts, doom: &Doom, what: &ToDestroy) -> Result<(), Refusal> {
    let made = moves::unchosen(&mut Objects::now(pool, mounts), &doom.filesystems)?;
    let _going = going(pool, mounts, doom, &format!("cannot destroy '{}'", what.target))?;
    let snapshots = leave_snapshots(mounts, doom, what.force)?;
    let gone = match destroy_unused(pool, mounts, doom, what) {
        Ok(gone) => gone,
        Err(refusal) => {
            snapshots.back(mounts);
            return Err(refusal);
        }
    };
    gone.tidy(mounts, &made);
    forget_snapshots(mounts, doom);
    Ok(())
}

/// Unmounts the file systems of a plan, and destroys all of it.
fn destroy_unused(pool: &Imported, mounts: &dyn Mounts, doom: &Doom, what: &ToDestroy) -> Result<Gone, Refusal> {
    let gone = moves::unmount(mounts, &doom.filesystems, what.force)?;
    if let Err(error) = pool.pool.destroy_set(&doom.destroy_set(what.deferred)) {
        gone.back(mounts);
        return Err(refused(&format!("cannot destroy '{}'", what.target), &error));
    }
    Ok(gone)
}

/// Unmounts snapshots that were looked up again during their destruction, so that freed frames are not read.
pub(super) fn forget_snapshots(mounts: &dyn Mounts, doom: &Doom) {
    if let Err(refusal) = leave_snapshots(mounts, doom, true) {
        tracing::warn!(%refusal, "a snapshot that is gone is still open");
    }
}
