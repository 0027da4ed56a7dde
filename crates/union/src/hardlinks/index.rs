//! The hard-link index: files with several names on a read-only branch, of which not all have been
//! copied up.
//!
//! When the first name is copied up, the copy also gets a name in the hard-link index of its branch, made of
//! the file's inode number; look-ups of the other names below then show the copy. `st_nlink` is the copy's own
//! link count, without the index, plus the number of names below that are still visible, which an extended
//! attribute of the copy stores. If names are removed before any is copied up, an empty file `NUMBER.n` has the
//! count of the visible ones. Called with the `names` lock of the directory whose entry changes. Invariants:
//! * an entry exists before the first name above is made, and is removed when no name below remains;
//! * the count may be too high after a crash, never too low: a needed entry is never removed.

use crate::{
    OWN,
    branches::{Branch, index_directory},
    hardlinks::journal::{self, Journal},
    identity::{Identities, Written},
    marks::Namespace,
    node::{Part, UnionNode},
};
use hashbrown::HashMap;
use nacre_vfs::{DirEntry, DirSink, Errno, FileId, Kind, Name, Node, OpenFlags, RenameFlags, Result, XattrFlags};
use parking_lot::{Mutex, RwLock};
use std::sync::Arc;

/// Suffix of an entry that only stores a count.
const COUNTER: &str = ".n";

/// The index's record of one file.
#[derive(Clone)]
struct IndexRecord {
    /// Name of the index entry that has the count.
    entry: Vec<u8>,
    /// The branch whose index has the count.
    branch: Arc<Branch>,
    copy: Option<Part>,
    /// Name of the copy in the index of its branch.
    copy_entry: Vec<u8>,
    /// Number of names below that are still visible and lead to the file; with `counts_all`, of all visible
    /// names.
    below: u32,
    counts_all: bool,
}

impl IndexRecord {
    /// Number of visible names if the shown branch has link count `count`.
    fn shown(&self, count: u32) -> u32 {
        if self.counts_all { self.below } else { count.saturating_sub(1).saturating_add(self.below) }
    }

    /// Number of visible names; reads the copy's link count.
    fn visible(&self) -> Result<u32> {
        match &self.copy {
            Some(copy) if !self.counts_all => Ok(self.shown(copy.branch.layer.getattr(&OWN, &copy.node, None)?.nlink)),
            _ => Ok(self.below),
        }
    }
}

/// The hard-link indexes of all branches, in memory.
pub(crate) struct HardlinkIndex {
    pub(crate) identities: Arc<Identities>,
    records: RwLock<HashMap<FileId, IndexRecord>>,
    /// Branches that can store counts, from the top down.
    writable: Mutex<Vec<Arc<Branch>>>,
    /// Held while an entry is changed on its branch.
    changing: Mutex<()>,
    /// Files that are being moved to another branch.
    pub(crate) journal: Journal,
}

fn attribute(branch: &Branch) -> &'static [u8] {
    match branch.marks().namespace {
        Namespace::Trusted => b"trusted.nacre.names",
        Namespace::User => b"user.nacre.names",
    }
}

/// The kind of an entry.
#[derive(Clone, Copy, PartialEq, Eq)]
enum What {
    Copy,
    Counter,
    Moved,
    List,
}

/// Parses the name of an entry; `None` if it is no entry.
fn parse(name: &[u8]) -> Option<(Written, What)> {
    let text = std::str::from_utf8(name).ok()?;
    let endings = [(COUNTER, What::Counter), (journal::COPY, What::Moved), (journal::LIST, What::List)];
    let ending = endings.iter().find_map(|(ending, what)| Some((text.strip_suffix(ending)?, *what)));
    let (number, what) = ending.unwrap_or((text, What::Copy));
    let mut parts = number.split('-').map(|text| u64::from_str_radix(text, 16).ok().filter(|_| text.len() == 16));
    let mut next = || parts.next().flatten();
    let written = (next()?, next()?, next()?);
    if parts.next().is_some() { None } else { Some((written, what)) }
}

