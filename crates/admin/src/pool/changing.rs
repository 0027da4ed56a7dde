//! Verbs that change a pool's topology: removal of devices and groups with data, RAID-Z expansion,
//! conversion of groups, rebalancing; and a preview of the result of each.
//!
//! Caller: requests. Invariants: a refused change has changed nothing; a change that decreases
//! redundancy has to be forced; the result of a change is shown before it begins.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use nacre_pool::PoolError;
use nacre_pool::backend::{Disks, NewGroup, NewShape};
use nacre_pool::device::Device;
use nacre_pool::label::{ChangeKind, GroupKind};
use nacre_pool::properties::size::human_bytes;
use nacre_pool::store::Outlook;
use serde::{Deserialize, Serialize};

use super::reshape::Reshaping;
use super::resilver::{note, number_of, writable};
use super::shape::{Shape, redundancy_of};
use super::signatures::Accepted;
use super::{LOOK_UP, devices};
use crate::clock::moment;
use crate::counted::Counted;
use crate::{Imported, Kind, Progress, Refusal};

/// Number of bytes that are read to measure the speed of the devices.
const SAMPLE: u64 = 32 << 20;

/// Formatter of a size.
type Form = fn(u64) -> String;

/// A topology change to preview.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Intended {
    /// Removes these devices or this group.
    Remove(Vec<PathBuf>),
    /// Adds a device to a RAID-Z group.
    Attach {
        /// The group.
        group: PathBuf,
        /// The device.
        new: PathBuf,
    },
    /// Converts a group to another kind, perhaps with more devices.
    Convert {
        /// The group.
        group: PathBuf,
        /// The new kind, in the words of ZFS.
        to: String,
        /// The devices that are added to it.
        devices: Vec<PathBuf>,
    },
    /// Adds groups.
    Add {
        /// Their devices.
        devices: Vec<PathBuf>,
        /// Kinds of the groups, as in [`super::PoolRequest::Add`].
        groups: Vec<(String, usize)>,
    },
    /// Moves segments from full devices to empty ones.
    Rebalance,
}

/// Finds a group by its name, such as `mirror-0`; returns its number.
pub(super) fn group_named(pool: &Imported, word: &Path) -> Option<usize> {
    let (kind, number) = word.to_str()?.rsplit_once('-')?;
    let number: usize = number.parse().ok()?;
    let disks = pool.store.on_devices()?;
    let (group, _) = disks.groups().into_iter().nth(number)?;
    let is_there = disks.health().iter().any(|device| device.is_own() && device.group == number);
    let named = match group.kind {
        GroupKind::Plain => kind == "plain",
        GroupKind::Mirror => kind == "mirror",
        GroupKind::RaidZ(parity) => kind == format!("raidz{parity}") || kind == "raidz" && parity == 1,
    };
    (named && is_there).then_some(number)
}

fn members(disks: &Disks, group: usize) -> Vec<u16> {
    let health = disks.health();
    (0..).zip(&health).filter(|(_, one)| one.is_own() && one.group == group).map(|(at, _)| at).collect()
}

fn disks<'a>(pool: &'a Imported, doing: &str) -> Result<&'a Disks, Refusal> {
    pool.store
        .on_devices()
        .ok_or_else(|| Refusal::new(Kind::Invalid, format!("{doing}: the pool does not lie on devices")))
}

/// Returns the new topology of a removal of the named devices, or groups with all their devices.
fn removal(pool: &Imported, doing: &str, words: &[PathBuf]) -> Result<NewShape, Refusal> {
    pool.reshape.is_free(doing)?;
    let disks = disks(pool, doing)?;
    let mut leaving = Vec::new();
    for word in words {
        match group_named(pool, word) {
            Some(group) => leaving.extend(members(disks, group)),
            None => leaving.push(number_of(pool, doing, word)?),
        }
    }
    leaving.sort_unstable();
    leaving.dedup();
    disks.without(&leaving).map_err(|error| Refusal::pool(doing, &error))
}

