//! Identities and attributes from `statx(2)` answers. Pure except for the calls themselves.

use nacre_vfs::{Attr, Errno, FileId, Kind, Protection, Result, Time};
use parking_lot::RwLock;
use rustix::fs::{AtFlags, Statx, StatxAttributes, StatxFlags, StatxTimestamp};
use std::{
    collections::BTreeMap,
    os::fd::BorrowedFd,
    sync::atomic::{AtomicBool, Ordering},
};

/// Fields for attributes and identity, in one call.
const WANTED: StatxFlags = StatxFlags::BASIC_STATS.union(StatxFlags::BTIME).union(StatxFlags::MNT_ID);

/// The fields of [`WANTED`] without mtime and ctime. Asking for these makes the file system take the next
/// one from a finer clock (Documentation/filesystems/multigrain-ts.rst), and record it separately:
/// a file that is examined between any two writes is as expensive to write to as one whose every
/// write changes attributes. And all clocks continue from there: the kernel records a new time for
/// each write-back write as well.
const TIMELESS: StatxFlags = WANTED.difference(StatxFlags::MTIME.union(StatxFlags::CTIME));

/// Flag in [`FileId::fs`] of a symbolic link that is shown as its target: no device number has this
/// bit.
const RESOLVED: u64 = 1 << 63;

/// Converts the error number of a call.
pub(super) fn errno(error: rustix::io::Errno) -> Errno {
    Errno::from_raw(error.raw_os_error())
}

/// Examines a name in a directory; does not follow a link at the end.
pub(super) fn of_name(directory: BorrowedFd<'_>, name: &[u8]) -> Result<Statx> {
    rustix::fs::statx(directory, name, AtFlags::SYMLINK_NOFOLLOW, WANTED).map_err(errno)
}

/// Examines a name like [`of_name`], without triggering an automount.
pub(super) fn of_name_quietly(directory: BorrowedFd<'_>, name: &[u8]) -> Result<Statx> {
    rustix::fs::statx(directory, name, AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT, WANTED).map_err(errno)
}

/// Examines the file that a name leads to, following links.
pub(super) fn of_target(directory: BorrowedFd<'_>, name: &[u8]) -> Result<Statx> {
    rustix::fs::statx(directory, name, AtFlags::empty(), WANTED).map_err(errno)
}

/// Examines the file behind a descriptor.
pub(super) fn of_file(file: BorrowedFd<'_>) -> Result<Statx> {
    rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, WANTED).map_err(errno)
}

/// Examines the file behind a descriptor without mtime and ctime, which are zero.
pub(super) fn of_file_timeless(file: BorrowedFd<'_>) -> Result<Statx> {
    rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, TIMELESS).map_err(errno)
}

/// Bit of `stx_mask`: the subvolume is known (`STATX_SUBVOL`, Linux 6.10: Btrfs, bcachefs).
const SUBVOLUME: u32 = 0x8000;
/// Device numbers of further subvolumes: of a major number that no device has (uapi/linux/major.h).
const FURTHER_DEVICES: u32 = 0xfff << 20;

/// Device numbers of the subvolumes that were examined, by the kernel's device number and the subvolume.
static SUBVOLUMES: RwLock<BTreeMap<(u32, u64), u32>> = RwLock::new(BTreeMap::new());

/// A device number as the kernel keeps it: 12 bits of major, 20 of minor. Btrfs gives a new subvolume
/// the number of a deleted one, and a snapshot has the inode numbers and birth times of the same files:
/// a later subvolume with a known number gets a number of its own here.
pub(super) fn device(statx: &Statx) -> u32 {
    let device = statx.stx_dev_major << 20 | statx.stx_dev_minor & 0xf_ffff;
    if statx.stx_mask & SUBVOLUME == 0 {
        return device;
    }
    let key = (device, statx.stx_subvol);
    let known = SUBVOLUMES.read().get(&key).copied();
    known.unwrap_or_else(|| number(&mut SUBVOLUMES.write(), key))
}

fn number(all: &mut BTreeMap<(u32, u64), u32>, key: (u32, u64)) -> u32 {
    let (device, _) = key;
    let is_first = all.range((device, 0)..=(device, u64::MAX)).next().is_none();
    let new = if is_first { device } else { FURTHER_DEVICES | all.len() as u32 & 0xf_ffff };
    *all.entry(key).or_insert(new)
}

/// The device number as in `st_dev`.
pub(super) fn user_device(device: u32) -> u64 {
    rustix::fs::makedev(device >> 20, device & 0xf_ffff)
}

