//! Prepares a mount from its plan: checks sources, makes paths absolute, builds layers.
//!
//! Nothing is mounted here.

use crate::{
    failure::Failure,
    plan::{MountPlan, StackSource},
    report::path_text,
    union,
};
use nacre_layers::{
    context::{Context, LockDirectory},
    settings::RemapSpec,
};
use nacre_stack::{
    Stack,
    spec::{LayerSpec, StackSpec},
};
use nacre_vfs::Errno;
use std::{
    ffi::OsStr,
    fs, io,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    sync::Arc,
};

/// Makes the context of layers: ids of this process, notification of events, blocking calls.
///
/// # Errors
/// The groups of this process cannot be read.
pub fn surroundings() -> Result<Context, Failure> {
    let mut context = Context::system().map_err(|error| Failure::io("cannot read", "our own groups", &error))?;
    context.tell = Arc::new(crate::hooks::tell);
    context.lock_directory = match crate::runtime::own() {
        Ok(directory) => LockDirectory::At(directory),
        Err(failure) => LockDirectory::Unusable(failure.to_string()),
    };
    // Rate limits and directory services may block for long: another thread serves the queue meanwhile, and killing
    // the caller ends the wait.
    context.waiting = Arc::new(|call| match fusewire::blocking(&mut *call) {
        Ok(()) => Ok(()),
        Err(error) if error.0 == Errno::EAGAIN.raw() => {
            // No further thread can be started: wait in this one.
            call();
            Ok(())
        }
        Err(error) => Err(Errno::from_raw(error.0)),
    });
    Ok(context)
}

/// Returns the stack of the plan, from options or a file, with absolute sources.
///
/// # Errors
/// A file cannot be read, the stack is not understood, or it cannot be mounted with these options.
pub fn spec(plan: &MountPlan) -> Result<StackSpec, Failure> {
    let mut spec = match &plan.stack {
        StackSource::Spec(spec) => spec.clone(),
        StackSource::File(path) => {
            let text = fs::read_to_string(path).map_err(|error| {
                Failure::io("cannot read the stack", path_text(path), &error)
                    .next("STACK is a TOML file, or one line such as 'host:/srv/data | readonly'")
            })?;
            StackSpec::from_toml(&text).map_err(|error| {
                Failure::usage(format!("the stack in {} is not understood: {error}", path_text(path)))
            })?
        }
    };
    nacre_stack::check_settings(&spec).map_err(|error| Failure::usage(error.to_string()))?;
    spec.directories_mut().into_iter().try_for_each(absolute)?;
    union::place::expand(&mut spec);
    if plan.program == crate::plan::FUSE_OVERLAYFS {
        union::place::hide(&mut spec, &plan.mountpoint);
    }
    for layer in &mut spec.layers {
        if let LayerSpec::Remap(remap) = layer {
            absolute_files(remap)?;
        }
        // A lock on a file of a lower branch would stay there when the file is copied up.
        if matches!(layer, LayerSpec::Union(_)) && plan.door.lock_forwarding {
            return Err(Failure::usage(
                "locks cannot be forwarded over a union: they would not follow a file that is copied up",
            )
            .next("leave --enable-lock-forwarding out: locks taken in the mount are seen by all who use the mount"));
        }
    }
    Ok(spec)
}

/// Makes the paths of files with rules absolute, since they are read again on a reload, perhaps from another
/// working directory.
///
/// # Errors
/// The working directory is gone, or a file cannot be read.
pub fn absolute_files(remap: &mut RemapSpec) -> Result<(), Failure> {
    let RemapSpec { map_passwd, map_passwd_rev, map_group, map_group_rev, .. } = remap;
    [map_passwd, map_passwd_rev, map_group, map_group_rev].into_iter().flatten().try_for_each(|file| {
        absolute(file)?;
        let opened = fs::File::open(&*file);
        opened.map(drop).map_err(|error| Failure::io("cannot read the rules in", path_text(file), &error))
    })
}

/// Makes a path absolute, independent of the working directory.
///
/// # Errors
/// The working directory is gone.
pub fn absolute(path: &mut PathBuf) -> Result<(), Failure> {
    *path = std::path::absolute(&*path).map_err(|error| Failure::io("cannot resolve", path_text(path), &error))?;
    Ok(())
}

/// Returns the mount point, resolved.
///
/// # Errors
/// It cannot be resolved; with advice what to do.
pub fn target(mountpoint: &Path) -> Result<PathBuf, Failure> {
    fs::canonicalize(mountpoint).map_err(|error| unusable(mountpoint, &error))
}

