//! An imported pool: the engine, the store and the devices below it, and the state of this import.
//!
//! Made by the process that owns the pool, and by tests over simulated devices. Invariants: while
//! it lives, nothing else writes to the devices; its engine runs by itself (commits, cleaning) from
//! the import to the export, unless the pool is read-only.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use nacre_pool::backend::{Backend, Bucket, Cached, NewGroup, Objects, SeenRoots, WriterId};
use nacre_pool::device::Device;
use nacre_pool::engine::{Committer, Durable, Edit, Entropy, NewDataset, Pace, Pool, PoolConfig, Setting, Stuck};
use nacre_pool::files::kernel_clock;
use nacre_pool::label::{self, Identity, PoolState, Root};
use nacre_pool::log::KeptLog;
use nacre_pool::properties::{OF_NEW_POOLS, spelling};
use nacre_pool::store::{Access, Import, NewPool, Store};
use nacre_pool::{PoolError, Txg};
use nacre_remote::Address;
use parking_lot::{Mutex, RwLock};

use crate::Progress;
use crate::clock::now;
use crate::counted::{Counted, CountedBucket, Tally};
use crate::failing::Failing;
use crate::followed::Followed;
use crate::pool::devices::Opened;
use crate::pool::in_bucket::Remains;
use crate::pool::{Figures, Reshape, Resilver, Scrub, Trim, in_bucket, kept_log, kept_parts};
use crate::reading::{self, Reading};
use crate::refusal::{Kind, Refusal};
use crate::watch::Watch;

/// Parameters of an import, besides its devices.
#[derive(Clone)]
pub struct Opening {
    /// The machine: a number and a name.
    pub host: (u64, String),
    /// Random numbers.
    pub entropy: Entropy,
    /// The limit of the cache, bytes.
    pub cache: u64,
    /// Directory below which all mount points lie (`altroot`).
    pub altroot: Option<PathBuf>,
    /// Accepts a bucket whose newest state is older than one that this machine has seen.
    pub accepts_older: bool,
    /// The pool's name for this import only; the labels keep the name that they have.
    pub alias: Option<String>,
    /// Directory in which the pool's own file system is mounted under its name when `mountpoint` is
    /// not set: `/`, or a user's home.
    pub home: PathBuf,
    /// Directory for state that must survive a reboot; none where there can be none.
    pub state: Option<PathBuf>,
    /// The replay journal, which survives this process; if a crashed process has filled it, the import replays it.
    pub kept: Option<Arc<KeptLog>>,
    /// Writer number of a crashed process ([`Imported::writer`]), if this one takes over its pool in a store.
    pub after: Option<u64>,
    /// Handling of writes that a device refuses.
    pub failing: Arc<Failing>,
}

impl std::fmt::Debug for Opening {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Opening").field("host", &self.host).field("cache", &self.cache).finish_non_exhaustive()
    }
}

const FAILMODE: &str = "failmode";
/// Name under which damage is stored among the pool's properties; it is not a property itself.
const DAMAGE: &str = "damage";
/// Maximum length of that text, bytes: a row of the catalog has no room for more.
const DAMAGE_MOST: usize = 7000;

/// Time that a query waits for a commit to a store.
const ANSWER: Duration = Duration::from_millis(300);

/// An imported pool.
pub struct Imported {
    /// The engine.
    pub pool: Arc<Pool>,
    /// The store below it.
    pub store: Arc<Store>,
    /// The devices, in the pool's order; none where it lies in a bucket.
    pub devices: Arc<RwLock<Vec<Arc<Counted>>>>,
    /// The bucket that it lies in, if it does.
    pub bucket: Option<Arc<CountedBucket>>,
    /// This machine's cache of the bucket's content.
    pub cached: Option<Arc<Cached>>,
    /// The whole address of the bucket.
    address: Option<String>,
    /// The bucket as the engine's backend.
    objects: Option<Arc<Objects>>,
    /// Handling of writes that the devices or the bucket refuse.
    pub failing: Arc<Failing>,
    /// Events and damage.
    pub watch: Arc<Watch>,
    /// The scrub that runs, or the last one.
    pub scrub: Arc<Scrub>,
    /// The job that resilvers devices that come back.
    pub resilver: Arc<Resilver>,
    /// The job that moves segments for a topology change.
    pub reshape: Arc<Reshape>,
    /// Lock of verbs that change names, properties or mounts: they run one at a time. The caller of a verb takes it
    /// ([`crate::fs::FsRequest::alone`]); a receiver takes it itself, whenever it changes them.
    pub changing: Mutex<()>,
    /// Objects that long-running commands read.
    pub(crate) reading: Reading,
    /// The job that trims devices.
    pub trim: Arc<Trim>,
    /// When it was imported, seconds since 1970.
    pub since: u64,
    /// Whether nothing is written to it.
    pub read_only: bool,
    /// Its position, where it follows a writer.
    pub(crate) following: Mutex<Followed>,
    /// Parameters of the import.
    pub opening: Opening,
    /// Its name, as long as it is imported.
    name: String,
    /// The figures of the last answer: while writes wait, no others can be had.
    pub(crate) last: Mutex<Option<Figures>>,
    /// The engine's threads; `None` while it does not run.
    committer: Mutex<Option<Committer>>,
}

