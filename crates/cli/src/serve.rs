//! Serving a mount: from a plan to the end of the mount, in this process.
//!
//! [`choose`] decides which engine serves a plan; [`without_daemon`] makes those mounts that need no process of ours; [`run`] serves the
//! others. Order: signals are blocked before any thread is made, the stack is open before anything is mounted (so a source may
//! lie below its own mount point), the control socket is there before the mount is reported ready.

use crate::{
    cage::{
        self,
        report::CageReport,
        resize::{InodeChange, SizeChange},
    },
    control::{self, Answer, Request, Server},
    daemon, door,
    failure::{Exit, Failure},
    figures,
    kernel_engine::{self, KernelMount},
    mountinfo,
    plan::{MountPlan, StackSource},
    report::{Report, path_text},
    runtime,
    settings::{Door, Engine, Verbosity},
    umount,
    union::{
        self,
        run::{UnionAnswer, UnionRequest},
    },
};
use nacre_fuse::{Mount, MountError};
use nacre_layers::{
    context::Context,
    spec::{LayerSpec, RemapSpec, StackSpec},
    stack::{self, Stack},
};
use nacre_sys::signals::{Signal, Signals};
use nacre_vfs::Errno;
use parking_lot::Mutex;
use std::{
    fs, io,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    sync::{Arc, Weak},
    thread,
    time::{Duration, Instant},
};
use tracing_subscriber::filter::LevelFilter;

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
    let reduced = kernel_engine::reduce(plan, &*context.accounts);
    let reduced = match reduced.map(with_hidden) {
        Ok(_) if plan.foreground => Err("a kernel mount has no process to stay in the foreground".to_owned()),
        other => other,
    };
    match (reduced, plan.engine) {
        (Err(why), Engine::Kernel) => {
            Err(Failure::new(format!("--engine=kernel is not possible: {why}"))
                .next("--engine=auto takes FUSE where the kernel cannot do it"))
        }
        (Err(why), _) => Ok(Choice::Fuse(why)),
        (Ok(_), Engine::Auto) if !context.mounter.is_root() => Ok(Choice::Fuse("only root makes kernel mounts".to_owned())),
        (Ok(mount), Engine::Auto) if !mount.differences.is_empty() => {
            Ok(Choice::Fuse(format!("in a kernel mount, {}", mount.differences.join(", and "))))
        }
        (Ok(mount), Engine::Auto) => Ok(Choice::Kernel(Box::new(mount), "a bind mount does all that was asked for".to_owned())),
        (Ok(mount), _) => Ok(Choice::Kernel(Box::new(mount), "asked for".to_owned())),
    }
}

/// Adds what only the table of mounts tells. Where it cannot be read, or there is no such source, mounting will say so.
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
        Err(failure) if plan.engine == Engine::Auto => Ok(Served::ByDaemon(format!("the kernel does not: {}", failure.what))),
        Err(failure) => Err(failure),
    }
}

/// Serves a plan through FUSE until the mount ends. With `background`, this is the second process of [`daemon`].
///
/// # Errors
/// Why nothing was mounted.
pub fn run(plan: &MountPlan, reason: String, background: bool) -> Result<(), Failure> {
    if background {
        daemon::leave_session()?;
    }
    log(plan)?;
    let signals = Signals::block().map_err(|error| Failure::io("cannot take over", "the signals", &error))?;
    daemon::raise_descriptor_limit();
    // What a large listing or copy needed goes back when it is over.
    nacre_sys::memory::keep_large_blocks_apart();
    let context = surroundings()?;
    let mut spec = spec(plan)?;
    clear(&plan.mountpoint, plan)?;
    let mountpoint = target(&plan.mountpoint)?;
    let source = source_name(&spec, plan)?;
    check_sources(&spec, &mountpoint)?;
    cage::serving::check(&spec, &mountpoint, &context)?;
    cage::serving::keep_accounts(&mut spec, &mountpoint)?.iter().for_each(|warning| tracing::warn!("{warning}"));
    let stack = build(&spec, &context)?;
    stack.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
    let options = door::options(plan, &spec, &mountpoint, &source);
    let judged_below = !options.default_permissions;
    let mount = Mount::start(Arc::clone(&stack.layer), options).map_err(|error| unmountable(&error))?;
    let serving = Arc::new(Serving {
        about: figures::About { source, engine_reason: reason, immutable: plan.door.immutable, started: Instant::now() },
        spec: Mutex::new(spec),
        mount,
        judged_below,
        stack,
        context,
        drains: union::serving::Drains::default(),
    });
    narrow(&plan.door, &mountpoint)?;
    let server = match runtime::own().and_then(|directory| Server::start(&directory, answers(&serving))) {
        Ok(server) => Some(server),
        Err(failure) => {
            // Files matter more than figures.
            tracing::warn!("`nacre status` and `nacre reload` will not find this mount: {failure}");
            None
        }
    };
    if background {
        daemon::report_ready()?;
    }
    daemon::leave_directory()?;
    obey(signals, &serving)?;
    serving.mount.wait();
    // Nothing arrives any more: the books can be closed, and the next start need not count.
    serving.stack.cages().iter().for_each(|cage| cage.shut_down());
    tracing::info!(mountpoint = %path_text(&mountpoint), "unmounted");
    drop(server);
    Ok(())
}

