//! Owners between the stored and the shown side: map, then offset. Pure.
//!
//! `remap.rs` calls [`Ids::shown`] for every owner that is shown, and [`Ids::stored`] for every
//! owner that a caller gives (`chown`, a new file, an ACL). The map is built in `rules.rs`, from
//! `--map`, `--map-passwd` and `--map-group`. `--force-user`, `--force-group` and `--mirror` come
//! after, in `remap.rs`.
//!
//! Shown = map(stored) + offset. Stored = reverse map(shown - offset). An owner whose offset leaves
//! 0..=2^32-2 is shown as [`NOBODY`]; no file can be given to an id that cannot be stored
//! (EOVERFLOW).

use super::id_map::{ID_MAX, IdMap};
use nacre_vfs::{Errno, Result};

/// The kernel's invalid id: programs see it as 65534, it gives no caller the rights of an owner,
/// and a file with it cannot be written to before it has another owner (user_namespaces(7),
/// "Unmapped user and group IDs"; `HAS_UNMAPPED_ID` in Linux' fs/namei.c).
pub const NOBODY: u32 = u32::MAX;

/// Translation of one kind of id.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ids {
    /// Applied first, from stored to shown.
    pub map: IdMap,
    /// Added from stored to shown.
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
    /// The shown id of a stored one; `None` if the offset leaves the range of ids.
    pub fn shown(&self, stored: u32) -> Option<u32> {
        shifted(self.map.shown(stored), self.offset)
    }

    /// The stored id for a shown one.
    ///
    /// # Errors
    /// EOVERFLOW if the offset leaves the range of ids.
    pub fn stored(&self, shown: u32) -> Result<u32> {
        let moved = self.offset.checked_neg().and_then(|back| shifted(shown, back)).ok_or(Errno::EOVERFLOW)?;
        Ok(self.map.stored(moved))
    }

    /// Whether nothing is translated.
    pub fn is_identity(&self) -> bool {
        self.offset == 0 && self.map.is_empty()
    }

    /// Whether single ids are mapped. An offset alone shifts all of them, like idmapped mounts.
    pub fn has_map(&self) -> bool {
        !self.map.is_empty()
    }

    /// The stored id of a caller: shifted by an offset, unchanged where single ids are mapped.
    /// `None` if the offset leaves the range of ids.
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
