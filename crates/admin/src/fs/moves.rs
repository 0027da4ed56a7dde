//! Effects of changed names or properties on mounts: which file systems are unmounted, and where
//! they are mounted again.
//!
//! The order is: determine the new state (with [`Objects::pretend`]), unmount what has to move (in
//! reverse order of mounting; nothing has changed where one is in use), change, mount (parents
//! first), and give the other mounts their new options. Invariants: a file system that cannot be
//! unmounted stops the change, and those that had been unmounted for it are mounted again, parents
//! first; nothing is mounted over a directory that has other mounts of the pool below it, so that
//! none is hidden.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use nacre_pool::properties::Source;

use super::objects::{MountPointSetting, Objects};
use crate::{Imported, MountOptions, Mounted, Mounts, Refusal, What};

/// A mount that is to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mounting {
    /// The file system.
    pub id: u64,
    /// The mount point.
    pub at: PathBuf,
    /// The mount options.
    pub options: MountOptions,
}

/// Unmounted file systems, in the order in which they had been mounted.
#[derive(Clone, Debug, Default)]
pub(super) struct Gone(Vec<Mounted>);

/// Unmounted snapshots, in the order in which they had been mounted.
#[derive(Debug, Default)]
pub(super) struct GoneSnapshots(Vec<Mounted>);

impl GoneSnapshots {
    /// Mounts them again where they were: the change was refused.
    pub fn back(self, mounts: &dyn Mounts) {
        for mounted in self.0 {
            if let Err(refusal) = mounts.mount(mounted.what, &mounted.at, &mounted.options) {
                tracing::error!(at = %mounted.at.display(), %refusal, "what was unmounted for a moment cannot be mounted again");
            }
        }
    }
}

/// Ends the mounts of the chosen snapshots. Where one is in use, nothing has changed.
pub(super) fn unmount_snapshots(
    mounts: &dyn Mounts,
    chosen: impl Fn(What) -> bool,
    force: bool,
) -> Result<GoneSnapshots, Refusal> {
    let mut gone = GoneSnapshots::default();
    for mounted in mounts.mounted().into_iter().rev() {
        if mounted.what.snapshot.is_none() || !chosen(mounted.what) {
            continue;
        }
        if let Err(refusal) = mounts.unmount(mounted.what, force) {
            gone.back(mounts);
            return Err(refusal);
        }
        gone.0.insert(0, mounted);
    }
    Ok(gone)
}

/// Number of components of a path: mounting goes down, unmounting goes up.
pub(super) fn depth(path: &Path) -> usize {
    path.components().count()
}

/// Returns these file systems and all mounted below them, which have to be unmounted first.
pub(super) fn with_below(mounts: &dyn Mounts, ids: &[u64]) -> Vec<u64> {
    let all = mounts.mounted();
    let above: Vec<&Path> =
        all.iter().filter(|mounted| ids.contains(&mounted.what.dataset)).map(|mounted| mounted.at.as_path()).collect();
    let below = all
        .iter()
        .filter(|mounted| mounted.what.snapshot.is_none() && above.iter().any(|at| mounted.at.starts_with(at)));
    below.map(|mounted| mounted.what.dataset).collect()
}

/// These file systems, and those that are mounted in their directories: not those at the same places, nor what is mounted
/// in these.
pub(super) fn with_inner(mounts: &dyn Mounts, ids: &[u64]) -> Vec<u64> {
    let all = heads(mounts);
    let asked = |mounted: &Mounted| ids.contains(&mounted.what.dataset);
    let mut found = Vec::new();
    for (place, one) in all.iter().enumerate() {
        let is_in = |outer: &Mounted| {
            let mut between = all.iter().take(place).rev().take_while(|other| other.what != outer.what);
            is_below(one, outer) && !between.any(|other| other.at == outer.at && !asked(other))
        };
        if asked(one) || all.iter().any(|outer| asked(outer) && is_in(outer)) {
            found.push(one.what.dataset);
        }
    }
    found
}

