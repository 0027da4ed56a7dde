//! Backend on devices: slots hold segments, labels hold the identity and the root records. Metadata is stored in two
//! slots; a write that fails in one of them does not fail the operation, and a damaged copy is rewritten from the
//! other. In groups of devices (like ZFS' top-level vdevs), file content has copies or parity as well, and a group
//! continues degraded without a failed device.
//!
//! ```text
//!  members  opening devices at import            layout  allocation: which devices take a segment, free space
//!  shape    groups that change while in use      beside  replacing and spare devices
//!  slow     devices that are read around         balance which copy is read
//!  sweep    sequential scrub: all copies and parity
//!  reshape  devices that leave, topology changes
//!  roots    labels and syncs                     health  devices that fail, leave and return
//!  slots    free slots                           columns segments as copies, or as rows with parity
//!  log_area the intent log's slots               heal    rewriting damaged copies
//!  trim     TRIM: discarding free space          patchwork  block-wise reconstruction
//! ```
//!
//! Callers: the store, by [`Backend`]; by the type's name only for operations on devices: adding, expanding and
//! trimming them.
//!
//! Invariants:
//! - Without parity all slots of a location hold the same bytes at the same offsets. With parity, each
//!   row (a raidz stripe) is written once and whole: no row is ever half new and half old.
//! - A slot is overwritten only where it is damaged, only with the bytes of another copy or a
//!   reconstruction, and only as long as it belongs to the segment.
//! - A root is durable when one of the devices that hold roots has it; an import reads all of them.
//! - A write that fails in one of two slots is ignored as long as the other slot has the whole segment;
//!   the other slot is read from then on. A failure in both, or of a segment with one copy, is an error;
//!   so is every failed sync, except on a device whose group has enough redundancy without it.
//! - A device of a group that has failed is not used any more; the labels of the others record this
//!   before the next root.
//! - Lock order: `giving`, then `rooms`, then `layout`. None is held over I/O, except `giving` while
//!   a repair runs.

mod balance;
mod beside;
mod columns;
mod erasable;
mod heal;
mod health;
mod layout;
mod log_area;
mod members;
mod patchwork;
mod reshape;
mod roots;
mod shape;
pub mod slots;
mod slow;
mod sweep;
mod trim;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, RwLock};

pub use health::DeviceHealth;
pub use members::{MINIMUM_DEVICE, NewGroup, NewMembers};
pub use reshape::{Evenness, NewShape, name_of};
pub use trim::TrimStep;

use super::{
    Backend, Copies, ErasableKeys, Healed, HealedPart, NewestRoot, PutRoot, Result, Room, SegmentAt, Sources, Sweep,
    Unknown,
};
use crate::device::{Device, failed};
use crate::error::{Damage, PoolError};
use crate::frames::WriteStream;
use crate::label::{Identity, LogStart, Place, Root, SlotAddress};
use crate::log::{self, Blocks};
use crate::patience;
use crate::segment::cleaner::{self, Pressure};
use crate::segment::stream::PIECE;
use layout::Layout;
use slots::Slots;
use slow::Paces;

type Devices = Vec<Arc<dyn Device>>;

/// The devices of a pool.
pub struct Disks {
    devices: RwLock<Arc<Devices>>,
    slot: u64,
    pool: u64,
    rooms: Mutex<Rooms>,
    /// Held while slots are discarded; they are withheld from writers meanwhile.
    trim_turn: Mutex<()>,
    /// Held while slots are freed, and while a damaged copy is rewritten: the slot must not be reallocated meanwhile.
    giving: Mutex<()>,
    /// Metadata is written twice.
    redundant: AtomicBool,
    incomplete: Incomplete,
    /// The area of the intent log: runs of slots.
    log: RwLock<Arc<Vec<(SlotAddress, u32)>>>,
    /// Copies of the log that the next root will no longer name.
    unlogged: Mutex<Vec<(SlotAddress, u32)>>,
    /// Number of writes that failed in one of two slots.
    unwritten: AtomicU64,
    /// Which devices the log is written to, and whether it may be written.
    logging: Mutex<Logging>,
    /// The groups, and the state of each device.
    layout: RwLock<Arc<Layout>>,
    /// The identity as the labels record it.
    identity: Mutex<Identity>,
    /// The erasable keys as the labels have them.
    erasable: Mutex<erasable::ErasableState>,
    /// Set while the labels do not record the current device states yet.
    unlabelled: AtomicBool,
    /// Devices whose root records do not belong to the pool's current state and have to be cleared.
    unwiped: Mutex<BTreeSet<u16>>,
    /// Grows with each device that is added, removed or changes its state.
    changes: AtomicU64,
    /// The intent log may have entries on a missing device only.
    lost_log: bool,
    /// Label revision of the pool's last use, if every stale device was stale by then already and was not written to
    /// since.
    left_at: Option<u64>,
    /// Read latencies of the devices.
    paces: Paces,
    /// Pending reads of the devices, for choosing copies.
    balance: balance::Balance,
    /// Callback on a failed device.
    failure: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// Callback on a failed device that its group cannot lose.
    needed_failure: OnceLock<Box<NeededFailure>>,
}

