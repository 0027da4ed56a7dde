//! Layers whose files can be found again by their inode numbers alone: a door then needs to
//! remember none of them.

use crate::{Attr, Entry, GivenNumbers, Node, Result};
use std::sync::Arc;

/// The generation that no file has ([`Numbered::generation`]).
pub const NO_GENERATION: u32 = u32::MAX;

/// What such a layer offers. All its files are of one file system. As long as a door runs, a number
/// never means two files in turn, not even after the first one is gone; of those that it had
/// before, the generation tells. Positions in its listings are 256 at least: what is below is the
/// door's, for `.` and `..`.
pub trait Numbered: Send + Sync {
    /// The file with this inode number. Cheap: whether there is one may turn out when it is asked
    /// for something.
    ///
    /// # Errors
    /// ESTALE where it is known that there is none.
    fn node(&self, number: u64) -> Result<Node>;

    /// The file with this inode number, of which the door may never have been told: somebody kept a
    /// handle, over restarts of everything. So any number may come, and nothing is taken for
    /// granted.
    ///
    /// # Errors
    /// ESTALE where there is none, or no more: also without a name, and where nobody is let in.
    fn look_up(&self, number: u64) -> Result<Entry>;

    /// The inode number of the directory above this one; its own where that is not known.
    fn parent(&self, node: &Node) -> u64;

    /// Tells a file, which has these attributes, from others that had its number or will have it:
    /// after a crash, or after older content has come back, numbers may be given again. A file keeps
    /// it for good. Never [`NO_GENERATION`].
    fn generation(&self, attr: &Attr) -> u32;

    /// Whether a directory is missing in the listing of the one above it, so that only a look-up of
    /// its name finds it.
    fn is_unlisted(&self, node: &Node) -> bool;

    /// The door knows nothing of this file any more. What the layer keeps for a file without a
    /// name, so that it is still found by its number, goes. A layer that is never told keeps it for
    /// good, so it begins to keep with the first call of [`Numbered::node`].
    fn forgotten(&self, number: u64);

    /// Files without a name that are kept for a door that goes on after another process: of those that
    /// its kernel does not know any more, it tells ([`Numbered::forgotten`]).
    fn kept(&self) -> Vec<u64> {
        Vec::new()
    }

    /// What is given out for good, such as upper bits of numbers, is noted there for a process after this one,
    /// and what is noted already is given out alike. Called before anything is asked by number; layers over
    /// several that have numbers are told by who puts them together.
    fn note_in(&self, given: &Arc<dyn GivenNumbers>) {
        let _ = given;
    }

    /// A door goes on with what was agreed with its kernel when another process had it, of which the layer
    /// may offer something else by now: whether there are ACLs.
    fn agreed_before(&self, acls: bool) {
        let _ = acls;
    }

    /// Whether names in this directory are found by other spellings as well. A door must not keep
    /// what it was told of any of them: a change by one spelling says nothing of the others.
    fn folds(&self, directory: &Node) -> bool;
}
