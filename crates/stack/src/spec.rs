//! Specification of a stack, as plain data: every layer with all its settings, before anything is
//! opened or looked up.
//!
//! Two texts describe the same data: a TOML file (`[[layer]]` tables from the bottom up) and one
//! line (`host:/srv/data,coherence=watch | remap:force-user=alice,perms=a-w | readonly`, also from
//! the bottom up). Both know the same keys, by the same names; an unknown key is an error that
//! names it and the allowed ones. The command line fills the structures directly.
//!
//! Values that need the system (names of users) or a grammar of their own (permission rules, maps,
//! rates) stay text here and are compiled when the stack is built, so that a specification can be
//! written, printed and compared on any machine.

mod line;
#[cfg(test)]
mod tests;
mod toml_form;
mod union;

pub use nacre_cage::settings::{CageSpec, LimitError, WhenFull, Writes};
use nacre_layers::settings;
pub use nacre_layers::settings::*;
use serde::{Deserialize, Serialize};
use std::{
    fmt,
    path::{Path, PathBuf},
};
pub use union::{BranchSource, BranchSpec, Branches};

/// A stack of layers, from the bottom up: first a leaf (`host`, `mem`, `union`), then any number of
/// filters.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StackSpec {
    /// The layers, the lowest one first.
    #[serde(rename = "layer", default)]
    pub layers: Vec<LayerSpec>,
}

/// One layer with its settings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "kebab-case")]
pub enum LayerSpec {
    /// A directory of the host (leaf).
    Host(HostSpec),
    /// A tree in memory, empty at first and discarded at the end (leaf).
    Mem(MemSpec),
    /// Several directories or stacks as one tree (leaf).
    Union(Box<UnionSpec>),
    /// Other owners, modes and rules.
    Remap(Box<RemapSpec>),
    /// Refuses every change.
    Readonly(ReadonlySpec),
    /// Owners as another user namespace shows them.
    Shift(ShiftSpec),
    /// Owners, modes and types kept in extended attributes.
    OverrideStat(OverrideStatSpec),
    /// Limits the rate of reading and writing.
    Throttle(ThrottleSpec),
    /// Logs each operation.
    Trace(TraceSpec),
    /// Limits the stored data.
    Cage(Box<CageSpec>),
}

settings! {
    /// Several directories or stacks as one tree.
    pub struct UnionSpec {
        /// The branches, from the top: `PATH[=ATTRIBUTES]` or `{STACK}[=ATTRIBUTES]`, separated by
        /// colons; may be given several times.
        "branch" => branch: Branches,
        /// A word of docs/union.md, such as `create=mfs`; may be given several times.
        "option" => option: Vec<String>,
        /// Which other processes may change the branches that are plain directories.
        "coherence" => coherence: HostCoherence,
        /// Do not update their access times.
        "noatime" => noatime: bool,
        /// The file in which it is noted which entries of read-only branches are hidden, for workspaces.
        "base-log" => base_log: Option<PathBuf>,
        /// With `base-log`: paths from the union's top that stay as they are on their branches; may be given several
        /// times.
        "frozen" => frozen: Vec<PathBuf>,
    }
}

