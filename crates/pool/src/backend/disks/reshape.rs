//! Changes of shape: devices and whole groups that leave, groups of rows that become wider or narrower,
//! groups that become others. What lies as it did before is moved by the store meanwhile.
//!
//! Caller: the store ([`crate::store`], `reshape.rs`). Invariants:
//! - One change at a time. The labels tell of it before the first root with anything that lies in the
//!   new shape, and until no kept root has anything in the old one.
//! - Of a group that becomes another, no more devices are done without than both shapes allow.
//! - New devices have labels before those of others count on them.
//! - A device leaves when nothing that any kept root names lies on it.

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

/// What a group is to become, or what is to leave it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewShape {
    /// What the change makes of the pool.
    pub kind: ChangeKind,
    /// The group.
    pub group: usize,
    /// Its kind from now on.
    pub becomes: GroupKind,
    /// Devices that leave.
    pub leaving: Vec<u16>,
    /// How many new devices come to it.
    pub coming: usize,
}

/// Tells, while no segment can begin, the number of the next one.
pub type AtOnce<'a> = &'a dyn Fn(&mut dyn FnMut(u32));

impl Disks {
    /// The change of shape that is under way.
    #[must_use]
    pub fn shape_change(&self) -> Option<ShapeChange> {
        self.layout().change.clone()
    }

    /// The kind of a group.
    #[must_use]
    pub fn kind_of(&self, group: usize) -> GroupKind {
        self.layout().groups.get(group).map_or(GroupKind::Plain, |group| group.kind)
    }

    /// What the removal of these devices makes of the pool: all of a group, some of a group of rows, or
    /// some that are each for themselves.
    ///
    /// # Errors
    /// [`PoolError::Refused`] where the others could not be without them.
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

    /// Whether a change can begin; what is wrong with it otherwise.
    ///
    /// # Errors
    /// [`PoolError::Refused`].
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
        // The intent log has as many copies there as may be lost, and one more.
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

    /// The room there would be after a change, where the devices that come are so long.
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
        // Copies of the log that are still to be made.
        let lasting = self.log_runs().iter().any(|(first, _)| !then.is_leaving(usize::from(first.device)));
        let most = u64::from(self.log_slots()) * self.slot;
        room.size = room.size.saturating_sub(if lasting { 0 } else { most });
        room
    }

    /// How many devices of a group could be lost now, meanwhile and after a change of it.
    #[must_use]
    pub fn redundancy(&self, new: &NewShape) -> (usize, usize, usize) {
        let layout = self.layout();
        let then = self.layout_after(&layout, new);
        (layout.tolerance(new.group), then.tolerance(new.group), then.parity(new.group))
    }

    /// What so many bytes of metadata take of what file content can have, with all their copies, where they
    /// lie on the groups that segments of every stream lie on.
    #[must_use]
    pub fn cost_of_metadata(&self, bytes: u64) -> u64 {
        self.layout().cost_of_metadata(bytes)
    }

    /// Whether a group is for metadata alone.
    #[must_use]
    pub fn is_special_group(&self, group: usize) -> bool {
        self.layout().special_groups().any(|special| special == group)
    }

    /// The groups as they are after a change has begun; devices that come have numbers behind the others.
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

    /// Begins a change. The new devices have these numbers.
    ///
    /// # Errors
    /// [`PoolError::Refused`]: nothing has changed; those of writing labels.
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
        // Refused before anything is done.
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

    /// Devices have the newest root records before labels say that they hold such: with older ones they
    /// would be taken for devices that were not there.
    fn guard_before_labels(&self) -> Result<()> {
        self.guard_rings().map(drop)
    }

    /// Gives a change up: what has moved stays where it is, devices that were to leave stay.
    ///
    /// # Errors
    /// [`PoolError::Refused`] where there is none, or where the old shape is not there any more; those of
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

    /// Ends a change: nothing lies as it did before. Answers the devices that have left: their labels may
    /// be cleared.
    ///
    /// # Errors
    /// Those of writing labels.
    pub fn end_change(&self) -> Result<Devices> {
        let Some(change) = self.shape_change() else { return Ok(Devices::new()) };
        let layout = self.layout();
        for device in &change.leaving {
            for (beside, other) in layout.holders(*device) {
                match other.role {
                    MemberRole::SpareFor(_) => self.give_back(beside)?,
                    // Nobody needs what it was to have.
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

    /// Whether a segment lies as it did before the change that is under way.
    #[must_use]
    pub fn is_misplaced(&self, at: SegmentAt<'_>, stream: WriteStream) -> bool {
        let layout = self.layout();
        layout.change.as_ref().is_some_and(|change| self.is_misplaced_by(&layout, change, at, stream))
    }

    /// Tells of segments whether they would have to be moved for a change.
    pub fn moved_by(&self, new: &NewShape) -> impl Fn(SegmentAt<'_>, WriteStream) -> bool {
        let then = self.layout_after(&self.layout(), new);
        let change = ShapeChange { before: u32::MAX, ..change_of(new, 0, 0) };
        move |at, stream| self.is_misplaced_by(&then, &change, at, stream)
    }

    /// A device that has left belongs to no pool.
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
        // What was written meanwhile while a device was missing may have too little for the new kind.
        at.segment < change.before && !fits(layout, group, self.slot, at.place, stream)
            || layout.is_weaker(at.place, layout.parity(group))
    }

    /// How full devices and groups are where so many bytes live on each device: the fullest and the emptiest
    /// of those that new segments go to.
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

/// How full a device or group is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Evenness {
    /// What lives on it, as a part of all of it, thousandths.
    pub taken: u64,
    /// All slots.
    pub slots: u64,
    /// Its devices.
    pub devices: Vec<u16>,
}

/// Whether a place is as a segment of a group would lie now.
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

/// Groups that hold something else than segments of every stream do not become others.
fn check_class(layout: &Layout, group: usize, kind: ChangeKind) -> Result<()> {
    match layout.groups.get(group).map(|group| group.class) {
        Some(GroupClass::Special) if kind != ChangeKind::Removal => {
            refused("groups for metadata do not become others: remove them, and add others")
        }
        Some(GroupClass::Log) => refused("groups for the log do not change: remove them"),
        Some(GroupClass::Special | GroupClass::Data) | None => Ok(()),
    }
}

/// A group that is becoming one of another kind may become yet another, such as what it was. What was
/// written since the first of these lies in neither shape, and no more devices may be lost than before.
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

/// What a change is called.
#[must_use]
pub fn name_of(kind: ChangeKind) -> &'static str {
    match kind {
        ChangeKind::Removal => "a removal",
        ChangeKind::Expansion => "an expansion",
        ChangeKind::Conversion => "a conversion",
    }
}
