//! Arguments that several commands share: paths, views, and the options of mounts as `clap`
//! arguments. Pure.

use crate::{
    libfuse_args::{self, Unknown},
    option_value::Given,
    options::{Opt, Row, Spelling, TABLE},
};
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use nacre_daemon::failure::Failure;
use std::{ffi::OsString, path::PathBuf};

/// Columns and format of a table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// Everything, as JSON.
    pub json: bool,
    /// Without headings, columns separated by one tab.
    pub scripted: bool,
    /// Exact numbers.
    pub exact: bool,
    /// Names of the columns; `None`: the usual table, or all columns of one mount.
    pub columns: Option<Vec<String>>,
    /// Include mounts of other users.
    pub everybody: bool,
}

/// Returns a switch by its letter.
pub fn flag(letter: char, name: &'static str, help: &'static str) -> Arg {
    Arg::new(name).short(letter).action(ArgAction::SetTrue).help(help)
}

/// Returns the switch for JSON.
pub fn json() -> Arg {
    flag('j', "json", "As JSON").long("json")
}

/// Returns the values of an argument that may be given several times.
pub fn texts(matches: &ArgMatches, name: &str) -> Vec<String> {
    matches.get_many::<String>(name).into_iter().flatten().cloned().collect()
}

/// Adds the arguments of commands that show a table; [`view`] reads them.
pub fn view_arguments(command: Command) -> Command {
    command
        .arg(Arg::new("json").long("json").action(ArgAction::SetTrue).help("Everything, as JSON"))
        .arg(Arg::new("scripted").short('H').action(ArgAction::SetTrue).help("No headings, one tab between columns"))
        .arg(Arg::new("exact").short('p').action(ArgAction::SetTrue).help("Exact numbers"))
        .arg(
            Arg::new("columns")
                .short('o')
                .value_name("COLUMN,...")
                .value_delimiter(',')
                .help("Which columns ('all' shows every one)"),
        )
        .arg(all_users())
}

/// Returns the switch `--all-users`.
pub fn all_users() -> Arg {
    let help = "Other users' as well: root sees all, others root's mounts. Their processes are asked, and have a second to answer";
    Arg::new("all-users").long("all-users").action(ArgAction::SetTrue).help(help)
}

/// Returns a required positional argument that takes a path.
pub fn path(name: &'static str, help: &'static str) -> Arg {
    Arg::new(name).required(true).value_parser(value_parser!(OsString)).help(help)
}

pub fn mounts() -> Arg {
    Arg::new("MOUNTPOINT")
        .value_parser(value_parser!(OsString))
        .num_args(0..)
        .action(ArgAction::Append)
        .help("Which mounts [default: all]")
}

/// Returns the options of the table that fulfill `pass`, as `clap` arguments.
pub fn options(pass: impl Fn(&Row) -> bool) -> Vec<Arg> {
    TABLE
        .iter()
        .filter(|row| row.spelling != Spelling::Word && row.heading != "About" && pass(row))
        .map(option)
        .collect()
}

fn option(row: &'static Row) -> Arg {
    let mut arg = Arg::new(key(row)).help_heading(row.heading).help(row.help);
    if !row.name.is_empty() {
        arg = arg.long(row.name);
    }
    if let Some(letter) = row.short {
        arg = arg.short(letter);
    }
    match row.value {
        // Only the last of several counts, as for every option.
        None => arg.action(ArgAction::SetTrue).overrides_with(key(row)),
        Some(value) => {
            let negative = matches!(row.id, Opt::UidOffset | Opt::GidOffset);
            arg.action(ArgAction::Append)
                .value_name(value)
                .value_parser(value_parser!(OsString))
                .allow_negative_numbers(negative)
        }
    }
}

pub fn words_argument() -> Arg {
    option(Opt::Words.row())
}

/// Returns the identifier of an option inside `clap`.
fn key(row: &Row) -> &'static str {
    match (row.id, row.name) {
        (Opt::Words, _) => "-o",
        (Opt::SingleThread, _) => "-s",
        (Opt::NoAllowOther, name) | (_, name) => name,
    }
}

/// Returns the given options in the order given, with the texts after `-o` unparsed.
pub fn raw(matches: &ArgMatches) -> Vec<Given> {
    let mut found: Vec<(usize, Given)> = Vec::new();
    for row in TABLE.iter().filter(|row| row.spelling != Spelling::Word && row.heading != "About") {
        let Ok(Some(mut values)) = matches.try_get_raw(key(row)) else { continue };
        if matches.value_source(key(row)) != Some(clap::parser::ValueSource::CommandLine) {
            continue;
        }
        for index in matches.indices_of(key(row)).into_iter().flatten() {
            let value =
                if row.value.is_some() { values.next().unwrap_or_default().to_owned() } else { OsString::new() };
            found.push((index, Given::new(row.id, value)));
        }
    }
    found.sort_by_key(|(index, _)| *index);
    found.into_iter().map(|(_, option)| option).collect()
}

/// Returns the given options in the order given, with the texts after `-o` parsed.
///
/// # Errors
/// Words of `-o` that are not known or do not fit.
pub fn given(matches: &ArgMatches) -> Result<Vec<Given>, Failure> {
    let mut given = Vec::new();
    for option in raw(matches) {
        match option.option {
            Opt::Words => libfuse_args::parse_words(&option.value, Unknown::Refuse, &mut given)?,
            _ => given.push(option),
        }
    }
    Ok(given)
}

/// Reads the arguments of [`view_arguments`].
pub fn view(matches: &ArgMatches) -> View {
    View {
        json: matches.get_flag("json"),
        scripted: matches.get_flag("scripted"),
        exact: matches.get_flag("exact"),
        columns: matches.get_many::<String>("columns").map(|columns| columns.cloned().collect()),
        everybody: matches.get_flag("all-users"),
    }
}

/// Returns the value of a required argument.
pub fn one(matches: &ArgMatches, name: &str) -> OsString {
    matches.get_one::<OsString>(name).cloned().unwrap_or_default()
}

pub fn many(matches: &ArgMatches) -> Vec<PathBuf> {
    matches.get_many::<OsString>("MOUNTPOINT").into_iter().flatten().map(PathBuf::from).collect()
}
