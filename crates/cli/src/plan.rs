//! The plan of a command line, as plain data: the result of all pure parsing, the input of all
//! effects.
//!
//! Made by [`crate::personality`] and [`crate::commands`]; carried out by [`crate::run`]. Nothing
//! here looks at the system: whether the source exists or a user is known is checked when the plan
//! is carried out, before anything is mounted.

use crate::{cage::plan::CagePlan, settings::Settings};
use nacre_daemon::{
    failure::Failure,
    plan::{Engine, MountPlan, Remount, StackSource},
};
use nacre_stack::spec::StackSpec;
use std::{ffi::OsString, os::unix::ffi::OsStrExt, path::PathBuf};

/// An action of the program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Plan {
    /// Mount something.
    Mount(Box<MountPlan>),
    /// Limit a directory.
    Cage(Box<CagePlan>),
    /// Change the flags of a mount (`mount -o remount`).
    Remount(Remount),
    /// Print help.
    Help,
    /// Print the version.
    Version,
    /// Print the version of the kernel interface.
    FuseVersion,
    /// Mount a file system of a pool at a mount point given by mount(8).
    Dataset(Box<nacre_admin::fs::ToMount>),
    /// Do nothing: a dry run of mount(8) whose arguments were understood.
    Nothing,
}

/// The result of parsing a command that both mounts and has verbs for existing mounts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Asked<V> {
    /// A mount.
    Mount(Plan),
    /// A verb on existing mounts.
    Verb(V),
}

/// Builds the plan of a mirror of a directory.
///
/// # Errors
/// Too few or too many paths, or options that cannot go together.
pub fn mirror(program: &str, settings: Settings, positionals: Vec<OsString>) -> Result<Plan, Failure> {
    let (source, mountpoint) = two(positionals, "SOURCE")?;
    if let Some(option) = settings.cage_option {
        return Err(Failure::usage(format!("option {option} is for cages: a mirror limits nothing"))
            .next("`nacre cage` makes them; in fstab, the first column is cage:DIR"));
    }
    if settings.remount {
        return Ok(remount(mountpoint, settings));
    }
    if matches!(settings.engine, Engine::Loop | Engine::Quota) {
        return Err(Failure::usage(format!("engine: \"{}\" is not one of fuse, kernel, auto", settings.engine.word()))
            .next("it is an engine of `nacre cage`"));
    }
    let stack = StackSource::Spec(StackSpec { layers: settings.layers(source) });
    Ok(Plan::Mount(Box::new(mount(program, stack, mountpoint, settings))))
}

/// Builds the plan of a remount with other flags at `mountpoint`.
pub fn remount(mountpoint: PathBuf, settings: Settings) -> Plan {
    Plan::Remount(Remount { mountpoint, flags: settings.flags })
}

/// Builds the plan of a stack of layers, from a file or from a line.
///
/// # Errors
/// Too few or too many paths, a stack that cannot be parsed, or options that belong into the stack.
pub fn stack(program: &str, settings: Settings, positionals: Vec<OsString>) -> Result<Plan, Failure> {
    let (stack, mountpoint) = two(positionals, "STACK")?;
    if let Some(option) = settings.layer_option {
        return Err(Failure::usage(format!("option {option} belongs to a layer, not to the mount"))
            .next("write it into the stack, as in 'host:/srv/data | remap:force-user=alice'"));
    }
    if settings.engine != Engine::Fuse {
        return Err(Failure::usage("a stack of layers is always served through FUSE: --engine is for `nacre mirror`"));
    }
    let source = match is_line(stack.as_os_str().as_bytes()) {
        true => {
            let spec = StackSpec::from_line(stack.as_os_str().as_bytes());
            StackSource::Spec(spec.map_err(|error| Failure::usage(format!("the stack is not understood: {error}")))?)
        }
        false => StackSource::File(stack),
    };
    Ok(Plan::Mount(Box::new(mount(program, source, mountpoint, settings))))
}

/// Returns whether this is a stack in one line and not the path of a file: `mem`, or a layer's name
/// followed by a colon or a bar.
fn is_line(text: &[u8]) -> bool {
    let name: &[u8] = text.split(|byte| matches!(byte, b':' | b'|' | b' ')).next().unwrap_or_default();
    nacre_stack::spec::LayerSpec::NAMES.iter().any(|known| known.as_bytes() == name)
}

/// Builds the plan of a mount of this stack with these settings.
pub fn mount(program: &str, stack: StackSource, mountpoint: PathBuf, settings: Settings) -> MountPlan {
    let verbosity = settings.verbosity();
    MountPlan {
        program: program.to_owned(),
        stack,
        mountpoint,
        prefix: "",
        door: settings.door,
        engine: settings.engine,
        foreground: settings.foreground,
        explain: settings.explain,
        verbosity,
        log_target: settings.log_target,
        daemon: settings.daemon,
        nonempty: settings.nonempty,
        warnings: settings.warnings,
    }
}

fn two(positionals: Vec<OsString>, first: &str) -> Result<(PathBuf, PathBuf), Failure> {
    let mut rest = positionals.into_iter();
    match (rest.next(), rest.next(), rest.next()) {
        (Some(one), Some(two), None) if !one.is_empty() && !two.is_empty() => Ok((one.into(), two.into())),
        (_, _, Some(extra)) => Err(Failure::usage(format!("too many arguments: \"{}\"", extra.to_string_lossy()))
            .next(format!("two are needed, {first} and MOUNTPOINT; long options take their value after '='"))),
        _ => Err(Failure::usage(format!("{first} and MOUNTPOINT are needed")).next("--help shows how")),
    }
}
