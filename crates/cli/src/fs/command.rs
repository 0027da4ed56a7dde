//! The command line of `nacre fs`, as part of the table in [`crate::commands`]. Pure: arguments in,
//! verbs out. The letters are ZFS'.

use super::args;
use super::keep::{keep, keep_of};
use crate::clap_args::{self, flag, json, texts};
use clap::{Arg, ArgAction, ArgMatches, Command, parser::ValueSource, value_parser};
use nacre_admin::fs::{
    FsRequest, Listing, Period, SchedulePart, ToCreate, ToDestroy, ToHold, ToMount, ToRename, ToRollBack, ToSchedule,
    ToSet, ToSnapshot, Types,
};
use nacre_daemon::failure::Failure;
use nacre_pool::properties::DATASET_PROPERTIES;
use std::{ffi::OsString, os::unix::ffi::OsStrExt};

/// A verb on file systems.
#[derive(Debug)]
pub enum FsVerb {
    /// Show a table of objects, or of their properties.
    Show(Show),
    /// Send one request to one pool.
    Ask {
        /// The pool.
        pool: String,
        /// The request.
        request: FsRequest,
    },
    /// Create a file system or a clone.
    Create {
        /// The request.
        what: ToCreate,
        /// Print what is created.
        verbose: bool,
        /// In a form for scripts.
        parsable: bool,
    },
    /// Destroy objects.
    Destroy {
        /// The request.
        what: ToDestroy,
        /// Print what is destroyed.
        verbose: bool,
        /// In a form for scripts.
        parsable: bool,
    },
    /// Set properties of file systems, which may be in several pools.
    Set(ToSet),
    /// Take snapshots; those within one pool are taken atomically.
    Snapshot(ToSnapshot),
    /// Take and prune snapshots by a schedule.
    Schedule {
        /// The request.
        what: ToSchedule,
        /// Print each snapshot.
        verbose: bool,
    },
    /// Hold snapshots, or release holds.
    Hold(ToHold),
    /// Show holds.
    Holds {
        /// The snapshots.
        snapshots: Vec<String>,
        /// Also the snapshots of this name on descendants.
        recursive: bool,
        /// Form of the table.
        form: TableForm,
    },
    /// Show the mounted file systems.
    Mounted {
        /// As JSON.
        json: bool,
    },
    /// Mount everything of all pools.
    MountAll(ToMount),
    /// Mount a file system and those below it.
    MountBelow {
        /// The file system.
        name: String,
        /// Options of the mounts.
        what: ToMount,
    },
    /// Unmount: a name, a path, or everything of all pools.
    Unmount {
        /// The name or path; `None`: all.
        what: Option<String>,
        /// Also while in use.
        force: bool,
    },
    /// Share a file system, or everything of all pools.
    Share(Option<String>),
    /// Unshare: a name, a path, or everything of all pools.
    Unshare(Option<String>),
    /// Show the differences of a snapshot.
    Diff {
        /// The pool.
        pool: String,
        /// The earlier snapshot.
        from: String,
        /// The later snapshot or file system; `None`: the current state.
        to: Option<String>,
        /// Form of the lines.
        form: DiffForm,
    },
    /// `upgrade`: file systems have the format of their pool.
    Upgrade,
    /// `allow NAME`: no permissions are ever delegated.
    Allowed(String),
    /// A verb on all encrypted file systems: there are none.
    Nothing,
    /// Send or receive streams of snapshots.
    Stream(super::streams::StreamVerb),
    /// Show or restore versions of a file.
    Versions(super::versions::VersionsVerb),
    /// Replicate a file system to a second place.
    Replicate(super::replicate::ToReplicate),
    /// Show the space that users and groups use.
    Space(super::space::SpaceVerb),
    /// Print the version.
    Version {
        /// As JSON.
        json: bool,
    },
}

/// Form of a table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableForm {
    /// No headings, one tab between columns.
    pub scripted: bool,
    /// Exact numbers.
    pub exact: bool,
    /// JSON.
    pub json: bool,
    /// As JSON, numbers are numbers.
    pub integers: bool,
}

/// Form of the lines of `diff`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiffForm {
    /// A letter for the type.
    pub types: bool,
    /// Tabs, no arrows.
    pub scripted: bool,
    /// The time of the change.
    pub times: bool,
}

