//! The job of a topology change: moves segments to their new devices in the background, and
//! continues at the next import where it was interrupted.
//!
//! Callers: the verbs (`pool/changing.rs`), and imports. Its state is stored among the pool's
//! properties (under a name that is not a property); the labels have the change that is under way.
//! Invariants: one change at a time; it has ended when the labels have its end, never before.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nacre_pool::PoolError;
use nacre_pool::backend::Disks;
use nacre_pool::engine::Pool;
use nacre_pool::label::ChangeKind;
use nacre_pool::store::Store;
use serde::{Deserialize, Serialize};

use super::scrub::Phase;
use crate::clock::{moment, now};
use crate::job::{Job, JobState};
use crate::watch::Watch;
use crate::{Kind, Refusal};

/// Name under which the state is stored.
const KEPT_AS: &str = "reshape";
/// Interval of storing it while it runs.
const KEEP_EVERY: Duration = Duration::from_secs(30);
/// Interval of updating the remaining bytes.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// Size of one step, bytes.
const AT_ONCE: u64 = 4 << 20;
/// Number of moved bytes after which they are made durable: their old slots are free then.
const DURABLE_EVERY: u64 = 256 << 20;
/// Idle time per time of work while the pool has other I/O.
const BESIDE_OTHERS: u32 = 5;
/// Other I/O counts for this time after a write or read: writes wait in memory for about so long.
const OTHERS_FOR: Duration = Duration::from_secs(6);
/// Minimum size of other I/O that counts, bytes.
const OTHERS_FROM: u64 = 256 << 10;
/// Interval of retries while the job is blocked.
const HELD_UP: Duration = Duration::from_secs(3);

/// Kind of a topology change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reshaping {
    /// Removal of devices.
    #[default]
    Removal,
    /// Expansion of a RAID-Z group.
    Expansion,
    /// Conversion of a group to another kind.
    Conversion,
    /// Balancing of devices.
    Rebalance,
}

impl From<ChangeKind> for Reshaping {
    fn from(kind: ChangeKind) -> Self {
        match kind {
            ChangeKind::Removal => Self::Removal,
            ChangeKind::Expansion => Self::Expansion,
            ChangeKind::Conversion => Self::Conversion,
        }
    }
}

/// Progress of a topology change. Times in seconds since 1970, sizes in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReshapeReport {
    /// Its phase.
    pub phase: Phase,
    /// Its kind.
    pub kind: Reshaping,
    /// Names of the devices or groups that it concerns.
    pub what: String,
    /// When it was started.
    pub started: u64,
    /// When it ended, or was paused.
    pub ended: u64,
    /// How long it ran without pauses, milliseconds.
    pub elapsed: u64,
    /// Moved bytes.
    pub moved: u64,
    /// Remaining bytes.
    pub left: u64,
    /// Limit in bytes a second; 0: none.
    pub rate: u64,
    /// Why it makes no progress.
    pub held_up: Option<String>,
}

impl ReshapeReport {
    /// Bytes a second; 0 while this is not known yet.
    #[must_use]
    pub fn speed(&self) -> u64 {
        self.moved.saturating_mul(1000) / self.elapsed.max(1)
    }
}

/// A command to the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReshapeOrder {
    /// Resumes a paused change.
    Resume,
    /// Sets the limit in bytes a second; 0: none.
    Rate(u64),
    /// Pauses the change.
    Pause,
    /// Cancels the change.
    Stop,
}

impl JobState for ReshapeReport {
    fn runs(&self) -> bool {
        self.phase == Phase::Running
    }
}

/// The topology change of a pool.
pub struct Reshape {
    pub(crate) job: Job<ReshapeReport>,
    pool: Arc<Pool>,
    store: Arc<Store>,
    watch: Arc<Watch>,
    /// Returns the bytes that were read from all devices.
    read: Box<dyn Fn() -> u64 + Send + Sync>,
    /// Called when devices have left the pool.
    left: Box<dyn Fn() + Send + Sync>,
}

/// State of one run of the job's thread.
struct Run {
    stuck: BTreeSet<u32>,
    clock: Instant,
    kept: Instant,
    looked: Instant,
    undurable: u64,
    frames: u64,
    others: Option<Instant>,
}

