//! Topology changes: removing devices and whole groups, widening or narrowing raidz groups, converting groups to
//! another kind. The store moves the segments that are stored in the old layout meanwhile.
//!
//! Caller: the store ([`crate::store`], `reshape.rs`). Invariants:
//! - One change at a time. The labels record it from before the first root with a segment in the new
//!   layout until no retained root has a segment in the old one.
//! - A group under conversion is degraded by no more devices than both layouts allow.
//! - New devices have labels before the labels of other devices count on them.
//! - A device leaves when no retained root names a segment on it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::beside::clear;
use super::layout::{Layout, Standing};
use super::members::{Missing, path_hint, vacate};
use super::{Devices, Disks, Result, SegmentAt, slots};
use crate::backend::Room;
use crate::device::Device;
use crate::error::PoolError;
use crate::frames::WriteStream;
use crate::label::{
    self, ChangeKind, GroupClass, GroupKind, Identity, Member, MemberRole, MemberState, MemberStatus, Place,
    ShapeChange,
};

fn refused<T>(why: impl Into<String>) -> Result<T> {
    Err(PoolError::Refused(why.into()))
}

/// A topology change of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewShape {
    /// Kind of change: removal, expansion or conversion.
    pub kind: ChangeKind,
    /// The group's number.
    pub group: usize,
    /// The group's kind after the change.
    pub becomes: GroupKind,
    /// Numbers of the devices that leave.
    pub leaving: Vec<u16>,
    /// Number of new devices.
    pub coming: usize,
}

/// Runs a function while no segment can be allocated, with the number of the next segment.
pub type AtOnce<'a> = &'a dyn Fn(&mut dyn FnMut(u32));

impl Disks {
    /// The topology change that is in progress.
    #[must_use]
    pub fn shape_change(&self) -> Option<ShapeChange> {
        self.layout().change.clone()
    }

    /// The kind of a group.
    #[must_use]
    pub fn kind_of(&self, group: usize) -> GroupKind {
        self.layout().groups.get(group).map_or(GroupKind::Plain, |group| group.kind)
    }

    /// Plans the removal of devices: all of a group, some of a raidz group, or some of a group without redundancy.
    ///
    /// # Errors
    /// [`PoolError::Refused`] where the remaining devices do not form a valid topology.
    pub fn without(&self, leaving: &[u16]) -> Result<NewShape> {
        let layout = self.layout();
        let group = match leaving.first().map(|first| (first, layout.standing(*first))) {
            Some((_, Some(own))) if own.is_own() => own.group,
            _ => return refused("no such device in pool"),
        };
        let same = |device: &u16| layout.standing(*device).is_some_and(|own| own.is_own() && own.group == group);
        check_class(&layout, group, ChangeKind::Removal)?;
        if !leaving.iter().all(same) {
            return refused("devices of several groups are removed one after the other");
        }
        if leaving.iter().any(|device| layout.holders(*device).count() > 1) {
            return refused("a device is being replaced, or a spare stands in for it: detach one of the two first");
        }
        let kind = layout.groups.get(group).map_or(GroupKind::Plain, |group| group.kind);
        let all = layout.members(group).count();
        if leaving.len() < all {
            match kind {
                GroupKind::Mirror => return refused("only whole mirrors can be removed: detach a device of one"),
                GroupKind::RaidZ(parity) if all - leaving.len() <= usize::from(parity) => {
                    return refused(format!("raidz{parity} needs {} devices at least", parity + 1));
                }
                GroupKind::Plain | GroupKind::RaidZ(_) => {}
            }
        } else if !layout.is_plain() && layout.taking_groups().all(|other| other == group) || layout.is_plain() {
            return refused("nothing would be left of the pool");
        }
        Ok(NewShape { kind: ChangeKind::Removal, group, becomes: kind, leaving: leaving.to_vec(), coming: 0 })
    }