/// A request for a table of objects.
#[derive(Debug, PartialEq, Eq)]
pub struct Show {
    /// The listing, without names.
    pub listing: Listing,
    /// The objects; empty: the objects of all pools.
    pub names: Vec<String>,
    /// Include pools of other users.
    pub everybody: bool,
    /// Form of the table.
    pub form: TableForm,
    /// The sort keys: properties, and whether the order is descending.
    pub order: Vec<(String, bool)>,
    /// Columns and sources of `get`; `None`: the table of `list`.
    pub get: Option<Get>,
}

/// Columns and sources of `get`.
#[derive(Debug, PartialEq, Eq)]
pub struct Get {
    /// Its columns: name, property, value, received, source.
    pub fields: Vec<String>,
    /// Show only values from these sources; empty: from all.
    pub sources: Vec<String>,
}

fn value(letter: char, name: &'static str, shown: &'static str, help: &'static str) -> Arg {
    Arg::new(name).short(letter).value_name(shown).action(ArgAction::Append).help(help)
}

fn words_of(name: &'static str, least: usize, help: &'static str) -> Arg {
    Arg::new(name).num_args(least..).required(least > 0).action(ArgAction::Append).help(help)
}

fn word(name: &'static str, help: &'static str) -> Arg {
    Arg::new(name).required(true).help(help)
}

fn properties() -> Arg {
    value('o', "properties", "PROPERTY=VALUE", "A property that it is made with")
}

fn view(command: Command) -> Command {
    command
        .arg(flag('H', "scripted", "No headings, one tab between columns"))
        .arg(flag('p', "exact", "Exact numbers"))
        .arg(json())
        .arg(
            Arg::new("integers")
                .long("json-int")
                .action(ArgAction::SetTrue)
                .requires("json")
                .help("As JSON, with numbers as exact numbers instead of text"),
        )
        .arg(clap_args::all_users())
        .arg(flag('r', "recursive", "Of everything below as well"))
        .arg(
            Arg::new("depth")
                .short('d')
                .value_name("DEPTH")
                .value_parser(value_parser!(u64))
                .help("So far below; 1: children and own snapshots"),
        )
        .arg(value('t', "types", "TYPE[,TYPE...]", "Which: filesystem, snapshot, bookmark, all"))
}

/// The command line of `nacre fs`.
pub fn command() -> Command {
    Command::new("fs")
        .about("File systems in pools: snapshots, clones, quotas, properties")
        .after_help(
            "Examples:\n  nacre fs create -o compression=zstd tank/home\n  nacre fs snapshot -r tank@today\n  nacre fs list -t all -r tank\n  nacre fs set quota=10G tank/home\n  nacre fs rollback tank/home@today\n\nCalled as `zfs`, the program takes the same command lines.",
        )
        .subcommand_required(true)
        .arg_required_else_help(true)
        .disable_help_subcommand(true)
        // Unsupported verbs are refused with a reason.
        .allow_external_subcommands(true)
        .subcommands(lives())
        .subcommands(shows())
        .subcommands(snapshots())
        .subcommands(super::streams::commands())
        .subcommand(super::replicate::command())
        .subcommands(super::versions::commands())
        .subcommands(mounts())
}