/// Returns the new topology of a change of a group.
fn becoming(
    pool: &Imported,
    doing: &str,
    word: &Path,
    (becomes, coming): (Option<GroupKind>, usize),
) -> Result<NewShape, Refusal> {
    let disks = disks(pool, doing)?;
    let group = group_named(pool, word).or_else(|| {
        let number = number_of(pool, doing, word).ok()?;
        disks.health().get(usize::from(number)).map(|health| health.group)
    });
    let group = group.ok_or_else(|| Refusal::new(Kind::NotFound, format!("{doing}: no such device in pool")))?;
    let now = disks.kind_of(group);
    let (kind, becomes) = match becomes {
        Some(becomes) => (ChangeKind::Conversion, becomes),
        None => (ChangeKind::Expansion, now),
    };
    if kind == ChangeKind::Conversion && becomes == now && coming == 0 {
        return Err(Refusal::new(Kind::Invalid, format!("{doing}: it is that already")));
    }
    Ok(NewShape { kind, group, becomes, leaving: Vec::new(), coming })
}

fn kind_named(doing: &str, word: &str) -> Result<GroupKind, Refusal> {
    Ok(match word {
        "mirror" => GroupKind::Mirror,
        "raidz" | "raidz1" => GroupKind::RaidZ(1),
        "raidz2" => GroupKind::RaidZ(2),
        "raidz3" => GroupKind::RaidZ(3),
        _ => {
            let refusal = Refusal::new(Kind::Invalid, format!("{doing}: a group does not become '{word}'"));
            return Err(refusal.next("mirror, raidz1, raidz2 or raidz3"));
        }
    })
}

/// Returns the lengths of devices, which may not exist yet, bytes.
fn lengths(paths: &[PathBuf], like: u64) -> Vec<u64> {
    let length = |path: &PathBuf| {
        let opened = devices::open(std::slice::from_ref(path), false).ok()?;
        opened.first().map(|device| device.length())
    };
    paths.iter().map(|path| length(path).unwrap_or(like)).collect()
}

/// Returns the length of the shortest device of a group, bytes.
fn shortest(pool: &Imported, group: usize) -> u64 {
    let (identity, health) = (pool.store.identity(), pool.store.on_devices().map(Disks::health).unwrap_or_default());
    let own = identity.members.iter().zip(&health).filter(|(_, one)| one.is_own() && one.group == group);
    own.map(|(member, _)| member.length).min().unwrap_or(0)
}

/// Returns the speed at which segments were moved, or could be moved as measured by reads, bytes a second.
fn rate(pool: &Imported) -> u64 {
    let report = pool.reshape.report();
    if report.moved >= SAMPLE && report.elapsed > 0 {
        return report.speed();
    }
    let (began, mut read) = (moment(), 0);
    let mut visit = |checked: &nacre_pool::store::Checked| {
        read += checked.bytes;
        read < SAMPLE && began.elapsed().as_millis() < 500
    };
    if pool.store.scrub(&mut visit).is_err() {
        return 0;
    }
    // Data that is read is written as well.
    read.saturating_mul(1000) / (2 * began.elapsed().as_millis() as u64).max(1)
}

fn lines(pool: &Imported, head: String, outlook: &Outlook, form: Form) -> Vec<String> {
    let (now, then) = outlook.usable;
    let (writable, writable_then) = outlook.available;
    let (before, meanwhile, after) = outlook.losses;
    let mut lines = vec![
        head,
        format!("  usable     {} now, {} then", form(now), form(then)),
        format!("  available  {} now, {} then", form(writable), form(writable_then)),
        format!("  failures survived  {before} now, {meanwhile} meanwhile, {after} then"),
    ];
    lines.push(moved(pool, outlook.moves, form));
    if outlook.lacking > 0 {
        lines.push(format!("  it does not fit: {} too little", form(outlook.lacking)));
    }
    if falls(outlook) {
        lines.push("  redundancy falls: -f is needed".to_owned());
    }
    lines
}

fn moved(pool: &Imported, moves: u64, form: Form) -> String {
    let rate = if moves == 0 { 0 } else { rate(pool) };
    match (moves, moves.checked_div(rate)) {
        (0, _) => "  to be moved  nothing".to_owned(),
        (_, None) => format!("  to be moved  {}", form(moves)),
        (_, Some(seconds)) => {
            let span = span(seconds.max(1));
            format!("  to be moved  {}, about {span} at {}/s", form(moves), form(rate))
        }
    }
}

