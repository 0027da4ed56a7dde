//! A mount that this process serves: how it is made, its answers to commands, and its end.
//!
//! Called by [`crate::serve`] for a process of one mount, by [`crate::shared`] for one of several. Order: the stack
//! is open before anything is mounted (so a source may lie below its own mount point), the control socket exists
//! before the mount is reported ready. When [`Live::wait`] returns, the process holds nothing of the mount any
//! more.

use crate::{
    cage::{
        self,
        change::{InodeChange, SizeChange},
        report::CageReport,
    },
    clock,
    control::{Answer, Request},
    control_sockets::{Answering, ControlSockets, LeftSocket, Maker},
    door,
    failure::{Exit, Failure},
    figures, handover, hooks,
    left::{Directories, Guarded, Left, Notes},
    log::Log,
    opening,
    plan::{Door, MountPlan},
    report::{Report, path_text},
    rpc::endpoint::Listener,
    shared::company::Seat,
    union::{
        self,
        requests::{BranchPosition, UnionAnswer, UnionRequest},
    },
    unmount,
};
use fusewire::FusermountRefusal;
use nacre_fuse::{FuseOptions, Mount, MountError, TransportChoice};
use nacre_layers::context::Context;
use nacre_stack::{
    Stack,
    spec::{BranchSpec, LayerSpec, RemapSpec, StackSpec},
};
use nacre_sys::signals::{Signal, Signals};
use nacre_vfs::LeftNumbers;
use parking_lot::Mutex;
use std::{
    io,
    os::unix::ffi::OsStringExt,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock, Weak},
    thread,
    time::Duration,
};

/// Deadline for the end of a mount that is unused in this mount namespace. A mount that lasts longer is held by
/// other mount namespaces.
const HELD: Duration = Duration::from_secs(1);
/// Additional time where nothing holds the mount and the machine is busy: the requester still waits then.
const ENDING: Duration = Duration::from_secs(3);
/// Longest delay of a signal that the supervisor forwards, and that this process received as well.
const PASSED_ON: Duration = Duration::from_secs(1);
/// Deadline for the kernel to drop its caches.
const TELLING: Duration = Duration::from_secs(10);

/// Resources that the process provides to a mount.
pub struct Surroundings {
    /// Thread that listens to commands.
    listener: Arc<Listener>,
    /// Name of the control socket.
    socket: String,
    /// For a mount among others: its log, and its seat among them.
    shared: Option<(Arc<Log>, Seat)>,
    /// Supervision, for a mount that survives this process.
    guarded: Option<Guarded>,
}

impl Surroundings {
    /// Makes the resources of the only mount of a process, which may have a supervisor. The socket is named by this
    /// process, not by the mount: others remove the socket of a dead process at any time.
    ///
    /// # Errors
    /// No thread can be started.
    /// No thread can be had.
    pub fn alone(guarded: Option<Guarded>) -> Result<Surroundings, Failure> {
        let socket = std::process::id().to_string();
        Ok(Surroundings { listener: Listener::start()?, socket, shared: None, guarded })
    }

    /// Makes the resources of a mount among others.
    pub fn shared(listener: Arc<Listener>, log: Arc<Log>, seat: Seat) -> Surroundings {
        let socket = format!("{}-{}", std::process::id(), seat.number());
        Surroundings { listener, socket, shared: Some((log, seat)), guarded: None }
    }
}

/// A mount that is served. Dropped, it ends.
pub struct Live {
    /// Parts of the mount: FUSE front end, layers, reports.
    pub serving: Arc<Serving>,
    server: Arc<ControlSockets>,
    mountpoint: PathBuf,
    /// Accounting directories that were made for it; removed with it until [`Live::stays`].
    begun: Vec<cage::state::Begun>,
}

