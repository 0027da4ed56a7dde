//! Directories for state that survives a reboot: the accounting of cages, and the records of cages of the kernel's
//! engines.
//!
//! `/var/lib/nacre` for root, `$XDG_STATE_HOME/nacre` or `~/.local/state/nacre` for others; `NACRE_STATE_DIR` names
//! another directory. A cage never keeps its accounting in the directory that it limits: it would count its own
//! state, and deadlock on its own mount. The accounting of a cage over the state directory goes to the runtime
//! directory, next to the control sockets, and does not survive a reboot.

use crate::{failure::Failure, report::path_text, runtime};
use rustix::{
    fs::{FlockOperation, flock},
    process::geteuid,
};
use std::{
    env,
    ffi::OsString,
    fs::{self, DirBuilder},
    os::{
        fd::AsFd,
        unix::{
            ffi::OsStrExt,
            fs::{DirBuilderExt, OpenOptionsExt},
        },
    },
    path::{Path, PathBuf},
};

/// Environment variables that determine the state directory.
#[derive(Clone, Debug, Default)]
struct Surroundings {
    named: Option<OsString>,
    state_home: Option<OsString>,
    home: Option<OsString>,
}

/// Returns the directory for everything that survives a reboot; `None` where the environment of an ordinary user
/// names no home.
pub fn base() -> Option<PathBuf> {
    let surroundings = Surroundings {
        named: env::var_os("NACRE_STATE_DIR"),
        state_home: env::var_os("XDG_STATE_HOME"),
        home: env::var_os("HOME"),
    };
    place(geteuid().as_raw(), surroundings)
}

fn place(uid: u32, surroundings: Surroundings) -> Option<PathBuf> {
    let absolute = |path: Option<OsString>| path.map(PathBuf::from).filter(|path| path.is_absolute());
    if let Some(named) = absolute(surroundings.named) {
        return Some(named);
    }
    if uid == 0 {
        return Some(PathBuf::from("/var/lib/nacre"));
    }
    let of_user =
        absolute(surroundings.state_home).or_else(|| absolute(surroundings.home).map(|home| home.join(".local/state")));
    of_user.map(|state| state.join("nacre"))
}

/// Directory of a cage's accounting.
#[derive(Debug)]
pub struct Kept {
    /// The directory, made if need be.
    pub directory: PathBuf,
    /// Why it does not survive a reboot; `None` if it does.
    pub lost_at_reboot: Option<String>,
    /// Set if the directory was made now.
    pub begun: Option<Begun>,
}

/// Returns the accounting directory for the cage of `directory` at `mountpoint` (both canonical), which nothing
/// else uses; `place` distinguishes several cages over one directory.
///
/// # Errors
/// The directory cannot be made.
pub fn of_cage(directory: &Path, mountpoint: &Path, place: usize) -> Result<Kept, Failure> {
    let name = identifier(directory, place);
    let lasting = base().map(|base| base.join("cage").join(&name));
    let why = match lasting {
        None => "there is neither XDG_STATE_HOME nor HOME".to_owned(),
        Some(kept) if outside(&kept, directory, mountpoint).is_ok() => {
            return keep(kept, None);
        }
        Some(kept) => format!("{} lies in it", path_text(&kept)),
    };
    let kept = runtime::own()?.join("cage").join(name);
    if outside(&kept, directory, mountpoint).is_err() {
        return Err(Failure::new(format!(
            "every place for the accounting of the cage lies in {} itself",
            path_text(mountpoint)
        ))
        .next("--state=DIR names a place outside"));
    }
    keep(kept, Some(why))
}

fn keep(directory: PathBuf, lost_at_reboot: Option<String>) -> Result<Kept, Failure> {
    let begun = Begun::new(&directory);
    make(&directory).map(|()| Kept { directory, lost_at_reboot, begun })
}

/// Ending of the mark file next to an accounting directory whose cage has never been mounted.
const UNREADY: &str = "new";

/// A new accounting directory of a cage that is being made. Dropped, it is removed.
#[derive(Debug)]
pub struct Begun {
    place: PathBuf,
    mark: PathBuf,
    /// While it is locked, a process is making the cage.
    _lock: fs::File,
}

