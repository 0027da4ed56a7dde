//! Handlers for extended attributes. Errors that the kernel remembers (EOPNOTSUPP, ENOSYS) are returned wherever they
//! are true: `ls -l` requests two attributes of each file.

use super::unopened::FIRST_WRITE;
use crate::{
    door::{Door, caller},
    failure::Outcome,
    options::{AclChoice, XattrChoice},
};
use fusewire::{Header, Reply, abi};
use nacre_vfs::{Errno, XattrFlags};
use std::sync::atomic::Ordering;

/// `XATTR_CREATE`.
const CREATE: u32 = 1;
/// `XATTR_REPLACE`.
const REPLACE: u32 = 2;

impl Door {
    pub(crate) fn getxattr(&self, header: &Header, name: &[u8], size: u32, reply: &mut Reply<'_>) -> Outcome {
        self.may_exist(name)?;
        if name == FIRST_WRITE {
            self.may_write(header);
        }
        let node = self.node(header.nodeid)?;
        if size == 0 {
            let length = self.layer.getxattr(&caller(header), &node, name, &mut [])?;
            return Ok(reply.xattr_size(u32::try_from(length).map_err(|_| Errno::E2BIG)?)?);
        }
        let length = self.layer.getxattr(&caller(header), &node, name, reply.buffer(size as usize))?;
        Ok(reply.filled(length)?)
    }

    pub(crate) fn listxattr(&self, header: &Header, size: u32, reply: &mut Reply<'_>) -> Outcome {
        self.supported()?;
        let node = self.node(header.nodeid)?;
        if size == 0 {
            let length = self.layer.listxattr(&caller(header), &node, &mut [])?;
            return Ok(reply.xattr_size(u32::try_from(length).map_err(|_| Errno::E2BIG)?)?);
        }
        let length = self.layer.listxattr(&caller(header), &node, reply.buffer(size as usize))?;
        Ok(reply.filled(length)?)
    }

    pub(crate) fn setxattr(&self, header: &Header, name: &[u8], value: &[u8], flags: u32, long_flags: u32) -> Outcome {
        self.may_exist(name)?;
        let flags = XattrFlags {
            create: flags & CREATE != 0,
            replace: flags & REPLACE != 0,
            kill_sgid: long_flags & abi::flag::SETXATTR_ACL_KILL_SGID != 0,
        };
        self.layer.setxattr(&caller(header), &self.node(header.nodeid)?, name, value, flags)?;
        if name == FIRST_WRITE {
            self.open.privileges.fetch_add(1, Ordering::AcqRel);
        }
        self.acl_changed(name);
        Ok(())
    }

    pub(crate) fn removexattr(&self, header: &Header, name: &[u8]) -> Outcome {
        self.may_exist(name)?;
        self.layer.removexattr(&caller(header), &self.node(header.nodeid)?, name)?;
        self.acl_changed(name);
        Ok(())
    }

    fn acl_changed(&self, name: &[u8]) {
        if name == b"system.posix_acl_access" {
            self.permissions_changed();
        }
    }

    fn supported(&self) -> Outcome {
        if self.options.xattr == XattrChoice::Off { Err(Errno::ENOSYS.into()) } else { Ok(()) }
    }

    /// Refuses the names that cannot exist here, without asking the layer.
    fn may_exist(&self, name: &[u8]) -> Outcome {
        self.supported()?;
        // The kernel's error for a name that is only its namespace.
        if matches!(name, b"user." | b"trusted." | b"security.") {
            return Err(Errno::EINVAL.into());
        }
        let acl = matches!(name, b"system.posix_acl_access" | b"system.posix_acl_default");
        let no_acls = acl && (self.options.acl == AclChoice::Off || !self.layer.capabilities().acls);
        let no_label = name == b"security.selinux" && !self.kernel.selinux;
        if no_acls || no_label { Err(Errno::EOPNOTSUPP.into()) } else { Ok(()) }
    }
}
