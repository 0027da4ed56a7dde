//! Mounts that survive the process that serves them, and programs that use them meanwhile.
//!
//! Callers: `survival.rs`, `pool_survival.rs`. The users of a mount check every answer; each of
//! their functions returns the first error, which is a failure unless the test made the mount die
//! for good.

pub mod campaign;
pub mod compared;
pub mod killer;
pub mod loads;
pub mod pools;

use crate::mounting::{self, Fixture, child_of, eventually, is_gone, kill, status::Status};
use rustix::process::Signal;
use std::{
    fs::{self, OpenOptions},
    io::{self, Write},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::{Duration, Instant},
};

/// A mount that survives its process. The supervisor is the fixture's daemon.
pub struct Guarded {
    /// The mount.
    pub fixture: Fixture,
    /// Process id of the supervisor, which starts the workers.
    pub guardian: u32,
    /// Process ids of the workers. They are killed at the end: they do not end with their
    /// supervisor.
    pub workers: Vec<u32>,
}

impl Guarded {
    /// Mounts a mirror.
    pub fn new(options: &[&str]) -> Guarded {
        Guarded::of(Fixture::mirror(&[&["--survive", "--transport=device"], options].concat()))
    }

    /// Mounts a cage.
    pub fn cage(options: &[&str]) -> Guarded {
        Guarded::of(Fixture::cage(&[&["--survive", "--transport=device"], options].concat()))
    }

    /// Mounts a cage over a directory of an XFS of its own.
    pub fn cage_on_xfs(options: &[&str]) -> Guarded {
        let mut fixture = Fixture::bare_on("xfs");
        fixture.start_cage(&[&["--survive", "--transport=device"], options].concat());
        Guarded::of(fixture)
    }

    /// Mounts a union of the source over a directory that is filled first.
    pub fn union(options: &[&str], fill: impl FnOnce(&Path)) -> Guarded {
        let words = [&["union"], options].concat();
        Guarded::over_lower(&words, "SOURCE=rw:LOWER=ro", fill)
    }

    /// Mounts with these options and this text as source, over a directory that is filled first.
    pub fn over_lower(words: &[&str], what: &str, fill: impl FnOnce(&Path)) -> Guarded {
        let mut fixture = Fixture::bare();
        let lower = fixture.directory("lower");
        fill(&lower);
        let named = |path: &Path| path.to_str().unwrap().to_owned();
        let what = what.replace("SOURCE", &named(&fixture.source)).replace("LOWER", &named(&lower));
        let what = what.replace("BESIDE", &named(fixture.scratch.path()));
        let mountpoint = fixture.mountpoint.clone();
        fixture.start(&[words, &["--survive", "--transport=device"]].concat(), what.as_ref(), &mountpoint);
        Guarded::of(fixture)
    }

    /// Wraps an existing mount.
    pub fn of(fixture: Fixture) -> Guarded {
        let workers = vec![worker(&fixture.mountpoint)];
        Guarded { guardian: fixture.pid(), fixture, workers }
    }

    /// Returns a path in the mount.
    pub fn at(&self, name: &str) -> PathBuf {
        self.fixture.at(name)
    }

    /// Kills the process that serves, and waits until another one does.
    pub fn kill(&mut self) {
        self.die_of(Signal::KILL);
    }

    /// Kills the process that serves with this signal, and waits until another one does.
    pub fn die_of(&mut self, signal: Signal) {
        let killed = *self.workers.last().unwrap();
        kill(killed, signal);
        eventually("another process serves the mount", || worker(&self.fixture.mountpoint) != killed);
        self.workers.push(worker(&self.fixture.mountpoint));
    }

    /// Upgrades to a copy of the program, and waits until it serves.
    pub fn upgrade(&mut self) {
        let copy = self.fixture.scratch.path().join(format!("program{}", self.workers.len()));
        // A process of its own creates it: a child of another test could have a descriptor of this
        // one for writing.
        assert!(mounting::run("cp", [&mounting::nacre(), &copy]).status.success());
        let output = mounting::run(&copy, ["upgrade".as_ref(), self.fixture.mountpoint.as_os_str()]);
        assert!(output.status.success(), "{}", mounting::text(&output.stderr));
        let now = worker(&self.fixture.mountpoint);
        assert_eq!(fs::read_link(format!("/proc/{now}/exe")).unwrap(), copy);
        self.workers.push(now);
    }

    /// Returns the number of restarts.
    pub fn restarts(&self) -> u64 {
        restarts(&self.fixture.mountpoint)
    }

    /// Returns the process that serves now, or is starting, if there is one.
    pub fn child(&self) -> Option<u32> {
        child_of(self.guardian)
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // The supervisor first: it would start another one.
        let now = self.child();
        let all = std::iter::once(self.guardian).chain(now).chain(self.workers.iter().copied());
        all.filter(|process| !is_gone(*process)).for_each(|process| kill(process, Signal::KILL));
    }
}

/// Returns the process that serves a mount.
pub fn worker(mountpoint: &Path) -> u32 {
    u32::try_from(Status::of(mountpoint).number("pid")).unwrap()
}

/// Returns the number of restarts of a mount.
pub fn restarts(mountpoint: &Path) -> u64 {
    Status::of(mountpoint).survives()["restarts"].as_u64().unwrap()
}

/// Raises a flag when dropped, also in a test that failed.
pub struct Raised<'a>(pub &'a AtomicBool);

impl Drop for Raised<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Longest duration of a call.
#[derive(Debug, Default)]
pub struct Slowest(AtomicU64);

impl Slowest {
    /// Returns the duration.
    pub fn time(&self) -> Duration {
        Duration::from_micros(self.0.load(Ordering::Relaxed))
    }

