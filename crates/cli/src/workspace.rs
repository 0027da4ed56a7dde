//! `nacre workspace`: directories with changes that lie apart from them, until they are committed or discarded.
//!
//! `command.rs` is the part of the table of commands, `run.rs` carries the verbs out, `list.rs` prints tables, and
//! `changes.rs` shows, commits, exports and imports changes.

mod changes;
pub mod command;
mod list;
pub mod run;
