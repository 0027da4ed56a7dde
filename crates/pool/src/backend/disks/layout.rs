//! The groups of devices, the state of each device, and the allocation that follows from them: which devices take a
//! new segment, how wide it is, how much space there is.
//!
//! Callers: the backend of devices. Pure: it knows numbers of devices and of slots, but no devices.
//!
//! Invariants:
//! - Columns of a location are on different devices of one group.
//! - A segment has the full parity of its group if enough devices are present for that; it is narrower
//!   where fewer devices are present or have free slots.
//! - A group is whole as long as no more of its devices are missing or stale than it has parity.
//! - A replacing or spare device holds the same bytes in the same slots as its original: a location
//!   names the original, and the column is whole as long as one device of the pair is.

use crate::frames::WriteStream;
use crate::label::{
    Group, GroupClass, GroupKind, MOST_COLUMNS, MemberRole, MemberStatus, Place, ShapeChange, SlotAddress,
};
use crate::segment::stream::PIECE;
use crate::segment::table::LONGEST;

use super::slots::Slots;

/// Number of devices of a group that hold root records, at most; but always one more than may be lost.
const ROOTS_IN_GROUP: usize = 8;
/// Number of devices that hold root records in a pool without groups, at most.
const ROOTS_WITHOUT: usize = 3;

/// State of a device in its group.
#[derive(Clone, Copy, Debug)]
pub(super) struct Standing {
    pub(super) group: usize,
    pub(super) role: MemberRole,
    pub(super) status: MemberStatus,
    /// Whether the device may lack data.
    pub(super) stale: bool,
    /// Whether the device is missing: not opened by this process.
    pub(super) absent: bool,
}

impl Standing {
    /// Whether the device is usable for reads and writes.
    pub(super) fn works(&self) -> bool {
        self.status == MemberStatus::Online && !self.absent
    }

    /// Whether the device has all the data that it should have.
    pub(super) fn has_all(&self) -> bool {
        self.works() && !self.stale
    }

    /// Whether segment locations name this device: it is neither a spare nor a replacing device.
    pub(super) fn is_own(&self) -> bool {
        self.role == MemberRole::Own && self.status.belongs()
    }
}

/// All groups and devices of a pool.
#[derive(Clone, Debug, Default)]
pub(super) struct Layout {
    /// Empty in a pool without groups.
    pub(super) groups: Vec<Group>,
    pub(super) devices: Vec<Standing>,
    /// The topology change that is in progress.
    pub(super) change: Option<ShapeChange>,
    /// For each group, the number of slots usable for file content, and of all slots.
    ratios: Vec<(u64, u64)>,
    /// Whether any replacing or active spare device exists.
    pairs: bool,
}

/// Slots of the devices of a group, and how many of them are free.
struct Counts {
    all: Vec<u64>,
    free: Vec<u64>,
}

impl Layout {
    /// Whether the pool has no groups.
    pub(super) fn is_plain(&self) -> bool {
        self.groups.is_empty()
    }

    /// Layout of a pool with these groups and device states.
    pub(super) fn new(groups: Vec<Group>, devices: Vec<Standing>, change: Option<ShapeChange>) -> Self {
        let mut layout = Self { groups, devices, change, ..Self::default() };
        layout.pair();
        layout
    }

    /// Updates whether any replacing or active spare device exists.
    fn pair(&mut self) {
        self.pairs = self.devices.iter().any(|device| device.status.belongs() && device.role.beside().is_some());
    }

    /// Updates the ratios after devices or slots have changed.
    pub(super) fn measure(&mut self, slots: &Slots, slot: u64) {
        self.pair();
        let ratio = |group: usize| {
            let mut all = self.counts(slots, group).all;
            if all.is_empty() {
                // Segments on leaving devices count as before.
                all = self.members(group).map(|(at, _)| slots.of_device(at).0).collect();
            }
            (self.usable(&all, group, slot), all.iter().sum::<u64>())
        };
        self.ratios = (0..self.groups.len()).map(ratio).collect();
    }

