//! Trim by hand (`pool trim`): discards the free space of block devices, and punches holes into
//! files. In the background: started, suspended, resumed, canceled, waited for. `autotrim` does the
//! same with space that is freed from then on.
//!
//! Its state belongs to this import: after the next one it starts again. Invariants: one thread in
//! all, one device after the other; trimmed space is free in every state of the pool to which it
//! could be rolled back.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use nacre_pool::device::Device;
use nacre_pool::store::Store;
use parking_lot::RwLock;
use serde::{Deserialize, Serialize};

use super::Phase;
use crate::clock::{moment, now};
use crate::counted::Counted;
use crate::job::{Job, JobState};
use crate::watch::Watch;
use crate::{Kind, Refusal};

/// Progress of a trim of a device. Times in seconds since 1970, sizes in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrimReport {
    /// Its phase.
    pub phase: Phase,
    /// When it was started.
    pub started: u64,
    /// When it ended, or was suspended.
    pub ended: u64,
    /// Size of the device.
    pub total: u64,
    /// Position on the device.
    pub passed: u64,
    /// Trimmed bytes.
    pub trimmed: u64,
    /// Limit in bytes a second; 0: none.
    pub rate: u64,
    /// The device does not support it.
    pub unsupported: bool,
}

/// A command to the trim job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TrimOrder {
    /// Start, or resume; with a limit in bytes a second (0: none).
    Start {
        /// The limit.
        rate: u64,
    },
    /// Stop for now.
    Suspend,
    /// End.
    Cancel,
}

/// Progress on all devices.
#[derive(Debug, Default)]
pub(crate) struct TrimState {
    /// Report and next slot of each device, by its number in the pool.
    devices: HashMap<u16, (TrimReport, u32)>,
}

impl JobState for TrimState {
    fn runs(&self) -> bool {
        self.running().is_some()
    }
}

impl TrimState {
    fn running(&self) -> Option<u16> {
        self.devices.iter().filter(|(_, (report, _))| report.phase == Phase::Running).map(|(device, _)| *device).min()
    }
}

/// The trim job of a pool.
pub struct Trim {
    pub(crate) job: Job<TrimState>,
    store: Arc<Store>,
    watch: Arc<Watch>,
    devices: Arc<RwLock<Vec<Arc<Counted>>>>,
}

impl Trim {
    pub(crate) fn new(store: &Arc<Store>, watch: &Arc<Watch>, devices: &Arc<RwLock<Vec<Arc<Counted>>>>) -> Self {
        let (store, watch, devices) = (Arc::clone(store), Arc::clone(watch), Arc::clone(devices));
        Self { job: Job::default(), store, watch, devices }
    }

    /// Returns the progress on a device.
    #[must_use]
    pub fn report(&self, device: u16) -> TrimReport {
        self.job.lock().devices.get(&device).map(|(report, _)| *report).unwrap_or_default()
    }

    /// Carries out a command for devices of the pool of this name, by their paths; none: all.
    ///
    /// # Errors
    /// A device that does not exist; one that is trimmed already, or is not; in ZFS' words.
    pub fn order(self: &Arc<Self>, name: &str, paths: &[std::path::PathBuf], order: TrimOrder) -> Result<(), Refusal> {
        let lengths: Vec<(String, u64)> =
            self.devices.read().iter().map(|device| (device.name().to_owned(), device.length())).collect();
        let mut wanted = Vec::new();
        for (place, (path, length)) in lengths.iter().enumerate() {
            if paths.is_empty() || paths.iter().any(|named| named.as_os_str() == path.as_str()) {
                wanted.push((u16::try_from(place).unwrap_or(u16::MAX), path.as_str(), *length));
            }
        }
        if let Some(other) =
            paths.iter().find(|path| !lengths.iter().any(|(known, _)| path.as_os_str() == known.as_str()))
        {
            let refusal =
                Refusal::new(Kind::NotFound, format!("cannot trim '{}': no such device in pool", other.display()));
            return Err(refusal.next(format!("nacre pool status {name} lists them")));
        }
        let mut state = self.job.lock();
        // All of the given devices or none.
        let is = |state: &TrimState, device: u16| {
            state.devices.get(&device).map_or(Phase::Never, |(report, _)| report.phase)
        };
        for (device, path, _) in &wanted {
            let refused = match (order, is(&state, *device)) {
                (TrimOrder::Start { .. }, Phase::Running) => Some((Kind::Busy, "currently trimming")),
                (TrimOrder::Suspend, Phase::Running) | (TrimOrder::Start { .. }, _) => None,
                (TrimOrder::Cancel, Phase::Running | Phase::Paused) => None,
                (TrimOrder::Suspend | TrimOrder::Cancel, _) => Some((Kind::Invalid, "there is no active trim")),
            };
            if let Some((kind, why)) = refused {
                let verb = if matches!(order, TrimOrder::Cancel) { "cancel trimming" } else { "trim" };
                return Err(Refusal::new(kind, format!("cannot {verb} '{path}': {why}")));
            }
        }
        for (device, path, length) in wanted {
            let (report, next) = state.devices.entry(device).or_default();
            let event = match order {
                TrimOrder::Start { rate } => {
                    if report.phase != Phase::Paused {
                        (*report, *next) = (TrimReport { started: now(), total: length, ..TrimReport::default() }, 0);
                    }
                    (report.phase, report.rate) = (Phase::Running, rate);
                    "sysevent.fs.zfs.trim_start"
                }
                TrimOrder::Suspend => {
                    (report.phase, report.ended) = (Phase::Paused, now());
                    "sysevent.fs.zfs.trim_suspend"
                }
                TrimOrder::Cancel => {
                    (report.phase, report.ended) = (Phase::Canceled, now());
                    "sysevent.fs.zfs.trim_cancel"
                }
            };
            self.watch.note(event, vec![("vdev_path".to_owned(), path.to_owned())]);
        }
        drop(state);
        self.job.tell();
        let work = Arc::clone(self);
        self.job.start(("pool-trim", "trim"), move || work.run())
    }

