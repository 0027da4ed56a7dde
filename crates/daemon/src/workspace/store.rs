//! The state directories of a user's workspaces: names, locks, creation and removal.
//!
//! Invariant: a name leads to a complete workspace or to nothing. A directory is made under a hidden name and renamed, and
//! renamed to a hidden one before it is removed.

use super::settings::WorkspaceSettings;
use crate::{
    cage::state,
    failure::{Exit, Failure},
    report::path_text,
};
use nacre_union::base_log::HiddenEntry;
use rustix::{
    fs::{
        AtFlags, CWD, Dir, FileType, FlockOperation, Gid, Mode, OFlags, RenameFlags, ResolveFlags, StatxFlags, Uid,
        chmod, chownat, flock, open, openat, openat2, renameat_with, statx,
    },
    io::Errno,
};
use std::{
    ffi::OsStr,
    fs::{self, DirBuilder, OpenOptions},
    io::{self, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::{
            ffi::OsStrExt,
            fs::{DirBuilderExt, OpenOptionsExt},
        },
    },
    path::{Path, PathBuf},
    process,
};

/// Longest name.
const NAME_MAX: usize = 64;
/// Prefix of directories that are being made.
const NEW: &str = ".new.";
/// Prefix of directories that are being removed.
const DISCARDED: &str = ".discarded.";

/// Checks the name of a workspace or of a snapshot.
///
/// # Errors
/// It cannot be part of a file name.
pub fn check_name(name: &str) -> Result<(), Failure> {
    let sound = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if !name.is_empty() && name.len() <= NAME_MAX && !name.starts_with(['.', '-']) && name.bytes().all(sound) {
        return Ok(());
    }
    Err(Failure::usage(format!(
        "\"{}\" is not a name of at most {NAME_MAX} letters, digits, dots, hyphens and underscores that begins with none of the latter two",
        name.escape_debug()
    )))
}

/// The workspaces of this user.
#[derive(Debug)]
pub struct Store {
    directory: PathBuf,
}

/// A workspace.
#[derive(Clone, Debug)]
pub struct Workspace {
    /// Its name.
    pub name: String,
    /// Its state directory.
    pub directory: PathBuf,
    /// Its settings.
    pub settings: WorkspaceSettings,
}

/// The lock of a workspace, until it is dropped.
#[derive(Debug)]
pub struct WorkspaceLock(pub OwnedFd);

/// Who may hold the lock of a workspace at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockMode {
    /// Commands that leave its state directory as it is.
    Shared,
    /// This command only.
    Exclusive,
}

impl Store {
    /// Finds the directory of the workspaces, which need not exist.
    ///
    /// # Errors
    /// The environment of an ordinary user names no home.
    pub fn find() -> Result<Store, Failure> {
        let base = state::base().ok_or_else(|| {
            Failure::new("there is no place for workspaces: neither XDG_STATE_HOME nor HOME is set")
                .next("set HOME, or NACRE_STATE_DIR to a directory of your own")
        })?;
        // Branches are compared with resolved paths.
        let base = state::resolved(&base);
        Ok(Store { directory: base.join("workspaces") })
    }

