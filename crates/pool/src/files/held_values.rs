//! Long values of extended attributes that a replay in memory has set: writing their frames would
//! need room.
//!
//! Their rows have an empty value. No commit ever stores these rows: a pool whose replay continues
//! in memory is suspended until the next process replays the journal again.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::RwLock;

use super::{Share, Throttle};

/// Values by the key of their row.
#[derive(Debug)]
pub(super) struct HeldValues {
    values: RwLock<HashMap<Vec<u8>, Vec<u8>>>,
    held: Share,
}

impl HeldValues {
    /// An empty set, accounted by this throttle.
    pub(super) fn new(throttle: Arc<Throttle>) -> Self {
        Self { values: RwLock::default(), held: Share::new(throttle) }
    }

    /// The value of a row.
    pub(super) fn get(&self, key: &[u8]) -> Option<Vec<u8>> {
        self.values.read().get(key).cloned()
    }

    /// Sets the value of a row.
    pub(super) fn put(&self, key: &[u8], value: &[u8]) {
        self.remove(key);
        self.held.grow(value.len() as u64);
        self.values.write().insert(key.to_vec(), value.to_vec());
    }

    /// Drops the value of a row that has another value, or is removed.
    pub(super) fn remove(&self, key: &[u8]) {
        if self.values.read().is_empty() {
            return;
        }
        if let Some(value) = self.values.write().remove(key) {
            self.held.shrink(value.len() as u64);
        }
    }
}
