//! Decoders of a pool's on-disk data, from the bottom up: labels, root records, frames, the segment
//! table, the intent log, rows. And the parsers of names and values of the command line. Byte
//! tables: `docs/pool-format.md`.

use std::io;
use std::sync::Mutex;

use nacre_pool::catalog::rows::{DoomedRow, SharedRow};
use nacre_pool::catalog::{BookmarkRow, DatasetRow, HistoryRow, PoolHead, PropertyRow, SnapshotRow};
use nacre_pool::codec::Reader;
use nacre_pool::deadlist::decode_chunk;
use nacre_pool::device::Device;
use nacre_pool::frame;
use nacre_pool::label::{self, Root};
use nacre_pool::log::{Area, Blocks, Ring, Start, ring};
use nacre_pool::names::{Name, SnapshotSelection, check_new_pool};
use nacre_pool::properties::{DATASET_PROPERTIES, OwnerProperty, POOL_PROPERTIES};
use nacre_pool::rows::folding::Normal;
use nacre_pool::rows::{DatasetHead, Entry, Extent, Folding, InodeRow, Key, NameTarget, OwnerUse, Patch, Xattr};
use nacre_pool::segment::pages::{ReadTable, TableReader, read_list, read_node, write_delta, write_page};
use nacre_pool::segment::table::SegmentTable;
use nacre_pool::segment::table_log::{read_full, read_index, replay_delta};
use nacre_pool::send_stream::{Record, ResumeToken, StreamReader, StreamWriter, record};
use nacre_pool::{Compression, PoolError, Txg, checksum, compress};

/// Lengths of the records of a label, bytes.
const IDENTITY: usize = 32 << 10;
const ROOT: usize = 4096;

/// Returns a record of a label: magic, checksum, and the body, padded to the length.
fn sealed(magic: &[u8; 8], body: &[u8], length: usize) -> Vec<u8> {
    let mut body = body.to_vec();
    body.resize(length - 24, 0);
    [&magic[..], &checksum::structure(&body), &body].concat()
}

/// A device whose labels are all equal.
struct Labelled(Vec<u8>);

impl Device for Labelled {
    fn name(&self) -> &str {
        "labelled"
    }

    fn length(&self) -> u64 {
        2 * label::ENDS
    }

    fn read_at(&self, buffer: &mut [u8], _: u64) -> io::Result<()> {
        buffer.iter_mut().zip(&self.0).for_each(|(to, from)| *to = *from);
        Ok(())
    }