impl Live {
    /// Makes the mount that a plan describes, or takes it over from the previous process.
    ///
    /// # Errors
    /// The reason why nothing was mounted.
    pub fn start(plan: &MountPlan, reason: String, surroundings: Surroundings) -> Result<Live, Failure> {
        let Surroundings { listener, socket, shared, guarded } = surroundings;
        let mut context = opening::surroundings()?;
        context.watch_group = shared.as_ref().map(|(_, seat)| seat.watching());
        let left = guarded.as_ref().map_or(Ok(None), |guarded| Left::of(&guarded.memory))?;
        let notes = guarded.as_ref().map(Notes::of).transpose()?.map(Arc::new);
        // Commands find the mount from here on; they get answers when it answers.
        let answering = Arc::new(OnceLock::new());
        let taken_over = left.as_ref().and_then(|left| {
            let place = path_text(&left.mountpoint());
            left.socket.as_ref()?.take_over(&listener, place, Arc::clone(&answering))
        });
        let Found { spec, mountpoint, source, absent, begun } = match &left {
            // Nothing may be requested from the mount itself: no process answers yet.
            Some(left) => Found::left(left)?,
            None => Found::look(plan, &context)?,
        };
        context.tell = hooks::naming_the_workspace(&source, context.tell);
        let directories = match (&guarded, &left) {
            (Some(_), Some(left)) => Directories::left(left)?,
            (Some(_), None) => Directories::open(&spec)?,
            (None, _) => Directories::default(),
        };
        context.reached = directories.reached();
        context.left_numbers = notes.clone().map(|notes| notes as Arc<dyn LeftNumbers>);
        let stack = opening::build(&spec, &context)?;
        let rules = left.as_ref().and_then(|left| left.tier_rules.as_deref()).zip(stack.union());
        if let Some((rules, union)) = rules {
            union::tiering::set(&union.control(), rules)?;
        }
        stack.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
        let mut options = door::options(plan, &spec, &context, &mountpoint, &source);
        options.survival = guarded.as_ref().map(|guarded| guarded.memory.clone());
        let judged_below = !options.default_permissions;
        if let Some((log, seat)) = &shared {
            among_others(&mut options, log, seat);
        }
        let mount = Mount::start(Arc::clone(&stack.layer), options).map_err(|error| unmountable(&error))?;
        let serving = Arc::new(Serving {
            about: figures::About {
                source,
                engine_reason: reason,
                started: left.as_ref().map_or_else(clock::now, Left::started),
                guarded,
            },
            spec: Mutex::new(spec),
            mount,
            judged_below,
            stack,
            context,
            drains: union::serving::Drains::default(),
            absent: Mutex::new(absent),
            directories: Mutex::new(directories),
            notes,
            changing: Mutex::default(),
            shared,
        });
        if serving.notes.is_some() {
            let noting = Arc::downgrade(&serving);
            serving.stack.note_changes(move |spec| {
                if let Some(serving) = noting.upgrade() {
                    serving.note_branches(spec);
                }
            });
        }
        if let Some(union) = serving.stack.union() {
            let asked = Arc::downgrade(&serving);
            union.edit_by(move |edit| {
                let serving = asked.upgrade().ok_or(nacre_vfs::Errno::ENOTCONN)?;
                serving.within(|| union::serving::edit(edit, |request| serving.union(request)))
            });
        }
        serving.await_branches()?;
        if let Some((_, seat)) = &serving.shared {
            seat.taken(&serving, &mountpoint);
        }
        if left.is_none() {
            narrow(&plan.door, &mountpoint)?;
            if let Some(notes) = &serving.notes {
                let _one_at_a_time = serving.changing.lock();
                let (spec, directories) = (serving.spec.lock(), serving.directories.lock());
                notes.begin(&mountpoint, &serving.about.source, (&spec, &directories));
                drop((spec, directories));
                serving.note_layers();
            }
        }
        // Before anybody is notified that the mount answers, also by its socket: from then on it survives this
        // process.
        serving.about.guarded.iter().for_each(|guarded| guarded.memory.serves());
        let answer: Answering = Arc::new(answers(&serving));
        // The cell was empty.
        let _ = answering.set(Arc::clone(&answer));
        let noting = Arc::downgrade(&serving);
        let maker = Maker {
            listener,
            name: socket,
            device: serving.mount.device_number().filter(|_| plan.door.allow_other),
            answering: answer,
            note: Box::new(move |socket| noting.upgrade().iter().for_each(|serving| serving.note_socket(&socket))),
        };
        let server = ControlSockets::open(maker, taken_over);
        tracing::info!(mountpoint = %path_text(&mountpoint), source = %serving.about.source, "mounted");
        Ok(Live { serving, server, mountpoint, begun })
    }

