//! Pools that survive the process that owns them, and kills at random moments while programs use
//! them.
//!
//! Each pool is used by all loads from its beginning, and commands create and destroy file systems
//! and snapshots meanwhile. Its processes are killed, replaced by another program, and killed
//! during a failover; then the loads end, the pool is exported, checked, imported, and everything
//! that was acknowledged has to be there. One pool in three is not exported: its supervisor is
//! killed with the process, under loads that record what was synced. A failure reports the seed,
//! the pool, and the actions on it.

use super::{
    campaign::Told,
    killer::{DEATHS, Killer, Programs},
    loads::{Changes, Locked, Shared, Shell, Tail},
};
use crate::{
    crashing::{self, Dead, Load, Random, programs},
    mounting::{self, child_of, eventually, finish, is_gone, kill, pools::Pool, text},
};
use rustix::process::Signal;
use std::{
    collections::BTreeSet,
    fs::{self, File},
    io,
    os::unix::fs::{FileExt, MetadataExt},
    path::Path,
    process::Command,
    sync::{Arc, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

/// A pool that survives its process.
pub struct Surviving {
    /// The pool.
    pub pool: Arc<Pool>,
    /// Process id of the supervisor, which starts the workers.
    pub guardian: u32,
}

impl Surviving {
    /// Creates one on a new file.
    pub fn made(short: &str, size: &str, more: &[&str]) -> Surviving {
        Surviving::of(Pool::made(short, size, &[&["--survive"], more].concat()))
    }

    /// Wraps a pool that was imported with `--survive`.
    pub fn of(pool: Pool) -> Surviving {
        let guardian = survives(&pool)["guardian"].as_u64().expect("a guardian");
        Surviving { pool: Arc::new(pool), guardian: u32::try_from(guardian).unwrap() }
    }

    /// Returns the process that owns it now, or is starting, if there is one.
    pub fn child(&self) -> Option<u32> {
        child_of(self.guardian)
    }

    /// Kills the process that owns it; returns its process id.
    pub fn kill(&self) -> u32 {
        let child = self.child().expect("a process");
        kill(child, Signal::KILL);
        child
    }

    /// Returns the number of failovers.
    pub fn restarts(&self) -> u64 {
        survives(&self.pool)["restarts"].as_u64().unwrap()
    }

    /// Waits until its processes have ended.
    pub fn has_ended(&self) {
        eventually("the guardian ends", || is_gone(self.guardian));
    }
}

/// Returns the report on its survival.
pub fn survives(pool: &Pool) -> serde_json::Value {
    let said = pool.nacre(&["pool", "status", "--json", "%"]);
    let said: serde_json::Value = serde_json::from_str(&said).unwrap();
    said["pools"][&pool.name]["survives"].clone()
}

/// Random overwriting of blocks that carry checksums, verified at once and at the end.
struct Blocks {
    name: &'static str,
    durable: bool,
    rounds: u64,
    shared: Arc<Shared>,
}

impl Blocks {
    fn command(&self, at: &Path, words: &[&str]) -> Command {
        let mut command = Command::new("fio");
        command.args([
            "--name=load",
            "--ioengine=psync",
            "--bs=4k",
            "--size=4m",
            "--verify=crc32c",
            "--verify_fatal=1",
        ]);
        command.arg(format!("--filename={}", at.join(self.name).display()));
        command.args(words).current_dir(std::env::temp_dir());
        command
    }
}

impl Load for Blocks {
    fn work(&mut self, at: &Path, seed: u64, dead: &Dead) {
        while !dead.is_set() {
            let random = format!("--randseed={}", (seed + self.rounds) % 1_000_000);
            let mut words = vec!["--rw=randwrite", "--do_verify=1", "--invalidate=1", &random];
            words.extend(self.durable.then_some("--fsync=8"));
            let output = finish(&mut self.command(at, &words));
            assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
            self.rounds += 1;
            self.shared.done.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn judge(&mut self, at: &Path, what: &str) {
        let output = finish(&mut self.command(at, &["--rw=read"]));
        assert!(output.status.success(), "{what}: {}{}", text(&output.stdout), text(&output.stderr));
    }

    fn promises(&self) -> String {
        format!("{} rounds of fio", self.rounds)
    }
}

/// Unlinked files: their content exists as long as they are open, and their inode numbers are not
/// reused meanwhile.
struct Nameless {
    rounds: u64,
    shared: Arc<Shared>,
}

impl Load for Nameless {
    fn work(&mut self, at: &Path, _: u64, dead: &Dead) {
        let mut open: Vec<(File, u64)> = Vec::new();
        while !dead.is_set() {
            let path = at.join(format!("nameless-{}", self.rounds));
            let file = File::create_new(&path).expect("a new file");
            file.write_all_at(&self.rounds.to_le_bytes(), 0).expect("a write");
            fs::remove_file(&path).expect("a removal");
            let file = (file, self.rounds);
            open.push(file);
            let mut numbers = BTreeSet::new();
            for (file, round) in &open {
                let metadata = file.metadata().expect("attributes");
                assert_eq!((metadata.nlink(), metadata.len()), (0, 8), "file {round}");
                assert!(numbers.insert(metadata.ino()), "two files with one number");
                let mut content = [0; 8];
                file.read_exact_at(&mut content, 0).expect("a read");
                assert_eq!(u64::from_le_bytes(content), *round);
            }
            if open.len() > 20 {
                open.drain(..10);
            }
            self.rounds += 1;
            self.shared.done.fetch_add(1, Ordering::Relaxed);
            thread::sleep(Duration::from_millis(3));
        }
    }

    fn judge(&mut self, at: &Path, what: &str) {
        let left = fs::read_dir(at).unwrap().filter_map(Result::ok);
        let left: Vec<_> = left.filter(|entry| entry.file_name().to_string_lossy().starts_with("nameless")).collect();
        assert!(left.is_empty(), "{what}: {left:?}");
    }

    fn promises(&self) -> String {
        format!("{} files without a name", self.rounds)
    }
}

/// Commits to a repository without any sync: an acknowledged commit has to survive the process.
struct Commits {
    commits: Vec<String>,
    shared: Arc<Shared>,
}

impl Commits {
    fn git(at: &Path, words: &[&str], what: &str) -> String {
        let mut command = Command::new("git");
        command.current_dir("/").arg("-C").arg(at.join("repository"));
        command.args(["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "init.defaultBranch=main"]);
        command.args(["-c", "gc.auto=0"]).args(words).env("GIT_CONFIG_NOSYSTEM", "1").env("HOME", "/nonexistent");
        let output = finish(&mut command);
        assert!(output.status.success(), "{what}: {words:?}: {}{}", text(&output.stdout), text(&output.stderr));
        text(&output.stdout)
    }
}

impl Load for Commits {
    fn work(&mut self, at: &Path, seed: u64, dead: &Dead) {
        fs::create_dir_all(at.join("repository")).expect("a directory");
        Commits::git(at, &["init", "-q"], "work");
        for round in 0.. {
            if dead.is_set() {
                return;
            }
            let content = Random(seed ^ round).bytes(3000);
            fs::write(at.join(format!("repository/f{}", round % 9)), content).expect("a write");
            Commits::git(at, &["add", "-A"], "work");
            Commits::git(at, &["commit", "-q", "-m", "more"], "work");
            self.commits.push(Commits::git(at, &["rev-parse", "HEAD"], "work").trim().to_owned());
            self.shared.done.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn judge(&mut self, at: &Path, what: &str) {
        Commits::git(at, &["fsck", "--full", "--strict", "--no-dangling"], what);
        let log = Commits::git(at, &["log", "--format=%H"], what);
        let there: Vec<&str> = log.lines().rev().collect();
        assert!(there.starts_with(&self.commits.iter().map(String::as_str).collect::<Vec<_>>()), "{what}: {log}");
        assert_eq!(Commits::git(at, &["status", "--porcelain"], what), "", "{what}");
    }

    fn promises(&self) -> String {
        format!("{} commits", self.commits.len())
    }
}

/// Creates and destroys file systems and snapshots by commands. A command whose process was killed
/// may or may not have been carried out.
struct Verbs {
    pool: Arc<Pool>,
    there: BTreeSet<String>,
    gone: BTreeSet<String>,
    rounds: u64,
    shared: Arc<Shared>,
}

impl Verbs {
    /// Returns whether the command was acknowledged as done.
    fn ask(&self, words: &[&str]) -> bool {
        let output = self.pool.run(words);
        let said = text(&output.stderr);
        let killed =
            said.contains("ended before it answered") || said.contains("the pool is busy with another command");
        assert!(output.status.success() || killed, "{words:?}: {said}");
        output.status.success()
    }

    fn make(&mut self, verb: &str, name: &str) {
        if self.ask(&["fs", verb, name]) {
            self.there.insert(name.to_owned());
        }
    }

    fn destroy(&mut self, name: &str) {
        // It is destroyed, or its state is unknown.
        if self.there.remove(name) && self.ask(&["fs", "destroy", name]) {
            self.gone.insert(name.to_owned());
        }
    }
}

impl Load for Verbs {
    fn work(&mut self, at: &Path, _: u64, dead: &Dead) {
        while !dead.is_set() {
            let round = self.rounds;
            let (dataset, snapshot) = (self.pool.of(&format!("d{round}")), format!("{}@s{round}", self.pool.name));
            self.make("create", &dataset);
            if self.there.contains(&dataset) {
                let path = at.join(format!("d{round}/file"));
                fs::write(&path, dataset.as_bytes()).expect("a write");
                let device = |path: &Path| fs::metadata(path).expect("attributes").dev();
                assert_ne!(device(&path), device(at), "{dataset} is not mounted any more");
                let compression = ["lz4", "zstd", "off"][round as usize % 3];
                self.ask(&["fs", "set", &format!("compression={compression}"), &dataset]);
                self.ask(&["fs", "set", &format!("readonly={}", ["on", "off"][round as usize % 2]), &dataset]);
            }
            self.make("snapshot", &snapshot);
            self.ask(&["pool", "sync", "%"]);
            if let Some(before) = round.checked_sub(2) {
                let (dataset, snapshot) =
                    (self.pool.of(&format!("d{before}")), format!("{}@s{before}", self.pool.name));
                if before % 3 != 0 {
                    self.destroy(&dataset);
                }
                self.destroy(&snapshot);
            }
            self.rounds += 1;
            self.shared.done.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn judge(&mut self, at: &Path, what: &str) {
        let said = self.pool.nacre(&["fs", "list", "-H", "-o", "name", "-t", "all", "-r", "%"]);
        let names: BTreeSet<String> = said.lines().map(str::to_owned).collect();
        let missing: Vec<_> = self.there.difference(&names).collect();
        assert!(missing.is_empty(), "{what}: {missing:?} of {names:?}");
        let back: Vec<_> = self.gone.intersection(&names).collect();
        assert!(back.is_empty(), "{what}: {back:?} were destroyed");
        for dataset in self.there.iter().filter(|name| !name.contains('@')) {
            let short = dataset.rsplit('/').next().unwrap();
            let content = fs::read_to_string(at.join(short).join("file"));
            let mounted = self.pool.nacre(&["fs", "list", "-H", "-o", "name,mounted,readonly,mountpoint", dataset]);
            assert!(content.as_ref().is_ok_and(|content| content == dataset), "{what}: {content:?}, {mounted}");
        }
    }

    fn promises(&self) -> String {
        format!("{} rounds of commands", self.rounds)
    }
}

/// A pool until its end.
struct Life<'a> {
    surviving: Surviving,
    killer: Killer<'a>,
    progress: Vec<Arc<Shared>>,
}

/// Runs until this number of kills, on this number of pools at a time.
pub fn run(kills: u64, lanes: u64, seed: u64) -> Told {
    let (told, programs) = (Told::default(), Programs::new());
    thread::scope(|scope| {
        for lane in 0..lanes {
            let (told, programs) = (&told, &programs);
            scope.spawn(move || {
                let mut random = Random(seed.wrapping_mul(1000) + lane);
                for round in (lane..).step_by(usize::try_from(lanes).unwrap()) {
                    if told.kills() >= kills {
                        return;
                    }
                    Life::new(format!("seed {seed}, round {round}"), random.next(), told, programs).live();
                }
            });
        }
    });
    told
}

impl Life<'_> {
    fn new<'a>(what: String, seed: u64, told: &'a Told, programs: &'a Programs) -> Life<'a> {
        told.mounted();
        let surviving = Surviving::made("campaign", "2G", &[]);
        let killer = Killer::new(surviving.guardian, &surviving.pool.at(""), (told, programs));
        let killer = killer.of(what, seed).reached_by(surviving.pool.state());
        Life { surviving, killer, progress: Vec::new() }
    }

    fn live(mut self) {
        let (dead, pool) = (Arc::new(Dead::default()), Arc::clone(&self.surviving.pool));
        let loads = self.loads();
        let working = crashing::begin(loads, &pool.at(""), &dead, &mut self.killer.random);
        self.goes_on();
        while self.killer.deaths < DEATHS {
            self.killer.act([400_000, 60_000, 200_000]);
            self.answers();
            assert!(!working.iter().any(thread::JoinHandle::is_finished), "{}: a load has ended", self.killer.what);
            self.goes_on();
        }
        dead.end();
        eventually("the end of all loads", || working.iter().all(thread::JoinHandle::is_finished));
        let mut loads: Vec<_> =
            working.into_iter().map(|load| load.join().unwrap_or_else(|_| panic!("{}", self.killer.what))).collect();
        let mut cut_off = match self.killer.random.below(3) {
            0 => self.crash(),
            _ => {
                pool.nacre(&["pool", "export", "%"]);
                Vec::new()
            }
        };
        self.surviving.has_ended();
        let said = pool.told(&["pool", "check", "-d", pool.device.to_str().unwrap()]);
        assert!(said.starts_with("no problems: "), "{}: {said}", self.killer.what);
        pool.import();
        loads.iter_mut().for_each(|load| load.judge(&pool.at(""), &self.killer.what));
        cut_off.iter_mut().for_each(|load| load.judge(&pool.at("cut-off"), &self.killer.what));
        pool.told(&["pool", "scrub", "-w", "%"]);
        let healthy = format!("pool '{}' is healthy\n", pool.name);
        assert_eq!(pool.told(&["pool", "status", "-x", "%"]), healthy, "{}", self.killer.what);
        self.progress.iter().for_each(|shared| self.killer.told.slowest_of(shared.slowest.time()));
        let promises: Vec<String> = loads.iter().chain(&cut_off).map(|load| load.promises()).collect();
        println!("{}: {}", self.killer.what, promises.join(", "));
    }

    /// Kills the supervisor as well: after the next import everything synced has to be there, and
    /// so has the earlier work of the loads. Returns the loads that were working.
    fn crash(&mut self) -> Vec<Box<dyn Load>> {
        let (dead, pool) = (Arc::new(Dead::default()), Arc::clone(&self.surviving.pool));
        let place = pool.at("cut-off");
        fs::create_dir(&place).unwrap();
        pool.nacre(&["pool", "sync", "%"]);
        let working = crashing::begin(programs::all(pool.place.path()), &place, &dead, &mut self.killer.random);
        thread::sleep(Duration::from_millis(500));
        self.killer.pause(4_000_000);
        dead.set();
        let child = self.killer.next();
        self.killer.note("kill the guardian and its process");
        self.killer.kill(self.surviving.guardian);
        self.killer.kill(child);
        eventually("the end of all loads", || working.iter().all(thread::JoinHandle::is_finished));
        eventually("no process is left", || pool.processes().is_empty());
        working.into_iter().map(|load| load.join().unwrap_or_else(|_| panic!("{}", self.killer.what))).collect()
    }

    fn loads(&mut self) -> Vec<Box<dyn Load>> {
        let mut shared = || {
            let shared = Arc::new(Shared::default());
            self.progress.push(Arc::clone(&shared));
            shared
        };
        let pool = Arc::clone(&self.surviving.pool);
        let verbs = Verbs { pool, there: BTreeSet::new(), gone: BTreeSet::new(), rounds: 0, shared: shared() };
        let mut loads: Vec<Box<dyn Load>> = vec![
            Box::new(Changes { number: 1, shared: shared(), rounds: 0 }),
            Box::new(Tail { shared: shared(), lines: 0 }),
            Box::new(Shell { shared: shared(), lines: 0 }),
            Box::new(Locked { shared: shared(), rounds: 0 }),
            Box::new(Nameless { rounds: 0, shared: shared() }),
            Box::new(verbs),
        ];
        if programs::is_there("git") {
            loads.push(Box::new(Commits { commits: Vec::new(), shared: shared() }));
        }
        if programs::is_there("fio") {
            for (name, durable) in [("blocks", false), ("durable-blocks", true)] {
                loads.push(Box::new(Blocks { name, durable, rounds: 0, shared: shared() }));
            }
        }
        if programs::is_there("sqlite3") {
            let journal = ["DELETE", "WAL", "TRUNCATE"][self.killer.random.below(3) as usize];
            loads.push(Box::new(programs::Sqlite::new(journal)));
        }
        loads
    }

    /// Measures the time until a request is answered that the kernel cannot answer from its cache.
    fn answers(&mut self) {
        let name = self.surviving.pool.at(&format!("nothing-{}", self.killer.random.next()));
        let start = Instant::now();
        let answer = fs::symlink_metadata(name);
        self.killer.told.answered(start.elapsed());
        let absent = answer.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
        assert!(absent, "{}: {answer:?}", self.killer.what);
    }

    /// Waits until each load has made progress.
    fn goes_on(&self) {
        let done = || self.progress.iter().map(|shared| shared.done.load(Ordering::Relaxed)).collect::<Vec<_>>();
        let before = done();
        eventually("all loads go on", || done().iter().zip(&before).all(|(now, before)| now > before));
    }
}

impl Drop for Surviving {
    fn drop(&mut self) {
        if thread::panicking() && !is_gone(self.guardian) {
            // The yard removes the remainder; it knows of one process only.
            kill(self.guardian, Signal::KILL);
        }
    }
}

/// Returns whether the mount is dead (ENOTCONN).
pub fn is_dead(at: &Path) -> bool {
    mounting::errno(fs::symlink_metadata(at.join("nothing"))) == rustix::io::Errno::NOTCONN.raw_os_error()
}
