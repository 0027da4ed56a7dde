//! The devices of a pool: creation, import, adding and growing devices.
//!
//! Caller: the store.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::layout::{Layout, Standing};
use super::{Devices, Disks, Result, Rooms, slots};
use crate::checksum;
use crate::device::{Device, failed};
use crate::error::PoolError;
use crate::label::{
    self, Group, GroupKind, Identity, Member, MemberRole, MemberState, MemberStatus, PoolState, SlotAddress,
};

/// Minimum length of a pool's device, bytes.
pub const MINIMUM_DEVICE: u64 = 64 << 20;

fn refused<T>(why: impl Into<String>) -> Result<T> {
    Err(PoolError::Refused(why.into()))
}

/// Last known path of a device for the labels; empty if it is too long, since it would use up the label's space.
pub(super) fn path_hint(device: &dyn Device) -> Vec<u8> {
    Some(device.name().as_bytes()).filter(|path| path.len() <= 1024).unwrap_or_default().to_vec()
}

/// Label entry of a new device; its GUID is derived from the pool's GUID and the device's number.
fn member(pool: u64, index: usize, device: &dyn Device) -> Member {
    let mut name = b"device ".to_vec();
    name.extend(pool.to_le_bytes());
    name.extend((index as u64).to_le_bytes());
    let [a, b, c, d, e, f, g, h, ..] = checksum::structure(&name);
    let guid = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
    Member { guid, length: device.length(), path: path_hint(device), state: MemberState::default() }
}

/// Layout of a new pool: the label's device entries and the root's log runs.
pub struct NewMembers {
    /// Length of slots, bytes.
    pub slot: u64,
    /// The devices' label entries.
    pub members: Vec<Member>,
    /// The runs of slots of the intent log.
    pub log: Vec<(SlotAddress, u32)>,
    /// The groups; empty for a pool without groups.
    pub groups: Vec<Group>,
}

/// A group to create from the next devices of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewGroup {
    /// The group's kind.
    pub kind: GroupKind,
    /// Number of its devices.
    pub devices: usize,
}

impl NewGroup {
    /// Number of data columns in its widest segment.
    pub(super) fn width(&self) -> usize {
        match self.kind {
            GroupKind::Plain | GroupKind::Mirror => 1,
            GroupKind::RaidZ(parity) => self.devices.saturating_sub(usize::from(parity)).max(1),
        }
    }

    /// Number of its devices that may be lost.
    #[must_use]
    pub fn parity(&self) -> usize {
        match self.kind {
            GroupKind::Plain => 0,
            GroupKind::Mirror => self.devices.saturating_sub(1),
            GroupKind::RaidZ(parity) => usize::from(parity),
        }
    }
}

/// Placeholder for a missing device.
pub(super) struct Missing {
    pub(super) name: String,
    pub(super) length: u64,
}

impl Missing {
    fn gone<T>() -> std::io::Result<T> {
        Err(rustix::io::Errno::NODEV.into())
    }
}

impl Device for Missing {
    fn name(&self) -> &str {
        &self.name
    }

    fn length(&self) -> u64 {
        self.length
    }

    fn read_at(&self, _buffer: &mut [u8], _offset: u64) -> std::io::Result<()> {
        Self::gone()
    }

    fn write_at(&self, _bytes: &[u8], _offset: u64) -> std::io::Result<()> {
        Self::gone()
    }

    fn sync(&self) -> std::io::Result<()> {
        Self::gone()
    }

    fn discard(&self, _offset: u64, _length: u64) -> std::io::Result<()> {
        Self::gone()
    }

    fn is_missing(&self) -> bool {
        true
    }

    fn expect(&self, _offset: u64, _length: u64) {}
}

impl Disks {
    /// Lays out a new pool with this GUID on devices; nothing is written.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for devices that are too short, or none.
    pub fn lay_out(devices: &[Arc<dyn Device>], pool: u64) -> Result<NewMembers> {
        if devices.is_empty() {
            return refused("a pool needs a device");
        }
        if let Some(short) = devices.iter().find(|device| device.length() < MINIMUM_DEVICE) {
            return refused(format!(
                "{}: too small: {} bytes; a device of a pool has at least {MINIMUM_DEVICE}",
                short.name(),
                short.length()
            ));
        }
        let total: u64 = devices.iter().map(|device| device.length()).sum();
        let slot = slots::length(total);
        let members: Vec<Member> =
            devices.iter().enumerate().map(|(index, device)| member(pool, index, &**device)).collect();
        let first = members.first().map_or(0, |member| slots::count(member.length, slot));
        let wanted = (total / 32).clamp(4 << 20, 64 << 20).div_ceil(slot);
        let count = u32::try_from(wanted).unwrap_or(u32::MAX).min(first / 4);
        let log = vec![(SlotAddress { device: 0, slot: 0 }, count)];
        Ok(NewMembers { slot, members, log, groups: Vec::new() })
    }