impl std::fmt::Debug for Imported {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Imported").field("name", &self.name()).finish_non_exhaustive()
    }
}

/// Explains an error of an import that finds damage behind the root record (like an uberblock),
/// after it has read the catalog (like ZFS' MOS) alone. Objects of a bucket can be gone or cut
/// short.
fn of_catalog(error: PoolError) -> Refusal {
    let is_lost = error.is_of_content();
    let refusal = Refusal::from(error);
    match is_lost {
        true => Refusal {
            what: format!("the catalog, which lists its file systems, is lost or damaged: {}", refusal.what),
            ..refusal
        },
        false => refusal,
    }
}

/// Owner of the root directories of new file systems: the user who owns the pool, because an
/// ordinary user must be able to write to them.
fn owner() -> (u32, u32) {
    (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw())
}

fn config(store: &Arc<Store>, opening: &Opening, logged: bool) -> Result<PoolConfig, PoolError> {
    Ok(PoolConfig {
        log: if logged { Some(store.log()?) } else { None },
        storage: Arc::clone(store) as _,
        clock: kernel_clock(),
        entropy: Arc::clone(&opening.entropy),
        cache: opening.cache,
        kept: opening.kept.clone().filter(|_| logged),
    })
}

/// Has `failmode` handle failures of devices that their groups cannot do without.
fn heed_needed(store: &Store, failing: &Arc<Failing>) {
    let (Some(disks), failing) = (store.on_devices(), Arc::clone(failing)) else { return };
    disks.on_needed_failure(move |device, error, again| match again {
        Some(again) => failing.write_again(device, error.clone(), again).is_ok(),
        None => {
            failing.end_by(device, error);
            false
        }
    });
}

fn counted(devices: Vec<Arc<dyn Device>>, failing: &Arc<Failing>, watch: &Arc<Watch>) -> Vec<Arc<Counted>> {
    let counted = |device| Arc::new(Counted::new(device, Arc::clone(failing), Arc::clone(watch)));
    devices.into_iter().map(counted).collect()
}

/// Returns the devices in the pool's order, with a placeholder for each missing one. A given device
/// that is not part of the pool is closed.
fn in_order(store: &Store, given: Vec<Arc<Counted>>, failing: &Arc<Failing>, watch: &Arc<Watch>) -> Vec<Arc<Counted>> {
    let Some(disks) = store.on_devices() else { return given };
    let counted = |device: Arc<dyn Device>| {
        let same = |given: &&Arc<Counted>| std::ptr::addr_eq(Arc::as_ptr(given), Arc::as_ptr(&device));
        let found = given.iter().find(same).cloned();
        found.unwrap_or_else(|| Arc::new(Counted::new(device, Arc::clone(failing), Arc::clone(watch))))
    };
    disks.devices().into_iter().map(counted).collect()
}

/// Sets the devices of an import to the store's current ones, in its order; `new` may be among them.
pub(crate) fn take_up(
    store: &Store,
    devices: &RwLock<Vec<Arc<Counted>>>,
    new: Vec<Arc<Counted>>,
    failing: &Arc<Failing>,
    watch: &Arc<Watch>,
) {
    let mut devices = devices.write();
    let known = devices.iter().cloned().chain(new).collect();
    *devices = in_order(store, known, failing, watch);
}

fn plain(devices: &[Arc<Counted>]) -> Vec<Arc<dyn Device>> {
    devices.iter().map(|device| Arc::clone(device) as Arc<dyn Device>).collect()
}

/// The devices or the bucket of an import, with their counters and caches.
#[derive(Default)]
struct Below {
    devices: Vec<Arc<Counted>>,
    bucket: Option<Arc<CountedBucket>>,
    cached: Option<Arc<Cached>>,
    address: Option<String>,
    objects: Option<Arc<Objects>>,
    /// The newest root in the bucket has to be of this writer.
    expected: Option<u64>,
    failing: Arc<Failing>,
    watch: Arc<Watch>,
}

