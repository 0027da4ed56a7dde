//! Mounts as descriptors: clone a tree, change its attributes, map its owners, attach it.
//!
//! Called by the kernel engine of `mirror`. The order that the kernel demands: [`clone_tree`], [`set_attributes`] while the clone has
//! never been attached (an id map can be set only then), [`attach`]. A clone that is dropped instead vanishes.

use crate::check;
use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::mount::{MoveMountFlags, OpenTreeFlags, UnmountFlags, move_mount, open_tree};
use std::{
    fs, io,
    io::{Read, Write},
    mem,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::Path,
};

/// Attributes of a mount (mount_setattr(2)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MountAttributes(u64);

impl MountAttributes {
    /// No writes.
    pub const READ_ONLY: MountAttributes = MountAttributes(libc::MOUNT_ATTR_RDONLY);
    /// Set-user-id and set-group-id bits and file capabilities are ignored.
    pub const NO_SUID: MountAttributes = MountAttributes(libc::MOUNT_ATTR_NOSUID);
    /// Device files cannot be opened.
    pub const NO_DEVICES: MountAttributes = MountAttributes(libc::MOUNT_ATTR_NODEV);
    /// Programs cannot be run.
    pub const NO_EXEC: MountAttributes = MountAttributes(libc::MOUNT_ATTR_NOEXEC);
    /// Access times are not updated.
    pub const NO_ATIME: MountAttributes = MountAttributes(libc::MOUNT_ATTR_NOATIME);
    /// Access times of directories are not updated.
    pub const NO_DIRECTORY_ATIME: MountAttributes = MountAttributes(libc::MOUNT_ATTR_NODIRATIME);
    /// Symbolic links are not followed.
    pub const NO_SYMLINK_FOLLOW: MountAttributes = MountAttributes(libc::MOUNT_ATTR_NOSYMFOLLOW);
    /// None.
    pub const fn empty() -> MountAttributes {
        MountAttributes(0)
    }
    /// Both sets together.
    #[must_use]
    pub const fn with(self, other: MountAttributes) -> MountAttributes {
        MountAttributes(self.0 | other.0)
    }
}

/// A run of ids: `count` ids from `inside` on, as stored in the file system, appear as those from `outside` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdRange {
    /// First id on the storage.
    pub inside: u32,
    /// First id as shown.
    pub outside: u32,
    /// How many.
    pub count: u32,
}

/// A detached clone of the mount at `source`, with what is mounted below it when `recursive`.
///
/// # Errors
/// EPERM without `CAP_SYS_ADMIN` over the mount namespace; ENOENT; ENOSYS before Linux 5.2.
pub fn clone_tree(source: &Path, recursive: bool) -> io::Result<OwnedFd> {
    let mut flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    if recursive {
        flags |= OpenTreeFlags::AT_RECURSIVE;
    }
    Ok(open_tree(rustix::fs::CWD, source, flags)?)
}

/// Sets and clears attributes of a mount, and with `map` (a descriptor of a user namespace, see [`user_namespace`]) maps its owners.
///
/// # Errors
/// EINVAL where the file system cannot map owners or the mount was attached already; EPERM.
pub fn set_attributes(
    mount: BorrowedFd<'_>,
    set: MountAttributes,
    clear: MountAttributes,
    map: Option<BorrowedFd<'_>>,
    recursive: bool,
) -> io::Result<()> {
    let mut set = set.0;
    let mut clear = clear.0;
    if set & libc::MOUNT_ATTR_NOATIME != 0 {
        // The kinds of access time are one field: it must be cleared before it is set (mount_setattr(2)).
        clear |= libc::MOUNT_ATTR__ATIME;
    }
    if map.is_some() {
        set |= libc::MOUNT_ATTR_IDMAP;
    }
    let userns_fd = map.map_or(0, |map| u64::from(map.as_raw_fd().unsigned_abs()));
    let attributes = libc::mount_attr { attr_set: set, attr_clr: clear, propagation: 0, userns_fd };
    let flags = libc::AT_EMPTY_PATH | if recursive { libc::AT_RECURSIVE } else { 0 };
    // SAFETY: the path is a NUL-terminated constant, the structure lives during the call and its size is passed.
    check(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            flags,
            &raw const attributes,
            mem::size_of::<libc::mount_attr>(),
        )
    })
    .map(drop)
}

