//! Claims of writable branches: only one union writes to a directory, as a second one would clear away what the first
//! is building there.
//!
//! Called when a branch is opened or becomes writable. A claim is a set of locks that go with the process, on files in
//! the mounter's runtime directory ([`LockDirectory`]), one for each directory, named by its device and inode:
//!
//! | the union's own directories | branch's top directory | work directory |
//! |---|---|---|
//! | always there | shared | exclusive |
//! | on demand | exclusive | |
//!
//! The work directory itself is locked as well where only its owner may open it: older versions and processes with
//! another runtime directory (containers, a user's later session) recognize the union by that lock. One that is made on
//! demand is locked as long as it exists ([`work_lock`]).
//!
//! Invariant: no lock is on a file or directory that another user can open. A lock there (of `flock(1)`, of a program
//! that inherited it) says nothing about unions and cannot refuse a mount.

use super::union::BranchError;
use crate::spec::{BranchSource, BranchSpec, LayerSpec, StackSpec};
use nacre_layers::context::{Context, LockDirectory};
use nacre_union::{BranchMode, HeldWork, WorkLock};
use nacre_vfs::Errno;
use rustix::fs::{AtFlags, CWD, FlockOperation, Mode, OFlags, Stat};
use std::{
    fs, io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::Duration,
};

/// How often, and after which pause, a directory is tried that an ending process may still hold.
const PATIENCE: usize = 100;
/// The same where a person waits for the answer: umount(8) does not wait for the process that
/// served the mount.
const SHORT_PATIENCE: usize = 60;
const PAUSE: Duration = Duration::from_millis(50);
/// Name of the work directory in a branch's top directory.
const WORK: &str = ".wh..wh.work";

/// The locks that keep other unions from writing to a branch.
#[derive(Default)]
pub(super) struct Claim {
    files: Vec<LockFile>,
    /// The work directory, where it is locked itself.
    _work: Option<OwnedFd>,
}

/// A locked file of the lock directory.
struct LockFile {
    path: PathBuf,
    file: OwnedFd,
}

