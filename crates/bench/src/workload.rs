//! Workloads: operations on a target that are timed. Called by `measure` only.
//!
//! A workload runs on a thread of its own, as the user of its target. It has only paths and a [`Link`] to the
//! thread that owns the mounts, which carries out requests that only root can (a cold start). Inside a timed region
//! there is no allocation and no formatting: names and offsets are made before the clock starts.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender};
use std::time::Duration;

use crate::clock;
use crate::failure::{Doing, Failure};
use crate::holders::Traffic;
use crate::mounted::{OverAsk, Version};
use crate::options::User;
use crate::report::{Point, Sample};
use crate::scale::Scale;
use crate::table::Group;
use crate::target::{Objects, Pool};

mod aged;
mod appends;
mod big_file;
mod bonnie;
mod clients;
mod copying;
mod dd;
mod files;
mod fill;
mod in_bucket;
mod iozone;
mod listing;
mod many;
mod material;
mod mmap;
mod over;
mod pool;
mod served;
mod shell;
mod tree;
pub mod union;
mod warm;

pub use material::Material;
use material::Numbers;

pub use big_file::{Buffer, open};

/// The part of a group that is measured in one visit to a target. Targets take turns between units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkUnit {
    /// One point of iozone's automatic mode.
    Iozone(Point),
    /// A whole group.
    Whole(Group),
}

impl WorkUnit {
    /// The units of a group.
    pub fn of(group: Group, scale: &Scale) -> Vec<Self> {
        match group {
            Group::Iozone => scale.points.iter().map(|point| Self::Iozone(*point)).collect(),
            other => vec![Self::Whole(other)],
        }
    }

    /// Returns the group that the unit belongs to.
    pub fn group(self) -> Group {
        match self {
            Self::Iozone(_) => Group::Iozone,
            Self::Whole(group) => group,
        }
    }
}

/// Message of a workload to the thread that owns the mounts.
#[derive(Debug)]
pub enum Event {
    /// A measurement.
    Sample(Sample),
    /// A request; the answer comes back over the channel.
    Ask(Ask),
}

/// Request that only the thread that owns the mounts can carry out.
#[derive(Debug)]
pub enum Ask {
    /// Makes the target cold.
    Cold,
    /// Has the target write out its dirty data: servers behind FUSE get no syncfs.
    Settle,
    /// Crashes the file system and mounts it again.
    Crash,
    /// Makes or destroys a snapshot or clone.
    Version(Version),
    /// Asks for the peak memory of the daemon.
    Memory,
    /// Puts or gets objects.
    Objects(Objects),
    /// A request about the devices of a pool.
    Over(OverAsk),
    /// Asks for the used bytes of the devices.
    OverUsed,
    /// Asks for the bytes moved by the last topology change.
    OverMoved,
    /// Asks for the bytes allocated on the first device.
    OverShare,
    /// Asks for the bytes that devices have read and written.
    Traffic,
    /// Asks for the number of segment objects of a pool.
    Segments,
    /// Asks how long another machine's reader needs to see a new file of this name.
    Follow(String),
}

/// Answer to a request.
#[derive(Debug)]
pub enum Answer {
    /// The request is carried out.
    Done,
    /// The request took this long.
    Took(Duration),
    /// Memory in bytes, if there is a daemon.
    Memory(Option<u64>),
    /// Bytes on devices: data and metadata.
    Used(u64, u64),
    /// Bytes that devices have read and written, if it is known.
    Traffic(Option<Traffic>),
    /// Number of bytes.
    Bytes(u64),
    /// Number of segment objects, if it is a pool in a bucket.
    Segments(Option<u64>),
}

/// Channels to the thread that owns the mounts.
#[derive(Debug)]
pub struct Link {
    /// Messages to that thread.
    pub events: Sender<Event>,
    /// Answers to [`Event::Ask`].
    pub answers: Receiver<Result<Answer, Failure>>,
}

/// Parameters for checking the limit of a bounded target.
#[derive(Debug)]
pub struct Bounds {
    /// Directory of its files, or of its image, on the host.
    pub host: PathBuf,
    /// Limit in bytes.
    pub limit: u64,
}