    /// Lays out a new pool as [`Self::lay_out`], with its devices divided into groups in their order.
    ///
    /// # Errors
    /// As [`Self::lay_out`]; also for groups of fewer devices than their parity needs.
    pub fn lay_out_groups(devices: &[Arc<dyn Device>], pool: u64, groups: &[NewGroup]) -> Result<NewMembers> {
        let NewMembers { mut members, .. } = Self::lay_out(devices, pool)?;
        let all: usize = groups.iter().map(|group| group.devices).sum();
        if all != devices.len() || groups.len() > usize::from(u8::MAX) {
            return refused("devices that are in no group, or too many groups");
        }
        if groups.iter().any(|group| group.devices > label::MOST_COLUMNS || group.devices <= group.parity()) {
            return refused("a group of too few or too many devices");
        }
        let (mut usable, mut widest, mut first) = (0, 1, 0);
        for (number, group) in groups.iter().enumerate() {
            let own = members.get_mut(first..first + group.devices).unwrap_or_default();
            let shortest = own.iter().map(|member| member.length).min().unwrap_or(0);
            usable += shortest * (group.devices - group.parity()) as u64;
            own.iter_mut().for_each(|member| member.state.group = number as u8);
            widest = widest.max(group.width());
            first += group.devices;
        }
        // About as many segments as without groups, and none longer than the segment table allows.
        let most = u64::from(crate::segment::table::LONGEST) / (widest as u64).next_power_of_two();
        let slot = (slots::length(usable) / (widest as u64).next_power_of_two()).clamp(1 << 20, most.max(1 << 20));
        let copies = groups.first().map_or(1, |group| group.parity() + 1);
        let holding = members.get(..copies).unwrap_or_default();
        let least = holding.iter().map(|member| slots::count(member.length, slot)).min().unwrap_or(0);
        let wanted = (usable / 32).clamp(4 << 20, 64 << 20).div_ceil(slot);
        let count = u32::try_from(wanted).unwrap_or(u32::MAX).min(least / 4);
        let log = (0..copies as u16).map(|device| (SlotAddress { device, slot: 0 }, count)).collect();
        Ok(NewMembers { slot, members, log, groups: groups.iter().map(|group| Group::new(group.kind)).collect() })
    }

    /// Opens the devices of a pool, which are in the order of its labels.
    #[must_use]
    pub fn new(devices: Vec<Arc<dyn Device>>, identity: &Identity) -> Self {
        let here = vec![false; identity.members.len()];
        Self::with_absent(devices, identity, here)
    }

    fn with_absent(devices: Vec<Arc<dyn Device>>, identity: &Identity, absent: Vec<bool>) -> Self {
        let mut rooms = Rooms::default();
        for member in &identity.members {
            rooms.slots.add_device(if member.is_own() { slots::count(member.length, identity.slot) } else { 0 });
        }
        let mut layout = Layout::new(identity.groups.clone(), standings(identity, &absent), identity.change.clone());
        layout.measure(&rooms.slots, identity.slot);
        let disks = Self {
            devices: parking_lot::RwLock::new(Arc::new(devices)),
            slot: identity.slot,
            pool: identity.pool,
            rooms: parking_lot::Mutex::new(rooms),
            trim_turn: parking_lot::Mutex::default(),
            giving: parking_lot::Mutex::default(),
            redundant: Default::default(),
            incomplete: Default::default(),
            log: Default::default(),
            unlogged: Default::default(),
            logging: Default::default(),
            lost_log: Default::default(),
            left_at: None,
            unwritten: Default::default(),
            layout: parking_lot::RwLock::new(Arc::new(layout)),
            identity: parking_lot::Mutex::new(identity.clone()),
            unlabelled: Default::default(),
            unwiped: Default::default(),
            erasable: Default::default(),
            changes: Default::default(),
            paces: Default::default(),
            balance: super::balance::Balance::default(),
            failure: Default::default(),
            needed_failure: Default::default(),
        };
        if identity.incompatible & Identity::REDUNDANT_METADATA != 0 {
            disks.set_redundant();
        }
        disks
    }

