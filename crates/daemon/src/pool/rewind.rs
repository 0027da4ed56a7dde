//! Earlier states that a pool can be rewound to.

use super::dates;
use crate::failure::Failure;
use nacre_admin::pool::devices::Opened;
use nacre_pool::{backend::Objects, label};
use std::collections::BTreeMap;

/// A state that a pool can be rewound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EarlierState {
    /// Txg of the state.
    pub txg: u64,
    /// Time of its commit, seconds since 1970.
    time: u64,
}

impl EarlierState {
    /// Returns txg and date for messages.
    pub fn text(&self) -> String {
        format!("{} ({})", self.txg, dates::long(self.time))
    }
}

/// Returns the states that a pool can be rewound to when the last one cannot be read, newest first.
///
/// # Errors
/// Labels cannot be read.
pub fn older(opened: &Opened) -> Result<Vec<EarlierState>, Failure> {
    let failed = |error: nacre_pool::PoolError| Failure::new(error.to_string());
    let devices = match opened {
        Opened::Devices(devices) => devices,
        Opened::Bucket(bucket, _) => {
            let Some(identity) = Objects::find(&**bucket).map_err(failed)? else { return Ok(Vec::new()) };
            let (found, _) = Objects::readable_roots(&**bucket, identity.pool).map_err(failed)?;
            // Perhaps only the newest state's log is unreadable: the state is tried without the log.
            return Ok(states(found, true));
        }
    };
    let mut found = BTreeMap::new();
    for device in devices {
        let Some(identity) = label::probe(&**device).map_err(failed)? else { continue };
        found.extend(
            label::roots(&**device, identity.pool).map_err(failed)?.into_iter().map(|root| (root.generation, root)),
        );
    }
    let lost = found.values().next_back().is_some_and(|newest| label::lost(devices, newest) > 0);
    Ok(states(found, lost))
}

/// Filters the states that a pool can be rewound to, newest first. With `lost`, the root records of the last
/// states, or the log of the last one, may be unreadable: then the newest state found is not excluded.
fn states(found: BTreeMap<u64, label::Root>, lost: bool) -> Vec<EarlierState> {
    let Some(newest) = found.values().next_back() else { return Vec::new() };
    let (kept, last) = (newest.kept, newest.txg.0);
    let state = |root: label::Root| EarlierState { txg: root.txg.0, time: root.time };
    let mut states: Vec<EarlierState> = found.into_values().filter(|root| root.generation >= kept).map(state).collect();
    states.dedup_by_key(|state| state.txg);
    states.reverse();
    states.retain(|state| lost || state.txg < last);
    states
}
