//! Making a pool, importing one, adding devices.
//!
//! An import reads labels, takes the newest root, reads the table that it names, and takes the
//! frames of txgs after it for dead. Unless the pool was closed in order, nothing is appended to
//! segments that were open: they are sealed where the root left them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock};

use crate::checksum;
use crate::compress;
use crate::device::{Device, failed};
use crate::error::{Damage, PoolError};
use crate::frames::WriteStream;
use crate::label::{self, Identity, LogStart, Member, PoolState, Root, SlotAddress};
use crate::log;
use crate::pointer::{Pointer, Txg};
use crate::segment::slots::{self, Slots};
use crate::segment::table::{Op, SegmentTable};
use crate::segment::table_log::{self, UncommittedRun};

use super::commit::{ROOT_DEVICES, copies, release, slack};
use super::log_area::LogArea;
use super::{Committed, Map, Result, Store, Sums};

/// The shortest device that a pool lies on, bytes.
pub const MINIMUM_DEVICE: u64 = 64 << 20;

/// What a new pool is to be.
#[derive(Clone, Debug)]
pub struct NewPool {
    /// Its name.
    pub name: String,
    /// Its number: random.
    pub guid: u64,
    /// The machine: a number and a name.
    pub host: (u64, String),
    /// Now, seconds since 1970.
    pub time: u64,
    /// Whether metadata is written twice: a damaged copy is mended by the other.
    pub redundant_metadata: bool,
}

/// What an import may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Everything, from the newest root on.
    ReadWrite,
    /// Nothing is written, not even a label.
    ReadOnly,
    /// The same, from the newest root that can be read on, also where later ones are lost.
    Salvage,
    /// Everything, from the state after this txg on. Later roots are given up for good.
    Rewind(Txg),
}

impl Access {
    /// Whether anything is written.
    #[must_use]
    pub fn writes(self) -> bool {
        !matches!(self, Self::ReadOnly | Self::Salvage)
    }
}

/// How a pool is imported.
#[derive(Clone, Debug)]
pub struct Import {
    /// What may be done.
    pub access: Access,
    /// A new name for it.
    pub name: Option<String>,
    /// The machine: a number and a name.
    pub host: (u64, String),
    /// Now, seconds since 1970.
    pub time: u64,
}

type Devices = Vec<Arc<dyn Device>>;

fn refused<T>(why: impl Into<String>) -> Result<T> {
    Err(PoolError::Refused(why.into()))
}

fn structure<T>(what: &'static str) -> Result<T> {
    Err(PoolError::Format(Damage::Structure(what)))
}

/// Where a device was when it was last seen. What is absurdly long would crowd the others out of
/// the labels.
fn path_hint(device: &dyn Device) -> Vec<u8> {
    Some(device.name().as_bytes()).filter(|path| path.len() <= 1024).unwrap_or_default().to_vec()
}

/// A device's own number; told apart by the pool's and the device's place in it.
fn member(pool: u64, index: usize, device: &dyn Device) -> Member {
    let mut name = b"device ".to_vec();
    name.extend(pool.to_le_bytes());
    name.extend((index as u64).to_le_bytes());
    let [a, b, c, d, e, f, g, h, ..] = checksum::structure(&name);
    Member { guid: u64::from_le_bytes([a, b, c, d, e, f, g, h]), length: device.length(), path: path_hint(device) }
}

impl Store {
    /// Makes a pool on these devices; what was on them is lost.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for devices that are too short or too many, [`PoolError::Device`].
    pub fn create(devices: Devices, new: &NewPool) -> Result<(Self, Root)> {
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
        let identity = Identity {
            revision: 1,
            incompatible: Identity::ORDERED_NAMES
                | if new.redundant_metadata { Identity::REDUNDANT_METADATA } else { 0 },
            read_only_compatible: 0,
            compatible: 0,
            pool: new.guid,
            name: new.name.clone(),
            state: PoolState::Active,
            host: new.host.clone(),
            time: new.time,
            slot: slots::length(total),
            index: 0,
            members: devices.iter().enumerate().map(|(index, device)| member(new.guid, index, &**device)).collect(),
        };
        let first = identity.members.first().map_or(0, |member| slots::count(member.length, identity.slot));
        let wanted = (total / 32).clamp(4 << 20, 64 << 20).div_ceil(identity.slot);
        let log = vec![(SlotAddress { device: 0, slot: 0 }, u32::try_from(wanted).unwrap_or(u32::MAX).min(first / 4))];
        let root = Root {
            pool: new.guid,
            generation: 0,
            kept: 0,
            txg: Txg(0),
            time: new.time,
            clean: false,
            next_segment: 1,
            catalog: None,
            upper: Vec::new(),
            log_start: LogStart::default(),
            log,
            table_segments: Vec::new(),
            table: None,
            deltas: Vec::new(),
            guarded: false,
        };
        identity.check()?;
        let store = Self::assemble(devices, identity.clone(), root, Loaded::default(), true)?;
        store.write_identities(&identity)?;
        {
            let mut committed = store.committed.lock();
            store.commit_root(&mut committed, None, false, true)?;
            store.guard(&mut committed)?;
        }
        let root = store.root();
        Ok((store, root))
    }

