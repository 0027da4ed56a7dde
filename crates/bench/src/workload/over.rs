//! Operations of pools over several devices: streams, random reads and writes, with one device slow or missing,
//! resilver, scrub; the space that files take; and devices that join and leave.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use rustix::fs::OFlags;

use super::big_file::{Buffer, flush, forward, open, random, read_at};
use super::{Ask, Material, Visit, timed};
use crate::clock;
use crate::failure::{Doing, Failure};
use crate::mounted::OverAsk;
use crate::target::PoolOf;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// Bytes read of each device by itself: the kernel's limit lets some of it through uncounted, as for a scrub or
/// reads of the same amount.
const RAW: u64 = 128 * MIB;
/// Minimum amount for scrub and resilver, so that constant costs do not matter.
const VERIFIED: u64 = 512 * MIB;
/// Number of random reads and overwrites.
const RANDOM: usize = 1000;
/// Bytes in the pool when a device joins or leaves.
const SHAPED: u64 = 512 * MIB;
/// Size in bytes of the files that are written meanwhile, one after the other, each synced.
const BESIDE: u64 = 32 * MIB;
/// How long these files are written with no other activity.
const ALONE: Duration = Duration::from_secs(5);
/// Number of reads of which the slowest are measured.
const TAIL: usize = 400;

fn write(path: &std::path::Path, bytes: u64, seed: u64) -> Result<Duration, Failure> {
    let supply = Material::Random.supply();
    let file = open(path, OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY)?;
    let all = || {
        for offset in forward(bytes, MIB) {
            let block = supply.block(offset + seed * 4 * KIB, MIB as usize);
            let count = rustix::io::pwrite(&file, block, offset)
                .map_err(|error| Failure::new(format!("writing at {offset}: {error}")))?;
            if count != block.len() {
                return Err(Failure::new(format!("wrote {count} of {} bytes at {offset}", block.len())));
            }
        }
        flush(&file)
    };
    Ok(timed(all)?.0)
}

fn read(path: &std::path::Path, record: u64, offsets: &[u64]) -> Result<Duration, Failure> {
    let mut buffer = Buffer::new(record as usize);
    let file = open(path, OFlags::RDONLY)?;
    Ok(timed(|| read_at(&file, buffer.record(record), offsets))?.0)
}

/// Returns the 99th percentile of the latency of reads.
fn tail(path: &std::path::Path, bytes: u64) -> Result<Duration, Failure> {
    let record = 128 * KIB;
    let mut buffer = Buffer::new(record as usize);
    let file = open(path, OFlags::RDONLY)?;
    let mut times = Vec::new();
    for offset in random(bytes, record).into_iter().take(TAIL) {
        let start = clock::now();
        read_at(&file, buffer.record(record), &[offset])?;
        times.push(start.elapsed());
    }
    times.sort_unstable();
    times.get(times.len() * 99 / 100).copied().ok_or_else(|| Failure::new("nothing was read"))
}

impl Visit<'_> {
    fn over(&self, ask: OverAsk) -> Result<Duration, Failure> {
        self.ask(Ask::Over(ask)).and_then(super::time)
    }

    /// Returns the bytes moved by the last topology change.
    fn moved(&self) -> Result<u64, Failure> {
        self.ask(Ask::OverMoved).and_then(super::bytes)
    }

    /// Returns the bytes allocated on the first device.
    fn share(&self) -> Result<u64, Failure> {
        self.ask(Ask::OverShare).and_then(super::bytes)
    }

    /// Returns the bytes of the devices that files use, and the free bytes, when everything is written out.
    fn room(&self) -> Result<(u64, u64), Failure> {
        // The space of removed files is free after the second commit.
        self.ask(Ask::Settle)?;
        self.ask(Ask::Settle)?;
        let (data, metadata) = self.used()?;
        let room = rustix::fs::statvfs(&self.own).doing("asking for the free space of", &self.own)?;
        Ok((data + metadata, room.f_bavail * room.f_frsize))
    }

    fn used(&self) -> Result<(u64, u64), Failure> {
        match self.ask(Ask::OverUsed)? {
            super::Answer::Used(data, metadata) => Ok((data, metadata)),
            other => Err(Failure::new(format!("not an answer about room: {other:?}"))),
        }
    }
}