    /// Finds the pool that these devices belong to; they may be in any order, but all have to belong to one pool.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for devices that are missing or belong to another pool; [`PoolError::Device`];
    /// [`PoolError::Short`] for a device that has become shorter and is to be written to.
    pub fn find(devices: Vec<Arc<dyn Device>>, writable: bool) -> Result<(Self, Identity)> {
        let grouped = devices.iter().filter_map(|device| label::probe(&**device).ok().flatten());
        if grouped.max_by_key(|identity| identity.revision).is_some_and(|newest| !newest.groups.is_empty()) {
            return Self::find_groups(devices, writable);
        }
        let (devices, identity) = in_order(devices, writable)?;
        Ok((Self::new(devices, &identity), identity))
    }

    /// Finds a pool with groups: devices may be missing or stale, as long as every group has enough redundancy.
    fn find_groups(devices: Vec<Arc<dyn Device>>, writable: bool) -> Result<(Self, Identity)> {
        let (mut found, mut unread) = (Vec::new(), None);
        for device in devices {
            match label::probe(&*device) {
                Ok(Some(identity)) => found.push((identity, device)),
                Ok(None) => return refused(format!("{}: not a device of a pool", device.name())),
                // Treated as missing, if redundancy allows it.
                Err(error) => unread = Some(error),
            }
        }
        let generation = |identity: &Identity, device: &Arc<dyn Device>| {
            label::roots(&**device, identity.pool).ok().and_then(|roots| Some(roots.last()?.generation))
        };
        let found: Vec<_> =
            found.into_iter().map(|(identity, device)| (generation(&identity, &device), identity, device)).collect();
        for (at, (_, identity, device)) in found.iter().enumerate() {
            if let Some((.., other)) = found.iter().skip(at + 1).find(|(_, other, _)| are_apart(identity, other)) {
                return refused(format!(
                    "'{}' and '{}' were each used without the other, and each has what the other lacks: import one of \
                     them without the other (-d); what only the other has is given up by 'labelclear -f' of it, and \
                     'replace' fills it again",
                    device.name(),
                    other.name()
                ));
            }
        }
        // Devices that are about to join or to take over a number have labels of the next revision before the others
        // do; if the pool was used without them after that, the others have newer roots.
        let joins = |member: &Member| member.state.status == MemberStatus::Joining;
        let age = |(generation, identity, _): &&(Option<u64>, Identity, _)| {
            (identity.revision, !identity.members.iter().any(joins), *generation)
        };
        let newest = found.iter().max_by_key(age).map(|(_, identity, _)| identity.clone());
        let Some(mut newest) = newest else { return refused("a pool needs a device") };
        let said = newest.clone();
        // A device that was still joining when the pool crashed holds no data.
        newest.members.iter_mut().filter(|member| member.state.status == MemberStatus::Joining).for_each(vacate);
        let used =
            |group: usize, members: &[Member]| members.iter().any(|member| usize::from(member.state.group) == group);
        while newest.groups.len() > 1 && !used(newest.groups.len() - 1, &newest.members) {
            newest.groups.pop();
        }
        let mut by_index = BTreeMap::new();
        let mut newest_roots = BTreeMap::new();
        for (generation, identity, device) in found {
            if identity.pool != newest.pool {
                return refused(format!("{}: belongs to another pool than the other devices", device.name()));
            }
            // By its GUID, not its number in the labels: it may have taken over the number of another device.
            let own = identity.members.get(usize::from(identity.index)).map(|member| member.guid);
            let same = |member: &Member| member.state.status.belongs() && Some(member.guid) == own;
            let listed = newest.members.iter().enumerate().find(|(_, member)| same(member));
            let Some((index, listed)) = listed.and_then(|(index, listed)| Some((u16::try_from(index).ok()?, listed)))
            else {
                tracing::warn!(device = device.name(), "was a device of the pool, and is not any more");
                continue;
            };
            let wanted = listed.length;
            if writable && device.length() / label::ENDS < wanted / label::ENDS {
                let length = device.length();
                unread = Some(PoolError::Short { device: device.name().to_owned(), length, wanted });
                continue;
            }
            if let Some((_, twin)) = by_index.insert(index, (identity, device)) {
                return refused(format!("{}: the same device of the pool twice", twin.name()));
            }
            newest_roots.extend(generation.map(|generation| (index, generation)));
        }
        let was_whole: Vec<bool> = newest.members.iter().map(|member| !member.state.stale).collect();
        let (revision, mut absent, mut ordered) = (newest.revision, Vec::new(), Devices::new());
        let mut as_left = Vec::new();
        let names: BTreeSet<String> = by_index.values().map(|(_, device)| device.name().to_owned()).collect();
        for (index, member) in (0..).zip(&mut newest.members) {
            let there = by_index.remove(&index);
            absent.push(there.is_none());
            let knows = |own: &Identity| Identity { index: said.index, ..own.clone() } == said;
            as_left.push(there.as_ref().is_none_or(|(own, _)| member.state.stale && knows(own)));
            // An inactive spare holds no data.
            let holds = member.state.status.belongs() && member.state.role != MemberRole::Spare;
            if let Some((identity, _)) = &there {
                // A crash between two label writes leaves their revisions one apart.
                member.state.stale |= holds && identity.revision.saturating_add(1) < revision;
                if member.state.status == MemberStatus::Faulted {
                    member.state.status = MemberStatus::Online;
                }
            } else {
                member.state.stale |= holds;
            }
            ordered.push(there.map_or_else(
                || {
                    // Another device may have that path now.
                    let place = String::from_utf8_lossy(&member.path).into_owned();
                    let name = if names.contains(&place) { member.guid.to_string() } else { place };
                    Arc::new(Missing { name, length: member.length }) as Arc<dyn Device>
                },
                |(_, device)| device,
            ));
        }
        // Each root is written to all devices that hold roots before the next one: a device that lacks two roots is
        // older than the others.
        let now = Layout::new(newest.groups.clone(), standings(&newest, &absent), newest.change.clone());
        let holding = now.holding_roots();
        let whole = |index: u16| newest.members.get(usize::from(index)).is_some_and(|member| !member.state.stale);
        let held = |index: &u16| holding.contains(index);
        let last = newest_roots.iter().filter(|(index, _)| held(index) && whole(**index)).map(|(_, root)| *root).max();
        for (index, generation) in newest_roots.iter().filter(|(index, _)| held(index)) {
            if let (Some(last), Some(member)) = (last, newest.members.get_mut(usize::from(*index)))
                && generation + 1 < last
            {
                member.state.stale = true;
            }
        }
        let mut disks = Self::with_absent(ordered, &newest, absent);
        let layout = disks.layout();
        let as_left = disks.stale().into_iter().all(|at| as_left.get(usize::from(at)).copied().unwrap_or(false));
        // A clean export writes the labels once more.
        let left_at = said.revision - u64::from(said.state == PoolState::Exported && said.revision > 0);
        disks.left_at = as_left.then_some(left_at);
        disks.lost_log = (0..layout.groups.len()).filter(|group| layout.is_log(*group)).any(|group| {
            let had = |(at, _): (usize, &Standing)| was_whole.get(at).copied().unwrap_or(false);
            layout.members(group).any(had) && layout.lacking(group) == layout.members(group).count()
        });
        if let Some(group) = disks.broken_group() {
            if let Some(unread) = unread {
                return Err(unread);
            }
            let layout = disks.layout();
            let lacking = newest.members.iter().zip(&layout.devices).enumerate().filter(|(index, (_, device))| {
                device.group == group && device.is_own() && !layout.is_whole(*index as u16)
            });
            let names = lacking.map(|(index, (member, device))| {
                let how = if device.absent { "missing" } else { "stale or offline" };
                format!("device {index} is {how}; it was at {}", String::from_utf8_lossy(&member.path))
            });
            let names: Vec<String> = names.collect();
            return refused(format!("too many devices of pool {} cannot be used: {}", newest.name, names.join("; ")));
        }
        // The new device states are written to the labels before anything else; and roots of stale devices must not
        // count.
        disks.unlabelled.store(true, std::sync::atomic::Ordering::Release);
        disks.unwiped.lock().extend(disks.stale());
        Ok((disks, newest))
    }

