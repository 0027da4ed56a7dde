//! Search for importable pools: labels on devices and in buckets.
//!
//! Invariant: of several copies of a device (such as backups of its file) the newest is taken; a
//! copy that is older than the other devices of its pool is refused, and so are two copies of the
//! same age.

use nacre_admin::{
    Kind, Refusal, host,
    pool::{
        devices::{self, Opened},
        in_bucket,
    },
};
use nacre_daemon::{
    failure::Failure,
    pool::{dates, known},
    report::printable,
};
use nacre_pool::{
    PoolError,
    backend::{Disks, LastWriter},
    device::{Device, FileDevice},
    label::{self, GroupClass, GroupKind, Identity, MemberRole, MemberStatus, PoolState},
};
use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::{
        ffi::OsStrExt,
        fs::{FileTypeExt, MetadataExt},
    },
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

/// How long to wait for answers of further buckets once the wanted pool is found.
const SILENCE: Duration = Duration::from_secs(1);

/// A pool as its labels describe it.
#[derive(Debug)]
pub struct Candidate {
    /// The newest identity among its devices.
    pub identity: Identity,
    /// The found devices, by their index in the pool.
    pub devices: BTreeMap<u16, PathBuf>,
    /// Two files that claim to be the same device of it and are equally new.
    pub twins: Option<(PathBuf, PathBuf)>,
    /// For a pool in a bucket: the machine that has written to it last.
    writer: Option<LastWriter>,
}

/// A device with the content of its labels.
struct FoundDevice {
    path: PathBuf,
    identity: Identity,
    /// Generation of the newest root record (like an uberblock) on the device, 0 without any.
    generation: u64,
    /// Number of damaged root records that may have been newer.
    lost: u64,
    /// Identity independent of the path: the device number of a block device, device and inode of a
    /// file.
    itself: (u64, u64),
    /// Whether it has labels at its beginning.
    begins: bool,
}

impl FoundDevice {
    fn age(&self) -> (u64, u64) {
        (self.identity.revision, self.generation)
    }
}

/// Number of devices that root records are written to.
const ROOT_DEVICES: u16 = 3;

/// Reasons why a device was not read.
enum Unread {
    /// It is in use.
    Busy,
    /// It cannot be read, for this reason.
    Refused(String),
}

/// The result of a search.
#[derive(Debug, Default)]
pub struct Search {
    /// The pools that were found.
    pub pools: Vec<Candidate>,
    /// Whether one of the devices is in use.
    pub busy: bool,
    /// Devices that were refused, each with the reason.
    pub refused: Vec<(PathBuf, String)>,
    /// Buckets whose store did not answer.
    unreachable: Vec<PathBuf>,
}

impl Search {
    /// Returns whether the store at an address has not answered.
    pub fn is_unreachable(&self, address: &Path) -> bool {
        self.unreachable.iter().any(|place| place == address)
    }
}

