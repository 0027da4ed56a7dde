//! Policies for changes of owner, group, mode and extended attributes, for deletion, rename and
//! truncation. Pure.

use super::{acl, owner::Owners, perms::Perms};
use crate::settings::{ChangePolicy, XattrPolicy};
use nacre_vfs::{Before, Errno, Kind, Op, OpenFlags, Result, SetAttr};

const X_BITS: u32 = 0o111;

/// The policies of one remap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Policies {
    /// Policy for changes of owner.
    pub chown: ChangePolicy,
    /// Policy for changes of group.
    pub chgrp: ChangePolicy,
    /// Policy for changes of mode.
    pub chmod: ChangePolicy,
    /// Changes of the x bits of regular files pass in any case.
    pub chmod_allow_x: bool,
    /// Policy for extended attributes.
    pub xattr: XattrPolicy,
    /// `unlink` and `rmdir` are refused.
    pub delete_deny: bool,
    /// `rename` is refused.
    pub rename_deny: bool,
    /// `rename` over an existing target is refused.
    pub replace_deny: bool,
    /// Truncation is refused.
    pub truncate_deny: bool,
}

impl Policies {
    /// Refuses an operation as a whole.
    ///
    /// # Errors
    /// EPERM for deletions, renames and ACLs that would change a mode; EACCES and EOPNOTSUPP for
    /// extended attributes.
    pub fn allow(&self, op: &Op<'_>) -> Result<()> {
        match op {
            Op::Unlink(_) | Op::Rmdir(_) if self.delete_deny => Err(Errno::EPERM),
            Op::Rename(..) if self.rename_deny => Err(Errno::EPERM),
            Op::Getxattr(_) | Op::Listxattr if self.xattr == XattrPolicy::None => Err(Errno::EOPNOTSUPP),
            Op::Setxattr(name, _) | Op::Removexattr(name) => self.allow_xattr_change(name),
            _ => Ok(()),
        }
    }

    fn allow_xattr_change(&self, name: &[u8]) -> Result<()> {
        match self.xattr {
            XattrPolicy::None => return Err(Errno::EOPNOTSUPP),
            XattrPolicy::Ro => return Err(Errno::EACCES),
            XattrPolicy::Rw => {}
        }
        // The access ACL contains the mode: the policy for chmod applies to it. "Not supported"
        // makes copying tools continue without ACLs.
        match self.chmod {
            ChangePolicy::Deny if name == acl::ACCESS => Err(Errno::EPERM),
            ChangePolicy::Ignore if name == acl::ACCESS => Err(Errno::EOPNOTSUPP),
            _ => Ok(()),
        }
    }

    /// Applies the policies to a change of attributes: denied parts fail the whole change, ignored
    /// ones are removed, owners are translated to stored ids, and a mode passes the `filter` for
    /// its type, if there is any.
    ///
    /// # Errors
    /// EPERM where a part is denied, EOVERFLOW where an owner cannot be translated.
    pub fn change<'a>(
        &self,
        owners: &Owners,
        filter: Option<impl Fn(Kind) -> &'a Perms>,
        change: &mut SetAttr,
        before: Before<'_>,
    ) -> Result<()> {
        let denied = |asked: bool, policy| asked && policy == ChangePolicy::Deny;
        if denied(change.uid.is_some(), self.chown) || denied(change.gid.is_some(), self.chgrp) {
            return Err(Errno::EPERM);
        }
        if let Some(mode) = change.mode {
            change.mode = self.mode(mode, filter, before)?;
        }
        if let Some(size) = change.size
            && self.truncate_deny
            && size < before()?.size
        {
            return Err(Errno::EPERM);
        }
        let owned = change.uid.is_some() || change.gid.is_some();
        change.uid = back(change.uid, self.chown, |id| owners.users.stored(id))?;
        change.gid = back(change.gid, self.chgrp, |id| owners.groups.stored(id))?;
        if owned && change.uid.is_none() && change.gid.is_none() && change.size.is_none() {
            // The set-id bits are cleared with a change of owner; without the change they stay.
            (change.kill_privileges, change.outside_group) = (false, false);
        }
        Ok(())
    }

    /// The mode to set in the layer below; `None` for no change.
    fn mode<'a>(
        &self,
        asked: u32,
        filter: Option<impl Fn(Kind) -> &'a Perms>,
        before: Before<'_>,
    ) -> Result<Option<u32>> {
        match self.chmod {
            ChangePolicy::Normal => {
                let Some(filter) = filter else { return Ok(Some(asked)) };
                let kind = before()?.kind;
                Ok(Some(filter(kind).apply(asked, kind == Kind::Directory)))
            }
            ChangePolicy::Ignore | ChangePolicy::Deny => {
                let present =
                    if self.chmod_allow_x { Some(before()?).filter(|attr| attr.kind == Kind::File) } else { None };
                let only_x = present.as_ref().is_some_and(|attr| (attr.mode ^ asked) & !X_BITS == 0);
                match present {
                    Some(attr) if only_x || self.chmod == ChangePolicy::Ignore => {
                        Ok(Some((attr.mode & !X_BITS) | (asked & X_BITS)))
                    }
                    _ if self.chmod == ChangePolicy::Ignore => Ok(None),
                    _ => Err(Errno::EPERM),
                }
            }
        }
    }

    /// Adjusts the flags of an open: truncation is removed where it is denied.
    ///
    /// # Errors
    /// EPERM if a file with content would be truncated.
    pub fn open(&self, flags: &mut OpenFlags, before: Option<Before<'_>>) -> Result<()> {
        if !self.truncate_deny || !flags.truncates() {
            return Ok(());
        }
        if let Some(before) = before
            && before()?.size > 0
        {
            return Err(Errno::EPERM);
        }
        // A new file is empty without truncation, and a file that got content meanwhile keeps it.
        flags.0 &= !OpenFlags::TRUNC;
        Ok(())
    }
}

fn back(asked: Option<u32>, policy: ChangePolicy, stored: impl Fn(u32) -> Result<u32>) -> Result<Option<u32>> {
    match asked {
        Some(id) if policy == ChangePolicy::Normal => stored(id).map(Some),
        _ => Ok(None),
    }
}
