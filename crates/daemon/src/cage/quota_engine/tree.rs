//! Moves the files of a directory tree into a project, and out of it again.
//!
//! From the top down, each directory before its entries: files that others make meanwhile in a directory that has
//! moved already belong to the project by inheritance, and files in a directory that has not are found when it is
//! read. Names that lead out of the tree (links, other file systems) are not followed.

use crate::{failure::Failure, report::path_text};
use nacre_sys::project_quota::{self, Membership};
use rustix::{
    fs::{AtFlags, Dir, FileType, Mode, OFlags, fstat, openat, statat},
    io::Errno,
};
use std::{
    ffi::CStr,
    fs::File,
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Path, PathBuf},
};

/// Number of files after which progress is reported.
const NEWS_EVERY: u64 = 100_000;

/// Result of a move.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Files and directories that belong to the project now (or no longer).
    pub files: u64,
    /// Number of files that cannot be moved: immutable ones.
    pub left: u64,
    /// Path of the first file that cannot be moved.
    pub example: Option<PathBuf>,
}

/// Moves everything at and below `root` that belongs to project `from` to project `to`; files of a third project
/// stay there.
///
/// # Errors
/// The first error of the system; the files before it have moved.
pub fn relocate(root: &File, name: &Path, from: u32, to: u32, tell: &mut dyn FnMut(u64)) -> Result<Moved, Failure> {
    let device = fstat(root).map_err(|error| failed(name, &error.into()))?.st_dev;
    let mut walk = Walk { device, from, to, moved: Moved::default(), tell };
    let mut waiting = vec![PathBuf::new()];
    while let Some(relative) = waiting.pop() {
        let directory = match open_below(root, &relative) {
            // The directory was removed or replaced meanwhile.
            Err(error) if vanished(&error) => continue,
            directory => directory.map_err(|error| failed(&name.join(&relative), &error))?,
        };
        walk.one(directory.as_fd(), true, &name.join(&relative))?;
        walk.entries(&directory, &relative, name, &mut waiting)?;
    }
    Ok(walk.moved)
}

struct Walk<'a> {
    device: u64,
    from: u32,
    to: u32,
    moved: Moved,
    tell: &'a mut dyn FnMut(u64),
}

impl Walk<'_> {
    fn one(&mut self, file: impl AsFd, directory: bool, path: &Path) -> Result<(), Failure> {
        let now = project_quota::membership(file.as_fd()).map_err(|error| failed(path, &error))?;
        let inherited = directory && self.to != 0;
        if (now.project == self.to && now.inherited == inherited)
            || (now.project != self.from && now.project != self.to)
        {
            return Ok(());
        }
        match project_quota::set_membership(file.as_fd(), Membership { project: self.to, inherited }) {
            Ok(()) => {
                self.moved.files += 1;
                if self.moved.files.is_multiple_of(NEWS_EVERY) {
                    (self.tell)(self.moved.files);
                }
                Ok(())
            }
            // Immutable or append-only.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                self.moved.left += 1;
                self.moved.example.get_or_insert_with(|| path.to_owned());
                Ok(())
            }
            Err(error) => Err(failed(path, &error)),
        }
    }

    /// Moves a link, socket or device, which cannot be opened for this. Before Linux 6.17, existing ones stay
    /// uncounted.
    fn special(&mut self, directory: &OwnedFd, name: &CStr, path: &Path) -> Result<(), Failure> {
        let moved = project_quota::membership_of(directory.as_fd(), name).and_then(|project| {
            if project == self.from {
                project_quota::set_membership_of(directory.as_fd(), name, self.to).map(|()| true)
            } else {
                Ok(false)
            }
        });
        match moved {
            Ok(moved) => {
                self.moved.files += u64::from(moved);
                Ok(())
            }
            Err(error) if vanished(&error) || unsupported(&error) => Ok(()),
            Err(error) => Err(failed(path, &error)),
        }
    }

    fn entries(
        &mut self,
        directory: &OwnedFd,
        relative: &Path,
        name: &Path,
        waiting: &mut Vec<PathBuf>,
    ) -> Result<(), Failure> {
        let list = Dir::read_from(directory).map_err(|error| failed(&name.join(relative), &error.into()))?;
        for entry in list {
            let entry = entry.map_err(|error| failed(&name.join(relative), &error.into()))?;
            let entry_name = entry.file_name();
            if matches!(entry_name.to_bytes(), b"." | b"..") {
                continue;
            }
            let below = relative.join(std::ffi::OsStr::from_bytes(entry_name.to_bytes()));
            let stat = match statat(directory, entry_name, AtFlags::SYMLINK_NOFOLLOW) {
                Err(Errno::NOENT) => continue,
                stat => stat.map_err(|error| failed(&name.join(&below), &error.into()))?,
            };
            if stat.st_dev != self.device {
                continue;
            }
            match FileType::from_raw_mode(stat.st_mode) {
                FileType::Directory => waiting.push(below),
                FileType::RegularFile => {
                    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
                    match openat(directory, entry_name, flags, Mode::empty()) {
                        Err(error) if vanished(&error.into()) => {}
                        file => {
                            let file = file.map_err(|error| failed(&name.join(&below), &error.into()))?;
                            self.one(file, false, &name.join(&below))?;
                        }
                    }
                }
                _ => self.special(directory, entry_name, &name.join(&below))?,
            }
        }
        Ok(())
    }
}

