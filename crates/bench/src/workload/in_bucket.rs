//! Operations in which file systems in an object store are weak or strong: small files, a tree of programs under
//! git, small syncs, one large file sequentially and at random, cold and warm. Writes count when the data are in
//! the store.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::fs::{Advice, OFlags};

use super::big_file::{flush, forward, open, random, read_at, write_at};
use super::listing::program;
use super::{Ask, Material, Visit, finished, needs_making, repeated, time, timed, tree};
use crate::buckets::{bytes_of, objects_of};
use crate::failure::{Doing, Failure};
use crate::scale::Scale;
use crate::target::Objects;

const MIB: u64 = 1 << 20;
const SMALL: u64 = 4 << 10;
/// Bytes of a small file.
const CONTENT: usize = 1000;
/// Random reads and overwrites: divisor of the number of syncs.
const RANDOM: usize = 2;

/// Makes the archive of a tree under git, one pack of all objects.
pub fn prepare(source: &Path, scale: &Scale) -> Result<(), Failure> {
    tree::prepare(source, scale)?;
    let directory = source.join("under-git");
    if !needs_making(&directory)? {
        return Ok(());
    }
    program("tar", &["-xf", &source.join("tree/model.tar").to_string_lossy(), "-C"], &directory)?;
    let model = directory.join("model");
    for words in [&["init", "-q"][..], &["add", "."], &["commit", "-q", "-m", "all"], &["gc", "-q"]] {
        git(&model, words)?;
    }
    let (archive, place) = (directory.join("model.tar"), directory.to_string_lossy());
    program("tar", &["-cf", &archive.to_string_lossy(), "-C", &place], Path::new("model"))?;
    fs::remove_dir_all(&model).doing("removing", &model)?;
    finished(&directory)
}

/// Runs git without any user's settings.
fn git(tree: &Path, words: &[&str]) -> Result<Vec<u8>, Failure> {
    let mut command = Command::new("git");
    command.args(["-c", "safe.directory=*", "-c", "user.name=bench", "-c", "user.email=bench@localhost"]).args(words);
    command.env("GIT_CONFIG_GLOBAL", "/dev/null").env("GIT_CONFIG_NOSYSTEM", "1").current_dir(tree);
    let output = command.stdin(Stdio::null()).output().doing("running git in", tree)?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(Failure::new(format!("git: {}", said.lines().last().unwrap_or("failed"))))
}

fn unchanged(tree: &Path) -> Result<(), Failure> {
    let changes = git(tree, &["status", "--porcelain"])?;
    if changes.is_empty() { Ok(()) } else { Err(Failure::new("git finds changes in the tree")) }
}

/// Measures the group on one target.
pub fn run(visit: &mut Visit<'_>) -> Result<(), Failure> {
    if visit.only_objects {
        return objects(visit);
    }
    small_files(visit)?;
    a_tree(visit)?;
    small_syncs(visit)?;
    large_file(visit)
}

/// Measures a client without a file system: the upper bound of both rows.
fn objects(visit: &Visit<'_>) -> Result<(), Failure> {
    let bytes = bytes_of(objects_of(visit.scale.stream));
    for (test, what) in [("object-write", Objects::Put(bytes)), ("object-read-first", Objects::Get(bytes))] {
        let elapsed = visit.ask(Ask::Objects(what)).and_then(time)?;
        visit.sample(test, elapsed, bytes)?;
    }
    Ok(())
}

fn small_files(visit: &Visit<'_>) -> Result<(), Failure> {
    let (count, supply) = (visit.scale.files, Material::Text.supply());
    let directory = visit.own.join("small");
    fs::create_dir(&directory).doing("creating", &directory)?;
    let names: Vec<_> = (0..count).map(|number| directory.join(format!("file-{number:06}"))).collect();
    let make = || {
        for (number, name) in names.iter().enumerate() {
            fs::write(name, supply.block(number as u64 * CONTENT as u64, CONTENT)).doing("writing", name)?;
        }
        visit.tidy(&[])
    };
    visit.sample("object-create", timed(make)?.0, count)?;
    fs::remove_dir_all(&directory).doing("removing", &directory)?;
    visit.tidy(&[])
}

