//! Compression of whole records before their inode is locked: writes of several threads to one file
//! are compressed in parallel, and readers do not wait for a compression.
//!
//! Invariants: no space is taken or reserved here: that happens under the lock, for the content as
//! it is. Results that do not fit the file as it is found under the lock are dropped, and the
//! content is compressed again.

use std::sync::atomic::Ordering;

use super::{Form, form_of, pieces};
use crate::files::{Files, Inode, Storing, Table};
use crate::frames::{Compressed, NewFrame};
use crate::pointer::Txg;

/// Shorter writes are compressed under the lock, bytes.
const WORTH_IT: usize = 128 << 10;

/// Whole records of a write, compressed.
#[derive(Debug)]
pub(super) struct Precompressed {
    storing: Storing,
    shift: u8,
    /// By record number, in order.
    records: Vec<(u64, Compressed)>,
}

impl Precompressed {
    /// Returns the compressed records for these frames, if record size and properties still match.
    pub(super) fn of(
        &self,
        storing: &Storing,
        shift: u8,
        records: impl Iterator<Item = u64>,
    ) -> Option<Vec<&Compressed>> {
        if *storing != self.storing || shift != self.shift {
            return None;
        }
        let find = |record: u64| {
            let at = self.records.binary_search_by_key(&record, |(number, _)| *number).ok()?;
            self.records.get(at).map(|(_, compressed)| compressed)
        };
        records.map(find).collect()
    }
}

impl<T: Table> Files<T> {
    /// Compresses the whole records of a write; `None` if that is better done later.
    pub(super) fn compress_ahead(&self, inode: &Inode, offset: Option<u64>, data: &[u8]) -> Option<Precompressed> {
        let offset = offset.filter(|_| data.len() >= WORTH_IT)?;
        let storing = *self.storing.read();
        let shift = match inode.shift.load(Ordering::Relaxed) {
            0 => storing.record_shift,
            known => known,
        };
        let mut rest = data;
        let mut records = Vec::new();
        for piece in pieces(offset, data.len() as u64, shift) {
            let (content, behind) = rest.split_at(piece.length);
            rest = behind;
            if piece.length == 1 << shift && form_of(&storing, piece.record, content) == Form::Frame {
                records.push((piece.record, content));
            }
        }
        let number = inode.number();
        let mut frames: Vec<NewFrame<'_>> = Vec::with_capacity(records.len());
        for (record, content) in &records {
            frames.push(self.new_frame(&storing, Txg(0), (number, record << shift), content));
        }
        // Errors are reported by the write itself.
        let compressed = self
            .frames
            .compress_all(&frames)
            .ok()
            .filter(|compressed| !compressed.is_empty() && compressed.len() == frames.len())?;
        Some(Precompressed {
            storing,
            shift,
            records: records.into_iter().map(|(record, _)| record).zip(compressed).collect(),
        })
    }
}
