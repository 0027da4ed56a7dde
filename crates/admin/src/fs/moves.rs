//! What a change of names or properties means for mounts: which file systems have to leave their places, and which go where.
//!
//! The order is: see what will be (with [`Objects::pretend`]), unmount what leaves its place (children first; nothing has changed where one is in use),
//! change, mount (parents first), and give the rest their new options. Invariant: what cannot be unmounted stops the change, and what had been unmounted
//! for it is mounted again.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use nacre_pool::properties::Source;

use super::objects::{Objects, Place};
use crate::{Imported, MountOptions, Mounted, Mounts, Refusal, What};

/// A mount that is to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mounting {
    /// The file system.
    pub id: u64,
    /// Where.
    pub at: PathBuf,
    /// How.
    pub options: MountOptions,
}

/// What has been unmounted, in the order in which it can be mounted again.
#[derive(Clone, Debug, Default)]
pub(super) struct Gone(Vec<Mounted>);

/// How deep a path lies: whoever mounts goes down, whoever unmounts goes up.
pub(super) fn depth(path: &Path) -> usize {
    path.components().count()
}

/// These file systems, and whatever is mounted below where they are: that has to leave before them.
pub(super) fn with_below(mounts: &dyn Mounts, ids: &[u64]) -> Vec<u64> {
    let all = mounts.mounted();
    let above: Vec<&Path> = all.iter().filter(|mounted| ids.contains(&mounted.what.dataset)).map(|mounted| mounted.at.as_path()).collect();
    let below = all.iter().filter(|mounted| mounted.what.snapshot.is_none() && above.iter().any(|at| mounted.at.starts_with(at)));
    below.map(|mounted| mounted.what.dataset).collect()
}

/// Unmounts heads, those deepest first. Where one is in use, the others are mounted again.
pub(super) fn unmount(mounts: &dyn Mounts, ids: &[u64], force: bool) -> Result<Gone, Refusal> {
    let mut leaving: Vec<Mounted> = mounts.mounted();
    leaving.retain(|mounted| mounted.what.snapshot.is_none() && ids.contains(&mounted.what.dataset));
    // Of two on one place the later one is on top: it is behind the other in the order of mounts.
    leaving.sort_by_key(|mounted| depth(&mounted.at));
    let mut gone = Gone::default();
    while let Some(mounted) = leaving.pop() {
        if let Err(refusal) = mounts.unmount(mounted.what, force) {
            gone.back(mounts);
            return Err(refusal);
        }
        gone.0.push(mounted);
    }
    gone.0.reverse();
    Ok(gone)
}

impl Gone {
    /// Mounts everything again where it was: the change was refused.
    pub fn back(self, mounts: &dyn Mounts) {
        for mounted in self.0 {
            if let Err(refusal) = mounts.mount(mounted.what, &mounted.at, &mounted.options) {
                tracing::error!(at = %mounted.at.display(), %refusal, "what was unmounted for a change that was refused cannot be mounted again");
            }
        }
    }

    /// Whether this file system is among them.
    pub fn has(&self, id: u64) -> bool {
        self.0.iter().any(|mounted| mounted.what.dataset == id)
    }

    /// The mounts of those of them that others than these are, as they were.
    pub fn others(&self, than: &[u64]) -> impl Iterator<Item = Mounting> {
        let others = self.0.iter().filter(move |mounted| !than.contains(&mounted.what.dataset));
        others.map(|mounted| Mounting { id: mounted.what.dataset, at: mounted.at.clone(), options: mounted.options.clone() })
    }

    /// Removes the directories of those mounts that had made them, where they are empty: places that nobody chose by hand.
    pub fn tidy(&self, made: &HashSet<u64>) {
        for mounted in self.0.iter().rev().filter(|mounted| made.contains(&mounted.what.dataset)) {
            match std::fs::remove_dir(&mounted.at) {
                Ok(()) => {}
                // It has content of its own, or was there for another purpose.
                Err(error) => tracing::debug!(at = %mounted.at.display(), %error, "the directory of a mount stays"),
            }
        }
    }
}

/// Makes mounts, parents first; what cannot be mounted is answered as sentences.
pub(super) fn mount(mounts: &dyn Mounts, mut wanted: Vec<Mounting>) -> Vec<String> {
    wanted.sort_by_key(|mounting| depth(&mounting.at));
    let mut failed = Vec::new();
    for Mounting { id, at, options } in wanted {
        if let Err(refusal) = mounts.mount(What::head(id), &at, &options) {
            failed.push(if refusal.next.is_empty() { refusal.what } else { format!("{}\n{}", refusal.what, refusal.next) });
        }
    }
    failed
}

