//! Arguments on command lines of pools: assignments, devices, intervals. Pure, except that it looks
//! at the type of device files.

use nacre_admin::pool::{
    figures::{LOG, SPECIAL},
    shape::Shape,
};
use nacre_daemon::failure::Failure;
use nacre_remote::{Address, Settings, is_address};
use std::path::{Path, PathBuf};

/// Words of redundant groups, with the minimum number of devices of each.
const GROUPS: [(&str, usize); 5] = [("mirror", 2), ("raidz", 2), ("raidz1", 2), ("raidz2", 3), ("raidz3", 4)];

/// Maximum number of devices of a group.
const GROUP_MOST: usize = 64;

/// Words of classes: groups or devices that do not hold data.
const CLASSES: [&str; 3] = [SPECIAL, LOG, SPARE];

/// Words of `zpool` for arrangements of devices that are not supported.
const ARRANGEMENTS: [&str; 4] = ["draid", "cache", "dedup", "replacing"];

/// Parses `PROPERTY=VALUE`.
///
/// # Errors
/// There is no `=`.
pub fn assignment(text: &str) -> Result<(String, String), Failure> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err(Failure::usage(format!("missing value in property=value argument: '{text}'"))),
    }
}

/// Parses several assignments; a property that is named twice is refused.
///
/// # Errors
/// As [`assignment`].
pub fn assignments(texts: &[String]) -> Result<Vec<(String, String)>, Failure> {
    let mut found: Vec<(String, String)> = Vec::new();
    for text in texts {
        let (name, value) = assignment(text)?;
        if found.iter().any(|(other, _)| *other == name) {
            return Err(Failure::new(format!("property '{name}' specified multiple times")));
        }
        found.push((name, value));
    }
    Ok(found)
}

/// The groups of a new pool: the word of each, and its number of devices. Empty: each device is a
/// top-level vdev of its own.
pub type Groups = Vec<(String, usize)>;

/// The class of devices that replace failed ones.
pub const SPARE: &str = "spare";

/// The word for a group of devices without redundancy, where other groups exist.
pub const PLAIN: &str = "plain";

/// A group of the command line: its class, its kind, its devices.
type Named = (&'static str, &'static str, Vec<PathBuf>);

/// Reads the devices of a new pool, or those that are `added` to one, and their groups: first
/// groups for data, then for metadata, then for the log, then spares. `force` also allows groups of
/// different redundancy.
///
/// # Errors
/// Groups of too few devices, or an invalid combination, in the words of ZFS.
pub fn grouped(words: Vec<PathBuf>, force: bool, added: bool) -> Result<(Vec<PathBuf>, Groups), Failure> {
    if words.iter().any(|word| is_address(word)) {
        return match words.as_slice() {
            [_] if !added => Ok((words, Groups::new())),
            _ => {
                Err(invalid("an object store is no device among others: a pool lies in one alone, from the beginning"))
            }
        };
    }
    let mut named = named(words)?;
    let order = |(class, ..): &Named| CLASSES.iter().position(|known| known == class).map_or(0, |place| place + 1);
    named.sort_by_key(order);
    let none = match added {
        true => named.iter().all(|(class, kind, own)| *class != SPARE && *kind == PLAIN && own.is_empty()),
        false => !named.iter().any(|of| order(of) == 0),
    };
    if none {
        return Err(invalid("at least one toplevel vdev must be specified"));
    }
    let (mut paths, mut groups) = (Vec::new(), Groups::new());
    for (class, kind, own) in named {
        check(class, kind, own.len())?;
        let word = match (class, kind) {
            ("", kind) => kind.to_owned(),
            (class, PLAIN) => class.to_owned(),
            (class, kind) => format!("{class} {kind}"),
        };
        groups.push((word, own.len()));
        paths.extend(own);
    }
    // An existing pool checks itself whether the new groups fit.
    let shape = Shape::read(&groups).map_err(|refusal| invalid(&refusal.what))?;
    if let Some(why) = shape.mismatch(&[], &paths).filter(|_| !force && !added) {
        let why = format!("use '-f' to override the following errors:\nmismatched replication level: {why}");
        return Err(Failure::new("invalid vdev specification").next(why));
    }
    if groups.iter().all(|(group, _)| group == PLAIN) {
        groups.clear();
    }
    Ok((paths, groups))
}

fn invalid(why: &str) -> Failure {
    Failure::new(format!("invalid vdev specification: {why}"))
}

