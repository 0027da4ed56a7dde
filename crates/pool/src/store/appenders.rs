//! The open segments of a store, one per stream. File content has several, where independent devices can be written
//! in parallel: parts of a file are distributed over them.
//!
//! Invariant: the segments of the table itself are not among them: `commit.rs` writes those.

use std::ops::Range;
use std::sync::Arc;

use crate::backend::Backend;
use crate::frames::{Owner, WriteStream};
use crate::segment::stream::Appender;

/// Length of the part of a file that goes to one segment before the next one, bytes.
const PART: u64 = 1 << 20;
/// Maximum number of open segments for file content.
const MOST: u64 = 4;
/// Number of segments in the pool per open segment: a small pool has none to leave half empty.
const ROOM: u64 = 64;

/// The appenders of all streams.
pub(super) struct Appenders {
    /// Tree nodes, large values.
    pub(super) metadata: Appender,
    /// File content, at least one; shared with the write threads.
    data: Vec<Arc<Appender>>,
    /// Relocated frames.
    pub(super) relocated: Appender,
    /// Relocated frames of trees, where metadata is written twice.
    pub(super) relocated_metadata: Appender,
}

/// Number of open segments for file content.
pub(super) fn of_content(backend: &dyn Backend) -> usize {
    let by_room = backend.room().total / ROOM;
    (backend.independent() as u64).min(by_room).clamp(1, MOST) as usize
}

impl Appenders {
    /// Appenders without an open segment.
    pub(super) fn new(of_content: usize) -> Self {
        Self {
            metadata: Appender::new(WriteStream::Metadata),
            data: (0..of_content.max(1)).map(|_| Arc::new(Appender::new(WriteStream::Data))).collect(),
            relocated: Appender::new(WriteStream::Relocated),
            relocated_metadata: Appender::new(WriteStream::RelocatedMetadata),
        }
    }

    /// All appenders.
    pub(super) fn all(&self) -> impl Iterator<Item = &Appender> {
        let others = [&self.metadata, &self.relocated, &self.relocated_metadata];
        self.data.iter().map(|data| &**data).chain(others)
    }

    /// The appenders for file content.
    pub(super) fn of_data(&self) -> &[Arc<Appender>] {
        &self.data
    }

    /// Copies the part of a range that is still in memory into the buffer (offset in bytes in a content segment), and
    /// returns the ranges that have to be read from the backend.
    pub(super) fn read_data(&self, segment: u32, offset: u64, buffer: &mut [u8]) -> Vec<Range<usize>> {
        let all = 0..buffer.len();
        for appender in &self.data {
            let missing = appender.read(segment, offset, buffer);
            // No other appender has any of it.
            if missing.first() != Some(&all) {
                return missing;
            }
        }
        vec![all]
    }

    /// The appender for content of this owner and size; where segments are few (`scarce`), one whose segment has
    /// space for it.
    pub(super) fn data(&self, owner: &Owner, charged: u64, scarce: impl FnOnce() -> bool) -> Option<&Arc<Appender>> {
        let turn = (owner.object.wrapping_add(owner.offset / PART) % self.data.len().max(1) as u64) as usize;
        let wanted = self.data.get(turn);
        let fits = |appender: &&Arc<Appender>| appender.lock().fits(charged);
        if self.data.len() < 2 || wanted.as_ref().is_some_and(fits) || !scarce() {
            return wanted;
        }
        self.data.iter().find(fits).or(self.data.first())
    }
}
