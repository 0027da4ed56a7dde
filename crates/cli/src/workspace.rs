//! `nacre workspace`: directories with changes that lie apart from them, until they are committed or discarded.
//!
//! `command.rs` is the part of the table of commands, `run.rs` carries the verbs out, `list.rs` prints tables,
//! `execute.rs` runs commands, `discard.rs` removes workspaces, and `changes.rs` shows, commits, exports and imports
//! changes, with the questions of `ask.rs`; `of_pool.rs` has workspaces over file systems of pools.

mod ask;
mod changes;
pub mod command;
mod discard;
mod execute;
mod list;
mod of_pool;
pub mod run;