impl Below {
    /// Sets up the backend of the pool of this number in a bucket.
    fn backend(
        &mut self,
        (bucket, address): (Arc<dyn Bucket>, String),
        pool: u64,
        (segment, size): (u64, u64),
        writes: bool,
        opening: &Opening,
    ) -> Result<Arc<dyn Backend>, Refusal> {
        let counted = Arc::new(CountedBucket::new(bucket, Arc::clone(&self.failing), Arc::clone(&self.watch)));
        self.bucket = Some(Arc::clone(&counted));
        let parts = kept_parts::of(&address, pool)?;
        let log = if writes { kept_log::of(&address, pool, opening.state.as_deref())? } else { Ok(None) };
        let (log, trouble) = match log {
            Ok(log) => (log, None),
            Err(why) => (None, Some(why)),
        };
        let state = opening.state.as_deref();
        let (seen, older) = (kept_log::seen(&address, pool, state), kept_log::seen_anywhere(pool, state));
        let seen = seen.map(|path| SeenRoots::open(path, older.as_deref(), opening.accepts_older));
        self.cached = parts.map(|parts| Arc::new(Cached::new(Arc::clone(&counted) as _, parts)));
        self.address = Some(address);
        let near: Arc<dyn Bucket> = match &self.cached {
            Some(cached) => Arc::clone(cached) as _,
            None => counted,
        };
        let nonce = opening.after.unwrap_or_else(|| (opening.entropy)());
        let host = WriterId::machine(opening.host.0, &opening.host.1);
        let writer = WriterId { nonce, host, clock: Box::new(now), uptime: Box::new(WriterId::uptime) };
        let objects = Objects::new(near, pool, segment, size, writer);
        let objects = objects.with_local_log(log).remembering(seen).expecting(self.expected);
        if let Some(why) = trouble {
            objects.set_log_trouble(Some(why));
        }
        let objects = Arc::new(if opening.after.is_some() { objects.going_on() } else { objects });
        self.objects = Some(Arc::clone(&objects));
        Ok(objects)
    }
}

impl Below {
    /// Sets up the backend of the pool of this identity in a bucket.
    fn in_bucket(
        at: (Arc<dyn Bucket>, String),
        identity: &Identity,
        writes: bool,
        expected: Option<u64>,
        opening: &Opening,
    ) -> Result<(Arc<dyn Backend>, Below), Refusal> {
        let size = identity.members.iter().map(|member| member.length).sum();
        let failing = Arc::clone(&opening.failing);
        let mut below = Below { failing, expected, ..Below::default() };
        let backend = below.backend(at, identity.pool, (identity.slot, size), writes, opening)?;
        Ok((backend, below))
    }
}

/// Size of segments in buckets, bytes.
const IN_BUCKET_SEGMENT: u64 = 8 << 20;
/// Maximum number of attempts to take over from a crashed process whose commit arrives late: it had
/// one commit in flight, and lists show it.
const LATE_MOST: usize = 8;
/// Maximum number of reads of a pool in a bucket before it is taken over, where its writer still commits.
const READ_FIRST_MOST: usize = 4;
/// Default capacity of a pool in a bucket, bytes.
const IN_BUCKET: u64 = 1 << 50;

fn new_pool(name: &str, opening: &Opening, redundant_metadata: bool) -> NewPool {
    let (host, guid) = (opening.host.clone(), (opening.entropy)());
    NewPool { name: name.to_owned(), guid, host, time: now(), redundant_metadata }
}

/// Properties with which a new pool's own file system is created.
fn first_properties(name: &str, root: &[(String, String)]) -> Result<Vec<(String, String)>, Refusal> {
    let for_good: Vec<(String, String)> = root.iter().filter(|(name, _)| spelling::is_one(name)).cloned().collect();
    spelling::check(&for_good)
        .map_err(|error| Refusal::new(Kind::Invalid, format!("cannot create '{name}': {error}")))?;
    let given = |name: &str| root.iter().any(|(given, _)| given == name);
    let of_new_pools = OF_NEW_POOLS.iter().filter(|(name, _)| !given(name));
    Ok(for_good.into_iter().chain(of_new_pools.map(|&(name, value)| (name.into(), value.into()))).collect())
}

impl Imported {
    /// Makes a pool of these devices, as single devices or in groups, in their order; their former
    /// content is lost. Of `root`, the properties of the pool's own file system, only those that
    /// cannot change later (name matching) are set here, and the defaults of new pools that are not
    /// given; [`Self::set_up`] sets the others.
    ///
    /// # Errors
    /// Errors of the engine: devices that are too short, that fail.
    pub fn create(
        devices: Vec<Arc<dyn Device>>,
        groups: &[NewGroup],
        name: &str,
        root: &[(String, String)],
        opening: Opening,
    ) -> Result<Self, Refusal> {
        let first = first_properties(name, root)?;
        let (failing, watch) = (Arc::clone(&opening.failing), Arc::new(Watch::default()));
        let devices = counted(devices, &failing, &watch);
        let new = new_pool(name, &opening, true);
        let made = if groups.is_empty() {
            Store::create(plain(&devices), &new)
        } else {
            failing.set_redundant();
            Store::create_groups(plain(&devices), groups, &new)
        };
        let (store, _) = made.map_err(|error| Refusal::pool(format!("cannot create '{name}'"), &error))?;
        let below = Below { devices, failing, watch, ..Below::default() };
        Self::begin(store, below, name, &first, opening)
    }

