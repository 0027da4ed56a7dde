//! The run itself: units times rounds times targets, targets taking turns so that a slow minute of
//! the machine hits all.
//!
//! How a number of docs/benchmarks.md is obtained: its row is a test of a table (`table/`), its column a target
//! (`target.rs`: what is mounted, with which options). In each round every target gets a visit: it is mounted
//! afresh, and a workload (`workload/`) takes one sample of each test of a group. The number is the median of the
//! rounds' samples, next to that of `direct` (`summary.rs`).
//!
//! The calling thread owns the mounts; each visit's workload runs on a thread of its own and talks to it over
//! channels. A target that cannot be mounted, or fails a workload, is left out from there on and the reason is
//! recorded; it never stops the others.

use std::fs;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;

use indicatif::{ProgressBar, ProgressStyle};

use nacre_bench_arguments::TablePlace;

use crate::clock;
use crate::failure::{Doing, Failure};
use crate::machine;
use crate::mounted::{Mounted, Start, obstacle};
use crate::options::{Plan, User};
use crate::programs;
use crate::report::{FORMAT, Report, Settings, TargetEntry, TestEntry};
use crate::scratch::Scratch;
use crate::table::Group;
use crate::target::{Ground, Target};
use crate::transport;
use crate::undo::{Guard, Undo};
use crate::workload::{self, Answer, Ask, Bounds, Buffer, Event, Link, Visit, WorkUnit};

/// Largest record of the other workloads.
const LARGEST_RECORD: u64 = 16 * 1024 * 1024;

/// Makes the run that `plan` describes. All effects on the machine are undone before it returns.
pub fn run(plan: &Plan) -> Result<Report, Failure> {
    // Programs of the ordinary user read our files, too.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    let undo = Undo::default();
    let _guard = Guard::start(undo.clone())?;
    transport::choose(plan.transport, &undo)?;
    let scratch = Scratch::prepare(plan, &undo)?;
    let mut report = empty_report(plan, &scratch)?;
    let start = clock::now();
    let mut run = Run { plan, scratch: &scratch, buffer: Buffer::new(largest_record(plan)), progress: progress(plan) };
    let result = run.all(&mut report);
    run.progress.finish_and_clear();
    report.seconds = start.elapsed().as_secs_f64();
    result.map(|()| report)
}

fn largest_record(plan: &Plan) -> usize {
    let largest = plan.scale.points.iter().map(|point| point.record).max().unwrap_or(0).max(LARGEST_RECORD);
    usize::try_from(largest).unwrap_or(usize::MAX)
}

fn groups(plan: &Plan) -> Vec<Group> {
    plan.table.groups().into_iter().filter(|group| plan.tests.iter().any(|test| test.group == *group)).collect()
}

fn units(plan: &Plan) -> Vec<WorkUnit> {
    groups(plan).into_iter().flat_map(|group| WorkUnit::of(group, &plan.scale)).collect()
}

fn progress(plan: &Plan) -> ProgressBar {
    let steps = units(plan).len() as u64 * u64::from(plan.scale.rounds) * plan.targets.len() as u64;
    // Hidden by itself when standard error is not a terminal.
    let bar = ProgressBar::new(steps);
    if let Ok(style) =
        ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed_precise} (about {eta} left)  {wide_msg}")
    {
        bar.set_style(style);
    }
    bar
}

fn empty_report(plan: &Plan, scratch: &Scratch) -> Result<Report, Failure> {
    let scale = &plan.scale;
    let tests = plan.tests.iter().map(|test| TestEntry {
        id: test.id.to_owned(),
        title: test.title.to_owned(),
        group: test.group.title().to_owned(),
        unit: test.unit.word().to_owned(),
    });
    let targets = plan.targets.iter().map(|target| TargetEntry {
        id: target.id.to_owned(),
        title: target.title.to_owned(),
        baseline: target.baseline.to_owned(),
        skipped: obstacle(target, plan),
    });
    Ok(Report {
        format: FORMAT,
        table: plan.table.arguments.name.to_owned(),
        title: plan.table.arguments.title.to_owned(),
        started: machine::now(),
        seconds: 0.0,
        machine: machine::describe(plan, scratch.source())?,
        settings: Settings {
            root: rustix::process::geteuid().is_root(),
            rounds: scale.rounds,
            amounts: scale.describe(plan.table),
            cold: scratch.cold().describe().to_owned(),
            files: scale.files,
            listing: scale.listing,
            tree: scale.tree,
            cache_bytes: scale.cache,
        },
        targets: targets.collect(),
        tests: tests.collect(),
        cells: Vec::new(),
        notes: Vec::new(),
    })
}