    fn run(&self) {
        loop {
            let next = {
                let state = self.job.lock();
                let next = state.running().filter(|_| state.goes_on());
                next.and_then(|device| state.devices.get(&device).map(|(report, from)| (device, *from, report.rate)))
            };
            let Some((device, from, rate)) = next else {
                if self.job.ends() {
                    return;
                }
                continue;
            };
            let began = moment();
            let told = self.store.trim_free(device, from);
            let step = told.as_ref().map_or(0, |told| told.bytes);
            let known = self.devices.read().get(usize::from(device)).cloned();
            let takes = known.as_ref().is_none_or(|device| device.can_discard());
            let name = known.map_or_else(String::new, |device| device.name().to_owned());
            let mut state = self.job.lock();
            let Some((report, next)) = state.devices.get_mut(&device) else { continue };
            let ended = match told {
                Ok(_) if !takes => {
                    report.unsupported = true;
                    Some((Phase::Canceled, "trim operations are not supported by this device".to_owned()))
                }
                Ok(told) => {
                    report.trimmed += told.bytes;
                    // If it was started again meanwhile, it begins at the beginning.
                    if *next == from {
                        *next = told.next.unwrap_or(from);
                        report.passed = u64::from(*next).saturating_mul(self.store.slot()).min(report.total);
                    }
                    told.next.is_none().then_some((Phase::Finished, String::new()))
                }
                Err(error) => Some((Phase::Canceled, error.to_string())),
            };
            let (bytes, phase_now) = (report.trimmed, report.phase);
            if let Some((phase, why)) = ended
                && phase_now == Phase::Running
            {
                (report.phase, report.ended) = (phase, now());
                if phase == Phase::Finished {
                    report.passed = report.total;
                }
                drop(state);
                let event = if phase == Phase::Finished {
                    "sysevent.fs.zfs.trim_finish"
                } else {
                    "sysevent.fs.zfs.trim_cancel"
                };
                let mut details = vec![("vdev_path".to_owned(), name), ("bytes".to_owned(), bytes.to_string())];
                if !why.is_empty() {
                    details.push(("reason".to_owned(), why));
                }
                self.watch.note(event, details);
                self.job.tell();
            } else if rate > 0 {
                // For as long as this step may take at this rate.
                let until =
                    began + Duration::from_millis((u128::from(step) * 1000 / u128::from(rate)).min(3_600_000) as u64);
                self.job.rest(&mut state, Some(until), |state| !state.leaving() && state.running() == Some(device));
            }
        }
    }

    /// Checks that the devices support trimming.
    ///
    /// # Errors
    /// A device that does not.
    pub fn supported(&self) -> Result<(), Refusal> {
        let devices = self.devices.read();
        let mut places = devices.iter().enumerate();
        match places.find(|(place, _)| self.report(u16::try_from(*place).unwrap_or(u16::MAX)).unsupported) {
            Some((_, device)) => Err(Refusal::new(
                Kind::Invalid,
                format!("cannot trim '{}': trim operations are not supported by this device", device.name()),
            )),
            None => Ok(()),
        }
    }
}
