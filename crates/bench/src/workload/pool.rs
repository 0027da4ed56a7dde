//! Operations in which copy-on-write file systems are weak or strong: small writes into large files, syncs of small
//! appends, small files, one at a time and sixteen at once, snapshots, and recovery after a crash.

use std::ffi::{CStr, CString};
use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use rustix::fs::{Mode, OFlags};

use super::big_file::{flush, open, random};
use super::material::Supply;
use super::{Material, Visit, files, timed};
use crate::failure::{Doing, Failure};
use crate::mounted::{DATA, Version};

const SMALL: u64 = 4 << 10;
/// How often a file is overwritten in one sample, with and without snapshots.
const PASSES: u64 = 3;
const MIB: u64 = 1 << 20;
/// Bytes of a small file.
const CONTENT: usize = 1000;
const WORKERS: usize = 16;
/// Size of the large file with snapshots, as a fraction of the one that is overwritten.
const PART: u64 = 8;
/// Number of files that are synced one by one before the crash.
const SYNCED: u64 = 100;

pub(super) fn make(path: &Path, bytes: u64, supply: &Supply) -> Result<OwnedFd, Failure> {
    let file = open(path, OFlags::RDWR | OFlags::CREATE | OFlags::TRUNC)?;
    for offset in (0..bytes).step_by(MIB as usize) {
        put(&file, supply.block(offset, MIB as usize), offset)?;
    }
    flush(&file)?;
    Ok(file)
}

pub(super) fn put(file: &OwnedFd, block: &[u8], offset: u64) -> Result<(), Failure> {
    let count = rustix::io::pwrite(file, block, offset)
        .map_err(|error| Failure::new(format!("writing at {offset}: {error}")))?;
    if count == block.len() {
        Ok(())
    } else {
        Err(Failure::new(format!("wrote {count} of {} bytes at {offset}", block.len())))
    }
}

/// Writes blocks at the offsets, each with new content, and syncs once.
fn overwrite(file: &OwnedFd, supply: &Supply, offsets: &[u64], round: u64) -> Result<(), Failure> {
    for (number, offset) in offsets.iter().enumerate() {
        put(file, supply.block((number as u64 + 3 * round) * SMALL, SMALL as usize), *offset)?;
    }
    flush(file)
}

/// Measures small writes on one target.
pub fn run_writes(visit: &mut Visit<'_>) -> Result<(), Failure> {
    let (bytes, supply) = (visit.scale.overwrite, Material::Random.supply());
    let path = visit.own.join("large");
    let file = make(&path, bytes, &supply)?;
    let offsets = random(bytes, SMALL);
    visit.sample("overwrite", timed(|| overwrite(&file, &supply, &offsets, 1))?.0, offsets.len() as u64)?;
    drop(file);
    visit.tidy(&[path])?;
    let path = visit.own.join("log");
    let file = open(&path, OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND)?;
    let count = visit.scale.fsyncs;
    let appended = timed(|| {
        (0..count).try_for_each(|number| {
            let written = rustix::io::write(&file, supply.block(number * SMALL, SMALL as usize));
            let written = written.map_err(|error| Failure::new(format!("appending: {error}")))? as u64;
            if written == SMALL {
                flush(&file)
            } else {
                Err(Failure::new(format!("appended {written} of {SMALL} bytes")))
            }
        })
    })?;
    visit.sample("append-fsync", appended.0, count)?;
    super::appends::expect_length(&path, count * SMALL)?;
    drop(file);
    visit.tidy(&[path])
}

fn write_small(path: &CStr, content: &[u8]) -> Result<(), Failure> {
    let failed = |error: rustix::io::Errno| Failure::new(format!("writing {}: {error}", path.to_string_lossy()));
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::from_raw_mode(0o644)).map_err(failed)?;
    let count = rustix::io::write(&file, content).map_err(failed)?;
    if count == content.len() {
        Ok(())
    } else {
        Err(Failure::new(format!("wrote {count} bytes of {}", path.to_string_lossy())))
    }
}

/// Calls `work` for each name, in this thread or in [`WORKERS`] threads, each with a contiguous part.
fn each(
    names: &[CString],
    workers: usize,
    work: impl Fn(&CStr) -> Result<(), Failure> + Sync,
) -> Result<Duration, Failure> {
    if workers == 1 {
        return Ok(timed(|| names.iter().try_for_each(|name| work(name)))?.0);
    }
    let (work, share) = (&work, names.len().div_ceil(workers).max(1));
    let all = || {
        thread::scope(|scope| {
            let threads: Vec<_> = names
                .chunks(share)
                .map(|part| scope.spawn(move || part.iter().try_for_each(|name| work(name))))
                .collect();
            threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| Failure::new("a worker panicked"))?)
        })
    };
    Ok(timed(all)?.0)
}

