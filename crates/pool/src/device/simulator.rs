//! A device in memory that fails as real ones do: for tests of every module of the engine.
//!
//! Callers: tests here and in the crates above. Until a sync, writes are kept sector by sector; [`Simulator::crash`]
//! lets any subset of these sectors survive, in any order, so writes are lost, torn and reordered. Errors, bit rot
//! and latency are injected on demand.
//!
//! Invariant: the same seed gives the same crash.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::Device;

/// Sectors are written whole or not at all, bytes.
const SECTOR: usize = 512;
/// Size of pages that copies of a device share until one of them writes, bytes.
const PAGE: usize = 64 << 10;

static ZEROS: [u8; PAGE] = [0; PAGE];

/// A device in memory.
#[derive(Debug)]
pub struct Simulator {
    name: String,
    length: u64,
    state: Mutex<SimulatorState>,
}

#[derive(Debug, Default)]
struct SimulatorState {
    /// The content as a read returns it.
    pages: Pages,
    /// Writes since the last sync, oldest first: offset, and the former bytes.
    unsynced: Vec<(usize, Vec<u8>)>,
    /// Number of operations (writes and syncs) that still succeed.
    allowed: Option<u64>,
    /// Number of operations so far.
    operations: u64,
    syncs: u64,
    failing_reads: bool,
    latency: Duration,
    written: u64,
    reads: u64,
}

/// The bytes of a device, in pages; pages that were never written are zeros.
#[derive(Clone, Debug, Default)]
struct Pages(Vec<Option<Arc<[u8; PAGE]>>>);

impl Pages {
    fn of(length: u64) -> Self {
        Self(vec![None; usize::try_from(length).unwrap_or(0).div_ceil(PAGE)])
    }

    /// Splits a range into parts: the page, the range in it, and the range in the whole.
    fn parts(range: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>, Range<usize>)> {
        let pages = range.start / PAGE..range.end.div_ceil(PAGE);
        pages.map(move |page| {
            let (from, to) = (range.start.max(page * PAGE), range.end.min((page + 1) * PAGE));
            (page, from - page * PAGE..to - page * PAGE, from - range.start..to - range.start)
        })
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        for (page, within, part) in Self::parts(offset..offset + into.len()) {
            let Some(into) = into.get_mut(part) else { continue };
            match self.0.get(page).and_then(|page| page.as_ref()?.get(within)) {
                Some(from) => into.copy_from_slice(from),
                None => into.fill(0),
            }
        }
    }

    fn copy(&self, offset: usize, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.read(offset, &mut bytes);
        bytes
    }

    fn write(&mut self, offset: usize, bytes: &[u8]) {
        for (page, within, part) in Self::parts(offset..offset + bytes.len()) {
            let Some(page) = self.0.get_mut(page) else { continue };
            let page = page.get_or_insert_with(|| Arc::new([0; PAGE]));
            if let (Some(to), Some(from)) = (Arc::make_mut(page).get_mut(within), bytes.get(part)) {
                to.copy_from_slice(from);
            }
        }
    }
}

/// Deterministic random numbers from a seed (SplitMix64), for crashes here and for tests.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// The next random number.
    #[expect(clippy::should_implement_trait, reason = "it never ends: an iterator would make each call unwrap")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below this one (0 for 0).
    pub fn below(&mut self, limit: u64) -> u64 {
        if limit == 0 { 0 } else { self.next() % limit }
    }

    /// A random element.
    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> Option<&'a T> {
        let at = self.below(from.len() as u64);
        from.get(usize::try_from(at).ok()?)
    }
}

impl Simulator {
    /// A device of zeros.
    #[must_use]
    pub fn new(name: &str, length: u64) -> Self {
        Self::of(name, length, Pages::of(length))
    }

    fn of(name: &str, length: u64, pages: Pages) -> Self {
        Self { name: name.to_owned(), length, state: Mutex::new(SimulatorState { pages, ..SimulatorState::default() }) }
    }

    /// A device with this content, durably.
    #[must_use]
    pub fn with_bytes(name: &str, bytes: impl AsRef<[u8]>) -> Self {
        let bytes = bytes.as_ref();
        let mut pages = Pages::of(bytes.len() as u64);
        for (number, page) in bytes.chunks(PAGE).enumerate().filter(|(_, page)| !ZEROS.starts_with(page)) {
            pages.write(number * PAGE, page);
        }
        Self::of(name, bytes.len() as u64, pages)
    }

    /// A copy of the device with its current content as durable. Unwritten pages are shared in memory.
    #[must_use]
    pub fn copy(&self) -> Self {
        Self::of(&self.name, self.length, self.state.lock().pages.clone())
    }

