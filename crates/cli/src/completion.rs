//! Candidates for completion in shells: words of the table of commands, and existing values: users,
//! groups, mounts, pools, file systems, snapshots, words of options.
//!
//! The scripts that `nacre completions SHELL` prints call `nacre complete WORD...`, with the
//! command line up to the cursor, the program's name first; [`answer`] prints one candidate per
//! line, its explanation after a tab. The value name of an argument in help decides which values
//! complete it ([`completer`]).
//!
//! Invariants: no pool is started, imported or waited for. Only running processes are asked, and a
//! process that does not answer within a moment is left out. Errors are not printed: a shell would
//! print them into the command line.

use crate::{
    commands,
    fs::{command as fs, run::ZFS},
    options::{MountWord, TABLE, word},
    output::print,
    pool,
};
use clap::{Arg, ArgMatches, Command, ValueHint};
use clap_complete::{
    Shell,
    engine::{ArgValueCompleter, CompletionCandidate, PathCompleter, ValueCompleter as _, complete},
};
use nacre_admin::fs::{FsAnswer, FsRequest, Listing, Types};
use nacre_daemon::{
    failure::Failure,
    mountinfo,
    plan::{FUSE_OVERLAYFS, MERGERFS},
    pool::{client, expected, start::ZPOOL},
    workspace::store::Store,
};
use nacre_pool::properties::{DATASET_PROPERTIES, Definition, Kind, POOL_PROPERTIES, Settable};
use std::{
    ffi::{OsStr, OsString},
    path::Path,
};

/// The names of the program that have a completion script.
pub const NAMES: [&str; 6] = ["nacre", "bindfs", FUSE_OVERLAYFS, MERGERFS, ZFS, ZPOOL];

/// Returns the script of a shell for the program under one of its [`NAMES`].
///
/// # Errors
/// A shell that has no script for this name.
pub fn script(shell: Shell, name: &str) -> Result<String, Failure> {
    let function = name.replace('-', "_");
    let form = match shell {
        Shell::Bash => include_str!("../completion/bash"),
        Shell::Zsh => include_str!("../completion/zsh"),
        Shell::Fish => include_str!("../completion/fish"),
        other if name == "nacre" => {
            // Without existing values: only words of the table.
            let mut script = Vec::new();
            clap_complete::generate(other, &mut commands::table(), name, &mut script);
            return Ok(String::from_utf8_lossy(&script).into_owned());
        }
        other => return Err(Failure::usage(format!("there is no script of {other} for {name}"))),
    };
    Ok(form.replace("FUNCTION", &function).replace("NAME", name))
}

/// Prints the candidates for the last word.
///
/// # Errors
/// Output that cannot be written.
pub fn answer(matches: &ArgMatches) -> Result<(), Failure> {
    let words: Vec<OsString> = matches.get_many("WORD").into_iter().flatten().cloned().collect();
    let Some((first, last)) = words.first().zip(words.last()) else { return Ok(()) };
    let mut table = with_values(&table(first), false);
    let typed = last.to_string_lossy().into_owned();
    let index = words.len() - 1;
    let mut found = complete(&mut table, words, index, Some(Path::new("."))).unwrap_or_default();
    let is_option = |candidate: &CompletionCandidate| candidate.get_value().as_encoded_bytes().starts_with(b"-");
    // Options where nothing else can stand, or where one was begun.
    if !typed.starts_with('-') && found.iter().any(|candidate| !is_option(candidate)) {
        found.retain(|candidate| !is_option(candidate));
    }
    let mut text = String::new();
    for candidate in found {
        let value = candidate.get_value().to_string_lossy();
        // A value with a newline or tab cannot stand in a line of candidates: it has to be typed by
        // hand.
        if value.contains(['\n', '\t']) {
            continue;
        }
        text.push_str(&value);
        if let Some(help) = candidate.get_help().map(ToString::to_string) {
            text.push_str(&format!("\t{}", help.lines().next().unwrap_or_default()));
        }
        text.push('\n');
    }
    print(&text)
}

/// Returns the table of commands of the program with this name.
fn table(program: &OsStr) -> Command {
    let name = crate::personality::program(program);
    let verb = |name: &str| commands::table().find_subcommand(name).cloned().unwrap_or_else(commands::table);
    match name.as_str() {
        "bindfs" | FUSE_OVERLAYFS | MERGERFS => verb(&name),
        ZFS => fs::command(),
        ZPOOL => pool::command::command(),
        _ => commands::table(),
    }
}

/// Adds a completer to each argument of a command and of its subcommands.
fn with_values(command: &Command, of_pools: bool) -> Command {
    let name = command.get_name().to_owned();
    let of_pools = of_pools || name == "pool";
    let mut command = command.clone().mut_args(|arg| with_value(&name, of_pools, arg));
    let below: Vec<Command> = command.get_subcommands().map(|below| with_values(below, of_pools)).collect();
    for one in below {
        command = command.mut_subcommand(one.get_name(), |_| one.clone());
    }
    command
}

