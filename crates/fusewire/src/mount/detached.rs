//! Detached mounts: they are in no mount table, no path leads to them, and they end with their descriptor.
//!
//! Used for root's mounts, which are attached only when they can be used, and for a mount that intercepts sync(2).
//! Needs root and Linux 5.2. Only a file system on a block device (`fuseblk`) gets SYNCFS for sync(2) and syncfs(2),
//! from Linux 6.18 on.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen,
};

use super::{Device, MountOptions, about, words};

/// Flags of mount(2) that belong to the file system, with their names; all others belong to the mount.
const OF_THE_FILE_SYSTEM: &[(u64, &str)] =
    &[(libc::MS_RDONLY, "ro"), (libc::MS_SYNCHRONOUS, "sync"), (libc::MS_DIRSYNC, "dirsync")];
/// Flags of mount(2) that belong to the mount.
const OF_THE_MOUNT: &[(u64, MountAttrFlags)] = &[
    (libc::MS_RDONLY, MountAttrFlags::MOUNT_ATTR_RDONLY),
    (libc::MS_NOSUID, MountAttrFlags::MOUNT_ATTR_NOSUID),
    (libc::MS_NODEV, MountAttrFlags::MOUNT_ATTR_NODEV),
    (libc::MS_NOEXEC, MountAttrFlags::MOUNT_ATTR_NOEXEC),
    (libc::MS_NOATIME, MountAttrFlags::MOUNT_ATTR_NOATIME),
];

/// Mounts a connection on a block device that nobody else uses. The mount ends when the second value is dropped; the
/// connection must be closed before, because the kernel would wait for a reply to DESTROY.
///
/// # Errors
/// EPERM without privilege; ENODEV where the kernel has no `fuseblk`; EBUSY where the device is in
/// use.
pub fn mount_on_device(block_device: &Path) -> io::Result<(Device, OwnedFd)> {
    let (fuse, context) = open("fuseblk")?;
    fsconfig_set_string(&context, "source", block_device)?;
    fsconfig_create(&context)?;
    let attributes =
        MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    let mount = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
    Ok((Device::from_fd(fuse), mount))
}

/// Makes a detached mount of a new connection, whose root is a directory.
///
/// # Errors
/// Where mount(2) may still work: EPERM without privilege, ENOSYS before Linux 5.2, EINVAL for names of more than 255
/// bytes and for unknown flags and words.
pub(super) fn connection(options: &MountOptions) -> io::Result<(OwnedFd, OwnedFd)> {
    let known = OF_THE_FILE_SYSTEM
        .iter()
        .map(|(flag, _)| flag)
        .chain(OF_THE_MOUNT.iter().map(|(flag, _)| flag))
        .fold(0, |all, flag| all | flag);
    if options.flags & !known != 0 {
        return Err(super::invalid("mount flags"));
    }
    let (fuse, context) = open("fuse")?;
    fsconfig_set_string(&context, "source", options.fsname.as_os_str())?;
    if !options.subtype.is_empty() {
        fsconfig_set_string(&context, "subtype", &*options.subtype)?;
    }
    for (_, word) in OF_THE_FILE_SYSTEM.iter().filter(|(flag, _)| options.flags & flag != 0) {
        fsconfig_set_flag(&context, *word)?;
    }
    for word in words(options) {
        let mut parts = word.as_bytes().splitn(2, |byte| *byte == b'=');
        match (parts.next(), parts.next()) {
            (Some(key), Some(value)) => {
                // Quotes keep commas together in the one string of mount(2).
                let value = value.strip_prefix(b"\"").and_then(|value| value.strip_suffix(b"\"")).unwrap_or(value);
                fsconfig_set_string(&context, key, value)?;
            }
            _ => fsconfig_set_flag(&context, word.as_os_str())?,
        }
    }
    fsconfig_create(&context)?;
    let chosen = OF_THE_MOUNT.iter().filter(|(flag, _)| options.flags & flag != 0);
    let attributes = chosen.fold(MountAttrFlags::empty(), |all, (_, attribute)| all | *attribute);
    let mount = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
    Ok((fuse, mount))
}

/// Opens the device, and a file system context of this type for it.
fn open(kind: &str) -> io::Result<(OwnedFd, OwnedFd)> {
    let path = Path::new("/dev/fuse");
    let fuse =
        OpenOptions::new().read(true).write(true).open(path).map_err(|error| about(path, "cannot open", error))?;
    let context = fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
    let ids = (rustix::process::getuid().as_raw().to_string(), rustix::process::getgid().as_raw().to_string());
    let number = fuse.as_raw_fd().to_string();
    for (key, value) in [("fd", &*number), ("rootmode", "40000"), ("user_id", &*ids.0), ("group_id", &*ids.1)] {
        fsconfig_set_string(&context, key, value)?;
    }
    Ok((fuse.into(), context))
}