/// Searches these directories and files and nowhere else, and the remembered devices, each with the
/// GUID of its pool; without any, all block devices and the devices of previous imports. Once the
/// pool that is `wanted` by its name or GUID is found, buckets of other pools that do not answer
/// are not waited for.
pub fn search(places: &[PathBuf], noted: Option<&[(PathBuf, u64)]>, wanted: Option<&str>) -> Search {
    let mut found: BTreeMap<u64, Vec<FoundDevice>> = BTreeMap::new();
    let mut search = Search::default();
    let (mut known, is_named) = (Vec::new(), !places.is_empty());
    if !is_named && noted.is_none() {
        block_devices().iter().for_each(|path| look(path, &mut found, &mut search));
        known = known::devices();
    }
    let is_bucket = |path: &Path| nacre_remote::is_address(path);
    let (noted_buckets, noted): (Vec<_>, Vec<_>) =
        noted.unwrap_or(&known).iter().partition(|(path, _)| is_bucket(path));
    // Remembered devices count for their pool only: the file may be another pool's by now.
    for (path, pool) in noted {
        let mut there = BTreeMap::new();
        look(path, &mut there, &mut search);
        for (other, devices) in there {
            if other == *pool {
                found.entry(other).or_default().extend(devices);
            } else {
                let why = format!(
                    "pool {pool} was imported from here, and another one lies here now: passed over; -d takes it"
                );
                search.refused.push((path.clone(), why));
            }
        }
    }
    let (addresses, places): (Vec<&PathBuf>, Vec<&PathBuf>) = places.iter().partition(|place| is_bucket(place));
    places.into_iter().flat_map(|place| files(place)).for_each(|path| look(&path, &mut found, &mut search));
    // A missing device may be where it was last. Where places are named, devices elsewhere are not
    // considered, so that a copy of a pool can be imported next to the pool itself.
    let incomplete = || found.values().filter_map(|devices| choose(devices, &mut Vec::new()));
    let missing: Vec<PathBuf> =
        if is_named { Vec::new() } else { incomplete().flat_map(|pool| pool.missing()).collect() };
    for path in missing {
        let mut others = BTreeMap::new();
        look(&path, &mut others, &mut Search::default());
        for (pool, devices) in others {
            if let Some(there) = found.get_mut(&pool) {
                there.extend(devices);
            }
        }
    }
    search.pools = found.values().filter_map(|devices| choose(devices, &mut search.refused)).collect();
    let named = addresses.into_iter().map(|address| (address.clone(), None));
    let buckets = named.chain(noted_buckets.into_iter().map(|(address, pool)| (address.clone(), Some(*pool))));
    let start = |body: Body| thread::Builder::new().name("nacre-find".to_owned()).spawn(body).map(drop);
    look_in_buckets(buckets.collect(), wanted, &mut search, start);
    search
}

/// Body of a thread.
type Body = Box<dyn FnOnce() + Send>;

/// Finds the pools at these addresses, all of which are asked at once; where a GUID is given, only
/// the pool of that GUID is taken.
fn look_in_buckets(
    buckets: Vec<(PathBuf, Option<u64>)>,
    wanted: Option<&str>,
    search: &mut Search,
    start: impl Fn(Body) -> io::Result<()>,
) {
    let (sender, answers) = mpsc::channel();
    let mut waiting: Vec<Option<(PathBuf, Option<u64>)>> = Vec::with_capacity(buckets.len());
    for (place, (address, pool)) in buckets.into_iter().enumerate() {
        let (asked, sender) = (address.clone(), sender.clone());
        // An answer after the end of the search is dropped.
        let started = start(Box::new(move || drop(sender.send((place, look_in_bucket(&asked))))));
        waiting.push(match started {
            Ok(()) => Some((address, pool)),
            Err(error) => {
                search.refused.push((address, Failure::io("cannot start", "a thread", &error).what));
                None
            }
        });
    }
    drop(sender);
    let mut there: Vec<(usize, Candidate)> = Vec::new();
    loop {
        let all = || search.pools.iter().chain(there.iter().map(|(_, pool)| pool));
        let is_there = |wanted| all().any(|pool| pool.is_meant(wanted));
        // Named addresses are waited for in any case.
        let is_named = waiting.iter().flatten().any(|(_, pool)| pool.is_none());
        let answer = match wanted {
            Some(wanted) if !is_named && is_there(wanted) => answers.recv_timeout(SILENCE).ok(),
            _ => answers.recv().ok(),
        };
        let Some((place, found)) = answer else { break };
        let Some((address, pool)) = waiting.get_mut(place).and_then(Option::take) else { continue };
        match found {
            Ok(found) => {
                let found = found.filter(|found| pool.is_none_or(|pool| found.identity.pool == pool));
                there.extend(found.map(|found| (place, found)));
            }
            Err(refusal) => {
                if refusal.kind == Kind::Unreachable {
                    search.unreachable.push(address.clone());
                }
                search.refused.push((address, refusal.what));
            }
        }
    }
    there.sort_by_key(|(place, _)| *place);
    search.pools.extend(there.into_iter().map(|(_, pool)| pool));
    let silent = waiting.into_iter().flatten();
    search.refused.extend(silent.map(|(address, _)| (address, "the store does not answer: passed over".to_owned())));
}

