//! Mounts as descriptors: clone a tree, change its attributes, map its owners, attach it.
//!
//! Called by the kernel engine of `mirror`. The kernel requires this order: [`clone_tree`],
//! [`set_attributes`] while the clone has never been attached (an id map can be set only then),
//! [`attach`]. A clone that is dropped without that disappears.

use crate::check;
use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::mount::{MountPropagationFlags, MoveMountFlags, OpenTreeFlags, move_mount, open_tree};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};
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
    /// The union of both sets.
    #[must_use]
    pub const fn with(self, other: MountAttributes) -> MountAttributes {
        MountAttributes(self.0 | other.0)
    }
}

/// A range of ids: `count` ids from `inside` on, as stored in the file system, are shown as those
/// from `outside` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdRange {
    /// First stored id.
    pub inside: u32,
    /// First shown id.
    pub outside: u32,
    /// Number of ids.
    pub count: u32,
}

/// Makes a detached clone of the mount at `source`, including the mounts below it when `recursive`.
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

/// Sets and clears attributes of a mount, and with `map` (a descriptor of a user namespace, see
/// [`user_namespace`]) maps its owners.
///
/// # Errors
/// EINVAL if the file system cannot map owners or the mount was attached already; EPERM.
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
        // The kinds of access time are one field: it must be cleared before it is set
        // (mount_setattr(2)).
        clear |= libc::MOUNT_ATTR__ATIME;
    }
    if map.is_some() {
        set |= libc::MOUNT_ATTR_IDMAP;
    }
    let userns_fd = map.map_or(0, |map| u64::from(map.as_raw_fd().unsigned_abs()));
    let attributes = libc::mount_attr { attr_set: set, attr_clr: clear, propagation: 0, userns_fd };
    let flags = libc::AT_EMPTY_PATH | if recursive { libc::AT_RECURSIVE } else { 0 };
    // SAFETY: the path is a NUL-terminated constant, the structure lives during the call and its
    // size is passed.
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

/// Makes a mount private: mounts and unmounts elsewhere no longer propagate to it.
///
/// # Errors
/// EPERM; ENOSYS before Linux 5.12.
pub fn make_private(mount: BorrowedFd<'_>) -> io::Result<()> {
    let attributes = libc::mount_attr { attr_set: 0, attr_clr: 0, propagation: libc::MS_PRIVATE, userns_fd: 0 };
    // SAFETY: the path is a NUL-terminated constant, the structure lives during the call and its
    // size is passed.
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

/// Attaches a detached mount at `target`, if no part of the path is a symbolic link.
///
/// # Errors
/// ELOOP for a link; ENOENT, ENOTDIR, EPERM.
pub fn attach_where_named(mount: BorrowedFd<'_>, target: &Path) -> io::Result<()> {
    let target = rustix::fs::openat2(
        rustix::fs::CWD,
        target,
        OFlags::PATH | OFlags::CLOEXEC,
        Mode::empty(),
        ResolveFlags::NO_SYMLINKS,
    )?;
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    Ok(move_mount(mount, "", &target, "", flags)?)
}

/// Attaches a detached mount at `mountpoint` (a path without links), with these attributes from the
/// first instant: its directory `name`, or its root if there is no name or the kernel cannot do
/// that. Returns whether the directory was attached, and the [`identity`] of the new mount.
///
/// For a daemon that serves the mount itself: the thread that waits for it holds none of the
/// process's descriptors except the mount. So, if the process is killed meanwhile, the connection
/// ends and the wait with it; otherwise the two would wait for each other forever.
///
/// # Errors
/// The mount cannot be attached at `mountpoint`; nothing has changed then.
pub fn show(
    mount: BorrowedFd<'_>,
    name: Option<&str>,
    mountpoint: &Path,
    attributes: MountAttributes,
) -> io::Result<(bool, u64)> {
    // Above the standard descriptors, which the thread has as well. The thread has a copy of it;
    // this one is closed here.
    let mount = rustix::io::fcntl_dupfd_cloexec(mount, 3)?;
    let show = || {
        crate::descriptors::leave_all_but(&mount)?;
        let (clone, is_directory) = match name.map(|name| clone_within(&mount, name).map_err(|error| (error, name))) {
            Some(Ok(clone)) => (Some(clone), true),
            Some(Err((Errno::INVAL, name))) => {
                clone_in_own_namespace(&mount, name).map(|(clone, is_directory)| (Some(clone), is_directory))?
            }
            None | Some(Err(_)) => (None, false),
        };
        let shown = clone.as_ref().unwrap_or(&mount).as_fd();
        if attributes != MountAttributes::empty() {
            set_attributes(shown, attributes, MountAttributes::empty(), None, false)?;
        }
        let id = identity(shown)?;
        attach_where_named(shown, mountpoint)?;
        Ok((is_directory, id))
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new()
            // If this is the worker of a supervisor, the next worker may have to answer the request
            // of this thread.
            .name(crate::worker::WAITS.to_owned())
            .stack_size(128 << 10)
            .spawn_scoped(scope, show)?;
        thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread that attaches the mount panicked")))
    })
}