#[derive(Default)]
struct IndexPage {
    names: Vec<Vec<u8>>,
    next: u64,
}

impl DirSink for IndexPage {
    fn push(&mut self, entry: DirEntry<'_>) -> bool {
        if self.names.len() == 1024 {
            return false;
        }
        self.names.push(entry.name.bytes().to_vec());
        self.next = entry.next;
        true
    }
}

impl HardlinkIndex {
    /// Creates an empty index.
    pub(crate) fn new(identities: Arc<Identities>) -> HardlinkIndex {
        HardlinkIndex {
            identities,
            records: RwLock::default(),
            writable: Mutex::default(),
            changing: Mutex::default(),
            journal: Journal::default(),
        }
    }

    /// The name of an entry: the number in its stored form, so that it means the same file wherever its branch
    /// is in the order.
    fn entry_name(&self, id: FileId, counts_only: bool) -> Vec<u8> {
        let mut name = index_entry(&self.identities, id);
        name.extend_from_slice(if counts_only { COUNTER } else { "" }.as_bytes());
        name
    }

    /// Replaces the contents by the indexes of these branches.
    ///
    /// # Errors
    /// Errors of the storage.
    pub(crate) fn reload(&self, branches: &[Arc<Branch>]) -> Result<()> {
        let fresh = HardlinkIndex::new(Arc::clone(&self.identities));
        for branch in branches {
            fresh.load(branch)?;
        }
        *self.records.write() = fresh.records.into_inner();
        *self.writable.lock() = fresh.writable.into_inner();
        self.journal.replace(fresh.journal);
        Ok(())
    }

    /// Reads the index of a branch; has to be called from the top down.
    ///
    /// # Errors
    /// Errors of the storage.
    pub(crate) fn load(&self, branch: &Arc<Branch>) -> Result<()> {
        if branch.is_writable() {
            self.writable.lock().push(Arc::clone(branch));
        }
        let Some(directory) = branch.hardlink_index() else { return Ok(()) };
        let (mut page, mut lists, mut copies) = (IndexPage::default(), Vec::new(), Vec::new());
        loop {
            page.names.clear();
            branch.layer.readdir(&OWN, &directory, page.next, false, &mut page)?;
            if page.names.is_empty() {
                break;
            }
            for name in &page.names {
                let Some((written, what)) = parse(name) else { continue };
                match what {
                    What::Moved => copies.push(written),
                    What::List => lists.push((written, name.clone())),
                    What::Copy | What::Counter => {}
                }
                // Entries of branches that are not in this union are ignored, and stay.
                let Some(id) = self.identities.read(written) else { continue };
                match what {
                    What::Copy => self.load_one(branch, &directory, Name::new(name)?, id, false)?,
                    What::Counter => self.load_one(branch, &directory, Name::new(name)?, id, true)?,
                    What::Moved => self.load_moved(branch, id, Name::new(name)?)?,
                    What::List => {}
                }
            }
        }
        // The list of a move that had not begun, or had just ended.
        for (_, name) in lists.iter().filter(|(written, _)| branch.is_writable() && !copies.contains(written)) {
            remove(branch, name)?;
        }
        Ok(())
    }

    fn load_one(
        &self,
        branch: &Arc<Branch>,
        directory: &Node,
        name: Name<'_>,
        id: FileId,
        counts_only: bool,
    ) -> Result<()> {
        let found = match branch.layer.lookup(&OWN, directory, name) {
            Err(Errno::ENOENT) => return Ok(()),
            other => other?,
        };
        let mut value = [0; 4];
        let below = match branch.layer.getxattr(&OWN, &found.node, attribute(branch), &mut value) {
            Ok(4) => u32::from_le_bytes(value),
            // Unknown count: assume the maximum, so that nothing is lost.
            _ => u32::MAX / 2,
        };
        let copy = (!counts_only).then(|| Part::new(branch, found.node, found.attr.id));
        let mut records = self.records.write();
        match records.get_mut(&id) {
            // A branch above has the count, and this one has the copy.
            Some(known) if known.branch.index() < branch.index() || !counts_only => {
                if known.copy.is_none() {
                    (known.copy, known.copy_entry) = (copy, name.bytes().to_vec());
                }
            }
            _ => {
                let entry = name.bytes().to_vec();
                records.insert(
                    id,
                    IndexRecord {
                        copy_entry: entry.clone(),
                        entry,
                        branch: Arc::clone(branch),
                        copy,
                        below,
                        counts_all: counts_only,
                    },
                );
            }
        }
        Ok(())
    }

