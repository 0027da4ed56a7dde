//! Mounts and unmounts images.
//!
//! A new file system gets the directory's owner, mode and access lists before it is attached to the tree of mounts,
//! so nobody sees it without them.

use super::image::Image;
use crate::unmount;
use crate::{
    cage::engine::FileSystem,
    failure::{Exit, Failure},
    mountinfo::{self, MountEntry},
    report::path_text,
};
use nacre_sys::{loop_devices::LoopDevice, mounts};
use rustix::{
    fs::{AtFlags, Gid, Mode, Uid, XattrFlags, fchmod, fchown, fgetxattr, fsetxattr, openat},
    fs::{OFlags, statat},
    mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_flag, fsconfig_set_string, fsmount,
        fsopen,
    },
};
use std::{
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

/// The access lists of a directory, as extended attributes.
const ACCESS_LISTS: [&str; 2] = ["system.posix_acl_access", "system.posix_acl_default"];
/// Largest extended attribute that the kernel allows.
const XATTR_MAX: usize = 65_536;

/// Mounts the image at `place`; with `like`, its root gets the owner, mode and access lists of that directory
/// first.
///
/// # Errors
/// The kernel's error, with its message where it gives one.
pub fn mount(image: &Image, sparse: bool, place: &Path, like: Option<&Path>) -> Result<LoopDevice, Failure> {
    // An image allows nothing that the mount around it forbids.
    let attributes = surroundings(place)?;
    let device = image.attach()?;
    let tree = file_system(image, sparse, &device, attributes)?;
    if let Some(like) = like {
        resemble(&tree, like)
            .map_err(|error| Failure::io("cannot give the cage the owner and mode of", path_text(like), &error))?;
    }
    // Others may be able to write to a directory above it.
    mounts::attach_where_named(tree.as_fd(), place)
        .map_err(|error| Failure::io("cannot mount at", path_text(place), &error))?;
    Ok(device)
}

fn file_system(
    image: &Image,
    sparse: bool,
    device: &LoopDevice,
    attributes: MountAttrFlags,
) -> Result<OwnedFd, Failure> {
    let failed = |context: Option<&OwnedFd>, error: rustix::io::Errno| {
        let said = context.map(said).unwrap_or_default();
        let mut failure = Failure::io("cannot mount", path_text(&image.path), &error.into());
        if !said.is_empty() {
            failure.what.push_str(&format!(" ({said})"));
        }
        if error == rustix::io::Errno::NODEV {
            return failure.next(format!("this kernel has no {}: `modprobe {0}` may load it", image.fstype));
        }
        failure.next("`dmesg | tail` may say more")
    };
    let context = fsopen(image.fstype.word(), FsOpenFlags::FSOPEN_CLOEXEC).map_err(|error| failed(None, error))?;
    let set = || {
        fsconfig_set_string(&context, "source", &device.path)?;
        if image.fstype == FileSystem::Btrfs && !sparse {
            // Otherwise Btrfs discards blocks that were allocated for it.
            fsconfig_set_flag(&context, "nodiscard")?;
        }
        fsconfig_create(&context)?;
        fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
    };
    set().map_err(|error| failed(Some(&context), error))
}

/// Reads the kernel's messages about a mount that failed.
fn said(context: &OwnedFd) -> String {
    let mut all = Vec::new();
    let mut room = [0; 1024];
    // One message a call, `e ` (error), `w ` or `i ` before it; ENODATA after the last one.
    while let Ok(length) = rustix::io::read(context, &mut room) {
        let Some(message) = room.get(..length).filter(|message| !message.is_empty()) else { break };
        let text = message.strip_prefix(b"e ").or_else(|| message.strip_prefix(b"w ")).unwrap_or(message);
        all.push(crate::report::printable(text.trim_ascii()));
    }
    all.join("; ")
}

/// Returns the restricting flags (`nosuid`, `nodev` ...) of the mount that `place` lies on.
fn surroundings(place: &Path) -> Result<MountAttrFlags, Failure> {
    const WORDS: [(&str, MountAttrFlags); 6] = [
        ("nosuid", MountAttrFlags::MOUNT_ATTR_NOSUID),
        ("nodev", MountAttrFlags::MOUNT_ATTR_NODEV),
        ("noexec", MountAttrFlags::MOUNT_ATTR_NOEXEC),
        ("noatime", MountAttrFlags::MOUNT_ATTR_NOATIME),
        ("nodiratime", MountAttrFlags::MOUNT_ATTR_NODIRATIME),
        ("nosymfollow", MountAttrFlags::MOUNT_ATTR_NOSYMFOLLOW),
    ];
    let table = mountinfo::read()?;
    let around = around(&table, place).map(|entry| entry.options.as_slice()).unwrap_or_default();
    let chosen = WORDS.into_iter().filter(|(word, _)| around.iter().any(|option| option == word));
    Ok(chosen.fold(MountAttrFlags::empty(), |all, (_, flag)| all | flag))
}

/// Returns the mount that a path lies on.
pub fn around<'a>(table: &'a [MountEntry], path: &Path) -> Option<&'a MountEntry> {
    let longest = table
        .iter()
        .filter(|entry| path.starts_with(&entry.mountpoint))
        .map(|entry| entry.mountpoint.as_os_str().len())
        .max()?;
    table.iter().rfind(|entry| entry.mountpoint.as_os_str().len() == longest && path.starts_with(&entry.mountpoint))
}

