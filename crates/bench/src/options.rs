//! The command line of `nacre bench` and its [`Plan`]: pure data, no effects.
//!
//! The grammar is in the crate `nacre-bench-arguments`; `lib.rs` calls [`plan`] to interpret it.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use clap::ArgMatches;
use nacre_bench_arguments::{FILE_SYSTEMS, TablePlace};

use crate::export::{Exports, Show};
use crate::failure::{Doing, Failure};
use crate::programs;
use crate::scale::{self, Scale};
use crate::table::{Table, Test};
use crate::target::Target;
use crate::transport::Transport;

/// Size of the image of `--fs` unless one is given.
const IMAGE_SIZE: u64 = 8 << 30;

/// Location of the measured directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A fresh subdirectory of this directory.
    Directory(PathBuf),
    /// The scratch directory itself.
    Scratch,
    /// A new file system on a loop device in the scratch directory.
    Image {
        /// Type, as `mkfs` and `mount` call it.
        kind: &'static str,
        /// Size; the file is sparse.
        bytes: u64,
    },
}

/// Ids of an ordinary user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct User {
    /// User id.
    pub uid: u32,
    /// Id of the user's primary group.
    pub gid: u32,
}

/// All parameters of a run.
#[derive(Debug)]
pub struct Plan {
    /// Table with the tests.
    pub table: &'static Table,
    /// Location of the source.
    pub source: Source,
    /// Scratch directory.
    pub scratch: PathBuf,
    /// The program under test.
    pub nacre: PathBuf,
    /// The ordinary user for targets that want one, if we are root.
    pub user: Option<User>,
    /// Transport of requests.
    pub transport: Transport,
    /// Amounts of work.
    pub scale: Scale,
    /// Columns, baselines included.
    pub targets: Vec<&'static Target>,
    /// Tests, the rows of the table.
    pub tests: Vec<&'static Test>,
    /// Exports to write at the end.
    pub exports: Exports,
    /// Whether a missed figure is an error.
    pub check: bool,
}

/// Returns the requested exports.
pub fn exports(matches: &ArgMatches) -> Exports {
    let show = match matches.get_one::<String>("show").map(String::as_str) {
        Some("time") => Show::Time,
        _ => Show::Ratio,
    };
    let file = |id: &str| matches.get_one::<PathBuf>(id).cloned();
    Exports {
        show,
        json: file("json"),
        csv: file("csv"),
        html: file("html"),
        markdown: file("markdown"),
        section: matches.get_one("section").cloned(),
    }
}

/// Interprets the arguments of a table.
pub fn plan(table: &'static Table, matches: &ArgMatches) -> Result<Plan, Failure> {
    let root = rustix::process::geteuid().is_root();
    let temporary = env::temp_dir();
    let scratch = matches.get_one::<PathBuf>("scratch").cloned();
    let scratch = scratch.unwrap_or_else(|| temporary.join(format!("nacre-bench-scratch-{}", std::process::id())));
    let nacre = match matches.get_one::<PathBuf>("nacre") {
        Some(path) => fs::canonicalize(path).doing("resolving", path)?,
        None => usual_nacre()?,
    };
    let check = matches.get_flag("check");
    let scale = scale::scale(table, matches, free_at(matches.get_one::<PathBuf>("source").unwrap_or(&scratch))?)?;
    Ok(Plan {
        table,
        source: source(table, matches, &scale, root, &temporary)?,
        scratch,
        nacre,
        user: user(matches.get_one::<String>("user").map(String::as_str))?,
        transport: match matches.get_one::<String>("transport").map(String::as_str) {
            Some("uring") => Transport::Uring,
            Some("device") => Transport::Device,
            Some(_) => Transport::AsSet,
            // Only root can switch it.
            None => {
                if root {
                    Transport::Device
                } else {
                    Transport::AsSet
                }
            }
        },
        scale,
        targets: targets(table, &words(matches, "targets"), check)?,
        tests: tests(table, &words(matches, "tests"))?,
        exports: exports(matches),
        check,
    })
}

/// Returns the program `nacre` next to this one, or else on the search path. Where there is none, targets that need
/// it report that.
fn usual_nacre() -> Result<PathBuf, Failure> {
    let own = env::current_exe().map_err(|error| Failure::new(format!("finding this program: {error}")))?;
    let beside = own.with_file_name("nacre");
    Ok(if programs::is_executable(&beside) { beside } else { programs::find("nacre").unwrap_or(beside) })
}

/// Returns the free bytes on the file system of `path`, which may not exist yet.
fn free_at(path: &Path) -> Result<u64, Failure> {
    let path = std::path::absolute(path).doing("resolving", path)?;
    let there = path.ancestors().find(|ancestor| ancestor.exists()).unwrap_or(Path::new("/"));
    let room = rustix::fs::statvfs(there).doing("asking for the free space of", there)?;
    Ok(room.f_bavail.saturating_mul(room.f_frsize))
}

/// Returns the room for cages: an image must hold the largest cage, and the images of file systems in it.
fn room_for_cages(table: &Table, scale: &Scale) -> u64 {
    match table.arguments.place {
        TablePlace::Images => scale.image.saturating_add(IMAGE_SIZE),
        _ if table.targets.iter().any(Target::is_bounded) => 2 * scale.cage.max(scale.fill),
        _ => 0,
    }
}

/// Returns the room for inodes: ext4 makes them with the file system, one for each 16 KiB.
fn room_for_inodes(kind: &str, table: &Table, scale: &Scale) -> u64 {
    if kind == "ext4" && table.arguments.amounts.contains(&"names") { 2 * scale.names * (16 << 10) } else { 0 }
}

