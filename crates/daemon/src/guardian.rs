//! Supervisor of a mount, or of a pool with its mounts, that survives the process that serves it.
//!
//! Called by [`crate::serve`] and [`crate::pool::process`] where survival is requested. This process becomes the
//! *supervisor* (`guardian`): it forks a worker, which serves and shares the descriptor table with it, and waits.
//! When a worker is killed, the supervisor makes another one, which takes over from the handoff state of the last
//! one ([`nacre_fuse::Survival`], [`crate::left`], [`crate::pool::left`]). When a worker ends by itself, its
//! supervisor ends with the same code. When the supervisor is killed, the worker continues without one, and its
//! mount or pool ends with it ([docs/decisions/outliving-the-process.md]).
//!
//! Invariants: the supervisor has one thread, and opens nothing while a worker runs, so that each worker starts
//! from a consistent state; the next worker is made when all threads of the last one are dead except those that
//! wait for its mounts, and so for the next worker.

use crate::{
    background, clock,
    failure::Failure,
    handover::{self, Handover, Survivor},
    left::{Guarded, Left},
    log, outliving,
    plan::{MountPlan, Transport},
    pool::{self, left::PoolLeft, start::Start},
    report::{path_text, printable},
    serve,
    service::SystemdService,
    shared::wire::MountRequest,
};
use nacre_fuse::Survival;
use nacre_sys::{
    descriptors, memory,
    worker::{self, Ended, Guard, Heard, Process},
};
use rustix::fs::{Mode, OFlags};
use std::{
    io,
    os::fd::IntoRawFd,
    path::{Path, PathBuf},
    process,
    sync::Arc,
    time::{Duration, Instant},
};

/// This number of deaths ...
const DEATHS: usize = 3;
/// ... within this time, and the worker is not restarted.
const WITHIN: Duration = Duration::from_secs(60);

/// Trial time of a program after an upgrade: if its workers die repeatedly within it, the program before it takes
/// over again.
const TRIAL: Duration = Duration::from_secs(600);

/// Threads of a killed worker that may wait for the next one: they write notifications to the kernel, or act on
/// paths, and use none of the worker's descriptors.
pub const NEED_NO_END: [&str; 2] = [worker::WAITS, fusewire::APART];

/// A mount or pool, and the handoff state that stays when its worker dies.
struct Guardian {
    served: Survivor,
    memory: Survival,
    background: bool,
    /// Descriptor of the previous program, and the time when this one took over from it.
    before: Option<(i32, Instant)>,
}

/// Serves a plan, one worker after the other, until the mount ends.
///
/// # Errors
/// Nothing was mounted, or the mount ended prematurely.
pub fn run(plan: &MountPlan, reason: &str, background: bool) -> Result<(), Failure> {
    let mut resolved = serve::resolve(plan)?;
    outliving::check(&resolved.spec, &resolved.mountpoint, plan)?;
    outliving::write_through(&mut resolved.spec)?;
    let mut plan = plan.clone();
    plan.door.transport = Transport::Device;
    let unwritten = || Failure::new("a mount of these layers cannot outlive its process: they cannot be noted");
    let mount = MountRequest::new(&plan, resolved, reason).ok_or_else(unwritten)?;
    Guardian::new(Survivor::Mount(Box::new(mount)), background)?.run()
}

/// Owns a pool, one worker after the other, until it is exported.
///
/// # Errors
/// The pool is not imported, or it was released prematurely.
pub fn run_pool(start: &Start) -> Result<(), Failure> {
    outliving::check_pool(start)?;
    Guardian::new(Survivor::Pool(Box::new(start.clone())), !start.foreground)?.run()
}

/// Takes over from the program that replaced itself by this one (exec).
///
/// # Errors
/// The takeover fails, or mount or pool end prematurely.
pub fn go_on(left: Handover) -> Result<(), Failure> {
    // Descriptors that were kept open for this program are not inherited by programs that it starts.
    descriptors::close_on_exec_from(3).map_err(|error| failed(&error))?;
    let memory = descriptors::take_over(left.memory).and_then(Survival::taken_over);
    let mut memory = memory.map_err(|error| failed(&error))?;
    memory.next_life();
    let before = left.before.map(|program| (program, clock::now()));
    Guardian { served: left.served, memory, background: left.background, before }.run()
}

