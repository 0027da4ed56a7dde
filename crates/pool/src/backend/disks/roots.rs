//! Root records and identities in the labels of devices, and the syncs between them.
//!
//! Caller: the store, by [`Backend`](super::super::Backend). A root's record is durable after the
//! first of its two rounds; the second is made durable by the sync that the next commit begins
//! with, so that it costs none. In groups it is durable on all devices of the first group that hold
//! roots and are used: as many of them may be lost as of the group.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Again, Devices, Disks, NewestRoot, Result};
use crate::device::{Device, failed};
use crate::error::PoolError;
use crate::label::{self, Identity, Root, Round};

/// Devices and their numbers.
type Numbered = Vec<(Arc<dyn Device>, u16)>;

impl Disks {
    /// Writes the first round of a root record, syncs that, and writes the second.
    pub(super) fn write_root(&self, root: &Root) -> Result<()> {
        let record = root.encode()?;
        let written = self.write_round(self.holding_roots(), root.generation, &record, Round::First)?;
        let written = self.sync_each(&written)?;
        self.write_round(written, root.generation, &record, Round::Second).map(drop)
    }

    /// The devices that hold roots, as far as they are used.
    fn holding_roots(&self) -> Numbered {
        let layout = self.layout();
        let devices = self.devices.read();
        let numbers = layout.holding_roots().into_iter().filter(|number| layout.works(*number));
        numbers.filter_map(|number| Some((Arc::clone(devices.get(usize::from(number))?), number))).collect()
    }

    /// The same without those that may be older than the others.
    fn telling_roots(&self) -> Devices {
        let layout = self.layout();
        let whole = self.holding_roots().into_iter().filter(|(_, number)| layout.has_all(*number));
        whole.map(|(device, _)| device).collect()
    }

    /// Syncs devices, all at once; answers those that are used still.
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
                // Nobody knows what it holds now.
                Err(error) => self.lose(*number, &error).inspect_err(|error| {
                    self.tell_needed(*number, error, None);
                })?,
            }
        }
        Ok(left)
    }

    /// Writes a round of a root record; answers where it could be written. One device that has it
    /// is enough to find it: an import looks at all, and wants all of them.
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

    /// Makes the rings of root records whole, so that the roots from the next on are guarded
    /// ([`Root::guarded`]). What a device refuses is passed over where another one takes it.
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

    /// A device has failed to write what others have as well. Answers whether it was written in the end.
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

    /// Verifies every copy of the identity and of the root records.
    pub(super) fn scrub_labels(&self, identity: &Identity) -> Result<Vec<u64>> {
        let devices = Arc::clone(&self.devices.read());
        let layout = self.layout();
        // In groups the labels say more than the store knows.
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
            }
        }
        Ok(mended)
    }
}

/// Syncs devices, all at once.
pub(super) fn sync_all(devices: &[Arc<dyn Device>]) -> Result<()> {
    let sync = |device: &Arc<dyn Device>| device.sync().map_err(|error| failed(&**device, "syncing", error));
    if let [device] = devices {
        return sync(device);
    }
    sync_them(devices.iter()).into_iter().collect::<Result<Vec<()>>>().map(drop)
}

fn sync_them<'a>(devices: impl Iterator<Item = &'a Arc<dyn Device>>) -> Vec<Result<()>> {
    let sync = |device: &Arc<dyn Device>| device.sync().map_err(|error| failed(&**device, "syncing", error));
    std::thread::scope(|scope| {
        let running: Vec<_> = devices.map(|device| scope.spawn(move || sync(device))).collect();
        let lost = || Err(PoolError::Refused("a thread that synced a device is gone".to_owned()));
        running.into_iter().map(|thread| thread.join().unwrap_or_else(|_| lost())).collect()
    })
}