    /// Group of a location: that of its first device that still belongs to the pool.
    pub(super) fn group_of(&self, place: &Place) -> usize {
        let standings = || place.iter().filter_map(|slot| self.standing(slot.device));
        standings().find(|standing| standing.is_own()).or(standings().next()).map_or(0, |standing| standing.group)
    }

    /// Lane of a location: segments of different lanes are on different devices, except for second copies of
    /// metadata.
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

    /// Whether a device is being removed: no new segments go to it.
    pub(super) fn is_leaving(&self, device: usize) -> bool {
        self.change.as_ref().is_some_and(|change| change.leaving.iter().any(|one| usize::from(*one) == device))
    }

    /// Whether a topology change of this group is in progress.
    pub(super) fn is_changing(&self, group: usize) -> bool {
        self.change.as_ref().is_some_and(|change| usize::from(change.group) == group)
    }

    /// The devices of a group that take new segments.
    pub(super) fn takers(&self, group: usize) -> impl Iterator<Item = (usize, &Standing)> {
        self.members(group).filter(|(at, _)| !self.is_leaving(*at))
    }

    /// The device that this one replaces or stands in for, or itself.
    pub(super) fn number_of(&self, device: u16) -> u16 {
        self.standing(device).and_then(|standing| standing.role.beside()).unwrap_or(device)
    }

    /// The devices that hold the content of this number: the device itself, and its replacing and spare devices.
    pub(super) fn holders(&self, device: u16) -> impl Iterator<Item = (u16, &Standing)> {
        let others = if self.pairs { self.devices.as_slice() } else { &[] };
        let beside = others
            .iter()
            .enumerate()
            .filter(move |(_, standing)| standing.status.belongs() && standing.role.beside() == Some(device));
        let itself = self.standing(device).filter(|standing| standing.status.belongs());
        itself.map(|standing| (device, standing)).into_iter().chain(beside.map(|(at, standing)| (at as u16, standing)))
    }

    /// Changes the kind of a group.
    pub(super) fn set_kind(&mut self, group: usize, kind: GroupKind) {
        if let Some(group) = self.groups.get_mut(group) {
            group.kind = kind;
        }
    }

    /// Moves a device, with its replacing and spare devices, to a group.
    pub(super) fn move_to(&mut self, device: u16, group: usize) {
        let holders: Vec<u16> = self.holders(device).map(|(at, _)| at).collect();
        for at in holders {
            if let Some(standing) = self.devices.get_mut(usize::from(at)) {
                standing.group = group;
            }
        }
    }

    /// Vacates a device number: no device has it, and no segment is stored under it.
    pub(super) fn vacate(&mut self, device: u16) {
        if let Some(standing) = self.devices.get_mut(usize::from(device)) {
            *standing =
                Standing { group: 0, role: MemberRole::Own, status: MemberStatus::Removed, stale: false, absent: true };
        }
    }

    /// Whether any replacing or active spare device exists.
    pub(super) fn has_pairs(&self) -> bool {
        self.pairs
    }

    pub(super) fn standing(&self, device: u16) -> Option<&Standing> {
        self.devices.get(usize::from(device))
    }

    /// Whether this number is readable and writable: on the device itself or on another one of its pair.
    pub(super) fn is_used(&self, device: u16) -> bool {
        self.is_plain() || self.holders(device).any(|(_, standing)| standing.works())
    }

    /// Whether a device of this number's pair has all its data.
    pub(super) fn is_whole(&self, device: u16) -> bool {
        self.is_plain() || self.holders(device).any(|(_, standing)| standing.has_all())
    }

    /// Whether this very device has all its data.
    pub(super) fn has_all(&self, device: u16) -> bool {
        self.is_plain() || self.standing(device).is_some_and(Standing::has_all)
    }

