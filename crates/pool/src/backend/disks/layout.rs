//! The groups that devices are in, how each device is, and what that makes of their slots: who takes
//! a new segment, how wide it is, how much there is room for.
//!
//! Callers: the backend of devices. Pure: it knows numbers of devices and of slots, no devices.
//!
//! Invariants:
//! - Columns of a place lie on different devices of one group.
//! - A segment has all the parity of its group where as many devices are there as that needs; it is
//!   narrower where fewer are there, or have room.
//! - A group is whole as long as no more of its devices are missing or stale than it has parity.
//! - A device that stands beside another holds the same in the same slots: a place names the other,
//!   and is whole there as long as one of the two is.

use crate::frames::WriteStream;
use crate::label::{
    Group, GroupClass, GroupKind, MOST_COLUMNS, MemberRole, MemberStatus, Place, ShapeChange, SlotAddress,
};
use crate::segment::stream::PIECE;
use crate::segment::table::LONGEST;

use super::slots::Slots;

/// Devices of a group that hold root records, at most; but one more than may be lost.
const ROOTS_IN_GROUP: usize = 8;
/// The same in a pool without groups.
const ROOTS_WITHOUT: usize = 3;

/// A device, as far as its group is concerned.
#[derive(Clone, Copy, Debug)]
pub(super) struct Standing {
    pub(super) group: usize,
    pub(super) role: MemberRole,
    pub(super) status: MemberStatus,
    /// It may lack something.
    pub(super) stale: bool,
    /// Nobody has it open.
    pub(super) absent: bool,
}

impl Standing {
    /// Whether it works: it is read and written, or could be.
    pub(super) fn works(&self) -> bool {
        self.status == MemberStatus::Online && !self.absent
    }

    /// Whether it has all that it should have.
    pub(super) fn has_all(&self) -> bool {
        self.works() && !self.stale
    }

    /// Whether segments lie on it by its number.
    pub(super) fn is_own(&self) -> bool {
        self.role == MemberRole::Own && self.status.belongs()
    }
}

/// All groups.
#[derive(Clone, Debug, Default)]
pub(super) struct Layout {
    /// None in a pool without groups.
    pub(super) groups: Vec<Group>,
    pub(super) devices: Vec<Standing>,
    /// The change of their shape that is under way.
    pub(super) change: Option<ShapeChange>,
    /// Of each group, what file content can take of its slots, and all of them.
    ratios: Vec<(u64, u64)>,
    /// Whether any device stands beside another.
    pairs: bool,
}

/// Slots of the devices of a group, and the part of them that is free.
struct Counts {
    all: Vec<u64>,
    free: Vec<u64>,
}

impl Layout {
    /// Whether the pool is one without groups.
    pub(super) fn is_plain(&self) -> bool {
        self.groups.is_empty()
    }

    /// The groups of a pool, and how its devices are.
    pub(super) fn new(groups: Vec<Group>, devices: Vec<Standing>, change: Option<ShapeChange>) -> Self {
        let mut layout = Self { groups, devices, change, ..Self::default() };
        layout.pair();
        layout
    }

    /// Looks whether any device stands beside another.
    fn pair(&mut self) {
        self.pairs = self.devices.iter().any(|device| device.status.belongs() && device.role.beside().is_some());
    }

    /// Slots have come, or devices, or devices have changed.
    pub(super) fn measure(&mut self, slots: &Slots, slot: u64) {
        self.pair();
        let ratio = |group: usize| {
            let mut all = self.counts(slots, group).all;
            if all.is_empty() {
                // What lies on those that leave counts as before.
                all = self.members(group).map(|(at, _)| slots.of_device(at).0).collect();
            }
            (self.usable(&all, group, slot), all.iter().sum::<u64>())
        };
        self.ratios = (0..self.groups.len()).map(ratio).collect();
    }

    /// The group that a place is in: that of the first of its devices that is still there.
    pub(super) fn group_of(&self, place: &Place) -> usize {
        let standings = || place.iter().filter_map(|slot| self.standing(slot.device));
        standings().find(|standing| standing.is_own()).or(standings().next()).map_or(0, |standing| standing.group)
    }

