//! What a client may ask for: names, options, and the volume that they describe.
//!
//! Invariant: every text in a [`Spec`] consists of letters that mean nothing to a stack line, begins
//! with a letter, a digit or a number's sign of the field's own grammar, and never with a dash.
//! Records are parsed by the same code, so a record that was edited is refused like a request.

use crate::failure::{Failure, Kind};
use std::{collections::BTreeMap, time::Duration};

/// Maximum length of a volume's name, bytes. docker makes names of 64 letters itself.
pub const NAME_MAX: usize = 128;
/// Maximum length of the id of a caller, bytes.
pub const CALLER_MAX: usize = 256;
/// Maximum length of an option's value, bytes.
const VALUE_MAX: usize = 1024;
/// Smallest limit: one block.
const SIZE_MIN: u64 = 4096;
/// Interval of backups where `backup-every` is missing.
const BACKUP_EVERY: Duration = Duration::from_secs(3600);

/// Options as a client wrote them.
pub type Options = BTreeMap<String, String>;

/// A volume as its options describe it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spec {
    /// Where the files are.
    pub place: Place,
    /// How the container sees them.
    pub view: View,
}

/// Where the files of a volume are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A directory of the state directory; with a limit, a cage over it.
    Directory {
        /// The limit of the cage.
        limit: Option<Limit>,
    },
    /// A file system of a pool.
    Dataset(Dataset),
}

/// The limit of a cage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Bytes.
    pub size: u64,
    /// Files, directories and links.
    pub files: Option<u64>,
}

/// A volume that is a file system of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dataset {
    /// The pool or file system that it lies in.
    pub parent: String,
    /// Properties that it is made with, as `PROPERTY=VALUE`.
    pub properties: Vec<String>,
    /// The volume that it is a clone of.
    pub from: Option<From>,
    /// Where it is replicated to.
    pub backup: Option<Backup>,
}

/// The origin of a clone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct From {
    /// The volume.
    pub volume: String,
    /// Its snapshot; `None` for its present content.
    pub snapshot: Option<String>,
}

/// The target of a replication, and its interval.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backup {
    /// `[HOST:]FILESYSTEM`.
    pub target: String,
    /// The interval.
    pub every: Duration,
}

/// Settings of the layer `remap`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// Translated owners.
    pub map: Option<String>,
    /// The one user that is shown.
    pub user: Option<String>,
    /// The one group that is shown.
    pub group: Option<String>,
    /// Permissions that are shown.
    pub mode: Option<String>,
}

impl View {
    /// The layer with its settings; `None` where everything is shown as it is.
    pub fn layer(&self) -> Option<String> {
        let settings =
            [("map", &self.map), ("force-user", &self.user), ("force-group", &self.group), ("perms", &self.mode)];
        let mut words = Vec::new();
        for (key, value) in settings {
            if let Some(value) = value {
                words.push(format!("{key}={value}"));
            }
        }
        if words.is_empty() { None } else { Some(format!("remap:{}", words.join(","))) }
    }
}

/// Checks the name of a volume: letters, digits, `_`, `.` and `-`, the first a letter or digit.
///
/// # Errors
/// [`Kind::Invalid`].
pub fn check_name(name: &str) -> Result<(), Failure> {
    if is_word(name, NAME_MAX, "_.-") {
        return Ok(());
    }
    Err(invalid(format!(
        "the name of a volume is 1 to {NAME_MAX} letters, digits, '_', '.' and '-', the first a letter or a digit, not {}",
        shown(name)
    )))
}

/// Checks the id of a caller, which is stored and compared, nothing else.
///
/// # Errors
/// [`Kind::Invalid`].
pub fn check_caller(id: &str) -> Result<(), Failure> {
    if id.len() <= CALLER_MAX && id.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Ok(());
    }
    Err(invalid(format!("an id is at most {CALLER_MAX} printable letters, not {}", shown(id))))
}

