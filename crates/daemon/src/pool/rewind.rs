//! The states that a pool can be taken back to.

use super::dates;
use crate::failure::Failure;
use nacre_pool::label;

/// A state that can be gone back to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EarlierState {
    /// Its last transaction group.
    pub txg: u64,
    /// When, seconds since 1970.
    time: u64,
}

impl EarlierState {
    /// What it is called.
    pub fn text(&self) -> String {
        format!("{} ({})", self.txg, dates::long(self.time))
    }
}

/// The states that can be gone back to where the last one cannot be had, the newest first.
///
/// # Errors
/// Labels that cannot be read.
pub fn older(devices: &[std::sync::Arc<dyn nacre_pool::device::Device>]) -> Result<Vec<EarlierState>, Failure> {
    let mut found = std::collections::BTreeMap::new();
    for device in devices {
        let failed = |error: nacre_pool::PoolError| Failure::new(error.to_string());
        let Some(identity) = label::probe(&**device).map_err(failed)? else { continue };
        found.extend(
            label::roots(&**device, identity.pool).map_err(failed)?.into_iter().map(|root| (root.generation, root)),
        );
    }
    let Some(newest) = found.values().next_back() else { return Ok(Vec::new()) };
    let (kept, last) = (newest.kept, newest.txg.0);
    // Where the records of the last ones are lost, the newest that is left has nothing against it.
    let lost = label::lost(devices, newest) > 0;
    let state = |root: label::Root| EarlierState { txg: root.txg.0, time: root.time };
    let mut states: Vec<EarlierState> = found.into_values().filter(|root| root.generation >= kept).map(state).collect();
    states.dedup_by_key(|state| state.txg);
    states.reverse();
    states.retain(|state| lost || state.txg < last);
    Ok(states)
}
