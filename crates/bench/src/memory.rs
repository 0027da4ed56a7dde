//! Memory of the daemon that serves a mount, as counted by the kernel. Daemons are identified by their command
//! lines, which name the mount point.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::failure::{Doing, Failure};

/// Returns the anonymous memory in bytes of the processes whose command lines name `point`, without the program
/// itself. `None` where there is none, as for a file system of the kernel.
pub fn of_daemon(point: &Path) -> Result<Option<u64>, Failure> {
    let mut held = None;
    let processes = Path::new("/proc");
    for entry in fs::read_dir(processes).doing("listing", processes)? {
        let process = entry.doing("listing", processes)?;
        if !process.file_name().as_bytes().iter().all(u8::is_ascii_digit) {
            continue;
        }
        // A process may end at any moment, and other users' processes cannot be inspected: neither is a daemon of
        // ours.
        let Ok(words) = fs::read(process.path().join("cmdline")) else { continue };
        if !names(&words, point) {
            continue;
        }
        // Exact, unlike the counters in `status`.
        let Ok(maps) = fs::read_to_string(process.path().join("smaps_rollup")) else { continue };
        held = Some(held.unwrap_or(0) + bytes_of(&maps, "Anonymous").unwrap_or(0));
    }
    Ok(held)
}

/// Whether one of the words, each ended by a zero byte, is the path.
fn names(words: &[u8], point: &Path) -> bool {
    words.split(|byte| *byte == 0).any(|word| word == point.as_os_str().as_bytes())
}

/// Returns the value of the line `name:` in a file of /proc, in bytes.
pub fn bytes_of(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    #[test]
    fn a_process_is_known_by_its_words() {
        assert!(names(b"nacre\0union\0/a:/b\0/mnt/x\0", Path::new("/mnt/x")));
        assert!(!names(b"nacre\0union\0/a:/b\0/mnt/xy\0", Path::new("/mnt/x")));
        assert_eq!(
            bytes_of("5-7 ---p 00 [rollup]\nRss:   99 kB\nAnonymous:     128 kB\n", "Anonymous"),
            Some(128 << 10)
        );
        assert_eq!(bytes_of("Rss: 1 kB\n", "Anonymous"), None);
        assert_eq!(bytes_of("Name:\tx\nVmHWM:\t    12 kB\nVmRSS:\t 3 kB\n", "VmHWM"), Some(12 * 1024));
    }

    #[test]
    fn a_running_process_holds_memory() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(of_daemon(directory.path()), Ok(None));
        let mut child = Command::new("sh")
            .args(["-c", "echo runs; read line"])
            .arg(directory.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // Spawning returns before the kernel has laid out the new command line (fs/exec.c): the program's own
        // output shows that it runs.
        let mut said = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut said).unwrap();
        assert_eq!(said, "runs\n");
        assert!(of_daemon(directory.path()).unwrap().is_some_and(|bytes| bytes > 0));
        drop(child.stdin.take());
        child.wait().unwrap();
    }
}
