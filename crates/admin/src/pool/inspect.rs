//! `pool inspect`: dumps of on-disk data, as text: labels, root records, segments, frames, trees.
//! The format is described in `docs/pool-format.md`.

use nacre_pool::device::Device;
use nacre_pool::frame::Header;
use nacre_pool::label;
use nacre_pool::rows::keys::Key;
use nacre_pool::rows::{DatasetHead, Entry, Extent, InodeRow, NameTarget, OwnerUse, Xattr};
use nacre_pool::tree::walk::Visitor;
use nacre_pool::{Pointer, PoolError, WriteStream};
use serde::{Deserialize, Serialize};

use crate::progress::ResultLines;
use crate::{Imported, Progress, Refusal};

/// Selection of the data to dump.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wanted {
    /// The segments.
    pub segments: bool,
    /// The frames of this segment.
    pub frames: Option<u32>,
    /// The rows of this dataset or snapshot, by name.
    pub rows: Option<String>,
}

/// Dumps it, as notes.
///
/// # Errors
/// A structure cannot be read.
pub fn run(pool: &Imported, wanted: &Wanted, progress: &mut dyn Progress) -> Result<(), Refusal> {
    let lines = &mut ResultLines::to(progress);
    dump(pool, wanted, lines)?;
    lines.end(&format!("cannot inspect '{}'", pool.name()))
}

fn dump(pool: &Imported, wanted: &Wanted, lines: &mut ResultLines<'_>) -> Result<(), Refusal> {
    if let Some(name) = &wanted.rows {
        return rows(pool, name, lines);
    }
    if let Some(segment) = wanted.frames {
        return frames(pool, segment, lines);
    }
    if wanted.segments {
        segments(pool, lines);
        return Ok(());
    }
    labels(pool, lines)?;
    datasets(pool, lines)
}

fn labels(pool: &Imported, lines: &mut ResultLines<'_>) -> Result<(), Refusal> {
    let identity = pool.store.identity();
    lines.send(&format!("pool {}", identity.name));
    lines.send(&format!(
        "  number {}  format {}  revision {}  state {:?}",
        identity.pool,
        label::VERSION,
        identity.revision,
        identity.state
    ));
    lines.send(&format!(
        "  features {:#x} needed, {:#x} needed to write, {:#x} not needed",
        identity.incompatible, identity.read_only_compatible, identity.compatible
    ));
    lines.send(&format!(
        "  host {} ({})  written at {}  slots of {} bytes",
        identity.host.1, identity.host.0, identity.time, identity.slot
    ));
    let devices = pool.devices.read().clone();
    for (index, (member, device)) in identity.members.iter().zip(&devices).enumerate() {
        let path = String::from_utf8_lossy(&member.path).into_owned();
        lines.send(&format!(
            "device {index}: {}  number {}  {} bytes  last seen at {path}",
            device.name(),
            member.guid,
            member.length
        ));
        match label::roots(&**device, identity.pool) {
            Ok(roots) => roots.iter().for_each(|root| {
                let catalog = root.catalog.map_or_else(|| "no catalog".to_owned(), |catalog| format!("catalog {catalog}"));
                let state = if root.clean { "closed in order" } else { "in use" };
                lines.send(&format!(
                    "  root {}: txg {}  oldest kept {}  at {}  {state}  next segment {}  {catalog}  {} deltas  log from {} (sequence {})",
                    root.generation,
                    root.txg,
                    root.kept,
                    root.time,
                    root.next_segment,
                    root.deltas.len(),
                    root.log_start.position,
                    root.log_start.sequence,
                ));
            }),
            Err(error) => {
                lines.send(&format!("  its root records cannot be read: {error}"));
            }
        }
    }
    let space = pool.store.space();
    lines.send(&format!(
        "space: {} bytes in {} slots, {} slots free; {} allocated ({} of it the segment table, {} about to be freed); {} lost at ends; slop {}; {} for writes",
        space.size, space.slots, space.free_slots, space.allocated, space.table, space.freeing, space.slack, space.slop, space.available
    ));
    Ok(())
}

fn datasets(pool: &Imported, lines: &mut ResultLines<'_>) -> Result<(), Refusal> {
    let mut rows = Vec::new();
    {
        let catalog = pool.pool.catalog_view();
        let mut waiting = vec![catalog.root()?];
        while let Some(id) = waiting.pop() {
            let row = catalog.dataset(id)?;
            let root = row.root.map_or_else(|| "empty".to_owned(), |root| root.to_string());
            rows.push(format!(
                "dataset {id}: {}  created in txg {}  origin {:?}  tree {root}",
                catalog.name(id)?,
                row.created,
                row.origin
            ));
            for (txg, row) in catalog.snapshot_rows(id)? {
                let root = row.root.map_or_else(|| "empty".to_owned(), |root| root.to_string());
                rows.push(format!(
                    "  snapshot {}: txg {txg}  {} bytes  {} holds, {} clones  tree {root}",
                    row.name, row.referenced, row.holds, row.clones
                ));
            }
            let mut below = catalog.children(id)?;
            below.reverse();
            waiting.extend(below);
        }
    }
    for row in &rows {
        lines.send(row);
    }
    Ok(())
}

fn segments(pool: &Imported, lines: &mut ResultLines<'_>) {
    for segment in pool.store.segments() {
        let place: Vec<String> = segment.place.iter().map(|place| format!("{}:{}", place.device, place.slot)).collect();
        let state = match (segment.sealed, segment.dead_since) {
            (_, Some(generation)) => format!("dead since root {generation}"),
            (true, None) => "sealed".to_owned(),
            (false, None) => "open".to_owned(),
        };
        lines.send(&format!(
            "segment {}: {}  at {}  {state}  {} frames in {} bytes, {} of {} bytes alive here, {} moved away  newest birth {}",
            segment.id,
            stream_name(segment.stream),
            if place.is_empty() { "no place".to_owned() } else { place.join(",") },
            segment.frames,
            segment.bytes,
            segment.live_frames,
            segment.live_bytes,
            segment.moved,
            segment.newest
        ));
    }
}

