//! Resizes an image.
//!
//! Order when growing: file, device, file system; when shrinking: file system, device, file. After a crash or a
//! failure in between, the file system is no larger than its file, and the same command completes the resize. While
//! resize2fs works on an unmounted ext4, the file system is inconsistent, and its undo file (`-z`) is incomplete
//! when it is killed: so resize2fs works on a copy of the used blocks, which replaces the image when it is
//! complete.

use super::{
    image::Image,
    mounting, programs,
    programs::{BTRFS, E2IMAGE, RESIZE2FS, XFS_GROWFS},
};
use crate::{
    cage::{
        engine::{FileSystem, Tell},
        record::CageRecord,
    },
    clock,
    failure::{Exit, Failure},
    report::path_text,
};
use rustix::{
    fs::statvfs,
    thread::{CapabilitySet, capabilities},
};
use std::{
    ffi::{OsStr, OsString},
    fs::File,
    path::Path,
    process::Output,
    time::Duration,
};

/// Makes the cage at `place` larger, or completes an interrupted resize.
///
/// # Errors
/// No room on the host: nothing has changed. The file system does not grow: the image has grown.
pub fn grow(image: &Image, sparse: bool, record: &CageRecord, bytes: u64, tell: Tell<'_>) -> Result<(), Failure> {
    let place = record.mountpoint.as_path();
    let device = mounting::mounted(image, place)?.ok_or_else(|| not_mounted(place))?;
    let enlarge = || image.set_length(bytes, !sparse);
    if image.fstype == FileSystem::Ext4 && !may_grow_mounted() {
        tell("without CAP_SYS_RESOURCE, ext4 grows only unmounted: the cage is unmounted for as long as that takes");
        drop(device);
        let before = image.length()?;
        // A lack of room on the host is found before the cage is unmounted.
        enlarge()?;
        return unmounted(image, sparse, record, bytes).map_err(|failure| match image.set_length(before, false) {
            Ok(()) => failure,
            Err(also) => failure.next(also.what),
        });
    }
    enlarge()?;
    device.follow_length().map_err(|error| Failure::io("cannot resize", path_text(&device.path), &error))?;
    let grown = match image.fstype {
        FileSystem::Ext4 => programs::run(RESIZE2FS, &[device.path.as_os_str()], 0),
        FileSystem::Xfs => programs::run(XFS_GROWFS, &[OsStr::new("-d"), place.as_os_str()], 0),
        FileSystem::Btrfs => btrfs_resize("max", place),
    };
    grown.map_err(|failure| failure.next("the image has its new size already; the same command again completes it"))?;
    // Before Linux 6.17, the kernel discards blocks that it has filled with zeros.
    if sparse { Ok(()) } else { enlarge() }
}

/// Whether the kernel lets this process resize a mounted ext4.
fn may_grow_mounted() -> bool {
    capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_RESOURCE))
}

/// Makes the cage smaller.
///
/// # Errors
/// The file system cannot shrink, or not so far; the cage is in use and would have to be unmounted. Nothing has
/// changed.
pub fn shrink(image: &Image, sparse: bool, record: &CageRecord, bytes: u64, tell: Tell<'_>) -> Result<(), Failure> {
    match image.fstype {
        FileSystem::Xfs => Err(Failure::new("XFS cannot shrink").next(
            "a smaller cage has to be made anew and the content copied; cages with --fstype=ext4 or btrfs, or --engine=fuse, can shrink",
        )),
        FileSystem::Btrfs => shrink_btrfs(image, &record.mountpoint, bytes),
        FileSystem::Ext4 => shrink_ext4(image, sparse, record, bytes, tell),
    }
}

fn shrink_btrfs(image: &Image, place: &Path, bytes: u64) -> Result<(), Failure> {
    let device = mounting::mounted(image, place)?.ok_or_else(|| not_mounted(place))?;
    let size = bytes.to_string();
    let mut shrunk = btrfs_settled(&size, place);
    // Space that was in use once stays with data or metadata until its chunks are emptied: only then can the end be
    // moved elsewhere. First the empty chunks are balanced, which takes no space, then chunks that are at most half
    // full. (In a file system of mixed chunks, both filters must be equal.)
    for usage in [["-dusage=0", "-musage=0"], ["-dusage=50", "-musage=50"]] {
        if shrunk.is_err() {
            let words = [&["balance", "start"], &usage[..]].concat();
            let words: Vec<&OsStr> = words.into_iter().map(OsStr::new).chain([place.as_os_str()]).collect();
            shrunk = programs::run(BTRFS, &words, 0).and_then(|_| btrfs_resize(&size, place));
        }
    }
    shrunk.map_err(|failure| failure.next("what is in use has to fit, and has to be moved: a smaller step may do"))?;
    sync(place)?;
    image.set_length(bytes, false)?;
    device.follow_length().map_err(|error| Failure::io("cannot resize", path_text(&device.path), &error))
}