    /// Makes a pool in a bucket, with a capacity of `size` bytes; otherwise as [`Self::create`].
    ///
    /// # Errors
    /// Errors of the engine; a bucket with a pool in it, or one that cannot have one.
    pub fn create_in(
        (bucket, address): (Arc<dyn Bucket>, String),
        size: Option<u64>,
        name: &str,
        root: &[(String, String)],
        opening: Opening,
    ) -> Result<Self, Refusal> {
        let first = first_properties(name, root)?;
        let size = size.unwrap_or(IN_BUCKET);
        in_bucket::check_new(&*bucket, name, (opening.entropy)())?;
        let mut below = Below { failing: Arc::clone(&opening.failing), ..Below::default() };
        let new = new_pool(name, &opening, false);
        let backend = below.backend((bucket, address), new.guid, (IN_BUCKET_SEGMENT, size), true, &opening)?;
        let made = Store::create_in(backend, &new, size);
        let (store, _) = made.map_err(|error| Refusal::pool(format!("cannot create '{name}'"), &error))?;
        Self::begin(store, below, name, &first, opening)
    }

    /// Starts the engine of a new store.
    fn begin(
        store: Store,
        below: Below,
        name: &str,
        first: &[(String, String)],
        opening: Opening,
    ) -> Result<Self, Refusal> {
        let store = Arc::new(store);
        heed_needed(&store, &below.failing);
        let pool = config(&store, &opening, true).and_then(|config| Pool::create_owned(config, name, owner(), first));
        let pool = pool.map_err(|error| Refusal::pool(format!("cannot create '{name}'"), &error))?;
        let imported = Self::running(Arc::new(pool), store, below, false, opening)?;
        imported.begin_log(None)?;
        Figures::of(&imported)?;
        Ok(imported)
    }

    /// Imports the pool on these devices, or in this bucket; `name` is a new name for it.
    ///
    /// # Errors
    /// Errors of the engine: devices that are missing, damaged, of a newer format.
    pub fn open(
        opened: impl Into<Opened>,
        access: Access,
        name: Option<&str>,
        opening: Opening,
    ) -> Result<Self, Refusal> {
        let import = Import { access, name: name.map(ToOwned::to_owned), host: opening.host.clone(), time: now() };
        let (store, root, below) = match opened.into() {
            Opened::Devices(devices) => Self::open_devices(devices, &import, &opening.failing)?,
            Opened::Bucket(bucket, address) if opening.after.is_some() => {
                Self::open_left((bucket, address), &import, &opening)?
            }
            Opened::Bucket(bucket, address) => return Self::open_bucket((bucket, address), &import, &opening),
        };
        Self::take_up(store, root, below, &import, opening)
    }

    /// Opens the pool in a bucket. It is taken over after its catalog was read, so that a refused
    /// import leaves it as it was. If its writer has committed meanwhile, everything is read again;
    /// the last attempt takes it over unread.
    fn open_bucket(
        (bucket, address): (Arc<dyn Bucket>, String),
        import: &Import,
        opening: &Opening,
    ) -> Result<Self, Refusal> {
        let writes = import.access.writes();
        let (mut tries, mut writer, mut was_destroyed) = (0, None, false);
        loop {
            tries += 1;
            let identity = in_bucket::find(&*bucket)?.ok_or_else(|| in_bucket::no_pool(&*bucket))?;
            let is_destroyed = identity.state == PoolState::Destroyed;
            // A pool that was destroyed at the first attempt already can be wanted back.
            if tries > 1 && is_destroyed && !was_destroyed {
                return Err(in_bucket::destroyed(&*bucket));
            }
            was_destroyed = is_destroyed;
            if writes && tries == 1 {
                in_bucket::check(&*bucket, (opening.entropy)())?;
            }
            let at = (Arc::clone(&bucket), address.clone());
            let (backend, below) = Below::in_bucket(at, &identity, writes, writer, opening)?;
            let objects = below.objects.clone();
            if tries == READ_FIRST_MOST
                && let Some(objects) = &objects
            {
                objects.take_over_unread(import.access == Access::WithoutLog)?;
            }
            let (store, root) = Store::open_in(backend, identity, import)?;
            let opened = Self::take_up(store, root, below, import, opening.clone());
            writer = objects.and_then(|objects| objects.fenced_after());
            let may_go_on = import.access.is_of_newest() && tries < READ_FIRST_MOST;
            if opened.is_ok() || writer.is_none() || !may_go_on {
                return opened;
            }
        }
    }

