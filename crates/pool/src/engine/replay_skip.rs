//! What a replay of the intent log leaves out because rows are damaged, so that nothing which comes
//! later in the log builds on it.
//!
//! Called by the replay of an import, and empty where nothing is damaged.
//!
//! Invariant: what is applied is of one piece. A row of an inode in the log says how many names
//! there were with all that was done before; where some of that was left out, it is applied with as
//! many as there are here. What names or changes an inode that was never made here, or takes a name
//! that was given or taken by what was left out, is left out as well.

use std::collections::{HashMap, HashSet};

use super::Dataset;
use crate::files::{self, FileError, Table};
use crate::log::{LogChange, LogRecord};
use crate::rows::{Entry, FileType, InodeRow, keys};

/// What was left out so far.
#[derive(Debug, Default)]
pub(super) struct ReplaySkip {
    /// Inodes that only what was left out has made: dataset, number.
    unmade: HashSet<(u64, u64)>,
    /// Names that it gave or took: dataset, directory, hash.
    names: HashSet<(u64, u64, u64)>,
    /// By how much rows of the log are ahead of those here.
    ahead: HashMap<(u64, u64), Ahead>,
}

/// By how much the row of an inode in the log is more than the one here.
#[derive(Clone, Copy, Debug)]
struct Ahead {
    links: i64,
    /// Of a directory: how many names it holds.
    size: i64,
}

/// Rows that are applied in place of those of a record, by their places in it.
pub(super) type Adjusted = HashMap<usize, Vec<u8>>;

impl ReplaySkip {
    /// What a record is to be applied with; none where it builds on what was left out.
    ///
    /// # Errors
    /// Those of reading rows.
    pub(super) fn judge(&self, dataset: &Dataset, record: &LogRecord<'_>) -> files::Result<Option<Adjusted>> {
        let mut adjusted = Adjusted::new();
        if self.unmade.is_empty() && self.names.is_empty() && self.ahead.is_empty() {
            return Ok(Some(adjusted));
        }
        if record.changes.iter().any(|change| self.builds_on(record.dataset, change)) {
            return Ok(None);
        }
        for (at, change) in record.changes.iter().enumerate() {
            let Some((number, row)) = inode_of(change) else { continue };
            let Some(ahead) = self.ahead.get(&(record.dataset, number)) else { continue };
            match self.adjust(dataset, record, number, (row, *ahead))? {
                Some(row) => adjusted.insert(at, row.encode()),
                None => return Ok(None),
            };
        }
        Ok(Some(adjusted))
    }

    fn builds_on(&self, dataset: u64, change: &LogChange<'_>) -> bool {
        let unmade = |number: u64| self.unmade.contains(&(dataset, number));
        let key = match change {
            LogChange::Put { key, .. } | LogChange::Delete { key } => key,
            LogChange::Write { inode, .. } | LogChange::Zero { inode, .. } => return unmade(*inode),
            LogChange::Share { from, to, .. } => return unmade(*from) || unmade(*to),
            LogChange::DeleteRange { .. } => return false,
        };
        match keys::Key::decode(key) {
            Ok(keys::Key::Name { directory, hash, .. }) => {
                unmade(directory) || self.names.contains(&(dataset, directory, hash))
            }
            Ok(keys::Key::Entry { directory, .. }) => unmade(directory) || entry_of(change).is_some_and(unmade),
            Ok(keys::Key::Inode(number) | keys::Key::Orphan(number) | keys::Key::Cut(number)) => unmade(number),
            Ok(keys::Key::Xattr { inode, .. } | keys::Key::Extent { inode, .. } | keys::Key::Patch { inode, .. }) => {
                unmade(inode)
            }
            Ok(keys::Key::Head | keys::Key::OwnerUse(..) | keys::Key::Received | keys::Key::Recounted) | Err(_) => {
                false
            }
        }
    }

    /// The row with the names that there are here; none where it would have none left, or some that
    /// the log says are gone.
    fn adjust(
        &self,
        dataset: &Dataset,
        record: &LogRecord<'_>,
        number: u64,
        (mut row, ahead): (InodeRow, Ahead),
    ) -> files::Result<Option<InodeRow>> {
        let Ok(links) = u32::try_from(i64::from(row.links).saturating_sub(ahead.links)) else { return Ok(None) };
        if (links == 0) != (row.links == 0) {
            return Ok(None);
        }
        row.links = links;
        if row.file_type() == Some(FileType::Directory) {
            let Some(size) = row.size.checked_add_signed(ahead.size.saturating_neg()) else { return Ok(None) };
            row.size = size;
        }
        let Some(hint) = row.hint else { return Ok(Some(row)) };
        let key = keys::entry(hint.directory, hint.sequence);
        let is_made = record
            .changes
            .iter()
            .any(|change| matches!(change, LogChange::Put { key: made, .. } if *made == key.as_slice()));
        if !is_made && dataset.files().look_at_table(|table| table.get(&key))?.is_none() {
            row.hint = dataset.files().attributes(&dataset.files().inode(number))?.hint;
        }
        Ok(Some(row))
    }

    /// Notes what a record would have done that is left out.
    pub(super) fn leave_out(&mut self, dataset: &Dataset, record: &LogRecord<'_>) {
        for change in &record.changes {
            if let LogChange::Put { key, .. } | LogChange::Delete { key } = change
                && let Ok(keys::Key::Name { directory, hash, .. }) = keys::Key::decode(key)
            {
                self.names.insert((record.dataset, directory, hash));
            }
            let Some((number, row)) = inode_of(change) else { continue };
            let inode = (record.dataset, number);
            if self.unmade.contains(&inode) {
                continue;
            }
            match dataset.files().attributes(&dataset.files().inode(number)) {
                Ok(here) => {
                    let links = i64::from(row.links) - i64::from(here.links);
                    let size = i64::try_from(row.size)
                        .unwrap_or(i64::MAX)
                        .saturating_sub(i64::try_from(here.size).unwrap_or(i64::MAX));
                    self.ahead.insert(inode, Ahead { links, size });
                }
                Err(error) => {
                    // Where it cannot be known whether it is there, nothing more happens to it.
                    if !matches!(error, FileError::NotFound) {
                        tracing::debug!(dataset = record.dataset, inode = number, %error, "an inode of the log cannot be read");
                    }
                    self.unmade.insert(inode);
                }
            }
        }
    }
}

/// The inode whose row a change puts, and the row.
fn inode_of(change: &LogChange<'_>) -> Option<(u64, InodeRow)> {
    let LogChange::Put { key, value } = change else { return None };
    match keys::Key::decode(key) {
        Ok(keys::Key::Inode(number)) => Some((number, InodeRow::decode(value).ok()?)),
        _ => None,
    }
}

/// The inode that an entry which is put names.
fn entry_of(change: &LogChange<'_>) -> Option<u64> {
    let LogChange::Put { value, .. } = change else { return None };
    Entry::decode(value).ok().map(|entry| entry.inode)
}
