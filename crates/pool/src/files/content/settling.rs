//! How an edit ends: what it makes of records in memory happens when the table has taken its rows,
//! and not otherwise.

use std::sync::Arc;

use crate::files::inodes::{Editing, Pending};
use crate::files::{Batch, Files, Inode, Result, Table};
use crate::log::LogChange;
use crate::pointer::Txg;
use crate::rows::InodeRow;

impl<T: Table> Files<T> {
    /// Ends an edit that a batch completes, and that has made this change of content. Where the table does not take it, memory has what it
    /// had; a file may have grown by what reads as zeros.
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
            // Nobody sees content, nor the row, before the inode is let go of.
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

    /// The table has taken what was changed: memory follows.
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
                        // The record of the new size cuts there as well.
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

    /// What was to be changed stays as it was: what was only read for that is not needed in memory.
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
