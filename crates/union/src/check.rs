//! The check after a crash: finds remains of interrupted work, and link counts that are too high. No finding
//! ever hides or shows a wrong file; it takes up space, or makes `st_nlink` too large.
//!
//! Called by [`Union::check`], also while the union is in use: the names of each directory are locked while it
//! is checked, and temporary names of this run are ignored.

use crate::{
    OWN, Union, UnionShared,
    branches::Branch,
    listing, marks,
    node::{Part, UnionNode, source},
    work,
};
use hashbrown::HashMap;
use nacre_vfs::{DirEntry, DirSink, Errno, FileId, Kind, Name, Result};
use std::sync::{Arc, atomic::Ordering};

/// The kind of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Problem {
    /// A temporary file of an earlier run that was interrupted.
    Leftover,
    /// A whiteout for a name that exists on the same branch: it hides nothing.
    UselessWhiteout,
    /// The hard-link index counts more names of a file than exist.
    TooManyLinks {
        /// Number of names on lower branches according to the index.
        counted: u32,
        /// Number of names that the walk found.
        found: u32,
    },
}

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The branch, counted from the top.
    pub branch: usize,
    /// Path from the root of the branch, names divided by `/`.
    pub path: Vec<u8>,
    /// The kind of the finding.
    pub problem: Problem,
    /// Whether the problem has been repaired.
    pub repaired: bool,
}

/// Collects the union's reserved names of a directory.
#[derive(Default)]
struct Reserved {
    names: Vec<Vec<u8>>,
    next: u64,
    seen: usize,
}

/// Names read in one call.
const PAGE: usize = 4096;

impl DirSink for Reserved {
    fn push(&mut self, entry: DirEntry<'_>) -> bool {
        if self.seen == PAGE {
            return false;
        }
        self.seen += 1;
        self.next = entry.next;
        if marks::is_reserved(entry.name.bytes()) {
            self.names.push(entry.name.bytes().to_vec());
        }
        true
    }
}

/// A running check.
struct Check<'a> {
    shared: &'a UnionShared,
    repair: bool,
    /// For each branch, whether it is writable when the union is mounted; here all may be open read-only.
    written: &'a [bool],
    findings: Vec<Finding>,
    /// For each file in the hard-link index, the number of names on lower branches that lead to it.
    names: HashMap<FileId, u32>,
}

impl Union {
    /// Checks the whole visible tree, and repairs the findings if `repair` is set.
    ///
    /// # Errors
    /// Errors of the branches: the check is incomplete then.
    pub fn check(&self, repair: bool) -> Result<Vec<Finding>> {
        self.look_over(repair, &[])
    }

    /// Checks a union whose branches are all open read-only, so that nothing is written; `written` has the
    /// branches that are writable when it is mounted.
    ///
    /// # Errors
    /// As [`Union::check`].
    pub fn check_read_only(&self, written: &[bool]) -> Result<Vec<Finding>> {
        self.look_over(false, written)
    }

    fn look_over(&self, repair: bool, written: &[bool]) -> Result<Vec<Finding>> {
        let mut check = Check { shared: self.shared(), repair, written, findings: Vec::new(), names: HashMap::new() };
        let moves = self.shared().tree.count.load(Ordering::Relaxed);
        let mut complete = true;
        let mut waiting = vec![Arc::clone(&self.shared().root)];
        while let Some(directory) = waiting.pop() {
            match check.directory(&directory, &mut waiting) {
                Ok(()) => {}
                // Removed meanwhile.
                Err(Errno::ENOENT | Errno::ESTALE) => complete = false,
                Err(error) => return Err(error),
            }
        }
        // A needed entry of the index must not be removed: names in a directory that has moved may have been
        // missed.
        if complete && self.shared().tree.count.load(Ordering::Relaxed) == moves {
            check.links()?;
        }
        Ok(check.findings)
    }
}

