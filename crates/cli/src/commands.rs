//! The one table of commands of `nacre`: its help, shell completions and man pages are generated
//! from it.
//!
//! The options of mounts come from the table in [`crate::options`]. Pure: arguments in, an
//! [`Invocation`] out.

use crate::{
    cage::command::{self as cage, CageVerb},
    clap_args::{View, all_users, given, json, many, mounts, one, options, path, view, view_arguments, words_argument},
    completion,
    copy::{self, CopyCommand},
    fs::command::{self as fs, FsVerb},
    options::{Spelling, Taker},
    plan::{self, Asked, Plan},
    pool::{self, verb::PoolVerb},
    settings::Settings,
    top::{TopOrder, tables::Tab},
    union::command::{self as union, UnionVerb},
    workspace::command::{self as workspace, WorkspaceVerb},
};
use clap::{Arg, ArgAction, ArgMatches, Command, error::ErrorKind, value_parser};
use clap_complete::Shell;
use nacre_daemon::failure::Failure;
use std::{ffi::OsString, path::PathBuf};

/// The refusal of a first word that is a command of zfs(8), zpool(8) or mount(8), not of `nacre`.
/// It names the command of `nacre` that does the same, from the table of commands.
#[must_use]
pub fn foreign(error: &clap::Error, table: &Command, arguments: &[OsString]) -> Option<Failure> {
    if error.kind() != ErrorKind::InvalidSubcommand {
        return None;
    }
    let word = arguments.first()?.to_str()?;
    let tip = match word {
        "zfs" => "nacre fs --help lists the commands of zfs".to_owned(),
        "zpool" => "nacre pool --help lists the commands of zpool".to_owned(),
        "list" | "ls" => {
            "nacre status lists mounts, nacre pool list pools, nacre fs list their file systems".to_owned()
        }
        "unmount" => "nacre umount unmounts; nacre fs unmount unmounts file systems of pools by name".to_owned(),
        "create" => "nacre pool create makes a pool, nacre fs create a file system in it".to_owned(),
        "snapshot" => "nacre fs snapshot POOL/FS@NAME makes a snapshot".to_owned(),
        word => {
            let has_verb = |family: &&str| {
                let verbs = table.find_subcommand(family);
                verbs.is_some_and(|verbs| verbs.find_subcommand(word).is_some())
            };
            let families = ["pool", "fs", "cage", "union", "workspace"].into_iter().filter(has_verb);
            let commands: Vec<String> = families.map(|family| format!("nacre {family} {word}")).collect();
            if commands.is_empty() {
                return None;
            }
            format!("did you mean {}?", commands.join(" or "))
        }
    };
    Some(Failure::usage(format!("unrecognized command '{word}'")).next(tip))
}

/// A parsed command line of `nacre`.
#[derive(Debug)]
pub enum Invocation {
    /// Mount something, or print the help or version of a mount program.
    Mount(Plan),
    /// Unmount.
    Umount {
        /// Even while the mount is in use.
        lazy: bool,
        /// The mount points.
        mountpoints: Vec<PathBuf>,
    },
    /// Restart the processes of mounts as this version of the program, without unmounting.
    Upgrade {
        /// Another program than this one.
        program: Option<PathBuf>,
        /// The mount points; empty: all.
        mountpoints: Vec<PathBuf>,
    },
    /// Show mounts.
    Status {
        /// Columns and format.
        view: View,
        /// The mount points; empty: all.
        mountpoints: Vec<PathBuf>,
    },
    /// Show activity repeatedly.
    Top(TopOrder),
    /// A command on existing cages.
    Cage(CageVerb),
    /// A command on existing unions.
    Union(UnionVerb),
    /// A command on workspaces.
    Workspace(WorkspaceVerb),
    /// A command on pools.
    Pool(PoolVerb),
    /// A command on the file systems of pools.
    Fs(FsVerb),
    /// Change the rules of a mount.
    Reload {
        /// The mount point.
        mountpoint: PathBuf,
        /// The new rules; with `None` only the database of users and groups is read again.
        rules: Option<Box<nacre_stack::spec::RemapSpec>>,
    },
    /// Print metrics for Prometheus.
    Metrics {
        /// Serve them over HTTP at this address.
        listen: Option<std::net::SocketAddr>,
        /// Include mounts of other users.
        everybody: bool,
        /// The mount points; empty: all.
        mountpoints: Vec<PathBuf>,
    },
    /// Copy a tree.
    Copy(Box<CopyCommand>),
    /// Run a benchmark.
    Bench(Box<ArgMatches>),
    /// Print a completion script.
    Completions {
        /// The shell.
        shell: Shell,
        /// The name of the program to complete for.
        name: String,
    },
    /// Print the candidates for the last word of a command line.
    Complete(ArgMatches),
    /// Report what this machine supports.
    Doctor {
        /// As JSON.
        json: bool,
    },
    /// Write man pages into this directory.
    Man(PathBuf),
}

