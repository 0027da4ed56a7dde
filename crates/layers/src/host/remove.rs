//! Removing and renaming, and their effect on links that are shown as their targets.
//!
//! The targets of these links may lie anywhere; a target is removed or replaced through its real
//! directory, found by following the link once, and only if that directory's entry still is the
//! file that the link led to. The FUSE front end has checked permissions in the link's directory,
//! not in the target's: so the path to the target is walked, and the right to change that directory
//! is checked, with the caller's own ids. Otherwise a user who may make a link in the source could
//! replace any file of the system.

use super::{HostShared, errno, locate::is_gone, stat};
use crate::{accounts::Processes, settings::SymlinkDeletion, system::SystemProcesses};
use nacre_sys::credentials;
use nacre_vfs::{Caller, Errno, Kind, Name, Node, RenameFlags, Result};
use rustix::fs::{Access, AtFlags, Mode, OFlags};
use std::{
    ffi::OsStr,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::{OsStrExt, OsStringExt},
    },
    path::PathBuf,
};

/// The real location of a link's target.
struct Target {
    directory: OwnedFd,
    name: Vec<u8>,
    kind: Kind,
}

impl Target {
    fn remove(&self) -> Result<()> {
        let flags = if self.kind == Kind::Directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        rustix::fs::unlinkat(&self.directory, self.name.as_slice(), flags).map_err(errno)
    }
}

/// Resolves a link to its target's real directory and name, for a caller who wants that name
/// removed or replaced.
///
/// # Errors
/// EACCES and EPERM where the caller could not do so there; the errors of following the link.
fn target_for(caller: &Caller, directory: BorrowedFd<'_>, name: &[u8]) -> Result<Target> {
    if caller.uid == 0 || caller.uid == rustix::process::geteuid().as_raw() {
        return target_of(directory, name);
    }
    let groups = SystemProcesses.supplementary_groups(caller.pid)?;
    let find = || {
        let target = target_of(directory, name)?;
        let path = nacre_sys::inode::proc_path(target.directory.as_fd());
        rustix::fs::accessat(rustix::fs::CWD, path, Access::WRITE_OK | Access::EXEC_OK, AtFlags::EACCESS)
            .map_err(errno)?;
        let (place, file) =
            (stat::of_file(target.directory.as_fd())?, stat::of_name(target.directory.as_fd(), &target.name)?);
        // Checks the sticky bit (unlink(2), rename(2)).
        let sticky = u32::from(place.stx_mode) & 0o1000 != 0;
        if sticky && ![place.stx_uid, file.stx_uid].contains(&caller.uid) { Err(Errno::EPERM) } else { Ok(target) }
    };
    credentials::as_ordinary_user(caller.uid, caller.gid, &groups, find)?
}

/// Resolves a link to its target's real directory and name.
fn target_of(directory: BorrowedFd<'_>, name: &[u8]) -> Result<Target> {
    let target = rustix::fs::openat(directory, name, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).map_err(errno)?;
    let statx = stat::of_file(target.as_fd())?;
    let path = rustix::fs::readlink(nacre_sys::inode::proc_path(target.as_fd()), Vec::new()).map_err(errno)?;
    let path = PathBuf::from(std::ffi::OsString::from_vec(path.into_bytes()));
    let (Some(parent), Some(last)) = (path.parent(), path.file_name()) else { return Err(Errno::EBUSY) };
    let parent =
        rustix::fs::open(parent, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).map_err(errno)?;
    if stat::id(&stat::of_name(parent.as_fd(), last.as_bytes())?) != stat::id(&statx) {
        return Err(Errno::ESTALE);
    }
    Ok(Target { directory: parent, name: last.as_bytes().to_vec(), kind: stat::kind(&statx)? })
}

impl HostShared {
    pub(super) fn unlink(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<()> {
        let (_, held) = self.enter(parent)?;
        if self.resolves_links() && is_link(held.fd(), name.bytes())? {
            return self.remove_link(caller, held.fd(), name.bytes());
        }
        rustix::fs::unlinkat(held.fd(), name.bytes(), AtFlags::empty()).map_err(errno)
    }

    pub(super) fn rmdir(&self, caller: &Caller, parent: &Node, name: Name<'_>) -> Result<()> {
        let (parent, held) = self.enter(parent)?;
        // A link to a directory is shown as a directory, and removed like one.
        if self.resolves_links() && is_link(held.fd(), name.bytes())? {
            return self.remove_link(caller, held.fd(), name.bytes());
        }
        let going = self.directories.going(&parent, name.bytes());
        rustix::fs::unlinkat(held.fd(), name.bytes(), AtFlags::REMOVEDIR).map_err(errno)?;
        if let Some((node, held)) = going {
            self.directories.keep_nameless(&node, held);
        }
        Ok(())
    }

    fn remove_link(&self, caller: &Caller, directory: BorrowedFd<'_>, name: &[u8]) -> Result<()> {
        let unlink = || rustix::fs::unlinkat(directory, name, AtFlags::empty()).map_err(errno);
        match self.options.symlink_deletion {
            SymlinkDeletion::SymlinkOnly => unlink(),
            SymlinkDeletion::Deny => Err(Errno::EPERM),
            SymlinkDeletion::SymlinkFirst => {
                let target = target_for(caller, directory, name);
                unlink()?;
                if let Err(error) = target.and_then(|target| target.remove()) {
                    tracing::debug!(%error, "the target of a removed link stays");
                }
                Ok(())
            }
            SymlinkDeletion::TargetFirst => {
                match target_for(caller, directory, name).and_then(|target| target.remove()) {
                    Err(error) if !is_gone(error) => return Err(error),
                    _ => {}
                }
                unlink()
            }
        }
    }

    pub(super) fn rename(
        &self,
        caller: &Caller,
        from: (&Node, Name<'_>),
        to: (&Node, Name<'_>),
        flags: RenameFlags,
    ) -> Result<()> {
        let (_, old) = self.enter(from.0)?;
        let (new_parent, new) = self.enter(to.0)?;
        self.watch.before_names(&new_parent, new.fd());
        let (old_name, new_name) = (from.1.bytes(), to.1.bytes());
        let flags = rustix::fs::RenameFlags::from_bits_retain(flags.0);
        if self.resolves_links() && flags.is_empty() && matches!(is_link(new.fd(), new_name), Ok(true)) {
            // The target name is a link: the file that it shows is replaced, the link stays.
            match target_for(caller, new.fd(), new_name) {
                Ok(target) => {
                    let onto = (&target.directory, OsStr::from_bytes(&target.name));
                    return rustix::fs::renameat_with(old.fd(), old_name, onto.0, onto.1, flags).map_err(errno);
                }
                Err(error) if is_gone(error) => {}
                Err(error) => return Err(error),
            }
        }
        let rename = || rustix::fs::renameat_with(old.fd(), old_name, new.fd(), new_name, flags).map_err(errno);
        let replaced = self.directories.going(&new_parent, new_name);
        // The whiteout is created by this call, under our own ids.
        if flags.contains(rustix::fs::RenameFlags::WHITEOUT) {
            credentials::with_own_identity(rename)??;
        } else {
            rename()?;
        }
        if let Some((node, held)) = replaced {
            self.directories.keep_nameless(&node, held);
        }
        Ok(())
    }
}

fn is_link(directory: BorrowedFd<'_>, name: &[u8]) -> Result<bool> {
    Ok(stat::kind(&stat::of_name(directory, name)?)? == Kind::Symlink)
}
