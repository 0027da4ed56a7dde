//! Serving a mount: from a plan to the end of the mount, in this process.
//!
//! [`choose`] decides which engine serves a plan; [`without_daemon`] makes those mounts that need no process of ours; [`run`] serves the
//! others. Order: signals are blocked before any thread is made, the stack is open before anything is mounted (so a source may
//! lie below its own mount point), the control socket is there before the mount is reported ready.

use crate::{
    control::{self, Answer, Request, Server},
    daemon,
    failure::{Exit, Failure},
    figures,
    kernel_engine::{self, KernelMount},
    mountinfo,
    plan::{MountPlan, StackSource},
    report::path_text,
    runtime,
    settings::{Atime, Door, Engine, Transport, Verbosity},
    umount,
};
use nacre_fuse::{AclChoice, FuseOptions, Mount, MountError, PassthroughChoice, TransportChoice, XattrChoice};
use nacre_layers::{
    context::Context,
    spec::{LayerSpec, RemapSpec, StackSpec, Symlinks},
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
    time::Instant,
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
    let context = surroundings()?;
    let spec = spec(plan)?;
    clear(&plan.mountpoint, plan)?;
    let mountpoint = target(&plan.mountpoint)?;
    let source = source_name(&spec, plan)?;
    check_sources(&spec, &mountpoint)?;
    let stack = build(&spec, &context)?;
    stack.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
    let options = fuse_options(plan, &spec, &mountpoint, &source);
    let judged_below = !options.default_permissions;
    let mount = Mount::start(Arc::clone(&stack.layer), options).map_err(|error| unmountable(&error))?;
    let serving = Arc::new(Serving {
        about: figures::About { source, engine_reason: reason, immutable: plan.door.immutable, started: Instant::now() },
        spec: Mutex::new(spec),
        mount,
        judged_below,
        stack,
        context,
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
}

impl Serving {
    fn answer(&self, request: Request) -> Answer {
        let done = match request {
            Request::Status => {
                return Answer::Status(Box::new(figures::report(&self.about, self.spec.lock().to_line(), self.mount.status())));
            }
            Request::Reload { rules } => self.reload(rules.map(|rules| *rules)),
            Request::Unmount { lazy } => self.unmount(lazy),
        };
        match done {
            Ok(()) => Answer::Done,
            Err(failure) => Answer::failed(&failure),
        }
    }

    fn unmount(&self, lazy: bool) -> Result<(), Failure> {
        self.mount.unmount(lazy).map_err(|error| umount::refused(&path_text(&self.mount.status().mountpoint), &error))
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
    let context = surroundings()?;
    let spec = spec(plan)?;
    let mountpoint = target(&plan.mountpoint)?;
    check_sources(&spec, &mountpoint)?;
    let head = format!("mountpoint  {}\n", path_text(&mountpoint));
    match choose(plan, &context)? {
        Choice::Kernel(mount, reason) => {
            let notes: String = mount.differences.iter().map(|difference| format!("note        {difference}\n")).collect();
            Ok(format!("{head}engine      kernel ({reason})\n{notes}stack       {}\n", spec.to_line()))
        }
        Choice::Fuse(reason) => {
            let stack = build(&spec, &context)?;
            let warnings: String = stack.warnings.iter().map(|warning| format!("note        {warning}\n")).collect();
            let layers = crate::status::tree(&stack.layer.describe().into(), 1);
            Ok(format!("{head}engine      fuse ({reason})\n{warnings}stack       {}\nlayers, from the top\n{layers}", spec.to_line()))
        }
    }
}

fn surroundings() -> Result<Context, Failure> {
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
    for layer in &mut spec.layers {
        match layer {
            LayerSpec::Host(host) => absolute(&mut host.source)?,
            LayerSpec::Remap(remap) => absolute_files(remap)?,
            _ => {}
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

fn absolute(path: &mut PathBuf) -> Result<(), Failure> {
    *path = std::path::absolute(&*path).map_err(|error| Failure::io("cannot resolve", path_text(path), &error))?;
    Ok(())
}

/// The mount point, resolved.
fn target(mountpoint: &Path) -> Result<PathBuf, Failure> {
    fs::canonicalize(mountpoint).map_err(|error| unusable(mountpoint, &error))
}

/// Takes away what a killed process of ours left at a mount point: nobody can use it any more, and it would only be in the way.
fn clear(mountpoint: &Path, plan: &MountPlan) -> Result<(), Failure> {
    const NOT_CONNECTED: i32 = 107;
    if !fs::metadata(mountpoint).is_err_and(|error| error.raw_os_error() == Some(NOT_CONNECTED)) {
        return Ok(());
    }
    let place = control::lexical(mountpoint)?;
    let entry = mountinfo::read()?.into_iter().rfind(|entry| entry.mountpoint == place);
    let types = ["nacre".to_owned(), "bindfs".to_owned(), subtype(plan)];
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
    })
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
            path_text(&resolved.map_err(|error| Failure::io("cannot use the source", path_text(&host.source), &error))?)
        }
        Some(layer) => layer.name().to_owned(),
        None => "nacre".to_owned(),
    })
}

/// The type in the mount table, after `fuse.`: `mount.fuse.nacre` and `nacre` are the same there.
fn subtype(plan: &MountPlan) -> String {
    let program = plan.program.rsplit('.').next().unwrap_or("nacre");
    plan.door.subtype.clone().unwrap_or_else(|| program.to_owned())
}

/// File systems that are themselves stacked on others.
const STACKED: &[u64] = &[OVERLAY, FUSE];

/// File systems that may report a failed write as late as at close(2): NFS, SMB1, SMB2, CIFS, 9P, Ceph, AFS, and what FUSE may hide.
const REPORTING_AT_CLOSE: &[u64] = &[0x6969, 0x517b, 0xfe53_4d42, 0xff53_4d42, 0x0102_1997, 0x00c3_6400, 0x6b41_4653, FUSE];

// Magic numbers of statfs(2).
const OVERLAY: u64 = 0x794c_7630;
const FUSE: u64 = 0x6573_5546;

/// Whether a source lies on one of these kinds of file system.
fn lies_on(spec: &StackSpec, kinds: &[u64]) -> bool {
    let sources = spec.layers.iter().filter_map(|layer| match layer {
        LayerSpec::Host(host) => Some(&host.source),
        _ => None,
    });
    // A source that cannot be asked fails with its own message when it is opened.
    sources
        .filter_map(|source| rustix::fs::statfs(source).ok())
        .any(|figures| kinds.contains(&u64::from(figures.f_type.cast_unsigned() as u32)))
}

/// Whether the storage itself judges every access: of an ordinary user who mounts for himself alone, whose rights this process has, a
/// directory as it is. The kernel would check the same once more by what it sees, at the price of requests (for ACLs, at each step).
fn is_judged_below(door: &Door, spec: &StackSpec) -> bool {
    let as_it_is = |layer: &LayerSpec| match layer {
        LayerSpec::Host(host) => host.symlinks == Symlinks::Keep,
        LayerSpec::Throttle(_) | LayerSpec::Trace(_) => true,
        LayerSpec::Remap(remap) => **remap == RemapSpec::default(),
        LayerSpec::Mem(_) | LayerSpec::Readonly(_) => false,
    };
    !door.allow_other && !door.immutable && spec.layers.iter().all(as_it_is) && is_ordinary()
}

/// Whether this process may do what its user may, and nothing else.
fn is_ordinary() -> bool {
    use rustix::{process, thread};
    let own_ids = process::geteuid() == process::getuid() && process::getegid() == process::getgid();
    let powerless = thread::capabilities(None).is_ok_and(|sets| sets.effective.is_empty());
    own_ids && powerless && !process::geteuid().is_root()
}

fn fuse_options(plan: &MountPlan, spec: &StackSpec, mountpoint: &Path, source: &str) -> FuseOptions {
    let door = &plan.door;
    FuseOptions {
        fsname: source.to_owned(),
        subtype: subtype(plan),
        read_only: door.read_only,
        allow_other: door.allow_other,
        default_permissions: !is_judged_below(door, spec),
        nosuid: !door.suid,
        nodev: !door.dev,
        noexec: !door.exec,
        noatime: door.atime == Some(Atime::No),
        nosymfollow: !door.symfollow,
        sync: door.sync,
        dirsync: door.dirsync,
        extra: door.kernel_words.clone(),
        transport: match door.transport {
            Transport::Auto => TransportChoice::Auto,
            Transport::Uring => TransportChoice::Uring,
            Transport::Device => TransportChoice::Device,
        },
        passthrough: if door.passthrough { PassthroughChoice::Auto } else { PassthroughChoice::Off },
        stacked: lies_on(spec, STACKED),
        reports_at_close: lies_on(spec, REPORTING_AT_CLOSE),
        immutable: door.immutable,
        lock_forwarding: door.lock_forwarding,
        direct_io: door.direct_io,
        xattr: if door.xattr { XattrChoice::Full } else { XattrChoice::Off },
        acl: if door.acl { AclChoice::Auto } else { AclChoice::Off },
        entry_timeout: door.entry_timeout,
        attr_timeout: door.attr_timeout,
        negative_timeout: door.negative_timeout,
        notify_watchers: door.notify_watchers,
        worker_setup: Some(Arc::new(|| {
            // Threads without it are served correctly, only slower.
            if let Err(error) = nacre_layers::host::prepare_worker() {
                tracing::debug!(%error, "a thread keeps switching ids");
            }
        })),
        ..FuseOptions::new(mountpoint)
    }
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
