//! The filter `remap`: shows other owners and modes, and applies rules to changes. Does everything
//! that bindfs does to attributes, and more.
//!
//! Made by the stack builder. Its rules can be replaced while it serves ([`Remap::replace`]); each
//! operation sees one set of rules per hook. Invariants:
//! * the rules alone decide: no state about files is kept;
//! * attributes are rewritten in one function ([`Rules`]`::show`), in this order: change time, map,
//!   offset, forced owner, block devices, mirror, link count, permission rules, realistic
//!   permissions.

pub mod acl;
pub mod hide;
pub mod id_map;
pub mod members;
pub mod owner;
mod passwd;
pub mod perms;
pub mod policy;
mod realistic;
mod rules;
#[cfg(test)]
pub(crate) mod tests;

pub use rules::{Rules, RulesError};

use crate::set_id;
use arc_swap::ArcSwap;
use nacre_vfs::{
    AllocateMode, Attr, Before, Caller, Coherence, Creation, Description, Errno, Filter, Kind, Name, Op, OpenFile,
    OpenFlags, Opened, Result, SetAttr,
};
use owner::{Ids, NOBODY};
use rules::KindRules;
use std::{any::Any, sync::Arc};

const PERMISSIONS: u32 = 0o777;
const SET_USER_ID: u32 = 0o4000;
const SET_GROUP_ID: u32 = 0o2000;

/// The filter with its current rules.
#[derive(Debug)]
pub struct Remap {
    rules: ArcSwap<Rules>,
}

impl Remap {
    /// A filter with these rules.
    pub fn new(rules: Rules) -> Remap {
        Remap { rules: ArcSwap::from_pointee(rules) }
    }

    /// Replaces the rules, at once for all new operations. The caller has to drop caches of the
    /// layers above.
    pub fn replace(&self, rules: Rules) {
        self.rules.store(Arc::new(rules));
    }
}

impl Rules {
    /// Rewrites attributes for a caller.
    fn show(&self, caller: &Caller, attr: &mut Attr) -> Result<()> {
        let rules = self.kinds.get(attr.kind);
        let below = *attr;
        if self.ctime_from_mtime {
            attr.ctime = attr.mtime;
        }
        attr.uid = match rules.force_user {
            Some(user) => user,
            None => self.owners.users.shown(attr.uid).unwrap_or(NOBODY),
        };
        attr.gid = match rules.force_group {
            Some(group) => group,
            None => self.owners.groups.shown(attr.gid).unwrap_or(NOBODY),
        };
        // Before anything that depends on the caller: a file has the same type for all callers.
        if let (Kind::Block, Some(devices)) = (attr.kind, &self.block_devices) {
            attr.size = devices.size(attr.rdev_major, attr.rdev_minor).unwrap_or(0);
            attr.blocks = attr.size.div_ceil(512);
            (attr.kind, attr.rdev_major, attr.rdev_minor) = (Kind::File, 0, 0);
        }
        if let Some(mirror) = &self.mirror {
            if mirror.members.contain(caller) {
                attr.uid = caller.uid;
            } else if mirror.only && caller.uid != 0 {
                attr.mode &= !PERMISSIONS;
                return Ok(());
            }
        }
        if self.hide_hard_links {
            attr.nlink = 1;
        }
        if attr.kind != Kind::Symlink {
            attr.mode = self.shown_mode(rules, &below, below.mode);
        }
        Ok(())
    }

    /// Computes the shown mode for the stored `mode` of a file with the attributes `below`.
    fn shown_mode(&self, rules: &KindRules, below: &Attr, mode: u32) -> u32 {
        let mode = rules.perms.apply(mode, below.kind == Kind::Directory);
        match &self.realistic {
            Some(mounter) => mode & !((!realistic::access(mounter, below) & 7) * 0o111),
            None => mode,
        }
    }

    /// Whether `mirror-only` excludes the caller from an operation that needs a permission. The
    /// kernel refuses these by the mode that excluded callers are shown, but it caches one mode per
    /// file: a look-up by a member at the same instant would permit the operation.
    fn shuts_out(&self, caller: &Caller, op: &Op<'_>) -> bool {
        let Some(mirror) = self.mirror.as_ref().filter(|mirror| mirror.only && caller.uid != 0) else { return false };
        let guarded = match op {
            Op::Lookup(_)
            | Op::Create(..)
            | Op::Link(_)
            | Op::Unlink(_)
            | Op::Rmdir(_)
            | Op::Rename(..)
            | Op::Open(_)
            | Op::Readdir => true,
            // Permitted to an owner without any permission, or to the holder of an open file.
            Op::Getattr
            | Op::Setattr(_)
            | Op::Readlink
            | Op::Getxattr(_)
            | Op::Setxattr(..)
            | Op::Listxattr
            | Op::Removexattr(_)
            | Op::Ioctl(_)
            | Op::Statfs
            | Op::Sync => false,
        };
        guarded && !mirror.members.contain(caller)
    }

