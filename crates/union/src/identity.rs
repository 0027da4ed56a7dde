//! Inode numbers of the union's files: `st_ino` for users, [`FileId`] for FUSE front ends. Stable over copy-up,
//! rename and remount.
//!
//! A file's number is that of its origin: (index of the branch's file system, inode number), 8 and 56 bits. A
//! copy stores the number of its origin in an extended attribute that also names the copy itself, so that the
//! attribute is ignored when a program copies it to another file. Inode numbers that need more bits are mapped
//! to numbers that are valid for this mount only.
//!
//! Indexes are assigned anew by each mount, so stored numbers have a label of the branch instead
//! ([`Identities::written`]): a digest of its root directory's inode number and birth time, which does not
//! depend on the branch's position. Branches that this does not distinguish (snapshots, file systems without
//! birth times) get a label that only this mount knows.

use crate::{OWN, branches::Branch, marks::Namespace, splitmix::mix};
use hashbrown::HashMap;
use nacre_vfs::{Errno, FileId, LeftNumbers, Node, Result, XattrFlags};
use parking_lot::{Mutex, RwLock};
use std::{
    sync::{Arc, OnceLock},
    time::{SystemTime, UNIX_EPOCH},
};

const BITS: u32 = 56;
/// The index for numbers that are valid for this mount only.
const OVERFLOW: u64 = 0xff;
/// Set in numbers of this mount that belong to no inode of a branch ([`of_its_own`]).
const OWN_NUMBER: u64 = 1 << (BITS - 1);
/// The file system id of all numbers: the union shows one file system.
const FS: u64 = 0;
/// The stored attribute: `version label-of-branch origin-number origin-generation own-number own-generation`,
/// little-endian numbers of 64 bits.
const LENGTH: usize = 6 * 8;
const VERSION: u64 = 2;

/// The numbers assigned so far.
pub(crate) struct Identities {
    file_systems: RwLock<Vec<FileSystem>>,
    /// Numbers assigned for large inode numbers, by file system and inode number.
    large: Mutex<HashMap<(u64, u64), u64>>,
    /// A number that no other mount uses.
    nonce: u64,
    /// The number of the root directory, once it is known.
    root: OnceLock<FileId>,
    /// Storage for the numbers that the next process has to reuse.
    left: Option<Arc<dyn LeftNumbers>>,
}

/// A file system that has branches.
struct FileSystem {
    fs: u64,
    /// The labels of the branches on it; the first one is written.
    marks: Vec<u64>,
}

/// A stored number: label of the branch, inode number there, generation.
pub(crate) type Written = (u64, u64, u64);

impl Identities {
    /// Creates the table; continues with the stored numbers of the previous process if there are any.
    pub(crate) fn new(left: Option<Arc<dyn LeftNumbers>>) -> Identities {
        let noted = left.as_ref().map(|left| left.read()).unwrap_or_default();
        match parsed(&noted) {
            Some((nonce, root, file_systems)) => Identities {
                file_systems: RwLock::new(file_systems),
                large: Mutex::default(),
                nonce,
                root: OnceLock::from(root),
                left,
            },
            None => Identities { left, ..Identities::default() },
        }
    }

    /// The number of the root directory, which never changes during a mount.
    pub(crate) fn root(&self, id: FileId) -> FileId {
        let root = *self.root.get_or_init(|| id);
        self.note(&self.file_systems.read());
        root
    }

    /// Stores the known file systems for the next process; their lock is held.
    fn note(&self, all: &[FileSystem]) {
        let Some((left, root)) = self.left.as_ref().zip(self.root.get()) else { return };
        let of_one = |one: &FileSystem| [&[one.fs, one.marks.len() as u64], &one.marks[..]].concat();
        let numbers: Vec<u64> =
            [self.nonce, root.ino, root.generation].into_iter().chain(all.iter().flat_map(of_one)).collect();
        left.note(&numbers);
    }
}

