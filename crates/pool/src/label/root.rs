//! Root records (like ZFS' uberblocks): each names one complete committed state of the pool.
//!
//! Root numbers ("generations") increase by one with every record; a txg may have several, because the store also
//! commits moves of the cleaner by itself, with the engine's part unchanged.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::checksum;
use crate::codec::{Reader, Writer};
use crate::error::PoolError;
use crate::pointer::{Pointer, Txg};

use super::structure;

/// Length of a record, bytes.
pub(super) const LENGTH: usize = 4096;
/// Maximum length of the engine's own data in a root, bytes.
pub const UPPER_LIMIT: usize = 2048;
const MAGIC: [u8; 8] = *b"nacreROO";
/// Maximum value of counters: higher ones are never reached, and incrementing from here never overflows.
const COUNTER_MOST: u64 = 1 << 62;

/// Address of a slot, which holds a segment or a column of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotAddress {
    /// Number of the device.
    pub device: u16,
    /// Number of the slot on it.
    pub slot: u32,
}

/// Location of a segment: one slot for each of its columns, and none once its slots were freed. Without parity all
/// columns are copies of the segment; otherwise its rows are striped over the first columns, and the last ones hold
/// parity. Only the backend that made it interprets the numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Place {
    slots: Arc<[SlotAddress]>,
    parity: u8,
}

/// Maximum number of columns of a location: sets of them are bit masks.
pub const MOST_COLUMNS: usize = 64;

impl Place {
    /// A location with rows striped over these columns, of which the last `parity` ones hold parity.
    #[must_use]
    pub fn of_rows(columns: Vec<SlotAddress>, parity: u8) -> Self {
        Self { slots: columns.into(), parity }
    }

    /// Number of parity columns.
    #[must_use]
    pub fn parity(&self) -> usize {
        usize::from(self.parity)
    }

    /// Number of data columns; 1 where all columns are copies.
    #[must_use]
    pub fn width(&self) -> usize {
        if self.parity == 0 { 1 } else { self.slots.len().saturating_sub(self.parity()).max(1) }
    }

    /// Whether a segment can have this location: columns are on different devices, and there are more than parity
    /// columns. Two copies may be on one device.
    #[must_use]
    pub fn is_possible(&self) -> bool {
        let count = self.slots.len();
        let apart = |same: &dyn Fn(&SlotAddress, &SlotAddress) -> bool| {
            self.slots.iter().enumerate().all(|(at, slot)| !self.slots.iter().take(at).any(|other| same(slot, other)))
        };
        let rows = self.parity == 0 || (self.parity() <= crate::parity::MOST_PARITY && count > self.parity());
        let distinct = if self.parity == 0 && count == 2 {
            apart(&|slot, other| slot == other)
        } else {
            apart(&|slot, other| slot.device == other.device)
        };
        rows && count <= MOST_COLUMNS && distinct
    }
}

impl std::ops::Deref for Place {
    type Target = [SlotAddress];

    fn deref(&self) -> &[SlotAddress] {
        &self.slots
    }
}

impl From<Vec<SlotAddress>> for Place {
    fn from(slots: Vec<SlotAddress>) -> Self {
        Self { slots: slots.into(), parity: 0 }
    }
}

/// Position at which replay of the intent log begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogStart {
    /// Position of the first block in the log area, bytes.
    pub position: u64,
    /// Sequence number of the first block.
    pub sequence: u64,
    /// Chain value of the previous block, which only the log interprets.
    pub chain: u64,
}

/// A segment of the segment table itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableSegment {
    /// The segment's number.
    pub id: u32,
    /// The segment's location.
    pub place: Place,
    /// Number of frames in it.
    pub frames: u32,
    /// Written length, bytes.
    pub bytes: u32,
    /// The generation since which nothing in it is used; `None` while something is.
    pub dead_since: Option<u64>,
}

impl TableSegment {
    pub(crate) fn encode(&self, to: &mut Writer) {
        to.varint(u64::from(self.id));
        write_places(to, &self.place);
        to.varint(u64::from(self.frames));
        to.varint(u64::from(self.bytes));
        to.varint(self.dead_since.map_or(0, |generation| generation + 1));
    }

    pub(crate) fn decode(from: &mut Reader<'_>) -> Result<Self, PoolError> {
        let (id, place) = (small(from)?, read_places(from)?);
        let (frames, bytes) = (small(from)?, small(from)?);
        Ok(Self { id, place, frames, bytes, dead_since: from.varint()?.checked_sub(1) })
    }
}