impl Drop for LockFile {
    fn drop(&mut self) {
        // Nobody else has it: a process that waits for the lock sees that the file is no longer there. A file that stays
        // (its process was killed) is removed by the next reader of the directory.
        let is_free = rustix::fs::flock(&self.file, FlockOperation::NonBlockingLockExclusive).is_ok();
        if is_free && is_at(&self.file, &self.path) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Result of an attempt to lock a file or directory.
enum Attempt<T> {
    Locked(T),
    /// Another process has the lock.
    Held,
    Failed(io::Error),
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
    let wanted = match &claimed.work {
        Some(_) => FlockOperation::NonBlockingLockShared,
        None => FlockOperation::NonBlockingLockExclusive,
    };
    let mut claim = Claim::default();
    // A branch may be named by a link.
    let Ok(top) = rustix::fs::stat(&claimed.top) else { return Ok(None) };
    claim.files.extend(lock_file(&claimed, &top, wanted, context, warnings)?);
    if claimed.work.is_none()
        && let Attempt::Held = patiently(&claimed, || lock_work(&claimed.top.join(WORK)))
    {
        return Err(is_written(&claimed));
    }
    if let Some(work) = &claimed.work {
        match rustix::fs::mkdir(work, Mode::RWXU) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            // The union says what it lacks, in its own words.
            Err(_) => return Ok(None),
        }
        let Ok(stat) = rustix::fs::statat(CWD, work, AtFlags::SYMLINK_NOFOLLOW) else { return Ok(None) };
        let exclusive = FlockOperation::NonBlockingLockExclusive;
        claim.files.extend(lock_file(&claimed, &stat, exclusive, context, warnings)?);
        claim._work = match patiently(&claimed, || lock_work(work)) {
            Attempt::Locked(work) => work,
            Attempt::Held => return Err(is_written(&claimed)),
            // Its file system has no locks, or the union reports the error in its own words.
            Attempt::Failed(_) => None,
        };
    }
    Ok(Some(claim))
}

/// Returns the lock of a branch's work directory on demand.
pub(super) fn work_lock(branch: &BranchSpec, context: &Context) -> Option<WorkLock> {
    let path = claimed(branch, &BranchMode::rw(), true, context)?.top.join(WORK);
    Some(Arc::new(move || match lock_work(&path) {
        Attempt::Locked(Some(work)) if is_at(&work, &path) => Ok(Some(Box::new(work) as HeldWork)),
        Attempt::Locked(Some(_)) => Ok(None),
        // Others may open it: its locks say nothing.
        Attempt::Locked(None) => Ok(Some(Box::new(()))),
        Attempt::Held => Err(Errno::EBUSY),
        Attempt::Failed(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        // Its file system has no locks.
        Attempt::Failed(_) => Ok(Some(Box::new(()))),
    }))
}

fn claimed<'a>(branch: &'a BranchSpec, mode: &BranchMode, on_demand: bool, context: &Context) -> Option<Claimed<'a>> {
    let at_the_top = |path: &'a Path| {
        let top = context.reached(path);
        let work = (!on_demand).then(|| top.join(WORK));
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

/// Locks the file of a directory. `None` where that is not possible; only a lock of another union is an error.
fn lock_file(
    claimed: &Claimed<'_>,
    directory: &Stat,
    wanted: FlockOperation,
    context: &Context,
    warnings: &mut Vec<String>,
) -> Result<Option<LockFile>, BranchError> {
    let place = match &context.lock_directory {
        LockDirectory::Off => return Ok(None),
        LockDirectory::At(place) => place,
        LockDirectory::Unusable(why) => {
            warnings.push(unclaimed(claimed, why));
            return Ok(None);
        }
    };
    let (major, minor) = (rustix::fs::major(directory.st_dev), rustix::fs::minor(directory.st_dev));
    let path = place.join(format!(".branch-{major:x}:{minor:x}:{:x}.lock", directory.st_ino));
    match patiently(claimed, || locked_file(&path, wanted)) {
        Attempt::Locked(file) => Ok(Some(LockFile { path: path.clone(), file })),
        Attempt::Held => Err(is_written(claimed)),
        Attempt::Failed(error) => {
            warnings.push(unclaimed(claimed, &error));
            Ok(None)
        }
    }
}

/// Makes an attempt again as long as another process has the lock, which may be ending.
#[expect(clippy::disallowed_methods, reason = "another process has the lock, and no call waits for it with an end")]
fn patiently<T>(claimed: &Claimed<'_>, attempt: impl Fn() -> Attempt<T>) -> Attempt<T> {
    for _ in 1..claimed.attempts {
        match attempt() {
            Attempt::Held => thread::sleep(PAUSE),
            done => return done,
        }
    }
    attempt()
}

/// Opens and locks a lock file, made where it is missing.
fn locked_file(path: &Path, wanted: FlockOperation) -> Attempt<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = match rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR) {
        Ok(file) => file,
        Err(error) => return Attempt::Failed(error.into()),
    };
    match rustix::fs::flock(&file, wanted) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => return Attempt::Held,
        Err(error) => return Attempt::Failed(error.into()),
    }
    // Its holder may have removed it meanwhile, and another process may have made a new one.
    if is_at(&file, path) { Attempt::Locked(file) } else { Attempt::Held }
}

/// Whether an open file still has this path.
fn is_at(file: &OwnedFd, path: &Path) -> bool {
    let identity = |stat: Stat| (stat.st_dev, stat.st_ino);
    let there = rustix::fs::statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW).map(identity);
    there.is_ok() && rustix::fs::fstat(file).map(identity) == there
}

