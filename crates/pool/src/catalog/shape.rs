//! Checks that the file systems of a catalog form a tree: an image may come from anywhere, and a
//! forger knows the format.
//!
//! Called when a pool is opened and when a reader switches to a newer state, before any parent is
//! followed. Invariants: the work grows with the number of file systems; in a catalog that passes,
//! parents lead to the root dataset in at most [`NAME_MOST`] steps. The form of names is checked by
//! the decoders of rows.

use std::collections::HashMap;

use super::table::Catalog;
use super::{DatasetRow, rows};
use crate::error::{Damage, PoolError};
use crate::names::{NAME_MOST, Name};

fn damaged<T>(what: &'static str) -> Result<T, PoolError> {
    Err(PoolError::Format(Damage::Structure(what)))
}

impl Catalog {
    /// Checks that the file systems form a tree, with the root dataset at its root.
    ///
    /// # Errors
    /// [`PoolError::Format`] with the first inconsistency; errors of the tree.
    pub fn check_shape(&self) -> Result<(), PoolError> {
        let datasets: HashMap<u64, DatasetRow> = self.datasets()?.into_iter().collect();
        let root = self.head()?.root;
        match datasets.get(&root) {
            Some(row) if row.parent == 0 && Name::filesystem(&row.name).is_ok() => {}
            _ => return damaged("the pool's own file system"),
        }
        let children = self.check_children(&datasets)?;
        let mut level = vec![root];
        let (mut seen, mut depth) = (0, 0);
        while !level.is_empty() {
            seen += level.len();
            depth += 1;
            if depth > NAME_MOST {
                return damaged("a file system that lies too deep");
            }
            level = level.iter().filter_map(|id| children.get(id)).flatten().copied().collect();
        }
        if seen == datasets.len() { Ok(()) } else { damaged("a file system that lies below itself") }
    }

    /// Checks that each file system has a name row below its parent, and that there are no other
    /// name rows; returns the children of each.
    fn check_children(&self, datasets: &HashMap<u64, DatasetRow>) -> Result<HashMap<u64, Vec<u64>>, PoolError> {
        let mut children: HashMap<u64, Vec<u64>> = HashMap::new();
        let mut count = 0;
        for child in self.all_children()? {
            let is_there =
                datasets.get(&child.id).is_some_and(|row| row.parent == child.parent && row.name == child.name);
            if !is_there {
                return damaged("a name that leads to another file system");
            }
            children.entry(child.parent).or_default().push(child.id);
            count += 1;
        }
        // No two rows lead to the same file system, as each has its name and its parent.
        if count == datasets.len() { Ok(children) } else { damaged("a file system without a name") }
    }

    fn all_children(&self) -> Result<Vec<Child>, PoolError> {
        self.all(rows::below(rows::CHILD, &[]), |key, row| {
            let ([parent], name) = rows::parts::<1>(key)?;
            let Ok(id) = row.try_into().map(u64::from_le_bytes) else { return damaged("the number of a child") };
            // The name is compared with the row of the file system.
            Ok(Child { parent, name: String::from_utf8_lossy(name).into_owned(), id })
        })
    }
}

/// Row of a file system's name.
struct Child {
    parent: u64,
    name: String,
    id: u64,
}
