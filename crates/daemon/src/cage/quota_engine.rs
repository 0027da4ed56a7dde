//! The engine `quota`: the file system that the directory lies on enforces the limit itself.
//!
//! ext4 and XFS count by project ([`project`]), Btrfs by subvolume ([`qgroup`]). Nothing is mounted and no process
//! stays behind. [`caveats`] lists how its limits differ from those of the engine `fuse`.

mod project;
mod qgroup;
mod tree;

use super::{
    engine::{CageEngine, EngineKind, Figures, FileSystem, Tell, Wanted},
    loop_engine::mounting::around,
    record::{self, CageRecord, Detail},
};
use crate::{
    failure::{Exit, Failure},
    mountinfo::{self, MountEntry},
    report::path_text,
};
use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

/// The engine `quota` of cages.
#[derive(Debug)]
pub struct QuotaEngine;

impl CageEngine for QuotaEngine {
    fn create(&self, wanted: &Wanted, tell: Tell<'_>) -> Result<CageRecord, Failure> {
        wanted.only_limits(EngineKind::Quota)?;
        privileged()?;
        let directory = wanted.directory.as_path();
        if let Some(mountpoint) = wanted.mountpoint.as_deref().filter(|mountpoint| *mountpoint != directory) {
            let what = format!(
                "a quota limits {} itself and cannot show it at {}",
                path_text(directory),
                path_text(mountpoint)
            );
            return Err(Failure::usage(what).next("leave the mount point out, or use --engine=fuse"));
        }
        let open = open(directory)?;
        let _held = record::hold(&open, directory)?;
        let known = CageRecord::find(directory)?.filter(|record| record.mountpoint == directory);
        if let Some(record) = known.as_ref().filter(|record| record.engine != EngineKind::Quota) {
            return Err(Failure::new(format!(
                "{} is caged already, with --engine={}",
                path_text(directory),
                record.engine
            ))
            .exit(Exit::Busy));
        }
        let bytes = wanted.bytes.or(known.as_ref().map(|record| record.bytes));
        let bytes = bytes.ok_or_else(|| Failure::usage("--size is needed"))?;
        let entry = mount_of(directory)?;
        let record = match file_system(&entry).map_err(|why| unable(directory, &why))? {
            FileSystem::Btrfs => qgroup::create(wanted, bytes, &open, known.as_ref())?,
            fstype => project::create(wanted, bytes, &open, &entry, fstype, known, tell)?,
        };
        caveats(&record.detail).iter().for_each(|caveat| tell(caveat));
        Ok(record)
    }

    fn resize(
        &self,
        record: &CageRecord,
        bytes: Option<u64>,
        inodes: Option<u64>,
        _tell: Tell<'_>,
    ) -> Result<CageRecord, Failure> {
        privileged()?;
        let open = open(&record.directory)?;
        let _held = record::hold(&open, &record.directory)?;
        let record =
            CageRecord { bytes: bytes.unwrap_or(record.bytes), inodes: inodes.or(record.inodes), ..record.clone() };
        match &record.detail {
            Detail::Qgroup { .. } => qgroup::set(&record, inodes.is_some(), &open)?,
            _ => project::set(&record, &open)?,
        }
        record.save()?;
        Ok(record)
    }

    fn figures(&self, record: &CageRecord) -> Result<Figures, Failure> {
        let open = match open(&record.directory) {
            Err(failure) if failure.exit == Exit::NotFound => {
                let notes = vec![format!(
                    "the directory is gone; `nacre cage remove {}` lifts its limit",
                    path_text(&record.directory)
                )];
                return Ok(Figures {
                    limit: record.bytes,
                    mode: "no directory".to_owned(),
                    notes,
                    ..Figures::default()
                });
            }
            open => open?,
        };
        let mut figures = match &record.detail {
            Detail::Qgroup { .. } => qgroup::figures(record, &open)?,
            _ => project::figures(record, &open)?,
        };
        figures.notes.extend(caveats(&record.detail).into_iter().map(str::to_owned));
        Ok(figures)
    }

    fn detach(&self, record: &CageRecord, _lazy: bool) -> Result<(), Failure> {
        // Nothing is mounted, so a cage ends when its limit is lifted.
        self.destroy(record, &mut |_| ())
    }

    fn destroy(&self, record: &CageRecord, tell: Tell<'_>) -> Result<(), Failure> {
        privileged()?;
        let open = match open(&record.directory) {
            Err(failure) if failure.exit == Exit::NotFound => None,
            open => Some(open?),
        };
        let _held = open.as_ref().map(|open| record::hold(open, &record.directory)).transpose()?;
        match &record.detail {
            Detail::Qgroup { .. } => qgroup::lift(record, open.as_ref())?,
            _ => project::lift(record, open.as_ref(), tell)?,
        }
        record.remove()
    }
}

