//! The replay journal ("kept log"): every change to files since the last commit, in shared memory that survives the
//! process (a memfd). After a crash, the next process of the pool replays it, so that nothing acknowledged is lost or
//! undone.
//!
//! Called by files (each change is appended before it is acknowledged: `files/keeping.rs`), by commits (which drop
//! their changes) and by the import after a crash (`engine/keeping.rs`). The memory is a page of header words
//! followed by parts for records (`kept/places.rs`); the supervisor that starts the next process keeps its descriptor
//! open.
//!
//! Invariants:
//! - Records are in the order in which they were applied, those of one txg before those of the next. A record
//!   counts once [`END`], stored last, is behind it: a crash while appending leaves a consistent journal.
//! - Operations are admitted only when there is space for their records ([`KeptLog::make_room`]), so that no
//!   thread waits while it holds a lock. A record without space all the same is reported
//!   ([`KeptLog::given_up`]), and makes a replay impossible before the next commit.
//! - A record is replayed into one txg only: [`INTO`] names it before its commit is made. A process that has
//!   replayed everything serves the pool before that commit: new records are behind [`THROUGH`].
//!
//! ```text
//!  word  0  magic and version          1  a pool has been served with it
//!        2  position of the first      3  position of the next record
//!           record
//!        4  1: all of it is to be replayed, whatever the txg; 2: all of it was, and the pool is served,
//!           records up to word 6 are in the txg of word 5
//!        5  the txg into which records were replayed, up to the position in word 6
//!        7  the last txg with missing records
//!        8  the last committed txg
//!  from 16 on: the memory part of each part of the positions
//!  from 512 on: the parts of the memory
//!  a record: its length in words, that of the encoded changes in bytes, that of content in bytes; the
//!  changes; the content of the write among them, which is empty there
//! ```

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nacre_sys::shared_words::SharedWords;
use parking_lot::Mutex;

use self::places::{HeldParts, Places};
use super::record::{LogChange, LogRecord};
use crate::codec::Reader;
use crate::error::{Damage, PoolError};
use crate::pointer::Txg;

mod places;

/// Version of the format: incremented with each change of the records or the header words.
pub const VERSION: u64 = 2;
/// The first word: the magic number, and the version.
const MAGIC: u64 = u64::from_be_bytes(*b"nakept\0\0") + VERSION;
const KIND: usize = 0;
const SERVED: usize = 1;
const BEGIN: usize = 2;
const END: usize = 3;
const REPLAYING: usize = 4;
const INTO: usize = 5;
const THROUGH: usize = 6;
const MISSING: usize = 7;
const COMMITTED: usize = 8;
/// Length of a record's header, words.
const HEAD: u64 = 3;
/// Value of [`REPLAYING`] while records are replayed.
const REPLAYS: u64 = 1;
/// Value of [`REPLAYING`] after the replay, while the pool is served, until the records are durable.
const WAS_REPLAYED: u64 = 2;
/// Number of records up to which a replay adds no noticeable time to an import ...
const FEW: u64 = 1000;
/// ... if their content is no longer than this, bytes.
const LITTLE: u64 = 8 << 20;
/// Number of records that are replayed in well under a second; a commit is due beyond it.
const RECORDS: u64 = 100_000;
const LACKS: &str = "something that was acknowledged found no room in the kept log, and is lost";
/// Minimum size of a journal, bytes: several of the largest operations fit.
const LEAST: usize = 4 << 20;

/// The replay journal. One process at a time writes to it.
pub struct KeptLog {
    places: Places,
    appending: Mutex<Appending>,
    /// Size of the records, and of the space reserved for operations, bytes.
    taken: AtomicU64,
    /// Number of records since the last txg was closed.
    records: AtomicU64,
}

/// Position of the next record, and ends of closed txgs.
#[derive(Debug, Default)]
struct Appending {
    end: u64,
    closed: VecDeque<(Txg, u64)>,
    /// Empty before the journal is [served](KeptLog::serve).
    parts: HeldParts,
}

impl fmt::Debug for KeptLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeptLog").field("taken", &self.taken).finish_non_exhaustive()
    }
}

