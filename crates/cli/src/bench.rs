//! `nacre bench`: checks the command line and starts the program `nacre-bench`, which measures, so
//! that no process that holds data links the code that draws plots.
//!
//! Called by [`crate::run`]. `nacre-bench` replaces this process (exec): its output, its exit code
//! and the signals are its own.

use clap::ArgMatches;
use nacre_daemon::failure::{Exit, Failure};
use std::{
    env, fs,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::{Path, PathBuf},
    process::Command,
};

/// Name of the program that measures.
const PROGRAM: &str = "nacre-bench";

/// Replaces this process by `nacre-bench`; returns only with an error.
///
/// # Errors
/// The other program is not there, or cannot be started.
pub fn run(matches: &ArgMatches) -> Result<(), Failure> {
    let own =
        env::current_exe().map_err(|error| Failure::io("cannot find", "this program", &error).exit(Exit::Failure))?;
    let program = beside_or_on_path(&own).ok_or_else(|| {
        Failure::new(format!("bench: {PROGRAM} is neither beside {} nor in PATH", own.display()))
            .next(format!("install the package {PROGRAM}, or put the program there: it is built together with nacre"))
    })?;
    let mut command = Command::new(&program);
    // The name of the program, `bench`, and the table.
    let mut words = env::args_os().skip(2);
    command.args(words.next());
    // Only tables have the option: this very program is measured unless another is named.
    if let Some((_, table)) = matches.subcommand()
        && let Ok(None) = table.try_get_one::<PathBuf>("nacre")
    {
        command.arg("--nacre").arg(&own);
    }
    let error = command.args(words).exec();
    Err(Failure::io("cannot start", program.display(), &error).exit(Exit::Failure))
}

fn beside_or_on_path(own: &Path) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let on_path = env::split_paths(&path).map(|directory| directory.join(PROGRAM)).collect::<Vec<_>>();
    std::iter::once(own.with_file_name(PROGRAM)).chain(on_path).find(|file| is_executable(file))
}

fn is_executable(file: &Path) -> bool {
    fs::metadata(file).is_ok_and(|data| data.is_file() && data.permissions().mode() & 0o111 != 0)
}