fn lives() -> [Command; 7] {
    [
        Command::new("version").about("Show the version of the program").arg(json()),
        Command::new("create")
            .about("Make a file system")
            .after_help("Examples:\n  nacre fs create tank/home\n  nacre fs create -p -o mountpoint=/srv/data tank/srv/data")
            .arg(flag('p', "parents", "Make those above it that are missing; be content where it is there"))
            .arg(flag('u', "unmounted", "Do not mount it"))
            .arg(flag('n', "dry", "Make nothing: only see whether it could be made"))
            .arg(flag('v', "verbose", "Say what is made, with its properties"))
            .arg(flag('P', "parsable", "Say it for scripts"))
            .arg(properties())
            // Options of volumes, which are refused by name.
            .arg(value('V', "volume", "SIZE", "").hide(true))
            .arg(value('b', "block", "SIZE", "").hide(true))
            .arg(flag('s', "sparse", "").hide(true))
            .arg(word("FILESYSTEM", "Its name: POOL/NAME")),
        Command::new("destroy")
            .about("Destroy file systems, snapshots, bookmarks")
            .after_help("Examples:\n  nacre fs destroy tank/old\n  nacre fs destroy -nv tank/home@a%c\n  nacre fs destroy -r tank/home@a,b\n  nacre fs destroy tank/home#mark\n\nAlways look with -nv first: what is destroyed is lost.")
            .arg(flag('r', "recursive", "With everything below; of snapshots, those of the same names below"))
            .arg(flag('R', "clones", "With all clones, wherever they are"))
            .arg(flag('f', "force", "Unmount even what is in use"))
            .arg(flag('n', "dry", "Destroy nothing; with -v, say what would be"))
            .arg(flag('v', "verbose", "Say what goes, and what that frees"))
            .arg(flag('p', "parsable", "Say it for scripts"))
            .arg(flag('d', "deferred", "Snapshots that are held or cloned go when nothing needs them any more"))
            .arg(word("WHAT", "FILESYSTEM, FILESYSTEM@SNAPSHOT[,...], FILESYSTEM@FIRST%LAST, FILESYSTEM#BOOKMARK")),
        Command::new("clone")
            .about("Make a file system that begins as a snapshot")
            .after_help("Examples:\n  nacre fs clone tank/home@today tank/trial")
            .arg(flag('p', "parents", "Make the file systems above it that are missing"))
            .arg(flag('u', "unmounted", "Do not mount it"))
            .arg(properties())
            .arg(word("SNAPSHOT", "Where it begins"))
            .arg(word("FILESYSTEM", "Its name")),
        Command::new("promote")
            .about("Make a clone independent: what it came from becomes its clone")
            .after_help("Examples:\n  nacre fs promote tank/trial")
            .arg(word("FILESYSTEM", "The clone")),
        Command::new("rename")
            .about("Give a file system or snapshot another name")
            .after_help("Examples:\n  nacre fs rename tank/trial tank/home2\n  nacre fs rename -r tank@today tank@yesterday")
            .arg(flag('p', "parents", "Make the file systems above it that are missing"))
            .arg(flag('r', "recursive", "Snapshots of this name of everything below as well"))
            .arg(flag('u', "unmounted", "Leave mounts where they are"))
            .arg(flag('f', "force", "Unmount even what is in use"))
            .arg(word("FROM", "What"))
            .arg(word("TO", "Its new name; of a snapshot also @NAME alone")),
        Command::new("upgrade")
            .about("Nothing to do: file systems have the pool's format")
            .hide(true)
            .arg(words_of("REST", 0, "").allow_hyphen_values(true)),
    ]
}

fn shows() -> [Command; 6] {
    let space = |name: &'static str, about: &'static str| {
        Command::new(name)
            .about(about)
            .after_help(format!(
                "Examples:\n  nacre fs {name} tank/home\n  nacre fs {name} -n -o name,used,quota -S used tank/home"
            ))
            .arg(flag('n', "numeric", "Numbers instead of names"))
            .arg(flag('H', "scripted", "No headings, one tab between columns"))
            .arg(flag('p', "exact", "Exact numbers"))
            .arg(flag('i', "translate", "Taken for ZFS' sake: names are those of this system anyway"))
            .arg(value('o', "columns", "FIELD[,FIELD...]", "type, name, used, quota, objused, objquota"))
            .arg(value('s', "ascending", "FIELD", "Sort by it"))
            .arg(value('S', "descending", "FIELD", "Sort by it, the greatest first"))
            .arg(value('t', "types", "TYPE[,TYPE...]", "all, posixuser, posixgroup"))
            .arg(word("WHAT", "A file system or snapshot"))
    };
    [
        view(Command::new("list").visible_alias("ls"))
            .about("List file systems, snapshots, bookmarks")
            .after_help("Examples:\n  nacre fs list\n  nacre fs list -r -t all tank\n  nacre fs list -o space\n  nacre fs list -Hp -o name,used -S used\n  nacre fs list -t snapshot tank/home")
            .arg(value('o', "columns", "PROPERTY[,PROPERTY...]", "Which columns [default: name,used,available,referenced,mountpoint]; space: what uses space; all"))
            .arg(value('s', "ascending", "PROPERTY", "Sort by it"))
            .arg(value('S', "descending", "PROPERTY", "Sort by it, the greatest first"))
            .arg(words_of("WHAT", 0, "Of what [default: everything]")),
        view(Command::new("get"))
            .about("Show properties")
            .after_help("Examples:\n  nacre fs get all tank/home\n  nacre fs get -r -s local,received quota,compression tank\n  nacre fs get -Hp -o value used tank/home\n  nacre fs get userused@alice tank/home")
            .arg(value('o', "fields", "FIELD[,FIELD...]", "name, property, value, received, source, all"))
            .arg(value('s', "sources", "SOURCE[,SOURCE...]", "Only values that are: local, received, temporary, inherited, default, none"))
            .arg(word("PROPERTIES", "Which properties").value_name("all|PROPERTY,..."))
            .arg(words_of("WHAT", 0, "Of what [default: everything]")),
        Command::new("set")
            .about("Set properties")
            .after_help("Examples:\n  nacre fs set quota=10G compression=zstd tank/home\n  nacre fs set userquota@alice=1G tank/home\n  nacre fs set backup:policy=daily tank/home")
            .arg(flag('u', "unmounted", "Leave mounts where they are"))
            .arg(words_of("ARGUMENT", 1, "PROPERTY=VALUE..., then file systems").value_names(["PROPERTY=VALUE...", "FILESYSTEM"])),
        Command::new("inherit")
            .about("Take own values of a property away")
            .after_help("Examples:\n  nacre fs inherit compression tank/home\n  nacre fs inherit -r atime tank")
            .arg(flag('r', "recursive", "Of everything below as well"))
            .arg(flag('S', "received", "Go back to what was received"))
            .arg(word("PROPERTY", "Which"))
            .arg(words_of("FILESYSTEM", 1, "Of what")),
        space("userspace", "Show what users use"),
        space("groupspace", "Show what groups use"),
    ]
}