/// Cuts a mount off from its peers: what is mounted or unmounted elsewhere no longer appears in it.
///
/// # Errors
/// EPERM; ENOSYS before Linux 5.12.
pub fn make_private(mount: BorrowedFd<'_>) -> io::Result<()> {
    let attributes = libc::mount_attr { attr_set: 0, attr_clr: 0, propagation: libc::MS_PRIVATE, userns_fd: 0 };
    // SAFETY: the path is a NUL-terminated constant, the structure lives during the call and its size is passed.
    check(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attributes,
            mem::size_of::<libc::mount_attr>(),
        )
    })
    .map(drop)
}

/// Attaches a detached mount at `target`.
///
/// # Errors
/// ENOENT, ENOTDIR, EPERM.
pub fn attach(mount: BorrowedFd<'_>, target: &Path) -> io::Result<()> {
    Ok(move_mount(mount, "", rustix::fs::CWD, target, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?)
}

/// The same, where no part of the path is a symbolic link.
fn attach_where_named(mount: BorrowedFd<'_>, target: &Path) -> io::Result<()> {
    let target = rustix::fs::openat2(rustix::fs::CWD, target, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), ResolveFlags::NO_SYMLINKS)?;
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    Ok(move_mount(mount, "", &target, "", flags)?)
}

/// Shows the directory `name` of the mount at `hidden` at `mountpoint` (a path without links), with these attributes from the first instant, and takes the mount away from `hidden`. Where the kernel cannot show a
/// directory of it, its root is shown instead. Whether it is the directory that is shown.
///
/// Made for a daemon that serves the mount itself: the thread that waits for it holds none of the process's descriptors. So, if the process is
/// killed meanwhile, the connection ends and the wait with it; otherwise the two would wait for each other without end.
///
/// # Errors
/// Where nothing can be attached at `mountpoint`; nothing has changed then.
pub fn show_directory(hidden: &Path, name: &str, mountpoint: &Path, attributes: MountAttributes) -> io::Result<bool> {
    let (hidden, child, mountpoint) = (hidden.to_owned(), hidden.join(name), mountpoint.to_owned());
    let show = move || {
        crate::descriptors::leave_all_to_others()?;
        let (clone, is_directory) = match clone_tree(&child, false) {
            Ok(clone) => (clone, true),
            Err(_) => (clone_tree(&hidden, false)?, false),
        };
        if attributes != MountAttributes::empty() {
            set_attributes(clone.as_fd(), attributes, MountAttributes::empty(), None, false)?;
        }
        attach_where_named(clone.as_fd(), &mountpoint)?;
        rustix::mount::unmount(&hidden, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)?;
        Ok(is_directory)
    };
    let thread = std::thread::Builder::new().name("nacre-show".to_owned()).stack_size(128 << 10).spawn(show)?;
    thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread that attaches the mount panicked")))
}

/// A user namespace that exists only as a descriptor, with these maps: what an id-mapped mount is told its map by. Ids that no range
/// names are shown as the overflow id.
///
/// # Errors
/// EPERM without privilege; EINVAL for ranges that overlap or for more than 340 of them; EAGAIN where no process can be made.
pub fn user_namespace(users: &[IdRange], groups: &[IdRange]) -> io::Result<OwnedFd> {
    let (mut ready, ready_end) = io::pipe()?;
    let (gate, gate_end) = io::pipe()?;
    // SAFETY: the child only makes calls that are safe after a fork in a process with threads: unshare, write, read, _exit.
    let child = unsafe { libc::fork() };
    match child {
        -1 => return Err(io::Error::last_os_error()),
        0 => {
            let mut byte = [0_u8; 1];
            // SAFETY: as above; the buffer is one byte long. The read ends when the parent closes its end of the gate (or dies): the
            // child's own copy of that end has to go first.
            unsafe {
                libc::close(gate_end.as_raw_fd());
                let status = u8::from(libc::unshare(libc::CLONE_NEWUSER) != 0);
                byte[0] = status;
                libc::write(ready_end.as_raw_fd(), byte.as_ptr().cast(), 1);
                libc::read(gate.as_raw_fd(), byte.as_mut_ptr().cast(), 1);
                libc::_exit(0);
            }
        }
        _ => {}
    }
    drop(ready_end);
    let made = map_namespace(child, &mut ready, users, groups);
    drop(gate_end);
    // SAFETY: the child is ours and not waited for elsewhere; a null status is allowed.
    while unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) } == -1 {
        if io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            break;
        }
    }
    made
}

