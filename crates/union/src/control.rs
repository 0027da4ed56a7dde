//! Adding, removing and changing branches while the union is in use.
//!
//! Called by the process that controls the mount, from any thread. A change is prepared while operations
//! continue, then made under the write half of [`UnionShared::gate`], when no operation is running; files are
//! looked up again at their next use (`revalidate.rs`). Invariants:
//! * one change at a time; a change that fails leaves everything as it was;
//! * no file under FUSE passthrough becomes one that could be copied up: the kernel would not read the copy;
//! * files open on a branch that is removed by force continue to work, and hold the branch.

use crate::{
    Member, OWN, Union, UnionOptions, UnionShared,
    branch::{BRANCHES_MAX, BranchMode},
    branches::{Branch, believe},
    node::UnionNode,
    open_file::UnionFile,
    policy::Space,
    removal_check::RemovalCheck,
    tier, watch,
    work::NOT_OWN,
};
use nacre_vfs::{Errno, FileId, Invalidation};
use parking_lot::RwLockWriteGuard;
use std::{
    error::Error,
    fmt,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

/// The longest wait for a moment without operations.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long new operations are delayed at a time so that the running ones can end.
const BURST: Duration = Duration::from_millis(20);
/// How long FUSE front ends get to close files that no process has open any more.
const CLOSING: Duration = Duration::from_millis(500);
/// Maximal number of blocking files that an error names.
const NAMED: usize = 5;
/// Maximal number of names that are checked again, while operations are blocked, before a branch is removed.
const LOOKED_AT_ALONE: usize = 10_000;

/// Why a change was refused, as a sentence for the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangeError {
    errno: Errno,
    text: String,
}

impl ChangeError {
    pub(crate) fn new(errno: Errno, text: impl Into<String>) -> ChangeError {
        ChangeError { errno, text: text.into() }
    }

    /// The error number: EBUSY for files in use, EINVAL for a change that makes no sense, ENOENT for an unknown
    /// branch, else the storage's error.
    pub fn errno(&self) -> Errno {
        self.errno
    }
}

impl fmt::Display for ChangeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Error for ChangeError {}

/// The state of a branch at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BranchStatus {
    /// The slot, which does not change while it is a branch.
    pub slot: u8,
    /// Name for the user.
    pub name: PathBuf,
    /// Permission and options.
    pub mode: BranchMode,
    /// No new files are created there, because it is being or has been drained.
    pub draining: bool,
    /// Figures of free space; `None` where the storage does not report them.
    pub space: Option<Space>,
    /// Number of files open on it.
    pub open_files: usize,
}

/// The handle for changing a union's branches: cheap to clone, for any thread. It holds a reference to the
/// union.
#[derive(Clone)]
pub struct Control {
    pub(crate) shared: Arc<UnionShared>,
    settled: Option<Arc<dyn Fn() + Send + Sync>>,
}

impl From<Arc<UnionShared>> for Control {
    fn from(shared: Arc<UnionShared>) -> Control {
        Control { shared, settled: None }
    }
}

impl fmt::Debug for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Control").finish_non_exhaustive()
    }
}

impl Union {
    /// Returns the control of this union.
    pub fn control(&self) -> Control {
        Control::from(Arc::clone(self.shared()))
    }
}

impl Control {
    /// Returns this control with a callback that runs when the branches have changed and before any operation
    /// sees the change. It must not use the union.
    #[must_use]
    pub fn telling(self, settled: impl Fn() + Send + Sync + 'static) -> Control {
        Control { settled: Some(Arc::new(settled)), ..self }
    }

    fn settled(&self) {
        if let Some(settled) = &self.settled {
            settled();
        }
    }

    /// All branches from the top.
    pub fn list(&self) -> Vec<BranchStatus> {
        let branches: Vec<_> = self.shared.branches().iter().map(Arc::clone).collect();
        let open = self.shared.open_files();
        let status = |branch: &Arc<Branch>| BranchStatus {
            slot: branch.slot,
            name: branch.name.clone(),
            mode: (*branch.mode()).clone(),
            draining: branch.is_draining(),
            space: branch.layer.statfs(&OWN, &branch.root).ok().map(|figures| Space::from(&figures)),
            open_files: open.iter().filter(|(_, file)| file.is_on(branch)).count(),
        };
        branches.iter().map(status).collect()
    }

