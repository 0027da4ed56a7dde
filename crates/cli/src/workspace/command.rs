//! The commands of workspaces, as part of the table in [`crate::commands`]. Pure: arguments in, verbs out.

use crate::clap_args::{self, View};
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use nacre_daemon::failure::Failure;
use nacre_workspace::Resolution;
use std::{ffi::OsString, path::PathBuf};

/// A verb on workspaces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkspaceVerb {
    /// Make a workspace.
    Create(Box<CreateOrder>),
    /// Mount the view of a workspace again.
    Mount {
        /// Its name.
        name: String,
        /// The result as JSON.
        json: bool,
    },
    /// Show workspaces.
    List {
        /// Columns and format.
        view: View,
    },
    /// Run a command in a workspace.
    Run(Box<RunOrder>),
    /// Remove workspaces with their changes.
    Discard {
        /// Their names.
        names: Vec<String>,
        /// The result as JSON.
        json: bool,
    },
    /// Give a workspace another name.
    Rename {
        /// The old name.
        name: String,
        /// The new name.
        to: String,
        /// The result as JSON.
        json: bool,
    },
    /// Show the changes.
    Diff(DiffOrder),
    /// Make the changes in the base.
    Commit(Box<CommitOrder>),
    /// Write the changes as an archive.
    Export {
        /// The workspace.
        name: String,
        /// The archive; `None`: standard output.
        file: Option<PathBuf>,
        /// The result as JSON.
        json: bool,
    },
    /// Read changes from an archive.
    Import {
        /// The workspace.
        name: String,
        /// The archive; `None`: standard input.
        file: Option<PathBuf>,
        /// The result as JSON.
        json: bool,
    },
    /// Keep the present changes under a name.
    Snapshot {
        /// `WORKSPACE@SNAPSHOT`.
        snapshot: String,
        /// The result as JSON.
        json: bool,
    },
    /// Go back to a snapshot.
    Rollback {
        /// `WORKSPACE@SNAPSHOT`.
        snapshot: String,
        /// The result as JSON.
        json: bool,
    },
}

/// Settings of a new workspace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CreateOrder {
    /// Its name.
    pub name: String,
    /// What it shows, as the user names it, the topmost first.
    pub from: Vec<OsString>,
    /// Mount point.
    pub at: Option<PathBuf>,
    /// Limit of the bytes of changes.
    pub size: Option<String>,
    /// Limit of the number of changed files.
    pub files: Option<u64>,
    /// Paths that cannot be changed.
    pub read_only: Vec<PathBuf>,
    /// Patterns of names that are not shown.
    pub hide: Vec<String>,
    /// Commands in it can change nothing else.
    pub read_only_below: bool,
    /// Its mount survives its process.
    pub survive: bool,
    /// The result as JSON.
    pub json: bool,
}

/// Form of a list of changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ChangesForm {
    /// Lines for people.
    #[default]
    Names,
    /// Lines for people, with sizes.
    Stat,
    /// Columns separated by tabs.
    Scripted,
    /// JSON.
    Json,
    /// A patch.
    Patch,
}

/// Which changes are shown, and how.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiffOrder {
    /// The workspace.
    pub name: String,
    /// Form of the list.
    pub form: ChangesForm,
    /// Paths that it is limited to; empty: all.
    pub paths: Vec<PathBuf>,
}

/// Which changes are committed, and how.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommitOrder {
    /// The workspace.
    pub name: String,
    /// Paths that it is limited to; empty: all.
    pub paths: Vec<PathBuf>,
    /// How conflicts are resolved.
    pub resolution: Option<Resolution>,
    /// Ask for each change and each conflict.
    pub ask: bool,
    /// Also what an administrator has to confirm.
    pub force: bool,
    /// Take an interrupted commit back.
    pub undo: bool,
    /// Files in the base that have the workspace's content are no conflicts.
    pub compare_content: bool,
    /// The result as JSON.
    pub json: bool,
}

/// A command to run in a workspace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunOrder {
    /// The workspace.
    pub name: String,
    /// Discard the workspace when the command has ended.
    pub discard: bool,
    /// The command runs as root of a user namespace.
    pub as_root: bool,
    /// File that gets the result as JSON.
    pub json: Option<PathBuf>,
    /// The command with its arguments.
    pub command: Vec<OsString>,
}

