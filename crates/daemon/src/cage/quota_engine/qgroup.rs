//! Btrfs qgroups: the limit counts all data that a subvolume refers to, also data shared with other subvolumes.
//!
//! The figures come from sysfs, which shows the kernel's current count, not the one last written to disk.

use super::{caged_already, mount_of, refused, unable};
use crate::{
    cage::{
        engine::{EngineKind, Figures, Wanted},
        record::{CageRecord, Detail},
    },
    failure::{Exit, Failure},
    report::path_text,
};
use nacre_sys::btrfs_quota::{self, SUBVOLUME_INODE};
use rustix::{
    fs::{Mode, OFlags, openat},
    mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen},
};
use std::{
    fs::{self, File},
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::{Path, PathBuf},
};

/// Makes the cage.
///
/// # Errors
/// The directory is no subvolume, quotas are off, or there is already a limit of other origin.
pub fn create(wanted: &Wanted, bytes: u64, open: &File, known: Option<&CageRecord>) -> Result<CageRecord, Failure> {
    let name = wanted.directory.as_path();
    no_inodes(wanted.inodes.is_some())?;
    let inode = open.metadata().map_err(|error| refused("cannot look at", name, &error))?.ino();
    if inode != SUBVOLUME_INODE {
        let text = path_text(name);
        return Err(unable(name, "on Btrfs, only subvolumes have limits").next(format!(
            "`mv {text} {text}.old; btrfs subvolume create {text}; cp -a --reflink=always {text}.old/. {text}/` makes it one; or use --engine=fuse"
        )));
    }
    let subvolume = btrfs_quota::subvolume(open.as_fd()).map_err(|error| refused("cannot look at", name, &error))?;
    if limit(&group(open, name, subvolume)?).is_some() {
        if known.is_some_and(|record| record.detail == Detail::Qgroup { subvolume }) {
            return Err(caged_already(name));
        }
        return Err(unable(name, "somebody else has limited it already")
            .next(format!("`btrfs qgroup limit none {}` lifts that limit", path_text(name))));
    }
    let record = CageRecord::new(EngineKind::Quota, name, name, bytes, None, Detail::Qgroup { subvolume });
    large_enough(bytes)?;
    record.save()?;
    match set(&record, false, open) {
        Ok(()) => Ok(record),
        Err(failure) => {
            record.remove()?;
            Err(failure)
        }
    }
}

fn no_inodes(asked: bool) -> Result<(), Failure> {
    if !asked {
        return Ok(());
    }
    Err(Failure::usage("Btrfs limits no inodes").next("--engine=fuse does"))
}

/// Returns the directory of sysfs for a subvolume's qgroup.
fn group(open: &File, name: &Path, subvolume: u64) -> Result<PathBuf, Failure> {
    let filesystem = btrfs_quota::filesystem(open.as_fd()).map_err(|error| refused("cannot look at", name, &error))?;
    let groups = PathBuf::from(format!("/sys/fs/btrfs/{filesystem}/qgroups"));
    let group = groups.join(format!("0_{subvolume}"));
    if group.is_dir() {
        return Ok(group);
    }
    let text = path_text(name);
    Err(unable(name, "quotas are off on its file system")
        .next(format!("`btrfs quota enable {text}` turns them on; or use --engine=fuse")))
}

/// Returns the limit in bytes, if one is set.
fn limit(group: &Path) -> Option<u64> {
    const MAX_REFERENCED: u64 = 1;
    let set = number(group, "limit_flags").is_some_and(|flags| flags & MAX_REFERENCED != 0);
    number(group, "max_referenced").filter(|_| set)
}

