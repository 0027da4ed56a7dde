//! Consistency check of a whole pool: `nacre pool check`.
//!
//! Every tree that the catalog references is walked, live datasets and snapshots; the frames
//! reached are compared with those that the store counts as alive, and within each live dataset
//! names, inodes and link counts are compared with each other. Contents are not read: a scrub does
//! that.
//!
//! Invariants: nothing is changed; commits wait meanwhile. Memory: about 50 bytes for each frame of
//! the pool, and for each inode of the largest dataset.

use std::collections::{HashMap, HashSet};

use super::{Admin, Pool};
use crate::deadlist::Births;
use crate::error::PoolError;
use crate::pointer::{Pointer, Txg};
use crate::rows::keys::{self, Key};
use crate::rows::{DatasetHead, Entry, FileType, InodeRow, NameTarget, pointer_of};
use crate::store::Store;
use crate::tree::{Context, walk::Visitor, walk::walk};

/// Number of problems that are reported one by one.
const TOLD_MOST: u64 = 1000;

/// Counts of a check.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckCounts {
    /// File systems.
    pub datasets: u64,
    /// Snapshots.
    pub snapshots: u64,
    /// Inodes of file systems.
    pub inodes: u64,
    /// Frames that are referenced.
    pub frames: u64,
    /// Space that these frames are charged, bytes.
    pub bytes: u64,
    /// Problems found.
    pub problems: u64,
}

/// Frames by segment and number, with the bytes that they are charged.
type Frames = HashMap<(u32, u32), u64>;

struct Findings<'a> {
    seen: CheckCounts,
    /// Number of tree nodes that cannot be read.
    unread: u64,
    tell: &'a mut dyn FnMut(&str),
}

impl Findings<'_> {
    fn problem(&mut self, text: &str) {
        self.seen.problems += 1;
        match self.seen.problems {
            ..=TOLD_MOST => (self.tell)(text),
            problems if problems == TOLD_MOST + 1 => (self.tell)("more is wrong than is told here"),
            _ => {}
        }
    }
}

/// Visitor that collects the frames of a tree; subtrees that another tree has in common are not
/// walked again.
struct Reach<'a, 'b> {
    name: &'a str,
    all: &'a mut Frames,
    findings: &'a mut Findings<'b>,
    /// Names and inodes of a live dataset; `None` for a snapshot.
    structure: Option<&'a mut Structure>,
}

/// A directory and its names.
#[derive(Default)]
struct Directory {
    /// Number of names according to the inode.
    counted: u64,
    /// Number of names found.
    found: u64,
    /// Sum of the rows that index its names by hash, and of the rows that should: equal if each
    /// name is indexed under its own hash.
    indexed: u64,
    wanted: u64,
}

/// Names and inodes of one live dataset.
#[derive(Default)]
struct Structure {
    head: Option<DatasetHead>,
    /// Per inode: its link count, the number of names found, and its type.
    inodes: HashMap<u64, (u32, u32, Option<FileType>)>,
    directories: HashMap<u64, Directory>,
    /// Parent of each directory except the root, according to its hint.
    above: HashMap<u64, u64>,
    orphans: HashSet<u64>,
    entries: u64,
    names: u64,
}

impl Reach<'_, '_> {
    fn note(&mut self, pointer: &Pointer) -> bool {
        self.all.insert((pointer.segment, pointer.index), pointer.charged()).is_none()
    }
}

impl Visitor for Reach<'_, '_> {
    fn frame(&mut self, pointer: &Pointer) -> Result<bool, PoolError> {
        let new = self.note(pointer);
        Ok(new || self.structure.is_some())
    }

    fn row(&mut self, key: &[u8], value: &[u8]) -> Result<(), PoolError> {
        if let Err(error) = self.read_row(key, value) {
            self.findings.problem(&format!("{}: a row that cannot be read: {error}", self.name));
        }
        Ok(())
    }