/// Parameters of a workload.
#[derive(Debug)]
pub struct Visit<'a> {
    /// Path at which the target shows the source.
    pub root: PathBuf,
    /// Directory below [`Visit::root`] that belongs to this visit alone.
    pub own: PathBuf,
    /// Limit of the target, if it is bounded.
    pub bounds: Bounds,
    /// Directory with files shared by all visits, made by [`prepare`]; accessed without the target.
    pub source: PathBuf,
    /// The program under test.
    pub nacre: PathBuf,
    /// Amounts of work.
    pub scale: &'a Scale,
    /// Whether tests that change files are left out.
    pub reads_only: bool,
    /// Whether the target is the ground itself, without any mount.
    pub direct: bool,
    /// Whether files of a lower branch may be written to.
    pub copies_up: bool,
    /// Whether the file system itself makes snapshots.
    pub has_snapshots: bool,
    /// The pool under test, if it is one.
    pub pool: Option<Pool>,
    /// Whether the target is a bucket without a file system.
    pub only_objects: bool,
    /// I/O buffer, the same for every target.
    pub buffer: &'a mut Buffer,
    /// Channels to report samples.
    pub link: Link,
}

impl Visit<'_> {
    fn ask(&self, ask: Ask) -> Result<Answer, Failure> {
        let gone = |_| Failure::new("the bench is stopping");
        self.link.events.send(Event::Ask(ask)).map_err(|_| Failure::new("the bench is stopping"))?;
        self.link.answers.recv().map_err(gone)?
    }

    /// Makes the target cold: fresh mount, no names cached. No descriptor below the root may be open.
    pub fn cold(&self) -> Result<(), Failure> {
        self.cold_again().map(drop)
    }

    /// Makes the target cold; returns how long it took to mount it again.
    pub fn cold_again(&self) -> Result<Duration, Failure> {
        self.ask(Ask::Cold).and_then(time)
    }

    /// Returns the number of segment objects of a pool in a bucket; `None` for other targets.
    pub fn objects(&self) -> Result<Option<u64>, Failure> {
        match self.ask(Ask::Segments)? {
            Answer::Segments(objects) => Ok(objects),
            other => Err(Failure::new(format!("not an answer about objects: {other:?}"))),
        }
    }

    /// Returns how long after a commit a reader of the pool sees the new file of this name.
    pub fn follow(&self, name: &str) -> Result<Duration, Failure> {
        self.ask(Ask::Follow(name.to_owned())).and_then(time)
    }

    /// Crashes the file system and mounts it again; returns how long the latter took. No descriptor below the root
    /// may be open.
    pub fn crash(&self) -> Result<Duration, Failure> {
        self.ask(Ask::Crash).and_then(time)
    }

    /// Makes or destroys a snapshot or clone; returns how long it took.
    pub fn version(&self, version: Version) -> Result<Duration, Failure> {
        self.ask(Ask::Version(version)).and_then(time)
    }

    /// Returns the peak memory of the daemon in bytes; `None` if there is none.
    pub fn daemon_memory(&self) -> Result<Option<u64>, Failure> {
        match self.ask(Ask::Memory)? {
            Answer::Memory(bytes) => Ok(bytes),
            other => Err(Failure::new(format!("not an answer about memory: {other:?}"))),
        }
    }

    /// Reports a measurement.
    pub fn sample(&self, test: &'static str, elapsed: Duration, amount: u64) -> Result<(), Failure> {
        self.sample_at(test, None, elapsed, amount)
    }

    /// Reports a measurement at a point.
    pub fn sample_at(
        &self,
        test: &'static str,
        point: Option<Point>,
        elapsed: Duration,
        amount: u64,
    ) -> Result<(), Failure> {
        let sample = Sample { test, point, seconds: elapsed.as_secs_f64(), amount: amount as f64 };
        self.link.events.send(Event::Sample(sample)).map_err(|_| Failure::new("the bench is stopping"))
    }

    /// Reports a count that should be zero or small.
    pub fn count(&self, test: &'static str, bytes: u64) -> Result<(), Failure> {
        let sample = Sample { test, point: None, seconds: bytes as f64, amount: 0.0 };
        self.link.events.send(Event::Sample(sample)).map_err(|_| Failure::new("the bench is stopping"))
    }

    /// Removes files of the previous test and syncs, so that the next one does not pay for it.
    pub fn tidy(&self, files: &[PathBuf]) -> Result<(), Failure> {
        for file in files {
            fs::remove_file(file).doing("removing", file)?;
        }
        let directory = fs::File::open(&self.own).doing("opening", &self.own)?;
        rustix::fs::syncfs(&directory).doing("flushing", &self.own)?;
        drop(directory);
        self.ask(Ask::Settle).map(drop)
    }

    /// Returns the path through the target of a file made by [`prepare`].
    pub fn shared(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }
}

fn bytes(answer: Answer) -> Result<u64, Failure> {
    match answer {
        Answer::Bytes(bytes) => Ok(bytes),
        other => Err(Failure::new(format!("not an answer about bytes: {other:?}"))),
    }
}