/// One committed state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Root {
    /// GUID of the pool.
    pub pool: u64,
    /// Number of this record.
    pub generation: u64,
    /// The oldest generation whose frames still all exist.
    pub kept: u64,
    /// The last transaction group in it.
    pub txg: Txg,
    /// Time of the commit, seconds since 1970.
    pub time: u64,
    /// Whether the pool was closed cleanly with this root.
    pub clean: bool,
    /// Number of the next segment.
    pub next_segment: u32,
    /// The root of the engine's catalog tree (like ZFS' MOS).
    pub catalog: Option<Pointer>,
    /// The engine's own data, at most [`UPPER_LIMIT`] bytes.
    pub upper: Vec<u8>,
    /// Position at which replay of the log begins.
    pub log_start: LogStart,
    /// The log area: runs of slots.
    pub log: Vec<(SlotAddress, u32)>,
    /// The segments of the table. After [`Self::decode`] only those that differ from [`Self::table_list`]; a segment
    /// without a location does not belong to the table any more.
    pub table_segments: Vec<TableSegment>,
    /// Of earlier versions: the frame that lists the frames of the full copy of the table.
    pub table: Option<Pointer>,
    /// Changes of the table that its pages lack, oldest first.
    pub deltas: Vec<Pointer>,
    /// The top node of the table's pages, as its frames; empty without any page.
    pub table_top: Vec<Pointer>,
    /// Frames of the list of the table's segments, where they are too many for the record.
    pub table_list: Vec<Pointer>,
    /// Content of that list; not part of the record.
    pub listed: Arc<[TableSegment]>,
    /// Whether the record of the next generation is written in two rounds, to positions that all hold records: if no
    /// copy of it is readable then, it is damaged.
    pub guarded: bool,
}

impl Root {
    /// Encodes the record.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for a root that does not fit.
    pub fn encode(&self) -> Result<Vec<u8>, PoolError> {
        let mut body = Writer::default();
        for number in [self.pool, self.generation, self.kept, self.txg.0, self.time] {
            body.u64(number);
        }
        body.u8(u8::from(self.clean));
        body.u32(self.next_segment);
        for number in [self.log_start.position, self.log_start.sequence, self.log_start.chain] {
            body.u64(number);
        }
        optional(&mut body, self.catalog.as_ref());
        body.string(&self.upper);
        body.varint(self.log.len() as u64);
        for (place, count) in &self.log {
            write_place(&mut body, *place);
            body.varint(u64::from(*count));
        }
        let unlisted = self.unlisted();
        body.varint(unlisted.len() as u64);
        for segment in &unlisted {
            segment.encode(&mut body);
        }
        optional(&mut body, self.table.as_ref());
        body.varint(self.deltas.len() as u64);
        for delta in &self.deltas {
            delta.encode(&mut body);
        }
        body.u8(u8::from(self.guarded));
        for pointers in [&self.table_top, &self.table_list] {
            body.varint(pointers.len() as u64);
            pointers.iter().for_each(|pointer| pointer.encode(&mut body));
        }
        let mut body = body.finish();
        if body.len() > LENGTH - 24 || self.upper.len() > UPPER_LIMIT {
            return Err(PoolError::Refused("a root record would be longer than its place".to_owned()));
        }
        body.resize(LENGTH - 24, 0);
        let mut record = Writer::default();
        record.bytes(&MAGIC);
        record.bytes(&checksum::structure(&body));
        record.bytes(&body);
        Ok(record.finish())
    }

    /// Decodes a record.
    ///
    /// # Errors
    /// [`PoolError::Format`] for malformed bytes.
    pub fn decode(record: &[u8]) -> Result<Self, PoolError> {
        let mut from = Reader::new(record);
        if from.array()? != MAGIC {
            return structure("no root record");
        }
        let sum: [u8; 16] = from.array()?;
        let body = from.take(LENGTH - 24)?;
        if checksum::structure(body) != sum {
            return structure("the root record's checksum does not fit");
        }
        Self::decode_body(&mut Reader::new(body))
    }

    fn decode_body(from: &mut Reader<'_>) -> Result<Self, PoolError> {
        let (pool, generation, kept, txg, time) =
            (from.u64()?, from.u64()?, from.u64()?, Txg(from.u64()?), from.u64()?);
        let clean = match from.u8()? {
            0 => false,
            1 => true,
            _ => return structure("unknown flags of a root record"),
        };
        let next_segment = from.u32()?;
        let log_start = LogStart { position: from.u64()?, sequence: from.u64()?, chain: from.u64()? };
        if [generation, kept, txg.0, log_start.position, log_start.sequence]
            .iter()
            .any(|counter| *counter > COUNTER_MOST)
        {
            return structure("a counter that no pool comes to");
        }
        let catalog = read_optional(from)?;
        let upper = from.string()?.to_vec();
        let mut log = Vec::new();
        for _ in 0..from.varint()? {
            log.push((read_place(from)?, small(from)?));
        }
        let mut table_segments = Vec::new();
        for _ in 0..from.varint()? {
            table_segments.push(TableSegment::decode(from)?);
        }
        let table = read_optional(from)?;
        let mut deltas = Vec::new();
        for _ in 0..from.varint()? {
            deltas.push(Pointer::decode(from)?);
        }
        // Older versions wrote no such flag.
        let guarded = from.u8().is_ok_and(|guarded| guarded == 1);
        let mut pointers = || -> Result<Vec<Pointer>, PoolError> {
            let count = from.varint().unwrap_or(0);
            (0..count).map(|_| Pointer::decode(from)).collect()
        };
        let (table_top, table_list) = (pointers()?, pointers()?);
        Ok(Self {
            pool,
            generation,
            kept,
            txg,
            time,
            clean,
            next_segment,
            catalog,
            upper,
            log_start,
            log,
            table_segments,
            table,
            deltas,
            table_top,
            table_list,
            listed: Arc::default(),
            guarded,
        })
    }