/// Returns the pool at an address.
fn look_in_bucket(address: &Path) -> Result<Option<Candidate>, Refusal> {
    let Opened::Bucket(bucket, _) = devices::open_bucket(address)? else { return Ok(None) };
    Ok(in_bucket::look(&bucket)?.map(|(identity, writer)| Candidate {
        identity,
        devices: BTreeMap::from([(0, address.to_owned())]),
        twins: None,
        writer,
    }))
}

/// Returns the name of a location for people: a path, or an address without its settings.
pub fn shown(place: &Path) -> String {
    match nacre_remote::Address::parse(&place.to_string_lossy()) {
        Ok(address) if nacre_remote::is_address(place) => address.name(),
        _ => place.display().to_string(),
    }
}

fn look(path: &Path, found: &mut BTreeMap<u64, Vec<FoundDevice>>, search: &mut Search) {
    match probe(path) {
        Ok(Some(device)) => found.entry(device.identity.pool).or_default().push(device),
        Ok(None) => {}
        Err(Unread::Busy) => search.busy = true,
        Err(Unread::Refused(why)) => search.refused.push((path.to_owned(), why)),
    }
}

/// Chooses the devices that make up the pool; the others are added to `refused`.
fn choose(devices: &[FoundDevice], refused: &mut Vec<(PathBuf, String)>) -> Option<Candidate> {
    let newest = devices.iter().max_by_key(|device| device.age())?;
    let roots = devices.iter().map(|device| device.generation).max().unwrap_or(0);
    let mut pool = Candidate { identity: newest.identity.clone(), devices: BTreeMap::new(), twins: None, writer: None };
    let mut chosen: BTreeMap<u16, &FoundDevice> = BTreeMap::new();
    let mut pass_over = |device: &FoundDevice, why: String| refused.push((device.path.clone(), why));
    let older_copy = |device: &FoundDevice| {
        format!("an older copy of device {} of pool '{}': passed over", device.identity.index, device.identity.name)
    };
    let end_only = |device: &FoundDevice| {
        format!("labels of pool '{}' at its end alone, of a file on it: passed over", device.identity.name)
    };
    // In pools with groups, a device may have replaced another one and taken its index.
    let place = |device: &FoundDevice| {
        let own = device.identity.members.get(usize::from(device.identity.index)).map(|member| member.guid);
        let is_own = |member: &label::Member| member.state.status.belongs() && Some(member.guid) == own;
        match newest.identity.groups.is_empty() {
            true => Some(device.identity.index),
            false => newest.identity.members.iter().position(is_own).and_then(|at| u16::try_from(at).ok()),
        }
    };
    // Devices with labels at their beginning come first: labels at the end alone may be those of a
    // file on the device. One disk may be found by several paths.
    let mut devices: Vec<&FoundDevice> = devices.iter().collect();
    devices.sort_by_key(|device| !device.begins);
    for device in devices {
        let Some(place) = place(device) else {
            let why = format!("was a device of pool '{}', and is not any more", device.identity.name);
            pass_over(device, why);
            continue;
        };
        // A crash may have interrupted one update of all labels, and the write of one root record.
        let rooted = device.identity.index < ROOT_DEVICES && device.generation > 0;
        let older = device.identity.revision + 1 < newest.identity.revision
            || rooted && device.generation + device.lost + 1 < roots;
        // In pools with groups, the device is resilvered.
        if older && newest.identity.groups.is_empty() {
            pass_over(device, older_copy(device));
            continue;
        }
        match chosen.get(&place).copied() {
            Some(there) if there.itself == device.itself => {}
            Some(there) if there.age() == device.age() && there.begins == device.begins => {
                pool.twins = Some((there.path.clone(), device.path.clone()));
            }
            Some(there) if there.age() == device.age() && there.begins => pass_over(device, end_only(device)),
            Some(there) if there.age() > device.age() => pass_over(device, older_copy(device)),
            there => {
                there.into_iter().for_each(|there| pass_over(there, older_copy(there)));
                chosen.insert(place, device);
            }
        }
    }
    pool.devices = chosen.into_iter().map(|(index, device)| (index, device.path.clone())).collect();
    Some(pool)
}

