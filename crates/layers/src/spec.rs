//! What a stack consists of, as plain data: every layer with all its settings, before anything is
//! opened or looked up.
//!
//! Two texts describe the same data: a TOML file (`[[layer]]` tables from the bottom up) and one
//! line (`host:/srv/data,coherence=watch | remap:force-user=alice,perms=a-w | readonly`, also from
//! the bottom up). Both know the same keys, by the same names; an unknown key is an error that
//! names it and the allowed ones. The command line fills the structures directly.
//!
//! Values that need the system (names of users) or a grammar of their own (permission rules, maps,
//! rates) stay text here and are compiled when the stack is built, so that a specification can be
//! written, printed and compared anywhere.

mod cage;
mod field;
mod line;
#[cfg(test)]
mod tests;
mod union;

use field::{settings, words};
use serde::{Deserialize, Serialize};
use std::{
    fmt,
    path::{Path, PathBuf},
};
pub use union::{BranchSource, BranchSpec, Branches};

/// Why a specification cannot be understood: a sentence for the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecError(pub(crate) String);

impl fmt::Display for SpecError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for SpecError {}

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
    /// A tree in memory, empty at first and gone at the end (leaf).
    Mem(MemSpec),
    /// Several directories or stacks as one tree (leaf).
    Union(Box<UnionSpec>),
    /// Other owners, modes and rules.
    Remap(Box<RemapSpec>),
    /// Refuses every change.
    Readonly(ReadonlySpec),
    /// Owners as another user namespace sees them.
    Shift(ShiftSpec),
    /// Owners, modes and types kept in extended attributes.
    OverrideStat(OverrideStatSpec),
    /// Limits the rate of reading and writing.
    Throttle(ThrottleSpec),
    /// Logs each operation.
    Trace(TraceSpec),
    /// Limits what may be stored.
    Cage(Box<CageSpec>),
}

words! {
    /// Who else may change a source, and what is done about it.
    pub enum HostCoherence {
        /// Others may change it; their changes are watched for and caches dropped.
        #[default]
        Watch = "watch",
        /// Nobody else changes it: cache for good.
        Exclusive = "exclusive",
        /// Others may change it: ask again each time.
        Revalidate = "revalidate",
    }
}

words! {
    /// How symbolic links of a source appear.
    pub enum Symlinks {
        /// As links.
        #[default]
        Keep = "keep",
        /// As what they point to, also outside the source; broken ones stay links, and none can be
        /// made.
        Resolve = "resolve",
    }
}

words! {
    /// What deleting a resolved symbolic link removes.
    pub enum SymlinkDeletion {
        /// The link only.
        #[default]
        SymlinkOnly = "symlink-only",
        /// Nothing: EPERM.
        Deny = "deny",
        /// The link, then its target as far as possible.
        SymlinkFirst = "symlink-first",
        /// The target, which must succeed, then the link.
        TargetFirst = "target-first",
    }
}

words! {
    /// What becomes of a change of owner, group or mode.
    pub enum ChangePolicy {
        /// It reaches the source.
        #[default]
        Normal = "normal",
        /// It succeeds without effect.
        Ignore = "ignore",
        /// EPERM.
        Deny = "deny",
    }
}

words! {
    /// Which operations on extended attributes pass.
    pub enum XattrPolicy {
        /// All.
        #[default]
        Rw = "rw",
        /// Reading; setting and removing give EACCES.
        Ro = "ro",
        /// None: EOPNOTSUPP.
        None = "none",
    }
}

words! {
    /// How a cage takes writes.
    pub enum Writes {
        /// Collected where the limit is large enough for it, else one by one.
        #[default]
        Auto = "auto",
        /// Appends are collected by the kernel while there is room.
        Collected = "collected",
        /// Every write is a request.
        Through = "through",
    }
}

words! {
    /// What a cage does when something does not fit.
    pub enum WhenFull {
        /// The call fails.
        #[default]
        Deny = "deny",
        /// The oldest rotated files go, then the beginning of the biggest growing one.
        DropOldest = "drop-oldest",
    }
}

words! {
    /// Whom new objects belong to.
    pub enum CreateAs {
        /// The caller where the mounter is root, the mounter otherwise.
        #[default]
        Auto = "auto",
        /// The caller (root's mounts only).
        User = "user",
        /// The mounter.
        Mounter = "mounter",
    }
}

words! {
    /// Which extended attribute holds owners, modes and types.
    pub enum OverrideAttribute {
        /// The one that the root directory carries; where it carries none, everything is what it
        /// looks like.
        #[default]
        Carried = "carried",
        /// `security.fuseoverlayfs.override_stat`.
        Privileged = "privileged",
        /// `user.containers.override_stat`.
        Containers = "containers",
    }
}

words! {
    /// How loud the trace is.
    pub enum TraceLevel {
        /// Changes at `debug`, questions at `trace`.
        #[default]
        Changes = "changes",
        /// Everything at `debug`.
        All = "all",
    }
}

