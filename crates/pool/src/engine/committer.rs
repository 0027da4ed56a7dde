//! The engine's background threads: periodic commits, cleaning, freeing of destroyed datasets and
//! snapshots.
//!
//! Called by the process that owns the pool: [`Pool::start_committer`] after the import,
//! [`Committer::stop`] before the export.
//!
//! ```text
//!  commit   every 5 s if something has changed; earlier if memory holds much or the log is half full
//!  watch    a txg that is being closed and stays open for a minute is reported
//!  chores   orphan inodes are freed in steps; segments are cleaned; freed slots are returned to the device
//! ```
//!
//! Invariants:
//! - A failed commit is the last one: the pool is suspended with the reason, and operations that
//!   wait for space fail.
//! - Chores yield: each step is short, and no crash undoes it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::{Pool, Work, as_pool_error};
use crate::error::PoolError;
use crate::files::{Table, Throttle, Woken};
use crate::patience;
use crate::pointer::Txg;

/// Intervals and memory limits of the background threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// The longest time between a change and its commit.
    pub every: Duration,
    /// Bytes of uncommitted changes in memory at which a commit begins.
    pub begin: u64,
    /// Bytes of uncommitted changes in memory at which operations have to wait.
    pub most: u64,
    /// How long a commit may wait for operations of its txg before this is reported.
    pub stuck: Duration,
}

impl Pace {
    /// The pace for a pool with this many bytes of memory, cache included.
    #[must_use]
    pub fn for_memory(bytes: u64) -> Self {
        let begin = (bytes / 4).clamp(8 << 20, 1 << 30);
        Self { begin, most: begin / 2 * 3, ..Self::default() }
    }
}

impl Pace {
    /// The pace if trees cause commits too often: twice as much is held. Changes all over a large
    /// tree soon have all of it in memory, and each commit writes all of it; enough changes have to
    /// share one commit.
    fn wide(self) -> Self {
        let begin = self.begin.saturating_mul(2);
        Self { begin, most: self.most.max(begin / 4 * 5), ..self }
    }
}

impl Default for Pace {
    /// A commit every five seconds; 64 MiB and 96 MiB of uncommitted changes; stuck after a minute.
    fn default() -> Self {
        Self { every: Duration::from_secs(5), begin: 64 << 20, most: 96 << 20, stuck: Duration::from_secs(60) }
    }
}

/// What to do about an operation that does not end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stuck {
    /// Nothing: the operation waits for a device.
    Excused,
    /// Let all operations wait.
    Wait,
    /// Suspend the pool: nothing is accepted any more.
    Suspend,
}

/// Decides about an operation that does not end; its argument is the description of the operation.
pub(super) type OnStuck = dyn Fn(&str) -> Stuck + Send + Sync;

/// Names of the threads.
const COMMITS: &str = "pool-commit";
const CHORES: &str = "pool-chores";
const WATCH: &str = "pool-watch";
/// The watchdog looks this many times before it reports: a process that was stopped has not waited.
const LOOKS: u32 = 60;
/// Interval between two looks for chores.
const CHORES_EVERY: Duration = Duration::from_millis(500);
/// Bytes of uncommitted changes in memory at which urgent chores do not pause.
const BUSY: u64 = 1 << 20;
/// While chores have more to do, the thread sleeps this many times as long as the last step took.
const CHORES_SHARE: u32 = 2;
/// Commits that follow each other faster than this because of memory are too frequent.
const TOO_OFTEN: Duration = Duration::from_secs(1);
/// Growth of memory, in bytes, after which the allocator is asked to return free memory to the
/// system.
const WORTH_GIVING_BACK: u64 = 16 << 20;
/// Interval between two commits that free frames of destroyed datasets and snapshots.
const FREEING_EVERY: Duration = Duration::from_millis(20);
/// Bytes that one step of cleaning moves.
const CLEANED_AT_ONCE: u64 = 4 << 20;
/// Number of orphan inodes' rows that one step frees.
const FREED_AT_ONCE: u64 = 16 << 10;

