//! Intent log as objects: one for each block, `log/EPOCH/SEQUENCE`.
//!
//! Callers: [`Objects`](super::Objects), by [`Logs`], which also has the local log ([`LocalLog`]) and chooses between
//! the two. A writer's blocks are in its own epoch. A writer that takes the pool over reads the blocks of the
//! previous epoch, and puts a *seal* under the name of the next block there: it names the new epoch, where the log
//! continues. From then on the previous writer is fenced from appending, and everything that it has acknowledged as
//! durable was read.
//!
//! Invariants:
//! - Log objects are only created, never replaced. A block that collides with a seal belongs to a writer that
//!   has lost the pool.
//! - After reading another writer's log, the reader checks that there is no newer root: missing blocks may have
//!   been deleted by a writer that has replayed them before and has put a root.
//! - Blocks are deleted when a durable root names a later start, and only those that this writer has read or
//!   written. A missing block before a later one is therefore damage, which an import reports. So is a block that
//!   builds on a newer root than the existing one: its records may depend on that root.
//! - Blocks of a crashed writer are deleted with the last root whose log begins in their epoch, a day after it;
//!   seals stay much longer (`sweeping.rs`). A writer that was stopped for that long may find a name free then;
//!   so a writer that has put no root for an hour, by either clock of its machine, checks that there is no newer
//!   one, before and after it puts a block.
//! - Whether the block of a failed request exists is unknown, and it may appear late. So its name is skipped, and
//!   nothing is put after it before a durable root names a later start: replay never meets it, and misses nothing.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::bucket::Bucket;
use super::local_log::LocalLog;
use super::root_body::read_whole;
use super::{State, WriterId, attempt, in_parallel, make, newest_keys, root_key};
use crate::checksum;
use crate::codec::{Reader, Writer};
use crate::error::{Damage, PoolError};
use crate::log::{Blocks, LogRecord, Removal, Replayed, Start, Visit, show};
use crate::pointer::Txg;

/// Bytes in use above which a commit is due.
const LENGTH: u64 = 64 << 20;
/// Lengths of the header and of the checksum of a block, bytes.
const HEAD: usize = 17;
const SUM: usize = 8;
/// A block of an older version, which does not record the txg that it builds on.
const UNBASED_BLOCK: u8 = 1;
const SEAL: u8 = 2;
const BLOCK: u8 = 3;

/// Whether a log object that begins with this byte is a block.
pub(super) fn is_block(kind: u8) -> bool {
    matches!(kind, BLOCK | UNBASED_BLOCK)
}

/// Log of one import in the bucket.
pub(super) struct ObjectLog {
    bucket: Arc<dyn Bucket>,
    writer: Arc<WriterId>,
    /// Has the epoch of this writer, and when it was last known to own the pool.
    state: Arc<Mutex<State>>,
    /// Generation of the newest root of this writer.
    root: Arc<AtomicU64>,
    next: Start,
    blocks: VecDeque<Block>,
    /// Names that were skipped, and may hold a block or another writer's seal.
    skipped: Vec<Start>,
    /// Names of freed blocks that are not deleted yet.
    doomed: Arc<Mutex<Vec<String>>>,
}

struct Block {
    start: Start,
    txg: Txg,
    length: u64,
}

/// A log object.
enum Found {
    /// Builds on the state after the txg `base`.
    Block {
        txg: Txg,
        base: Txg,
        chain: u64,
        records: Vec<u8>,
        length: u64,
    },
    Seal {
        epoch: u64,
    },
}

fn damaged() -> PoolError {
    PoolError::Format(Damage::Structure("a damaged block of the log"))
}

fn key(Start { position, sequence, .. }: Start) -> String {
    format!("log/{position}/{sequence:020}")
}

/// Checksum at the end of an object, over its content and the checksum of the previous block.
fn sum(body: &[u8], chain: u64) -> u64 {
    let mut whole = chain.to_le_bytes().to_vec();
    whole.extend(body);
    let [a, b, c, d, e, f, g, h, ..] = checksum::structure(&whole);
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}