fn with_value(verb: &str, of_pools: bool, arg: Arg) -> Arg {
    let shown = arg.get_value_names().and_then(|names| names.first()).map(ToString::to_string);
    let shown = shown.unwrap_or_else(|| arg.get_id().to_string());
    let hint = |hint| arg.clone().value_hint(hint);
    match shown.as_str() {
        "DEVICE" if of_pools && ["create", "add"].contains(&verb) => {
            arg.add(ArgValueCompleter::new(move |typed: &OsStr| {
                let words = ["mirror", "raidz1", "raidz2", "raidz3", "special", "log", "spare"];
                let mut found = fitting(typed, words.into_iter().map(str::to_owned));
                found.extend(PathCompleter::any().complete(typed));
                found
            }))
        }
        "FILE" | "SOURCE" | "STACK" | "DEST" | "DEVICE" | "PATH" | "BRANCH" | "BRANCHES" => hint(ValueHint::AnyPath),
        "DIR" if verb == "resize" || verb == "status" => arg.add(ArgValueCompleter::new(mounts)),
        "DIR" => hint(ValueHint::DirPath),
        "MOUNTPOINT" if MAKE.contains(&verb) => hint(ValueHint::DirPath),
        shown => match completer(verb, of_pools, shown) {
            Some(completer) => arg.add(completer),
            None => arg,
        },
    }
}

/// Commands that create a mount: their mount points are any directories.
const MAKE: [&str; 7] = ["mirror", "bindfs", FUSE_OVERLAYFS, MERGERFS, "mount", "cage", "union"];

/// Returns the completer of an argument by its value name in help.
fn completer(verb: &str, of_pools: bool, shown: &str) -> Option<ArgValueCompleter> {
    let table = if of_pools { POOL_PROPERTIES } else { DATASET_PROPERTIES };
    Some(match shown {
        "USER" => ArgValueCompleter::new(|typed: &OsStr| fitting(typed, names_in("/etc/passwd"))),
        "GROUP" => ArgValueCompleter::new(|typed: &OsStr| fitting(typed, names_in("/etc/group"))),
        "MOUNTPOINT" => ArgValueCompleter::new(mounts),
        "WORKSPACE" | "WORKSPACE@NAME" => ArgValueCompleter::new(|typed: &OsStr| fitting(typed, workspaces())),
        "POOL" => ArgValueCompleter::new(|typed: &OsStr| fitting(typed, pools())),
        "FILESYSTEM" => ArgValueCompleter::new(|typed: &OsStr| fitting(typed, filesystems())),
        "FILESYSTEM@SNAPSHOT" | "SNAPSHOT" | "WHAT" | "FROM" | "TO" | "BOOKMARK" => {
            let snapshot = matches!(shown, "SNAPSHOT" | "FILESYSTEM@SNAPSHOT");
            ArgValueCompleter::new(move |typed: &OsStr| objects(typed, snapshot))
        }
        "PROPERTY=VALUE" => ArgValueCompleter::new(move |typed: &OsStr| fitting(typed, assignments(table, typed))),
        // `set` takes assignments, then names.
        "PROPERTY=VALUE..." => ArgValueCompleter::new(|typed: &OsStr| {
            let mut found = fitting(typed, assignments(DATASET_PROPERTIES, typed));
            found.extend(objects(typed, false));
            found
        }),
        "PROPERTY" | "PROPERTY[,PROPERTY...]" | "all|PROPERTY,..." => {
            ArgValueCompleter::new(move |typed: &OsStr| fitting(typed, in_list(typed, property_names(table))))
        }
        "TYPE[,TYPE...]" => listed(&["filesystem", "snapshot", "bookmark", "all"]),
        "WORD[,WORD]..." => ArgValueCompleter::new(|typed: &OsStr| fitting(typed, in_list(typed, mount_words()))),
        "ENGINE" if verb == "cage" => listed(&["fuse", "loop", "quota", "auto"]),
        "ENGINE" => listed(&["fuse", "kernel", "auto"]),
        // auto|off
        shown => {
            let words: Vec<String> = shown.split('|').filter(|word| is_word(word)).map(str::to_owned).collect();
            if words.is_empty() {
                return None;
            }
            ArgValueCompleter::new(move |typed: &OsStr| fitting(typed, words.clone()))
        }
    })
}

fn listed(words: &'static [&'static str]) -> ArgValueCompleter {
    let words = move || words.iter().map(|word| (*word).to_owned()).collect();
    ArgValueCompleter::new(move |typed: &OsStr| fitting(typed, in_list(typed, words())))
}

/// Whether a text is a literal word, not the name of a kind of values.
fn is_word(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
}

