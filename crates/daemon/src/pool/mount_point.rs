//! Mount points of datasets: the directory is found, made where it is missing, and removed again.
//!
//! Used by `mounts.rs` alone. Parts of the path of a mount point may be directories that ordinary users can write
//! to, and the datasets that root mounts may contain users' files: a user who controls the path could present
//! his own files as anybody's. Invariant for root: no symbolic link is followed that somebody else could have made,
//! neither when the mount point is found, nor when the dataset is mounted, nor when the directory is removed. The
//! path may lead through other mounts of the pool, so it is walked by threads without descriptors, and through
//! file systems that do not answer: the time is limited ([`apart`]). A pool that root does not trust may have root's own files, and may be changed while it is mounted: below its
//! directory no symbolic link is followed at all, and outside of it only a mount point is used that a command has
//! named.

use nacre_admin::{
    Kind, MountOptions, Refusal,
    system_places::{is_of_the_system, resolved},
};
use rustix::{
    fs::{
        AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, Stat, fstat, mkdirat, open, openat, openat2,
        readlinkat, unlinkat,
    },
    io::Errno,
};
use serde::{Deserialize, Serialize};
use std::{
    ffi::{OsStr, OsString},
    fs, io,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Component, Path, PathBuf},
};

use super::place_operations::apart;
use crate::{failure::reason, report::path_text};

/// Maximum number of links that are followed on a path, as in the kernel (path_resolution(7)).
const DETOURS_MOST: u32 = 40;
/// Opens a directory as a location, whatever its permissions.
const PLACE: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Advice where a mount point cannot be used.
const ELSEWHERE: &str = "choose another: nacre fs set mountpoint=PATH, or import the pool with -R DIRECTORY";
/// Directories of the system, with everything below them.
const SYSTEM: [&str; 11] =
    ["/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/sbin", "/sys", "/usr", "/var/spool"];
/// Exceptions from [`SYSTEM`].
const FREE: [&str; 3] = ["/dev/shm", "/usr/local", "/usr/src"];

/// Rules for mount points of a pool.
#[derive(Clone, Debug, Default)]
pub struct PlaceRules {
    /// For an untrusted pool: all mount points are below this directory, and no link in it is followed.
    pub below: Option<PathBuf>,
    /// Others than root of this machine may have chosen the mount points.
    pub is_shared: bool,
    /// The directory that is the pool's bucket: a mount over it, above it or in it would have the pool read and write
    /// itself.
    pub bucket: Option<PathBuf>,
}

impl PlaceRules {
    /// Returns why nothing may be mounted on this directory.
    fn refuse(&self, path: &Path, was_made: bool) -> Option<&'static str> {
        let is_of_system = if self.is_shared { is_of_the_system(path) } else { !was_made && is_systems(path) };
        is_of_system.then_some("it is a directory of the system")
    }

    /// Whether a mount on this directory hides the pool's bucket or a part of it.
    fn hides_bucket(&self, path: &Path) -> bool {
        self.bucket.as_deref().is_some_and(|bucket| bucket.starts_with(path) || path.starts_with(bucket))
    }

    /// Returns the part of a mount point below the directory of an untrusted pool.
    fn part<'p>(&self, below: &Path, at: &'p Path) -> Option<&'p Path> {
        let part = at.strip_prefix(below).ok()?;
        let is_plain = |name: Component<'_>| matches!(name, Component::Normal(_));
        part.components().all(is_plain).then_some(part)
    }
}

/// Whether an existing directory is one of the system.
fn is_systems(path: &Path) -> bool {
    let below = |trees: &[&str]| trees.iter().any(|tree| path.starts_with(tree));
    matches!(path.to_str(), Some("/" | "/run" | "/var")) || below(&SYSTEM) && !below(&FREE)
}

/// A directory to mount on.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MountPoint {
    /// Path without links, where root mounts.
    path: PathBuf,
    resolved: bool,
    made: bool,
}