/// The command line of `nacre workspace`.
pub fn command() -> Command {
    Command::new("workspace")
        .about("Work on a directory in a view of its own: then keep, look at, or throw away the changes")
        .after_help(
            "Examples:\n  nacre workspace create try --from /srv/site\n  nacre workspace run try -- make\n  nacre workspace discard try\n\nNAME is up to 64 letters, digits, dots, hyphens and underscores. Workspaces lie in /var/lib/nacre/workspaces, those of ordinary users in ~/.local/state/nacre/workspaces.",
        )
        .subcommand_required(true)
        .arg_required_else_help(true)
        .disable_help_subcommand(true)
        .subcommand(create())
        .subcommand(mount())
        .subcommand(list())
        .subcommand(run())
        .subcommand(diff())
        .subcommand(commit())
        .subcommand(discard())
        .subcommand(rename())
        .subcommand(snapshot())
        .subcommand(rollback())
        .subcommand(export())
        .subcommand(import())
}

fn name() -> Arg {
    Arg::new("NAME").required(true).value_name("WORKSPACE").help("Which workspace")
}

fn json() -> Arg {
    flag("json", None, "The result as JSON")
}

fn flag(name: &'static str, letter: Option<char>, help: &'static str) -> Arg {
    let arg = Arg::new(name).long(name).action(ArgAction::SetTrue).help(help);
    match letter {
        Some(letter) => arg.short(letter),
        None => arg,
    }
}

fn create() -> Command {
    Command::new("create")
        .about("Make a workspace over a directory, which is not changed before a commit")
        .after_help(
            "Examples:\n  nacre workspace create try --from /srv/site\n  nacre workspace create job1 --from ~/checkout --at /tmp/job1 --size 2G\n  nacre workspace create agent --from ~/project --hide '*.key' --hide .env --ro .git --read-only-below\n  nacre workspace create further --from try\n  nacre workspace create home --from tank/home\n\nIf --from names a workspace, its view is the base; of a mounted file system of a pool, a snapshot. The view's directory is printed.",
        )
        .arg(Arg::new("NAME").required(true).help("Name of the new workspace"))
        .arg(
            Arg::new("from")
                .long("from")
                .required(true)
                .value_name("DIR|WORKSPACE|POOL/FS[@SNAPSHOT]")
                .value_parser(value_parser!(OsString))
                .action(ArgAction::Append)
                .help("What it shows (may be repeated: the first is on top)"),
        )
        .arg(
            Arg::new("at")
                .long("at")
                .value_name("DIR")
                .value_parser(value_parser!(PathBuf))
                .help("Where it is shown; made where it is missing [default: in the directory of workspaces]"),
        )
        .arg(Arg::new("size").long("size").value_name("SIZE").help("How much its changes may take (2G); beyond it: quota exceeded (EDQUOT)"))
        .arg(Arg::new("files").long("files").value_name("N").value_parser(value_parser!(u64)).help("How many files and directories its changes may be"))
        .arg(
            Arg::new("ro")
                .long("ro")
                .value_name("PATH")
                .value_parser(value_parser!(PathBuf))
                .action(ArgAction::Append)
                .help("What cannot be changed in it: a path below DIR (may be repeated)"),
        )
        .arg(
            Arg::new("hide")
                .long("hide")
                .value_name("PATTERN")
                .action(ArgAction::Append)
                .help("Names that it does not show: '*.key' (may be repeated)"),
        )
        .arg(flag("read-only-below", None, "Commands that run in it can change nothing else: all other file systems are read-only for them, and their /tmp is empty"))
        .arg(flag("survive", None, "Go on when the process that serves the view is killed or crashes"))
        .arg(json())
}

fn mount() -> Command {
    Command::new("mount")
        .about("Show a workspace again, after a reboot or `nacre umount`")
        .after_help("Examples:\n  nacre workspace mount try")
        .arg(json())
        .arg(name())
}

fn list() -> Command {
    clap_args::view_arguments(Command::new("list"))
        .mut_arg("all-users", |arg| arg.hide(true))
        .about("Show workspaces: age, size of the changes, processes inside, base")
        .after_help("Examples:\n  nacre workspace list\n  nacre workspace list --json\n  nacre workspace list -H -p -o name,size,processes")
}

fn run() -> Command {
    Command::new("run")
        .about("Run a command in a workspace, which lies over the directory itself for it")
        .after_help(
            "Examples:\n  nacre workspace run try -- make test\n  nacre workspace run --discard job1 -- ./ci.sh\n  nacre workspace run --discard --json result.json job1 -- ./ci.sh\n  nacre workspace run try\n\nWithout COMMAND, it is the user's shell. The exit code is that of the command; 125 if it cannot be run in the workspace, 126 or 127 if it cannot be run at all. With --discard or --json, 128 + N stands for the signal N.",
        )
        .arg(flag("discard", None, "Discard the workspace when the command has ended"))
        .arg(
            Arg::new("json")
                .long("json")
                .value_name("FILE")
                .value_parser(value_parser!(PathBuf))
                .help("When the command has ended, write how, as JSON, to this file (/dev/fd/3: a descriptor)"),
        )
        .arg(flag("root", None, "Root for the command, of the user's own files alone (ordinary users)"))
        .arg(name())
        .arg(
            Arg::new("COMMAND")
                .value_parser(value_parser!(OsString))
                .num_args(0..)
                .trailing_var_arg(true)
                .allow_hyphen_values(true)
                .help("The command and its arguments"),
        )
}

