//! A mount, or a pool with its mounts, that outlives the process that serves it.
//!
//! Called by [`crate::serve`] and [`crate::pool::process`] where that is asked for. This process becomes
//! the *guardian*: it makes a worker, which serves and shares its table of descriptors with it, and
//! waits. A worker that is killed is followed by another one, which goes on from what the last one noted
//! ([`nacre_fuse::Survival`], [`crate::left`], [`crate::pool::left`]). One that ends by itself ends its
//! guardian, with the same code. A guardian that is killed leaves what there is without one: the worker
//! serves on, and when it dies so does what it serves ([docs/decisions/outliving-the-process.md]).
//!
//! Invariants: the guardian has one thread, and opens nothing while a worker runs, so that each worker
//! begins sound; the next worker is made when the last one is dead in all of its threads but those that
//! wait for its mounts, and so for the next one.

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

/// So many deaths ...
const DEATHS: usize = 3;
/// ... within this time, and it stays down.
const WITHIN: Duration = Duration::from_secs(60);

/// So long after another program went on, the one before it goes on again where that one's workers die so.
const TRIAL: Duration = Duration::from_secs(600);

/// Threads of a worker that was killed which may wait for the next one: they tell the kernel something,
/// or act on paths without any of its descriptors.
pub const NEED_NO_END: [&str; 2] = [worker::WAITS, fusewire::APART];

/// What is served, and what stays of it when its worker dies.
struct Guardian {
    served: Survivor,
    memory: Survival,
    background: bool,
    /// The descriptor of the program that went on before this one, and since when this one does.
    before: Option<(i32, Instant)>,
}

/// Serves a plan by one worker after the other until the mount ends.
///
/// # Errors
/// Why nothing was mounted, or why the mount ended before its time.
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

/// Owns a pool by one worker after the other until it is let go.
///
/// # Errors
/// Why it is not imported, or why it was let go before its time.
pub fn run_pool(start: &Start) -> Result<(), Failure> {
    outliving::check_pool(start)?;
    Guardian::new(Survivor::Pool(Box::new(start.clone())), !start.foreground)?.run()
}

