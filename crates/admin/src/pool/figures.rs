//! The figures of a pool: what `list`, `get`, `status` and `iostat` show.

use std::collections::BTreeMap;

use nacre_pool::backend::{DeviceHealth, Disks};
use nacre_pool::device::Device;
use nacre_pool::engine::Pool;
use nacre_pool::label::{Group, GroupKind, MemberRole, MemberStatus};
use nacre_pool::store::Space;
use serde::{Deserialize, Serialize};

use super::TrimReport;
use crate::clock::now;
use crate::counted::{Counts, Spread};
use crate::{Imported, Refusal};

pub use nacre_pool::properties::features::{FOLDED, ORDERED_NAMES, REDUNDANT_METADATA};

/// The figures of a pool. Sizes in bytes, times in seconds since 1970.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Figures {
    /// Its name.
    pub name: String,
    /// Its number.
    pub guid: u64,
    /// Room in all.
    pub size: u64,
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
    /// Nothing is written to it.
    pub read_only: bool,
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
    /// What its engine does.
    #[serde(default)]
    pub engine: EngineFigures,
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
    /// Empty for a device of the pool's own; `spare`, or `replacing`: it will take the place of another.
    #[serde(default)]
    pub role: String,
    /// The place in this list of the device that it stands beside.
    #[serde(default)]
    pub beside: Option<usize>,
}

/// A group of devices.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupFigures {
    /// As ZFS calls it: `mirror-0`.
    pub name: String,
    /// Its state in the words of ZFS.
    pub state: String,
    /// The numbers of its devices, in the order of the pool's.
    pub devices: Vec<usize>,
    /// How many of them may be lost.
    pub parity: usize,
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
        if let (Some(why), Some(last)) = (pool.failing.waiting(), &*pool.last.lock()) {
            // The engine answers nobody meanwhile.
            let there = pool.devices.read();
            let named = |figures: &DeviceFigures| there.iter().find(|device| device.name() == figures.path);
            let counted = |figures: &DeviceFigures| match named(figures) {
                Some(device) => DeviceFigures { counts: device.counts(), spread: device.spread(), ..figures.clone() },
                None => figures.clone(),
            };
            let devices = last.devices.iter().map(counted).collect();
            return Ok(Self {
                health: "SUSPENDED".to_owned(),
                suspended: Some(why),
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
        let Space { size, allocated, free, freeing, free_whole: whole, .. } = space;
        let (suspended, devices) = (pool.suspended(), devices(pool));
        let (devices, groups) = without_removed(devices, groups(pool));
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
            expandable: pool.store.expandable(),
            redundant_metadata: pool.store.has_redundant_metadata(),
            ordered_names: pool.store.has_ordered_names(),
            folding: pool.store.is_folding(),
            lies_once: pool.store.lies_once(),
            unwritten: pool.store.unwritten(),
            allocated,
            free,
            freeing,
            fragmentation: percent(free.saturating_sub(whole), free),
            health: health.to_owned(),
            suspended,
            waits: false,
            altroot: pool.opening.altroot.as_ref().map(|path| path.display().to_string()),
            read_only: pool.read_only,
            properties: pool.pool.pool_properties()?,
            devices,
            groups,
            since: pool.since,
            now: now(),
            txg: pool.store.durable().0,
            process: std::process::id(),
            engine: EngineFigures::of(&pool.pool),
        })
    }
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
fn groups(pool: &Imported) -> Vec<GroupFigures> {
    let Some(disks) = pool.store.on_devices() else { return Vec::new() };
    let health = disks.health();
    let of = |(number, (group, parity)): (usize, (Group, usize))| {
        let members = health.iter().enumerate().filter(|(_, device)| device.group == number && device.is_own());
        let devices: Vec<usize> = members.clone().map(|(at, _)| at).collect();
        let whole = members.clone().all(|(_, device)| standing(device) == "ONLINE" && !device.stale);
        let kind = match group.kind {
            GroupKind::Plain => "plain".to_owned(),
            GroupKind::Mirror => "mirror".to_owned(),
            GroupKind::RaidZ(parity) => format!("raidz{parity}"),
        };
        let state = if whole { "ONLINE" } else { "DEGRADED" };
        GroupFigures { name: format!("{kind}-{number}"), state: state.to_owned(), devices, parity }
    };
    disks.groups().into_iter().enumerate().map(of).collect()
}

/// The figures of the devices.
fn devices(pool: &Imported) -> Vec<DeviceFigures> {
    let (identity, slot) = (pool.store.identity(), pool.store.slot());
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
    let mut figures = Vec::new();
    for (index, (member, device)) in identity.members.iter().zip(devices.iter()).enumerate() {
        let index = u16::try_from(index).unwrap_or(u16::MAX);
        let (allocated, occupied) = held.get(&index).copied().unwrap_or_default();
        let taken: u64 =
            log.iter().filter(|(place, _)| place.device == index).map(|(_, slots)| u64::from(*slots) * slot).sum();
        let ends = 2 * nacre_pool::label::ENDS;
        let size = (member.length.saturating_sub(ends) / slot * slot).saturating_sub(taken);
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
            role: health.get(usize::from(index)).map_or("", role).to_owned(),
            beside: health.get(usize::from(index)).and_then(|health| health.role.beside()).map(usize::from),
        });
    }
    figures
}
