//! Lines appended to a log by a script: bash opens the file for each `echo`, appends and closes it.

use super::appends::{Line, expect_length};
use super::listing::program;
use super::{Visit, timed};
use crate::failure::Failure;

/// Returns a loop over this many lines; the file is its first argument.
fn script(line: Line, count: u64) -> String {
    format!("for i in `seq 1 {count}`; do echo \"{}\" >> \"$0\"; done", line.text())
}

/// Measures the group on one target. The start of bash is included; it is negligible compared with the loop.
pub fn run(visit: &mut Visit<'_>) -> Result<(), Failure> {
    let path = visit.own.join("log");
    for (test, line) in ["shell-short", "shell-long", "shell-very-long"].into_iter().zip(Line::ALL) {
        let count = if line == Line::Short { visit.scale.shell_short() } else { visit.scale.appends };
        let script = script(line, count);
        let elapsed = timed(|| program("bash", &["-c", &script], &path))?.0;
        expect_length(&path, count * (line.text().len() as u64 + 1))?;
        visit.sample(test, elapsed, count)?;
        visit.tidy(std::slice::from_ref(&path))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bash_appends_every_line() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a log");
        program("bash", &["-c", &script(Line::Long, 4)], &path).unwrap();
        expect_length(&path, 4 * 92).unwrap();
        let blocked = directory.path().join("missing/log");
        assert!(program("bash", &["-c", &script(Line::Long, 1)], &blocked).is_err());
    }
}