fn failed(error: &io::Error) -> Failure {
    Failure::io("cannot make", "what outlives its process", error)
}

impl Guardian {
    fn new(served: Survivor, background: bool) -> Result<Guardian, Failure> {
        let memory = Survival::new().map_err(|error| failed(&error))?;
        Ok(Guardian { served, memory, background, before: None })
    }

    fn run(mut self) -> Result<(), Failure> {
        let background = self.background;
        let guard = Guard::new().map_err(|error| failed(&error))?;
        let handover = Handover::of(&self.memory, background, &self.served);
        let handover_text = handover.text()?;
        let service = SystemdService::of_this_process();
        if let Some(service) = &service {
            self.memory.set_stored();
            service.admit_workers();
            service.keep_handover(&handover_text);
        }
        let mut deaths: Vec<Instant> = Vec::new();
        loop {
            let served = self.served.clone();
            let (memory, guardian, kept) = (self.memory.clone(), process::id(), self.kept(&guard));
            let handover_text = Arc::clone(&handover_text);
            let guarded = Guarded { memory, guardian, handover: handover_text, service: service.clone() };
            // From here on the supervisor only waits.
            memory::leave_code();
            let worker = guard.start(move || served.work(guarded, &kept, background));
            let worker = worker.map_err(|error| failed(&error))?;
            if !self.memory.resumes() {
                background::leave_directory()?;
            }
            let (ended, program) = self.wait(&guard, worker).map_err(|error| failed(&error))?;
            let how = match ended {
                Some(Ended::Code(0)) => return Ok(()),
                // The worker has reported the reason.
                Some(Ended::Code(code)) => process::exit(code),
                Some(Ended::Signal(_)) if self.memory.has_ended() => return Ok(()),
                Some(Ended::Signal(signal)) => format!("was killed by signal {signal}"),
                None => "was killed".to_owned(),
            };
            if let Some(program) = program.filter(|_| self.memory.can_resume()) {
                self.become_program(&program, &handover.from(current_program()), &guard);
                // The new program cannot be started: this one continues, which the requester sees in the status.
                self.memory.next_life();
                continue;
            }
            let now = clock::now();
            deaths.retain(|death| now.saturating_duration_since(*death) < WITHIN);
            deaths.push(now);
            if let Some(program) = self.program_before().filter(|_| deaths.len() >= DEATHS && self.memory.can_resume())
            {
                self.become_program(&program, &handover, &guard);
            }
            let over = deaths.len() >= DEATHS || !self.memory.can_resume();
            if over && guard.has_threads_left() {
                // They would keep devices of mounts open, and nobody would be notified.
                let kept = [guard.descriptor(), self.memory.descriptor()].map(i32::cast_unsigned);
                descriptors::close_all_from_but(3, &kept).map_err(|error| failed(&error))?;
            }
            let mut what = format!("{} {how}", self.served.whose());
            if let Some(why) = self.memory.why_not() {
                what.push_str(&format!(", and no other one goes on: {why}"));
            } else if self.memory.can_resume() && over {
                what.push_str(&format!(", the {DEATHS}rd time within a minute: it stays down"));
            }
            if over {
                let failure = self.served.ended_badly(background, what);
                if service.is_some() {
                    // The service's next process starts without handoff state.
                    self.memory.give_up("it stays down");
                }
                return Err(failure);
            }
            self.memory.next_life();
        }
    }

    /// Waits for the end of a worker; returns how it ended, if all of its threads are gone, and the program that is
    /// to take over, if it was killed for an upgrade.
    fn wait(&self, guard: &Guard, worker: i32) -> io::Result<(Option<Ended>, Option<PathBuf>)> {
        let mut program = None;
        loop {
            let main = self.memory.main().filter(|_| !self.memory.has_ended());
            match guard.wait(worker, main)? {
                Heard::Ended(ended) => return Ok((Some(ended), program)),
                Heard::Dying if self.memory.has_ended() => {}
                Heard::Dying => {
                    let mut late = |threads: &[String]| self.served.report_threads_left(self.background, threads);
                    let ended = guard.outlasted(worker, &NEED_NO_END, &mut late)?;
                    return Ok((ended, program));
                }
                // A worker whose state cannot be taken over is not killed.
                Heard::Called if self.memory.can_resume() => {
                    if let Some(next) = self.memory.take_program() {
                        worker::kill(worker)?;
                        program = Some(next);
                    }
                }
                Heard::Called => {}
            }
        }
    }

