//! Verbs of `zpool` that pools of this version do not support. The refusals are those of `zpool`
//! where it refuses the same: a pool or device that does not exist, a checkpoint or an
//! initialization that does not exist.

use super::called::named_device;
use nacre_admin::pool::Figures;
use nacre_daemon::{
    failure::Failure,
    pool::client::{self, Owned},
    report::printable,
};
use std::{os::unix::ffi::OsStrExt, path::PathBuf};

/// An unsupported verb.
#[derive(Debug, PartialEq, Eq)]
pub struct Unserved {
    pub verb: &'static str,
    /// The least number of arguments.
    min_arguments: usize,
    /// The letters of its options in `zpool`, each with a colon where a value follows (getopt(3)).
    letters: &'static str,
    /// Its long options, each with the letter for it.
    long: &'static [(&'static str, char)],
    /// The command line in the form of `zpool`.
    pub usage: &'static str,
    /// The reason for the refusal.
    why: &'static str,
}

pub const UNSERVED: [Unserved; 9] = [
    Unserved {
        verb: "resilver",
        min_arguments: 1,
        letters: "",
        long: &[],
        usage: "resilver <pool> ...",
        why: "devices that come back are resilvered by themselves; `scrub` verifies everything",
    },
    Unserved {
        verb: "split",
        min_arguments: 2,
        letters: "gLlno:PR:",
        long: &[],
        usage: "split [-gLlnP] [-o property=value] [-R root] <pool> <newpool> [device ...]",
        why: "a pool stays one; `attach` and `detach` change its mirrors",
    },
    Unserved {
        verb: "checkpoint",
        min_arguments: 1,
        letters: "dw",
        long: &[("discard", 'd'), ("wait", 'w')],
        usage: "checkpoint [-d [-w]] <pool> ...",
        why: "there are no checkpoints; `import -F` goes back a few transaction groups, snapshots go back further",
    },
    Unserved {
        verb: "initialize",
        min_arguments: 1,
        letters: "csuw",
        long: &[("cancel", 'c'), ("suspend", 's'), ("uninit", 'u'), ("wait", 'w')],
        usage: "initialize [-c | -s | -u] [-w] <pool> [<device> ...]",
        why: "devices need no initialization",
    },
    Unserved {
        verb: "reguid",
        min_arguments: 1,
        letters: "g:",
        long: &[],
        usage: "reguid [-g guid] <pool>",
        why: "a pool keeps its number",
    },
    Unserved {
        verb: "reopen",
        min_arguments: 0,
        letters: "n",
        long: &[],
        usage: "reopen [-n] [pool] ...",
        why: "devices stay open",
    },
    Unserved {
        verb: "ddtprune",
        min_arguments: 1,
        letters: "d:p:",
        long: &[],
        usage: "ddtprune -d|-p <amount> <pool>",
        why: "there is no deduplication",
    },
    Unserved {
        verb: "prefetch",
        min_arguments: 1,
        letters: "t:",
        long: &[],
        usage: "prefetch -t <type> <pool>",
        why: "there is no deduplication",
    },
    Unserved {
        verb: "condense",
        min_arguments: 1,
        letters: "t:cw",
        long: &[],
        usage: "condense -t <target> [-c | -w] <pool>",
        why: "there is nothing to condense: segments are cleaned by themselves",
    },
];

impl Unserved {
    /// Returns the verb of this name.
    pub fn find(verb: &str) -> Option<&'static Self> {
        UNSERVED.iter().find(|unserved| unserved.verb == verb)
    }
}

/// A command line with an unsupported verb.
#[derive(Debug, PartialEq, Eq)]
pub struct UnservedCall {
    unserved: &'static Unserved,
    options: String,
    arguments: Vec<PathBuf>,
}

impl UnservedCall {
    /// Parses the arguments after the verb.
    ///
    /// # Errors
    /// No such verb, or too few arguments.
    pub fn read(verb: &str, rest: &[PathBuf]) -> Result<Self, Failure> {
        let unserved = Unserved::find(verb).ok_or_else(|| Failure::usage(format!("unknown command {verb}")))?;
        let mut asked = Self { unserved, options: String::new(), arguments: Vec::new() };
        let mut words = rest.iter();
        while let Some(word) = words.next() {
            match word.as_os_str().as_bytes() {
                b"--" => asked.arguments.extend(words.by_ref().cloned()),
                [b'-', b'-', name @ ..] => {
                    let known = unserved.long.iter().find(|(known, _)| known.as_bytes() == name);
                    let (_, letter) = known.ok_or_else(|| invalid(&printable(name)))?;
                    asked.options.push(*letter);
                }
                [b'-', letters @ ..] if !letters.is_empty() => {
                    if let Some(letter) = asked.read_letters(letters)? {
                        words
                            .next()
                            .ok_or_else(|| Failure::usage(format!("missing argument for '{letter}' option")))?;
                    }
                }
                _ => asked.arguments.push(word.clone()),
            }
        }
        if asked.arguments.is_empty() && unserved.min_arguments > 0 {
            return Err(Failure::usage("missing pool name argument"));
        }
        if asked.arguments.len() < unserved.min_arguments {
            return Err(Failure::usage("missing new pool name"));
        }
        Ok(asked)
    }

