//! Changes of groups in use: devices, groups and spares are added, mirrors get more devices or fewer.
//!
//! Caller: the verbs. Invariant: a refused change has changed nothing, and files that were made for it are removed.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nacre_pool::PoolError;
use nacre_pool::backend::{Disks, NewGroup};
use nacre_pool::device::Device;
use nacre_pool::label::{Group, GroupClass, GroupKind};
use nacre_pool::store::Store;

use super::resilver::{fresh_beside, note, number_of, without_log, writable};
use super::signatures::Accepted;
use super::{Figures, devices};
use crate::counted::Counted;
use crate::{Imported, Kind, Refusal};

/// Roles of new devices, in their order.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// Groups for all data, each of the next so many devices.
    pub groups: Vec<NewGroup>,
    /// Groups for metadata, after them.
    pub special: Vec<NewGroup>,
    /// Groups for the intent log alone, after these.
    pub logs: Vec<NewGroup>,
    /// Number of spares, the last devices.
    pub spares: usize,
}

impl Shape {
    /// Parses ZFS' names of groups, each with its number of devices: groups, then those for
    /// metadata, then those for the log, then spares.
    ///
    /// # Errors
    /// Unknown words; another order.
    pub fn read(words: &[(String, usize)]) -> Result<Self, Refusal> {
        let (mut shape, mut last) = (Self::default(), 0);
        for (word, devices) in words {
            let (class, kind) = match word.split_once(' ') {
                Some((class @ ("special" | "log"), kind)) => (class, kind),
                None if matches!(word.as_str(), "special" | "log" | "spare") => (word.as_str(), "plain"),
                _ => ("", word.as_str()),
            };
            let kind = match (kind, class) {
                ("plain", _) => GroupKind::Plain,
                ("mirror", _) => GroupKind::Mirror,
                ("raidz" | "raidz1", "") => GroupKind::RaidZ(1),
                ("raidz2", "") => GroupKind::RaidZ(2),
                ("raidz3", "") => GroupKind::RaidZ(3),
                _ => return Err(Refusal::new(Kind::Invalid, format!("'{word}' is no group of devices"))),
            };
            let group = NewGroup { kind, devices: *devices };
            let order = match class {
                "special" => {
                    shape.special.push(group);
                    1
                }
                // Each single log device can be removed alone.
                "log" if kind == GroupKind::Plain => {
                    shape.logs.extend((0..*devices).map(|_| NewGroup { kind, devices: 1 }));
                    2
                }
                "log" => {
                    shape.logs.push(group);
                    2
                }
                "spare" => {
                    shape.spares += devices;
                    3
                }
                _ => {
                    shape.groups.push(group);
                    0
                }
            };
            if std::mem::replace(&mut last, order) > order {
                let what = "groups of devices come first, then those for metadata, then logs, then spares";
                return Err(Refusal::new(Kind::Invalid, what));
            }
        }
        Ok(shape)
    }

    /// All groups, in the order of their devices.
    pub fn all(&self) -> impl Iterator<Item = &NewGroup> {
        self.groups.iter().chain(&self.special).chain(&self.logs)
    }

    /// Total number of devices.
    #[must_use]
    pub fn devices(&self) -> usize {
        count(self.all()) + self.spares
    }

    /// Number of devices that are not for metadata, for the log or spares.
    #[must_use]
    pub fn of_data(&self) -> usize {
        count(self.groups.iter())
    }

    /// Returns why the groups do not fit together, or not with existing groups: their redundancy
    /// differs. In the words of ZFS.
    #[must_use]
    pub fn mismatch(&self, there: &[Level], paths: &[PathBuf]) -> Option<String> {
        let mut rest = paths;
        let mut levels = |groups: &[NewGroup]| {
            let level = |group: &NewGroup| {
                let (own, others) = rest.split_at(group.devices.min(rest.len()));
                rest = others;
                Level::of(*group, own.first().map_or(Path::new(""), |path| path))
            };
            groups.iter().map(level).collect::<Vec<_>>()
        };
        let (groups, special) = (levels(&self.groups), levels(&self.special));
        let differs = |all: &[Level]| {
            let pairs = all.iter().zip(all.iter().skip(1));
            pairs.map(|(one, other)| one.differs(*other, false)).find_map(|differs| differs)
        };
        // Where existing groups differ already, a new one makes it no worse.
        if differs(there).is_some() {
            return None;
        }
        let (old, new) = (there.first(), groups.first());
        differs(&groups)
            .or_else(|| differs(&special))
            .or_else(|| old.zip(new).and_then(|(old, new)| old.differs(*new, true)))
            .or_else(|| {
                let (level, special) = old.or(new).zip(special.first())?;
                level.differs_as_special(*special, old.is_some())
            })
    }
}

