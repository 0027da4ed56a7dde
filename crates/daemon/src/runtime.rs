//! Directories of control sockets: one per user, which nobody else may enter.
//!
//! `/run/nacre` for root, `$XDG_RUNTIME_DIR/nacre` for others, or one in `/tmp` (`temporary.rs`). Root of a user
//! namespace (a rootless container engine) is the user who made that namespace, so that this user finds its mounts.
//! One socket per mount, named by the process that serves it, so that stale ones can be recognised.
//!
//! Invariant: another user's directory is accessed only where root requests it ([`Whose`]), and its entries are
//! never followed, opened or queried as files: links, pipes and mounts in place of a socket are skipped.

mod temporary;

use crate::{
    failure::{Exit, Failure},
    mountinfo::{self, MountEntry},
};
use rustix::{
    fs::{
        AtFlags, CWD, Dir, FileType, FlockOperation, Mode, OFlags, ResolveFlags, flock, fstat, openat, openat2, statat,
    },
    net::sockopt::socket_peercred,
    process::geteuid,
};
use std::{
    ffi::OsString,
    fs, io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::{
            ffi::OsStringExt,
            fs::{FileTypeExt, PermissionsExt},
            net::UnixStream,
        },
    },
    path::{Path, PathBuf},
    sync::{Arc, Once},
    time::Duration,
};
use temporary::UserIds;

/// Directory in which all users can make directories.
const TEMPORARY: &str = "/tmp";

/// Returns the directory of a user's sockets from the environment; `None` where it is one in [`TEMPORARY`]. Pure.
fn directory(uid: u32, runtime: Option<OsString>) -> Option<PathBuf> {
    if uid == 0 {
        return Some(PathBuf::from("/run/nacre"));
    }
    let runtime = runtime.map(PathBuf::from).filter(|path| path.is_absolute())?;
    Some(runtime.join("nacre"))
}

/// Returns the outer id of user 0 of this process's user namespace, from `/proc/self/uid_map`. Pure.
fn outside(map: &str) -> Option<u32> {
    map.lines().find_map(|line| {
        let mut numbers = line.split_whitespace().map(str::parse::<u32>);
        match (numbers.next()?.ok()?, numbers.next()?.ok()?) {
            (0, outer) => Some(outer),
            _ => None,
        }
    })
}

/// Returns the user whose directory of sockets this process uses.
pub fn user() -> u32 {
    let uid = geteuid().as_raw();
    if uid != 0 {
        return uid;
    }
    // Without a map, there is only one namespace.
    fs::read_to_string("/proc/self/uid_map").ok().and_then(|map| outside(&map)).unwrap_or(uid)
}

/// Returns this user, with the owner that its files have in this user namespace.
fn this_user() -> UserIds {
    UserIds { named: user(), owner: geteuid().as_raw() }
}

/// Returns our own directory, whether it exists or not.
pub fn ours() -> PathBuf {
    let uid = user();
    directory(uid, std::env::var_os("XDG_RUNTIME_DIR")).unwrap_or_else(|| {
        let above = Path::new(TEMPORARY);
        temporary::find(above, this_user()).unwrap_or_else(|| above.join(temporary::plain(uid)))
    })
}

/// Returns our own directory, made if need be.
///
/// # Errors
/// It cannot be made, or somebody else could have made or could enter it.
pub fn own() -> Result<PathBuf, Failure> {
    let uid = geteuid().as_raw();
    let failed = |directory: &Path, error: io::Error| {
        Failure::io("cannot make the directory of control sockets", directory.display(), &error)
    };
    let Some(directory) = directory(user(), std::env::var_os("XDG_RUNTIME_DIR")) else {
        let above = Path::new(TEMPORARY);
        return temporary::make(above, this_user())
            .map_err(|error| failed(&above.join(temporary::plain(user())), error));
    };
    match rustix::fs::mkdir(&directory, Mode::RWXU) {
        Ok(()) => {}
        // Made by mkdir(1): other users can read it, but cannot have made files in it.
        Err(rustix::io::Errno::EXIST) if is_changed_by(&directory, uid) => {
            fs::set_permissions(&directory, fs::Permissions::from_mode(0o700))
                .map_err(|error| failed(&directory, error))?;
        }
        Err(rustix::io::Errno::EXIST) => {}
        Err(error) => return Err(failed(&directory, error.into())),
    }
    check(&directory, uid)?;
    Ok(directory)
}

