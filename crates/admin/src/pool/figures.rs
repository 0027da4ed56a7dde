//! Figures of a pool: the data behind `list`, `get`, `status` and `iostat`.

use std::collections::BTreeMap;
use std::time::Duration;

use nacre_pool::backend::{Bucket, CacheFigures, DeviceHealth, Disks, Requests, Silence};
use nacre_pool::device::Device;
use nacre_pool::engine::Pool;
use nacre_pool::label::{Group, GroupClass, GroupKind, MemberRole, MemberStatus};
use nacre_pool::store::Space;
use serde::{Deserialize, Serialize};

use super::TrimReport;
use super::prices::{MonthCost, PRICES, Prices};
use crate::clock::now;
use crate::counted::{CountedBucket, Counts, Spread};
use crate::{Imported, Refusal};

pub use nacre_pool::properties::features::{CLASSES, FOLDED, GROUPS, ORDERED_NAMES, REDUNDANT_METADATA};

/// Minimum duration of a store's silence that is reported.
const SILENCE: Duration = Duration::from_secs(3);

/// The figures of a pool. Sizes in bytes, times in seconds since 1970.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Figures {
    /// Its name.
    pub name: String,
    /// Its guid.
    pub guid: u64,
    /// Total space; of groups as ZFS counts it: with parity, mirrored data once.
    pub size: u64,
    /// The part of it that file content can use.
    #[serde(default)]
    pub usable: u64,
    /// Space by which devices have grown since they became part of it, not yet used.
    #[serde(default)]
    pub expandable: u64,
    /// Metadata is written twice, or the process is of a version that does not report this.
    #[serde(rename = "twice", default = "untold")]
    pub redundant_metadata: bool,
    /// New file systems keep names with neighbouring numbers next to each other, or the process is
    /// of a version that does not report this.
    #[serde(rename = "near", default = "untold")]
    pub ordered_names: bool,
    /// There is, or was, a file system in which names match though their bytes differ; false if the
    /// process is of a version that does not report this.
    #[serde(default)]
    pub folding: bool,
    /// Metadata that has no second copy yet, bytes.
    #[serde(default)]
    pub lies_once: u64,
    /// Number of writes of metadata that failed for one of its two copies.
    #[serde(default)]
    pub unwritten: u64,
    /// Space in use.
    pub allocated: u64,
    /// Free space.
    pub free: u64,
    /// The part of `allocated` that is about to be freed.
    pub freeing: u64,
    /// The part of the free space that lies in slots with live data, percent: the cleaner reclaims it.
    pub fragmentation: u64,
    /// ONLINE, SUSPENDED after a failed write, DEGRADED where the file of a device was deleted.
    pub health: String,
    /// Why it is suspended.
    pub suspended: Option<String>,
    /// Writes wait until they can be made; the other figures are older ones.
    #[serde(default)]
    pub waits: bool,
    /// Directory below which all mount points lie.
    pub altroot: Option<String>,
    /// Why synced data is not in a log on this machine, although it should be.
    #[serde(default)]
    pub log_trouble: Option<String>,
    /// Whether nothing is written to it.
    pub read_only: bool,
    /// Its position, where it follows another machine that writes to it.
    #[serde(default)]
    pub follows: Option<Follows>,
    /// Its stored properties.
    pub properties: Vec<(String, String)>,
    /// Its devices.
    pub devices: Vec<DeviceFigures>,
    /// The groups of the devices; empty where all are single devices.
    #[serde(default)]
    pub groups: Vec<GroupFigures>,
    /// When it was imported.
    pub since: u64,
    /// Now.
    pub now: u64,
    /// The last durable transaction group.
    pub txg: u64,
    /// The process that owns it.
    pub process: u32,
    /// Why the process has ended, where that is known.
    #[serde(default)]
    pub ended: Option<String>,
    /// Failover state, where the pool survives its process.
    #[serde(default)]
    pub survives: Option<Survives>,
    /// Number of file systems that the import could not mount.
    #[serde(default)]
    pub unmounted: u64,
    /// Activity of its engine.
    #[serde(default)]
    pub engine: EngineFigures,
}

