//! Counters of a copy, which all workers add to and anybody reads.

use serde::Serialize;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

macro_rules! figures {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// Counters of a copy.
        #[derive(Debug, Default)]
        pub struct Figures {
            $($(#[doc = $doc])+ pub $name: AtomicU64,)+
            /// Whether counting ahead is complete: `expected_entries` and `expected_bytes` are final.
            pub counted: AtomicBool,
            /// Whether the verification is running.
            pub verifying: AtomicBool,
        }

        /// The counters at one moment.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
        pub struct Snapshot {
            $($(#[doc = $doc])+ pub $name: u64,)+
            /// Whether counting ahead is complete.
            pub counted: bool,
            /// Whether the verification is running.
            pub verifying: bool,
        }

        impl Figures {
            /// Reads all counters.
            pub fn snapshot(&self) -> Snapshot {
                Snapshot { $($name: self.$name.load(Relaxed),)+ counted: self.counted.load(Relaxed), verifying: self.verifying.load(Relaxed) }
            }
        }
    };
}

figures! {
    /// Directories made or entered.
    directories,
    /// Directories that existed already, part of `directories`.
    present_directories,
    /// Entries other than directories that are in DEST now.
    entries,
    /// Bytes of their data, without holes.
    bytes,
    /// Bytes shared with SOURCE, part of `bytes`.
    shared_bytes,
    /// Of the entries, those that existed already.
    present,
    /// Of the entries that existed already, those with updated metadata.
    renewed,
    /// Bytes of the entries that existed already.
    present_bytes,
    /// Of the entries, those that replaced another one.
    replaced,
    /// Of the entries, further hard links of files that were copied.
    links,
    /// Entries that failed.
    failures,
    /// Entries that were removed from SOURCE before they were copied.
    vanished,
    /// Owners or groups that this user may not set.
    lost_owners,
    /// Attributes and access control lists that DEST cannot hold or this user may not set.
    lost_attributes,
    /// Access control lists that DEST does not support.
    lost_lists,
    /// Further hard links that became files of their own, because DEST has no hard links.
    lost_links,
    /// Directories with other file systems mounted on them, left empty.
    not_entered,
    /// Entries verified after the copy.
    verified,
    /// Bytes verified after the copy.
    verified_bytes,
    /// Entries (directories, too) in SOURCE as counted ahead so far.
    expected_entries,
    /// Bytes in SOURCE as counted ahead so far.
    expected_bytes,
}

/// Cost of an entry without its data, as bytes that take the same time: for estimates only.
const ENTRY: u64 = 16 * 1024;

/// Adds to a counter.
pub(crate) fn add(counter: &AtomicU64, value: u64) {
    counter.fetch_add(value, Relaxed);
}

impl Snapshot {
    /// Returns the completed share of the present phase, from 0 to 1; `None` until counting ahead is complete.
    pub fn share_done(&self) -> Option<f64> {
        let all = self.expected_entries * ENTRY + self.expected_bytes;
        let present = if self.verifying { 0 } else { self.present * ENTRY + self.present_bytes };
        let done = self.work_done() + present;
        (self.counted && all > 0).then(|| (done as f64 / all as f64).min(1.0))
    }

    /// Returns the estimated remaining seconds, from the `elapsed` seconds of the present phase; `None` while there
    /// is no estimate.
    pub fn seconds_left(&self, elapsed: f64) -> Option<f64> {
        let all = self.expected_entries * ENTRY + self.expected_bytes;
        let present = if self.verifying { 0 } else { self.present * ENTRY + self.present_bytes };
        let done = self.work_done();
        let left = all.saturating_sub(done + present);
        (self.counted && done > 0 && elapsed > 1.0).then(|| elapsed * left as f64 / done as f64)
    }

    /// Returns the work of the present phase, without entries that existed already.
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