    /// Keeps the directories that were made for it: the requester has been notified.
    pub fn stays(&mut self) {
        self.begun.drain(..).for_each(cage::state::Begun::mounted);
    }

    /// Sends the log lines of the calling thread to the log of this mount, where it has its own.
    pub fn enter_log(&self) {
        if let Some((log, _)) = &self.serving.shared {
            log.enter();
        }
    }

    /// Serves until the mount has ended, and cleans up.
    pub fn wait(self) {
        let Live { serving, server, mountpoint, begun: _begun } = self;
        serving.mount.wait();
        // No requests arrive any more: the accounts can be closed, so that the next start need not count.
        serving.stack.cages().iter().for_each(|cage| cage.shut_down());
        server.close();
        // Sources are released before the connections of callers that wait for the end are closed.
        drop(serving);
        tracing::info!(mountpoint = %path_text(&mountpoint), "unmounted");
        drop(server);
    }
}

/// Parameters of a mount that is about to be made.
struct Found {
    spec: StackSpec,
    mountpoint: PathBuf,
    source: String,
    absent: Vec<union::absent::Absent>,
    begun: Vec<cage::state::Begun>,
}

impl Found {
    /// Finds the parameters of a mount from a plan.
    fn look(plan: &MountPlan, context: &Context) -> Result<Found, Failure> {
        let mut spec = opening::spec(plan)?;
        unmount::clear(&plan.mountpoint, plan)?;
        let mountpoint = opening::target(&plan.mountpoint)?;
        let source = opening::source_name(&spec, plan)?;
        let absent = union::absent::hold_back(&mut spec, &mountpoint, true)?;
        opening::check_sources(&spec, &mountpoint)?;
        cage::serving::take_over(&spec)?;
        cage::serving::check(&spec, &mountpoint, context)?;
        let (warnings, begun) = cage::serving::keep_accounts(&mut spec, &mountpoint)?;
        warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
        Ok(Found { spec, mountpoint, source, absent, begun })
    }

    /// Takes the parameters of a mount from the handoff state.
    fn left(left: &Left) -> Result<Found, Failure> {
        let (spec, mountpoint, source) = (left.spec()?, left.mountpoint(), left.source.clone());
        Ok(Found { spec, mountpoint, source, absent: left.absent.clone(), begun: Vec::new() })
    }
}

/// Adapts the options of a mount among others.
fn among_others(options: &mut FuseOptions, log: &Arc<Log>, seat: &Seat) {
    // Threads are started as needed: most of many mounts are idle most of the time.
    options.threads = 1;
    if options.transport == TransportChoice::Auto && seat.is_in_a_crowd() {
        options.transport = TransportChoice::Device;
    }
    let (setup, log) = (options.worker_setup.take(), Arc::clone(log));
    options.worker_setup = Some(Arc::new(move || {
        log.enter();
        if let Some(setup) = &setup {
            setup();
        }
    }));
}

/// Parts of a running mount.
pub struct Serving {
    about: figures::About,
    spec: Mutex<StackSpec>,
    mount: Mount,
    /// The kernel does not check permissions (no `default_permissions`), so no rule may change them.
    judged_below: bool,
    stack: Stack,
    context: Context,
    /// Drains of the union, if there is one.
    drains: union::serving::Drains,
    /// Branches that are missing at present.
    absent: union::absent::Waiting,
    /// Source directories that are held open for the next process.
    directories: Mutex<Directories>,
    /// Handoff state of the mount, if it survives this process.
    notes: Option<Arc<Notes>>,
    /// Held while layers change, until the change is recorded.
    changing: Mutex<()>,
    /// Log of the mount and its seat among the other mounts of the process, where it is one of several.
    shared: Option<(Arc<Log>, Seat)>,
}

