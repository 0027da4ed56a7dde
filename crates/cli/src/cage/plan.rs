//! The cage that a command line asks for, as plain data. Pure: nothing here looks at the system.

use super::settings::CageSettings;
use crate::{
    option_value::Given,
    options::{Opt, Row, Taker},
    plan::{self, Plan},
    settings::Settings,
};
use nacre_daemon::{
    failure::Failure,
    plan::{Atime, Engine, MountPlan, StackSource},
};
use nacre_layers::size::Share;
use nacre_stack::spec::{HostSpec, LayerSpec, StackSpec, TraceLevel, TraceSpec, WhenFull};
use std::{ffi::OsString, path::PathBuf};

/// A cage to create.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CagePlan {
    /// The mount for the engine `fuse`: the directory, and the cage over it.
    pub mount: MountPlan,
    /// The directory to limit.
    pub directory: PathBuf,
    /// Mount point of the cage, if not the directory itself.
    pub mountpoint: Option<PathBuf>,
    /// The engine that enforces the limit.
    pub engine: Engine,
    /// Whether no engine was named: a directory whose image is known keeps the engine of that
    /// image.
    pub engine_by_default: bool,
    /// Limits and policies.
    pub settings: CageSettings,
    /// The first given option that only the engine `fuse` supports, as it is written.
    pub fuse_only: Option<String>,
}

/// Parses the options and paths of a cage into a plan.
///
/// # Errors
/// Too few or too many paths, no size, or options that cannot go together.
pub fn cage(program: &str, settings: Settings, given: &[Given], positionals: Vec<OsString>) -> Result<Plan, Failure> {
    let (directory, mountpoint) = paths(positionals)?;
    if let Some(other) = given.iter().find(|given| !given.option.row().is_for(Taker::Cage)) {
        return Err(Failure::usage(format!("option {} is not for cages", other.option.row().name)).next(
            "`nacre cage --help` lists the options; a stack such as 'host:DIR | remap:... | cage:size=10G' combines them (`nacre mount`)",
        ));
    }
    if settings.remount {
        return Ok(plan::remount(mountpoint.unwrap_or(directory), settings));
    }
    let engine = settings.engine;
    let engine_by_default = !given.iter().any(|given| given.option == Opt::Engine);
    check_engine(engine, given)?;
    // An existing image has its size.
    if settings.cage.size.is_none() && engine != Engine::Loop && !engine_by_default {
        return Err(no_size());
    }
    check_settings(&settings.cage)?;
    let fuse_only = given.iter().map(|given| given.option.row()).find(|row| !row.is_for(Taker::KernelCage));
    let cage = settings.cage.clone();
    let stack = StackSource::Spec(StackSpec { layers: layers(&settings, directory.clone()) });
    let at = mountpoint.clone().unwrap_or_else(|| directory.clone());
    let mut mount = plan::mount(program, stack, at, settings);
    // The kernel engines of cages differ from those of a mirror: this mount is made only for the
    // engine `fuse`.
    mount.engine = Engine::Fuse;
    mount.prefix = nacre_daemon::plan::CAGE_PREFIX;
    let fuse_only = fuse_only.map(Row::written);
    Ok(Plan::Cage(Box::new(CagePlan {
        mount,
        directory,
        mountpoint,
        engine,
        engine_by_default,
        settings: cage,
        fuse_only,
    })))
}

fn paths(positionals: Vec<OsString>) -> Result<(PathBuf, Option<PathBuf>), Failure> {
    let mut rest = positionals.into_iter();
    match (rest.next(), rest.next(), rest.next()) {
        (_, _, Some(extra)) => Err(Failure::usage(format!("too many arguments: \"{}\"", extra.to_string_lossy()))
            .next("DIR and perhaps MOUNTPOINT are needed")),
        (Some(directory), None, None) if !directory.is_empty() => Ok((directory.into(), None)),
        // fstab has two columns: the same directory in both is a cage over itself.
        (Some(directory), Some(mountpoint), None) if directory == mountpoint && !directory.is_empty() => {
            Ok((directory.into(), None))
        }
        (Some(directory), Some(mountpoint), None) if !directory.is_empty() && !mountpoint.is_empty() => {
            Ok((directory.into(), Some(mountpoint.into())))
        }
        _ => Err(Failure::usage("DIR is needed").next("nacre cage --help shows how")),
    }
}

fn check_engine(engine: Engine, given: &[Given]) -> Result<(), Failure> {
    if engine == Engine::Kernel {
        return Err(Failure::usage("engine: \"kernel\" is not one of fuse, loop, quota, auto")
            .next("a bind mount limits nothing"));
    }
    let of_loop = given.iter().find(|given| matches!(given.option, Opt::FsType | Opt::Image | Opt::Sparse));
    match of_loop {
        Some(option) if engine != Engine::Loop => {
            Err(Failure::usage(format!("option {} is for --engine=loop only", option.option.row().name)))
        }
        _ => Ok(()),
    }
}

/// Returns the error for a new cage without a size.
pub fn no_size() -> Failure {
    Failure::usage("--size is needed: how much may the directory hold?").next("for example --size 10G")
}

fn check_settings(cage: &CageSettings) -> Result<(), Failure> {
    let drops = cage.when_full == WhenFull::DropOldest;
    let idle = [
        (!cage.keep.is_empty() && !drops, "--keep", "--when-full=drop-oldest"),
        (!cage.rotated.is_empty() && !drops, "--rotated", "--when-full=drop-oldest"),
        (cage.on_soft.is_some() && cage.soft.is_none(), "--on-soft", "--soft"),
    ];
    if let Some((_, option, without)) = idle.into_iter().find(|(idle, ..)| *idle) {
        return Err(Failure::usage(format!("{option} does nothing without {without}")));
    }
    let soft = cage.soft.as_deref().and_then(|soft| soft.parse::<Share>().ok());
    if let (Some(size), Some(Share::Size(soft))) = (cage.size, soft)
        && soft > size
    {
        return Err(Failure::usage(format!(
            "soft: {soft} is more than the limit of {size}, it would never be reached"
        )));
    }
    Ok(())
}

/// Returns the layers: the host directory, the cage, and the trace layer where it is asked for.
fn layers(settings: &Settings, source: PathBuf) -> Vec<LayerSpec> {
    let mut layers = vec![LayerSpec::Host(HostSpec {
        source,
        noatime: settings.door.atime == Some(Atime::No),
        ..settings.host.clone()
    })];
    layers.push(settings.cage.layer());
    if settings.debug {
        layers.push(LayerSpec::Trace(TraceSpec { level: TraceLevel::All }));
    }
    layers
}
