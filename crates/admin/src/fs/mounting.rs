//! `mount` and `unmount`: of one file system or all of a pool; at import and export as well.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::moves::{self, Mounting};
use super::objects::{MountPointSetting, Objects};
use crate::{Imported, Kind, MountOptions, Mounts, Progress, Refusal, What};

/// Arguments of `mount`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToMount {
    /// The file system; `None`: all whose properties ask for it.
    pub name: Option<String>,
    /// Temporary options of `-o`.
    pub words: Vec<String>,
    /// Allows a mount over a directory that is not empty.
    pub overlay: bool,
    /// The mount point of mount(8). Otherwise it is taken from the properties.
    #[serde(default)]
    pub at: Option<PathBuf>,
}

/// Arguments of `unmount`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ToUnmount {
    /// A file system by its name.
    Name(String),
    /// The mount at this path.
    At(PathBuf),
    /// All mounts.
    All,
}

/// An entry of the list of mounts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountedAt {
    /// The file system.
    pub name: String,
    /// The mount point.
    pub at: PathBuf,
}

/// Mounts one file system, or all; returns a sentence for each of all that failed.
pub(super) fn mount(pool: &Imported, mounts: &dyn Mounts, what: &ToMount) -> Result<Vec<String>, Refusal> {
    let mut wanted = match &what.name {
        None => all(pool, mounts)?,
        Some(name) if name.contains('@') => return snapshot(pool, mounts, name, what).map(|()| Vec::new()),
        Some(name) => match hidden(pool, mounts, name)? {
            Some(id) => return uncovered(moves::uncover(mounts, &[id])),
            None if is_repeated(pool, mounts, name, what)? => return Ok(Vec::new()),
            None => vec![one(pool, mounts, name, what)?],
        },
    };
    for mounting in &mut wanted {
        words(&mut mounting.options, &what.words)?;
        mounting.options.overlay |= what.overlay;
    }
    if what.name.is_none() {
        let mut failed = moves::uncover(mounts, &mounts.hidden());
        failed.extend(moves::mount(mounts, wanted));
        return Ok(failed);
    }
    wanted.into_iter().try_for_each(|mounting| moves::mount_one(mounts, mounting))?;
    Ok(Vec::new())
}

/// Returns the file system of this name, if its mount is hidden.
fn hidden(pool: &Imported, mounts: &dyn Mounts, name: &str) -> Result<Option<u64>, Refusal> {
    let hidden = mounts.hidden();
    let id = Objects::now(pool, mounts).filesystem("open", name)?;
    Ok(hidden.contains(&id).then_some(id))
}

/// Whether mount(8) asks for a mount that exists at this place: `mount -a` does so for lines of fstab whose source, type
/// or root differs from those in the table of mounts.
fn is_repeated(pool: &Imported, mounts: &dyn Mounts, name: &str, what: &ToMount) -> Result<bool, Refusal> {
    let id = Objects::now(pool, mounts).filesystem("open", name)?;
    Ok(is_at(mounts, What::head(id), what))
}

/// Whether an object is mounted where mount(8) asks for it, and the options are not to be changed.
fn is_at(mounts: &dyn Mounts, object: What, what: &ToMount) -> bool {
    let Some(at) = what.at.as_ref().filter(|_| !what.words.iter().any(|word| word == "remount")) else { return false };
    mounts.mounted().iter().any(|mounted| mounted.what == object && mounted.at == *at)
}

fn uncovered(failed: Vec<String>) -> Result<Vec<String>, Refusal> {
    if failed.is_empty() { Ok(failed) } else { Err(Refusal::new(Kind::Busy, failed.join("\n"))) }
}

