//! Devices of groups: offline, online, replace; and the resilver in the background, which continues
//! at the next import where it was interrupted.
//!
//! Its state is stored among the pool's properties (under a name that is not a property).
//!
//! Callers: the verbs, and imports that find a device which may lack data. Invariants:
//! - One resilver at a time; a device counts as whole only after one has finished since it came
//!   online, and a commit after that.
//! - The stored position was durable on the devices before, and counts only as long as no device
//!   has changed its state since: the labels have the revision that was stored with it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nacre_pool::PoolError;
use nacre_pool::backend::Disks;
use nacre_pool::device::Device;
use nacre_pool::engine::Pool;
use nacre_pool::label::{MemberRole, MemberStatus};
use nacre_pool::store::{Checked, Store};
use parking_lot::RwLock;
use serde::{Deserialize, Serialize};

use super::devices;
use super::scrub::{Phase, ScrubReport};
use super::signatures::Accepted;
use crate::clock::{moment, now};
use crate::counted::Counted;
use crate::failing::Failing;
use crate::imported::take_up;
use crate::job::{Job, JobState};
use crate::watch::Watch;
use crate::{Imported, Kind, Refusal};

/// Name under which its state is stored.
const KEPT_AS: &str = "resilver";
/// Interval of storing it while it runs: about that of commits.
const KEEP_EVERY: Duration = Duration::from_secs(5);

/// The stored state of a resilver.
#[derive(Debug, Serialize, Deserialize)]
struct Kept {
    report: ScrubReport,
    /// Revision of the labels for which the position holds.
    revision: u64,
}

/// Whether spares are to be looked for.
#[derive(Debug, Default)]
pub(crate) struct SpareSearch(bool);

impl JobState for SpareSearch {
    fn runs(&self) -> bool {
        self.0
    }
}

/// The resilver of a pool.
pub struct Resilver {
    pub(crate) job: Job<ScrubReport>,
    /// Activates spares for failed devices.
    pub(crate) spares: Job<SpareSearch>,
    failing: Arc<Failing>,
    pool: Arc<Pool>,
    store: Arc<Store>,
    watch: Arc<Watch>,
    devices: Arc<RwLock<Vec<Arc<Counted>>>>,
    /// Change counter of the devices for which the position holds: it counts as long as no device
    /// has come or gone since.
    changes: AtomicU64,
}

impl Resilver {
    pub(crate) fn new(
        pool: &Arc<Pool>,
        store: &Arc<Store>,
        watch: &Arc<Watch>,
        devices: &Arc<RwLock<Vec<Arc<Counted>>>>,
        failing: &Arc<Failing>,
    ) -> Self {
        let (pool, store, watch, devices, failing) =
            (Arc::clone(pool), Arc::clone(store), Arc::clone(watch), Arc::clone(devices), Arc::clone(failing));
        let changes = AtomicU64::new(0);
        Self { job: Job::default(), spares: Job::default(), failing, pool, store, watch, devices, changes }
    }

    /// Sets the devices to those that the store has now; `new` may be among them.
    pub(crate) fn take_up(&self, new: Vec<Arc<Counted>>) {
        take_up(&self.store, &self.devices, new, &self.failing, &self.watch);
    }

    /// Returns the bytes that were read from all devices.
    pub(crate) fn read(&self) -> u64 {
        self.devices.read().iter().map(|device| device.counts().read_bytes).sum()
    }

    /// Looks for spares in another thread, because a device may have failed.
    pub(crate) fn want_spares(self: &Arc<Self>) {
        let health = self.store.on_devices().map(Disks::health).unwrap_or_default();
        if !health.iter().any(|device| device.role == MemberRole::Spare) {
            return;
        }
        self.spares.lock().0 = true;
        let work = Arc::clone(self);
        let started = self.spares.start(("pool-spares", "look for spares"), move || work.engage_spares());
        if let Err(error) = started {
            tracing::error!(%error, "no spare stands in for a device that may have failed");
        }
    }