fn span(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        _ => format!("{} h", seconds / 3600),
    }
}

/// Whether fewer devices can be lost meanwhile or afterwards than now.
fn falls(outlook: &Outlook) -> bool {
    let (now, meanwhile, after) = outlook.losses;
    meanwhile.min(after) < now
}

/// Refuses a change that has to be forced.
fn forced(doing: &str, outlook: &Outlook, force: bool) -> Result<(), Refusal> {
    if force || !falls(outlook) {
        return Ok(());
    }
    let (now, meanwhile, after) = outlook.losses;
    let why = format!("{doing}: {now} devices may be lost now, {meanwhile} meanwhile and {after} afterwards");
    Err(Refusal::new(Kind::Invalid, why).next("use '-f' to do it all the same"))
}

/// Previews the result of a change, as lines.
pub(super) fn plan(
    pool: &Imported,
    intended: &Intended,
    exact: bool,
    progress: &mut dyn Progress,
) -> Result<(), Refusal> {
    let form: Form = if exact { |bytes| bytes.to_string() } else { human_bytes };
    tell(&planned(pool, intended, form)?, progress);
    Ok(())
}

fn planned(pool: &Imported, intended: &Intended, form: Form) -> Result<Vec<String>, Refusal> {
    let name = pool.name();
    match intended {
        Intended::Remove(words) => {
            let what = named(words);
            let doing = format!("cannot remove {what}");
            let new = removal(pool, &doing, words)?;
            let outlook = outlook(pool, &doing, &new, &[])?;
            Ok(lines(pool, head_of_removal(&what, &name), &outlook, form))
        }
        Intended::Attach { group, new } => {
            let doing = format!("cannot attach {} to {}", new.display(), group.display());
            let shape = becoming(pool, &doing, group, (None, 1))?;
            if group_named(pool, group).is_none() || !matches!(shape.becomes, GroupKind::RaidZ(_)) {
                return Err(Refusal::new(Kind::Invalid, format!("{doing}: only RAID-Z groups become wider"))
                    .next("one copy more gives no room"));
            }
            let lengths = lengths(std::slice::from_ref(new), shortest(pool, shape.group));
            let outlook = outlook(pool, &doing, &shape, &lengths)?;
            Ok(lines(pool, head_of_expansion(group, &name), &outlook, form))
        }
        Intended::Convert { group, to, devices } => {
            let doing = format!("cannot convert {}", group.display());
            let shape = becoming(pool, &doing, group, (Some(kind_named(&doing, to)?), devices.len()))?;
            let lengths = lengths(devices, shortest(pool, shape.group));
            let outlook = outlook(pool, &doing, &shape, &lengths)?;
            Ok(lines(pool, head_of_conversion(&converted(pool, group, shape.group), to, &name), &outlook, form))
        }
        Intended::Add { devices, groups } => {
            let doing = format!("cannot add to '{name}'");
            let mut shape = Shape::read(groups)?;
            if groups.is_empty() {
                shape.groups.push(NewGroup { kind: GroupKind::Plain, devices: devices.len() });
            }
            let lengths = lengths(devices, shortest(pool, 0));
            added(pool, &doing, (&shape, &lengths), form)
        }
        Intended::Rebalance => {
            let doing = format!("cannot rebalance '{name}'");
            disks(pool, &doing)?;
            pool.reshape.is_free(&doing)?;
            Ok(vec![format!("rebalance of '{name}':"), moved(pool, pool.store.uneven(), form)])
        }
    }
}

fn head_of_removal(what: &str, pool: &str) -> String {
    format!("removal of {what} from '{pool}':")
}

fn head_of_expansion(group: &Path, pool: &str) -> String {
    format!("expansion of {} of '{pool}':", group.display())
}

fn head_of_conversion(what: &str, to: &str, pool: &str) -> String {
    format!("conversion of {what} of '{pool}' to {to}:")
}

/// Names the objects of a conversion: a group by its name; of single devices, all of them.
fn converted(pool: &Imported, word: &Path, group: usize) -> String {
    let devices = pool.store.on_devices().map(|disks| (disks.kind_of(group), members(disks, group)));
    let known = pool.devices.read();
    match devices {
        Some((GroupKind::Plain, numbers)) => {
            let paths = numbers.iter().filter_map(|number| known.get(usize::from(*number)));
            paths.map(|device| device.name()).collect::<Vec<_>>().join(" ")
        }
        _ => word.display().to_string(),
    }
}

