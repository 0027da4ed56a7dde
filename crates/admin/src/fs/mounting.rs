//! `mount` and `unmount`: of one file system, of all of a pool; at import and export as well.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::moves::{self, Mounting};
use super::objects::{Objects, Place};
use crate::{Imported, Kind, Mounts, Progress, Refusal};

/// What is to be mounted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToMount {
    /// This file system; `None`: all whose properties ask for it.
    pub name: Option<String>,
    /// For this mount only: words of `-o`.
    pub words: Vec<String>,
    /// Over a directory that is not empty as well.
    pub overlay: bool,
    /// There: what mount(8) mounts. Where it is told so by its properties alone otherwise.
    #[serde(default)]
    pub at: Option<PathBuf>,
}

/// What is to be unmounted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ToUnmount {
    /// A file system by its name.
    Name(String),
    /// What is mounted there.
    At(PathBuf),
    /// Everything.
    All,
}

/// A mount as it is listed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountedAt {
    /// The file system.
    pub name: String,
    /// Where.
    pub at: PathBuf,
}

/// Mounts one file system, or all. What could not be mounted of all is answered as sentences.
pub(super) fn mount(pool: &Imported, mounts: &dyn Mounts, what: &ToMount) -> Result<Vec<String>, Refusal> {
    let mut wanted = match &what.name {
        None => all(pool, mounts)?,
        Some(name) => vec![one(pool, mounts, name, what)?],
    };
    for mounting in &mut wanted {
        words(&mut mounting.options, &what.words)?;
        mounting.options.overlay |= what.overlay;
    }
    if what.name.is_none() {
        return Ok(moves::mount(mounts, wanted));
    }
    wanted.into_iter().try_for_each(|Mounting { id, at, options }| mounts.mount(crate::What::head(id), &at, &options))?;
    Ok(Vec::new())
}

fn one(pool: &Imported, mounts: &dyn Mounts, name: &str, what: &ToMount) -> Result<Mounting, Refusal> {
    let mut objects = Objects::now(pool, mounts);
    let id = objects.filesystem("open", name)?;
    let refuse = |kind, why: &str, next: &str| Err(Refusal::new(kind, format!("cannot mount '{name}': {why}")).next(next));
    if let Some(mounted) = objects.mounted(id) {
        if what.words.iter().any(|word| word == "remount") {
            return refuse(Kind::Invalid, "a mount is not given other options this way", "set its properties: they take effect at once");
        }
        let next = format!("it is at {}", mounted.at.display());
        return refuse(Kind::Busy, "filesystem already mounted", &next);
    }
    if objects.effective(id, "canmount")?.value == "off" {
        return refuse(Kind::Invalid, "'canmount' property is set to 'off'", &format!("nacre fs set canmount=on {name}"));
    }
    match (objects.place(id)?, &what.at) {
        (Place::At(at), None) => Ok(Mounting { id, at, options: objects.options(id)? }),
        (Place::Legacy, Some(at)) => Ok(Mounting { id, at: at.clone(), options: objects.options(id)? }),
        (_, Some(_)) => {
            let next = format!("nacre fs mount {name}, or nacre fs set mountpoint=legacy {name}");
            refuse(Kind::Invalid, "mount(8) mounts those whose mountpoint is 'legacy'", &next)
        }
        (Place::Legacy, None) => {
            let next = format!("use mount(8) to mount this filesystem: mount -t fuse.nacre fs:{name} DIRECTORY");
            refuse(Kind::Invalid, "legacy mountpoint", &next)
        }
        (Place::None, None) => refuse(Kind::Invalid, "no mountpoint set", &format!("nacre fs set mountpoint=PATH {name}")),
    }
}

/// Those of all file systems that ask for it and are not mounted.
fn all(pool: &Imported, mounts: &dyn Mounts) -> Result<Vec<Mounting>, Refusal> {
    let mut objects = Objects::now(pool, mounts);
    let ids = objects.descendants(objects.look.root()?)?;
    let ids: Vec<u64> = ids.into_iter().filter(|id| objects.mounted(*id).is_none()).collect();
    moves::wanted(&mut objects, &ids)
}

/// Words of `-o` for one mount.
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

/// Unmounts: one with what is mounted below it, or all.
pub(super) fn unmount(pool: &Imported, mounts: &dyn Mounts, what: &ToUnmount, force: bool) -> Result<(), Refusal> {
    let all: Vec<u64> = mounts.mounted().into_iter().map(|mounted| mounted.what.dataset).collect();
    let ids = {
        let objects = Objects::now(pool, mounts);
        match what {
            ToUnmount::All => all,
            ToUnmount::Name(name) => {
                let id = objects.filesystem("open", name)?;
                if objects.mounted(id).is_none() {
                    return Err(Refusal::new(Kind::NotFound, format!("cannot unmount '{name}': not currently mounted")));
                }
                vec![id]
            }
            ToUnmount::At(at) => {
                let found = objects.mounted_at(at);
                vec![found.ok_or_else(|| {
                    Refusal::new(Kind::NotFound, format!("cannot unmount '{}': not a mountpoint of this pool", at.display()))
                })?]
            }
        }
    };
    moves::unmount(mounts, &moves::with_below(mounts, &ids), force).map(drop)
}

/// What is mounted, in the order of the mounts.
pub(super) fn list(pool: &Imported, mounts: &dyn Mounts) -> Result<Vec<MountedAt>, Refusal> {
    let heads: Vec<_> = mounts.mounted().into_iter().filter(|mounted| mounted.what.snapshot.is_none()).collect();
    let mut objects = Objects::now(pool, mounts);
    heads.into_iter().map(|mounted| Ok(MountedAt { name: objects.known(mounted.what.dataset)?.name.clone(), at: mounted.at })).collect()
}

/// Mounts everything that is to be mounted, parents first: after an import. What cannot be mounted is told and passed over.
///
/// # Errors
/// The catalog cannot be read.
pub fn mount_all(pool: &Imported, mounts: &dyn Mounts, progress: &mut dyn Progress) -> Result<(), Refusal> {
    for failed in moves::mount(mounts, all(pool, mounts)?) {
        progress.note(&failed);
    }
    Ok(())
}

/// Unmounts everything, children first: before an export. Where one is in use, all stay.
///
/// # Errors
/// A mount in use, unless `force`.
pub fn unmount_all(pool: &Imported, mounts: &dyn Mounts, force: bool) -> Result<(), Refusal> {
    unmount(pool, mounts, &ToUnmount::All, force)
}

/// Unmounts everything, children first, even what is in use, whatever goes wrong on the way: the process is about to end.
///
/// # Errors
/// What went wrong first; all the others were tried all the same.
pub fn leave_all(mounts: &dyn Mounts) -> Result<(), Refusal> {
    let mut all = mounts.mounted();
    all.sort_by_key(|mounted| std::cmp::Reverse(moves::depth(&mounted.at)));
    let mut first = Ok(());
    for mounted in all {
        if let Err(refusal) = mounts.unmount(mounted.what, true) {
            tracing::error!(at = %mounted.at.display(), %refusal, "a mount did not end in order");
            first = first.and(Err(refusal));
        }
    }
    first
}
