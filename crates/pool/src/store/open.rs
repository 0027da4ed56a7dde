//! Creating and importing a pool, adding devices.
//!
//! An import reads labels, takes the newest root, reads the table that it names, and frees the frames of later txgs.
//! Unless the pool was closed cleanly, nothing is appended to segments that were open: they are sealed where the root
//! ends them. Labels are written last, after the engine could read everything that it needs ([`Store::confirm`]): a
//! refused import writes none. In a bucket, where other machines may write at any time, a root comes first then: it
//! is put only if the root that was read is still the newest.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock};

use crate::backend::{Backend, Disks, NewGroup, NewMembers, NewestRoot, TrimStep};
use crate::device::Device;
use crate::error::PoolError;
use crate::label::{self, Identity, LogStart, Member, MemberState, Place, PoolState, Root, SlotAddress};
use crate::pointer::Txg;
use crate::segment::stream::Shape;
use crate::segment::table::Segment;

use super::appenders;
use super::commit::release;
use super::table_read::{Loaded, load, settle};
use super::{Committed, Map, Result, Store, Sums};

/// Number of attempts to write the identity while other machines try to import the pool.
const AT_ONCE_MOST: usize = 8;

/// Parameters of a new pool.
#[derive(Clone, Debug)]
pub struct NewPool {
    /// The pool's name.
    pub name: String,
    /// The pool's GUID: random.
    pub guid: u64,
    /// The machine: its number and name.
    pub host: (u64, String),
    /// Current time, seconds since 1970.
    pub time: u64,
    /// Whether metadata is written twice: a damaged copy is repaired from the other.
    pub redundant_metadata: bool,
}

impl NewPool {
    fn identity(&self, slot: u64, members: Vec<Member>, features: u64) -> Identity {
        Identity {
            revision: 1,
            incompatible: Identity::ORDERED_NAMES | Identity::PAGED_TABLE | Identity::ROW_CHARGES | features,
            read_only_compatible: 0,
            compatible: 0,
            pool: self.guid,
            name: self.name.clone(),
            state: PoolState::Active,
            host: self.host.clone(),
            time: self.time,
            slot,
            index: 0,
            members,
            groups: Vec::new(),
            change: None,
        }
    }
}

/// Access mode of an import.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Read and write, from the newest root.
    ReadWrite,
    /// Read only: nothing is written, not even a label.
    ReadOnly,
    /// Read only, from the newest readable root, even where later ones are lost.
    Salvage,
    /// Read and write, even where dedicated log devices are missing: entries that only they had are discarded.
    WithoutLog,
    /// Read and write, from the state after this txg. Later roots are discarded for good (a rewind).
    Rewind(Txg),
    /// Read only, from the state after this txg.
    ReadOnlyAt(Txg),
}

impl Access {
    /// Whether anything is written.
    #[must_use]
    pub fn writes(self) -> bool {
        !matches!(self, Self::ReadOnly | Self::Salvage | Self::ReadOnlyAt(_))
    }

    /// Whether it starts from the newest readable root.
    #[must_use]
    pub fn is_of_newest(self) -> bool {
        !matches!(self, Self::Rewind(_) | Self::ReadOnlyAt(_))
    }
}

/// Parameters of an import.
#[derive(Clone, Debug)]
pub struct Import {
    /// The access mode.
    pub access: Access,
    /// A new name for the pool.
    pub name: Option<String>,
    /// The machine: its number and name.
    pub host: (u64, String),
    /// Current time, seconds since 1970.
    pub time: u64,
}

fn refused<T>(why: impl Into<String>) -> Result<T> {
    Err(PoolError::Refused(why.into()))
}

impl Store {
    /// Creates a pool on devices; their content is lost.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for devices that are too short or too many, [`PoolError::Device`].
    pub fn create(devices: Vec<Arc<dyn Device>>, new: &NewPool) -> Result<(Self, Root)> {
        let redundant = if new.redundant_metadata { Identity::REDUNDANT_METADATA } else { 0 };
        let members = Disks::lay_out(&devices, new.guid)?;
        Self::create_of(devices, new, members, redundant)
    }

