//! Sets owner, extended attributes, mode and times of an entry, in an order in which no step undoes another.

use crate::{
    beneath,
    meta::{self, Meta, Xattrs},
    steps::Dress,
};
use nacre_sys::{
    inode,
    xattrat::{self, Target},
};
use rustix::{
    fs::{self, AtFlags, FileType, Gid, Uid},
    io::Errno,
};
use std::{io, os::fd::BorrowedFd};

/// Gives the file behind a descriptor of any kind all attributes. Attributes that are the union's own, and labels of
/// security modules, stay: [`label`] sets these.
pub(crate) fn dress(file: BorrowedFd<'_>, wanted: &Dress) -> io::Result<()> {
    let now = Meta::of_file(file)?;
    if (now.uid, now.gid) != (wanted.uid, wanted.gid) {
        if now.is_directory() {
            // Nobody who could enter it as the one owner may enter it as the other's before it has its mode.
            inode::change_mode(file, 0o700)?;
        }
        let (uid, gid) = (Uid::from_raw(wanted.uid), Gid::from_raw(wanted.gid));
        let uid = Some(uid).filter(|_| now.uid != wanted.uid);
        fs::chownat(file, c"", uid, Some(gid), AtFlags::EMPTY_PATH)?;
    }
    set_xattrs(file, &wanted.xattrs)?;
    if now.kind() != FileType::Symlink {
        inode::change_mode(file, wanted.mode & 0o7777)?;
    }
    set_times(file, wanted.atime, wanted.mtime)
}

/// Gives a file the labels of security modules of the file that it replaces. Where an ordinary user may not set them, it
/// keeps those that its directory gives.
pub(crate) fn label(file: BorrowedFd<'_>, labels: &Xattrs) -> io::Result<()> {
    let target = Target::File(file);
    for (name, value) in labels {
        if beneath::xattr(target, name)?.as_ref() == Some(value) {
            continue;
        }
        match xattrat::set(target, name, value, 0) {
            Err(error) if is_refused(&error) && !rustix::process::geteuid().is_root() => {}
            set => set?,
        }
    }
    Ok(())
}

fn is_refused(error: &io::Error) -> bool {
    let number = error.raw_os_error().map(Errno::from_raw_os_error);
    matches!(number, Some(Errno::PERM | Errno::ACCESS | Errno::OPNOTSUPP))
}

/// Sets the times of the file behind a descriptor of any kind.
pub(crate) fn set_times(file: BorrowedFd<'_>, accessed: meta::Time, modified: meta::Time) -> io::Result<()> {
    Ok(fs::utimensat(file, c"", &meta::timestamps(accessed, modified), AtFlags::EMPTY_PATH)?)
}

fn set_xattrs(file: BorrowedFd<'_>, wanted: &Xattrs) -> io::Result<()> {
    let target = Target::File(file);
    let stored = beneath::xattrs(target)?;
    for (name, value) in &stored {
        let Some(shown) = meta::shown_attribute(name) else { continue };
        if wanted.get(&shown) != Some(value) || shown != *name {
            remove_xattr(target, name)?;
        }
    }
    for (name, value) in wanted {
        if stored.get(name) != Some(value) {
            xattrat::set(target, name, value, 0)?;
        }
    }
    Ok(())
}

/// Removes the union's own attributes from a file.
pub(crate) fn strip(file: BorrowedFd<'_>) -> io::Result<()> {
    let target = Target::File(file);
    for name in beneath::xattrs(target)?.keys().filter(|name| meta::is_private(name)) {
        remove_xattr(target, name)?;
    }
    Ok(())
}

/// Removes an attribute; a missing one is no error.
pub(crate) fn remove_xattr(target: Target<'_>, name: &[u8]) -> io::Result<()> {
    match xattrat::remove(target, name) {
        Err(error) if is_without(&error) => Ok(()),
        done => done,
    }
}

fn is_without(error: &io::Error) -> bool {
    let number = error.raw_os_error().map(Errno::from_raw_os_error);
    matches!(number, Some(Errno::NODATA | Errno::OPNOTSUPP))
}