    /// A group with too many missing devices.
    fn broken_group(&self) -> Option<usize> {
        let layout = self.layout();
        let holding = layout.data_groups().chain(layout.special_groups());
        holding.into_iter().find(|group| layout.lacking(*group) > layout.tolerance(*group))
    }

    /// Label revision of the pool's last use, if all devices that may lack data were stale by then and no device has
    /// changed its state since: they were not written to since.
    #[must_use]
    pub fn left_at(&self) -> Option<u64> {
        self.left_at.filter(|_| self.changes() == 0)
    }

    /// Names of missing dedicated log devices that may hold the only copy of the latest durable writes.
    #[must_use]
    pub fn lost_log(&self) -> Vec<String> {
        let layout = self.layout();
        let devices = self.devices.read();
        let lost = |at: u16| self.lost_log && layout.is_log_device(at) && !layout.is_whole(at);
        (0..).zip(devices.iter()).filter(|(at, _)| lost(*at)).map(|(_, device)| device.name().to_owned()).collect()
    }

    /// Updates the device paths in an identity.
    pub fn note_paths(&self, identity: &mut Identity) {
        let layout = self.layout();
        let devices = self.devices.read();
        let there = identity.members.iter_mut().zip(devices.iter()).zip(&layout.devices);
        for ((member, device), _) in there.filter(|(_, standing)| !standing.absent) {
            member.path = path_hint(&**device);
        }
    }

