//! Generations of inode numbers: what file handles carry, so that a handle never leads to another
//! file that has the number of the one that it was made for.
//!
//! Within its tree, an inode has a number that no other one ever had: but for those that a crash
//! took before they were durable, and those that a rollback took away, whose numbers are given again
//! after a restart. What then differs is when the file was born; that is stored with it
//! (docs/pool-format.md) and never changes. So nothing else is stored, files of older pools have
//! generations as well, and a file keeps its own through rollbacks that it survives.

use nacre_vfs::{NO_GENERATION, Time};

/// That of a file that was born then, in the tree of this snapshot; 0 for none.
pub(crate) fn of_file(born: Time, snapshot: u64) -> u32 {
    let born = (born.sec as u64).wrapping_mul(1_000_000_000).wrapping_add(born.nsec.into());
    spread(born ^ if snapshot == 0 { 0 } else { u64::from(spread(snapshot)) << 32 })
}

/// 32 bits that each bit of 64 takes part in; never [`NO_GENERATION`].
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

    /// Handles outlive programs: what a file has here, it has in every later version.
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
