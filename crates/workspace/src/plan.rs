//! Plans a commit: the changes, their conflicts with the base, and what an administrator has to confirm.

mod several;

use crate::{
    Base, Change, ChangeKind, CommitOptions, Committed, Conflict, Danger, Resolution, Result, Upper, WorkspaceError,
    base::Below,
    beneath::Tree,
    build, changes,
    compare::{self, BaseEntry, Comparison, Item, bytes, path_of},
    execute::{Execution, Pause},
    journal::Journal,
    meta::Meta,
    steps::Steps,
    trouble::{During, fact, shown},
    upper::MARK,
};
use nacre_sys::accounts;
use nacre_union::base_log::HiddenEntry;
use rustix::fs::FileType;
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

/// The steps of a commit, before any is made.
#[derive(Debug)]
pub struct CommitPlan {
    base: Base,
    upper: Upper,
    comparison: Comparison,
    /// Paths in the view of the entries that are committed.
    items: BTreeSet<PathBuf>,
    /// Paths in the base of the entries that are removed.
    removed: BTreeSet<PathBuf>,
    /// Conflicts, and the changes that each drops from the commit if it is resolved for the base.
    conflicts: BTreeMap<PathBuf, Found>,
    resolutions: HashMap<PathBuf, Resolution>,
    /// The entries in each directory of the base that goes as a whole, as they were compared.
    seen: BTreeMap<PathBuf, Vec<BaseEntry>>,
    protected: Vec<PathBuf>,
    /// All changes of the workspace are committed.
    is_whole: bool,
    /// Paths that are committed though their changes were not given.
    added: Vec<PathBuf>,
}

/// A conflict with the changes that it belongs to.
#[derive(Debug, Default)]
struct Found {
    ours: &'static str,
    theirs: &'static str,
    items: BTreeSet<PathBuf>,
    removed: BTreeSet<PathBuf>,
}