    /// Segments of different lanes lie on different devices, but for second copies of metadata.
    pub(super) fn lane(&self, place: &Place) -> u64 {
        let group = self.group_of(place);
        match self.parity(group) {
            0 => 1 << 32 | place.first().map_or(0, |slot| u64::from(slot.device)),
            _ => group as u64,
        }
    }

    pub(super) fn members(&self, group: usize) -> impl Iterator<Item = (usize, &Standing)> {
        self.devices.iter().enumerate().filter(move |(_, device)| device.group == group && device.is_own())
    }

    /// Whether a device leaves the pool: nothing new goes to it.
    pub(super) fn is_leaving(&self, device: usize) -> bool {
        self.change.as_ref().is_some_and(|change| change.leaving.iter().any(|one| usize::from(*one) == device))
    }

    /// Whether a group is becoming another, or devices leave it.
    pub(super) fn is_changing(&self, group: usize) -> bool {
        self.change.as_ref().is_some_and(|change| usize::from(change.group) == group)
    }

    /// The devices of a group that new segments go to.
    pub(super) fn takers(&self, group: usize) -> impl Iterator<Item = (usize, &Standing)> {
        self.members(group).filter(|(at, _)| !self.is_leaving(*at))
    }

    /// The device that this one stands beside, or itself.
    pub(super) fn number_of(&self, device: u16) -> u16 {
        self.standing(device).and_then(|standing| standing.role.beside()).unwrap_or(device)
    }

    /// The devices that hold what one should hold: itself, and those that stand beside it.
    pub(super) fn holders(&self, device: u16) -> impl Iterator<Item = (u16, &Standing)> {
        let others = if self.pairs { self.devices.as_slice() } else { &[] };
        let beside = others
            .iter()
            .enumerate()
            .filter(move |(_, standing)| standing.status.belongs() && standing.role.beside() == Some(device));
        let itself = self.standing(device).filter(|standing| standing.status.belongs());
        itself.map(|standing| (device, standing)).into_iter().chain(beside.map(|(at, standing)| (at as u16, standing)))
    }

    /// A group is of this kind from now on.
    pub(super) fn set_kind(&mut self, group: usize, kind: GroupKind) {
        if let Some(group) = self.groups.get_mut(group) {
            group.kind = kind;
        }
    }

    /// A device, and those beside it, are in this group from now on.
    pub(super) fn move_to(&mut self, device: u16, group: usize) {
        let holders: Vec<u16> = self.holders(device).map(|(at, _)| at).collect();
        for at in holders {
            if let Some(standing) = self.devices.get_mut(usize::from(at)) {
                standing.group = group;
            }
        }
    }

    /// Nothing lies by this number, and no device has it.
    pub(super) fn vacate(&mut self, device: u16) {
        if let Some(standing) = self.devices.get_mut(usize::from(device)) {
            *standing =
                Standing { group: 0, role: MemberRole::Own, status: MemberStatus::Removed, stale: false, absent: true };
        }
    }

    /// Whether any device stands beside another.
    pub(super) fn has_pairs(&self) -> bool {
        self.pairs
    }

    pub(super) fn standing(&self, device: u16) -> Option<&Standing> {
        self.devices.get(usize::from(device))
    }

    /// Whether what lies on a device by its number is read and written: there, or beside it.
    pub(super) fn is_used(&self, device: u16) -> bool {
        self.is_plain() || self.holders(device).any(|(_, standing)| standing.works())
    }

    /// Whether all that should lie on a device by its number is there, or beside it.
    pub(super) fn is_whole(&self, device: u16) -> bool {
        self.is_plain() || self.holders(device).any(|(_, standing)| standing.has_all())
    }

    /// Whether this very device has all that it should have.
    pub(super) fn has_all(&self, device: u16) -> bool {
        self.is_plain() || self.standing(device).is_some_and(Standing::has_all)
    }

