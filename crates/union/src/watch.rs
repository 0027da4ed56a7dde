//! Changes by other processes on branches, translated into notices of the union.
//!
//! One thread for each branch receives the branch's notices, translates identities and forwards the notices; it
//! ends when the branch stops sending. An unreferenced file needs no notice, as no cache has it; but it may be
//! about to be referenced: a look-up may have read its attributes before the change and enter the node after
//! the notice. So notices of unknown files are kept for a while, and sent when one of the files becomes known
//! ([`Unheard`]).

use crate::{UnionShared, branches::Branch, marks, node::UnionNode};
use hashbrown::HashSet;
use nacre_vfs::{FileId, Invalidation};
use parking_lot::Mutex;
use std::{
    iter, mem,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
        mpsc::{Sender, channel},
    },
    time::{Duration, Instant},
};

/// The minimal time for which a notice of an unknown file is kept: longer than any look-up takes that is not
/// stuck.
const KEPT: Duration = Duration::from_secs(10);

/// Maximal number of notices in that time that are kept one by one. With more, every file that becomes known
/// counts as changed: correct, but more expensive.
const REPORTS: usize = 8192;

/// Number of changes of unknown files after which the FUSE front end gets a notice of one, because it counts
/// unneeded notices (`Layer::rest`).
const IN_VAIN: usize = 8;

/// The identity of no file.
const NOBODY: FileId = FileId { fs: u64::MAX, ino: u64::MAX, generation: u64::MAX };

/// A file's identity on the branch in a slot.
type Key = (u8, FileId);

/// Notices of files that were not referenced when they came.
pub(crate) struct Unheard {
    any: AtomicBool,
    reports: Mutex<Reports>,
}

struct Reports {
    turned: Instant,
    recent: Reported,
    before: Reported,
}

#[derive(Default)]
struct Reported {
    files: HashSet<Key>,
    too_many: bool,
}

impl Reported {
    fn is_empty(&self) -> bool {
        self.files.is_empty() && !self.too_many
    }
}

impl Default for Unheard {
    #[expect(clippy::disallowed_methods, reason = "how long a report is remembered")]
    fn default() -> Unheard {
        let reports = Reports { turned: Instant::now(), recent: Reported::default(), before: Reported::default() };
        Unheard { any: AtomicBool::new(false), reports: Mutex::new(reports) }
    }
}

impl Unheard {
    fn note(&self, key: Key, now: Instant) {
        let mut reports = self.reports.lock();
        reports.turn(now);
        if reports.recent.files.len() < REPORTS {
            reports.recent.files.insert(key);
        } else {
            reports.recent.too_many = true;
        }
        // Before the caller searches the node again: see `translate`.
        self.any.store(true, Ordering::SeqCst);
    }

    /// Whether a notice of a file came before it became known; removes the notice.
    fn take(&self, key: &Key, now: Instant) -> bool {
        if !self.any.load(Ordering::SeqCst) {
            return false;
        }
        let mut reports = self.reports.lock();
        reports.turn(now);
        if reports.recent.is_empty() && reports.before.is_empty() {
            self.any.store(false, Ordering::SeqCst);
            return false;
        }
        let reported = [reports.recent.files.remove(key), reports.before.files.remove(key)].contains(&true);
        reported || reports.recent.too_many || reports.before.too_many
    }
}

impl Reports {
    fn turn(&mut self, now: Instant) {
        let since = now.saturating_duration_since(self.turned);
        if since < KEPT {
            return;
        }
        self.before = if since < 2 * KEPT { mem::take(&mut self.recent) } else { Reported::default() };
        self.recent = Reported::default();
        self.turned = now;
    }
}

impl UnionShared {
    /// Sends the kept notices of a file that has become known. Called when the node is in the tables: later
    /// notices find it there.
    #[expect(clippy::disallowed_methods, reason = "how long a report is remembered")]
    pub(crate) fn tell_unheard(&self, node: &UnionNode) {
        if !self.notices.unheard.any.load(Ordering::SeqCst) {
            return;
        }
        let now = Instant::now();
        let mut reported = false;
        for part in node.parts().iter() {
            reported |= self.notices.unheard.take(&(part.branch.slot, part.id), now);
        }
        if reported {
            self.tell(&Invalidation::Content { id: node.id });
        }
    }
}

/// Starts watching all branches, including later ones.
pub(crate) fn start(shared: &Arc<UnionShared>, out: &Sender<Invalidation>) {
    shared.notices.watchers.lock().push(out.clone());
    for branch in shared.branches().iter() {
        watch(shared, branch, out);
    }
}

