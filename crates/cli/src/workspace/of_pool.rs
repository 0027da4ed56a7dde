//! Workspaces over a file system of a pool: over a snapshot of it, which takes no time, however many files there are.
//!
//! The snapshot is shown below `.zfs` of the mounted file system; its inode numbers equal the file system's, but for the
//! upper bits. A commit goes into the file system itself, and is followed by a new snapshot.

use crate::fs;
use nacre_daemon::{
    failure::{Exit, Failure},
    mountinfo,
    report::path_text,
    whole_file,
    workspace::{
        settings::{CloneSettings, StoredPath, WorkspaceSettings},
        store::Workspace,
    },
};
use nacre_pool::rows::keys::NUMBER_MOST;
use nacre_union::base_log::{HiddenEntry, parse};
use std::{
    fs as files, io,
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

/// A file system of a pool that `--from` names.
pub struct Dataset {
    name: String,
    snapshot: Option<String>,
    mountpoint: PathBuf,
}

/// Finds the mounted file system that a word `POOL/FS[@SNAPSHOT]` names; `None` where none is mounted.
///
/// # Errors
/// The mount table cannot be read.
pub fn find(word: &str) -> Result<Option<Dataset>, Failure> {
    let (name, snapshot) = match word.split_once('@') {
        Some((name, snapshot)) => (name, Some(snapshot.to_owned())),
        None => (word, None),
    };
    if name.is_empty() || name.starts_with(['/', '.']) {
        return Ok(None);
    }
    let entry = mountinfo::read()?.into_iter().rfind(|entry| entry.is_served() && entry.source == Path::new(name));
    Ok(entry.map(|entry| Dataset { name: name.to_owned(), snapshot, mountpoint: entry.mountpoint }))
}

impl Dataset {
    /// The settings of a workspace of this name over the file system; makes the snapshot.
    ///
    /// # Errors
    /// The snapshot cannot be made, or is not there.
    pub fn settings(&self, workspace: &str, created: u64) -> Result<WorkspaceSettings, Failure> {
        let own_snapshot = self.snapshot.is_none();
        let short = self.snapshot.clone().unwrap_or_else(|| format!("workspace-{workspace}"));
        let snapshot = format!("{}@{short}", self.name);
        if own_snapshot {
            command(&["snapshot", &snapshot])?;
        }
        let base = self.mountpoint.join(".zfs/snapshot").join(&short);
        if !base.is_dir() {
            return Err(Failure::new(format!("{} is not there", path_text(&base)))
                .exit(Exit::NotFound)
                .next(format!("`nacre fs list -t snapshot {}` shows the snapshots", self.name)));
        }
        let mut settings = WorkspaceSettings::new(vec![base], self.mountpoint.clone(), created);
        settings.clone = Some(CloneSettings { snapshot, own_snapshot, dataset: self.name.clone() });
        Ok(settings)
    }
}

/// Runs a command of `nacre fs`.
fn command(words: &[&str]) -> Result<(), Failure> {
    let matches = fs::command::command()
        .try_get_matches_from(std::iter::once("fs").chain(words.iter().copied()))
        .map_err(|error| Failure::new(error.to_string()))?;
    let code = fs::run::run(fs::command::parse(&matches)?, &crate::pool::run::typed("nacre"))?;
    if code == std::process::ExitCode::SUCCESS {
        return Ok(());
    }
    Err(Failure::new(format!("`nacre fs {}` failed", words.join(" "))))
}

/// Removes the snapshot that was made for a workspace, if there is one.
///
/// # Errors
/// It cannot be destroyed.
pub fn release(settings: &WorkspaceSettings) -> Result<(), Failure> {
    match &settings.clone {
        Some(clone) if clone.own_snapshot => command(&["destroy", &clone.snapshot]),
        _ => Ok(()),
    }
}

/// The directories into which a commit goes.
pub fn targets(settings: &WorkspaceSettings) -> Vec<&Path> {
    match &settings.clone {
        Some(_) => vec![settings.over.0.as_path()],
        None => settings.directories(),
    }
}

/// Replaces the snapshot's inode numbers in the log of hidden entries by the file system's.
///
/// # Errors
/// Errors of the storage.
pub fn renumber(workspace: &Workspace) -> Result<(), Failure> {
    let StoredPath(over) = &workspace.settings.over;
    if workspace.settings.clone.is_none() {
        return Ok(());
    }
    let failed = |path: &Path| {
        let text = path_text(path);
        move |error: io::Error| Failure::io("cannot compare with", &text, &error)
    };
    // The bits above number the trees of a mount.
    let low = NUMBER_MOST;
    let high = files::metadata(over).map_err(failed(over))?.ino() & !low;
    let log = workspace.changes().join("base.log");
    let before = files::read(&log).map_err(failed(&log))?;
    let text: String =
        parse(&before).into_iter().map(|entry| HiddenEntry { ino: entry.ino & low | high, ..entry }.line()).collect();
    if text.as_bytes() == before.as_slice() {
        return Ok(());
    }
    // Whole or not at all: without the log, changes of others would not be seen.
    let options = files::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).clone();
    whole_file::replace(&log, &log.with_extension("new"), &options, text.as_bytes()).map_err(failed(&log))
}

/// Has a workspace show the file system as it is after a commit.
///
/// # Errors
/// The snapshot cannot be replaced.
pub fn renew(settings: &WorkspaceSettings) -> Result<(), Failure> {
    match &settings.clone {
        Some(clone) if clone.own_snapshot => {
            command(&["destroy", &clone.snapshot])?;
            command(&["snapshot", &clone.snapshot])
        }
        _ => Ok(()),
    }
}
