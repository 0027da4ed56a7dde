//! What the program says to a wrong call where it is called as `zfs` or `zpool`: the sentences of these programs, and how the verb is used.
//!
//! Made from the tables of [`super::command`] and of `fs`, so that what is shown is what is taken. Pure but for [`report`] and [`refuse`].

use crate::{
    failure::{Exit, Failure},
    report::printable,
};
use clap::{
    Arg, ArgAction, Command,
    error::{ContextKind, ContextValue, ErrorKind},
};
use std::{ffi::OsString, io::Write, process::ExitCode};

/// Tells of a command line that the table does not take; help and the version come this way as well.
pub fn report(error: &clap::Error, table: &Command, arguments: &[OsString]) -> ExitCode {
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        // Nobody is left to tell when the output is closed.
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    say(&format!("{}\n{}", sentence(error), usage(table, arguments)));
    ExitCode::from(Exit::Usage as u8)
}

/// Tells of what failed; of a wrong call also how the verb is used.
pub fn refuse(failure: &Failure, program: &str, table: &Command, arguments: &[OsString]) -> ExitCode {
    if failure.exit != Exit::Usage {
        return failure.report(program);
    }
    say(&format!("{}\n{}", failure.what, usage(table, arguments)));
    ExitCode::from(failure.code(program))
}

fn say(text: &str) {
    // Nobody is left to tell when standard error is closed.
    let _ = std::io::stderr().lock().write_all(text.as_bytes());
}

/// What is wrong, in ZFS' words where it has some.
fn sentence(error: &clap::Error) -> String {
    let of = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        Some(ContextValue::Strings(texts)) => texts.first().cloned(),
        _ => None,
    };
    let argument = of(ContextKind::InvalidArg).unwrap_or_default();
    match error.kind() {
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand | ErrorKind::MissingSubcommand => "missing command".to_owned(),
        ErrorKind::InvalidSubcommand => {
            format!("unrecognized command '{}'", printable(of(ContextKind::InvalidSubcommand).unwrap_or_default().as_bytes()))
        }
        ErrorKind::MissingRequiredArgument | ErrorKind::TooFewValues | ErrorKind::WrongNumberOfValues => missing(&argument),
        ErrorKind::UnknownArgument => match argument.strip_prefix('-') {
            Some(letter) => format!("invalid option '{}'", printable(letter.as_bytes())),
            None => "too many arguments".to_owned(),
        },
        _ => {
            let text = error.to_string();
            text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned()
        }
    }
}

/// What `zpool` and `zfs` call the argument that the table has under this name.
fn missing(argument: &str) -> String {
    let name = argument.split(['>', ' ', '|']).next().unwrap_or_default().trim_start_matches(['<', '[']);
    match name.trim_end_matches([']', '.']) {
        "POOL" => "missing pool name argument".to_owned(),
        "DEVICE" => "missing vdev specification".to_owned(),
        "FROM" => "missing source dataset argument".to_owned(),
        "TO" => "missing target dataset argument".to_owned(),
        "PROPERTY=VALUE" => "missing property=value argument".to_owned(),
        "PROPERTIES" | "PROPERTY" | "all" => "missing property argument".to_owned(),
        "WHAT" => "missing dataset argument".to_owned(),
        letter if letter.starts_with('-') => format!("missing '{}' option", letter.trim_start_matches('-')),
        other => format!("missing {} argument", other.to_lowercase()),
    }
}

/// How the verb that was meant is used, or, where none was, all of them.
fn usage(table: &Command, arguments: &[OsString]) -> String {
    let verb = arguments.first().and_then(|verb| verb.to_str()).and_then(|verb| table.find_subcommand(verb));
    if let Some(verb) = verb.filter(|verb| !verb.is_hide_set()) {
        return format!("usage:\n\t{}\n", line(verb));
    }
    let verbs = table.get_subcommands().filter(|verb| !verb.is_hide_set());
    let lines: String = verbs.map(|verb| format!("\t{}\n", line(verb))).collect();
    format!("usage: {} command args ...\nwhere 'command' is one of the following:\n\n{lines}", table.get_name())
}

