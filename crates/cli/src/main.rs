//! The program `nacre`: arguments become a plan (pure data), the plan becomes effects.
//!
//! The same program is `bindfs`, `fuse-overlayfs` and `mount.fuse.nacre` when it is called by these
//! names.
#![forbid(unsafe_code)]

mod bench;
mod cage;
mod columns;
mod commands;
mod control;
mod copy;
mod daemon;
mod documents;
mod door;
mod failure;
mod figures;
mod fs;
mod kernel_engine;
mod log;
mod metrics;
mod mountinfo;
mod options;
mod overlay;
mod personality;
mod plan;
mod pool;
mod remount;
mod report;
mod run;
mod runtime;
mod serve;
mod serving;
mod settings;
mod shared;
mod status;
#[cfg(test)]
mod tests;
mod top;
mod umount;
mod union;
mod whole_file;
mod words;

use std::process::ExitCode;

fn main() -> ExitCode {
    run::main()
}
