//! The union of a mount that this process serves: answers to commands, and the running drain.
//!
//! Called by [`crate::serve`]; [`check`] also by the command itself, for branches that are not mounted.

use super::{
    absent::{Absent, Waiting},
    place,
    report::{BranchReport, DrainReport, FindingReport, PathReport, PlaceReport},
    tiering,
};
use super::{balancing, requests};
use crate::union::requests::{BranchPosition, UnionAnswer, UnionRequest};
use crate::{
    failure::{Exit, Failure},
    left::Directories,
    outliving,
    report::{path_text, printable},
};
use nacre_layers::context::Context;
use nacre_stack::{
    spec::{BranchSpec, StackSpec},
    {BranchError, Stack},
};
use nacre_union::{BalanceRules, BranchMode, BranchStatus, Control, Direction, Edit, Presence, Problem, Stay, Union};
use nacre_vfs::Errno;
use parking_lot::Mutex;
use std::{
    fs,
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

/// The drain and the balance that were started last.
#[derive(Debug, Default)]
pub struct Drains {
    drain: Mutex<Option<Arc<Drain>>>,
    balance: balancing::Balances,
}

#[derive(Debug)]
struct Drain {
    slot: u8,
    stop: AtomicBool,
    told: Mutex<DrainReport>,
}

/// Stops both with the mount: their threads would hold its branches, also in a process that continues to serve
/// other mounts.
impl Drop for Drains {
    fn drop(&mut self) {
        self.balance.end();
        if let Some(drain) = self.drain.get_mut() {
            drain.stop.store(true, Ordering::Relaxed);
        }
    }
}

/// The mount that a command applies to.
pub struct ServedUnion<'a> {
    /// Layers of the mount.
    pub stack: &'a Stack,
    /// Ids and environment of this process.
    pub context: &'a Context,
    /// Mount point of the union.
    pub mountpoint: &'a Path,
    /// Drain and balance of the union.
    pub drains: &'a Drains,
    /// Missing branches of the union.
    pub absent: &'a Waiting,
    /// The source directories that are held open, of a mount that survives its process.
    pub directories: Option<&'a Mutex<Directories>>,
}

