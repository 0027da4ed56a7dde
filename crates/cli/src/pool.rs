//! `nacre pool`: pools of devices. The command line ([`command`], [`order`]), the process that owns
//! an imported pool ([`process`], started by [`start`]), how commands reach it ([`client`]), and
//! what they print.
//!
//! What the verbs mean is in the crate `nacre-admin`.

mod cachefile;
mod called;
mod carrier;
pub mod client;
pub mod command;
mod dates;
pub mod expected;
mod find;
mod histograms;
mod importing;
mod iostat;
mod json;
mod known;
mod list;
mod log_file;
pub mod manners;
mod mount_point;
mod mounts;
pub mod order;
mod process;
pub mod run;
mod scripts;
mod snapshot_directory;
pub mod start;
mod status;
mod telling;
mod upgrade;
mod vdevs;
mod wire;
mod words;

pub use process::{order as serves, run as serve};
