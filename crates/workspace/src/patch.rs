//! Changes as a patch in git's unified form, which `git apply` and `patch -p1` apply.
//!
//! A patch knows files, symbolic links, the executable bit and renames: owners, other permission bits, attributes, empty
//! directories and devices are not in it. A removed directory is the removal of each file in it, a renamed one the rename
//! of each.

mod binary;
mod hunks;
mod quote;

use crate::{
    Base, Change, ChangeKind, Result, Upper,
    compare::{self, BaseEntry, Comparison, Item, path_of},
    content,
    meta::Meta,
    trouble::During,
    upper::MARK,
};
use rustix::fs::FileType;
use std::{
    collections::{BTreeMap, BTreeSet},
    io::Write,
    os::{fd::AsFd, unix::ffi::OsStrExt},
    path::{Path, PathBuf},
};

/// A file before or after the change, as git stores it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Version {
    path: PathBuf,
    /// `100644`, `100755` or `120000`.
    mode: &'static str,
    content: Vec<u8>,
}

impl Version {
    /// Hash of the content as git computes it.
    fn hash(&self) -> String {
        let mut hash = sha1_smol::Sha1::new();
        hash.update(format!("blob {}\0", self.content.len()).as_bytes());
        hash.update(&self.content);
        hash.digest().to_string()
    }

    /// Whether git takes the content for binary.
    fn is_binary(&self) -> bool {
        const LOOKED_AT: usize = 8000;
        self.content.iter().take(LOOKED_AT).any(|byte| *byte == 0)
    }

    /// A file in place of a link, or the other way round, is another one to git.
    fn is_link(&self) -> bool {
        self.mode == "120000"
    }
}

/// The files of a patch, by the path under which they are listed.
struct Patch<'a> {
    base: &'a Base,
    upper: &'a Upper,
    comparison: Comparison,
    /// Entries of the view.
    items: BTreeSet<PathBuf>,
    /// Files of the base that are removed.
    removed: BTreeSet<PathBuf>,
}

/// Writes changes as a patch in git's unified form, which `git apply` and `patch -p1` apply.
///
/// # Errors
/// Something cannot be read, or `out` fails.
pub fn patch(base: &Base, upper: &Upper, changes: &[Change], out: &mut dyn Write) -> Result<()> {
    let comparison = compare::compare(base, upper)?;
    let mut patch = Patch { base, upper, comparison, items: BTreeSet::new(), removed: BTreeSet::new() };
    patch.collect(changes)?;
    patch.write(out)
}