    /// The current content of the whole device.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        self.state.lock().pages.copy(0, self.length as usize)
    }

    /// Simulates a power failure: of the sectors written since the last sync any subset survives, chosen by the seed.
    /// The device works again afterwards. Every fourth seed keeps all, every fourth none.
    pub fn crash(&self, seed: u64) {
        let mut random = Random(seed);
        let mut state = self.state.lock();
        let SimulatorState { pages, unsynced, .. } = &mut *state;
        // Roll back to the last sync, newest write first, keeping the bytes of each write.
        let mut news = Vec::new();
        for (offset, old) in std::mem::take(unsynced).into_iter().rev() {
            news.push((offset, pages.copy(offset, old.len())));
            pages.write(offset, &old);
        }
        news.reverse();
        let share = match seed % 4 {
            0 => 100,
            1 => 0,
            _ => random.below(101),
        };
        let mut sectors = Vec::new();
        for (offset, new) in &news {
            let mut at = 0;
            while at < new.len() {
                let end = (at + SECTOR - (offset + at) % SECTOR).min(new.len());
                if random.below(100) < share {
                    sectors.push((offset + at, new.get(at..end).unwrap_or_default()));
                }
                at = end;
            }
        }
        // A device may keep a later write of a sector and then an earlier one only if nothing was
        // ordered between them: swap some neighbours.
        for at in 1..sectors.len() {
            if share < 100 && random.below(8) == 0 {
                sectors.swap(at - 1, at);
            }
        }
        for (offset, sector) in sectors {
            pages.write(offset, sector);
        }
        state.allowed = None;
        state.failing_reads = false;
    }

    /// Lets this many more writes and syncs succeed; all later ones fail, as on a device that was unplugged.
    pub fn fail_after(&self, operations: u64) {
        self.state.lock().allowed = Some(operations);
    }

    /// Makes reads fail, or succeed again.
    pub fn fail_reads(&self, failing: bool) {
        self.state.lock().failing_reads = failing;
    }

    /// Writes and syncs since the device was made.
    #[must_use]
    pub fn operations(&self) -> u64 {
        self.state.lock().operations
    }

    /// Syncs since the device was made.
    #[must_use]
    pub fn syncs(&self) -> u64 {
        self.state.lock().syncs
    }

    /// Bytes written since the device was made.
    #[must_use]
    pub fn written(&self) -> u64 {
        self.state.lock().written
    }

    /// Reads since the device was made.
    #[must_use]
    pub fn reads(&self) -> u64 {
        self.state.lock().reads
    }

    /// Flips a bit silently, as on a rotting medium.
    pub fn rot(&self, offset: u64, bit: u8) {
        let Ok(Range { start, .. }) = self.range(offset, 1) else { return };
        let mut state = self.state.lock();
        let byte: u8 = state.pages.copy(start, 1).iter().sum();
        state.pages.write(start, &[byte ^ 1 << (bit % 8)]);
    }

    /// Overwrites a range silently, as a write that bypasses the pool.
    pub fn overwrite(&self, offset: u64, other: &[u8]) {
        if let Ok(Range { start, .. }) = self.range(offset, other.len()) {
            self.state.lock().pages.write(start, other);
        }
    }

    /// Sets the latency of every operation.
    pub fn slow_down(&self, latency: Duration) {
        self.state.lock().latency = latency;
    }

    fn wait(&self) {
        let latency = self.state.lock().latency;
        if !latency.is_zero() {
            crate::patience::sleep(latency);
        }
    }

    fn range(&self, offset: u64, length: usize) -> io::Result<Range<usize>> {
        let start = usize::try_from(offset).map_err(|_| outside())?;
        let end = start.checked_add(length).ok_or_else(outside)?;
        if end as u64 > self.length { Err(outside()) } else { Ok(start..end) }
    }
}

fn outside() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "behind the end of the device")
}

impl SimulatorState {
    fn operation(&mut self) -> io::Result<()> {
        match &mut self.allowed {
            Some(0) => Err(io::Error::from(rustix::io::Errno::IO)),
            Some(left) => {
                *left -= 1;
                self.operations += 1;
                Ok(())
            }
            None => {
                self.operations += 1;
                Ok(())
            }
        }
    }
}

impl Device for Simulator {
    fn name(&self) -> &str {
        &self.name
    }

    fn length(&self) -> u64 {
        self.length
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.wait();
        let range = self.range(offset, buffer.len())?;
        let mut state = self.state.lock();
        state.reads += 1;
        if state.failing_reads {
            return Err(io::Error::from(rustix::io::Errno::IO));
        }
        state.pages.read(range.start, buffer);
        Ok(())
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.wait();
        let range = self.range(offset, bytes.len())?;
        let mut state = self.state.lock();
        state.operation()?;
        state.written += bytes.len() as u64;
        let old = state.pages.copy(range.start, bytes.len());
        state.pages.write(range.start, bytes);
        state.unsynced.push((range.start, old));
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.wait();
        let mut state = self.state.lock();
        state.operation()?;
        state.syncs += 1;
        state.unsynced.clear();
        Ok(())
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        // A discarded range has arbitrary content: here a pattern that no structure has.
        let range = self.range(offset, usize::try_from(length).map_err(|_| outside())?)?;
        let mut state = self.state.lock();
        let old = state.pages.copy(range.start, range.len());
        state.pages.write(range.start, &vec![0xdb; range.len()]);
        state.unsynced.push((range.start, old));
        Ok(())
    }

    fn expect(&self, _offset: u64, _length: u64) {}
}
