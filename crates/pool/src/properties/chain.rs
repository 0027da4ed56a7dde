//! A dataset and its ancestors with their stored properties, owned: returned by the engine, so that
//! values can be computed without its lock.

use super::{Behaviour, Effective, Level, Property, effective, effective::limits};
use crate::catalog::PropertyRow;
use crate::error::PoolError;
use crate::space::Limits;

/// A dataset of a chain, owned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredProperty {
    /// Number of the dataset.
    pub dataset: u64,
    /// Its full name.
    pub name: String,
    /// Its stored properties.
    pub rows: Vec<(String, PropertyRow)>,
}

/// A dataset and all its ancestors up to the root dataset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// The dataset first, the root dataset last.
    pub levels: Vec<StoredProperty>,
}

impl Chain {
    /// Returns the levels in the form that effective values are computed from.
    #[must_use]
    pub fn as_levels(&self) -> Vec<Level<'_>> {
        self.levels.iter().map(|stored| Level { name: &stored.name, rows: &stored.rows }).collect()
    }

    /// Returns the effective value; `None` for statistics, and for user properties that are not
    /// set.
    #[must_use]
    pub fn get(&self, property: &Property) -> Option<Effective> {
        effective::effective(property, &self.as_levels())
    }

    /// Returns the value that was received with the dataset, whether it is effective or not.
    #[must_use]
    pub fn received(&self, name: &str) -> Option<&str> {
        let own = self.levels.first()?;
        let found = own
            .rows
            .iter()
            .find(|(stored, row)| stored == name && row.source == crate::catalog::PropertySource::Received);
        found.map(|(_, row)| row.value.as_str())
    }

    /// Returns the settings for the engine and the mount.
    ///
    /// # Errors
    /// [`PoolError::Format`] for a stored value that is invalid.
    pub fn behaviour(&self) -> Result<Behaviour, PoolError> {
        Behaviour::of(&self.as_levels())
    }

    /// Returns the limits of the dataset itself.
    ///
    /// # Errors
    /// As [`Self::behaviour`].
    pub fn limits(&self) -> Result<Limits, PoolError> {
        self.as_levels().first().map_or(Ok(Limits::default()), limits)
    }
}