fn count<'a>(groups: impl Iterator<Item = &'a NewGroup>) -> usize {
    groups.map(|group| group.devices).sum()
}

/// Redundancy of a group, for comparison with others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Level {
    name: &'static str,
    /// Of RAID-Z groups only.
    parity: usize,
    devices: usize,
}

impl Level {
    /// Returns the level of a group with this device in it.
    #[must_use]
    pub fn of(group: NewGroup, path: &Path) -> Self {
        let is_disk = |path: &Path| std::fs::metadata(path).is_ok_and(|there| there.file_type().is_block_device());
        match group.kind {
            // Each single device is one group.
            GroupKind::Plain => Self { name: if is_disk(path) { "disk" } else { "file" }, parity: 0, devices: 1 },
            GroupKind::Mirror => Self { name: "mirror", parity: 0, devices: group.devices },
            GroupKind::RaidZ(parity) => Self { name: "raidz", parity: usize::from(parity), devices: group.devices },
        }
    }

    /// Describes how a new group differs from this one, which is `there` already or is new as well.
    fn differs(self, new: Self, there: bool) -> Option<String> {
        let alone = |level: Self| ["file", "disk"].contains(&level.name);
        if self == new || alone(self) && alone(new) {
            return None;
        }
        let (name, devices) = (self.name, (self.devices, new.devices));
        Some(if name != new.name {
            match there {
                true => format!("pool uses {name} and new vdev is {}", new.name),
                false => format!("both {name} and {} vdevs are present", new.name),
            }
        } else if self.parity != new.parity {
            match there {
                true => format!("pool uses {} device parity and new vdev uses {}", self.parity, new.parity),
                false => format!("both {} and {} device parity {name} vdevs are present", self.parity, new.parity),
            }
        } else {
            match there {
                true => format!("pool uses {}-way {name} and new vdev uses {}-way {name}", devices.0, devices.1),
                false => format!("both {}-way and {}-way {name} vdevs are present", devices.0, devices.1),
            }
        })
    }

    /// Compares with a group for metadata: a mirror may be added to RAID-Z groups if it survives
    /// the loss of as many devices.
    fn differs_as_special(self, new: Self, there: bool) -> Option<String> {
        if (self.name, new.name) != ("raidz", "mirror") {
            return self.differs(new, there);
        }
        let redundancy = format!("{} vs. {} ({}-way)", self.parity, new.devices - 1, new.devices);
        let differ = match there {
            true => format!("pool and new vdev with different redundancy, raidz and mirror vdevs, {redundancy}"),
            false => format!("raidz and mirror vdevs with different redundancy, {redundancy} are present"),
        };
        (self.parity + 1 != new.devices).then_some(differ)
    }
}

/// Checks that new groups have the redundancy of the existing ones, if these all have the same.
fn same_redundancy(pool: &Imported, new: &Shape, paths: &[PathBuf]) -> Result<(), Refusal> {
    let health = pool.store.on_devices().map(Disks::health).unwrap_or_default();
    let groups = pool.store.on_devices().map(Disks::groups).unwrap_or_default();
    let devices = pool.devices.read();
    let path = |at: usize| devices.get(at).map_or(PathBuf::new(), |device| PathBuf::from(device.name()));
    let of = |(number, (group, _)): (usize, &(Group, usize))| {
        let own = health.iter().enumerate().filter(|(_, device)| device.is_own() && device.group == number);
        let own: Vec<usize> = own.map(|(at, _)| at).collect();
        let first = own.first().filter(|_| group.class == GroupClass::Data)?;
        Some(Level::of(NewGroup { kind: group.kind, devices: own.len() }, &path(*first)))
    };
    let mut there: Vec<Level> = groups.iter().enumerate().filter_map(of).collect();
    if groups.is_empty() {
        there.push(Level::of(NewGroup { kind: GroupKind::Plain, devices: 1 }, &path(0)));
    }
    new.mismatch(&there, paths).map_or(Ok(()), |why| {
        let next = format!("use '-f' to override the following errors:\nmismatched replication level: {why}");
        Err(Refusal::new(Kind::Invalid, "invalid vdev specification").next(next))
    })
}

