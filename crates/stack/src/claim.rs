//! Claims of writable branches: only one union writes to a directory, as a second one would clear away what the first
//! is building there.
//!
//! Called when a branch is opened or becomes writable. A claim is two locks that go with the process:
//!
//! | the union's own directories | branch's top directory | work directory |
//! |---|---|---|
//! | always there | shared | exclusive |
//! | on demand | exclusive | |
//!
//! Everybody who may read a branch can lock its top directory: a lock of another user's process is reported and keeps
//! nobody from mounting.

use super::union::BranchError;
use crate::spec::{BranchSource, BranchSpec, LayerSpec, StackSpec};
use nacre_layers::context::Context;
use nacre_union::BranchMode;
use nacre_vfs::Errno;
use rustix::fs::{FlockOperation, Mode, OFlags};
use std::{
    fs, io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

/// How often, and after which pause, a directory is tried that an ending process may still hold.
const PATIENCE: usize = 100;
/// The same where a person waits for the answer: umount(8) does not wait for the process that
/// served the mount.
const SHORT_PATIENCE: usize = 60;
const PAUSE: Duration = Duration::from_millis(50);

/// The locks that keep other unions from writing to a branch.
pub(super) struct Claim {
    _locked: Vec<OwnedFd>,
}

/// What of a branch is locked.
struct Claimed<'a> {
    branch: &'a Path,
    top: PathBuf,
    /// The work directory; `None` where it is made on demand.
    work: Option<PathBuf>,
    /// How often a lock is tried.
    attempts: usize,
}

/// Claims a branch for this mode; `None` where nothing is written to it, or its directory is not there.
///
/// # Errors
/// Another union writes to it.
pub(super) fn claim(
    branch: &BranchSpec,
    mode: &BranchMode,
    on_demand: bool,
    context: &Context,
    warnings: &mut Vec<String>,
) -> Result<Option<Claim>, BranchError> {
    let Some(claimed) = claimed(branch, mode, on_demand, context) else { return Ok(None) };
    let mut locked = Vec::new();
    let wanted = match &claimed.work {
        Some(_) => FlockOperation::NonBlockingLockShared,
        None => FlockOperation::NonBlockingLockExclusive,
    };
    locked.extend(lock(&claimed, &claimed.top, wanted, warnings)?);
    if let Some(work) = &claimed.work {
        match rustix::fs::mkdir(work, Mode::RWXU) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            // The union says what it lacks, in its own words.
            Err(_) => return Ok(None),
        }
        locked.extend(lock(&claimed, work, FlockOperation::NonBlockingLockExclusive, warnings)?);
    }
    Ok(Some(Claim { _locked: locked }))
}

fn claimed<'a>(branch: &'a BranchSpec, mode: &BranchMode, on_demand: bool, context: &Context) -> Option<Claimed<'a>> {
    let at_the_top = |path: &'a Path| {
        let top = context.reached(path);
        let work = (!on_demand).then(|| top.join(".wh..wh.work"));
        Claimed { branch: path, top: top.into(), work, attempts: SHORT_PATIENCE }
    };
    let leaf = match &branch.source {
        BranchSource::Directory(path) => Some(at_the_top(path)),
        BranchSource::Stack(StackSpec { layers }) => match layers.first() {
            Some(LayerSpec::Host(host)) => Some(match &host.work {
                // Container engines mount again at once what they have just unmounted, and the
                // process before is still ending.
                Some(work) => Claimed {
                    branch: &host.source,
                    top: context.reached(&host.source).into(),
                    work: Some(context.reached(work).join("work")),
                    attempts: PATIENCE,
                },
                None => at_the_top(&host.source),
            }),
            _ => None,
        },
    };
    leaf.filter(|_| mode.writable())
}

/// Locks a directory. `None` where that is not possible; only a lock of another union is an error.
#[expect(clippy::disallowed_methods, reason = "another process has the lock, and no call waits for it with an end")]
fn lock(
    claimed: &Claimed<'_>,
    path: &Path,
    wanted: FlockOperation,
    warnings: &mut Vec<String>,
) -> Result<Option<OwnedFd>, BranchError> {
    // A branch may be named by a link.
    let follow = if path == claimed.top { OFlags::empty() } else { OFlags::NOFOLLOW };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | follow;
    let Ok(directory) = rustix::fs::open(path, flags, Mode::empty()) else { return Ok(None) };
    let mut locked = rustix::fs::flock(&directory, wanted);
    for _ in 1..claimed.attempts {
        if locked != Err(rustix::io::Errno::WOULDBLOCK) || is_held_by_others(directory.as_fd()) {
            break;
        }
        thread::sleep(PAUSE);
        locked = rustix::fs::flock(&directory, wanted);
    }
    let why = match locked {
        Ok(()) => return Ok(Some(directory)),
        Err(rustix::io::Errno::WOULDBLOCK) if is_held_by_others(directory.as_fd()) => {
            "a process of another user has locked it".to_owned()
        }
        Err(rustix::io::Errno::WOULDBLOCK) => {
            return Err(BranchError {
                what: format!(
                    "branch {} is written by another union; a branch that several unions share has to be ro in all of them",
                    claimed.branch.display()
                ),
                reason: Some(Errno::EBUSY),
            });
        }
        Err(error) => io::Error::from(error).to_string(),
    };
    warnings
        .push(format!("branch {}: nothing keeps another union from writing to it ({why})", claimed.branch.display()));
    Ok(None)
}

/// Whether all locks of a directory are those of users who could not have mounted a union that writes here: neither root
/// nor we. Holders that cannot be seen count as unions.
fn is_held_by_others(directory: BorrowedFd<'_>) -> bool {
    let (Ok(stat), Ok(locks)) = (rustix::fs::fstat(directory), fs::read_to_string("/proc/locks")) else { return false };
    let (major, minor) = (rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev));
    let place = format!("{major:02x}:{minor:02x}:{}", stat.st_ino);
    let own = rustix::process::geteuid().as_raw();
    let mut holders = 0;
    for line in locks.lines().filter(|line| !line.contains("->")) {
        // `1: FLOCK ADVISORY WRITE 123 08:01:456 0 EOF`
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (Some(&"FLOCK"), Some(holder), Some(of)) = (fields.get(1), fields.get(4), fields.get(5)) else { continue };
        if *of != place {
            continue;
        }
        let user = fs::metadata(format!("/proc/{holder}")).map(|process| process.uid());
        if !user.is_ok_and(|user| user != 0 && user != own) {
            return false;
        }
        holders += 1;
    }
    holders > 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_own_lock_is_no_strangers() {
        let place = tempfile::tempdir().unwrap();
        let directory = fs::File::open(place.path()).unwrap();
        assert!(!is_held_by_others(directory.as_fd()), "nobody has locked it");
        rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive).unwrap();
        assert!(!is_held_by_others(directory.as_fd()));
    }
}
