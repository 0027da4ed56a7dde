//! The log of hidden entries after a commit: only what the upper still hides.

use crate::{
    Result,
    beneath::Tree,
    compare::TARGET,
    steps::{Make, Steps},
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

/// Inode numbers of the entries of the base that the steps change.
fn changed_by(steps: &Steps) -> HashSet<u64> {
    let mut changed: HashSet<u64> = steps.attributes.iter().map(|set| set.expected.ino).collect();
    changed.extend(steps.overwrites.iter().map(|overwrite| overwrite.expected.ino));
    let files = steps.detaches.iter().filter(|detach| detach.expected.content.is_some());
    changed.extend(files.map(|detach| detach.expected.ino));
    for staged in &steps.staged {
        if let Make::LinkOfBase { ino, .. } = staged.make {
            changed.insert(ino);
        }
    }
    changed
}

/// Writes the log anew with the last line of each path that the upper still hides. Entries that the commit has changed
/// under other names, moved or removed are as the base has them now: it was not others who changed them.
pub(crate) fn rewrite_log(base: &Tree, upper: &Upper, steps: &Steps) -> Result<()> {
    let (scan, changed) = (upper.scan()?, changed_by(steps));
    let moved: Vec<&PathBuf> = steps.detaches.iter().map(|detach| &detach.path).collect();
    let lines: BTreeMap<&PathBuf, _> = scan.hidden.iter().filter(|(path, _)| is_hidden(&scan, path)).collect();
    let mut log = String::new();
    for (path, line) in lines {
        let mut line = line.clone();
        let has_moved = moved.iter().any(|moved| path.starts_with(moved));
        if line.branch <= TARGET && (has_moved || changed.contains(&line.ino)) {
            let now = base.meta(path).during("read", &base.path_of(path))?;
            match now {
                Some(now) if has_moved || now.ino == line.ino => {
                    (line.kind, line.mode, line.uid, line.gid) = (now.letter(), now.permissions(), now.uid, now.gid);
                    (line.size, line.mtime, line.ctime) = (now.size, now.mtime, now.ctime);
                    (line.ino, line.btime) = (now.ino, now.btime);
                }
                // The commit has removed it.
                None if has_moved => continue,
                _ => {}
            }
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
