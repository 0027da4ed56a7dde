//! The figures of a pool: what `list`, `get`, `status` and `iostat` show.

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

/// A store that gives no answer for so long is told of.
const SILENCE: Duration = Duration::from_secs(3);

/// The figures of a pool. Sizes in bytes, times in seconds since 1970.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Figures {
    /// Its name.
    pub name: String,
    /// Its number.
    pub guid: u64,
    /// Room in all; in groups, as ZFS counts it: with parity, copies once.
    pub size: u64,
    /// The part of it that file content can have.
    #[serde(default)]
    pub usable: u64,
    /// Room that devices have got since they became part of it, and that is not used.
    #[serde(default)]
    pub expandable: u64,
    /// Metadata is written twice, or a process does not tell.
    #[serde(rename = "twice", default = "untold")]
    pub redundant_metadata: bool,
    /// New file systems have names of neighbouring numbers side by side, or a process does not
    /// tell.
    #[serde(rename = "near", default = "untold")]
    pub ordered_names: bool,
    /// There is, or was, a file system in which names are the same though their bytes differ. A
    /// process that does not tell knows of none.
    #[serde(default)]
    pub folding: bool,
    /// The part of the metadata that has no second copy yet.
    #[serde(default)]
    pub lies_once: u64,
    /// Writes of it that failed at one of its two places.
    #[serde(default)]
    pub unwritten: u64,
    /// Room in use.
    pub allocated: u64,
    /// Room that is free.
    pub free: u64,
    /// The part of `allocated` that is about to be freed.
    pub freeing: u64,
    /// The part of the free room that lies in slots which hold something, percent: the cleaner gets
    /// it.
    pub fragmentation: u64,
    /// ONLINE, SUSPENDED after a write that failed, DEGRADED where the file of a device was
    /// deleted.
    pub health: String,
    /// Why it is suspended.
    pub suspended: Option<String>,
    /// Writes wait until they can be made; the other figures are those of before.
    #[serde(default)]
    pub waits: bool,
    /// All mount points lie below it.
    pub altroot: Option<String>,
    /// Why what is synced is not in a log on this machine, as it should be.
    #[serde(default)]
    pub log_trouble: Option<String>,
    /// Nothing is written to it.
    pub read_only: bool,
    /// Whom it follows, where another machine writes to it.
    #[serde(default)]
    pub follows: Option<Follows>,
    /// What is stored of its properties.
    pub properties: Vec<(String, String)>,
    /// Its devices.
    pub devices: Vec<DeviceFigures>,
    /// The groups that they are in; none where each is for itself.
    #[serde(default)]
    pub groups: Vec<GroupFigures>,
    /// When it was imported.
    pub since: u64,
    /// Now.
    pub now: u64,
    /// The last transaction group that is durable.
    pub txg: u64,
    /// The process that owns it.
    pub process: u32,
    /// Why that has ended, where somebody could say so.
    #[serde(default)]
    pub ended: Option<String>,
    /// How it goes on when that is killed, where it is to.
    #[serde(default)]
    pub survives: Option<Survives>,
    /// How many of its file systems the import could not mount.
    #[serde(default)]
    pub unmounted: u64,
    /// What its engine does.
    #[serde(default)]
    pub engine: EngineFigures,
}

/// How a mount or a pool goes on when its process is killed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Survives {
    /// The process that makes the next one; none where it is gone: then there will be no next one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guardian: Option<u32>,
    /// How often that has happened.
    pub restarts: u64,
    /// Why it will not happen, where it will not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why_not: Option<String>,
    /// How many descriptors the service manager was given, for the case that all processes are killed; none where
    /// this is no service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored: Option<usize>,
}

impl Survives {
    /// In words.
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

/// How far a pool is that follows a writer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Follows {
    /// The generation of the state that is seen.
    pub generation: u64,
    /// When the writer has made it, seconds since 1970.
    pub time: u64,
    /// Why a newer one could not be gone on to, the last time.
    pub error: Option<String>,
}