/// Locks a work directory that nobody but its owner, the mounter, may open; other directories are left unlocked.
fn lock_work(path: &Path) -> Attempt<Option<OwnedFd>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let opened = rustix::fs::open(path, flags, Mode::empty()).and_then(|directory| {
        let stat = rustix::fs::fstat(&directory)?;
        Ok((directory, stat))
    });
    let (directory, stat) = match opened {
        Ok(opened) => opened,
        Err(error) => return Attempt::Failed(error.into()),
    };
    if stat.st_uid != rustix::process::geteuid().as_raw() || stat.st_mode & 0o077 != 0 {
        return Attempt::Locked(None);
    }
    match rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Attempt::Locked(Some(directory)),
        Err(rustix::io::Errno::WOULDBLOCK) => Attempt::Held,
        Err(error) => Attempt::Failed(error.into()),
    }
}

fn is_written(claimed: &Claimed<'_>) -> BranchError {
    BranchError {
        what: format!(
            "branch {} is written by another union; a branch that several unions share has to be ro in all of them",
            claimed.branch.display()
        ),
        reason: Some(Errno::EBUSY),
    }
}

fn unclaimed(claimed: &Claimed<'_>, why: impl std::fmt::Display) -> String {
    format!("branch {}: nothing keeps another union from writing to it ({why})", claimed.branch.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXCLUSIVE: FlockOperation = FlockOperation::NonBlockingLockExclusive;

    fn locked(path: &Path) -> LockFile {
        match locked_file(path, EXCLUSIVE) {
            Attempt::Locked(file) => LockFile { path: path.to_owned(), file },
            Attempt::Held => panic!("it is held"),
            Attempt::Failed(error) => panic!("{error}"),
        }
    }

    #[test]
    fn a_lock_file_is_there_as_long_as_its_lock() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("lock");
        let held = locked(&path);
        assert!(matches!(locked_file(&path, EXCLUSIVE), Attempt::Held));
        assert!(matches!(locked_file(&path, FlockOperation::NonBlockingLockShared), Attempt::Held));
        drop(held);
        assert!(!path.exists());
        // A file that was removed and made again by another process is that process's.
        let removed = locked(&path);
        fs::remove_file(&path).unwrap();
        let _other = locked(&path);
        drop(removed);
        assert!(path.exists());
    }

    #[test]
    fn a_work_directory_on_demand_is_locked_as_long_as_it_is_there() {
        use std::os::unix::fs::DirBuilderExt;
        let place = tempfile::tempdir().unwrap();
        let source = BranchSource::Directory(place.path().to_owned());
        let branch = BranchSpec { source, mode: BranchMode::rw() };
        // Two processes with runtime directories that do not know each other.
        let context = Context { lock_directory: LockDirectory::Off, ..Context::system().unwrap() };
        let [one, other] = [(); 2].map(|()| work_lock(&branch, &context).unwrap());
        let claim = || claim(&branch, &branch.mode, true, &context, &mut Vec::new());
        assert!(matches!(one(), Ok(None)), "it is not there");
        fs::DirBuilder::new().mode(0o700).create(place.path().join(WORK)).unwrap();
        let held = one().unwrap().unwrap();
        assert!(matches!(other(), Err(Errno::EBUSY)));
        assert!(claim().is_err());
        fs::remove_dir(place.path().join(WORK)).unwrap();
        assert!(claim().is_ok());
        fs::DirBuilder::new().mode(0o700).create(place.path().join(WORK)).unwrap();
        assert!(matches!(other(), Ok(Some(_))));
        drop(held);
        assert!(matches!(one(), Ok(Some(_))));
    }

    #[test]
    fn a_work_directory_that_others_may_open_is_not_locked() {
        use std::os::unix::fs::PermissionsExt;
        let place = tempfile::tempdir().unwrap();
        for (mode, is_locked) in [(0o700, true), (0o755, false), (0o770, false)] {
            fs::set_permissions(place.path(), fs::Permissions::from_mode(mode)).unwrap();
            let attempt = lock_work(place.path());
            assert!(matches!(&attempt, Attempt::Locked(lock) if lock.is_some() == is_locked), "{mode:o}");
        }
    }
}
