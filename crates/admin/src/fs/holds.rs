//! `hold`, `release` and `holds`: tags that keep snapshots from being destroyed.

use nacre_pool::names::Name;
use serde::{Deserialize, Serialize};

use super::destroying::{Doom, going};
use super::objects::{Objects, missing};
use super::refused;
use crate::{Imported, Kind, Mounts, Refusal};

/// Arguments of `hold` and `release`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToHold {
    /// The tag.
    pub tag: String,
    /// The snapshots.
    pub snapshots: Vec<String>,
    /// Includes snapshots of the same names of all descendants.
    pub recursive: bool,
    /// Releases instead of sets.
    pub release: bool,
}

/// A hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hold {
    /// The snapshot.
    pub snapshot: String,
    /// The tag.
    pub tag: String,
    /// When it was set, seconds since 1970.
    pub since: i64,
}

/// Returns the snapshot of a name; with `recursive` also the snapshots of the same name of descendants.
fn selected(
    objects: &mut Objects<'_>,
    name: &str,
    recursive: bool,
    doing: &str,
) -> Result<Vec<(u64, String)>, Refusal> {
    let (filesystem, snapshot) =
        Name::snapshot(name).map_err(|error| Refusal::new(Kind::Invalid, format!("{doing} '{name}': {error}")))?;
    let id = objects.catalog.find(filesystem)?.ok_or_else(|| missing("open", name))?;
    let ids = if recursive { objects.descendants(id)? } else { vec![id] };
    let mut found = Vec::new();
    for id in ids {
        if objects.catalog.snapshot_named(id, snapshot)?.is_some() {
            found.push((id, snapshot.to_owned()));
        }
    }
    if found.is_empty() {
        return Err(missing("open", name));
    }
    Ok(found)
}

/// Whether a text can be the tag of a hold.
fn is_tag(tag: &str) -> bool {
    !tag.is_empty() && tag.len() <= 255 && !tag.chars().any(char::is_control)
}

/// Whether a text can be the tag of a new hold.
pub(super) fn is_new_tag(tag: &str) -> bool {
    is_tag(tag) && !tag.starts_with('.')
}

/// Sets or releases holds, all of them or none.
pub(super) fn hold(pool: &Imported, mounts: &dyn Mounts, what: &ToHold) -> Result<(), Refusal> {
    let doing = if what.release { "cannot release hold from snapshot" } else { "cannot hold snapshot" };
    if !is_tag(&what.tag) {
        return Err(Refusal::new(Kind::Invalid, format!("{doing}: a tag has 1 to 255 printable characters")));
    }
    if !what.release && what.tag.starts_with('.') {
        return Err(Refusal::new(Kind::Invalid, format!("{doing}: tag may not start with '.'")));
    }
    let mut wanted: Vec<(u64, String)> = Vec::new();
    {
        let mut objects = Objects::now(pool, mounts);
        for name in &what.snapshots {
            for (id, snapshot) in selected(&mut objects, name, what.recursive, doing)? {
                let Some(txg) = objects.catalog.snapshot_named(id, &snapshot)? else { continue };
                let there = objects.catalog.holds(id, txg)?.iter().any(|(tag, _)| *tag == what.tag);
                let whole = format!("{}@{snapshot}", objects.known(id)?.name);
                // A recursive release takes the holds that exist.
                if what.release && !there && what.recursive {
                    continue;
                }
                if there != what.release {
                    let (kind, why) = if there {
                        (Kind::Exists, "tag already exists on this dataset")
                    } else {
                        (Kind::NotFound, "no such tag on this dataset")
                    };
                    return Err(Refusal::new(kind, format!("{doing} '{whole}': {why}")));
                }
                if !wanted.contains(&(id, snapshot.clone())) {
                    wanted.push((id, snapshot));
                }
            }
        }
    }
    if wanted.is_empty() {
        return Err(Refusal::new(Kind::NotFound, format!("{doing}: no such tag on this dataset")));
    }
    // A snapshot with a deferred destroy is destroyed with its last hold.
    let _going = if what.release {
        let mut doom = Doom::default();
        {
            let objects = Objects::now(pool, mounts);
            for (id, name) in &wanted {
                if let Some(txg) = objects.catalog.snapshot_named(*id, name)? {
                    doom.snapshots.push((*id, vec![(txg, name.clone())]));
                }
            }
        }
        Some(going(pool, mounts, &doom, doing)?)
    } else {
        None
    };
    let named: Vec<(u64, &str)> = wanted.iter().map(|(id, name)| (*id, name.as_str())).collect();
    pool.pool.hold_all(&named, &what.tag, !what.release).map_err(|error| refused(doing, &error))
}

/// Lists the holds of snapshots.
pub(super) fn list(
    pool: &Imported,
    mounts: &dyn Mounts,
    snapshots: &[String],
    recursive: bool,
) -> Result<Vec<Hold>, Refusal> {
    let mut objects = Objects::now(pool, mounts);
    let mut found = Vec::new();
    for name in snapshots {
        for (id, snapshot) in selected(&mut objects, name, recursive, "cannot open")? {
            let Some(txg) = objects.catalog.snapshot_named(id, &snapshot)? else { continue };
            let whole = format!("{}@{snapshot}", objects.known(id)?.name);
            let holds = objects.catalog.holds(id, txg)?;
            found.extend(holds.into_iter().map(|(tag, since)| Hold { snapshot: whole.clone(), tag, since }));
        }
    }
    Ok(found)
}