/// Measures streams and failures of devices, on one target.
pub fn run(visit: &mut Visit<'_>) -> Result<(), Failure> {
    let Some(pool) = visit.pool else { return Err(Failure::new("not a pool over devices")) };
    let Some(over) = pool.over else { return Err(Failure::new("not a pool over devices")) };
    let bytes = visit.scale.stream;
    let (one, two): (PathBuf, PathBuf) = (visit.own.join("one"), visit.own.join("two"));
    visit.sample("over-device", visit.over(OverAsk::ReadOne(RAW))?, RAW)?;
    visit.sample("over-devices", visit.over(OverAsk::Read(RAW))?, RAW * over.devices as u64)?;
    visit.sample("over-write", write(&one, bytes, 1)?, bytes)?;
    write(&two, bytes, 2)?;
    visit.cold()?;
    visit.sample("over-read", read(&one, MIB, &forward(bytes, MIB))?, bytes)?;
    visit.cold()?;
    let both = || {
        thread::scope(|scope| {
            let readers = [&one, &two].map(|path| scope.spawn(move || read(path, MIB, &forward(bytes, MIB))));
            readers.into_iter().try_for_each(|reader| match reader.join() {
                Ok(read) => read.map(drop),
                Err(_) => Err(Failure::new("a reader panicked")),
            })
        })
    };
    visit.sample("over-read-two", timed(both)?.0, 2 * bytes)?;
    visit.cold()?;
    let places: Vec<u64> = random(bytes, 8 * KIB).into_iter().take(RANDOM).collect();
    visit.sample("over-random-read", read(&one, 8 * KIB, &places)?, places.len() as u64)?;
    let supply = Material::Random.supply();
    let file = open(&two, OFlags::WRONLY)?;
    let overwrite = || {
        places.iter().try_for_each(|place| {
            let block = supply.block(place + 12 * KIB, 8 * KIB as usize);
            super::big_file::write_at(&file, block, &[*place])
        })?;
        flush(&file)
    };
    visit.sample("over-random-write", timed(overwrite)?.0, places.len() as u64)?;
    drop(file);
    visit.cold()?;
    visit.sample("over-tail", tail(&one, bytes)?, 1)?;
    if over.parity == 0 {
        return Ok(());
    }
    visit.cold()?;
    visit.over(OverAsk::Slow)?;
    let slow = tail(&one, bytes);
    visit.over(OverAsk::Healthy)?;
    visit.sample("over-tail-slow", slow?, 1)?;
    if 2 * bytes < VERIFIED {
        write(&visit.own.join("more"), VERIFIED - 2 * bytes, 4)?;
    }
    // Nothing of it is cached.
    visit.cold()?;
    let (data, metadata) = visit.used()?;
    let took = visit.over(OverAsk::Scrub)?;
    visit.sample("over-scrub", took, data + metadata)?;
    if pool.can_be_degraded() {
        visit.over(OverAsk::Offline)?;
        visit.cold()?;
        visit.sample("over-degraded", read(&one, MIB, &forward(bytes, MIB))?, bytes)?;
    }
    let took = visit.over(OverAsk::Replace)?;
    visit.sample("over-rebuild", took, (data + metadata) / over.devices as u64)
}