/// Whose change a conflict belongs to.
#[derive(Clone, Copy)]
enum Of<'a> {
    Item(&'a Path),
    Removal(&'a Path),
}

impl CommitPlan {
    /// Plans a commit of these changes; finds conflicts and dangers.
    ///
    /// # Errors
    /// A change cannot be made in the topmost directory of several, or something cannot be read.
    pub fn new(base: &Base, upper: &Upper, changes: Vec<Change>, options: CommitOptions) -> Result<CommitPlan> {
        check_top(base, upper)?;
        let comparison = compare::compare(base, upper)?;
        if comparison.unplaced.iter().any(|unplaced| unplaced.names.is_empty()) {
            return Err(fact(
                &base.target()?.shown,
                "has no name of a file with several names that was changed in the workspace: its file system shows inode \
                 numbers that cannot be compared; nothing is committed; `nacre workspace diff --patch` or `nacre workspace \
                 export` keep the changes",
            ));
        }
        let (mut items, mut removed) = (BTreeSet::new(), BTreeSet::new());
        for change in changes {
            let path = path_of(&change.path);
            if change.kind == ChangeKind::Removed {
                removed.insert(path);
            } else {
                items.insert(path);
            }
        }
        let all = changes::all(&comparison);
        let is_there = |path: &PathBuf| all.items.contains(path);
        if !items.iter().all(is_there) || !removed.iter().all(|path| comparison.removed.contains_key(path)) {
            return Err(WorkspaceError {
                what: "the workspace or its base has changed since its changes were listed".to_owned(),
                errno: None,
            });
        }
        let is_whole = items.len() == all.items.len() && removed.len() == comparison.removed.len();
        let (target, below) = base.divided();
        let mut conflicts = BTreeMap::new();
        let (comparison, all) = if below.trees.is_empty() {
            (comparison, all)
        } else {
            several::check(&below, &comparison, &items, &removed)?;
            conflicts = several::conflicts(base, &comparison, &items)?;
            let comparison = compare::compare_with_target(&target, upper)?;
            let all = changes::all(&comparison);
            (comparison, all)
        };
        let mut plan = CommitPlan {
            base: target,
            upper: upper.clone(),
            comparison,
            items,
            removed,
            conflicts,
            resolutions: HashMap::new(),
            seen: BTreeMap::new(),
            protected: Vec::new(),
            is_whole,
            added: Vec::new(),
        };
        let given: BTreeSet<PathBuf> = plan.items.union(&plan.removed).cloned().collect();
        plan.take_whole(&all.items);
        plan.added = plan.items.union(&plan.removed).filter(|path| !given.contains(*path)).cloned().collect();
        plan.find_conflicts(options)?;
        plan.find_lost_files();
        Ok(plan)
    }

    /// Adds what cannot be left out: new directories that a change is in, the rest of directories that nothing of the base
    /// is merged with, renames that make room for a name, and the other names of a file.
    fn take_whole(&mut self, all: &BTreeSet<PathBuf>) {
        let mut names: HashMap<u64, Vec<&PathBuf>> = HashMap::new();
        for path in all {
            let item = self.comparison.items.get(path).filter(|item| !item.upper.meta.is_directory());
            if let Some(item) = item {
                names.entry(item.upper.meta.ino).or_default().push(path);
            }
        }
        let mut moved: HashMap<PathBuf, PathBuf> = HashMap::new();
        for (path, item) in self.comparison.items.iter().filter(|(_, item)| item.renamed) {
            if let Some(base) = &item.base {
                moved.insert(base.path.clone(), path.clone());
            }
        }
        loop {
            let before = (self.items.len(), self.removed.len());
            self.take_whole_directories(all);
            for path in self.items.clone() {
                let Some(item) = self.comparison.items.get(&path) else { continue };
                // The entry that has its path in the base has to leave it, and what left a directory before the directory
                // was renamed has to leave it now.
                let natural = item.natural.as_ref().and_then(|natural| moved.get(natural));
                let below = item.base.as_ref().filter(|_| item.renamed).map(|base| &base.path);
                let inside = moved.iter().filter(|(from, _)| below.is_some_and(|below| from.starts_with(below)));
                let wanted: Vec<PathBuf> = natural.into_iter().chain(inside.map(|(_, to)| to)).cloned().collect();
                self.items.extend(wanted);
            }
            for path in self.items.clone() {
                let file = self.comparison.items.get(&path).map(|item| item.upper.meta.ino);
                let others = file.and_then(|file| names.get(&file)).into_iter().flatten();
                self.items.extend(others.map(|path| (*path).clone()));
            }
            if before == (self.items.len(), self.removed.len()) {
                return;
            }
        }
    }

    fn take_whole_directories(&mut self, all: &BTreeSet<PathBuf>) {
        let mut tops = BTreeSet::new();
        for path in self.items.clone() {
            for above in path.ancestors().filter(|above| !above.as_os_str().is_empty()) {
                let item = self.comparison.items.get(above).filter(|item| item.upper.meta.is_directory());
                let Some(item) = item else { continue };
                if item.upper.opaque || item.renamed {
                    tops.insert(above.to_path_buf());
                }
                if all.contains(above) && (item.base.is_none() || item.renamed) {
                    self.items.insert(above.to_path_buf());
                }
            }
        }
        let is_whole = |item: &Item| item.upper.meta.is_directory() && (item.upper.opaque || item.renamed);
        for (view, item) in self.comparison.items.iter().filter(|(_, item)| is_whole(item)) {
            let below = item.base.as_ref().map(|base| &base.path);
            if below.is_some_and(|below| self.removed.iter().any(|path| path.starts_with(below))) {
                tops.insert(view.clone());
            }
        }
        for top in &tops {
            self.items.extend(all.iter().filter(|path| path.starts_with(top)).cloned());
            let below = self.comparison.items.get(top).and_then(|item| item.base.as_ref());
            if let Some(below) = below.map(|base| base.path.clone()) {
                let inside = self.comparison.removed.keys().filter(|path| path.starts_with(&below));
                self.removed.extend(inside.cloned().collect::<Vec<_>>());
            }
        }
    }

    // ---- Conflicts ----

    fn find_conflicts(&mut self, options: CommitOptions) -> Result<()> {
        for path in self.items.clone() {
            let Some(item) = self.comparison.items.get(&path).cloned() else { continue };
            let ours = match &item {
                item if item.renamed || item.lost.is_some() => "renamed",
                item if item.reference().is_some() => "modified",
                _ => "added",
            };
            if options.compare_content && is_equal(&item) {
                continue;
            }
            let mut places: Vec<PathBuf> = item.natural.iter().chain(&item.lost).cloned().collect();
            places.extend(item.base.iter().map(|base| base.path.clone()));
            places.dedup();
            for place in places {
                let meta = self.base.meta(&place)?;
                let mut theirs = self.theirs(&place, meta.as_ref());
                if theirs.is_none() && item.aspects.xattrs && item.is_copy {
                    theirs = self.is_touched(&place, meta.as_ref());
                }
                if let Some(theirs) = theirs {
                    self.add_conflict(&place, ours, theirs, Of::Item(&path));
                }
            }
            if let Some(over) = item.over.filter(|over| over.meta.is_directory()) {
                self.find_conflicts_below(&over, ours, Of::Item(&path))?;
            }
        }
        for path in self.removed.clone() {
            let Some(meta) = self.comparison.removed.get(&path).copied() else { continue };
            if let Some(theirs) = self.theirs(&path, Some(&meta)) {
                self.add_conflict(&path, "removed", theirs, Of::Removal(&path));
            }
            if meta.is_directory() {
                self.find_conflicts_below(&BaseEntry { path: path.clone(), meta }, "removed", Of::Removal(&path))?;
            }
        }
        Ok(())
    }

    /// Changed files of which others have removed all names that the view showed: a commit of everything drops them only if
    /// that is chosen.
    fn find_lost_files(&mut self) {
        if !self.is_whole {
            return;
        }
        for unplaced in &self.comparison.unplaced {
            for name in &unplaced.names {
                self.conflicts.entry(name.clone()).or_insert_with(|| Found {
                    ours: "modified",
                    theirs: "removed",
                    items: BTreeSet::new(),
                    removed: BTreeSet::new(),
                });
            }
        }
    }

    /// Refuses to drop a changed file without a name, unless the base's state was chosen for all the names that it had.
    fn check_lost_files(&self) -> Result<()> {
        for unplaced in self.comparison.unplaced.iter().filter(|_| self.is_whole) {
            let is_dropped = |name: &PathBuf| self.resolutions.get(name) == Some(&Resolution::Theirs);
            let Some(name) = unplaced.names.iter().find(|name| !is_dropped(name)) else { continue };
            return Err(WorkspaceError {
                what: format!(
                    "{} has no name any more that could get its changed content: nothing is committed; the content is {}: \
                     copy it to where it belongs, then commit this path with --theirs",
                    shown(&self.base.path_of(name)),
                    shown(&self.upper.state.path_of(&unplaced.file))
                ),
                errno: None,
            });
        }
        Ok(())
    }

    /// Conflicts in a directory of the base that goes as a whole.
    fn find_conflicts_below(&mut self, top: &BaseEntry, ours: &'static str, of: Of<'_>) -> Result<()> {
        let (mut waiting, mut seen) = (vec![top.path.clone()], Vec::new());
        while let Some(directory) = waiting.pop() {
            for listed in self.base.list(&directory)? {
                let path = directory.join(&listed.name);
                let Some(meta) = self.base.meta(&path)? else { continue };
                build::check_no_mount(&self.base.path_of(&path), &meta)?;
                if meta.is_directory() && meta.device != top.meta.device {
                    return Err(fact(
                        &self.base.path_of(&path),
                        "is another file system, in a directory that is removed in the workspace: nothing is committed",
                    ));
                }
                // Names of this form are not shown in the view, and nobody has removed them there.
                let theirs = if listed.name.as_bytes().starts_with(MARK) {
                    Some("added")
                } else {
                    self.theirs(&path, Some(&meta))
                };
                if let Some(theirs) = theirs {
                    self.add_conflict(&path, ours, theirs, of);
                }
                if meta.is_directory() {
                    waiting.push(path.clone());
                }
                seen.push(BaseEntry { path, meta });
            }
        }
        self.seen.insert(top.path.clone(), seen);
        Ok(())
    }

    fn add_conflict(&mut self, path: &Path, ours: &'static str, theirs: &'static str, of: Of<'_>) {
        let found = self.conflicts.entry(path.to_path_buf()).or_insert_with(|| Found {
            ours,
            theirs,
            items: BTreeSet::new(),
            removed: BTreeSet::new(),
        });
        match of {
            Of::Item(item) => found.items.insert(item.to_path_buf()),
            Of::Removal(removal) => found.removed.insert(removal.to_path_buf()),
        };
    }

    /// The last line of a path in the log; of a file with several names, that of any of them.
    fn line(&self, path: &Path, meta: Option<&Meta>) -> Option<&HiddenEntry> {
        let lines = &self.comparison.scan.hidden;
        let by_path = lines.get(path);
        let linked = meta.filter(|meta| meta.links > 1 && !meta.is_directory());
        let Some(linked) = linked else { return by_path };
        if by_path.is_some_and(|line| line.ino == linked.ino) {
            return by_path;
        }
        lines.values().find(|line| line.ino == linked.ino && line.kind == linked.letter()).or(by_path)
    }

    /// What others did to an entry of the base since the workspace hid it; `None` if nothing.
    fn theirs(&self, path: &Path, meta: Option<&Meta>) -> Option<&'static str> {
        difference(self.line(path, meta), meta)
    }

    /// Whether a directory's status has changed, which may be its attributes.
    fn is_touched(&self, path: &Path, meta: Option<&Meta>) -> Option<&'static str> {
        let meta = meta.filter(|meta| meta.is_directory())?;
        let line = self.comparison.scan.hidden.get(path)?;
        if line.ctime == meta.ctime { None } else { Some("modified") }
    }

    /// Paths that are committed as well, because the given changes cannot be made without them: [`CommitPlan::take_whole`].
    pub fn added(&self) -> Vec<PathBuf> {
        self.added.clone()
    }

    /// Whether all changes of the workspace were given.
    pub fn is_whole(&self) -> bool {
        self.is_whole
    }

    /// The conflicts without a resolution.
    pub fn conflicts(&self) -> Vec<Conflict> {
        let open = self.conflicts.iter().filter(|(path, _)| !self.resolutions.contains_key(*path));
        open.map(|(path, found)| Conflict { path: bytes(path), ours: found.ours, theirs: found.theirs }).collect()
    }

    /// Resolves the conflicts of a path.
    pub fn resolve(&mut self, path: &[u8], resolution: Resolution) {
        self.resolutions.insert(path_of(path), resolution);
    }

    /// Has the commit refuse to remove, rename or replace these directories and those above them, because it works with
    /// them itself.
    pub fn protect(&mut self, paths: &[PathBuf]) {
        self.protected.extend(paths.iter().cloned());
    }

    /// Refuses steps that take a protected path away.
    fn check_protected(&self, steps: &Steps) -> Result<()> {
        let mut identities = HashMap::new();
        for path in &self.protected {
            for above in path.canonicalize().during("find", path)?.ancestors() {
                let meta = Tree::open(above).and_then(|tree| Meta::of_file(tree.top())).during("read", above)?;
                identities.insert((meta.device, meta.ino), path);
            }
        }
        let replaced = steps.places.iter().filter(|place| place.over.is_some()).map(|place| &place.path);
        for path in steps.detaches.iter().map(|detach| &detach.path).chain(replaced) {
            let Some(meta) = self.base.meta(path)? else { continue };
            if let Some(protected) = identities.get(&(meta.device, meta.ino)) {
                return Err(WorkspaceError {
                    what: format!(
                        "{} is removed, renamed or replaced in the workspace, but the commit needs {} in it: nothing is \
                         committed; give it its old name in the view again, or name the other paths to commit",
                        shown(&self.base.path_of(path)),
                        shown(protected)
                    ),
                    errno: None,
                });
            }
        }
        Ok(())
    }

    /// The changes that remain, without those that a resolution drops.
    fn kept(&self) -> (BTreeSet<PathBuf>, BTreeSet<PathBuf>) {
        let (mut items, mut removed) = (self.items.clone(), self.removed.clone());
        let dropped = |path: &&PathBuf| self.resolutions.get(*path) == Some(&Resolution::Theirs);
        for path in self.conflicts.keys().filter(dropped) {
            let Some(found) = self.conflicts.get(path) else { continue };
            for gone in &found.removed {
                removed.remove(gone);
            }
            for gone in &found.items {
                items.remove(gone);
                let Some(item) = self.comparison.items.get(gone) else { continue };
                let stays = item.base.is_some() && item.is_copy && !item.renamed;
                if !stays && item.upper.meta.is_directory() {
                    // Without the directory there is no place for its entries.
                    items.retain(|path| !path.starts_with(gone));
                }
                if item.renamed
                    && let Some(base) = &item.base
                {
                    removed.retain(|path| !path.starts_with(&base.path));
                    // The entry keeps its path, so nothing else gets it.
                    items.retain(|path| {
                        let natural = self.comparison.items.get(path).and_then(|item| item.natural.as_ref());
                        natural.is_none_or(|natural| !natural.starts_with(&base.path))
                    });
                }
            }
        }
        (items, removed)
    }

    // ---- Dangers ----

    /// The changes that an administrator has to confirm: set-id bits, capabilities, devices, other owners than the
    /// caller's `uid`, other groups, access control lists, and write permission for all users.
    pub fn dangers(&self, uid: u32) -> Vec<Danger> {
        let (items, _) = self.kept();
        let mut dangers = Vec::new();
        for path in &items {
            let Some(item) = self.comparison.items.get(path) else { continue };
            for what in self.dangers_of(path, item, uid) {
                dangers.push(Danger { path: bytes(path), what });
            }
        }
        dangers
    }

    fn dangers_of(&self, path: &Path, item: &Item, uid: u32) -> Vec<String> {
        let (new, mut found) = (&item.upper.meta, Vec::new());
        let old = item.base.as_ref().map(|base| &base.meta);
        let aspects = item.aspects;
        // Another directory may let in users whom the old one kept away.
        let is_new = old.is_none() || item.renamed || aspects.content || aspects.links || aspects.owner;
        let is_plain_file = new.is_file();
        if is_plain_file && new.mode & 0o4000 != 0 && (is_new || aspects.mode) {
            found.push(format!("set-user-id of {}", user(new.uid)));
        }
        if is_plain_file && new.mode & 0o2000 != 0 && (is_new || aspects.mode) {
            found.push(format!("set-group-id of {}", group(new.gid)));
        }
        if is_plain_file && (is_new || aspects.xattrs) {
            let (tree, place) = item.place(&self.upper, path);
            // An attribute that cannot be read is reported, too: the commit would fail at it.
            if !matches!(tree.xattr(&place, b"security.capability"), Ok(None)) {
                found.push("file capabilities".to_owned());
            }
        }
        if new.is_device() && (old.is_none() || aspects.device) {
            let kind = if new.kind() == FileType::BlockDevice { "block" } else { "character" };
            found.push(format!("{kind} device {}:{}", new.special.0, new.special.1));
        }
        let is_others = new.uid != uid || self.has_other_group(path, item);
        if is_others && (old.is_none() || aspects.owner) {
            found.push(format!("owned by {}:{}", new.uid, new.gid));
        }
        let gets_open = old.is_none_or(|old| old.mode & 0o002 == 0 || old.mode & !new.mode & 0o1000 != 0);
        let is_open = new.mode & 0o002 != 0 && new.mode & 0o1000 == 0 && new.kind() != FileType::Symlink;
        if is_open && gets_open {
            found.push("writable by all users".to_owned());
        }
        if self.has_new_list(path, item) {
            found.push("access control list".to_owned());
        }
        found
    }

    /// Whether a group gets an entry that is neither the caller's nor that of its directory.
    fn has_other_group(&self, path: &Path, item: &Item) -> bool {
        let group = item.upper.meta.gid;
        if let Some(base) = &item.base {
            return base.meta.gid != group;
        }
        let above = path.parent().and_then(|parent| self.comparison.items.get(parent));
        group != rustix::process::getegid().as_raw() && above.is_none_or(|above| above.upper.meta.gid != group)
    }

    /// Whether an entry has another access control list than in the base. One that cannot be read is reported, too.
    fn has_new_list(&self, path: &Path, item: &Item) -> bool {
        if item.base.is_some() && !item.aspects.xattrs {
            return false;
        }
        let (tree, place) = item.place(&self.upper, path);
        [&b"system.posix_acl_access"[..], b"system.posix_acl_default"].into_iter().any(|kind| {
            let Ok(ours) = tree.xattr(&place, kind) else { return true };
            let Some(base) = &item.base else { return ours.is_some() };
            let theirs = self.base.find(&base.path).ok().flatten();
            let theirs = theirs.and_then(|below| below.tree.xattr(&base.path, kind).ok()).flatten();
            ours.is_some() && ours != theirs
        })
    }

    // ---- The commit ----

    /// Makes the changes in the base, and removes them from the upper. `journal` is the directory `commit/`, which must
    /// not be there; it is gone afterwards.
    ///
    /// # Errors
    /// Conflicts without a resolution; a step failed: the journal stays, and says whether it can be continued or undone.
    pub fn run(self, journal: &Path) -> Result<Committed> {
        self.run_with(journal, &mut || Ok(()))
    }

    /// As [`Self::run`]; calls `pause` before each step.
    pub(crate) fn run_with(self, journal: &Path, pause: Pause<'_>) -> Result<Committed> {
        let open = self.conflicts();
        if let Some(first) = open.first() {
            let path = path_of(&first.path);
            return Err(WorkspaceError {
                what: format!(
                    "{} has been {} in the base meanwhile ({} conflicts)",
                    shown(&path),
                    first.theirs,
                    open.len()
                ),
                errno: None,
            });
        }
        self.check_lost_files()?;
        let (items, removed) = self.kept();
        let dropped_items: BTreeSet<PathBuf> = self.items.difference(&items).cloned().collect();
        let dropped_removed: BTreeSet<PathBuf> = self.removed.difference(&removed).cloned().collect();
        let tree = self.base.target()?;
        let request = build::Request {
            base: &self.base,
            upper: &self.upper,
            comparison: &self.comparison,
            items: &items,
            removed: &removed,
            dropped_items: &dropped_items,
            dropped_removed: &dropped_removed,
            seen: &self.seen,
            is_whole: self.is_whole,
        };
        let steps = build::steps(&request)?;
        self.check_protected(&steps)?;
        let journal = Journal::create(journal, steps)?;
        Execution::new(tree, &self.upper, journal, pause)?.run()
    }
}

