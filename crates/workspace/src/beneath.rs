//! Access to a tree beneath an open directory.
//!
//! Every entry is reached by a path relative to the top that is resolved without links and without leaving the tree
//! (`openat2(2)`): a user who moves entries meanwhile cannot lead a step elsewhere.

use crate::meta::{Meta, Xattrs};
use nacre_sys::{
    directory, inode,
    xattrat::{self, Target},
};
use rustix::{
    fs::{self, AtFlags, CWD, Mode, OFlags, ResolveFlags},
    io::Errno,
};
use std::{
    ffi::{OsStr, OsString},
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::{OsStrExt, OsStringExt},
    },
    path::{Path, PathBuf},
    sync::Arc,
};

/// A directory that entries are looked up in.
pub(crate) const DIRECTORY: OFlags =
    OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// A directory that is read or synced.
const LISTED: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// A file of any type that is not read.
pub(crate) const HANDLE: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// A regular file that is read; a pipe that took its place does not block.
const READ: OFlags =
    OFlags::RDONLY.union(OFlags::NOFOLLOW).union(OFlags::NONBLOCK).union(OFlags::CLOEXEC).union(OFlags::NOCTTY);
/// Bytes of a path that one call resolves.
const PIECE: usize = 2048;
/// Times that a call is made again when others rename directories on the way.
const ATTEMPTS: usize = 16;
/// Bytes of one read of a directory.
const LISTING: usize = 64 << 10;
/// The longest list of names and the longest value of extended attributes (linux/limits.h).
const XATTR_MAX: usize = 64 << 10;

/// A name in a directory.
#[derive(Clone, Debug)]
pub(crate) struct Listed {
    pub(crate) name: OsString,
    pub(crate) ino: u64,
    /// Whether the listing says that it is a directory; `None` where it does not say.
    pub(crate) is_directory: Option<bool>,
}

/// A tree beneath an open directory.
#[derive(Clone, Debug)]
pub(crate) struct Tree {
    top: Arc<OwnedFd>,
    /// Path of the top, for messages.
    pub(crate) shown: PathBuf,
    /// Whether files may be made readable for a moment: those of the workspace's own upper.
    makes_readable: bool,
}

