//! What another program has to understand to go on with a mount or a pool: plain data, which a process
//! gives on request and passes on.
//!
//! Made and judged by [`crate::handover`], carried by [`crate::control`] and [`crate::asked`].

use serde::{Deserialize, Serialize};

/// See the file's head.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct HandedOver {
    /// How it is noted: [`nacre_fuse::SURVIVAL_VERSION`].
    pub version: u64,
    /// What the guardian leaves.
    pub handover: String,
    /// What its worker has noted.
    pub left: Vec<u8>,
}
