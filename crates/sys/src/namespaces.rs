//! Own namespaces of this process: a mount namespace, for an ordinary user within a user namespace.
//!
//! Called by commands that run a program over other mounts, before they become that program.

use crate::check;
use rustix::{
    mount::{MountPropagationFlags, mount_change},
    process::{getegid, geteuid},
};
use std::{fs, io};

/// Moves this process, which must have one thread only, to a mount namespace of its own; mounts made outside still
/// appear in it, its own appear nowhere else. Without privilege that takes a user namespace, in which only the own user
/// and group have ids: their own ones, or with `as_root` 0.
///
/// # Errors
/// EINVAL with several threads; EPERM where the system forbids user namespaces; ENOSPC where there are too many.
pub fn enter_own_mounts(privileged: bool, as_root: bool) -> io::Result<()> {
    let (user, group) = (geteuid().as_raw(), getegid().as_raw());
    let flags = if privileged { libc::CLONE_NEWNS } else { libc::CLONE_NEWNS | libc::CLONE_NEWUSER };
    // SAFETY: `unshare` has no memory arguments; descriptors are not unshared.
    check(libc::c_long::from(unsafe { libc::unshare(flags) }))?;
    if !privileged {
        // Group maps are for those who cannot change their groups any more (user_namespaces(7)).
        fs::write("/proc/self/setgroups", "deny")?;
        let inside = |id: u32| if as_root { 0 } else { id };
        fs::write("/proc/self/uid_map", format!("{} {user} 1", inside(user)))?;
        fs::write("/proc/self/gid_map", format!("{} {group} 1", inside(group)))?;
    }
    mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)?;
    Ok(())
}