/// Whether somebody has taken a device offline.
fn is_offline(member: &label::Member) -> bool {
    member.state.status == MemberStatus::Offline
}

fn files(place: &Path) -> Vec<PathBuf> {
    if !place.is_dir() {
        return vec![place.to_owned()];
    }
    let entries = fs::read_dir(place).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut paths: Vec<PathBuf> = entries.filter(|path| !path.is_dir()).collect();
    paths.sort();
    paths
}

/// Returns all block devices that the kernel knows.
fn block_devices() -> Vec<PathBuf> {
    // Its lines: major, minor, blocks, name; the first two are headings.
    let text = fs::read_to_string("/proc/partitions").unwrap_or_default();
    text.lines()
        .skip(2)
        .filter_map(|line| line.split_whitespace().nth(3))
        .map(|name| Path::new("/dev").join(name))
        .collect()
}

/// Reads the labels of a device. A device that cannot be opened (in use, or not a device of a pool)
/// is not importable.
fn probe(path: &Path) -> Result<Option<FoundDevice>, Unread> {
    // Opening a pipe or an arbitrary device in a directory could block: only files and block
    // devices are opened.
    let device = match FileDevice::open(path, false) {
        Ok(device) => device,
        Err(error) if error.kind() == io::ErrorKind::ResourceBusy => return Err(Unread::Busy),
        Err(_) => return Ok(None),
    };
    let identity = match label::probe(&device) {
        Ok(Some(identity)) => identity,
        Err(PoolError::Refused(why)) => return Err(Unread::Refused(why)),
        Ok(None) | Err(_) => return Ok(None),
    };
    let begins = label::begins(&device, identity.pool);
    let Ok(there) = fs::metadata(path) else { return Ok(None) };
    let itself =
        if there.file_type().is_block_device() { (u64::MAX, there.rdev()) } else { (there.dev(), there.ino()) };
    // Unreadable root records count as none; damaged newest ones do not make the device older than
    // the others.
    let device: [Arc<dyn Device>; 1] = [Arc::new(device)];
    let roots = device.iter().filter_map(|device| label::roots(&**device, identity.pool).ok()).flatten();
    let (generation, lost) = roots.last().map_or((0, 0), |newest| (newest.generation, label::lost(&device, &newest)));
    Ok(Some(FoundDevice { path: path.to_owned(), identity, generation, lost, itself, begins }))
}

impl Candidate {
    /// Returns whether it has this name or GUID.
    pub fn is_meant(&self, wanted: &str) -> bool {
        self.identity.name == wanted || self.identity.pool.to_string() == wanted
    }

    /// Returns the last known paths of its missing devices.
    pub fn missing(&self) -> Vec<PathBuf> {
        let missing = self.members().filter(|(index, _)| !self.is_there(*index));
        missing.map(|(_, member)| PathBuf::from(std::ffi::OsStr::from_bytes(&member.path))).collect()
    }

    /// Returns the devices that belong to it, each with its index.
    fn members(&self) -> impl Iterator<Item = (usize, &label::Member)> {
        self.identity.members.iter().enumerate().filter(|(_, member)| member.is_own())
    }

    /// Returns whether a device, or one that is replacing it, is there.
    fn is_there(&self, index: usize) -> bool {
        self.holders(index).next().is_some()
    }

