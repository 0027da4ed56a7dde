//! Event programs of the administrator: each executable in `/etc/nacre/events.d` is called once for each event,
//! with the event in its environment.
//!
//! Called by processes that own pools ([`crate::pool`]) and by those that serve cages, through [`tell`], wherever
//! an event occurs. Invariants:
//! * nobody waits for a program: events wait in a queue of [`QUEUE`]; an event that finds it full is dropped, which
//!   is logged;
//! * only root decides which programs run: the file and every directory above it are root's, and nobody else may
//!   write to them or replace them;
//! * no shell sees a value: values are in the environment, unchanged;
//! * a program that does not end before its deadline is killed with all processes that it has started.

use crate::{clock, report::path_text};
use nacre_layers::context::Tell;
use nacre_sys::signals;
use parking_lot::Mutex;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open},
};
use std::{
    env,
    ffi::OsString,
    fs, io,
    os::unix::{fs::MetadataExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, TrySendError, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

/// Directory of the programs, and the variable that names another one.
const DIRECTORY: (&str, &str) = ("/etc/nacre/events.d", "NACRE_EVENTS_DIR");
/// Deadline of a program in seconds, and the variable that sets another one.
const LIMIT: (u64, &str) = (30, "NACRE_EVENTS_SECONDS");
/// Number of events that may wait.
const QUEUE: usize = 64;
/// Prefix of a workspace's name in the first column of the mount table.
pub const WORKSPACE_PREFIX: &str = "workspace:";
/// `PATH` of the programs.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// An event: its kind and its details, by names of variables without `NACRE_`.
type Happened = (&'static str, Vec<(String, String)>);

/// Queue of the thread that calls the programs; made with the first event.
static WAY: Mutex<Option<SyncSender<Happened>>> = Mutex::new(None);

/// Queues an event of this kind for all programs. Returns at once.
pub fn tell(kind: &'static str, details: Vec<(String, String)>) {
    let mut way = WAY.lock();
    if way.is_none() {
        let (sender, receiver) = sync_channel(QUEUE);
        let thread = thread::Builder::new().name("nacre-hooks".to_owned()).stack_size(128 << 10);
        match thread.spawn(move || call(&receiver)) {
            Ok(_) => *way = Some(sender),
            Err(error) => return tracing::error!(event = kind, %error, "no thread for the programs of events"),
        }
    }
    let Some(sender) = &*way else { return };
    match sender.try_send((kind, details)) {
        Ok(()) => {}
        Err(TrySendError::Full(_)) => {
            tracing::warn!(event = kind, "too many events wait for their programs: this one is left out");
        }
        Err(TrySendError::Disconnected(_)) => *way = None,
    }
}

/// Calls all programs for an event, for a command that ends afterwards: returns when they have ended.
pub fn tell_and_wait(kind: &'static str, details: Vec<(String, String)>) {
    let (sender, receiver) = sync_channel(1);
    // The queue is empty and its receiver exists.
    if sender.try_send((kind, details)).is_ok() {
        drop(sender);
        call(&receiver);
    }
}

/// Has the event of a workspace that is full name the workspace. `source` is the first column of the mount table.
pub fn naming_the_workspace(source: &str, tell: Tell) -> Tell {
    let Some(name) = source.strip_prefix(WORKSPACE_PREFIX).map(str::to_owned) else { return tell };
    Arc::new(move |kind, mut details| {
        if kind != "cage-full" {
            return tell(kind, details);
        }
        details.retain(|(detail, _)| detail != "cage");
        details.insert(0, ("workspace".to_owned(), name.clone()));
        tell("workspace-full", details);
    })
}

fn call(events: &Receiver<Happened>) {
    while let Ok((kind, details)) = events.recv() {
        let directory = env::var_os(DIRECTORY.1).map_or_else(|| PathBuf::from(DIRECTORY.0), PathBuf::from);
        for program in programs(&directory) {
            let shown = path_text(&program);
            match run(&program, kind, &details, limit()) {
                Ok(Ended::By(status)) if status.success() => {
                    tracing::info!(event = kind, program = %shown, "the program of an event has ended");
                }
                Ok(Ended::By(status)) => {
                    tracing::warn!(event = kind, program = %shown, %status, "the program of an event has failed");
                }
                Ok(Ended::Late) => {
                    tracing::warn!(event = kind, program = %shown, "the program of an event took too long and was killed");
                }
                Err(error) => {
                    tracing::warn!(event = kind, program = %shown, %error, "the program of an event cannot be run");
                }
            }
        }
    }
}

fn limit() -> Duration {
    let seconds = env::var(LIMIT.1).ok().and_then(|text| text.parse().ok());
    Duration::from_secs(seconds.unwrap_or(LIMIT.0))
}

/// Returns the programs in a directory, in the order of their names. Files of editors and package managers are
/// skipped.
fn programs(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    let mut found = Vec::new();
    for entry in entries.flatten() {
        let name = entry.file_name();
        let plain = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        if !name.as_encoded_bytes().iter().all(plain) {
            continue;
        }
        match trusted(&entry.path()) {
            Ok(Some(program)) => found.push((name, program)),
            Ok(None) => {}
            Err(why) => {
                tracing::warn!(program = %path_text(&entry.path()), %why, "the program of an event is not run");
            }
        }
    }
    found.sort();
    found.into_iter().map(|(_, program)| program).collect()
}

/// Returns the real path of a program, if it can be run and nobody but root can change or replace it; `None` where
/// it is no program.
fn trusted(path: &Path) -> io::Result<Option<PathBuf>> {
    let real = fs::canonicalize(path)?;
    let program = fs::metadata(&real)?;
    if !program.is_file() || program.mode() & 0o111 == 0 {
        return Ok(None);
    }
    for part in real.ancestors() {
        let about = fs::symlink_metadata(part)?;
        // In a directory with the sticky bit, only root removes root's files.
        let kept = about.mode() & 0o022 == 0 || (about.is_dir() && about.mode() & 0o1000 != 0);
        if about.uid() != 0 || !kept {
            return Err(io::Error::other(format!("others than root can change {}", path_text(part))));
        }
    }
    Ok(Some(real))
}

/// How a program ended.
pub(crate) enum Ended {
    /// By itself, or by another process.
    By(ExitStatus),
    /// The program was killed at the deadline.
    Late,
}

fn run(program: &Path, kind: &str, details: &[(String, String)], most: Duration) -> io::Result<Ended> {
    let mut command = Command::new(program);
    command.env_clear().env("PATH", PATH).env("NACRE_EVENT", kind).env("NACRE_TIME", clock::date().to_string());
    // A value with a zero byte cannot be in an environment: it is shown as `\x00`.
    let variables = details.iter().map(|(name, value)| {
        (OsString::from(format!("NACRE_{}", name.to_ascii_uppercase())), value.replace('\0', "\\x00"))
    });
    command.envs(variables).current_dir("/").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    signals::unblocked_in(command.process_group(0));
    ended(command.spawn()?, clock::now() + most)
}

/// Waits for the end of a program that has a process group of its own, and kills the processes of the group that
/// are left then.
///
/// # Errors
/// It cannot be waited for.
pub(crate) fn ended(mut child: Child, until: Instant) -> io::Result<Ended> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidData)?;
    let ended = pidfd_open(pid, PidfdFlags::empty()).map_err(io::Error::from).and_then(|end| {
        loop {
            let left = until.saturating_duration_since(clock::now());
            let left = Timespec::try_from(left).unwrap_or(Timespec { tv_sec: 0, tv_nsec: 0 });
            match poll(&mut [PollFd::new(&end, PollFlags::IN)], Some(&left)) {
                Err(rustix::io::Errno::INTR) => {}
                Ok(ready) => return Ok(ready > 0),
                Err(error) => return Err(error.into()),
            }
        }
    });
    if !matches!(ended, Ok(true)) {
        // The child is not reaped yet, so its process id is not reused.
        let _ = kill_process_group(pid, Signal::KILL);
    }
    let status = child.wait()?;
    Ok(if ended? { Ended::By(status) } else { Ended::Late })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn put(place: &Path, name: &str, mode: u32, text: &str) -> PathBuf {
        let path = place.join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        path
    }

    #[test]
    fn only_roots_programs_are_run() {
        if !rustix::process::geteuid().is_root() {
            return println!("skipped: only root's files are programs");
        }
        let scratch = tempfile::tempdir().unwrap();
        let place = fs::canonicalize(scratch.path()).unwrap();
        let good = put(&place, "20-good", 0o755, "#!/bin/sh\n");
        for (name, mode) in
            [("data", 0o644), ("open", 0o777), ("group", 0o775), ("old.dpkg-old", 0o755), (".hidden", 0o755)]
        {
            put(&place, name, mode, "#!/bin/sh\n");
        }
        let theirs = put(&place, "theirs", 0o755, "#!/bin/sh\n");
        std::os::unix::fs::chown(&theirs, Some(1), None).unwrap();
        let elsewhere = place.join("elsewhere");
        fs::create_dir(&elsewhere).unwrap();
        put(&elsewhere, "program", 0o755, "#!/bin/sh\n");
        symlink(elsewhere.join("program"), place.join("10-linked")).unwrap();
        symlink(place.join("missing"), place.join("dangling")).unwrap();
        assert_eq!(programs(&place), [elsewhere.join("program"), good.clone()]);
        fs::set_permissions(&elsewhere, fs::Permissions::from_mode(0o777)).unwrap();
        assert_eq!(programs(&place), [good], "others can put another program in its place");
        assert!(programs(&place.join("missing")).is_empty());
    }

    #[test]
    fn names_are_values_and_nobody_hangs() {
        let scratch = tempfile::tempdir().unwrap();
        let (out, hostile) = (scratch.path().join("out"), "a b;$(touch x)\n'\"\\\u{fc}");
        let script =
            format!("#!/bin/sh\nprintf '%s|%s' \"$NACRE_EVENT\" \"$NACRE_DEVICE\" >{}\nexit 7\n", out.display());
        let program = put(scratch.path(), "program", 0o755, &script);
        let details = [("device".to_owned(), hostile.to_owned())];
        let Ended::By(status) = run(&program, "device-fault", &details, Duration::from_secs(60)).unwrap() else {
            panic!("it ends")
        };
        assert_eq!(status.code(), Some(7));
        assert_eq!(fs::read_to_string(&out).unwrap(), format!("device-fault|{hostile}"));
        let slow = put(scratch.path(), "slow", 0o755, "#!/bin/sh\nsleep 1000 &\nsleep 1000\n");
        assert!(matches!(run(&slow, "x", &[], Duration::from_millis(50)), Ok(Ended::Late)));
        assert!(run(&scratch.path().join("missing"), "x", &[], Duration::ZERO).is_err());
    }
}
