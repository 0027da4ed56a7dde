//! A file that takes most of the room is overwritten at random for a given time; and a file is read after it was
//! overwritten at random.

use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use rustix::fs::OFlags;

use super::big_file::{Buffer, flush, forward, open, random, read_at};
use super::material::Supply;
use super::pool::{make, put};
use super::{Answer, Ask, Material, Numbers, Visit, timed};
use crate::clock;
use crate::failure::{Doing, Failure};
use crate::holders::Traffic;
use crate::table::{Group, LOADS, Load};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// Fraction (1/n) of the time that counts for latencies only: the records of a fresh file take another form first.
const SETTLING: u32 = 10;
/// How many times its size a file is overwritten before it is read.
const PASSES: u64 = 5;
/// Number of random reads.
const READS: usize = 2000;

/// Latencies of writes, counted in classes of which each is at most a sixteenth longer than the one before.
struct Latencies {
    classes: Vec<u64>,
    longest: Duration,
}

impl Latencies {
    /// Number of classes for each power of two.
    const PARTS: u64 = 16;

    fn new() -> Self {
        Self { classes: vec![0; 64 * Self::PARTS as usize], longest: Duration::ZERO }
    }

    /// The class of a latency in microseconds.
    fn class(micros: u64) -> usize {
        let wide = micros.max(Self::PARTS);
        let shift = wide.ilog2() - Self::PARTS.ilog2();
        (u64::from(shift) * Self::PARTS + (micros >> shift)) as usize
    }

    /// The shortest latency of a class, microseconds.
    fn least(class: usize) -> u64 {
        let class = class as u64;
        let shift = (class / Self::PARTS).saturating_sub(1);
        (class - shift * Self::PARTS) << shift
    }

    fn add(&mut self, latency: Duration) {
        self.longest = self.longest.max(latency);
        let micros = u64::try_from(latency.as_micros()).unwrap_or(u64::MAX);
        if let Some(count) = self.classes.get_mut(Self::class(micros)) {
            *count += 1;
        }
    }

    /// The latency that 99 of 100 writes do not exceed, microseconds.
    fn p99(&self) -> u64 {
        let all: u64 = self.classes.iter().sum();
        let mut counted = 0;
        if all == 0 {
            return 0;
        }
        for (class, count) in self.classes.iter().enumerate() {
            counted += count;
            if counted * 100 >= all * 99 {
                return Self::least(class + 1);
            }
        }
        0
    }
}

/// Random overwrites of one file.
struct Overwrites<'a> {
    file: &'a OwnedFd,
    supply: &'a Supply,
    bytes: u64,
    block: usize,
    numbers: Numbers,
    written: u64,
}

impl Overwrites<'_> {
    fn next(&mut self) -> Result<(), Failure> {
        let block = self.block as u64;
        let content = self.supply.block(self.written, self.block);
        put(self.file, content, self.numbers.below(self.bytes / block) * block)?;
        self.written += block;
        Ok(())
    }

    /// Overwrites for this long, and syncs; returns the bytes written.
    fn run(&mut self, time: Duration, latencies: &mut Latencies) -> Result<u64, Failure> {
        let (start, before) = (clock::now(), self.written);
        let mut now = start;
        while now - start < time {
            self.next()?;
            let after = clock::now();
            latencies.add(after - now);
            now = after;
        }
        flush(self.file)?;
        Ok(self.written - before)
    }
}

impl Visit<'_> {
    /// Returns the bytes that devices have read and written since the target was mounted, when all dirty data is
    /// written out; `None` if no process or device of the target is known.
    fn traffic(&self) -> Result<Option<Traffic>, Failure> {
        self.ask(Ask::Settle)?;
        match self.ask(Ask::Traffic)? {
            Answer::Traffic(traffic) => Ok(traffic),
            other => Err(Failure::new(format!("not an answer about traffic: {other:?}"))),
        }
    }
}

/// Measures the loads of a group on one target.
pub fn run(visit: &mut Visit<'_>, group: Group) -> Result<(), Failure> {
    LOADS.iter().filter(|load| load.group == group).try_for_each(|load| run_load(visit, load))
}

