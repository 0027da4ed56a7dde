//! Everything that continues after a command has returned: processes that serve mounts, processes that own pools,
//! engines of cages, and how commands reach them.
//!
//! Called by the command line, which reads arguments and prints the results.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

pub mod asked;
pub mod background;
pub mod cage;
mod clock;
pub mod control;
pub mod control_sockets;
pub mod door;
pub mod failure;
pub mod figures;
pub mod fstab;
pub mod fuse_conf;
pub mod guardian;
mod handed_over;
pub mod handover;
pub mod hooks;
pub mod kernel_engine;
pub mod left;
pub mod log;
mod memory_file;
pub mod mount_flags;
mod mount_users;
pub mod mountinfo;
pub mod opening;
mod outliving;
pub mod plan;
pub mod pool;
pub mod report;
pub mod rpc;
pub mod runtime;
pub mod serve;
pub mod service;
pub mod serving;
pub mod shared;
pub mod union;
pub mod unmount;
pub mod upgrade;
pub mod whole_file;
pub mod workspace;