    /// Applies the options that can change while mounted: policies, minimal free space, moving files off full
    /// branches, source of directory times, validity of the figures of free space. Other options stay.
    pub fn set_live_rules(&self, options: &UnionOptions) {
        self.shared.placing.rules.store(Arc::new(options.live_rules()));
    }

    /// The slot of the branch with this name.
    pub fn slot_of(&self, name: &std::path::Path) -> Option<u8> {
        self.shared.branches().iter().find(|branch| branch.name == name).map(|branch| branch.slot)
    }

    /// Adds a branch at a position from the top, or at the bottom if the position is beyond the last branch.
    /// Returns its slot.
    ///
    /// # Errors
    /// EINVAL for too many branches and for one that is already present; EBUSY where files under passthrough
    /// are open that could be copied up after the change; errors of the storage.
    pub fn add(&self, member: Member, position: usize) -> Result<u8, ChangeError> {
        let shared = &self.shared;
        let mut slots = shared.membership.changing.lock();
        let before: Vec<Arc<Branch>> = shared.branches().to_vec();
        let invalid = |text: &str| ChangeError::new(Errno::EINVAL, text);
        if shared.options.show_whiteouts && member.mode.writable() {
            return Err(invalid("whiteouts are shown, so no branch can be writable; add it as ro+wh"));
        }
        let too_many = || invalid(&format!("a union has at most {BRANCHES_MAX} branches; remove one first"));
        let slot = slots.free().filter(|_| before.len() < BRANCHES_MAX).ok_or_else(too_many)?;
        let name = member.name.clone();
        let failed = |error: Errno| {
            let why = if error == Errno::EEXIST { NOT_OWN.to_owned() } else { error.to_string() };
            ChangeError::new(error, format!("{} cannot be used: {why}", name.display()))
        };
        let branch = Arc::new(Branch::open(slot, member, &shared.options).map_err(failed)?);
        if before.iter().any(|other| other.root_id == branch.root_id) {
            return Err(invalid(&format!("{} is a branch already", branch.name.display())));
        }
        shared.identities.register(branch.root_id);
        let mut after = before.clone();
        after.insert(position.min(before.len()), Arc::clone(&branch));
        shared.replace_if(&before, after, |_| Ok(()), || self.settled())?;
        slots.take(&branch);
        shared.placing.space.forget(usize::from(slot));
        shared.attach(&branch);
        for out in shared.notices.watchers.lock().iter() {
            watch::watch(shared, &branch, out);
        }
        tier::start(shared);
        Ok(slot)
    }