    /// Whether this very device is usable for reads and writes.
    pub(super) fn works(&self, device: u16) -> bool {
        self.is_plain() || self.standing(device).is_some_and(Standing::works)
    }

    /// Number of devices of a group that new segments can lose.
    pub(super) fn parity(&self, group: usize) -> usize {
        match self.groups.get(group).map(|group| group.kind) {
            Some(GroupKind::Mirror) => self.members(group).count().saturating_sub(1),
            Some(GroupKind::RaidZ(parity)) => usize::from(parity),
            Some(GroupKind::Plain) | None => 0,
        }
    }

    /// Number of devices that a group can lose.
    pub(super) fn tolerance(&self, group: usize) -> usize {
        let changing = self.change.as_ref().filter(|_| self.is_changing(group));
        changing.map_or(usize::MAX, |change| usize::from(change.tolerance)).min(self.parity(group))
    }

    /// Number of devices of a group that are missing or lack data.
    pub(super) fn lacking(&self, group: usize) -> usize {
        self.members(group).filter(|(at, _)| !self.is_whole(*at as u16)).count()
    }

    /// Whether a device can be lost without losing data.
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

    /// Whether a device has no redundancy except for second copies of metadata.
    pub(super) fn is_single(&self, device: u16) -> bool {
        let alone = |standing: &Standing| standing.is_own() && self.tolerance(standing.group) == 0;
        self.is_plain() || self.standing(device).is_some_and(alone) && self.holders(device).count() < 2
    }

    /// Whether a group consists of dedicated log devices.
    pub(super) fn is_log(&self, group: usize) -> bool {
        self.groups.get(group).is_some_and(|group| group.class == GroupClass::Log)
    }

    /// Whether a device is a dedicated log device.
    pub(super) fn is_log_device(&self, device: u16) -> bool {
        self.standing(self.number_of(device)).is_some_and(|standing| self.is_log(standing.group))
    }

    fn of_class(&self, class: GroupClass) -> impl Iterator<Item = usize> {
        (0..).zip(&self.groups).filter(move |(_, group)| group.class == class).map(|(number, _)| number)
    }

    /// The groups of the normal class, which take segments of every stream.
    pub(super) fn data_groups(&self) -> impl Iterator<Item = usize> {
        self.of_class(GroupClass::Data).filter(|group| self.members(*group).next().is_some())
    }

    /// The data groups that take new segments.
    pub(super) fn taking_groups(&self) -> impl Iterator<Item = usize> {
        self.data_groups().filter(|group| self.takers(*group).next().is_some())
    }

    /// The groups of the special class, which take metadata only.
    pub(super) fn special_groups(&self) -> impl Iterator<Item = usize> {
        self.of_class(GroupClass::Special)
    }

    /// Whether a location is in a group of the special class.
    pub(super) fn is_special(&self, place: &Place) -> bool {
        self.special_groups().any(|group| group == self.group_of(place))
    }

    /// Whether a device is in a group of the special class.
    pub(super) fn is_special_device(&self, device: u16) -> bool {
        self.standing(device).is_some_and(|own| self.special_groups().any(|group| group == own.group))
    }

    /// The devices that hold root records.
    pub(super) fn holding_roots(&self) -> Vec<u16> {
        if self.is_plain() {
            return (0..self.devices.len().min(ROOTS_WITHOUT) as u16).collect();
        }
        // The group that remains after a removal gets root records before the others leave.
        let first = self.data_groups().next();
        let groups = first.into_iter().chain(self.taking_groups().next().filter(|group| Some(*group) != first));
        let count = |group: usize| ROOTS_IN_GROUP.max(self.parity(group) + 1);
        let own = groups.flat_map(|group| self.members(group).take(count(group)));
        own.flat_map(|(at, _)| self.holders(at as u16)).map(|(at, _)| at).collect()
    }