fn map_namespace(child: libc::pid_t, ready: &mut io::PipeReader, users: &[IdRange], groups: &[IdRange]) -> io::Result<OwnedFd> {
    let mut status = [0_u8; 1];
    ready.read_exact(&mut status)?;
    if status != [0] {
        return Err(io::Error::from_raw_os_error(libc::EPERM));
    }
    write_map(&format!("/proc/{child}/uid_map"), users)?;
    write_map(&format!("/proc/{child}/gid_map"), groups)?;
    Ok(fs::File::open(format!("/proc/{child}/ns/user"))?.into())
}

fn write_map(path: &str, ranges: &[IdRange]) -> io::Result<()> {
    let text: String = ranges.iter().map(|range| format!("{} {} {}\n", range.inside, range.outside, range.count)).collect();
    // The kernel takes a map in one write only.
    fs::OpenOptions::new().write(true).open(path)?.write_all(text.as_bytes())
}

/// A descriptor of the mount itself at `path` (`open_tree(2)` without cloning), to change attributes of a mount in place.
///
/// # Errors
/// ENOENT, EACCES.
pub fn existing(path: &Path) -> io::Result<OwnedFd> {
    Ok(open_tree(rustix::fs::CWD, path, OpenTreeFlags::OPEN_TREE_CLOEXEC)?)
}

/// The identity of a mount (statx's `stx_mnt_id`), to tell mounts apart.
///
/// # Errors
/// As `statx(2)`; EOPNOTSUPP before Linux 5.8.
pub fn identity(of: impl AsFd) -> io::Result<u64> {
    let statx = rustix::fs::statx(of, "", rustix::fs::AtFlags::EMPTY_PATH, rustix::fs::StatxFlags::from_bits_retain(libc::STATX_MNT_ID))?;
    if statx.stx_mask & libc::STATX_MNT_ID == 0 {
        return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
    }
    Ok(statx.stx_mnt_id)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root() -> bool {
        rustix::process::geteuid().is_root()
    }

    #[test]
    fn a_namespace_keeps_its_maps() {
        if !root() {
            return;
        }
        let range = IdRange { inside: 0, outside: 100_000, count: 65_536 };
        let namespace = user_namespace(&[range], &[range]).unwrap();
        let own = fs::read_link("/proc/self/ns/user").unwrap();
        let other = fs::read_link(format!("/proc/self/fd/{}", namespace.as_raw_fd())).unwrap();
        assert_ne!(own, other);
        assert!(other.to_string_lossy().starts_with("user:["));
    }

    #[test]
    fn overlapping_maps_are_refused() {
        if !root() {
            return;
        }
        let range = IdRange { inside: 0, outside: 0, count: 10 };
        let error = user_namespace(&[range, range], &[range]).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
    }

    #[test]
    fn a_detached_clone_is_read_only_and_mapped_without_touching_the_original() {
        use std::os::unix::fs::MetadataExt;
        if !root() {
            return;
        }
        let directory = std::env::temp_dir().join(format!("nacre-sys-mounts-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join("file"), b"x").unwrap();
        let clone = clone_tree(&directory, false).unwrap();
        let range = IdRange { inside: 0, outside: 4711, count: 1 };
        let namespace = user_namespace(&[range], &[range]).unwrap();
        let mapped = set_attributes(clone.as_fd(), MountAttributes::READ_ONLY, MountAttributes::empty(), Some(namespace.as_fd()), false);
        if mapped.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::EINVAL)) {
            // The temporary directory lies on a file system without id maps.
            fs::remove_dir_all(&directory).unwrap();
            return;
        }
        mapped.unwrap();
        let file = rustix::fs::openat(&clone, "file", rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty()).unwrap();
        assert_eq!(fs::File::from(file).metadata().unwrap().uid(), 4711);
        let refused = rustix::fs::openat(&clone, "new", rustix::fs::OFlags::CREATE | rustix::fs::OFlags::WRONLY, 0o600.into());
        assert_eq!(refused.unwrap_err(), rustix::io::Errno::ROFS);
        assert_eq!(fs::metadata(directory.join("file")).unwrap().uid(), 0);
        assert_ne!(identity(&clone).unwrap(), identity(fs::File::open(&directory).unwrap()).unwrap());
        fs::remove_dir_all(&directory).unwrap();
    }
}