/// Failover state of a mount or a pool that survives its process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Survives {
    /// The supervisor process, which starts the next one; none where it is gone: then there is no failover.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guardian: Option<u32>,
    /// Number of failovers so far.
    pub restarts: u64,
    /// Why there will be no failover, where that is so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why_not: Option<String>,
    /// Number of descriptors that the service manager holds, in case all processes are killed; none
    /// where this is not a service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored: Option<usize>,
}

impl Survives {
    /// Describes it in words.
    #[must_use]
    pub fn text(&self) -> String {
        let restarts = match self.restarts {
            1 => "restarted once".to_owned(),
            restarts => format!("restarted {restarts} times"),
        };
        match (&self.why_not, self.guardian) {
            (Some(why), _) => format!("no: {why} ({restarts})"),
            (None, None) => format!("no: its guardian is gone ({restarts})"),
            (None, Some(guardian)) => {
                let service = match self.stored {
                    Some(stored) => format!(", and by the service manager with {stored} descriptors"),
                    None => String::new(),
                };
                format!("yes, by process {guardian}{service} ({restarts})")
            }
        }
    }
}

/// Position of a pool that follows a writer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Follows {
    /// The generation of the visible state.
    pub generation: u64,
    /// When the writer made it, seconds since 1970.
    pub time: u64,
    /// Error of the last attempt to move to a newer one.
    pub error: Option<String>,
}

/// Activity of a pool's engine since the import. Times in microseconds, sizes in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineFigures {
    /// Total time of commits.
    pub commit_time: u64,
    /// Time of the last commit.
    pub commit_last: u64,
    /// Commits by their duration: bucket n counts those from 2^n to 2^(n+1) - 1.
    pub commits: Vec<u64>,
    /// Dirty data in memory.
    pub held: u64,
    /// Cache hits and misses of tree nodes.
    pub nodes: (u64, u64),
    /// Cache hits and misses of content.
    pub content: (u64, u64),
    /// Size of the cache, and its limit.
    pub cache: (u64, u64),
}

impl EngineFigures {
    fn of(pool: &Pool) -> Self {
        let (commits, cache) = (pool.commit_figures(), pool.cache_figures());
        Self {
            commit_time: commits.total,
            commit_last: commits.last,
            commits: commits.histogram,
            held: pool.held(),
            nodes: (cache.node_hits, cache.node_misses),
            content: (cache.data_hits, cache.data_misses),
            cache: (cache.bytes, cache.limit),
        }
    }
}

fn untold() -> bool {
    true
}

/// The figures of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceFigures {
    /// Its path.
    pub path: String,
    /// Its guid.
    pub guid: u64,
    /// Space for segments, bytes.
    pub size: u64,
    /// Live data on it, bytes.
    pub allocated: u64,
    /// Slots in use, bytes.
    pub occupied: u64,
    /// The path at which it can still be read, if its file was deleted.
    #[serde(default)]
    pub deleted: Option<String>,
    /// Counters of requests.
    pub counts: Counts,
    /// Distribution of requests.
    #[serde(default)]
    pub spread: Spread,
    /// Its length when it became part of the pool or was last expanded, bytes; 0 if the process is
    /// of a version that does not report this.
    #[serde(default)]
    pub length: u64,
    /// Progress of a trim by hand.
    #[serde(default)]
    pub trim: TrimReport,
    /// Its state by its errors, in the words of ZFS; empty if the process is of a version that does not report this.
    #[serde(default)]
    pub state: String,
    /// Its displayed name, where that is not its path.
    #[serde(skip)]
    pub shown: Option<String>,
    /// Its state in its group, in the words of ZFS; empty where it is in none.
    #[serde(default)]
    pub standing: String,
    /// Whether it is being resilvered.
    #[serde(default)]
    pub resilvering: bool,
    /// Whether it is being removed: nothing new is written to it.
    #[serde(default)]
    pub leaving: bool,
    /// Empty for a regular device; `spare`, or `replacing`: it will replace another device.
    #[serde(default)]
    pub role: String,
    /// Index in this list of the device that it replaces, or for which it stands in as a spare.
    #[serde(default)]
    pub beside: Option<usize>,
    /// The server of a bucket whose address names one.
    #[serde(default)]
    pub endpoint: Option<String>,
    /// Counts of requests to a bucket.
    #[serde(default)]
    pub requests: Option<RequestFigures>,
    /// A bucket that does not answer at the moment: for how many seconds, and the error instead.
    #[serde(default)]
    pub silence: Option<(u64, String)>,
}