/// Names of the write streams in this command's output, which stay stable.
fn stream_name(stream: WriteStream) -> &'static str {
    match stream {
        WriteStream::Metadata => "Metadata",
        WriteStream::Data => "Data",
        WriteStream::Relocated => "Survivors",
        WriteStream::Table => "Table",
        WriteStream::RelocatedMetadata => "MetadataSurvivors",
    }
}

fn frames(pool: &Imported, segment: u32, lines: &mut ResultLines<'_>) -> Result<(), Refusal> {
    let shown = pool.store.inspect(segment, &mut |Header { pointer, owner, sealer }, offset, lives| {
        let dataset = owner.dataset;
        let content = if pointer.is_sealed() {
            format!("sealed, family {} generation {}", sealer.family, sealer.ordinal)
        } else {
            format!("object {} offset {}", owner.object, owner.offset)
        };
        let state = if lives { "alive" } else { "dead" };
        lines.send(&format!("{offset:>9}: {pointer}  dataset {dataset} {content}  {state}"))
    });
    shown.map_err(|error| Refusal::pool(format!("cannot show segment {segment}"), &error))
}

/// Dumps the rows of a tree.
struct Rows<'a, 'p>(&'a mut ResultLines<'p>);

impl Visitor for Rows<'_, '_> {
    fn frame(&mut self, pointer: &Pointer) -> Result<bool, PoolError> {
        Ok(self.0.send(&format!("node {pointer}")))
    }

    fn row(&mut self, key: &[u8], value: &[u8]) -> Result<(), PoolError> {
        let text = match Key::decode(key) {
            Ok(key) => format!("{key:?} = {}", shown(&key, value)),
            Err(_) => format!("{} = {}", key.escape_ascii(), value.escape_ascii()),
        };
        self.0.send(&text);
        Ok(())
    }

    fn damaged(&mut self, _: &Pointer, error: PoolError) -> Result<(), PoolError> {
        self.0.send(&format!("damaged: {error}"));
        Ok(())
    }
}

/// Formats a row. Names of types in the output stay stable although the types have other names now.
fn shown(key: &Key, value: &[u8]) -> String {
    let text = match key {
        Key::Head => DatasetHead::decode(value).map(|row| {
            format!("{row:?}").replacen("DatasetHead", "Head", 1).replacen("hashing: Ordered", "hashing: Near", 1)
        }),
        Key::Inode(_) => InodeRow::decode(value).map(|row| format!("{row:?}").replacen("InodeRow", "Inode", 1)),
        Key::Entry { .. } => {
            Entry::decode(value).map(|row| format!("{:?} {} '{}'", row.file_type, row.inode, row.name.escape_ascii()))
        }
        Key::Name { .. } => NameTarget::decode(value).map(|row| format!("{row:?}")),
        Key::Extent { .. } => Extent::decode(value).map(|row| match row.pointer() {
            Some(pointer) => pointer.to_string(),
            None => format!("{} bytes here", value.len().saturating_sub(1)),
        }),
        Key::Xattr { .. } => Xattr::decode(value).map(|row| match row {
            Xattr::Frame(pointer) => pointer.to_string(),
            Xattr::Inline(value) => format!("'{}'", value.escape_ascii()),
        }),
        Key::OwnerUse { .. } => OwnerUse::decode(value).map(|row| format!("{row:?}")),
        Key::Orphan(_) | Key::Cut(_) => Ok(String::new()),
        _ => Ok(value.escape_ascii().to_string()),
    };
    text.unwrap_or_else(|error| format!("damaged ({error}): {}", value.escape_ascii()))
}

fn rows(pool: &Imported, name: &str, lines: &mut ResultLines<'_>) -> Result<(), Refusal> {
    let missing = || crate::fs::missing("open", name);
    let root = {
        let catalog = pool.pool.catalog_view();
        let (filesystem, snapshot) =
            name.split_once('@').map_or((name, None), |(filesystem, snapshot)| (filesystem, Some(snapshot)));
        let id = catalog.find(filesystem)?.ok_or_else(missing)?;
        match snapshot {
            None => catalog.dataset(id)?.root,
            Some(snapshot) => catalog.snapshot(id, catalog.snapshot_named(id, snapshot)?.ok_or_else(missing)?)?.root,
        }
    };
    match root {
        Some(root) => pool
            .pool
            .visit_tree(&root, &mut Rows(lines))
            .map_err(|error| Refusal::pool(format!("cannot show '{name}'"), &error)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacre_pool::rows::{FileType, Folding, Timestamp, keys::Hashing};

    #[test]
    fn rows_and_streams_are_spelled_as_ever() {
        let head =
            DatasetHead { next: 3, root: 1, seed: 9, hashing: Hashing::Ordered, folding: Folding::EXACT, objects: 2 };
        let text = shown(&Key::Head, &head.encode());
        assert!(text.starts_with("Head { next: 3, root: 1, seed: 9, hashing: Near, folding: "), "{text}");
        let row = InodeRow::new(FileType::Regular, 0o644, Timestamp { seconds: 1, nanoseconds: 2 });
        let text = shown(&Key::Inode(5), &row.encode());
        assert!(text.starts_with("Inode { "), "{text}");
        assert_eq!(
            [WriteStream::Relocated, WriteStream::RelocatedMetadata].map(stream_name),
            ["Survivors", "MetadataSurvivors"]
        );
    }
}
