//! Kills at random moments, on mounts of every kind at once, while programs use them.
//!
//! Each mount is used by all loads from its beginning. Its processes are killed, replaced by another
//! program, killed while they are made, until the last death that a guardian allows; then it dies for
//! good, in one of several ways, and what was answered has to be below. Said of each failure: the seed,
//! the mount, and what was done to it.

use super::{
    Guarded, fill_below,
    loads::{Below, Changes, Locked, Ranges, Shared, Shell, Tail},
};
use crate::{
    crashing::{self, Dead, Load, Random, programs},
    mounting::{self, eventually, is_gone, kill},
};
use rustix::process::Signal;
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant, SystemTime},
};

/// Files of the branch below of each union.
const BELOW: u64 = 2000;
/// Deaths that a guardian allows within a minute.
const DEATHS: u32 = 2;

/// What the campaign has come to.
#[derive(Debug, Default)]
pub struct Told {
    kills: AtomicU64,
    upgrades: AtomicU64,
    mounts: AtomicU64,
    /// Microseconds: of a call of a load, and of the first look-up after a kill.
    slowest: AtomicU64,
    answered: AtomicU64,
}

impl Told {
    fn raise(word: &AtomicU64, time: Duration) {
        word.fetch_max(u64::try_from(time.as_micros()).unwrap(), Ordering::Relaxed);
    }

    /// A process was killed.
    pub fn killed(&self) {
        self.kills.fetch_add(1, Ordering::Relaxed);
    }

    /// How often.
    pub fn kills(&self) -> u64 {
        self.kills.load(Ordering::Relaxed)
    }

    /// Another program went on.
    pub fn upgraded(&self) {
        self.upgrades.fetch_add(1, Ordering::Relaxed);
    }

    /// Something was mounted.
    pub fn mounted(&self) {
        self.mounts.fetch_add(1, Ordering::Relaxed);
    }

    /// A call of a load took so long.
    pub fn slowest_of(&self, time: Duration) {
        Told::raise(&self.slowest, time);
    }

    /// The first look-up after a kill took so long.
    pub fn answered(&self, time: Duration) {
        Told::raise(&self.answered, time);
    }

    /// A line for the report.
    pub fn text(&self) -> String {
        let of = |word: &AtomicU64| word.load(Ordering::Relaxed);
        format!(
            "{} kills, {} upgrades, {} mounts; slowest answer after a kill {} ms, slowest call {} ms",
            of(&self.kills),
            of(&self.upgrades),
            of(&self.mounts),
            of(&self.answered) / 1000,
            of(&self.slowest) / 1000
        )
    }
}

/// Two other copies of the program.
pub struct Programs {
    _place: tempfile::TempDir,
    copies: [PathBuf; 2],
}

impl Programs {
    /// One of them.
    pub fn copy(&self, which: usize) -> &Path {
        &self.copies[which]
    }

    /// Makes them.
    pub fn new() -> Programs {
        let place = mounting::scratch();
        let copies = ["one", "other"].map(|name| place.path().join(name));
        for copy in &copies {
            fs::copy(mounting::nacre(), copy).expect("a copy of the program");
        }
        Programs { _place: place, copies }
    }
}

/// Kills until there were so many, on so many mounts at a time.
pub fn run(kills: u64, lanes: u64, seed: u64) -> Told {
    let (told, programs) = (Told::default(), Programs::new());
    thread::scope(|scope| {
        for lane in 0..lanes {
            let (told, programs) = (&told, &programs);
            scope.spawn(move || {
                let mut random = Random(seed.wrapping_mul(1000) + lane);
                for round in (lane..).step_by(usize::try_from(lanes).unwrap()) {
                    if told.kills() >= kills && round >= KINDS.len() as u64 {
                        return;
                    }
                    let kind = usize::try_from(round).unwrap() % KINDS.len();
                    Life::new(kind, format!("seed {seed}, round {round}"), random.next(), told, programs).live();
                }
            });
        }
    });
    told
}