    /// The copy that replaces a file found on branch `below` or lower.
    ///
    /// # Errors
    /// Errors of the storage.
    pub(crate) fn copy(&self, id: FileId, below: usize) -> Result<Option<Part>> {
        let known =
            self.records.read().get(&id).and_then(|record| Some((record.copy.clone()?, record.copy_entry.clone())));
        let Some((copy, entry)) = known.filter(|(copy, _)| copy.branch.index() < below) else { return Ok(None) };
        // Looked up anew by its name in the index, which lasts: the names that the kept one has
        // learned may be gone, and layers believe what they are told of a file that has just been
        // found.
        match copy.branch.layer.lookup(&OWN, &index_directory(&copy.branch)?, Name::new(&entry)?) {
            Ok(found) if found.attr.id == copy.id => Ok(Some(Part::new(&copy.branch, found.node, copy.id))),
            Ok(_) | Err(Errno::ENOENT) => Ok(Some(copy)),
            Err(error) => Err(error),
        }
    }

    /// Number of visible names if the shown branch has link count `count`.
    pub(crate) fn shown(&self, node: &UnionNode, count: u32) -> u32 {
        let count = self.journal.shown(node.id, count);
        let shown = self.records.read().get(&node.id).map(|record| record.shown(count));
        match shown {
            Some(shown) => shown,
            None if node.is_gone() && node.top().is_ok_and(|top| !top.branch.is_writable()) => 0,
            None => count,
        }
    }

    /// Gives a finished copy its name in the index: from then on all names below show it.
    ///
    /// # Errors
    /// Errors of the storage.
    pub(crate) fn enter(&self, id: FileId, branch: &Arc<Branch>, temporary: Name<'_>, count: u32) -> Result<Part> {
        let _one_at_a_time = self.changing.lock();
        let (layer, work) = (&branch.layer, branch.work_directory()?);
        let known = self.records.read().get(&id).cloned();
        let below = known.as_ref().map_or(Ok(count), IndexRecord::visible)?;
        let built = layer.lookup(&OWN, &work, temporary)?;
        write_count(branch, &built.node, below)?;
        let bytes = self.entry_name(id, false);
        let entry = Name::new(&bytes)?;
        layer.rename(&OWN, &work, temporary, &index_directory(branch)?, entry, RenameFlags(0))?;
        let fresh = layer.lookup(&OWN, &index_directory(branch)?, entry)?;
        layer.adopt(&built.node, &fresh.node);
        let part = Part::new(branch, built.node, built.attr.id);
        let record = IndexRecord {
            copy_entry: bytes.clone(),
            entry: bytes,
            branch: Arc::clone(branch),
            copy: Some(part.clone()),
            below,
            counts_all: false,
        };
        self.records.write().insert(id, record);
        if let Some(counter) = known.filter(|known| known.counts_all && known.branch.is_writable()) {
            remove(&counter.branch, &counter.entry)?;
        }
        Ok(part)
    }

