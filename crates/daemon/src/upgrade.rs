//! `nacre upgrade`: another program goes on with mounts that outlive their process, those of pools among
//! them, while they are used.
//!
//! The program that is to go on is the one that runs the command, or another one that is named. It is
//! started, and looks at what each mount would leave to it ([`crate::asked`]) before any is touched. Then, one after the other, it has the process
//! that serves a mount note its path, and calls the guardian, which kills that process, becomes the
//! new program with the same number and descriptors, and makes the next worker: as after any death
//! ([`crate::guardian`]).

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

/// How long a mount may take until the new program serves it.
const PATIENCE: Duration = Duration::from_secs(20);
/// How often is looked whether it does.
const LOOK: Duration = Duration::from_millis(10);

/// Carries out the command on these mounts, or on all of the user's; what to tell him. Without a
/// program, this one is to go on.
///
/// # Errors
/// A mount that the program cannot go on with; then none has been touched. One that it did not come
/// to serve; those before it have been upgraded.
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
        // All mounts of a pool have the same.
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
        // It has no socket yet at the first looks: those who keep silent are not waited for then.
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
