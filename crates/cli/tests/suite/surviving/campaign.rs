//! Kills at random moments, on mounts of every kind at once, while programs use them.
//!
//! Each mount is used by all loads from its beginning. Its processes are killed, replaced by
//! another program, and killed while they start, up to the last death that a supervisor allows;
//! then the mount dies for good, in one of several ways, and everything that was acknowledged has
//! to be in the directory below. A failure reports the seed, the mount, and the actions on it.

use super::{
    Guarded,
    compared::Compared,
    fill_below,
    killer::{DEATHS, Killer, Programs},
    loads::{Below, Changes, Locked, Ranges, Shared, Shell, Tail},
};
use crate::{
    crashing::{self, Dead, Load, Random, programs},
    mounting::{self, eventually, is_gone},
};
use std::{
    fs,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant, SystemTime},
};

/// Number of files in the lower branch of each union.
const BELOW: u64 = 2000;

/// Counters of the campaign.
#[derive(Debug, Default)]
pub struct Told {
    kills: AtomicU64,
    upgrades: AtomicU64,
    mounts: AtomicU64,
    /// Maximum times in microseconds: of a call of a load, and of the first lookup after a kill.
    slowest: AtomicU64,
    answered: AtomicU64,
}

impl Told {
    fn raise(word: &AtomicU64, time: Duration) {
        word.fetch_max(u64::try_from(time.as_micros()).unwrap(), Ordering::Relaxed);
    }