/// Shrinks once the kernel's cleaner thread has freed the chunks of recently deleted files: `btrfs filesystem sync`
/// wakes it, and it works asynchronously.
fn btrfs_settled(size: &str, place: &Path) -> Result<Output, Failure> {
    const ATTEMPTS: u32 = 12;
    let mut shrunk = Err(Failure::new("not tried"));
    for attempt in 0..ATTEMPTS {
        programs::run(BTRFS, &[OsStr::new("filesystem"), OsStr::new("sync"), place.as_os_str()], 0)?;
        shrunk = btrfs_resize(size, place);
        // Space of existing files does not become free by waiting.
        let used = statvfs(place).map_or(u64::MAX, |stat| stat.f_blocks.saturating_sub(stat.f_bfree) * stat.f_frsize);
        if shrunk.is_ok() || size.parse::<u64>().is_ok_and(|size| used >= size) {
            break;
        }
        // The cleaner does not notify when it is done.
        clock::pause(Duration::from_millis(50) * attempt);
    }
    shrunk
}

fn btrfs_resize(size: &str, place: &Path) -> Result<Output, Failure> {
    programs::run(BTRFS, &[OsStr::new("filesystem"), OsStr::new("resize"), OsStr::new(size), place.as_os_str()], 0)
}

/// Syncs the file system: blocks that were moved are on the disk before the end of the file is cut off.
fn sync(place: &Path) -> Result<(), Failure> {
    let synced = File::open(place).and_then(|directory| Ok(rustix::fs::syncfs(directory)?));
    synced.map_err(|error| Failure::io("cannot sync", path_text(place), &error))
}

fn shrink_ext4(image: &Image, sparse: bool, record: &CageRecord, bytes: u64, tell: Tell<'_>) -> Result<(), Failure> {
    mounting::mounted(image, &record.mountpoint)?.ok_or_else(|| not_mounted(&record.mountpoint))?;
    tell("ext4 shrinks only unmounted: the cage is unmounted for as long as that takes");
    unmounted(image, sparse, record, bytes)
}

/// Mounts a cage again that was unmounted for a resize which was interrupted.
///
/// # Errors
/// It cannot be mounted.
pub fn go_on(image: &Image, sparse: bool, record: &CageRecord) -> Result<(), Failure> {
    if !record.resizing || mounting::mounted(image, &record.mountpoint)?.is_some() {
        return Ok(());
    }
    super::image::clear(&image.path)?;
    mounting::mount(image, sparse, &record.mountpoint, None).map(drop)
}

/// Resizes ext4 while the cage is unmounted, and mounts it again whether that succeeded or failed.
fn unmounted(image: &Image, sparse: bool, record: &CageRecord, bytes: u64) -> Result<(), Failure> {
    let place = record.mountpoint.as_path();
    // After an interruption, the same command finds in the record that the cage is to be mounted.
    CageRecord { resizing: true, ..record.clone() }.save()?;
    let done = while_unmounted(image, sparse, place, bytes);
    if done.is_err() {
        // The first failure is returned; one of the record adds nothing.
        let _ = record.save();
    }
    done
}

fn while_unmounted(image: &Image, sparse: bool, place: &Path, bytes: u64) -> Result<(), Failure> {
    mounting::unmount(place, false)?;
    let resized = image.released().and_then(|()| resized_copy(image, bytes));
    let back = mounting::mount(resized.as_ref().unwrap_or(image), sparse, place, None).map(drop);
    match (resized, back) {
        (Err(failure), Err(back)) => Err(failure.next(format!("and it could not be mounted again: {}", back.what))),
        (Err(failure), Ok(())) => Err(failure),
        (Ok(_), Err(back)) => Err(back),
        // Only now: until the copy replaced it, the old image occupied this room.
        (Ok(resized), Ok(())) => resized.set_length(bytes, !sparse),
    }
}

/// Replaces the image by a resized copy.
fn resized_copy(image: &Image, bytes: u64) -> Result<Image, Failure> {
    let source = image.path_for_programs();
    image.replaced(|copy| {
        let words = [OsStr::new("-r"), OsStr::new("-a"), source.as_os_str(), copy.as_os_str()];
        let copied = programs::run(E2IMAGE, &words, 0);
        copied.map_err(|failure| {
            failure.next("meanwhile, the host needs room for a copy of what is in the cage; nothing has changed")
        })?;
        programs::check_ext4(copy, &image.path)?;
        let size = OsString::from(format!("{}K", bytes / 1024));
        let resized = programs::run(RESIZE2FS, &[copy.as_os_str(), &size], 0);
        resized.map_err(|failure| failure.next("what is in the cage has to fit; nothing has changed"))?;
        // resize2fs may leave bytes after the end of the file system.
        let cut = File::options().write(true).open(copy).and_then(|file| file.set_len(bytes));
        cut.map_err(|error| Failure::io("cannot give its size to the copy of", path_text(&image.path), &error))
    })
}

fn not_mounted(place: &Path) -> Failure {
    let place = path_text(place);
    Failure::new(format!("the cage at {place} is not mounted"))
        .exit(Exit::NotFound)
        .next(format!("`nacre cage --engine=loop {place}` mounts it"))
}