    /// Parses options of one letter in one word; returns the one whose value is the next word.
    ///
    /// # Errors
    /// A letter that the verb does not have.
    fn read_letters(&mut self, word: &[u8]) -> Result<Option<char>, Failure> {
        let mut letters = word.iter().copied().map(char::from).peekable();
        while let Some(letter) = letters.next() {
            let known = self.unserved.letters.split_once(letter).filter(|_| letter != ':');
            let (_, behind) = known.ok_or_else(|| invalid(&letter.escape_default().to_string()))?;
            self.options.push(letter);
            if behind.starts_with(':') {
                // The rest of the word is the value, where there is one.
                return Ok(letters.peek().is_none().then_some(letter));
            }
        }
        Ok(None)
    }
}

fn invalid(option: &str) -> Failure {
    Failure::usage(format!("invalid option '{option}'"))
}

/// Returns the refusal of a command line, after a look at the pool and the devices that it names.
///
/// `figures` asks the process of the pool for its devices.
pub fn refusal(asked: &UnservedCall, figures: fn(&Owned) -> Result<Figures, Failure>) -> Failure {
    let Unserved { verb, why, .. } = *asked.unserved;
    let Some(name) = asked.arguments.first() else { return Failure::new(format!("cannot {verb}: {why}")) };
    let name = name.to_string_lossy().into_owned();
    let owned = match client::owned(&name) {
        Ok(owned) => owned,
        Err(failure) => return failure,
    };
    let pool = printable(name.as_bytes());
    match verb {
        "checkpoint" if asked.options.contains('d') => {
            Failure::new(format!("cannot discard checkpoint in '{pool}': checkpoint does not exist"))
        }
        "resilver" => Failure::new(format!("cannot restart resilver of '{pool}': {why}")),
        "initialize" => {
            figures(&owned).map(|figures| initialize(asked, &figures, &pool)).unwrap_or_else(|failure| failure)
        }
        _ => Failure::new(format!("cannot {verb} '{pool}': {why}")),
    }
}

/// Returns the refusal of `initialize`, which names a device where the command line does.
fn initialize(asked: &UnservedCall, figures: &Figures, pool: &str) -> Failure {
    let doing = match asked.options.chars().find(|letter| "csu".contains(*letter)) {
        Some('c') => "cancel initializing",
        Some('s') => "suspend initializing",
        Some(_) => "uninitialize",
        None => "initialize",
    };
    let device = asked.arguments.get(1);
    let missing = asked.arguments.iter().skip(1).find(|word| named_device(figures, word).is_none());
    if let Some(missing) = missing {
        let missing = printable(missing.as_os_str().as_bytes());
        return Failure::new(format!("cannot {doing} '{missing}': no such device in pool"));
    }
    let named = device.map_or_else(|| pool.to_owned(), |device| printable(device.as_os_str().as_bytes()));
    let why = if doing == "initialize" { asked.unserved.why } else { "there is no active initialization" };
    Failure::new(format!("cannot {doing} '{named}': {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_letters_and_words() {
        let read =
            |verb: &str, words: &[&str]| UnservedCall::read(verb, &words.iter().map(PathBuf::from).collect::<Vec<_>>());
        let asked = read("initialize", &["-c", "tank", "/dev/sdb"]).unwrap();
        assert_eq!((asked.options.as_str(), asked.arguments.len()), ("c", 2));
        for words in
            [&["-R", "/mnt", "tank", "new"][..], &["-nR/mnt", "-o", "comment=x", "tank", "new"], &["--", "tank", "new"]]
        {
            assert_eq!(read("split", words).unwrap().arguments, [PathBuf::from("tank"), "new".into()], "{words:?}");
        }
        assert_eq!(read("prefetch", &["-t", "ddt", "tank"]).unwrap().arguments, [PathBuf::from("tank")]);
        assert_eq!(read("checkpoint", &["--discard", "tank"]).unwrap().options, "d");
        assert_eq!(read("split", &["-R"]).unwrap_err().what, "missing argument for 'R' option");
        assert_eq!(read("split", &["-x", "tank", "new"]).unwrap_err().what, "invalid option 'x'");
        assert_eq!(read("initialize", &["--never", "tank"]).unwrap_err().what, "invalid option 'never'");
        assert_eq!(read("resilver", &[]).unwrap_err().what, "missing pool name argument");
        assert_eq!(read("split", &["tank"]).unwrap_err().what, "missing new pool name");
        assert!(read("reopen", &[]).is_ok());
        assert!(read("nosuch", &["tank"]).is_err());
    }
}
