//! Open files that outlive the process that opened them.
//!
//! Offered by layers whose open files are descriptors of the process
//! ([`crate::Capabilities::left_open`]); used by a door that goes on with what a process left which
//! has died, with the same table of descriptors.

use crate::{Node, OpenFile, OpenFlags, Result};
use std::{os::fd::OwnedFd, sync::Arc};

/// See the module's head.
pub trait LeftOpen {
    /// The open file of a descriptor that [`crate::OpenFile::left_descriptor`] had answered in that process,
    /// opened with these flags; nothing is created or cut off again. `node` is the file's where its
    /// name leads to it still, and else there is none: then one is answered that no name leads to.
    ///
    /// # Errors
    /// ESTALE where the descriptor is another file's.
    fn take_up(&self, node: Option<&Node>, descriptor: OwnedFd, flags: OpenFlags) -> Result<(Node, Arc<dyn OpenFile>)>;
}