/// The mounts of heads, in the order in which they were made.
fn heads(mounts: &dyn Mounts) -> Vec<Mounted> {
    let mut all = mounts.mounted();
    all.retain(|mounted| mounted.what.snapshot.is_none());
    all
}

/// Whether one mount point lies below the other.
fn is_below(one: &Mounted, other: &Mounted) -> bool {
    one.at != other.at && one.at.starts_with(&other.at)
}

/// Whether a later mount hides an earlier one: it has the same mount point, or one above it.
fn hides(later: &Mounted, earlier: &Mounted) -> bool {
    earlier.at.starts_with(&later.at)
}

/// Mode of unmounting file systems.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unmount {
    /// In all mount namespaces; refused while one is in use in any of them.
    Everywhere,
    /// Even while they are used; those that leave for the moment are refused while they are used.
    Forced,
    /// In the pool's mount namespace only: others keep their mounts.
    Here,
}

/// Unmounts file systems. Mounts that hide one of them are unmounted for the moment as well, with
/// the mounts below. Where one is in use, nothing has changed.
pub(super) fn unmount(mounts: &dyn Mounts, ids: &[u64], force: bool) -> Result<Gone, Refusal> {
    unmount_as(mounts, ids, if force { Unmount::Forced } else { Unmount::Everywhere })
}

/// Unmounts file systems in the pool's mount namespace only: where another namespace has them
/// mounted as well, they are still served there.
pub(super) fn detach(mounts: &dyn Mounts, ids: &[u64]) -> Result<Gone, Refusal> {
    unmount_as(mounts, ids, Unmount::Here)
}

fn unmount_as(mounts: &dyn Mounts, ids: &[u64], how: Unmount) -> Result<Gone, Refusal> {
    let mut leaving = heads(mounts);
    let ids: HashSet<u64> = ids.iter().copied().collect();
    let asked = |mounted: &Mounted| ids.contains(&mounted.what.dataset);
    let mut goes: Vec<bool> = Vec::with_capacity(leaving.len());
    for one in &leaving {
        let mut before = leaving.iter().zip(&goes).filter(|(_, goes)| **goes);
        // It was mounted later over one that is unmounted, or over a directory above it, or lies
        // below a mount that is unmounted for the moment.
        let lifted = before.any(|(before, _)| hides(one, before) || !asked(before) && is_below(one, before));
        goes.push(lifted || asked(one));
    }
    let mut goes = goes.into_iter();
    leaving.retain(|_| goes.next() == Some(true));
    if leaving.len() > 1 {
        let is_forced = |mounted: &Mounted| how == Unmount::Forced && asked(mounted);
        let unforced: Vec<&Mounted> = leaving.iter().filter(|mounted| !is_forced(mounted)).collect();
        are_free(mounts, &unforced)?;
    }
    let mut gone = Gone::default();
    // The last mount is on top, and nothing hides it.
    while let Some(mounted) = leaving.pop() {
        let unmounted = if how == Unmount::Here && asked(&mounted) {
            mounts.detach(mounted.what)
        } else {
            mounts.unmount(mounted.what, how == Unmount::Forced && asked(&mounted))
        };
        if let Err(refusal) = unmounted {
            gone.back(mounts);
            return Err(refusal);
        }
        gone.0.insert(0, mounted);
    }
    let lifted = gone.0.extract_if(.., |mounted| !asked(mounted)).collect();
    Gone(lifted).back(mounts);
    Ok(gone)
}

/// Asks all of them first, as far as the kernel tells: of those on which nothing else is mounted, neither below nor over
/// them. One that leaves alone need not be asked: its unmount answers the same.
fn are_free(mounts: &dyn Mounts, leaving: &[&Mounted]) -> Result<(), Refusal> {
    let all = heads(mounts);
    let hidden = mounts.hidden();
    let alone = leaving
        .iter()
        .filter(|one| !hidden.contains(&one.what.dataset) && !all.iter().any(|other| is_below(other, one)))
        .filter(|one| {
            let mut later = all.iter().rev().take_while(|other| other.what != one.what);
            !later.any(|other| other.at == one.at)
        });
    alone.into_iter().try_for_each(|mounted| mounts.is_free(mounted.what))
}