/// Starts watching one branch.
pub(crate) fn watch(shared: &Arc<UnionShared>, branch: &Arc<Branch>, out: &Sender<Invalidation>) {
    let (sender, receiver) = channel();
    // A strong reference would keep the branch forever: the thread ends only when the branch stops sending.
    let (shared, watched, out) = (Arc::downgrade(shared), Arc::downgrade(branch), out.clone());
    let work = move || {
        let mut ignored = 0_usize;
        for notice in receiver {
            let (told, below) = match translate(&shared, &watched, notice) {
                Some(told) => told,
                None => {
                    ignored += 1;
                    if ignored < IN_VAIN {
                        continue;
                    }
                    ignored = 0;
                    (Invalidation::Attributes { id: NOBODY }, Vec::new())
                }
            };
            let Some(shared) = shared.upgrade() else { return };
            if !iter::once(told).chain(below).all(|told| shared.send(&out, told)) {
                return;
            }
        }
    };
    match std::thread::Builder::new().name(format!("union-watch-{}", branch.slot)).spawn(work) {
        Ok(_) => branch.layer.watch(sender),
        Err(error) => {
            tracing::error!(branch = branch.index(), %error, "changes that others make on a branch cannot be watched")
        }
    }
}

/// Translates a notice of a branch; the second value has the notices that follow from it.
#[expect(clippy::disallowed_methods, reason = "how long a report is remembered")]
fn translate(
    shared: &Weak<UnionShared>,
    branch: &Weak<Branch>,
    notice: Invalidation,
) -> Option<(Invalidation, Vec<Invalidation>)> {
    let (shared, branch) = (shared.upgrade()?, branch.upgrade()?);
    let find = |id: FileId| shared.nodes.by_part(branch.slot, id).map(|node| node.id);
    // A look-up enters its node first and searches for notices then; here it is the other way round, so that
    // one of the two finds the other.
    let known = |id: FileId| {
        find(id).or_else(|| {
            shared.notices.unheard.note((branch.slot, id), Instant::now());
            find(id)
        })
    };
    let told = match notice {
        Invalidation::Everything => {
            shared.listings.forget_all();
            Invalidation::Everything
        }
        // From a branch that is a union itself.
        Invalidation::Names => {
            shared.listings.forget_all();
            Invalidation::Names
        }
        Invalidation::Attributes { id } => Invalidation::Attributes { id: known(id)? },
        Invalidation::Content { id } => Invalidation::Content { id: known(id)? },
        Invalidation::Entry { parent, name } | Invalidation::Forget { parent, name } => {
            return entry(&shared, &branch, parent, name);
        }
    };
    Some((told, Vec::new()))
}

fn entry(
    shared: &UnionShared,
    branch: &Branch,
    parent: FileId,
    name: Box<[u8]>,
) -> Option<(Invalidation, Vec<Invalidation>)> {
    let node = shared.nodes.by_part(branch.slot, parent)?;
    shared.listings.forget(node.id);
    let name = match name.strip_prefix(marks::PREFIX) {
        None => name,
        Some(hidden) if marks::is_reserved(hidden) => {
            // An opaque mark or the whiteout of a long name; temporary names do not matter.
            let matters = *name == *marks::OPAQUE || name.starts_with(marks::LONG);
            return matters.then_some((Invalidation::Everything, Vec::new()));
        }
        Some(hidden) => hidden.into(),
    };
    let below = node.directory(&name).map(|directory| remade(shared, directory)).unwrap_or_default();
    Some((Invalidation::Entry { parent: node.id, name }, below))
}

/// Handles a change of the parts of a directory and of the directories in it. Their files may have existed
/// before without a notice, so the kernel has to look all names up again (there is no notice for the names of
/// one directory only), and cached listings are dropped.
fn remade(shared: &UnionShared, top: Arc<UnionNode>) -> Vec<Invalidation> {
    let (mut told, mut ahead) = (vec![Invalidation::Names], vec![top]);
    while let Some(directory) = ahead.pop() {
        shared.listings.forget(directory.id);
        told.push(Invalidation::Content { id: directory.id });
        ahead.extend(directory.directories());
    }
    told
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(ino: u64) -> Key {
        (3, crate::identity::file_of_test(ino))
    }

    #[test]
    fn reports_are_told_once_and_kept_for_a_while() {
        let unheard = Unheard::default();
        let start = Instant::now();
        assert!(!unheard.take(&key(1), start));
        unheard.note(key(1), start);
        unheard.note(key(2), start);
        assert!(!unheard.take(&key(3), start));
        assert!(unheard.take(&key(1), start + KEPT / 2));
        assert!(!unheard.take(&key(1), start + KEPT / 2));
        unheard.note(key(4), start + KEPT);
        assert!(unheard.take(&key(2), start + KEPT + KEPT / 2));
        assert!(!unheard.take(&key(4), start + 4 * KEPT));
        assert!(!unheard.any.load(Ordering::SeqCst));
    }

    #[test]
    fn after_too_many_everything_is_told() {
        let unheard = Unheard::default();
        let start = Instant::now();
        for ino in 0..=REPORTS as u64 {
            unheard.note(key(ino), start);
        }
        assert!(unheard.take(&key(u64::MAX), start));
        assert!(unheard.take(&key(u64::MAX), start + KEPT));
        assert!(!unheard.take(&key(u64::MAX), start + 3 * KEPT));
    }
}