/// Whether `directory` is a directory, no link, and only `uid` and root can change its entries.
fn is_changed_by(directory: &Path, uid: u32) -> bool {
    statat(CWD, directory, AtFlags::SYMLINK_NOFOLLOW).is_ok_and(|stat| {
        FileType::from_raw_mode(stat.st_mode) == FileType::Directory && stat.st_uid == uid && stat.st_mode & 0o022 == 0
    })
}

/// Directory of the public sockets of root's mounts.
const FOR_ALL: &str = "/run/nacre.status";

/// Returns the directory of public sockets, made if need be; `None` for users other than root.
///
/// # Errors
/// It cannot be made, or others than root can change it.
pub fn for_all() -> Result<Option<PathBuf>, Failure> {
    if user() != 0 {
        return Ok(None);
    }
    let directory = PathBuf::from(FOR_ALL);
    let failed =
        |error: io::Error| Failure::io("cannot make the directory of sockets for all", directory.display(), &error);
    match fs::DirBuilder::new().create(&directory) {
        // Independent of the umask.
        Ok(()) => fs::set_permissions(&directory, fs::Permissions::from_mode(0o755)).map_err(failed)?,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(failed(error)),
    }
    if !is_changed_by(&directory, 0) {
        return Err(Failure::new(format!("{FOR_ALL} is not a directory that root alone can change")).exit(Exit::Denied));
    }
    static SWEPT: Once = Once::new();
    SWEPT.call_once(|| sweep_for_all(&directory, &ours()));
    Ok(Some(directory))
}

/// Removes the public sockets of crashed processes: the mounts' own sockets are gone from `own`, and nobody
/// listens. A mount namespace with another `/run/nacre` may share this directory, so a missing own socket alone is
/// no proof.
fn sweep_for_all(directory: &Path, own: &Path) {
    for socket in children(directory) {
        let Some(name) = socket.file_name() else { continue };
        if !own.join(name).exists() {
            remove_unheard(&socket);
        }
    }
}

/// Removes a socket without a listener, unless it is so young that its process may be about to listen.
fn remove_unheard(socket: &Path) {
    let Ok(there) = fs::symlink_metadata(socket) else { return };
    let refused = || connect(socket, LISTENING).is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused);
    if there.file_type().is_socket() && is_unready_for_good(&there) && refused() {
        // Another process may have removed it.
        let _ = fs::remove_file(socket);
    }
}

/// Whether a file is older than [`UNREADY`].
fn is_unready_for_good(there: &fs::Metadata) -> bool {
    there.modified().ok().and_then(|made| made.elapsed().ok()).is_some_and(|age| age > UNREADY)
}

/// Removes the public socket of a dead process whose own socket had this name.
pub fn forget_for_all(socket: &Path) {
    if let Some(name) = socket.file_name().filter(|_| user() == 0) {
        // Most have none.
        let _ = fs::remove_file(Path::new(FOR_ALL).join(name));
    }
}

/// Longest time between making a socket and giving it its name.
const UNREADY: Duration = Duration::from_secs(60);

/// Lock of commands that start a process for several mounts. No pool can have this name.
pub const STARTING: &str = ".shared.lock";

/// Deadline for a process to accept a connection when it is looked for.
const LISTENING: Duration = Duration::from_secs(1);

/// Locks and returns a file that its owner keeps locked; `None` where it is locked, or does not exist.
pub fn take_abandoned(path: &Path) -> Option<OwnedFd> {
    let file =
        openat(CWD, path, OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty()).ok()?;
    flock(&file, FlockOperation::NonBlockingLockExclusive).ok()?;
    is_at(file.as_fd(), path).then_some(file)
}

