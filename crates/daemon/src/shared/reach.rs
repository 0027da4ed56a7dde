//! Which mounts can be served by one process: what each reaches, and whether two of them would meet
//! there. Pure but for [`of`].
//!
//! Two things keep mounts apart. What one mount changes in a directory that another one watches is
//! only noticed there when another process did it. And a process that has files of its own mounts
//! open waits for itself when it is killed.

use crate::report::path_text;
use nacre_stack::spec::{LayerSpec, StackSpec};
use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

/// A directory that a mount shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reach {
    /// Where, resolved.
    pub directory: PathBuf,
    /// Device and inode number, where it can be asked.
    pub id: Option<(u64, u64)>,
    /// The mount may change what is in it.
    pub writes: bool,
}

impl Reach {
    /// Looks at a directory.
    pub fn of(directory: &Path, writes: bool) -> Reach {
        // What cannot be looked at cannot be mounted either, and mounting says why.
        let directory = fs::canonicalize(directory).unwrap_or_else(|_| directory.to_owned());
        let id = fs::metadata(&directory).ok().map(|data| (data.dev(), data.ino()));
        Reach { directory, id, writes }
    }
}

/// Where a mount is, and what it reaches.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MountReach {
    /// Where it is mounted, resolved.
    pub mountpoint: PathBuf,
    /// The device number of what is mounted there, once it is.
    pub device: Option<u64>,
    /// What it shows.
    pub reach: Vec<Reach>,
}

/// The directories of a stack.
pub fn of(spec: &StackSpec, read_only: bool) -> Vec<Reach> {
    let directories = spec.layers.iter().flat_map(|layer| match layer {
        LayerSpec::Host(host) => vec![(host.source.as_path(), true)],
        LayerSpec::Union(union) => {
            let branches = union.branch.0.iter();
            branches
                .flat_map(|branch| {
                    branch.directories().into_iter().map(|directory| (directory, branch.mode.writable()))
                })
                .collect()
        }
        _ => Vec::new(),
    });
    directories.map(|(directory, writes)| Reach::of(directory, writes && !read_only)).collect()
}

/// Why two mounts cannot be served by one process; `None` where they can.
pub fn conflict(one: &MountReach, other: &MountReach) -> Option<String> {
    let met = one.reach.iter().find_map(|a| other.reach.iter().find_map(|b| meets(a, b)));
    met.or_else(|| within(one, other)).or_else(|| within(other, one))
}

/// One of the two writes where the other one reads.
fn meets(a: &Reach, b: &Reach) -> Option<String> {
    let same = a.id.is_some() && a.id == b.id;
    let overlap = same || a.directory.starts_with(&b.directory) || b.directory.starts_with(&a.directory);
    (overlap && (a.writes || b.writes)).then(|| {
        let by = if a.writes { a } else { b };
        format!("another mount of that process uses what is changed in {}", path_text(&by.directory))
    })
}

/// One shows the other, or something in it.
fn within(one: &MountReach, other: &MountReach) -> Option<String> {
    let shows = |reach: &&Reach| {
        let mounted = reach.id.is_some_and(|(device, _)| Some(device) == other.device);
        let below = other.mountpoint != reach.directory && other.mountpoint.starts_with(&reach.directory);
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
            // Over what the first one shows: that is hidden from others, not from it.
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
    fn directories_are_known_by_other_names() {
        let with = |device, inode, writes| Reach {
            directory: PathBuf::from(format!("/{device}/{inode}")),
            id: Some((1, 5)),
            writes,
        };
        let one = MountReach { mountpoint: PathBuf::from("/m"), device: Some(9), reach: vec![with(1, 2, true)] };
        let bound = MountReach { mountpoint: PathBuf::from("/n"), device: None, reach: vec![with(3, 4, false)] };
        assert!(conflict(&one, &bound).unwrap().contains("/1/2"));
        let elsewhere = Reach { directory: PathBuf::from("/bound"), id: Some((9, 1)), writes: false };
        let through = MountReach { reach: vec![elsewhere], ..bound };
        assert!(conflict(&through, &one).unwrap().contains("would show the mount at /m"));
    }
}