/// Requests to a bucket since the import. Sizes in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestFigures {
    /// Objects created or replaced.
    pub puts: u64,
    /// Objects read, or parts of them.
    pub gets: u64,
    /// Pages of listings.
    pub lists: u64,
    /// Objects deleted.
    pub deletes: u64,
    /// Retries, among all these.
    pub again: u64,
    /// Bytes sent.
    pub sent: u64,
    /// Bytes received.
    pub received: u64,
    /// This machine's cache of it.
    #[serde(default)]
    pub kept: Option<KeptFigures>,
}

/// Cache of a bucket, and its use since the import.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptFigures {
    /// Parts that were in the cache.
    pub hits: u64,
    /// Parts that had to be fetched.
    pub misses: u64,
    /// Parts that could not be written to the cache.
    pub failed: u64,
    /// Size of the cached parts, at most, bytes.
    pub bytes: u64,
    /// The limit, bytes.
    pub limit: u64,
}

impl Figures {
    /// Monthly cost of the bucket, where the pool lies in one.
    #[must_use]
    pub fn month_cost(&self) -> Option<MonthCost> {
        let asked = self.devices.iter().find_map(|device| device.requests)?;
        let list = self.properties.iter().find(|(name, _)| name == PRICES).map_or("", |(_, list)| list.as_str());
        // The stored list was checked when it was set.
        let prices = Prices::parse(list).unwrap_or_default();
        let RequestFigures { puts, gets, lists, deletes, again, sent, received, .. } = asked;
        let asked = Requests { puts, gets, lists, deletes, again, sent, received };
        Some(prices.month(self.allocated, &asked, self.now.saturating_sub(self.since)))
    }
}

impl RequestFigures {
    fn new(requests: Requests, kept: Option<CacheFigures>) -> Self {
        let Requests { puts, gets, lists, deletes, again, sent, received } = requests;
        let kept = kept.map(|CacheFigures { hits, misses, failed, bytes, limit }| KeptFigures {
            hits,
            misses,
            failed,
            bytes,
            limit,
        });
        Self { puts, gets, lists, deletes, again, sent, received, kept }
    }
}

/// A group of devices.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupFigures {
    /// Its name as in ZFS: `mirror-0`.
    pub name: String,
    /// Its kind in the words of ZFS: `mirror`, `raidz`; `plain` for single devices.
    #[serde(default)]
    pub kind: String,
    /// Its class: empty for all data, [`SPECIAL`] or [`LOG`].
    #[serde(default)]
    pub class: String,
    /// Its state in the words of ZFS.
    pub state: String,
    /// Indices of its devices, in the pool's order.
    pub devices: Vec<usize>,
    /// Number of devices that may be lost.
    pub parity: usize,
    /// Total space, bytes: with parity, mirrored data once.
    #[serde(default)]
    pub size: u64,
    /// The part of it that file content can use.
    #[serde(default)]
    pub usable: u64,
    /// Space in use.
    #[serde(default)]
    pub allocated: u64,
    /// Whether it is being removed: nothing new is written to it, and its space does not count.
    #[serde(default)]
    pub leaving: bool,
}

/// The class of groups for metadata.
pub const SPECIAL: &str = "special";
/// The class of groups for the intent log alone.
pub const LOG: &str = "log";

impl GroupFigures {
    /// Whether all data in it survives the release of the pool, although files of its devices were deleted.
    #[must_use]
    pub fn survives(&self, devices: &[DeviceFigures]) -> bool {
        // The content of the log is in the pool when that is released.
        if self.class == LOG {
            return true;
        }
        let own = self.devices.iter().filter_map(|at| devices.get(*at));
        let lost = own.filter(|device| device.health() != "ONLINE" || device.resilvering).count();
        lost <= self.parity
    }

    /// Free space in it, bytes.
    #[must_use]
    pub fn free(&self) -> u64 {
        self.size.saturating_sub(self.allocated)
    }
}

