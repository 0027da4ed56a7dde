//! Effective values of properties: a dataset's own value, its ancestors', or the default; and the
//! settings derived from them for the engine and the mount.
//!
//! A chain is the dataset and all its ancestors up to the root dataset, each with its stored rows.

use super::{DATASET_PROPERTIES, Definition, Property, find, spelling};
use crate::catalog::{PropertyRow, PropertySource};
use crate::error::{Damage, PoolError};
use crate::frames::CompressionSetting;
use crate::pointer::ChecksumKind;
use crate::space::Limits;

/// A dataset of a chain.
#[derive(Clone, Copy, Debug)]
pub struct Level<'a> {
    /// Its full name.
    pub name: &'a str,
    /// Its stored properties.
    pub rows: &'a [(String, PropertyRow)],
}

impl Level<'_> {
    /// The effective value at this level: the local one, or a received one that is not masked.
    fn row(&self, name: &str) -> Option<&PropertyRow> {
        let of =
            |source| self.rows.iter().find(|(stored, row)| stored == name && row.source == source).map(|(_, row)| row);
        of(PropertySource::Local).or_else(|| match of(PropertySource::Masked) {
            Some(_) => None,
            None => of(PropertySource::Received),
        })
    }

    /// Returns the received value, whether it is effective or not.
    #[must_use]
    pub fn received(&self, name: &str) -> Option<&str> {
        let found = self.rows.iter().find(|(stored, row)| stored == name && row.source == PropertySource::Received);
        found.map(|(_, row)| row.value.as_str())
    }
}

/// Source of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// Set on this dataset.
    Local,
    /// Received with this dataset.
    Received,
    /// Set for this mount or import only.
    Temporary,
    /// Set on this ancestor.
    Inherited(String),
    /// Not set anywhere.
    Default,
    /// It is a statistic.
    None,
}

impl std::fmt::Display for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Local => f.write_str("local"),
            Self::Received => f.write_str("received"),
            Self::Temporary => f.write_str("temporary"),
            Self::Inherited(from) => write!(f, "inherited from {from}"),
            Self::Default => f.write_str("default"),
            Self::None => f.write_str("-"),
        }
    }
}

/// A value with its source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Effective {
    /// The canonical value.
    pub value: String,
    /// Its source.
    pub source: Source,
}

