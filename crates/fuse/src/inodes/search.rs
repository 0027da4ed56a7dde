//! Searches for files by their identity where their recorded names no longer lead to them: they, or a directory above
//! them, were renamed outside of this mount.
//!
//! Called by `left.rs` for nodes of a previous process. Walks down from the root of the mount through the layer, so
//! that it works for every stack. Invariants: only files with the recorded identity and kind are found; the walk ends
//! after [`LIMIT`].

use nacre_vfs::{Caller, DirEntry, DirSink, Entry, FileId, Kind, Layer, Name, Node};
use std::{
    collections::{HashMap, HashSet, VecDeque},
    time::{Duration, Instant},
};

/// Maximum duration of a walk: requests wait for it.
const LIMIT: Duration = Duration::from_secs(20);

/// A file that was found in the directory `parent`.
pub(super) struct FoundFile {
    pub entry: Entry,
    pub parent: FileId,
    pub name: Vec<u8>,
}

#[expect(clippy::disallowed_methods, reason = "a walk through storage is limited by the time that it takes")]
fn now() -> Instant {
    Instant::now()
}

/// Searches for files by identity and kind; files that do not exist are missing in the result.
pub(super) fn search(layer: &dyn Layer, wanted: &HashMap<FileId, Kind>) -> Vec<FoundFile> {
    let mut found = Vec::new();
    let Ok(root) = layer.root() else { return found };
    let numbers: HashSet<u64> = wanted.keys().map(|id| id.ino).collect();
    let mut seen = HashSet::from([root.attr.id]);
    let mut directories = VecDeque::from([(root.node, root.attr.id)]);
    let end = now() + LIMIT;
    while let Some((directory, id)) = directories.pop_front() {
        if found.len() == wanted.len() {
            break;
        }
        if now() > end {
            tracing::warn!(?LIMIT, "files that were renamed without this mount are looked for no longer");
            break;
        }
        for name in interesting(layer, &directory, &numbers) {
            // The name is gone meanwhile.
            let Ok(name_of) = Name::new(&name) else { continue };
            let Ok(entry) = layer.lookup(&Caller::ROOT, &directory, name_of) else { continue };
            if entry.attr.kind == Kind::Directory && seen.insert(entry.attr.id) {
                directories.push_back((entry.node.clone(), entry.attr.id));
            }
            let is_new = !found.iter().any(|known: &FoundFile| known.entry.attr.id == entry.attr.id);
            if is_new && wanted.get(&entry.attr.id) == Some(&entry.attr.kind) {
                found.push(FoundFile { entry, parent: id, name });
            }
        }
    }
    found
}

/// Returns the names of directories and of files with one of these inode numbers.
fn interesting(layer: &dyn Layer, directory: &Node, numbers: &HashSet<u64>) -> Vec<Vec<u8>> {
    let mut names = Vec::new();
    let mut from = 0;
    loop {
        let mut page = Page { numbers, names: &mut names, next: from, entries: 0 };
        let listed = layer.readdir(&Caller::ROOT, directory, from, false, &mut page);
        let (next, entries) = (page.next, page.entries);
        if listed.is_err() || entries == 0 {
            return names;
        }
        from = next;
    }
}

/// One page of a listing.
struct Page<'a> {
    numbers: &'a HashSet<u64>,
    names: &'a mut Vec<Vec<u8>>,
    next: u64,
    entries: usize,
}

/// Maximum number of entries per call.
const PAGE: usize = 4096;

impl DirSink for Page<'_> {
    fn push(&mut self, entry: DirEntry<'_>) -> bool {
        if self.entries == PAGE {
            return false;
        }
        self.entries += 1;
        self.next = entry.next;
        if matches!(entry.kind, None | Some(Kind::Directory)) || self.numbers.contains(&entry.ino) {
            self.names.push(entry.name.bytes().to_vec());
        }
        true
    }
}