fn run_load(visit: &Visit<'_>, load: &Load) -> Result<(), Failure> {
    let room = rustix::fs::statvfs(&visit.own).doing("asking for the free space of", &visit.own)?;
    // A bucket has no size.
    let room = (room.f_bavail * room.f_frsize).min(visit.bounds.limit);
    let bytes = room / 100 * load.fill / MIB * MIB;
    let (path, supply) = (visit.own.join("aged"), Material::Random.supply());
    let file = make(&path, bytes, &supply)?;
    let (time, numbers) = (Duration::from_secs(visit.scale.seconds), Numbers::new(load.fill));
    let mut overwrites = Overwrites { file: &file, supply: &supply, bytes, block: load.block, numbers, written: bytes };
    let mut latencies = Latencies::new();
    overwrites.run(time / SETTLING, &mut latencies)?;
    let before = visit.traffic()?;
    let (elapsed, written) = timed(|| overwrites.run(time - time / SETTLING, &mut latencies))?;
    let after = visit.traffic()?;
    visit.sample(load.rate, elapsed, written)?;
    visit.count(load.p99, latencies.p99())?;
    visit.count(load.longest, u64::try_from(latencies.longest.as_micros()).unwrap_or(u64::MAX))?;
    if let (Some(before), Some(after)) = (before, after) {
        let to_devices = after.written.saturating_sub(before.written);
        visit.count(load.cost, each_mib(to_devices, written))?;
    }
    let allocated = std::fs::metadata(&path).doing("looking at", &path)?.blocks() * 512;
    visit.count(load.size, each_mib(allocated, bytes))?;
    drop(file);
    visit.tidy(&[path])
}

/// Returns `part` for each MiB of `whole`.
fn each_mib(part: u64, whole: u64) -> u64 {
    let part = u128::from(part) * u128::from(MIB) / u128::from(whole.max(1));
    u64::try_from(part).unwrap_or(u64::MAX)
}

/// Measures reads of a fresh file and of files that were overwritten at random, on one target.
pub fn run_reading(visit: &mut Visit<'_>) -> Result<(), Failure> {
    let (path, supply, bytes) = (visit.own.join("aged"), Material::Random.supply(), visit.scale.overwrite);
    let file = make(&path, bytes, &supply)?;
    drop(file);
    read(visit, &path, ["aged-read-fresh", "aged-random-fresh"])?;
    for (block, tests) in
        [(16 * KIB, ["aged-read-16k", "aged-random-16k"]), (4 * KIB, ["aged-read-4k", "aged-random-4k"])]
    {
        let file = make(&path, bytes, &supply)?;
        let numbers = Numbers::new(block);
        let mut overwrites =
            Overwrites { file: &file, supply: &supply, bytes, block: block as usize, numbers, written: bytes };
        for _ in 0..PASSES * bytes / block {
            overwrites.next()?;
        }
        flush(&file)?;
        drop(file);
        visit.ask(Ask::Settle)?;
        read(visit, &path, tests)?;
    }
    visit.tidy(&[path])
}

/// Reads a file from front to back, and at random, each cold.
fn read(visit: &Visit<'_>, path: &std::path::Path, tests: [&'static str; 2]) -> Result<(), Failure> {
    let bytes = visit.scale.overwrite;
    let mut buffer = Buffer::new(MIB as usize);
    let [stream, at_random] = tests;
    visit.cold()?;
    let file = open(path, OFlags::RDONLY)?;
    let offsets = forward(bytes, MIB);
    visit.sample(stream, timed(|| read_at(&file, buffer.record(MIB), &offsets))?.0, bytes)?;
    drop(file);
    visit.cold()?;
    let file = open(path, OFlags::RDONLY)?;
    let offsets: Vec<u64> = random(bytes, 4 * KIB).into_iter().take(READS).collect();
    let elapsed = timed(|| read_at(&file, buffer.record(4 * KIB), &offsets))?.0;
    visit.sample(at_random, elapsed, offsets.len() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_are_counted_within_a_sixteenth() {
        for micros in [0, 1, 15, 16, 17, 31, 32, 33, 1000, 123_456, u64::MAX] {
            let class = Latencies::class(micros);
            let (least, next) = (Latencies::least(class), Latencies::least(class + 1));
            assert!(least <= micros && (micros < next || next < least), "{micros}: {least}..{next}");
            assert!(next < least || next - least <= least / 16 + 1, "{micros}: {least}..{next}");
        }
        let mut latencies = Latencies::new();
        (0..99).for_each(|_| latencies.add(Duration::from_micros(100)));
        latencies.add(Duration::from_millis(900));
        assert!((100..110).contains(&latencies.p99()), "{}", latencies.p99());
        latencies.add(Duration::from_millis(900));
        assert!((900_000..980_000).contains(&latencies.p99()), "{}", latencies.p99());
        assert_eq!(latencies.longest, Duration::from_millis(900));
        assert_eq!(Latencies::new().p99(), 0);
    }

    #[test]
    fn parts_are_given_for_each_mib() {
        assert_eq!((each_mib(3 << 30, 2 << 30), each_mib(5, 0), each_mib(0, 7)), (3 << 19, 5 << 20, 0));
    }
}
