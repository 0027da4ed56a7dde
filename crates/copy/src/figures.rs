//! What a copy has done so far, as counters that all workers add to and anybody reads.

use serde::Serialize;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

macro_rules! figures {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// The counters.
        #[derive(Debug, Default)]
        pub struct Figures {
            $($(#[doc = $doc])+ pub $name: AtomicU64,)+
            /// Whether everything has been counted ahead: `expected_entries` and `expected_bytes`
            /// are whole.
            pub counted: AtomicBool,
            /// Whether what is going on is the comparison after the copy.
            pub verifying: AtomicBool,
        }

        /// The counters at one moment.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
        pub struct Snapshot {
            $($(#[doc = $doc])+ pub $name: u64,)+
            /// Whether everything has been counted ahead.
            pub counted: bool,
            /// Whether what is going on is the comparison after the copy.
            pub verifying: bool,
        }

        impl Figures {
            /// All of them now.
            pub fn snapshot(&self) -> Snapshot {
                Snapshot { $($name: self.$name.load(Relaxed),)+ counted: self.counted.load(Relaxed), verifying: self.verifying.load(Relaxed) }
            }
        }
    };
}

figures! {
    /// Directories made or entered.
    directories,
    /// Of these, those that were there already.
    present_directories,
    /// Entries that are no directories and are in DEST now.
    entries,
    /// Bytes of their data (holes are none).
    bytes,
    /// Of these bytes, those that DEST shares with SOURCE.
    shared_bytes,
    /// Of the entries, those that were there already.
    present,
    /// Of those that were there already, those that got other metadata.
    renewed,
    /// Bytes of those that were there already.
    present_bytes,
    /// Of the entries, those that took the place of something else.
    replaced,
    /// Of the entries, further names of files that were copied.
    links,
    /// Entries that failed.
    failures,
    /// Entries that went away before they were copied.
    vanished,
    /// Owners or groups that this user may not give.
    lost_owners,
    /// Attributes and access control lists that DEST cannot hold or this user may not set.
    lost_attributes,
    /// Access control lists, where DEST has none.
    lost_lists,
    /// Further names that became files of their own, because DEST has no hard links.
    lost_links,
    /// Directories that other file systems are mounted on, left empty.
    not_entered,
    /// Entries compared after the copy.
    verified,
    /// Bytes compared after the copy.
    verified_bytes,
    /// Entries (directories, too) in SOURCE as counted ahead so far.
    expected_entries,
    /// Bytes in SOURCE as counted ahead so far.
    expected_bytes,
}

/// What one entry takes beside its data, as bytes that take the same time: for estimates only.
const ENTRY: u64 = 16 * 1024;

/// Adds to a counter.
pub(crate) fn add(counter: &AtomicU64, value: u64) {
    counter.fetch_add(value, Relaxed);
}

impl Snapshot {
    /// How much of the present part is done, from 0 to 1; `None` until everything is counted.
    pub fn share_done(&self) -> Option<f64> {
        let all = self.expected_entries * ENTRY + self.expected_bytes;
        let present = if self.verifying { 0 } else { self.present * ENTRY + self.present_bytes };
        let done = self.work_done() + present;
        (self.counted && all > 0).then(|| (done as f64 / all as f64).min(1.0))
    }

    /// Seconds that the rest will take, judged by the `elapsed` seconds of the present part; `None`
    /// while nothing can be said.
    pub fn seconds_left(&self, elapsed: f64) -> Option<f64> {
        let all = self.expected_entries * ENTRY + self.expected_bytes;
        let present = if self.verifying { 0 } else { self.present * ENTRY + self.present_bytes };
        let done = self.work_done();
        let left = all.saturating_sub(done + present);
        (self.counted && done > 0 && elapsed > 1.0).then(|| elapsed * left as f64 / done as f64)
    }

    /// The work of the present part, without what was there already.
    fn work_done(&self) -> u64 {
        if self.verifying {
            return self.verified * ENTRY + self.verified_bytes;
        }
        (self.entries.saturating_sub(self.present) + self.directories) * ENTRY + self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_estimate_counts_what_was_there_as_done_but_not_as_work() {
        let figures = Figures::default();
        add(&figures.expected_entries, 100);
        add(&figures.entries, 75);
        add(&figures.present, 50);
        assert_eq!(figures.snapshot().seconds_left(10.0), None, "not counted yet");
        figures.counted.store(true, Relaxed);
        let now = figures.snapshot();
        assert_eq!(now.share_done(), Some(0.75));
        assert_eq!(now.seconds_left(10.0), Some(10.0));
        assert_eq!(now.seconds_left(0.5), None, "too early to tell");
    }
}