fn snapshots() -> [Command; 7] {
    [
        Command::new("snapshot")
            .visible_alias("snap")
            .about("Take snapshots, all of them at one moment")
            .after_help("Examples:\n  nacre fs snapshot tank/home@today\n  nacre fs snapshot -r tank@today\n  nacre fs snapshot tank/db@a tank/log@a\n  nacre fs snapshot -r --keep-hourly 24 --keep-daily 30 --keep-monthly 12 tank/home\n\nWith --keep-..., the arguments are file systems: one run takes a snapshot of each, named after the moment (LABEL-2026-11-25T21:28:56Z, UTC), and destroys those of earlier runs with the same label that no number keeps. Snapshots that were taken or renamed by hand, are held or have clones stay.")
            .arg(flag('r', "recursive", "Of everything below as well"))
            .arg(value('o', "properties", "PROPERTY=VALUE", "A property of your own (module:name) that each is made with"))
            .args(Period::ALL.map(keep))
            .arg(
                Arg::new("label")
                    .long("label")
                    .value_name("LABEL")
                    .default_value("auto")
                    .help("With --keep-...: what the names begin with; schedules with different labels do not see each other"),
            )
            .arg(Arg::new("take-only").long("take-only").action(ArgAction::SetTrue).help("With --keep-...: destroy nothing"))
            .arg(Arg::new("prune-only").long("prune-only").action(ArgAction::SetTrue).conflicts_with("take-only").help("With --keep-...: take nothing; snapshots that were received count as well"))
            .arg(flag('n', "dry", "With --keep-...: change nothing, only say what would be done"))
            .arg(flag('v', "verbose", "With --keep-...: say what is taken and what is destroyed"))
            .arg(words_of("SNAPSHOT", 1, "FILESYSTEM@NAME; with --keep-...: FILESYSTEM").value_name("FILESYSTEM@SNAPSHOT")),
        Command::new("rollback")
            .about("Make a file system what a snapshot is: what was written since is lost")
            .after_help("Examples:\n  nacre fs rollback tank/home@today\n  nacre fs rollback -r tank/home@yesterday")
            .arg(flag('r', "recursive", "Destroy newer snapshots and bookmarks"))
            .arg(flag('R', "clones", "And the clones of these"))
            .arg(flag('f', "force", "Unmount even what is in use"))
            .arg(word("SNAPSHOT", "Which")),
        Command::new("bookmark")
            .about("Remember the moment of a snapshot without its content")
            .after_help("Examples:\n  nacre fs bookmark tank/home@today tank/home#today")
            .arg(word("SNAPSHOT", "A snapshot, or another bookmark"))
            .arg(word("BOOKMARK", "FILESYSTEM#NAME, or #NAME")),
        Command::new("hold")
            .about("Keep snapshots from being destroyed")
            .after_help("Examples:\n  nacre fs hold keep tank/home@today\n  nacre fs hold -r keep tank@today")
            .arg(flag('r', "recursive", "Those of the same names of everything below as well"))
            .arg(word("TAG", "Whose hold it is"))
            .arg(words_of("SNAPSHOT", 1, "Which")),
        Command::new("holds")
            .about("Show who holds snapshots")
            .after_help("Examples:\n  nacre fs holds tank/home@today\n  nacre fs holds -rH tank@today")
            .arg(flag('r', "recursive", "Those of the same names of everything below as well"))
            .arg(flag('H', "scripted", "No headings, one tab between columns"))
            .arg(flag('p', "exact", "Times as seconds since 1970"))
            .arg(json())
            .arg(words_of("SNAPSHOT", 1, "Which")),
        Command::new("release")
            .about("Let go of held snapshots")
            .after_help("Examples:\n  nacre fs release keep tank/home@today")
            .arg(flag('r', "recursive", "Those of the same names of everything below as well"))
            .arg(word("TAG", "Whose hold it is"))
            .arg(words_of("SNAPSHOT", 1, "Which")),
        Command::new("diff")
            .about("Show what has changed since a snapshot")
            .after_help("Examples:\n  nacre fs diff tank/home@today\n  nacre fs diff -F tank/home@a tank/home@b\n\nM modified, + new, - gone, R renamed")
            .arg(flag('F', "types", "The type of each file, as ls -F shows it"))
            .arg(flag('H', "scripted", "Tabs, no arrows"))
            .arg(flag('t', "times", "The time of each change"))
            .arg(flag('h', "plain", "Taken for ZFS' sake: names are shown as they are where they are printable"))
            .disable_help_flag(true)
            .arg(Arg::new("help").long("help").action(ArgAction::Help).help("Print help"))
            .arg(word("SNAPSHOT", "Since when"))
            .arg(Arg::new("TO").help("Until when: a later snapshot or the file system [default: now]")),
    ]
}

