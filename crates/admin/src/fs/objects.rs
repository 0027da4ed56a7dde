//! File systems, snapshots and bookmarks of a pool by name, with their stored properties and mount
//! points, in one consistent state.
//!
//! Invariant: it holds the administration lock (see [`CatalogView`]), so it is dropped before the
//! engine or the mounts are called; a verb that walks many objects pauses ([`Objects::pause`]).

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use nacre_pool::catalog::{DatasetRow, PropertyRow, PropertySource};
use nacre_pool::engine::{CatalogView, SnapshotLine};
use nacre_pool::names::Name;
use nacre_pool::properties::effective::{Level, effective};
use nacre_pool::properties::{Effective, Source, dataset_property};
use nacre_pool::{Damage, PoolError, Txg};

use crate::clock::moment;
use crate::{Imported, Kind, MountOptions, Mounted, Mounts, Refusal, Sharing};

/// A named object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Object {
    /// A file system.
    Filesystem(u64),
    /// A snapshot.
    Snapshot {
        /// Its file system.
        of: u64,
        /// The txg in which it was taken.
        txg: Txg,
    },
    /// A bookmark.
    Bookmark {
        /// Its file system.
        of: u64,
        /// The part after the `#`.
        name: String,
    },
}

/// A file system with its row and properties in the catalog (like ZFS' MOS).
#[derive(Clone, Debug)]
pub(super) struct Known {
    /// Its whole name.
    pub name: String,
    /// Its row.
    pub row: DatasetRow,
    /// Its stored properties.
    pub stored: Vec<(String, PropertyRow)>,
}

impl Known {
    /// Enters a canonical value of a property, or removes the local value; `masked`: the received value as well.
    pub fn foresee(&mut self, name: &str, value: Option<&str>, masked: bool) {
        self.stored.retain(|(there, row)| there != name || row.source == PropertySource::Received && !masked);
        if let Some(value) = value {
            let row = PropertyRow { source: PropertySource::Local, value: value.to_owned() };
            self.stored.insert(0, (name.to_owned(), row));
        }
    }
}

/// Mount point of a file system by its properties.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum MountPointSetting {
    /// Not mounted.
    None,
    /// Mounted by mount(8).
    Legacy,
    /// Mounted at this path.
    At(PathBuf),
}

/// Minimum time between two pauses, during which other threads wait for the lock.
const AT_ONCE: Duration = Duration::from_millis(10);

/// The pool's objects, under the administration lock.
pub(super) struct Objects<'a> {
    pub catalog: CatalogView<'a>,
    pool: &'a Imported,
    mounted: HashMap<u64, Mounted>,
    /// File systems with hidden mounts; empty where nothing asks for them.
    hidden: Vec<u64>,
    known: HashMap<u64, Rc<Known>>,
    lines: HashMap<u64, Rc<SnapshotLine>>,
    /// Time of the last pause.
    paused: Instant,
    /// Time spent since then on reading the rows that are cached here.
    reading: Duration,
}

/// Error for a name that does not exist, in ZFS' words.
pub(crate) fn missing(doing: &str, name: &str) -> Refusal {
    Refusal::new(Kind::NotFound, format!("cannot {doing} '{name}': dataset does not exist"))
        .next("'nacre fs list -t all' lists what there is")
}

impl<'a> Objects<'a> {
    /// Locks the current state.
    pub fn now(pool: &'a Imported, mounts: &dyn Mounts) -> Self {
        let mounted = mounts.mounted().into_iter().filter(|mounted| mounted.what.snapshot.is_none());
        let mounted = mounted.map(|mounted| (mounted.what.dataset, mounted)).collect();
        Self {
            catalog: pool.pool.catalog_view(),
            pool,
            mounted,
            hidden: Vec::new(),
            known: HashMap::new(),
            lines: HashMap::new(),
            paused: moment(),
            reading: Duration::ZERO,
        }
    }

    /// Locks the current state for a listing: hidden mounts count as not mounted.
    pub fn shown(pool: &'a Imported, mounts: &dyn Mounts) -> Self {
        let hidden = mounts.hidden();
        Self { hidden, ..Self::now(pool, mounts) }
    }

    /// Returns a file system with its row and properties.
    pub fn known(&mut self, id: u64) -> Result<Rc<Known>, PoolError> {
        let mut unknown = Vec::new();
        let mut above: Option<Rc<Known>> = None;
        let mut at = id;
        // The catalog's file systems are a tree, so this ends.
        while at != 0 {
            if let Some(known) = self.known.get(&at) {
                above = Some(Rc::clone(known));
                break;
            }
            let row = self.catalog.dataset(at)?;
            let parent = row.parent;
            unknown.push((at, row));
            at = parent;
        }
        let began = moment();
        for (id, row) in unknown.into_iter().rev() {
            let name = match &above {
                None => row.name.clone(),
                Some(above) => format!("{}/{}", above.name, row.name),
            };
            let known = Rc::new(Known { name, row, stored: self.catalog.properties(id)? });
            self.known.insert(id, Rc::clone(&known));
            above = Some(known);
        }
        self.reading += began.elapsed();
        above.ok_or(PoolError::Format(Damage::Structure("a file system that is none")))
    }

