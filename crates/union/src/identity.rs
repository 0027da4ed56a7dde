//! Which number a file has: `st_ino` for users, [`FileId`] for doors. Stable over copy-up, rename and remount.
//!
//! A file's number is that of its origin: (index of the branch's file system, inode number), 8 and 56 bits. A copy carries the number
//! of its origin in an extended attribute that also names the copy itself, so that a mere copy of the attribute means nothing. Inode numbers
//! that need more bits get a number of this mount.

use crate::{branches::Branch, marks::Namespace, union::OWN};
use hashbrown::HashMap;
use nacre_vfs::{Errno, FileId, Node, Result, XattrFlags};
use parking_lot::{Mutex, RwLock};

const BITS: u32 = 56;
/// The index for numbers of this mount.
const OVERFLOW: u64 = 0xff;
/// The union shows one file system.
const FS: u64 = 0;
/// `version origin-number origin-generation own-number own-generation`, little-endian numbers of 64 bits.
const LENGTH: usize = 5 * 8;
const VERSION: u64 = 1;

/// The numbers given so far.
#[derive(Default)]
pub(crate) struct Identities {
    file_systems: RwLock<Vec<u64>>,
    /// By file system and inode number.
    large: Mutex<HashMap<(u64, u64), u64>>,
}

impl Identities {
    /// The number of a file that has no other origin.
    pub(crate) fn of(&self, id: FileId) -> FileId {
        let index = self.index(id.fs);
        let ino = if index < OVERFLOW && id.ino >> BITS == 0 { index << BITS | id.ino } else { self.large(id) };
        FileId { fs: FS, ino, generation: id.generation }
    }

    fn index(&self, fs: u64) -> u64 {
        let place = |known: &[u64]| known.iter().position(|&one| one == fs);
        let known = place(&self.file_systems.read());
        let index = known.unwrap_or_else(|| {
            let mut all = self.file_systems.write();
            place(&all).unwrap_or_else(|| {
                all.push(fs);
                all.len() - 1
            })
        });
        u64::try_from(index).unwrap_or(OVERFLOW)
    }

    fn large(&self, id: FileId) -> u64 {
        let mut large = self.large.lock();
        let next = large.len() as u64;
        OVERFLOW << BITS | *large.entry((id.fs, id.ino)).or_insert(next)
    }
}

fn attribute(branch: &Branch) -> &'static [u8] {
    match branch.marks.namespace {
        Namespace::Trusted => b"trusted.nacre.origin",
        Namespace::User => b"user.nacre.origin",
    }
}

/// The origin that a copy names; `None` where it names none, or where the attribute was written for another file.
///
/// # Errors
/// What the storage says, but that it knows no such attribute.
pub(crate) fn origin(branch: &Branch, node: &Node, id: FileId) -> Result<Option<FileId>> {
    let mut value = [0; LENGTH];
    match branch.layer.getxattr(&OWN, node, attribute(branch), &mut value) {
        Ok(LENGTH) => {}
        Ok(_) | Err(Errno::ERANGE | Errno::ENODATA | Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::EPERM) => return Ok(None),
        Err(error) => return Err(error),
    }
    let mut numbers = value.chunks_exact(8).filter_map(|bytes| bytes.try_into().ok().map(u64::from_le_bytes));
    let mut next = || numbers.next().unwrap_or_default();
    let (version, ino, generation, own_ino, own_generation) = (next(), next(), next(), next(), next());
    let is_its_own = version == VERSION && (own_ino, own_generation) == (id.ino, id.generation);
    Ok(is_its_own.then_some(FileId { fs: FS, ino, generation }))
}

/// Writes the origin of a copy. Where the storage cannot keep it, the number changes with the next mount: that is no reason to refuse a write.
///
/// # Errors
/// ENOSPC, EIO and their like.
pub(crate) fn set_origin(branch: &Branch, node: &Node, id: FileId, origin: FileId) -> Result<()> {
    let value: Vec<u8> =
        [VERSION, origin.ino, origin.generation, id.ino, id.generation].iter().flat_map(|number| number.to_le_bytes()).collect();
    match branch.layer.setxattr(&OWN, node, attribute(branch), &value, XattrFlags::default()) {
        Err(Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::EPERM) => Ok(()),
        other => other,
    }
}

/// Notes that a directory holds copies, whose numbers are not those that its listing tells. Where that cannot be noted, copies in it have
/// their own numbers after the next mount.
///
/// # Errors
/// ENOSPC, EIO and their like.
pub(crate) fn mark_impure(branch: &Branch, directory: &Node) -> Result<()> {
    match branch.layer.setxattr(&OWN, directory, branch.marks.namespace.impure(), b"y", XattrFlags::default()) {
        Err(Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::EPERM) => Ok(()),
        other => other,
    }
}