fn workspaces() -> Vec<String> {
    Store::find().and_then(|store| store.names()).unwrap_or_default()
}

/// Returns the candidates that begin with the typed text.
fn fitting(typed: &OsStr, all: impl IntoIterator<Item = String>) -> Vec<CompletionCandidate> {
    let typed = typed.to_string_lossy();
    all.into_iter().filter(|one| one.starts_with(&*typed)).map(CompletionCandidate::new).collect()
}

/// Completes the last item of a comma-separated list.
fn in_list(typed: &OsStr, words: Vec<String>) -> Vec<String> {
    let typed = typed.to_string_lossy();
    let before = typed.rfind(',').and_then(|comma| typed.get(..=comma)).unwrap_or_default();
    words.into_iter().map(|word| format!("{before}{word}")).collect()
}

/// Returns the names in a file such as passwd(5). Directory services on the network are not asked:
/// they may take long, and block every user of a shell.
fn names_in(file: &str) -> Vec<String> {
    let text = std::fs::read(file).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let names = text.lines().filter_map(|line| line.split_once(':')).map(|(name, _)| name.to_owned());
    names.filter(|name| !name.is_empty() && !name.starts_with(['#', '+', '-'])).collect()
}

/// Returns the mount points that nacre's processes serve.
fn mounts(typed: &OsStr) -> Vec<CompletionCandidate> {
    let all = mountinfo::read().unwrap_or_default();
    let served = all.into_iter().filter(mountinfo::MountEntry::is_served);
    fitting(typed, served.filter_map(|entry| entry.mountpoint.into_os_string().into_string().ok()))
}

/// Returns the names of the imported pools.
fn pools() -> Vec<String> {
    expected::there().into_iter().map(|(name, _)| name).collect()
}

/// Asks the processes of this user's pools for the names of objects.
fn asked(listing: &Listing) -> Vec<String> {
    let listing = Listing { properties: Some(Vec::new()), ..listing.clone() };
    let ask = move |owned: &client::Owned| owned.fs("", FsRequest::List(listing.clone()), &mut |_| {});
    let (answers, _) = client::ask_each(client::ours(), ask);
    let listed = answers.into_iter().filter_map(|answer| match answer {
        FsAnswer::Listed(listed) => Some(listed),
        _ => None,
    });
    listed.flatten().map(|object| object.name).collect()
}

fn filesystems() -> Vec<String> {
    asked(&Listing { types: Some(Types { filesystems: true, ..Types::default() }), ..Listing::default() })
}

/// Returns file systems, and after the name of one its snapshots or bookmarks. Where only a
/// snapshot is valid, a file system is offered as its beginning.
fn objects(typed: &OsStr, only_snapshots: bool) -> Vec<CompletionCandidate> {
    let text = typed.to_string_lossy();
    let Some(mark) = text.find(['@', '#']) else {
        let end = if only_snapshots { "@" } else { "" };
        return fitting(typed, filesystems().into_iter().map(|name| name + end));
    };
    let snapshots = text.as_bytes().get(mark) == Some(&b'@');
    let types = Some(Types { snapshots, bookmarks: !snapshots, ..Types::default() });
    let names = vec![text.get(..mark).unwrap_or_default().to_owned()];
    fitting(typed, asked(&Listing { names, types, depth: Some(1), ..Listing::default() }))
}

/// Returns `NAME=`, and after it the values that the property takes.
fn assignments(table: &[Definition], typed: &OsStr) -> Vec<String> {
    let typed = typed.to_string_lossy();
    let settable = table.iter().filter(|property| property.settable != Settable::Never);
    let Some((name, _)) = typed.split_once('=') else {
        return settable.map(|property| format!("{}=", property.name)).collect();
    };
    let known = settable.into_iter().find(|property| property.name == name || property.short == Some(name));
    let words: &[&str] = match known.map(|property| property.kind) {
        Some(Kind::Choice(words)) => words,
        Some(Kind::Compression) => &["on", "off", "lz4", "zstd"],
        Some(Kind::Limit | Kind::Count) => &["none"],
        Some(Kind::Mountpoint) => &["none", "legacy"],
        Some(Kind::Unserved(_, words)) => words,
        _ => &[],
    };
    words.iter().map(|word| format!("{name}={word}")).collect()
}

fn property_names(table: &[Definition]) -> Vec<String> {
    std::iter::once("all").chain(table.iter().map(|property| property.name)).map(str::to_owned).collect()
}

/// Returns the words that are valid after `-o`.
fn mount_words() -> Vec<String> {
    let taken = |name: &str, value: bool| matches!(word(name, value), Some(MountWord::Row(_)));
    let rows = TABLE.iter().filter(|row| !row.name.is_empty() && taken(row.name, row.value.is_some()));
    rows.map(|row| format!("{}{}", row.name, if row.value.is_some() { "=" } else { "" })).collect()
}
