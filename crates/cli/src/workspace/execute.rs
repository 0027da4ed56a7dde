//! `nacre workspace run`: a command in a workspace.
//!
//! Without `--discard` and `--json`, this process becomes the command. With one of them, another process of this program
//! does, and this one waits for its end: it passes signals on and ends for none of them itself, so that the workspace is
//! discarded and the report written however the command ends.

use super::{command::RunOrder, discard};
use crate::union::run::json;
use nacre_daemon::{
    failure::Failure,
    report::{path_text, printable},
    workspace::{
        inside,
        store::{LockMode, Store},
        view,
    },
};
use nacre_sys::signals::{self, Signals};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::Serialize;
use std::{
    ffi::OsString,
    fs,
    io::{self, Write},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::{
            ffi::OsStrExt,
            process::{CommandExt, ExitStatusExt},
        },
    },
    path::Path,
    process::{Command, ExitCode, ExitStatus},
    thread,
};

/// Exit code where the command cannot be run in the workspace, as of `env`, `chroot` and `timeout`.
pub const NOT_RUN: u8 = 125;
/// Environment variable with the path of the file that gets a byte before the command of a waiting process starts.
const STARTS: &str = "NACRE_WORKSPACE_STARTS";

/// How a command in a workspace ended, as JSON.
#[derive(Serialize)]
struct RunReport {
    workspace: String,
    command: Vec<String>,
    /// The command was executed.
    started: bool,
    /// The exit code of `run`: 128 and the signal's number for a command that a signal ended.
    exit_code: u8,
    signal: Option<i32>,
    /// The workspace is gone.
    discarded: bool,
    /// Why it is not gone although it should be, or why the command was not executed.
    error: Option<String>,
}

/// Runs a command in a workspace; returns its exit code, or never.
///
/// # Errors
/// The workspace cannot be entered, or not be discarded afterwards.
pub fn run(store: &Store, order: &RunOrder) -> Result<ExitCode, Failure> {
    if order.discard || order.json.is_some() { run_and_wait(store, order) } else { become_command(store, order) }
}

/// The program to run and its arguments.
fn words(order: &RunOrder) -> (OsString, Vec<OsString>) {
    match order.command.split_first() {
        Some((program, arguments)) => (program.clone(), arguments.to_vec()),
        None => (std::env::var_os("SHELL").unwrap_or_else(|| OsString::from("/bin/sh")), Vec::new()),
    }
}

fn become_command(store: &Store, order: &RunOrder) -> Result<ExitCode, Failure> {
    // Opened here: from the command's namespaces, the other process cannot be reached.
    let unopened = |error: io::Error| Failure::io("cannot open", "the file of the waiting process", &error);
    let starts = std::env::var_os(STARTS).map(|path| fs::OpenOptions::new().write(true).open(path));
    let mut starts = starts.transpose().map_err(unopened)?;
    let (workspace, lock) = store.open_locked(&order.name, LockMode::Shared)?;
    workspace.check_no_commit()?;
    view::make_sure(&workspace, store)?;
    inside::enter(&workspace, order.as_root)?;
    // The lock is held until the last process of the command has ended.
    rustix::io::fcntl_setfd(&lock.0, rustix::io::FdFlags::empty())
        .map_err(|error| Failure::io("cannot keep", "the workspace's lock", &error.into()))?;
    let (program, arguments) = words(order);
    if let Some(starts) = &mut starts {
        starts.write_all(b"1").map_err(unopened)?;
    }
    let error = Command::new(&program).args(arguments).env_remove(STARTS).exec();
    drop(lock);
    if let Some(starts) = &starts {
        starts.set_len(0).map_err(unopened)?;
    }
    let failure = Failure::io("cannot run", path_text(Path::new(&program)), &error);
    // As shells do.
    let code = if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 };
    failure.report("nacre");
    Ok(ExitCode::from(code))
}

/// Has another process of this program run the command, waits for it, discards the workspace if the command ran and that
/// is wanted, and writes the report.
fn run_and_wait(store: &Store, order: &RunOrder) -> Result<ExitCode, Failure> {
    let failed = |error: io::Error| Failure::io("cannot run", "the command", &error);
    // Before the command runs: a report that cannot be written is a wrong call.
    let file = match &order.json {
        Some(path) => {
            let created = fs::File::create(path);
            Some((created.map_err(|error| Failure::io("cannot write", path_text(path), &error))?, path))
        }
        None => None,
    };
    // A key of the terminal ends the command alone.
    let signals = Signals::block_with_quit().map_err(failed)?;
    let starts = rustix::fs::memfd_create("starts", rustix::fs::MemfdFlags::CLOEXEC);
    let starts = fs::File::from(starts.map_err(|error| failed(error.into()))?);
    let mut command = Command::new("/proc/self/exe");
    command.arg0("nacre").args(["workspace", "run"]);
    command.env(STARTS, format!("/proc/{}/fd/{}", std::process::id(), starts.as_raw_fd()));
    if order.as_root {
        command.arg("--root");
    }
    command.args([&order.name, "--"]).args(&order.command);
    let mut child = signals::unblocked_in(&mut command).spawn().map_err(failed)?;
    // Not by its number, which another process may get after its end.
    let handle = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).map_err(|error| failed(error.into()))?;
    pass_on(signals, handle).map_err(failed)?;
    let status = child.wait().map_err(failed)?;
    let has_started = starts.metadata().map_err(failed)?.len() > 0;
    let outcome = end(store, order, status, has_started);
    if let Some((mut file, path)) = file {
        let text = json(&outcome)?;
        let written = file.write_all(text.as_bytes());
        if let Err(error) = written {
            // The exit code stays that of the command.
            Failure::io("cannot write", path_text(path), &error).report("nacre");
        }
    }
    Ok(ExitCode::from(outcome.exit_code))
}

/// Discards the workspace of a command that has ended, if that is wanted.
fn end(store: &Store, order: &RunOrder, status: ExitStatus, has_started: bool) -> RunReport {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    let (program, arguments) = words(order);
    let mut report = RunReport {
        workspace: order.name.clone(),
        command: std::iter::once(&program).chain(&arguments).map(|word| printable(word.as_bytes())).collect(),
        started: has_started,
        exit_code: u8::try_from(code).unwrap_or(1),
        signal: status.signal(),
        discarded: false,
        error: None,
    };
    if !has_started {
        let mut what = "the command did not start".to_owned();
        if order.discard {
            what.push_str(&format!(": the workspace {} is not discarded", order.name));
            Failure::new(&what).report("nacre");
        }
        report.error = Some(what);
    } else if order.discard {
        match discard::one(store, &order.name) {
            Ok(()) => report.discarded = true,
            Err(failure) => {
                failure.report("nacre");
                // Another exit code stays that of the command.
                if report.exit_code == 0 {
                    report.exit_code = NOT_RUN;
                }
                report.error = Some(failure.what);
            }
        }
    }
    report
}

/// Has a thread send the signals that this process gets to the command, until this process ends.
fn pass_on(signals: Signals, command: OwnedFd) -> io::Result<()> {
    let pass = move || {
        while let Ok((number, _, of_kernel)) = signals.next_number() {
            // A signal of the terminal has reached the command as well.
            if !of_kernel && let Some(signal) = Signal::from_named_raw(number) {
                // The command may have ended.
                let _ = pidfd_send_signal(&command, signal);
            }
        }
    };
    thread::Builder::new().spawn(pass).map(drop)
}
