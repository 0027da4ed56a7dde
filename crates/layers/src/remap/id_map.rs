//! Translation of user and group ids: single ids, ranges, offsets. Pure except for names, which a
//! closure resolves.
//!
//! `A/B:@G/@H`: files of A in the layer below are shown as B's, and B given from above means A
//! below. A is an id or name, a range `1000-1999`, several of these joined by `+`, or `*` (every id
//! without another rule). B is an id or name, or, for a range, a range of the same length (an
//! offset).
//!
//! The reverse translation, from shown to stored, is in this order:
//! 1. if exactly one id is shown as B (`A/B`, or a range to a range): that id;
//! 2. an id that a rule shows as itself: itself;
//! 3. if several ids are shown as B (`1000-1999/5000`): the first id of the first of these rules;
//! 4. `*/B` is never reversed: an id that only `*` translates to stays unchanged. No user becomes
//!    id 0 by a star.

use std::{fmt, ops::RangeInclusive};

/// The greatest id; `u32::MAX` means "no change" to `chown(2)`.
pub const ID_MAX: u32 = u32::MAX - 1;

/// A range of stored ids and their shown ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Segment {
    first: u32,
    last: u32,
    /// Shown id of `first`.
    shown: u32,
    /// Whether the following ids are shown as the following ones; else all are shown as `shown`.
    one_to_one: bool,
}

impl Segment {
    fn shown(&self, id: u32) -> u32 {
        if self.one_to_one { self.shown + (id - self.first) } else { self.shown }
    }

    fn shown_last(&self) -> u32 {
        self.shown(self.last)
    }

    fn holds(&self, id: u32) -> bool {
        (self.first..=self.last).contains(&id)
    }
}

/// One rule with its names resolved to numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MapRule {
    /// `A/B`: one id is shown as another.
    One(u32, u32),
    /// `FIRST-LAST/B-C`: a range is shown from B on.
    Shifted(RangeInclusive<u32>, u32),
    /// `FIRST-LAST/B`, `A+C/B`: all of these are shown as B.
    Many(Vec<RangeInclusive<u32>>, u32),
    /// `*/B`: all ids without another rule.
    Rest(u32),
}

/// Error of a malformed or contradictory map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MapError(pub(super) String);

impl fmt::Display for MapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for MapError {}

/// A translation of ids of one kind, ready for use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IdMap {
    /// Sorted by `first`, without overlaps.
    forward: Vec<Segment>,
    /// The one-to-one segments, sorted by `shown`, without overlaps there.
    back: Vec<Segment>,
    /// Shown id and first stored id of many-to-one rules, in their order, sorted by shown id.
    first_of: Vec<(u32, u32)>,
    rest: Option<u32>,
}

impl IdMap {
    /// Compiles rules.
    ///
    /// # Errors
    /// An id with two rules, or two ids of one-to-one rules that are shown as one; a second `*`.
    pub fn new(rules: &[MapRule]) -> Result<IdMap, MapError> {
        let mut map = IdMap::default();
        for rule in rules {
            match rule {
                MapRule::One(stored, shown) => map.one_to_one(*stored..=*stored, *shown)?,
                MapRule::Shifted(ids, shown) => map.one_to_one(ids.clone(), *shown)?,
                MapRule::Many(stretches, shown) => map.many_to_one(stretches, *shown)?,
                MapRule::Rest(shown) => {
                    if map.rest.replace(*shown).is_some() {
                        return Err(MapError("\"*\" is mapped twice; keep one".to_owned()));
                    }
                }
            }
        }
        map.first_of.sort_by_key(|&(shown, _)| shown);
        map.first_of.dedup_by_key(|&mut (shown, _)| shown);
        Ok(map)
    }

    fn many_to_one(&mut self, stretches: &[RangeInclusive<u32>], shown: u32) -> Result<(), MapError> {
        for ids in stretches {
            self.insert(Segment { first: *ids.start(), last: *ids.end(), shown, one_to_one: false })?;
        }
        self.first_of.extend(stretches.first().map(|ids| (shown, *ids.start())));
        Ok(())
    }

