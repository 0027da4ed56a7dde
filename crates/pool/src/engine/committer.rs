//! The engine runs by itself: commits in time, cleaning, freeing of what was destroyed.
//!
//! Called by the process that owns the pool: [`Pool::start_committer`] after the import,
//! [`Committer::stop`] before the export.
//!
//! ```text
//!  commit   every 5 s where something has changed; earlier when much is held in memory or the log is half full
//!  watch    a txg that stays open for a minute although it is to be closed is reported
//!  chores   inodes without a name are freed in steps; segments are cleaned; freed slots are given back to the device
//! ```
//!
//! Invariants:
//! - A commit that fails is the last one: the pool is suspended, says why, and whoever waits for
//!   room is told.
//! - Chores yield: each step is short, and what they do is undone by no crash.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::{Pool, Work, as_pool_error};
use crate::error::PoolError;
use crate::files::{Table, Throttle, Woken};
use crate::patience;
use crate::pointer::Txg;

/// How the engine runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// The longest time between a change and its commit.
    pub every: Duration,
    /// What may be held in memory before a commit begins, bytes.
    pub begin: u64,
    /// What may be held in memory before operations wait, bytes.
    pub most: u64,
    /// How long a commit may wait for operations of its txg before that is reported.
    pub stuck: Duration,
}

impl Pace {
    /// The pace for a pool that has so many bytes of memory, cache included.
    #[must_use]
    pub fn for_memory(bytes: u64) -> Self {
        let begin = (bytes / 4).clamp(8 << 20, 1 << 30);
        Self { begin, most: begin / 2 * 3, ..Self::default() }
    }
}

impl Pace {
    /// The pace where commits come too often because of trees: twice as much is held. Changes all
    /// over a large tree soon have all of it in memory, and commits write all of it; what comes in
    /// between must be worth that.
    fn wide(self) -> Self {
        let begin = self.begin.saturating_mul(2);
        Self { begin, most: self.most.max(begin / 4 * 5), ..self }
    }
}

impl Default for Pace {
    /// Five seconds; 64 MiB, 96 MiB; a minute.
    fn default() -> Self {
        Self { every: Duration::from_secs(5), begin: 64 << 20, most: 96 << 20, stuck: Duration::from_secs(60) }
    }
}

/// What becomes of a pool of which an operation does not end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stuck {
    /// The operation waits for a device.
    Excused,
    /// Everybody waits.
    Wait,
    /// Nothing is accepted any more.
    Suspend,
}

/// Decides that.
pub(super) type OnStuck = dyn Fn(&str) -> Stuck + Send + Sync;

/// The threads' names.
const COMMITS: &str = "pool-commit";
const CHORES: &str = "pool-chores";
const WATCH: &str = "pool-watch";
/// The watchdog looks so many times before it reports: a process that stood still has not waited.
const LOOKS: u32 = 60;
/// So often chores are looked for.
const CHORES_EVERY: Duration = Duration::from_millis(500);
/// Chores rest so many times as long as they take.
const CHORES_SHARE: u32 = 2;
/// Commits that come faster than this because of much in memory come too often.
const TOO_OFTEN: Duration = Duration::from_secs(1);
/// After growing by so much the allocator is told to give back what is free, bytes.
const WORTH_GIVING_BACK: u64 = 16 << 20;
/// Between two commits that free what was destroyed.
const FREEING_EVERY: Duration = Duration::from_millis(20);
/// What one step of cleaning moves, bytes.
const CLEANED_AT_ONCE: u64 = 4 << 20;
/// Rows of inodes without a name that one step frees.
const FREED_AT_ONCE: u64 = 16 << 10;

/// The running engine of a pool. It ends when it is stopped, or dropped; only the first tells how
/// it ended.
#[derive(Debug)]
pub struct Committer {
    pool: Arc<Pool>,
    threads: Vec<JoinHandle<()>>,
    /// The limit of the cache when nothing is held beside it, bytes.
    cache: u64,
}