fn mounts() -> [Command; 4] {
    [
        Command::new("share")
            .about("Share mounted file systems as their properties sharenfs and sharesmb say")
            .after_help("Examples:\n  nacre fs set sharenfs=on tank/home\n  nacre fs share tank/home\n  nacre fs share -a")
            .arg(flag('a', "all", "All whose properties ask for it"))
            .arg(flag('l', "load-keys", "").hide(true))
            .arg(Arg::new("FILESYSTEM").required_unless_present("all").conflicts_with("all").help("Which")),
        Command::new("unshare")
            .about("Share file systems no more, until they are mounted or shared again")
            .after_help("Examples:\n  nacre fs unshare tank/home\n  nacre fs unshare /srv/data\n  nacre fs unshare -a")
            .arg(flag('a', "all", "All of them"))
            .arg(Arg::new("WHAT").required_unless_present("all").conflicts_with("all").help("A file system, or where it is mounted")),
        Command::new("mount")
            .about("Mount file systems, or show what is mounted")
            .after_help("Examples:\n  nacre fs mount\n  nacre fs mount tank/home\n  nacre fs mount -a\n  nacre fs mount -o ro tank/home")
            .arg(flag('a', "all", "All whose properties ask for it"))
            .arg(flag('R', "recursive", "A file system and all below it whose properties ask for it").requires("FILESYSTEM"))
            .arg(flag('O', "overlay", "Over directories that are not empty as well"))
            .arg(flag('f', "force", "Taken for ZFS' sake"))
            .arg(flag('v', "verbose", "Taken for ZFS' sake"))
            .arg(flag('l', "load-keys", "").hide(true))
            .arg(json())
            .arg(value(
                'o',
                "words",
                "WORD[,WORD...]",
                "For this mount only: ro, rw, exec, noexec, suid, nosuid, dev, nodev, atime, noatime",
            ))
            .arg(Arg::new("FILESYSTEM").conflicts_with("all").help("Which [default: show what is mounted]")),
        Command::new("unmount")
            .visible_alias("umount")
            .about("Unmount file systems")
            .after_help("Examples:\n  nacre fs unmount tank/home\n  nacre fs unmount /srv/data\n  nacre fs unmount -a")
            .arg(flag('a', "all", "All of them"))
            .arg(flag('f', "force", "Even while they are in use"))
            .arg(flag('u', "unload-keys", "").hide(true))
            .arg(Arg::new("WHAT").required_unless_present("all").conflicts_with("all").help("A file system, or where it is mounted")),
    ]
}