/// Parses the nonce, root directory and file systems that [`Identities::note`] writes.
fn parsed(numbers: &[u64]) -> Option<(u64, FileId, Vec<FileSystem>)> {
    let [nonce, ino, generation, rest @ ..] = numbers else { return None };
    let (mut file_systems, mut rest) = (Vec::new(), rest);
    while let [fs, count, behind @ ..] = rest {
        let (marks, behind) = behind.split_at_checked(usize::try_from(*count).ok()?)?;
        file_systems.push(FileSystem { fs: *fs, marks: marks.to_vec() });
        rest = behind;
    }
    let root = FileId { fs: FS, ino: *ino, generation: *generation };
    rest.is_empty().then_some((*nonce, root, file_systems))
}

impl Default for Identities {
    #[expect(clippy::disallowed_methods, reason = "marks that no other mount has; nothing has to be guessed")]
    fn default() -> Identities {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let nonce =
            mix(u64::try_from(now & u128::from(u64::MAX)).unwrap_or_default() ^ u64::from(std::process::id()) << 32);
        Identities {
            file_systems: RwLock::default(),
            large: Mutex::default(),
            nonce,
            root: OnceLock::new(),
            left: None,
        }
    }
}

/// The label of a branch with this root directory.
fn mark(root: FileId) -> u64 {
    let born = if root.generation == 0 { root.fs } else { root.generation };
    mix(mix(root.ino).wrapping_add(mix(born)))
}

impl Identities {
    /// The number of a file without another origin.
    pub(crate) fn of(&self, id: FileId) -> FileId {
        self.of_on(self.file_system(id.fs), id)
    }

    /// The index of a file system, which is fixed while it is part of the union.
    pub(crate) fn file_system(&self, fs: u64) -> u64 {
        self.index(fs, None)
    }

    /// As [`Identities::of`], for callers that know the index of the file system.
    pub(crate) fn of_on(&self, index: u64, id: FileId) -> FileId {
        let ino = if index < OVERFLOW && id.ino >> BITS == 0 { index << BITS | id.ino } else { self.large(id) };
        FileId { fs: FS, ino, generation: id.generation }
    }

    /// Registers a branch with this root directory.
    pub(crate) fn register(&self, root: FileId) {
        self.index(root.fs, Some(mark(root)));
    }

    fn index(&self, fs: u64, mark: Option<u64>) -> u64 {
        let place = |known: &[FileSystem]| known.iter().position(|one| one.fs == fs);
        if mark.is_none()
            && let Some(known) = place(&self.file_systems.read())
        {
            return u64::try_from(known).unwrap_or(OVERFLOW);
        }
        let mut all = self.file_systems.write();
        let before = (all.len(), all.iter().map(|one| one.marks.len()).sum::<usize>());
        let index = place(&all).unwrap_or_else(|| {
            all.push(FileSystem { fs, marks: Vec::new() });
            all.len() - 1
        });
        if let Some(mark) = mark {
            let is_double = (0..).zip(all.iter()).any(|(other, one)| other != index && one.marks.contains(&mark));
            if is_double {
                // The label is ambiguous: neither branch may be taken for the other.
                all.iter_mut().for_each(|one| one.marks.retain(|known| *known != mark));
            } else if let Some(one) = all.get_mut(index).filter(|one| !one.marks.contains(&mark)) {
                one.marks.push(mark);
            }
        }
        if before != (all.len(), all.iter().map(|one| one.marks.len()).sum::<usize>()) {
            self.note(&all);
        }
        u64::try_from(index).unwrap_or(OVERFLOW)
    }

    fn large(&self, id: FileId) -> u64 {
        let mut large = self.large.lock();
        let next = large.len() as u64;
        if next == 0 {
            self.left.iter().for_each(|left| left.give_up("its files have inode numbers of more than 56 bits"));
        }
        OVERFLOW << BITS | *large.entry((id.fs, id.ino)).or_insert(next)
    }

    /// The label of an index that only this mount understands.
    fn passing(&self, index: u64) -> u64 {
        mix(self.nonce.wrapping_add(index))
    }