impl KeptLog {
    /// Default size, bytes.
    pub const BYTES: usize = 256 << 20;

    /// Creates an empty journal of this size, at least 4 MiB and less than 500 MiB.
    ///
    /// # Errors
    /// Errors of `memfd_create(2)` and `mmap(2)`.
    pub fn new(bytes: usize) -> io::Result<Arc<Self>> {
        let log = Self::over(SharedWords::new(c"nacre-kept-log", places::words_for(bytes.max(LEAST)))?)?;
        log.set(KIND, MAGIC);
        Ok(Arc::new(log))
    }

    /// Takes over the journal of a process that has ended.
    ///
    /// # Errors
    /// Errors of `mmap(2)`; [`io::ErrorKind::InvalidData`] for memory that is not a consistent journal.
    pub fn taken_over(memory: OwnedFd) -> io::Result<Arc<Self>> {
        let bytes = rustix::fs::fstat(&memory)?.st_size.cast_unsigned();
        let count = usize::try_from(bytes).unwrap_or(0) / size_of::<u64>();
        let log = Self::over(SharedWords::taken_over(memory, count)?)?;
        let (begin, end) = (log.get(BEGIN), log.get(END));
        let is_whole = begin <= end && end - begin <= log.words() && log.places.are_whole(begin, end);
        if log.get(KIND) != MAGIC || !is_whole {
            return Err(io::Error::from(io::ErrorKind::InvalidData));
        }
        log.appending.lock().end = end;
        log.taken.store((end - begin) * 8, Ordering::Relaxed);
        Ok(Arc::new(log))
    }

    fn over(shared: SharedWords) -> io::Result<Self> {
        let places = Places::of(shared).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
        Ok(Self { places, appending: Mutex::default(), taken: AtomicU64::new(0), records: AtomicU64::new(0) })
    }