/// Makes a detached clone of a directory of a mount.
fn clone_within(mount: &OwnedFd, name: &str) -> Result<OwnedFd, Errno> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    open_tree(mount, name, flags)
}

/// Makes a detached clone before Linux 6.15, which cannot clone from a detached mount: the mount is
/// attached for a moment in a mount namespace of the calling thread alone, invisible to others. If
/// its directory cannot be cloned, its root is. The thread must have a root directory of its own;
/// the mount itself cannot be used afterwards.
fn clone_in_own_namespace(mount: &OwnedFd, name: &str) -> io::Result<(OwnedFd, bool)> {
    // An arbitrary directory as mount point.
    let place = c"/proc";
    let home = fs::File::open("/proc/thread-self/ns/mnt")?;
    // SAFETY: a mount namespace of its own takes no descriptor from the thread.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }?;
    let cloned = rustix::mount::mount_change(c"/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .and_then(|()| move_mount(mount, "", rustix::fs::CWD, place, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH))
        .and_then(|()| {
            clone_within(mount, name).map(|clone| (clone, true)).or_else(|_| Ok((clone_within(mount, "")?, false)))
        });
    move_into_link_name_space(home.as_fd(), Some(LinkNameSpaceType::Mount))?;
    Ok(cloned?)
}

/// Makes a user namespace that exists only as a descriptor, with these maps: it passes the id map
/// to an id-mapped mount. Ids outside all ranges are shown as the overflow id.
///
/// # Errors
/// EPERM without privilege; EINVAL for ranges that overlap or for more than 340 of them; EAGAIN if
/// no process can be created.
pub fn user_namespace(users: &[IdRange], groups: &[IdRange]) -> io::Result<OwnedFd> {
    let (mut ready, ready_end) = io::pipe()?;
    let (gate, gate_end) = io::pipe()?;
    // SAFETY: the child only makes calls that are safe after a fork in a process with threads:
    // unshare, write, read, _exit.
    let child = unsafe { libc::fork() };
    match child {
        -1 => return Err(io::Error::last_os_error()),
        0 => {
            let mut byte = [0_u8; 1];
            // SAFETY: as above; the buffer is one byte long. The read ends when the parent closes
            // its end of the gate (or dies): the child's own copy of that end has to go first.
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

fn map_namespace(
    child: libc::pid_t,
    ready: &mut io::PipeReader,
    users: &[IdRange],
    groups: &[IdRange],
) -> io::Result<OwnedFd> {
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
    let text: String =
        ranges.iter().map(|range| format!("{} {} {}\n", range.inside, range.outside, range.count)).collect();
    // The kernel accepts a map in a single write only.
    fs::OpenOptions::new().write(true).open(path)?.write_all(text.as_bytes())
}

/// Opens the mount at `path` (`open_tree(2)` without cloning), to change attributes of a mount in
/// place.
///
/// # Errors
/// ENOENT, EACCES.
pub fn existing(path: &Path) -> io::Result<OwnedFd> {
    Ok(open_tree(rustix::fs::CWD, path, OpenTreeFlags::OPEN_TREE_CLOEXEC)?)
}

/// The unique identity of a mount (statx's `stx_mnt_id`).
///
/// # Errors
/// As `statx(2)`; EOPNOTSUPP before Linux 5.8.
pub fn identity(of: impl AsFd) -> io::Result<u64> {
    // Without a request to the mounted file system.
    let flags = rustix::fs::AtFlags::EMPTY_PATH | rustix::fs::AtFlags::STATX_DONT_SYNC;
    let statx = rustix::fs::statx(of, "", flags, rustix::fs::StatxFlags::from_bits_retain(libc::STATX_MNT_ID))?;
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

    /// A detached tmpfs, with a directory `inside` that contains a file.
    fn nowhere() -> OwnedFd {
        use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};
        let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC).unwrap();
        fsconfig_create(&context).unwrap();
        let mount = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty()).unwrap();
        rustix::fs::mkdirat(&mount, "inside", Mode::RWXU).unwrap();
        rustix::fs::openat(&mount, "inside/file", OFlags::CREATE | OFlags::WRONLY, Mode::RUSR).unwrap();
        mount
    }

    #[test]
    fn a_mount_at_no_place_is_shown_with_its_attributes() {
        if !root() {
            return;
        }
        let directory = std::env::temp_dir().join(format!("nacre-sys-show-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let directory = directory.canonicalize().unwrap();
        for (name, file) in [(Some("inside"), "file"), (Some("missing"), "inside/file"), (None, "inside/file")] {
            let mount = nowhere();
            let (is_directory, id) = show(mount.as_fd(), name, &directory, MountAttributes::READ_ONLY).unwrap();
            assert_eq!(is_directory, name == Some("inside"));
            assert_eq!(id, identity(fs::File::open(&directory).unwrap()).unwrap());
            drop(mount);
            assert!(directory.join(file).exists());
            assert_eq!(fs::File::create(directory.join("new")).unwrap_err().raw_os_error(), Some(libc::EROFS));
            rustix::mount::unmount(&directory, rustix::mount::UnmountFlags::DETACH).unwrap();
        }
        let gone = show(nowhere().as_fd(), Some("inside"), &directory.join("gone"), MountAttributes::empty());
        assert_eq!(gone.unwrap_err().raw_os_error(), Some(libc::ENOENT));
        fs::remove_dir(&directory).unwrap();
    }

    /// The fallback for kernels that cannot clone from a detached mount.
    #[test]
    fn a_directory_is_cloned_where_nobody_sees_it() {
        if !root() {
            return;
        }
        std::thread::spawn(|| {
            crate::descriptors::leave_all_to_others().unwrap();
            let home = fs::read_link("/proc/thread-self/ns/mnt").unwrap();
            let mount = nowhere();
            let (clone, is_directory) = clone_in_own_namespace(&mount, "inside").unwrap();
            drop(mount);
            assert!(is_directory);
            assert_eq!(fs::read_link("/proc/thread-self/ns/mnt").unwrap(), home);
            rustix::fs::openat(&clone, "file", OFlags::RDONLY, Mode::empty()).unwrap();
            let (clone, is_directory) = clone_in_own_namespace(&nowhere(), "missing").unwrap();
            assert!(!is_directory);
            rustix::fs::openat(&clone, "inside/file", OFlags::RDONLY, Mode::empty()).unwrap();
        })
        .join()
        .unwrap();
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
        let mapped = set_attributes(
            clone.as_fd(),
            MountAttributes::READ_ONLY,
            MountAttributes::empty(),
            Some(namespace.as_fd()),
            false,
        );
        if mapped.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::EINVAL)) {
            // The temporary directory lies on a file system without id maps.
            fs::remove_dir_all(&directory).unwrap();
            return;
        }
        mapped.unwrap();
        let file = rustix::fs::openat(&clone, "file", rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty()).unwrap();
        assert_eq!(fs::File::from(file).metadata().unwrap().uid(), 4711);
        let refused =
            rustix::fs::openat(&clone, "new", rustix::fs::OFlags::CREATE | rustix::fs::OFlags::WRONLY, 0o600.into());
        assert_eq!(refused.unwrap_err(), rustix::io::Errno::ROFS);
        assert_eq!(fs::metadata(directory.join("file")).unwrap().uid(), 0);
        assert_ne!(identity(&clone).unwrap(), identity(fs::File::open(&directory).unwrap()).unwrap());
        fs::remove_dir_all(&directory).unwrap();
    }
}