    /// Makes a call that has to succeed as long as the mount lives; the error names the failed
    /// call.
    fn step<T, E: Into<io::Error>>(&self, what: &str, call: impl FnOnce() -> Result<T, E>) -> io::Result<T> {
        self.of(call).map_err(|error| {
            let error = error.into();
            eprintln!("{what}: {error}");
            error
        })
    }

    /// Makes a call and measures it.
    pub fn of<T>(&self, call: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let done = call();
        self.0.fetch_max(u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
        done
    }
}

/// Creates, moves and removes files and directories; every call has to have its effect.
pub fn change_once(place: &Path, number: u64, round: u64, slowest: &Slowest) -> io::Result<()> {
    let name = |what: &str| place.join(format!("{number}-{round}-{what}"));
    let moved = name("directory").join("moved");
    let content = vec![round as u8; 3000];
    let create = || OpenOptions::new().write(true).read(true).create_new(true).open(name("file"));
    let mut file = slowest.step("create", create)?;
    slowest.step("write", || file.write_all(&content))?;
    slowest.step("mkdir", || fs::create_dir(name("directory")))?;
    slowest.step("rename", || fs::rename(name("file"), &moved))?;
    slowest.step("link", || fs::hard_link(&moved, name("linked")))?;
    slowest.step("symlink", || std::os::unix::fs::symlink("target", name("link")))?;
    let fifo = rustix::fs::FileType::Fifo;
    slowest.step("mknod", || rustix::fs::mknodat(rustix::fs::CWD, name("fifo"), fifo, rustix::fs::Mode::RWXU, 0))?;
    let create = rustix::fs::XattrFlags::CREATE;
    slowest.step("setxattr", || rustix::fs::setxattr(name("linked"), c"user.x", b"1", create))?;
    let mut log = OpenOptions::new().append(true).create(true).open(place.join(format!("log-{number}")))?;
    slowest.step("append", || log.write_all(format!("{round}\n").as_bytes()))?;
    assert_eq!(fs::read(name("linked"))?, content);
    assert_eq!(fs::read_link(name("link"))?, Path::new("target"));
    assert_eq!(fs::read_dir(name("directory"))?.collect::<io::Result<Vec<_>>>()?.len(), 1);
    assert_eq!(std::os::unix::fs::MetadataExt::nlink(&file.metadata()?), 2);
    slowest.step("removexattr", || rustix::fs::removexattr(name("linked"), c"user.x"))?;
    for gone in [moved, name("linked"), name("link"), name("fifo")] {
        slowest.step("unlink", || fs::remove_file(&gone))?;
    }
    slowest.step("rmdir", || fs::remove_dir(name("directory")))?;
    slowest.step("write at", || file.write_all_at(b"still", 0))
}

/// Repeats [`change_once`] until `over` is set.
pub fn change(place: &Path, number: u64, over: &AtomicBool, done: &AtomicU64) {
    for round in (0_u64..).take_while(|_| !over.load(Ordering::Relaxed)) {
        change_once(place, number, round, &Slowest::default()).expect("nobody notices anything");
        done.fetch_add(1, Ordering::Relaxed);
    }
}

/// Number of files of each kind in the lower branch, for each user of a union.
pub const BELOW: u64 = 300;

/// Creates the files of the lower branch for a user of a union.
pub fn fill_below(lower: &Path, number: u64, rounds: u64) {
    for round in 0..rounds {
        let name = |what: &str| lower.join(format!("low{number}/{round}-{what}"));
        fs::create_dir_all(name("directory/sub")).unwrap();
        let files = [("file", "below"), ("old", "old"), ("one", "one"), ("other", "other"), ("directory/x", "x")];
        files.iter().for_each(|(what, content)| fs::write(name(what), content).unwrap());
    }
}

/// Copies up, removes, and moves files of the lower branch.
pub fn change_below_once(place: &Path, number: u64, round: u64, slowest: &Slowest) -> io::Result<()> {
    let name = |what: &str| place.join(format!("low{number}/{round}-{what}"));
    let is_there = |what: &str| match fs::symlink_metadata(name(what)) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    };
    let mut file =
        slowest.step("open of the branch below", || OpenOptions::new().append(true).read(true).open(name("file")))?;
    slowest.step("append of the branch below", || file.write_all(b"+more"))?;
    assert_eq!(fs::read_to_string(name("file"))?, "below+more");
    slowest.step("rename of the branch below", || fs::rename(name("file"), name("moved")))?;
    slowest.step("append of the branch below", || file.write_all(b"+last"))?;
    assert!(!is_there("file")?, "what was moved is there no more");
    slowest.step("unlink of the branch below", || fs::remove_file(name("old")))?;
    assert!(!is_there("old")?, "what was removed is there no more");
    slowest.step("rm -r of the branch below", || fs::remove_dir_all(name("directory")))?;
    slowest.step("mkdir of the branch below", || fs::create_dir(name("directory")))?;
    assert_eq!(fs::read_dir(name("directory"))?.collect::<io::Result<Vec<_>>>()?.len(), 0);
    slowest.step("rename over of the branch below", || fs::rename(name("one"), name("other")))?;
    assert_eq!(fs::read_to_string(name("other"))?, "one");
    Ok(())
}

/// Repeats [`change_below_once`] until `over` is set or the files are used up.
pub fn change_below(place: &Path, number: u64, over: &AtomicBool, done: &AtomicU64) {
    for round in (0_u64..).take_while(|_| !over.load(Ordering::Relaxed)) {
        done.fetch_add(1, Ordering::Relaxed);
        match round < BELOW {
            true => change_below_once(place, number, round, &Slowest::default()).expect("nobody notices anything"),
            false => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}