impl Begun {
    /// Marks a directory that is still to be made; `None` where it exists, or another process makes it.
    fn new(place: &Path) -> Option<Begun> {
        let above = place.parent()?;
        make(above).ok()?;
        sweep_below(above);
        if place.exists() {
            return None;
        }
        let mut mark = place.as_os_str().to_owned();
        mark.push(format!(".{UNREADY}"));
        let mark = PathBuf::from(mark);
        loop {
            let lock = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&mark).ok()?;
            // Another process may have taken the mark for an abandoned one. That process removes the directory
            // before the mark, so nothing is made there until it has done so.
            flock(&lock, FlockOperation::LockExclusive).ok()?;
            if runtime::is_at(lock.as_fd(), &mark) {
                return Some(Begun { place: place.to_owned(), mark, _lock: lock });
            }
        }
    }

    /// The cage is mounted: keeps its directory.
    pub fn mounted(mut self) {
        self.place = PathBuf::new();
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        remove(&self.place, &self.mark);
    }
}

/// Removes a directory, and then its mark: a directory that cannot be removed keeps its mark.
fn remove(place: &Path, mark: &Path) {
    let gone = place.as_os_str().is_empty() || fs::remove_dir_all(place).is_ok() || !place.exists();
    if gone && let Err(error) = fs::remove_file(mark) {
        tracing::debug!(%error, "what a cage kept that was never mounted stays until the next one is made");
    }
}

/// Removes what killed commands left behind: the accounting of cages that were never mounted, and incomplete
/// records.
pub fn sweep() {
    let lasting = base().map(|base| base.join("cage"));
    for directory in [lasting.as_ref().map(|cages| cages.join("kernel")), lasting, Some(runtime::ours().join("cage"))]
        .into_iter()
        .flatten()
    {
        sweep_below(&directory);
    }
}

fn sweep_below(directory: &Path) {
    for mark in
        runtime::children(directory).into_iter().filter(|path| path.extension().is_some_and(|end| end == UNREADY))
    {
        if let Some(_held) = runtime::take_abandoned(&mark) {
            remove(&mark.with_extension(""), &mark);
        }
    }
}

/// Makes the accounting directory that the user names.
///
/// # Errors
/// It lies in the cage, or cannot be made.
pub fn named(state: &Path, directory: &Path, mountpoint: &Path) -> Result<(), Failure> {
    outside(state, directory, mountpoint)?;
    make(state)
}

/// Checks that an accounting directory lies outside of the caged directory and of its mount point.
///
/// # Errors
/// It does not.
pub fn outside(state: &Path, directory: &Path, mountpoint: &Path) -> Result<(), Failure> {
    let real = resolved(state);
    let Some(around) = [directory, mountpoint].into_iter().find(|around| real.starts_with(around)) else {
        return Ok(());
    };
    Err(Failure::new(format!(
        "the accounting cannot be kept in the cage itself: {} lies in {}",
        path_text(state),
        path_text(around)
    ))
    .next("--state=DIR names a place outside; without it, there is one"))
}

fn make(directory: &Path) -> Result<(), Failure> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(directory);
    made.map_err(|error| Failure::io("cannot make the directory for the accounting", path_text(directory), &error))
}

/// Resolves the existing part of a path.
pub(crate) fn resolved(path: &Path) -> PathBuf {
    let mut rest = Vec::new();
    let mut there = path;
    loop {
        if let Ok(real) = fs::canonicalize(there) {
            return rest.into_iter().rev().fold(real, |path, part| path.join(part));
        }
        match (there.parent(), there.file_name()) {
            (Some(parent), Some(name)) => {
                rest.push(name.to_owned());
                there = parent;
            }
            _ => return path.to_owned(),
        }
    }
}

/// Makes a name for the cage of a directory: its path, readable, and a hash that distinguishes paths with the same
/// readable form.
pub fn identifier(directory: &Path, place: usize) -> String {
    const READABLE: usize = 100;
    let bytes = directory.as_os_str().as_bytes();
    let kept = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_');
    let mut readable: Vec<u8> = bytes.iter().map(|byte| if kept(byte) { *byte } else { b'-' }).collect();
    readable.drain(..readable.len().saturating_sub(READABLE));
    let readable = String::from_utf8_lossy(&readable).trim_matches(['-', '.']).to_owned();
    let readable = if readable.is_empty() { "root".to_owned() } else { readable };
    let number = fnv(bytes);
    if place == 0 { format!("{readable}-{number:016x}") } else { format!("{readable}-{number:016x}-{place}") }
}

