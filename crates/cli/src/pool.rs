//! `nacre pool` and `zpool`: the command line ([`command`], [`verb`]) and the output. The process
//! that owns a pool is in `nacre_daemon::pool`, the meaning of the verbs in `nacre_admin`.

mod args;
mod called;
mod changing;
pub mod chosen;
pub mod command;
mod destroyed;
mod find;
mod form;
mod histograms;
mod importing;
mod iostat;
mod json;
mod list;
mod probe;
pub mod run;
mod scripts;
mod shapes;
mod starting;
mod status;
mod tree;
mod unserved;
mod upgrade;
mod vdevs;
pub mod verb;
pub mod version;
pub mod zfs_usage;
