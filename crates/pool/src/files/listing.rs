//! Listings: the entries of a directory in the order of their creation, with attributes where they are wanted.
//!
//! An entry's sequence is the cookie: it is unique, never given twice, and stays while the name stays; so a listing may be left and taken up again at any
//! time, over a remount as well, and shows every name that is there throughout exactly once.

use std::sync::Arc;

use super::{FileError, Files, Inode, Result, Table};
use crate::rows::{Entry, FileType, Inode as Row, keys};

/// An entry of a directory.
#[derive(Clone, Debug)]
pub struct Listed {
    /// Where to go on behind it.
    pub sequence: u64,
    /// The name.
    pub name: Vec<u8>,
    /// What it names.
    pub number: u64,
    /// Its type.
    pub file_type: FileType,
    /// The inode and its attributes, where they were asked for.
    pub file: Option<(Arc<Inode>, Row)>,
}

impl<T: Table> Files<T> {
    /// Up to `most` entries behind the sequence `behind` (0: from the beginning).
    ///
    /// # Errors
    /// [`FileError::NotDirectory`], those of the engine.
    pub fn list(&self, directory: &Inode, behind: u64, attributes: bool, most: usize) -> Result<Vec<Listed>> {
        if self.attributes(directory)?.file_type() != Some(FileType::Directory) {
            return Err(FileError::NotDirectory);
        }
        let mut listed = Vec::new();
        let mut damage = Ok(());
        let table = self.table.read();
        table.scan(keys::entries(directory.number(), behind.saturating_add(1)), &mut |key, row| {
            let one = || {
                let keys::Key::Entry { sequence, .. } = keys::Key::decode(key)? else { return Ok(None) };
                let Entry { inode, file_type, name } = Entry::decode(row)?;
                Ok::<_, crate::PoolError>(Some(Listed { sequence, name: name.to_vec(), number: inode, file_type, file: None }))
            };
            match one() {
                Ok(entry) => listed.extend(entry),
                Err(error) => damage = Err(error),
            }
            damage.is_ok() && listed.len() < most
        })?;
        damage?;
        let mut rows = Vec::new();
        if attributes {
            for entry in &listed {
                rows.push(Self::stored_in(&table, entry.number)?);
            }
        }
        drop(table);
        for (entry, stored) in listed.iter_mut().zip(rows) {
            let inode = self.known.get(entry.number);
            let row = inode.active.read().as_ref().map_or(stored, |active| active.shown());
            entry.file = Some((inode, row));
        }
        Ok(listed)
    }
}