impl Pool {
    /// Starts the threads that commit, clean and free.
    ///
    /// # Errors
    /// [`PoolError::Refused`] where the system gives no thread.
    pub fn start_committer(self: &Arc<Self>, pace: Pace) -> Result<Committer, PoolError> {
        self.throttle.arm(pace.begin, pace.most);
        self.make_room_by_commits();
        let cache = self.cache.counters().limit;
        self.share_memory(pace, cache.saturating_sub(pace.begin).max(cache / 2));
        let mut committer = Committer { pool: Arc::clone(self), threads: Vec::new(), cache };
        for name in [COMMITS, CHORES, WATCH] {
            let pool = Arc::clone(self);
            let task = move || match name {
                COMMITS => pool.commit_in_time(pace, cache),
                CHORES => pool.do_chores(),
                _ => pool.watch_commits(pace.stuck),
            };
            let thread = std::thread::Builder::new().name(name.to_owned()).spawn(task);
            // Dropping the committer ends what was started before.
            committer
                .threads
                .push(thread.map_err(|error| PoolError::Refused(format!("no thread for {name}: {error}")))?);
        }
        Ok(committer)
    }

    /// Why nothing is accepted any more, if it is so: a commit has failed.
    #[must_use]
    pub fn suspended(&self) -> Option<PoolError> {
        self.throttle.failed()
    }

