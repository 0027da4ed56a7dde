//! Balancing: evens out the use of the branches while the union is in use.
//!
//! Called from one thread of the process that controls the mount. Files are moved one by one from the fullest
//! file system to the emptiest one that takes them, by `relocate.rs`: the name leads to the old file or the new
//! one at every moment and after every crash. Every branch is walked once, and a move has to bring the use of
//! the two file systems nearer to each other, so that the balance ends whatever users do meanwhile.

use crate::{
    OWN, UnionShared,
    branch::ParseError,
    branches::Branch,
    control::{ChangeError, Control},
    hardlinks::relocate::Scans,
    node::{UnionNode, path_in},
    policy::Space,
    relocate::{Goal, LEFT_MAX, Left, Stay},
    tier,
};
use hashbrown::HashSet;
use nacre_vfs::{Errno, Invalidation, Kind, Result};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// How long the figures of free space are reused, corrected by the bytes moved.
const FRESH: Duration = Duration::from_secs(1);
/// The pause before an open file is tried again.
const PAUSE: Duration = Duration::from_millis(20);
/// How often a file is tried that is open or is changed meanwhile.
const ATTEMPTS: usize = 4;
/// Bytes of a block in the attributes of files.
const BLOCK: u64 = 512;

/// The goal of a balance, and its filters for files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BalanceRules {
    /// The largest allowed difference in use between two file systems, hundredths of a percent.
    pub spread: u32,
    /// Smaller files stay, bytes.
    pub min_size: u64,
    /// Larger files stay, bytes.
    pub max_size: Option<u64>,
    /// If not empty, only files that match one of these patterns are moved. A pattern with a slash is matched
    /// against the path from the union's root, a pattern without a slash against the last component.
    pub include: Vec<String>,
    /// Files that match one of these patterns stay.
    pub exclude: Vec<String>,
}

impl Default for BalanceRules {
    fn default() -> BalanceRules {
        BalanceRules { spread: 200, min_size: 0, max_size: None, include: Vec::new(), exclude: Vec::new() }
    }
}

impl BalanceRules {
    /// Reads a pattern of `include` or `exclude`.
    ///
    /// # Errors
    /// A text that is no pattern.
    pub fn pattern(text: &str) -> Result<String, ParseError> {
        tier::pattern(text)
    }

    fn takes(&self, path: &[u8], size: u64) -> bool {
        let sized = size >= self.min_size && self.max_size.is_none_or(|max| size <= max);
        let named = self.include.is_empty() || tier::matches(&self.include, path);
        sized && named && !tier::matches(&self.exclude, path)
    }
}

/// Progress or result of a balance.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BalanceReport {
    /// Files moved.
    pub moved: u64,
    /// Bytes moved; during the run, including those of the present file so far.
    pub bytes: u64,
    /// Estimate of all bytes that have to be moved.
    pub expected: u64,
    /// Difference in use between the fullest and the emptiest file system, hundredths of a percent.
    pub spread: u32,
    /// Number of files that should have been moved but could not be.
    pub left: u64,
    /// The first 1,000 files that could not be moved.
    pub examples: Vec<Left>,
    /// Whether the balance was stopped before its end.
    pub stopped: bool,
}

/// The branches on one file system.
struct Group {
    branches: Vec<Arc<Branch>>,
    space: Space,
    /// No more files can be moved from here.
    done: bool,
}

impl Group {
    fn size(&self) -> u64 {
        self.space.used.saturating_add(self.space.free).max(1)
    }

    /// The used share if so many bytes were added or removed.
    fn share(&self, change: i128) -> f64 {
        (i128::from(self.space.used) + change).max(0) as f64 / self.size() as f64
    }
}

/// A directory on the path of the walk.
struct Frame {
    directory: Arc<UnionNode>,
    names: std::vec::IntoIter<Vec<u8>>,
}

/// The walk through a branch.
struct Walk {
    branch: Arc<Branch>,
    frames: Vec<Frame>,
}

struct Balance<'a> {
    shared: &'a Arc<UnionShared>,
    rules: &'a BalanceRules,
    groups: Vec<Group>,
    walks: Vec<Walk>,
    /// A file with several names is found under each of them.
    tried: HashSet<nacre_vfs::FileId>,
    scans: Scans,
    looked: Instant,
    report: BalanceReport,
    progress: &'a mut dyn FnMut(&BalanceReport) -> bool,
}

impl Control {
    /// Moves files from full branches to emptier ones until the spread is reached or no allowed move improves
    /// it. `progress` is called for each piece and returns whether to continue.
    ///
    /// # Errors
    /// EINVAL where fewer than two file systems take new files; errors of the storage's statfs.
    #[expect(clippy::disallowed_methods, reason = "how often the branches are looked at")]
    pub fn balance_branches(
        &self,
        rules: &BalanceRules,
        progress: &mut dyn FnMut(&BalanceReport) -> bool,
    ) -> Result<BalanceReport, ChangeError> {
        let mut balance = Balance {
            shared: &self.shared,
            rules,
            groups: Vec::new(),
            walks: Vec::new(),
            tried: HashSet::new(),
            scans: Scans::default(),
            looked: Instant::now(),
            report: BalanceReport::default(),
            progress,
        };
        let failed = |error: Errno| ChangeError::new(error, format!("a branch does not tell how full it is: {error}"));
        balance.group().map_err(failed)?;
        if balance.groups.len() < 2 {
            let text = "there is nothing to even out: less than two file systems take new files";
            return Err(ChangeError::new(Errno::EINVAL, text));
        }
        balance.run().map_err(failed)?;
        Ok(balance.report)
    }
}

