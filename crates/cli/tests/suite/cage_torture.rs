//! Cages under torture: sixteen processes with different kinds of writes, a limit that changes all
//! the time, a daemon that is killed. The content on the host is compared with the limit at every
//! moment, and with the acknowledged writes of each writer, byte for byte.
//!
//! `NACRE_TEST_TORTURE=SECONDS` sets the duration of each run (and kills twenty times); without it,
//! a run takes a few seconds.

use crate::mounting::cages::{Cage, cost};
use crate::mounting::{Fixture, as_root, eventually, is_mounted, kill, needs, text, unmount_by};
use crate::torture::{KINDS, KINDS_TO_KILL, Lost, Random, Run};
use rustix::process::Signal;
use std::collections::HashSet;
use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

/// Not a test by itself: the entry point of the writers that other tests start.
#[test]
fn one_writer() {
    crate::torture::run_if_asked();
}

fn asked_for() -> Option<u64> {
    std::env::var("NACRE_TEST_TORTURE").ok().map(|seconds| seconds.parse().expect("NACRE_TEST_TORTURE: seconds"))
}

fn seed() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let seed = std::env::var("NACRE_TEST_SEED")
        .map_or(u64::from(now.subsec_nanos()), |seed| seed.parse().expect("NACRE_TEST_SEED"));
    println!("campaign: seed {seed} (NACRE_TEST_SEED, NACRE_TEST_TORTURE)");
    seed
}

/// Stops a daemon, so that nothing changes, for as long as `look` takes.
fn frozen<T>(pid: u32, look: impl FnOnce() -> T) -> T {
    kill(pid, Signal::STOP);
    let start = Instant::now();
    // A thread within a call that cannot be interrupted stands still where it waits.
    let stands = || {
        std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten().all(|task| {
            let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
            stat.rsplit(')')
                .next()
                .and_then(|rest| rest.trim_start().chars().next())
                .is_none_or(|state| "TtDZX".contains(state))
        })
    };
    while !stands() {
        assert!(start.elapsed() < crate::mounting::PATIENCE, "the daemon does not stop");
        std::thread::sleep(Duration::from_micros(200));
    }
    let result = look();
    kill(pid, Signal::CONT);
    result
}

/// Returns the allocated bytes of regular files on the host while nothing changes; files with
/// several names count once.
fn held(source: &Path) -> u64 {
    let sum = || {
        let (mut bytes, mut seen, mut ahead) = (0, HashSet::new(), vec![source.to_owned()]);
        while let Some(place) = ahead.pop() {
            for entry in std::fs::read_dir(place).into_iter().flatten().flatten() {
                let Ok(data) = std::fs::symlink_metadata(entry.path()) else { continue };
                if data.is_dir() {
                    ahead.push(entry.path());
                } else if data.is_file() && seen.insert(data.ino()) {
                    bytes += (data.blocks() * 512).min(data.len().next_multiple_of(4096));
                }
            }
        }
        bytes
    };
    let mut last = sum();
    loop {
        let again = sum();
        if again == last {
            return again;
        }
        last = again;
    }
}

/// The limit of a cage, and the most that the host may hold at present.
struct Ceiling {
    limit: u64,
    most: u64,
}