    fn damaged(&mut self, pointer: &Pointer, error: PoolError) -> Result<(), PoolError> {
        let what = "a node of its tree cannot be read, nor what only that leads to";
        let node = format!("frame {}:{}", pointer.segment, pointer.index);
        self.findings.problem(&format!("{}: {what}: {node}: {error}", self.name));
        self.findings.unread += 1;
        self.note(pointer);
        Ok(())
    }
}

impl Reach<'_, '_> {
    fn read_row(&mut self, key: &[u8], value: &[u8]) -> Result<(), PoolError> {
        if let Some(pointer) = pointer_of(key, value)? {
            self.note(&pointer);
        }
        match &mut self.structure {
            Some(structure) => structure.read_row(key, value),
            None => Ok(()),
        }
    }
}

/// Hash of a row.
fn sum(key: &[u8], value: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64_with_seed(value, xxhash_rust::xxh3::xxh3_64(key))
}

impl Structure {
    fn read_row(&mut self, key: &[u8], value: &[u8]) -> Result<(), PoolError> {
        match Key::decode(key)? {
            Key::Head => self.head = Some(DatasetHead::decode(value)?),
            Key::Inode(number) => {
                let inode = InodeRow::decode(value)?;
                let (links, _, kind) = self.inodes.entry(number).or_default();
                (*links, *kind) = (inode.links, inode.file_type());
                if inode.file_type() == Some(FileType::Directory) {
                    self.directories.entry(number).or_default().counted = inode.size;
                    self.above.extend(inode.hint.map(|hint| (number, hint.directory)));
                }
            }
            Key::Entry { directory, sequence } => {
                let entry = Entry::decode(value)?;
                self.entries += 1;
                self.inodes.entry(entry.inode).or_default().1 += 1;
                let found = self.directories.entry(directory).or_default();
                found.found += 1;
                // The header is the first row.
                if let Some(head) = &self.head {
                    let target = NameTarget { inode: entry.inode, file_type: entry.file_type };
                    let row = sum(&keys::name(directory, head.hash(entry.name), sequence), &target.encode());
                    found.wanted = found.wanted.wrapping_add(row);
                }
            }
            Key::Name { directory, .. } => {
                self.names += 1;
                let found = self.directories.entry(directory).or_default();
                found.indexed = found.indexed.wrapping_add(sum(key, value));
            }
            Key::Orphan(number) => drop(self.orphans.insert(number)),
            Key::Cut(_) => {}
            _ => {}
        }
        Ok(())
    }

    /// Finds cycles of directories, each cycle once.
    fn circles(&self) -> Vec<Vec<u64>> {
        let (mut judged, mut circles) = (HashSet::new(), Vec::new());
        let mut numbers: Vec<u64> = self.above.keys().copied().collect();
        numbers.sort_unstable();
        for number in numbers {
            let (mut way, mut at) = (Vec::new(), number);
            while judged.insert(at) {
                way.push(at);
                match self.above.get(&at) {
                    Some(above) => at = *above,
                    None => break,
                }
            }
            // A directory on this path closes a cycle; one on an earlier path was checked there.
            if self.above.contains_key(&at)
                && let Some(from) = way.iter().position(|passed| *passed == at)
                && way.last().is_some_and(|last| self.above.get(last) == Some(&at))
            {
                circles.push(way.split_off(from));
            }
        }
        circles
    }