fn words(matches: &ArgMatches, id: &str) -> Vec<String> {
    matches.get_many::<String>(id).into_iter().flatten().cloned().collect()
}

fn source(table: &Table, matches: &ArgMatches, scale: &Scale, root: bool, temporary: &Path) -> Result<Source, Failure> {
    if let Some(directory) = matches.get_one::<PathBuf>("source") {
        return Ok(Source::Directory(fs::canonicalize(directory).doing("resolving", directory)?));
    }
    let kind = matches.get_one::<String>("fs").map(String::as_str);
    if kind.is_none() && matches!(table.arguments.place, TablePlace::Scratch | TablePlace::Images) {
        return Ok(Source::Scratch);
    }
    if !root && kind.is_none() {
        return Ok(Source::Directory(temporary.to_owned()));
    }
    if !root {
        return Err(Failure::new("--fs needs root; use --source"));
    }
    let bytes = matches.get_one::<u64>("image-size").copied().unwrap_or(IMAGE_SIZE.max(room_for_cages(table, scale)));
    let usual = if let TablePlace::Image(kind) = table.arguments.place { kind } else { "ext4" };
    let kind = FILE_SYSTEMS.iter().copied().find(|known| kind == Some(*known)).unwrap_or(usual);
    Ok(Source::Image { kind, bytes: bytes.max(room_for_inodes(kind, table, scale)) })
}

fn targets(table: &'static Table, wanted: &[String], check: bool) -> Result<Vec<&'static Target>, Failure> {
    let all: Vec<&str> = table.targets.iter().map(|target| target.id).collect();
    let mut ids: Vec<&str> = Vec::new();
    for word in wanted {
        match table.target(word) {
            Some(target) => ids.push(target.id),
            None if word == "all" => ids.extend(&all),
            None => return Err(Failure::usage(format!("no target {word}; there are: all, {}", all.join(", ")))),
        }
    }
    if wanted.is_empty() {
        ids.extend(if check { &all } else { table.default_targets });
    }
    let baselines: Vec<&str> = ids.iter().filter_map(|id| table.target(id)).map(|target| target.baseline).collect();
    Ok(table.targets.iter().filter(|target| ids.contains(&target.id) || baselines.contains(&target.id)).collect())
}

fn tests(table: &'static Table, wanted: &[String]) -> Result<Vec<&'static Test>, Failure> {
    for word in wanted {
        if table.test(word).is_none() && table.groups().iter().all(|group| group.id() != word) {
            let groups: Vec<&str> = table.groups().iter().map(|group| group.id()).collect();
            return Err(Failure::usage(format!("no test {word}; groups: {}; see --list for tests", groups.join(", "))));
        }
    }
    let chosen =
        |test: &Test| wanted.is_empty() || wanted.iter().any(|word| word == test.id || word == test.group.id());
    Ok(table.tests.iter().filter(|test| chosen(test)).collect())
}

fn user(name: Option<&str>) -> Result<Option<User>, Failure> {
    let path = Path::new("/etc/passwd");
    let text = fs::read_to_string(path).doing("reading", path)?;
    let number = |name: &str| env::var(name).ok().filter(|uid| uid != "0");
    let wanted = name.map(str::to_owned).or_else(|| number("SUDO_UID")).unwrap_or_else(|| "nobody".to_owned());
    match (find_user(&text, &wanted), name) {
        (None, Some(name)) => Err(Failure::new(format!("no user {name} in /etc/passwd"))),
        (Some(User { uid: 0, .. }), _) => Err(Failure::usage("--user must not be root")),
        (found, _) => Ok(found),
    }
}

fn find_user(passwd: &str, wanted: &str) -> Option<User> {
    passwd.lines().find_map(|line| {
        let mut words = line.split(':');
        let (name, _password, uid, gid) = (words.next()?, words.next()?, words.next()?, words.next()?);
        (name == wanted || uid == wanted).then_some(())?;
        Some(User { uid: uid.parse().ok()?, gid: gid.parse().ok()? })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::MIRROR;

    #[test]
    fn a_target_brings_its_baseline() {
        let ids = |words: &[&str]| -> Vec<&str> {
            let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
            targets(&MIRROR, &words, false).unwrap().iter().map(|target| target.id).collect()
        };
        assert_eq!(ids(&["nacre"]), ["direct", "nacre"]);
        assert_eq!(ids(&["nacre-user"]), ["direct-user", "nacre-user"]);
        assert_eq!(ids(&[]), MIRROR.default_targets);
        assert_eq!(ids(&["all"]).len(), MIRROR.targets.len());
        assert!(targets(&MIRROR, &["nonsense".to_owned()], false).is_err());
    }

    #[test]
    fn tests_by_group_and_name() {
        let chosen = tests(&MIRROR, &["mmap".to_owned(), "rename".to_owned()]).unwrap();
        let ids: Vec<&str> = chosen.iter().map(|test| test.id).collect();
        assert_eq!(ids, ["mmap-read", "mmap-write", "rename"]);
        assert!(tests(&MIRROR, &["nonsense".to_owned()]).is_err());
    }

    #[test]
    fn room_is_that_of_the_nearest_directory() {
        let directory = tempfile::tempdir().unwrap();
        assert!(free_at(&directory.path().join("not/yet")).unwrap() > 0);
        assert_eq!(free_at(Path::new("/proc")), Ok(0));
    }

    #[test]
    fn users_by_name_and_number() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\nann:x:1000:1001::/home/ann:/bin/sh\n";
        assert_eq!(find_user(passwd, "ann"), Some(User { uid: 1000, gid: 1001 }));
        assert_eq!(find_user(passwd, "1000"), Some(User { uid: 1000, gid: 1001 }));
        assert_eq!(find_user(passwd, "bob"), None);
    }
}
