//! `nacre pool`: pools of devices. The command line ([`command`], [`order`]), the process that owns an imported pool ([`process`], started by [`start`]), how commands
//! reach it ([`client`]), and what they print.
//!
//! What the verbs mean is in the crate `nacre-admin`.

pub mod client;
pub mod command;
mod dates;
mod find;
mod importing;
mod iostat;
mod known;
mod list;
mod mounts;
pub mod order;
mod process;
pub mod run;
pub mod start;
mod status;
mod wire;
mod words;

pub use process::{order as serves, run as serve};
