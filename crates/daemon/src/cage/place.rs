//! Checks whether a directory can be caged: directory and mount point exist, neither lies in the other, and the
//! directory is in no cage yet.
//!
//! Called before anything is mounted, for `nacre cage` and for every stack with a cage in it.

use super::report::CageReport;
use crate::{
    failure::{Exit, Failure},
    mountinfo::{self, MountEntry},
    report::path_text,
};
use std::path::{Path, PathBuf};

/// Returns the directory that is to be caged, resolved.
///
/// # Errors
/// The path does not exist or is not a directory, or it lies in a virtual file system of the kernel.
pub fn directory(named: &Path) -> Result<PathBuf, Failure> {
    let directory = crate::opening::directory(named, "directory", "a cage limits a directory that is there")?;
    stores_files(&directory, &mountinfo::read()?)?;
    Ok(directory)
}

/// Refuses a directory (resolved) that lies in a virtual file system.
fn stores_files(directory: &Path, table: &[MountEntry]) -> Result<(), Failure> {
    // Of several mounts at one mount point, the last one is visible.
    let above = table.iter().filter(|entry| directory.starts_with(&entry.mountpoint));
    let Some(entry) = above.max_by_key(|entry| entry.mountpoint.as_os_str().len()) else { return Ok(()) };
    if mountinfo::kernel_kind(&entry.kind).is_none_or(|kind| kind.stores_files) {
        return Ok(());
    }
    Err(Failure::new(format!("{} lies in a file system of the kernel ({})", path_text(directory), entry.kind))
        .next("a cage limits directories in which files are stored"))
}

/// Refuses a cage whose directory and mount point lie within each other. Both paths are resolved.
///
/// # Errors
/// One of the two lies inside of the other.
pub fn apart(directory: &Path, mountpoint: &Path) -> Result<(), Failure> {
    if directory == mountpoint {
        return Ok(());
    }
    let (of, at) = (path_text(directory), path_text(mountpoint));
    if directory.starts_with(mountpoint) {
        return Err(Failure::new(format!(
            "the directory {of} lies inside of its own mount point {at}: the mount would cover it"
        ))
        .next(format!("cage it in place (`nacre cage ... {of}`), or choose a mount point elsewhere")));
    }
    if mountpoint.starts_with(directory) {
        return Err(Failure::new(format!(
            "the mount point {at} lies inside of the directory {of}: the cage would contain itself"
        ))
        .next("choose a mount point elsewhere, or none: then the cage is mounted over the directory itself"));
    }
    Ok(())
}

