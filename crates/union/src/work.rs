//! The directories of a branch that belong to the union itself: where things are built before they
//! get their names, and the hard-link index.
//!
//! Both lie at the top of each writable branch under reserved names, mode 0700, or in a directory
//! of their own beside the branch (overlayfs' `workdir`), so that nothing but the files of users is
//! on the branch. What a crash leaves in the work directory is of no use to anybody: it is emptied
//! when the branch is opened.

use crate::{OWN, listing};
use nacre_vfs::{Errno, Layer, Name, Node, Result};
use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{SystemTime, UNIX_EPOCH},
};

const WORK: &[u8] = b".wh..wh.work";
pub(crate) const LINKS: &[u8] = b".wh..wh.links";
/// Their names in a directory of their own; the kernel's overlay file system calls the first one
/// that, too.
const WORK_APART: &[u8] = b"work";
const LINKS_APART: &[u8] = b"links";
/// What begins temporary names outside the work directory.
const HIDDEN: &str = ".wh..wh.tmp.";
const MODE: u32 = 0o700;

/// Where the directories of a branch are.
#[derive(Clone, Copy)]
pub(crate) enum WorkHome<'a> {
    /// In the branch's top directory.
    Top(&'a Node),
    /// In a directory of their own on the same layer.
    Apart(&'a Node),
}

impl<'a> WorkHome<'a> {
    fn directory(self) -> &'a Node {
        match self {
            WorkHome::Top(directory) | WorkHome::Apart(directory) => directory,
        }
    }

    fn name(self, top: &'static [u8], apart: &'static [u8]) -> &'static [u8] {
        match self {
            WorkHome::Top(_) => top,
            WorkHome::Apart(_) => apart,
        }
    }
}

/// A name that nobody else uses.
pub(crate) struct Temporary(Vec<u8>);

impl Temporary {
    /// As a name.
    ///
    /// # Errors
    /// Never: it is made of letters.
    pub(crate) fn name(&self) -> Result<Name<'_>> {
        Name::new(&self.0)
    }
}

/// Whether a name is a temporary one of an earlier run: each, where there is no present one.
pub(crate) fn is_left_over(present: Option<&Work>, name: &[u8]) -> bool {
    let number = name.strip_prefix(HIDDEN.as_bytes()).and_then(|digits| std::str::from_utf8(digits).ok());
    let number = number.and_then(|digits| u64::from_str_radix(digits, 16).ok());
    number.is_some_and(|number| present.is_none_or(|work| number < work.start))
}

/// The directories of one branch.
pub(crate) struct Work {
    pub(crate) directory: Node,
    /// Numbers below this were given by earlier runs.
    start: u64,
    next: AtomicU64,
}

impl Work {
    /// Finds or makes the directories and empties the first.
    ///
    /// # Errors
    /// EROFS where the branch cannot be written, EEXIST where another file has the name, and what
    /// the storage says.
    #[expect(clippy::disallowed_methods, reason = "names that no earlier run has given")]
    pub(crate) fn open(layer: &dyn Layer, home: WorkHome<'_>) -> Result<Work> {
        let directory = make(layer, home.directory(), home.name(WORK, WORK_APART))?;
        listing::purge(layer, &directory)?;
        // Temporary names are also given outside the work directory, where those of an earlier run
        // may still be.
        let start = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let start = u64::try_from(start).unwrap_or_default();
        Ok(Work { directory, start, next: AtomicU64::new(start) })
    }

    /// The hard-link index of a branch, made where it is missing and `writable`.
    ///
    /// # Errors
    /// As [`Work::open`].
    pub(crate) fn hardlink_index(layer: &dyn Layer, home: WorkHome<'_>, writable: bool) -> Result<Option<Node>> {
        let name = home.name(LINKS, LINKS_APART);
        if writable {
            return make(layer, home.directory(), name).map(Some);
        }
        match layer.lookup(&OWN, home.directory(), Name::new(name)?) {
            Ok(found) => Ok((found.attr.kind == nacre_vfs::Kind::Directory).then_some(found.node)),
            Err(Errno::ENOENT) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// A free name in the work directory.
    pub(crate) fn temporary(&self) -> Temporary {
        Temporary(format!("{:x}", self.next.fetch_add(1, Ordering::Relaxed)).into_bytes())
    }

    /// A name in any directory of the branch that is not shown to users.
    pub(crate) fn hidden_temporary(&self) -> Temporary {
        Temporary(format!("{HIDDEN}{:x}", self.next.fetch_add(1, Ordering::Relaxed)).into_bytes())
    }
}

fn make(layer: &dyn Layer, root: &Node, name: &[u8]) -> Result<Node> {
    let name = Name::new(name)?;
    let found = match layer.lookup(&OWN, root, name) {
        Err(Errno::ENOENT) => match layer.mkdir(&OWN, root, name, MODE) {
            Err(Errno::EEXIST) => layer.lookup(&OWN, root, name)?,
            other => other?,
        },
        other => other?,
    };
    if found.attr.kind == nacre_vfs::Kind::Directory { Ok(found.node) } else { Err(Errno::EEXIST) }
}