fn discard() -> Command {
    Command::new("discard")
        .about("Throw workspaces away, with their changes and snapshots")
        .after_help(
            "Examples:\n  nacre workspace discard try\n\nRefused while processes are inside; the others are discarded.",
        )
        .arg(json())
        .arg(name().num_args(1..).action(ArgAction::Append))
}

fn rename() -> Command {
    Command::new("rename")
        .about("Give a workspace another name")
        .after_help("Examples:\n  nacre workspace rename try kept\n\nRefused while processes are inside.")
        .arg(json())
        .arg(name())
        .arg(Arg::new("TO").required(true).value_name("NEW-NAME").help("The new name"))
}

fn paths() -> Arg {
    Arg::new("PATH")
        .value_parser(value_parser!(PathBuf))
        .num_args(0..)
        .action(ArgAction::Append)
        .help("These paths alone, relative to the workspace's directory [default: all]")
}

fn diff() -> Command {
    Command::new("diff")
        .about("Show what a workspace changes: M, A, D, R old -> new")
        .after_help(
            "Examples:\n  nacre workspace diff try\n  nacre workspace diff --stat try src\n  nacre workspace diff --patch try | git -C /srv/site apply\n\nThe exit code is 0 without changes, and 1 with some.",
        )
        .arg(flag("json", None, "As JSON").conflicts_with_all(["scripted", "stat", "patch"]))
        .arg(
            Arg::new("scripted")
                .short('H')
                .action(ArgAction::SetTrue)
                .conflicts_with_all(["stat", "patch"])
                .help("One tab between kind, path, old path and changed aspects"),
        )
        .arg(flag("stat", None, "With sizes before and after").conflicts_with("patch"))
        .arg(flag("patch", None, "As a patch in git's form"))
        .arg(name())
        .arg(paths())
}

fn commit() -> Command {
    Command::new("commit")
        .about("Make the changes of a workspace in its directory")
        .after_help(
            "Examples:\n  nacre workspace commit try\n  nacre workspace commit --theirs try etc/motd\n  nacre workspace commit -i try\n\n-i asks at the terminal for each change: yes, no, all of its directory, none of it, its diff, or quit: then nothing is committed. Where others have changed the same paths meanwhile, nothing is committed, and the exit code is 4. After a crash the same command continues.",
        )
        .arg(flag("ours", None, "Of paths that others have changed, take the workspace's").conflicts_with_all(["theirs", "interactive"]))
        .arg(flag("theirs", None, "Of paths that others have changed, leave the directory's").conflicts_with("interactive"))
        .arg(flag("interactive", Some('i'), "Ask at the terminal for each change, and for each path that others have changed"))
        .arg(flag("content", None, "Others' changes that end with the workspace's content and attributes are no conflicts"))
        .arg(flag("undo", None, "Take back a commit that was interrupted").conflicts_with_all(["ours", "theirs", "interactive", "force"]))
        .arg(flag("force", Some('f'), "Also set-id bits, capabilities, devices and files of other owners (root)"))
        .arg(json())
        .arg(name())
        .arg(paths())
}

fn export() -> Command {
    Command::new("export")
        .about("Write the changes of a workspace as tar: a layer of a container image")
        .after_help("Examples:\n  nacre workspace export -o changes.tar try\n  nacre workspace export try | ssh host nacre workspace import try\n\nRefused while processes are inside.")
        .arg(Arg::new("output").short('o').long("output").value_name("FILE").value_parser(value_parser!(PathBuf)).help("The archive [default: standard output]"))
        .arg(json().requires("output"))
        .arg(name())
}

fn import() -> Command {
    Command::new("import")
        .about("Read changes from an archive of `export`, or from a layer of a container image")
        .after_help("Examples:\n  nacre workspace import try changes.tar\n\nThe workspace must have no changes yet.")
        .arg(json())
        .arg(name())
        .arg(Arg::new("FILE").value_parser(value_parser!(PathBuf)).help("The archive [default: standard input]"))
}

fn snapshot() -> Command {
    Command::new("snapshot")
        .about("Keep the present changes of a workspace, to go back to them")
        .after_help("Examples:\n  nacre workspace snapshot try@before-upgrade\n\nRefused while processes are inside.")
        .arg(json())
        .arg(
            Arg::new("SNAPSHOT")
                .required(true)
                .value_name("WORKSPACE@NAME")
                .help("The workspace, and the name of the snapshot"),
        )
}

