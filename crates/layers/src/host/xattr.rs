//! Extended attributes, in one call by directory and name where nothing is changed.
//!
//! A read is followed by a check of the name's identity, because the kernel keeps what it learns (an ACL decides who may enter); a change
//! goes through a descriptor that has been checked before.

use super::{Shared, locate::is_gone, node::HostNode};
use nacre_sys::{
    credentials, inode,
    xattrat::{self, Target},
};
use nacre_vfs::{Errno, Kind, Result, XattrFlags};
use std::{io, sync::Arc};

const ACCESS_ACL: &[u8] = b"system.posix_acl_access";

impl Shared {
    /// Runs a call that reads.
    fn read_attribute<T>(&self, node: &Arc<HostNode>, mut call: impl FnMut(Target<'_>) -> io::Result<T>) -> Result<T> {
        if node.kind() == Kind::Directory {
            let held = self.directories.get(node)?;
            return Ok(call(Target::Entry(held.fd(), b"."))?);
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

    /// Runs a call that changes something.
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
        let bits = i32::from(flags.create) | i32::from(flags.replace) << 1;
        if name != ACCESS_ACL {
            return self.change_attribute(node, |target| xattrat::set(target, name, value, bits));
        }
        // Setting an ACL changes the mode; whether it costs the set-group-id bit depends on the caller's groups, which the kernel knows.
        self.change_attribute(node, |target| credentials::with_set_id_kept(|| xattrat::set(target, name, value, bits))?)?;
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
        self.change_attribute(node, |target| xattrat::remove(target, name))
    }
}
