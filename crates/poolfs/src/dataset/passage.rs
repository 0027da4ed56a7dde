//! Whether the files of a tree can be used: they can, or whoever wants something waits since they
//! may be others in a moment, or never again.
//!
//! Owned by a tree (`mounted_tree.rs`). Invariants:
//! * between [`Passage::pause`] and what ends it, nobody is inside who came by [`Passage::enter`];
//! * whoever waits is woken by [`Passage::resume`] and by [`Passage::end`].

use crate::sync::atomic::{AtomicU8, Ordering};
use crate::sync::{Condvar, Mutex, RwLock, RwLockReadGuard};
use nacre_vfs::{Errno, Result};

const LIVE: u8 = 0;
/// Whoever wants something of it waits: the files may be others in a moment.
const PAUSED: u8 = 1;
/// Nothing of it is read any more: the snapshot is being destroyed, the file system goes, or it was
/// rolled back.
const ENDED: u8 = 2;

/// See the file's head.
pub(super) struct Passage {
    /// One of [`LIVE`], [`PAUSED`], [`ENDED`].
    state: AtomicU8,
    /// Held for reading while content is changed.
    changing: RwLock<()>,
    turn: (Mutex<()>, Condvar),
}

impl Passage {
    pub(super) fn new() -> Passage {
        Passage { state: AtomicU8::new(LIVE), changing: RwLock::new(()), turn: (Mutex::new(()), Condvar::new()) }
    }

    /// Nothing of it is read any more.
    pub(super) fn end(&self) {
        self.set(ENDED);
    }

    /// Makes whoever begins something wait until [`Passage::resume`] or [`Passage::end`]; changes
    /// of content that are under way are waited for.
    pub(super) fn pause(&self) {
        self.set(PAUSED);
        drop(self.changing.write());
    }

    /// Everything goes on.
    pub(super) fn resume(&self) {
        self.set(LIVE);
    }

    fn set(&self, state: u8) {
        let _turn = self.turn.0.lock();
        self.state.store(state, Ordering::Release);
        self.turn.1.notify_all();
    }

    /// Whether it can be used; ESTALE where not any more.
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

    /// Begins a change of content: the files do not become others before it has ended.
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

/// Every order of threads, tried by loom: `RUSTFLAGS="--cfg nacre_model" cargo test -p nacre-layers
/// --lib model`.
#[cfg(all(test, nacre_model))]
mod model {
    use super::*;
    use crate::sync::atomic::AtomicUsize;
    use loom::{sync::Arc, thread};

    /// Every order in which threads lose the processor unasked three times at most: all orders of
    /// three threads would take hours.
    fn model(run: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(run);
    }

    struct Tree {
        passage: Passage,
        /// Which files they are. Nothing but the passage orders what threads see of it.
        files: AtomicUsize,
        inside: AtomicUsize,
    }

    impl Tree {
        fn new() -> Arc<Tree> {
            Arc::new(Tree { passage: Passage::new(), files: AtomicUsize::new(1), inside: AtomicUsize::new(0) })
        }

        /// Changes content; which files it changed.
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

    /// loom fails as well where a thread waits that nobody wakes.
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
