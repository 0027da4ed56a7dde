//! Checks whether a union can be mounted: its branches are directories, none lies in another one, and they are
//! apart from the mount point.
//!
//! Called before anything is mounted, for `nacre union` and for every stack with a union in it.

use crate::{
    failure::{Exit, Failure},
    report::path_text,
};
use nacre_stack::spec::{BranchSource, BranchSpec, LayerSpec, StackSpec};
use nacre_union::{BRANCHES_MAX, check_overlap, escape_path, matching_directories};
use std::{
    fs,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

/// Longest first column of the mount table: the kernel takes a page of options, and half of it for one option.
const NAME_MAX: usize = 2000;

/// Refuses a stack whose unions cannot be mounted at this mount point. The mount point is resolved.
///
/// # Errors
/// A branch is missing or no directory, or lies in another one, contains the mount point, or lies below it.
pub fn check(spec: &StackSpec, mountpoint: &Path) -> Result<(), Failure> {
    for layer in &spec.layers {
        if let LayerSpec::Union(union) = layer {
            let mut plain = Vec::new();
            for spec in &union.branch.0 {
                let hidden = without(spec);
                let hides = |path: &Path| hidden.iter().any(|hidden| path.starts_with(hidden));
                let real = spec.directories().into_iter().map(branch).collect::<Result<Vec<_>, _>>()?;
                if hidden.is_empty() {
                    plain.extend(real);
                    continue;
                }
                // Directories that a branch hides are not contained in it.
                for other in union.branch.0.iter().filter(|other| *other != spec).flat_map(BranchSpec::directories) {
                    let other = branch(other)?;
                    if !hides(&other) {
                        overlap(&[&real[..], &[other]].concat(), mountpoint)?;
                    }
                }
                overlap(&real, mountpoint)?;
                if !hides(mountpoint) {
                    apart(&real, mountpoint)?;
                }
            }
            apart(&plain, mountpoint)?;
        }
    }
    Ok(())
}

fn overlap(branches: &[PathBuf], mountpoint: &Path) -> Result<(), Failure> {
    check_overlap(branches, Some(mountpoint)).map_err(|error| {
        Failure::new(error.to_string())
            .exit(Exit::Failure)
            .next("branches are directories apart from each other and from the mount point")
    })
}

/// Returns the directories that a branch hides.
fn without(spec: &BranchSpec) -> &[PathBuf] {
    match &spec.source {
        BranchSource::Stack(StackSpec { layers }) => match layers.first() {
            Some(LayerSpec::Host(host)) => &host.without,
            _ => &[],
        },
        BranchSource::Directory(_) => &[],
    }
}

/// Has lower layers hide the directories of the upper one, and the mount point, which are files of theirs where a
/// layer is `/`: container engines mount that.
pub fn hide(spec: &mut StackSpec, mountpoint: &Path) {
    for layer in &mut spec.layers {
        let LayerSpec::Union(union) = layer else { continue };
        let written = union.branch.0.iter().filter(|branch| branch.mode.writable()).flat_map(BranchSpec::directories);
        let mut own: Vec<PathBuf> =
            written.chain([mountpoint]).filter_map(|path| fs::canonicalize(path).ok()).collect();
        own.sort();
        own.dedup();
        for branch in union.branch.0.iter_mut().filter(|branch| !branch.mode.writable()) {
            let BranchSource::Stack(StackSpec { layers }) = &mut branch.source else { continue };
            let Some(LayerSpec::Host(host)) = layers.first_mut() else { continue };
            let Ok(real) = fs::canonicalize(&host.source) else { continue };
            let within: Vec<PathBuf> =
                own.iter().filter(|path| path.starts_with(&real) && **path != real).cloned().collect();
            if !within.is_empty() {
                (host.source, host.without) = (real, within);
            }
        }
    }
}

/// Replaces each branch that is a pattern (`/mnt/disk*`) by all matching directories, in the order of their names,
/// as mergerfs does. A directory whose name is the pattern itself takes precedence; a pattern without a match
/// stays, and is reported as missing.
pub fn expand(spec: &mut StackSpec) {
    for layer in &mut spec.layers {
        if let LayerSpec::Union(union) = layer {
            let branches = std::mem::take(&mut union.branch.0);
            union.branch.0 = branches.into_iter().flat_map(matching).collect();
        }
    }
}

fn matching(branch: BranchSpec) -> Vec<BranchSpec> {
    let BranchSource::Directory(pattern) = &branch.source else { return vec![branch] };
    let found = matching_directories(pattern);
    found.into_iter().map(|place| BranchSpec::directory(place, branch.mode.clone())).collect()
}

/// Returns a directory of a branch, resolved.
///
/// # Errors
/// The path does not exist, or is not a directory.
pub fn branch(named: &Path) -> Result<PathBuf, Failure> {
    crate::opening::directory(named, "branch", "branches are directories that are there")
}

/// Refuses branches that would show a file twice, or the union within itself. All paths are resolved. A union may
/// be mounted over one of its branches.
///
/// # Errors
/// The failure names the two paths.
/// Names the two paths.
pub fn apart(branches: &[PathBuf], mountpoint: &Path) -> Result<(), Failure> {
    overlap(branches, mountpoint)?;
    match branches.iter().find(|branch| mountpoint.starts_with(branch) && *branch != mountpoint) {
        Some(branch) => {
            let what = format!(
                "the mount point {} lies inside the branch {}: the union would contain itself",
                path_text(mountpoint),
                path_text(branch)
            );
            Err(Failure::new(what)
                .next("choose a mount point elsewhere, or the branch itself: then the union is mounted over it"))
        }
        None => Ok(()),
    }
}

/// Returns the source for the mount table, with resolved branches; a missing branch as it is written.
pub fn name(branches: &[BranchSpec]) -> String {
    let mut text = crate::plan::UNION_PREFIX.to_owned();
    for (place, spec) in branches.iter().enumerate() {
        let name = match spec.directories().as_slice() {
            [only] => branch(only).unwrap_or_else(|_| only.to_path_buf()),
            _ => spec.name(),
        };
        let name = path_text(Path::new(&escape_path(&name)));
        let divider = if place == 0 { "" } else { ":" };
        if text.len() + name.len() > NAME_MAX {
            text.push_str(&format!("{divider}...({} of {BRANCHES_MAX} possible)", branches.len()));
            break;
        }
        text.push_str(&format!("{divider}{name}={}", spec.mode));
    }
    text
}

/// Returns the branches after [`crate::plan::UNION_PREFIX`], as in the first column of fstab; `None` without the
/// prefix.
pub fn prefixed(first: &std::ffi::OsStr) -> Option<&std::ffi::OsStr> {
    first.as_bytes().strip_prefix(crate::plan::UNION_PREFIX.as_bytes()).map(std::ffi::OsStr::from_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn branches_and_the_mount_point_lie_apart() {
        for (branches, mountpoint, says) in [
            (&["/a", "/b"][..], "/m", None),
            (&["/a", "/ab"], "/m", None),
            (&["/a", "/b"], "/a", None),
            (&["/a", "/b"], "/bc", None),
            (&["/a", "/a"], "/m", Some("given twice")),
            (&["/a", "/a/b"], "/m", Some("lies inside the branch /a")),
            (&["/a", "/m/b"], "/m", Some("lies inside the mount point /m")),
            (&["/a", "/b"], "/b/m", Some("the union would contain itself")),
            (&["/"], "/m", Some("the union would contain itself")),
        ] {
            let branches: Vec<PathBuf> = branches.iter().map(PathBuf::from).collect();
            let found = apart(&branches, Path::new(mountpoint)).err().map(|failure| failure.what);
            assert_eq!(found.is_some(), says.is_some(), "{branches:?} {mountpoint}: {found:?}");
            assert!(found.unwrap_or_default().contains(says.unwrap_or_default()), "{branches:?} {mountpoint}");
        }
    }

    #[test]
    fn patterns_are_directories() {
        let scratch = tempfile::tempdir().unwrap();
        for name in ["disk1", "disk2", "disk10", ".disk3", "other", "odd[x]", "d/data", "e/data"] {
            fs::create_dir_all(scratch.path().join(name)).unwrap();
        }
        fs::write(scratch.path().join("disk4"), "").unwrap();
        let expanded = |text: &str| {
            let place = scratch.path().display();
            let mut spec = StackSpec::from_line(format!("union:{place}/{text}").as_bytes()).unwrap();
            expand(&mut spec);
            let LayerSpec::Union(union) = &spec.layers[0] else { panic!("{spec}") };
            let name = |branch: &BranchSpec| {
                branch.name().strip_prefix(scratch.path()).unwrap().display().to_string()
                    + "="
                    + &branch.mode.to_string()
            };
            union.branch.0.iter().map(name).collect::<Vec<_>>()
        };
        assert_eq!(expanded("disk*=rw"), ["disk1=rw", "disk10=rw", "disk2=rw"]);
        assert_eq!(expanded("disk?"), ["disk1=rw", "disk2=rw"]);
        assert_eq!(expanded("[de]/data=ro"), ["d/data=ro", "e/data=ro"]);
        assert_eq!(expanded("none*"), ["none*=rw"]);
        assert_eq!(expanded("odd[x]"), ["odd[x]=rw"]);
    }
}
