//! From a specification to a running stack: the only place that stacks the layers which a user can
//! specify ([`build`]).
//!
//! | layer | place in the stack | what it is | its settings |
//! |---|---|---|---|
//! | `host` | lowest | a directory: `layers/src/host.rs` | `layers/src/settings.rs` |
//! | `mem` | lowest | a tree in memory: `layers/src/mem.rs` | the same file |
//! | `union` | lowest | branches as one tree: `union/src/union.rs` | `spec.rs` here, `union/src/options.rs` |
//! | `remap` | above | owners, modes, rules: `layers/src/remap.rs` | `layers/src/settings.rs` |
//! | `readonly`, `shift` | above | `layers/src/readonly.rs`, `shift.rs` | the same file |
//! | `override-stat` | above | `layers/src/override_stat.rs` | the same file |
//! | `throttle`, `trace` | above | `layers/src/throttle.rs`, `trace.rs` | the same file |
//! | `cage` | above | a hard limit: `cage/src/lib.rs` | `cage/src/settings.rs` |
//!
//! File systems of pools are no layers of a specification: `daemon/src/pool/mounts.rs` opens one
//! (`Dataset`), and `carrier.rs`, next to it, adds further ones to its shared mount
//! (`DatasetTree`).
//!
//! Called by the program and by tests. Settings that can change while a stack serves (rules of
//! `remap`, rates of `throttle`, limits of `cage`) are changed by [`Stack::reload`], which applies
//! all changes or none.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod claim;
pub mod spec;
#[cfg(test)]
mod tests;
mod union;
mod without;

use crate::{
    spec::{
        BranchSource, CageSpec, HostSpec, LayerSpec, OverrideAttribute, OverrideStatSpec, RemapSpec, ShiftSpec,
        SpecError, StackSpec, Symlinks, ThrottleSpec, XattrPolicy,
    },
    without::Without,
};
use nacre_cage::{Cage, Storage, ledger::Limits};
use nacre_layers::{
    context::Context,
    host::{Host, HostOptions, Tree, WatchGroup},
    mem::Mem,
    override_stat::{self, Attribute, OverrideStat},
    readonly::Readonly,
    remap::{Remap, Rules, RulesError},
    shift::{Ranges, Shift},
    throttle::{Rates, Throttle},
    trace::Trace,
};
use nacre_vfs::{Errno, Filtered, Layer, Node};
use parking_lot::Mutex;
use std::{error::Error, fmt, os::unix::ffi::OsStrExt, path::Path, sync::Arc};
pub use union::BranchError;

/// Error of building or changing a stack: the failed operation, its object, the reason, and a
/// remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BuildError {
    what: String,
    /// The underlying error number, if there is one.
    pub reason: Option<Errno>,
}

impl fmt::Display for BuildError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl Error for BuildError {}

impl From<SpecError> for BuildError {
    fn from(error: SpecError) -> BuildError {
        BuildError::from(error.to_string())
    }
}

impl From<String> for BuildError {
    fn from(what: String) -> BuildError {
        BuildError { what, reason: None }
    }
}

impl From<Box<dyn Error>> for BuildError {
    fn from(error: Box<dyn Error>) -> BuildError {
        let denied = error.downcast_ref::<RulesError>().is_some_and(|error| error.denied);
        BuildError { what: error.to_string(), reason: denied.then_some(Errno::EPERM) }
    }
}

/// A built stack.
pub struct Stack {
    /// The topmost layer, which front ends serve.
    pub layer: Arc<dyn Layer>,
    /// Harmless omissions, as sentences for the user.
    pub warnings: Vec<String>,
    /// The leaf's work directory, if the stack is a branch of a union.
    work: Option<Node>,
    /// Handles for changes at run time, one for each layer, from the bottom up.
    handles: Vec<Handle>,
    spec: Mutex<StackSpec>,
    /// Callback that records changes of branches.
    noting: Mutex<Option<union::Noting>>,
}

impl fmt::Debug for Stack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stack").field("spec", &self.spec.lock().to_line()).finish_non_exhaustive()
    }
}