/// Returns the table of commands.
pub fn table() -> Command {
    Command::new("nacre")
        .version(env!("CARGO_PKG_VERSION"))
        .about("Thin layers over directories: mirrors, rules, stacks, served by FUSE at the speed of what lies below")
        .after_help("Examples:\n  nacre mirror --force-user=www-data -r /srv/photos /var/www/photos\n  nacre status\n  nacre umount /var/www/photos\n\nCalled as `bindfs`, `fuse-overlayfs` or `mergerfs`, the program takes their command lines; as `mount.fuse.nacre`, that of mount(8).")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(mirror())
        .subcommand(bindfs())
        .subcommand(fuse_overlayfs())
        .subcommand(mergerfs())
        .subcommand(union::command())
        .subcommand(cage::command())
        .subcommand(workspace::command())
        .subcommand(pool::command::command())
        .subcommand(fs::command())
        .subcommand(stack())
        .subcommand(umount())
        .subcommand(status())
        .subcommand(top())
        .subcommand(reload())
        .subcommand(upgrade())
        .subcommand(metrics())
        .subcommand(copy::command())
        .subcommand(nacre_bench_arguments::command())
        .subcommand(doctor())
        .subcommand(completions())
        .subcommand(complete())
        .subcommand(man())
}

fn mirror() -> Command {
    Command::new("mirror")
        .about("Show a directory at a second place, with other owners, modes and rules")
        .after_help(
            "Examples:\n  nacre mirror /srv/data /mnt/data\n  nacre mirror --force-user=www-data --perms=a-w -r /srv/photos /var/www/photos\n  nacre mirror --map=1000-1999/5000 --hide='*.tmp' /home /mnt/home\n  nacre mirror --engine=auto --explain -r /srv/data /mnt/data",
        )
        .arg(path("SOURCE", "The directory to show (a file: with --engine=kernel)"))
        .arg(path("MOUNTPOINT", "Where to show it: an existing directory"))
        .args(options(|row| row.spelling != Spelling::Cage))
}

fn bindfs() -> Command {
    Command::new("bindfs")
        .about("Like mirror, with bindfs' grammar: values of long options only after '='")
        .after_help("Examples:\n  nacre bindfs -u www-data -p a-w /srv/photos /var/www/photos\n  nacre bindfs -o ro,force-user=www-data /srv/photos /var/www/photos")
        .arg(path("SOURCE", "The directory to show (a file: with --engine=kernel)"))
        .arg(path("MOUNTPOINT", "Where to show it: an existing directory"))
        .args(options(|row| row.spelling != Spelling::Cage))
}

/// The entry in the list of commands; its arguments are parsed by [`crate::overlay`].
fn fuse_overlayfs() -> Command {
    Command::new(nacre_daemon::plan::FUSE_OVERLAYFS)
        .about("Like union, with fuse-overlayfs' grammar: the mount program of container engines")
        .after_help("Examples:\n  nacre fuse-overlayfs -o lowerdir=/base,upperdir=/changes,workdir=/work /merged\n  nacre fuse-overlayfs -o lowerdir=/app:/base /merged")
        .arg(Arg::new("words").short('o').value_name("WORD[,WORD...]").help("lowerdir=, upperdir=, workdir= and their like; docs/union.md lists them"))
        .arg(path("MOUNTPOINT", "Where to show the layers: an existing directory"))
}

