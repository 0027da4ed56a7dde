//! Sends notifications to the kernel. Those about names and pages wait for locks of directories and pages, which a
//! user can keep for ever: by getdents(2) into a buffer that the kernel cannot write to, as one in a FUSE mount of
//! his own that does not answer. So a thread of its own sends them; one that does not return keeps that thread, and
//! another one continues with the queue.
//!
//! Used by the invalidation thread (`invalidate.rs`, by `mount.rs`) and for watchers' names. Invariants:
//! * the notifications of one inode are sent in their order, and none beside one that has not returned: they are held
//!   until it has; meanwhile the inode's attributes are invalidated, and all names at once, where the kernel can do
//!   that, as neither takes a lock;
//! * [`NoticeQueue::finish`] waits for no lock longer than [`PATIENCE`] and a little, however many are kept;
//! * no more than [`MAX_STUCK`] threads wait. Beyond that, notifications that take locks are held until one returns.

use parking_lot::{Condvar, Mutex, MutexGuard};
use std::{
    collections::{BTreeSet, VecDeque},
    io,
    sync::Arc,
    time::{Duration, Instant},
};

/// Time after which a notification that has not returned keeps its thread.
const PATIENCE: Duration = Duration::from_secs(1);
/// Maximum number of notifications that have not returned, beside the last one.
const MAX_STUCK: usize = 64;
/// Maximum number of held notifications; beyond that, all names are invalidated instead.
const MAX_HELD: usize = 65_536;
/// Minimum interval of invalidating all names instead of held ones.
const ALL_NAMES_EVERY: Duration = Duration::from_secs(1);
/// Number of queued notifications at which [`NoticeQueue::push`] waits.
const QUEUE: usize = 4096;

/// A notification that may wait for a lock.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Notice {
    /// Attributes, ACLs and pages of an inode.
    Content { nodeid: u64 },
    /// A name of a directory; `expire`: it may lead to the same file as before.
    Entry { parent: u64, name: Box<[u8]>, expire: bool },
}

impl Notice {
    /// The inode whose locks it may wait for.
    fn nodeid(&self) -> u64 {
        match self {
            Notice::Content { nodeid } => *nodeid,
            Notice::Entry { parent, .. } => *parent,
        }
    }
}

/// The kernel. The implementation handles errors.
pub(crate) trait NoticeSink: Send + Sync + 'static {
    /// Sends a notification, and waits for the locks that it needs.
    fn send(&self, notice: &Notice);
    /// Invalidates the attributes and ACLs of an inode, without a lock.
    fn attributes(&self, nodeid: u64);
    /// Invalidates all names, without a lock; returns whether that is possible.
    fn all_names(&self) -> bool;
}

/// The queue of one mount. Its threads end when it is dropped, except those that wait for a lock.
pub(crate) struct NoticeQueue(Arc<Shared>);

struct Shared {
    sink: Box<dyn NoticeSink>,
    patience: Duration,
    all_names_every: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Notice>,
    /// Number of the thread that sends; earlier ones are stuck.
    sender: u64,
    /// Number of sending threads besides the stuck ones: 0 or 1.
    senders: usize,
    /// Inode of the notification that is being sent.
    sending: Option<u64>,
    /// Number of notifications that began.
    begun: u64,
    /// Inodes of notifications that have not returned in time.
    stuck: BTreeSet<u64>,
    /// Notifications for later.
    held: BTreeSet<Notice>,
    /// Names among the held notifications have not been covered by an invalidation of all names.
    names_due: bool,
    all_names_at: Option<Instant>,
    ended: bool,
}

impl NoticeQueue {
    /// Starts the first thread.
    ///
    /// # Errors
    /// Where the thread cannot be started.
    pub fn start(sink: Box<dyn NoticeSink>) -> io::Result<NoticeQueue> {
        NoticeQueue::with(sink, PATIENCE, ALL_NAMES_EVERY)
    }

    fn with(sink: Box<dyn NoticeSink>, patience: Duration, all_names_every: Duration) -> io::Result<NoticeQueue> {
        let (state, changed) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(Shared { sink, patience, all_names_every, state, changed });
        shared.start_sender(&mut shared.state.lock())?;
        Ok(NoticeQueue(shared))
    }

    /// Queues a notification; [`NoticeQueue::finish`] must follow.
    pub fn push(&self, notice: Notice) {
        let queued = {
            let mut state = self.0.state.lock();
            state.queue.push_back(notice);
            state.queue.len()
        };
        if queued >= QUEUE {
            self.finish();
        }
    }

    /// Waits until the queued notifications have been delivered, or held. Returns when to call this again, for names
    /// that are due.
    pub fn finish(&self) -> Option<Instant> {
        let shared = &self.0;
        let mut state = shared.state.lock();
        shared.changed.notify_all();
        loop {
            while state.senders > 0 && (state.sending.is_some() || !state.queue.is_empty()) {
                let begun = state.begun;
                let late = shared.changed.wait_for(&mut state, shared.patience).timed_out();
                if late && state.sending.is_some() && state.begun == begun {
                    shared.replace_sender(&mut state);
                }
            }
            // While a notification is held, a stuck sender may return, and continue with the queue.
            let Some(notice) = state.queue.pop_front() else { break };
            shared.hold(&mut state, notice);
        }
        shared.all_names(&mut state)
    }
}

