//! The log of hidden entries after a commit: only what the upper still hides.

use crate::{
    Result,
    beneath::Tree,
    trouble::During,
    upper::{LOG, Scan, Upper},
};
use rustix::fs::{self, Mode, OFlags};
use std::{
    collections::{BTreeMap, HashSet},
    fs::File,
    io::Write,
    os::fd::AsFd,
    path::{Path, PathBuf},
};

/// Name of the new log until it is complete.
const NEW: &str = "base.log.new";

/// Whether the upper hides the entry of the base at a path.
fn is_hidden(scan: &Scan, path: &Path) -> bool {
    if scan.entries.contains_key(path) || scan.whiteouts.contains_key(path) {
        return true;
    }
    path.ancestors().skip(1).any(|above| {
        scan.whiteouts.contains_key(above)
            || scan.entries.get(above).is_some_and(|entry| entry.opaque || !entry.meta.is_directory())
    })
}

/// Writes the log anew with the last line of each path that the upper still hides. Directories whose attributes the commit
/// has changed (`changed`) are as the base has them now.
pub(crate) fn rewrite_log(base: &Tree, upper: &Upper, changed: &HashSet<&Path>) -> Result<()> {
    let scan = upper.scan()?;
    let lines: BTreeMap<&PathBuf, _> = scan.hidden.iter().filter(|(path, _)| is_hidden(&scan, path)).collect();
    let mut log = String::new();
    for (path, line) in lines {
        let mut line = line.clone();
        let now = base.meta(path).during("read", &base.path_of(path))?;
        if let Some(now) =
            now.filter(|now| now.is_directory() && now.ino == line.ino && changed.contains(path.as_path()))
        {
            (line.mode, line.uid, line.gid) = (now.permissions(), now.uid, now.gid);
            (line.mtime, line.ctime) = (now.mtime, now.ctime);
        }
        log.push_str(&line.line());
    }
    write(&upper.state, &log).during("write", &upper.state.path_of(Path::new(LOG)))
}

/// Replaces the log in one step.
pub(crate) fn write(state: &Tree, log: &str) -> std::io::Result<()> {
    let directory = state.listed_directory(Path::new(""))?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut file = File::from(fs::openat(&directory, NEW, flags, Mode::from_raw_mode(0o600))?);
    file.write_all(log.as_bytes())?;
    file.sync_all()?;
    fs::renameat(&directory, NEW, &directory, LOG)?;
    Ok(fs::fsync(directory.as_fd())?)
}