    /// The directory of all workspaces.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The names of all workspaces, sorted.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn names(&self) -> Result<Vec<String>, Failure> {
        let entries = match fs::read_dir(&self.directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(|error| Failure::io("cannot read", path_text(&self.directory), &error))?,
        };
        let mut names: Vec<String> = entries
            .flatten()
            .filter_map(|entry| entry.file_name().into_string().ok())
            .filter(|name| check_name(name).is_ok())
            .collect();
        names.sort();
        Ok(names)
    }

    /// Opens a workspace.
    ///
    /// # Errors
    /// There is none of this name, or its settings cannot be read.
    pub fn open(&self, name: &str) -> Result<Workspace, Failure> {
        check_name(name)?;
        let directory = self.directory.join(name);
        if !directory.is_dir() {
            return Err(Failure::new(format!("there is no workspace {name}"))
                .exit(Exit::NotFound)
                .next("`nacre workspace list` shows the workspaces"));
        }
        let settings = WorkspaceSettings::read(&directory)?;
        Ok(Workspace { name: name.to_owned(), directory, settings })
    }

    /// Opens a workspace and locks it. Its settings are those of the locked one: another may have got its name before.
    ///
    /// # Errors
    /// As [`Store::open`] and [`Workspace::lock`].
    pub fn open_locked(&self, name: &str, mode: LockMode) -> Result<(Workspace, WorkspaceLock), Failure> {
        let mut workspace = self.open(name)?;
        let lock = workspace.lock(mode)?;
        workspace.settings = WorkspaceSettings::read(&workspace.directory)?;
        Ok((workspace, lock))
    }

    /// Makes the state directory of a workspace, with an exclusive lock on it.
    ///
    /// # Errors
    /// The name is taken, or errors of the storage; then nothing is left.
    pub fn create(&self, name: &str, settings: WorkspaceSettings) -> Result<(Workspace, WorkspaceLock), Failure> {
        check_name(name)?;
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&self.directory);
        made.map_err(|error| Failure::io("cannot make", path_text(&self.directory), &error))?;
        self.sweep();
        let unready = self.directory.join(format!("{NEW}{}", process::id()));
        let built = self.build(&unready, &settings).and_then(|lock| {
            let directory = self.directory.join(name);
            match renameat_with(CWD, &unready, CWD, &directory, RenameFlags::NOREPLACE) {
                Ok(()) => Ok((Workspace { name: name.to_owned(), directory, settings }, lock)),
                Err(Errno::EXIST) => Err(Failure::new(format!("there is a workspace {name} already"))
                    .next("choose another name, or `nacre workspace discard` it")),
                Err(error) => Err(Failure::io("cannot make", path_text(&directory), &error.into())),
            }
        });
        if built.is_err() {
            remove_tree(&unready)?;
        }
        built
    }

    fn build(&self, unready: &Path, settings: &WorkspaceSettings) -> Result<WorkspaceLock, Failure> {
        let failed = |path: &Path| {
            let text = path_text(path);
            move |error: io::Error| Failure::io("cannot make", &text, &error)
        };
        let directory = |path: &Path| DirBuilder::new().mode(0o700).create(path).map_err(failed(path));
        directory(unready)?;
        let lock = lock_file(unready, LockMode::Exclusive)?;
        make_changes(&unready.join("changes"), settings)?;
        directory(&unready.join("view"))?;
        if settings.size.is_some() || settings.files.is_some() {
            directory(&unready.join("accounts"))?;
        }
        settings.write(unready)?;
        Ok(lock)
    }

    /// Gives a workspace another name. It is locked and not mounted.
    ///
    /// # Errors
    /// The name is taken.
    pub fn rename(&self, workspace: Workspace, name: &str) -> Result<Workspace, Failure> {
        check_name(name)?;
        let directory = self.directory.join(name);
        match renameat_with(CWD, &workspace.directory, CWD, &directory, RenameFlags::NOREPLACE) {
            Ok(()) => Ok(Workspace { name: name.to_owned(), directory, ..workspace }),
            Err(Errno::EXIST) => {
                Err(Failure::new(format!("there is a workspace {name} already")).next("choose another name"))
            }
            Err(error) => Err(Failure::io("cannot rename", path_text(&workspace.directory), &error.into())),
        }
    }

    /// Removes a workspace with all its changes. It is locked and not mounted.
    ///
    /// # Errors
    /// Its directory cannot be renamed (it stays), or not be removed (the next creation tries again).
    pub fn remove(&self, workspace: &Workspace) -> Result<(), Failure> {
        let away = self.directory.join(format!("{DISCARDED}{}", process::id()));
        fs::rename(&workspace.directory, &away)
            .map_err(|error| Failure::io("cannot remove", path_text(&workspace.directory), &error))?;
        remove_tree(&away)
    }

    /// Removes the directories of killed commands.
    fn sweep(&self) {
        for entry in fs::read_dir(&self.directory).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let number = name.to_str().and_then(|name| name.strip_prefix(NEW).or_else(|| name.strip_prefix(DISCARDED)));
            let Some(number) = number.and_then(|number| number.parse::<u32>().ok()) else { continue };
            // The name is that of the process which works on it.
            let is_left = number == process::id() || !Path::new(&format!("/proc/{number}")).exists();
            if is_left && let Err(failure) = remove_tree(&entry.path()) {
                tracing::debug!("a killed command's directory stays: {failure}");
            }
        }
    }
}

