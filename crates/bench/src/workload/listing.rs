//! One directory with very many files, listed by the real `ls`, as in ordinary use.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use super::files::SMALL;
use super::{Visit, finished, needs_making, repeated, timed};
use crate::failure::{Doing, Failure};
use crate::scale::Scale;

/// Makes the directory.
pub fn prepare(source: &Path, scale: &Scale) -> Result<(), Failure> {
    let directory = source.join("listing");
    if !needs_making(&directory)? {
        return Ok(());
    }
    for number in 0..scale.listing {
        let path = directory.join(format!("measurement-{number:08}.dat"));
        fs::write(&path, SMALL).doing("writing", &path)?;
    }
    finished(&directory)
}

/// Runs a program to its end and discards its output; its failure is a failure of the measurement.
pub fn program(name: &str, arguments: &[&str], path: &Path) -> Result<(), Failure> {
    let mut command = Command::new(name);
    // Sorting by the locale's rules would take longer than the measured operation.
    command.args(arguments).arg(path).env("LC_ALL", "C").env("TZ", "UTC").current_dir("/");
    let status = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
    let status = status.map_err(|error| Failure::new(format!("starting {name}: {error}")))?;
    if status.success() {
        Ok(())
    } else {
        Err(Failure::new(format!("{name} {} {}: {status}", arguments.join(" "), path.display())))
    }
}

/// Measures the group on one target.
pub fn run(visit: &mut Visit<'_>) -> Result<(), Failure> {
    let (directory, count) = (visit.shared("listing"), visit.scale.listing);
    let first = |arguments: &[&str]| timed(|| program("ls", arguments, &directory));
    let again = |arguments: &[&str]| repeated(|| program("ls", arguments, &directory));
    visit.cold()?;
    visit.sample("ls-u-first", first(&["-U", "--color=never"])?.0, count)?;
    visit.sample("ls-u-again", again(&["-U", "--color=never"])?, count)?;
    visit.cold()?;
    visit.sample("ls-l-first", first(&["-l", "--color=never"])?.0, count)?;
    visit.sample("ls-l-again", again(&["-l", "--color=never"])?, count)
}