/// Opens a directory of the tree; no component below the root may be a link.
fn open_below(root: &File, relative: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut directory = openat(root, ".", flags, Mode::empty())?;
    for part in relative.components() {
        directory = openat(&directory, part.as_os_str(), flags, Mode::empty())?;
    }
    Ok(directory)
}

fn vanished(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    matches!(errno, Some(Errno::NOENT | Errno::NOTDIR | Errno::LOOP))
}

/// Whether kernel or file system do not support the call, or this kind of file belongs to no project.
fn unsupported(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    matches!(errno, Some(Errno::NOSYS | Errno::OPNOTSUPP | Errno::NOTTY | Errno::INVAL))
}

fn failed(path: &Path, error: &io::Error) -> Failure {
    Failure::io("cannot set the project of", path_text(path), error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        ffi::OsStr,
        fs,
        os::unix::fs::symlink,
        process::{Command, Output},
    };

    /// An XFS on an image knows projects even where the kernel has no quotas for it; gone when it
    /// is dropped.
    struct Xfs(tempfile::TempDir);

    fn run(program: &str, arguments: &[&OsStr]) -> Option<Output> {
        Command::new(program).args(arguments).output().ok().filter(|output| output.status.success())
    }

    impl Xfs {
        fn new() -> Option<Xfs> {
            let scratch = tempfile::tempdir().unwrap();
            let image = scratch.path().join("image");
            File::create(&image).unwrap().set_len(300 << 20).unwrap();
            fs::create_dir(scratch.path().join("mount")).unwrap();
            run("mkfs.xfs", &[OsStr::new("-q"), image.as_os_str()])?;
            let mountpoint = scratch.path().join("mount");
            run("mount", &[OsStr::new("-o"), OsStr::new("loop"), image.as_os_str(), mountpoint.as_os_str()])?;
            Some(Xfs(scratch))
        }
    }

    impl Drop for Xfs {
        fn drop(&mut self) {
            run("umount", &[OsStr::new("-l"), self.0.path().join("mount").as_os_str()]).expect("umount");
        }
    }

    fn project(path: &Path) -> Membership {
        project_quota::membership(File::open(path).unwrap().as_fd()).unwrap()
    }

    #[test]
    fn a_tree_moves_whole_and_back() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let Some(xfs) = Xfs::new() else { return };
        let root = xfs.0.path().join("mount/tree");
        fs::create_dir_all(root.join("a/b/c")).unwrap();
        for file in ["top", "a/file", "a/b/c/deep"] {
            fs::write(root.join(file), file).unwrap();
        }
        fs::create_dir(root.join("other")).unwrap();
        let other = Membership { project: 77, inherited: true };
        project_quota::set_membership(File::open(root.join("other")).unwrap().as_fd(), other).unwrap();
        // A link out of the tree, which must not be followed.
        let outside = xfs.0.path().join("mount/outside");
        fs::write(&outside, "x").unwrap();
        symlink(&outside, root.join("link")).unwrap();
        let open = File::open(&root).unwrap();

        let moved = relocate(&open, &root, 0, 4711, &mut |_| ()).unwrap();
        let special = project_quota::membership_of(open.as_fd(), c"link").ok();
        assert!(moved.files == 7 + u64::from(special.is_some()) && moved.left == 0, "{moved:?}");
        assert!(special.is_none_or(|project| project == 4711));
        for directory in [root.clone(), root.join("a"), root.join("a/b"), root.join("a/b/c")] {
            assert_eq!(project(&directory), Membership { project: 4711, inherited: true }, "{}", directory.display());
        }
        assert_eq!(project(&root.join("a/b/c/deep")).project, 4711);
        fs::write(root.join("a/new"), "").unwrap();
        assert_eq!(project(&root.join("a/new")).project, 4711);
        assert_eq!(project(&outside).project, 0);
        // Files of a third project stay in it.
        assert_eq!(project(&root.join("other")), other);
        // A second run has nothing to do.
        assert_eq!(relocate(&open, &root, 0, 4711, &mut |_| ()).unwrap(), Moved::default());

        relocate(&open, &root, 4711, 0, &mut |_| ()).unwrap();
        assert_eq!(project(&root), Membership { project: 0, inherited: false });
        assert_eq!(project(&root.join("a/b/c/deep")).project, 0);
        assert_eq!(project(&root.join("other")), other);
    }
}
