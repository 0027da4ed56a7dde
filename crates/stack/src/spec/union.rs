//! Branches of a union as settings, and the conversion of a union's settings.
//!
//! A branch is written `PATH[=ATTRIBUTES]`, or `{STACK}[=ATTRIBUTES]` for further layers between
//! the directory and the union; several are separated by `:`. A backslash takes the next character
//! literally, in a path as in a stack.

use super::{HostSpec, LayerSpec, SpecError, StackSpec, UnionSpec};
use nacre_layers::settings::Field;
use nacre_union::{BRANCHES_MAX, BranchMode, UnionOptions, Words, escape_path, parse_one};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _, ser::Error as _};
use std::{
    ffi::{OsStr, OsString},
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Path, PathBuf},
};

/// Source of a branch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BranchSource {
    /// A directory, with the coherence of the union.
    Directory(PathBuf),
    /// A stack of layers.
    Stack(StackSpec),
}

/// One branch of a union.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BranchSpec {
    /// Directory or stack.
    pub source: BranchSource,
    /// Permitted operations and other attributes.
    pub mode: BranchMode,
}

/// Maximum nesting depth of stacks within branches of stacks. Each is parsed recursively, and
/// printed with twice as many backslashes as the one around it.
const NESTED_MOST: usize = 8;

/// Nesting depth of braces, including escaped ones, which an inner stack has.
fn depth(line: &[u8]) -> usize {
    let (mut open, mut most) = (0_usize, 0);
    for byte in line {
        match byte {
            b'{' => open += 1,
            b'}' => open = open.saturating_sub(1),
            _ => {}
        }
        most = most.max(open);
    }
    most
}

impl BranchSpec {
    /// A directory.
    pub fn directory(path: impl Into<PathBuf>, mode: BranchMode) -> BranchSpec {
        BranchSpec { source: BranchSource::Directory(path.into()), mode }
    }

    /// Parses one branch; `default` is its mode if it has no attributes.
    ///
    /// # Errors
    /// An empty path, a malformed stack or malformed attributes.
    pub fn parse(text: &[u8], default: BranchMode) -> Result<BranchSpec, String> {
        let Some(inner) = text.strip_prefix(b"{") else {
            let (path, mode) = parse_one(OsStr::from_bytes(text), default).map_err(|error| error.to_string())?;
            return Ok(BranchSpec::directory(path, mode));
        };
        let end = closing(inner).ok_or_else(|| "a stack that begins with { has to end with }".to_owned())?;
        let (line, rest) = (inner.get(..end).unwrap_or_default(), inner.get(end + 1..).unwrap_or_default());
        let mode = match rest {
            [] => default,
            [b'=', mode @ ..] => {
                BranchMode::parse(&String::from_utf8_lossy(mode)).map_err(|error| error.to_string())?
            }
            _ => return Err("behind the } of a stack, only =ATTRIBUTES may follow".to_owned()),
        };
        if depth(line) >= NESTED_MOST {
            return Err(format!("stacks are nested more than {NESTED_MOST} deep; mount some of them by themselves"));
        }
        let stack =
            StackSpec::from_line(line).map_err(|error| format!("the stack of a branch is not understood: {error}"))?;
        Ok(BranchSpec { source: BranchSource::Stack(stack), mode })
    }

    /// Parses several branches, separated by `:`. By default, the first of the union is `rw`, all
    /// others `ro`; with `all_writable`, all are `rw`.
    ///
    /// # Errors
    /// As [`BranchSpec::parse`].
    pub fn parse_list(text: &[u8], first: bool, all_writable: bool) -> Result<Vec<BranchSpec>, String> {
        let default = |place| if all_writable || (first && place == 0) { BranchMode::rw() } else { BranchMode::ro() };
        divide(text).into_iter().enumerate().map(|(place, branch)| BranchSpec::parse(branch, default(place))).collect()
    }

    /// Prints the branch so that it can be parsed back.
    pub fn text(&self) -> OsString {
        let mut text = match &self.source {
            BranchSource::Directory(path) => {
                let text = escape_path(path).into_vec();
                // An unescaped brace at the start would mean a stack.
                if text.starts_with(b"{") { [b"\\".as_slice(), &text].concat() } else { text }
            }
            // In a line, a backslash may stand before any character.
            BranchSource::Stack(stack) => {
                format!("{{{}}}", stack.to_line().replace('{', "\\{").replace('}', "\\}")).into_bytes()
            }
        };
        text.extend_from_slice(format!("={}", self.mode).as_bytes());
        OsString::from_vec(text)
    }

    /// The branch's name for users: its directory, or the lowest one of its stack.
    pub fn name(&self) -> PathBuf {
        match &self.source {
            BranchSource::Directory(path) => path.clone(),
            BranchSource::Stack(stack) => match stack.layers.first() {
                Some(LayerSpec::Host(host)) => host.source.clone(),
                Some(leaf) => PathBuf::from(leaf.name()),
                None => PathBuf::new(),
            },
        }
    }

    /// All host directories of the branch.
    pub fn directories(&self) -> Vec<&Path> {
        match &self.source {
            BranchSource::Directory(path) => vec![path],
            BranchSource::Stack(stack) => stack.directories(),
        }
    }

