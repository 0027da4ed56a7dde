//! Constant device numbers of mounts that NFS-Ganesha exports.
//!
//! Used by `shares.rs` before `mounts.rs` mounts. Ganesha puts the device number into file handles, since a FUSE
//! mount has no other identity that it reads (`f_fsid` of statfs(2) is 0). The kernel gives each superblock without
//! a block device the lowest free number. So the free numbers below the wanted one are held until the mount is
//! made, by empty superblocks (ramfs) that are mounted nowhere. Invariants:
//! * one process at a time holds numbers, by a lock on the directory of exports;
//! * the mount is made in any case: without its number only clients' old handles are stale.

use rustix::{
    fd::OwnedFd,
    fs::{fstat, minor},
    mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen},
};
use std::{
    fs::File,
    io,
    time::{Duration, Instant},
};

/// Lowest number that is assigned: numbers of other mounts are usually below it, and change with the order of
/// mounts.
const FIRST: u32 = 512;
/// How many numbers are distributed among datasets.
const SPREAD: u64 = 512;
/// Deadline for the server to release the previous mount.
const LETTING_GO: Duration = Duration::from_secs(2);
const ASKED_AGAIN: Duration = Duration::from_millis(20);

/// Guard: while it exists, the next superblock without a block device gets the number.
pub struct Reserved {
    _held: Vec<Superblock>,
    _lock: File,
    /// The number: that of the dataset, or the next free one.
    pub number: u32,
}

/// Returns the number of a dataset.
fn number_for(guid: u64) -> u32 {
    FIRST + u32::try_from(guid % SPREAD).unwrap_or(0)
}

/// Makes the next mount get the number of this dataset. If the server runs (`served`), it may not have released the
/// previous mount yet.
///
/// # Errors
/// Errors of fsopen(2) and related calls: only root may use them, and open files are limited.
#[expect(clippy::disallowed_methods, reason = "a server tells nobody that it lets go")]
pub(super) fn reserve(guid: u64, lock: File, served: bool) -> io::Result<Reserved> {
    let wanted = number_for(guid);
    let end = Instant::now() + LETTING_GO;
    loop {
        let (held, number) = hold_below(wanted)?;
        if number == wanted || !served || Instant::now() >= end {
            return Ok(Reserved { _held: held, _lock: lock, number });
        }
        drop(held);
        std::thread::sleep(ASKED_AGAIN);
    }
}

/// Makes superblocks with all free numbers below the first free one from `wanted` on; returns them and that number.
fn hold_below(wanted: u32) -> io::Result<(Vec<Superblock>, u32)> {
    let mut held = Vec::new();
    let mut next = 0;
    while next < wanted {
        let superblock = Superblock::new()?;
        next = superblock.number()?;
        held.push((superblock, Some(next)));
        // Asking for a number takes longer than making a superblock. Some numbers in between are in use, and
        // superblocks with too high numbers are released.
        for _ in 1..wanted.saturating_sub(next) / 2 {
            held.push((Superblock::new()?, None));
        }
    }
    while let Some((superblock, known)) = held.pop() {
        let number = known.map_or_else(|| superblock.number(), Ok)?;
        if number < wanted {
            held.push((superblock, Some(number)));
            break;
        }
        next = number;
    }
    Ok((held.into_iter().map(|(superblock, _)| superblock).collect(), next))
}

/// An empty superblock, mounted nowhere, as long as its context is open.
struct Superblock(OwnedFd);

impl Superblock {
    fn new() -> io::Result<Superblock> {
        let context = fsopen("ramfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_create(&context)?;
        Ok(Superblock(context))
    }

    /// Returns its number: fsmount(2) works once.
    fn number(&self) -> io::Result<u32> {
        let mount = fsmount(&self.0, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?;
        Ok(minor(fstat(&mount)?.st_dev))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_mounted_next_has_the_number_unless_another_one_has_it() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let place = tempfile::tempdir().unwrap();
        let reserve = || reserve(77, File::open(place.path()).unwrap(), false).unwrap();
        let mut made = Vec::new();
        // Other tests mount as well, and one of them may come in between.
        let mut numbers = Vec::new();
        for _ in 0..5 {
            let reserved = reserve();
            assert!(reserved.number >= number_for(77));
            let next = Superblock::new().unwrap();
            numbers.push((reserved.number, next.number().unwrap()));
            made.push(next);
        }
        assert!(numbers.iter().filter(|(promised, given)| promised == given).count() >= 3, "{numbers:?}");
        // The next one for the same file system is another one.
        let kept = |pair: &[(u32, u32)]| pair[0].0 != pair[0].1 || pair[1].0 > pair[0].0;
        assert!(numbers.windows(2).all(kept), "{numbers:?}");
        drop(made);
    }
}
