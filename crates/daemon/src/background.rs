//! Starts the background process of a mount: a mount that is not in the foreground is served by a second process of
//! the same program, and the first one returns when the mount answers.
//!
//! The second process is executed anew rather than forked, so it has no threads or locks of the first. An
//! environment variable with its parent's process id identifies it. It reports readiness over its standard output,
//! and until then prints errors on the standard error that it shares with the first. Its exit code becomes the
//! first one's.

use crate::failure::Failure;
use rustix::{
    fs::{CWD, Mode, OFlags, openat},
    process::{Resource, Rlimit, getrlimit, setrlimit, setsid},
    stdio::{dup2_stderr, dup2_stdin, dup2_stdout},
};
use std::{
    ffi::{OsStr, OsString},
    fs, io,
    io::{Read, Write},
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Command, ExitCode, Stdio},
};

/// Environment variable with the parent's process id: identifies the second process.
const MARK: &str = "NACRE_SERVES_FOR";
/// Environment variable with the reason why this program serves the mount, and not the kernel alone.
const REASON: &str = "NACRE_ENGINE_REASON";
/// Line that the second process prints when the mount answers.
const READY: &[u8] = b"ready\n";
/// Limit of open descriptors that is asked for: as many as a mount could need; more would only cost the kernel
/// memory.
const DESCRIPTORS: u64 = 1 << 20;

/// How the background process ended its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Started {
    /// The mount answers.
    Ready,
    /// The second process failed: it printed the reason and ended with this exit code.
    Failed(u8),
}

/// Whether this process was started by another process of this program that waits for it, or became it by exec.
pub fn is_started() -> bool {
    is_background() || std::env::var(MARK).ok() == Some(std::process::id().to_string())
}

/// Whether this process is a background process, started by its parent to serve a mount.
pub fn is_background() -> bool {
    let parent = rustix::process::getppid().map(|parent| parent.as_raw_pid().to_string());
    parent.is_some() && std::env::var(MARK).ok() == parent
}

/// Returns the reason why this process, and not the kernel, serves the mount.
pub fn reason() -> String {
    std::env::var(REASON).unwrap_or_default()
}

/// Replaces this process by one that will serve mounts and inherits only its process id. `settings` are added to
/// its environment. Returns the failure if it cannot.
pub fn instead(name: &OsStr, arguments: impl Iterator<Item = OsString>, settings: &[(&str, &str)]) -> Failure {
    let error = match nacre_sys::descriptors::close_on_exec_from(3) {
        Ok(()) => command(name, arguments, settings).exec(),
        Err(error) => error,
    };
    Failure::io("cannot become", "the process that serves the mount", &error)
}

fn command(name: &OsStr, arguments: impl Iterator<Item = OsString>, settings: &[(&str, &str)]) -> Command {
    let mut command = Command::new(program());
    command
        .arg0(name)
        .args(arguments)
        .env(MARK, std::process::id().to_string())
        .envs(settings.iter().copied())
        // Descriptors that a service manager passed to this process do not have the same numbers there.
        .env_remove("LISTEN_PID")
        .stdin(Stdio::null());
    command
}

/// Starts the second process with the same arguments and waits until its mount answers.
///
/// # Errors
/// The process cannot be started.
pub fn start(reason: &str) -> Result<Started, Failure> {
    let mut arguments = std::env::args_os();
    let name = arguments.next().unwrap_or_else(|| OsString::from("nacre"));
    spawn(&name, arguments, &[(REASON, reason)])
}

/// Starts a process with this command line that will serve a mount, and waits until it answers.
///
/// # Errors
/// The process cannot be started.
pub fn spawn_for(name: &OsStr, arguments: Vec<OsString>, reason: &str) -> Result<Started, Failure> {
    spawn(name, arguments.into_iter(), &[(REASON, reason)])
}