    /// Checks whether a change can begin.
    ///
    /// # Errors
    /// [`PoolError::Refused`] with the reason.
    pub fn check_change(&self, new: &NewShape) -> Result<()> {
        let layout = self.layout();
        if let Some(change) = &layout.change
            && !is_another_conversion(change, new)
        {
            return refused(format!("{} is under way: wait for its end, or stop it", name_of(change.kind)));
        }
        check_class(&layout, new.group, new.kind)?;
        let count = (layout.members(new.group).count() + new.coming).saturating_sub(new.leaving.len());
        if count > label::MOST_COLUMNS {
            return refused("too many devices in a group");
        }
        if let GroupKind::RaidZ(parity) = new.becomes
            && new.leaving.len() < layout.members(new.group).count()
            && count <= usize::from(parity)
        {
            return refused(format!("raidz{parity} needs {} devices at least", parity + 1));
        }
        if new.becomes == GroupKind::Mirror && count < 2 && new.leaving.is_empty() {
            return refused("a mirror needs two devices at least");
        }
        let then = self.layout_after(&layout, new);
        if then.lacking(new.group) > then.tolerance(new.group).min(then.parity(new.group)) {
            return refused("too many devices of the group are missing");
        }
        // The intent log needs as many copies there as devices may be lost, and one more.
        let count = self.log_slots();
        let rooms = self.rooms.lock();
        let runs = self.log_runs();
        let lasts = |device: u16| !then.is_log_device(device) && !then.is_leaving(usize::from(device));
        let lasting: Vec<u16> = runs.iter().map(|(first, _)| first.device).filter(|device| lasts(*device)).collect();
        let group = lasting.first().and_then(|device| then.standing(*device)).map(|own| own.group);
        let Some(group) = group.or_else(|| then.taking_groups().next()) else {
            return refused("nothing would be left of the pool");
        };
        let fits = |at: usize| {
            lasting.contains(&(at as u16))
                || rooms.slots.free_run(at as u16, count).is_some()
                || at >= then.devices.len() - new.coming
        };
        let copies = then.takers(group).filter(|(at, _)| fits(*at)).count();
        if copies <= then.parity(group) {
            return refused(format!(
                "no {} MiB are free in one piece for the intent log on {} of the devices that stay",
                (u64::from(count) * self.slot) >> 20,
                then.parity(group) + 1
            ));
        }
        Ok(())
    }

    /// The space after a change, where new devices have these lengths.
    #[must_use]
    pub fn room_after(&self, new: &NewShape, lengths: &[u64]) -> Room {
        let layout = self.layout();
        let mut then = self.layout_after(&layout, new);
        let mut rooms = self.rooms.lock().clone();
        for (at, length) in (layout.devices.len()..).zip(lengths) {
            let count = slots::count(*length, self.slot);
            if at < rooms.slots.devices() { rooms.slots.grow(at, count) } else { rooms.slots.add_device(count) }
        }
        then.measure(&rooms.slots, self.slot);
        let mut room = self.room_in(&then, &rooms);
        // Space of log copies that are still to be created.
        let lasting = self.log_runs().iter().any(|(first, _)| !then.is_leaving(usize::from(first.device)));
        let most = u64::from(self.log_slots()) * self.slot;
        room.size = room.size.saturating_sub(if lasting { 0 } else { most });
        room
    }

    /// Number of devices that a group can lose: now, during a change, and after it.
    #[must_use]
    pub fn redundancy(&self, new: &NewShape) -> (usize, usize, usize) {
        let layout = self.layout();
        let then = self.layout_after(&layout, new);
        (layout.tolerance(new.group), then.tolerance(new.group), then.parity(new.group))
    }

    /// Capacity for file content that a number of metadata bytes uses with all copies, in the data groups.
    #[must_use]
    pub fn cost_of_metadata(&self, bytes: u64) -> u64 {
        self.layout().cost_of_metadata(bytes)
    }

    /// Whether a group is in the special class (metadata only).
    #[must_use]
    pub fn is_special_group(&self, group: usize) -> bool {
        self.layout().special_groups().any(|special| special == group)
    }

    /// The layout after a change has begun; new devices have the numbers after the existing ones.
    fn layout_after(&self, layout: &Layout, new: &NewShape) -> Layout {
        let mut then = layout.clone();
        if then.groups.is_empty() {
            then.groups.push(label::Group::new(GroupKind::Plain));
        }
        let standing = Standing {
            group: new.group,
            role: MemberRole::Own,
            status: MemberStatus::Online,
            stale: false,
            absent: false,
        };
        let before = then.tolerance(new.group);
        then.devices.extend(std::iter::repeat_n(standing, new.coming));
        then.set_kind(new.group, new.becomes);
        then.change = Some(change_of(new, 0, before));
        then
    }