/// A kind of mounts: its name, and how one is made.
type Kind = (&'static str, fn() -> Guarded);

const KINDS: [Kind; 6] = [
    ("mirror", || Guarded::new(&[])),
    ("mirror without passthrough", || Guarded::new(mounting::without_passthrough())),
    ("filters", || {
        let line = "host:SOURCE | remap:perms=a+r | trace | throttle:write-rate=1G";
        Guarded::over_lower(&["mount", "-o", "rw"], line, |_| ())
    }),
    ("cage", || Guarded::cage(&["--size=1G"])),
    ("union", || Guarded::union(&[], |lower| fill_below(lower, 0, BELOW))),
    ("filters over a union", || {
        let line = "union:SOURCE=rw:LOWER=ro | remap:perms=a+r";
        Guarded::over_lower(&["mount", "-o", "rw"], line, |lower| fill_below(lower, 0, BELOW))
    }),
];

/// A mount until its death.
struct Life<'a> {
    guarded: Guarded,
    what: String,
    random: Random,
    told: &'a Told,
    programs: &'a Programs,
    /// The copy that serves, once one does.
    copy: usize,
    deaths: u32,
    /// The process that was killed last.
    killed: Option<u32>,
    is_union: bool,
    progress: Vec<Arc<Shared>>,
}

