//! Blocks of the intent log in a ring of preallocated space. An import replays it, [`super::Log`] appends to it.
//!
//! A block is a header of 48 bytes and its records, padded to 4 KiB. It names its pool, its sequence number and the
//! checksum of the previous block, so that a block of an earlier lap is never mistaken for the next one. Positions
//! only grow; the offset in the area is the position modulo its length.
//!
//! Invariants: a block is written and synced before the next is begun; a block that the last durable root may need is
//! not overwritten.

use std::collections::VecDeque;

use crate::codec::{Reader, Writer};
use crate::error::{Damage, PoolError};
use crate::pointer::Txg;

use super::record::LogRecord;
use super::{Blocks, Replayed, Start, Visit, show};

/// Alignment of blocks and of the area's length, bytes.
pub const BLOCK: u64 = 4096;

/// Length of the zeros that are written ahead of the newest block from time to time in the first lap, bytes: a sync
/// of a block in a hole of a file would also wait for the journal of the host file system.
const AHEAD: u64 = 1 << 20;

/// Length of a block's header, bytes.
pub const HEADER: usize = 48;

const MAGIC: u32 = u32::from_le_bytes(*b"nLog");

/// The space of a ring: offsets from 0 on.
pub trait Area: Send {
    /// Length of the area, bytes, a multiple of [`BLOCK`].
    fn length(&self) -> u64;

    /// Reads all of `into`.
    ///
    /// # Errors
    /// [`PoolError::Device`], as for all here.
    fn read_at(&self, into: &mut [u8], offset: u64) -> Result<(), PoolError>;

    /// Number of copies of the area. They may differ in unsynced blocks, and an unreadable copy may have been
    /// ignored.
    fn copies(&self) -> usize {
        1
    }

    /// Reads all of `into` from one of the copies.
    ///
    /// # Errors
    /// As [`Self::read_at`].
    fn read_copy(&self, copy: usize, into: &mut [u8], offset: u64) -> Result<(), PoolError> {
        let _ = copy;
        self.read_at(into, offset)
    }

    /// Writes all of `from` to all copies; it is durable after [`Self::sync`].
    ///
    /// # Errors
    /// As [`Self::read_at`].
    fn write_at(&self, from: &[u8], offset: u64) -> Result<(), PoolError>;

    /// Makes everything written durable.
    ///
    /// # Errors
    /// As [`Self::read_at`].
    fn sync(&self) -> Result<(), PoolError>;

    /// Whether written blocks would be found again. If not, also because of a write or sync just now, an fsync has to
    /// wait for a commit.
    fn is_open(&self) -> bool {
        true
    }
}

impl<A: Area + ?Sized> Area for Box<A> {
    fn length(&self) -> u64 {
        (**self).length()
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> Result<(), PoolError> {
        (**self).read_at(into, offset)
    }

    fn copies(&self) -> usize {
        (**self).copies()
    }

    fn read_copy(&self, copy: usize, into: &mut [u8], offset: u64) -> Result<(), PoolError> {
        (**self).read_copy(copy, into, offset)
    }

    fn write_at(&self, from: &[u8], offset: u64) -> Result<(), PoolError> {
        (**self).write_at(from, offset)
    }

    fn sync(&self) -> Result<(), PoolError> {
        (**self).sync()
    }

    fn is_open(&self) -> bool {
        (**self).is_open()
    }
}

impl Start {
    /// Length of an encoded start, bytes.
    pub const LENGTH: usize = 24;

    /// Encodes the start in 24 bytes.
    pub fn encode(&self, to: &mut Writer) {
        to.u64(self.position);
        to.u64(self.sequence);
        to.u64(self.chain);
    }

