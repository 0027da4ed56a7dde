//! Checks which mounts and pools can survive their process, and adapts their settings.
//!
//! Called by [`crate::guardian`] before it makes anything, and for branches that are added later.

use crate::{
    failure::Failure,
    plan::{MountPlan, Transport},
    pool::start::{How, Start},
};
use nacre_stack::spec::{BranchSource, BranchSpec, LayerSpec, StackSpec, Writes};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// Checks that a mount of these layers can survive its process.
///
/// # Errors
/// The reason why not.
pub fn check(spec: &StackSpec, mountpoint: &Path, plan: &MountPlan) -> Result<(), Failure> {
    let refused = |why: &str| Err(Failure::usage(format!("--survive is not possible here: {why}")));
    let door = &plan.door;
    if door.transport == Transport::Uring {
        return refused("requests under way end with the process where they come by io_uring; --transport=device");
    }
    let reasons = [
        (plan.daemon.is_some(), "it serves one mount, and --daemon=NAME several"),
        (door.lock_forwarding, "locks on files of the source end with the process"),
        // A process killed while it waits for an answer of its own mount could not end, and nobody would answer.
        (door.notify_watchers, "the process would use the mount itself, to raise events"),
        (door.no_open || door.immutable, "files are opened without a request"),
    ];
    if let Some((_, why)) = reasons.iter().find(|(applies, _)| *applies) {
        return refused(why);
    }
    if let Some(why) = unable(spec, mountpoint, true) {
        return refused(&why);
    }
    Ok(())
}

/// Returns why layers cannot survive their process. `whole`: of a mount, not of a branch.
fn unable(spec: &StackSpec, mountpoint: &Path, whole: bool) -> Option<String> {
    let is_cage = |layer: &LayerSpec| matches!(layer, LayerSpec::Cage(_));
    spec.layers.iter().find_map(|layer| match layer {
        LayerSpec::Remap(remap) => {
            // The worker would read them through the mount that it is to serve.
            let files = [&remap.map_passwd, &remap.map_passwd_rev, &remap.map_group, &remap.map_group_rev];
            let inside = |file: &PathBuf| fs::canonicalize(file).is_ok_and(|file| file.starts_with(mountpoint));
            files
                .into_iter()
                .flatten()
                .any(inside)
                .then(|| "its rules are read from a file below the mount point".to_owned())
        }
        LayerSpec::Union(_) if !whole => Some("a branch is a union itself".to_owned()),
        LayerSpec::Union(_) if spec.layers.iter().any(is_cage) => Some("a cage lies over a union".to_owned()),
        LayerSpec::Union(union) => {
            let by_name = union.options().is_ok_and(|options| options.link_cow || options.symlinkify.is_some());
            let of_branch = |branch: &BranchSpec| match &branch.source {
                BranchSource::Directory(_) => None,
                BranchSource::Stack(stack) => unable(stack, mountpoint, false),
            };
            by_name
                .then(|| "with link-cow and symlinkify files are known by numbers of this process".to_owned())
                .or_else(|| union.branch.0.iter().find_map(of_branch))
        }
        LayerSpec::Cage(_) if !whole => Some("a branch has a cage".to_owned()),
        LayerSpec::Mem(_) => Some(format!("a layer \"{}\" does not outlive its process", layer.name())),
        LayerSpec::Host(_)
        | LayerSpec::Throttle(_)
        | LayerSpec::Trace(_)
        | LayerSpec::Shift(_)
        | LayerSpec::OverrideStat(_)
        | LayerSpec::Cage(_)
        | LayerSpec::Readonly(_) => None,
    })
}

/// Checks that a branch can be added to a mount that survives its process.
///
/// # Errors
/// The reason why not.
pub fn check_branch(branch: &BranchSpec, mountpoint: &Path) -> Result<(), Failure> {
    let BranchSource::Stack(stack) = &branch.source else { return Ok(()) };
    match unable(stack, mountpoint, false) {
        Some(why) => Err(Failure::usage(format!("the mount was made with --survive, which is not possible so: {why}"))),
        None => Ok(()),
    }
}

/// Checks that a pool can survive the process that owns it.
///
/// # Errors
/// The reason why not.
pub fn check_pool(start: &Start) -> Result<(), Failure> {
    let refused = |why: &str| Err(Failure::usage(format!("--survive is not possible here: {why}")));
    if let How::Import { read_only: true, .. } = &start.how {
        return refused("what is imported read-only has nothing to lose");
    }
    Ok(())
}

/// Sets the cages to write-through, so that each write is charged when it happens. Write-back has room reserved for
/// dirty pages of the kernel, and once the process is dead nobody would know how much.
///
/// # Errors
/// Write-back was requested explicitly.
pub fn write_through(spec: &mut StackSpec) -> Result<(), Failure> {
    for layer in &mut spec.layers {
        let LayerSpec::Cage(cage) = layer else { continue };
        if cage.writes == Writes::Collected {
            let what = "--survive is not possible here: the kernel would collect writes, for which room is promised";
            return Err(Failure::usage(what).next("--writes=through"));
        }
        cage.writes = Writes::Through;
    }
    Ok(())
}
