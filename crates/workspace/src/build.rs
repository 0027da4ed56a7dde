//! Builds the steps of a commit from a comparison.
//!
//! Entries of the base that are removed or renamed go to a staging directory first, the deepest first; then everything
//! gets its name from the top down. So names can be exchanged and directories moved into each other in any way, and no
//! step depends on another one of its kind. The staging directory of a file system lies in the highest directory there
//! in which names change: its owner can write to it, and no step moves it.

use crate::{
    Base, Result, Upper,
    compare::{BaseEntry, Comparison, Item},
    meta::{Meta, Xattrs, labels, shown_attributes},
    plan::xattrs_of,
    steps::{
        Detach, DirectoryBefore, Dress, Expected, FinishDirectory, Going, Make, Overwrite, Place, Seen, SetAttributes,
        Slot, Staged, Steps, Unlock, VERSION,
    },
    trouble::{During, fact},
    upper::LINKS,
};
use rustix::{
    fs::{self, AtFlags, FileType, Mode},
    io::Errno,
};
use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    ffi::OsStr,
    path::{Path, PathBuf},
};

/// Names of staging directories, before the number of the workspace: one that unions do not show, and one for the views of
/// unions, which reserve such names for themselves.
const STAGE: &str = ".wh..wh.commit.";
const STAGE_IN_VIEW: &str = ".nacre-commit.";
/// Entries of a directory that is removed from the view of a union as a whole: one with more cannot be renamed there.
const WHOLE_MAX: usize = 500;
/// Magic number of FUSE file systems (linux/magic.h).
const FUSE: u32 = 0x6573_5546;
/// Directory of the upper in the state directory.
const UPPER: &str = "upper";

/// What is committed.
pub(crate) struct Request<'a> {
    pub(crate) base: &'a Base,
    pub(crate) upper: &'a Upper,
    pub(crate) comparison: &'a Comparison,
    /// Entries whose changes are made.
    pub(crate) items: &'a BTreeSet<PathBuf>,
    pub(crate) removed: &'a BTreeSet<PathBuf>,
    /// Entries whose changes are dropped from the workspace.
    pub(crate) dropped_items: &'a BTreeSet<PathBuf>,
    pub(crate) dropped_removed: &'a BTreeSet<PathBuf>,
    /// The entries in each directory of the base that goes as a whole.
    pub(crate) seen: &'a BTreeMap<PathBuf, Vec<BaseEntry>>,
    /// Nothing else is changed in the workspace.
    pub(crate) is_whole: bool,
}

/// Where a staged entry lies.
#[derive(Clone, Debug)]
struct StagedAt {
    slot: Slot,
    within: PathBuf,
}

/// The file that the names of one file of the upper get.
enum Target<'a> {
    /// A file of the base, which stays.
    Existing(&'a Path, &'a Item),
    New,
}

struct Builder<'a> {
    request: &'a Request<'a>,
    steps: Steps,
    /// Staging directories by device: index, and the directories in which names change there.
    stages: BTreeMap<u64, (usize, BTreeSet<PathBuf>)>,
    next: usize,
    /// New directories that are staged.
    directories: HashMap<PathBuf, StagedAt>,
    /// New directories that later steps put entries into.
    open_directories: BTreeSet<PathBuf>,
    /// Directories of the view whose names change, and that exist in the base.
    touched: BTreeSet<PathBuf>,
    /// Old paths of directories in which names change.
    unlocked: BTreeSet<PathBuf>,
    /// Inode numbers of files that the commit itself changes.
    changed_files: HashSet<u64>,
    is_root: bool,
    /// Paths in the view of the base's directories.
    views: HashMap<&'a Path, &'a Path>,
}

/// Builds the steps.
pub(crate) fn steps(request: &Request<'_>) -> Result<Steps> {
    let top = Meta::of_file(request.base.target()?.top()).during("read", &request.base.target()?.shown)?;
    let steps = Steps { version: VERSION, base: top.ino, ..Steps::default() };
    let mut views = HashMap::new();
    for (view, item) in request.comparison.items.iter().filter(|(_, item)| item.upper.meta.is_directory()) {
        if let Some(base) = &item.base {
            views.insert(base.path.as_path(), view.as_path());
        }
    }
    let mut builder = Builder {
        request,
        steps,
        stages: BTreeMap::new(),
        next: 0,
        directories: HashMap::new(),
        open_directories: BTreeSet::new(),
        touched: BTreeSet::new(),
        unlocked: BTreeSet::new(),
        changed_files: HashSet::new(),
        is_root: rustix::process::geteuid().is_root(),
        views,
    };
    builder.build()?;
    Ok(builder.steps)
}

