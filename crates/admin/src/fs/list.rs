//! `list` and `get`: which objects are selected, and their values. Output is formatted by the command.

use nacre_pool::properties::{Property, Source};
use serde::{Deserialize, Serialize};

use super::objects::{Object, Objects};
use super::space::Uses;
use super::values;
use crate::{Imported, Mounts, Refusal};

/// Arguments of `list` and `get`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listing {
    /// The objects; empty: all.
    pub names: Vec<String>,
    /// Depth of descendants: 0 is the named ones only; `None` without a bound.
    pub depth: Option<u64>,
    /// Types of objects; `None`: the command's default.
    pub types: Option<Types>,
    /// The properties; `None`: all that an object has.
    pub properties: Option<Vec<String>>,
}

/// Types of objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Types {
    /// File systems.
    pub filesystems: bool,
    /// Snapshots.
    pub snapshots: bool,
    /// Bookmarks.
    pub bookmarks: bool,
}

/// The type of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ObjectType {
    /// A file system.
    Filesystem,
    /// A snapshot.
    Snapshot,
    /// A bookmark.
    Bookmark,
}

/// An object with its shown values.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListedObject {
    /// Its whole name.
    pub name: String,
    /// Its type.
    pub is: ObjectType,
    /// The txg in which it was made: the order of snapshots.
    pub created: u64,
    /// Its properties.
    pub values: Vec<Shown>,
}

/// The value of a property.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shown {
    /// The property's name.
    pub property: String,
    /// The canonical value; none where the object has none.
    pub value: Option<String>,
    /// Source of the value.
    pub source: From,
    /// The value that was received with a stream.
    pub received: Option<String>,
}

/// Source of a value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum From {
    /// Set here.
    Local,
    /// Received.
    Received,
    /// Set for this mount only.
    Temporary,
    /// Set on this ancestor.
    Inherited(String),
    /// The default.
    Default,
    /// A figure, or no value.
    None,
}

impl From {
    /// Converts the engine's source.
    pub(super) fn of(source: Source) -> Self {
        match source {
            Source::Local => Self::Local,
            Source::Received => Self::Received,
            Source::Temporary => Self::Temporary,
            Source::Inherited(from) => Self::Inherited(from),
            Source::Default => Self::Default,
            Source::None => Self::None,
        }
    }
}

/// Returns the types that a walk shows: named objects always, snapshots of the walk only where the
/// pool's `listsnapshots` is on.
fn on_the_way(objects: &Objects<'_>, types: Option<Types>) -> Result<Types, Refusal> {
    Ok(match types {
        Some(types) => types,
        None => Types { filesystems: true, snapshots: objects.pool_has("listsnapshots")?, bookmarks: false },
    })
}

pub(super) fn run(pool: &Imported, mounts: &dyn Mounts, listing: &Listing) -> Result<Vec<ListedObject>, Refusal> {
    let properties = match &listing.properties {
        Some(names) => {
            Some(names.iter().map(|name| values::property(name)).collect::<Result<Vec<Property>, Refusal>>()?)
        }
        None => None,
    };
    let uses = Uses::gather(pool, properties.as_deref().unwrap_or_default(), || {
        select(&mut Objects::now(pool, mounts), listing)
    })?;
    let mut objects = Objects::shown(pool, mounts);
    let mut listed = Vec::new();
    // Once anything has changed, any of the following objects may be gone.
    let mut changed = false;
    for object in select(&mut objects, listing)? {
        changed |= objects.pause();
        if changed && !objects.is_there(&object)? {
            continue;
        }
        let properties = match &properties {
            Some(properties) => properties.clone(),
            None => values::all(&mut objects, &object)?,
        };
        let mut shown = Vec::with_capacity(properties.len());
        let mut is_gone = false;
        for property in &properties {
            // A stream may have brought very many properties.
            if objects.pause() {
                changed = true;
                is_gone = !objects.is_there(&object)?;
            }
            if is_gone {
                break;
            }
            let value = values::of(&mut objects, &uses, &object, property)?;
            // `all` omits properties without a value.
            if listing.properties.is_some() || value.value.is_some() {
                shown.push(value);
            }
        }
        if is_gone {
            continue;
        }
        let name = objects.name(&object)?;
        let (is, created) = identity(&mut objects, &object)?;
        listed.push(ListedObject { name, is, created, values: shown });
    }
    Ok(listed)
}

fn identity(objects: &mut Objects<'_>, object: &Object) -> Result<(ObjectType, u64), Refusal> {
    Ok(match object {
        Object::Filesystem(id) => (ObjectType::Filesystem, objects.known(*id)?.row.created.0),
        Object::Snapshot { txg, .. } => (ObjectType::Snapshot, txg.0),
        Object::Bookmark { of, name } => {
            let bookmarks = objects.catalog.bookmarks(*of)?;
            (ObjectType::Bookmark, bookmarks.iter().find(|(there, _)| there == name).map_or(0, |(_, row)| row.txg.0))
        }
    })
}

/// Returns the selected objects, each once.
fn select(objects: &mut Objects<'_>, listing: &Listing) -> Result<Vec<Object>, Refusal> {
    let types = on_the_way(objects, listing.types)?;
    let mut found = Vec::new();
    if listing.names.is_empty() {
        let root = objects.catalog.root()?;
        walk(objects, root, types, listing.depth, &mut found)?;
    }
    for name in &listing.names {
        match objects.open("open", name)? {
            Object::Filesystem(id) => walk(objects, id, types, listing.depth, &mut found)?,
            other => {
                let asked = listing.types.is_none_or(|types| match other {
                    Object::Bookmark { .. } => types.bookmarks,
                    _ => types.snapshots,
                });
                if asked {
                    found.push(other);
                }
            }
        }
    }
    let mut seen = std::collections::HashSet::new();
    found.retain(|object| {
        seen.insert(match object {
            Object::Filesystem(id) => (*id, 0, String::new()),
            Object::Snapshot { of, txg } => (*of, txg.0, String::new()),
            Object::Bookmark { of, name } => (*of, 0, name.clone()),
        })
    });
    Ok(found)
}

fn walk(
    objects: &mut Objects<'_>,
    id: u64,
    types: Types,
    depth: Option<u64>,
    found: &mut Vec<Object>,
) -> Result<(), Refusal> {
    let mut waiting = vec![(id, depth)];
    let mut changed = false;
    while let Some((id, left)) = waiting.pop() {
        changed |= objects.pause();
        if changed && !objects.catalog.is_there(id, None)? {
            continue;
        }
        if types.filesystems {
            found.push(Object::Filesystem(id));
        }
        if left == Some(0) {
            continue;
        }
        if types.snapshots {
            found.extend(
                objects.catalog.snapshot_rows(id)?.into_iter().map(|(txg, _)| Object::Snapshot { of: id, txg }),
            );
        }
        if types.bookmarks {
            found.extend(objects.catalog.bookmarks(id)?.into_iter().map(|(name, _)| Object::Bookmark { of: id, name }));
        }
        let below = left.map(|left| left - 1);
        waiting.extend(objects.catalog.children(id)?.into_iter().rev().map(|child| (child, below)));
    }
    Ok(())
}
