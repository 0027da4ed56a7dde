//! Warm reads and stat of files that the target itself holds: the cost of a cage for readers.

use rustix::fs::OFlags;

use super::big_file::{flush, forward, make, open, random, read_at};
use super::{Visit, files, repeated, timed};
use crate::failure::{Doing, Failure};

const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;

/// Measures the group on one target.
pub fn run(visit: &mut Visit<'_>) -> Result<(), Failure> {
    let (path, bytes, count) = (visit.own.join("big-file"), visit.scale.cache, visit.scale.files);
    make(&path, bytes, visit.buffer)?;
    let file = open(&path, OFlags::RDONLY)?;
    flush(&file)?;
    read_at(&file, visit.buffer.record(MIB), &forward(bytes, MIB))?;
    for (test, offsets) in [("warm-read-4k", forward(bytes, 4 * KIB)), ("warm-random-read-4k", random(bytes, 4 * KIB))]
    {
        let memory = visit.buffer.record(4 * KIB);
        let elapsed = repeated(|| read_at(&file, memory, &offsets))?;
        visit.sample(test, elapsed, bytes)?;
    }
    drop(file);
    let directory = visit.own.join("files");
    std::fs::create_dir(&directory).doing("creating", &directory)?;
    let names = files::flat(&directory, count, "file")?;
    names.iter().try_for_each(|name| files::create(name))?;
    visit.tidy(&[path])?;
    files::stat_all(&names)?;
    visit.sample("warm-stat", repeated(|| files::stat_all(&names))?, count)?;
    let read = || names.iter().try_for_each(|name| files::read(name, files::SMALL.len()));
    visit.sample("warm-open", repeated(read)?, count)?;
    // Each file has been read since its attributes were cached.
    visit.sample("warm-stat-read", timed(|| files::stat_all(&names))?.0, count)?;
    std::fs::remove_dir_all(&directory).doing("removing", &directory)
}