/// Returns the space of a group of devices with so much each: in total, and for file content. Each
/// segment has at least one column more than the parity, so that a device is used up to the length of
/// the (parity + 1)-th longest only.
#[must_use]
pub fn room_of_group(kind: GroupKind, parity: usize, devices: &[u64]) -> (u64, u64) {
    let mut sorted = devices.to_vec();
    sorted.sort_unstable_by_key(|size| std::cmp::Reverse(*size));
    let most = sorted.get(parity).copied().unwrap_or(0);
    let all: u64 = sorted.iter().map(|size| *size.min(&most)).sum();
    let parity = if let GroupKind::RaidZ(parity) = kind { usize::from(parity) } else { parity };
    match kind {
        _ if parity == 0 => (sorted.iter().sum(), sorted.iter().sum()),
        GroupKind::Mirror => (most, most),
        _ => (all, all.saturating_sub(most * parity as u64)),
    }
}

impl DeviceFigures {
    /// Its displayed name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.shown.as_deref().unwrap_or(&self.path)
    }

    /// Its state in the words of ZFS.
    #[must_use]
    pub fn health(&self) -> &'static str {
        match self.standing.as_str() {
            _ if self.deleted.is_some() => "REMOVED",
            "OFFLINE" => "OFFLINE",
            "FAULTED" => "FAULTED",
            "UNAVAIL" => "UNAVAIL",
            _ => "ONLINE",
        }
    }

    /// Free space on it, bytes.
    #[must_use]
    pub fn free(&self) -> u64 {
        self.size.saturating_sub(self.allocated)
    }

    /// Fragmentation, as [`Figures::fragmentation`].
    #[must_use]
    pub fn fragmentation(&self) -> u64 {
        if self.leaving {
            return 0;
        }
        percent(self.occupied.saturating_sub(self.allocated), self.free())
    }
}

/// A part of a whole, percent, rounded down.
#[must_use]
pub fn percent(part: u64, whole: u64) -> u64 {
    u64::try_from(u128::from(part) * 100 / u128::from(whole.max(1))).unwrap_or(100)
}

impl Figures {
    /// Returns the current figures of a pool.
    ///
    /// # Errors
    /// Errors of the engine.
    pub fn of(pool: &Imported) -> Result<Self, Refusal> {
        let why = pool.failing.waiting();
        if let (true, Some(last)) = (why.is_some() || !pool.answers(), &*pool.last.lock()) {
            // The engine gives no answer meanwhile.
            let there = pool.devices.read();
            let named = |figures: &DeviceFigures| there.iter().find(|device| device.name() == figures.path);
            let counted = |figures: &DeviceFigures| match named(figures) {
                Some(device) => DeviceFigures { counts: device.counts(), spread: device.spread(), ..figures.clone() },
                None => DeviceFigures { silence: pool.bucket.as_deref().and_then(silence), ..figures.clone() },
            };
            let devices = last.devices.iter().map(counted).collect();
            return Ok(Self {
                health: why.as_ref().map_or_else(|| last.health.clone(), |_| "SUSPENDED".to_owned()),
                suspended: why,
                waits: true,
                devices,
                now: now(),
                ..last.clone()
            });
        }
        let figures = Self::now(pool)?;
        *pool.last.lock() = Some(figures.clone());
        Ok(figures)
    }