    /// Imports the pool on these devices, which may come in any order but must be all of it.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for devices that are missing or belong elsewhere, a newer format, a
    /// txg that is not kept; [`PoolError::Format`] and [`PoolError::Frame`] for damage;
    /// [`PoolError::Device`].
    pub fn open(devices: Devices, import: &Import) -> Result<(Self, Root)> {
        let (devices, mut identity) = in_order(devices, import.access.writes())?;
        let roots = all_roots(&devices, identity.pool)?;
        let rewinds = matches!(import.access, Access::Rewind(_));
        let root = choose_root(&devices, roots, import.access)?;
        let mut loaded = load(&devices, identity.slot, &root)?;
        let writable = import.access.writes();
        settle(&mut loaded, root.clean && writable)?;
        if writable {
            identity.name = import.name.clone().unwrap_or(identity.name);
            (identity.state, identity.host, identity.time) = (PoolState::Active, import.host.clone(), import.time);
            identity.revision += 1;
            for (member, device) in identity.members.iter_mut().zip(&devices) {
                member.path = path_hint(&**device);
            }
            identity.check()?;
        }
        let store = Self::assemble(devices, identity.clone(), root, loaded, writable)?;
        if rewinds {
            store.begin_again(identity.pool)?;
        } else if writable {
            store.write_identities(&identity)?;
            store.guard(&mut store.committed.lock())?;
        }
        let root = store.root();
        Ok((store, root))
    }

    /// Goes on from an older root, in memory: the log begins behind everything that it ever held,
    /// so that nothing of what is given up is replayed. Nothing is written before
    /// [`Self::confirm`], so that a state that cannot be read does not cost the others.
    fn begin_again(&self, pool: u64) -> Result<()> {
        let mut committed = self.committed.lock();
        let sequence = log::newest_sequence(&LogArea(self), pool)?.wrapping_add(1);
        committed.root.log_start = LogStart { position: 0, sequence, chain: 0 };
        self.unconfirmed.store(true, Ordering::Release);
        Ok(())
    }

    /// The state that was opened can be read. Where it is an older one ([`Access::Rewind`]), all
    /// that came after it is given up now, by one root record that is newer than all others:
    /// nothing was written over before it.
    ///
    /// # Errors
    /// [`PoolError::Suspended`] if it cannot be written.
    pub fn confirm(&self) -> Result<()> {
        if !self.unconfirmed.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut committed = self.committed.lock();
        if self.unconfirmed.load(Ordering::Acquire) {
            let record = committed.root.encode()?;
            let written = self
                .write_record(committed.root.generation, &record)
                .and_then(|()| self.write_identities(&committed.identity));
            written.and_then(|()| self.guard(&mut committed)).map_err(|error| self.suspend(&error))?;
            self.unconfirmed.store(false, Ordering::Release);
        }
        Ok(())
    }

    /// Adds a device; frames go to it from now on.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for one that is too short or cannot be written;
    /// [`PoolError::Suspended`] if the labels of the others cannot be.
    pub fn add_device(&self, device: Arc<dyn Device>, time: u64) -> Result<()> {
        self.usable()?;
        if device.length() < MINIMUM_DEVICE.max(self.slot + (2 << 20)) {
            return refused(format!("{}: too small for this pool: {} bytes", device.name(), device.length()));
        }
        let mut committed = self.committed.lock();
        let mut identity = committed.identity.clone();
        let added = member(identity.pool, identity.members.len(), &*device);
        let count = slots::count(added.length, self.slot);
        identity.members.push(added);
        (identity.revision, identity.time) = (identity.revision + 1, time);
        // Refused before anything is written.
        identity.check()?;
        // The new device first: the others must not name one that does not know of it.
        let index = u16::try_from(identity.members.len() - 1).or_else(|_| refused("too many devices"))?;
        if let Err(error) = label::write_identity(&*device, &Identity { index, ..identity.clone() }) {
            let Err(left) = label::clear(&*device) else { return refused(error.to_string()) };
            // What it keeps must not count as newest. An import asks that labels are one revision
            // apart at most, so the others go past it step by step.
            for _ in 0..2 {
                committed.identity.revision += 1;
                self.write_identities(&committed.identity).map_err(|error| self.suspend(&error))?;
            }
            return refused(format!("{error} (and it cannot be cleared: {left})"));
        }
        self.write_identities(&identity).map_err(|error| self.suspend(&error))?;
        let mut devices = Devices::clone(&self.devices.read());
        devices.push(device);
        *self.devices.write() = Arc::new(devices);
        self.map.write().slots.add_device(count);
        committed.identity = identity;
        // The new one has no root records yet.
        self.guard(&mut committed).map_err(|error| self.suspend(&error))
    }

