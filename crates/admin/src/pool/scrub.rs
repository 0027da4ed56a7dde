//! The scrub: verifies all stored data in the background; it can be started, paused, resumed, stopped and waited for.
//!
//! Its state is stored among the pool's properties (under a name that is not a property), so that
//! an import continues where an export or a crash has interrupted it. Invariant: one at a time.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nacre_pool::PoolError;
use nacre_pool::device::Device;
use nacre_pool::engine::Pool;
use nacre_pool::store::{Checked, SegmentInfo, Store};
use parking_lot::RwLock;
use serde::{Deserialize, Serialize};

use crate::clock::{moment, now};
use crate::counted::Counted;
use crate::job::{Job, JobState};
use crate::watch::Watch;
use crate::{Kind, Refusal};

/// Name under which the state is stored.
const KEPT_AS: &str = "scan";
/// Bytes that count for a repaired copy of an identity or of a root in a label: at least those of a
/// frame.
const LABEL_PART: u64 = 4096;
/// Interval of storing it while it runs.
const KEEP_EVERY: Duration = Duration::from_secs(30);

/// Phase of a scrub.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// No scrub so far.
    #[default]
    Never,
    /// Running.
    Running,
    /// Paused.
    Paused,
    /// Finished.
    Finished,
    /// Stopped.
    Canceled,
}

/// Progress of a scrub. Times in seconds since 1970, sizes in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubReport {
    /// Its phase.
    pub phase: Phase,
    /// When it was started.
    pub started: u64,
    /// When it ended, or was paused.
    pub ended: u64,
    /// How long it ran without pauses, milliseconds.
    pub elapsed: u64,
    /// Verified bytes.
    pub examined: u64,
    /// Bytes to verify when it began.
    pub total: u64,
    /// Number of damaged frames that cannot be repaired.
    pub errors: u64,
    /// Bytes repaired from another copy.
    #[serde(default)]
    pub repaired: u64,
    /// Everything before this position is verified.
    #[serde(default)]
    pub position: u64,
    /// Its extent.
    #[serde(default)]
    pub extent: Extent,
    /// Limit in bytes a second; 0: none.
    #[serde(default)]
    pub rate: u64,
    /// The last durable transaction group when it began.
    #[serde(default)]
    pub through: u64,
    /// Everything up to this transaction group was verified by finished scrubs.
    #[serde(default)]
    pub seen: u64,
}

/// Extent of a scrub.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Extent {
    /// All data.
    #[default]
    All,
    /// Known damage, and the data next to it.
    Errors,
    /// Data written since the last finished scrub, as far as that is known.
    New,
}

/// A command to the scrub.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ScrubOrder {
    /// Starts one, or resumes a paused one.
    Start,
    /// Starts one of this extent only, or resumes a paused one.
    StartOf(Extent),
    /// Sets the limit in bytes a second; 0: none.
    Rate(u64),
    /// Pauses it.
    Pause,
    /// Stops it.
    Stop,
}

impl JobState for ScrubReport {
    fn runs(&self) -> bool {
        self.phase == Phase::Running
    }
}

/// The scrub of a pool.
pub struct Scrub {
    pub(crate) job: Job<ScrubReport>,
    pool: Arc<Pool>,
    store: Arc<Store>,
    watch: Arc<Watch>,
    devices: Arc<RwLock<Vec<Arc<Counted>>>>,
    keeps: bool,
}

impl Scrub {
    pub(crate) fn new(
        pool: &Arc<Pool>,
        store: &Arc<Store>,
        watch: &Arc<Watch>,
        devices: &Arc<RwLock<Vec<Arc<Counted>>>>,
        keeps: bool,
    ) -> Self {
        let (pool, store, watch, devices) =
            (Arc::clone(pool), Arc::clone(store), Arc::clone(watch), Arc::clone(devices));
        Self { job: Job::default(), pool, store, watch, devices, keeps }
    }

    /// Returns its progress.
    #[must_use]
    pub fn report(&self) -> ScrubReport {
        **self.job.lock()
    }