fn text(matches: &ArgMatches, name: &str) -> String {
    matches.get_one::<String>(name).cloned().unwrap_or_default()
}

/// Returns the items of several comma-separated lists.
fn listed(matches: &ArgMatches, name: &str) -> Vec<String> {
    texts(matches, name)
        .iter()
        .flat_map(|list| list.split(','))
        .filter(|one| !one.is_empty())
        .map(ToOwned::to_owned)
        .collect()
}

fn form(matches: &ArgMatches) -> TableForm {
    // `holds` has no numbers except times.
    let integers = matches.try_get_one::<bool>("integers").ok().flatten().copied().unwrap_or(false);
    TableForm {
        scripted: matches.get_flag("scripted"),
        exact: matches.get_flag("exact") || integers,
        json: matches.get_flag("json"),
        integers,
    }
}

/// Parses the matched arguments of `nacre fs`.
///
/// # Errors
/// A value that does not fit, or options that cannot go together.
pub fn parse(matches: &ArgMatches) -> Result<FsVerb, Failure> {
    let Some((verb, matches)) = matches.subcommand() else {
        return Err(Failure::usage("a command is needed").next("nacre fs --help lists them"));
    };
    of_verb(verb, matches)
}

fn of_verb(verb: &str, matches: &ArgMatches) -> Result<FsVerb, Failure> {
    let has = |name: &str| matches.get_flag(name);
    Ok(match verb {
        "create" | "clone" => {
            let from = (verb == "clone").then(|| text(matches, "SNAPSHOT"));
            let name = text(matches, "FILESYSTEM");
            args::creatable(
                &name,
                verb == "create" && (matches.contains_id("volume") || matches.contains_id("block") || has("sparse")),
            )?;
            let properties = args::assignments(&texts(matches, "properties"), &format!("cannot create '{name}'"))?;
            let told = |name| verb == "create" && has(name);
            let (parents, unmounted) = (has("parents"), has("unmounted"));
            let what = ToCreate { name, from, parents, unmounted, dry: told("dry"), properties };
            args::same_pool(what.from.as_deref(), &what.name)?;
            FsVerb::Create { what, verbose: told("verbose"), parsable: told("parsable") }
        }
        "destroy" => FsVerb::Destroy {
            what: ToDestroy {
                target: text(matches, "WHAT"),
                recursive: has("recursive"),
                clones: has("clones"),
                force: has("force"),
                deferred: has("deferred"),
                dry: has("dry"),
                keep_below: false,
            },
            verbose: has("verbose"),
            parsable: has("parsable"),
        },
        "promote" => ask(&text(matches, "FILESYSTEM"), FsRequest::Promote(text(matches, "FILESYSTEM"))),
        "rename" => {
            let (from, to) = (text(matches, "FROM"), text(matches, "TO"));
            let rename = ToRename {
                from,
                to,
                parents: has("parents"),
                recursive: has("recursive"),
                unmounted: has("unmounted"),
                force: has("force"),
            };
            args::renamed_within(&rename)?;
            ask(&rename.from.clone(), FsRequest::Rename(rename))
        }
        "list" => FsVerb::Show(list(matches)?),
        "get" => FsVerb::Show(get(matches)?),
        "set" => FsVerb::Set(ToSet { unmounted: has("unmounted"), ..args::settings(&texts(matches, "ARGUMENT"))? }),
        "inherit" => FsVerb::Set(args::inheritance(
            &text(matches, "PROPERTY"),
            texts(matches, "FILESYSTEM"),
            has("recursive"),
            has("received"),
        )?),
        "userspace" | "groupspace" => FsVerb::Space(super::space::parse(verb == "groupspace", matches)?),
        "snapshot" => {
            let properties = args::assignments(&texts(matches, "properties"), "cannot create snapshots")?;
            let keep = keep_of(matches);
            if !keep.is_empty() {
                let (names, recursive) = (texts(matches, "SNAPSHOT"), has("recursive"));
                let (label, dry) = (text(matches, "label"), has("dry"));
                let part = match (has("take-only"), has("prune-only")) {
                    (true, _) => SchedulePart::Take,
                    (_, true) => SchedulePart::Prune,
                    _ => SchedulePart::Whole,
                };
                let what = ToSchedule { names, recursive, label, keep, properties, dry, part };
                return Ok(FsVerb::Schedule { what, verbose: has("verbose") || dry });
            }
            if has("dry") || has("verbose") || matches.value_source("label") == Some(ValueSource::CommandLine) {
                return Err(Failure::usage("-n, -v and --label belong to schedules")
                    .next("say what is to be kept, for example --keep-daily 30"));
            }
            FsVerb::Snapshot(ToSnapshot { names: texts(matches, "SNAPSHOT"), recursive: has("recursive"), properties })
        }
        "rollback" => {
            let snapshot = text(matches, "SNAPSHOT");
            let what = ToRollBack {
                snapshot: snapshot.clone(),
                newer: has("recursive"),
                clones: has("clones"),
                force: has("force"),
            };
            ask(&snapshot, FsRequest::RollBack(what))
        }
        "bookmark" => {
            let (of, name) = (text(matches, "SNAPSHOT"), text(matches, "BOOKMARK"));
            let name = if name.starts_with('#') {
                format!("{}{name}", of.split(['@', '#']).next().unwrap_or_default())
            } else {
                name
            };
            ask(&of.clone(), FsRequest::Bookmark { of, name })
        }
        "hold" | "release" => {
            let (tag, snapshots) = (text(matches, "TAG"), texts(matches, "SNAPSHOT"));
            FsVerb::Hold(ToHold { tag, snapshots, recursive: has("recursive"), release: verb == "release" })
        }
        "holds" => {
            FsVerb::Holds { snapshots: texts(matches, "SNAPSHOT"), recursive: has("recursive"), form: form(matches) }
        }
        "diff" => {
            let (from, to) = (text(matches, "SNAPSHOT"), matches.get_one::<String>("TO").cloned());
            let to = to.map(|to| {
                if to.starts_with('@') { format!("{}{to}", from.split('@').next().unwrap_or_default()) } else { to }
            });
            let form = DiffForm { types: has("types"), scripted: has("scripted"), times: has("times") };
            FsVerb::Diff { pool: args::pool(&from).to_owned(), from, to, form }
        }
        "send" => FsVerb::Stream(super::streams::send(matches)?),
        "receive" => FsVerb::Stream(super::streams::receive(matches)?),
        "versions" => FsVerb::Versions(super::versions::show(matches)),
        "restore" => FsVerb::Versions(super::versions::restore(matches)),
        "replicate" => FsVerb::Replicate(super::replicate::parse(matches)),
        "stream" => FsVerb::Stream(super::streams::stream(matches)?),
        "version" => FsVerb::Version { json: has("json") },
        "mount" => mount(matches),
        "unmount" => FsVerb::Unmount { what: matches.get_one::<String>("WHAT").cloned(), force: has("force") },
        "share" => FsVerb::Share(matches.get_one::<String>("FILESYSTEM").cloned()),
        "unshare" => FsVerb::Unshare(matches.get_one::<String>("WHAT").cloned()),
        "upgrade" => FsVerb::Upgrade,
        other => {
            let rest: Vec<&OsString> = matches.get_many("").into_iter().flatten().collect();
            match (other, rest.as_slice()) {
                ("load-key" | "unload-key", [all, ..]) if *all == "-a" => FsVerb::Nothing,
                ("allow", [name]) if !name.as_bytes().starts_with(b"-") => {
                    FsVerb::Allowed(name.to_string_lossy().into_owned())
                }
                (other, rest) => return Err(args::not_here(other, rest.is_empty())),
            }
        }
    })
}