/// Reads the groups in the order of the words. Groups after `log` or `special` have that class
/// until the next word for a class; spares end where a group begins.
fn named(words: Vec<PathBuf>) -> Result<Vec<Named>, Failure> {
    let (mut all, mut class, mut begins): (Vec<Named>, &str, bool) = (Vec::new(), "", true);
    for word in words {
        let is = |known: &&&str| word.to_str() == Some(**known);
        if let Some(known) = CLASSES.iter().find(is) {
            if all.iter().any(|(there, ..)| there == known) {
                return Err(invalid(&format!("'{known}' can be specified only once")));
            }
            all.push((*known, PLAIN, Vec::new()));
            (class, begins) = (*known, false);
            continue;
        }
        if let Some((group, _)) = GROUPS.iter().find(|(group, _)| is(&group)) {
            if class == SPARE {
                class = "";
            }
            let kind = if *group == "raidz" { "raidz1" } else { *group };
            if !class.is_empty() && kind != "mirror" {
                return Err(invalid(&format!("unsupported '{class}' device: raidz")));
            }
            // The plain group that the class word opened has got no device, and is dropped.
            if all.last().is_some_and(|(there, kind, own)| *there == class && *kind == PLAIN && own.is_empty()) {
                all.pop();
            }
            all.push((class, kind, Vec::new()));
            begins = false;
            continue;
        }
        let device = device(word)?;
        match all.last_mut().filter(|_| !begins) {
            Some((.., own)) => own.push(device),
            None => all.push((class, PLAIN, vec![device])),
        }
        begins = false;
    }
    Ok(all)
}

/// Checks the number of devices of a group.
fn check(class: &str, kind: &str, count: usize) -> Result<(), Failure> {
    let least = GROUPS.iter().find(|(known, _)| *known == kind).map_or(1, |(_, least)| *least);
    let shown = if kind == PLAIN { class } else { kind.trim_end_matches('1') };
    match count {
        0 if kind == PLAIN && class != SPARE => Err(invalid(&format!("{class} requires at least 1 device"))),
        count if count < least => Err(invalid(&format!("{shown} requires at least {least} devices"))),
        count if count > GROUP_MOST && kind != PLAIN => {
            Err(invalid(&format!("{shown} supports no more than {GROUP_MOST} devices")))
        }
        _ => Ok(()),
    }
}

/// Reads the devices of a pool, without groups. A name without a slash that does not exist is a
/// device in `/dev`.
///
/// # Errors
/// Words for mirrors and other groups.
pub fn devices(paths: Vec<PathBuf>) -> Result<Vec<PathBuf>, Failure> {
    paths.into_iter().map(device).collect()
}

fn device(path: PathBuf) -> Result<PathBuf, Failure> {
    let word = path.to_str().filter(|text| !text.contains('/'));
    if let Some(word) = word {
        let kind = word.split(':').next().unwrap_or_default();
        if GROUPS.iter().any(|(group, _)| *group == kind) || CLASSES.contains(&kind) {
            return Err(
                Failure::usage(format!("'{word}' is no device")).next("nacre pool create POOL mirror DEVICE DEVICE")
            );
        }
        if ARRANGEMENTS.contains(&kind) {
            return Err(Failure::usage(format!("'{word}': there are no {kind} devices")).next(
                "name devices alone, or in groups: mirror, raidz1, raidz2, raidz3; behind special, log or spare those for that",
            ));
        }
        let known = Path::new("/dev").join(word);
        if !path.exists() && known.exists() {
            return Ok(known);
        }
    }
    std::path::absolute(&path).map_err(|error| Failure::io("cannot resolve", path.display(), &error))
}

/// The error for options of object stores that are given for devices.
pub const OF_STORES: &str = "--endpoint, --account, --region, --profile, --credentials-file, --cache-dir, --cache-size and --log-dir go with s3://, az:// and gs://";

/// Completes an address by the settings of the object store from the command line and the
/// environment; devices are returned unchanged.
///
/// # Errors
/// An invalid address or setting; settings of object stores for a device.
pub fn whole_address(place: PathBuf, settings: &Settings) -> Result<PathBuf, Failure> {
    let refused = |error: nacre_remote::AddressError| Failure::usage(error.to_string());
    if !is_address(&place) {
        return match *settings == Settings::default() {
            true => Ok(place),
            false => Err(Failure::usage(OF_STORES)),
        };
    }
    let address = Address::parse(&place.to_string_lossy()).map_err(refused)?;
    let whole = address.with(settings.clone(), |name| std::env::var(name).ok()).map_err(refused)?;
    Ok(PathBuf::from(whole.to_string()))
}