impl MountPoint {
    /// Finds the directory, makes it where it is missing, and refuses one that is not empty.
    ///
    /// # Errors
    /// In the words of `mount`.
    pub fn prepare(at: &Path, options: &MountOptions, rules: &PlaceRules) -> Result<MountPoint, Refusal> {
        let source = &options.source;
        let refused = |error: &io::Error| {
            Refusal::new(
                kind(error),
                format!("cannot mount '{source}': failed to create mountpoint '{}': {}", path_text(at), reason(error)),
            )
        };
        let resolved = rustix::process::geteuid().is_root();
        let mut place = MountPoint { path: at.to_owned(), resolved, made: false };
        if resolved {
            let below = rules.below.as_deref().filter(|_| !options.place_was_named);
            let found = match below.map(|below| (below, rules.part(below, at))) {
                None => {
                    let at = at.to_owned();
                    apart(&at.clone(), move || Ok(find(&at)))
                }
                Some((below, Some(part))) => {
                    let (below, part) = (below.to_owned(), part.to_owned());
                    apart(&below.join(&part), move || Ok(find_below(&below, &part)))
                }
                Some((below, None)) => {
                    let (at, below) = (path_text(at), path_text(below));
                    let what =
                        format!("cannot mount '{source}': '{at}' is not below '{below}', and the pool is not trusted");
                    return Err(Refusal::new(Kind::Permission, what).next(ELSEWHERE));
                }
            };
            let (path, made) = found.map_err(|error| refused(&error))?.map_err(|stop| match stop {
                Stop::Error(error) => refused(&error.into()),
                Stop::Name(error) => refused(&error),
                Stop::Link(link) => {
                    let (at, link) = (path_text(at), path_text(&link));
                    let what = format!(
                        "cannot mount '{source}': the mountpoint '{at}' leads through '{link}', a symbolic link that is not root's alone"
                    );
                    Refusal::new(Kind::Permission, what).next("set a mountpoint without it: nacre fs set mountpoint=PATH")
                }
            })?;
            place.made = made;
            place.path = path;
        }
        // A dead mount of a killed process would be in the way.
        crate::unmount::clear_of(&place.path, &["nacre".to_owned()])
            .map_err(|failure| Refusal::new(Kind::Busy, failure.what).next(failure.next))?;
        place.check(at, source, rules).inspect_err(|_| place.remove())?;
        let examined = place.clone();
        match apart(&place.path, move || examined.holds_something()) {
            Ok(true) if !options.overlay => {
                let refusal =
                    Refusal::new(Kind::Busy, format!("cannot mount '{}': directory is not empty", path_text(at)));
                Err(refusal.next("empty it, choose another mountpoint, or mount over it with -O"))
            }
            Ok(_) => Ok(place),
            Err(error) if error.kind() == io::ErrorKind::NotFound && !resolved => {
                let missing = at.to_owned();
                apart(at, move || fs::create_dir_all(missing)).map_err(|error| refused(&error))?;
                Ok(MountPoint { made: true, ..place })
            }
            Err(error) => Err(refused(&error)),
        }
    }

    /// Refuses mount points that no option allows: over a directory of the system, or over a mount of another pool.
    fn check(&self, at: &Path, source: &str, rules: &PlaceRules) -> Result<(), Refusal> {
        let refused = |why: String| {
            Err(Refusal::new(Kind::Busy, format!("cannot mount '{}': {why}", path_text(at))).next(ELSEWHERE))
        };
        if self.resolved
            && let Some(why) = rules.refuse(&self.path, self.made)
        {
            return refused(why.to_owned());
        }
        // A path with links names another directory.
        let hides = match self.resolved {
            true => rules.hides_bucket(&self.path),
            false => {
                let path = self.path.clone();
                apart(&self.path, move || Ok(resolved(&path)))
            }
            .is_ok_and(|path| rules.hides_bucket(&path)),
        };
        if hides {
            return refused("the pool itself lies there".to_owned());
        }
        let ours = source.split(['/', '@']).next().unwrap_or(source);
        let entries = crate::mountinfo::read().unwrap_or_default();
        // Mounts of ours that are of no pool have a path as their source.
        let pools = entries
            .iter()
            .filter(|entry| entry.kind == "fuse.nacre" && entry.source.is_relative() && entry.mountpoint == self.path);
        match pools.map(|entry| path_text(&entry.source)).find(|there| there.split(['/', '@']).next() != Some(ours)) {
            Some(other) => refused(format!("'{other}' of another pool is mounted there")),
            None => Ok(()),
        }
    }

