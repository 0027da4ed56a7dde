//! The same work by one client, then by two concurrently: how a target scales. Each client does the whole amount,
//! so on a machine with two idle processors the second row takes as long as the first.

use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;

use super::big_file::{Buffer, forward, make, open, random, read_at};
use super::{Visit, files};
use crate::clock;
use crate::failure::{Doing, Failure};
use crate::scale::Scale;

const CLIENTS: usize = 2;
const MIB: u64 = 1024 * 1024;

/// Makes the files for stat and one big file for each client.
pub fn prepare(source: &Path, scale: &Scale, buffer: &mut Buffer) -> Result<(), Failure> {
    files::prepare(source, scale)?;
    (0..CLIENTS).try_for_each(|client| make(&big(source, client), size(scale), buffer))
}

fn big(root: &Path, client: usize) -> PathBuf {
    root.join(format!("client-{client}"))
}

fn size(scale: &Scale) -> u64 {
    (scale.cache / 4 / MIB).max(1) * MIB
}

/// Number of small operations, large enough to make the cost of starting a thread negligible.
const OPERATIONS: u64 = 50_000;

/// Runs `work` in this many concurrent clients and returns the time from the first start to the last end, by the
/// clients' own clocks: the thread that waits for them may itself be waiting for a processor. `ready` prepares each
/// client before the clock starts.
fn together<T>(
    clients: usize,
    ready: impl Fn(usize) -> Result<T, Failure> + Sync,
    work: impl Fn(T) -> Result<(), Failure> + Sync,
) -> Result<Duration, Failure> {
    let barrier = Barrier::new(clients);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..clients)
            .map(|client| {
                let (barrier, ready, work) = (&barrier, &ready, &work);
                scope.spawn(move || {
                    let prepared = ready(client);
                    barrier.wait();
                    let start = clock::now();
                    work(prepared?)?;
                    Ok((start, clock::now()))
                })
            })
            .collect();
        let results: Vec<Result<(Instant, Instant), Failure>> = threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| Err(Failure::new("a client panicked"))))
            .collect();
        let times = results.into_iter().collect::<Result<Vec<(Instant, Instant)>, Failure>>()?;
        let (start, end) = (times.iter().map(|time| time.0).min(), times.iter().map(|time| time.1).max());
        start.zip(end).map(|(start, end)| end - start).ok_or_else(|| Failure::new("no clients"))
    })
}

/// Measures the group on one target.
pub fn run(visit: &mut Visit<'_>) -> Result<(), Failure> {
    let (count, bytes, root) = (visit.scale.files, size(visit.scale), visit.root.clone());
    let paths = files::spread(&visit.shared("files"), count, "file")?;
    files::stat_all(&paths)?;
    let passes = OPERATIONS.div_ceil(count);
    for (clients, test) in [(1, "clients1-stat"), (CLIENTS, "clients2-stat")] {
        let elapsed = together(clients, |_| Ok(()), |()| (0..passes).try_for_each(|_| files::stat_all(&paths)))?;
        visit.sample(test, elapsed, count * passes * clients as u64)?;
    }
    let offsets = random(bytes, 4096);
    for (clients, test) in [(1, "clients1-read"), (CLIENTS, "clients2-read")] {
        let ready = |client| {
            let (file, mut buffer) = (open(&big(&root, client), OFlags::RDONLY)?, Buffer::new(MIB as usize));
            read_at(&file, buffer.record(MIB), &forward(bytes, MIB))?;
            Ok((file, buffer))
        };
        let elapsed = together(clients, ready, |(file, mut buffer)| read_at(&file, buffer.record(4096), &offsets))?;
        visit.sample(test, elapsed, bytes * clients as u64)?;
    }
    if visit.reads_only {
        return Ok(());
    }
    // Each client has a directory of its own: two in one directory would contend for its lock on any file system.
    let count = count.div_ceil(2);
    let directories: Vec<PathBuf> = (0..CLIENTS).map(|client| visit.own.join(format!("client-{client}"))).collect();
    directories.iter().try_for_each(|path| std::fs::create_dir(path).doing("creating", path))?;
    for (clients, test) in [(1, "clients1-churn"), (CLIENTS, "clients2-churn")] {
        let ready = |client: usize| match directories.get(client) {
            Some(directory) => files::flat(directory, count, "file"),
            None => Err(Failure::new("more clients than directories")),
        };
        let elapsed = together(clients, ready, |paths| files::churn(&paths))?;
        visit.sample(test, elapsed, count * clients as u64)?;
    }
    Ok(())
}
