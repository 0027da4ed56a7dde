//! The interface between front ends (FUSE, NFS) and file systems (layers): plain values, one trait, no dependencies.
//!
//! Calls go down through [`Layer`], values come back up. The upward paths are the [`Invalidation`] channel, which
//! carries data, and two traits of the front end: [`WritebackHost`] and [`OpenFileHost`]. A lower crate never names a
//! higher one; this crate names none at all.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod attr;
mod caller;
mod capabilities;
mod coherence;
mod describe;
mod errno;
mod filter;
mod filtered;
mod forwarding;
mod interrupted;
mod layer;
mod left_open;
mod name;
mod node;
mod numbered;
mod open_file;
mod open_files;
mod writeback;

pub use attr::{Attr, ChangeTime, FileId, Kind, Protection, SetAttr, SetTime, StatFs, Time};
pub use caller::Caller;
pub use capabilities::Capabilities;
pub use coherence::{Coherence, Invalidation, Scope};
pub use describe::Description;
pub use errno::{Errno, Result};
pub use filter::{Before, Creation, Filter, Op};
pub use filtered::Filtered;
pub use interrupted::{FinishRename, InterruptedRename};
pub use layer::{AnyOpen, Created, Dev, DirEntry, DirSink, Entry, Layer, Opened, RenameFlags, XattrFlags};
pub use left_open::{FoundOpen, GivenNumbers, LeftFile, LeftNumbers, LeftOpen};
pub use name::{NAME_MAX, Name};
pub use node::Node;
pub use numbered::{NO_GENERATION, Numbered};
pub use open_file::{AllocateMode, FileLock, Ioctl, LockKind, LockOwner, OpenFile, OpenFlags, Whence, WriteOrigin};
pub use open_files::{AttachedDoor, OpenFileClient, OpenFileHost};
pub use writeback::{WriteAhead, WritebackHost, WritebackLayer, WritebackLease};
