//! Parsing and printing of policies: the names of aufs and mergerfs. The printed form can be parsed.

use super::{CopyUpPolicy, CreatePolicy, Hold, Preference, Reach};
use crate::branch::{ParseError, parse_size};
use std::{fmt, str::FromStr};

/// mergerfs' policies. `mfs` is not among them: aufs' policy of that name prefers another of two equal
/// branches.
const POOL: [(&str, Reach, Preference); 18] = [
    ("ff", Reach::Anywhere, Preference::First),
    ("lfs", Reach::Anywhere, Preference::LeastFree),
    ("lus", Reach::Anywhere, Preference::LeastUsed),
    ("lup", Reach::Anywhere, Preference::LeastUsedShare),
    ("rand", Reach::Anywhere, Preference::Random),
    ("pfrd", Reach::Anywhere, Preference::RandomByFree),
    ("newest", Reach::Anywhere, Preference::Newest),
    ("epff", Reach::Existing, Preference::First),
    ("epmfs", Reach::Existing, Preference::MostFree),
    ("eplfs", Reach::Existing, Preference::LeastFree),
    ("eplus", Reach::Existing, Preference::LeastUsed),
    ("eprand", Reach::Existing, Preference::Random),
    ("eppfrd", Reach::Existing, Preference::RandomByFree),
    ("mspff", Reach::MostSpecific, Preference::First),
    ("mspmfs", Reach::MostSpecific, Preference::MostFree),
    ("msplfs", Reach::MostSpecific, Preference::LeastFree),
    ("msplus", Reach::MostSpecific, Preference::LeastUsed),
    ("msppfrd", Reach::MostSpecific, Preference::RandomByFree),
];

fn pool_names() -> String {
    POOL.map(|(name, ..)| name).join(", ")
}

impl FromStr for CreatePolicy {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<CreatePolicy, ParseError> {
        let mut parts = text.split(':');
        let name = parts.next().unwrap_or_default();
        let arguments: Vec<&str> = parts.collect();
        let policy = match name {
            "tdp" | "top-down-parent" => none(CreatePolicy::TopDownParent, &arguments),
            "rr" | "round-robin" => none(CreatePolicy::RoundRobin, &arguments),
            "tdmfs" | "top-down-most-free-space" => {
                low(&arguments).map(|(low, hold)| CreatePolicy::TopDownMostFree { low, hold })
            }
            "mfs" | "most-free-space" => held(&arguments).map(|hold| CreatePolicy::MostFree { hold }),
            "mfsrr" => low(&arguments).map(|(low, hold)| CreatePolicy::MostFreeRoundRobin { low, hold }),
            "pmfs" => held(&arguments).map(|hold| CreatePolicy::ParentMostFree { hold }),
            "pmfsrr" => low(&arguments).map(|(low, hold)| CreatePolicy::ParentMostFreeRoundRobin { low, hold }),
            "all" | "epall" => Err(PolicyFault::SeveralBranches(name.to_owned())),
            _ => match POOL.iter().find(|(known, ..)| *known == name) {
                Some((_, reach, preference)) => none(CreatePolicy::Pool(*reach, *preference), &arguments),
                None => Err(PolicyFault::Unknown),
            },
        };
        policy.map_err(|why| ParseError::new(format!("create={}: {why}", text.escape_debug())))
    }
}

/// Why the name or the arguments of a policy for new files are refused.
enum PolicyFault {
    Unknown,
    /// A policy of mergerfs that creates on several branches at once.
    SeveralBranches(String),
    TakesNothing,
    TooMuch,
    NotSeconds(String),
    NeedsBytes,
    NotBytes(ParseError),
}

impl fmt::Display for PolicyFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PolicyFault::Unknown => write!(
                f,
                "there is no such policy; there are tdp, tdmfs:LOW[:SEC], rr, mfs[:SEC], mfsrr:LOW[:SEC], pmfs[:SEC], pmfsrr:LOW[:SEC], {}",
                pool_names()
            ),
            PolicyFault::SeveralBranches(name) => write!(
                f,
                "{name} would create on several branches; one operation writes to one branch, so write ff or epff"
            ),
            PolicyFault::TakesNothing => f.write_str("it takes nothing after the name"),
            PolicyFault::TooMuch => f.write_str("there is too much after the name"),
            PolicyFault::NotSeconds(text) => {
                write!(f, "\"{}\" is no number of seconds from 0 to {}", text.escape_debug(), Hold::MAX)
            }
            PolicyFault::NeedsBytes => f.write_str("it needs a number of bytes, as in tdmfs:10G"),
            PolicyFault::NotBytes(why) => why.fmt(f),
        }
    }
}

fn none(policy: CreatePolicy, arguments: &[&str]) -> Result<CreatePolicy, PolicyFault> {
    if arguments.is_empty() { Ok(policy) } else { Err(PolicyFault::TakesNothing) }
}

/// Parses `[:SEC]`.
fn held(arguments: &[&str]) -> Result<Hold, PolicyFault> {
    match arguments {
        [] => Ok(Hold::DEFAULT),
        [seconds] => match seconds.parse() {
            Ok(seconds) if seconds <= Hold::MAX => Ok(Hold(seconds)),
            _ => Err(PolicyFault::NotSeconds((*seconds).to_owned())),
        },
        _ => Err(PolicyFault::TooMuch),
    }
}

/// Parses `:LOW[:SEC]`.
fn low(arguments: &[&str]) -> Result<(u64, Hold), PolicyFault> {
    let [low, rest @ ..] = arguments else {
        return Err(PolicyFault::NeedsBytes);
    };
    Ok((parse_size(low).map_err(PolicyFault::NotBytes)?, held(rest)?))
}

impl fmt::Display for CreatePolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CreatePolicy::TopDownParent => f.write_str("tdp"),
            CreatePolicy::TopDownMostFree { low, hold } => write!(f, "tdmfs:{low}:{}", hold.0),
            CreatePolicy::RoundRobin => f.write_str("rr"),
            CreatePolicy::MostFree { hold } => write!(f, "mfs:{}", hold.0),
            CreatePolicy::MostFreeRoundRobin { low, hold } => write!(f, "mfsrr:{low}:{}", hold.0),
            CreatePolicy::ParentMostFree { hold } => write!(f, "pmfs:{}", hold.0),
            CreatePolicy::ParentMostFreeRoundRobin { low, hold } => write!(f, "pmfsrr:{low}:{}", hold.0),
            CreatePolicy::Pool(reach, preference) => {
                let known = POOL.iter().find(|(_, known, prefers)| known == reach && prefers == preference);
                f.write_str(known.map_or("?", |(name, ..)| name))
            }
        }
    }
}

impl FromStr for CopyUpPolicy {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<CopyUpPolicy, ParseError> {
        match text {
            "tdp" | "top-down-parent" => Ok(CopyUpPolicy::TopDownParent),
            "bup" | "bottom-up-parent" => Ok(CopyUpPolicy::BottomUpParent),
            "bu" | "bottom-up" => Ok(CopyUpPolicy::BottomUp),
            _ => Err(ParseError::new(format!(
                "cpup={}: there is no such policy; there are tdp, bup and bu",
                text.escape_debug()
            ))),
        }
    }
}

impl fmt::Display for CopyUpPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            CopyUpPolicy::TopDownParent => "tdp",
            CopyUpPolicy::BottomUpParent => "bup",
            CopyUpPolicy::BottomUp => "bu",
        })
    }
}
