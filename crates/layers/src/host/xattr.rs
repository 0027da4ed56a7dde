//! Extended attributes: reads take one call by directory and name.
//!
//! A read is followed by a check of the name's identity, because the kernel caches the result (an
//! ACL decides about access); a change uses a descriptor that has been checked before. An open file
//! (a new one before its first write, for example) is read through its own descriptor.

use super::{HostShared, locate::is_gone, node::HostNode};
use nacre_sys::{
    credentials, inode,
    xattrat::{self, Target},
};
use nacre_vfs::{Errno, Kind, Result, XattrFlags};
use std::{io, sync::Arc};

const ACCESS_ACL: &[u8] = b"system.posix_acl_access";
const DEFAULT_ACL: &[u8] = b"system.posix_acl_default";

/// Refuses changes that the kernel has not checked: of `system.*`, the kernel in front of the mount
/// checks the POSIX ACLs and leaves everything else (the ACLs of NFS and SMB, the attributes of
/// NTFS) to the storage, which here sees this process and not the caller.
fn refuse_unjudged(name: &[u8]) -> Result<()> {
    if name.starts_with(b"system.") && ![ACCESS_ACL, DEFAULT_ACL].contains(&name) {
        Err(Errno::EOPNOTSUPP)
    } else {
        Ok(())
    }
}

impl HostShared {
    /// Runs a reading call.
    fn read_attribute<T>(&self, node: &Arc<HostNode>, mut call: impl FnMut(Target<'_>) -> io::Result<T>) -> Result<T> {
        if node.kind() == Kind::Directory {
            let held = self.directories.get(node)?;
            return Ok(call(Target::Entry(held.fd(), b"."))?);
        }
        if let Some(file) = node.any_open() {
            return Ok(call(Target::File(file.fd()))?);
        }
        if let Some(place) = node.place().filter(|_| !node.is_resolved()) {
            let name = place.name.bytes();
            match self.directories.get(&place.parent) {
                Ok(held) => {
                    let answer = call(Target::Entry(held.fd(), name)).map_err(Errno::from);
                    match self.examine(held.fd(), name, true) {
                        Ok(found) if found.id == node.id() => return answer,
                        Ok(_) => {}
                        Err(error) if is_gone(error) => {}
                        Err(error) => return Err(error),
                    }
                }
                Err(error) if is_gone(error) => {}
                Err(error) => return Err(error),
            }
        }
        let pin = self.pin(node)?;
        Ok(call(Target::File(pin.fd()))?)
    }

    /// Runs a changing call.
    fn change_attribute<T>(&self, node: &Arc<HostNode>, call: impl FnOnce(Target<'_>) -> io::Result<T>) -> Result<T> {
        let pin = self.pin(node)?;
        if node.kind() == Kind::Directory {
            return Ok(call(Target::Entry(pin.fd(), b"."))?);
        }
        Ok(call(Target::File(pin.fd()))?)
    }

    pub(super) fn getxattr(&self, node: &Arc<HostNode>, name: &[u8], buffer: &mut [u8]) -> Result<usize> {
        self.read_attribute(node, |target| xattrat::get(target, name, buffer))
    }

    pub(super) fn listxattr(&self, node: &Arc<HostNode>, buffer: &mut [u8]) -> Result<usize> {
        self.read_attribute(node, |target| xattrat::list(target, buffer))
    }

    pub(super) fn setxattr(&self, node: &Arc<HostNode>, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()> {
        refuse_unjudged(name)?;
        let bits = i32::from(flags.create) | i32::from(flags.replace) << 1;
        if name != ACCESS_ACL {
            return self.change_attribute(node, |target| xattrat::set(target, name, value, bits));
        }
        // Setting an ACL changes the mode; whether it clears the set-group-id bit depends on the
        // caller's groups, which the kernel knows.
        self.change_attribute(node, |target| {
            credentials::with_set_id_kept(|| xattrat::set(target, name, value, bits))?
        })?;
        if flags.kill_sgid {
            let pin = self.pin(node)?;
            let mode = u32::from(super::stat::of_file(pin.fd())?.stx_mode) & 0o7777;
            if mode & 0o2000 != 0 {
                inode::change_mode(pin.fd(), mode & !0o2000)?;
            }
        }
        Ok(())
    }

    pub(super) fn removexattr(&self, node: &Arc<HostNode>, name: &[u8]) -> Result<()> {
        refuse_unjudged(name)?;
        self.change_attribute(node, |target| xattrat::remove(target, name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_only_the_storage_would_judge_is_not_changed_for_others() {
        for name in [
            "user.k",
            "trusted.k",
            "security.capability",
            "system.posix_acl_access",
            "system.posix_acl_default",
            "btrfs.compression",
        ] {
            assert_eq!(refuse_unjudged(name.as_bytes()), Ok(()), "{name}");
        }
        for name in ["system.nfs4_acl", "system.cifs_acl", "system.ntfs_security", "system."] {
            assert_eq!(refuse_unjudged(name.as_bytes()), Err(Errno::EOPNOTSUPP), "{name}");
        }
    }
}
