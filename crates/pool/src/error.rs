//! Errors of a pool, for every module of the engine.
//!
//! Callers turn these into error numbers (a FUSE front end) or messages (a command): so each names the failed
//! operation and its object.

use std::fmt;
use std::io;
use std::sync::Arc;

use crate::pointer::{Pointer, Txg};
use crate::properties::PropertyError;

/// Damage of a frame, a label or a table on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Damage {
    /// The content does not match the checksum in the pointer.
    Checksum,
    /// The frame's header is malformed, or belongs to another frame.
    Header,
    /// Compressed content that does not decompress to the length in the pointer.
    Compression,
    /// Sealed content that its key does not open: another key, or changed on purpose.
    Seal,
    /// A structure with impossible fields; the text names it.
    Structure(&'static str),
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Checksum => f.write_str("the checksum does not fit"),
            Self::Header => f.write_str("the frame's header is not the expected one"),
            Self::Compression => f.write_str("the compressed content does not unpack"),
            Self::Seal => f.write_str("the seal of the encrypted content does not fit"),
            Self::Structure(what) => f.write_str(what),
        }
    }
}

/// Reason why a limit is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitRefusal {
    /// A quota below the used or reserved space.
    BelowUse,
    /// A reservation that the parent, the quota or the pool cannot grant.
    BeyondAvailable,
}

impl fmt::Display for LimitRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::BelowUse => "size is less than current used or reserved space",
            Self::BeyondAvailable => "size is greater than available space",
        })
    }
}

/// An error of the engine. Cheap to clone: all callers that wait for a failed commit get the same error.
#[derive(Clone, Debug)]
pub enum PoolError {
    /// A device failed: its name, the operation, and the system's error.
    Device {
        /// The device's path or number.
        device: String,
        /// "reading", "writing", "syncing".
        doing: &'static str,
        /// The system's error.
        source: Arc<io::Error>,
    },
    /// A reachable frame is damaged.
    Frame {
        /// The frame's pointer.
        pointer: Pointer,
        /// The frame's damage.
        damage: Damage,
    },
    /// A structure outside frames (label, root record, row) is damaged.
    Format(Damage),
    /// The newest states of the pool are damaged: their root records cannot be read in any copy.
    Lost {
        /// Minimum number of lost records.
        states: u64,
        /// The last txg before them.
        txg: Txg,
    },
    /// A device has shrunk so much that a part of the pool is missing.
    Short {
        /// The device's path.
        device: String,
        /// The device's length, bytes.
        length: u64,
        /// The device's expected length, bytes.
        wanted: u64,
    },
    /// No space left that the caller may use.
    NoSpace,
    /// A quota is exceeded: of the dataset itself or of an ancestor.
    Quota {
        /// The dataset with the quota.
        dataset: u64,
    },
    /// A limit of the number of file systems or snapshots is exceeded.
    CountLimit {
        /// The limited kind: "filesystem", "snapshot".
        what: &'static str,
        /// The dataset with the limit.
        dataset: u64,
    },
    /// A property or its value is refused.
    Property(PropertyError),
    /// A new limit is refused.
    Limit {
        /// The property.
        name: String,
        /// The reason.
        why: LimitRefusal,
    },
    /// A failed write has suspended the pool at this txg: everything acknowledged as durable is, nothing further is
    /// accepted.
    Suspended {
        /// The last durable txg.
        durable: Txg,
        /// The reason.
        reason: String,
    },
    /// A crashed process has put a root at the last moment, after its successor had read the newest: the successor
    /// has to start again.
    Overtaken,
    /// The dataset is in use.
    Busy,
    /// The pool, its format or a request does not allow it; the text names the reason.
    Refused(String),
}

impl PoolError {
    /// Whether content is damaged or missing, or an object of a store is; not that a device or store is unavailable.
    #[must_use]
    pub fn is_of_content(&self) -> bool {
        use io::ErrorKind::{InvalidData, NotFound, UnexpectedEof};
        match self {
            Self::Frame { .. } | Self::Format(_) => true,
            Self::Device { source, .. } => matches!(source.kind(), NotFound | UnexpectedEof | InvalidData),
            _ => false,
        }
    }
}

impl fmt::Display for PoolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device { device, doing, source } => write!(f, "{doing} {device}: {source}"),
            Self::Frame { pointer, damage } => write!(f, "frame {pointer}: {damage}"),
            Self::Format(damage) => damage.fmt(f),
            Self::Lost { states, txg } => write!(
                f,
                "every copy of the newest {} is damaged, which no power cut does: what was written after transaction group {txg} cannot be found",
                if *states == 1 { "root record".to_owned() } else { format!("{states} root records") }
            ),
            Self::Short { device, length, wanted } => {
                write!(f, "{device}: has become shorter: {length} of {wanted} bytes are there")
            }
            Self::NoSpace => f.write_str("the pool is full"),
            Self::Quota { .. } => f.write_str("disk quota exceeded"),
            Self::CountLimit { what, .. } => write!(f, "{what} limit exceeded"),
            Self::Property(error) => error.fmt(f),
            Self::Limit { why, .. } => why.fmt(f),
            Self::Suspended { durable, reason } => write!(f, "the pool is suspended after txg {durable}: {reason}"),
            Self::Overtaken => f.write_str("a commit of the process before this one was late"),
            Self::Busy => f.write_str("dataset is busy"),
            Self::Refused(why) => f.write_str(why),
        }
    }
}

impl std::error::Error for PoolError {}

impl From<PropertyError> for PoolError {
    fn from(error: PropertyError) -> Self {
        Self::Property(error)
    }
}
