//! Lets a watching layer stop its watches while the mount is idle: changes keep coming, but nobody uses the mount.
//!
//! Called by the thread of `invalidate.rs` with each batch of changes, so that it costs nothing where no changes are
//! reported. Two steps, see `Layer::rest`: First the layer is asked to notice any use. When [`ENOUGH`] changes have
//! come, the time [`QUIET`] has passed, and all requests in flight since before the first step have been answered,
//! the layer gets the list of all nodes that the kernel may know, each of which needs a fanotify mark. As that is
//! expensive, two more changes per file have to come first: a mount that is used again and again pays little extra.
//! The list is sent in pieces, between which changes are delivered.

use super::CacheControl;
use crate::inodes::Inodes;
use nacre_vfs::Node;
use std::time::{Duration, Instant};

/// Minimum number of changes during which nobody used the mount.
const ENOUGH: u64 = 256;
/// Minimum time during which nobody used the mount.
const QUIET: Duration = Duration::from_millis(100);
/// Number of nodes per call.
const PIECE: usize = 16;
/// Maximum time for which a batch of changes may be delayed.
const PIECES: Duration = Duration::from_millis(2);
/// Number of known files above which everything stays watched: each fanotify mark keeps an inode of the source in
/// memory.
const KNOWN_MAX: usize = 32_768;

/// Progress towards the idle watch.
pub(crate) struct Resting<M> {
    heard: u64,
    /// When the layer began to notice any use.
    begun: Option<Instant>,
    /// Requests in flight that must be answered before the idle watch may begin. Taken well after the layer began to
    /// notice, so that each request is seen by one of the two.
    before: Option<M>,
    /// Nodes that the layer has not got yet.
    known: Option<Vec<Node>>,
    /// The layer has no idle watch.
    never: bool,
}

impl<M> Default for Resting<M> {
    fn default() -> Resting<M> {
        Resting { heard: 0, begun: None, before: None, known: None, never: false }
    }
}

impl<M> Resting<M> {
    /// Counts reported changes, and takes the next step if it is time.
    #[expect(
        clippy::disallowed_methods,
        reason = "for how long reports are in vain, and in how small pieces the rest is prepared"
    )]
    pub fn heard<C: CacheControl<Moment = M>>(&mut self, changes: u64, control: &C, inodes: &Inodes) {
        self.heard += changes;
        if self.never || changes == 0 {
            return;
        }
        let Some(begun) = self.begun else {
            self.never = !control.rest(None);
            (self.heard, self.begun) = (0, Some(Instant::now()));
            return;
        };
        if self.known.is_none() && self.is_time(begun, control, inodes) {
            let known = self.known.insert(Vec::with_capacity(inodes.len()));
            inodes.for_each(|nodeid| known.extend(inodes.node(nodeid)));
        }
        let Some(known) = &mut self.known else { return };
        let start = Instant::now();
        while start.elapsed() < PIECES {
            // An empty piece ends the list.
            let piece = known.split_off(known.len().saturating_sub(PIECE));
            let goes_on = control.rest(Some(&piece));
            if piece.is_empty() || !goes_on {
                tracing::debug!(rests = goes_on, "changes are reported in vain");
                *self = Resting::default();
                return;
            }
        }
    }

    fn is_time<C: CacheControl<Moment = M>>(&mut self, begun: Instant, control: &C, inodes: &Inodes) -> bool {
        let files = inodes.len();
        files <= KNOWN_MAX
            && self.heard >= ENOUGH + 2 * files as u64
            && begun.elapsed() >= QUIET
            && control.passed(self.before.get_or_insert_with(|| control.now()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invalidate::tests::{Recorder, attr};
    use std::sync::{Arc, atomic::Ordering};

    #[test]
    fn it_takes_changes_in_vain_some_time_and_all_answers() {
        let (recorder, mut resting) = (Recorder::default(), Resting::default());
        let inodes = Inodes::new(Node::new(Arc::new(())), &attr(1));
        let noted = || std::mem::take(&mut *recorder.0.lock());
        resting.heard(0, &recorder, &inodes);
        assert!(noted().is_empty());
        resting.heard(1, &recorder, &inodes);
        assert_eq!(noted(), ["drowsy"]);
        // A request from before is under way.
        recorder.1.store(true, Ordering::Release);
        let begun = Instant::now();
        while begun.elapsed() < 2 * QUIET {
            resting.heard(ENOUGH, &recorder, &inodes);
        }
        assert!(noted().is_empty());
        recorder.1.store(false, Ordering::Release);
        while recorder.0.lock().last().is_none_or(|last| last != "rest 0") {
            resting.heard(1, &recorder, &inodes);
        }
        assert_eq!(noted(), ["rest 1", "rest 0"]);
        // Once more from the beginning.
        resting.heard(ENOUGH, &recorder, &inodes);
        assert_eq!(noted(), ["drowsy"]);
    }
}