    /// Replaces a file system's state, to examine the effects of a change.
    pub fn pretend(&mut self, id: u64, known: Known) {
        self.known.insert(id, Rc::new(known));
    }

    /// Returns the whole name of an object.
    pub fn name(&mut self, object: &Object) -> Result<String, PoolError> {
        Ok(match object {
            Object::Filesystem(id) => self.known(*id)?.name.clone(),
            Object::Snapshot { of, txg } => {
                format!("{}@{}", self.known(*of)?.name, self.catalog.snapshot(*of, *txg)?.name)
            }
            Object::Bookmark { of, name } => format!("{}#{name}", self.known(*of)?.name),
        })
    }

    /// Returns the snapshots of a file system.
    pub fn line(&mut self, id: u64) -> Result<Rc<SnapshotLine>, PoolError> {
        if let Some(found) = self.lines.get(&id) {
            return Ok(Rc::clone(found));
        }
        let began = moment();
        let found = Rc::new(self.catalog.line(id)?);
        self.reading += began.elapsed();
        self.lines.insert(id, Rc::clone(&found));
        Ok(found)
    }

    /// Releases the lock for a moment from time to time: a verb that lists many objects calls it
    /// between two of them. Returns whether anything has changed meanwhile; objects found before
    /// may be gone then ([`Self::is_there`]).
    pub fn pause(&mut self) -> bool {
        // Reading again after a change must not be most of the work.
        if self.paused.elapsed() < AT_ONCE.max(self.reading * 4) {
            return false;
        }
        let changed = self.catalog.pause();
        if changed {
            self.known.clear();
            self.lines.clear();
        }
        (self.paused, self.reading) = (moment(), Duration::ZERO);
        changed
    }

    /// Whether an object still exists.
    pub fn is_there(&self, object: &Object) -> Result<bool, PoolError> {
        match object {
            Object::Filesystem(id) => self.catalog.is_there(*id, None),
            Object::Snapshot { of, txg } => {
                Ok(self.catalog.is_there(*of, None)? && self.catalog.is_there(*of, Some(*txg))?)
            }
            Object::Bookmark { of, name } => Ok(self.catalog.is_there(*of, None)?
                && self.catalog.bookmarks(*of)?.iter().any(|(there, _)| there == name)),
        }
    }

    /// Finds a file system by its whole name.
    pub fn filesystem(&self, doing: &str, name: &str) -> Result<u64, Refusal> {
        Name::filesystem(name)
            .map_err(|error| Refusal::new(Kind::Invalid, format!("cannot {doing} '{name}': {error}")))?;
        self.catalog.find(name)?.ok_or_else(|| missing(doing, name))
    }

    /// Finds a snapshot by its whole name.
    pub fn snapshot(&self, doing: &str, name: &str) -> Result<(u64, Txg), Refusal> {
        let (filesystem, snapshot) = Name::snapshot(name)
            .map_err(|error| Refusal::new(Kind::Invalid, format!("cannot {doing} '{name}': {error}")))?;
        let of = self.catalog.find(filesystem)?.ok_or_else(|| missing(doing, name))?;
        let txg = self.catalog.snapshot_named(of, snapshot)?.ok_or_else(|| missing(doing, name))?;
        Ok((of, txg))
    }

    /// Finds an object by its whole name.
    pub fn open(&self, doing: &str, name: &str) -> Result<Object, Refusal> {
        match Name::parse(name)
            .map_err(|error| Refusal::new(Kind::Invalid, format!("cannot {doing} '{name}': {error}")))?
        {
            Name::Filesystem(_) => Ok(Object::Filesystem(self.filesystem(doing, name)?)),
            Name::Snapshot { .. } => self.snapshot(doing, name).map(|(of, txg)| Object::Snapshot { of, txg }),
            Name::Bookmark { filesystem, bookmark } => {
                let of = self.catalog.find(filesystem)?.ok_or_else(|| missing(doing, name))?;
                let there = self.catalog.bookmarks(of)?.iter().any(|(there, _)| there == bookmark);
                if there { Ok(Object::Bookmark { of, name: bookmark.to_owned() }) } else { Err(missing(doing, name)) }
            }
        }
    }

