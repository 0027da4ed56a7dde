//! One point of iozone's automatic mode (`iozone -a -e`): nine operations on one file, in iozone's
//! order.
//!
//! As in iozone: writes include the fsync, opening and closing are not timed, records are visited in offset order,
//! in random order, backwards and with a stride of 17, and "record rewrite" writes one record at the same offset
//! repeatedly. Unlike iozone: small files are read several times and the time is divided, because one pass over 64
//! KiB is shorter than an interrupt.

use std::os::fd::OwnedFd;

use rustix::fs::OFlags;

use super::big_file::{flush, forward, open, random, read_at, stride, write_at};
use super::{Visit, repeated, timed};
use crate::failure::Failure;
use crate::report::Point;

/// Measures the nine operations, on a file of this visit's own: even the reading ones need a writable target.
pub fn run(visit: &mut Visit<'_>, point: Point) -> Result<(), Failure> {
    let path = visit.own.join("iozone.tmp");
    let (in_order, at_random, strided) =
        (forward(point.file, point.record), random(point.file, point.record), stride(point.file, point.record));
    let backward: Vec<u64> = in_order.iter().rev().copied().collect();
    let same_place = vec![0_u64; in_order.len()];

    let file = open(&path, OFlags::CREATE | OFlags::EXCL | OFlags::RDWR)?;
    write(visit, &file, "iozone-write", point, &in_order)?;
    drop(file);
    let file = open(&path, OFlags::RDWR)?;
    write(visit, &file, "iozone-rewrite", point, &in_order)?;
    drop(file);
    let file = open(&path, OFlags::RDWR)?;
    read(visit, &file, "iozone-read", point, &in_order)?;
    read(visit, &file, "iozone-reread", point, &in_order)?;
    read(visit, &file, "iozone-random-read", point, &at_random)?;
    write(visit, &file, "iozone-random-write", point, &at_random)?;
    read(visit, &file, "iozone-backward-read", point, &backward)?;
    write(visit, &file, "iozone-record-rewrite", point, &same_place)?;
    read(visit, &file, "iozone-stride-read", point, &strided)?;
    drop(file);
    std::fs::remove_file(&path).map_err(|error| Failure::io("removing", &path, error))
}

fn write(
    visit: &mut Visit<'_>,
    file: &OwnedFd,
    test: &'static str,
    point: Point,
    offsets: &[u64],
) -> Result<(), Failure> {
    let record = visit.buffer.record(point.record);
    let (elapsed, ()) = timed(|| {
        write_at(file, record, offsets)?;
        flush(file)
    })?;
    visit.sample_at(test, Some(point), elapsed, point.file)
}

fn read(
    visit: &mut Visit<'_>,
    file: &OwnedFd,
    test: &'static str,
    point: Point,
    offsets: &[u64],
) -> Result<(), Failure> {
    let record = visit.buffer.record(point.record);
    let elapsed = repeated(|| read_at(file, record, offsets))?;
    visit.sample_at(test, Some(point), elapsed, point.file)
}
