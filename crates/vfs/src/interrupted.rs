//! Renames that a process before this one was killed in the middle of.
//!
//! Offered by layers that take several steps for one rename ([`crate::Capabilities::interrupted`]); used
//! by a door to which a rename comes again that was begun and whose answer was not noted.

use crate::{FileId, Name, Node, Result};

/// A rename that was begun.
#[derive(Clone, Copy, Debug)]
pub struct InterruptedRename<'a> {
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

/// See the module's head.
pub trait FinishRename {
    /// Takes the steps that a rename lacks of which users can see something already. False where
    /// they see nothing of it: it is to be carried out as if it had not begun.
    ///
    /// # Errors
    /// What the storage says: the rename is not complete.
    fn finish_rename(&self, rename: &InterruptedRename<'_>) -> Result<bool>;
}
