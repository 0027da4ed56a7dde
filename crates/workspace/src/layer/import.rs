//! Reading a layer into an empty upper.
//!
//! The layer is built in a directory of the upper that the view does not show; its entries get their names when the whole
//! archive has been read. Every path of the archive is resolved beneath that directory and without links, so no archive
//! writes elsewhere.

use super::XATTR;
use crate::{
    Base, Result, Upper, WorkspaceError,
    beneath::{self, DIRECTORY, HANDLE, Tree},
    dress,
    meta::{Meta, Time, Xattrs, is_private, shown_attributes},
    steps::Dress,
    trouble::{During, fact, failed},
    upper::{LOG, MARK, OPAQUE},
};
use nacre_union::base_log::HiddenEntry;
use rustix::{
    fs::{self, AtFlags, FileType, Mode, OFlags, RenameFlags},
    io::Errno,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::{OsStr, OsString},
    fs::File,
    io::{self, Read},
    os::{fd::AsFd, unix::ffi::OsStrExt},
    path::{Component, Path, PathBuf},
};
use tar::{Archive, EntryType};

/// The directory in the upper in which a layer is built.
const BUILDING: &str = ".wh..wh.import";

/// Reads a layer in OCI's form into the upper of a workspace without changes.
///
/// # Errors
/// The archive is malformed or has names outside of the base; nothing of it stays.
pub fn import(base: &Base, upper: &Upper, archive: &mut dyn Read) -> Result<()> {
    let scan = upper.scan()?;
    if scan.entries.len() > 1 || !scan.whiteouts.is_empty() {
        return Err(fact(
            &upper.tree.shown,
            "has changes already: a layer is imported into a workspace without changes",
        ));
    }
    let building = Path::new(BUILDING);
    let shown = upper.tree.path_of(building);
    let (top, name) = upper.tree.parent(building).during("open", &shown)?;
    beneath::remove_tree(top.as_fd(), name).during("remove", &shown)?;
    fs::mkdirat(&top, name, Mode::RWXU).during("create", &shown)?;
    let built = Tree::open(&shown).during("open", &shown).and_then(|tree| {
        let mut import =
            Import { base, tree: tree.making_readable(), directories: BTreeMap::new(), hidden: BTreeSet::new() };
        import.read(archive)?;
        import.finish(upper)
    });
    let removed = beneath::remove_tree(top.as_fd(), name).during("remove", &shown);
    built.and(removed)
}

struct Import<'a> {
    base: &'a Base,
    tree: Tree,
    /// Attributes of directories, which are set when everything is in them.
    directories: BTreeMap<PathBuf, Dress>,
    /// Paths of the base that the layer hides, and whether with everything below.
    hidden: BTreeSet<(PathBuf, bool)>,
}

fn malformed(error: io::Error) -> WorkspaceError {
    WorkspaceError { what: format!("the archive cannot be read: {error}"), errno: error.raw_os_error() }
}

