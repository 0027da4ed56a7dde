//! `nacre upgrade`: another program takes over mounts that survive their process, including those of pools, while
//! they are in use.
//!
//! The new program is the one that runs the command, or another one that is named. It is started, and checks the
//! handoff state of each mount ([`crate::asked`]) before any mount is changed. Then, one mount after the other, the
//! serving process records the program's path, and the supervisor is signalled: it kills the serving process,
//! becomes the new program by exec, with the same process id and descriptors, and makes the next worker, as after
//! any crash ([`crate::guardian`]).

use crate::{
    asked, clock,
    control::{self, Answer, Peer, Request},
    failure::{Exit, Failure},
    figures,
    report::{Report, path_text, printable},
    runtime::Whose,
};
use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Duration,
};

/// Deadline for the new program to serve a mount.
const PATIENCE: Duration = Duration::from_secs(20);
/// Interval of polling.
const LOOK: Duration = Duration::from_millis(10);

/// Carries out the command on these mounts, or on all of the user's; returns messages for the user. Without
/// `program`, this one takes over.
///
/// # Errors
/// A mount that the program cannot take over; then none has been changed. Or a mount that it does not serve in
/// time; those before it have been upgraded.
pub fn run(mountpoints: &[PathBuf], program: Option<&Path>) -> Result<Vec<String>, Failure> {
    let program = match program {
        Some(program) => {
            fs::canonicalize(program).map_err(|error| Failure::io("cannot find", path_text(program), &error))?
        }
        None => fs::read_link("/proc/self/exe").map_err(|error| Failure::io("cannot find", "this program", &error))?,
    };
    let named = !mountpoints.is_empty();
    let peers = if named { control::at(mountpoints)? } else { control::find(&Whose::Ours).peers };
    let (mut due, mut lines): (Vec<(Peer, u32)>, _) = (Vec::new(), Vec::new());
    for peer in peers {
        let place = printable(peer.report.mountpoint.as_bytes());
        if runs(peer.report.pid, &program) {
            continue;
        }
        let Some(survives) = &peer.report.survives else {
            let of_pool = peer.report.stack.starts_with(figures::OF_POOL);
            let (how, next) = match of_pool {
                true => ("its pool was imported without --survive", "export the pool and import it again"),
                false => ("it was mounted without --survive", "unmount it and mount it again"),
            };
            let what = format!("{place} keeps the program that serves it: {how}");
            match named {
                true => return Err(Failure::new(what).next(next)),
                false => lines.push(what),
            }
            continue;
        };
        let cannot = |why: &str| Failure::new(format!("cannot go on with {place}: {why}; no mount has been touched"));
        if let Some(why) = &survives.why_not {
            return Err(cannot(why));
        }
        let guardian = survives.guardian.ok_or_else(|| cannot("its guardian is gone"))?;
        // All mounts of a pool have the same supervisor.
        if due.iter().any(|(_, known)| *known == guardian) {
            continue;
        }
        let Answer::HandOver(handed) = peer.ask(&Request::HandOver)? else {
            return Err(cannot("its process answers something else"));
        };
        asked::ask(&program, &handed).map_err(|failure| cannot(&failure.what))?;
        due.push((peer, guardian));
    }
    due.into_iter().try_for_each(|(peer, guardian)| one(&peer, guardian, &program))?;
    Ok(lines)
}

/// Whether a process runs this very program.
fn runs(process: u32, program: &Path) -> bool {
    let identity = |path: &Path| fs::metadata(path).ok().map(|file| (file.dev(), file.ino()));
    let its = identity(program);
    its.is_some() && identity(Path::new(&format!("/proc/{process}/exe"))) == its
}

fn one(peer: &Peer, guardian: u32, program: &Path) -> Result<(), Failure> {
    let place = printable(peer.report.mountpoint.as_bytes());
    peer.ask(&Request::Upgrade { program: program.to_owned() })?;
    nacre_sys::worker::call_of_user(guardian, peer.report.uid)
        .map_err(|error| Failure::io("cannot call", format!("process {guardian}, the guardian of {place}"), &error))?;
    let of_it = |report: &Report| {
        report.mountpoint == peer.report.mountpoint
            && report.pid != peer.report.pid
            && report.survives.as_ref().is_some_and(|now| now.guardian == Some(guardian))
    };
    let mut patience = LOOK;
    let mut next = || {
        // It has no socket yet at the first attempts: silent processes are not waited for then.
        patience = (patience * 2).min(control::STATUS_PATIENCE);
        let peers = control::find_until(&Whose::Ours, patience, &mut |report| of_it(report)).peers.into_iter();
        peers.map(|peer| peer.report).find(of_it)
    };
    let mut now = None;
    clock::look_until(PATIENCE, LOOK, || {
        now = next();
        now.is_some()
    });
    match now {
        Some(report) if runs(report.pid, program) => Ok(()),
        Some(_) => {
            let what =
                format!("{place} goes on with the program that it had: {} could not be started", path_text(program));
            Err(Failure::new(what))
        }
        None => Err(Failure::new(format!("{place} is served by no other process after {} s", PATIENCE.as_secs()))
            .exit(Exit::Failure)
            .next(format!("nacre status {place}"))),
    }
}
