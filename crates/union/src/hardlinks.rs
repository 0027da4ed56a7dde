//! Hard links (files with several names): they stay one file while names are copied up, and while the file
//! moves to another branch.
//!
//! * `index.rs` finds the copy for names on lower branches, and counts the visible names;
//! * `relocate.rs` moves a file with all its names to another branch, or does not move it;
//! * `journal.rs` makes the move atomic, also across crashes.
//!
//! `copy_up.rs` and `remove.rs` update the index; `relocate.rs` of the crate, drains, tiers and commands
//! request moves.

pub(crate) mod index;
pub(crate) mod journal;
pub(crate) mod relocate;