/// Names, seconds between tables, and the number of tables.
pub type Repeated = (Vec<String>, Option<f64>, Option<u64>);

/// Splits names from an interval in seconds and a count after them.
///
/// # Errors
/// An interval of 0, or an invalid number.
pub fn interval(mut names: Vec<String>) -> Result<Repeated, Failure> {
    // No name of a pool begins with a digit.
    let Some(first) = names.iter().position(|name| name.starts_with(|c: char| c.is_ascii_digit() || c == '.')) else {
        return Ok((names, None, None));
    };
    let numbers = names.split_off(first);
    let bad = |text: &str| Failure::usage(format!("'{text}' is not a number of seconds, or of tables"));
    let [interval, count @ ..] = numbers.as_slice() else { return Ok((names, None, None)) };
    let seconds: f64 = interval.parse().map_err(|_| bad(interval))?;
    if !(0.01..=86_400_000.0).contains(&seconds) {
        return Err(Failure::usage(format!("interval: '{interval}' is not a number of seconds from 0.01 to 86400000")));
    }
    let count = match count {
        [] => None,
        [count] => Some(count.parse().ok().filter(|count| *count > 0).ok_or_else(|| bad(count))?),
        [_, more, ..] => return Err(Failure::usage(format!("too many arguments: '{more}'"))),
    };
    Ok((names, Some(seconds), count))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn assignments_are_whole() {
        assert_eq!(assignment("a=b=c").unwrap(), ("a".to_owned(), "b=c".to_owned()));
        assert_eq!(assignment("a=").unwrap().1, "");
        assert!(assignment("a").is_err() && assignment("=a").is_err());
        assert!(assignments(&strings(&["a=1", "a=2"])).is_err());
    }

    #[test]
    fn arrangements_are_refused() {
        for word in ["mirror", "raidz2", "draid:2d", "log", "spare"] {
            assert!(devices(vec![PathBuf::from(word)]).is_err(), "{word}");
        }
        for wrong in [
            &["mirror", "/a"][..],
            &["raidz2", "/a", "/b"],
            &["/a", "mirror", "/b", "/c"],
            &["mirror", "/a", "/b", "cache", "/c"],
            &["mirror", "/a", "/b", "mirror", "/c", "/d", "/e"],
            &["mirror", "/a", "/b", "raidz", "/c", "/d"],
        ] {
            assert!(grouped(wrong.iter().map(PathBuf::from).collect(), false, false).is_err(), "{wrong:?}");
        }
        for (words, why) in [
            (&["/a", "mirror", "/b", "/c"][..], "both file and mirror vdevs are present"),
            (&["mirror", "/a", "/b", "raidz", "/c", "/d"], "both mirror and raidz vdevs are present"),
            (
                &["raidz", "/a", "/b", "/e", "raidz2", "/c", "/d", "/f"],
                "both 1 and 2 device parity raidz vdevs are present",
            ),
            (&["mirror", "/a", "/b", "mirror", "/c", "/d", "/e"], "both 2-way and 3-way mirror vdevs are present"),
        ] {
            let failure = grouped(words.iter().map(PathBuf::from).collect(), false, false).unwrap_err();
            assert_eq!(failure.what, "invalid vdev specification");
            assert!(failure.next.ends_with(&format!("mismatched replication level: {why}")), "{}", failure.next);
        }
        let words = |words: &[&str]| words.iter().map(PathBuf::from).collect::<Vec<_>>();
        let told = |line: &str, added: bool| {
            let made = grouped(words(&line.split(' ').collect::<Vec<_>>()), false, added);
            made.map(|(paths, groups)| {
                let groups = groups.iter().map(|(group, count)| format!("{group}:{count}")).collect::<Vec<_>>();
                let paths = paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>();
                groups.join(",") + " " + &paths.concat()
            })
        };
        for (line, groups) in [
            ("mirror /a /b spare /c /d", "mirror:2,spare:2 /a/b/c/d"),
            ("spare /c mirror /a /b", "mirror:2,spare:1 /a/b/c"),
            ("/a log /b", "plain:1,log:1 /a/b"),
            ("mirror /a /b log mirror /c /d", "mirror:2,log mirror:2 /a/b/c/d"),
            ("/a spare /s log /b mirror /c /d", "plain:1,log:1,log mirror:2,spare:1 /a/b/c/d/s"),
            ("raidz /a /b /c log /l special mirror /e /f", "raidz1:3,special mirror:2,log:1 /a/b/c/e/f/l"),
            ("raidz2 /a /b /c /d special mirror /e /f /g", "raidz2:4,special mirror:3 /a/b/c/d/e/f/g"),
            ("/a special /b", "plain:1,special:1 /a/b"),
        ] {
            assert_eq!(told(line, false).unwrap(), groups, "{line}");
        }
        assert_eq!(told("spare /c", true).unwrap(), "spare:1 /c");
        assert_eq!(told("log /c", true).unwrap(), "log:1 /c");
        for (line, why) in [
            ("log /a", "at least one toplevel vdev must be specified"),
            ("log mirror /a /b", "at least one toplevel vdev must be specified"),
            ("spare /a", "at least one toplevel vdev must be specified"),
            ("/a log", "log requires at least 1 device"),
            ("/a spare", "spare requires at least 1 devices"),
            ("/a log mirror /b", "mirror requires at least 2 devices"),
            ("/a log raidz2 /b /c /d", "unsupported 'log' device: raidz"),
            ("/a special raidz /b /c", "unsupported 'special' device: raidz"),
            ("/a log log /b", "'log' can be specified only once"),
            ("/a log /b log /c", "'log' can be specified only once"),
            ("/a spare /b spare /c", "'spare' can be specified only once"),
        ] {
            let failure = told(line, false).unwrap_err();
            assert_eq!(failure.what, format!("invalid vdev specification: {why}"), "{line}");
        }
        for (line, why) in [
            (
                "raidz2 /a /b /c /d special mirror /e /f",
                "raidz and mirror vdevs with different redundancy, 2 vs. 1 (2-way) are present",
            ),
            ("mirror /a /b special /e", "both mirror and file vdevs are present"),
            ("mirror /a /b /c special mirror /e /f", "both 3-way and 2-way mirror vdevs are present"),
        ] {
            let failure = told(line, false).unwrap_err();
            assert!(failure.next.ends_with(&format!("mismatched replication level: {why}")), "{}", failure.next);
        }
        let few = grouped(vec![PathBuf::from("raidz"), PathBuf::from("/a")], false, false).unwrap_err();
        assert_eq!(few.what, "invalid vdev specification: raidz requires at least 2 devices");
        let words = ["mirror", "/a", "/b", "raidz2", "/c", "/d", "/e"].iter().map(PathBuf::from).collect();
        let (paths, groups) = grouped(words, true, false).unwrap();
        assert_eq!((paths.len(), groups), (5, vec![("mirror".to_owned(), 2), ("raidz2".to_owned(), 3)]));
        let words = ["/a", "raidz", "/b", "/c", "raidz1", "/d", "/e"].iter().map(PathBuf::from).collect();
        assert_eq!(
            grouped(words, true, false).unwrap().1,
            [(PLAIN, 1), ("raidz1", 2), ("raidz1", 2)].map(|(group, count)| (group.to_owned(), count))
        );
        assert_eq!(grouped(vec![PathBuf::from("/a")], false, false).unwrap(), (vec![PathBuf::from("/a")], Vec::new()));
        assert_eq!(devices(vec![PathBuf::from("null")]).unwrap(), [PathBuf::from("/dev/null")]);
        assert_eq!(devices(vec![PathBuf::from("/a/b")]).unwrap(), [PathBuf::from("/a/b")]);
        assert!(devices(vec![PathBuf::from("file")]).unwrap()[0].is_absolute());
    }

    #[test]
    fn intervals_stand_behind_names() {
        assert_eq!(interval(strings(&["tank"])).unwrap(), (strings(&["tank"]), None, None));
        assert_eq!(interval(strings(&["tank", "2"])).unwrap(), (strings(&["tank"]), Some(2.0), None));
        assert_eq!(interval(strings(&["0.5", "3"])).unwrap(), (strings(&[]), Some(0.5), Some(3)));
        for wrong in [&["0"][..], &["1", "0"], &["1", "x"], &["1", "2", "3"], &["1x"]] {
            assert!(interval(strings(wrong)).is_err(), "{wrong:?}");
        }
    }
}