/// Devices, as [`device`] returns them, whose birth times are unreliable; few, and kept for good.
static CHANGING_BIRTHS: RwLock<Vec<u32>> = RwLock::new(Vec::new());
/// Whether the list has entries.
static BIRTHS_CHANGE: AtomicBool = AtomicBool::new(false);

/// Declares that files of this device may change their birth time while they stay the same: on
/// overlayfs, when they are copied up. Called before anything on the device is examined.
pub(super) fn births_change(device: u32) {
    let mut devices = CHANGING_BIRTHS.write();
    if !devices.contains(&device) {
        devices.push(device);
        BIRTHS_CHANGE.store(true, Ordering::Release);
    }
}

/// The generation, which distinguishes successive files with one inode number; 0 where the file
/// system keeps no birth time, or an unreliable one.
fn generation(statx: &Statx) -> u64 {
    if BIRTHS_CHANGE.load(Ordering::Acquire) && CHANGING_BIRTHS.read().contains(&device(statx)) {
        return 0;
    }
    birth(statx)
        .map_or(0, |time| time.sec.cast_unsigned().wrapping_mul(1_000_000_000).wrapping_add(u64::from(time.nsec)))
}

fn birth(statx: &Statx) -> Option<Time> {
    (statx.stx_mask & StatxFlags::BTIME.bits() != 0).then(|| time(statx.stx_btime))
}

fn time(stamp: StatxTimestamp) -> Time {
    Time { sec: stamp.tv_sec, nsec: stamp.tv_nsec }
}

/// The mount that an open file was reached through. The file system is not asked: a FUSE file
/// system might not answer.
pub(super) fn mount_of(file: BorrowedFd<'_>) -> Result<u64> {
    let flags = AtFlags::EMPTY_PATH.union(AtFlags::STATX_DONT_SYNC);
    rustix::fs::statx(file, "", flags, StatxFlags::MNT_ID).map(|statx| mount(&statx)).map_err(errno)
}

/// The mount that the file was reached through.
pub(super) fn mount(statx: &Statx) -> u64 {
    statx.stx_mnt_id
}

/// Whether it is a directory.
pub(super) fn is_directory(statx: &Statx) -> bool {
    u32::from(statx.stx_mode) & 0o170_000 == Kind::Directory.mode()
}

/// The identity of a file, whatever mount it was reached through ([`super::mounts`] adds the mount
/// for directories).
pub(super) fn id(statx: &Statx) -> FileId {
    FileId { fs: user_device(device(statx)), ino: statx.stx_ino, generation: generation(statx) }
}

/// The identity of a link that is shown as its target: distinct from the target (which may be
/// visible as well, and the front end must not take the two for one directory), with the target's
/// inode number.
pub(super) fn resolved_id(link: &Statx, target: &Statx) -> FileId {
    let mut digest = 0xcbf2_9ce4_8422_2325_u64;
    for part in [link.stx_ino, generation(link), u64::from(device(target)), generation(target)] {
        // FNV-1a over words.
        digest = (digest ^ part).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(29);
    }
    FileId { fs: user_device(device(link)) | RESOLVED, ino: target.stx_ino, generation: digest }
}

/// Whether an identity is that of a link shown as its target.
pub(super) fn is_resolved(id: FileId) -> bool {
    id.fs & RESOLVED != 0
}

/// The type of a file.
///
/// # Errors
/// EIO for a type that Linux does not have.
pub(super) fn kind(statx: &Statx) -> Result<Kind> {
    Kind::from_mode(u32::from(statx.stx_mode)).ok_or(Errno::EIO)
}

/// The attributes of a file under the given identity.
pub(super) fn attr(statx: &Statx, id: FileId) -> Result<Attr> {
    Ok(Attr {
        id,
        kind: kind(statx)?,
        mode: u32::from(statx.stx_mode) & 0o7777,
        nlink: statx.stx_nlink,
        uid: statx.stx_uid,
        gid: statx.stx_gid,
        rdev_major: statx.stx_rdev_major,
        rdev_minor: statx.stx_rdev_minor,
        size: statx.stx_size,
        blocks: statx.stx_blocks,
        blksize: statx.stx_blksize,
        atime: time(statx.stx_atime),
        mtime: time(statx.stx_mtime),
        ctime: time(statx.stx_ctime),
        btime: birth(statx),
        protection: Protection::of(
            statx.stx_attributes.contains(StatxAttributes::IMMUTABLE),
            statx.stx_attributes.contains(StatxAttributes::APPEND),
        ),
    })
}