    fn write_at(&self, _: &[u8], _: u64) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn discard(&self, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn expect(&self, _: u64, _: u64) {}
}

/// Decodes the body of an identity in a label.
pub fn pool_label(data: &[u8]) {
    if let Ok(Some(identity)) = label::probe(&Labelled(sealed(b"nacrePOO", data, IDENTITY))) {
        let _ = identity.check();
    }
}

/// Decodes the body of a root record (like an uberblock), and encodes it again.
pub fn pool_root(data: &[u8]) {
    let Ok(root) = Root::decode(&sealed(b"nacreROO", data, ROOT)) else { return };
    if let Ok(record) = root.encode() {
        assert!(Root::decode(&record).is_ok_and(|read| read == root), "{root:?}");
    }
}

/// Decodes the body of a frame's header, and encodes it again.
pub fn pool_frame(data: &[u8]) {
    let mut body = data.to_vec();
    body.resize(frame::LENGTH - 8, 0);
    let bytes = [&frame::MAGIC[..], &crc32c::crc32c(&body).to_le_bytes(), &body].concat();
    if let Ok(header) = frame::Header::decode(&bytes) {
        assert_eq!(header.encode(), bytes);
        let _ = header.pointer.charged();
    }
}

/// Decompresses the stored bytes of a frame, which follow its compression and content length.
pub fn pool_unpack(data: &[u8]) {
    let Some((&[kind, low, high], stored)) = data.split_first_chunk::<3>() else { return };
    let mut content = vec![0; usize::from(u16::from_le_bytes([low, high]))];
    let kind = match kind % 3 {
        0 => Compression::Off,
        1 => Compression::Lz4,
        _ => Compression::Zstd,
    };
    // Whether the content is right is decided by its checksum.
    let _ = compress::decompress(kind, stored, &mut content);
}

/// Decodes the segment table: a page and the changes after it, a node above pages, or the list of
/// its segments; in the form of earlier versions: a full copy, an index of its pieces, or a full
/// copy and changes after it.
pub fn pool_segments(data: &[u8]) {
    let Some((&kind, bytes)) = data.split_first() else { return };
    match kind % 6 {
        0 => {
            let _ = read_full(bytes);
        }
        1 => {
            let _ = read_index(bytes);
        }
        2 => {
            let mut pieces = Pieces(bytes);
            let full = pieces.next().unwrap_or_default();
            let mut table = read_full(full).map_or_else(|_| SegmentTable::default(), |(table, _)| table);
            for delta in pieces {
                // A table with an invalid delta is not used any further.
                if replay_delta(delta, &mut table).is_err() {
                    return;
                }
                let _ = (table.releasable(u64::MAX), table.live_bytes());
            }
        }
        3 => {
            let mut pieces = Pieces(bytes);
            let (page, delta) = (pieces.next().unwrap_or_default(), pieces.next().unwrap_or_default());
            if let Ok(read) = read_table(page, delta) {
                again(&read);
            }
        }
        4 => {
            let _ = read_node(bytes, (1, 0));
        }
        _ => {
            let _ = read_list(bytes);
        }
    }
}

/// Pieces, each after its length of 16 bits.
struct Pieces<'a>(&'a [u8]);

impl<'a> Iterator for Pieces<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let (length, rest) = self.0.split_first_chunk::<2>()?;
        let (piece, rest) = rest.split_at_checked(usize::from(u16::from_le_bytes(*length)))?;
        self.0 = rest;
        Some(piece)
    }
}

fn read_table(page: &[u8], delta: &[u8]) -> Result<ReadTable, PoolError> {
    let mut reader = TableReader::default();
    if !page.is_empty() {
        reader.page(page, 0)?;
    }
    reader.delta(delta)?;
    reader.finish()
}

/// Encodes a decoded table, and checks that it is decoded as the same.
fn again(read: &ReadTable) {
    let mut reader = TableReader::default();
    let pages = read.table.pages().into_iter().try_for_each(|page| reader.page(&write_page(&read.table, page), page));
    let delta = write_delta(7, read.table.next(), &[], &[]);
    let same = pages.and_then(|()| reader.delta(&delta)).and_then(|()| reader.finish());
    assert!(same.is_ok_and(|same| same.table.segments() == read.table.segments()), "{:?}", read.table);
}

/// A log's area in memory.
struct Space(Mutex<Vec<u8>>);

impl Space {
    fn with<R>(&self, offset: u64, length: usize, then: impl FnOnce(&mut [u8]) -> R) -> Result<R, PoolError> {
        let outside = || PoolError::Refused("outside the area".to_owned());
        let mut bytes = self.0.lock().map_err(|_| outside())?;
        let start = usize::try_from(offset).map_err(|_| outside())?;
        let end = start.checked_add(length).ok_or_else(outside)?;
        bytes.get_mut(start..end).map(then).ok_or_else(outside)
    }
}

