//! The filter `shift`: translates owners to another user namespace, or shows all owners as one.
//!
//! Made by the stack builder, for container layers that are stored with the ids of their images
//! (`uidmapping`, `gidmapping`) and for users who cannot change owners at all (`squash`). Unlike in
//! `remap`, an id outside all ranges is unmapped: it shows as the overflow id, a caller with an
//! unmapped id creates files as the overflow id, and no file can be given to it. Invariant: owners
//! written through the filter are shown as they were written.

use crate::{accounts::Processes, remap::acl, set_id};
use nacre_vfs::{Attr, Before, Caller, Description, Errno, Filter, Result, SetAttr};
use std::{fmt, str::FromStr, sync::Arc};

/// Id that unmapped owners show as (`/proc/sys/kernel/overflowuid`).
const OVERFLOW: u32 = 65_534;

/// The greatest id; `u32::MAX` means "no change" to `chown(2)`.
const ID_MAX: u32 = u32::MAX - 1;

/// A range of ids: `length` ids from `stored` on show as those from `shown` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Range {
    stored: u32,
    shown: u32,
    length: u32,
}

/// Ranges of ids: `STORED:SHOWN:LENGTH`, several of them separated by `:` as well. Superfluous
/// colons are accepted: podman begins with one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ranges(Vec<Range>);

/// Error of a malformed range: a sentence for the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RangeError(String);

impl fmt::Display for RangeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for RangeError {}

impl FromStr for Ranges {
    type Err = RangeError;

    fn from_str(text: &str) -> std::result::Result<Ranges, RangeError> {
        let wrong = || {
            RangeError(format!(
                "\"{}\" is no list of id ranges; write STORED:SHOWN:LENGTH[:STORED:SHOWN:LENGTH...], as in 0:100000:65536",
                text.escape_debug()
            ))
        };
        let numbers: Vec<u32> = text
            .split(':')
            .filter(|part| !part.is_empty())
            .map(str::parse)
            .collect::<std::result::Result<_, _>>()
            .map_err(|_| wrong())?;
        let (triples, rest) = numbers.as_chunks::<3>();
        if !rest.is_empty() || triples.is_empty() {
            return Err(wrong());
        }
        let mut ranges: Vec<Range> = Vec::new();
        for &[stored, shown, length] in triples {
            let fits = |first: u32| length > 0 && first.checked_add(length - 1).is_some_and(|last| last <= ID_MAX);
            if !fits(stored) || !fits(shown) {
                return Err(RangeError(format!(
                    "{stored}:{shown}:{length}: ids end at {ID_MAX}, and a range has at least one"
                )));
            }
            let new = Range { stored, shown, length };
            let meets = |a: u32, b: u32, other: &Range| a.abs_diff(b) < if a < b { length } else { other.length };
            if ranges.iter().any(|old| meets(stored, old.stored, old) || meets(shown, old.shown, old)) {
                return Err(RangeError(format!(
                    "{stored}:{shown}:{length}: it overlaps a range before it; no id can have two meanings"
                )));
            }
            ranges.push(new);
        }
        Ok(Ranges(ranges))
    }
}

impl fmt::Display for Ranges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts: Vec<String> =
            self.0.iter().map(|range| format!("{}:{}:{}", range.stored, range.shown, range.length)).collect();
        f.write_str(&texts.join(":"))
    }
}

impl Ranges {
    /// Translates an id. Without ranges, every id is unchanged.
    fn look(&self, id: u32, from: impl Fn(&Range) -> u32, to: impl Fn(&Range) -> u32) -> Option<u32> {
        if self.0.is_empty() {
            return Some(id);
        }
        let range =
            self.0.iter().find(|range| id.checked_sub(from(range)).is_some_and(|offset| offset < range.length))?;
        Some(to(range) + (id - from(range)))
    }

    /// The id that a stored id shows as.
    pub fn up(&self, stored: u32) -> u32 {
        self.look(stored, |range| range.stored, |range| range.shown).unwrap_or(OVERFLOW)
    }

    /// The stored id for a shown one; `None` if it is unmapped.
    pub fn down(&self, shown: u32) -> Option<u32> {
        self.look(shown, |range| range.shown, |range| range.stored)
    }
}

/// The filter.
#[derive(Clone, Default)]
pub struct Shift {
    /// Users.
    pub uids: Ranges,
    /// Groups.
    pub gids: Ranges,
    /// Every file shows this user as its owner.
    pub squash_uid: Option<u32>,
    /// Every file shows this group.
    pub squash_gid: Option<u32>,
    /// Callers' processes: where owners are squashed, set-id bits are decided by the owners in the
    /// layer below. Not used with ranges alone, which show an image to the container that it
    /// belongs to.
    pub processes: Option<Arc<dyn Processes>>,
}

