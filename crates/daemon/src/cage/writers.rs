//! Finds processes that would bypass a cage: when it is mounted over its directory, they hold files of the
//! directory open for writing, or have their working directory in it.
//!
//! They keep their files: neither the limit nor the errors of the cage reach them until they open their files anew.
//! One pass over `/proc` reads names of links only; nothing below the directory is accessed. A process whose
//! `/proc` entries hang is not waited for.

use crate::report::{path_text, printable};
use nacre_sys::proc_looks::ProcLooks;
use rustix::fs::{AtFlags, CWD, FileType, StatxFlags, statx};
use std::{
    ffi::OsStr,
    fs,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    time::Duration,
};

/// Deadline for reading `/proc`.
const LIMIT: Duration = Duration::from_secs(3);
/// Number of processes that are named one by one.
const NAMED: usize = 5;

/// A process that bypasses the cage.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Bypass {
    pid: String,
    program: String,
    how: String,
}

/// Returns warnings about processes that would bypass a cage over `directory` (resolved); empty where there are
/// none. Processes that this user may not inspect are not seen.
pub fn warnings(directory: &Path) -> Vec<String> {
    let place = directory.to_owned();
    match ProcLooks::default().within(LIMIT, move || sentences(&found(&place))) {
        Ok(Some(warnings)) => warnings,
        Ok(None) => vec![
            "warning: some process does not let itself be looked at: it is not known who holds files of the directory \
             open for writing"
                .to_owned(),
        ],
        Err(error) => {
            vec![format!("warning: it is not known who holds files of the directory open for writing: {error}")]
        }
    }
}

fn found(directory: &Path) -> Vec<Bypass> {
    let own = std::process::id().to_string();
    let mut found = Vec::new();
    for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let name = process.file_name();
        let Some(pid) = name.to_str().filter(|name| name.bytes().all(|byte| byte.is_ascii_digit()) && *name != own)
        else {
            continue;
        };
        if let Some(how) = bypass(&process.path(), directory) {
            let program = fs::read(process.path().join("comm")).unwrap_or_default();
            found.push(Bypass { pid: pid.to_owned(), program: printable(program.trim_ascii_end()), how });
        }
    }
    found
}

fn sentences(found: &[Bypass]) -> Vec<String> {
    let mut lines: Vec<String> = found
        .iter()
        .take(NAMED)
        .map(|one| format!("warning: {} (process {}) {}", one.program, one.pid, one.how))
        .collect();
    if found.len() > NAMED {
        lines.push(format!("warning: and {} more processes do so", found.len() - NAMED));
    }
    if !found.is_empty() {
        lines.push(
            "what these write is not limited until they open their files anew: reload or restart them".to_owned(),
        );
    }
    lines
}

/// Returns how a process bypasses the cage, if it does.
fn bypass(process: &Path, directory: &Path) -> Option<String> {
    for descriptor in fs::read_dir(process.join("fd")).into_iter().flatten().flatten() {
        let Ok(target) = fs::read_link(descriptor.path()) else { continue };
        if !target.starts_with(directory) {
            continue;
        }
        let info = fs::read(process.join("fdinfo").join(descriptor.file_name())).unwrap_or_default();
        if is_written(&info) && !is_device(&descriptor.path()) {
            return Some(format!("holds {} open for writing", path_text(&named(target))));
        }
    }
    let works_in = fs::read_link(process.join("cwd")).ok().filter(|place| place.starts_with(directory));
    works_in.map(|place| format!("works in {}", path_text(&place)))
}

/// Whether a descriptor is open for writing, from its `/proc/PID/fdinfo/N` (proc(5): flags are
/// octal; `O_PATH` opens nothing).
fn is_written(info: &[u8]) -> bool {
    const ACCESS: u32 = 0o3;
    const PATH: u32 = 0o10_000_000;
    let line = info.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(b"flags:"));
    let flags = line
        .and_then(|flags| std::str::from_utf8(flags.trim_ascii()).ok())
        .and_then(|text| u32::from_str_radix(text, 8).ok());
    flags.is_some_and(|flags| flags & ACCESS != 0 && flags & PATH == 0)
}

/// Whether a descriptor is of a device: writes to it take no room of the directory. `STATX_DONT_SYNC`: no server is
/// asked for newer attributes.
fn is_device(descriptor: &Path) -> bool {
    let found = statx(CWD, descriptor, AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE);
    let kind = found.map(|found| FileType::from_raw_mode(u32::from(found.stx_mode)));
    matches!(kind, Ok(FileType::CharacterDevice | FileType::BlockDevice))
}

/// Strips the kernel's ` (deleted)` from the name of a deleted file.
fn named(target: PathBuf) -> PathBuf {
    match target.as_os_str().as_bytes().strip_suffix(b" (deleted)") {
        Some(name) => PathBuf::from(OsStr::from_bytes(name)),
        None => target,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_tell_who_writes() {
        for (info, written) in [
            (&b"pos:\t0\nflags:\t0102001\nmnt_id:\t30\n"[..], true),
            (b"pos:\t0\nflags:\t0100002\n", true),
            (b"pos:\t0\nflags:\t0100000\n", false),
            (b"pos:\t0\nflags:\t012100001\n", false),
            (b"flags:\tx\n", false),
            (b"", false),
        ] {
            assert_eq!(is_written(info), written, "{}", info.escape_ascii());
        }
    }

    #[test]
    fn who_holds_a_device_writes_past_no_cage() {
        let held = fs::OpenOptions::new().write(true).open("/dev/null").unwrap();
        let link = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&held));
        assert!(is_device(Path::new(&link)));
        let scratch = tempfile::tempdir().unwrap();
        let file = fs::File::create(scratch.path().join("log")).unwrap();
        assert!(!is_device(Path::new(&format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file)))));
        assert_eq!(bypass(Path::new("/proc/self"), Path::new("/dev/null")), None);
    }

    #[test]
    fn whoever_holds_a_file_is_found() {
        let scratch = tempfile::tempdir().unwrap();
        let directory = fs::canonicalize(scratch.path()).unwrap();
        let file = fs::File::create(directory.join("log")).unwrap();
        let itself = PathBuf::from("/proc/self");
        assert_eq!(
            bypass(&itself, &directory).as_deref(),
            Some(format!("holds {} open for writing", directory.join("log").display()).as_str())
        );
        fs::remove_file(directory.join("log")).unwrap();
        assert!(bypass(&itself, &directory).unwrap().ends_with("log open for writing"));
        assert_eq!(bypass(&itself, &directory.join("elsewhere")), None);
        drop(file);
        assert_eq!(bypass(&itself, &directory), None);
        fs::write(directory.join("read"), "").unwrap();
        let _reader = fs::File::open(directory.join("read")).unwrap();
        assert_eq!(bypass(&itself, &directory), None);
    }

    #[test]
    fn many_are_counted() {
        let one =
            Bypass { pid: "7".to_owned(), program: "rsyslogd".to_owned(), how: "holds /x open for writing".to_owned() };
        assert!(sentences(&[]).is_empty());
        let lines = sentences(&vec![one; 8]);
        assert_eq!(lines.len(), NAMED + 2);
        assert_eq!(lines[0], "warning: rsyslogd (process 7) holds /x open for writing");
        assert_eq!(lines[NAMED], "warning: and 3 more processes do so");
    }
}