    /// Descriptor of the memory, to be left open for the next process.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.places.shared().descriptor()
    }

    /// Whether a process has served the pool with it: an import then replays it.
    #[must_use]
    pub fn has_served(&self) -> bool {
        self.get(SERVED) != 0
    }

    /// Size of the records and of the reserved space, bytes.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// Maximum size, bytes.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.words() * 8
    }

    /// The txg with a record that did not fit: until it is committed, a crash of the process loses acknowledged
    /// changes, and no import replays this journal.
    #[must_use]
    pub fn given_up(&self) -> Option<Txg> {
        Some(Txg(self.get(MISSING))).filter(|txg| txg.0 > self.get(COMMITTED))
    }

    /// Whether a commit is due: before the journal is full, or its replay takes long.
    pub(crate) fn is_half_full(&self) -> bool {
        self.used() > self.length() / 2 || self.records.load(Ordering::Relaxed) > RECORDS
    }

    /// Whether a replay would take no noticeable time.
    pub(crate) fn is_short(&self) -> bool {
        self.used() < LITTLE && self.records.load(Ordering::Relaxed) < FEW
    }

    /// Maximum size of the records of one operation, bytes.
    pub(crate) fn most(&self) -> usize {
        usize::try_from(self.length() / 4).unwrap_or(usize::MAX)
    }

    /// Reserves space for the records of an operation, if there is enough.
    pub(crate) fn make_room(&self, bytes: u64) -> bool {
        let more = |taken: u64| taken.checked_add(bytes).filter(|taken| *taken <= self.length());
        self.taken.fetch_update(Ordering::SeqCst, Ordering::Relaxed, more).is_ok()
    }

    /// Releases reserved space after the operation has appended its records.
    pub(crate) fn give_back(&self, bytes: u64) {
        self.taken.fetch_sub(bytes, Ordering::SeqCst);
    }

    /// Appends the changes of an operation: its [encoded record](LogRecord::encoded), and the content of the write
    /// among the changes, which is empty there. The caller holds the txg open, and the locks that order the change
    /// among others. Returns whether a commit is due.
    pub(crate) fn append(&self, txg: Txg, record: &[u8], content: &[u8]) -> bool {
        let words = HEAD + words_of(record.len()) + words_of(content.len());
        let mut appending = self.appending.lock();
        let at = appending.end;
        let is_room = at + words - self.get(BEGIN) <= self.words();
        if !is_room || !self.places.reach(&mut appending.parts, at + words) {
            drop(appending);
            self.give_up(txg);
            return true;
        }
        let head = [words, record.len() as u64, content.len() as u64];
        head.iter().zip(at..).for_each(|(word, at)| self.places.put(at, *word));
        self.places.fill(at + HEAD, record);
        self.places.fill(at + HEAD + words_of(record.len()), content);
        appending.end = at + words;
        // Stored last: this makes the record valid.
        self.set(END, appending.end);
        drop(appending);
        let before = self.taken.fetch_add(words * 8, Ordering::Relaxed);
        let records = self.records.fetch_add(1, Ordering::Relaxed);
        records == RECORDS || (before <= self.length() / 2 && self.used() > self.length() / 2)
    }

    /// Notes a missing record of this txg: until it is committed, nothing can be replayed.
    fn give_up(&self, txg: Txg) {
        tracing::error!(txg = txg.0, "the kept log is full: until the next commit the pool cannot outlive its process");
        self.places.shared().words().get(MISSING).iter().for_each(|word| {
            word.fetch_max(txg.0, Ordering::Release);
        });
    }

    /// Notes the end of the open txg's records. Called while no operation is in progress.
    pub(crate) fn close(&self, txg: Txg) {
        let mut appending = self.appending.lock();
        let end = appending.end;
        appending.closed.push_back((txg, end));
        self.records.store(0, Ordering::Relaxed);
    }

    /// Drops the records of a durable txg.
    pub(crate) fn committed(&self, txg: Txg) {
        let mut appending = self.appending.lock();
        let before = self.get(BEGIN);
        if self.get(REPLAYING) == WAS_REPLAYED {
            self.settled();
            // Later records are in the txg that they were recorded with.
            self.set(REPLAYING, 0);
        }
        let mut begin = self.get(BEGIN);
        while let Some((closed, end)) = appending.closed.front().copied()
            && closed <= txg
        {
            appending.closed.pop_front();
            begin = end;
        }
        self.set(COMMITTED, txg.0);
        self.set(BEGIN, begin);
        self.places.leave(&mut appending.parts, begin);
        drop(appending);
        self.give_back((begin - before) * 8);
    }

    /// Prepares the replay of the previous process's records onto the durable state.
    ///
    /// # Errors
    /// [`PoolError::Refused`] where the durable state is not the one that the journal continues, or where records are
    /// missing; damage.
    pub(crate) fn begin_replay(&self, durable: Txg) -> Result<(), PoolError> {
        let refused = |why: &str| {
            tracing::error!(durable = durable.0, committed = self.get(COMMITTED), into = self.get(INTO), "{why}");
            Err(PoolError::Refused(why.to_owned()))
        };
        if durable.0 < self.get(COMMITTED) {
            return refused("what was committed last cannot be read: the kept log does not go on from there");
        }
        let lacks = || self.get(MISSING) > durable.0;
        let into = self.get(INTO);
        match self.get(REPLAYING) {
            // The replayed records are durable: later ones have the txgs of the process that replayed them.
            WAS_REPLAYED if into == 0 || durable.0 == into => {
                if into != 0 {
                    self.settled();
                }
                self.set(REPLAYING, 0);
            }
            0 => {}
            // A process crashed after its replay: before its commit, or after it.
            _ if into != 0 && durable.0 == into => {
                self.settled();
                return Ok(());
            }
            _ if durable.0 == self.get(COMMITTED) && lacks() => return refused(LACKS),
            _ if durable.0 == self.get(COMMITTED) => {
                self.set(REPLAYING, REPLAYS);
                return Ok(());
            }
            _ => return refused("somebody else has written to the pool since the kept log was written"),
        }
        if durable.0 > self.get(COMMITTED) + 1 {
            return refused("somebody else has written to the pool since the kept log was written");
        }
        if lacks() {
            return refused(LACKS);
        }
        let mut begin = self.get(BEGIN);
        while begin < self.get(END) {
            let (record, next) = self.read(begin)?;
            if LogRecord::decode(&mut Reader::new(&record.changes))?.txg > durable {
                break;
            }
            begin = next;
        }
        self.set(COMMITTED, durable.0);
        self.set(BEGIN, begin);
        self.set(REPLAYING, REPLAYS);
        Ok(())
    }

    /// Passes all records in order to the visitor, each with the position behind it.
    ///
    /// # Errors
    /// Damage; errors of the visitor.
    pub(crate) fn replay(
        &self,
        visit: &mut dyn FnMut(&LogRecord<'_>, u64) -> Result<(), PoolError>,
    ) -> Result<(), PoolError> {
        let mut at = self.get(BEGIN);
        while at < self.get(END) {
            let (stored, next) = self.read(at)?;
            let mut record = LogRecord::decode(&mut Reader::new(&stored.changes))?;
            if !stored.content.is_empty() {
                let write = record.changes.iter_mut().find_map(|change| match change {
                    LogChange::Write { data, .. } => Some(data),
                    _ => None,
                });
                *write.ok_or_else(|| damaged("content without a write in the kept log"))? = &stored.content;
            }
            visit(&record, next)?;
            at = next;
        }
        Ok(())
    }

    /// Notes that records up to this position were replayed into a txg that is committed next.
    pub(crate) fn commits_into(&self, through: u64, txg: Txg) {
        self.set(INTO, 0);
        self.set(THROUGH, through);
        self.set(INTO, txg.0);
    }

    /// Notes that the commit of the replayed records is durable.
    pub(crate) fn settled(&self) {
        self.set(COMMITTED, self.get(INTO));
        self.set(BEGIN, self.get(THROUGH));
        self.set(INTO, 0);
    }

    /// Serves the journal after a replay into this open txg: new records are appended; the replayed ones stay until
    /// that txg is durable.
    pub(crate) fn serve_before(&self, txg: Txg) {
        let mut appending = self.appending.lock();
        appending.end = self.get(END);
        appending.closed.clear();
        appending.parts = self.places.parts(self.get(BEGIN), appending.end);
        self.commits_into(appending.end, txg);
        self.set(REPLAYING, WAS_REPLAYED);
        self.taken.store((appending.end - self.get(BEGIN)) * 8, Ordering::Relaxed);
    }

    /// Serves the journal after a replay without a later commit of this process: the next process replays everything
    /// again, with the records appended from now on. A commit of a part of it may have failed, and be durable all the
    /// same; [`INTO`] still names it.
    pub(crate) fn serve_uncommitted(&self) {
        let mut appending = self.appending.lock();
        appending.end = self.get(END);
        appending.closed.clear();
        appending.parts = self.places.parts(self.get(BEGIN), appending.end);
        self.taken.store((appending.end - self.get(BEGIN)) * 8, Ordering::Relaxed);
    }

    /// The position behind all records.
    #[cfg(test)]
    fn end(&self) -> u64 {
        self.get(END)
    }

    /// Serves the journal without its old records, which are not needed. `durable` is the last durable txg.
    pub(crate) fn serve(&self, durable: Txg) {
        let mut appending = self.appending.lock();
        appending.end = self.get(END);
        appending.closed.clear();
        appending.parts = self.places.parts(appending.end, appending.end);
        self.set(COMMITTED, durable.0);
        self.set(BEGIN, appending.end);
        self.set(INTO, 0);
        self.set(REPLAYING, 0);
        self.set(SERVED, 1);
        drop(appending);
        self.taken.store(0, Ordering::Relaxed);
    }

    fn read(&self, at: u64) -> Result<(Stored, u64), PoolError> {
        let left = self.get(END).saturating_sub(at);
        let [words, changes, content] = [0, 1, 2].map(|field| if left < HEAD { 0 } else { self.places.at(at + field) });
        let bytes = |bytes: u64| usize::try_from(bytes).ok().filter(|_| bytes <= self.length());
        let (Some(changes), Some(content)) = (bytes(changes), bytes(content)) else {
            return Err(damaged("a record of the kept log that is too long"));
        };
        if words > left || words != HEAD + words_of(changes) + words_of(content) {
            return Err(damaged("a record of the kept log with another length"));
        }
        let behind = at + HEAD + words_of(changes);
        Ok((
            Stored { changes: self.places.copy(at + HEAD, changes), content: self.places.copy(behind, content) },
            at + words,
        ))
    }

    /// Length of the journal, words.
    fn words(&self) -> u64 {
        self.places.length()
    }

    fn get(&self, number: usize) -> u64 {
        self.places.get(number)
    }

    fn set(&self, number: usize, value: u64) {
        self.places.set(number, value);
    }
}

