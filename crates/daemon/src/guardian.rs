//! A mount that outlives the process that serves it.
//!
//! Called by [`crate::serve`] where that is asked for. This process becomes the *guardian*: it makes a
//! worker, which serves the mount and shares its table of descriptors with it, and waits. A worker that
//! is killed is followed by another one, which goes on from what the last one noted
//! ([`nacre_fuse::Survival`]). One that ends by itself ends its guardian, with the same code. A guardian
//! that is killed leaves what there is without one: the worker serves on, and when it dies the mount
//! does ([docs/decisions/outliving-the-process.md]).
//!
//! Invariants: the guardian has one thread, and opens nothing while a worker runs, so that each worker
//! begins sound; the next worker is made when the last one is dead in all of its threads but those that
//! wait for its mount, and so for the next one.

use crate::{
    background, clock,
    failure::Failure,
    handover::{self, Handover},
    left::{Guarded, Left, Notes},
    log, outliving,
    plan::{MountPlan, Transport},
    report::path_text,
    serve,
    shared::wire::MountRequest,
};
use nacre_fuse::Survival;
use nacre_sys::{
    descriptors, memory,
    worker::{self, Ended, Guard, Heard},
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
/// ... within this time, and the mount stays down.
const WITHIN: Duration = Duration::from_secs(60);
/// So long after another program went on, the one before it goes on again where that one's workers die so.
const TRIAL: Duration = Duration::from_secs(600);

/// Threads of a worker that was killed which may wait for the next one: they tell the kernel something,
/// or act on paths without any of its descriptors.
const NEED_NO_END: [&str; 2] = [worker::WAITS, fusewire::APART];

/// A mount, and what stays of it when its worker dies.
struct Guardian {
    mount: MountRequest,
    memory: Survival,
    background: bool,
    /// The program that this one came after, by a descriptor, and when.
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
    let memory = Survival::new().map_err(|error| failed(&error))?;
    Guardian { mount, memory, background, before: None }.run()
}

/// Goes on with a mount for the program that became this one.
///
/// # Errors
/// Why it cannot, or why the mount ended before its time.
pub fn go_on(left: Handover) -> Result<(), Failure> {
    // What was kept open for this program is nothing for those that it starts.
    descriptors::close_on_exec_from(3).map_err(|error| failed(&error))?;
    let memory = descriptors::take_over(left.memory).and_then(Survival::taken_over);
    let mut memory = memory.map_err(|error| failed(&error))?;
    memory.next_life();
    let before = left.before.map(|program| (program, clock::now()));
    Guardian { mount: left.mount, memory, background: left.background, before }.run()
}

fn failed(error: &io::Error) -> Failure {
    Failure::io("cannot make", "a mount that outlives its process", error)
}

impl Guardian {
    fn run(mut self) -> Result<(), Failure> {
        let (plan, background) = (self.mount.plan()?, self.background);
        let guard = Guard::new().map_err(|error| failed(&error))?;
        let handover = Handover::of(&self.memory, background, &self.mount);
        let handover_text = handover.text()?;
        let mut deaths: Vec<Instant> = Vec::new();
        loop {
            let (of_worker, reason) = (plan.clone(), self.mount.reason.clone());
            let (memory, guardian, handover_text) = (self.memory.clone(), process::id(), Arc::clone(&handover_text));
            let kept = self.kept(&guard);
            let guarded = move || {
                let notes = Arc::new(take_over(&memory, &kept)?);
                tell_of_death(&memory, guardian);
                Ok(Guarded { memory, guardian, notes, handover: handover_text })
            };
            let memory = self.memory.clone();
            // From here on it waits.
            memory::leave_code();
            let worker = guard.start(move || {
                let _ends = Ends(memory);
                work(&of_worker, reason, background, guarded)
            });
            let worker = worker.map_err(|error| failed(&error))?;
            if !self.memory.resumes() {
                background::leave_directory()?;
            }
            let (ended, program) = self.wait(&guard, worker).map_err(|error| failed(&error))?;
            let how = match ended {
                Some(Ended::Code(0)) => return Ok(()),
                // It has said why.
                Some(Ended::Code(code)) => process::exit(code),
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
            let died = format!("the process that served {} {how}", path_text(&plan.mountpoint));
            if let Some(program) = self.program_before().filter(|_| deaths.len() >= DEATHS && self.memory.can_resume())
            {
                self.become_program(&program, &handover, &guard);
            }
            let over = deaths.len() >= DEATHS || !self.memory.can_resume();
            if over && guard.has_threads_left() {
                // They would keep the device open, and nobody were told.
                let kept = [guard.descriptor(), self.memory.descriptor()].map(i32::cast_unsigned);
                descriptors::close_all_from_but(3, &kept).map_err(|error| failed(&error))?;
            }
            if !self.memory.can_resume() {
                return Err(ended_badly(&plan, background, died));
            }
            if deaths.len() >= DEATHS {
                let what = format!("{died}, the {DEATHS}rd time within a minute: the mount stays down");
                return Err(ended_badly(&plan, background, what));
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

    /// The program that went on with the mount before this one, if that was not long ago: this one's
    /// workers die, and they may have died of it.
    fn program_before(&self) -> Option<PathBuf> {
        let (program, since) = self.before?;
        let recently = clock::now().saturating_duration_since(since) < TRIAL;
        recently.then(|| PathBuf::from(format!("/proc/self/fd/{program}")))
    }

    /// Becomes another program, which goes on with the mount. Returns where it cannot be started.
    fn become_program(&self, program: &Path, handover: &Handover, guard: &Guard) {
        // The kernel would end what was read by descriptors that close with this program.
        // What is wrong the next worker finds as well.
        let Ok(left) = Left::read(&self.memory.text().unwrap_or_default()) else { return };
        let Ok(text) = handover.text() else { return };
        let also = self.kept(guard).into_iter().chain(handover.before);
        let kept: Vec<i32> = left.descriptors().into_iter().chain(also).collect();
        if self.memory.take_over(&kept).is_err() {
            return;
        }
        let left: Vec<i32> = left.descriptors().into_iter().chain(handover.before).collect();
        let (kept, arguments) = (self.memory.kept(&left), std::env::args_os().collect());
        let settings = handover::settings(&text);
        drop(worker::become_program(program, arguments, settings, &kept));
    }
}

/// Notes that a worker ends by itself, when it does.
struct Ends(Survival);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.ends();
    }
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

/// Takes over what a worker before this one left, and closes what nobody needs, the guardian's own
/// among it not; what it noted.
fn take_over(memory: &Survival, kept: &[i32]) -> Result<Notes, Failure> {
    if let Some(left) = Left::of(memory)? {
        let kept: Vec<i32> = left.descriptors().into_iter().chain(kept.iter().copied()).collect();
        memory
            .take_over(&kept)
            .map_err(|error| Failure::io("cannot go on with", path_text(&left.mountpoint()), &error))?;
    }
    Notes::of(memory)
}

/// What a worker does; its exit code.
fn work(plan: &MountPlan, reason: String, background: bool, guarded: impl FnOnce() -> Result<Guarded, Failure>) -> u8 {
    match guarded().and_then(|guarded| serve::serve(plan, reason, background, Some(guarded))) {
        Ok(()) => 0,
        Err(failure) => {
            tracing::error!("the mount ends: {failure}");
            let _ = failure.report(&plan.program);
            failure.code(&plan.program)
        }
    }
}

/// The end that nobody asked for. There is no other worker from here on, so the log may have threads.
fn ended_badly(plan: &MountPlan, background: bool, what: String) -> Failure {
    if log::start(plan, background).is_ok() {
        tracing::error!("{what}");
    }
    Failure::new(what)
}
