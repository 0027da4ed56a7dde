//! The policies themselves. Pure: branches and random numbers in, an index out; reasons are recorded in the
//! notes.

use super::{BranchView, Bytes, CopyUpPolicy, CreatePolicy, Dice, Notes, Placement, Preference, Reach};
use nacre_vfs::{Errno, Result};
use std::cmp::{Ordering, Reverse};

/// A branch that may be chosen, with its position.
type Candidate<'a> = (usize, &'a BranchView);

/// Chooses the branch for a new file.
pub(super) fn create(
    policy: CreatePolicy,
    placement: &Placement<'_>,
    dice: Dice,
    notes: &mut impl Notes,
) -> Result<usize> {
    let branches = placement.branches;
    let open = admitted(branches, notes)?;
    let chosen = match policy {
        CreatePolicy::TopDownParent => top_down_parent(branches, notes)?,
        CreatePolicy::TopDownMostFree { low, .. } => match open.iter().find(|(_, branch)| branch.free > low) {
            Some((index, branch)) => {
                notes.because(|| {
                    format!("the highest with more than {} free (it has {})", Bytes(low), Bytes(branch.free))
                });
                for (other, branch) in open.iter().take_while(|(other, _)| other < index) {
                    notes.refuse(*other, || format!("{} free, not more than {}", Bytes(branch.free), Bytes(low)));
                }
                *index
            }
            None => most_free(&open, notes)?,
        },
        CreatePolicy::RoundRobin => in_turn(&open, dice, notes)?,
        CreatePolicy::MostFree { .. } => most_free(&open, notes)?,
        CreatePolicy::MostFreeRoundRobin { low, .. } => most_free_or_in_turn(&open, low, dice, notes)?,
        CreatePolicy::ParentMostFree { .. } => parent_most_free(branches, &open, notes)?,
        CreatePolicy::ParentMostFreeRoundRobin { low, .. } => {
            let best = parent_most_free(branches, &open, notes)?;
            if free(branches, best) < low { most_free_or_in_turn(&open, low, dice, notes)? } else { best }
        }
        CreatePolicy::Pool(reach, preference) => {
            let reached = reached(reach, preference, &open, notes)?;
            prefer(preference, &reached, dice, notes)?
        }
    };
    within(branches, chosen, placement.limit, notes)
}

/// Limits a choice to the branches on which the file would be visible.
pub(super) fn within(branches: &[BranchView], chosen: usize, limit: usize, notes: &mut impl Notes) -> Result<usize> {
    if chosen <= limit {
        return Ok(chosen);
    }
    notes.because(|| {
        "the lowest on which it would be seen: a whiteout or an opaque directory hides what is below".to_owned()
    });
    for below in limit + 1..branches.len() {
        notes.refuse(below, || {
            "it would not be seen there: a whiteout or an opaque directory above hides it".to_owned()
        });
    }
    nearest_above(branches, limit, notes)
}

fn free(branches: &[BranchView], index: usize) -> u64 {
    branches.get(index).map_or(0, |branch| branch.free)
}

/// The branches that take new files.
fn admitted<'a>(branches: &'a [BranchView], notes: &mut impl Notes) -> Result<Vec<Candidate<'a>>> {
    let mut open = Vec::with_capacity(branches.len());
    let mut error = Errno::EROFS;
    for (index, branch) in branches.iter().enumerate() {
        match branch.admits() {
            Ok(()) => open.push((index, branch)),
            Err(refused) => {
                refuse(index, branch, refused, notes);
                if refused == Errno::ENOSPC {
                    error = refused;
                }
            }
        }
    }
    if open.is_empty() {
        notes.because(|| "nothing new may be put on any branch".to_owned());
        return Err(error);
    }
    Ok(open)
}

fn refuse(index: usize, branch: &BranchView, error: Errno, notes: &mut impl Notes) {
    notes.refuse(index, || match error {
        Errno::ENOSPC => format!("{} free, less than its minimum of {}", Bytes(branch.free), Bytes(branch.min_free)),
        _ if branch.writable => "nothing new is put there (nc)".to_owned(),
        _ => "read-only".to_owned(),
    });
}

/// The first branch at or above a position that takes new files.
fn nearest_above(branches: &[BranchView], from: usize, notes: &mut impl Notes) -> Result<usize> {
    let mut error = Errno::EROFS;
    for (index, branch) in branches.iter().enumerate().take(from.saturating_add(1)).rev() {
        match branch.admits() {
            Ok(()) => return Ok(index),
            Err(refused) => {
                refuse(index, branch, refused, notes);
                if refused == Errno::ENOSPC {
                    error = refused;
                }
            }
        }
    }
    notes.because(|| "nothing new may be put on any branch from there up".to_owned());
    Err(error)
}

