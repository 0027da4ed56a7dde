//! Pools that are expected to be imported: imported on this machine since it booted, and neither exported nor
//! destroyed since.
//!
//! One file per pool next to its socket. The process that owns the pool writes it before it reports the import, and
//! removes it after an orderly export. So the file stays behind where the process was killed, or could not export
//! the pool. The directory of sockets is empty after a reboot; where it is not (`/tmp` on a disk), the boot id in
//! the file differs. A pool that was imported when the machine went down is therefore not expected: the boot
//! scripts import it, or do not.
//!
//! Callers: the process (`process.rs`), and the commands that show or import pools. Only our own directory is read.

use super::{
    name_lock::NameLock,
    runtime_files::{self, EXPECTED},
};
use crate::unmount;
use crate::{
    failure::{Exit, Failure},
    mountinfo,
    runtime::{self, Whose},
    whole_file,
};
use nacre_admin::pool::{DeviceFigures, Figures, Status};
use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};
use serde::{Deserialize, Serialize};
use std::{
    fs, io,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

/// Largest file that is read, in bytes: a pool has at most some thousand devices.
const MOST: u64 = 16 << 20;

/// Record of a pool that is expected to be imported.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Expected {
    /// Name of the pool.
    pub name: String,
    /// GUID of the pool.
    pub guid: u64,
    /// Devices of the pool.
    pub devices: Vec<String>,
    /// Time of the import, seconds since 1970.
    pub since: u64,
    /// Process that owns the pool.
    pub process: u32,
    /// Boot id at the import.
    boot: String,
    /// Why its process has ended, if it was recorded.
    #[serde(default)]
    ended: Option<String>,
}

/// Health of a pool whose process has ended.
pub const UNAVAILABLE: &str = "UNAVAIL";

fn boot() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").map(|id| id.trim().to_owned()).unwrap_or_default()
}

fn path(directory: &Path, name: &str) -> PathBuf {
    directory.join(runtime_files::file(name)).with_extension(EXPECTED)
}

impl Expected {
    /// Makes the record of a pool that this process has just imported.
    pub fn new(name: &str, guid: u64, devices: Vec<String>) -> Expected {
        let (since, process) = (nacre_admin::clock::now(), std::process::id());
        Expected { name: name.to_owned(), guid, devices, since, process, boot: boot(), ended: None }
    }

    /// Writes the record, and removes records of the same pool under other names.
    ///
    /// # Errors
    /// It cannot be written: the end of the process would not be noticed.
    pub fn keep(&self, directory: &Path) -> Result<(), Failure> {
        let path = path(directory, &self.name);
        let failed = |error: io::Error| Failure::io("cannot keep that the pool is imported in", path.display(), &error);
        let text = serde_json::to_vec(self).map_err(|error| failed(error.into()))?;
        let options = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).clone();
        whole_file::replace(&path, &path.with_extension("import"), &options, &text).map_err(failed)?;
        // It may have had another name before its process was killed.
        for other in all().into_iter().filter(|other| other.guid == self.guid && other.name != self.name) {
            forget(directory, &other.name);
        }
        Ok(())
    }

    /// Records why the process has ended for good, for later commands.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn ended(directory: &Path, name: &str, why: &str) -> Result<(), Failure> {
        let Some(mut there) = all().into_iter().find(|expected| expected.name == name) else { return Ok(()) };
        there.ended = Some(why.to_owned());
        there.keep(directory)
    }

    /// Whether its process exists: it holds the lock on the name from before the import to its very end.
    fn is_owned(&self) -> bool {
        let lock = runtime::ours().join(runtime_files::file(&self.name)).with_extension("lock");
        match open(&lock, OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::empty()) {
            Ok(lock) => flock(&lock, FlockOperation::NonBlockingLockShared) == Err(rustix::io::Errno::WOULDBLOCK),
            Err(_) => false,
        }
    }

    /// Returns the figures for lists of pools.
    pub fn figures(&self) -> Figures {
        let device = |path: &String| DeviceFigures { path: path.clone(), ..DeviceFigures::default() };
        Figures {
            name: self.name.clone(),
            guid: self.guid,
            health: UNAVAILABLE.to_owned(),
            devices: self.devices.iter().map(device).collect(),
            since: self.since,
            now: nacre_admin::clock::now(),
            process: self.process,
            ended: self.ended.clone(),
            redundant_metadata: true,
            ordered_names: true,
            ..Figures::default()
        }
    }

    /// Returns the status for `nacre pool status`.
    pub fn status(&self) -> Status {
        Status { figures: self.figures(), ..Status::default() }
    }

    /// Makes the failure for a request to this pool.
    pub fn failure(&self) -> Failure {
        let name = &self.name;
        let why = self.ended.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
        Failure::new(format!(
            "cannot open '{name}': pool is unavailable: its process {} has ended without exporting it{why}",
            self.process
        ))
        .exit(Exit::Failure)
        .next(format!("`nacre pool import {name}` brings it back, `nacre pool export -f {name}` gives it up"))
    }

    /// Gives the pool up: removes its mounts and records; only its devices remain.
    ///
    /// # Errors
    /// Another process imports it just now, or a dead mount cannot be unmounted.
    pub fn give_up(&self, directory: &Path) -> Result<(), Failure> {
        let Some(name) = NameLock::free(directory, &self.name)? else { return Err(self.failure().exit(Exit::Busy)) };
        let is_of = |source: &Path| {
            source.to_str().is_some_and(|source| source.split(['/', '@']).next() == Some(self.name.as_str()))
        };
        let entries = mountinfo::read()?;
        for entry in entries.iter().rev().filter(|entry| entry.kind == "fuse.nacre" && is_of(&entry.source)) {
            unmount::clear_of(&entry.mountpoint, &["nacre".to_owned()])?;
        }
        forget(directory, &self.name);
        name.give_up(self.guid);
        Ok(())
    }
}

