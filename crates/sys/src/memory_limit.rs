//! Memory limit of this process: the machine's memory, or the limits of its control group and all
//! parent groups.
//!
//! Both hierarchies are read, of version 2 (`memory.max`, `memory.high`) and of version 1
//! (`memory.limit_in_bytes`), where they are mounted for this process. A file that cannot be read
//! does not limit.

use std::{
    fs,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

/// The lowest of all limits on this process, bytes; `None` if none is known, not even the machine's
/// memory.
pub fn limit() -> Option<u64> {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let (groups, mounts) = (read("/proc/self/cgroup"), fs::read("/proc/self/mountinfo").unwrap_or_default());
    let of_groups = files(&groups, &mounts).into_iter().filter_map(|file| number(&fs::read_to_string(file).ok()?));
    of_groups.chain(machine(&read("/proc/meminfo"))).min()
}

/// All memory of the machine, from `/proc/meminfo`. Pure.
fn machine(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Parses a limit in the kernel's format; version 1 has a very large number for none. Pure.
fn number(text: &str) -> Option<u64> {
    text.trim().parse::<u64>().ok()
}

/// The files that may contain a limit on a process of these groups (`/proc/self/cgroup`), for these
/// mounts (`/proc/self/mountinfo`). Pure.
fn files(groups: &str, mounts: &[u8]) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(group)) = (fields.next(), fields.next()) else { continue };
        let (kind, names): (_, &[&str]) = match controllers {
            "" => ("cgroup2", &["memory.max", "memory.high"]),
            _ if controllers.split(',').any(|controller| controller == "memory") => {
                ("cgroup", &["memory.limit_in_bytes"])
            }
            _ => continue,
        };
        for (root, place) in mounts.split(|byte| *byte == b'\n').filter_map(|line| mounted(line, kind)) {
            // A part of the tree may be mounted: parents above it are not visible.
            let inside = Path::new(group).strip_prefix(&root).unwrap_or(Path::new(""));
            for group in inside.ancestors() {
                files.extend(names.iter().map(|name| place.join(group).join(name)));
            }
        }
    }
    files
}

/// Root and mount point of a cgroup mount on this line. Of version 1, only that of the memory
/// controller.
fn mounted(line: &[u8], kind: &str) -> Option<(PathBuf, PathBuf)> {
    let mut fields = line.split(|byte| *byte == b' ').skip(3);
    let path = |field: &[u8]| PathBuf::from(std::ffi::OsStr::from_bytes(field));
    let (root, place) = (path(fields.next()?), path(fields.next()?));
    fields.by_ref().find(|field| *field == b"-")?;
    let (is, options) = (fields.next()?, fields.nth(1)?);
    let fits = is == kind.as_bytes()
        && (kind == "cgroup2" || options.split(|byte| *byte == b',').any(|option| option == b"memory"));
    fits.then_some((root, place))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &[u8] = b"30 24 0:26 / /sys/fs/cgroup rw shared:9 - tmpfs tmpfs rw\n\
        31 30 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
        32 30 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
        33 30 0:29 /docker/7 /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";

    #[test]
    fn groups_and_all_above_them_are_asked() {
        let found = files("4:memory:/a/b\n3:cpu:/a\n0::/docker/7/x\n", MOUNTS);
        let found: Vec<&str> = found.iter().map(|path| path.to_str().unwrap()).collect();
        let (one, two) = ("/sys/fs/cgroup/memory", "/sys/fs/cgroup/unified");
        assert_eq!(
            found,
            [
                format!("{one}/a/b/memory.limit_in_bytes"),
                format!("{one}/a/memory.limit_in_bytes"),
                format!("{one}/memory.limit_in_bytes"),
                format!("{two}/x/memory.max"),
                format!("{two}/x/memory.high"),
                format!("{two}/memory.max"),
                format!("{two}/memory.high"),
            ]
        );
        assert!(files("nonsense\n", MOUNTS).is_empty());
    }

    #[test]
    fn numbers_are_bytes() {
        assert_eq!((number("67108864\n"), number("max\n"), number("")), (Some(64 << 20), None, None));
        assert_eq!(machine("MemFree: 1 kB\nMemTotal:       2048 kB\n"), Some(2 << 20));
        assert!(limit().is_some_and(|limit| limit > 0));
    }
}
