//! Writes first inputs of the targets that read a pool's bytes: what a small pool in memory
//! consists of. Run it when the format has changed: `cargo run -p nacre-fuzz --example seeds`. It
//! adds files to `fuzz/corpus` and removes none.

#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use std::path::Path;
use std::sync::{Arc, Mutex};

use nacre_pool::cache::Cache;
use nacre_pool::catalog::rows::{DoomedRow, SharedRow};
use nacre_pool::catalog::{BookmarkRow, DatasetRow, HistoryRow, PoolHead, PropertyRow, SnapshotRow};
use nacre_pool::device::{Device, Simulator};
use nacre_pool::engine::{Pool, PoolConfig};
use nacre_pool::files::{NewInode, ParentView};
use nacre_pool::rows::{
    DatasetHead, Entry, Extent, FileType, InodeRow, Key, NameTarget, OwnerUse, Patch, Timestamp, Xattr,
};
use nacre_pool::store::NewPool;
use nacre_pool::tree::{Context, Settings, Tree, commit::Form};
use nacre_pool::{
    ChecksumKind, Compression, CompressionSetting, FrameKind, Frames, NewFrame, Pointer, PoolError, Store, Txg,
    compress, frame, label,
};

fn write(target: &str, name: &str, bytes: &[u8]) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().join("fuzz/corpus").join(target);
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join(name), bytes).unwrap();
}

fn trimmed(bytes: &[u8]) -> &[u8] {
    &bytes[..bytes.iter().rposition(|byte| *byte != 0).map_or(0, |at| at + 1)]
}

fn counted(pages: &[&[u8]]) -> Vec<u8> {
    pages.iter().flat_map(|page| [&u16::try_from(page.len()).unwrap().to_le_bytes()[..], page].concat()).collect()
}

/// A pool that has a little of everything; what its device holds.
fn device() -> Vec<u8> {
    let disk = Arc::new(Simulator::new("disk", 128 << 20));
    let new = NewPool {
        name: "tank".into(),
        guid: 7,
        host: (1, "here".into()),
        time: 1_800_000_000,
        redundant_metadata: true,
    };
    let (store, _) = Store::create(vec![Arc::clone(&disk) as Arc<dyn Device>], &new).unwrap();
    let store = Arc::new(store);
    let config = PoolConfig {
        log: Some(store.log().unwrap()),
        storage: Arc::clone(&store) as _,
        clock: Arc::new(|| Timestamp { seconds: 1_800_000_000, nanoseconds: 0 }),
        entropy: Arc::new(|| 42),
        cache: 16 << 20,
        kept: None,
    };
    let pool = Pool::create(config, "tank").unwrap();
    let id = pool.find("tank").unwrap().unwrap();
    let tank = pool.dataset(id).unwrap();
    let files = tank.files();
    let new = |parent: &ParentView| {
        Ok(NewInode { row: InodeRow::new(FileType::Regular, 0o644, parent.now), target: None, attributes: Vec::new() })
    };
    for name in ["greeting", "large", "gone"] {
        let (file, _) = files.make(&files.root(), name.as_bytes(), b"", &new).unwrap();
        files.write(&file, Some(0), &vec![7; if name == "large" { 300_000 } else { 5 }]).unwrap();
        pool.sync_file(&tank, &file).unwrap();
    }
    pool.snapshot(&[(id, "monday".into())]).unwrap();
    files.unlink(&files.root(), b"gone").unwrap();
    pool.commit_changes().unwrap();
    let mut bytes = vec![0; usize::try_from(disk.length()).unwrap()];
    disk.read_at(&mut bytes, 0).unwrap();
    bytes
}

fn main() {
    let device = device();
    let at = |place: u64, length: usize| &device[usize::try_from(place).unwrap()..][..length];
    write("pool_label", "tank", trimmed(&at(label::IDENTITY_AT, 32 << 10)[24..]));
    for number in 0..6 {
        let record = at(label::RING_AT + number * 4096, 4096);
        if record.starts_with(b"nacreROO") {
            write("pool_root", &format!("root-{number}"), trimmed(&record[24..]));
        }
    }
    let (mut blocks, mut kinds, mut rows) = (0, Vec::new(), Vec::new());
    for place in (0..device.len() - 4096).step_by(16) {
        let bytes = &device[place..];
        if bytes.starts_with(b"nLog") && blocks < 3 {
            blocks += 1;
            let payload = u32::from_le_bytes(bytes[4..8].try_into().unwrap()) as usize;
            write("pool_log", &format!("block-{blocks}"), &bytes[48..48 + payload]);
            write("pool_log_area", &format!("block-{blocks}"), &[&[0, 1], &bytes[..48 + payload]].concat());
        }
        let Ok(header) = frame::Header::decode(bytes) else { continue };
        let pointer = header.pointer;
        let seen = kinds.iter().filter(|kind| **kind == pointer.kind).count();
        kinds.push(pointer.kind);
        let stored = &bytes[frame::LENGTH..][..pointer.stored as usize];
        let mut content = vec![0; pointer.logical as usize];
        assert!(compress::decompress(pointer.compression, stored, &mut content));
        if seen < 4 {
            let name = format!("{:?}-{seen}", pointer.kind).to_lowercase();
            write("pool_frame", &name, &bytes[8..frame::LENGTH]);
            if stored.len() < 3000 {
                write(
                    "pool_unpack",
                    &name,
                    &[
                        &[pointer.compression as u8],
                        &u16::try_from(content.len()).unwrap_or(u16::MAX).to_le_bytes()[..],
                        stored,
                    ]
                    .concat(),
                );
            }
            if pointer.kind == FrameKind::Table {
                let (kind, whole) = match content.first() {
                    Some(4) => (3, counted(&[&content, b""])),
                    Some(5) => (4, content.clone()),
                    Some(7) => (5, content.clone()),
                    _ => (3, counted(&[b"", &content])),
                };
                write("pool_segments", &name, &[&[kind], &whole[..]].concat());
            }
            if pointer.kind == FrameKind::Leaf && content.len() < 4000 {
                for what in [0, 2] {
                    write("pool_tree", &format!("{name}-{what}"), &[&[what, 9], &counted(&[&content])[..]].concat());
                }
            }
        }
        if pointer.kind == FrameKind::Leaf {
            let mut rest = &content[8..];
            while let [a, b, c, d, after @ ..] = rest {
                let (key, value) =
                    (usize::from(u16::from_le_bytes([*a, *b])), usize::from(u16::from_le_bytes([*c, *d])));
                rows.push((after[..key].to_vec(), after[key..key + value].to_vec()));
                rest = &after[key + value..];
            }
        }
    }
    write_rows(&rows);
    write_trees();
}

