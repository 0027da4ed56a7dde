//! `create`, `clone`, `snapshot`, `bookmark`: verbs that make objects.

use nacre_pool::PoolError;
use nacre_pool::engine::NewDataset;
use nacre_pool::names::{Name, split_parent};
use nacre_pool::properties::{DATASET_PROPERTIES, Property, PropertyError, dataset_property};
use serde::{Deserialize, Serialize};

use super::moves::{self, Mounting};
use super::objects::{Object, Objects};
use super::refused;
use crate::{Imported, Kind, Mounts, Refusal};

/// Arguments of `create` and `clone`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToCreate {
    /// Its name.
    pub name: String,
    /// The origin snapshot of a clone; `None`: an empty file system.
    pub from: Option<String>,
    /// Makes missing ancestors, and succeeds where the file system exists.
    pub parents: bool,
    /// Does not mount it.
    pub unmounted: bool,
    /// Dry run: only checks whether it could be made.
    #[serde(default)]
    pub dry: bool,
    /// Its properties, in the user's form.
    pub properties: Vec<(String, String)>,
}

/// Arguments of `snapshot`: snapshots to be taken at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToSnapshot {
    /// Names, each `file system@name`.
    pub names: Vec<String>,
    /// Includes all descendants.
    pub recursive: bool,
    /// User properties of each new snapshot.
    pub properties: Vec<(String, String)>,
}

/// Makes a file system, or a clone; returns a sentence if it could not be mounted.
pub(super) fn create(pool: &Imported, mounts: &dyn Mounts, new: &ToCreate) -> Result<Vec<String>, Refusal> {
    let doing = format!("cannot create '{}'", new.name);
    if new.parents && new.from.is_none() && new.name == pool.name() {
        // The pool's own file system, which exists.
        return Ok(Vec::new());
    }
    let (parent, part) =
        split_parent(&new.name).map_err(|error| Refusal::new(Kind::Invalid, format!("{doing}: {error}")))?;
    let exists = {
        let objects = Objects::now(pool, mounts);
        for (name, value) in &new.properties {
            let checked = dataset_property(name).and_then(|property| property.parse(value, true));
            checked.map_err(|error| {
                Refusal::new(Kind::Invalid, format!("{doing}: {error}")).next(error.next(DATASET_PROPERTIES))
            })?;
        }
        objects.catalog.find(&new.name)?.is_some()
    };
    if exists {
        // As with mkdir -p.
        let content = new.parents && new.from.is_none();
        return if content {
            Ok(Vec::new())
        } else {
            Err(Refusal::new(Kind::Exists, format!("{doing}: dataset already exists")))
        };
    }
    if new.dry {
        return judge(pool, mounts, parent, new, &doing);
    }
    let (parent, mut failed) = parent_of(pool, mounts, parent, new.parents, &doing)?;
    let dataset = NewDataset { parent, name: part.to_owned(), properties: new.properties.clone() };
    let id = match &new.from {
        None => pool.pool.create_dataset(&dataset),
        Some(snapshot) => {
            let (of, part) = {
                let objects = Objects::now(pool, mounts);
                let (of, txg) = objects.snapshot("open", snapshot)?;
                (of, objects.catalog.snapshot(of, txg)?.name)
            };
            pool.pool.clone_snapshot(of, &part, &dataset)
        }
    };
    let id = id.map_err(|error| refused(&doing, &error))?;
    if !new.unmounted {
        failed.extend(mount_new(pool, mounts, id)?);
    }
    Ok(failed)
}

/// Checks whether a file system could be made; missing ancestors would be made with it.
fn judge(
    pool: &Imported,
    mounts: &dyn Mounts,
    above: &str,
    new: &ToCreate,
    doing: &str,
) -> Result<Vec<String>, Refusal> {
    let mut above = above;
    let parent = loop {
        let found = pool.pool.find(above)?;
        match (found, split_parent(above)) {
            (Some(id), _) => break id,
            (None, Ok((next, _))) if new.parents => above = next,
            (None, _) => return parent_of(pool, mounts, above, false, doing).map(|(_, sentences)| sentences),
        }
    };
    let dataset = NewDataset { parent, name: String::new(), properties: new.properties.clone() };
    pool.pool.would_create(&dataset).map_err(|error| refused(doing, &error))?;
    Ok(Vec::new())
}

/// Returns the parent of a new dataset; makes it and its ancestors where they are missing.
pub(super) fn parent_of(
    pool: &Imported,
    mounts: &dyn Mounts,
    name: &str,
    make: bool,
    doing: &str,
) -> Result<(u64, Vec<String>), Refusal> {
    if let Some(id) = pool.pool.find(name)? {
        return Ok((id, Vec::new()));
    }
    if !make || !name.contains('/') {
        let refusal = Refusal::new(Kind::NotFound, format!("{doing}: parent does not exist"));
        return Err(refusal.next("-p makes the file systems above it as well"));
    }
    let (above, part) = split_parent(name).map_err(|error| Refusal::new(Kind::Invalid, format!("{doing}: {error}")))?;
    let (above, mut failed) = parent_of(pool, mounts, above, make, doing)?;
    let new = NewDataset { parent: above, name: part.to_owned(), properties: Vec::new() };
    let id = pool.pool.create_dataset(&new).map_err(|error| refused(doing, &error))?;
    failed.extend(mount_new(pool, mounts, id)?);
    Ok((id, failed))
}