    /// Whether this very device is read and written.
    pub(super) fn works(&self, device: u16) -> bool {
        self.is_plain() || self.standing(device).is_some_and(Standing::works)
    }

    /// How many devices of a group may be lost of what is written to it now.
    pub(super) fn parity(&self, group: usize) -> usize {
        match self.groups.get(group).map(|group| group.kind) {
            Some(GroupKind::Mirror) => self.members(group).count().saturating_sub(1),
            Some(GroupKind::RaidZ(parity)) => usize::from(parity),
            Some(GroupKind::Plain) | None => 0,
        }
    }

    /// How many devices of a group may be lost.
    pub(super) fn tolerance(&self, group: usize) -> usize {
        let changing = self.change.as_ref().filter(|_| self.is_changing(group));
        changing.map_or(usize::MAX, |change| usize::from(change.tolerance)).min(self.parity(group))
    }

    /// How many devices of a group lack something, or are not there.
    pub(super) fn lacking(&self, group: usize) -> usize {
        self.members(group).filter(|(at, _)| !self.is_whole(*at as u16)).count()
    }

    /// Whether a device could be done without: nothing is lost with it.
    pub(super) fn is_expendable(&self, device: u16) -> bool {
        let number = self.number_of(device);
        if self.standing(device).is_some_and(|standing| standing.role == MemberRole::Spare) {
            return true;
        }
        self.standing(number).is_some_and(|standing| {
            let others = self.holders(number).any(|(at, holder)| at != device && holder.has_all());
            let more = usize::from(self.is_whole(number) && !others);
            self.lacking(standing.group) + more <= self.tolerance(standing.group)
        })
    }

    /// Whether a device is for itself: nobody has what it has but second copies of metadata.
    pub(super) fn is_single(&self, device: u16) -> bool {
        let alone = |standing: &Standing| standing.is_own() && self.tolerance(standing.group) == 0;
        self.is_plain() || self.standing(device).is_some_and(alone) && self.holders(device).count() < 2
    }

    /// Whether nothing but the intent log lies on a group.
    pub(super) fn is_log(&self, group: usize) -> bool {
        self.groups.get(group).is_some_and(|group| group.class == GroupClass::Log)
    }

    /// The same of a device's group.
    pub(super) fn is_log_device(&self, device: u16) -> bool {
        self.standing(self.number_of(device)).is_some_and(|standing| self.is_log(standing.group))
    }

    fn of_class(&self, class: GroupClass) -> impl Iterator<Item = usize> {
        (0..).zip(&self.groups).filter(move |(_, group)| group.class == class).map(|(number, _)| number)
    }

    /// The groups that segments of every stream lie on.
    pub(super) fn data_groups(&self) -> impl Iterator<Item = usize> {
        self.of_class(GroupClass::Data).filter(|group| self.members(*group).next().is_some())
    }

    /// Those of them that new segments go to.
    pub(super) fn taking_groups(&self) -> impl Iterator<Item = usize> {
        self.data_groups().filter(|group| self.takers(*group).next().is_some())
    }

    /// The groups that metadata alone lies on.
    pub(super) fn special_groups(&self) -> impl Iterator<Item = usize> {
        self.of_class(GroupClass::Special)
    }

    /// Whether a place is on one of these.
    pub(super) fn is_special(&self, place: &Place) -> bool {
        self.special_groups().any(|group| group == self.group_of(place))
    }

    /// The same of a device.
    pub(super) fn is_special_device(&self, device: u16) -> bool {
        self.standing(device).is_some_and(|own| self.special_groups().any(|group| group == own.group))
    }

    /// The devices that hold root records.
    pub(super) fn holding_roots(&self) -> Vec<u16> {
        if self.is_plain() {
            return (0..self.devices.len().min(ROOTS_WITHOUT) as u16).collect();
        }
        // Those of the group that is left when others have gone have them before that.
        let first = self.data_groups().next();
        let groups = first.into_iter().chain(self.taking_groups().next().filter(|group| Some(*group) != first));
        let count = |group: usize| ROOTS_IN_GROUP.max(self.parity(group) + 1);
        let own = groups.flat_map(|group| self.members(group).take(count(group)));
        own.flat_map(|(at, _)| self.holders(at as u16)).map(|(at, _)| at).collect()
    }