/// Starts a process that will serve mounts, and waits until it reports readiness. `settings` are added to its
/// environment.
///
/// # Errors
/// The process cannot be started.
pub fn spawn(
    name: &OsStr,
    arguments: impl Iterator<Item = OsString>,
    settings: &[(&str, &str)],
) -> Result<Started, Failure> {
    // A script's open files and locks are its own, not those of a process that lives longer than the script.
    if let Err(error) = nacre_sys::descriptors::close_on_exec_from(3) {
        tracing::debug!(%error, "descriptors of the caller stay open");
    }
    let failed = |error: io::Error| Failure::io("cannot start", "the process that serves the mount", &error);
    let mut child = command(name, arguments, settings).stdout(Stdio::piped()).spawn().map_err(failed)?;
    let mut said = Vec::new();
    if let Some(mut output) = child.stdout.take() {
        let mut line = [0; READY.len()];
        if output.read_exact(&mut line).is_ok() {
            said.extend_from_slice(&line);
        }
    }
    if said == READY {
        return Ok(Started::Ready);
    }
    let status = child.wait().map_err(failed)?;
    let code = status.code().and_then(|code| u8::try_from(code).ok()).filter(|code| *code != 0);
    code.map(Started::Failed)
        .ok_or_else(|| Failure::new(format!("the process that serves the mount ended before it answered: {status}")))
}

/// Our own executable, by its path where that still leads to it, so that process lists show its
/// name.
fn program() -> PathBuf {
    let link = PathBuf::from("/proc/self/exe");
    fs::read_link(&link).ok().filter(|path| path.exists()).unwrap_or(link)
}

/// Makes the second process leave the session of the first, so that no terminal's signals reach it.
///
/// # Errors
/// As `setsid(2)`.
pub fn leave_session() -> Result<(), Failure> {
    setsid().map(drop).map_err(|error| Failure::io("cannot leave", "the session of the terminal", &error.into()))
}

/// Reports that the mount answers, and releases everything that belongs to the first process: its descriptors and
/// its directory.
///
/// # Errors
/// The first process is gone, so the mount is not wanted any more.
pub fn report_ready() -> Result<(), Failure> {
    let failed = |error: io::Error| Failure::io("cannot report to", "the process that asked for the mount", &error);
    let null = openat(CWD, "/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .map_err(|error| failed(error.into()))?;
    let mut out = io::stdout().lock();
    let written = out.write_all(READY).and_then(|()| out.flush()).map_err(failed);
    let done = dup2_stdin(&null).and_then(|()| dup2_stdout(&null)).and_then(|()| dup2_stderr(&null));
    written.and(done.map_err(|error| failed(error.into())))
}

/// Changes to the root directory, so that the directory of the caller can be unmounted.
///
/// # Errors
/// As `chdir(2)`.
pub fn leave_directory() -> Result<(), Failure> {
    std::env::set_current_dir("/").map_err(|error| Failure::io("cannot change to", "/", &error))
}

/// Prepares a process that serves mounts: limit of descriptors, allocator.
pub fn settle() {
    raise_descriptor_limit();
    // Memory that a large listing or copy needed is returned afterwards.
    nacre_sys::memory::keep_large_blocks_apart();
}

/// Raises the limit of open descriptors as far as allowed; root raises the hard limit, too. A limit
/// that stays low is not fatal.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let hard = limit.maximum.unwrap_or(u64::MAX);
    let most = fs::read_to_string("/proc/sys/fs/nr_open")
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(DESCRIPTORS);
    let wanted = hard.max(most.min(DESCRIPTORS));
    let raised =
        Rlimit { current: Some(wanted.min(DESCRIPTORS).max(limit.current.unwrap_or(0))), maximum: Some(wanted) };
    let unprivileged = Rlimit { current: Some(hard), maximum: limit.maximum };
    if setrlimit(Resource::Nofile, raised).is_err()
        && let Err(error) = setrlimit(Resource::Nofile, unprivileged)
    {
        tracing::warn!(%error, limit = ?limit.current, "the limit of open files could not be raised");
    }
}

/// Serves the mount in a second process, for this reason; returns when the mount answers.
///
/// # Errors
/// The process cannot be started.
pub fn in_background(reason: &str) -> Result<ExitCode, Failure> {
    Ok(match start(reason)? {
        Started::Ready => ExitCode::SUCCESS,
        Started::Failed(code) => ExitCode::from(code),
    })
}
