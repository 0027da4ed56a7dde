//! `versions` and `restore`: versions of a file in the snapshots of its file system.
//!
//! Invariants: a restored file replaces the current one in one rename, with content, owner, mode,
//! times and attributes, and is durable then. No link is followed below the file system, neither in
//! the snapshot nor at the target: the owner of the files may exchange directories for links
//! meanwhile. Only a target that is named (`TO`) is looked up as any path.

use super::{
    args,
    ask::{all_mounted, ask},
};
use crate::{
    clap_args::{flag, path},
    columns::{self, Align},
    output::print,
};
use clap::{Arg, ArgMatches, Command, value_parser};
use nacre_admin::fs::{FsAnswer, FsRequest, Listing, Types};
use nacre_daemon::{
    failure::{Exit, Failure},
    pool::dates,
    report::path_text,
};
use nacre_pool::properties::size::human_bytes;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, Timespec, Timestamps, XattrFlags};
use std::{
    ffi::{OsStr, OsString},
    fs::{self, File, Metadata},
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::{ffi::OsStrExt, fs::MetadataExt},
    },
    path::{Path, PathBuf},
    process::ExitCode,
};

/// A verb on versions of files.
#[derive(Debug)]
pub enum VersionsVerb {
    /// Show the versions of a file.
    Show {
        /// The file.
        file: PathBuf,
        /// No headings, one tab between columns.
        scripted: bool,
        /// Exact numbers.
        exact: bool,
    },
    /// Restore a version of a file.
    Restore {
        /// The file, `@`, the snapshot.
        version: OsString,
        /// Target; `None`: the original path.
        to: Option<PathBuf>,
    },
}

/// Returns the command lines of `versions` and `restore`.
pub fn commands() -> [Command; 2] {
    [
        Command::new("versions")
            .about("Show what a file was in the snapshots of its file system")
            .after_help("Examples:\n  nacre fs versions /tank/home/letter\n  nacre fs versions -Hp letter\n\nA version that is the one before it is marked with =. Files that are gone are found as well.")
            .arg(flag('H', "scripted", "No headings, one tab between columns"))
            .arg(flag('p', "exact", "Exact numbers, times as seconds since 1970"))
            .arg(path("FILE", "Which")),
        Command::new("restore")
            .about("Make a file what it was in a snapshot")
            .after_help("Examples:\n  nacre fs restore /tank/home/letter@monday\n  nacre fs restore letter@monday letter.old\n\nWhat is there now is lost unless a snapshot has it. For directories: nacre copy .zfs/snapshot/NAME/DIRECTORY TARGET")
            .arg(path("VERSION", "The file as it was").value_name("FILE@SNAPSHOT"))
            .arg(Arg::new("TO").value_parser(value_parser!(PathBuf)).help("Where to [default: where it was]")),
    ]
}

/// Parses the matched arguments of `versions`.
pub fn show(matches: &ArgMatches) -> VersionsVerb {
    let file = matches.get_one::<OsString>("FILE").cloned().unwrap_or_default().into();
    VersionsVerb::Show { file, scripted: matches.get_flag("scripted"), exact: matches.get_flag("exact") }
}

/// Parses the matched arguments of `restore`.
pub fn restore(matches: &ArgMatches) -> VersionsVerb {
    let version = matches.get_one::<OsString>("VERSION").cloned().unwrap_or_default();
    VersionsVerb::Restore { version, to: matches.get_one::<PathBuf>("TO").cloned() }
}

