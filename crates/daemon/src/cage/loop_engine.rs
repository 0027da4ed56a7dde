//! The engine `loop`: an image file with a file system of the kernel, attached to a loop device and
//! mounted over the directory.
//!
//! The image is as large as the limit and allocated whole ([`image`]): the cage cannot take more of the host than
//! that, and writes in the cage never fail because the host is full. No process stays behind: the loop device is
//! detached with the unmount ([`mounting`]).

mod image;
pub(crate) mod mounting;
pub(crate) mod programs;
mod resize;

use super::{
    engine::{CageEngine, EngineKind, Figures, FileSystem, Tell, Wanted},
    record::{self, CageRecord, Detail, Held},
};
use crate::{
    failure::{Exit, Failure},
    report::path_text,
};
use image::{BLOCK, Image};
use rustix::fs::statvfs;
use std::{
    fs::{self, File},
    io,
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::{Path, PathBuf},
};

/// Smallest size in bytes that Btrfs can be resized to (`btrfs_ioctl_resize`).
const BTRFS_RESIZED: u64 = 256 << 20;

/// The engine `loop` of cages.
#[derive(Debug)]
pub struct LoopEngine;

impl CageEngine for LoopEngine {
    fn create(&self, wanted: &Wanted, tell: Tell<'_>) -> Result<CageRecord, Failure> {
        wanted.only_limits(EngineKind::Loop)?;
        privileged()?;
        let (directory, place) = (wanted.directory.as_path(), wanted.place());
        let _held = held(directory)?;
        let known = CageRecord::find(place)?.filter(|record| record.mountpoint == place);
        let known = known.map(|record| own_record(&record, place).map(|()| record)).transpose()?;
        let path = match (&wanted.image, known.as_ref().and_then(CageRecord::image)) {
            (Some(image), _) => canonical_parent(image)?,
            (None, Some(image)) => image.to_owned(),
            (None, None) => image::beside(directory)?,
        };
        out_of_reach(&path, place)?;
        let existing = Image::open(&path)?;
        if let Some(image) = &existing
            && let Some(device) = image.device()?
        {
            let what = format!("{} is in use already, as {}", path_text(&path), path_text(&device.path));
            return Err(Failure::new(what).exit(Exit::Busy).next("`nacre cage list` says where"));
        }
        empty(place)?;
        if directory != place {
            empty(directory)?;
        }
        match existing {
            Some(image) => take_up(wanted, &image, known, tell),
            None => make(wanted, &path, tell),
        }
    }

    fn resize(
        &self,
        record: &CageRecord,
        bytes: Option<u64>,
        inodes: Option<u64>,
        tell: Tell<'_>,
    ) -> Result<CageRecord, Failure> {
        privileged()?;
        let (image, sparse) = image_of(record)?;
        if inodes.is_some() {
            return Err(Failure::new("the number of inodes of an image is fixed when it is made")
                .next("--engine=fuse can change it"));
        }
        let bytes = bytes.ok_or_else(|| Failure::usage("a new size is needed"))? / BLOCK * BLOCK;
        large_enough(image.fstype, bytes)?;
        if image.fstype == FileSystem::Btrfs && bytes < BTRFS_RESIZED {
            return Err(Failure::usage(format!("Btrfs resizes to {} MiB or more only", BTRFS_RESIZED >> 20)));
        }
        resize::go_on(&image, sparse, record)?;
        let record = &CageRecord { resizing: false, ..record.clone() };
        if bytes >= image.length()? {
            resize::grow(&image, sparse, record, bytes, tell)?;
        } else {
            resize::shrink(&image, sparse, record, bytes, tell)?;
        }
        let record = CageRecord { bytes, ..record.clone() };
        record.save()?;
        Ok(record)
    }

