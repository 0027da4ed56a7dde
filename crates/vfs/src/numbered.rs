//! Layers whose files can be found again by their inode numbers alone: a door then needs to
//! remember none of them.

use crate::{Node, Result};

/// What such a layer offers. All its files are of one file system and generation, and a number
/// never means two files in turn, not even after the first one is gone. Positions in its listings
/// are 256 at least: what is below is the door's, for `.` and `..`.
pub trait Numbered: Send + Sync {
    /// The file with this inode number. Cheap: whether there is one may turn out when it is asked
    /// for something.
    ///
    /// # Errors
    /// ESTALE where it is known that there is none.
    fn node(&self, number: u64) -> Result<Node>;

    /// The inode number of the directory above this one; its own where that is not known.
    fn parent(&self, node: &Node) -> u64;

    /// How often the files with numbers like this one were replaced by others that may have the
    /// same numbers. Directories stay what they are: one that is there afterwards is the same.
    fn generation(&self, number: u64) -> u32;

    /// The door knows nothing of this file any more. What the layer keeps for a file without a
    /// name, so that it is still found by its number, goes. A layer that is never told keeps it for
    /// good, so it begins to keep with the first call of [`Numbered::node`].
    fn forgotten(&self, number: u64);

    /// Whether names in this directory are found by other spellings as well. A door must not keep
    /// what it was told of any of them: a change by one spelling says nothing of the others.
    fn folds(&self, directory: &Node) -> bool;
}