    /// The pool's identity with one more device, for a pool without groups.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for a device that is too short, or for a pool with groups.
    pub fn with_device(&self, device: &dyn Device, identity: &Identity) -> Result<Identity> {
        if device.length() < MINIMUM_DEVICE.max(self.slot + (2 << 20)) {
            return refused(format!("{}: too small for this pool: {} bytes", device.name(), device.length()));
        }
        let mut identity = identity.clone();
        if !identity.groups.is_empty() {
            return refused("devices are added to a pool in groups as a new group");
        }
        identity.members.push(member(identity.pool, identity.members.len(), device));
        Ok(identity)
    }

    /// Adds a device whose label was written as the pool's last one: segments are allocated on it from now on.
    pub fn join(&self, device: Arc<dyn Device>, identity: &Identity) {
        let count = identity.members.last().map_or(0, |member| slots::count(member.length, self.slot));
        let mut devices = Devices::clone(&self.devices.read());
        devices.push(device);
        *self.devices.write() = Arc::new(devices);
        let mut rooms = self.rooms.lock();
        rooms.slots.add_device(count);
        let mut layout = self.layout.write();
        let mut new = Layout::clone(&layout);
        new.devices.push(Standing {
            group: 0,
            role: MemberRole::Own,
            status: MemberStatus::Online,
            stale: false,
            absent: false,
        });
        new.measure(&rooms.slots, self.slot);
        *layout = Arc::new(new);
    }

    /// Measures the devices again, and records the longer ones in the identity; returns their numbers, each with its
    /// new number of slots.
    ///
    /// # Errors
    /// [`PoolError::Device`] where the system does not report a length.
    pub fn measure(&self, identity: &mut Identity) -> Result<Vec<(usize, u32)>> {
        let devices = Arc::clone(&self.devices.read());
        let (mut grown, layout) = (Vec::new(), self.layout());
        for (number, (member, device)) in identity.members.iter_mut().zip(devices.iter()).enumerate() {
            // A device of a pair may be shorter: both have to hold the same.
            if !member.is_own() || layout.holders(number as u16).count() > 1 {
                continue;
            }
            let length = device.look_again().map_err(|error| failed(&**device, "looking at the length of", error))?;
            let count = slots::count(length, self.slot);
            if count > slots::count(member.length, self.slot) {
                member.length = length;
                grown.push((number, count));
            }
        }
        Ok(grown)
    }

    /// Adds the slots of devices that have grown, after the labels have recorded it.
    pub fn grow(&self, grown: &[(usize, u32)]) {
        let mut rooms = self.rooms.lock();
        grown.iter().for_each(|(number, count)| rooms.slots.grow(*number, *count));
        let mut layout = self.layout.write();
        let mut new = Layout::clone(&layout);
        new.measure(&rooms.slots, self.slot);
        *layout = Arc::new(new);
    }

