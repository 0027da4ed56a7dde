//! Directories of millions of names: made, and listed by the real `ls`, cold and warm.

use std::ffi::CString;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{Dir, Mode, OFlags};

use super::big_file::open;
use super::listing::program;
use super::material::{Numbers, Supply};
use super::{Material, Visit, timed};
use crate::clock::{self, Deadline};
use crate::failure::{Doing, Failure};

/// Size of a file in bytes; [`MIXED`] are the smallest and largest of mixed sizes.
const SMALL: usize = 100;
const MIXED: [u64; 2] = [50_000, 500_000];
/// The first and the last 1/[`PARTS`] of the files show whether creation gets slower.
const PARTS: u64 = 16;
/// Number of commits that a reader follows.
const FOLLOWED: u32 = 3;
/// A pool in a bucket is idle when nothing has changed for this long: obsolete objects are kept for ten minutes,
/// and removed after the next commit.
const REST: Duration = Duration::from_secs(750);
const REST_MOST: Duration = Duration::from_secs(3600);
const LOOKED: Duration = Duration::from_secs(5);

fn failed(doing: &str, number: u64, error: rustix::io::Errno) -> Failure {
    Failure::new(format!("{doing} number {number}: {error}"))
}

/// Returns the size of a file in bytes.
fn length(number: u64, mixed: bool) -> usize {
    let [least, most] = MIXED;
    let bytes = if mixed { least + Numbers::new(number).below(most - least) } else { SMALL as u64 };
    usize::try_from(bytes).unwrap_or(SMALL)
}

/// Makes the files `numbers` in `directory`.
fn make(
    directory: &Path,
    numbers: std::ops::Range<u64>,
    name: impl Fn(u64) -> Result<CString, Failure>,
    supply: &Supply,
    mixed: bool,
) -> Result<Duration, Failure> {
    let place = open(directory, OFlags::RDONLY | OFlags::DIRECTORY)?;
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
    let names: Vec<CString> = numbers.clone().map(name).collect::<Result<_, _>>()?;
    let all = || {
        numbers.zip(&names).try_for_each(|(number, name)| {
            let file = rustix::fs::openat(&place, name.as_c_str(), flags, Mode::from_raw_mode(0o644));
            let file = file.map_err(|error| failed("creating file", number, error))?;
            let content = supply.block(number * MIXED[1], length(number, mixed));
            let count = rustix::io::write(&file, content).map_err(|error| failed("writing file", number, error))?;
            if count == content.len() {
                Ok(())
            } else {
                Err(Failure::new(format!("wrote {count} bytes of file number {number}")))
            }
        })
    };
    Ok(timed(all)?.0)
}

fn name(number: u64) -> Result<CString, Failure> {
    CString::new(format!("measurement-{number:08}.dat")).map_err(|_| Failure::new("a name with a zero byte"))
}

/// Returns a name unrelated to the previous one, as in caches and mail directories.
fn unrelated_name(number: u64) -> Result<CString, Failure> {
    CString::new(format!("{:016x}", Numbers::new(number).next())).map_err(|_| Failure::new("a name with a zero byte"))
}

fn make_directories(directory: &Path, count: u64) -> Result<Duration, Failure> {
    let place = open(directory, OFlags::RDONLY | OFlags::DIRECTORY)?;
    let names: Vec<CString> = (0..count).map(name).collect::<Result<_, _>>()?;
    let all = || {
        (0..).zip(&names).try_for_each(|(number, name)| {
            let made = rustix::fs::mkdirat(&place, name.as_c_str(), Mode::from_raw_mode(0o755));
            made.map_err(|error| failed("creating directory", number, error))
        })
    };
    Ok(timed(all)?.0)
}

/// Returns the used bytes of the file system, as it reports them.
fn used(path: &Path) -> Result<u64, Failure> {
    let file = open(path, OFlags::RDONLY | OFlags::DIRECTORY)?;
    rustix::fs::syncfs(&file).doing("flushing", path)?;
    let room = rustix::fs::fstatvfs(&file).doing("asking for the space of", path)?;
    Ok(room.f_blocks.saturating_sub(room.f_bfree).saturating_mul(room.f_frsize))
}