/// Refuses to take away a place at which something is mounted.
pub(crate) fn check_no_mount(shown: &Path, meta: &Meta) -> Result<()> {
    if !meta.is_mount {
        return Ok(());
    }
    Err(fact(
        shown,
        "is removed, renamed or replaced in the workspace, but something is mounted there: nothing is committed; unmount \
         it, or name the other paths to commit",
    ))
}

impl<'a> Builder<'a> {
    fn item(&self, path: &Path) -> Result<&'a Item> {
        match self.request.comparison.items.get(path) {
            Some(item) => Ok(item),
            None => Err(fact(path, "is not in the workspace")),
        }
    }

    fn build(&mut self) -> Result<()> {
        let request = self.request;
        let mut groups: BTreeMap<u64, Vec<&'a Path>> = BTreeMap::new();
        // Names that are not changed show which file of the base the others lead to.
        for (path, item) in &request.comparison.items {
            if !item.upper.meta.is_directory() && (request.items.contains(path) || !item.is_changed()) {
                groups.entry(item.upper.meta.ino).or_default().push(path);
            }
        }
        for paths in groups.values() {
            if let Target::Existing(_, main) = self.target(paths)?
                && let Some(base) = &main.base
                && main.aspects != crate::Aspects::default()
            {
                self.changed_files.insert(base.meta.ino);
            }
        }
        let mut first: HashMap<u64, StagedAt> = HashMap::new();
        for path in request.items {
            let item = self.item(path)?;
            if item.upper.meta.is_directory() {
                self.directory(path, item)?;
                continue;
            }
            let paths = groups.get(&item.upper.meta.ino).map(Vec::as_slice).unwrap_or_default();
            match self.target(paths)? {
                Target::Existing(main_path, main) if main_path == path => self.main_name(path, main)?,
                Target::Existing(_, main) => self.further_name(path, item, main)?,
                Target::New => {
                    let made = first.get(&item.upper.meta.ino).cloned();
                    let names = paths.iter().filter(|path| request.items.contains(**path)).count();
                    let at = self.new_file(path, item, made.as_ref(), names)?;
                    first.entry(item.upper.meta.ino).or_insert(at);
                }
            }
        }
        for path in request.removed {
            let Some(meta) = request.comparison.removed.get(path) else { continue };
            let entries = request.seen.get(path).map(Vec::as_slice).unwrap_or_default();
            if entries.len() > WHOLE_MAX && self.is_on_fuse(path)? {
                self.remove_one_by_one(path, meta, entries)?;
                continue;
            }
            let slot = self.detach(path, meta)?;
            self.goes(path, meta, slot)?;
        }
        self.steps.detaches.sort_by_key(|detach| Reverse(detach.path.components().count()));
        self.steps.places.sort_by_key(|place| place.path.components().count());
        self.finish_directories()?;
        self.set_stages()?;
        self.unlock()?;
        self.leave_upper()?;
        self.steps.names = u64::try_from(request.items.len() + request.removed.len()).unwrap_or(u64::MAX);
        Ok(())
    }

    // ---- Places ----

    /// The next slot in the staging directory of a device; `directory` is an old path in which names change.
    fn slot(&mut self, device: u64, directory: &Path) -> Slot {
        let count = self.stages.len();
        let (stage, directories) = self.stages.entry(device).or_insert_with(|| (count, BTreeSet::new()));
        directories.insert(directory.to_path_buf());
        let slot = Slot { stage: *stage, number: self.next };
        self.next += 1;
        slot
    }

    /// The nearest directory of the base at or above a path in the view: its old path and device.
    fn directory_below(&self, view: &Path) -> Result<(PathBuf, u64)> {
        for above in view.ancestors() {
            let base = self.request.comparison.items.get(above).and_then(|item| item.base.as_ref());
            if let Some(base) = base.filter(|base| base.meta.is_directory()) {
                return Ok((base.path.clone(), base.meta.device));
            }
        }
        Err(fact(view, "has no directory in the base"))
    }

    /// Adds the step by which an entry of the base leaves its name.
    fn detach(&mut self, path: &Path, meta: &Meta) -> Result<Slot> {
        check_no_mount(&self.request.base.path_of(path), meta)?;
        let parent = path.parent().unwrap_or(Path::new("")).to_path_buf();
        let device = self.request.base.meta(&parent)?.map_or(meta.device, |meta| meta.device);
        let slot = self.slot(device, &parent);
        let expected = Expected::new(meta, self.changed_files.contains(&meta.ino));
        self.steps.detaches.push(Detach { path: path.to_path_buf(), slot, expected });
        self.touch_below(&parent);
        self.unlocked.insert(parent);
        if meta.is_directory() {
            self.unlocked.insert(path.to_path_buf());
        }
        Ok(slot)
    }

    /// Removes a directory of the base with everything in it, each entry by a step of its own.
    fn remove_one_by_one(&mut self, path: &Path, meta: &Meta, entries: &[BaseEntry]) -> Result<()> {
        for (path, meta) in entries.iter().map(|entry| (entry.path.as_path(), &entry.meta)).chain([(path, meta)]) {
            let slot = self.detach(path, meta)?;
            if meta.is_directory() {
                self.steps.going.push(Going { slot, ino: meta.ino, entries: Vec::new() });
            }
        }
        Ok(())
    }

    /// Notes what is deleted with a directory of the base that an item replaces.
    fn replaces(&mut self, item: &Item, slot: Slot) -> Result<()> {
        match &item.over {
            Some(over) => self.goes(&over.path, &over.meta, slot),
            None => Ok(()),
        }
    }

    /// Notes what is deleted with a directory of the base that goes to a slot.
    fn goes(&mut self, path: &Path, meta: &Meta, slot: Slot) -> Result<()> {
        if !meta.is_directory() {
            return Ok(());
        }
        let Some(seen) = self.request.seen.get(path) else {
            return Err(fact(path, "has not been compared with the workspace"));
        };
        let mut entries = Vec::with_capacity(seen.len());
        for entry in seen {
            let expected = Expected::new(&entry.meta, self.changed_files.contains(&entry.meta.ino));
            let path = entry.path.strip_prefix(path).unwrap_or(&entry.path).to_path_buf();
            entries.push(Seen { path, expected });
        }
        self.steps.going.push(Going { slot, ino: meta.ino, entries });
        Ok(())
    }

    /// Notes that names change in a directory with this old path.
    fn touch_below(&mut self, below: &Path) {
        if let Some(view) = self.views.get(below) {
            self.touched.insert(view.to_path_buf());
        }
    }

    /// Adds the step by which a slot gets a name.
    fn place(&mut self, path: &Path, slot: Slot, over: Option<&Meta>) -> Result<()> {
        if let Some(over) = over {
            check_no_mount(&self.request.base.path_of(path), over)?;
        }
        let over = over.map(|meta| Expected::new(meta, self.changed_files.contains(&meta.ino)));
        self.steps.places.push(Place { path: path.to_path_buf(), slot, over });
        let parent = path.parent().unwrap_or(Path::new(""));
        if self.directories.contains_key(parent) {
            self.open_directories.insert(parent.to_path_buf());
        } else {
            self.touched.insert(parent.to_path_buf());
            let (below, _) = self.directory_below(parent)?;
            self.unlocked.insert(below);
        }
        Ok(())
    }

    /// A new entry: in a staged directory, or in a slot of its own that gets the name.
    fn stage(&mut self, path: &Path, over: Option<&Meta>) -> Result<StagedAt> {
        let parent = path.parent().unwrap_or(Path::new(""));
        if let (Some(above), Some(name)) = (self.directories.get(parent), path.file_name()) {
            return Ok(StagedAt { slot: above.slot, within: above.within.join(name) });
        }
        let (below, device) = self.directory_below(parent)?;
        let slot = self.slot(device, &below);
        self.place(path, slot, over)?;
        self.replaces(self.item(path)?, slot)?;
        Ok(StagedAt { slot, within: PathBuf::new() })
    }

    fn staged(&self, path: &Path, item: &Item, at: &StagedAt, make: Make) -> Staged {
        let meta = &item.upper.meta;
        let source = match &item.in_links {
            Some(name) => Path::new(LINKS).join(name),
            None => Path::new(UPPER).join(path),
        };
        Staged {
            slot: at.slot,
            within: at.within.clone(),
            source,
            ino: meta.ino,
            size: meta.size,
            mtime: meta.mtime,
            make,
            labels: Xattrs::new(),
            destination: path.to_path_buf(),
        }
    }

    /// The entry of the base at the path of an item, that is not the item itself by another path.
    fn replaced(item: &Item) -> Option<&Meta> {
        let over = item.over.as_ref().map(|over| &over.meta);
        if item.renamed { over } else { over.or(item.base.as_ref().map(|base| &base.meta)) }
    }

    // ---- Directories ----

    fn directory(&mut self, path: &'a Path, item: &'a Item) -> Result<()> {
        let Some(base) = &item.base else {
            let at = self.stage(path, Self::replaced(item))?;
            let staged = self.staged(path, item, &at, Make::Directory { stays_open: false });
            self.steps.staged.push(staged);
            self.directories.insert(path.to_path_buf(), at);
            return Ok(());
        };
        if item.renamed {
            let slot = self.detach(&base.path, &base.meta)?;
            self.place(path, slot, item.over.as_ref().map(|over| &over.meta))?;
            self.replaces(item, slot)?;
            self.touched.insert(path.to_path_buf());
        }
        if item.aspects != crate::Aspects::default() {
            self.touched.insert(path.to_path_buf());
            self.set_attributes(path, item, |dress| Dress { mode: dress.mode | 0o700, ..dress })?;
        }
        Ok(())
    }

    /// Adds the step that gives an entry of the base the attributes of its copy.
    fn set_attributes(&mut self, path: &Path, item: &Item, adapt: impl Fn(Dress) -> Dress) -> Result<()> {
        let Some(base) = &item.base else { return Ok(()) };
        let Some(below) = self.request.base.find(&base.path)? else {
            return Err(fact(&self.request.base.path_of(&base.path), "has been changed by others meanwhile"));
        };
        let (tree, place) = item.place(self.request.upper, path);
        let ours = tree.xattrs(&place).during("read the attributes of", &tree.path_of(&place))?;
        let mut after = Dress::new(&item.upper.meta, shown_attributes(&ours));
        if base.meta.is_directory() {
            if !item.aspects.mode {
                after.mode = base.meta.mode;
            }
            if !item.aspects.owner {
                (after.uid, after.gid) = (base.meta.uid, base.meta.gid);
            }
            // Entries that come and go change the times; the last step sets them.
            (after.atime, after.mtime) = (base.meta.atime, base.meta.mtime);
        }
        let before = Dress::new(&base.meta, xattrs_of(&below, &base.path)?);
        let expected = Expected::new(&base.meta, true);
        self.steps.attributes.push(SetAttributes { path: base.path.clone(), expected, before, after: adapt(after) });
        Ok(())
    }

    /// Final modes and times of directories, the deepest first.
    fn finish_directories(&mut self) -> Result<()> {
        let request = self.request;
        if request.is_whole {
            for (path, item) in &request.comparison.items {
                let is_other = item.base.as_ref().is_some_and(|base| base.meta.mtime != item.upper.meta.mtime);
                if item.upper.meta.is_directory() && is_other {
                    self.touched.insert(path.clone());
                }
            }
        }
        let mut finishes = Vec::new();
        for path in self.touched.clone() {
            let item = self.item(&path)?;
            let Some(base) = item.base.as_ref().filter(|_| self.has_its_path(&path)) else { continue };
            let is_committed = request.items.contains(&path);
            let mode = if is_committed && item.aspects.mode { item.upper.meta.mode } else { base.meta.mode };
            let line = request.comparison.scan.hidden.get(&base.path);
            let is_unchanged = line.is_none_or(|line| line.mtime == base.meta.mtime);
            finishes.push(FinishDirectory {
                path,
                mode,
                times: is_unchanged.then_some((item.upper.meta.atime, item.upper.meta.mtime)),
                before: Some(DirectoryBefore {
                    path: base.path.clone(),
                    ino: base.meta.ino,
                    mode: base.meta.mode,
                    atime: base.meta.atime,
                    mtime: base.meta.mtime,
                }),
            });
        }
        for path in &self.open_directories {
            let meta = &self.item(path)?.upper.meta;
            let times = Some((meta.atime, meta.mtime));
            finishes.push(FinishDirectory { path: path.clone(), mode: meta.mode, times, before: None });
        }
        finishes.sort_by_key(|finish| Reverse(finish.path.components().count()));
        self.steps.finishes = finishes;
        let open = &self.open_directories;
        for staged in &mut self.steps.staged {
            if let Make::Directory { stays_open } = &mut staged.make {
                *stays_open = open.contains(&staged.destination);
            }
        }
        Ok(())
    }

    /// Whether an entry will have its path in the base: no rename on the way to it is left out.
    fn has_its_path(&self, path: &Path) -> bool {
        path.ancestors().all(|above| {
            let moves =
                self.request.comparison.items.get(above).is_some_and(|item| item.renamed || item.base.is_none());
            !moves || self.request.items.contains(above)
        })
    }

    /// Decides where the staging directories lie.
    fn set_stages(&mut self) -> Result<()> {
        let state = Meta::of_file(self.request.upper.tree.top()).during("read", &self.request.upper.tree.shown)?;
        let number = format!("{:x}-{:x}", state.device, state.ino);
        let mut stages: Vec<(usize, PathBuf)> = Vec::new();
        for (index, directories) in self.stages.values() {
            let highest = directories.iter().min_by_key(|path| path.components().count());
            stages.push((*index, highest.cloned().unwrap_or_default()));
        }
        stages.sort();
        for (_, home) in stages {
            if let Some(moved) = self.steps.detaches.iter().find(|detach| home.starts_with(&detach.path)) {
                return Err(fact(
                    &self.request.base.path_of(&moved.path),
                    "is renamed in the workspace, and names are changed in a file system that is mounted in it: nothing is \
                     committed; commit the paths in that file system first",
                ));
            }
            self.touch_finish(&home)?;
            let prefix = if self.reserves_names(&home, &number)? { STAGE_IN_VIEW } else { STAGE };
            self.steps.stages.push(home.join(format!("{prefix}{number}")));
            self.unlocked.insert(home);
        }
        Ok(())
    }

    /// Whether a directory is on a FUSE file system.
    fn is_on_fuse(&self, directory: &Path) -> Result<bool> {
        let base = self.request.base.target()?;
        let shown = base.path_of(directory);
        let opened = base.directory(directory).during("open", &shown)?;
        // As the kernel's structures, the type has another width on each architecture.
        let kind = fs::fstatfs(&opened).during("read", &shown)?.f_type;
        Ok(u32::try_from(kind).ok() == Some(FUSE))
    }

    /// Whether a directory of the base lies in the view of a union, in which nobody can make the names of marks.
    fn reserves_names(&self, home: &Path, number: &str) -> Result<bool> {
        if !self.is_on_fuse(home)? {
            return Ok(false);
        }
        let base = self.request.base.target()?;
        let shown = base.path_of(home);
        let directory = base.directory(home).during("open", &shown)?;
        let name = format!("{STAGE}{number}");
        match fs::mkdirat(&directory, &name, Mode::RWXU) {
            // What is opened for the time of the commit cannot be tried; names without a mark can be made anywhere.
            Err(Errno::PERM | Errno::ACCESS) => return Ok(true),
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(error).during("create a staging directory in", &shown),
        }
        // One without anything in it is left by a kill at this place.
        match fs::unlinkat(&directory, &name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT | Errno::NOTEMPTY | Errno::EXIST) => Ok(false),
            Err(error) => Err(error).during("remove the staging directory in", &shown),
        }
    }

    /// Makes sure that a directory in which only a staging directory comes and goes gets its times back.
    fn touch_finish(&mut self, home: &Path) -> Result<()> {
        let is_known = |finish: &FinishDirectory| finish.before.as_ref().is_some_and(|before| before.path == home);
        if self.steps.finishes.iter().any(is_known) {
            return Ok(());
        }
        let Some(meta) = self.request.base.meta(home)? else { return Ok(()) };
        let before = DirectoryBefore {
            path: home.to_path_buf(),
            ino: meta.ino,
            mode: meta.mode,
            atime: meta.atime,
            mtime: meta.mtime,
        };
        let times = Some((meta.atime, meta.mtime));
        self.steps.finishes.push(FinishDirectory {
            path: home.to_path_buf(),
            mode: meta.mode,
            times,
            before: Some(before),
        });
        self.steps.finishes.sort_by_key(|finish| Reverse(finish.path.components().count()));
        Ok(())
    }

    /// Directories that their owner may not write to.
    fn unlock(&mut self) -> Result<()> {
        if self.is_root {
            return Ok(());
        }
        for path in self.unlocked.clone() {
            let Some(meta) = self.request.base.meta(&path)? else { continue };
            if meta.permissions() & 0o700 != 0o700 && meta.uid == rustix::process::geteuid().as_raw() {
                self.steps.unlocks.push(Unlock { path, ino: meta.ino, mode: meta.permissions() });
            }
        }
        Ok(())
    }

    // ---- Files ----

    /// Whether a file of the base stays, and which, for the names of one file of the upper.
    fn target(&self, paths: &[&'a Path]) -> Result<Target<'a>> {
        let mut members = Vec::with_capacity(paths.len());
        for path in paths {
            members.push((*path, self.item(path)?));
        }
        let has_base = |(_, item): &&(&'a Path, &'a Item)| item.base.is_some() && item.is_copy;
        let in_place = |member: &&(&'a Path, &'a Item)| has_base(member) && !member.1.renamed;
        let copy = members.iter().find(in_place).or_else(|| members.iter().find(has_base)).copied();
        let alone = match members.as_slice() {
            [(path, item)] if item.base.as_ref().is_some_and(|base| base.meta.links == 1) => Some((*path, *item)),
            _ => None,
        };
        let unchanged = members.iter().find(|(_, item)| !item.is_changed() && item.base.is_some()).copied();
        let Some((path, main)) = copy.or(alone).or(unchanged) else { return Ok(Target::New) };
        Ok(if self.stays(path, main)? { Target::Existing(path, main) } else { Target::New })
    }

    /// Whether the file of the base can get content and attributes of its copy, instead of being replaced.
    fn stays(&self, path: &Path, item: &Item) -> Result<bool> {
        let Some(base) = &item.base else { return Ok(false) };
        let (old, new, aspects) = (&base.meta, &item.upper.meta, item.aspects);
        if new.kind() != FileType::RegularFile {
            return Ok(!(aspects.target || aspects.device || aspects.owner));
        }
        if item.is_copy && old.links > 1 {
            // Other names, also outside of the base, keep leading to it.
            return Ok(true);
        }
        if aspects.content || aspects.owner || aspects.links || new.mode & !old.mode & 0o6000 != 0 {
            return Ok(false);
        }
        if !aspects.xattrs {
            return Ok(true);
        }
        // A file that a process has open for writing does not get rights.
        let (tree, place) = item.place(self.request.upper, path);
        let capability = tree.xattr(&place, b"security.capability");
        Ok(capability.during("read the attributes of", &tree.path_of(&place))?.is_none())
    }

    /// The name by which a file of the base stays.
    fn main_name(&mut self, path: &Path, item: &Item) -> Result<()> {
        let Some(base) = &item.base else { return Ok(()) };
        if item.aspects.content {
            let parent = base.path.parent().unwrap_or(Path::new(""));
            let device = self.request.base.meta(parent)?.map_or(base.meta.device, |meta| meta.device);
            let (new, old) = (self.slot(device, parent), self.slot(device, parent));
            let at = |slot: Slot| StagedAt { slot, within: PathBuf::new() };
            let copy = self.staged(path, item, &at(new), Make::Copy { may_link: false });
            let expected = Expected::new(&base.meta, false);
            let backup = self.staged(path, item, &at(old), Make::Backup { path: base.path.clone(), expected });
            self.steps.staged.extend([copy, backup]);
            self.steps.overwrites.push(Overwrite { path: base.path.clone(), expected, new, old });
        }
        if item.aspects != crate::Aspects::default() {
            self.set_attributes(path, item, |dress| dress)?;
        }
        if item.renamed {
            let slot = self.detach(&base.path, &base.meta)?;
            self.place(path, slot, item.over.as_ref().map(|over| &over.meta))?;
            self.replaces(item, slot)?;
        }
        Ok(())
    }

    /// Another name of a file of the base that stays.
    fn further_name(&mut self, path: &Path, item: &Item, main: &Item) -> Result<()> {
        let Some(file) = &main.base else { return Ok(()) };
        let is_already = |item: &Item| {
            item.base.as_ref().is_some_and(|base| {
                !item.renamed && (base.meta.device, base.meta.ino) == (file.meta.device, file.meta.ino)
            })
        };
        if is_already(item) || item.in_links.is_some() {
            return Ok(());
        }
        self.vacate(item)?;
        let at = self.stage(path, Self::replaced(item))?;
        let make = Make::LinkOfBase { path: file.path.clone(), ino: file.meta.ino };
        let staged = self.staged(path, item, &at, make);
        self.steps.staged.push(staged);
        Ok(())
    }

    /// The old name of a renamed file that is replaced by a new one.
    fn vacate(&mut self, item: &Item) -> Result<()> {
        if let Some(base) = item.base.as_ref().filter(|_| item.renamed) {
            self.detach(&base.path, &base.meta)?;
        }
        Ok(())
    }

    /// A new file, or another name of one.
    fn new_file(&mut self, path: &Path, item: &Item, first: Option<&StagedAt>, names: usize) -> Result<StagedAt> {
        self.vacate(item)?;
        let at = self.stage(path, Self::replaced(item))?;
        let Some(first) = first else {
            let labels = self.labels_of_replaced(item)?;
            // Names in the upper and in the hard-link index; no other one keeps the file.
            let known = names + usize::from(self.request.comparison.scan.linked.contains_key(&item.upper.meta.ino));
            let has_no_other =
                item.in_links.is_none() && usize::try_from(item.upper.meta.links).is_ok_and(|links| links <= known);
            let may_link = has_no_other && self.own_labels(path, item)? == labels;
            let staged = self.staged(path, item, &at, Make::Copy { may_link });
            self.steps.staged.push(Staged { labels, ..staged });
            return Ok(at);
        };
        let make = Make::LinkOfStaged { slot: first.slot, within: first.within.clone() };
        let staged = self.staged(path, item, &at, make);
        self.steps.staged.push(staged);
        Ok(at)
    }

    /// The labels of the file of the base that a new file replaces. An entry without counterpart gets the label that its
    /// directory gives.
    fn labels_of_replaced(&self, item: &Item) -> Result<Xattrs> {
        let Some(base) = &item.base else { return Ok(Xattrs::new()) };
        let Some(below) = self.request.base.find(&base.path)? else {
            return Err(fact(&self.request.base.path_of(&base.path), "has been changed by others meanwhile"));
        };
        let stored = below.tree.xattrs(&base.path).during("read the attributes of", &below.tree.path_of(&base.path))?;
        Ok(labels(&stored))
    }

    /// The labels of an entry of the upper.
    fn own_labels(&self, path: &Path, item: &Item) -> Result<Xattrs> {
        let (tree, place) = item.place(self.request.upper, path);
        let stored = tree.xattrs(&place).during("read the attributes of", &tree.path_of(&place))?;
        Ok(labels(&stored))
    }

    // ---- The upper afterwards ----

    /// The entries that leave the upper.
    fn leave_upper(&mut self) -> Result<()> {
        let request = self.request;
        let scan = &request.comparison.scan;
        let (mut entries, mut directories) = (BTreeSet::new(), BTreeSet::new());
        if request.is_whole {
            let listed = request.upper.tree.list(Path::new("")).during("read", &request.upper.tree.shown)?;
            entries.extend(listed.iter().map(|listed| Path::new(UPPER).join(&listed.name)));
            if let Some(links) = crate::base::or_missing(request.upper.state.list(Path::new(LINKS)))
                .during("read", &request.upper.state.shown)?
            {
                entries.extend(links.iter().map(|listed| Path::new(LINKS).join(&listed.name)));
            }
            self.steps.upper_entries = entries.into_iter().collect();
            return Ok(());
        }
        let leaving: BTreeSet<&PathBuf> = request.items.union(request.dropped_items).collect();
        let removed: BTreeSet<&PathBuf> = request.removed.union(request.dropped_removed).collect();
        // Names of one file leave together, the unchanged ones as well: afterwards they are names of the base's file.
        let (mut going, mut staying) = (HashSet::new(), HashSet::new());
        for (path, item) in request.comparison.items.iter().filter(|(_, item)| !item.upper.meta.is_directory()) {
            if leaving.contains(path) {
                going.insert(item.upper.meta.ino);
            } else if item.is_changed() {
                staying.insert(item.upper.meta.ino);
            }
        }
        for (path, item) in &request.comparison.items {
            let ino = item.upper.meta.ino;
            if item.upper.meta.is_directory() || !going.contains(&ino) {
                continue;
            }
            if item.in_links.is_none() {
                entries.insert(Path::new(UPPER).join(path));
                directories.extend(path.ancestors().skip(1).map(Path::to_path_buf));
            }
            if let Some(copy) = scan.linked.get(&ino) {
                entries.insert(Path::new(LINKS).join(&copy.name));
            }
        }
        for path in leaving.iter().copied().filter(|path| !path.as_os_str().is_empty()) {
            let item = self.item(path)?;
            if item.upper.meta.is_directory() {
                let stays = |item: &Item| !item.upper.meta.is_directory() && staying.contains(&item.upper.meta.ino);
                let others_stay = request.comparison.items.iter().any(|(inner, item)| {
                    inner.starts_with(path)
                        && inner != path
                        && (stays(item) || item.is_changed() && !leaving.contains(inner))
                });
                let hides_others =
                    scan.whiteouts.keys().any(|inner| inner.starts_with(path)) && !item.upper.opaque && !item.renamed;
                if !others_stay && !hides_others {
                    entries.insert(Path::new(UPPER).join(path));
                }
            }
            // The whiteout of the old name, or beside the new one.
            let old = item.base.as_ref().filter(|_| item.renamed).map(|base| &base.path);
            for hidden in old.into_iter().chain([path]) {
                if let Some(mark) = scan.whiteouts.get(hidden) {
                    entries.insert(Path::new(UPPER).join(mark));
                }
            }
            directories.extend(path.ancestors().skip(1).map(Path::to_path_buf));
            directories.extend(old.into_iter().flat_map(|old| old.ancestors().skip(1).map(Path::to_path_buf)));
        }
        for path in removed {
            for (hidden, mark) in &scan.whiteouts {
                if self.is_counterpart(hidden, path) {
                    entries.insert(Path::new(UPPER).join(mark));
                    directories.extend(hidden.ancestors().skip(1).map(Path::to_path_buf));
                }
            }
        }
        let keeps = |path: &PathBuf| {
            path.as_os_str().is_empty()
                || request.comparison.items.get(path).is_some_and(|item| item.is_changed() && !leaving.contains(path))
        };
        let mut directories: Vec<PathBuf> = directories.into_iter().filter(|path| !keeps(path)).collect();
        directories.extend(
            leaving
                .iter()
                .filter(|path| request.comparison.items.get(**path).is_some_and(|item| item.upper.meta.is_directory()))
                .map(|path| (*path).clone()),
        );
        directories.sort_by_key(|path| Reverse(path.components().count()));
        directories.dedup();
        self.steps.upper_entries = entries.into_iter().collect();
        self.steps.upper_directories = directories.into_iter().map(|path| Path::new(UPPER).join(path)).collect();
        Ok(())
    }

    /// Whether a path that a whiteout hides in the view is this path in the base.
    fn is_counterpart(&self, hidden: &Path, path: &Path) -> bool {
        let name: Option<&OsStr> = hidden.file_name();
        if name != path.file_name() {
            return false;
        }
        let parent = hidden.parent().and_then(|parent| self.request.comparison.items.get(parent));
        let below = parent.and_then(|item| item.base.as_ref()).map(|base| base.path.as_path());
        below.is_some() && below == path.parent()
    }
}
