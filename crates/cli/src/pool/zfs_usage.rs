//! Error messages for wrong calls of verbs of pools or file systems: the sentences of `zfs` and
//! `zpool`, and the usage of the verb. Called by these names the program has their form as well; as
//! `nacre pool` and `nacre fs` nacre's own.
//!
//! Generated from the tables of [`super::command`] and of `fs`, so that usage and parser agree.
//! Pure except for [`report`] and [`refuse`].

use super::unserved::Unserved;
use clap::{
    Arg, ArgAction, Command,
    error::{ContextKind, ContextValue, ErrorKind},
};
use nacre_daemon::{
    failure::{Exit, Failure},
    pool::start::ZPOOL,
    report::printable,
};
use std::{ffi::OsString, io::Write, process::ExitCode};

/// Maximum length of an argument list that is shown after an error, characters.
const USAGE_WIDTH: usize = 100;

/// Replaces ZFS' words for help (`-?`, `help`, `help VERB`) by `--help`.
pub fn with_help(arguments: Vec<OsString>) -> Vec<OsString> {
    let words = arguments.into_iter().map(|word| if word == "-?" { OsString::from("--help") } else { word });
    let mut words: Vec<OsString> = words.collect();
    if words.len() <= 2 && words.first().is_some_and(|word| word == "help") {
        words.remove(0);
        words.push(OsString::from("--help"));
    }
    words
}