    /// Creates a pool on groups of devices, in the order of the list; their content is lost.
    ///
    /// # Errors
    /// As [`Self::create`]; [`PoolError::Refused`] for invalid groups.
    pub fn create_groups(devices: Vec<Arc<dyn Device>>, groups: &[NewGroup], new: &NewPool) -> Result<(Self, Root)> {
        let members = Disks::lay_out_groups(&devices, new.guid, groups)?;
        Self::create_of(devices, new, members, Identity::REDUNDANT_METADATA | Identity::GROUPS)
    }

    fn create_of(
        devices: Vec<Arc<dyn Device>>,
        new: &NewPool,
        NewMembers { slot, members, log, groups }: NewMembers,
        features: u64,
    ) -> Result<(Self, Root)> {
        let identity = Identity { groups, ..new.identity(slot, members, features) };
        identity.check()?;
        // A device that cannot be written leaves all others as they are.
        devices.iter().try_for_each(|device| label::try_writing(&**device))?;
        devices.iter().try_for_each(|device| label::clear_foreign(&**device))?;
        let disks = Arc::new(Disks::new(devices, &identity));
        Self::create_on(Arc::clone(&disks) as _, Some(disks), identity, log)
    }

    /// Creates a pool in an empty backend without devices (a bucket); its segments use at most `size` bytes.
    ///
    /// # Errors
    /// [`PoolError::Refused`] where a pool exists already; [`PoolError::Device`].
    pub fn create_in(backend: Arc<dyn Backend>, new: &NewPool, size: u64) -> Result<(Self, Root)> {
        let member = Member { guid: new.guid, length: size, path: Vec::new(), state: MemberState::default() };
        let identity = new.identity(backend.segment_length(), vec![member], 0);
        identity.check()?;
        Self::create_on(backend, None, identity, Vec::new())
    }

    fn create_on(
        backend: Arc<dyn Backend>,
        disks: Option<Arc<Disks>>,
        identity: Identity,
        log: Vec<(SlotAddress, u32)>,
    ) -> Result<(Self, Root)> {
        let root = Root {
            pool: identity.pool,
            generation: 0,
            kept: 0,
            txg: Txg(0),
            time: identity.time,
            clean: false,
            next_segment: 1,
            catalog: None,
            upper: Vec::new(),
            log_start: LogStart::default(),
            log,
            table_segments: Vec::new(),
            table: None,
            deltas: Vec::new(),
            table_top: Vec::new(),
            table_list: Vec::new(),
            listed: [].into(),
            guarded: false,
        };
        let store = Self::assemble(backend, disks, identity.clone(), root, Loaded::default(), true)?;
        store.backend.put_identity(&identity)?;
        store.backend.begin_epoch(0)?;
        {
            let mut committed = store.committed.lock();
            store.commit_root(&mut committed, None, false, true)?;
            store.guard(&mut committed)?;
        }
        let root = store.root();
        Ok((store, root))
    }

    /// Imports the pool on these devices; they may be in any order, but have to be complete.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for devices that are missing or belong to another pool, a newer format, a txg that is
    /// not retained; [`PoolError::Format`] and [`PoolError::Frame`] for damage; [`PoolError::Device`].
    pub fn open(devices: Vec<Arc<dyn Device>>, import: &Import) -> Result<(Self, Root)> {
        let (disks, identity) = Disks::find(devices, import.access.writes())?;
        let disks = Arc::new(disks);
        Self::open_on(Arc::clone(&disks) as _, Some(disks), identity, import)
    }

    /// Imports the pool of this identity from a backend without devices (a bucket).
    ///
    /// # Errors
    /// As [`Self::open`]. A simultaneous import by another process is detected by [`Self::confirm`].
    pub fn open_in(backend: Arc<dyn Backend>, identity: Identity, import: &Import) -> Result<(Self, Root)> {
        Self::open_on(backend, None, identity, import)
    }