    /// Decrements the count of names below: one has been hidden, or has been copied up. `count` is the link
    /// count of the branch below, `branch` a branch that can store a counter. Returns the remaining number. At
    /// 0 the file is removed from the index, which may have the only name that leads to it: `last` is called
    /// before and makes the replacement of the name durable, because otherwise after a crash the name could
    /// show the file of the lower branch.
    ///
    /// # Errors
    /// Errors of the storage.
    pub(crate) fn one_less(
        &self,
        id: FileId,
        count: u32,
        branch: &Arc<Branch>,
        last: impl FnOnce() -> Result<()>,
    ) -> Result<u32> {
        let _one_at_a_time = self.changing.lock();
        let known = self.records.read().get(&id).cloned();
        let (visible, (copy, copy_entry), branch) = match known {
            Some(record) if record.branch.is_writable() => return self.count_down(id, record, last),
            // A counter on a higher branch is read before the copy's count.
            Some(record) => {
                let above =
                    self.writable.lock().iter().rev().find(|above| above.index() < record.branch.index()).cloned();
                let Some(above) = above else { return self.count_in_memory(id, &record) };
                (record.visible()?, (record.copy, record.copy_entry), above)
            }
            None => (count, (None, Vec::new()), Arc::clone(branch)),
        };
        let branch = &branch;
        let below = visible.saturating_sub(1);
        if below > 0 {
            let entry = self.entry_name(id, true);
            make_counter(branch, &entry, below)?;
            self.records.write().insert(
                id,
                IndexRecord { entry, branch: Arc::clone(branch), copy, copy_entry, below, counts_all: true },
            );
        }
        Ok(below)
    }

    /// Keeps the count in memory where no branch can store it: it is too high again after the next mount.
    fn count_in_memory(&self, id: FileId, record: &IndexRecord) -> Result<u32> {
        let below = record.visible()?.saturating_sub(1);
        if let Some(known) = self.records.write().get_mut(&id) {
            (known.below, known.counts_all) = (below, true);
        }
        Ok(below)
    }

    fn count_down(&self, id: FileId, record: IndexRecord, last: impl FnOnce() -> Result<()>) -> Result<u32> {
        let below = record.below.saturating_sub(1);
        if below == 0 {
            if record.copy.is_some() {
                last()?;
            }
            remove(&record.branch, &record.entry)?;
            self.records.write().remove(&id);
            return Ok(0);
        }
        match &record.copy {
            Some(copy) if !record.counts_all => write_count(&record.branch, &copy.node, below)?,
            _ => make_counter(&record.branch, &record.entry, below)?,
        }
        if let Some(known) = self.records.write().get_mut(&id) {
            known.below = below;
        }
        Ok(below)
    }

    /// All counts on writable branches: file, position of the branch, number of names below.
    pub(crate) fn counts(&self, is_written: impl Fn(&Branch) -> bool) -> Vec<(FileId, usize, u32)> {
        let records = self.records.read();
        let kept = records.iter().filter(|(_, record)| is_written(&record.branch) && !record.counts_all);
        kept.map(|(id, record)| (*id, record.branch.index(), record.below)).collect()
    }

    /// Lowers a count that is too high, unless it has changed since; returns whether it did. `last` as in
    /// [`Self::one_less`].
    ///
    /// # Errors
    /// Errors of the storage.
    pub(crate) fn correct(
        &self,
        id: FileId,
        counted: u32,
        found: u32,
        last: impl FnOnce() -> Result<()>,
    ) -> Result<bool> {
        let _one_at_a_time = self.changing.lock();
        let known = self.records.read().get(&id).cloned();
        match known {
            Some(record) if record.below == counted && !record.counts_all => {
                // `count_down` decrements by one.
                self.count_down(id, IndexRecord { below: found.saturating_add(1), ..record }, last).map(|_| true)
            }
            _ => Ok(false),
        }
    }

    /// Records another copy of a file; the copy's entry in the index of its branch exists already.
    pub(crate) fn is_now_on(&self, id: FileId, copy: &Part) {
        if let Some(record) = self.records.write().get_mut(&id) {
            record.entry = index_entry(&self.identities, id);
            (record.branch, record.copy, record.copy_entry) =
                (Arc::clone(&copy.branch), Some(copy.clone()), record.entry.clone());
        }
    }

