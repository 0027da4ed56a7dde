//! What can go wrong in a pool, for every module of the engine.
//!
//! Callers turn these into error numbers (a door) or messages (a command): so each says what failed
//! and on what.

use std::fmt;
use std::io;
use std::sync::Arc;

use crate::pointer::{Pointer, Txg};
use crate::properties::PropertyError;

/// How a frame, a label or a table on a device is not what was written there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Damage {
    /// The content does not have the checksum in the pointer.
    Checksum,
    /// The header of the frame is not one, or is that of another frame.
    Header,
    /// Compressed content that does not decompress to the length in the pointer.
    Compression,
    /// A structure with impossible fields; the text says which.
    Structure(&'static str),
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Checksum => f.write_str("the checksum does not fit"),
            Self::Header => f.write_str("the frame's header is not the expected one"),
            Self::Compression => f.write_str("the compressed content does not unpack"),
            Self::Structure(what) => f.write_str(what),
        }
    }
}

/// Why a limit is not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitRefusal {
    /// A quota below what is used or reserved already.
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

/// An error of the engine. Cheap to clone: a failed commit is told to everybody who waits for it.
#[derive(Clone, Debug)]
pub enum PoolError {
    /// A device failed: which one, during what, and the system's reason.
    Device {
        /// The device, by its path or number.
        device: String,
        /// "reading", "writing", "syncing".
        doing: &'static str,
        /// The reason.
        source: Arc<io::Error>,
    },
    /// A frame that is reachable cannot be read as it was written.
    Frame {
        /// Its pointer.
        pointer: Pointer,
        /// What is wrong with it.
        damage: Damage,
    },
    /// A structure outside frames (label, root record, row) is damaged.
    Format(Damage),
    /// The newest states of the pool are damaged: their root records cannot be read in any copy.
    Lost {
        /// How many records there were at least.
        states: u64,
        /// The last txg before them.
        txg: Txg,
    },
    /// A device has become so much shorter that something of the pool is missing.
    Short {
        /// The device, by its path.
        device: String,
        /// Its length, bytes.
        length: u64,
        /// The length that it had, bytes.
        wanted: u64,
    },
    /// No room that the caller may use is left.
    NoSpace,
    /// A quota is in the way: of the dataset with this number, an ancestor or the one that was
    /// asked.
    Quota {
        /// The dataset whose quota it is.
        dataset: u64,
    },
    /// A limit of the number of file systems or snapshots is in the way.
    CountLimit {
        /// What there are too many of: "filesystem", "snapshot".
        what: &'static str,
        /// The dataset whose limit it is.
        dataset: u64,
    },
    /// A property or its value is not accepted.
    Property(PropertyError),
    /// A limit that was to be set is not accepted.
    Limit {
        /// The property.
        name: String,
        /// Why.
        why: LimitRefusal,
    },
    /// A failed write has stopped the pool at this txg: what was promised durable is, nothing
    /// further is accepted.
    Suspended {
        /// The last durable txg.
        durable: Txg,
        /// Why.
        reason: String,
    },
    /// A process that has died has put a root at the last moment, after its successor had read the newest: that
    /// one has to begin again.
    Overtaken,
    /// Somebody uses the dataset.
    Busy,
    /// The pool, its format or a request does not allow it; the text says what and why.
    Refused(String),
}

impl PoolError {
    /// Whether content is damaged or gone, or an object of a store is; not that a device or store is away.
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