    fn figures(&self, record: &CageRecord) -> Result<Figures, Failure> {
        let (path, sparse) = path_of(record)?;
        let metadata = match fs::metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let notes = vec![format!(
                    "the image {} is gone; `nacre cage remove {}` forgets it",
                    path_text(path),
                    path_text(&record.mountpoint)
                )];
                return Ok(Figures { limit: record.bytes, mode: "no image".to_owned(), notes, ..Figures::default() });
            }
            metadata => metadata.map_err(|error| Failure::io("cannot look at", path_text(path), &error))?,
        };
        let on_host = metadata.blocks() * 512;
        let mut figures =
            Figures { limit: metadata.len(), on_host: Some(on_host), fstab: fstab(record), ..Figures::default() };
        if !sparse && on_host < metadata.len() {
            figures.notes.push(format!(
                "{} bytes of the image were given back to the host (discard, fstrim) and may not be there when they are needed; `nacre cage resize {} {}` takes them again",
                metadata.len() - on_host,
                path_text(&record.mountpoint),
                metadata.len(),
            ));
        }
        if sparse {
            figures
                .notes
                .push("the image is sparse: when the host is full, writes in the cage fail with I/O errors".to_owned());
        }
        let fstype = file_system_of(record);
        match mounted_device(record, path)? {
            None => figures.mode = format!("{fstype}, not mounted"),
            Some(device) => {
                fill(&mut figures, record, &format!("{fstype} on {}", path_text(&device.path)), device.direct_io)?
            }
        }
        Ok(figures)
    }

    fn detach(&self, record: &CageRecord, lazy: bool) -> Result<(), Failure> {
        let (path, _) = path_of(record)?;
        let not_mounted = || {
            Failure::new(format!("the cage at {} is not mounted", path_text(&record.mountpoint))).exit(Exit::NotFound)
        };
        if !path.exists() {
            // The image was deleted while mounted: only the name that the loop device keeps identifies it.
            return if mounting::shows(path, &record.mountpoint)? {
                mounting::unmount(&record.mountpoint, lazy)
            } else {
                Err(not_mounted())
            };
        }
        let (image, _) = image_of(record)?;
        if mounting::mounted(&image, &record.mountpoint)?.is_none() {
            return Err(not_mounted());
        }
        mounting::unmount(&record.mountpoint, lazy)?;
        // The device is free for the next command. Mounts of it elsewhere may keep the device, which is no failure
        // of this one.
        image.settle(lazy);
        Ok(())
    }

    fn destroy(&self, record: &CageRecord, _tell: Tell<'_>) -> Result<(), Failure> {
        privileged()?;
        let (path, _) = path_of(record)?;
        if !path.exists() {
            return record.remove();
        }
        let (image, _) = image_of(record)?;
        if mounting::mounted(&image, &record.mountpoint)?.is_some() {
            mounting::unmount(&record.mountpoint, false)?;
        }
        image.released()?;
        image::clear(&image.path)?;
        fs::remove_file(&image.path).map_err(|error| Failure::io("cannot remove", path_text(&image.path), &error))?;
        record.remove()
    }
}

fn privileged() -> Result<(), Failure> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    Err(Failure::new("only root can mount images").exit(Exit::Denied).next("--engine=fuse needs no privilege"))
}

fn held(directory: &Path) -> Result<Held, Failure> {
    let file = File::open(directory).map_err(|error| Failure::io("cannot open", path_text(directory), &error))?;
    record::hold(&file, directory)
}

fn own_record(record: &CageRecord, place: &Path) -> Result<(), Failure> {
    if record.engine == EngineKind::Loop {
        return Ok(());
    }
    Err(Failure::new(format!("{} is caged already, with --engine={}", path_text(place), record.engine))
        .exit(Exit::Busy))
}

fn canonical_parent(path: &Path) -> Result<PathBuf, Failure> {
    crate::control::lexical(path)
}

/// Refuses an image below its own mount point: the mount would hide it.
fn out_of_reach(image: &Path, place: &Path) -> Result<(), Failure> {
    if !image.starts_with(place) {
        return Ok(());
    }
    let what = format!("the image {} lies in the cage itself, {}", path_text(image), path_text(place));
    Err(Failure::usage(what).next("--image=FILE names a place outside"))
}

/// Refuses a directory with files: a mount over it would hide them.
fn empty(directory: &Path) -> Result<(), Failure> {
    let failed = |error: io::Error| Failure::io("cannot read", path_text(directory), &error);
    for entry in fs::read_dir(directory).map_err(failed)? {
        if entry.map_err(failed)?.file_name() != "lost+found" {
            let directory = path_text(directory);
            return Err(Failure::new(format!(
                "{directory} is not empty, and a mounted image would hide what is in it"
            ))
            .next(format!(
                "move it aside (`mv {directory} {directory}.old && mkdir {directory}`), make the cage and copy it back \
                 (`cp -a {directory}.old/. {directory}/`); or use --engine=fuse, which takes a directory as it is"
            )));
        }
    }
    Ok(())
}

fn large_enough(fstype: FileSystem, bytes: u64) -> Result<(), Failure> {
    let (least, why) = programs::least(fstype);
    if bytes >= least {
        return Ok(());
    }
    let mut failure = Failure::usage(format!("an image with {fstype} needs {} MiB at least ({why})", least >> 20));
    if fstype != FileSystem::Ext4 && bytes >= programs::least(FileSystem::Ext4).0 {
        failure = failure.next("--fstype=ext4 needs less");
    }
    Err(failure)
}

