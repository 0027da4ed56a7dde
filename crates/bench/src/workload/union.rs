//! Two branches shown as one tree: listings of names that are on both, first writes, data of either branch.
//!
//! ```text
//! SOURCE/lower/{long,names,files,large}   the larger branch; what `direct` shows
//! SOURCE/upper/{long,names}               the smaller branch of the listings
//! OWN/upper/own                           a new upper branch for each visit of the other groups
//! ```

use std::ffi::CString;
use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Dir, Mode, OFlags};

use super::big_file::{Buffer, flush, forward, make, open, random, read_at, write_at};
use super::listing::program;
use super::{Visit, files, finished, needs_making, repeated, shuffled, timed};
use crate::failure::{Doing, Failure};
use crate::memory;
use crate::scale::Scale;

const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;
/// Size of the original document's first test.
const LONG_NAMES: u64 = 4096;
const LONG: usize = 250;
/// Minimum number of names in the smaller branch for which memory per name is computed.
const ENOUGH_NAMES: u64 = 50_000;

/// Returns the branch that `direct` shows.
pub fn lower(source: &Path) -> PathBuf {
    source.join("lower")
}

/// Returns the upper branch of the listings.
pub fn upper(source: &Path) -> PathBuf {
    source.join("upper")
}

/// Distribution of the names of a directory to two branches, by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Spread {
    all: u64,
    /// Names with smaller numbers are on the upper branch.
    upper: u64,
    /// Names from this number on are on the lower branch.
    lower_from: u64,
}

impl Spread {
    /// A third of the names is on the upper branch, half of these also on the lower one.
    fn many(all: u64) -> Self {
        Self { all, upper: all / 3, lower_from: all / 6 }
    }

    fn long() -> Self {
        Self { all: LONG_NAMES, upper: LONG_NAMES, lower_from: 0 }
    }

    fn lower(self) -> u64 {
        self.all - self.lower_from
    }
}

fn long_name(number: u64) -> String {
    format!("{number:04}-{}", "long-name-".repeat(LONG)).chars().take(LONG).collect()
}

/// Returns a name of six characters, unique for numbers below 60 million.
fn short_name(number: u64) -> String {
    // An odd factor below a power of two times a modulus coprime to it: neighbours are far apart.
    let mut rest = number * 7_919_317 % 36_u64.pow(5) + number / 36_u64.pow(5) * 36_u64.pow(5);
    let mut name = [b'0'; 6];
    for place in name.iter_mut().rev() {
        let digit = u8::try_from(rest % 36).unwrap_or(0);
        *place = if digit < 10 { b'0' + digit } else { b'a' + (digit - 10) };
        rest /= 36;
    }
    name.iter().map(|byte| char::from(*byte)).collect()
}

