//! Pools that are expected to be there: imported on this machine since it started, and neither
//! exported nor destroyed since.
//!
//! One file per pool beside its socket, written by the process that owns it before anybody is told
//! that the pool is imported, and removed by it when the pool has been let go in order. So it is
//! left where the process was killed, or could not export the pool. Where sockets are is empty
//! after a reboot; where it is not (`/tmp` on a disk), the number of the boot tells. A pool that
//! was imported when the machine went down is therefore not expected: importing it is what the
//! start of the machine does, or does not.
//!
//! Callers: the process (`process.rs`), and the commands that show or import pools. Only our own
//! directory is read.

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

/// The longest that is read, bytes: a pool has at most some thousand devices.
const MOST: u64 = 16 << 20;

/// A pool that is expected.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Expected {
    /// The name that it is imported by.
    pub name: String,
    /// Its number.
    pub guid: u64,
    /// Its devices.
    pub devices: Vec<String>,
    /// When it was imported, seconds since 1970.
    pub since: u64,
    /// The process that owns it.
    pub process: u32,
    /// The boot that it was imported in.
    boot: String,
    /// Why its process has ended, where somebody was left to say it.
    #[serde(default)]
    ended: Option<String>,
}

/// The state of a pool whose process has ended.
pub const UNAVAILABLE: &str = "UNAVAIL";

fn boot() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").map(|id| id.trim().to_owned()).unwrap_or_default()
}

fn path(directory: &Path, name: &str) -> PathBuf {
    directory.join(runtime_files::file(name)).with_extension(EXPECTED)
}

impl Expected {
    /// A pool that this process has just imported.
    pub fn new(name: &str, guid: u64, devices: Vec<String>) -> Expected {
        let (since, process) = (nacre_admin::clock::now(), std::process::id());
        Expected { name: name.to_owned(), guid, devices, since, process, boot: boot(), ended: None }
    }

    /// Expects the pool from now on, under this name alone.
    ///
    /// # Errors
    /// It cannot be written: that the process has ended would not be noticed.
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

    /// Its process has ended for good, for this reason: whoever asks for the pool is told.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn ended(directory: &Path, name: &str, why: &str) -> Result<(), Failure> {
        let Some(mut there) = all().into_iter().find(|expected| expected.name == name) else { return Ok(()) };
        there.ended = Some(why.to_owned());
        there.keep(directory)
    }

    /// Whether its process is there: it holds the lock on the name from before the import to its
    /// very end.
    fn is_owned(&self) -> bool {
        let lock = runtime::ours().join(runtime_files::file(&self.name)).with_extension("lock");
        match open(&lock, OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::empty()) {
            Ok(lock) => flock(&lock, FlockOperation::NonBlockingLockShared) == Err(rustix::io::Errno::WOULDBLOCK),
            Err(_) => false,
        }
    }

    /// What is known of it, for those who show pools.
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

    /// The same, for those who show their health.
    pub fn status(&self) -> Status {
        Status { figures: self.figures(), ..Status::default() }
    }

    /// What to say to whoever wants something of it.
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

    /// Nobody wants it back: nothing of it stays behind but its devices.
    ///
    /// # Errors
    /// Somebody imports it just now, or a mount that nobody serves cannot be taken away.
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

/// The pool of this name is expected no more.
pub fn forget(directory: &Path, name: &str) {
    // One that stays is told as unavailable, and goes with the next import and export.
    if let Err(error) = fs::remove_file(path(directory, name)).or_else(|error| match error.kind() {
        io::ErrorKind::NotFound => Ok(()),
        _ => Err(error),
    }) {
        tracing::warn!(%error, "a pool that was let go counts as unavailable");
    }
}

/// All that are expected, by name.
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

/// Those of these names (of any name, where none is named) whose process has ended.
pub fn lost(names: &[String]) -> Vec<Expected> {
    let wanted = |expected: &Expected| names.is_empty() || names.contains(&expected.name);
    let mut lost: Vec<Expected> =
        all().into_iter().filter(|expected| wanted(expected) && !expected.is_owned()).collect();
    if !lost.is_empty() {
        // A process that lets its pool go does not expect it any more before it gives the name
        // free: one that ended meanwhile is not lost.
        let still = all();
        lost.retain(|expected| still.contains(expected));
    }
    lost
}

/// The names of all that are expected, and whether their processes are there.
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