/// Measures the space that files take on the devices, beyond their data and parity.
pub fn run_space(visit: &mut Visit<'_>) -> Result<(), Failure> {
    let Some(over) = visit.pool.and_then(|pool| pool.over) else { return Ok(()) };
    if !visit.pool.is_some_and(|pool| pool.can_be_degraded()) {
        return Ok(());
    }
    let bytes = visit.scale.stream / 2;
    for (record, space, metadata) in
        [("8K", "over-space-8k", "over-metadata-8k"), ("128K", "over-space-128k", "over-metadata-128k")]
    {
        visit.over(OverAsk::FileSystem(record))?;
        visit.ask(Ask::Settle)?;
        let before = visit.used()?;
        let directory = visit.root.join(record);
        if !fs::metadata(&directory).doing("looking at", &directory)?.is_dir() {
            return Err(Failure::new(format!("{} is no directory", directory.display())));
        }
        write(&directory.join("file"), bytes, 3)?;
        visit.ask(Ask::Settle)?;
        let now = visit.used()?;
        let share = (over.devices * 1000 / over.data()) as u64;
        let beyond = now.0.saturating_sub(before.0).saturating_sub(bytes * share / 1000);
        visit.count(space, beyond * MIB / bytes)?;
        visit.count(metadata, now.1.saturating_sub(before.1) * MIB / bytes)?;
    }
    Ok(())
}

/// Writes one file after the other, each synced and removed after the next, while `goes_on` returns true; returns
/// how long one took.
fn write_on(directory: &Path, goes_on: &dyn Fn(Duration) -> bool) -> Result<Duration, Failure> {
    let start = clock::now();
    let file = |number: u64| directory.join(format!("beside{}", number % 2));
    let mut number: u64 = 0;
    while goes_on(start.elapsed()) {
        if number > 1 {
            fs::remove_file(file(number)).doing("removing", &file(number))?;
        }
        write(&file(number), BESIDE, number % 7)?;
        number += 1;
    }
    let elapsed = start.elapsed();
    for number in 0..number.min(2) {
        fs::remove_file(file(number)).doing("removing", &file(number))?;
    }
    let count = u32::try_from(number).unwrap_or(u32::MAX);
    elapsed.checked_div(count).ok_or_else(|| Failure::new("nothing was written meanwhile"))
}

/// Measures a RAID-Z group that is expanded from 4 to 5 devices, and 5 devices without redundancy of which one is
/// removed: the bytes moved, and the time of concurrent writes.
pub fn run_shapes(visit: &mut Visit<'_>) -> Result<(), Failure> {
    let Some((pool, over)) = visit.pool.and_then(|pool| Some((pool, pool.over?))) else { return Ok(()) };
    let rows = match (pool.by, over.word, over.devices) {
        (PoolOf::Nacre, "raidz1", 5) => true,
        (PoolOf::Nacre, "", 4) => false,
        _ => return Ok(()),
    };
    if !rows {
        visit.over(OverAsk::Join)?;
    }
    write(&visit.own.join("shaped"), SHAPED, 5)?;
    let (used, free) = visit.room()?;
    if rows {
        visit.over(OverAsk::Leave)?;
        visit.over(OverAsk::Shaped)?;
        visit.room()?;
    }
    visit.sample("shape-alone", write_on(&visit.own, &|elapsed| elapsed < ALONE)?, BESIDE)?;
    visit.room()?;
    let has_to = if rows { SHAPED } else { visit.share()? };
    let (ends, directory) = (AtomicBool::new(false), visit.own.clone());
    let beside = thread::scope(|scope| {
        let writer = scope.spawn(|| write_on(&directory, &|_| !ends.load(Ordering::Relaxed)));
        let changed =
            visit.over(if rows { OverAsk::Join } else { OverAsk::Leave }).and_then(|_| visit.over(OverAsk::Shaped));
        ends.store(true, Ordering::Relaxed);
        let written = writer.join().map_err(|_| Failure::new("a writer panicked"))?;
        changed.and(written)
    });
    visit.sample("shape-beside", beside?, BESIDE)?;
    visit.count("shape-moved", visit.moved()? * MIB / has_to.max(1))?;
    if rows {
        let (used_then, free_then) = visit.room()?;
        visit.count("shape-space", used_then.saturating_sub(used) * MIB / SHAPED)?;
        visit.count("shape-room", free.saturating_sub(free_then) * MIB / free.max(1))?;
    }
    Ok(())
}
