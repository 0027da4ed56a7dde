//! Checks before a copy: SOURCE and DEST are opened and examined, and nothing is changed if the copy may not begin.

use crate::{
    Options, Refusal, RefusalKind, Verify,
    metadata::Meta,
    state::{self, CopyState},
    trouble::{reason, shown},
};
use nacre_sys::directory;
use rustix::{
    fs::{self, FlockOperation, Mode, OFlags},
    io::Errno,
};
use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

/// Both directories, open.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) source: OwnedFd,
    pub(crate) source_path: PathBuf,
    pub(crate) source_meta: Meta,
    pub(crate) dest: OwnedFd,
    pub(crate) dest_meta: Meta,
    /// DEST was empty: only this copy puts entries into it.
    pub(crate) fresh: bool,
    /// State of the copy; `None` when nothing is to be copied.
    pub(crate) state: Option<CopyState>,
    /// An earlier copy is continued.
    pub(crate) resumed: bool,
}

/// Opens both sides; makes DEST where it is missing, and writes the state of the copy there.
pub(crate) fn prepare(options: &Options) -> Result<Prepared, Refusal> {
    let (source_path, source, source_meta) = open_source(&options.source)?;
    if holds_state(&source, &options.source)? {
        return Err(refused(
            format!("{} is itself a copy that was not finished", shown(&options.source)),
            format!(
                "finish it with the command that began it, or remove {} if it shall stay as it is",
                state_path(&options.source)
            ),
        ));
    }
    let copies = options.verify != Verify::Only;
    if copies {
        refuse_inside(&options.destination, &source_meta)?;
        match fs::mkdir(&options.destination, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(failed("cannot create", &options.destination, &error.into())),
        }
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dest = fs::open(&options.destination, flags, Mode::empty())
        .map_err(|error| failed("cannot open the directory", &options.destination, &error.into()))?;
    let dest_meta =
        Meta::of_file(dest.as_fd()).map_err(|error| failed("cannot look at", &options.destination, &error))?;
    if dest_meta.identity() == source_meta.identity() {
        return Err(refused(
            format!("{} and {} are one directory", shown(&options.source), shown(&options.destination)),
            String::new(),
        ));
    }
    let mut prepared =
        Prepared { source, source_path, source_meta, dest, dest_meta, fresh: false, state: None, resumed: false };
    if copies {
        begin(options, &mut prepared)?;
    }
    Ok(prepared)
}

fn open_source(path: &Path) -> Result<(PathBuf, OwnedFd, Meta), Refusal> {
    let whole = path.canonicalize().map_err(|error| Refusal {
        next: "name a directory that is there and that you can reach".to_owned(),
        ..failed("cannot open", path, &error)
    })?;
    let open = |flags| fs::open(&whole, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | flags, Mode::empty());
    let source = match open(OFlags::NOATIME) {
        Err(Errno::PERM) => open(OFlags::empty()),
        opened => opened,
    };
    let source = match source {
        Err(Errno::NOTDIR) => {
            return Err(refused(format!("{} is not a directory", shown(path)), "cp(1) copies single files".to_owned()));
        }
        opened => opened.map_err(|error| failed("cannot open the directory", path, &error.into()))?,
    };
    let meta = Meta::of_file(source.as_fd()).map_err(|error| failed("cannot look at", path, &error))?;
    Ok((whole, source, meta))
}

fn holds_state(source: &OwnedFd, path: &Path) -> Result<bool, Refusal> {
    match Meta::of_entry(source.as_fd(), state::NAME.as_bytes()) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(failed("cannot look into", path, &error)),
    }
}

