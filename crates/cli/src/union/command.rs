//! The commands of unions, as part of the table in [`crate::commands`]. Pure: arguments in, verbs
//! out.

use super::plan;
use crate::{
    clap_args::{self, View},
    libfuse_args::Unknown,
    options::{Opt, Taker},
    plan::Asked,
};
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use nacre_daemon::{failure::Failure, union::requests::BranchPosition};
use nacre_stack::spec::BranchSpec;
use nacre_union::{BalanceRules, BranchMode, parse_size};
use std::{
    ffi::{OsStr, OsString},
    os::unix::ffi::OsStrExt,
    path::PathBuf,
};

/// A verb on existing unions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UnionVerb {
    /// Show branches.
    List {
        /// Columns and format.
        view: View,
        /// The mount points; empty: all.
        mountpoints: Vec<PathBuf>,
    },
    /// Show on which branch files are.
    Where {
        /// As JSON.
        json: bool,
        /// All branches, not only the one that shows the file.
        all: bool,
        /// The files.
        paths: Vec<PathBuf>,
    },
    /// Explain the choice of a policy.
    Explain {
        /// As JSON.
        json: bool,
        /// For a new directory, not a file.
        directory: bool,
        /// Path of the new file.
        path: PathBuf,
    },
    /// Check for remainders of a crash.
    Check {
        /// As JSON.
        json: bool,
        /// Repair them.
        repair: bool,
        /// A mount point, or branches.
        what: OsString,
    },
    /// Add a branch.
    Add {
        /// The mount point.
        mountpoint: PathBuf,
        /// The branch.
        branch: BranchSpec,
        /// Position of the new branch.
        place: BranchPosition,
    },
    /// Remove a branch.
    Remove {
        /// The mount point.
        mountpoint: PathBuf,
        /// The branch.
        branch: PathBuf,
        /// Even while files on it are open.
        force: bool,
    },
    /// Change the attributes of a branch.
    Modify {
        /// The mount point.
        mountpoint: PathBuf,
        /// The branch.
        branch: PathBuf,
        /// The attributes.
        mode: BranchMode,
    },
    /// Move files to another branch.
    Move {
        /// To a higher branch instead of a lower one.
        up: bool,
        /// The files.
        paths: Vec<PathBuf>,
    },
    /// Show or change tiers.
    Tier {
        /// The mount point.
        mountpoint: PathBuf,
        /// As JSON.
        json: bool,
        /// The action.
        what: TierVerb,
    },
    /// Even out the use of branches.
    Balance {
        /// The mount point.
        mountpoint: PathBuf,
        /// Files that may be moved, and the target balance.
        rules: BalanceRules,
        /// Start or stop.
        how: DrainHow,
    },
    /// Move all files off a branch.
    Drain {
        /// The mount point.
        mountpoint: PathBuf,
        /// The branch.
        branch: PathBuf,
        /// Start or stop.
        how: DrainHow,
    },
}

/// A verb on tiers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TierVerb {
    /// Show the state of the tiers.
    Status,
    /// Replace all rules.
    Rules(String),
    /// Check all files now.
    Run {
        /// Only report the moves.
        dry: bool,
    },
}

/// Action on a drain or a balance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrainHow {
    /// Start it and wait for its end.
    Wait,
    /// Start it.
    Start,
    /// Stop it.
    Stop,
}