impl Import<'_> {
    fn read(&mut self, archive: &mut dyn Read) -> Result<()> {
        let mut archive = Archive::new(archive);
        for entry in archive.entries().map_err(malformed)? {
            let mut entry = entry.map_err(malformed)?;
            let kind = entry.header().entry_type();
            if kind == EntryType::XGlobalHeader {
                continue;
            }
            let path = self.cleaned(&entry.path_bytes())?;
            let Some(name) = path.file_name() else { continue };
            let parent = path.parent().unwrap_or(Path::new("")).to_path_buf();
            let name = name.as_bytes().to_vec();
            self.make_parents(&parent)?;
            if let Some(hidden) = name.strip_prefix(MARK) {
                self.mark(&parent, &name, hidden)?;
                continue;
            }
            let (wanted, device) = attributes(&mut entry, &path)?;
            let target = entry.link_name_bytes().map(|target| target.into_owned());
            self.make(&path, kind, &wanted, device, target.as_deref(), &mut entry)?;
        }
        Ok(())
    }

    /// A path of the archive as one relative to the base.
    fn cleaned(&self, bytes: &[u8]) -> Result<PathBuf> {
        let (written, mut path) = (Path::new(OsStr::from_bytes(bytes)), PathBuf::new());
        for part in written.components() {
            match part {
                Component::Normal(name) => path.push(name),
                Component::CurDir | Component::RootDir => {}
                Component::ParentDir | Component::Prefix(_) => return Err(fact(written, "leads out of the archive")),
            }
        }
        let is_reserved = |path: &Path| {
            path.parent()
                .into_iter()
                .flat_map(Path::components)
                .any(|part| part.as_os_str().as_bytes().starts_with(MARK))
        };
        if is_reserved(&path) { Err(fact(written, "lies in a directory whose name is reserved")) } else { Ok(path) }
    }

    /// Makes directories that the archive does not have itself, as the base has them.
    fn make_parents(&mut self, directory: &Path) -> Result<()> {
        let mut missing = Vec::new();
        for above in directory.ancestors().filter(|above| !above.as_os_str().is_empty()) {
            match self.tree.meta(above).during("read", above)? {
                Some(meta) if meta.is_directory() => break,
                Some(_) => return Err(fact(above, "is no directory in the archive, and has entries there")),
                None => missing.push(above.to_path_buf()),
            }
        }
        for path in missing.into_iter().rev() {
            let (parent, name) = self.tree.parent(&path).during("create", &path)?;
            fs::mkdirat(&parent, name, Mode::RWXU).during("create", &path)?;
            let wanted = match self.base.find(&path)?.filter(|below| below.meta.is_directory()) {
                Some(below) => {
                    let xattrs = below.tree.xattrs(&path).during("read the attributes of", &path)?;
                    Dress::new(&below.meta, shown_attributes(&xattrs))
                }
                None => {
                    let now = Meta::of_entry(parent.as_fd(), name).during("read", &path)?;
                    Dress { mode: 0o755, ..Dress::new(&now, Xattrs::new()) }
                }
            };
            self.directories.insert(path.clone(), wanted);
            self.hidden.insert((path, false));
        }
        Ok(())
    }

    /// A whiteout or an opaque mark.
    fn mark(&mut self, parent: &Path, name: &[u8], hidden: &[u8]) -> Result<()> {
        if name == OPAQUE {
            self.hidden.insert((parent.to_path_buf(), true));
        } else if hidden.starts_with(MARK) || hidden.is_empty() {
            // Other programs' own entries.
            return Ok(());
        } else if hidden == b"." || hidden == b".." {
            return Err(fact(&parent.join(OsStr::from_bytes(name)), "hides no name"));
        } else {
            self.hidden.insert((parent.join(OsStr::from_bytes(hidden)), true));
        }
        let path = parent.join(OsStr::from_bytes(name));
        let (directory, name) = self.tree.parent(&path).during("create", &path)?;
        match fs::mknodat(&directory, name, FileType::RegularFile, Mode::from_raw_mode(0o444), 0) {
            Ok(()) | Err(Errno::EXIST) => Ok(()),
            Err(error) => Err(failed("create", &path, &error.into())),
        }
    }

    fn make(
        &mut self,
        path: &Path,
        kind: EntryType,
        wanted: &Dress,
        device: (u32, u32),
        target: Option<&[u8]>,
        content: &mut dyn Read,
    ) -> Result<()> {
        let (parent, name) = self.tree.parent(path).during("create", path)?;
        let there = self.tree.meta(path).during("read", path)?;
        let stays = kind == EntryType::Directory && there.is_some_and(|meta| meta.is_directory());
        if there.is_some() && !stays {
            beneath::remove_tree(parent.as_fd(), name).during("replace", path)?;
            self.directories.retain(|directory, _| !directory.starts_with(path));
        }
        self.hidden.insert((path.to_path_buf(), kind != EntryType::Directory));
        match kind {
            EntryType::Directory => {
                if !stays {
                    fs::mkdirat(&parent, name, Mode::RWXU).during("create", path)?;
                }
                self.directories.insert(path.to_path_buf(), wanted.clone());
                return Ok(());
            }
            EntryType::Link => {
                let Some(target) = target else { return Err(fact(path, "is a hard link to nothing in the archive")) };
                let first = self.cleaned(target)?;
                let (from, first_name) = self.tree.parent(&first).during("open", &first)?;
                return fs::linkat(&from, first_name, &parent, name, AtFlags::empty())
                    .during("make a hard link at", path);
            }
            EntryType::Symlink => {
                let target = target.unwrap_or_default();
                fs::symlinkat(target, &parent, name).during("create", path)?;
            }
            EntryType::Char | EntryType::Block | EntryType::Fifo => {
                let kind = match kind {
                    EntryType::Char => FileType::CharacterDevice,
                    EntryType::Block => FileType::BlockDevice,
                    _ => FileType::Fifo,
                };
                let number = fs::makedev(device.0, device.1);
                fs::mknodat(&parent, name, kind, Mode::from_raw_mode(0o600), number).during("create", path)?;
            }
            kind if kind.is_file() || kind == EntryType::GNUSparse => {
                let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let made = fs::openat(&parent, name, flags, Mode::from_raw_mode(0o600)).during("create", path)?;
                io::copy(content, &mut File::from(made)).during("write", path)?;
            }
            _ => return Err(fact(path, "has a type that is not known")),
        }
        let handle = fs::openat(&parent, name, HANDLE, Mode::empty()).during("open", path)?;
        dress_as_allowed(handle.as_fd(), wanted).during("set the attributes of", path)?;
        if kind == EntryType::Char && device == (0, 0) {
            // Without this mark it would be a whiteout.
            let target = nacre_sys::xattrat::Target::File(handle.as_fd());
            nacre_sys::xattrat::set(target, b"trusted.nacre.device", b"y", 0).during("mark the device", path)?;
        }
        Ok(())
    }

    /// Gives the entries their names in the upper.
    fn finish(self, upper: &Upper) -> Result<()> {
        // A directory that its owner may not write to cannot be moved to another one: those at the top get their
        // attributes there.
        let is_at_top = |path: &Path| path.components().count() == 1;
        for (path, wanted) in self.directories.iter().rev().filter(|(path, _)| !is_at_top(path)) {
            let handle = self.tree.handle(path).during("open", path)?;
            dress_as_allowed(handle.as_fd(), wanted).during("set the attributes of", path)?;
        }
        let before = upper.log()?;
        let mut placed = Vec::new();
        let finished = self.place(upper, &before, &mut placed).and_then(|()| {
            for (path, wanted) in self.directories.iter().filter(|(path, _)| is_at_top(path)) {
                let handle = upper.tree.handle(path).during("open", path)?;
                dress_as_allowed(handle.as_fd(), wanted).during("set the attributes of", path)?;
            }
            Ok(())
        });
        let Err(error) = finished else { return Ok(()) };
        let top = upper.tree.directory(Path::new("")).during("open", &upper.tree.shown)?;
        for name in placed {
            beneath::remove_tree(top.as_fd(), &name).during("remove", Path::new(&name))?;
        }
        write_log(upper, before.iter())?;
        Err(error)
    }

    /// Gives the entries at the top their names in the upper, and notes which.
    fn place(&self, upper: &Upper, before: &[HiddenEntry], placed: &mut Vec<OsString>) -> Result<()> {
        let mut lines: BTreeMap<PathBuf, HiddenEntry> = BTreeMap::new();
        for (path, is_deep) in &self.hidden {
            self.note(path, *is_deep, &mut lines)?;
        }
        write_log(upper, before.iter().chain(lines.values()))?;
        let top = upper.tree.directory(Path::new("")).during("open", &upper.tree.shown)?;
        let from = fs::openat(&top, BUILDING, DIRECTORY, Mode::empty()).during("open", &self.tree.shown)?;
        for listed in self.tree.list(Path::new("")).during("read", &self.tree.shown)? {
            let shown = Path::new(&listed.name);
            match fs::renameat_with(&from, &listed.name, &top, &listed.name, RenameFlags::NOREPLACE) {
                Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                    fs::renameat(&from, &listed.name, &top, &listed.name).during("create", shown)?;
                }
                renamed => renamed.during("create", shown)?,
            }
            placed.push(listed.name);
        }
        Ok(())
    }

    /// Notes the entries of the base that are hidden.
    fn note(&self, path: &Path, is_deep: bool, lines: &mut BTreeMap<PathBuf, HiddenEntry>) -> Result<()> {
        let mut waiting = vec![path.to_path_buf()];
        while let Some(path) = waiting.pop() {
            let Some(meta) = self.base.meta(&path)? else { continue };
            if !path.as_os_str().is_empty() {
                lines.insert(path.clone(), line_of(&path, &meta));
            }
            if is_deep && meta.is_directory() {
                waiting.extend(self.base.list(&path)?.into_iter().map(|listed| path.join(&listed.name)));
            }
        }
        Ok(())
    }
}