impl Spec {
    /// Reads the options of a client.
    ///
    /// # Errors
    /// [`Kind::Invalid`], with the option and what it may be.
    pub fn new(options: &Options) -> Result<Spec, Failure> {
        let mut left = Left { options, taken: Vec::new() };
        let view = view(&mut left)?;
        let place = match left.take("pool") {
            Some(parent) => Place::Dataset(dataset(&mut left, parent)?),
            None => Place::Directory { limit: limit(&mut left)? },
        };
        left.none_else(&place)?;
        Ok(Spec { place, view })
    }
}

/// The options that were not read yet.
struct Left<'a> {
    options: &'a Options,
    taken: Vec<&'static str>,
}

impl<'a> Left<'a> {
    fn take(&mut self, key: &'static str) -> Option<&'a str> {
        self.taken.push(key);
        self.options.get(key).map(String::as_str)
    }

    /// Fails with the first option that nobody has taken.
    fn none_else(&self, place: &Place) -> Result<(), Failure> {
        for key in self.options.keys() {
            if self.taken.contains(&key.as_str()) {
                continue;
            }
            let message = match (key.as_str(), place) {
                ("quota" | "recordsize" | "compression" | "from" | "backup" | "backup-every", _) => {
                    format!("option {key} is for volumes in a pool: it needs pool=POOL")
                }
                ("files", _) => "option files is for volumes in a directory, not with pool".to_owned(),
                _ => format!("unknown option {}; options are {}", shown(key), KEYS.join(", ")),
            };
            return Err(invalid(message));
        }
        Ok(())
    }
}

/// All options, for messages.
const KEYS: &[&str] = &[
    "size",
    "files",
    "map",
    "owner",
    "mode",
    "pool",
    "quota",
    "recordsize",
    "compression",
    "from",
    "backup",
    "backup-every",
];

fn view(left: &mut Left<'_>) -> Result<View, Failure> {
    let mut view = View::default();
    if let Some(map) = left.take("map") {
        check("map", map, is_letters(map, VALUE_MAX, "_./:@+*-"), "1000/0:@1000/@0, as of nacre mirror")?;
        view.map = Some(map.to_owned());
    }
    if let Some(owner) = left.take("owner") {
        let (user, group) = match owner.split_once(':') {
            Some((user, group)) => (user, Some(group)),
            None => (owner, None),
        };
        let good = is_word(user, 32, "_.-") && group.is_none_or(|group| is_word(group, 32, "_.-"));
        check("owner", owner, good, "USER or USER:GROUP, as in 1000:1000")?;
        view.user = Some(user.to_owned());
        view.group = group.map(str::to_owned);
    }
    if let Some(mode) = left.take("mode") {
        check("mode", mode, is_letters(mode, 128, ":=+-"), "u=rwX:g=rX:o=, as --perms of nacre mirror")?;
        view.mode = Some(mode.to_owned());
    }
    Ok(view)
}

fn limit(left: &mut Left<'_>) -> Result<Option<Limit>, Failure> {
    let size = left.take("size").map(|text| size("size", text)).transpose()?;
    let files = match left.take("files") {
        None => None,
        Some(text) => {
            let number: Option<u64> = text.parse().ok();
            let good = number.is_some_and(|number| number > 0) && text.bytes().all(|byte| byte.is_ascii_digit());
            check("files", text, good, "a number of files")?;
            number
        }
    };
    match (size, files) {
        (Some(size), files) => Ok(Some(Limit { size, files })),
        (None, None) => Ok(None),
        (None, Some(_)) => Err(invalid("option files needs size as well")),
    }
}

fn dataset(left: &mut Left<'_>, parent: &str) -> Result<Dataset, Failure> {
    check("pool", parent, is_dataset(parent), "POOL or POOL/FILESYSTEM")?;
    let mut properties = Vec::new();
    for (key, property) in [("size", "refquota"), ("quota", "quota"), ("recordsize", "recordsize")] {
        if let Some(text) = left.take(key) {
            let least = if key == "recordsize" { 512 } else { SIZE_MIN };
            properties.push(format!("{property}={}", bytes(key, text, least)?));
        }
    }
    if let Some(text) = left.take("compression") {
        check("compression", text, is_word(text, 16, "-"), "on, off, lz4, zstd or zstd-9")?;
        properties.push(format!("compression={text}"));
    }
    let from = match left.take("from") {
        None => None,
        Some(text) => Some(from(text)?),
    };
    let every = left.take("backup-every");
    let backup = match (left.take("backup"), every) {
        (None, None) => None,
        (None, Some(_)) => return Err(invalid("option backup-every needs backup as well")),
        (Some(target), every) => {
            check("backup", target, is_target(target), "POOL/FILESYSTEM or HOST:POOL/FILESYSTEM")?;
            let every = match every {
                Some(text) => interval(text)?,
                None => BACKUP_EVERY,
            };
            Some(Backup { target: target.to_owned(), every })
        }
    };
    Ok(Dataset { parent: parent.to_owned(), properties, from, backup })
}

fn from(text: &str) -> Result<From, Failure> {
    let (volume, snapshot) = match text.split_once('@') {
        Some((volume, snapshot)) => (volume, Some(snapshot)),
        None => (text, None),
    };
    let good = is_word(volume, NAME_MAX, "_.-") && snapshot.is_none_or(|name| is_word(name, NAME_MAX, "_.:-"));
    check("from", text, good, "VOLUME or VOLUME@SNAPSHOT")?;
    Ok(From { volume: volume.to_owned(), snapshot: snapshot.map(str::to_owned) })
}

/// Reads `15m`, `1h`, `1d`: at least a minute, at most a year.
fn interval(text: &str) -> Result<Duration, Failure> {
    let unit = match text.bytes().last() {
        Some(b'm') => 60,
        Some(b'h') => 3600,
        Some(b'd') => 24 * 3600,
        _ => 0,
    };
    let digits = text.get(..text.len().saturating_sub(1)).unwrap_or_default();
    let number: u64 = if is_letters(digits, 6, "") { digits.parse().unwrap_or(0) } else { 0 };
    let seconds = number * unit;
    check("backup-every", text, (60..=366 * 24 * 3600).contains(&seconds), "a time as in 15m, 6h or 1d")?;
    Ok(Duration::from_secs(seconds))
}

fn size(key: &str, text: &str) -> Result<u64, Failure> {
    bytes(key, text, SIZE_MIN)
}

fn bytes(key: &str, text: &str, least: u64) -> Result<u64, Failure> {
    let mut number = None;
    if text.len() <= 40 {
        let written = nacre_size::Written::new(text);
        if !written.is_empty()
            && let Some(shift) = nacre_size::shift(written.unit)
        {
            number = written.bytes(shift);
        }
    }
    match number {
        Some(number) if number >= least => Ok(number),
        _ => Err(invalid(format!("option {key} is a size of at least {least} bytes, as in 10G, not {}", shown(text)))),
    }
}

/// Names between slashes.
fn is_dataset(text: &str) -> bool {
    text.len() <= 128 && text.split('/').all(|name| is_word(name, 128, "_.-"))
}

fn is_target(text: &str) -> bool {
    match text.split_once(':') {
        Some((host, dataset)) => is_word(host, 128, "_.@-") && is_dataset(dataset),
        None => is_dataset(text),
    }
}

/// Letters, digits and these, beginning with a letter or digit.
fn is_word(text: &str, longest: usize, more: &str) -> bool {
    is_letters(text, longest, more) && text.bytes().next().is_some_and(|first| first.is_ascii_alphanumeric())
}

/// At least one letter, digit or one of these, the first no dash.
fn is_letters(text: &str, longest: usize, more: &str) -> bool {
    !text.is_empty()
        && text.len() <= longest
        && !text.starts_with('-')
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || more.as_bytes().contains(&byte))
}

