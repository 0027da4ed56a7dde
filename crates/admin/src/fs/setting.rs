//! `set` and `inherit`: change properties and update mounts.

use nacre_pool::engine::{Edit, Setting};
use nacre_pool::properties::{Property, PropertyError, dataset_property};
use serde::{Deserialize, Serialize};

use super::moves::{self, Change};
use super::objects::{Object, Objects};
use super::{refused, sharing, values};
use crate::{Imported, Kind, Mounts, Progress, Refusal, What};

/// Arguments of `set` and `inherit`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToSet {
    /// The file systems and snapshots.
    pub names: Vec<String>,
    /// Includes all descendants.
    pub recursive: bool,
    /// The properties, in the user's form, with their new values.
    pub properties: Vec<(String, NewValue)>,
    /// Keeps mounts where they are.
    #[serde(default)]
    pub unmounted: bool,
}

/// A new value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NewValue {
    /// A local value, in the user's form.
    Local(String),
    /// The parent's value, or the default.
    Inherit,
    /// The value that was received with a stream.
    Received,
}

/// A checked change of one property.
struct Checked {
    /// Name in its stored form.
    name: String,
    setting: Setting,
    /// The canonical value, to determine the effects on mounts.
    value: Option<String>,
}

/// Changes properties; returns a sentence for each mount that failed afterwards.
pub(super) fn set(
    pool: &Imported,
    mounts: &dyn Mounts,
    what: &ToSet,
    progress: &mut dyn Progress,
) -> Result<Vec<String>, Refusal> {
    let setting = what.properties.iter().any(|(_, value)| matches!(value, NewValue::Local(_)));
    let doing = |name: &str| {
        if setting {
            format!("cannot set property for '{name}'")
        } else {
            format!("cannot inherit property for '{name}'")
        }
    };
    let first = what.names.first().map_or("", String::as_str);
    let (targets, checked) = {
        let mut objects = Objects::now(pool, mounts);
        let targets = targets(&mut objects, what, &doing)?;
        let refuse = |error| Refusal::new(Kind::Invalid, format!("{}: {error}", doing(first)));
        let checked = what
            .properties
            .iter()
            .map(|(name, value)| check(name, value).map_err(refuse))
            .collect::<Result<Vec<_>, _>>()?;
        (targets, checked)
    };
    let mut failed = Vec::new();
    for id in targets.filesystems {
        failed.extend(one(pool, mounts, id, &checked, what.unmounted, &doing)?);
        if checked.iter().any(|change| change.name.starts_with("share")) {
            sharing::tell_failures(pool, mounts, id, progress)?;
        }
        if checked.iter().any(|change| change.name == "atime") {
            let later: Vec<u64> = Objects::now(pool, mounts).descendants(id)?;
            for sentence in later.into_iter().filter_map(|id| mounts.begins_later(What::head(id))) {
                progress.note(&sentence);
            }
        }
    }
    if !targets.snapshots.is_empty() {
        let changes: Vec<(String, Setting)> =
            checked.iter().map(|change| (change.name.clone(), change.setting.clone())).collect();
        pool.pool
            .set_snapshot_properties(&targets.snapshots, &changes)
            .map_err(|error| refused(&doing(first), &error))?;
    }
    Ok(failed)
}

/// Objects of a change of properties.
#[derive(Default)]
struct Targets {
    filesystems: Vec<u64>,
    snapshots: Vec<(u64, String)>,
}

/// Returns the named objects, and with `recursive` their descendants: for user properties also the snapshots there.
fn targets(objects: &mut Objects<'_>, what: &ToSet, doing: &dyn Fn(&str) -> String) -> Result<Targets, Refusal> {
    let users = what.properties.iter().all(|(name, _)| matches!(dataset_property(name), Ok(Property::User(_))));
    let mut found = Targets::default();
    for name in &what.names {
        match objects.open("open", name)? {
            Object::Filesystem(id) if what.recursive => {
                for below in objects.descendants(id)? {
                    found.filesystems.push(below);
                    if users {
                        found.snapshots.extend(
                            objects.catalog.snapshot_rows(below)?.into_iter().map(|(_, row)| (below, row.name)),
                        );
                    }
                }
            }
            Object::Filesystem(id) => found.filesystems.push(id),
            Object::Snapshot { of, txg } if users => {
                found.snapshots.push((of, objects.catalog.snapshot(of, txg)?.name))
            }
            Object::Snapshot { .. } => {
                return Err(Refusal::new(Kind::Invalid, format!("{}: {}", doing(name), PropertyError::NotOfSnapshots)));
            }
            Object::Bookmark { .. } => {
                return Err(Refusal::new(
                    Kind::Invalid,
                    format!("{}: bookmarks have no properties to be set", doing(name)),
                ));
            }
        }
    }
    Ok(found)
}

fn check(name: &str, value: &NewValue) -> Result<Checked, nacre_pool::properties::PropertyError> {
    let property = dataset_property(name)?;
    let stored = match &property {
        Property::Known(definition) => definition.name.to_owned(),
        _ => values::name_of(&property),
    };
    Ok(match value {
        NewValue::Local(text) => {
            let canonical = property.parse(text, false)?;
            Checked { name: stored, setting: Setting::Local(text.clone()), value: Some(canonical) }
        }
        NewValue::Inherit => {
            property.check_inherit()?;
            Checked { name: stored, setting: Setting::Inherit, value: None }
        }
        NewValue::Received => {
            property.check_revert()?;
            Checked { name: stored, setting: Setting::BackToReceived, value: None }
        }
    })
}

fn one(
    pool: &Imported,
    mounts: &dyn Mounts,
    id: u64,
    checked: &[Checked],
    unmounted: bool,
    doing: &dyn Fn(&str) -> String,
) -> Result<Vec<String>, Refusal> {
    let (name, affected) = {
        let mut objects = Objects::now(pool, mounts);
        (objects.known(id)?.name.clone(), objects.descendants(id)?)
    };
    let edits: Vec<Edit> = checked
        .iter()
        .map(|change| Edit { dataset: id, name: change.name.clone(), to: change.setting.clone() })
        .collect();
    let foresee = |objects: &mut Objects<'_>| {
        let mut known = (*objects.known(id)?).clone();
        for change in checked {
            known.foresee(&change.name, change.value.as_deref(), change.setting == Setting::Inherit);
        }
        objects.pretend(id, known);
        Ok(())
    };
    let apply = || pool.pool.set_properties(&edits).map(drop).map_err(|error| refused(&doing(&name), &error));
    let failed = if unmounted {
        apply()?;
        moves::refresh(pool, mounts, &affected)?;
        Vec::new()
    } else {
        moves::change(
            pool,
            mounts,
            &Change { affected: affected.clone(), force: false, places: None, foresee: &foresee, apply: &apply },
        )?
    };
    if checked.iter().any(|change| change.name == "snapdir") {
        // The kernel has cached the root directory.
        affected.iter().for_each(|id| mounts.root_changed(*id));
    }
    Ok(failed)
}
