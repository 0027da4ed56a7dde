//! Workspaces: a directory shown with changes that lie apart from it, until they are committed or discarded.
//!
//! Called by `nacre workspace`. [`store`] has the state directories and their locks, [`settings`] the file that describes
//! each, [`view`] mounts and unmounts them, [`inside`] takes a process into one, [`snapshots`] keeps earlier states.
//! docs/decisions/workspaces.md has the layout. Everything that is known of a workspace lies in its state directory: no
//! process has to run for it.

pub mod inside;
pub mod settings;
pub mod snapshots;
pub mod store;
pub mod view;
