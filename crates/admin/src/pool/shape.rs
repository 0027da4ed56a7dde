//! Groups that are changed in use: devices, groups and spares are added, mirrors get more devices or
//! fewer.
//!
//! Caller: the verbs. Invariant: what is refused has changed nothing, and files that were made for it
//! are gone again.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use nacre_pool::PoolError;
use nacre_pool::backend::{Disks, NewGroup};
use nacre_pool::device::Device;
use nacre_pool::label::{Group, GroupClass, GroupKind};

use super::devices;
use super::resilver::{fresh_beside, note, number_of, writable};
use crate::counted::Counted;
use crate::{Imported, Kind, Refusal};

/// What new devices are to be.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// Groups of the next so many devices.
    pub groups: Vec<NewGroup>,
    /// Groups for the intent log alone, which come after them.
    pub logs: Vec<NewGroup>,
    /// Spares, which come last.
    pub spares: usize,
}

impl Shape {
    /// Reads it from what ZFS calls it, with how many devices each is of: groups, then devices for the
    /// log, then spares.
    ///
    /// # Errors
    /// Words that are none; another order.
    pub fn read(words: &[(String, usize)]) -> Result<Self, Refusal> {
        let mut shape = Self::default();
        for (word, devices) in words {
            let kind = match word.as_str() {
                "plain" | "log" => GroupKind::Plain,
                "log mirror" => GroupKind::Mirror,
                "mirror" => GroupKind::Mirror,
                "raidz" | "raidz1" => GroupKind::RaidZ(1),
                "raidz2" => GroupKind::RaidZ(2),
                "raidz3" => GroupKind::RaidZ(3),
                "spare" => {
                    shape.spares += devices;
                    continue;
                }
                _ => return Err(Refusal::new(Kind::Invalid, format!("'{word}' is no group of devices"))),
            };
            let is_log = word.starts_with("log");
            if shape.spares > 0 || !is_log && !shape.logs.is_empty() {
                return Err(Refusal::new(Kind::Invalid, "groups of devices come first, then logs, then spares"));
            }
            let groups = if is_log { &mut shape.logs } else { &mut shape.groups };
            groups.push(NewGroup { kind, devices: *devices });
        }
        Ok(shape)
    }

    /// How many devices it is of.
    #[must_use]
    pub fn devices(&self) -> usize {
        self.groups.iter().chain(&self.logs).map(|group| group.devices).sum::<usize>() + self.spares
    }
}

/// What a group is, as far as its redundancy is to be the same as that of others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Level {
    kind: GroupKind,
    devices: usize,
}

impl Level {
    fn of(kind: GroupKind, devices: usize) -> Self {
        // Each device for itself is one, however many there are.
        Self { kind, devices: if kind == GroupKind::Plain { 1 } else { devices } }
    }

    fn name(self) -> &'static str {
        match self.kind {
            GroupKind::Plain => "disk",
            GroupKind::Mirror => "mirror",
            GroupKind::RaidZ(_) => "raidz",
        }
    }

    /// In what a new group differs, in the words of ZFS.
    fn differs(self, new: Self) -> Option<String> {
        if self.name() != new.name() {
            return Some(format!("pool uses {} and new vdev is {}", self.name(), new.name()));
        }
        if let (GroupKind::RaidZ(there), GroupKind::RaidZ(parity)) = (self.kind, new.kind)
            && there != parity
        {
            return Some(format!("pool uses {there} device parity and new vdev uses {parity}"));
        }
        let (there, devices, name) = (self.devices, new.devices, self.name());
        (there != devices).then(|| format!("pool uses {there}-way {name} and new vdev uses {devices}-way {name}"))
    }
}

/// Whether new groups have the redundancy of those that are there, if these have all the same.
fn same_redundancy(pool: &Imported, new: &[NewGroup]) -> Result<(), Refusal> {
    let health = pool.store.on_devices().map(Disks::health).unwrap_or_default();
    let groups = pool.store.on_devices().map(Disks::groups).unwrap_or_default();
    let own = |number: usize| {
        let here = |device: &&nacre_pool::backend::DeviceHealth| device.is_own() && device.group == number;
        health.iter().filter(here).count()
    };
    let of = |(number, (group, _)): (usize, &(Group, usize))| {
        let counts = own(number) > 0 && group.class == GroupClass::Data;
        counts.then(|| Level::of(group.kind, own(number)))
    };
    let mut there: Vec<Level> = groups.iter().enumerate().filter_map(of).collect();
    if groups.is_empty() {
        there.push(Level::of(GroupKind::Plain, 1));
    }
    let Some(first) = there.first().filter(|first| there.iter().all(|level| level == *first)) else { return Ok(()) };
    let other = new.iter().find_map(|group| first.differs(Level::of(group.kind, group.devices)));
    other.map_or(Ok(()), |why| {
        let next = format!("use '-f' to override the following errors:\nmismatched replication level: {why}");
        Err(Refusal::new(Kind::Invalid, "invalid vdev specification").next(next))
    })
}

