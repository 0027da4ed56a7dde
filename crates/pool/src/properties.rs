//! The properties of datasets and pools: which there are, what values they take, how values are
//! read and shown, and which value holds for a dataset. `nacre fs get/set/inherit/list`, `nacre
//! pool get/set`, and the engine, which wants to know how to store and what to allow.
//!
//! ```text
//!  table      one line per property: kind of value, default, who may set it when, whether it is inherited
//!  value      text of users -> canonical text (what `get -p` shows and the catalog stores) -> text for people
//!  size       10G, 1.5T; 1.21M
//!  effective  the value over a chain of ancestors, with its source; what the engine needs of it
//!  owner      userquota@NAME and the like
//!  similar    the properties that a mistyped name may have meant
//!  features   feature@NAME of pools
//!  spelling   which names are the same: fixed when a dataset is made
//! ```
//!
//! Invariants: what the catalog stores is canonical: parsing it gives it back; a value that is
//! refused says what would be accepted; a property that this pool cannot serve is known by name and
//! refused with a reason, except for the value that asks for nothing.

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

/// The longest value of a user property, bytes: a row of the catalog holds it with the longest
/// name.
pub const USER_VALUE_MOST: usize = 7900;

/// The longest name of a user property, bytes.
pub const USER_NAME_MOST: usize = 256;

/// Who may set a property, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settable {
    /// Nobody: it is a figure.
    Never,
    /// When the dataset or pool is made, or the pool imported.
    AtCreation,
    /// Always.
    Always,
}

/// What values a property takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A figure that is shown only: bytes.
    Bytes,
    /// A figure that is shown only: a number, a text.
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
    /// Names of files between commas, at most so many bytes.
    Words(usize),
    /// A number from one to another.
    Number(u64, u64),
    /// How to share over NFS ([`sharing::nfs`]).
    ShareNfs,
    /// How to share over SMB ([`sharing::smb`]).
    ShareSmb,
    /// Known, not served: why, and the values that ask for nothing and are accepted.
    Unserved(&'static str, &'static [&'static str]),
}

/// What a property belongs to.
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
    /// Its short name, where it has one.
    pub short: Option<&'static str>,
    /// The head of its column in lists.
    pub column: &'static str,
    /// What values it takes.
    pub kind: Kind,
    /// The canonical value where nothing is set; empty for figures.
    pub default: &'static str,
    /// Whether descendants have its value as well.
    pub inherited: bool,
    /// Who may set it.
    pub settable: Settable,
    /// What it belongs to.
    pub scope: Scope,
    /// What values it takes, for people.
    pub values: &'static str,
}

/// Why a property or a value is not accepted, in the words of ZFS' commands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PropertyError {
    /// There is no such property.
    Unknown(String),
    /// It is a figure.
    ReadOnly(&'static str),
    /// It is fixed when the dataset is made.
    OnlyAtCreation(&'static str),
    /// The value is none of those.
    NotOneOf(&'static str, &'static str),
    /// Text that is no number.
    BadNumber(String),
    /// A suffix that is none.
    BadSuffix(String),
    /// A number of more than 64 bits.
    TooLarge,
    /// A limit of 0: it would allow nothing.
    ZeroLimit(&'static str),
    /// A value that is no power of two within bounds.
    NotRecordSize(&'static str),
    /// No absolute path.
    NotMountpoint(&'static str),
    /// No absolute path, for other properties.
    NotPath(&'static str),
    /// A number outside its bounds.
    OutOfRange(&'static str, u64, u64),
    /// A text that is too long or has characters that are not allowed.
    BadText(&'static str, usize),
    /// Known, but not served here: which, and why.
    Unserved(&'static str, &'static str),
    /// It cannot be inherited; and how to clear it.
    NotInherited(&'static str),
    /// A user property that is too long.
    UserTooLong(String),
    /// An owner's property whose owner or value is none.
    BadOwner(String),
    /// Names are normalized, and would not have to be UTF-8.
    Normalized,
    /// What a clone was to have else than its snapshot.
    NotOfClones(&'static str),
    /// Snapshots have no properties but those of users.
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
    /// One of the table.
    Known(&'static Definition),
    /// `module:name`.
    User(String),
    /// `userquota@NAME` and the like.
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

/// The pool property of this name.
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
    // As in ZFS the head of its column means it too, in letters of either case.
    table.iter().find(is_meant).or_else(|| table.iter().find(|definition| definition.column.eq_ignore_ascii_case(name)))
}

/// Whether this is the name of a user property: lower-case letters, digits and `- _ . :`, with a
/// colon.
#[must_use]
pub fn is_user_property(name: &str) -> bool {
    let allowed =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'_' | b'.' | b':');
    name.contains(':') && name.bytes().all(allowed)
}

impl Property {
    /// The canonical value of what a user wants to set. `creating`: the dataset or pool is being
    /// made.
    ///
    /// # Errors
    /// Why it is not accepted.
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

    /// The canonical value as people read it.
    #[must_use]
    pub fn human(&self, value: &str) -> String {
        match self {
            Self::Known(definition) => definition.human(value),
            Self::Owner(owner) => owner.human(value),
            Self::WrittenSince(_) => size::human_bytes_of(value),
            Self::User(_) | Self::Feature(_) => value.to_owned(),
        }
    }

    /// Whether `inherit` may be used on it: it is not a figure, and descendants have its value.
    ///
    /// # Errors
    /// Why not.
    pub fn check_inherit(&self) -> Result<(), PropertyError> {
        match self {
            Self::User(_) => Ok(()),
            Self::Known(definition) if definition.settable == Settable::Never => {
                Err(PropertyError::ReadOnly(definition.name))
            }
            Self::Known(definition) if definition.settable == Settable::AtCreation => {
                Err(PropertyError::OnlyAtCreation(definition.name))
            }
            Self::Known(definition) if !definition.inherited => Err(PropertyError::NotInherited(definition.name)),
            Self::Known(_) => Ok(()),
            Self::Owner(_) => Err(PropertyError::NotInherited("userquota@")),
            Self::WrittenSince(_) => Err(PropertyError::ReadOnly("written@")),
            Self::Feature(name) => Err(PropertyError::Unknown(format!("feature@{name}"))),
        }
    }
}

#[cfg(test)]
mod tests;
