//! Branches that are missing when a union is mounted, where its options allow that (`nofail`,
//! `branches-mount-timeout=`): they are held back, and are added at their position when their directory appears, or
//! the file system that fstab mounts there.
//!
//! [`hold_back`] is called before a union is built, [`watch`] once it serves. Invariant: a branch is in the union
//! or held back, never both.

use crate::{
    clock,
    failure::{Exit, Failure},
    fstab::{self, FstabLine},
    mountinfo,
    report::path_text,
};
use nacre_stack::spec::{BranchSpec, LayerSpec, StackSpec};
use nacre_union::{BranchMode, UnionOptions};
use parking_lot::Mutex;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{Mode, OFlags},
};
use serde::{Deserialize, Serialize};
use std::{
    ffi::OsString,
    fs,
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

/// Longest interval of polling: the kernel notifies of a new mount, but not of a new directory.
const LOOK: Duration = Duration::from_secs(1);

/// A branch that is missing at present.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "(OsString, Vec<OsString>)", into = "(OsString, Vec<OsString>)")]
pub struct Absent {
    /// The missing branch.
    pub branch: BranchSpec,
    /// Branches above it in the list that it comes from.
    above: Vec<BranchSpec>,
}

/// Missing branches of one mount.
pub type Waiting = Mutex<Vec<Absent>>;

/// Removes missing branches from a stack, where its union allows that; with `wait`, waits for them first, up to the
/// union's timeout.
///
/// # Errors
/// Required branches are missing, or all are.
pub fn hold_back(spec: &mut StackSpec, mountpoint: &Path, wait: bool) -> Result<Vec<Absent>, Failure> {
    let Some(union) =
        spec.layers.iter_mut().find_map(|layer| if let LayerSpec::Union(union) = layer { Some(union) } else { None })
    else {
        return Ok(Vec::new());
    };
    let UnionOptions { may_be_missing, mount_timeout, .. } =
        union.options().map_err(|error| Failure::usage(error.to_string()))?;
    if !may_be_missing && mount_timeout.is_zero() {
        return Ok(Vec::new());
    }
    let deadline = clock::now() + mount_timeout;
    let missing = loop {
        let mounts = Mounts::now()?;
        let unmounted = |branch: &&BranchSpec| !mounts.has(branch) || !mounts.is_elsewhere(branch, mountpoint);
        let awaited: Vec<&BranchSpec> = union.branch.0.iter().filter(unmounted).collect();
        if mount_timeout.is_zero() || !wait || awaited.is_empty() || clock::now() >= deadline {
            // With `nofail`, a plain directory without a planned mount is used as it is.
            let missing = awaited.iter().filter(|branch| !may_be_missing || !mounts.has(branch));
            break missing.map(|branch| (*branch).clone()).collect::<Vec<_>>();
        }
        a_change(deadline.saturating_duration_since(clock::now()).min(LOOK));
    };
    let names = || missing.iter().map(|branch| path_text(&branch.name())).collect::<Vec<_>>().join(", ");
    if !missing.is_empty() && !may_be_missing && wait {
        let what = format!("not mounted within {} seconds: {}", mount_timeout.as_secs(), names());
        return Err(Failure::new(what)
            .exit(Exit::NotFound)
            .next("without branches-mount-timeout-fail the union comes without them"));
    }
    if !may_be_missing {
        return Ok(Vec::new());
    }
    if missing.len() == union.branch.0.len() {
        return Err(none_of(&union.branch.0));
    }
    let all = std::mem::take(&mut union.branch.0);
    let mut absent = Vec::new();
    for (place, branch) in all.iter().enumerate() {
        if missing.contains(branch) {
            tracing::warn!(branch = %path_text(&branch.name()), "a branch is missing: it comes in when it is there");
            absent.push(Absent { branch: branch.clone(), above: all.iter().take(place).cloned().collect() });
        } else {
            union.branch.0.push(branch.clone());
        }
    }
    Ok(absent)
}

/// Checks that one branch of a union at least exists, unless branches are waited for.
///
/// # Errors
/// All are missing.
pub fn find_any(spec: &StackSpec) -> Result<(), Failure> {
    let union =
        spec.layers.iter().find_map(|layer| if let LayerSpec::Union(union) = layer { Some(union) } else { None });
    let Some(union) = union else { return Ok(()) };
    let options = union.options().map_err(|error| Failure::usage(error.to_string()))?;
    let exists = |branch: &BranchSpec| branch.directories().into_iter().all(Path::is_dir);
    if options.mount_timeout.is_zero() && !union.branch.0.iter().any(exists) {
        return Err(none_of(&union.branch.0));
    }
    Ok(())
}

/// Makes the failure for a union of which all branches are missing.
fn none_of(branches: &[BranchSpec]) -> Failure {
    let names: Vec<String> = branches.iter().map(|branch| path_text(&branch.name())).collect();
    let what = format!("no branch is there: {}", names.join(", "));
    Failure::new(what).exit(Exit::NotFound).next("a union needs one branch at least")
}

impl From<Absent> for (OsString, Vec<OsString>) {
    fn from(absent: Absent) -> (OsString, Vec<OsString>) {
        (absent.branch.text(), absent.above.iter().map(BranchSpec::text).collect())
    }
}

impl TryFrom<(OsString, Vec<OsString>)> for Absent {
    type Error = String;

    fn try_from((branch, above): (OsString, Vec<OsString>)) -> Result<Absent, String> {
        let parse = |text: OsString| BranchSpec::parse(text.as_bytes(), BranchMode::rw());
        Ok(Absent { branch: parse(branch)?, above: above.into_iter().map(parse).collect::<Result<_, _>>()? })
    }
}

impl Absent {
    /// Returns its position in a union with these branches: below the last of those that preceded it in the list.
    fn place_in(&self, present: &[BranchSpec]) -> usize {
        let same = |one: &BranchSpec, other: &BranchSpec| one.source == other.source;
        present.iter().rposition(|there| self.above.iter().any(|above| same(above, there))).map_or(0, |last| last + 1)
    }
}

/// Starts a thread that looks for missing branches, until there are none any more or the union has ended (both
/// functions return `None` then). `add` gets the branch, and a function that returns its position among the present
/// branches; a branch that it cannot add is tried again.
///
/// # Errors
/// No thread can be started.
/// No thread can be had.
pub fn watch(
    add: impl Fn(&Absent, &dyn Fn(&[BranchSpec]) -> usize) -> Option<()> + Send + 'static,
    all: impl Fn() -> Option<Vec<Absent>> + Send + 'static,
) -> Result<(), Failure> {
    let look = move || {
        loop {
            let Some(waiting) = all() else { return };
            if waiting.is_empty() {
                return;
            }
            let mounts = match Mounts::now() {
                Ok(mounts) => mounts,
                Err(failure) => {
                    tracing::warn!("missing branches stay out: {failure}");
                    return;
                }
            };
            for absent in waiting.iter().filter(|absent| mounts.has(&absent.branch)) {
                if add(absent, &|present| absent.place_in(present)).is_none() {
                    return;
                }
            }
            a_change(LOOK);
        }
    };
    let thread = thread::Builder::new().name("nacre-absent".to_owned()).spawn(look);
    thread.map(drop).map_err(|error| Failure::io("cannot start", "the thread that looks for missing branches", &error))
}

/// Waits for a mount or unmount, no longer than this.
fn a_change(longest: Duration) {
    let table = rustix::fs::open("/proc/self/mountinfo", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
    let limit = Timespec { tv_sec: longest.as_secs().cast_signed(), tv_nsec: longest.subsec_nanos().into() };
    let waited = table.and_then(|table| poll(&mut [PollFd::new(&table, PollFlags::PRI)], Some(&limit)));
    if waited.is_err() {
        // Without the mount table there is no notification.
        clock::pause(longest);
    }
}

/// Present mount points, and those in fstab.
struct Mounts {
    present: Vec<PathBuf>,
    planned: Vec<PathBuf>,
}

impl Mounts {
    fn now() -> Result<Mounts, Failure> {
        let present = mountinfo::read()?.into_iter().map(|entry| entry.mountpoint).collect();
        // Without fstab, none are planned.
        let planned = planned(fstab::lines());
        Ok(Mounts { present, planned })
    }

    /// Whether a branch is present: its directories exist, and the file systems in fstab that they lie on are
    /// mounted.
    fn has(&self, branch: &BranchSpec) -> bool {
        branch.directories().into_iter().all(|directory| {
            let marked = |name: &str| directory.join(name).exists();
            let real = fs::canonicalize(directory).unwrap_or_else(|_| directory.to_owned());
            let unmounted = |planned: &PathBuf| real.starts_with(planned) && !self.present.contains(planned);
            directory.is_dir()
                && (marked(".mergerfs.branch")
                    || (!marked(".mergerfs.branch_mounts_here") && !self.planned.iter().any(unmounted)))
        })
    }

    /// Whether it is on another file system than the mount point, or contains mergerfs' marker file
    /// `.mergerfs.branch`: what mergerfs waits for.
    fn is_elsewhere(&self, branch: &BranchSpec, mountpoint: &Path) -> bool {
        let here = fs::metadata(mountpoint).map(|data| data.dev()).ok();
        branch.directories().into_iter().all(|directory| {
            directory.join(".mergerfs.branch").exists()
                || fs::metadata(directory).is_ok_and(|data| Some(data.dev()) != here)
        })
    }
}

/// Mount points of fstab(5); without the root, which always exists.
fn planned(lines: Vec<FstabLine>) -> Vec<PathBuf> {
    let places = lines.into_iter().map(|line| line.mountpoint);
    places.filter(|place| place.is_absolute() && place != Path::new("/")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacre_union::BranchMode;

    #[test]
    fn a_branch_is_there_when_its_file_system_is() {
        let scratch = tempfile::tempdir().unwrap();
        let disk = scratch.path().join("disk");
        let branch = BranchSpec::directory(disk.join("data"), BranchMode::rw());
        let mut mounts = Mounts { present: Vec::new(), planned: Vec::new() };
        assert!(!mounts.has(&branch));
        fs::create_dir_all(disk.join("data")).unwrap();
        assert!(mounts.has(&branch));
        mounts.planned.push(disk.clone());
        assert!(!mounts.has(&branch), "what is below the mount point is not the branch");
        mounts.present.push(disk.clone());
        assert!(mounts.has(&branch));
        fs::write(disk.join("data/.mergerfs.branch_mounts_here"), "").unwrap();
        assert!(!mounts.has(&branch));
        fs::write(disk.join("data/.mergerfs.branch"), "").unwrap();
        assert!(mounts.has(&branch));
    }

    #[test]
    fn it_comes_below_those_that_it_was_named_after() {
        let of = |path: &str| BranchSpec::directory(PathBuf::from(path), BranchMode::rw());
        let absent = Absent { branch: of("/c"), above: vec![of("/a"), of("/b")] };
        assert_eq!(absent.place_in(&[of("/a"), of("/b"), of("/d")]), 2);
        assert_eq!(absent.place_in(&[of("/a"), of("/new"), of("/d")]), 1);
        assert_eq!(absent.place_in(&[of("/d")]), 0);
    }

    #[test]
    fn a_process_after_this_one_awaits_the_same() {
        let of = |text: &str| BranchSpec::parse(text.as_bytes(), BranchMode::ro()).unwrap();
        let absent = Absent { branch: of("/a b=rw"), above: vec![of("/c=ro+wh"), of("{host:/d | readonly}=ro")] };
        let noted = serde_json::to_vec(&absent).unwrap();
        assert_eq!(serde_json::from_slice::<Absent>(&noted).unwrap(), absent);
        assert!(serde_json::from_slice::<Absent>(br#"[{"Unix":[61]},[]]"#).is_err());
    }
}