    /// Converts a number to its stored form.
    pub(crate) fn written(&self, id: FileId) -> Written {
        let index = id.ino >> BITS;
        let known = usize::try_from(index)
            .ok()
            .and_then(|index| self.file_systems.read().get(index).and_then(|one| one.marks.first().copied()));
        (known.unwrap_or_else(|| self.passing(index)), id.ino & ((1 << BITS) - 1), id.generation)
    }

    /// Converts a stored number; `None` if no present branch has its label.
    pub(crate) fn read(&self, (mark, ino, generation): Written) -> Option<FileId> {
        let known = self
            .file_systems
            .read()
            .iter()
            .position(|one| one.marks.contains(&mark))
            .and_then(|index| u64::try_from(index).ok());
        let passing = || (0..=OVERFLOW).find(|index| self.passing(*index) == mark);
        let index = known.or_else(passing)?;
        Some(FileId { fs: FS, ino: index << BITS | ino & ((1 << BITS) - 1), generation })
    }
}

/// Returns a number of this mount that belongs to no inode of a branch; `count` makes it unique.
pub(crate) fn of_its_own(count: u64) -> FileId {
    FileId { fs: FS, ino: OVERFLOW << BITS | OWN_NUMBER | count, generation: 0 }
}

fn attribute(branch: &Branch) -> &'static [u8] {
    match branch.marks().namespace {
        Namespace::Trusted => b"trusted.nacre.origin",
        Namespace::User => b"user.nacre.origin",
    }
}

/// The origin stored in a copy; `None` if there is none, if no present branch has it, or if the attribute was
/// written for another file.
///
/// # Errors
/// Errors of the storage, except a missing or unsupported attribute.
pub(crate) fn origin(identities: &Identities, branch: &Branch, node: &Node, id: FileId) -> Result<Option<FileId>> {
    let mut value = [0; LENGTH];
    match branch.layer.getxattr(&OWN, node, attribute(branch), &mut value) {
        Ok(LENGTH) => {}
        Ok(_) | Err(Errno::ERANGE | Errno::ENODATA | Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::EPERM) => {
            return Ok(None);
        }
        Err(error) => return Err(error),
    }
    let mut numbers = value.chunks_exact(8).filter_map(|bytes| bytes.try_into().ok().map(u64::from_le_bytes));
    let mut next = || numbers.next().unwrap_or_default();
    let (version, mark, ino, generation, own_ino, own_generation) = (next(), next(), next(), next(), next(), next());
    let is_its_own = version == VERSION && (own_ino, own_generation) == (id.ino, id.generation);
    Ok(if is_its_own { identities.read((mark, ino, generation)) } else { None })
}

/// Stores the origin of a copy. If the storage cannot keep it, the copy's number changes with the next mount:
/// that is no reason to refuse a write.
///
/// # Errors
/// ENOSPC, EIO and similar errors.
pub(crate) fn set_origin(
    identities: &Identities,
    branch: &Branch,
    node: &Node,
    id: FileId,
    origin: FileId,
) -> Result<()> {
    let (mark, ino, generation) = identities.written(origin);
    let value: Vec<u8> = [VERSION, mark, ino, generation, id.ino, id.generation]
        .iter()
        .flat_map(|number| number.to_le_bytes())
        .collect();
    match branch.layer.setxattr(&OWN, node, attribute(branch), &value, XattrFlags::default()) {
        Err(Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::EPERM) => Ok(()),
        other => other,
    }
}

/// Marks a directory as having copies, whose numbers differ from those in its listing. If the mark cannot be
/// stored, copies in it have their own numbers after the next mount.
///
/// # Errors
/// ENOSPC, EIO and similar errors.
pub(crate) fn mark_impure(branch: &Branch, directory: &Node) -> Result<()> {
    match branch.layer.setxattr(&OWN, directory, branch.marks().namespace.impure(), b"y", XattrFlags::default()) {
        Err(Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::EPERM) => Ok(()),
        other => other,
    }
}

/// A file for tests.
#[cfg(test)]
pub(crate) fn file_of_test(ino: u64) -> FileId {
    FileId { fs: 1, ino, generation: 1 }
}
