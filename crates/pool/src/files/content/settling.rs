//! The end of an edit: its changes of records in memory are made if, and only if, the table has
//! taken its rows.

use std::sync::Arc;

use crate::files::inodes::{Editing, Pending};
use crate::files::{Batch, Files, Inode, Result, Table};
use crate::log::LogChange;
use crate::pointer::Txg;
use crate::rows::InodeRow;

impl<T: Table> Files<T> {
    /// Applies the batch that completes an edit with this change of content, and ends the edit. If
    /// the table does not take it, memory keeps its content; a file may have grown by zeros.
    pub(in crate::files) fn apply_and_finish(
        &self,
        txg: Txg,
        inode: &Arc<Inode>,
        mut edited: Editing<'_>,
        (batch, change): (&Batch, LogChange<'_>),
    ) -> Result<()> {
        let applied = self.apply(txg, batch);
        let row = edited.row;
        if applied.is_ok() {
            // Neither the content nor the row is visible before the inode is unlocked.
            self.keep_row(txg, &edited, Some(change));
            self.settle(txg, &row, &mut edited);
        } else {
            self.take_back(txg, &row, &mut edited);
            if let Some(active) = edited.active.as_mut() {
                active.row.charged = row.charged.saturating_add_signed(batch.charged.saturating_neg());
            }
        }
        self.finish(inode, edited);
        applied
    }

    /// Makes the changes of records in memory, after the table has taken the rows.
    pub(in crate::files) fn settle(&self, txg: Txg, row: &InodeRow, edited: &mut Editing<'_>) {
        for pending in std::mem::take(&mut edited.pending) {
            let records = &mut edited.activate().records;
            match pending {
                Pending::Gone(record) => {
                    if let Some(buffered) = records.remove(&record) {
                        self.release(txg, row, &buffered);
                    }
                }
                Pending::Cut { record, keep, .. } => {
                    if let Some(buffer) = records.get_mut(&record) {
                        let cut = buffer.content.len().saturating_sub(keep);
                        buffer.content.truncate(keep);
                        // The record of the new size truncates it as well.
                        let part = buffer.unrecorded.take();
                        buffer.unrecorded =
                            part.map(|part| part.start.min(keep)..part.end.min(keep)).filter(|part| !part.is_empty());
                        self.buffered.shrink(cut as u64);
                    }
                }
                Pending::Zeroed { record, part, .. } => {
                    if let Some(buffer) = records.get_mut(&record) {
                        let part = part.start..part.end.min(buffer.content.len());
                        if let Some(zeroed) = buffer.content.get_mut(part.clone()) {
                            zeroed.fill(0);
                            buffer.changed(part);
                        }
                    }
                }
            }
        }
    }

    /// Discards the changes of records in memory; records that were only read for them are dropped.
    pub(in crate::files) fn take_back(&self, txg: Txg, row: &InodeRow, edited: &mut Editing<'_>) {
        for pending in std::mem::take(&mut edited.pending) {
            if let Pending::Cut { record, fresh: true, .. } | Pending::Zeroed { record, fresh: true, .. } = pending
                && let Some(buffered) = edited.activate().records.remove(&record)
            {
                self.release(txg, row, &buffered);
            }
        }
    }
}
