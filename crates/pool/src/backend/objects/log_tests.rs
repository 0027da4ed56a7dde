//! The intent log over histories of commits and crashes, on each medium: the ring of devices, a bucket, a file
//! on this machine. Blocks are appended between all steps of a commit.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use tempfile::TempDir;

use super::bucket::{Bucket, MemoryBucket, Put};
use super::local_log::LocalLog;
use super::log::{Logs, ObjectLog};
use super::{State, WriterId};
use crate::device::Random;
use crate::log::tests::{Memory, operation};
use crate::log::{Blocks, Log, LogChange, LogFlush, Replayed, Ring, Start, Ticket};
use crate::pointer::Txg;

const POOL: u64 = 7;

fn objects(bucket: &Arc<dyn Bucket>, epoch: u64) -> ObjectLog {
    let writer =
        WriterId { nonce: epoch, host: "here".to_owned(), clock: Box::new(|| 1_800_000_000), uptime: Box::new(|| 1) };
    let state = State { epoch: epoch as u32, ..State::default() };
    let mut log = ObjectLog::new(Arc::clone(bucket), Arc::new(writer), Arc::new(Mutex::new(state)), Arc::default());
    log.begin(Start::default()).unwrap();
    log
}

/// Storage of a log's blocks.
enum Medium {
    Ring(Memory),
    Bucket(Arc<MemoryBucket>),
    Local { bucket: Arc<dyn Bucket>, directory: TempDir, log: Option<Arc<LocalLog>> },
}

/// The newest durable root.
#[derive(Clone, Copy, Default)]
struct Root {
    start: Start,
    txg: u64,
    /// The import whose local log belongs to the root.
    local: u32,
}

impl Medium {
    /// Opens the log as an import of this epoch does.
    fn open(&mut self, root: Root, epoch: u32) -> Box<dyn Blocks> {
        match self {
            Self::Ring(memory) => Box::new(Ring::new(memory.clone(), POOL, root.start).unwrap()),
            Self::Bucket(bucket) => {
                let objects = objects(&(Arc::clone(bucket) as _), u64::from(epoch));
                Box::new(Logs { objects, local: None, named: 0, is_last_near: false })
            }
            Self::Local { bucket, directory, log } => {
                let local = Arc::new(LocalLog::open(directory.path(), POOL, 1).unwrap());
                *log = Some(Arc::clone(&local));
                let objects = objects(bucket, u64::from(epoch));
                Box::new(Logs { objects, local: Some(local), named: root.local, is_last_near: false })
            }
        }
    }

    /// The steps of an import after the replay of the log.
    fn begin(&self, epoch: u32) {
        if let Self::Local { log: Some(log), .. } = self {
            log.make(epoch).unwrap();
            log.set_wanted(true);
        }
    }

    /// The process ends.
    fn crash(&mut self, random: &mut Random) {
        match self {
            Self::Ring(memory) => memory.crash(|| random.below(2) == 0),
            Self::Bucket(_) => {}
            Self::Local { log, .. } => *log = None,
        }
    }
}

struct History {
    medium: Medium,
    random: Random,
    log: Option<Log<Box<dyn Blocks>>>,
    root: Root,
    epoch: u32,
    /// The open txg.
    txg: u64,
    operations: Vec<Operation>,
    number: u64,
}

/// An operation that no durable root holds.
struct Operation {
    number: u64,
    txg: u64,
    ticket: Ticket,
    /// Its fsync has returned.
    acknowledged: bool,
}

impl History {
    fn new(mut medium: Medium, seed: u64) -> Self {
        let is_ring = matches!(medium, Medium::Ring(_));
        let start = Start { position: u64::from(!is_ring), ..Start::default() };
        let root = Root { start, ..Root::default() };
        let mut blocks = medium.open(root, 1);
        blocks.begin(start).unwrap();
        medium.begin(1);
        let log = Some(Log::new(blocks));
        let random = Random(seed);
        let mut history = Self { medium, random, log, root, epoch: 1, txg: 1, operations: Vec::new(), number: 0 };
        history.commit();
        history
    }

    fn log(&self) -> &Log<Box<dyn Blocks>> {
        self.log.as_ref().unwrap()
    }