impl Tree {
    /// Opens the top directory by its path, which may lead through links.
    pub(crate) fn open(path: &Path) -> io::Result<Tree> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let top = fs::openat(CWD, path, flags, Mode::empty())?;
        Ok(Tree { top: Arc::new(top), shown: path.to_path_buf(), makes_readable: false })
    }

    /// The tree beneath a directory that is open.
    pub(crate) fn beneath(top: OwnedFd, shown: PathBuf) -> Tree {
        Tree { top: Arc::new(top), shown, makes_readable: false }
    }

    /// The same tree, of which files without read permission are made readable for the moment of opening them.
    pub(crate) fn making_readable(self) -> Tree {
        Tree { makes_readable: true, ..self }
    }

    pub(crate) fn top(&self) -> BorrowedFd<'_> {
        self.top.as_fd()
    }

    /// Path for messages.
    pub(crate) fn path_of(&self, path: &Path) -> PathBuf {
        if path.as_os_str().is_empty() { self.shown.clone() } else { self.shown.join(path) }
    }

    /// Opens an entry by its path from the top.
    fn resolve(&self, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let call = |at: BorrowedFd<'_>, path: &Path, flags: OFlags| {
            let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
            let mut attempt = 0;
            loop {
                match fs::openat2(at, path, flags, Mode::empty(), resolve) {
                    Err(Errno::AGAIN | Errno::INTR) if attempt < ATTEMPTS => attempt += 1,
                    opened => return opened,
                }
            }
        };
        if path.as_os_str().len() <= PIECE {
            return Ok(call(self.top(), path, flags)?);
        }
        // A path that is longer than one call takes.
        let mut at: Option<OwnedFd> = None;
        let mut piece = PathBuf::new();
        let mut parts = path.components().peekable();
        while let Some(part) = parts.next() {
            piece.push(part);
            let is_last = parts.peek().is_none();
            if is_last || piece.as_os_str().len() > PIECE {
                let from = at.as_ref().map_or(self.top(), AsFd::as_fd);
                at = Some(call(from, &piece, if is_last { flags } else { DIRECTORY })?);
                piece.clear();
            }
        }
        at.ok_or_else(|| io::Error::from_raw_os_error(Errno::NOENT.raw_os_error()))
    }

    /// Opens a directory, to look up entries in it.
    pub(crate) fn directory(&self, path: &Path) -> io::Result<OwnedFd> {
        self.resolve(path, DIRECTORY)
    }

    /// Opens a directory, to read or sync it.
    pub(crate) fn listed_directory(&self, path: &Path) -> io::Result<OwnedFd> {
        self.opened_readable(path, LISTED, 0o500)
    }

    /// Opens a regular file for reading, where allowed without a new access time.
    pub(crate) fn file(&self, path: &Path) -> io::Result<OwnedFd> {
        match self.opened_readable(path, READ | OFlags::NOATIME, 0o400) {
            Err(error) if error.raw_os_error() == Some(Errno::PERM.raw_os_error()) => {
                self.opened_readable(path, READ, 0o400)
            }
            opened => opened,
        }
    }

    fn opened_readable(&self, path: &Path, flags: OFlags, needed: u32) -> io::Result<OwnedFd> {
        let opened = self.resolve(path, flags);
        let Err(error) = &opened else { return opened };
        if !self.makes_readable || error.raw_os_error() != Some(Errno::ACCESS.raw_os_error()) {
            return opened;
        }
        let handle = self.handle(path)?;
        let mode = Meta::of_file(handle.as_fd())?.permissions();
        inode::change_mode(handle.as_fd(), mode | needed)?;
        let opened = self.resolve(path, flags);
        inode::change_mode(handle.as_fd(), mode)?;
        opened
    }

    /// Opens a regular file for reading and writing; one without these permissions gets them for the moment of opening it.
    pub(crate) fn writable_file(&self, path: &Path) -> io::Result<OwnedFd> {
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
        let opened = self.resolve(path, flags);
        let Err(error) = &opened else { return opened };
        if error.raw_os_error() != Some(Errno::ACCESS.raw_os_error()) {
            return opened;
        }
        let handle = self.handle(path)?;
        let mode = Meta::of_file(handle.as_fd())?.permissions();
        inode::change_mode(handle.as_fd(), mode | 0o600)?;
        let opened = self.resolve(path, flags);
        inode::change_mode(handle.as_fd(), mode)?;
        opened
    }

    /// Opens an entry of any type without reading it.
    pub(crate) fn handle(&self, path: &Path) -> io::Result<OwnedFd> {
        self.resolve(path, HANDLE)
    }

    /// Opens the directory of an entry, to make a call with the entry's name.
    pub(crate) fn parent<'a>(&self, path: &'a Path) -> io::Result<(OwnedFd, &'a OsStr)> {
        let name = path.file_name().ok_or_else(|| io::Error::from_raw_os_error(Errno::INVAL.raw_os_error()))?;
        Ok((self.directory(path.parent().unwrap_or(Path::new("")))?, name))
    }

    /// The attributes of an entry; `None` where there is none.
    pub(crate) fn meta(&self, path: &Path) -> io::Result<Option<Meta>> {
        let read = match path.file_name() {
            None => Meta::of_file(self.top()),
            Some(_) => self.parent(path).and_then(|(directory, name)| Meta::of_entry(directory.as_fd(), name)),
        };
        match read {
            Ok(meta) => Ok(Some(meta)),
            Err(error) if crate::trouble::is_missing(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The names in a directory, in any order.
    pub(crate) fn list(&self, path: &Path) -> io::Result<Vec<Listed>> {
        list(self.listed_directory(path)?.as_fd())
    }

    /// The target of a symbolic link.
    pub(crate) fn link_target(&self, path: &Path) -> io::Result<Vec<u8>> {
        let handle = self.handle(path)?;
        Ok(fs::readlinkat(&handle, c"", Vec::new())?.into_bytes())
    }

    /// All extended attributes of an entry.
    pub(crate) fn xattrs(&self, path: &Path) -> io::Result<Xattrs> {
        if path.as_os_str().is_empty() {
            return xattrs(Target::File(self.top()));
        }
        let (directory, name) = self.parent(path)?;
        xattrs(Target::Entry(directory.as_fd(), name.as_bytes()))
    }

    /// One extended attribute of an entry; `None` where there is none.
    pub(crate) fn xattr(&self, path: &Path, name: &[u8]) -> io::Result<Option<Vec<u8>>> {
        if path.as_os_str().is_empty() {
            return xattr(Target::File(self.top()), name);
        }
        let (directory, entry) = self.parent(path)?;
        xattr(Target::Entry(directory.as_fd(), entry.as_bytes()), name)
    }
}

/// The names in an open directory, in any order.
pub(crate) fn list(directory: BorrowedFd<'_>) -> io::Result<Vec<Listed>> {
    let (mut names, mut buffer) = (Vec::new(), vec![0; LISTING]);
    loop {
        let filled = directory::read(directory, &mut buffer)?;
        if filled == 0 {
            return Ok(names);
        }
        let mut rest = buffer.get(..filled).unwrap_or_default();
        while let Some(record) = directory::first(rest) {
            if record.name != b"." && record.name != b".." {
                let is_directory = if record.kind == 0 { None } else { Some(record.kind == 4) };
                let name = OsString::from_vec(record.name.to_vec());
                names.push(Listed { name, ino: record.ino, is_directory });
            }
            rest = rest.get(record.length..).unwrap_or_default();
        }
    }
}

fn lacks_attributes(error: &io::Error) -> bool {
    let number = error.raw_os_error().map(Errno::from_raw_os_error);
    matches!(number, Some(Errno::NODATA | Errno::OPNOTSUPP | Errno::NOSYS))
}

/// All extended attributes of a file that the caller may read.
pub(crate) fn xattrs(target: Target<'_>) -> io::Result<Xattrs> {
    let mut names = vec![0; 1024];
    let length = loop {
        match xattrat::list(target, &mut names) {
            Ok(length) => break length,
            Err(error) if lacks_attributes(&error) => return Ok(Xattrs::new()),
            Err(error) if names.len() < XATTR_MAX && error.raw_os_error() == Some(Errno::RANGE.raw_os_error()) => {
                names.resize(XATTR_MAX, 0);
            }
            Err(error) => return Err(error),
        }
    };
    let mut found = Xattrs::new();
    let listed = names.get(..length).unwrap_or_default();
    for name in listed.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        if let Some(value) = xattr(target, name)? {
            found.insert(name.to_vec(), value);
        }
    }
    Ok(found)
}

/// One extended attribute; `None` where there is none.
pub(crate) fn xattr(target: Target<'_>, name: &[u8]) -> io::Result<Option<Vec<u8>>> {
    let mut value = vec![0; 256];
    loop {
        match xattrat::get(target, name, &mut value) {
            Ok(length) => {
                value.truncate(length);
                return Ok(Some(value));
            }
            Err(error) if lacks_attributes(&error) => return Ok(None),
            Err(error) if value.len() < XATTR_MAX && error.raw_os_error() == Some(Errno::RANGE.raw_os_error()) => {
                value.resize(XATTR_MAX, 0);
            }
            Err(error) => return Err(error),
        }
    }
}

/// Removes an entry, of a directory everything in it, without following links or leaving the directory's tree or file
/// system.
pub(crate) fn remove_tree(directory: BorrowedFd<'_>, name: &OsStr) -> io::Result<()> {
    match fs::unlinkat(directory, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => return Ok(()),
        // Linux says EISDIR, POSIX EPERM.
        Err(Errno::ISDIR | Errno::PERM) => {}
        Err(error) => return Err(error.into()),
    }
    // Depth first, with the open directories of one path.
    let mut open: Vec<(OwnedFd, OsString, Vec<Listed>)> = Vec::new();
    let enter = |at: BorrowedFd<'_>, name: &OsStr| -> io::Result<(OwnedFd, Vec<Listed>)> {
        let (home, there) = (Meta::of_file(at)?, Meta::of_entry(at, name)?);
        if there.is_mount || there.device != home.device {
            return Err(Errno::BUSY.into());
        }
        let opened = match fs::openat(at, name, LISTED, Mode::empty()) {
            Err(Errno::ACCESS) => {
                let handle = fs::openat(at, name, DIRECTORY, Mode::empty())?;
                inode::change_mode(handle.as_fd(), 0o700)?;
                fs::openat(at, name, LISTED, Mode::empty())?
            }
            opened => opened?,
        };
        let meta = Meta::of_file(opened.as_fd())?;
        if meta.permissions() & 0o300 != 0o300 {
            // Where it is not allowed, the removal of an entry fails.
            let _ = inode::change_mode(opened.as_fd(), meta.permissions() | 0o700);
        }
        let names = list(opened.as_fd())?;
        Ok((opened, names))
    };
    let (opened, names) = enter(directory, name)?;
    open.push((opened, name.to_os_string(), names));
    while let Some((at, name_of, mut names)) = open.pop() {
        let Some(next) = names.pop() else {
            let above = open.last().map_or(directory, |(above, _, _)| above.as_fd());
            match fs::unlinkat(above, &name_of, AtFlags::REMOVEDIR) {
                Ok(()) | Err(Errno::NOENT) => continue,
                Err(error) => return Err(error.into()),
            }
        };
        match fs::unlinkat(&at, &next.name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => open.push((at, name_of, names)),
            Err(Errno::ISDIR | Errno::PERM) => {
                let (below, inside) = enter(at.as_fd(), &next.name)?;
                open.push((at, name_of, names));
                open.push((below, next.name, inside));
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