    /// Stripe unit: bytes on one device before a row continues on the next.
    pub(super) fn unit(&self, place: &Place) -> u64 {
        self.groups.get(self.group_of(place)).map_or(1 << crate::label::UNIT, |group| 1 << group.unit)
    }

    /// Maximum number of data columns of a group's rows.
    fn widest(&self, group: usize, slot: u64) -> usize {
        let unit = self.groups.get(group).map_or(1, |group| 1usize << group.unit);
        let by_row = PIECE / unit;
        let by_length = (u64::from(LONGEST) / slot.max(1)) as usize;
        by_row.min(by_length).min(MOST_COLUMNS - self.parity(group)).max(1)
    }

    /// Length of the longest possible segment, bytes.
    pub(super) fn longest(&self, slot: u64) -> u64 {
        let width = |group: usize| match self.groups.get(group).map(|group| group.kind) {
            Some(GroupKind::RaidZ(parity)) => {
                self.takers(group).count().saturating_sub(usize::from(parity)).clamp(1, self.widest(group, slot))
            }
            _ => 1,
        };
        self.taking_groups().map(width).max().unwrap_or(1) as u64 * slot
    }

    /// Minimum number of devices that a segment of a group takes.
    fn least(&self, group: usize) -> usize {
        let used = self.takers(group).filter(|(at, _)| self.is_used(*at as u16)).count();
        (self.parity(group) + 1).min(used)
    }

    /// Allocates slots for a segment in one of these groups, the emptiest first; `None` where there is no space.
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
        // The devices with the most free slots; the order of equals rotates with the segment number, so that parity
        // and first copies are spread over all of them.
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

    /// Maximum number of columns of a group's segment: copies, or rows with parity.
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

    /// Number of segments that fit into a group: into its free slots, and in all.
    pub(super) fn segments(&self, slots: &Slots, group: usize) -> (u64, u64) {
        let Counts { all, free } = self.counts(slots, group);
        let parity = self.parity(group);
        (segments(&free, self.least(group), parity), segments(&all, (parity + 1).min(all.len()), parity))
    }

    /// Number of segments that fit into several groups: into the free slots, and in all.
    pub(super) fn segments_of(&self, groups: impl Iterator<Item = usize>, slots: &Slots) -> (u64, u64) {
        let each = groups.map(|group| self.segments(slots, group));
        each.fold((0, 0), |(free, all), (more_free, more)| (free + more_free, all + more))
    }

    /// Number of segments that fit into all groups where `taken` slots of each device are used otherwise.
    pub(super) fn segments_without(&self, slots: &Slots, taken: &dyn Fn(usize) -> u64) -> u64 {
        let of = |group: usize| {
            let left: Vec<u64> =
                self.takers(group).map(|(at, _)| slots.of_device(at).0.saturating_sub(taken(at))).collect();
            let parity = self.parity(group);
            segments(&left, (parity + 1).min(left.len()), parity)
        };
        self.taking_groups().map(of).sum()
    }