impl ObjectLog {
    pub(super) fn new(
        bucket: Arc<dyn Bucket>,
        writer: Arc<WriterId>,
        state: Arc<Mutex<State>>,
        root: Arc<AtomicU64>,
    ) -> Self {
        Self {
            bucket,
            writer,
            state,
            root,
            next: Start::default(),
            blocks: VecDeque::new(),
            skipped: Vec::new(),
            doomed: Arc::default(),
        }
    }

    /// The epoch that this writer has claimed.
    fn epoch(&self) -> u64 {
        u64::from(self.state.lock().epoch)
    }

    /// Seals a log without reading its content.
    pub(super) fn end(&mut self, start: Start) -> Result<(), PoolError> {
        self.next = start;
        let own = self.epoch();
        while self.next.position != own {
            let name = key(self.next);
            let found = attempt(&*self.bucket, "reading the log in", || self.bucket.get(&name, None))?;
            match found.as_deref().map(<[u8]>::split_first) {
                Some(Some((&SEAL, body))) => {
                    let epoch = Reader::new(body).u64()?;
                    if epoch <= self.next.position {
                        return Err(damaged());
                    }
                    if epoch > own {
                        return Err(fenced());
                    }
                    self.next = Start { position: epoch, sequence: 0, chain: 0 };
                }
                Some(_) => self.next.sequence = self.next.sequence.wrapping_add(1),
                None => {
                    if self.seal()? {
                        return Ok(());
                    }
                }
            }
        }
        Ok(())
    }

    /// Fails if another writer has put a root, where this one has put none for long.
    fn assert_own(&self) -> Result<(), PoolError> {
        let now = self.writer.moment();
        let is_known = self.state.lock().last.is_none_or(|(_, when)| !when.is_long_before(now));
        if is_known {
            return Ok(());
        }
        if self.is_taken()? {
            return Err(fenced());
        }
        if let Some((_, when)) = &mut self.state.lock().last {
            (when.time, when.uptime) = (when.time.max(now.time), when.uptime.max(now.uptime));
        }
        Ok(())
    }

    fn find(&self, start: Start) -> Result<Option<Found>, PoolError> {
        let name = key(start);
        read_whole(&*self.bucket, "reading the log in", &name, |object| Self::decode(object, start))?.transpose()
    }

    fn decode(object: &[u8], start: Start) -> Result<Found, PoolError> {
        let (body, found) = object.split_last_chunk().ok_or_else(damaged)?;
        let chain = sum(body, start.chain);
        if chain != u64::from_le_bytes(*found) {
            return Err(damaged());
        }
        let mut from = Reader::new(body);
        Ok(match from.u8()? {
            kind if is_block(kind) => {
                let txg = Txg(from.u64()?);
                let base = Txg(if kind == BLOCK { from.u64()? } else { 0 });
                let records = from.rest().to_vec();
                Found::Block { txg, base, chain, records, length: object.len() as u64 }
            }
            SEAL => Found::Seal { epoch: from.u64()? },
            _ => return Err(damaged()),
        })
    }

    /// Creates an object under the name of the next block; returns its checksum, or `None` where another object
    /// exists.
    fn put(&self, mut body: Vec<u8>) -> Result<Option<u64>, PoolError> {
        let sum = sum(&body, self.next.chain);
        body.extend(sum.to_le_bytes());
        Ok(make(&*self.bucket, &key(self.next), &body)?.then_some(sum))
    }

    /// Seals the previous writer's log; returns `false` where it has appended meanwhile.
    fn seal(&self) -> Result<bool, PoolError> {
        let mut to = Writer::default();
        to.u8(SEAL);
        to.u64(self.epoch());
        // Distinguishes this writer's own seal, after a lost reply, from another one's.
        to.u64(self.writer.nonce);
        Ok(self.put(to.finish())?.is_some())
    }

