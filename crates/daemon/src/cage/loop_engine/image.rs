//! The file that holds the file system: made whole or not at all, never overwritten.
//!
//! Invariants: a new image gets its name only when its file system is complete; an existing file is
//! only taken up as it is, and only if nobody but root can have written it, since the kernel is
//! going to trust what it says.

use super::programs;
use crate::{
    cage::{
        engine::{FileSystem, Tell},
        record,
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
        fd::AsFd,
        unix::fs::{FileExt, MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    time::Duration,
};

/// `FS_NOCOW_FL` (linux/fs.h): Btrfs overwrites the file's blocks in place.
const NO_COPY_ON_WRITE: u32 = 0x0080_0000;
/// Images end at a multiple of this, the block size of all file systems here.
pub const BLOCK: u64 = 4096;
/// How long the kernel may take to let an image go after its last user is gone.
const PATIENCE: Duration = Duration::from_secs(10);
/// The time between two looks.
const LOOK: Duration = Duration::from_millis(5);

/// An image, open and held against other commands of ours.
#[derive(Debug)]
pub struct Image {
    /// Where it is.
    pub path: PathBuf,
    /// What is on it.
    pub fstype: FileSystem,
    /// Open for reading and writing, without the page cache where the host can.
    pub file: File,
    /// The lock is on a descriptor of its own: the kernel keeps the other one as long as the image
    /// is attached.
    _held: File,
}

/// The image's place when none is named: beside the directory.
///
/// # Errors
/// The root directory has no place beside it.
pub fn beside(directory: &Path) -> Result<PathBuf, Failure> {
    let name = directory.file_name().ok_or_else(|| Failure::usage("the root directory cannot be caged in an image"))?;
    let mut name = name.to_owned();
    name.push(".cage");
    Ok(directory.with_file_name(name))
}

impl Image {
    /// Takes up the image at `path`; none where nothing is there.
    ///
    /// # Errors
    /// Something that is no image, that others can write, or that another command holds.
    pub fn open(path: &Path) -> Result<Option<Image>, Failure> {
        let failed = |error: io::Error| Failure::io("cannot open", path_text(path), &error);
        let metadata = match fs::symlink_metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            metadata => metadata.map_err(failed)?,
        };
        sound(&metadata, path)?;
        let file = open_direct(path, OpenOptions::new().read(true).write(true)).map_err(failed)?;
        // What was opened is what counts, in case somebody has exchanged it meanwhile.
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
        programs::make(fstype, &new.name, bytes, inodes)?;
        // Whatever mkfs has given back is taken again.
        set_aside(&new, bytes, sparse)?;
        new.take_place(path, fstype, RenameFlags::NOREPLACE)
    }

    /// A new file, which `fill` makes out of this one, takes its place.
    ///
    /// # Errors
    /// Those of `fill`, or the system's: this image is as it was then, and nothing else is left
    /// behind.
    pub fn replaced(&self, fill: impl FnOnce(&Path) -> Result<(), Failure>) -> Result<Image, Failure> {
        let new = Unready::new(&self.path)?;
        no_copies(&new.file, &mut |_| ());
        fill(&new.name)?;
        new.take_place(&self.path, self.fstype, RenameFlags::empty())
    }

    /// Its length, bytes.
    ///
    /// # Errors
    /// What the system says.
    pub fn length(&self) -> Result<u64, Failure> {
        self.file.metadata().map(|metadata| metadata.len()).map_err(|error| self.failed("cannot look at", &error))
    }

    /// Gives it another length; with `filled`, every block of it is the host's to give from now on.
    ///
    /// # Errors
    /// ENOSPC: then it has the length that it had.
    pub fn set_length(&self, bytes: u64, filled: bool) -> Result<(), Failure> {
        let before = self.length()?;
        let set = if bytes != before { ftruncate(&self.file, bytes) } else { Ok(()) };
        let set =
            set.and_then(|()| if filled { fallocate(&self.file, FallocateFlags::empty(), 0, bytes) } else { Ok(()) });
        set.map_err(|error| {
            if bytes > before {
                // Only what was added just now goes.
                let _ = ftruncate(&self.file, before);
            }
            let failure = self.failed("cannot give its size to", &error.into());
            if error == rustix::io::Errno::NOSPC { failure.next(NO_ROOM) } else { failure }
        })
    }

    /// The device that shows it, if any.
    ///
    /// # Errors
    /// Where sysfs is not mounted.
    pub fn device(&self) -> Result<Option<LoopDevice>, Failure> {
        loop_devices::attached(&self.file).map_err(|error| self.failed("cannot find the loop device of", &error))
    }

    /// Waits until no device shows it any more: detaching lags behind the last user.
    ///
    /// # Errors
    /// Somebody still uses it.
    pub fn released(&self) -> Result<(), Failure> {
        let mut failed = None;
        // Nobody has the device open meanwhile: that would keep it.
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

    /// Gives the kernel a moment to let it go, unless `lazy`.
    pub fn settle(&self, lazy: bool) {
        const MOMENT: Duration = Duration::from_secs(2);
        if !lazy {
            clock::look_until(MOMENT, LOOK, || !matches!(self.device(), Ok(Some(_))));
        }
    }

    /// The device that shows it from now on.
    ///
    /// # Errors
    /// Where there are no loop devices, or not for us.
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

/// An image that is being made, under a name of its own; gone when it is dropped.
struct Unready {
    name: PathBuf,
    file: File,
    held: Option<File>,
}

impl Unready {
    /// An empty one.
    fn new(image: &Path) -> Result<Unready, Failure> {
        clear(image)?;
        let name = unready_name(image);
        let file = open_direct(&name, OpenOptions::new().read(true).write(true).create_new(true).mode(0o600));
        let file = file.map_err(|error| Failure::io("cannot make the image", path_text(&name), &error))?;
        let held = Some(held(&name)?);
        Ok(Unready { name, file, held })
    }

    /// It is whole: from now on it is the image.
    fn take_place(mut self, image: &Path, fstype: FileSystem, flags: RenameFlags) -> Result<Image, Failure> {
        let finish = || -> io::Result<()> {
            self.file.sync_all()?;
            rustix::fs::renameat_with(rustix::fs::CWD, &self.name, rustix::fs::CWD, image, flags)?;
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
        // Where it has taken its place, nothing has this name; otherwise nobody else has the file:
        // it was ours alone from the start.
        let _ = fs::remove_file(&self.name);
    }
}

fn unready_name(image: &Path) -> PathBuf {
    let mut name = OsString::from(image);
    name.push(".new");
    PathBuf::from(name)
}

/// Removes what a command that was killed has left beside an image.
///
/// # Errors
/// A file that is not ours; another command is at it.
pub fn clear(image: &Path) -> Result<(), Failure> {
    let name = unready_name(image);
    // Only a file of our own: the directory may be one that others can write.
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

/// Gives a new image its length, and (unless `sparse`) all its room.
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

/// Keeps other commands of ours away from a file.
fn held(path: &Path) -> Result<File, Failure> {
    let flag = i32::try_from(OFlags::NOFOLLOW.bits()).unwrap_or_default();
    let file = OpenOptions::new().read(true).custom_flags(flag).open(path);
    let file = file.map_err(|error| Failure::io("cannot open", path_text(path), &error))?;
    record::hold(&file, path)?;
    Ok(file)
}

/// On Btrfs, an image that is copied on each write gets slow and may find no room for a block that
/// it has already.
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
    let direct = options.custom_flags(flag(OFlags::NOFOLLOW | OFlags::DIRECT)).open(path);
    match direct {
        Err(error) if error.raw_os_error() == Some(22) => {
            options.create_new(false).custom_flags(flag(OFlags::NOFOLLOW)).open(path)
        }
        other => other,
    }
}

/// Whether the kernel can trust what a file says.
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

/// The file system on a file, told by its magic number.
fn content(image: &File) -> io::Result<Option<FileSystem>> {
    // A descriptor of its own: the other one may read whole blocks only.
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
        // What a killed command has left goes; what somebody else has put there does not.
        fs::write(unready_name(&path), "left").unwrap();
        clear(&path).unwrap();
        assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 1);
        fs::create_dir(unready_name(&path)).unwrap();
        assert!(clear(&path).unwrap_err().what.contains("in the way"));
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
