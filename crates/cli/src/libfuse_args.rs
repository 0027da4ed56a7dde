//! The grammar of bindfs' command line (which is libfuse's): bytes in, a list of options in the
//! given order out.
//!
//! Used when the program is called as `bindfs`, as `mount.fuse.nacre` or by `mount(8)`, and for the
//! text after `-o` everywhere. Pure: touches nothing outside its arguments. Rules: options and the
//! two paths in any order, long options take a value only with `=`, letters take it attached or as
//! the next argument, letters are not bundled, `--` ends the options, a backslash after `-o` takes
//! the next character literally (`\054` too).

use crate::{
    option_value::Given,
    options::{self, MountWord, Opt, Row},
};
use nacre_daemon::failure::Failure;
use std::{
    ffi::{OsStr, OsString},
    os::unix::ffi::OsStrExt,
};

/// A parsed command line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LibfuseArgs {
    /// The options in the order given; the words of each `-o` are at its position.
    pub given: Vec<Given>,
    /// The arguments that are no options.
    pub positionals: Vec<OsString>,
}

/// How unknown words after `-o` are handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unknown {
    /// An unknown word is an error.
    Refuse,
    /// An unknown word is dropped (`mount -s`).
    Drop,
}

/// Parses the arguments after the program's name.
///
/// # Errors
/// An option that is not known, lacks its value, or has one that it does not take.
pub fn parse(arguments: impl IntoIterator<Item = OsString>, unknown: Unknown) -> Result<LibfuseArgs, Failure> {
    let mut words = LibfuseArgs::default();
    let mut rest = arguments.into_iter();
    while let Some(argument) = rest.next() {
        match argument.as_bytes() {
            b"--" => words.positionals.extend(rest.by_ref()),
            [b'-', b'-', long @ ..] => words.given.push(long_option(long)?),
            [b'-', letter, attached @ ..] => {
                let row = options::letter(char::from(*letter)).filter(|row| row.value.is_some() || attached.is_empty());
                let row = row.ok_or_else(|| unknown_letter(&argument))?;
                let value = match (row.value, attached) {
                    (None, _) => OsString::new(),
                    (Some(value), []) => rest.next().ok_or_else(|| missing_value(&argument, value))?,
                    (Some(_), attached) => OsStr::from_bytes(attached).to_owned(),
                };
                take(&mut words.given, row, value, unknown)?;
            }
            _ => words.positionals.push(argument),
        }
    }
    Ok(words)
}

/// Parses the text after `-o`.
///
/// # Errors
/// As for [`parse`].
pub fn parse_words(text: &OsStr, unknown: Unknown, given: &mut Vec<Given>) -> Result<(), Failure> {
    for word in split(text.as_bytes()) {
        if let Some(option) = mount_word(&word, unknown)? {
            given.push(option);
        }
    }
    Ok(())
}

fn take(given: &mut Vec<Given>, row: &Row, value: OsString, unknown: Unknown) -> Result<(), Failure> {
    if row.id == Opt::Words {
        return parse_words(&value, unknown, given);
    }
    given.push(Given { option: row.id, value });
    Ok(())
}

fn long_option(text: &[u8]) -> Result<Given, Failure> {
    let (name, value) = key_value(text);
    let shown = || format!("--{}", name.escape_ascii());
    let row = std::str::from_utf8(name).ok().and_then(options::long);
    let row =
        row.ok_or_else(|| Failure::usage(format!("unknown option {}", shown())).next("--help lists the options"))?;
    match (row.value, value) {
        (Some(placeholder), None) => Err(missing_value(OsStr::new(&shown()), placeholder)),
        (None, Some(_)) => Err(Failure::usage(format!("option {} takes no value", shown()))),
        (_, value) => Ok(Given::new(row.id, OsStr::from_bytes(value.unwrap_or_default()))),
    }
}

fn mount_word(word: &[u8], unknown: Unknown) -> Result<Option<Given>, Failure> {
    let (name, value) = key_value(word);
    let shown = name.escape_ascii().to_string();
    match std::str::from_utf8(name).ok().and_then(|name| options::word(name, value.is_some())) {
        Some(MountWord::Row(row)) => Ok(Some(Given::new(row.id, OsStr::from_bytes(value.unwrap_or_default())))),
        Some(MountWord::Ignored) => Ok(None),
        Some(MountWord::Refused(why)) => Err(Failure::usage(format!("-o {shown} is not possible: {why}"))),
        None if unknown == Unknown::Drop => Ok(None),
        None => Err(wrong_word(&shown, value.is_some())),
    }
}

fn wrong_word(name: &str, has_value: bool) -> Failure {
    match options::word(name, !has_value) {
        Some(MountWord::Row(row)) => match row.value {
            Some(value) => Failure::usage(format!("-o {name} needs a value: {name}={value}")),
            None => Failure::usage(format!("-o {name} takes no value")),
        },
        _ => Failure::usage(format!("unknown option -o {name}"))
            .next("--help lists the options; each long one is also a word of -o"),
    }
}

fn unknown_letter(argument: &OsStr) -> Failure {
    let text = argument.as_bytes();
    let known = |letter: &u8| options::letter(char::from(*letter));
    let shown = text.escape_ascii();
    match text {
        [_, letter, rest @ ..] if known(letter).is_some() && rest.iter().all(|letter| known(letter).is_some()) => {
            let apart: Vec<String> = text.iter().skip(1).map(|letter| format!("-{}", char::from(*letter))).collect();
            Failure::usage(format!("unknown option {shown}"))
                .next(format!("letters are not bundled here: write {}", apart.join(" ")))
        }
        [_, letter, _, ..] if known(letter).is_some() => {
            Failure::usage(format!("option -{} takes no value", char::from(*letter)))
        }
        _ => Failure::usage(format!("unknown option {shown}")).next("--help lists the options"),
    }
}

fn missing_value(option: &OsStr, placeholder: &str) -> Failure {
    let option = option.to_string_lossy();
    let form =
        if option.starts_with("--") { format!("{option}={placeholder}") } else { format!("{option} {placeholder}") };
    Failure::usage(format!("option {option} needs a value: {form}"))
}

/// Splits at the first `=`.
fn key_value(text: &[u8]) -> (&[u8], Option<&[u8]>) {
    match text.iter().position(|&byte| byte == b'=') {
        Some(place) => {
            let (key, value) = text.split_at(place);
            (key, value.get(1..))
        }
        None => (text, None),
    }
}

/// Splits at commas; a backslash takes what follows literally: three octal digits as one byte,
/// anything else as itself.
fn split(text: &[u8]) -> Vec<Vec<u8>> {
    let mut words = Vec::new();
    let mut word = Vec::new();
    let mut rest = text;
    while let [byte, tail @ ..] = rest {
        rest = tail;
        match (byte, tail) {
            (b',', _) => words.push(std::mem::take(&mut word)),
            (b'\\', [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', tail @ ..]) => {
                word.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                rest = tail;
            }
            (b'\\', [literal, tail @ ..]) => {
                word.push(*literal);
                rest = tail;
            }
            (byte, _) => word.push(*byte),
        }
    }
    words.push(word);
    words
}