    /// Takes the room that devices have got since they became part of the pool; answers which, by
    /// their numbers.
    ///
    /// The labels tell of the room before anything lies there. Those at the old end are overwritten
    /// one day; the new end has its own.
    ///
    /// # Errors
    /// [`PoolError::Device`] where the system does not tell a length, [`PoolError::Suspended`] if
    /// labels cannot be written.
    pub fn expand(&self, time: u64) -> Result<Vec<usize>> {
        self.usable()?;
        let mut committed = self.committed.lock();
        let devices = Arc::clone(&self.devices.read());
        let mut identity = committed.identity.clone();
        let mut grown = Vec::new();
        for (number, (member, device)) in identity.members.iter_mut().zip(devices.iter()).enumerate() {
            let length = device.look_again().map_err(|error| failed(&**device, "looking at the length of", error))?;
            let count = slots::count(length, self.slot);
            if count > slots::count(member.length, self.slot) {
                member.length = length;
                grown.push((number, count));
            }
        }
        if grown.is_empty() {
            return Ok(Vec::new());
        }
        (identity.revision, identity.time) = (identity.revision + 1, time);
        self.write_identities(&identity).map_err(|error| self.suspend(&error))?;
        let mut map = self.map.write();
        grown.iter().for_each(|(number, count)| map.slots.grow(*number, *count));
        drop(map);
        committed.identity = identity;
        // Nor have labels at a new end.
        self.guard(&mut committed).map_err(|error| self.suspend(&error))?;
        Ok(grown.into_iter().map(|(number, _)| number).collect())
    }

    /// What [`Self::expand`] would add, as far as is known without looking at the devices again,
    /// bytes.
    #[must_use]
    pub fn expandable(&self) -> u64 {
        let (identity, devices) = (self.identity(), Arc::clone(&self.devices.read()));
        let more = |(member, device): (&Member, &Arc<dyn Device>)| {
            u64::from(slots::count(device.length(), self.slot).saturating_sub(slots::count(member.length, self.slot)))
                * self.slot
        };
        identity.members.iter().zip(devices.iter()).map(more).sum()
    }

    /// Gives the pool another name.
    ///
    /// # Errors
    /// [`PoolError::Suspended`] if labels cannot be written.
    pub fn rename(&self, name: &str, time: u64) -> Result<()> {
        self.relabel(time, |identity| identity.name = name.to_owned())
    }

    /// Marks the pool as destroyed, after it was closed or instead of that: no import takes it
    /// without being told to.
    ///
    /// # Errors
    /// [`PoolError::Suspended`] if labels cannot be written.
    pub fn destroy(&self, time: u64) -> Result<()> {
        self.relabel(time, |identity| identity.state = PoolState::Destroyed)?;
        self.closed.store(true, Ordering::Release);
        Ok(())
    }

    pub(super) fn relabel(&self, time: u64, change: impl FnOnce(&mut Identity)) -> Result<()> {
        self.usable()?;
        let mut committed = self.committed.lock();
        let mut identity = committed.identity.clone();
        change(&mut identity);
        (identity.revision, identity.time) = (identity.revision + 1, time);
        identity.check()?;
        self.write_identities(&identity).map_err(|error| self.suspend(&error))?;
        committed.identity = identity;
        Ok(())
    }

    pub(super) fn write_identities(&self, identity: &Identity) -> Result<()> {
        let devices = Arc::clone(&self.devices.read());
        for (index, device) in devices.iter().enumerate() {
            let index = u16::try_from(index).or_else(|_| refused("too many devices"))?;
            label::write_identity(&**device, &Identity { index, ..identity.clone() })?;
        }
        Ok(())
    }