/// Checks that the sources can be mounted at this mount point.
///
/// # Errors
/// What prevents it.
pub fn check_sources(spec: &StackSpec, mountpoint: &Path) -> Result<(), Failure> {
    spec.layers.iter().try_for_each(|layer| match layer {
        LayerSpec::Host(host) => check_source(&host.source, mountpoint),
        _ => Ok(()),
    })?;
    if !fs::metadata(mountpoint).map_err(|error| unusable(mountpoint, &error))?.is_dir() {
        let failure = Failure::new(format!("the mount point {} is not a directory", path_text(mountpoint)));
        let of_host = matches!(spec.layers[..], [LayerSpec::Host(_), ..]);
        let next = if of_host { "--engine=kernel can show a single file" } else { "name an empty directory" };
        return Err(failure.next(next));
    }
    union::place::check(spec, mountpoint)
}

/// Checks that a directory is mounted at a directory, and another file at a file.
pub(crate) fn check_source(source: &Path, mountpoint: &Path) -> Result<(), Failure> {
    let below = fs::metadata(source).map_err(|error| unusable_source(source, &error))?;
    let above = fs::metadata(mountpoint).map_err(|error| unusable(mountpoint, &error))?;
    let (of, at) = (path_text(source), path_text(mountpoint));
    let (what, next) = match (below.is_dir(), above.is_dir()) {
        (true, false) => (format!("the mount point {at} is not a directory, the source is"), "name an empty one"),
        (false, true) => (
            format!("the source {of} is not a directory, the mount point is"),
            "name one, or with --engine=kernel a file as the mount point as well",
        ),
        _ => return Ok(()),
    };
    Err(Failure::new(what).next(next))
}

/// Returns an existing directory, resolved; `what` and `why` are for messages: what it is used for, and what is
/// required of it.
///
/// # Errors
/// The path does not exist, or is not a directory.
pub fn directory(named: &Path, what: &str, why: &str) -> Result<PathBuf, Failure> {
    let text = path_text(named);
    let found = fs::canonicalize(named).and_then(|real| Ok((fs::metadata(&real)?.is_dir(), real)));
    match found {
        Ok((true, real)) => Ok(real),
        Ok((false, _)) => Err(Failure::new(format!("{text} is not a directory")).next(why)),
        Err(error) => Err(Failure::io(&format!("cannot use the {what}"), &text, &error).next(match error.kind() {
            io::ErrorKind::PermissionDenied => "you need the right to reach all that it lies in".to_owned(),
            _ => format!("make it first: {why}"),
        })),
    }
}

/// Builds the layers.
///
/// # Errors
/// The failure names the layer that cannot be built.
pub fn build(spec: &StackSpec, context: &Context) -> Result<Stack, Failure> {
    nacre_stack::build(spec, context).map_err(|error| Failure::of_stack(&error, error.reason))
}

/// Returns the first column of the mount table: `fsname` of the plan, else the source, resolved.
///
/// # Errors
/// The source cannot be resolved.
pub fn source_name(spec: &StackSpec, plan: &MountPlan) -> Result<String, Failure> {
    if let Some(name) = &plan.door.fsname {
        return Ok(name.clone());
    }
    Ok(match spec.layers.first() {
        Some(LayerSpec::Host(host)) => {
            // A source below /proc names another process's view of the tree: resolving it would leave that view.
            let kept = host.source.as_os_str().as_bytes().starts_with(b"/proc/");
            let resolved = if kept { Ok(host.source.clone()) } else { fs::canonicalize(&host.source) };
            let resolved = resolved.map_err(|error| unusable_source(&host.source, &error))?;
            format!("{}{}", plan.prefix, path_text(&resolved))
        }
        Some(LayerSpec::Union(union)) => union::place::name(&union.branch.0),
        Some(layer) => layer.name().to_owned(),
        None => "nacre".to_owned(),
    })
}

pub(crate) fn unusable_source(source: &Path, error: &io::Error) -> Failure {
    Failure::io("cannot use the source", path_text(source), error).next(match error.kind() {
        io::ErrorKind::NotFound if are_branches(source) => {
            "these are several directories: a union of them is mounted by `nacre union`, in fstab with union: before the first"
        }
        io::ErrorKind::PermissionDenied => "you need the right to reach and read it; root can show it to others",
        _ => "name a directory that is there, and look whether all that it lies in is mounted",
    })
}

/// Whether a source that does not exist is a list of directories that do.
fn are_branches(source: &Path) -> bool {
    let path = |part: &[u8]| part.split(|byte| *byte == b'=').next().map(|path| OsStr::from_bytes(path).to_owned());
    let text = source.as_os_str().as_bytes();
    text.contains(&b':') && text.split(|byte| *byte == b':').filter_map(path).all(|path| Path::new(&path).is_dir())
}

pub(crate) fn unusable(mountpoint: &Path, error: &io::Error) -> Failure {
    let text = path_text(mountpoint);
    let failure = Failure::io("cannot use the mount point", &text, error);
    match error.raw_os_error() {
        Some(2) => failure.next("make it first: an empty directory will do"),
        Some(13) => failure.next("name one that you can reach; what is mounted there may shut out even root"),
        Some(107) => {
            failure.next(format!("a mount whose process is gone is in the way; `nacre umount {text}` removes it"))
        }
        _ => failure,
    }
}
