//! Layers whose files can be found by inode number alone: a front end then needs no table of them.

use crate::{Attr, Entry, GivenNumbers, Node, Result};
use std::sync::Arc;

/// The generation that no file has ([`Numbered::generation`]).
pub const NO_GENERATION: u32 = u32::MAX;

/// Features of a layer whose files are found by inode number. All its files are of one file system. As long as a
/// front end runs, a number never means two files in turn, not even after the first one is gone; files that had the
/// number earlier are distinguished by the generation. Positions in its listings are 256 at least: the front end uses
/// smaller ones for `.` and `..`.
pub trait Numbered: Send + Sync {
    /// Returns the node of this inode number. Cheap: a missing file may be noticed only when the node is used.
    ///
    /// # Errors
    /// ESTALE where it is known that there is none.
    fn node(&self, number: u64) -> Result<Node>;

    /// Looks a file up by an inode number that the front end may not know: a user may keep a file handle over
    /// restarts. So any number may come, and everything is checked.
    ///
    /// # Errors
    /// ESTALE where there is no file, or no longer: also without a name, and where access is denied for all.
    fn look_up(&self, number: u64) -> Result<Entry>;

    /// Inode number of the parent directory; the directory's own where that is not known.
    fn parent(&self, node: &Node) -> u64;

    /// Generation of a file, which has these attributes: distinguishes it from other files that had its number or
    /// will have it. After a crash, or after a rollback, numbers may be assigned again. A file keeps its generation
    /// for good. Never [`NO_GENERATION`].
    fn generation(&self, attr: &Attr) -> u32;

    /// Whether a directory is missing in the listing of its parent, so that only a lookup of its name finds it.
    fn is_unlisted(&self, node: &Node) -> bool;

    /// Notes that the front end does not know this file any more. The layer then frees a file without a name, which
    /// it keeps so that it is still found by its number. A layer that never gets this call keeps it for good, so it
    /// begins to keep files with the first call of [`Numbered::node`].
    fn forgotten(&self, number: u64);

    /// Inode numbers of files without a name that are kept for a front end after a failover: it calls
    /// [`Numbered::forgotten`] for those that its kernel does not know any more.
    fn kept(&self) -> Vec<u64> {
        Vec::new()
    }

    /// Sets where numbers assigned for good (for example upper bits of inode numbers) are recorded for the next
    /// process; assignments recorded already are repeated. Called before any access by number; a layer over several
    /// layers with inode numbers forwards it.
    fn note_in(&self, given: &Arc<dyn GivenNumbers>) {
        let _ = given;
    }

    /// Sets what a previous process had agreed on with the kernel, where the layer may offer something else by now:
    /// whether there are ACLs.
    fn agreed_before(&self, acls: bool) {
        let _ = acls;
    }

    /// Whether names in this directory are matched without case or normalization. A front end must not cache any
    /// variant of a name: a change by one variant does not invalidate the others.
    fn folds(&self, directory: &Node) -> bool;
}
