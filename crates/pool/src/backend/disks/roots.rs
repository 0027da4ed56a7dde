//! Root records and identities in the labels of devices, and the syncs between them.
//!
//! Caller: the store, by [`Backend`](super::super::Backend). A root record (like ZFS' uberblock) is written in two
//! rounds and durable after the first; the second is made durable by the sync that the next commit begins with, so
//! that it costs none. In groups the root is durable on all usable devices of the first group that hold roots, so
//! that as many of them may be lost as the group can lose.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Again, Devices, Disks, NewestRoot, Result};
use crate::device::{Device, failed};
use crate::error::PoolError;
use crate::label::{self, Identity, Root, Round};
use crate::workers;

/// Devices with their numbers.
type Numbered = Vec<(Arc<dyn Device>, u16)>;

impl Disks {
    /// Writes the first round of a root record, syncs it, and writes the second.
    pub(super) fn write_root(&self, root: &Root) -> Result<()> {
        let record = root.encode()?;
        let written = self.write_round(self.holding_roots(), root.generation, &record, Round::First)?;
        let written = self.sync_each(&written)?;
        self.write_round(written, root.generation, &record, Round::Second).map(drop)
    }

    /// The usable devices that hold roots.
    fn holding_roots(&self) -> Numbered {
        let layout = self.layout();
        let devices = self.devices.read();
        let numbers = layout.holding_roots().into_iter().filter(|number| layout.works(*number));
        numbers.filter_map(|number| Some((Arc::clone(devices.get(usize::from(number))?), number))).collect()
    }

    /// The usable devices that hold roots and are not stale.
    fn telling_roots(&self) -> Devices {
        let layout = self.layout();
        let whole = self.holding_roots().into_iter().filter(|(_, number)| layout.has_all(*number));
        whole.map(|(device, _)| device).collect()
    }

    /// Syncs devices in parallel; returns those that are still usable.
    pub(super) fn sync_each(&self, devices: &[(Arc<dyn Device>, u16)]) -> Result<Numbered> {
        if self.layout().is_plain() {
            sync_all(&devices.iter().map(|(device, _)| Arc::clone(device)).collect::<Vec<_>>())?;
            return Ok(devices.to_vec());
        }
        let mut left = Vec::with_capacity(devices.len());
        let synced = sync_them(devices.iter().map(|(device, _)| device));
        for ((device, number), synced) in devices.iter().zip(synced) {
            match synced {
                Ok(()) => left.push((Arc::clone(device), *number)),
                // It is unknown what the device holds now.
                Err(error) => self.lose(*number, &error).inspect_err(|error| {
                    self.tell_needed(*number, error, None);
                })?,
            }
        }
        Ok(left)
    }

    /// Writes one round of a root record; returns the devices where it succeeded. One device with the record is
    /// enough: an import reads all devices, and requires all of them.
    fn write_round(&self, labels: Numbered, generation: u64, record: &[u8], round: Round) -> Result<Numbered> {
        let (mut written, mut failed) = (Vec::new(), Ok(()));
        for (device, number) in labels {
            let write = || label::write_root(&*device, generation, record, round);
            match write() {
                Ok(()) => written.push((device, number)),
                Err(error) => match self.pass_over(number, &error, Some(&write))? {
                    true => written.push((device, number)),
                    false => failed = Err(error),
                },
            }
        }
        if written.is_empty() { failed.map(|()| written) } else { Ok(written) }
    }

    /// Completes the rings of root records, so that later roots are guarded ([`Root::guarded`]). A device that fails
    /// is ignored where another one succeeds.
    pub(super) fn guard_rings(&self) -> Result<bool> {
        let holding = self.holding_roots();
        let devices: Devices = holding.iter().map(|(device, _)| Arc::clone(device)).collect();
        let (mut whole, mut failed) = (false, Ok(()));
        for ((_, number), mended) in holding.iter().zip(label::mend_rings(&devices, self.pool)) {
            match mended {
                Ok(_) => whole = true,
                Err(error) => {
                    self.pass_over(*number, &error, None)?;
                    failed = Err(error);
                }
            }
        }
        if whole { Ok(true) } else { failed.map(|()| false) }
    }

    /// Handles a failed write of a label that other devices have as well. Returns whether a retry succeeded.
    fn pass_over(&self, device: u16, error: &PoolError, again: Option<Again<'_>>) -> Result<bool> {
        let layout = self.layout();
        if layout.is_single(device) {
            let made = !layout.is_plain() && again.is_some() && self.tell_needed(device, error, again);
            if !made {
                self.avoid(device, error);
            }
            return Ok(made);
        }
        match again {
            Some(again) => self.lose_or_write(device, error, again),
            None => self.lose(device, error).map(|()| false),
        }
    }

    pub(super) fn all_roots(&self) -> Result<BTreeMap<u64, Root>> {
        let mut all = BTreeMap::new();
        let (devices, grouped) = (self.telling_roots(), !self.layout().is_plain());
        let mut failed = None;
        for device in &devices {
            match label::roots(&**device, self.pool) {
                Ok(roots) => all.extend(roots.into_iter().map(|root| (root.generation, root))),
                Err(error) if grouped => failed = Some(error),
                Err(error) => return Err(error),
            }
        }
        failed.filter(|_| all.is_empty()).map_or(Ok(all), Err)
    }

    pub(super) fn find_newest_root(&self) -> Result<Option<NewestRoot>> {
        let Some((_, root)) = self.all_roots()?.pop_last() else { return Ok(None) };
        let lost = label::lost(&self.telling_roots(), &root);
        Ok(Some(NewestRoot { root, lost }))
    }

    /// Verifies all copies of the identity and of the root records, and rewrites damaged ones.
    pub(super) fn scrub_labels(&self, identity: &Identity) -> Result<Vec<u64>> {
        let devices = Arc::clone(&self.devices.read());
        let layout = self.layout();
        // In groups the labels record more than the store knows.
        let identity = if layout.is_plain() { identity.clone() } else { self.identity() };
        let holding = self.holding_roots();
        let rings =
            label::mend_rings(&holding.iter().map(|(device, _)| Arc::clone(device)).collect::<Vec<_>>(), self.pool);
        let mut mended = vec![0; devices.len()];
        for ((_, number), ring) in holding.iter().zip(rings) {
            if let Some(mended) = mended.get_mut(usize::from(*number)) {
                *mended += ring?;
            }
        }
        for (number, (device, mended)) in devices.iter().zip(&mut mended).enumerate() {
            let index = u16::try_from(number).map_err(|_| PoolError::Refused("too many devices".to_owned()))?;
            if layout.works(index) {
                *mended += label::mend_identity(&**device, &Identity { index, ..identity.clone() })?;
                *mended += self.mend_erasable(&**device)?;
            }
        }
        Ok(mended)
    }
}

/// Syncs devices in parallel.
pub(super) fn sync_all(devices: &[Arc<dyn Device>]) -> Result<()> {
    let sync = |device: &Arc<dyn Device>| device.sync().map_err(|error| failed(&**device, "syncing", error));
    if let [device] = devices {
        return sync(device);
    }
    sync_them(devices.iter()).into_iter().collect::<Result<Vec<()>>>().map(drop)
}

fn sync_them<'a>(devices: impl Iterator<Item = &'a Arc<dyn Device>>) -> Vec<Result<()>> {
    let sync = |device: &Arc<dyn Device>| device.sync().map_err(|error| failed(&**device, "syncing", error));
    workers::in_threads(&devices.collect::<Vec<_>>(), |device| sync(device))
}
