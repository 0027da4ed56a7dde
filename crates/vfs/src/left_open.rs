//! Open files that outlive the process that opened them.
//!
//! Offered by layers whose open files are descriptors of the process
//! ([`crate::Capabilities::left_open`]); used by a door that goes on with what a process left which
//! has died, with the same table of descriptors.

use crate::{Node, OpenFile, OpenFlags, Result};
use std::{
    os::fd::{BorrowedFd, OwnedFd},
    sync::Arc,
};

/// What an open file leaves to a process after this one.
#[derive(Clone, Copy, Debug)]
pub struct LeftFile<'a> {
    /// The descriptor with its bytes.
    pub descriptor: BorrowedFd<'a>,
    /// Where the layer has it, in the layer's own words; 0 where that says nothing.
    pub place: u64,
}

impl<'a> From<BorrowedFd<'a>> for LeftFile<'a> {
    fn from(descriptor: BorrowedFd<'a>) -> LeftFile<'a> {
        LeftFile { descriptor, place: 0 }
    }
}

/// The same as a process after that one finds it.
#[derive(Debug)]
pub struct FoundOpen {
    /// See [`LeftFile::descriptor`].
    pub descriptor: OwnedFd,
    /// See [`LeftFile::place`].
    pub place: u64,
}

/// Numbers that a layer leaves to a process after this one, besides its files.
pub trait LeftNumbers: Send + Sync {
    /// What was noted last; none at first.
    fn read(&self) -> Vec<u64>;

    /// Notes these instead, before anything that follows from them is answered.
    fn note(&self, numbers: &[u64]);

    /// Something cannot be noted: nobody goes on after this process.
    fn give_up(&self, why: &str);
}

/// What a layer gives out for good while it is in use, such as the upper bits of inode numbers: a process
/// after this one has to give it to the same.
pub trait GivenNumbers: Send + Sync {
    /// All that was given out, in that order.
    fn all(&self) -> Vec<[u64; 3]>;

    /// Something is about to be given out.
    fn give(&self, given: [u64; 3]);
}

/// See the module's head.
pub trait LeftOpen {
    /// The open file that [`crate::OpenFile::left`] had answered in that process,
    /// opened with these flags; nothing is created or cut off again. `node` is the file's where its
    /// name leads to it still, and else there is none: then one is answered that no name leads to.
    ///
    /// # Errors
    /// ESTALE where the descriptor is another file's, or the layer does not have its place any more.
    fn take_up(&self, node: Option<&Node>, left: FoundOpen, flags: OpenFlags) -> Result<(Node, Arc<dyn OpenFile>)>;
}
