//! What has changed in files that a writer elsewhere writes to, for the door.

use nacre_pool::engine::Changes;
use nacre_vfs::{FileId, Invalidation};
use std::sync::mpsc::Sender;

/// Tells the door what differs; `id` is how it knows the file of a number.
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
