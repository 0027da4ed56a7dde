//! The open segments of a store, by the stream that each takes.
//!
//! Invariant: the segments of the table itself are not among them: `commit.rs` writes those.

use std::sync::Arc;

use crate::frames::WriteStream;
use crate::segment::stream::Appender;

/// Where new frames go.
pub(super) struct Appenders {
    /// Nodes of trees, large values.
    pub(super) metadata: Appender,
    /// File content; shared with the threads that write it.
    pub(super) data: Arc<Appender>,
    /// What the cleaner has moved.
    pub(super) relocated: Appender,
    /// What the cleaner has moved of trees, where metadata lies twice.
    pub(super) relocated_metadata: Appender,
}

impl Appenders {
    /// Without any open segment.
    pub(super) fn new() -> Self {
        Self {
            metadata: Appender::new(WriteStream::Metadata),
            data: Arc::new(Appender::new(WriteStream::Data)),
            relocated: Appender::new(WriteStream::Relocated),
            relocated_metadata: Appender::new(WriteStream::RelocatedMetadata),
        }
    }

    /// All of them.
    pub(super) fn all(&self) -> [&Appender; 4] {
        [&self.metadata, &self.data, &self.relocated, &self.relocated_metadata]
    }

    /// That of a stream; none for the segment table's.
    pub(super) fn of(&self, stream: WriteStream) -> Option<&Appender> {
        match stream {
            WriteStream::Metadata => Some(&self.metadata),
            WriteStream::Data => Some(&self.data),
            WriteStream::Relocated => Some(&self.relocated),
            WriteStream::RelocatedMetadata => Some(&self.relocated_metadata),
            WriteStream::Table => None,
        }
    }
}
