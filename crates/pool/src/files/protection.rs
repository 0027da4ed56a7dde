//! Immutable and append-only files and directories (`chattr +i`, `chattr +a`; ioctl_iflags(2)):
//! refusals with EPERM, as by `may_delete`, `may_create` and `notify_change` of Linux.
//!
//! Called by `names.rs` for the directory and the file of a name, by `inodes.rs` and `xattrs.rs` under the inode's lock,
//! and by poolfs for writes; poolfs itself checks opens, and names the flags that refuse a change of attributes
//! (`dataset/file_flags.rs`). Log replay refuses nothing: its operations have already been acknowledged.

use super::{FileError, Files, Inode, Result, SIZE_MOST, Table};
use crate::rows::InodeRow;
use crate::rows::inode::flags::{APPEND, IMMUTABLE};

impl<T: Table> Files<T> {
    /// Refuses a write of `length` bytes to an immutable file, one before the end of an append-only file, and one behind
    /// [`SIZE_MOST`]. `offset`: `None` for the end.
    ///
    /// # Errors
    /// [`FileError::NotPermitted`]; [`FileError::TooLarge`]; [`FileError::NotFound`] if the inode is gone, and errors of
    /// the engine.
    pub fn check_write(&self, inode: &Inode, offset: Option<u64>, length: u64) -> Result<()> {
        let row = self.attributes_without_room(inode)?;
        let is_before_end = offset.is_some_and(|offset| offset < row.size);
        self.check_without(&row, if is_before_end { IMMUTABLE | APPEND } else { IMMUTABLE })?;
        let end = offset.unwrap_or(row.size).saturating_add(length);
        if end > SIZE_MOST && length > 0 { Err(FileError::TooLarge) } else { Ok(()) }
    }

    /// Refuses new names in an immutable directory.
    pub(super) fn check_takes_names(&self, directory: &InodeRow) -> Result<()> {
        self.check_without(directory, IMMUTABLE)
    }

    /// Refuses the removal of a name from an immutable or append-only directory, or of an immutable
    /// or append-only file.
    pub(super) fn check_loses_name(&self, directory: &InodeRow, file: &InodeRow) -> Result<()> {
        self.check_without(directory, IMMUTABLE | APPEND)?;
        self.check_without(file, IMMUTABLE | APPEND)
    }

    /// Refuses further names of an immutable or append-only file.
    pub(super) fn check_linkable(&self, file: &InodeRow) -> Result<()> {
        self.check_without(file, IMMUTABLE | APPEND)
    }

    /// Refuses other extended attributes of an immutable or append-only file.
    pub(super) fn check_takes_xattrs(&self, file: &InodeRow) -> Result<()> {
        self.check_without(file, IMMUTABLE | APPEND)
    }

    /// Refuses what one of these flags of a file refuses.
    pub(super) fn check_without(&self, row: &InodeRow, flags: u32) -> Result<()> {
        if row.flags & flags != 0 && !self.is_replaying() { Err(FileError::NotPermitted) } else { Ok(()) }
    }
}