fn ask(name: &str, request: FsRequest) -> FsVerb {
    FsVerb::Ask { pool: args::pool(name).to_owned(), request }
}

fn mount(matches: &ArgMatches) -> FsVerb {
    let what = ToMount {
        name: matches.get_one::<String>("FILESYSTEM").cloned(),
        words: listed(matches, "words"),
        overlay: matches.get_flag("overlay"),
        at: None,
    };
    match (&what.name, matches.get_flag("all")) {
        (Some(name), _) if matches.get_flag("recursive") => FsVerb::MountBelow { name: name.clone(), what },
        (Some(name), _) => ask(&name.clone(), FsRequest::Mount(what)),
        (None, true) => FsVerb::MountAll(what),
        (None, false) => FsVerb::Mounted { json: matches.get_flag("json") },
    }
}

fn depth(matches: &ArgMatches, names: &[String], types: Option<Types>) -> Option<u64> {
    let given = matches.get_one::<u64>("depth").copied();
    let only = |types: Types| (types.snapshots || types.bookmarks) && !types.filesystems;
    match given {
        Some(depth) => Some(depth),
        None if matches.get_flag("recursive") || names.is_empty() => None,
        // `list -t snapshot NAME` lists the snapshots of NAME itself.
        None if types.is_some_and(only) => Some(1),
        None => Some(0),
    }
}