/// What a running mount consists of.
struct Serving {
    about: figures::About,
    spec: Mutex<StackSpec>,
    mount: Mount,
    /// The kernel checks no permissions, so no rule may change what they are.
    judged_below: bool,
    stack: Stack,
    context: Context,
    /// Of the union, where there is one.
    drains: union::serving::Drains,
}

impl Serving {
    fn answer(&self, request: Request) -> Answer {
        let done = match request {
            Request::Status => {
                return Answer::Status(Box::new(self.report()));
            }
            Request::ResizeCage { cage, size, inodes } => match self.resize(cage, size, inodes) {
                Ok(report) => return Answer::Cage(Box::new(report)),
                Err(failure) => Err(failure),
            },
            Request::Union(request) => match self.union(request) {
                Ok(answer) => return Answer::Union(answer),
                Err(failure) => Err(failure),
            },
            Request::Reload { rules } => self.reload(rules.map(|rules| *rules)),
            Request::Unmount { lazy } => self.unmount(lazy),
        };
        match done {
            Ok(()) => Answer::Done,
            Err(failure) => Answer::failed(&failure),
        }
    }

    fn report(&self) -> Report {
        let (spec, status) = (self.spec.lock().clone(), self.mount.status());
        let cages = cage::serving::reports(&self.stack.cages(), &spec, &status, &self.about);
        let branches = self.stack.union().map(|union| union::serving::branches(&union, &status.mountpoint)).unwrap_or_default();
        Report { cages, branches, ..figures::report(&self.about, spec.to_line(), status) }
    }

    /// Gives a cage other limits; what it is like then.
    fn resize(&self, which: usize, size: Option<SizeChange>, inodes: Option<InodeChange>) -> Result<CageReport, Failure> {
        let gone = || Failure::new("this mount has no such cage");
        let mut spec = self.spec.lock();
        let mut changed = spec.clone();
        let limits = cage::serving::resized(&mut changed, which, size, inodes, &self.context)?;
        let cages = self.stack.cages();
        let resized = cages.get(which).ok_or_else(gone)?.resize(limits);
        resized.map_err(|error| Failure::new(format!("the limits stay as they were: {error}")))?;
        *spec = changed;
        let mut reports = cage::serving::reports(&cages, &spec, &self.mount.status(), &self.about);
        if which < reports.len() { Ok(reports.swap_remove(which)) } else { Err(gone()) }
    }

    /// Answers a command on the union, which may change what the stack consists of.
    fn union(&self, request: UnionRequest) -> Result<UnionAnswer, Failure> {
        let mountpoint = self.mount.status().mountpoint;
        let served = union::serving::Served { stack: &self.stack, context: &self.context, mountpoint: &mountpoint, drains: &self.drains };
        let answer = served.answer(request);
        if matches!(answer, Ok(UnionAnswer::Changed { .. })) {
            *self.spec.lock() = self.stack.spec();
        }
        answer
    }