/// The entry in the list of commands; its arguments are parsed by [`crate::mergerfs`].
fn mergerfs() -> Command {
    Command::new(nacre_daemon::plan::MERGERFS)
        .about("Like union, with mergerfs' grammar and defaults, and its control file")
        .after_help("Examples:\n  nacre mergerfs -o category.create=mfs,cache.files=off /mnt/disk1:/mnt/disk2 /mnt/pool\n  getfattr -d /mnt/pool/.mergerfs")
        .arg(Arg::new("words").short('o').value_name("WORD[,WORD...]").help("category.create=, minfreespace= and their like; docs/union.md lists them"))
        .arg(path("BRANCHES", "Directories, divided by colons; '*' and '?' stand for several"))
        .arg(path("MOUNTPOINT", "Where to show them as one: an existing directory"))
}

fn stack() -> Command {
    Command::new("mount")
        .about("Mount a stack of layers, described in a TOML file or in one line")
        .after_help(
            "Examples:\n  nacre mount 'host:/srv/data | remap:force-user=alice,perms=a-w' /mnt/data\n  nacre mount /etc/nacre/data.toml /mnt/data\n  nacre mount mem /mnt/scratch",
        )
        .arg(path("STACK", "A TOML file, or layers from the bottom up: 'host:DIRECTORY | LAYER:KEY=VALUE,...'"))
        .arg(path("MOUNTPOINT", "Where to show it: an existing directory"))
        .args(options(|row| row.is_for(Taker::Stack)))
}

fn umount() -> Command {
    Command::new("umount")
        .about("Unmount, as root or as whoever mounted")
        .after_help("Examples:\n  nacre umount /mnt/data\n  nacre umount --lazy /mnt/data")
        .arg(
            Arg::new("lazy")
                .short('l')
                .long("lazy")
                .action(ArgAction::SetTrue)
                .help("Detach at once, end when nobody uses it any more"),
        )
        .arg(path("MOUNTPOINT", "What to unmount").num_args(1..).action(ArgAction::Append))
}

fn status() -> Command {
    view_arguments(Command::new("status"))
        .about("Show mounts: what serves them, how, and their figures")
        .after_help("Examples:\n  nacre status\n  nacre status /mnt/data\n  nacre status --json\n  nacre status -H -p -o mountpoint,requests,passthrough")
        .arg(mounts())
}

fn top() -> Command {
    Command::new("top")
        .about("Watch mounts, pools, their devices and cages: requests, bytes, times, room")
        .after_help("Examples:\n  nacre top\n  nacre top --tab=pools\n  nacre top --once\n  nacre top --batch -n 5 -d 2 /mnt/data")
        .arg(
            Arg::new("batch")
                .short('b')
                .long("batch")
                .action(ArgAction::SetTrue)
                .help("Plain tables one after the other, also on a terminal"),
        )
        .arg(
            Arg::new("tab")
                .long("tab")
                .value_name("TABLE")
                .value_parser(Tab::ALL.map(Tab::word))
                .default_value(Tab::Mounts.word())
                .help("Which table"),
        )
        .arg(
            Arg::new("rounds")
                .short('n')
                .value_name("ROUNDS")
                .value_parser(value_parser!(u64).range(1..))
                .help("End after so many tables (plain ones)"),
        )
        .arg(
            Arg::new("once")
                .long("once")
                .action(ArgAction::SetTrue)
                .conflicts_with("rounds")
                .help("Print one table and end"),
        )
        .arg(
            Arg::new("interval")
                .short('i')
                .long("interval")
                .visible_short_alias('d')
                .value_name("SECONDS")
                .value_parser(value_parser!(f64))
                .default_value("1")
                .help("Time between tables"),
        )
        .arg(all_users())
        .arg(mounts())
}

