//! Whether collecting pays for a file, learned from how it is used: closing a file makes the kernel
//! pass on what it has collected and the time of modification, two requests where a direct write is
//! one. So a file that is opened, appended to once and closed, again and again, is better written
//! to directly; one that is kept open is not.
//!
//! Kept per inode by `inodes.rs`, asked and told by `ops/opens.rs`. Only files that the layer
//! offers to collect have a habit.

use std::{
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
    time::{Duration, Instant},
};

/// Brief uses in a row after which a file is written to directly.
const DIRECT: u8 = 3;
/// Where a file begins that turned out to be written to at length: so many brief uses later it is
/// tried again.
const LONG: u8 = DIRECT + 64;
/// The most that a brief use writes, bytes.
const BRIEF_BYTES: u64 = 16 << 10;
/// The longest that it takes.
const BRIEF_TIME: Duration = Duration::from_millis(100);
/// Direct writes above which collecting would have been cheaper.
const BRIEF_WRITES: u32 = 3;

/// What is known of a file: up to [`DIRECT`], brief uses in a row; above, how far it is from being
/// tried again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct OpenPattern(u8);

/// One use of a file, from open to close.
#[derive(Debug)]
pub(crate) struct OpenUse {
    opened: Instant,
    writes: AtomicU32,
    bytes: AtomicU64,
}

impl OpenUse {
    /// Opened now.
    #[expect(clippy::disallowed_methods, reason = "measures how long a file is open")]
    pub fn new() -> OpenUse {
        OpenUse { opened: Instant::now(), writes: AtomicU32::new(0), bytes: AtomicU64::new(0) }
    }

    /// So many bytes have arrived.
    pub fn written(&self, bytes: usize) {
        self.writes.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    fn is_brief(&self) -> bool {
        self.bytes.load(Ordering::Relaxed) <= BRIEF_BYTES && self.opened.elapsed() < BRIEF_TIME
    }
}

impl OpenPattern {
    /// As a number, to be kept.
    pub fn bits(self) -> u8 {
        self.0
    }

    /// As it was kept.
    pub fn of_bits(bits: u8) -> OpenPattern {
        OpenPattern(bits)
    }

    /// Whether it is to be written to directly.
    pub fn is_direct(self) -> bool {
        self.0 == DIRECT
    }

    /// After a use.
    #[must_use]
    pub fn after(self, collected: bool, last: &OpenUse) -> OpenPattern {
        let brief = if collected { last.is_brief() } else { last.writes.load(Ordering::Relaxed) <= BRIEF_WRITES };
        match (collected, brief) {
            (true, true) if self.0 > DIRECT => OpenPattern(self.0 - 1),
            (true, true) => OpenPattern((self.0 + 1).min(DIRECT)),
            (true, false) if self.0 <= DIRECT => OpenPattern(0),
            (true, false) | (false, true) => self,
            (false, false) => OpenPattern(LONG),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn used(writes: u32, bytes: usize) -> OpenUse {
        let last = OpenUse::new();
        (0..writes).for_each(|_| last.written(bytes));
        last
    }

    fn direct(pattern: OpenPattern, uses: u32) -> OpenPattern {
        (0..uses).fold(pattern, |pattern, _| pattern.after(!pattern.is_direct(), &used(1, 100)))
    }

    #[test]
    fn brief_uses_in_a_row_make_a_file_direct() {
        assert!(!direct(OpenPattern::default(), 2).is_direct());
        assert!(direct(OpenPattern::default(), 3).is_direct());
        assert!(direct(OpenPattern::default(), 1000).is_direct());
        let interrupted = direct(OpenPattern::default(), 2).after(true, &used(1, 100_000));
        assert!(!direct(interrupted, 2).is_direct());
    }

    #[test]
    fn one_that_is_written_at_length_is_collected_for_a_while() {
        let pattern = direct(OpenPattern::default(), 3).after(false, &used(4, 100));
        assert!(!pattern.is_direct());
        assert!(!direct(pattern, u32::from(LONG - DIRECT) - 1).is_direct());
        assert!(direct(pattern, u32::from(LONG - DIRECT)).is_direct());
        // Several writes that the kernel passed on as one are a brief use nevertheless.
        assert!(direct(OpenPattern::default(), 2).after(true, &used(1, 4096)).is_direct());
    }
}