    fn unmount(&self, lazy: bool) -> Result<(), Failure> {
        let mut ended = self.mount.unmount(lazy);
        // Whoever settles the collected writes of a cage is a user of the mount himself, for a moment.
        let mut patience = if self.stack.cages().is_empty() { 0 } else { 100 };
        while patience > 0 && ended.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::ResourceBusy) {
            thread::sleep(Duration::from_millis(10));
            patience -= 1;
            ended = self.mount.unmount(lazy);
        }
        ended.map_err(|error| umount::refused(&path_text(&self.mount.status().mountpoint), &error))
    }

    /// Puts other rules in place, or has users and groups read again where `rules` is none.
    fn reload(&self, rules: Option<RemapSpec>) -> Result<(), Failure> {
        let mut spec = self.spec.lock();
        let mut changed = spec.clone();
        if let Some(rules) = rules {
            if self.judged_below && rules != RemapSpec::default() {
                return Err(Failure::new("this mount was made without rules, for one user: the kernel would not enforce them")
                    .next("unmount it and mount it again with the rules"));
            }
            let remap = changed.layers.iter_mut().find_map(|layer| match layer {
                LayerSpec::Remap(remap) => Some(remap),
                _ => None,
            });
            **remap.ok_or_else(|| {
                Failure::new("this mount has no rules that could be changed").next("unmount it and mount it again with the rules")
            })? = rules;
        }
        let reloaded = self.stack.reload(&changed, &self.context);
        let warnings = reloaded.map_err(|error| Failure::new(format!("the rules stay as they were: {error}")))?;
        warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
        *spec = changed;
        self.mount.invalidate_everything();
        tracing::info!("rules are reloaded");
        Ok(())
    }

    /// The orderly end that a signal asks for.
    fn end(&self) {
        let ended = self.mount.unmount(false).or_else(|error| {
            tracing::info!(%error, "the mount is in use: it is detached and ends with its last user");
            self.mount.unmount(true)
        });
        if let Err(error) = ended {
            tracing::error!(%error, "the mount cannot be taken away");
        }
    }
}

/// The control socket must not keep the mount: it answers for as long as it is there.
fn answers(serving: &Arc<Serving>) -> Arc<dyn Fn(Request) -> Answer + Send + Sync> {
    let serving: Weak<Serving> = Arc::downgrade(serving);
    Arc::new(move |request| match serving.upgrade() {
        Some(serving) => serving.answer(request),
        None => Answer::failed(&Failure::new("the mount has ended").exit(Exit::NotFound)),
    })
}

/// Acts on signals in a thread of its own, which ends with the process.
fn obey(signals: Signals, serving: &Arc<Serving>) -> Result<(), Failure> {
    let serving = Arc::downgrade(serving);
    let act = move || {
        loop {
            let signal = match signals.next() {
                Ok(signal) => signal,
                Err(error) => return tracing::error!(%error, "signals are not obeyed any more"),
            };
            let Some(serving) = serving.upgrade() else { return };
            match signal {
                Signal::Interrupt | Signal::Terminate => serving.end(),
                Signal::Hangup | Signal::User1 => {
                    if let Err(failure) = serving.reload(None) {
                        tracing::error!(error = %failure, "users and groups are not reloaded");
                    }
                }
            }
        }
    };
    let thread = thread::Builder::new().name("nacre-signals".to_owned()).spawn(act);
    thread.map(drop).map_err(|error| Failure::io("cannot start", "the thread for signals", &error))
}