    /// Decodes a start from 24 bytes.
    ///
    /// # Errors
    /// [`PoolError::Format`] for malformed bytes.
    pub fn decode(from: &mut Reader<'_>) -> Result<Self, PoolError> {
        let start = Self { position: from.u64()?, sequence: from.u64()?, chain: from.u64()? };
        if start.position.is_multiple_of(BLOCK) { Ok(start) } else { Err(damaged("the start of the log")) }
    }
}

#[derive(Clone, Copy, Debug)]
struct Block {
    start: Start,
    txg: Txg,
}

/// The ring: the blocks in use, and the position of the next one.
#[derive(Debug)]
pub struct Ring<A: Area> {
    area: A,
    pool: u64,
    next: Start,
    blocks: VecDeque<Block>,
    /// Whether the position of the next block has the header of a torn one.
    torn: bool,
    /// End of the area that was written to since the ring was opened, as a position.
    ready: u64,
    /// Replayed blocks that some copy of the area lacks: position and bytes. They are written to all copies before
    /// the next block, whose header chains to the last of them.
    uneven: Vec<(u64, Vec<u8>)>,
}

impl<A: Area> Ring<A> {
    /// An empty ring at a start that was never used: position 0 for a new pool; after a rewind to an older root, a
    /// sequence number above all that the ring has seen.
    ///
    /// # Errors
    /// [`PoolError::Format`] for an area or a position that is not a multiple of [`BLOCK`].
    pub fn new(area: A, pool: u64, start: Start) -> Result<Self, PoolError> {
        if area.length() == 0 || !area.length().is_multiple_of(BLOCK) || !start.position.is_multiple_of(BLOCK) {
            return Err(damaged("the place of the log"));
        }
        Ok(Self {
            area,
            pool,
            next: start,
            blocks: VecDeque::new(),
            torn: false,
            ready: start.position,
            uneven: Vec::new(),
        })
    }