impl Journal {
    /// Makes the remaining steps.
    ///
    /// # Errors
    /// A step failed, or what it would replace has been changed by others.
    pub fn resume(self, base: &Base, upper: &Upper) -> Result<Committed> {
        self.resume_with(base, upper, &mut || Ok(()))
    }

    pub(crate) fn resume_with(self, base: &Base, upper: &Upper, pause: Pause<'_>) -> Result<Committed> {
        check_top(base, upper)?;
        Execution::new(base.target()?, upper, self, pause)?.run()
    }

    /// Whether all steps that were made can be taken back.
    pub fn can_undo(&self) -> bool {
        self.phase != crate::journal::Phase::Published
    }

    /// Takes back the steps that were made.
    ///
    /// # Errors
    /// A step failed, or what it would restore has been changed by others.
    pub fn undo(self, base: &Base, upper: &Upper) -> Result<()> {
        self.undo_with(base, upper, &mut || Ok(()))
    }

    pub(crate) fn undo_with(self, base: &Base, upper: &Upper, pause: Pause<'_>) -> Result<()> {
        check_top(base, upper)?;
        Execution::new(base.target()?, upper, self, pause)?.undo()
    }
}

/// What others did to an entry since the log got this line; `None` if nothing.
fn difference(line: Option<&HiddenEntry>, meta: Option<&Meta>) -> Option<&'static str> {
    let (line, meta) = match (line, meta) {
        (None, None) => return None,
        (None, Some(_)) => return Some("added"),
        (Some(_), None) => return Some("removed"),
        (Some(line), Some(meta)) => (line, meta),
    };
    if line.kind != meta.letter() || line.ino != meta.ino {
        return Some("replaced");
    }
    let attributes = (line.mode, line.uid, line.gid) == (meta.permissions(), meta.uid, meta.gid);
    let is_same = attributes && (meta.is_directory() || (line.size, line.ctime) == (meta.size, meta.ctime));
    if is_same { None } else { Some("modified") }
}