    /// Returns the available devices that hold the data of this one: the device itself, and those
    /// that are replacing it.
    fn holders(&self, index: usize) -> impl Iterator<Item = &label::Member> {
        let holds = move |at: usize, member: &label::Member| {
            let state = member.state;
            at == index || state.status.belongs() && state.role.beside().map(usize::from) == Some(index)
        };
        let all = self.identity.members.iter().enumerate();
        all.filter(move |(at, member)| holds(*at, member) && self.has(*at)).map(|(_, member)| member)
    }

    /// Returns how many devices of a group are missing or out of date, without a replacing device
    /// that is complete.
    fn lacking_in(&self, group: u8) -> usize {
        let is_whole = |at: usize| {
            self.holders(at).any(|holder| !holder.state.stale && holder.state.status != MemberStatus::Offline)
        };
        self.members().filter(|(at, member)| member.state.group == group && !is_whole(*at)).count()
    }

    fn is_log(&self, group: u8) -> bool {
        self.identity.groups.get(usize::from(group)).is_some_and(|group| group.class == GroupClass::Log)
    }

    /// Returns a line for each log group of which no device is there, though the last synced writes
    /// may be there alone, and for each of its devices.
    pub fn missing_logs(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for (number, group) in (0..).zip(&self.identity.groups).filter(|(number, _)| self.is_log(*number)) {
            let own = || self.members().filter(|(_, member)| member.state.group == number);
            if !own().any(|(_, member)| !member.state.stale) || own().any(|(index, _)| self.is_there(index)) {
                continue;
            }
            let path = |(_, member): (usize, &label::Member)| printable(&member.path);
            match group.kind {
                GroupKind::Plain => lines.extend(own().map(|one| path(one) + " [log]")),
                _ => {
                    lines.push(format!("mirror-{number} [log]"));
                    lines.extend(own().map(|one| format!("  {}", path(one))));
                }
            }
        }
        lines
    }

    fn has(&self, index: usize) -> bool {
        u16::try_from(index).is_ok_and(|index| self.devices.contains_key(&index))
    }

    /// Returns whether all devices are there and up to date.
    pub fn is_whole(&self) -> bool {
        self.members().all(|(index, _)| self.has(index))
            && (0..self.identity.groups.len() as u8).all(|group| self.lacking_in(group) == 0)
    }

    /// Returns why it cannot be imported with the available devices, in the words of a failing
    /// import.
    pub fn refused(&self) -> Option<String> {
        if self.is_in_bucket() {
            return None;
        }
        let open = |path: &PathBuf| {
            let device = FileDevice::open(path, false).map_err(|error| format!("{}: {error}", path.display()))?;
            Ok(Arc::new(device) as Arc<dyn Device>)
        };
        let found = self.devices.values().map(open).collect::<Result<Vec<_>, String>>();
        found.and_then(|devices| Disks::find(devices, false).map_err(|error| error.to_string())).err()
    }

    /// Whether nothing is missing but what devices that were taken offline lack.
    fn is_offline_only(&self) -> bool {
        let mut members = self.members();
        members.all(|(index, member)| is_offline(member) || self.has(index) && !member.state.stale)
    }

    /// Whether enough devices of each group are there.
    pub fn is_importable(&self) -> bool {
        self.refused().is_none()
    }

    fn is_in_bucket(&self) -> bool {
        self.devices.values().any(|place| nacre_remote::is_address(place))
    }

    /// Returns the other machine that may be using the pool.
    pub fn user(&self) -> Option<String> {
        let ((number, name), of) = (host::this(), &self.identity);
        // A machine that took the bucket over may have been stopped when it had recorded only its
        // name.
        let other = self.writer.as_ref().is_some_and(|writer| match writer.machine {
            Some(machine) => machine != number,
            None => writer.host != name,
        });
        let foreign = of.state == PoolState::Active && (of.host.0 != number || other);
        let last = (of.host.1.as_str(), of.time);
        let (host, time) = self.writer.as_ref().map_or(last, |writer| (writer.host.as_str(), writer.time));
        foreign.then(|| format!("Last accessed by {} at {}", printable(host.as_bytes()), dates::long(time)))
    }