    /// Returns a file system and all below it, parents first.
    pub fn descendants(&self, id: u64) -> Result<Vec<u64>, PoolError> {
        let mut found = vec![id];
        let mut at = 0;
        while let Some(next) = found.get(at).copied() {
            found.extend(self.catalog.children(next)?);
            at += 1;
        }
        Ok(found)
    }

    /// Calls `with` with the chain of a file system and its ancestors.
    pub fn with_chain<R>(&mut self, id: u64, with: impl FnOnce(&[Level<'_>]) -> R) -> Result<R, PoolError> {
        let mut line = Vec::new();
        let mut at = id;
        while at != 0 {
            let known = self.known(at)?;
            at = known.row.parent;
            line.push(known);
        }
        let levels: Vec<Level<'_>> =
            line.iter().map(|known| Level { name: &known.name, rows: &known.stored }).collect();
        Ok(with(&levels))
    }

    /// Returns the effective value of a property that the table knows and the catalog stores.
    pub fn effective(&mut self, id: u64, name: &str) -> Result<Effective, Refusal> {
        let property = dataset_property(name).map_err(|error| Refusal::new(Kind::Invalid, error.to_string()))?;
        let found = self.with_chain(id, |chain| effective(&property, chain))?;
        Ok(found.unwrap_or(Effective { value: String::new(), source: Source::None }))
    }

    fn is(&mut self, id: u64, property: &str, value: &str) -> Result<bool, Refusal> {
        Ok(self.effective(id, property)?.value == value)
    }

    /// Returns the mount point of a file system as it is shown: with the `altroot` and the home of this import.
    pub fn mountpoint(&mut self, id: u64) -> Result<Effective, Refusal> {
        let Effective { mut value, source } = self.effective(id, "mountpoint")?;
        if source == Source::Default {
            value = self.pool.opening.home.join(&self.known(id)?.name).to_string_lossy().into_owned();
        }
        if value != "none" && value != "legacy" {
            if let Some(altroot) = &self.pool.opening.altroot {
                value = altroot.join(value.trim_start_matches('/')).to_string_lossy().trim_end_matches('/').to_owned();
            }
            if value.is_empty() {
                "/".clone_into(&mut value);
            }
        }
        Ok(Effective { value, source })
    }

    /// Returns the mount point of a file system.
    pub fn place(&mut self, id: u64) -> Result<MountPointSetting, Refusal> {
        Ok(match self.mountpoint(id)?.value.as_str() {
            "none" => MountPointSetting::None,
            "legacy" => MountPointSetting::Legacy,
            path => MountPointSetting::At(PathBuf::from(path)),
        })
    }

    /// Returns where a file system is mounted automatically, if it is.
    pub fn wanted(&mut self, id: u64) -> Result<Option<PathBuf>, Refusal> {
        if !self.is(id, "canmount", "on")? || self.catalog.is_half(id)? {
            return Ok(None);
        }
        Ok(match self.place(id)? {
            MountPointSetting::At(path) => Some(path),
            MountPointSetting::None | MountPointSetting::Legacy => None,
        })
    }

    /// Returns the mount options of a file system by its properties.
    pub fn options(&mut self, id: u64) -> Result<MountOptions, Refusal> {
        Ok(MountOptions {
            source: self.known(id)?.name.clone(),
            read_only: self.pool.read_only || self.is(id, "readonly", "on")?,
            no_exec: self.is(id, "exec", "off")?,
            no_suid: self.is(id, "setuid", "off")?,
            no_dev: self.is(id, "devices", "off")?,
            no_atime: self.is(id, "atime", "off")?,
            synchronous: self.is(id, "sync", "always")?,
            overlay: self.is(id, "overlay", "on")?,
            sharing: Sharing {
                guid: self.known(id)?.row.guid,
                nfs: self.effective(id, "sharenfs")?.value,
                smb: self.effective(id, "sharesmb")?.value,
            },
            place_was_named: false,
        })
    }

    /// Returns the mount of a file system.
    pub fn mounted(&self, id: u64) -> Option<&Mounted> {
        self.mounted.get(&id)
    }

    /// Whether a file system is mounted and not hidden.
    pub fn is_seen(&self, id: u64) -> bool {
        self.mounted.contains_key(&id) && !self.hidden.contains(&id)
    }

    /// Returns the file system that is mounted there.
    pub fn mounted_at(&self, at: &Path) -> Option<u64> {
        self.mounted.values().find(|mounted| mounted.at == at).map(|mounted| mounted.what.dataset)
    }

    /// Whether a property of the pool is on.
    pub fn pool_has(&self, name: &str) -> Result<bool, PoolError> {
        Ok(self.catalog.properties(0)?.iter().any(|(there, row)| there == name && row.value == "on"))
    }
}