fn time(answer: Answer) -> Result<Duration, Failure> {
    match answer {
        Answer::Took(elapsed) => Ok(elapsed),
        other => Err(Failure::new(format!("not an answer about time: {other:?}"))),
    }
}

/// Makes the files that the visits of a unit share, once, directly in the source. They are kept for later rounds.
pub fn prepare(unit: WorkUnit, source: &Path, scale: &Scale, buffer: &mut Buffer) -> Result<(), Failure> {
    match unit {
        WorkUnit::Iozone(_) => Ok(()),
        WorkUnit::Whole(Group::Iozone) => Err(Failure::new("iozone is measured point by point")),
        WorkUnit::Whole(Group::Cache | Group::Mmap) => big_file::prepare(source, scale, buffer),
        WorkUnit::Whole(Group::Files) => files::prepare(source, scale),
        WorkUnit::Whole(Group::Listing) => listing::prepare(source, scale),
        WorkUnit::Whole(Group::Tree) => tree::prepare(source, scale),
        WorkUnit::Whole(Group::Clients) => clients::prepare(source, scale, buffer),
        WorkUnit::Whole(Group::Copying) => copying::prepare(source, scale),
        WorkUnit::Whole(Group::LongNames) => union::prepare_long(source),
        WorkUnit::Whole(Group::ManyNames) => union::prepare_many(source, scale),
        WorkUnit::Whole(Group::Lookups | Group::Changes) => union::prepare_files(source, scale),
        WorkUnit::Whole(Group::CopyUp) => union::prepare_large(source, "copied-up", scale.copy, buffer),
        WorkUnit::Whole(Group::BranchData) => union::prepare_large(source, "data", scale.cache, buffer),
        // Their targets share nothing.
        WorkUnit::Whole(Group::Dd | Group::Shell | Group::Appends | Group::Writers | Group::Warm | Group::Fill) => {
            Ok(())
        }
        WorkUnit::Whole(
            Group::Bonnie | Group::BonnieText | Group::BonnieFiles | Group::SmallWrites | Group::SmallFiles,
        ) => Ok(()),
        WorkUnit::Whole(
            Group::Versions | Group::Recovery | Group::ManyFiles | Group::Unrelated | Group::ManyDirectories,
        ) => Ok(()),
        WorkUnit::Whole(Group::OverDevices | Group::Space | Group::Shapes) => Ok(()),
        WorkUnit::Whole(Group::Served) => served::prepare(source, scale),
        WorkUnit::Whole(Group::InBucket) => in_bucket::prepare(source, scale),
        WorkUnit::Whole(Group::ManyInBucket) => Ok(()),
        WorkUnit::Whole(Group::Aged50 | Group::Aged70 | Group::Aged85 | Group::Aged95 | Group::AgedReading) => Ok(()),
    }
}

/// Measures a unit on a target.
pub fn run(unit: WorkUnit, visit: &mut Visit<'_>) -> Result<(), Failure> {
    match unit {
        WorkUnit::Iozone(point) => iozone::run(visit, point),
        WorkUnit::Whole(Group::Iozone) => Err(Failure::new("iozone is measured point by point")),
        WorkUnit::Whole(Group::Cache) => big_file::run(visit),
        WorkUnit::Whole(Group::Mmap) => mmap::run(visit),
        WorkUnit::Whole(Group::Files) => files::run(visit),
        WorkUnit::Whole(Group::Listing) => listing::run(visit),
        WorkUnit::Whole(Group::Tree) => tree::run(visit),
        WorkUnit::Whole(Group::Clients) => clients::run(visit),
        WorkUnit::Whole(Group::Dd) => dd::run(visit),
        WorkUnit::Whole(Group::Shell) => shell::run(visit),
        WorkUnit::Whole(Group::Appends) => appends::run(visit),
        WorkUnit::Whole(Group::Writers) => dd::run_writers(visit),
        WorkUnit::Whole(Group::Warm) => warm::run(visit),
        WorkUnit::Whole(Group::Fill) => fill::run(visit),
        WorkUnit::Whole(Group::LongNames) => union::run_long(visit),
        WorkUnit::Whole(Group::ManyNames) => union::run_many(visit),
        WorkUnit::Whole(Group::Lookups) => files::run_lookups(visit),
        WorkUnit::Whole(Group::Changes) => union::run_changes(visit),
        WorkUnit::Whole(Group::CopyUp) => union::run_copy_up(visit),
        WorkUnit::Whole(Group::BranchData) => union::run_data(visit),
        WorkUnit::Whole(Group::Bonnie) => bonnie::run(visit, Material::Random),
        WorkUnit::Whole(Group::BonnieText) => bonnie::run(visit, Material::Text),
        WorkUnit::Whole(Group::BonnieFiles) => bonnie::run_files(visit),
        WorkUnit::Whole(Group::SmallWrites) => pool::run_writes(visit),
        WorkUnit::Whole(Group::SmallFiles) => pool::run_files(visit),
        WorkUnit::Whole(Group::Versions) => pool::run_versions(visit),
        WorkUnit::Whole(Group::Recovery) => pool::run_recovery(visit),
        WorkUnit::Whole(Group::ManyFiles) => many::run_files(visit),
        WorkUnit::Whole(Group::Unrelated) => many::run_unrelated(visit),
        WorkUnit::Whole(Group::ManyDirectories) => many::run_directories(visit),
        WorkUnit::Whole(Group::Copying) => copying::run(visit),
        WorkUnit::Whole(Group::OverDevices) => over::run(visit),
        WorkUnit::Whole(Group::Space) => over::run_space(visit),
        WorkUnit::Whole(Group::Shapes) => over::run_shapes(visit),
        WorkUnit::Whole(Group::Served) => served::run(visit),
        WorkUnit::Whole(Group::InBucket) => in_bucket::run(visit),
        WorkUnit::Whole(Group::ManyInBucket) => many::run_in_bucket(visit),
        WorkUnit::Whole(group @ (Group::Aged50 | Group::Aged70 | Group::Aged85 | Group::Aged95)) => {
            aged::run(visit, group)
        }
        WorkUnit::Whole(Group::AgedReading) => aged::run_reading(visit),
    }
}