    /// Returns its part of the list of importable pools.
    pub fn text(&self) -> String {
        let identity = &self.identity;
        let destroyed = identity.state == PoolState::Destroyed;
        let state = match (self.is_whole(), self.is_importable()) {
            (true, _) => "ONLINE",
            (false, true) => "DEGRADED",
            (false, false) => "UNAVAIL",
        };
        let missing = match self.is_offline_only() {
            true => "status: One or more devices have been taken offline.\n",
            false => "status: One or more devices are missing from the system.\n",
        };
        let note = if destroyed { " (DESTROYED)" } else { "" };
        let pool = printable(identity.name.as_bytes());
        let mut text = format!("  pool: {pool}\n    id: {}\n state: {state}{note}\n", identity.pool);
        let action = match (self.is_whole(), self.user(), destroyed) {
            (false, ..) if self.is_importable() && !self.missing_logs().is_empty() => {
                text.push_str("status: One or more devices are missing from the system.\n");
                "The pool can be imported using its name or numeric identifier and\n\tthe '-m' flag. What was synced last, and only the missing log devices\n\thave, is given up then."
                    .to_owned()
            }
            (false, ..) if self.is_importable() => {
                text.push_str(missing);
                "The pool can be imported despite missing or damaged devices.  The\n\tfault tolerance of the pool may be compromised if imported."
                    .to_owned()
            }
            (false, ..) => {
                text.push_str("status: One or more devices are missing from the system.\n");
                "The pool cannot be imported. Attach the missing\n\tdevices and try again; -d says where to look."
                    .to_owned()
            }
            (true, Some(user), _) => {
                text.push_str(&format!("status: The pool was last accessed by another system.\n\t{user}\n"));
                "The pool can be imported using its name or numeric identifier and\n\tthe '-f' flag.".to_owned()
            }
            (true, None, true) => {
                "The pool can be imported using its name or numeric identifier and\n\tthe '-D' flag.".to_owned()
            }
            (true, None, false) => "The pool can be imported using its name or numeric identifier.".to_owned(),
        };
        text.push_str(&format!("action: {action}\nconfig:\n\n"));
        let path = |index: usize, member: &label::Member| {
            let found = u16::try_from(index).ok().and_then(|index| self.devices.get(&index));
            match found.filter(|_| self.is_in_bucket()) {
                Some(address) => printable(shown(address).as_bytes()),
                None => printable(found.map_or(member.path.as_slice(), |path| path.as_os_str().as_bytes())),
            }
        };
        let mut rows: Vec<(String, &str)> = vec![(pool, state)];
        let leaves = |indent: &str, group: u8| {
            let own = self.members().filter(|(_, member)| member.state.group == group);
            let leaf = |(index, member): (usize, &label::Member)| {
                let state = match self.has(index) {
                    _ if is_offline(member) => "OFFLINE",
                    true => "ONLINE",
                    false => "UNAVAIL  cannot open",
                };
                (format!("{indent}{}", path(index, member)), state)
            };
            own.map(leaf).collect::<Vec<_>>()
        };
        for (class, heading) in [(GroupClass::Data, ""), (GroupClass::Special, "special"), (GroupClass::Log, "logs")] {
            let is_there = |number: u8| self.members().any(|(_, member)| member.state.group == number);
            let mut there = (0..)
                .zip(&identity.groups)
                .filter(|(number, group)| group.class == class && is_there(*number))
                .peekable();
            if there.peek().is_some() && !heading.is_empty() {
                rows.push((heading.to_owned(), ""));
            }
            for (number, group) in there {
                let kind = match group.kind {
                    GroupKind::Plain => {
                        rows.extend(leaves("  ", number));
                        continue;
                    }
                    GroupKind::Mirror => "mirror".to_owned(),
                    GroupKind::RaidZ(parity) => format!("raidz{parity}"),
                };
                let state = match self.lacking_in(number) {
                    0 => "ONLINE",
                    missing if missing <= identity.parity(number) => "DEGRADED",
                    _ => "UNAVAIL  insufficient replicas",
                };
                rows.push((format!("  {kind}-{number}"), state));
                rows.extend(leaves("    ", number));
            }
        }
        if identity.groups.is_empty() {
            rows.extend(leaves("  ", 0));
        }
        let spares = identity.members.iter().enumerate().filter(|(_, member)| {
            member.state.status.belongs() && matches!(member.state.role, MemberRole::Spare | MemberRole::SpareFor(_))
        });
        let spares: Vec<_> = spares.map(|(index, member)| (format!("  {}", path(index, member)), "")).collect();
        if !spares.is_empty() {
            rows.push(("spares".to_owned(), ""));
        }
        rows.extend(spares);
        let width = rows.iter().map(|(name, _)| name.chars().count()).chain([10]).max().unwrap_or(10);
        rows.iter().for_each(|(name, state)| {
            text.push_str(&(format!("\t{name:<width$}  {state}").trim_end().to_owned() + "\n"))
        });
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacre_pool::{
        backend::NewGroup,
        label::{Member, MemberState},
        store::{NewPool, Store},
    };

    fn device(path: &str, index: u16, revision: u64, generation: u64, itself: u64) -> FoundDevice {
        let member = |guid| Member { guid, length: 64 << 20, path: Vec::new(), state: MemberState::default() };
        let identity = Identity {
            revision,
            incompatible: 0,
            read_only_compatible: 0,
            compatible: 0,
            pool: 7,
            name: "tank".to_owned(),
            state: PoolState::Exported,
            host: (1, "here".to_owned()),
            time: 1,
            slot: 4 << 20,
            index,
            members: vec![member(1), member(2)],
            groups: Vec::new(),
            change: None,
        };
        FoundDevice { path: path.into(), identity, generation, lost: 0, itself: (0, itself), begins: true }
    }

    fn chosen(devices: &[FoundDevice]) -> (Vec<String>, Vec<String>, bool) {
        let mut refused = Vec::new();
        let pool = choose(devices, &mut refused).unwrap();
        let paths = pool.devices.values().map(|path| path.display().to_string()).collect();
        (paths, refused.into_iter().map(|(path, _)| path.display().to_string()).collect(), pool.twins.is_some())
    }

    fn words(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn the_newest_copy_of_a_device_is_taken() {
        let all = [
            device("bak", 0, 3, 10, 1),
            device("img", 0, 3, 50, 2),
            device("link", 0, 3, 50, 2),
            device("two", 1, 3, 50, 3),
        ];
        assert_eq!(chosen(&all), (words(&["img", "two"]), words(&["bak"]), false));
        let [bak, _, _, two] = all;
        // Without the newer copy, the old one still does not belong to the other device's pool
        // state.
        assert_eq!(chosen(&[bak, two]), (words(&["two"]), words(&["bak"]), false));
        // A crash between two devices' labels.
        assert_eq!(
            chosen(&[device("a", 0, 4, 9, 1), device("b", 1, 3, 8, 2)]),
            (words(&["a", "b"]), Vec::new(), false)
        );
        assert_eq!(chosen(&[device("a", 0, 5, 9, 1), device("b", 1, 3, 9, 2)]).0, words(&["a"]));
        // Damage makes a device no older copy.
        let damaged =
            |generation, lost| [device("a", 0, 4, 9, 1), FoundDevice { lost, ..device("b", 1, 4, generation, 2) }];
        assert_eq!(chosen(&damaged(5, 4)).0, words(&["a", "b"]));
        assert_eq!((chosen(&damaged(5, 2)).0, chosen(&damaged(9, 4)).0), (words(&["a"]), words(&["a", "b"])));
        // A device that was added a moment ago has no root records.
        assert_eq!(chosen(&[device("a", 0, 4, 9, 1), device("b", 1, 4, 0, 2)]).0, words(&["a", "b"]));
    }

    #[test]
    fn a_bucket_without_a_thread_is_refused() {
        let mut search = Search::default();
        let address = PathBuf::from("file:///nowhere");
        let none = |_| Err(io::ErrorKind::WouldBlock.into());
        look_in_buckets(vec![(address.clone(), None)], None, &mut search, none);
        assert!(search.pools.is_empty());
        let [(refused, why)] = search.refused.as_slice() else { panic!("{:?}", search.refused) };
        assert!(*refused == address && why.contains("cannot start"), "{why}");
    }

    #[test]
    fn twins_are_told() {
        assert!(chosen(&[device("a", 0, 4, 9, 1), device("b", 0, 4, 9, 2)]).2);
        assert!(!chosen(&[device("a", 0, 4, 9, 1), device("b", 0, 4, 8, 2)]).2);
    }

    #[test]
    fn a_file_at_the_end_of_a_device_is_no_twin_of_that() {
        let file = || device("image", 0, 4, 9, 1);
        let disk = || FoundDevice { begins: false, ..device("disk", 0, 4, 9, 2) };
        assert_eq!(chosen(&[disk(), file()]), (words(&["image"]), words(&["disk"]), false));
        assert_eq!(chosen(&[file(), disk()]), (words(&["image"]), words(&["disk"]), false));
        let other_path = || FoundDevice { begins: false, ..device("dm-0", 0, 4, 9, 3) };
        let both = chosen(&[disk(), other_path(), file()]);
        assert_eq!((both.0, both.2), (words(&["image"]), false));
        assert_eq!(chosen(&[disk()]), (words(&["disk"]), Vec::new(), false));
    }

    #[test]
    fn devices_outside_of_the_places_that_are_named_are_not_taken() {
        let scratch = tempfile::tempdir().unwrap();
        let places = ["here", "elsewhere"].map(|name| scratch.path().join(name));
        let paths = places.each_ref().map(|place| {
            fs::create_dir(place).unwrap();
            let path = place.join("disk");
            fs::File::create(&path).unwrap().set_len(64 << 20).unwrap();
            path
        });
        let open = |path: &PathBuf| Arc::new(FileDevice::open(path, true).unwrap()) as Arc<dyn Device>;
        let new = NewPool {
            name: "tank".to_owned(),
            guid: 7,
            host: (1, "here".to_owned()),
            time: 1,
            redundant_metadata: false,
        };
        let group = NewGroup { kind: GroupKind::Mirror, devices: 2 };
        drop(Store::create_groups(paths.iter().map(open).collect(), &[group], &new).unwrap());
        let found = |places: &[PathBuf]| -> Vec<PathBuf> {
            let pools = search(places, None, None).pools;
            pools.into_iter().flat_map(|pool| pool.devices.into_values()).collect()
        };
        assert_eq!(found(&places), paths);
        assert_eq!(found(&places[..1]), paths[..1]);
        assert_eq!(found(&paths[1..]), paths[1..]);
        // A larger disk, at whose end a file system has put the first device.
        let disk = scratch.path().join("disk");
        let content = fs::read(&paths[0]).unwrap();
        let file = fs::File::create(&disk).unwrap();
        file.set_len(2 * content.len() as u64).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &content, content.len() as u64).unwrap();
        let pools = search(&[disk, paths[0].clone(), paths[1].clone()], None, None).pools;
        assert!(pools.iter().all(|pool| pool.twins.is_none()));
        assert_eq!(pools.into_iter().flat_map(|pool| pool.devices.into_values()).collect::<Vec<_>>(), paths);
    }
}