/// Whether an open file still has this path: it may have been removed before it was locked, and made again by
/// another process.
pub fn is_at(file: BorrowedFd<'_>, path: &Path) -> bool {
    let (held, there) = (fstat(file), statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW));
    held.is_ok_and(|held| there.is_ok_and(|there| (held.st_dev, held.st_ino) == (there.st_dev, there.st_ino)))
}

/// Removes unusable files of killed processes from our own directory: sockets without a final name or a listener,
/// temporary files, locks without a holder. Sockets of mounts are removed when they are asked, and files of a pool
/// that was not exported stay until it is imported or given up. Called by each reader of the directory.
pub fn sweep(directory: &Path) {
    for path in children(directory) {
        let Ok(there) = fs::symlink_metadata(&path) else { continue };
        let kind = there.file_type();
        let left = match path.extension().and_then(|end| end.to_str()) {
            // It exists only for a moment.
            Some("new") => kind.is_socket() && is_unready_for_good(&there),
            Some("import") => kind.is_file() && is_unready_for_good(&there),
            Some("shared") if kind.is_socket() => {
                sweep_shared(directory, &path);
                false
            }
            Some("lock") if kind.is_file() && !path.ends_with(STARTING) => {
                sweep_lock(&path, &path);
                false
            }
            // Its content is the pool's name.
            Some("guid") if kind.is_file() => {
                let name = fs::read_to_string(&path).unwrap_or_default();
                sweep_lock(&path, &directory.join(crate::pool::runtime_files::file(&name)));
                false
            }
            _ => false,
        };
        if left {
            // Another process may have removed it.
            let _ = fs::remove_file(&path);
        }
    }
}

/// Removes the socket of a dead shared process. The lock keeps other commands from starting a process that is to
/// listen there.
fn sweep_shared(directory: &Path, socket: &Path) {
    let Some(_lock) = take_abandoned(&directory.join(STARTING)) else { return };
    if connect(socket, LISTENING).is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused) {
        let _ = fs::remove_file(socket);
    }
}

/// Removes a lock of a pool, and the socket of this name, unless the pool is expected to be imported.
fn sweep_lock(lock: &Path, pool: &Path) {
    if pool.with_extension(crate::pool::runtime_files::EXPECTED).exists() {
        return;
    }
    let Some(_held) = take_abandoned(lock) else { return };
    if lock == pool {
        let _ = fs::remove_file(lock.with_extension(crate::pool::runtime_files::SOCKET));
    }
    // Removed while it is locked: a waiter then sees that the file is another one.
    let _ = fs::remove_file(lock);
}

/// Whether only `uid` can enter a directory.
fn check(directory: &Path, uid: u32) -> Result<(), Failure> {
    let stat = statat(CWD, directory, AtFlags::SYMLINK_NOFOLLOW);
    let stat = stat.map_err(|error| Failure::io("cannot look at", directory.display(), &error.into()))?;
    let sound =
        FileType::from_raw_mode(stat.st_mode) == FileType::Directory && stat.st_uid == uid && stat.st_mode & 0o077 == 0;
    if sound {
        return Ok(());
    }
    Err(Failure::new(format!("{} is not a directory of user {uid} with mode 700", directory.display()))
        .exit(Exit::Denied)
        .next("remove it, or set XDG_RUNTIME_DIR to a directory of your own"))
}

/// Selects whose sockets are used. Root sees those of all users, others their own and root's public ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Whose {
    /// Our own only: no other user can delay this process.
    Ours,
    /// Our own sockets, and those of these users.
    These(Vec<u32>),
    /// Sockets of all users.
    Everybody,
}

impl Whose {
    /// Returns the selection for `--all-users`.
    pub fn told(everybody: bool) -> Whose {
        if everybody { Whose::Everybody } else { Whose::Ours }
    }
}