/// Measures small files on one target.
pub fn run_files(visit: &mut Visit<'_>) -> Result<(), Failure> {
    let (count, supply) = (visit.scale.files, Material::Text.supply());
    let content = supply.block(0, CONTENT);
    for (workers, [create, read, unlink]) in [
        (1, ["small-create", "small-open", "small-unlink"]),
        (WORKERS, ["small-create-16", "small-open-16", "small-unlink-16"]),
    ] {
        let directory = visit.own.join(create);
        fs::create_dir(&directory).doing("creating", &directory)?;
        let names = files::flat(&directory, count, "small")?;
        visit.sample(create, each(&names, workers, |name| write_small(name, content))?, count)?;
        visit.tidy(&[])?;
        visit.sample(read, each(&names, workers, |name| files::read(name, CONTENT))?, count)?;
        if workers == 1 {
            visit.sample("small-stat-read", timed(|| files::stat_all(&names))?.0, count)?;
            visit.sample("small-append", each(&names, workers, files::append)?, count)?;
        }
        visit.sample(unlink, each(&names, workers, files::unlink)?, count)?;
        visit.tidy(&[])?;
    }
    Ok(())
}

/// Measures snapshots on one target: of a tree of small files and a large one.
pub fn run_versions(visit: &mut Visit<'_>) -> Result<(), Failure> {
    let (count, bytes, supply) = (visit.scale.files, visit.scale.overwrite / PART, Material::Random.supply());
    let data = visit.own.join(DATA);
    fs::create_dir(&data).doing("creating", &data)?;
    files::flat(&data, count, "small")?.iter().try_for_each(|name| write_small(name, supply.block(0, CONTENT)))?;
    let file = make(&data.join("large"), bytes, &supply)?;
    visit.tidy(&[])?;
    visit.sample("snapshot", visit.version(Version::Snapshot("first".to_owned()))?, 1)?;
    visit.sample("clone", visit.version(Version::Clone { of: "first".to_owned(), name: "copy".to_owned() })?, 1)?;
    visit.version(Version::DestroyClone("copy".to_owned()))?;
    visit.tidy(&[])?;
    visit.sample("snapshot-destroy", visit.version(Version::DestroySnapshot("first".to_owned()))?, 1)?;
    visit.tidy(&[])?;
    let offsets = random(bytes, SMALL);
    // A single pass depends mostly on the state of the file's pages before it.
    let change = |visit: &mut Visit<'_>, test: &'static str, from: u64| {
        overwrite(&file, &supply, &offsets, from)?;
        let mut passes = (1..=PASSES).map(|pass| from + pass);
        let time = timed(|| passes.try_for_each(|pass| overwrite(&file, &supply, &offsets, pass)))?.0;
        visit.sample(test, time, offsets.len() as u64 * PASSES)
    };
    change(visit, "snapshot-writes-none", 1)?;
    if visit.has_snapshots {
        for number in 0..visit.scale.snapshots {
            // Each snapshot holds a change of its own.
            let place = number % (bytes / SMALL).max(1) * SMALL;
            put(&file, supply.block(number * SMALL, SMALL as usize), place)?;
            visit.version(Version::Snapshot(format!("many-{number}")))?;
        }
    }
    visit.tidy(&[])?;
    change(visit, "snapshot-writes-many", 2 + PASSES)
}

/// Measures the recovery after a crash on one target, and checks that everything synced is intact.
pub fn run_recovery(visit: &mut Visit<'_>) -> Result<(), Failure> {
    let supply = Material::Random.supply();
    let name = |number: u64| -> PathBuf { visit.own.join(format!("synced-{number}")) };
    for number in 0..SYNCED {
        let file = open(&name(number), OFlags::WRONLY | OFlags::CREATE)?;
        put(&file, supply.block(number * SMALL, SMALL as usize), 0)?;
        flush(&file)?;
    }
    // Unsynced data, so that there is a state to be discarded.
    let file = open(&visit.own.join("not-synced"), OFlags::WRONLY | OFlags::CREATE)?;
    (0..16).try_for_each(|number| put(&file, supply.block(number * MIB, MIB as usize), number * MIB))?;
    drop(file);
    visit.sample("recovery", visit.crash()?, 1)?;
    for number in 0..SYNCED {
        let path = name(number);
        let content = fs::read(&path).doing("reading, after a crash,", &path)?;
        if content != supply.block(number * SMALL, SMALL as usize) {
            return Err(Failure::new(format!(
                "{} was synced, and after a crash it is not what was written",
                path.display()
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_workers_do_each_once() {
        let directory = tempfile::tempdir().unwrap();
        let names = files::flat(directory.path(), 100, "small").unwrap();
        for workers in [1, WORKERS] {
            each(&names, workers, |name| write_small(name, &[7; CONTENT])).unwrap();
            assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 100);
            assert!(each(&names, workers, |name| write_small(name, &[7; CONTENT])).is_err(), "they exist");
            each(&names, workers, |name| files::read(name, CONTENT)).unwrap();
            each(&names, workers, files::unlink).unwrap();
        }
    }

    #[test]
    fn overwriting_changes_every_block() {
        let directory = tempfile::tempdir().unwrap();
        let (path, supply) = (directory.path().join("large"), Material::Random.supply());
        let file = make(&path, 4 * MIB, &supply).unwrap();
        let before = fs::read(&path).unwrap();
        overwrite(&file, &supply, &random(4 * MIB, SMALL), 1).unwrap();
        let after = fs::read(&path).unwrap();
        let same =
            before.chunks(SMALL as usize).zip(after.chunks(SMALL as usize)).filter(|(old, new)| old == new).count();
        assert!(before.len() == after.len() && same <= 2, "{same} blocks are the same");
    }
}
