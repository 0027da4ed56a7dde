//! Cages of a mount that this process serves: checks before the mount, directories of their accounting, and their
//! reports.
//!
//! Called by [`crate::serve`], for `nacre cage` and for every other stack with cages in it.

use super::{
    change::{InodeChange, SizeChange},
    find, place,
    report::{CageReport, CollectingReport, DirectoryReport, DroppedReport, RefusedReport, UserReport},
    state,
};
use crate::{
    control::{self, Request},
    failure::Failure,
    figures::About,
    mountinfo,
    report::{Report, path_text, printable},
    runtime::Whose,
};
use nacre_cage::{Cage, ledger::Limits};
use nacre_fuse::Status;
use nacre_layers::{context::Context, size::Size};
use nacre_stack::spec::{CageSpec, LayerSpec, StackSpec, Writes};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// Refuses a stack whose cages cannot be enforced at this mount point. The mount point is resolved.
///
/// # Errors
/// Limits that are not understood; a directory that is caged already, or that lies within its own mount or contains
/// it; accounting in the directory itself.
pub fn check(spec: &StackSpec, mountpoint: &Path, context: &Context) -> Result<(), Failure> {
    for cage in spec.cages() {
        cage.limits(context).map_err(|error| Failure::new(format!("the cage cannot be made: {error}")))?;
    }
    let Some(directory) = caged(spec)? else { return Ok(()) };
    place::apart(&directory, mountpoint)?;
    for cage in spec.cages() {
        if let Some(state) = &cage.state {
            state::outside(state, &directory, mountpoint)?;
        }
    }
    place::uncaged(&directory, &find::known()?, &mountinfo::read()?)
}

/// Ends a detached cage of the same directory that only other mount namespaces still hold: it limits nothing here,
/// and two cages of one directory would not count each other's writes.
///
/// # Errors
/// Files in it are open.
/// Files in it are open.
pub fn take_over(spec: &StackSpec) -> Result<(), Failure> {
    let Some(directory) = caged(spec)? else { return Ok(()) };
    let (text, own) = (path_text(&directory), rustix::process::geteuid().as_raw());
    let is_left =
        |report: &Report| report.uid == own && report.cages.iter().any(|cage| !cage.attached && cage.directory == text);
    for peer in control::find(&Whose::Ours).peers.into_iter().filter(|peer| is_left(&peer.report)) {
        peer.ask(&Request::Unmount { lazy: false })?;
        tracing::warn!(
            "the cage that {text} had was unmounted, but held by other mount namespaces: it has been ended there, too"
        );
    }
    Ok(())
}

/// Gives every cage without one a directory for its accounting, and sets the real path of the source directory in
/// `spec`; returns warnings, and the directories that are new.
///
/// # Errors
/// A directory cannot be made.
pub fn keep_accounts(spec: &mut StackSpec, mountpoint: &Path) -> Result<(Vec<String>, Vec<state::Begun>), Failure> {
    let (mut warnings, mut begun) = (Vec::new(), Vec::new());
    let Some(directory) = caged(spec)? else { return Ok((warnings, begun)) };
    if let Some(LayerSpec::Host(host)) = spec.layers.first_mut() {
        host.source.clone_from(&directory);
    }
    for (place, cage) in spec.cages_mut().into_iter().enumerate() {
        match &mut cage.state {
            Some(named) => {
                crate::opening::absolute(named)?;
                state::named(named, &directory, mountpoint)?;
            }
            none => {
                let kept = state::of_cage(&directory, mountpoint, place)?;
                if let Some(why) = kept.lost_at_reboot {
                    warnings.push(format!(
                        "the accounting of the cage will not survive a reboot ({why}): after one, everything is counted anew"
                    ));
                }
                begun.extend(kept.begun);
                *none = Some(kept.directory);
            }
        }
    }
    Ok((warnings, begun))
}

/// Returns the source directory of a stack with cages, resolved; `None` where there is no cage, or no directory.
fn caged(spec: &StackSpec) -> Result<Option<PathBuf>, Failure> {
    match spec.layers.first() {
        Some(LayerSpec::Host(host)) if !spec.cages().is_empty() => place::directory(&host.source).map(Some),
        _ => Ok(None),
    }
}

/// Changes the limits of a cage in the specification; returns the new limits for the running cage.
///
/// # Errors
/// No such cage, or an invalid limit.
pub fn resized(
    spec: &mut StackSpec,
    which: usize,
    size: Option<SizeChange>,
    inodes: Option<InodeChange>,
    context: &Context,
) -> Result<Limits, Failure> {
    let cage = spec.cages_mut().into_iter().nth(which).ok_or_else(|| Failure::new("this mount has no such cage"))?;
    if let Some(change) = size {
        let present = cage.size.as_deref().and_then(|size| size.parse::<Size>().ok()).map(Size::bytes);
        cage.size = Some(Size::new(change.of(present, "the cage")?).to_string());
    }
    if let Some(change) = inodes {
        cage.inodes = change.limit();
    }
    cage.limits(context).map_err(|error| Failure::new(format!("the limits stay as they were: {error}")))
}