fn write_log<'a>(upper: &Upper, lines: impl Iterator<Item = &'a HiddenEntry>) -> Result<()> {
    let log: String = lines.map(HiddenEntry::line).collect();
    crate::clean::write(&upper.state, &log).during("write", &upper.state.path_of(Path::new(LOG)))
}

/// A line of the log for an entry of the base.
pub(crate) fn line_of(path: &Path, meta: &Meta) -> HiddenEntry {
    HiddenEntry {
        branch: 1,
        path: path.as_os_str().as_bytes().to_vec(),
        kind: meta.letter(),
        mode: meta.permissions(),
        uid: meta.uid,
        gid: meta.gid,
        device: meta.special,
        size: meta.size,
        mtime: meta.mtime,
        ctime: meta.ctime,
        ino: meta.ino,
        btime: meta.btime,
        copy: None,
    }
}

/// Sets attributes; an ordinary user stays the owner of everything.
fn dress_as_allowed(file: std::os::fd::BorrowedFd<'_>, wanted: &Dress) -> io::Result<()> {
    if rustix::process::geteuid().is_root() {
        return dress::dress(file, wanted);
    }
    let now = Meta::of_file(file)?;
    let mode = if (now.uid, now.gid) == (wanted.uid, wanted.gid) { wanted.mode } else { wanted.mode & !0o6000 };
    let mut xattrs = wanted.xattrs.clone();
    xattrs.retain(|name, _| !name.starts_with(b"trusted.") && !name.starts_with(b"security."));
    dress::dress(file, &Dress { uid: now.uid, gid: now.gid, mode, xattrs, ..wanted.clone() })
}

