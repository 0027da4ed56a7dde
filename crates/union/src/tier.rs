//! Tiering: the decision which files are moved to a faster or a slower branch, and why. Pure.
//!
//! The branches with `+tier` are the tiers, the fastest on top. The decision depends on figures only
//! ([`plan`]); `tier/run.rs` collects the figures and moves the files, `tier/heat.rs` counts opens of files.

pub(crate) mod heat;
mod run;
#[cfg(test)]
mod tests;

use crate::branch::{ParseError, parse_size};
pub use run::{PlannedMove, TierFigures, TierReport, TierStatus};
pub(crate) use run::{Tiering, start};
use std::{fmt, str::FromStr, time::Duration};

/// The rules of tiering.
#[derive(Clone, Debug, PartialEq)]
pub struct TierRules {
    /// Upper watermark: a tier that is used to more than this percentage sends files down, the least used ones
    /// first.
    pub high: u8,
    /// Lower watermark: files are sent down until the tier is used to no more than this percentage.
    pub low: u8,
    /// Files unused for longer than this are sent down in any case.
    pub age: Option<Duration>,
    /// Files that have been opened this often recently (each open counts half after a day) are moved up.
    pub heat: Option<u32>,
    /// Smaller files stay, bytes.
    pub min_size: u64,
    /// Larger files stay, bytes.
    pub max_size: Option<u64>,
    /// Files under matching paths stay. A pattern with a slash is matched against the path from the union's
    /// root, a pattern without a slash against the last component.
    pub keep: Vec<String>,
    /// Matching files belong on the first tier.
    pub hot: Vec<String>,
    /// Matching files belong on the last tier.
    pub cold: Vec<String>,
    /// Maximal copy rate, bytes per second.
    pub rate: Option<u64>,
    /// The interval of checks of the tiers' use.
    pub every: Duration,
    /// The interval of scans of all files, where rules other than `high` need them.
    pub scan: Duration,
}

impl Default for TierRules {
    fn default() -> TierRules {
        TierRules {
            high: 90,
            low: LOW,
            age: None,
            heat: None,
            min_size: 0,
            max_size: None,
            keep: Vec::new(),
            hot: Vec::new(),
            cold: Vec::new(),
            rate: None,
            every: Duration::from_secs(30),
            scan: Duration::from_secs(3_600),
        }
    }
}

/// The default lower watermark.
const LOW: u8 = 80;

const WORDS: &str = "high, low, age, heat, min, max, keep, hot, cold, rate, every, scan";

impl TierRules {
    /// Applies one word: `high=90`, `age=30d`, `keep=*.db`.
    ///
    /// # Errors
    /// An unknown word, or a value that makes no sense.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), ParseError> {
        match name {
            "high" => {
                self.high = percent(value, 1)?;
                // A default that no user has set must not contradict the upper watermark.
                if self.low == LOW && self.low >= self.high {
                    self.low = self.high.saturating_sub(10);
                }
            }
            "low" => self.low = percent(value, 0)?,
            "age" => self.age = Some(duration(value)?),
            "heat" => {
                self.heat = Some(
                    value
                        .parse()
                        .ok()
                        .filter(|heat| *heat > 0)
                        .ok_or_else(|| bad(value, "a number of opens, as in heat=4"))?,
                )
            }
            "min" => self.min_size = parse_size(value)?,
            "max" => self.max_size = Some(parse_size(value)?),
            "keep" => self.keep.push(pattern(value)?),
            "hot" => self.hot.push(pattern(value)?),
            "cold" => self.cold.push(pattern(value)?),
            "rate" => self.rate = Some(parse_size(value)?).filter(|rate| *rate > 0),
            "every" => self.every = duration(value)?.max(Duration::from_secs(1)),
            "scan" => self.scan = duration(value)?.max(Duration::from_secs(1)),
            _ => {
                return Err(ParseError::new(format!(
                    "\"{}\" is no word for tiers; there are {WORDS}",
                    name.escape_debug()
                )));
            }
        }
        Ok(())
    }

    /// Checks that the watermarks do not contradict each other.
    ///
    /// # Errors
    /// The lower watermark is not below the upper one.
    pub fn check(&self) -> Result<(), ParseError> {
        if self.low < self.high {
            return Ok(());
        }
        Err(ParseError::new(format!("low={} must be below high={}", self.low, self.high)))
    }

    /// Whether files have to be scanned although no tier is full.
    pub(crate) fn needs_scans(&self) -> bool {
        self.age.is_some() || !self.hot.is_empty() || !self.cold.is_empty()
    }
}

fn bad(value: &str, what: &str) -> ParseError {
    ParseError::new(format!("\"{}\" is not {what}", value.escape_debug()))
}

fn percent(text: &str, least: u8) -> Result<u8, ParseError> {
    let number = text.strip_suffix('%').unwrap_or(text).parse().ok().filter(|number| (least..=100).contains(number));
    number.ok_or_else(|| bad(text, &format!("a percentage from {least} to 100")))
}

