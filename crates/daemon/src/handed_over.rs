//! Handoff state as another program gets it to decide whether it can take over a mount or a pool: plain data, which
//! a process returns on request and another one forwards.
//!
//! Made and checked by [`crate::handover`], transferred by [`crate::control`] and [`crate::asked`].

use serde::{Deserialize, Serialize};

/// Handoff state of a mount or a pool.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct HandedOver {
    /// Version of its format: [`nacre_fuse::SURVIVAL_VERSION`].
    pub version: u64,
    /// State of the supervisor, as text.
    pub handover: String,
    /// State that its worker has recorded.
    pub left: Vec<u8>,
}