    fn assemble(devices: Devices, identity: Identity, root: Root, loaded: Loaded, writable: bool) -> Result<Self> {
        let mut slots = Slots::default();
        for member in &identity.members {
            slots.add_device(slots::count(member.length, identity.slot));
        }
        for (first, count) in &root.log {
            for number in 0..*count {
                slots.claim(SlotAddress { slot: first.slot.saturating_add(number), ..*first })?;
            }
        }
        let table_places = root.table_segments.iter().flat_map(|segment| &segment.place);
        for place in table_places.chain(loaded.table.segments().values().flat_map(|segment| &segment.place)) {
            slots.claim(*place)?;
        }
        let sums = Sums { allocated: AtomicU64::new(loaded.table.live_bytes()), ..Sums::default() };
        let table_frames = loaded.pieces.iter().chain(&root.table).chain(&root.deltas);
        sums.table.store(table_frames.map(Pointer::charged).sum(), Ordering::Relaxed);
        let mut map = Map { table: loaded.table, slots, next_segment: root.next_segment, ..Map::default() };
        let mut root = root;
        release(&mut map, &mut root)?;
        (map.slack, map.copies) = (slack(&map, identity.slot), copies(&map));
        let open_table = root
            .table_segments
            .iter()
            .rev()
            .find(|segment| segment.dead_since.is_none() && root.clean)
            .map(|segment| segment.id);
        let appenders = super::appenders::Appenders::new();
        for appender in appenders.all() {
            let open =
                map.table.segments().iter().find(|(_, segment)| !segment.sealed && segment.stream == appender.stream);
            if let Some((id, segment)) = open
                && !segment.place.is_empty()
            {
                appender.lock().begin(*id, segment.place.clone(), segment.frames, segment.bytes);
            }
        }
        // The first commit writes the whole table: what was recorded here of an import that wrote
        // nothing is in no delta.
        let committed = Committed {
            pieces: loaded.pieces,
            full_bytes: 0,
            delta_bytes: u64::from(u32::MAX),
            open_table,
            renew: false,
            identity: identity.clone(),
            root: root.clone(),
        };
        Ok(Self {
            devices: RwLock::new(Arc::new(devices)),
            slot: identity.slot,
            writable,
            closed: AtomicBool::new(false),
            unconfirmed: AtomicBool::new(false),
            trim_turn: parking_lot::Mutex::default(),
            map: RwLock::new(map),
            appenders,
            redundant_metadata: AtomicBool::new(identity.incompatible & Identity::REDUNDANT_METADATA != 0),
            ordered_names: AtomicBool::new(identity.incompatible & Identity::ORDERED_NAMES != 0),
            missing_copies: Default::default(),
            giving: Mutex::new(()),
            durable: AtomicU64::new(root.txg.0),
            log: root.log.clone(),
            committed: Mutex::new(committed),
            frees: Mutex::new(BTreeMap::new()),
            suspended: Arc::default(),
            relief: Mutex::new(()),
            uncleanable: Mutex::default(),
            sums,
            slop_at_most: u64::MAX,
            watcher: Default::default(),
            readahead: super::streaming::DeviceReadahead::default(),
            write_queue: super::write_queue::WriteQueue::default(),
            compressors: super::compressors::Compressors::default(),
        })
    }
}

/// Sorts the devices by the newest identity among them, and checks that they are all and only those
/// of one pool. Of one that has become shorter, what is left may be read; what lies behind its last
/// whole MiB was never used.
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
        // A crash between two writings of labels leaves them one apart.
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

fn all_roots(devices: &Devices, pool: u64) -> Result<BTreeMap<u64, Root>> {
    let mut all = BTreeMap::new();
    for device in devices.iter().take(ROOT_DEVICES) {
        all.extend(label::roots(&**device, pool)?.into_iter().map(|root| (root.generation, root)));
    }
    Ok(all)
}

/// The root to begin with. Where later ones are given up, it is newer than they are and the only
/// one that is kept.
fn choose_root(devices: &Devices, roots: BTreeMap<u64, Root>, access: Access) -> Result<Root> {
    let Some((_, newest)) = roots.last_key_value() else { return refused("no root record of the pool can be read") };
    let lost = label::lost(devices.get(..ROOT_DEVICES).unwrap_or(devices), newest);
    let Access::Rewind(txg) = access else {
        return if lost == 0 || access == Access::Salvage {
            Ok(newest.clone())
        } else {
            Err(PoolError::Lost { states: lost, txg: newest.txg })
        };
    };
    let kept: Vec<&Root> = roots.values().filter(|root| root.generation >= newest.kept).collect();
    match kept.iter().rev().find(|root| root.txg == txg) {
        Some(root) => {
            let generation = newest.generation + 1 + lost;
            Ok(Root { generation, kept: generation, clean: false, guarded: false, ..(*root).clone() })
        }
        None => {
            let mut txgs: Vec<u64> = kept.iter().map(|root| root.txg.0).collect();
            txgs.dedup();
            let listed: Vec<String> = txgs.iter().map(u64::to_string).collect();
            refused(format!("the state after txg {txg} is not kept; these are: {}", listed.join(", ")))
        }
    }
}