    /// Returns the descriptors of the supervisor itself.
    fn kept(&self, guard: &Guard) -> Vec<i32> {
        [guard.descriptor()].into_iter().chain(self.before.map(|(program, _)| program)).collect()
    }

    /// Returns the previous program, if the upgrade to this one was recent: the deaths of this program's workers
    /// may be its fault.
    fn program_before(&self) -> Option<PathBuf> {
        let (program, since) = self.before?;
        let recently = clock::now().saturating_duration_since(since) < TRIAL;
        recently.then(|| PathBuf::from(format!("/proc/self/fd/{program}")))
    }

    /// Replaces this process by another program (exec), which takes over. Returns only if it cannot be started.
    fn become_program(&self, program: &Path, handover: &Handover, guard: &Guard) {
        // Unanswered requests are resent first: the kernel would abort those that were read by descriptors which
        // this exec closes. Errors here are also found by the next worker.
        let Ok(text) = handover.text() else { return };
        let own: Vec<i32> = self.kept(guard).into_iter().chain(handover.before).collect();
        let Ok(mut kept) = self.served.take_over(&self.memory, &own) else { return };
        kept.extend(handover.before);
        let (arguments, settings) = (std::env::args_os().collect(), handover::settings(&text));
        drop(worker::become_program(program, arguments, settings, &kept));
    }
}

impl Survivor {
    /// Names the process that the worker was, for messages.
    fn whose(&self) -> String {
        match self {
            Survivor::Mount(mount) => format!("the process that served {}", path_text(mount.mountpoint())),
            Survivor::Pool(start) => format!("the process that owned the pool '{}'", printable(start.name.as_bytes())),
        }
    }

    fn program(&self) -> &str {
        match self {
            Survivor::Mount(mount) => mount.program(),
            Survivor::Pool(start) => start.program(),
        }
    }

    /// Has the kernel resend the requests that the previous worker left unanswered, and closes all descriptors except
    /// the recorded ones and `own`, those of the supervisor. Returns the recorded ones.
    fn take_over(&self, memory: &Survival, own: &[i32]) -> Result<Vec<i32>, Failure> {
        let cannot = |error: io::Error| Failure::io("cannot go on after", self.whose(), &error);
        match self {
            Survivor::Mount(_) => memory.resend().map_err(cannot)?,
            Survivor::Pool(_) => PoolLeft::of(memory)?.send_again(),
        }
        let left = self.noted(memory)?;
        let kept = memory.kept(&left);
        let all: Vec<u32> = kept.iter().chain(own).copied().map(i32::cast_unsigned).collect();
        descriptors::close_all_from_but(3, &all).map_err(cannot)?;
        Ok(kept)
    }

    /// Returns the recorded descriptors, except those of the memory itself and those of open files.
    pub(crate) fn noted(&self, memory: &Survival) -> Result<Vec<i32>, Failure> {
        Ok(match self {
            Survivor::Mount(_) => Left::read(&memory.text().unwrap_or_default())?.descriptors(),
            Survivor::Pool(_) => PoolLeft::of(memory)?.descriptors(memory),
        })
    }

    /// Returns the recorded descriptors that a service manager stores.
    fn stored(&self, memory: &Survival) -> Result<Vec<i32>, Failure> {
        match self {
            Survivor::Mount(_) => self.noted(memory),
            Survivor::Pool(_) => Ok(PoolLeft::of(memory)?.stored(memory)),
        }
    }

    /// Returns the stored descriptors without which a takeover is impossible.
    pub(crate) fn needed(&self, memory: &Survival) -> Result<Vec<i32>, Failure> {
        match self {
            Survivor::Mount(_) => self.noted(memory),
            Survivor::Pool(_) => Ok(PoolLeft::of(memory)?.needed(memory)),
        }
    }