impl Balance<'_> {
    /// Finds the file systems that take new files, and starts the walk through their branches.
    fn group(&mut self) -> Result<()> {
        let _branches = self.shared.gate.read();
        for branch in self.shared.branches().iter().filter(|branch| branch.creates()) {
            self.walks.push(Walk { branch: Arc::clone(branch), frames: Vec::new() });
            let same = |group: &&mut Group| group.branches.iter().any(|other| other.root_id.fs == branch.root_id.fs);
            match self.groups.iter_mut().find(same) {
                Some(group) => group.branches.push(Arc::clone(branch)),
                None => {
                    self.groups.push(Group { branches: vec![Arc::clone(branch)], space: space(branch)?, done: false })
                }
            }
        }
        let root = &self.shared.root;
        self.shared.revalidate(root)?;
        for walk in &mut self.walks {
            let names = self.shared.names_on(root, &walk.branch)?;
            walk.frames.push(Frame { directory: Arc::clone(root), names: names.into_iter() });
        }
        let used: u128 = self.groups.iter().map(|group| u128::from(group.space.used)).sum();
        let size: u128 = self.groups.iter().map(|group| u128::from(group.size())).sum();
        let even = |group: &Group| u64::try_from(used * u128::from(group.size()) / size.max(1)).unwrap_or(u64::MAX);
        self.report.expected = self.groups.iter().map(|group| group.space.used.saturating_sub(even(group))).sum();
        self.report.spread = self.spread();
        Ok(())
    }

    /// Difference in use between the fullest and the emptiest file system, hundredths of a percent.
    fn spread(&self) -> u32 {
        let shares = || self.groups.iter().map(|group| group.share(0));
        let spread = shares().fold(0.0, f64::max) - shares().fold(f64::INFINITY, f64::min);
        (spread.max(0.0) * 10_000.0).ceil() as u32
    }

    #[expect(clippy::disallowed_methods, reason = "how often the branches are looked at")]
    fn run(&mut self) -> Result<()> {
        while !self.report.stopped {
            if self.looked.elapsed() > FRESH {
                for group in &mut self.groups {
                    if let Some(branch) = group.branches.first() {
                        group.space = space(branch)?;
                    }
                }
                self.looked = Instant::now();
            }
            self.report.spread = self.spread();
            let emptiest = self.groups.iter().map(|group| group.share(0)).fold(f64::INFINITY, f64::min);
            let wanted = f64::from(self.rules.spread) / 10_000.0;
            let too_full = |group: &Group| !group.done && group.share(0) - emptiest > wanted;
            let open = self.groups.iter().enumerate().filter(|(_, group)| too_full(group));
            let Some(from) =
                open.max_by(|(_, one), (_, other)| one.share(0).total_cmp(&other.share(0))).map(|(place, _)| place)
            else {
                break;
            };
            match self.next_of(from) {
                Some(node) => self.file(from, &node),
                None => self.groups.get_mut(from).into_iter().for_each(|group| group.done = true),
            }
            self.report.stopped |= !(self.progress)(&self.report);
        }
        Ok(())
    }

    /// The next file on a file system's branches that the filters allow to move.
    fn next_of(&mut self, group: usize) -> Option<Arc<UnionNode>> {
        let branches: Vec<u8> = self.groups.get(group)?.branches.iter().map(|branch| branch.slot).collect();
        let walk = self
            .walks
            .iter_mut()
            .find(|walk| branches.contains(&walk.branch.slot) && walk.branch.is_member() && !walk.frames.is_empty())?;
        let branch = Arc::clone(&walk.branch);
        while let Some(frame) = walk.frames.last_mut() {
            let directory = Arc::clone(&frame.directory);
            let Some(name) = frame.names.next() else {
                walk.frames.pop();
                continue;
            };
            let _branches = self.shared.gate.read();
            match self.shared.node_on(&directory, &name, &branch) {
                Ok(Some(node)) if node.kind == Kind::Directory => {
                    let names = self.shared.revalidate(&node).and_then(|()| {
                        if node.is_redirected() { Err(Errno::EXDEV) } else { self.shared.names_on(&node, &branch) }
                    });
                    match names {
                        Ok(names) => walk.frames.push(Frame { directory: node, names: names.into_iter() }),
                        Err(error) => tracing::debug!(?error, "a directory is left out of the balance"),
                    }
                }
                Ok(Some(node)) if node.top().is_ok_and(|top| top.branch.slot == branch.slot) => return Some(node),
                Ok(_) | Err(Errno::ENOENT | Errno::ESTALE) => {}
                Err(error) => {
                    let path = path_in(&directory, &name);
                    self.report.left += 1;
                    if self.report.examples.len() < LEFT_MAX {
                        self.report.examples.push(Left { path, why: error.to_string() });
                    }
                }
            }
        }
        // The next branch of the same file system, if there is one.
        self.next_of(group)
    }

    /// Moves a file to the emptiest file system that takes it, if this reduces the difference in use.
    fn file(&mut self, from: usize, node: &Arc<UnionNode>) {
        let Some(path) = node.path() else { return };
        let attr = {
            let _branches = self.shared.gate.read();
            let looked = node.top().and_then(|top| self.shared.attr_of_source(node, &top));
            match looked.and_then(|attr| Ok((attr, self.shared.is_pinned(node)?))) {
                Ok((attr, false)) if self.rules.takes(&path, attr.size) => attr,
                Ok(_) | Err(Errno::ENOENT | Errno::ESTALE) => return,
                Err(error) => return self.stays(path, error.to_string()),
            }
        };
        if attr.nlink > 1 && !self.tried.insert(node.id) {
            return;
        }
        let bytes = attr.blocks.saturating_mul(BLOCK);
        let mut targets: Vec<usize> =
            (0..self.groups.len()).filter(|to| *to != from && self.is_better(from, *to, bytes)).collect();
        targets.sort_by(|one, other| {
            let share = |place: &usize| self.groups.get(*place).map_or(1.0, |group| group.share(0));
            share(one).total_cmp(&share(other))
        });
        let mut why = None;
        for to in targets {
            let branches = self.groups.get(to).map(|group| group.branches.clone()).unwrap_or_default();
            for branch in branches.iter().filter(|branch| branch.is_member() && branch.creates()) {
                match self.carry(node, branch, &path) {
                    Ok(moved) => {
                        self.report.moved += 1;
                        self.report.bytes += moved;
                        for (place, change) in [(from, -i128::from(bytes)), (to, i128::from(bytes))] {
                            if let Some(group) = self.groups.get_mut(place) {
                                let used = u64::try_from(i128::from(group.space.used) + change).unwrap_or(0);
                                group.space.free = group.size().saturating_sub(used);
                                group.space.used = used;
                            }
                        }
                        return;
                    }
                    Err(Stay::NoRoom) => why = Some(Stay::NoRoom),
                    // Removed, or moved by another thread.
                    Err(Stay::Changed) if node.is_gone() => return,
                    Err(Stay::Stopped) => return,
                    Err(other) => return self.stays(path, other.to_string()),
                }
            }
        }
        if let Some(why) = why {
            self.stays(path, why.to_string());
        }
    }

    /// Whether the use of two file systems differs less after moving so many bytes from one to the other.
    fn is_better(&self, from: usize, to: usize, bytes: u64) -> bool {
        let (Some(from), Some(to)) = (self.groups.get(from), self.groups.get(to)) else { return false };
        let before = from.share(0) - to.share(0);
        let after = from.share(-i128::from(bytes)) - to.share(i128::from(bytes));
        before > 0.0 && after.abs() < before && to.space.free > bytes
    }

    fn stays(&mut self, path: Vec<u8>, why: String) {
        self.report.left += 1;
        if self.report.examples.len() < LEFT_MAX {
            self.report.examples.push(Left { path, why });
        }
    }

    /// Moves one file; retries when the list of branches is changed meanwhile.
    #[expect(
        clippy::disallowed_methods,
        reason = "others use files on the branches, and change the branches: neither tells when it is done"
    )]
    fn carry(&mut self, node: &Arc<UnionNode>, to: &Arc<Branch>, path: &[u8]) -> std::result::Result<u64, Stay> {
        tracing::debug!(path = %path.escape_ascii(), to = %to.name.display(), "moving");
        let mut attempt = 1;
        loop {
            let BalanceReport { moved, bytes, expected, spread, left, .. } = self.report;
            let mut told = BalanceReport { moved, bytes, expected, spread, left, ..BalanceReport::default() };
            let mut stop = false;
            let moved = {
                let _branches = self.shared.gate.read();
                if !to.is_member() {
                    return Err(Stay::NoRoom);
                }
                let mut pace = |bytes: u64| {
                    told.bytes += bytes;
                    stop |= !(self.progress)(&told);
                    !stop
                };
                self.shared.relocate_all(node, &Goal::Branch(Arc::clone(to)), &mut pace, &mut self.scans)
            };
            self.report.stopped |= stop;
            match moved {
                Err(Stay::Stopped) if !stop => self.shared.membership.give_way(),
                Err(Stay::Open) if attempt < ATTEMPTS && !stop && self.shared.ask_to_close(node, PAUSE) => attempt += 1,
                Err(Stay::InUse | Stay::Changed)
                    if attempt < ATTEMPTS && !stop && self.shared.tell(&Invalidation::Content { id: node.id }) =>
                {
                    attempt += 1;
                    std::thread::sleep(PAUSE);
                }
                other => return other,
            }
        }
    }
}

fn space(branch: &Branch) -> Result<Space> {
    branch.layer.statfs(&OWN, &branch.root).map(|figures| Space::from(&figures))
}