impl Drop for NoticeQueue {
    fn drop(&mut self) {
        self.0.state.lock().ended = true;
        self.0.changed.notify_all();
    }
}

impl Shared {
    fn start_sender(self: &Arc<Self>, state: &mut State) -> io::Result<()> {
        let (shared, number) = (Arc::clone(self), state.sender);
        let builder = std::thread::Builder::new().name("nacre-notices".to_owned()).stack_size(256 << 10);
        builder.spawn(move || shared.send_queued(number))?;
        state.senders = 1;
        Ok(())
    }

    /// Leaves the sender to its notification, which does not return, and starts another one.
    fn replace_sender(self: &Arc<Self>, state: &mut State) {
        let Some(nodeid) = state.sending.take() else { return };
        state.stuck.insert(nodeid);
        state.sender += 1;
        state.senders = 0;
        let stuck = state.stuck.len();
        tracing::warn!(
            nodeid,
            stuck,
            "a user keeps a lock that a notification to the kernel needs: it is delivered later"
        );
        if stuck > MAX_STUCK {
            return;
        }
        if let Err(error) = self.start_sender(state) {
            tracing::warn!(%error, "no other thread for notifications");
        }
    }

    /// Body of a sender.
    fn send_queued(&self, mut number: u64) {
        let mut state = self.state.lock();
        while !state.ended {
            let Some(notice) = state.queue.pop_front() else {
                self.changed.notify_all();
                self.changed.wait(&mut state);
                continue;
            };
            let nodeid = notice.nodeid();
            state.sending = Some(nodeid);
            state.begun += 1;
            if state.stuck.contains(&nodeid) {
                self.hold(&mut state, notice);
            } else {
                MutexGuard::unlocked(&mut state, || self.sink.send(&notice));
            }
            if state.sender == number {
                state.sending = None;
                continue;
            }
            // It was stuck, and another thread continued.
            state.stuck.remove(&nodeid);
            let takes_over = state.senders == 0;
            let State { queue, held, stuck, .. } = &mut *state;
            held.retain(|notice| {
                let later = stuck.contains(&notice.nodeid()) || !takes_over && notice.nodeid() != nodeid;
                if !later {
                    queue.push_back(notice.clone());
                }
                later
            });
            self.changed.notify_all();
            if !takes_over {
                return;
            }
            state.senders = 1;
            number = state.sender;
        }
    }

    /// Keeps a notification for later, and invalidates without locks what can be.
    fn hold(&self, state: &mut MutexGuard<'_, State>, notice: Notice) {
        let nodeid = notice.nodeid();
        state.names_due |= matches!(notice, Notice::Entry { .. });
        if state.held.len() < MAX_HELD {
            state.held.insert(notice);
        } else if !state.held.contains(&notice) {
            tracing::warn!(
                nodeid,
                "too many notifications wait for locks: one is replaced by the invalidation of all names"
            );
        }
        MutexGuard::unlocked(state, || self.sink.attributes(nodeid));
    }

