//! Routes: path patterns with a policy or a branch of their own (`route=*.iso=mfs`, `route=movies/**=/hdd`).
//!
//! The first matching route counts. A pattern with a slash is matched against the whole path from the union's
//! root, a pattern without a slash against the last component; `*` stays within a component, `**` does not,
//! `?`, `[a-z]` and `{a,b}` as in shells. Pure.

use super::CreatePolicy;
use crate::branch::{Escaped, ParseError, Unescaped, plain};
use std::{
    ffi::OsStr,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

/// The target of a route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// A policy.
    Policy(CreatePolicy),
    /// A branch, as the user named it.
    Branch(PathBuf),
}

/// A pattern and its target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    pattern: String,
    target: Target,
}

impl Route {
    /// Parses `PATTERN=POLICY` or `PATTERN=/PATH/OF/BRANCH`, divided at the last unescaped equals sign.
    ///
    /// # Errors
    /// No pattern, a bad one, an unknown policy.
    pub fn parse(text: &OsStr) -> Result<Route, ParseError> {
        let shown = text.to_string_lossy().into_owned();
        let bad = |why: &str| ParseError::new(format!("route={}: {why}", shown.escape_debug()));
        let bytes = text.as_bytes();
        let plain_sign = |at: &usize| {
            at.checked_sub(1).and_then(|before| bytes.get(before)) != Some(&b'\\') && bytes.get(*at) == Some(&b'=')
        };
        let at =
            (0..bytes.len()).rev().find(plain_sign).ok_or_else(|| bad("write PATTERN=POLICY or PATTERN=/BRANCH"))?;
        let (pattern, target) = (bytes.get(..at).unwrap_or_default(), bytes.get(at + 1..).unwrap_or_default());
        let pattern = std::str::from_utf8(pattern).map_err(|_| bad("the pattern is no UTF-8"))?;
        let pattern = pattern.strip_prefix('/').unwrap_or(pattern);
        if pattern.is_empty() {
            return Err(bad("the pattern is empty"));
        }
        fast_glob::validate(pattern).map_err(|error| bad(&error.to_string()))?;
        let target = if target.starts_with(b"/") {
            let unescaped = Unescaped::new(OsStr::from_bytes(target));
            let whole: Vec<&Escaped> = unescaped.split(0).collect();
            Target::Branch(PathBuf::from(plain(&whole.concat())))
        } else {
            let policy = std::str::from_utf8(target).map_err(|_| bad("the policy is no UTF-8"))?;
            Target::Policy(policy.parse().map_err(|error: ParseError| bad(&error.to_string()))?)
        };
        Ok(Route { pattern: pattern.to_owned(), target })
    }

    /// Whether it matches this path, which is relative to the union's root, without a slash at the start.
    fn matches(&self, path: &[u8]) -> bool {
        let subject =
            if self.pattern.contains('/') { path } else { path.rsplit(|byte| *byte == b'/').next().unwrap_or(path) };
        fast_glob::glob_match(self.pattern.as_bytes(), subject)
    }
}

/// All routes of a union, in their order, with branches by their positions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Routes(Vec<(Route, Option<usize>)>);

/// The target of a matching route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// By this policy.
    Policy(CreatePolicy),
    /// To this branch if it takes new files, else by the union's policy.
    Branch(usize),
}

impl Routes {
    /// Resolves the branches that routes name.
    ///
    /// # Errors
    /// A route names no branch.
    pub fn new(routes: Vec<Route>, branches: &[PathBuf]) -> Result<Routes, ParseError> {
        let found = routes.into_iter().map(|route| match &route.target {
            Target::Policy(_) => Ok((route, None)),
            Target::Branch(path) => match branches.iter().position(|branch| branch == path) {
                Some(index) => Ok((route, Some(index))),
                None => Err(unknown_branch(path)),
            },
        });
        found.collect::<Result<_, _>>().map(Routes)
    }

    /// These routes after branches have changed positions: `place` returns the new position of a branch that is
    /// still there. A route to a branch that was missing finds it by its name.
    pub(crate) fn moved(&self, place: &dyn Fn(usize) -> Option<usize>, names: &[PathBuf]) -> Routes {
        let found = self.0.iter().map(|(route, branch)| match &route.target {
            Target::Policy(_) => (route.clone(), None),
            Target::Branch(path) => {
                (route.clone(), branch.and_then(place).or_else(|| names.iter().position(|name| name == path)))
            }
        });
        Routes(found.collect())
    }

    /// Whether there are none, so that paths are not needed.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The target of the first route that matches a path, and its pattern.
    pub fn find(&self, path: &[u8]) -> Option<(Way, &str)> {
        let (route, branch) = self.0.iter().find(|(route, _)| route.matches(path))?;
        let way = match (&route.target, branch) {
            (_, Some(index)) => Way::Branch(*index),
            (Target::Policy(policy), None) => Way::Policy(*policy),
            (Target::Branch(_), None) => return None,
        };
        Some((way, &route.pattern))
    }
}

fn unknown_branch(path: &Path) -> ParseError {
    ParseError::new(format!("a route leads to {}, which is no branch", path.display()))
}