/// Parses seconds, or a number with s, m, h, d or w.
fn duration(text: &str) -> Result<Duration, ParseError> {
    let end = text.find(|character: char| !character.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(end);
    let unit = match unit {
        "" | "s" => Some(1),
        "m" => Some(60),
        "h" => Some(3_600),
        "d" => Some(86_400),
        "w" => Some(604_800),
        _ => None,
    };
    let seconds = unit.and_then(|unit| digits.parse::<u64>().ok()?.checked_mul(unit));
    seconds
        .map(Duration::from_secs)
        .ok_or_else(|| bad(text, "a time; write seconds, or a number with m, h, d or w, as in 30d"))
}

pub(crate) fn pattern(text: &str) -> Result<String, ParseError> {
    let text = text.strip_prefix('/').unwrap_or(text);
    if text.is_empty() {
        return Err(bad(text, "a pattern, as in *.iso or movies/**"));
    }
    fast_glob::validate(text).map_err(|error| ParseError::new(format!("{}: {error}", text.escape_debug())))?;
    Ok(text.to_owned())
}

pub(crate) fn matches(patterns: &[String], path: &[u8]) -> bool {
    patterns.iter().any(|pattern| {
        let subject =
            if pattern.contains('/') { path } else { path.rsplit(|byte| *byte == b'/').next().unwrap_or(path) };
        fast_glob::glob_match(pattern.as_bytes(), subject)
    })
}

/// Parses words divided by commas.
impl FromStr for TierRules {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<TierRules, ParseError> {
        let mut rules = TierRules::default();
        for word in text.split(',').filter(|word| !word.is_empty()) {
            let (name, value) = word.split_once('=').ok_or_else(|| bad(word, "WORD=VALUE, as in high=90"))?;
            rules.set(name, value)?;
        }
        rules.check()?;
        Ok(rules)
    }
}

/// Writes the form that can be parsed.
impl fmt::Display for TierRules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "high={},low={}", self.high, self.low)?;
        if let Some(age) = self.age {
            write!(f, ",age={}", age.as_secs())?;
        }
        if let Some(heat) = self.heat {
            write!(f, ",heat={heat}")?;
        }
        if self.min_size > 0 {
            write!(f, ",min={}", self.min_size)?;
        }
        if let Some(max) = self.max_size {
            write!(f, ",max={max}")?;
        }
        for (name, patterns) in [("keep", &self.keep), ("hot", &self.hot), ("cold", &self.cold)] {
            for pattern in patterns {
                write!(f, ",{name}={pattern}")?;
            }
        }
        if let Some(rate) = self.rate {
            write!(f, ",rate={rate}")?;
        }
        write!(f, ",every={},scan={}", self.every.as_secs(), self.scan.as_secs())
    }
}

/// The use of a tier, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierView {
    /// Used.
    pub used: u64,
    /// Total.
    pub total: u64,
}

impl TierView {
    fn is_above(&self, percent: u8) -> bool {
        u128::from(self.used) * 100 > u128::from(self.total) * u128::from(percent)
    }

    fn takes(&self, size: u64, percent: u8) -> bool {
        !TierView { used: self.used.saturating_add(size), ..*self }.is_above(percent)
    }
}

/// A file that may be moved.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// Path, names divided by slashes.
    pub path: Vec<u8>,
    /// Index of its tier, the fastest is 0.
    pub tier: usize,
    /// Bytes that it takes.
    pub size: u64,
    /// When it was last read or written, since the epoch.
    pub last_used: Duration,
    /// Number of recent opens.
    pub heat: f64,
    /// Whether it stays in any case.
    pub pinned: bool,
}

/// The reason of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// A pattern assigns the file to the tier.
    Pattern,
    /// It is used often.
    Hot,
    /// It has not been used for long.
    Old,
    /// Its tier is full, and it is used less than other files.
    Full,
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Why::Pattern => "a pattern says so",
            Why::Hot => "it is used much",
            Why::Old => "it has not been used for long",
            Why::Full => "its tier is full",
        })
    }
}

/// A planned move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Index in the list of candidates.
    pub file: usize,
    /// Index of the target tier.
    pub to: usize,
    /// The reason.
    pub why: Why,
}

