//! Serving a mount: from a plan to the end of the mount, in this process.
//!
//! [`choose`] decides which engine serves a plan; [`without_daemon`] makes those mounts that need
//! no process of ours; [`run`] serves the others, by [`crate::serving`]. Order: signals are blocked
//! before any thread is made.

use crate::{
    background, control, door,
    failure::Failure,
    kernel_engine::{self, KernelMount},
    log, mountinfo,
    plan::{Engine, MountPlan, StackSource},
    report::path_text,
    serving::{self, Live, Surroundings},
};
use crate::{cage, union, unmount};
use nacre_layers::context::Context;
use nacre_stack::{
    spec::{LayerSpec, RemapSpec, StackSpec},
    {self, Stack},
};
use nacre_sys::signals::Signals;
use nacre_vfs::Errno;
use std::{
    fs, io,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    sync::Arc,
};

/// What serves a mount, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Choice {
    /// The kernel alone.
    Kernel(Box<KernelMount>, String),
    /// This program.
    Fuse(String),
}

/// How far [`without_daemon`] came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Served {
    /// The mount is made.
    Done,
    /// A process has to serve it, for this reason.
    ByDaemon(String),
}

/// Decides which engine serves a plan.
///
/// # Errors
/// `--engine=kernel` for something that only FUSE can do.
pub fn choose(plan: &MountPlan, context: &Context) -> Result<Choice, Failure> {
    if plan.engine == Engine::Fuse {
        return Ok(Choice::Fuse("--engine=fuse, the default".to_owned()));
    }
    spec(plan)?;
    let reduced = kernel_engine::reduce(plan, &*context.accounts);
    let reduced = match reduced.map(with_hidden) {
        Ok(_) if plan.foreground => Err("a kernel mount has no process to stay in the foreground".to_owned()),
        other => other,
    };
    match (reduced, plan.engine) {
        (Err(why), Engine::Kernel) => Err(Failure::new(format!("--engine=kernel is not possible: {why}"))
            .next("--engine=auto takes FUSE where the kernel cannot do it")),
        (Err(why), _) => Ok(Choice::Fuse(why)),
        (Ok(_), Engine::Auto) if !context.mounter.is_root() => {
            Ok(Choice::Fuse("only root makes kernel mounts".to_owned()))
        }
        (Ok(mount), Engine::Auto) if !mount.differences.is_empty() => {
            Ok(Choice::Fuse(format!("in a kernel mount, {}", mount.differences.join(", and "))))
        }
        (Ok(mount), Engine::Auto) => {
            Ok(Choice::Kernel(Box::new(mount), "a bind mount does all that was asked for".to_owned()))
        }
        (Ok(mount), _) => Ok(Choice::Kernel(Box::new(mount), "asked for".to_owned())),
    }
}

/// Adds what only the table of mounts tells. Where it cannot be read, or there is no such source,
/// mounting will say so.
fn with_hidden(mut mount: KernelMount) -> KernelMount {
    if let (Ok(source), Ok(table)) = (fs::canonicalize(&mount.source), mountinfo::read()) {
        mount.differences.extend(kernel_engine::hidden(&source, &table));
    }
    mount
}

/// Makes the mount if the kernel can serve it alone.
///
/// # Errors
/// Paths that do not fit, or what the kernel says to `--engine=kernel`.
pub fn without_daemon(plan: &MountPlan) -> Result<Served, Failure> {
    let (mount, reason) = match choose(plan, &surroundings()?)? {
        Choice::Fuse(reason) => return Ok(Served::ByDaemon(reason)),
        Choice::Kernel(mount, reason) => (mount, reason),
    };
    clear(&plan.mountpoint, plan)?;
    let mountpoint = target(&plan.mountpoint)?;
    check_source(&mount.source, &mountpoint)?;
    match kernel_engine::mount(&mount, &mountpoint) {
        Ok(()) => {
            kernel_engine::remember(&mountpoint, reason, spec(plan)?.to_line(), &mount)?;
            Ok(Served::Done)
        }
        Err(failure) if plan.engine == Engine::Auto => {
            Ok(Served::ByDaemon(format!("the kernel does not: {}", failure.what)))
        }
        Err(failure) => Err(failure),
    }
}

