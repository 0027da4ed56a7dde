//! Where the control sockets are: one directory per user, which nobody else may enter.
//!
//! `/run/nacre` for root, `$XDG_RUNTIME_DIR/nacre` or `/tmp/nacre-UID` for others. Root of a user namespace (a rootless container engine) is
//! the user who made that namespace, so that this user finds its mounts. One socket per mount, named by the process that
//! serves it, so that stale ones can be told.

use crate::failure::{Exit, Failure};
use rustix::{
    fs::{AtFlags, CWD, FileType, Mode, statat},
    process::geteuid,
};
use std::{
    ffi::OsString,
    fs,
    os::unix::fs::FileTypeExt,
    path::{Path, PathBuf},
    time::Duration,
};

/// The directory for a user's sockets, from the environment. Pure.
fn directory(uid: u32, runtime: Option<OsString>) -> PathBuf {
    match (uid, runtime.map(PathBuf::from).filter(|path| path.is_absolute())) {
        (0, _) => PathBuf::from("/run/nacre"),
        (_, Some(runtime)) => runtime.join("nacre"),
        (uid, None) => PathBuf::from(format!("/tmp/nacre-{uid}")),
    }
}

/// Who user 0 of this process' user namespace is outside of it, from `/proc/self/uid_map`. Pure.
fn outside(map: &str) -> Option<u32> {
    map.lines().find_map(|line| {
        let mut numbers = line.split_whitespace().map(str::parse::<u32>);
        match (numbers.next()?.ok()?, numbers.next()?.ok()?) {
            (0, outer) => Some(outer),
            _ => None,
        }
    })
}

/// The user that sockets are kept for.
fn user() -> u32 {
    let uid = geteuid().as_raw();
    if uid != 0 {
        return uid;
    }
    // Without a map, there is one namespace only.
    fs::read_to_string("/proc/self/uid_map").ok().and_then(|map| outside(&map)).unwrap_or(uid)
}

/// Our own directory, whether it is there or not.
pub fn ours() -> PathBuf {
    directory(user(), std::env::var_os("XDG_RUNTIME_DIR"))
}

/// Our own directory, made if need be.
///
/// # Errors
/// A directory that cannot be made, or that somebody else could have made or could enter.
pub fn own() -> Result<PathBuf, Failure> {
    let uid = geteuid().as_raw();
    let directory = ours();
    match rustix::fs::mkdir(&directory, Mode::RWXU) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => {}
        Err(error) => {
            return Err(Failure::io("cannot make the directory of control sockets", directory.display(), &error.into()));
        }
    }
    check(&directory, uid)?;
    Ok(directory)
}

/// So long it takes at most from making a socket to giving it its name.
const UNREADY: Duration = Duration::from_secs(60);

/// Removes sockets that processes were making when they were killed: such have the name `*.new` for a moment only.
pub fn tidy(directory: &Path) {
    for path in children(directory).into_iter().filter(|path| path.extension().is_some_and(|last| last == "new")) {
        let Ok(there) = fs::symlink_metadata(&path) else { continue };
        let old = there.modified().ok().and_then(|made| made.elapsed().ok()).is_some_and(|age| age > UNREADY);
        if old && there.file_type().is_socket() {
            // Somebody else may have done so.
            let _ = fs::remove_file(&path);
        }
    }
}

/// Whether a directory is `uid`'s alone.
fn check(directory: &Path, uid: u32) -> Result<(), Failure> {
    let stat = statat(CWD, directory, AtFlags::SYMLINK_NOFOLLOW);
    let stat = stat.map_err(|error| Failure::io("cannot look at", directory.display(), &error.into()))?;
    let sound = FileType::from_raw_mode(stat.st_mode) == FileType::Directory && stat.st_uid == uid && stat.st_mode & 0o077 == 0;
    if sound {
        return Ok(());
    }
    Err(Failure::new(format!("{} is not a directory of user {uid} with mode 700", directory.display()))
        .exit(Exit::Denied)
        .next("remove it, or set XDG_RUNTIME_DIR to a directory of your own"))
}

/// The directories to look for mounts in: our own, and for root everybody's.
pub fn all() -> Vec<PathBuf> {
    let uid = user();
    let mut found = vec![ours()];
    if uid == 0 {
        found.extend(children(Path::new("/run/user")).into_iter().map(|user| user.join("nacre")));
        let temporary = children(Path::new("/tmp")).into_iter();
        found.extend(temporary.filter(|path| path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"nacre-"))));
    }
    found.retain(|path| statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW).is_ok_and(|stat| stat.st_mode & 0o170_077 == 0o040_000));
    found
}

/// Everything in a directory; nothing where it cannot be read (it is not ours, or not there: then no mount is, either).
pub fn children(directory: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> = fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn each_user_has_a_directory() {
        for (uid, runtime, expected) in [
            (0, Some("/run/user/0"), "/run/nacre"),
            (5, Some("/run/user/5"), "/run/user/5/nacre"),
            (5, None, "/tmp/nacre-5"),
            (5, Some("relative"), "/tmp/nacre-5"),
            (5, Some(""), "/tmp/nacre-5"),
        ] {
            assert_eq!(directory(uid, runtime.map(OsString::from)), Path::new(expected));
        }
    }

    #[test]
    fn root_of_a_namespace_is_its_maker() {
        assert_eq!(outside("         0          0 4294967295\n"), Some(0));
        assert_eq!(outside("         0       5000          1\n         1     100000      65536\n"), Some(5000));
        assert_eq!(outside("         1     100000      65536\n         0 7 1\n"), Some(7));
        assert_eq!(outside("      1000       1000          1\n"), None);
        assert_eq!(outside(""), None);
    }

    #[test]
    fn sockets_that_nobody_finished_go() {
        let scratch = tempfile::tempdir().unwrap();
        let path = |name: &str| scratch.path().join(name);
        for name in ["old.new", "young.new", "old.sock"] {
            std::os::unix::net::UnixListener::bind(path(name)).unwrap();
        }
        fs::write(path("file.new"), "").unwrap();
        let long_ago = rustix::fs::Timespec { tv_sec: 1_000_000, tv_nsec: 0 };
        for name in ["old.new", "old.sock", "file.new"] {
            let times = rustix::fs::Timestamps { last_access: long_ago, last_modification: long_ago };
            rustix::fs::utimensat(CWD, path(name), &times, AtFlags::empty()).unwrap();
        }
        tidy(scratch.path());
        let left: Vec<String> =
            children(scratch.path()).iter().map(|path| path.file_name().unwrap().to_string_lossy().into_owned()).collect();
        assert_eq!(left, ["file.new", "old.sock", "young.new"]);
    }

    #[test]
    fn a_directory_that_others_may_enter_is_refused() {
        let scratch = tempfile::tempdir().unwrap();
        let uid = geteuid().as_raw();
        let directory = scratch.path().join("d");
        fs::create_dir(&directory).unwrap();
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o700)).unwrap();
        assert!(check(&directory, uid).is_ok());
        assert!(check(&directory, uid + 1).is_err());
        let link = scratch.path().join("l");
        symlink(&directory, &link).unwrap();
        assert!(check(&link, uid).is_err());
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o711)).unwrap();
        assert_eq!(check(&directory, uid).unwrap_err().exit, Exit::Denied);
        assert!(check(&scratch.path().join("missing"), uid).is_err());
    }
}