impl ServedUnion<'_> {
    /// Answers a command.
    ///
    /// # Errors
    /// The request cannot be carried out.
    pub fn answer(&self, request: UnionRequest) -> Result<UnionAnswer, Failure> {
        let changed = |warnings| UnionAnswer::Changed { warnings };
        Ok(match request {
            UnionRequest::List => {
                let absent = self.absent.lock().clone();
                UnionAnswer::Branches(branches(&*self.union()?, self.mountpoint, &absent))
            }
            UnionRequest::Explain { path, directory } => {
                UnionAnswer::Path(Box::new(explain(&*self.union()?, &path, directory)?))
            }
            UnionRequest::Check { repair } => UnionAnswer::Findings(check(self.stack, repair, None)?),
            UnionRequest::Add { branch, place } => changed(self.add(&branch, place)?),
            UnionRequest::Remove { branch, force } => {
                let named = requests::named(branch);
                let mut absent = self.absent.lock();
                let waiting = absent.len();
                absent.retain(|absent| absent.branch.name() != named);
                if absent.len() < waiting {
                    return Ok(changed(Vec::new()));
                }
                drop(absent);
                let place = self.find(&named)?;
                self.stack
                    .remove_branch(place, force)
                    .map_err(|error| unchanged(&error, "--force takes it out all the same"))?;
                changed(Vec::new())
            }
            UnionRequest::Modify { branch, mode } => {
                let place = self.find(&requests::named(branch))?;
                let next = "close what is open on it, or wait for it to be closed";
                changed(
                    self.stack
                        .modify_branch(place, requests::mode(&mode)?, self.context)
                        .map_err(|error| unchanged(&error, next))?,
                )
            }
            UnionRequest::Word { word } => {
                self.stack.set_creation_word(&word).map_err(|error| Failure::usage(error.to_string()))?;
                changed(Vec::new())
            }
            UnionRequest::Move { path, up } => UnionAnswer::Moved(self.move_file(&path, up)?),
            UnionRequest::Tier => UnionAnswer::Tier(Box::new(tiering::status(&self.union()?.control()))),
            UnionRequest::TierRules { rules } => {
                tiering::set(&self.union()?.control(), &rules)?;
                changed(Vec::new())
            }
            UnionRequest::TierRun { dry } => {
                UnionAnswer::TierRun(Box::new(tiering::run(&self.union()?.control(), dry)?))
            }
            UnionRequest::Drain { branch } => {
                self.drain(&requests::named(branch))?;
                changed(Vec::new())
            }
            UnionRequest::StopDrain { branch } => {
                self.stop(&requests::named(branch))?;
                changed(Vec::new())
            }
            UnionRequest::Balance { spread, min_size, max_size, include, exclude } => {
                let rules = BalanceRules { spread, min_size, max_size, include, exclude };
                self.drains.balance.start(self.union()?.control(), rules)?;
                changed(Vec::new())
            }
            UnionRequest::StopBalance => {
                self.drains.balance.stop()?;
                changed(Vec::new())
            }
            UnionRequest::BalanceStatus => UnionAnswer::Balance(self.drains.balance.told()),
            UnionRequest::DrainStatus => {
                let drain = self.drains.drain.lock().clone();
                UnionAnswer::Drain(drain.map_or_else(DrainReport::default, |drain| drain.told.lock().clone()))
            }
        })
    }

    fn union(&self) -> Result<Arc<Union>, Failure> {
        self.stack.union().ok_or_else(|| Failure::new("this mount is no union").exit(Exit::NotFound))
    }

    /// Returns the position of a branch from the top, by its path.
    fn find(&self, named: &Path) -> Result<usize, Failure> {
        let branches = self.union()?.control().list();
        let real = |path: &Path| fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let place = branches.iter().position(|branch| branch.name == named).or_else(|| {
            let wanted = real(named);
            branches.iter().position(|branch| real(&branch.name) == wanted)
        });
        place.ok_or_else(|| {
            let names: Vec<String> = branches.iter().map(|branch| path_text(&branch.name)).collect();
            Failure::new(format!("{} is no branch of this union", path_text(named)))
                .exit(Exit::NotFound)
                .next(format!("there are: {}", names.join(", ")))
        })
    }

    fn add(&self, text: &[u8], place: BranchPosition) -> Result<Vec<String>, Failure> {
        let understood = |error: String| Failure::usage(format!("BRANCH: {error}"));
        let branch = BranchSpec::parse(text, BranchMode::ro()).map_err(understood)?;
        let present = self.stack.spec();
        let directories = present.directories().into_iter().chain(branch.directories());
        let directories = directories.map(place::branch).collect::<Result<Vec<PathBuf>, _>>()?;
        // At the mount point, the path leads to the union, no longer to the directory below it.
        let itself = |directory: &Path| place::branch(directory).is_ok_and(|real| real == self.mountpoint);
        if branch.directories().into_iter().any(itself) {
            return Err(Failure::new(format!("{} is the union itself", path_text(self.mountpoint)))
                .next("a branch lies elsewhere"));
        }
        place::apart(&directories, self.mountpoint)?;
        let place = match place {
            BranchPosition::Top => 0,
            BranchPosition::At(place) => place.saturating_sub(1),
            BranchPosition::Bottom => usize::MAX,
        };
        let Some(directories) = self.directories else {
            return self.stack.add_branch(branch, place, self.context).map_err(|error| unchanged(&error, ""));
        };
        outliving::check_branch(&branch, self.mountpoint)?;
        let mut context = self.context.clone();
        let held = {
            let mut directories = directories.lock();
            let held = branch.directories().into_iter().try_for_each(|directory| directories.hold(directory));
            context.reached = directories.reached();
            held
        };
        let added =
            held.and_then(|()| self.stack.add_branch(branch, place, &context).map_err(|error| unchanged(&error, "")));
        if added.is_err() {
            // They are not recorded, and an unused directory must not keep a disk busy.
            let spec = self.stack.spec();
            drop(directories.lock().take_all_but(&spec));
        }
        added
    }

    fn move_file(&self, path: &[u8], up: bool) -> Result<u64, Failure> {
        let control = self.union()?.control();
        control.locate(path).map_err(|error| unseen(path, error))?;
        let direction = if up { Direction::Up } else { Direction::Down };
        control.move_file(path, direction, &mut |_| true).map_err(|stay| {
            let failure = Failure::new(format!("/{} stays where it is: {stay}", printable(path)));
            match stay {
                Stay::Open | Stay::InUse => failure.exit(Exit::Busy).next("close it first"),
                _ => failure,
            }
        })
    }

    fn drain(&self, named: &Path) -> Result<(), Failure> {
        let place = self.find(named)?;
        let control = self.union()?.control();
        let branch = control.list().into_iter().nth(place).ok_or_else(|| Failure::new("there is no such branch"))?;
        let mut present = self.drains.drain.lock();
        if let Some(other) = present.as_ref().filter(|drain| !drain.told.lock().ended) {
            return Err(Failure::new(format!("{} is being drained", other.told.lock().branch))
                .exit(Exit::Busy)
                .next("wait for its end, or stop it: `nacre union drain --stop`"));
        }
        let told = Mutex::new(DrainReport { branch: path_text(&branch.name), ..DrainReport::default() });
        let drain = Arc::new(Drain { slot: branch.slot, stop: AtomicBool::new(false), told });
        *present = Some(Arc::clone(&drain));
        let thread = thread::Builder::new().name("nacre-drain".to_owned()).spawn(move || drain.run(&control));
        thread.map(drop).map_err(|error| Failure::io("cannot start", "the thread that moves files", &error))
    }

    fn stop(&self, named: &Path) -> Result<(), Failure> {
        let place = self.find(named)?;
        let slot = self.union()?.control().list().get(place).map(|branch| branch.slot);
        let drain =
            self.drains.drain.lock().clone().filter(|drain| Some(drain.slot) == slot && !drain.told.lock().ended);
        let drain = drain
            .ok_or_else(|| Failure::new(format!("{} is not being drained", path_text(named))).exit(Exit::NotFound))?;
        drain.stop.store(true, Ordering::Relaxed);
        Ok(())
    }
}

