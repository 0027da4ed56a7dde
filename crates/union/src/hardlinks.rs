//! Files with several names: they stay one file while names are copied up, and while the file
//! moves to another branch.
//!
//! * `index.rs` finds the copy for names on branches below it, and counts the names that users see;
//! * `relocate.rs` moves a file with all its names to another branch, or leaves it where it is;
//! * `journal.rs` makes such a move one step, whatever interrupts it.
//!
//! `copy_up.rs` and `remove.rs` keep the index; `relocate.rs` of the crate, drains, tiers and
//! commands ask for moves.

pub(crate) mod index;
pub(crate) mod journal;
pub(crate) mod relocate;