    /// Determines the stored owner of a new file. An id that cannot be stored for its creator is
    /// replaced by the mounter's, like in bindfs.
    fn owner_of_new(&self, caller: &mut Caller, creation: &mut Creation) {
        let rules = self.kinds.get(creation.kind);
        let (user, group) = if self.callers_own {
            (self.owners.users.stored(caller.uid).ok(), self.owners.groups.stored(caller.gid).ok())
        } else {
            (Some(self.mounter.0), Some(self.mounter.1))
        };
        let (user, group) = (rules.create_for_user.or(user), rules.create_for_group.or(group));
        // The creator has it open for writing. On directories, set-group-id only makes new files
        // inherit the group; a file's group may be its directory's, which the kernel has checked as
        // it is shown.
        if creation.kind != Kind::Directory && creation.mode & (SET_USER_ID | SET_GROUP_ID) != 0 {
            let is_root = set_id::is_root(&*self.processes, caller);
            // Together with rules that show other owners, an offset does not count as ownership.
            let own = |ids: &Ids, id| if self.rewrites_owners { Some(id) } else { ids.of_caller(id) };
            if user.is_none_or(|user| Some(user) != own(&self.owners.users, caller.uid) && !is_root) {
                creation.mode &= !SET_USER_ID;
            }
            let group_of_caller = own(&self.owners.groups, caller.gid);
            if group.is_none_or(|group| (Some(group) != group_of_caller || self.rewrites_groups) && !is_root) {
                creation.mode &= !SET_GROUP_ID;
            }
        }
        let (user, group) = (user.unwrap_or(self.mounter.0), group.unwrap_or(self.mounter.1));
        (caller.uid, caller.gid) = (user, group);
    }
}

impl Filter for Remap {
    fn name(&self) -> &'static str {
        "remap"
    }

    fn describe(&self) -> Description {
        Description { settings: self.rules.load().settings.clone(), ..Description::new("remap") }
    }

    fn allow(&self, caller: &Caller, op: &Op<'_>) -> Result<()> {
        let rules = self.rules.load();
        if rules.shuts_out(caller, op) { Err(Errno::EACCES) } else { rules.policies.allow(op) }
    }

    fn visible(&self, name: Name<'_>) -> bool {
        !self.rules.load().hidden.hides(name)
    }

    fn new_down(&self, caller: &mut Caller, creation: &mut Creation) -> Result<()> {
        let rules = self.rules.load();
        let perms = &rules.kinds.get(creation.kind).create_with_perms;
        if !perms.is_empty() && creation.kind != Kind::Symlink {
            // The rules are applied last: to the mode after the umask, which is then done.
            creation.mode = perms.apply(creation.mode & !caller.umask, creation.kind == Kind::Directory);
            caller.umask = 0;
        }
        creation.group = rules.kinds.get(creation.kind).create_for_group;
        rules.owner_of_new(caller, creation);
        Ok(())
    }

    fn change_down(&self, caller: &Caller, change: &mut SetAttr, before: Before<'_>) -> Result<()> {
        let rules = self.rules.load();
        let filter = rules.filters_modes.then_some(|kind| &rules.kinds.get(kind).chmod_filter);
        rules.policies.change(&rules.owners, filter, change, before)?;
        if rules.rewrites_owners { set_id::limit(&*rules.processes, caller, change, before) } else { Ok(()) }
    }

    fn attr_up(&self, caller: &Caller, attr: &mut Attr) -> Result<()> {
        self.rules.load().show(caller, attr)
    }

    fn protects_targets(&self) -> bool {
        self.rules.load().policies.replace_deny
    }

    fn rewrites_xattr(&self, name: &[u8]) -> bool {
        acl::is_acl(name) && {
            let rules = self.rules.load();
            rules.rewrites_modes || !rules.owners.is_identity() || rules.filters_modes
        }
    }

    fn xattr_down(&self, name: &[u8], value: &mut Vec<u8>, before: Before<'_>) -> Result<()> {
        let rules = self.rules.load();
        acl::translate(value, |id| rules.owners.users.stored(id), |id| rules.owners.groups.stored(id))?;
        if name == acl::ACCESS && rules.filters_modes {
            let kind = before()?.kind;
            let filter = &rules.kinds.get(kind).chmod_filter;
            acl::rewrite(value, |mode| filter.apply(mode, kind == Kind::Directory))?;
        }
        Ok(())
    }

    fn xattr_up(&self, name: &[u8], value: &mut [u8], attr: Before<'_>) -> Result<()> {
        let rules = self.rules.load();
        // The kernel would refuse an ACL entry without a valid id as broken.
        let named = |ids: &Ids, id| ids.shown(id).ok_or(Errno::EOVERFLOW);
        acl::translate(value, |id| named(&rules.owners.users, id), |id| named(&rules.owners.groups, id))?;
        if name == acl::ACCESS && rules.rewrites_modes {
            let below = attr()?;
            acl::rewrite(value, |mode| rules.shown_mode(rules.kinds.get(below.kind), &below, mode))?;
        }
        Ok(())
    }

    fn open_down(&self, _caller: &Caller, flags: &mut OpenFlags, before: Option<Before<'_>>) -> Result<()> {
        self.rules.load().policies.open(flags, before)
    }

    fn file_up(&self, file: Opened, _flags: OpenFlags) -> Opened {
        if self.rules.load().policies.truncate_deny { Arc::new(NeverCut { below: file }) } else { file }
    }

    fn coherence_up(&self, below: Coherence) -> Coherence {
        if self.rules.load().mirror.is_some() { below.max(Coherence::PerCaller) } else { below }
    }

    fn acls_up(&self, below: bool) -> bool {
        below && self.rules.load().policies.xattr != crate::settings::XattrPolicy::None
    }
}

/// An open file that cannot be truncated (`truncate-deny`). Its bytes are the lower file's, so
/// passthrough stays possible.
struct NeverCut {
    below: Opened,
}

/// Modes of `fallocate(2)` that discard content.
const DROPPING: u32 = AllocateMode::PUNCH_HOLE | AllocateMode::COLLAPSE_RANGE | AllocateMode::ZERO_RANGE;

impl OpenFile for NeverCut {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn allocate(&self, mode: AllocateMode, offset: u64, length: u64) -> Result<()> {
        if mode.0 & DROPPING != 0 { Err(Errno::EPERM) } else { self.below.allocate(mode, offset, length) }
    }

    nacre_vfs::forward_file! { inner read write append flush fsync seek copy_to test_lock set_lock flock ioctl backing left is_on_inner_mount writeback_lease }
}