/// Makes a new cage.
fn make(wanted: &Wanted, path: &Path, tell: Tell<'_>) -> Result<CageRecord, Failure> {
    let fstype = wanted.fstype.unwrap_or(FileSystem::Ext4);
    let bytes = wanted
        .bytes
        .ok_or_else(|| Failure::usage(format!("--size is needed: there is no image at {}", path_text(path))))?;
    let bytes = bytes / BLOCK * BLOCK;
    large_enough(fstype, bytes)?;
    if wanted.inodes.is_some() && fstype != FileSystem::Ext4 {
        return Err(Failure::usage(format!(
            "{fstype} makes inodes as long as there is room: --inodes cannot limit them"
        ))
        .next("--fstype=ext4 or --engine=fuse can"));
    }
    let image = Image::make(path, fstype, bytes, wanted.inodes, wanted.sparse, tell)?;
    let detail = Detail::Loop { image: path.to_owned(), fstype, sparse: wanted.sparse };
    let record = CageRecord::new(EngineKind::Loop, &wanted.directory, wanted.place(), bytes, wanted.inodes, detail);
    let mounted =
        record.save().and_then(|()| mounting::mount(&image, wanted.sparse, wanted.place(), Some(&wanted.directory)));
    if let Err(failure) = mounted {
        // Nothing is on it yet. A failure to remove it is covered by the first failure.
        let _ = fs::remove_file(path);
        let _ = record.remove();
        return Err(failure);
    }
    tell_inodes(&record, tell);
    Ok(record)
}

/// Reports the number of inodes that ext4 made: an inode table consists of whole blocks.
fn tell_inodes(record: &CageRecord, tell: Tell<'_>) {
    if let (Some(asked), Ok(stat)) = (record.inodes, statvfs(&record.mountpoint))
        && stat.f_files != asked
    {
        tell(&format!(
            "ext4 makes inodes by whole blocks: {} instead of {asked}, of which it uses some itself",
            stat.f_files
        ));
    }
}

/// Mounts an image that exists already.
fn take_up(wanted: &Wanted, image: &Image, known: Option<CageRecord>, tell: Tell<'_>) -> Result<CageRecord, Failure> {
    let path = path_text(&image.path);
    let length = image.length()?;
    if let Some(fstype) = wanted.fstype.filter(|fstype| *fstype != image.fstype) {
        return Err(Failure::new(format!("{path} is there already, with {} and not {fstype}", image.fstype))
            .next("--image=FILE names another place"));
    }
    if wanted.bytes.is_some_and(|bytes| bytes / BLOCK * BLOCK != length) {
        let place = path_text(wanted.place());
        let what = format!("{path} is there already, with {length} bytes");
        return Err(Failure::new(what)
            .next(format!("mount it without --size, then `nacre cage resize {place} SIZE` changes it")));
    }
    let known = known.filter(|record| record.image() == Some(&image.path));
    let sparse = match known.as_ref().map(|record| &record.detail) {
        Some(Detail::Loop { sparse, .. }) => *sparse,
        _ => wanted.sparse,
    };
    image::clear(&image.path)?;
    if !sparse {
        // Allocates blocks again that were discarded meanwhile.
        image.set_length(length, true)?;
    }
    let detail = Detail::Loop { image: image.path.clone(), fstype: image.fstype, sparse };
    let inodes = known.as_ref().and_then(|record| record.inodes);
    let new = CageRecord::new(EngineKind::Loop, &wanted.directory, wanted.place(), length, inodes, detail);
    let record = CageRecord { made: known.map_or(new.made, |known| known.made), ..new };
    record.save()?;
    tell(&format!("mounting the existing image {path}"));
    mounting::mount(image, sparse, wanted.place(), None)?;
    Ok(record)
}

fn path_of(record: &CageRecord) -> Result<(&Path, bool), Failure> {
    match &record.detail {
        Detail::Loop { image, sparse, .. } => Ok((image, *sparse)),
        _ => Err(Failure::new(format!("the record of {} names no image", path_text(&record.mountpoint)))),
    }
}

fn file_system_of(record: &CageRecord) -> &'static str {
    match &record.detail {
        Detail::Loop { fstype, .. } | Detail::Project { fstype, .. } => fstype.word(),
        Detail::Qgroup { .. } => FileSystem::Btrfs.word(),
    }
}