/// Goes on with what is served for the program that became this one.
///
/// # Errors
/// Why it cannot, or why it ended before its time.
pub fn go_on(left: Handover) -> Result<(), Failure> {
    // What was kept open for this program is nothing for those that it starts.
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
            // From here on it waits.
            memory::leave_code();
            let worker = guard.start(move || served.work(guarded, &kept, background));
            let worker = worker.map_err(|error| failed(&error))?;
            if !self.memory.resumes() {
                background::leave_directory()?;
            }
            let (ended, program) = self.wait(&guard, worker).map_err(|error| failed(&error))?;
            let how = match ended {
                Some(Ended::Code(0)) => return Ok(()),
                // It has said why.
                Some(Ended::Code(code)) => process::exit(code),
                Some(Ended::Signal(_)) if self.memory.has_ended() => return Ok(()),
                Some(Ended::Signal(signal)) => format!("was killed by signal {signal}"),
                None => "was killed".to_owned(),
            };
            if let Some(program) = program.filter(|_| self.memory.can_resume()) {
                self.become_program(&program, &handover.from(current_program()), &guard);
                // It cannot be started: whoever asked sees that this one goes on.
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
                // They would keep devices of mounts open, and nobody were told.
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
                    // The service's next process begins anew.
                    self.memory.give_up("it stays down");
                }
                return Err(failure);
            }
            self.memory.next_life();
        }
    }

    /// Waits for the end of a worker; how it ended is known if nothing of it is left. Also answers which
    /// program is to go on, where it was killed for that.
    fn wait(&self, guard: &Guard, worker: i32) -> io::Result<(Option<Ended>, Option<PathBuf>)> {
        let mut program = None;
        loop {
            let main = self.memory.main().filter(|_| !self.memory.has_ended());
            match guard.wait(worker, main)? {
                Heard::Ended(ended) => return Ok((Some(ended), program)),
                Heard::Dying if self.memory.has_ended() => {}
                Heard::Dying => {
                    let ended = guard.outlasted(worker, &NEED_NO_END)?;
                    return Ok((ended, program));
                }
                // One that cannot be gone on with stays.
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

    /// The descriptors that are this guardian's own.
    fn kept(&self, guard: &Guard) -> Vec<i32> {
        [guard.descriptor()].into_iter().chain(self.before.map(|(program, _)| program)).collect()
    }

    /// The program that went on before this one, if that was not long ago: this one's workers die, and they
    /// may have died of it.
    fn program_before(&self) -> Option<PathBuf> {
        let (program, since) = self.before?;
        let recently = clock::now().saturating_duration_since(since) < TRIAL;
        recently.then(|| PathBuf::from(format!("/proc/self/fd/{program}")))
    }

    /// Becomes another program, which goes on. Returns where it cannot be started.
    fn become_program(&self, program: &Path, handover: &Handover, guard: &Guard) {
        // The kernel would end what was read by descriptors that close with this program.
        // What is wrong the next worker finds as well.
        let Ok(text) = handover.text() else { return };
        let own: Vec<i32> = self.kept(guard).into_iter().chain(handover.before).collect();
        let Ok(mut kept) = self.served.take_over(&self.memory, &own) else { return };
        kept.extend(handover.before);
        let (arguments, settings) = (std::env::args_os().collect(), handover::settings(&text));
        drop(worker::become_program(program, arguments, settings, &kept));
    }
}

impl Survivor {
    /// Whose worker it is.
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

    /// Takes over what a worker before this one left, and closes what nobody needs, the guardian's own
    /// among it not. Answers what stays open beside that.
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

    /// The descriptors that are noted, beside the memory's own and those of open files.
    pub(crate) fn noted(&self, memory: &Survival) -> Result<Vec<i32>, Failure> {
        Ok(match self {
            Survivor::Mount(_) => Left::read(&memory.text().unwrap_or_default())?.descriptors(),
            Survivor::Pool(_) => PoolLeft::of(memory)?.descriptors(memory),
        })
    }

    /// Those of them that a service manager keeps.
    fn stored(&self, memory: &Survival) -> Result<Vec<i32>, Failure> {
        match self {
            Survivor::Mount(_) => self.noted(memory),
            Survivor::Pool(_) => Ok(PoolLeft::of(memory)?.stored(memory)),
        }
    }

    /// Those of these without which nobody can go on.
    pub(crate) fn needed(&self, memory: &Survival) -> Result<Vec<i32>, Failure> {
        match self {
            Survivor::Mount(_) => self.noted(memory),
            Survivor::Pool(_) => Ok(PoolLeft::of(memory)?.needed(memory)),
        }
    }

    /// What a worker does; its exit code.
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

    /// The end that nobody asked for. There is no other worker from here on, so the log may have threads.
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

/// Notes that a worker ends by itself, when it does: one that panics has died.
struct Ends(Survival);

impl Drop for Ends {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.0.ends();
        }
    }
}

/// Closes what a worker has not, which has nothing left to do: whoever waits for its end takes what it
/// had, and the guardian, which has the same table, is there for a moment still.
fn close_for_others(memory: &Survival, own: &[i32]) {
    let kept = memory.main().into_iter().chain([memory.descriptor()]).chain(own.iter().copied());
    let kept: Vec<u32> = kept.map(i32::cast_unsigned).collect();
    // What stays open goes with the guardian.
    let _ = descriptors::close_all_from_but(3, &kept);
}

/// Has the guardian told when this thread is dead, the worker's main one.
fn tell_of_death(memory: &Survival, guardian: u32) {
    match worker::death_of_this_thread() {
        Ok(death) => {
            memory.set_main(death);
            // Without a guardian, there is nobody to be told.
            let _ = worker::call(guardian);
        }
        Err(error) => tracing::debug!(%error, "the guardian waits for the end of all threads"),
    }
}

/// This program, by a descriptor: its file may be replaced. Where there is none, nobody goes back to it.
fn current_program() -> Option<i32> {
    let opened = rustix::fs::open("/proc/self/exe", OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
    opened.ok().map(IntoRawFd::into_raw_fd)
}
