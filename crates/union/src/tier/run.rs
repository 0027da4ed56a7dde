//! Tiering at work: collects the figures for decisions, and moves files, while the union is in use.
//!
//! Started with the first union that has two tiers ([`start`]); commands call [`Control::tier_run`]. One run at
//! a time. Files are found by walking the union's directories that are on the tier; at most [`MOST`] are
//! remembered, the ones unused for longest. The thread holds a reference to the union only while it works, and
//! ends with it.

use super::{Candidate, Step, TierRules, TierView, Why, heat::Heat, plan};
use crate::{
    OWN, UnionShared,
    branches::Branch,
    control::Control,
    hardlinks::relocate::Scans,
    node::UnionNode,
    relocate::{Goal, LEFT_MAX, Left, Stay},
};
use hashbrown::HashSet;
use nacre_vfs::{Errno, Kind, Result};
use parking_lot::{Condvar, Mutex};
use std::{
    path::PathBuf,
    sync::{Arc, Weak},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

/// Maximal number of files in one run.
const MOST: usize = 100_000;

/// The state of tiering.
pub(crate) struct Tiering {
    rules: Mutex<TierRules>,
    pub(crate) heat: Heat,
    /// Held during a run.
    running: Mutex<()>,
    figures: Mutex<Figures>,
    wake: Arc<Wake>,
}

/// Ends the pause of the thread early: new rules, or the end of the union.
#[derive(Default)]
struct Wake {
    is_due: Mutex<bool>,
    told: Condvar,
}

impl Wake {
    fn call(&self) {
        *self.is_due.lock() = true;
        self.told.notify_all();
    }

    fn pause(&self, time: Duration) {
        let mut is_due = self.is_due.lock();
        self.told.wait_while_for(&mut is_due, |is_due| !*is_due, time);
        *is_due = false;
    }
}

#[derive(Clone, Default)]
struct Figures {
    started: bool,
    busy: bool,
    up: u64,
    down: u64,
    bytes: u64,
    last_run: Option<SystemTime>,
    last_scan: Option<Duration>,
}

impl Tiering {
    pub(crate) fn new(rules: TierRules) -> Tiering {
        Tiering {
            rules: Mutex::new(rules),
            heat: Heat::default(),
            running: Mutex::new(()),
            figures: Mutex::default(),
            wake: Arc::default(),
        }
    }
}

impl Drop for Tiering {
    fn drop(&mut self) {
        self.wake.call();
    }
}

/// The present figures of one tier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TierFigures {
    /// The branch's slot.
    pub slot: u8,
    /// Its name.
    pub name: PathBuf,
    /// Bytes used.
    pub used: u64,
    /// Total bytes.
    pub total: u64,
}

/// The present state of tiering.
#[derive(Clone, Debug, PartialEq)]
pub struct TierStatus {
    /// The rules of tiering.
    pub rules: TierRules,
    /// The tiers, the fastest first; with fewer than two nothing is done.
    pub tiers: Vec<TierFigures>,
    /// Whether files are being moved at this moment.
    pub busy: bool,
    /// Files moved up since the mount.
    pub moved_up: u64,
    /// Files moved down.
    pub moved_down: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// Time of the last scan.
    pub last_run: Option<SystemTime>,
}

/// A move of a run, planned or done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedMove {
    /// Path, names divided by slashes.
    pub path: Vec<u8>,
    /// The branch that the file leaves.
    pub from: PathBuf,
    /// The branch that the file is moved to.
    pub to: PathBuf,
    /// Bytes.
    pub bytes: u64,
    /// The reason.
    pub why: Why,
}

/// The result of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TierReport {
    /// The planned moves.
    pub planned: Vec<PlannedMove>,
    /// Files moved.
    pub moved: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// The first 1,000 files that should move but stay, with the reasons.
    pub left: Vec<Left>,
    /// Whether the run was stopped before its end.
    pub stopped: bool,
}

/// The present time, in the clock of file timestamps.
#[expect(clippy::disallowed_methods, reason = "the age of files, whose times are those of the system")]
pub(crate) fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Starts the thread, once there are two tiers.
pub(crate) fn start(shared: &Arc<UnionShared>) {
    let tiering = &shared.tiering;
    tiering.heat.set(shared.tiers().len() > 1 && tiering.rules.lock().heat.is_some());
    {
        let mut figures = tiering.figures.lock();
        if figures.started || shared.tiers().len() < 2 {
            return;
        }
        figures.started = true;
    }
    let (weak, wake) = (Arc::downgrade(shared), Arc::clone(&tiering.wake));
    if let Err(error) = std::thread::Builder::new().name("union-tiers".to_owned()).spawn(move || work(&weak, &wake)) {
        tracing::error!(%error, "files are not moved between tiers");
        tiering.figures.lock().started = false;
    }
}