fn reload() -> Command {
    Command::new("reload")
        .about("Give a mount other rules, or let it read users and groups again, without unmounting")
        .after_help("Examples:\n  nacre reload /mnt/data\n  nacre reload /mnt/data --force-user=bob --perms=a-w\n\nWith options, these are the new rules, all of them; without, the rules stay.")
        .arg(path("MOUNTPOINT", "Which mount"))
        .args(options(|row| row.is_for(Taker::Reload)))
        .arg(words_argument())
}

fn upgrade() -> Command {
    Command::new("upgrade")
        .about("Have this version of the program, or another one, go on with mounts made with --survive, while they are used")
        .after_help("Examples:\n  nacre upgrade\n  nacre upgrade /mnt/data\n  nacre upgrade --program=/opt/nacre/bin/nacre /mnt/data\n\nWhere that version cannot read what one of the mounts has noted, none is touched.")
        .arg(
            Arg::new("program")
                .long("program")
                .value_name("PROGRAM")
                .value_parser(value_parser!(PathBuf))
                .value_hint(clap::ValueHint::ExecutablePath)
                .help("Another version than this one"),
        )
        .arg(mounts())
}

fn metrics() -> Command {
    Command::new("metrics")
        .about("Print the figures of mounts, cages, unions and pools as Prometheus text")
        .after_help("Examples:\n  nacre metrics\n  nacre metrics /mnt/data\n  nacre metrics --listen 9469")
        .arg(
            Arg::new("listen")
                .long("listen")
                .value_name("[ADDRESS:]PORT")
                .help("Answer GET /metrics there, until ended [default address: this machine alone]"),
        )
        .arg(all_users())
        .arg(mounts())
}

fn completions() -> Command {
    Command::new("completions")
        .about("Print a completion script for a shell")
        .after_help("Examples:\n  nacre completions bash > /etc/bash_completion.d/nacre\n  nacre completions zsh > /usr/local/share/zsh/site-functions/_nacre\n  nacre completions bash zfs > /etc/bash_completion.d/zfs\n\nThe scripts ask the program itself what can stand where: users, groups, mounts, pools, file systems, snapshots.")
        .arg(Arg::new("SHELL").required(true).value_parser(value_parser!(Shell)).help("For which shell"))
        .arg(
            Arg::new("NAME")
                .value_parser(completion::NAMES)
                .default_value("nacre")
                .help("For the program under which of its names"),
        )
}

/// The hidden command that the completion scripts call.
fn complete() -> Command {
    Command::new("complete")
        .about("Print what could stand in place of the last word of a command line")
        .hide(true)
        .disable_help_flag(true)
        .arg(
            Arg::new("WORD")
                .num_args(0..)
                .trailing_var_arg(true)
                .allow_hyphen_values(true)
                .value_parser(value_parser!(OsString))
                .help("The command line up to the cursor, the program's name first"),
        )
}

fn doctor() -> Command {
    Command::new("doctor")
        .about("Say what this machine offers, what is missing, and which command gives it")
        .after_help("Examples:\n  nacre doctor\n  nacre doctor --json\n\nThe exit code is 1 where nothing can be mounted as it is, and 0 otherwise.")
        .arg(json())
}

fn man() -> Command {
    Command::new("man")
        .about("Write the man pages into a directory")
        .after_help("Examples:\n  nacre man /usr/local/share/man/man1")
        .arg(path("DIR", "An existing directory"))
}

