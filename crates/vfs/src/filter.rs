//! A layer with exactly one layer below, written as hooks with identity defaults.
//!
//! The hooks are called in one generic file ([`crate::Filtered`]), so that no code path can forget a rule: a remap
//! that rewrites `getattr` but neither `lookup` nor a listing is the classic bug. Filters never wrap nodes.

use crate::{Attr, Caller, Coherence, Description, Kind, Name, OpenFlags, Opened, Result, SetAttr, StatFs, XattrFlags};

/// Reads the attributes below, which is done only where they are needed.
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
    /// The file system's statistics are read.
    Statfs,
    /// Data is made durable (fsync, syncfs).
    Sync,
}

/// Owner, type and mode of a file about to be created.
#[derive(Clone, Copy, Debug)]
pub struct Creation {
    /// Its type.
    pub kind: Kind,
    /// Permission bits as requested, before the umask.
    pub mode: u32,
    /// The group of the new file, even where the directory has set-group-id; `None`: the layer below chooses.
    pub group: Option<u32>,
}

/// Hooks of a filter. Identity unless overridden.
#[allow(unused_variables)]
pub trait Filter: Send + Sync + 'static {
    /// The name, as written in a stack.
    fn name(&self) -> &'static str;

    /// Settings for `status` and `--explain`; the caller adds the layers below.
    fn describe(&self) -> Description;

    /// Refuses an operation.
    ///
    /// # Errors
    /// The error that the caller gets.
    fn allow(&self, caller: &Caller, op: &Op<'_>) -> Result<()> {
        Ok(())
    }

    /// Whether a name is visible to users; a hidden one is ENOENT in lookups and EACCES in creations.
    fn visible(&self, name: Name<'_>) -> bool {
        true
    }

    /// The caller as seen by the layer below. For creations this decides the owner.
    fn caller_down(&self, caller: &Caller) -> Caller {
        *caller
    }

    /// Changes the attributes of a file about to be created: owner (through `caller`, which has passed `caller_down`
    /// already) and mode.
    ///
    /// # Errors
    /// Where it must not be created.
    /// Where it must not be created.
    fn new_down(&self, caller: &mut Caller, creation: &mut Creation) -> Result<()> {
        Ok(())
    }

    /// Rewrites a change of attributes; an empty one then succeeds without effect. `before` reads the present
    /// attributes below.
    ///
    /// # Errors
    /// Where it must not happen.
    fn change_down(&self, caller: &Caller, change: &mut SetAttr, before: Before<'_>) -> Result<()> {
        Ok(())
    }

    /// Rewrites attributes in every result: lookup, getattr, listing, creation, setattr.
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

    /// Rewrites the value of an extended attribute to be set, in place. `before` reads the present attributes below.
    ///
    /// # Errors
    /// EINVAL where it cannot be translated.
    fn xattr_down(&self, name: &[u8], value: &mut Vec<u8>, before: Before<'_>) -> Result<()> {
        Ok(())
    }

    /// Whether [`Filter::xattr_down`] and [`Filter::xattr_up`] rewrite this attribute at all (saves the copy).
    fn rewrites_xattr(&self, name: &[u8]) -> bool {
        false
    }

    /// Rewrites the value of an extended attribute that was read, in place; the size does not change. `attr` reads
    /// the attributes below.
    ///
    /// # Errors
    /// Where it cannot be shown.
    fn xattr_up(&self, name: &[u8], value: &mut [u8], attr: Before<'_>) -> Result<()> {
        Ok(())
    }

    /// Changes the flags with which a file is opened below. `before` reads the present attributes below; it is `None`
    /// where the file is being created (and an existing one may be opened all the same).
    ///
    /// # Errors
    /// Where it must not be opened with these flags.
    fn open_down(&self, caller: &Caller, flags: &mut OpenFlags, before: Option<Before<'_>>) -> Result<()> {
        Ok(())
    }

    /// Wraps an open file (to count, slow down or record), or returns it unchanged.
    fn file_up(&self, file: Opened, flags: OpenFlags) -> Opened {
        file
    }

    /// Rewrites the statistics of the file system.
    fn statfs_up(&self, statfs: &mut StatFs) {}

    /// Weakens the coherence of the layer below.
    fn coherence_up(&self, below: Coherence) -> Coherence {
        below
    }

    /// Whether ACLs stay meaningful above this filter.
    fn acls_up(&self, below: bool) -> bool {
        below
    }
}