    /// Opens the pool of a crashed process in a store, and waits for the store. Requests of that
    /// process may still arrive until this one has written a root: then the state that was read
    /// before is stale, and is read again.
    fn open_left(
        (bucket, address): (Arc<dyn Bucket>, String),
        import: &Import,
        opening: &Opening,
    ) -> Result<(Store, Root, Below), Refusal> {
        in_bucket::remove_unfinished(&*bucket);
        let patient = CountedBucket::new(Arc::clone(&bucket), Arc::clone(&opening.failing), Arc::default());
        let mut tries = 0;
        loop {
            // The crashed process had the pool: a list without it is wrong, or comes too early.
            let listed = || match in_bucket::find(&patient) {
                Ok(None) => Err(io::Error::new(io::ErrorKind::NotFound, "its list of objects has no pool")),
                found => Ok(found),
            };
            let found = opening.failing.read(patient.name(), listed);
            let found = found.map_err(|error| Refusal::new(Kind::Io, format!("'{}': {error}", patient.name())))?;
            let identity = found?.ok_or_else(|| in_bucket::no_pool(&patient))?;
            if identity.state == PoolState::Destroyed {
                return Err(in_bucket::destroyed(&patient));
            }
            tries += 1;
            let at = (Arc::clone(&bucket), address.clone());
            let (backend, below) = Below::in_bucket(at, &identity, true, None, opening)?;
            let (store, root) = Store::open_in(backend, identity, import)?;
            match store.confirm() {
                Ok(()) => return Ok((store, root, below)),
                Err(error @ PoolError::Overtaken) if tries < LATE_MOST => {
                    tracing::info!(%error, "the newest state is looked for once more");
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn open_devices(
        devices: Vec<Arc<dyn Device>>,
        import: &Import,
        failing: &Arc<Failing>,
    ) -> Result<(Store, Root, Below), Refusal> {
        let (failing, watch) = (Arc::clone(failing), Arc::new(Watch::default()));
        let devices = counted(devices, &failing, &watch);
        let grouped = |device: &Arc<Counted>| {
            label::probe(&**device).is_ok_and(|identity| identity.is_some_and(|identity| !identity.groups.is_empty()))
        };
        if devices.iter().any(grouped) {
            failing.set_redundant();
        }
        let (store, root) = Store::open(plain(&devices), import)?;
        let devices = in_order(&store, devices, &failing, &watch);
        Ok((store, root, Below { devices, failing, watch, ..Below::default() }))
    }

    fn take_up(store: Store, root: Root, below: Below, import: &Import, opening: Opening) -> Result<Self, Refusal> {
        let (read_only, name) = (!import.access.writes(), import.name.as_deref());
        if read_only && name.is_some_and(|name| name != store.identity().name) {
            return Err(Refusal::new(Kind::Invalid, "a pool that is imported read-only cannot have another name"));
        }
        let store = Arc::new(store);
        heed_needed(&store, &below.failing);
        let waits_by_its_mode = &mut |pool: &Pool| {
            let all = pool.pool_properties()?;
            all.iter().filter(|(name, _)| name == FAILMODE).for_each(|(_, value)| below.failing.set(value));
            Ok(())
        };
        let config = config(&store, &opening, !read_only)?;
        let durable = durable(&root)?;
        let read = Pool::read_catalog(config, &durable).map_err(of_catalog)?;
        let pool = read.replay(&durable, waits_by_its_mode)?;
        pool.belongs_to(owner());
        let imported = Self::running(Arc::new(pool), store, below, read_only, opening)?;
        imported.take_name()?;
        imported.apply_properties()?;
        // A device may have failed while the replay journal was replayed: the next import does this then.
        if !read_only && imported.store.suspended().is_none() {
            imported.expand_by_itself()?;
            imported.resilver.begin()?;
            imported.resilver.want_spares();
            imported.reshape.resume()?;
            reading::tidy(&imported.pool)?;
            imported.pool.abort_unfinished()?;
        }
        Figures::of(&imported)?;
        Ok(imported)
    }

    fn running(
        pool: Arc<Pool>,
        store: Arc<Store>,
        Below { devices, bucket, cached, address, objects, expected: _, failing, watch }: Below,
        read_only: bool,
        opening: Opening,
    ) -> Result<Self, Refusal> {
        let devices = Arc::new(RwLock::new(devices));
        let (watching, known, of_bucket) = (Arc::clone(&watch), Arc::clone(&devices), bucket.clone());
        store.watch(move |damaged| {
            let device = damaged.device.and_then(|device| known.read().get(usize::from(device)).cloned());
            let tally: Option<&Tally> =
                device.as_deref().map(|device| &**device).or(of_bucket.as_deref().map(|bucket| &**bucket));
            let name = tally.map_or_else(String::new, |tally| tally.name().to_owned());
            if damaged.damage.is_some()
                && let Some(tally) = tally
            {
                tally.found_damage();
            }
            let frame = (damaged.pointer.segment, damaged.pointer.index);
            if damaged.mended {
                watching.mended(frame, damaged.owner, &name, damaged.damage.as_ref());
            } else {
                watching.damaged(frame, damaged.owner, &name, damaged.damage.as_ref());
            }
        });
        let (asked, known, of_bucket) = (Arc::clone(&failing), Arc::clone(&devices), bucket.clone());
        pool.when_stuck(move |why| {
            // A thread that waits for a device is answered by it, or by `failmode`.
            let is_busy = |tally: &Tally| tally.spread().active.iter().any(|active| *active > 0);
            let busy =
                known.read().iter().any(|device| is_busy(device)) || of_bucket.as_deref().is_some_and(|of| is_busy(of));
            if busy || asked.waiting().is_some() { Stuck::Excused } else { asked.stuck(why) }
        });
        let committer = if read_only { None } else { Some(pool.start_committer(Pace::for_memory(opening.cache))?) };
        let scrub = Arc::new(Scrub::new(&pool, &store, &watch, &devices, !read_only));
        let trim = Arc::new(Trim::new(&store, &watch, &devices));
        let resilver = Arc::new(Resilver::new(&pool, &store, &watch, &devices, &failing));
        let (reading, settling) = (Arc::clone(&resilver), Arc::clone(&resilver));
        let left = move || settling.take_up(Vec::new());
        let reshape = Arc::new(Reshape::new(&pool, &store, &watch, move || reading.read(), left));
        if let Some(disks) = store.on_devices().filter(|_| !read_only) {
            let resilver = Arc::downgrade(&resilver);
            disks.on_failure(move || resilver.upgrade().iter().for_each(Resilver::want_spares));
        }
        let name = opening.alias.clone().unwrap_or_else(|| store.identity().name);
        let (committer, last) = (Mutex::new(committer), Mutex::default());
        let following = Followed { generation: store.root().generation, error: None };
        Ok(Self {
            pool,
            store,
            devices,
            bucket,
            cached,
            address,
            objects,
            failing,
            watch,
            scrub,
            resilver,
            reshape,
            changing: Mutex::default(),
            reading: Reading::default(),
            trim,
            since: now(),
            read_only,
            following: Mutex::new(following),
            opening,
            name,
            last,
            committer,
        })
    }

    /// Applies the stored properties of the pool.
    pub(crate) fn apply_properties(&self) -> Result<(), Refusal> {
        let all = self.pool.pool_properties()?;
        if !self.read_only {
            self.begin_log(all.iter().find(|(name, _)| name == in_bucket::LOG).map(|(_, value)| value.as_str()))?;
        }
        for (name, value) in all {
            self.apply_property(&name, &value);
            if name == DAMAGE {
                self.watch.take_up(&value);
            }
            if name == Scrub::kept_as() {
                self.scrub.take_up(&value)?;
            }
            if name == Resilver::kept_as() {
                self.resilver.take_up_kept(&value, self.read_only)?;
            }
            if name == Reshape::kept_as() {
                self.reshape.take_up(&value);
            }
        }
        Ok(())
    }

    /// Applies a value of a property of the pool.
    pub(crate) fn apply_property(&self, name: &str, value: &str) {
        match name {
            "autotrim" => self.store.set_autotrim(value == "on"),
            FAILMODE => self.failing.set(value),
            _ => {}
        }
    }

    /// Sets where a pool in a bucket logs for fsync, at the import, before the first fsync.
    fn begin_log(&self, value: Option<&str>) -> Result<(), PoolError> {
        let Some(objects) = &self.objects else { return Ok(()) };
        let value = value.unwrap_or(in_bucket::LOCAL);
        if value == in_bucket::LOCAL {
            match objects.make_local_log() {
                Ok(made) => objects.log_locally(made),
                Err(error) => {
                    tracing::warn!(%error, "no log can be kept on this machine: it goes to the store");
                    objects.set_log_trouble(Some(error.to_string()));
                }
            }
        }
        if value != in_bucket::LOCAL {
            objects.set_log_trouble(None);
        }
        self.pool.record(value != in_bucket::NONE);
        Ok(())
    }

    /// Changes where a pool in a bucket logs for fsync. Nothing is logged while a commit makes the
    /// content of the previous log durable: only one log continues from each root.
    pub(crate) fn change_log(&self, value: &str) -> Result<(), Refusal> {
        let Some(objects) = &self.objects else { return Ok(()) };
        let local = value == in_bucket::LOCAL;
        if local && !objects.make_local_log()? {
            return Err(Refusal::new(Kind::Invalid, "there is no directory for a log on this machine")
                .next("--log-dir of import names one"));
        }
        objects.set_log_trouble(None);
        self.pool.record(false);
        self.pool.commit()?;
        objects.log_locally(local);
        self.pool.record(value != in_bucket::NONE);
        Ok(())
    }

    /// Logs on this machine that were not replayed, since they do not match the state in the store.
    #[must_use]
    pub fn logs_aside(&self) -> Vec<PathBuf> {
        self.objects.as_ref().map_or_else(Vec::new, |objects| objects.logs_aside())
    }

    /// Uses the space by which devices have grown since they became part of the pool; returns the
    /// paths of these devices.
    ///
    /// # Errors
    /// Errors of the store.
    pub fn expand(&self) -> Result<Vec<String>, PoolError> {
        let grown = self.store.expand(now())?;
        if !grown.is_empty() {
            self.pool.grown();
        }
        let devices = self.devices.read();
        let paths: Vec<String> =
            grown.into_iter().filter_map(|number| devices.get(number)).map(|device| device.name().to_owned()).collect();
        for path in &paths {
            self.watch.note("sysevent.fs.zfs.vdev_online", vec![("vdev_path".to_owned(), path.clone())]);
        }
        Ok(paths)
    }

    /// Expands the pool if its property `autoexpand` is on.
    fn expand_by_itself(&self) -> Result<(), Refusal> {
        let wanted = self.pool.pool_properties()?.iter().any(|(name, value)| name == "autoexpand" && value == "on");
        if wanted {
            let grown = self.expand().map_err(|error| {
                Refusal::pool(format!("cannot take the new room of devices of '{}'", self.name()), &error)
            })?;
            grown.iter().for_each(
                |path| tracing::info!(%path, "the pool uses all of this device now, which has become longer"),
            );
        }
        Ok(())
    }

    /// Sets properties of the pool's own file system and of the pool, as given at its creation or
    /// import. Values of the pool's properties are canonical; properties of the file system that
    /// cannot change later were set at its creation.
    ///
    /// # Errors
    /// A value that is not accepted.
    pub fn set_up(&self, root: &[(String, String)], pool: &[(String, String)]) -> Result<(), Refusal> {
        let doing = || format!("cannot set properties of '{}'", self.name());
        if !root.is_empty() {
            let dataset = self.pool.root()?;
            let edit = |(name, value): &(String, String)| Edit {
                dataset,
                name: name.clone(),
                to: Setting::Local(value.clone()),
            };
            let edits: Vec<Edit> = root.iter().filter(|(name, _)| !spelling::is_one(name)).map(edit).collect();
            self.pool.set_properties(&edits).map_err(|error| Refusal::pool(doing(), &error))?;
        }
        if !pool.is_empty() {
            let fits =
                pool.iter().try_for_each(|(name, value)| in_bucket::check_property(self.bucket.is_some(), name, value));
            fits.map_err(|refusal| Refusal { what: format!("{}: {}", doing(), refusal.what), ..refusal })?;
            let changes: Vec<(&str, Option<&str>)> =
                pool.iter().map(|(name, value)| (name.as_str(), Some(value.as_str()))).collect();
            if let Some((_, value)) = pool.iter().find(|(name, _)| name == in_bucket::LOG) {
                self.change_log(value)
                    .map_err(|refusal| Refusal { what: format!("{}: {}", doing(), refusal.what), ..refusal })?;
            }
            self.pool.set_pool_properties(&changes).map_err(|error| Refusal::pool(doing(), &error))?;
            pool.iter().for_each(|(name, value)| self.apply_property(name, value));
        }
        Ok(())
    }

    /// Gives the root dataset the name of the pool on its label or in this import, also where an
    /// import with a new name was cut short or the last one had a name of its own.
    pub(crate) fn take_name(&self) -> Result<(), Refusal> {
        let name = self.name();
        if self.pool.find(&name)?.is_some() {
            return Ok(());
        }
        if self.read_only {
            return Ok(self.pool.call_root(&name)?);
        }
        Ok(self.pool.rename_dataset(self.pool.root()?, &NewDataset::named(0, &name))?)
    }

    /// Whether it follows the commits of another machine.
    #[must_use]
    pub fn follows(&self) -> bool {
        self.read_only && self.bucket.is_some()
    }

    /// Why nothing is accepted any more, if so: a device failed, or the engine did; or the error
    /// for which writes wait.
    #[must_use]
    pub fn suspended(&self) -> Option<String> {
        if let Some(why) = self.failing.waiting() {
            return Some(why);
        }
        self.pool.suspended().map(|error| error.to_string()).or_else(|| self.store.suspended().map(ToOwned::to_owned))
    }

    /// Prepares the release of the pool: nothing waits any longer for a device or a store that does not answer.
    pub fn give_up(&self) {
        self.failing.give_up();
        if let Some(bucket) = &self.bucket {
            bucket.hurry();
        }
    }

    /// Prepares the destruction of the pool: nothing waits any longer than a request's usual deadline, or at all if
    /// the pool waits for a store or a device already.
    pub fn give_up_waiting(&self) {
        match self.suspended() {
            Some(_) => self.give_up(),
            None => self.failing.give_up(),
        }
    }

    /// Whether queries are answered soon. A commit to a store takes round trips to it.
    pub(crate) fn answers(&self) -> bool {
        self.bucket.is_none() || self.pool.answers_within(ANSWER) && self.store.answers_within(ANSWER)
    }

    /// The pool's name.
    #[must_use]
    pub fn name(&self) -> String {
        self.name.clone()
    }

    /// Stores the known damage across exports, where it has changed.
    ///
    /// # Errors
    /// Errors of a commit.
    pub(crate) fn keep_damage(&self) -> Result<(), PoolError> {
        let known = self.watch.kept(DAMAGE_MOST);
        let kept = self.pool.pool_properties()?.into_iter().find(|(name, _)| name == DAMAGE);
        if self.read_only || known == kept.map(|(_, value)| value).unwrap_or_default() {
            return Ok(());
        }
        self.pool.set_pool_properties(&[(DAMAGE, (!known.is_empty()).then_some(known.as_str()))])
    }

    /// Ends jobs, then the engine's threads with a last commit. Nothing is committed by itself afterwards.
    fn stop(&self) -> Result<(), PoolError> {
        self.scrub.job.leave();
        self.reshape.job.leave();
        self.trim.job.leave();
        self.resilver.spares.leave();
        self.resilver.job.leave();
        if let Err(error) = self.keep_damage() {
            // The next step reports why the pool accepts nothing any more; damage is found again.
            tracing::debug!(%error, "what is known of damage was not kept");
        }
        match self.committer.lock().take() {
            Some(committer) => committer.stop(),
            None => Ok(()),
        }
    }

    /// Makes changes from before the call durable, if there are any. Does nothing once the pool is being released.
    ///
    /// # Errors
    /// Errors of the engine: the pool is suspended.
    pub fn commit_changes(&self) -> Result<(), PoolError> {
        // An export waits for this lock, and nothing is written after it.
        let committer = self.committer.lock();
        if committer.is_some() { self.pool.commit_changes() } else { Ok(()) }
    }

    /// Exports the pool: everything is durable, and any machine may import it. Nothing is accepted afterwards.
    ///
    /// # Errors
    /// Errors of the engine; the pool is then as it was at its last commit.
    pub fn export(&self) -> Result<(), PoolError> {
        if self.opening.alias.is_some() && !self.read_only && self.pool.suspended().is_none() {
            // The root dataset has had the name of this import only.
            self.pool.rename_dataset(self.pool.root()?, &NewDataset::named(0, &self.store.identity().name))?;
        }
        self.stop()?;
        if self.read_only {
            return Ok(());
        }
        self.store.close(true, now())
    }

    /// Releases the pool and marks it as destroyed. Nothing is accepted afterwards. Its objects in
    /// a bucket remain ([`Self::erase`]).
    ///
    /// # Errors
    /// Errors of the engine; the pool is then as it was at its last commit.
    pub fn destroy(&self) -> Result<(), PoolError> {
        if self.bucket.is_none() {
            self.stop()?;
        } else {
            // Nothing of the pool is needed any more: a full bucket is not waited for, but one that is away is.
            self.failing.give_up_room();
            if let Err(error) = self.stop() {
                tracing::info!(%error, "the last changes of the pool are not committed before it is destroyed");
            }
        }
        self.store.destroy(now())
    }

    /// Removes the objects of a destroyed pool: a bucket costs money as long as anything is in it.
    ///
    /// # Errors
    /// The store refuses, or does not answer; the remaining objects are known as a destroyed pool's.
    pub fn erase(&self, progress: &mut dyn Progress) -> Result<(), Refusal> {
        let (Some(bucket), Some(address)) = (&self.bucket, &self.address) else { return Ok(()) };
        if self.store.identity().state != PoolState::Destroyed {
            return Ok(());
        }
        // A request has its usual deadline, and `failmode` does not retry a refused one.
        self.failing.give_up();
        bucket.take_time();
        let (pool, name, state) = (self.store.identity().pool, self.name(), self.opening.state.as_deref());
        Remains { bucket: &**bucket, address, pool, name: &name, state }.remove(progress)
    }

    /// Why synced data is not in a log on this machine, although it should be.
    pub(crate) fn log_trouble(&self) -> Option<String> {
        self.objects.as_ref().and_then(|objects| objects.log_trouble())
    }

    /// Locations of the pool: its devices, or the address of its bucket.
    #[must_use]
    pub fn places(&self) -> Vec<PathBuf> {
        match &self.address {
            Some(address) => vec![PathBuf::from(address)],
            None => self.devices.read().iter().map(|device| PathBuf::from(Device::name(&**device))).collect(),
        }
    }

    /// Number under which it writes to a store, where it lies in one: a process that takes over needs it.
    #[must_use]
    pub fn writer(&self) -> Option<u64> {
        self.objects.as_ref().map(|objects| objects.writer())
    }

    /// The directory that it lies in, where its bucket is one.
    #[must_use]
    pub fn bucket_directory(&self) -> Option<PathBuf> {
        match Address::parse(self.address.as_ref()?) {
            Ok(Address::Directory(directory)) => Some(directory.canonicalize().unwrap_or(directory)),
            _ => None,
        }
    }

    /// The server of the bucket that it lies in, where its address names one.
    pub(crate) fn endpoint(&self) -> Option<String> {
        Address::parse(self.address.as_ref()?).ok()?.endpoint()
    }

    /// Adds devices; frames go to them from now on.
    ///
    /// # Errors
    /// Errors of the engine: a device that is too short. The devices before it were added.
    pub fn add(&self, devices: Vec<Arc<dyn Device>>) -> Result<(), PoolError> {
        for device in counted(devices, &self.failing, &self.watch) {
            self.store.add_device(Arc::clone(&device) as Arc<dyn Device>, now())?;
            self.devices.write().push(device);
            self.pool.grown();
        }
        Ok(())
    }
}

pub(crate) fn durable(root: &Root) -> Result<Durable, Refusal> {
    let never_finished = || {
        Refusal::new(Kind::Invalid, "the making of this pool was never finished: there is nothing in it")
            .next("create it again, with -f")
    };
    let catalog = root.catalog.filter(|_| root.txg > Txg(0)).ok_or_else(never_finished)?;
    Ok(Durable { txg: root.txg, catalog, log: root.log_start.into() })
}
