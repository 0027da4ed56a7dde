//! Project quotas of ext4 and XFS: all files of the directory belong to a project of its own, and the project has
//! hard limits.
//!
//! The order makes every interruption harmless: a free project id is chosen and recorded, the files of the tree
//! move into the project, and only then the limits are set. The same command completes an interrupted one.

use super::{caged_already, refused, tree, unable};
use crate::{
    cage::{
        engine::{EngineKind, Figures, FileSystem, Tell, Wanted},
        record::{self, CageRecord, Detail},
    },
    failure::Failure,
    mountinfo::MountEntry,
    report::path_text,
};
use nacre_sys::project_quota::{self, LIMIT_UNIT, Membership, Usage};
use std::{
    collections::BTreeSet,
    fs::{self, File},
    io,
    os::fd::AsFd,
    path::Path,
};

/// First project id that we choose; administrators and containers choose ids below it.
const FIRST: u32 = 0x6E61_0000;
/// Number of project ids that are tried.
const NUMBERS: u32 = 0x1_0000;
/// Files in which administrators name projects (xfs_quota(8)): `number:directory` and `name:number`. We never write
/// them.
const NAMED: [&str; 2] = ["/etc/projects", "/etc/projid"];

/// Checks that the file system enforces project quotas, and that the directory belongs to no project.
///
/// # Errors
/// Why a cage is not possible, and how to change that.
pub fn ready(directory: &File, name: &Path, entry: &MountEntry, fstype: FileSystem) -> Result<(), Failure> {
    let how = how_to_enable(entry, fstype);
    match project_quota::state(directory.as_fd()) {
        Ok(state) if state.enforced => {}
        Ok(_) => {
            return Err(
                unable(name, &format!("project quotas are not on for {}", path_text(&entry.mountpoint))).next(how)
            );
        }
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            return Err(refused("cannot see the quotas of", name, &error));
        }
        Err(error) => {
            let why = format!(
                "{fstype} at {} has no project quotas ({})",
                path_text(&entry.mountpoint),
                crate::failure::reason(&error)
            );
            return Err(unable(name, &why).next(how));
        }
    }
    let membership = project_quota::membership(directory.as_fd())
        .map_err(|error| refused("cannot see the project of", name, &error))?;
    if membership.project == 0 {
        return Ok(());
    }
    let why = format!("it belongs to project {} already, and projects do not nest", membership.project);
    Err(unable(name, &why).next("--engine=fuse can limit a part of what is limited already"))
}

fn how_to_enable(entry: &MountEntry, fstype: FileSystem) -> String {
    let (device, mountpoint) = (path_text(&entry.source), path_text(&entry.mountpoint));
    match (fstype, entry.mountpoint == Path::new("/")) {
        (FileSystem::Ext4, false) => format!(
            "`umount {mountpoint}; tune2fs -O project,quota -Q prjquota {device}; mount -o prjquota {device} {mountpoint}` turns them on \
             (and prjquota in fstab), where the kernel has CONFIG_QUOTA and CONFIG_QFMT_V2; or use --engine=fuse"
        ),
        (FileSystem::Ext4, true) => format!(
            "from a rescue system, `tune2fs -O project,quota -Q prjquota {device}` turns them on (and rootflags=prjquota for the kernel), \
             where the kernel has CONFIG_QUOTA and CONFIG_QFMT_V2; or use --engine=fuse"
        ),
        (_, false) => format!(
            "`umount {mountpoint}; mount -o prjquota {device} {mountpoint}` turns them on (and prjquota in fstab; a remount is not enough), \
             where the kernel has CONFIG_XFS_QUOTA; or use --engine=fuse"
        ),
        (_, true) => {
            "rootflags=prjquota for the kernel turns them on at the next start, where it has CONFIG_XFS_QUOTA; or use --engine=fuse"
                .to_owned()
        }
    }
}

