//! A given option, and the parsers for each kind of value.
//!
//! Used by the setters in the table of [`crate::options`]. Pure: whether a user or a file exists is
//! checked when the stack is built; invalid values are refused here.

use crate::options::{Opt, Row};
use nacre_daemon::{failure::Failure, log::target::LogTarget, plan::Engine};
use nacre_layers::size::Size;
use std::{
    ffi::{OsStr, OsString},
    fmt,
    os::unix::ffi::OsStrExt,
    path::PathBuf,
    str::FromStr,
    time::Duration,
};

/// A given option with its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Given {
    /// The option.
    pub option: Opt,
    /// Its value; empty for a switch.
    pub value: OsString,
}

impl Given {
    /// An option with a value (empty for a switch).
    pub fn new(option: Opt, value: impl Into<OsString>) -> Given {
        Given { option, value: value.into() }
    }
}

/// A value with the option that it was given to.
#[derive(Clone, Copy, Debug)]
pub struct Value<'a> {
    /// The option.
    pub row: &'static Row,
    /// As given; empty for a switch.
    pub given: &'a OsStr,
}

/// All parsers fail for a value that does not fit, and name the valid ones.
impl Value<'_> {
    fn wrong(self, allowed: &str) -> Failure {
        Failure::usage(format!("{}: \"{}\" is not {allowed}", self.row.name, self.given.to_string_lossy()))
    }

    pub fn text(self) -> Result<String, Failure> {
        let text = self.given.to_str().map(str::to_owned);
        text.ok_or_else(|| {
            let shown = self.given.as_bytes().escape_ascii();
            Failure::usage(format!("the value of {} is not UTF-8: {shown}", self.row.name))
        })
    }

    fn filled(self, allowed: &str) -> Result<String, Failure> {
        if self.given.is_empty() { Err(self.wrong(allowed)) } else { self.text() }
    }

    /// Returns a user or group: looked up when the stack is built, but never empty (an empty value
    /// would be root).
    pub fn owner(self) -> Result<String, Failure> {
        self.filled("a user or group: name it, or give its number")
    }

    pub fn glob(self) -> Result<String, Failure> {
        self.filled("a pattern of names, such as '*.gz'")
    }

    pub fn command(self) -> Result<String, Failure> {
        self.filled("a command for the shell")
    }

    pub fn file(self) -> Result<PathBuf, Failure> {
        if self.given.is_empty() { Err(self.wrong("the path of a file")) } else { Ok(PathBuf::from(self.given)) }
    }

    pub fn log_target(self) -> Result<LogTarget, Failure> {
        LogTarget::of(self.given).ok_or_else(|| self.wrong(&format!("one of {}", LogTarget::WORDS)))
    }

    /// Checks a text that the layers parse again when they are built.
    pub fn checked<T: FromStr<Err: fmt::Display>>(self) -> Result<String, Failure> {
        let text = self.text()?;
        text.parse::<T>().map_err(|error| Failure::usage(format!("{}: {error}", self.row.name)))?;
        Ok(text)
    }

    pub fn limit(self) -> Result<Size, Failure> {
        let size = self.text()?.parse::<Size>().and_then(|size| size.limit().map(|_| size));
        size.map_err(|error| Failure::usage(format!("{}: {error}", self.row.name)))
    }

    fn parsed<T>(self, parse: impl FnOnce(&str) -> Option<T>, allowed: &str) -> Result<T, Failure> {
        self.given.to_str().and_then(parse).ok_or_else(|| self.wrong(allowed))
    }

    pub fn number<T: FromStr>(self) -> Result<T, Failure> {
        self.parsed(|text| text.parse().ok(), "a whole number in range")
    }

    pub fn alignment(self) -> Result<u32, Failure> {
        match self.number()? {
            0 => Err(self.wrong("an alignment in bytes (1 or more, such as 512 or 4096)")),
            bytes => Ok(bytes),
        }
    }

    pub fn inodes(self) -> Result<u64, Failure> {
        match self.number()? {
            0 => Err(self.wrong("a number of files, directories and links: 1 or more")),
            inodes => Ok(inodes),
        }
    }

    pub fn mask(self) -> Result<u32, Failure> {
        let mask = |text: &str| u32::from_str_radix(text, 8).ok().filter(|mask| *mask <= 0o777);
        self.parsed(mask, "an octal mask from 0 to 777")
    }

    pub fn seconds(self) -> Result<Duration, Failure> {
        let seconds = |text: &str| Duration::try_from_secs_f64(text.parse().ok()?).ok();
        self.parsed(seconds, "a number of seconds")
    }

    /// Parses one of the words of a layer's setting.
    pub fn word<T>(self, meaning: fn(&str) -> Option<T>, words: &[&str]) -> Result<T, Failure> {
        self.parsed(meaning, &format!("one of {}", words.join(", ")))
    }

    pub fn choice<T: Copy>(self, known: &[(&str, T)]) -> Result<T, Failure> {
        let words: Vec<&str> = known.iter().map(|(word, _)| *word).collect();
        let meaning = |text: &str| known.iter().find(|(word, _)| *word == text).map(|(_, meaning)| *meaning);
        self.parsed(meaning, &format!("one of {}", words.join(", ")))
    }

    /// Parses an engine. All commands share one table; each checks itself whether it supports the
    /// engine.
    pub fn engine(self) -> Result<Engine, Failure> {
        const ALL: [Engine; 5] = [Engine::Fuse, Engine::Kernel, Engine::Loop, Engine::Quota, Engine::Auto];
        let known = |text: &str| ALL.into_iter().find(|engine| text == engine.word());
        self.parsed(known, "one of fuse, kernel, auto (a cage: fuse, loop, quota, auto)")
    }

    /// Formats the option as a word of mount(2): `name=value`.
    pub fn as_word(self) -> Result<String, Failure> {
        Ok(format!("{}={}", self.row.name, self.text()?))
    }
}