/// The command line of `nacre union`.
pub fn command() -> Command {
    let words = "Words of unions (create=mfs, udba=notify, whiteout=xattr, ...: docs/union.md) and of the mount: ro, nodev, noatime, fsname=NAME, ... (may be repeated)";
    let options = clap_args::options(|row| row.is_for(Taker::Union))
        .into_iter()
        .map(|arg| if arg.get_id() == "-o" { arg.help(words) } else { arg });
    Command::new("union")
        .about("Show several directories as one: a writable one over read-only ones, or a pool of disks")
        .after_help(
            "Examples:\n  nacre union /upper=rw:/lower=ro /mnt/both\n  nacre union /ssd:/disk1:/disk2 /mnt/pool -o create=mfs,cpup=bu\n  nacre union /disk1:/disk2 /mnt/pool -o cache.files=off,category.create=pfrd,func.getattr=newest,dropcacheonclose=false\n  nacre union -o lowerdir=/layer2:/layer1,upperdir=/changes /mnt/merged\n  nacre umount /mnt/both\n\nBranches are written from the top. Attributes: rw, ro, rr, nc, each with +wh, +minfree=SIZE, ... The first branch is rw and all others are ro where nothing is said; with mergerfs' words (category.create=) all are rw. A backslash takes the next character of a path literally (\\:, \\=).",
        )
        .args_conflicts_with_subcommands(true)
        .subcommand_negates_reqs(true)
        .disable_help_subcommand(true)
        .arg(clap_args::path("BRANCHES", "The branches, from the top: PATH[=ATTRIBUTES][:PATH[=ATTRIBUTES]]..."))
        .arg(clap_args::path("MOUNTPOINT", "Where to show them: an existing directory").required(false))
        // Accepted only so that too many paths get their own error message.
        .arg(clap_args::path("MORE", "").required(false).num_args(0..).action(ArgAction::Append).hide(true))
        .args(options)
        .subcommand(list())
        .subcommand(location())
        .subcommand(explain())
        .subcommand(check())
        .subcommand(add())
        .subcommand(del())
        .subcommand(modify())
        .subcommand(drain())
        .subcommand(balance())
        .subcommand(tier())
        .subcommand(mover("mvup", "Move files to a higher branch", "nacre union mvup /mnt/pool/hot.db"))
        .subcommand(mover("mvdown", "Move files to a lower branch", "nacre union mvdown /mnt/pool/old.iso"))
}

fn tier() -> Command {
    Command::new("tier")
        .about("Show or change what is kept on which tier: the branches with +tier, the fastest on top")
        .after_help("Examples:\n  nacre union /ssd=rw+tier:/disk=rw+tier /mnt/pool -o tier.high=90,tier.low=70\n  nacre union tier /mnt/pool\n  nacre union tier /mnt/pool high=90,low=70,age=30d,keep=*.db\n  nacre union tier --dry-run /mnt/pool\n  nacre union tier --run /mnt/pool\n\nRULES are all rules from then on: high, low (percent), age, heat, min, max, keep, hot, cold, rate, every, scan.")
        .arg(json())
        .arg(clap_args::path("MOUNTPOINT", "Of which union"))
        .arg(Arg::new("RULES").required(false).conflicts_with_all(["run", "dry-run"]).help("WORD=VALUE,...: these rules in place of the present ones"))
        .arg(flag("run", None, "Look at all files now and move what has to go").conflicts_with("dry-run"))
        .arg(flag("dry-run", Some('n'), "Say what would be moved, and why"))
}

fn mover(name: &'static str, about: &'static str, example: &'static str) -> Command {
    Command::new(name)
        .about(about)
        .after_help(format!(
            "Examples:\n  {example}\n\nIt can be used meanwhile; one that is open for writing stays where it is."
        ))
        .arg(clap_args::path("PATH", "Which files of unions").num_args(1..).action(ArgAction::Append))
}

fn list() -> Command {
    clap_args::view_arguments(Command::new("list"))
        .about("List the branches of unions: attributes, space, open files")
        .after_help("Examples:\n  nacre union list\n  nacre union list /mnt/pool\n  nacre union list -H -p -o branch,mode,free /mnt/pool")
        .arg(clap_args::path("MOUNTPOINT", "Of which unions [default: all]").required(false).num_args(0..).action(ArgAction::Append))
}

