//! The operations of bonnie++, in its order: a file is written byte by byte, in blocks, rewritten, read byte by
//! byte and in blocks, and three concurrent processes seek in it and write one block in ten; then files are
//! created, stat'ed and deleted in the order of their names and in random order.
//!
//! Writes end with an fsync, as in bonnie++. Reads and seeks begin cold, because a file of bonnie++'s default size
//! (twice the memory) would not be in memory either.

use std::ffi::CString;
use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::thread;

use rustix::fs::OFlags;

use super::big_file::{flush, open};
use super::material::{Numbers, Supply};
use super::{Material, Visit, files, shuffled, timed};
use crate::failure::{Doing, Failure};

/// Size of bonnie++'s blocks in bytes.
const BLOCK: usize = 8 << 10;
/// Buffer of the C library for writing and reading single bytes.
const COLLECTED: usize = 4 << 10;
/// Divisor of the part that is written byte by byte, where only the processor matters.
const BYTEWISE: u64 = 8;
const SEEKERS: u64 = 3;
/// Seeks for each 16 MiB of the file, up to bonnie++'s number.
const MOST_SEEKS: u64 = 8000;

fn ids(material: Material) -> [&'static str; 7] {
    match material {
        Material::Random => ["char-out", "block-out", "rewrite", "char-in", "block-in", "block-in-warm", "seeks"],
        Material::Text => [
            "text-char-out",
            "text-block-out",
            "text-rewrite",
            "text-char-in",
            "text-block-in",
            "text-block-in-warm",
            "text-seeks",
        ],
    }
}

fn failed(doing: &str, error: rustix::io::Errno) -> Failure {
    Failure::new(format!("{doing} the file: {error}"))
}

fn write_whole(file: &OwnedFd, block: &[u8], offset: u64) -> Result<(), Failure> {
    let count = rustix::io::pwrite(file, block, offset).map_err(|error| failed("writing", error))?;
    if count == block.len() { Ok(()) } else { Err(Failure::new(format!("wrote {count} of {} bytes", block.len()))) }
}

fn read_whole(file: &OwnedFd, block: &mut [u8], offset: u64) -> Result<(), Failure> {
    let count = rustix::io::pread(file, &mut *block, offset).map_err(|error| failed("reading", error))?;
    if count == block.len() {
        Ok(())
    } else {
        Err(Failure::new(format!("read {count} of {} bytes at {offset}", block.len())))
    }
}

/// Returns the offsets of the blocks of a file.
fn blocks(bytes: u64, block: usize) -> impl Iterator<Item = u64> {
    (0..bytes).step_by(block)
}

/// Writes bytes as `putc` does: into a small buffer, which is written when it is full.
fn put_bytes(file: &OwnedFd, supply: &Supply, bytes: u64) -> Result<(), Failure> {
    let mut collected = Vec::with_capacity(COLLECTED);
    for offset in blocks(bytes, COLLECTED) {
        for byte in supply.block(offset, COLLECTED) {
            collected.push(std::hint::black_box(*byte));
        }
        write_whole(file, &collected, offset)?;
        collected.clear();
    }
    flush(file)
}

/// Reads bytes as `getc` does; the sum keeps the compiler from removing the loop.
fn get_bytes(file: &OwnedFd, bytes: u64) -> Result<u64, Failure> {
    let (mut collected, mut sum) = ([0; COLLECTED], 0_u64);
    for offset in blocks(bytes, COLLECTED) {
        read_whole(file, &mut collected, offset)?;
        for byte in &collected {
            sum = sum.wrapping_add(u64::from(std::hint::black_box(*byte)));
        }
    }
    Ok(sum)
}

fn put_blocks(file: &OwnedFd, supply: &Supply, bytes: u64) -> Result<(), Failure> {
    blocks(bytes, BLOCK).try_for_each(|offset| write_whole(file, supply.block(offset, BLOCK), offset))?;
    flush(file)
}

fn get_blocks(file: &OwnedFd, bytes: u64) -> Result<(), Failure> {
    let mut block = [0; BLOCK];
    blocks(bytes, BLOCK).try_for_each(|offset| read_whole(file, &mut block, offset))
}

/// Reads each block, changes one byte and writes it back.
fn rewrite(file: &OwnedFd, bytes: u64) -> Result<(), Failure> {
    let mut block = [0; BLOCK];
    for offset in blocks(bytes, BLOCK) {
        read_whole(file, &mut block, offset)?;
        if let Some(byte) = block.first_mut() {
            *byte = byte.wrapping_add(1);
        }
        write_whole(file, &block, offset)?;
    }
    flush(file)
}

fn seek(path: &Path, bytes: u64, seeks: u64) -> Result<(), Failure> {
    let seeker = |seed: u64| -> Result<(), Failure> {
        let (file, mut numbers, mut block) = (open(path, OFlags::RDWR)?, Numbers::new(seed), [0; BLOCK]);
        for number in 0..seeks.div_ceil(SEEKERS) {
            let offset = numbers.below(bytes / BLOCK as u64) * BLOCK as u64;
            read_whole(&file, &mut block, offset)?;
            if number % 10 == 0 {
                block[0] = block[0].wrapping_add(1);
                write_whole(&file, &block, offset)?;
            }
        }
        Ok(())
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..SEEKERS).map(|seed| scope.spawn(move || seeker(seed))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| Failure::new("a seeker panicked"))?)
    })
}