/// The mounts that these file systems ask for by their properties.
pub(super) fn wanted(objects: &mut Objects<'_>, ids: &[u64]) -> Result<Vec<Mounting>, Refusal> {
    let mut found = Vec::new();
    for id in ids {
        if let Some(at) = objects.wanted(*id)? {
            found.push(Mounting { id: *id, at, options: objects.options(*id)? });
        }
    }
    Ok(found)
}

/// Of these file systems those whose places nobody chose for themselves.
pub(super) fn unchosen(objects: &mut Objects<'_>, ids: &[u64]) -> Result<HashSet<u64>, Refusal> {
    let mut found = HashSet::new();
    for id in ids {
        if matches!(objects.mountpoint(*id)?.source, Source::Default | Source::Inherited(_)) {
            found.insert(*id);
        }
    }
    Ok(found)
}

/// Of these file systems those that are mounted by mount(8): they stay where that has put them.
fn by_hand(objects: &mut Objects<'_>, ids: &[u64]) -> Result<HashSet<u64>, Refusal> {
    let mut found = HashSet::new();
    for id in ids {
        if objects.place(*id)? == Place::Legacy {
            found.insert(*id);
        }
    }
    Ok(found)
}

/// Whether a mounted file system belongs where it is, by what [`Objects`] believes.
fn stays(objects: &mut Objects<'_>, id: u64, at: &Path) -> Result<bool, Refusal> {
    Ok(objects.place(id)? == Place::At(at.to_owned()) && objects.effective(id, "canmount")?.value != "off")
}

/// What is changed, and how it is done.
pub(super) struct Change<'a> {
    /// The file systems whose places or options may be others afterwards.
    pub affected: Vec<u64>,
    /// Unmount even what is in use.
    pub force: bool,
    /// Makes the objects what they will be.
    pub foresee: &'a dyn Fn(&mut Objects<'_>) -> Result<(), Refusal>,
    /// Does it.
    pub apply: &'a dyn Fn() -> Result<(), Refusal>,
}

/// Carries out a change with its consequences for mounts; what could not be mounted afterwards is answered as sentences.
pub(super) fn change(pool: &Imported, mounts: &dyn Mounts, change: &Change<'_>) -> Result<Vec<String>, Refusal> {
    let ids = &change.affected;
    let (before, made, leaving, legacy) = {
        let mut objects = Objects::now(pool, mounts);
        let before: HashSet<u64> = wanted(&mut objects, ids)?.into_iter().map(|mounting| mounting.id).collect();
        let made = unchosen(&mut objects, ids)?;
        let mut legacy = by_hand(&mut objects, ids)?;
        (change.foresee)(&mut objects)?;
        let still = by_hand(&mut objects, ids)?;
        legacy.retain(|id| still.contains(id));
        let mut leaving = Vec::new();
        for id in ids {
            let Some(at) = objects.mounted(*id).map(|mounted| mounted.at.clone()) else { continue };
            if !legacy.contains(id) && !stays(&mut objects, *id, &at)? {
                leaving.push(*id);
            }
        }
        (before, made, leaving, legacy)
    };
    let gone = unmount(mounts, &with_below(mounts, &leaving), change.force)?;
    if let Err(refusal) = (change.apply)() {
        gone.back(mounts);
        return Err(refusal);
    }
    gone.tidy(&made);
    let mut after = wanted(&mut Objects::now(pool, mounts), ids)?;
    // Whoever unmounted a file system by hand wants it to stay so.
    after.retain(|mounting| gone.has(mounting.id) || !before.contains(&mounting.id));
    let moved: Vec<u64> = ids.iter().copied().filter(|id| !legacy.contains(id)).collect();
    after.extend(gone.others(&moved));
    let failed = mount(mounts, after);
    refresh(pool, mounts, ids)?;
    Ok(failed)
}

/// Gives the mounts among these file systems the options that they have by their properties now.
pub(super) fn refresh(pool: &Imported, mounts: &dyn Mounts, ids: &[u64]) -> Result<(), Refusal> {
    let mut changed = Vec::new();
    {
        let mut objects = Objects::now(pool, mounts);
        for id in ids {
            let Some(now) = objects.mounted(*id).map(|mounted| mounted.options.clone()) else { continue };
            let wanted = objects.options(*id)?;
            if wanted != now {
                changed.push((*id, wanted));
            }
        }
    }
    changed.into_iter().try_for_each(|(id, options)| mounts.remount(What::head(id), &options))
}