/// Makes the cage, or completes an interrupted one.
///
/// # Errors
/// As [`ready`], and errors of the system.
pub fn create(
    wanted: &Wanted,
    bytes: u64,
    open: &File,
    entry: &MountEntry,
    fstype: FileSystem,
    known: Option<CageRecord>,
    tell: Tell<'_>,
) -> Result<CageRecord, Failure> {
    let name = wanted.directory.as_path();
    large_enough(bytes)?;
    let membership =
        project_quota::membership(open.as_fd()).map_err(|error| refused("cannot see the project of", name, &error))?;
    let own = known.filter(|record| project_of(record).is_ok_and(|project| project == membership.project));
    let record = match own {
        // It was interrupted.
        Some(record) if matches!(record.detail, Detail::Project { complete: false, .. }) => {
            CageRecord { bytes, inodes: wanted.inodes, ..record }
        }
        Some(_) => return Err(caged_already(name)),
        // A record of this name, if any, is of another directory, which is gone.
        None => {
            ready(open, name, entry, fstype)?;
            let _choosing = record::choosing()?;
            let project = free_project(open, name)?;
            let detail = Detail::Project { fstype, project, filesystem: entry.mountpoint.clone(), complete: false };
            let record = CageRecord::new(EngineKind::Quota, name, name, bytes, wanted.inodes, detail);
            record.save()?;
            record
        }
    };
    let made = complete(record.clone(), open, tell);
    if made.is_err() && lift(&record, Some(open), &mut |_| ()).is_ok() {
        // Everything is undone. Where it cannot be undone, the record stays, and the same command continues from
        // there.
        record.remove()?;
    }
    made
}

fn large_enough(bytes: u64) -> Result<(), Failure> {
    // One block of either file system.
    const LEAST: u64 = 4096;
    if bytes >= LEAST {
        Ok(())
    } else {
        Err(Failure::usage(format!("--size={bytes} is less than a block, {LEAST} bytes")))
    }
}

fn complete(record: CageRecord, open: &File, tell: Tell<'_>) -> Result<CageRecord, Failure> {
    let (project, name) = (project_of(&record)?, record.directory.as_path());
    let mut news = |files: u64| tell(&format!("{files} files belong to the cage by now"));
    let moved = tree::relocate(open, name, 0, project, &mut news)?;
    if let Some(example) = moved.example {
        tell(&format!("{} files are immutable and not counted, such as {}", moved.left, path_text(&example)));
    }
    set(&record, open)?;
    let usage = usage(&record, open)?;
    if usage.used > record.bytes {
        tell(&format!(
            "{} bytes are in use already: nothing can be written until there are less than {}",
            usage.used, record.bytes
        ));
    }
    let detail = match record.detail.clone() {
        Detail::Project { fstype, project, filesystem, .. } => {
            Detail::Project { fstype, project, filesystem, complete: true }
        }
        other => other,
    };
    let record = CageRecord { detail, ..record };
    record.save()?;
    Ok(record)
}

/// Chooses a project id that is not in use: neither by name, nor by one of our records, nor by any file of this
/// file system.
fn free_project(open: &File, name: &Path) -> Result<u32, Failure> {
    let mut taken: BTreeSet<u32> = CageRecord::all()?.iter().filter_map(|record| project_of(record).ok()).collect();
    for file in NAMED {
        let text = match fs::read_to_string(file) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            text => text.map_err(|error| Failure::io("cannot read", file, &error))?,
        };
        taken.extend(named(&text));
    }
    for project in (FIRST..FIRST + NUMBERS).filter(|project| !taken.contains(project)) {
        let usage = project_quota::usage(open.as_fd(), project)
            .map_err(|error| refused("cannot see the quotas of", name, &error))?;
        if usage == Usage::default() {
            return Ok(project);
        }
    }
    Err(Failure::new(format!("no number is free for a project on the file system of {}", path_text(name))))
}

/// Returns the numbers in a file of projects: before the colon in one, after it in the other.
fn named(text: &str) -> impl Iterator<Item = u32> {
    let fields = text.lines().filter(|line| !line.starts_with('#')).flat_map(|line| line.split(':'));
    fields.filter_map(|field| field.trim().parse().ok())
}