impl Serving {
    /// Runs `call` for this mount: log lines go to its log.
    fn within<T>(&self, call: impl FnOnce() -> T) -> T {
        match &self.shared {
            Some((log, _)) => log.within(call),
            None => call(),
        }
    }

    fn answer(&self, request: Request) -> Result<Answer, Failure> {
        Ok(match request {
            Request::Status => Answer::Status(Box::new(self.report())),
            Request::ResizeCage { cage, size, inodes } => Answer::Cage(Box::new(self.resize(cage, size, inodes)?)),
            Request::Union(request) => Answer::Union(self.union(request)?),
            Request::Reload { rules } => {
                self.reload(rules.map(|rules| *rules))?;
                Answer::Done
            }
            Request::HandOver | Request::Upgrade { .. } => {
                let guarded = self.guarded()?;
                let left = guarded.memory.text().unwrap_or_default();
                if let Request::Upgrade { program } = request {
                    handover::note(guarded, left, &program)?;
                    return Ok(Answer::Done);
                }
                Answer::HandOver(Box::new(handover::hand_over(guarded, left)))
            }
            Request::Unmount { lazy } => {
                self.unmount(lazy)?;
                Answer::Done
            }
        })
    }

    fn guarded(&self) -> Result<&Guarded, Failure> {
        let alone = || Failure::new("this mount was made without --survive: it ends with its process");
        self.about.guarded.as_ref().ok_or_else(alone)
    }

    fn report(&self) -> Report {
        let (spec, status) = (self.spec.lock().clone(), self.mount.status());
        let cages = cage::serving::reports(&self.stack.cages(), &spec, &status, &self.about);
        let absent = self.absent.lock().clone();
        let branches = self
            .stack
            .union()
            .map(|union| union::serving::branches(&union, &status.mountpoint, &absent))
            .unwrap_or_default();
        Report { cages, branches, ..figures::report(&self.about, spec.to_line(), status) }
    }

    /// Changes the limits of a cage; returns its report afterwards.
    fn resize(
        &self,
        which: usize,
        size: Option<SizeChange>,
        inodes: Option<InodeChange>,
    ) -> Result<CageReport, Failure> {
        let gone = || Failure::new("this mount has no such cage");
        let _one_at_a_time = self.changing.lock();
        let mut spec = self.spec.lock();
        let mut changed = spec.clone();
        let limits = cage::serving::resized(&mut changed, which, size, inodes, &self.context)?;
        let cages = self.stack.cages();
        let resized = cages.get(which).ok_or_else(gone)?.resize(limits);
        resized.map_err(|error| Failure::new(format!("the limits stay as they were: {error}")))?;
        *spec = changed;
        drop(spec);
        self.note_layers();
        let spec = self.spec.lock();
        let mut reports = cage::serving::reports(&cages, &spec, &self.mount.status(), &self.about);
        if which < reports.len() { Ok(reports.swap_remove(which)) } else { Err(gone()) }
    }

    /// Answers a command on the union, which may change the branches of the stack.
    fn union(&self, request: UnionRequest) -> Result<UnionAnswer, Failure> {
        let mountpoint = self.mount.status().mountpoint;
        let served = union::serving::ServedUnion {
            stack: &self.stack,
            context: &self.context,
            mountpoint: &mountpoint,
            drains: &self.drains,
            absent: &self.absent,
            directories: self.about.guarded.as_ref().map(|_| &self.directories),
        };
        let seat = self.shared.as_ref().map(|(_, seat)| seat);
        let changes = seat.map_or(Ok(false), |seat| seat.reserve(&request))?;
        let _one_at_a_time = request.changes_layers().then(|| self.changing.lock());
        let changes_layers = request.changes_layers();
        let answer = served.answer(request);
        if let Some(seat) = seat.filter(|_| changes) {
            seat.settle(&self.stack.spec());
        }
        if matches!(answer, Ok(UnionAnswer::Changed { .. })) {
            if changes_layers {
                *self.spec.lock() = self.stack.spec();
                self.note_layers();
            }
            self.tell_kernel();
        }
        answer
    }

