//! The catalog (like ZFS' MOS): the tree that references all other trees. Datasets, snapshots,
//! bookmarks, holds, clones, properties, history; deadlists are stored in it as well.
//!
//! Called by the engine, which guards it by one lock: administration and commits change it, and all
//! reads go through the engine.
//!
//! ```text
//!  kind  row         key after the kind byte           value
//!  0x10  head        -                                 PoolHead: next dataset, root dataset, list of frames to free
//!  0x11  dataset     dataset                           DatasetRow
//!  0x12  child       parent, name                      dataset
//!  0x13  property    dataset (0: the pool), name       source, value
//!  0x14  snapshot    dataset, txg                      SnapshotRow
//!  0x15  by name     dataset, name of a snapshot       txg
//!  0x16  bookmark    dataset, name                     BookmarkRow
//!  0x17  hold        dataset, txg, tag                 time
//!  0x18  clone       dataset, txg, clone's dataset     nothing
//!  0x19  history     number                            HistoryRow
//!  0x1a  doomed      dataset                           the remainder of a dataset that is being destroyed
//!  0x1b  received    dataset, name                     source, value of a received property
//!  0x1c  shared      segment and index of a frame      number of rows that reference it besides the first
//!  0x20  key root    number (0: the erasable key)      KeyRootRow; for 0 the sequence of the key that counts
//!  0x21  slot        key root, slot (1 byte)           SlotRow in a box under the erasable key
//!  0x22  family      number                            FamilyRow
//!  0x23  master key  family, ordinal (1 byte)          MasterKeyRow in a box under the erasable key
//!  0x24  seal        dataset, txg (0: the head)        SealRow
//!  0x30  ...         deadlists                         see `deadlist`
//! ```
//!
//! Invariants: numbers in keys are big-endian; every decoder accepts arbitrary bytes; a dataset's
//! number is never assigned twice.

pub mod key_rows;
mod key_table;
pub mod rows;
mod shape;
mod table;
#[cfg(test)]
mod tests;

pub use key_table::{master_key, slot_key};
pub use rows::{BookmarkRow, DatasetRow, HistoryRow, PoolHead, PropertyRow, PropertySource, SnapshotRow};
pub use table::Catalog;
