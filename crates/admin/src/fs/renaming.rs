//! `rename` and `promote`.

use nacre_pool::engine::NewDataset;
use nacre_pool::names::{NAME_MOST, Name, check_part, split_parent};
use serde::{Deserialize, Serialize};

use super::making;
use super::moves::{self, Change};
use super::objects::{Known, Objects};
use super::refused;
use crate::{Imported, Kind, Mounts, Refusal};

/// Arguments of `rename`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToRename {
    /// The object.
    pub from: String,
    /// The new name; for a snapshot also the part after the `@` alone.
    pub to: String,
    /// Makes missing ancestors.
    pub parents: bool,
    /// Also renames the snapshots of this name of all descendants.
    pub recursive: bool,
    /// Keeps mounts where they are.
    pub unmounted: bool,
    /// Unmounts even file systems in use.
    pub force: bool,
}

fn invalid(what: &ToRename, why: impl std::fmt::Display) -> Refusal {
    Refusal::new(Kind::Invalid, format!("cannot rename '{}': {why}", what.from))
}

/// Renames an object; returns a sentence for each mount that failed afterwards.
pub(super) fn rename(pool: &Imported, mounts: &dyn Mounts, what: &ToRename) -> Result<Vec<String>, Refusal> {
    let name = Name::parse(&what.from).map_err(|error| invalid(what, error))?;
    if what.from == what.to {
        Objects::now(pool, mounts).open("open", &what.from)?;
        return Ok(Vec::new());
    }
    match name {
        Name::Filesystem(_) if what.recursive => {
            Err(invalid(what, "-r is for snapshots: what lies below a file system moves with it"))
        }
        Name::Filesystem(_) => filesystem(pool, mounts, what),
        Name::Snapshot { filesystem, snapshot } => {
            snapshots(pool, mounts, what, filesystem, snapshot).map(|()| Vec::new())
        }
        Name::Bookmark { .. } => {
            Err(invalid(what, "bookmarks cannot be renamed").next("make another one of it: nacre fs bookmark"))
        }
    }
}

fn snapshots(
    pool: &Imported,
    mounts: &dyn Mounts,
    what: &ToRename,
    filesystem: &str,
    old: &str,
) -> Result<(), Refusal> {
    let new = match what.to.split_once('@') {
        Some((other, new)) if other.is_empty() || other == filesystem => new,
        Some(_) => return Err(invalid(what, "snapshots must be part of same dataset")),
        None if what.to.contains('/') => return Err(invalid(what, "the new name has to be that of a snapshot")),
        None => what.to.as_str(),
    };
    check_part(new).map_err(|error| invalid(what, error))?;
    let ids = {
        let mut objects = Objects::now(pool, mounts);
        let (id, _) = objects.snapshot("open", &what.from)?;
        let mut ids = if what.recursive { objects.descendants(id)? } else { vec![id] };
        let mut there = Vec::new();
        for id in ids.drain(..) {
            if objects.catalog.snapshot_named(id, old)?.is_none() {
                continue;
            }
            if objects.catalog.snapshot_named(id, new)?.is_some() {
                let name = objects.known(id)?.name.clone();
                return Err(Refusal::new(
                    Kind::Exists,
                    format!("cannot rename '{name}@{old}': dataset already exists"),
                ));
            }
            there.push(id);
        }
        there
    };
    pool.pool
        .rename_snapshots(&ids, old, new)
        .map_err(|error| refused(&format!("cannot rename '{}'", what.from), &error))
}

