//! What a layer offers beside the operations of [`crate::Layer`].
//!
//! Asked by doors and by layers around layers. A capability that is not named here does not exist:
//! the trait has no other way to one.

use crate::{FinishRename, LeftOpen, Numbered, OpenFileClient, WritebackLayer};

/// See [`crate::Layer::capabilities`]. The default offers nothing.
#[derive(Clone, Copy, Default)]
pub struct Capabilities<'a> {
    /// POSIX ACLs can exist below: a door lets the kernel enforce them.
    pub acls: bool,
    /// Changes are judged here by who asks, besides what a door checks: the door has to name the
    /// caller of every request, even where that costs it something (idmapped mounts).
    pub judges_callers: bool,
    /// A file that takes the place of a removed one may have its number, and nothing tells the two apart: a door
    /// caches no targets of symbolic links.
    pub reuses_numbers: bool,
    /// Files can be found again by their numbers. The same at each question.
    pub numbered: Option<&'a dyn Numbered>,
    /// A door that can hold writes back may offer to.
    pub writeback: Option<&'a dyn WritebackLayer>,
    /// Why a door must be asked when a file is opened, where it could leave that to its kernel: what
    /// the layer does at each open, or does with one.
    pub needs_opens: Option<&'static str>,
    /// It may have to wait for files to be closed, and is told its door.
    pub open_files: Option<&'a dyn OpenFileClient>,
    /// Files that a process left open can be taken up by another one.
    pub left_open: Option<&'a dyn LeftOpen>,
    /// Renames take several steps that users may see, where the process is killed between them.
    pub interrupted: Option<&'a dyn FinishRename>,
}