/// How many devices of each group that holds segments may be lost at least.
pub(super) fn redundancy_of(pool: &Imported) -> usize {
    let Some(disks) = pool.store.on_devices() else { return 0 };
    let health = disks.health();
    let holds = |number: usize| health.iter().any(|device| device.is_own() && device.group == number);
    let of = |(number, (group, parity)): (usize, (Group, usize))| {
        (group.class == GroupClass::Data && holds(number)).then_some(parity)
    };
    disks.groups().into_iter().enumerate().filter_map(of).min().unwrap_or(0)
}

/// Adds devices.
pub(super) fn add(
    pool: &Imported,
    paths: &[PathBuf],
    words: &[(String, usize)],
    size: Option<u64>,
    force: bool,
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
        same_redundancy(pool, &shape.groups)?;
    }
    let mut fresh = devices::fresh(paths, size, force)?;
    let least = nacre_pool::store::MINIMUM_DEVICE.max(pool.store.slot() + 2 * nacre_pool::label::ENDS);
    fresh.check_size(&doing, least)?;
    fresh.try_writing(&doing)?;
    let plain = pool.store.identity().groups.is_empty();
    let of_data = shape.spares == 0 && shape.logs.is_empty();
    let added = if plain && of_data && shape.groups.iter().all(|group| group.kind == GroupKind::Plain) {
        let before = pool.devices.read().len();
        let added = pool.add(fresh.devices());
        // One whose labels could not all be written may be named by those of others.
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
    // One may be missed already.
    pool.resilver.want_spares();
    Ok(())
}

/// Adds groups, and spares behind them; `kept` becomes how many of the devices belong to the pool.
fn add_shape(pool: &Imported, devices: Vec<Arc<dyn Device>>, shape: &Shape, kept: &mut usize) -> Result<(), PoolError> {
    let counted = |device| Arc::new(Counted::new(device, Arc::clone(&pool.failing), Arc::clone(&pool.watch)));
    let devices: Vec<Arc<Counted>> = devices.into_iter().map(counted).collect();
    let (all_groups, spares) = devices.split_at(devices.len().saturating_sub(shape.spares));
    let of_data: usize = shape.groups.iter().map(|group| group.devices).sum();
    let (grouped, logs) = all_groups.split_at(of_data.min(all_groups.len()));
    // What was not refused may be named by labels.
    let mut count = |many: usize, done: Result<(), PoolError>| {
        if !matches!(done, Err(PoolError::Refused(_))) {
            *kept += many;
        }
        done
    };
    let guid = || (pool.opening.entropy)();
    let plain = |devices: &[Arc<Counted>]| -> (Vec<Arc<dyn Device>>, Vec<u64>) {
        devices.iter().map(|device| (Arc::clone(device) as Arc<dyn Device>, guid())).unzip()
    };
    pool.failing.set_redundant();
    let added = (|| {
        if !grouped.is_empty() {
            let (devices, guids) = plain(grouped);
            count(grouped.len(), pool.store.add_groups(&devices, &guids, &shape.groups))?;
        }
        if !logs.is_empty() {
            let (devices, guids) = plain(logs);
            count(logs.len(), pool.store.add_logs(&devices, &guids, &shape.logs))?;
        }
        let mut add =
            |device: &Arc<Counted>| count(1, pool.store.add_spare(Arc::clone(device) as Arc<dyn Device>, guid()));
        spares.iter().try_for_each(&mut add)
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
    if super::changing::group_named(pool, beside).is_some() {
        return super::changing::widen(pool, beside, new, (size, force));
    }
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

/// Takes a device out of its mirror or pair.
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

/// Takes devices out of the pool: spares and devices for the log at once, others when what they hold was
/// moved.
pub(super) fn remove(pool: &Imported, paths: &[PathBuf], force: bool) -> Result<(), Refusal> {
    let at_once = |path: &Path| {
        let disks = pool.store.on_devices()?;
        let number = number_of(pool, "", path).ok()?;
        let is_spare = disks.health().get(usize::from(number)).is_some_and(|health| !health.is_own());
        (is_spare || disks.is_log_device(number)).then_some(number)
    };
    let holding: Vec<PathBuf> = paths.iter().filter(|path| at_once(path).is_none()).cloned().collect();
    for (path, number) in paths.iter().filter_map(|path| Some((path, at_once(path)?))) {
        remove_at_once(pool, path, number)?;
    }
    if holding.is_empty() { Ok(()) } else { super::changing::remove(pool, &holding, force) }
}

fn remove_at_once(pool: &Imported, path: &Path, number: u16) -> Result<(), Refusal> {
    let doing = format!("cannot remove {}", path.display());
    writable(pool, &doing)?;
    let removed = match pool.store.on_devices().is_some_and(|disks| disks.is_log_device(number)) {
        true => remove_log(pool, number),
        false => pool.store.remove_spare(number),
    };
    removed.map_err(|error| Refusal::pool(doing, &error))?;
    pool.resilver.take_up(Vec::new());
    note(pool, "sysevent.fs.zfs.vdev_remove", path, "REMOVED");
    Ok(())
}

/// Takes devices for the log out: before that, nothing of what is there is needed any more.
fn remove_log(pool: &Imported, number: u16) -> Result<(), PoolError> {
    pool.store.hold_log(true)?;
    let removed = pool.pool.commit().and_then(|_| pool.pool.commit()).and_then(|_| pool.store.remove_log(number));
    pool.store.hold_log(false)?;
    removed
}