impl Patch<'_> {
    /// Finds the files of the changes.
    fn collect(&mut self, changes: &[Change]) -> Result<()> {
        for change in changes {
            let path = path_of(&change.path);
            if change.kind == ChangeKind::Removed {
                if let Some(meta) = self.comparison.removed.get(&path).copied() {
                    self.remove(&BaseEntry { path, meta })?;
                }
                continue;
            }
            let Some(item) = self.comparison.items.get(&path).cloned() else { continue };
            if let Some(over) = item.over.as_ref().filter(|over| over.meta.is_directory()) {
                self.remove(over)?;
            }
            if item.renamed && item.upper.meta.is_directory() {
                let inside = self.comparison.items.keys().filter(|inner| inner.starts_with(&path));
                self.items.extend(inside.cloned().collect::<Vec<_>>());
            }
            if item.over.as_ref().is_some_and(|over| !over.meta.is_directory()) && item.upper.meta.is_directory() {
                self.removed.extend(item.over.map(|over| over.path));
            }
            self.items.insert(path);
        }
        Ok(())
    }

    /// Notes the files of an entry of the base that goes, except for those that have other names in the view.
    fn remove(&mut self, top: &BaseEntry) -> Result<()> {
        let moved: BTreeSet<PathBuf> = self
            .comparison
            .items
            .values()
            .filter(|item| item.renamed)
            .filter_map(|item| item.base.as_ref().map(|base| base.path.clone()))
            .collect();
        let mut waiting = vec![top.clone()];
        while let Some(entry) = waiting.pop() {
            if moved.contains(&entry.path) {
                continue;
            }
            if !entry.meta.is_directory() {
                self.removed.insert(entry.path);
                continue;
            }
            for listed in
                self.base.list(&entry.path)?.into_iter().filter(|listed| !listed.name.as_bytes().starts_with(MARK))
            {
                let path = entry.path.join(&listed.name);
                if let Some(meta) = self.base.meta(&path)? {
                    waiting.push(BaseEntry { path, meta });
                }
            }
        }
        Ok(())
    }

    fn write(&self, out: &mut dyn Write) -> Result<()> {
        // By path; of one path, a removal comes before a creation.
        let mut pieces: BTreeMap<(PathBuf, bool), Vec<u8>> = BTreeMap::new();
        for path in &self.removed {
            if let Some(old) = self.old(path)? {
                pieces.insert((path.clone(), false), difference(Some(&old), None));
            }
        }
        for path in &self.items {
            let Some(item) = self.comparison.items.get(path) else { continue };
            let new = self.new_version(path, item)?;
            let there = if item.upper.meta.is_directory() { None } else { item.base.as_ref() };
            let mut old = match there {
                Some(base) => self.old(&base.path)?,
                None => None,
            };
            if let Some(over) =
                item.over.as_ref().filter(|over| !over.meta.is_directory() && !item.upper.meta.is_directory())
            {
                // The other file at this path is changed, and the old name removed.
                if let Some(moved) = old.take() {
                    pieces.insert((moved.path.clone(), false), difference(Some(&moved), None));
                }
                old = self.old(&over.path)?;
            }
            match (old, new) {
                (Some(old), Some(new)) if old.is_link() != new.is_link() => {
                    pieces.insert((old.path.clone(), false), difference(Some(&old), None));
                    pieces.insert((path.clone(), true), difference(None, Some(&new)));
                }
                (None, None) => {}
                (old, new) => {
                    pieces.insert((path.clone(), true), difference(old.as_ref(), new.as_ref()));
                }
            }
        }
        for piece in pieces.values() {
            out.write_all(piece).during("write", Path::new("the patch"))?;
        }
        Ok(())
    }

    /// A file of the base; `None` for a type that git does not store.
    fn old(&self, path: &Path) -> Result<Option<Version>> {
        let Some(below) = self.base.find(path)? else { return Ok(None) };
        let shown = self.base.path_of(path);
        let content = match below.meta.kind() {
            FileType::RegularFile => {
                let file = below.tree.file(path).during("open", &shown)?;
                content::read_all(file.as_fd()).during("read", &shown)?
            }
            FileType::Symlink => below.tree.link_target(path).during("read the link", &shown)?,
            _ => return Ok(None),
        };
        Ok(Some(Version { path: path.to_path_buf(), mode: mode(&below.meta), content }))
    }

    /// A file of the view; `None` for a type that git does not store.
    fn new_version(&self, path: &Path, item: &Item) -> Result<Option<Version>> {
        let (tree, place) = item.place(self.upper, path);
        let shown = tree.path_of(&place);
        let content = match item.upper.meta.kind() {
            FileType::RegularFile => {
                let file = tree.file(&place).during("open", &shown)?;
                content::read_all(file.as_fd()).during("read", &shown)?
            }
            FileType::Symlink => tree.link_target(&place).during("read the link", &shown)?,
            _ => return Ok(None),
        };
        Ok(Some(Version { path: path.to_path_buf(), mode: mode(&item.upper.meta), content }))
    }
}

fn mode(meta: &Meta) -> &'static str {
    match meta.kind() {
        FileType::Symlink => "120000",
        _ if meta.mode & 0o100 != 0 => "100755",
        _ => "100644",
    }
}

