//! Directories that each mount reaches, and the check whether two mounts in one process would conflict. Pure except
//! for [`of`].
//!
//! There are two conflicts. Changes by one mount in a directory that another mount watches are noticed there only
//! if another process made them. And a process that holds files of its own mounts open waits for itself when it is
//! killed.

use crate::report::path_text;
use nacre_stack::spec::{LayerSpec, StackSpec};
use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

/// A source directory of a mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reach {
    /// Path of the directory, resolved.
    pub directory: PathBuf,
    /// Device and inode number, if they can be read.
    pub id: Option<(u64, u64)>,
    /// Whether the mount may change files in it.
    pub writes: bool,
    /// Directories in it that the mount does not show.
    pub hidden: Vec<PathBuf>,
}

impl Reach {
    /// Reads the identity of a directory.
    pub fn of(directory: &Path, writes: bool) -> Reach {
        // A directory that cannot be accessed cannot be mounted either; mounting reports why.
        let directory = fs::canonicalize(directory).unwrap_or_else(|_| directory.to_owned());
        let id = fs::metadata(&directory).ok().map(|data| (data.dev(), data.ino()));
        Reach { directory, id, writes, hidden: Vec::new() }
    }
}

/// Mount point and reach of a mount.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MountReach {
    /// Mount point, resolved.
    pub mountpoint: PathBuf,
    /// Device number of the mount, once it is made.
    pub device: Option<u64>,
    /// Source directories of the mount.
    pub reach: Vec<Reach>,
}

/// Returns the source directories of a stack.
pub fn of(spec: &StackSpec, read_only: bool) -> Vec<Reach> {
    let reach = |stack: &StackSpec, writes: bool| {
        let hidden = match stack.layers.first() {
            Some(LayerSpec::Host(host)) => host.without.clone(),
            _ => Vec::new(),
        };
        let directories = stack.directories().into_iter();
        let reached =
            directories.map(|directory| Reach { hidden: hidden.clone(), ..Reach::of(directory, writes && !read_only) });
        reached.collect::<Vec<_>>()
    };
    match spec.layers.first() {
        Some(LayerSpec::Union(union)) => {
            union.branch.0.iter().flat_map(|branch| reach(&branch.stack(union), branch.mode.writable())).collect()
        }
        _ => reach(spec, true),
    }
}

/// Returns why two mounts cannot be served by one process; `None` where they can.
pub fn conflict(one: &MountReach, other: &MountReach) -> Option<String> {
    let met = one.reach.iter().find_map(|a| other.reach.iter().find_map(|b| meets(a, b)));
    met.or_else(|| within(one, other)).or_else(|| within(other, one))
}

/// Returns a conflict where one mount writes in a directory of the other.
fn meets(a: &Reach, b: &Reach) -> Option<String> {
    let same = a.id.is_some() && a.id == b.id;
    let contains = |outer: &Reach, inner: &Reach| {
        inner.directory.starts_with(&outer.directory)
            && !outer.hidden.iter().any(|hidden| inner.directory.starts_with(hidden))
    };
    let overlap = same || contains(a, b) || contains(b, a);
    (overlap && (a.writes || b.writes)).then(|| {
        let by = if a.writes { a } else { b };
        format!("another mount of that process uses what is changed in {}", path_text(&by.directory))
    })
}

/// Returns a conflict where one mount would contain the other.
fn within(one: &MountReach, other: &MountReach) -> Option<String> {
    let shows = |reach: &&Reach| {
        let mounted = reach.id.is_some_and(|(device, _)| Some(device) == other.device);
        let below = other.mountpoint != reach.directory
            && other.mountpoint.starts_with(&reach.directory)
            && !reach.hidden.iter().any(|hidden| other.mountpoint.starts_with(hidden));
        mounted || below || (other.device.is_some() && reach.directory.starts_with(&other.mountpoint))
    };
    let reach = one.reach.iter().find(shows)?;
    Some(format!(
        "{} would show the mount at {} of that process",
        path_text(&reach.directory),
        path_text(&other.mountpoint)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(mountpoint: &str, device: Option<u64>, reach: &[(&str, bool)]) -> MountReach {
        let reach = reach.iter().map(|(directory, writes)| Reach {
            directory: PathBuf::from(directory),
            id: None,
            writes: *writes,
            hidden: Vec::new(),
        });
        MountReach { mountpoint: PathBuf::from(mountpoint), device, reach: reach.collect() }
    }

    #[test]
    fn mounts_that_meet_stay_apart() {
        let first = place("/m", Some(7), &[("/upper", true), ("/lower", false)]);
        for (mountpoint, reach, apart) in [
            ("/n", &[("/upper2", true), ("/lower", false)][..], false),
            ("/n", &[("/lower", true)], true),
            ("/n", &[("/upper", false)], true),
            ("/n", &[("/upper/in", false)], true),
            ("/n", &[("/", false)], true),
            ("/n", &[("/lower/in", false)], false),
            ("/n", &[("/lower/in", true)], true),
            ("/n", &[("/uppermost", true)], false),
            // Mounted over a source of the first mount: that hides the source from others, not from the first mount.
            ("/lower", &[("/lower", false)], false),
            ("/lower/in", &[("/other", false)], true),
            ("/n", &[("/m/in", false)], true),
            ("/n", &[("/m", false)], true),
            ("/m/in", &[("/other", true)], false),
        ] {
            let second = place(mountpoint, None, reach);
            assert_eq!(
                conflict(&first, &second).is_some(),
                apart,
                "{mountpoint} {reach:?}: {:?}",
                conflict(&first, &second)
            );
            assert_eq!(conflict(&second, &first).is_some(), apart, "{mountpoint} {reach:?}");
        }
    }

    #[test]
    fn what_a_mount_does_not_show_is_no_conflict() {
        let written = place("/m", None, &[("/home/state/a/upper", true)]);
        let mut whole = place("/n", None, &[("/home", false)]);
        assert!(conflict(&written, &whole).is_some());
        whole.reach[0].hidden = vec![PathBuf::from("/home/state")];
        assert!(conflict(&written, &whole).is_none() && conflict(&whole, &written).is_none());
        let shown = place("/home/state/a/view", None, &[("/other", true)]);
        assert!(conflict(&shown, &whole).is_none());
    }

    #[test]
    fn directories_are_known_by_other_names() {
        let with = |device, inode, writes| Reach {
            directory: PathBuf::from(format!("/{device}/{inode}")),
            id: Some((1, 5)),
            writes,
            hidden: Vec::new(),
        };
        let one = MountReach { mountpoint: PathBuf::from("/m"), device: Some(9), reach: vec![with(1, 2, true)] };
        let bound = MountReach { mountpoint: PathBuf::from("/n"), device: None, reach: vec![with(3, 4, false)] };
        assert!(conflict(&one, &bound).unwrap().contains("/1/2"));
        let elsewhere =
            Reach { directory: PathBuf::from("/bound"), id: Some((9, 1)), writes: false, hidden: Vec::new() };
        let through = MountReach { reach: vec![elsewhere], ..bound };
        assert!(conflict(&through, &one).unwrap().contains("would show the mount at /m"));
    }
}
