//! The image file of the engine `loop`: made whole or not at all, never overwritten.
//!
//! Invariants: a new image gets its name only when its file system is complete; an existing file is only used
//! unchanged, and only if nobody but root can have written it, since the kernel trusts its content.

use super::programs;
use crate::{
    cage::{
        engine::{FileSystem, Tell},
        record::{self, Held},
    },
    clock,
    failure::{Exit, Failure},
    report::path_text,
};
use nacre_sys::{
    inode::proc_path,
    ioctls,
    loop_devices::{self, LoopDevice},
};
use rustix::fs::{FallocateFlags, FsWord, OFlags, RenameFlags, fallocate, ftruncate};
use std::{
    ffi::OsString,
    fs::{self, File, OpenOptions},
    io,
    os::{
        fd::{AsFd, AsRawFd},
        unix::fs::{FileExt, MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    time::Duration,
};

/// `FS_NOCOW_FL` (linux/fs.h): Btrfs overwrites the file's blocks in place.
const NO_COPY_ON_WRITE: u32 = 0x0080_0000;
/// Images end at a multiple of this, the block size of all file systems here.
pub const BLOCK: u64 = 4096;
/// How long the kernel may take to detach an image after its last user is gone.
const PATIENCE: Duration = Duration::from_secs(10);
/// Interval of polling.
const LOOK: Duration = Duration::from_millis(5);

/// An image, open and locked against other commands of ours.
#[derive(Debug)]
pub struct Image {
    /// Path of the image.
    pub path: PathBuf,
    /// File system on the image.
    pub fstype: FileSystem,
    /// Open for reading and writing, without the page cache where the host can.
    pub file: File,
    /// Descriptor with the lock. It is separate: the kernel keeps `file` open as long as the image is attached.
    _held: Held,
}

/// Returns the default path of an image: next to the directory, with the ending `.cage`.
///
/// # Errors
/// The root directory has no parent.
pub fn beside(directory: &Path) -> Result<PathBuf, Failure> {
    let name = directory.file_name().ok_or_else(|| Failure::usage("the root directory cannot be caged in an image"))?;
    let mut name = name.to_owned();
    name.push(".cage");
    Ok(directory.with_file_name(name))
}

impl Image {
    /// Opens the image at `path`; `None` where there is no file.
    ///
    /// # Errors
    /// The file is no image, others can write it, or another command holds it.
    pub fn open(path: &Path) -> Result<Option<Image>, Failure> {
        let failed = |error: io::Error| Failure::io("cannot open", path_text(path), &error);
        let metadata = match fs::symlink_metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            metadata => metadata.map_err(failed)?,
        };
        sound(&metadata, path)?;
        let file = open_direct(path, OpenOptions::new().read(true).write(true)).map_err(failed)?;
        // The file that was opened is checked, in case it was exchanged meanwhile.
        sound(&file.metadata().map_err(failed)?, path)?;
        let Some(fstype) = content(&file).map_err(failed)? else {
            return Err(left_alone(path, "holds no ext4, XFS or Btrfs file system"));
        };
        Ok(Some(Image { path: path.to_owned(), fstype, file, _held: held(path)? }))
    }

    /// Makes an image of `bytes` with a file system on it.
    ///
    /// # Errors
    /// No room on the host, a program that is missing or fails; nothing is left behind.
    pub fn make(
        path: &Path,
        fstype: FileSystem,
        bytes: u64,
        inodes: Option<u64>,
        sparse: bool,
        tell: Tell<'_>,
    ) -> Result<Image, Failure> {
        let new = Unready::new(path)?;
        no_copies(&new.file, tell);
        if sparse {
            tell(
                "the image takes room on the host only as it fills: when the host is full, writes in the cage fail with I/O errors",
            );
        }
        set_aside(&new, bytes, sparse)?;
        programs::make(fstype, &path_for_programs(&new.file), bytes, inodes)?;
        // Blocks that mkfs discarded are allocated again.
        set_aside(&new, bytes, sparse)?;
        new.take_place(path, fstype, RenameFlags::NOREPLACE)
    }

    /// A path of the open image for other programs, whatever has its name meanwhile.
    pub fn path_for_programs(&self) -> PathBuf {
        path_for_programs(&self.file)
    }

    /// Replaces the image atomically by a new file that `fill` makes from this one; it gets a path that leads to the
    /// new file, whatever has its name meanwhile.
    ///
    /// # Errors
    /// Errors of `fill` or of the system: this image is unchanged then, and nothing else stays behind.
    pub fn replaced(&self, fill: impl FnOnce(&Path) -> Result<(), Failure>) -> Result<Image, Failure> {
        let new = Unready::new(&self.path)?;
        no_copies(&new.file, &mut |_| ());
        fill(&path_for_programs(&new.file))?;
        new.take_place(&self.path, self.fstype, RenameFlags::empty())
    }

    /// Returns its length in bytes.
    ///
    /// # Errors
    /// As `fstat(2)`.
    pub fn length(&self) -> Result<u64, Failure> {
        self.file.metadata().map(|metadata| metadata.len()).map_err(|error| self.failed("cannot look at", &error))
    }

    /// Changes its length; with `filled`, every block of it is allocated on the host.
    ///
    /// # Errors
    /// ENOSPC: then its length is unchanged.
    pub fn set_length(&self, bytes: u64, filled: bool) -> Result<(), Failure> {
        let before = self.length()?;
        let set = if bytes != before { ftruncate(&self.file, bytes) } else { Ok(()) };
        let set =
            set.and_then(|()| if filled { fallocate(&self.file, FallocateFlags::empty(), 0, bytes) } else { Ok(()) });
        set.map_err(|error| {
            if bytes > before {
                // Only the part that was added just now is cut off.
                let _ = ftruncate(&self.file, before);
            }
            let failure = self.failed("cannot give its size to", &error.into());
            if error == rustix::io::Errno::NOSPC { failure.next(NO_ROOM) } else { failure }
        })
    }

    /// Returns the loop device that it is attached to, if any.
    ///
    /// # Errors
    /// Where sysfs is not mounted.
    pub fn device(&self) -> Result<Option<LoopDevice>, Failure> {
        loop_devices::attached(&self.file).map_err(|error| self.failed("cannot find the loop device of", &error))
    }

    /// Waits until no device shows it any more: the kernel detaches it after the last user is gone, with a delay.
    ///
    /// # Errors
    /// The image is still in use.
    pub fn released(&self) -> Result<(), Failure> {
        let mut failed = None;
        // Polling does not open the device: an open device stays attached.
        let released = clock::look_until(PATIENCE, LOOK, || match self.device() {
            Ok(device) => device.is_none(),
            Err(failure) => {
                failed = Some(failure);
                true
            }
        });
        if let Some(failure) = failed {
            return Err(failure);
        }
        let Some(device) = (if released { None } else { self.device()? }) else { return Ok(()) };
        let what = format!("{} is still in use as {}", path_text(&self.path), path_text(&device.path));
        Err(Failure::new(what)
            .exit(Exit::Busy)
            .next("somebody has files in it open, or has mounted it at another place, too"))
    }

    /// Waits a moment for the kernel to detach the image, unless `lazy`.
    pub fn settle(&self, lazy: bool) {
        const MOMENT: Duration = Duration::from_secs(2);
        if !lazy {
            clock::look_until(MOMENT, LOOK, || !matches!(self.device(), Ok(Some(_))));
        }
    }

    /// Attaches the image to a loop device.
    ///
    /// # Errors
    /// There are no loop devices, or this process may not use them.
    pub fn attach(&self) -> Result<LoopDevice, Failure> {
        let attached = loop_devices::attach(self.file.as_fd(), &self.path);
        attached.map_err(|error| {
            let failure = self.failed("cannot attach to a loop device:", &error);
            match error.kind() {
                io::ErrorKind::NotFound => failure.next(
                    "`modprobe loop` loads the driver; a container must be given /dev/loop-control and /dev/loop*",
                ),
                io::ErrorKind::PermissionDenied => failure.next("--engine=fuse needs no privilege"),
                _ => failure,
            }
        })
    }

    fn failed(&self, doing: &str, error: &io::Error) -> Failure {
        Failure::io(doing, path_text(&self.path), error)
    }
}

const NO_ROOM: &str =
    "the host has not that much room; --sparse makes an image that takes room only as it fills, and may then find none";

/// An image that is being made, under a temporary name; removed when it is dropped.
struct Unready {
    name: PathBuf,
    file: File,
    held: Option<Held>,
}

impl Unready {
    /// Creates an empty file.
    fn new(image: &Path) -> Result<Unready, Failure> {
        clear(image)?;
        let name = unready_name(image);
        let file = open_direct(&name, OpenOptions::new().read(true).write(true).create_new(true).mode(0o600));
        let file = file.map_err(|error| Failure::io("cannot make the image", path_text(&name), &error))?;
        let held = Some(held(&name)?);
        Ok(Unready { name, file, held })
    }

    /// Renames the complete file to the image's name.
    fn take_place(mut self, image: &Path, fstype: FileSystem, flags: RenameFlags) -> Result<Image, Failure> {
        let finish = || -> io::Result<()> {
            self.file.sync_all()?;
            rustix::fs::renameat_with(rustix::fs::CWD, &self.name, rustix::fs::CWD, image, flags)?;
            let (named, own) = (fs::symlink_metadata(image)?, self.file.metadata()?);
            if (named.dev(), named.ino()) != (own.dev(), own.ino()) {
                return Err(io::Error::other("another process has put another file in its place"));
            }
            image.parent().map_or(Ok(()), |parent| File::open(parent)?.sync_all())
        };
        finish().map_err(|error| Failure::io("cannot make the image", path_text(image), &error))?;
        let held = self.held.take().ok_or_else(|| Failure::new("the image is not locked"))?;
        let file = self.file.try_clone().map_err(|error| Failure::io("cannot open", path_text(image), &error))?;
        Ok(Image { path: image.to_owned(), fstype, file, _held: held })
    }
}

impl Drop for Unready {
    fn drop(&mut self) {
        // After the rename nothing has this name; before it, nobody else has the file: it was ours alone from the
        // start.
        let _ = fs::remove_file(&self.name);
    }
}

fn unready_name(image: &Path) -> PathBuf {
    let mut name = OsString::from(image);
    name.push(".new");
    PathBuf::from(name)
}

/// Removes the temporary file of a command that was killed while it made an image.
///
/// # Errors
/// The file is not ours, or another command uses it.
pub fn clear(image: &Path) -> Result<(), Failure> {
    let name = unready_name(image);
    // Only a file of our own is removed: others may be able to write to the directory.
    match fs::symlink_metadata(&name) {
        Ok(metadata) if metadata.is_file() && metadata.uid() == rustix::process::geteuid().as_raw() => {
            let _held = held(&name)?;
            fs::remove_file(&name).map_err(|error| Failure::io("cannot remove", path_text(&name), &error))
        }
        Ok(_) => Err(Failure::new(format!("{} is in the way", path_text(&name))).next("move it away")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(Failure::io("cannot look at", path_text(&name), &error)),
    }
}

/// Gives a new image its length, and (unless `sparse`) allocates all its blocks.
fn set_aside(new: &Unready, bytes: u64, sparse: bool) -> Result<(), Failure> {
    let failed =
        |error: rustix::io::Errno| Failure::io("cannot set room aside for", path_text(&new.name), &error.into());
    if sparse {
        return ftruncate(&new.file, bytes).map_err(failed);
    }
    fallocate(&new.file, FallocateFlags::empty(), 0, bytes).map_err(|error| match error {
        rustix::io::Errno::OPNOTSUPP => {
            failed(error).next("this file system cannot; --sparse makes an image that takes room only as it fills")
        }
        rustix::io::Errno::NOSPC => failed(error).next(NO_ROOM),
        error => failed(error),
    })
}

/// Locks a file against other commands of ours.
fn held(path: &Path) -> Result<Held, Failure> {
    let flag = i32::try_from(OFlags::NOFOLLOW.bits()).unwrap_or_default();
    let file = OpenOptions::new().read(true).custom_flags(flag).open(path);
    let file = file.map_err(|error| Failure::io("cannot open", path_text(path), &error))?;
    record::hold(&file, path)
}

/// Turns copy-on-write off for an image on Btrfs: otherwise it gets slow, and a block that it has already may find
/// no room when it is written again.
fn no_copies(file: &File, tell: Tell<'_>) {
    const BTRFS: FsWord = 0x9123_683E;
    let on_btrfs = rustix::fs::fstatfs(file).is_ok_and(|stat| stat.f_type == BTRFS);
    if !on_btrfs {
        return;
    }
    let set = ioctls::flags(file.as_fd()).and_then(|flags| ioctls::set_flags(file.as_fd(), flags | NO_COPY_ON_WRITE));
    if let Err(error) = set {
        tell(&format!(
            "the image is copied on each write, which is slow: chattr +C is refused ({})",
            crate::failure::reason(&error)
        ));
    }
}

/// Opens without the page cache where the file system below can.
fn open_direct(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let flag = |flags: OFlags| i32::try_from(flags.bits()).unwrap_or_default();
    let file = options.custom_flags(flag(OFlags::NOFOLLOW)).open(path)?;
    // The same file again: a name may lead to another one by now.
    let direct =
        OpenOptions::new().read(true).write(true).custom_flags(flag(OFlags::DIRECT)).open(proc_path(file.as_fd()));
    match direct {
        Err(error) if error.raw_os_error() == Some(22) => Ok(file),
        other => other,
    }
}

/// A path by which a program that this process starts reaches an open file. Its name may lead to another file by then:
/// others may be able to write to the directory.
fn path_for_programs(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()))
}

