//! Arguments on command lines of file systems: names, lists of properties and types, unsupported
//! verbs. Pure.

use crate::plan::Plan;
use nacre_admin::fs::{NewValue, ToMount, ToRename, ToSet, Types};
use nacre_daemon::failure::Failure;
use nacre_pool::{
    names::Name,
    properties::{DATASET_PROPERTIES, Property, PropertyError, dataset_property},
};
use std::ffi::OsString;

/// Returns the pool in a name.
pub fn pool(name: &str) -> &str {
    name.split(['/', '@', '#']).next().unwrap_or(name)
}

/// Checks the name of a new file system; volumes do not exist.
///
/// # Errors
/// An invalid name, or a volume, with the sentence of ZFS.
pub fn creatable(name: &str, volume: bool) -> Result<(), Failure> {
    let refused = |why: String| Failure::new(format!("cannot create '{name}': {why}"));
    Name::filesystem(name).map_err(|error| refused(error.to_string()))?;
    if volume {
        Err(refused("there are no volumes".to_owned()).next("a large file in a file system can be one"))
    } else {
        Ok(())
    }
}

/// Parses words `PROPERTY=VALUE`; `doing` begins the error messages.
///
/// # Errors
/// A word without `=`, a property that is named twice, an owner that does not exist.
pub fn assignments(words: &[String], doing: &str) -> Result<Vec<(String, String)>, Failure> {
    let mut found: Vec<(String, String)> = Vec::new();
    for word in words {
        let Some((name, value)) = word.split_once('=') else {
            return Err(Failure::usage(format!("missing '=' for property=value argument '{word}'")));
        };
        if found.iter().any(|(there, _)| there == name) {
            return Err(Failure::new(format!("property '{name}' specified multiple times")));
        }
        let name = super::owners::resolved(name)
            .map_err(|failure| Failure { what: format!("{doing}: {}", failure.what), ..failure })?;
        found.push((name, value.to_owned()));
    }
    Ok(found)
}

/// Parses the arguments of `set`: assignments, then names.
///
/// # Errors
/// No assignment, no name, a property that cannot be set.
pub fn settings(words: &[String]) -> Result<ToSet, Failure> {
    let names = words.iter().position(|word| !word.contains('=')).unwrap_or(words.len());
    let (given, names) = words.split_at(names);
    if given.is_empty() {
        return Err(Failure::usage("missing property=value argument"));
    }
    if names.is_empty() {
        return Err(Failure::usage("missing dataset name"));
    }
    let what = format!("cannot set property for '{}'", names.first().map_or("", String::as_str));
    let assignments = assignments(given, &what)?;
    for (name, value) in &assignments {
        dataset_property(name)
            .and_then(|property| property.parse(value, false))
            .map_err(|error| wrong(&what, &error))?;
    }
    let properties = assignments.into_iter().map(|(name, value)| (name, NewValue::Local(value))).collect();
    Ok(ToSet { names: names.to_vec(), properties, ..ToSet::default() })
}

/// Builds the request of `inherit`.
///
/// # Errors
/// A property that cannot be inherited.
pub fn inheritance(property: &str, names: Vec<String>, recursive: bool, received: bool) -> Result<ToSet, Failure> {
    let known = dataset_property(property).map_err(|error| Failure::usage(error.to_string()).next(listed(&error)))?;
    let checked = if received { known.check_revert() } else { known.check_inherit() };
    checked.map_err(|error| match &error {
        PropertyError::NotInherited(_) => {
            Failure::new(error.to_string()).next(format!("use 'nacre fs set {property}=none' to clear"))
        }
        _ => Failure::new(error.to_string()),
    })?;
    let to = if received { NewValue::Received } else { NewValue::Inherit };
    Ok(ToSet { names, recursive, properties: vec![(property.to_owned(), to)], ..ToSet::default() })
}

fn wrong(what: &str, error: &PropertyError) -> Failure {
    let failure = Failure::new(format!("{what}: {error}"));
    match error {
        PropertyError::Unknown(_) => {
            failure.next(format!("{}; names of your own have a colon: module:name", listed(error)))
        }
        _ => failure.next(error.next(DATASET_PROPERTIES)),
    }
}

/// Returns a hint: similar properties, and where all of them are listed.
fn listed(error: &PropertyError) -> String {
    error.next(DATASET_PROPERTIES)
}

/// Checks the name of a column of `list` or a property of `get`.
///
/// # Errors
/// No such property.
pub fn check_column(name: &str) -> Result<(), Failure> {
    if name == "name" {
        return Ok(());
    }
    let found = dataset_property(name);
    found.map(drop).map_err(|error| Failure::usage(format!("bad property list: {error}")).next(listed(&error)))
}

/// Parses a list of object types.
///
/// # Errors
/// A word that is no type.
pub fn types(words: &[String]) -> Result<Types, Failure> {
    let mut types = Types::default();
    for word in words {
        match word.as_str() {
            "filesystem" | "fs" => types.filesystems = true,
            "snapshot" | "snap" => types.snapshots = true,
            "bookmark" => types.bookmarks = true,
            // There are no volumes; scripts ask for them next to other types.
            "volume" | "vol" => {}
            "all" => types = Types { filesystems: true, snapshots: true, bookmarks: true },
            other => {
                let next = "filesystem, snapshot, bookmark, volume, all";
                return Err(Failure::usage(format!("invalid type '{other}'")).next(next));
            }
        }
    }
    Ok(types)
}