/// A socket at which a process may listen.
#[derive(Clone, Debug)]
pub struct Socket {
    /// Path of the socket.
    pub path: PathBuf,
    /// Owner of the socket and his directory, for another user's.
    foreign: Option<(u32, Arc<OwnedFd>)>,
}

impl Socket {
    /// Makes a socket in our own directory.
    pub fn ours(path: PathBuf) -> Socket {
        Socket { path, foreign: None }
    }

    /// Returns the owner of the socket, if it is another user.
    pub fn foreign(&self) -> Option<u32> {
        self.foreign.as_ref().map(|(uid, _)| *uid)
    }

    /// Connects; `patience` is the deadline for a process that does not accept, and the limit of each write. At
    /// another user's socket, only a process of that user is accepted.
    ///
    /// # Errors
    /// As `connect(2)`.
    pub fn connect(&self, patience: Duration) -> io::Result<UnixStream> {
        let Some((uid, directory)) = &self.foreign else { return connect(&self.path, patience) };
        let denied = || io::Error::from(io::ErrorKind::PermissionDenied);
        // The name may be a link, a pipe or the root of a mount by now: none of these is followed, opened or
        // queried.
        let name = self.path.file_name().ok_or_else(denied)?;
        let resolve = ResolveFlags::NO_XDEV | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let socket =
            openat2(directory, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty(), resolve)?;
        let stat = fstat(&socket)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::Socket || stat.st_uid != *uid {
            return Err(denied());
        }
        let stream = connect(Path::new(&nacre_sys::inode::proc_path(socket.as_fd())), patience)?;
        if socket_peercred(&stream)?.uid.as_raw() != *uid {
            return Err(denied());
        }
        Ok(stream)
    }
}

/// Connects; `patience` is the deadline for a process that does not accept, and the limit of each write.
///
/// # Errors
/// As `connect(2)`.
pub fn connect(socket: &Path, patience: Duration) -> io::Result<UnixStream> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
    let address = SocketAddrUnix::new(socket)?;
    let stream = UnixStream::from(socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?);
    // The timeout also applies to connect(2) (unix(7)), which otherwise blocks while the backlog is full.
    stream.set_write_timeout(Some(patience.max(Duration::from_millis(1))))?;
    connect(&stream, &address)?;
    Ok(stream)
}

/// Returns the sockets whose names have this ending: our own first.
pub fn sockets(whose: &Whose, end: &str) -> Vec<Socket> {
    static SWEPT: Once = Once::new();
    if is_sound() {
        SWEPT.call_once(|| sweep(&ours()));
    }
    let fits = |path: &Path| path.extension().is_some_and(|last| last == end);
    let mut found: Vec<Socket> = if is_sound() {
        children(&ours()).into_iter().filter(|path| fits(path)).map(Socket::ours).collect()
    } else {
        Vec::new()
    };
    for Foreign { uid, path, directory } in others(whose) {
        // At most [`FOREIGN_NAMES`] names of each user.
        let names = listed(&directory).into_iter().map(|name| path.join(name)).filter(|path| fits(path));
        found.extend(names.map(|path| Socket { path, foreign: Some((uid, Arc::clone(&directory))) }));
    }
    found
}

/// Returns the sockets of one name in other users' directories, whether they exist or not.
pub fn named(whose: &Whose, name: &str) -> Vec<Socket> {
    let others = others(whose).into_iter();
    others
        .map(|Foreign { uid, path, directory }| Socket { path: path.join(name), foreign: Some((uid, directory)) })
        .collect()
}

/// Directory of another user's sockets.
struct Foreign {
    uid: u32,
    path: PathBuf,
    directory: Arc<OwnedFd>,
}

/// Maximum number of names that are read in another user's directory.
const FOREIGN_NAMES: usize = 1024;