    /// Invalidates all names instead of held ones; returns when to do so, if not now.
    #[expect(clippy::disallowed_methods, reason = "the interval of an expensive invalidation")]
    fn all_names(&self, state: &mut MutexGuard<'_, State>) -> Option<Instant> {
        if !state.names_due {
            return None;
        }
        let now = Instant::now();
        let due = state.all_names_at.map(|last| last + self.all_names_every).filter(|due| *due > now);
        if due.is_some() {
            return due;
        }
        state.names_due = false;
        state.all_names_at = Some(now);
        if !MutexGuard::unlocked(state, || self.sink.all_names()) {
            tracing::debug!("names in directories whose locks are kept stay cached until they are released");
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacre_testkit::eventually;

    /// Records what it gets; notifications of the inodes in `kept` do not return.
    #[derive(Clone, Default)]
    struct Kernel {
        sent: Arc<Mutex<Vec<String>>>,
        kept: Arc<Mutex<BTreeSet<u64>>>,
        released: Arc<Condvar>,
        /// Inodes whose notifications began.
        begun: Arc<Mutex<BTreeSet<u64>>>,
        /// While attributes are invalidated for the first time, the first inode is released, and the notification of
        /// the second one begins.
        takeover: Arc<Mutex<Option<[u64; 2]>>>,
    }

    impl Kernel {
        fn note(&self, text: String) {
            self.sent.lock().push(text);
        }

        fn taken(&self) -> Vec<String> {
            std::mem::take(&mut *self.sent.lock())
        }

        fn release(&self, nodeid: u64) {
            self.kept.lock().remove(&nodeid);
            self.released.notify_all();
        }
    }

    impl NoticeSink for Kernel {
        fn send(&self, notice: &Notice) {
            self.begun.lock().insert(notice.nodeid());
            {
                let mut kept = self.kept.lock();
                while kept.contains(&notice.nodeid()) {
                    self.released.wait(&mut kept);
                }
            }
            self.note(match notice {
                Notice::Content { nodeid } => format!("content {nodeid}"),
                Notice::Entry { parent, name, .. } => format!("entry {parent} {}", name.escape_ascii()),
            });
        }
        fn attributes(&self, nodeid: u64) {
            self.note(format!("attributes {nodeid}"));
            if let Some([released, next]) = self.takeover.lock().take() {
                self.release(released);
                eventually("another notification begins", || self.begun.lock().contains(&next));
            }
        }
        fn all_names(&self) -> bool {
            self.note("all names".to_owned());
            true
        }
    }

    fn queue(kernel: &Kernel, patience: Duration) -> NoticeQueue {
        NoticeQueue::with(Box::new(kernel.clone()), patience, Duration::from_secs(3600)).unwrap()
    }

    fn entry(parent: u64, name: &str) -> Notice {
        Notice::Entry { parent, name: name.as_bytes().into(), expire: true }
    }

    #[test]
    fn a_lock_that_is_kept_delays_the_notifications_of_its_inode_alone() {
        let kernel = Kernel::default();
        // Longer than a thread that waits for nothing is kept from running.
        let queue = queue(&kernel, Duration::from_millis(500));
        kernel.kept.lock().insert(7);
        queue.push(Notice::Content { nodeid: 7 });
        queue.push(entry(7, "a"));
        queue.push(Notice::Content { nodeid: 8 });
        queue.push(entry(8, "b"));
        assert_eq!(queue.finish(), None);
        assert_eq!(kernel.taken(), ["attributes 7", "content 8", "entry 8 b", "all names"]);
        // Once more, and all names not at once again.
        queue.push(entry(7, "a"));
        queue.push(entry(7, "c"));
        queue.push(entry(8, "d"));
        assert!(queue.finish().is_some());
        assert_eq!(kernel.taken(), ["attributes 7", "attributes 7", "entry 8 d"]);
        kernel.release(7);
        eventually("the held ones are sent", || kernel.sent.lock().len() == 3);
        assert_eq!(kernel.taken(), ["content 7", "entry 7 a", "entry 7 c"]);
        queue.push(entry(7, "e"));
        queue.finish();
        assert_eq!(kernel.taken().first().map(String::as_str), Some("entry 7 e"));
    }

    #[test]
    fn threads_that_wait_are_few_and_nothing_is_lost() {
        let kernel = Kernel::default();
        let queue = queue(&kernel, Duration::from_millis(5));
        let all = 1..=MAX_STUCK as u64 + 20;
        kernel.kept.lock().extend(all.clone());
        for nodeid in all.clone() {
            queue.push(Notice::Content { nodeid });
        }
        queue.push(entry(1000, "free"));
        queue.finish();
        assert_eq!(queue.0.state.lock().stuck.len(), MAX_STUCK + 1);
        let sent = kernel.taken();
        assert!(!sent.iter().any(|text| text.starts_with("content")), "{sent:?}");
        assert_eq!(sent.last().map(String::as_str), Some("all names"), "no thread is left for the name");
        all.clone().for_each(|nodeid| kernel.release(nodeid));
        let sent_all = || {
            let sent = kernel.sent.lock();
            sent.contains(&"entry 1000 free".to_owned())
                && all.clone().all(|nodeid| sent.contains(&format!("content {nodeid}")))
        };
        eventually("all are sent once their locks are free", sent_all);
        assert!(queue.0.state.lock().held.is_empty());
    }

    #[test]
    fn a_sender_that_returns_while_others_are_held_sends_all() {
        let kernel = Kernel::default();
        let queue = queue(&kernel, Duration::from_millis(500));
        // The next stuck thread is the last one.
        queue.0.state.lock().stuck.extend((0..MAX_STUCK as u64).map(|index| 1000 + index));
        kernel.kept.lock().extend([1, 3]);
        *kernel.takeover.lock() = Some([1, 3]);
        (1..=4).for_each(|nodeid| queue.push(Notice::Content { nodeid }));
        std::thread::scope(|scope| {
            scope.spawn(|| queue.finish());
            eventually("the sender that returned continues", || kernel.begun.lock().contains(&3));
            // With the last notification held, nobody would send it.
            let held = || queue.0.state.lock().held.contains(&Notice::Content { nodeid: 4 });
            assert!((0..50).all(|_| {
                std::thread::yield_now();
                !held()
            }));
            kernel.release(3);
        });
        eventually("all are sent", || {
            kernel.sent.lock().iter().filter(|text| text.starts_with("content")).count() == 4
        });
        assert!(queue.0.state.lock().held.is_empty());
    }
}
