//! The command line of `nacre bench` and the [`Plan`] that it becomes: pure data, no effects.
//!
//! `lib.rs` calls [`command`] for the grammar and [`plan`] for the meaning.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};

use crate::export::{Exports, Show};
use crate::failure::{Doing, Failure};
use crate::scale::{self, Scale, size};
use crate::table::{TABLES, Table, TablePlace, Test};
use crate::target::Target;

/// Size of the image of `--fs` unless one is given.
const IMAGE_SIZE: u64 = 8 << 30;
/// What `--fs` may be.
const FILE_SYSTEMS: [&str; 3] = ["xfs", "ext4", "btrfs"];

/// What the measured directory lies on.
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

/// An ordinary user, by numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct User {
    /// User number.
    pub uid: u32,
    /// Number of the user's own group.
    pub gid: u32,
}

/// Everything that a run needs to know.
#[derive(Debug)]
pub struct Plan {
    /// What is measured.
    pub table: &'static Table,
    /// On what.
    pub source: Source,
    /// Our directory.
    pub scratch: PathBuf,
    /// The program under test.
    pub nacre: PathBuf,
    /// The ordinary user for targets that want one, when we are root.
    pub user: Option<User>,
    /// How much.
    pub scale: Scale,
    /// Columns, baselines included.
    pub targets: Vec<&'static Target>,
    /// Rows.
    pub tests: Vec<&'static Test>,
    /// What to write at the end.
    pub exports: Exports,
    /// Whether a missed figure is an error.
    pub check: bool,
}

/// The grammar.
pub fn command() -> Command {
    let mut bench = Command::new("bench")
        .about("Measure a table of file-system operations on this machine, beside the directory itself and rivals")
        .subcommand_required(true)
        .arg_required_else_help(true);
    for table in TABLES {
        bench = bench.subcommand(table_command(table));
    }
    let show = Command::new("show").about("Print or export a result saved with --json again").arg(
        Arg::new("result")
            .value_name("FILE")
            .help("Result to read")
            .required(true)
            .value_parser(value_parser!(PathBuf)),
    );
    bench.subcommand(with_exports(show))
}

fn path(id: &'static str, value: &'static str, help: &'static str) -> Arg {
    Arg::new(id).long(id).value_name(value).help(help).value_parser(value_parser!(PathBuf))
}

fn list(id: &'static str, help: &'static str) -> Arg {
    Arg::new(id).long(id).value_name("LIST").help(help).value_delimiter(',')
}

fn flag(id: &'static str, help: &'static str) -> Arg {
    Arg::new(id).long(id).help(help).action(ArgAction::SetTrue)
}

fn table_command(table: &'static Table) -> Command {
    let command = Command::new(table.name)
        .about(table.title)
        .next_help_heading("Where")
        .arg(path("source", "DIR", "Measure in a fresh subdirectory of DIR").conflicts_with("fs"))
        .arg(Arg::new("fs").long("fs").value_name("TYPE").value_parser(FILE_SYSTEMS).help(match table.place {
            TablePlace::Image("xfs") => "Measure on a new file system on a loop device (root; default xfs)",
            TablePlace::Image(_) => "Measure on a new file system on a loop device (root; default ext4)",
            TablePlace::Scratch | TablePlace::Images => {
                "Measure on a new file system on a loop device (root; default: in the scratch directory itself)"
            }
        }))
        .arg(size("image-size", "Size of that file system (default 8G, sparse)"))
        .arg(path(
            "scratch",
            "DIR",
            "Directory of our own: new, empty, or left by an earlier run (default: a new one in the temporary directory)",
        ))
        .arg(path("nacre", "PROGRAM", "The nacre to measure (default: this one)"))
        .arg(
            Arg::new("user")
                .long("user")
                .value_name("NAME")
                .help("Ordinary user for the targets that need one (default: who called sudo, or nobody)"),
        )
        .next_help_heading("What")
        .arg(list("targets", "Columns: names, or `all`").conflicts_with("list"))
        .arg(list("tests", "Rows: names of tests or groups"))
        .arg(flag("list", "List the names of targets and tests and do nothing"))
        .next_help_heading("How much")
        .args(scale::arguments(table))
        .next_help_heading("Result")
        .arg(flag("check", "Exit with 1 if a figure that nacre promises is missed; measures every target unless some are chosen"));
    with_exports(command)
}

