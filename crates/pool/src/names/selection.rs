//! Selections of snapshots in arguments of `destroy`: `fs@a,b`, `fs@first%last`, `fs@%last`,
//! `fs@first%`, `fs@%`.

use std::fmt;

use super::{Name, NameError, check_part};

/// One part of a selection between commas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SnapshotRange {
    /// One snapshot.
    One(String),
    /// A range, both ends included; `None` is the oldest or the newest.
    Through {
        /// The first.
        first: Option<String>,
        /// The last.
        last: Option<String>,
    },
}

/// Snapshots of one file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotSelection {
    /// The file system.
    pub filesystem: String,
    /// The selected snapshots.
    pub ranges: Vec<SnapshotRange>,
}

/// Reason why a selection does not match the existing snapshots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SelectionError {
    /// There is no snapshot of this name.
    NoSnapshot(String),
    /// The last of a range is older than the first.
    Backwards(String, String),
}

impl fmt::Display for SelectionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoSnapshot(name) => {
                write!(f, "could not find any snapshots to destroy; check snapshot names: '{name}'")
            }
            Self::Backwards(first, last) => write!(f, "snapshot '{last}' is older than '{first}'"),
        }
    }
}

impl std::error::Error for SelectionError {}

impl SnapshotSelection {
    /// Parses an argument with `@`.
    ///
    /// # Errors
    /// The reason why it is invalid.
    pub fn parse(argument: &str) -> Result<Self, NameError> {
        let (filesystem, list) = argument.split_once('@').ok_or(NameError::NoSnapshotDelimiter)?;
        Name::filesystem(filesystem)?;
        if !list.contains(',') {
            if list.contains(['@', '#']) {
                return Err(NameError::MultipleDelimiters);
            }
            return Ok(Self { filesystem: filesystem.to_owned(), ranges: vec![range(list)?] });
        }
        // In a list, as in ZFS, an invalid name counts as a snapshot that does not exist.
        let ranges = list.split(',').filter(|part| !part.is_empty());
        let ranges = ranges.map(|part| range(part).unwrap_or_else(|_| SnapshotRange::One(part.to_owned()))).collect();
        Ok(Self { filesystem: filesystem.to_owned(), ranges })
    }

    /// Returns the positions of the selected snapshots among the existing ones (oldest first); in
    /// order, each once.
    ///
    /// # Errors
    /// [`SelectionError`].
    pub fn select(&self, existing: &[&str]) -> Result<Vec<usize>, SelectionError> {
        let find = |name: &String| {
            existing
                .iter()
                .position(|other| *other == name.as_str())
                .ok_or_else(|| SelectionError::NoSnapshot(name.clone()))
        };
        let mut selected = vec![false; existing.len()];
        for range in &self.ranges {
            let (first, end) = match range {
                SnapshotRange::One(name) => {
                    let place = find(name)?;
                    (place, place + 1)
                }
                SnapshotRange::Through { first, last } => {
                    let from = first.as_ref().map_or(Ok(0), find)?;
                    let end = last.as_ref().map_or(Ok(existing.len()), |last| find(last).map(|place| place + 1))?;
                    if from >= end
                        && let (Some(first), Some(last)) = (first, last)
                    {
                        return Err(SelectionError::Backwards(first.clone(), last.clone()));
                    }
                    (from, end)
                }
            };
            selected.iter_mut().take(end).skip(first).for_each(|mark| *mark = true);
        }
        Ok(selected.iter().enumerate().filter(|(_, mark)| **mark).map(|(place, _)| place).collect())
    }
}

fn range(part: &str) -> Result<SnapshotRange, NameError> {
    let end = |name: &str| {
        if name.is_empty() {
            return Ok(None);
        }
        check_part(name)?;
        Ok(Some(name.to_owned()))
    };
    match part.split_once('%') {
        Some((first, last)) => Ok(SnapshotRange::Through { first: end(first)?, last: end(last)? }),
        None => {
            check_part(part)?;
            Ok(SnapshotRange::One(part.to_owned()))
        }
    }
}