/// A record as it was read.
struct Stored {
    changes: Vec<u8>,
    content: Vec<u8>,
}

fn words_of(bytes: usize) -> u64 {
    bytes.div_ceil(8) as u64
}

fn damaged(what: &'static str) -> PoolError {
    PoolError::Format(Damage::Structure(what))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn append(log: &KeptLog, txg: u64, key: &[u8], content: &[u8]) -> bool {
        let changes = vec![LogChange::Write { inode: 2, offset: 3, data: &[] }, LogChange::Delete { key }];
        log.append(Txg(txg), &LogRecord { txg: Txg(txg), dataset: 1, changes }.encoded(), content)
    }

    fn keys(log: &KeptLog) -> Vec<(u64, Vec<u8>, usize)> {
        let mut found = Vec::new();
        log.replay(&mut |record, _| {
            if let [LogChange::Write { data, .. }, LogChange::Delete { key }] = record.changes[..] {
                assert!(data.iter().enumerate().all(|(at, byte)| *byte == at as u8));
                found.push((record.txg.0, key.to_vec(), data.len()));
            }
            Ok(())
        })
        .unwrap();
        found
    }

    /// The journal as the next process gets it.
    fn after_death(log: &KeptLog) -> Arc<KeptLog> {
        KeptLog::taken_over(log.descriptor().try_clone_to_owned().unwrap()).unwrap()
    }

    #[test]
    fn what_was_appended_is_there_for_the_next_process_in_whatever_part() {
        let log = KeptLog::new(0).unwrap();
        log.serve(Txg(4));
        let content: Vec<u8> = (0..100_003).map(|at| at as u8).collect();
        for txg in 5..300 {
            for part in [0, 1, 7, 8, 100_003] {
                append(&log, txg, b"key", &content[..part]);
            }
            log.close(Txg(txg));
            append(&log, txg + 1, b"later", &[]);
            if txg > 5 {
                log.committed(Txg(txg - 1));
                assert!(log.given_up().is_none());
            }
            let next = after_death(&log);
            assert!(next.has_served());
            next.begin_replay(Txg(txg - 1)).unwrap();
            let found = keys(&next);
            assert_eq!(found.last().unwrap(), &(txg + 1, b"later".to_vec(), 0));
            assert_eq!(found[found.len() - 2], (txg, b"key".to_vec(), 100_003));
            assert_eq!(next.used(), log.used());
            next.set(REPLAYING, 0);
        }
    }

    #[test]
    fn who_dies_while_appending_leaves_a_whole_log() {
        let log = KeptLog::new(0).unwrap();
        log.serve(Txg(4));
        append(&log, 5, b"one", b"\0\x01");
        log.places.put(log.end(), 77);
        log.places.put(log.end() + 1, u64::MAX);
        let next = after_death(&log);
        next.begin_replay(Txg(4)).unwrap();
        assert_eq!(keys(&next), [(5, b"one".to_vec(), 2)]);
    }

    #[test]
    fn each_record_is_replayed_into_one_commit() {
        let log = KeptLog::new(0).unwrap();
        log.serve(Txg(4));
        for key in [b"a", b"b", b"c"] {
            append(&log, 5, key, &[]);
        }
        log.close(Txg(5));
        append(&log, 6, b"d", &[]);
        let next = after_death(&log);
        next.begin_replay(Txg(4)).unwrap();
        let mut places = Vec::new();
        next.replay(&mut |_, place| {
            places.push(place);
            Ok(())
        })
        .unwrap();
        // Crashes before the commit of the first half, then after it.
        next.commits_into(places[1], Txg(5));
        let next = after_death(&next);
        next.begin_replay(Txg(4)).unwrap();
        assert_eq!(keys(&next).len(), 4);
        let next = after_death(&next);
        next.begin_replay(Txg(5)).unwrap();
        assert_eq!(keys(&next), [(5, b"c".to_vec(), 0), (6, b"d".to_vec(), 0)]);
        // And again after recording the commit.
        let next = after_death(&next);
        next.begin_replay(Txg(5)).unwrap();
        assert_eq!(keys(&next).len(), 2);
        assert!(after_death(&next).begin_replay(Txg(6)).is_err());
        next.commits_into(next.end(), Txg(6));
        next.settled();
        next.serve(Txg(6));
        assert_eq!((next.used(), keys(&after_death(&next)).len()), (0, 0));
    }

    #[test]
    fn who_serves_before_its_commit_leaves_all_of_it() {
        let log = KeptLog::new(0).unwrap();
        let names = |log: &KeptLog| keys(log).into_iter().map(|(_, key, _)| key).collect::<Vec<_>>();
        log.serve(Txg(4));
        append(&log, 5, b"a", &[]);
        log.close(Txg(5));
        append(&log, 6, b"b", &[]);
        let next = after_death(&log);
        next.begin_replay(Txg(4)).unwrap();
        next.serve_before(Txg(5));
        assert_eq!(next.used(), log.used());
        append(&next, 5, b"c", &[]);
        // Crashes before that commit: whatever the txg, all records are missing.
        let next = after_death(&next);
        next.begin_replay(Txg(4)).unwrap();
        assert_eq!(names(&next), [b"a", b"b", b"c"]);
        next.serve_before(Txg(5));
        append(&next, 5, b"d", &[]);
        next.close(Txg(5));
        append(&next, 6, b"e", &[]);
        // Crashes after it, before it is recorded.
        let next = after_death(&next);
        next.begin_replay(Txg(5)).unwrap();
        assert_eq!(names(&next), [b"e"]);
        next.serve_before(Txg(6));
        append(&next, 6, b"f", &[]);
        next.close(Txg(6));
        append(&next, 7, b"g", &[]);
        next.committed(Txg(6));
        assert!(next.used() < log.used());
        // Crashes after it was recorded.
        let next = after_death(&next);
        next.begin_replay(Txg(6)).unwrap();
        assert_eq!(names(&next), [b"g"]);
        next.serve_before(Txg(7));
        next.give_up(Txg(7));
        assert!(after_death(&next).begin_replay(Txg(6)).is_err(), "something is missing");
        after_death(&next).begin_replay(Txg(7)).unwrap();
    }

    #[test]
    fn a_log_that_does_not_go_on_from_what_is_durable_is_refused() {
        let log = KeptLog::new(0).unwrap();
        log.serve(Txg(4));
        append(&log, 5, b"one", &[]);
        for (durable, goes) in [(3, false), (4, true)] {
            assert_eq!(log.begin_replay(Txg(durable)).is_ok(), goes);
        }
        log.serve(Txg(4));
        assert!(log.begin_replay(Txg(6)).is_err());
        log.begin_replay(Txg(5)).unwrap();
    }

    #[test]
    fn what_finds_no_room_is_told_until_it_is_committed() {
        let log = KeptLog::new(0).unwrap();
        log.serve(Txg(4));
        let most = vec![0; log.most()];
        let mut due = 0;
        while log.given_up().is_none() {
            due += u64::from(append(&log, 5, b"key", &most));
        }
        assert_eq!(due, 2, "at half, and when it is full");
        assert!(!log.make_room(log.length() - log.used() + 1) && log.make_room(8));
        assert!(after_death(&log).begin_replay(Txg(4)).is_err());
        log.close(Txg(5));
        log.committed(Txg(5));
        assert_eq!((log.given_up(), log.used()), (None, 8));
        append(&log, 6, b"key", &most);
        after_death(&log).begin_replay(Txg(5)).unwrap();
    }
}
