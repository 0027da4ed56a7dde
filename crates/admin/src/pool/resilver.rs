//! Devices of groups: taken offline, brought back, replaced; and making them whole in the
//! background, which goes on at the next import where it was interrupted.
//!
//! Callers: the verbs, and imports that find a device which may lack something. Invariant: one
//! resilver at a time; a device counts as whole only when one has come to its end since it was there,
//! and a commit after that.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use nacre_pool::PoolError;
use nacre_pool::device::Device;
use nacre_pool::engine::Pool;
use nacre_pool::label::{MemberRole, MemberStatus};
use nacre_pool::store::{Checked, Store};
use parking_lot::RwLock;

use super::devices;
use super::scrub::{Phase, ScrubReport};
use crate::clock::{moment, now};
use crate::counted::Counted;
use crate::failing::Failing;
use crate::imported::take_up;
use crate::job::{Job, JobState};
use crate::watch::Watch;
use crate::{Imported, Kind, Refusal};

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
        Self { job: Job::default(), spares: Job::default(), failing, pool, store, watch, devices }
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
        let health = self.store.on_devices().map(nacre_pool::backend::Disks::health).unwrap_or_default();
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

    /// Begins, if any device that is there may lack something.
    ///
    /// # Errors
    /// No thread can be started.
    pub(crate) fn begin(self: &Arc<Self>) -> Result<(), Refusal> {
        let stale = self.store.on_devices().map(nacre_pool::backend::Disks::stale).unwrap_or_default();
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
                    (state.examined, state.errors) = (0, 0);
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
            drop(state);
            if self.job.ends() {
                return;
            }
        }
    }

    /// Goes through everything once; answers whether all devices are whole now.
    fn go_through(&self) -> Result<bool, PoolError> {
        let (stale, changes) = self.store.stale_devices()?;
        if stale.is_empty() {
            return Ok(true);
        }
        let written = || {
            let devices = self.devices.read();
            let of = |number: &u16| devices.get(usize::from(*number)).map_or(0, |device| device.counts().written_bytes);
            stale.iter().map(of).sum::<u64>()
        };
        let (mut clock, before) = (moment(), written());
        let mut visit = |checked: &Checked| {
            if let Some(damage) = checked.damage.as_ref().filter(|_| !checked.mended) {
                let name = self.devices.read().get(usize::from(checked.device)).map(|device| device.name().to_owned());
                self.watch.damaged(checked.name, checked.owner, &name.unwrap_or_default(), Some(damage));
            }
            let mut state = self.job.lock();
            state.examined += checked.bytes;
            state.errors += u64::from(checked.damage.is_some() && !checked.mended);
            state.repaired = written().saturating_sub(before);
            let ran = clock.elapsed().as_millis() as u64;
            if ran > 0 {
                state.elapsed += ran;
                clock = moment();
            }
            state.goes_on()
        };
        if !self.store.resilver(&mut visit, &mut |_| {})? {
            return Ok(false);
        }
        self.job.lock().repaired = written().saturating_sub(before);
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

/// Takes a device offline.
pub(super) fn offline(pool: &Imported, path: &Path) -> Result<(), Refusal> {
    let doing = format!("cannot offline {}", path.display());
    writable(pool, &doing)?;
    let number = number_of(pool, &doing, path)?;
    pool.store.offline(number).map_err(|error| Refusal::pool(doing, &error))?;
    note(pool, "resource.fs.zfs.statechange", path, "OFFLINE");
    Ok(())
}

/// Brings a device back; nothing where it is in use. Answers whether it was brought.
pub(super) fn online(pool: &Imported, path: &Path) -> Result<(), Refusal> {
    let doing = format!("cannot online {}", path.display());
    writable(pool, &doing)?;
    let number = number_of(pool, &doing, path)?;
    let health = pool.store.on_devices().map(nacre_pool::backend::Disks::health).unwrap_or_default();
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
    let brought = pool.store.online(number, Arc::clone(&device) as Arc<dyn Device>);
    brought.map_err(|error| Refusal::pool(doing, &error))?;
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
    let fresh = devices::fresh(&[path.to_owned()], size, force)?;
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
    replaced.map_err(|error| Refusal::pool(doing, &error))?;
    fresh.keep(1);
    pool.failing.set_redundant();
    pool.resilver.take_up(vec![device]);
    note(pool, "sysevent.fs.zfs.vdev_attach", new, "ONLINE");
    pool.resilver.begin()
}

/// Devices that failed are tried again.
pub(super) fn try_again(pool: &Imported) -> Result<(), Refusal> {
    let health = pool.store.on_devices().map(nacre_pool::backend::Disks::health).unwrap_or_default();
    let paths: Vec<PathBuf> = pool
        .devices
        .read()
        .iter()
        .zip(&health)
        .filter(|(_, health)| health.status == MemberStatus::Faulted)
        .map(|(device, _)| PathBuf::from(device.name()))
        .collect();
    paths.iter().try_for_each(|path| online(pool, path))
}

pub(super) fn note(pool: &Imported, class: &str, path: &Path, state: &str) {
    let details = [("vdev_path", path.display().to_string()), ("vdev_state", state.to_owned())];
    pool.watch.note(class, details.map(|(name, value)| (name.to_owned(), value)).to_vec());
}