/// The difference of two versions of a file; empty where git sees none.
fn difference(old: Option<&Version>, new: Option<&Version>) -> Vec<u8> {
    let mut text = Vec::new();
    let paths = (old.or(new).map(|one| one.path.as_path()), new.or(old).map(|one| one.path.as_path()));
    let (Some(old_path), Some(new_path)) = paths else { return text };
    let is_same = old.map(|old| &old.content) == new.map(|new| &new.content);
    let (old_mode, new_mode) = (old.map(|old| old.mode), new.map(|new| new.mode));
    if is_same && old_mode == new_mode && old_path == new_path {
        return text;
    }
    let (a, b) = (quote::name(b"a/", old_path), quote::name(b"b/", new_path));
    text.extend([&b"diff --git "[..], &a, b" ", &b, b"\n"].concat());
    match (old_mode, new_mode) {
        (None, Some(mode)) => text.extend(format!("new file mode {mode}\n").bytes()),
        (Some(mode), None) => text.extend(format!("deleted file mode {mode}\n").bytes()),
        (Some(old), Some(new)) if old != new => text.extend(format!("old mode {old}\nnew mode {new}\n").bytes()),
        _ => {}
    }
    let empty = Vec::new();
    let before = old.map_or(&empty, |old| &old.content);
    let after = new.map_or(&empty, |new| &new.content);
    let is_binary = old.is_some_and(Version::is_binary) || new.is_some_and(Version::is_binary);
    let lines = if is_same || is_binary { None } else { Some(hunks::hunks(before, after)) };
    if old_path != new_path {
        let percent = if is_same { 100 } else { lines.as_ref().map_or(50, |lines| lines.similarity) };
        text.extend(format!("similarity index {percent}%\n").bytes());
        text.extend([&b"rename from "[..], &quote::name(b"", old_path), b"\n"].concat());
        text.extend([&b"rename to "[..], &quote::name(b"", new_path), b"\n"].concat());
    }
    let nothing = "0".repeat(40);
    if !is_same || old.is_none() || new.is_none() {
        let hash = |version: Option<&Version>| version.map_or_else(|| nothing.clone(), Version::hash);
        let mode = match (old_mode, new_mode) {
            (Some(old), Some(new)) if old == new => format!(" {old}"),
            _ => String::new(),
        };
        text.extend(format!("index {}..{}{mode}\n", hash(old), hash(new)).bytes());
    }
    let Some(lines) = lines.filter(|lines| !lines.text.is_empty()) else {
        if is_binary && !is_same {
            text.extend(binary::both(before, after));
        }
        return text;
    };
    let nothing = b"/dev/null".to_vec();
    let (a, b) = (if old.is_some() { a } else { nothing.clone() }, if new.is_some() { b } else { nothing });
    text.extend([&b"--- "[..], &a, b"\n+++ ", &b, b"\n"].concat());
    text.extend(lines.text);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(path: &str, content: &[u8]) -> Version {
        Version { path: PathBuf::from(path), mode: "100644", content: content.to_vec() }
    }

    #[test]
    fn hashes_are_those_of_git() {
        assert_eq!(version("a", b"").hash(), "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391");
        assert_eq!(version("a", b"hello\n").hash(), "ce013625030ba8dba906f756967f9e9ca394464a");
    }

    #[test]
    fn a_changed_line() {
        let (old, new) = (version("a", b"one\ntwo\n"), version("a", b"one\n2"));
        let text = String::from_utf8(difference(Some(&old), Some(&new))).unwrap();
        let hashes = format!("index {}..{} 100644", old.hash(), new.hash());
        let wanted = format!(
            "diff --git a/a b/a\n{hashes}\n--- a/a\n+++ b/a\n@@ -1,2 +1,2 @@\n one\n-two\n+2\n\\ No newline at end of file\n"
        );
        assert_eq!(text, wanted);
    }

    #[test]
    fn nothing_differs() {
        assert!(difference(Some(&version("a", b"x")), Some(&version("a", b"x"))).is_empty());
    }
}