    /// Number of slots usable for file content, given the slots of a group's devices.
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
        // Where rows are narrower than the group, they rotate over the devices.
        let fits =
            |number: u64| counts.iter().map(|count| *count.min(&number)).sum::<u64>() >= number * (widest + parity);
        let (mut fit, mut much) = (0, taken / (widest + parity) + 1);
        while much - fit > 1 {
            let middle = fit + (much - fit) / 2;
            if fits(middle) { fit = middle } else { much = middle }
        }
        fit * widest
    }

    /// Number of slots usable for file content, of all and of the free ones, summed over the groups; `taken` slots of
    /// each device do not count.
    pub(super) fn usable_slots(&self, slots: &Slots, slot: u64, taken: &dyn Fn(usize) -> u64) -> (u64, u64) {
        let of = |group: usize| {
            let all: Vec<u64> =
                self.takers(group).map(|(at, _)| slots.of_device(at).0.saturating_sub(taken(at))).collect();
            (self.usable(&all, group, slot), self.usable(&self.counts(slots, group).free, group, slot))
        };
        self.taking_groups().map(of).fold((0, 0), |(all, free), (more, more_free)| (all + more, free + more_free))
    }

    /// How much of the capacity for file content a number of bytes at a location uses.
    pub(super) fn cost(&self, place: &Place, bytes: u64) -> u64 {
        if self.is_plain() {
            return bytes * place.len().max(1) as u64;
        }
        if self.is_special(place) {
            return 0;
        }
        // Columns on removed devices use nothing.
        let there = place.iter().filter(|slot| self.standing(slot.device).is_some_and(Standing::is_own)).count();
        let raw = u128::from(bytes) * there.max(1) as u128 / place.width() as u128;
        let (usable, total) = self.ratios.get(self.group_of(place)).copied().unwrap_or((1, 1));
        (raw * u128::from(usable) / u128::from(total.max(1))) as u64
    }

    /// Capacity for file content that a number of metadata bytes uses, in the group where it is most.
    pub(super) fn cost_of_metadata(&self, bytes: u64) -> u64 {
        let of = |group: usize| {
            let (usable, total) = self.ratios.get(group).copied().unwrap_or((1, 1));
            let copies = (self.parity(group) + 1).max(2) as u128;
            (u128::from(bytes) * copies * u128::from(usable) / u128::from(total.max(1))) as u64
        };
        self.taking_groups().map(of).max().unwrap_or(0).max(bytes)
    }

    /// Whether a device belongs to a group.
    pub(super) fn is_in(&self, group: usize, device: u16) -> bool {
        self.standing(device).is_some_and(|own| own.group == group)
    }

    /// Whether a location has less redundancy than its group allows now: it was written while other devices of the
    /// group were missing than now.
    pub(super) fn is_weak(&self, place: &Place) -> bool {
        self.is_weaker(place, self.tolerance(self.group_of(place)))
    }

    /// Whether a location has less redundancy than it needs to lose `losses` devices of its group, of which the devices
    /// missing now count as lost already.
    pub(super) fn is_weaker(&self, place: &Place, losses: usize) -> bool {
        let group = self.group_of(place);
        let unused = self.members(group).filter(|(at, _)| !self.is_used(*at as u16)).count();
        let wanted = losses.saturating_sub(unused);
        // A second copy in another group does not count: it depends on the devices of that group.
        let counts = |device: &u16| self.is_used(*device) && self.is_in(group, *device);
        let mut there: Vec<u16> = place.iter().map(|slot| slot.device).filter(counts).collect();
        there.sort_unstable();
        there.dedup();
        there.len().saturating_sub(place.width()) < wanted
    }

    /// The location with a new copy on each stale device of its mirror that has none; `None` where there is nothing
    /// to add or no free slot. A segment with two copies on one device stays as it is.
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

    /// The stale devices of a location's mirror that have no copy of the segment.
    pub(super) fn lacks_copies(&self, place: &Place) -> impl Iterator<Item = usize> {
        let group = self.group_of(place);
        let kind = self.groups.get(group).map(|group| group.kind);
        let mirrored = place.parity() == 0 && kind == Some(GroupKind::Mirror);
        let has = move |device: usize| place.iter().any(|slot| usize::from(slot.device) == device);
        let lacks = move |at: usize| mirrored && !has(at) && self.is_used(at as u16) && !self.is_whole(at as u16);
        self.members(group).map(|(at, _)| at).filter(move |at| lacks(*at))
    }
}

/// Number of segments that can be allocated on devices with these free slots, where each takes at least `least`
/// devices: the number of slots of the device at that rank.
fn segments(free: &[u64], least: usize, parity: usize) -> u64 {
    if parity == 0 {
        return free.iter().sum();
    }
    let mut sorted = free.to_vec();
    sorted.sort_unstable_by_key(|free| std::cmp::Reverse(*free));
    least.checked_sub(1).and_then(|last| sorted.get(last)).copied().unwrap_or(0)
}
