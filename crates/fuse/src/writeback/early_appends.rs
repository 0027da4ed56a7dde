//! Data that the kernel writes back too early to files that can only be appended to (`chattr +a`): it does so in any
//! order, and may wait for the end of the later write before it sends the earlier one. So the later one is
//! acknowledged, and kept in memory until the gap before it is filled.
//!
//! Owned by `writeback.rs`; used by `ops/unopened.rs` for files that the kernel opens without a request, in cages: a
//! file of a pool is opened for writing anywhere, and its pages are judged by `protected_files.rs`. Invariant: no
//! fsync(2) succeeds while acknowledged data is in memory only. Where all writes of the file have been answered by
//! then, data that is still kept lacks a write that has not arrived, and never will.

use crate::ops::data::told;
use nacre_vfs::{Errno, OpenFile, Result, WriteOrigin};
use std::collections::BTreeMap;

/// Acknowledged data of one file that is not stored yet.
#[derive(Debug, Default)]
pub(crate) struct EarlyAppends {
    /// Data by its offset.
    pub runs: BTreeMap<u64, Vec<u8>>,
    /// A write to the file has failed: the gap that it leaves is never filled.
    pub has_gap: bool,
    /// Acknowledged data is lost, which the next fsync(2) reports.
    pub is_lost: bool,
}

impl EarlyAppends {
    /// A write has failed, which the kernel reports: what comes after it cannot be stored any more.
    pub fn fail(&mut self) {
        self.runs.clear();
        self.has_gap = true;
    }

    /// Whether acknowledged data of the file is not stored, at the moment of an fsync(2). A loss is reported once.
    pub fn take_missing(&mut self) -> bool {
        std::mem::take(&mut self.is_lost) || !self.runs.is_empty()
    }

    /// Stores all runs at their offsets, in a file that can be written to anywhere.
    ///
    /// # Errors
    /// Errors of the write: the data is lost, which the next fsync(2) reports.
    pub fn store_all(&mut self, file: &dyn OpenFile) -> Result<()> {
        self.has_gap = false;
        for (offset, run) in std::mem::take(&mut self.runs) {
            write_all(file, &run, offset).inspect_err(|_| self.is_lost = true)?;
        }
        Ok(())
    }

    /// Whether there is nothing to remember.
    pub fn is_idle(&self) -> bool {
        self.runs.is_empty() && !self.has_gap && !self.is_lost
    }
}

/// Writes data from the page cache; returns its length.
///
/// # Errors
/// Errors of the write; EIO where nothing can be written.
pub(crate) fn write_all(file: &dyn OpenFile, data: &[u8], offset: u64) -> Result<u64> {
    let mut done = 0;
    while let Some(rest) = data.get(done..).filter(|rest| !rest.is_empty()) {
        let at = offset.saturating_add(done as u64);
        match file.write(rest, at, WriteOrigin::Writeback { timed: false }).map_err(told)? {
            0 => return Err(Errno::EIO),
            more => done += more,
        }
    }
    Ok(data.len() as u64)
}
