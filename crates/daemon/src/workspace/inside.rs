//! Takes this process into a workspace: a mount namespace of its own, in which the view lies over the base, so that paths
//! need not change. Called just before the process becomes the user's command.
//!
//! The namespaces end with the command and its children. This is no sandbox against programs of the same user: these reach
//! the base by `/proc` of other processes. `read-only-below` keeps accidents away, not attacks.

use super::store::Workspace;
use crate::{failure::Failure, report::path_text};
use nacre_sys::{
    mounts::{MountAttributes, attach, clone_tree, existing, set_attributes},
    namespaces,
};
use rustix::{
    mount::{MountFlags, mount},
    process::{chdir, chroot, geteuid},
};
use std::{
    env, io,
    os::fd::{AsFd, OwnedFd},
    path::Path,
};

/// Directories of the running system that a workspace over `/` takes from it.
const OF_THE_SYSTEM: [&str; 5] = ["/proc", "/sys", "/dev", "/run", "/tmp"];
/// Directories for temporary files, which programs may write to where all else is read-only.
const TEMPORARY: [&str; 3] = ["/tmp", "/var/tmp", "/dev/shm"];

/// Takes this process, which must have one thread, into a workspace whose view is mounted. Its working directory stays if
/// it lies in the base, and is the base otherwise. With `as_root`, an ordinary user is root in it, of himself alone.
///
/// # Errors
/// The system has no namespaces for this user, or refuses a mount; then this process must end.
pub fn enter(workspace: &Workspace, as_root: bool) -> Result<(), Failure> {
    let over = workspace.settings.over.0.as_path();
    let here = env::current_dir().ok().filter(|here| here.starts_with(over)).unwrap_or_else(|| over.to_owned());
    let is_root = geteuid().is_root();
    namespaces::enter_own_mounts(is_root, as_root).map_err(|error| {
        let failure = Failure::io("cannot make", "namespaces for the command", &error);
        if is_root {
            failure
        } else {
            failure.next(
                "an ordinary user needs user namespaces: see user_namespaces(7), and `sysctl user.max_user_namespaces`",
            )
        }
    })?;
    let view = clone(&workspace.mountpoint())?;
    if workspace.settings.read_only_below {
        make_read_only(over)?;
    }
    if over == Path::new("/") {
        enter_root(&view, &workspace.mountpoint())?;
    } else {
        put(&view, over)?;
    }
    // A directory that the workspace does not have: its top.
    chdir(&here).or_else(|_| chdir(over)).map_err(|error| Failure::io("cannot enter", path_text(over), &error.into()))
}

/// Makes a view the root directory of this process, with the directories of the running system in it.
fn enter_root(view: &OwnedFd, mountpoint: &Path) -> Result<(), Failure> {
    put(view, mountpoint)?;
    for path in OF_THE_SYSTEM.iter().map(Path::new).filter(|path| path.is_dir()) {
        let inner = mountpoint.join(path.strip_prefix("/").unwrap_or(path));
        if inner.is_dir() {
            put(&clone(path)?, &inner)?;
        }
    }
    chroot(mountpoint).map_err(|error| Failure::io("cannot enter", path_text(mountpoint), &error.into()))
}

fn clone(path: &Path) -> Result<OwnedFd, Failure> {
    clone_tree(path, true)
        .map_err(|error| Failure::io("cannot show in the command's namespace", path_text(path), &error))
}

fn put(tree: &OwnedFd, target: &Path) -> Result<(), Failure> {
    attach(tree.as_fd(), target).map_err(|error| Failure::io("cannot show at", path_text(target), &error))
}

/// Makes everything read-only that is mounted now, except for new directories for temporary files.
fn make_read_only(over: &Path) -> Result<(), Failure> {
    let failed = |error: io::Error| Failure::io("cannot make read-only", "what lies below the workspace", &error);
    let root = existing(Path::new("/")).map_err(failed)?;
    set_attributes(root.as_fd(), MountAttributes::READ_ONLY, MountAttributes::empty(), None, true).map_err(failed)?;
    for directory in TEMPORARY.iter().map(Path::new).filter(|path| path.is_dir() && !over.starts_with(path)) {
        mount("nacre", directory, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, Some(c"mode=1777")).map_err(
            |error| {
                Failure::io("cannot mount a file system for temporary files at", path_text(directory), &error.into())
            },
        )?;
    }
    Ok(())
}
