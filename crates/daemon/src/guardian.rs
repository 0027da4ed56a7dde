//! A mount that outlives the process that serves it.
//!
//! Called by [`crate::serve`] where that is asked for. This process becomes the *guardian*: it makes a
//! worker, which serves the mount and shares its table of descriptors with it, and waits. A worker that
//! is killed is followed by another one, which goes on from what the last one noted
//! ([`nacre_fuse::Survival`]). One that ends by itself ends its guardian, with the same code. A guardian
//! that is killed leaves what there is without one: the worker serves on, and when it dies the mount
//! does ([docs/decisions/outliving-the-process.md]).
//!
//! Invariants: the guardian has one thread, and opens nothing after the directory at the bottom of the
//! stack, so that each worker begins sound; the next worker is made when the last one has been waited
//! for, and is dead in all of its threads.

use crate::{
    background, clock,
    failure::{Exit, Failure},
    handover::{self, Handover},
    left::Guarded,
    log,
    opening::unusable_source,
    plan::{MountPlan, Transport},
    report::path_text,
    serve,
    shared::wire::MountRequest,
};
use nacre_fuse::Survival;
use nacre_stack::spec::{LayerSpec, StackSpec, Writes};
use nacre_sys::{
    descriptors,
    worker::{self, Ended, Guard, Heard},
};
use rustix::fs::{Mode, OFlags};
use std::{
    fs, io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    process,
    sync::Arc,
    time::{Duration, Instant},
};

/// So many deaths ...
const DEATHS: usize = 3;
/// ... within this time, and the mount stays down.
const WITHIN: Duration = Duration::from_secs(60);

/// A mount, and what stays of it when its worker dies.
struct Guardian {
    mount: MountRequest,
    memory: Survival,
    leaf: Arc<OwnedFd>,
    background: bool,
}

/// Serves a plan by one worker after the other until the mount ends.
///
/// # Errors
/// Why nothing was mounted, or why the mount ended before its time.
pub fn run(plan: &MountPlan, reason: &str, background: bool) -> Result<(), Failure> {
    let mut resolved = serve::resolve(plan)?;
    check(&resolved.spec, &resolved.mountpoint, plan)?;
    write_through(&mut resolved.spec)?;
    let leaf = Arc::new(leaf(&resolved.spec)?);
    let mut plan = plan.clone();
    plan.door.transport = Transport::Device;
    let unwritten = || Failure::new("a mount of these layers cannot outlive its process: they cannot be noted");
    let mount = MountRequest::new(&plan, resolved, reason).ok_or_else(unwritten)?;
    let memory = Survival::new().map_err(|error| failed(&error))?;
    Guardian { mount, memory, leaf, background }.run()
}

/// Goes on with a mount for the program that became this one.
///
/// # Errors
/// Why it cannot, or why the mount ended before its time.
pub fn go_on(left: Handover) -> Result<(), Failure> {
    // What was kept open for this program is nothing for those that it starts.
    descriptors::close_on_exec_from(3).map_err(|error| failed(&error))?;
    let memory = descriptors::take_over(left.memory).and_then(Survival::taken_over);
    let leaf = descriptors::take_over(left.leaf).map_err(|error| failed(&error))?;
    let mut memory = memory.map_err(|error| failed(&error))?;
    memory.next_life();
    Guardian { mount: left.mount, memory, leaf: Arc::new(leaf), background: left.background }.run()
}

fn failed(error: &io::Error) -> Failure {
    Failure::io("cannot make", "a mount that outlives its process", error)
}