    /// The sequence number of the seal that ends an epoch's log, where blocks come after it: blocks are appended one
    /// by one, so that a block before them is lost.
    fn gap(&self) -> Result<Option<u64>, PoolError> {
        let epoch = format!("log/{}/", self.next.position);
        let later = newest_keys(&*self.bucket, &epoch, &key(self.next))?;
        Ok((!later.is_empty()).then_some(self.next.sequence))
    }

    /// Whether another writer has put a root after this one's. Its name is requested as well, because a list may be
    /// outdated.
    fn is_taken(&self) -> Result<bool, PoolError> {
        let (bucket, own) = (&*self.bucket, self.root.load(Ordering::Acquire));
        let next = root_key(own.saturating_add(1));
        Ok(attempt(bucket, "reading", || bucket.get(&next, None))?.is_some()
            || !newest_keys(bucket, "roots/", &root_key(own))?.is_empty())
    }

    fn push(&mut self, txg: Txg, length: u64, chain: u64) {
        let txg = self.blocks.back().map_or(txg, |block| block.txg.max(txg));
        self.blocks.push_back(Block { start: self.next, txg, length });
        self.next = Start { sequence: self.next.sequence.wrapping_add(1), chain, ..self.next };
    }
}

impl Blocks for ObjectLog {
    fn begin(&mut self, _start: Start) -> Result<(), PoolError> {
        // No writer has used this epoch.
        self.next = Start { position: self.epoch(), sequence: 0, chain: 0 };
        self.blocks.clear();
        Ok(())
    }

    fn replay(&mut self, start: Start, committed: Txg, visit: &mut Visit<'_>) -> Result<Replayed, PoolError> {
        self.blocks.clear();
        self.next = start;
        let mut replayed = Replayed::default();
        let own = self.epoch();
        while self.next.position != own {
            match self.find(self.next)? {
                // The root that it builds on no longer exists, and the same holds for all later blocks.
                Some(Found::Block { base, chain, .. }) if base > committed => {
                    replayed.lost = replayed.lost.or(Some(self.next.sequence));
                    self.next = Start { sequence: self.next.sequence.wrapping_add(1), chain, ..self.next };
                }
                Some(Found::Block { txg, chain, records, length, .. }) => {
                    replayed.records += show(&records, committed, visit)?;
                    replayed.blocks += 1;
                    self.push(txg, length, chain);
                }
                Some(Found::Seal { epoch }) if epoch > self.next.position && epoch <= own => {
                    replayed.lost = replayed.lost.or(self.gap()?);
                    self.next = Start { position: epoch, sequence: 0, chain: 0 };
                }
                Some(Found::Seal { .. }) => return Err(fenced()),
                None => {
                    if self.seal()? {
                        replayed.lost = replayed.lost.or(self.gap()?);
                        self.next = Start { position: own, sequence: 0, chain: 0 };
                    }
                }
            }
        }
        if start.position != own && self.is_taken()? {
            return Err(fenced());
        }
        Ok(replayed)
    }

    fn append(&mut self, txg: Txg, records: &[u8]) -> Result<bool, PoolError> {
        let length = (records.len() + HEAD + SUM) as u64;
        if self.used() + length > LENGTH {
            return Ok(false);
        }
        let mut to = Writer::default();
        to.u8(BLOCK);
        to.u64(txg.0);
        to.u64(self.state.lock().durable.0);
        to.bytes(records);
        self.assert_own()?;
        let chain = self.put(to.finish())?.ok_or_else(fenced)?;
        self.assert_own()?;
        self.push(txg, length, chain);
        Ok(true)
    }

    fn skip(&mut self) -> Option<Start> {
        self.skipped.push(self.next);
        self.next.sequence = self.next.sequence.wrapping_add(1);
        Some(self.next)
    }

    fn settle(&mut self, txg: Txg) {
        self.blocks.iter_mut().for_each(|block| block.txg = txg);
    }

    fn start_after(&self, txg: Txg) -> Start {
        self.blocks.iter().find(|block| block.txg > txg).map_or(self.next, |block| block.start)
    }