    /// Begins a change. `guids` are the GUIDs of the new devices.
    ///
    /// # Errors
    /// [`PoolError::Refused`]: nothing has changed; errors of writing labels.
    pub fn begin_change(
        &self,
        new: &NewShape,
        devices: &[Arc<dyn Device>],
        guids: &[u64],
        at_once: AtOnce<'_>,
    ) -> Result<()> {
        self.check_change(new)?;
        let least = super::MINIMUM_DEVICE.max(self.slot + 2 * label::ENDS);
        if let Some(short) = devices.iter().find(|device| device.length() < least) {
            return refused(format!("{}: device is too small", short.name()));
        }
        if devices.len() != new.coming || guids.len() != new.coming {
            return refused("devices of another number");
        }
        self.form_groups();
        let first = self.identity().members.len();
        let mut joining = self.identity();
        if first + devices.len() > usize::from(u16::MAX) {
            return refused("too many devices");
        }
        for (device, guid) in devices.iter().zip(guids) {
            let status = MemberStatus::Joining;
            let state = MemberState { group: new.group as u8, status, ..MemberState::default() };
            let path = path_hint(&**device);
            joining.members.push(Member { guid: *guid, length: device.length(), path, state });
        }
        joining.incompatible |= Identity::SHAPES;
        joining.revision += 1;
        // Validated before anything is written.
        joining.check()?;
        self.enlist(devices, first, &joining)?;
        let coming = Standing {
            group: new.group,
            role: MemberRole::Own,
            status: MemberStatus::Online,
            stale: false,
            absent: false,
        };
        at_once(&mut |next| {
            self.change(|layout| {
                let before = layout.tolerance(new.group);
                layout.devices.extend(std::iter::repeat_n(coming, new.coming));
                layout.set_kind(new.group, new.becomes);
                layout.change = Some(change_of(new, next, before));
            });
        });
        self.changes.fetch_add(1, Ordering::AcqRel);
        self.unlabelled.store(true, Ordering::Release);
        self.guard_before_labels()?;
        self.write_identities(&joining)
    }

    /// Writes the newest root records to devices before the labels name them as holders of roots: with older ones
    /// they would be taken for devices that were missing for a while.
    fn guard_before_labels(&self) -> Result<()> {
        self.guard_rings().map(drop)
    }

    /// Cancels a change: moved segments stay where they are, and leaving devices stay.
    ///
    /// # Errors
    /// [`PoolError::Refused`] where no change is in progress, or where the old layout no longer exists; errors of
    /// writing labels.
    pub fn give_up_change(&self) -> Result<()> {
        match self.layout().change.as_ref().map(|change| change.kind) {
            None => return refused("there is no change of shape"),
            Some(ChangeKind::Conversion) => {
                return refused("a conversion is not stopped: pause it, or convert the group to what it was");
            }
            Some(ChangeKind::Removal | ChangeKind::Expansion) => {}
        }
        self.change(|layout| layout.change = None);
        self.relabel()
    }

    /// Completes a change, after no segment is stored in the old layout. Returns the devices that have left: their
    /// labels may be cleared.
    ///
    /// # Errors
    /// Errors of writing labels.
    pub fn end_change(&self) -> Result<Devices> {
        let Some(change) = self.shape_change() else { return Ok(Devices::new()) };
        let layout = self.layout();
        for device in &change.leaving {
            for (beside, other) in layout.holders(*device) {
                match other.role {
                    MemberRole::SpareFor(_) => self.give_back(beside)?,
                    // A replacement of a leaving device is obsolete.
                    MemberRole::Successor(_) => self.unseat(beside)?,
                    MemberRole::Own | MemberRole::Spare => {}
                }
            }
        }
        let left = change.leaving.iter().map(|number| self.device(*number)).collect::<Result<Devices>>()?;
        let mut identity = self.identity();
        for number in &change.leaving {
            if let Some(member) = identity.members.get_mut(usize::from(*number)) {
                vacate(member);
            }
        }
        self.change(|layout| {
            layout.change = None;
            change.leaving.iter().for_each(|number| layout.vacate(*number));
        });
        for (number, device) in change.leaving.iter().zip(&left) {
            self.set_device(*number, Arc::new(Missing { name: device.name().to_owned(), length: 0 }))?;
            self.unwiped.lock().remove(number);
        }
        {
            let mut rooms = self.rooms.lock();
            rooms.trimming.retain(|slot| !change.leaving.contains(&slot.device));
            change.leaving.iter().for_each(|number| rooms.slots.forget(usize::from(*number)));
        }
        self.change(|_| {});
        self.changes.fetch_add(1, Ordering::AcqRel);
        self.unlabelled.store(true, Ordering::Release);
        self.guard_before_labels()?;
        self.write_identities(&identity)?;
        Ok(left)
    }

    /// Whether a segment is stored in the layout before the change in progress.
    #[must_use]
    pub fn is_misplaced(&self, at: SegmentAt<'_>, stream: WriteStream) -> bool {
        let layout = self.layout();
        layout.change.as_ref().is_some_and(|change| self.is_misplaced_by(&layout, change, at, stream))
    }

    /// Returns a predicate: whether a segment would have to be moved for a change.
    pub fn moved_by(&self, new: &NewShape) -> impl Fn(SegmentAt<'_>, WriteStream) -> bool {
        let then = self.layout_after(&self.layout(), new);
        let change = ShapeChange { before: u32::MAX, ..change_of(new, 0, 0) };
        move |at, stream| self.is_misplaced_by(&then, &change, at, stream)
    }

    /// Clears the labels of a device that has left.
    pub fn clear_left(device: &dyn Device) {
        clear(device);
    }