impl Gone {
    /// Mounts everything again where it was, parents first: the change was refused.
    pub fn back(self, mounts: &dyn Mounts) {
        for failed in mount(mounts, self.others(&[]).collect()) {
            tracing::error!(failed, "what was unmounted for a moment cannot be mounted again");
        }
    }

    /// Whether this file system was unmounted.
    pub fn has(&self, id: u64) -> bool {
        self.0.iter().any(|mounted| mounted.what.dataset == id)
    }

    /// Previous mounts of the file systems that are not in `than`.
    pub fn others(&self, than: &[u64]) -> impl Iterator<Item = Mounting> {
        let others = self.0.iter().filter(move |mounted| !than.contains(&mounted.what.dataset));
        others.map(|mounted| Mounting {
            id: mounted.what.dataset,
            at: mounted.at.clone(),
            options: mounted.options.clone(),
        })
    }

    /// Removes the mount points that the mounts of the file systems in `made` have created, where
    /// they are empty: paths that were not set by hand.
    pub fn tidy(&self, mounts: &dyn Mounts, made: &HashSet<u64>) {
        for mounted in self.0.iter().rev().filter(|mounted| made.contains(&mounted.what.dataset)) {
            mounts.tidy(&mounted.at);
        }
    }
}

/// Makes mounts, parents first; returns a sentence for each that failed.
pub(super) fn mount(mounts: &dyn Mounts, mut wanted: Vec<Mounting>) -> Vec<String> {
    wanted.sort_by_key(|mounting| depth(&mounting.at));
    wanted.into_iter().filter_map(|mounting| mount_one(mounts, mounting).err()).map(sentence).collect()
}

fn sentence(refusal: Refusal) -> String {
    if refusal.next.is_empty() { refusal.what } else { format!("{}\n{}", refusal.what, refusal.next) }
}

/// Makes a mount. It would hide mounts of the pool below its mount point: these are unmounted for the moment.
pub(super) fn mount_one(mounts: &dyn Mounts, mounting: Mounting) -> Result<(), Refusal> {
    let Mounting { id, at, options } = mounting;
    let below = heads(mounts).into_iter().filter(|mounted| mounted.at != at && mounted.at.starts_with(&at));
    let below: Vec<u64> = below.map(|mounted| mounted.what.dataset).collect();
    let gone = if below.is_empty() { Ok(Gone::default()) } else { unmount(mounts, &below, false) };
    let gone = gone.map_err(|refusal| Refusal {
        what: format!("cannot mount '{}': {}", options.source, refusal.what),
        ..refusal
    })?;
    let mounted = mounts.mount(What::head(id), &at, &options);
    gone.back(mounts);
    mounted
}

/// Mounts the hidden ones of these file systems again, with those below them; returns a sentence
/// for each that failed.
pub(super) fn uncover(mounts: &dyn Mounts, ids: &[u64]) -> Vec<String> {
    let mut hidden = mounts.hidden();
    hidden.retain(|id| ids.contains(id));
    let mut failed = Vec::new();
    for id in hidden {
        match unmount(mounts, &with_below(mounts, &[id]), false) {
            Ok(gone) => failed.extend(mount(mounts, gone.others(&[]).collect())),
            Err(refusal) => failed.push(sentence(refusal)),
        }
    }
    failed
}

/// The mounts that these file systems should have by their properties.
pub(super) fn wanted(objects: &mut Objects<'_>, ids: &[u64]) -> Result<Vec<Mounting>, Refusal> {
    let mut found = Vec::new();
    for id in ids {
        if let Some(at) = objects.wanted(*id)? {
            found.push(Mounting { id: *id, at, options: objects.options(*id)? });
        }
    }
    Ok(found)
}