fn project_of(record: &CageRecord) -> Result<u32, Failure> {
    match record.detail {
        Detail::Project { project, .. } => Ok(project),
        _ => Err(Failure::new(format!("the record of {} names no project", path_text(&record.directory)))),
    }
}

fn usage(record: &CageRecord, open: &File) -> Result<Usage, Failure> {
    let usage = project_quota::usage(open.as_fd(), project_of(record)?);
    usage.map_err(|error| refused("cannot see the quotas of", &record.directory, &error))
}

/// Sets the limits of the record.
///
/// # Errors
/// A size below a block, or errors of the system.
pub fn set(record: &CageRecord, open: &File) -> Result<(), Failure> {
    large_enough(record.bytes)?;
    let set = project_quota::set_limits(open.as_fd(), project_of(record)?, record.bytes, record.inodes.unwrap_or(0));
    set.map_err(|error| refused("cannot set the quota of", &record.directory, &error))
}

/// Returns limits and usage as the file system reports them.
///
/// # Errors
/// The system does not report them.
pub fn figures(record: &CageRecord, open: &File) -> Result<Figures, Failure> {
    let project = project_of(record)?;
    let usage = usage(record, open)?;
    let membership = project_quota::membership(open.as_fd())
        .map_err(|error| refused("cannot see the project of", &record.directory, &error))?;
    let attached = membership == Membership { project, inherited: true } && usage.limit > 0;
    let mut notes = Vec::new();
    if !attached {
        notes
            .push("somebody has lifted the limit by other means; the same `nacre cage` after `nacre cage remove` sets it again".to_owned());
    }
    let fstype = match &record.detail {
        Detail::Project { fstype, .. } => fstype.word(),
        _ => "",
    };
    Ok(Figures {
        attached,
        limit: if attached { usage.limit } else { record.bytes / LIMIT_UNIT * LIMIT_UNIT },
        used: usage.used,
        free: usage.limit.saturating_sub(usage.used),
        inode_limit: Some(usage.inode_limit).filter(|limit| *limit > 0),
        inodes_used: Some(usage.inodes),
        on_host: None,
        mode: format!("project {project} of {fstype}"),
        notes,
        fstab: None,
    })
}

/// Lifts the limits and releases the project id; without the directory, lifts only the limits.
///
/// # Errors
/// Errors of the system; the limits are lifted first.
pub fn lift(record: &CageRecord, open: Option<&File>, tell: Tell<'_>) -> Result<(), Failure> {
    let project = project_of(record)?;
    let refused = |error: io::Error| refused("cannot lift the quota of", &record.directory, &error);
    let Some(open) = open else {
        let Detail::Project { filesystem, .. } = &record.detail else { return Ok(()) };
        let root = File::open(filesystem).map_err(refused)?;
        return project_quota::set_limits(root.as_fd(), project, 0, 0).map_err(refused);
    };
    project_quota::set_limits(open.as_fd(), project, 0, 0).map_err(refused)?;
    let mut news = |files: u64| tell(&format!("{files} files have left the cage by now"));
    tree::relocate(open, &record.directory, project, 0, &mut news).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_others_are_seen() {
        let taken: Vec<u32> = named("10:/srv/a\n#11:/x\nlogs:12\n\nbroken\n13:/b\n").collect();
        assert_eq!(taken, [10, 12, 13]);
    }

    #[test]
    fn how_to_enable_depends_on_what_is_there() {
        let table = crate::mountinfo::parse(b"1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 8:2 / /srv rw - xfs /dev/b rw\n");
        let told: Vec<String> = [FileSystem::Ext4, FileSystem::Xfs]
            .iter()
            .zip(&table)
            .map(|(kind, entry)| how_to_enable(entry, *kind))
            .collect();
        assert!(
            told[0].contains("tune2fs -O project,quota -Q prjquota /dev/a") && told[0].contains("rescue"),
            "{}",
            told[0]
        );
        assert!(told[1].contains("umount /srv; mount -o prjquota /dev/b /srv"), "{}", told[1]);
        assert!(large_enough(4095).is_err());
    }
}