/// Returns the effective value for the first dataset of a chain. `None`: a statistic, or a user
/// property that is not set.
#[must_use]
pub fn effective(property: &Property, chain: &[Level<'_>]) -> Option<Effective> {
    match property {
        Property::Known(definition) if definition.default.is_empty() => None,
        Property::Known(definition) if definition.name == "mountpoint" => Some(mountpoint(chain)),
        // A permanent value was set, inherited or the default at creation: ZFS shows no source for
        // it.
        Property::Known(definition) if spelling::is_one(definition.name) => {
            Some(Effective { source: Source::None, ..known(definition, chain) })
        }
        Property::Known(definition) => Some(known(definition, chain)),
        Property::User(name) => nearest(name, chain, chain.len()),
        Property::Owner(owner) => {
            let name = owner.stored_name(owner.id()?);
            Some(nearest(&name, chain, 1).unwrap_or(Effective { value: "0".to_owned(), source: Source::Local }))
        }
        Property::WrittenSince(_) | Property::Feature(_) => None,
    }
}

/// As [`effective`], with values that are set for a mount or an import only: name and canonical
/// value.
#[must_use]
pub fn effective_with(property: &Property, chain: &[Level<'_>], temporary: &[(&str, &str)]) -> Option<Effective> {
    if let Property::Known(definition) = property
        && let Some((_, value)) = temporary.iter().find(|(name, _)| *name == definition.name)
    {
        return Some(Effective { value: (*value).to_owned(), source: Source::Temporary });
    }
    effective(property, chain)
}

fn known(definition: &Definition, chain: &[Level<'_>]) -> Effective {
    let reach = if definition.inherited { chain.len() } else { 1 };
    let default = || Effective { value: definition.default.to_owned(), source: Source::Default };
    nearest(definition.name, chain, reach).unwrap_or_else(default)
}

fn nearest(name: &str, chain: &[Level<'_>], reach: usize) -> Option<Effective> {
    chain.iter().take(reach).enumerate().find_map(|(distance, level)| {
        let row = level.row(name)?;
        Some(Effective { value: row.value.clone(), source: source_of(row, distance, level) })
    })
}

fn source_of(row: &PropertyRow, distance: usize, level: &Level<'_>) -> Source {
    match (distance, row.source) {
        (0, PropertySource::Local) => Source::Local,
        (0, PropertySource::Received) => Source::Received,
        _ => Source::Inherited(level.name.to_owned()),
    }
}

/// Returns the mount point of the first dataset of a chain: an inherited path is extended by the
/// names in between; without any it is the full name below `/`.
#[must_use]
pub fn mountpoint(chain: &[Level<'_>]) -> Effective {
    let own = chain.first().map_or("", |level| level.name);
    for (distance, level) in chain.iter().enumerate() {
        let Some(row) = level.row("mountpoint") else { continue };
        let below = own.strip_prefix(level.name).unwrap_or_default();
        let value = match row.value.as_str() {
            "none" | "legacy" => row.value.clone(),
            "/" if !below.is_empty() => below.to_owned(),
            path => format!("{path}{below}"),
        };
        return Effective { value, source: source_of(row, distance, level) };
    }
    Effective { value: format!("/{own}"), source: Source::Default }
}

/// When fsync and write are durable (`sync`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyncMode {
    /// When a program asks for it.
    Standard,
    /// Every write before it is answered.
    Always,
    /// With the next commit.
    Disabled,
}

/// Settings of a dataset for the engine and the mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Behaviour {
    /// The record size as a power of two, 9 to 24.
    pub record_shift: u8,
    /// Compression of records.
    pub compression: CompressionSetting,
    /// Checksum of frames.
    pub checksum: ChecksumKind,
    /// When writes are durable.
    pub sync: SyncMode,
    /// Reads update the access time; with `relatime` only sometimes.
    pub atime: bool,
    /// See `atime`.
    pub relatime: bool,
    /// The dataset is read only.
    pub readonly: bool,
    /// Programs can be executed.
    pub exec: bool,
    /// Set-user-id bits are effective.
    pub setuid: bool,
    /// Device files open their devices.
    pub devices: bool,
    /// Extended attributes are supported.
    pub xattrs: bool,
    /// Access control lists are supported.
    pub acl: bool,
    /// Names must be UTF-8.
    pub utf8_only: bool,
    /// How `.zfs` is shown.
    pub snapdir: SnapshotDirectory,
    /// The pool's cache keeps file content.
    pub cache_content: bool,
    /// Reads trigger read-ahead.
    pub prefetch: bool,
}

/// How `.zfs` is shown in the root directory of a file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SnapshotDirectory {
    /// It can be entered and is not listed.
    Hidden,
    /// It is listed.
    Visible,
    /// It does not exist.
    Disabled,
}

impl Default for Behaviour {
    /// The settings of a dataset with default values only.
    fn default() -> Self {
        Self {
            record_shift: 17,
            compression: CompressionSetting::On,
            checksum: ChecksumKind::Xxh3,
            sync: SyncMode::Standard,
            atime: true,
            relatime: true,
            readonly: false,
            exec: true,
            setuid: true,
            devices: true,
            xattrs: true,
            acl: true,
            utf8_only: false,
            snapdir: SnapshotDirectory::Hidden,
            cache_content: true,
            prefetch: true,
        }
    }
}

impl Behaviour {
    /// Computes the settings of the first dataset of a chain.
    ///
    /// # Errors
    /// [`PoolError::Format`] for a stored value that is invalid.
    pub fn of(chain: &[Level<'_>]) -> Result<Self, PoolError> {
        let value = |name: &str| {
            let definition = find(DATASET_PROPERTIES, name).ok_or_else(damaged)?;
            let value = known(definition, chain).value;
            definition.canonical(&value).map_err(|_| damaged())
        };
        let is_on = |name: &str| Ok::<_, PoolError>(value(name)? == "on");
        let recordsize: u64 = value("recordsize")?.parse().map_err(|_| damaged())?;
        Ok(Self {
            record_shift: recordsize.trailing_zeros() as u8,
            compression: compression(&value("compression")?)?,
            checksum: if value("checksum")? == "blake3" { ChecksumKind::Blake3 } else { ChecksumKind::Xxh3 },
            sync: match value("sync")?.as_str() {
                "always" => SyncMode::Always,
                "disabled" => SyncMode::Disabled,
                _ => SyncMode::Standard,
            },
            atime: is_on("atime")?,
            relatime: is_on("relatime")?,
            readonly: is_on("readonly")?,
            exec: is_on("exec")?,
            setuid: is_on("setuid")?,
            devices: is_on("devices")?,
            xattrs: value("xattr")? != "off",
            acl: value("acltype")? != "off",
            utf8_only: is_on("utf8only")?,
            snapdir: match value("snapdir")?.as_str() {
                "visible" => SnapshotDirectory::Visible,
                "disabled" => SnapshotDirectory::Disabled,
                _ => SnapshotDirectory::Hidden,
            },
            cache_content: value("primarycache")? == "all",
            prefetch: value("prefetch")? == "all",
        })
    }
}

/// The compression of a canonical value of `compression`.
fn compression(value: &str) -> Result<CompressionSetting, PoolError> {
    let level = |digits: &str| digits.parse::<i8>().map_err(|_| damaged());
    Ok(match value {
        "off" => CompressionSetting::Off,
        "on" => CompressionSetting::On,
        "lz4" => CompressionSetting::Lz4,
        "zstd" => CompressionSetting::Zstd(3),
        "zstd-fast" => CompressionSetting::Zstd(-1),
        _ => match (value.strip_prefix("zstd-fast-"), value.strip_prefix("zstd-")) {
            (Some(digits), _) => CompressionSetting::Zstd(-level(digits)?),
            (None, Some(digits)) => CompressionSetting::Zstd(level(digits)?),
            (None, None) => return Err(damaged()),
        },
    })
}

/// The properties that [`limits`] reads.
pub const LIMITS: [&str; 6] =
    ["quota", "refquota", "reservation", "refreservation", "filesystem_limit", "snapshot_limit"];

/// Returns the own limits of a dataset; those of ancestors apply in addition.
///
/// # Errors
/// [`PoolError::Format`] for a stored value that is invalid.
pub fn limits(level: &Level<'_>) -> Result<Limits, PoolError> {
    let number = |name: &str| match level.row(name).map(|row| row.value.as_str()) {
        None | Some("none" | "0") => Ok(None),
        Some(value) => value.parse::<u64>().map(Some).map_err(|_| damaged()),
    };
    let count = |name: &str| match level.row(name).map(|row| row.value.as_str()) {
        None | Some("none") => Ok(None),
        Some(value) => value.parse::<u64>().map(Some).map_err(|_| damaged()),
    };
    Ok(Limits {
        quota: number("quota")?,
        refquota: number("refquota")?,
        reservation: number("reservation")?.unwrap_or(0),
        refreservation: number("refreservation")?.unwrap_or(0),
        filesystems: count("filesystem_limit")?,
        snapshots: count("snapshot_limit")?,
    })
}

/// Checks the mount points that are stored at a dataset: directories are created for them, and a
/// forged image may have invalid ones.
///
/// # Errors
/// [`PoolError::Format`] for anything but an absolute path without `..`.
pub fn check_mountpoints(rows: &[(String, PropertyRow)]) -> Result<(), PoolError> {
    let Some(definition) = find(DATASET_PROPERTIES, "mountpoint") else { return Ok(()) };
    for (name, row) in rows {
        let is_place = name == definition.name && row.source != PropertySource::Masked;
        if is_place && !definition.canonical(&row.value).is_ok_and(|canonical| canonical == row.value) {
            return Err(damaged());
        }
    }
    Ok(())
}

fn damaged() -> PoolError {
    PoolError::Format(Damage::Structure("a stored property that nobody could have set"))
}