    /// The table's segments that the record has to name itself: those that differ from the list, and those that hold
    /// the list.
    fn unlisted(&self) -> Vec<TableSegment> {
        let listed = |id: u32| {
            let at = self.listed.binary_search_by_key(&id, |segment| segment.id).ok()?;
            self.listed.get(at)
        };
        let holds_list = |id: u32| self.table_list.iter().any(|pointer| pointer.segment == id);
        let differs = |segment: &&TableSegment| holds_list(segment.id) || listed(segment.id) != Some(*segment);
        let mut unlisted: Vec<TableSegment> = self.table_segments.iter().filter(differs).cloned().collect();
        if !self.listed.is_empty() {
            let there: BTreeSet<u32> = self.table_segments.iter().map(|segment| segment.id).collect();
            let gone = self.listed.iter().filter(|segment| !there.contains(&segment.id));
            unlisted.extend(gone.map(|segment| TableSegment { place: Place::default(), ..segment.clone() }));
        }
        unlisted
    }

    /// Completes a decoded record with the content of the list of segments.
    pub fn complete(&mut self, listed: Vec<TableSegment>) {
        let mut all: BTreeMap<u32, TableSegment> =
            listed.iter().chain(&self.table_segments).map(|segment| (segment.id, segment.clone())).collect();
        all.retain(|_, segment| !segment.place.is_empty());
        self.table_segments = all.into_values().collect();
        self.listed = listed.into();
    }

    /// Finds a segment of the table.
    #[must_use]
    pub fn table_segment(&self, id: u32) -> Option<&TableSegment> {
        // Sorted by number; records of earlier versions may be in another order.
        let found = self.table_segments.binary_search_by_key(&id, |segment| segment.id).ok();
        let found = found.and_then(|at| self.table_segments.get(at));
        found.or_else(|| self.table_segments.iter().find(|segment| segment.id == id))
    }
}

fn optional(to: &mut Writer, pointer: Option<&Pointer>) {
    to.u8(u8::from(pointer.is_some()));
    if let Some(pointer) = pointer {
        pointer.encode(to);
    }
}

fn read_optional(from: &mut Reader<'_>) -> Result<Option<Pointer>, PoolError> {
    match from.u8()? {
        0 => Ok(None),
        1 => Pointer::decode(from).map(Some),
        _ => structure("neither a pointer nor none"),
    }
}

/// Decodes a number of at most 32 bits.
pub(crate) fn small(from: &mut Reader<'_>) -> Result<u32, PoolError> {
    from.varint()?.try_into().or_else(|_| structure("a number of more than 32 bits"))
}

pub(crate) fn write_place(to: &mut Writer, place: SlotAddress) {
    to.varint(u64::from(place.device));
    to.varint(u64::from(place.slot));
}

pub(crate) fn read_place(from: &mut Reader<'_>) -> Result<SlotAddress, PoolError> {
    let device = small(from)?.try_into().or_else(|_| structure("a device's number of more than 16 bits"))?;
    Ok(SlotAddress { device, slot: small(from)? })
}

/// Encodes the number of columns, plus 256 times the number of parity columns; then the columns.
pub(crate) fn write_places(to: &mut Writer, place: &Place) {
    to.varint(place.len() as u64 | u64::from(place.parity) << 8);
    for column in place.iter() {
        write_place(to, *column);
    }
}

pub(crate) fn read_places(from: &mut Reader<'_>) -> Result<Place, PoolError> {
    let head = from.varint()?;
    let parity = u8::try_from(head >> 8).or_else(|_| structure("more parity than there can be"))?;
    let mut slots = Vec::new();
    for _ in 0..head & 0xff {
        slots.push(read_place(from)?);
    }
    let place = Place { slots: slots.into(), parity };
    if place.is_possible() { Ok(place) } else { structure("a place that no segment can have") }
}
