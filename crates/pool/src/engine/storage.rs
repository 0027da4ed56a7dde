//! The store as the engine's storage.

use std::time::{SystemTime, UNIX_EPOCH};

use super::Storage;
use crate::deadlist::Dead;
use crate::error::PoolError;
use crate::log::Start;
use crate::pointer::{Pointer, Txg};
use crate::store::{Commit, Store};

impl Storage for Store {
    fn free(&self, dead: &Dead, txg: Txg) -> Result<(), PoolError> {
        self.free_named(dead.segment, dead.index, dead.charged, txg);
        Ok(())
    }

    fn commit(&self, txg: Txg, catalog: Option<Pointer>, log: Start) -> Result<(), PoolError> {
        // For people who list the roots that are kept; nothing depends on it.
        let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        self.commit(&Commit { txg, catalog, upper: &[], log_start: log.into(), time })
    }

    fn size(&self) -> u64 {
        self.space().size
    }
}
