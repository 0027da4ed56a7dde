//! Records that a replay of the intent log skips because rows are damaged, so that no later record
//! of the log builds on them.
//!
//! Called by the replay of an import; empty if nothing is damaged.
//!
//! Invariant: the result of a replay is consistent. An inode row in the log has the link count
//! after all earlier operations; if some of them were skipped, it is applied with the count of the
//! names that exist here. Skipped as well: records that name or change an inode which was never
//! created here, or that add or remove a name which a skipped record added or removed.

use std::collections::{HashMap, HashSet};

use super::Dataset;
use crate::files::{self, FileError, Table};
use crate::log::{LogChange, LogRecord};
use crate::rows::{Entry, FileType, InodeRow, keys};

/// The effects of all records skipped so far.
#[derive(Debug, Default)]
pub(super) struct ReplaySkip {
    /// Inodes that only skipped records would have created: dataset, number.
    unmade: HashSet<(u64, u64)>,
    /// Names that skipped records would have added or removed: dataset, directory, hash.
    names: HashSet<(u64, u64, u64)>,
    /// Differences of inode rows in the log to the rows here.
    ahead: HashMap<(u64, u64), Ahead>,
}

/// Difference between an inode's row in the log and its row here.
#[derive(Clone, Copy, Debug)]
struct Ahead {
    links: i64,
    /// Of a directory: difference of the number of names in it.
    size: i64,
}

/// Rows that are applied instead of those of a record, by their positions in it.
pub(super) type Adjusted = HashMap<usize, Vec<u8>>;

impl ReplaySkip {
    /// Returns the row replacements with which a record is applied; `None` if it builds on skipped
    /// records.
    ///
    /// # Errors
    /// Errors of reading rows.
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

    /// Returns the row with the counts that are true here; `None` if the link count would become
    /// zero although it is not in the log, or the other way round.
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

    /// Notes the effects of a record that is skipped.
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
                    // An inode that cannot be read is treated as absent: nothing more is applied to
                    // it.
                    if !matches!(error, FileError::NotFound) {
                        tracing::debug!(dataset = record.dataset, inode = number, %error, "an inode of the log cannot be read");
                    }
                    self.unmade.insert(inode);
                }
            }
        }
    }
}

/// The inode row that a change puts, with its number.
fn inode_of(change: &LogChange<'_>) -> Option<(u64, InodeRow)> {
    let LogChange::Put { key, value } = change else { return None };
    match keys::Key::decode(key) {
        Ok(keys::Key::Inode(number)) => Some((number, InodeRow::decode(value).ok()?)),
        _ => None,
    }
}

/// The inode of an entry that a change puts.
fn entry_of(change: &LogChange<'_>) -> Option<u64> {
    let LogChange::Put { value, .. } = change else { return None };
    Entry::decode(value).ok().map(|entry| entry.inode)
}