    /// Records branches that have just been changed, before anybody sees them.
    fn note_branches(&self, spec: &StackSpec) {
        let Some(notes) = &self.notes else { return };
        let present = branches(spec);
        self.absent.lock().retain(|absent| !present.iter().any(|branch| branch.source == absent.branch.source));
        let (directories, absent) = (self.directories.lock(), self.absent.lock().clone());
        notes.change(|left| {
            left.set_layers(spec, &directories);
            left.absent = absent;
        });
    }

    /// Records the present layers for the next process. The caller holds [`Serving::changing`].
    fn note_layers(&self) {
        let Some(notes) = &self.notes else { return };
        let spec = self.spec.lock();
        let mut directories = self.directories.lock();
        // Closed after the record no longer names them.
        let _gone = directories.take_all_but(&spec);
        let absent = self.absent.lock().clone();
        let tier_rules = self.stack.union().map(|union| union.control().tier_status().rules.to_string());
        notes.change(|left| {
            left.set_layers(&spec, &directories);
            (left.absent, left.tier_rules) = (absent, tier_rules);
        });
    }

    fn note_socket(&self, socket: &LeftSocket) {
        if let Some(notes) = &self.notes {
            notes.change(|left| left.socket = Some(socket.clone()));
        }
    }

    /// Starts waiting for missing branches, which are added when they appear.
    fn await_branches(self: &Arc<Serving>) -> Result<(), Failure> {
        if self.absent.lock().is_empty() {
            return Ok(());
        }
        let (adding, asking) = (Arc::downgrade(self), Arc::downgrade(self));
        let add = move |absent: &union::absent::Absent, place: &dyn Fn(&[BranchSpec]) -> usize| {
            let serving = adding.upgrade()?;
            serving.within(|| serving.take_in(absent, place));
            Some(())
        };
        union::absent::watch(add, move || asking.upgrade().map(|serving| serving.absent.lock().clone()))
    }

    /// Adds a branch that was missing, if that is possible now.
    fn take_in(&self, absent: &union::absent::Absent, place: &dyn Fn(&[BranchSpec]) -> usize) {
        let spec = self.stack.spec();
        let present = branches(&spec);
        let name = path_text(&absent.branch.name());
        let added = match present.iter().any(|branch| branch.source == absent.branch.source) {
            // It has been added by a command.
            true => Ok(()),
            false => {
                let place = BranchPosition::At(place(present) + 1);
                self.union(UnionRequest::Add { branch: absent.branch.text().into_vec(), place }).map(drop)
            }
        };
        match added {
            Ok(()) => {
                let _one_at_a_time = self.changing.lock();
                self.absent.lock().retain(|other| other != absent);
                self.note_layers();
                tracing::info!(branch = %name, "a branch that was missing is there");
            }
            Err(failure) => tracing::debug!(branch = %name, "a branch that was missing cannot be added: {failure}"),
        }
    }

    /// Waits until the kernel has dropped its caches from before a change: the effect of a command is visible when
    /// it returns.
    fn tell_kernel(&self) {
        if !self.mount.delivered(TELLING) {
            tracing::warn!("the kernel has not dropped all of its caches yet: old answers may be seen for a while");
        }
    }

