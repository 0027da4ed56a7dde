//! Reports changes of a writer on another machine to the FUSE front end.

use nacre_pool::engine::Changes;
use nacre_vfs::{FileId, Invalidation};
use std::sync::mpsc::Sender;

/// Sends invalidations for all changes to the FUSE front end; `id` maps a number to a file id.
pub(crate) fn tell(changes: &Changes, id: &dyn Fn(u64) -> FileId, door: &Sender<Invalidation>) {
    let told = if changes.everything {
        door.send(Invalidation::Everything)
    } else {
        let entry = |(directory, name): &(u64, Vec<u8>)| Invalidation::Entry {
            parent: id(*directory),
            name: name.clone().into_boxed_slice(),
        };
        let names = changes.names.iter().map(entry);
        let attributes = changes.attributes.iter().map(|number| Invalidation::Attributes { id: id(*number) });
        let content = changes.content.iter().map(|number| Invalidation::Content { id: id(*number) });
        names.chain(attributes).chain(content).try_for_each(|change| door.send(change))
    };
    if told.is_err() {
        tracing::debug!("the door is gone");
    }
}