impl Guardian {
    fn run(mut self) -> Result<(), Failure> {
        let (plan, background) = (self.mount.plan()?, self.background);
        let guard = Guard::new().map_err(|error| failed(&error))?;
        let handover = Handover::text(&self.memory, &self.leaf, background, &self.mount)?;
        let mut deaths: Vec<Instant> = Vec::new();
        loop {
            let (of_worker, reason) = (plan.clone(), self.mount.reason.clone());
            let guarded = Guarded {
                memory: self.memory.clone(),
                guardian: process::id(),
                leaf: Arc::clone(&self.leaf),
                handover: Arc::clone(&handover),
            };
            let worker = guard.start(move || work(&of_worker, reason, background, guarded));
            let worker = worker.map_err(|error| failed(&error))?;
            if !self.memory.resumes() {
                background::leave_directory()?;
            }
            let (ended, program) = self.wait(&guard, worker).map_err(|error| failed(&error))?;
            let signal = match ended {
                Ended::Code(0) => return Ok(()),
                // It has said why.
                Ended::Code(code) => process::exit(code),
                Ended::Signal(signal) => signal,
            };
            if let Some(program) = program.filter(|_| self.memory.can_resume()) {
                self.become_program(&program, &handover);
                // It cannot be started: whoever asked sees that this one goes on.
                self.memory.next_life();
                continue;
            }
            let now = clock::now();
            deaths.retain(|death| now.saturating_duration_since(*death) < WITHIN);
            deaths.push(now);
            let died = format!("the process that served {} was killed by signal {signal}", path_text(&plan.mountpoint));
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

    /// Waits for the end of a worker; also answers which program is to go on, where it was killed for
    /// that.
    fn wait(&self, guard: &Guard, worker: i32) -> io::Result<(Ended, Option<PathBuf>)> {
        let mut program = None;
        loop {
            match guard.wait(worker)? {
                Heard::Ended(ended) => return Ok((ended, program)),
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

    /// Becomes another program, which goes on with the mount. Returns where it cannot be started.
    fn become_program(&self, program: &Path, handover: &str) {
        // The kernel would end what was read by descriptors that close with this program.
        if self.memory.take_over(self.leaf.as_fd()).is_err() {
            // The mount has ended, which the next worker finds as well.
            return;
        }
        let kept = self.memory.kept(self.leaf.as_fd());
        let (arguments, settings) = (std::env::args_os().collect(), handover::settings(handover));
        drop(worker::become_program(program, arguments, settings, &kept));
    }
}

/// What a worker does; its exit code.
fn work(plan: &MountPlan, reason: String, background: bool, guarded: Guarded) -> u8 {
    let taken = if guarded.memory.resumes() { guarded.memory.take_over(guarded.leaf.as_fd()) } else { Ok(()) };
    let taken = taken.map_err(|error| Failure::io("cannot go on with", path_text(&plan.mountpoint), &error));
    match taken.and_then(|()| serve::serve(plan, reason, background, Some(guarded))) {
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

/// Whether a mount of these layers can outlive its process.
fn check(spec: &StackSpec, mountpoint: &Path, plan: &MountPlan) -> Result<(), Failure> {
    let refused = |why: &str| Err(Failure::usage(format!("--survive is not possible here: {why}")));
    let door = &plan.door;
    if door.transport == Transport::Uring {
        return refused("requests under way end with the process where they come by io_uring; --transport=device");
    }
    let reasons = [
        (plan.daemon.is_some(), "it serves one mount, and --daemon=NAME several"),
        (door.lock_forwarding, "locks on files of the source end with the process"),
        // One that is killed while it waits for an answer of its own could not end, and nobody would
        // give the answer.
        (door.notify_watchers, "the process would use the mount itself, to raise events"),
        (door.no_open || door.immutable, "files are opened without a request"),
    ];
    if let Some((_, why)) = reasons.iter().find(|(applies, _)| *applies) {
        return refused(why);
    }
    for layer in &spec.layers {
        match layer {
            LayerSpec::Remap(remap) => {
                // They would be asked for by the worker that is to answer.
                let files = [&remap.map_passwd, &remap.map_passwd_rev, &remap.map_group, &remap.map_group_rev];
                let inside = |file: &PathBuf| fs::canonicalize(file).is_ok_and(|file| file.starts_with(mountpoint));
                if files.into_iter().flatten().any(inside) {
                    return refused("its rules are read from a file below the mount point");
                }
            }
            LayerSpec::Host(_)
            | LayerSpec::Throttle(_)
            | LayerSpec::Trace(_)
            | LayerSpec::Shift(_)
            | LayerSpec::OverrideStat(_)
            | LayerSpec::Cage(_)
            | LayerSpec::Readonly(_) => {}
            LayerSpec::Mem(_) | LayerSpec::Union(_) => {
                return refused(&format!("a layer \"{}\" does not outlive its process", layer.name()));
            }
        }
    }
    Ok(())
}

/// Has cages book each write when it happens. What a kernel collects was promised room, and nobody
/// would know how much once the process is dead.
fn write_through(spec: &mut StackSpec) -> Result<(), Failure> {
    for layer in &mut spec.layers {
        let LayerSpec::Cage(cage) = layer else { continue };
        if cage.writes == Writes::Collected {
            let what = "--survive is not possible here: the kernel would collect writes, for which room is promised";
            return Err(Failure::usage(what).next("--writes=through"));
        }
        cage.writes = Writes::Through;
    }
    Ok(())
}

/// The directory at the bottom of a stack, opened before anything is mounted over it: by its path,
/// the next worker might ask for the mount that it is to answer for.
fn leaf(spec: &StackSpec) -> Result<OwnedFd, Failure> {
    let Some(LayerSpec::Host(host)) = spec.layers.first() else {
        return Err(Failure::new("a stack that begins with no directory cannot outlive its process").exit(Exit::Usage));
    };
    let opened = rustix::fs::open(&host.source, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
    opened.map_err(|error| unusable_source(&host.source, &error.into()))
}