    fn one_to_one(&mut self, ids: RangeInclusive<u32>, shown: u32) -> Result<(), MapError> {
        let segment = Segment { first: *ids.start(), last: *ids.end(), shown, one_to_one: true };
        self.insert(segment)?;
        // An id that is mapped to itself is merely excluded from the star; its reverse needs no
        // rule.
        if segment.first == segment.shown {
            return Ok(());
        }
        let place = self.back.partition_point(|other| other.shown < shown);
        let before =
            place.checked_sub(1).and_then(|place| self.back.get(place)).filter(|other| other.shown_last() >= shown);
        let clash = before.or_else(|| self.back.get(place).filter(|other| other.shown <= segment.shown_last()));
        if let Some(other) = clash {
            let id = other.shown.max(shown);
            let (a, b) = (other.first + (id - other.shown), segment.first + (id - shown));
            return Err(MapError(format!(
                "ids {a} and {b} are both mapped to {id}; if that is meant, write one rule: {a}+{b}/{id}"
            )));
        }
        self.back.insert(place, segment);
        Ok(())
    }

    fn insert(&mut self, segment: Segment) -> Result<(), MapError> {
        let place = self.forward.partition_point(|other| other.first < segment.first);
        let before =
            place.checked_sub(1).and_then(|place| self.forward.get(place)).filter(|other| other.last >= segment.first);
        let clash = before.or_else(|| self.forward.get(place).filter(|other| other.first <= segment.last));
        if let Some(other) = clash {
            return Err(MapError(format!(
                "id {} is mapped twice; leave it out of one of the two rules",
                other.first.max(segment.first)
            )));
        }
        self.forward.insert(place, segment);
        Ok(())
    }

    /// Whether nothing is translated.
    pub fn is_empty(&self) -> bool {
        self.forward.is_empty() && self.rest.is_none()
    }

    fn rule_of(&self, stored: u32) -> Option<&Segment> {
        let place = self.forward.partition_point(|segment| segment.first <= stored);
        place.checked_sub(1).and_then(|place| self.forward.get(place)).filter(|segment| segment.holds(stored))
    }

    /// The shown id of a stored one.
    pub fn shown(&self, stored: u32) -> u32 {
        match self.rule_of(stored) {
            Some(segment) => segment.shown(stored),
            None => self.rest.unwrap_or(stored),
        }
    }

    /// The stored id for a shown one: see the order in the file's head.
    pub fn stored(&self, shown: u32) -> u32 {
        let place = self.back.partition_point(|segment| segment.shown <= shown);
        let exact =
            place.checked_sub(1).and_then(|place| self.back.get(place)).filter(|segment| shown <= segment.shown_last());
        if let Some(segment) = exact {
            return segment.first + (shown - segment.shown);
        }
        let itself = match self.rule_of(shown) {
            Some(segment) => segment.shown(shown) == shown,
            None => self.rest == Some(shown),
        };
        if itself {
            return shown;
        }
        let first = self
            .first_of
            .binary_search_by_key(&shown, |&(shown, _)| shown)
            .ok()
            .and_then(|place| self.first_of.get(place));
        first.map_or(shown, |&(_, stored)| stored)
    }
}

/// Parses one rule `A/B` without its `@`, and adds the result to `rules`.
///
/// # Errors
/// Malformed text, an id that does not resolve, ranges of different lengths.
pub fn parse_rule(
    text: &str,
    resolve: &dyn Fn(&str) -> Result<u32, String>,
    rules: &mut Vec<MapRule>,
) -> Result<(), MapError> {
    let bad = |why: String| MapError(format!("invalid map \"{}\": {why}", text.escape_debug()));
    let (left, right) = text.split_once('/').ok_or_else(|| bad("there is no /; write FROM/TO".to_owned()))?;
    if right.contains('/') {
        return Err(bad("there is more than one /; separate maps by colons".to_owned()));
    }
    if right == "*" {
        return Err(bad("* can only stand on the left".to_owned()));
    }
    if left == "*" {
        rules.push(MapRule::Rest(resolve(right).map_err(bad)?));
        return Ok(());
    }
    if let Some(target) = range(right).map_err(bad)? {
        let Some(ids) = range(left).map_err(bad)? else {
            return Err(bad("a range on the right needs a range of the same length on the left".to_owned()));
        };
        if ids.end() - ids.start() != target.end() - target.start() {
            return Err(bad("the two ranges differ in length".to_owned()));
        }
        rules.push(MapRule::Shifted(ids, *target.start()));
        return Ok(());
    }
    let shown = resolve(right).map_err(bad)?;
    rules.push(sources(left, resolve, shown).map_err(bad)?);
    Ok(())
}