/// Handle of a layer for changes at run time.
enum Handle {
    Fixed,
    Remap(Arc<Remap>),
    Throttle(Arc<Throttle>),
    Cage(Arc<Cage>),
    Union(union::Served),
}

/// Prefixes an error with the name of its layer.
fn within<T>(place: usize, layer: &LayerSpec, result: Result<T, impl Into<BuildError>>) -> Result<T, BuildError> {
    result.map_err(|why| {
        let BuildError { what, reason } = why.into();
        BuildError { what: format!("layer {} ({}): {what}", place + 1, layer.name()), reason }
    })
}

/// Builds a stack.
///
/// # Errors
/// An invalid order of layers, a source that cannot be opened, malformed settings.
pub fn build(spec: &StackSpec, context: &Context) -> Result<Stack, BuildError> {
    let tree = context.watch_group.as_ref().map(WatchGroup::tree);
    build_in(spec, context, tree.as_ref())
}

/// Builds a stack as part of a watch tree; all branches of a union form one tree.
fn build_in(spec: &StackSpec, context: &Context, tree: Option<&Tree>) -> Result<Stack, BuildError> {
    spec.check()?;
    // A cage needs invalidations for all changes that are not its own, to book them.
    let tree = tree.filter(|_| !spec.layers.iter().any(|layer| matches!(layer, LayerSpec::Cage(_))));
    let (mut warnings, mut handles) = (Vec::new(), Vec::new());
    let mut top: Option<Arc<dyn Layer>> = None;
    let mut work = None;
    for (place, layer) in spec.layers.iter().enumerate() {
        let (built, handle) = match (layer, top) {
            (LayerSpec::Host(host), None) => {
                let opened = within(place, layer, open_host(host, spec, context, tree))?;
                work = opened.1;
                (opened.0, Handle::Fixed)
            }
            (LayerSpec::Mem(_), None) => (Arc::new(Mem::new()) as Arc<dyn Layer>, Handle::Fixed),
            (LayerSpec::Union(union), None) => {
                let served = within(place, layer, union::open(union, context, &mut warnings))?;
                (served.union.layer(), Handle::Union(served))
            }
            (LayerSpec::Cage(cage), Some(below)) => within(place, layer, put_cage(cage, below, spec, context))?,
            (filter, Some(below)) => within(place, layer, put(filter, below, context, &mut warnings))?,
            (filter, None) => {
                return within(
                    place,
                    filter,
                    Err("it needs a layer below; begin the stack with host:/some/directory".to_owned()),
                );
            }
        };
        handles.push(handle);
        top = Some(built);
    }
    match top {
        Some(layer) => {
            Ok(Stack { layer, warnings, work, handles, spec: Mutex::new(spec.clone()), noting: Mutex::default() })
        }
        None => Err("the stack is empty; begin it with a leaf such as host:/some/directory".to_owned().into()),
    }
}

/// Checks the syntax of all settings. Nothing is opened or looked up: an error here is one on every
/// machine.
///
/// # Errors
/// The first malformed setting, with its layer.
pub fn check_settings(spec: &StackSpec) -> Result<(), BuildError> {
    spec.layers.iter().enumerate().try_for_each(|(place, layer)| {
        let checked: Result<(), Box<dyn Error>> = match layer {
            LayerSpec::Remap(remap) => Rules::check(remap).map_err(Into::into),
            LayerSpec::Throttle(throttle) => rates(throttle).map(drop).map_err(Into::into),
            LayerSpec::Shift(spec) => shift(spec).map(drop).map_err(Into::into),
            LayerSpec::Cage(cage) => cage.check().map_err(Into::into),
            LayerSpec::Union(union) => union.branch.0.iter().try_for_each(|branch| match &branch.source {
                BranchSource::Stack(stack) => check_settings(stack).map_err(Into::into),
                BranchSource::Directory(_) => Ok(()),
            }),
            _ => Ok(()),
        };
        within(place, layer, checked)
    })
}