    fn now(pool: &Imported) -> Result<Self, Refusal> {
        let (identity, space) = (pool.store.identity(), pool.store.space());
        let Space { size: usable, allocated, free, freeing, free_whole: whole, .. } = space;
        let fragmentation = percent(free.saturating_sub(whole), free);
        let (suspended, devices) = (pool.suspended(), devices(pool));
        let groups = groups(pool, &devices);
        let expandable = expandable(pool, &groups);
        let (devices, groups) = without_removed(devices, groups);
        let (size, allocated, free) = if groups.is_empty() {
            (usable, allocated, free)
        } else {
            // Data of groups that are being removed is on the others in the end.
            let leaving: u64 = groups.iter().filter(|group| group.leaving).map(|group| group.allocated).sum();
            let holding = || groups.iter().filter(|group| group.class != LOG);
            let sum = |of: fn(&GroupFigures) -> u64| holding().map(of).sum::<u64>();
            let size = sum(|group| if group.leaving { 0 } else { group.size });
            (size, sum(|group| group.allocated), sum(GroupFigures::free).saturating_sub(leaving))
        };
        let health = match &suspended {
            Some(_) => "SUSPENDED",
            None if devices.iter().any(|device| device.deleted.is_some()) => "DEGRADED",
            None if groups.iter().any(|group| group.state != "ONLINE") => "DEGRADED",
            None => "ONLINE",
        };
        Ok(Self {
            name: pool.name(),
            guid: identity.pool,
            size,
            usable,
            expandable,
            // A store keeps several copies of its objects.
            redundant_metadata: pool.store.has_redundant_metadata() || pool.bucket.is_some(),
            ordered_names: pool.store.has_ordered_names(),
            folding: pool.store.is_folding(),
            lies_once: pool.store.lies_once(),
            unwritten: pool.store.unwritten(),
            allocated,
            free,
            freeing,
            fragmentation,
            health: health.to_owned(),
            suspended,
            waits: false,
            log_trouble: pool.log_trouble(),
            altroot: pool.opening.altroot.as_ref().map(|path| path.display().to_string()),
            read_only: pool.read_only,
            follows: follows(pool),
            properties: pool.pool.pool_properties()?,
            devices,
            groups,
            since: pool.since,
            now: now(),
            txg: pool.store.durable().0,
            process: std::process::id(),
            ended: None,
            survives: None,
            unmounted: 0,
            engine: EngineFigures::of(&pool.pool),
        })
    }
}

fn follows(pool: &Imported) -> Option<Follows> {
    let followed = pool.following.lock();
    let (generation, error) = (followed.generation, followed.error.clone());
    pool.follows().then(|| Follows { generation, time: pool.store.root().time, error })
}

/// Leaves out numbers that no device has any more; groups and pairs are renumbered.
fn without_removed(
    devices: Vec<DeviceFigures>,
    mut groups: Vec<GroupFigures>,
) -> (Vec<DeviceFigures>, Vec<GroupFigures>) {
    let kept: Vec<usize> = (0..).zip(&devices).filter(|(_, one)| one.role != "removed").map(|(at, _)| at).collect();
    let place = |number: usize| kept.iter().position(|kept| *kept == number);
    for group in &mut groups {
        group.devices = group.devices.iter().filter_map(|number| place(*number)).collect();
    }
    groups.retain(|group| !group.devices.is_empty());
    let shown = devices.into_iter().filter(|one| one.role != "removed");
    let devices = shown.map(|one| DeviceFigures { beside: one.beside.and_then(place), ..one }).collect();
    (devices, groups)
}

/// State of a device in its group, in the words of ZFS.
fn standing(health: &DeviceHealth) -> &'static str {
    match health.status {
        MemberStatus::Offline => "OFFLINE",
        MemberStatus::Faulted => "FAULTED",
        MemberStatus::Removed | MemberStatus::Joining => "REMOVED",
        MemberStatus::Online if health.absent => "UNAVAIL",
        MemberStatus::Online => "ONLINE",
    }
}

/// Role of a device, as [`DeviceFigures::role`].
fn role(health: &DeviceHealth) -> &'static str {
    match health.role {
        _ if !health.status.belongs() => "removed",
        MemberRole::Own => "",
        MemberRole::Spare | MemberRole::SpareFor(_) => "spare",
        MemberRole::Successor(_) => "replacing",
    }
}