/// Returns why quotas do not keep every promise of a cage for this directory, as the end of a sentence.
pub fn shortcoming(directory: &Path) -> String {
    let entry = match mount_of(directory) {
        Ok(entry) => entry,
        Err(failure) => return failure.what,
    };
    match file_system(&entry) {
        Err(why) => why,
        Ok(FileSystem::Ext4) => "quotas of ext4 do not limit root".to_owned(),
        Ok(FileSystem::Btrfs) => "quotas of Btrfs are not shown by df and count no inodes".to_owned(),
        Ok(FileSystem::Xfs) => "an owner can take his files out of a quota of XFS".to_owned(),
    }
}

/// Returns the limitations that users of a cage with this quota should know, a sentence each.
fn caveats(detail: &Detail) -> Vec<&'static str> {
    // `fileattr_set_prepare` (fs/file_attr.c) restricts changes of the project in other user namespaces only.
    const LEAVING: &str = "the owner of a file can take it out of the limit (`chattr -p 0`), except in a user namespace: --engine=fuse limits everybody";
    match detail {
        Detail::Project { fstype: FileSystem::Ext4, .. } => vec![
            LEAVING,
            "quotas of ext4 do not limit root (CAP_SYS_RESOURCE): a service that runs as root can exceed them; --engine=fuse limits everybody",
            "a full cage answers \"disk quota exceeded\" (EDQUOT) instead of \"no space left\" (ENOSPC)",
        ],
        Detail::Qgroup { .. } => vec![
            "a full cage answers \"disk quota exceeded\" (EDQUOT) instead of \"no space left\" (ENOSPC), and df does not show the limit",
            "subvolumes made inside it are not counted",
        ],
        Detail::Project { .. } => vec![LEAVING],
        _ => Vec::new(),
    }
}

fn privileged() -> Result<(), Failure> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    Err(Failure::new("only root can set quotas").exit(Exit::Denied).next("--engine=fuse needs no privilege"))
}

fn open(directory: &Path) -> Result<File, Failure> {
    let flags = rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::NOFOLLOW;
    let file =
        OpenOptions::new().read(true).custom_flags(i32::try_from(flags.bits()).unwrap_or_default()).open(directory);
    file.map_err(|error| Failure::io("cannot open", path_text(directory), &error))
}

fn mount_of(directory: &Path) -> Result<MountEntry, Failure> {
    let table = mountinfo::read()?;
    let entry = around(&table, directory).cloned();
    entry.ok_or_else(|| Failure::new(format!("the mount table does not say what {} lies on", path_text(directory))))
}

/// Returns the kind of file system, or why it has no quotas of directories.
fn file_system(entry: &MountEntry) -> Result<FileSystem, String> {
    match entry.kind.as_str() {
        "overlay" => Err("overlay has no quotas of its own, its upper directory's file system may".to_owned()),
        "tmpfs" => Err("tmpfs limits only a whole mount, by its option size".to_owned()),
        kind => FileSystem::of(kind).ok_or_else(|| format!("{kind} has no quotas of directories")),
    }
}

fn unable(directory: &Path, why: &str) -> Failure {
    Failure::new(format!("--engine=quota cannot limit {}: {why}", path_text(directory)))
        .next("--engine=fuse works on every file system")
}

fn caged_already(directory: &Path) -> Failure {
    let name = path_text(directory);
    let failure = Failure::new(format!("{name} is caged already")).exit(Exit::Busy);
    failure.next(format!("`nacre cage resize {name} SIZE` changes its size"))
}

/// Makes the failure of a call on quotas.
fn refused(doing: &str, directory: &Path, error: &io::Error) -> Failure {
    Failure::io(doing, path_text(directory), error)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(kind: &str) -> MountEntry {
        let line = format!("36 35 98:0 / /srv rw - {kind} /dev/x rw\n");
        mountinfo::parse(line.as_bytes()).remove(0)
    }

    #[test]
    fn every_kind_of_file_system_is_told_why_not() {
        for (kind, why) in
            [("tmpfs", "option size"), ("overlay", "upper"), ("nfs4", "nfs4 has no"), ("ext3", "ext3 has no")]
        {
            assert!(file_system(&entry(kind)).unwrap_err().contains(why), "{kind}");
        }
        assert_eq!(file_system(&entry("xfs")), Ok(FileSystem::Xfs));
    }
}
