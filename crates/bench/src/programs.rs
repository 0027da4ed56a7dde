//! Running other programs: finding them, giving them a deadline, and asking for their version.

use std::env;
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::clock::Deadline;
use crate::failure::{Doing, Failure};

/// Deadline for mounting or unmounting, after which the program counts as hung.
pub const SETUP_PATIENCE: Duration = Duration::from_secs(60);

/// Finds `name` on the search path; administrators' directories are always searched too.
pub fn find(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let directories = env::split_paths(&path).chain(["/usr/sbin", "/sbin", "/usr/bin", "/bin"].map(PathBuf::from));
    directories.map(|directory| directory.join(name)).find(|file| is_executable(file))
}

/// Whether `file` is a regular file that anybody may execute.
pub fn is_executable(file: &Path) -> bool {
    fs::metadata(file).is_ok_and(|data| data.is_file() && data.permissions().mode() & 0o111 != 0)
}

/// Runs `command` to its end with its output in `log`, which is read back for the message if it fails. A file, not
/// a pipe: a daemon that the program starts keeps its output open.
pub fn run(command: &mut Command, log: &Path) -> Result<String, Failure> {
    // Reports are published, so the program's path on this machine is left out.
    let program = Path::new(command.get_program());
    let name = program.file_name().unwrap_or(program.as_os_str()).to_string_lossy().into_owned();
    let output = File::create(log).doing("creating", log)?;
    let errors = output.try_clone().doing("sharing", log)?;
    let child = command.stdin(Stdio::null()).stdout(output).stderr(errors).spawn();
    let mut child = child.map_err(|error| Failure::new(format!("starting {name}: {error}")))?;
    let ended = Deadline::after(SETUP_PATIENCE).wait_for_child(&mut child);
    let Some(status) = ended.map_err(|error| Failure::new(format!("waiting for {name}: {error}")))? else {
        child.kill().map_err(|error| Failure::new(format!("stopping {name}: {error}")))?;
        return Err(Failure::new(format!("{name} did not finish within {} s", SETUP_PATIENCE.as_secs())));
    };
    let text = String::from_utf8_lossy(&fs::read(log).doing("reading", log)?).trim().to_owned();
    if status.success() {
        return Ok(text);
    }
    let reason = reason(&text).map_or_else(|| status.to_string(), |line| format!("{status}: {line}"));
    Err(Failure::new(format!("{name} failed ({reason})")))
}

/// Returns the most informative line: one marked as an error, or the last.
fn reason(text: &str) -> Option<&str> {
    text.lines().find(|line| line.starts_with("error: ")).or_else(|| text.lines().last())
}

/// Whether `program` is nacre under another name: a link to it, or a copy, identified by the version that it
/// prints.
pub fn is_nacre(program: &Path) -> bool {
    let is_link = fs::canonicalize(program).is_ok_and(|file| file.file_name() == Some("nacre".as_ref()));
    is_link || version(program, "--version").contains("nacre")
}

/// Returns the line that `program --version` prints about itself, or why there is none.
pub fn version(program: &Path, flag: &str) -> String {
    let output = Command::new(program).arg(flag).stdin(Stdio::null()).output();
    let Ok(output) = output else { return "does not start".to_owned() };
    let text = if output.stdout.is_empty() { output.stderr } else { output.stdout };
    let text = String::from_utf8_lossy(&text);
    let name = program.file_name().unwrap_or_default().to_string_lossy();
    // Some programs print the versions of their libraries first.
    let line = text.lines().find(|line| line.starts_with(&*name)).or_else(|| text.lines().next());
    line.map_or_else(|| "says nothing".to_owned(), |line| line.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_and_their_failure_is_told() {
        assert!(find("sh").is_some());
        assert_eq!(find("no-such-program-here"), None);
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log");
        let teller = directory.path().join("teller");
        crate::tests::script(&teller, "#!/bin/sh\necho 'library 3'\necho 'teller 7'\n");
        assert_eq!(version(&teller, "--version"), "teller 7");
        assert!(!is_nacre(&teller));
        crate::tests::script(&teller, "#!/bin/sh\necho 'bindfs (nacre) 0.1.0'\n");
        assert!(is_nacre(&teller));
        let nacre = directory.path().join("nacre");
        crate::tests::script(&nacre, "#!/bin/sh\nexit 1\n");
        std::os::unix::fs::symlink(&nacre, directory.path().join("bindfs")).unwrap();
        assert!(is_nacre(&directory.path().join("bindfs")));
        assert_eq!(run(Command::new("echo").arg("hello"), &log).unwrap(), "hello");
        let failure = run(Command::new("sh").args(["-c", "echo because >&2; exit 3"]), &log).unwrap_err();
        assert!(failure.to_string().contains("because"), "{failure}");
        assert_eq!(reason("error: unexpected argument\n\nFor more, ask\n"), Some("error: unexpected argument"));
        assert_eq!(reason("one\ntwo"), Some("two"));
    }
}
