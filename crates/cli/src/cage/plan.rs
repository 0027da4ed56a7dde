//! What a command line asks of a cage, as plain data. Pure: nothing here looks at the system.

use super::settings::CageSettings;
use crate::{
    options::{self, Opt, TABLE},
    plan::{self, Plan},
    settings::Settings,
    words::Given,
};
use nacre_daemon::{
    failure::Failure,
    plan::{Atime, Engine, MountPlan, StackSource},
};
use nacre_layers::size::Share;
use nacre_stack::spec::{HostSpec, LayerSpec, StackSpec, TraceLevel, TraceSpec, WhenFull};
use std::{ffi::OsString, path::PathBuf};

/// A cage to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CagePlan {
    /// The mount, for the engine that this program is: the directory, and the cage over it.
    pub mount: MountPlan,
    /// The directory.
    pub directory: PathBuf,
    /// Where it is shown, if not over itself.
    pub mountpoint: Option<PathBuf>,
    /// What enforces the limit.
    pub engine: Engine,
    /// Nobody chose it: a directory whose image is known goes on with that.
    pub engine_by_default: bool,
    /// Limits and policies.
    pub settings: CageSettings,
    /// The first option given that only the engine fuse has, as it is written.
    pub fuse_only: Option<String>,
}

/// The options that `nacre cage` takes: its own, and those of the mount that make sense for it.
pub fn takes(option: Opt) -> bool {
    let heading = TABLE.iter().find(|row| row.id == option).map_or("", |row| row.heading);
    let of_the_mount = matches!(heading, "Mounting" | "Mount words")
        // Owners are shown as they are; how long attributes hold is the cage's own affair.
        && !matches!(option, Opt::ShownUid | Opt::ShownGid | Opt::Umask | Opt::AttrTimeout | Opt::LibfuseDirectIo | Opt::Daemon);
    let others = matches!(
        option,
        Opt::Engine
            | Opt::Coherence
            | Opt::Transport
            | Opt::NotifyWatchers
            | Opt::EnableLockForwarding
            | Opt::DisableLockForwarding
            | Opt::EnableIoctl
            | Opt::Acl
            | Opt::Multithreaded
            | Opt::NoDirectIo
    );
    options::is_of_cages(option) || of_the_mount || others
}

/// The options that the kernel's engines understand, too.
fn of_every_engine(option: Opt) -> bool {
    matches!(
        option,
        Opt::Size
            | Opt::Inodes
            | Opt::FsType
            | Opt::Image
            | Opt::Sparse
            | Opt::Engine
            | Opt::Explain
            | Opt::Log
            | Opt::LogFile
            | Opt::Rw
            | Opt::Words
            | Opt::AutoUnmount
            | Opt::Multithreaded
            | Opt::SingleThread
    )
}

/// A cage.
///
/// # Errors
/// Too few or too many paths, no size, or options that cannot go together.
pub fn cage(program: &str, settings: Settings, given: &[Given], positionals: Vec<OsString>) -> Result<Plan, Failure> {
    let (directory, mountpoint) = paths(positionals)?;
    if let Some(other) = given.iter().find(|given| !takes(given.option)) {
        return Err(Failure::usage(format!("option {} is not for cages", name(other.option))).next(
            "`nacre cage --help` lists the options; a stack such as 'host:DIR | remap:... | cage:size=10G' combines them (`nacre mount`)",
        ));
    }
    if settings.remount {
        return Ok(plan::remount(mountpoint.unwrap_or(directory), settings));
    }
    let engine = settings.engine;
    let engine_by_default = !given.iter().any(|given| given.option == Opt::Engine);
    check_engine(engine, given)?;
    // An image that there is already has its size.
    if settings.cage.size.is_none() && engine != Engine::Loop && !engine_by_default {
        return Err(no_size());
    }
    check_settings(&settings.cage)?;
    let fuse_only = given.iter().map(|given| given.option).find(|option| !of_every_engine(*option));
    let cage = settings.cage.clone();
    let stack = StackSource::Spec(StackSpec { layers: layers(&settings, directory.clone()) });
    let at = mountpoint.clone().unwrap_or_else(|| directory.clone());
    let mut mount = plan::mount(program, stack, at, settings);
    // The kernel's engines are not those of a mirror: this mount is made only where FUSE was
    // chosen.
    mount.engine = Engine::Fuse;
    mount.prefix = nacre_daemon::cage::PREFIX;
    let fuse_only = fuse_only.map(written);
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
            Err(Failure::usage(format!("option {} is for --engine=loop only", name(option.option))))
        }
        _ => Ok(()),
    }
}

/// A new cage has to have a size.
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

/// The directory, the cage, and what logs.
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

fn name(option: Opt) -> &'static str {
    TABLE.iter().find(|row| row.id == option).map_or("", |row| row.name)
}

/// As it is written on a command line.
fn written(option: Opt) -> String {
    match TABLE.iter().find(|row| row.id == option) {
        Some(row) if row.form == options::Form::Word => format!("-o {}", row.name),
        Some(row) => format!("--{}", row.name),
        None => String::new(),
    }
}