    fn open_on(
        backend: Arc<dyn Backend>,
        disks: Option<Arc<Disks>>,
        mut identity: Identity,
        import: &Import,
    ) -> Result<(Self, Root)> {
        let rewinds = matches!(import.access, Access::Rewind(_));
        let (root, newest_log) = choose_root(&*backend, import.access)?;
        let lost = disks.as_ref().map(|disks| disks.lost_log()).unwrap_or_default();
        if !lost.is_empty() && import.access == Access::ReadWrite {
            let what = if root.clean {
                "a log device is missing"
            } else {
                "what was synced last is on a log device that is missing"
            };
            return refused(format!("{what}: {}", lost.join(", ")));
        }
        match import.access {
            Access::ReadWrite => backend.missing_log()?.map_or(Ok(()), refused)?,
            Access::WithoutLog if backend.missing_log()?.is_some() => backend.give_up_log(),
            _ => {}
        }
        let mut root = root;
        let mut loaded = load(&*backend, &mut root)?;
        let writable = import.access.writes();
        let resume = root.clean && writable && backend.extends();
        settle(&mut loaded, resume, appenders::of_content(&*backend))?;
        if writable {
            identity = taken(identity, import);
            if let Some(disks) = &disks {
                disks.note_paths(&mut identity);
            }
            identity.check()?;
        }
        let store = Self::assemble(backend, disks, identity.clone(), root, loaded, writable)?;
        if rewinds {
            store.begin_again(newest_log)?;
        } else if writable {
            if store.backend.is_shared() {
                store.committed.lock().takes_over = Some(import.clone());
            }
            // Nothing is written before the pool could be read.
            store.unconfirmed.store(true, Ordering::Release);
        }
        let root = store.root();
        Ok((store, root))
    }

    /// Takes over a pool in a shared backend: a root with the same content as the newest one fences other writers.
    /// Only then is it known which segments no root needs.
    fn take_over(&self, committed: &mut Committed) -> Result<()> {
        self.backend.begin_epoch(0)?;
        self.put_same_root(committed)?;
        let unknown = {
            let map = self.map.read();
            let root = &committed.root;
            let of_table =
                |id: u32, place: &Place| root.table_segment(id).is_some_and(|segment| segment.place == *place);
            let known =
                |id: u32, place: &Place| map.table.segments().get(&id).is_some_and(|found| found.place == *place);
            self.backend.list_unknown(&|id, place| of_table(id, place) || known(id, place))?
        };
        // Leftover segments of a writer of an older version, which has claimed no epoch and whose roots are all
        // deleted.
        if self.backend.begin_epoch(unknown.latest)? {
            self.put_same_root(committed)?;
        }
        self.backend.remove(&unknown.segments);
        Ok(())
    }

    fn put_same_root(&self, committed: &mut Committed) -> Result<()> {
        let root = Root { generation: committed.root.generation + 1, clean: false, ..committed.root.clone() };
        self.write_root(&root)?;
        committed.root = root;
        Ok(())
    }

    /// Writes the identity with this machine as the owner. A process that tried to import the pool at the same
    /// moment, and has lost it to this root, may have written its own.
    fn tell_identity(&self, committed: &mut Committed, import: &Import) -> Result<()> {
        for _ in 0..AT_ONCE_MOST {
            match self.backend.put_identity(&committed.identity) {
                Err(PoolError::Refused(_)) => {}
                told => return told,
            }
            if self.backend.newer_root(committed.root.generation)?.is_some() {
                return refused("another program has imported the pool at the same moment");
            }
            let own = &committed.identity;
            match self.backend.newest_identity()? {
                Some(other) if other.pool == own.pool && other.revision >= own.revision => {
                    if other.state == PoolState::Destroyed {
                        return refused("the pool was destroyed at the same moment");
                    }
                    committed.identity = taken(other, import);
                }
                _ => break,
            }
        }
        self.backend.put_identity(&committed.identity)
    }

    /// Rewinds to an older root: the log begins after everything that it ever held, so that no discarded entry is
    /// replayed. In a bucket an epoch is claimed for it; nothing else is written before [`Self::confirm`], so that a
    /// state that cannot be read does not cost the others.
    fn begin_again(&self, given_up: LogStart) -> Result<()> {
        let mut committed = self.committed.lock();
        committed.given_up = Some(given_up);
        if self.backend.is_shared() {
            // Discarded roots may no longer show which epochs exist.
            self.backend.begin_epoch(self.backend.list_unknown(&|_, _| true)?.latest)?;
        }
        committed.root.log_start = self.backend.fresh_log()?;
        self.unconfirmed.store(true, Ordering::Release);
        Ok(())
    }