/// Returns the order of visits in a round. Each round starts with another target and every other one is reversed:
/// the aftermath of a heavy target (writeback, a hot processor) must not always fall on the same neighbour.
fn order(count: usize, round: usize) -> Vec<usize> {
    let forward = (0..count).map(|place| (place + round) % count.max(1));
    if round.is_multiple_of(2) { forward.collect() } else { forward.rev().collect() }
}

struct Run<'a> {
    plan: &'a Plan,
    scratch: &'a Scratch,
    buffer: Buffer,
    progress: ProgressBar,
}

impl Run<'_> {
    fn all(&mut self, report: &mut Report) -> Result<(), Failure> {
        for group in groups(self.plan) {
            let missing: Vec<&str> =
                group.needs().iter().copied().filter(|name| programs::find(name).is_none()).collect();
            let units = WorkUnit::of(group, &self.plan.scale);
            if !missing.is_empty() {
                report.notes.push(format!("{} left out: {} is not installed", group.title(), missing.join(", ")));
                self.progress
                    .inc(units.len() as u64 * u64::from(self.plan.scale.rounds) * self.plan.targets.len() as u64);
                continue;
            }
            for unit in units {
                self.unit(unit, report)?;
            }
        }
        Ok(())
    }

    fn unit(&mut self, unit: WorkUnit, report: &mut Report) -> Result<(), Failure> {
        self.progress.set_message(format!("preparing {}", unit.group().id()));
        workload::prepare(unit, self.scratch.source(), &self.plan.scale, &mut self.buffer)?;
        let mut failed: Vec<&str> = Vec::new();
        for round in 0..self.plan.scale.rounds as usize {
            let count = self.plan.targets.len();
            for target in order(count, round).into_iter().filter_map(|place| self.plan.targets.get(place)) {
                let skipped = report.targets.iter().any(|entry| entry.id == target.id && entry.skipped.is_some());
                if !skipped && !failed.contains(&target.id) && self.has_work(unit, target) {
                    self.progress.set_message(format!("{}: {}", unit.group().id(), target.title));
                    if !self.visit(unit, target, report)? {
                        failed.push(target.id);
                    }
                }
                self.progress.inc(1);
            }
        }
        Ok(())
    }

    /// Whether any test of the unit's group was requested and can be made on the target.
    fn has_work(&self, unit: WorkUnit, target: &Target) -> bool {
        self.plan.tests.iter().any(|test| test.group == unit.group() && test.suits(target))
    }

    /// Makes one visit; false if the target failed, which is then in the report. Errors are the bench's own.
    fn visit(&mut self, unit: WorkUnit, target: &'static Target, report: &mut Report) -> Result<bool, Failure> {
        let mut skip = |failure: Failure| {
            let entry = report.targets.iter_mut().find(|entry| entry.id == target.id);
            entry.into_iter().for_each(|entry| entry.skipped = Some(failure.to_string()));
            Ok(false)
        };
        let ground = match self.scratch.ground(target.ground) {
            Ok(ground) => ground,
            Err(failure) => return skip(failure),
        };
        let own = self.make_own(target, &ground)?;
        self.scratch.settle()?;
        let limit = match unit.group() {
            Group::Fill => self.plan.scale.fill,
            _ if self.plan.table.arguments.place == TablePlace::Images => self.plan.scale.image,
            _ => self.plan.scale.cage,
        };
        let start = self.start(unit, target, &ground, &own, limit)?;
        let mut mounted = match Mounted::mount(target, self.plan, self.scratch, start) {
            Ok(mounted) => mounted,
            Err(failure) => {
                fs::remove_dir_all(&own).doing("removing", &own)?;
                return skip(failure);
            }
        };
        let result = self.measure(unit, target, &mut mounted, Bounds { host: own.clone(), limit }, report);
        let gone = mounted.dismount();
        let failures: Vec<String> =
            [result, gone].into_iter().filter_map(Result::err).map(|failure| failure.to_string()).collect();
        // The directory is on the ground file system, with nothing mounted over it any more.
        fs::remove_dir_all(&own).doing("removing", &own)?;
        if failures.is_empty() {
            return Ok(true);
        }
        report.notes.push(format!("{}, {}: {}", target.title, unit.group().id(), failures.join("; then ")));
        Ok(false)
    }

    /// Returns the directories in which a visit's steps begin.
    fn start(&self, unit: WorkUnit, target: &Target, ground: &Path, own: &Path, limit: u64) -> Result<Start, Failure> {
        let (upper, work) = (own.join("upper"), own.join("work"));
        let place = match target.ground {
            Ground::Source => ground.to_owned(),
            Ground::Branches => workload::union::lower(ground),
            Ground::Fresh | Ground::FreshBtrfs => own.to_owned(),
        };
        if target.ground == Ground::Branches {
            for path in [&upper.join("own"), &work] {
                fs::create_dir_all(path).doing("creating", path)?;
            }
        }
        // Listings change nothing, so all visits share a branch that takes long to make.
        let shared = matches!(unit.group(), Group::LongNames | Group::ManyNames);
        let upper = if shared { workload::union::upper(ground) } else { upper };
        let shares = if unit.group().shares_image() { target.pool().and_then(|pool| pool.over) } else { None };
        // Loop devices are as long as whole sectors.
        let device = shares.map_or(limit, |over| (limit / over.data() as u64).next_multiple_of(1 << 20));
        Ok(Start { ground: place, upper, work, limit, device, paced: unit.group().limits_devices() })
    }

    /// Makes a directory on the ground file system for one visit, owned by the visiting user.
    fn make_own(&self, target: &Target, ground: &Path) -> Result<PathBuf, Failure> {
        let path = ground.join("own").join(target.id);
        fs::create_dir_all(&path).doing("creating", &path)?;
        if let Some(user) = self.user(target) {
            chown(&path, Some(user.uid), Some(user.gid)).doing("giving away", &path)?;
        }
        Ok(path)
    }

    fn user(&self, target: &Target) -> Option<User> {
        let root = rustix::process::geteuid().is_root();
        self.plan.user.filter(|_| target.as_user && root)
    }

    fn measure(
        &mut self,
        unit: WorkUnit,
        target: &Target,
        mounted: &mut Mounted<'_>,
        bounds: Bounds,
        report: &mut Report,
    ) -> Result<(), Failure> {
        let (event_sender, events) = mpsc::channel();
        let (answer_sender, answers) = mpsc::channel();
        let (root, user) = (mounted.root().to_owned(), self.user(target));
        let own = match target.ground {
            Ground::Source => root.join("own").join(target.id),
            Ground::Branches if target.steps.is_empty() => bounds.host.join("upper/own"),
            Ground::Branches => root.join("own"),
            Ground::Fresh | Ground::FreshBtrfs => root.clone(),
        };
        let mut visit = Visit {
            root,
            own,
            bounds,
            source: self.scratch.source().to_owned(),
            nacre: self.plan.nacre.clone(),
            scale: &self.plan.scale,
            reads_only: target.reads_only,
            direct: target.steps.is_empty(),
            copies_up: target.copies_up(),
            has_snapshots: target.has_snapshots(),
            pool: target.pool(),
            only_objects: target.is_of_objects(),
            buffer: &mut self.buffer,
            link: Link { events: event_sender, answers },
        };
        thread::scope(|scope| {
            let worker = scope.spawn(move || {
                user.map_or(Ok(()), workload::become_user)?;
                workload::run(unit, &mut visit)
                // The visit is dropped with this thread, which closes the channel and ends the loop below.
            });
            for event in events {
                match event {
                    Event::Sample(sample)
                        if self.plan.tests.iter().any(|test| test.id == sample.test && test.suits(target)) =>
                    {
                        report.add(sample, target.id)
                    }
                    Event::Sample(_) => {}
                    // A worker that has ended does not wait for the answer.
                    Event::Ask(ask) => drop(answer_sender.send(answer(mounted, &ask))),
                }
            }
            worker.join().map_err(|_| Failure::new("the workload panicked"))?
        })
    }
}