    fn engage_spares(self: Arc<Self>) {
        loop {
            // A failure from now on starts another search.
            self.spares.lock().0 = false;
            let engaged = self.store.engage_spares().map_err(|error| error.to_string());
            let begun = engaged.and_then(|engaged| {
                for (number, spare) in &engaged {
                    let devices = self.devices.read();
                    let name = |at: &u16| devices.get(usize::from(*at)).map(|device| device.name().to_owned());
                    let (device, spare) = (name(number).unwrap_or_default(), name(spare).unwrap_or_default());
                    tracing::warn!(device, spare, "a spare stands in for a device");
                    let details = [("vdev_path", spare), ("vdev_replaced", device)];
                    let details = details.map(|(name, value)| (name.to_owned(), value));
                    self.watch.note("sysevent.fs.zfs.vdev_spare", details.to_vec());
                }
                if engaged.is_empty() { Ok(()) } else { self.begin().map_err(|refusal| refusal.to_string()) }
            });
            if let Err(error) = begun {
                tracing::error!(%error, "no spare stands in for a device that may have failed");
            }
            if self.spares.ends() {
                return;
            }
        }
    }

    /// Returns its progress.
    #[must_use]
    pub fn report(&self) -> ScrubReport {
        **self.job.lock()
    }

    /// Returns the name under which its state is stored among the pool's properties.
    #[must_use]
    pub fn kept_as() -> &'static str {
        KEPT_AS
    }

    /// Restores the state that an import finds, before [`Self::begin`]: an interrupted resilver
    /// continues where it was, if no device has changed its state since.
    ///
    /// # Errors
    /// Errors of a commit.
    pub(crate) fn take_up_kept(&self, kept: &str, read_only: bool) -> Result<(), Refusal> {
        // An unreadable state of another version is ignored.
        let Ok(Kept { mut report, revision }) = serde_json::from_str::<Kept>(kept) else { return Ok(()) };
        if report.phase == Phase::Running {
            let Some(disks) = self.store.on_devices().filter(|_| !read_only) else { return Ok(()) };
            if disks.stale().is_empty() {
                // Its last step was to enter the devices as whole in the labels.
                (report.phase, report.ended) = (Phase::Finished, now());
                self.keep(&report, 0)?;
            } else if disks.left_at() != Some(revision) {
                return Ok(());
            }
        }
        **self.job.lock() = report;
        Ok(())
    }

    fn keep(&self, report: &ScrubReport, revision: u64) -> Result<(), PoolError> {
        let kept = serde_json::to_string(&Kept { report: *report, revision });
        let kept = kept.map_err(|error| PoolError::Refused(format!("cannot write down the resilver: {error}")))?;
        self.pool.set_pool_properties(&[(KEPT_AS, Some(&kept))])
    }

    /// Stores the position, unless devices have come or gone since this number of changes.
    fn keep_place(&self, changes: u64) -> Result<(), PoolError> {
        let report = self.report();
        // Data written so far is durable then, and the labels have the state of the devices.
        self.pool.commit()?;
        let Some(disks) = self.store.on_devices() else { return Ok(()) };
        let revision = disks.identity().revision;
        if disks.changes() != changes { Ok(()) } else { self.keep(&report, revision) }
    }

    /// Logs an error: a position that cannot be stored is resilvered again after the next import.
    fn told(&self, kept: Result<(), PoolError>) {
        if let Err(error) = kept {
            tracing::warn!(%error, "how far the resilver is was not kept");
        }
    }

    /// Begins, if any present device may lack data.
    ///
    /// # Errors
    /// No thread can be started.
    pub(crate) fn begin(self: &Arc<Self>) -> Result<(), Refusal> {
        let stale = self.store.on_devices().map(Disks::stale).unwrap_or_default();
        if stale.is_empty() {
            return Ok(());
        }
        {
            let mut state = self.job.lock();
            if state.phase != Phase::Running {
                let total = self.store.space().allocated;
                **state = ScrubReport { phase: Phase::Running, started: now(), total, ..ScrubReport::default() };
                self.watch.note("sysevent.fs.zfs.resilver_start", Vec::new());
            }
        }
        let work = Arc::clone(self);
        self.job.start(("pool-resilver", "resilver"), move || work.run())
    }

    fn run(&self) {
        loop {
            let ended = self.go_through();
            let mut state = self.job.lock();
            match ended {
                // Devices have come or gone meanwhile, or the pool is being released.
                Ok(false) if state.goes_on() => {
                    begin_anew(&mut state);
                    continue;
                }
                Ok(false) => {}
                Ok(true) => {
                    (state.phase, state.ended) = (Phase::Finished, now());
                    let errors = ("errors".to_owned(), state.errors.to_string());
                    self.watch.note("sysevent.fs.zfs.resilver_finish", vec![errors]);
                }
                Err(error) => {
                    (state.phase, state.ended) = (Phase::Canceled, now());
                    tracing::error!(%error, "the resilver has failed");
                    self.watch.note("ereport.fs.zfs.io", vec![("reason".to_owned(), error.to_string())]);
                }
            }
            let report = **state;
            drop(state);
            if report.phase == Phase::Finished {
                self.told(self.keep(&report, 0));
            }
            if self.job.ends() {
                return;
            }
        }
    }

    /// Goes through all segments once, or through the remaining ones; returns whether all devices are whole now.
    fn go_through(&self) -> Result<bool, PoolError> {
        let (stale, changes) = self.store.stale_devices()?;
        if stale.is_empty() {
            return Ok(true);
        }
        if self.changes.swap(changes, Ordering::AcqRel) != changes {
            begin_anew(&mut self.job.lock());
        }
        let ScrubReport { position, repaired, .. } = self.report();
        // Positions are segment numbers.
        let first = self.store.resilver_goes_on(u32::try_from(position).unwrap_or(0));
        self.job.lock().position = first.into();
        if position > 0 {
            // With the labels of this import; and before copies are added that have no data yet.
            self.keep_place(changes)?;
        }
        let written = || {
            let devices = self.devices.read();
            let of = |number: &u16| devices.get(usize::from(*number)).map_or(0, |device| device.counts().written_bytes);
            stale.iter().map(of).sum::<u64>()
        };
        let (mut clock, mut kept, before) = (moment(), moment(), written());
        let since = || repaired + written().saturating_sub(before);
        let mut visit = |checked: &Checked| {
            if let Some(damage) = &checked.damage {
                let device = checked.device.and_then(|device| self.devices.read().get(usize::from(device)).cloned());
                let name = device.as_ref().map_or_else(String::new, |device| device.name().to_owned());
                if checked.mended {
                    // The damage was on a device that should have had everything.
                    device.iter().for_each(|device| device.found_damage());
                    self.watch.mended(checked.name, checked.owner, &name, Some(damage));
                } else {
                    self.watch.damaged(checked.name, checked.owner, &name, Some(damage));
                }
            }
            let mut state = self.job.lock();
            state.examined += checked.bytes;
            state.errors += u64::from(checked.damage.is_some() && !checked.mended);
            state.repaired = since();
            let ran = clock.elapsed().as_millis() as u64;
            if ran > 0 {
                state.elapsed += ran;
                clock = moment();
            }
            state.goes_on()
        };
        let all = self.store.resilver_from(first, &mut visit, &mut |segment| {
            self.job.lock().position = u64::from(segment) + 1;
            if kept.elapsed() >= KEEP_EVERY {
                kept = moment();
                self.told(self.keep_place(changes));
            }
        });
        self.job.lock().repaired = since();
        if !all? {
            // Where devices have come or gone, it starts again.
            self.told(self.keep_place(changes));
            return Ok(false);
        }
        // The content of the log is in segments then.
        self.pool.commit()?;
        self.store.strengthen()?;
        self.pool.commit()?;
        let whole = self.store.resilvered(&stale, changes)?;
        // Replacements have finished.
        self.take_up(Vec::new());
        Ok(whole && self.store.stale_devices()?.0.is_empty())
    }
}

