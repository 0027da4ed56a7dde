//! Target of a log: the words of `--log-target` and `NACRE_LOG_TARGET`, and the sockets of this machine.
//!
//! Used by the command line, which only parses the word, and by [`super`], which opens the target.

use serde::{Deserialize, Serialize};
use std::{
    env,
    ffi::{OsStr, OsString},
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Path, PathBuf},
};

/// Environment variable with the target for logs without the option.
const NAME: &str = "NACRE_LOG_TARGET";
/// Socket of journald, and the variable that names another one.
const JOURNAL: (&str, &str) = ("/run/systemd/journal/socket", "NACRE_JOURNAL_SOCKET");
/// Socket of syslog, and the variable that names another one.
const SYSLOG: (&str, &str) = ("/dev/log", "NACRE_SYSLOG_SOCKET");

/// Target of a log.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LogTarget {
    /// In the background the journal, else syslog, else none; in the foreground standard error.
    #[default]
    Auto,
    /// Log to the journal of systemd.
    Journal,
    /// Log to syslog.
    Syslog,
    /// Standard error; its output is discarded once a background mount answers.
    Stderr,
    /// A file, to append to.
    File(OsString),
    /// Do not log.
    None,
}

impl LogTarget {
    /// The accepted words.
    pub const WORDS: &'static str = "auto, journal, syslog, stderr, file:PATH, none";

    /// Parses a word.
    #[must_use]
    pub fn of(word: &OsStr) -> Option<LogTarget> {
        Some(match word.as_bytes() {
            b"auto" => LogTarget::Auto,
            b"journal" => LogTarget::Journal,
            b"syslog" => LogTarget::Syslog,
            b"stderr" => LogTarget::Stderr,
            b"none" => LogTarget::None,
            other => match other.strip_prefix(b"file:") {
                Some(path) if !path.is_empty() => LogTarget::File(OsString::from_vec(path.to_vec())),
                _ => return None,
            },
        })
    }

    /// Returns the target that the environment names; an unknown word counts as none.
    #[must_use]
    pub fn of_environment() -> Option<LogTarget> {
        env::var_os(NAME).and_then(|word| LogTarget::of(&word))
    }

    /// Resolves `Auto` for a process in the background, or in the foreground.
    pub(super) fn settled(self, background: bool) -> LogTarget {
        match self {
            LogTarget::Auto if !background => LogTarget::Stderr,
            LogTarget::Auto if journal().exists() => LogTarget::Journal,
            LogTarget::Auto if syslog().exists() => LogTarget::Syslog,
            LogTarget::Auto => LogTarget::None,
            other => other,
        }
    }
}

fn place((usual, variable): (&str, &str)) -> PathBuf {
    env::var_os(variable).map_or_else(|| Path::new(usual).to_owned(), PathBuf::from)
}

/// The socket of the journal.
pub(super) fn journal() -> PathBuf {
    place(JOURNAL)
}

/// The socket of syslog.
pub(super) fn syslog() -> PathBuf {
    place(SYSLOG)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_targets() {
        for (word, target) in [
            ("auto", Some(LogTarget::Auto)),
            ("none", Some(LogTarget::None)),
            ("file:/a b", Some(LogTarget::File("/a b".into()))),
            ("file:", None),
            ("file", None),
            ("", None),
        ] {
            assert_eq!(LogTarget::of(OsStr::new(word)), target, "{word}");
        }
        assert_eq!(LogTarget::Auto.settled(false), LogTarget::Stderr);
        assert_eq!(LogTarget::None.settled(true), LogTarget::None);
    }
}
