//! The upper directory of a workspace: its entries, marks, hard-link index, and the log of hidden entries of the base.

use crate::{
    Result,
    beneath::Tree,
    meta::Meta,
    trouble::{During, is_missing},
};
use nacre_union::base_log::{self, HiddenEntry};
use rustix::{fs::FileType, io::Errno};
use std::{
    collections::{BTreeMap, HashMap},
    ffi::{OsStr, OsString},
    io,
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Path, PathBuf},
};

/// Prefix of marks; users have no names like this.
pub(crate) const MARK: &[u8] = b".wh.";
/// The mark of an opaque directory.
pub(crate) const OPAQUE: &[u8] = b".wh..wh..opq";
/// Prefix of the marks of long names: a symbolic link to the name.
const LONG: &[u8] = b".wh..wh.h.";
/// Directory of the hard-link index, relative to the state directory.
pub(crate) const LINKS: &str = "work/links";
/// Name of the log of hidden entries in the state directory.
pub(crate) const LOG: &str = "base.log";
/// Length of the attribute with the origin of a copy, and the version of its format (`identity.rs` of the union).
const ORIGIN_LENGTH: usize = 48;
const ORIGIN_VERSION: u64 = 2;

/// The changes of a workspace: its upper directory, hard-link index and identity log, open.
#[derive(Clone, Debug)]
pub struct Upper {
    /// The state directory.
    pub(crate) state: Tree,
    /// The upper directory.
    pub(crate) tree: Tree,
}

/// The entry of a base that a file of the upper is the copy of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    pub(crate) ino: u64,
    /// Birth of the original; 0 where it is unknown.
    pub(crate) generation: u64,
}

impl Origin {
    /// Whether the origin is a file with this inode number and birth.
    pub(crate) fn is(&self, ino: u64, generation: u64) -> bool {
        self.ino == ino && (self.generation == generation || self.generation == 0 || generation == 0)
    }
}

/// An entry of the upper directory.
#[derive(Clone, Debug)]
pub(crate) struct UpperEntry {
    pub(crate) meta: Meta,
    /// Of a directory: nothing of the base is merged with it.
    pub(crate) opaque: bool,
    pub(crate) origin: Option<Origin>,
}

/// The upper directory as it was read.
#[derive(Debug, Default)]
pub(crate) struct Scan {
    /// All entries by their paths; the top has an empty path.
    pub(crate) entries: BTreeMap<PathBuf, UpperEntry>,
    /// The paths that whiteouts hide, and the paths of the whiteouts.
    pub(crate) whiteouts: BTreeMap<PathBuf, PathBuf>,
    /// The copies in the hard-link index by their inode numbers.
    pub(crate) linked: HashMap<u64, LinkedCopy>,
    /// The last line of each path in the log.
    pub(crate) hidden: HashMap<PathBuf, HiddenEntry>,
}

/// A copy in the hard-link index.
#[derive(Clone, Debug)]
pub(crate) struct LinkedCopy {
    /// Its name in the index.
    pub(crate) name: OsString,
    pub(crate) origin: Origin,
    pub(crate) meta: Meta,
}

impl Upper {
    /// Opens the upper directory, hard-link index and identity log in the state directory of a workspace, or of one of
    /// its snapshots.
    ///
    /// # Errors
    /// One is missing or cannot be read.
    pub fn open(state: &Path) -> Result<Upper> {
        let path = state.join("upper");
        Ok(Upper {
            state: Tree::open(state).during("open", state)?.making_readable(),
            tree: Tree::open(&path).during("open", &path)?.making_readable(),
        })
    }

    /// The lines of the log, in their order.
    pub(crate) fn log(&self) -> Result<Vec<HiddenEntry>> {
        let path = Path::new(LOG);
        let log = self.state.file(path).and_then(|file| {
            use std::os::fd::AsFd;
            Ok(crate::content::read_all(file.as_fd())?)
        });
        match log {
            Ok(log) => Ok(base_log::parse(&log)),
            // Nothing has been hidden yet.
            Err(error) if is_missing(&error) => Ok(Vec::new()),
            Err(error) => Err(error).during("read", &self.state.path_of(path)),
        }
    }

    /// Reads the upper directory, the hard-link index and the log.
    pub(crate) fn scan(&self) -> Result<Scan> {
        let mut scan = Scan::default();
        for line in self.log()? {
            scan.hidden.insert(PathBuf::from(OsString::from_vec(line.path.clone())), line);
        }
        self.scan_links(&mut scan)?;
        let top = Meta::of_file(self.tree.top()).during("read", &self.tree.shown)?;
        scan.entries.insert(PathBuf::new(), UpperEntry { meta: top, opaque: false, origin: None });
        let mut waiting = vec![PathBuf::new()];
        while let Some(directory) = waiting.pop() {
            self.scan_directory(&directory, &mut scan, &mut waiting)?;
        }
        // A whiteout beside a directory keeps the base's directory of that name out of it.
        let beside: Vec<PathBuf> = scan.whiteouts.keys().cloned().collect();
        for path in beside {
            if let Some(entry) = scan.entries.get_mut(&path) {
                entry.opaque |= entry.meta.is_directory();
            }
        }
        Ok(scan)
    }