fn begin_anew(report: &mut ScrubReport) {
    (report.position, report.examined, report.errors, report.repaired) = (0, 0, 0, 0);
}

pub(super) fn number_of(pool: &Imported, doing: &str, path: &Path) -> Result<u16, Refusal> {
    let identity = pool.store.identity();
    let devices = pool.devices.read();
    let belongs = identity.members.iter().map(|member| member.state.status.belongs());
    let known = devices.iter().zip(belongs).position(|(device, belongs)| belongs && Path::new(device.name()) == path);
    known.and_then(|number| u16::try_from(number).ok()).ok_or_else(|| {
        Refusal::new(Kind::NotFound, format!("{doing}: no such device in pool"))
            .next(format!("nacre pool status {} lists them", pool.name()))
    })
}

pub(super) fn writable(pool: &Imported, doing: &str) -> Result<(), Refusal> {
    if pool.read_only {
        return Err(Refusal::new(Kind::Permission, format!("{doing}: pool is read only")));
    }
    if let Some(why) = pool.suspended() {
        return Err(Refusal::new(Kind::Io, format!("{doing}: pool I/O is currently suspended: {why}")));
    }
    Ok(())
}

/// Runs `change` while writes to the log are suspended, after commits by which its content is not needed any more.
pub(super) fn without_log(pool: &Imported, change: impl FnOnce() -> Result<(), PoolError>) -> Result<(), PoolError> {
    pool.store.hold_log(true)?;
    let changed = pool.pool.commit().and_then(|_| pool.pool.commit()).and_then(|_| change());
    pool.store.hold_log(false)?;
    changed
}

