//! State of a mounted file tree: live, paused (a rollback may replace it), or ended.
//!
//! Owned by a tree (`mounted_tree.rs`). Invariants:
//! * from [`Passage::pause`] until it ends, no operation is inside that came by [`Passage::enter`];
//! * waiting operations are woken by [`Passage::resume`] and by [`Passage::end`].

use crate::sync::atomic::{AtomicU8, Ordering};
use crate::sync::{Condvar, Mutex, RwLock, RwLockReadGuard};
use nacre_vfs::{Errno, Result};

const LIVE: u8 = 0;
/// Operations wait: the files may be replaced.
const PAUSED: u8 = 1;
/// Operations fail: the snapshot is being destroyed, the file system is closed, or was rolled
/// back.
const ENDED: u8 = 2;

/// The quiesce lock of a tree; see the head of this file.
pub(super) struct Passage {
    /// One of [`LIVE`], [`PAUSED`], [`ENDED`].
    state: AtomicU8,
    /// Held for reading during changes of content.
    changing: RwLock<()>,
    turn: (Mutex<()>, Condvar),
}

impl Passage {
    pub(super) fn new() -> Passage {
        Passage { state: AtomicU8::new(LIVE), changing: RwLock::new(()), turn: (Mutex::new(()), Condvar::new()) }
    }

    /// Ends all use of the tree.
    pub(super) fn end(&self) {
        self.set(ENDED);
    }

    /// Blocks new operations until [`Passage::resume`] or [`Passage::end`]; waits for running
    /// changes of content.
    pub(super) fn pause(&self) {
        self.set(PAUSED);
        drop(self.changing.write());
    }

    /// Ends the block.
    pub(super) fn resume(&self) {
        self.set(LIVE);
    }

    /// Whether a rollback has begun to block operations.
    #[cfg(test)]
    pub(super) fn is_paused(&self) -> bool {
        self.state.load(Ordering::Acquire) == PAUSED
    }

    fn set(&self, state: u8) {
        let _turn = self.turn.0.lock();
        self.state.store(state, Ordering::Release);
        self.turn.1.notify_all();
    }

    /// Checks that the tree can be used; waits while it is paused; ESTALE if it has ended.
    pub(super) fn usable(&self) -> Result<()> {
        if self.state.load(Ordering::Acquire) == LIVE { Ok(()) } else { self.outcome() }
    }

    #[cold]
    fn outcome(&self) -> Result<()> {
        let mut turn = self.turn.0.lock();
        while self.state.load(Ordering::Acquire) == PAUSED {
            self.turn.1.wait(&mut turn);
        }
        if self.state.load(Ordering::Acquire) == LIVE { Ok(()) } else { Err(Errno::ESTALE) }
    }

    /// Begins a change of content: the files are not replaced before it has ended.
    pub(super) fn enter(&self) -> Result<RwLockReadGuard<'_, ()>> {
        loop {
            let entered = self.changing.read();
            if self.state.load(Ordering::Acquire) == LIVE {
                return Ok(entered);
            }
            drop(entered);
            self.outcome()?;
        }
    }
}

/// Tries all interleavings of threads with loom: `RUSTFLAGS="--cfg nacre_model" cargo test -p
/// nacre-layers --lib model`.
#[cfg(all(test, nacre_model))]
mod model {
    use super::*;
    use crate::sync::atomic::AtomicUsize;
    use loom::{sync::Arc, thread};

    /// Tries all interleavings with at most three preemptions: all orders of three threads would
    /// take hours.
    fn model(run: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(run);
    }

    struct Tree {
        passage: Passage,
        /// Identifies the files. Only the passage orders threads' accesses to it.
        files: AtomicUsize,
        inside: AtomicUsize,
    }

    impl Tree {
        fn new() -> Arc<Tree> {
            Arc::new(Tree { passage: Passage::new(), files: AtomicUsize::new(1), inside: AtomicUsize::new(0) })
        }

        /// Changes content; returns which files it has changed.
        fn change(&self) -> Result<usize> {
            let _entered = self.passage.enter()?;
            self.inside.fetch_add(1, Ordering::Relaxed);
            let before = self.files.load(Ordering::Relaxed);
            let after = self.files.load(Ordering::Relaxed);
            assert_eq!(before, after, "the files became others while somebody was inside");
            self.inside.fetch_sub(1, Ordering::Relaxed);
            Ok(after)
        }

        fn become_others(&self) {
            self.passage.pause();
            assert_eq!(self.inside.load(Ordering::Relaxed), 0, "somebody is inside");
            self.files.store(2, Ordering::Relaxed);
            assert_eq!(self.inside.load(Ordering::Relaxed), 0, "somebody came in");
        }
    }

    /// loom also fails if a thread waits and is never woken.
    #[test]
    fn nobody_is_inside_while_the_files_become_others() {
        model(|| {
            let tree = Tree::new();
            let change = || {
                let tree = Arc::clone(&tree);
                thread::spawn(move || assert!(tree.change().is_ok(), "it has not ended"))
            };
            let threads = [change(), change()];
            tree.become_others();
            tree.passage.resume();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            assert_eq!(tree.change(), Ok(2));
        });
    }

    #[test]
    fn whoever_waits_learns_of_the_end() {
        model(|| {
            let tree = Tree::new();
            let asked = Arc::clone(&tree);
            let asking = thread::spawn(move || asked.passage.usable());
            let changed = Arc::clone(&tree);
            let changing = thread::spawn(move || changed.change());
            tree.become_others();
            tree.passage.end();
            assert!(matches!(asking.join().unwrap(), Ok(()) | Err(Errno::ESTALE)));
            assert!(matches!(changing.join().unwrap(), Ok(1) | Err(Errno::ESTALE)), "what has ended was changed");
            assert_eq!(tree.passage.usable(), Err(Errno::ESTALE));
        });
    }
}