    /// Removes a branch; its files stay on it. With `force`, files open on it continue to be served from it,
    /// and users no longer see the files that only this branch had, nor the effect of its whiteouts.
    ///
    /// # Errors
    /// ENOENT for an unknown branch, EINVAL for the last one, EBUSY where files are open on it, and where it is
    /// writable and its removal would change the visible tree.
    pub fn remove(&self, slot: u8, force: bool) -> Result<(), ChangeError> {
        let shared = &self.shared;
        let _slots = shared.membership.changing.lock();
        let branch = shared.in_slot(slot)?;
        {
            let _branches = shared.gate.read();
            shared.settle();
        }
        if !force && shared.has_moves_to(&branch) {
            let text = format!(
                "a file on {} is still on its way there: drain the other branch again, or use force",
                branch.name.display()
            );
            return Err(ChangeError::new(Errno::EBUSY, text));
        }
        let before: Vec<Arc<Branch>> = shared.branches().to_vec();
        let after: Vec<_> = before.iter().filter(|other| other.slot != slot).map(Arc::clone).collect();
        if after.is_empty() {
            return Err(ChangeError::new(
                Errno::EINVAL,
                "the last branch cannot be removed; unmount the union instead",
            ));
        }
        if !force {
            let busy = |files: &[_]| {
                ChangeError::new(Errno::EBUSY, in_use(&branch, files, "close them, drain the branch, or use force"))
            };
            shared.wait_for_closing(|file| file.is_on(&branch)).map_err(|files| busy(&files))?;
        }
        // Nothing could have been moved off a read-only branch.
        let guarded = !force && branch.is_writable();
        let was_draining = branch.is_draining();
        let looked_at = if guarded { Some(shared.missed(&branch)?) } else { None };
        let check = |shared: &UnionShared| {
            let open = shared.open_files();
            let there: Vec<_> =
                open.into_iter().filter(|(_, file)| file.is_on(&branch)).map(|(node, _)| node).collect();
            if !force && !there.is_empty() {
                return Err(ChangeError::new(
                    Errno::EBUSY,
                    in_use(&branch, &there, "close them, drain the branch, or use force"),
                ));
            }
            // A rename may have moved names into a directory that was already checked.
            match looked_at {
                Some(few) if few <= LOOKED_AT_ALONE => {
                    refuse_loss(&branch, shared.check_removal(&branch, || ())).map(drop)
                }
                _ => Ok(()),
            }
        };
        let done = shared.replace_if(&before, after, check, || self.settled());
        if done.is_err() && guarded {
            branch.set_draining(was_draining);
        }
        done?;
        shared.let_go(&branch);
        Ok(())
    }

    /// Changes the mode of a branch. A drained branch takes new files again if its mode allows it.
    ///
    /// # Errors
    /// ENOENT for an unknown branch; EBUSY where it becomes read-only while files on it are open for writing,
    /// or where files under passthrough could be copied up after the change; errors of the storage.
    pub fn modify(&self, slot: u8, mode: BranchMode) -> Result<(), ChangeError> {
        let shared = &self.shared;
        let _slots = shared.membership.changing.lock();
        let branch = shared.in_slot(slot)?;
        if shared.options.show_whiteouts && mode.writable() {
            return Err(ChangeError::new(Errno::EINVAL, "whiteouts are shown, so no branch can be writable"));
        }
        let failed =
            |error: Errno| ChangeError::new(error, format!("{} cannot be {mode}: {error}", branch.name.display()));
        branch.prepare(&mode).map_err(failed)?;
        let closes = branch.is_writable() && !mode.writable();
        let writes = |file: &UnionFile| closes && file.is_on(&branch) && file.writes();
        let busy =
            |files: &[_]| ChangeError::new(Errno::EBUSY, in_use(&branch, files, "for writing; close them first"));
        shared.wait_for_closing(writes).map_err(|files| busy(&files))?;
        let (old, was_draining) = ((*branch.mode()).clone(), branch.is_draining());
        let branches: Vec<Arc<Branch>> = shared.branches().to_vec();
        let check = |shared: &UnionShared| {
            let there: Vec<_> =
                shared.open_files().into_iter().filter(|(_, file)| writes(file)).map(|(node, _)| node).collect();
            if !there.is_empty() {
                return Err(busy(&there));
            }
            branch.set_mode(mode);
            branch.set_draining(false);
            Ok(())
        };
        let done = shared.replace_if(&branches, branches.clone(), check, || self.settled());
        if done.is_err() {
            // No operation has seen the change: it is undone before operations continue.
            let _alone = shared.gate.write();
            branch.set_mode(old);
            branch.set_draining(was_draining);
            shared.enter(&branches)?;
        } else if closes {
            branch.close_work();
        }
        tier::start(shared);
        done
    }
}

/// Refuses the removal of a branch that would change the visible tree; returns the number of names checked.
fn refuse_loss(branch: &Branch, check: Result<RemovalCheck, Errno>) -> Result<usize, ChangeError> {
    let failed = |error: Errno| {
        let text = format!(
            "{} cannot be looked at: {error}: nobody knows what would be missed; repair it, or use force",
            branch.name.display()
        );
        ChangeError::new(error, text)
    };
    let check = check.map_err(failed)?;
    match check.reason(branch) {
        Some(reason) => Err(ChangeError::new(Errno::EBUSY, reason)),
        None => Ok(check.looked_at),
    }
}