impl LayerSpec {
    /// The layer's name, as written in a stack.
    pub fn name(&self) -> &'static str {
        match self {
            LayerSpec::Host(_) => "host",
            LayerSpec::Mem(_) => "mem",
            LayerSpec::Union(_) => "union",
            LayerSpec::Remap(_) => "remap",
            LayerSpec::Readonly(_) => "readonly",
            LayerSpec::Shift(_) => "shift",
            LayerSpec::OverrideStat(_) => "override-stat",
            LayerSpec::Throttle(_) => "throttle",
            LayerSpec::Trace(_) => "trace",
            LayerSpec::Cage(_) => "cage",
        }
    }

    /// The names of all layers.
    pub const NAMES: [&'static str; 10] =
        ["host", "mem", "union", "remap", "readonly", "shift", "override-stat", "throttle", "trace", "cage"];

    /// A layer by its name, with default settings.
    pub fn named(name: &str) -> Option<LayerSpec> {
        Some(match name {
            "host" => LayerSpec::Host(HostSpec::default()),
            "mem" => LayerSpec::Mem(MemSpec::default()),
            "union" => LayerSpec::Union(Box::default()),
            "remap" => LayerSpec::Remap(Box::default()),
            "readonly" => LayerSpec::Readonly(ReadonlySpec::default()),
            "shift" => LayerSpec::Shift(ShiftSpec::default()),
            "override-stat" => LayerSpec::OverrideStat(OverrideStatSpec::default()),
            "throttle" => LayerSpec::Throttle(ThrottleSpec::default()),
            "trace" => LayerSpec::Trace(TraceSpec::default()),
            "cage" => LayerSpec::Cage(Box::default()),
            _ => return None,
        })
    }

    /// Whether no layer can be below it.
    pub fn is_leaf(&self) -> bool {
        matches!(self, LayerSpec::Host(_) | LayerSpec::Mem(_) | LayerSpec::Union(_))
    }

    /// The settings that differ from the default, as key and value, in the order of the
    /// documentation. A switch has an empty value.
    pub fn settings(&self) -> Vec<(&'static str, Vec<u8>)> {
        match self {
            LayerSpec::Host(spec) => spec.settings(),
            LayerSpec::Mem(spec) => spec.settings(),
            LayerSpec::Union(spec) => spec.settings(),
            LayerSpec::Remap(spec) => spec.settings(),
            LayerSpec::Readonly(spec) => spec.settings(),
            LayerSpec::Shift(spec) => spec.settings(),
            LayerSpec::OverrideStat(spec) => spec.settings(),
            LayerSpec::Throttle(spec) => spec.settings(),
            LayerSpec::Trace(spec) => spec.settings(),
            LayerSpec::Cage(spec) => spec.settings(),
        }
    }

    /// Sets a setting by its key. Lists are appended to, everything else is replaced. `None` is a
    /// bare key, which only switches accept.
    ///
    /// # Errors
    /// A key that the layer does not have (the text lists the allowed ones), or an invalid value.
    pub fn set(&mut self, key: &str, value: Option<&[u8]>) -> Result<(), SpecError> {
        match self {
            LayerSpec::Host(spec) => spec.set(key, value),
            LayerSpec::Mem(spec) => spec.set(key, value),
            LayerSpec::Union(spec) => spec.set(key, value),
            LayerSpec::Remap(spec) => spec.set(key, value),
            LayerSpec::Readonly(spec) => spec.set(key, value),
            LayerSpec::Shift(spec) => spec.set(key, value),
            LayerSpec::OverrideStat(spec) => spec.set(key, value),
            LayerSpec::Throttle(spec) => spec.set(key, value),
            LayerSpec::Trace(spec) => spec.set(key, value),
            LayerSpec::Cage(spec) => spec.set(key, value),
        }
    }
}

impl StackSpec {
    /// Parses the one-line form.
    ///
    /// # Errors
    /// Malformed text, with the layer and the key, and the allowed values.
    pub fn from_line(text: &[u8]) -> Result<StackSpec, SpecError> {
        let spec = line::parse(text)?;
        spec.check()?;
        Ok(spec)
    }

    /// Prints the one-line form: settings that differ from the defaults, in ASCII wherever paths
    /// are.
    pub fn to_line(&self) -> String {
        line::print(self)
    }

    /// Parses the TOML form.
    ///
    /// # Errors
    /// As for [`StackSpec::from_line`].
    pub fn from_toml(text: &str) -> Result<StackSpec, SpecError> {
        let spec: StackSpec = toml_form::parse(text)?;
        spec.check()?;
        Ok(spec)
    }

    /// Prints the TOML form.
    ///
    /// # Errors
    /// A path that is not UTF-8: TOML cannot hold it (the one-line form can).
    pub fn to_toml(&self) -> Result<String, SpecError> {
        toml::to_string(self)
            .map_err(|error| SpecError(format!("the stack cannot be written as TOML: {error}; use the one-line form")))
    }

