//! Client of a shared process: finds it or starts it, sends the plan, and reports the result.

use super::{
    identity, process, socket,
    wire::{MountRequest, Progress},
};
use crate::{
    background::{self, Started},
    clock,
    failure::Failure,
    plan::MountPlan,
    report::tell,
    rpc::{self, CallError, Source, line},
    runtime, serve,
};
use nacre_stack::spec::LayerSpec;
use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};
use std::{
    io::{self, BufReader, Write},
    os::unix::net::UnixStream,
    path::Path,
    process::ExitCode,
    time::Duration,
};

/// Number of attempts with a process that ends just when it is asked, before something must be wrong.
const ATTEMPTS: usize = 100;
/// Interval of attempts to reach a process that ends just when it is asked.
const AGAIN: Duration = Duration::from_millis(20);
/// Deadline for a process to accept a connection.
const PATIENCE: Duration = Duration::from_secs(10);

/// Has the process of a name serve a mount through FUSE, for this reason.
///
/// # Errors
/// Failures of the mount; or the shared process cannot be reached.
pub fn mount(plan: &MountPlan, name: &str, reason: &str) -> Result<ExitCode, Failure> {
    mount_or(plan, name, reason, &|why| alone(plan, why, reason))
}

/// As [`mount`]; `alone` has a process of its own serve the mount where this process cannot, for a reason.
///
/// # Errors
/// As [`mount`].
pub fn mount_or(
    plan: &MountPlan,
    name: &str,
    reason: &str,
    alone: &dyn Fn(&str) -> Result<ExitCode, Failure>,
) -> Result<ExitCode, Failure> {
    let resolved = serve::resolve(plan)?;
    if resolved.spec.layers.iter().any(|layer| matches!(layer, LayerSpec::Cage(_))) {
        return Err(Failure::usage(
            "a cage has a process to itself: its hooks and its accounting follow whoever makes it",
        )
        .next("leave --daemon out"));
    }
    let Some(request) = MountRequest::new(plan, resolved, reason) else {
        return alone("the stack cannot be written in one line");
    };
    let identity = identity::own().map_err(|error| {
        Failure::io("cannot read", "/proc/self", &error).next("mount the proc file system at /proc")
    })?;
    let directory = runtime::own()?;
    let socket = socket(&directory, name, &identity);
    for _ in 0..ATTEMPTS {
        let outcome = match reach(&directory, &socket, name)? {
            Reached::Stream(stream) => converse(&stream, &request)?,
            Reached::Code(code) => return Ok(code),
        };
        match outcome {
            Some(Progress::Mounted) => return Ok(ExitCode::SUCCESS),
            Some(Progress::Apart { why }) => return alone(&why),
            // It has just ended, or was asked to: soon nobody listens there any more.
            Some(Progress::Accepted) | None => clock::pause(AGAIN),
        }
    }
    Err(Failure::new(format!("the process of the name {name} ends each time it is asked"))
        .next("leave --daemon out, or choose another name"))
}

/// Mounts by a process of its own instead.
fn alone(plan: &MountPlan, why: &str, reason: &str) -> Result<ExitCode, Failure> {
    // A failure to print a note is ignored.
    let _ = writeln!(io::stderr(), "{}: served by a process of its own: {why}", plan.program);
    background::in_background(reason)
}

enum Reached {
    Stream(UnixStream),
    /// The process could not be started, and has printed the reason; this is its exit code.
    Code(ExitCode),
}

/// Connects to the process, which is started if need be. Of several commands that find none, one starts it.
fn reach(directory: &Path, socket: &Path, name: &str) -> Result<Reached, Failure> {
    if let Some(stream) = connect(socket)? {
        return Ok(Reached::Stream(stream));
    }
    let path = directory.join(runtime::STARTING);
    let failed = |error: rustix::io::Errno| Failure::io("cannot lock", path.display(), &error.into());
    let lock = open(&path, OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::RUSR | Mode::WUSR)
        .map_err(failed)?;
    // Released when it is closed.
    flock(&lock, FlockOperation::LockExclusive).map_err(failed)?;
    if let Some(stream) = connect(socket)? {
        return Ok(Reached::Stream(stream));
    }
    match process::start(name)? {
        Started::Failed(code) => Ok(Reached::Code(ExitCode::from(code))),
        Started::Ready => {
            let stream = connect(socket)?;
            stream
                .map(Reached::Stream)
                .ok_or_else(|| Failure::new("the process that was to serve the mount has ended at once"))
        }
    }
}

/// Connects; `None` where nobody listens.
fn connect(socket: &Path) -> Result<Option<UnixStream>, Failure> {
    match runtime::connect(socket, PATIENCE) {
        Ok(stream) => Ok(Some(stream)),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => Ok(None),
        Err(error) => Err(Failure::io("cannot reach the process that serves", socket.display(), &error)),
    }
}

/// Sends the request and waits for the result; `None` where the process ended before it had begun.
fn converse(stream: &UnixStream, request: &MountRequest) -> Result<Option<Progress>, Failure> {
    let mut reader = BufReader::new(stream);
    // Even if it cannot be sent, an answer may have arrived.
    let _ = line::send(stream, request);
    match rpc::answer(&mut reader, Source::OWN, &mut tell) {
        Ok(Progress::Accepted) => {}
        Ok(progress) => return Ok(Some(progress)),
        Err(CallError::Failed(failure)) => return Err(failure),
        Err(CallError::Unreachable(error)) if error.kind() == io::ErrorKind::InvalidData => {
            return Err(Failure::io("cannot understand", "the process that serves such mounts", &error));
        }
        Err(CallError::Ended | CallError::Unreachable(_)) => return Ok(None),
    }
    // Without a deadline: a source may be far away.
    rpc::answer(&mut reader, Source::OWN, &mut tell).map(Some).map_err(|error| match error {
        CallError::Failed(failure) => failure,
        _ => Failure::new("the process that was to serve the mount ended before it answered"),
    })
}