    /// Returns the path to mount on.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the path has no links in it, and must have none when the dataset is mounted.
    pub fn is_resolved(&self) -> bool {
        self.resolved
    }

    fn links(&self) -> ResolveFlags {
        if self.resolved { ResolveFlags::NO_SYMLINKS } else { ResolveFlags::empty() }
    }

    fn holds_something(&self) -> io::Result<bool> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let entries = Dir::new(openat2(CWD, &self.path, flags, Mode::empty(), self.links())?)?;
        for entry in entries {
            if !matches!(entry?.file_name().to_bytes(), b"." | b"..") {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Removes the directory if it was made for the mount. Others may use it by now: it stays if it is not empty.
    pub fn remove(&self) {
        if !self.made {
            return;
        }
        let place = self.clone();
        let removed = apart(&self.path, move || {
            let (Some(parent), Some(name)) = (place.path.parent(), place.path.file_name()) else { return Ok(()) };
            let parent = openat2(CWD, parent, PLACE.difference(OFlags::NOFOLLOW), Mode::empty(), place.links())?;
            Ok(unlinkat(parent, name, AtFlags::REMOVEDIR)?)
        });
        if let Err(error) = removed {
            tracing::debug!(%error, at = %self.path.display(), "a mount point stays");
        }
    }
}

/// Removes the former mount point of a dataset, if it is empty.
///
/// # Errors
/// It is not empty, or cannot be reached without a link that somebody else could have made.
pub(super) fn tidy(at: &Path) -> io::Result<()> {
    let path = at.to_owned();
    apart(at, move || {
        let at = path;
        let (true, Some(above), Some(name)) = (rustix::process::geteuid().is_root(), at.parent(), at.file_name())
        else {
            return fs::remove_dir(&at);
        };
        let walked = walk(above, false).map_err(|stop| match stop {
            Stop::Error(error) => error.into(),
            Stop::Name(error) => error,
            Stop::Link(_) => io::Error::from(Errno::LOOP),
        })?;
        Ok(unlinkat(walked.directory, name, AtFlags::REMOVEDIR)?)
    })
}

/// Result of a walk.
#[derive(Debug)]
struct Walked {
    directory: OwnedFd,
    /// The directory, or one above it, was missing and has been made.
    made: bool,
}

/// Why a walk failed.
#[derive(Debug)]
enum Stop {
    Error(Errno),
    /// Somebody else than root could have made this link.
    Link(PathBuf),
    /// The directory exists, but its path cannot be read.
    Name(io::Error),
}

/// Finds a directory as [`find`], by a part of a path below another one; no link of that part is followed.
fn find_below(below: &Path, part: &Path) -> Result<(PathBuf, bool), Stop> {
    let top = walk(below, true)?;
    let from = Walk { here: top.directory, made: top.made, make: true, follows: false };
    let walked = from.along(part)?;
    Ok((name_of(&walked.directory).map_err(Stop::Name)?, walked.made))
}

/// Returns the directory's path without links, and whether it or a directory above it was missing and has been
/// made.
fn find(at: &Path) -> Result<(PathBuf, bool), Stop> {
    let walked = walk(at, true)?;
    Ok((name_of(&walked.directory).map_err(Stop::Name)?, walked.made))
}

impl From<Errno> for Stop {
    fn from(error: Errno) -> Stop {
        Stop::Error(error)
    }
}

/// A walk to a directory, one component at a time.
struct Walk {
    here: OwnedFd,
    made: bool,
    /// Missing directories are made.
    make: bool,
    /// Links of root's in directories that nobody else can change are followed. Below a directory that somebody
    /// else can change no link is followed: he could have moved there what root made elsewhere.
    follows: bool,
}

/// Walks from the root directory.
fn walk(at: &Path, make: bool) -> Result<Walked, Stop> {
    Walk { here: root()?, made: false, make, follows: true }.along(at)
}

impl Walk {
    fn along(self, at: &Path) -> Result<Walked, Stop> {
        let Walk { mut here, mut made, make, follows } = self;
        let mut left: Vec<OsString> = Vec::new();
        go_on(&mut left, at);
        let (mut detours, mut trusted) = (0, follows);
        while let Some(name) = left.pop() {
            // The target itself is not accessed: a mount there may have lost its process.
            trusted = trusted && fstat(&here).is_ok_and(|stat| is_roots_alone(&stat));
            let gone_on = openat(&here, &name, PLACE, Mode::empty());
            if gone_on.is_err() {
                detours += 1;
                if detours > DETOURS_MOST + left.len() as u32 {
                    return Err(Errno::LOOP.into());
                }
            }
            match gone_on {
                Ok(next) => here = next,
                Err(Errno::NOENT) if make => {
                    match mkdirat(&here, &name, Mode::from_raw_mode(0o755)) {
                        Ok(()) => made = true,
                        Err(Errno::EXIST) => {}
                        Err(error) => return Err(error.into()),
                    }
                    // The name is walked again and checked like every other.
                    left.push(name);
                }
                Err(Errno::NOTDIR | Errno::LOOP) => {
                    let target = link(&here, &name, trusted)?;
                    if target.is_absolute() {
                        here = root()?;
                    }
                    go_on(&mut left, &target);
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Walked { directory: here, made })
    }
}

fn root() -> Result<OwnedFd, Errno> {
    open("/", PLACE, Mode::empty())
}

/// Pushes the components of a path onto the remaining ones.
fn go_on(left: &mut Vec<OsString>, path: &Path) {
    let names = path.components().rev().filter_map(|part| match part {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        _ => None,
    });
    left.extend(names);
}

/// Whether only root can change the entries of a directory, or the target of a link.
fn is_roots_alone(stat: &Stat) -> bool {
    let writable = FileType::from_raw_mode(stat.st_mode) != FileType::Symlink && stat.st_mode & 0o022 != 0;
    stat.st_uid == 0 && !writable
}

/// Returns the target of a link that can be trusted.
fn link(directory: &OwnedFd, name: &OsStr, trusted: bool) -> Result<PathBuf, Stop> {
    let link = openat(directory, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    let stat = fstat(&link)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Symlink {
        return Err(Errno::NOTDIR.into());
    }
    if !trusted || !is_roots_alone(&stat) {
        return Err(Stop::Link(name_of(directory).unwrap_or_default().join(name)));
    }
    let target = readlinkat(&link, c"", Vec::new())?;
    Ok(PathBuf::from(OsStr::from_bytes(target.to_bytes())))
}

/// Returns the path of an open file from the kernel.
fn name_of(file: &impl AsFd) -> io::Result<PathBuf> {
    fs::read_link(format!("/proc/thread-self/fd/{}", file.as_fd().as_raw_fd()))
}

pub(super) fn kind(error: &io::Error) -> Kind {
    match error.kind() {
        io::ErrorKind::NotFound => Kind::NotFound,
        io::ErrorKind::PermissionDenied => Kind::Permission,
        io::ErrorKind::ResourceBusy => Kind::Busy,
        io::ErrorKind::StorageFull => Kind::NoSpace,
        io::ErrorKind::QuotaExceeded => Kind::Quota,
        io::ErrorKind::NotADirectory | io::ErrorKind::InvalidInput => Kind::Invalid,
        _ => Kind::Io,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_of_the_system_are_no_mount_points() {
        let judged = |path: &str| is_systems(Path::new(path));
        assert!(["/", "/etc", "/etc/cron.d", "/usr/bin", "/var", "/var/spool/cron", "/run"].into_iter().all(judged));
        assert!(
            !["/home", "/srv/etc", "/etcetera", "/usr/local/x", "/var/lib/x", "/run/x", "/dev/shm/x"]
                .into_iter()
                .any(judged)
        );
        if is_root() {
            let refusal = MountPoint::prepare(Path::new("/etc"), &options(true), &PlaceRules::default()).unwrap_err();
            assert!(refusal.what.contains("a directory of the system"), "{}", refusal.what);
        }
    }

    #[test]
    fn pools_that_others_write_have_fewer_places() {
        let shared = PlaceRules { is_shared: true, ..PlaceRules::default() };
        let refused = |path: &str| shared.refuse(Path::new(path), true).is_some();
        let home = |name: &str| format!("/root{name}");
        assert!(refused(&home("/.ssh")) && refused(&home("/.config/x")) && !refused(&home("/data")));
        let system = [
            "/",
            "/root",
            "/tmp",
            "/run",
            "/run/x",
            "/var/lib",
            "/var/lib/nacre/pools",
            "/usr/local/bin",
            "/usr/local",
            "/etc/cron.d",
            "/var/spool/cron",
            "/home",
        ];
        assert_eq!(system.into_iter().find(|path| !refused(path)), None);
        let free = ["/srv/x", "/tmp/x", "/var/lib/x", "/mnt/tank", "/home/somebody/x", "/tank"];
        assert_eq!(free.into_iter().find(|path| refused(path)), None);
    }

    #[test]
    fn an_untrusted_pool_stays_below_its_directory() {
        if !is_root() {
            return;
        }
        let scratch = scratch();
        let below = scratch.path().join("below");
        let rules = PlaceRules { below: Some(below.clone()), is_shared: true, bucket: None };
        let prepare = |at: &Path| MountPoint::prepare(at, &options(false), &rules);
        let place = prepare(&below.join("a/b")).unwrap();
        assert_eq!((place.path(), place.made), (&*below.join("a/b"), true));
        for outside in [scratch.path().join("x"), below.join("../x"), PathBuf::from("/usr/local/bin")] {
            let refusal = prepare(&outside).unwrap_err();
            assert!(refusal.what.contains("is not below"), "{}", refusal.what);
        }
        assert!(!scratch.path().join("x").exists());
        // A link of root's own in it, as the pool's content has them.
        let secret = scratch.path().join("secret");
        fs::create_dir(&secret).unwrap();
        symlink(&secret, below.join("link")).unwrap();
        for at in [below.join("link"), below.join("link/x")] {
            assert!(prepare(&at).unwrap_err().what.contains("symbolic link"));
        }
        assert_eq!(fs::read_dir(&secret).unwrap().count(), 0);
        // A mount point that a command names is used as requested.
        let named = MountOptions { place_was_named: true, ..options(false) };
        MountPoint::prepare(&scratch.path().join("x"), &named, &rules).unwrap();
    }

    use std::os::unix::fs::{PermissionsExt, chown, lchown, symlink};

    fn is_root() -> bool {
        rustix::process::geteuid().is_root()
    }

    /// A directory below one that only root can change: the test's directory of temporary files is everybody's.
    fn scratch() -> tempfile::TempDir {
        let scratch = tempfile::tempdir_in("/var/lib").unwrap();
        fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o755)).unwrap();
        scratch
    }

    fn options(overlay: bool) -> MountOptions {
        MountOptions { source: "tank/x".to_owned(), overlay, ..MountOptions::default() }
    }

    fn give(path: &Path) {
        chown(path, Some(1000), Some(1000)).unwrap();
    }

    #[test]
    fn a_pool_is_not_mounted_where_it_lies() {
        if !is_root() {
            return;
        }
        let scratch = scratch();
        let bucket = scratch.path().join("a/bucket");
        fs::create_dir_all(bucket.join("seg")).unwrap();
        fs::create_dir_all(scratch.path().join("a/bucket-2")).unwrap();
        let rules = PlaceRules { bucket: Some(bucket), ..PlaceRules::default() };
        for at in ["a", "a/bucket", "a/bucket/seg", "a/bucket/new"] {
            let at = scratch.path().join(at);
            let refusal = MountPoint::prepare(&at, &options(true), &rules).unwrap_err();
            assert!(refusal.what.contains("the pool itself lies there"), "{refusal}");
        }
        assert!(!scratch.path().join("a/bucket/new").exists());
        MountPoint::prepare(&scratch.path().join("a/bucket-2"), &options(true), &rules).unwrap();
    }

    #[test]
    fn what_is_missing_is_made_and_removed() {
        if !is_root() {
            return;
        }
        let scratch = scratch();
        let at = scratch.path().join("a/b/c");
        let place = MountPoint::prepare(&at, &options(false), &PlaceRules::default()).unwrap();
        assert_eq!((place.path(), place.made), (&*at, true));
        place.remove();
        assert!(!at.exists() && at.parent().unwrap().exists());
        fs::create_dir(&at).unwrap();
        let place = MountPoint::prepare(&at, &options(false), &PlaceRules::default()).unwrap();
        place.remove();
        assert!(at.exists(), "it was there before");
        fs::write(at.join("file"), "").unwrap();
        assert!(
            MountPoint::prepare(&at, &options(false), &PlaceRules::default()).unwrap_err().what.contains("not empty")
        );
        MountPoint::prepare(&at, &options(true), &PlaceRules::default()).unwrap();
        assert!(MountPoint::prepare(&at.join("file"), &options(true), &PlaceRules::default()).is_err());
    }

    #[test]
    fn links_of_root_lead_on() {
        if !is_root() {
            return;
        }
        let scratch = scratch();
        let real = scratch.path().join("real");
        fs::create_dir_all(real.join("deep")).unwrap();
        symlink("real/deep/..", scratch.path().join("relative")).unwrap();
        symlink(scratch.path().join("relative"), scratch.path().join("absolute")).unwrap();
        let place =
            MountPoint::prepare(&scratch.path().join("absolute/x"), &options(false), &PlaceRules::default()).unwrap();
        assert_eq!(place.path(), real.join("x"));
        symlink("loop", scratch.path().join("loop")).unwrap();
        assert!(MountPoint::prepare(&scratch.path().join("loop/x"), &options(false), &PlaceRules::default()).is_err());
        symlink("nowhere", scratch.path().join("dangling")).unwrap();
        let place =
            MountPoint::prepare(&scratch.path().join("dangling"), &options(false), &PlaceRules::default()).unwrap();
        assert_eq!(place.path(), scratch.path().join("nowhere"));
    }

    #[test]
    fn links_of_others_lead_nowhere() {
        if !is_root() {
            return;
        }
        let scratch = scratch();
        let (home, secret) = (scratch.path().join("home"), scratch.path().join("secret"));
        fs::create_dir(&home).unwrap();
        fs::create_dir(&secret).unwrap();
        // A link of root's in a user's directory may have been moved there.
        symlink(&secret, home.join("x")).unwrap();
        give(&home);
        // A user's link in root's directory; root's in one that a group can write.
        symlink(&secret, scratch.path().join("given")).unwrap();
        lchown(scratch.path().join("given"), Some(1000), Some(1000)).unwrap();
        let shared = scratch.path().join("shared");
        fs::create_dir(&shared).unwrap();
        fs::set_permissions(&shared, fs::Permissions::from_mode(0o775)).unwrap();
        symlink(&secret, shared.join("x")).unwrap();
        // Root's in root's, but the latter in a user's.
        fs::create_dir(home.join("moved")).unwrap();
        symlink(&secret, home.join("moved/x")).unwrap();
        for at in
            [home.join("x"), home.join("x/y"), scratch.path().join("given"), shared.join("x"), home.join("moved/x")]
        {
            let refusal = MountPoint::prepare(&at, &options(true), &PlaceRules::default()).unwrap_err();
            assert!(refusal.what.contains("symbolic link"), "{at:?}: {}", refusal.what);
        }
        assert_eq!(fs::read_dir(&secret).unwrap().count(), 0);
        // A user's directories are ordinary mount points.
        MountPoint::prepare(&home.join("y"), &options(true), &PlaceRules::default()).unwrap();
    }

    #[test]
    fn a_place_is_tidied_without_following_links_of_others() {
        if !is_root() {
            return;
        }
        let scratch = scratch();
        let (home, other) = (scratch.path().join("home"), scratch.path().join("other"));
        fs::create_dir_all(home.join("x/y")).unwrap();
        fs::create_dir_all(other.join("y")).unwrap();
        give(&home);
        tidy(&home.join("x/y")).unwrap();
        fs::remove_dir(home.join("x")).unwrap();
        symlink(&other, home.join("x")).unwrap();
        assert!(tidy(&home.join("x/y")).is_err());
        assert!(tidy(&home.join("missing/y")).is_err());
        assert!(other.join("y").exists() && !home.join("missing").exists());
    }

    #[test]
    fn a_swapped_parent_loses_nothing_elsewhere() {
        if !is_root() {
            return;
        }
        let scratch = scratch();
        let (home, other) = (scratch.path().join("home"), scratch.path().join("other"));
        fs::create_dir_all(other.join("x")).unwrap();
        let place = MountPoint::prepare(&home.join("x"), &options(true), &PlaceRules::default()).unwrap();
        fs::rename(&home, scratch.path().join("away")).unwrap();
        symlink(&other, &home).unwrap();
        place.remove();
        assert!(other.join("x").exists());
    }
}