/// FNV-1a with 64 bits (Fowler, Noll, Vo): the same hash for the same path in every version of this program.
fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum: u64, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everybody_has_a_place() {
        let os = |text: &str| Some(OsString::from(text));
        let all = || Surroundings { named: None, state_home: os("/s"), home: os("/h") };
        for (uid, surroundings, expected) in [
            (0, all(), Some("/var/lib/nacre")),
            (0, Surroundings { named: os("/n"), ..all() }, Some("/n")),
            (0, Surroundings { named: os("n"), ..all() }, Some("/var/lib/nacre")),
            (5, all(), Some("/s/nacre")),
            (5, Surroundings { state_home: os("relative"), ..all() }, Some("/h/.local/state/nacre")),
            (5, Surroundings { state_home: None, ..all() }, Some("/h/.local/state/nacre")),
            (5, Surroundings { named: os("/n"), ..all() }, Some("/n")),
            (5, Surroundings::default(), None),
        ] {
            assert_eq!(place(uid, surroundings.clone()).as_deref(), expected.map(Path::new), "{uid} {surroundings:?}");
        }
    }

    #[test]
    fn names_are_readable_and_distinct() {
        assert_eq!(
            identifier(Path::new("/var/log/nginx"), 0),
            format!("var-log-nginx-{:016x}", fnv(b"/var/log/nginx"))
        );
        assert!(identifier(Path::new("/"), 0).starts_with("root-"));
        assert_ne!(identifier(Path::new("/a/b"), 0), identifier(Path::new("/a-b"), 0));
        assert_ne!(identifier(Path::new("/a"), 0), identifier(Path::new("/a"), 1));
        assert!(identifier(Path::new(&format!("/{}", "x".repeat(4000))), 0).len() < 200);
        // Known answers of the algorithm.
        assert_eq!((fnv(b""), fnv(b"a")), (0xcbf2_9ce4_8422_2325, 0xaf63_dc4c_8601_ec8c));
    }

    #[test]
    fn a_place_that_is_never_used_goes() {
        let scratch = tempfile::tempdir().unwrap();
        let place = scratch.path().join("a.b-1");
        let left = || runtime::children(scratch.path()).len();
        // Refused.
        let kept = keep(place.clone(), None).unwrap();
        fs::write(place.join("lock"), "").unwrap();
        sweep_below(scratch.path());
        assert_eq!(left(), 2, "somebody makes it");
        drop(kept);
        assert_eq!(left(), 0);
        // Killed: the kernel releases the lock, and does nothing else.
        let killed = keep(place.clone(), None).unwrap().begun.unwrap();
        flock(&killed._lock, FlockOperation::Unlock).unwrap();
        fs::write(place.join("lock"), "").unwrap();
        sweep_below(scratch.path());
        assert_eq!(left(), 0);
        std::mem::forget(killed);
        // Mounted.
        keep(place.clone(), None).unwrap().begun.unwrap().mounted();
        sweep_below(scratch.path());
        assert!(keep(place, None).unwrap().begun.is_none());
        assert_eq!(left(), 1);
    }

    #[test]
    fn no_accounting_in_the_cage_itself() {
        let scratch = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(scratch.path()).unwrap();
        let caged = root.join("caged");
        fs::create_dir(&caged).unwrap();
        let link = root.join("link");
        std::os::unix::fs::symlink(&caged, &link).unwrap();
        let at = root.join("at");
        assert!(named(&caged.join("state"), &caged, &caged).is_err());
        assert!(named(&link.join("deep/state"), &caged, &at).is_err());
        assert!(named(&at.join("state"), &caged, &at).is_err());
        assert!(!caged.join("deep").exists());
        named(&root.join("caged-state/deep"), &caged, &at).unwrap();
        assert!(root.join("caged-state/deep").is_dir());
    }
}
