//! The open segments of a store, by the stream that each takes. Content has several, where devices can
//! be written at the same time that do not depend on each other: parts of a file go to them in turn.
//!
//! Invariant: the segments of the table itself are not among them: `commit.rs` writes those.

use std::ops::Range;
use std::sync::Arc;

use crate::backend::Backend;
use crate::frames::{Owner, WriteStream};
use crate::segment::stream::Appender;

/// So much of a file goes to one segment before the next one takes over, bytes.
const PART: u64 = 1 << 20;
/// Segments that content goes to at the same time, at most.
const MOST: u64 = 4;
/// Segments that there is room for, for each of them: a small pool has none to leave half empty.
const ROOM: u64 = 64;

/// Where new frames go.
pub(super) struct Appenders {
    /// Nodes of trees, large values.
    pub(super) metadata: Appender,
    /// File content; shared with the threads that write it. One at least.
    data: Vec<Arc<Appender>>,
    /// What the cleaner has moved.
    pub(super) relocated: Appender,
    /// What the cleaner has moved of trees, where metadata lies twice.
    pub(super) relocated_metadata: Appender,
}

/// How many segments content goes to at the same time.
pub(super) fn of_content(backend: &dyn Backend) -> usize {
    let by_room = backend.room().total / ROOM;
    (backend.independent() as u64).min(by_room).clamp(1, MOST) as usize
}

impl Appenders {
    /// Without any open segment.
    pub(super) fn new(of_content: usize) -> Self {
        Self {
            metadata: Appender::new(WriteStream::Metadata),
            data: (0..of_content.max(1)).map(|_| Arc::new(Appender::new(WriteStream::Data))).collect(),
            relocated: Appender::new(WriteStream::Relocated),
            relocated_metadata: Appender::new(WriteStream::RelocatedMetadata),
        }
    }

    /// All of them.
    pub(super) fn all(&self) -> impl Iterator<Item = &Appender> {
        let others = [&self.metadata, &self.relocated, &self.relocated_metadata];
        self.data.iter().map(|data| &**data).chain(others)
    }

    /// Those of content.
    pub(super) fn of_data(&self) -> &[Arc<Appender>] {
        &self.data
    }

    /// Copies what is still here of a range of a segment of content (offset in bytes) into the buffer,
    /// and tells which parts of it must come from below.
    pub(super) fn read_data(&self, segment: u32, offset: u64, buffer: &mut [u8]) -> Vec<Range<usize>> {
        let all = 0..buffer.len();
        for appender in &self.data {
            let missing = appender.read(segment, offset, buffer);
            // No other one has any of it.
            if missing.first() != Some(&all) {
                return missing;
            }
        }
        vec![all]
    }

    /// Where content of this owner goes that takes so much; where segments are few (`scarce`), to one
    /// that has room for it.
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