fn location() -> Command {
    Command::new("where")
        .about("Print where files really are: their paths on the branches that show them")
        .after_help("Examples:\n  nacre union where /mnt/pool/movie.mkv\n  nacre union where --all /mnt/pool/etc/fstab\n  rm \"$(nacre union where /mnt/pool/big)\"")
        .arg(json())
        .arg(flag("all", Some('a'), "All branches that have something there, with what it is"))
        .arg(clap_args::path("PATH", "Which files of unions").num_args(1..).action(ArgAction::Append))
}

fn explain() -> Command {
    Command::new("explain")
        .about("Say where a file would be created, or changed, and why")
        .after_help("Examples:\n  nacre union explain /mnt/pool/new.iso\n  nacre union explain --directory /mnt/pool/photos/2026")
        .arg(json())
        .arg(flag("directory", Some('d'), "What would be created is a directory"))
        .arg(clap_args::path("PATH", "Which file of a union: one that is there, or not yet"))
}

fn check() -> Command {
    Command::new("check")
        .about("Look for what a crash has left behind on the branches of a union")
        .after_help("Examples:\n  nacre union check /mnt/pool\n  nacre union check --repair /mnt/pool\n  nacre union check /upper=rw:/lower=ro\n\nNothing that is found hides or shows a wrong file. The exit code is 1 where something is found and not put right.")
        .arg(json())
        .arg(flag("repair", None, "Put right what is found"))
        .arg(clap_args::path("WHAT", "A mount point, or the branches of a union that is not mounted"))
}

fn add() -> Command {
    Command::new("add")
        .about("Add a branch to a mounted union")
        .after_help("Examples:\n  nacre union add /mnt/pool /disk3=rw\n  nacre union add --top /mnt/both /changes=rw\n  nacre union add --position 2 /mnt/both /more=ro+wh\n\nWithout attributes the branch is ro.")
        .arg(clap_args::path("MOUNTPOINT", "To which union"))
        .arg(clap_args::path("BRANCH", "PATH[=ATTRIBUTES]"))
        .arg(flag("top", None, "Above all others").conflicts_with_all(["bottom", "position"]))
        .arg(flag("bottom", None, "Below all others (the default)").conflicts_with("position"))
        .arg(
            Arg::new("position")
                .long("position")
                .value_name("N")
                .value_parser(value_parser!(u8).range(1..))
                .help("As the Nth from the top"),
        )
}

fn del() -> Command {
    Command::new("del")
        .about("Take a branch out of a mounted union; its files stay on it")
        .after_help("Examples:\n  nacre union del /mnt/pool /disk1\n\n`nacre union drain` moves its files to the others first.")
        .arg(clap_args::path("MOUNTPOINT", "Of which union"))
        .arg(clap_args::path("BRANCH", "Its path"))
        .arg(flag(
            "force",
            Some('f'),
            "Also while files on it are open (they can be used until they are closed), and when something on it would no longer be seen",
        ))
}

fn modify() -> Command {
    Command::new("mod")
        .about("Give a branch of a mounted union other attributes")
        .after_help(
            "Examples:\n  nacre union mod /mnt/both /upper=ro+wh\n  nacre union mod /mnt/pool /disk1=nc+minfree=10G",
        )
        .arg(clap_args::path("MOUNTPOINT", "Of which union"))
        .arg(clap_args::path("BRANCH", "PATH=ATTRIBUTES"))
}

fn drain() -> Command {
    Command::new("drain")
        .about("Move all files off a branch of a mounted union to the others, while they are used")
        .after_help("Examples:\n  nacre union drain /mnt/pool /disk1 && nacre union del /mnt/pool /disk1\n  nacre union drain --no-wait /mnt/pool /disk1\n  nacre union drain --stop /mnt/pool /disk1\n\nNothing new is put on the branch from then on. Interrupting the command does not stop the move.")
        .arg(clap_args::path("MOUNTPOINT", "Of which union"))
        .arg(clap_args::path("BRANCH", "Its path"))
        .arg(flag("no-wait", None, "Return at once").conflicts_with("stop"))
        .arg(flag("stop", None, "Stop a move that is under way"))
}

