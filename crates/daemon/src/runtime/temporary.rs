//! Directory of an ordinary user's sockets where there is no `$XDG_RUNTIME_DIR`: in `/tmp`, in which every user can
//! make directories.
//!
//! Called by `runtime.rs`. It is `nacre-UID`, or, where another user has taken that name, `nacre-UID-UUID` with a
//! random UUID, which the commands of its owner find again by owner and mode. Invariants: only a directory that its
//! user alone can enter is used (mode 700, no link, no FUSE mount); of several, all commands use the same one.

use super::{check, children, quiet};
use crate::mountinfo::{self, MountEntry};
use rustix::{
    fs::{CWD, Mode, fstat},
    io::Errno,
};
use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs, io,
    path::{Path, PathBuf},
};

/// Length of a UUID in text.
const UUID: usize = 36;

/// Returns the name without a UUID.
pub(super) fn plain(uid: u32) -> String {
    format!("nacre-{uid}")
}

/// Returns the user in the name of a directory.
pub(super) fn owner(name: &OsStr) -> Option<u32> {
    let rest = name.to_str()?.strip_prefix("nacre-")?;
    let (number, random) = rest.split_once('-').unwrap_or((rest, ""));
    let uid = number.parse::<u32>().ok().filter(|uid| uid.to_string() == number)?;
    let is_uuid = random.len() == UUID && random.bytes().all(|byte| byte == b'-' || byte.is_ascii_hexdigit());
    (rest == number || is_uuid).then_some(uid)
}

/// A user: the id in names, and the owner that its files have in this user namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UserIds {
    pub named: u32,
    pub owner: u32,
}

impl UserIds {
    /// Makes the ids of a user of this namespace.
    pub fn same(uid: u32) -> UserIds {
        UserIds { named: uid, owner: uid }
    }
}

/// Returns the directory of a user, if it exists: the same one for all processes.
pub(super) fn find(above: &Path, user: UserIds) -> Option<PathBuf> {
    let table = mountinfo::read().unwrap_or_default();
    let plain = above.join(plain(user.named));
    if is_own(&plain, user, &table) {
        return Some(plain);
    }
    // In the order of their names.
    let named = children(above).into_iter().filter(|path| path.file_name().and_then(owner) == Some(user.named));
    named.into_iter().find(|path| is_own(path, user, &table))
}

/// Returns the directories of all users, one of each: the one that [`find`] returns.
pub(super) fn find_all(above: &Path) -> BTreeMap<u32, PathBuf> {
    let table = mountinfo::read().unwrap_or_default();
    let mut found = BTreeMap::new();
    // The name without a UUID is sorted first.
    for path in children(above) {
        let Some(uid) = path.file_name().and_then(owner).filter(|uid| !found.contains_key(uid)) else { continue };
        if is_own(&path, UserIds::same(uid), &table) {
            found.insert(uid, path);
        }
    }
    found
}

/// Returns the directory of this user, made if need be.
///
/// # Errors
/// As `mkdir(2)`.
pub(super) fn make(above: &Path, user: UserIds) -> io::Result<PathBuf> {
    if let Some(there) = find(above, user) {
        return Ok(there);
    }
    match rustix::fs::mkdir(above.join(plain(user.named)), Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(error) => return Err(error.into()),
    }
    if let Some(there) = find(above, user) {
        return Ok(there);
    }
    // Another user has taken the name.
    let random = fs::read_to_string("/proc/sys/kernel/random/uuid")?;
    let made = above.join(format!("{}-{}", plain(user.named), random.trim()));
    rustix::fs::mkdir(&made, Mode::RWXU)?;
    let there = find(above, user).ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
    if there != made {
        // Two commands at once: both use the first directory.
        fs::remove_dir(&made)?;
    }
    Ok(there)
}

/// Whether only this user can enter a directory. No other user's process gets a request for that.
fn is_own(path: &Path, user: UserIds, table: &[MountEntry]) -> bool {
    if table.is_empty() {
        // Without /proc the mounts are unknown.
        return check(path, user.owner).is_ok();
    }
    let Some(directory) = quiet(CWD, path, table) else { return false };
    fstat(&directory).is_ok_and(|stat| stat.st_uid == user.owner && stat.st_mode & 0o077 == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn mode(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn names_say_whose_they_are() {
        let random = "nacre-5-123e4567-e89b-12d3-a456-426614174000";
        for (name, uid) in [
            ("nacre-5", Some(5)),
            (random, Some(5)),
            ("nacre-05", None),
            ("nacre-5-1", None),
            ("nacre-", None),
            ("x", None),
        ] {
            assert_eq!(owner(OsStr::new(name)), uid, "{name}");
        }
    }

    #[test]
    fn a_name_that_another_user_has_taken_stops_nobody() {
        let uid = rustix::process::geteuid().as_raw();
        let user = UserIds::same(uid);
        for squat in 0..4 {
            let scratch = tempfile::tempdir().unwrap();
            let (above, taken) = (scratch.path(), scratch.path().join(plain(uid)));
            match squat {
                0 => fs::write(&taken, "").unwrap(),
                1 => symlink(above, &taken).unwrap(),
                2 => fs::create_dir(&taken).unwrap(),
                _ => symlink(above.join("nowhere"), &taken).unwrap(),
            }
            if squat == 2 {
                // As another user's: this one may not be used.
                mode(&taken, 0o777);
            }
            assert_eq!(find(above, user), None);
            let made = make(above, user).unwrap();
            assert!(made != taken && made.starts_with(above), "{squat}");
            assert_eq!(fs::metadata(&made).unwrap().permissions().mode() & 0o777, 0o700);
            // All commands find it again, whatever other users make next to it.
            let other = above.join(format!("{}-00000000-0000-0000-0000-000000000000", plain(uid)));
            fs::create_dir(&other).unwrap();
            mode(&other, 0o755);
            assert_eq!((find(above, user), make(above, user).unwrap()), (Some(made.clone()), made.clone()));
            // Also when the name is free.
            if squat == 2 { fs::remove_dir(&taken) } else { fs::remove_file(&taken) }.unwrap();
            assert_eq!(make(above, user).unwrap(), made);
            assert_eq!(find(above, UserIds::same(uid + 1)), None);
            assert_eq!(find_all(above), BTreeMap::from([(uid, made)]));
        }
    }

    #[test]
    fn the_name_that_is_free_is_used() {
        let (scratch, uid) = (tempfile::tempdir().unwrap(), rustix::process::geteuid().as_raw());
        let user = UserIds::same(uid);
        let made = make(scratch.path(), user).unwrap();
        assert_eq!((made.clone(), find(scratch.path(), user)), (scratch.path().join(plain(uid)), Some(made)));
    }
}