/// The attributes of an entry of an archive, and its device number.
fn attributes<R: Read>(entry: &mut tar::Entry<'_, R>, path: &Path) -> Result<(Dress, (u32, u32))> {
    let (mut xattrs, mut mtime) = (Xattrs::new(), None);
    if let Some(records) = entry.pax_extensions().map_err(malformed)? {
        for record in records {
            let record = record.map_err(malformed)?;
            let (key, value) = (record.key_bytes(), record.value_bytes());
            if let Some(name) = key.strip_prefix(XATTR.as_bytes()) {
                if !is_private(name) {
                    xattrs.insert(name.to_vec(), value.to_vec());
                }
            } else if key == b"mtime" {
                mtime = parsed_time(value);
            }
        }
    }
    let header = entry.header();
    let number = |number: io::Result<u64>| {
        u32::try_from(number.map_err(malformed)?).map_err(|_| fact(path, "has an owner out of range"))
    };
    let (uid, gid) = (number(header.uid())?, number(header.gid())?);
    let seconds = i64::try_from(header.mtime().map_err(malformed)?).unwrap_or(0);
    let mtime = mtime.unwrap_or((seconds, 0));
    let device = match header.entry_type() {
        EntryType::Char | EntryType::Block => {
            let major = header.device_major().map_err(malformed)?.unwrap_or_default();
            (major, header.device_minor().map_err(malformed)?.unwrap_or_default())
        }
        _ => (0, 0),
    };
    let mode = header.mode().map_err(malformed)? & 0o7777;
    Ok((Dress { mode, uid, gid, atime: mtime, mtime, xattrs }, device))
}

/// A time of a PAX record.
fn parsed_time(value: &[u8]) -> Option<Time> {
    let text = std::str::from_utf8(value).ok()?;
    let (whole, part) = text.split_once('.').unwrap_or((text, ""));
    let nanos: u32 = format!("{part:0<9}").get(..9)?.parse().ok()?;
    let seconds: i64 = whole.parse().ok()?;
    if text.starts_with('-') && nanos > 0 {
        return Some((seconds - 1, 1_000_000_000 - nanos));
    }
    Some((seconds, nanos))
}
