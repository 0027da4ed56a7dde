//! What stands in command lines of pools: assignments, devices, intervals. Pure.

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

/// The devices of a new pool, and the groups that they are in. `force`: also groups of different
/// redundancy.
///
/// # Errors
/// Groups of too few devices, or that do not go together, in the words of ZFS.
pub fn grouped(words: Vec<PathBuf>, force: bool) -> Result<(Vec<PathBuf>, Groups), Failure> {
    let invalid = |why: String| Failure::new(format!("invalid vdev specification: {why}"));
    let (mut paths, mut groups): (Vec<PathBuf>, Groups) = (Vec::new(), Vec::new());
    for word in words {
        let group = word.to_str().and_then(|text| GROUPS.iter().find(|(group, _)| *group == text));
        match (group, groups.last_mut()) {
            (Some((group, _)), None) if !paths.is_empty() => {
                let why = format!("mismatched replication level: both disk and {group} vdevs are present");
                return Err(invalid(why).next("name a group for every device"));
            }
            (Some((group, _)), _) => groups.push(((*group).to_owned(), 0)),
            (None, None) => paths.push(word),
            (None, Some((_, count))) => {
                *count += 1;
                paths.push(word);
            }
        }
    }
    for (group, count) in &groups {
        let least = GROUPS.iter().find(|(known, _)| known == group).map_or(2, |(_, least)| *least);
        if *count < least {
            return Err(invalid(format!("{group} requires at least {least} devices")));
        }
        if *count > GROUP_MOST {
            return Err(invalid(format!("{group} supports no more than {GROUP_MOST} devices")));
        }
    }
    let kind = |group: &str| if group == "raidz" { "raidz1".to_owned() } else { group.to_owned() };
    if let Some((first, others)) = groups.split_first().filter(|_| !force) {
        if let Some(other) = others.iter().find(|other| kind(&other.0) != kind(&first.0)) {
            let why = format!("mismatched replication level: both {} and {} vdevs are present", first.0, other.0);
            return Err(invalid(why).next("-f takes them all the same: the pool is as safe as the least of them"));
        }
        if let Some(other) = others.iter().find(|other| other.1 != first.1) {
            let way = if first.0 == "mirror" { "way" } else { "device" };
            let why = format!(
                "mismatched replication level: both {}-{way} and {}-{way} {} vdevs are present",
                first.1, other.1, first.0
            );
            return Err(invalid(why).next("-f takes them all the same"));
        }
    }
    Ok((devices(paths)?, groups))
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
            return Err(Failure::usage(format!("'{word}': groups are made with the pool"))
                .next("nacre pool create POOL mirror DEVICE DEVICE"));
        }
        if ARRANGEMENTS.contains(&kind) {
            return Err(Failure::usage(format!("'{word}': all devices of a pool have the same use"))
                .next("name the devices alone, or in groups: mirror, raidz1, raidz2, raidz3"));
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
            assert!(grouped(wrong.iter().map(PathBuf::from).collect(), false).is_err(), "{wrong:?}");
        }
        let words = ["mirror", "/a", "/b", "raidz2", "/c", "/d", "/e"].iter().map(PathBuf::from).collect();
        let (paths, groups) = grouped(words, true).unwrap();
        assert_eq!((paths.len(), groups), (5, vec![("mirror".to_owned(), 2), ("raidz2".to_owned(), 3)]));
        assert_eq!(grouped(vec![PathBuf::from("/a")], false).unwrap(), (vec![PathBuf::from("/a")], Vec::new()));
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