impl Filter for Shift {
    fn name(&self) -> &'static str {
        "shift"
    }

    fn describe(&self) -> Description {
        let mut text = Description::new("shift");
        for (key, ranges) in [("uid", &self.uids), ("gid", &self.gids)] {
            if !ranges.0.is_empty() {
                text = text.with(key, ranges.to_string());
            }
        }
        for (key, id) in [("squash-uid", self.squash_uid), ("squash-gid", self.squash_gid)] {
            if let Some(id) = id {
                text = text.with(key, id.to_string());
            }
        }
        text
    }

    fn caller_down(&self, caller: &Caller) -> Caller {
        // A caller with an unmapped id creates as the overflow id: for mount points and the like,
        // which a container's runtime creates there.
        Caller {
            uid: self.uids.down(caller.uid).unwrap_or(OVERFLOW),
            gid: self.gids.down(caller.gid).unwrap_or(OVERFLOW),
            ..*caller
        }
    }

    fn change_down(&self, caller: &Caller, change: &mut SetAttr, before: Before<'_>) -> Result<()> {
        for (id, ranges) in [(&mut change.uid, &self.uids), (&mut change.gid, &self.gids)] {
            if let Some(id) = id {
                *id = ranges.down(*id).ok_or(Errno::EINVAL)?;
            }
        }
        let squashes = self.squash_uid.is_some() || self.squash_gid.is_some();
        match &self.processes {
            Some(processes) if squashes => set_id::limit(&**processes, caller, change, before),
            _ => Ok(()),
        }
    }

    fn attr_up(&self, _caller: &Caller, attr: &mut Attr) -> Result<()> {
        attr.uid = self.squash_uid.unwrap_or_else(|| self.uids.up(attr.uid));
        attr.gid = self.squash_gid.unwrap_or_else(|| self.gids.up(attr.gid));
        Ok(())
    }

    fn rewrites_xattr(&self, name: &[u8]) -> bool {
        acl::is_acl(name) && !(self.uids.0.is_empty() && self.gids.0.is_empty())
    }

    fn xattr_down(&self, _name: &[u8], value: &mut Vec<u8>, _before: Before<'_>) -> Result<()> {
        acl::translate(
            value,
            |id| self.uids.down(id).ok_or(Errno::EINVAL),
            |id| self.gids.down(id).ok_or(Errno::EINVAL),
        )
    }

    fn xattr_up(&self, _name: &[u8], value: &mut [u8], _attr: Before<'_>) -> Result<()> {
        acl::translate(value, |id| Ok(self.uids.up(id)), |id| Ok(self.gids.up(id)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::Mem;
    use nacre_vfs::{Filtered, Layer, Name};
    use std::sync::Arc;

    fn ranges(text: &str) -> Ranges {
        text.parse().unwrap()
    }

    #[test]
    fn ids_go_both_ways() {
        let map = ranges("0:1000:10:100:5:1");
        for (stored, shown) in [(0, 1000), (9, 1009), (100, 5)] {
            assert_eq!((map.up(stored), map.down(shown)), (shown, Some(stored)));
        }
        assert_eq!((map.up(10), map.up(99), map.up(1000)), (OVERFLOW, OVERFLOW, OVERFLOW));
        assert_eq!((map.down(0), map.down(1010), map.down(6)), (None, None, None));
        assert_eq!((Ranges::default().up(7), Ranges::default().down(7)), (7, Some(7)));
        assert_eq!(map.to_string(), "0:1000:10:100:5:1");
        assert_eq!(ranges(":0:1:2::5:6:7"), ranges("0:1:2:5:6:7"));
        assert_eq!(ranges("4294967294:0:1").up(ID_MAX), 0);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for text in [
            "",
            ":",
            "0",
            "0:1",
            "0:1:2:3",
            "a:b:c",
            "-1:0:1",
            "0:0:0",
            "0:4294967290:10",
            "4294967295:0:1",
            "0:1:4294967295",
        ] {
            assert!(text.parse::<Ranges>().is_err(), "{text}");
        }
        for text in ["0:0:10:9:100:1", "0:0:10:100:9:1", "5:0:1:0:10:6", "0:5:1:10:0:6"] {
            assert!(text.parse::<Ranges>().unwrap_err().to_string().contains("overlaps"), "{text}");
        }
        assert!("0:0:10:10:10:1".parse::<Ranges>().is_ok());
    }

    fn over(shift: Shift) -> (Arc<dyn Layer>, Filtered<Shift>) {
        let below: Arc<dyn Layer> = Arc::new(Mem::new());
        (Arc::clone(&below), Filtered::new(Arc::new(shift), below))
    }

    #[test]
    fn owners_are_stored_as_the_layer_has_them() {
        let (below, shifted) = over(Shift { uids: ranges("0:1000:10"), gids: ranges("0:2000:10"), ..Shift::default() });
        let name = Name::new(b"f").unwrap();
        let root = shifted.root().unwrap().node;
        assert_eq!(shifted.root().unwrap().attr.uid, 1000);
        let caller = Caller { uid: 1003, gid: 2004, pid: 0, umask: 0 };
        let made = shifted.mknod(&caller, &root, name, nacre_vfs::Kind::File, 0o644, (0, 0)).unwrap();
        assert_eq!((made.attr.uid, made.attr.gid), (1003, 2004));
        let stored = below.lookup(&Caller::ROOT, &root, name).unwrap().attr;
        assert_eq!((stored.uid, stored.gid), (3, 4));
        let change = SetAttr { uid: Some(1009), ..SetAttr::default() };
        assert_eq!(shifted.setattr(&Caller::ROOT, &made.node, None, &change).unwrap().uid, 1009);
        assert_eq!(below.getattr(&Caller::ROOT, &made.node, None).unwrap().uid, 9);
        let change = SetAttr { gid: Some(5), ..SetAttr::default() };
        assert_eq!(shifted.setattr(&Caller::ROOT, &made.node, None, &change), Err(Errno::EINVAL));
        let stranger = shifted
            .mknod(&Caller::ROOT, &root, Name::new(b"g").unwrap(), nacre_vfs::Kind::File, 0o644, (0, 0))
            .unwrap();
        assert_eq!((stranger.attr.uid, stranger.attr.gid), (OVERFLOW, OVERFLOW));
    }

    #[test]
    fn squashed_owners_only_show() {
        let processes = Some(Arc::new(crate::fakes::FakeProcesses::default()) as _);
        let (below, squashed) = over(Shift { squash_uid: Some(0), squash_gid: Some(7), processes, ..Shift::default() });
        let root = squashed.root().unwrap().node;
        let caller = Caller { uid: 5, gid: 6, pid: 0, umask: 0 };
        let made = squashed.mkdir(&caller, &root, Name::new(b"d").unwrap(), 0o755).unwrap();
        assert_eq!((made.attr.uid, made.attr.gid), (0, 7));
        let stored = below.getattr(&Caller::ROOT, &made.node, None).unwrap();
        assert_eq!((stored.uid, stored.gid), (5, 6));
        let file =
            squashed.mknod(&caller, &root, Name::new(b"f").unwrap(), nacre_vfs::Kind::File, 0o644, (0, 0)).unwrap();
        let set = SetAttr { mode: Some(0o6755), ..SetAttr::default() };
        let mode_by = |caller: &Caller| squashed.setattr(caller, &file.node, None, &set).unwrap().mode;
        assert_eq!([mode_by(&caller), mode_by(&Caller::ROOT)], [0o6755, 0o6755]);
        assert_eq!(mode_by(&Caller { uid: 7, gid: 7, ..caller }), 0o755, "not the owner below");
    }

    #[test]
    fn acls_name_the_same_people() {
        let shift = Shift { uids: ranges("0:1000:10"), gids: ranges("0:2000:10"), ..Shift::default() };
        let mut value = vec![2, 0, 0, 0, 2, 0, 6, 0, 0xeb, 3, 0, 0, 8, 0, 6, 0, 0xd1, 7, 0, 0];
        let shown = value.clone();
        let mut none = || Err(Errno::EIO);
        assert!(
            shift.rewrites_xattr(acl::ACCESS)
                && !shift.rewrites_xattr(b"user.x")
                && !Shift::default().rewrites_xattr(acl::ACCESS)
        );
        shift.xattr_down(acl::ACCESS, &mut value, &mut none).unwrap();
        assert_eq!((value[8], value[16]), (3, 1));
        shift.xattr_up(acl::ACCESS, &mut value, &mut none).unwrap();
        assert_eq!(value, shown);
        value[8] = 0;
        assert_eq!(shift.xattr_down(acl::ACCESS, &mut value, &mut none), Err(Errno::EINVAL));
    }
}