/// Serves a plan through FUSE until the mount ends. With `background`, this is the second process
/// of [`daemon`].
///
/// # Errors
/// Why nothing was mounted.
pub fn run(plan: &MountPlan, reason: String, background: bool) -> Result<(), Failure> {
    if background {
        background::leave_session()?;
    }
    log::start(plan)?;
    let signals = Signals::block().map_err(|error| Failure::io("cannot take over", "the signals", &error))?;
    background::settle();
    let mut live = Live::start(plan, reason, Surroundings::alone()?)?;
    if background {
        background::report_ready()?;
    }
    live.stays();
    background::leave_directory()?;
    let serving = Arc::downgrade(&live.serving);
    serving::obey(signals, move |_| serving.upgrade().into_iter().collect())?;
    live.wait();
    Ok(())
}

/// A plan that does not depend on the surroundings of this process any more: for one that another
/// process carries out.
#[derive(Debug)]
pub struct Resolved {
    /// The layers, with absolute sources.
    pub spec: StackSpec,
    /// Where, resolved.
    pub mountpoint: PathBuf,
    /// The log.
    pub log_file: Option<PathBuf>,
}

/// Resolves all that a plan names.
///
/// # Errors
/// As the mount itself would.
pub fn resolve(plan: &MountPlan) -> Result<Resolved, Failure> {
    let spec = spec(plan)?;
    clear(&plan.mountpoint, plan)?;
    let mountpoint = target(&plan.mountpoint)?;
    let mut log_file = plan.log_file.clone();
    log_file.iter_mut().try_for_each(absolute)?;
    Ok(Resolved { spec, mountpoint, log_file })
}

/// What `--explain` prints. Opens the stack, so that everything that would be an error is one, and
/// mounts nothing.
///
/// # Errors
/// As the mount itself would.
pub fn explain(plan: &MountPlan) -> Result<String, Failure> {
    match choose(plan, &surroundings()?)? {
        Choice::Kernel(mount, reason) => {
            let spec = spec(plan)?;
            let mountpoint = target(&plan.mountpoint)?;
            check_sources(&spec, &mountpoint)?;
            let notes: String =
                mount.differences.iter().map(|difference| format!("note        {difference}\n")).collect();
            let head = format!("mountpoint  {}\n", path_text(&mountpoint));
            Ok(format!("{head}engine      kernel ({reason})\n{notes}stack       {}\n", spec.to_line()))
        }
        Choice::Fuse(reason) => explain_as(plan, &reason),
    }
}

/// The same for a mount that FUSE serves, for this reason.
///
/// # Errors
/// As the mount itself would.
pub fn explain_as(plan: &MountPlan, reason: &str) -> Result<String, Failure> {
    let context = surroundings()?;
    let mut spec = spec(plan)?;
    let mountpoint = target(&plan.mountpoint)?;
    let absent = union::absent::hold_back(&mut spec, &mountpoint, false)?;
    check_sources(&spec, &mountpoint)?;
    cage::serving::check(&spec, &mountpoint, &context)?;
    let head = format!("mountpoint  {}\nengine      fuse ({reason})\n", path_text(&mountpoint));
    // To build a cage is to count what is in it.
    if spec.layers.iter().any(|layer| matches!(layer, LayerSpec::Cage(_))) {
        return Ok(format!("{head}stack       {}\n", spec.to_line()));
    }
    if spec.layers.iter().any(|layer| matches!(layer, LayerSpec::Union(_))) {
        return Ok(format!("{head}stack       {}\n{}", spec.to_line(), union::serving::plan(&spec, &absent)));
    }
    let stack = build(&spec, &context)?;
    let warnings: String = stack.warnings.iter().map(|warning| format!("note        {warning}\n")).collect();
    let layers = crate::report::tree(&stack.layer.describe().into(), 1);
    Ok(format!("{head}{warnings}stack       {}\nlayers, from the top\n{layers}", spec.to_line()))
}

/// Who we are, and how we wait.
///
/// # Errors
/// Groups that cannot be read.
pub fn surroundings() -> Result<Context, Failure> {
    let mut context = Context::system().map_err(|error| Failure::io("cannot read", "our own groups", &error))?;
    // Rate limits and directory services may wait long: another thread serves the queue meanwhile,
    // and a killed caller ends the wait.
    context.waiting = Arc::new(|call| match fusewire::blocking(&mut *call) {
        Ok(()) => Ok(()),
        Err(error) if error.0 == Errno::EAGAIN.raw() => {
            // No further thread can be had: wait in this one.
            call();
            Ok(())
        }
        Err(error) => Err(Errno::from_raw(error.0)),
    });
    Ok(context)
}

/// The stack with absolute sources, from wherever the plan has it.
///
/// # Errors
/// A file that cannot be read, a stack that is not understood, or one that cannot be mounted so.
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