fn work(shared: &Weak<UnionShared>, wake: &Wake) {
    loop {
        // First the pause: a union that has just been mounted should serve requests first.
        let Some(every) = shared.upgrade().map(|union| union.tiering.rules.lock().every) else { return };
        wake.pause(every);
        let Some(union) = shared.upgrade() else { return };
        let control = Control::from(union);
        let gone = || shared.strong_count() <= 1;
        let report = control.tier_tick(now(), &mut |_| !gone());
        if report.moved > 0 || !report.left.is_empty() {
            tracing::info!(
                moved = report.moved,
                bytes = report.bytes,
                left = report.left.len(),
                "tiers have been balanced"
            );
        }
    }
}

impl Control {
    /// Returns the rules of tiering.
    pub fn tier_rules(&self) -> TierRules {
        self.shared.tiering.rules.lock().clone()
    }

    /// Changes the rules of tiering; the next check, which comes soon, uses them.
    ///
    /// # Errors
    /// Rules that contradict each other.
    pub fn set_tier_rules(&self, rules: TierRules) -> Result<(), crate::branch::ParseError> {
        rules.check()?;
        *self.shared.tiering.rules.lock() = rules;
        start(&self.shared);
        self.shared.tiering.wake.call();
        Ok(())
    }

    /// Returns the present state of tiering.
    pub fn tier_status(&self) -> TierStatus {
        let tiering = &self.shared.tiering;
        let figures = tiering.figures.lock().clone();
        let tiers = self.shared.tiers();
        let told = |branch: &Arc<Branch>| {
            let view = self.shared.tier_view(branch).unwrap_or_default();
            TierFigures { slot: branch.slot, name: branch.name.clone(), used: view.used, total: view.total }
        };
        TierStatus {
            rules: tiering.rules.lock().clone(),
            tiers: tiers.iter().map(told).collect(),
            busy: figures.busy,
            moved_up: figures.up,
            moved_down: figures.down,
            bytes: figures.bytes,
            last_run: figures.last_run,
        }
    }

    /// Scans all files now and moves those that have to move; with `dry`, only reports the moves. `progress` is
    /// called before each piece with its size in bytes and returns whether to continue.
    ///
    /// # Errors
    /// EINVAL where there are fewer than two tiers; errors of the branches.
    pub fn tier_run(&self, dry: bool, progress: &mut dyn FnMut(u64) -> bool) -> Result<TierReport> {
        self.tier_run_at(now(), dry, progress)
    }

    /// As [`Control::tier_run`], with a given time.
    ///
    /// # Errors
    /// As [`Control::tier_run`].
    pub fn tier_run_at(&self, now: Duration, dry: bool, progress: &mut dyn FnMut(u64) -> bool) -> Result<TierReport> {
        if self.shared.tiers().len() < 2 {
            return Err(Errno::EINVAL);
        }
        let rules = self.tier_rules();
        let _one = self.shared.tiering.running.lock();
        self.balance(&rules, now, true, dry, progress)
    }

    /// A periodic run of the thread.
    fn tier_tick(&self, now: Duration, progress: &mut dyn FnMut(u64) -> bool) -> TierReport {
        let (shared, rules) = (&self.shared, self.tier_rules());
        let Some(_one) = shared.tiering.running.try_lock() else { return TierReport::default() };
        let tiers = shared.tiers();
        if tiers.len() < 2 {
            return TierReport::default();
        }
        let full = tiers
            .iter()
            .take(tiers.len() - 1)
            .any(|branch| shared.tier_view(branch).is_ok_and(|view| view.is_above(rules.high)));
        let last = shared.tiering.figures.lock().last_scan;
        let scan = rules.needs_scans() && last.is_none_or(|last| now.saturating_sub(last) >= rules.scan);
        let hot = rules.heat.is_some_and(|heat| !shared.tiering.heat.above(f64::from(heat), now).is_empty());
        if !full && !scan && !hot {
            return TierReport::default();
        }
        self.balance(&rules, now, full || scan, false, progress).unwrap_or_else(|error| {
            tracing::warn!(?error, "tiers cannot be looked at");
            TierReport::default()
        })
    }

