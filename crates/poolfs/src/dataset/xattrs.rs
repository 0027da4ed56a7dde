//! Extended attributes of a dataset's files, including POSIX ACLs: an ACL and the permission bits
//! are always consistent.

use super::mounted_tree::Tree;
use super::translate::{errno, kind_of};
use nacre_layers::mem::check_xattr;
use nacre_layers::remap::acl;
use nacre_pool::files::{AttributeChange, FileError, Inode};
use nacre_pool::rows::inode::flags::{APPEND, HAS_XATTRS, IMMUTABLE};
use nacre_vfs::{Errno, Result, SetAttr, XattrFlags};
use std::sync::Arc;

/// File capabilities (capabilities(7)): removed by any write, truncation or chown.
const CAPABILITY: &[u8] = b"security.capability";

fn check(files: &Tree, inode: &Inode, name: &[u8], write: bool) -> Result<()> {
    let row = files.attributes_without_room(inode).map_err(errno)?;
    check_xattr(kind_of(&row), name, write)
}

fn answer(value: &[u8], buffer: &mut [u8]) -> Result<usize> {
    if !buffer.is_empty() {
        buffer.get_mut(..value.len()).ok_or(Errno::ERANGE)?.copy_from_slice(value);
    }
    Ok(value.len())
}

pub(super) fn get(files: &Tree, inode: &Inode, name: &[u8], buffer: &mut [u8]) -> Result<usize> {
    let row = files.attributes_without_room(inode).map_err(errno)?;
    check_xattr(kind_of(&row), name, false)?;
    // Requested for each file of a long listing; hardly any file has one.
    if row.flags & HAS_XATTRS == 0 {
        return Err(Errno::ENODATA);
    }
    answer(&files.attribute(inode, name).map_err(errno)?, buffer)
}

pub(super) fn list(files: &Tree, inode: &Inode, shown: &dyn Fn(&[u8]) -> bool, buffer: &mut [u8]) -> Result<usize> {
    let mut names = Vec::new();
    for name in files.attribute_names(inode).map_err(errno)?.into_iter().filter(|name| shown(name)) {
        names.extend(name);
        names.push(0);
    }
    answer(&names, buffer)
}

pub(super) fn set(files: &Tree, inode: &Arc<Inode>, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()> {
    check(files, inode, name, true)?;
    let exists = match (flags.create, flags.replace) {
        (true, _) => Some(false),
        (_, true) => Some(true),
        _ => None,
    };
    if name == acl::ACCESS {
        return set_access(files, inode, value, flags.kill_sgid, exists);
    }
    if name == acl::DEFAULT && acl::mode(value)?.is_none() {
        return ignore_missing(files.remove_attribute(inode, name));
    }
    files.set_attribute(inode, name, value, exists, None).map_err(too_large)
}

/// A value that is too large is E2BIG here (setxattr(2)), not EFBIG.
fn too_large(error: FileError) -> Errno {
    if matches!(error, FileError::TooLarge) { Errno::E2BIG } else { errno(error) }
}

fn ignore_missing(done: nacre_pool::files::Result<()>) -> Result<()> {
    match done {
        Err(FileError::NoData) => Ok(()),
        other => other.map_err(errno),
    }
}

/// Sets an access ACL together with the mode. An ACL equivalent to a mode is not stored.
fn set_access(files: &Tree, inode: &Arc<Inode>, value: &[u8], kill_sgid: bool, exists: Option<bool>) -> Result<()> {
    const SET_GID: u16 = 0o2000;
    let mut mode = files.attributes_without_room(inode).map_err(errno)?.mode & 0o7777;
    if let Some(bits) = acl::mode(value)? {
        mode = (mode & !0o777) | (bits & 0o777) as u16;
    }
    if kill_sgid {
        mode &= !SET_GID;
    }
    if !acl::is_minimal(value)? {
        return files.set_attribute(inode, acl::ACCESS, value, exists, Some(mode)).map_err(too_large);
    }
    match files.remove_attribute_setting_mode(inode, acl::ACCESS, mode) {
        Err(FileError::NoData) => {
            let refused_by = IMMUTABLE | APPEND;
            let change = AttributeChange { permissions: Some(mode), refused_by, ..Default::default() };
            files.set_attributes(inode, &change).map(drop).map_err(errno)
        }
        done => done.map_err(errno),
    }
}

pub(super) fn remove(files: &Tree, inode: &Arc<Inode>, name: &[u8]) -> Result<()> {
    check(files, inode, name, true)?;
    // The kernel takes file capabilities away with a write, also from a file that only grows.
    if name == CAPABILITY {
        return files.remove_attribute_by_write(inode, name).map_err(errno);
    }
    files.remove_attribute(inode, name).map_err(errno)
}

/// Removes the capabilities of a file whose content has changed.
pub(super) fn drop_capability(files: &Tree, inode: &Arc<Inode>) -> Result<()> {
    match files.attribute(inode, CAPABILITY) {
        Err(FileError::NoData) => Ok(()),
        // What cannot be read is not left either.
        _ => ignore_missing(files.remove_attribute_by_write(inode, CAPABILITY)),
    }
}

/// Applies a change of attributes to extended ones: an access ACL follows the mode, capabilities
/// are removed with privileges.
pub(super) fn follow_change(files: &Tree, inode: &Arc<Inode>, change: &SetAttr) -> Result<()> {
    if change.kill_privileges {
        drop_capability(files, inode)?;
    }
    let Some(mode) = change.mode else { return Ok(()) };
    match files.attribute(inode, acl::ACCESS) {
        Ok(mut value) => {
            acl::apply_mode(&mut value, mode)?;
            files.set_attribute(inode, acl::ACCESS, &value, Some(true), Some((mode & 0o7777) as u16)).map_err(errno)
        }
        Err(FileError::NoData) => Ok(()),
        Err(error) => Err(errno(error)),
    }
}
