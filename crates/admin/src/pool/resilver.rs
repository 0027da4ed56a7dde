//! Devices of groups: taken offline, brought back, replaced; and making them whole in the
//! background, which goes on at the next import where it was interrupted.
//!
//! Its state is kept among the pool's properties (under a name that is none of them).
//!
//! Callers: the verbs, and imports that find a device which may lack something. Invariants:
//! - One resilver at a time; a device counts as whole only when one has come to its end since it was
//!   there, and a commit after that.
//! - What is kept of how far it is was durable on the devices before, and counts only as long as nothing
//!   has become of any device since: the labels have the revision that was kept with it.

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

/// The name under which its state is kept.
const KEPT_AS: &str = "resilver";
/// How often it is kept while it runs: about as often as there are commits.
const KEEP_EVERY: Duration = Duration::from_secs(5);

/// What is kept of it.
#[derive(Debug, Serialize, Deserialize)]
struct Kept {
    report: ScrubReport,
    /// The revision of the labels by which it is that far.
    revision: u64,
}

/// Whether spares may be wanted.
#[derive(Debug, Default)]
pub(crate) struct SpareSearch(bool);

impl JobState for SpareSearch {
    fn runs(&self) -> bool {
        self.0
    }
}

/// The resilver of a pool, and what it works on.
pub struct Resilver {
    pub(crate) job: Job<ScrubReport>,
    /// Has spares stand in for devices that fail.
    pub(crate) spares: Job<SpareSearch>,
    failing: Arc<Failing>,
    pool: Arc<Pool>,
    store: Arc<Store>,
    watch: Arc<Watch>,
    devices: Arc<RwLock<Vec<Arc<Counted>>>>,
    /// How far it is counts as long as no device has come or gone since this number of changes.
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

    /// The devices are those that the store has now; these may be among them.
    pub(crate) fn take_up(&self, new: Vec<Arc<Counted>>) {
        take_up(&self.store, &self.devices, new, &self.failing, &self.watch);
    }

    /// What was read of all devices, bytes.
    pub(crate) fn read(&self) -> u64 {
        self.devices.read().iter().map(|device| device.counts().read_bytes).sum()
    }

    /// A device may have failed: spares are looked for, by another thread.
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
            // Who comes from now on is looked at once more.
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

    /// How far it is.
    #[must_use]
    pub fn report(&self) -> ScrubReport {
        **self.job.lock()
    }

    /// The name under which its state is kept among the pool's properties.
    #[must_use]
    pub fn kept_as() -> &'static str {
        KEPT_AS
    }

    /// Takes up what an import finds, before [`Self::begin`]: one that was interrupted goes on where it
    /// was, if nothing has become of the devices since.
    ///
    /// # Errors
    /// Those of a commit.
    pub(crate) fn take_up_kept(&self, kept: &str, read_only: bool) -> Result<(), Refusal> {
        // A state that another version has written is not worth failing for.
        let Ok(Kept { mut report, revision }) = serde_json::from_str::<Kept>(kept) else { return Ok(()) };
        if report.phase == Phase::Running {
            let Some(disks) = self.store.on_devices().filter(|_| !read_only) else { return Ok(()) };
            if disks.stale().is_empty() {
                // The last that it did was to have the labels say so.
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

    /// Keeps how far it is, unless devices have come or gone since this number of changes.
    fn keep_place(&self, changes: u64) -> Result<(), PoolError> {
        let report = self.report();
        // What was written so far is durable then, and the labels say how the devices are.
        self.pool.commit()?;
        let Some(disks) = self.store.on_devices() else { return Ok(()) };
        let revision = disks.identity().revision;
        if disks.changes() != changes { Ok(()) } else { self.keep(&report, revision) }
    }

    /// What cannot be kept is done again after the next import.
    fn told(&self, kept: Result<(), PoolError>) {
        if let Err(error) = kept {
            tracing::warn!(%error, "how far the resilver is was not kept");
        }
    }

    /// Begins, if any device that is there may lack something.
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
                // Devices have come or gone meanwhile, or the pool is being left.
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

    /// Goes through everything once, or through what is left of it; answers whether all devices are
    /// whole now.
    fn go_through(&self) -> Result<bool, PoolError> {
        let (stale, changes) = self.store.stale_devices()?;
        if stale.is_empty() {
            return Ok(true);
        }
        if self.changes.swap(changes, Ordering::AcqRel) != changes {
            begin_anew(&mut self.job.lock());
        }
        let ScrubReport { position, repaired, .. } = self.report();
        // Its positions are numbers of segments.
        let first = self.store.resilver_goes_on(u32::try_from(position).unwrap_or(0));
        self.job.lock().position = first.into();
        if position > 0 {
            // By the labels of this import; and before copies are added that have nothing yet.
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
                    // It was wrong on a device that should have had everything.
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
            // Where devices have come or gone, it begins anew.
            self.told(self.keep_place(changes));
            return Ok(false);
        }
        // What the log has is in segments then.
        self.pool.commit()?;
        self.store.strengthen()?;
        self.pool.commit()?;
        let whole = self.store.resilvered(&stale, changes)?;
        // Those that were to replace others have done so.
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

/// Does something while nobody writes to the log, and nothing of what is there is needed any more.
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
        // It may be the last of them.
        true => without_log(pool, || pool.store.offline(number)),
        false => pool.store.offline(number),
    };
    taken.map_err(|error| Refusal::pool(doing, &error))?;
    note(pool, "resource.fs.zfs.statechange", path, "OFFLINE");
    Ok(())
}

/// Brings a device back; nothing where it is in use. Answers whether it was brought.
pub(super) fn online(pool: &Imported, path: &Path) -> Result<(), Refusal> {
    let doing = format!("cannot online {}", path.display());
    writable(pool, &doing)?;
    let number = number_of(pool, &doing, path)?;
    let health = pool.store.on_devices().map(Disks::health).unwrap_or_default();
    let is_used = |health: &nacre_pool::backend::DeviceHealth| health.status == MemberStatus::Online && !health.absent;
    if health.get(usize::from(number)).is_none_or(is_used) {
        return Ok(());
    }
    // It may be open here still, and is opened anew: what is there now counts.
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

/// A new device that is to hold what another one holds.
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

/// Puts another device in the place of one, once it has everything.
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

/// Opens the faulted and the absent devices again; only the `named` one, where there is one, as zpool-clear(8) does. An absent
/// device without a file at its path stays absent (`UNAVAIL` in the status).
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