    /// Has some blocks of a bucket fail, which may be there all the same.
    fn disturb(&mut self, on: bool) {
        let Medium::Bucket(bucket) = &self.medium else { return };
        match self.random.below(12) {
            0 if on => bucket.fail_after(Some(0)),
            1 if on => bucket.lose_one_of(1),
            _ => {}
        }
        if !on {
            bucket.fail_after(None);
            bucket.lose_one_of(0);
        }
    }

    /// Records and syncs in turn.
    fn work(&mut self) {
        for _ in 0..self.random.below(5) {
            if self.random.below(2) == 0 {
                self.number += 1;
                let data = vec![7; self.random.below(3000) as usize];
                let ticket = self.log().record(Txg(self.txg), operation(self.number, self.txg, &data));
                let (number, txg) = (self.number, self.txg);
                self.operations.push(Operation { number, txg, ticket, acknowledged: false });
            } else {
                let at = self.random.below(self.operations.len() as u64) as usize;
                let Some(ticket) = self.operations.get(at).map(|operation| operation.ticket) else { continue };
                self.disturb(true);
                if self.log().flush(ticket).unwrap() == LogFlush::Durable {
                    self.operations[at].acknowledged = true;
                }
                self.disturb(false);
            }
        }
    }

    /// A commit in its steps; `true` where the process died in it.
    fn commit(&mut self) -> bool {
        self.work();
        let (closed, last) = (self.txg, self.log().newest());
        self.txg += 1;
        self.work();
        if self.random.below(12) == 0 {
            return true;
        }
        let start = self.log().start_after(Txg(closed));
        self.work();
        let local = if let Medium::Local { log: Some(log), .. } = &self.medium {
            log.root_is_there(true, true);
            self.epoch
        } else {
            0
        };
        self.root = Root { start, txg: closed, local };
        self.operations.retain(|operation| operation.txg > closed);
        self.work();
        if self.random.below(12) == 0 {
            return true;
        }
        self.log().committed(Txg(closed), last, start);
        self.work();
        self.random.below(12) == 0
    }

    /// Dies, and is imported again: all that was acknowledged is there.
    fn crash(&mut self, seed: u64) {
        self.log = None;
        self.medium.crash(&mut self.random);
        self.epoch += 1;
        let (mut blocks, mut found) = (self.medium.open(self.root, self.epoch), BTreeSet::new());
        let replayed = blocks.replay(self.root.start, Txg(self.root.txg), &mut |record| {
            let LogChange::Write { inode, .. } = record.changes[0] else { panic!("{record:?}") };
            found.insert(inode);
            Ok(())
        });
        assert_eq!(replayed.unwrap().lost, None, "seed {seed}");
        self.operations.retain(|operation| operation.acknowledged);
        for Operation { number, txg, .. } in &self.operations {
            assert!(
                found.contains(number),
                "seed {seed}: operation {number} of txg {txg} was acknowledged, and is lost"
            );
        }
        self.medium.begin(self.epoch);
        self.log = Some(Log::new(blocks));
        // Replayed records are committed before anything else.
        let closed = self.txg;
        let (last, start) = (self.log().newest(), self.log().start_after(Txg(closed)));
        self.txg += 1;
        self.operations.clear();
        let local = if let Medium::Local { log: Some(log), .. } = &self.medium {
            log.root_is_there(true, true);
            self.epoch
        } else {
            0
        };
        self.root = Root { start, txg: closed, local };
        self.log().committed(Txg(closed), last, start);
    }
}

fn histories(seeds: std::ops::Range<u64>, commits: u64, medium: impl Fn(u64) -> Medium) {
    for seed in seeds {
        let mut history = History::new(medium(seed), seed);
        for _ in 0..commits {
            if history.commit() {
                history.crash(seed);
            }
        }
        history.crash(seed);
    }
}

#[test]
fn what_is_appended_within_a_commit_survives_in_a_ring() {
    histories(0..5000, 12, |seed| Medium::Ring(Memory::new((4 + seed % 6) * 4096)));
}

#[test]
fn what_is_appended_within_a_commit_survives_in_a_bucket() {
    histories(0..5000, 12, |seed| Medium::Bucket(Arc::new(MemoryBucket::new(seed, 0))));
}

#[test]
fn what_is_appended_within_a_commit_survives_on_this_machine() {
    histories(0..20, 25, |seed| {
        let (bucket, directory) = (Arc::new(MemoryBucket::new(seed, 0)), tempfile::tempdir().unwrap());
        Medium::Local { bucket, directory, log: None }
    });
}