/// Plans the moves: first by patterns, then often used files up, old files down, and from a full tier files
/// down, the least used and oldest first. No file moves twice, and no tier is filled above its upper watermark.
pub fn plan(rules: &TierRules, now: Duration, tiers: &[TierView], files: &[Candidate]) -> Vec<Step> {
    let mut plan = Plan { rules, tiers: tiers.to_vec(), files, steps: Vec::new(), gone: vec![false; files.len()] };
    let last = tiers.len().saturating_sub(1);
    let is_hot = |file: &Candidate| rules.heat.is_some_and(|heat| file.heat >= f64::from(heat));
    let is_old =
        |file: &Candidate| rules.age.is_some_and(|age| now.saturating_sub(file.last_used) > age) && !is_hot(file);
    // Moves that free space come before moves that need it.
    plan.each(Why::Pattern, &|file| (file.tier < last && matches(&rules.cold, &file.path)).then_some(last));
    plan.each(Why::Old, &|file| {
        (file.tier < last && is_old(file) && !matches(&rules.hot, &file.path)).then(|| file.tier + 1)
    });
    plan.each(Why::Pattern, &|file| {
        (file.tier > 0 && matches(&rules.hot, &file.path) && !matches(&rules.cold, &file.path)).then_some(0)
    });
    plan.each(Why::Hot, &|file| {
        (file.tier > 0 && is_hot(file) && !matches(&rules.cold, &file.path)).then(|| file.tier - 1)
    });
    for tier in 0..last {
        plan.relieve(tier);
    }
    plan.steps
}

struct Plan<'a> {
    rules: &'a TierRules,
    tiers: Vec<TierView>,
    files: &'a [Candidate],
    steps: Vec<Step>,
    gone: Vec<bool>,
}

impl Plan<'_> {
    fn may_go(&self, index: usize, file: &Candidate) -> bool {
        let rules = self.rules;
        let fits = file.size >= rules.min_size && rules.max_size.is_none_or(|max| file.size <= max);
        let stays = file.pinned || matches(&rules.keep, &file.path);
        fits && !stays && self.gone.get(index) == Some(&false)
    }

    fn go(&mut self, index: usize, file: &Candidate, to: usize, why: Why) -> bool {
        if to == file.tier || !self.tiers.get(to).is_some_and(|tier| tier.takes(file.size, self.rules.high)) {
            return false;
        }
        if let Some(tier) = self.tiers.get_mut(file.tier) {
            tier.used = tier.used.saturating_sub(file.size);
        }
        if let Some(tier) = self.tiers.get_mut(to) {
            tier.used = tier.used.saturating_add(file.size);
        }
        if let Some(gone) = self.gone.get_mut(index) {
            *gone = true;
        }
        self.steps.push(Step { file: index, to, why });
        true
    }

    fn each(&mut self, why: Why, wanted: &dyn Fn(&Candidate) -> Option<usize>) {
        for (index, file) in self.files.iter().enumerate() {
            if let Some(to) = wanted(file)
                && self.may_go(index, file)
            {
                self.go(index, file, to, why);
            }
        }
    }

    /// Sends files down until a tier is at its lower watermark.
    fn relieve(&mut self, tier: usize) {
        let is_above = |plan: &Plan<'_>, percent: u8| plan.tiers.get(tier).is_some_and(|view| view.is_above(percent));
        if !is_above(self, self.rules.high) {
            return;
        }
        let mut there: Vec<(usize, &Candidate)> =
            self.files.iter().enumerate().filter(|(_, file)| file.tier == tier).collect();
        there.retain(|(index, file)| self.may_go(*index, file) && !matches(&self.rules.hot, &file.path));
        there.sort_by(|(_, one), (_, other)| {
            let colder = one.heat.total_cmp(&other.heat);
            colder.then(one.last_used.cmp(&other.last_used)).then(other.size.cmp(&one.size))
        });
        let is_hot = |file: &Candidate| self.rules.heat.is_some_and(|heat| file.heat >= f64::from(heat));
        let (hot, others): (Vec<_>, Vec<_>) = there.into_iter().partition(|(_, file)| is_hot(file));
        self.send_down(tier, &others, self.rules.low);
        // Often used files are sent down only as far as necessary: they would come up again at once.
        let first = self.steps.len();
        self.send_down(tier, &hot, self.rules.high);
        self.take_back(tier, first);
    }

    fn send_down(&mut self, tier: usize, files: &[(usize, &Candidate)], until: u8) {
        for (index, file) in files {
            if !self.tiers.get(tier).is_some_and(|view| view.is_above(until)) {
                return;
            }
            for below in tier + 1..self.tiers.len() {
                if self.go(*index, file, below, Why::Full) {
                    break;
                }
            }
        }
    }

    /// Cancels steps from `first` on that later ones have made unnecessary, of the most used files first.
    fn take_back(&mut self, tier: usize, first: usize) {
        for at in (first..self.steps.len()).rev() {
            let Some(step) = self.steps.get(at).copied() else { return };
            let Some(file) = self.files.get(step.file) else { return };
            if self.tiers.get(tier).is_some_and(|view| view.takes(file.size, self.rules.high)) {
                if let Some(view) = self.tiers.get_mut(tier) {
                    view.used = view.used.saturating_add(file.size);
                }
                if let Some(view) = self.tiers.get_mut(step.to) {
                    view.used = view.used.saturating_sub(file.size);
                }
                if let Some(gone) = self.gone.get_mut(step.file) {
                    *gone = false;
                }
                self.steps.remove(at);
            }
        }
    }
}