    /// All host directories of the branch, mutable.
    pub fn directories_mut(&mut self) -> Vec<&mut PathBuf> {
        match &mut self.source {
            BranchSource::Directory(path) => vec![path],
            BranchSource::Stack(stack) => stack.directories_mut(),
        }
    }

    /// The branch as a stack; a directory gets the coherence of the union.
    pub fn stack(&self, union: &UnionSpec) -> StackSpec {
        match &self.source {
            BranchSource::Stack(stack) => stack.clone(),
            BranchSource::Directory(path) => {
                let host = HostSpec {
                    source: path.clone(),
                    coherence: union.coherence,
                    noatime: union.noatime,
                    ..HostSpec::default()
                };
                StackSpec { layers: vec![LayerSpec::Host(host)] }
            }
        }
    }
}

/// Branches, from the top: in TOML a list of strings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Branches(pub Vec<BranchSpec>);

impl Serialize for Branches {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let texts = self.0.iter().map(|branch| branch.text().into_string());
        let texts: Result<Vec<String>, OsString> = texts.collect();
        texts
            .map_err(|text| S::Error::custom(format!("the branch {} is not UTF-8", text.display())))?
            .serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Branches {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Branches, D::Error> {
        let mut branches = Branches::default();
        for text in Vec::<String>::deserialize(deserializer)? {
            branches.set(Some(text.as_bytes())).map_err(D::Error::custom)?;
        }
        Ok(branches)
    }
}

impl Field for Branches {
    fn set(&mut self, value: Option<&[u8]>) -> Result<(), String> {
        let value = value.ok_or_else(|| "needs a value: PATH[=ATTRIBUTES][:PATH...]".to_owned())?;
        self.0.extend(BranchSpec::parse_list(value, self.0.is_empty(), false)?);
        Ok(())
    }
    fn print(&self) -> Vec<Vec<u8>> {
        self.0.iter().map(|branch| branch.text().into_vec()).collect()
    }
}

/// Index of the brace that closes one opened before the text.
fn closing(text: &[u8]) -> Option<usize> {
    let (mut depth, mut literal) = (1_usize, false);
    for (at, byte) in text.iter().enumerate() {
        match byte {
            _ if literal => literal = false,
            b'\\' => literal = true,
            b'{' => depth += 1,
            b'}' if depth == 1 => return Some(at),
            b'}' => depth -= 1,
            _ => {}
        }
    }
    None
}

/// Splits a text at plain colons outside of stacks.
fn divide(text: &[u8]) -> Vec<&[u8]> {
    let (mut parts, mut start, mut at) = (Vec::new(), 0, 0);
    while let Some(byte) = text.get(at) {
        match byte {
            b'\\' => at += 1,
            b'{' if at == start => at += closing(text.get(at + 1..).unwrap_or_default()).map_or(0, |end| end + 1),
            b':' => {
                parts.extend(text.get(start..at));
                start = at + 1;
            }
            _ => {}
        }
        at += 1;
    }
    parts.extend(text.get(start..));
    parts
}

impl UnionSpec {
    /// Converts the settings to the union's options.
    ///
    /// # Errors
    /// Malformed words, or words for which there is a separate setting here.
    pub fn options(&self) -> Result<UnionOptions, SpecError> {
        let failed = |error: nacre_union::ParseError| SpecError(format!("\"option\": {error}"));
        let list = Words::join(self.option.iter().map(OsStr::new));
        let words = Words::parse(&list).map_err(failed)?;
        if let Some(other) = words.rest.first() {
            return Err(SpecError(format!(
                "\"option\": there is no word \"{}\" of unions",
                other.to_string_lossy().escape_debug()
            )));
        }
        if !words.branches.is_empty() {
            return Err(SpecError("\"option\": branches are settings of their own: write branch=PATH".to_owned()));
        }
        if words.udba.is_some() || words.acl.is_some() {
            return Err(SpecError(
                "\"option\": udba and acl are not for here; write coherence=exclusive, revalidate or watch, and mount with --acl"
                    .to_owned(),
            ));
        }
        let named = self.branch.0.iter().map(|branch| (branch.name(), branch.mode.clone())).collect();
        Ok(words.with_branches(named).map_err(failed)?.options)
    }

    /// Checks everything that can be checked without access to the system.
    ///
    /// # Errors
    /// No branch, too many, an invalid stack, or malformed words.
    pub(super) fn check(&self) -> Result<(), SpecError> {
        if self.branch.0.is_empty() {
            return Err(SpecError(
                "\"branch\" is missing; name at least one directory, as in union:branch=/upper=rw:/lower".to_owned(),
            ));
        }
        if self.branch.0.len() > BRANCHES_MAX {
            return Err(SpecError(format!(
                "\"branch\": {} branches are more than a union can have ({BRANCHES_MAX})",
                self.branch.0.len()
            )));
        }
        for branch in &self.branch.0 {
            if let BranchSource::Stack(stack) = &branch.source {
                stack.check()?;
                // The daemon chooses a place for the accounts only for cages over a directory that nothing else shows.
                let unplaced = |layer: &LayerSpec| matches!(layer, LayerSpec::Cage(cage) if cage.state.is_none());
                if stack.layers.iter().any(unplaced) {
                    return Err(SpecError(
                        "\"branch\": a cage below a union needs state=DIRECTORY; or put it on top: 'union:... | cage:size=10G'"
                            .to_owned(),
                    ));
                }
            }
        }
        self.options().map(drop)
    }
}
