//! The bench alone, as a program: `cargo run --release -p nacre-bench --example nacre-bench --
//! mirror --list`.

use std::process::ExitCode;

fn main() -> ExitCode {
    nacre_bench::run(&nacre_bench::command().get_matches())
}