/// Returns the allocated bytes of the image.
fn image_bytes(host: &Path) -> Result<u64, Failure> {
    let image = host.join("image");
    match fs::metadata(&image) {
        Ok(data) => Ok(data.blocks() * 512),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(0),
        Err(error) => Err(Failure::io("looking at", &image, error)),
    }
}

/// Fails if the directory lacks a name, or shows one twice.
fn expect(directory: &Path, count: u64) -> Result<(), Failure> {
    let failed = |error: rustix::io::Errno| Failure::new(format!("listing {}: {error}", directory.display()));
    let mut names = Dir::new(open(directory, OFlags::RDONLY | OFlags::DIRECTORY)?).map_err(failed)?;
    let mut found = 0_u64;
    while names.next().transpose().map_err(failed)?.is_some() {
        found += 1;
    }
    // `.` and `..`
    let found = found.saturating_sub(2);
    if found == count {
        Ok(())
    } else {
        Err(Failure::new(format!("{} shows {found} of {count} names", directory.display())))
    }
}

/// Measures the two listings of the original document, each cold and warm.
fn listings(visit: &Visit<'_>, directory: &Path, tests: [&'static str; 4], count: u64) -> Result<(), Failure> {
    let [long_cold, long_warm, plain_cold, plain_warm] = tests;
    // The target is already cold.
    let list = |words: &[&str]| -> Result<Duration, Failure> { Ok(timed(|| program("ls", words, directory))?.0) };
    visit.sample(long_cold, list(&["-lht", "--color=never"])?, count)?;
    visit.sample(long_warm, list(&["-lht", "--color=never"])?, count)?;
    visit.cold()?;
    visit.sample(plain_cold, list(&["-1U", "--color=never"])?, count)?;
    visit.sample(plain_warm, list(&["-1U", "--color=never"])?, count)?;
    expect(directory, count)
}

/// Measures the files on one target.
pub fn run_files(visit: &mut Visit<'_>) -> Result<(), Failure> {
    let (count, mixed, supply) = (visit.scale.files, visit.scale.mixed, Material::Text.supply());
    let directory = visit.own.join("many");
    let (before, image_before) = (used(&visit.own)?, image_bytes(&visit.bounds.host)?);
    fs::create_dir(&directory).doing("creating", &directory)?;
    let part = (count / PARTS).max(1);
    let begin = make(&directory, 0..part, name, &supply, mixed)?;
    let middle = make(&directory, part..count.saturating_sub(part).max(part), name, &supply, mixed)?;
    let end = make(&directory, count.saturating_sub(part).max(part)..count, name, &supply, mixed)?;
    visit.sample("many-create", begin + middle + end, count)?;
    visit.sample("many-create-begin", begin, part)?;
    visit.sample("many-create-end", end, part)?;
    let created = visit.daemon_memory()?;
    // Dirty data are not counted yet, and servers behind FUSE get no syncfs.
    visit.cold()?;
    visit.count("many-used", used(&visit.own)?.saturating_sub(before))?;
    visit.count("many-image", image_bytes(&visit.bounds.host)?.saturating_sub(image_before))?;
    listings(visit, &directory, ["many-lht-cold", "many-lht-warm", "many-u-cold", "many-u-warm"], count)?;
    memory(visit, "many-memory", created)
}

