//! The mounts of this mount namespace, from `/proc/self/mountinfo`.

use crate::failure::Failure;
use std::{ffi::OsString, fs, os::unix::ffi::OsStringExt, path::Path, path::PathBuf};

/// Snapshot of the mount points, one entry for each mount.
pub struct MountTable(Vec<PathBuf>);

impl MountTable {
    /// Reads the table.
    ///
    /// # Errors
    /// Proc is not mounted.
    pub fn read() -> Result<MountTable, Failure> {
        let path = Path::new("/proc/self/mountinfo");
        let text = fs::read(path).map_err(|error| Failure::io("read", path, &error))?;
        Ok(MountTable(text.split(|byte| *byte == b'\n').filter_map(mount_point).collect()))
    }

    /// Number of mounts on top of each other at this path.
    pub fn count(&self, at: &Path) -> usize {
        self.0.iter().filter(|mounted| mounted.as_path() == at).count()
    }

    /// Whether anything is mounted at this path or below it.
    pub fn has_below(&self, directory: &Path) -> bool {
        self.0.iter().any(|mounted| mounted.starts_with(directory))
    }
}

/// The fifth field of a line, unescaped.
fn mount_point(line: &[u8]) -> Option<PathBuf> {
    let field = line.split(|byte| *byte == b' ').nth(4)?;
    let mut path = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, after)) = rest.split_first() {
        let octal = if *first == b'\\' { after.split_at_checked(3) } else { None };
        let code = octal.and_then(|(digits, _)| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        match (code, octal) {
            (Some(byte), Some((_, behind))) => {
                path.push(byte);
                rest = behind;
            }
            _ => {
                path.push(*first);
                rest = after;
            }
        }
    }
    Some(PathBuf::from(OsString::from_vec(path)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escaped_mount_points_are_read() {
        let line = b"36 35 98:0 / /a\\040b\\134c rw,noatime master:1 - fuse.nacre x rw";
        assert_eq!(mount_point(line), Some(PathBuf::from("/a b\\c")));
        assert_eq!(mount_point(b""), None);
        let table = MountTable(vec![PathBuf::from("/a/at"), PathBuf::from("/a/at"), PathBuf::from("/a/b")]);
        assert_eq!(table.count(Path::new("/a/at")), 2);
        assert!(table.has_below(Path::new("/a")) && !table.has_below(Path::new("/a/a")));
    }
}