impl Area for Space {
    fn length(&self) -> u64 {
        self.0.lock().map_or(0, |bytes| bytes.len() as u64)
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> Result<(), PoolError> {
        self.with(offset, into.len(), |bytes| into.copy_from_slice(bytes))
    }

    fn write_at(&self, from: &[u8], offset: u64) -> Result<(), PoolError> {
        self.with(offset, from.len(), |bytes| bytes.copy_from_slice(from))
    }

    fn sync(&self) -> Result<(), PoolError> {
        Ok(())
    }
}

/// Reads the records of a block of the log.
pub fn pool_log(data: &[u8]) {
    let bytes = vec![0; data.len().next_multiple_of(4096) + 2 * 4096];
    let Ok(mut ring) = Ring::new(Space(Mutex::new(bytes)), 7, Start::default()) else { return };
    assert!(ring.append(Txg(1), data).is_ok_and(|fits| fits), "there is room");
    let mut from = Reader::new(data);
    while !from.is_empty() {
        let Ok(record) = nacre_pool::log::LogRecord::decode(&mut from) else { return };
        for change in &record.changes {
            if let nacre_pool::log::LogChange::Put { key, .. } | nacre_pool::log::LogChange::Delete { key } = change {
                let _ = Key::decode(key);
            }
        }
        let bytes = record.encoded();
        assert!(
            nacre_pool::log::LogRecord::decode(&mut Reader::new(&bytes)).is_ok_and(|read| read == record),
            "{record:?}"
        );
    }
}

/// Reads a log's area: a start, and blocks whose checksums are made to fit, each after its length.
pub fn pool_log_area(data: &[u8]) {
    let Some((&[position, blocks], data)) = data.split_first_chunk::<2>() else { return };
    let mut bytes = data.to_vec();
    bytes.resize((usize::from(blocks % 8) + 1) * 4096, 0);
    for block in bytes.chunks_mut(4096) {
        let payload = block.get(4..8).and_then(|bytes| bytes.try_into().ok()).map_or(0, u32::from_le_bytes) as usize;
        let whole = ring::HEADER.saturating_add(payload).min(4096);
        if let Some(place) = block.get_mut(..8) {
            place.copy_from_slice(
                &[&b"nLog"[..], &u32::try_from(whole.saturating_sub(ring::HEADER)).unwrap_or(0).to_le_bytes()].concat(),
            );
        }
        if let Some(place) = block.get_mut(40..48) {
            place.fill(0);
        }
        let sum = block.get(..whole).map_or(0, xxhash);
        if let Some(place) = block.get_mut(40..48) {
            place.copy_from_slice(&sum.to_le_bytes());
        }
    }
    let start = Start { position: u64::from(position) * 4096, sequence: 0, chain: 0 };
    let mut seen = 0u64;
    let replayed = Ring::replay(Space(Mutex::new(bytes)), 7, start, Txg(0), &mut |_| {
        seen += 1;
        Ok(())
    });
    if let Ok((_, replayed)) = replayed {
        assert_eq!(replayed.records, seen);
    }
}

fn xxhash(bytes: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(bytes)
}

/// Decodes a list of dead frames.
pub fn pool_deadlist(data: &[u8]) {
    let _ = decode_chunk(data);
}

/// Checks that a decoded row is encoded to bytes which are decoded as the same row.
macro_rules! same {
    ($row:ty, $bytes:expr) => {
        if let Ok(row) = <$row>::decode($bytes) {
            let bytes = row.encode();
            assert!(<$row>::decode(&bytes).is_ok_and(|read| read == row), "{row:?}");
        }
    };
}

/// Decodes keys and rows of file systems and of the catalog (like ZFS' MOS); the first byte selects the type.
pub fn pool_rows(data: &[u8]) {
    let Some((&kind, bytes)) = data.split_first() else { return };
    match kind % 18 {
        0 => same!(Key, bytes),
        1 => same!(InodeRow, bytes),
        2 => same!(Entry<'_>, bytes),
        3 => same!(NameTarget, bytes),
        4 => same!(Extent<'_>, bytes),
        5 => same!(Xattr<'_>, bytes),
        6 => same!(Patch, bytes),
        7 => same!(OwnerUse, bytes),
        8 => same!(DatasetHead, bytes),
        9 => same!(PoolHead, bytes),
        10 => same!(DatasetRow, bytes),
        11 => same!(SnapshotRow, bytes),
        12 => same!(BookmarkRow, bytes),
        13 => same!(PropertyRow, bytes),
        14 => same!(SharedRow, bytes),
        15 => same!(DoomedRow, bytes),
        16 => same!(HistoryRow, bytes),
        _ => folded(bytes),
    }
}

fn folded(name: &[u8]) {
    for (sensitivity, normalization) in [("sensitive", "formC"), ("insensitive", "none"), ("insensitive", "formKD")] {
        let folding = Folding::of_properties(sensitivity, normalization);
        let once = folding.fold(name).into_owned();
        assert!(folding.normal == Normal::None || folding.same(name, &once), "a name is not the same as it is folded");
        assert_eq!(folding.fold(&once), once, "what is folded is folded on");
    }
}

/// Parses names of file systems, snapshots and bookmarks, and selections of them.
pub fn pool_names(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Ok(name) = Name::parse(text) {
        assert!(text.starts_with(name.pool()));
    }
    let _ = check_new_pool(text);
    let _ = nacre_pool::names::split_parent(text);
    if let Ok(selection) = SnapshotSelection::parse(text) {
        let there = ["a", "b", "c"];
        if let Ok(selected) = selection.select(&there) {
            assert!(selected.iter().all(|at| *at < there.len()));
        }
    }
}

/// Parses `name=value` of properties: a parsed value is canonical.
pub fn pool_properties(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let (name, value) = text.split_once('=').unwrap_or((text, ""));
    if let Ok(Some(owner)) = OwnerProperty::parse(name) {
        let _ = owner.parse_value(value);
    }
    let _ = nacre_pool::properties::dataset_property(name);
    let _ = nacre_pool::properties::pool_property(name);
    for definition in DATASET_PROPERTIES.iter().chain(POOL_PROPERTIES).filter(|definition| definition.name == name) {
        for creating in [false, true] {
            if let Ok(canonical) = definition.parse(value, creating) {
                let again = definition.parse(&canonical, creating);
                assert!(again.is_ok_and(|again| again == canonical), "{name}={value} is kept as {canonical}");
                let _ = definition.human(&canonical);
            }
        }
    }
}

/// Reads a send stream: the bytes are payloads of records, each after its kind and its length, and a resume token.
pub fn send_stream(data: &[u8]) {
    let mut stream = Vec::new();
    let mut sink = |some: &[u8]| {
        stream.extend_from_slice(some);
        Ok(())
    };
    let Ok(mut writer) = StreamWriter::begin(&mut sink) else { return };
    let mut rest = data;
    let mut sent = Vec::new();
    while let Some(([kind, length], more)) = rest.split_first_chunk::<2>() {
        let (payload, more) = more.split_at(more.len().min(usize::from(*length)));
        rest = more;
        if let Ok(record) = Record::decode(*kind, payload.to_vec())
            && writer.record(&record).is_ok()
        {
            sent.push(record);
        }
    }
    let begun = StreamReader::begin(stream.as_slice());
    assert!(begun.is_ok(), "a stream that begins is none");
    let Ok(mut reader) = begun else { return };
    for record in sent {
        if let Record::Rows(payload) = &record {
            // Any bytes are rows or give an error.
            drop(record::rows(payload));
        }
        assert_eq!(reader.next().ok().map(|received| received.record), Some(record));
    }
    assert!(reader.next().is_err());
    // The same bytes as a raw stream, without a writer.
    if let Ok(mut reader) = StreamReader::begin(data) {
        while reader.next().is_ok() {}
    }
    if let Ok(token) = ResumeToken::decode(data) {
        assert_eq!(ResumeToken::parse(&token.text()).ok(), Some(token));
    }
    if let Ok(text) = std::str::from_utf8(data) {
        drop(ResumeToken::parse(text));
    }
}