fn rollback() -> Command {
    Command::new("rollback")
        .about("Go back to a snapshot of a workspace: changes since then are lost")
        .after_help("Examples:\n  nacre workspace rollback try@before-upgrade\n\nRefused while processes are inside. The snapshot stays.")
        .arg(json())
        .arg(Arg::new("SNAPSHOT").required(true).value_name("WORKSPACE@NAME").help("Which snapshot"))
}

/// Parses the matched arguments of `nacre workspace`.
///
/// # Errors
/// An unknown command.
pub fn parse(matches: &ArgMatches) -> Result<WorkspaceVerb, Failure> {
    let text = |matches: &ArgMatches, name: &str| matches.get_one::<String>(name).cloned().unwrap_or_default();
    let paths = |matches: &ArgMatches, name: &str| {
        matches.get_many::<PathBuf>(name).into_iter().flatten().cloned().collect::<Vec<_>>()
    };
    let words = |matches: &ArgMatches, name: &str| {
        matches.get_many::<OsString>(name).into_iter().flatten().cloned().collect::<Vec<_>>()
    };
    Ok(match matches.subcommand() {
        Some(("create", matches)) => WorkspaceVerb::Create(Box::new(CreateOrder {
            name: text(matches, "NAME"),
            from: words(matches, "from"),
            at: matches.get_one::<PathBuf>("at").cloned(),
            size: matches.get_one::<String>("size").cloned(),
            files: matches.get_one::<u64>("files").copied(),
            read_only: paths(matches, "ro"),
            hide: clap_args::texts(matches, "hide"),
            read_only_below: matches.get_flag("read-only-below"),
            survive: matches.get_flag("survive"),
            json: matches.get_flag("json"),
        })),
        Some(("mount", matches)) => {
            WorkspaceVerb::Mount { name: text(matches, "NAME"), json: matches.get_flag("json") }
        }
        Some(("list", matches)) => WorkspaceVerb::List { view: clap_args::view(matches) },
        Some(("run", matches)) => WorkspaceVerb::Run(Box::new(RunOrder {
            name: text(matches, "NAME"),
            discard: matches.get_flag("discard"),
            as_root: matches.get_flag("root"),
            json: matches.get_one::<PathBuf>("json").cloned(),
            command: words(matches, "COMMAND"),
        })),
        Some(("diff", matches)) => {
            let forms = [
                ("json", ChangesForm::Json),
                ("scripted", ChangesForm::Scripted),
                ("stat", ChangesForm::Stat),
                ("patch", ChangesForm::Patch),
            ];
            let form = forms.into_iter().find(|(name, _)| matches.get_flag(name));
            WorkspaceVerb::Diff(DiffOrder {
                name: text(matches, "NAME"),
                form: form.map(|(_, form)| form).unwrap_or_default(),
                paths: paths(matches, "PATH"),
            })
        }
        Some(("commit", matches)) => {
            let resolution = match (matches.get_flag("ours"), matches.get_flag("theirs")) {
                (true, _) => Some(Resolution::Ours),
                (_, true) => Some(Resolution::Theirs),
                _ => None,
            };
            WorkspaceVerb::Commit(Box::new(CommitOrder {
                name: text(matches, "NAME"),
                paths: paths(matches, "PATH"),
                resolution,
                ask: matches.get_flag("interactive"),
                force: matches.get_flag("force"),
                undo: matches.get_flag("undo"),
                compare_content: matches.get_flag("content"),
                json: matches.get_flag("json"),
            }))
        }
        Some(("export", matches)) => WorkspaceVerb::Export {
            name: text(matches, "NAME"),
            file: matches.get_one::<PathBuf>("output").cloned(),
            json: matches.get_flag("json"),
        },
        Some(("import", matches)) => WorkspaceVerb::Import {
            name: text(matches, "NAME"),
            file: matches.get_one::<PathBuf>("FILE").cloned(),
            json: matches.get_flag("json"),
        },
        Some(("discard", matches)) => {
            WorkspaceVerb::Discard { names: clap_args::texts(matches, "NAME"), json: matches.get_flag("json") }
        }
        Some(("rename", matches)) => WorkspaceVerb::Rename {
            name: text(matches, "NAME"),
            to: text(matches, "TO"),
            json: matches.get_flag("json"),
        },
        Some(("snapshot", matches)) => {
            WorkspaceVerb::Snapshot { snapshot: text(matches, "SNAPSHOT"), json: matches.get_flag("json") }
        }
        Some(("rollback", matches)) => {
            WorkspaceVerb::Rollback { snapshot: text(matches, "SNAPSHOT"), json: matches.get_flag("json") }
        }
        _ => return Err(Failure::usage("a command of workspaces is needed").next("nacre workspace --help lists them")),
    })
}