/// Opens a directory, and its work directory if it has one.
fn open_host(
    host: &HostSpec,
    spec: &StackSpec,
    context: &Context,
    tree: Option<&Tree>,
) -> Result<(Arc<dyn Layer>, Option<Node>), BuildError> {
    let block_devices = spec.layers.iter().any(shows_devices);
    let reached = context.reached.get(&host.source).cloned();
    let (tree, waiting) = (tree.cloned(), Arc::clone(&context.waiting));
    let options = HostOptions { reached, block_devices, tree, waiting, ..HostOptions::from(host) };
    let opened = Host::open(options).map_err(|error| BuildError {
        what: format!(
            "cannot open the source {}: {error}; name a directory that exists and that you may read",
            host.source.display()
        ),
        reason: error.raw_os_error().map(Errno::from_raw),
    })?;
    let work = host.work.as_ref().map(|directory| {
        opened.beside(context.reached(directory)).map_err(|error| match error.raw_os_error() {
            Some(number) if number == Errno::EXDEV.raw() => {
                format!(
                    "the work directory {} has to be on the same mount as {}",
                    directory.display(),
                    host.source.display()
                )
            }
            _ => format!("cannot open the work directory {}: {error}; make it first", directory.display()),
        })
    });
    let work = work.transpose()?;
    let below: Vec<_> = host.without.iter().filter_map(|path| path.strip_prefix(&host.source).ok()).collect();
    if below.is_empty() {
        return Ok((Arc::new(opened), work));
    }
    let below: Vec<_> = below.into_iter().map(|path| path.as_os_str().as_bytes().to_vec()).collect();
    let without = Without::new(Arc::new(opened), &below)
        .map_err(|error| format!("cannot look into {}: {error}", host.source.display()))?;
    Ok((Arc::new(without), work))
}

/// Puts `override-stat` over a layer that carries its attributes, or shall carry them.
fn put_override_stat(spec: &OverrideStatSpec, below: Arc<dyn Layer>) -> Result<Arc<dyn Layer>, String> {
    let asked = match spec.attribute {
        OverrideAttribute::Carried => None,
        OverrideAttribute::Privileged => Some(Attribute::Privileged),
        OverrideAttribute::Containers => Some(Attribute::Containers),
    };
    let failed = |error: Errno| format!("owners and modes cannot be kept in extended attributes here: {error}");
    match asked {
        Some(attribute) => Ok(Arc::new(OverrideStat::new(below, attribute, true).map_err(failed)?)),
        None => match override_stat::carried(&*below).map_err(failed)? {
            Some(attribute) => Ok(Arc::new(OverrideStat::new(below, attribute, false).map_err(failed)?)),
            None => Ok(below),
        },
    }
}

fn shift(spec: &ShiftSpec) -> Result<Shift, String> {
    let ranges = |key: &str, text: &Option<String>| match text {
        Some(text) => text.parse().map_err(|error| format!("{key}: {error}")),
        None => Ok(Ranges::default()),
    };
    let (uids, gids) = (ranges("uid", &spec.uid)?, ranges("gid", &spec.gid)?);
    Ok(Shift { uids, gids, squash_uid: spec.squash_uid, squash_gid: spec.squash_gid, processes: None })
}

/// Whether a layer needs the content of block devices, which the leaf has to provide.
fn shows_devices(layer: &LayerSpec) -> bool {
    matches!(layer, LayerSpec::Remap(remap) if remap.block_devices_as_files)
}