/// The running background threads of a pool. They end when this is stopped or dropped; only
/// [`Self::stop`] reports the result.
#[derive(Debug)]
pub struct Committer {
    pool: Arc<Pool>,
    threads: Vec<JoinHandle<()>>,
    /// Limit of the cache while no memory is set aside for uncommitted changes, bytes.
    cache: u64,
}

impl Pool {
    /// Starts the threads that commit, clean and free.
    ///
    /// # Errors
    /// [`PoolError::Refused`] if a thread cannot be started.
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
            // Dropping the committer ends the threads started before.
            committer
                .threads
                .push(thread.map_err(|error| PoolError::Refused(format!("no thread for {name}: {error}")))?);
        }
        Ok(committer)
    }

    /// Reason why nothing is accepted any more, if a commit has failed.
    #[must_use]
    pub fn suspended(&self) -> Option<PoolError> {
        self.throttle.failed()
    }

    /// Bytes of uncommitted changes in memory.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.throttle.held()
    }

    /// Takes the memory for uncommitted changes from the cache, which had all of the pool's memory.
    fn share_memory(&self, pace: Pace, cache: u64) {
        self.cache.set_limit(cache);
        self.throttle.rearm(pace.begin, pace.most);
    }

    /// Whether most of the uncommitted memory is nodes of trees.
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
                // While a commit writes the frozen changes, as many new ones accumulate.
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
                    // The small allocations that the commit released are free now, and the
                    // allocator would keep them.
                    nacre_sys::memory::trim_grown(WORTH_GIVING_BACK);
                }
                Err(error) => {
                    // All waiting operations got it, and it is kept for later ones.
                    tracing::error!(%error, "a commit has failed: the pool is suspended");
                }
            }
        }
    }

    /// Commits if there is anything to commit; returns whether further commits have more to free.
    pub(super) fn commit_if_changed(&self) -> Result<Work, PoolError> {
        if self.is_freeing() {
            self.commit()?;
        } else {
            self.commit_changes()?;
        }
        Ok(if self.is_freeing() { Work::More } else { Work::None })
    }

    /// Makes everything durable that was done before the call; does nothing if it is durable
    /// already.
    ///
    /// # Errors
    /// As [`Self::commit`].
    pub fn commit_changes(&self) -> Result<(), PoolError> {
        // A commit holds this lock to its end: the changes of a running commit are durable
        // afterwards.
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
                    // A device that cannot be read, or a suspended pool: retrying fast helps
                    // neither, nor does a log line twice a second.
                    let why = error.to_string();
                    if told.as_ref() != Some(&why) {
                        tracing::warn!(%error, "the pool's chores are put off");
                    }
                    told = Some(why);
                    Work::None
                }
            };
            // Neither commits nor chores alone see all memory that becomes free.
            nacre_sys::memory::trim_grown(WORTH_GIVING_BACK);
            // Chores may use a part of the time only, unless writers wait for them; with nothing to do they wait for
            // the full interval.
            let pause = match more {
                Work::Urgent if self.held() >= BUSY => continue,
                Work::Urgent | Work::More => (began.elapsed() * CHORES_SHARE).min(CHORES_EVERY),
                Work::None => CHORES_EVERY,
            };
            self.throttle.pause(pause);
        }
    }

    /// Sets the function that decides about a commit that waits for operations which do not end;
    /// called once per look. It may have the pool suspended, so that all other operations fail
    /// instead of waiting, or end the process.
    pub fn when_stuck(&self, decide: impl Fn(&str) -> Stuck + Send + Sync + 'static) {
        // A second call is impossible: one process, which calls this once.
        let _ = self.on_stuck.set(Box::new(decide));
    }

    /// Suspends the pool if a commit waits for operations that do not end.
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

    /// The error that operations do not end, with the source locations of these operations.
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
    /// Errors of the last commit: what is durable then is the state of the one before.
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