    /// What lies on one device before a row goes on to the next, bytes.
    pub(super) fn unit(&self, place: &Place) -> u64 {
        self.groups.get(self.group_of(place)).map_or(1 << crate::label::UNIT, |group| 1 << group.unit)
    }

    /// Across how many devices rows of a group lie at most, parity left out.
    fn widest(&self, group: usize, slot: u64) -> usize {
        let unit = self.groups.get(group).map_or(1, |group| 1usize << group.unit);
        let by_row = PIECE / unit;
        let by_length = (u64::from(LONGEST) / slot.max(1)) as usize;
        by_row.min(by_length).min(MOST_COLUMNS - self.parity(group)).max(1)
    }

    /// The longest segment there may be, bytes.
    pub(super) fn longest(&self, slot: u64) -> u64 {
        let width = |group: usize| match self.groups.get(group).map(|group| group.kind) {
            Some(GroupKind::RaidZ(parity)) => {
                self.takers(group).count().saturating_sub(usize::from(parity)).clamp(1, self.widest(group, slot))
            }
            _ => 1,
        };
        self.taking_groups().map(width).max().unwrap_or(1) as u64 * slot
    }

    /// How many devices a segment of a group takes at least.
    fn least(&self, group: usize) -> usize {
        let used = self.takers(group).filter(|(at, _)| self.is_used(*at as u16)).count();
        (self.parity(group) + 1).min(used)
    }

    /// Takes slots for a segment in one of these groups; `None` where there is no room.
    pub(super) fn take(
        &self,
        groups: impl Iterator<Item = usize>,
        slots: &mut Slots,
        slot: u64,
        stream: WriteStream,
        owner: u32,
        doubled: bool,
    ) -> Option<Place> {
        let mut groups: Vec<usize> = groups.collect();
        let share = |group: &usize| {
            let (free, all) = self.segments(slots, *group);
            std::cmp::Reverse(free * 1_000_000 / all.max(1))
        };
        groups.sort_by_key(share);
        groups.into_iter().find_map(|group| self.take_in(group, slots, slot, stream, owner, doubled))
    }

    fn take_in(
        &self,
        group: usize,
        slots: &mut Slots,
        slot: u64,
        stream: WriteStream,
        owner: u32,
        doubled: bool,
    ) -> Option<Place> {
        let parity = self.parity(group);
        if parity == 0 {
            let here = |device: usize| self.takers(group).any(|(at, _)| at == device && self.is_used(at as u16));
            let first = slots.take_among(&here, owner)?;
            let second = if doubled { slots.take_apart_among(&here, first, owner) } else { None };
            return Some(std::iter::once(first).chain(second).collect::<Vec<_>>().into());
        }
        let mut with_room: Vec<(usize, u64)> = self
            .takers(group)
            .filter(|(at, _)| self.is_used(*at as u16))
            .map(|(at, _)| (at, slots.of_device(at).1))
            .filter(|(_, free)| *free > 0)
            .collect();
        let least = self.least(group);
        if with_room.len() < least || least == 0 {
            return None;
        }
        // Those with the most room; among equals another one first each time, so that parity and the
        // first copies lie on all of them in turn.
        let turn = owner as usize % with_room.len();
        with_room.rotate_left(turn);
        with_room.sort_by_key(|(_, free)| std::cmp::Reverse(*free));
        with_room.truncate(self.columns(group, slot, stream));
        let turn = owner as usize % with_room.len();
        with_room.rotate_left(turn);
        let columns: Vec<SlotAddress> = with_room.iter().filter_map(|(at, _)| slots.take_of(*at, owner)).collect();
        let rows = columns.len() > parity + 1;
        Some(if rows { Place::of_rows(columns, parity as u8) } else { columns.into() })
    }