    /// Runs the worker; returns its exit code.
    fn work(&self, guarded: Guarded, own: &[i32], background: bool) -> u8 {
        let (memory, service) = (guarded.memory.clone(), guarded.service.clone());
        let _ends = Ends(memory.clone());
        let worked = self.begin(&guarded, own).and_then(|()| match self {
            Survivor::Mount(mount) => serve::serve(&mount.plan()?, mount.reason.clone(), background, Some(guarded)),
            Survivor::Pool(start) => pool::process::own(start, background, Some(guarded)),
        });
        service.iter().for_each(|service| service.take_back());
        let Err(failure) = worked else {
            if let Survivor::Pool(_) = self {
                close_for_others(&memory, own);
            }
            return 0;
        };
        tracing::error!("{} ends: {failure}", self.whose());
        let _ = failure.report(self.program());
        failure.code(self.program())
    }

    fn begin(&self, guarded: &Guarded, own: &[i32]) -> Result<(), Failure> {
        let Guarded { memory, service, .. } = guarded;
        if let Some(service) = service {
            let this = Process::this().map_err(|error| Failure::io("cannot look at", "this process", &error))?;
            memory.set_worker(this);
            if memory.resumes() {
                service.has(self.stored(memory)?.into_iter().chain(memory.own()));
            }
        }
        if memory.resumes() {
            self.take_over(memory, own)?;
        }
        tell_of_death(&guarded.memory, guarded.guardian);
        Ok(())
    }

    /// Logs that threads of a killed worker do not end, and that users of its mounts wait for that.
    fn report_threads_left(&self, background: bool, threads: &[String]) {
        let report = || {
            tracing::error!(
                threads = threads.join(" "),
                "{} was killed, but these threads do not end: each waits for a lock below that somebody keeps; the next process is made when they have ended",
                self.whose()
            );
        };
        let logged = match self {
            Survivor::Mount(mount) => mount.plan().and_then(|plan| log::within_mount(&plan, background, report)),
            Survivor::Pool(start) => pool::process::within_log(start, report),
        };
        if let Err(failure) = logged {
            // There is no other place for it.
            eprintln!("{}: {failure}", self.program());
        }
    }

    /// Logs a premature end. There is no other worker from here on, so the log may have threads.
    fn ended_badly(&self, background: bool, what: String) -> Failure {
        let logged = match self {
            Survivor::Mount(mount) => mount.plan().and_then(|plan| log::start(&plan, background)),
            Survivor::Pool(start) => pool::process::ended_badly(start, &what),
        };
        if logged.is_ok() {
            tracing::error!("{what}");
        }
        Failure::new(what)
    }
}

/// Records, when dropped, that a worker ends by itself; a panic counts as a crash.
struct Ends(Survival);

impl Drop for Ends {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.0.ends();
        }
    }
}

/// Closes the descriptors of a worker that ends: they would stay open, and the supervisor, which shares the
/// descriptor table, lives a moment longer.
fn close_for_others(memory: &Survival, own: &[i32]) {
    let kept = memory.main().into_iter().chain([memory.descriptor()]).chain(own.iter().copied());
    let kept: Vec<u32> = kept.map(i32::cast_unsigned).collect();
    // Descriptors that stay open are closed when the supervisor ends.
    let _ = descriptors::close_all_from_but(3, &kept);
}

/// Notifies the supervisor when this thread, the worker's main thread, is dead.
fn tell_of_death(memory: &Survival, guardian: u32) {
    match worker::death_of_this_thread() {
        Ok(death) => {
            memory.set_main(death);
            // Without a supervisor, nobody is to be notified.
            let _ = worker::call(guardian);
        }
        Err(error) => tracing::debug!(%error, "the guardian waits for the end of all threads"),
    }
}

/// Opens this program, since its file may be replaced. `None` where that fails: then no later program can go back
/// to it.
fn current_program() -> Option<i32> {
    let opened = rustix::fs::open("/proc/self/exe", OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
    opened.ok().map(IntoRawFd::into_raw_fd)
}