impl Ceiling {
    fn resize(&mut self, fixture: &Fixture, limit: u64) {
        self.most = self.most.max(limit);
        let size = limit.to_string();
        let output = fixture.nacre([
            OsStr::new("cage"),
            OsStr::new("resize"),
            fixture.mountpoint.as_os_str(),
            OsStr::new(&size),
        ]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        self.limit = limit;
        self.look(fixture);
    }

    /// Updates the allowed maximum after the limit was lowered: accepted and reserved content may stay,
    /// and no more than that until it is below the limit.
    fn look(&mut self, fixture: &Fixture) {
        if self.most > self.limit {
            let cage = Cage::of(fixture, &fixture.mountpoint);
            assert_eq!(cage.number("limit"), self.limit);
            let arriving = match cage.text("mode") {
                "through" | "announced" => 0,
                _ => cage.0["collecting"]["most_held"].as_u64().unwrap(),
            };
            self.most = self.limit.max(self.most.min(cage.number("used") + arriving));
        }
    }
}

struct Plan {
    limits: std::ops::Range<u64>,
    writes: &'static str,
    seconds: u64,
}

/// How long the books may be in doubt: a count waits twenty times as long as the one before it
/// took, and that was among sixteen writers.
const COUNTED: Duration = Duration::from_secs(120);

fn torture(plan: &Plan) {
    let seed = seed();
    let mut random = Random::new(seed);
    let first = plan.limits.end - 1;
    let mut fixture = Fixture::cage(&[&format!("--size={first}"), "--inodes=5000", plan.writes]);
    let desk = fixture.directory("desk");
    // Sixteen of them do not fit all at once.
    let most = plan.limits.end / 6;
    let run =
        Run { mountpoint: fixture.mountpoint.clone(), below: fixture.source.clone(), desk, killed: false, most, seed };
    let mut writers = run.spawn(&KINDS);
    let mut ceiling = Ceiling { limit: first, most: first };
    let (start, mut resized, mut looks, mut highest) = (Instant::now(), Instant::now(), 0, 0);
    while start.elapsed() < Duration::from_secs(plan.seconds) {
        if resized.elapsed() > Duration::from_millis(100) {
            let limit = plan.limits.start + random.below(plan.limits.end - plan.limits.start);
            ceiling.resize(&fixture, limit / 4096 * 4096);
            resized = Instant::now();
        }
        ceiling.look(&fixture);
        let used = frozen(fixture.pid(), || {
            let used = held(&fixture.source);
            if used > ceiling.most {
                println!("{}", crate::mounting::sh(&fixture.source, "find . -type f -printf '%P %s %b*512\n'"));
            }
            used
        });
        looks += 1;
        highest = highest.max(used * 100 / ceiling.limit);
        assert!(
            used <= ceiling.most,
            "the host holds {used}, {} more than the {} that may be there (limit {}); {}",
            used - ceiling.most,
            ceiling.most,
            ceiling.limit,
            Cage::of(&fixture, &fixture.mountpoint).0
        );
        ended(&mut writers);
        std::thread::sleep(Duration::from_millis(10));
    }
    run.stop();
    all_end(&mut writers);
    println!(
        "{}: {looks} looks, {} resizes at most, highest use {highest} % of the limit",
        plan.writes,
        start.elapsed().as_millis() / 100
    );
    let mut last = String::new();
    let mut right = || {
        let said = Cage::of(&fixture, &fixture.mountpoint);
        let there = cost(&fixture.source);
        last = format!("{there:?} there, {}", said.0);
        (said.number("used")..=said.number("used") + late(&fixture)).contains(&there.0)
            && said.number("inodes") == there.1
    };
    let start = Instant::now();
    while !right() {
        assert!(start.elapsed() < COUNTED, "the books do not say what is there: {last}");
        std::thread::sleep(Duration::from_millis(20));
    }
    let cage = Cage::of(&fixture, &fixture.mountpoint);
    let recalls = cage.0["collecting"]["recalls"].as_u64().unwrap_or(0);
    println!("{}: {} refused, {recalls} recalls", plan.writes, cage.refused("size"));
    assert!(cage.refused("size") > 0 || recalls > 0, "the limit was never reached: {}", cage.0);
    let before = cost(&fixture.source);
    fixture.unmount();
    assert_eq!(cost(&fixture.source), before);
    println!("{}: {} bytes compared", plan.writes, run.compare(Lost::Nothing));
}

/// The host (ext4) may give a file with holes a block for its own table of them long after it was
/// written and closed: as many bytes at most.
fn late(fixture: &Fixture) -> u64 {
    std::fs::read_dir(fixture.below("sparse")).map_or(0, |files| files.count() as u64 * 4096)
}

/// Checks that no writer has ended before it was stopped.
fn ended(writers: &mut [Child]) {
    for writer in writers {
        if let Some(status) = writer.try_wait().unwrap() {
            panic!("a writer has ended: {status}");
        }
    }
}

/// All of them end in order, soon.
fn all_end(writers: &mut [Child]) {
    let start = Instant::now();
    for writer in writers {
        while writer.try_wait().unwrap().is_none() {
            assert!(start.elapsed() < crate::mounting::PATIENCE, "a writer hangs");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(writer.wait().unwrap().success(), "a writer has failed");
    }
}

#[test]
fn sixteen_writers_in_a_small_cage() {
    needs!(as_root());
    torture(&Plan { limits: 2 * MIB..8 * MIB, writes: "--writes=through", seconds: asked_for().unwrap_or(6) });
}

#[test]
fn sixteen_writers_in_a_small_cage_that_may_collect() {
    needs!(as_root());
    torture(&Plan { limits: 2 * MIB..8 * MIB, writes: "--writes=collected", seconds: asked_for().unwrap_or(6) });
}

#[test]
fn sixteen_writers_in_a_cage_with_room() {
    needs!(as_root());
    torture(&Plan { limits: 250 * MIB..600 * MIB, writes: "--writes=collected", seconds: asked_for().unwrap_or(10) });
}

#[test]
fn killed_at_any_moment() {
    needs!(as_root());
    let seed = seed();
    let mut random = Random::new(seed);
    let rounds = if asked_for().is_some() { 20 } else { 4 };
    for round in 0..rounds {
        // Two with and without room, each in both ways of writing.
        let roomy = round / 2 % 2 == 0;
        let (size, most) = if roomy { (2048 * MIB, 16 * MIB) } else { (24 * MIB, 4 * MIB) };
        let (writes, lost) = match (round % 2, roomy) {
            (0, _) => ("--writes=through", Lost::Nothing),
            (_, false) => ("--writes=collected", Lost::Appends),
            (_, true) => ("--writes=collected", Lost::Writes),
        };
        let options = [&format!("--size={size}"), writes];
        let mut fixture = Fixture::cage(&options);
        let desk = fixture.directory("desk");
        let run_of = Run {
            mountpoint: fixture.mountpoint.clone(),
            below: fixture.source.clone(),
            desk,
            killed: true,
            most,
            seed: seed + round as u64,
        };
        let mut writers = run_of.spawn(&KINDS_TO_KILL);
        std::thread::sleep(Duration::from_millis(200 + random.below(1200)));
        fixture.signal(Signal::KILL);
        assert_eq!(fixture.ended(), None);
        run_of.stop();
        all_end(&mut writers);
        // The dead mount can be taken away as any other, or is by the next one.
        if round % 2 == 0 {
            unmount_by("umount", &[fixture.mountpoint.as_ref()]);
            assert!(!is_mounted(&fixture.mountpoint));
        }
        fixture.start_cage(&options);
        let cage = Cage::of(&fixture, &fixture.mountpoint);
        let ((bytes, inodes), late) = (cost(&fixture.source), late(&fixture));
        // Of each writer, at most one file was being made when the kill came: the count in the
        // background finds it.
        let making = inodes.saturating_sub(cage.number("inodes"));
        let right = (cage.number("used")..=cage.number("used") + late + making * 4096).contains(&bytes)
            && cage.number("inodes") <= inodes;
        assert!(
            right && making <= KINDS_TO_KILL.len() as u64,
            "round {round} {writes}: {bytes} and {inodes} there, {}",
            cage.0
        );
        assert_eq!(cage.text("start"), "crashed");
        let corrected = cage.0["corrected"].as_i64().unwrap();
        // The count may have ended before it was asked about: then nothing says any more how many
        // were being made.
        let most = i64::try_from(late + KINDS_TO_KILL.len() as u64 * 4096).unwrap();
        assert!((0..=most).contains(&corrected), "round {round} {writes}: right without a count: {}", cage.0);
        eventually("everything is counted", || {
            let cage = Cage::of(&fixture, &fixture.mountpoint);
            (cage.number("used")..=cage.number("used") + late).contains(&bytes) && cage.number("inodes") == inodes
        });
        println!("round {round} {writes}: {} bytes compared", run_of.compare(lost));
        fixture.unmount();
    }
}