/// Measures the big file on one target.
pub fn run(visit: &mut Visit<'_>, material: Material) -> Result<(), Failure> {
    let [char_out, block_out, again, char_in, block_in, block_in_warm, seeks] = ids(material);
    let (bytes, part, supply) = (visit.scale.size, visit.scale.size / BYTEWISE, material.supply());
    let path = visit.own.join("file");
    let make = || open(&path, OFlags::RDWR | OFlags::CREATE | OFlags::TRUNC);
    visit.sample(char_out, timed(|| put_bytes(&make()?, &supply, part))?.0, part)?;
    visit.tidy(std::slice::from_ref(&path))?;
    visit.sample(block_out, timed(|| put_blocks(&make()?, &supply, bytes))?.0, bytes)?;
    visit.sample(again, timed(|| rewrite(&open(&path, OFlags::RDWR)?, bytes))?.0, bytes)?;
    let length = fs::metadata(&path).doing("looking at", &path)?.len();
    if length != bytes {
        return Err(Failure::new(format!("{} has {length} of {bytes} bytes", path.display())));
    }
    visit.cold()?;
    visit.sample(char_in, timed(|| get_bytes(&open(&path, OFlags::RDONLY)?, part))?.0, part)?;
    visit.cold()?;
    let (elapsed, file) = timed(|| {
        let file = open(&path, OFlags::RDONLY)?;
        get_blocks(&file, bytes).map(|()| file)
    })?;
    visit.sample(block_in, elapsed, bytes)?;
    visit.sample(block_in_warm, timed(|| get_blocks(&file, bytes))?.0, bytes)?;
    drop(file);
    visit.cold()?;
    let count = MOST_SEEKS.min(bytes >> 17).max(SEEKERS);
    visit.sample(seeks, timed(|| seek(&path, bytes, count))?.0, count)?;
    visit.tidy(&[path])
}

/// Returns bonnie++'s names: a number followed by letters, or letters followed by a number.
fn names(directory: &Path, count: u64, in_order: bool) -> Result<Vec<CString>, Failure> {
    let mut numbers = Numbers::new(count);
    let mut letters =
        || -> String { (0..7).map(|_| char::from(b'a' + u8::try_from(numbers.below(26)).unwrap_or(0))).collect() };
    let name = |number: u64| {
        if in_order { format!("{number:010}{}", letters()) } else { format!("{}{number:010}", letters()) }
    };
    let names: Vec<String> = (0..count).map(name).collect();
    names.iter().map(|name| files::terminated(&directory.join(name))).collect()
}

/// Measures the many files on one target.
pub fn run_files(visit: &mut Visit<'_>) -> Result<(), Failure> {
    let count = visit.scale.files;
    for (in_order, [create, stat, delete]) in [
        (true, ["sequential-create", "sequential-stat", "sequential-delete"]),
        (false, ["random-create", "random-stat", "random-delete"]),
    ] {
        let directory = visit.own.join(create);
        fs::create_dir(&directory).doing("creating", &directory)?;
        let names = names(&directory, count, in_order)?;
        visit.sample(create, timed(|| names.iter().try_for_each(|name| files::create_empty(name)))?.0, count)?;
        let order: Vec<CString> = match in_order {
            true => names,
            false => shuffled(count)
                .into_iter()
                .filter_map(|number| names.get(usize::try_from(number).ok()?).cloned())
                .collect(),
        };
        visit.cold()?;
        visit.sample(stat, timed(|| files::stat_all(&order))?.0, count)?;
        visit.sample(delete, timed(|| order.iter().try_for_each(|name| files::unlink(name)))?.0, count)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_written_rewritten_and_read() {
        let directory = tempfile::tempdir().unwrap();
        let (path, bytes) = (directory.path().join("file"), 1 << 20);
        let supply = Material::Text.supply();
        let file = open(&path, OFlags::RDWR | OFlags::CREATE).unwrap();
        put_bytes(&file, &supply, bytes).unwrap();
        let by_bytes = fs::read(&path).unwrap();
        assert_eq!(by_bytes.len() as u64, bytes);
        let sum: u64 = by_bytes.iter().map(|byte| u64::from(*byte)).sum();
        assert_eq!(get_bytes(&file, bytes), Ok(sum));
        put_blocks(&file, &supply, bytes).unwrap();
        let before = fs::read(&path).unwrap();
        rewrite(&file, bytes).unwrap();
        let after = fs::read(&path).unwrap();
        assert_eq!(before.iter().zip(&after).filter(|(old, new)| old != new).count() as u64, bytes / BLOCK as u64);
        get_blocks(&file, bytes).unwrap();
        assert!(get_blocks(&file, 2 * bytes).is_err());
        seek(&path, bytes, 30).unwrap();
    }

    #[test]
    fn names_are_in_order_or_not() {
        let text = |in_order| names(Path::new("/d"), 100, in_order).unwrap();
        assert!(text(true).is_sorted() && !text(false).is_sorted());
        assert!(text(true).iter().all(|name| name.as_bytes().len() == "/d/".len() + 17));
    }
}