/// Makes the files that rules are read from independent of the directory that we are called in:
/// they are read again on a reload.
///
/// # Errors
/// Where that directory is gone; a file that cannot be read.
pub fn absolute_files(remap: &mut RemapSpec) -> Result<(), Failure> {
    let RemapSpec { map_passwd, map_passwd_rev, map_group, map_group_rev, .. } = remap;
    [map_passwd, map_passwd_rev, map_group, map_group_rev].into_iter().flatten().try_for_each(|file| {
        absolute(file)?;
        let opened = fs::File::open(&*file);
        opened.map(drop).map_err(|error| Failure::io("cannot read the rules in", path_text(file), &error))
    })
}

/// Makes a path independent of the directory that we are called in.
///
/// # Errors
/// Where that directory is gone.
pub fn absolute(path: &mut PathBuf) -> Result<(), Failure> {
    *path = std::path::absolute(&*path).map_err(|error| Failure::io("cannot resolve", path_text(path), &error))?;
    Ok(())
}

/// The mount point, resolved.
///
/// # Errors
/// A path that leads nowhere, with what to do.
pub fn target(mountpoint: &Path) -> Result<PathBuf, Failure> {
    fs::canonicalize(mountpoint).map_err(|error| unusable(mountpoint, &error))
}

/// Whether mount(8) asks for what is there already: the same source at the same place. It looks for
/// that itself before it calls us, but takes a mount whose root has a name of its own
/// (docs/decisions/root-of-its-own.md) for another one; `mount -a` would mount it again each time.
///
/// # Errors
/// A table of mounts that cannot be read.
pub fn is_there(plan: &MountPlan) -> Result<bool, Failure> {
    if !plan.program.starts_with("mount.") {
        return Ok(false);
    }
    clear(&plan.mountpoint, plan)?;
    // What cannot be used is told when it is to be mounted.
    let (Ok(mountpoint), Ok(source)) = (target(&plan.mountpoint), spec(plan).and_then(|spec| source_name(&spec, plan)))
    else {
        return Ok(false);
    };
    let kind = format!("fuse.{}", door::subtype(plan));
    let topmost = mountinfo::read()?.into_iter().rfind(|entry| entry.mountpoint == mountpoint);
    Ok(topmost.is_some_and(|entry| entry.kind == kind && path_text(&entry.source) == source))
}

/// What is worth a line before a mount is made: what it will hide. It is made all the same.
pub fn notices(plan: &MountPlan) -> Vec<String> {
    // The programs in whose place these are say nothing.
    if plan.program != "nacre" && !plan.program.starts_with("mount.") {
        return Vec::new();
    }
    // What cannot be used is told when it is to be mounted.
    let (Ok(mountpoint), Ok(spec), Ok(table)) = (target(&plan.mountpoint), spec(plan), mountinfo::read()) else {
        return Vec::new();
    };
    let text = path_text(&mountpoint);
    if let Some(entry) = table.into_iter().rfind(|entry| entry.mountpoint == mountpoint) {
        let Ok(source) = source_name(&spec, plan) else { return Vec::new() };
        let of_kernel = |report: &crate::report::Report| report.mountpoint == text && report.source == source;
        // One whose process is gone is taken away, not hidden.
        let same = entry.is_served() && path_text(&entry.source) == source && rustix::fs::statfs(&mountpoint).is_ok();
        if same || kernel_engine::records().is_ok_and(|reports| reports.iter().any(of_kernel)) {
            return vec![format!("{source} is mounted at {text} already: this is one more mount on top of it")];
        }
        return Vec::new();
    }
    let shown = spec
        .directories()
        .iter()
        .any(|directory| fs::canonicalize(directory).is_ok_and(|directory| directory == mountpoint));
    let filled =
        !shown && !plan.nonempty && fs::read_dir(&mountpoint).is_ok_and(|mut entries| entries.next().is_some());
    if filled {
        vec![format!("{text} is not empty: what is in it is hidden until this is unmounted")]
    } else {
        Vec::new()
    }
}

/// Takes away what a killed process of ours left at a mount point: nobody can use it any more, and
/// it would only be in the way.
///
/// # Errors
/// What the system says to its removal.
pub fn clear(mountpoint: &Path, plan: &MountPlan) -> Result<(), Failure> {
    clear_of(mountpoint, &["nacre".to_owned(), "bindfs".to_owned(), door::subtype(plan)])
}

