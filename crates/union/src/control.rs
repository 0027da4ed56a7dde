//! Branches come, go and change while the union is in use.
//!
//! Called by whoever controls a mount, from any thread. A change is prepared while operations go
//! on, then made in a moment when none is under way ([`UnionShared::gate`]); files are looked up
//! again when somebody comes to them (`revalidate.rs`). Invariants:
//! * one change at a time; a change that fails leaves everything as it was;
//! * no file that the kernel reads by itself comes to be one that could be copied up: its reader
//!   would not see the copy;
//! * what is open on a branch that is removed by force goes on, and holds the branch.

use crate::{
    Member, OWN, Union, UnionOptions, UnionShared,
    branch::{BRANCHES_MAX, BranchMode},
    branches::{Branch, believe},
    node::UnionNode,
    open_file::UnionFile,
    policy::Space,
    removal_check::RemovalCheck,
    tier, watch,
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

/// The longest that a change waits for a moment without operations.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long new operations are kept waiting at a time for those under way to end.
const BURST: Duration = Duration::from_millis(20);
/// How long doors get to close files that nobody has open any more.
const CLOSING: Duration = Duration::from_millis(500);
/// How many files are named that are in the way.
const NAMED: usize = 5;
/// Names that are looked at again, while everybody waits, before a branch goes.
const LOOKED_AT_ALONE: usize = 10_000;

/// Why a change was refused: a sentence for the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangeError {
    errno: Errno,
    text: String,
}

impl ChangeError {
    pub(crate) fn new(errno: Errno, text: impl Into<String>) -> ChangeError {
        ChangeError { errno, text: text.into() }
    }

    /// The kind of refusal: EBUSY where files are in the way, EINVAL where it makes no sense,
    /// ENOENT where there is no such branch, else what the storage said.
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

/// A branch at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BranchStatus {
    /// Its number, which it keeps as long as it is a branch.
    pub slot: u8,
    /// As the user calls it.
    pub name: PathBuf,
    /// What may be done with it.
    pub mode: BranchMode,
    /// Nothing new is put there, because it is being or has been emptied.
    pub draining: bool,
    /// Its figures; `None` where it does not tell.
    pub space: Option<Space>,
    /// Files open on it.
    pub open_files: usize,
}

/// The control of a union: cheap to clone, for any thread. It holds the union.
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
    /// The control of this union.
    pub fn control(&self) -> Control {
        Control::from(Arc::clone(self.shared()))
    }
}

impl Control {
    /// Calls this in the moment in which a change of the branches has been made and nobody has seen
    /// it. It must not use the union.
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

    /// Has those of these options hold from now on that change while mounted: policies, least free room, where full files
    /// go, whose times directories show, which figures count. All other options stay.
    pub fn set_live_rules(&self, options: &UnionOptions) {
        self.shared.placing.rules.store(Arc::new(options.live_rules()));
    }

    /// The slot of the branch with this name.
    pub fn slot_of(&self, name: &std::path::Path) -> Option<u8> {
        self.shared.branches().iter().find(|branch| branch.name == name).map(|branch| branch.slot)
    }

    /// Adds a branch at a place counted from the top; at the bottom where that is beyond the last.
    /// Answers its slot.
    ///
    /// # Errors
    /// EINVAL for too many branches and for one that is there already; EBUSY where files are open
    /// that the kernel reads by itself and that could be copied up from now on; what the storage
    /// says.
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
        let failed = |error: Errno| ChangeError::new(error, format!("{} cannot be used: {error}", name.display()));
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

    /// Removes a branch. What is on it stays there. With `force`, files open on it go on being
    /// served from it, and what only it shows or hides is no longer shown or hidden.
    ///
    /// # Errors
    /// ENOENT where there is no such branch, EINVAL for the last one, EBUSY where files are open on
    /// it, and where it is writable and users would miss something without it.
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
        // On a read-only branch there is nothing that could have been moved off it.
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
            // Something may have been renamed to where had been looked before.
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

    /// Changes what may be done with a branch. A branch that has been drained takes files again if
    /// its mode says so.
    ///
    /// # Errors
    /// ENOENT where there is no such branch; EBUSY where it is to be read-only and files are open
    /// for writing on it, or files that the kernel reads by itself could be copied up from then on;
    /// what the storage says.
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
            // Nobody has seen it: the change was undone before operations went on.
            let _alone = shared.gate.write();
            branch.set_mode(old);
            branch.set_draining(was_draining);
            shared.enter(&branches)?;
        }
        tier::start(shared);
        done
    }
}

/// Refuses to take out a branch that users would miss; answers how many names have been looked at.
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

/// "3 files on /ssd are in use (a/b, c, ...): WHAT"
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
    /// Makes sure that nobody would miss anything without a branch, which takes nothing new from
    /// then on. Answers how many names were looked at.
    fn missed(&self, branch: &Arc<Branch>) -> Result<usize, ChangeError> {
        let was_draining = branch.is_draining();
        {
            // Creations under way end first.
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

    /// Everything that is open.
    pub(crate) fn open_files(&self) -> Vec<(Arc<UnionNode>, Arc<UnionFile>)> {
        let mut all = Vec::new();
        for node in self.nodes.all() {
            all.extend(node.open_files().into_iter().map(|file| (Arc::clone(&node), file)));
        }
        all
    }

    /// Tells doors that something has changed that did not come through them; answers whether there
    /// are any.
    pub(crate) fn tell(&self, what: &Invalidation) -> bool {
        let mut watchers = self.notices.watchers.lock();
        watchers.retain(|out| self.send(out, what.clone()));
        !watchers.is_empty()
    }

    /// Asks doors to close a file that nobody has open any more, and waits for that, at most so
    /// long. False where there are none.
    pub(crate) fn ask_to_close(&self, node: &UnionNode, most: Duration) -> bool {
        let told = self.tell(&Invalidation::Content { id: node.id });
        if told {
            // Where it stays open, whatever needs it closed is refused again.
            self.door.wait_closed(&[node.id], most, &mut || node.open_files().is_empty());
        }
        told
    }

    /// Waits until no open file is of this kind, for a moment: doors may hold files that nobody has
    /// open any more, and are asked to close them.
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

    /// Waits for a moment in which no operation is under way, and keeps it.
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

    /// Makes `after` the branches, if `check` agrees in the moment when nobody looks; `settled` is
    /// called in that moment when it is done.
    fn replace_if(
        &self,
        before: &[Arc<Branch>],
        after: Vec<Arc<Branch>>,
        check: impl FnOnce(&UnionShared) -> Result<(), ChangeError>,
        settled: impl FnOnce(),
    ) -> Result<(), ChangeError> {
        let lent = |file: &UnionFile| file.is_lent() && !file.branch().is_writable();
        // The kernel may be holding such files only in the hope of the next open.
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
            // What was interrupted when a branch was away.
            let _branches = self.gate.read();
            self.settle();
        }
        self.tell(&Invalidation::Everything);
        done
    }

    /// Enters a list of branches everywhere. Nobody is looking.
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

    /// Refuses branches over files that the kernel reads by itself, and that could be copied up
    /// now.
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

    /// Makes sure that nothing but what is open holds a branch that has been removed: its storage
    /// can be unmounted.
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