/// A verb with its letters and arguments on a line: `create [-fn] [-o property=value] ... <pool> <device> ...`.
fn line(verb: &Command) -> String {
    let shown = || verb.get_arguments().filter(|arg| !arg.is_hide_set() && !matches!(arg.get_id().as_str(), "help" | "version"));
    let flag = |arg: &&Arg| arg.get_short().is_some() && !arg.get_action().takes_values() && !arg.is_required_set();
    let letters: String = shown().filter(flag).filter_map(Arg::get_short).collect();
    let mut text = verb.get_name().to_owned();
    if !letters.is_empty() {
        text.push_str(&format!(" [-{letters}]"));
    }
    let (places, options): (Vec<&Arg>, Vec<&Arg>) = shown().filter(|arg| !flag(arg)).partition(|arg| arg.is_positional());
    for arg in options.into_iter().chain(places) {
        text.push(' ');
        text.push_str(&argument(arg));
    }
    text
}

fn argument(arg: &Arg) -> String {
    let name = arg.get_value_names().and_then(|names| names.first()).map_or_else(|| arg.get_id().as_str(), |name| name.as_str());
    let name = name.trim_end_matches("...").trim_end_matches(',').to_lowercase();
    let switch = arg.get_short().map(|letter| format!("-{letter}")).or_else(|| arg.get_long().map(|word| format!("--{word}")));
    let more = match arg.get_action() {
        ArgAction::Append => " ...",
        _ if arg.get_num_args().is_some_and(|count| count.max_values() > 1) => " ...",
        _ => "",
    };
    let text = match switch {
        Some(switch) if arg.get_action().takes_values() => format!("{switch} {name}"),
        Some(switch) => switch,
        None => format!("<{name}>"),
    };
    if arg.is_required_set() { format!("{text}{more}") } else { format!("[{}]{more}", text.trim_matches(['<', '>'])) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{fs, pool};

    fn said(program: &str, words: &str) -> String {
        let table = if program == "zfs" { fs::command::command() } else { pool::command::command() };
        let table = table.name(program.to_owned()).bin_name(program.to_owned());
        let arguments: Vec<OsString> = words.split_whitespace().map(OsString::from).collect();
        let error = table.clone().try_get_matches_from(std::iter::once(OsString::from(program)).chain(arguments.clone())).unwrap_err();
        format!("{}\n{}", sentence(&error), usage(&table, &arguments))
    }

    #[test]
    fn wrong_calls_are_told_as_zfs_does() {
        let text = said("zpool", "create");
        assert!(text.starts_with("missing pool name argument\nusage:\n\tcreate [-fn] [-o property=value] ... ["), "{text}");
        assert!(text.ends_with(" <pool> <device> ...\n"), "{text}");
        assert!(said("zpool", "create tank").starts_with("missing vdev specification\nusage:\n\tcreate "));
        assert!(said("zpool", "foo").starts_with("unrecognized command 'foo'\nusage: zpool command args ...\nwhere 'command' is one of"));
        assert!(said("zpool", "set autotrim=on tank tank").starts_with("too many arguments\nusage:\n\tset "));
        assert!(said("zfs", "").starts_with("missing command\nusage: zfs command args ..."));
        assert!(said("zfs", "list -x").starts_with("invalid option 'x'\nusage:\n\tlist ["));
        assert!(said("zfs", "rename t/a").starts_with("missing target dataset argument\n"));
        assert!(said("zfs", "create").starts_with("missing filesystem argument\n"));
        assert!(said("zfs", "set quota").starts_with("missing property=value argument\n"));
        assert!(said("zfs", "destroy").starts_with("missing dataset argument\n"));
        // What is there for compatibility alone is not shown.
        assert!(!said("zpool", "").contains("attach"));
    }
}