    /// Checks the order of the layers.
    ///
    /// # Errors
    /// No layer at all, a filter at the bottom, a leaf above it, or a leaf without its source.
    pub fn check(&self) -> Result<(), SpecError> {
        let Some((leaf, filters)) = self.layers.split_first() else {
            return Err(SpecError("the stack is empty; begin it with a leaf such as host:/some/directory".to_owned()));
        };
        if !leaf.is_leaf() {
            return Err(SpecError(format!(
                "\"{}\" cannot be the lowest layer, it needs one below; begin the stack with host:/some/directory or mem",
                leaf.name()
            )));
        }
        if let LayerSpec::Host(host) = leaf
            && host.source.as_os_str().is_empty()
        {
            return Err(SpecError(
                "layer 1 (host): \"source\" is missing; name the directory, as in host:/some/directory".to_owned(),
            ));
        }
        if let LayerSpec::Union(union) = leaf {
            union.check().map_err(|error| SpecError(format!("layer 1 (union): {error}")))?;
            let shifts = filters.iter().any(|filter| matches!(filter, LayerSpec::Shift(_)));
            if shifts && union.options().is_ok_and(|options| options.control_file) {
                return Err(SpecError(
                    "layer 1 (union): control-file=true cannot be below shift, whose users could be root to it"
                        .to_owned(),
                ));
            }
        }
        match filters.iter().position(LayerSpec::is_leaf) {
            None => Ok(()),
            Some(place) => Err(SpecError(format!(
                "layer {} ({}) can only be the lowest one; stacks are written from the bottom up",
                place + 2,
                filters.get(place).map_or("", LayerSpec::name)
            ))),
        }
    }
}

impl StackSpec {
    /// The cages of the stack, from the bottom up: those of a union's branches first, from the top branch down.
    pub fn cages(&self) -> Vec<&CageSpec> {
        let mut cages = Vec::new();
        for layer in &self.layers {
            match layer {
                LayerSpec::Cage(cage) => cages.push(&**cage),
                LayerSpec::Union(union) => {
                    for branch in &union.branch.0 {
                        if let BranchSource::Stack(stack) = &branch.source {
                            cages.extend(stack.cages());
                        }
                    }
                }
                _ => {}
            }
        }
        cages
    }

    /// As [`StackSpec::cages`], mutable.
    pub fn cages_mut(&mut self) -> Vec<&mut CageSpec> {
        let mut cages = Vec::new();
        for layer in &mut self.layers {
            match layer {
                LayerSpec::Cage(cage) => cages.push(&mut **cage),
                LayerSpec::Union(union) => {
                    for branch in &mut union.branch.0 {
                        if let BranchSource::Stack(stack) = &mut branch.source {
                            cages.extend(stack.cages_mut());
                        }
                    }
                }
                _ => {}
            }
        }
        cages
    }

    /// The host directories of all its layers.
    pub fn directories(&self) -> Vec<&Path> {
        let mut directories = Vec::new();
        for layer in &self.layers {
            match layer {
                LayerSpec::Host(host) => {
                    directories.push(host.source.as_path());
                    directories.extend(host.work.as_deref());
                }
                LayerSpec::Union(union) => directories.extend(union.branch.0.iter().flat_map(BranchSpec::directories)),
                _ => {}
            }
        }
        directories
    }

    /// The host directories of all its layers, mutable.
    pub fn directories_mut(&mut self) -> Vec<&mut PathBuf> {
        let mut directories = Vec::new();
        for layer in &mut self.layers {
            match layer {
                LayerSpec::Host(host) => {
                    directories.push(&mut host.source);
                    directories.extend(host.work.as_mut());
                }
                LayerSpec::Union(union) => {
                    directories.extend(union.branch.0.iter_mut().flat_map(BranchSpec::directories_mut))
                }
                _ => {}
            }
        }
        directories
    }
}

impl fmt::Display for StackSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_line())
    }
}
