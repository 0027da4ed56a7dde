//! The storage engine: pools of devices or buckets that hold datasets as copy-on-write trees in relocatable segments.
//!
//! Callers: the layer `dataset` and the commands `nacre pool` and `nacre fs`. The engine knows neither FUSE nor the
//! layer contract. The format is in `docs/pool-format.md`, byte by byte; the modules follow it from the bottom up:
//!
//! ```text
//!  tree      copy-on-write B+trees whose nodes are frames          tree, cache
//!  store     frames written, read, freed; commits                  store, frame, pointer
//!  segment   frames packed into segments, streams, cleaner         segment
//!  backend   storage of segments and roots                         backend, parity
//!  label     the pool's identity; the root records                 label
//!  device    length, read, write, sync, discard                    device
//! ```
//!
//! Invariants:
//! - A frame is never changed in place. Everything that a durable root reaches is not overwritten until,
//!   [`Txg`]s later, no retained root reaches it.
//! - A pointer names a segment and a frame, never a location: frames move without a change of any tree.
//! - Every byte read from a device is verified before it is used; damage is an error that names the frame,
//!   never data and never a panic.
//! - The time of day and randomness are passed in; clocks for waits are read in one module (`patience`).
//!
//! A pool in memory (give it a [`device::FileDevice`] for a persistent one), a file in it, and a snapshot of that:
//!
//! ```
//! use std::sync::Arc;
//! use nacre_pool::{Store, device::Simulator, files::{NewInode, ParentView}};
//! use nacre_pool::engine::{Committer, Pace, Pool, PoolConfig};
//! use nacre_pool::rows::{FileType, InodeRow, Timestamp};
//! use nacre_pool::store::NewPool;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let new = NewPool {
//!     name: "tank".into(),
//!     guid: 7,
//!     host: (1, "here".into()),
//!     time: 1_800_000_000,
//!     redundant_metadata: true,
//! };
//! let (store, _) = Store::create(vec![Arc::new(Simulator::new("disk", 128 << 20))], &new)?;
//! let store = Arc::new(store);
//! let config = PoolConfig {
//!     log: Some(store.log()?),
//!     storage: Arc::clone(&store) as _,
//!     clock: Arc::new(|| Timestamp { seconds: 1_800_000_000, nanoseconds: 0 }),
//!     entropy: Arc::new(|| 42),
//!     cache: 16 << 20,
//!     kept: None,
//! };
//! let pool = Arc::new(Pool::create(config, "tank")?);
//! let committer: Committer = pool.start_committer(Pace::default())?;
//!
//! let id = pool.find("tank")?.ok_or("it has just been made")?;
//! let tank = pool.dataset(id)?;
//! let files = tank.files();
//! let new = |parent: &ParentView| {
//!     let row = InodeRow::new(FileType::Regular, 0o644, parent.now);
//!     Ok(NewInode { row, target: None, attributes: Vec::new() })
//! };
//! let (file, _) = files.make(&files.root(), b"greeting", b"", &new)?;
//! files.write(&file, Some(0), b"hello")?;
//! pool.sync_file(&tank, &file)?; // what fsync does
//!
//! let txg = pool.snapshot(&[(id, "monday".into())])?;
//! files.unlink(&files.root(), b"greeting")?;
//!
//! let monday = pool.snapshot_files(id, txg)?;
//! let (file, _) = monday.files().look_up(&monday.files().root(), b"greeting")?;
//! let mut content = [0; 5];
//! monday.files().read(&file, 0, &mut content)?;
//! assert_eq!(&content, b"hello");
//!
//! committer.stop()?;
//! store.close(true, 1_800_000_001)?;
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic))]

pub mod backend;
pub mod cache;
pub mod catalog;
pub mod checksum;
pub mod codec;
pub mod compress;
pub mod crypt;
pub mod deadlist;
pub mod device;
pub mod engine;
pub mod error;
pub mod files;
pub mod frame;
pub mod frames;
pub mod label;
pub mod log;
pub mod names;
pub mod parity;
mod patience;
pub mod pointer;
pub mod properties;
pub mod rows;
pub mod segment;
pub mod send_stream;
pub mod space;
pub mod store;
pub mod tree;
mod workers;

pub use error::{Damage, PoolError};
pub use frames::{CompressionSetting, Frames, NewFrame, Owner, Wanted, WriteStream};
pub use pointer::{ChecksumKind, Compression, FrameKind, Pointer, Txg};
pub use store::Store;