/// Returns the reports of the cages of a mount, from the bottom up.
pub fn reports(cages: &[Arc<Cage>], spec: &StackSpec, status: &Status, about: &About) -> Vec<CageReport> {
    let directory = match spec.layers.first() {
        Some(LayerSpec::Host(host)) => path_text(&host.source),
        Some(LayerSpec::Union(union)) => {
            let writable = union.branch.0.iter().find(|branch| branch.mode.writable());
            writable.map_or_else(|| "union".to_owned(), |branch| path_text(&branch.name()))
        }
        Some(leaf) => leaf.name().to_owned(),
        None => String::new(),
    };
    let specs = spec.cages();
    cages.iter().zip(specs).map(|(cage, spec)| report(cage.report(), spec, &directory, status, about)).collect()
}

fn report(
    told: nacre_cage::CageReport,
    spec: &CageSpec,
    directory: &str,
    status: &Status,
    about: &About,
) -> CageReport {
    let accounting = accounting(&told);
    let mode = mode(&told).to_owned();
    let user = |user: nacre_cage::UserReport| UserReport {
        user: user_name(user.uid),
        uid: user.uid,
        used: user.used,
        limit: user.limit,
    };
    let group = |group: nacre_cage::DirReport| DirectoryReport {
        path: printable(group.path.as_bytes()),
        used: group.used,
        limit: group.limit,
    };
    CageReport {
        directory: directory.to_owned(),
        mountpoint: path_text(&status.mountpoint),
        engine: "fuse".to_owned(),
        engine_reason: about.engine_reason.clone(),
        mode,
        attached: status.attached,
        when_full: spec.when_full.word().to_owned(),
        limit: told.limit,
        used: told.used,
        free: told.free.unwrap_or_default(),
        inode_limit: told.inode_limit,
        inodes: Some(told.inodes),
        soft: told.soft,
        users: told.users.into_iter().map(user).collect(),
        directories: told.dirs.into_iter().map(group).collect(),
        refused: RefusedReport {
            size: told.refused.bytes,
            inodes: told.refused.inodes,
            user: told.refused.user,
            directory: told.refused.dir,
        },
        dropped: DroppedReport { files: told.dropped.files, bytes: told.dropped.bytes },
        collecting: Some(CollectingReport {
            // Without a request for write-back, no reason is missing.
            why_not: status.writeback.refusal.clone().filter(|_| spec.writes != Writes::Through),
            files: status.writeback.files as u64,
            announced: status.writeback.announced,
            refused: status.writeback.refused,
            recalls: status.writeback.recalls,
            most_held: status.writeback.dirty_limit,
        }),
        accounting,
        start: told.start,
        recounts: told.recount.done,
        corrected: told.recount.corrected,
        pid: std::process::id(),
        uid: rustix::process::geteuid().as_raw(),
        uptime: about.started.elapsed().as_secs(),
        notes: Vec::new(),
    }
}

fn mode(told: &nacre_cage::CageReport) -> &'static str {
    match (told.writes.as_str(), told.unannounced, told.settled) {
        ("collected", true, _) => "collected",
        ("collected", false, true) => "announced",
        ("collected", false, false) => "settling",
        _ => "through",
    }
}

fn accounting(told: &nacre_cage::CageReport) -> String {
    match (&told.recount, told.start.as_str()) {
        (recount, "lost") if recount.done == 0 => "last known, being counted anew",
        (recount, _) if recount.running => "exact, being checked",
        (recount, _) if recount.due => "to be counted anew",
        _ => "exact",
    }
    .to_owned()
}

fn user_name(uid: u32) -> String {
    let known = nacre_sys::accounts::user_by_id(uid).ok().flatten();
    known.map_or_else(|| uid.to_string(), |user| printable(&user.name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::Exit;

    fn stack(line: &str) -> StackSpec {
        StackSpec::from_line(line.as_bytes()).unwrap()
    }

    #[test]
    fn a_resize_changes_one_cage_and_nothing_else() {
        let context = Context::system().unwrap();
        let mut spec = stack("mem | cage:size=1G,soft=50% | remap:force-user=0 | cage:size=10M,inodes=5");
        let limits = resized(&mut spec, 0, Some(SizeChange::Grow(1 << 30)), None, &context).unwrap();
        assert_eq!((limits.bytes, limits.soft, limits.inodes), (Some(2 << 30), Some(1 << 30), None));
        let limits = resized(&mut spec, 1, None, Some(InodeChange::None), &context).unwrap();
        assert_eq!((limits.bytes, limits.inodes), (Some(10 << 20), None));
        assert_eq!(spec.to_line(), "mem | cage:size=2G,soft=50% | remap:force-user=0 | cage:size=10M");
        assert!(resized(&mut spec, 2, None, None, &context).is_err());
        let failure = resized(&mut spec, 1, Some(SizeChange::Shrink(10 << 20)), None, &context).unwrap_err();
        assert_eq!(failure.exit, Exit::Failure);
        assert_eq!(spec.to_line(), "mem | cage:size=2G,soft=50% | remap:force-user=0 | cage:size=10M");
    }

    #[test]
    fn a_stack_without_cages_has_nothing_to_hold() {
        let context = Context::system().unwrap();
        for line in ["mem", "host:/no/such/place", "mem | cage:size=1G"] {
            assert_eq!(check(&stack(line), Path::new("/"), &context), Ok(()), "{line}");
        }
        assert_eq!(
            check(&stack("host:/no/such/place | cage:size=1G"), Path::new("/"), &context).unwrap_err().exit,
            Exit::NotFound
        );
        assert!(check(&stack("mem | cage:size=10X"), Path::new("/"), &context).unwrap_err().what.contains("10X"));
    }
}