/// Retries a failed write.
type Again<'a> = &'a dyn Fn() -> Result<()>;

/// Callback with the device's name, the error, and for a write, a function that retries it; returns whether the retry
/// succeeded.
type NeededFailure = dyn Fn(&str, &PoolError, Option<Again<'_>>) -> bool + Send + Sync;

/// Free slots.
#[derive(Clone, Debug, Default)]
struct Rooms {
    slots: Slots,
    /// Freed slots that are discarded before they are reused.
    trimming: Vec<SlotAddress>,
    /// Whether freed slots are discarded (autotrim).
    trims: bool,
}

/// Placement of the intent log.
#[derive(Clone, Copy, Debug, Default)]
struct Logging {
    /// On dedicated log devices.
    apart: bool,
    /// Number of commits until the log may be written again: the last dedicated log device failed, and later entries
    /// could not be reached without the lost ones.
    awaited: u8,
    /// Suspended: a dedicated log device is being removed.
    held: bool,
}

/// Set of a location's columns, as a bit mask.
type Columns = u64;

/// Segments of which some columns lack data. The set is not persistent: after a restart the missing data is detected
/// as damage and repaired.
#[derive(Debug, Default)]
struct Incomplete {
    /// Whether there are any; readers check this first.
    any: AtomicBool,
    /// Bit mask of lacking columns, by segment number.
    lacking: Mutex<BTreeMap<u32, Columns>>,
}

impl Incomplete {
    /// Columns of a segment that lack data.
    fn of(&self, segment: u32) -> Columns {
        if self.any.load(Ordering::Acquire) { self.lacking.lock().get(&segment).copied().unwrap_or(0) } else { 0 }
    }

    /// Adds columns that lack data; returns whether some are new.
    fn note(&self, segment: u32, columns: Columns) -> bool {
        self.any.store(true, Ordering::Release);
        let mut lacking = self.lacking.lock();
        let known = lacking.entry(segment).or_insert(0);
        let new = columns & !*known != 0;
        *known |= columns;
        new
    }

    fn forget(&self, segment: u32) {
        if self.any.load(Ordering::Acquire) {
            self.lacking.lock().remove(&segment);
        }
    }
}

impl Disks {
    /// Number of writes that failed in one slot and succeeded in another.
    #[must_use]
    pub fn unwritten(&self) -> u64 {
        self.unwritten.load(Ordering::Relaxed)
    }

    /// Enables the second copy of metadata.
    pub fn set_redundant(&self) {
        self.redundant.store(true, Ordering::Release);
    }

    /// The device with this number.
    ///
    /// # Errors
    /// [`PoolError::Format`] for a number without a device.
    pub fn device(&self, number: u16) -> Result<Arc<dyn Device>> {
        let devices = self.devices.read();
        devices
            .get(usize::from(number))
            .cloned()
            .ok_or(PoolError::Format(Damage::Structure("a device that the pool does not have")))
    }

    /// Notes that a device failed a write whose data another slot has: other devices are preferred from now on.
    fn avoid(&self, device: u16, error: &PoolError) {
        self.unwritten.fetch_add(1, Ordering::Relaxed);
        if self.rooms.lock().slots.avoid(device) {
            tracing::error!(%error, "metadata could be written to one of its two places only: the other copy is written elsewhere");
        }
    }

    /// Reads from a slot, preferring a device with all its data. Returns the number of the device that was read.
    fn read_slot(&self, slot: SlotAddress, offset: u64, buffer: &mut [u8]) -> Result<u16> {
        self.read_held(slot, true, offset, buffer)
    }

    /// Reads from a slot; unless `stale` is set, only from devices with all their data.
    fn read_held(&self, slot: SlotAddress, stale: bool, offset: u64, buffer: &mut [u8]) -> Result<u16> {
        let layout = self.layout();
        if layout.is_plain() {
            return self.read_of(slot.device, slot, offset, buffer).map(|()| slot.device);
        }
        if !layout.has_pairs() {
            return self.read_timed(&layout, slot.device, slot, offset, buffer).map(|()| slot.device);
        }
        let mut read = self.gone(slot.device).map(|()| slot.device);
        for whole in [true, false].into_iter().filter(|whole| *whole || stale) {
            let holders = layout.holders(slot.device).filter(|(_, standing)| standing.works());
            for (holder, _) in holders.filter(|(_, standing)| standing.has_all() == whole) {
                read = self.read_timed(&layout, holder, slot, offset, buffer).map(|()| holder);
                if read.is_ok() {
                    return read;
                }
            }
        }
        read
    }

    /// Reads a slot's content from this very device, and records the latency.
    fn read_timed(
        &self,
        layout: &Layout,
        holder: u16,
        slot: SlotAddress,
        offset: u64,
        buffer: &mut [u8],
    ) -> Result<()> {
        let began = patience::now();
        let read = self.read_of(holder, slot, offset, buffer);
        self.paces.note(layout, holder, buffer.len(), began);
        read
    }

    /// Reads a slot's content from this very device.
    fn read_of(&self, holder: u16, slot: SlotAddress, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let device = self.device(holder)?;
        device
            .read_at(buffer, slots::start(slot, self.slot) + offset)
            .map_err(|error| failed(&*device, "reading", error))
    }

    /// Writes a slot's content to this very device.
    fn write_of(&self, holder: u16, slot: SlotAddress, offset: u64, bytes: &[u8]) -> Result<()> {
        let device = self.device(holder)?;
        device
            .write_at(bytes, slots::start(slot, self.slot) + offset)
            .map_err(|error| failed(&*device, "writing", error))
    }

    fn write_slot(&self, slot: SlotAddress, offset: u64, bytes: &[u8]) -> Result<()> {
        let at = slots::start(slot, self.slot) + offset;
        self.write_held(slot.device, &|device| device.write_at(bytes, at))
    }

    /// Writes to a device and to its replacing or spare devices. A device that fails drops out; it is an error only
    /// where none remains.
    fn write_held(&self, number: u16, write: &dyn Fn(&dyn Device) -> std::io::Result<()>) -> Result<()> {
        let layout = self.layout();
        if !layout.has_pairs() {
            let device = self.device(number)?;
            return write(&*device).map_err(|error| failed(&*device, "writing", error));
        }
        let (mut written, mut refused) = (false, None);
        for (holder, _) in layout.holders(number).filter(|(_, standing)| standing.works()) {
            let device = self.device(holder)?;
            if let Err(error) = write(&*device) {
                let error = failed(&*device, "writing", error);
                self.lose(holder, &error)?;
                refused = Some(error);
            } else {
                written = true;
            }
        }
        if written { Ok(()) } else { refused.map_or_else(|| self.gone(number), Err) }
    }

    /// Writes a part of a piece, and starts writeback on the devices where the piece is large.
    fn write_begun(
        &self,
        (stream, piece): (WriteStream, usize),
        slot: SlotAddress,
        offset: u64,
        bytes: &[u8],
    ) -> Result<()> {
        let at = slots::start(slot, self.slot) + offset;
        self.write_held(slot.device, &|device| match (piece >= PIECE / 2, stream) {
            // Trees are read again soon: they stay in the page cache.
            (true, WriteStream::Data) => device.write_stream(bytes, at),
            (true, _) => device.write_at(bytes, at).map(|()| device.begin_sync(at, bytes.len() as u64)),
            (false, _) => device.write_at(bytes, at),
        })
    }

    fn layout(&self) -> Arc<Layout> {
        Arc::clone(&self.layout.read())
    }
}

impl Backend for Disks {
    fn segment_length(&self) -> u64 {
        self.layout().longest(self.slot)
    }

    fn capacity(&self, place: &Place) -> u64 {
        self.slot * place.width() as u64
    }

    fn row(&self, place: &Place) -> u32 {
        match place.parity() {
            0 => super::ROW,
            _ => u32::try_from(self.layout().unit(place) * place.width() as u64).unwrap_or(super::ROW),
        }
    }

    fn cost(&self, place: &Place, bytes: u64) -> u64 {
        self.layout().cost(place, bytes)
    }

    fn is_shared(&self) -> bool {
        false
    }

    fn extends(&self) -> bool {
        true
    }

    fn adopt(&self, root: &Root, segments: &mut dyn Iterator<Item = (u32, &Place)>) -> Result<()> {
        let mut rooms = self.rooms.lock();
        let layout = self.layout();
        let mut columns = Vec::new();
        let belongs = |device: u16| layout.standing(device).is_none_or(|standing| standing.status.belongs());
        // The part of the log on a removed device is gone.
        let log: Vec<_> = root.log.iter().copied().filter(|(first, _)| belongs(first.device)).collect();
        for (first, count) in &log {
            columns.push(*first);
            for number in 0..*count {
                let slot = SlotAddress { slot: first.slot.saturating_add(number), ..*first };
                rooms.slots.claim(slot, slots::NO_SEGMENT)?;
            }
        }
        if !layout.is_plain() && !Place::from(columns).is_possible() {
            return Err(PoolError::Format(Damage::Structure("copies of the log on one device")));
        }
        for (id, place) in segments {
            if place.parity() > 0 && layout.is_plain() || self.capacity(place) % u64::from(self.row(place)) != 0 {
                return Err(PoolError::Format(Damage::Structure("a segment as no group of the pool has them")));
            }
            for slot in place.iter() {
                if belongs(slot.device) {
                    rooms.slots.claim(*slot, id)?;
                }
            }
        }
        *self.log.write() = Arc::new(log);
        self.use_log_devices(&layout);
        Ok(())
    }

    fn begin(&self, id: u32, stream: WriteStream, spare: u64) -> Result<Option<Place>> {
        let mut rooms = self.rooms.lock();
        let layout = self.layout();
        let slots = &mut rooms.slots;
        if !layout.is_plain() {
            let doubled = |(free, all)| self.copies(stream) > 1 && cleaner::pressure(free, all) != Pressure::Urgent;
            let special = layout.segments_of(layout.special_groups(), slots);
            // The cleaner of a special group needs some spare segments too, but a small group must remain usable.
            if stream.is_metadata() && special.0 > spare.min(special.1 / 8) {
                let place = layout.take(layout.special_groups(), slots, self.slot, stream, id, doubled(special));
                if place.is_some() {
                    return Ok(place);
                }
            }
            let room = layout.segments_of(layout.taking_groups(), slots);
            if room.0 <= spare {
                return Ok(None);
            }
            return Ok(layout.take(layout.taking_groups(), slots, self.slot, stream, id, doubled(room)));
        }
        if slots.free() <= spare {
            return Ok(None);
        }
        let Some(first) = slots.take(id) else { return Ok(None) };
        let mut place = vec![first];
        let short = || cleaner::pressure(slots.free(), slots.total()) == Pressure::Urgent;
        // Where slots are short, a segment gets one copy only.
        if self.copies(stream) > 1 && !short() {
            place.extend(slots.take_apart(first, id));
        }
        Ok(Some(place.into()))
    }

    fn write(&self, at: SegmentAt<'_>, stream: WriteStream, offset: u64, bytes: &[u8]) -> Result<Copies> {
        self.write_columns(at, stream, offset, bytes)
    }

    fn finish(&self, _at: SegmentAt<'_>, _length: u64) {}

    fn flush(&self) -> Result<()> {
        self.sync_used()
    }

    fn ways(&self, at: SegmentAt<'_>) -> usize {
        self.count_ways(at)
    }

    fn read(&self, at: SegmentAt<'_>, way: usize, offset: u64, into: &mut [u8]) -> Result<()> {
        self.read_columns(at, way, offset, into, &mut Sources::default())
    }

    fn read_noting(
        &self,
        at: SegmentAt<'_>,
        way: Option<usize>,
        offset: u64,
        into: &mut [u8],
        sources: &mut Sources,
    ) -> Result<()> {
        match way {
            Some(way) => self.read_columns(at, way, offset, into, sources),
            None => self.read_nearest(at, offset, into, sources),
        }
    }

    fn should_hold(&self, at: SegmentAt<'_>, device: u16) -> bool {
        let layout = self.layout();
        let mut columns = at.place.iter().enumerate();
        columns.any(|(column, slot)| self.is_answerable(&layout, at, column, *slot, device))
    }

    fn chooses(&self, at: SegmentAt<'_>) -> bool {
        self.copies_to_choose(&self.layout(), at).is_some()
    }

    fn read_any(&self, at: SegmentAt<'_>, offset: u64, into: &mut [u8]) -> Result<()> {
        self.read_nearest(at, offset, into, &mut Sources::default())
    }

    fn independent(&self) -> usize {
        let layout = self.layout();
        if layout.is_plain() {
            return self.devices.read().len();
        }
        let of = |group: usize| if layout.parity(group) == 0 { layout.takers(group).count() } else { 1 };
        layout.taking_groups().map(of).sum()
    }

    fn lane(&self, at: SegmentAt<'_>) -> u64 {
        self.lane_of(at.place)
    }

    fn position(&self, at: SegmentAt<'_>) -> u64 {
        // By the lowest device, which segments of one lane share as far as possible.
        at.place.iter().min_by_key(|slot| slot.device).map_or(0, |slot| slot.slot.into())
    }

    fn sweep(&self) -> Box<dyn Sweep + '_> {
        Box::new(self.start_sweep())
    }

    fn piece_together(
        &self,
        at: SegmentAt<'_>,
        offset: u64,
        into: &mut [u8],
        left: &mut u64,
        is_right: &mut dyn FnMut(&[u8]) -> bool,
    ) -> Result<Option<Vec<u16>>> {
        self.put_together(at, offset, into, left, is_right)
    }

    fn member(&self, at: SegmentAt<'_>, way: usize) -> u16 {
        self.first_column(at, way).map_or(0, |slot| slot.device)
    }

    fn blamed(&self, at: SegmentAt<'_>, way: usize) -> u16 {
        self.blamed_column(at, way).map_or(0, |slot| slot.device)
    }

    fn expect(&self, at: SegmentAt<'_>, offset: u64, length: u64) {
        self.expect_columns(at, offset, length);
    }

    fn heal(
        &self,
        at: SegmentAt<'_>,
        offset: u64,
        right: &[u8],
        _is_whole: &dyn Fn(&[u8]) -> bool,
    ) -> Result<Option<Healed>> {
        self.mend(at, offset, right)
    }

    fn remove(&self, segments: &[(u32, Place)]) {
        let _giving = self.giving.lock();
        let mut rooms = self.rooms.lock();
        for (id, place) in segments {
            self.incomplete.forget(*id);
            if rooms.trims {
                place.iter().for_each(|slot| rooms.slots.disown(*slot));
                rooms.trimming.extend(place.iter());
            } else {
                place.iter().for_each(|slot| rooms.slots.release(*slot));
            }
        }
    }

    fn list_unknown(&self, is_known: &dyn Fn(u32, &Place) -> bool) -> Result<Unknown> {
        let mut found = BTreeMap::<u32, Vec<SlotAddress>>::new();
        for (id, slot) in self.rooms.lock().slots.owned() {
            found.entry(id).or_default().push(slot);
        }
        let all = found.into_iter().map(|(id, place)| (id, Place::from(place)));
        let segments = all.filter(|(id, place)| !is_known(*id, place)).collect();
        Ok(Unknown { segments, latest: 0 })
    }

    fn room(&self) -> Room {
        let rooms = self.rooms.lock();
        let layout = self.layout();
        if !layout.is_plain() {
            return self.room_in(&layout, &rooms);
        }
        let reserved = self.log_runs().iter().map(|(_, count)| u64::from(*count)).sum();
        let (total, free, held_back) = (rooms.slots.total(), rooms.slots.free(), rooms.trimming.len() as u64);
        let (size, free_size) = (total.saturating_sub(reserved) * self.slot, (free + held_back) * self.slot);
        Room { total, reserved, free, held_back, size, free_size }
    }

    fn reclaim(&self) -> bool {
        self.give_untrimmed() || self.wait_for_trim()
    }

    fn copies(&self, stream: WriteStream) -> usize {
        let layout = self.layout();
        if !layout.is_plain() {
            let parities = layout.taking_groups().map(|group| layout.parity(group));
            let least = parities.min().unwrap_or(0) + 1;
            return if stream.is_metadata() { least.max(2) } else { least };
        }
        if stream.is_metadata() && self.redundant.load(Ordering::Acquire) { 2 } else { 1 }
    }

    fn special_room(&self) -> (u64, u64) {
        let rooms = self.rooms.lock();
        let layout = self.layout();
        layout.segments_of(layout.special_groups(), &rooms.slots)
    }

    fn is_special(&self, place: &Place) -> bool {
        self.layout().is_special(place)
    }

    fn lacks(&self, id: u32) -> bool {
        self.incomplete.of(id) != 0
    }

    fn is_weak(&self, at: SegmentAt<'_>, stream: WriteStream) -> bool {
        let layout = self.layout();
        let single = stream.is_metadata() && at.place.len() < self.copies(stream);
        self.lacks(at.segment) || layout.is_weak(at.place) || (layout.is_plain() && single)
    }

    fn is_grouped(&self) -> bool {
        !self.layout().is_plain()
    }

    fn widen(&self, at: SegmentAt<'_>) -> Option<Place> {
        let mut rooms = self.rooms.lock();
        self.layout().widened(at.place, &mut rooms.slots, at.segment)
    }

    fn would_widen(&self, at: SegmentAt<'_>) -> bool {
        let layout = self.layout();
        let more = layout.lacks_copies(at.place).map(|device| SlotAddress { device: device as u16, slot: 0 });
        let columns: Vec<SlotAddress> = at.place.iter().copied().chain(more).collect();
        columns.len() > at.place.len() && Place::from(columns).is_possible()
    }

    fn is_paired(&self, at: SegmentAt<'_>) -> bool {
        let layout = self.layout();
        layout.has_pairs() && at.place.iter().any(|slot| layout.holders(slot.device).count() > 1)
    }

    fn restored(&self, id: u32) {
        self.incomplete.forget(id);
    }

    fn log(&self) -> Result<Option<Box<dyn Blocks>>> {
        Ok(None)
    }

    fn fresh_log(&self) -> Result<LogStart> {
        let sequence = log::newest_sequence(self, self.pool)?.wrapping_add(1);
        Ok(LogStart { position: 0, sequence, chain: 0 })
    }

    fn put_identity(&self, identity: &Identity) -> Result<()> {
        self.write_identities(identity)
    }

    fn erasable(&self) -> Option<&dyn ErasableKeys> {
        Some(self)
    }

    fn put_root(&self, root: &Root) -> Result<PutRoot> {
        self.write_labels()?;
        self.write_root(root).map(|()| PutRoot::Durable)
    }

    fn newest_root(&self) -> Result<Option<NewestRoot>> {
        self.find_newest_root()
    }

    fn roots(&self) -> Result<BTreeMap<u64, Root>> {
        self.all_roots()
    }

    fn guard(&self) -> Result<bool> {
        self.guard_rings()
    }

    fn scrub_roots(&self, identity: &Identity) -> Result<Vec<u64>> {
        self.scrub_labels(identity)
    }
}

#[cfg(test)]
impl Disks {
    /// Freed slots that were not discarded yet.
    pub(crate) fn untold(&self) -> Vec<SlotAddress> {
        self.rooms.lock().trimming.clone()
    }

    /// Gives withheld slots to a segment, as after their device's number has become another device's.
    pub(crate) fn take_withheld(&self, withheld: &[SlotAddress], segment: u32) {
        let mut rooms = self.rooms.lock();
        for slot in withheld {
            rooms.slots.release_withheld(*slot);
            if rooms.slots.owner(*slot).is_none() {
                rooms.slots.claim(*slot, segment).unwrap();
            }
        }
    }

    /// The segment in a slot.
    pub(crate) fn owner_of(&self, slot: SlotAddress) -> Option<u32> {
        self.rooms.lock().slots.owner(slot)
    }
}
