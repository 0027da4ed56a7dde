//! Optional features of a layer, in addition to the operations of [`crate::Layer`].
//!
//! Used by front ends and by layers around layers. All optional features are listed here: the trait has no other
//! access to one.

use crate::{FinishRename, LeftOpen, Numbered, OpenFileClient, WritebackLayer};

/// Optional features of a layer: see [`crate::Layer::capabilities`]. The default has none.
#[derive(Clone, Copy, Default)]
pub struct Capabilities<'a> {
    /// POSIX ACLs can exist below: a front end lets the kernel enforce them.
    pub acls: bool,
    /// The layer checks who makes a change, in addition to the checks of a front end: the front end has to name the
    /// caller of every request, even where that has a cost (idmapped mounts).
    pub judges_callers: bool,
    /// A new file may have the inode number of a removed one, and cannot be distinguished from it: a front end caches
    /// no targets of symbolic links.
    pub reuses_numbers: bool,
    /// Files can be found by inode number. The same in each call.
    pub numbered: Option<&'a dyn Numbered>,
    /// Write-back caching: a front end that can cache writes may offer it.
    pub writeback: Option<&'a dyn WritebackLayer>,
    /// Why a front end must send an open of each file, where it could leave that to its kernel: the layer's work at
    /// each open, or with an open file.
    pub needs_opens: Option<&'static str>,
    /// The layer may have to wait for files to be closed, and gets its front end for that.
    pub open_files: Option<&'a dyn OpenFileClient>,
    /// Open files of a previous process can be taken over.
    pub left_open: Option<&'a dyn LeftOpen>,
    /// Renames take several steps, which users may see where the process is killed between them.
    pub interrupted: Option<&'a dyn FinishRename>,
}
