//! The properties of datasets and pools: definitions, types of values, parsing and display of
//! values, and effective values. Used by `nacre fs get/set/inherit/list`, `nacre pool get/set`, and
//! the engine, which stores data and applies limits accordingly.
//!
//! ```text
//!  table      one line per property: kind of value, default, when it can be set, whether it is inherited
//!  value      users' text -> canonical text (shown by `get -p`, stored in the catalog) -> displayed text
//!  size       10G, 1.5T; 1.21M
//!  effective  the value over a chain of ancestors, with its source; the engine's settings
//!  owner      userquota@NAME and similar properties
//!  similar    suggestions for a mistyped name
//!  features   feature@NAME of pools
//!  spelling   rules for equal names: fixed at creation
//! ```
//!
//! Invariants: values in the catalog are canonical: parsing one returns it unchanged; the error of
//! a refused value names the accepted ones; a property that this pool cannot serve is known by name
//! and refused with a reason, except for the value that requests nothing.

use std::fmt;

pub mod chain;
pub mod effective;
pub mod features;
pub mod owner;
pub mod sharing;
mod similar;
pub mod size;
pub mod spelling;
mod table;
mod value;

pub use chain::Chain;
pub use effective::{Behaviour, Effective, Level, Source, SyncMode};
pub use owner::OwnerProperty;
pub use table::{DATASET_PROPERTIES, INCONSISTENT, OF_NEW_POOLS, POOL_PROPERTIES};

/// Longest value of a user property, bytes: it fits into a row of the catalog together with the
/// longest name.
pub const USER_VALUE_MOST: usize = 7900;

/// The longest name of a user property, bytes.
pub const USER_NAME_MOST: usize = 256;

/// When a property can be set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settable {
    /// Never: it is a statistic.
    Never,
    /// When the dataset or pool is created, or the pool imported.
    AtCreation,
    /// Always.
    Always,
}

/// Type of a property's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A read-only statistic: bytes.
    Bytes,
    /// A read-only statistic: a number, a text.
    Figure,
    /// A size, or `none`.
    Limit,
    /// A number, or `none`.
    Count,
    /// A power of two, 512 bytes to 16 MiB.
    RecordSize,
    /// One of these words.
    Choice(&'static [&'static str]),
    /// off, on, lz4, zstd and its levels.
    Compression,
    /// A path, `none` or `legacy`.
    Mountpoint,
    /// A path or nothing.
    Path,
    /// A text of at most so many bytes.
    Text(usize),
    /// Names of files separated by commas, at most so many bytes.
    Words(usize),
    /// A number in a range.
    Number(u64, u64),
    /// Options of NFS exports ([`sharing::nfs`]).
    ShareNfs,
    /// Options of SMB shares ([`sharing::smb`]).
    ShareSmb,
    /// Known, but not served: the reason, and the values that request nothing and are accepted.
    Unserved(&'static str, &'static [&'static str]),
}

/// The objects that a property belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// A file system.
    Filesystem,
    /// A file system or a snapshot.
    FilesystemAndSnapshot,
    /// A snapshot.
    Snapshot,
    /// File systems, snapshots, bookmarks.
    All,
    /// A pool.
    Pool,
}

/// A line of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Definition {
    /// Its name.
    pub name: &'static str,
    /// Its short name, if it has one.
    pub short: Option<&'static str>,
    /// The header of its column in lists.
    pub column: &'static str,
    /// Type of its values.
    pub kind: Kind,
    /// The canonical default value; empty for statistics.
    pub default: &'static str,
    /// Whether descendants inherit its value.
    pub inherited: bool,
    /// When it can be set.
    pub settable: Settable,
    /// The objects that it belongs to.
    pub scope: Scope,
    /// Description of its values.
    pub values: &'static str,
}

