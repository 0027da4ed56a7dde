//! Comparison of an upper directory with its base: which entry of the base each entry of the upper is, and what differs.
//!
//! An entry of the upper is the *copy* of an entry of the base where the log of hidden entries names its inode number and
//! the copy itself records this origin; a file that got a freed inode number is so no copy. A copy at another path is a
//! rename; the entry of the base is then *moved*. Names of the base are removed where a whiteout or an opaque directory
//! hides them. Only the upper and directories that it hides are read, with one exception: where a file with several
//! names was changed and the upper does not have all of them, the base's listings are searched for the others.

use crate::{
    Aspects, Result,
    base::{Base, or_missing},
    beneath::Tree,
    content,
    meta::{Meta, generation, shown_attributes},
    trouble::During,
    upper::{LINKS, LinkedCopy, MARK, Scan, Upper, UpperEntry},
};
use rustix::fs::FileType;
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    ffi::{OsStr, OsString},
    os::{fd::AsFd, unix::ffi::OsStrExt},
    path::{Path, PathBuf},
};

/// Times that renames are resolved anew because a renamed directory changes what is in its place.
const ROUNDS: usize = 8;

/// An entry of the base.
#[derive(Clone, Debug)]
pub(crate) struct BaseEntry {
    pub(crate) path: PathBuf,
    pub(crate) meta: Meta,
}

/// An entry of the upper with its counterparts in the base.
#[derive(Clone, Debug)]
pub(crate) struct Item {
    pub(crate) upper: UpperEntry,
    /// Name in the hard-link index, of a file that has no name in the upper directory.
    pub(crate) in_links: Option<OsString>,
    /// The entry of the base that it is, of the same type: at the same path, or moved.
    pub(crate) base: Option<BaseEntry>,
    /// It is a copy of `base`, and not another file in its place.
    pub(crate) is_copy: bool,
    /// `base` has another path there.
    pub(crate) renamed: bool,
    /// The path in the base that it was copied from, where the base has something else there by now.
    pub(crate) lost: Option<PathBuf>,
    /// Another entry of the base that has its path, and is replaced.
    pub(crate) over: Option<BaseEntry>,
    /// Its path in the base's directory, whether or not the base has an entry there; `None` in new directories.
    pub(crate) natural: Option<PathBuf>,
    pub(crate) aspects: Aspects,
}

impl Item {
    /// The entry of the base that the attributes are compared with.
    pub(crate) fn reference(&self) -> Option<&BaseEntry> {
        self.base.as_ref().or(self.over.as_ref())
    }

    /// Whether anything differs from the base.
    pub(crate) fn is_changed(&self) -> bool {
        self.renamed || self.base.is_none() || self.aspects != Aspects::default()
    }
}

/// The result of a comparison.
#[derive(Debug)]
pub(crate) struct Comparison {
    /// All entries of the upper by their paths in the view.
    pub(crate) items: BTreeMap<PathBuf, Item>,
    /// Entries of the base that are not in the view, by their paths in the base; of a directory, with everything in it.
    pub(crate) removed: BTreeMap<PathBuf, Meta>,
    pub(crate) scan: Scan,
    /// Changed files of the hard-link index without any name in upper and base.
    pub(crate) unplaced: Vec<Unplaced>,
}

/// A changed file without a name.
#[derive(Debug)]
pub(crate) struct Unplaced {
    /// Its path in the state directory.
    pub(crate) file: PathBuf,
    /// Names that it had in the base; none if the log does not know its inode number.
    pub(crate) names: Vec<PathBuf>,
}

/// Device and inode number of two files.
type Pair = (u64, u64, u64);

struct Comparer<'a> {
    base: &'a Base,
    upper: &'a Upper,
    scan: Scan,
    /// Results of comparisons of content, for files with several names.
    same_content: HashMap<Pair, bool>,
}

/// Compares the upper directory with the base.
pub(crate) fn compare(base: &Base, upper: &Upper) -> Result<Comparison> {
    compare_scanned(base, upper, upper.scan()?)
}