/// Refuses another directory than the one that the workspace was made over: an empty mount point, or what others have
/// put in its place. The log's line of the top has its identity.
fn check_top(base: &Base, upper: &Upper) -> Result<()> {
    let tree = base.target()?;
    let now = Meta::of_file(tree.top()).during("read", &tree.shown)?;
    let log = upper.log()?;
    let Some(line) = log.iter().rfind(|line| line.path.is_empty()) else {
        return Err(fact(&tree.shown, "cannot be committed to: the workspace has no record of which directory it is"));
    };
    let is_born_then = line.btime.is_none() || now.btime.is_none() || line.btime == now.btime;
    if line.kind == now.letter() && line.ino == now.ino && is_born_then {
        return Ok(());
    }
    Err(fact(
        &tree.shown,
        "is another directory than the one that the workspace was made over: nothing is committed; mount what is missing \
         there, or give the directory its old place again",
    ))
}

/// Whether content and attributes are those of the base, except for the modification time.
fn is_equal(item: &Item) -> bool {
    let aspects = crate::Aspects { times: false, ..item.aspects };
    item.base.is_some() && !item.renamed && aspects == crate::Aspects::default()
}

/// The name of a user, or the number.
fn user(uid: u32) -> String {
    match accounts::user_by_id(uid) {
        Ok(Some(user)) => String::from_utf8_lossy(&user.name).into_owned(),
        _ => uid.to_string(),
    }
}

/// The name of a group, or the number.
fn group(gid: u32) -> String {
    match accounts::group_by_id(gid) {
        Ok(Some(group)) => String::from_utf8_lossy(&group.name).into_owned(),
        _ => gid.to_string(),
    }
}

/// The attributes of a file in the base, for [`build`].
pub(crate) fn xattrs_of(below: &Below<'_>, path: &Path) -> Result<crate::meta::Xattrs> {
    let stored = below.tree.xattrs(path).during("read the attributes of", &below.tree.path_of(path))?;
    Ok(crate::meta::shown_attributes(&stored))
}