fn list(matches: &ArgMatches) -> Result<Show, Failure> {
    let names = texts(matches, "WHAT");
    let mut columns = listed(matches, "columns");
    if columns.iter().any(|column| column == "all") {
        columns = std::iter::once("name")
            .chain(DATASET_PROPERTIES.iter().map(|property| property.name))
            .map(str::to_owned)
            .collect();
    }
    let space = columns.iter().any(|column| column == "space");
    if columns.is_empty() {
        columns = ["name", "used", "available", "referenced", "mountpoint"].map(str::to_owned).to_vec();
    }
    if space {
        let all =
            ["name", "available", "used", "usedbysnapshots", "usedbydataset", "usedbyrefreservation", "usedbychildren"];
        columns = columns
            .into_iter()
            .flat_map(|column| if column == "space" { all.map(str::to_owned).to_vec() } else { vec![column] })
            .collect();
    }
    let given = listed(matches, "types");
    let types = match given.is_empty() {
        false => Some(args::types(&given)?),
        // The columns of `-o space` are those of file systems.
        true if space => Some(Types { filesystems: true, ..Types::default() }),
        true => None,
    };
    let order = sorting(matches);
    for name in columns.iter().chain(order.iter().map(|(name, _)| name)) {
        args::check_column(name)?;
    }
    let depth = depth(matches, &names, if given.is_empty() { None } else { types });
    let listing = Listing { names: Vec::new(), depth, types, properties: Some(columns) };
    let everybody = matches.get_flag("all-users");
    Ok(Show { listing, names, everybody, form: form(matches), order, get: None })
}

/// Returns the keys of `-s` and `-S` in the order given.
fn sorting(matches: &ArgMatches) -> Vec<(String, bool)> {
    let mut found: Vec<(usize, String, bool)> = Vec::new();
    for (name, descending) in [("ascending", false), ("descending", true)] {
        let places = matches.indices_of(name).into_iter().flatten();
        found.extend(places.zip(texts(matches, name)).map(|(place, property)| (place, property, descending)));
    }
    found.sort();
    found.into_iter().map(|(_, property, descending)| (property, descending)).collect()
}

fn get(matches: &ArgMatches) -> Result<Show, Failure> {
    let names = texts(matches, "WHAT");
    let wanted = text(matches, "PROPERTIES");
    let properties = match wanted.as_str() {
        "all" => None,
        list => Some(list.split(',').filter(|name| !name.is_empty()).map(ToOwned::to_owned).collect::<Vec<String>>()),
    };
    for name in properties.iter().flatten() {
        args::check_column(name)?;
    }
    let given = listed(matches, "types");
    let types = match given.is_empty() {
        // Bookmarks only where they are named.
        true => Types { filesystems: true, snapshots: true, bookmarks: names.iter().any(|name| name.contains('#')) },
        false => args::types(&given)?,
    };
    let depth = depth(matches, &names, (!given.is_empty()).then_some(types));
    let fields = args::fields(&listed(matches, "fields"))?;
    let sources = args::sources(&listed(matches, "sources"))?;
    let listing = Listing { names: Vec::new(), depth, types: Some(types), properties };
    let everybody = matches.get_flag("all-users");
    Ok(Show { listing, names, everybody, form: form(matches), order: Vec::new(), get: Some(Get { fields, sources }) })
}