fn image_of(record: &CageRecord) -> Result<(Image, bool), Failure> {
    let (path, sparse) = path_of(record)?;
    let image = Image::open(path)?;
    let gone = || Failure::new(format!("the image {} is gone", path_text(path))).exit(Exit::NotFound);
    Ok((image.ok_or_else(gone)?, sparse))
}

/// Returns the loop device that a cage is mounted from, without locking the image.
fn mounted_device(record: &CageRecord, path: &Path) -> Result<Option<nacre_sys::loop_devices::LoopDevice>, Failure> {
    let table = crate::mountinfo::read()?;
    let Some(entry) = table.into_iter().rfind(|entry| entry.mountpoint == record.mountpoint) else { return Ok(None) };
    let failed = |error: io::Error| Failure::io("cannot look at", path_text(path), &error);
    let image = File::open(path).map_err(failed)?;
    Ok(nacre_sys::loop_devices::attached(&image).map_err(failed)?.filter(|device| device.path == entry.source))
}

/// Fills in the figures of the mounted file system.
fn fill(figures: &mut Figures, record: &CageRecord, mode: &str, direct_io: bool) -> Result<(), Failure> {
    let stat = statvfs(&record.mountpoint)
        .map_err(|error| Failure::io("cannot look at", path_text(&record.mountpoint), &error.into()))?;
    figures.attached = true;
    figures.used = stat.f_blocks.saturating_sub(stat.f_bfree) * stat.f_frsize;
    figures.free = stat.f_bavail * stat.f_frsize;
    // Btrfs counts no inodes.
    if stat.f_files > 0 {
        figures.inodes_used = Some(stat.f_files - stat.f_ffree);
        // XFS makes inodes as long as there is room.
        figures.inode_limit =
            Some(stat.f_files).filter(|_| matches!(record.detail, Detail::Loop { fstype: FileSystem::Ext4, .. }));
    }
    figures.mode = format!("{mode}, {}", if direct_io { "direct I/O" } else { "through the page cache of the host" });
    Ok(())
}

/// Returns the cage's line of fstab(5); `None` where the image's name has a comma, which ends an option.
fn fstab(record: &CageRecord) -> Option<String> {
    let (image, sparse) = path_of(record).ok()?;
    if image.as_os_str().as_bytes().contains(&b',') {
        return None;
    }
    let sparse = if sparse { ",sparse" } else { "" };
    let (image, directory, place) = (escaped(image), escaped(&record.directory), escaped(&record.mountpoint));
    let requires = format!("x-systemd.requires-mounts-for={image}");
    Some(format!("cage:{directory} {place} fuse.nacre engine=loop,image={image}{sparse},nofail,{requires} 0 0"))
}

/// Escapes a path for fstab(5).
fn escaped(path: &Path) -> String {
    let mut text = String::new();
    for byte in path.as_os_str().as_bytes() {
        match byte {
            b' ' | b'\t' | b'\n' | b'\\' | b'#' => text.push_str(&format!("\\{byte:03o}")),
            0x80.. => text.push_str(&format!("\\{byte:03o}")),
            byte => text.push(char::from(*byte)),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_fstab_keep_their_columns() {
        let detail = Detail::Loop { image: PathBuf::from("/a b.cage"), fstype: FileSystem::Ext4, sparse: true };
        let record = CageRecord::new(EngineKind::Loop, Path::new("/a b"), Path::new("/m\\"), 1, None, detail);
        assert_eq!(
            fstab(&record).unwrap(),
            "cage:/a\\040b /m\\134 fuse.nacre engine=loop,image=/a\\040b.cage,sparse,nofail,x-systemd.requires-mounts-for=/a\\040b.cage 0 0"
        );
    }

    #[test]
    fn what_cannot_work_is_refused_before_anything_is_made() {
        assert!(out_of_reach(Path::new("/srv/x/y.cage"), Path::new("/srv/x")).is_err());
        assert!(out_of_reach(Path::new("/srv/x.cage"), Path::new("/srv/x")).is_ok());
        assert_eq!(large_enough(FileSystem::Xfs, 20 << 20).unwrap_err().next, "--fstype=ext4 needs less");
        assert!(large_enough(FileSystem::Ext4, 4095).unwrap_err().what.contains("16 MiB"));
        assert!(large_enough(FileSystem::Btrfs, 128 << 20).is_ok());
        let scratch = tempfile::tempdir().unwrap();
        fs::create_dir(scratch.path().join("lost+found")).unwrap();
        empty(scratch.path()).unwrap();
        fs::write(scratch.path().join("x"), "").unwrap();
        assert!(empty(scratch.path()).unwrap_err().what.contains("is not empty"));
    }
}