/// Permanently changes the calling thread's user. Only this thread: the system call applies to a thread, and
/// threads and programs that it starts inherit from it.
pub fn become_user(user: User) -> Result<(), Failure> {
    let failed = |error: rustix::io::Errno| Failure::new(format!("becoming user {}: {error}", user.uid));
    let (uid, gid) = (rustix::process::Uid::from_raw(user.uid), rustix::process::Gid::from_raw(user.gid));
    rustix::thread::set_thread_groups(&[]).map_err(failed)?;
    rustix::thread::set_thread_res_gid(gid, gid, gid).map_err(failed)?;
    rustix::thread::set_thread_res_uid(uid, uid, uid).map_err(failed)
}

/// Runs `work` and returns how long it took.
fn timed<T>(work: impl FnOnce() -> Result<T, Failure>) -> Result<(Duration, T), Failure> {
    let start = clock::now();
    let result = work()?;
    Ok((start.elapsed(), result))
}

/// Minimum length of a sample: shorter ones are dominated by single interrupts.
const LONG_ENOUGH: Duration = Duration::from_millis(30);

/// Repeats `work`, which restores the initial state, until there is enough time to measure; returns the time of one
/// pass.
fn repeated(mut work: impl FnMut() -> Result<(), Failure>) -> Result<Duration, Failure> {
    let start = clock::now();
    let mut passes = 0_u32;
    loop {
        work()?;
        passes += 1;
        let elapsed = start.elapsed();
        if elapsed >= LONG_ENOUGH {
            return Ok(elapsed / passes);
        }
    }
}

/// Whether `directory` has to be made: it is empty now, unless [`finished`] has marked it in an earlier round.
fn needs_making(directory: &Path) -> Result<bool, Failure> {
    if directory.with_extension("ready").exists() {
        return Ok(false);
    }
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(Failure::io("clearing", directory, error));
        }
        _ => {}
    }
    fs::create_dir(directory).map_err(|error| Failure::io("creating", directory, error))?;
    Ok(true)
}

/// Marks `directory` as complete.
fn finished(directory: &Path) -> Result<(), Failure> {
    let marker = directory.with_extension("ready");
    fs::write(&marker, "").map_err(|error| Failure::io("writing", &marker, error))
}

/// Returns the numbers 0 to `count - 1` in a random order that is the same in every run.
fn shuffled(count: u64) -> Vec<u64> {
    let mut numbers: Vec<u64> = (0..count).collect();
    let mut random = Numbers::new(0);
    for at in (1..numbers.len()).rev() {
        let other = usize::try_from(random.below(at as u64 + 1)).unwrap_or(at);
        numbers.swap(at, other);
    }
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shuffling_keeps_every_number_and_has_no_order() {
        let numbers = shuffled(1000);
        let mut sorted = numbers.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..1000).collect::<Vec<u64>>());
        let runs = numbers.windows(2).filter(|pair| pair[1] == pair[0] + 1).count();
        assert!(runs < 10, "{runs} neighbours in order");
        assert_eq!(numbers, shuffled(1000));
    }
}