fn top_down_parent(branches: &[BranchView], notes: &mut impl Notes) -> Result<usize> {
    // At least one branch has the directory: it was found. Without a directory, all branches count.
    let top = branches.iter().position(|branch| branch.parent_exists).unwrap_or(branches.len().saturating_sub(1));
    let chosen = match nearest_above(branches, top, notes) {
        // A new file is visible on a branch below as well.
        Err(Errno::EROFS) => match branches.iter().skip(top + 1).position(|branch| branch.admits().is_ok()) {
            Some(after) => top + 1 + after,
            None => return Err(Errno::EROFS),
        },
        other => other?,
    };
    notes.because(|| match chosen.cmp(&top) {
        Ordering::Equal => "the highest that has the directory".to_owned(),
        Ordering::Less => "the next writable one above the highest that has the directory".to_owned(),
        Ordering::Greater => "the next writable one below the highest that has the directory; none above is".to_owned(),
    });
    for (at, branch) in branches.iter().enumerate().take(chosen).skip(top + 1) {
        if let Err(refused) = branch.admits() {
            refuse(at, branch, refused, notes);
        }
    }
    for above in 0..chosen {
        notes.refuse(above, || "it does not have the directory".to_owned());
    }
    for below in chosen + 1..branches.len() {
        notes.refuse(below, || "one above has the directory".to_owned());
    }
    Ok(chosen)
}