impl Reshape {
    pub(crate) fn new(
        pool: &Arc<Pool>,
        store: &Arc<Store>,
        watch: &Arc<Watch>,
        read: impl Fn() -> u64 + Send + Sync + 'static,
        left: impl Fn() + Send + Sync + 'static,
    ) -> Self {
        let (pool, store, watch) = (Arc::clone(pool), Arc::clone(store), Arc::clone(watch));
        Self { job: Job::default(), pool, store, watch, read: Box::new(read), left: Box::new(left) }
    }

    /// Returns its progress.
    #[must_use]
    pub fn report(&self) -> ReshapeReport {
        ReshapeReport::clone(&self.job.lock())
    }

    /// Returns the name under which the state is stored among the pool's properties.
    #[must_use]
    pub fn kept_as() -> &'static str {
        KEPT_AS
    }

    /// Checks that another change can begin.
    ///
    /// # Errors
    /// Another change is under way.
    pub(crate) fn is_free(&self, doing: &str) -> Result<(), Refusal> {
        let state = self.job.lock();
        let runs = matches!(state.phase, Phase::Running | Phase::Paused);
        if !runs && self.store.shape_change().is_none() {
            return Ok(());
        }
        let name = match state.kind {
            Reshaping::Removal => "a removal",
            Reshaping::Expansion => "an expansion",
            Reshaping::Conversion => "a conversion",
            Reshaping::Rebalance => "a rebalance",
        };
        let refusal = Refusal::new(Kind::Busy, format!("{doing}: {name} is under way ({})", state.what));
        let ends = match state.kind {
            Reshaping::Conversion => "'nacre pool convert' makes it another",
            _ => "'nacre pool reshape -s' stops it",
        };
        Err(refusal.next(format!("'nacre pool status' shows how far it is, {ends}")))
    }

    /// Starts the job of a change that has begun.
    ///
    /// # Errors
    /// Its state cannot be stored, or there is no thread.
    pub(crate) fn begin(self: &Arc<Self>, kind: Reshaping, what: &str) -> Result<(), Refusal> {
        let left = self.to_move(kind);
        {
            let mut state = self.job.lock();
            let rate = state.rate;
            let new = ReshapeReport { phase: Phase::Running, kind, what: what.to_owned(), ..ReshapeReport::default() };
            **state = ReshapeReport { started: now(), left, rate, ..new };
        }
        self.go_on()
    }

    fn to_move(&self, kind: Reshaping) -> u64 {
        if kind == Reshaping::Rebalance { self.store.uneven() } else { self.store.left_to_move().bytes }
    }

    /// Carries out a command for the change of the pool, which has this name.
    ///
    /// # Errors
    /// There is no change, or it cannot be stopped.
    pub fn order(self: &Arc<Self>, name: &str, order: ReshapeOrder) -> Result<(), Refusal> {
        let none = |verb: &str| Refusal::new(Kind::Invalid, format!("cannot {verb} a change of shape of '{name}'"));
        let report = self.report();
        match (order, report.phase) {
            (ReshapeOrder::Rate(rate), _) => self.job.lock().rate = rate,
            (ReshapeOrder::Pause, Phase::Running) => {
                let mut state = self.job.lock();
                (state.phase, state.ended, state.held_up) = (Phase::Paused, now(), None);
            }
            (ReshapeOrder::Resume, Phase::Paused) => self.job.lock().phase = Phase::Running,
            (ReshapeOrder::Stop, Phase::Running | Phase::Paused) => {
                if report.kind != Reshaping::Rebalance {
                    let doing = format!("cannot stop the change of shape of '{name}'");
                    self.store.give_up_change().map_err(|error| Refusal::pool(doing, &error))?;
                    self.pool.grown();
                }
                let mut state = self.job.lock();
                (state.phase, state.ended, state.held_up) = (Phase::Canceled, now(), None);
            }
            (ReshapeOrder::Pause, Phase::Paused) => return Err(none("pause").next("it is paused already")),
            (ReshapeOrder::Resume, Phase::Running) => return Err(none("resume").next("it runs")),
            (ReshapeOrder::Pause, _) => return Err(none("pause").next("none is under way")),
            (ReshapeOrder::Resume, _) => return Err(none("resume").next("none is paused")),
            (ReshapeOrder::Stop, _) => return Err(none("stop").next("none is under way")),
        }
        self.go_on()
    }

    /// Restores the state that an import finds.
    pub(crate) fn take_up(&self, kept: &str) {
        // An unreadable state of another version is ignored: the labels are authoritative.
        if let Ok(report) = serde_json::from_str::<ReshapeReport>(kept) {
            **self.job.lock() = report;
        }
    }

    /// Continues the change that is under way by the labels.
    pub(crate) fn resume(self: &Arc<Self>) -> Result<(), Refusal> {
        let change = self.store.shape_change();
        {
            let mut state = self.job.lock();
            let active = matches!(state.phase, Phase::Running | Phase::Paused);
            match change {
                Some(change) if !active || state.kind != change.kind.into() => {
                    let what = format!("group {}", change.group);
                    let new = ReshapeReport { phase: Phase::Running, kind: change.kind.into(), what, ..state.clone() };
                    **state = ReshapeReport { started: now(), moved: 0, elapsed: 0, held_up: None, ..new };
                }
                // It had already ended.
                None if active && state.kind != Reshaping::Rebalance => {
                    (state.phase, state.ended, state.left) = (Phase::Finished, now(), 0);
                }
                _ => {}
            }
        }
        let report = self.report();
        if matches!(report.phase, Phase::Running | Phase::Paused) {
            let left = self.to_move(report.kind);
            self.job.lock().left = left;
            self.go_on()?;
        }
        Ok(())
    }

    fn go_on(self: &Arc<Self>) -> Result<(), Refusal> {
        self.job.tell();
        let (work, report) = (Arc::clone(self), self.report());
        // The labels have the details of the change as well.
        self.job.start(("pool-reshape", "move what there is"), move || work.run())?;
        self.keep(&report)
    }

    /// Stores the state across exports and crashes.
    fn keep(&self, report: &ReshapeReport) -> Result<(), Refusal> {
        let text = serde_json::to_string(report)
            .map_err(|error| Refusal::new(Kind::Io, format!("cannot write down the change of shape: {error}")))?;
        Ok(self.pool.set_pool_properties(&[(KEPT_AS, Some(&text))])?)
    }

    fn told(&self, kept: Result<(), Refusal>) {
        if let Err(error) = kept {
            tracing::warn!(%error, "how far the change of shape is was not kept");
        }
    }

    fn run(&self) {
        loop {
            let frames = self.store.traffic().frames;
            let (clock, stuck) = (moment(), BTreeSet::new());
            let mut run = Run { stuck, clock, kept: clock, looked: clock, undurable: 0, frames, others: None };
            while self.job.lock().goes_on() {
                let stepped = self.step(&mut run);
                match stepped {
                    Ok(true) => {
                        self.finish();
                        break;
                    }
                    Ok(false) => {}
                    Err(error) => {
                        tracing::warn!(%error, "a change of shape is held up");
                        self.hold_up(&mut run, error.to_string());
                    }
                }
            }
            let report = self.report();
            if self.store.suspended().is_none() {
                self.told(self.keep(&report));
            }
            if self.job.ends() {
                return;
            }
        }
    }

    /// Waits until the obstacle may be gone.
    fn hold_up(&self, run: &mut Run, why: String) {
        let mut state = self.job.lock();
        state.held_up = Some(why);
        self.job.rest(&mut state, Some(moment() + HELD_UP), |state| state.goes_on());
        drop(state);
        run.clock = moment();
        run.stuck.clear();
    }

    /// Moves segments in one step; returns whether the change has ended.
    fn step(&self, run: &mut Run) -> Result<bool, PoolError> {
        let began = moment();
        let kind = self.job.lock().kind;
        let moved = match kind {
            Reshaping::Rebalance => self.store.even_step(AT_ONCE, &mut run.stuck)?,
            _ => self.store.reshape_step(AT_ONCE, &mut run.stuck)?,
        };
        run.undurable += moved.bytes;
        if run.undurable >= DURABLE_EVERY || kind == Reshaping::Rebalance && run.undurable >= 4 * AT_ONCE {
            run.undurable = 0;
            self.store.commit_moved()?;
        }
        let worked = began.elapsed();
        {
            let mut state = self.job.lock();
            state.moved += moved.bytes;
            state.left = state.left.saturating_sub(moved.bytes);
            if moved.bytes > 0 {
                state.held_up = None;
            }
        }
        if moved.no_room {
            let why = "there is too little room to move anything: free some, or add devices";
            self.hold_up(run, why.to_owned());
            return Ok(false);
        }
        if moved.idle {
            return self.end(run, kind);
        }
        self.pace(run, worked);
        if run.looked.elapsed() >= LOOK_EVERY {
            run.looked = moment();
            let left = self.to_move(kind);
            self.job.lock().left = left;
        }
        if run.kept.elapsed() >= KEEP_EVERY {
            run.kept = moment();
            self.told(self.keep(&self.report()));
        }
        Ok(false)
    }

    /// Ends a change that has nothing more to move; returns whether it is complete.
    fn end(&self, run: &mut Run, kind: Reshaping) -> Result<bool, PoolError> {
        // Recent writes are in segments then, and the previous log is not needed any more.
        for _ in 0..2 {
            self.pool.commit()?;
        }
        run.undurable = 0;
        if kind == Reshaping::Rebalance {
            // The old slots of moved segments are free a few commits later.
            for _ in 0..4 {
                self.store.commit_moved()?;
            }
            return Ok(self.store.even_step(AT_ONCE, &mut run.stuck)?.idle);
        }
        if self.store.end_change()? {
            return Ok(true);
        }
        if !run.stuck.is_empty() {
            let lost = self.store.left_behind(&run.stuck);
            let devices = self.store.on_devices().map(Disks::devices).unwrap_or_default();
            for (frame, device) in &lost {
                let name = devices.get(usize::from(*device)).map_or("", |device| device.name());
                self.watch.damaged(*frame, None, name, None);
            }
            let why = format!(
                "{} blocks cannot be read: 'status -v' lists the files; it goes on when they are removed",
                lost.len()
            );
            self.hold_up(run, why);
        }
        Ok(false)
    }

    /// Idles to leave time to other I/O, and to keep the limit.
    fn pace(&self, run: &mut Run, worked: Duration) {
        let frames = self.store.traffic().frames;
        if frames.saturating_sub(run.frames) >= OTHERS_FROM {
            run.others = Some(moment());
        }
        run.frames = frames;
        let beside = run.others.is_some_and(|last| last.elapsed() < OTHERS_FOR);
        let (mut rest, reads) = (if beside { worked * BESIDE_OTHERS } else { worked / 8 }, (self.read)());
        let mut state = self.job.lock();
        state.elapsed += run.clock.elapsed().as_millis() as u64;
        run.clock = moment();
        if let Some(due) = state.moved.saturating_mul(1000).checked_div(state.rate).map(Duration::from_millis) {
            rest = rest.max(due.saturating_sub(Duration::from_millis(state.elapsed)));
        }
        let rate = state.rate;
        self.job.rest(&mut state, Some(moment() + rest), |state| state.goes_on() && state.rate == rate);
        drop(state);
        // Reads during this idle time are other I/O.
        if (self.read)().saturating_sub(reads) >= OTHERS_FROM {
            run.others = Some(moment());
        }
    }

    fn finish(&self) {
        let report = {
            let mut state = self.job.lock();
            if state.phase == Phase::Canceled {
                return;
            }
            (state.phase, state.ended, state.left, state.held_up) = (Phase::Finished, now(), 0, None);
            state.clone()
        };
        (self.left)();
        self.pool.grown();
        let class = match report.kind {
            Reshaping::Removal => "sysevent.fs.zfs.vdev_remove",
            _ => "sysevent.fs.zfs.config_sync",
        };
        self.watch.note(class, vec![("vdev_path".to_owned(), report.what)]);
        self.job.tell();
    }
}