/// Refuses a DEST inside of SOURCE: the copy would have no end.
fn refuse_inside(destination: &Path, source: &Meta) -> Result<(), Refusal> {
    let above = match destination.parent() {
        _ if destination.is_dir() => destination,
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let look = |error: io::Error| Refusal {
        next: "the directory that the copy is to lie in must be there, and within your reach".to_owned(),
        ..failed("cannot open the directory", above, &error)
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut directory = fs::open(above, flags, Mode::empty()).map_err(|error| look(error.into()))?;
    let mut meta = Meta::of_file(directory.as_fd()).map_err(look)?;
    loop {
        if meta.identity() == source.identity() {
            return Err(refused(
                format!("{} lies inside of what is to be copied", shown(destination)),
                "choose a destination outside of the source".to_owned(),
            ));
        }
        let parent = match fs::openat(&directory, c"..", flags, Mode::empty()) {
            Ok(parent) => parent,
            // A user who may not look further up cannot have named a source there either.
            Err(Errno::ACCESS) => return Ok(()),
            Err(error) => return Err(look(error.into())),
        };
        let next = Meta::of_file(parent.as_fd()).map_err(look)?;
        if next.identity() == meta.identity() {
            return Ok(());
        }
        (directory, meta) = (parent, next);
    }
}

/// Begins the copy in DEST, or continues the one that was begun there.
fn begin(options: &Options, prepared: &mut Prepared) -> Result<(), Refusal> {
    let (dest, path) = (prepared.dest.as_fd(), &options.destination);
    // Not every file system supports locks on directories; the lock only guards against a mistake.
    if fs::flock(dest, FlockOperation::NonBlockingLockExclusive) == Err(Errno::WOULDBLOCK) {
        let what = format!("another copy into {} is at work", shown(path));
        return Err(Refusal { what, next: String::new(), kind: RefusalKind::Busy });
    }
    let found = CopyState::read(dest).map_err(|error| {
        let mut refusal = failed("cannot read", &path.join(state::NAME), &error);
        refusal.next =
            "a copy into this directory was not finished; use the program that began it, or remove this file"
                .to_owned();
        refusal
    })?;
    prepared.resumed = found.is_some();
    let empty = is_empty(dest).map_err(|error| failed("cannot read the directory", path, &error))?;
    prepared.fresh = !prepared.resumed && empty == Content::Nothing;
    let mut state = match found {
        Some(state) if state.source != prepared.source_path => {
            return Err(refused(
                format!("{} holds a copy of {} that was not finished", shown(path), shown(&state.source)),
                format!(
                    "finish it with `nacre copy {} {}`, or remove {}",
                    shown(&state.source),
                    shown(path),
                    state_path(path)
                ),
            ));
        }
        Some(state) => state,
        None if empty == Content::Something && !options.update => {
            return Err(refused(
                format!("{} is not empty", shown(path)),
                "--update copies what is missing or differs and leaves the rest alone".to_owned(),
            ));
        }
        None => CopyState::new(&prepared.source_path),
    };
    let noted = CopyState::time_of(dest).and_then(|now| {
        state.take_up(now);
        state.write(dest)
    });
    noted.map_err(|error| failed("cannot write", &path.join(state::NAME), &error))?;
    prepared.state = Some(state);
    Ok(())
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Content {
    Nothing,
    /// Only `lost+found`, as in a new file system.
    LostAndFound,
    Something,
}

fn is_empty(directory: BorrowedFd<'_>) -> io::Result<Content> {
    let again = fs::openat(directory, c".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let mut buffer = [0; 4096];
    let mut content = Content::Nothing;
    loop {
        let filled = directory::read(again.as_fd(), &mut buffer)?;
        let mut rest = buffer.get(..filled).unwrap_or_default();
        if rest.is_empty() {
            return Ok(content);
        }
        while let Some(record) = directory::first(rest) {
            match record.name {
                b"." | b".." => {}
                // State of a copy that was killed before it had changed anything.
                name if state::is_own_name(name) => {}
                b"lost+found" => content = Content::LostAndFound,
                _ => return Ok(Content::Something),
            }
            rest = rest.get(record.length..).unwrap_or_default();
        }
    }
}

fn state_path(root: &Path) -> String {
    shown(&root.join(state::NAME))
}

fn refused(what: String, next: String) -> Refusal {
    Refusal { what, next, kind: RefusalKind::Refused }
}

pub(crate) fn failed(doing: &str, path: &Path, error: &io::Error) -> Refusal {
    let kind = match error.kind() {
        io::ErrorKind::NotFound => RefusalKind::NotFound,
        io::ErrorKind::PermissionDenied => RefusalKind::Denied,
        _ => RefusalKind::Refused,
    };
    Refusal { what: format!("{doing} {}: {}", shown(path), reason(error)), next: String::new(), kind }
}