fn one(pool: &Imported, mounts: &dyn Mounts, name: &str, what: &ToMount) -> Result<Mounting, Refusal> {
    let mut objects = Objects::now(pool, mounts);
    let id = objects.filesystem("open", name)?;
    let refuse =
        |kind, why: &str, next: &str| Err(Refusal::new(kind, format!("cannot mount '{name}': {why}")).next(next));
    if let Some(mounted) = objects.mounted(id) {
        if what.words.iter().any(|word| word == "remount") {
            return refuse(
                Kind::Invalid,
                "a mount is not given other options this way",
                "set its properties: they take effect at once",
            );
        }
        let next = format!("it is at {}", mounted.at.display());
        return refuse(Kind::Busy, "filesystem already mounted", &next);
    }
    if objects.catalog.is_half(id)? {
        let next = "'nacre fs send -t' with its receive_resume_token sends the rest";
        return refuse(Kind::Invalid, "it is half received", next);
    }
    if objects.effective(id, "canmount")?.value == "off" {
        return refuse(
            Kind::Invalid,
            "'canmount' property is set to 'off'",
            &format!("nacre fs set canmount=on {name}"),
        );
    }
    match (objects.place(id)?, &what.at) {
        (MountPointSetting::At(at), None) => Ok(Mounting { id, at, options: objects.options(id)? }),
        (MountPointSetting::Legacy, Some(at)) => {
            let options = crate::MountOptions { place_was_named: true, ..objects.options(id)? };
            Ok(Mounting { id, at: at.clone(), options })
        }
        (_, Some(_)) => {
            let next = format!("nacre fs mount {name}, or nacre fs set mountpoint=legacy {name}");
            refuse(Kind::Invalid, "mount(8) mounts those whose mountpoint is 'legacy'", &next)
        }
        (MountPointSetting::Legacy, None) => {
            let next = format!("use mount(8) to mount this filesystem: mount -t fuse.nacre fs:{name} DIRECTORY");
            refuse(Kind::Invalid, "legacy mountpoint", &next)
        }
        (MountPointSetting::None, None) => {
            refuse(Kind::Invalid, "no mountpoint set", &format!("nacre fs set mountpoint=PATH {name}"))
        }
    }
}

/// Mounts a snapshot read-only, at the path given by mount(8).
fn snapshot(pool: &Imported, mounts: &dyn Mounts, name: &str, what: &ToMount) -> Result<(), Refusal> {
    let (snapshot, mut options) = {
        let mut objects = Objects::now(pool, mounts);
        let (of, txg) = objects.snapshot("open", name)?;
        (What { dataset: of, snapshot: Some(txg.0) }, objects.options(of)?)
    };
    let Some(at) = &what.at else {
        let refusal = Refusal::new(Kind::Invalid, format!("cannot mount '{name}': it is a snapshot"));
        return Err(refusal.next(format!(
            "it is in .zfs/snapshot of its file system; elsewhere: mount -t fuse.nacre fs:{name} DIRECTORY"
        )));
    };
    if is_at(mounts, snapshot, what) {
        return Ok(());
    }
    words(&mut options, &what.words)?;
    options = MountOptions {
        source: name.to_owned(),
        read_only: true,
        overlay: true,
        place_was_named: true,
        sharing: crate::Sharing::default(),
        ..options
    };
    mounts.mount(snapshot, at, &options)
}

/// Returns the mounts of all unmounted file systems whose properties ask for one.
fn all(pool: &Imported, mounts: &dyn Mounts) -> Result<Vec<Mounting>, Refusal> {
    let mut objects = Objects::now(pool, mounts);
    let ids = objects.descendants(objects.catalog.root()?)?;
    let ids: Vec<u64> = ids.into_iter().filter(|id| objects.mounted(*id).is_none()).collect();
    moves::wanted(&mut objects, &ids)
}

/// Parses `-o` options for one mount.
fn words(options: &mut crate::MountOptions, words: &[String]) -> Result<(), Refusal> {
    for word in words {
        match word.as_str() {
            "ro" => options.read_only = true,
            "rw" => options.read_only = false,
            "exec" => options.no_exec = false,
            "noexec" => options.no_exec = true,
            "suid" | "setuid" => options.no_suid = false,
            "nosuid" | "nosetuid" => options.no_suid = true,
            "dev" | "devices" => options.no_dev = false,
            "nodev" | "nodevices" => options.no_dev = true,
            "atime" => options.no_atime = false,
            "noatime" => options.no_atime = true,
            "defaults" | "" => {}
            other => {
                return Err(Refusal::new(Kind::Invalid, format!("cannot mount: unknown option '{other}'"))
                    .next("known are ro, rw, exec, noexec, suid, nosuid, dev, nodev, atime, noatime"));
            }
        }
    }
    Ok(())
}

/// Unmounts as asked. Of all, mounts in use stay; returns a sentence for each.
pub(super) fn unmount_asked(
    pool: &Imported,
    mounts: &dyn Mounts,
    what: &ToUnmount,
    force: bool,
) -> Result<Vec<String>, Refusal> {
    let unmounted = unmounted_by(pool, mounts, what).and_then(|ids| {
        let ids = moves::with_inner(mounts, &ids);
        if force { moves::unmount(mounts, &ids, true) } else { moves::detach(mounts, &ids) }
    });
    match unmounted {
        Err(_) if *what == ToUnmount::All => Ok(unmount_free(mounts, force)),
        unmounted => unmounted.map(|_| Vec::new()),
    }
}