/// What `--explain` prints. Opens the stack, so that everything that would be an error is one, and mounts nothing.
///
/// # Errors
/// As the mount itself would.
pub fn explain(plan: &MountPlan) -> Result<String, Failure> {
    match choose(plan, &surroundings()?)? {
        Choice::Kernel(mount, reason) => {
            let spec = spec(plan)?;
            let mountpoint = target(&plan.mountpoint)?;
            check_sources(&spec, &mountpoint)?;
            let notes: String = mount.differences.iter().map(|difference| format!("note        {difference}\n")).collect();
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
    let spec = spec(plan)?;
    let mountpoint = target(&plan.mountpoint)?;
    check_sources(&spec, &mountpoint)?;
    cage::serving::check(&spec, &mountpoint, &context)?;
    let head = format!("mountpoint  {}\nengine      fuse ({reason})\n", path_text(&mountpoint));
    // To build a cage is to count what is in it.
    if spec.layers.iter().any(|layer| matches!(layer, LayerSpec::Cage(_))) {
        return Ok(format!("{head}stack       {}\n", spec.to_line()));
    }
    if spec.layers.iter().any(|layer| matches!(layer, LayerSpec::Union(_))) {
        return Ok(format!("{head}stack       {}\n{}", spec.to_line(), union::serving::plan(&spec)));
    }
    let stack = build(&spec, &context)?;
    let warnings: String = stack.warnings.iter().map(|warning| format!("note        {warning}\n")).collect();
    let layers = crate::status::tree(&stack.layer.describe().into(), 1);
    Ok(format!("{head}{warnings}stack       {}\nlayers, from the top\n{layers}", spec.to_line()))
}

/// Who we are, and how we wait.
///
/// # Errors
/// Groups that cannot be read.
pub fn surroundings() -> Result<Context, Failure> {
    let mut context = Context::system().map_err(|error| Failure::io("cannot read", "our own groups", &error))?;
    // Rate limits and directory services may wait long: another thread serves the queue meanwhile, and a killed caller ends the wait.
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
fn spec(plan: &MountPlan) -> Result<StackSpec, Failure> {
    let mut spec = match &plan.stack {
        StackSource::Spec(spec) => spec.clone(),
        StackSource::File(path) => {
            let text = fs::read_to_string(path).map_err(|error| {
                Failure::io("cannot read the stack", path_text(path), &error)
                    .next("STACK is a TOML file, or one line such as 'host:/srv/data | readonly'")
            })?;
            StackSpec::from_toml(&text)
                .map_err(|error| Failure::usage(format!("the stack in {} is not understood: {error}", path_text(path))))?
        }
    };
    spec.directories_mut().into_iter().try_for_each(absolute)?;
    union::place::expand(&mut spec);
    for layer in &mut spec.layers {
        if let LayerSpec::Remap(remap) = layer {
            absolute_files(remap)?;
        }
        // A lock on a file of a lower branch would stay there when the file is copied up.
        if matches!(layer, LayerSpec::Union(_)) && plan.door.lock_forwarding {
            return Err(Failure::usage("locks cannot be forwarded over a union: they would not follow a file that is copied up")
                .next("leave --enable-lock-forwarding out: locks taken in the mount are seen by all who use the mount"));
        }
    }
    Ok(spec)
}

/// Makes the files that rules are read from independent of the directory that we are called in: they are read again on a reload.
///
/// # Errors
/// Where that directory is gone.
pub fn absolute_files(remap: &mut RemapSpec) -> Result<(), Failure> {
    let RemapSpec { map_passwd, map_passwd_rev, map_group, map_group_rev, .. } = remap;
    [map_passwd, map_passwd_rev, map_group, map_group_rev].into_iter().flatten().try_for_each(absolute)
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

/// Whether mount(8) asks for what is there already: the same source at the same place. It looks for that itself before it calls us, but
/// takes a mount whose root has a name of its own (docs/decisions/root-of-its-own.md) for another one; `mount -a` would mount it again
/// each time.
///
/// # Errors
/// A table of mounts that cannot be read.
pub fn is_there(plan: &MountPlan) -> Result<bool, Failure> {
    if !plan.program.starts_with("mount.") {
        return Ok(false);
    }
    clear(&plan.mountpoint, plan)?;
    // What cannot be used is told when it is to be mounted.
    let (Ok(mountpoint), Ok(source)) = (target(&plan.mountpoint), spec(plan).and_then(|spec| source_name(&spec, plan))) else {
        return Ok(false);
    };
    let kind = format!("fuse.{}", door::subtype(plan));
    let topmost = mountinfo::read()?.into_iter().rfind(|entry| entry.mountpoint == mountpoint);
    Ok(topmost.is_some_and(|entry| entry.kind == kind && path_text(&entry.source) == source))
}

/// Takes away what a killed process of ours left at a mount point: nobody can use it any more, and it would only be in the way.
///
/// # Errors
/// What the system says to its removal.
pub fn clear(mountpoint: &Path, plan: &MountPlan) -> Result<(), Failure> {
    use rustix::io::Errno;
    // Attributes may be answered from what the kernel has kept; this is always asked. A mount whose process is just ending says ECONNABORTED.
    if !rustix::fs::statfs(mountpoint).is_err_and(|error| matches!(error, Errno::NOTCONN | Errno::CONNABORTED)) {
        return Ok(());
    }
    let place = control::lexical(mountpoint)?;
    let entry = mountinfo::read()?.into_iter().rfind(|entry| entry.mountpoint == place);
    let types = ["nacre".to_owned(), "bindfs".to_owned(), door::subtype(plan)];
    let ours = |kind: &str| kind.strip_prefix("fuse.").is_some_and(|subtype| types.iter().any(|known| known == subtype));
    if !entry.is_some_and(|entry| ours(&entry.kind)) {
        return Ok(());
    }
    let text = path_text(&place);
    tracing::warn!("the mount at {text} had lost its process and is taken away");
    fusewire::unmount_path(&place, true).map_err(|error| umount::refused(&text, &error))
}

fn unusable(mountpoint: &Path, error: &io::Error) -> Failure {
    let text = path_text(mountpoint);
    let failure = Failure::io("cannot use the mount point", &text, error);
    match error.raw_os_error() {
        Some(2) => failure.next("make it first: an empty directory will do"),
        Some(107) => failure.next(format!("a mount whose process is gone is in the way; `nacre umount {text}` removes it")),
        _ => failure,
    }
}

fn check_sources(spec: &StackSpec, mountpoint: &Path) -> Result<(), Failure> {
    spec.layers.iter().try_for_each(|layer| match layer {
        LayerSpec::Host(host) => check_source(&host.source, mountpoint),
        _ => Ok(()),
    })?;
    union::place::check(spec, mountpoint)
}

/// A directory is shown at a directory, anything else at a file.
fn check_source(source: &Path, mountpoint: &Path) -> Result<(), Failure> {
    let below = fs::metadata(source).map_err(|error| Failure::io("cannot use the source", path_text(source), &error))?;
    let above = fs::metadata(mountpoint).map_err(|error| unusable(mountpoint, &error))?;
    match (below.is_dir(), above.is_dir()) {
        (true, false) => Err(Failure::new(format!("the mount point {} is not a directory, the source is", path_text(mountpoint)))),
        (false, true) => Err(Failure::new(format!("the source {} is not a directory, the mount point is", path_text(source)))),
        _ => Ok(()),
    }
}

fn build(spec: &StackSpec, context: &Context) -> Result<Stack, Failure> {
    stack::build(spec, context).map_err(|error| Failure::new(error.to_string()))
}

/// The first column of the mount table: as asked for, else the source, resolved.
fn source_name(spec: &StackSpec, plan: &MountPlan) -> Result<String, Failure> {
    if let Some(name) = &plan.door.fsname {
        return Ok(name.clone());
    }
    Ok(match spec.layers.first() {
        Some(LayerSpec::Host(host)) => {
            // A source below /proc names another process' view of the tree: resolving it would lead out of there.
            let kept = host.source.as_os_str().as_bytes().starts_with(b"/proc/");
            let resolved = if kept { Ok(host.source.clone()) } else { fs::canonicalize(&host.source) };
            let resolved = resolved.map_err(|error| Failure::io("cannot use the source", path_text(&host.source), &error))?;
            format!("{}{}", plan.prefix, path_text(&resolved))
        }
        Some(LayerSpec::Union(union)) => union::place::name(&union.branch.0)?,
        Some(layer) => layer.name().to_owned(),
        None => "nacre".to_owned(),
    })
}

/// Flags that a mount can be given only afterwards.
fn narrow(door: &Door, mountpoint: &Path) -> Result<(), Failure> {
    if door.symfollow {
        return Ok(());
    }
    crate::remount::narrow(mountpoint, &["nosymfollow"])
}

fn unmountable(error: &MountError) -> Failure {
    let number = match error {
        MountError::Mount(error) | MountError::Session(error) | MountError::Thread(error) => error.raw_os_error(),
        MountError::Root(error) => Some(error.raw()),
    };
    let failure = Failure::new(error.to_string());
    if failure.what.contains("user_allow_other") {
        return failure
            .exit(Exit::Denied)
            .next("--no-allow-other mounts for yourself only; root can put user_allow_other into /etc/fuse.conf");
    }
    match number {
        Some(75) => failure.next("an offset moves the owner of the source itself out of the range of ids"),
        Some(1 | 13) => failure
            .exit(Exit::Denied)
            .next("an ordinary user needs fusermount3, the right to write to the mount point, and user_allow_other in /etc/fuse.conf or --no-allow-other"),
        Some(2) => failure.next("is the FUSE module loaded (modprobe fuse), and fusermount3 installed?"),
        _ => failure,
    }
}

/// Logs go to a file, or to standard error, which leads nowhere once a background mount answers.
fn log(plan: &MountPlan) -> Result<(), Failure> {
    let level = match plan.verbosity {
        Verbosity::Error => LevelFilter::ERROR,
        Verbosity::Warn => LevelFilter::WARN,
        Verbosity::Info => LevelFilter::INFO,
        Verbosity::Debug => LevelFilter::DEBUG,
        Verbosity::Trace => LevelFilter::TRACE,
    };
    let builder = tracing_subscriber::fmt().with_max_level(level).with_target(false);
    let started = match &plan.log_file {
        Some(path) => {
            let file = fs::OpenOptions::new().create(true).append(true).open(path);
            let file = file.map_err(|error| Failure::io("cannot open the log", path_text(path), &error))?;
            builder.with_ansi(false).with_writer(std::sync::Mutex::new(file)).try_init()
        }
        None => {
            let terminal = std::io::IsTerminal::is_terminal(&io::stderr());
            // Whoever reads standard error (a journal) knows the time.
            builder.with_ansi(terminal).without_time().with_writer(io::stderr).try_init()
        }
    };
    started.map_err(|error| Failure::new(format!("cannot start the log: {error}")))
}