    fn forget(&mut self, _txg: Txg, start: Start) {
        let order = |start: Start| (start.position, start.sequence);
        let first = self.blocks.iter().position(|block| order(block.start) >= order(start));
        let forgotten = self.blocks.drain(..first.unwrap_or(self.blocks.len()));
        // Another writer may have sealed under a skipped name, as long as no durable root of this writer begins after
        // it.
        let passed = self.skipped.extract_if(.., |skipped| order(*skipped) < order(start));
        let doomed = forgotten.map(|block| key(block.start)).chain(passed.map(key));
        self.doomed.lock().extend(doomed);
    }

    fn removal(&mut self) -> Option<Removal> {
        let (bucket, doomed) = (Arc::clone(&self.bucket), Arc::clone(&self.doomed));
        Some(Box::new(move || {
            let keys = std::mem::take(&mut *doomed.lock());
            let removed =
                in_parallel(bucket.parallel(), &keys, |key| attempt(&*bucket, "removing from", || bucket.delete(key)));
            if removed.is_err() {
                // A key that is deleted already is deleted once more.
                doomed.lock().extend(keys);
            }
        }))
    }

    fn used(&self) -> u64 {
        self.blocks.iter().map(|block| block.length).sum()
    }

    fn length(&self) -> u64 {
        LENGTH
    }
}

/// Log of one import: objects, or a local file where that is requested.
pub(super) struct Logs {
    pub(super) objects: ObjectLog,
    pub(super) local: Option<Arc<LocalLog>>,
    /// The import whose local file belongs to the newest root; 0: none.
    pub(super) named: u32,
    /// The last block was appended to the local log, or should have been.
    pub(super) is_last_near: bool,
}

impl Logs {
    /// The local log, while fsyncs go there.
    fn near(&self) -> Option<&LocalLog> {
        self.local.as_deref().filter(|local| local.is_wanted())
    }
}

impl Blocks for Logs {
    fn begin(&mut self, start: Start) -> Result<(), PoolError> {
        self.objects.begin(start)
    }

    fn replay(&mut self, start: Start, committed: Txg, visit: &mut Visit<'_>) -> Result<Replayed, PoolError> {
        let far = self.objects.replay(start, committed, visit)?;
        let Some(local) = &self.local else { return Ok(far) };
        local.set_aside(self.named)?;
        if self.named == 0 {
            return Ok(far);
        }
        // A change between the two logs commits in between: one of them has nothing.
        let both = || PoolError::Format(Damage::Structure("two logs that go on from the same state"));
        let mut near_visit = |record: &LogRecord<'_>| if far.records > 0 { Err(both()) } else { visit(record) };
        let near = local.replay(self.named, committed, &mut near_visit)?;
        Ok(Replayed {
            blocks: far.blocks + near.blocks,
            records: far.records + near.records,
            lost: far.lost.or(near.lost),
        })
    }

    fn append(&mut self, txg: Txg, records: &[u8]) -> Result<bool, PoolError> {
        let near = self.near().map(|local| local.append(txg, records));
        self.is_last_near = near.is_some();
        near.unwrap_or_else(|| self.objects.append(txg, records))
    }

    fn skip(&mut self) -> Option<Start> {
        // The target of blocks may have changed since.
        if self.is_last_near { None } else { self.objects.skip() }
    }

    fn settle(&mut self, txg: Txg) {
        // The local log is dropped with the first root that contains its entries.
        self.objects.settle(txg);
    }

    fn start_after(&self, txg: Txg) -> Start {
        self.objects.start_after(txg)
    }

    fn forget(&mut self, txg: Txg, start: Start) {
        self.objects.forget(txg, start);
        if let Some(local) = &self.local {
            local.forget(txg);
        }
    }

    fn removal(&mut self) -> Option<Removal> {
        self.objects.removal()
    }

    fn used(&self) -> u64 {
        self.near().map_or_else(|| self.objects.used(), LocalLog::used)
    }

    fn length(&self) -> u64 {
        self.near().map_or_else(|| self.objects.length(), |_| LocalLog::length())
    }
}

fn fenced() -> PoolError {
    PoolError::Refused("another program writes to the pool now".to_owned())
}