/// Sends the lines of a preview.
fn tell(lines: &[String], progress: &mut dyn Progress) {
    lines.iter().for_each(|line| {
        progress.note(line);
    });
}

/// Previews the addition of groups.
fn added(pool: &Imported, doing: &str, (shape, lengths): (&Shape, &[u64]), form: Form) -> Result<Vec<String>, Refusal> {
    if shape.devices() != lengths.len() {
        return Err(Refusal::new(Kind::Invalid, format!("{doing}: groups of another number of devices")));
    }
    let (slot, space) = (pool.store.slot(), pool.store.space());
    let (mut more, mut at) = (0, 0);
    for group in &shape.groups {
        let own = lengths.get(at..at + group.devices).unwrap_or_default();
        at += group.devices;
        let sizes: Vec<u64> = own.iter().map(|length| super::figures::slots(*length, slot)).collect();
        more += super::figures::room_of_group(group.kind, group.parity(), &sizes).1;
    }
    let now = redundancy_of(pool);
    let then = shape.groups.iter().map(NewGroup::parity).min().map_or(now, |parity| parity.min(now));
    let (usable, available) = ((space.size, space.size + more), (space.available, space.available + more));
    let outlook = Outlook { usable, available, moves: 0, losses: (now, now, then), lacking: 0 };
    Ok(lines(pool, format!("devices added to '{}':", pool.name()), &outlook, form))
}

/// Checks that a change can begin: none is under way, or a conversion that becomes another one.
fn is_free(pool: &Imported, doing: &str, new: &NewShape) -> Result<(), Refusal> {
    let turns = pool.store.shape_change().is_some_and(|change| {
        (change.kind, new.kind) == (ChangeKind::Conversion, ChangeKind::Conversion)
            && usize::from(change.group) == new.group
    });
    if turns { Ok(()) } else { pool.reshape.is_free(doing) }
}

fn outlook(pool: &Imported, doing: &str, new: &NewShape, lengths: &[u64]) -> Result<Outlook, Refusal> {
    is_free(pool, doing, new)?;
    pool.store.outlook(new, lengths).map_err(|error| Refusal::pool(doing, &error))
}

fn named(words: &[PathBuf]) -> String {
    words.iter().map(|word| word.display().to_string()).collect::<Vec<_>>().join(" ")
}

/// Removes devices or groups that hold data.
pub(super) fn remove(
    pool: &Imported,
    words: &[PathBuf],
    force: bool,
    progress: &mut dyn Progress,
) -> Result<(), Refusal> {
    let what = named(words);
    let doing = format!("cannot remove {what}");
    writable(pool, &doing)?;
    let new = removal(pool, &doing, words)?;
    let outlook = outlook(pool, &doing, &new, &[])?;
    tell(&lines(pool, head_of_removal(&what, &pool.name()), &outlook, human_bytes), progress);
    forced(&doing, &outlook, force)?;
    pool.store.begin_change(&new, &[], &[]).map_err(|error| Refusal::pool(&doing, &error))?;
    pool.failing.set_redundant();
    pool.pool.grown();
    pool.reshape.begin(Reshaping::Removal, &what)
}