    /// Carries out a command for the pool, which has this name.
    ///
    /// # Errors
    /// A scrub runs already, or none does; in ZFS' words.
    pub fn order(self: &Arc<Self>, name: &str, order: ScrubOrder) -> Result<(), Refusal> {
        let mut state = self.job.lock();
        let extent = if let ScrubOrder::StartOf(extent) = order { extent } else { Extent::All };
        let order = if let ScrubOrder::StartOf(_) = order { ScrubOrder::Start } else { order };
        match (order, state.phase) {
            (ScrubOrder::StartOf(_), _) => {}
            (ScrubOrder::Rate(rate), _) => state.rate = rate,
            (ScrubOrder::Start, Phase::Running) => {
                let what = format!("cannot scrub {name}: currently scrubbing; use 'zpool scrub -s' to cancel scrub");
                return Err(Refusal::new(Kind::Busy, what));
            }
            (ScrubOrder::Start, Phase::Paused) => state.phase = Phase::Running,
            (ScrubOrder::Start, _) => {
                let total = self.store.space().allocated;
                let (rate, seen, through) = (state.rate, state.seen, self.store.durable().0);
                let new = ScrubReport { phase: Phase::Running, started: now(), total, ..ScrubReport::default() };
                **state = ScrubReport { extent, rate, seen, through, ..new };
                if extent != Extent::New {
                    self.watch.begin_scrub();
                }
                self.watch.note("sysevent.fs.zfs.scrub_start", vec![("pool".to_owned(), name.to_owned())]);
            }
            (ScrubOrder::Pause, Phase::Running) => (state.phase, state.ended) = (Phase::Paused, now()),
            (ScrubOrder::Stop, Phase::Running | Phase::Paused) => (state.phase, state.ended) = (Phase::Canceled, now()),
            (ScrubOrder::Pause | ScrubOrder::Stop, phase) => {
                let verb = if order == ScrubOrder::Pause { "pause" } else { "cancel" };
                let why = if phase == Phase::Paused { "scrub is paused already" } else { "there is no active scrub" };
                return Err(Refusal::new(Kind::Invalid, format!("cannot {verb} scrubbing {name}: {why}")));
            }
        }
        let report = **state;
        drop(state);
        self.go_on(report)
    }

    /// Restores the state that an import finds: an interrupted scrub continues.
    pub(crate) fn take_up(self: &Arc<Self>, kept: &str) -> Result<(), Refusal> {
        // An unreadable state of another version is ignored.
        let Ok(report) = serde_json::from_str::<ScrubReport>(kept) else { return Ok(()) };
        **self.job.lock() = report;
        self.go_on(report)
    }