    /// Confirms an import after the opened state could be read: the labels record that the pool is imported. If it is
    /// called before anything else is written, a refused import leaves the devices unchanged; otherwise the first
    /// commit or change of the labels calls it.
    ///
    /// In a bucket, the pool is taken over from its last writer, if the opened root is still the newest.
    ///
    /// For an older state ([`Access::Rewind`]), all later states are discarded now, by one root record that is newer
    /// than all others: nothing was overwritten before. A process that still writes to the log of these states is
    /// fenced when this returns.
    ///
    /// # Errors
    /// [`PoolError::Suspended`] if it cannot be written. In a bucket: [`PoolError::Refused`] where another process
    /// has put a root since or imports the pool at the same moment, [`PoolError::Overtaken`], [`PoolError::Device`];
    /// it can be called again.
    pub fn confirm(&self) -> Result<()> {
        if !self.unconfirmed.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut committed = self.committed.lock();
        if let Some(import) = committed.takes_over.clone() {
            self.take_over(&mut committed)?;
            self.tell_identity(&mut committed, &import)?;
            self.guard(&mut committed)?;
            committed.takes_over = None;
            self.unconfirmed.store(false, Ordering::Release);
        }
        if self.unconfirmed.load(Ordering::Acquire) {
            let given_up = match committed.given_up {
                Some(log) => self.write_root(&committed.root).and_then(|()| self.backend.end_log(log)),
                None => Ok(()),
            };
            let written = given_up.and_then(|()| self.backend.put_identity(&committed.identity));
            written.and_then(|()| self.guard(&mut committed)).map_err(|error| self.suspend(&error))?;
            self.unconfirmed.store(false, Ordering::Release);
        }
        Ok(())
    }

    /// Adds a device; segments are allocated on it from now on.
    ///
    /// # Errors
    /// [`PoolError::Refused`] for a device that is too short or cannot be written; [`PoolError::Suspended`] if the
    /// labels of the others cannot be written.
    pub fn add_device(&self, device: Arc<dyn Device>, time: u64) -> Result<()> {
        self.ready()?;
        let disks = self.disks()?;
        let mut committed = self.committed.lock();
        let mut identity = disks.with_device(&*device, &committed.identity)?;
        (identity.revision, identity.time) = (identity.revision + 1, time);
        // Validated before anything is written.
        identity.check()?;
        // The new device first: the others must not name a device whose label does not know the pool.
        let index = u16::try_from(identity.members.len() - 1).or_else(|_| refused("too many devices"))?;
        let written = label::write_first_identity(&*device, &Identity { index, ..identity.clone() });
        if let Err(error) = written.and_then(|()| disks.mend_erasable(&*device)) {
            let Err(left) = label::clear(&*device) else { return refused(error.to_string()) };
            // Its leftover label must not count as the newest. An import requires label revisions at most one apart,
            // so the others are advanced beyond it step by step.
            for _ in 0..2 {
                committed.identity.revision += 1;
                self.backend.put_identity(&committed.identity).map_err(|error| self.suspend(&error))?;
            }
            return refused(format!("{error} (and it cannot be cleared: {left})"));
        }
        self.backend.put_identity(&identity).map_err(|error| self.suspend(&error))?;
        disks.join(device, &identity);
        committed.identity = identity;
        // The new device has no root records yet.
        self.guard(&mut committed).map_err(|error| self.suspend(&error))
    }

    /// Uses the space that devices have gained since they were added; returns the numbers of these devices.
    ///
    /// The labels record the new size before anything is stored there. The labels at the old end are overwritten
    /// eventually; the new end has its own.
    ///
    /// # Errors
    /// [`PoolError::Device`] where the system does not report a length, [`PoolError::Suspended`] if labels cannot be
    /// written.
    pub fn expand(&self, time: u64) -> Result<Vec<usize>> {
        self.ready()?;
        let mut committed = self.committed.lock();
        let disks = self.disks()?;
        let mut identity = committed.identity.clone();
        let grown = disks.measure(&mut identity)?;
        if grown.is_empty() {
            return Ok(Vec::new());
        }
        // No slot reaches into the labels at the new end, which lie behind those at the old one.
        for (number, _) in &grown {
            let index = *number as u16;
            let device = disks.device(index)?;
            label::clear_new_end(&*device, identity.pool, index)?;
            if let (true, Some(member)) = (self.is_sealed(), committed.identity.members.get(*number)) {
                // Nothing else overwrites the erasable keys there when they are destroyed.
                label::clear_former_end(&*device, member.length)?;
            }
        }
        (identity.revision, identity.time) = (identity.revision + 1, time);
        self.backend.put_identity(&identity).map_err(|error| self.suspend(&error))?;
        disks.grow(&grown);
        committed.identity = identity;
        // The labels at a new end have no root records yet either.
        self.guard(&mut committed).map_err(|error| self.suspend(&error))?;
        Ok(grown.into_iter().map(|(number, _)| number).collect())
    }

