//! Renames during which a previous process was killed.
//!
//! Offered by layers that take several steps for one rename ([`crate::Capabilities::interrupted`]); used by a front
//! end for a resent rename that was begun and whose reply was not recorded.

use crate::{Caller, FileId, Name, Node, Result, Time};

/// A rename that was begun.
#[derive(Clone, Copy, Debug)]
pub struct InterruptedRename<'a> {
    /// The process that has requested it.
    pub caller: &'a Caller,
    /// Time at which it began.
    pub begun: Time,
    /// The directory of the old name.
    pub parent: &'a Node,
    /// The old name.
    pub name: Name<'a>,
    /// The directory of the new name.
    pub new_parent: &'a Node,
    /// The new name.
    pub new_name: Name<'a>,
    /// The file that had the old name when the rename began.
    pub moving: FileId,
    /// The file that had the new name then.
    pub replaced: Option<FileId>,
    /// The two files exchange their names.
    pub exchange: bool,
    /// A character device 0/0 takes the old name.
    pub whiteout: bool,
}

/// Completes an interrupted rename.
pub trait FinishRename {
    /// Takes the missing steps of a rename that is already partly visible to users. False where it is not visible: it
    /// has to be carried out as if it had not begun.
    ///
    /// # Errors
    /// Errors of the storage: the rename is not complete.
    fn finish_rename(&self, rename: &InterruptedRename<'_>) -> Result<bool>;

    /// Undoes the first steps of a rename that is not visible, as its caller may not wait for it any more.
    ///
    /// # Errors
    /// Errors of the storage: a hidden link of the file stays.
    fn undo_rename(&self, rename: &InterruptedRename<'_>) -> Result<()>;
}
