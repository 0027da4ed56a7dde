//! Many small files: the cost of names. One family of system calls per test, over full paths, in directory order.

use std::ffi::{CStr, CString};
use std::fs;
use std::os::{fd::OwnedFd, unix::ffi::OsStrExt};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use rustix::io::Errno;

use super::{Visit, finished, needs_making, repeated, timed};
use crate::failure::{Doing, Failure};
use crate::scale::Scale;

const PER_DIRECTORY: u64 = 1000;
const CONTENT: [u8; 1024] = [b'x'; 1024];
/// Bytes of a file that is created while the clock runs.
pub const SMALL: [u8; 100] = [b'y'; 100];

/// Makes the files for stat and read.
pub fn prepare(source: &Path, scale: &Scale) -> Result<(), Failure> {
    let directory = source.join("files");
    if !needs_making(&directory)? {
        return Ok(());
    }
    for first in (0..scale.files).step_by(PER_DIRECTORY as usize) {
        let part = directory.join(part_name(first));
        fs::create_dir(&part).doing("creating", &part)?;
        for number in first..scale.files.min(first + PER_DIRECTORY) {
            let path = part.join(format!("file-{number:07}"));
            fs::write(&path, CONTENT).doing("writing", &path)?;
        }
    }
    finished(&directory)
}

fn part_name(number: u64) -> String {
    format!("part-{:04}", number / PER_DIRECTORY)
}

/// Full paths of `count` files below `directory`, spread over parts as [`prepare`] does.
pub fn spread(directory: &Path, count: u64, word: &str) -> Result<Vec<CString>, Failure> {
    (0..count)
        .map(|number| terminated(&directory.join(part_name(number)).join(format!("{word}-{number:07}"))))
        .collect()
}

/// Full paths of `count` files in `directory` itself.
pub fn flat(directory: &Path, count: u64, word: &str) -> Result<Vec<CString>, Failure> {
    (0..count).map(|number| terminated(&directory.join(format!("{word}-{number:07}")))).collect()
}

/// Returns the path as a C string.
pub fn terminated(path: &Path) -> Result<CString, Failure> {
    CString::new(path.as_os_str().as_bytes())
        .map_err(|_| Failure::new(format!("{} contains a zero byte", path.display())))
}

fn failed(doing: &str, path: &CStr, error: Errno) -> Failure {
    Failure::new(format!("{doing} {}: {error}", path.to_string_lossy()))
}

/// Calls `stat` for each path.
pub fn stat_all(paths: &[CString]) -> Result<(), Failure> {
    for path in paths {
        rustix::fs::statat(CWD, path.as_c_str(), AtFlags::empty()).map_err(|error| failed("stat of", path, error))?;
    }
    Ok(())
}

fn stat_missing(paths: &[CString]) -> Result<(), Failure> {
    for path in paths {
        match rustix::fs::statat(CWD, path.as_c_str(), AtFlags::empty()) {
            Err(Errno::NOENT) => {}
            Err(error) => return Err(failed("stat of", path, error)),
            Ok(_) => return Err(Failure::new(format!("{} exists", path.to_string_lossy()))),
        }
    }
    Ok(())
}

/// Opens a file of this many bytes, reads and closes it.
pub fn read(path: &CStr, length: usize) -> Result<(), Failure> {
    let mut content = [0_u8; 4096];
    let file = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
    let file = file.map_err(|error| failed("opening", path, error))?;
    match rustix::io::read(&file, &mut content).map_err(|error| failed("reading", path, error))? {
        count if count == length => Ok(()),
        count => Err(Failure::new(format!("read {count} bytes of {}", path.to_string_lossy()))),
    }
}

fn read_all(paths: &[CString]) -> Result<(), Failure> {
    paths.iter().try_for_each(|path| read(path, CONTENT.len()))
}

/// Creates a file with [`SMALL`] in it.
pub fn create(path: &CStr) -> Result<(), Failure> {
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
    let file =
        rustix::fs::open(path, flags, Mode::from_raw_mode(0o644)).map_err(|error| failed("creating", path, error))?;
    put(&file, path)
}

/// Opens a file, appends [`SMALL`] to it and closes it.
pub fn append(path: &CStr) -> Result<(), Failure> {
    let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty()).map_err(|error| failed("opening", path, error))?;
    put(&file, path)
}

fn put(file: &OwnedFd, path: &CStr) -> Result<(), Failure> {
    let count = rustix::io::write(file, &SMALL).map_err(|error| failed("writing", path, error))?;
    if count == SMALL.len() {
        Ok(())
    } else {
        Err(Failure::new(format!("wrote {count} bytes of {}", path.to_string_lossy())))
    }
}

/// Creates an empty file.
pub fn create_empty(path: &CStr) -> Result<(), Failure> {
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::from_raw_mode(0o644)).map(drop).map_err(|error| failed("creating", path, error))
}

/// Removes a file.
pub fn unlink(path: &CStr) -> Result<(), Failure> {
    rustix::fs::unlink(path).map_err(|error| failed("unlinking", path, error))
}

/// Creates, writes, closes and unlinks each before the next.
pub fn churn(paths: &[CString]) -> Result<(), Failure> {
    paths.iter().try_for_each(|path| {
        create(path)?;
        unlink(path)
    })
}

/// Measures the group on one target.
pub fn run(visit: &mut Visit<'_>) -> Result<(), Failure> {
    run_lookups(visit)?;
    if visit.reads_only { Ok(()) } else { run_changes(visit, visit.scale.files) }
}

/// Measures operations that only read the files made by [`prepare`].
pub fn run_lookups(visit: &mut Visit<'_>) -> Result<(), Failure> {
    let count = visit.scale.files;
    let directory = visit.shared("files");
    let (paths, missing) = (spread(&directory, count, "file")?, spread(&directory, count, "none")?);
    visit.cold()?;
    visit.sample("stat-first", timed(|| stat_all(&paths))?.0, count)?;
    visit.sample("stat-again", repeated(|| stat_all(&paths))?, count)?;
    visit.cold()?;
    visit.sample("missing-first", timed(|| stat_missing(&missing))?.0, count)?;
    visit.sample("missing-again", repeated(|| stat_missing(&missing))?, count)?;
    visit.cold()?;
    visit.sample("open-first", timed(|| read_all(&paths))?.0, count)?;
    visit.sample("open-again", repeated(|| read_all(&paths))?, count)?;
    // Each file has been read since its attributes were cached.
    visit.sample("stat-read", timed(|| stat_all(&paths))?.0, count)
}

/// Measures operations that change files in the visit's own directory.
pub fn run_changes(visit: &Visit<'_>, count: u64) -> Result<(), Failure> {
    let (olds, news) = (flat(&visit.own, count, "old")?, flat(&visit.own, count, "new")?);
    visit.sample("create", timed(|| olds.iter().try_for_each(|path| create(path)))?.0, count)?;
    visit.sample("append", timed(|| olds.iter().try_for_each(|path| append(path)))?.0, count)?;
    let rename = |(old, new): (&CString, &CString)| {
        rustix::fs::rename(old.as_c_str(), new.as_c_str()).map_err(|error| failed("renaming", old, error))
    };
    visit.sample("rename", timed(|| olds.iter().zip(&news).try_for_each(rename))?.0, count)?;
    visit.sample("unlink", timed(|| news.iter().try_for_each(|path| unlink(path)))?.0, count)?;
    visit.sample("churn", repeated(|| churn(&olds))?, count)
}