/// Makes empty files of these numbers, in random order.
fn fill(directory: &Path, numbers: std::ops::Range<u64>, name: fn(u64) -> String) -> Result<(), Failure> {
    let place = rustix::fs::open(directory, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
    let place = place.doing("opening", directory)?;
    for number in shuffled(numbers.end - numbers.start) {
        let name = name(numbers.start + number);
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
        rustix::fs::openat(&place, name.as_str(), flags, Mode::from_raw_mode(0o644))
            .doing("creating", &directory.join(name))?;
    }
    Ok(())
}

fn prepare_names(source: &Path, word: &str, spread: Spread, name: fn(u64) -> String) -> Result<(), Failure> {
    for (branch, numbers) in [(upper(source), 0..spread.upper), (lower(source), spread.lower_from..spread.all)] {
        fs::create_dir_all(&branch).doing("creating", &branch)?;
        let directory = branch.join(word);
        if needs_making(&directory)? {
            fill(&directory, numbers, name)?;
            finished(&directory)?;
        }
    }
    Ok(())
}

/// Makes the long names.
pub fn prepare_long(source: &Path) -> Result<(), Failure> {
    prepare_names(source, "long", Spread::long(), long_name)
}

/// Makes the many names.
pub fn prepare_many(source: &Path, scale: &Scale) -> Result<(), Failure> {
    prepare_names(source, "names", Spread::many(scale.names), short_name)
}

/// Makes the small files of the lower branch.
pub fn prepare_files(source: &Path, scale: &Scale) -> Result<(), Failure> {
    let lower = lower(source);
    fs::create_dir_all(&lower).doing("creating", &lower)?;
    files::prepare(&lower, scale)
}

/// Makes a file of that size on the lower branch.
pub fn prepare_large(source: &Path, name: &str, bytes: u64, buffer: &mut Buffer) -> Result<(), Failure> {
    let lower = lower(source);
    fs::create_dir_all(&lower).doing("creating", &lower)?;
    make(&lower.join(name), bytes, buffer)
}

/// Reads a directory; returns the time until the first name, and the number of names.
fn first_entry(directory: &Path) -> Result<(std::time::Duration, u64), Failure> {
    let failed = |error: rustix::io::Errno| Failure::new(format!("listing {}: {error}", directory.display()));
    let (elapsed, mut names) = timed(|| {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let place: OwnedFd = rustix::fs::openat(CWD, directory, flags, Mode::empty()).map_err(failed)?;
        let mut names = Dir::new(place).map_err(failed)?;
        names.next().transpose().map_err(failed)?;
        Ok(names)
    })?;
    // The first entry was `.`, or another one instead.
    let mut count = 1;
    while names.next().transpose().map_err(failed)?.is_some() {
        count += 1;
    }
    Ok((elapsed, count))
}

/// Fails if a listing lacks a name, or has one twice.
fn expect_names(directory: &Path, found: u64, expected: u64) -> Result<(), Failure> {
    // `.` and `..`
    let found = found.saturating_sub(2);
    if found == expected {
        return Ok(());
    }
    Err(Failure::new(format!("{} shows {found} of {expected} names", directory.display())))
}

/// Measures the long names on one target.
pub fn run_long(visit: &mut Visit<'_>) -> Result<(), Failure> {
    let directory = visit.shared("long");
    visit.cold()?;
    expect_names(&directory, first_entry(&directory)?.1, LONG_NAMES)?;
    let tests = [["long-u-first", "long-u-again"], ["long-l-first", "long-l-again"]];
    listings(visit, &directory, tests, LONG_NAMES, || Ok(()))
}

/// Measures the many names on one target.
pub fn run_many(visit: &mut Visit<'_>) -> Result<(), Failure> {
    let (directory, spread) = (visit.shared("names"), Spread::many(visit.scale.names));
    let expected = if visit.direct { spread.lower() } else { spread.all };
    visit.cold()?;
    let (elapsed, found) = first_entry(&directory)?;
    expect_names(&directory, found, expected)?;
    visit.sample("entry-first", elapsed, 1)?;
    let before = std::cell::Cell::new(None);
    let tests = [["names-u-first", "names-u-again"], ["names-l-first", "names-l-again"]];
    listings(visit, &directory, tests, expected, || {
        match (before.get(), memory::of_daemon(&visit.root)?) {
            // The kernel serves the target: there is no daemon.
            (_, None) => Ok(()),
            (None, Some(bytes)) => {
                before.set(Some(bytes));
                visit.count("memory-idle", bytes)
            }
            // For fewer names, the constant cost of a listing would dominate.
            (Some(_), Some(_)) if spread.upper < ENOUGH_NAMES => Ok(()),
            (Some(before), Some(bytes)) => {
                visit.count("memory-per-name", bytes.saturating_sub(before).div_ceil(spread.upper))
            }
        }
    })
}

/// Runs the real `ls`, without and with attributes, each first and again; `look` is called before and after the
/// former.
fn listings(
    visit: &Visit<'_>,
    directory: &Path,
    [names, attributes]: [[&'static str; 2]; 2],
    count: u64,
    look: impl Fn() -> Result<(), Failure>,
) -> Result<(), Failure> {
    let list = |arguments: &[&str]| program("ls", arguments, directory);
    let (plain, long) = (["-U", "--color=never"], ["-l", "--color=never"]);
    visit.cold()?;
    look()?;
    visit.sample(names[0], timed(|| list(&plain))?.0, count)?;
    visit.sample(names[1], repeated(|| list(&plain))?, count)?;
    look()?;
    visit.cold()?;
    visit.sample(attributes[0], timed(|| list(&long))?.0, count)?;
    visit.sample(attributes[1], repeated(|| list(&long))?, count)
}

/// Measures changes on one target.
pub fn run_changes(visit: &mut Visit<'_>) -> Result<(), Failure> {
    let count = visit.scale.files;
    files::run_changes(visit, count)?;
    if !visit.copies_up {
        return Ok(());
    }
    visit.tidy(&[])?;
    let originals = files::spread(&visit.shared("files"), count, "file")?;
    let copies = files::flat(&visit.own, count, "copy")?;
    let elapsed = match visit.direct {
        // Without a union, the original is copied, and the copy changed.
        true => {
            timed(|| originals.iter().zip(&copies).try_for_each(|(original, copy)| copy_and_change(original, copy)))?.0
        }
        false => timed(|| originals.iter().try_for_each(change))?.0,
    };
    visit.sample("copy-up-small", elapsed, count)
}

fn path(text: &CString) -> &Path {
    use std::os::unix::ffi::OsStrExt;
    Path::new(std::ffi::OsStr::from_bytes(text.as_bytes()))
}

fn copy_and_change(original: &CString, copy: &CString) -> Result<(), Failure> {
    fs::copy(path(original), path(copy)).doing("copying", path(original))?;
    change(copy)
}

/// Opens a file, overwrites its first byte and closes it.
fn change(file: &CString) -> Result<(), Failure> {
    write_at(&open(path(file), OFlags::WRONLY)?, b"z", &[0])
}

/// Measures the first write to a large file on one target.
pub fn run_copy_up(visit: &mut Visit<'_>) -> Result<(), Failure> {
    let (bytes, original, copy) = (visit.scale.copy, visit.shared("copied-up"), visit.own.join("copy"));
    let elapsed = match visit.direct {
        true => {
            let (from, to) = (original.to_string_lossy().into_owned(), &copy);
            timed(|| program("cp", &[&from], to))?.0
        }
        false => {
            let file = open(&original, OFlags::RDWR)?;
            timed(|| write_at(&file, b"z", &[0]))?.0
        }
    };
    visit.sample("copy-up-big", elapsed, bytes)?;
    let copied = if visit.direct { &copy } else { &original };
    let length = fs::metadata(copied).doing("looking at", copied)?.len();
    if length == bytes {
        Ok(())
    } else {
        Err(Failure::new(format!("{} has {length} of {bytes} bytes", copied.display())))
    }
}

/// Measures warm data on one target.
pub fn run_data(visit: &mut Visit<'_>) -> Result<(), Failure> {
    let bytes = visit.scale.cache;
    let original = open(&visit.shared("data"), OFlags::RDONLY)?;
    read_at(&original, visit.buffer.record(MIB), &forward(bytes, MIB))?;
    let reads = [
        ("lower-read-1m", MIB, forward(bytes, MIB)),
        ("lower-read-4k", 4 * KIB, forward(bytes, 4 * KIB)),
        ("lower-random-read-4k", 4 * KIB, random(bytes, 4 * KIB)),
    ];
    for (test, record, offsets) in reads {
        let memory = visit.buffer.record(record);
        let elapsed = repeated(|| read_at(&original, memory, &offsets))?;
        visit.sample(test, elapsed, bytes)?;
    }
    let path = visit.own.join("data");
    make(&path, bytes, visit.buffer)?;
    let file = open(&path, OFlags::RDWR)?;
    for (test, record) in [("upper-read-1m", MIB), ("upper-read-4k", 4 * KIB)] {
        let (memory, offsets) = (visit.buffer.record(record), forward(bytes, record));
        let elapsed = repeated(|| read_at(&file, memory, &offsets))?;
        visit.sample(test, elapsed, bytes)?;
    }
    for (test, record) in [("upper-write-1m", MIB), ("upper-write-4k", 4 * KIB)] {
        let (memory, offsets) = (visit.buffer.record(record), forward(bytes, record));
        let elapsed = repeated(|| write_at(&file, memory, &offsets))?;
        visit.sample(test, elapsed, bytes)?;
        flush(&file)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn names_are_as_long_as_the_documents_and_differ() {
        let long: HashSet<String> = (0..LONG_NAMES).map(long_name).collect();
        assert!(long.len() == 4096 && long.iter().all(|name| name.len() == 250));
        let short: HashSet<String> = (0..200_000).chain([60_466_175, 60_466_176, 90_000_000]).map(short_name).collect();
        assert!(short.len() == 200_003 && short.iter().all(|name| name.len() == 6));
    }

    #[test]
    fn a_third_is_above_and_half_of_that_below_too() {
        let spread = Spread::many(300_000);
        assert_eq!((spread.upper, spread.lower(), spread.upper - spread.lower_from), (100_000, 250_000, 50_000));
        let directory = tempfile::tempdir().unwrap();
        prepare_names(directory.path(), "names", Spread::many(60), short_name).unwrap();
        let names = |branch: PathBuf| -> HashSet<_> {
            fs::read_dir(branch.join("names")).unwrap().map(|entry| entry.unwrap().file_name()).collect()
        };
        let (above, below) = (names(upper(directory.path())), names(lower(directory.path())));
        assert_eq!((above.len(), below.len(), above.union(&below).count()), (20, 50, 60));
    }

    #[test]
    fn a_listing_that_lacks_a_name_is_no_result() {
        let directory = tempfile::tempdir().unwrap();
        fill(directory.path(), 5..12, short_name).unwrap();
        let found = first_entry(directory.path()).unwrap().1;
        assert_eq!(expect_names(directory.path(), found, 7), Ok(()));
        assert!(expect_names(directory.path(), found, 8).unwrap_err().to_string().contains("7 of 8"));
    }
}