/// Starts a change of a group, perhaps with more devices.
fn change(
    pool: &Imported,
    doing: &str,
    new: &NewShape,
    (paths, size, force): (&[PathBuf], Option<u64>, bool),
    (head, progress): (String, &mut dyn Progress),
) -> Result<(), Refusal> {
    is_free(pool, doing, new)?;
    let mut fresh = devices::fresh(paths, size, Accepted::forced(force))?;
    let least = nacre_pool::store::MINIMUM_DEVICE.max(pool.store.slot() + 2 * nacre_pool::label::ENDS);
    fresh.check_size(doing, least)?;
    let counted = |device| Arc::new(Counted::new(device, Arc::clone(&pool.failing), Arc::clone(&pool.watch)));
    let counted: Vec<Arc<Counted>> = fresh.devices().into_iter().map(counted).collect();
    let lengths: Vec<u64> = counted.iter().map(|device| device.length()).collect();
    let outlook = outlook(pool, doing, new, &lengths)?;
    tell(&lines(pool, head, &outlook, human_bytes), progress);
    forced(doing, &outlook, force)?;
    fresh.try_writing(doing)?;
    let coming: Vec<Arc<dyn Device>> = counted.iter().map(|device| Arc::clone(device) as Arc<dyn Device>).collect();
    let guids: Vec<u64> = coming.iter().map(|_| (pool.opening.entropy)()).collect();
    let begun = pool.store.begin_change(new, &coming, &guids);
    if !matches!(begun, Err(PoolError::Refused(_))) {
        fresh.keep(paths.len());
    }
    begun.map_err(|error| Refusal::pool(doing, &error))?;
    pool.failing.set_redundant();
    pool.resilver.take_up(counted);
    pool.pool.grown();
    paths.iter().for_each(|path| note(pool, "sysevent.fs.zfs.vdev_attach", path, "ONLINE"));
    Ok(())
}

/// Adds a device to a RAID-Z group.
pub(super) fn widen(
    pool: &Imported,
    group: &Path,
    new: &Path,
    (size, force): (Option<u64>, bool),
    progress: &mut dyn Progress,
) -> Result<(), Refusal> {
    let doing = format!("cannot attach {} to {}", new.display(), group.display());
    writable(pool, &doing)?;
    let shape = becoming(pool, &doing, group, (None, 1))?;
    if !matches!(shape.becomes, GroupKind::RaidZ(_)) {
        return Err(Refusal::new(Kind::Invalid, format!("{doing}: can only attach to mirrors and top-level disks"))
            .next("name a device of the mirror"));
    }
    let least = shortest(pool, shape.group);
    let paths = [new.to_owned()];
    if size.unwrap_or(least) < least
        || size.is_none() && lengths(&paths, least).first().is_some_and(|length| *length < least)
    {
        return Err(Refusal::new(Kind::Invalid, format!("{doing}: device is too small")));
    }
    let head = head_of_expansion(group, &pool.name());
    change(pool, &doing, &shape, (&paths, size, force), (head, progress))?;
    pool.reshape.begin(Reshaping::Expansion, &group.display().to_string())
}

/// Converts a group to another kind.
pub(super) fn convert(
    pool: &Imported,
    group: &Path,
    to: &str,
    (paths, size, force): (&[PathBuf], Option<u64>, bool),
    progress: &mut dyn Progress,
) -> Result<(), Refusal> {
    let doing = format!("cannot convert {}", group.display());
    writable(pool, &doing)?;
    let shape = becoming(pool, &doing, group, (Some(kind_named(&doing, to)?), paths.len()))?;
    let what = converted(pool, group, shape.group);
    let head = head_of_conversion(&what, to, &pool.name());
    change(pool, &doing, &shape, (paths, size, force), (head, progress))?;
    pool.reshape.begin(Reshaping::Conversion, &format!("{what} to {to}"))
}

/// Moves segments from full devices to empty ones.
pub(super) fn rebalance(pool: &Imported, progress: &mut dyn Progress) -> Result<(), Refusal> {
    writable(pool, &format!("cannot rebalance '{}'", pool.name()))?;
    plan(pool, &Intended::Rebalance, false, progress)?;
    pool.reshape.begin(Reshaping::Rebalance, &pool.name())
}

/// Waits for the end of a topology change, of this kind if one is given; reports obstacles.
pub(super) fn wait(pool: &Imported, only: Option<Reshaping>, progress: &mut dyn Progress) -> Result<(), Refusal> {
    let (mut told, concerns) = (None, |kind| only.is_none_or(|only| only == kind));
    while concerns(pool.reshape.report().kind) && pool.reshape.job.wait(LOOK_UP) && progress.note("") {
        if let Some(why) = pool.suspended() {
            return Err(Refusal::new(Kind::Io, format!("'{}' does not go on: {why}", pool.name())));
        }
        let held_up = pool.reshape.report().held_up;
        if let Some(why) = held_up.as_ref().filter(|why| told.as_ref() != Some(*why)) {
            progress.note(&format!("the change of shape of '{}' is held up: {why}", pool.name()));
        }
        told = held_up;
    }
    Ok(())
}