/// Takes a device offline.
pub(super) fn offline(pool: &Imported, path: &Path) -> Result<(), Refusal> {
    let doing = format!("cannot offline {}", path.display());
    writable(pool, &doing)?;
    let number = number_of(pool, &doing, path)?;
    let is_log = pool.store.on_devices().is_some_and(|disks| disks.is_log_device(number));
    let taken = match is_log {
        // It may be the last log device.
        true => without_log(pool, || pool.store.offline(number)),
        false => pool.store.offline(number),
    };
    taken.map_err(|error| Refusal::pool(doing, &error))?;
    note(pool, "resource.fs.zfs.statechange", path, "OFFLINE");
    Ok(())
}

/// Brings a device online; does nothing where it is in use. Returns whether it was brought online.
pub(super) fn online(pool: &Imported, path: &Path) -> Result<(), Refusal> {
    let doing = format!("cannot online {}", path.display());
    writable(pool, &doing)?;
    let number = number_of(pool, &doing, path)?;
    let health = pool.store.on_devices().map(Disks::health).unwrap_or_default();
    let is_used = |health: &nacre_pool::backend::DeviceHealth| health.status == MemberStatus::Online && !health.absent;
    if health.get(usize::from(number)).is_none_or(is_used) {
        return Ok(());
    }
    // It may still be open here, and is opened again: the file that is there now counts.
    let there = pool.devices.read().get(usize::from(number)).cloned();
    let kept = there.as_ref().filter(|device| device.deleted().is_none() && !device.is_missing());
    let device: Arc<Counted> = match kept {
        Some(device) => Arc::clone(device),
        None => {
            let opened = devices::open(&[path.to_owned()], true)?;
            let opened = opened.into_iter().next().ok_or_else(|| Refusal::new(Kind::NotFound, doing.clone()))?;
            Arc::new(Counted::new(opened, Arc::clone(&pool.failing), Arc::clone(&pool.watch)))
        }
    };
    device.clear_errors();
    if let Err(error) = pool.store.online(number, Arc::clone(&device) as Arc<dyn Device>) {
        let refusal = Refusal::pool(doing, &error);
        if let PoolError::Refused(_) = error {
            let (name, path) = (pool.name(), path.display());
            return Err(refusal
                .next(format!("nacre pool replace {name} {path} makes it a device of the pool; its content is lost")));
        }
        return Err(refusal);
    }
    if let Some(place) = pool.devices.write().get_mut(usize::from(number)) {
        *place = device;
    }
    note(pool, "sysevent.fs.zfs.vdev_online", path, "ONLINE");
    pool.resilver.begin()
}