/// Reports a command line that the parser rejects; help and the version are handled here as well.
pub fn report(error: &clap::Error, table: &Command, arguments: &[OsString]) -> ExitCode {
    if error.kind() == ErrorKind::DisplayVersion {
        // The output may be closed: nothing can be reported then.
        let _ = writeln!(std::io::stdout(), "{}", super::version::zfs_version().join("\n"));
        return ExitCode::SUCCESS;
    }
    if error.kind() == ErrorKind::DisplayHelp {
        // The output may be closed: nothing can be reported then.
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    say(&format!("{}\n{}", sentence(error), usage(table, arguments)));
    ExitCode::from(Exit::Usage as u8)
}

/// Reports a failure; for a wrong call also the usage of the verb.
pub fn refuse(failure: &Failure, program: &str, table: &Command, arguments: &[OsString]) -> ExitCode {
    if failure.exit != Exit::Usage {
        return Failure { next: in_zfs_words(&failure.next), ..failure.clone() }.report(program);
    }
    say(&format!("{}\n{}", failure.what, usage(table, arguments)));
    ExitCode::from(failure.code(program))
}

/// Replaces nacre's command names in a hint by `zfs` and `zpool`, which take the same commands.
fn in_zfs_words(hint: &str) -> String {
    hint.replace("nacre fs ", "zfs ").replace("nacre pool ", "zpool ")
}

/// Returns the failure for a command line of `nacre` that the parser rejects, with the usage of the
/// command; `None` for help.
pub fn wrong(error: &clap::Error, table: &Command, arguments: &[OsString]) -> Option<Failure> {
    use ErrorKind::{DisplayHelp, DisplayHelpOnMissingArgumentOrSubcommand as MissingCommand, DisplayVersion};
    if matches!(error.kind(), DisplayHelp | DisplayVersion | MissingCommand) {
        return None;
    }
    let (what, usage) = match ours(table, arguments) {
        Some(usage) => (sentence(error), usage),
        None => (message_with_values(error), usage_of_any(table, arguments)),
    };
    let suggested =
        [ContextKind::SuggestedSubcommand, ContextKind::SuggestedArg].into_iter().find_map(|kind| error.get(kind));
    // The most similar one comes last.
    let meant = suggested.and_then(|suggested| match suggested {
        ContextValue::String(text) => Some(text),
        ContextValue::Strings(texts) => texts.last(),
        _ => None,
    });
    let meant = meant.map_or_else(String::new, |meant| format!("; did you mean '{meant}'?"));
    Some(Failure::usage(what + &meant).next(usage))
}

/// Adds the usage to the failure of a command line of `nacre pool` or `nacre fs`, unless it has a
/// hint already.
pub fn explained(failure: Failure, table: &Command, arguments: &[OsString]) -> Failure {
    match ours(table, arguments) {
        Some(usage) if failure.exit == Exit::Usage && failure.next.is_empty() => failure.next(usage),
        _ => failure,
    }
}

/// Returns the usage of the verb of `nacre pool` or `nacre fs` in the command line.
fn ours(table: &Command, arguments: &[OsString]) -> Option<String> {
    let [command, words @ ..] = arguments else { return None };
    let table = table.find_subcommand(command.to_str().filter(|command| ["pool", "fs"].contains(command))?)?;
    let verb = words.first().and_then(|verb| verb.to_str()).and_then(|verb| table.find_subcommand(verb));
    let name = table.get_name();
    Some(match verb.filter(|verb| !verb.is_hide_set()) {
        Some(verb) => format!("usage: nacre {name} {}", line(verb, Style::Ours)),
        None => format!("nacre {name} --help lists the commands"),
    })
}

/// Returns the one-line usage of the command named by the first arguments.
fn usage_of_any(table: &Command, arguments: &[OsString]) -> String {
    let (mut command, mut name) = (table, table.get_name().to_owned());
    for word in arguments.iter().map_while(|word| word.to_str()) {
        let Some(verb) = command.find_subcommand(word).filter(|verb| !verb.is_hide_set()) else { break };
        command = verb;
        name = format!("{name} {}", verb.get_name());
    }
    if command.is_subcommand_required_set() {
        return format!("{name} --help lists the commands");
    }
    let whole = line(command, Style::Ours);
    let whole = whole.split_once(' ').map_or("", |(_, arguments)| arguments);
    if whole.len() <= USAGE_WIDTH {
        return format!("usage: {name} {whole}").trim_end().to_owned();
    }
    let places = command.get_arguments().filter(|arg| arg.is_positional() && !arg.is_hide_set());
    let places: String = places.map(|arg| format!(" {}", argument(arg, Style::Ours))).collect();
    format!("usage: {name} [OPTION]...{places}; {name} --help lists the options")
}

fn say(text: &str) {
    // Standard error may be closed: nothing can be reported then.
    let _ = std::io::stderr().lock().write_all(text.as_bytes());
}

fn of(error: &clap::Error, kind: ContextKind) -> Option<String> {
    match error.get(kind)? {
        ContextValue::String(text) => Some(text.clone()),
        ContextValue::Strings(texts) => texts.first().cloned(),
        _ => None,
    }
}

/// Returns the error message, in ZFS' words where it has some.
fn sentence(error: &clap::Error) -> String {
    let argument = of(error, ContextKind::InvalidArg).unwrap_or_default();
    match error.kind() {
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand | ErrorKind::MissingSubcommand => {
            "missing command".to_owned()
        }
        ErrorKind::InvalidSubcommand => {
            format!(
                "unrecognized command '{}'",
                printable(of(error, ContextKind::InvalidSubcommand).unwrap_or_default().as_bytes())
            )
        }
        ErrorKind::MissingRequiredArgument | ErrorKind::TooFewValues | ErrorKind::WrongNumberOfValues => {
            missing(&argument)
        }
        ErrorKind::UnknownArgument if argument.starts_with("--") => {
            format!("invalid option '{}'", printable(argument.as_bytes()))
        }
        ErrorKind::UnknownArgument => match argument.strip_prefix('-') {
            Some(letter) => format!("invalid option '{}'", printable(letter.as_bytes())),
            None => "too many arguments".to_owned(),
        },
        // An option for all objects together with a name.
        ErrorKind::ArgumentConflict
            if of(error, ContextKind::PriorArg).is_some_and(|other| other.starts_with(['[', '<'])) =>
        {
            "too many arguments".to_owned()
        }
        ErrorKind::ValueValidation => {
            let value = of(error, ContextKind::InvalidValue).unwrap_or_default();
            format!("bad numeric value '{}' for '{argument}'", printable(value.as_bytes()))
        }
        _ => {
            let text = error.to_string();
            text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned()
        }
    }
}

/// Returns the error message for commands that ZFS does not have: with the superfluous argument,
/// and the possible values of one.
fn message_with_values(error: &clap::Error) -> String {
    let argument = of(error, ContextKind::InvalidArg).unwrap_or_default();
    if error.kind() == ErrorKind::UnknownArgument && !argument.starts_with('-') {
        return format!("too many arguments: \"{}\"", printable(argument.as_bytes()));
    }
    if !matches!(error.kind(), ErrorKind::ValueValidation | ErrorKind::InvalidValue) {
        return sentence(error);
    }
    let text = error.to_string();
    let values = text.lines().find(|line| line.trim_start().starts_with("[possible values"));
    let what = text.lines().next().unwrap_or_default().trim_start_matches("error: ");
    values.map_or_else(|| what.to_owned(), |values| format!("{what} {}", values.trim()))
}

/// Returns the words of `zpool` and `zfs` for a missing argument of the table.
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

/// Returns the usage of the verb, or, without one, of all verbs.
fn usage(table: &Command, arguments: &[OsString]) -> String {
    let verb = arguments.first().and_then(|verb| verb.to_str()).and_then(|verb| table.find_subcommand(verb));
    if let Some(verb) = verb.filter(|verb| !verb.is_hide_set()) {
        // zrepl looks for this line before it resumes anything.
        let abort = if verb.get_name() == "receive" { "\treceive -A <filesystem|volume>\n" } else { "" };
        return format!("usage:\n\t{}\n{abort}", line(verb, Style::Zfs));
    }
    let unserved = verb.and_then(|verb| Unserved::find(verb.get_name())).filter(|_| table.get_name() == ZPOOL);
    if let Some(unserved) = unserved {
        return format!("usage:\n\t{}\n", unserved.usage);
    }
    let verbs = table.get_subcommands().filter(|verb| !verb.is_hide_set());
    let lines: String = verbs.map(|verb| format!("\t{}\n", line(verb, Style::Zfs))).collect();
    format!("usage: {} command args ...\nwhere 'command' is one of the following:\n\n{lines}", table.get_name())
}

/// Notation of usage lines.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Style {
    /// `create [-fn] [-o property=value] ... <pool> <device> ...`
    Zfs,
    /// `create [-fn] [-o PROPERTY=VALUE]... POOL DEVICE...`
    Ours,
}