fn in_turn(open: &[Candidate<'_>], dice: Dice, notes: &mut impl Notes) -> Result<usize> {
    let count = open.len() as u64;
    // From the bottom up.
    let place = count.checked_sub(1).ok_or(Errno::EROFS)? - dice.turn % count;
    let (chosen, _) = usize::try_from(place).ok().and_then(|place| open.get(place)).ok_or(Errno::EROFS)?;
    notes.because(|| format!("its turn (number {} of {count}, counted from the bottom)", count - place));
    for (other, _) in open.iter().filter(|(other, _)| other != chosen) {
        notes.refuse(*other, || "not its turn".to_owned());
    }
    Ok(*chosen)
}

fn most_free(open: &[Candidate<'_>], notes: &mut impl Notes) -> Result<usize> {
    // Of equal ones the last, which is the lower.
    best(
        open,
        notes,
        |(index, branch)| (branch.free, *index),
        |branch| format!("{} free", Bytes(branch.free)),
        "most free",
    )
}

fn most_free_or_in_turn(open: &[Candidate<'_>], low: u64, dice: Dice, notes: &mut impl Notes) -> Result<usize> {
    if open.iter().all(|(_, branch)| branch.free < low) {
        return in_turn(open, dice, notes);
    }
    most_free(open, notes)
}

fn parent_most_free(branches: &[BranchView], open: &[Candidate<'_>], notes: &mut impl Notes) -> Result<usize> {
    let parents: Vec<Candidate<'_>> = open.iter().copied().filter(|(_, branch)| branch.parent_exists).collect();
    if parents.is_empty() {
        return top_down_parent(branches, notes);
    }
    for (index, _) in open.iter().filter(|(_, branch)| !branch.parent_exists) {
        notes.refuse(*index, || "it does not have the directory".to_owned());
    }
    prefer(Preference::MostFree, &parents, Dice::default(), notes)
}

/// The branches among which a mergerfs policy chooses.
fn reached<'a>(
    reach: Reach,
    preference: Preference,
    open: &[Candidate<'a>],
    notes: &mut impl Notes,
) -> Result<Vec<Candidate<'a>>> {
    let deepest = open.iter().map(|(_, branch)| branch.parent_depth).max().unwrap_or(0);
    let (reached, rest): (Vec<_>, Vec<_>) = open.iter().copied().partition(|(_, branch)| match reach {
        // A branch without the directory has no time of its changes.
        Reach::Anywhere => preference != Preference::Newest || branch.parent_exists,
        Reach::Existing => branch.parent_exists,
        Reach::MostSpecific => branch.parent_depth == deepest,
    });
    for (index, _) in rest {
        notes.refuse(index, || match reach {
            Reach::MostSpecific => "others have more of the directory's path".to_owned(),
            _ => "it does not have the directory".to_owned(),
        });
    }
    if reached.is_empty() {
        notes.because(|| "no branch that has the directory admits anything new".to_owned());
        return Err(Errno::EROFS);
    }
    Ok(reached)
}

fn prefer(preference: Preference, of: &[Candidate<'_>], dice: Dice, notes: &mut impl Notes) -> Result<usize> {
    // Of equal ones the higher, throughout.
    let free = |branch: &BranchView| format!("{} free", Bytes(branch.free));
    let used = |branch: &BranchView| format!("{} of {} used", Bytes(branch.used), Bytes(branch.total));
    let up = |index: usize| Reverse(index);
    match preference {
        Preference::First => best(of, notes, |(index, _)| up(*index), |_| "lower".to_owned(), "the highest"),
        Preference::MostFree => best(of, notes, |(index, branch)| (branch.free, up(*index)), free, "most free"),
        Preference::LeastFree => {
            best(of, notes, |(index, branch)| (Reverse(branch.free), up(*index)), free, "least free")
        }
        Preference::LeastUsed => {
            best(of, notes, |(index, branch)| (Reverse(branch.used), up(*index)), used, "least used")
        }
        Preference::LeastUsedShare => {
            best(of, notes, |(index, branch)| (Reverse(share(branch)), up(*index)), used, "the smallest part used")
        }
        Preference::Newest => {
            let changed = |branch: &BranchView| format!("the directory changed there at {}", branch.parent_changed.sec);
            best(
                of,
                notes,
                |(index, branch)| (branch.parent_changed, up(*index)),
                changed,
                "the directory changed there last",
            )
        }
        Preference::Random => {
            let place = dice.random % (of.len() as u64).max(1);
            let (chosen, _) = usize::try_from(place).ok().and_then(|place| of.get(place)).ok_or(Errno::EROFS)?;
            thrown(of, *chosen, notes, "any");
            Ok(*chosen)
        }
        Preference::RandomByFree => {
            let sum: u128 = of.iter().map(|(_, branch)| u128::from(branch.free)).sum();
            let mut left = (u128::from(dice.random) * sum) >> 64;
            let hit = of.iter().find(|(_, branch)| match left.checked_sub(u128::from(branch.free)) {
                Some(rest) => {
                    left = rest;
                    false
                }
                None => true,
            });
            // Nothing is free anywhere: the storage will report it.
            let (chosen, _) = hit.or_else(|| of.first()).ok_or(Errno::EROFS)?;
            thrown(of, *chosen, notes, "any, in proportion to what is free");
            Ok(*chosen)
        }
    }
}

/// Used share of all bytes, in units of 2^-64.
fn share(branch: &BranchView) -> u128 {
    match u128::from(branch.total) {
        0 => u128::MAX,
        total => (u128::from(branch.used) << 64) / total,
    }
}

fn thrown(of: &[Candidate<'_>], chosen: usize, notes: &mut impl Notes, rule: &str) {
    notes.because(|| format!("{rule}: the dice said so"));
    for (other, branch) in of.iter().filter(|(other, _)| *other != chosen) {
        notes.refuse(*other, || format!("the dice said otherwise ({} free)", Bytes(branch.free)));
    }
}

/// The candidate with the greatest key.
fn best<K: Ord>(
    of: &[Candidate<'_>],
    notes: &mut impl Notes,
    key: impl Fn(&Candidate<'_>) -> K,
    figure: impl Fn(&BranchView) -> String,
    rule: &str,
) -> Result<usize> {
    let (chosen, branch) = of.iter().max_by_key(|candidate| key(candidate)).ok_or(Errno::EROFS)?;
    notes.because(|| format!("{rule} ({})", figure(branch)));
    for (other, branch) in of.iter().filter(|(other, _)| other != chosen) {
        notes.refuse(*other, || figure(branch));
    }
    Ok(*chosen)
}

/// Chooses the branch for the copy of a file on `source`.
pub(super) fn copy_up(
    policy: CopyUpPolicy,
    branches: &[BranchView],
    source: usize,
    notes: &mut impl Notes,
) -> Result<usize> {
    if branches.get(source).is_some_and(|branch| branch.writable) {
        notes.because(|| "it is there, and can be changed there".to_owned());
        return Ok(source);
    }
    for below in source + 1..branches.len() {
        notes.refuse(below, || "below the file".to_owned());
    }
    let above = branches.get(..source).ok_or(Errno::EROFS)?;
    let open = |index: &usize| above.get(*index).is_some_and(|branch| branch.creates);
    let nearest = |from: usize| (0..from.min(source)).rev().find(open);
    let chosen = match policy {
        CopyUpPolicy::TopDownParent => {
            let top = above.iter().position(|branch| branch.parent_exists).unwrap_or(source);
            notes.because(|| "the highest that has the directory, or the next writable one above that".to_owned());
            nearest(top + 1)
        }
        CopyUpPolicy::BottomUpParent => {
            notes.because(|| "the next above that has the directory, or the next writable one".to_owned());
            let parent = (0..source)
                .rev()
                .find(|index| open(index) && above.get(*index).is_some_and(|branch| branch.parent_exists));
            parent.or_else(|| nearest(source))
        }
        CopyUpPolicy::BottomUp => {
            notes.because(|| "the next writable one above".to_owned());
            nearest(source)
        }
    };
    for (index, branch) in above.iter().enumerate() {
        if !branch.creates {
            refuse(index, branch, Errno::EROFS, notes);
        }
    }
    notes.refuse(source, || "read-only".to_owned());
    chosen.ok_or_else(|| {
        notes.because(|| "nothing may be put on any branch above it".to_owned());
        Errno::EROFS
    })
}
