//! A layer with exactly one layer below, written as hooks with identity defaults.
//!
//! The hooks are applied in one generic place ([`crate::Filtered`]), so that no path can forget a
//! rule: a remap that rewrites `getattr` but neither `lookup` nor a listing is the classic bug.
//! Filters never wrap nodes.

use crate::{Attr, Caller, Coherence, Description, Kind, Name, OpenFlags, Opened, Result, SetAttr, StatFs, XattrFlags};

/// Asks for the attributes below, which is done only where they are needed.
pub type Before<'a> = &'a mut dyn FnMut() -> Result<Attr>;

/// An operation about to happen, for [`Filter::allow`].
#[derive(Clone, Copy, Debug)]
pub enum Op<'a> {
    /// A name is looked up (the only check that `readdir` entries get, too: a refused name is not
    /// listed).
    Lookup(Name<'a>),
    /// Attributes are read.
    Getattr,
    /// Attributes are changed.
    Setattr(&'a SetAttr),
    /// A link is read.
    Readlink,
    /// Something is created.
    Create(Name<'a>, Kind),
    /// A hard link is made.
    Link(Name<'a>),
    /// A name is removed.
    Unlink(Name<'a>),
    /// A directory is removed.
    Rmdir(Name<'a>),
    /// A name is moved onto another.
    Rename(Name<'a>, Name<'a>),
    /// A file is opened.
    Open(OpenFlags),
    /// A directory is listed.
    Readdir,
    /// An extended attribute is read.
    Getxattr(&'a [u8]),
    /// An extended attribute is set.
    Setxattr(&'a [u8], XattrFlags),
    /// The names of extended attributes are listed.
    Listxattr,
    /// An extended attribute is removed.
    Removexattr(&'a [u8]),
    /// An `ioctl(2)`.
    Ioctl(u32),
    /// The file system's figures.
    Statfs,
    /// Durability is asked for.
    Sync,
}

/// The owner, type and mode of something about to be created.
#[derive(Clone, Copy, Debug)]
pub struct Creation {
    /// What.
    pub kind: Kind,
    /// Permission bits as asked for, before the umask.
    pub mode: u32,
    /// The group that it belongs to even where the directory passes on its own (set-group-id);
    /// `None` leaves that to the layer below.
    pub group: Option<u32>,
}

/// The hooks. Identity unless overridden.
#[allow(unused_variables)]
pub trait Filter: Send + Sync + 'static {
    /// The name, as written in a stack.
    fn name(&self) -> &'static str;

    /// Settings for `status` and `--explain`; the caller adds what is below.
    fn describe(&self) -> Description;

    /// Refuses an operation.
    ///
    /// # Errors
    /// Whatever the caller shall see.
    fn allow(&self, caller: &Caller, op: &Op<'_>) -> Result<()> {
        Ok(())
    }

    /// Whether a name exists for users at all; a hidden one is ENOENT to look up and EACCES to
    /// create.
    fn visible(&self, name: Name<'_>) -> bool {
        true
    }

    /// The caller as the layer below shall see it. For creations this decides the owner.
    fn caller_down(&self, caller: &Caller) -> Caller {
        *caller
    }

    /// Changes what is about to be created: owner (through `caller`, already passed through
    /// `caller_down`) and mode.
    ///
    /// # Errors
    /// Where it must not be created.
    fn new_down(&self, caller: &mut Caller, creation: &mut Creation) -> Result<()> {
        Ok(())
    }

    /// Changes a change of attributes; an empty one then succeeds without effect. `before` asks for
    /// the present attributes below.
    ///
    /// # Errors
    /// Where it must not happen.
    fn change_down(&self, caller: &Caller, change: &mut SetAttr, before: Before<'_>) -> Result<()> {
        Ok(())
    }

    /// Rewrites attributes on every way up: look-up, getattr, listing, creation, setattr.
    ///
    /// # Errors
    /// EOVERFLOW where the result cannot be shown.
    fn attr_up(&self, caller: &Caller, attr: &mut Attr) -> Result<()> {
        Ok(())
    }

    /// Whether a rename must not replace an existing target.
    fn protects_targets(&self) -> bool {
        false
    }

    /// Rewrites the value of an extended attribute on the way down, in place. `before` asks for the
    /// present attributes below.
    ///
    /// # Errors
    /// EINVAL where it cannot be translated.
    fn xattr_down(&self, name: &[u8], value: &mut Vec<u8>, before: Before<'_>) -> Result<()> {
        Ok(())
    }

    /// Whether [`Filter::xattr_down`] and [`Filter::xattr_up`] look at this attribute at all (saves
    /// the copy).
    fn rewrites_xattr(&self, name: &[u8]) -> bool {
        false
    }

    /// Rewrites the value of an extended attribute on the way up, in place; the size does not
    /// change. `attr` asks for the attributes below.
    ///
    /// # Errors
    /// Where it cannot be shown.
    fn xattr_up(&self, name: &[u8], value: &mut [u8], attr: Before<'_>) -> Result<()> {
        Ok(())
    }

    /// Changes the flags with which a file is opened below. `before` asks for the present
    /// attributes below; it is `None` where the file is being created (and an existing one may be
    /// opened all the same).
    ///
    /// # Errors
    /// Where it must not be opened so.
    fn open_down(&self, caller: &Caller, flags: &mut OpenFlags, before: Option<Before<'_>>) -> Result<()> {
        Ok(())
    }

    /// Wraps an open file (to count, slow down or record), or returns it as it is.
    fn file_up(&self, file: Opened, flags: OpenFlags) -> Opened {
        file
    }

    /// Rewrites the figures of the file system.
    fn statfs_up(&self, statfs: &mut StatFs) {}

    /// Weakens the coherence of what is below.
    fn coherence_up(&self, below: Coherence) -> Coherence {
        below
    }

    /// Whether ACLs stay meaningful above this filter.
    fn acls_up(&self, below: bool) -> bool {
        below
    }
}