/// Compares the upper directory with the topmost directory of the base alone.
pub(crate) fn compare_with_target(target: &Base, upper: &Upper) -> Result<Comparison> {
    let mut scan = upper.scan()?;
    scan.hidden.retain(|_, line| line.branch <= TARGET);
    compare_scanned(target, upper, scan)
}

/// Number of the base's topmost directory in the log.
pub(crate) const TARGET: usize = 1;

fn compare_scanned(base: &Base, upper: &Upper, scan: Scan) -> Result<Comparison> {
    let mut comparer = Comparer { base, upper, scan, same_content: HashMap::new() };
    let claims = comparer.claims()?;
    let mut items = comparer.resolve(&claims)?;
    let removed = comparer.removed(&items)?;
    comparer.find_aspects(&mut items)?;
    let unplaced = comparer.find_names_of_linked(&mut items, &removed)?;
    find_broken_links(&mut items);
    Ok(Comparison { items, removed, scan: comparer.scan, unplaced })
}

/// The path of an entry in the counterpart of its directory.
fn natural(directories: &HashMap<PathBuf, PathBuf>, path: &Path) -> Option<PathBuf> {
    Some(directories.get(path.parent()?)?.join(path.file_name()?))
}

impl Comparer<'_> {
    /// For each entry of the upper, the path in the base that it is a copy of.
    fn claims(&self) -> Result<HashMap<PathBuf, PathBuf>> {
        let mut copied: HashMap<u64, Vec<&PathBuf>> = HashMap::new();
        for (path, line) in &self.scan.hidden {
            if let Some(copy) = line.copy {
                copied.entry(copy).or_default().push(path);
            }
        }
        copied.values_mut().for_each(|paths| paths.sort());
        let (mut claims, mut taken) = (HashMap::new(), HashSet::new());
        // Counterparts of directories, with an empty path for the top.
        let mut directories = HashMap::from([(PathBuf::new(), PathBuf::new())]);
        for (path, entry) in &self.scan.entries {
            if path.as_os_str().is_empty() {
                continue;
            }
            let natural = natural(&directories, path);
            let originals: Vec<&PathBuf> = copied
                .get(&entry.meta.ino)
                .into_iter()
                .flatten()
                .copied()
                .filter(|original| self.is_copy_of(entry, original))
                .collect();
            let is_in_place = match &natural {
                Some(natural) if taken.contains(natural) => false,
                Some(natural) => originals.contains(&natural) || self.is_origin(entry, natural)?,
                None => false,
            };
            let claim = if is_in_place {
                natural.clone()
            } else {
                originals.into_iter().find(|path| !taken.contains(*path) && self.is_vacated(path, entry)).cloned()
            };
            if entry.meta.is_directory()
                && let Some(counterpart) = claim.clone().or(natural)
            {
                directories.insert(path.clone(), counterpart);
            }
            if let Some(claim) = claim {
                taken.insert(claim.clone());
                claims.insert(path.clone(), claim);
            }
        }
        Ok(claims)
    }

    /// Whether an entry is the copy that the last line of a path in the log names.
    fn is_copy_of(&self, entry: &UpperEntry, original: &Path) -> bool {
        let Some(line) = self.scan.hidden.get(original) else { return false };
        if line.kind != entry.meta.letter() {
            return false;
        }
        if entry.meta.is_file() || entry.meta.is_directory() {
            // Inode numbers are given again; the copy's own record is not.
            return entry.origin.is_some_and(|origin| origin.is(line.ino, generation(line.btime)));
        }
        true
    }

    /// Whether an entry records the present entry of the base as its origin.
    fn is_origin(&self, entry: &UpperEntry, path: &Path) -> Result<bool> {
        let Some(origin) = entry.origin else { return Ok(false) };
        let there = self.base.meta(path)?;
        Ok(there.is_some_and(|there| origin.is(there.ino, there.generation()) && there.kind() == entry.meta.kind()))
    }

    /// Whether the upper has another file, or none, at the path of an original.
    fn is_vacated(&self, original: &Path, entry: &UpperEntry) -> bool {
        self.scan.entries.get(original).is_none_or(|there| there.meta.ino != entry.meta.ino)
    }

    /// Finds the counterpart of each entry, from the top down.
    fn resolve(&self, claims: &HashMap<PathBuf, PathBuf>) -> Result<BTreeMap<PathBuf, Item>> {
        let mut moved = HashSet::new();
        for _ in 0..ROUNDS {
            let items = self.resolve_once(claims, &moved)?;
            let now: HashSet<PathBuf> = items
                .values()
                .filter(|item| item.renamed)
                .filter_map(|item| item.base.as_ref().map(|base| base.path.clone()))
                .collect();
            if now == moved {
                return Ok(items);
            }
            moved = now;
        }
        // Names that keep exchanging their places: all of them are new, and the old ones are removed.
        self.resolve_once(&HashMap::new(), &HashSet::new())
    }

    fn resolve_once(
        &self,
        claims: &HashMap<PathBuf, PathBuf>,
        moved: &HashSet<PathBuf>,
    ) -> Result<BTreeMap<PathBuf, Item>> {
        let mut items = BTreeMap::new();
        // Counterparts of directories, and the device that new entries in a directory are on.
        let mut directories: HashMap<PathBuf, PathBuf> = HashMap::new();
        let mut devices: HashMap<PathBuf, u64> = HashMap::new();
        for (path, entry) in &self.scan.entries {
            let is_top = path.as_os_str().is_empty();
            let natural = if is_top { Some(PathBuf::new()) } else { natural(&directories, path) };
            let device = path.parent().and_then(|parent| devices.get(parent)).copied();
            let there = match &natural {
                Some(natural) if !moved.contains(natural) => {
                    let meta = self.base.meta(natural)?;
                    meta.map(|meta| BaseEntry { path: natural.clone(), meta })
                }
                _ => None,
            };
            let mut item = Item {
                upper: entry.clone(),
                in_links: None,
                base: None,
                is_copy: is_top,
                renamed: false,
                lost: None,
                over: None,
                natural: natural.clone(),
                aspects: Aspects::default(),
            };
            match claims.get(path) {
                Some(claim) if natural.as_ref() != Some(claim) => match self.base.meta(claim)? {
                    Some(meta) if self.is_still(claim, &meta, entry) && Some(meta.device) == device => {
                        item.base = Some(BaseEntry { path: claim.clone(), meta });
                        (item.renamed, item.is_copy) = (true, true);
                    }
                    _ => item.lost = Some(claim.clone()),
                },
                Some(claim) => {
                    item.is_copy = there.as_ref().is_some_and(|there| self.is_still(claim, &there.meta, entry));
                }
                None => {}
            }
            if let Some(there) = there {
                if item.base.is_none() && there.meta.kind() == entry.meta.kind() {
                    item.base = Some(there);
                } else {
                    item.over = Some(there);
                }
            }
            if entry.meta.is_directory() {
                let base = item.base.as_ref().map(|base| base.meta.device);
                if let Some(device) = base.or(device) {
                    devices.insert(path.clone(), device);
                }
                if let Some(base) = &item.base {
                    directories.insert(path.clone(), base.path.clone());
                }
            }
            items.insert(path.clone(), item);
        }
        Ok(items)
    }

    /// Whether the base still has the entry that was copied.
    fn is_still(&self, path: &Path, meta: &Meta, entry: &UpperEntry) -> bool {
        let line = self.scan.hidden.get(path);
        meta.kind() == entry.meta.kind() && line.is_none_or(|line| line.ino == meta.ino)
    }

    /// Adds the names of the base that show changed files of the hard-link index, where the upper does not have all.
    /// Returns such files of which no name is found: not in the upper, not in the base, and not as a removed one.
    fn find_names_of_linked(
        &mut self,
        items: &mut BTreeMap<PathBuf, Item>,
        removed: &BTreeMap<PathBuf, Meta>,
    ) -> Result<Vec<Unplaced>> {
        let (mut wanted, mut unplaced) = (HashMap::new(), HashMap::new());
        let named: HashSet<u64> = self.scan.entries.values().map(|entry| entry.meta.ino).collect();
        for copy in self.scan.linked.values() {
            let names = || items.values().filter(|item| item.is_copy && item.upper.meta.ino == copy.meta.ino);
            let Some(base) = names().find_map(|item| item.base.as_ref()) else {
                wanted.insert(copy.origin.ino, copy.clone());
                let is_removed = |meta: &Meta| copy.origin.is(meta.ino, meta.generation());
                if !removed.values().any(is_removed)
                    && let Some(names) = self.lost_names(copy, named.contains(&copy.meta.ino))?
                {
                    unplaced.insert(copy.meta.ino, Unplaced { file: Path::new(LINKS).join(&copy.name), names });
                }
                continue;
            };
            let is_same = |meta: &Meta| (meta.device, meta.ino) == (base.meta.device, base.meta.ino);
            let known = names().filter(|item| item.base.as_ref().is_some_and(|base| is_same(&base.meta))).count()
                + removed.values().filter(|meta| is_same(meta)).count();
            let is_changed = names().any(|item| item.aspects != Aspects::default());
            if is_changed && usize::try_from(base.meta.links).is_ok_and(|links| links > known) {
                wanted.insert(copy.origin.ino, copy.clone());
            }
        }
        if wanted.is_empty() {
            return Ok(Vec::new());
        }
        let mut waiting = vec![(PathBuf::new(), PathBuf::new())];
        let mut found = Vec::new();
        while let Some((path, below)) = waiting.pop() {
            let item = items.get(&path);
            let Some(listed) = or_missing_list(self.base, &below)? else { continue };
            for listed in listed.into_iter().filter(|listed| !listed.name.as_bytes().starts_with(MARK)) {
                let (inner, inner_below) = (path.join(&listed.name), below.join(&listed.name));
                if let Some(shown) = items.get(&inner) {
                    if let Some(base) = shown.base.as_ref().filter(|base| base.meta.is_directory()) {
                        waiting.push((inner, base.path.clone()));
                    }
                } else if self.scan.whiteouts.contains_key(&inner) || item.is_some_and(|item| item.upper.opaque) {
                    continue;
                } else if listed.is_directory != Some(false)
                    && self.base.meta(&inner_below)?.is_some_and(|meta| meta.is_directory())
                {
                    waiting.push((inner, inner_below));
                } else if let Some(copy) = wanted.get(&listed.ino) {
                    let Some(meta) = self.base.meta(&inner_below)? else { continue };
                    if copy.origin.is(meta.ino, meta.generation()) && meta.kind() == copy.meta.kind() {
                        let upper = UpperEntry { meta: copy.meta, opaque: false, origin: Some(copy.origin) };
                        let item = Item {
                            upper,
                            in_links: Some(copy.name.clone()),
                            natural: Some(inner_below.clone()),
                            base: Some(BaseEntry { path: inner_below, meta }),
                            is_copy: true,
                            renamed: false,
                            lost: None,
                            over: None,
                            aspects: Aspects::default(),
                        };
                        found.push((inner, item));
                    }
                }
            }
        }
        for (path, mut item) in found {
            item.aspects = self.aspects(&path, &item)?;
            unplaced.remove(&item.upper.meta.ino);
            items.insert(path, item);
        }
        Ok(unplaced.into_values().collect())
    }

    /// The names that a file of the hard-link index had in the base, if none of them is found any more. `None` where its
    /// content has a name in the upper: there it is found, and what others did in the base is a conflict of that name.
    fn lost_names(&self, copy: &LinkedCopy, has_name: bool) -> Result<Option<Vec<PathBuf>>> {
        let lines = self.scan.hidden.iter().filter(|(_, line)| copy.origin.is(line.ino, generation(line.btime)));
        let mut names: Vec<PathBuf> = lines.map(|(path, _)| path.clone()).collect();
        names.sort();
        for name in &names {
            let (Some(now), Some(line)) = (self.base.meta(name)?, self.scan.hidden.get(name)) else { continue };
            let is_same_file =
                (now.size, now.mtime, now.ctime, now.btime) == (line.size, line.mtime, line.ctime, line.btime);
            if now.ino != line.ino && is_same_file {
                // Only the numbers are others, so no name can be found by them.
                return Ok(Some(Vec::new()));
            }
        }
        let is_found = has_name && !names.is_empty();
        Ok((!is_found).then_some(names))
    }

    /// The entries of the base that the view does not have.
    fn removed(&self, items: &BTreeMap<PathBuf, Item>) -> Result<BTreeMap<PathBuf, Meta>> {
        let moved: HashSet<&Path> = items
            .values()
            .filter(|item| item.renamed)
            .filter_map(|item| item.base.as_ref().map(|base| base.path.as_path()))
            .collect();
        let counterpart = |view: &Path| -> Option<PathBuf> {
            items.get(view)?.base.as_ref().filter(|base| base.meta.is_directory()).map(|base| base.path.clone())
        };
        let mut removed = BTreeMap::new();
        let mut add = |path: PathBuf| -> Result<()> {
            if !moved.contains(path.as_path())
                && let Some(meta) = self.base.meta(&path)?
            {
                removed.insert(path, meta);
            }
            Ok(())
        };
        for hidden in self.scan.whiteouts.keys().filter(|path| !items.contains_key(*path)) {
            let (Some(parent), Some(name)) = (hidden.parent(), hidden.file_name()) else { continue };
            if let Some(directory) = counterpart(parent) {
                add(directory.join(name))?;
            }
        }
        for view in items.iter().filter(|(_, item)| item.upper.opaque).map(|(view, _)| view) {
            let Some(directory) = counterpart(view) else { continue };
            let Some(listed) = or_missing_list(self.base, &directory)? else { continue };
            for listed in listed.into_iter().filter(|listed| !listed.name.as_bytes().starts_with(MARK)) {
                if !items.contains_key(&view.join(&listed.name))
                    && !self.scan.whiteouts.contains_key(&view.join(&listed.name))
                {
                    add(directory.join(&listed.name))?;
                }
            }
        }
        Ok(removed)
    }

    fn find_aspects(&mut self, items: &mut BTreeMap<PathBuf, Item>) -> Result<()> {
        for (path, item) in items.iter_mut() {
            item.aspects = self.aspects(path, item)?;
            if path.as_os_str().is_empty() {
                item.aspects = self.aspects_of_top(item);
            }
        }
        Ok(())
    }

    /// The aspects of the top directory that the workspace has changed: the first line of the log has the attributes that
    /// it had at the beginning. An ordinary user's upper directory is his own in any case.
    fn aspects_of_top(&self, item: &Item) -> Aspects {
        let (Some(line), Some(base)) = (self.scan.hidden.get(Path::new("")), &item.base) else {
            return Aspects::default();
        };
        let is_root = rustix::process::geteuid().is_root();
        Aspects {
            mode: item.aspects.mode,
            owner: item.aspects.owner && is_root,
            xattrs: item.aspects.xattrs && is_root && line.ctime == base.meta.ctime,
            ..Aspects::default()
        }
    }

    fn aspects(&mut self, path: &Path, item: &Item) -> Result<Aspects> {
        let mut aspects = Aspects::default();
        let Some(there) = item.reference() else { return Ok(aspects) };
        let (old, new) = (&there.meta, &item.upper.meta);
        if old.kind() != new.kind() {
            aspects.kind = true;
            return Ok(aspects);
        }
        aspects.mode = new.kind() != FileType::Symlink && old.permissions() != new.permissions();
        aspects.owner = (old.uid, old.gid) != (new.uid, new.gid);
        let (upper_tree, upper_path) = item.place(self.upper, path);
        let Some(below) = self.base.find(&there.path)? else { return Ok(aspects) };
        let shown = self.base.path_of(&there.path);
        let stored = or_missing(below.tree.xattrs(&there.path)).during("read the attributes of", &shown)?;
        let ours = upper_tree.xattrs(&upper_path).during("read the attributes of", &upper_tree.path_of(&upper_path))?;
        aspects.xattrs = shown_attributes(&stored.unwrap_or_default()) != shown_attributes(&ours);
        if new.is_directory() {
            // Where others have changed the base's directory since, and the workspace has not, nothing is ours.
            if let Some(line) = self.scan.hidden.get(&there.path).filter(|_| item.is_copy) {
                aspects.mode &= line.mode != new.permissions();
                aspects.owner &= (line.uid, line.gid) != (new.uid, new.gid);
            }
            return Ok(aspects);
        }
        aspects.times = old.mtime != new.mtime;
        match new.kind() {
            FileType::RegularFile => aspects.content = !self.is_same_content(item, path, there)?,
            FileType::Symlink => {
                let ours =
                    upper_tree.link_target(&upper_path).during("read the link", &upper_tree.path_of(&upper_path))?;
                let theirs = below.tree.link_target(&there.path).during("read the link", &shown)?;
                aspects.target = ours != theirs;
            }
            FileType::CharacterDevice | FileType::BlockDevice => aspects.device = old.special != new.special,
            _ => {}
        }
        Ok(aspects)
    }

    fn is_same_content(&mut self, item: &Item, path: &Path, there: &BaseEntry) -> Result<bool> {
        let (old, new) = (&there.meta, &item.upper.meta);
        if old.size != new.size {
            return Ok(false);
        }
        let pair = (new.ino, old.device, old.ino);
        if let Some(known) = self.same_content.get(&pair) {
            return Ok(*known);
        }
        let (upper_tree, upper_path) = item.place(self.upper, path);
        let ours = upper_tree.file(&upper_path).during("open", &upper_tree.path_of(&upper_path))?;
        let shown = self.base.path_of(&there.path);
        let Some(below) = self.base.find(&there.path)? else { return Ok(false) };
        let theirs = below.tree.file(&there.path).during("open", &shown)?;
        let same = content::is_same(ours.as_fd(), theirs.as_fd(), new.size).during("read", &shown)?;
        self.same_content.insert(pair, same);
        Ok(same)
    }
}