fn a_tree(visit: &Visit<'_>) -> Result<(), Failure> {
    let (archive, model) = (visit.source.join("under-git/model.tar"), visit.own.join("model"));
    let unpack = || {
        program("tar", &["-xf", &archive.to_string_lossy(), "-C"], &visit.own)?;
        visit.tidy(&[])
    };
    visit.sample("object-untar", timed(unpack)?.0, visit.scale.tree)?;
    visit.cold()?;
    for test in ["object-git-first", "object-git-again"] {
        visit.sample(test, timed(|| unchanged(&model))?.0, visit.scale.tree)?;
    }
    fs::remove_dir_all(&model).doing("removing", &model)?;
    visit.tidy(&[])
}

fn small_syncs(visit: &Visit<'_>) -> Result<(), Failure> {
    let (count, supply, path) = (visit.scale.fsyncs, Material::Random.supply(), visit.own.join("log"));
    let file = open(&path, OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND)?;
    let append = || {
        (0..count).try_for_each(|number| {
            let block = supply.block(number * SMALL, SMALL as usize);
            match rustix::io::write(&file, block) {
                Ok(written) if written == block.len() => flush(&file),
                Ok(_) => Err(Failure::new("not all was appended")),
                Err(error) => Err(Failure::new(format!("appending: {error}"))),
            }
        })
    };
    visit.sample("object-fsync", timed(append)?.0, count)?;
    drop(file);
    visit.tidy(&[path])
}

fn large_file(visit: &mut Visit<'_>) -> Result<(), Failure> {
    let (bytes, path) = (visit.scale.stream, visit.own.join("large"));
    let supply = Material::Random.supply();
    let write = || {
        let file = open(&path, OFlags::WRONLY | OFlags::CREATE)?;
        for at in forward(bytes, MIB) {
            write_at(&file, supply.block(at, MIB as usize), &[at])?;
        }
        flush(&file)?;
        drop(file);
        visit.tidy(&[])
    };
    visit.sample("object-write", timed(write)?.0, bytes)?;
    let few = usize::try_from(visit.scale.fsyncs).unwrap_or(usize::MAX) / RANDOM;
    let places: Vec<u64> = random(bytes, SMALL).into_iter().take(few.max(1)).collect();
    let count = places.len() as u64;
    visit.cold()?;
    let whole = ["object-read-first", "object-read-again", "object-read-kept"];
    read_thrice(visit, &path, whole, (MIB, &forward(bytes, MIB)), bytes)?;
    let overwrite = || {
        let file = open(&path, OFlags::WRONLY)?;
        for (number, place) in places.iter().enumerate() {
            write_at(&file, supply.block((number as u64 + 7) * SMALL, SMALL as usize), &[*place])?;
        }
        flush(&file)
    };
    visit.sample("object-random-write", timed(overwrite)?.0, count)?;
    visit.tidy(&[])?;
    visit.cold()?;
    let random = ["object-random-first", "object-random-again", "object-random-kept"];
    read_thrice(visit, &path, random, (SMALL, &places), count)?;
    visit.tidy(&[path])
}

/// Reads three times: without any cache on this machine; again, often enough for the clock; and after the kernel's
/// cache has been dropped.
fn read_thrice(
    visit: &mut Visit<'_>,
    path: &Path,
    [first, again, kept]: [&'static str; 3],
    (length, places): (u64, &[u64]),
    amount: u64,
) -> Result<(), Failure> {
    let file = open(path, OFlags::RDONLY)?;
    let record = visit.buffer.record(length);
    let cold = timed(|| read_at(&file, record, places))?.0;
    let warm = repeated(|| read_at(&file, record, places))?;
    let forgotten = repeated(|| {
        rustix::fs::fadvise(&file, 0, None, Advice::DontNeed).doing("forgetting", path)?;
        read_at(&file, record, places)
    })?;
    visit.sample(first, cold, amount)?;
    visit.sample(again, warm, amount)?;
    visit.sample(kept, forgotten, amount)
}