/// Returns the file systems whose mount points are inherited or default.
pub(super) fn unchosen(objects: &mut Objects<'_>, ids: &[u64]) -> Result<HashSet<u64>, Refusal> {
    let mut found = HashSet::new();
    for id in ids {
        if matches!(objects.mountpoint(*id)?.source, Source::Default | Source::Inherited(_)) {
            found.insert(*id);
        }
    }
    Ok(found)
}

/// Returns the file systems that are mounted by mount(8) (`legacy`): they keep their mounts.
fn by_hand(objects: &mut Objects<'_>, ids: &[u64]) -> Result<HashSet<u64>, Refusal> {
    let mut found = HashSet::new();
    for id in ids {
        if objects.place(*id)? == MountPointSetting::Legacy {
            found.insert(*id);
        }
    }
    Ok(found)
}

/// Whether a mounted file system keeps its mount point, by the state in [`Objects`].
fn stays(objects: &mut Objects<'_>, id: u64, at: &Path) -> Result<bool, Refusal> {
    Ok(objects.place(id)? == MountPointSetting::At(at.to_owned()) && objects.effective(id, "canmount")?.value != "off")
}

/// A change of names or properties, and how it is applied.
pub(super) struct Change<'a> {
    /// The file systems whose mount points or options may change.
    pub affected: Vec<u64>,
    /// Unmount even those in use.
    pub force: bool,
    /// Makes the mount points before the change, which is refused if one cannot be made; the text
    /// begins that refusal.
    pub places: Option<&'a str>,
    /// Enters the new state in the objects.
    pub foresee: &'a dyn Fn(&mut Objects<'_>) -> Result<(), Refusal>,
    /// Applies the change.
    pub apply: &'a dyn Fn() -> Result<(), Refusal>,
}

/// Makes the directories of mounts that are to be made, except mount points inside of other new
/// mounts: these lie in the file systems.
fn make_places(mounts: &dyn Mounts, coming: &[Mounting]) -> Result<(), Refusal> {
    let is_within = |one: &Mounting| coming.iter().any(|other| one.at != other.at && one.at.starts_with(&other.at));
    coming.iter().filter(|one| !is_within(one)).try_for_each(|one| mounts.make_place(&one.at, &one.options))
}

/// Applies a change with its effects on mounts; returns a sentence for each mount that failed afterwards.
pub(super) fn change(pool: &Imported, mounts: &dyn Mounts, change: &Change<'_>) -> Result<Vec<String>, Refusal> {
    let ids = &change.affected;
    let (before, made, leaving, legacy, coming) = {
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
        let coming = if change.places.is_some() { wanted(&mut objects, &leaving)? } else { Vec::new() };
        (before, made, leaving, legacy, coming)
    };
    let gone = unmount(mounts, &with_below(mounts, &leaving), change.force)?;
    let doing = change.places.unwrap_or_default();
    let placed = make_places(mounts, &coming)
        .map_err(|refusal| Refusal { what: format!("{doing}: {}", refusal.what), ..refusal });
    if let Err(refusal) = placed.and_then(|()| (change.apply)()) {
        mounts.not_mounted();
        gone.back(mounts);
        return Err(refusal);
    }
    gone.tidy(mounts, &made);
    let mut after = wanted(&mut Objects::now(pool, mounts), ids)?;
    // A file system that was unmounted by hand stays unmounted.
    after.retain(|mounting| gone.has(mounting.id) || !before.contains(&mounting.id));
    let moved: Vec<u64> = ids.iter().copied().filter(|id| !legacy.contains(id)).collect();
    after.extend(gone.others(&moved));
    let failed = mount(mounts, after);
    mounts.not_mounted();
    refresh(pool, mounts, ids)?;
    Ok(failed)
}

/// Updates the options of the mounts of these file systems from their properties.
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
