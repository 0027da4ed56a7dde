//! Owners on the way up and down: map, then offset. Pure.
//!
//! `remap.rs` calls [`Ids::shown`] for every owner that is shown, and [`Ids::stored`] for every
//! owner that a caller gives (`chown`, a new file, an ACL). The map is built in `rules.rs`, from
//! `--map`, `--map-passwd` and `--map-group`. `--force-user`, `--force-group` and `--mirror` come
//! after, in `remap.rs`.
//!
//! Up: shown = map(stored) + offset. Down: stored = map back(shown - offset). An owner whose offset
//! leaves 0..=2^32-2 is shown as [`NOBODY`]; nothing is given to one who cannot be stored
//! (EOVERFLOW).

use super::id_map::{ID_MAX, IdMap};
use nacre_vfs::{Errno, Result};

/// What the kernel takes for the id of nobody: programs see it as 65534, its owner's rights are
/// nobody's, and nobody may write what has it before it has been given to somebody
/// (user_namespaces(7), "Unmapped user and group IDs"; `HAS_UNMAPPED_ID` in Linux' fs/namei.c).
pub const NOBODY: u32 = u32::MAX;

/// Translation of one kind of id.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ids {
    /// Applied first on the way up.
    pub map: IdMap,
    /// Added on the way up.
    pub offset: i64,
}

fn shifted(id: u32, offset: i64) -> Option<u32> {
    if offset == 0 {
        return Some(id);
    }
    let moved = i64::from(id).checked_add(offset)?;
    u32::try_from(moved).ok().filter(|&id| id <= ID_MAX)
}

impl Ids {
    /// What a stored id appears as; `None` where the offset leads out of the range of ids.
    pub fn shown(&self, stored: u32) -> Option<u32> {
        shifted(self.map.shown(stored), self.offset)
    }

    /// The stored id that a shown one means.
    ///
    /// # Errors
    /// EOVERFLOW where the offset leads out of the range of ids.
    pub fn stored(&self, shown: u32) -> Result<u32> {
        let moved = self.offset.checked_neg().and_then(|back| shifted(shown, back)).ok_or(Errno::EOVERFLOW)?;
        Ok(self.map.stored(moved))
    }

    /// Whether nothing is translated.
    pub fn is_identity(&self) -> bool {
        self.offset == 0 && self.map.is_empty()
    }

    /// Whether single ids are mapped. An offset alone moves all of them, as idmapped mounts do.
    pub fn has_map(&self) -> bool {
        !self.map.is_empty()
    }

    /// The stored id of a caller: moved by an offset, the caller's own where single ids are mapped.
    /// `None` where the offset leads out of the range of ids.
    pub fn of_caller(&self, id: u32) -> Option<u32> {
        if self.has_map() { Some(id) } else { self.stored(id).ok() }
    }
}

/// Translation of users and groups.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Owners {
    /// Users.
    pub users: Ids,
    /// Groups.
    pub groups: Ids,
}

impl Owners {
    /// Whether nothing is translated.
    pub fn is_identity(&self) -> bool {
        self.users.is_identity() && self.groups.is_identity()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::remap::id_map::MapRule;
    use proptest::prelude::*;

    fn offset(offset: i64) -> Ids {
        Ids { map: IdMap::default(), offset }
    }

    #[test]
    fn offsets_reach_every_id_and_no_further() {
        assert_eq!(offset(1).shown(3_000_000_000), Some(3_000_000_001));
        assert_eq!(offset(1).shown(ID_MAX - 1), Some(ID_MAX));
        assert_eq!(offset(1).shown(ID_MAX), None);
        assert_eq!(offset(-1).shown(0), None);
        assert_eq!(offset(1).stored(0), Err(Errno::EOVERFLOW));
        assert_eq!(offset(i64::MAX).shown(1), None);
        assert_eq!(offset(i64::MIN).stored(1), Err(Errno::EOVERFLOW));
    }

    #[test]
    fn the_map_comes_before_the_offset() {
        let ids = Ids { map: IdMap::new(&[MapRule::One(5, 100)]).unwrap(), offset: 1000 };
        assert_eq!((ids.shown(5), ids.stored(1100), ids.shown(6)), (Some(1100), Ok(5), Some(1006)));
    }

    proptest! {
        #[test]
        fn an_offset_there_and_back_is_nothing(by in -5_000_000_000i64..5_000_000_000, id in 0u32..=ID_MAX) {
            let ids = offset(by);
            if let Some(shown) = ids.shown(id) {
                prop_assert_eq!(ids.stored(shown), Ok(id));
            }
        }
    }
}