    /// Replays a ring from a start on ([`Blocks::replay`]).
    ///
    /// # Errors
    /// Errors of [`Self::new`] and of [`Blocks::replay`].
    pub fn replay(
        area: A,
        pool: u64,
        start: Start,
        committed: Txg,
        visit: &mut dyn FnMut(&LogRecord<'_>) -> Result<(), PoolError>,
    ) -> Result<(Self, Replayed), PoolError> {
        let mut ring = Self::new(area, pool, start)?;
        let replayed = Blocks::replay(&mut ring, start, committed, visit)?;
        Ok((ring, replayed))
    }

    /// Writes zeros after a block that ends here, unless the range was written before.
    fn make_ready(&mut self, end: u64) -> Result<(), PoolError> {
        // In the first lap nothing ahead is in use; in later ones it may be, and there are no holes any more.
        if end < self.ready || end >= self.area.length() {
            return Ok(());
        }
        let until = end.saturating_add(AHEAD).min(self.area.length());
        self.area
            .write_at(&vec![0; usize::try_from(until - end).map_err(|_| damaged("the length of the log"))?], end)?;
        self.ready = until;
        Ok(())
    }

    /// Writes the next block durably.
    fn write_block(&mut self, block: &[u8]) -> Result<(), PoolError> {
        self.wipe_torn()?;
        let length = block.len() as u64;
        for (piece, offset) in self.pieces(self.next.position, length) {
            self.area.write_at(block.get(piece).unwrap_or_default(), offset)?;
        }
        self.make_ready(self.next.position.wrapping_add(length))?;
        self.area.sync()
    }

    fn push(&mut self, txg: Txg, checksum: u64, length: u64) {
        // Replay and appends are in order, so a later block never has an earlier txg.
        let txg = self.blocks.back().map_or(txg, |block| block.txg.max(txg));
        self.blocks.push_back(Block { start: self.next, txg });
        self.next = Start {
            position: self.next.position.wrapping_add(length),
            sequence: self.next.sequence.wrapping_add(1),
            chain: checksum,
        };
    }

    /// Erases the header of a torn block before its position is rewritten: if the new block is torn as well, the two
    /// halves must not form a valid one.
    pub(super) fn wipe_torn(&mut self) -> Result<(), PoolError> {
        if !self.uneven.is_empty() {
            for (position, block) in &self.uneven {
                for (piece, offset) in self.pieces(*position, block.len() as u64) {
                    self.area.write_at(block.get(piece).unwrap_or_default(), offset)?;
                }
            }
            self.area.sync()?;
            self.uneven.clear();
        }
        if self.torn {
            self.area.write_at(&[0; BLOCK as usize], self.next.position % self.area.length())?;
            self.area.sync()?;
            self.torn = false;
        }
        Ok(())
    }

    /// Reads the next block, if it is undamaged in one of the copies.
    fn read_next(&mut self) -> Result<Option<(Header, Vec<u8>)>, PoolError> {
        let (mut found, mut lacking, mut read_any) = (None, false, false);
        for copy in 0..self.area.copies() {
            let read = match self.read_block(copy, self.next.position) {
                Err(PoolError::Device { .. }) if read_any || copy + 1 < self.area.copies() => continue,
                read => read?,
            };
            read_any = true;
            let next = read.filter(|(header, _)| {
                let next = header.sequence == self.next.sequence && header.previous == self.next.chain;
                next && header.block_length() <= self.area.length() - self.used()
            });
            lacking |= next.is_none();
            found = found.or(next);
        }
        if let Some((header, content)) = found.as_ref().filter(|_| lacking) {
            let mut block = content.clone();
            block.resize(usize::try_from(header.block_length()).map_err(|_| damaged("the length of a log block"))?, 0);
            self.uneven.push((self.next.position, block));
        }
        Ok(found)
    }

    /// Treats an unreadable copy as empty, as long as there are others.
    fn in_copy<T>(&self, read: Result<Option<T>, PoolError>) -> Result<Option<T>, PoolError> {
        match read {
            Err(PoolError::Device { .. }) if self.area.copies() > 1 => Ok(None),
            read => read,
        }
    }

    /// Reads an undamaged block at a position of a copy, without its padding.
    fn read_block(&self, copy: usize, position: u64) -> Result<Option<(Header, Vec<u8>)>, PoolError> {
        let Some(header) = self.head_at(copy, position)? else { return Ok(None) };
        let length = HEADER.saturating_add(header.payload as usize);
        let mut content = vec![0; length];
        for (piece, offset) in self.pieces(position, length as u64) {
            self.area.read_copy(copy, content.get_mut(piece).unwrap_or_default(), offset)?;
        }
        let unsigned = Header { checksum: 0, ..header };
        let mut checked = content.clone();
        checked.splice(..HEADER, unsigned.encode());
        Ok((xxhash_rust::xxh3::xxh3_64(&checked) == header.checksum).then_some((header, content)))
    }

    fn head_at(&self, copy: usize, position: u64) -> Result<Option<Header>, PoolError> {
        let mut first = [0; HEADER];
        self.area.read_copy(copy, &mut first, position % self.area.length())?;
        Ok(self.header(&first))
    }

    fn header(&self, bytes: &[u8]) -> Option<Header> {
        let header = Header::decode(bytes).ok()?;
        (header.pool == self.pool && header.block_length() <= self.area.length()).then_some(header)
    }

    /// Whether there is an undamaged block with a higher sequence number than the missing one. Blocks are synced one
    /// by one, so a crash leaves none.
    fn later_block(&self) -> Result<bool, PoolError> {
        for copy in 0..self.area.copies() {
            let later = self.later_block_in(copy).map(|later| later.then_some(()));
            if self.in_copy(later)?.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn later_block_in(&self, copy: usize) -> Result<bool, PoolError> {
        let mut buffer = vec![0; 1 << 20];
        let mut offset = 0;
        while offset < self.area.length() {
            let length = (self.area.length() - offset).min(buffer.len() as u64);
            let part = buffer.get_mut(..length as usize).unwrap_or_default();
            self.area.read_copy(copy, part, offset)?;
            for (number, block) in part.chunks(BLOCK as usize).enumerate() {
                let later = self.header(block).is_some_and(|header| header.sequence > self.next.sequence);
                if later && self.read_block(copy, offset + number as u64 * BLOCK)?.is_some() {
                    return Ok(true);
                }
            }
            offset += length;
        }
        Ok(false)
    }

    /// Splits a range of positions into pieces of the area: two where it wraps around.
    fn pieces(&self, position: u64, length: u64) -> impl Iterator<Item = (std::ops::Range<usize>, u64)> + use<A> {
        let offset = position % self.area.length();
        let first = length.min(self.area.length() - offset);
        let (split, end) = (first as usize, length as usize);
        [(0..split, offset), (split..end, 0)].into_iter().filter(|(piece, _)| !piece.is_empty())
    }
}

impl<A: Area> Blocks for Ring<A> {
    fn begin(&mut self, start: Start) -> Result<(), PoolError> {
        if !start.position.is_multiple_of(BLOCK) {
            return Err(damaged("the place of the log"));
        }
        (self.next, self.ready, self.torn) = (start, start.position, false);
        self.blocks.clear();
        self.uneven.clear();
        Ok(())
    }

    fn replay(&mut self, start: Start, committed: Txg, visit: &mut Visit<'_>) -> Result<Replayed, PoolError> {
        self.begin(start)?;
        let mut replayed = Replayed::default();
        while let Some((header, content)) = self.read_next()? {
            replayed.records += show(content.get(HEADER..).unwrap_or_default(), committed, visit)?;
            replayed.blocks += 1;
            self.push(header.txg, header.checksum, header.block_length());
        }
        self.torn = false;
        for copy in 0..self.area.copies() {
            let head = self.in_copy(self.head_at(copy, self.next.position))?;
            self.torn |= head.is_some_and(|header| header.sequence == self.next.sequence);
        }
        replayed.lost = self.later_block()?.then_some(self.next.sequence);
        Ok(replayed)
    }

    fn append(&mut self, txg: Txg, records: &[u8]) -> Result<bool, PoolError> {
        let Ok(payload) = u32::try_from(records.len()) else { return Ok(false) };
        let mut header = Header {
            payload,
            pool: self.pool,
            sequence: self.next.sequence,
            txg,
            previous: self.next.chain,
            checksum: 0,
        };
        let length = header.block_length();
        if length > self.area.length() - self.used() || !self.area.is_open() {
            return Ok(false);
        }
        let mut block = header.encode();
        block.extend_from_slice(records);
        header.checksum = xxhash_rust::xxh3::xxh3_64(&block);
        block.splice(..HEADER, header.encode());
        block.resize(usize::try_from(length).map_err(|_| damaged("the length of a log block"))?, 0);
        let written = self.write_block(&block);
        if !self.area.is_open() {
            return Ok(false);
        }
        written?;
        self.push(txg, header.checksum, length);
        Ok(true)
    }

    fn settle(&mut self, txg: Txg) {
        self.blocks.iter_mut().for_each(|block| block.txg = txg);
    }

    fn start_after(&self, txg: Txg) -> Start {
        self.blocks.iter().find(|block| block.txg > txg).map_or(self.next, |block| block.start)
    }

    fn forget(&mut self, _txg: Txg, start: Start) {
        while self.blocks.front().is_some_and(|block| block.start.sequence < start.sequence) {
            self.blocks.pop_front();
        }
    }

    fn used(&self) -> u64 {
        self.blocks.front().map_or(0, |block| self.next.position.wrapping_sub(block.start.position))
    }

    fn length(&self) -> u64 {
        self.area.length()
    }
}

/// The highest sequence number of all blocks of the pool in the area, damaged or not; 0 without any. A ring that
/// begins above it never accepts one of them.
///
/// # Errors
/// [`PoolError::Device`].
pub fn newest_sequence(area: &dyn Area, pool: u64) -> Result<u64, PoolError> {
    let (mut newest, mut failed) = (None, None);
    for copy in 0..area.copies() {
        match newest_of_copy(area, copy, pool) {
            Ok(found) => newest = newest.max(Some(found)),
            Err(error) => failed = Some(error),
        }
    }
    newest.ok_or(failed.unwrap_or_else(|| damaged("the place of the log")))
}

fn newest_of_copy(area: &dyn Area, copy: usize, pool: u64) -> Result<u64, PoolError> {
    let (mut newest, mut offset) = (0, 0);
    let mut buffer = vec![0; 1 << 20];
    while offset < area.length() {
        let length = (area.length() - offset).min(buffer.len() as u64);
        let part = buffer.get_mut(..length as usize).unwrap_or_default();
        area.read_copy(copy, part, offset)?;
        let headers = part.chunks(BLOCK as usize).filter_map(|block| Header::decode(block).ok());
        newest = headers.filter(|header| header.pool == pool).map(|header| header.sequence).fold(newest, u64::max);
        offset += length;
    }
    Ok(newest)
}

#[derive(Clone, Copy, Debug)]
struct Header {
    payload: u32,
    pool: u64,
    sequence: u64,
    txg: Txg,
    previous: u64,
    checksum: u64,
}

impl Header {
    fn block_length(&self) -> u64 {
        (HEADER as u64 + u64::from(self.payload)).next_multiple_of(BLOCK)
    }

    fn encode(&self) -> Vec<u8> {
        let mut to = Writer::default();
        to.u32(MAGIC);
        to.u32(self.payload);
        to.u64(self.pool);
        to.u64(self.sequence);
        to.u64(self.txg.0);
        to.u64(self.previous);
        to.u64(self.checksum);
        to.finish()
    }

    fn decode(bytes: &[u8]) -> Result<Self, PoolError> {
        let mut from = Reader::new(bytes);
        if from.u32()? != MAGIC {
            return Err(damaged("no block of the log"));
        }
        Ok(Self {
            payload: from.u32()?,
            pool: from.u64()?,
            sequence: from.u64()?,
            txg: Txg(from.u64()?),
            previous: from.u64()?,
            checksum: from.u64()?,
        })
    }
}

fn damaged(what: &'static str) -> PoolError {
    PoolError::Format(Damage::Structure(what))
}