    /// Returns the name under which the state is stored among the pool's properties.
    #[must_use]
    pub fn kept_as() -> &'static str {
        KEPT_AS
    }

    fn go_on(self: &Arc<Self>, report: ScrubReport) -> Result<(), Refusal> {
        self.job.tell();
        self.keep(&report)?;
        let work = Arc::clone(self);
        self.job.start(("pool-scrub", "scrub"), move || work.run())
    }

    /// Stores the state across exports and crashes.
    fn keep(&self, report: &ScrubReport) -> Result<(), Refusal> {
        if !self.keeps {
            return Ok(());
        }
        let text = serde_json::to_string(report)
            .map_err(|error| Refusal::new(Kind::Io, format!("cannot write down the scrub: {error}")))?;
        Ok(self.pool.set_pool_properties(&[(KEPT_AS, Some(&text))])?)
    }

    fn run(&self) {
        let mut first = self.report().position;
        let mut kept = moment();
        let mut clock = moment();
        loop {
            let ScrubReport { extent, seen, .. } = self.report();
            if first == 0
                && let Err(error) = self.look_at_labels()
            {
                self.watch.note("ereport.fs.zfs.io", vec![("reason".to_owned(), error.to_string())]);
            }
            let damaged = match extent {
                Extent::Errors => self.store.segments_of(&self.watch.damaged_frames()),
                Extent::All | Extent::New => BTreeSet::new(),
            };
            let wanted = |segment: &SegmentInfo| match extent {
                Extent::All => true,
                Extent::Errors => damaged.contains(&segment.id),
                Extent::New => segment.newest.0 > seen,
            };
            let mut look = |checked: &Checked| self.look(checked, &mut clock);
            let ended = self.store.scrub_some(first, &wanted, &mut look, &mut |position| {
                let report = {
                    let mut state = self.job.lock();
                    state.position = position;
                    **state
                };
                if kept.elapsed() >= KEEP_EVERY {
                    kept = moment();
                    self.told(self.keep(&report));
                }
            });
            // Repairs are durable then, and the log, of which a copy may be damaged, is not needed any more.
            let ended = ended.and_then(|all| match all && self.keeps {
                true => self.pool.commit().map(|_| true),
                false => Ok(all),
            });
            match ended {
                Ok(true) => self.end(Phase::Finished),
                Ok(false) => {}
                Err(error) => {
                    self.watch.note("ereport.fs.zfs.io", vec![("reason".to_owned(), error.to_string())]);
                    self.end(Phase::Canceled);
                }
            }
            // Paused in the middle of a segment: that one is verified again. And another scrub may
            // have been requested by now.
            if !self.may_go_on(&mut clock) && self.leave() {
                return;
            }
            first = self.report().position;
        }
    }

    /// Repairs labels, of which there are four copies.
    fn look_at_labels(&self) -> Result<(), PoolError> {
        if !self.keeps {
            return Ok(());
        }
        let mended = self.store.scrub_labels()?;
        let devices = self.devices.read();
        for (device, copies) in devices.iter().zip(mended).filter(|(_, copies)| *copies > 0) {
            device.found_damage();
            let details = [
                ("vdev_path", device.name().to_owned()),
                ("reason", "a label is damaged".to_owned()),
                ("repaired", copies.to_string()),
            ];
            self.watch.note("ereport.fs.zfs.label", details.map(|(name, value)| (name.to_owned(), value)).to_vec());
            self.job.lock().repaired += copies * LABEL_PART;
        }
        Ok(())
    }

    /// Counts a verified frame; returns whether to continue.
    fn look(&self, checked: &Checked, clock: &mut Instant) -> bool {
        if let Some(damage) = &checked.damage {
            let device = checked.device.and_then(|device| self.devices.read().get(usize::from(device)).cloned());
            let name = device.as_ref().map_or_else(String::new, |device| device.name().to_owned());
            if let Some(device) = device {
                device.found_damage();
            }
            if checked.mended {
                self.watch.mended(checked.name, checked.owner, &name, Some(damage));
            } else {
                self.watch.damaged(checked.name, checked.owner, &name, Some(damage));
            }
        }
        let mut state = self.job.lock();
        state.examined += checked.bytes;
        state.errors += u64::from(checked.damage.is_some() && !checked.mended);
        state.repaired += checked.repaired;
        let ran = clock.elapsed();
        if ran >= Duration::from_millis(1) {
            state.elapsed += ran.as_millis() as u64;
            *clock = moment();
        }
        // The time that the verified bytes should have taken by the limit.
        if let Some(due) = state.examined.saturating_mul(1000).checked_div(state.rate).map(Duration::from_millis) {
            let (rate, ahead) = (state.rate, due.saturating_sub(Duration::from_millis(state.elapsed)));
            self.job.rest(&mut state, Some(moment() + ahead), |state| state.goes_on() && state.rate == rate);
            state.elapsed += clock.elapsed().as_millis() as u64;
            *clock = moment();
        }
        state.goes_on()
    }

    /// Waits while it is paused; returns whether it continues.
    fn may_go_on(&self, clock: &mut Instant) -> bool {
        let mut state = self.job.lock();
        self.job.rest(&mut state, None, |state| state.phase == Phase::Paused && !state.leaving());
        *clock = moment();
        state.goes_on()
    }

    fn end(&self, phase: Phase) {
        let report = {
            let mut state = self.job.lock();
            if state.phase == Phase::Running {
                (state.phase, state.ended) = (phase, now());
                if phase == Phase::Finished && state.extent != Extent::Errors {
                    state.seen = state.through;
                }
            }
            **state
        };
        if report.phase == Phase::Finished {
            if report.extent != Extent::New {
                self.watch.end_scrub(report.extent == Extent::All);
            }
            let found = [("errors", report.errors), ("repaired", report.repaired)];
            let found = found.map(|(name, number)| (name.to_owned(), number.to_string()));
            self.watch.note("sysevent.fs.zfs.scrub_finish", found.to_vec());
        }
        self.told(self.keep(&report));
        self.job.tell();
    }

    /// Stores the state, and returns whether the thread must end.
    fn leave(&self) -> bool {
        let report = self.report();
        if matches!(report.phase, Phase::Running | Phase::Paused) {
            self.told(self.keep(&report));
        }
        self.job.ends()
    }

    /// Logs an error: a position that cannot be stored is verified again after the next import.
    fn told(&self, kept: Result<(), Refusal>) {
        if let Err(error) = kept {
            tracing::warn!(%error, "how far the scrub is was not kept");
        }
    }
}