fn balance() -> Command {
    let patterns = |name: &'static str, letter: char, help: &'static str| {
        Arg::new(name).long(name).short(letter).value_name("PATTERN").action(ArgAction::Append).help(help)
    };
    let size = |name: &'static str, help: &'static str| Arg::new(name).long(name).value_name("SIZE").help(help);
    Command::new("balance")
        .about("Even out how full the branches of a mounted union are, while they are used")
        .after_help("Examples:\n  nacre union balance /mnt/pool\n  nacre union balance --percent 10 --exclude '*.db' --min 1M /mnt/pool\n  nacre union balance --include 'movies/**' --no-wait /mnt/pool\n  nacre union balance --stop /mnt/pool\n\nFiles go from the fullest branch to the emptiest until they differ by no more than PERCENT. A file that is open for writing, or pinned, stays. Interrupting the command does not stop the move.")
        .arg(clap_args::path("MOUNTPOINT", "Of which union"))
        .arg(Arg::new("percent").long("percent").short('p').value_name("PERCENT").default_value("2").help("By how much the use of branches may differ"))
        .arg(patterns("include", 'i', "Only files that match: '*.iso', or a path from the union's top: 'movies/**' (may be repeated)"))
        .arg(patterns("exclude", 'e', "No files that match (may be repeated)"))
        .arg(size("min", "No smaller files: bytes, or with K, M, G, T"))
        .arg(size("max", "No larger files"))
        .arg(flag("no-wait", None, "Return at once").conflicts_with("stop"))
        .arg(flag("stop", None, "Stop a balance that is under way"))
}

fn balance_rules(matches: &ArgMatches) -> Result<BalanceRules, Failure> {
    let text = |name: &str| matches.get_one::<String>(name);
    let wrong = |name: &str, error: &dyn std::fmt::Display| Failure::usage(format!("--{name}: {error}"));
    let size = |name: &str| text(name).map(|text| parse_size(text)).transpose().map_err(|error| wrong(name, &error));
    let patterns = |name: &str| {
        let given = matches.get_many::<String>(name).into_iter().flatten();
        given
            .map(|text| BalanceRules::pattern(text))
            .collect::<Result<Vec<_>, _>>()
            .map_err(|error| wrong(name, &error))
    };
    let percent = text("percent").map_or("2", |text| text.trim_end_matches('%'));
    let spread = percent.parse::<f64>().ok().filter(|percent| (0.0..=100.0).contains(percent));
    let spread = spread
        .ok_or_else(|| wrong("percent", &format!("\"{}\" is no percentage from 0 to 100", percent.escape_debug())))?;
    Ok(BalanceRules {
        spread: (spread * 100.0).round() as u32,
        min_size: size("min")?.unwrap_or(0),
        max_size: size("max")?,
        include: patterns("include")?,
        exclude: patterns("exclude")?,
    })
}

fn how(matches: &ArgMatches) -> DrainHow {
    match (matches.get_flag("no-wait"), matches.get_flag("stop")) {
        (_, true) => DrainHow::Stop,
        (true, _) => DrainHow::Start,
        _ => DrainHow::Wait,
    }
}

fn json() -> Arg {
    flag("json", None, "Everything, as JSON")
}

fn flag(name: &'static str, letter: Option<char>, help: &'static str) -> Arg {
    let arg = Arg::new(name).long(name).action(ArgAction::SetTrue).help(help);
    if let Some(letter) = letter { arg.short(letter) } else { arg }
}

