//! What stands in command lines of pools: assignments, devices, intervals. Pure, but that it looks
//! what devices are.

use nacre_daemon::failure::Failure;
use std::path::{Path, PathBuf};

/// Groups of devices, with how many a group has at least.
const GROUPS: [(&str, usize); 5] = [("mirror", 2), ("raidz", 2), ("raidz1", 2), ("raidz2", 3), ("raidz3", 4)];

/// What a group has at most.
const GROUP_MOST: usize = 64;

/// Words by which `zpool` says how devices are put together, and that are not served.
const ARRANGEMENTS: [&str; 7] = ["draid", "log", "cache", "spare", "special", "dedup", "replacing"];

/// `PROPERTY=VALUE`.
///
/// # Errors
/// There is no `=`.
pub fn assignment(text: &str) -> Result<(String, String), Failure> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err(Failure::usage(format!("missing value in property=value argument: '{text}'"))),
    }
}

/// Several of them; what is there twice is refused.
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

/// The groups of a pool that is to be made: what each is, and of how many devices. No groups: each
/// device for itself.
pub type Groups = Vec<(String, usize)>;

/// Devices that take the place of others when these fail.
pub const SPARE: &str = "spare";

/// The group of devices that are each for themselves, beside others.
pub const PLAIN: &str = "plain";

/// The devices of a new pool, or those that are `added` to one, and the groups that they are in; spares
/// come last. `force`: also groups of different redundancy.
///
/// # Errors
/// Groups of too few devices, or that do not go together, in the words of ZFS.
pub fn grouped(words: Vec<PathBuf>, force: bool, added: bool) -> Result<(Vec<PathBuf>, Groups), Failure> {
    let invalid = |why: String| Failure::new(format!("invalid vdev specification: {why}"));
    let (mut paths, mut groups): (Vec<PathBuf>, Groups) = (Vec::new(), Vec::new());
    for word in words {
        let group = word.to_str().and_then(|text| GROUPS.iter().find(|(group, _)| *group == text));
        match (group, groups.last_mut()) {
            (None, Some((last, _))) if last.as_str() != SPARE && added && word.to_str() == Some(SPARE) => {
                groups.push((SPARE.to_owned(), 0));
            }
            (None, None) if added && word.to_str() == Some(SPARE) => groups.push((SPARE.to_owned(), 0)),
            (Some((group, _)), Some((last, _))) if last.as_str() == SPARE => {
                return Err(invalid(format!("{group}: spares come last")));
            }
            (Some(("raidz", _)), _) => groups.push(("raidz1".to_owned(), 0)),
            (Some((group, _)), _) => groups.push(((*group).to_owned(), 0)),
            (None, Some((_, count))) => {
                *count += 1;
                paths.push(device(word)?);
            }
            (None, None) => {
                groups.push((PLAIN.to_owned(), 1));
                paths.push(device(word)?);
            }
        }
    }
    for (group, count) in &groups {
        let least = GROUPS.iter().find(|(known, _)| known == group).map_or(1, |(_, least)| *least);
        let shown = group.trim_end_matches('1');
        if *count < least {
            return Err(invalid(format!("{shown} requires at least {least} devices")));
        }
        if *count > GROUP_MOST && ![PLAIN, SPARE].contains(&group.as_str()) {
            return Err(invalid(format!("{shown} supports no more than {GROUP_MOST} devices")));
        }
    }
    if let Some(why) = mismatched(&groups, &paths).filter(|_| !force) {
        let why = format!("use '-f' to override the following errors:\nmismatched replication level: {why}");
        return Err(Failure::new("invalid vdev specification").next(why));
    }
    if groups.iter().all(|(group, _)| group == PLAIN) {
        groups.clear();
    }
    Ok((paths, groups))
}

/// Why groups do not go together: one is not as safe as another.
fn mismatched(groups: &[(String, usize)], paths: &[PathBuf]) -> Option<String> {
    let parity = |group: &str| group.strip_prefix("raidz").and_then(|parity| parity.parse::<u8>().ok());
    let alone = || if paths.first().is_some_and(|path| is_block_device(path)) { "disk" } else { "file" };
    let shown = |group: &str| match parity(group) {
        Some(_) => "raidz".to_owned(),
        None if group == PLAIN => alone().to_owned(),
        None => group.to_owned(),
    };
    let all: Vec<_> = groups.iter().filter(|(group, _)| group != SPARE).collect();
    all.windows(2).find_map(|pair| {
        let [(first, count), (other, more)] = *pair else { return None };
        let (kind, other_kind) = (shown(first), shown(other));
        match (parity(first), parity(other)) {
            _ if kind != other_kind => Some(format!("both {kind} and {other_kind} vdevs are present")),
            (Some(a), Some(b)) if a != b => Some(format!("both {a} and {b} device parity {kind} vdevs are present")),
            _ if count != more => Some(format!("both {count}-way and {more}-way {kind} vdevs are present")),
            _ => None,
        }
    })
}

fn is_block_device(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|there| std::os::unix::fs::FileTypeExt::is_block_device(&there.file_type()))
}

/// The devices of a pool: plain ones only. A name without a slash that is not there is one in
/// `/dev`.
///
/// # Errors
/// Words for mirrors and their like.
pub fn devices(paths: Vec<PathBuf>) -> Result<Vec<PathBuf>, Failure> {
    paths.into_iter().map(device).collect()
}

fn device(path: PathBuf) -> Result<PathBuf, Failure> {
    let word = path.to_str().filter(|text| !text.contains('/'));
    if let Some(word) = word {
        let kind = word.split(':').next().unwrap_or_default();
        if GROUPS.iter().any(|(group, _)| *group == kind) {
            return Err(
                Failure::usage(format!("'{word}' is no device")).next("nacre pool create POOL mirror DEVICE DEVICE")
            );
        }
        if ARRANGEMENTS.contains(&kind) {
            let why = match kind {
                SPARE => "spares are added to a pool that is there".to_owned(),
                _ => format!("there are no {kind} devices"),
            };
            return Err(Failure::usage(format!("'{word}': {why}")).next(
                "name devices alone, or in groups: mirror, raidz1, raidz2, raidz3; `nacre pool add POOL spare DEVICE`",
            ));
        }
        let known = Path::new("/dev").join(word);
        if !path.exists() && known.exists() {
            return Ok(known);
        }
    }
    std::path::absolute(&path).map_err(|error| Failure::io("cannot resolve", path.display(), &error))
}

/// Names, seconds between tables, and how many.
pub type Repeated = (Vec<String>, Option<f64>, Option<u64>);

/// Names, and behind them an interval in seconds and a count.
///
/// # Errors
/// An interval of 0, or what is no number behind a number.
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
            &["mirror", "/a", "/b", "log", "/c"],
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
        let (paths, groups) = grouped(words(&["mirror", "/a", "/b", "spare", "/c", "/d"]), false, true).unwrap();
        assert_eq!((paths.len(), groups.last().unwrap()), (4, &(SPARE.to_owned(), 2)));
        assert!(grouped(words(&["spare", "/c", "mirror", "/a", "/b"]), false, true).is_err());
        assert!(grouped(words(&["mirror", "/a", "/b", "spare", "/c"]), false, false).is_err());
        assert_eq!(grouped(words(&["spare", "/c"]), false, true).unwrap().1, [(SPARE.to_owned(), 1)]);
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