/// Removes the record of the pool with this name.
pub fn forget(directory: &Path, name: &str) {
    // A record that stays shows the pool as unavailable, until the next import and export.
    if let Err(error) = fs::remove_file(path(directory, name)).or_else(|error| match error.kind() {
        io::ErrorKind::NotFound => Ok(()),
        _ => Err(error),
    }) {
        tracing::warn!(%error, "a pool that was let go counts as unavailable");
    }
}

/// Returns all records, sorted by name.
pub fn all() -> Vec<Expected> {
    let boot = boot();
    let read = |path: PathBuf| {
        let small = fs::symlink_metadata(&path).is_ok_and(|file| file.is_file() && file.len() <= MOST);
        let text = small.then(|| fs::read(&path).ok()).flatten()?;
        serde_json::from_slice::<Expected>(&text).ok()
    };
    let files = runtime::sockets(&Whose::Ours, EXPECTED).into_iter().map(|file| file.path);
    let mut found: Vec<Expected> = files.filter_map(read).filter(|expected| expected.boot == boot).collect();
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found
}

/// Returns the records of these names (all, where none is named) whose process has ended.
pub fn lost(names: &[String]) -> Vec<Expected> {
    let wanted = |expected: &Expected| names.is_empty() || names.contains(&expected.name);
    let mut lost: Vec<Expected> =
        all().into_iter().filter(|expected| wanted(expected) && !expected.is_owned()).collect();
    if !lost.is_empty() {
        // A process that exports its pool removes the record before it releases the name: a pool exported meanwhile
        // is not lost.
        let still = all();
        lost.retain(|expected| still.contains(expected));
    }
    lost
}

/// Returns the names of all expected pools, and whether their processes exist.
pub fn there() -> Vec<(String, bool)> {
    let lost = lost(&[]);
    all().into_iter().map(|expected| (expected.name.clone(), !lost.contains(&expected))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_read_again() {
        let scratch = tempfile::tempdir().unwrap();
        let expected = Expected::new("tank", 7, vec!["/srv/a".to_owned()]);
        expected.keep(scratch.path()).unwrap();
        let read: Expected = serde_json::from_slice(&fs::read(path(scratch.path(), "tank")).unwrap()).unwrap();
        assert_eq!(read, expected);
        assert_eq!(expected.figures().health, UNAVAILABLE);
        forget(scratch.path(), "tank");
        assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0);
    }
}