#[test]
fn a_missing_block_before_later_ones_is_reported() {
    let bucket: Arc<dyn Bucket> = Arc::new(MemoryBucket::new(1, 0));
    let mut log = objects(&bucket, 1);
    for number in 0..4 {
        assert!(log.append(Txg(1), &operation(number, 1, b"")).unwrap());
    }
    bucket.delete("log/1/00000000000000000001").unwrap();
    for epoch in [2, 3] {
        // Also by the import after one that has died.
        let start = Start { position: 1, ..Start::default() };
        let replayed = objects(&bucket, epoch).replay(start, Txg(0), &mut |_| Ok(())).unwrap();
        assert_eq!(replayed, Replayed { blocks: 1, records: 1, lost: Some(1) });
    }
}

/// A bucket in which a removal ends once something was appended.
struct SlowRemoval {
    memory: MemoryBucket,
    appended: (Mutex<bool>, Condvar),
}

impl Bucket for SlowRemoval {
    fn name(&self) -> &'static str {
        "slow"
    }

    fn put(&self, key: &str, body: &[u8]) -> io::Result<()> {
        self.memory.put(key, body)
    }

    fn put_new(&self, key: &str, body: &[u8]) -> io::Result<Put> {
        let put = self.memory.put_new(key, body)?;
        if key.ends_with('3') {
            *self.appended.0.lock() = true;
            self.appended.1.notify_all();
        }
        Ok(put)
    }

    fn get(&self, key: &str, range: Option<Range<u64>>) -> io::Result<Option<Vec<u8>>> {
        self.memory.get(key, range)
    }

    fn list(&self, prefix: &str, after: &str) -> io::Result<Vec<String>> {
        self.memory.list(prefix, after)
    }

    fn delete(&self, key: &str) -> io::Result<()> {
        let mut appended = self.appended.0.lock();
        let late = self.appended.1.wait_while_for(&mut appended, |appended| !*appended, Duration::from_secs(60));
        assert!(!late.timed_out(), "an fsync waits for the removal of old blocks");
        self.memory.delete(key)
    }
}

#[test]
fn blocks_are_removed_while_others_are_appended() {
    let slow = SlowRemoval { memory: MemoryBucket::new(1, 0), appended: Default::default() };
    let slow = Arc::new(slow);
    let log = Log::new(objects(&(Arc::clone(&slow) as Arc<dyn Bucket>), 1));
    let append = |number, txg| log.flush(log.record(Txg(txg), operation(number, txg, b""))).unwrap();
    for number in 0..3 {
        assert_eq!(append(number, 1), LogFlush::Durable);
    }
    let start = log.start_after(Txg(1));
    std::thread::scope(|scope| {
        let committing = scope.spawn(|| log.committed(Txg(1), log.newest(), start));
        assert_eq!(append(3, 2), LogFlush::Durable);
        committing.join().unwrap();
    });
    assert_eq!(slow.memory.keys(), ["log/1/00000000000000000003"]);
}

/// A block whose request has failed may be made at any later time: nothing is lost by it, whenever that is.
#[test]
fn a_log_begins_anew_behind_a_block_that_failed() {
    for comes in 0..4 {
        let memory = Arc::new(MemoryBucket::new(1, 0));
        let bucket = Arc::clone(&memory) as Arc<dyn Bucket>;
        let log = Log::new(objects(&bucket, 1));
        let record = |number, txg| log.record(Txg(txg), operation(number, txg, b""));
        let ticket = record(1, 1);
        assert_eq!(log.flush(ticket).unwrap(), LogFlush::Durable);
        let late = "log/1/00000000000000000001";
        let made = |at: u32| {
            if comes == at {
                memory.put(late, b"late").unwrap();
            }
        };
        // The commit of txg 1 is under way, and its root will name a start before the block.
        let (last, start) = (log.newest(), log.start_after(Txg(1)));
        let ticket = record(2, 2);
        memory.refuse(Some("log/"));
        assert_eq!(log.flush(ticket).unwrap(), LogFlush::NeedsCommit(Txg(2)));
        memory.refuse(None);
        made(0);
        assert_eq!(log.flush(record(3, 2)).unwrap(), LogFlush::NeedsCommit(Txg(2)));
        log.committed(Txg(1), last, start);
        made(1);
        assert!(matches!(log.flush(record(4, 2)).unwrap(), LogFlush::NeedsCommit(_)), "no root names a later start");
        let (last, start) = (log.newest(), log.start_after(Txg(2)));
        log.committed(Txg(2), last, start);
        made(2);
        assert_eq!(log.flush(ticket).unwrap(), LogFlush::Durable);
        let ticket = record(5, 3);
        assert_eq!(log.flush(ticket).unwrap(), LogFlush::Durable, "the log goes on");
        made(3);
        assert_eq!(log.flush(record(6, 3)).unwrap(), LogFlush::Durable);
        let mut found = Vec::new();
        let replayed = objects(&bucket, 2).replay(start, Txg(2), &mut |record| {
            found.push(record.txg);
            Ok(())
        });
        assert_eq!((replayed.unwrap().lost, found), (None, vec![Txg(3), Txg(3)]), "the block comes at moment {comes}");
    }
}

