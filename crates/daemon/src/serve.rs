//! Serves a mount in this process: from a plan to the end of the mount.
//!
//! [`choose`] decides which engine serves a plan; [`without_daemon`] makes mounts that need no process of ours;
//! [`run`] serves the others, by [`crate::serving`]. Order: signals are blocked before any thread is started.

use crate::opening::{absolute, build, check_source, check_sources, source_name, spec, surroundings, target};
use crate::unmount::clear;
use crate::{
    background, door,
    failure::Failure,
    fuse_conf, guardian,
    kernel_engine::{self, KernelMount},
    left::Guarded,
    log::{self, target::LogTarget},
    mountinfo,
    plan::{Engine, MERGERFS, MountPlan, Resolved},
    report::path_text,
    service::SystemdService,
    serving::{self, Live, Surroundings},
};
use crate::{cage, union};
use nacre_fuse::Survival;
use nacre_layers::context::Context;
use nacre_stack::{
    spec::LayerSpec,
    {self},
};
use nacre_sys::signals::Signals;
use std::{fs, path::PathBuf, sync::Arc};

/// Engine of a mount, with the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Choice {
    /// The kernel alone.
    Kernel(Box<KernelMount>, String),
    /// This program serves the mount through FUSE, for this reason.
    Fuse(String),
}

/// Result of [`without_daemon`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Served {
    /// The kernel serves the mount.
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

/// Adds the differences that show only in the mount table. If it cannot be read, or there is no such source,
/// mounting reports that.
fn with_hidden(mut mount: KernelMount) -> KernelMount {
    if let (Ok(source), Ok(table)) = (fs::canonicalize(&mount.source), mountinfo::read()) {
        mount.differences.extend(kernel_engine::hidden(&source, &table));
    }
    mount
}

/// Makes the mount if the kernel can serve it alone.
///
/// # Errors
/// Paths that cannot be mounted, or the kernel's error with `--engine=kernel`.
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

/// Serves a plan through FUSE until the mount ends. With `background`, this is the second process of [`daemon`].
///
/// # Errors
/// Nothing was mounted.
pub fn run(plan: &MountPlan, reason: String, background: bool) -> Result<(), Failure> {
    if background {
        background::leave_session()?;
    }
    match plan.door.survive {
        true => guardian::run(plan, &reason, background),
        false => serve(plan, reason, background, None),
    }
}

/// Serves a plan in this process until the mount ends, or takes over from the previous process.
///
/// # Errors
/// Nothing was mounted, or the takeover failed.
pub(crate) fn serve(
    plan: &MountPlan,
    reason: String,
    background: bool,
    guarded: Option<Guarded>,
) -> Result<(), Failure> {
    log::start(plan, background)?;
    let signals = Signals::block().map_err(|error| Failure::io("cannot take over", "the signals", &error))?;
    background::settle();
    let memory = guarded.as_ref().map(|guarded| guarded.memory.clone());
    let guardian = guarded.as_ref().map(|guarded| guarded.guardian);
    let service = guarded.as_ref().map_or_else(SystemdService::of_this_process, |guarded| guarded.service.clone());
    let mut live = Live::start(plan, reason, Surroundings::alone(guarded)?)?;
    SystemdService::answers(service.as_deref(), background, memory.as_ref().is_some_and(Survival::resumes))?;
    live.stays();
    background::leave_directory()?;
    let serving = Arc::downgrade(&live.serving);
    serving::obey(signals, guardian, move |_| serving.upgrade().into_iter().collect())?;
    live.wait();
    Ok(())
}

/// Resolves all paths of a plan.
///
/// # Errors
/// As the mount itself would.
pub fn resolve(plan: &MountPlan) -> Result<Resolved, Failure> {
    let spec = spec(plan)?;
    clear(&plan.mountpoint, plan)?;
    let mountpoint = target(&plan.mountpoint)?;
    let log_target = match &plan.log_target {
        Some(LogTarget::File(path)) => {
            let mut path = PathBuf::from(path);
            absolute(&mut path)?;
            Some(LogTarget::File(path.into()))
        }
        other => other.clone().or_else(LogTarget::of_environment),
    };
    Ok(Resolved { spec, mountpoint, log_target })
}

/// Returns the output of `--explain`. Opens the stack, so that all errors of a mount are found, and mounts nothing.
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

/// Returns the output of `--explain` for a mount that FUSE serves, for this reason.
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
    // Building a cage would count its content.
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

/// Whether the mount that mount(8) requests exists already: the same source at the same mount point. mount(8)
/// checks that itself before it calls us, but a mount whose root has a name of its own
/// (docs/decisions/root-of-its-own.md) looks like another one to it; `mount -a` would mount it again each time.
///
/// # Errors
/// The mount table cannot be read.
/// A table of mounts that cannot be read.
pub fn is_there(plan: &MountPlan) -> Result<bool, Failure> {
    // mount.fuse(8) runs mergerfs under its own name for a line of fstab.
    if !plan.program.starts_with("mount.") && plan.program != MERGERFS {
        return Ok(false);
    }
    clear(&plan.mountpoint, plan)?;
    // Errors are reported when it is mounted.
    let (Ok(mountpoint), Ok(source)) = (target(&plan.mountpoint), spec(plan).and_then(|spec| source_name(&spec, plan)))
    else {
        return Ok(false);
    };
    let kind = format!("fuse.{}", door::subtype(plan));
    let topmost = mountinfo::read()?.into_iter().rfind(|entry| entry.mountpoint == mountpoint);
    Ok(topmost.is_some_and(|entry| entry.kind == kind && path_text(&entry.source) == source))
}

/// Checks the source of a mount.
///
/// # Errors
/// It is missing or cannot be used.
pub fn find_source(plan: &MountPlan) -> Result<(), Failure> {
    let spec = spec(plan)?;
    source_name(&spec, plan)?;
    union::absent::find_any(&spec)
}

/// Makes a mount accessible to its user alone where the system forbids `allow_other` and nobody requested it (also
/// by a line of fstab with the word `user`), with a warning. Called as another program (bindfs ...), the mount is
/// refused instead, as that program does.
pub fn own_where_others_are_forbidden(plan: &mut MountPlan) {
    let is_ours = matches!(&*plan.program, "nacre" | "mount.fuse.nacre" | "mount.nacre" | MERGERFS);
    if !is_ours || !plan.door.allow_other || plan.door.others_asked || fuse_conf::can_show_others() {
        return;
    }
    plan.door.allow_other = false;
    plan.warnings.push(format!("only you can use this mount: {} does not have user_allow_other", fuse_conf::PATH));
}

/// Returns warnings before a mount is made: what it will hide. It is made all the same.
pub fn notices(plan: &MountPlan) -> Vec<String> {
    // The programs that this one stands in for print none.
    if plan.program != "nacre" && !plan.program.starts_with("mount.") {
        return Vec::new();
    }
    // Errors are reported when it is mounted.
    let (Ok(mountpoint), Ok(spec), Ok(table)) = (target(&plan.mountpoint), spec(plan), mountinfo::read()) else {
        return Vec::new();
    };
    let text = path_text(&mountpoint);
    if let Some(entry) = table.into_iter().rfind(|entry| entry.mountpoint == mountpoint) {
        let Ok(source) = source_name(&spec, plan) else { return Vec::new() };
        let of_kernel = |report: &crate::report::Report| report.mountpoint == text && report.source == source;
        // A dead mount is removed, not hidden. statfs(2) is called in the command's process, which serves nothing:
        // at most it waits for another process, and can be killed.
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
