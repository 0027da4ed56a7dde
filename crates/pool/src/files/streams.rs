//! Streams: files that are read sequentially, and how far ahead of each was read.
//!
//! Called by `content.rs`. A file may have several readers. All of this is a hint. Invariants:
//! - at most [`KNOWN`] streams are tracked, the most recent ones; others start again;
//! - if requests are expensive, readahead is at most twice what was read of a stream, plus a fixed
//!   amount if the stream began at the start of its file.

use std::ops::Range;

use parking_lot::Mutex;

/// Number of tracked streams of a file system.
const KNOWN: usize = 64;

/// One stream, in records of its file.
#[derive(Clone, Copy, Debug)]
struct Stream {
    inode: u64,
    /// Where it began.
    begun: u64,
    /// End of its readahead.
    asked: u64,
    /// Length of its last readahead.
    window: u64,
}

/// A read, in records.
#[derive(Clone, Copy, Debug)]
pub(super) struct StreamRead {
    pub(super) inode: u64,
    pub(super) first: u64,
    pub(super) last: u64,
    /// Readahead: at least, in addition from the start of a file, and at most.
    pub(super) least: u64,
    pub(super) begins: u64,
    pub(super) most: u64,
}

impl StreamRead {
    /// Whether it continues a stream; requests of one may arrive in any order.
    fn goes_on(&self, stream: &Stream) -> bool {
        let reach = stream.asked.saturating_sub(2 * stream.window.max(1));
        stream.inode == self.inode
            && stream.begun < self.first
            && self.first <= stream.asked
            && reach <= self.last.saturating_add(1)
    }

    /// Length of the readahead of a stream that began at `begun` and of which so much was read.
    fn window(&self, begun: u64, read: u64) -> u64 {
        let more = if begun == 0 { self.begins } else { 0 };
        read.saturating_mul(2).saturating_add(more).clamp(self.least, self.most.max(self.least))
    }
}

/// The streams of a file system, the most recent one last.
#[derive(Debug, Default)]
pub(super) struct Streams(Mutex<Vec<Stream>>);

impl Streams {
    /// Whether the readahead covers this read.
    pub(super) fn has_asked(&self, read: &StreamRead) -> bool {
        self.0.lock().iter().any(|stream| read.goes_on(stream) && stream.asked > read.last)
    }

    /// Continues or starts a stream; returns the range to read ahead.
    pub(super) fn go_on(&self, read: &StreamRead) -> Range<u64> {
        let next = read.last + 1;
        let mut streams = self.0.lock();
        let mut stream = match streams.iter().rposition(|stream| read.goes_on(stream)) {
            Some(found) => streams.remove(found),
            None => {
                streams.retain(|stream| stream.inode != read.inode || stream.begun != read.first);
                Stream { inode: read.inode, begun: read.first, asked: next, window: 0 }
            }
        };
        // A read in the middle may be followed by another or not; one at the start of a file mostly
        // is.
        let is_new = stream.begun == read.first;
        let so_far = if is_new && read.first > 0 { 0 } else { next.saturating_sub(stream.begun) };
        stream.window = read.window(stream.begun, so_far);
        let (from, until) = (stream.asked.max(next), next.saturating_add(stream.window));
        // In steps, so that there are few large requests.
        let ahead = if until > from && until - from >= stream.window / 4 { from..until } else { from..from };
        stream.asked = ahead.end;
        if streams.len() >= KNOWN {
            streams.remove(0);
        }
        streams.push(stream);
        ahead
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(inode: u64, first: u64, last: u64) -> StreamRead {
        StreamRead { inode, first, last, least: 0, begins: 32, most: 256 }
    }

    #[test]
    fn each_record_is_asked_for_once_and_ever_further_ahead() {
        let (streams, mut until, mut furthest) = (Streams::default(), 8, 0);
        for at in (0..4096).step_by(8) {
            let read = read(1, at, at + 7);
            assert_eq!(streams.has_asked(&read), at > 0, "{at}");
            let ahead = streams.go_on(&read);
            assert_eq!(ahead.start, until);
            // At most twice what was read, and the initial amount.
            assert!(ahead.end - (at + 8) <= (32 + 2 * (at + 8)).min(256));
            (until, furthest) = (ahead.end, furthest.max(ahead.end - (at + 8)));
        }
        assert_eq!(furthest, 256);
        // Again from the start.
        assert!(!streams.has_asked(&read(1, 0, 7)));
        assert_eq!(streams.go_on(&read(1, 0, 7)), 8..56);
        // From another position: it continues no stream.
        assert!(streams.go_on(&read(3, 80, 87)).is_empty());
        assert_eq!(streams.go_on(&read(3, 88, 95)), 96..128);
        // As far at once as is worth it if requests are cheap.
        let local = StreamRead { least: 64, begins: 0, most: 64, ..read(2, 80, 87) };
        assert_eq!(streams.go_on(&local), 88..152);
        assert!(streams.go_on(&StreamRead { first: 88, last: 95, ..local }).is_empty());
        assert_eq!(streams.go_on(&StreamRead { first: 96, last: 103, ..local }), 152..168);
    }

    #[test]
    fn several_readers_of_a_file_go_on_and_reads_at_random_ask_for_nothing() {
        let (streams, mut asked) = (Streams::default(), [0; 2]);
        for at in (8..800).step_by(8) {
            for (reader, begun) in [10_000, 20_000].into_iter().enumerate() {
                let ahead = streams.go_on(&read(1, begun + at, begun + at + 7));
                asked[reader] += ahead.end - ahead.start;
            }
        }
        assert!(asked.iter().all(|asked| *asked >= 800), "{asked:?}");
        for at in 0..100 {
            let place = 100_000 + at * 7919 % 100 * 1000;
            assert!(streams.go_on(&read(1, place, place + 7)).is_empty());
        }
        assert!(streams.0.lock().len() <= KNOWN);
    }

    #[test]
    fn requests_in_another_order_are_one_stream() {
        let (streams, mut all) = (Streams::default(), 0);
        for at in [0, 16, 8, 24, 40, 32, 56, 48, 64] {
            let ahead = streams.go_on(&read(1, at, at + 7));
            all += ahead.end - ahead.start;
        }
        assert!(all >= 64, "{all}");
        assert_eq!(streams.0.lock().len(), 1);
    }
}