/// Makes the directory with the changes of a workspace: none.
///
/// # Errors
/// Errors of the storage.
pub fn make_changes(changes: &Path, settings: &WorkspaceSettings) -> Result<(), Failure> {
    let failed = |path: &Path| {
        let text = path_text(path);
        move |error: io::Error| Failure::io("cannot make", &text, &error)
    };
    let directory = |path: &Path| DirBuilder::new().mode(0o700).create(path).map_err(failed(path));
    let (upper, work, log) = (changes.join("upper"), changes.join("work"), changes.join("base.log"));
    directory(changes)?;
    directory(&upper)?;
    directory(&work)?;
    let Some(base) = settings.directories().first().copied() else { return Ok(()) };
    let top = statx(CWD, base, AtFlags::empty(), StatxFlags::BASIC_STATS | StatxFlags::BTIME)
        .map_err(|error| Failure::io("cannot look at", path_text(base), &error.into()))?;
    let mode = u32::from(top.stx_mode) & 0o7777;
    let dressed =
        chownat(CWD, &upper, Some(Uid::from_raw(top.stx_uid)), Some(Gid::from_raw(top.stx_gid)), AtFlags::empty());
    match dressed {
        // An ordinary user's upper directory is his own.
        Ok(()) | Err(Errno::PERM) => {}
        Err(error) => return Err(failed(&upper)(error.into())),
    }
    copy_attributes(base, &upper).map_err(failed(&upper))?;
    chmod(&upper, Mode::from_raw_mode(mode)).map_err(|error| failed(&upper)(error.into()))?;
    let time = |time: rustix::fs::StatxTimestamp| (time.tv_sec, time.tv_nsec);
    let known = StatxFlags::from_bits_retain(top.stx_mask).contains(StatxFlags::BTIME);
    let line = HiddenEntry {
        branch: 1,
        path: Vec::new(),
        kind: if FileType::from_raw_mode(top.stx_mode.into()) == FileType::Directory { 'd' } else { 'f' },
        mode,
        uid: top.stx_uid,
        gid: top.stx_gid,
        device: (0, 0),
        size: top.stx_size,
        mtime: time(top.stx_mtime),
        ctime: time(top.stx_ctime),
        ino: top.stx_ino,
        btime: known.then(|| time(top.stx_btime)),
        copy: None,
    };
    let mut options = OpenOptions::new();
    let file = options.write(true).create_new(true).mode(0o600).open(&log);
    file.and_then(|mut file| file.write_all(line.line().as_bytes())).map_err(failed(&log))
}

/// Copies the extended attributes of the base's top directory, ACLs included; those that the user may not set are left
/// out, as his own changes could not have them either.
fn copy_attributes(from: &Path, to: &Path) -> io::Result<()> {
    let mut names = vec![0_u8; 64 << 10];
    let size = match rustix::fs::listxattr(from, &mut names[..]) {
        Err(Errno::OPNOTSUPP) => return Ok(()),
        size => size?,
    };
    let mut value = vec![0_u8; 64 << 10];
    for name in names.get(..size).unwrap_or_default().split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let size = match rustix::fs::getxattr(from, name, &mut value[..]) {
            Err(Errno::NODATA) => continue,
            size => size?,
        };
        let set =
            rustix::fs::setxattr(to, name, value.get(..size).unwrap_or_default(), rustix::fs::XattrFlags::empty());
        match set {
            Ok(()) | Err(Errno::PERM | Errno::OPNOTSUPP) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Removes a tree; missing: nothing.
pub(super) fn remove_tree(tree: &Path) -> Result<(), Failure> {
    match fs::remove_dir_all(tree) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            // Directories of users may be unwritable.
            make_writable(tree);
            match fs::remove_dir_all(tree) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    Err(Failure::io("cannot remove", path_text(tree), &error))
                }
                _ => Ok(()),
            }
        }
        _ => Ok(()),
    }
}