/// Formats "3 files on /ssd are in use (a/b, c, ...): WHAT".
fn in_use(branch: &Branch, files: &[Arc<UnionNode>], what: &str) -> String {
    format!("{} in use on {} ({}): {what}", count(files.len()), branch.name.display(), names(files))
}

fn count(files: usize) -> String {
    if files == 1 { "1 file is".to_owned() } else { format!("{files} files are") }
}

fn names(files: &[Arc<UnionNode>]) -> String {
    let name = |node: &Arc<UnionNode>| {
        let path = node.path().filter(|_| !node.is_gone());
        path.map_or_else(|| "a removed file".to_owned(), |path| path.escape_ascii().to_string())
    };
    let mut text = files.iter().take(NAMED).map(name).collect::<Vec<_>>().join(", ");
    if files.len() > NAMED {
        text.push_str(", ...");
    }
    text
}

impl UnionShared {
    /// Checks that users would miss nothing without a branch, and marks the branch as draining, so that nothing
    /// new is created there. Returns the number of names checked.
    fn missed(&self, branch: &Arc<Branch>) -> Result<usize, ChangeError> {
        let was_draining = branch.is_draining();
        {
            // Wait for creations in progress.
            let _alone = self.alone()?;
            branch.set_draining(true);
        }
        let looked = refuse_loss(branch, self.check_removal(branch, || self.gate.read()));
        if looked.is_err() {
            branch.set_draining(was_draining);
        }
        looked
    }

    /// The branch in a slot.
    ///
    /// # Errors
    /// ENOENT where there is none.
    pub(crate) fn in_slot(&self, slot: u8) -> Result<Arc<Branch>, ChangeError> {
        let found = self.branches().iter().find(|branch| branch.slot == slot).map(Arc::clone);
        found.ok_or_else(|| ChangeError::new(Errno::ENOENT, format!("there is no branch {slot}")))
    }

    /// All open files with their nodes.
    pub(crate) fn open_files(&self) -> Vec<(Arc<UnionNode>, Arc<UnionFile>)> {
        let mut all = Vec::new();
        for node in self.nodes.all() {
            all.extend(node.open_files().into_iter().map(|file| (Arc::clone(&node), file)));
        }
        all
    }

    /// Notifies the FUSE front ends of a change that did not come through them; returns whether there are any.
    pub(crate) fn tell(&self, what: &Invalidation) -> bool {
        let mut watchers = self.notices.watchers.lock();
        watchers.retain(|out| self.send(out, what.clone()));
        !watchers.is_empty()
    }

    /// Asks the FUSE front ends to close a file that no process has open any more, and waits for that until the
    /// deadline `most`. Returns false if there are no front ends.
    pub(crate) fn ask_to_close(&self, node: &UnionNode, most: Duration) -> bool {
        let told = self.tell(&Invalidation::Content { id: node.id });
        if told {
            // If it stays open, the operation that needs it closed is refused again.
            self.door.wait_closed(&[node.id], most, &mut || node.open_files().is_empty());
        }
        told
    }

    /// Waits until no open file is of this kind, for `CLOSING` at most: FUSE front ends may hold files that no
    /// process has open any more, and are asked to close them.
    fn wait_for_closing(&self, kind: impl Fn(&UnionFile) -> bool) -> Result<(), Vec<Arc<UnionNode>>> {
        let there = || -> Vec<Arc<UnionNode>> {
            self.open_files().into_iter().filter(|(_, file)| kind(file)).map(|(node, _)| node).collect()
        };
        let mut open = there();
        if open.is_empty() {
            return Ok(());
        }
        self.tell(&Invalidation::Everything);
        let files: Vec<FileId> = open.iter().map(|node| node.id).collect();
        let closed = self.door.wait_closed(&files, CLOSING, &mut || {
            open = there();
            open.is_empty()
        });
        if closed { Ok(()) } else { Err(open) }
    }