fn mount_new(pool: &Imported, mounts: &dyn Mounts, id: u64) -> Result<Vec<String>, Refusal> {
    let wanted: Vec<Mounting> = moves::wanted(&mut Objects::now(pool, mounts), &[id])?;
    let failed = moves::mount(mounts, wanted);
    Ok(failed
        .into_iter()
        .map(|why| format!("filesystem successfully created, but it could not be mounted: {why}"))
        .collect())
}

/// Takes snapshots, all of them at one moment or none.
pub(super) fn snapshot(pool: &Imported, mounts: &dyn Mounts, what: &ToSnapshot) -> Result<(), Refusal> {
    let mut wanted: Vec<(u64, String)> = Vec::new();
    {
        let first = what.names.first().map_or("", String::as_str);
        for (name, value) in &what.properties {
            let checked = dataset_property(name).and_then(|property| match property {
                Property::User(_) => property.parse(value, true),
                _ => Err(PropertyError::NotOfSnapshots),
            });
            checked
                .map_err(|error| Refusal::new(Kind::Invalid, format!("cannot create snapshot '{first}': {error}")))?;
        }
        let mut objects = Objects::now(pool, mounts);
        for name in &what.names {
            let doing = format!("cannot create snapshot '{name}'");
            let (filesystem, snapshot) =
                Name::snapshot(name).map_err(|error| Refusal::new(Kind::Invalid, format!("{doing}: {error}")))?;
            let id = objects.filesystem("open", filesystem)?;
            let mut ids = if what.recursive { objects.descendants(id)? } else { vec![id] };
            if what.recursive {
                ids = settled(&objects, ids)?;
            }
            wanted.extend(ids.into_iter().map(|id| (id, snapshot.to_owned())));
        }
        let none = "no snapshots were created";
        for (place, (id, name)) in wanted.iter().enumerate() {
            let whole = format!("{}@{name}", objects.known(*id)?.name);
            if wanted.iter().take(place).any(|(other, _)| other == id) {
                let why = format!("cannot create snapshot '{whole}': multiple snapshots of same fs not allowed");
                return Err(Refusal::new(Kind::Invalid, why).next(none));
            }
            if objects.catalog.snapshot_named(*id, name)?.is_some() {
                return Err(Refusal::new(
                    Kind::Exists,
                    format!("cannot create snapshot '{whole}': dataset already exists"),
                )
                .next(none));
            }
        }
    }
    // Data that write(2) has accepted and the kernel still caches belongs to it.
    let doing = format!("cannot create snapshot '{}'", what.names.first().map_or("", String::as_str));
    let ids: Vec<u64> = wanted.iter().map(|(id, _)| *id).collect();
    mounts.at_one_moment(&ids, &mut |over| {
        let taken = pool.pool.snapshot_at(&wanted, &what.properties, over);
        taken.map(drop).map_err(|error| refused(&doing, &error).next("no snapshots were created"))
    })
}

/// Returns the datasets that have a state of their own: partially received ones have none.
pub(super) fn settled(objects: &Objects<'_>, ids: Vec<u64>) -> Result<Vec<u64>, PoolError> {
    let mut found = Vec::with_capacity(ids.len());
    for id in ids {
        if !objects.catalog.is_half(id)? {
            found.push(id);
        }
    }
    Ok(found)
}

/// Makes a bookmark of a snapshot or of another bookmark.
pub(super) fn bookmark(pool: &Imported, mounts: &dyn Mounts, from: &str, name: &str) -> Result<(), Refusal> {
    let doing = format!("cannot create bookmark '{name}'");
    let invalid = |error: nacre_pool::names::NameError| Refusal::new(Kind::Invalid, format!("{doing}: {error}"));
    let (filesystem, part) = Name::bookmark(name).map_err(invalid)?;
    let source = {
        let objects = Objects::now(pool, mounts);
        let id = objects.filesystem("open", filesystem)?;
        if objects.catalog.bookmarks(id)?.iter().any(|(there, _)| there == part) {
            return Err(Refusal::new(Kind::Exists, format!("{doing}: bookmark exists")));
        }
        let source = objects.open("open", from)?;
        let of = match &source {
            Object::Snapshot { of, txg } => (*of, Some(objects.catalog.snapshot(*of, *txg)?.name), None),
            Object::Bookmark { of, name } => (*of, None, Some(name.clone())),
            Object::Filesystem(_) => {
                return Err(Refusal::new(
                    Kind::Invalid,
                    format!("{doing}: '{from}' is neither a snapshot nor a bookmark"),
                ));
            }
        };
        if of.0 != id {
            let why = format!("{doing}: bookmark must be of the same filesystem as '{from}'");
            return Err(Refusal::new(Kind::Invalid, why));
        }
        of
    };
    let made = match source {
        (id, Some(snapshot), _) => pool.pool.bookmark(id, &snapshot, part),
        (id, None, bookmark) => pool.pool.copy_bookmark(id, bookmark.as_deref().unwrap_or_default(), part),
    };
    made.map_err(|error| refused(&doing, &error))
}