/// Opens the top-level directory of the file system, which is outside of the cage: a change of the limit made
/// through the cage itself would have to find room in it.
fn outside(name: &Path) -> Result<OwnedFd, Failure> {
    const TOP_LEVEL: &str = "5";
    let source = mount_of(name)?.source;
    let top = || -> rustix::io::Result<OwnedFd> {
        let context = fsopen("btrfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_set_string(&context, "source", &source)?;
        fsconfig_set_string(&context, "subvolid", TOP_LEVEL)?;
        fsconfig_create(&context)?;
        // Never attached to the tree of mounts: nobody sees it, and it is gone when it is closed.
        let tree = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?;
        openat(&tree, ".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
    };
    top().map_err(|error| refused("cannot open the file system of", name, &error.into()))
}

fn number(group: &Path, file: &str) -> Option<u64> {
    fs::read_to_string(group.join(file)).ok()?.trim().parse().ok()
}

fn subvolume_of(record: &CageRecord) -> Result<u64, Failure> {
    match record.detail {
        Detail::Qgroup { subvolume } => Ok(subvolume),
        _ => Err(Failure::new(format!("the record of {} names no subvolume", path_text(&record.directory)))),
    }
}

/// Sets the limit of the record.
///
/// # Errors
/// A size below a block, a limit of inodes (`inodes`), or errors of the system.
pub fn set(record: &CageRecord, inodes: bool, open: &File) -> Result<(), Failure> {
    no_inodes(inodes)?;
    large_enough(record.bytes)?;
    same(record, open)?;
    let set = btrfs_quota::set_limit(outside(&record.directory)?.as_fd(), subvolume_of(record)?, Some(record.bytes));
    set.map_err(|error| refused("cannot set the quota of", &record.directory, &error))
}

fn large_enough(bytes: u64) -> Result<(), Failure> {
    // An empty subvolume takes one tree block.
    const LEAST: u64 = 65_536;
    if bytes >= LEAST {
        return Ok(());
    }
    Err(Failure::usage(format!("--size={bytes} is too little: an empty subvolume needs up to {LEAST} bytes")))
}

/// Checks that the directory is still the subvolume that was caged.
fn same(record: &CageRecord, open: &File) -> Result<(), Failure> {
    let now =
        btrfs_quota::subvolume(open.as_fd()).map_err(|error| refused("cannot look at", &record.directory, &error))?;
    let inode = open.metadata().map_err(|error| refused("cannot look at", &record.directory, &error))?.ino();
    if now == subvolume_of(record)? && inode == SUBVOLUME_INODE {
        return Ok(());
    }
    let name = path_text(&record.directory);
    let failure = Failure::new(format!("{name} is not the subvolume that was caged")).exit(Exit::NotFound);
    Err(failure.next(format!("`nacre cage remove {name}` forgets that cage")))
}

/// Returns limit and usage as Btrfs counts them.
///
/// # Errors
/// Errors of the system.
pub fn figures(record: &CageRecord, open: &File) -> Result<Figures, Failure> {
    let subvolume = subvolume_of(record)?;
    same(record, open)?;
    let mut notes = Vec::new();
    let mut figures =
        Figures { limit: record.bytes, mode: format!("qgroup 0/{subvolume} of btrfs"), ..Figures::default() };
    match group(open, &record.directory, subvolume) {
        Err(failure) => notes.push(format!("nothing is limited: {}", failure.what)),
        Ok(group) => {
            // The reserved bytes are accepted, and not on the disk yet.
            let used = ["referenced", "rsv_data", "rsv_meta_pertrans", "rsv_meta_prealloc"]
                .iter()
                .filter_map(|file| number(&group, file))
                .sum();
            let limit = limit(&group);
            figures.attached = limit.is_some();
            figures.limit = limit.unwrap_or(record.bytes);
            figures.used = used;
            figures.free = figures.limit.saturating_sub(used);
            if limit.is_none() {
                notes
                    .push("somebody has lifted the limit by other means; `nacre cage resize` sets it again".to_owned());
            }
        }
    }
    Ok(Figures { notes, ..figures })
}

/// Lifts the limit; does nothing where the subvolume is gone, or quotas are off.
///
/// # Errors
/// Errors of the system.
pub fn lift(record: &CageRecord, open: Option<&File>) -> Result<(), Failure> {
    let subvolume = subvolume_of(record)?;
    let there = open
        .filter(|open| same(record, open).is_ok())
        .is_some_and(|open| group(open, &record.directory, subvolume).is_ok());
    if !there {
        return Ok(());
    }
    match btrfs_quota::set_limit(outside(&record.directory)?.as_fd(), subvolume, None) {
        Err(error) if !gone(&error) => Err(refused("cannot lift the quota of", &record.directory, &error)),
        _ => Ok(()),
    }
}

/// Whether there is no limit any more: ENOTCONN: quotas are off; ENOENT: the group is gone.
fn gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotConnected | io::ErrorKind::NotFound)
}
