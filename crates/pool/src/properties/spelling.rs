//! Properties for equality and validity of names: `casesensitivity`, `normalization`, `utf8only`.
//! They are set at the creation of a dataset, and permanent.
//!
//! Called by the engine when datasets are created. Invariants: values that are not given are those
//! of the parent at that moment, or of a clone's snapshot; normalized names must be UTF-8.

use super::{DATASET_PROPERTIES, PropertyError, find};
use crate::catalog::{PropertyRow, PropertySource};
use crate::rows::Folding;

const CASE: &str = "casesensitivity";
const NORMALIZATION: &str = "normalization";
const UTF8: &str = "utf8only";

/// Stored properties.
type Rows = Vec<(String, PropertyRow)>;

/// Whether this is one of these properties, by its long or short name.
#[must_use]
pub fn is_one(name: &str) -> bool {
    find(DATASET_PROPERTIES, name).is_some_and(|definition| [CASE, NORMALIZATION, UTF8].contains(&definition.name))
}

/// Checks whether a dataset without a parent can have these properties, as users write them.
///
/// # Errors
/// The reason why not.
pub fn check(properties: &[(String, String)]) -> Result<(), PropertyError> {
    let mut rows = Rows::new();
    for (name, text) in properties {
        let Some(definition) = find(DATASET_PROPERTIES, name) else { continue };
        rows.retain(|(other, _)| other != definition.name);
        rows.push((
            definition.name.to_owned(),
            PropertyRow { source: PropertySource::Local, value: definition.parse(text, true)? },
        ));
    }
    of_new(rows, &[]).map(drop)
}

/// Returns the rows of a new dataset, including the values inherited from its parent.
///
/// # Errors
/// [`PropertyError::Normalized`].
pub fn of_new(mut rows: Rows, parent: &[(String, PropertyRow)]) -> Result<Rows, PropertyError> {
    let given = value(&rows, UTF8).map(ToOwned::to_owned);
    for name in [CASE, NORMALIZATION, UTF8] {
        if let (None, Some(taken)) = (value(&rows, name), value(parent, name)) {
            rows.push((name.to_owned(), PropertyRow { source: PropertySource::Local, value: taken.to_owned() }));
        }
    }
    if value(&rows, NORMALIZATION).is_some_and(|form| form != "none") {
        if given.as_deref() == Some("off") {
            return Err(PropertyError::Normalized);
        }
        rows.retain(|(name, _)| name != UTF8);
        rows.push((UTF8.to_owned(), PropertyRow { source: PropertySource::Local, value: "on".to_owned() }));
    }
    Ok(rows)
}

/// Returns the rows of a clone, including the values inherited from its origin.
///
/// # Errors
/// [`PropertyError::NotOfClones`] if another value is requested.
pub fn of_clone(mut rows: Rows, origin: &[(String, PropertyRow)]) -> Result<Rows, PropertyError> {
    for name in [CASE, NORMALIZATION, UTF8] {
        let default = find(DATASET_PROPERTIES, name).map_or("", |definition| definition.default);
        let taken = value(origin, name).unwrap_or(default);
        match value(&rows, name) {
            Some(other) if other != taken => return Err(PropertyError::NotOfClones(name)),
            Some(_) => {}
            None if taken == default => {}
            None => {
                rows.push((name.to_owned(), PropertyRow { source: PropertySource::Local, value: taken.to_owned() }))
            }
        }
    }
    Ok(rows)
}

/// Returns the name folding for the rows of a new dataset.
#[must_use]
pub fn folding(rows: &[(String, PropertyRow)]) -> Folding {
    Folding::of_properties(value(rows, CASE).unwrap_or_default(), value(rows, NORMALIZATION).unwrap_or_default())
}

fn value<'a>(rows: &'a [(String, PropertyRow)], name: &str) -> Option<&'a str> {
    rows.iter().find(|(stored, _)| stored == name).map(|(_, row)| row.value.as_str())
}
