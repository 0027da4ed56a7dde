//! Handoff of open files: they survive the process that opened them.
//!
//! Offered by layers whose open files are descriptors of the process ([`crate::Capabilities::left_open`]); used by a
//! front end that takes over after a process has died, with the same table of descriptors.

use crate::{Node, OpenFile, OpenFlags, Result};
use std::{
    os::fd::{BorrowedFd, OwnedFd},
    sync::Arc,
};

/// Handoff state of an open file, for the next process.
#[derive(Clone, Copy, Debug)]
pub struct LeftFile<'a> {
    /// The descriptor of its content.
    pub descriptor: BorrowedFd<'a>,
    /// The file's location in the layer, as the layer encodes it; 0 where it has no meaning.
    pub place: u64,
}

impl<'a> From<BorrowedFd<'a>> for LeftFile<'a> {
    fn from(descriptor: BorrowedFd<'a>) -> LeftFile<'a> {
        LeftFile { descriptor, place: 0 }
    }
}

/// The handoff state as the next process gets it.
#[derive(Debug)]
pub struct FoundOpen {
    /// See [`LeftFile::descriptor`].
    pub descriptor: OwnedFd,
    /// See [`LeftFile::place`].
    pub place: u64,
}

/// Numbers that a layer hands to the next process, in addition to its files.
pub trait LeftNumbers: Send + Sync {
    /// Returns the numbers recorded last; none at first.
    fn read(&self) -> Vec<u64>;

    /// Records these instead, before any answer depends on them.
    fn note(&self, numbers: &[u64]);

    /// Prevents a failover: something cannot be recorded.
    fn give_up(&self, why: &str);
}

/// Numbers that a layer assigns for good while it is in use, for example the upper bits of inode numbers: the next
/// process has to assign them in the same way.
pub trait GivenNumbers: Send + Sync {
    /// Returns all assignments, in their order.
    fn all(&self) -> Vec<[u64; 3]>;

    /// Records an assignment before it is used.
    fn give(&self, given: [u64; 3]);
}

/// Takes over open files of a previous process.
pub trait LeftOpen {
    /// Takes over an open file by the state that [`crate::OpenFile::left`] returned in the previous process, opened
    /// with these flags; nothing is created or truncated again. `node` is the file's node where its name still leads
    /// to it; without it, a node without a name is returned.
    ///
    /// # Errors
    /// ESTALE where the descriptor belongs to another file, or the layer does not have its location any more.
    fn take_up(&self, node: Option<&Node>, left: FoundOpen, flags: OpenFlags) -> Result<(Node, Arc<dyn OpenFile>)>;
}