/// Makes the directories of a tree writable, without following links or leaving its file system.
fn make_writable(tree: &Path) {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let within = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    let Ok(top) = open(tree, flags, Mode::empty()) else { return };
    let mut waiting = vec![PathBuf::from(".")];
    while let Some(path) = waiting.pop() {
        // What stays unwritable, or is no directory, is reported when it cannot be removed.
        let Ok(handle) = openat2(&top, &path, flags, Mode::empty(), within) else { continue };
        let _ = nacre_sys::inode::change_mode(handle.as_fd(), 0o700);
        let listed = openat(&handle, ".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
        let Ok(entries) = listed.and_then(Dir::new) else { continue };
        for entry in entries.flatten().filter(|entry| !matches!(entry.file_name().to_bytes(), b"." | b"..")) {
            if matches!(entry.file_type(), FileType::Directory | FileType::Unknown) {
                waiting.push(path.join(OsStr::from_bytes(entry.file_name().to_bytes())));
            }
        }
    }
}

fn lock_file(directory: &Path, mode: LockMode) -> Result<WorkspaceLock, Failure> {
    let path = directory.join("lock");
    let failed = |error: Errno| Failure::io("cannot lock", path_text(&path), &error.into());
    let file = open(&path, OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::RUSR | Mode::WUSR)
        .map_err(failed)?;
    let how = match mode {
        LockMode::Shared => FlockOperation::NonBlockingLockShared,
        LockMode::Exclusive => FlockOperation::NonBlockingLockExclusive,
    };
    match flock(&file, how) {
        Ok(()) => Ok(WorkspaceLock(file)),
        Err(Errno::WOULDBLOCK) => Err(Failure::new("the workspace is in use by another command")
            .exit(Exit::Busy)
            .next("`nacre workspace list` shows the number of processes inside; wait for them, or end them")),
        Err(error) => Err(failed(error)),
    }
}

impl Workspace {
    /// Locks the workspace against other commands; does not wait.
    ///
    /// # Errors
    /// Another command works on it, or it is gone.
    pub fn lock(&self, mode: LockMode) -> Result<WorkspaceLock, Failure> {
        let lock = lock_file(&self.directory, mode)?;
        let there = crate::runtime::is_at(std::os::fd::AsFd::as_fd(&lock.0), &self.directory.join("lock"));
        if !there {
            return Err(Failure::new(format!("the workspace {} has just been removed or renamed", self.name))
                .exit(Exit::NotFound));
        }
        Ok(lock)
    }

    /// Refuses what needs a base without half a commit in it, and a view that shows half a commit.
    ///
    /// # Errors
    /// A commit was interrupted.
    pub fn check_no_commit(&self) -> Result<(), Failure> {
        if !self.journal().exists() {
            return Ok(());
        }
        let name = &self.name;
        Err(Failure::new(format!("a commit of the workspace {name} was interrupted")).exit(Exit::Busy).next(format!(
            "`nacre workspace commit {name}` continues it, `nacre workspace commit --undo {name}` takes it back"
        )))
    }

    /// The directory with the changes.
    pub fn changes(&self) -> PathBuf {
        self.directory.join("changes")
    }

    /// The journal of a commit.
    pub fn journal(&self) -> PathBuf {
        self.directory.join("commit")
    }

    /// Its mount point.
    pub fn mountpoint(&self) -> PathBuf {
        self.settings.at.as_ref().map_or_else(|| self.directory.join("view"), |at| at.0.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store(scratch: &Path) -> (Store, WorkspaceSettings) {
        let base = scratch.join("base");
        fs::create_dir_all(&base).unwrap();
        (Store { directory: scratch.join("state/workspaces") }, WorkspaceSettings::new(vec![base.clone()], base, 1))
    }

    #[test]
    fn names_are_taken_once_and_leave_nothing() {
        let scratch = tempfile::tempdir().unwrap();
        let (store, settings) = store(scratch.path());
        assert!(store.names().unwrap().is_empty());
        let (first, lock) = store.create("a", settings.clone()).unwrap();
        assert!(store.create("a", settings.clone()).unwrap_err().what.contains("already"));
        assert_eq!(store.names().unwrap(), ["a"]);
        assert_eq!(store.open("a").unwrap().lock(LockMode::Shared).unwrap_err().exit, Exit::Busy);
        drop(lock);
        let shared = first.lock(LockMode::Shared).unwrap();
        first.lock(LockMode::Shared).unwrap();
        assert_eq!(first.lock(LockMode::Exclusive).unwrap_err().exit, Exit::Busy);
        drop(shared);
        fs::create_dir(first.journal()).unwrap();
        assert_eq!(super::super::view::mount(&first, &store).unwrap_err().exit, Exit::Busy);
        fs::remove_dir(first.journal()).unwrap();
        let second = store.rename(first, "b").unwrap();
        assert_eq!(store.open("a").unwrap_err().exit, Exit::NotFound);
        let locked = second.changes().join("upper/locked");
        fs::create_dir(&locked).unwrap();
        fs::write(locked.join("f"), "").unwrap();
        chmod(&locked, Mode::empty()).unwrap();
        store.remove(&second).unwrap();
        assert_eq!(fs::read_dir(&store.directory).unwrap().count(), 0);
    }

    #[test]
    fn directories_of_killed_commands_go() {
        let scratch = tempfile::tempdir().unwrap();
        let (store, settings) = store(scratch.path());
        let dead = u32::MAX;
        for name in [format!("{NEW}{dead}"), format!("{DISCARDED}{dead}"), format!("{NEW}1")] {
            fs::create_dir_all(store.directory.join(name).join("changes")).unwrap();
        }
        store.create("a", settings).unwrap();
        let mut left: Vec<_> = fs::read_dir(&store.directory)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        assert_eq!(left, [".new.1", "a"]);
    }

    #[test]
    fn names_are_words() {
        for name in ["a", "A-1_b.c"] {
            check_name(name).unwrap();
        }
        for name in ["", ".a", "-a", "a/b", "a@b", "\u{e9}", &"x".repeat(65)] {
            assert_eq!(check_name(name).unwrap_err().exit, Exit::Usage, "{name}");
        }
    }
}
