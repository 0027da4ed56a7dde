//! Removing all entries of a branch's directory, for directories that users no longer see.

use super::{Source, batch::Batch};
use nacre_vfs::{Caller, Errno, Kind, Layer, Name, Node, Result};

/// Removes everything in a directory, including whiteouts and other marks. Follows no links, and does not
/// recurse: it descends by nodes and returns by those it holds.
///
/// # Errors
/// Errors of the storage; entries removed until then stay removed. Entries that other processes create
/// meanwhile are removed too, or cause ENOTEMPTY.
pub(crate) fn purge(layer: &dyn Layer, directory: &Node) -> Result<()> {
    let caller = &Caller::ROOT;
    // From the top: the directories being emptied, each with its name in the one before.
    let mut way: Vec<(Node, Vec<u8>)> = Vec::new();
    loop {
        let here = way.last().map_or(directory, |(node, _)| node);
        if let Some((name, node)) = empty_but_directories(layer, caller, here)? {
            way.push((node, name));
            continue;
        }
        let Some((_, name)) = way.pop() else { return Ok(()) };
        let parent = way.last().map_or(directory, |(node, _)| node);
        match layer.rmdir(caller, parent, Name::new(&name)?) {
            Ok(()) | Err(Errno::ENOENT) => {}
            Err(error) => return Err(error),
        }
    }
}

/// Removes entries until a directory is found, and returns that with its name; `None` where the directory is
/// empty.
fn empty_but_directories(layer: &dyn Layer, caller: &Caller, directory: &Node) -> Result<Option<(Vec<u8>, Node)>> {
    let source = Source { layer, shared: None, directory, slot: 0, reads_marks: false, x_directory: false };
    let mut batch = Batch::default();
    // From the start each time: entries seen so far are removed.
    while batch.take(&source, caller, 0)? {
        let mut removed = false;
        while let Some((name, taken)) = batch.first() {
            if taken.kind.is_none_or(|kind| kind == Kind::Directory) {
                let found = layer.lookup(caller, directory, name);
                if let Ok(entry) = &found
                    && entry.attr.kind == Kind::Directory
                {
                    return Ok(Some((name.bytes().to_vec(), entry.node.clone())));
                }
            }
            match layer.unlink(caller, directory, name) {
                Ok(()) => removed = true,
                Err(Errno::ENOENT) => {}
                Err(error) => return Err(error),
            }
            batch.advance();
        }
        if !removed {
            // Names that are listed but do not exist: this would never end.
            return Err(Errno::ENOTEMPTY);
        }
    }
    Ok(None)
}