fn write_rows(rows: &[(Vec<u8>, Vec<u8>)]) {
    type Judge = fn(&[u8]) -> bool;
    let kinds: [Judge; 17] = [
        |bytes| Key::decode(bytes).is_ok(),
        |bytes| InodeRow::decode(bytes).is_ok(),
        |bytes| Entry::decode(bytes).is_ok(),
        |bytes| NameTarget::decode(bytes).is_ok(),
        |bytes| Extent::decode(bytes).is_ok(),
        |bytes| Xattr::decode(bytes).is_ok(),
        |bytes| Patch::decode(bytes).is_ok(),
        |bytes| OwnerUse::decode(bytes).is_ok(),
        |bytes| DatasetHead::decode(bytes).is_ok(),
        |bytes| PoolHead::decode(bytes).is_ok(),
        |bytes| DatasetRow::decode(bytes).is_ok(),
        |bytes| SnapshotRow::decode(bytes).is_ok(),
        |bytes| BookmarkRow::decode(bytes).is_ok(),
        |bytes| PropertyRow::decode(bytes).is_ok(),
        |bytes| SharedRow::decode(bytes).is_ok(),
        |bytes| DoomedRow::decode(bytes).is_ok(),
        |bytes| HistoryRow::decode(bytes).is_ok(),
    ];
    for (kind, is_one) in kinds.iter().enumerate() {
        let mut found: Vec<&Vec<u8>> =
            rows.iter().flat_map(|(key, value)| [key, value]).filter(|bytes| is_one(bytes)).collect();
        found.sort_by_key(|bytes| std::cmp::Reverse(bytes.len()));
        found.dedup();
        for (at, bytes) in found.iter().take(3).enumerate() {
            write("pool_rows", &format!("{kind:02}-{at}"), &[&[u8::try_from(kind).unwrap()], &bytes[..]].concat());
        }
    }
    write("pool_rows", "17-folded", &[&[17], "Stra\u{df}e \u{c5}ngstr\u{f6}m \u{1e9b}\u{323}".as_bytes()].concat());
    let dead: Vec<u8> = rows
        .iter()
        .map(|(_, value)| value)
        .find(|value| !value.is_empty() && nacre_pool::deadlist::decode_chunk(value).is_ok())
        .unwrap()
        .clone();
    write("pool_deadlist", "chunk", &dead);
}

/// Frames in the order in which they were written.
#[derive(Default)]
struct Written(Mutex<Vec<Arc<[u8]>>>);

impl Frames for Written {
    fn read(&self, pointer: &Pointer) -> Result<Arc<[u8]>, PoolError> {
        Ok(Arc::clone(&self.0.lock().unwrap()[pointer.index as usize]))
    }

    fn expect(&self, _: &[Pointer]) {}

    fn write(&self, frame: &NewFrame<'_>) -> Result<Pointer, PoolError> {
        let mut pages = self.0.lock().unwrap();
        pages.push(frame.content.into());
        Ok(Pointer {
            segment: 1,
            index: u32::try_from(pages.len() - 1).unwrap(),
            offset: 0,
            stored: 1,
            logical: 1,
            kind: frame.kind,
            compression: Compression::Off,
            checksum_kind: ChecksumKind::Xxh3,
            pin: 0,
            birth: frame.birth,
            checksum: [0; 16],
        })
    }
}

/// Trees of two and of three levels.
fn write_trees() {
    for rows in [12u8, 60] {
        let (frames, cache) = (Written::default(), Cache::new(1 << 20));
        let ctx = Context { frames: &frames, cache: &cache };
        let mut tree = Tree::empty(1, Settings::with_page(256));
        for row in 0..rows {
            tree.put(&ctx, Txg(1), &[row], &[row; 9]).unwrap();
        }
        let frozen = tree.freeze();
        frozen
            .write_out(&ctx, Form { txg: Txg(1), compression: CompressionSetting::Off, checksum: ChecksumKind::Xxh3 })
            .unwrap();
        let pages = frames.0.lock().unwrap();
        let pages: Vec<&[u8]> = pages.iter().map(|page| &page[..]).collect();
        for what in [1, 3] {
            write("pool_tree", &format!("rows-{rows}-{what}"), &[&[what, 9], &counted(&pages)[..]].concat());
        }
    }
}