/// Returns the directories of other users. Each user has two at most, identified by his user id, so that nobody can
/// cause more work than one user can.
fn others(whose: &Whose) -> Vec<Foreign> {
    if user() != 0 {
        return roots(whose).into_iter().collect();
    }
    if *whose == Whose::Ours {
        return Vec::new();
    }
    let (of_users, above) = (Path::new("/run/user"), Path::new(TEMPORARY));
    let mut wanted: Vec<(u32, PathBuf, String)> = Vec::new();
    let number = |text: &str| text.parse::<u32>().ok().filter(|uid| uid.to_string() == text);
    match whose {
        Whose::Ours => {}
        Whose::These(users) => {
            for uid in users {
                wanted.push((*uid, of_users.join(uid.to_string()), "nacre".to_owned()));
                let found = temporary::find(above, UserIds::same(*uid));
                wanted.extend(found.and_then(|path| Some((*uid, above.to_owned(), text_of(path.file_name()?)?))));
            }
        }
        Whose::Everybody => {
            for path in children(of_users) {
                if let Some(uid) = path.file_name().and_then(|name| number(name.to_str()?)) {
                    wanted.push((uid, path, "nacre".to_owned()));
                }
            }
            // One for each user: the one that his own commands use.
            let found = temporary::find_all(above).into_iter();
            wanted.extend(found.filter_map(|(uid, path)| Some((uid, above.to_owned(), text_of(path.file_name()?)?))));
        }
    }
    let table = mountinfo::read().unwrap_or_default();
    let found = wanted.into_iter().filter(|(uid, ..)| *uid != 0).filter_map(|(uid, parent, name)| {
        let above = quiet(CWD, &parent, &table)?;
        let directory = quiet(above.as_fd(), Path::new(&name), &table)?;
        let stat = fstat(&directory).ok()?;
        let sound = stat.st_uid == uid && stat.st_mode & 0o077 == 0;
        sound.then(|| Foreign { uid, path: parent.join(name), directory: Arc::new(directory) })
    });
    found.collect()
}

fn text_of(name: &std::ffi::OsStr) -> Option<String> {
    name.to_str().map(str::to_owned)
}

/// Returns root's directory of public sockets, for an ordinary user who asks for root's mounts.
fn roots(whose: &Whose) -> Option<Foreign> {
    let wanted = match whose {
        Whose::Ours => false,
        Whose::These(users) => users.contains(&0),
        Whose::Everybody => true,
    };
    let table = mountinfo::read().unwrap_or_default();
    let directory = quiet(CWD, Path::new(FOR_ALL), &table).filter(|_| wanted)?;
    let stat = fstat(&directory).ok()?;
    let sound = stat.st_uid == 0 && stat.st_mode & 0o022 == 0;
    sound.then(|| Foreign { uid: 0, path: PathBuf::from(FOR_ALL), directory: Arc::new(directory) })
}

/// Opens a directory that no user's process serves: a request to a directory below or at a FUSE mount could block
/// forever, and this process could not even be killed. Nothing is queried before that is known.
fn quiet(parent: BorrowedFd<'_>, name: &Path, table: &[MountEntry]) -> Option<OwnedFd> {
    let directory =
        openat(parent, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            .ok()?;
    let about = fs::read_to_string(format!("/proc/self/fdinfo/{}", directory.as_raw_fd())).ok()?;
    let mount = about.lines().find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse::<u64>().ok())?;
    // A mount that is newer than the table is rejected.
    table.iter().any(|entry| entry.id == mount && !entry.kind.starts_with("fuse")).then_some(directory)
}