/// Parses the list of columns of `get`.
///
/// # Errors
/// A word that is no column.
pub fn fields(words: &[String]) -> Result<Vec<String>, Failure> {
    const ALL: [&str; 5] = ["name", "property", "value", "received", "source"];
    let mut found = Vec::new();
    for word in words {
        match word.as_str() {
            "all" => found.extend(ALL.map(str::to_owned)),
            word if ALL.contains(&word) => found.push(word.to_owned()),
            other => {
                return Err(Failure::usage(format!("invalid column name '{other}'"))
                    .next("name, property, value, received, source, all"));
            }
        }
    }
    if found.is_empty() {
        found = ["name", "property", "value", "source"].map(str::to_owned).to_vec();
    }
    Ok(found)
}

/// Parses the list of sources of `get -s`.
///
/// # Errors
/// A word that is no source.
pub fn sources(words: &[String]) -> Result<Vec<String>, Failure> {
    const ALL: [&str; 6] = ["local", "default", "inherited", "received", "temporary", "none"];
    match words.iter().find(|word| !ALL.contains(&word.as_str())) {
        Some(other) => Err(Failure::usage(format!("invalid source '{other}'")).next(ALL.join(", "))),
        None => Ok(words.to_vec()),
    }
}

/// Checks that a clone is created in the pool of its origin.
///
/// # Errors
/// The names are in two pools.
pub fn same_pool(from: Option<&str>, name: &str) -> Result<(), Failure> {
    match from {
        Some(from) if pool(from) != pool(name) => {
            Err(Failure::new(format!("cannot create '{name}': source and target pools differ"))
                .next("a clone shares its content with its origin"))
        }
        _ => Ok(()),
    }
}

/// Checks that a rename stays within one pool.
///
/// # Errors
/// The names are in two pools.
pub fn renamed_within(rename: &ToRename) -> Result<(), Failure> {
    let snapshot = matches!(Name::parse(&rename.from), Ok(Name::Snapshot { .. }));
    // For a snapshot, the part after the @ suffices.
    if pool(&rename.from) == pool(&rename.to)
        || snapshot && (rename.to.starts_with('@') || !rename.to.contains(['/', '@']))
    {
        return Ok(());
    }
    let why = format!("cannot rename to '{}': datasets must be within same pool", rename.to);
    Err(Failure::new(why).next("nacre copy moves files to another pool"))
}

/// Returns the file system of a pool that mount(8) asks for: `fs:POOL/NAME`, or for the type `zfs`
/// its name alone.
pub fn dataset<'a>(program: &str, positionals: &'a [OsString]) -> Option<&'a str> {
    let first = positionals.first()?.to_str()?;
    first.strip_prefix("fs:").or((program == "mount.zfs").then_some(first))
}

/// Words for mount(8) and fstab alone, and words for every type of file system that change nothing here; they are
/// dropped. Access times follow the properties `atime` and `relatime`.
const OF_MOUNT: [&str; 23] = [
    "zfsutil",
    "auto",
    "noauto",
    "nofail",
    "_netdev",
    "user",
    "users",
    "nouser",
    "owner",
    "group",
    "relatime",
    "norelatime",
    "diratime",
    "nodiratime",
    "strictatime",
    "nostrictatime",
    "lazytime",
    "nolazytime",
    "iversion",
    "noiversion",
    "silent",
    "loud",
    "async",
];

/// Beginnings of words that are dropped: they are for mount(8), or name the source and type, which
/// are always the name and type of the file system.
const NOT_OURS: [&str; 4] = ["x-", "comment=", "fsname=", "subtype="];

/// Builds the plan of a mount from mount(8)'s arguments and the words after `-o`.
///
/// # Errors
/// No mount point.
pub fn mount(name: &str, positionals: &[OsString], texts: &[OsString], read_only: bool) -> Result<Plan, Failure> {
    let [_, at] = positionals else { return Err(Failure::usage("mount -t fuse.nacre fs:POOL/NAME DIRECTORY")) };
    let at = std::path::absolute(at).map_err(|error| Failure::io("cannot resolve", at.display(), &error))?;
    let all: Vec<String> = texts.iter().map(|text| text.to_string_lossy().into_owned()).collect();
    let given = all.iter().flat_map(|text| text.split(','));
    let known = |word: &&str| !OF_MOUNT.contains(word) && !NOT_OURS.iter().any(|beginning| word.starts_with(beginning));
    let mut words: Vec<String> = given.filter(known).map(str::to_owned).collect();
    words.extend(read_only.then(|| "ro".to_owned()));
    Ok(Plan::Dataset(Box::new(ToMount { name: Some(name.to_owned()), words, overlay: true, at: Some(at) })))
}

/// Returns the canonical name of a property that has several names; other names unchanged.
pub fn long_name(name: &str) -> String {
    match dataset_property(name) {
        Ok(Property::Known(definition)) => definition.name.to_owned(),
        _ => name.to_owned(),
    }
}

/// Returns the error for an unsupported verb of ZFS. `bare`: the verb has no arguments.
pub fn not_here(verb: &str, bare: bool) -> Failure {
    let why = match verb {
        "allow" | "unallow" if bare => return Failure::usage("missing dataset argument"),
        "allow" | "unallow" => "permissions cannot be delegated: who owns the pool administers it, and nobody else",
        "load-key" | "unload-key" | "change-key" => "this pool does not encrypt",
        "projectspace" | "project" => "there are no projects",
        "jail" | "unjail" | "zone" | "unzone" => "file systems are not delegated to containers",
        "program" => "channel programs are not part of this version",
        "redact" | "rewrite" | "wait" => "it is not part of this version",
        _ => {
            return Failure::usage(format!("unrecognized command '{verb}'")).next("nacre fs --help lists the commands");
        }
    };
    Failure::new(format!("'{verb}': {why}"))
}
