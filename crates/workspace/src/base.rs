//! The directories that a workspace was made from.

use crate::{
    Result,
    beneath::{Listed, Tree},
    meta::Meta,
    trouble::During,
};
use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
};

/// The directories that a workspace was made from, the topmost first, open.
#[derive(Clone, Debug)]
pub struct Base {
    pub(crate) trees: Vec<Tree>,
}

/// An entry of the base, and the directory that has it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Below<'a> {
    pub(crate) tree: &'a Tree,
    pub(crate) meta: Meta,
}

impl Base {
    /// Opens the directories of a base, the topmost first.
    ///
    /// # Errors
    /// One is missing or cannot be read.
    pub fn open(directories: &[impl AsRef<Path>]) -> Result<Base> {
        let mut trees = Vec::with_capacity(directories.len());
        for directory in directories {
            let directory = directory.as_ref();
            trees.push(Tree::open(directory).during("open", directory)?);
        }
        Ok(Base { trees })
    }

    /// The topmost directory, into which is committed.
    pub(crate) fn target(&self) -> Result<&Tree> {
        match self.trees.first() {
            Some(first) => Ok(first),
            None => Err(crate::WorkspaceError { what: "the workspace has no base".to_owned(), errno: None }),
        }
    }

    /// The topmost directory alone, and those below it.
    pub(crate) fn divided(&self) -> (Base, Base) {
        let (target, below) = self.trees.split_at(self.trees.len().min(1));
        (Base { trees: target.to_vec() }, Base { trees: below.to_vec() })
    }

    /// Path for messages.
    pub(crate) fn path_of(&self, path: &Path) -> PathBuf {
        self.trees.first().map_or_else(|| path.to_path_buf(), |tree| tree.path_of(path))
    }

    /// Path for messages of an entry in the topmost directory that has it.
    pub(crate) fn path_with(&self, path: &Path) -> Result<PathBuf> {
        Ok(self.find(path)?.map_or_else(|| self.path_of(path), |below| below.tree.path_of(path)))
    }

    /// Looks an entry up, as a union of the directories shows it.
    pub(crate) fn find(&self, path: &Path) -> Result<Option<Below<'_>>> {
        for (index, tree) in self.trees.iter().enumerate() {
            let found = tree.meta(path).during("read", &tree.path_of(path))?;
            if let Some(meta) = found {
                return Ok(Some(Below { tree, meta }));
            }
            let is_last = index + 1 == self.trees.len();
            if !is_last && self.is_covered(tree, path)? {
                break;
            }
        }
        Ok(None)
    }

    /// Whether a file of a directory has the name of a parent, which hides the directories below.
    fn is_covered(&self, tree: &Tree, path: &Path) -> Result<bool> {
        for above in path.ancestors().skip(1).filter(|above| !above.as_os_str().is_empty()) {
            match tree.meta(above).during("read", &tree.path_of(above))? {
                Some(meta) => return Ok(!meta.is_directory()),
                None => continue,
            }
        }
        Ok(false)
    }

    /// The attributes of an entry; `None` where there is none.
    pub(crate) fn meta(&self, path: &Path) -> Result<Option<Meta>> {
        Ok(self.find(path)?.map(|below| below.meta))
    }

    /// The names in a directory.
    pub(crate) fn list(&self, path: &Path) -> Result<Vec<Listed>> {
        let mut names: BTreeMap<_, Listed> = BTreeMap::new();
        for tree in &self.trees {
            let listed = match tree.list(path) {
                Ok(listed) => listed,
                Err(error) if crate::trouble::is_missing(&error) => {
                    if self.is_file(tree, path)? {
                        break;
                    } else {
                        continue;
                    }
                }
                Err(error) => return Err(error).during("read", &tree.path_of(path)),
            };
            for listed in listed {
                names.entry(listed.name.clone()).or_insert(listed);
            }
        }
        Ok(names.into_values().collect())
    }

    fn is_file(&self, tree: &Tree, path: &Path) -> Result<bool> {
        let meta = tree.meta(path).during("read", &tree.path_of(path))?;
        Ok(meta.is_some_and(|meta| !meta.is_directory()) || self.is_covered(tree, path)?)
    }
}

/// Whether an error of an optional call means that the entry has been removed meanwhile.
pub(crate) fn or_missing<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if crate::trouble::is_missing(&error) => Ok(None),
        Err(error) => Err(error),
    }
}