settings! {
    /// A directory of the host.
    pub struct HostSpec {
        /// The directory. In the one-line form, the first setting may be the bare path.
        "source" => source: PathBuf,
        /// Who else may change it.
        "coherence" => coherence: HostCoherence,
        /// How symbolic links appear.
        "symlinks" => symlinks: Symlinks,
        /// What deleting a resolved link removes.
        "symlink-deletion" => symlink_deletion: SymlinkDeletion,
        /// Keep `O_DIRECT` on the source's files and align buffers to so many bytes; without it,
        /// `O_DIRECT` is dropped on the way down.
        "forward-odirect" => forward_odirect: Option<u32>,
        /// Forward the ioctls whose argument is a plain value, with the mounter's rights:
        /// `FS_IOC_GETFLAGS`, `SETFLAGS`, `FSGETXATTR`, `FSSETXATTR` and `GETVERSION`. All others
        /// are ENOTTY.
        "ioctl" => ioctl: bool,
        /// Leave the source's access times alone, where the mounter may (root, and owners of
        /// files).
        "noatime" => noatime: bool,
        /// As a branch of a union: a directory outside the source on the same mount, for copies
        /// that are being made and the like.
        "work" => work: Option<PathBuf>,
        /// A directory below the source that does not exist in it; may be given several times.
        "without" => without: Vec<PathBuf>,
    }
}

settings! {
    /// A tree in memory; it has no settings.
    pub struct MemSpec {}
}

settings! {
    /// Several directories or stacks as one tree.
    pub struct UnionSpec {
        /// The branches, from the top: `PATH[=ATTRIBUTES]` or `{STACK}[=ATTRIBUTES]`, divided by
        /// colons; may be given several times.
        "branch" => branch: Branches,
        /// A word of docs/union.md, such as `create=mfs`; may be given several times.
        "option" => option: Vec<String>,
        /// Who else may change the branches that are plain directories.
        "coherence" => coherence: HostCoherence,
        /// Leave their access times alone.
        "noatime" => noatime: bool,
    }
}

settings! {
    /// Refuses every change; it has no settings.
    pub struct ReadonlySpec {}
}

settings! {
    /// Owners as another user namespace sees them. Ranges are `STORED:SHOWN:LENGTH`, several
    /// divided by `:` as well.
    pub struct ShiftSpec {
        /// Ranges of user ids; without any, users are who they are.
        "uid" => uid: Option<String>,
        /// Ranges of group ids.
        "gid" => gid: Option<String>,
        /// Everything shows as this user's.
        "squash-uid" => squash_uid: Option<u32>,
        /// Everything shows as this group's.
        "squash-gid" => squash_gid: Option<u32>,
    }
}

settings! {
    /// Owners, modes and types kept in extended attributes.
    pub struct OverrideStatSpec {
        /// Which attribute.
        "attribute" => attribute: OverrideAttribute,
    }
}

settings! {
    /// Limits of throughput: one bucket for the whole mount and each direction.
    pub struct ThrottleSpec {
        /// Bytes per second read, with decimals and a suffix (`10M`, `1.5G`).
        "read-rate" => read_rate: Option<String>,
        /// Bytes per second written.
        "write-rate" => write_rate: Option<String>,
    }
}

settings! {
    /// Logging of operations.
    pub struct TraceSpec {
        /// What is logged how loudly.
        "level" => level: TraceLevel,
    }
}

settings! {
    /// Limits of what may be stored. Sizes are numbers with a suffix of 1024 (`10G`, `1.5T`).
    pub struct CageSpec {
        /// Bytes of all files together.
        "size" => size: Option<String>,
        /// Files of any kind.
        "inodes" => inodes: Option<u64>,
        /// How writes are taken.
        "writes" => writes: Writes,
        /// What happens when something does not fit.
        "when-full" => when_full: WhenFull,
        /// With `when-full=drop-oldest`: globs of names or paths that are never removed or cut; may
        /// be given several times.
        "keep" => keep: Vec<String>,
        /// With `when-full=drop-oldest`: globs of rotated files, in place of the usual ones; may be
        /// given several times.
        "rotated" => rotated: Vec<String>,
        /// Use from which on `on-soft` is run: a share of the size (`80%`) or a size.
        "soft" => soft: Option<String>,
        /// A command for the shell, run when use reaches `soft` and when it has fallen below again.
        "on-soft" => on_soft: Option<String>,
        /// `user:NAME=SIZE` or `dir:PATH=SIZE`; may be given several times.
        "limit" => limit: Vec<String>,
        /// A directory in which the accounts are saved; without it, everything is counted at each
        /// start.
        "state" => state: Option<PathBuf>,
    }
}