    /// Growth that [`Self::expand`] would add, as far as known without measuring the devices again, bytes.
    #[must_use]
    pub fn expandable(&self) -> u64 {
        self.disks.as_ref().map_or(0, |disks| disks.expandable(&self.identity()))
    }

    /// Discards a run of free slots of a device from this one on: slots that neither the current state nor a retained
    /// root uses.
    ///
    /// # Errors
    /// [`PoolError::Device`]; an error for a device number that does not exist.
    pub fn trim_free(&self, device: u16, from: u32) -> Result<TrimStep> {
        self.disks()?.trim_free(device, from)
    }

    /// Enables or disables the discarding of freed slots (autotrim).
    pub fn set_autotrim(&self, on: bool) {
        self.disks.iter().for_each(|disks| disks.set_autotrim(on));
    }

    /// Discards some freed slots; returns whether more are waiting.
    ///
    /// # Errors
    /// [`PoolError::Device`]; the slots are free all the same.
    pub fn trim_step(&self) -> Result<bool> {
        self.disks.as_ref().map_or(Ok(false), |disks| disks.trim_step())
    }

    /// The pool's devices; an error for a pool in a bucket.
    pub(super) fn disks(&self) -> Result<&Disks> {
        self.disks.as_deref().ok_or_else(|| PoolError::Refused("the pool does not lie on devices".to_owned()))
    }

    /// Renames the pool.
    ///
    /// # Errors
    /// [`PoolError::Suspended`] if labels cannot be written.
    pub fn rename(&self, name: &str, time: u64) -> Result<()> {
        self.relabel(time, |identity| identity.name = name.to_owned())
    }

    /// Marks the pool as destroyed, after it was closed or instead of that: it is imported only on explicit request.
    ///
    /// # Errors
    /// [`PoolError::Suspended`] if labels cannot be written.
    pub fn destroy(&self, time: u64) -> Result<()> {
        // A store that is suspended may be full: nothing but the identity is written any more, if the pool was taken over.
        let is_taken = !self.unconfirmed.load(Ordering::Acquire);
        if !(self.backend.is_shared() && is_taken && self.suspended.reason().is_some()) {
            self.ready()?;
        }
        self.put_changed(time, |identity| identity.state = PoolState::Destroyed)?;
        self.closed.store(true, Ordering::Release);
        Ok(())
    }

    pub(super) fn relabel(&self, time: u64, change: impl FnOnce(&mut Identity)) -> Result<()> {
        self.ready()?;
        self.put_changed(time, change)
    }

    fn put_changed(&self, time: u64, change: impl FnOnce(&mut Identity)) -> Result<()> {
        let mut committed = self.committed.lock();
        let mut identity = committed.identity.clone();
        change(&mut identity);
        (identity.revision, identity.time) = (identity.revision + 1, time);
        identity.check()?;
        self.backend.put_identity(&identity).map_err(|error| self.suspend(&error))?;
        committed.identity = identity;
        Ok(())
    }

