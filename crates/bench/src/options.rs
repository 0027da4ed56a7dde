//! The command line of `nacre bench` and the [`Plan`] that it becomes: pure data, no effects.
//!
//! `lib.rs` calls [`command`] for the grammar and [`plan`] for the meaning.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};

use crate::export::{Exports, Show};
use crate::failure::{Doing, Failure};
use crate::report::Point;
use crate::table::{TABLES, Table, Test};
use crate::target::Target;

const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;
const GIB: u64 = 1024 * MIB;
/// iozone leaves out records below this for files above [`SMALL_RECORD_FILES`]: they would dominate the run.
const SMALL_RECORDS: u64 = 64 * KIB;
const SMALL_RECORD_FILES: u64 = 32 * MIB;

/// What the measured directory lies on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A fresh subdirectory of this directory.
    Directory(PathBuf),
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

/// How much work each test does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scale {
    /// Rounds; each target is measured once a round.
    pub rounds: u32,
    /// Points of iozone's automatic mode.
    pub points: Vec<Point>,
    /// Bytes of the page-cache file.
    pub cache: u64,
    /// Small files.
    pub files: u64,
    /// Files of the big directory.
    pub listing: u64,
    /// Files of the source tree.
    pub tree: u64,
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
    let show = Command::new("show")
        .about("Print or export a result saved with --json again")
        .arg(Arg::new("result").value_name("FILE").help("Result to read").required(true).value_parser(value_parser!(PathBuf)));
    bench.subcommand(with_exports(show))
}

fn path(id: &'static str, value: &'static str, help: &'static str) -> Arg {
    Arg::new(id).long(id).value_name(value).help(help).value_parser(value_parser!(PathBuf))
}

fn number(id: &'static str, help: &'static str) -> Arg {
    Arg::new(id).long(id).value_name("N").help(help).value_parser(value_parser!(u64).range(1..))
}

fn size(id: &'static str, help: &'static str) -> Arg {
    Arg::new(id).long(id).value_name("SIZE").help(help).value_parser(parse_size)
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
        .arg(
            Arg::new("fs")
                .long("fs")
                .value_name("TYPE")
                .value_parser(["xfs", "ext4"])
                .help("Measure on a new file system on a loop device (root; default ext4)"),
        )
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
        .arg(flag("quick", "About a minute: small files, three rounds").conflicts_with("full"))
        .arg(flag("full", "Every file and record size of iozone's automatic mode: hours"))
        .arg(number("rounds", "Rounds of which the median counts (default 5)"))
        .arg(list("sizes", "File sizes of the iozone tests").value_parser(parse_size))
        .arg(list("records", "Record sizes of the iozone tests").value_parser(parse_size))
        .arg(size("cache", "Size of the page-cache file"))
        .arg(number("files", "Small files"))
        .arg(number("listing", "Files of the big directory"))
        .arg(number("tree", "Files of the source tree"))
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
}

/// The exports asked for.
pub fn exports(matches: &ArgMatches) -> Exports {
    let show = match matches.get_one::<String>("show").map(String::as_str) {
        Some("ratio") => Show::Ratio,
        Some("time") => Show::Time,
        _ => Show::Percent,
    };
    let file = |id: &str| matches.get_one::<PathBuf>(id).cloned();
    Exports { show, json: file("json"), csv: file("csv"), html: file("html"), markdown: file("markdown") }
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
    Ok(Plan {
        table,
        source: source(matches, root, &temporary)?,
        scratch,
        nacre,
        user: user(matches.get_one::<String>("user").map(String::as_str))?,
        scale: scale(matches)?,
        targets: targets(table, &words(matches, "targets"), check)?,
        tests: tests(table, &words(matches, "tests"))?,
        exports: exports(matches),
        check,
    })
}

fn words(matches: &ArgMatches, id: &str) -> Vec<String> {
    matches.get_many::<String>(id).into_iter().flatten().cloned().collect()
}

fn source(matches: &ArgMatches, root: bool, temporary: &Path) -> Result<Source, Failure> {
    if let Some(directory) = matches.get_one::<PathBuf>("source") {
        return Ok(Source::Directory(fs::canonicalize(directory).doing("resolving", directory)?));
    }
    let kind = matches.get_one::<String>("fs").map(String::as_str);
    if !root && kind.is_none() {
        return Ok(Source::Directory(temporary.to_owned()));
    }
    if !root {
        return Err(Failure::new("--fs needs root; use --source"));
    }
    let bytes = matches.get_one::<u64>("image-size").copied().unwrap_or(8 * GIB);
    Ok(Source::Image { kind: if kind == Some("xfs") { "xfs" } else { "ext4" }, bytes })
}

fn scale(matches: &ArgMatches) -> Result<Scale, Failure> {
    let (quick, full) = (matches.get_flag("quick"), matches.get_flag("full"));
    let mut scale = if quick { quick_scale() } else { usual_scale() };
    if full {
        scale.points = points(&doubling(64 * KIB, 512 * MIB), &doubling(4 * KIB, 16 * MIB), true);
    }
    let sizes: Vec<u64> = matches.get_many::<u64>("sizes").into_iter().flatten().copied().collect();
    let records: Vec<u64> = matches.get_many::<u64>("records").into_iter().flatten().copied().collect();
    if !sizes.is_empty() || !records.is_empty() {
        let sizes = if sizes.is_empty() { vec![MIB, 16 * MIB] } else { sizes };
        let records = if records.is_empty() { vec![4 * KIB, 64 * KIB, MIB] } else { records };
        scale.points = points(&sizes, &records, false);
        if scale.points.is_empty() {
            return Err(Failure::new("no record size divides a file size"));
        }
    }
    let number = |id: &str| matches.get_one::<u64>(id).copied();
    if let Some(rounds) = number("rounds") {
        scale.rounds = u32::try_from(rounds).map_err(|_| Failure::new("too many rounds"))?;
    }
    scale.cache = number("cache").unwrap_or(scale.cache);
    if scale.cache < MIB || scale.cache % MIB != 0 {
        return Err(Failure::new("--cache must be a multiple of 1M"));
    }
    scale.files = number("files").unwrap_or(scale.files);
    scale.listing = number("listing").unwrap_or(scale.listing);
    scale.tree = number("tree").unwrap_or(scale.tree);
    Ok(scale)
}