/// Returns the number of devices that may be lost in each group with segments, at least.
pub(super) fn redundancy_of(pool: &Imported) -> usize {
    let Some(disks) = pool.store.on_devices() else { return 0 };
    let health = disks.health();
    let holds = |number: usize| health.iter().any(|device| device.is_own() && device.group == number);
    let of = |(number, (group, parity)): (usize, (Group, usize))| {
        (group.class == GroupClass::Data && holds(number)).then_some(parity)
    };
    disks.groups().into_iter().enumerate().filter_map(of).min().unwrap_or(0)
}

/// Adds devices; or only checks whether they could be added.
pub(super) fn add(
    pool: &Imported,
    paths: &[PathBuf],
    words: &[(String, usize)],
    size: Option<u64>,
    (force, only_say): (bool, bool),
) -> Result<(), Refusal> {
    let doing = format!("cannot add to '{}'", pool.name());
    writable(pool, &doing)?;
    let mut shape = Shape::read(words)?;
    if words.is_empty() {
        shape.groups.push(NewGroup { kind: GroupKind::Plain, devices: paths.len() });
    }
    if shape.devices() != paths.len() {
        return Err(Refusal::new(Kind::Invalid, format!("{doing}: groups of another number of devices")));
    }
    if !force {
        same_redundancy(pool, &shape, paths)?;
    }
    let least = nacre_pool::store::MINIMUM_DEVICE.max(pool.store.slot() + 2 * nacre_pool::label::ENDS);
    let groups: Vec<NewGroup> = shape.all().copied().collect();
    if only_say {
        return devices::foresee(paths, &groups, size, Accepted::forced(force), (&doing, least));
    }
    let mut fresh = devices::fresh(paths, size, Accepted::forced(force))?;
    fresh.check_size(&doing, least)?;
    fresh.check_groups(&groups, force)?;
    fresh.try_writing(&doing)?;
    let plain = pool.store.identity().groups.is_empty();
    let of_data = shape.of_data() == paths.len();
    let added = if plain && of_data && shape.groups.iter().all(|group| group.kind == GroupKind::Plain) {
        let before = pool.devices.read().len();
        let added = pool.add(fresh.devices());
        // A device whose labels could not all be written may be named by the labels of others.
        let begun = usize::from(added.as_ref().is_err_and(|error| !matches!(error, PoolError::Refused(_))));
        fresh.keep(pool.devices.read().len() - before + begun);
        added
    } else {
        let mut kept = 0;
        let added = add_shape(pool, fresh.devices(), &shape, &mut kept);
        fresh.keep(kept);
        added
    };
    added.map_err(|error| Refusal::pool(&doing, &error))?;
    pool.watch.note(
        "sysevent.fs.zfs.vdev_add",
        paths.iter().map(|path| ("vdev_path".to_owned(), path.display().to_string())).collect(),
    );
    // A failed device may need a spare already.
    pool.resilver.want_spares();
    Ok(())
}

impl Imported {
    /// Adds special and log groups and spares to a new pool: these devices, which follow those of its groups.
    ///
    /// # Errors
    /// Devices that are too short or cannot be written.
    pub fn add_beside(&self, devices: &[Arc<dyn Device>], shape: &Shape) -> Result<(), Refusal> {
        let beside = Shape { special: shape.special.clone(), logs: shape.logs.clone(), ..Shape::default() };
        let beside = Shape { spares: shape.spares, ..beside };
        if devices.is_empty() {
            return Ok(());
        }
        let added = add_shape(self, devices.to_vec(), &beside, &mut 0);
        added.map_err(|error| Refusal::pool(format!("cannot create '{}'", self.name()), &error))
    }
}

