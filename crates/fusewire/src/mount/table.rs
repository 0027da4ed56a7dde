//! Which mounts are at a path, from `/proc/self/mountinfo`.
//!
//! Called at mount (to remember our id) and at unmount (to see whether it is ours that would go). Reading the table sends no request to
//! any file system, unlike `stat(2)`.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Ids of the mounts at this absolute path, oldest first.
pub(super) fn mounts_at(path: &Path) -> io::Result<Vec<u64>> {
    Ok(parse(&std::fs::read("/proc/self/mountinfo")?, path.as_os_str().as_bytes()))
}

/// Id of the topmost mount at this path.
pub(super) fn top_mount(path: &Path) -> io::Result<Option<u64>> {
    Ok(mounts_at(path)?.last().copied())
}

/// A line is: id, parent, device, root, mountpoint, ...; separated by spaces.
fn parse(table: &[u8], path: &[u8]) -> Vec<u64> {
    let line = |line: &[u8]| {
        let mut fields = line.split(|byte| *byte == b' ');
        let id = std::str::from_utf8(fields.next()?).ok()?.parse().ok()?;
        (unescape(fields.nth(3)?) == path).then_some(id)
    };
    table.split(|byte| *byte == b'\n').filter_map(line).collect()
}

/// Undoes the octal escapes of space, tab, newline and backslash.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, after)) = rest.split_first() {
        let digits = if *first == b'\\' { after.split_first_chunk::<3>() } else { None };
        let octal = digits.and_then(|(digits, after)| Some((u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok()?, after)));
        let (byte, after) = octal.unwrap_or((*first, after));
        out.push(byte);
        rest = after;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_escaped_and_stacked_mounts() {
        let table = b"21 1 0:20 / / rw - ext4 /dev/x rw\n\
            40 21 0:41 / /mnt/a\\040b rw - fuse x rw\n\
            43 40 0:44 / /mnt/a\\040b ro shared:3 - fuse.y y rw\n\
            44 21 0:45 / /mnt/a\\134 rw - fuse.y y rw\nbroken\n";
        assert_eq!(parse(table, b"/mnt/a b"), [40, 43]);
        assert_eq!(parse(table, b"/mnt/a\\"), [44]);
        assert_eq!(parse(table, b"/mnt"), [] as [u64; 0]);
    }
}