/// Returns the usage line of a verb.
fn line(verb: &Command, style: Style) -> String {
    let shown = || {
        verb.get_arguments().filter(|arg| !arg.is_hide_set() && !matches!(arg.get_id().as_str(), "help" | "version"))
    };
    let flag = |arg: &&Arg| arg.get_short().is_some() && !arg.get_action().takes_values() && !arg.is_required_set();
    let letters: String = shown().filter(flag).filter_map(Arg::get_short).collect();
    let mut text = verb.get_name().to_owned();
    if !letters.is_empty() {
        text.push_str(&format!(" [-{letters}]"));
    }
    let (places, options): (Vec<&Arg>, Vec<&Arg>) =
        shown().filter(|arg| !flag(arg)).partition(|arg| arg.is_positional());
    for arg in options.into_iter().chain(places) {
        text.push(' ');
        text.push_str(&argument(arg, style));
    }
    // Tables that can be repeated.
    let again = if shown().any(|arg| arg.get_id() == "time") { " [INTERVAL [COUNT]]" } else { "" };
    text + &if style == Style::Zfs { again.to_lowercase() } else { again.to_owned() }
}

fn argument(arg: &Arg, style: Style) -> String {
    let names: Vec<&str> = arg.get_value_names().unwrap_or_default().iter().map(|name| name.as_str()).collect();
    let names = if names.is_empty() { vec![arg.get_id().as_str()] } else { names };
    let several =
        arg.get_num_args().is_some_and(|count| count.max_values() > 1) || matches!(arg.get_action(), ArgAction::Append);
    let switch =
        arg.get_short().map(|letter| format!("-{letter}")).or_else(|| arg.get_long().map(|word| format!("--{word}")));
    let more = match style {
        _ if !several => "",
        Style::Zfs => " ...",
        Style::Ours => "...",
    };
    let name = |name: &str| match style {
        Style::Zfs => name.trim_end_matches("...").trim_end_matches(',').to_lowercase(),
        Style::Ours => name.to_owned(),
    };
    let text = match switch {
        Some(switch) if arg.get_action().takes_values() => {
            format!("{switch} {}", names.iter().map(|one| name(one)).collect::<String>())
        }
        Some(switch) => switch,
        None if style == Style::Ours => names.join(" "),
        // Only the last of several names must be given exactly once.
        None => names.iter().map(|one| format!("<{}>", name(one))).collect::<Vec<_>>().join(" ... "),
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
        let error = table
            .clone()
            .try_get_matches_from(std::iter::once(OsString::from(program)).chain(arguments.clone()))
            .unwrap_err();
        format!("{}\n{}", sentence(&error), usage(&table, &arguments))
    }

    #[test]
    fn wrong_calls_are_told_as_zfs_does() {
        let text = said("zpool", "create");
        assert!(
            text.starts_with("missing pool name argument\nusage:\n\tcreate [-fn] [-o property=value] ... ["),
            "{text}"
        );
        assert!(text.ends_with(" <pool> <device> ...\n"), "{text}");
        assert!(said("zpool", "create tank").starts_with("missing vdev specification\nusage:\n\tcreate "));
        assert!(
            said("zpool", "foo")
                .starts_with("unrecognized command 'foo'\nusage: zpool command args ...\nwhere 'command' is one of")
        );
        assert!(said("zpool", "destroy tank tank").starts_with("too many arguments\nusage:\n\tdestroy "));
        assert!(said("zfs", "").starts_with("missing command\nusage: zfs command args ..."));
        assert!(said("zfs", "list -x").starts_with("invalid option 'x'\nusage:\n\tlist ["));
        assert!(said("zfs", "rename t/a").starts_with("missing target dataset argument\n"));
        assert!(said("zfs", "create").starts_with("missing filesystem argument\n"));
        assert_eq!(
            said("zfs", "set"),
            "missing property=value argument\nusage:\n\tset [-u] <property=value> ... <filesystem> ...\n"
        );
        assert!(said("zpool", "list --nosuch").starts_with("invalid option '--nosuch'\n"));
        assert!(said("zpool", "list -z").ends_with(" [pool] ... [interval [count]]\n"));
        assert!(said("zfs", "mount -a t/a").starts_with("too many arguments\n"));
        assert!(said("zfs", "list -d x").starts_with("bad numeric value 'x' for '-d <DEPTH>'\n"));
        assert!(said("zfs", "destroy").starts_with("missing dataset argument\n"));
        // Verbs that exist for compatibility only are not shown.
        assert!(!said("zpool", "").contains("reguid"));
    }

    #[test]
    fn wrong_calls_of_ours_are_told_in_two_lines() {
        let said = |words: &str| {
            let arguments: Vec<OsString> = words.split_whitespace().map(OsString::from).collect();
            let table = crate::commands::table();
            let error = table
                .clone()
                .try_get_matches_from(std::iter::once(OsString::from("nacre")).chain(arguments.clone()))
                .unwrap_err();
            wrong(&error, &table, &arguments).map(|failure| (failure.what, failure.next))
        };
        let two = |what: &str, next: &str| Some((what.to_owned(), next.to_owned()));
        assert_eq!(
            said("pool set foo"),
            two("missing pool name argument", "usage: nacre pool set PROPERTY=VALUE POOL")
        );
        assert_eq!(said("pool destroy tank tank"), two("too many arguments", "usage: nacre pool destroy [-f] POOL"));
        assert_eq!(said("fs promote -x t/a"), two("invalid option 'x'", "usage: nacre fs promote FILESYSTEM"));
        assert_eq!(
            said("pool stauts"),
            two("unrecognized command 'stauts'; did you mean 'status'?", "nacre pool --help lists the commands")
        );
        assert_eq!(said("umount"), two("missing mountpoint argument", "usage: nacre umount [-l] MOUNTPOINT..."));
        assert_eq!(
            said("mirror --bogus a b"),
            two(
                "invalid option '--bogus'",
                "usage: nacre mirror [OPTION]... SOURCE MOUNTPOINT; nacre mirror --help lists the options"
            )
        );
        assert_eq!(said("mirror a"), two("missing mountpoint argument", &said("mirror --bogus").unwrap().1));
        assert_eq!(
            said("stauts"),
            two("unrecognized command 'stauts'; did you mean 'status'?", "nacre --help lists the commands")
        );
        // Help.
        assert!(said("pool").is_none() && said("pool set --help").is_none());
    }
}
