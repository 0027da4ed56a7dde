//! The program `nacre`: arguments become a plan (pure data), the plan becomes effects.
//!
//! The same program is `bindfs`, `fuse-overlayfs` and `mount.fuse.nacre` when it is called by these
//! names.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod bench;
mod cage;
mod clap_args;
mod clock;
mod columns;
mod commands;
mod completion;
mod copy;
mod doctor;
mod documents;
mod fs;
mod libfuse_args;
mod mergerfs;
mod metrics;
mod option_value;
mod options;
mod output;
mod overlay;
mod personality;
mod plan;
mod pool;
mod remount;
mod run;
mod settings;
mod status;
#[cfg(test)]
mod tests;
mod top;
mod umount;
mod union;
mod workspace;

use std::process::ExitCode;

fn main() -> ExitCode {
    run::main()
}
