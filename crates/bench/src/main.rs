//! The program `nacre-bench`, which `nacre bench` starts: it measures mounts from outside, and links the libraries
//! that draw the results.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    let command = nacre_bench_arguments::command().name("nacre-bench").version(env!("CARGO_PKG_VERSION"));
    nacre_bench::run(&command.get_matches())
}