fn check(key: &str, value: &str, good: bool, wanted: &str) -> Result<(), Failure> {
    if good { Ok(()) } else { Err(invalid(format!("option {key} is {wanted}, not {}", shown(value)))) }
}

fn invalid(message: impl Into<String>) -> Failure {
    Failure::new(Kind::Invalid, message)
}

/// A client's text in a message: in quotes, escaped, cut.
pub fn shown(text: &str) -> String {
    let cut: String = text.chars().take(60).collect();
    if cut.len() < text.len() { format!("{cut:?}...") } else { format!("{cut:?}") }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn options(text: &str) -> Options {
        let words = text.split_whitespace().map(|word| word.split_once('=').unwrap());
        words.map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
    }

    fn spec(text: &str) -> Result<Spec, Failure> {
        Spec::new(&options(text))
    }

    #[test]
    fn options_become_a_volume() {
        assert_eq!(spec("").unwrap(), Spec { place: Place::Directory { limit: None }, view: View::default() });
        let volume = spec("size=1M files=10 owner=1000:users mode=u=rwX:o=").unwrap();
        assert_eq!(volume.place, Place::Directory { limit: Some(Limit { size: 1 << 20, files: Some(10) }) });
        assert_eq!(volume.view.layer().unwrap(), "remap:force-user=1000,force-group=users,perms=u=rwX:o=");
        let volume = spec(
            "pool=tank/v size=1G quota=2G recordsize=16K compression=zstd-9 from=a@b backup=u@h:t/x backup-every=15m",
        );
        let Place::Dataset(dataset) = volume.unwrap().place else { unreachable!() };
        assert_eq!(
            dataset.properties,
            ["refquota=1073741824", "quota=2147483648", "recordsize=16384", "compression=zstd-9"]
        );
        assert_eq!(dataset.from.unwrap(), From { volume: "a".into(), snapshot: Some("b".into()) });
        assert_eq!(dataset.backup.unwrap(), Backup { target: "u@h:t/x".into(), every: Duration::from_secs(900) });
    }

    #[test]
    fn what_does_not_fit_is_refused_with_its_name() {
        for (text, part) in [
            ("size=1", "option size"),
            ("size=-1G", "option size"),
            ("size=1G,trusted", "option size"),
            ("files=10", "needs size"),
            ("size=1M files=0", "option files"),
            ("size=1M files=+5", "option files"),
            ("map=0/1,delete-deny", "option map"),
            ("map=0/1|readonly", "option map"),
            ("map=-x", "option map"),
            ("owner=-1", "option owner"),
            ("owner=1:", "option owner"),
            ("mode=a,b", "option mode"),
            ("pool=../x", "option pool"),
            ("pool=tank/../x", "option pool"),
            ("pool=-f", "option pool"),
            ("pool=tank@s", "option pool"),
            ("pool=/tank", "option pool"),
            ("pool=tank files=1", "not with pool"),
            ("quota=1G", "needs pool"),
            ("pool=t from=../a", "option from"),
            ("pool=t from=a@-r", "option from"),
            ("pool=t backup=-oProxyCommand=x:t", "option backup"),
            ("pool=t backup-every=1h", "needs backup"),
            ("pool=t backup=t/x backup-every=1s", "option backup-every"),
            ("pool=t backup=t/x backup-every=99999999h", "option backup-every"),
            ("pool=t compression=on,x", "option compression"),
            ("type=nfs", "unknown option"),
        ] {
            let failure = spec(text).unwrap_err();
            assert_eq!(failure.kind, Kind::Invalid);
            assert!(failure.message.contains(part), "{text}: {failure}");
        }
        let newline = Options::from([("map".to_owned(), "0/1\nx".to_owned())]);
        assert!(Spec::new(&newline).is_err());
    }

    #[test]
    fn names_are_bounded() {
        for good in ["a", "0", "my-volume_1.x", &"a".repeat(NAME_MAX)] {
            check_name(good).unwrap();
        }
        for bad in ["", ".", "..", "-a", "_a", "a/b", "../a", "a\n", "a b", "a@b", "\u{e9}", &"a".repeat(NAME_MAX + 1)]
        {
            assert_eq!(check_name(bad).unwrap_err().kind, Kind::Invalid, "{bad}");
        }
        check_caller("").unwrap();
        assert!(check_caller("a\nb").is_err() && check_caller(&"a".repeat(CALLER_MAX + 1)).is_err());
    }
}