/// Parses the matched arguments of `nacre`.
///
/// # Errors
/// A value that does not fit, or options that cannot go together.
pub fn parse(matches: &ArgMatches) -> Result<Invocation, Failure> {
    let Some((verb, matches)) = matches.subcommand() else {
        return Err(Failure::usage("a command is needed").next("nacre --help lists them"));
    };
    Ok(match verb {
        "mirror" | "bindfs" => Invocation::Mount(plan::mirror(
            "nacre",
            Settings::fold(&given(matches)?)?,
            vec![one(matches, "SOURCE"), one(matches, "MOUNTPOINT")],
        )?),
        "cage" => match cage::parse(matches)? {
            Asked::Mount(plan) => Invocation::Mount(plan),
            Asked::Verb(verb) => Invocation::Cage(verb),
        },
        "union" => match union::parse(matches)? {
            Asked::Mount(plan) => Invocation::Mount(plan),
            Asked::Verb(verb) => Invocation::Union(verb),
        },
        "workspace" => Invocation::Workspace(workspace::parse(matches)?),
        "pool" => Invocation::Pool(pool::verb::parse(matches)?),
        "fs" => Invocation::Fs(fs::parse(matches)?),
        "mount" => Invocation::Mount(plan::stack(
            "nacre",
            Settings::fold(&given(matches)?)?,
            vec![one(matches, "STACK"), one(matches, "MOUNTPOINT")],
        )?),
        "umount" => Invocation::Umount { lazy: matches.get_flag("lazy"), mountpoints: many(matches) },
        "status" => Invocation::Status { view: view(matches), mountpoints: many(matches) },
        "upgrade" => {
            let program = matches.get_one::<PathBuf>("program").cloned();
            Invocation::Upgrade { program, mountpoints: many(matches) }
        }
        "top" => parse_top(matches)?,
        "reload" => parse_reload(matches)?,
        "metrics" => parse_metrics(matches)?,
        "copy" => Invocation::Copy(Box::new(copy::parse(matches))),
        "bench" => Invocation::Bench(Box::new(matches.clone())),
        "completions" => {
            let shell = matches.get_one::<Shell>("SHELL").copied();
            let shell = shell.ok_or_else(|| Failure::usage("which shell? bash, zsh or fish"))?;
            let name = matches.get_one::<String>("NAME").cloned().unwrap_or_default();
            Invocation::Completions { shell, name }
        }
        "complete" => Invocation::Complete(matches.clone()),
        "doctor" => Invocation::Doctor { json: matches.get_flag("json") },
        "man" => Invocation::Man(PathBuf::from(one(matches, "DIR"))),
        other => return Err(Failure::usage(format!("unknown command {other}"))),
    })
}

fn parse_metrics(matches: &ArgMatches) -> Result<Invocation, Failure> {
    let word = matches.get_one::<String>("listen");
    let wrong = |word: &String| Failure::usage(format!("listen: \"{word}\" is not [ADDRESS:]PORT"));
    let listen = word.map(|word| crate::metrics::listen::address(word).ok_or_else(|| wrong(word))).transpose()?;
    Ok(Invocation::Metrics { everybody: matches.get_flag("all-users"), mountpoints: many(matches), listen })
}

fn parse_top(matches: &ArgMatches) -> Result<Invocation, Failure> {
    let interval = matches.get_one::<f64>("interval").copied().unwrap_or(1.0);
    if !(0.05..=86_400.0).contains(&interval) {
        return Err(Failure::usage(format!("interval: \"{interval}\" is not a number of seconds from 0.05 to 86400")));
    }
    let rounds = if matches.get_flag("once") { Some(1) } else { matches.get_one::<u64>("rounds").copied() };
    let word = matches.get_one::<String>("tab").map(String::as_str).unwrap_or_default();
    Ok(Invocation::Top(TopOrder {
        batch: matches.get_flag("batch"),
        rounds,
        interval,
        tab: Tab::ALL.into_iter().find(|tab| tab.word() == word).unwrap_or_default(),
        everybody: matches.get_flag("all-users"),
        mountpoints: many(matches),
    }))
}

fn parse_reload(matches: &ArgMatches) -> Result<Invocation, Failure> {
    let given = given(matches)?;
    if let Some(other) = given.iter().find(|given| !given.option.row().is_for(Taker::Reload)) {
        let name = other.option.row().name;
        return Err(
            Failure::usage(format!("option {name} cannot be changed while mounted")).next("unmount and mount again")
        );
    }
    let rules = if given.is_empty() { None } else { Some(Box::new(Settings::fold(&given)?.remap)) };
    Ok(Invocation::Reload { mountpoint: PathBuf::from(one(matches, "MOUNTPOINT")), rules })
}