/// The same for mounts of these subtypes.
///
/// # Errors
/// As [`clear`].
pub fn clear_of(mountpoint: &Path, types: &[String]) -> Result<(), Failure> {
    use rustix::io::Errno;
    // Attributes may be answered from what the kernel has kept; this is always asked. A mount whose
    // process is just ending says ECONNABORTED, or ECANCELED as long as its rings are being taken
    // down. By a thread without descriptors: what answers may be a mount of this process.
    let ask = || fusewire::apart(|| Ok(rustix::fs::statfs(mountpoint).err())).unwrap_or_default();
    let mut lost = ask();
    for _ in 0..500 {
        if lost != Some(Errno::CANCELED) {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
        lost = ask();
    }
    if !matches!(lost, Some(Errno::NOTCONN | Errno::CONNABORTED | Errno::CANCELED)) {
        return Ok(());
    }
    let place =
        fusewire::apart(|| Ok(control::lexical(mountpoint))).map_err(|error| unusable(mountpoint, &error))??;
    let entry = mountinfo::read()?.into_iter().rfind(|entry| entry.mountpoint == place);
    let ours =
        |kind: &str| kind.strip_prefix("fuse.").is_some_and(|subtype| types.iter().any(|known| known == subtype));
    let Some(entry) = entry.filter(|entry| ours(&entry.kind)) else { return Ok(()) };
    let text = path_text(&place);
    tracing::warn!("the mount at {text} had lost its process and is taken away");
    fusewire::unmount(entry.identity(), true).map_err(|error| unmount::refused(&text, &error))
}

fn unusable(mountpoint: &Path, error: &io::Error) -> Failure {
    let text = path_text(mountpoint);
    let failure = Failure::io("cannot use the mount point", &text, error);
    match error.raw_os_error() {
        Some(2) => failure.next("make it first: an empty directory will do"),
        Some(107) => {
            failure.next(format!("a mount whose process is gone is in the way; `nacre umount {text}` removes it"))
        }
        _ => failure,
    }
}

/// Whether the sources can be shown at this place.
///
/// # Errors
/// Names what is in the way.
pub fn check_sources(spec: &StackSpec, mountpoint: &Path) -> Result<(), Failure> {
    spec.layers.iter().try_for_each(|layer| match layer {
        LayerSpec::Host(host) => check_source(&host.source, mountpoint),
        _ => Ok(()),
    })?;
    if !fs::metadata(mountpoint).map_err(|error| unusable(mountpoint, &error))?.is_dir() {
        let failure = Failure::new(format!("the mount point {} is not a directory", path_text(mountpoint)));
        let of_host = matches!(spec.layers[..], [LayerSpec::Host(_), ..]);
        return Err(if of_host { failure.next("--engine=kernel can show a single file") } else { failure });
    }
    union::place::check(spec, mountpoint)
}

/// A directory is shown at a directory, anything else at a file.
fn check_source(source: &Path, mountpoint: &Path) -> Result<(), Failure> {
    let below =
        fs::metadata(source).map_err(|error| Failure::io("cannot use the source", path_text(source), &error))?;
    let above = fs::metadata(mountpoint).map_err(|error| unusable(mountpoint, &error))?;
    match (below.is_dir(), above.is_dir()) {
        (true, false) => {
            Err(Failure::new(format!("the mount point {} is not a directory, the source is", path_text(mountpoint))))
        }
        (false, true) => {
            Err(Failure::new(format!("the source {} is not a directory, the mount point is", path_text(source))))
        }
        _ => Ok(()),
    }
}

/// Builds the layers.
///
/// # Errors
/// Names the layer that cannot be built.
pub fn build(spec: &StackSpec, context: &Context) -> Result<Stack, Failure> {
    nacre_stack::build(spec, context).map_err(|error| Failure::of_stack(&error, error.reason))
}

/// The first column of the mount table: as asked for, else the source, resolved.
///
/// # Errors
/// A source that leads nowhere.
pub fn source_name(spec: &StackSpec, plan: &MountPlan) -> Result<String, Failure> {
    if let Some(name) = &plan.door.fsname {
        return Ok(name.clone());
    }
    Ok(match spec.layers.first() {
        Some(LayerSpec::Host(host)) => {
            // A source below /proc names another process' view of the tree: resolving it would lead
            // out of there.
            let kept = host.source.as_os_str().as_bytes().starts_with(b"/proc/");
            let resolved = if kept { Ok(host.source.clone()) } else { fs::canonicalize(&host.source) };
            let resolved =
                resolved.map_err(|error| Failure::io("cannot use the source", path_text(&host.source), &error))?;
            format!("{}{}", plan.prefix, path_text(&resolved))
        }
        Some(LayerSpec::Union(union)) => union::place::name(&union.branch.0),
        Some(layer) => layer.name().to_owned(),
        None => "nacre".to_owned(),
    })
}