/// What the engine of a pool has done since the import. Times in microseconds, sizes in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineFigures {
    /// Time in commits, all together.
    pub commit_time: u64,
    /// The last commit.
    pub commit_last: u64,
    /// Commits by the time that they took: at place n those from 2^n to 2^(n+1) - 1.
    pub commits: Vec<u64>,
    /// What memory holds that is not durable yet.
    pub held: u64,
    /// What was found in the cache and what was read: nodes of trees.
    pub nodes: (u64, u64),
    /// The same of content.
    pub content: (u64, u64),
    /// What the cache holds, and may hold.
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
    /// Its number.
    pub guid: u64,
    /// Room for segments, bytes.
    pub size: u64,
    /// What lives on it, bytes.
    pub allocated: u64,
    /// Slots that hold something, bytes.
    pub occupied: u64,
    /// Where it can still be read, if its file was deleted.
    #[serde(default)]
    pub deleted: Option<String>,
    /// What was counted.
    pub counts: Counts,
    /// How requests are spread.
    #[serde(default)]
    pub spread: Spread,
    /// Its length when it became part of the pool or was last expanded, bytes; 0 where a process
    /// does not tell.
    #[serde(default)]
    pub length: u64,
    /// What it was told of free room by hand.
    #[serde(default)]
    pub trim: TrimReport,
    /// What its errors speak of, in the words of ZFS; empty where a process does not tell.
    #[serde(default)]
    pub state: String,
    /// What a command calls it, where not by its path.
    #[serde(skip)]
    pub shown: Option<String>,
    /// How it is in its group, in the words of ZFS; empty where it is in none.
    #[serde(default)]
    pub standing: String,
    /// It is being made whole.
    #[serde(default)]
    pub resilvering: bool,
    /// It is being removed: nothing new goes to it.
    #[serde(default)]
    pub leaving: bool,
    /// Empty for a device of the pool's own; `spare`, or `replacing`: it will take the place of another.
    #[serde(default)]
    pub role: String,
    /// The place in this list of the device that it stands beside.
    #[serde(default)]
    pub beside: Option<usize>,
    /// The server of it, where it is a bucket whose address names one.
    #[serde(default)]
    pub endpoint: Option<String>,
    /// What was asked of it, where it is a bucket.
    #[serde(default)]
    pub requests: Option<RequestFigures>,
    /// That the bucket gives no answer at this moment: for how many seconds, and what comes instead.
    #[serde(default)]
    pub silence: Option<(u64, String)>,
}

/// What was asked of a bucket since the import. Sizes in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestFigures {
    /// Objects made or replaced.
    pub puts: u64,
    /// Objects read, or parts of them.
    pub gets: u64,
    /// Pages of names.
    pub lists: u64,
    /// Objects removed.
    pub deletes: u64,
    /// Those of all these that were made once more.
    pub again: u64,
    /// What was sent.
    pub sent: u64,
    /// What was received.
    pub received: u64,
    /// What is kept of it on this machine.
    #[serde(default)]
    pub kept: Option<KeptFigures>,
}

/// What is kept of a bucket, and how that was used since the import.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptFigures {
    /// Parts that were here when they were wanted.
    pub hits: u64,
    /// Parts that had to be fetched.
    pub misses: u64,
    /// Parts that could not be written here.
    pub failed: u64,
    /// What is here, at most, bytes.
    pub bytes: u64,
    /// The limit, bytes.
    pub limit: u64,
}

impl Figures {
    /// What the bucket costs in a month, where the pool lies in one.
    #[must_use]
    pub fn month_cost(&self) -> Option<MonthCost> {
        let asked = self.devices.iter().find_map(|device| device.requests)?;
        let list = self.properties.iter().find(|(name, _)| name == PRICES).map_or("", |(_, list)| list.as_str());
        // What is stored was checked when it was set.
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
    /// As ZFS calls it: `mirror-0`.
    pub name: String,
    /// Its kind in the words of ZFS: `mirror`, `raidz`; `plain` for devices that are each for
    /// themselves.
    #[serde(default)]
    pub kind: String,
    /// What it is for: empty for everything, [`SPECIAL`] or [`LOG`].
    #[serde(default)]
    pub class: String,
    /// Its state in the words of ZFS.
    pub state: String,
    /// The numbers of its devices, in the order of the pool's.
    pub devices: Vec<usize>,
    /// How many of them may be lost.
    pub parity: usize,
    /// Room in all, bytes: with parity, copies once.
    #[serde(default)]
    pub size: u64,
    /// The part of it that file content can have.
    #[serde(default)]
    pub usable: u64,
    /// What of it is in use.
    #[serde(default)]
    pub allocated: u64,
    /// It is being removed: nothing new goes to it, and no room of it counts.
    #[serde(default)]
    pub leaving: bool,
}

/// The class of groups for metadata.
pub const SPECIAL: &str = "special";
/// That of groups for the intent log alone.
pub const LOG: &str = "log";

impl GroupFigures {
    /// Whether everything in it is there still when the pool is let go, although files of its
    /// devices were deleted.
    #[must_use]
    pub fn survives(&self, devices: &[DeviceFigures]) -> bool {
        // What the log has is in the pool when that is let go.
        if self.class == LOG {
            return true;
        }
        let own = self.devices.iter().filter_map(|at| devices.get(*at));
        let lost = own.filter(|device| device.health() != "ONLINE" || device.resilvering).count();
        lost <= self.parity
    }

    /// What is free in it, bytes.
    #[must_use]
    pub fn free(&self) -> u64 {
        self.size.saturating_sub(self.allocated)
    }
}

/// The room of a group, of devices with so much each: in all, and for file content. Each segment has
/// a column more than there is parity, so that what one device has beyond that many others is of no
/// use.
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
    /// What it is called.
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