    fn assemble(
        backend: Arc<dyn Backend>,
        disks: Option<Arc<Disks>>,
        identity: Identity,
        root: Root,
        loaded: Loaded,
        writable: bool,
    ) -> Result<Self> {
        let of_table = root.table_segments.iter().map(|segment| (segment.id, &segment.place));
        let others = loaded.table.segments().iter().map(|(id, segment)| (*id, &segment.place));
        backend.adopt(&root, &mut of_table.chain(others).filter(|(_, place)| !place.is_empty()))?;
        let longest = backend.segment_length();
        let sums = Sums { allocated: AtomicU64::new(loaded.table.live_bytes()), ..Sums::default() };
        sums.table.store(loaded.charged(&root), Ordering::Relaxed);
        let mut map = Map { table: loaded.table, next_segment: root.next_segment, ..Map::default() };
        let mut root = root;
        backend.remove(&release(&mut map, &mut root)?);
        map.sum_up(identity.revision, &loaded.tree, &root, &*backend);
        let open_table = root
            .table_segments
            .iter()
            .rev()
            .find(|segment| segment.dead_since.is_none() && root.clean && backend.extends())
            .map(|segment| segment.id);
        let appenders = appenders::Appenders::new(appenders::of_content(&*backend));
        let mut resumed = BTreeSet::new();
        for appender in appenders.all() {
            let is_open = |(id, segment): &(&u32, &Segment)| {
                !segment.sealed && segment.stream == appender.stream && !resumed.contains(*id)
            };
            let open = map.table.segments().iter().find(is_open);
            if let Some((id, segment)) = open
                && !segment.place.is_empty()
            {
                resumed.insert(*id);
                let place = segment.place.clone();
                let shape = Shape { capacity: backend.capacity(&place), row: backend.row(&place) };
                appender.lock().begin(*id, place, shape, (segment.frames, segment.bytes));
                if appender.stream.is_of_moved() {
                    map.arriving.insert(*id);
                }
            }
        }
        let committed = Committed {
            tree: loaded.tree,
            hollow: loaded.hollow,
            firsts: loaded.firsts,
            given_up: None,
            takes_over: None,
            open_table,
            renew: false,
            identity: identity.clone(),
            root: root.clone(),
        };
        Ok(Self {
            backend,
            disks,
            slot: identity.slot,
            longest,
            writable,
            closed: AtomicBool::new(false),
            unconfirmed: AtomicBool::new(false),
            map: RwLock::new(map),
            appenders,
            ordered_names: AtomicBool::new(identity.incompatible & Identity::ORDERED_NAMES != 0),
            sealed_frames: AtomicBool::new(identity.incompatible & Identity::UNFINISHED_ENCRYPTION != 0),
            mixed: Default::default(),
            durable: AtomicU64::new(root.txg.0),
            committed: Mutex::new(committed),
            frees: Mutex::new(BTreeMap::new()),
            suspended: Arc::default(),
            keeps_unwritten: AtomicBool::new(false),
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

/// The identity after this import.
fn taken(mut identity: Identity, import: &Import) -> Identity {
    identity.name = import.name.clone().unwrap_or(identity.name);
    (identity.state, identity.host, identity.time) = (PoolState::Active, import.host.clone(), import.time);
    identity.revision += 1;
    // Before the first root with a paged segment table, and before inodes record the charge of their rows.
    identity.incompatible |= Identity::PAGED_TABLE | Identity::ROW_CHARGES;
    identity
}

/// Chooses the root that an import starts from, and the log start of the newest root. Where later roots are discarded
/// ([`Access::Rewind`]), the chosen one gets a newer generation and is the only one retained.
fn choose_root(backend: &dyn Backend, access: Access) -> Result<(Root, LogStart)> {
    let Some(NewestRoot { root: newest, lost }) = backend.newest_root()? else {
        return refused("no root record of the pool can be read");
    };
    let log = newest.log_start;
    let (Access::Rewind(txg) | Access::ReadOnlyAt(txg)) = access else {
        return if lost == 0 || access == Access::Salvage {
            Ok((newest, log))
        } else {
            Err(PoolError::Lost { states: lost, txg: newest.txg })
        };
    };
    let roots = backend.roots()?;
    let kept: Vec<&Root> = roots.values().filter(|root| root.generation >= newest.kept).collect();
    match kept.iter().rev().find(|root| root.txg == txg) {
        Some(root) if !access.writes() => Ok(((*root).clone(), log)),
        Some(root) => {
            let generation = newest.generation + 1 + lost;
            Ok((Root { generation, kept: generation, clean: false, guarded: false, ..(*root).clone() }, log))
        }
        None => {
            let mut txgs: Vec<u64> = kept.iter().map(|root| root.txg.0).collect();
            txgs.dedup();
            let listed: Vec<String> = txgs.iter().map(u64::to_string).collect();
            refused(format!("the state after txg {txg} is not kept; these are: {}", listed.join(", ")))
        }
    }
}
