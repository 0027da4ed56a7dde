//! Group commit, overflow, failure: the log as fsyncs use it, from real threads.

use std::sync::Barrier;
use std::thread;

use super::*;

const POOL: u64 = 5;

fn log(length: u64) -> (Log<Ring<Memory>>, Memory) {
    let memory = Memory::new(length);
    (Log::new(Ring::new(memory.clone(), POOL, Start::default()).unwrap()), memory)
}

fn note<B: Blocks>(log: &Log<B>, number: u64, txg: u64, bytes: usize) -> Ticket {
    let data = vec![3; bytes];
    log.record(Txg(txg), operation(number, txg, &data))
}

fn replayed(memory: &Memory, start: Start, committed: u64) -> Vec<u64> {
    let mut seen = Vec::new();
    Ring::replay(memory.clone(), POOL, start, Txg(committed), &mut |record| {
        match record.changes[..] {
            [LogChange::Write { inode, .. }] => seen.push(inode),
            _ => panic!("{record:?}"),
        }
        Ok(())
    })
    .unwrap();
    seen
}

/// An area whose syncs wait until the test lets them go.
struct Gate {
    memory: Memory,
    reached: Arc<Barrier>,
    go: Arc<Barrier>,
    gated: AtomicUsize,
}

impl Area for Gate {
    fn length(&self) -> u64 {
        self.memory.length()
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> Result<(), PoolError> {
        self.memory.read_at(into, offset)
    }

    fn write_at(&self, from: &[u8], offset: u64) -> Result<(), PoolError> {
        self.memory.write_at(from, offset)
    }

    fn sync(&self) -> Result<(), PoolError> {
        if self.gated.fetch_add(1, Ordering::SeqCst) == 0 {
            self.reached.wait();
            self.go.wait();
        }
        self.memory.sync()
    }
}

#[test]
fn those_who_come_during_a_sync_share_the_next() {
    let memory = Memory::new(1 << 20);
    let (reached, go) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
    let gate = Gate { memory: memory.clone(), reached: reached.clone(), go: go.clone(), gated: AtomicUsize::new(0) };
    let log = Log::new(Ring::new(gate, POOL, Start::default()).unwrap());
    thread::scope(|scope| {
        scope.spawn(|| assert_eq!(log.flush(note(&log, 0, 1, 100)).unwrap(), LogFlush::Durable));
        reached.wait();
        for number in 1..8 {
            let log = &log;
            scope.spawn(move || assert_eq!(log.flush(note(log, number, 1, 100)).unwrap(), LogFlush::Durable));
        }
        while log.newest() < Ticket(8) {
            thread::yield_now();
        }
        go.wait();
    });
    assert_eq!(memory.syncs(), 2);
    let mut seen = replayed(&memory, Start::default(), 0);
    assert_eq!(seen[0], 0);
    seen.sort_unstable();
    assert_eq!(seen, (0..8).collect::<Vec<_>>());
}

#[test]
fn threads_with_commits_between_lose_nothing() {
    let (log, memory) = log(256 * 1024);
    let txg = Mutex::new(1u64);
    let (durable, roots) = (Mutex::new(Vec::new()), Mutex::new((Start::default(), 0u64)));
    thread::scope(|scope| {
        let (log, txg, durable) = (&log, &txg, &durable);
        for worker in 0..4u64 {
            scope.spawn(move || {
                for number in 0..200 {
                    let number = worker * 1000 + number;
                    let (ticket, at) = {
                        let open = txg.lock();
                        (note(log, number, *open, 300), *open)
                    };
                    if log.flush(ticket).unwrap() == LogFlush::Durable {
                        durable.lock().push((number, at));
                    }
                }
            });
        }
        scope.spawn(|| {
            for _ in 0..50 {
                let (closed, last) = {
                    let mut open = txg.lock();
                    *open += 1;
                    (*open - 1, log.newest())
                };
                let start = log.start_after(Txg(closed));
                roots.lock().0 = start;
                roots.lock().1 = closed;
                log.committed(Txg(closed), last, start);
                thread::yield_now();
            }
        });
    });
    memory.crash(|| false);
    let roots = roots.lock();
    let seen = replayed(&memory, roots.0, roots.1);
    for (number, at) in durable.lock().iter() {
        assert!(
            *at <= roots.1 || seen.contains(number),
            "operation {number} of txg {at} is neither committed nor logged"
        );
    }
}

#[test]
fn what_overflows_the_buffer_needs_a_commit() {
    let (log, memory) = log(64 << 20);
    let first = note(&log, 1, 1, 100);
    assert_eq!(log.flush(first).unwrap(), LogFlush::Durable);
    let large = note(&log, 2, 1, FLUSH_MOST);
    assert_eq!(log.flush(large).unwrap(), LogFlush::NeedsCommit(Txg(1)));
    // A later record must not become durable before the one that was dropped.
    let later = note(&log, 3, 2, 100);
    assert_eq!(log.flush(later).unwrap(), LogFlush::NeedsCommit(Txg(1)));
    assert_eq!(log.flush(first).unwrap(), LogFlush::Durable);
    let start = log.start_after(Txg(1));
    log.committed(Txg(1), large, start);
    assert_eq!(log.flush(large).unwrap(), LogFlush::Durable);
    assert_eq!(log.flush(later).unwrap(), LogFlush::Durable);
    assert_eq!(replayed(&memory, start, 1), vec![3]);
}

#[test]
fn what_no_record_holds_needs_a_commit_even_where_all_records_are_durable() {
    let (log, _) = log(1 << 20);
    let first = note(&log, 1, 1, 100);
    assert_eq!(log.flush(first).unwrap(), LogFlush::Durable);
    assert_eq!(log.flush(log.newest()).unwrap(), LogFlush::Durable);
    log.cannot_record(Txg(1));
    assert_eq!(log.flush(log.newest()).unwrap(), LogFlush::NeedsCommit(Txg(1)));
    assert_eq!(log.flush(first).unwrap(), LogFlush::Durable);
    let last = log.newest();
    log.cannot_record(Txg(2));
    log.committed(Txg(1), last, log.start_after(Txg(1)));
    assert_eq!(log.flush(last).unwrap(), LogFlush::Durable);
    assert_eq!(log.flush(log.newest()).unwrap(), LogFlush::NeedsCommit(Txg(2)));
    log.committed(Txg(2), log.newest(), log.start_after(Txg(2)));
    assert_eq!(log.flush(log.newest()).unwrap(), LogFlush::Durable);
}

#[test]
fn a_full_ring_needs_a_commit() {
    let (log, memory) = log(4 * 4096);
    for number in 0..4 {
        assert_eq!(log.flush(note(&log, number, 1, 100)).unwrap(), LogFlush::Durable);
    }
    assert_eq!(log.used(), 4 * 4096);
    let ticket = note(&log, 4, 1, 100);
    assert_eq!(log.flush(ticket).unwrap(), LogFlush::NeedsCommit(Txg(1)));
    let later = note(&log, 5, 1, 100);
    assert_eq!(log.flush(later).unwrap(), LogFlush::NeedsCommit(Txg(1)));
    assert_eq!(replayed(&memory, Start::default(), 0), vec![0, 1, 2, 3]);
    log.committed(Txg(1), later, log.start_after(Txg(1)));
    assert_eq!(log.used(), 0);
    assert_eq!(log.flush(later).unwrap(), LogFlush::Durable);
}

#[test]
fn a_commit_empties_the_buffer() {
    let (log, memory) = log(1 << 20);
    let ticket = note(&log, 1, 1, 100);
    log.committed(Txg(1), ticket, log.start_after(Txg(1)));
    assert_eq!(log.flush(ticket).unwrap(), LogFlush::Durable);
    assert_eq!(memory.syncs(), 0);
    let next = note(&log, 2, 2, 100);
    assert_eq!(log.flush(next).unwrap(), LogFlush::Durable);
    assert_eq!(replayed(&memory, Start::default(), 0), vec![2]);
}

#[test]
fn a_failed_sync_fails_all_that_follow() {
    let (log, memory) = log(1 << 20);
    let first = note(&log, 1, 1, 100);
    assert_eq!(log.flush(first).unwrap(), LogFlush::Durable);
    memory.fail();
    let second = note(&log, 2, 1, 100);
    assert!(matches!(log.flush(second), Err(PoolError::Device { .. })));
    let third = note(&log, 3, 1, 100);
    assert!(matches!(log.flush(third), Err(PoolError::Device { .. })));
    assert_eq!(log.flush(first).unwrap(), LogFlush::Durable);
}