    /// In how many columns a segment of a group lies at most: copies, or rows with parity.
    pub(super) fn columns(&self, group: usize, slot: u64, stream: WriteStream) -> usize {
        let parity = self.parity(group);
        let is_rows = matches!(self.groups.get(group).map(|group| group.kind), Some(GroupKind::RaidZ(_)));
        if !is_rows || stream.is_metadata() { parity + 1 } else { self.widest(group, slot) + parity }
    }

    fn counts(&self, slots: &Slots, group: usize) -> Counts {
        let all = self.takers(group).map(|(at, _)| slots.of_device(at).0).collect();
        let used = self.takers(group).filter(|(at, _)| self.is_used(*at as u16));
        Counts { all, free: used.map(|(at, _)| slots.of_device(at).1).collect() }
    }

    /// How many segments of a group there are room for: free, and in all.
    pub(super) fn segments(&self, slots: &Slots, group: usize) -> (u64, u64) {
        let Counts { all, free } = self.counts(slots, group);
        let parity = self.parity(group);
        (segments(&free, self.least(group), parity), segments(&all, (parity + 1).min(all.len()), parity))
    }

    /// The same of several groups together.
    pub(super) fn segments_of(&self, groups: impl Iterator<Item = usize>, slots: &Slots) -> (u64, u64) {
        let each = groups.map(|group| self.segments(slots, group));
        each.fold((0, 0), |(free, all), (more_free, more)| (free + more_free, all + more))
    }

    /// How many segments of all groups there are room for, where nothing lies but these slots of each
    /// device.
    pub(super) fn segments_without(&self, slots: &Slots, taken: &dyn Fn(usize) -> u64) -> u64 {
        let of = |group: usize| {
            let left: Vec<u64> =
                self.takers(group).map(|(at, _)| slots.of_device(at).0.saturating_sub(taken(at))).collect();
            let parity = self.parity(group);
            segments(&left, (parity + 1).min(left.len()), parity)
        };
        self.taking_groups().map(of).sum()
    }

    /// What file content can take of these slots of a group's devices, in slots.
    fn usable(&self, counts: &[u64], group: usize, slot: u64) -> u64 {
        let parity = self.parity(group);
        if parity == 0 {
            return counts.iter().sum();
        }
        let least = (parity + 1).min(counts.len());
        let number = segments(counts, least, parity);
        let taken: u64 = counts.iter().map(|count| *count.min(&number)).sum();
        let parity = least.saturating_sub(1) as u64;
        let widest = self.widest(group, slot) as u64;
        if (counts.len() as u64) <= widest + parity {
            return taken.saturating_sub(number * parity);
        }
        // No wider than rows may be, they lie on some of the devices in turn.
        let fits =
            |number: u64| counts.iter().map(|count| *count.min(&number)).sum::<u64>() >= number * (widest + parity);
        let (mut fit, mut much) = (0, taken / (widest + parity) + 1);
        while much - fit > 1 {
            let middle = fit + (much - fit) / 2;
            if fits(middle) { fit = middle } else { much = middle }
        }
        fit * widest
    }

    /// The same of all slots and of the free ones, all groups together; `taken` slots of each device
    /// do not count.
    pub(super) fn usable_slots(&self, slots: &Slots, slot: u64, taken: &dyn Fn(usize) -> u64) -> (u64, u64) {
        let of = |group: usize| {
            let all: Vec<u64> =
                self.takers(group).map(|(at, _)| slots.of_device(at).0.saturating_sub(taken(at))).collect();
            (self.usable(&all, group, slot), self.usable(&self.counts(slots, group).free, group, slot))
        };
        self.taking_groups().map(of).fold((0, 0), |(all, free), (more, more_free)| (all + more, free + more_free))
    }

