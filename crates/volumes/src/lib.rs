//! Volumes for containers: the program `nacre-volumes`, the volume plugin of docker and podman.
//!
//! It drives `nacre` by its command line and JSON and links nothing of it that serves files: a mount
//! lives in processes of `nacre` and outlives this program. Invariants: every call can be repeated,
//! also after a kill between any two steps; a name or an option of a client reaches a command as one
//! argument that was checked against a fixed alphabet, and never a shell.
//!
//! From the bottom up: `options` (what a client may ask for), `store` (records and locks),
//! `command` (calls of `nacre`), `volumes` (create, mount, unmount, remove), `tending` (what a kill or
//! a reboot left, backups), `figures` (use and limits), `http`, `plugin` and `server` (the protocol).
#![forbid(unsafe_code)]

pub mod arguments;
mod command;
mod dataset;
mod failure;
mod figures;
mod http;
mod log;
mod mount_table;
mod options;
mod plugin;
mod server;
mod store;
mod tending;
mod volumes;

pub use command::Nacre;
pub use failure::{Failure, Kind};
pub use figures::Figures;
pub use server::{Listening, serve};
pub use store::Store;
pub use volumes::{Shown, Volumes};