/// Returns the figures of the groups.
fn groups(pool: &Imported, figures: &[DeviceFigures]) -> Vec<GroupFigures> {
    let Some(disks) = pool.store.on_devices() else { return Vec::new() };
    let (groups, health) = (disks.groups(), disks.health());
    if groups.is_empty() {
        return Vec::new();
    }
    let group_of = |device: u16| health.get(usize::from(device)).map_or(0, |health| health.group);
    // Mirrored data is counted once.
    let mut living: BTreeMap<usize, u64> = BTreeMap::new();
    for segment in pool.store.segments() {
        if let Some(slot) = segment.place.iter().next() {
            *living.entry(group_of(slot.device)).or_default() += segment.live_bytes;
        }
    }
    let of = |(number, (group, parity)): (usize, (Group, usize))| {
        let members = health.iter().enumerate().filter(|(_, device)| device.group == number && device.is_own());
        let devices: Vec<usize> = members.clone().map(|(at, _)| at).collect();
        // Another one may have all its data (a spare or a replacement).
        let stands_in = |at: usize| {
            let beside = |other: &&DeviceHealth| other.role.beside().map(usize::from) == Some(at);
            health.iter().filter(beside).any(|other| standing(other) == "ONLINE" && !other.stale)
        };
        let lacking: Vec<usize> =
            members.filter(|(_, device)| standing(device) != "ONLINE" || device.stale).map(|(at, _)| at).collect();
        let lost = lacking.iter().filter(|at| !stands_in(**at)).count();
        let (kind, name) = match group.kind {
            GroupKind::Plain => ("plain", "plain".to_owned()),
            // A mirror of one device is a single device.
            GroupKind::Mirror if devices.len() == 1 => ("plain", "plain".to_owned()),
            GroupKind::Mirror => ("mirror", "mirror".to_owned()),
            GroupKind::RaidZ(parity) => ("raidz", format!("raidz{parity}")),
        };
        let own = || devices.iter().filter_map(|at| figures.get(*at));
        let state = match lost {
            // A deleted device is there until the pool is released.
            _ if lacking.is_empty() && own().all(|device| device.deleted.is_none()) => "ONLINE",
            lost if lost <= parity => "DEGRADED",
            _ => "UNAVAIL",
        };
        let leaving = !devices.is_empty() && own().all(|device| device.leaving);
        let sizes: Vec<u64> = own().filter(|device| leaving || !device.leaving).map(|device| device.size).collect();
        let (size, usable) = room_of_group(group.kind, parity, &sizes);
        let allocated = match group.kind {
            GroupKind::Mirror => living.get(&number).copied().unwrap_or(0),
            _ => own().map(|device| device.allocated).sum(),
        };
        GroupFigures {
            name: format!("{name}-{number}"),
            kind: kind.to_owned(),
            class: match group.class {
                GroupClass::Data => "",
                GroupClass::Special => SPECIAL,
                GroupClass::Log => LOG,
            }
            .to_owned(),
            state: state.to_owned(),
            devices,
            parity,
            size: if leaving { allocated } else { size },
            usable: if leaving { allocated } else { usable },
            allocated,
            leaving,
        }
    };
    groups.into_iter().enumerate().map(of).filter(|group| !group.devices.is_empty()).collect()
}

/// Returns the space by which devices have grown since they became part of the pool, counted as [`Figures::size`].
fn expandable(pool: &Imported, groups: &[GroupFigures]) -> u64 {
    let Some(disks) = pool.store.on_devices().filter(|_| !groups.is_empty()) else { return pool.store.expandable() };
    let (identity, devices, health) = (pool.store.identity(), pool.devices.read(), disks.health());
    let room = |now: bool| {
        let of = |(number, (group, parity)): (usize, (Group, usize))| {
            let own = health.iter().enumerate().filter(|(_, device)| device.group == number && device.is_own());
            let length = |(at, _): (usize, &DeviceHealth)| {
                let (member, device) = (identity.members.get(at)?, devices.get(at)?);
                Some(slots(if now { device.length().max(member.length) } else { member.length }, identity.slot))
            };
            let sizes: Vec<u64> = own.filter_map(length).collect();
            room_of_group(group.kind, parity, &sizes).0
        };
        let groups = disks.groups().into_iter().enumerate();
        groups.filter(|(_, (group, _))| group.class != GroupClass::Log).map(of).sum::<u64>()
    };
    room(true).saturating_sub(room(false))
}

/// Returns the total size of the slots of a device of this length, bytes.
pub(super) fn slots(length: u64, slot: u64) -> u64 {
    length.saturating_sub(2 * nacre_pool::label::ENDS) / slot * slot
}

/// Returns a silence that is long enough to be reported: most end sooner.
fn silence(bucket: &CountedBucket) -> Option<(u64, String)> {
    let Silence { lasts, why } = bucket.silence()?;
    (lasts >= SILENCE).then_some((lasts.as_secs(), why))
}