/// Parses the left side of a rule whose right side is one id.
fn sources(left: &str, resolve: &dyn Fn(&str) -> Result<u32, String>, shown: u32) -> Result<MapRule, String> {
    if let Some(ids) = range(left)? {
        return Ok(MapRule::Many(vec![ids], shown));
    }
    // A name may itself contain a plus sign (in some directory services): the whole is tried first.
    let whole = resolve(left);
    if whole.is_ok() || !left.contains('+') {
        return whole.map(|id| MapRule::One(id, shown));
    }
    let stretch = |part: &str| match range(part)? {
        Some(ids) => Ok(ids),
        None => resolve(part).map(|id| id..=id),
    };
    left.split('+').map(stretch).collect::<Result<_, _>>().map(|stretches| MapRule::Many(stretches, shown))
}

/// Parses a range `FIRST-LAST` of numbers; `None` for anything else (names may contain a hyphen).
fn range(text: &str) -> Result<Option<RangeInclusive<u32>>, String> {
    let digits = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    let Some((first, last)) = text.split_once('-').filter(|(first, last)| digits(first) && digits(last)) else {
        return Ok(None);
    };
    let number = |part: &str| {
        part.parse()
            .ok()
            .filter(|&id| id <= ID_MAX)
            .ok_or_else(|| format!("id {part} is too large; ids go from 0 to {ID_MAX}"))
    };
    let (first, last) = (number(first)?, number(last)?);
    if first > last { Err(format!("the range {text} is the wrong way round")) } else { Ok(Some(first..=last)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn resolve(name: &str) -> Result<u32, String> {
        match name {
            "alice" => Ok(1000),
            "bob" => Ok(1001),
            "www-data" => Ok(33),
            "DOM+carol" => Ok(7000),
            _ => name.parse().map_err(|_| format!("there is no user \"{name}\"")),
        }
    }

    fn map(text: &str) -> Result<IdMap, MapError> {
        let mut rules = Vec::new();
        for rule in text.split(':') {
            parse_rule(rule, &resolve, &mut rules)?;
        }
        IdMap::new(&rules)
    }

    #[test]
    fn single_ids_go_both_ways() {
        let map = map("alice/2000:www-data/0").unwrap();
        assert_eq!([1000, 2000, 33, 0, 5].map(|id| map.shown(id)), [2000, 2000, 0, 0, 5]);
        assert_eq!([2000, 1000, 0, 33, 5].map(|id| map.stored(id)), [1000, 1000, 33, 33, 5]);
        let swap = self::map("1000/2000:2000/1000").unwrap();
        assert_eq!([1000, 2000].map(|id| (swap.shown(id), swap.stored(id))), [(2000, 2000), (1000, 1000)]);
    }

    #[test]
    fn ranges_merge_or_move() {
        let many = map("1000-1999/5000").unwrap();
        assert_eq!([999, 1000, 1500, 1999, 2000].map(|id| many.shown(id)), [999, 5000, 5000, 5000, 2000]);
        // The first id of the range; but a stored id that is not shown stays.
        assert_eq!([5000, 1000, 1500].map(|id| many.stored(id)), [1000, 1000, 1500]);
        let moved = map("1000-1999/5000-5999").unwrap();
        assert_eq!([999, 1000, 1999, 2000].map(|id| moved.shown(id)), [999, 5000, 5999, 2000]);
        assert_eq!([4999, 5000, 5999, 6000].map(|id| moved.stored(id)), [4999, 1000, 1999, 6000]);
        let list = map("alice+bob+3000-3009/1500").unwrap();
        assert_eq!([1000, 1001, 3005, 1002].map(|id| list.shown(id)), [1500, 1500, 1500, 1002]);
        assert_eq!(list.stored(1500), 1000);
        assert_eq!(map("DOM+carol/1").unwrap().stored(1), 7000);
    }

    #[test]
    fn an_id_within_its_own_range_stays_itself() {
        let map = map("1000-1999/1500").unwrap();
        assert_eq!((map.shown(1000), map.stored(1500)), (1500, 1500));
    }

    #[test]
    fn a_star_takes_the_rest_and_is_never_turned_back() {
        let map = map("1000/1000:1001/2000:*/0").unwrap();
        assert_eq!([0, 1000, 1001, ID_MAX].map(|id| map.shown(id)), [0, 1000, 2000, 0]);
        assert_eq!([0, 2000, 1500].map(|id| map.stored(id)), [0, 1001, 1500]);
        let own = self::map("5/1000:1000/1000").unwrap();
        assert_eq!((own.shown(5), own.shown(1000), own.stored(1000)), (1000, 1000, 5));
        let outside = self::map("5000/6000:*/5000").unwrap();
        assert_eq!(outside.stored(5000), 5000);
    }

    #[test]
    fn the_whole_range_of_ids_works() {
        let map = map("4294967294/0:0/4294967294:3000000000-3000000009/3500000000-3500000009").unwrap();
        assert_eq!((map.shown(ID_MAX), map.stored(ID_MAX), map.shown(3_000_000_009)), (0, 0, 3_500_000_009));
    }

    #[test]
    fn contradictions_are_refused() {
        for (text, part) in [
            ("1000/2000:1000/3000", "id 1000 is mapped twice"),
            ("1000/3000:2000/3000", "1000+2000/3000"),
            ("1000-1999/5:1500/6", "id 1500 is mapped twice"),
            ("1500/6:1000-1999/5", "id 1500 is mapped twice"),
            ("10-19/20-29:5/25", "15 and 5 are both mapped to 25"),
            ("*/1:*/2", "twice"),
            ("1000", "no /"),
            ("1/2/3", "more than one /"),
            ("5/*", "only stand on the left"),
            ("9-1/5", "wrong way round"),
            ("1-9/1-5", "differ in length"),
            ("alice/1-5", "range on the right"),
            ("1-4294967295/1", "too large"),
            ("nobody+alice/1", "nobody"),
            ("", "no /"),
        ] {
            let error = map(text).map_err(|error| error.to_string());
            assert!(error.as_ref().is_err_and(|error| error.contains(part)), "{text}: {error:?}");
        }
    }

    /// Maps whose rules are all one-to-one, and whose shown ids are no stored ids of other rules.
    fn one_to_one() -> impl Strategy<Value = Vec<MapRule>> {
        prop::collection::vec((0u32..900, 0u32..60), 1..12).prop_map(|stretches| {
            let (mut next, mut rules) = (0u32, Vec::new());
            for (gap, length) in stretches {
                let first = next + gap;
                rules.push(MapRule::Shifted(first..=first + length, 1_000_000 + first * 2));
                next = first + length + 1;
            }
            rules
        })
    }

    proptest! {
        #[test]
        fn there_and_back_is_the_same_where_one_to_one(rules in one_to_one(), stored in 0u32..20_000) {
            let map = IdMap::new(&rules).unwrap();
            prop_assert_eq!(map.stored(map.shown(stored)), stored);
        }

        #[test]
        fn what_is_stored_for_a_shown_id_is_shown_as_it(rules in one_to_one(), many in (2_000_000u32..2_000_900, 1u32..50), shown: u32) {
            let mut rules = rules;
            rules.push(MapRule::Many(vec![many.0..=many.0 + many.1], 7));
            let map = IdMap::new(&rules).unwrap();
            let claimed = rules.iter().any(|rule| match rule {
                MapRule::Shifted(ids, to) => (*to..=*to + (ids.end() - ids.start())).contains(&shown),
                MapRule::Many(_, to) => *to == shown,
                _ => false,
            });
            if claimed {
                prop_assert_eq!(map.shown(map.stored(shown)), shown);
            }
        }
    }
}
