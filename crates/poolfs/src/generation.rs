//! Generations of inode numbers: part of file handles, so that a handle never leads to another file
//! that got the same number.
//!
//! Within its tree, an inode has a number that no other one ever had, except for inodes that were
//! lost in a crash before they were durable, or in a rollback: their numbers are assigned again
//! after a restart. These inodes differ in their birth time, which is stored with the inode
//! (docs/pool-format.md) and never changes. So nothing else is stored, files of older pools have
//! generations as well, and a file keeps its own through rollbacks that it survives.

use nacre_vfs::{NO_GENERATION, Time};

/// Generation of a file with this birth time, in the tree of this snapshot; 0 for the live file
/// system.
pub(crate) fn of_file(born: Time, snapshot: u64) -> u32 {
    let born = (born.sec as u64).wrapping_mul(1_000_000_000).wrapping_add(born.nsec.into());
    spread(born ^ if snapshot == 0 { 0 } else { u64::from(spread(snapshot)) << 32 })
}

/// Hashes 64 bits to 32; never returns [`NO_GENERATION`].
pub(crate) fn spread(number: u64) -> u32 {
    // The last steps of splitmix64.
    let mixed = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    match (mixed >> 32) as u32 {
        NO_GENERATION => 0,
        generation => generation,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    /// Handles survive programs: the generation of a file is the same in every later version.
    #[test]
    fn it_is_the_same_for_ever_and_differs_with_birth_and_snapshot() {
        let born = Time { sec: 1_700_000_000, nsec: 123_000_000 };
        assert_eq!([of_file(born, 0), of_file(born, 77)], [713_235_956, 3_053_963_288]);
        let ticks = (0..10_000)
            .map(|tick| of_file(Time { sec: 1_700_000_000 + tick / 250, nsec: (tick % 250) as u32 * 4_000_000 }, 0));
        assert!(ticks.collect::<HashSet<u32>>().len() > 9_990);
        let snapshots = (1..10_000).map(|txg| of_file(born, txg));
        assert!(snapshots.collect::<HashSet<u32>>().len() > 9_990);
    }
}