    /// Growth that [`Self::measure`] would find, as far as known without measuring the devices again, bytes.
    #[must_use]
    pub fn expandable(&self, identity: &Identity) -> u64 {
        let devices = Arc::clone(&self.devices.read());
        let more = |(member, device): (&Member, &Arc<dyn Device>)| {
            u64::from(slots::count(device.length(), self.slot).saturating_sub(slots::count(member.length, self.slot)))
                * self.slot
        };
        identity.members.iter().zip(devices.iter()).filter(|(member, _)| member.is_own()).map(more).sum()
    }
}

/// Device states by the labels, with the missing devices.
fn standings(identity: &Identity, absent: &[bool]) -> Vec<Standing> {
    let standing = |(member, absent): (&Member, &bool)| Standing {
        group: usize::from(member.state.group),
        role: member.state.role,
        status: member.state.status,
        stale: member.state.stale,
        absent: *absent,
    };
    identity.members.iter().zip(absent).map(standing).collect()
}

/// Vacates a device number for reuse: no segment is stored under it.
pub(super) fn vacate(member: &mut Member) {
    let state = MemberState { status: MemberStatus::Removed, ..MemberState::default() };
    *member = Member { guid: 0, length: 0, path: Vec::new(), state };
}

/// Whether each of two devices was used without the other.
fn are_apart(one: &Identity, other: &Identity) -> bool {
    was_used_apart(one, other) && was_used_apart(other, one)
}

/// Whether a device, by its label, was used without the pool as another label has it: it lacks nothing, and all devices of
/// its group that are whole by the other label are stale by this one.
pub(super) fn was_used_apart(label: &Identity, other: &Identity) -> bool {
    let own = label.members.get(usize::from(label.index)).filter(|own| !own.state.stale);
    let Some(own) = own else { return false };
    let is_whole = |member: &&Member| {
        member.guid != 0
            && member.state.role == MemberRole::Own
            && member.state.group == own.state.group
            && !member.state.stale
    };
    let is_stale_here = |whole: &Member| {
        let here = label.members.iter().find(|member| member.guid == whole.guid);
        here.is_some_and(|here| here.state.stale)
    };
    let mut whole = other.members.iter().filter(is_whole).peekable();
    whole.peek().is_some() && whole.all(is_stale_here)
}

/// Sorts the devices by the newest identity among them, and checks that they are exactly the devices of one pool. A
/// device that has become shorter can be read as far as it goes, but not written; the space after its last whole MiB
/// was never used.
fn in_order(devices: Devices, writable: bool) -> Result<(Devices, Identity)> {
    let mut found = Vec::new();
    for device in devices {
        match label::probe(&*device)? {
            Some(identity) => found.push((identity, device)),
            None => return refused(format!("{}: not a device of a pool", device.name())),
        }
    }
    let Some(newest) = found.iter().map(|(identity, _)| identity).max_by_key(|identity| identity.revision).cloned()
    else {
        return refused("a pool needs a device");
    };
    let mut by_index = BTreeMap::new();
    for (identity, device) in found {
        let own = identity.members.get(usize::from(identity.index));
        let listed = newest.members.get(usize::from(identity.index));
        if identity.pool != newest.pool || own.map(|own| own.guid) != listed.map(|listed| listed.guid) {
            return refused(format!("{}: belongs to another pool than the other devices", device.name()));
        }
        // A crash between two label writes leaves their revisions one apart.
        if identity.revision.saturating_add(1) < newest.revision {
            return refused(format!("{}: an older copy of a device of the pool than the others are", device.name()));
        }
        let wanted = listed.map_or(0, |listed| listed.length);
        if writable && device.length() / label::ENDS < wanted / label::ENDS {
            return Err(PoolError::Short { device: device.name().to_owned(), length: device.length(), wanted });
        }
        if let Some(twin) = by_index.insert(identity.index, device) {
            return refused(format!("{}: the same device of the pool twice", twin.name()));
        }
    }
    let missing = newest.members.iter().enumerate().find(|(index, _)| !by_index.contains_key(&(*index as u16)));
    if let Some((index, missing)) = missing {
        return refused(format!(
            "device {index} of pool {} is missing; it was at {}",
            newest.name,
            String::from_utf8_lossy(&missing.path)
        ));
    }
    Ok((by_index.into_values().collect(), newest))
}
