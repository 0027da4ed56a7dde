//! A device that counts what is done with it: for `pool iostat`, and for the columns of errors in `pool status`.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use nacre_pool::device::Device;
use serde::{Deserialize, Serialize};

use crate::failing::Failing;

/// What was counted since the import. Sums of bytes and of nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Requests to read.
    pub reads: u64,
    /// Requests to write.
    pub writes: u64,
    /// Requests to make durable.
    pub syncs: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Time spent reading, in all threads.
    pub read_time: u64,
    /// Time spent writing.
    pub write_time: u64,
    /// Time spent making durable.
    pub sync_time: u64,
    /// Reads that failed.
    pub read_errors: u64,
    /// Writes, syncs and discards that failed.
    pub write_errors: u64,
    /// Frames that were not what was written.
    pub checksum_errors: u64,
}

#[derive(Debug, Default)]
struct Counters {
    reads: AtomicU64,
    writes: AtomicU64,
    syncs: AtomicU64,
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
    read_time: AtomicU64,
    write_time: AtomicU64,
    sync_time: AtomicU64,
    read_errors: AtomicU64,
    write_errors: AtomicU64,
    checksum_errors: AtomicU64,
}

/// A device and its counters.
pub struct Counted {
    device: Arc<dyn Device>,
    counters: Counters,
    failing: Arc<Failing>,
}

impl std::fmt::Debug for Counted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Counted").field("device", &self.device.name()).field("counters", &self.counters).finish()
    }
}

fn add(counter: &AtomicU64, number: u64) {
    counter.fetch_add(number, Ordering::Relaxed);
}

fn nanoseconds(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

impl Counted {
    /// Begins to count.
    #[must_use]
    pub fn new(device: Arc<dyn Device>, failing: Arc<Failing>) -> Self {
        Self { device, counters: Counters::default(), failing }
    }

    /// What was counted so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let Counters {
            reads,
            writes,
            syncs,
            read_bytes,
            written_bytes,
            read_time,
            write_time,
            sync_time,
            read_errors,
            write_errors,
            checksum_errors,
        } = &self.counters;
        Counts {
            reads: of(reads),
            writes: of(writes),
            syncs: of(syncs),
            read_bytes: of(read_bytes),
            written_bytes: of(written_bytes),
            read_time: of(read_time),
            write_time: of(write_time),
            sync_time: of(sync_time),
            read_errors: of(read_errors),
            write_errors: of(write_errors),
            checksum_errors: of(checksum_errors),
        }
    }

    /// A frame on it was not what was written.
    pub fn found_damage(&self) {
        add(&self.counters.checksum_errors, 1);
    }

    /// Forgets the errors (`pool clear`).
    pub fn clear_errors(&self) {
        for counter in [&self.counters.read_errors, &self.counters.write_errors, &self.counters.checksum_errors] {
            counter.store(0, Ordering::Relaxed);
        }
    }

    fn failing<T>(&self, errors: &AtomicU64, result: io::Result<T>) -> io::Result<T> {
        if result.is_err() {
            add(errors, 1);
        }
        result
    }
}

impl Device for Counted {
    fn name(&self) -> &str {
        self.device.name()
    }

    fn length(&self) -> u64 {
        self.device.length()
    }

    fn look_again(&self) -> io::Result<u64> {
        self.device.look_again()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let began = Instant::now();
        let read = self.device.read_at(buffer, offset);
        add(&self.counters.reads, 1);
        add(&self.counters.read_bytes, buffer.len() as u64);
        add(&self.counters.read_time, nanoseconds(began));
        self.failing(&self.counters.read_errors, read)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let began = Instant::now();
        let written =
            self.failing.write(self.device.name(), || self.failing(&self.counters.write_errors, self.device.write_at(bytes, offset)));
        add(&self.counters.writes, 1);
        add(&self.counters.written_bytes, bytes.len() as u64);
        add(&self.counters.write_time, nanoseconds(began));
        written
    }

    fn sync(&self) -> io::Result<()> {
        let began = Instant::now();
        let synced = self.device.sync();
        add(&self.counters.syncs, 1);
        add(&self.counters.sync_time, nanoseconds(began));
        self.failing(&self.counters.write_errors, synced).inspect_err(|error| self.failing.failed(self.device.name(), error))
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        self.failing(&self.counters.write_errors, self.device.discard(offset, length))
    }

    fn expect(&self, offset: u64, length: u64) {
        self.device.expect(offset, length);
    }

    fn begin_sync(&self, offset: u64, length: u64) {
        self.device.begin_sync(offset, length);
    }
}
