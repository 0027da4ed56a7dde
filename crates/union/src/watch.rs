//! Changes that others make on branches, told in the union's own terms.
//!
//! One thread for each branch takes what the branch sends, translates identities and passes it on;
//! it ends when the branch stops sending. A file nobody holds needs no notice, as no cache knows
//! it; but somebody may be about to hold it: a look-up that is under way has read its attributes
//! before the change and makes it known after the notice. So what was reported of unknown files is
//! kept for a while, and told when one of them becomes known ([`Unheard`]).

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

/// How long a report of an unknown file is kept at least: longer than any look-up takes that is not
/// stuck.
const KEPT: Duration = Duration::from_secs(10);

/// The most reports in that time that are kept one by one. With more, every file that becomes known
/// is told to have changed: right, if dearer.
const REPORTS: usize = 8192;

/// After so many changes of files that nobody knows, the door is told of one, as it counts what is
/// heard in vain (`Layer::rest`).
const IN_VAIN: usize = 8;

/// No file.
const NOBODY: FileId = FileId { fs: u64::MAX, ino: u64::MAX, generation: u64::MAX };

/// A file as the branch in a slot knows it.
type Key = (u8, FileId);

/// Reports of files that nobody held when they came.
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
        // Before whoever notes looks for the file once more: see `translate`.
        self.any.store(true, Ordering::SeqCst);
    }

    /// Whether a file was reported before it became known; told once.
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
    /// A file has become known. Called when the tables have it: from then on its notices find it.
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

/// Starts watching all branches, and those that will come.
pub(crate) fn start(shared: &Arc<UnionShared>, out: &Sender<Invalidation>) {
    shared.notices.watchers.lock().push(out.clone());
    for branch in shared.branches().iter() {
        watch(shared, branch, out);
    }
}

/// Starts watching one branch.
pub(crate) fn watch(shared: &Arc<UnionShared>, branch: &Arc<Branch>, out: &Sender<Invalidation>) {
    let (sender, receiver) = channel();
    // The branch itself would be kept for ever by whoever waits for its last word.
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

/// A notice of a branch as the union tells it, and what follows from it.
#[expect(clippy::disallowed_methods, reason = "how long a report is remembered")]
fn translate(
    shared: &Weak<UnionShared>,
    branch: &Weak<Branch>,
    notice: Invalidation,
) -> Option<(Invalidation, Vec<Invalidation>)> {
    let (shared, branch) = (shared.upgrade()?, branch.upgrade()?);
    let find = |id: FileId| shared.nodes.by_part(branch.slot, id).map(|node| node.id);
    // Whoever makes a file known enters it first and looks for reports then; here it is the other
    // way round, so that one of the two finds the other.
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
        // Of a branch that is a union itself.
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
            // An opaque mark or the whiteout of a long name; of temporary names nobody needs to
            // know.
            let matters = *name == *marks::OPAQUE || name.starts_with(marks::LONG);
            return matters.then_some((Invalidation::Everything, Vec::new()));
        }
        Some(hidden) => hidden.into(),
    };
    let below = node.directory(&name).map(|directory| remade(shared, directory)).unwrap_or_default();
    Some((Invalidation::Entry { parent: node.id, name }, below))
}

/// A directory may be made of other directories of branches from now on, and so may those in it.
/// What is in these may have been there before, and need not be heard of; so the kernel is to ask
/// for all names again (it can be told so of all names only), and listings go.
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
