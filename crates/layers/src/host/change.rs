//! Changes of attributes, through a descriptor whose identity has been checked.
//!
//! Order: owner, mode, size, times; each step clears the bits that the native call would clear.
//! Set-id bits survive a truncation only where the kernel did not ask to drop them.

use super::{
    HostShared,
    descriptor::{cut, reopen},
    errno,
    file::HostFile,
    node::HostNode,
    stat,
};
use nacre_sys::{credentials, inode, xattrat};
use nacre_vfs::{Attr, ChangeTime, Errno, Kind, Result, SetAttr, SetTime};
use rustix::fs::{AtFlags, Gid, OFlags, Timespec, Timestamps, Uid};
use std::{
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
};

impl HostShared {
    pub(super) fn setattr(&self, node: &Arc<HostNode>, file: Option<&HostFile>, change: &SetAttr) -> Result<Attr> {
        if change.size.is_some()
            && node.kind() != Kind::File
            && !(node.kind() == Kind::Block && self.options.block_devices)
        {
            return Err(if node.kind() == Kind::Directory { Errno::EISDIR } else { Errno::EINVAL });
        }
        if let Some(file) = file {
            return self.apply(node, file.fd(), Some(file), change);
        }
        let pin = self.pin(node)?;
        self.apply(node, pin.fd(), None, change)
    }

    fn apply(
        &self,
        node: &Arc<HostNode>,
        target: BorrowedFd<'_>,
        file: Option<&HostFile>,
        change: &SetAttr,
    ) -> Result<Attr> {
        if change.uid.is_some() || change.gid.is_some() {
            let (uid, gid) = (change.uid.map(Uid::from_raw), change.gid.map(Gid::from_raw));
            // The kernel clears set-id bits at that, except a set-group-id bit without group
            // execute permission, which means something else (chown(2)): for that bit, it checks
            // our groups, and we are in none of the caller's.
            let give = || rustix::fs::chownat(target, "", uid, gid, AtFlags::EMPTY_PATH).map_err(errno);
            credentials::with_set_id_kept(give)??;
        }
        if let Some(mode) = change.mode {
            change_mode(target, mode)?;
            file.inspect(|file| file.mode_given(mode));
        }
        // A block device that is shown as a file has no length to change.
        if let Some(size) = change.size.filter(|_| node.kind() == Kind::File) {
            self.truncate(node, (target, file), size, change.never_waits)?;
        }
        if change.atime.is_some() || change.mtime.is_some() {
            let times = Timestamps { last_access: timespec(change.atime), last_modification: timespec(change.mtime) };
            rustix::fs::utimensat(target, "", &times, AtFlags::EMPTY_PATH).map_err(errno)?;
        }
        if change.kill_privileges {
            drop_privileges(target, change)?;
        }
        match (change.mtime, change.ctime) {
            (Some(SetTime::To(mtime)), ChangeTime::To(ctime)) => {
                Ok(Attr { mtime, ctime, ..self.attr_by(stat::of_file_timeless, node, target)? })
            }
            _ => self.attr_of(node, target),
        }
    }

    fn truncate(
        &self,
        node: &Arc<HostNode>,
        (target, file): (BorrowedFd<'_>, Option<&HostFile>),
        size: u64,
        never_waits: bool,
    ) -> Result<()> {
        let opened;
        let writable = match file.filter(|file| file.writes()) {
            Some(file) => file.fd(),
            None => {
                // A file without a name can have a lease as well.
                let unless_leased = match self.open_checked(node, OFlags::WRONLY) {
                    Err(Errno::ESTALE) => reopen(target, OFlags::WRONLY | OFlags::NONBLOCK),
                    other => other,
                };
                opened = match unless_leased {
                    Err(Errno::EAGAIN) if !never_waits => self.open_leased(target, OFlags::WRONLY)?,
                    other => other?,
                };
                opened.as_fd()
            }
        };
        cut(writable, size)
    }
}

/// Sets permission bits; the kernel in front of the mount, which knows the caller's groups, has
/// decided about set-group-id.
fn change_mode(target: BorrowedFd<'_>, mode: u32) -> Result<()> {
    let change = || inode::change_mode(target, mode);
    Ok(if mode & 0o2000 == 0 { change() } else { credentials::with_set_id_kept(change)? }?)
}

/// Clears what a change of content or owner by an ordinary user clears: set-user-id, set-group-id
/// of executables and of files of other groups, file capabilities.
fn drop_privileges(target: BorrowedFd<'_>, change: &SetAttr) -> Result<()> {
    if change.mode.is_none() {
        let mode = u32::from(stat::of_file_timeless(target)?.stx_mode);
        let mut lost = mode & 0o4000;
        if mode & 0o2010 == 0o2010 || change.outside_group {
            lost |= mode & 0o2000;
        }
        if lost != 0 && mode & 0o170_000 != Kind::Directory.mode() {
            change_mode(target, mode & 0o7777 & !lost)?;
        }
    }
    match xattrat::remove(xattrat::Target::File(target), b"security.capability").map_err(Errno::from) {
        // A daemon without the right to remove them is not root: the kernel then drops them itself,
        // with the change of the file.
        Ok(()) | Err(Errno::ENODATA | Errno::EOPNOTSUPP | Errno::EPERM) => Ok(()),
        Err(error) => Err(error),
    }
}

fn timespec(time: Option<SetTime>) -> Timespec {
    match time {
        None => Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT },
        Some(SetTime::Now) => Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_NOW },
        Some(SetTime::To(time)) => Timespec { tv_sec: time.sec, tv_nsec: time.nsec.into() },
    }
}