    /// Performs one run. Without `scan`, only often used files are considered.
    #[expect(clippy::disallowed_methods, reason = "for people who ask when it ran last")]
    fn balance(
        &self,
        rules: &TierRules,
        now: Duration,
        scan: bool,
        dry: bool,
        progress: &mut dyn FnMut(u64) -> bool,
    ) -> Result<TierReport> {
        let shared = &self.shared;
        let tiers = shared.tiers();
        let views: Vec<TierView> = tiers.iter().map(|branch| shared.tier_view(branch)).collect::<Result<_>>()?;
        let mut files = Vec::new();
        if scan {
            for tier in 0..tiers.len() {
                // Files on the last tier only move up, for which there has to be a pattern.
                if tier + 1 < tiers.len() || !rules.hot.is_empty() {
                    shared.candidates(&tiers, tier, now, &mut files)?;
                }
            }
            shared.tiering.figures.lock().last_scan = Some(now);
        }
        self.add_hot(rules, &tiers, now, &mut files);
        let steps = plan(rules, now, &views, &files);
        let mut report = TierReport::default();
        for step in &steps {
            if let (Some(file), Some(to)) = (files.get(step.file), tiers.get(step.to)) {
                let from = tiers.get(file.tier).map(|from| from.name.clone()).unwrap_or_default();
                report.planned.push(PlannedMove {
                    path: file.path.clone(),
                    from,
                    to: to.name.clone(),
                    bytes: file.size,
                    why: step.why,
                });
            }
        }
        if !dry {
            shared.tiering.figures.lock().busy = true;
            self.carry_out(rules, &tiers, &files, &steps, &mut report, progress);
            let mut figures = shared.tiering.figures.lock();
            (figures.busy, figures.last_run) = (false, Some(SystemTime::now()));
        }
        Ok(report)
    }

    /// Adds often used files that are not among the candidates.
    fn add_hot(&self, rules: &TierRules, tiers: &[Arc<Branch>], now: Duration, files: &mut Vec<Candidate>) {
        let Some(least) = rules.heat else { return };
        for (id, _, path) in self.shared.tiering.heat.above(f64::from(least), now) {
            let _branches = self.shared.gate.read();
            // By its present path, or the one at its first open.
            let known = self.shared.nodes.by_id(id).and_then(|node| node.path());
            let path = known.unwrap_or(path);
            let Ok(node) = self.find(&path) else { continue };
            if node.id == id && !files.iter().any(|file| file.path == path) {
                files.extend(self.shared.candidate(&node, path, tiers, now).ok().flatten().map(|(file, _)| file));
            }
        }
    }

    #[expect(clippy::disallowed_methods, reason = "measures a rate")]
    fn carry_out(
        &self,
        rules: &TierRules,
        tiers: &[Arc<Branch>],
        files: &[Candidate],
        steps: &[Step],
        report: &mut TierReport,
        progress: &mut dyn FnMut(u64) -> bool,
    ) {
        let mut scans = Scans::default();
        let mut rate = Rate { rate: rules.rate, start: Instant::now(), bytes: 0 };
        for step in steps {
            let (Some(file), Some(to)) = (files.get(step.file), tiers.get(step.to)) else { continue };
            match self.carry(file, to, &mut scans, progress, &mut rate) {
                Ok(bytes) => {
                    report.moved += 1;
                    report.bytes += bytes;
                    let mut figures = self.shared.tiering.figures.lock();
                    figures.bytes += bytes;
                    if step.to < file.tier { figures.up += 1 } else { figures.down += 1 }
                }
                Err(Stay::Stopped) => {
                    report.stopped = true;
                    return;
                }
                Err(why) if report.left.len() < LEFT_MAX => {
                    report.left.push(Left { path: file.path.clone(), why: why.to_string() })
                }
                Err(_) => {}
            }
        }
    }

    /// Moves one file; retries whenever a change of the branches interrupts it.
    fn carry(
        &self,
        file: &Candidate,
        to: &Arc<Branch>,
        scans: &mut Scans,
        progress: &mut dyn FnMut(u64) -> bool,
        rate: &mut Rate,
    ) -> Result<u64, Stay> {
        loop {
            let mut stop = false;
            let moved = {
                let _branches = self.shared.gate.read();
                if !to.is_member() {
                    return Err(Stay::Changed);
                }
                let node = self.find(&file.path)?;
                let mut pace = |bytes: u64| {
                    stop |= !progress(bytes);
                    !stop && rate.wait(bytes, &self.shared)
                };
                self.shared.relocate_all(&node, &Goal::Branch(Arc::clone(to)), &mut pace, scans)
            };
            match moved {
                Err(Stay::Stopped) if !stop => self.shared.membership.give_way(),
                other => return other,
            }
        }
    }
}