impl Drain {
    fn run(&self, control: &Control) {
        let result = control.drain(self.slot, &mut |progress| {
            let mut told = self.told.lock();
            (told.moved, told.bytes, told.stays) = (progress.moved, progress.bytes, progress.left);
            !self.stop.load(Ordering::Relaxed)
        });
        let mut told = self.told.lock();
        match result {
            Ok(report) => {
                (told.moved, told.bytes, told.stays) = (report.moved, report.bytes, report.left);
                told.left = report.examples.into_iter().map(|left| (printable(&left.path), left.why)).collect();
                told.failed = report.stopped.then(|| "the move was stopped".to_owned());
            }
            Err(error) => told.failed = Some(error.to_string()),
        }
        told.ended = true;
    }
}

/// Makes a change for a user of the mount, who gets only an error number: the failure is logged.
///
/// # Errors
/// The error number for the failure.
pub fn edit(edit: Edit, ask: impl FnOnce(UnionRequest) -> Result<UnionAnswer, Failure>) -> nacre_vfs::Result<()> {
    let request = match edit {
        Edit::Add { text, place } if place == usize::MAX => {
            UnionRequest::Add { branch: text, place: BranchPosition::Bottom }
        }
        Edit::Add { text, place } => UnionRequest::Add { branch: text, place: BranchPosition::At(place + 1) },
        Edit::Modify { path, mode } => UnionRequest::Modify { branch: path.into_os_string().into_vec(), mode },
        Edit::Remove(path) => UnionRequest::Remove { branch: path.into_os_string().into_vec(), force: true },
        Edit::Word(word) => UnionRequest::Word { word },
    };
    let failure = match ask(request) {
        Ok(UnionAnswer::Changed { warnings }) => {
            warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
            return Ok(());
        }
        Ok(_) => return Err(Errno::EIO),
        Err(failure) => failure,
    };
    tracing::warn!("a change by the control file is refused: {failure}");
    Err(match failure.exit {
        Exit::Busy => Errno::EBUSY,
        Exit::NotFound => Errno::ENOENT,
        Exit::Denied => Errno::EACCES,
        Exit::Usage => Errno::EINVAL,
        // The reason is in the log; mergerfs has no other error number either.
        Exit::Failure => Errno::EIO,
    })
}

fn unseen(path: &[u8], error: Errno) -> Failure {
    let failure = Failure::new(format!("cannot look for /{} in the union: {error}", printable(path)));
    if matches!(error, Errno::ENOENT | Errno::ENOTDIR) { failure.exit(Exit::NotFound) } else { failure }
}

fn unchanged(error: &BranchError, next: &str) -> Failure {
    let failure = Failure::of_stack(format!("the branches stay as they were: {}", error.what), error.reason);
    if failure.exit == Exit::Busy { failure.next(next) } else { failure }
}

/// Returns the reports on the branches of a union, topmost first.
pub fn branches(union: &Union, mountpoint: &Path, absent: &[Absent]) -> Vec<BranchReport> {
    let mountpoint = path_text(mountpoint);
    let report = |(index, branch): (usize, BranchStatus)| BranchReport {
        mountpoint: mountpoint.clone(),
        place: index + 1,
        branch: path_text(&branch.name),
        mode: branch.mode.to_string(),
        state: if branch.draining { "draining" } else { "active" }.to_owned(),
        size: branch.space.map(|space| space.total),
        used: branch.space.map(|space| space.used),
        free: branch.space.map(|space| space.free),
        open_files: branch.open_files as u64,
    };
    let missing = absent.iter().map(|absent| BranchReport {
        mountpoint: mountpoint.clone(),
        branch: path_text(&absent.branch.name()),
        mode: absent.branch.mode.to_string(),
        state: "missing".to_owned(),
        ..BranchReport::default()
    });
    union.control().list().into_iter().enumerate().map(report).chain(missing).collect()
}

