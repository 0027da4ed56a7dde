//! A dataset and its ancestors with their stored properties, owned: what the engine hands out, so
//! that values can be asked for without its lock.

use super::{Behaviour, Effective, Level, Property, effective, effective::limits};
use crate::catalog::PropertyRow;
use crate::error::PoolError;
use crate::space::Limits;

/// A dataset of a chain, owned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredProperty {
    /// Its number.
    pub dataset: u64,
    /// Its whole name.
    pub name: String,
    /// Its stored properties.
    pub rows: Vec<(String, PropertyRow)>,
}

/// A dataset, its parent, and so on to the pool's root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// The dataset first, the root last.
    pub levels: Vec<StoredProperty>,
}

impl Chain {
    /// The levels, as the rules for values take them.
    #[must_use]
    pub fn as_levels(&self) -> Vec<Level<'_>> {
        self.levels.iter().map(|stored| Level { name: &stored.name, rows: &stored.rows }).collect()
    }

    /// The value that holds; `None` for figures, and for user properties that nobody set.
    #[must_use]
    pub fn get(&self, property: &Property) -> Option<Effective> {
        effective::effective(property, &self.as_levels())
    }

    /// The value that was received with the dataset, whether it holds or not.
    #[must_use]
    pub fn received(&self, name: &str) -> Option<&str> {
        let own = self.levels.first()?;
        let found = own
            .rows
            .iter()
            .find(|(stored, row)| stored == name && row.source == crate::catalog::PropertySource::Received);
        found.map(|(_, row)| row.value.as_str())
    }

    /// What the engine and the mount go by.
    ///
    /// # Errors
    /// [`PoolError::Format`] for a stored value that nobody could have set.
    pub fn behaviour(&self) -> Result<Behaviour, PoolError> {
        Behaviour::of(&self.as_levels())
    }

    /// The limits of the dataset itself.
    ///
    /// # Errors
    /// As [`Self::behaviour`].
    pub fn limits(&self) -> Result<Limits, PoolError> {
        self.as_levels().first().map_or(Ok(Limits::default()), limits)
    }
}