/// Measures files in a bucket on one target.
pub fn run_in_bucket(visit: &mut Visit<'_>) -> Result<(), Failure> {
    // Bare objects have no directories.
    if visit.only_objects {
        return Ok(());
    }
    let (count, supply) = (visit.scale.files, Material::Text.supply());
    let directory = visit.own.join("many");
    fs::create_dir(&directory).doing("creating", &directory)?;
    let make = || {
        make(&directory, 0..count, name, &supply, false)?;
        visit.tidy(&[])
    };
    visit.sample("object-many-create", timed(make)?.0, count)?;
    let milliseconds = |elapsed: Duration| u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX);
    if let Some(objects) = visit.objects()? {
        visit.count("object-many-objects", objects)?;
        if visit.scale.rests {
            visit.count("object-many-rest", resting(visit)?)?;
        }
    }
    let imported = visit.cold_again()?;
    let list = || Ok(timed(|| program("ls", &["-lht", "--color=never"], &directory))?.0);
    let cold = list()?;
    visit.sample("object-many-first", cold, count)?;
    visit.sample("object-many-again", list()?, count)?;
    expect(&directory, count)?;
    visit.count("object-many-listing", milliseconds(cold))?;
    if visit.objects()?.is_none() {
        return Ok(());
    }
    visit.count("object-many-import", milliseconds(imported))?;
    (0..FOLLOWED).try_for_each(|number| {
        let after = visit.follow(&format!("followed-{number}"))?;
        visit.count("object-many-follow", milliseconds(after))
    })
}

/// Returns the number of objects when nothing has changed for longer than obsolete objects are kept.
fn resting(visit: &Visit<'_>) -> Result<u64, Failure> {
    let deadline = Deadline::after(REST_MOST);
    let (mut last, mut since) = (None, clock::now());
    while since.elapsed() < REST && !deadline.is_over() {
        let objects = visit.objects()?;
        if objects != last {
            (last, since) = (objects, clock::now());
        }
        deadline.pause(LOOKED);
    }
    Ok(last.unwrap_or_default())
}

/// Measures files with unrelated names on one target.
pub fn run_unrelated(visit: &mut Visit<'_>) -> Result<(), Failure> {
    let (count, supply) = (visit.scale.files, Material::Text.supply());
    let directory = visit.own.join("unrelated");
    fs::create_dir(&directory).doing("creating", &directory)?;
    visit.sample("unrelated-create", make(&directory, 0..count, unrelated_name, &supply, false)?, count)?;
    expect(&directory, count)
}

fn memory(visit: &Visit<'_>, test: &'static str, created: Option<u64>) -> Result<(), Failure> {
    // The maximum of the daemon that created the files and the one that listed them.
    match created.max(visit.daemon_memory()?) {
        Some(bytes) => visit.count(test, bytes),
        None => Ok(()),
    }
}

/// Measures the directories on one target.
pub fn run_directories(visit: &mut Visit<'_>) -> Result<(), Failure> {
    let count = visit.scale.directories;
    let directory = visit.own.join("tree");
    let before = used(&visit.own)?;
    fs::create_dir(&directory).doing("creating", &directory)?;
    visit.sample("tree-create", make_directories(&directory, count)?, count)?;
    let created = visit.daemon_memory()?;
    visit.cold()?;
    visit.count("tree-used", used(&visit.own)?.saturating_sub(before))?;
    listings(visit, &directory, ["tree-lht-cold", "tree-lht-warm", "tree-u-cold", "tree-u-warm"], count)?;
    memory(visit, "tree-memory", created)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_made_and_counted() {
        let directory = tempfile::tempdir().unwrap();
        let supply = Material::Text.supply();
        make(directory.path(), 0..20, name, &supply, false).unwrap();
        make(directory.path(), 20..24, name, &supply, true).unwrap();
        expect(directory.path(), 24).unwrap();
        assert!(expect(directory.path(), 25).unwrap_err().to_string().contains("24 of 25"));
        let lengths: Vec<u64> = (0..24)
            .map(|number| fs::metadata(directory.path().join(name(number).unwrap().to_str().unwrap())).unwrap().len())
            .collect();
        assert!(
            lengths[..20].iter().all(|bytes| *bytes == 100)
                && lengths[20..].iter().all(|bytes| (50_000..500_000).contains(bytes))
        );
        assert!(make(directory.path(), 3..4, name, &supply, false).is_err(), "it exists");
        assert!(used(directory.path()).unwrap() > 0);
        assert_eq!(image_bytes(directory.path()), Ok(0));
    }
}