/// Reason why a property or a value is refused, in the words of ZFS' commands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PropertyError {
    /// There is no property of this name.
    Unknown(String),
    /// It is a statistic.
    ReadOnly(&'static str),
    /// It can be set at creation only.
    OnlyAtCreation(&'static str),
    /// The value is not one of the valid ones.
    NotOneOf(&'static str, &'static str),
    /// Text that is no number.
    BadNumber(String),
    /// An invalid suffix.
    BadSuffix(String),
    /// A number of more than 64 bits.
    TooLarge,
    /// A limit of 0, which would allow nothing.
    ZeroLimit(&'static str),
    /// A value that is no power of two within bounds.
    NotRecordSize(&'static str),
    /// Not an absolute path, for mount points.
    NotMountpoint(&'static str),
    /// Not an absolute path, for other properties.
    NotPath(&'static str),
    /// A number outside its bounds.
    OutOfRange(&'static str, u64, u64),
    /// A text that is too long or has characters that are not allowed.
    BadText(&'static str, usize),
    /// Known, but not served: the property, and the reason.
    Unserved(&'static str, &'static str),
    /// It cannot be inherited.
    NotInherited(&'static str),
    /// A user property that is too long.
    UserTooLong(String),
    /// An owner's property with an invalid owner or value.
    BadOwner(String),
    /// Normalized names need `utf8only=on`.
    Normalized,
    /// A value of a clone that differs from that of its snapshot.
    NotOfClones(&'static str),
    /// Snapshots have user properties only.
    NotOfSnapshots,
}

impl fmt::Display for PropertyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown(name) => write!(f, "invalid property '{name}'"),
            Self::ReadOnly(name) => write!(f, "'{name}' is readonly"),
            Self::OnlyAtCreation(name) => write!(f, "'{name}' is readonly: it can only be set at creation"),
            Self::NotOneOf(name, values) => write!(f, "'{name}' must be one of '{values}'"),
            Self::BadNumber(text) => write!(f, "bad numeric value '{text}'"),
            Self::BadSuffix(text) => write!(f, "invalid numeric suffix '{text}'"),
            Self::TooLarge => f.write_str("numeric value is too large"),
            Self::ZeroLimit(name) => write!(f, "use 'none' to disable {name}"),
            Self::NotRecordSize(name) => write!(f, "'{name}' must be power of 2 from 512B to 16M"),
            Self::NotMountpoint(name) => write!(f, "'{name}' must be an absolute path, 'none', or 'legacy'"),
            Self::NotPath(name) => write!(f, "'{name}' must be an absolute path or 'none'"),
            Self::OutOfRange(name, from, to) => write!(f, "'{name}' must be a number from {from} to {to}"),
            Self::BadText(name, most) => write!(f, "'{name}' must be printable and at most {most} characters long"),
            Self::Unserved(name, why) => write!(f, "'{name}' cannot be set: {why}"),
            Self::NotInherited(name) => write!(f, "'{name}' property cannot be inherited"),
            Self::UserTooLong(name) => write!(f, "property name or value is too long: '{name}'"),
            Self::BadOwner(name) => write!(f, "invalid user or group in '{name}'"),
            Self::Normalized => f.write_str("'utf8only' must be 'on' where 'normalization' is not 'none'"),
            Self::NotOfClones(name) => write!(f, "'{name}' of a clone is that of its snapshot"),
            Self::NotOfSnapshots => f.write_str("this property can not be modified for snapshots"),
        }
    }
}

impl std::error::Error for PropertyError {}

impl PropertyError {
    /// What to do next, where that can be said: the names of the table that are near to an unknown
    /// one and where all are listed, what sizes look like. May be empty.
    #[must_use]
    pub fn next(&self, table: &[Definition]) -> String {
        match self {
            Self::Unknown(name) => match &similar::similar(name, table)[..] {
                [] => LISTED.to_owned(),
                names => format!("did you mean {}? {LISTED}", names.join(", ")),
            },
            Self::BadSuffix(_) => size::FORM.to_owned(),
            _ => String::new(),
        }
    }
}

/// Where all properties are listed.
const LISTED: &str = "nacre-properties(7) lists the properties";

/// A property by the name that a user gave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Property {
    /// A property of the table.
    Known(&'static Definition),
    /// `module:name`.
    User(String),
    /// `userquota@NAME` and similar properties.
    Owner(OwnerProperty),
    /// `written@SNAPSHOT`, `written#BOOKMARK`.
    WrittenSince(WrittenFrom),
    /// `feature@NAME` of a pool.
    Feature(String),
}

/// What the property `written@SNAPSHOT` or `written#BOOKMARK` counts from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WrittenFrom {
    /// A snapshot, by its name with or without the file system's.
    Snapshot(String),
    /// A bookmark, likewise.
    Bookmark(String),
}

impl WrittenFrom {
    fn parse(name: &str) -> Option<Self> {
        let rest = name.strip_prefix("written")?;
        let (sigil, named) = rest.split_at_checked(1)?;
        match sigil {
            _ if named.is_empty() => None,
            "@" => Some(Self::Snapshot(named.to_owned())),
            "#" => Some(Self::Bookmark(named.to_owned())),
            _ => None,
        }
    }
}

impl fmt::Display for WrittenFrom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Snapshot(name) => write!(f, "@{name}"),
            Self::Bookmark(name) => write!(f, "#{name}"),
        }
    }
}

/// The dataset property of this name: of the table, by its short name and the head of its column
/// too, a user's, an owner's.
///
/// # Errors
/// [`PropertyError::Unknown`]; a user property that is too long.
pub fn dataset_property(name: &str) -> Result<Property, PropertyError> {
    if let Some(found) = find(DATASET_PROPERTIES, name) {
        return Ok(Property::Known(found));
    }
    if let Some(earlier) = WrittenFrom::parse(name) {
        return Ok(Property::WrittenSince(earlier));
    }
    if let Some(owner) = OwnerProperty::parse(name)? {
        return Ok(Property::Owner(owner));
    }
    if is_user_property(name) {
        let fits = name.len() < USER_NAME_MOST;
        return if fits {
            Ok(Property::User(name.to_owned()))
        } else {
            Err(PropertyError::UserTooLong(name.to_owned()))
        };
    }
    Err(PropertyError::Unknown(name.to_owned()))
}

/// Finds the pool property of this name.
///
/// # Errors
/// [`PropertyError::Unknown`]; a user property that is too long.
pub fn pool_property(name: &str) -> Result<Property, PropertyError> {
    if let Some(found) = find(POOL_PROPERTIES, name) {
        return Ok(Property::Known(found));
    }
    if let Some(feature) = name.strip_prefix("feature@").filter(|rest| features::is_known(rest)) {
        return Ok(Property::Feature(feature.to_owned()));
    }
    if is_user_property(name) && name.len() < USER_NAME_MOST {
        return Ok(Property::User(name.to_owned()));
    }
    Err(PropertyError::Unknown(name.to_owned()))
}

fn find(table: &'static [Definition], name: &str) -> Option<&'static Definition> {
    let is_meant = |definition: &&Definition| definition.name == name || definition.short == Some(name);
    // As in ZFS, the column header also identifies it, in upper or lower case.
    table.iter().find(is_meant).or_else(|| table.iter().find(|definition| definition.column.eq_ignore_ascii_case(name)))
}

/// Whether this is a valid name of a user property: lower-case letters, digits and `- _ . :`, with
/// a colon.
#[must_use]
pub fn is_user_property(name: &str) -> bool {
    let allowed =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'_' | b'.' | b':');
    name.contains(':') && name.bytes().all(allowed)
}

impl Property {
    /// Parses a user's value into the canonical one. `creating`: the dataset or pool is being
    /// created.
    ///
    /// # Errors
    /// The reason why it is refused.
    pub fn parse(&self, text: &str, creating: bool) -> Result<String, PropertyError> {
        match self {
            Self::Known(definition) => definition.parse(text, creating),
            Self::User(name) if text.len() > USER_VALUE_MOST => Err(PropertyError::UserTooLong(name.clone())),
            Self::User(_) => Ok(text.to_owned()),
            Self::Owner(owner) => owner.parse_value(text),
            Self::WrittenSince(_) => Err(PropertyError::ReadOnly("written@")),
            Self::Feature(name) => features::parse(name, text),
        }
    }

    /// Formats a canonical value for display.
    #[must_use]
    pub fn human(&self, value: &str) -> String {
        match self {
            Self::Known(definition) => definition.human(value),
            Self::Owner(owner) => owner.human(value),
            Self::WrittenSince(_) => size::human_bytes_of(value),
            Self::User(_) | Self::Feature(_) => value.to_owned(),
        }
    }

    /// Checks that `inherit` can be used on it: it is no statistic, and it is inherited.
    ///
    /// # Errors
    /// The reason why it cannot.
    pub fn check_inherit(&self) -> Result<(), PropertyError> {
        self.check_revert()?;
        match self {
            Self::Known(definition) if !definition.inherited => Err(PropertyError::NotInherited(definition.name)),
            _ => Ok(()),
        }
    }

    /// Checks that `inherit -S` can be used on it: a value that was set can give way to the received one, or the
    /// default.
    ///
    /// # Errors
    /// The reason why it cannot.
    pub fn check_revert(&self) -> Result<(), PropertyError> {
        match self {
            Self::User(_) => Ok(()),
            Self::Known(definition) if definition.settable == Settable::Never => {
                Err(PropertyError::ReadOnly(definition.name))
            }
            Self::Known(definition) if definition.settable == Settable::AtCreation => {
                Err(PropertyError::OnlyAtCreation(definition.name))
            }
            Self::Known(_) => Ok(()),
            Self::Owner(_) => Err(PropertyError::NotInherited("userquota@")),
            Self::WrittenSince(_) => Err(PropertyError::ReadOnly("written@")),
            Self::Feature(name) => Err(PropertyError::Unknown(format!("feature@{name}"))),
        }
    }
}

#[cfg(test)]
mod tests;
