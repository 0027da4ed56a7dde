//! The execution of a commit's steps, and their undoing.
//!
//! Nothing here depends on how many steps were made before: each step looks at what is there. A step that finds its
//! result does nothing; one that finds something unexpected was overtaken by others, and fails. New files are complete
//! and on stable storage in a staging directory before any name changes; removed and replaced files stay there until
//! all names have changed, so every step can be taken back until then.

mod overwrite;

use crate::{
    Committed, Result, WorkspaceError,
    beneath::{self, HANDLE, Tree},
    content, dress,
    journal::{Journal, Phase},
    meta::{Meta, shown_attributes},
    steps::{Detach, Dress, Expected, Going, Make, Place, Slot, Staged},
    trouble::{During, fact, is_missing},
    upper::Upper,
};
use nacre_sys::{inode, xattrat::Target};
use rustix::{
    fs::{self, AtFlags, FileType, Mode, OFlags, RenameFlags},
    io::Errno,
};
use std::{
    collections::{HashMap, HashSet},
    ffi::OsStr,
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Path, PathBuf},
};

/// Number of changed directories that are kept open until they are synced.
const OPEN_MAX: usize = 128;
/// Suffix of a replaced entry's name in its staging directory where names cannot be exchanged.
const REPLACED: &str = ".replaced";
/// Called before each step; its error ends the execution there, as a kill would.
pub(crate) type Pause<'a> = &'a mut dyn FnMut() -> Result<()>;

/// One execution.
pub(crate) struct Execution<'a> {
    base: &'a Tree,
    upper: &'a Upper,
    journal: Journal,
    /// Inode numbers of the entries that go to slots.
    detached: HashMap<Slot, u64>,
    /// New paths of the entries of slots.
    placed: HashMap<Slot, PathBuf>,
    /// Staging directories that are there, open: others who may rename them cannot lead a step to their own.
    stages: Vec<(PathBuf, Tree)>,
    pause: Pause<'a>,
    /// Directories with changed names that have not been synced.
    unsynced: Vec<((u64, u64), OwnedFd)>,
    bytes: u64,
}

fn changed(path: &Path) -> WorkspaceError {
    fact(path, "has been changed by others meanwhile")
}

impl<'a> Execution<'a> {
    /// # Errors
    /// The base is another directory than that of the journal.
    pub(crate) fn new(base: &'a Tree, upper: &'a Upper, journal: Journal, pause: Pause<'a>) -> Result<Execution<'a>> {
        let top = Meta::of_file(base.top()).during("read", &base.shown)?;
        if top.ino != journal.steps.base {
            return Err(fact(&base.shown, "is another directory than the one that the commit has begun in"));
        }
        let detached = journal.steps.detaches.iter().map(|detach| (detach.slot, detach.expected.ino)).collect();
        let placed = journal.steps.places.iter().map(|place| (place.slot, place.path.clone())).collect();
        Ok(Execution {
            base,
            upper,
            journal,
            detached,
            placed,
            stages: Vec::new(),
            pause,
            unsynced: Vec::new(),
            bytes: 0,
        })
    }

    /// Makes all steps that remain.
    pub(crate) fn run(mut self) -> Result<Committed> {
        let result = self.advance();
        if let Err(error) = result {
            let remedy = match self.journal.phase {
                Phase::Published => "all changes are in place; the commit has to be continued",
                Phase::Planned => "nothing is changed yet; the commit can be continued or undone",
                Phase::Prepared | Phase::Undoing | Phase::TakenBack => "the commit can be continued or undone",
            };
            return Err(WorkspaceError { what: format!("{}: {remedy}", error.what), ..error });
        }
        let committed = Committed { names: self.journal.steps.names, bytes: self.bytes };
        self.journal.remove()?;
        Ok(committed)
    }

    fn advance(&mut self) -> Result<()> {
        if matches!(self.journal.phase, Phase::Undoing | Phase::TakenBack) {
            return Err(fact(&self.base.shown, "has a commit that is being undone"));
        }
        if self.journal.phase == Phase::Planned {
            let staged = self.prepare()?;
            (self.pause)()?;
            self.journal.prepared(staged)?;
        }
        if self.journal.phase == Phase::Prepared {
            self.open_stages()?;
            self.publish()?;
            (self.pause)()?;
            self.sync_all_names()?;
            self.journal.published()?;
        }
        self.clean_up()
    }

    /// Path of a slot.
    fn slot(&self, slot: Slot) -> Result<PathBuf> {
        match self.journal.steps.stages.get(slot.stage) {
            Some(stage) => Ok(stage.join(slot.number.to_string())),
            None => Err(fact(&self.base.shown, "has a commit whose journal is broken")),
        }
    }

    /// The open directory beneath which a path lies: a staging directory, or the base.
    fn beneath<'p>(&self, path: &'p Path) -> (&Tree, &'p Path) {
        for (stage, tree) in &self.stages {
            if let Ok(rest) = path.strip_prefix(stage)
                && !rest.as_os_str().is_empty()
            {
                return (tree, rest);
            }
        }
        (self.base, path)
    }

