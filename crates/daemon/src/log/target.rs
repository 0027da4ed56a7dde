//! Where a log goes: what `--log-target` and `NACRE_LOG_TARGET` say, and what that is on this
//! machine.
//!
//! Used by the command line, which only reads the word, and by [`super`], which opens it.

use serde::{Deserialize, Serialize};
use std::{
    env,
    ffi::{OsStr, OsString},
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Path, PathBuf},
};

/// Says where logs go that no option places.
const NAME: &str = "NACRE_LOG_TARGET";
/// Where journald listens, and the variable that names another place.
const JOURNAL: (&str, &str) = ("/run/systemd/journal/socket", "NACRE_JOURNAL_SOCKET");
/// The same of whoever takes syslog's messages.
const SYSLOG: (&str, &str) = ("/dev/log", "NACRE_SYSLOG_SOCKET");

/// Where a log goes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LogTarget {
    /// In the background the journal, else syslog, else nowhere; in the foreground standard error.
    #[default]
    Auto,
    /// The journal.
    Journal,
    /// Syslog.
    Syslog,
    /// Standard error, which leads nowhere once a background mount answers.
    Stderr,
    /// The end of a file.
    File(OsString),
    /// Nowhere.
    None,
}

impl LogTarget {
    /// What is accepted.
    pub const WORDS: &'static str = "auto, journal, syslog, stderr, file:PATH, none";

    /// The target of a word.
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

    /// The target that the environment names; what is no target is as if there were none.
    #[must_use]
    pub fn of_environment() -> Option<LogTarget> {
        env::var_os(NAME).and_then(|word| LogTarget::of(&word))
    }

    /// What `Auto` is for a process in the background, or not.
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