/// Returns the figures of a bucket, as of the single device of a pool.
fn of_bucket(pool: &Imported, bucket: &CountedBucket) -> DeviceFigures {
    let (space, identity) = (pool.store.space(), pool.store.identity());
    DeviceFigures {
        path: bucket.name().to_owned(),
        guid: identity.members.first().map_or(0, |member| member.guid),
        size: space.size,
        allocated: space.allocated,
        occupied: space.size.saturating_sub(space.free_whole),
        counts: bucket.counts(),
        spread: bucket.spread(),
        length: identity.members.first().map_or(0, |member| member.length),
        state: bucket.state().to_owned(),
        endpoint: pool.endpoint(),
        silence: silence(bucket),
        requests: Some(RequestFigures::new(bucket.requests(), pool.cached.as_ref().map(|cached| cached.figures()))),
        ..DeviceFigures::default()
    }
}

/// Returns the figures of the devices.
fn devices(pool: &Imported) -> Vec<DeviceFigures> {
    let (identity, slot) = (pool.store.identity(), pool.store.slot());
    if let Some(bucket) = &pool.bucket {
        return vec![of_bucket(pool, bucket)];
    }
    let mut held: BTreeMap<u16, (u64, u64)> = BTreeMap::new();
    for segment in pool.store.segments() {
        for place in segment.place.iter() {
            let (live, slots) = held.entry(place.device).or_default();
            *live += segment.live_bytes / segment.place.width() as u64;
            *slots += slot;
        }
    }
    let devices = pool.devices.read();
    let log = pool.store.root().log;
    let health = pool.store.on_devices().map(Disks::health).unwrap_or_default();
    let change = pool.store.shape_change();
    let mut figures = Vec::new();
    for (index, (member, device)) in identity.members.iter().zip(devices.iter()).enumerate() {
        let index = u16::try_from(index).unwrap_or(u16::MAX);
        let (allocated, occupied) = held.get(&index).copied().unwrap_or_default();
        let taken: u64 =
            log.iter().filter(|(place, _)| place.device == index).map(|(_, slots)| u64::from(*slots) * slot).sum();
        let is_log = pool.store.on_devices().is_some_and(|disks| disks.is_log_device(index));
        let leaving = change.as_ref().is_some_and(|change| change.leaving.contains(&index));
        let size = match (is_log, leaving) {
            // A log device has space for nothing else.
            (true, _) => taken,
            // A device that is being removed has space for nothing more.
            (false, true) => allocated,
            (false, false) => slots(member.length, slot).saturating_sub(taken),
        };
        figures.push(DeviceFigures {
            path: device.name().to_owned(),
            guid: member.guid,
            size,
            allocated,
            occupied,
            deleted: device.deleted().map(|path| path.display().to_string()),
            counts: device.counts(),
            spread: device.spread(),
            trim: pool.trim.report(index),
            length: member.length,
            state: device.state().to_owned(),
            shown: None,
            standing: health.get(usize::from(index)).map_or("", standing).to_owned(),
            resilvering: health
                .get(usize::from(index))
                .is_some_and(|health| health.stale && standing(health) == "ONLINE"),
            leaving,
            role: health.get(usize::from(index)).map_or("", role).to_owned(),
            beside: health.get(usize::from(index)).and_then(|health| health.role.beside()).map(usize::from),
            endpoint: None,
            requests: None,
            silence: None,
        });
    }
    figures
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_counted_as_zpool_does() {
        assert_eq!(room_of_group(GroupKind::Mirror, 1, &[8, 4]), (4, 4));
        assert_eq!(room_of_group(GroupKind::Mirror, 0, &[8]), (8, 8));
        assert_eq!(room_of_group(GroupKind::RaidZ(1), 1, &[4, 4, 8, 8]), (24, 16));
        // The longest device has no others for the remaining columns.
        assert_eq!(room_of_group(GroupKind::RaidZ(1), 1, &[4, 4, 16]), (12, 8));
        assert_eq!(room_of_group(GroupKind::RaidZ(2), 2, &[5, 5, 5, 5, 5, 5]), (30, 20));
        assert_eq!(room_of_group(GroupKind::Plain, 0, &[3, 5]), (8, 8));
    }
}