impl Item {
    /// The tree and the path at which the entry lies.
    pub(crate) fn place<'a>(&self, upper: &'a Upper, path: &Path) -> (&'a Tree, PathBuf) {
        match &self.in_links {
            Some(name) => (&upper.state, Path::new(LINKS).join(name)),
            None => (&upper.tree, path.to_path_buf()),
        }
    }
}

fn or_missing_list(base: &Base, path: &Path) -> Result<Option<Vec<crate::beneath::Listed>>> {
    if base.meta(path)?.is_some_and(|meta| meta.is_directory()) { base.list(path).map(Some) } else { Ok(None) }
}

/// Marks names whose file is the same one as another name's in the view, but not in the base, or the other way round.
fn find_broken_links(items: &mut BTreeMap<PathBuf, Item>) {
    let mut groups: HashMap<u64, Vec<PathBuf>> = HashMap::new();
    for (path, item) in items.iter().filter(|(_, item)| !item.upper.meta.is_directory()) {
        groups.entry(item.upper.meta.ino).or_default().push(path.clone());
    }
    for paths in groups.values() {
        let members = || paths.iter().filter_map(|path| items.get(path));
        let counterpart = |item: &Item| item.base.as_ref().map(|base| (base.meta.device, base.meta.ino));
        let main = members()
            .find(|item| item.is_copy && item.base.is_some())
            .or_else(|| members().find(|item| item.base.is_some()));
        let main_file = main.and_then(counterpart);
        let is_other_file =
            main.is_some_and(|item| !item.is_copy && item.base.as_ref().is_some_and(|base| base.meta.links > 1));
        let broken: Vec<PathBuf> = paths
            .iter()
            .filter(|path| {
                items
                    .get(*path)
                    .is_some_and(|item| item.base.is_some() && (is_other_file || counterpart(item) != main_file))
            })
            .cloned()
            .collect();
        for path in broken {
            if let Some(item) = items.get_mut(&path) {
                item.aspects.links = true;
            }
        }
    }
}

/// The name of a path for users: bytes, divided by `/`; `.` for the top.
pub(crate) fn bytes(path: &Path) -> Vec<u8> {
    if path.as_os_str().is_empty() { TOP.to_vec() } else { path.as_os_str().as_bytes().to_vec() }
}

/// A path from its bytes.
pub(crate) fn path_of(bytes: &[u8]) -> PathBuf {
    if bytes == TOP { PathBuf::new() } else { PathBuf::from(OsStr::from_bytes(bytes)) }
}

/// The top directory for users.
const TOP: &[u8] = b".";