    /// Waits until no operation is running, and returns the write lock that keeps it so.
    #[expect(clippy::disallowed_methods, reason = "a lock that nobody may queue for is tried again, with an end")]
    pub(crate) fn alone(&self) -> Result<RwLockWriteGuard<'_, ()>, ChangeError> {
        let start = Instant::now();
        let _wanted = self.membership.want();
        loop {
            if let Some(gate) = self.gate.try_write_for(BURST) {
                return Ok(gate);
            }
            if start.elapsed() > PATIENCE {
                return Err(ChangeError::new(
                    Errno::EBUSY,
                    "an operation takes too long, such as the copy of a large file; try again later",
                ));
            }
            std::thread::sleep(BURST / 4);
        }
    }

    /// Replaces the list of branches by `after` if `check`, called while no operation is running, agrees;
    /// `settled` is called under the same lock after the change.
    fn replace_if(
        &self,
        before: &[Arc<Branch>],
        after: Vec<Arc<Branch>>,
        check: impl FnOnce(&UnionShared) -> Result<(), ChangeError>,
        settled: impl FnOnce(),
    ) -> Result<(), ChangeError> {
        let lent = |file: &UnionFile| file.is_lent() && !file.branch().is_writable();
        // The kernel may hold these files only in case they are opened again.
        if self.open_files().iter().any(|(_, file)| lent(file)) {
            let _ = self.wait_for_closing(lent);
        }
        let alone = self.alone()?;
        check(self)?;
        let routes = self.placing.routes.load_full();
        let done = self.enter(&after).and_then(|()| self.check_lent());
        if done.is_err() {
            self.enter(before)?;
        } else {
            let names: Vec<PathBuf> = after.iter().map(|branch| branch.name.clone()).collect();
            let place =
                |index: usize| before.get(index).map(|branch| branch.index()).filter(|index| *index != usize::MAX);
            self.placing.routes.store(Arc::new(routes.moved(&place, &names)));
            for gone in before.iter().filter(|old| !after.iter().any(|new| new.slot == old.slot)) {
                self.listings.branch_is_gone(gone.slot);
            }
            settled();
        }
        drop(alone);
        {
            // Finish moves that were interrupted while a branch was missing.
            let _branches = self.gate.read();
            self.settle();
        }
        self.tell(&Invalidation::Everything);
        done
    }

    /// Makes a list of branches current in all tables. No operation is running.
    fn enter(&self, branches: &[Arc<Branch>]) -> Result<(), ChangeError> {
        for old in self.branches().iter() {
            old.retire();
        }
        for (index, branch) in branches.iter().enumerate() {
            branch.set_index(index);
        }
        believe(branches);
        self.set_branches(branches.to_vec());
        self.nodes.next_epoch();
        self.listings.forget_all();
        let failed = |error: Errno| ChangeError::new(error, format!("the branches cannot be put together: {error}"));
        self.hardlinks.reload(branches).map_err(failed)?;
        self.renew_root().map_err(failed)
    }

    /// Refuses a list of branches under which an open file under passthrough could be copied up.
    fn check_lent(&self) -> Result<(), ChangeError> {
        let risky =
            |file: &UnionFile| file.is_lent() && !file.branch().is_writable() && self.can_rise(file.branch().index());
        let there: Vec<_> =
            self.open_files().into_iter().filter(|(_, file)| risky(file)).map(|(node, _)| node).collect();
        if there.is_empty() {
            return Ok(());
        }
        let text = format!(
            "{} open that could not be changed before and could be now ({}): close them first",
            count(there.len()),
            names(&there)
        );
        Err(ChangeError::new(Errno::EBUSY, text))
    }

    /// Drops all references to a removed branch except those of open files, so that its storage can be
    /// unmounted.
    fn let_go(&self, branch: &Arc<Branch>) {
        for node in self.nodes.all() {
            if node.part_on(branch).is_none() {
                continue;
            }
            let _branches = self.gate.read();
            if let Err(error) = self.revalidate(&node) {
                tracing::debug!(?error, "a file of a removed branch is looked up again later");
            } else if node.part_on(branch).is_some() && node.open_files().is_empty() {
                node.settle(Vec::new(), 0);
            }
        }
        self.nodes.forget_slot(branch.slot);
    }
}