    /// What so many bytes at a place take of what file content can have.
    pub(super) fn cost(&self, place: &Place, bytes: u64) -> u64 {
        if self.is_plain() {
            return bytes * place.len().max(1) as u64;
        }
        if self.is_special(place) {
            return 0;
        }
        // What lay on a device that was removed takes nothing.
        let there = place.iter().filter(|slot| self.standing(slot.device).is_some_and(Standing::is_own)).count();
        let raw = u128::from(bytes) * there.max(1) as u128 / place.width() as u128;
        let (usable, total) = self.ratios.get(self.group_of(place)).copied().unwrap_or((1, 1));
        (raw * u128::from(usable) / u128::from(total.max(1))) as u64
    }

    /// What so many bytes of metadata take of that, on the group where they take most.
    pub(super) fn cost_of_metadata(&self, bytes: u64) -> u64 {
        let of = |group: usize| {
            let (usable, total) = self.ratios.get(group).copied().unwrap_or((1, 1));
            let copies = (self.parity(group) + 1).max(2) as u128;
            (u128::from(bytes) * copies * u128::from(usable) / u128::from(total.max(1))) as u64
        };
        self.taking_groups().map(of).max().unwrap_or(0).max(bytes)
    }

    /// Whether a device is one of a group.
    pub(super) fn is_in(&self, group: usize, device: u16) -> bool {
        self.standing(device).is_some_and(|own| own.group == group)
    }

    /// Whether what lies at a place has less redundancy left than its group: it was written while
    /// others of its devices were missing than are now.
    pub(super) fn is_weak(&self, place: &Place) -> bool {
        self.is_weaker(place, self.tolerance(self.group_of(place)))
    }

    /// The same, where so many devices of its group may be lost.
    pub(super) fn is_weaker(&self, place: &Place, losses: usize) -> bool {
        let group = self.group_of(place);
        let unused = self.members(group).filter(|(at, _)| !self.is_used(*at as u16)).count();
        let wanted = losses.saturating_sub(unused);
        // A second copy that lies in another group may be lost with as many devices of that one.
        let counts = |device: &u16| self.is_used(*device) && self.is_in(group, *device);
        let mut there: Vec<u16> = place.iter().map(|slot| slot.device).filter(counts).collect();
        there.sort_unstable();
        there.dedup();
        there.len().saturating_sub(place.width()) < wanted
    }

    /// The place with a copy on each device of its mirror that may lack something and has none; `None`
    /// where there is nothing to be added, or no room for it. A segment that lies twice on one device
    /// stays as it is.
    pub(super) fn widened(&self, place: &Place, slots: &mut Slots, owner: u32) -> Option<Place> {
        let lacking: Vec<usize> = self.lacks_copies(place).collect();
        let roomy = lacking.iter().all(|at| slots.of_device(*at).1 > 0);
        let mut columns = place.to_vec();
        columns.extend(lacking.iter().filter(|_| roomy).filter_map(|at| slots.take_of(*at, owner)));
        let widened = Place::from(columns);
        if widened.len() > place.len() && widened.is_possible() {
            return Some(widened);
        }
        widened.iter().skip(place.len()).for_each(|slot| slots.release(*slot));
        None
    }

    /// The devices of a place's mirror that may lack something and have no copy of what lies there.
    pub(super) fn lacks_copies(&self, place: &Place) -> impl Iterator<Item = usize> {
        let group = self.group_of(place);
        let kind = self.groups.get(group).map(|group| group.kind);
        let mirrored = place.parity() == 0 && kind == Some(GroupKind::Mirror);
        let has = move |device: usize| place.iter().any(|slot| usize::from(slot.device) == device);
        let lacks = move |at: usize| mirrored && !has(at) && self.is_used(at as u16) && !self.is_whole(at as u16);
        self.members(group).map(|(at, _)| at).filter(move |at| lacks(*at))
    }
}

/// How many segments can be begun on devices with so many free slots, each of which takes at least so
/// many devices: as many as the last of these has slots.
fn segments(free: &[u64], least: usize, parity: usize) -> u64 {
    if parity == 0 {
        return free.iter().sum();
    }
    let mut sorted = free.to_vec();
    sorted.sort_unstable_by_key(|free| std::cmp::Reverse(*free));
    least.checked_sub(1).and_then(|last| sorted.get(last)).copied().unwrap_or(0)
}