    /// Reports inconsistencies between names, inodes and directories.
    fn judge(&self, name: &str, findings: &mut Findings<'_>) {
        let root = self.head.map_or(0, |head| head.root);
        for (number, (links, found, kind)) in &self.inodes {
            let Some(kind) = kind else {
                findings.problem(&format!("{name}: inode {number} has {found} names and does not exist"));
                continue;
            };
            let wanted = match kind {
                FileType::Directory if *number == root || self.orphans.contains(number) => 0,
                FileType::Directory => 1,
                _ => *links,
            };
            if *found != wanted {
                findings.problem(&format!("{name}: inode {number} counts {wanted} names and has {found}"));
            }
            if *found == 0 && *number != root && !self.orphans.contains(number) {
                findings.problem(&format!("{name}: inode {number} has no name and is not about to be freed"));
            }
        }
        for (number, Directory { counted, found, indexed, wanted }) in &self.directories {
            if counted != found {
                findings.problem(&format!("{name}: directory {number} counts {counted} names and has {found}"));
            }
            if self.head.is_some() && indexed != wanted {
                findings.problem(&format!(
                    "{name}: directory {number} has names that are not found, or lead elsewhere than listings say"
                ));
            }
        }
        for circle in self.circles() {
            let numbers: Vec<String> = circle.iter().map(u64::to_string).collect();
            let numbers = numbers.join(", ");
            findings.problem(&format!("{name}: directories lie in each other, and no path leads to them: {numbers}"));
        }
        if self.entries != self.names {
            findings
                .problem(&format!("{name}: {} entries in the order of listings, {} by name", self.entries, self.names));
        }
    }
}

impl Pool {
    /// Checks everything; each problem is reported to `tell` as a sentence.
    ///
    /// # Errors
    /// A catalog that cannot be read at all; errors of a commit.
    pub fn check(&self, store: &Store, read_only: bool, tell: &mut dyn FnMut(&str)) -> Result<CheckCounts, PoolError> {
        let mut admin = self.admin.lock();
        if !read_only {
            self.commit_under(&mut admin, |_, _| Ok(()))?;
        }
        let mut findings = Findings { seen: CheckCounts::default(), unread: 0, tell };
        let mut all = Frames::default();
        let context = Context { frames: &*self.frames, cache: &self.cache };
        if let Some(root) = store.root().catalog {
            let mut reach = Reach { name: "the catalog", all: &mut all, findings: &mut findings, structure: None };
            walk(&context, &root, Txg(0), &mut CatalogRows(&mut reach))?;
        }
        let datasets = admin.catalog.datasets()?;
        for (id, row) in &datasets {
            let name = full_name(&admin, *id)?;
            findings.seen.datasets += 1;
            let mut structure = Structure::default();
            if let Some(root) = &row.root {
                let mut reach =
                    Reach { name: &name, all: &mut all, findings: &mut findings, structure: Some(&mut structure) };
                walk(&context, root, Txg(0), &mut reach)?;
            }
            findings.seen.inodes += structure.inodes.len() as u64;
            // Rows that complete a partially received dataset are still to come.
            if !admin.is_half(*id)? {
                structure.judge(&name, &mut findings);
            }
            for (txg, snapshot) in admin.catalog.snapshots(*id)? {
                findings.seen.snapshots += 1;
                let name = format!("{name}@{}", snapshot.name);
                if let Some(root) = &snapshot.root {
                    let mut reach = Reach { name: &name, all: &mut all, findings: &mut findings, structure: None };
                    walk(&context, root, Txg(0), &mut reach)?;
                }
                if txg > store.durable() {
                    findings.problem(&format!("{name}: taken in a transaction group that is not durable"));
                }
            }
            let (history, own) = admin.catalog.history_of(*id)?;
            let counted = admin.catalog.deadlists().usage(&history, own)?;
            if counted != row.usage {
                findings.problem(&format!("{name}: uses {:?} by its row, {counted:?} by its snapshots", row.usage));
            }
        }
        compare(self, &mut admin, store, &mut all, &mut findings)?;
        findings.seen.frames = all.len() as u64;
        findings.seen.bytes = all.values().sum();
        Ok(findings.seen)
    }
}

/// Returns the full name of a dataset.
fn full_name(admin: &Admin, id: u64) -> Result<String, PoolError> {
    let (mut parts, mut at) = (Vec::new(), id);
    while at != 0 {
        let row = admin.catalog.dataset(at)?;
        if parts.len() > crate::names::NAME_MOST {
            return Err(PoolError::Format(crate::error::Damage::Structure("a dataset that lies below itself")));
        }
        at = row.parent;
        parts.push(row.name);
    }
    parts.reverse();
    Ok(parts.join("/"))
}