fn put(
    filter: &LayerSpec,
    below: Arc<dyn Layer>,
    context: &Context,
    warnings: &mut Vec<String>,
) -> Result<(Arc<dyn Layer>, Handle), Box<dyn Error>> {
    Ok(match filter {
        LayerSpec::Remap(remap) => {
            let filter = Arc::new(Remap::new(Rules::new(remap, context, warnings)?));
            (Arc::new(Filtered::new(Arc::clone(&filter), below)), Handle::Remap(filter))
        }
        LayerSpec::Readonly(_) => {
            let filter = Arc::new(Readonly { keep_atime: context.mounter.is_root() });
            (Arc::new(Filtered::new(filter, below)), Handle::Fixed)
        }
        LayerSpec::Shift(spec) => {
            let filter = Shift { processes: Some(Arc::clone(&context.processes)), ..shift(spec)? };
            (Arc::new(Filtered::new(Arc::new(filter), below)), Handle::Fixed)
        }
        LayerSpec::OverrideStat(spec) => (put_override_stat(spec, below)?, Handle::Fixed),
        LayerSpec::Throttle(throttle) => {
            let filter =
                Arc::new(Throttle::new(rates(throttle)?, Arc::clone(&context.clock), Arc::clone(&context.waiting)));
            (Arc::new(Filtered::new(Arc::clone(&filter), below)), Handle::Throttle(filter))
        }
        LayerSpec::Trace(trace) => {
            (Arc::new(Trace::new(below, trace.level, Arc::clone(&context.clock))), Handle::Fixed)
        }
        LayerSpec::Host(_) | LayerSpec::Mem(_) | LayerSpec::Union(_) | LayerSpec::Cage(_) => {
            return Err("it can only be the lowest layer".into());
        }
    })
}

fn put_cage(
    cage: &CageSpec,
    below: Arc<dyn Layer>,
    stack: &StackSpec,
    context: &Context,
) -> Result<(Arc<dyn Layer>, Handle), Box<dyn Error>> {
    let (name, storage) = match stack.layers.first() {
        Some(LayerSpec::Host(host)) if host.symlinks == Symlinks::Resolve => {
            return Err("a cage cannot lie over symlinks=resolve: what is stored behind a link would be known by two identities".into());
        }
        Some(LayerSpec::Host(host)) => {
            (host.source.to_string_lossy().into_owned(), storage_of(context.reached(&host.source))?)
        }
        Some(LayerSpec::Union(union)) => {
            if union.options().is_ok_and(|options| options.link_cow || options.symlinkify.is_some()) {
                return Err(
                    "a cage cannot lie over link-cow or symlinkify: a file would be known by an identity for each name"
                        .into(),
                );
            }
            ("union".to_owned(), Storage::Plain)
        }
        _ => ("mem".to_owned(), Storage::Plain),
    };
    let cage = Cage::new(below, cage.options(context, name, storage)?, context)?;
    Ok((Arc::clone(&cage) as Arc<dyn Layer>, Handle::Cage(cage)))
}

/// The allocation behaviour of a directory's file system.
fn storage_of(directory: &Path) -> Result<Storage, String> {
    let figures =
        rustix::fs::statfs(directory).map_err(|error| format!("cannot examine {}: {error}", directory.display()))?;
    // Only the low 32 bits are the magic number, on every architecture.
    Ok(Storage::of_magic(figures.f_type as u64 & 0xffff_ffff))
}

fn rates(spec: &ThrottleSpec) -> Result<Rates, String> {
    let rate = |key: &str, text: &Option<String>| match text {
        Some(text) => text.parse().map(Some).map_err(|error| format!("{key}: {error}")),
        None => Ok(None),
    };
    Ok(Rates { read: rate("read-rate", &spec.read_rate)?, write: rate("write-rate", &spec.write_rate)? })
}