    fn is_misplaced_by(&self, layout: &Layout, change: &ShapeChange, at: SegmentAt<'_>, stream: WriteStream) -> bool {
        let group = usize::from(change.group);
        if at.place.iter().any(|slot| change.leaving.contains(&slot.device)) {
            return true;
        }
        if change.kind == ChangeKind::Removal || layout.group_of(at.place) != group {
            return false;
        }
        // A segment written during the change while a device was missing may have too little redundancy for the new
        // kind.
        at.segment < change.before && !fits(layout, group, self.slot, at.place, stream)
            || layout.is_weaker(at.place, layout.parity(group))
    }

    /// How full the devices and groups are, given the live bytes on each device: the fullest and the emptiest of
    /// those that take new segments.
    #[must_use]
    pub fn evenness(&self, living: &BTreeMap<u16, u64>) -> Option<(Evenness, Evenness)> {
        let (rooms, layout) = (self.rooms.lock(), self.layout());
        let share = |devices: Vec<u16>| {
            let slots: u64 = devices.iter().map(|device| rooms.slots.of_device(usize::from(*device)).0).sum();
            let lives: u64 = devices.iter().filter_map(|device| living.get(device)).sum();
            Evenness { taken: lives * 1000 / (slots * self.slot).max(1), slots, devices }
        };
        let mut parts: Vec<Evenness> = Vec::new();
        if layout.is_plain() {
            parts.extend((0..layout.devices.len() as u16).map(|device| share(vec![device])));
        }
        for group in layout.taking_groups() {
            let takers: Vec<u16> = layout.takers(group).map(|(at, _)| at as u16).collect();
            match layout.groups.get(group).map(|group| group.kind) {
                Some(GroupKind::Plain) => parts.extend(takers.into_iter().map(|device| share(vec![device]))),
                _ => parts.push(share(takers)),
            }
        }
        let most = parts.iter().max_by_key(|part| part.taken)?.clone();
        let least = parts.iter().min_by_key(|part| part.taken)?.clone();
        Some((most, least))
    }
}

/// Fill level of a device or group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Evenness {
    /// Live bytes in thousandths of its capacity.
    pub taken: u64,
    /// Number of all its slots.
    pub slots: u64,
    /// Numbers of its devices.
    pub devices: Vec<u16>,
}

/// Whether a location is as a new segment of the group would be allocated now.
fn fits(layout: &Layout, group: usize, slot: u64, place: &Place, stream: WriteStream) -> bool {
    let takers = layout.takers(group).count();
    let columns = layout.columns(group, slot, stream).min(takers);
    let parity = layout.parity(group);
    let is_rows = !stream.is_metadata() && columns > parity + 1;
    if !place.iter().all(|slot| layout.is_in(group, slot.device)) {
        return false;
    }
    match layout.groups.get(group).map(|group| group.kind) {
        Some(GroupKind::RaidZ(_)) if is_rows => place.parity() == parity && place.len() >= columns,
        Some(GroupKind::RaidZ(_) | GroupKind::Mirror) => place.parity() == 0 && place.len() == columns,
        Some(GroupKind::Plain) | None => place.parity() == 0 && place.len() <= 2,
    }
}

/// Refuses changes of groups that hold metadata or the log only.
fn check_class(layout: &Layout, group: usize, kind: ChangeKind) -> Result<()> {
    match layout.groups.get(group).map(|group| group.class) {
        Some(GroupClass::Special) if kind != ChangeKind::Removal => {
            refused("groups for metadata do not become others: remove them, and add others")
        }
        Some(GroupClass::Log) => refused("groups for the log do not change: remove them"),
        Some(GroupClass::Special | GroupClass::Data) | None => Ok(()),
    }
}

/// Whether a conversion may follow the one in progress, such as back to the former kind. Segments written since the
/// first conversion are in neither layout, and no more devices may be lost than before it.
fn is_another_conversion(change: &ShapeChange, new: &NewShape) -> bool {
    let kinds = (change.kind, new.kind);
    kinds == (ChangeKind::Conversion, ChangeKind::Conversion) && usize::from(change.group) == new.group
}

fn change_of(new: &NewShape, before: u32, tolerance: usize) -> ShapeChange {
    ShapeChange {
        kind: new.kind,
        group: new.group as u8,
        before,
        tolerance: tolerance.min(usize::from(u8::MAX)) as u8,
        leaving: new.leaving.clone(),
    }
}

/// Name of a kind of change, for messages.
#[must_use]
pub fn name_of(kind: ChangeKind) -> &'static str {
    match kind {
        ChangeKind::Removal => "a removal",
        ChangeKind::Expansion => "an expansion",
        ChangeKind::Conversion => "a conversion",
    }
}
