//! Verbs of `zpool` that pools of this version do not have, and their refusals, which are those of `zpool` where it has the
//! same: a pool or device that does not exist, a checkpoint or an initialization that does not exist.

use super::called::named_device;
use nacre_admin::pool::Figures;
use nacre_daemon::{
    failure::Failure,
    pool::client::{self, Owned},
    report::printable,
};
use std::{os::unix::ffi::OsStrExt, path::PathBuf};

/// A verb that is refused.
#[derive(Debug, PartialEq, Eq)]
pub struct Unserved {
    pub verb: &'static str,
    /// The least number of arguments.
    min_arguments: usize,
    /// The command line in the form of `zpool`.
    pub usage: &'static str,
    /// The reason for the refusal.
    why: &'static str,
}

pub const UNSERVED: [Unserved; 9] = [
    Unserved {
        verb: "resilver",
        min_arguments: 1,
        usage: "resilver <pool> ...",
        why: "devices that come back are resilvered by themselves; `scrub` verifies everything",
    },
    Unserved {
        verb: "split",
        min_arguments: 2,
        usage: "split <pool> <newpool> [device ...]",
        why: "a pool stays one; `attach` and `detach` change its mirrors",
    },
    Unserved {
        verb: "checkpoint",
        min_arguments: 1,
        usage: "checkpoint [-d [-w]] <pool> ...",
        why: "there are no checkpoints; `import -F` goes back a few transaction groups, snapshots go back further",
    },
    Unserved {
        verb: "initialize",
        min_arguments: 1,
        usage: "initialize [-c | -s | -u] [-w] <pool> [<device> ...]",
        why: "devices need no initialization",
    },
    Unserved { verb: "reguid", min_arguments: 1, usage: "reguid <pool>", why: "a pool keeps its number" },
    Unserved { verb: "reopen", min_arguments: 0, usage: "reopen [-n] [pool] ...", why: "devices stay open" },
    Unserved {
        verb: "ddtprune",
        min_arguments: 1,
        usage: "ddtprune -d|-p <amount> <pool>",
        why: "there is no deduplication",
    },
    Unserved {
        verb: "prefetch",
        min_arguments: 1,
        usage: "prefetch -t <type> <pool>",
        why: "there is no deduplication",
    },
    Unserved {
        verb: "condense",
        min_arguments: 1,
        usage: "condense <pool>",
        why: "there is nothing to condense: segments are cleaned by themselves",
    },
];

impl Unserved {
    /// The verb of this name.
    pub fn find(verb: &str) -> Option<&'static Self> {
        UNSERVED.iter().find(|unserved| unserved.verb == verb)
    }
}

/// A command line with such a verb.
#[derive(Debug, PartialEq, Eq)]
pub struct UnservedCall {
    unserved: &'static Unserved,
    options: String,
    arguments: Vec<PathBuf>,
}

impl UnservedCall {
    /// Reads the arguments behind the verb.
    ///
    /// # Errors
    /// No such verb, or too few arguments.
    pub fn read(verb: &str, rest: &[PathBuf]) -> Result<Self, Failure> {
        let unserved = Unserved::find(verb).ok_or_else(|| Failure::usage(format!("unknown command {verb}")))?;
        let mut asked = Self { unserved, options: String::new(), arguments: Vec::new() };
        for word in rest {
            match word.as_os_str().as_bytes() {
                [b'-', letters @ ..] => asked.options.push_str(&String::from_utf8_lossy(letters)),
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
}

/// The refusal of a command line, after a look at the pool and the devices that it names.
///
/// `figures` asks the process of the pool for its devices.
pub fn refusal(asked: &UnservedCall, figures: fn(&Owned) -> Result<Figures, Failure>) -> Failure {
    let Unserved { verb, why, .. } = *asked.unserved;
    // Amounts and kinds stand before the name.
    let place = if matches!(verb, "ddtprune" | "prefetch") { asked.arguments.len().saturating_sub(1) } else { 0 };
    let Some(name) = asked.arguments.get(place) else { return Failure::new(format!("cannot {verb}: {why}")) };
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

/// The refusal of `initialize`, which names a device where one was named.
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
        assert_eq!(read("resilver", &[]).unwrap_err().what, "missing pool name argument");
        assert_eq!(read("split", &["tank"]).unwrap_err().what, "missing new pool name");
        assert!(read("reopen", &[]).is_ok());
        assert!(read("nosuch", &["tank"]).is_err());
    }
}