fn filesystem(pool: &Imported, mounts: &dyn Mounts, what: &ToRename) -> Result<Vec<String>, Refusal> {
    let doing = format!("cannot rename '{}'", what.from);
    Name::filesystem(&what.to)
        .map_err(|error| Refusal::new(Kind::Invalid, format!("cannot rename to '{}': {error}", what.to)))?;
    let (above, part) = split_parent(&what.to).map_err(|_| {
        invalid(what, "a file system cannot become a pool").next("'nacre pool import POOL NEWNAME' renames a pool")
    })?;
    let (id, affected) = {
        let mut objects = Objects::now(pool, mounts);
        let id = objects.filesystem("open", &what.from)?;
        if id == objects.catalog.root()? {
            return Err(invalid(what, "the pool's own file system has the pool's name")
                .next("export the pool, then import it with a new name"));
        }
        if what.to.starts_with(&format!("{}/", what.from)) {
            let why = format!(
                "cannot rename to '{}': New dataset name cannot be a descendant of current dataset name",
                what.to
            );
            return Err(Refusal::new(Kind::Invalid, why));
        }
        if objects.catalog.find(&what.to)?.is_some() {
            return Err(Refusal::new(Kind::Exists, format!("{doing}: dataset already exists")));
        }
        let all = objects.descendants(id)?;
        for below in &all {
            let rest = objects.known(*below)?.name.len().saturating_sub(what.from.len());
            if what.to.len() + rest > NAME_MOST {
                let why = format!("cannot rename to '{}': name of what lies below is too long", what.to);
                return Err(Refusal::new(Kind::Invalid, why));
            }
        }
        (id, all)
    };
    let (parent, mut failed) = making::parent_of(pool, mounts, above, what.parents, &doing)?;
    // -u: not remounted; mounts keep their mount points until they are unmounted.
    let affected = if what.unmounted { Vec::new() } else { affected };
    let foresee = |objects: &mut Objects<'_>| {
        let mut row = objects.known(id)?.row.clone();
        (row.parent, row.name) = (parent, part.to_owned());
        for below in &affected {
            let known = objects.known(*below)?;
            let row = if *below == id { row.clone() } else { known.row.clone() };
            let name = known
                .name
                .strip_prefix(&what.from)
                .map_or_else(|| known.name.clone(), |rest| format!("{}{rest}", what.to));
            objects.pretend(*below, Known { name, row, stored: known.stored.clone() });
        }
        Ok(())
    };
    let apply = || {
        let new = NewDataset { parent, name: part.to_owned(), properties: Vec::new() };
        pool.pool.rename_dataset(id, &new).map_err(|error| refused(&doing, &error))
    };
    let change = Change {
        affected: affected.clone(),
        force: what.force,
        places: Some(&doing),
        foresee: &foresee,
        apply: &apply,
    };
    failed.extend(moves::change(pool, mounts, &change)?);
    Ok(failed)
}

/// Makes a clone independent of its origin, which becomes its clone.
pub(super) fn promote(pool: &Imported, mounts: &dyn Mounts, name: &str) -> Result<(), Refusal> {
    let doing = format!("cannot promote '{name}'");
    let (id, from) = {
        let mut objects = Objects::now(pool, mounts);
        let id = objects.filesystem("open", name)?;
        let Some((from, origin)) = objects.known(id)?.row.origin else {
            return Err(Refusal::new(Kind::Invalid, format!("{doing}: not a cloned filesystem")));
        };
        for (_, row) in objects.catalog.snapshot_rows(from)?.into_iter().filter(|(txg, _)| *txg <= origin) {
            if objects.catalog.snapshot_named(id, &row.name)?.is_some() {
                let parent = objects.known(from)?.name.clone();
                let refusal = Refusal::new(
                    Kind::Exists,
                    format!("{doing}: conflicting snapshot '{}' from parent '{parent}'", row.name),
                );
                return Err(refusal.next(format!("rename one of them: nacre fs rename {name}@{} NEWNAME", row.name)));
            }
        }
        (id, from)
    };
    // Snapshots move from one to the other: a reader would not find them by their old names.
    let busy = |_| {
        Refusal::new(Kind::Busy, format!("{doing}: dataset is busy"))
            .next("'nacre fs diff' reads it: wait for that, or end it")
    };
    let _going = pool.reading.go(|(of, _)| *of == id || *of == from).map_err(busy)?;
    pool.pool.promote(id).map_err(|error| refused(&doing, &error))
}