    /// The recorded names below of a file whose copy is on a branch, and whether no other branch has a record
    /// of it; `None` without a record.
    pub(crate) fn copy_on(&self, id: FileId, branch: &Branch) -> Option<(u32, bool)> {
        let records = self.records.read();
        let record = records.get(&id)?;
        let is_there = record.copy.as_ref().is_some_and(|copy| copy.branch.slot == branch.slot);
        Some((record.below, is_there && record.branch.slot == branch.slot && !record.counts_all))
    }

    /// All files with a record on a branch, and whether the record is only a count.
    pub(crate) fn records_on(&self, branch: &Branch) -> Vec<(FileId, bool)> {
        let records = self.records.read();
        let there = records.iter().filter(|(_, record)| {
            record.branch.slot == branch.slot
                || record.copy.as_ref().is_some_and(|copy| copy.branch.slot == branch.slot)
        });
        there.map(|(id, record)| (*id, record.counts_all && record.branch.slot == branch.slot)).collect()
    }

    /// The indexed copy of a file.
    pub(crate) fn indexed(&self, id: FileId) -> Option<Part> {
        self.records.read().get(&id).and_then(|record| record.copy.clone())
    }

    /// Moves a count to another branch.
    ///
    /// # Errors
    /// Errors of the storage.
    pub(crate) fn move_counter(&self, id: FileId, to: &Arc<Branch>) -> Result<()> {
        let _one_at_a_time = self.changing.lock();
        let Some(record) = self.records.read().get(&id).filter(|record| record.counts_all).cloned() else {
            return Ok(());
        };
        make_counter(to, &record.entry, record.below)?;
        if let Some(known) = self.records.write().get_mut(&id) {
            known.branch = Arc::clone(to);
        }
        remove(&record.branch, &record.entry)
    }

    /// Whether the index has a record of a file.
    pub(crate) fn knows(&self, id: FileId) -> bool {
        self.records.read().contains_key(&id)
    }
}

/// The entry name of a file, without a suffix.
pub(crate) fn index_entry(identities: &Identities, id: FileId) -> Vec<u8> {
    let (mark, ino, generation) = identities.written(id);
    format!("{mark:016x}-{ino:016x}-{generation:016x}").into_bytes()
}

/// Stores the number of names below that lead to a copy.
///
/// # Errors
/// Errors of the storage, except unsupported attributes.
pub(crate) fn write_count(branch: &Branch, node: &Node, below: u32) -> Result<()> {
    match branch.layer.setxattr(&OWN, node, attribute(branch), &below.to_le_bytes(), XattrFlags::default()) {
        // Then the count is too high after the next mount, which loses nothing.
        Err(Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::EPERM) => Ok(()),
        other => other,
    }
}

fn make_counter(branch: &Branch, entry: &[u8], below: u32) -> Result<()> {
    let directory = index_directory(branch)?;
    let name = Name::new(entry)?;
    let found = match branch.layer.lookup(&OWN, &directory, name) {
        // It gets its name with the count: one that tells none counts as many names as there can be.
        Err(Errno::ENOENT) => {
            let (work, flags) = (branch.work_directory()?, OpenFlags(OpenFlags::WRITE.0 | OpenFlags::EXCL));
            let temporary = branch.work()?.temporary();
            let (made, _) = branch.layer.create(&OWN, &work, temporary.name()?, 0o600, flags)?;
            write_count(branch, &made.node, below)?;
            return branch.layer.rename(&OWN, &work, temporary.name()?, &directory, name, RenameFlags(0));
        }
        other => other?,
    };
    if found.attr.kind != Kind::File {
        return Err(Errno::EIO);
    }
    write_count(branch, &found.node, below)
}

/// Removes an entry.
///
/// # Errors
/// Errors of the storage, except that there is none.
pub(crate) fn remove(branch: &Branch, entry: &[u8]) -> Result<()> {
    match branch.layer.unlink(&OWN, &index_directory(branch)?, Name::new(entry)?) {
        Err(Errno::ENOENT) => Ok(()),
        other => other,
    }
}