/// Refuses a second cage for a directory: each would count writes through the other only afterwards. `table` is the
/// mount table.
///
/// # Errors
/// The directory is the source or the mount point of a cage. A detached cage does not count: it is taken over.
pub fn uncaged(directory: &Path, cages: &[CageReport], table: &[MountEntry]) -> Result<(), Failure> {
    let text = path_text(directory);
    let Some(cage) = cages.iter().find(|cage| cage.attached && (cage.directory == text || cage.mountpoint == text))
    else {
        return Ok(());
    };
    if cage.pid != 0 && !table.iter().any(|entry| path_text(&entry.mountpoint) == cage.mountpoint) {
        let what = format!(
            "the cage of {text} is mounted in another mount namespace only, that of process {}, which serves it",
            cage.pid
        );
        return Err(Failure::new(what).exit(Exit::Busy).next(format!("`kill {}` ends it", cage.pid)));
    }
    let place = if cage.mountpoint == text { String::new() } else { format!(" at {}", cage.mountpoint) };
    Err(Failure::new(format!("{text} is a cage already{place} (engine {})", cage.engine))
        .next(format!("`nacre cage resize {text} SIZE` changes its limit, `nacre umount {}` ends it", cage.mountpoint)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mountinfo;
    use std::fs;

    #[test]
    fn a_cage_is_not_within_reach_of_its_own_mount() {
        for (directory, mountpoint, says) in [
            ("/a/b", "/a/b", None),
            ("/a/b", "/a/bc", None),
            ("/a/bc", "/a/b", None),
            ("/a/b", "/a", Some("inside of its own mount point /a")),
            ("/a/b", "/", Some("inside of its own mount point /")),
            ("/a", "/a/b/c", Some("the mount point /a/b/c lies inside of the directory /a")),
            ("/", "/a", Some("the mount point /a lies inside of the directory /")),
        ] {
            let found = apart(Path::new(directory), Path::new(mountpoint)).err().map(|failure| failure.what);
            assert_eq!(found.is_some(), says.is_some(), "{directory} {mountpoint}");
            assert!(found.unwrap_or_default().contains(says.unwrap_or_default()), "{directory} {mountpoint}");
        }
    }

    #[test]
    fn file_systems_of_the_kernel_are_not_caged() {
        let table = mountinfo::parse(
            b"1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 0:2 / /proc rw - proc proc rw\n3 1 0:3 / /dev rw - devtmpfs none rw\n\
              4 3 0:4 / /dev/shm rw - tmpfs none rw\n5 1 0:5 / /sys rw - sysfs none rw\n\
              6 5 0:6 / /sys/fs/cgroup rw - cgroup2 none rw\n7 1 0:7 / /mnt rw - proc proc rw\n8 1 8:2 / /mnt rw - ext4 /dev/sda2 rw\n",
        );
        for (directory, kind) in [
            ("/", None),
            ("/process", None),
            ("/dev/shm", None),
            ("/mnt/a", None),
            ("/proc", Some("(proc)")),
            ("/proc/1/cwd", Some("(proc)")),
            ("/dev", Some("(devtmpfs)")),
            ("/sys/kernel", Some("(sysfs)")),
            ("/sys/fs/cgroup/a", Some("(cgroup2)")),
        ] {
            let found = stores_files(Path::new(directory), &table).err().map(|failure| failure.what);
            assert_eq!(found.is_some(), kind.is_some(), "{directory}");
            assert!(found.unwrap_or_default().contains(kind.unwrap_or_default()), "{directory}");
        }
        assert!(super::directory(Path::new("/proc")).is_err());
        assert!(super::directory(Path::new("/proc/self/fd")).is_err());
    }

    #[test]
    fn nothing_is_caged_twice() {
        let cage = CageReport {
            directory: "/a".to_owned(),
            mountpoint: "/b".to_owned(),
            attached: true,
            ..CageReport::default()
        };
        let gone = CageReport {
            directory: "/d".to_owned(),
            mountpoint: "/d".to_owned(),
            attached: false,
            ..CageReport::default()
        };
        let elsewhere = CageReport {
            directory: "/e".to_owned(),
            mountpoint: "/e".to_owned(),
            attached: true,
            pid: 7,
            ..CageReport::default()
        };
        let cages = [cage, gone, elsewhere];
        for (directory, exit) in [
            ("/a", Some(Exit::Failure)),
            ("/b", Some(Exit::Failure)),
            ("/a/nested", None),
            ("/", None),
            ("/d", None),
            ("/e", Some(Exit::Busy)),
        ] {
            let found = uncaged(Path::new(directory), &cages, &[]).err().map(|failure| failure.exit);
            assert_eq!(found, exit, "{directory}");
        }
        let table = mountinfo::parse(b"99 35 0:43 / /e rw - fuse.nacre cage:/e rw\n");
        assert_eq!(uncaged(Path::new("/e"), &cages, &table).unwrap_err().exit, Exit::Failure);
    }

    #[test]
    fn only_directories_can_be_caged() {
        let scratch = tempfile::tempdir().unwrap();
        fs::write(scratch.path().join("file"), "").unwrap();
        assert_eq!(directory(&scratch.path().join("missing")).unwrap_err().exit, Exit::NotFound);
        assert!(directory(&scratch.path().join("file")).unwrap_err().what.contains("is not a directory"));
        assert_eq!(directory(scratch.path()).unwrap(), fs::canonicalize(scratch.path()).unwrap());
    }
}