    /// Counts a killed process.
    pub fn killed(&self) {
        self.kills.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of kills.
    pub fn kills(&self) -> u64 {
        self.kills.load(Ordering::Relaxed)
    }

    /// Counts a failover to another program.
    pub fn upgraded(&self) {
        self.upgrades.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a mount.
    pub fn mounted(&self) {
        self.mounts.fetch_add(1, Ordering::Relaxed);
    }

    /// Records the duration of a load's call.
    pub fn slowest_of(&self, time: Duration) {
        Told::raise(&self.slowest, time);
    }

    /// Records the duration of the first lookup after a kill.
    pub fn answered(&self, time: Duration) {
        Told::raise(&self.answered, time);
    }

    /// Returns a line for the report.
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

/// Runs until this number of kills, on this number of mounts at a time.
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

/// A kind of mount: its name, and its constructor.
type Kind = (&'static str, fn() -> Guarded);

const KINDS: [Kind; 7] = [
    ("mirror", || Guarded::new(&[])),
    ("mirror without passthrough", || Guarded::new(mounting::without_passthrough())),
    ("filters", || {
        let line = "host:SOURCE | remap:perms=a+r | trace | throttle:write-rate=1G";
        Guarded::over_lower(&["mount", "-o", "rw"], line, |_| ())
    }),
    ("cage", || Guarded::cage(&["--size=1G"])),
    ("cage on XFS", || Guarded::cage_on_xfs(&["--size=1G"])),
    ("union", || Guarded::union(&[], |lower| fill_below(lower, 0, BELOW))),
    ("filters over a union", || {
        let line = "union:SOURCE=rw:LOWER=ro | remap:perms=a+r";
        Guarded::over_lower(&["mount", "-o", "rw"], line, |lower| fill_below(lower, 0, BELOW))
    }),
];

/// A mount until its death.
struct Life<'a> {
    guarded: Guarded,
    killer: Killer<'a>,
    is_union: bool,
    progress: Vec<Arc<Shared>>,
}

impl Life<'_> {
    fn new<'a>(kind: usize, round: String, seed: u64, told: &'a Told, programs: &'a Programs) -> Life<'a> {
        let (name, make) = KINDS[kind];
        told.mounted();
        let mut guarded = make();
        // The process id may be reused before this mount is dropped.
        guarded.workers.clear();
        let killer = Killer::new(guarded.guardian, &guarded.fixture.mountpoint, (told, programs));
        Life {
            guarded,
            killer: killer.of(format!("{name}, {round}"), seed),
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
            Box::new(Compared::new(shared())),
        ];
        if self.is_union {
            loads.push(Box::new(Below { shared: shared(), rounds: 0, all: BELOW }));
        }
        if programs::is_there("fio") {
            loads.push(Box::<programs::Fio>::default());
        }
        if programs::is_there("sqlite3") {
            let journal = ["DELETE", "WAL", "TRUNCATE"][self.killer.random.below(3) as usize];
            loads.push(Box::new(programs::Sqlite::new(journal)));
        }
        let place = self.guarded.fixture.mountpoint.clone();
        let working = crashing::begin(loads, &place, &dead, &mut self.killer.random);
        self.goes_on();
        while self.killer.deaths < DEATHS {
            self.killer.act([200_000, 8000, 60_000]);
            self.answers();
            assert!(!working.iter().any(thread::JoinHandle::is_finished), "{}: a load has ended", self.killer.what);
            self.goes_on();
        }
        self.die(&dead);
        eventually("the end of all loads", || working.iter().all(thread::JoinHandle::is_finished));
        let source = self.guarded.fixture.source.clone();
        for load in working {
            let mut load = load.join().unwrap_or_else(|_| panic!("{}", self.killer.what));
            load.judge(&source, &self.killer.what);
        }
        self.progress.iter().for_each(|shared| self.killer.told.slowest_of(shared.slowest.time()));
    }

    /// Measures the time until a request is answered that the kernel cannot answer from its cache.
    fn answers(&mut self) {
        let name = self.guarded.at(&format!("nothing-{}", self.killer.random.next()));
        let start = Instant::now();
        let answer = fs::symlink_metadata(name);
        self.killer.told.answered(start.elapsed());
        let absent = answer.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound);
        assert!(absent, "{}: {answer:?}", self.killer.what);
    }

    /// Waits until each load has made progress.
    fn goes_on(&self) {
        let done = || self.progress.iter().map(|shared| shared.done.load(Ordering::Relaxed)).collect::<Vec<_>>();
        let before = done();
        eventually("all loads go on", || done().iter().zip(&before).all(|(now, before)| *now > before + 2));
        for program in ["fio", "sqlite"].into_iter().filter(|program| self.last_write(program).is_some()) {
            let before = self.last_write(program);
            eventually("the programs go on", || self.last_write(program) > before);
        }
    }

    /// Returns the time of a program's last write, as seen in the source.
    fn last_write(&self, program: &str) -> Option<SystemTime> {
        let files = fs::read_dir(&self.guarded.fixture.source).unwrap().filter_map(Result::ok);
        let its = files.filter(|file| file.file_name().to_string_lossy().starts_with(program));
        its.filter_map(|file| file.metadata().ok()?.modified().ok()).max()
    }

    /// Ends the mount for good.
    fn die(&mut self, dead: &Dead) {
        let killer = &mut self.killer;
        let (guardian, child) = (self.guarded.guardian, killer.next());
        let way = killer.random.below(3);
        if way == 0 {
            killer.note("kill the guardian");
            self.guarded.workers.push(child);
            killer.kill(guardian);
            self.answers();
            self.goes_on();
            self.guarded.workers.clear();
        }
        dead.set();
        let killer = &mut self.killer;
        if way == 1 {
            killer.note("kill the guardian and its process");
            killer.kill(guardian);
        }
        killer.kill(child);
        // A living supervisor counts deaths, from 0 after it was replaced by another program.
        eventually("the mount is dead", || {
            if let Some(next) = killer.next_if_any() {
                killer.kill(next);
            }
            is_gone(guardian) && is_gone(child) && is_dead(&self.guarded.fixture.mountpoint)
        });
    }
}

/// Returns whether the mount is dead (ENOTCONN).
fn is_dead(mountpoint: &Path) -> bool {
    fs::symlink_metadata(mountpoint.join("nothing")).is_err_and(|error| error.raw_os_error() == Some(107))
}
