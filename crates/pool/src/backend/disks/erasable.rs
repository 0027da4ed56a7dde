//! Erasable keys in the labels of devices.
//!
//! Callers: the store, by [`ErasableKeys`]; writes of identities, which bring the keys to each device
//! that joins or returns; scrubs. Invariants:
//! - Every write to a device writes the newest keys that this process knows, under the lock of them: a device never gets
//!   older ones back.
//! - A device that joins, or that returns, has the newest keys before its label counts it as a part of the pool.
//! - Pools without sealed frames have no such keys, and nothing is read or written for them.

use std::sync::Arc;

use parking_lot::MutexGuard;

use super::{Disks, ErasableKeys, Result};
use crate::crypt::SecretKey;
use crate::device::Device;
use crate::error::PoolError;
use crate::label::{self, ErasableBlock, Identity};

/// The keys as the labels have them.
#[derive(Default)]
pub(super) enum ErasableState {
    /// They were not read yet.
    #[default]
    Unread,
    /// They were read or written by this process; `None` where no label has any.
    Known(Option<ErasableBlock>),
}

impl ErasableState {
    fn block(&self) -> Option<&ErasableBlock> {
        match self {
            Self::Unread => None,
            Self::Known(block) => block.as_ref(),
        }
    }
}

/// Copies of keys.
fn copies(keys: &[(u64, SecretKey)]) -> Vec<(u64, SecretKey)> {
    keys.iter().map(|(sequence, key)| (*sequence, key.copy())).collect()
}

impl Disks {
    /// The erasable keys, which are read from the usable devices at first: the newest block counts.
    fn erasable_state(&self) -> Result<MutexGuard<'_, ErasableState>> {
        let mut state = self.erasable.lock();
        if matches!(*state, ErasableState::Known(_)) {
            return Ok(state);
        }
        if self.identity.lock().incompatible & Identity::UNFINISHED_ENCRYPTION == 0 {
            // Not noted as known: the feature may be enabled later.
            return Ok(state);
        }
        let devices = Arc::clone(&self.devices.read());
        let layout = self.layout();
        let (mut best, mut failed, mut read) = (None::<ErasableBlock>, None, false);
        for (index, device) in (0..).zip(devices.iter()) {
            if !layout.works(index) {
                continue;
            }
            match label::read_erasable(&**device) {
                Ok(Some(found)) if best.as_ref().is_none_or(|best| best.revision < found.revision) => {
                    (best, read) = (Some(found), true);
                }
                Ok(_) => read = true,
                Err(error) => failed = Some(error),
            }
        }
        match failed {
            Some(error) if !read => Err(error),
            _ => {
                *state = ErasableState::Known(best);
                Ok(state)
            }
        }
    }

    fn replace_block(&self, change: impl FnOnce(&mut Vec<(u64, SecretKey)>) -> Result<()>) -> Result<()> {
        let mut state = self.erasable_state()?;
        let mut keys = state.block().map(|block| copies(&block.keys)).unwrap_or_default();
        change(&mut keys)?;
        let revision = state.block().map_or(0, |block| block.revision) + 1;
        *state = ErasableState::Known(Some(ErasableBlock { revision, keys }));
        Ok(())
    }

    /// Writes the newest keys to all usable devices, and zeroes those at the former ends of longer ones.
    fn write_blocks(&self) -> Result<()> {
        let devices = Arc::clone(&self.devices.read());
        let layout = self.layout();
        let lengths: Vec<u64> = self.identity.lock().members.iter().map(|member| member.length).collect();
        for (index, device) in (0..).zip(devices.iter()) {
            if !layout.works(index) {
                continue;
            }
            let former = lengths.get(usize::from(index)).copied().unwrap_or_default();
            let write = || {
                self.write_block(&**device)?;
                label::clear_former_end(&**device, former)
            };
            let Err(error) = write() else { continue };
            if layout.is_plain() {
                return Err(error);
            }
            self.lose_or_write(index, &error, &write)?;
        }
        self.write_labels()
    }

    fn write_block(&self, device: &dyn Device) -> Result<()> {
        match self.erasable_state()?.block() {
            Some(block) => label::write_erasable(device, block),
            None => Ok(()),
        }
    }

    /// Brings the newest keys to a device, if it has others; returns the number of rewritten copies.
    pub fn mend_erasable(&self, device: &dyn Device) -> Result<u64> {
        match self.erasable_state()?.block() {
            Some(block) => label::mend_erasable(device, block),
            None => Ok(0),
        }
    }
}

impl ErasableKeys for Disks {
    fn keys(&self) -> Result<Vec<(u64, SecretKey)>> {
        let state = self.erasable_state()?;
        Ok(state.block().map(|block| copies(&block.keys)).unwrap_or_default())
    }

    fn add(&self, key: &SecretKey) -> Result<u64> {
        let mut sequence = 1;
        self.replace_block(|keys| {
            if keys.len() > 1 {
                return Err(PoolError::Refused("a renewal of the pool's erasable key is not finished".to_owned()));
            }
            if let Some((last, _)) = keys.last() {
                sequence = last.saturating_add(1);
            }
            keys.push((sequence, key.copy()));
            Ok(())
        })?;
        self.write_blocks()?;
        Ok(sequence)
    }

    fn keep(&self, sequence: u64) -> Result<Vec<String>> {
        self.replace_block(|keys| {
            if !keys.iter().any(|(there, _)| *there == sequence) {
                return Err(PoolError::Refused("the pool's erasable key is not there".to_owned()));
            }
            keys.retain(|(there, _)| *there == sequence);
            Ok(())
        })?;
        self.write_blocks()?;
        let (layout, devices) = (self.layout(), Arc::clone(&self.devices.read()));
        let has_not = |index: u16| {
            layout.standing(index).is_some_and(|standing| standing.status.belongs()) && !layout.works(index)
        };
        let left = (0..).zip(devices.iter()).filter(|(index, _)| has_not(*index));
        Ok(left.map(|(_, device)| device.name().to_owned()).collect())
    }
}