    fn unmount(&self, lazy: bool) -> Result<(), Failure> {
        if !self.mount.attached() {
            return if lazy { Ok(()) } else { self.end_detached() };
        }
        let mut ended = Ok(());
        // The thread that settles the write-back of a cage uses the mount itself for a moment, and the kernel does
        // not notify when a mount is no longer busy. Each attempt takes time, too: the requester must get the
        // result before his deadline, since a refused unmount is not done later.
        let patience = if self.stack.cages().is_empty() { Duration::ZERO } else { HELD };
        clock::look_until(patience, Duration::from_millis(10), || {
            ended = self.mount.unmount(lazy);
            !ended.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::ResourceBusy)
        });
        let place = || path_text(&self.mount.status().mountpoint);
        ended.map_err(|error| unmount::refused(&place(), &error))?;
        if lazy || self.mount.ends_within(HELD) {
            return Ok(());
        }
        if !self.mount.is_mounted_anywhere() && self.mount.ends_within(ENDING) {
            return Ok(());
        }
        let what = format!(
            "{} is unmounted, but other mount namespaces have it, too: process {} goes on serving it",
            place(),
            std::process::id()
        );
        Err(Failure::new(what)
            .exit(Exit::Busy)
            .next(format!("`nacre umount {}` once more ends it there, as long as no file is open", place())))
    }

    /// Ends a mount that is visible in other mount namespaces only.
    fn end_detached(&self) -> Result<(), Failure> {
        let status = self.mount.status();
        if status.open_files > 0 {
            let (place, pid) = (path_text(&status.mountpoint), std::process::id());
            let what = format!(
                "{place} is unmounted, but {} files in it are still open: process {pid} serves them",
                status.open_files
            );
            let next = format!(
                "it ends with the last of its users; reload or restart them (or `kill {pid}`: then they get errors)"
            );
            return Err(Failure::new(what).exit(Exit::Busy).next(next));
        }
        self.mount.cut_off();
        Ok(())
    }

    /// Replaces the rules, or reads users and groups again where `rules` is `None`.
    fn reload(&self, rules: Option<RemapSpec>) -> Result<(), Failure> {
        let _one_at_a_time = self.changing.lock();
        let mut spec = self.spec.lock();
        let mut changed = spec.clone();
        if let Some(rules) = rules {
            if self.judged_below && rules != RemapSpec::default() {
                return Err(Failure::new(
                    "this mount was made without rules, for one user: the kernel would not enforce them",
                )
                .next("unmount it and mount it again with the rules"));
            }
            let remap = changed.layers.iter_mut().find_map(|layer| match layer {
                LayerSpec::Remap(remap) => Some(remap),
                _ => None,
            });
            **remap.ok_or_else(|| {
                Failure::new("this mount has no rules that could be changed")
                    .next("unmount it and mount it again with the rules")
            })? = rules;
        }
        let reloaded = self.stack.reload(&changed, &self.context);
        let warnings = reloaded.map_err(|error| Failure::new(format!("the rules stay as they were: {error}")))?;
        warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
        *spec = changed;
        drop(spec);
        self.note_layers();
        self.mount.invalidate_everything();
        self.tell_kernel();
        tracing::info!("rules are reloaded");
        Ok(())
    }

    /// Ends the mount in order, after a signal: true where it is unmounted, and was unused in this mount namespace.
    fn end(&self) -> bool {
        if !self.mount.attached() {
            tracing::info!("the mount is detached: whoever still uses it is cut off");
            self.mount.cut_off();
            return false;
        }
        let ended = match self.mount.unmount(false) {
            Ok(()) => return true,
            Err(error) => {
                tracing::info!(%error, "the mount is in use: it is detached and ends with its last user");
                self.mount.unmount(true)
            }
        };
        if let Err(error) = ended {
            tracing::error!(%error, "the mount cannot be taken away");
        }
        false
    }
}

/// Returns the branches of a stack's union.
fn branches(spec: &StackSpec) -> &[BranchSpec] {
    let union = spec.layers.iter().find_map(|layer| match layer {
        LayerSpec::Union(union) => Some(union),
        _ => None,
    });
    union.map_or(&[], |union| &union.branch.0)
}

