//! A mount that outlives the process that serves it.
//!
//! Called by [`crate::serve`] where that is asked for. This process becomes the *guardian*: it makes a
//! worker, which serves the mount and shares its table of descriptors with it, and waits. A worker that
//! is killed is followed by another one, which goes on from what the last one noted
//! ([`nacre_fuse::Survival`]). One that ends by itself ends its guardian, with the same code. A guardian
//! that is killed leaves what there is without one: the worker serves on, and when it dies the mount
//! does ([docs/decisions/outliving-the-process.md]).
//!
//! Invariants: the guardian has one thread, and opens nothing, so that each worker begins sound; the next worker is made when the last one has been waited
//! for, and is dead in all of its threads.

use crate::{
    background, clock,
    failure::Failure,
    handover::{self, Handover},
    left::{Guarded, Left, Notes},
    log,
    plan::{MountPlan, Transport},
    report::path_text,
    serve,
    shared::wire::MountRequest,
};
use nacre_fuse::Survival;
use nacre_stack::spec::{BranchSource, BranchSpec, LayerSpec, StackSpec, Writes};
use nacre_sys::{
    descriptors,
    worker::{self, Ended, Guard, Heard},
};
use std::{
    fs, io,
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
    let mut plan = plan.clone();
    plan.door.transport = Transport::Device;
    let unwritten = || Failure::new("a mount of these layers cannot outlive its process: they cannot be noted");
    let mount = MountRequest::new(&plan, resolved, reason).ok_or_else(unwritten)?;
    let memory = Survival::new().map_err(|error| failed(&error))?;
    Guardian { mount, memory, background }.run()
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
    Guardian { mount: left.mount, memory, background: left.background }.run()
}

fn failed(error: &io::Error) -> Failure {
    Failure::io("cannot make", "a mount that outlives its process", error)
}

impl Guardian {
    fn run(mut self) -> Result<(), Failure> {
        let (plan, background) = (self.mount.plan()?, self.background);
        let guard = Guard::new().map_err(|error| failed(&error))?;
        let handover = Handover::text(&self.memory, background, &self.mount)?;
        let mut deaths: Vec<Instant> = Vec::new();
        loop {
            let (of_worker, reason) = (plan.clone(), self.mount.reason.clone());
            let (memory, guardian, handover_text) = (self.memory.clone(), process::id(), Arc::clone(&handover));
            let guarded = move || {
                let notes = Arc::new(take_over(&memory)?);
                Ok(Guarded { memory, guardian, notes, handover: handover_text })
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
        // What is wrong the next worker finds as well.
        let Ok(left) = Left::read(&self.memory.text().unwrap_or_default()) else { return };
        if self.memory.take_over(&left.descriptors()).is_err() {
            return;
        }
        let kept = self.memory.kept(&left.descriptors());
        let (arguments, settings) = (std::env::args_os().collect(), handover::settings(handover));
        drop(worker::become_program(program, arguments, settings, &kept));
    }
}

/// Takes over what a worker before this one left, and closes what nobody needs; what it noted.
fn take_over(memory: &Survival) -> Result<Notes, Failure> {
    if let Some(left) = Left::of(memory)? {
        memory
            .take_over(&left.descriptors())
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
    if let Some(why) = unable(spec, mountpoint, true) {
        return refused(&why);
    }
    Ok(())
}

/// Why layers do not outlive their process. `whole`: of a mount, not of a branch.
fn unable(spec: &StackSpec, mountpoint: &Path, whole: bool) -> Option<String> {
    let is_cage = |layer: &LayerSpec| matches!(layer, LayerSpec::Cage(_));
    spec.layers.iter().find_map(|layer| match layer {
        LayerSpec::Remap(remap) => {
            // They would be asked for by the worker that is to answer.
            let files = [&remap.map_passwd, &remap.map_passwd_rev, &remap.map_group, &remap.map_group_rev];
            let inside = |file: &PathBuf| fs::canonicalize(file).is_ok_and(|file| file.starts_with(mountpoint));
            files
                .into_iter()
                .flatten()
                .any(inside)
                .then(|| "its rules are read from a file below the mount point".to_owned())
        }
        LayerSpec::Union(_) if !whole => Some("a branch is a union itself".to_owned()),
        LayerSpec::Union(_) if spec.layers.iter().any(is_cage) => Some("a cage lies over a union".to_owned()),
        LayerSpec::Union(union) => {
            let by_name = union.options().is_ok_and(|options| options.link_cow || options.symlinkify.is_some());
            let of_branch = |branch: &BranchSpec| match &branch.source {
                BranchSource::Directory(_) => None,
                BranchSource::Stack(stack) => unable(stack, mountpoint, false),
            };
            by_name
                .then(|| "with link-cow and symlinkify files are known by numbers of this process".to_owned())
                .or_else(|| union.branch.0.iter().find_map(of_branch))
        }
        LayerSpec::Cage(_) if !whole => Some("a branch has a cage".to_owned()),
        LayerSpec::Mem(_) => Some(format!("a layer \"{}\" does not outlive its process", layer.name())),
        LayerSpec::Host(_)
        | LayerSpec::Throttle(_)
        | LayerSpec::Trace(_)
        | LayerSpec::Shift(_)
        | LayerSpec::OverrideStat(_)
        | LayerSpec::Cage(_)
        | LayerSpec::Readonly(_) => None,
    })
}

/// Whether a branch can be added to a mount that outlives its process.
///
/// # Errors
/// Why not.
pub fn check_branch(branch: &BranchSpec, mountpoint: &Path) -> Result<(), Failure> {
    let BranchSource::Stack(stack) = &branch.source else { return Ok(()) };
    match unable(stack, mountpoint, false) {
        Some(why) => Err(Failure::usage(format!("the mount was made with --survive, which is not possible so: {why}"))),
        None => Ok(()),
    }
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