/// Unmounts all, in reverse order of mounting; returns why the remaining ones stay.
fn unmount_free(mounts: &dyn Mounts, force: bool) -> Vec<String> {
    let (mut staying, mut failed) = (Vec::<PathBuf>::new(), Vec::new());
    for mounted in mounts.mounted().into_iter().rev().filter(|mounted| mounted.what.snapshot.is_none()) {
        let refused = match staying.iter().find(|below| below.starts_with(&mounted.at)) {
            Some(below) => Some(format!(
                "cannot unmount '{}': pool or dataset is busy: '{}' is in it",
                mounted.at.display(),
                below.display()
            )),
            None => {
                let id = [mounted.what.dataset];
                let gone = if force { moves::unmount(mounts, &id, true) } else { moves::detach(mounts, &id) };
                gone.err().map(|refusal| refusal.what)
            }
        };
        if let Some(why) = refused {
            staying.push(mounted.at);
            failed.push(why);
        }
    }
    failed
}

/// Returns the selected file systems.
fn unmounted_by(pool: &Imported, mounts: &dyn Mounts, what: &ToUnmount) -> Result<Vec<u64>, Refusal> {
    let objects = Objects::now(pool, mounts);
    match what {
        ToUnmount::All => Ok(mounts.mounted().into_iter().map(|mounted| mounted.what.dataset).collect()),
        ToUnmount::Name(name) => {
            let id = objects.filesystem("open", name)?;
            if objects.mounted(id).is_none() {
                let what = format!("cannot unmount '{name}': not currently mounted");
                return Err(Refusal::new(Kind::NotFound, what));
            }
            Ok(vec![id])
        }
        ToUnmount::At(at) => {
            let what = format!("cannot unmount '{}': not a mountpoint of this pool", at.display());
            // The one on top.
            let found =
                mounts.mounted().into_iter().rfind(|mounted| mounted.at == *at && mounted.what.snapshot.is_none());
            Ok(vec![found.ok_or_else(|| Refusal::new(Kind::NotFound, what))?.what.dataset])
        }
    }
}

/// Lists the mounts, in the order in which they were made.
pub(super) fn list(pool: &Imported, mounts: &dyn Mounts) -> Result<Vec<MountedAt>, Refusal> {
    let heads: Vec<_> = mounts.mounted().into_iter().filter(|mounted| mounted.what.snapshot.is_none()).collect();
    let mut objects = Objects::now(pool, mounts);
    heads
        .into_iter()
        .map(|mounted| Ok(MountedAt { name: objects.known(mounted.what.dataset)?.name.clone(), at: mounted.at }))
        .collect()
}

/// Mounts every file system whose properties ask for it, parents first: after an import. A file
/// system that cannot be mounted is reported to `progress` and skipped; returns the number of
/// reports.
///
/// # Errors
/// The catalog cannot be read.
pub fn mount_all(pool: &Imported, mounts: &dyn Mounts, progress: &mut dyn Progress) -> Result<u64, Refusal> {
    let mut failed = moves::uncover(mounts, &mounts.hidden());
    failed.extend(moves::mount(mounts, all(pool, mounts)?));
    for failed in &failed {
        progress.note(failed);
    }
    Ok(failed.len() as u64)
}

/// Unmounts everything: before an export. Where one is in use, all stay mounted.
///
/// # Errors
/// A mount in use, unless `force`.
pub fn unmount_all(pool: &Imported, mounts: &dyn Mounts, force: bool) -> Result<(), Refusal> {
    // A snapshot may be mounted below a file system.
    let snapshots = moves::unmount_snapshots(mounts, |_| true, force)?;
    let all = unmounted_by(pool, mounts, &ToUnmount::All);
    let unmounted = all.and_then(|all| moves::unmount(mounts, &all, force));
    if unmounted.is_err() {
        snapshots.back(mounts);
    }
    unmounted.map(drop)
}

/// Unmounts everything, even mounts in use, despite errors: the process is about to end.
///
/// # Errors
/// The first error; all other mounts were tried all the same.
pub fn leave_all(mounts: &dyn Mounts) -> Result<(), Refusal> {
    let mut first = Ok(());
    // The last mount is on top.
    for mounted in mounts.mounted().into_iter().rev() {
        if let Err(refusal) = mounts.unmount(mounted.what, true) {
            tracing::error!(at = %mounted.at.display(), %refusal, "a mount did not end in order");
            first = first.and(Err(refusal));
        }
    }
    first
}