/// A prepared change, which cannot fail any more.
enum Change<'a> {
    Remap(&'a Remap, Box<Rules>),
    Throttle(&'a Throttle, Rates),
    Cage(&'a Cage, Limits),
}

impl Stack {
    /// All cages, in the order of [`StackSpec::cages`].
    pub fn cages(&self) -> Vec<Arc<Cage>> {
        let mut cages = Vec::new();
        for handle in &self.handles {
            match handle {
                Handle::Cage(cage) => cages.push(Arc::clone(cage)),
                Handle::Union(served) => cages.extend(served.cages.iter().map(Arc::clone)),
                _ => {}
            }
        }
        cages
    }

    /// Applies other settings while the stack serves, all of them or none: rules of `remap`, rates
    /// of `throttle`, limits of `cage`. Users, groups and the files of maps are read again, even if
    /// the settings are the same. The caller has to drop caches of the front ends. Returns
    /// warnings, like [`Stack::warnings`].
    ///
    /// # Errors
    /// Malformed settings, and changes that need a new mount: another order of layers, other
    /// settings of a leaf, `block-devices-as-files`, mirror lists or extended attributes switched
    /// off or on.
    pub fn reload(&self, spec: &StackSpec, context: &Context) -> Result<Vec<String>, BuildError> {
        spec.check()?;
        let mut present = self.spec.lock();
        let names = |spec: &StackSpec| spec.layers.iter().map(LayerSpec::name).collect::<Vec<_>>();
        if names(&present) != names(spec) {
            return Err("layers cannot be added, removed or moved while mounted; unmount and mount again"
                .to_owned()
                .into());
        }
        let (mut warnings, mut changes) = (Vec::new(), Vec::new());
        let layers = self.handles.iter().zip(present.layers.iter().zip(&spec.layers)).enumerate();
        for (place, (handle, (old, new))) in layers {
            changes.extend(within(place, new, prepare(handle, old, new, context, &mut warnings))?);
        }
        for change in changes {
            match change {
                Change::Remap(remap, rules) => remap.replace(*rules),
                Change::Throttle(throttle, rates) => throttle.replace(rates),
                Change::Cage(cage, limits) => {
                    cage.resize(limits).map_err(|error| BuildError::from(error.to_string()))?
                }
            }
        }
        *present = spec.clone();
        Ok(warnings)
    }
}

fn prepare<'a>(
    handle: &'a Handle,
    old: &LayerSpec,
    new: &LayerSpec,
    context: &Context,
    warnings: &mut Vec<String>,
) -> Result<Option<Change<'a>>, Box<dyn Error>> {
    match (handle, old, new) {
        (Handle::Remap(filter), LayerSpec::Remap(old), LayerSpec::Remap(new)) => {
            refuse_fixed(old, new)?;
            Ok(Some(Change::Remap(filter, Box::new(Rules::new(new, context, warnings)?))))
        }
        (Handle::Throttle(filter), _, LayerSpec::Throttle(new)) => Ok(Some(Change::Throttle(filter, rates(new)?))),
        (Handle::Cage(cage), LayerSpec::Cage(old), LayerSpec::Cage(new)) => {
            refuse_fixed_of_cage(old, new, context)?;
            Ok(Some(Change::Cage(cage, new.limits(context)?)))
        }
        _ if old == new => Ok(None),
        _ => Err("its settings cannot be changed while mounted; unmount and mount again".into()),
    }
}

/// Refuses changes other than of a cage's limits; the number of directories with a limit is fixed
/// as well.
fn refuse_fixed_of_cage(old: &CageSpec, new: &CageSpec, context: &Context) -> Result<(), Box<dyn Error>> {
    let changeable =
        |spec: &CageSpec| CageSpec { size: None, inodes: None, soft: None, limit: Vec::new(), ..spec.clone() };
    if changeable(old) != changeable(new) {
        return Err("only size, inodes, soft and limit can be changed while mounted; unmount and mount again".into());
    }
    if old.dirs()? != new.dirs()? {
        return Err(
            "directories with a limit cannot be added, removed or moved while mounted; unmount and mount again".into(),
        );
    }
    new.limits(context)?;
    Ok(())
}

/// Refuses changes of a remap's settings that the leaf or the kernel received at the mount.
fn refuse_fixed(old: &RemapSpec, new: &RemapSpec) -> Result<(), String> {
    let mirrors = |spec: &RemapSpec| spec.mirror.is_some() || spec.mirror_only.is_some();
    let switched = |policy| policy == XattrPolicy::None;
    let fixed = [
        ("block-devices-as-files", old.block_devices_as_files != new.block_devices_as_files),
        // Answers that differ between callers are negotiated with the kernel at the mount.
        ("a mirror list", mirrors(old) != mirrors(new)),
        ("xattr=none", switched(old.xattr) != switched(new.xattr)),
    ];
    match fixed.into_iter().find(|(_, differs)| *differs) {
        Some((key, _)) => Err(format!("{key} cannot be switched on or off while mounted; unmount and mount again")),
        None => Ok(()),
    }
}