/// The same where the root that is on its way was begun when the block was not yet: it holds the block's txg, and
/// names a start before it.
#[test]
fn a_root_that_names_an_earlier_start_ends_no_gap() {
    let memory = Arc::new(MemoryBucket::new(1, 0));
    let log = Log::new(objects(&(Arc::clone(&memory) as Arc<dyn Bucket>), 1));
    let record = |number, txg| log.record(Txg(txg), operation(number, txg, b""));
    let ticket = record(1, 1);
    let (last, start) = (log.newest(), log.start_after(Txg(1)));
    memory.refuse(Some("log/"));
    assert_eq!(log.flush(ticket).unwrap(), LogFlush::NeedsCommit(Txg(1)));
    memory.refuse(None);
    log.committed(Txg(1), last, start);
    assert_eq!(log.flush(ticket).unwrap(), LogFlush::Durable);
    let ticket = record(2, 2);
    assert_eq!(log.flush(ticket).unwrap(), LogFlush::NeedsCommit(Txg(2)), "replay would end before it");
    let (last, start) = (log.newest(), log.start_after(Txg(2)));
    log.committed(Txg(2), last, start);
    assert_eq!(log.flush(record(3, 3)).unwrap(), LogFlush::Durable);
}

/// While no durable root begins behind a name that was passed over, another writer may have sealed there.
#[test]
fn the_seal_of_another_writer_stays_where_a_block_failed() {
    let memory = Arc::new(MemoryBucket::new(1, 0));
    let bucket = Arc::clone(&memory) as Arc<dyn Bucket>;
    let log = Log::new(objects(&bucket, 1));
    let record = |number, txg| log.record(Txg(txg), operation(number, txg, b""));
    let first = log.start_after(Txg(0));
    assert_eq!(log.flush(record(1, 1)).unwrap(), LogFlush::Durable);
    let (last, start) = (log.newest(), log.start_after(Txg(1)));
    memory.refuse(Some("log/"));
    assert_eq!(log.flush(record(2, 2)).unwrap(), LogFlush::NeedsCommit(Txg(2)));
    memory.refuse(None);
    objects(&bucket, 2).replay(first, Txg(0), &mut |_| Ok(())).unwrap();
    log.committed(Txg(1), last, start);
    assert_eq!(memory.keys(), ["log/1/00000000000000000001"]);
}

#[test]
fn a_block_that_failed_is_passed_over_whichever_log_is_wanted_by_then() {
    let (bucket, directory) = (Arc::new(MemoryBucket::new(1, 0)), TempDir::new().unwrap());
    let local = Arc::new(LocalLog::open(directory.path(), POOL, 1).unwrap());
    local.make(1).unwrap();
    let objects = objects(&(Arc::clone(&bucket) as _), 1);
    let mut logs = Logs { objects, local: Some(Arc::clone(&local)), named: 0, is_last_near: false };
    bucket.fail_after(Some(0));
    logs.append(Txg(1), b"records").unwrap_err();
    local.set_wanted(true);
    assert_eq!(logs.skip().map(|start| start.sequence), Some(1));
}

#[test]
fn without_other_threads_the_calling_one_makes_all_requests() {
    let made = parking_lot::Mutex::new(Vec::new());
    let make = |number: &u32| {
        made.lock().push(*number);
        Ok(())
    };
    crate::workers::refusal::during(|| super::in_parallel(4, &[1, 2, 3, 4, 5, 6], make)).unwrap();
    assert_eq!(made.into_inner(), [1, 2, 3, 4, 5, 6]);
}
