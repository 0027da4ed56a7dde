//! Extended attributes of the tree in memory, POSIX ACLs among them.

use super::inode::Inode;
use crate::remap::acl;
use nacre_vfs::{Errno, Kind, Result, Time, XattrFlags};
use std::sync::Arc;

/// The largest value (`XATTR_SIZE_MAX`, linux/limits.h).
const VALUE_MAX: usize = 65536;
/// The longest name (`XATTR_NAME_MAX`).
const NAME_MAX: usize = 255;

/// Checks whether a file of this kind can have an attribute of this name (xattr(7)).
pub fn check(kind: Kind, name: &[u8], write: bool) -> Result<()> {
    if name.is_empty() || name.len() > NAME_MAX {
        return Err(Errno::ERANGE);
    }
    if acl::is_acl(name) {
        return match kind {
            Kind::Symlink => Err(Errno::EOPNOTSUPP),
            Kind::Directory => Ok(()),
            _ if write && name == acl::DEFAULT => Err(Errno::EACCES),
            _ => Ok(()),
        };
    }
    if name.starts_with(b"user.") {
        return match kind {
            Kind::File | Kind::Directory => Ok(()),
            _ if write => Err(Errno::EPERM),
            _ => Err(Errno::ENODATA),
        };
    }
    if name.starts_with(b"trusted.") || name.starts_with(b"security.") { Ok(()) } else { Err(Errno::EOPNOTSUPP) }
}

fn answer(value: &[u8], buffer: &mut [u8]) -> Result<usize> {
    if !buffer.is_empty() {
        buffer.get_mut(..value.len()).ok_or(Errno::ERANGE)?.copy_from_slice(value);
    }
    Ok(value.len())
}

pub(super) fn get(inode: &Arc<Inode>, name: &[u8], buffer: &mut [u8]) -> Result<usize> {
    check(inode.kind, name, false)?;
    let body = inode.body.lock();
    answer(body.xattrs.get(name).ok_or(Errno::ENODATA)?, buffer)
}

pub(super) fn list(inode: &Arc<Inode>, buffer: &mut [u8]) -> Result<usize> {
    let body = inode.body.lock();
    let mut names = Vec::new();
    for name in body.xattrs.keys() {
        names.extend(name);
        names.push(0);
    }
    answer(&names, buffer)
}

pub(super) fn set(inode: &Arc<Inode>, name: &[u8], value: &[u8], flags: XattrFlags, now: Time) -> Result<()> {
    check(inode.kind, name, true)?;
    if value.len() > VALUE_MAX {
        return Err(Errno::E2BIG);
    }
    let mut body = inode.body.lock();
    match body.xattrs.contains_key(name) {
        true if flags.create => return Err(Errno::EEXIST),
        false if flags.replace => return Err(Errno::ENODATA),
        _ => {}
    }
    if name == acl::ACCESS {
        body.set_access_acl(value, flags.kill_sgid)?;
    } else if name == acl::DEFAULT && acl::mode(value)?.is_none() {
        body.xattrs.remove(name);
    } else {
        body.xattrs.insert(name.to_vec(), value.to_vec());
    }
    body.ctime = now;
    Ok(())
}

pub(super) fn remove(inode: &Arc<Inode>, name: &[u8], now: Time) -> Result<()> {
    check(inode.kind, name, true)?;
    let mut body = inode.body.lock();
    body.xattrs.remove(name).ok_or(Errno::ENODATA)?;
    body.ctime = now;
    Ok(())
}

/// Gives a new file the default ACL of its directory (acl(5), "OBJECT CREATION AND DEFAULT ACLs").
pub(super) fn inherit(inode: &Inode, default: Vec<u8>) -> Result<()> {
    let mut body = inode.body.lock();
    let mut access = default.clone();
    acl::limit_to_mode(&mut access, body.mode)?;
    body.set_access_acl(&access, false)?;
    if inode.kind == Kind::Directory {
        body.xattrs.insert(acl::DEFAULT.to_vec(), default);
    }
    Ok(())
}