/// Opens a new device that is to take over the content of another one, or to mirror it.
pub(super) fn fresh_beside(
    pool: &Imported,
    doing: &str,
    number: u16,
    (path, size, force): (&Path, Option<u64>, bool),
) -> Result<(devices::Fresh, Arc<Counted>), Refusal> {
    let least = pool.store.identity().members.get(usize::from(number)).map_or(0, |member| member.length);
    let fresh = devices::fresh(&[path.to_owned()], size, Accepted::forced(force))?;
    fresh.check_size(doing, least / nacre_pool::label::ENDS * nacre_pool::label::ENDS)?;
    fresh.try_writing(doing)?;
    let device = fresh.devices().into_iter().next().ok_or_else(|| Refusal::new(Kind::NotFound, doing))?;
    let device = Arc::new(Counted::new(device, Arc::clone(&pool.failing), Arc::clone(&pool.watch)));
    Ok((fresh, device))
}

/// Replaces a device by another, once that has all its data.
pub(super) fn replace(pool: &Imported, old: &Path, new: &Path, size: Option<u64>, force: bool) -> Result<(), Refusal> {
    let doing = format!("cannot replace {} with {}", old.display(), new.display());
    writable(pool, &doing)?;
    let number = number_of(pool, &doing, old)?;
    let (mut fresh, device) = fresh_beside(pool, &doing, number, (new, size, force))?;
    let guid = (pool.opening.entropy)();
    let replaced = pool.store.replace(number, Arc::clone(&device) as Arc<dyn Device>, guid);
    if !matches!(replaced, Err(PoolError::Refused(_))) {
        fresh.keep(1);
    }
    replaced.map_err(|error| Refusal::pool(doing, &error))?;
    pool.failing.set_redundant();
    pool.resilver.take_up(vec![device]);
    note(pool, "sysevent.fs.zfs.vdev_attach", new, "ONLINE");
    pool.resilver.begin()
}

/// Opens the faulted and the absent devices again; only the `named` one, if given, as in
/// zpool-clear(8). An absent device without a file at its path stays absent (`UNAVAIL` in the
/// status).
///
/// # Errors
/// The first refusal of [`online`], once every device was tried.
pub(super) fn reopen(pool: &Imported, named: Option<&Path>) -> Result<(), Refusal> {
    let health = pool.store.on_devices().map(Disks::health).unwrap_or_default();
    let is_named = |path: &Path| named.is_none_or(|named| named == path);
    let mut paths = Vec::new();
    for (device, health) in pool.devices.read().iter().zip(&health) {
        let path = PathBuf::from(device.name());
        let is_back = health.absent && health.status == MemberStatus::Online && path.exists();
        if is_named(&path) && (health.status == MemberStatus::Faulted || is_back) {
            paths.push(path);
        }
    }
    let mut outcome = Ok(());
    for path in &paths {
        outcome = outcome.and(online(pool, path));
    }
    outcome
}

pub(super) fn note(pool: &Imported, class: &str, path: &Path, state: &str) {
    let details = [("vdev_path", path.display().to_string()), ("vdev_state", state.to_owned())];
    pool.watch.note(class, details.map(|(name, value)| (name.to_owned(), value)).to_vec());
}