/// Parses the matched arguments of `nacre union`.
///
/// # Errors
/// A value that does not fit, or options that cannot go together.
pub fn parse(matches: &ArgMatches) -> Result<Asked<UnionVerb>, Failure> {
    match matches.subcommand() {
        None => {
            let (words, options) =
                clap_args::raw(matches).into_iter().partition::<Vec<_>, _>(|given| given.option == Opt::Words);
            let texts: Vec<OsString> = words.into_iter().map(|given| given.value).collect();
            let positionals = ["BRANCHES", "MOUNTPOINT", "MORE"]
                .into_iter()
                .flat_map(|name| matches.get_many::<OsString>(name))
                .flatten()
                .cloned();
            Ok(Asked::Mount(plan::union(
                "nacre",
                options,
                plan::read_words(&texts, Unknown::Refuse)?,
                positionals.collect(),
            )?))
        }
        Some((verb, matches)) => parse_verb(verb, matches).map(Asked::Verb),
    }
}

fn parse_verb(verb: &str, matches: &ArgMatches) -> Result<UnionVerb, Failure> {
    let many = |name: &str| matches.get_many::<OsString>(name).into_iter().flatten().map(PathBuf::from).collect();
    let mountpoint = || PathBuf::from(clap_args::one(matches, "MOUNTPOINT"));
    let branch = || PathBuf::from(clap_args::one(matches, "BRANCH"));
    Ok(match verb {
        "list" => UnionVerb::List { view: clap_args::view(matches), mountpoints: many("MOUNTPOINT") },
        "where" => {
            UnionVerb::Where { json: matches.get_flag("json"), all: matches.get_flag("all"), paths: many("PATH") }
        }
        "explain" => UnionVerb::Explain {
            json: matches.get_flag("json"),
            directory: matches.get_flag("directory"),
            path: PathBuf::from(clap_args::one(matches, "PATH")),
        },
        "check" => UnionVerb::Check {
            json: matches.get_flag("json"),
            repair: matches.get_flag("repair"),
            what: clap_args::one(matches, "WHAT"),
        },
        "add" => {
            let place = match matches.get_one::<u8>("position") {
                Some(place) => BranchPosition::At(usize::from(*place)),
                None if matches.get_flag("top") => BranchPosition::Top,
                None => BranchPosition::Bottom,
            };
            let branch = spec(&clap_args::one(matches, "BRANCH"), BranchMode::ro())?;
            UnionVerb::Add { mountpoint: mountpoint(), branch, place }
        }
        "del" => UnionVerb::Remove { mountpoint: mountpoint(), branch: branch(), force: matches.get_flag("force") },
        "mod" => {
            let text = clap_args::one(matches, "BRANCH");
            let given = spec(&text, BranchMode::ro())?;
            if spec(&text, BranchMode::rw())? != given {
                return Err(Failure::usage("BRANCH has no attributes: which shall it have?")
                    .next("as in `nacre union mod /mnt /disk=ro+wh`"));
            }
            UnionVerb::Modify { mountpoint: mountpoint(), branch: given.name(), mode: given.mode }
        }
        "mvup" | "mvdown" => UnionVerb::Move { up: verb == "mvup", paths: many("PATH") },
        "tier" => {
            let what = match (matches.get_one::<String>("RULES"), matches.get_flag("run"), matches.get_flag("dry-run"))
            {
                (Some(rules), ..) => TierVerb::Rules(rules.clone()),
                (None, false, false) => TierVerb::Status,
                (None, _, dry) => TierVerb::Run { dry },
            };
            UnionVerb::Tier { mountpoint: mountpoint(), json: matches.get_flag("json"), what }
        }
        "drain" => UnionVerb::Drain { mountpoint: mountpoint(), branch: branch(), how: how(matches) },
        "balance" => UnionVerb::Balance { mountpoint: mountpoint(), rules: balance_rules(matches)?, how: how(matches) },
        other => return Err(Failure::usage(format!("unknown command {other}"))),
    })
}

fn spec(text: &OsStr, default: BranchMode) -> Result<BranchSpec, Failure> {
    BranchSpec::parse(text.as_bytes(), default).map_err(|error| Failure::usage(format!("BRANCH: {error}")))
}