fn with_exports(command: Command) -> Command {
    command
        .next_help_heading("Result")
        .arg(
            Arg::new("show")
                .long("show")
                .value_name("AS")
                .value_parser(["percent", "ratio", "time"])
                .default_value("percent")
                .help("Cells of the terminal table"),
        )
        .arg(path("json", "FILE", "Write the result as JSON"))
        .arg(path("csv", "FILE", "Write the result as CSV"))
        .arg(path("html", "FILE", "Write one self-contained page with plots"))
        .arg(path("markdown", "FILE", "Put the table between its markers in FILE (made if missing)"))
        .arg(
            Arg::new("section")
                .long("section")
                .value_name("NAME")
                .requires("markdown")
                .value_parser(section)
                .help("Keep it there beside the table's other results, under this name"),
        )
}

/// A section's name stands in the markers, which are comments: nothing in it may end one.
fn section(text: &str) -> Result<String, Failure> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    match text.starts_with(plain) && text.split('-').all(|word| !word.is_empty() && word.chars().all(plain)) {
        true => Ok(text.to_owned()),
        false => Err(Failure::usage("small letters and digits, words joined by '-'")),
    }
}

/// The exports asked for.
pub fn exports(matches: &ArgMatches) -> Exports {
    let show = match matches.get_one::<String>("show").map(String::as_str) {
        Some("ratio") => Show::Ratio,
        Some("time") => Show::Time,
        _ => Show::Percent,
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

/// The meaning of a table's arguments.
pub fn plan(table: &'static Table, matches: &ArgMatches) -> Result<Plan, Failure> {
    let root = rustix::process::geteuid().is_root();
    let temporary = env::temp_dir();
    let scratch = matches.get_one::<PathBuf>("scratch").cloned();
    let scratch = scratch.unwrap_or_else(|| temporary.join(format!("nacre-bench-scratch-{}", std::process::id())));
    let nacre = match matches.get_one::<PathBuf>("nacre") {
        Some(path) => fs::canonicalize(path).doing("resolving", path)?,
        None => env::current_exe().map_err(|error| Failure::new(format!("finding this program: {error}")))?,
    };
    let check = matches.get_flag("check");
    let scale = scale::scale(table, matches, free_at(matches.get_one::<PathBuf>("source").unwrap_or(&scratch))?)?;
    Ok(Plan {
        table,
        source: source(table, matches, &scale, root, &temporary)?,
        scratch,
        nacre,
        user: user(matches.get_one::<String>("user").map(String::as_str))?,
        scale,
        targets: targets(table, &words(matches, "targets"), check)?,
        tests: tests(table, &words(matches, "tests"))?,
        exports: exports(matches),
        check,
    })
}

/// Bytes free for us where `path` is, or will be.
fn free_at(path: &Path) -> Result<u64, Failure> {
    let path = std::path::absolute(path).doing("resolving", path)?;
    let there = path.ancestors().find(|ancestor| ancestor.exists()).unwrap_or(Path::new("/"));
    let room = rustix::fs::statvfs(there).doing("asking for the free space of", there)?;
    Ok(room.f_bavail.saturating_mul(room.f_frsize))
}

/// An image must hold what the largest cage may hold, and the images of file systems in it.
fn room_for_cages(table: &Table, scale: &Scale) -> u64 {
    match table.place {
        TablePlace::Images => scale.image.saturating_add(IMAGE_SIZE),
        _ if table.targets.iter().any(Target::is_bounded) => 2 * scale.cage.max(scale.fill),
        _ => 0,
    }
}

/// ext4 sets its inodes aside when it is made, one for each 16 KiB.
fn room_for_inodes(kind: &str, table: &Table, scale: &Scale) -> u64 {
    if kind == "ext4" && table.amounts.contains(&"names") { 2 * scale.names * (16 << 10) } else { 0 }
}

fn words(matches: &ArgMatches, id: &str) -> Vec<String> {
    matches.get_many::<String>(id).into_iter().flatten().cloned().collect()
}

fn source(table: &Table, matches: &ArgMatches, scale: &Scale, root: bool, temporary: &Path) -> Result<Source, Failure> {
    if let Some(directory) = matches.get_one::<PathBuf>("source") {
        return Ok(Source::Directory(fs::canonicalize(directory).doing("resolving", directory)?));
    }
    let kind = matches.get_one::<String>("fs").map(String::as_str);
    if kind.is_none() && matches!(table.place, TablePlace::Scratch | TablePlace::Images) {
        return Ok(Source::Scratch);
    }
    if !root && kind.is_none() {
        return Ok(Source::Directory(temporary.to_owned()));
    }
    if !root {
        return Err(Failure::new("--fs needs root; use --source"));
    }
    let bytes = matches.get_one::<u64>("image-size").copied().unwrap_or(IMAGE_SIZE.max(room_for_cages(table, scale)));
    let usual = if let TablePlace::Image(kind) = table.place { kind } else { "ext4" };
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
    fn the_grammar_is_sound() {
        command().debug_assert();
    }

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