/// What was read of the table.
#[derive(Debug, Default)]
struct Loaded {
    table: SegmentTable,
    uncommitted: Vec<UncommittedRun>,
    pieces: Vec<Pointer>,
}

fn load(devices: &Devices, slot: u64, root: &Root) -> Result<Loaded> {
    let Some(table) = &root.table else { return structure("a root record without a segment table") };
    let pieces = table_log::read_index(&read_table_frame(devices, slot, root, table)?)?;
    let mut body = Vec::new();
    for piece in &pieces {
        body.extend(read_table_frame(devices, slot, root, piece)?);
    }
    let (mut table, mut uncommitted) = table_log::read_full(&body)?;
    for delta in &root.deltas {
        // Only what the last commit names is uncommitted still.
        uncommitted = table_log::replay_delta(&read_table_frame(devices, slot, root, delta)?, &mut table)?;
    }
    let last = table
        .segments()
        .last_key_value()
        .map_or(0, |(id, _)| *id)
        .max(root.table_segments.iter().map(|segment| segment.id).max().unwrap_or(0));
    if root.next_segment <= last {
        return structure("the number of the next segment is in use");
    }
    Ok(Loaded { table, uncommitted, pieces })
}

/// Where a frame of the table lies, which only the root's own list can tell.
pub(super) fn table_places<'a>(root: &'a Root, pointer: &Pointer) -> &'a [SlotAddress] {
    root.table_segments.iter().find(|segment| segment.id == pointer.segment).map_or(&[], |segment| &segment.place)
}

/// Reads a frame of the table, from the first of its places where it is whole.
pub(super) fn read_table_frame(
    devices: &[Arc<dyn Device>],
    slot: u64,
    root: &Root,
    pointer: &Pointer,
) -> Result<Vec<u8>> {
    let missing = PoolError::Frame { pointer: *pointer, damage: Damage::Structure("its segment is not there") };
    let mut read = Err(missing);
    for place in table_places(root, pointer) {
        read = read_table_copy(devices, slot, *place, pointer);
        if read.is_ok() {
            break;
        }
    }
    read
}

/// Reads a frame of the table from one of its places.
pub(super) fn read_table_copy(
    devices: &[Arc<dyn Device>],
    slot: u64,
    place: SlotAddress,
    pointer: &Pointer,
) -> Result<Vec<u8>> {
    let damaged = |damage| PoolError::Frame { pointer: *pointer, damage };
    let Some(device) = devices.get(usize::from(place.device)) else {
        return Err(damaged(Damage::Structure("its device is not there")));
    };
    let offset = u64::from(pointer.offset) * u64::from(Pointer::UNIT);
    if offset + pointer.charged() > slot || u64::from(pointer.logical) > slot {
        return Err(damaged(Damage::Structure("behind the end of its segment")));
    }
    let mut stored = vec![0; pointer.stored as usize];
    let from = slots::start(place, slot) + offset + u64::from(Pointer::HEADER);
    device.read_at(&mut stored, from).map_err(|error| failed(&**device, "reading", error))?;
    let mut content = vec![0; pointer.logical as usize];
    if !compress::decompress(pointer.compression, &stored, &mut content) {
        return Err(damaged(Damage::Compression));
    }
    if checksum::content(pointer.checksum_kind, &content) != pointer.checksum {
        return Err(damaged(Damage::Checksum));
    }
    Ok(content)
}

/// Takes uncommitted frames for dead, and seals what was open unless it may be gone on with.
fn settle(loaded: &mut Loaded, resume: bool) -> Result<()> {
    for run in std::mem::take(&mut loaded.uncommitted) {
        loaded.table.apply(Op::Free { segment: run.segment, index: run.index, count: run.count, units: run.units })?;
    }
    let open: Vec<(u32, WriteStream)> = loaded
        .table
        .segments()
        .iter()
        .filter(|(_, segment)| !segment.sealed)
        .map(|(id, segment)| (*id, segment.stream))
        .collect();
    for (id, stream) in &open {
        let last = open.iter().rev().find(|(_, of)| of == stream).is_some_and(|(last, _)| last == id);
        if !(resume && last) {
            loaded.table.apply(Op::Seal { id: *id })?;
        }
    }
    Ok(())
}
