//! Emptying a directory of one branch, for directories that users no longer see.

use super::{Source, batch::Batch};
use nacre_vfs::{Caller, Errno, Kind, Layer, Name, Node, Result};

/// Removes everything in a directory, marks and all. Follows nothing, and needs no stack: it goes
/// down by nodes and comes back up by those it holds.
///
/// # Errors
/// What the storage says; what was removed until then is gone. What others put there meanwhile is
/// removed too, or ENOTEMPTY.
pub(crate) fn purge(layer: &dyn Layer, directory: &Node) -> Result<()> {
    let caller = &Caller::ROOT;
    // From the top: directories that are being emptied, each with its name in the one before.
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

/// Removes what is no directory until one is met, which is answered with its name; `None` where the
/// directory is empty.
fn empty_but_directories(layer: &dyn Layer, caller: &Caller, directory: &Node) -> Result<Option<(Vec<u8>, Node)>> {
    let source = Source { layer, shared: None, directory, slot: 0, reads_marks: false, x_directory: false };
    let mut batch = Batch::default();
    // From the start each time: what was seen is gone.
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
            // Names that are listed and not there: this would go on for ever.
            return Err(Errno::ENOTEMPTY);
        }
    }
    Ok(None)
}