/// Refuses a file whose content the kernel cannot trust.
fn sound(metadata: &fs::Metadata, path: &Path) -> Result<(), Failure> {
    if !metadata.is_file() {
        return Err(left_alone(path, "is not a regular file"));
    }
    if metadata.uid() != rustix::process::geteuid().as_raw() || metadata.mode() & 0o022 != 0 {
        return Err(left_alone(path, "could have been written by somebody else"));
    }
    Ok(())
}

fn left_alone(path: &Path, why: &str) -> Failure {
    Failure::new(format!("{} {why}, so it is left alone", path_text(path)))
        .next("--image=FILE names another place for the image")
}

/// Returns the file system on a file, identified by its magic number.
fn content(image: &File) -> io::Result<Option<FileSystem>> {
    // A separate descriptor: `image` may be opened with `O_DIRECT` and read whole blocks only.
    let file = File::open(proc_path(image.as_fd()))?;
    let has = |at: u64, magic: &[u8]| {
        let mut room = vec![0; magic.len()];
        match file.read_exact_at(&mut room, at) {
            Ok(()) => Ok(room == magic),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
            Err(error) => Err(error),
        }
    };
    Ok(if has(0, b"XFSB")? {
        Some(FileSystem::Xfs)
    } else if has(0x1_0040, b"_BHRfS_M")? {
        Some(FileSystem::Btrfs)
    } else if has(1024 + 56, &[0x53, 0xEF])? {
        Some(FileSystem::Ext4)
    } else {
        None
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn images_have_a_place_beside() {
        assert_eq!(beside(Path::new("/var/log")).unwrap(), Path::new("/var/log.cage"));
        assert_eq!(beside(Path::new("/a.b/c.d")).unwrap(), Path::new("/a.b/c.d.cage"));
        assert!(beside(Path::new("/")).is_err());
        assert_eq!(unready_name(Path::new("/x.cage")), Path::new("/x.cage.new"));
    }

    #[test]
    fn only_what_is_surely_an_image_is_taken_up() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("image");
        assert!(Image::open(&path).unwrap().is_none());
        let mut content = vec![0; 0x1_1000];
        fs::write(&path, &content).unwrap();
        assert!(Image::open(&path).unwrap_err().what.contains("holds no ext4"));
        content[0x1_0040..0x1_0048].copy_from_slice(b"_BHRfS_M");
        fs::write(&path, &content).unwrap();
        let image = Image::open(&path).unwrap().unwrap();
        assert_eq!(image.fstype, FileSystem::Btrfs);
        assert_eq!(Image::open(&path).unwrap_err().exit, Exit::Busy);
        drop(image);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o620)).unwrap();
        assert!(Image::open(&path).unwrap_err().what.contains("written by somebody else"));
        let link = scratch.path().join("link");
        symlink(&path, &link).unwrap();
        assert!(Image::open(&link).unwrap_err().what.contains("not a regular file"));
        // Nothing was changed by looking.
        assert_eq!(fs::read(&path).unwrap(), content);
    }

    #[test]
    fn a_failed_image_leaves_nothing_behind() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("image");
        // Below what the file system needs.
        let failure = Image::make(&path, FileSystem::Xfs, 1 << 20, None, true, &mut |_| ()).unwrap_err();
        assert!(failure.what.starts_with("mkfs.xfs"), "{}", failure.what);
        assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0);
        // An existing file is never replaced.
        fs::write(&path, "mine").unwrap();
        Image::make(&path, FileSystem::Ext4, 16 << 20, None, true, &mut |_| ()).unwrap_err();
        assert_eq!(fs::read(&path).unwrap(), b"mine");
        assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 1);
        // The file of a killed command is removed; what somebody else put there is not.
        fs::write(unready_name(&path), "left").unwrap();
        clear(&path).unwrap();
        assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 1);
        fs::create_dir(unready_name(&path)).unwrap();
        assert!(clear(&path).unwrap_err().what.contains("in the way"));
    }

    #[test]
    fn a_file_put_in_the_place_of_a_new_image_is_not_touched() {
        let scratch = tempfile::tempdir().unwrap();
        let (path, victim) = (scratch.path().join("image"), scratch.path().join("victim"));
        fs::write(&victim, vec![7; 1 << 20]).unwrap();
        let image = Image::make(&path, FileSystem::Ext4, 16 << 20, None, true, &mut |_| ()).unwrap();
        let failure = image.replaced(|new| {
            fs::remove_file(unready_name(&path)).unwrap();
            symlink(&victim, unready_name(&path)).unwrap();
            fs::write(new, "new").map_err(|error| Failure::io("cannot write", "the new image", &error))
        });
        assert!(failure.unwrap_err().what.contains("another file in its place"));
        assert_eq!(fs::read(&victim).unwrap(), vec![7; 1 << 20]);
    }

    #[test]
    fn another_file_takes_the_place_of_an_image_whole_or_not_at_all() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("image");
        let image = Image::make(&path, FileSystem::Ext4, 16 << 20, None, true, &mut |_| ()).unwrap();
        let before = fs::read(&path).unwrap();
        let failure = image.replaced(|new| {
            fs::write(new, "half").unwrap();
            Err(Failure::new("no"))
        });
        assert_eq!(failure.unwrap_err().what, "no");
        assert!(fs::read(&path).unwrap() == before);
        let after = image.replaced(|new| {
            fs::write(new, "whole").unwrap();
            Ok(())
        });
        assert_eq!(after.unwrap().length().unwrap(), 5);
        assert_eq!(fs::read(&path).unwrap(), b"whole");
        assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 1);
    }
}