    /// Opens the directory of an entry, to make a call with the entry's name.
    fn parent<'p>(&self, path: &'p Path) -> io::Result<(OwnedFd, &'p OsStr)> {
        let (tree, path) = self.beneath(path);
        tree.parent(path)
    }

    fn meta(&self, path: &Path) -> Result<Option<Meta>> {
        let (tree, path) = self.beneath(path);
        tree.meta(path).during("read", &tree.path_of(path))
    }

    /// Whether the entry at a path has this inode number.
    fn is_at(&self, path: &Path, ino: u64) -> Result<bool> {
        Ok(self.meta(path)?.is_some_and(|meta| meta.ino == ino))
    }

    // ---- Preparing ----

    /// Makes all new files in the staging directories; returns their inode numbers.
    fn prepare(&mut self) -> Result<HashMap<Slot, u64>> {
        for unlock in self.journal.steps.unlocks.clone() {
            (self.pause)()?;
            let shown = self.base.path_of(&unlock.path);
            let handle = self.base.handle(&unlock.path).during("open", &shown)?;
            if Meta::of_file(handle.as_fd()).during("read", &shown)?.ino != unlock.ino {
                return Err(changed(&shown));
            }
            inode::change_mode(handle.as_fd(), unlock.mode | 0o700).during("set the mode of", &shown)?;
        }
        for stage in self.journal.steps.stages.clone() {
            (self.pause)()?;
            self.make_stage(&stage)?;
        }
        let staged = std::mem::take(&mut self.journal.steps.staged);
        let made = self.make_staged(&staged);
        self.journal.steps.staged = staged;
        let made = made?;
        for stage in &self.journal.steps.stages {
            self.sync_directory(stage)?;
            self.sync_directory(stage.parent().unwrap_or(Path::new("")))?;
        }
        Ok(made)
    }

    /// Makes an empty staging directory.
    fn make_stage(&mut self, stage: &Path) -> Result<()> {
        let shown = self.base.path_of(stage);
        let (parent, name) = self.base.parent(stage).during("open", &shown)?;
        if self.journal.is_resumed && self.open_stage(stage)? {
            self.remove_stage(stage, parent.as_fd(), name).during("remove", &shown)?;
            self.stages.retain(|(known, _)| known != stage);
        }
        fs::mkdirat(&parent, name, Mode::RWXU).during("create", &shown)?;
        if !self.open_stage(stage)? {
            return Err(changed(&shown));
        }
        let Some((_, tree)) = self.stages.iter().find(|(known, _)| known == stage) else { return Ok(()) };
        if !tree.list(Path::new("")).during("read", &shown)?.is_empty() {
            return Err(changed(&shown));
        }
        // Files get the access control lists of the view, not inherited ones.
        dress::remove_xattr(Target::File(tree.top()), b"system.posix_acl_default").during("set up", &shown)?;
        inode::change_mode(tree.top(), 0o700).during("set up", &shown)
    }

    /// Opens the staging directories of a commit that was interrupted.
    fn open_stages(&mut self) -> Result<()> {
        for stage in self.journal.steps.stages.clone() {
            self.open_stage(&stage)?;
        }
        Ok(())
    }

    /// Opens a staging directory; returns whether it is there. One in a directory that others own or may write to
    /// has to be the commit's own.
    fn open_stage(&mut self, stage: &Path) -> Result<bool> {
        if self.stages.iter().any(|(known, _)| known == stage) {
            return Ok(true);
        }
        let shown = self.base.path_of(stage);
        let opened = self.base.directory(stage).and_then(|directory| {
            let meta = Meta::of_file(directory.as_fd())?;
            Ok((directory, meta))
        });
        let (directory, meta) = match opened {
            Ok(opened) => opened,
            Err(error) if is_missing(&error) => return Ok(false),
            Err(error) => return Err(error).during("open", &shown),
        };
        let parent = self.base.meta(stage.parent().unwrap_or(Path::new(""))).during("read", &shown)?;
        let user = rustix::process::geteuid().as_raw();
        let is_open_to_others = parent.is_none_or(|parent| parent.mode & 0o022 != 0 || parent.uid != user);
        let is_ours = meta.uid == user && meta.mode & 0o077 == 0;
        if is_open_to_others && !is_ours {
            return Err(fact(&shown, "is not the staging directory that the commit has made"));
        }
        self.stages.push((stage.to_path_buf(), Tree::beneath(directory, shown)));
        Ok(true)
    }

    fn make_staged(&mut self, staged: &[Staged]) -> Result<HashMap<Slot, u64>> {
        let mut made = HashMap::new();
        for one in staged {
            (self.pause)()?;
            let at = self.slot(one.slot)?.join(&one.within);
            let at = if one.within.as_os_str().is_empty() { self.slot(one.slot)? } else { at };
            let ino = self.make_one(one, &at)?;
            if one.within.as_os_str().is_empty() {
                made.insert(one.slot, ino);
            }
        }
        // Directories get their attributes when everything is in them.
        for one in staged.iter().rev() {
            let Make::Directory { stays_open } = one.make else { continue };
            (self.pause)()?;
            let slot = self.slot(one.slot)?;
            let at = if one.within.as_os_str().is_empty() { slot } else { slot.join(&one.within) };
            let shown = self.base.path_of(&at);
            let wanted = self.dress_of(one)?;
            let (tree, place) = self.beneath(&at);
            let directory = tree.listed_directory(place).during("open", &shown)?;
            let wanted = if stays_open { Dress { mode: wanted.mode | 0o700, ..wanted } } else { wanted };
            dress::dress(directory.as_fd(), &wanted).during("set the attributes of", &shown)?;
            fs::fsync(&directory).during("sync", &shown)?;
        }
        Ok(made)
    }

    /// The attributes of a file of the upper, which has to be the one that was planned.
    fn dress_of(&self, staged: &Staged) -> Result<Dress> {
        let tree = &self.upper.state;
        let shown = tree.path_of(&staged.source);
        let meta = tree.meta(&staged.source).during("read", &shown)?;
        let is_planned = |meta: &Meta| {
            meta.ino == staged.ino && (meta.is_directory() || (meta.size, meta.mtime) == (staged.size, staged.mtime))
        };
        let Some(meta) = meta.filter(is_planned) else {
            return Err(fact(&shown, "has changed since the commit began"));
        };
        let xattrs = tree.xattrs(&staged.source).during("read the attributes of", &shown)?;
        Ok(Dress::new(&meta, shown_attributes(&xattrs)))
    }

    /// Makes one staged entry; returns its inode number.
    fn make_one(&mut self, staged: &Staged, at: &Path) -> Result<u64> {
        let shown = self.base.path_of(&staged.destination);
        let (parent, name) = self.parent(at).during("open", &self.base.path_of(at))?;
        match &staged.make {
            Make::Directory { .. } => fs::mkdirat(&parent, name, Mode::RWXU).during("create", &shown)?,
            Make::LinkOfStaged { slot, within } => {
                let slot = self.slot(*slot)?;
                let first = if within.as_os_str().is_empty() { slot } else { slot.join(within) };
                let (from, first) = self.parent(&first).during("open", &shown)?;
                fs::linkat(&from, first, &parent, name, AtFlags::empty()).during("make a hard link at", &shown)?;
            }
            Make::LinkOfBase { path, ino } => {
                let (from, first) = self.base.parent(path).during("open", &self.base.path_of(path))?;
                fs::linkat(&from, first, &parent, name, AtFlags::empty()).during("make a hard link at", &shown)?;
                let made = Meta::of_entry(parent.as_fd(), name).during("read", &shown)?;
                if made.ino != *ino {
                    return Err(changed(&self.base.path_of(path)));
                }
            }
            Make::Backup { path, expected } => {
                let shown = self.base.path_of(path);
                let from = self.base.file(path).during("open", &shown)?;
                let meta = Meta::of_file(from.as_fd()).during("read", &shown)?;
                if !expected.is(&meta) {
                    return Err(changed(&shown));
                }
                let file = create(parent.as_fd(), name).during("create a copy of", &shown)?;
                self.bytes += content::copy(from.as_fd(), file.as_fd(), meta.size).during("copy", &shown)?;
                fs::fsync(&file).during("sync a copy of", &shown)?;
            }
            Make::Copy { may_link } => self.make_copy(staged, parent.as_fd(), name, *may_link)?,
        }
        Ok(Meta::of_entry(parent.as_fd(), name).during("read", &shown)?.ino)
    }

    fn make_copy(&mut self, staged: &Staged, parent: BorrowedFd<'_>, name: &OsStr, may_link: bool) -> Result<()> {
        let shown = self.base.path_of(&staged.destination);
        let (tree, source) = (&self.upper.state, &staged.source);
        let wanted = self.dress_of(staged)?;
        let kind = FileType::from_raw_mode(wanted.mode);
        if kind == FileType::RegularFile {
            let from = tree.file(source).during("open", &tree.path_of(source))?;
            let (home, first) = tree.parent(source).during("open", &tree.path_of(source))?;
            let is_linked = may_link && fs::linkat(&home, first, parent, name, AtFlags::empty()).is_ok();
            if is_linked {
                return fs::fsync(&from).during("sync", &shown);
            }
            let file = create(parent, name).during("create", &shown)?;
            self.bytes += content::copy(from.as_fd(), file.as_fd(), staged.size).during("write", &shown)?;
            dress::dress(file.as_fd(), &wanted).during("set the attributes of", &shown)?;
            dress::label(file.as_fd(), &staged.labels).during("set the label of", &shown)?;
            return fs::fsync(&file).during("sync", &shown);
        }
        match kind {
            FileType::Symlink => {
                let target = tree.link_target(source).during("read the link", &tree.path_of(source))?;
                fs::symlinkat(target.as_slice(), parent, name).during("create", &shown)?;
            }
            _ => {
                let special = tree.meta(source).during("read", &tree.path_of(source))?.map(|meta| meta.special);
                let (major, minor) = special.unwrap_or_default();
                let mode = Mode::from_raw_mode(0o600);
                fs::mknodat(parent, name, kind, mode, fs::makedev(major, minor)).during("create", &shown)?;
            }
        }
        let handle = fs::openat(parent, name, HANDLE, Mode::empty()).during("open", &shown)?;
        let made = Meta::of_file(handle.as_fd()).during("read", &shown)?;
        let special = self.upper.state.meta(source).during("read", &shown)?.map(|meta| meta.special);
        let is_ours = made.uid == rustix::process::geteuid().as_raw() && made.links == 1;
        if made.kind() != kind || !is_ours || special.is_some_and(|special| made.special != special) {
            return Err(changed(&shown));
        }
        dress::dress(handle.as_fd(), &wanted).during("set the attributes of", &shown)?;
        dress::label(handle.as_fd(), &staged.labels).during("set the label of", &shown)
    }

    // ---- Publishing ----

    fn publish(&mut self) -> Result<()> {
        // Old paths lead to their entries until the first name changes; by then content and attributes are done.
        let has_moved = self.journal.is_resumed && self.has_moved()?;
        if !has_moved {
            for overwrite in self.journal.steps.overwrites.clone() {
                (self.pause)()?;
                self.overwrite(&overwrite)?;
            }
            for set in self.journal.steps.attributes.clone() {
                (self.pause)()?;
                self.set_attributes(&set.path, &set.expected, &set.after)?;
            }
        }
        for detach in self.journal.steps.detaches.clone() {
            (self.pause)()?;
            if self.is_detached(&detach)? {
                continue;
            }
            let slot = self.slot(detach.slot)?;
            let shown = self.base.path_of(&detach.path);
            if !self.meta(&detach.path)?.is_some_and(|meta| detach.expected.is(&meta)) {
                return Err(changed(&shown));
            }
            self.rename(&detach.path, &slot, RenameFlags::NOREPLACE)?;
            if !self.is_at(&slot, detach.expected.ino)? {
                // Another file came to have the name between the look and the rename.
                self.rename(&slot, &detach.path, RenameFlags::NOREPLACE)?;
                return Err(changed(&shown));
            }
        }
        for place in self.journal.steps.places.clone() {
            (self.pause)()?;
            self.place(&place)?;
        }
        for going in &self.journal.steps.going {
            self.check_going(going)?;
        }
        self.sync_changed()
    }

    /// Refuses to delete with a directory what others have put into it or changed in it since the plan.
    fn check_going(&self, going: &Going) -> Result<()> {
        let slot = self.slot(going.slot)?;
        let replaced = replaced_path(&slot);
        let top = if self.is_at(&replaced, going.ino)? { replaced } else { slot };
        if !self.is_at(&top, going.ino)? {
            return Err(changed(&self.base.path_of(&top)));
        }
        let seen: HashMap<&Path, &Expected> =
            going.entries.iter().map(|seen| (seen.path.as_path(), &seen.expected)).collect();
        let mut waiting = vec![PathBuf::new()];
        while let Some(directory) = waiting.pop() {
            let (tree, place) = self.beneath(&top);
            let place = if directory.as_os_str().is_empty() { place.to_path_buf() } else { place.join(&directory) };
            let shown = tree.path_of(&place);
            for listed in tree.list(&place).during("read", &shown)? {
                let (inner, at) = (directory.join(&listed.name), place.join(&listed.name));
                let meta = tree.meta(&at).during("read", &tree.path_of(&at))?;
                let Some(meta) = meta else { continue };
                if !seen.get(inner.as_path()).is_some_and(|expected| expected.is(&meta)) {
                    return Err(changed(&tree.path_of(&at)));
                }
                if meta.is_directory() {
                    waiting.push(inner);
                }
            }
        }
        Ok(())
    }

    /// Whether any name has changed.
    fn has_moved(&self) -> Result<bool> {
        for detach in &self.journal.steps.detaches {
            if self.is_detached(detach)? {
                return Ok(true);
            }
        }
        for place in &self.journal.steps.places {
            if self.is_placed(place)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether an entry of the base has left its name: it is in its slot, or has its new name already.
    fn is_detached(&self, detach: &Detach) -> Result<bool> {
        let slot = self.slot(detach.slot)?;
        if self.is_at(&slot, detach.expected.ino)? {
            return Ok(true);
        }
        match self.placed.get(&detach.slot) {
            Some(path) => self.is_at(path, detach.expected.ino),
            None => Ok(false),
        }
    }

    /// Whether the entry of a slot has its name.
    fn is_placed(&self, place: &Place) -> Result<bool> {
        let Some(ino) = self.staged_ino(place.slot) else { return Ok(false) };
        self.is_at(&place.path, ino)
    }

    fn set_attributes(&mut self, path: &Path, expected: &Expected, wanted: &Dress) -> Result<()> {
        let shown = self.base.path_of(path);
        let handle = self.base.handle(path).during("open", &shown)?;
        let meta = Meta::of_file(handle.as_fd()).during("read", &shown)?;
        if !expected.is(&meta) {
            return Err(changed(&shown));
        }
        dress::dress(handle.as_fd(), wanted).during("set the attributes of", &shown)?;
        if meta.is_file() || meta.is_directory() {
            let opened = if meta.is_file() { self.base.file(path) } else { self.base.listed_directory(path) };
            match opened {
                Ok(opened) => fs::fsync(&opened).during("sync", &shown)?,
                // Its owner cannot read it: the sync of its directory has to do.
                Err(error) if error.raw_os_error() == Some(Errno::ACCESS.raw_os_error()) => {}
                Err(error) => return Err(error).during("open", &shown),
            }
        }
        Ok(())
    }

    fn staged_ino(&self, slot: Slot) -> Option<u64> {
        self.detached.get(&slot).or_else(|| self.journal.staged.get(&slot)).copied()
    }

    fn place(&mut self, place: &Place) -> Result<()> {
        let (slot, shown) = (self.slot(place.slot)?, self.base.path_of(&place.path));
        let Some(ino) = self.staged_ino(place.slot) else {
            return Err(fact(&shown, "is not in the journal of the commit"));
        };
        let there = self.meta(&place.path)?;
        if there.is_some_and(|there| there.ino == ino) {
            return self.note_changed(&place.path);
        }
        if !self.is_at(&slot, ino)? {
            return Err(changed(&shown));
        }
        let Some(over) = place.over else {
            if there.is_some() {
                return Err(changed(&shown));
            }
            return self.rename(&slot, &place.path, RenameFlags::NOREPLACE);
        };
        let replaced = replaced_path(&slot);
        if !self.is_at(&replaced, over.ino)? {
            if !there.is_some_and(|there| over.is(&there)) {
                return Err(changed(&shown));
            }
            match self.rename_raw(&slot, &place.path, RenameFlags::EXCHANGE) {
                Ok(()) => {
                    if self.is_at(&slot, over.ino)? {
                        return Ok(());
                    }
                    // Another file came to have the name between the look and the exchange.
                    self.rename(&slot, &place.path, RenameFlags::EXCHANGE)?;
                    return Err(changed(&shown));
                }
                Err(error) if lacks_flags(&error) => self.rename(&place.path, &replaced, RenameFlags::NOREPLACE)?,
                Err(error) => return Err(error).during("replace", &shown),
            }
        }
        self.rename(&slot, &place.path, RenameFlags::NOREPLACE)
    }

    fn rename(&mut self, from: &Path, to: &Path, flags: RenameFlags) -> Result<()> {
        self.rename_raw(from, to, flags).during("rename", &self.base.path_of(from))
    }

    fn rename_raw(&mut self, from: &Path, to: &Path, flags: RenameFlags) -> io::Result<()> {
        let (old, name) = self.parent(from)?;
        let (new, new_name) = self.parent(to)?;
        match fs::renameat_with(&old, name, &new, new_name, flags) {
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) if flags == RenameFlags::NOREPLACE => {
                if Meta::of_entry(new.as_fd(), new_name).is_ok() {
                    return Err(Errno::EXIST.into());
                }
                fs::renameat(&old, name, &new, new_name)?;
            }
            renamed => renamed?,
        }
        self.note_open(&old)?;
        self.note_open(&new)
    }

    fn note_changed(&mut self, path: &Path) -> Result<()> {
        let shown = self.base.path_of(path);
        let parent = self.base.directory(path.parent().unwrap_or(Path::new(""))).during("open", &shown)?;
        self.note_open(&parent).during("sync", &shown)
    }

    /// Notes that a directory has to be synced.
    fn note_open(&mut self, directory: &OwnedFd) -> io::Result<()> {
        let meta = Meta::of_file(directory.as_fd())?;
        let identity = (meta.device, meta.ino);
        if self.unsynced.iter().any(|(known, _)| *known == identity) {
            return Ok(());
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = fs::openat(directory, ".", flags, Mode::empty())?;
        self.unsynced.push((identity, opened));
        if self.unsynced.len() > OPEN_MAX { self.sync_noted() } else { Ok(()) }
    }

    fn sync_noted(&mut self) -> io::Result<()> {
        for (_, directory) in self.unsynced.drain(..) {
            fs::fsync(&directory)?;
        }
        Ok(())
    }

    fn sync_changed(&mut self) -> Result<()> {
        let synced = self.sync_noted();
        synced.during("sync", &self.base.shown)
    }

    /// Makes names durable that an interrupted execution has changed without syncing their directories: which ones, cannot
    /// be seen any more.
    fn sync_all_names(&self) -> Result<()> {
        if !self.journal.is_resumed {
            return Ok(());
        }
        for tree in self.stages.iter().map(|(_, tree)| tree).chain([self.base]) {
            let top = tree.listed_directory(Path::new("")).during("open", &tree.shown)?;
            fs::syncfs(&top).during("sync", &tree.shown)?;
        }
        Ok(())
    }

    fn sync_directory(&self, path: &Path) -> Result<()> {
        let shown = self.base.path_of(path);
        let directory = self.base.listed_directory(path).during("open", &shown)?;
        fs::fsync(&directory).during("sync", &shown)
    }

    // ---- After the changes ----

    fn clean_up(&mut self) -> Result<()> {
        for staged in self.journal.steps.staged.clone() {
            if !matches!(staged.make, Make::Copy { may_link: true }) {
                continue;
            }
            (self.pause)()?;
            let shown = self.base.path_of(&staged.destination);
            let stripped = self.base.handle(&staged.destination).and_then(|handle| {
                let meta = Meta::of_file(handle.as_fd())?;
                if meta.ino == staged.ino && meta.is_file() { dress::strip(handle.as_fd()) } else { Ok(()) }
            });
            self.unless_done(stripped).during("remove an attribute of", &shown)?;
        }
        self.remove_stages()?;
        for finish in self.journal.steps.finishes.clone() {
            (self.pause)()?;
            let modes = [finish.mode, finish.before.as_ref().map_or(finish.mode, |before| before.mode)];
            let done = self.finish_directory(&finish.path, finish.mode, finish.times, &modes);
            self.unless_done(done).during("set the attributes of", &self.base.path_of(&finish.path))?;
        }
        for path in self.journal.steps.upper_entries.clone() {
            (self.pause)()?;
            let removed = self.upper.state.parent(&path).and_then(|(parent, name)| {
                beneath::remove_tree(parent.as_fd(), name)?;
                self.note_open(&parent)
            });
            if_there(removed).during("remove", &self.upper.state.path_of(&path))?;
        }
        for path in self.journal.steps.upper_directories.clone() {
            (self.pause)()?;
            let removed = self.upper.state.parent(&path).and_then(|(parent, name)| {
                match fs::unlinkat(&parent, name, AtFlags::REMOVEDIR) {
                    Err(Errno::NOTEMPTY | Errno::EXIST) => return Ok(()),
                    removed => removed?,
                }
                self.note_open(&parent)
            });
            if_there(removed).during("remove", &self.upper.state.path_of(&path))?;
        }
        self.sync_changed()?;
        (self.pause)()?;
        // The view shows the times of the upper's top.
        let top = Meta::of_file(self.base.top()).during("read", &self.base.shown)?;
        let upper = self.upper.tree.handle(Path::new("")).during("open", &self.upper.tree.shown)?;
        dress::set_times(upper.as_fd(), top.atime, top.mtime).during("set the times of", &self.upper.tree.shown)?;
        crate::clean::rewrite_log(self.base, self.upper, &self.journal.steps)
    }

    /// A step of an execution that was interrupted after it may find directories that are gone or closed already.
    fn unless_done(&self, result: io::Result<()>) -> io::Result<()> {
        match result {
            Err(error) if is_missing(&error) => Ok(()),
            Err(error) if self.journal.is_resumed && error.raw_os_error() == Some(Errno::ACCESS.raw_os_error()) => {
                Ok(())
            }
            result => result,
        }
    }

    fn remove_stages(&mut self) -> Result<()> {
        for stage in self.journal.steps.stages.clone() {
            (self.pause)()?;
            let shown = self.base.path_of(&stage);
            match self.open_stage(&stage) {
                Ok(true) => {}
                Ok(false) => continue,
                Err(error) if self.journal.is_resumed && error.errno == Some(Errno::ACCESS.raw_os_error()) => continue,
                Err(error) => return Err(error),
            }
            let known =
                self.stages.iter().find(|(known, _)| *known == stage).map(|(_, tree)| Meta::of_file(tree.top()));
            let ino = known.transpose().during("read", &shown)?.map(|meta| meta.ino);
            let there = self.base.meta(&stage).during("read", &shown)?;
            if there.map(|meta| meta.ino) != ino {
                return Err(changed(&shown));
            }
            let removed = self.base.parent(&stage).and_then(|(parent, name)| {
                self.remove_stage(&stage, parent.as_fd(), name)?;
                self.note_open(&parent)
            });
            self.stages.retain(|(known, _)| *known != stage);
            self.unless_done(removed).during("remove", &self.base.path_of(&stage))?;
        }
        self.sync_changed()
    }

    /// Removes an open staging directory. What others put in its place by its name stays, unless it is an empty directory.
    fn remove_stage(&self, stage: &Path, parent: BorrowedFd<'_>, name: &OsStr) -> io::Result<()> {
        if let Some((_, tree)) = self.stages.iter().find(|(known, _)| known == stage) {
            let directory = tree.listed_directory(Path::new(""))?;
            for listed in beneath::list(directory.as_fd())? {
                beneath::remove_tree(directory.as_fd(), &listed.name)?;
            }
        }
        Ok(fs::unlinkat(parent, name, AtFlags::REMOVEDIR)?)
    }

    /// Sets mode and times of a directory. `modes` are the modes that earlier steps have set; another one was set by others meanwhile,
    /// and stays.
    fn finish_directory(
        &self,
        path: &Path,
        mode: u32,
        times: Option<(crate::meta::Time, crate::meta::Time)>,
        modes: &[u32],
    ) -> io::Result<()> {
        let handle = if path.as_os_str().is_empty() { self.base.directory(path)? } else { self.base.handle(path)? };
        let meta = Meta::of_file(handle.as_fd())?;
        if !meta.is_directory() {
            return Ok(());
        }
        let opened = self.base.listed_directory(path);
        let now = meta.permissions();
        let is_ours = |mode: &u32| now == mode & 0o7777 || now == mode & 0o7777 | 0o700;
        // 0700 is that of a directory whose owner is being changed.
        if now != mode & 0o7777 && (now == 0o700 || modes.iter().any(is_ours)) {
            inode::change_mode(handle.as_fd(), mode & 0o7777)?;
        }
        if let Some((accessed, modified)) = times {
            dress::set_times(handle.as_fd(), accessed, modified)?;
        }
        match opened {
            Ok(opened) => Ok(fs::fsync(&opened)?),
            // Its owner cannot read it.
            Err(_) => Ok(()),
        }
    }

    // ---- Undoing ----

    /// Takes back all steps that were made.
    pub(crate) fn undo(mut self) -> Result<()> {
        if self.journal.phase == Phase::Published {
            return Err(fact(&self.base.shown, "has all changes of the commit, which can only be continued"));
        }
        if matches!(self.journal.phase, Phase::Prepared | Phase::Undoing) {
            (self.pause)()?;
            self.open_stages()?;
            self.journal.undoing()?;
            self.take_back()?;
            (self.pause)()?;
            self.sync_all_names()?;
            self.journal.taken_back()?;
        }
        self.remove_stages()?;
        // The modes of directories that were opened, and times that the steps have changed.
        let mut restored = HashSet::new();
        for finish in self.journal.steps.finishes.clone() {
            let Some(before) = finish.before else { continue };
            (self.pause)()?;
            if self.is_at(&before.path, before.ino)? {
                let times = Some((before.atime, before.mtime));
                let done = self.finish_directory(&before.path, before.mode, times, &[before.mode, finish.mode]);
                done.during("restore the attributes of", &self.base.path_of(&before.path))?;
                restored.insert(before.path);
            }
        }
        for unlock in self.journal.steps.unlocks.clone().into_iter().rev() {
            if restored.contains(&unlock.path) {
                continue;
            }
            let done = self.finish_directory(&unlock.path, unlock.mode, None, &[unlock.mode]);
            self.unless_done(done).during("restore the mode of", &self.base.path_of(&unlock.path))?;
        }
        self.sync_changed()?;
        self.journal.remove()
    }

    fn take_back(&mut self) -> Result<()> {
        for place in self.journal.steps.places.clone().into_iter().rev() {
            (self.pause)()?;
            self.unplace(&place)?;
        }
        for detach in self.journal.steps.detaches.clone().into_iter().rev() {
            (self.pause)()?;
            let slot = self.slot(detach.slot)?;
            if self.is_at(&slot, detach.expected.ino)? {
                self.rename(&slot, &detach.path, RenameFlags::NOREPLACE)?;
            } else if !self.is_at(&detach.path, detach.expected.ino)? {
                return Err(changed(&self.base.path_of(&detach.path)));
            }
        }
        let mut others = HashSet::new();
        for overwrite in self.journal.steps.overwrites.clone().into_iter().rev() {
            (self.pause)()?;
            if !self.restore(&overwrite)? {
                others.insert(overwrite.path);
            }
        }
        for set in self.journal.steps.attributes.clone().into_iter().rev() {
            (self.pause)()?;
            if others.contains(&set.path) {
                continue;
            }
            self.set_attributes(&set.path, &set.expected, &set.before)?;
        }
        self.sync_changed()
    }

    fn unplace(&mut self, place: &Place) -> Result<()> {
        let (slot, shown) = (self.slot(place.slot)?, self.base.path_of(&place.path));
        let Some(ino) = self.staged_ino(place.slot) else { return Ok(()) };
        let replaced = replaced_path(&slot);
        let is_placed = self.is_at(&place.path, ino)?;
        let Some(over) = place.over else {
            if is_placed {
                self.rename(&place.path, &slot, RenameFlags::NOREPLACE)?;
            }
            return Ok(());
        };
        if is_placed && self.is_at(&slot, over.ino)? {
            return self.rename(&slot, &place.path, RenameFlags::EXCHANGE);
        }
        if is_placed {
            self.rename(&place.path, &slot, RenameFlags::NOREPLACE)?;
        }
        if self.is_at(&replaced, over.ino)? {
            return self.rename(&replaced, &place.path, RenameFlags::NOREPLACE);
        }
        // It was taken back before, and the directory around it has its old name again.
        let is_back = self.is_at(&place.path, over.ino)? || self.is_at(&slot, ino)?;
        if is_back { Ok(()) } else { Err(changed(&shown)) }
    }
}

/// Where a replaced entry waits if names cannot be exchanged.
fn replaced_path(slot: &Path) -> PathBuf {
    with_suffix(slot, REPLACED)
}

fn with_suffix(slot: &Path, suffix: &str) -> PathBuf {
    let mut path = slot.as_os_str().to_os_string();
    path.push(suffix);
    PathBuf::from(path)
}

fn lacks_flags(error: &io::Error) -> bool {
    let number = error.raw_os_error().map(Errno::from_raw_os_error);
    matches!(number, Some(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP))
}

fn create(directory: BorrowedFd<'_>, name: &OsStr) -> io::Result<OwnedFd> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(fs::openat(directory, name.as_bytes(), flags, Mode::from_raw_mode(0o600))?)
}

/// A missing entry of the upper has been removed before.
fn if_there(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if is_missing(&error) => Ok(()),
        result => result,
    }
}