    /// What is free on it, bytes.
    #[must_use]
    pub fn free(&self) -> u64 {
        self.size.saturating_sub(self.allocated)
    }

    /// As [`Figures::fragmentation`].
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
    /// The figures of a pool now.
    ///
    /// # Errors
    /// Those of the engine.
    pub fn of(pool: &Imported) -> Result<Self, Refusal> {
        let why = pool.failing.waiting();
        if let (true, Some(last)) = (why.is_some() || !pool.answers(), &*pool.last.lock()) {
            // The engine answers nobody meanwhile.
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
            // What is to leave lies on the others in the end.
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
            // A store keeps several copies of what it holds.
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

/// The figures without numbers that no device has any more; groups and pairs go by their places.
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

/// How a device is, in the words of ZFS.
fn standing(health: &DeviceHealth) -> &'static str {
    match health.status {
        MemberStatus::Offline => "OFFLINE",
        MemberStatus::Faulted => "FAULTED",
        MemberStatus::Removed | MemberStatus::Joining => "REMOVED",
        MemberStatus::Online if health.absent => "UNAVAIL",
        MemberStatus::Online => "ONLINE",
    }
}

/// What a device is to the others, as [`DeviceFigures::role`].
fn role(health: &DeviceHealth) -> &'static str {
    match health.role {
        _ if !health.status.belongs() => "removed",
        MemberRole::Own => "",
        MemberRole::Spare | MemberRole::SpareFor(_) => "spare",
        MemberRole::Successor(_) => "replacing",
    }
}

/// The groups of the devices.
fn groups(pool: &Imported, figures: &[DeviceFigures]) -> Vec<GroupFigures> {
    let Some(disks) = pool.store.on_devices() else { return Vec::new() };
    let (groups, health) = (disks.groups(), disks.health());
    if groups.is_empty() {
        return Vec::new();
    }
    let group_of = |device: u16| health.get(usize::from(device)).map_or(0, |health| health.group);
    // What lies in copies is counted once.
    let mut living: BTreeMap<usize, u64> = BTreeMap::new();
    for segment in pool.store.segments() {
        if let Some(slot) = segment.place.iter().next() {
            *living.entry(group_of(slot.device)).or_default() += segment.live_bytes;
        }
    }
    let of = |(number, (group, parity)): (usize, (Group, usize))| {
        let members = health.iter().enumerate().filter(|(_, device)| device.group == number && device.is_own());
        let devices: Vec<usize> = members.clone().map(|(at, _)| at).collect();
        // Another one may have everything that it should have.
        let stands_in = |at: usize| {
            let beside = |other: &&DeviceHealth| other.role.beside().map(usize::from) == Some(at);
            health.iter().filter(beside).any(|other| standing(other) == "ONLINE" && !other.stale)
        };
        let lacking: Vec<usize> =
            members.filter(|(_, device)| standing(device) != "ONLINE" || device.stale).map(|(at, _)| at).collect();
        let lost = lacking.iter().filter(|at| !stands_in(**at)).count();
        let (kind, name) = match group.kind {
            GroupKind::Plain => ("plain", "plain".to_owned()),
            // What is left of one is a device for itself.
            GroupKind::Mirror if devices.len() == 1 => ("plain", "plain".to_owned()),
            GroupKind::Mirror => ("mirror", "mirror".to_owned()),
            GroupKind::RaidZ(parity) => ("raidz", format!("raidz{parity}")),
        };
        let own = || devices.iter().filter_map(|at| figures.get(*at));
        let state = match lost {
            // What was deleted is there until the pool is let go.
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

/// The room that devices have got since they became part of the pool, as [`Figures::size`] counts
/// it.
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

/// The slots of a device of this length, bytes.
pub(super) fn slots(length: u64, slot: u64) -> u64 {
    length.saturating_sub(2 * nacre_pool::label::ENDS) / slot * slot
}

/// A silence that is worth telling: most end sooner.
fn silence(bucket: &CountedBucket) -> Option<(u64, String)> {
    let Silence { lasts, why } = bucket.silence()?;
    (lasts >= SILENCE).then_some((lasts.as_secs(), why))
}

/// A bucket stands where the one device of a pool would.
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

/// The figures of the devices.
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
            // One for the log has room for nothing else.
            (true, _) => taken,
            // What leaves has room for nothing more.
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
        // Of the longest one, nobody has the other column.
        assert_eq!(room_of_group(GroupKind::RaidZ(1), 1, &[4, 4, 16]), (12, 8));
        assert_eq!(room_of_group(GroupKind::RaidZ(2), 2, &[5, 5, 5, 5, 5, 5]), (30, 20));
        assert_eq!(room_of_group(GroupKind::Plain, 0, &[3, 5]), (8, 8));
    }
}