/// Gives the root of a mount the owner, mode and access lists of a directory.
fn resemble(tree: &OwnedFd, like: &Path) -> io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = openat(tree, ".", flags, Mode::empty())?;
    let like = rustix::fs::open(like, flags, Mode::empty())?;
    let stat = statat(&like, "", AtFlags::EMPTY_PATH)?;
    fchown(&root, Some(Uid::from_raw(stat.st_uid)), Some(Gid::from_raw(stat.st_gid)))?;
    for name in ACCESS_LISTS {
        let mut room = vec![0_u8; XATTR_MAX];
        match fgetxattr(&like, name, room.as_mut_slice()) {
            Ok(length) => fsetxattr(&root, name, room.get(..length).unwrap_or_default(), XattrFlags::empty())?,
            // None set, or the host has none at all.
            Err(rustix::io::Errno::NODATA | rustix::io::Errno::NOTSUP) => {}
            Err(error) => return Err(error.into()),
        }
    }
    // Last: a change of the owner may clear bits of it.
    fchmod(&root, Mode::from_raw_mode(stat.st_mode & 0o7777))?;
    Ok(())
}

/// Returns the loop device by which the image is mounted at `place`, on top of other mounts there.
///
/// # Errors
/// Where the mount table cannot be read.
pub fn mounted(image: &Image, place: &Path) -> Result<Option<LoopDevice>, Failure> {
    let table = mountinfo::read()?;
    let Some(entry) = table.iter().rfind(|entry| entry.mountpoint == place) else { return Ok(None) };
    Ok(image.device()?.filter(|device| device.path == entry.source))
}

/// Whether the topmost mount at `place` is a loop device on an image that had this name when it was attached.
///
/// # Errors
/// Where the mount table cannot be read.
pub fn shows(image: &Path, place: &Path) -> Result<bool, Failure> {
    let table = mountinfo::read()?;
    let source = table.iter().rfind(|entry| entry.mountpoint == place).map(|entry| entry.source.as_path());
    let Some(device) = source.and_then(|source| source.strip_prefix("/dev").ok()) else { return Ok(false) };
    let backing = std::fs::read(Path::new("/sys/block").join(device).join("loop/backing_file")).unwrap_or_default();
    let backing = backing.trim_ascii_end();
    let backing = backing.strip_suffix(b" (deleted)").unwrap_or(backing);
    Ok(backing == image.as_os_str().as_bytes())
}

/// Unmounts the topmost mount at `place`.
///
/// # Errors
/// In use.
pub fn unmount(place: &Path, lazy: bool) -> Result<(), Failure> {
    fusewire::unmount_path(place, lazy).map_err(|error| {
        let failure = unmount::refused(&path_text(place), &error);
        if failure.exit == Exit::Busy { failure } else { failure.next("only root can end a cage of the engine loop") }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mount_around_a_path_is_the_nearest_and_topmost() {
        let table = mountinfo::parse(
            b"1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 8:2 / /var rw,nosuid - ext4 /dev/b rw\n3 1 8:3 / /var/log rw - xfs /dev/c rw\n\
              4 1 8:4 / /var rw,noexec - ext4 /dev/d rw\n",
        );
        for (path, id) in [("/etc", 1), ("/var/lib", 4), ("/variable", 1), ("/var/log/x", 3), ("/var/log", 3)] {
            assert_eq!(around(&table, Path::new(path)).map(|entry| entry.id), Some(id), "{path}");
        }
        assert!(around(&[], Path::new("/")).is_none());
    }
}