/// Adds groups, then spares; sets `kept` to the number of devices that are part of the pool.
fn add_shape(pool: &Imported, devices: Vec<Arc<dyn Device>>, shape: &Shape, kept: &mut usize) -> Result<(), PoolError> {
    let counted = |device| Arc::new(Counted::new(device, Arc::clone(&pool.failing), Arc::clone(&pool.watch)));
    let devices: Vec<Arc<Counted>> = devices.into_iter().map(counted).collect();
    let mut rest = devices.as_slice();
    let mut next = |many: usize| {
        let (own, others) = rest.split_at(many.min(rest.len()));
        rest = others;
        let with_guid = |device: &Arc<Counted>| (Arc::clone(device) as Arc<dyn Device>, (pool.opening.entropy)());
        own.iter().map(with_guid).unzip::<_, _, Vec<_>, Vec<_>>()
    };
    // Labels may name the devices unless the change was refused.
    let mut count_kept = |many: usize, done: Result<(), PoolError>| {
        if !matches!(done, Err(PoolError::Refused(_))) {
            *kept += many;
        }
        done
    };
    type AddGroups = fn(&Store, &[Arc<dyn Device>], &[u64], &[NewGroup]) -> Result<(), PoolError>;
    let kinds: [(&[NewGroup], AddGroups); 3] =
        [(&shape.groups, Store::add_groups), (&shape.special, Store::add_special), (&shape.logs, Store::add_logs)];
    pool.failing.set_redundant();
    let added = (|| {
        for (groups, add) in kinds.into_iter().filter(|(groups, _)| !groups.is_empty()) {
            let (devices, guids) = next(count(groups.iter()));
            count_kept(devices.len(), add(&pool.store, &devices, &guids, groups))?;
        }
        let (spares, guids) = next(shape.spares);
        spares.into_iter().zip(guids).try_for_each(|(spare, guid)| count_kept(1, pool.store.add_spare(spare, guid)))
    })();
    pool.resilver.take_up(devices);
    pool.pool.grown();
    added
}

/// Adds a device to a mirror.
pub(super) fn attach(
    pool: &Imported,
    beside: &Path,
    new: &Path,
    size: Option<u64>,
    force: bool,
) -> Result<(), Refusal> {
    let doing = format!("cannot attach {} to {}", new.display(), beside.display());
    writable(pool, &doing)?;
    let number = number_of(pool, &doing, beside)?;
    let (mut fresh, device) = fresh_beside(pool, &doing, number, (new, size, force))?;
    let guid = (pool.opening.entropy)();
    let attached = pool.store.attach(number, Arc::clone(&device) as Arc<dyn Device>, guid);
    if !matches!(attached, Err(PoolError::Refused(_))) {
        fresh.keep(1);
    }
    attached.map_err(|error| Refusal::pool(doing, &error))?;
    pool.failing.set_redundant();
    pool.resilver.take_up(vec![device]);
    pool.pool.grown();
    note(pool, "sysevent.fs.zfs.vdev_attach", new, "ONLINE");
    pool.resilver.begin()
}

/// Detaches a device from its mirror or pair.
pub(super) fn detach(pool: &Imported, path: &Path) -> Result<(), Refusal> {
    let doing = format!("cannot detach {}", path.display());
    writable(pool, &doing)?;
    let number = number_of(pool, &doing, path)?;
    pool.store.detach(number).map_err(|error| Refusal::pool(doing, &error))?;
    pool.resilver.take_up(Vec::new());
    pool.pool.grown();
    note(pool, "sysevent.fs.zfs.vdev_remove", path, "REMOVED");
    Ok(())
}

/// Removes a spare, a single log device, or (by its name) a mirror for the log from the pool.
pub(super) fn remove(pool: &Imported, path: &Path) -> Result<(), Refusal> {
    let doing = format!("cannot remove {}", path.display());
    writable(pool, &doing)?;
    let is_log = |number: u16| pool.store.on_devices().is_some_and(|disks| disks.is_log_device(number));
    let in_mirror = |number: u16| pool.store.on_devices().is_some_and(|disks| disks.is_detachable(number).is_ok());
    let figures = Figures::of(pool)?;
    let group = figures.groups.iter().find(|group| group.kind != "plain" && Path::new(&group.name) == path);
    let first = group.and_then(|group| figures.devices.get(*group.devices.first()?));
    let number = number_of(pool, &doing, first.map_or(path, |device| Path::new(&device.path)))?;
    if is_log(number) && group.is_none() && in_mirror(number) {
        return Err(Refusal::new(Kind::Invalid, format!("{doing}: operation not supported on this type of pool"))
            .next("name the mirror that it is in, or `nacre pool detach` takes it out of that"));
    }
    let removed = match is_log(number) {
        true => without_log(pool, || pool.store.remove_log(number)),
        false => pool.store.remove_spare(number),
    };
    removed.map_err(|error| Refusal::pool(doing, &error))?;
    pool.resilver.take_up(Vec::new());
    note(pool, "sysevent.fs.zfs.vdev_remove", path, "REMOVED");
    Ok(())
}