impl Check<'_> {
    fn is_written(&self, branch: &Branch) -> bool {
        branch.is_writable() || self.written.get(branch.index()).is_some_and(|written| *written)
    }

    fn directory(&mut self, directory: &Arc<UnionNode>, waiting: &mut Vec<Arc<UnionNode>>) -> Result<()> {
        let _branches = self.shared.gate.read();
        self.shared.revalidate(directory)?;
        let _names = directory.names.read();
        if directory.is_gone() {
            return Ok(());
        }
        let view = directory.view();
        for part in view.parts.iter() {
            if !self.is_written(&part.branch) {
                continue;
            }
            for name in reserved(part)? {
                self.own_name(directory, part, &name)?;
            }
        }
        let sources: Vec<_> = view.parts.iter().map(source).collect();
        let marks = view.parts.first().map(|part| part.branch.marks()).ok_or(Errno::EIO)?;
        for name in self.shared.listings.names(&marks, directory.id, &sources, |_, _| true)? {
            let name = Name::new(&name)?;
            let Some(found) = self.shared.sight(&OWN, &view, name)?.found else { continue };
            let seen = found.top()?.branch.index();
            let node = self.shared.known(directory, name, found)?;
            if node.kind == Kind::Directory {
                waiting.push(node);
            } else if node.top()?.branch.index() != seen {
                *self.names.entry(node.id).or_insert(0) += 1;
            }
        }
        Ok(())
    }

    /// Checks one of the union's reserved names in a directory of a branch.
    fn own_name(&mut self, directory: &Arc<UnionNode>, part: &Part, bytes: &[u8]) -> Result<()> {
        let (branch, name) = (&part.branch, Name::new(bytes)?);
        if work::is_left_over(branch.work().ok(), bytes) {
            let removed = if self.repair { remove(part, name).map(|()| true)? } else { false };
            self.found(directory, branch.index(), bytes, Problem::Leftover, removed);
            return Ok(());
        }
        let hidden = match marks::listed(name) {
            marks::NameMark::Hides(hidden) => hidden.bytes().to_vec(),
            marks::NameMark::HidesLong => match marks::long_name(&*branch.layer, &part.node, name)? {
                Some(hidden) => hidden,
                None => return Ok(()),
            },
            marks::NameMark::Plain | marks::NameMark::Private => return Ok(()),
        };
        match branch.layer.lookup(&OWN, &part.node, Name::new(&hidden)?) {
            // Other programs use it to hide the lower part of a directory.
            Ok(beside) if beside.attr.kind != Kind::Directory => {}
            Ok(_) | Err(Errno::ENOENT) => return Ok(()),
            Err(error) => return Err(error),
        }
        if self.repair {
            branch.layer.unlink(&OWN, &part.node, name)?;
        }
        self.found(directory, branch.index(), bytes, Problem::UselessWhiteout, self.repair);
        Ok(())
    }

    /// Compares the counts of the hard-link index with the names that the walk found.
    fn links(&mut self) -> Result<()> {
        let _branches = self.shared.gate.read();
        for (id, branch, counted) in self.shared.hardlinks.counts(|branch| self.is_written(branch)) {
            let found = self.names.get(&id).copied().unwrap_or(0);
            if found < counted {
                let repaired =
                    self.repair && self.shared.hardlinks.correct(id, counted, found, || self.shared.syncfs())?;
                let path = work::LINKS.to_vec();
                self.findings.push(Finding {
                    branch,
                    path,
                    problem: Problem::TooManyLinks { counted, found },
                    repaired,
                });
            }
        }
        Ok(())
    }

    fn found(&mut self, directory: &UnionNode, branch: usize, name: &[u8], problem: Problem, repaired: bool) {
        let mut path = directory.path().unwrap_or_default();
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(name);
        self.findings.push(Finding { branch, path, problem, repaired });
    }
}

/// The union's reserved names in a directory of a branch.
fn reserved(part: &Part) -> Result<Vec<Vec<u8>>> {
    let mut page = Reserved::default();
    loop {
        page.seen = 0;
        part.branch.layer.readdir(&OWN, &part.node, page.next, false, &mut page)?;
        if page.seen == 0 {
            return Ok(page.names);
        }
    }
}

fn remove(part: &Part, name: Name<'_>) -> Result<()> {
    let layer = &part.branch.layer;
    let found = layer.lookup(&OWN, &part.node, name)?;
    if found.attr.kind != Kind::Directory {
        return layer.unlink(&OWN, &part.node, name);
    }
    listing::purge(&**layer, &found.node)?;
    layer.rmdir(&OWN, &part.node, name)
}
