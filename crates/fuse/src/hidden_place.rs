//! A place out of the way, for a mount that is not to be seen yet: it gets there what mount(2) cannot give it, and is then shown where it belongs.
//!
//! Used by `mount.rs`. Invariant: the directory goes with the value; what a daemon that was killed meanwhile leaves is cleared away by the next.

use crate::mount::about;
use rustix::{
    fs::{AtFlags, CWD, StatxFlags},
    io::Errno as SysErrno,
    mount::UnmountFlags,
};
use std::{
    io,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
    time::{SystemTime, UNIX_EPOCH},
};

/// Where hidden places are, if possible, and how their names begin; the daemon's process id follows.
const HIDDEN_IN: &str = "/run";
const HIDDEN_NAME: &str = "nacre-mounting-";
/// Seconds after which nobody can be at work in one any more.
const LEFT_BEHIND_AFTER: u64 = 60;

/// A directory of our own, out of the way, for a mount that is not to be seen yet.
pub(crate) struct HiddenPlace {
    /// Where.
    pub path: PathBuf,
    /// Where it is to be seen, without links: resolved before there is a mount that would have to answer for that.
    pub mountpoint: PathBuf,
}

impl HiddenPlace {
    /// Makes one for a mount point, whose path may be known to have no links in it, and clears away what others may have left behind.
    ///
    /// # Errors
    /// ENOENT, EACCES where the mount point cannot be found; as `mkdir(2)` says.
    pub fn new(mountpoint: &Path, without_links: bool) -> io::Result<HiddenPlace> {
        let resolved = if without_links {
            mountpoint.to_owned()
        } else {
            std::fs::canonicalize(mountpoint).map_err(|error| about(mountpoint, "cannot use mountpoint", &error))?
        };
        static COUNT: AtomicU32 = AtomicU32::new(0);
        clear_left_behind(Path::new(HIDDEN_IN));
        let name = format!("{HIDDEN_NAME}{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let make = |parent: PathBuf| {
            let path = parent.join(&name);
            rustix::fs::mkdir(&path, rustix::fs::Mode::RWXU).map(|()| path)
        };
        let path = make(HIDDEN_IN.into()).or_else(|_| make(std::env::temp_dir()))?;
        Ok(HiddenPlace { path, mountpoint: resolved })
    }
}

impl Drop for HiddenPlace {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "a directory is left behind");
        }
    }
}

/// Removes hidden places of daemons that were killed between mounting and showing, which takes milliseconds.
fn clear_left_behind(parent: &Path) {
    let Ok(entries) = std::fs::read_dir(parent) else { return };
    for entry in entries.filter_map(Result::ok) {
        let name = entry.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.strip_prefix(HIDDEN_NAME)).and_then(|rest| rest.split('-').next()) else {
            continue;
        };
        let path = entry.path();
        let dead = match rustix::fs::statx(CWD, &path, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::BASIC_STATS) {
            Err(SysErrno::NOTCONN) => true,
            // Of another set of processes, perhaps, where this one is at work.
            Ok(stat) => SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .is_ok_and(|now| u64::try_from(stat.stx_mtime.tv_sec).is_ok_and(|made| made + LEFT_BEHIND_AFTER < now.as_secs())),
            Err(_) => false,
        };
        if !dead || Path::new("/proc").join(pid).exists() {
            continue;
        }
        let unmounted = rustix::mount::unmount(&path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW);
        let removed = std::fs::remove_dir(&path);
        tracing::debug!(path = %path.display(), ?unmounted, ?removed, "cleared away what a killed daemon had left behind");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs::FileTimes, time::Duration};

    #[test]
    fn what_dead_daemons_left_is_cleared_away() {
        let parent = tempfile::tempdir().unwrap();
        // No process has so great an id (pid_max is at most 4194304).
        let make = |pid: &str, age: u64| {
            let path = parent.path().join(format!("{HIDDEN_NAME}{pid}-0"));
            std::fs::create_dir(&path).unwrap();
            let made = SystemTime::now() - Duration::from_secs(age);
            std::fs::File::open(&path).unwrap().set_times(FileTimes::new().set_modified(made)).unwrap();
            path
        };
        let own = std::process::id().to_string();
        let (dead, fresh, alive) = (make("4999999", 3600), make("4999998", 0), make(&own, 3600));
        let other = parent.path().join("other");
        std::fs::create_dir(&other).unwrap();
        clear_left_behind(parent.path());
        assert!(!dead.exists());
        assert!(fresh.exists() && alive.exists() && other.exists());
    }
}