/// Carries out a verb.
///
/// # Errors
/// No such file or version, or the error of an operation on it.
pub fn run(verb: &VersionsVerb) -> Result<ExitCode, Failure> {
    match verb {
        VersionsVerb::Show { file, scripted, exact } => print(&table(file, *scripted, *exact)?)?,
        VersionsVerb::Restore { version, to } => bring_back(version, to.as_deref())?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Location of a file: its file system, the mount point of that, and the path below it.
struct Located {
    filesystem: String,
    root: PathBuf,
    below: PathBuf,
}

fn locate(file: &Path) -> Result<Located, Failure> {
    let failed = |error: &io::Error| Failure::io("cannot find", path_text(file), error);
    let whole = std::path::absolute(file).map_err(|error| failed(&error))?;
    // The file itself may be deleted, or be a link: its directory is looked up.
    let (Some(directory), Some(name)) = (whole.parent(), whole.file_name()) else {
        return Err(Failure::new(format!("'{}' names no file", path_text(file))));
    };
    let whole = directory.canonicalize().map_err(|error| failed(&error))?.join(name);
    let (mounted, missing) = all_mounted();
    let inside = mounted.into_iter().filter(|mounted| whole.starts_with(&mounted.at) && whole != mounted.at);
    let found = inside.max_by_key(|mounted| mounted.at.components().count());
    let found = found.ok_or_else(|| {
        missing.unwrap_or_else(|| {
            Failure::new(format!("'{}' is in no file system of a pool", path_text(file))).exit(Exit::NotFound)
        })
    })?;
    let below = whole.strip_prefix(&found.at).unwrap_or(&whole).to_owned();
    Ok(Located { filesystem: found.name, root: found.at, below })
}

impl Located {
    fn at(&self, snapshot: &OsStr) -> PathBuf {
        self.root.join(Self::inside(snapshot)).join(&self.below)
    }

    /// Returns the path of a snapshot below the file system's root.
    fn inside(snapshot: &OsStr) -> PathBuf {
        Path::new(".zfs/snapshot").join(snapshot)
    }

    /// Opens a path below the file system's root; links are not followed.
    fn open(&self, below: &Path, flags: OFlags) -> io::Result<OwnedFd> {
        let root = rustix::fs::open(&self.root, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        let within = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(rustix::fs::openat2(&root, below, flags, Mode::empty(), within)?)
    }

    /// Returns the names of the snapshots in the order of creation.
    fn snapshots(&self) -> Result<Vec<String>, Failure> {
        let types = Types { snapshots: true, ..Types::default() };
        let listing = Listing {
            names: vec![self.filesystem.clone()],
            depth: Some(1),
            types: Some(types),
            properties: Some(Vec::new()),
        };
        let answer = ask(args::pool(&self.filesystem), "", FsRequest::List(listing))?;
        let FsAnswer::Listed(mut listed) = answer else { return Ok(Vec::new()) };
        listed.sort_by_key(|object| object.created);
        Ok(listed.into_iter().filter_map(|object| Some(object.name.split_once('@')?.1.to_owned())).collect())
    }
}

/// Returns the metadata that change with every change of a file.
fn told(metadata: &Metadata) -> impl PartialEq + use<> {
    let times = (metadata.mtime(), metadata.mtime_nsec(), metadata.ctime(), metadata.ctime_nsec());
    (times, metadata.size(), metadata.mode(), metadata.uid(), metadata.gid())
}

fn table(file: &Path, scripted: bool, exact: bool) -> Result<String, Failure> {
    let located = locate(file)?;
    let mut rows: Vec<Vec<String>> = Vec::new();
    let mut before: Option<Metadata> = None;
    let places = located.snapshots()?.into_iter().map(|name| (format!("@{name}"), located.at(name.as_ref())));
    for (name, place) in places.chain(std::iter::once(("now".to_owned(), located.root.join(&located.below)))) {
        let metadata = match fs::symlink_metadata(&place) {
            Ok(metadata) => metadata,
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                before = None;
                continue;
            }
            Err(error) => return Err(Failure::io("cannot look at", path_text(&place), &error)),
        };
        let seconds = u64::try_from(metadata.mtime()).unwrap_or(0);
        let (size, time) = if exact {
            (metadata.size().to_string(), metadata.mtime().to_string())
        } else {
            (human_bytes(metadata.size()), dates::dotted(seconds))
        };
        let same = before.as_ref().is_some_and(|before| told(before) == told(&metadata));
        rows.push(vec![name, size, time, if same { "=" } else { "" }.to_owned()]);
        before = Some(metadata);
    }
    if rows.is_empty() {
        return Err(Failure::new(format!("'{}' is in no snapshot of '{}'", path_text(file), located.filesystem))
            .exit(Exit::NotFound));
    }
    if scripted {
        return Ok(columns::scripted(&rows));
    }
    let headings = [("VERSION", Align::Left), ("SIZE", Align::Right), ("MODIFIED", Align::Left), ("SAME", Align::Left)];
    Ok(columns::aligned(&headings, &rows, false))
}

fn bring_back(version: &OsStr, to: Option<&Path>) -> Result<(), Failure> {
    let bytes = version.as_bytes();
    let place = bytes.iter().rposition(|byte| *byte == b'@').filter(|place| *place > 0);
    let Some((file, name)) = place.map(|place| bytes.split_at(place)) else {
        return Err(Failure::usage("the file and the snapshot are needed: FILE@SNAPSHOT"));
    };
    let (file, name) = (Path::new(OsStr::from_bytes(file)), OsStr::from_bytes(name.get(1..).unwrap_or_default()));
    if name.is_empty() || name.as_bytes().contains(&b'/') {
        return Err(Failure::usage("the file and the snapshot are needed: FILE@SNAPSHOT"));
    }
    let located = locate(file)?;
    let below = Located::inside(name).join(&located.below);
    let shown = path_text(file);
    let failed = |error: io::Error| Failure::io("cannot restore", &shown, &error);
    let found = located.open(&below, OFlags::PATH).and_then(|file| File::from(file).metadata());
    let metadata = found.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            Failure::new(format!("'{shown}' is not in '{}@{}'", located.filesystem, name.to_string_lossy()))
                .exit(Exit::NotFound)
                .next("'nacre fs versions' shows where it is")
        }
        _ => failed(error),
    })?;
    if !metadata.is_file() {
        return Err(Failure::new(format!("cannot restore '{shown}': it is no regular file"))
            .next(format!("nacre copy {} TARGET", path_text(&located.at(name)))));
    }
    let source = located.open(&below, OFlags::RDONLY).map_err(failed)?;
    let place = to.unwrap_or(&located.below);
    let above = place.parent().filter(|above| !above.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let directory = match to {
        None => located.open(above, OFlags::RDONLY | OFlags::DIRECTORY),
        Some(_) => rustix::fs::openat(CWD, above, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            .map_err(Into::into),
    };
    let Some(called) = place.file_name() else {
        return Err(Failure::usage(format!("'{}' names no file", path_text(place))));
    };
    replace(&File::from(source), &metadata, directory.map_err(failed)?.as_fd(), called).map_err(failed)
}

/// Replaces a directory entry by a copy of a file.
fn replace(source: &File, metadata: &Metadata, directory: BorrowedFd<'_>, name: &OsStr) -> io::Result<()> {
    let temporary = format!(".nacre-restore-{}", std::process::id());
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let target = rustix::fs::openat(directory, &temporary, flags, Mode::RUSR | Mode::WUSR)?;
    let done = copy(source, metadata, &File::from(target))
        .and_then(|()| Ok(rustix::fs::renameat(directory, &temporary, directory, name)?));
    if done.is_err() {
        // The original error is returned; a partial file that cannot be removed either has a
        // telling name.
        let _ = rustix::fs::unlinkat(directory, &temporary, AtFlags::empty());
    }
    done?;
    Ok(rustix::fs::fsync(directory)?)
}

/// Copies a file with its content, owner, mode, times and attributes.
fn copy(mut source: &File, metadata: &Metadata, mut target: &File) -> io::Result<()> {
    io::copy(&mut source, &mut target)?;
    let same_owner = target.metadata().is_ok_and(|now| (now.uid(), now.gid()) == (metadata.uid(), metadata.gid()));
    if !same_owner {
        std::os::unix::fs::fchown(target, Some(metadata.uid()), Some(metadata.gid()))?;
    }
    let mut names = vec![0; 64 << 10];
    let length = rustix::fs::flistxattr(source, names.as_mut_slice())?;
    for name in names.get(..length).unwrap_or_default().split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let mut value = vec![0; 64 << 10];
        let length = rustix::fs::fgetxattr(source, name, value.as_mut_slice())?;
        rustix::fs::fsetxattr(target, name, value.get(..length).unwrap_or_default(), XattrFlags::empty())?;
    }
    target.set_permissions(metadata.permissions())?;
    let time = |tv_sec: i64, nanoseconds: i64| Timespec { tv_sec, tv_nsec: nanoseconds };
    let times = Timestamps {
        last_access: time(metadata.atime(), metadata.atime_nsec()),
        last_modification: time(metadata.mtime(), metadata.mtime_nsec()),
    };
    rustix::fs::futimens(target, &times)?;
    target.sync_all()
}