fn usual_scale() -> Scale {
    let sizes = [64 * KIB, MIB, 16 * MIB, 128 * MIB];
    let points = points(&sizes, &[4 * KIB, 64 * KIB, MIB, 16 * MIB], true);
    Scale { rounds: 5, points, cache: 256 * MIB, files: 20_000, listing: 200_000, tree: 1_650 }
}

fn quick_scale() -> Scale {
    let points = vec![Point { file: MIB, record: 4 * KIB }, Point { file: 16 * MIB, record: 64 * KIB }];
    Scale { rounds: 3, points, cache: 32 * MIB, files: 2_000, listing: 5_000, tree: 400 }
}

fn doubling(from: u64, to: u64) -> Vec<u64> {
    std::iter::successors(Some(from), |size| size.checked_mul(2)).take_while(|size| *size <= to).collect()
}

/// Every pair of a file size and a record size that divides it; `as_iozone` leaves out small records in big files.
fn points(sizes: &[u64], records: &[u64], as_iozone: bool) -> Vec<Point> {
    let mut points = Vec::new();
    for file in sizes {
        for record in records {
            let dominated = as_iozone && *file > SMALL_RECORD_FILES && *record < SMALL_RECORDS;
            if record <= file && file.is_multiple_of(*record) && !dominated {
                points.push(Point { file: *file, record: *record });
            }
        }
    }
    points
}

fn targets(table: &'static Table, wanted: &[String], check: bool) -> Result<Vec<&'static Target>, Failure> {
    let all: Vec<&str> = table.targets.iter().map(|target| target.id).collect();
    let mut ids: Vec<&str> = Vec::new();
    for word in wanted {
        match table.target(word) {
            Some(target) => ids.push(target.id),
            None if word == "all" => ids.extend(&all),
            None => return Err(Failure::new(format!("no target {word}; there are: all, {}", all.join(", ")))),
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
            return Err(Failure::new(format!("no test {word}; groups: {}; see --list for tests", groups.join(", "))));
        }
    }
    let chosen = |test: &Test| wanted.is_empty() || wanted.iter().any(|word| word == test.id || word == test.group.id());
    Ok(table.tests.iter().filter(|test| chosen(test)).collect())
}

fn user(name: Option<&str>) -> Result<Option<User>, Failure> {
    let path = Path::new("/etc/passwd");
    let text = fs::read_to_string(path).doing("reading", path)?;
    let number = |name: &str| env::var(name).ok().filter(|uid| uid != "0");
    let wanted = name.map(str::to_owned).or_else(|| number("SUDO_UID")).unwrap_or_else(|| "nobody".to_owned());
    match (find_user(&text, &wanted), name) {
        (None, Some(name)) => Err(Failure::new(format!("no user {name} in /etc/passwd"))),
        (Some(User { uid: 0, .. }), _) => Err(Failure::new("--user must not be root")),
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

/// A size with an optional suffix K, M or G (powers of 1024).
pub fn parse_size(text: &str) -> Result<u64, String> {
    let (digits, factor) = match text.char_indices().last() {
        Some((at, 'k' | 'K')) => (text.get(..at), KIB),
        Some((at, 'm' | 'M')) => (text.get(..at), MIB),
        Some((at, 'g' | 'G')) => (text.get(..at), GIB),
        _ => (Some(text), 1),
    };
    let number = digits.and_then(|digits| digits.parse::<u64>().ok()).filter(|number| *number > 0);
    number.and_then(|number| number.checked_mul(factor)).ok_or_else(|| format!("{text} is not a size such as 64K or 16M"))
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
    fn sizes() {
        assert_eq!(parse_size("64K"), Ok(65536));
        assert_eq!(parse_size("16m"), Ok(16 << 20));
        assert_eq!(parse_size("512"), Ok(512));
        for bad in ["", "K", "0", "-1", "1T", "1.5M", "99999999999999999999", "99999999999999G"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn full_mode_is_iozones() {
        let points = points(&doubling(64 * KIB, 512 * MIB), &doubling(4 * KIB, 16 * MIB), true);
        assert_eq!(points.first(), Some(&Point { file: 64 * KIB, record: 4 * KIB }));
        assert_eq!(points.last(), Some(&Point { file: 512 * MIB, record: 16 * MIB }));
        // Ten file sizes up to 32 MiB with 5 to 13 records, then four with the nine records from 64 KiB.
        assert_eq!(points.len(), (5 + 6 + 7 + 8 + 9 + 10 + 11 + 12 + 13 + 13) + 4 * 9);
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
    fn users_by_name_and_number() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\nann:x:1000:1001::/home/ann:/bin/sh\n";
        assert_eq!(find_user(passwd, "ann"), Some(User { uid: 1000, gid: 1001 }));
        assert_eq!(find_user(passwd, "1000"), Some(User { uid: 1000, gid: 1001 }));
        assert_eq!(find_user(passwd, "bob"), None);
    }
}