/// Carries out a request that only the owner of the mounts can.
fn answer(mounted: &mut Mounted<'_>, ask: &Ask) -> Result<Answer, Failure> {
    match ask {
        Ask::Cold => mounted.make_cold().map(Answer::Took),
        Ask::Settle => mounted.settle().map(|()| Answer::Done),
        Ask::Crash => mounted.crash().map(Answer::Took),
        Ask::Version(version) => mounted.version(version).map(Answer::Took),
        Ask::Memory => mounted.memory().map(Answer::Memory),
        Ask::Objects(what) => mounted.objects(*what).map(Answer::Took),
        Ask::Over(ask) => mounted.over(*ask).map(Answer::Took),
        Ask::OverUsed => mounted.over_used().map(|(data, metadata)| Answer::Used(data, metadata)),
        Ask::OverMoved => mounted.over_asked(|place| place.moved()).map(Answer::Bytes),
        Ask::OverShare => mounted.over_asked(|place| place.share()).map(Answer::Bytes),
        Ask::Traffic => mounted.traffic().map(Answer::Traffic),
        Ask::Segments => mounted.segments().map(Answer::Segments),
        Ask::Follow(name) => mounted.follow(name).map(Answer::Took),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_round_visits_all_and_neighbours_change() {
        for round in 0..6 {
            let mut sorted = order(5, round);
            sorted.sort_unstable();
            assert_eq!(sorted, [0, 1, 2, 3, 4]);
        }
        assert_eq!(order(3, 0), [0, 1, 2]);
        assert_eq!(order(3, 1), [0, 2, 1]);
        assert_eq!(order(0, 1), Vec::<usize>::new());
    }
}