impl Life<'_> {
    fn new<'a>(kind: usize, round: String, seed: u64, told: &'a Told, programs: &'a Programs) -> Life<'a> {
        let (name, make) = KINDS[kind];
        told.mounted();
        Life {
            guarded: make(),
            what: format!("{name}, {round}"),
            random: Random(seed),
            told,
            programs,
            copy: 0,
            deaths: 0,
            killed: None,
            is_union: name.contains("union"),
            progress: Vec::new(),
        }
    }

    fn live(mut self) {
        let dead = Arc::new(Dead::default());
        let mut shared = || {
            let shared = Arc::new(Shared::default());
            self.progress.push(Arc::clone(&shared));
            shared
        };
        let mut loads: Vec<Box<dyn Load>> = vec![
            Box::new(Changes { number: 1, shared: shared(), rounds: 0 }),
            Box::new(Tail { shared: shared(), lines: 0 }),
            Box::new(Shell { shared: shared(), lines: 0 }),
            Box::new(Locked { shared: shared(), rounds: 0 }),
            Box::new(Ranges { shared: shared(), rounds: 0 }),
        ];
        if self.is_union {
            loads.push(Box::new(Below { shared: shared(), rounds: 0, all: BELOW }));
        }
        if programs::is_there("fio") {
            loads.push(Box::<programs::Fio>::default());
        }
        if programs::is_there("sqlite3") {
            let journal = ["DELETE", "WAL", "TRUNCATE"][self.random.below(3) as usize];
            loads.push(Box::new(programs::Sqlite::new(journal)));
        }
        let place = self.guarded.fixture.mountpoint.clone();
        let working = crashing::begin(loads, &place, &dead, &mut self.random);
        self.goes_on();
        while self.deaths < DEATHS {
            self.pause(200_000);
            match self.random.below(6) {
                0 => self.upgrade(false),
                1 => self.upgrade(true),
                2 if self.deaths + 2 <= DEATHS => {
                    self.strike();
                    self.strike_next();
                }
                _ => self.strike(),
            }
            self.answers();
            assert!(!working.iter().any(thread::JoinHandle::is_finished), "{}: a load has ended", self.what);
            self.goes_on();
        }
        self.die(&dead);
        eventually("the end of all loads", || working.iter().all(thread::JoinHandle::is_finished));
        let source = self.guarded.fixture.source.clone();
        for load in working {
            let mut load = load.join().unwrap_or_else(|_| panic!("{}", self.what));
            load.judge(&source, &self.what);
        }
        self.progress.iter().for_each(|shared| self.told.slowest_of(shared.slowest.time()));
    }

    fn pause(&mut self, most: u64) {
        thread::sleep(Duration::from_micros(self.random.below(most)));
    }

    /// The process that serves now, or is about to.
    fn child(&self) -> u32 {
        let mut child = None;
        eventually("a process is there", || {
            child = self.guarded.child().filter(|child| Some(*child) != self.killed);
            child.is_some()
        });
        child.unwrap()
    }

    fn strike(&mut self) {
        let child = self.child();
        self.note(&format!("kill {child}"));
        self.kill(child);
        self.deaths += 1;
    }

    fn kill(&mut self, process: u32) {
        self.killed = Some(process);
        // Its number may be another process's before this mount is dropped.
        self.guarded.workers.retain(|worker| *worker != process);
        kill(process, Signal::KILL);
        self.told.killed();
    }

    /// Kills the process that is about to go on.
    fn strike_next(&mut self) {
        let next = self.child();
        self.pause(8000);
        self.note(&format!("kill {next}, which went on"));
        self.kill(next);
        self.deaths += 1;
    }

    /// Has another copy of the program go on; perhaps the process is killed meanwhile.
    fn upgrade(&mut self, killed: bool) {
        self.copy = 1 - self.copy;
        let mut command = Command::new(&self.programs.copies[self.copy]);
        command.arg("upgrade").arg(&self.guarded.fixture.mountpoint);
        self.note("upgrade");
        self.told.upgraded();
        if !killed {
            let output = mounting::finish(&mut command);
            assert!(output.status.success(), "{}: {}", self.what, mounting::text(&output.stderr));
            return;
        }
        let upgrading = thread::spawn(move || drop(mounting::finish(&mut command)));
        self.pause(60_000);
        self.strike();
        upgrading.join().unwrap();
    }

    fn note(&mut self, what: &str) {
        self.what.push_str(", ");
        self.what.push_str(what);
    }

    /// How long it takes until something is answered that the kernel does not know.
    fn answers(&mut self) {
        let name = self.guarded.at(&format!("nothing-{}", self.random.next()));
        let start = Instant::now();
        let answer = fs::symlink_metadata(name);
        self.told.answered(start.elapsed());
        let absent = answer.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound);
        assert!(absent, "{}: {answer:?}", self.what);
    }

    /// Waits until each of the loads has done something.
    fn goes_on(&self) {
        let done = || self.progress.iter().map(|shared| shared.done.load(Ordering::Relaxed)).collect::<Vec<_>>();
        let before = done();
        eventually("all loads go on", || done().iter().zip(&before).all(|(now, before)| *now > before + 2));
        for program in ["fio", "sqlite"].into_iter().filter(|program| self.last_write(program).is_some()) {
            let before = self.last_write(program);
            eventually("the programs go on", || self.last_write(program) > before);
        }
    }

    /// When a program has written last, below.
    fn last_write(&self, program: &str) -> Option<SystemTime> {
        let files = fs::read_dir(&self.guarded.fixture.source).unwrap().filter_map(Result::ok);
        let its = files.filter(|file| file.file_name().to_string_lossy().starts_with(program));
        its.filter_map(|file| file.metadata().ok()?.modified().ok()).max()
    }

    /// The end of the mount.
    fn die(&mut self, dead: &Dead) {
        let (guardian, child) = (self.guarded.guardian, self.child());
        let way = self.random.below(3);
        if way == 0 {
            self.note("kill the guardian");
            self.guarded.workers.push(child);
            self.kill(guardian);
            self.answers();
            self.goes_on();
        }
        dead.set();
        if way == 1 {
            self.note("kill the guardian and its process");
            self.kill(guardian);
        }
        self.kill(child);
        // Where the guardian lives it counts deaths, from anew where it became another program.
        eventually("the mount is dead", || {
            if let Some(next) = self.guarded.child().filter(|next| Some(*next) != self.killed) {
                self.kill(next);
            }
            is_gone(guardian) && is_gone(child) && is_dead(&self.guarded.fixture.mountpoint)
        });
    }
}

/// Whether whoever asks is told that the mount is dead.
fn is_dead(mountpoint: &Path) -> bool {
    fs::symlink_metadata(mountpoint.join("nothing")).is_err_and(|error| error.raw_os_error() == Some(107))
}
