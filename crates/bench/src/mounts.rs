//! Reads the kernel's mount table, never cached, and unmounts.
//! Called by `scratch`, `mounted` and `undo`. Invariant: only paths below a directory that the
//! caller names are touched.

use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::mount::UnmountFlags;

use crate::clock::Deadline;
use crate::failure::{Doing, Failure};

/// The kernel's mount table of this process's namespace.
const TABLE: &str = "/proc/self/mountinfo";

/// One line of the kernel's mount table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountLine {
    /// Mount point.
    pub point: PathBuf,
    /// Type of file system.
    pub kind: String,
    /// Device or other source.
    pub device: String,
}

/// The mounts of this process's namespace, oldest first.
pub fn table() -> Result<Vec<MountLine>, Failure> {
    let path = Path::new(TABLE);
    let text = fs::read(path).doing("reading", path)?;
    Ok(parse(&text))
}

/// Parses the text of `mountinfo`; malformed lines are skipped.
pub fn parse(text: &[u8]) -> Vec<MountLine> {
    text.split(|byte| *byte == b'\n').filter_map(parse_line).collect()
}

fn parse_line(line: &[u8]) -> Option<MountLine> {
    let mut words = line.split(|byte| *byte == b' ');
    let point = unescape(words.nth(4)?);
    let mut rest = words.skip_while(|word| *word != b"-").skip(1);
    let kind = String::from_utf8_lossy(rest.next()?).into_owned();
    let device = String::from_utf8_lossy(rest.next()?).into_owned();
    Some(MountLine { point, kind, device })
}

/// Decodes a path: the kernel writes space, tab, newline and backslash as three octal digits.
fn unescape(word: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(word.len());
    let mut rest = word;
    while let Some((first, tail)) = rest.split_first() {
        if let (b'\\', Some([a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7'])) = (*first, tail.get(..3)) {
            bytes.push((a - b'0') * 64 + (b - b'0') * 8 + (c - b'0'));
            rest = tail.get(3..).unwrap_or_default();
        } else {
            bytes.push(*first);
            rest = tail;
        }
    }
    PathBuf::from(OsString::from_vec(bytes))
}

/// Returns the mount points at or below `directory`, newest first, in the order of unmounting.
pub fn below(directory: &Path) -> Result<Vec<PathBuf>, Failure> {
    let mut points: Vec<PathBuf> =
        table()?.into_iter().map(|line| line.point).filter(|point| point.starts_with(directory)).collect();
    points.reverse();
    Ok(points)
}

/// Whether there is a mount exactly at `path`.
pub fn is_mounted(path: &Path) -> Result<bool, Failure> {
    Ok(table()?.iter().any(|line| line.point == path))
}

/// Waits for changes of the mount table.
pub struct Watch(File);

impl Watch {
    /// Starts to watch.
    pub fn start() -> Result<Self, Failure> {
        let path = Path::new(TABLE);
        File::open(path).doing("opening", path).map(Self)
    }

    /// Waits for the next change; false at the deadline.
    pub fn changed(&self, deadline: Deadline) -> Result<bool, Failure> {
        deadline.wait_for(&self.0, PollFlags::PRI).doing("watching", Path::new(TABLE))
    }
}

/// Returns the mount that `path` lies on.
pub fn of(path: &Path) -> Result<Option<MountLine>, Failure> {
    let lines = table()?;
    let mut best: Option<MountLine> = None;
    for line in lines {
        let deeper = best.as_ref().is_none_or(|found| line.point.as_os_str().len() >= found.point.as_os_str().len());
        if path.starts_with(&line.point) && deeper {
            best = Some(line);
        }
    }
    Ok(best)
}

/// Unmounts `path`; waits up to `patience` for its users to end, and then detaches it lazily.
pub fn unmount(path: &Path, patience: Duration) -> Result<(), Failure> {
    let deadline = Deadline::after(patience);
    while is_mounted(path)? {
        match unmount_once(path, false) {
            Ok(()) => {}
            // The kernel does not notify when the last user has gone.
            Err(_) if !deadline.is_over() => deadline.pause(Duration::from_millis(5)),
            Err(_) => return unmount_once(path, true),
        }
    }
    Ok(())
}

/// Detaches `path` at once, even if it is in use.
pub fn detach(path: &Path) -> Result<(), Failure> {
    unmount_once(path, true)
}

fn unmount_once(path: &Path, lazy: bool) -> Result<(), Failure> {
    if rustix::process::geteuid().is_root() {
        let flags = if lazy { UnmountFlags::DETACH } else { UnmountFlags::NOFOLLOW };
        return rustix::mount::unmount(path, flags).doing("unmounting", path);
    }
    let flag = if lazy { "-uz" } else { "-u" };
    let status = Command::new("fusermount3").arg(flag).arg(path).stdout(Stdio::null()).stderr(Stdio::null()).status();
    let status = status.doing("running fusermount3 for", path)?;
    if status.success() { Ok(()) } else { Err(Failure::new(format!("fusermount3 {flag} {} failed", path.display()))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mountinfo_lines_are_read() {
        let text = b"36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue\n\
                     37 35 0:5 / /a\\040b\\134c rw - fuse.bindfs /x rw\nnot a line\n";
        let lines = parse(text);
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[0], MountLine { point: "/mnt2".into(), kind: "ext3".into(), device: "/dev/root".into() });
        assert_eq!(lines[1].point, PathBuf::from("/a b\\c"));
        assert_eq!(lines[1].kind, "fuse.bindfs");
    }

    #[test]
    fn the_root_is_mounted_and_a_fresh_directory_is_not() {
        let directory = tempfile::tempdir().unwrap();
        assert!(is_mounted(Path::new("/")).unwrap());
        assert!(!is_mounted(directory.path()).unwrap());
        assert_eq!(below(directory.path()).unwrap(), Vec::<PathBuf>::new());
        assert!(of(directory.path()).unwrap().is_some());
    }
}