    fn scan_directory(&self, directory: &Path, scan: &mut Scan, waiting: &mut Vec<PathBuf>) -> Result<()> {
        let shown = self.tree.path_of(directory);
        let listed = self.tree.list(directory).during("read", &shown)?;
        let opaque = self.opaque_attribute(directory)?;
        let holds_empty_whiteouts = opaque == Some(b'x');
        if opaque == Some(b'y')
            && let Some(entry) = scan.entries.get_mut(directory)
        {
            entry.opaque = true;
        }
        for listed in listed {
            let (name, path) = (listed.name.as_bytes(), directory.join(&listed.name));
            if let Some(hidden) = name.strip_prefix(MARK) {
                if name == OPAQUE {
                    if let Some(entry) = scan.entries.get_mut(directory) {
                        entry.opaque = true;
                    }
                } else if name.starts_with(LONG) {
                    let target = self.tree.link_target(&path).during("read the link", &self.tree.path_of(&path))?;
                    scan.whiteouts.insert(directory.join(OsString::from_vec(target)), path);
                } else if !hidden.starts_with(MARK) && !hidden.is_empty() {
                    scan.whiteouts.insert(directory.join(OsStr::from_bytes(hidden)), path);
                }
                continue;
            }
            let shown = self.tree.path_of(&path);
            let Some(meta) = self.tree.meta(&path).during("read", &shown)? else { continue };
            if self.is_whiteout(&path, &meta, holds_empty_whiteouts)? {
                scan.whiteouts.insert(path.clone(), path);
                continue;
            }
            let origin = self.origin(&path, &meta)?;
            let origin = origin.or_else(|| scan.linked.get(&meta.ino).map(|copy| copy.origin));
            if meta.is_directory() {
                waiting.push(path.clone());
            }
            scan.entries.insert(path, UpperEntry { meta, opaque: false, origin });
        }
        Ok(())
    }

    fn opaque_attribute(&self, directory: &Path) -> Result<Option<u8>> {
        for name in [&b"trusted.overlay.opaque"[..], b"user.overlay.opaque"] {
            let value =
                self.tree.xattr(directory, name).or_else(denied).during("read", &self.tree.path_of(directory))?;
            if let Some([letter]) = value.as_deref() {
                return Ok(Some(*letter));
            }
        }
        Ok(None)
    }

    /// Whether an entry of the very name is a whiteout, as the kernel's overlay file system has them.
    fn is_whiteout(&self, path: &Path, meta: &Meta, holds_empty_whiteouts: bool) -> Result<bool> {
        let has = |name: &[u8]| {
            let value = self.tree.xattr(path, name).or_else(denied).during("read", &self.tree.path_of(path));
            value.map(|value| value.is_some())
        };
        match meta.kind() {
            FileType::CharacterDevice if meta.special == (0, 0) => Ok(!has(b"trusted.nacre.device")?),
            FileType::RegularFile if holds_empty_whiteouts && meta.size == 0 => {
                Ok(has(b"trusted.overlay.whiteout")? || has(b"user.overlay.whiteout")?)
            }
            _ => Ok(false),
        }
    }

    /// The origin that a copy records.
    fn origin(&self, path: &Path, meta: &Meta) -> Result<Option<Origin>> {
        for name in [&b"trusted.nacre.origin"[..], b"user.nacre.origin"] {
            if name.starts_with(b"user.") && !meta.is_file() && !meta.is_directory() {
                continue;
            }
            let value = self.tree.xattr(path, name).or_else(denied).during("read", &self.tree.path_of(path))?;
            let Some(value) = value.filter(|value| value.len() == ORIGIN_LENGTH) else { continue };
            let mut numbers = value.as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes));
            let mut next = || numbers.next().unwrap_or_default();
            let (version, _branch, ino, generation) = (next(), next(), next(), next());
            // The copy's own number, which follows, is another one in a snapshot of the upper; no user can set this
            // attribute, so it is the union's in any case.
            if version == ORIGIN_VERSION {
                return Ok(Some(Origin { ino, generation }));
            }
        }
        Ok(None)
    }

    /// Reads the hard-link index: names `LABEL-INO-BIRTH` in hexadecimal.
    fn scan_links(&self, scan: &mut Scan) -> Result<()> {
        let index = Path::new(LINKS);
        let listed = match self.state.list(index) {
            Ok(listed) => listed,
            Err(error) if is_missing(&error) => return Ok(()),
            Err(error) => return Err(error).during("read", &self.state.path_of(index)),
        };
        for listed in listed {
            let numbers: Vec<u64> = match listed.name.to_str() {
                Some(name) => name.split('-').filter_map(|part| u64::from_str_radix(part, 16).ok()).collect(),
                None => continue,
            };
            // Names with an ending count names, or are moves between branches.
            let [_, ino, generation] = numbers[..] else { continue };
            let path = index.join(&listed.name);
            let Some(meta) = self.state.meta(&path).during("read", &self.state.path_of(&path))? else { continue };
            let copy = LinkedCopy { name: listed.name, origin: Origin { ino, generation }, meta };
            scan.linked.insert(meta.ino, copy);
        }
        Ok(())
    }
}

/// An attribute that the caller may not read is none: `trusted.*` of ordinary users.
fn denied(error: io::Error) -> io::Result<Option<Vec<u8>>> {
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::PERM | Errno::ACCESS) => Ok(None),
        _ => Err(error),
    }
}
