//! Which snapshots an argument of `destroy` means: `fs@a,b`, `fs@first%last`, `fs@%last`,
//! `fs@first%`, `fs@%`.

use std::fmt;

use super::{Name, NameError, check_part};

/// One part of a selection between commas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SnapshotRange {
    /// One snapshot.
    One(String),
    /// From one to another, both included; none is the oldest or the newest.
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
    /// Which of its snapshots.
    pub ranges: Vec<SnapshotRange>,
}

/// Why a selection cannot be applied to the snapshots that there are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SelectionError {
    /// There is no such snapshot.
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
    /// Reads an argument with `@`.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(argument: &str) -> Result<Self, NameError> {
        let (filesystem, list) = argument.split_once('@').ok_or(NameError::NoSnapshotDelimiter)?;
        Name::filesystem(filesystem)?;
        if !list.contains(',') {
            if list.contains(['@', '#']) {
                return Err(NameError::MultipleDelimiters);
            }
            return Ok(Self { filesystem: filesystem.to_owned(), ranges: vec![range(list)?] });
        }
        // In a list, as in ZFS, what can be no snapshot's name is one that is not there.
        let ranges = list.split(',').filter(|part| !part.is_empty());
        let ranges = ranges.map(|part| range(part).unwrap_or_else(|_| SnapshotRange::One(part.to_owned()))).collect();
        Ok(Self { filesystem: filesystem.to_owned(), ranges })
    }

    /// The positions of the selected ones among the snapshots that there are, the oldest first; in
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
