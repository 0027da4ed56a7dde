//! Listings of a member's directories, as the tree shows them.

use super::{DatasetTree, Member};
use nacre_vfs::{DirEntry, DirSink, Kind};
use std::sync::Arc;

/// Sink that translates a member's entries for the tree's listing.
pub(super) struct Listing<'a> {
    pub tree: &'a DatasetTree,
    pub member: &'a Arc<Member>,
    pub sink: &'a mut dyn DirSink,
}

impl DirSink for Listing<'_> {
    fn push(&mut self, entry: DirEntry<'_>) -> bool {
        let mut ino = self.tree.shown(self.member, entry.ino);
        let mut found = entry.entry.map(|found| self.tree.wrap(self.member, found));
        if matches!(entry.kind, Some(Kind::Directory) | None) {
            match self.tree.over(ino) {
                Ok(None) => {}
                Ok(Some(root)) => {
                    ino = root.attr.id.ino;
                    found = found.map(|_| root);
                }
                Err(error) => {
                    // A look-up of the name reports the error.
                    tracing::debug!(%error, "the root of a file system cannot be listed");
                    found = None;
                }
            }
        }
        self.sink.push(DirEntry { ino, entry: found, ..entry })
    }

    fn room(&self, attributes: bool) -> usize {
        self.sink.room(attributes)
    }
}