/// Visitor of the catalog's own frames; the catalog itself reads its rows.
struct CatalogRows<'a, 'b, 'c>(&'a mut Reach<'b, 'c>);

impl Visitor for CatalogRows<'_, '_, '_> {
    fn frame(&mut self, pointer: &Pointer) -> Result<bool, PoolError> {
        self.0.frame(pointer)
    }

    fn row(&mut self, _: &[u8], _: &[u8]) -> Result<(), PoolError> {
        Ok(())
    }

    fn damaged(&mut self, pointer: &Pointer, error: PoolError) -> Result<(), PoolError> {
        self.0.damaged(pointer, error)
    }
}

/// Compares the frames that trees reference with those that the store counts as alive.
fn compare(
    pool: &Pool,
    admin: &mut Admin,
    store: &Store,
    reached: &mut Frames,
    findings: &mut Findings<'_>,
) -> Result<(), PoolError> {
    let freeing = admin.catalog.head()?.freeing;
    let mut going = Frames::default();
    let all = Births { after: Txg(0), through: Txg(u64::MAX) };
    admin.catalog.deadlists().visit(freeing, all, &mut |dead| {
        going.insert((dead.segment, dead.index), dead.charged);
        Ok(())
    })?;
    for row in admin.catalog.doomed()? {
        pool.reap(&row, &mut u64::MAX.clone(), &mut |dead| {
            going.insert((dead.segment, dead.index), dead.charged);
        })?;
    }
    let alive = store.living_frames();
    for name in reached.keys().filter(|name| !alive.contains(*name)) {
        findings.problem(&format!("frame {}:{} is named by a tree, and free", name.0, name.1));
    }
    let lost: HashSet<(u32, u32)> =
        alive.into_iter().filter(|name| !reached.contains_key(name) && !going.contains_key(name)).collect();
    // Frames that are being written belong to a txg that is not durable yet.
    let (births, durable) = (store.births(&lost)?, store.durable());
    let lost: Vec<_> = lost.iter().filter(|name| births.get(*name).is_none_or(|birth| *birth <= durable)).collect();
    if findings.unread > 0 && !lost.is_empty() {
        let (count, nodes) = (lost.len(), findings.unread);
        findings.problem(&format!(
            "{count} frames take room, and nothing that can be read names them: they may be below the nodes that cannot be read ({nodes})"
        ));
        return Ok(());
    }
    for name in lost {
        findings.problem(&format!("frame {}:{} takes room, and nothing names it", name.0, name.1));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rows::{NameHint, Timestamp};

    fn problems(above: &[(u64, u64)]) -> Vec<String> {
        let mut structure = Structure::default();
        for (number, directory) in above {
            let mut row = InodeRow::new(FileType::Directory, 0o755, Timestamp::default());
            row.hint = Some(NameHint { directory: *directory, sequence: 1 });
            structure.read_row(&keys::inode(*number), &row.encode()).unwrap();
        }
        let mut circles = Vec::new();
        let mut tell = |text: &str| circles.extend(text.contains("lie in each other").then(|| text.to_owned()));
        structure.judge("tank", &mut Findings { seen: CheckCounts::default(), unread: 0, tell: &mut tell });
        circles
    }

    #[test]
    fn directories_that_lie_in_each_other_are_reported_once() {
        assert_eq!(problems(&[(2, 1), (3, 2), (4, 2), (5, 4)]), Vec::<String>::new());
        let circle = "tank: directories lie in each other, and no path leads to them: ";
        assert_eq!(problems(&[(2, 2)]), [format!("{circle}2")]);
        // Directories below a cycle are no part of it, from whichever side the walk reaches it.
        assert_eq!(problems(&[(2, 1), (3, 5), (4, 3), (5, 4), (6, 4)]), [format!("{circle}3, 5, 4")]);
        assert_eq!(problems(&[(2, 9), (8, 9), (9, 8), (4, 4)]), [format!("{circle}9, 8"), format!("{circle}4")]);
    }
}