settings! {
    /// Other owners, modes and rules. Lists are separated by `:` or `,`; users and groups are names
    /// or numbers.
    pub struct RemapSpec {
        /// Every object shows this owner.
        "force-user" => force_user: Option<String>,
        /// Every object shows this group.
        "force-group" => force_group: Option<String>,
        /// Callers that see themselves as the owner of everything: users and `@groups`.
        "mirror" => mirror: Option<String>,
        /// As `mirror`; all others but root see mode bits 000.
        "mirror-only" => mirror_only: Option<String>,
        /// Owners as they are and as they shall appear: `1000/2000:@100/@200:1000-1999/5000:*/0`.
        "map" => map: Option<String>,
        /// A passwd file whose numbers appear as the local ids of the same names.
        "map-passwd" => map_passwd: Option<PathBuf>,
        /// The same with a group file.
        "map-group" => map_group: Option<PathBuf>,
        /// A passwd file whose numbers the local ids of the same names appear as.
        "map-passwd-rev" => map_passwd_rev: Option<PathBuf>,
        /// The same with a group file.
        "map-group-rev" => map_group_rev: Option<PathBuf>,
        /// Added to each user id that is shown, subtracted on the way down.
        "uid-offset" => uid_offset: Option<i64>,
        /// The same for groups.
        "gid-offset" => gid_offset: Option<i64>,
        /// Rewrites the permission bits that are shown (`u=rwX:g=rD:o=`).
        "perms" => perms: Option<String>,
        /// Clears r, w or x where the mounter itself has no such access.
        "realistic-permissions" => realistic_permissions: bool,
        /// Whom new objects belong to.
        "create-as" => create_as: CreateAs,
        /// New objects belong to this user.
        "create-for-user" => create_for_user: Option<String>,
        /// New objects belong to this group.
        "create-for-group" => create_for_group: Option<String>,
        /// Rewrites the mode of new objects.
        "create-with-perms" => create_with_perms: Option<String>,
        /// Changes of owner.
        "chown" => chown: ChangePolicy,
        /// Changes of group.
        "chgrp" => chgrp: ChangePolicy,
        /// Changes of mode.
        "chmod" => chmod: ChangePolicy,
        /// Rewrites a requested mode, with `chmod=normal`.
        "chmod-filter" => chmod_filter: Option<String>,
        /// With `chmod=ignore` or `deny`: x bits of regular files can be changed all the same.
        "chmod-allow-x" => chmod_allow_x: bool,
        /// Extended attributes.
        "xattr" => xattr: XattrPolicy,
        /// `unlink` and `rmdir` give EPERM.
        "delete-deny" => delete_deny: bool,
        /// `rename` gives EPERM.
        "rename-deny" => rename_deny: bool,
        /// A rename must not replace an existing target: EPERM.
        "replace-deny" => replace_deny: bool,
        /// No file can be made shorter, neither by truncation nor at open: EPERM.
        "truncate-deny" => truncate_deny: bool,
        /// The link count shows 1.
        "hide-hard-links" => hide_hard_links: bool,
        /// Block devices appear as regular files of the device's size.
        "block-devices-as-files" => block_devices_as_files: bool,
        /// The change time shows the modification time.
        "ctime-from-mtime" => ctime_from_mtime: bool,
        /// Names that do not exist for users, as globs (`*.tmp`); may be given several times.
        "hide" => hide: Vec<String>,
        /// A setting for some file types only, `TYPES:KEY=VALUE` with the letters of find's `-type`
        /// (`d:perms=0755`); may be given several times.
        "for" => for_types: Vec<String>,
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

    /// A layer by its name, with the settings that hold when none is given.
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

    /// Whether nothing can lie below it.
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

    /// Gives a setting a value, by its name. Lists grow, everything else is replaced. `None` is a
    /// bare key, which only switches take.
    ///
    /// # Errors
    /// A key that the layer does not have (the text names those that it has), or a value that does
    /// not fit.
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
    /// Reads the one-line form.
    ///
    /// # Errors
    /// Text that is not understood, with the layer and the key, and what is allowed there.
    pub fn from_line(text: &[u8]) -> Result<StackSpec, SpecError> {
        let spec = line::parse(text)?;
        spec.check()?;
        Ok(spec)
    }

    /// Writes the one-line form: only what differs from the defaults, always ASCII where paths are.
    pub fn to_line(&self) -> String {
        line::print(self)
    }

    /// Reads the TOML form.
    ///
    /// # Errors
    /// As for [`StackSpec::from_line`].
    pub fn from_toml(text: &str) -> Result<StackSpec, SpecError> {
        let spec: StackSpec = field::from_toml(text)?;
        spec.check()?;
        Ok(spec)
    }

    /// Writes the TOML form.
    ///
    /// # Errors
    /// A path that is not UTF-8: TOML cannot hold it (the one-line form can).
    pub fn to_toml(&self) -> Result<String, SpecError> {
        toml::to_string(self)
            .map_err(|error| SpecError(format!("the stack cannot be written as TOML: {error}; use the one-line form")))
    }

    /// Whether the layers can stand on each other.
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
    /// The directories of the host that it consists of.
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

    /// The same, to be changed.
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
