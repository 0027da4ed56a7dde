//! Pools that could be imported: labels on devices.

use super::{dates, known};
use crate::report::printable;
use nacre_admin::host;
use nacre_pool::{
    PoolError,
    device::FileDevice,
    label::{self, Identity, PoolState},
};
use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

/// A pool as its labels tell.
#[derive(Debug)]
pub struct Candidate {
    /// The newest identity among its devices.
    pub identity: Identity,
    /// Its devices as found, by their place in the pool.
    pub devices: BTreeMap<u16, PathBuf>,
}

/// Why nothing was read from a device.
enum Unread {
    /// Somebody uses it.
    Busy,
    /// This program cannot read it, for this reason.
    Refused(String),
}

/// What was found.
#[derive(Debug, Default)]
pub struct Search {
    /// Pools.
    pub pools: Vec<Candidate>,
    /// Somebody uses one of the devices.
    pub busy: bool,
    /// Devices with a label that this program cannot read: which, and why.
    pub refused: Vec<(PathBuf, String)>,
}

/// Looks at everything in these directories (and at these files); where none is named, at block devices, and at what was imported before.
pub fn search(places: &[PathBuf]) -> Search {
    let paths: Vec<PathBuf> = match places {
        [] => block_devices().into_iter().chain(known::devices()).collect(),
        places => places.iter().flat_map(|place| files(place)).collect(),
    };
    let mut found: BTreeMap<u64, Candidate> = BTreeMap::new();
    let mut search = Search::default();
    for path in paths {
        match probe(&path) {
            Ok(Some(identity)) => enter(&mut found, identity, path),
            Ok(None) => {}
            Err(Unread::Busy) => search.busy = true,
            Err(Unread::Refused(why)) => search.refused.push((path, why)),
        }
    }
    // A device that is not where we look may be where it was last.
    let missing: Vec<PathBuf> = found.values().flat_map(Candidate::missing).collect();
    for path in missing {
        if let Ok(Some(identity)) = probe(&path)
            && found.contains_key(&identity.pool)
        {
            enter(&mut found, identity, path);
        }
    }
    search.pools = found.into_values().collect();
    search
}

fn enter(found: &mut BTreeMap<u64, Candidate>, identity: Identity, path: PathBuf) {
    let candidate = found.entry(identity.pool).or_insert_with(|| Candidate { identity: identity.clone(), devices: BTreeMap::new() });
    candidate.devices.entry(identity.index).or_insert(path);
    if candidate.identity.revision < identity.revision {
        candidate.identity = identity;
    }
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

/// All block devices that the kernel knows.
fn block_devices() -> Vec<PathBuf> {
    // Its lines: major, minor, blocks, name; the first two are headings.
    let text = fs::read_to_string("/proc/partitions").unwrap_or_default();
    text.lines().skip(2).filter_map(|line| line.split_whitespace().nth(3)).map(|name| Path::new("/dev").join(name)).collect()
}

/// Whose device it is. What cannot be opened (somebody uses it, or it is none of ours) is not importable.
fn probe(path: &Path) -> Result<Option<Identity>, Unread> {
    // A directory full of pipes and devices must not hang us: only what a pool can lie on is opened.
    let device = match FileDevice::open(path, false) {
        Ok(device) => device,
        Err(error) if error.kind() == io::ErrorKind::ResourceBusy => return Err(Unread::Busy),
        Err(_) => return Ok(None),
    };
    match label::probe(&device) {
        Ok(identity) => Ok(identity),
        Err(PoolError::Refused(why)) => Err(Unread::Refused(why)),
        Err(_) => Ok(None),
    }
}

impl Candidate {
    /// Where its missing devices were last.
    fn missing(&self) -> Vec<PathBuf> {
        let missing = self.identity.members.iter().enumerate().filter(|(index, _)| !self.has(*index));
        missing.map(|(_, member)| PathBuf::from(std::ffi::OsStr::from_bytes(&member.path))).collect()
    }

    fn has(&self, index: usize) -> bool {
        u16::try_from(index).is_ok_and(|index| self.devices.contains_key(&index))
    }

    /// Whether all devices are there.
    pub fn is_whole(&self) -> bool {
        self.identity.members.len() == self.devices.len()
    }

    /// The machine that may be using it: another one than this.
    pub fn user(&self) -> Option<String> {
        let foreign = self.identity.state == PoolState::Active && self.identity.host.0 != host::this().0;
        foreign.then(|| format!("Last accessed by {} at {}", printable(self.identity.host.1.as_bytes()), dates::long(self.identity.time)))
    }

    /// Its part of the list of what could be imported.
    pub fn text(&self) -> String {
        let identity = &self.identity;
        let destroyed = identity.state == PoolState::Destroyed;
        let state = if self.is_whole() { "ONLINE" } else { "UNAVAIL" };
        let note = if destroyed { " (DESTROYED)" } else { "" };
        let pool = printable(identity.name.as_bytes());
        let mut text = format!("  pool: {pool}\n    id: {}\n state: {state}{note}\n", identity.pool);
        let action = match (self.is_whole(), self.user(), destroyed) {
            (false, ..) => {
                text.push_str("status: One or more devices are missing from the system.\n");
                "The pool cannot be imported. Attach the missing\n\tdevices and try again; -d says where to look.".to_owned()
            }
            (true, Some(user), _) => {
                text.push_str(&format!("status: The pool was last accessed by another system.\n\t{user}\n"));
                "The pool can be imported using its name or numeric identifier and\n\tthe '-f' flag.".to_owned()
            }
            (true, None, true) => "The pool can be imported using its name or numeric identifier and\n\tthe '-D' flag.".to_owned(),
            (true, None, false) => "The pool can be imported using its name or numeric identifier.".to_owned(),
        };
        text.push_str(&format!("action: {action}\nconfig:\n\n"));
        let path = |index: usize, member: &label::Member| {
            let found = u16::try_from(index).ok().and_then(|index| self.devices.get(&index));
            printable(found.map_or(member.path.as_slice(), |path| path.as_os_str().as_bytes()))
        };
        let names: Vec<String> = identity.members.iter().enumerate().map(|(index, member)| path(index, member)).collect();
        let width = names.iter().map(|name| name.chars().count() + 2).chain([pool.chars().count(), 10]).max().unwrap_or(10);
        text.push_str(&format!("\t{pool:<width$}  {state}\n"));
        for (index, name) in names.iter().enumerate() {
            let name = format!("  {name}");
            text.push_str(&format!("\t{name:<width$}  {}\n", if self.has(index) { "ONLINE" } else { "UNAVAIL  cannot open" }));
        }
        text
    }
}
