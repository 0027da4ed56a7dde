//! The cost of a file, as a pure function of its attributes.
//!
//! Called wherever a cage books something, and by the recount. The rule: a file costs the bytes
//! that the host has allocated for it. A regular file never costs more than its length in whole
//! blocks, since some file systems preallocate and give that back by themselves; unless the file is
//! known to keep blocks beyond its end (`FALLOC_FL_KEEP_SIZE`). Hard links are one file. Holes are
//! free until something is written into them.

use nacre_vfs::{Attr, Kind};
use std::ops::Range;

/// Allocation behaviour of the storage below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// A file's block count includes all written data at once, and nothing is preallocated unasked
    /// (ext4, Btrfs, tmpfs, the tree in memory).
    Plain,
    /// Like `Plain`, but blocks beyond the end of a file may be preallocated (XFS).
    Ahead,
    /// Block counts may lag behind the written data (network file systems, ZFS, FUSE, unknown
    /// ones): regular files cost their length, holes included.
    Lagging,
}

impl Storage {
    /// Behaviour of a file system by the magic number from `statfs(2)` (linux/magic.h).
    pub fn of_magic(magic: u64) -> Storage {
        match magic {
            // ext2/3/4, Btrfs, tmpfs, ramfs, f2fs.
            0xef53 | 0x9123_683e | 0x0102_1994 | 0x8584_58f6 | 0xf2f5_2010 => Storage::Plain,
            // XFS, bcachefs.
            0x5846_5342 | 0xca45_1a4e => Storage::Ahead,
            _ => Storage::Lagging,
        }
    }
}

/// The charge rule of one cage.
#[derive(Clone, Copy, Debug)]
pub struct ChargeRule {
    /// Bytes of a block.
    pub unit: u64,
    /// How the storage allocates.
    pub storage: Storage,
}

impl ChargeRule {
    /// Creates a rule; a block size below a sector (or none) counts as 4096 bytes.
    pub fn new(unit: u64, storage: Storage) -> ChargeRule {
        ChargeRule { unit: if unit < 512 { 4096 } else { unit }, storage }
    }

    /// A length rounded up to whole blocks, bytes.
    pub fn whole(&self, length: u64) -> u64 {
        length.checked_next_multiple_of(self.unit).unwrap_or(u64::MAX - u64::MAX % self.unit)
    }

    /// The start of the block that contains a position.
    pub fn floor(&self, position: u64) -> u64 {
        position - position % self.unit
    }

    /// The blocks that a range of bytes touches, as a range of bytes.
    pub fn blocks(&self, offset: u64, length: u64) -> Range<u64> {
        if length == 0 {
            return 0..0;
        }
        self.floor(offset)..self.whole(offset.saturating_add(length))
    }

    /// Cost of a file, bytes. `kept`: it is known to keep blocks beyond its end.
    pub fn cost(&self, attr: &Attr, kept: bool) -> u64 {
        let allocated = attr.blocks.saturating_mul(512);
        match (attr.kind, self.storage) {
            (Kind::File, Storage::Lagging) => self.whole(attr.size).max(if kept { allocated } else { 0 }),
            (Kind::File, _) if kept => allocated,
            (Kind::File, _) => allocated.min(self.whole(attr.size)),
            _ => allocated,
        }
    }

    /// Whether an unknown file seems to keep blocks beyond its end, by its attributes. Where
    /// storage preallocates by itself, the attributes do not show this and the answer is no
    /// ([`ChargeRule::may_keep`]). The block count includes the file system's metadata for the
    /// file's blocks, so a little more than the length is no sign.
    pub fn seems_kept(&self, attr: &Attr) -> bool {
        let bookkeeping = 2 * self.unit + attr.size / 128;
        self.storage == Storage::Plain
            && attr.kind == Kind::File
            && attr.blocks.saturating_mul(512) > self.whole(attr.size).saturating_add(bookkeeping)
    }

    /// Whether a file may have blocks beyond its end that were asked for, which only the file
    /// system knows: otherwise they were preallocated, or hold metadata.
    pub fn may_keep(&self, attr: &Attr) -> bool {
        self.storage != Storage::Lagging
            && attr.kind == Kind::File
            && attr.blocks.saturating_mul(512) > self.whole(attr.size)
    }

    /// Cost of an unknown file, by its attributes alone. Where storage preallocates, a file with
    /// holes may seem to cost a little more than it does.
    pub fn found(&self, attr: &Attr) -> u64 {
        self.cost(attr, self.seems_kept(attr))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacre_vfs::{FileId, Protection, Time};

    fn file(size: u64, blocks: u64) -> Attr {
        let zero = Time::default();
        Attr {
            id: FileId { fs: 1, ino: 1, generation: 0 },
            kind: Kind::File,
            mode: 0,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev_major: 0,
            rdev_minor: 0,
            size,
            blocks,
            blksize: 4096,
            atime: zero,
            mtime: zero,
            ctime: zero,
            btime: None,
            protection: Protection::None,
        }
    }

    #[test]
    fn a_file_costs_what_is_allocated_but_no_more_than_its_length() {
        for (storage, size, blocks, kept, cost) in [
            (Storage::Plain, 0, 0, false, 0),
            (Storage::Plain, 1, 8, false, 4096),
            (Storage::Plain, 4097, 16, false, 8192),
            (Storage::Plain, 1 << 20, 8, false, 4096),
            (Storage::Plain, 4096, 2048, false, 4096),
            (Storage::Plain, 4096, 2048, true, 1 << 20),
            (Storage::Ahead, 5000, 128, false, 8192),
            (Storage::Lagging, 5000, 0, false, 8192),
            (Storage::Lagging, 5000, 128, true, 65536),
        ] {
            assert_eq!(
                ChargeRule::new(4096, storage).cost(&file(size, blocks), kept),
                cost,
                "{storage:?} {size} {blocks} {kept}"
            );
        }
        let directory = Attr { kind: Kind::Directory, ..file(1 << 30, 24) };
        assert_eq!(ChargeRule::new(4096, Storage::Lagging).found(&directory), 12288);
    }

    #[test]
    fn space_behind_the_end_is_told_from_bookkeeping() {
        let rule = ChargeRule::new(4096, Storage::Plain);
        assert!(!rule.seems_kept(&file(4096, 8 + 16)));
        assert!(rule.seems_kept(&file(4096, 8 + 24)));
        assert!(!rule.seems_kept(&file(1 << 30, (1 << 21) + 8192)));
        let ahead = ChargeRule::new(4096, Storage::Ahead);
        assert!(!ahead.seems_kept(&file(0, 1 << 20)));
        assert!(ahead.may_keep(&file(0, 8)) && !ahead.may_keep(&file(1, 8)) && rule.may_keep(&file(4096, 16)));
        assert_eq!(rule.found(&file(0, 2048)), 1 << 20);
    }

    #[test]
    fn ranges_are_whole_blocks() {
        let rule = ChargeRule::new(0, Storage::Plain);
        assert_eq!(rule.blocks(0, 0), 0..0);
        assert_eq!(rule.blocks(4095, 2), 0..8192);
        assert_eq!(rule.blocks(8192, 4096), 8192..12288);
        assert_eq!(rule.blocks(u64::MAX, 5).end % 4096, 0);
    }
}