/// Makes the function that answers requests. It must not keep the mount alive: it answers as long as the mount
/// exists.
fn answers(serving: &Arc<Serving>) -> impl Fn(Request) -> Result<Answer, Failure> + Send + Sync + use<> {
    let serving: Weak<Serving> = Arc::downgrade(serving);
    move |request| match serving.upgrade() {
        Some(serving) => serving.within(|| serving.answer(request)),
        None => Err(Failure::new("the mount has ended").exit(Exit::NotFound)),
    }
}

/// Starts the thread that handles signals for all mounts of this process, and ends with it. `guardian`: the
/// supervisor, which forwards signals.
///
/// # Errors
/// No thread can be started.
pub fn obey(
    signals: Signals,
    guardian: Option<u32>,
    mounts: impl Fn(Signal) -> Vec<Arc<Serving>> + Send + 'static,
) -> Result<(), Failure> {
    let act = move || {
        let mut last = None;
        loop {
            let (signal, sender) = match signals.next_and_sender() {
                Ok(signal) => signal,
                Err(error) => return tracing::error!(%error, "signals are not obeyed any more"),
            };
            // A signal to all processes of a unit reaches this one and its supervisor, which forwards it: it counts
            // once.
            let this = (signal, guardian == Some(sender));
            let passed_on = last.replace((this, clock::now())).is_some_and(|((before, by_guardian), at)| {
                guardian.is_some() && before == signal && by_guardian != this.1 && at.elapsed() < PASSED_ON
            });
            if passed_on {
                last = None;
                continue;
            }
            let mut gone = Vec::new();
            for serving in mounts(signal) {
                serving.within(|| match signal {
                    Signal::Interrupt | Signal::Terminate if serving.end() => gone.push(Arc::downgrade(&serving)),
                    Signal::Interrupt | Signal::Terminate => {}
                    Signal::Hangup | Signal::User1 => {
                        if let Err(failure) = serving.reload(None) {
                            tracing::error!(error = %failure, "users and groups are not reloaded");
                        }
                    }
                });
            }
            end_elsewhere(gone);
        }
    };
    let thread = thread::Builder::new().name("nacre-signals".to_owned()).spawn(act);
    thread.map(drop).map_err(|error| Failure::io("cannot start", "the thread for signals", &error))
}

/// Aborts, after a moment, mounts that are unmounted and were unused here, but are held by other mount namespaces.
fn end_elsewhere(gone: Vec<Weak<Serving>>) {
    let until = clock::now() + HELD;
    for serving in gone.iter().filter_map(Weak::upgrade) {
        if serving.mount.ends_within(until.saturating_duration_since(clock::now())) {
            continue;
        }
        serving.within(|| {
            tracing::info!("other mount namespaces have the mount, too: it is cut off there");
            serving.mount.cut_off();
        });
    }
}

/// Sets flags that can be set only after the mount is made.
fn narrow(door: &Door, mountpoint: &Path) -> Result<(), Failure> {
    if door.symfollow {
        return Ok(());
    }
    crate::mount_flags::narrow(mountpoint, &["nosymfollow"])
}

fn unmountable(error: &MountError) -> Failure {
    let kind = match error {
        MountError::Mount(error) | MountError::Session(error) | MountError::Thread(error) => error.kind(),
        MountError::Root(error) => io::Error::from_raw_os_error(error.raw()).kind(),
    };
    let failure = Failure::new(error.to_string());
    let refusal = if let MountError::Mount(error) = error { FusermountRefusal::of(error) } else { None };
    if refusal == Some(FusermountRefusal::OthersNotAllowed) {
        return failure
            .exit(Exit::Denied)
            .next("--no-allow-other mounts for yourself only; root can put user_allow_other into /etc/fuse.conf");
    }
    match kind {
        io::ErrorKind::PermissionDenied => failure
            .exit(Exit::Denied)
            .next("an ordinary user needs fusermount3, the right to write to the mount point, and user_allow_other in /etc/fuse.conf or --no-allow-other"),
        io::ErrorKind::NotFound => failure.next("is the FUSE module loaded (modprobe fuse), and fusermount3 installed?"),
        _ => failure,
    }
}