    /// What memory holds that is not durable yet, bytes.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.throttle.held()
    }

    /// What is held for commits comes out of the pool's memory, which the cache had to itself.
    fn share_memory(&self, pace: Pace, cache: u64) {
        self.cache.set_limit(cache);
        self.throttle.rearm(pace.begin, pace.most);
    }

    /// Whether most of what is held are nodes of trees.
    fn holds_trees(&self, held: u64) -> bool {
        let trees: u64 =
            self.open_datasets().iter().map(|dataset| dataset.files().look_at_table(Table::dirty_bytes)).sum();
        trees > held / 4 * 3
    }

    fn commit_in_time(&self, pace: Pace, cache: u64) {
        let (mut wait, mut wide, mut last) = (pace.every, false, None::<Instant>);
        loop {
            let woken = self.throttle.wait(wait);
            if woken == Woken::Stop {
                return;
            }
            wait = pace.every;
            if self.suspended().is_some() {
                continue;
            }
            let held = self.held();
            let often = last.is_some_and(|last| last.elapsed() < TOO_OFTEN);
            if !wide && often && held >= pace.begin && self.holds_trees(held) {
                wide = true;
                let pace = pace.wide();
                // While a commit writes what it has taken, as much is held anew.
                self.share_memory(pace, cache.saturating_sub(pace.most + pace.begin).max(cache / 4));
                continue;
            }
            if wide && woken == Woken::Time && held < pace.begin {
                wide = false;
                self.share_memory(pace, cache.saturating_sub(pace.begin).max(cache / 2));
            }
            last = Some(patience::now());
            match self.commit_if_changed() {
                Ok(more) => {
                    if more == Work::More {
                        wait = FREEING_EVERY;
                    }
                    // What was held in small pieces is free now, and the allocator would keep it.
                    nacre_sys::memory::trim_grown(WORTH_GIVING_BACK);
                }
                Err(error) => {
                    // It has been told to everybody who waits, and is kept for whoever asks.
                    tracing::error!(%error, "a commit has failed: the pool is suspended");
                }
            }
        }
    }

    /// Commits where there is anything to commit; tells whether more is to be freed by further
    /// ones.
    pub(super) fn commit_if_changed(&self) -> Result<Work, PoolError> {
        if self.is_freeing() {
            self.commit()?;
        } else {
            self.commit_changes()?;
        }
        Ok(if self.is_freeing() { Work::More } else { Work::None })
    }

    /// Makes everything durable that was done before the call; costs nothing where that is so
    /// already.
    ///
    /// # Errors
    /// As [`Self::commit`].
    pub fn commit_changes(&self) -> Result<(), PoolError> {
        // Held by a commit to its end: what one under way has taken is durable afterwards.
        let mut admin = self.admin.lock();
        let changed = admin.catalog.has_changes() || self.open_datasets().iter().any(|dataset| dataset.has_changes());
        let due = self.keeper.get().is_some_and(|keeper| keeper.log.is_half_full());
        if changed || due { self.commit_under(&mut admin, |_, _| Ok(())) } else { Ok(()) }
    }

    fn do_chores(&self) {
        let stopped = |throttle: &Throttle| throttle.is_stopped();
        let mut told = None;
        while !stopped(&self.throttle) {
            let began = patience::now();
            let more = match self.chore() {
                Ok(more) => {
                    told = None;
                    more
                }
                Err(error) => {
                    // A device that cannot be read, a pool that is suspended: neither is cured by
                    // haste, nor by saying it twice a second.
                    let why = error.to_string();
                    if told.as_ref() != Some(&why) {
                        tracing::warn!(%error, "the pool's chores are put off");
                    }
                    told = Some(why);
                    Work::None
                }
            };
            // Neither commits nor chores alone see all that becomes free.
            nacre_sys::memory::trim_grown(WORTH_GIVING_BACK);
            // Chores take a part of the time only, unless nothing is to be done at all.
            let pause =
                if more == Work::More { (began.elapsed() * CHORES_SHARE).min(CHORES_EVERY) } else { CHORES_EVERY };
            self.throttle.pause(pause);
        }
    }

    /// Asks this where a commit waits for operations that do not end, once a look: whether the pool is to be
    /// suspended, so that everybody else has an answer. It may also end the process.
    pub fn when_stuck(&self, decide: impl Fn(&str) -> Stuck + Send + Sync + 'static) {
        // There is one process, which asks once.
        let _ = self.on_stuck.set(Box::new(decide));
    }

    /// Suspends the pool where a commit waits for operations that do not end.
    fn watch_commits(&self, most: Duration) {
        let (mut looks, mut reported, mut waiting) = (0, false, None);
        while !self.throttle.is_stopped() {
            self.throttle.pause(most / LOOKS);
            let closing = self.gate.closing();
            if closing.is_none() || closing != waiting || self.suspended().is_some() {
                (looks, reported, waiting) = (0, false, closing);
                continue;
            }
            looks += 1;
            if looks <= LOOKS {
                continue;
            }
            let error = self.stuck();
            let decided = self.on_stuck.get().map_or(Stuck::Suspend, |decide| decide(&error.to_string()));
            if decided != Stuck::Excused && !reported {
                tracing::error!(%error, "a commit waits for operations that do not end");
                reported = true;
            }
            if decided == Stuck::Suspend {
                self.throttle.fail(&error);
                self.gate.give_up();
            }
        }
    }

    /// That operations do not end, and where they are.
    pub(super) fn stuck(&self) -> PoolError {
        let reason = format!("operations do not end: {}", crate::files::gate::places().join(", "));
        PoolError::Suspended { durable: Txg(self.committed.load(Ordering::Acquire)), reason }
    }

    /// One step of each chore.
    fn chore(&self) -> Result<Work, PoolError> {
        if self.suspended().is_some() {
            return Ok(Work::None);
        }
        let mut more = Work::None;
        for dataset in self.open_datasets() {
            if dataset.files().free_released(FREED_AT_ONCE).map_err(as_pool_error)?.more {
                more = Work::More;
            }
            if dataset.files().sweep_cuts(FREED_AT_ONCE).map_err(as_pool_error)? {
                more = Work::More;
            }
            if dataset.files().recount_rows().map_err(as_pool_error)? {
                more = Work::More;
            }
        }
        Ok(more.or(self.storage.tend(CLEANED_AT_ONCE)?))
    }
}

impl Committer {
    /// Commits a last time and ends the threads.
    ///
    /// # Errors
    /// Those of the last commit: what is durable then is the state of the one before.
    pub fn stop(mut self) -> Result<(), PoolError> {
        self.end();
        self.pool.commit().map(drop)
    }

    fn end(&mut self) {
        self.pool.throttle.disarm();
        for thread in self.threads.drain(..) {
            // A thread that panicked has ended too.
            let _ = thread.join();
        }
        self.pool.cache.set_limit(self.cache);
    }
}

impl Drop for Committer {
    fn drop(&mut self) {
        self.end();
    }
}
