//! Counted costs per file, packed: 64 neighbouring inode numbers share one page, which holds as
//! many values as files were seen. File systems allocate inode numbers in runs, so a file takes
//! about ten bytes. Pure.

use super::{
    super::ledger::{Sum, Sums},
    Held, Owner,
};
use hashbrown::{HashMap, HashSet};
use nacre_vfs::FileId;

/// Values below this number of units of 512 bytes are stored in the page.
const LARGE: u32 = u32::MAX;
const UNIT: u64 = 512;

/// Cost and owner of one file.
#[derive(Clone, Copy)]
struct Value {
    /// In units of 512 bytes; [`LARGE`] if the value is stored separately.
    units: u32,
    /// Index of its owner.
    owner: u32,
}

/// Files whose inode numbers differ in the last six bits only.
#[derive(Default)]
struct Page {
    present: u64,
    /// One value for each bit of `present`, in its order.
    values: Vec<Value>,
}

impl Page {
    /// Index of the value for `bit`, or of the position to insert it at.
    fn position(&self, bit: u32) -> usize {
        (self.present & !(u64::MAX << bit)).count_ones() as usize
    }

    fn has(&self, bit: u32) -> bool {
        self.present >> bit & 1 == 1
    }
}

/// Costs of all counted files, and their sums.
#[derive(Default)]
pub(super) struct Visited {
    /// By file system, and inode number without its last six bits.
    pages: HashMap<(u64, u64), Page>,
    /// Values that are no multiple of the unit, or too large, by file system and inode number.
    apart: HashMap<(u64, u64), u64>,
    owners: Vec<Owner>,
    indices: HashMap<Owner, u32>,
    sums: Sums,
}

/// Key of a file. Generations are left out: while a walk runs, only the cage itself reuses an inode
/// number, and the ledger reports those files.
fn key(id: &FileId) -> (u64, u64) {
    (id.fs, id.ino)
}

/// Page of a file, and its bit there.
fn split((fs, ino): (u64, u64)) -> ((u64, u64), u32) {
    ((fs, ino >> 6), (ino & 63) as u32)
}

impl Visited {
    /// Counts a file, unless it has been counted; returns whether it was counted now.
    pub(super) fn add(&mut self, id: &FileId, owner: Owner, bytes: u64) -> bool {
        let (page, bit) = split(key(id));
        let owner_index = self.owner_index(owner);
        let page = self.pages.entry(page).or_default();
        if page.has(bit) {
            return false;
        }
        let units = u32::try_from(bytes / UNIT)
            .ok()
            .filter(|&units| bytes.is_multiple_of(UNIT) && units != LARGE)
            .unwrap_or(LARGE);
        if units == LARGE {
            self.apart.insert(key(id), bytes);
        }
        let position = page.position(bit);
        page.values.insert(position, Value { units, owner: owner_index });
        page.present |= 1 << bit;
        change(&mut self.sums, owner, |sum| {
            sum.bytes = sum.bytes.saturating_add(bytes);
            sum.inodes += 1;
        });
        true
    }

    fn owner_index(&mut self, owner: Owner) -> u32 {
        // There are no more owners than files, and never 2^32 files with as many users.
        let next = u32::try_from(self.owners.len()).unwrap_or(u32::MAX);
        let index = *self.indices.entry(owner).or_insert(next);
        if index == next {
            self.owners.push(owner);
        }
        index
    }

    fn get(&self, key: (u64, u64)) -> Option<(Owner, u64)> {
        let (page, bit) = split(key);
        let page = self.pages.get(&page).filter(|page| page.has(bit))?;
        let value = page.values.get(page.position(bit))?;
        let owner = self.owners.get(value.owner as usize)?;
        let bytes = if value.units == LARGE { *self.apart.get(&key)? } else { u64::from(value.units) * UNIT };
        Some((*owner, bytes))
    }

    /// Sums with these values replacing the counted ones. Two files that had one inode number in
    /// succession were counted once, so that is subtracted once.
    pub(super) fn sums_with(&self, held: impl IntoIterator<Item = Held>) -> Sums {
        let latest: HashMap<_, Held> = held.into_iter().map(|held| (held.id, held)).collect();
        let mut sums = self.sums.clone();
        let mut taken_back = HashSet::with_capacity(latest.len());
        for held in latest.values() {
            if let Some((owner, bytes)) = self.get(key(&held.id)).filter(|_| taken_back.insert(key(&held.id))) {
                change(&mut sums, owner, |sum| {
                    sum.bytes = sum.bytes.saturating_sub(bytes);
                    sum.inodes = sum.inodes.saturating_sub(1);
                });
            }
            change(&mut sums, held.owner, |sum| {
                sum.bytes = sum.bytes.saturating_add(held.bytes);
                sum.inodes = sum.inodes.saturating_add(held.inodes);
            });
        }
        sums.users.retain(|_, sum| *sum != Sum::default());
        sums.dirs.retain(|_, sum| *sum != Sum::default());
        sums
    }
}

fn change(sums: &mut Sums, owner: Owner, change: impl Fn(&mut Sum)) {
    change(&mut sums.whole);
    change(sums.users.entry(owner.uid).or_default());
    if let Some(group) = owner.group {
        change(sums.dirs.entry(group).or_default());
    }
}