fn explain(union: &Union, path: &[u8], directory: bool) -> Result<PathReport, Failure> {
    let branches: Vec<PathBuf> = union.control().list().into_iter().map(|branch| branch.name).collect();
    let name = |index: usize| branches.get(index).map_or_else(|| "?".to_owned(), |branch| path_text(branch));
    let shown =
        |index: usize| branches.get(index).map(|branch| path_text(&branch.join(std::ffi::OsStr::from_bytes(path))));
    if path.is_empty() {
        let here =
            (0..branches.len()).map(|index| PlaceReport { branch: name(index), state: "merged".to_owned() }).collect();
        let (branch, file) =
            (branches.first().map(|branch| path_text(branch)), branches.first().map(|branch| path_text(branch)));
        let because = "the top of a union is on all branches".to_owned();
        return Ok(PathReport {
            branch: branch.clone(),
            file,
            here,
            rule: "none".to_owned(),
            chosen: branch,
            because,
            ..PathReport::default()
        });
    }
    let told = union.explain(path, directory).map_err(|error| unseen(path, error))?;
    let visible = told.here.iter().find(|(_, presence)| *presence != Presence::Whiteout);
    let visible = visible.filter(|(_, presence)| *presence != Presence::Hidden).map(|(index, _)| *index);
    let pinned = visible.is_some() && union.control().locate(path).is_ok_and(|location| location.pinned);
    let state = |presence| match presence {
        Presence::Shown => "shown",
        Presence::Merged => "merged",
        Presence::Hidden => "hidden",
        Presence::Whiteout => "whiteout",
    };
    Ok(PathReport {
        path: printable(path),
        branch: visible.map(name),
        file: visible.and_then(shown),
        pinned,
        here: told
            .here
            .iter()
            .map(|(index, presence)| PlaceReport { branch: name(*index), state: state(*presence).to_owned() })
            .collect(),
        rule: told.rule,
        chosen: told.next.chosen.ok().map(name),
        because: told.next.because,
        refused: told.next.refused.into_iter().map(|(index, why)| (name(index), why)).collect(),
    })
}

/// Checks the union of a stack. For one that was opened read-only, `read_only` states which branches are otherwise
/// writable.
///
/// # Errors
/// Errors of the branches.
pub fn check(stack: &Stack, repair: bool, read_only: Option<&[bool]>) -> Result<Vec<FindingReport>, Failure> {
    let union = stack.union().ok_or_else(|| Failure::new("this mount is no union").exit(Exit::NotFound))?;
    let findings = read_only.map_or_else(|| union.check(repair), |written| union.check_read_only(written));
    let findings = findings.map_err(|error| Failure::new(format!("not everything could be looked at: {error}")))?;
    let branches = union.control().list();
    let report = |finding: nacre_union::Finding| {
        let (problem, text) = match finding.problem {
            Problem::Leftover => ("leftover", "left over from something that was interrupted".to_owned()),
            Problem::UselessWhiteout => {
                ("useless-whiteout", "a whiteout beside the name that it would hide".to_owned())
            }
            Problem::TooManyLinks { counted, found } => {
                ("too-many-links", format!("{counted} names on lower branches, of which {found} are there"))
            }
        };
        FindingReport {
            branch: branches.get(finding.branch).map_or_else(|| "?".to_owned(), |branch| path_text(&branch.name)),
            path: printable(&finding.path),
            problem: problem.to_owned(),
            text,
            repaired: finding.repaired,
        }
    };
    Ok(findings.into_iter().map(report).collect())
}

/// Returns the output of `--explain` for a stack with a union: nothing is opened, as opening branches writes to
/// them.
pub fn plan(spec: &StackSpec, absent: &[Absent]) -> String {
    let mut text = String::from("branches, from the top\n");
    for layer in &spec.layers {
        if let nacre_stack::spec::LayerSpec::Union(union) = layer {
            for branch in &union.branch.0 {
                text.push_str(&format!("  {} {}\n", path_text(&branch.name()), branch.mode));
            }
        }
    }
    for absent in absent {
        text.push_str(&format!(
            "  {} {} (missing: it comes in when it is there)\n",
            path_text(&absent.branch.name()),
            absent.branch.mode
        ));
    }
    text
}