/// Returns the first names in a directory.
fn listed(directory: &OwnedFd) -> Vec<OsString> {
    let readable = openat(directory, c".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
    let Ok(entries) = readable.and_then(Dir::new) else { return Vec::new() };
    let names =
        entries.take(FOREIGN_NAMES).flatten().map(|entry| OsString::from_vec(entry.file_name().to_bytes().to_vec()));
    let mut names: Vec<OsString> = names.collect();
    names.sort();
    names
}

/// Whether only this user can change our own directory.
fn is_sound() -> bool {
    let (uid, ours) = (geteuid().as_raw(), ours());
    // In a directory that everybody can write to, another user may have taken the name, and serve it himself.
    let table = mountinfo::read().unwrap_or_default();
    if ours.starts_with(TEMPORARY) {
        (table.is_empty() || quiet(CWD, &ours, &table).is_some()) && check(&ours, uid).is_ok()
    } else {
        is_changed_by(&ours, uid)
    }
}

/// Returns all paths in a directory; none where it cannot be read (it is not ours, or does not exist: then there
/// are no mounts, either).
pub fn children(directory: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> =
        fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn each_user_has_a_directory() {
        for (uid, runtime, expected) in [
            (0, Some("/run/user/0"), Some("/run/nacre")),
            (5, Some("/run/user/5"), Some("/run/user/5/nacre")),
            (5, None, None),
            (5, Some("relative"), None),
            (5, Some(""), None),
        ] {
            assert_eq!(directory(uid, runtime.map(OsString::from)).as_deref(), expected.map(Path::new));
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
        sweep(scratch.path());
        let left: Vec<String> = children(scratch.path())
            .iter()
            .map(|path| path.file_name().unwrap().to_string_lossy().into_owned())
            .collect();
        assert_eq!(left, ["file.new", "old.sock", "young.new"]);
    }

    #[test]
    fn what_nobody_has_any_more_goes() {
        let scratch = tempfile::tempdir().unwrap();
        let path = |name: &str| scratch.path().join(name);
        for name in [STARTING, "gone.lock", "held.lock", "lost.lock", "lost.imported"] {
            fs::write(path(name), "").unwrap();
        }
        fs::write(path("1.guid"), "gone").unwrap();
        fs::write(path("2.guid"), "lost").unwrap();
        let _held = take_abandoned(&path("held.lock")).unwrap();
        assert!(take_abandoned(&path("held.lock")).is_none() && take_abandoned(&path("missing")).is_none());
        let listen = |name: &str| std::os::unix::net::UnixListener::bind(path(name)).unwrap();
        let _live = listen("live-1.shared");
        for name in ["gone.pool", "dead-1.shared"] {
            drop(listen(name));
        }
        sweep(scratch.path());
        let left: Vec<String> = children(scratch.path())
            .iter()
            .map(|path| path.file_name().unwrap().to_string_lossy().into_owned())
            .collect();
        assert_eq!(left, [STARTING, "2.guid", "held.lock", "live-1.shared", "lost.imported", "lost.lock"]);
        // Another process holds the lock for starting a shared process.
        let starting = take_abandoned(&path(STARTING)).unwrap();
        drop(listen("dead-1.shared"));
        sweep(scratch.path());
        assert!(path("dead-1.shared").exists());
        drop(starting);
        sweep(scratch.path());
        assert!(!path("dead-1.shared").exists());
    }

    #[test]
    fn sockets_for_all_of_crashed_processes_go() {
        let scratch = tempfile::tempdir().unwrap();
        let (shared, own) = (scratch.path().join("shared"), scratch.path().join("own"));
        fs::create_dir(&shared).unwrap();
        fs::create_dir(&own).unwrap();
        let listening = |name: &str| std::os::unix::net::UnixListener::bind(shared.join(name)).unwrap();
        let alive = listening("1-0.sock");
        drop((listening("2-0.sock"), listening("3-0.sock"), listening("4-0.sock")));
        fs::write(own.join("3-0.sock"), "").unwrap();
        let long_ago = rustix::fs::Timespec { tv_sec: 1, tv_nsec: 0 };
        let times = rustix::fs::Timestamps { last_access: long_ago, last_modification: long_ago };
        for old in ["1-0.sock", "2-0.sock", "3-0.sock"] {
            rustix::fs::utimensat(CWD, shared.join(old), &times, AtFlags::empty()).unwrap();
        }
        sweep_for_all(&shared, &own);
        let left: Vec<_> = children(&shared).iter().map(|path| path.file_name().unwrap().to_owned()).collect();
        assert_eq!(left, ["1-0.sock", "3-0.sock", "4-0.sock"]);
        drop(alive);
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