/// Limits copying to a number of bytes per second.
struct Rate {
    rate: Option<u64>,
    start: Instant,
    bytes: u64,
}

impl Rate {
    /// Waits until these bytes may be copied; false if a change of the branches is waiting.
    fn wait(&mut self, bytes: u64, shared: &UnionShared) -> bool {
        let Some(rate) = self.rate else { return true };
        let due = Duration::from_secs_f64(self.bytes as f64 / rate as f64);
        while self.start.elapsed() < due {
            if shared.membership.is_wanted_within(due.saturating_sub(self.start.elapsed())) {
                return false;
            }
        }
        self.bytes = self.bytes.saturating_add(bytes);
        true
    }
}

impl UnionShared {
    fn control(self: &Arc<UnionShared>) -> Control {
        Control::from(Arc::clone(self))
    }

    /// The tiers, the fastest first.
    pub(crate) fn tiers(&self) -> Vec<Arc<Branch>> {
        self.branches().iter().filter(|branch| branch.creates() && branch.mode().tier).map(Arc::clone).collect()
    }

    fn tier_view(&self, branch: &Branch) -> Result<TierView> {
        let space = crate::policy::Space::from(&branch.layer.statfs(&OWN, &branch.root)?);
        // Space reserved for root does not count.
        Ok(TierView { used: space.used, total: space.used.saturating_add(space.free) })
    }

    /// Counts an open of a file.
    pub(crate) fn note_open(&self, node: &UnionNode) {
        if self.tiering.heat.is_on() {
            self.tiering.heat.opened(node.id, now(), || node.path());
        }
    }

    /// The figures of a file, and its number of names; `None` for a file that cannot be moved.
    fn candidate(
        &self,
        node: &Arc<UnionNode>,
        path: Vec<u8>,
        tiers: &[Arc<Branch>],
        now: Duration,
    ) -> Result<Option<(Candidate, u32)>> {
        let top = node.top()?;
        let Some(tier) = tiers.iter().position(|branch| branch.slot == top.branch.slot) else { return Ok(None) };
        if node.kind != Kind::File {
            return Ok(None);
        }
        let attr = top.branch.layer.getattr(&OWN, &top.node, None)?;
        let stamp = |time: nacre_vfs::Time| Duration::new(u64::try_from(time.sec).unwrap_or(0), time.nsec);
        let last_used = stamp(attr.atime).max(stamp(attr.mtime));
        let heat = self.tiering.heat.of(node.id, now);
        let size = attr.blocks.saturating_mul(512);
        Ok(Some((Candidate { path, tier, size, last_used, heat, pinned: self.is_pinned(node)? }, attr.nlink)))
    }

    /// The files on a tier.
    fn candidates(
        self: &Arc<UnionShared>,
        tiers: &[Arc<Branch>],
        tier: usize,
        now: Duration,
        files: &mut Vec<Candidate>,
    ) -> Result<()> {
        let Some(branch) = tiers.get(tier) else { return Ok(()) };
        let start = files.len();
        // Files with several names are one candidate.
        let mut linked = HashSet::new();
        let mut waiting = vec![Vec::new()];
        while let Some(path) = waiting.pop() {
            for name in self.names_under(&path, branch) {
                let mut whole = path.clone();
                if !whole.is_empty() {
                    whole.push(b'/');
                }
                whole.extend_from_slice(&name);
                let _branches = self.gate.read();
                let Ok(node) = self.control().find(&whole) else { continue };
                if node.kind == Kind::Directory {
                    if node.part_on(branch).is_some() && !self.is_pinned(&node)? {
                        waiting.push(whole);
                    }
                } else if let Ok(Some((found, names))) = self.candidate(&node, whole, tiers, now)
                    && found.tier == tier
                    && (names == 1 || linked.insert(node.id))
                {
                    files.push(found);
                }
            }
            if files.len() - start > 2 * MOST {
                // The most recently used ones are dropped.
                if let Some(those) = files.get_mut(start..) {
                    those.sort_by_key(|file| file.last_used);
                }
                files.truncate(start + MOST);
            }
        }
        Ok(())
    }

    /// The names of a directory that may be on a branch; none if it is gone.
    fn names_under(self: &Arc<UnionShared>, path: &[u8], branch: &Branch) -> Vec<Vec<u8>> {
        let _branches = self.gate.read();
        let found = self.control().find(path);
        found.and_then(|directory| self.names_on(&directory, branch)).unwrap_or_default()
    }
}
